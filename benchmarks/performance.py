"""The benchmarks `forward_performance` and `backward_performance`: dynamic mask attention and SDPA
by their sizes, and the rows of the original's tables on this machine.

As in the original's programs, a time of --original is between two synchronizations of the device,
and the mask and the bias of every pair are made beforehand, in the dtype of the query.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple

import flash_dmattn
import torch
from benchmarking import (
    MS,
    QUICK,
    USUAL,
    Column,
    Disagreement,
    Rounds,
    Row,
    Table,
    alternate,
    choose_device,
    collect,
    find_machine,
    kept,
    median_ratio,
    summary,
    time_pass,
    time_wall,
    write_whole,
)
from commands import ORIGINAL_HEAD_DIMS, WINDOW
from definition_cases import Case, Inputs, choose_dtype
from torch.nn.functional import scaled_dot_product_attention

LENGTHS = {"cuda": (1024, 2048, 4096, 8192, 16384), "cpu": (512, 1024, 2048, 4096)}
SIZES = ("lengths", "windows", "q_len", "batch", "heads")  # that the original's tables have
PAIRS_AT_ONCE = 1 << 26  # pairs of queries and keys that are ranked at once

Runs = Dict[str, Callable[[], torch.Tensor]]


# ---- both ----


def best_keys(score: torch.Tensor, window: int, q_len: int | None = None) -> torch.Tensor:
    """The keys that each of the last q_len queries (None: all) keeps among those up to its
    position: bool [batch, kv_heads, q_len, kv_len]. Of equal scores the later key is kept."""
    batch, kv_heads, kv_len = score.shape
    q_len = kv_len if q_len is None else q_len
    # The rank of each key in a stable order. topk() breaks ties differently, and ranks have no
    # ties.
    rank = score.argsort(dim=-1, stable=True).argsort().to(torch.int32)[:, :, None]
    key = torch.arange(kv_len, device=score.device)
    kept = torch.empty(batch, kv_heads, q_len, kv_len, dtype=torch.bool, device=score.device)
    step = max(1, PAIRS_AT_ONCE // (batch * kv_heads * kv_len))
    for begin in range(0, q_len, step):
        query = torch.arange(begin, min(begin + step, q_len), device=score.device)
        rows = visible = (key <= query[:, None] + kv_len - q_len).expand(batch, kv_heads, -1, -1)
        if window < kv_len:
            best = rank.where(visible, -1).topk(window, sorted=False).indices
            rows = torch.zeros_like(visible).scatter(-1, best, True) & visible
        kept[:, :, begin : begin + step] = rows
    return kept


def require_equal(
    inputs: Inputs, found: torch.Tensor, other: torch.Tensor, logits: float = 0.0
) -> None:
    """Raise Disagreement unless two peers' outputs are equal within rounding: of weights and of
    outputs, of sums in float32, and of logits, which differ by up to `logits`."""
    error = (found.double() - other.double()).abs().max().item()
    sums = inputs.case.kv_len**0.5 * torch.finfo(torch.float32).eps
    relative = 4 * torch.finfo(found.dtype).eps + sums + 2 * logits
    allowed = relative * inputs.value.abs().max().item()
    if not error <= allowed:  # written so that NaN fails
        name = inputs.case.name
        raise Disagreement(f"{name}: outputs differ by {error:.3g}, allowed {allowed:.3g}")


def sdpa(rows: tuple[torch.Tensor, ...], **options: Any) -> torch.Tensor:
    swapped = [x.transpose(1, 2) for x in rows]
    return scaled_dot_product_attention(*swapped, enable_gqa=True, **options).transpose(1, 2)


def dense_options(inputs: Inputs) -> dict[str, Any]:
    """Options of SDPA with which every query attends to all keys up to its position."""
    q_len, kv_len = inputs.case.q_len, inputs.case.kv_len
    if q_len in (1, kv_len):
        return {"is_causal": q_len > 1}
    mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=inputs.device)
    return {"attn_mask": mask.tril(kv_len - q_len)}  # is_causal aligns queries with the first keys


# ---- by sizes ----


def peers_of(inputs: Inputs, training: bool) -> Runs:
    """Attention to the same keys by three functions, and attention to all keys."""
    leaves = tuple(x.requires_grad_(training) for x in inputs.rows)
    window = inputs.case.window
    score, _ = flash_dmattn.score(inputs.value, *inputs.weights)
    kept = best_keys(score, window, inputs.case.q_len)
    mask = kept.repeat_interleave(inputs.case.q_heads // inputs.case.kv_heads, 1)
    dense = dense_options(inputs)
    forward: Runs = {
        "flash_dma_attention": lambda: flash_dmattn.flash_dma_attention(
            *leaves, *inputs.weights, keep_window_size=window, causal=True, bias_form="none"
        ),
        "flash_dmattn_func": lambda: flash_dmattn.flash_dmattn_func(*leaves, kept, is_causal=True),
        "SDPA, mask": lambda: sdpa(leaves, attn_mask=mask),
        "SDPA, all keys": lambda: sdpa(leaves, **dense),
    }
    if not training:
        return forward

    def step(run: Callable[[], torch.Tensor]) -> torch.Tensor:
        out = run()
        torch.autograd.grad(out, leaves, inputs.dout)
        return out

    return {name: functools.partial(step, run) for name, run in forward.items()}


def measure(case: Case, args: argparse.Namespace) -> Iterator[Row]:
    """Run every peer once in each round.

    Raises:
        Disagreement: peers that attend to the same keys have different outputs.
    """
    inputs = Inputs(case, args.device, choose_dtype(args))
    peers = peers_of(inputs, args.training)
    same = [run() for name, run in peers.items() if name != "SDPA, all keys"]
    for other in same[1:]:
        require_equal(inputs, same[0], other)
    timers = {name: lambda run=run: time_pass(run, args.device) for name, run in peers.items()}
    times = alternate(timers, QUICK if args.quick else USUAL)
    for name, own in times.items():
        ratio = median_ratio(own, times["flash_dma_attention"])
        yield {"case": case.name, "peer": name, **summary(own), "times": ratio}


def cases_of_sizes(args: argparse.Namespace) -> Iterator[Case]:
    for length in args.lengths:
        for window in args.windows:
            for head_dim in args.head_dim:
                q_len = args.q_len or length
                yield Case("", args.batch, *args.heads, head_dim, q_len, length, window)


# ---- the original's tables ----

ORIGINAL = Rounds(5, 40, 0.25)  # of each of many cases
HEADS = (2, 1)
# Peers, by their names in rows
FUSED, GIVEN, MASKED, DENSE = "fused", "given", "sdpa-mask", "sdpa"
NO_MEMORY = "does not fit into memory"
# Bytes for each pair of a query and a key: the mask, the bias, and SDPA's copies of them
PAIR_BYTES = 24


class Published(NamedTuple):
    """A row of the original's tables."""

    q_len: int
    kv_len: int
    window: int
    sdpa_ms: float
    fdma_ms: float
    times: float  # its speed-up, rounded after division


def read_tables() -> dict[str, list[Published]]:
    """The tables of the original's README: its own measurements in bfloat16, for one sequence, 2
    query heads, 1 kv head and head_dim 128. SDPA gets the causal mask as a tensor added to logits;
    FDMA gets a mask and a bias of every pair."""
    found: dict[str, list[Published]] = {"forward": [], "backward": []}
    text = Path(__file__).with_name("original_tables.json").read_text()
    _, *rows = map(json.loads, text.splitlines())
    for row in rows:
        found[row.pop("direction")].append(Published(**row))
    return found


class Peer(NamedTuple):
    run: Callable[[], torch.Tensor]
    leaves: tuple[torch.Tensor, ...]  # whose gradients a backward call computes


def make_cases(direction: str, head_dims: list[int], divide: int) -> list[tuple[Case, Published]]:
    """The rows of a table for each head_dim, with lengths and windows divided by `divide`. The
    names of cases distinguish rows of many lengths from rows of many windows, which have one row in
    common."""
    found, rows = [], read_tables()[direction]
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

    def given() -> torch.Tensor:
        return flash_dmattn.flash_dmattn_func(*rows, mask, bias, is_causal=True)

    masked = functools.partial(sdpa, rows, attn_mask=added)
    return {GIVEN: Peer(given, (*rows, bias)), MASKED: Peer(masked, rows)}


def original_peers(inputs: Inputs, training: bool) -> dict[str, Peer]:
    """The peers whose tensors fit in memory."""
    rows = tuple(x.requires_grad_(training) for x in inputs.rows)
    weights = tuple(x.requires_grad_(training) for x in inputs.weights)
    # A single query is the last one: it sees all keys, which are ranked once.
    rules = {"causal": inputs.case.q_len > 1}

    def fused() -> torch.Tensor:
        return flash_dmattn.flash_dma_attention(
            *rows, *weights, keep_window_size=inputs.case.window, **rules
        )

    found = {FUSED: Peer(fused, (*rows, *weights))}
    if fits(inputs.case, inputs.device):
        found.update(masked_peers(inputs, rows, training))
    dense = functools.partial(sdpa, rows, **dense_options(inputs))
    return {**found, DENSE: Peer(dense, rows)}


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


def compare(row: Row, masked_ms: float | None, ratio: float, published: Published) -> None:
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


def measure_original(case: Case, published: Published, args: argparse.Namespace) -> Iterator[Row]:
    """A row for each peer. In each round every peer runs once.

    Raises:
        Disagreement: peers that attend to the same keys have different outputs.
    """
    inputs = Inputs(case, args.device, choose_dtype(args))
    runs = check_peers(inputs, original_peers(inputs, args.training))
    timers = {name: lambda run=run: time_wall(run, args.device) for name, run in runs.items()}
    times = alternate(timers, QUICK if args.quick else ORIGINAL)
    measured = {name: summary(own) for name, own in times.items()}
    for name in (FUSED, GIVEN, MASKED, DENSE):
        row: Row = {"case": case.name, "peer": name}
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


def describe(rows: list[Row]) -> str:
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


# ---- the program ----


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse contradictory sizes, and fill in missing ones."""
    error = args.parser.error
    given = [name for name in SIZES if getattr(args, name) is not None]
    if args.original and given:
        error(f"--{given[0].replace('_', '-')}: is given, want none with --original")
    if args.divide is not None and not args.original:
        error("--divide: is given, want none without --original")
    args.head_dim = args.head_dim or (list(ORIGINAL_HEAD_DIMS) if args.original else [64])
    for size in args.head_dim:
        if size % 8 or size > 256:
            error(f"--head-dim: is {size}, want a multiple of 8 up to 256")
    args.lengths = args.lengths or LENGTHS[args.device]
    args.windows, args.batch = args.windows or [WINDOW], args.batch or 1
    args.heads = args.heads or [8, 2]
    if args.heads[0] % args.heads[1]:
        error(f"--heads: is {args.heads[0]}, want a multiple of {args.heads[1]}, the kv heads")
    if args.q_len is not None and args.q_len > min(args.lengths):
        error(f"--q-len: is {args.q_len}, want at most --lengths, {min(args.lengths)}")


def run(args: argparse.Namespace) -> int:
    choose_device(args)
    check_arguments(args)
    direction = args.name.partition("_")[0]
    args.training = direction == "backward"
    table = Table(40, 20, *MS, Column("times", "times", "7.3f"))
    if args.original:
        cases = [
            (case.name, functools.partial(measure_original, case, row, args))
            for case, row in make_cases(direction, args.head_dim, args.divide or 1)
        ]
        header, show = HEADER, lambda rows: print(describe(rows), flush=True)
    else:
        sizes = cases_of_sizes(args)
        cases = [(case.name, functools.partial(measure, case, args)) for case in sizes]
        header, show = table.head(), table.show
    name = f"{direction}-{'original' if args.original else 'performance'}-{args.device}.json"
    machine = {**find_machine(args.device), "dtype": str(choose_dtype(args)).split(".")[1]}
    path = args.out and args.out / name
    print(header)
    with torch.set_grad_enabled(args.training), kept(path, machine) as lines:

        def show_and_write(rows: list[Row]) -> None:
            show(rows)
            if path:
                write_whole(path, lines)

        return collect(args, cases, lines, show_and_write)
