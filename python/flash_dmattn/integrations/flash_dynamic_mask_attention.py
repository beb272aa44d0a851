"""flash-dmattn's module of this name: attention as a layer of transformers calls it."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from .modeling_flash_dynamic_mask_attention_utils import _flash_dynamic_mask_attention_forward

__all__ = ["flash_dynamic_mask_attention_forward"]


def _dtype_of(module: torch.nn.Module, query: torch.Tensor) -> torch.dtype | None:
    """The dtype to which float32 states are cast: autocast's, or the dtype of the layer's
    projections."""
    if query.dtype != torch.float32:
        return None
    device = query.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    linear = (one for one in module.modules() if isinstance(one, torch.nn.Linear))
    weights = (one.weight.dtype for one in linear if one.weight.dtype.is_floating_point)
    return next(weights, None)


def flash_dynamic_mask_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    attention_bias: torch.Tensor | None,
    scaling: float | None = None,
    window_size: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a layer under a mask and a bias, over the window_size keys of largest bias.

    Args:
        module: the layer. Its is_causal is used if the argument is not given. Its keep_window_size,
            if it has one, is used in place of window_size.
        query: [batch, heads, query_len, head_dim].
        key: [batch, kv_heads, key_len, head_dim].
        value: like key.
        attention_mask: optional [batch, key_len], bool or integers, 0 for padding; or bool
            [batch or 1, heads or kv_heads or 1, query_len or 1, key_len].
        attention_bias: optional, with the axes of such a mask, or [batch, kv_heads, key_len].
        scaling: multiplies <query, key>; None for 1 / sqrt(head_dim).
        window_size: a query keeps so many keys of largest bias among those that the mask allows,
            whether or not a causal query sees them. None for all.
        softcap: as in attention(); None for 0.
        kwargs: is_causal, keep_window_size (another name of window_size), scale (of scaling),
            dropout, deterministic, cu_seq_lens_q (where packed sequences begin), position_ids (of
            one row, which begin anew in each). Others have no effect, as in flash-dmattn.

    Returns:
        out [batch, query_len, heads, head_dim], 0 for queries that are padding, and None.

    Raises:
        ValueError: shapes that contradict each other.
        NotImplementedError: a head_mask; a dtype or head_dim that no kernel supports.
    """
    if kwargs.get("head_mask") is not None:
        raise NotImplementedError("head_mask: is given, want None")
    if kwargs.pop("output_attentions", False):
        warnings.warn("output_attentions: is True, but there are no probabilities", stacklevel=2)
    is_causal = kwargs.pop("is_causal", None)
    window = kwargs.pop("keep_window_size", None) if window_size is None else window_size
    scale = kwargs.pop("scale", None)
    causal: Any = module.is_causal if is_causal is None else is_causal
    out = _flash_dynamic_mask_attention_forward(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attention_mask,
        attention_bias,
        query_length=query.shape[2],
        key_length=key.shape[2],
        is_causal=causal,
        softmax_scale=scale if scaling is None else scaling,
        window_size=getattr(module, "keep_window_size", None) if window is None else window,
        softcap=softcap,
        target_dtype=_dtype_of(module, query),
        **kwargs,
    )
    return out, None
