"""torch.library operators over the C library: flash_dmattn::score, select, attention,
flash_dma_attention, flash_dma_output and merge, for tensors of the CPU and of CUDA devices. Their
gradients are in gradients.py.

Each operator is an allocation of its outputs, which alone is its fake kernel, and one C call. Other
devices register kernels on these operators; their schemas stay. What arguments mean and which are
refused is written in fdma.h; the C library does the checking.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from . import _library
from ._call import Draft, MaybeTensor, Operation, Outputs, call

DEVICES = ("cpu", "cuda")

Pair = tuple[torch.Tensor, torch.Tensor]


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


def give_selection(
    args: _library.Sized, expiry: MaybeTensor, window: int, scope: str
) -> _library.Selection:
    """What `args` points to where there is an `expiry`; the call fills in its tensors."""
    selection = _library.Selection()
    if expiry is not None:
        selection.window = window
        selection.kv_len = expiry.size(-1)
        selection.scope = choice("scope", scope, _library.SCOPES)
        args.selection = ctypes.pointer(selection)
    return selection


def draft_score(
    value: torch.Tensor, dt_proj: torch.Tensor, a: torch.Tensor, key_valid: MaybeTensor, form: str
) -> Draft:
    args = _library.ScoreArgs(bias_form=choice("bias_form", form, _library.BIAS_FORMS))
    score, bias = new_scores(value, form)
    return Draft(args, None, (("score", score), ("bias" if form != "none" else "", bias)))


def draft_select(score: torch.Tensor, key_valid: MaybeTensor, window: int, scope: str) -> Draft:
    selection = _library.Selection()
    args = _library.SelectArgs(
        selection=ctypes.pointer(selection),
        window=window,
        scope=choice("scope", scope, _library.SCOPES),
    )
    expiry, slot = new_selection(score, sizes("score", score, 3))
    return Draft(args, selection, (("expiry", expiry), ("slot", slot)))


def draft_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: MaybeTensor,
    key_valid: MaybeTensor,
    expiry: MaybeTensor,
    slot: MaybeTensor,
    window: int,
    scope: str,
    causal: bool,
    scale: float,
    softcap: float,
) -> Draft:
    out, lse = new_attention(query)
    args = _library.ForwardArgs(scale=scale, softcap=softcap, causal=causal)
    selection = give_selection(args, expiry, window, scope)
    return Draft(args, selection, (("out", out), ("lse", lse)))


def draft_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dt_proj: torch.Tensor,
    a: torch.Tensor,
    key_valid: MaybeTensor,
    window: int,
    scope: str,
    bias_form: str,
    causal: bool,
    scale: float,
    softcap: float,
) -> Draft:
    selection = _library.Selection()
    args = _library.AttentionArgs(
        selection=ctypes.pointer(selection),
        window=window,
        scope=choice("scope", scope, _library.SCOPES),
        bias_form=choice("bias_form", bias_form, _library.BIAS_FORMS),
        scale=scale,
        softcap=softcap,
        causal=causal,
    )
    names = ("out", "lse", "score", "bias" if bias_form != "none" else "", "expiry", "slot")
    return Draft(args, selection, tuple(zip(names, new_outputs(query, value, bias_form))))


def draft_output(*arguments: Any) -> Draft:  # noqa: ANN401
    """What is not asked for lives in the workspace."""
    draft = draft_attention(*arguments)
    draft.args.selection = None
    return draft._replace(selection=None, outputs=draft.outputs[:1])


def draft_merge(out: torch.Tensor, *rest: torch.Tensor) -> Draft:
    return Draft(_library.MergeArgs(), None, tuple(zip(("out", "lse"), new_attention(out))))


SCORE = Operation("score", ("v", "dt_proj", "a", "key_valid"), draft_score)
SELECT = Operation("select", ("score", "key_valid"), draft_select)
FORWARD = Operation(
    "forward", ("q", "k", "v", "bias", "key_valid", "expiry", "slot"), draft_forward
)
MERGE = Operation("merge", ("out_a", "lse_a", "out_b", "lse_b"), draft_merge)
FUSED_INPUTS = ("q", "k", "v", "dt_proj", "a", "key_valid")
ATTENTION = Operation("attention", FUSED_INPUTS, draft_attention)
OUTPUT = Operation("attention", FUSED_INPUTS, draft_output)


@torch.library.custom_op(
    "flash_dmattn::score",
    mutates_args=(),
    device_types=DEVICES,
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
    return call(SCORE, (value, dt_proj, a_coef, key_valid), (bias_form,), backend)


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
    device_types=DEVICES,
    schema="(Tensor score, SymInt window, str scope, Tensor? key_valid, str? backend) "
    "-> (Tensor, Tensor)",
)
def select_op(
    score: torch.Tensor, window: int, scope: str, key_valid: MaybeTensor, backend: str | None
) -> Pair:
    """fdma_select(): expiry and slot."""
    return call(SELECT, (score, key_valid), (window, scope), backend)


@select_op.register_fake
def _(
    score: torch.Tensor, window: int, scope: str, key_valid: MaybeTensor, backend: str | None
) -> Pair:
    return new_selection(score, sizes("score", score, 3))


@torch.library.custom_op(
    "flash_dmattn::attention",
    mutates_args=(),
    device_types=DEVICES,
    schema="(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? expiry, Tensor? slot, "
    "Tensor? key_valid, SymInt window, str scope, bool causal, float scale, float softcap, "
    "str? backend, bool deterministic=False) -> (Tensor, Tensor)",
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
    deterministic: bool = False,
) -> Pair:
    """fdma_forward(): out and lse; dense where `expiry` is None. `deterministic` is backward's."""
    tensors = (query, key, value, bias, key_valid, expiry, slot)
    return call(FORWARD, tensors, (window, scope, causal, scale, softcap), backend)


@attention_op.register_fake
def _(query: torch.Tensor, *rest: Any) -> Pair:  # noqa: ANN401
    return new_attention(query)


@torch.library.custom_op(
    "flash_dmattn::flash_dma_attention",
    mutates_args=(),
    device_types=DEVICES,
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
    tensors = (query, key, value, dt_proj, a_coef, key_valid)
    options = (window, scope, bias_form, causal, scale, softcap)
    return call(ATTENTION, tensors, options, backend)


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


def flash_dma_output(
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
) -> torch.Tensor:
    """fdma_attention(): out alone, where no gradient is wanted."""
    tensors = (query, key, value, dt_proj, a_coef, key_valid)
    options = (window, scope, bias_form, causal, scale, softcap)
    return call(OUTPUT, tensors, options, backend)[0]


# Defined without custom_op, whose autograd takes a fifth of the time of a call on small inputs.
LIBRARY = torch.library.Library("flash_dmattn", "FRAGMENT")
LIBRARY.define(
    "flash_dma_output(Tensor query, Tensor key, Tensor value, Tensor dt_proj, Tensor a_coef, "
    "Tensor? key_valid, SymInt window, str scope, str bias_form, bool causal, float scale, "
    "float softcap, str? backend) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
for dispatch_key in ("CPU", "CUDA"):
    LIBRARY.impl("flash_dma_output", flash_dma_output, dispatch_key)
flash_dma_output_op = torch.ops.flash_dmattn.flash_dma_output.default


@torch.library.register_fake("flash_dmattn::flash_dma_output", lib=LIBRARY)
def _(query: torch.Tensor, *rest: Any) -> torch.Tensor:  # noqa: ANN401
    return new_attention(query)[0]


@torch.library.custom_op(
    "flash_dmattn::merge",
    mutates_args=(),
    device_types=DEVICES,
    schema="(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, str? backend) "
    "-> (Tensor, Tensor)",
)
def merge_op(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    backend: str | None,
) -> Pair:
    """fdma_merge(): out and lse."""
    return call(MERGE, (out_a, lse_a, out_b, lse_b), (), backend)


@merge_op.register_fake
def _(out_a: torch.Tensor, *rest: Any) -> Pair:  # noqa: ANN401
    return new_attention(out_a)
