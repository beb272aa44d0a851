"""Dense attention of one rank's tokens in a sequence that many ranks hold: ring attention.

The keys of each rank go round the ring of ranks. A rank attends to the keys that it holds while the
next ones arrive, and merges the results. Backward sends the keys round once more, followed by the
sums of their gradients.

Source: arXiv:2310.01889.
"""

from __future__ import annotations

from typing import Any, Iterator, NamedTuple, Tuple

import torch

from . import ops
from ._arguments import MaybeTensor
from ._ranks import Passing, Ranks

Tensors = Tuple[torch.Tensor, ...]
MaybeTensors = Tuple[MaybeTensor, ...]


class Call(NamedTuple):
    """The inputs of a call that it does not differentiate."""

    ranks: Ranks
    lengths: list[int]  # of all ranks
    key_valid: MaybeTensor
    causal: bool
    softmax_scale: float
    softcap: float
    deterministic: bool
    backend: str | None

    def owner(self, step: int) -> int:
        """The rank whose keys are here in a step."""
        return (self.ranks.rank - step) % self.ranks.size

    def sees(self, owner: int) -> bool:
        """True if queries of this rank attend to keys of the rank `owner`."""
        return not self.causal or owner <= self.ranks.rank

    def arguments(
        self, query: torch.Tensor, rows: list[torch.Tensor], sink_logit: MaybeTensor, owner: int
    ) -> tuple[Any, ...]:
        """Arguments of ATTENTION, from query to dropout_p. Keys of other ranks stand before all
        queries."""
        key, value, *valid = rows
        masks = (None, valid[0] if valid else None, None, None, sink_logit, *6 * [None])
        causal = self.causal and owner == self.ranks.rank
        numbers = (0, 0, 0, "causal", causal, self.softmax_scale, self.softcap, 0.0)
        return (query, key, value, *masks, *numbers)

    def check(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_valid: MaybeTensor,
        sink_logit: MaybeTensor,
    ) -> None:
        """Make a call without tokens, so that the C library refuses an unsupported call before
        anything is sent."""
        rows = [one[:, :0] for one in (query, key, value, key_valid) if one is not None]
        given = self.arguments(rows[0], rows[1:], sink_logit, self.ranks.rank)
        with torch.no_grad():
            ops.ATTENTION(*given, self.deterministic, self.backend)


def pass_round(call: Call, rows: list[torch.Tensor]) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yields each rank, beginning with this one, and its key, value and key_valid."""
    size = call.ranks.size
    for step in range(size):
        passing = None
        if step + 1 < size:
            length = call.lengths[call.owner(step + 1)]
            shapes = [(one.shape[0], length, *one.shape[2:]) for one in rows]
            passing = call.ranks.pass_on(rows, shapes)
        yield call.owner(step), rows
        if passing is not None:
            rows = passing.wait()


def rows_of(call: Call, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that go round the ring."""
    valid = [] if call.key_valid is None else [call.key_valid.to(torch.uint8)]
    return [key, value, *valid]


class RingAttention(torch.autograd.Function):
    """apply(call, query, key, value, sink_logit): out and lse of the own tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sink_logit: MaybeTensor,
    ) -> Tensors:
        last = (call.deterministic, call.backend)
        results = None
        for owner, rows in pass_round(call, rows_of(call, key, value)):
            if not call.sees(owner):
                continue
            # A row has one sink logit. It counts with the own keys, which come first.
            sink = sink_logit if results is None else None
            found = ops.ATTENTION(*call.arguments(query, rows, sink, owner), *last)
            # Merged in float32, because each partial result has been rounded once.
            found = (found[0].to(found[1].dtype), found[1])
            results = found if results is None else ops.MERGE(*results, *found, None)
        assert results is not None  # the own keys are seen
        out, lse = results[0].to(query.dtype), results[1]
        ctx.save_for_backward(query, key, value, sink_logit, call.key_valid, out, lse)
        ctx.set_materialize_grads(False)
        ctx.call = call._replace(key_valid=None)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: MaybeTensor, dlse: MaybeTensor) -> MaybeTensors:
        query, key, value, sink_logit, key_valid, out, lse = ctx.saved_tensors
        call = ctx.call._replace(key_valid=key_valid)
        dout = torch.zeros_like(out) if dout is None else dout
        last = (call.deterministic, False, False, call.backend)
        dquery = torch.zeros_like(query, dtype=lse.dtype)
        dsink, sums, passing = None, None, None
        for owner, rows in pass_round(call, rows_of(call, key, value)):
            found = None
            if call.sees(owner):
                sink = sink_logit if owner == call.ranks.rank else None
                given = call.arguments(query, rows, sink, owner)
                found = ops.ATTENTION_BACKWARD(dout, dlse, out, lse, *given, *last)
                dquery += found[0]
                dsink = found[4] if sink is not None else dsink
            # The previous rank sends its sums for the keys that are here now.
            sums = take_sums(passing, found, rows, lse.dtype)
            length = call.lengths[(owner - 1) % call.ranks.size]
            shapes = [(one.shape[0], length, *one.shape[2:]) for one in sums]
            passing = call.ranks.pass_on(sums, shapes)
        # After one step per rank the sums of the own keys are here.
        assert passing is not None
        dkey, dvalue = passing.wait()
        gradients = (dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype))
        return (None, *gradients, dsink)


def take_sums(
    passing: Passing | None,
    found: Tensors | None,
    rows: list[torch.Tensor],
    wide: torch.dtype,
) -> list[torch.Tensor]:
    """The gradients of the key and value that are here, summed over all ranks so far."""
    if passing is not None:
        sums = passing.wait()
    else:
        sums = [torch.zeros_like(one, dtype=wide) for one in rows[:2]]
    if found is not None:
        for total, one in zip(sums, found[1:3]):
            total += one
    return sums
