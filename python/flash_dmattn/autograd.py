"""Gradients of the operators: the tensors that autograd keeps, and the backward operators.

The arguments of a backward operator are the gradients of results, such as out and lse, then
arguments and results of its forward operator under the same names. Its result dX is the gradient of
the argument X. Names are resolved when an operator is registered, not in every call.

Beside its inputs an attention keeps out, lse and, for each key and kv head, expiry, slot and bias:
nothing of size q_len x kv_len.
"""

from __future__ import annotations

import functools
from typing import Any, Tuple

import torch

from . import ops
from ._arguments import MaybeTensor, differentiated, is_absent, is_unread
from ._call import Operation
from ._repeat import NATIVE, Record, call_backward

Gradients = Tuple[MaybeTensor, ...]


def keep(ctx: Any, *tensors: MaybeTensor) -> None:
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)  # the gradient of an unused result is None


def indices(names: tuple[str, ...], known: tuple[str, ...]) -> list[int | None]:
    """The index of each name in `known`; None if it is absent."""
    return [known.index(name) if name in known else None for name in names]


def pick(values: Gradients, wanted: list[int | None], needed: tuple[bool, ...]) -> Gradients:
    """The values at the indices `wanted` that are needed, and None for the others."""
    pairs = zip(wanted, needed)
    return tuple([None if at is None or not need else values[at] for at, need in pairs])


def count_taken(forward: ops.Operator, backward: ops.BackwardOperator) -> int:
    """How many gradients of results `backward` takes: its first tensors."""
    results = forward.operation.results
    return sum(differentiated(name) in results for name in backward.operation.tensors)


def differentiate(forward: ops.Operator, backward: ops.BackwardOperator) -> None:
    """Register `backward` as the derivative of `forward`."""
    arguments, results = forward.arguments, forward.operation.results
    taken = count_taken(forward, backward)
    kept_names = backward.operation.tensors[taken:]
    kept = indices(kept_names, arguments + results)
    options = indices((*backward.operation.options, "backend"), arguments)
    gradients = indices(tuple(f"d{name}" for name in arguments), backward.operation.results)
    # flash_dma_attention may have no bias, and then has no gradients of it.
    form = arguments.index("bias_form") if "bias" in results else None
    learned = indices(("ddt_proj", "da_coef", "ddt_bias"), backward.operation.results)
    without_bias = [None if at in learned else at for at in gradients]
    # Maps each option wants_dX of backward, which forward does not have, to the index of X.
    wanted_by = {
        at: arguments.index(name[len("wants_d") :])
        for at, name in enumerate(backward.operation.options)
        if name.startswith("wants_d")
    }
    others = [
        at for at, x in enumerate(results) if f"d{x}" not in backward.operation.tensors[:taken]
    ]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        known = (*inputs, *(output if len(results) > 1 else (output,)))
        named = dict(zip(arguments, inputs))
        ctx.has_bias = form is None or inputs[form] != "none"
        left_out = None if ctx.has_bias else len(inputs) + results.index("bias")
        pairs = zip(kept_names, kept)
        keep(
            ctx,
            *(
                None if at == left_out or at is None or is_unread(name, named) else known[at]
                for name, at in pairs
            ),
        )
        ctx.options = [None if at is None else inputs[at] for at in options]
        if others:
            ctx.mark_non_differentiable(*(output[at] for at in others))

    def derivative(ctx: Any, *from_results: MaybeTensor) -> Gradients:
        needed = ctx.needs_input_grad
        dout, *more = from_results[:taken]
        if dout is None and all(x is None for x in more):
            return (None,) * len(needed)
        tensors = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(tensors[0])  # out, or out_a
        given = ctx.options
        for at, argument in wanted_by.items():
            given[at] = needed[argument]
        found = backward(dout, *more, *tensors, *given)
        wanted = gradients if ctx.has_bias else without_bias
        return pick(found, wanted, needed)

    forward.differentiate(setup_context, derivative)
    forward.plan_record = functools.partial(plan_record, forward, backward)


class Recorded(torch.autograd.Function):
    """A direct call of any operator."""

    forward: Any = None if NATIVE is None else NATIVE.record

    @staticmethod
    def backward(ctx: Any, dout: MaybeTensor, dlse: MaybeTensor = None, *_: Any) -> Gradients:
        call = ctx.call
        gradients = call.record.gradients
        if dout is None and dlse is None:
            return (None,) * (1 + len(gradients))
        kept = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(kept[0])  # out, or out_a
        found = call_backward(call, dout, dlse, kept)
        return (None, *[None if at is None else found[at] for at in gradients])


# Function.apply() without its support for transforms of torch.func and for keywords.
apply_recorded = super(torch.autograd.Function, Recorded).apply


def plan_record(
    forward: ops.Operator, backward: ops.BackwardOperator, arguments: tuple[Any, ...], count: int
) -> tuple[Operation, Record]:
    """The call with the first `count` results of `forward` and the results that `backward` needs,
    and the record of it for autograd."""
    named = dict(zip(forward.arguments, arguments))
    taken = count_taken(forward, backward)
    wanted = backward.operation.tensors[taken:]
    whole = forward.operation
    results = tuple(x for at, x in enumerate(whole.results) if at < count or x in wanted)
    tensors = {name: named[name] for name in whole.tensors}
    given = [name for name, tensor in tensors.items() if tensor is not None]
    shown = [None if is_absent(x, tensors, named) else x for x in results[:count]]
    known = [*given, *shown]
    saved = [name for name in wanted if name in known and not is_unread(name, tensors)]
    sources: list[Any] = [*indices(wanted, tuple(saved))]
    bundled = [name for name in results[count:] if not is_absent(name, tensors, named)]
    for name in bundled:
        sources[wanted.index(name)] = name
    kept = [known.index(name) for name in saved]
    needed = {name for name in given if tensors[name].requires_grad}
    options = [
        name[len("wants_d") :] in needed if name.startswith("wants_d") else named[name]
        for name in backward.operation.options
    ]
    known_options = {**named, **dict(zip(backward.operation.options, options))}
    gradients = backward.operation.results
    found = [at for at, x in enumerate(gradients) if not is_absent(x, tensors, known_options)]
    record = Record(
        apply=apply_recorded,
        backward=backward,
        taken=taken,
        options=(*options, named["backend"]),
        kept=[*kept, len(known)] if bundled else kept,
        sources=sources,
        results=found,
        gradients=[
            found.index(gradients.index(f"d{name}"))
            if name in needed and not is_absent(f"d{name}", tensors, known_options)
            else None
            for name in given
        ],
    )
    return whole.with_results(results, tuple(results[count:])), record


differentiate(ops.ATTENTION, ops.ATTENTION_BACKWARD)
differentiate(ops.CARRIED_ATTENTION, ops.CARRIED_ATTENTION_BACKWARD)
differentiate(ops.FUSED, ops.FUSED_BACKWARD)
differentiate(ops.MERGE, ops.MERGE_BACKWARD)
differentiate(ops.ROTATE, ops.ROTATE_BACKWARD)

SCORE_GRADIENTS = indices(
    tuple(f"d{name}" for name in ops.SCORE.arguments), ops.SCORE_BACKWARD.operation.results
)


def keep_score(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, ctx.bias_form, ctx.backend = inputs
    keep(ctx, *tensors)


def score_backward(ctx: Any, dscore: MaybeTensor, dbias: MaybeTensor) -> Gradients:
    """The sum of the gradients from both results. The linear bias is the score itself."""
    given = [] if ctx.bias_form == "none" else [(dbias, ctx.bias_form)]
    given.append((dscore, "linear"))
    kept = ctx.saved_tensors  # read once: checkpointing recomputes them at each access
    found = [
        ops.SCORE_BACKWARD(gradient, *kept, form, ctx.backend)
        for gradient, form in given
        if gradient is not None
    ]
    if not found:
        return (None,) * len(ctx.needs_input_grad)
    sums = tuple(sum(same[1:], same[0]) for same in zip(*found))
    return pick(sums, SCORE_GRADIENTS, ctx.needs_input_grad)


ops.SCORE.differentiate(keep_score, score_backward)

from . import _flops  # noqa: E402, F401 (registers what FlopCounterMode counts)
