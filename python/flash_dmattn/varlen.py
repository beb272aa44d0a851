"""Packed sequences, with the arguments that flash-attn's functions have."""

from __future__ import annotations

from typing import Any, Callable

import torch

from . import _dtypes, _types, dmattn
from ._arguments import MaybeTensor
from ._inputs import as_bool_mask, call_renamed, choose_scale
from .fused import flash_dma_attention
from .options import DynamicMaskOptions

NAMES = {"query": "q", "key": "k", "value": "v", "starts": "cu_seqlens_q"}
WINDOW = 2048  # keep_window_size, where it is not given


def _starts_of(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> torch.Tensor:
    """`starts` of attention(); cumsum() makes int64 of the int32 lengths that it sums up."""
    for name, one in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _types.check_tensor(name, one)
        if one.dtype not in (torch.int32, torch.int64):
            dtype = _dtypes.name_of(one.dtype)
            raise NotImplementedError(f"{name}: dtype is {dtype}, want int32 or int64")
    if cu_seqlens_k.device != cu_seqlens_q.device:
        where = f"want {cu_seqlens_q.device}, where cu_seqlens_q is"
        raise ValueError(f"cu_seqlens_k: is on {cu_seqlens_k.device}, {where}")
    same = cu_seqlens_q is cu_seqlens_k or (
        cu_seqlens_q.shape == cu_seqlens_k.shape and torch.equal(cu_seqlens_q, cu_seqlens_k)
    )
    if not same:
        raise ValueError(
            "cu_seqlens_k: differs from cu_seqlens_q, want the same: packed sequences attend to "
            "themselves"
        )
    return cu_seqlens_q.int() if cu_seqlens_q.dtype == torch.int64 else cu_seqlens_q


def _is_causal(causal: bool, is_causal: bool | None) -> bool:
    _types.check_flag("causal", causal)
    if is_causal is not None:
        _types.check_flag("is_causal", is_causal)
    if is_causal is not None and causal and not is_causal:
        raise ValueError("is_causal: is False, want None or True, as causal is True")
    return bool(causal or is_causal)


def _refuse_pairs(attn_mask: torch.Tensor | None, attn_bias: torch.Tensor | None) -> None:
    for name, pairs in (("attn_mask", attn_mask), ("attn_bias", attn_bias)):
        if pairs is not None:
            raise ValueError(f"{name}: is given, want None with dt_proj, which selects the keys")


def _call(function: Callable[..., Any], *arguments: Any, **given: Any) -> Any:
    """Call a function; in what it refuses, its arguments have the names that they have here."""
    return call_renamed(NAMES, function, *arguments, **given)


def _pairs_with_batch(attn_mask: MaybeTensor, attn_bias: MaybeTensor) -> tuple[MaybeTensor, ...]:
    pairs = as_bool_mask(attn_mask), attn_bias
    _types.check_tensors(dict(zip(("attn_mask", "attn_bias"), pairs)))
    return tuple(None if one is None else one[None] for one in pairs)


def _with_batch_axis(name: str, row: torch.Tensor) -> torch.Tensor:
    """A query, key or value as a batch of 1."""
    _types.check_tensor(name, row)
    if row.dim() != 3:
        shape = f"{name} is [total, heads, head_dim]"
        raise ValueError(f"{name}: rank is {row.dim()}, want 3; {shape}")
    return row[None]


def _check_weights(
    dt_proj: torch.Tensor | None,
    a_coef: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    gap: float | None,
    options: DynamicMaskOptions | None,
) -> None:
    """Refuse one of dt_proj and a_coef without the other, and what needs them without them."""
    if (dt_proj is None) != (a_coef is None):
        absent, given = ("a_coef", "dt_proj") if a_coef is None else ("dt_proj", "a_coef")
        raise ValueError(f"{absent}: is None, want a tensor, as {given} is one")
    if dt_bias is not None and dt_proj is None:
        raise ValueError("dt_bias: is a tensor, want None without dt_proj and a_coef")
    if gap is not None and dt_proj is None:
        if not _types.is_number(gap):
            raise _types.refusal("gap", gap, "a number or None")
        raise ValueError(f"gap: is {gap:g}, want None without dt_proj and a_coef")
    if options is not None and not isinstance(options, DynamicMaskOptions):
        raise _types.refusal("options", options, "a DynamicMaskOptions or None")
    if options is not None and dt_proj is None:
        raise ValueError("options: is given, want None without dt_proj and a_coef")


def flash_dmattn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    scale: float | None = None,
    dt_proj: torch.Tensor | None = None,
    a_coef: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    sink_logit: torch.Tensor | None = None,
    keep_window_size: int = WINDOW,
    recent: int = 0,
    sinks: int = 0,
    gap: float | None = None,
    scope: str | None = None,
    bias_form: str = "exp",
    softcap: float = 0.0,
    generator: torch.Generator | None = None,
    backend: str | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    return_lse: bool = False,
    options: DynamicMaskOptions | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Self-attention of packed sequences, called as flash_attn_varlen_func() of flash-attn is.

    It is flash_dma_attention() with `starts`; without dt_proj and a_coef it is attention() without
    a selection: every query attends to all keys of its sequence that it can see.

    Args:
        q: [total, q_heads, head_dim]: the queries of all sequences, one after the other.
        k: [total, kv_heads, head_dim].
        v: [total, kv_heads, head_dim].
        cu_seqlens_q: [sequences + 1] int32 or int64: where each sequence starts and, last, the end
            of all.
        cu_seqlens_k: the same positions. It is compared with cu_seqlens_q unless it is the same
            tensor.
        max_seqlen_q: not needed; taken so that calls of flash_attn_varlen_func() need no change.
        max_seqlen_k: not needed either.
        dropout_p: as in flash_dma_attention().
        softmax_scale: multiplies <q, k>; None for 1 / sqrt(head_dim).
        causal: a query sees only keys at positions up to its own.
        attn_mask: optional [q_heads or kv_heads or 1, total or 1, total or 1], as in
            flash_dmattn_func(): which queries attend to which keys of their sequences. Not with
            dt_proj.
        attn_bias: optional, with axes as attn_mask, as in flash_dmattn_func(). Not with dt_proj.
        is_causal: another name of causal.
        scale: another name of softmax_scale.
        dt_proj: [kv_heads, kv_heads * head_dim], with a_coef; None for attention to all keys.
        a_coef: [kv_heads].
        dt_bias: optional [kv_heads], beside them; None for 0.
        sink_logit: optional [q_heads] float32, as in attention().
        keep_window_size: as in flash_dma_attention().
        recent: as there.
        sinks: as there.
        gap: as there.
        scope: as there.
        bias_form: as there.
        softcap: as there.
        generator: as in attention(), on q's device.
        backend: as in score().
        deterministic: as in flash_dma_attention().
        return_attn_probs: also return the probabilities, total * total numbers for each query head.
        return_lse: also return lse.
        options: as in flash_dma_attention(), with dt_proj. Its keep_window_size is the call's, and
            its limits count all sequences together: total and the number of sequences.

    Returns:
        out [total, q_heads, head_dim]. With return_lse or return_attn_probs a tuple of out, lse
        [q_heads, total] and probabilities [q_heads, total, total], without what is not asked for;
        probabilities are 0 for queries and keys of different sequences, and have no gradient.

    Raises:
        ValueError: cu_seqlens_q and cu_seqlens_k that differ, one of dt_proj and a_coef without the
            other, dt_bias, a gap or options without them, a mask or a bias beside them, two names
            of an option that differ, or what flash_dma_attention() raises it for.
        NotImplementedError: as flash_dma_attention().
        MemoryError: probabilities that take more memory than the device has.

    Example:
        >>> q, k, v = torch.randn(10, 4, 8), torch.randn(10, 2, 8), torch.randn(10, 2, 8)
        >>> starts = torch.tensor([0, 4, 10], dtype=torch.int32)  # sequences of 4 and 6
        >>> flash_dmattn.flash_dmattn_varlen_func(q, k, v, starts, starts, 6, 6, causal=True).shape
        torch.Size([10, 4, 8])

    Source: arXiv:2508.02124.
    """
    _types.check_flags(("return_attn_probs", "return_lse"), (return_attn_probs, return_lse))
    starts = _starts_of(cu_seqlens_q, cu_seqlens_k)
    _check_weights(dt_proj, a_coef, dt_bias, gap, options)
    rows = tuple(map(_with_batch_axis, ("q", "k", "v"), (q, k, v)))
    given = {
        **{"starts": starts, "causal": _is_causal(causal, is_causal), "backend": backend},
        **{"softmax_scale": choose_scale(softmax_scale, scale), "softcap": softcap},
        **{"dropout_p": dropout_p, "generator": generator, "sink_logit": sink_logit},
        "deterministic": deterministic,
    }
    if dt_proj is None or a_coef is None:
        pairs = _pairs_with_batch(attn_mask, attn_bias)
        given["probabilities_name"] = "return_attn_probs" if return_attn_probs else None
        out, lse, *probability, _ = _call(dmattn.attend, *rows, *pairs, **given)
        probability = probability if return_attn_probs else []
    else:
        _refuse_pairs(attn_mask, attn_bias)
        given.update(recent=recent, sinks=sinks, gap=gap, scope=scope, bias_form=bias_form)
        given.update(dt_bias=dt_bias, options=options, return_attn_probs=return_attn_probs)
        if options is not None:
            keep_window_size = options._window_of(keep_window_size, WINDOW)
        rows += (dt_proj, a_coef, keep_window_size)
        out, lse, *probability = _call(flash_dma_attention, *rows, **given, return_lse=True)
    results = (out, lse, *probability) if return_lse else (out, *probability)
    results = tuple(x.squeeze(0) for x in results)  # unlike [0], whose gradient would be copied
    return results if len(results) > 1 else results[0]
