"""The autograd function of context_parallel_attention(). Forward calls the steps of _context.py.
Backward:

    gradients of attention -> gradients of carried keys begin to travel to the keys' ranks
                           -> gradients from other ranks are added to the gradient of bias
                           -> gradients of the weights
                           -> gradients from other ranks are added to those for key and value

Dimensions are as in _context.py.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Sequence

import torch
from torch.autograd.function import once_differentiable

from . import ops
from ._arguments import MaybeTensor
from ._context import (
    Call,
    Carried,
    MaybeTensors,
    Segment,
    Tensors,
    arguments_of,
    attend,
    cut,
    find_candidates,
    find_table,
    select_segments,
    take_rows,
)
from ._ranks import Transfer


class Saved(NamedTuple):
    """The tensors for backward, without the selection of each segment."""

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
