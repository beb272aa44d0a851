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
    operator: ops.Operator,
    names: tuple[str, str],
    results: tuple[str, str],
    rows: Tensors,
    table: torch.Tensor,
    nope_heads: tuple[int, int],
) -> _call.Prepared:
    """One call of the operator's C function for two tensors of rows, which have these names."""
    operation = operator.operation._replace(results=results)
    given = {**dict.fromkeys(operation.tensors), **dict(zip(names, rows)), "rotary": table}
    options = {"nope_heads": nope_heads[0], "key_nope_heads": nope_heads[1]}
    return _call.Prepared(operation, given, options, _call.exec_fields_of(None, table.get_device()))


class Rotation(NamedTuple):
    """The numbers of the last heads of queries and of keys that are not rotated."""

    nope_heads: tuple[int, int]

    def plan(self, rows: Tensors, table: int, given: list[torch.Tensor], first: int) -> list[Link]:
        """Rotates queries and keys, the inputs 0 and 1, to the outputs from `first` on."""
        results = ("rotated", "rotated_key")
        names, nope = ("x", "key"), self.nope_heads
        prepared = prepare(ops.ROTATE, names, results, rows[:2], given[table], nope)
        return [Link(prepared, (0, table, 1), (first, first + 1))]

    def plan_undo(
        self, backward: _call.Prepared, table: torch.Tensor, table_at: int, first: int
    ) -> list[Link]:
        """Rotates the gradients of queries and keys, the outputs from `first` on, in place."""
        rows = tuple(
            torch.empty(shape, dtype=dtype, device=table.device)
            for shape, _, dtype, _ in backward.outputs[:2]
        )
        names, nope = ("drotated", "drotated_key"), self.nope_heads
        prepared = prepare(ops.ROTATE_BACKWARD, names, ("dx", "dkey"), rows, table, nope)
        return [Link(prepared, (first, table_at, first + 1), (first, first + 1))]

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
