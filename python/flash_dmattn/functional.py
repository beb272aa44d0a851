"""The functions of the package: attention of each query over its best keys.

The words are those of fdma.h: batch, q_len, kv_len, q_heads, kv_heads, head_dim, window. A tensor
of any strides is taken as it is, so `x.transpose(1, 2)` of a [batch, heads, len, head_dim] tensor
costs nothing; only where the last axis itself is strided a copy is made. Results are contiguous.

All tensors of a call are on the CPU, or all on one CUDA device; there the call is put on the
device's current stream and does not wait for it. There attention takes float16 and bfloat16.

Every function raises, with a message that names the argument, its value and what was wanted:
ValueError for arguments that contradict each other, NotImplementedError for what no kernel does.

All but select() are differentiable, once: a derivative of a gradient raises NotImplementedError.
Keys that no query keeps have gradients of exactly 0, and which keys are kept has none. On the CPU
gradients are the same bits from run to run; on a device attention's are so where `deterministic` or
torch.use_deterministic_algorithms(True) asks for it. `backend` computes them too or, where a kernel
that was named has none, another one of its family.

Under torch.autocast query, key and value are taken in autocast's dtype, as
scaled_dot_product_attention does; scores, biases and lse stay float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import (
    _library,
    autograd,  # noqa: F401 (registers gradients)
    ops,
)

Tensors = tuple[torch.Tensor, ...]


class Selection(NamedTuple):
    """Which queries keep which keys: what select() returns and attention() takes.

    Shapes: expiry, slot [batch, kv_heads, kv_len] int32. The query at position p keeps key j if
    j <= p < expiry[j] (global scope without causal masking: if expiry[j] > j); slot[j] is the place
    of key j among the `window` kept ones, -1 where it is never kept.
    """

    expiry: torch.Tensor
    slot: torch.Tensor
    window: int
    scope: str


def get_available_backends() -> list[str]:
    """Names that `backend` may have on this machine, preferred first, such as ["cpu", "reference"].

    A kernel's whole name, such as "cpu/avx2", may be given as well. "cuda" takes tensors of CUDA
    devices, and the others those of the CPU.
    """
    usable = [kernel.name for kernel in _library.kernels() if kernel.missing is None]
    return list(dict.fromkeys(name.split("/")[0] for name in usable))


def _logit_scale(softmax_scale: float | None) -> float:
    if softmax_scale is None:
        return 0.0  # 1 / sqrt(head_dim)
    if softmax_scale == 0:
        raise ValueError("softmax_scale: is 0, want a positive number, or None for the default")
    return softmax_scale


def _autocast(rows: Tensors, weights: Tensors = ()) -> Tensors:
    """`rows` in autocast's dtype where it is on. `weights` in float32 stay as they are, for kernels
    take them beside any rows."""
    device = rows[0].device.type
    if device not in ops.DEVICES or not torch.is_autocast_enabled(device):
        return (*rows, *weights)
    dtype = torch.get_autocast_dtype(device)
    narrow = (torch.float16, torch.bfloat16)
    wide = (torch.float32, *narrow)  # and float64 stays as it is
    return (
        *(row.to(dtype) if row.dtype in wide else row for row in rows),
        *(weight.to(dtype) if weight.dtype in narrow else weight for weight in weights),
    )


def score(
    value: torch.Tensor,
    dt_proj: torch.Tensor,
    a_coef: torch.Tensor,
    *,
    bias_form: str = "exp",
    key_valid: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Score and bias of each key, from the value states of all kv heads.

    score = a_coef * softplus(value @ dt_proj^T), value's heads taken as one vector; bias is
    exp(score) ("exp"), score ("linear") or None ("none").

    Args:
        value: [batch, kv_len, kv_heads, head_dim].
        dt_proj: [kv_heads, kv_heads * head_dim], of value's dtype or float32.
        a_coef: [kv_heads], of value's dtype or float32.
        bias_form: "exp", "linear" or "none".
        key_valid: optional [batch, kv_len] bool or uint8, false for padding; such a key is not read
            and its score is -inf.
        backend: one of get_available_backends() or a kernel's name; None for the fastest.

    Returns:
        score and bias, [batch, kv_heads, kv_len], in nats; float32, or float64 for float64.

    Source: arXiv:2508.02124, section 3.
    """
    tensors = _autocast((value,), (dt_proj, a_coef))
    scores, bias = ops.score_op(*tensors, bias_form, key_valid, backend)
    return scores, None if bias_form == "none" else bias


def select(
    score: torch.Tensor,
    window: int,
    *,
    scope: str = "causal",
    key_valid: torch.Tensor | None = None,
    backend: str | None = None,
) -> Selection:
    """The `window` keys of highest score among those that each query can see.

    Equal scores: the more recent key first; NaN ranks below everything. The result is exact: the
    same bits on every backend. It is not differentiable.

    Args:
        score: [batch, kv_heads, kv_len] float32 (float64: the backend "reference").
        window: keys that a query keeps, 1 or more; kv_len or more keeps all.
        scope: "causal", each query ranks the keys up to its own position, or "global", one ranking
            of all keys.
        key_valid: optional [batch, kv_len] bool or uint8, false for padding: never kept.
        backend: as in score().

    Returns:
        Selection, with expiry and slot [batch, kv_heads, kv_len] int32.

    Source: arXiv:2508.02124, section 3.
    """
    expiry, slot = ops.select_op(score, window, scope, key_valid, backend)
    return Selection(expiry, slot, window, scope)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    selection: Selection | None = None,
    key_valid: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    backend: str | None = None,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query over the keys of `selection`, or over all visible keys without one.

    Args:
        query: [batch, q_len, q_heads, head_dim]; q_heads is a multiple of kv_heads, head_dim a
            multiple of 8 up to 256. Query i stands at position i + kv_len - q_len.
        key: [batch, kv_len, kv_heads, head_dim], of query's dtype.
        value: [batch, kv_len, kv_heads, head_dim], of query's dtype.
        bias: optional [batch, kv_heads, kv_len] float32 (float64 for float64), added to the logits.
        selection: from select(); its scope must be "global" unless `causal`.
        key_valid: optional [batch, kv_len] bool or uint8, false for padding: never read.
        causal: a query sees only keys at positions up to its own.
        softmax_scale: multiplies logits; None for 1 / sqrt(head_dim).
        softcap: c > 0 makes a logit c * tanh(logit / c), before the bias; 0 for none.
        backend: as in score().
        deterministic: gradients are the same bits from run to run on a device too.

    Returns:
        out [batch, q_len, q_heads, head_dim] of query's dtype, and lse [batch, q_heads, q_len],
        float32 (float64 for float64), in nats. A query without keys has out = 0 and lse = -inf.

    Source: arXiv:2205.14135, arXiv:2508.02124.
    """
    expiry, slot, window, scope = selection if selection else (None, None, 0, "causal")
    return ops.attention_op(
        *_autocast((query, key, value)),
        bias,
        expiry,
        slot,
        key_valid,
        window,
        scope,
        causal,
        _logit_scale(softmax_scale),
        softcap,
        backend,
        deterministic,
    )


def merge(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys, from attention() over each of them.

    lse = log(exp(lse_a) + exp(lse_b)), out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b.

    Args:
        out_a: [batch, q_len, q_heads, head_dim].
        lse_a: [batch, q_heads, q_len] float32 (float64 for float64), in nats; -inf where a query
            has no key in this set: its out is then not read.
        out_b: as out_a, of its dtype.
        lse_b: as lse_a.
        backend: as in score().

    Returns:
        out and lse, shaped as the parts.

    Source: arXiv:2205.14135, section 3.1.
    """
    return ops.merge_op(out_a, lse_a, out_b, lse_b, backend)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dt_proj: torch.Tensor,
    a_coef: torch.Tensor,
    window: int,
    *,
    key_valid: torch.Tensor | None = None,
    scope: str = "causal",
    bias_form: str = "exp",
    causal: bool = True,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """flash_dma_attention() with every option that there is: out alone."""
    tensors = _autocast((query, key, value), (dt_proj, a_coef))
    scale = _logit_scale(softmax_scale)
    options = (key_valid, window, scope, bias_form, causal, scale, softcap, backend)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return ops.flash_dma_attention_op(*tensors, *options)[0]
    return ops.flash_dma_output_op(*tensors, *options)


def flash_dma_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dt_proj: torch.Tensor,
    a_coef: torch.Tensor,
    keep_window_size: int = 1024,
    dropout_p: float = 0.0,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """Dynamic mask attention in one call: score(), select() and attention(), exponential bias.

    Args:
        query: [batch, q_len, q_heads, head_dim].
        key: [batch, kv_len, kv_heads, head_dim], of query's dtype.
        value: [batch, kv_len, kv_heads, head_dim], of query's dtype.
        dt_proj: [kv_heads, kv_heads * head_dim], of query's dtype or float32.
        a_coef: [kv_heads], of query's dtype or float32.
        keep_window_size: keys that a query keeps, 1 or more; kv_len or more keeps all.
        dropout_p: 0; anything else in [0, 1) raises NotImplementedError.
        causal: True: each query ranks and sees the keys up to its own position. False: all keys are
            ranked once, and every query sees the best of them.
        softmax_scale: multiplies logits; None for 1 / sqrt(head_dim).
        return_attn_probs: False; True raises NotImplementedError.

    Returns:
        out [batch, q_len, q_heads, head_dim], of query's dtype.

    Source: arXiv:2508.02124.
    """
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p: is {dropout_p}, want a number in [0, 1)")
    if dropout_p > 0:
        raise NotImplementedError(f"dropout_p: is {dropout_p}; dropout is not implemented, want 0")
    if return_attn_probs:
        raise NotImplementedError("return_attn_probs: the probabilities are never formed")
    return attend(
        query,
        key,
        value,
        dt_proj,
        a_coef,
        keep_window_size,
        scope="causal" if causal else "global",
        causal=causal,
        softmax_scale=softmax_scale,
    )
