"""Dynamic mask attention of queries and keys that are rotated first, as a direct call.

In eager mode one direct call rotates and attends, and autograd records it once, as each record
takes the host about as long as a small call. It is remembered once rotate() and
flash_dma_attention() have checked the arguments and made it: see _repeat.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from . import _call, _repeat, ops
from ._arguments import MaybeTensors, Tensors, autocast, head_under_autocast
from ._repeat import DirectCall, Known, Link


def prepare(
    operator: ops.Operator, result: str, x: torch.Tensor, table: torch.Tensor, nope_heads: int
) -> _call.Prepared:
    """One rotation of x, for a struct of its own: two of a call may have the same layout."""
    operation = operator.operation.with_results((result,))
    tensors: dict[str, Any] = {**dict.fromkeys(operation.tensors), "rotary": table}
    tensors[operation.tensors[0]] = x
    options = dict(zip(operation.options, (0.0, 0, 0, nope_heads, False, False)))
    return _call.Prepared(operation, tensors, options, _call.exec_fields_of(None, x.get_device()))


class Rotation(NamedTuple):
    """The numbers of the last heads of queries and of keys that are not rotated."""

    nope_heads: tuple[int, int]

    def plan(self, rows: Tensors, table: int, given: list[torch.Tensor], first: int) -> list[Link]:
        """Rotates queries and keys, the inputs 0 and 1, to the outputs from `first` on."""
        return [
            Link(prepare(ops.ROTATE, "rotated", x, given[table], nope), (at, table), first + at)
            for at, (x, nope) in enumerate(zip(rows[:2], self.nope_heads))
        ]

    def plan_undo(
        self, backward: _call.Prepared, table: torch.Tensor, table_at: int, first: int
    ) -> list[Link]:
        """Rotates the gradients of queries and keys, the outputs from `first` on, in place."""
        links = []
        for at, nope in enumerate(self.nope_heads):
            shape, _, dtype, _ = backward.outputs[at]
            like = torch.empty(shape, dtype=dtype, device=table.device)
            prepared = prepare(ops.ROTATE_BACKWARD, "dx", like, table, nope)
            links.append(Link(prepared, (first + at, table_at), first + at))
        return links

    def undo(self, gradients: Tensors, table: torch.Tensor) -> Tensors:
        """Rotates the first two gradients, which queries and keys have, back."""
        rest = (0.0, 0, 0)
        pairs = zip(gradients, self.nope_heads)
        given: tuple[Any, ...] = (None, None, table, None, None, *rest)
        turned = [ops.ROTATE_BACKWARD(x, *given, nope, False, False, None)[0] for x, nope in pairs]
        return (*turned, *gradients[2:])


class Call(NamedTuple):
    """A call: query, key and value, a table for the rotation of the first two, and the arguments of
    ops.FUSED after its tensors."""

    rows: Tensors
    weights: MaybeTensors  # dt_proj, a_coef and dt_bias
    key_valid: torch.Tensor | None
    sink_logit: torch.Tensor | None
    table: torch.Tensor
    nope_heads: tuple[int, int]
    settings: tuple[Any, ...]

    def known(self) -> Known:
        tensors = (*self.rows, *self.weights, self.key_valid, self.sink_logit, self.table)
        asked = (*tensors, *self.nope_heads, *self.settings)
        return head_under_autocast(Call, self.rows[0]), asked, len(tensors)


def repeat(call: Call) -> Any:
    """out, if the call is known; otherwise NotImplemented."""
    return _repeat.repeat(*call.known())


def remember(call: Call) -> None:
    """Remember a call that has been made, if it can be a direct one."""
    known = call.known()
    tensors = known[1][: known[2]]
    inputs = [at for at, x in enumerate(tensors) if x is not None]
    given = [tensors[at] for at in inputs]
    if _repeat.NATIVE is None or _repeat.NATIVE.is_watched() or is_changed(call):
        return
    records = _repeat.needs_gradients(given)
    if (records and not _repeat.can_record()) or not _repeat.can_be_direct(
        given, given, call.settings
    ):
        return
    rotation, fused = Rotation(call.nope_heads), ops.FUSED
    hollow = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in call.rows[:2]]
    for one, x in zip(hollow, call.rows):
        one.requires_grad_(records and x.requires_grad)
    own = (*hollow, call.rows[2], *call.weights, call.key_valid, None, None, call.sink_logit, None)
    operation, record = fused.operation.with_results(("out",)), None
    if records:
        assert fused.plan_record is not None
        operation, record = fused.plan_record((*own, *call.settings), 1)
    prepared, _ = _call.find(operation, own, call.settings[:-1], call.settings[-1])
    table, count = len(given) - 1, len(given)
    rotated = count + len(prepared.outputs) + prepared.allocates_workspace
    if record is not None:
        # The table is one more input, and kept before all others.
        numbers = [rotated + at if at < 2 else at if at < table else at + 1 for at in record.kept]
        record = record._replace(
            kept=[table, *numbers],
            sources=[at + 1 if isinstance(at, int) else at for at in record.sources],
            gradients=[*record.gradients, None],
            rotation=rotation,
        )
    sources = [(rotated + at if at < 2 else at, 0) for at in range(table)]
    before = rotation.plan(call.rows, table, given, rotated)
    direct = DirectCall(inputs, given, prepared, 1, record, sources, before)
    if direct.fits(given):
        _repeat.remember(known, direct)


def is_changed(call: Call) -> bool:
    """True if tensors are cast or padded first."""
    if call.rows[0].shape[3] % 8 != 0:
        return True
    cast = autocast("query", call.rows, call.weights)
    return any(x is not y for x, y in zip(cast, (*call.rows, *call.weights)))
