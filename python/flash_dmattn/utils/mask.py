"""Masks of the keys of largest bias, under flash-dmattn's names.

If a bias belongs to keys, not to pairs, flash_dmattn.flash_dma_attention() selects without a mask.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

__all__ = ["create_mask", "dynamic_mask"]


def _of_blocks(mask: torch.Tensor, size: int) -> torch.Tensor:
    """Keep all keys of a block if `mask` keeps more than half of them, and none otherwise."""
    key_len = mask.shape[-1]
    added = (0, -key_len % size)
    kept, keys = (
        F.pad(x, added).unflatten(-1, (-1, size)).sum(-1) for x in (mask, mask.new_ones(key_len))
    )
    return (2 * kept > keys).repeat_interleave(size, -1)[..., :key_len]


def dynamic_mask(
    attention_bias: torch.Tensor,
    attention_mask: torch.Tensor | None,
    window_size: int,
    min_dtype: float,
    block_size: int | None = None,
) -> torch.Tensor:
    """The mask of the `window_size` keys of largest bias.

    Args:
        attention_bias: [..., key_len].
        attention_mask: optional, of a shape that broadcasts with it: bool, false for keys that are
            not kept.
        window_size: keys that are kept, at most; all, if there are fewer.
        min_dtype: a bias that no kept key has, such as torch.finfo(dtype).min.
        block_size: optional: blocks of neighbouring keys are kept or left out by majority.

    Returns:
        Bool, of the shape of attention_bias and attention_mask together.

    Raises:
        ValueError: a window_size or a block_size below 1.
    """
    for name, size in (("window_size", window_size), ("block_size", block_size)):
        if size is not None and not (size >= 1 and int(size) == size):
            raise ValueError(f"{name}: is {size}, want a whole number from 1 on")
    bias = attention_bias.detach()
    if attention_mask is not None:
        bias = bias.masked_fill(~attention_mask, min_dtype)
    best = bias.topk(min(window_size, bias.shape[-1]), dim=-1, sorted=False)
    mask = torch.zeros_like(bias, dtype=torch.bool)
    mask = mask.scatter(-1, best.indices, best.values != min_dtype)
    return mask if block_size in (None, 1) else _of_blocks(mask, int(block_size))


def create_mask(
    attention_bias: torch.Tensor,
    attention_mask: torch.Tensor | None,
    batch_size: int,
    query_len: int,
    key_len: int,
    window_size: int,
    min_dtype: float,
    block_size: int | None = None,
) -> torch.Tensor:
    """dynamic_mask() that also takes a padding mask as attention_mask.

    Args:
        attention_bias: [batch or 1, heads or 1, query_len or 1, key_len].
        attention_mask: optional, as in dynamic_mask(), or [batch, key_len]; or [batch, query_len],
            where all earlier keys count as true.
        batch_size: sequences.
        query_len: queries of a sequence.
        key_len: keys of a sequence.
        window_size, min_dtype, block_size: as in dynamic_mask().

    Returns:
        As dynamic_mask().

    Raises:
        ValueError: an attention_mask of two axes with another shape; or as dynamic_mask().
    """
    if attention_mask is not None and attention_mask.dim() == 2:
        shape = list(attention_mask.shape)
        if shape[0] != batch_size or shape[1] not in (key_len, query_len):
            raise ValueError(
                f"attention_mask: shape is {shape}, want [{batch_size}, {key_len}] or "
                f"[{batch_size}, {query_len}]"
            )
        earlier = max(key_len - shape[1], 0)
        attention_mask = F.pad(attention_mask.bool(), (earlier, 0), value=True)[:, None, None]
    return dynamic_mask(attention_bias, attention_mask, window_size, min_dtype, block_size)
