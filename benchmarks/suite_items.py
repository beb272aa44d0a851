"""The items of the benchmark `suite`: the settings of each, the calls that it compares in them, and
their useful operations and outputs."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple

import flash_dmattn
import torch
from benchmarking import Row, plain_allowance, reason_of, require_close, visible_pairs
from commands import LONGEST, QUICK_LONGEST, SHORTEST
from definition_cases import Inputs, square
from flash_dmattn import DynamicMaskOptions, _library
from peers_cuda_cases import best_keys
from suite_measure import Bench, Call, Peer, measure_energy
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

SAMPLES = 16  # queries whose outputs are compared with float64
LONGEST_PLAIN = 1024  # keys; SDPA's plain evaluation, which stores all logits, is timed up to these

# The back ends of SDPA on each device.
DENSE = {
    "cuda": {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION},
    "cpu": {"flash": SDPBackend.FLASH_ATTENTION, "plain": SDPBackend.MATH},
}

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


class Setting(NamedTuple):
    """Causal attention of `length` queries to as many keys. Each query keeps `window` keys."""

    item: str
    training: bool  # forward and backward
    batch: int
    heads: tuple[int, int, int]  # q_heads, kv_heads, head_dim
    length: int
    window: int

    @property
    def kind(self) -> str:
        return "training" if self.training else "forward"

    @property
    def density(self) -> float:
        """The fraction of the pairs of a query and a visible key that are kept."""
        return visible_pairs(self.length, self.window) / visible_pairs(self.length, 0)

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def name(self, dtype: str) -> str:
        heads = "h{}g{}/d{}".format(*self.heads)
        sizes = f"b{self.batch}/{heads}/n{self.length}/w{self.window}"
        return f"{self.item}/{self.kind}/{dtype}/{sizes}"

    def fields(self) -> dict[str, Any]:
        q_heads, kv_heads, head_dim = self.heads
        sizes = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
        lengths = {"length": self.length, "window": self.window, "density": self.density}
        return {"item": self.item, "kind": self.kind, "batch": self.batch, **sizes, **lengths}

    def make_inputs(self, device: str, dtype: torch.dtype) -> Inputs:
        return Inputs(square(self.batch, *self.heads, self.length, self.window), device, dtype)


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


# ---- useful operations: a multiply-add is two ----


def count_attention(setting: Setting, window: int, products: int) -> int:
    """Operations of `products` products of a row of head_dim with each key that a query keeps:
    forward has 2, backward 5. Each query keeps `window` keys; 0: all that it sees."""
    q_heads, _, head_dim = setting.heads
    pairs = visible_pairs(setting.length, window)
    return 2 * products * setting.batch * q_heads * head_dim * pairs


def count_score(setting: Setting, products: int) -> int:
    """Operations of the product of the value states of all kv heads with dt_proj: forward has 1,
    backward 2."""
    _, kv_heads, head_dim = setting.heads
    return 2 * products * setting.tokens * kv_heads * kv_heads * head_dim


def count_selected(setting: Setting, window: int | None = None) -> int:
    """Operations of flash_dma_attention(), with `window` in place of the setting's if given."""
    kept = setting.window if window is None else window
    if setting.training:
        return count_attention(setting, kept, 7) + count_score(setting, 3)
    return count_attention(setting, kept, 2) + count_score(setting, 1)


def count_dense(setting: Setting) -> int:
    return count_attention(setting, 0, 7 if setting.training else 2)


# ---- calls ----


@contextlib.contextmanager
def stage(name: str, device: str) -> Iterator[None]:
    """A range for Nsight Systems on a CUDA device; nothing elsewhere."""
    if device != "cuda":
        yield
        return
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


def make_call(
    attend: Callable[[], torch.Tensor],
    leaves: Sequence[torch.Tensor],
    dout: torch.Tensor | None,
    device: str,
) -> Call:
    """Forward, and the gradients of `leaves` if dout is given."""

    def call() -> torch.Tensor:
        with stage("forward", device):
            out = attend()
        if dout is not None:
            with stage("backward", device):
                torch.autograd.grad(out, leaves, dout)
        return out

    return call


def leaves_of(inputs: Inputs, training: bool) -> list[torch.Tensor]:
    """query, key, value, dt_proj and a_coef for one call."""
    rows = (*inputs.rows, *inputs.weights)
    return [x.detach().requires_grad_(training) for x in rows]


def selected(inputs: Inputs, training: bool, **options: Any) -> Call:
    """flash_dma_attention() with scores and selection."""
    leaves = leaves_of(inputs, training)
    options = {"keep_window_size": inputs.case.window, **options}

    def attend() -> torch.Tensor:
        return flash_dmattn.flash_dma_attention(*leaves, causal=True, **options)

    return make_call(attend, leaves, inputs.dout if training else None, inputs.device)


def dense(inputs: Inputs, training: bool, backend: SDPBackend) -> Call:
    """SDPA over all keys. Its tensors are views [batch, heads, length, head_dim] of the same
    memory."""
    leaves = [x.transpose(1, 2) for x in leaves_of(inputs, False)[:3]]
    leaves = [x.requires_grad_(training) for x in leaves]

    def attend() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)

    dout = inputs.dout.transpose(1, 2) if training else None
    both = make_call(attend, leaves, dout, inputs.device)

    def call() -> torch.Tensor:
        with stage("dense", inputs.device):
            return both()

    return call


def dense_backends(device: str, length: int) -> dict[str, SDPBackend]:
    return {
        name: backend
        for name, backend in DENSE[device].items()
        if name != "plain" or length <= LONGEST_PLAIN
    }


# ---- outputs ----


def attend_plainly(
    inputs: Inputs, rows: torch.Tensor, added: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """out [batch, rows, q_heads, head_dim], with every step in `dtype`. `added` is added to the
    logits [batch, kv_heads, rows, length], and is -inf where a key is not kept."""
    group = inputs.case.q_heads // inputs.case.kv_heads
    query = inputs.query[:, rows].unflatten(2, (-1, group)).to(dtype)  # b i g (heads of g) d
    key, value = inputs.key.to(dtype), inputs.value.to(dtype)
    logits = torch.einsum("bighd,bjgd->bghij", query, key) * inputs.case.head_dim**-0.5
    weights = torch.softmax(logits + added[:, :, None].to(dtype), -1)
    return torch.einsum("bghij,bjgd->bighd", weights, value).flatten(2, 3)


@torch.no_grad()
def check_selected(inputs: Inputs, name: str) -> None:
    """Compare outputs of flash_dma_attention() with float64, by its own scores. An error may be
    twice the error of a plain evaluation, plus a rounding step of the largest output.

    Raises:
        Disagreement: an output is further away.
    """
    length, window = inputs.case.kv_len, inputs.case.window
    out = selected(inputs, False)()
    score, bias = flash_dmattn.score(inputs.value, *inputs.weights)
    rows = torch.linspace(0, length - 1, min(SAMPLES, length), device=out.device).long()
    kept = torch.stack([best_keys(one, rows, window) for one in score.flatten(0, 1)])
    added = torch.where(kept.unflatten(0, score.shape[:2]), bias[:, :, None], -torch.inf)
    exact = attend_plainly(inputs, rows, added, torch.float64)
    plain = attend_plainly(inputs, rows, added, out.dtype)
    what = f"{name}: outputs and float64"
    require_close(out[:, rows], exact, plain_allowance(plain, exact), what)


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
    "stages": stages,
    "energy": energy,
}
