"""Padded batches as packed sequences and back, under flash-dmattn's names.

attention() needs neither: it takes padding as key_valid.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch.nn import functional as F

__all__ = ["get_unpad_data", "index_first_axis", "pad_input", "unpad_input", "upad_input"]


def index_first_axis(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` of a tensor whose first two axes are merged."""
    return tensor.flatten(0, 1)[indices]


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    """The starts of sequences of these lengths, and the end of all: [sequences + 1] int32."""
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def get_unpad_data(attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Find the tokens of a padded batch.

    Args:
        attention_mask: [batch, len], bool or integers, 0 for padding.

    Returns:
        Indices of the tokens in the flattened batch, the start of each sequence among these
        [batch + 1] int32, and the length of the longest.
    """
    lengths = attention_mask.sum(-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero()[:, 0]
    return indices, _starts(lengths), int(lengths.max().item())


def unpad_input(
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    unused_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """The tokens of a padded batch, packed.

    Args:
        hidden_states: [batch, len, ...].
        attention_mask: [batch, len], bool or integers, 0 for padding.
        unused_mask: optional, like it: tokens that are packed too, but do not count as used.

    Returns:
        The tokens [total, ...]; what get_unpad_data() returns; and the used tokens of each
        sequence [batch] int32.
    """
    packed = attention_mask if unused_mask is None else attention_mask + unused_mask
    indices, starts, longest = get_unpad_data(packed)
    used = attention_mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states, indices), indices, starts, longest, used


def pad_input(
    hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int
) -> torch.Tensor:
    """The padded batch [batch, seqlen, ...] of packed tokens [total, ...], with zeros as padding.

    `indices` come from get_unpad_data().
    """
    rows = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return rows.index_copy(0, indices.long(), hidden_states).unflatten(0, (batch, seqlen))


def upad_input(
    query_layer: torch.Tensor,
    key_layer: torch.Tensor,
    value_layer: torch.Tensor,
    attention_mask: torch.Tensor,
    query_length: int,
    unpad_input_func: Callable[..., Any],
) -> tuple[Any, ...]:
    """Query, key and value of a padded batch, packed.

    Args:
        query_layer: [batch, query_length, heads, head_dim].
        key_layer: [batch, kv_len, kv_heads, head_dim]; keys beyond the mask's length are left out.
        value_layer: like key_layer.
        attention_mask: [batch, kv_len], bool or integers, 0 for padding.
        query_length: queries of a sequence: as many as keys, one, or the last ones.
        unpad_input_func: unpad_input(), for the last queries.

    Returns:
        Query, key and value [total, heads, head_dim]; the indices of the queries, as in
        get_unpad_data(); a pair of the starts of sequences among queries and among keys; and a pair
        of the longest lengths.
    """
    indices, starts, longest = get_unpad_data(attention_mask)
    batch, filled = attention_mask.shape
    rows = key_layer[:, :filled], value_layer[:, :filled]
    key, value = (index_first_axis(row, indices) for row in rows)
    if query_length == rows[0].shape[1]:
        query, own = index_first_axis(query_layer, indices), (indices, starts, longest)
    elif query_length == 1:
        ones = torch.arange(batch + 1, dtype=torch.int32, device=query_layer.device)
        query, own = query_layer.squeeze(1), (ones[:-1], ones, 1)
    else:
        query, *own, _ = unpad_input_func(query_layer, attention_mask[:, -query_length:])
    return query, key, value, own[0], (own[1], starts), (own[2], longest)
