#!/usr/bin/env python3
"""Measure how fast hybrids decode whose last layer selects, or keeps all keys.

    quality_decode.py --contexts 8192 65536 --batches 1 16 64 --keys 2304 4608 9216 --json FILE

The models have the shapes of docs/quality.md (8 layers, width 512, 8 query heads on 4 kv heads,
head_dim 64, bytes) and random bfloat16 weights. Their first seven layers keep the 256 newest keys,
by the same code. The last one selects --keys keys, half of them the newest, or keeps all keys in
tensors of the context's length, which PyTorch's fastest back end attends to. A step takes a byte of
each sequence to the likeliest next one. On a CUDA device it is one CUDA graph.

Each row has the tokens a second of a batch and the bytes of its cache and, for one sequence, the
time of one call with the whole context (prefill) and the most memory that it took.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import benchmarks_path  # noqa: F401
import program

SLIDING = 256


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    head, _, _ = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=head, allow_abbrev=False)
    many: dict[str, Any] = {"type": int, "nargs": "+"}
    parser.add_argument("--size", default="large", help="of the model, as in quality.py (large)")
    parser.add_argument("--contexts", **many, default=[8192, 65536], help="bytes (8192 65536)")
    parser.add_argument("--batches", **many, default=[1, 16, 64], help="sequences (1 16 64)")
    parser.add_argument("--keys", **many, default=[2304, 4608, 9216], help="(2304 4608 9216)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(cuda, if there is one)")
    parser.add_argument("--json", type=Path, help="file of the rows")
    options = parser.parse_args(arguments)
    for name, least in (("contexts", 2 * SLIDING), ("batches", 1), ("keys", 2)):
        for value in getattr(options, name):
            if value < least:
                parser.error(f"--{name}: has {value}, want {least} or more")
    options.parser = parser
    return options


if __name__ == "__main__":
    program.begin(parse)

import torch
from benchmarking import Rounds, Row, alternate, choose_device, find_machine, time_pass, write_whole
from decode import make_pass
from flash_dmattn import DynamicMaskAttention, HybridPlan, LayerCaches
from model_step_decode import CachedWay, Case, attend_cached, fastest_ways
from model_step_layers import SDPA_BACKENDS, Layout
from model_step_peers import Reasons, release
from quality_model import BYTES, HEAD_DIM, NORM_EPS, SIZES, relu
from torch import nn
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

DTYPE = torch.bfloat16
PIECE = 65536  # bytes of a call that fills caches
ROUNDS = Rounds(3, 15, 2.0)


class KeepsAll(nn.Module):
    """A layer without rotary embedding, with the weights of DynamicMaskAttention's queries, keys
    and values, that keeps all keys: [batch, kv_heads, context, head_dim]."""

    def __init__(
        self, like: DynamicMaskAttention, batch: int, context: int, way: CachedWay
    ) -> None:
        super().__init__()
        self.like, self.way = like, way
        kind: dict[str, Any] = {"device": like.q_proj.weight.device, "dtype": DTYPE}
        shape = (2, batch, like.kv_heads, context, like.head_dim)
        own = torch.Generator(kind["device"]).manual_seed(1)  # the weights of all models are alike
        self.rows = torch.randn(shape, generator=own, **kind)
        self.last = torch.tensor([context - 1], device=kind["device"])

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layer = self.like
        linears = (layer.q_proj, layer.k_proj, layer.v_proj)
        query, key, value = (one(x).unflatten(2, (-1, layer.head_dim)) for one in linears)
        return layer.q_norm(query), layer.k_norm(key), value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The first bytes of the context, or its last one."""
        query, *new = self.project(x)
        length = x.shape[1]
        if length == 1:
            for rows, row in zip(self.rows, new):
                rows.index_copy_(2, self.last, row.transpose(1, 2))
            with sdpa_kernel(self.way.backend):
                out = attend_cached(self.way, query, *self.rows)
        else:
            for rows, row in zip(self.rows, new):
                rows[:, :, :length] = row.transpose(1, 2)
            heads = query.transpose(1, 2), *self.rows[:, :, :, :length]
            with sdpa_kernel(list(SDPA_BACKENDS[x.device.type].values()), set_priority=True):
                out = scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            out = out.transpose(1, 2)
        return self.like.o_proj(out.flatten(2))


class Model(nn.Module):
    """From bytes [batch, len] to the logits of the last one's next byte [batch, 1, 256].

    Args:
        size: a name in quality_model.SIZES.
        keys: of the last layer; None for all.
        way: how all keys are attended to.
    """

    def __init__(
        self, size: str, batch: int, context: int, keys: int | None, way: CachedWay, device: str
    ) -> None:
        super().__init__()
        count, heads, kv_heads = SIZES[size]
        width = heads * HEAD_DIM
        plan = HybridPlan(width, count, heads, kv_heads, sliding=SLIDING, keys=keys or context)
        kind: dict[str, Any] = {"device": device, "dtype": DTYPE}
        layers = [DynamicMaskAttention(**plan.arguments(one), **kind) for one in range(count)]
        cached = layers if keys is not None else layers[:-1]
        self.cache = LayerCaches(cached, batch, static=True)
        last = None if keys is not None else KeepsAll(layers[-1], batch, context, way)
        self.attentions = nn.ModuleList([*cached, *([] if last is None else [last])])
        self.cached, self.cache_bytes = len(cached), self.cache.memory_bytes
        self.cache_bytes += 0 if last is None else last.rows.nbytes
        self.norms = nn.ModuleList(nn.RMSNorm(width, NORM_EPS, **kind) for _ in range(2 * count))
        self.expand, self.contract = (
            nn.ModuleList(nn.Linear(a * width, b * width, bias=False, **kind) for _ in layers)
            for a, b in ((1, 4), (4, 1))
        )
        self.embedding = nn.Embedding(BYTES, width, **kind)
        self.head = nn.Linear(width, BYTES, bias=False, **kind)

    @torch.no_grad()
    def forward(self, text: torch.Tensor, cache: LayerCaches | None = None) -> torch.Tensor:
        """Args: cache: the model's own if it is None."""
        x, cache = self.embedding(text), self.cache if cache is None else cache
        for number, attention in enumerate(self.attentions):
            given = {"cache": cache, "layer": number} if number < self.cached else {}
            x = x + attention(self.norms[2 * number](x), **given)
            hidden = relu(self.expand[number](self.norms[2 * number + 1](x)))
            x = x + self.contract[number](hidden * hidden)
        return self.head(x[:, -1:])


class Decoder:
    """A model whose cache holds `context` - 1 bytes, and the next byte of each sequence."""

    def __init__(self, model: Model, batch: int, context: int, device: str) -> None:
        self.model, self.device = model, device
        self.text = torch.randint(BYTES, (batch, 1), device=device)
        piece = max(1, PIECE // batch)
        # Keys of a layer that keeps all are random. The other layers slide.
        length = context - 1 if model.cached == len(model.attentions) else 2 * SLIDING
        for start in range(0, length, piece):
            count = min(piece, length - start)
            text = torch.randint(BYTES, (batch, count), device=device)
            self.put(text)

    def put(self, text: torch.Tensor) -> None:
        model, x = self.model, self.model.embedding(text)
        with torch.no_grad():
            for number in range(model.cached):
                x = x + model.attentions[number](x, cache=model.cache, layer=number)

    def run(self) -> None:
        self.text.copy_(self.model(self.text).argmax(2))


def prefill(model: Model, context: int, device: str) -> Row:
    """The time of a call with the whole context of one sequence, and the memory that it took."""
    text = torch.randint(BYTES, (1, context), device=device)
    layers = list(model.attentions)[: model.cached]

    def call() -> Any:
        return model(text, LayerCaches(layers, 1, static=True))

    call()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    times = alternate({"own": functools.partial(time_pass, call, device)}, Rounds(3, 7, 2.0))["own"]
    most = torch.cuda.max_memory_allocated() - before if device == "cuda" else None
    return {"prefill_ms": sorted(times)[len(times) // 2], "prefill_bytes": most}


def ways_of(options: argparse.Namespace, batch: int, context: int) -> list[CachedWay]:
    _, heads, kv_heads = SIZES[options.size]
    failed: Reasons = {}
    case = Case(Layout(heads, kv_heads, HEAD_DIM), batch, context, 0)
    return fastest_ways(case, options.device, failed)


def measure(options: argparse.Namespace, batch: int, context: int) -> list[Row]:
    """The rows of a case: the model with all keys, and one for each number of selected ones."""
    way, device = ways_of(options, batch, context)[0], options.device
    timers, rows, decoders = {}, {}, []  # a graph does not keep the memory that it reads
    for keys in (None, *(keys for keys in options.keys if keys < context)):
        torch.manual_seed(0)
        model = Model(options.size, batch, context, keys, way, device)
        name = "all" if keys is None else str(keys)
        rows[name] = {"context": context, "batch": batch, "keys": keys}
        rows[name].update(attention=way.name if keys is None else "fdma")
        rows[name].update(cache_bytes=model.cache_bytes)
        if batch == 1:
            rows[name].update(prefill(model, context, device))
        decoder = Decoder(model, batch, context, device)
        timers[name] = functools.partial(time_pass, make_pass(Decoder.run, decoder), device)
        decoders.append(decoder)
    times = alternate(timers, ROUNDS, warm_up=2)
    for name, row in rows.items():
        ms = sorted(times[name])[len(times[name]) // 2]
        ratios = sorted(a / b for a, b in zip(times["all"], times[name]))
        row.update(ms=ms, tokens_per_second=1e3 * batch / ms, times=ratios[len(ratios) // 2])
    return list(rows.values())


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.size not in SIZES:
        options.parser.error(f"--size: is {options.size}, want one of {', '.join(SIZES)}")
    choose_device(options)
    lines: list[Row] = [find_machine(options.device)]
    for context in options.contexts:
        for batch in options.batches:
            release(options.device)
            found = measure(options, batch, context)
            lines += found
            for row in found:
                print(*(f"{name} {value}" for name, value in row.items()), flush=True)
            if options.json is not None:
                write_whole(options.json, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
