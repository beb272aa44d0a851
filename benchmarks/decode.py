#!/usr/bin/env python3
"""The benchmark `decode`: a step over a cache, a plain read of the cache, and dense attention."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

if __name__ == "__main__":
    import bench

    bench.start("decode")

import flash_dmattn
import torch
from benchmarking import (
    QUICK,
    USUAL,
    Column,
    Disagreement,
    Row,
    Table,
    alternate,
    choose_device,
    median_ratio,
    run_cases,
    summary,
    time_pass,
)
from torch.nn.functional import scaled_dot_product_attention

DENSE_KEYS = 131072  # for the peer sdpa
CPU_CACHE = 64 << 20  # bytes, if the machine does not say
DECODED = (1, 8, 64)  # sequences of the cases with more rows
TIMES_CACHE = 3  # the caches of a pass are this many times the processor's cache


class Case(NamedTuple):
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    tokens: int  # already processed
    window: int
    drafts: int = 0
    wide: bool = False  # dt_proj is float32
    recent: int = 0

    @property
    def rows(self) -> int:
        return self.window + self.recent

    def name(self) -> str:
        heads = f"h{self.q_heads}g{self.kv_heads}/d{self.head_dim}"
        kept = f"w{self.window}" + f"r{self.recent}" * (self.recent > 0)
        end = f"/drafts{self.drafts}" if self.drafts else "/float32" if self.wide else ""
        return f"decode/bf16/b{self.batch}/{heads}/n{self.tokens}/{kept}{end}"


def all_cases(device: str) -> list[Case]:
    cases = [
        Case(batch, 32, 8, 128, tokens, 2048, drafts)
        for batch in ((1, 64) if device == "cuda" else (1,))
        for tokens, drafts in ((4096, 0), (1048576, 0), (4096, 8))
    ]
    cases += [Case(1, 2, 1, 64, 4096, 1024), Case(1, 32, 8, 128, 4096, 2048, wide=True)]
    if device == "cuda":  # the batch sizes of several kernels
        cases += [Case(batch, 32, 8, 128, 4096, 2048) for batch in (4, 8, 16, 32)]
        cases.append(Case(16, 32, 8, 128, 4096, 512))
        cases += [Case(64, 16, 4, 64, 4096, 2048), Case(16, 16, 4, 256, 4096, 2048)]
        for rows in (2304, 4608, 9216):
            cases += [Case(batch, 32, 8, 128, 8 * rows, rows) for batch in DECODED]
            half = {"window": rows // 2, "recent": rows // 2}
            cases += [Case(batch, 8, 4, 64, tokens=8 * rows, **half) for batch in DECODED]
    return cases


def caches_of(case: Case, device: str) -> int:
    """The number of caches of a pass."""
    found = CPU_CACHE
    if device == "cuda":
        found = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", CPU_CACHE)
    size = 4 * case.batch * case.kv_heads * case.rows * case.head_dim
    return max(2, math.ceil(TIMES_CACHE * found / size))


class Inputs:
    """The tokens of a case, and full caches with keys at random positions of a stream."""

    def __init__(self, case: Case, device: str) -> None:
        torch.manual_seed(case.window)
        self.case, self.device, self.count = case, device, caches_of(case, device)
        new = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
        dim, kv_heads, tokens = case.head_dim, case.kv_heads, max(case.drafts, 1)
        heads = (case.q_heads, kv_heads, kv_heads)
        self.rows = [new(case.batch, tokens, count, dim) for count in heads]
        dt_proj = new(kv_heads, kv_heads * dim) / math.sqrt(kv_heads * dim)
        self.options = {
            "dt_proj": dt_proj.float() if case.wide else dt_proj,
            "a_coef": torch.rand(kv_heads, device=device),
            "commit": torch.full_like(
                self.rows[0][:, 0, 0, 0], case.drafts == 0, dtype=torch.int32
            ),
        }
        self.make_caches(new)
        self.dense = None
        if case.batch == 1:
            self.dense = new(1, case.q_heads, 1, dim), *new(2, 1, kv_heads, DENSE_KEYS, dim)

    def make_caches(self, new: Callable[..., torch.Tensor]) -> None:
        case, device = self.case, self.device
        by_head = (self.count, case.batch, case.kv_heads, case.rows)
        # The key and the value of a cache are adjacent, so that one sum reads both.
        self.memory = new(self.count, 2, *by_head[1:], case.head_dim)
        score = torch.rand(by_head, device=device)
        older = case.tokens - case.recent
        step = older // case.window
        position = step * torch.arange(case.window, dtype=torch.int32, device=device)
        chosen = (*by_head[:3], case.window)
        position = position + torch.randint(step, chosen, dtype=torch.int32, device=device)
        newest = torch.arange(older, case.tokens, dtype=torch.int32, device=device)
        position = torch.cat((position, newest.expand(*by_head[:3], -1)), -1)
        seen = torch.full(by_head[:2], case.tokens, dtype=torch.int32, device=device)
        states = zip(self.memory.transpose(3, 4), score.exp(), score, position, seen)
        self.caches = [
            flash_dmattn.KeyCache(*keys, *numbers, window=case.window, recent=case.recent)
            for keys, *numbers in states
        ]


def decode(inputs: Inputs) -> list[torch.Tensor]:
    return [flash_dmattn.decode(*inputs.rows, one, **inputs.options) for one in inputs.caches]


def read(inputs: Inputs) -> list[torch.Tensor]:
    return [one.view(torch.int32).sum(dtype=torch.int32) for one in inputs.memory]


def sdpa(inputs: Inputs) -> list[torch.Tensor]:
    return [scaled_dot_product_attention(*inputs.dense, enable_gqa=True)]


def passes_of(inputs: Inputs) -> dict[str, tuple[Callable[[], Any], int]]:
    """A pass of each peer, and its number of calls."""
    peers = [("fdma", decode, inputs.count), ("read", read, inputs.count)]
    peers += [] if inputs.dense is None else [("sdpa", sdpa, 1)]
    return {name: (make_pass(run, inputs), calls) for name, run, calls in peers}


def make_pass(run: Callable[[Inputs], Any], inputs: Inputs) -> Callable[[], Any]:
    """The pass, or a graph of it, after one pass that does not count."""
    run(inputs)
    if inputs.device == "cpu":
        return functools.partial(run, inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(inputs)
    return graph.replay


def check(inputs: Inputs) -> None:
    """Raise Disagreement unless outputs are numbers, and each cache has one new token, or none from
    drafts."""
    outs, name = decode(inputs), inputs.case.name()
    want = inputs.case.tokens + (0 if inputs.case.drafts else 1)
    for out, cache in zip(outs, inputs.caches):
        if not (out.isfinite().all() and (cache.seen == want).all()):
            raise Disagreement(f"{name}: wrong outputs, or another number of tokens than {want}")


def measure(case: Case, args: argparse.Namespace) -> Iterator[Row]:
    """The rows of a case. Raises Disagreement if outputs are wrong."""
    inputs = Inputs(case, args.device)
    check(inputs)
    timers = {
        name: lambda run=run, calls=calls: time_pass(run, args.device) / calls
        for name, (run, calls) in passes_of(inputs).items()
    }
    times = alternate(timers, QUICK if args.quick else USUAL)
    for name, own in times.items():
        yield {
            "case": case.name(),
            "peer": name,
            **summary(own),
            "of_read": median_ratio(times["read"], own) if name == "fdma" else None,
            "ratio": None if name == "fdma" else median_ratio(own, times["fdma"]),
        }


TABLE = Table(
    48,
    5,
    Column("ms", "us", "10.1f", 1e3),
    Column("spread", "spread", "7.2f"),
    Column("of_read", "of read", "8.2f"),
    Column("ratio", "times as fast", "14.2f"),
)


def run(args: argparse.Namespace) -> int:
    choose_device(args)
    cases = [
        (case.name(), functools.partial(measure, case, args)) for case in all_cases(args.device)
    ]
    return run_cases(args, TABLE, cases)
