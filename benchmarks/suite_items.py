"""The items of benchmarks/suite.py: the settings of each, and the peers that it compares in
them."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Iterator
from typing import Callable, NamedTuple

import flash_dmattn
import torch
from flash_dmattn import DynamicMaskOptions, _library
from suite_calls import (
    Setting,
    check_selected,
    count_attention,
    count_dense,
    count_score,
    count_selected,
    dense,
    dense_backends,
    make_call,
    selected,
    stage,
)
from suite_energy import measure_energy
from suite_measure import Bench, Peer, Row, reason_of
from suite_options import LONGEST, QUICK_LONGEST, SHORTEST

PASSES = (False, True)  # forward, training
FRACTIONS = (64, 32, 16, 8, 4, 2, 1)  # keys of a sequence per kept key
QUICK_FRACTIONS = (64, 8, 1)
DENSITIES = (0.5, 0.75, 0.875, 0.9375, 1.0)  # window over length
QUICK_DENSITIES = (0.5, 1.0)


class Sizes(NamedTuple):
    """Sizes on a device. Batches and heads share one length and one window."""

    heads: tuple[int, int, int]  # q_heads, kv_heads, head_dim
    window: int
    long: int  # number of keys if the length does not vary
    batches: tuple[int, int]
    variants: tuple[tuple[int, int], ...]  # q_heads and kv_heads
    per_head: tuple[int, int]


SIZES = {
    "cuda": Sizes(
        (32, 8, 128), 2048, 32768, (4096, 1024),
        ((8, 8), (32, 32), (32, 8), (32, 1), (64, 8)), (8192, 1024),
    ),
    "cpu": Sizes(
        (2, 1, 64), 1024, 8192, (1024, 256),
        ((1, 1), (2, 1), (4, 4), (4, 2), (8, 2)), (2048, 512),
    ),
}  # fmt: skip
BATCHES, QUICK_BATCHES = (1, 2, 4, 8, 16), (1, 4)


class Plan:
    """The settings of each item."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.sizes, self.quick, self.divide = SIZES[args.device], args.quick, args.divide
        self.long = self.sizes.long // 2 if args.quick else self.sizes.long
        self.longest = args.longest or (QUICK_LONGEST if args.quick else LONGEST)

    def setting(self, item: str, training: bool, length: int, window: int) -> Setting:
        length, window = (max(1, number // self.divide) for number in (length, window))
        return Setting(item, training, 1, self.sizes.heads, length, window)

    def length(self) -> Iterator[Setting]:
        for training in PASSES:
            length = SHORTEST
            while length <= self.longest:
                yield self.setting("length", training, length, self.sizes.window)
                length *= 2

    def density(self) -> Iterator[Setting]:
        for training in PASSES:
            for fraction in QUICK_FRACTIONS if self.quick else FRACTIONS:
                window = self.long // fraction
                yield self.setting("density", training, self.long, window)

    def batch(self) -> Iterator[Setting]:
        for training in PASSES:
            for batch in QUICK_BATCHES if self.quick else BATCHES:
                one = self.setting("batch", training, *self.sizes.batches)
                yield one._replace(batch=batch)

    def heads(self) -> Iterator[Setting]:
        variants = self.sizes.variants[:2] if self.quick else self.sizes.variants
        for training in PASSES:
            for q_heads, kv_heads in variants:
                one = self.setting("heads", training, *self.sizes.per_head)
                yield one._replace(heads=(q_heads, kv_heads, one.heads[2]))

    def threshold(self) -> Iterator[Setting]:
        for training in PASSES:
            for density in QUICK_DENSITIES if self.quick else DENSITIES:
                window = int(self.long * density)
                yield self.setting("threshold", training, self.long, window)

    def of_passes(self, item: str) -> Iterator[Setting]:
        """The length and the window of the device, forward and training."""
        for training in PASSES:
            yield self.setting(item, training, self.long, self.sizes.window)

    def stages(self) -> Iterator[Setting]:
        yield self.setting("stages", False, self.long, self.sizes.window)

    def of(self, item: str) -> list[Setting]:
        return list(getattr(self, item)() if hasattr(self, item) else self.of_passes(item))


# ---- comparisons ----


def against_dense(bench: Bench, setting: Setting) -> Iterator[Row]:
    """flash_dma_attention(), and SDPA over all keys by each of its back ends."""
    inputs = setting.make_inputs(bench.device, bench.dtype)
    check_selected(inputs, setting.name(bench.dtype_name))
    peers = [Peer("fdma", selected(inputs, setting.training), count_selected(setting))]
    for name, backend in dense_backends(bench.device, setting.length).items():
        call = dense(inputs, setting.training, backend)
        peers.append(Peer(f"dense-{name}", call, count_dense(setting)))
    yield from bench.rows(setting, peers)


def selection_methods(bench: Bench, setting: Setting) -> Iterator[Row]:
    """Peers with the same number of keys, chosen in other ways."""
    inputs = setting.make_inputs(bench.device, bench.dtype)
    window, training = setting.window, setting.training
    approximate = DynamicMaskOptions(keep_window_size=window, selection_method="approximate")
    ways = {
        "fdma": {},
        "approximate": {"options": approximate},
        "recent": {"keep_window_size": window - window // 2, "recent": window // 2},
        "newest": {"keep_window_size": 1, "recent": window - 1},
    }
    flop = count_selected(setting)
    peers = [Peer(name, selected(inputs, training, **way), flop) for name, way in ways.items()]
    yield from bench.rows(setting, peers)


def dense_threshold(bench: Bench, setting: Setting) -> Iterator[Row]:
    """The same call processed sparsely, and all keys processed densely by the same package."""
    inputs = setting.make_inputs(bench.device, bench.dtype)
    sparse = DynamicMaskOptions(keep_window_size=setting.window, mixed_processing=False)
    ways = {
        "fdma": ({"options": sparse}, setting.window),
        "all-keys": ({"keep_window_size": setting.length}, setting.length),
    }
    peers = [
        Peer(name, selected(inputs, setting.training, **way), count_selected(setting, kept))
        for name, (way, kept) in ways.items()
    ]
    yield from bench.rows(setting, peers)


def backends_of(device: str) -> list[str]:
    """The families of kernels that compute attention on this device, the preferred one first."""
    names = [
        "/".join(kernel.name.split("/")[:2])
        for kernel in _library.kernels()
        if kernel.missing is None and kernel.operation == "forward"
    ]
    return [name for name in dict.fromkeys(names) if name.startswith(f"{device}/")]


def kernel_families(bench: Bench, setting: Setting) -> Iterator[Row]:
    """Attention over a given selection, by the kernels of each family."""
    inputs = setting.make_inputs(bench.device, bench.dtype)
    score, bias = flash_dmattn.score(inputs.value, *inputs.weights)
    kept = flash_dmattn.select(score, setting.window)
    leaves = [x.detach().requires_grad_(setting.training) for x in (*inputs.rows, bias)]

    def attend(backend: str | None) -> torch.Tensor:
        *rows, added = leaves
        options = {"bias": added, "selection": kept, "causal": True, "backend": backend}
        return flash_dmattn.attention(*rows, **options)[0]

    flop = count_attention(setting, setting.window, 7 if setting.training else 2)
    dout = inputs.dout if setting.training else None
    peers = [
        Peer(
            backend or "fdma",
            make_call(functools.partial(attend, backend), leaves, dout, bench.device),
            flop,
        )
        for backend in (None, *backends_of(bench.device))
    ]
    yield from bench.rows(setting, peers)


def tile_sizes(bench: Bench, setting: Setting) -> Iterator[Row]:
    """The trials of flash_dmattn.tune(), which runs every choice and the rules in turn, and its
    final choice."""
    head = {"case": setting.name(bench.dtype_name), "threads": torch.get_num_threads()}
    head.update(setting.fields())
    if bench.device == "cuda":
        why = "each CUDA kernel has tiles of one size: see the item kernels"
        yield {**head, "peer": "rules", "not_run": why}
        return
    q_heads, kv_heads, head_dim = setting.heads
    shape = flash_dmattn.TuningShape(
        setting.length,
        head_dim,
        q_heads,
        kv_heads,
        window=setting.window,
        dtype=bench.dtype,
        backward=setting.training,
    )
    try:
        trials = flash_dmattn.tune([shape], seconds=3 * bench.seconds)
    finally:
        flash_dmattn.load_tuning(os.environ.get("FDMA_TUNING"))  # restores the tuning
    operation = "backward" if setting.training else "forward"
    own = [trial for trial in trials if trial.operation == operation]
    # the last figures of a choice that is measured twice
    named = {"chosen" if trial.final else trial.choice: trial for trial in own}
    for name, trial in named.items():
        figures = {"ms": 1e3 * trial.seconds, "times": trial.ratio}
        yield {**head, "peer": name, "choice": trial.choice, "kernel": trial.kernel, **figures}


def stages_of(bench: Bench, setting: Setting) -> list[Peer]:
    """The stages of a training step one by one, each from the results of the stage before."""
    device, window = bench.device, setting.window
    inputs = setting.make_inputs(device, bench.dtype)

    def score_all() -> tuple[torch.Tensor, torch.Tensor | None]:
        return flash_dmattn.score(inputs.value, *inputs.weights)

    score, bias = score_all()
    kept = flash_dmattn.select(score, window)
    leaves = [x.detach().requires_grad_() for x in (*inputs.rows, bias)]

    def attend(tensors: list[torch.Tensor]) -> torch.Tensor:
        *rows, added = tensors
        return flash_dmattn.attention(*rows, bias=added, selection=kept, causal=True)[0]

    out, plain = attend(leaves), [x.detach() for x in leaves]
    stages = {
        "score": (score_all, count_score(setting, 1)),
        "select": (lambda: flash_dmattn.select(score, window), None),
        "forward": (lambda: attend(plain), count_attention(setting, window, 2)),
        "backward": (
            lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True),
            count_attention(setting, window, 5),
        ),
    }

    def within(name: str, run: Callable[[], object]) -> Callable[[], object]:
        def call() -> object:
            with stage(name, device):
                return run()

        return call

    whole = Peer("fdma", selected(inputs, False), count_selected(setting))
    peers = [Peer(name, within(name, run), flop) for name, (run, flop) in stages.items()]
    rivals = [
        Peer(f"dense-{name}", dense(inputs, False, backend), count_dense(setting))
        for name, backend in dense_backends(device, setting.length).items()
    ]
    return [whole, *peers, *rivals]


def stages(bench: Bench, setting: Setting) -> Iterator[Row]:
    yield from bench.rows(setting, stages_of(bench, setting))


def energy(bench: Bench, setting: Setting) -> Iterator[Row]:
    """Energy of the call, and of SDPA over all keys by each of its back ends."""
    inputs = setting.make_inputs(bench.device, bench.dtype)
    peers = {"fdma": selected(inputs, setting.training)}
    for name, backend in dense_backends(bench.device, setting.length).items():
        peers[f"dense-{name}"] = dense(inputs, setting.training, backend)
    head = {"case": setting.name(bench.dtype_name), "threads": torch.get_num_threads()}
    for name, call in peers.items():
        try:
            figures = measure_energy(bench.device, call, setting.tokens)
        except RuntimeError as error:
            if name == "fdma":
                raise
            figures = {"not_run": reason_of(error)}
        yield {**head, "peer": name, **setting.fields(), **figures}
        if bench.device != "cuda":
            return


Item = Callable[[Bench, Setting], Iterator[Row]]
ITEMS: dict[str, Item] = {
    **dict.fromkeys(("length", "density", "batch", "heads"), against_dense),
    "threshold": dense_threshold,
    "selection": selection_methods,
    "kernels": kernel_families,
    "tiles": tile_sizes,
    "stages": stages,
    "energy": energy,
}
