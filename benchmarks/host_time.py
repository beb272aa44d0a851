#!/usr/bin/env python3
"""Time what the host does in an eager call of PyTorch, beside scaled_dot_product_attention().

The tensors are so small that the host's time dominates. It runs on a CUDA device, or with --device
cpu on one thread of the CPU, with flash_dmattn installed, or with PYTHONPATH=python and
FDMA_LIBRARY=build/libfdma.so:

    python benchmarks/host_time.py --out FOLDER

FOLDER gets host_time-cuda.json or host_time-cpu.json. In each round every peer of a case makes a
few calls, so few that a device's queue does not fill up, and the device is idle when they begin.
Exit status: 0 done; 1 wrong outputs or a file that could not be written; 2 bad usage.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator
from typing import Any, Callable

import program
from arguments import Parser, make_parser

Q_HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
KEYS, WINDOW = 8, 4
MORE = f"""
All: batch 1, {Q_HEADS} query heads, {KV_HEADS} kv heads, head_dim {HEAD_DIM}, {KEYS} keys, causal
Cases:
  no-gradients  flash_dma_attention() of inputs that require no gradient, window {WINDOW}
  recording     the same of inputs that do
  backward      torch.autograd.grad() of such a call
  dense         attention() without a selection and without gradients
  decode        DynamicMaskCache.attend() of one token
Peers:
  fdma          these calls
  sdpa          scaled_dot_product_attention() with as many kv heads as query heads: in decode, of
                one query over {WINDOW} keys
Columns: us, the median of the rounds for each call; spread, (90th - 10th percentile) / median;
times, the median of the rounds' ratios to fdma; of sdpa, that of fdma's ratios to sdpa, which has
goals on a CUDA device.
"""


def own_parser() -> Parser:
    return make_parser("host_time.py", __doc__, MORE)


if __name__ == "__main__":
    program.begin(own_parser().parse_args)

import flash_dmattn
import torch
from benchmarking import (
    QUICK,
    Rounds,
    alternate,
    make_rows,
    median_ratio,
    parse,
    require_close,
    write_rows,
)
from peers_cuda_cases import Goal
from torch.nn.functional import scaled_dot_product_attention

CALLS = 20  # of a peer in a round; the queue of a device holds far more kernels
HOST_ROUNDS = Rounds(100, 2000, 3.0)  # each takes well under a millisecond
# For fdma on a CUDA device. On the CPU a call also computes, so there are no goals.
GOALS = {
    "no-gradients": Goal("of_sdpa", 0.8),
    "recording": Goal("of_sdpa", 1.2),
    "backward": Goal("of_sdpa", 1.2),
}
Peers = dict[str, Callable[[], Any]]


class Inputs:
    def __init__(self, device: str, needs_gradients: bool) -> None:
        torch.manual_seed(KEYS)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        new = {"device": device, "dtype": dtype}
        query = torch.randn(1, KEYS, Q_HEADS, HEAD_DIM, **new)
        key, value = (torch.randn(1, KEYS, KV_HEADS, HEAD_DIM, **new) for _ in "kv")
        dt_proj = torch.randn(KV_HEADS, KV_HEADS * HEAD_DIM, **new) / HEAD_DIM
        a_coef = torch.ones(KV_HEADS, **new)
        group = Q_HEADS // KV_HEADS
        expanded = [query, *(x.repeat_interleave(group, 2) for x in (key, value))]
        self.fdma = self.leaves((query, key, value, dt_proj, a_coef), needs_gradients)
        self.sdpa = self.leaves([x.transpose(1, 2) for x in expanded], needs_gradients)
        self.dout = torch.randn_like(query)

    @staticmethod
    def leaves(tensors: Any, needs_gradients: bool) -> list[torch.Tensor]:
        return [x.detach().requires_grad_(needs_gradients) for x in tensors]

    def fused(self, window: int = WINDOW, **options: Any) -> torch.Tensor:
        return flash_dmattn.flash_dma_attention(*self.fdma, window, causal=True, **options)

    def dense(self) -> torch.Tensor:
        return flash_dmattn.attention(*self.fdma[:3], causal=True)[0]

    def padded(self) -> torch.Tensor:
        return scaled_dot_product_attention(*self.sdpa, is_causal=True)


def make_decode(inputs: Inputs) -> Peers:
    query, key, value, *weights = inputs.fdma
    cache = flash_dmattn.DynamicMaskCache(
        1, 1, KV_HEADS, HEAD_DIM, WINDOW, recent=0, dtype=key.dtype, device=key.device
    )
    token = [x[:, :1] for x in (query, key, value)]
    dense = [x[:, :, :length] for x, length in zip(inputs.sdpa, (1, WINDOW, WINDOW))]
    return {
        "fdma": lambda: cache.attend(0, *token, *weights),
        "sdpa": lambda: scaled_dot_product_attention(*dense),
    }


def make_cases(device: str) -> dict[str, Peers]:
    """The peers of each case except backward."""
    plain, learned = Inputs(device, False), Inputs(device, True)
    return {
        "no-gradients": {"fdma": plain.fused, "sdpa": plain.padded},
        "recording": {"fdma": learned.fused, "sdpa": learned.padded},
        "dense": {"fdma": plain.dense, "sdpa": plain.padded},
        "decode": make_decode(plain),
    }


def check(device: str) -> None:
    """Compare attention over all keys with SDPA, with and without a selection.

    Raises:
        Disagreement: they differ.
    """
    inputs = Inputs(device, False)
    wanted = inputs.padded().transpose(1, 2).double()
    allowed = 1e-4 if device == "cpu" else 4e-2
    require_close(inputs.dense(), wanted, allowed, "dense: fdma and sdpa")
    everything = inputs.fused(KEYS, bias_form="none")
    require_close(everything, wanted, allowed, "no-gradients: fdma and sdpa")


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def time_calls(run: Callable[[], Any], device: str) -> float:
    """Milliseconds of host time for each call."""
    wait(device)
    start = time.perf_counter()
    for _ in range(CALLS):
        run()
    seconds = time.perf_counter() - start
    wait(device)
    return seconds / CALLS * 1e3


def time_backward(
    forward: Callable[[], torch.Tensor], leaves: list[torch.Tensor], device: str
) -> float:
    """As time_calls(), for the gradients of calls that are already recorded."""
    outs = [forward() for _ in range(CALLS)]
    douts = [torch.ones_like(out) for out in outs]
    pairs = iter(list(zip(outs, douts)))

    def run() -> None:
        out, dout = next(pairs)
        torch.autograd.grad(out, leaves, dout)

    return time_calls(run, device)


def of_sdpa(times: dict[str, list[float]], peer: str, goal: Goal | None) -> dict[str, Any]:
    """fdma's time over sdpa's in the same round, median of the rounds; and its goal."""
    if peer != "fdma":
        return {"of_sdpa": None, "goal": None, "met": None}
    median = median_ratio(times["fdma"], times["sdpa"])
    words, met = (goal.words(), goal.met(median)) if goal else (None, None)
    return {"of_sdpa": median, "goal": words, "met": met}


def print_row(row: dict[str, Any]) -> None:
    ratio = f"{row['of_sdpa']:8.3f}" if row["of_sdpa"] is not None else ""
    goal = f"  {'met   ' if row['met'] else 'MISSED'} {row['goal']}" if row["goal"] else ""
    line = "{case:14} {peer:5} {us:8.1f} {spread:7.3f} {times:7.3f}".format(**row)
    print(f"{line} {ratio}{goal}".rstrip())


def measure(device: str, rounds: Rounds) -> Iterator[dict[str, Any]]:
    check(device)
    timers = {
        case: {name: functools.partial(time_calls, run, device) for name, run in peers.items()}
        for case, peers in make_cases(device).items()
    }
    learned = Inputs(device, True)
    timers["backward"] = {
        "fdma": lambda: time_backward(learned.fused, learned.fdma, device),
        "sdpa": lambda: time_backward(learned.padded, learned.sdpa, device),
    }
    for case, own in timers.items():
        program.doing(case)
        for timer in own.values():  # the first calls do more
            timer()
        times = alternate(own, rounds)
        goal = GOALS.get(case) if device == "cuda" else None
        for row in make_rows(case, times):
            yield {**row, "us": 1e3 * row["ms"], **of_sdpa(times, row["peer"], goal)}


def main(arguments: list[str] | None = None) -> int:
    args = parse(own_parser(), arguments)
    if args.device == "cpu":
        torch.set_num_threads(1)
    print(f"{'case':14} {'peer':5} {'us':>8} {'spread':>7} {'times':>7} {'of sdpa':>8}")
    held: list[bool] = []

    def show(row: dict[str, Any]) -> None:
        print_row(row)
        if row["met"] is not None:
            held.append(row["met"])

    rows = measure(args.device, QUICK if args.quick else HOST_ROUNDS)
    status = write_rows("host_time", args, rows, show)
    if held and status == 0:
        print(f"{sum(held)} of {len(held)} goals reached")
    return status


if __name__ == "__main__":
    sys.exit(main())
