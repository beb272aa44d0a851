"""flash-dmattn's module of this name: its functions, with query, key and value apart or packed."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from . import _types
from ._arguments import call_renamed
from .dmattn import flash_dmattn_func
from .varlen import flash_dmattn_varlen_func

__all__ = [
    "flash_dmattn_func",
    "flash_dmattn_kvpacked_func",
    "flash_dmattn_qkvpacked_func",
    "flash_dmattn_varlen_func",
    "flash_dmattn_varlen_kvpacked_func",
    "flash_dmattn_varlen_qkvpacked_func",
]


IN_QKV = dict.fromkeys(("q", "k", "v"), "qkv")
IN_KV = dict.fromkeys(("k", "v"), "kv")
ONE_LENGTH = {"cu_seqlens_q": "cu_seqlens", "cu_seqlens_k": "cu_seqlens"}


def _unpack(name: str, packed: torch.Tensor, shape: str) -> tuple[torch.Tensor, ...]:
    """The tensors that stand beside each other on the axis before heads and head_dim of a `shape`
    such as "total, 3, heads, head_dim"."""
    _types.check_tensor(name, packed)
    sizes = shape.split(", ")
    if packed.dim() != len(sizes) or packed.shape[-3] != int(sizes[-3]):
        raise ValueError(f"{name}: shape is {list(packed.shape)}, want [{shape}]")
    return packed.unbind(-3)


def _check_pairs(attn_mask: torch.Tensor | None, attn_bias: torch.Tensor | None) -> None:
    """Check a mask and a bias. If they are something else, the call has another order of
    arguments."""
    for name, pairs in (("attn_mask", attn_mask), ("attn_bias", attn_bias)):
        if pairs is None:
            continue
        _types.check_tensor(name, pairs)
        if pairs.dim() != 3:
            shape = f"{name} is [heads, total, total]"
            raise ValueError(f"{name}: rank is {pairs.dim()}, want 3; {shape}")


@overload
def flash_dmattn_qkvpacked_func(
    qkv: torch.Tensor,
    attn_mask: torch.Tensor | None = ...,
    attn_bias: torch.Tensor | None = ...,
    is_causal: bool | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    deterministic: bool | None = ...,
    return_attn_probs: Literal[False] | None = ...,
) -> torch.Tensor: ...


@overload
def flash_dmattn_qkvpacked_func(
    qkv: torch.Tensor,
    attn_mask: torch.Tensor | None = ...,
    attn_bias: torch.Tensor | None = ...,
    is_causal: bool | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    deterministic: bool | None = ...,
    *,
    return_attn_probs: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def flash_dmattn_qkvpacked_func(
    qkv: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool | None = None,
) -> Any:
    """flash_dmattn_func() of `qkv` [batch, len, 3, heads, head_dim].

    Args:
        qkv: query, key and value.
        attn_mask, attn_bias: as in flash_dmattn_func().
        is_causal: as there. It stands in front of scale, as in flash-dmattn.
        scale, softcap, deterministic, return_attn_probs: as there.

    Returns:
        As flash_dmattn_func().

    Raises:
        TypeError, ValueError, NotImplementedError: as flash_dmattn_func(), or another shape of qkv.

    Example:
        >>> qkv = torch.randn(1, 6, 3, 2, 8)
        >>> flash_dmattn.flash_dmattn_qkvpacked_func(qkv, is_causal=True).shape
        torch.Size([1, 6, 2, 8])

    Source: arXiv:2508.02124.
    """
    options = {"scale": scale, "is_causal": is_causal, "softcap": softcap}
    options = {**options, "deterministic": deterministic, "return_attn_probs": return_attn_probs}
    rows = _unpack("qkv", qkv, "batch, len, 3, heads, head_dim")
    return call_renamed(IN_QKV, flash_dmattn_func, *rows, attn_mask, attn_bias, **options)


@overload
def flash_dmattn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    attn_mask: torch.Tensor | None = ...,
    attn_bias: torch.Tensor | None = ...,
    scale: float | None = ...,
    is_causal: bool | None = ...,
    softcap: float | None = ...,
    deterministic: bool | None = ...,
    return_attn_probs: Literal[False] | None = ...,
) -> torch.Tensor: ...


@overload
def flash_dmattn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    attn_mask: torch.Tensor | None = ...,
    attn_bias: torch.Tensor | None = ...,
    scale: float | None = ...,
    is_causal: bool | None = ...,
    softcap: float | None = ...,
    deterministic: bool | None = ...,
    *,
    return_attn_probs: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def flash_dmattn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    scale: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool | None = None,
) -> Any:
    """flash_dmattn_func() of `q` and `kv` [batch, len, 2, kv_heads, head_dim].

    Args:
        q: as in flash_dmattn_func().
        kv: key and value.
        attn_mask, attn_bias, scale, is_causal, softcap, deterministic, return_attn_probs: as in
            flash_dmattn_func().

    Returns:
        As flash_dmattn_func().

    Raises:
        TypeError, ValueError, NotImplementedError: as flash_dmattn_func(), or another shape of kv.

    Example:
        >>> q, kv = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 2, 2, 8)
        >>> flash_dmattn.flash_dmattn_kvpacked_func(q, kv, is_causal=True).shape
        torch.Size([1, 6, 4, 8])

    Source: arXiv:2508.02124.
    """
    options = {"scale": scale, "is_causal": is_causal, "softcap": softcap}
    options = {**options, "deterministic": deterministic, "return_attn_probs": return_attn_probs}
    rows = (q, *_unpack("kv", kv, "batch, kv_len, 2, kv_heads, head_dim"))
    return call_renamed(IN_KV, flash_dmattn_func, *rows, attn_mask, attn_bias, **options)


@overload
def flash_dmattn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    attn_mask: torch.Tensor | None = ...,
    attn_bias: torch.Tensor | None = ...,
    cu_seqlens: torch.Tensor | None = ...,
    max_seqlen: int | None = ...,
    scale: float | None = ...,
    is_causal: bool | None = ...,
    softcap: float | None = ...,
    deterministic: bool | None = ...,
    return_attn_probs: Literal[False] | None = ...,
) -> torch.Tensor: ...


@overload
def flash_dmattn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    attn_mask: torch.Tensor | None = ...,
    attn_bias: torch.Tensor | None = ...,
    cu_seqlens: torch.Tensor | None = ...,
    max_seqlen: int | None = ...,
    scale: float | None = ...,
    is_causal: bool | None = ...,
    softcap: float | None = ...,
    deterministic: bool | None = ...,
    *,
    return_attn_probs: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def flash_dmattn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    *options: Any,
    **named: Any,
) -> Any:
    """flash_dmattn_varlen_func() of `qkv` [total, 3, heads, head_dim].

    Args:
        qkv: query, key and value.
        attn_mask, attn_bias: as in flash_dmattn_varlen_func().
        cu_seqlens: as cu_seqlens_q there.
        max_seqlen: as max_seqlen_q there.
        options: scale, is_causal, softcap, deterministic and return_attn_probs, as there.
        named: the same by name.

    Returns:
        As flash_dmattn_varlen_func().

    Raises:
        TypeError, ValueError, NotImplementedError: as flash_dmattn_varlen_func(), or another shape
            of qkv.

    Example:
        >>> qkv, starts = torch.randn(10, 3, 2, 8), torch.tensor([0, 4, 10], dtype=torch.int32)
        >>> call = flash_dmattn.flash_dmattn_varlen_qkvpacked_func
        >>> call(qkv, cu_seqlens=starts, max_seqlen=6, is_causal=True).shape
        torch.Size([10, 2, 8])

    Source: arXiv:2508.02124.
    """
    _check_pairs(attn_mask, attn_bias)
    rows = (*_unpack("qkv", qkv, "total, 3, heads, head_dim"), attn_mask, attn_bias)
    sizes = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    names = {**IN_QKV, **ONE_LENGTH}
    return call_renamed(names, flash_dmattn_varlen_func, *rows, *sizes, *options, **named)


@overload
def flash_dmattn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    attn_mask: torch.Tensor | None = ...,
    attn_bias: torch.Tensor | None = ...,
    cu_seqlens_q: torch.Tensor | None = ...,
    cu_seqlens_k: torch.Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    scale: float | None = ...,
    is_causal: bool | None = ...,
    softcap: float | None = ...,
    deterministic: bool | None = ...,
    return_attn_probs: Literal[False] | None = ...,
) -> torch.Tensor: ...


@overload
def flash_dmattn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    attn_mask: torch.Tensor | None = ...,
    attn_bias: torch.Tensor | None = ...,
    cu_seqlens_q: torch.Tensor | None = ...,
    cu_seqlens_k: torch.Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    scale: float | None = ...,
    is_causal: bool | None = ...,
    softcap: float | None = ...,
    deterministic: bool | None = ...,
    *,
    return_attn_probs: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def flash_dmattn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    *options: Any,
    **named: Any,
) -> Any:
    """flash_dmattn_varlen_func() of `q` and `kv` [total, 2, kv_heads, head_dim].

    Args:
        q: as in flash_dmattn_varlen_func().
        kv: key and value.
        attn_mask, attn_bias: as there.
        options: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, is_causal, softcap,
            deterministic and return_attn_probs, as there.
        named: the same by name.

    Returns:
        As flash_dmattn_varlen_func().

    Raises:
        TypeError, ValueError, NotImplementedError: as flash_dmattn_varlen_func(), or another shape
            of kv.

    Example:
        >>> q, kv = torch.randn(10, 4, 8), torch.randn(10, 2, 2, 8)
        >>> starts = torch.tensor([0, 4, 10], dtype=torch.int32)
        >>> call = flash_dmattn.flash_dmattn_varlen_kvpacked_func
        >>> call(q, kv, None, None, starts, starts, 6, 6, is_causal=True).shape
        torch.Size([10, 4, 8])

    Source: arXiv:2508.02124.
    """
    _check_pairs(attn_mask, attn_bias)
    rows = (q, *_unpack("kv", kv, "total, 2, kv_heads, head_dim"), attn_mask, attn_bias)
    return call_renamed(IN_KV, flash_dmattn_varlen_func, *rows, *options, **named)
