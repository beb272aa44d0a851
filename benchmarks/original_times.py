"""The rows of the original's tables, on this machine: forward_performance.py --original and
backward_performance.py --original.

As in the original's programs, a time is between two synchronizations of the device, and the mask
and the bias of every pair are made beforehand, in the dtype of the query.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Callable, Dict, NamedTuple

import flash_dmattn
import torch
from benchmarking import Rounds, alternate, median_ratio, summary, time_wall
from definition_cases import Case, Inputs
from definition_times import best_keys, dense_options, require_equal
from original_tables import BACKWARD, FORWARD, Published
from torch.nn.functional import scaled_dot_product_attention

HEADS = (2, 1)
# Peers, by their names in rows
FUSED, GIVEN, MASKED, DENSE = "fused", "given", "sdpa-mask", "sdpa"
NO_MEMORY = "does not fit into memory"
# Bytes for each pair of a query and a key: the mask, the bias, and SDPA's copies of them
PAIR_BYTES = 24

Runs = Dict[str, Callable[[], torch.Tensor]]


class Peer(NamedTuple):
    run: Callable[[], torch.Tensor]
    leaves: tuple[torch.Tensor, ...]  # whose gradients a backward call computes


def make_cases(training: bool, head_dims: list[int], divide: int) -> list[tuple[Case, Published]]:
    """The rows of a table for each head_dim, with lengths and windows divided by `divide`. The
    names of cases distinguish rows of many lengths from rows of many windows, which have one row in
    common."""
    found, rows = [], BACKWARD if training else FORWARD
    for head_dim in head_dims:
        for before, row in zip((None, *rows), rows):
            what = "windows" if before is not None and before.kv_len == row.kv_len else "lengths"
            q_len = max(row.q_len // divide, 1)
            kv_len, window = (max(x // divide, 1) for x in (row.kv_len, row.window))
            found.append((Case(what, 1, *HEADS, head_dim, q_len, kv_len, window), row))
    return found


def free_memory(device: str) -> int:
    if device == "cuda":
        torch.cuda.empty_cache()  # memory of the case before
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def fits(case: Case, device: str) -> bool:
    """True if masks of every pair fit in memory."""
    pairs = case.batch * case.q_heads * case.q_len * case.kv_len
    return PAIR_BYTES * pairs <= free_memory(device)


@torch.no_grad()
def scores_of(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and the biases exp(score), [batch, kv_heads, kv_len]."""
    return flash_dmattn.score(inputs.value, *inputs.weights)


def masked_peers(inputs: Inputs, rows: tuple[torch.Tensor, ...], training: bool) -> dict[str, Peer]:
    """The calls with a mask and a bias of every pair. Both attend to the same keys."""
    score, bias = scores_of(inputs)
    kept = best_keys(score, inputs.case.window, inputs.case.q_len)
    lowest = torch.finfo(inputs.dtype).min
    bias = bias[:, :, None].to(inputs.dtype).where(kept, lowest)
    mask = kept.to(inputs.dtype)
    del kept
    added, bias = bias, bias.detach().requires_grad_(training)  # 1 kv head, which SDPA broadcasts

    def sdpa() -> torch.Tensor:
        swapped = (x.transpose(1, 2) for x in rows)
        out = scaled_dot_product_attention(*swapped, attn_mask=added, enable_gqa=True)
        return out.transpose(1, 2)

    def given() -> torch.Tensor:
        return flash_dmattn.flash_dmattn_func(*rows, mask, bias, is_causal=True)

    return {GIVEN: Peer(given, (*rows, bias)), MASKED: Peer(sdpa, rows)}


def peers_of(inputs: Inputs, training: bool) -> dict[str, Peer]:
    """The peers whose tensors fit in memory."""
    rows = tuple(x.requires_grad_(training) for x in inputs.rows)
    weights = tuple(x.requires_grad_(training) for x in inputs.weights)
    dense = dense_options(inputs)
    # A single query is the last one: it sees all keys, which are ranked once.
    rules = {"causal": True} if inputs.case.q_len > 1 else {"causal": False}

    def fused() -> torch.Tensor:
        return flash_dmattn.flash_dma_attention(
            *rows, *weights, keep_window_size=inputs.case.window, **rules
        )

    def sdpa() -> torch.Tensor:
        swapped = (x.transpose(1, 2) for x in rows)
        return scaled_dot_product_attention(*swapped, enable_gqa=True, **dense).transpose(1, 2)

    found = {FUSED: Peer(fused, (*rows, *weights))}
    if fits(inputs.case, inputs.device):
        found.update(masked_peers(inputs, rows, training))
    return {**found, DENSE: Peer(sdpa, rows)}


def check_peers(inputs: Inputs, peers: dict[str, Peer]) -> Runs:
    """The timed part of each peer that fits in memory: the call, or its gradients.

    Raises:
        Disagreement: outputs that should be equal are not.
    """
    found: Runs = {}
    outs: dict[str, torch.Tensor] = {}
    for name, peer in peers.items():
        try:
            out = peer.run()
            run = peer.run
            if out.requires_grad:

                def run(out: torch.Tensor = out, peer: Peer = peer) -> Any:
                    return torch.autograd.grad(out, peer.leaves, inputs.dout, retain_graph=True)

                run()
        except torch.cuda.OutOfMemoryError:
            continue
        found[name], outs[name] = run, out.detach()
    largest = scores_of(inputs)[1].max().item()
    # The bias is rounded to the dtype of the query.
    rounding = torch.finfo(inputs.dtype).eps / 2 * largest
    for name in (GIVEN, MASKED):
        if name in outs:
            require_equal(inputs, outs[FUSED], outs[name], rounding)
    return found


def compare(
    row: dict[str, Any], masked_ms: float | None, ratio: float, published: Published
) -> None:
    """Put the original's speed-up into the row of one of our calls, and whether ours reaches it.
    Both are ratios to SDPA under a mask."""
    row["goal"] = published.times
    if masked_ms is None:
        row["reason"] = f"SDPA with a mask of every pair {NO_MEMORY}"
        return
    row["ratio"], row["met"] = ratio, ratio >= published.times
    if not row["met"]:
        base, own = published.sdpa_ms / masked_ms, published.fdma_ms / row["ms"]
        row["reason"] = f"times as fast as the original's: SDPA {base:.2g}, ours {own:.2g}"


def measure(
    case: Case,
    published: Published,
    training: bool,
    device: str,
    dtype: torch.dtype,
    rounds: Rounds,
) -> Iterator[dict[str, Any]]:
    """A row for each peer. In each round every peer runs once.

    Raises:
        Disagreement: peers that attend to the same keys have different outputs.
    """
    inputs = Inputs(case, device, dtype)
    runs = check_peers(inputs, peers_of(inputs, training))
    timers = {name: lambda run=run: time_wall(run, device) for name, run in runs.items()}
    times = alternate(timers, rounds)
    measured = {name: summary(own) for name, own in times.items()}
    for name in (FUSED, GIVEN, MASKED, DENSE):
        row: dict[str, Any] = {"case": case.name, "peer": name}
        if name not in times:
            yield {**row, "reason": NO_MEMORY}
            continue
        row.update(measured[name], times=median_ratio(times[name], times[FUSED]))
        if name in (FUSED, GIVEN):
            ratio = median_ratio(times[MASKED], times[name]) if MASKED in times else 0.0
            masked_ms = measured[MASKED]["ms"] if MASKED in times else None
            compare(row, masked_ms, ratio, published)
        yield row


HEADER = (
    f"{'case':42} {'fused':>9} {'given':>9} {'masked':>9} {'dense':>9} "
    f"{'fused x':>8} {'given x':>8} {'dense x':>8} {'original':>8}  at least that"
)


def describe(rows: list[dict[str, Any]]) -> str:
    """A line of the table, with the columns of HEADER."""
    fused, given, _, dense = rows
    numbers = [f"{row['ms']:9.3f}" if "ms" in row else f"{'-':>9}" for row in rows]
    ratios = (fused.get("ratio"), given.get("ratio"), dense.get("times"))
    numbers += [f"{'-':>8}" if x is None else f"{x:8.2f}" for x in ratios]
    met = {True: "yes", False: "no", None: "unknown"}
    words = []
    for row in (fused, given):
        reason = f" ({row['reason']})" if "reason" in row else ""
        words.append(f"{row['peer']}: {met[row.get('met')]}{reason}")
    return " ".join([f"{fused['case']:42}", *numbers, f"{fused['goal']:8.2f} ", "; ".join(words)])
