"""Times of dynamic mask attention and of SDPA, for forward_performance.py and
backward_performance.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable, Dict, NamedTuple

import flash_dmattn
import torch
from benchmarking import Disagreement, Rounds, alternate, median_ratio, summary, time_pass
from definition_cases import Inputs
from torch.nn.functional import scaled_dot_product_attention

PAIRS_AT_ONCE = 1 << 26  # pairs of queries and keys that are ranked at once

Peers = Dict[str, Callable[[], torch.Tensor]]


class Row(NamedTuple):
    case: str
    peer: str
    ms: float
    spread: float  # (90th - 10th percentile) / median
    times: float  # median of the ratios to flash_dma_attention


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


def dense_options(inputs: Inputs) -> dict[str, Any]:
    """Options of SDPA with which every query attends to all keys up to its position."""
    q_len, kv_len = inputs.case.q_len, inputs.case.kv_len
    if q_len in (1, kv_len):
        return {"is_causal": q_len > 1}
    mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=inputs.device)
    return {"attn_mask": mask.tril(kv_len - q_len)}  # is_causal aligns queries with the first keys


def peers_of(inputs: Inputs, training: bool) -> Peers:
    """Attention to the same keys by three functions, and attention to all keys."""
    leaves = [x.requires_grad_(training) for x in inputs.rows]
    swapped = [x.transpose(1, 2) for x in leaves]
    group = inputs.case.q_heads // inputs.case.kv_heads
    window = inputs.case.window
    score, _ = flash_dmattn.score(inputs.value, *inputs.weights)
    kept = best_keys(score, window, inputs.case.q_len)
    mask, dense = kept.repeat_interleave(group, 1), dense_options(inputs)

    def sdpa(**options: object) -> torch.Tensor:
        return scaled_dot_product_attention(*swapped, enable_gqa=True, **options).transpose(1, 2)

    forward: Peers = {
        "flash_dma_attention": lambda: flash_dmattn.flash_dma_attention(
            *leaves, *inputs.weights, keep_window_size=window, causal=True, bias_form="none"
        ),
        "flash_dmattn_func": lambda: flash_dmattn.flash_dmattn_func(*leaves, kept, is_causal=True),
        "SDPA, mask": lambda: sdpa(attn_mask=mask),
        "SDPA, all keys": lambda: sdpa(**dense),
    }
    if not training:
        return forward

    def step(run: Callable[[], torch.Tensor]) -> torch.Tensor:
        out = run()
        torch.autograd.grad(out, leaves, inputs.dout)
        return out

    return {name: (lambda run=run: step(run)) for name, run in forward.items()}


def measure(inputs: Inputs, training: bool, device: str, rounds: Rounds) -> Iterator[Row]:
    """Run every peer once in each round.

    Raises:
        Disagreement: peers that attend to the same keys have different outputs.
    """
    peers = peers_of(inputs, training)
    same = [run() for name, run in peers.items() if name != "SDPA, all keys"]
    for other in same[1:]:
        require_equal(inputs, same[0], other)
    timers = {name: lambda run=run: time_pass(run, device) for name, run in peers.items()}
    times = alternate(timers, rounds)
    for name, own in times.items():
        ratio = median_ratio(own, times["flash_dma_attention"])
        yield Row(inputs.case.name, name, **summary(own), times=ratio)
