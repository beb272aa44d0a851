"""Attention of one rank's tokens in a sequence that many ranks hold, each some consecutive tokens.

Of the tokens of earlier ranks a rank needs the keys that the last query before its own tokens
keeps: a table of window + recent rows for each kv head, as in a stream (streams.py). That table is
found among candidates. The candidates of a rank are the keys that its last query would keep if its
tokens were the whole sequence, at most window + recent: docs/algorithm.md, "One sequence over
several processes", says why queries of later ranks keep no others.

    scores -> candidates -> candidates of all ranks -> table of what came before
           -> selection over [table | own keys] -> attention over them

Scores and positions of candidates are gathered first. Their keys and values follow while the table
is found and the own keys are selected. Backward returns the gradients of the table's rows to the
ranks that own them, which add them in the order of ranks.

Without causal masking all queries keep the same keys, so that these are the table of every rank,
and attention is dense attention to its rows.

Dimensions beside those of fdma.h: room, the candidates of a rank; rows, those of the table.
"""

from __future__ import annotations

import bisect
from typing import Any, NamedTuple, Tuple

import torch

from . import ops
from ._arguments import MaybeTensor
from ._ranks import Ranks
from ._sequences import Layout, int32_on

Tensors = Tuple[torch.Tensor, ...]
MaybeTensors = Tuple[MaybeTensor, ...]
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}  # of the same size


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
    def rows(self) -> int:
        return self.window + self.recent

    @property
    def room(self) -> int:
        return max(min(self.rows, max(layout.length for layout in self.layouts)), 1)

    @property
    def scope(self) -> str:
        return "causal" if self.causal else "global"

    @property
    def rules(self) -> tuple[int, int, int, str]:
        return self.window, self.recent, self.sinks, self.scope

    def owners(self, reader: int) -> range:
        """The ranks that may have keys of the table of the rank `reader`."""
        if not self.causal:
            return range(self.ranks.size)
        after = self.layouts[reader]
        if after.head == 0:
            return range(0)
        ends = [layout.offset + layout.length for layout in self.layouts[:reader]]
        return range(bisect.bisect_right(ends, after.begin), reader)

    @property
    def exchanges(self) -> bool:
        """Whether any rank reads what another one has."""
        return not self.causal or any(layout.head > 0 for layout in self.layouts)

    def select_backend(self) -> str | None:
        return ops.backend_for(self.backend, "select")


class Candidates(NamedTuple):
    """The keys of a rank that queries of later ranks may keep, in ascending order behind columns
    that have none. All kv heads have equally many."""

    # [batch, kv_heads, room] int64: into the rank's keys, and the column itself. A column without a
    # candidate has those of the last column, which has one if any has
    index: torch.Tensor
    column: torch.Tensor
    # [3, batch, kv_heads, room]: position, -1 where there is no candidate, between score and bias,
    # which are integers of the same bits
    numbers: torch.Tensor
    rows: torch.Tensor  # [batch, kv_heads, room, 2 * head_dim]: key and value


class Table(NamedTuple):
    """The keys of other ranks that queries of this rank may keep."""

    source: torch.Tensor  # [batch, kv_heads, rows] int64: rank * room + column; -1: an empty row
    score: torch.Tensor  # [batch, kv_heads, rows]
    position: torch.Tensor  # [batch, kv_heads, rows] int32; -1: an empty row
    bias: torch.Tensor  # [batch, kv_heads, rows]


class Segment(NamedTuple):
    """Own tokens first to last - 1, and their selection."""

    first: int
    last: int
    reads_table: bool  # whether their keys stand behind those of the table
    starts: MaybeTensor
    expiry: MaybeTensor
    slot: MaybeTensor


def scatter_rows(
    values: torch.Tensor, rows: torch.Tensor, count: int, empty: float
) -> torch.Tensor:
    """A table of `count` rows, `empty` at first, with values[..., j] in the row rows[..., j]. Those
    of the row `count` are dropped."""
    table = values.new_full((*values.shape[:-1], count + 1), empty)
    return table.scatter_(-1, rows, values)[..., :count]


def slots_of_kept(expiry: torch.Tensor, slot: torch.Tensor, count: int) -> torch.Tensor:
    """The slots of the keys that are kept to the end, and `count` for the others."""
    return torch.where(expiry == expiry.shape[-1], slot, count).long()


def find_candidates(call: Call, key: torch.Tensor, value: torch.Tensor) -> Candidates:
    own, room, score = call.own, call.room, call.score
    tail = slice(own.tail, own.length)  # keys of sequences that end on this rank are no candidates
    valid = None if call.key_valid is None else call.key_valid[:, tail]
    tail_score = score[..., tail]
    kept = ops.SELECT(tail_score, valid, None, None, *call.rules, 0.0, call.select_backend())
    keys = torch.arange(own.tail, own.length, device=score.device).expand_as(tail_score)
    index, _ = scatter_rows(keys, slots_of_kept(*kept, room), room, -1).sort(-1)
    is_key = index >= 0
    column = torch.where(is_key, torch.arange(room, device=index.device), room - 1)
    index = torch.where(is_key, index, index[..., -1:]).clamp(min=0)
    integer, head_dim = INTEGERS[score.dtype], key.shape[-1]
    rows = torch.empty((*index.shape, 2 * head_dim), dtype=key.dtype, device=key.device)
    numbers = torch.empty((3, *index.shape), dtype=integer, device=score.device)
    numbers[1] = torch.where(is_key, index + own.offset, -1)
    if own.length == 0:  # nothing to gather from
        return Candidates(index, column, numbers, rows.zero_())
    bias = score if call.bias is None else call.bias
    for out, one in zip((numbers[0], numbers[2]), (score, bias)):
        torch.gather(one.view(integer), 2, index, out=out)
    wide = index[..., None].expand(*index.shape, head_dim)
    rows[..., :head_dim] = key.transpose(1, 2).gather(2, wide)
    rows[..., head_dim:] = value.transpose(1, 2).gather(2, wide)
    return Candidates(index, column, numbers, rows)


def find_table(call: Call, gathered: torch.Tensor) -> Table:
    """The table among the candidates of all ranks, [ranks, 3, batch, kv_heads, room]."""
    own, rank, kind = call.own, call.ranks.rank, call.score.dtype
    before = gathered[:rank] if call.causal else gathered
    numbers = before.permute(1, 2, 3, 0, 4).flatten(3)  # of each head, in the order of positions
    valid = numbers[1, :, 0] >= own.begin  # the same for all kv heads
    kept = ops.SELECT(
        numbers[0].view(kind), valid, None, None, *call.rules, 0.0, call.select_backend()
    )
    columns = torch.arange(numbers.shape[-1], device=numbers.device).expand_as(numbers[0])
    source = scatter_rows(columns, slots_of_kept(*kept, call.rows), call.rows, -1)
    score, position, bias = numbers.gather(-1, source.clamp(min=0).expand(3, *source.shape))
    position = torch.where(source >= 0, position, -1).to(torch.int32)
    return Table(source, score.view(kind), position, bias.view(kind))


def flat_rows(call: Call, source: torch.Tensor, ranks: range, empty: int) -> torch.Tensor:
    """The row of each key of a table in [ranks, batch, kv_heads, room, ...] when all axes before
    `...` are one; `empty` for an empty row of the table."""
    batch, kv_heads, _ = source.shape
    heads = batch * kv_heads
    head = torch.arange(heads, device=source.device).view(batch, kv_heads, 1)
    rank, column = source // call.room - ranks.start, source % call.room
    return torch.where(source >= 0, (rank * heads + head) * call.room + column, empty)


def take_rows(call: Call, table: Table, gathered: torch.Tensor) -> Tensors:
    """key and value of the table, [batch, rows, kv_heads, head_dim]. Empty rows are never read."""
    at = flat_rows(call, table.source, range(call.ranks.size), 0)
    rows = gathered.flatten(0, -2).index_select(0, at.flatten())
    return rows.view(*at.shape, gathered.shape[-1]).transpose(1, 2).chunk(2, -1)


def select_segments(call: Call, table: Table | None) -> list[Segment]:
    """The own tokens in at most two segments: those that stand behind the table, and the others."""
    own, segments = call.own, []
    backend, rules = call.select_backend(), call.rules
    score, valid = call.score, call.key_valid
    if not call.causal:
        return [Segment(0, own.length, True, None, None, None)]
    if own.head > 0:
        head = slice(0, own.head)
        seen = torch.full((score.shape[0],), own.offset, dtype=torch.int32, device=score.device)
        tensors = (score[..., head], None if valid is None else valid[:, head])
        kept = ops.SELECT_CARRIED(*tensors, table.score, table.position, seen, *rules, backend)
        segments.append(Segment(0, own.head, True, None, *kept))
    if own.head < own.length or not segments:
        rest = slice(own.head, own.length)
        starts = None if own.starts is None else int32_on(score.device, own.starts)
        tensors = (score[..., rest], None if valid is None else valid[:, rest])
        kept = ops.SELECT(*tensors, starts, None, *rules, 0.0, backend)
        segments.append(Segment(own.head, own.length, False, starts, *kept))
    return segments


class Carried(NamedTuple):
    """The rows of the table, in the order of the operators' arguments."""

    key: torch.Tensor  # [batch, rows, kv_heads, head_dim]
    value: torch.Tensor
    bias: MaybeTensor  # [batch, kv_heads, rows]


def options_of(call: Call) -> tuple[Any, ...]:
    return (*call.rules, call.causal, call.softmax_scale, call.softcap)


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
    valid: MaybeTensor,
) -> Tensors:
    """out and lse of a segment, from its query, key, value and bias. Without causal masking,
    `valid` [batch, rows] is false for empty rows of the table."""
    last = (call.deterministic, call.backend)
    if not call.causal:
        given = (tensors[0], *carried, valid, None, None, sink_logit)
        no_selection = (*6 * [None], 0, 0, 0, "causal", False)
        numbers = (call.softmax_scale, call.softcap, 0.0)
        return ops.ATTENTION(*given, *no_selection, *numbers, *last)
    if segment.reads_table:
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
    valid: MaybeTensor  # [batch, rows] without causal masking: the rows that are not empty
    source: MaybeTensor  # of Table
    index: MaybeTensor  # of Candidates, and the next one
    column: MaybeTensor


class Gradients(NamedTuple):
    """Of a segment; `carried` has those of the table's rows: key, value and bias."""

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
        given = (tensors[0], *carried, saved.valid, None, None, saved.sink_logit)
        numbers = (0, 0, 0, "causal", False, call.softmax_scale, call.softcap, 0.0)
        last = (call.deterministic, wants_dbias, False, call.backend)
        found = ops.ATTENTION_BACKWARD(*results, *given, *6 * [None], *numbers, *last)
        return Gradients(found[0], None, None, None, found[4], found[1:4])
    if segment.reads_table:
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


def pack(rows: Tensors, has_bias: bool) -> torch.Tensor:
    """Gradients of key and value [batch, n, kv_heads, head_dim], and those of bias [batch,
    kv_heads, n] as they are in memory, in one tensor [batch, kv_heads, n, ...]."""
    dkey, dvalue, dbias = rows
    packed = (dkey.transpose(1, 2), dvalue.transpose(1, 2))
    if has_bias:
        packed += (dbias[..., None].view(dkey.dtype),)
    return torch.cat(packed, -1)


def send_back(call: Call, carried: Tensors | None, like: Saved) -> Tensors | None:
    """Return the gradients of the table's rows to the ranks that own them. Returns what the others
    send back of the own candidates, added in the order of ranks; None if no rank reads them."""
    rank, ranks = call.ranks.rank, range(call.ranks.size)
    head_dim, wide = like.key.shape[-1], like.lse.dtype
    width = 2 * head_dim
    if like.bias is not None:
        width += like.bias.element_size() // like.key.element_size()
    owners, count = call.owners(rank), like.index.numel()
    sent = like.key.new_zeros((len(owners) * count + 1, width))  # the last one is for empty rows
    if carried is not None:
        at = flat_rows(call, like.source, owners, len(owners) * count)
        packed = pack(carried, like.bias is not None)
        sent.index_copy_(0, at.flatten(), packed.flatten(0, 2))
    received = call.ranks.exchange(
        sent[:-1],
        [count if owner in owners else 0 for owner in ranks],
        [count if rank in call.owners(reader) else 0 for reader in ranks],
    )
    received = [block.view(*like.index.shape, width) for block in received if len(block)]
    if not received:
        return None
    rows, bias = None, None
    for block in received:
        more = block[..., 2 * head_dim :].contiguous().view(wide)
        bias = more if bias is None else bias.add_(more)
        more = block[..., : 2 * head_dim]
        rows = more.to(wide) if rows is None else rows.add_(more)
    return rows, bias


def add_rows(target: torch.Tensor, at: torch.Tensor, rows: torch.Tensor) -> None:
    """Add rows to those of `target` with the numbers `at`. Where a number repeats, rows do too."""
    flat = target.view(-1, rows.shape[-1])
    sums = flat.index_select(0, at).to(rows.dtype) + rows
    flat.index_copy_(0, at, sums.to(target.dtype))


def add_candidates(received: Tensors, gradients: Tensors, saved: Saved) -> None:
    """Add what other ranks have sent back to the gradients of the own key, value and bias."""
    dkey, dvalue, dbias = gradients
    batch, length, kv_heads, head_dim = dkey.shape
    # A column without a candidate repeats the last one.
    rows, bias = (x.gather(2, saved.column[..., None].expand_as(x)) for x in received)
    b = torch.arange(batch, device=rows.device).view(-1, 1, 1)
    g = torch.arange(kv_heads, device=rows.device).view(-1, 1)
    at = ((b * length + saved.index) * kv_heads + g).flatten()
    for target, one in zip((dkey, dvalue), rows.flatten(0, 2).split(head_dim, -1)):
        add_rows(target, at, one)
    if bias.shape[-1]:
        at = ((b * kv_heads + g) * length + saved.index).flatten()
        add_rows(dbias, at, bias.view(-1, 1))


def join(tensors: list[MaybeTensor], dim: int) -> MaybeTensor:
    """Those of all segments in one."""
    if len(tensors) == 1 or tensors[0] is None:
        return tensors[0]
    return torch.cat(tensors, dim)


def gradients_of_keys(call: Call, found: list[Gradients], like: Saved) -> MaybeTensors:
    """Of key, value and bias, from the own queries. Without causal masking these attend to the
    table alone."""
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
        table, carried, valid, found = None, (None, None, None), None, (None, None)
        if call.exchanges:
            found = find_candidates(call, key, value)
            numbers, rows = call.ranks.gather(found.numbers), call.ranks.gather(found.rows)
            gathered = numbers.wait()
            if call.owners(call.ranks.rank):
                table = find_table(call, gathered)
        segments = select_segments(call, table)
        if call.exchanges:
            gathered, found = rows.wait(), found[:2]
            del rows
        if table is not None:
            bias_carried = None if bias is None else table.bias
            carried = (*take_rows(call, table, gathered), bias_carried)
            valid = None if call.causal else table.position[:, 0] >= 0
        gathered = None  # its memory is free before attention begins
        outs, lses = [], []
        for segment in segments:
            tensors = cut(segment, (query, key, value), bias)
            out, lse = attend(call, segment, tensors, carried, sink_logit, valid)
            outs.append(out)
            lses.append(lse)
        out, lse = join(outs, 1), join(lses, 2)
        source = None if table is None else table.source
        saved = Saved(*given, call.key_valid, bias, out, lse, *carried, valid, source, *found)
        selected = [one for segment in segments for one in segment[3:]]
        ctx.save_for_backward(*saved, *selected)
        ctx.set_materialize_grads(False)
        ctx.call = call._replace(score=None, bias=None, key_valid=None)
        ctx.segments = [segment[:3] for segment in segments]
        return out, lse

    @staticmethod
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
        received = send_back(call, found[0].carried, saved) if call.exchanges else None
        dquery = join([one.query for one in found], 1)
        dkey, dvalue, dbias = own = gradients_of_keys(call, found, saved)
        if received is not None and call.own.length > 0:
            add_candidates(received, own, saved)
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
