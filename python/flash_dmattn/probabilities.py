"""The probabilities of attention, to look at."""

from __future__ import annotations

import torch

from . import _types, ops
from ._arguments import (
    autocast,
    check_dropout,
    check_probabilities_fit,
    finish,
    kernel_dropout,
    kernel_scale,
    pad_head_dim,
)
from .functional import Selection, _rules_of


def attention_probabilities(
    query: torch.Tensor,
    key: torch.Tensor,
    lse: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    selection: Selection | None = None,
    key_valid: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    kv_used: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The probability that each query gives to each key, to debug and to draw pictures.

    It is exp(logit - lse) for the keys that a query keeps, and 0 for all others. It computes and
    stores q_len * kv_len numbers for each query head, and nothing about it is tuned. It is not
    differentiable: the result has no gradient.

    Args:
        query: [batch, q_len, q_heads, head_dim], as in attention().
        key: [batch, kv_len, kv_heads, head_dim], of query's dtype.
        lse: [batch, q_heads, q_len] float32 (float64 if query is), in nats: attention()'s for the
            same arguments.
        bias, selection, key_valid, starts, kv_used, attn_mask, attn_bias, causal, softmax_scale,
            softcap: as in attention().
        dropout_p: as there; probabilities that are dropped are 0, the others divided by
            1 - dropout_p.
        rng_state: as there; not None with dropout.
        backend: as in score().

    Returns:
        [batch, q_heads, q_len, kv_len] float32 (float64 if query is). Without dropout a row sums to
        1 up to rounding, or to 0 if the query keeps no key.

    Raises:
        TypeError: a query that is not a tensor, or a selection that select() did not make.
        ValueError: shapes, devices or options that are inconsistent, or a selection made for
            other keys.
        NotImplementedError: a dtype, head_dim or backend that no kernel on this machine supports.
        MemoryError: probabilities that take more memory than the device has.

    Example:
        >>> x = torch.randn(1, 6, 2, 8)
        >>> out, lse = flash_dmattn.attention(x, x, x, causal=True)
        >>> flash_dmattn.attention_probabilities(x, x, lse, causal=True)[0, 0, 0]
        tensor([1., 0., 0., 0., 0., 0.])

    Source: arXiv:2205.14135.
    """
    if not torch.compiler.is_compiling():
        _types.check_call(attention_probabilities, locals())
    check_dropout(dropout_p)
    if dropout_p > 0 and rng_state is None:
        raise ValueError("rng_state: is None, want that of attention() with dropout")
    kernel_p, rng_state = kernel_dropout(dropout_p, rng_state)
    (query, key), _, head_dim = pad_head_dim(autocast("query", (query, key)))
    check_probabilities_fit(query, key, "attention_probabilities")
    expiry, slot, *rules = _rules_of(selection)
    probability = ops.PROBABILITIES.without_gradients(
        query,
        key,
        bias,
        key_valid,
        starts,
        kv_used,
        rng_state,
        attn_mask,
        attn_bias,
        expiry,
        slot,
        lse,
        *rules,
        causal,
        kernel_scale(softmax_scale, head_dim),
        softcap,
        kernel_p,
        backend,
    )
    return finish(probability, None, dropout_p)
