"""Attention under a mask and a bias for single queries and keys, called as flash-dmattn is.

The top of functional.py has what all functions share.
"""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from . import _arguments, _library, _repeat, _types, ops
from ._arguments import (
    as_bool_mask,
    call_renamed,
    check_no_bool,
    check_probabilities_fit,
    choose_scale,
    draw_state,
    either,
    is_added_in_any_order,
    kernel_scale,
    pad_head_dim,
    refuse_tangents,
)
from ._orders import has_scale, in_any_order
from ._signatures import MaskedKeywords, returns
from .functional import attention
from .probabilities import attention_probabilities

if TYPE_CHECKING:
    from typing_extensions import Unpack

NAMES = {"query": "q", "key": "k", "value": "v"}
OTHER_BACKENDS = ("triton", "flex")  # of flash-dmattn
# The orders of positional arguments in flash-dmattn 0.1 to 1.2, and before.
PAIRS = (*NAMES.values(), "attn_mask", "attn_bias")
REST = ("is_causal", "softcap", "deterministic", "return_attn_probs")
ORDER = (*PAIRS, "scale", *REST)
EARLIER = (*PAIRS, "dropout_p", "softmax_scale", *REST)


def order_of(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[str, ...]:
    is_usual = len(args) <= len(PAIRS) or has_scale(args[len(PAIRS) :], named)
    return ORDER if is_usual and len(args) <= len(ORDER) else EARLIER


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    attn_bias: torch.Tensor | None,
    *,
    causal: bool,
    softmax_scale: float | None,
    softcap: float,
    dropout_p: float,
    generator: torch.Generator | None,
    backend: str | None,
    deterministic: bool = False,
    starts: torch.Tensor | None = None,
    sink_logit: torch.Tensor | None = None,
    mask_lists: torch.Tensor | None = None,
    probabilities_name: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """out and lse of attention(), the probabilities if the option `probabilities_name` asks for
    them, and the rng_state of dropout, if there is any."""
    _types.check_tensor("query", q)
    if probabilities_name is not None:
        _types.check_tensor("key", k)
        check_probabilities_fit(q, k, probabilities_name)
    rng_state = draw_state(q, dropout_p, generator)
    options: dict[str, Any] = {
        "attn_mask": attn_mask,
        "attn_bias": attn_bias,
        "starts": starts,
        "causal": causal,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "backend": backend,
        "dropout_p": dropout_p,
        "rng_state": rng_state,
    }
    out, lse = attention(
        *(q, k, v),
        **options,
        sink_logit=sink_logit,
        mask_lists=mask_lists,
        deterministic=deterministic,
    )
    probability = None
    if probabilities_name is not None:
        probability = attention_probabilities(q, k, lse, **options)
    return out, lse, probability, rng_state


def name_rows(
    rows: tuple[Any, ...], others: tuple[Any, ...]
) -> tuple[tuple[Any, ...], dict[str, str]]:
    """q, k and v, which callers give under these names or as query, key and value, and the names
    for messages."""
    names = {long: short for (long, short), other in zip(NAMES.items(), others) if other is None}
    pairs = zip(NAMES.items(), rows, others)
    return tuple(either(short, one, long, other) for (long, short), one, other in pairs), names


def check_flag(name: str, value: Any) -> bool:
    """Check a bool that may be None. A call with another order of arguments has a number there."""
    fits = value is None or (_types.is_flag(value) and value in (0, 1))
    if not fits:
        raise _types.refusal(name, value, "a bool or None")
    return bool(value)


def attend_alone(asked: tuple[Any, ...]) -> torch.Tensor:
    """out of a call of flash_dmattn_func() without dropout, which is remembered under its
    arguments; NotImplemented if the operator does not get these tensors."""
    tensors, (scale, causal, softcap, deterministic, backend) = asked[:-5], asked[-5:]
    mask, attn_bias, _, _, _ = tensors[-5:]
    if not all(isinstance(x, torch.Tensor) for x in tensors[:3]):
        return NotImplemented
    refuse_tangents("attention", *tensors[:3], attn_bias)
    device = tensors[0].device.type
    is_cast = device not in _arguments.DEVICES or torch.is_autocast_enabled(device)
    if is_cast or pad_head_dim(tensors[:3])[2] is not None or as_bool_mask(mask) is not mask:
        return NotImplemented
    if is_added_in_any_order(attn_bias, bool(deterministic)):
        return NotImplemented
    numbers = (kernel_scale(scale), 0.0 if softcap is None else softcap, 0.0)
    arguments = (*tensors, 0, 0, 0, "causal", bool(causal), *numbers, bool(deterministic), backend)
    ops.ATTENTION.check_types(arguments)
    return _repeat.begin(ops.ATTENTION, arguments, 1, (flash_dmattn_func, asked, len(tensors)))


@overload
def flash_dmattn_func(
    q: torch.Tensor | None = ...,
    k: torch.Tensor | None = ...,
    v: torch.Tensor | None = ...,
    attn_mask: torch.Tensor | None = ...,
    attn_bias: torch.Tensor | None = ...,
    scale: float | None = ...,
    is_causal: bool | None = ...,
    softcap: float | None = ...,
    deterministic: bool | None = ...,
    return_attn_probs: Literal[False] | None = ...,
    **options: Unpack[MaskedKeywords],
) -> torch.Tensor: ...


@overload
def flash_dmattn_func(
    q: torch.Tensor | None = ...,
    k: torch.Tensor | None = ...,
    v: torch.Tensor | None = ...,
    attn_mask: torch.Tensor | None = ...,
    attn_bias: torch.Tensor | None = ...,
    scale: float | None = ...,
    is_causal: bool | None = ...,
    softcap: float | None = ...,
    deterministic: bool | None = ...,
    *,
    return_attn_probs: Literal[True],
    **options: Unpack[MaskedKeywords],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


@overload
def flash_dmattn_func(
    q: torch.Tensor | None = ...,
    k: torch.Tensor | None = ...,
    v: torch.Tensor | None = ...,
    attn_mask: torch.Tensor | None = ...,
    attn_bias: torch.Tensor | None = ...,
    scale: float | None = ...,
    is_causal: bool | None = ...,
    softcap: float | None = ...,
    deterministic: bool | None = ...,
    return_attn_probs: bool | None = ...,
    **options: Unpack[MaskedKeywords],
) -> torch.Tensor | tuple[torch.Tensor, ...]: ...


@in_any_order(order_of, ORDER)
def flash_dmattn_func(
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    scale: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool | None = None,
    *,
    query: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    dropout_p: float | None = None,
    generator: torch.Generator | None = None,
    mask_lists: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Attention under a mask and a bias, with the arguments of flash-dmattn's function.

    Positional arguments may also stand in an earlier order of that function, with dropout_p and
    softmax_scale in place of scale; docs/migrating.md says how the two are told apart.

    It is attention() with attn_mask and attn_bias, and a mask may also be of floating-point
    numbers. If the mask selects keys by a score of each key, flash_dma_attention() does the same
    without a mask, in much less time and memory.

    Args:
        q: [batch, q_len, q_heads, head_dim], as query in attention().
        k: [batch, kv_len, kv_heads, head_dim].
        v: [batch, kv_len, kv_heads, head_dim].
        attn_mask: optional [batch or 1, q_heads or kv_heads or 1, q_len or 1, kv_len or 1]: bool or
            uint8, false where a query does not attend to a key; or floating-point numbers, 1.0
            where it does and 0.0 where it does not. Such numbers count as true where they are above
            0. They are converted, one byte for each of them; a CUDA device reads numbers of 16 bits
            as they are, if kv_len and the other strides are multiples of 8. Give numbers to be
            added to logits as attn_bias. On the CPU a mask with a number below 0 is refused; on a
            CUDA device, where nothing is read back, it counts as 0.0.
        attn_bias: optional, with axes as attn_mask, of q's dtype or float32: added to the logits of
            kept keys and not read elsewhere. It has a gradient.
        scale: multiplies <q, k>; None for 1 / sqrt(head_dim).
        is_causal: a query sees only keys at positions up to its own; None for False.
        softcap: as in attention(); None for 0.
        deterministic: as in attention(); None for False.
        return_attn_probs: also return lse and the probabilities, to debug; None for False.
        query: another name of q.
        key: another name of k.
        value: another name of v.
        softmax_scale: another name of scale.
        dropout_p: as in attention(); None for 0.
        generator: as in attention(), on q's device.
        mask_lists: optional, from mask_lists(): the lists of attn_mask, so that it is not read.
        backend: as in score().

    Returns:
        out [batch, q_len, q_heads, head_dim], of q's dtype; a query that the mask allows no key has
        out = 0. With return_attn_probs a tuple of out, lse [batch, q_heads, q_len] and
        probabilities [batch, q_heads, q_len, kv_len], with dropout and without gradients.

    Raises:
        TypeError: a q or a mask that is not a tensor, a generator of another type, two names of
            one argument, a number as is_causal, or a bool as scale or softcap.
        ValueError: shapes, devices or options that are inconsistent; scale and softmax_scale that
            differ; on the CPU a mask with a number below 0.
        NotImplementedError: a dtype, head_dim or backend that no kernel on this machine supports.
        MemoryError: probabilities that take more memory than the device has.

    Example:
        >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
        >>> best = torch.randn(1, 2, 6, 6).topk(3).indices  # 3 keys for each query
        >>> mask = torch.zeros(1, 2, 6, 6).scatter(-1, best, 1.0)
        >>> flash_dmattn.flash_dmattn_func(q=q, k=k, v=v, attn_mask=mask, scale=0.5).shape
        torch.Size([1, 6, 2, 8])

    Source: arXiv:2205.14135, arXiv:2508.02124.
    """
    asked, out = None, NotImplemented
    is_usual = query is key is value is softmax_scale is dropout_p is generator is None
    is_usual = is_usual and (return_attn_probs is None or return_attn_probs is False)
    if is_usual and not torch.compiler.is_compiling():
        # The arguments of a known call were checked by an earlier call.
        pairs = (attn_mask, attn_bias, mask_lists)
        asked = (
            *(q, k, v, None, None, None, None, None, None, *pairs, None, None),
            *(scale, is_causal, softcap, deterministic, backend),
        )
        out = _repeat.repeat(flash_dmattn_func, asked, ops.ATTENTION.count)
        if out is not NotImplemented:
            return out
    rows, names = name_rows((q, k, v), (query, key, value))
    if scale is not None:
        names["softmax_scale"] = "scale"
    check_no_bool("softcap", softcap)
    check_flag("return_attn_probs", return_attn_probs)
    causal = check_flag("is_causal", is_causal)
    deterministic = check_flag("deterministic", deterministic)
    softmax_scale = choose_scale(softmax_scale, scale)
    names["causal"] = "is_causal"
    if asked is not None:
        out = call_renamed(names, attend_alone, asked)
        if out is not NotImplemented:
            return out
    out, lse, probability, _ = call_renamed(
        names,
        attend,
        *(*rows, as_bool_mask(attn_mask), attn_bias),
        causal=causal,
        softmax_scale=softmax_scale,
        softcap=0.0 if softcap is None else softcap,
        dropout_p=0.0 if dropout_p is None else dropout_p,
        generator=generator,
        mask_lists=mask_lists,
        backend=backend,
        deterministic=deterministic,
        probabilities_name="return_attn_probs" if return_attn_probs else None,
    )
    return out if probability is None else (out, lse, probability)


@returns(flash_dmattn_func)
def flash_dmattn_func_auto(backend: str | None = None, **kwargs: Any) -> Any:
    """flash_dmattn_func() with its backend chosen.

    Args:
        backend: one of get_available_backends() or a kernel's name; None for the fastest kernels of
            the device that the tensors are on. "cuda" on a machine without a CUDA device is as
            None, with a RuntimeWarning, so that programs for a GPU run on CPU tensors.
        kwargs: arguments of the function. They have no effect here, as in flash-dmattn: give them
            to the function.

    Returns:
        The function.

    Raises:
        TypeError: a backend that is neither a str nor None.
        NotImplementedError: "triton" or "flex", which are backends of flash-dmattn alone, or
            another unknown name.

    Example:
        >>> flash_dmattn_func = flash_dmattn.flash_dmattn_func_auto(backend="cpu")
        >>> x = torch.randn(1, 6, 2, 8)
        >>> flash_dmattn_func(q=x, k=x, v=x, is_causal=True).shape
        torch.Size([1, 6, 2, 8])

    Source: arXiv:2508.02124.
    """
    usable = _library.backends()
    if isinstance(backend, str) and backend in OTHER_BACKENDS:
        names = ", ".join(map(repr, usable))
        raise NotImplementedError(
            f"backend: is {backend!r}, which this library does not have, want one of {names}, or "
            "None for the fastest"
        )
    if isinstance(backend, str) and backend == "cuda" and "cuda" not in usable:
        warnings.warn(
            "backend: is 'cuda', but there is no CUDA device, or no CUDA kernel in this build: the "
            "function takes CPU tensors",
            RuntimeWarning,
            stacklevel=2,
        )
        backend = None
    if not isinstance(backend, str) or backend not in usable:
        _arguments.check_backend(backend)
    return functools.partial(flash_dmattn_func, backend=backend)
