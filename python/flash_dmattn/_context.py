"""Attention of one rank's tokens in a sequence that many ranks hold, each some consecutive tokens.

Of the tokens of earlier ranks a rank needs the keys that the last query before its own tokens
keeps. These are among the candidates of those ranks. The candidates of a rank are the keys that its
last query would keep if its tokens were the whole sequence, at most window + recent:
docs/algorithm.md, "One sequence over several processes", says why queries of later ranks keep no
others.

    scores -> candidates -> candidates of all ranks
           -> selection over [candidates of earlier ranks | own keys] -> attention over them

Candidates are carried keys, as in a stream (streams.py), but with a table of any number of rows.
Their scores and positions are gathered first, their keys and values follow while the own keys are
selected. Backward sends the gradients of carried keys back to the ranks that own the keys.

Without causal masking all queries keep the same keys, which are among the candidates of all ranks.

Dimensions beside those of fdma.h: room, the candidates of a rank; rows, the carried keys.
"""

from __future__ import annotations

import bisect
import math
from typing import Any, NamedTuple, Tuple

import torch
from torch.autograd.function import once_differentiable

from . import ops
from ._arguments import MaybeTensor
from ._ranks import Ranks
from ._sequences import Layout, int32_on

Tensors = Tuple[torch.Tensor, ...]
MaybeTensors = Tuple[MaybeTensor, ...]


class Call(NamedTuple):
    """What a call has beside the tensors that it differentiates."""

    ranks: Ranks
    layouts: list[Layout]  # of all ranks
    score: torch.Tensor  # of the own keys, and their bias
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
        """Of a selection in causal scope, whose last query keeps what all queries keep in global
        scope."""
        return self.window, self.recent, self.sinks, "causal"

    @property
    def candidate_rules(self) -> tuple[int, int, int]:
        """Those that keep at most `room` keys. If that is all keys of any rank, no other rules are
        needed."""
        room = self.room
        return self.rules[:3] if room == self.window + self.recent else (room, 0, 0)

    def owners(self, reader: int) -> range:
        """The ranks whose candidates the rank `reader` has as carried keys."""
        if not self.causal:
            return range(self.ranks.size)
        after = self.layouts[reader]
        if after.head == 0:
            return range(0)
        ends = [layout.offset + layout.length for layout in self.layouts[:reader]]
        return range(bisect.bisect_right(ends, after.begin), reader)

    @property
    def readers(self) -> list[int]:
        """The ranks that have candidates of this one as carried keys."""
        own = self.ranks.rank
        return [rank for rank in range(self.ranks.size) if own in self.owners(rank)]

    @property
    def exchanges(self) -> bool:
        """Whether any rank reads what another one has."""
        return not self.causal or any(layout.head > 0 for layout in self.layouts)

    def select_backend(self) -> str | None:
        return ops.backend_for(self.backend, "select")


class Numbers(NamedTuple):
    """Of candidates, [..., batch, kv_heads, room]."""

    score: torch.Tensor
    bias: torch.Tensor
    position: torch.Tensor  # int32, among the rank's keys from `tail` on; -1: there is none

    @classmethod
    def within(cls, packed: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Numbers:
        """Views of bytes [..., bytes_of(...)] of one rank or of several."""
        count, at, found = math.prod(shape), 0, []
        for kind in (dtype, dtype, torch.int32):
            end = at + count * kind.itemsize
            found.append(packed[..., at:end].view(kind).unflatten(-1, shape))
            at = end
        return cls(*found)


def bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Of the numbers of a rank, a multiple of 8 and never 0, which would have no views."""
    return max((math.prod(shape) * (2 * dtype.itemsize + 4) + 7) // 8 * 8, 8)


class Candidates(NamedTuple):
    """The keys of a rank that queries of later ranks may keep."""

    numbers: Numbers
    packed: torch.Tensor  # bytes of all numbers
    rows: torch.Tensor  # [batch, room, kv_heads, 2 * head_dim]: key and value


class Table(NamedTuple):
    """Score, position and bias of the carried keys, [batch, kv_heads, rows]. A row of position -1
    is empty."""

    score: torch.Tensor
    position: torch.Tensor  # int32
    bias: torch.Tensor


class Segment(NamedTuple):
    """Own tokens first to last - 1, and their selection."""

    first: int
    last: int
    reads_carried: bool  # whether they stand behind the carried keys
    starts: MaybeTensor
    expiry: torch.Tensor
    slot: torch.Tensor


def find_candidates(call: Call, key: torch.Tensor, value: torch.Tensor) -> Candidates:
    own, room, rules = call.own, call.room, call.candidate_rules
    tail = slice(own.tail, own.length)  # keys of sequences that end on this rank are no candidates
    valid = None if call.key_valid is None else call.key_valid[:, tail]
    key, value, score = key[:, tail], value[:, tail], call.score[..., tail]
    backend = call.select_backend()
    kept = ops.SELECT(score, valid, None, None, *rules, "causal", 0.0, backend)
    (batch, _, kv_heads, head_dim), device = key.shape, key.device
    shape = (batch, kv_heads, room)
    packed = torch.empty(bytes_of(shape, score.dtype), dtype=torch.uint8, device=device)
    numbers = Numbers.within(packed, shape, score.dtype)
    rows = key.new_empty((batch, room, kv_heads, 2 * head_dim))
    seen = torch.empty(batch, dtype=torch.int32, device=device)  # of no use here
    cache = (*rows.chunk(2, -1), numbers.bias, numbers.score, numbers.position, seen, None)
    backend = ops.backend_for(call.backend, "cache_store")
    if batch > 0:  # a cache has sequences
        ops.CACHE_STORE(key, value, score, None, *kept, *cache, *rules, call.bias_form, backend)
    return Candidates(numbers, packed, rows)


def join_ranks(gathered: torch.Tensor, dim: int) -> torch.Tensor:
    """[ranks, ...] with the axis of ranks before the axis `dim` of a rank's own, and one with it:
    no copy, where all axes before that have length 1."""
    return gathered.movedim(0, dim).flatten(dim, dim + 1)


def find_table(call: Call, gathered: torch.Tensor) -> Table | None:
    """The carried keys, from the numbers of all ranks; None if there are none."""
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


def take_rows(call: Call, gathered: torch.Tensor) -> Tensors:
    """key and value of the carried keys, [batch, rows, kv_heads, head_dim]. Empty rows are never
    read."""
    owners = call.owners(call.ranks.rank)
    return join_ranks(gathered[owners.start : owners.stop], 1).chunk(2, -1)


def select_carried(call: Call, table: Table, tokens: slice) -> Tensors:
    """expiry and slot of the carried keys, and of some own keys behind them."""
    score, valid = call.score[..., tokens], call.key_valid
    seen = int32_on(score.device, score.shape[0] * [call.own.offset])
    tensors = (score, None if valid is None else valid[:, tokens], table.score, table.position)
    return ops.SELECT_CARRIED(*tensors, seen, *call.rules, call.select_backend())


def select_segments(call: Call, table: Table | None) -> list[Segment]:
    """The own tokens in at most two segments: those that stand behind the carried keys, and the
    others. Without causal masking only the carried keys are selected."""
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


def options_of(call: Call) -> tuple[Any, ...]:
    scope = "causal" if call.causal else "global"
    return (*call.rules[:3], scope, call.causal, call.softmax_scale, call.softcap)


def cut(segment: Segment, rows: Tensors, bias: MaybeTensor) -> MaybeTensors:
    """query, key, value and bias of a segment."""
    tokens = slice(segment.first, segment.last)
    return (*(one[:, tokens] for one in rows), None if bias is None else bias[..., tokens])


def attend(
    call: Call,
    segment: Segment,
    tensors: MaybeTensors,
    carried: Carried | None,
    sink_logit: MaybeTensor,
) -> Tensors:
    """out and lse of a segment, from its query, key, value and bias."""
    last = (call.deterministic, call.backend)
    if not call.causal:
        given = (tensors[0], *carried, None, None, None, sink_logit, *4 * [None])
        kept = (segment.expiry, segment.slot)
        return ops.ATTENTION(*given, *kept, *options_of(call), 0.0, *last)
    if segment.reads_carried:
        kept = (sink_logit, segment.expiry, segment.slot)
        return ops.CARRIED_ATTENTION(*tensors, *carried, *kept, *options_of(call), *last)
    key_valid = None if call.key_valid is None else call.key_valid[:, segment.first : segment.last]
    masks = (key_valid, segment.starts, None, sink_logit, *4 * [None])
    kept = (segment.expiry, segment.slot)
    return ops.ATTENTION(*tensors, *masks, *kept, *options_of(call), 0.0, *last)


# ---- Backward ----


class Saved(NamedTuple):
    """What backward needs, beside the selection of each segment."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    dt_proj: torch.Tensor
    a_coef: torch.Tensor
    dt_bias: MaybeTensor
    sink_logit: MaybeTensor
    key_valid: MaybeTensor
    bias: MaybeTensor
    out: torch.Tensor
    lse: torch.Tensor
    key_carried: MaybeTensor
    value_carried: MaybeTensor
    bias_carried: MaybeTensor
    position: MaybeTensor  # of the own candidates


class Gradients(NamedTuple):
    """Of a segment; `carried` has those of the carried keys: key, value and bias."""

    query: torch.Tensor
    key: MaybeTensor
    value: MaybeTensor
    bias: MaybeTensor
    sink_logit: torch.Tensor
    carried: Tensors | None


def differentiate(
    call: Call, segment: Segment, dout: torch.Tensor, dlse: MaybeTensor, saved: Saved
) -> Gradients:
    """The gradients of attend()."""
    tokens = slice(segment.first, segment.last)
    rows = (saved.query, saved.key, saved.value)
    tensors = cut(segment, rows, saved.bias)
    results = (dout[:, tokens], None if dlse is None else dlse[..., tokens])
    results += (saved.out[:, tokens], saved.lse[..., tokens])
    wants_dbias = saved.bias is not None
    carried = (saved.key_carried, saved.value_carried, saved.bias_carried)
    if not call.causal:
        given = (tensors[0], *carried, None, None, None, saved.sink_logit, *4 * [None])
        kept = (segment.expiry, segment.slot)
        last = (0.0, call.deterministic, wants_dbias, False, call.backend)
        found = ops.ATTENTION_BACKWARD(*results, *given, *kept, *options_of(call), *last)
        return Gradients(found[0], None, None, None, found[4], found[1:4])
    if segment.reads_carried:
        kept = (saved.sink_logit, segment.expiry, segment.slot)
        last = (call.deterministic, wants_dbias, wants_dbias, call.backend)
        given = (*tensors, *carried, *kept, *options_of(call), *last)
        found = ops.CARRIED_ATTENTION_BACKWARD(*results, *given)
        return Gradients(*found[:4], found[7], found[4:7])
    key_valid = None if call.key_valid is None else call.key_valid[:, tokens]
    masks = (key_valid, segment.starts, None, saved.sink_logit, *4 * [None])
    last = (0.0, call.deterministic, wants_dbias, False, call.backend)
    given = (*tensors, *masks, segment.expiry, segment.slot, *options_of(call), *last)
    found = ops.ATTENTION_BACKWARD(*results, *given)
    return Gradients(*found[:5], None)


def split_by_rank(tensor: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    """[ranks, ...] of a tensor whose axis `dim` has the rows of one rank after the other."""
    return tensor.unflatten(dim, (ranks, -1)).movedim(dim, 0)


def send_back(call: Call, carried: Tensors, like: Saved) -> list[torch.Tensor]:
    """Return the gradients of carried keys to the ranks that own them. Returns those of the own
    candidates from other ranks, in the order of ranks: of key and value [ranks, batch, room,
    kv_heads, head_dim], and of bias, if there is one, [ranks, batch, kv_heads, room]."""
    rank, ranks = call.ranks.rank, range(call.ranks.size)
    batch, kv_heads, room = like.position.shape
    owners, readers = call.owners(rank), call.readers
    shape = (batch, room, kv_heads, like.key.shape[-1])
    kinds = [(like.key, 1, shape), (like.value, 1, shape)]
    if like.bias is not None:
        kinds.append((like.bias, 2, (batch, kv_heads, room)))
    found = []
    for (like_this, dim, shape), own in zip(kinds, carried or 3 * (None,)):
        count = math.prod(shape)
        if own is None:
            sent = like_this.new_empty(0)
        else:
            sent = split_by_rank(own, dim, len(owners)).reshape(-1)
        blocks = call.ranks.exchange(
            sent,
            [count if owner in owners else 0 for owner in ranks],
            [count if reader in readers else 0 for reader in ranks],
        )
        found.append(blocks.view(len(readers), *shape))
    return found


class Targets(NamedTuple):
    """Where the gradients of the own candidates are, and what these are so far."""

    at: list[torch.Tensor]  # of key, value and bias: rows in the order of [batch, room, kv_heads]
    sums: list[torch.Tensor]  # the same rows, in the dtype of lse
    # [batch, room, kv_heads]: the row whose key each row has, another one if it is empty; None: all
    # rows have their own
    row: MaybeTensor


def find_targets(call: Call, gradients: Tensors, saved: Saved) -> Targets:
    batch, length, kv_heads, _ = saved.key.shape
    position = saved.position.transpose(1, 2)  # [batch, room, kv_heads]
    row, room = None, position.shape[1]
    if call.key_valid is not None or call.own.length - call.own.tail < room:
        # A row without a candidate repeats one that has one, if any has.
        newest, row = position.max(1, keepdim=True)
        numbers = torch.arange(room, device=position.device).view(-1, 1)
        row = torch.where(position >= 0, numbers, row)
        position = torch.where(position >= 0, position, newest).clamp_(min=0)
    index = position + call.own.tail
    b = torch.arange(batch, device=position.device).view(-1, 1, 1)
    g = torch.arange(kv_heads, device=position.device)
    at = 2 * [((b * length + index) * kv_heads + g).flatten()]
    if saved.bias is not None:
        at.append(((b * kv_heads + g) * length + index).flatten())
    sums = []
    for one, rows in zip(gradients, at):
        flat = one.view(-1, one.shape[-1] if one.dim() == 4 else 1)
        sums.append(flat.index_select(0, rows).to(saved.lse.dtype))
    return Targets(at, sums, row)


def add_candidates(targets: Targets, received: list[torch.Tensor], gradients: Tensors) -> None:
    """Add what other ranks have sent back to the gradients of the own key, value and bias. Numbers
    are added in an order that depends on that of the ranks alone."""
    for at, sums, blocks, target in zip(*targets[:2], received, gradients):
        more = blocks.sum(0, dtype=sums.dtype)
        more = more if more.dim() == 4 else more.transpose(1, 2)[..., None]
        sums = sums.view(more.shape).add_(more)
        if targets.row is not None:
            sums = sums.gather(1, targets.row[..., None].expand_as(sums))
        flat = target.view(-1, sums.shape[-1])
        flat.index_copy_(0, at, sums.flatten(0, 2).to(target.dtype))


def join(tensors: list[MaybeTensor], dim: int) -> MaybeTensor:
    """Those of all segments in one."""
    if len(tensors) == 1 or tensors[0] is None:
        return tensors[0]
    return torch.cat(tensors, dim)


def gradients_of_keys(call: Call, found: list[Gradients], like: Saved) -> MaybeTensors:
    """Of key, value and bias, from the own queries. Without causal masking these attend to the
    carried keys alone."""
    if call.causal:
        key, value = join([one.key for one in found], 1), join([one.value for one in found], 1)
        return key, value, join([one.bias for one in found], 2)
    rows = (like.key, like.value, like.bias)
    return tuple(
        None if one is None else torch.zeros_like(one, memory_format=torch.contiguous_format)
        for one in rows
    )


class ContextAttention(torch.autograd.Function):
    """apply(call, query, key, value, dt_proj, a_coef, dt_bias, sink_logit): out and lse of the own
    tokens."""

    @staticmethod
    def forward(ctx: Any, call: Call, *given: MaybeTensor) -> Tensors:
        query, key, value, *_, sink_logit = given
        bias = call.bias
        table, carried, position = None, (None, None, None), None
        if call.exchanges:
            found = find_candidates(call, key, value)
            numbers, rows = call.ranks.gather(found.packed), call.ranks.gather(found.rows)
            position = found.numbers.position
            table = find_table(call, numbers.wait())
        segments = select_segments(call, table)
        if call.exchanges:
            gathered = rows.wait()
            if table is not None:
                carried = (*take_rows(call, gathered), None if bias is None else table.bias)
            # The own candidates are free before attention begins.
            del found, numbers, rows, gathered
        outs, lses = [], []
        for segment in segments:
            tensors = cut(segment, (query, key, value), bias)
            out, lse = attend(call, segment, tensors, carried, sink_logit)
            outs.append(out)
            lses.append(lse)
        out, lse = join(outs, 1), join(lses, 2)
        saved = Saved(*given, call.key_valid, bias, out, lse, *carried, position)
        selected = [one for segment in segments for one in segment[3:]]
        ctx.save_for_backward(*saved, *selected)
        ctx.set_materialize_grads(False)
        ctx.call = call._replace(score=None, bias=None, key_valid=None)
        ctx.segments = [segment[:3] for segment in segments]
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: MaybeTensor, dlse: MaybeTensor) -> MaybeTensors:
        tensors, count = ctx.saved_tensors, len(Saved._fields)
        saved, selected = Saved(*tensors[:count]), tensors[count:]
        call = ctx.call._replace(key_valid=saved.key_valid)
        if dout is None:
            dout = torch.zeros_like(saved.out)
        segments = [
            Segment(*one, *selected[3 * at : 3 * at + 3]) for at, one in enumerate(ctx.segments)
        ]
        found = [differentiate(call, segment, dout, dlse, saved) for segment in segments]
        dquery = join([one.query for one in found], 1)
        dkey, dvalue, dbias = own = gradients_of_keys(call, found, saved)
        if call.exchanges:
            # All that needs no other rank is done before they are waited for.
            is_read = call.own.length > call.own.tail and call.readers
            targets = find_targets(call, own, saved) if is_read else None
            received = send_back(call, found[0].carried, saved)
            if targets is not None:
                add_candidates(targets, received, own)
        dweights: MaybeTensors = (None, None, None)
        if saved.bias is not None:
            weights = (saved.value, saved.dt_proj, saved.a_coef, saved.dt_bias)
            backend = ops.backend_for(call.backend, "score_backward")
            rest = (call.key_valid, None, dvalue, call.bias_form, backend)
            *dweights, dt_bias = ops.SCORE_BACKWARD_ADDED(dbias, *weights, *rest)
            dweights = (*dweights, None if saved.dt_bias is None else dt_bias)
        dsink = None
        if saved.sink_logit is not None:
            dsink = sum((one.sink_logit for one in found[1:]), found[0].sink_logit)
        return (None, dquery, dkey, dvalue, *dweights, dsink)
