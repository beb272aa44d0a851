#!/usr/bin/env python3
"""The benchmark `host_time`: what the host does in a call of PyTorch, and in SDPA."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Iterator
from typing import Any, Callable

if __name__ == "__main__":
    import bench

    bench.start("host_time")

import flash_dmattn
import flash_dmattn.ops
import torch
from benchmarking import (
    QUICK,
    Column,
    Rounds,
    Row,
    Table,
    alternate,
    choose_device,
    make_rows,
    median_ratio,
    require_close,
    run_cases,
)
from commands import HEAD_DIM, KEYS, KV_HEADS, Q_HEADS
from commands import HOST_WINDOW as WINDOW
from peers_cuda_cases import Goal
from torch.nn.functional import scaled_dot_product_attention

CALLS = 20  # of a peer in a round; the queue of a device holds far more kernels
HOST_ROUNDS = Rounds(100, 2000, 3.0)  # each takes well under a millisecond
# For fdma on a CUDA device. On the CPU a call also computes, so there are no goals.
GOALS = {
    "no-gradients": Goal("of_sdpa", 0.8),
    "recording": Goal("of_sdpa", 1.2),
    "backward": Goal("of_sdpa", 1.2),
    "operator": Goal("of_sdpa", 1.2),
    "operator-backward": Goal("of_sdpa", 1.5),
}
# SDPA's operator with out and lse, and its gradient.
SDPA_OPERATORS = {
    "cpu": "_scaled_dot_product_flash_attention_for_cpu",
    "cuda": "_scaled_dot_product_flash_attention",
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


def make_operators(device: str) -> dict[str, Peers]:
    """The operators that a compiled graph calls where autograd records the call."""
    inputs, ours = Inputs(device, False), torch.ops.flash_dmattn
    forward = ours.flash_dma_attention_no_grad.default
    backward = ours.flash_dma_attention_backward_no_grad.default
    sdpa = getattr(torch.ops.aten, SDPA_OPERATORS[device]).default
    sdpa_backward = getattr(torch.ops.aten, f"{SDPA_OPERATORS[device]}_backward").default
    rules, numbers = (WINDOW, 0, 0, "causal", "exp"), (True, 0.0, 0.0, 0.0)
    given = (*inputs.fdma, *6 * [None], *rules, *numbers, 0.0, False, None)
    out, lse, _, bias, *selected = forward(*given)
    saved = (out, lse, *inputs.fdma, None, bias, *5 * [None], *selected)
    dout = (inputs.dout, None, *saved, *rules, *numbers, False, None)
    sdpa_given = (*inputs.sdpa, 0.0, True)
    results = sdpa(*sdpa_given)
    kept = (*results[:2], 0.0, True)
    if device == "cuda":  # also lengths, and the state of dropout
        kept = (*results[:6], 0.0, True, *results[6:8])
    sdpa_dout = (inputs.dout.transpose(1, 2), *inputs.sdpa, *kept)
    return {
        "operator": {"fdma": lambda: forward(*given), "sdpa": lambda: sdpa(*sdpa_given)},
        "operator-backward": {
            "fdma": lambda: backward(*dout),
            "sdpa": lambda: sdpa_backward(*sdpa_dout),
        },
    }


def make_cases(device: str) -> dict[str, Peers]:
    """The peers of each case except backward."""
    plain, learned = Inputs(device, False), Inputs(device, True)
    return {
        "no-gradients": {"fdma": plain.fused, "sdpa": plain.padded},
        "recording": {"fdma": learned.fused, "sdpa": learned.padded},
        "dense": {"fdma": plain.dense, "sdpa": plain.padded},
        "decode": make_decode(plain),
        **make_operators(device),
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


def measure(
    case: str, timers: dict[str, Callable[[], float]], args: argparse.Namespace
) -> Iterator[Row]:
    check(args.device)
    for timer in timers.values():  # the first calls do more
        timer()
    times = alternate(timers, QUICK if args.quick else HOST_ROUNDS)
    goal = GOALS.get(case) if args.device == "cuda" else None
    for row in make_rows(case, times):
        yield {**row, "us": 1e3 * row["ms"], **of_sdpa(times, row["peer"], goal)}


def make_timers(device: str) -> dict[str, dict[str, Callable[[], float]]]:
    timers = {
        case: {name: functools.partial(time_calls, run, device) for name, run in peers.items()}
        for case, peers in make_cases(device).items()
    }
    learned = Inputs(device, True)
    timers["backward"] = {
        "fdma": lambda: time_backward(learned.fused, learned.fdma, device),
        "sdpa": lambda: time_backward(learned.padded, learned.sdpa, device),
    }
    return timers


TABLE = Table(
    14,
    5,
    Column("us", "us", "8.1f"),
    Column("spread", "spread", "7.3f"),
    Column("times", "times", "7.3f"),
    Column("of_sdpa", "of sdpa", "8.3f"),
)


def run(args: argparse.Namespace) -> int:
    choose_device(args)
    if args.device == "cpu":
        torch.set_num_threads(1)
    timers = make_timers(args.device)
    cases = [(case, functools.partial(measure, case, own, args)) for case, own in timers.items()]
    return run_cases(args, TABLE, cases)
