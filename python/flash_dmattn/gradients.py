"""Gradients of the operators of ops.py, as operators: flash_dmattn::score_backward,
attention_backward, flash_dma_attention_backward and merge_backward. As there, each is an allocation
of its outputs and one C call.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import _library, ops
from ._call import Draft, MaybeTensor, Operation, Outputs, call
from .ops import DEVICES, Pair, choice, give_selection, wide

Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@functools.cache
def backend_for(backend: str | None, *operations: str) -> str | None:
    """The kernel that was asked for or, where it lacks one of `operations`, those of its family:
    forward may have more kernels than backward."""
    for operation in operations if backend else ():
        names = [row.name for row in _library.kernels() if row.operation == operation]
        if not any(name == backend or name.startswith(f"{backend}/") for name in names):
            return backend.split("/")[0]
    return backend


def is_deterministic(deterministic: bool) -> bool:
    """Whether sums must be bit-equal from run to run. Asked when a kernel runs, so that compiled
    graphs follow torch.use_deterministic_algorithms() too."""
    return deterministic or torch.are_deterministic_algorithms_enabled()


# ---- their C calls ----


def new_attention_gradients(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Room for dq, dk and dv."""
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def new_weight_gradients(dt_proj: torch.Tensor, a: torch.Tensor, bias_form: str) -> Pair:
    """Room for ddt_proj and da; without a bias they have no gradient, and no elements here."""
    learn = bias_form != "none"
    return dt_proj.new_empty(dt_proj.shape if learn else 0), a.new_empty(a.shape if learn else 0)


def new_bias_gradient(key: torch.Tensor, wanted: bool) -> torch.Tensor:
    """Room for dbias [batch, kv_heads, kv_len]; without elements where it is not wanted."""
    batch, kv_len, kv_heads, _ = key.shape
    return key.new_empty((batch, kv_heads, kv_len) if wanted else (0,), dtype=wide(key.dtype))


def new_merge_gradients(out: torch.Tensor) -> Four:
    """Room for dout and dlse of both parts."""
    return (*ops.new_attention(out), *ops.new_attention(out))


def draft_backward(
    dout: torch.Tensor,
    dlse: MaybeTensor,
    out: torch.Tensor,
    lse: torch.Tensor,
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
    deterministic: bool,
    wants_dbias: bool,
) -> Draft:
    args = _library.BackwardArgs(
        scale=scale, softcap=softcap, causal=causal, deterministic=deterministic
    )
    selection = give_selection(args, expiry, window, scope)
    dq, dk, dv = new_attention_gradients(query, key, value)
    dbias = new_bias_gradient(key, wants_dbias)
    name = "dbias" if wants_dbias else ""
    return Draft(args, selection, (("dq", dq), ("dk", dk), ("dv", dv), (name, dbias)))


def draft_score_backward(
    dbias: torch.Tensor,
    value: torch.Tensor,
    dt_proj: torch.Tensor,
    a: torch.Tensor,
    key_valid: MaybeTensor,
    bias_form: str,
) -> Draft:
    args = _library.ScoreBackwardArgs(bias_form=choice("bias_form", bias_form, _library.BIAS_FORMS))
    ddt_proj, da = new_weight_gradients(dt_proj, a, bias_form)
    dv = value.new_empty(value.shape)
    return Draft(args, None, (("dv", dv), ("ddt_proj", ddt_proj), ("da", da)), added_to=("dv",))


def draft_attention_backward(
    dout: torch.Tensor,
    dlse: MaybeTensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dt_proj: torch.Tensor,
    a: torch.Tensor,
    bias: MaybeTensor,
    key_valid: MaybeTensor,
    expiry: torch.Tensor,
    slot: torch.Tensor,
    window: int,
    scope: str,
    bias_form: str,
    causal: bool,
    scale: float,
    softcap: float,
    deterministic: bool,
) -> Draft:
    args = _library.AttentionBackwardArgs(
        scale=scale,
        softcap=softcap,
        bias_form=choice("bias_form", bias_form, _library.BIAS_FORMS),
        causal=causal,
        deterministic=deterministic,
    )
    selection = give_selection(args, expiry, window, scope)
    room = (
        *new_attention_gradients(query, key, value),
        *new_weight_gradients(dt_proj, a, bias_form),
    )
    weights = ("ddt_proj", "da") if bias_form != "none" else ("", "")
    return Draft(args, selection, tuple(zip(("dq", "dk", "dv", *weights), room)))


def draft_merge_backward(dout: torch.Tensor, *rest: MaybeTensor) -> Draft:
    names = ("dout_a", "dlse_a", "dout_b", "dlse_b")
    return Draft(_library.MergeBackwardArgs(), None, tuple(zip(names, new_merge_gradients(dout))))


BACKWARD = Operation(
    "backward",
    ("dout", "dlse", "out", "lse", "q", "k", "v", "bias", "key_valid", "expiry", "slot"),
    draft_backward,
)
SCORE_BACKWARD = Operation(
    "score_backward", ("dbias", "v", "dt_proj", "a", "key_valid"), draft_score_backward
)
ATTENTION_BACKWARD = Operation(
    "attention_backward",
    ("dout", "dlse", "out", "lse", "q", "k", "v", "dt_proj", "a", "bias", "key_valid")
    + ("expiry", "slot"),
    draft_attention_backward,
)
MERGE_BACKWARD = Operation(
    "merge_backward", ("dout", "dlse", "out_a", "lse_a", "out_b", "lse_b"), draft_merge_backward
)


# ---- the operators ----


@torch.library.custom_op(
    "flash_dmattn::attention_backward",
    mutates_args=(),
    device_types=DEVICES,
    schema="(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor query, Tensor key, "
    "Tensor value, Tensor? bias, Tensor? key_valid, Tensor? expiry, Tensor? slot, SymInt window, "
    "str scope, bool causal, float scale, float softcap, bool deterministic, bool wants_dbias, "
    "str? backend) -> (Tensor, Tensor, Tensor, Tensor)",
)
def attention_backward_op(*arguments: Any) -> Outputs:  # noqa: ANN401
    """fdma_backward(): dq, dk, dv and dbias, which is empty unless it is wanted."""
    tensors, (*options, deterministic, wants_dbias, backend) = arguments[:11], arguments[11:]
    options = (*options, is_deterministic(deterministic), wants_dbias)
    return call(BACKWARD, tensors, options, backend_for(backend, "backward"))


@attention_backward_op.register_fake
def _(*arguments: Any) -> Outputs:  # noqa: ANN401
    query, key, value = arguments[4:7]
    dbias = new_bias_gradient(key, arguments[17])
    return (*new_attention_gradients(query, key, value), dbias)


@torch.library.custom_op(
    "flash_dmattn::score_backward",
    mutates_args=(),
    device_types=DEVICES,
    schema="(Tensor dbias, Tensor value, Tensor dt_proj, Tensor a_coef, Tensor? key_valid, "
    "str bias_form, str? backend) -> (Tensor, Tensor, Tensor)",
)
def score_backward_op(*arguments: Any) -> Outputs:  # noqa: ANN401
    """fdma_score_backward(): dv, ddt_proj and da."""
    backend = backend_for(arguments[6], "score_backward")
    return call(SCORE_BACKWARD, arguments[:5], arguments[5:6], backend)


@score_backward_op.register_fake
def _(*arguments: Any) -> Outputs:  # noqa: ANN401
    _, value, dt_proj, a, _, bias_form, _ = arguments
    return value.new_empty(value.shape), *new_weight_gradients(dt_proj, a, bias_form)


@torch.library.custom_op(
    "flash_dmattn::flash_dma_attention_backward",
    mutates_args=(),
    device_types=DEVICES,
    schema="(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor query, Tensor key, "
    "Tensor value, Tensor dt_proj, Tensor a_coef, Tensor? bias, Tensor? key_valid, Tensor expiry, "
    "Tensor slot, SymInt window, str scope, str bias_form, bool causal, float scale, "
    "float softcap, bool deterministic, str? backend) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def flash_dma_attention_backward_op(*arguments: Any) -> Outputs:  # noqa: ANN401
    """fdma_attention_backward(): dq, dk, dv, ddt_proj and da, the last two empty without a bias."""
    tensors, (*options, deterministic, backend) = arguments[:13], arguments[13:]
    options = (*options, is_deterministic(deterministic))
    backend = backend_for(backend, "backward", "score_backward")
    return call(ATTENTION_BACKWARD, tensors, options, backend)


@flash_dma_attention_backward_op.register_fake
def _(*arguments: Any) -> Outputs:  # noqa: ANN401
    query, key, value, dt_proj, a = arguments[4:9]
    weights = new_weight_gradients(dt_proj, a, arguments[15])
    return (*new_attention_gradients(query, key, value), *weights)


@torch.library.custom_op(
    "flash_dmattn::merge_backward",
    mutates_args=(),
    device_types=DEVICES,
    schema="(Tensor dout, Tensor? dlse, Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, "
    "str? backend) -> (Tensor, Tensor, Tensor, Tensor)",
)
def merge_backward_op(*arguments: Any) -> Outputs:  # noqa: ANN401
    """fdma_merge_backward(): dout_a, dlse_a, dout_b and dlse_b."""
    backend = backend_for(arguments[6], "merge_backward")
    return call(MERGE_BACKWARD, arguments[:6], (), backend)


@merge_backward_op.register_fake
def _(dout: torch.Tensor, *rest: Any) -> Four:  # noqa: ANN401
    return new_merge_gradients(dout)
