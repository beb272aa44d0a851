"""Gradients of the operators: which tensors autograd keeps, and which operator it calls with them.

A backward operator takes the gradients of out and lse, then arguments and results of its forward
operator, by the same names. Its result dX is the gradient of the argument X.

Beside its inputs an attention keeps out, lse and, for each key and kv head, expiry, slot and bias:
nothing of size q_len x kv_len.
"""

from __future__ import annotations

from typing import Any

import torch

from . import ops
from ._arguments import MaybeTensor, is_absent

Gradients = tuple[MaybeTensor, ...]


def keep(ctx: Any, tensors: dict[str, MaybeTensor]) -> None:
    """Save `tensors` for backward, to be had back by name."""
    ctx.kept = tuple(tensors)
    ctx.save_for_backward(*tensors.values())
    ctx.set_materialize_grads(False)  # the gradient of a result that is not used is None


def gradients_of(ctx: Any, forward: ops.Operator, found: dict[str, MaybeTensor]) -> Gradients:
    """One gradient for each argument of `forward` that needs one; `found` holds them as dX."""
    pairs = zip(forward.arguments, ctx.needs_input_grad)
    return tuple(found.get(f"d{name}") if needed else None for name, needed in pairs)


def differentiate(forward: ops.Operator, backward: ops.BackwardOperator) -> None:
    """Make `backward` the derivative of `forward`."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        given = dict(zip(forward.arguments, inputs))
        results = dict(zip(forward.operation.results, output))
        known = {
            **given,
            **{name: None if is_absent(name, given) else x for name, x in results.items()},
        }
        keep(ctx, {name: known[name] for name in backward.operation.tensors if name in known})
        ctx.options = {name: known[name] for name in (*forward.operation.options, "backend")}
        ctx.mark_non_differentiable(
            *(x for name, x in results.items() if name not in ("out", "lse"))
        )

    def derivative(ctx: Any, dout: MaybeTensor, dlse: MaybeTensor, *_: MaybeTensor) -> Gradients:
        if dout is None and dlse is None:
            return gradients_of(ctx, forward, {})
        kept = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(kept[0])  # out, or out_a
        needed = dict(zip(forward.arguments, ctx.needs_input_grad))
        options = {**ctx.options, "wants_dbias": needed.get("bias", False)}
        given = {"dout": dout, "dlse": dlse, **dict(zip(ctx.kept, kept)), **options}
        found = backward.op(*(given[name] for name in backward.arguments))
        results = dict(zip(backward.operation.results, found))
        return gradients_of(
            ctx, forward, {name: x for name, x in results.items() if not is_absent(name, options)}
        )

    forward.op.register_autograd(derivative, setup_context=setup_context)


differentiate(ops.ATTENTION, ops.ATTENTION_BACKWARD)
differentiate(ops.FUSED, ops.FUSED_BACKWARD)
differentiate(ops.MERGE, ops.MERGE_BACKWARD)


def keep_score(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    given = dict(zip(ops.SCORE.arguments, inputs))
    keep(ctx, {name: given[name] for name in ops.SCORE.operation.tensors})
    ctx.bias_form, ctx.backend = given["bias_form"], given["backend"]


def score_backward(ctx: Any, dscore: MaybeTensor, dbias: MaybeTensor) -> Gradients:
    """The sum of what the gradients of both results give; the linear bias is the score itself."""
    given = [] if ctx.bias_form == "none" else [(dbias, ctx.bias_form)]
    given.append((dscore, "linear"))
    kept = ctx.saved_tensors  # read once: checkpointing computes them again at each access
    found = [
        ops.SCORE_BACKWARD.op(gradient, *kept, form, ctx.backend)
        for gradient, form in given
        if gradient is not None
    ]
    sums = (sum(same[1:], same[0]) for same in zip(*found))
    return gradients_of(ctx, ops.SCORE, dict(zip(ops.SCORE_BACKWARD.operation.results, sums)))


ops.SCORE.op.register_autograd(score_backward, setup_context=keep_score)
