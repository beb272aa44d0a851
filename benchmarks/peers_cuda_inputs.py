"""What a case of a CUDA device in benchmarks/peers.py is: its sizes, goals and tensors.

All are bfloat16 and causal. The peers of a case read the same tensors, whose memory is
[batch, length, heads, head_dim]. peers_cuda_cases.py lists the cases.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, NamedTuple

import flash_dmattn
import torch

SAMPLES = 32  # queries whose outputs are compared with float64, or have gradients
SAW = 4096  # keys in a period of sawtooth scores
ORDERS = ("rising", "falling", "equal", "sawtooth")
LONGEST_DENSE = 131072  # dense attention takes a quarter of a second, and grows with the square
# Kinds with gradients, and their useful operations relative to those of forward.
PASSES = {"backward": 2.5, "selected-backward": 2.5, "dense-backward": 2.5, "training": 3.5}
HIGHER = ("of_dense", "of_read", "times_cudnn")  # figures for which higher is better


class Goal(NamedTuple):
    """What one figure of a row must reach, and what it should reach, if that is more."""

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
    goals: dict[str, Goal]  # of each peer
    mask: bool = False  # small enough for SDPA under a mask
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
        full = min(window or self.length, self.length)
        pairs = full * (full + 1) // 2 + (self.length - full) * full
        if self.kind == "one-query":
            pairs = full
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
    keys: str = ""  # that each query keeps: "all", or an order of scores; "": no output to check


def build_mask(inputs: Inputs) -> torch.Tensor:
    """bool [batch, q_heads, length, length], built from expiry, which is the cheapest way."""
    case = inputs.case
    expiry = flash_dmattn.select(inputs.scores["iid"], case.window).expiry
    key = torch.arange(case.length, dtype=torch.int32, device="cuda")
    kept = (key <= key[:, None]) & (key[:, None] < expiry[:, :, None])
    return kept.repeat_interleave(case.q_heads // case.kv_heads, 1)


def best_keys(score: torch.Tensor, rows: torch.Tensor, window: int) -> torch.Tensor:
    """bool [rows, length], from one kv head's score [length]; of equal scores the later wins."""
    key = torch.arange(len(score), device=score.device)
    visible = key <= rows[:, None]
    if not 0 < window < len(score):
        return visible
    backwards = score.expand_as(visible).masked_fill(~visible, -torch.inf).flip(1)
    order = backwards.sort(dim=1, descending=True, stable=True).indices[:, :window]
    kept = torch.zeros_like(visible).scatter(1, len(score) - 1 - order, True)
    return kept & visible
