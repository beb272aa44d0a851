#!/usr/bin/env python3
"""The benchmark `model_step`: a training step of a language model, and a decoding step of a layer,
with selected keys, with all keys and with a sliding window."""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import signal
from collections.abc import Iterator
from typing import Any, Callable, ContextManager, NamedTuple

if __name__ == "__main__":
    import bench

    bench.start("model_step")

import model_step_decode
import torch
from benchmarking import QUICK, Column, Rounds, Row, Table, choose_device, measure_cases, time_wall
from commands import MODEL_LAYOUTS, MODEL_MODES
from model_step_checks import check_layer, equalise_scores, narrow, positions_of
from model_step_layers import (
    Layout,
    Model,
    PlainAttention,
    Rotary,
    Sizes,
    Way,
    dense_ways,
    flash_attn_ways,
    initialise,
    make_selecting,
    make_sliding,
    rotaries_of,
)
from model_step_peers import Peer, Reasons, by_speed, fastest, measure_peers, release
from torch import nn

SIZES = Sizes(12, feed_forward=2816, vocabulary=32000, window=1024, piece=8192, timed=16384)
TINY = Sizes(2, feed_forward=96, vocabulary=320, window=16, piece=64, timed=96)
DIVIDE = 8  # --quick: head_dim, by this
LENGTHS, TINY_LENGTHS = [1024 << n for n in range(8)], [48, 96]
COMPILED_LENGTHS = [4096, 16384, 65536]
BATCHES, TINY_BATCHES = [1, 8], [1, 2]
CONTEXTS, TINY_CONTEXTS = [512 << n for n in range(9)], [24, 80]
DECODED_BATCHES = [1, 8, 64]
LEAST, MOST = 3, 50  # rounds
WARM_UP = 3  # steps: a CUDA graph is captured in the second one
PROBED_TOKENS = 65536
CHECKED, CHECKED_KEYS = 256, 64  # tokens, and keys of a sliding window
COMPILERS: dict[str, dict[str, Any]] = {
    "compiled": {},
    "captured": {},
    "graphs": {"mode": "reduce-overhead"},
}


class Case(NamedTuple):
    layout: Layout
    batch: int
    length: int
    mode: str
    sizes: Sizes

    @property
    def steps(self) -> int:
        """The number of steps of a time."""
        return max(1, self.sizes.timed // (self.batch * self.length))

    def name(self) -> str:
        window = self.sizes.window
        words = ["training", f"b{self.batch}", self.layout.name(), f"n{self.length}"]
        return "/".join([*words, f"w{window}r{window}", self.mode])


def compiled(mode: str, call: Any) -> Any:
    return call if mode == "eager" else torch.compile(call, dynamic=False, **COMPILERS[mode])


def compiled_model(mode: str, model: Model) -> Any:
    """In modes "compiled" and "captured" one graph serves all layers, and one all pieces of the
    loss, as a graph of the whole model takes a minute to compile. In mode "graphs" there is one."""
    if mode not in ("compiled", "captured"):
        return compiled(mode, model)
    for block in model.blocks:
        block.compile(dynamic=False, **COMPILERS[mode])
    vars(model)["piece_loss"] = compiled(mode, model.piece_loss)
    return model


# ---- the peers of a training step ----


class Variant(NamedTuple):
    """An attention that a peer's layers may have."""

    name: str
    make_attention: Callable[[int], nn.Module]  # from the number of keys that a query keeps
    rotary: Rotary | None = None  # of PlainAttention
    way: Way | None = None

    def chosen(self) -> ContextManager[Any]:
        return contextlib.nullcontext() if self.way is None else self.way.chosen()


def probe_rows(case: Case, device: str) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of out, of some sequences of a case."""
    layout, batch = case.layout, max(1, min(case.batch, PROBED_TOKENS // case.length))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads = (layout.q_heads, layout.kv_heads, layout.kv_heads, layout.q_heads)
    shapes = [(batch, case.length, count, layout.head_dim) for count in heads]
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


def ranked(case: Case, ways: list[Way], keys: int | None, rotary: Rotary, device: str) -> Peer:
    """The ways by the time of attention and its gradients."""
    *leaves, dout = probe_rows(case, device)
    query, key, value = leaves
    failed: Reasons = {}

    def make_call(way: Way) -> Callable[[], Any]:
        def call() -> None:
            with way.chosen():
                torch.autograd.grad(way.attend(query, key, value, keys), leaves, dout)

        return call

    def make_variant(way: Way) -> Variant:
        make = functools.partial(PlainAttention, case.layout, way, rotary)
        return Variant(way.name, lambda kept: make(kept if keys else None), rotary, way)

    return Peer(list(map(make_variant, by_speed(ways, make_call, device, failed))), failed)


def fastest_rotary(case: Case, device: str) -> Rotary:
    """By the time for queries and keys and their gradients, in the mode of the case."""
    query, key, _, dout = probe_rows(case, device)
    dkey = torch.ones_like(key)
    mode = "eager" if case.mode == "eager" else "compiled"

    def make_call(rotary: Rotary) -> Callable[[], Any]:
        angles = rotary.angles(positions_of(query), query.dtype)
        rotate = compiled(mode, lambda x, y: (rotary.rotate(x, angles), rotary.rotate(y, angles)))
        return lambda: torch.autograd.grad(rotate(query, key), (query, key), (dout, dkey))

    return fastest(rotaries_of(case.layout), make_call, device)


def peers_of(case: Case, device: str) -> dict[str, Peer]:
    layout, keys = case.layout, case.sizes.keys
    rotary = fastest_rotary(case, device)
    selecting = Variant("fdma", lambda kept: make_selecting(layout, kept // 2))
    sliding = Variant("fdma", lambda kept: make_sliding(layout, kept))
    peers = {
        "fdma": Peer([selecting], {}),
        "dense": ranked(case, dense_ways(device), None, rotary, device),
        "sliding": Peer([sliding], {}),
    }
    rivals = flash_attn_ways() if device == "cuda" else []
    if rivals:
        peers["sliding-flash-attn"] = ranked(case, rivals, keys, rotary, device)
    return peers


def check_variant(case: Case, peer: str, variant: Variant, device: str) -> None:
    """Compare a layer, all of whose scores are 0, with a plain evaluation: with all keys, or with a
    short sliding window.

    Raises:
        Disagreement: its output or a gradient differs.
    """
    slides = peer.startswith("sliding")
    torch.manual_seed(0)
    with torch.device(device):
        layer = variant.make_attention(CHECKED_KEYS if slides else 2 * CHECKED)
    equalise_scores(layer)

    def run(x: torch.Tensor) -> torch.Tensor:
        if variant.rotary is None:
            return layer(x)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        return layer(x, variant.rotary.angles(positions_of(x), dtype))

    with variant.chosen():
        what = f"{case.name()}: {peer} ({variant.name})"
        check_layer(what, case.layout, layer, CHECKED_KEYS if slides else CHECKED, run, CHECKED)


class Trainer:
    """A model, its optimizer and a batch of tokens."""

    def __init__(self, case: Case, variant: Variant, device: str) -> None:
        torch.manual_seed(0)
        self.case, self.variant, self.device = case, variant, device
        make = functools.partial(variant.make_attention, case.sizes.keys)
        with torch.device(device):
            model = Model(case.sizes, case.layout, make, variant.rotary)
        initialise(model, seed=0)
        options = {"fused": True, "capturable": case.mode == "captured" and device == "cuda"}
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **options)
        self.loss = compiled_model(case.mode, model)
        shape = (2, case.batch, case.length)
        generator = torch.Generator(device).manual_seed(case.length)
        given: dict[str, Any] = {"device": device, "generator": generator}
        self.tokens, self.targets = torch.randint(case.sizes.vocabulary, shape, **given)
        self.replay: Callable[[], Any] = self.step

    def step(self) -> torch.Tensor:
        """Make one step. Returns the loss, whose memory belongs to the next step in a graph."""
        if self.case.mode == "graphs":
            torch.compiler.cudagraph_mark_step_begin()
        with self.variant.chosen():
            with narrow(self.device):
                loss: torch.Tensor = self.loss(self.tokens, self.targets)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def warm_up(self) -> list[float]:
        """The losses of the first steps. In mode "captured" a CUDA graph of a whole step, with the
        gradients and the optimizer, takes the place of step()."""
        if self.case.mode != "captured" or self.device != "cuda":
            return [self.step().item() for _ in range(WARM_UP)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            losses = [self.step().item() for _ in range(WARM_UP)]
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self.replay = graph.replay
        return losses

    def steps(self) -> None:
        for _ in range(self.case.steps):
            self.replay()

    def time(self) -> float:
        """Milliseconds of a step, the host's time included."""
        return time_wall(self.steps, self.device) / self.case.steps


def warmed_up(
    case: Case, device: str, peer: str, variant: Variant
) -> tuple[Callable[[], float], Row]:
    """The timer of a peer after its first steps, and the fields of its row. GiB is the most memory
    that its tensors have taken, with weights and the state of the optimizer.

    Raises:
        Disagreement: a layer of it is wrong.
    """
    check_variant(case, peer, variant, device)
    is_cuda = device == "cuda"
    before = torch.cuda.memory_allocated() if is_cuda else 0
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(case, variant, device)
    losses = trainer.warm_up()
    if not all(map(math.isfinite, losses)):
        raise ArithmeticError(f"the losses are {losses}")
    fields: Row = {"attention": variant.name, "loss": losses[0]}
    fields.update({"rotary": variant.rotary.name} if variant.rotary else {})
    if is_cuda:
        fields.update(GiB=(torch.cuda.max_memory_allocated() - before) / 2**30)
    return trainer.time, fields


def measure_training(case: Case, device: str, rounds: Rounds) -> Iterator[Row]:
    """The rows of a case. Raises Disagreement if outputs or gradients are wrong."""
    if case.mode != "eager":
        torch._dynamo.reset()
    release(device)
    head = {"case": case.name(), "layout": case.layout.name(), "mode": case.mode}
    head.update(batch=case.batch, length=case.length, **case.sizes._asdict())
    make = functools.partial(warmed_up, case, device)
    tokens = case.batch * case.length
    find = functools.partial(peers_of, case, device)
    yield from measure_peers(head, find, make, device, rounds, tokens)


# ---- the command ----

TABLE = Table(
    48,
    18,
    Column("ms", "ms", "10.4f"),
    Column("spread", "spread", "7.3f"),
    Column("tokens_per_second", "tokens/s", "10.0f"),
    Column("GiB", "GiB", "7.2f"),
    Column("times_dense", "as fast", "8.3f"),
    Column("times_spread", "spread", "7.3f"),
    Column("attention", "attention", "18"),
    Column("rotary", "rotary", "8"),
)


@contextlib.contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM, which timeout sends, raises KeyboardInterrupt, so that rows are written."""
    earlier = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


def layouts_of(args: argparse.Namespace) -> list[Layout]:
    divide = DIVIDE if args.quick else 1
    found = [Layout(*MODEL_LAYOUTS[name]) for name in args.layouts]
    return [one._replace(head_dim=one.head_dim // divide) for one in found]


def training_cases(args: argparse.Namespace, sizes: Sizes) -> list[Case]:
    """The modes that capture graphs come last, as an error in a capture may break later ones."""
    cases = []
    modes = args.modes or (["eager"] if args.quick else MODEL_MODES)
    for mode in sorted(modes, key=MODEL_MODES.index):
        lengths, batches = (LENGTHS, BATCHES) if mode == "eager" else (COMPILED_LENGTHS, [1])
        if args.quick:
            lengths, batches = TINY_LENGTHS, TINY_BATCHES
        lengths, batches = args.lengths or lengths, args.batches or batches
        cases += [
            Case(layout, batch, length, mode, sizes)
            for batch in batches
            for layout in layouts_of(args)
            for length in lengths
        ]
    return cases


def decoding_cases(args: argparse.Namespace, sizes: Sizes) -> list[model_step_decode.Case]:
    contexts, batches = CONTEXTS, DECODED_BATCHES
    if args.quick:
        contexts, batches = TINY_CONTEXTS, TINY_BATCHES
    return [
        model_step_decode.Case(layout, batch, context, sizes.window)
        for batch in args.batches or batches
        for layout in layouts_of(args)
        for context in args.contexts or contexts
    ]


def run(args: argparse.Namespace) -> int:
    choose_device(args)
    sizes = TINY if args.quick else SIZES
    sizes = sizes._replace(window=args.window or sizes.window)
    rounds = QUICK if args.quick else Rounds(LEAST, MOST, args.seconds)
    cases: list[tuple[str, Callable[[], Iterator[Row]]]] = []
    if "decoding" in args.only:
        cases += [
            (one.name(), functools.partial(model_step_decode.measure, one, args.device, rounds))
            for one in decoding_cases(args, sizes)
        ]
    if "training" in args.only:
        cases += [
            (one.name(), functools.partial(measure_training, one, args.device, rounds))
            for one in training_cases(args, sizes)
        ]
    path = args.out / f"model-step-{args.device}.json"
    with ended_as_by_ctrl_c():
        return measure_cases(args, TABLE, cases, path)[0]
