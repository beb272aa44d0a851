"""flash-dmattn's module of this name: attention of a layer's states."""

from __future__ import annotations

from typing import Any

import torch

from .._arguments import starts_in_int32
from ..functional import attention
from ..utils.mask import create_mask

__all__ = ["fdma_peft_integration_check"]


def fdma_peft_integration_check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    target_dtype: torch.dtype | None = None,
) -> tuple[Any, ...]:
    """The tensors, cast to target_dtype if it is given and q is float32."""
    tensors = (q, k, v, bias)
    if target_dtype is None or q.dtype != torch.float32:
        return tensors
    return tuple(None if x is None else x.to(target_dtype) for x in tensors)


def _starts_of(
    position_ids: torch.Tensor | None, cu_seq_lens_q: torch.Tensor | None, length: int
) -> torch.Tensor | None:
    """`starts` of attention(): cu_seq_lens_q, or the places where position_ids [1, length] are 0;
    None if there is only one such place."""
    if cu_seq_lens_q is not None:
        return starts_in_int32(cu_seq_lens_q)
    if position_ids is None or position_ids.numel() != length:
        return None
    begins = (position_ids.flatten() == 0).nonzero()[:, 0]
    if begins.numel() < 2 or begins[0] != 0:
        return None
    return torch.cat((begins, begins.new_full((1,), length))).to(torch.int32)


def _flash_dynamic_mask_attention_forward(
    query_states: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    attention_bias: torch.Tensor | None,
    query_length: int,
    key_length: int | None = None,
    is_causal: bool = False,
    position_ids: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: int | None = None,
    softcap: float | None = None,
    keep_window_size: int | None = None,
    deterministic: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    target_dtype: torch.dtype | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> torch.Tensor:
    """flash_dynamic_mask_attention_forward() of [batch, len, heads, head_dim]."""
    query, key, value, bias = fdma_peft_integration_check(
        query_states, key_states, value_states, attention_bias, target_dtype
    )
    bias = bias[:, :, None] if bias is not None and bias.dim() == 3 else bias
    key_valid, mask = None, attention_mask
    if mask is not None and mask.dim() == 2:
        key_valid, mask = mask != 0, None
        key, value = (x[:, : key_valid.shape[1]] for x in (key, value))
        bias = None if bias is None else bias[..., : key_valid.shape[1]]
    batch, key_length = key.shape[:2]
    window = keep_window_size if window_size is None else window_size
    if bias is not None and window is not None and key_length > window:
        least = torch.finfo(bias.dtype).min
        allowed = key_valid if mask is None else mask
        sizes = (batch, query_length, key_length, window)
        mask = create_mask(bias, allowed, *sizes, least)
    starts = None
    if batch == 1 and key_valid is None and query_length == key_length > 1:
        starts = _starts_of(position_ids, cu_seq_lens_q, key_length)
    out, _ = attention(
        *(query, key, value),
        key_valid=key_valid,
        starts=starts,
        attn_mask=mask,
        attn_bias=bias,
        causal=bool(is_causal) and query_length > 1,
        softmax_scale=softmax_scale,
        softcap=softcap or 0.0,
        dropout_p=dropout if dropout else 0.0,
        deterministic=bool(deterministic),
    )
    if key_valid is None or key_valid.shape[1] < query_length:
        return out
    return out.masked_fill(~key_valid[:, -query_length:, None, None], 0)
