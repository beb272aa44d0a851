"""Times of dynamic mask attention and of SDPA, for forward_performance.py and
backward_performance.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Callable, Dict, NamedTuple

import flash_dmattn
import torch
from decode import time_pass
from definition_cases import Inputs, choose_dtype, square
from definition_run import make_parser, parse
from peers_common import QUICK, USUAL, Disagreement, Rounds, quantiles
from script import alternate
from torch.nn.functional import scaled_dot_product_attention

LENGTHS = {"cuda": (1024, 2048, 4096, 8192, 16384), "cpu": (512, 1024, 2048, 4096)}
WINDOW = 1024

Peers = Dict[str, Callable[[], torch.Tensor]]


class Row(NamedTuple):
    length: int
    peer: str
    ms: float
    spread: float  # (90th - 10th percentile) / median
    times: float  # median of the ratios to flash_dma_attention


def best_keys(score: torch.Tensor, window: int) -> torch.Tensor:
    """Which keys each query keeps of those up to its position: bool [batch, kv_heads, len, len].
    Scores have no ties."""
    length = score.shape[-1]
    visible = torch.ones(length, length, dtype=torch.bool, device=score.device).tril()
    ranked = score[:, :, None].expand(-1, -1, length, -1).masked_fill(~visible, float("-inf"))
    best = ranked.topk(min(window, length), dim=-1).indices
    return torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, best, True) & visible


def require_equal(inputs: Inputs, found: torch.Tensor, other: torch.Tensor) -> None:
    """Raise Disagreement unless two peers' outputs are equal but for rounding: of weights and of
    outputs, and of sums in float32."""
    error = (found.double() - other.double()).abs().max().item()
    sums = inputs.case.kv_len**0.5 * torch.finfo(torch.float32).eps
    allowed = (4 * torch.finfo(found.dtype).eps + sums) * inputs.value.abs().max().item()
    if not error <= allowed:  # written so that NaN fails
        name = inputs.case.name
        raise Disagreement(f"{name}: outputs differ by {error:.3g}, allowed {allowed:.3g}")


def peers_of(inputs: Inputs, training: bool) -> Peers:
    """Attention to the same keys by three functions, and to all keys."""
    leaves = [x.requires_grad_(training) for x in inputs.rows]
    swapped = [x.transpose(1, 2) for x in leaves]
    group = inputs.case.q_heads // inputs.case.kv_heads
    window = inputs.case.window
    kept = best_keys(flash_dmattn.score(inputs.value, *inputs.weights)[0], window)
    mask = kept.repeat_interleave(group, 1)

    def sdpa(**options: object) -> torch.Tensor:
        return scaled_dot_product_attention(*swapped, enable_gqa=True, **options).transpose(1, 2)

    forward: Peers = {
        "flash_dma_attention": lambda: flash_dmattn.flash_dma_attention(
            *leaves, *inputs.weights, keep_window_size=window, causal=True, bias_form="none"
        ),
        "flash_dmattn_func": lambda: flash_dmattn.flash_dmattn_func(*leaves, kept, is_causal=True),
        "SDPA, mask": lambda: sdpa(attn_mask=mask),
        "SDPA, all keys": lambda: sdpa(is_causal=True),
    }
    if not training:
        return forward

    def step(run: Callable[[], torch.Tensor]) -> torch.Tensor:
        out = run()
        torch.autograd.grad(out, leaves, inputs.dout)
        return out

    return {name: (lambda run=run: step(run)) for name, run in forward.items()}


def measure(inputs: Inputs, training: bool, device: str, rounds: Rounds) -> Iterator[Row]:
    """In each round every peer runs once.

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
        low, median, high = quantiles(own)
        ratios = [x / base for x, base in zip(own, times["flash_dma_attention"])]
        spread = (high - low) / median
        yield Row(inputs.case.kv_len, name, median, spread, quantiles(ratios)[1])


def run_performance(
    program: str, document: str | None, training: bool, arguments: list[str] | None
) -> int:
    """Time every length. Exit status: 0 done; 1 wrong outputs; 2 bad usage."""
    parser = make_parser(program, document)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--lengths", type=int, nargs="+", help="numbers of queries and keys")
    parser.add_argument("--window", type=int, default=WINDOW, help="keys that a query keeps")
    args = parse(parser, arguments)
    print(f"{'keys':>6} {'peer':20} {'ms':>10} {'spread':>7} {'times':>7}")
    for length in args.lengths or LENGTHS[args.device]:
        case = square(1, 8, 2, 64, length, args.window)
        inputs = Inputs(case, args.device, choose_dtype(args))
        try:
            for row in measure(inputs, training, args.device, QUICK if args.quick else USUAL):
                print("{:6} {:20} {:10.3f} {:7.3f} {:7.3f}".format(*row), flush=True)
        except Disagreement as error:
            print(f"{program}: {error}", file=sys.stderr)
            return 1
    return 0
