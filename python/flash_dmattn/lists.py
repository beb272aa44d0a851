"""The lists of a mask, for several calls of attention.

The top of functional.py has what all functions share.
"""

from __future__ import annotations

import torch

from . import _types, ops
from ._arguments import as_bool_mask, check_same_device
from .functional import Selection, _rules_of


def mask_lists(
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask: torch.Tensor,
    *,
    selection: Selection | None = None,
    key_valid: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    kv_used: torch.Tensor | None = None,
    causal: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """The keys that queries keep by a mask, for calls of attention() that have the same mask.

    On a CUDA device each call with attn_mask, and each backward pass of one, reads the whole mask,
    which may take longer than attention to the keys that it keeps. Calls that are given these lists
    do not read it: layers of a model that share a mask, or one layer and its gradients.

    Args:
        query: as in attention(). Only shape, dtype and device of query and key matter.
        key: as in attention().
        attn_mask: as in flash_dmattn_func().
        selection: as in attention(), like the next four. Calls with the lists must have the same.
        key_valid, starts, kv_used, causal: as there.
        backend: as in score().

    Returns:
        Opaque bytes, [bytes] uint8: 5/32 q_len * kv_len for each head of the mask. If the mask, the
        selection, key_valid or kv_used differs between sequences and kv heads, there are as many
        more for each sequence and kv head. On the CPU 0 bytes, because its kernels read the mask
        where they use it.

    Raises:
        TypeError: a mask that is not a tensor, or a selection that select() did not make.
        ValueError: shapes, devices or options that are inconsistent.
        NotImplementedError: a dtype, head_dim or backend that no kernel on this machine supports.

    Example:
        >>> query, key, value = torch.randn(3, 1, 6, 2, 8)
        >>> mask = torch.rand(1, 1, 6, 6) < 0.5
        >>> lists = flash_dmattn.mask_lists(query, key, mask, causal=True)
        >>> for _ in range(2):  # layers
        ...     query, _ = flash_dmattn.attention(
        ...         query, key, value, attn_mask=mask, mask_lists=lists, causal=True
        ...     )
        >>> query.shape
        torch.Size([1, 6, 2, 8])

    Source: docs/algorithm.md, masks.
    """
    if not torch.compiler.is_compiling():
        given = locals()
        _types.check_call(mask_lists, given)
        names = ops.MASK_LISTS.operation.tensors
        check_same_device({name: given[name] for name in names if name in given})
    mask = as_bool_mask(attn_mask)
    return ops.MASK_LISTS.op(
        *(query.detach(), key.detach(), key_valid, starts, kv_used, mask),
        *_rules_of(selection),
        causal,
        backend,
    )
