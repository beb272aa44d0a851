"""Attention of one rank's tokens in a sequence that many ranks hold, each some consecutive tokens.

A rank needs the keys of earlier ranks that the last query before its own tokens keeps. They are
among the candidates of those ranks. The candidates of a rank are the keys that its last query would
keep if its tokens were the whole sequence, at most window + recent. docs/algorithm.md, "One
sequence over several processes", says why queries of later ranks keep no others.

    scores -> candidates -> candidates of all ranks
           -> selection over [candidates of earlier ranks | own keys] -> attention over them

Candidates are carried keys, as in a stream (streams.py), but the table may have any number of rows.
Their scores and positions are gathered first; keys and values follow while the own keys are
selected. Backward:

    gradients of attention -> gradients of carried keys begin to travel to the keys' ranks
                           -> gradients from other ranks are added to the gradient of bias
                           -> gradients of the weights
                           -> gradients from other ranks are added to those for key and value

Without causal masking all queries keep the same keys, which are among the candidates of all ranks.

Dimensions beside those in fdma.h: room, the candidates of a rank; rows, the carried keys.
"""

from __future__ import annotations

import bisect
import math
from typing import Any, NamedTuple, Sequence, Tuple

import torch
from torch.autograd.function import once_differentiable

from . import ops
from ._arguments import MaybeTensor
from ._ranks import Ranks, Transfer
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


class Saved(NamedTuple):
    """The tensors for backward, without the selection of each segment."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    dt_proj: MaybeTensor
    a_coef: MaybeTensor
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
    """Gradients of a segment; `carried` has the gradients of the carried keys."""

    query: torch.Tensor
    key: MaybeTensor
    value: MaybeTensor
    bias: MaybeTensor
    sink_logit: torch.Tensor
    carried: Carried | None


def differentiate(
    call: Call, segment: Segment, dout: torch.Tensor, dlse: MaybeTensor, saved: Saved
) -> Gradients:
    """The gradients of attend() for one segment."""
    tokens = slice(segment.first, segment.last)
    tensors = cut(segment, (saved.query, saved.key, saved.value), saved.bias)
    carried = (saved.key_carried, saved.value_carried, saved.bias_carried)
    dlse = None if dlse is None else dlse[..., tokens]
    results = (dout[:, tokens], dlse, saved.out[:, tokens], saved.lse[..., tokens])
    given = (*results, *arguments_of(call, segment, tensors, carried, saved.sink_logit))
    wants_dbias = saved.bias is not None
    found: Any  # a tuple whose length depends on the operator
    if call.joins(segment):
        last = (call.deterministic, wants_dbias, wants_dbias, call.backend)
        found = ops.CARRIED_ATTENTION_BACKWARD(*given, *last)
        return Gradients._make((*found[:4], found[7], Carried._make(found[4:7])))
    last = (call.deterministic, wants_dbias, False, call.backend)
    found = ops.ATTENTION_BACKWARD(*given, 0.0, *last)
    if not call.causal:
        return Gradients(found[0], None, None, None, found[4], Carried._make(found[1:4]))
    return Gradients._make((*found[:5], None))


def split_by_rank(tensor: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    """Split the axis `dim`, which has the rows of one rank after the other, into [ranks, ...]."""
    return tensor.unflatten(dim, (ranks, -1)).movedim(dim, 0)


class ReturnedGradient(NamedTuple):
    """A gradient of the own candidates that other ranks return."""

    transfer: Transfer  # [ranks, ...], in the order of ranks
    # [batch, room, kv_heads]: the row of each candidate in the gradient of the own keys, viewed as
    # [-1, head_dim], or [-1, 1] for bias; None: nothing has to be added
    row: MaybeTensor
    # [batch, room, kv_heads]: the candidate whose sum each row writes: its own, or another one if
    # the row is empty; None: no row is empty
    source: MaybeTensor


def send_back(call: Call, carried: Carried | None, saved: Saved) -> list[ReturnedGradient]:
    """Begin to return the gradients of carried keys to the ranks that own the keys. The list has
    bias, if there is one, then key and value. Bias comes first because the gradients of the weights
    need it."""
    assert saved.position is not None
    rank, ranks = call.ranks.rank, range(call.ranks.size)
    batch, kv_heads, room = saved.position.shape
    owners, readers = call.owners(rank), call.readers
    key_index, bias_index, source = locate_candidates(call, saved)

    def begin(name: str, axis: int, shape: tuple[int, ...], index: MaybeTensor) -> ReturnedGradient:
        """Begin with key, value or bias: `axis` is its axis of rows, `shape` is for one rank."""
        count = math.prod(shape)
        if carried is None:
            sent = getattr(saved, name).new_empty(0)
        else:
            sent = split_by_rank(getattr(carried, name), axis, len(owners)).reshape(-1)
        transfer = call.ranks.exchange(
            sent,
            [count if owner in owners else 0 for owner in ranks],
            [count if reader in readers else 0 for reader in ranks],
            (len(readers), *shape),
        )
        return ReturnedGradient(transfer, index, source)

    rows = (batch, room, kv_heads, saved.key.shape[-1])
    found = [] if saved.bias is None else [begin("bias", 2, (batch, kv_heads, room), bias_index)]
    return [*found, begin("key", 1, rows, key_index), begin("value", 1, rows, key_index)]


def locate_candidates(call: Call, saved: Saved) -> MaybeTensors:
    """ReturnedGradient.row for key and value, the same for bias, and ReturnedGradient.source. All
    are None if this rank has no candidates, or if no rank reads them."""
    if call.own.length == call.own.tail or not call.readers:
        return None, None, None
    assert saved.position is not None
    batch, length, kv_heads, _ = saved.key.shape
    position = saved.position.transpose(1, 2)  # [batch, room, kv_heads]
    source, room = None, position.shape[1]
    if call.key_valid is not None or call.own.length - call.own.tail < room:
        # An empty row writes the same numbers as the newest candidate, if there is one.
        newest, source = position.max(1, keepdim=True)
        numbers = torch.arange(room, device=position.device).view(-1, 1)
        source = torch.where(position >= 0, numbers, source)
        position = torch.where(position >= 0, position, newest).clamp_(min=0)
    index = position + call.own.tail
    b = torch.arange(batch, device=position.device).view(-1, 1, 1)
    g = torch.arange(kv_heads, device=position.device)
    return (b * length + index) * kv_heads + g, (b * kv_heads + g) * length + index, source


def add_returned(returned: ReturnedGradient, gradient: torch.Tensor, dtype: torch.dtype) -> None:
    """Add the gradients that other ranks return to a gradient of the own keys. They are summed in
    `dtype` in the order of ranks, not in the order of arrival."""
    transfer, index, source = returned
    if index is None:
        transfer.wait()  # its memory may not be reused before the transfer ends
        return
    is_bias = gradient.dim() == 3
    flat, at = gradient.view(-1, 1 if is_bias else gradient.shape[-1]), index.flatten()
    sums = flat.index_select(0, at).to(dtype)  # before the stream waits for other ranks
    more = transfer.wait().sum(0, dtype=dtype)
    more = more.transpose(1, 2)[..., None] if is_bias else more
    sums = sums.view(more.shape).add_(more)
    if source is not None:
        sums = sums.gather(1, source[..., None].expand_as(sums))
    flat.index_copy_(0, at, sums.flatten(0, 2).to(gradient.dtype))


def join(tensors: Sequence[MaybeTensor], dim: int) -> MaybeTensor:
    """The tensors along the axis `dim`, all of which are there, or none."""
    found = [one for one in tensors if one is not None]
    return torch.cat(found, dim) if len(found) > 1 else tensors[0]


def gradients_of_keys(call: Call, found: list[Gradients], like: Saved) -> MaybeTensors:
    """Gradients of key, value and bias from the own queries. Without causal masking they are zeros,
    because queries then attend to the carried keys alone."""
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
    def forward(
        ctx: Any,
        call: Call,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *rest: MaybeTensor,
    ) -> Tensors:
        bias, sink_logit = call.bias, rest[-1]
        table, position = None, None
        carried: MaybeTensors = (None, None, None)
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
            # The rows of the own candidates are free before attention begins.
            del found, numbers, rows, gathered
        results = []
        for segment in segments:
            tensors = cut(segment, (query, key, value), bias)
            results.append(attend(call, segment, tensors, carried, sink_logit))
        out, lse = join([one[0] for one in results], 1), join([one[1] for one in results], 2)
        assert out is not None and lse is not None
        saved = (query, key, value, *rest, call.key_valid, bias, out, lse, *carried, position)
        selected = [one for segment in segments for one in segment[3:]]
        ctx.save_for_backward(*saved, *selected)
        ctx.set_materialize_grads(False)
        freed: dict[str, Any] = dict.fromkeys(("score", "bias", "key_valid"))
        ctx.call = call._replace(**freed)
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
        dkey, dvalue, dbias = gradients_of_keys(call, found, saved)
        returned = send_back(call, found[0].carried, saved) if call.exchanges else []
        dweights: MaybeTensors = (None, None, None)
        if saved.bias is not None:
            assert dbias is not None
            if returned:
                add_returned(returned.pop(0), dbias, saved.lse.dtype)
            weights = (saved.value, saved.dt_proj, saved.a_coef, saved.dt_bias)
            backend = ops.backend_for(call.backend, "score_backward")
            rest = (call.key_valid, None, dvalue, call.bias_form, backend)  # it adds to dvalue
            ddt_proj, da_coef, ddt_bias = ops.SCORE_BACKWARD_ADDED(dbias, *weights, *rest)
            dweights = (ddt_proj, da_coef, None if saved.dt_bias is None else ddt_bias)
        for one, gradient in zip(returned, (dkey, dvalue)):
            assert gradient is not None
            add_returned(one, gradient, saved.lse.dtype)
        dsink = None
        if saved.sink_logit is not None:
            dsink = sum((one.sink_logit for one in found[1:]), found[0].sink_logit)
        return (None, dquery, dkey, dvalue, *dweights, dsink)
