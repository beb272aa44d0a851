"""Attention under a bias and a mask for single queries and keys, called as in flash-dmattn's first
interface. flash_dmattn.flash_dmattn_func() computes the same."""

from __future__ import annotations

import torch
from flash_dmattn import _arguments, _types
from flash_dmattn._arguments import as_bool_mask, call_renamed
from flash_dmattn.dmattn import attend

__all__ = ["fwd"]

NAMES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "attn_bias": "zoh",
    "attn_mask": "active_mask",
    "dropout_p": "p_dropout",
    "generator": "gen",
    "causal": "is_causal",
}


def _check_out(out: torch.Tensor, q: torch.Tensor) -> None:
    _types.check_tensor("out", out)
    for name in ("shape", "dtype", "device"):
        found, want = getattr(out, name), getattr(q, name)
        if found != want:
            found, want = (list(x) if name == "shape" else x for x in (found, want))
            raise ValueError(f"out: {name} is {found}, want that of q, {want}")


def _check_mask(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Check a mask that is not applied, so that a bad one is refused here too."""
    if mask is not None and isinstance(q, torch.Tensor):
        tensors = {"query": q, "key": k, "attn_mask": mask}
        _arguments.check_dtype("attn_mask", mask)
        _arguments.check_same_device({"key": k, "attn_mask": mask})
        _arguments.check_sizes(tensors, _arguments.bind_sizes(tensors))


def fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    zoh: torch.Tensor | None,
    active_mask: torch.Tensor | None,
    out: torch.Tensor | None = None,
    p_dropout: float = 0.0,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    keep_window_size: int = 2048,
    softcap: float = 0.0,
    return_softmax: bool = False,
    gen: torch.Generator | None = None,
) -> list[torch.Tensor]:
    """Attention with a bias, and with a mask if there are more keys than keep_window_size, on the
    CPU and on CUDA devices.

    Args:
        q: [batch, seqlen_q, num_heads, head_dim]; num_heads is a multiple of num_heads_k, head_dim
            256 at most.
        k: [batch, seqlen_k, num_heads_k, head_dim], of q's dtype.
        v: [batch, seqlen_k, num_heads_k, head_dim], of q's dtype.
        zoh: [batch, num_heads_k or num_heads, seqlen_q, seqlen_k], of q's dtype or float32: added
            to the logits of active pairs and not read elsewhere. Every axis but the head axis may
            have length 1 instead. None for no bias.
        active_mask: with axes as zoh: 1.0 where a query attends to a key, 0.0 where it does not; or
            bool. None if all pairs are active. It is applied only if seqlen_k > keep_window_size.
            On the CPU a number below 0 is refused; on a CUDA device, where nothing is read back, it
            counts as 0.0.
        out: optional [batch, seqlen_q, num_heads, head_dim], of q's dtype: receives a copy of the
            output and is returned in its place.
        p_dropout: probability, 0 to 1, with which each of the probabilities becomes 0; the others
            are divided by 1 - p_dropout.
        softmax_scale: multiplies <q, k>; None for 1 / sqrt(head_dim).
        is_causal: a query sees only keys at positions up to its own, as counted from the end.
        keep_window_size: the number of keys for which active_mask was made, 1 or more. If there are
            at most so many keys, queries attend to all that they can see, and active_mask is
            ignored. If there are more, active_mask alone selects the keys, whatever this number is.
            flash_dmattn.flash_dma_attention() selects that many keys by itself.
        softcap: c > 0 turns the scaled product x into c * tanh(x / c), before zoh is added; 0 for
            none.
        return_softmax: also compute the probabilities, to debug.
        gen: on q's device: dropout draws two numbers from it. None for the default generator.

    Returns:
        The list of output [batch, seqlen_q, num_heads, head_dim]; softmax_lse [batch, num_heads,
        seqlen_q] float32, in nats; p [batch, num_heads, seqlen_q, seqlen_k] float32 with
        return_softmax, with dropout and without a gradient, otherwise an empty tensor; rng_state
        [2] int64 with dropout, which flash_dmattn.attention() takes, otherwise an empty tensor. A
        query without an active key has an output of 0, an lse of -inf and probabilities of 0. The
        output and softmax_lse have gradients.

    Raises:
        TypeError: a tensor, generator or keep_window_size of another type.
        ValueError: shapes, devices or options that are inconsistent.
        NotImplementedError: a dtype or head_dim that no kernel on this machine supports.
        MemoryError: probabilities that take more memory than the device has.

    Example:
        >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
        >>> zoh = torch.randn(1, 2, 6, 6)
        >>> active_mask = torch.zeros(1, 2, 6, 6).scatter(-1, zoh.topk(3).indices, 1.0)
        >>> options = {"keep_window_size": 3, "return_softmax": True}
        >>> result = flash_dma.fwd(q, k, v, zoh, active_mask, **options)
        >>> output, softmax_lse, p, rng_state = result
        >>> output.shape, softmax_lse.shape, (p > 0).sum(-1).unique()
        (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 6]), tensor([3]))

    Source: arXiv:2205.14135, arXiv:2508.02124.
    """
    if _arguments.check_int("keep_window_size", keep_window_size) < 1:
        raise ValueError(f"keep_window_size: is {keep_window_size}, want 1 or more")
    for name, flag in (("is_causal", is_causal), ("return_softmax", return_softmax)):
        _types.check_flag(name, flag)
    active_mask = as_bool_mask(active_mask, "active_mask", "zoh")
    if isinstance(k, torch.Tensor) and k.dim() == 4 and k.shape[1] <= keep_window_size:
        call_renamed(NAMES, _check_mask, q, k, active_mask)
        active_mask = None
    found, lse, probability, rng_state = call_renamed(
        NAMES,
        attend,
        *(q, k, v, active_mask, zoh),
        causal=is_causal,
        softmax_scale=softmax_scale,
        softcap=softcap,
        dropout_p=p_dropout,
        generator=gen,
        backend=None,
        probabilities_name="return_softmax" if return_softmax else None,
    )
    if out is not None:
        _check_out(out, found)
        found = out.copy_(found)
    if probability is None:
        probability = lse.new_empty(0)
    if rng_state is None:
        rng_state = lse.new_empty(0, dtype=torch.int64)
    return [found, lse, probability, rng_state]
