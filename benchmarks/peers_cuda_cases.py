"""The cases of a CUDA device that the benchmark `peers` measures: their sizes, goals and tensors.

All are bfloat16 and causal. The peers of a case read the same tensors, whose memory is
[batch, length, heads, head_dim].
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, NamedTuple

import flash_dmattn
import torch
from benchmarking import visible_pairs
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

QUICK_LENGTH = 32768  # the largest length with --quick
SAMPLES = 32  # queries whose outputs are compared with float64, or have gradients
SAW = 4096  # keys in a period of sawtooth scores
ORDERS = ("rising", "falling", "equal", "sawtooth")
LONGEST_DENSE = 131072  # dense attention then takes 0.25 s, and more with the square of the length
# Kinds with gradients, and their useful operations relative to forward's.
PASSES = {"backward": 2.5, "selected-backward": 2.5, "dense-backward": 2.5, "training": 3.5}
HIGHER = ("of_dense", "of_read", "times_cudnn")  # figures for which higher is better


class Goal(NamedTuple):
    """The bar that a figure of a row must reach, and the aim if that is higher."""

    figure: str
    bar: float
    aim: float | None = None

    def words(self) -> str:
        sign = ">=" if self.figure in HIGHER else "<="
        unit = self.figure.replace("_", " ")
        aim = f" (aim {self.aim:.3g})" if self.aim is not None else ""
        return f"{sign} {self.bar:.3g} {unit}{aim}"

    def met(self, value: float) -> bool:
        return value >= self.bar if self.figure in HIGHER else value <= self.bar


class Case(NamedTuple):
    kind: str
    q_heads: int
    kv_heads: int
    head_dim: int
    length: int  # keys, and queries unless the kind says otherwise
    window: int  # 0: dense
    goals: dict[str, Goal]  # by peer
    mask: bool = False  # small enough for SDPA with a mask
    batch: int = 1

    def name(self) -> str:
        words = [self.kind]
        if self.kind == "select":
            words.append(f"g{self.kv_heads}")
        else:
            words += ["bf16", *([f"b{self.batch}"] if self.batch > 1 else [])]
            words += [f"h{self.q_heads}g{self.kv_heads}", f"d{self.head_dim}"]
        words.append(f"n{self.length}")
        return "/".join(words + ([f"w{self.window}"] if self.window else []))

    def flops(self, window: int) -> float:
        """Useful floating-point operations if each query keeps `window` keys; 0: all keys."""
        pairs = visible_pairs(self.length, window)
        if self.kind == "one-query":
            pairs = min(window or self.length, self.length)
        rows = self.batch * self.q_heads
        return PASSES.get(self.kind, 1) * 4.0 * self.head_dim * rows * pairs


class Inputs:
    """The tensors that the kind of a case needs."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(case.length)
        self.case = case
        batch, heads, length, dim = case.batch, case.kv_heads, case.length, case.head_dim
        new = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        orders = ORDERS if case.kind in ("select", "selected", "selected-backward") else ()
        self.scores = {order: self.make_scores(order) for order in ("iid", *orders)}
        if case.kind == "select":
            return
        self.value = new(batch, length, heads, dim)
        self.dt_proj = new(heads, heads * dim) / math.sqrt(heads * dim)
        self.a_coef = torch.randn(heads, device="cuda")
        self.spare = torch.empty_like(self.value)
        self.key = torch.randn_like(self.value)
        self.query = new(batch, 1 if case.kind == "one-query" else length, case.q_heads, dim)
        if case.kind in PASSES:
            self.dout = torch.randn_like(self.query)
            self.outs: dict[str, torch.Tensor] = {}  # of forward, by peer, with their graphs
            for leaf in (self.query, self.key, self.value, self.dt_proj, self.a_coef):
                leaf.requires_grad_()
        self.fdma = (self.query, self.key, self.value)
        self.sdpa = tuple(tensor.transpose(1, 2) for tensor in self.fdma)
        if case.mask:
            group = case.q_heads // case.kv_heads
            self.mask = build_mask(self)
            self.expanded = [tensor.repeat_interleave(group, 1) for tensor in self.sdpa[1:]]
        self.graph: torch.cuda.CUDAGraph | None = None

    def make_scores(self, order: str) -> torch.Tensor:
        """[batch, kv_heads, length] float32."""
        shape = (self.case.batch, self.case.kv_heads, self.case.length)
        position = torch.arange(self.case.length, device="cuda", dtype=torch.float32)
        ordered = {
            "rising": position,
            "falling": -position,
            "equal": 0 * position,
            "sawtooth": position % SAW,
        }
        if order in ordered:
            return ordered[order].expand(shape).contiguous()
        return torch.randn(shape, device="cuda")


class Peer(NamedTuple):
    name: str
    run: Callable[[Inputs], Any]
    keys: str = ""  # keys of each query: "all", or an order of scores; "": no output to check


def build_mask(inputs: Inputs) -> torch.Tensor:
    """bool [batch, q_heads, length, length], built from expiry, which is the cheapest way."""
    case = inputs.case
    expiry = flash_dmattn.select(inputs.scores["iid"], case.window).expiry
    key = torch.arange(case.length, dtype=torch.int32, device="cuda")
    kept = (key <= key[:, None]) & (key[:, None] < expiry[:, :, None])
    return kept.repeat_interleave(case.q_heads // case.kv_heads, 1)


# ---- calls, whose outputs have graphs if the inputs need gradients ----


def fused(inputs: Inputs) -> torch.Tensor:
    window = inputs.case.window
    return flash_dmattn.flash_dma_attention(
        *inputs.fdma, inputs.dt_proj, inputs.a_coef, keep_window_size=window, causal=True
    )


def selected(inputs: Inputs, order: str, **options: Any) -> torch.Tensor:
    selection = flash_dmattn.select(inputs.scores[order], inputs.case.window)
    return flash_dmattn.attention(*inputs.fdma, selection=selection, causal=True, **options)[0]


def dense(inputs: Inputs) -> torch.Tensor:
    return flash_dmattn.attention(*inputs.fdma, causal=True)[0]


def sdpa(inputs: Inputs, backend: SDPBackend) -> torch.Tensor:
    causal = inputs.case.kind != "one-query"  # SDPA aligns a single query with the first key
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(*inputs.sdpa, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2)


def masked(inputs: Inputs) -> torch.Tensor:
    """SDPA with keys repeated for each head: only the slowest back end supports groups under a
    mask."""
    query, key, value = inputs.sdpa[0], *inputs.expanded
    return scaled_dot_product_attention(query, key, value, attn_mask=inputs.mask).transpose(1, 2)


# ---- keys ----


def best_keys(score: torch.Tensor, rows: torch.Tensor, window: int) -> torch.Tensor:
    """bool [rows, length], by one kv head's score [length]; of equal scores the later wins."""
    key = torch.arange(len(score), device=score.device)
    visible = key <= rows[:, None]
    if not 0 < window < len(score):
        return visible
    backwards = score.expand_as(visible).masked_fill(~visible, -torch.inf).flip(1)
    order = backwards.sort(dim=1, descending=True, stable=True).indices[:, :window]
    kept = torch.zeros_like(visible).scatter(1, len(score) - 1 - order, True)
    return kept & visible


def make_case(
    kind: str, *sizes: int, batch: int = 1, mask: bool = False, **goals: tuple[float, float]
) -> Case:
    """A case with at most one goal for fdma: FIGURE=(bar, aim)."""
    own = [Goal(figure, *bounds) for figure, bounds in goals.items()]
    assert len(own) <= 1
    return Case(kind, *sizes, {"fdma": own[0]} if own else {}, mask, batch)


def forward_cases() -> list[Case]:
    orders = {f"fdma-{order}": Goal("of_iid", 1.15, 1.0) for order in ORDERS}
    sm80 = {"fdma-sm80": Goal("of_dense", 0.85, 1.0)}
    return [
        make_case("attention", 32, 8, 128, 8192, 2048, ms=(0.65, 0.5), mask=True),
        make_case("attention", 32, 8, 128, 32768, 2048, of_dense=(0.88, 1.1)),
        make_case("attention", 32, 8, 128, 131072, 2048, of_dense=(0.95, 1.1)),
        make_case("attention", 32, 8, 128, 1048576, 2048, ms=(85, 66)),
        make_case("attention", 32, 8, 128, 32768, 512, of_dense=(0.75, 1.0)),
        make_case("attention", 32, 32, 128, 16384, 2048, of_dense=(0.82, 0.95)),
        make_case("attention", 32, 32, 128, 32768, 2048, of_dense=(0.65, 0.90)),
        make_case("attention", 16, 16, 128, 16384, 1024, of_dense=(0.70, 0.95)),
        make_case("attention", 16, 4, 64, 32768, 2048, of_dense=(0.82, 1.0)),
        make_case("attention", 32, 8, 64, 32768, 2048, of_dense=(0.60, 0.80)),
        make_case("attention", 16, 4, 256, 32768, 2048, of_dense=(0.60, 0.80)),
        make_case("attention", 2, 1, 64, 32768, 1024, ms=(0.095, 0.07), mask=True),
        Case("selected", 32, 8, 128, 8192, 2048, orders),
        Case("selected", 32, 8, 128, 32768, 2048, {**orders, **sm80}),
        Case("selected", 32, 8, 128, 131072, 2048, orders),
        make_case("dense", 32, 8, 128, 8192, 0, of_dense=(0.80, 1.05)),
        make_case("dense", 32, 8, 128, 32768, 0, of_dense=(0.80, 1.05)),
    ]


def backward_cases() -> list[Case]:
    orders = {f"fdma-{order}": Goal("of_iid", 1.2, 1.0) for order in ORDERS if order != "falling"}
    fast = {"fdma-deterministic": Goal("of_fast", 1.15, 1.05)}
    return [
        make_case("backward", 32, 8, 128, 32768, 2048, of_dense=(0.80, 1.0)),
        make_case("backward", 32, 8, 128, 131072, 2048, of_dense=(0.80, 1.0)),
        make_case("backward", 32, 8, 128, 32768, 512, of_dense=(0.58, 0.75)),
        make_case("backward", 32, 32, 128, 16384, 2048, of_dense=(0.65, 0.80)),
        make_case("backward", 16, 16, 128, 16384, 1024, of_dense=(0.52, 0.80)),
        make_case("backward", 16, 4, 64, 32768, 2048, of_dense=(0.78, 1.0)),
        make_case("backward", 16, 4, 256, 32768, 2048, of_dense=(0.75, 1.0)),
        make_case("backward", 2, 1, 64, 32768, 1024, ms=(0.24, 0.18), mask=True),
        Case("selected-backward", 32, 8, 128, 32768, 2048, {**orders, **fast}),
        make_case("dense-backward", 32, 8, 128, 8192, 0, of_dense=(0.95, 1.1)),
        make_case("dense-backward", 32, 8, 128, 32768, 0, of_dense=(1.00, 1.1)),
        make_case("training", 32, 8, 128, 32768, 2048),
    ]


# q_heads, kv_heads, head_dim, length, window, batch; then bar and aim of forward and of backward,
# as multiples of cuDNN's speed. Attention to few keys, or to all of them.
SHORT = (
    ((16, 4, 128, 512, 128), 32, (1.0, 1.2), (1.0, 1.2)),
    ((8, 4, 64, 512, 128), 32, (0.85, 1.2), (0.75, 1.2)),
    ((16, 4, 128, 1024, 256), 16, (1.25, 1.6), (1.1, 1.4)),
    ((8, 4, 64, 1024, 256), 16, (1.0, 1.6), (0.9, 1.4)),
    ((16, 4, 128, 2048, 512), 8, (1.6, 2.2), (1.35, 1.8)),
    ((8, 4, 64, 2048, 512), 8, (1.2, 2.2), (1.1, 1.8)),
    ((8, 4, 64, 2048, 2048), 8, (0.95, 1.1), (0.9, 1.1)),
    ((32, 8, 128, 8192, 8192), 1, (0.98, 1.1), (0.95, 1.1)),
)


def short_cases() -> list[Case]:
    found = []
    for sizes, batch, forward, backward in SHORT:
        found.append(make_case("attention", *sizes, batch=batch, times_cudnn=forward))
        found.append(make_case("backward", *sizes, batch=batch, times_cudnn=backward))
    return found


def growing_cases() -> list[Case]:
    """Windows that grow more slowly than the length: one sequence, and 16,384 keys in all."""
    found = []
    for sizes in ((32, 8, 128), (16, 4, 64)):
        for length, share in ((1024, 5), (4096, 10), (16384, 20), (65536, 40)):
            for batch in sorted({1, max(1, 16384 // length)}):
                window = round(length / share)
                found.append(make_case("growing", *sizes, length, window, batch=batch))
    return found


def single_cases() -> list[Case]:
    """Cases of a single operation, or of a single query."""
    read = (1 / 1.3, 1 / 1.05)
    launch = {"fdma": Goal("ms", 0.060, 0.030), "graph": Goal("ms", 0.015, 0.008)}
    return [
        make_case("select", 0, 1, 0, 32768, 1024, ms=(0.060, 0.030)),
        make_case("select", 0, 8, 0, 32768, 2048, ms=(0.080, 0.040)),
        make_case("select", 0, 8, 0, 131072, 2048, ms=(0.180, 0.090)),
        make_case("select", 0, 8, 0, 1048576, 2048, ms=(1.5, 0.8)),
        make_case("score", 8, 8, 128, 131072, 0, of_read=read),
        make_case("score", 32, 32, 128, 131072, 0, of_read=read),
        make_case("one-query", 32, 8, 128, 131072, 0, of_read=(1 / 1.25, 1 / 1.1)),
        make_case("one-query", 32, 8, 128, 131072, 2048, ms=(0.125, 0.10)),
        make_case("one-query", 2, 1, 64, 524288, 1024, ms=(0.095, 0.06)),
        Case("launch", 2, 1, 64, 16, 4, launch),
    ]


def all_cases(quick: bool) -> list[Case]:
    """quick: only short sequences with head_dim 128, and nothing longer than QUICK_LENGTH."""
    short = [case for case in short_cases() if not quick or case.head_dim == 128]
    cases = [*forward_cases(), *short, *growing_cases(), *single_cases(), *backward_cases()]
    return [case for case in cases if not quick or case.length <= QUICK_LENGTH]
