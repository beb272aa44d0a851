"""The cases of benchmarks/streams.py: their sizes, tensors, and the keys that each query keeps.

All are bfloat16 and causal with batch 1. Packed sequences follow one another in that entry.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, NamedTuple

import flash_dmattn
import peers_cuda
import peers_cuda_backward
import torch
from benchmarking import visible_pairs
from peers_cuda_cases import SAMPLES, Goal, best_keys

EDGES = 16  # sequences or pieces whose first and last queries are compared with float64


class Sizes(NamedTuple):
    """Sizes of the cases of a device."""

    heads: tuple[int, int, int]  # q_heads, kv_heads, head_dim
    packed: tuple[int, int, int, int]  # sequences, total tokens, shortest and longest sequence
    packed_window: int
    prefill: tuple[int, int, int]  # keys, keys of a piece, window
    recent: tuple[int, int, int]  # keys, window, recent


SIZES = {
    "cuda": Sizes(
        (32, 8, 128), (64, 32768, 64, 4096), 512, (131072, 8192, 2048), (32768, 1792, 256)
    ),
    "cpu": Sizes((8, 2, 64), (16, 2048, 16, 512), 128, (4096, 512, 256), (2048, 224, 32)),
}


class Case(NamedTuple):
    kind: str  # "packed", "packed-selected", "packed-dense", "prefill" or "recent"
    training: bool  # forward and backward
    heads: tuple[int, int, int]
    lengths: tuple[int, ...]  # of the sequences
    window: int  # 0: dense
    recent: int = 0
    piece: int = 0  # keys of a piece of a prefill
    goal: Goal | None = None

    @property
    def q_heads(self) -> int:
        return self.heads[0]

    @property
    def kv_heads(self) -> int:
        return self.heads[1]

    @property
    def head_dim(self) -> int:
        return self.heads[2]

    @property
    def length(self) -> int:
        return sum(self.lengths)

    def name(self) -> str:
        call = "" if self.kind == "prefill" else "-training" if self.training else "-forward"
        words = [self.kind + call, "bf16", "h{}g{}/d{}".format(*self.heads), f"n{self.length}"]
        words += [f"s{len(self.lengths)}"] if len(self.lengths) > 1 else []
        recent = f"r{self.recent}" if self.recent else ""
        words += [f"w{self.window}{recent}"] if self.window else []
        words += [f"p{self.piece}"] if self.piece else []
        return "/".join(words)

    def flops(self, lengths: tuple[int, ...]) -> float:
        """Useful floating-point operations of attention if the sequences have these lengths."""
        keys = self.window + self.recent
        pairs = sum(visible_pairs(length, keys) for length in lengths)
        return (3.5 if self.training else 1) * 4.0 * self.head_dim * self.q_heads * pairs


def packed_lengths(sequences: int, total: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Lengths of sequences with `total` tokens, with the given least and greatest length.

    A length is shortest * (longest / shortest) ** (u ** power), where u is a uniform random number.
    The power is the same for all, and chosen to give the total."""
    generator = torch.Generator().manual_seed(sequences)
    uniform = torch.rand(sequences, generator=generator, dtype=torch.float64)
    uniform[0], uniform[1] = 0, 1
    uniform = uniform[torch.randperm(sequences, generator=generator)]
    low, high = 0.0, 64.0
    lengths = torch.zeros(0)
    while lengths.sum() != total and high - low > 1e-12:
        power = (low + high) / 2
        lengths = (shortest * (longest / shortest) ** uniform**power).round().long()
        low, high = (power, high) if lengths.sum() > total else (low, power)
    lengths[lengths.argsort()[-2]] += total - lengths.sum()
    return tuple(lengths.tolist())


def all_cases(device: str) -> list[Case]:
    """Goals are for a CUDA device."""
    sizes = SIZES[device]

    def case(kind: str, training: bool, *rest: Any, goal: tuple[float, float] = (0, 0)) -> Case:
        aims = Goal("of_other", *goal) if goal[0] and device == "cuda" else None
        return Case(kind, training, sizes.heads, *rest, goal=aims)

    packed = packed_lengths(*sizes.packed), sizes.packed_window
    dense = packed[0], 0
    keys, piece, window = sizes.prefill
    length, *rules = sizes.recent
    return [
        case("packed", False, *packed),
        case("packed", True, *packed, goal=(1.25, 1.1)),
        case("packed-selected", False, *packed),
        case("packed-selected", True, *packed),
        case("packed-dense", False, *dense, goal=(1.0, 0.8)),
        case("packed-dense", True, *dense, goal=(1.0, 0.8)),
        case("prefill", False, (keys,), window, 0, piece, goal=(1.15, 1.05)),
        case("recent", True, (length,), *rules, goal=(1.05, 1.0)),
    ]


class Inputs:
    """The tensors of a case, which all its peers read."""

    def __init__(self, case: Case, device: str) -> None:
        torch.manual_seed(case.length)
        self.case, self.device = case, device
        heads, length, dim = case.kv_heads, case.length, case.head_dim
        new = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
        self.query = new(1, length, case.q_heads, dim)
        self.key, self.value = new(1, length, heads, dim), new(1, length, heads, dim)
        self.dt_proj = new(heads, heads * dim) / math.sqrt(heads * dim)
        self.a_coef = torch.randn(heads, device=device)
        self.score = torch.randn(1, heads, length, device=device)
        self.fdma = (self.query, self.key, self.value)
        self.expanded: tuple[torch.Tensor, ...] = ()
        if case.kind == "packed-dense":
            group = case.q_heads // heads
            self.expanded = tuple(x.repeat_interleave(group, 2) for x in self.fdma[1:])
        if case.training:
            self.dout = torch.randn_like(self.query)
            for leaf in (*self.fdma, self.dt_proj, self.a_coef, *self.expanded):
                leaf.requires_grad_()
        self.offsets = torch.tensor((0, *case.lengths)).cumsum(0).to(device)
        self.starts = self.offsets.to(torch.int32)
        self.selections: dict[bool, flash_dmattn.Selection] = {}  # by whether it is packed
        if case.kind == "packed-selected":
            for packed in (True, False):
                starts = self.starts if packed else None
                self.selections[packed] = flash_dmattn.select(
                    self.score, case.window, starts=starts
                )
        if case.kind == "prefill":
            self.cache = flash_dmattn.DynamicMaskCache(
                1, 1, heads, dim, case.window, recent=0, dtype=torch.bfloat16, device=device
            )


class Peer(NamedTuple):
    name: str
    forward: Callable[[Inputs], Any]  # out, or the pieces of out
    lengths: tuple[int, ...]  # of the sequences in which queries attend
    window: int
    recent: int = 0
    keys: str = "all"  # "computed": the best by scores of the values; "given": by inputs.score
    expanded: bool = False  # a kv head for each query head
    ours: bool = True
    unless: str = ""  # leave this peer out if that one runs

    def leaves(self, inputs: Inputs) -> list[torch.Tensor]:
        if self.expanded:
            return [inputs.query, *inputs.expanded]
        return peers_cuda_backward.leaves(inputs, self.keys == "computed")

    def run(self, inputs: Inputs) -> Any:
        if not inputs.case.training:
            with torch.no_grad():
                return self.forward(inputs)
        return torch.autograd.grad(self.forward(inputs), self.leaves(inputs), inputs.dout)


# ---- outputs, checked ----


def sampled_rows(inputs: Inputs, lengths: tuple[int, ...]) -> torch.Tensor:
    """Queries from the whole range, and the first and the last of some sequences or pieces."""
    case, piece = inputs.case, inputs.case.piece
    ends = list(range(piece, case.length, piece)) if piece else []
    for length in lengths[:-1]:
        ends.append((ends[-1] if ends else 0) + length)
    ends = ends[:: max(1, len(ends) // EDGES)]
    rows = torch.linspace(0, case.length - 1, min(SAMPLES, case.length)).long().tolist()
    both = (row for end in ends for row in (end - 1, end))
    return torch.tensor(sorted({*rows, *both}), device=inputs.device)


def kept_keys(peer: Peer, ranked: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """bool [rows, length]: the keys that these queries keep, by one kv head's score [length]."""
    kept = torch.zeros(len(rows), len(ranked), dtype=torch.bool, device=ranked.device)
    start = 0
    for length in peer.lengths:
        inside = (rows >= start) & (rows < start + length)
        own, key = rows[inside] - start, torch.arange(length, device=rows.device)
        older = best_keys(ranked[start : start + length], own - peer.recent, peer.window)
        newest = (key <= own[:, None]) & (key > own[:, None] - peer.recent)
        kept[inside, start : start + length] = older | newest
        start += length
    return kept


def check(inputs: Inputs, peer: Peer) -> None:
    """Compare sampled outputs or, for training, their gradients, with float64.

    Raises:
        Disagreement: one of them is too far away, or an output is not a number.
    """
    case, what = inputs.case, f"{inputs.case.name()}: {peer.name}"
    rows = sampled_rows(inputs, peer.lengths)
    ranked, bias = torch.zeros_like(inputs.score), torch.zeros_like(inputs.score)
    if peer.keys == "computed":
        with torch.no_grad():
            ranked, bias = flash_dmattn.score(inputs.value, inputs.dt_proj, inputs.a_coef)
    elif peer.keys == "given":
        ranked = inputs.score
    kept = [kept_keys(peer, ranked[0, g], rows) for g in range(case.kv_heads)]
    with torch.no_grad():
        out = peer.forward(inputs)
        out = torch.cat(out, 1) if isinstance(out, list) else out
        peers_cuda.require_finite(out, what)
        for g in range(case.kv_heads):
            added = torch.where(kept[g], bias[0, g], -torch.inf)
            peers_cuda.check_group(inputs, out, g, rows, added, what)
    if case.training:
        check_gradients(inputs, peer, rows, kept)


def check_gradients(
    inputs: Inputs, peer: Peer, rows: torch.Tensor, kept: list[torch.Tensor]
) -> None:
    """The output gradient is 0 except for the sampled queries."""
    dout = torch.zeros_like(inputs.dout)
    dout[0, rows] = inputs.dout[0, rows]
    leaves = peer.leaves(inputs)
    found = torch.autograd.grad(peer.forward(inputs), leaves, dout)
    if peer.expanded:
        heads = (inputs.case.kv_heads, -1)
        found = (found[0], *(x.unflatten(2, heads).double().sum(3).bfloat16() for x in found[1:]))
    exact, plain = (
        peers_cuda_backward.evaluate(inputs, peer.keys == "computed", rows, kept, dtype)
        for dtype in (torch.float64, torch.bfloat16)
    )
    what = f"{inputs.case.name()}: {peer.name}"
    peers_cuda_backward.compare(found, exact, plain, 2 if peer.ours else 4, what)
