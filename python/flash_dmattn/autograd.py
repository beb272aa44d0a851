"""What autograd does with the operators of ops.py: which tensors it keeps, and which operator of
gradients.py it calls with them. Those have no derivative: asking for it raises NotImplementedError.

Beside its inputs an attention keeps out, lse and, for each key and kv head, expiry, slot and bias:
nothing of q_len x kv_len.
"""

from __future__ import annotations

from typing import Any

import torch

from . import gradients, ops
from ._call import MaybeTensor

Gradients = tuple[MaybeTensor, ...]


def keep(ctx: Any, *tensors: MaybeTensor) -> None:  # noqa: ANN401
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)  # a gradient that nobody has is not a tensor of zeros


def wanted(ctx: Any, *found: tuple[int, MaybeTensor]) -> Gradients:  # noqa: ANN401
    """One gradient for each of forward's arguments; `found` has those that there are by place."""
    result: list[MaybeTensor] = [None] * len(ctx.needs_input_grad)
    for place, gradient in found:
        if ctx.needs_input_grad[place]:
            result[place] = gradient
    return tuple(result)


def find(
    operation: torch.library.CustomOpDef,
    ctx: Any,  # noqa: ANN401
    dout: MaybeTensor,
    dlse: MaybeTensor,
    *options: Any,  # noqa: ANN401
) -> Gradients:
    """What `operation` makes of dout, dlse, the tensors kept, the first of out's shape, and
    `options`; nothing where neither out nor lse has a gradient."""
    if dout is None and dlse is None:
        return ()
    kept = ctx.saved_tensors
    dout = torch.zeros_like(kept[0]) if dout is None else dout
    return operation(dout, dlse, *kept, *options, ctx.backend)


def keep_score(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
    value, dt_proj, a, bias_form, key_valid, backend = inputs
    keep(ctx, value, dt_proj, a, key_valid)
    ctx.bias_form, ctx.backend = bias_form, backend


def score_backward(ctx: Any, dscore: MaybeTensor, dbias: MaybeTensor) -> Gradients:  # noqa: ANN401
    given = [] if ctx.bias_form == "none" else [(dbias, ctx.bias_form)]
    given.append((dscore, "linear"))  # the linear bias is the score
    kept = ctx.saved_tensors  # may be asked for once: checkpoints make them anew
    parts = [
        gradients.score_backward_op(gradient, *kept, form, ctx.backend)
        for gradient, form in given
        if gradient is not None
    ]
    if not parts:
        return wanted(ctx)
    return wanted(ctx, *enumerate(sum(same[1:], same[0]) for same in zip(*parts)))


ops.score_op.register_autograd(score_backward, setup_context=keep_score)


def keep_attention(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
    query, key, value, bias, expiry, slot, key_valid, *options = inputs
    *options, backend, deterministic = options
    keep(ctx, *output, query, key, value, bias, key_valid, expiry, slot)
    ctx.options = (*options, deterministic)
    ctx.backend = backend


def attention_backward(ctx: Any, dout: MaybeTensor, dlse: MaybeTensor) -> Gradients:  # noqa: ANN401
    options = (*ctx.options, ctx.needs_input_grad[3])
    found = find(gradients.attention_backward_op, ctx, dout, dlse, *options)
    return wanted(ctx, *enumerate(found))


ops.attention_op.register_autograd(attention_backward, setup_context=keep_attention)


def keep_fused(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
    query, key, value, dt_proj, a, key_valid, *options, backend = inputs
    out, lse, score, bias, expiry, slot = output
    ctx.learns = options[2] != "none"  # bias_form
    kept_bias = bias if ctx.learns else None
    keep(ctx, out, lse, query, key, value, dt_proj, a, kept_bias, key_valid, expiry, slot)
    ctx.mark_non_differentiable(score, bias, expiry, slot)
    ctx.options, ctx.backend = options, backend


def fused_backward(
    ctx: Any,  # noqa: ANN401
    dout: MaybeTensor,
    dlse: MaybeTensor,
    *rest: MaybeTensor,
) -> Gradients:
    operation = gradients.flash_dma_attention_backward_op
    deterministic = False  # the fused form has no word for it; see is_deterministic()
    found = find(operation, ctx, dout, dlse, *ctx.options, deterministic)
    return wanted(ctx, *enumerate(found if ctx.learns else found[:3]))


ops.flash_dma_attention_op.register_autograd(fused_backward, setup_context=keep_fused)


def keep_merge(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
    *parts, backend = inputs
    keep(ctx, *parts)
    ctx.backend = backend


def merge_backward(ctx: Any, dout: MaybeTensor, dlse: MaybeTensor) -> Gradients:  # noqa: ANN401
    return wanted(ctx, *enumerate(find(gradients.merge_backward_op, ctx, dout, dlse)))


ops.merge_op.register_autograd(merge_backward, setup_context=keep_merge)


def refuse(operation: torch.library.CustomOpDef, name: str) -> None:
    """Let `operation` run under grad mode, as create_graph=True does, but have no derivative."""

    def backward(ctx: Any, *given: MaybeTensor) -> Gradients:  # noqa: ANN401
        raise NotImplementedError(f"flash_dmattn.{name}: second derivatives are not implemented")

    operation.register_autograd(backward)


refuse(gradients.score_backward_op, "score")
refuse(gradients.attention_backward_op, "attention")
refuse(gradients.flash_dma_attention_backward_op, "flash_dma_attention")
refuse(gradients.merge_backward_op, "merge")
