"""Attention of one rank's tokens in a sequence that many ranks hold, each some consecutive tokens.

A rank needs the keys of earlier ranks that the last query before its own tokens keeps. They are
among the candidates of those ranks. The candidates of a rank are the keys that its last query would
keep if its tokens were the whole sequence, at most window + recent. docs/algorithm.md, "One
sequence over several processes", says why queries of later ranks keep no others.

    scores -> candidates -> candidates of all ranks
           -> selection over [candidates of earlier ranks | own keys] -> attention over them

Candidates are carried keys, as in a stream (streams.py), but the table may have any number of rows.
Their scores and positions are gathered first; keys and values follow while the own keys are
selected. The autograd function, with backward, is in _context_autograd.py.

Without causal masking all queries keep the same keys, which are among the candidates of all ranks.

Dimensions beside those in fdma.h: room, the candidates of a rank; rows, the carried keys.
"""

from __future__ import annotations

import bisect
import math
from typing import Any, NamedTuple, Tuple

import torch

from . import ops
from ._arguments import MaybeTensor
from ._ranks import Ranks
from ._sequences import Layout, int32_on

Tensors = Tuple[torch.Tensor, ...]
MaybeTensors = Tuple[MaybeTensor, ...]


class Call(NamedTuple):
    """The inputs of a call that it does not differentiate."""

    ranks: Ranks
    layouts: list[Layout]  # of all ranks
    score: torch.Tensor  # of the own keys, like bias
    bias: MaybeTensor
    key_valid: MaybeTensor
    window: int
    recent: int
    sinks: int
    causal: bool
    bias_form: str
    softmax_scale: float
    softcap: float
    deterministic: bool
    backend: str | None

    @property
    def own(self) -> Layout:
        return self.layouts[self.ranks.rank]

    @property
    def room(self) -> int:
        longest = max(layout.length for layout in self.layouts)
        return max(min(self.window + self.recent, longest), 1)

    @property
    def rules(self) -> tuple[int, int, int, str]:
        """Rules of a causal selection. Its last query keeps the keys that all queries keep in
        global scope."""
        return self.window, self.recent, self.sinks, "causal"

    @property
    def candidate_rules(self) -> tuple[int, int, int]:
        """Rules that keep at most `room` keys. If `room` covers all keys of every rank, recent and
        sinks are not needed."""
        room = self.room
        return self.rules[:3] if room == self.window + self.recent else (room, 0, 0)

    def owners(self, reader: int) -> range:
        """The ranks whose candidates are carried keys of the rank `reader`."""
        if not self.causal:
            return range(self.ranks.size)
        after = self.layouts[reader]
        if after.head == 0:
            return range(0)
        ends = [layout.offset + layout.length for layout in self.layouts[:reader]]
        return range(bisect.bisect_right(ends, after.begin), reader)

    @property
    def readers(self) -> list[int]:
        """The ranks that have candidates of this rank as carried keys."""
        own = self.ranks.rank
        return [rank for rank in range(self.ranks.size) if own in self.owners(rank)]

    @property
    def exchanges(self) -> bool:
        """True if any rank reads candidates of another."""
        return not self.causal or any(layout.head > 0 for layout in self.layouts)

    def joins(self, segment: Segment) -> bool:
        """True if queries of the segment attend to the carried keys and to own ones."""
        return self.causal and segment.reads_carried

    def select_backend(self) -> str | None:
        return ops.backend_for(self.backend, "select")


class Numbers(NamedTuple):
    """Numbers of candidates, each [..., batch, kv_heads, room]."""

    score: torch.Tensor
    bias: torch.Tensor
    position: torch.Tensor  # int32, counted from the rank's key `tail`; -1: no key

    @classmethod
    def within(cls, packed: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Numbers:
        """Views into bytes [..., bytes_of(...)] of one rank or several."""
        count, at, found = math.prod(shape), 0, []
        for kind in (dtype, dtype, torch.int32):
            end = at + count * kind.itemsize
            found.append(packed[..., at:end].view(kind).unflatten(-1, shape))
            at = end
        return cls(*found)


def bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The bytes of a rank's Numbers: a multiple of 8, and never 0, because 0 bytes have no
    views."""
    return max((math.prod(shape) * (2 * dtype.itemsize + 4) + 7) // 8 * 8, 8)


class Candidates(NamedTuple):
    """The keys of a rank that queries of later ranks may keep."""

    numbers: Numbers
    packed: torch.Tensor  # bytes of all numbers
    rows: torch.Tensor  # [batch, room, kv_heads, 2 * head_dim]: key and value


class Table(NamedTuple):
    """Score, position and bias of the carried keys, [batch, kv_heads, rows]. Position -1 marks an
    empty row."""

    score: torch.Tensor
    position: torch.Tensor  # int32
    bias: torch.Tensor


class Segment(NamedTuple):
    """Own tokens first to last - 1, and the selection of their keys."""

    first: int
    last: int
    reads_carried: bool  # the tokens continue the sequence of the carried keys
    starts: MaybeTensor  # None without causal masking
    expiry: torch.Tensor
    slot: torch.Tensor


def find_candidates(call: Call, key: torch.Tensor, value: torch.Tensor) -> Candidates:
    own, room, rules = call.own, call.room, call.candidate_rules
    tail = slice(own.tail, own.length)  # keys of sequences that end on this rank are no candidates
    valid = None if call.key_valid is None else call.key_valid[:, tail]
    key, value, score = key[:, tail], value[:, tail], call.score[..., tail]
    backend = call.select_backend()
    # The last query keeps the same keys in both scopes. Global scope is faster, but has no rule
    # `recent`. The operator cache_store takes any selection as causal, and reads only which keys
    # are kept to the end, and their slots.
    scope = "causal" if rules[1] > 0 else "global"
    kept = ops.SELECT(score, valid, None, None, *rules, scope, 0.0, backend)
    (batch, _, kv_heads, head_dim), device = key.shape, key.device
    shape = (batch, kv_heads, room)
    packed = torch.empty(bytes_of(shape, score.dtype), dtype=torch.uint8, device=device)
    numbers = Numbers.within(packed, shape, score.dtype)
    rows = key.new_empty((batch, room, kv_heads, 2 * head_dim))
    seen = torch.empty(batch, dtype=torch.int32, device=device)  # not used
    cache = (*rows.chunk(2, -1), numbers.bias, numbers.score, numbers.position, seen, None)
    backend = ops.backend_for(call.backend, "cache_store")
    if batch > 0:  # a cache has at least one sequence
        ops.CACHE_STORE(key, value, score, None, *kept, *cache, *rules, call.bias_form, backend)
    return Candidates(numbers, packed, rows)


def join_ranks(gathered: torch.Tensor, dim: int) -> torch.Tensor:
    """Move the axis of ranks of [ranks, ...] before the axis `dim` of a rank's tensor, and merge
    the two. No copy is made if all axes before `dim` have length 1."""
    return gathered.movedim(0, dim).flatten(dim, dim + 1)


def find_table(call: Call, gathered: torch.Tensor) -> Table | None:
    """The carried keys, taken from the numbers of all ranks; None if there are none."""
    owners = call.owners(call.ranks.rank)
    if not owners:
        return None
    layouts = [call.layouts[owner] for owner in owners]
    batch, kv_heads, _ = call.score.shape
    shape = (batch, kv_heads, call.room)
    found = Numbers.within(gathered[owners.start : owners.stop], shape, call.score.dtype)
    first = int32_on(gathered.device, [layout.offset + layout.tail for layout in layouts])
    position = torch.where(found.position >= 0, found.position + first.view(-1, 1, 1, 1), -1)
    return Table(*(join_ranks(one, 2) for one in (found.score, position, found.bias)))


def take_rows(call: Call, gathered: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """key and value of the carried keys, [batch, rows, kv_heads, head_dim]. Empty rows are never
    read."""
    owners = call.owners(call.ranks.rank)
    key, value = join_ranks(gathered[owners.start : owners.stop], 1).chunk(2, -1)
    return key, value


def select_carried(call: Call, table: Table | None, tokens: slice) -> Tensors:
    """expiry and slot of the carried keys and of the own keys `tokens`, which follow them."""
    assert table is not None
    score, valid = call.score[..., tokens], call.key_valid
    seen = int32_on(score.device, score.shape[0] * [call.own.offset])
    tensors = (score, None if valid is None else valid[:, tokens], table.score, table.position)
    return ops.SELECT_CARRIED(*tensors, seen, *call.rules, call.select_backend())


def select_segments(call: Call, table: Table | None) -> list[Segment]:
    """Split the own tokens into at most two segments: the tokens that follow the carried keys, and
    the others. Without causal masking only the carried keys are selected."""
    own, segments = call.own, []
    if not call.causal:
        return [Segment(0, own.length, True, None, *select_carried(call, table, slice(0, 0)))]
    if own.head > 0:
        kept = select_carried(call, table, slice(0, own.head))
        segments.append(Segment(0, own.head, True, None, *kept))
    if own.head < own.length or not segments:
        rest = slice(own.head, own.length)
        starts = None if own.starts is None else int32_on(call.score.device, own.starts)
        valid = None if call.key_valid is None else call.key_valid[:, rest]
        tensors = (call.score[..., rest], valid, starts, None)
        kept = ops.SELECT(*tensors, *call.rules, 0.0, call.select_backend())
        segments.append(Segment(own.head, own.length, False, starts, *kept))
    return segments


class Carried(NamedTuple):
    """The carried keys, in the order of the operators' arguments."""

    key: torch.Tensor  # [batch, rows, kv_heads, head_dim]
    value: torch.Tensor
    bias: MaybeTensor  # [batch, kv_heads, rows]


def cut(segment: Segment, rows: Tensors, bias: MaybeTensor) -> MaybeTensors:
    """query, key, value and bias of a segment."""
    tokens = slice(segment.first, segment.last)
    return (*(one[:, tokens] for one in rows), None if bias is None else bias[..., tokens])


def arguments_of(
    call: Call,
    segment: Segment,
    tensors: MaybeTensors,
    carried: MaybeTensors,
    sink_logit: MaybeTensor,
) -> tuple[Any, ...]:
    """The arguments of a segment's operator, from query to softcap, from its query, key, value and
    bias and the carried keys' key, value and bias."""
    scope = "causal" if call.causal else "global"
    numbers = (*call.rules[:3], scope, call.causal, call.softmax_scale, call.softcap)
    kept = (segment.expiry, segment.slot)
    if call.joins(segment):
        return (*tensors, *carried, sink_logit, *kept, *numbers)
    key_valid = None
    if not call.causal:
        tensors = (tensors[0], *carried)
    elif call.key_valid is not None:
        key_valid = call.key_valid[:, segment.first : segment.last]
    masks = (key_valid, segment.starts, None, sink_logit, *4 * [None])
    return (*tensors, *masks, *kept, *numbers)


def attend(
    call: Call,
    segment: Segment,
    tensors: MaybeTensors,
    carried: MaybeTensors,
    sink_logit: MaybeTensor,
) -> Tensors:
    """out and lse of a segment."""
    given = arguments_of(call, segment, tensors, carried, sink_logit)
    last = (call.deterministic, call.backend)
    if call.joins(segment):
        return ops.CARRIED_ATTENTION(*given, *last)
    return ops.ATTENTION(*given, 0.0, *last)
