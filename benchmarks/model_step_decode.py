"""Decoding steps of one layer, for the benchmark `model_step`.

A step is all that a layer does with one token of each sequence: projections, rotary embedding, the
update of the cache, attention and the output projection. A pass has several layers with weights and
caches of their own. On a CUDA device these are larger together than the device's cache, and a pass
is one CUDA graph.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any, Callable, ContextManager, NamedTuple

import torch
from benchmarking import Rounds, Row, plain_allowance, require_close, time_pass
from decode import CPU_CACHE, TIMES_CACHE, make_pass
from model_step_checks import (
    BATCH,
    attend_plainly,
    equalise_scores,
    plain_layer,
    positions_of,
)
from model_step_layers import (
    SDPA_BACKENDS,
    Layout,
    PlainAttention,
    Rotary,
    Way,
    make_selecting,
    rotaries_of,
)
from model_step_peers import Peer, Reasons, by_speed, fastest, measure_peers, release, tried
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

DTYPE = torch.bfloat16
PIECE = 65536  # tokens of a call that fills caches
CHECKED, CHECKED_WINDOW = 256, 32  # tokens, and keys by score and newest ones


class Case(NamedTuple):
    layout: Layout
    batch: int
    context: int  # keys, the new token's included
    window: int

    def name(self) -> str:
        words = ["decoding", f"b{self.batch}", self.layout.name(), f"n{self.context}"]
        return "/".join([*words, f"w{self.window}r{self.window}"])


def layers_of(case: Case, rows: int, device: str) -> int:
    """The number of layers of a pass whose caches have this many rows."""
    if device == "cpu":
        return 2
    cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", CPU_CACHE)
    width, heads = case.layout.width, case.layout.kv_heads * case.layout.head_dim
    numbers = 2 * width * (width + heads) + 2 * case.batch * rows * heads
    return max(2, math.ceil(TIMES_CACHE * cache / (DTYPE.itemsize * numbers)))


# ---- attention to a whole cache ----


class CachedWay(NamedTuple):
    name: str
    backend: SDPBackend
    form: str  # "", "grouped" or "expanded"


def cached_ways(device: str) -> list[CachedWay]:
    return [
        CachedWay(f"{name}-{form}" if form else name, backend, form)
        for name, backend in SDPA_BACKENDS[device].items()
        for form in ("", "grouped", "expanded")
        if form or name != "efficient"  # which has no groups of heads
    ]


def attend_cached(
    way: CachedWay, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Attention of one query [batch, 1, q_heads, head_dim] to all keys. In the form "grouped" the
    query heads of a group are the queries of one head."""
    batch, _, q_heads, dim = query.shape
    kv_heads = keys.shape[1]
    if way.form == "grouped":
        rows = query.view(batch, kv_heads, q_heads // kv_heads, dim)
        return scaled_dot_product_attention(rows, keys, values).view(query.shape)
    if way.form == "expanded":
        keys, values = (x.repeat_interleave(q_heads // kv_heads, 1) for x in (keys, values))
    rows = query.transpose(1, 2)
    out = scaled_dot_product_attention(rows, keys, values, enable_gqa=not way.form)
    return out.transpose(1, 2)


# ---- layers and their caches ----


class Decoder:
    """Layers, their caches and the next token of each sequence. `kept` is the number of keys that a
    query keeps, the newest ones if all scores are equal."""

    rotary = ""  # of plain layers

    def __init__(self, case: Case, device: str, kept: int, cache_bytes: int) -> None:
        self.case, self.device, self.kept, self.cache_bytes = case, device, kept, cache_bytes
        self.layers: list[Any] = []
        self.token = torch.randn(case.batch, 1, case.layout.width, device=device, dtype=DTYPE)

    def chosen(self) -> ContextManager[Any]:
        return contextlib.nullcontext()

    def put(self, number: int, x: torch.Tensor, start: int) -> None:
        """Put tokens x [batch, len, width] into the cache of a layer, at positions from `start`."""
        raise NotImplementedError

    def step(self, number: int, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def fill(self, x: torch.Tensor, start: int) -> None:
        for number in range(len(self.layers)):
            self.put(number, x, start)

    @torch.no_grad()
    def run(self) -> list[torch.Tensor]:
        """The outputs of all layers for the token."""
        with self.chosen():
            return [self.step(number, self.token) for number in range(len(self.layers))]


class Selecting(Decoder):
    """Layers that select, with their DynamicMaskCache. The weights of scores have score_dtype."""

    def __init__(self, case: Case, device: str, score_dtype: torch.dtype) -> None:
        kept = 2 * case.window
        count = layers_of(case, kept, device)
        kind: dict[str, Any] = {"device": device, "dtype": DTYPE}
        layers = [make_selecting(case.layout, case.window, **kind) for _ in range(count)]
        self.cache = layers[0].new_cache(case.batch, layers=count, static=True)
        super().__init__(case, device, kept, self.cache.memory_bytes // count)
        self.layers = layers
        for layer in layers:
            layer.dt_proj.to(score_dtype)
            layer.A = torch.nn.Parameter(layer.A.detach().to(score_dtype))

    def put(self, number: int, x: torch.Tensor, start: int) -> None:
        self.step(number, x)

    def step(self, number: int, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers[number](x, cache=self.cache, layer=number)
        return out


class Dense(Decoder):
    """Plain layers with keys and values [batch, kv_heads, context, head_dim]. A step writes the
    last of them, so that attention needs no mask."""

    def __init__(self, case: Case, device: str, way: CachedWay, rotary: Rotary) -> None:
        layout, count = case.layout, layers_of(case, case.context, device)
        shape = (case.batch, layout.kv_heads, case.context, layout.head_dim)
        super().__init__(case, device, case.context, 2 * math.prod(shape) * DTYPE.itemsize)
        self.way, self.rotary = way, rotary.name
        kind: dict[str, Any] = {"device": device, "dtype": DTYPE}
        none = Way("none", attend_plainly)  # a step does not use it
        self.layers = [PlainAttention(layout, none, rotary, **kind) for _ in range(count)]
        self.keys, self.values = (
            [torch.zeros(shape, **kind) for _ in range(count)] for _ in ("keys", "values")
        )
        self.last = torch.tensor([case.context - 1], device=device)
        # of the new token, made once for all layers as in a model
        self.angles = rotary.angles(self.last[None].int(), DTYPE)

    def chosen(self) -> ContextManager[Any]:
        return sdpa_kernel(self.way.backend)

    def put(self, number: int, x: torch.Tensor, start: int) -> None:
        layer, end = self.layers[number], start + x.shape[1]
        angles = layer.rotary.angles(positions_of(x) + start, DTYPE)
        _, key, value = layer.project(x, angles)
        self.keys[number][:, :, start:end] = key.transpose(1, 2)
        self.values[number][:, :, start:end] = value.transpose(1, 2)

    def step(self, number: int, x: torch.Tensor) -> torch.Tensor:
        layer, keys, values = self.layers[number], self.keys[number], self.values[number]
        query, key, value = layer.project(x, self.angles)
        keys.index_copy_(2, self.last, key.transpose(1, 2))
        values.index_copy_(2, self.last, value.transpose(1, 2))
        out: torch.Tensor = layer.o_proj(attend_cached(self.way, query, keys, values).flatten(2))
        return out


# ---- the peers ----


@torch.no_grad()
def check(what: str, decoder: Decoder) -> None:
    """Compare the step after context - 1 tokens in two pieces, all of whose scores are 0, with a
    plain evaluation of the whole sequence.

    Raises:
        Disagreement: it differs.
    """
    case, layer = decoder.case, decoder.layers[0]
    equalise_scores(layer)
    torch.manual_seed(case.context)
    x = torch.randn(case.batch, case.context, case.layout.width, device=decoder.device)
    x = x.to(DTYPE)
    half = case.context // 2
    decoder.fill(x[:, :half], 0)
    decoder.fill(x[:, half:-1], half)
    decoder.token = x[:, -1:]

    def evaluate(dtype: torch.dtype) -> torch.Tensor:
        whole = plain_layer(case.layout, decoder.kept, layer, dtype)
        out: torch.Tensor = whole(x.to(dtype), whole.rotary.angles(positions_of(x), dtype))
        return out[:, -1:]

    exact = evaluate(torch.float64)
    require_close(decoder.run()[0], exact, plain_allowance(evaluate(DTYPE), exact), what)


def make_peer(
    case: Case, what: str, make: Callable[[Case], Decoder], device: str
) -> tuple[Callable[[], float], Decoder]:
    """Check a peer with few tokens, and make it again, filled with the tokens of the case. Returns
    its timer, in milliseconds of a step, and the peer."""
    torch.manual_seed(0)
    check(what, make(case._replace(batch=BATCH, context=CHECKED, window=CHECKED_WINDOW)))
    decoder = make(case)
    piece = max(1, PIECE // case.batch)
    for start in range(0, case.context - 1, piece):
        length = min(piece, case.context - 1 - start)
        x = torch.randn(case.batch, length, case.layout.width, device=device, dtype=DTYPE)
        decoder.fill(x, start)
    call = make_pass(Decoder.run, decoder)
    # The timer keeps the decoder, whose memory the graph reads.
    return lambda: time_pass(call, device) / len(decoder.layers), decoder


def fastest_rotary(case: Case, device: str) -> Rotary:
    layout = case.layout
    query, key = (
        torch.randn(case.batch, 1, heads, layout.head_dim, device=device, dtype=DTYPE)
        for heads in (layout.q_heads, layout.kv_heads)
    )

    def make_call(rotary: Rotary) -> Callable[[], Any]:
        angles = rotary.angles(positions_of(query), DTYPE)
        return lambda: (rotary.rotate(query, angles), rotary.rotate(key, angles))

    return fastest(rotaries_of(layout), make_call, device)


def fastest_ways(case: Case, device: str, failed: Reasons) -> list[CachedWay]:
    layout, kind = case.layout, {"device": device, "dtype": DTYPE}
    query = torch.randn(case.batch, 1, layout.q_heads, layout.head_dim, **kind)
    shape = (2, case.batch, layout.kv_heads, case.context, layout.head_dim)
    rows = tried(lambda: torch.zeros(shape, **kind), "cache", failed)
    if rows is None:
        return []

    def make_call(way: CachedWay) -> Callable[[], Any]:
        def call() -> None:
            with sdpa_kernel(way.backend):
                attend_cached(way, query, *rows)

        return call

    return by_speed(cached_ways(device), make_call, device, failed)


class Variant(NamedTuple):
    name: str
    make: Callable[..., Decoder]


def peers_of(case: Case, device: str) -> dict[str, Peer]:
    rotary = fastest_rotary(case, device)
    failed: Reasons = {}
    ways = fastest_ways(case, device, failed)

    def selecting(dtype: torch.dtype) -> Peer:
        make = functools.partial(Selecting, device=device, score_dtype=dtype)
        return Peer([Variant("fdma", make)], {})

    def dense(way: CachedWay) -> Variant:
        return Variant(way.name, functools.partial(Dense, device=device, way=way, rotary=rotary))

    return {
        "fdma": selecting(DTYPE),
        "fdma-float32": selecting(torch.float32),
        "dense": Peer(list(map(dense, ways)), failed),
    }


def measure(case: Case, device: str, rounds: Rounds) -> Iterator[Row]:
    """The rows of a case. Raises Disagreement if outputs are wrong."""
    release(device)
    head = {"case": case.name(), "layout": case.layout.name()}
    head.update(batch=case.batch, context=case.context, window=case.window)

    def make(peer: str, variant: Variant) -> tuple[Callable[[], float], Row]:
        what = f"{case.name()}: {peer} ({variant.name})"
        timer, decoder = make_peer(case, what, variant.make, device)
        rotary = {"rotary": decoder.rotary} if decoder.rotary else {}
        return timer, {"attention": variant.name, **rotary, "cache_bytes": decoder.cache_bytes}

    find = functools.partial(peers_of, case, device)
    for row in measure_peers(head, find, make, device, rounds, case.batch):
        yield {**row, "us": 1e3 * row["ms"]} if "ms" in row else row
