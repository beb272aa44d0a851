"""Packed sequences, with the arguments that flash-attn's functions have."""

from __future__ import annotations

import torch

from . import functional, probabilities


def _check_same(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> None:
    same = cu_seqlens_q is cu_seqlens_k or (
        cu_seqlens_q.shape == cu_seqlens_k.shape and torch.equal(cu_seqlens_q, cu_seqlens_k)
    )
    if not same:
        raise ValueError(
            "cu_seqlens_k: differs from cu_seqlens_q, want the same: packed sequences attend to "
            "themselves"
        )


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
    dt_proj: torch.Tensor | None = None,
    a_coef: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    sink_logit: torch.Tensor | None = None,
    keep_window_size: int = 2048,
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
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Self-attention of packed sequences, called as flash_attn_varlen_func() of flash-attn is.

    It is flash_dma_attention() with `starts`; without dt_proj and a_coef it is attention() without
    a selection: every query attends to all keys of its sequence that it can see.

    Args:
        q: [total, q_heads, head_dim]: the queries of all sequences, one after the other.
        k: [total, kv_heads, head_dim].
        v: [total, kv_heads, head_dim].
        cu_seqlens_q: [sequences + 1] int32: where each sequence starts and, last, the end of all.
        cu_seqlens_k: the same positions. It is compared with cu_seqlens_q unless it is the same
            tensor.
        max_seqlen_q: not needed; taken so that calls of flash_attn_varlen_func() need no change.
        max_seqlen_k: not needed either.
        dropout_p: as in flash_dma_attention().
        softmax_scale: multiplies <q, k>; None for 1 / sqrt(head_dim).
        causal: a query sees only keys at positions up to its own.
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

    Returns:
        out [total, q_heads, head_dim]. With return_lse or return_attn_probs a tuple of out, lse
        [q_heads, total] and probabilities [q_heads, total, total], without what is not asked for;
        probabilities are 0 for queries and keys of different sequences, and have no gradient.

    Raises:
        ValueError: cu_seqlens_q and cu_seqlens_k that differ, one of dt_proj and a_coef without the
            other, dt_bias or a gap without them, or what flash_dma_attention() raises it for.
        NotImplementedError: as flash_dma_attention().

    Example:
        >>> q, k, v = torch.randn(10, 4, 8), torch.randn(10, 2, 8), torch.randn(10, 2, 8)
        >>> starts = torch.tensor([0, 4, 10], dtype=torch.int32)  # sequences of 4 and 6
        >>> flash_dmattn.flash_dmattn_varlen_func(q, k, v, starts, starts, 6, 6, causal=True).shape
        torch.Size([10, 4, 8])

    Source: arXiv:2508.02124.
    """
    _check_same(cu_seqlens_q, cu_seqlens_k)
    if (dt_proj is None) != (a_coef is None):
        absent, given = ("a_coef", "dt_proj") if a_coef is None else ("dt_proj", "a_coef")
        raise ValueError(f"{absent}: is None, want a tensor, as {given} is one")
    if dt_bias is not None and dt_proj is None:
        raise ValueError("dt_bias: is a tensor, want None without dt_proj and a_coef")
    if gap is not None and dt_proj is None:
        raise ValueError(f"gap: is {gap:g}, want None without dt_proj and a_coef")
    rows = q[None], k[None], v[None]
    options = {"starts": cu_seqlens_q, "causal": causal, "backend": backend}
    options |= {"softmax_scale": softmax_scale, "softcap": softcap}
    probability = ()
    if dt_proj is None or a_coef is None:
        rng_state = functional.draw_state(q, dropout_p, generator)
        options |= {"dropout_p": dropout_p, "rng_state": rng_state}
        out, lse = functional.attention(
            *rows, sink_logit=sink_logit, **options, deterministic=deterministic
        )
        if return_attn_probs:
            probability = (probabilities.attention_probabilities(*rows[:2], lse, **options),)
    else:
        rules = {"recent": recent, "sinks": sinks, "gap": gap, "scope": scope}
        rules |= {"bias_form": bias_form, "dt_bias": dt_bias, "sink_logit": sink_logit}
        options |= {"deterministic": deterministic, "return_attn_probs": return_attn_probs}
        options |= {"dropout_p": dropout_p, "generator": generator}
        out, lse, *probability = functional.flash_dma_attention(
            *rows, dt_proj, a_coef, keep_window_size, return_lse=True, **rules, **options
        )
    results = (out, lse, *probability) if return_lse else (out, *probability)
    results = tuple(x.squeeze(0) for x in results)  # unlike [0], whose gradient would be copied
    return results if len(results) > 1 else results[0]
