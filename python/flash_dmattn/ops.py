"""torch.library operators over the C library: flash_dmattn::score, select, attention and
flash_dma_attention, for CPU tensors.

Each operator is an allocation of its outputs, which alone is its fake kernel, and one C call. Other
devices register kernels on these operators; their schemas stay. What arguments mean and which are
refused is written in fdma.h; the C library does the checking.
"""

from __future__ import annotations

import ctypes
from typing import Any, Optional

import torch

from . import _library

DTYPES = {
    torch.float32: _library.FLOAT32,
    torch.float16: _library.FLOAT16,
    torch.bfloat16: _library.BFLOAT16,
    torch.float64: _library.FLOAT64,
    torch.int32: _library.INT32,
    torch.uint8: _library.UINT8,
    torch.bool: _library.UINT8,
}

Pair = tuple[torch.Tensor, torch.Tensor]
Outputs = tuple[torch.Tensor, ...]
MaybeTensor = Optional[torch.Tensor]


class Call:
    """One C call: keeps alive what its arguments point to."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def view(self, name: str, tensor: MaybeTensor) -> _library.Tensor:
        """`tensor` as the C library sees it, without a copy unless its last stride is not 1."""
        if tensor is None:
            return _library.Tensor()
        if not 1 <= tensor.dim() <= 4:
            raise ValueError(f"{name}: rank is {tensor.dim()}, want 1 to 4")
        if tensor.dtype not in DTYPES:
            raise NotImplementedError(f"{name}: dtype is {tensor.dtype}, which no kernel takes")
        if tensor.stride(-1) != 1 and tensor.size(-1) > 1:
            tensor = tensor.contiguous()
        self.tensors.append(tensor)
        absent = (0,) * (4 - tensor.dim())
        return _library.Tensor(
            data=tensor.data_ptr(),
            shape=(*tensor.shape, *absent),
            stride=(*tensor.stride(), *absent),
            dtype=DTYPES[tensor.dtype],
            rank=tensor.dim(),
        )

    def run(self, operation: str, args: _library.Sized, backend: str | None) -> None:
        """Call fdma_<operation> on a workspace of the size that it asks for."""
        args.exec.threads = torch.get_num_threads()
        args.exec.kernel = None if backend is None else backend.encode()
        size = ctypes.c_size_t()
        workspace_size = getattr(_library.library, f"fdma_{operation}_workspace")
        _library.check(workspace_size(ctypes.byref(args), ctypes.byref(size)))
        workspace = torch.empty(size.value, dtype=torch.uint8)
        args.exec.workspace = workspace.data_ptr()
        args.exec.workspace_size = size.value
        _library.check(getattr(_library.library, f"fdma_{operation}")(ctypes.byref(args)))


def choice(name: str, value: str, choices: dict[str, int]) -> int:
    """The enumerator that `value` names. Errors: ValueError."""
    if value not in choices:
        raise ValueError(f"{name}: is {value!r}, want one of {', '.join(map(repr, choices))}")
    return choices[value]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, biases and lse beside q, k, v of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sizes(name: str, tensor: torch.Tensor, rank: int) -> torch.Size:
    """The shape of `tensor`. Errors: ValueError where its rank is not `rank`."""
    if tensor.dim() != rank:
        raise ValueError(f"{name}: rank is {tensor.dim()}, want {rank}")
    return tensor.shape


def new_scores(value: torch.Tensor, bias_form: str) -> Pair:
    """Room for score and bias, both [batch, kv_heads, kv_len]; an absent bias has no elements."""
    batch, kv_len, kv_heads, _ = sizes("v", value, 4)
    score = value.new_empty((batch, kv_heads, kv_len), dtype=wide(value.dtype))
    return score, torch.empty_like(score) if bias_form != "none" else score.new_empty((0,))


def new_selection(like: torch.Tensor, shape: tuple[int, ...]) -> Pair:
    """Room for expiry and slot."""
    expiry = like.new_empty(shape, dtype=torch.int32)
    return expiry, torch.empty_like(expiry)


def new_attention(query: torch.Tensor) -> Pair:
    """Room for out [batch, q_len, q_heads, head_dim] and lse [batch, q_heads, q_len]."""
    batch, q_len, q_heads, _ = sizes("q", query, 4)
    lse = query.new_empty((batch, q_heads, q_len), dtype=wide(query.dtype))
    return query.new_empty(query.shape), lse


def new_outputs(query: torch.Tensor, value: torch.Tensor, bias_form: str) -> Outputs:
    """Room for everything that the fused form returns."""
    score, bias = new_scores(value, bias_form)
    return (*new_attention(query), score, bias, *new_selection(score, score.shape))


@torch.library.custom_op(
    "flash_dmattn::score",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor value, Tensor dt_proj, Tensor a_coef, str bias_form, Tensor? key_valid, "
    "str? backend) -> (Tensor, Tensor)",
)
def score_op(
    value: torch.Tensor,
    dt_proj: torch.Tensor,
    a_coef: torch.Tensor,
    bias_form: str,
    key_valid: MaybeTensor,
    backend: str | None,
) -> Pair:
    """fdma_score(): score and bias."""
    form = choice("bias_form", bias_form, _library.BIAS_FORMS)
    score, bias = new_scores(value, bias_form)
    call = Call()
    args = _library.ScoreArgs(
        v=call.view("v", value),
        dt_proj=call.view("dt_proj", dt_proj),
        a=call.view("a", a_coef),
        key_valid=call.view("key_valid", key_valid),
        score=call.view("score", score),
        bias=call.view("bias", bias if bias_form != "none" else None),
        bias_form=form,
    )
    call.run("score", args, backend)
    return score, bias


@score_op.register_fake
def _(
    value: torch.Tensor,
    dt_proj: torch.Tensor,
    a_coef: torch.Tensor,
    bias_form: str,
    key_valid: MaybeTensor,
    backend: str | None,
) -> Pair:
    return new_scores(value, bias_form)


@torch.library.custom_op(
    "flash_dmattn::select",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor score, SymInt window, str scope, Tensor? key_valid, str? backend) "
    "-> (Tensor, Tensor)",
)
def select_op(
    score: torch.Tensor, window: int, scope: str, key_valid: MaybeTensor, backend: str | None
) -> Pair:
    """fdma_select(): expiry and slot."""
    expiry, slot = new_selection(score, sizes("score", score, 3))
    call = Call()
    selection = _library.Selection(expiry=call.view("expiry", expiry), slot=call.view("slot", slot))
    args = _library.SelectArgs(
        score=call.view("score", score),
        key_valid=call.view("key_valid", key_valid),
        selection=ctypes.pointer(selection),
        window=window,
        scope=choice("scope", scope, _library.SCOPES),
    )
    call.run("select", args, backend)
    return expiry, slot


@select_op.register_fake
def _(
    score: torch.Tensor, window: int, scope: str, key_valid: MaybeTensor, backend: str | None
) -> Pair:
    return new_selection(score, sizes("score", score, 3))


@torch.library.custom_op(
    "flash_dmattn::attention",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? expiry, Tensor? slot, "
    "Tensor? key_valid, SymInt window, str scope, bool causal, float scale, float softcap, "
    "str? backend) -> (Tensor, Tensor)",
)
def attention_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: MaybeTensor,
    expiry: MaybeTensor,
    slot: MaybeTensor,
    key_valid: MaybeTensor,
    window: int,
    scope: str,
    causal: bool,
    scale: float,
    softcap: float,
    backend: str | None,
) -> Pair:
    """fdma_forward(): out and lse; dense where `expiry` is None."""
    out, lse = new_attention(query)
    call = Call()
    args = _library.ForwardArgs(
        q=call.view("q", query),
        k=call.view("k", key),
        v=call.view("v", value),
        bias=call.view("bias", bias),
        key_valid=call.view("key_valid", key_valid),
        out=call.view("out", out),
        lse=call.view("lse", lse),
        scale=scale,
        softcap=softcap,
        causal=causal,
    )
    if expiry is not None:
        selection = _library.Selection(
            expiry=call.view("expiry", expiry),
            slot=call.view("slot", slot),
            window=window,
            kv_len=expiry.size(-1),
            scope=choice("scope", scope, _library.SCOPES),
        )
        args.selection = ctypes.pointer(selection)
        args.window = window
    call.run("forward", args, backend)
    return out, lse


@attention_op.register_fake
def _(query: torch.Tensor, *rest: Any) -> Pair:  # noqa: ANN401
    return new_attention(query)


@torch.library.custom_op(
    "flash_dmattn::flash_dma_attention",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor query, Tensor key, Tensor value, Tensor dt_proj, Tensor a_coef, "
    "Tensor? key_valid, SymInt window, str scope, str bias_form, bool causal, float scale, "
    "float softcap, str? backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def flash_dma_attention_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dt_proj: torch.Tensor,
    a_coef: torch.Tensor,
    key_valid: MaybeTensor,
    window: int,
    scope: str,
    bias_form: str,
    causal: bool,
    scale: float,
    softcap: float,
    backend: str | None,
) -> Outputs:
    """fdma_attention(): out, lse, score, bias, expiry and slot."""
    form = choice("bias_form", bias_form, _library.BIAS_FORMS)
    out, lse, score, bias, expiry, slot = new_outputs(query, value, bias_form)
    call = Call()
    selection = _library.Selection(expiry=call.view("expiry", expiry), slot=call.view("slot", slot))
    args = _library.AttentionArgs(
        q=call.view("q", query),
        k=call.view("k", key),
        v=call.view("v", value),
        dt_proj=call.view("dt_proj", dt_proj),
        a=call.view("a", a_coef),
        key_valid=call.view("key_valid", key_valid),
        out=call.view("out", out),
        lse=call.view("lse", lse),
        score=call.view("score", score),
        bias=call.view("bias", bias if bias_form != "none" else None),
        selection=ctypes.pointer(selection),
        window=window,
        scope=choice("scope", scope, _library.SCOPES),
        bias_form=form,
        scale=scale,
        softcap=softcap,
        causal=causal,
    )
    call.run("attention", args, backend)
    return out, lse, score, bias, expiry, slot


@flash_dma_attention_op.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dt_proj: torch.Tensor,
    a_coef: torch.Tensor,
    key_valid: MaybeTensor,
    window: int,
    scope: str,
    bias_form: str,
    *rest: Any,  # noqa: ANN401
) -> Outputs:
    return new_outputs(query, value, bias_form)


@torch.library.custom_op(
    "flash_dmattn::backward_of",
    mutates_args=(),
    schema="(str operation, Tensor[] gradients, Tensor[] inputs) -> Tensor[]",
)
def backward_of_op(
    operation: str, gradients: list[torch.Tensor], inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The gradients of `inputs`, given those of the outputs. An operator, so that a graph with a
    backward can be compiled and its forward run. Errors: NotImplementedError, always."""
    raise NotImplementedError(f"flash_dmattn.{operation} has no backward pass: it is forward only")


@backward_of_op.register_fake
def _(
    operation: str, gradients: list[torch.Tensor], inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensor in inputs]


def refuse_backward(operation: torch.library.CustomOpDef, name: str) -> None:
    """Let `operation` run under grad mode, and its backward raise NotImplementedError."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
        ctx.places = [
            place for place, value in enumerate(inputs) if isinstance(value, torch.Tensor)
        ]
        ctx.count = len(inputs)
        ctx.save_for_backward(*(inputs[place] for place in ctx.places))

    def backward(ctx: Any, *gradients: MaybeTensor) -> tuple[MaybeTensor, ...]:  # noqa: ANN401
        given = [gradient for gradient in gradients if gradient is not None]
        found = backward_of_op(name, given, list(ctx.saved_tensors))
        result: list[MaybeTensor] = [None] * ctx.count
        for place, gradient in zip(ctx.places, found):
            result[place] = gradient
        return tuple(result)

    operation.register_autograd(backward, setup_context=setup_context)


refuse_backward(score_op, "score")
refuse_backward(attention_op, "attention")
refuse_backward(flash_dma_attention_op, "flash_dma_attention")
