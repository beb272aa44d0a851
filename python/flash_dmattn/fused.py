"""Dynamic mask attention in one call. The top of functional.py has what all functions share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from . import _arguments, _repeat, _types, ops
from ._arguments import (
    MaybeTensors,
    Tensors,
    autocast,
    check_probabilities_fit,
    draw_state,
    finish,
    head_under_autocast,
    kernel_dropout,
    kernel_scale,
    pad_head_dim,
    refuse_tangents,
)
from ._signatures import BiasForm, FusedKeywords, Scope
from .functional import _rules_of
from .options import WINDOW, DynamicMaskOptions, options_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

NUMBERS = (int, float)
TENSORS = 10  # tensor arguments of flash_dma_attention: the first ones of ops.FUSED


def _rules_of_call(
    keep_window_size: int,
    recent: int,
    sinks: int,
    gap: float | None,
    scope: Scope | None,
    causal: bool,
    options: DynamicMaskOptions | None,
) -> tuple[tuple[int, int, int], float, Scope]:
    """The rules (window, recent, sinks), the gap (0 for none) and the scope."""
    if type(causal) is not bool:
        _types.check_flag("causal", causal)
    if options is not None and not isinstance(options, DynamicMaskOptions):
        raise _types.refusal("options", options, "a DynamicMaskOptions or None")
    if scope is not None:
        _arguments.choose("scope", scope)
    if scope is None:
        scope = "causal" if causal else "global"
    elif scope == "causal" and not causal:
        raise ValueError("scope: is 'causal', want 'global' if causal is False")
    reason = "with scope 'global'" if causal else "if causal is False"
    no_recent = reason if scope == "global" else None
    if options is not None:
        keep_window_size = options._window_of(keep_window_size)
    rules = _arguments.check_rules(
        keep_window_size, recent, sinks, name="keep_window_size", no_recent=no_recent
    )
    return rules, _arguments.check_gap(gap, no_recent), scope


def _check_limits(
    query: torch.Tensor,
    key: torch.Tensor,
    starts: torch.Tensor | None,
    rules: tuple[int, int, int],
    options: DynamicMaskOptions | None,
    return_lse: bool,
    return_attn_probs: bool,
) -> None:
    """Refuse a call beyond the limits of `options`, or probabilities that do not fit in memory."""
    _types.check_flags(("return_lse", "return_attn_probs"), (return_lse, return_attn_probs))
    if options is not None:
        options._check_call(query, key, starts, rules[0] + rules[1])
    if return_attn_probs:
        check_probabilities_fit(query, key, "return_attn_probs")


def _padded(tensors: MaybeTensors) -> tuple[tuple[Any, ...], int | None]:
    """query to dt_bias after pad_head_dim(), and its head_dim."""
    *rows, dt_proj, a_coef, dt_bias = tensors
    padded, dt_proj, head_dim = pad_head_dim(tuple(rows), dt_proj)
    return (*padded, dt_proj, a_coef, dt_bias), head_dim


def _attend_to_all(
    tensors: Tensors,
    given: MaybeTensors,
    bias_form: str,
    numbers: tuple[Any, ...],
    deterministic: bool,
    backend: str | None,
) -> MaybeTensors:
    """Attention to all keys, with the bias from their scores. The results are as from ops.FUSED,
    without scores and a selection."""
    query, key, value, *weights = tensors
    key_valid, _, kv_used, *_ = given
    score_backend = backend and ops.backend_for(backend, "score")
    _, bias = ops.SCORE(value, *weights, key_valid, kv_used, bias_form, score_backend)
    bias = None if bias_form == "none" else bias
    rest = (*3 * [None], *_rules_of(None), *numbers, deterministic, backend)
    out, lse = ops.ATTENTION(query, key, value, bias, *given, *rest)
    return out, lse, None, bias, None, None


def _probabilities_of(
    results: MaybeTensors,
    tensors: MaybeTensors,
    given: MaybeTensors,
    bias_form: str,
    options: tuple[Any, ...],
) -> torch.Tensor:
    _, lse, _, bias, *selected = results
    key_valid, starts, kv_used, _, rng_state = given
    bias = None if bias_form == "none" else bias
    masks = (key_valid, starts, kv_used, rng_state, None, None)
    return ops.PROBABILITIES.without_gradients(*tensors[:2], bias, *masks, *selected, lse, *options)


def _results_of(
    found: tuple[Any, ...],
    call: tuple[Any, ...],
    wanted: tuple[bool, bool],
    head_dim: int | None,
    dropout_p: float,
) -> torch.Tensor | Tensors:
    """out, then lse and the probabilities if they are wanted. `call` has the arguments of
    _probabilities_of()."""
    results: Tensors = (finish(found[0], head_dim, dropout_p),)
    if wanted[0]:
        results += (found[1],)
    if wanted[1]:
        results += (finish(_probabilities_of(found, *call), None, dropout_p),)
    return results if len(results) > 1 else results[0]


def _attend_alone(
    known: tuple[Any, ...] | None,
    tensors: tuple[Any, ...],
    settings: tuple[Any, ...],
) -> torch.Tensor:
    """out, without the other results if neither the caller nor autograd needs them. A direct call
    is remembered under `known`, the arguments of flash_dma_attention(). If these are not the
    operator's tensors, because some were cast or padded, or `known` is None, it is remembered under
    the operator's arguments."""
    if not torch.compiler.is_compiling():
        arguments = (*tensors, *settings)
        out = _repeat.repeat(_attend_alone, arguments, ops.FUSED.count)
        if out is NotImplemented:
            ops.FUSED.check_types(arguments)
            if known is None or any(x is not y for x, y in zip(tensors, known[1][:TENSORS])):
                known = (_attend_alone, arguments, ops.FUSED.count)
            out = _repeat.begin(ops.FUSED, arguments, 1, known)
        if out is not NotImplemented:
            return out
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return ops.FUSED.dispatch(*tensors, *settings)[0]
    *rest, _, backend = settings  # without `deterministic`
    return ops.FUSED_OUT.op(*tensors, *rest, backend)


@overload
def flash_dma_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dt_proj: torch.Tensor,
    a_coef: torch.Tensor,
    keep_window_size: int = ...,
    dropout_p: float = ...,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    return_attn_probs: Literal[False] = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[FusedKeywords],
) -> torch.Tensor: ...


@overload
def flash_dma_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dt_proj: torch.Tensor,
    a_coef: torch.Tensor,
    keep_window_size: int = ...,
    dropout_p: float = ...,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    return_attn_probs: Literal[False] = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[FusedKeywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def flash_dma_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dt_proj: torch.Tensor,
    a_coef: torch.Tensor,
    keep_window_size: int = ...,
    dropout_p: float = ...,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    *,
    return_attn_probs: Literal[True],
    return_lse: Literal[False] = ...,
    **options: Unpack[FusedKeywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def flash_dma_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dt_proj: torch.Tensor,
    a_coef: torch.Tensor,
    keep_window_size: int = ...,
    dropout_p: float = ...,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    *,
    return_attn_probs: Literal[True],
    return_lse: Literal[True],
    **options: Unpack[FusedKeywords],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


@overload
def flash_dma_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dt_proj: torch.Tensor,
    a_coef: torch.Tensor,
    keep_window_size: int = ...,
    dropout_p: float = ...,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    return_attn_probs: bool = ...,
    *,
    return_lse: bool = ...,
    **options: Unpack[FusedKeywords],
) -> torch.Tensor | tuple[torch.Tensor, ...]: ...


def flash_dma_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dt_proj: torch.Tensor,
    a_coef: torch.Tensor,
    keep_window_size: int = WINDOW,
    dropout_p: float = 0.0,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_attn_probs: bool = False,
    *,
    dt_bias: torch.Tensor | None = None,
    key_valid: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    kv_used: torch.Tensor | None = None,
    sink_logit: torch.Tensor | None = None,
    recent: int = 0,
    sinks: int = 0,
    gap: float | None = None,
    scope: Scope | None = None,
    bias_form: BiasForm = "exp",
    softcap: float = 0.0,
    generator: torch.Generator | None = None,
    backend: str | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    options: DynamicMaskOptions | None = None,
    **fields: Any,
) -> torch.Tensor | Tensors:
    """Dynamic mask attention in one call: score(), select() and attention().

    Args:
        query: [batch, q_len, q_heads, head_dim]; q_heads is a multiple of kv_heads, head_dim 256 at
            most. Query i has position i + kv_len - q_len.
        key: [batch, kv_len, kv_heads, head_dim], of query's dtype.
        value: [batch, kv_len, kv_heads, head_dim], of query's dtype.
        dt_proj: [kv_heads, kv_heads * head_dim], of query's dtype or float32.
        a_coef: [kv_heads], of query's dtype or float32.
        keep_window_size: number of keys that a query keeps, 1 or more; kv_len or more keeps
            all of them.
        dropout_p: probability with which each of the probabilities becomes 0; the others are
            divided by 1 - dropout_p. It is rounded to a multiple of 2^-16. lse is without dropout.
        causal: a query sees only keys at positions up to its own.
        softmax_scale: multiplies <query, key>; None for 1 / sqrt(head_dim).
        return_attn_probs: also return the probabilities, as attention_probabilities() does, but
            with dropout: q_len * kv_len numbers for each query head, to debug and to draw pictures.
        dt_bias: optional [kv_heads], of query's dtype or float32, added before softplus; None for
            0.
        key_valid: optional [batch, kv_len] bool or uint8, false for padding, which is never read.
        starts: optional [sequences + 1] int32, for packed sequences, which stand one after the
            other in a batch of 1: the position at which each begins, and the end of all.
        kv_used: optional [batch] int32: how many keys of each sequence exist; the others are not
            read. Query i has position i + kv_used[b] - q_len.
        sink_logit: optional [q_heads] float32 (float64 if query is): the logit of one more term in
            the sum of each row of a head, which has no value. lse counts it.
        recent: number of keys that a query keeps beside these because they are the newest that it
            can see, 0 or more; 0 in global scope. The window then has the best of the older keys,
            and a query keeps keep_window_size + recent keys. A language model needs the tokens just
            before a query, which scores alone may not keep.
        sinks: number of keys, 0 to keep_window_size, that outrank all others whatever their scores:
            the first ones of the sequence that are valid. They count in the window.
        gap: of these keys a query keeps only sinks, the `recent` newest, and those whose score is
            at most this far below the highest score of all valid keys up to its position. A finite
            number above 0; None, as it has to be in global scope, leaves no key out.
        scope: "causal": each query ranks the keys up to its own position. "global": all keys are
            ranked once. None for "causal" if `causal` is set, else "global".
        bias_form: "exp": exp(score) is added to the logits; "linear": the score itself; "none":
            nothing, so that dt_proj, a_coef and dt_bias have no gradients.
        softcap: c > 0 turns the scaled product x into c * tanh(x / c), before the bias is added; 0
            for none.
        generator: on query's device: dropout draws two numbers from it. None for the default one,
            which torch.manual_seed() sets.
        backend: one of get_available_backends() or a kernel's name; None for the fastest.
        deterministic: make gradients bit-equal from run to run on CUDA devices as well.
        return_lse: also return lse.
        options: limits of the call, and how keys are processed; the call uses its keep_window_size.
        fields: fields of DynamicMaskOptions by name, in place of options: selection_method,
            min_density_threshold, mixed_processing, block_size, use_reordering and the limits. As
            there, a value that no kernel has is refused.

    Returns:
        out [batch, q_len, q_heads, head_dim], of query's dtype. With return_lse or
        return_attn_probs a tuple of out, lse [batch, q_heads, q_len] and probabilities
        [batch, q_heads, q_len, kv_len], without what is not asked for. lse, in nats, and
        probabilities are float32 (float64 if query is); probabilities have no gradient. A query
        that keeps no key has out = 0, lse = -inf or its sink_logit, and probabilities of 0.

    Raises:
        TypeError: an argument of another type or of an unknown name.
        ValueError: shapes, devices or options that are inconsistent, or a call beyond the limits of
            `options`.
        NotImplementedError: a dtype, head_dim or backend that no kernel on this machine supports.
        MemoryError: probabilities that take more memory than the device has.

    Example:
        >>> query = torch.randn(2, 16, 4, 8)
        >>> key, value = torch.randn(2, 2, 16, 2, 8)
        >>> dt_proj, a_coef = torch.randn(2, 16), torch.ones(2)
        >>> out = flash_dmattn.flash_dma_attention(
        ...     query, key, value, dt_proj, a_coef, keep_window_size=5, causal=True
        ... )
        >>> out.shape
        torch.Size([2, 16, 4, 8])

    Source: arXiv:2508.02124.
    """
    options = options_of(keep_window_size, options, fields) if fields else options
    known, is_usual = None, generator is options is None and isinstance(dropout_p, NUMBERS)
    is_usual = is_usual and dropout_p == 0 and return_lse is return_attn_probs is False
    if is_usual and not torch.compiler.is_compiling():
        # The arguments of a known call were checked by an earlier call.
        asked = (
            query, key, value, dt_proj, a_coef, dt_bias, key_valid, starts, kv_used, sink_logit,
            keep_window_size, recent, sinks, gap, causal, softmax_scale, softcap,
            scope, bias_form, deterministic, backend,
        )  # fmt: skip
        known = (head_under_autocast(flash_dma_attention, query), asked, TENSORS)
        out = _repeat.repeat(*known)
        if out is not NotImplemented:
            return out
    refuse_tangents("flash_dma_attention", query, key, value, dt_proj, a_coef, dt_bias, sink_logit)
    tensors, head_dim = _padded(autocast("query", (query, key, value), (dt_proj, a_coef, dt_bias)))
    rules, gap, scope = _rules_of_call(keep_window_size, recent, sinks, gap, scope, causal, options)
    _check_limits(query, key, starts, rules, options, return_lse, return_attn_probs)
    kernel_p, rng_state = kernel_dropout(dropout_p, draw_state(query, dropout_p, generator))
    given = (key_valid, starts, kv_used, sink_logit, rng_state)
    numbers = (causal, kernel_scale(softmax_scale, head_dim), softcap, kernel_p)
    settings = (*rules, scope, bias_form, *numbers, gap, deterministic, backend)
    if options is not None and gap == 0 and options._is_dense(rules[0] + rules[1], key):
        rules, scope = (0, 0, 0), "causal"  # as without a selection
        found = _attend_to_all(tensors, given, bias_form, numbers, deterministic, backend)
    elif not (return_lse or return_attn_probs):
        found = (_attend_alone(known, (*tensors, *given), settings),)
    else:
        found = ops.FUSED(*tensors, *given, *settings)
    call = (tensors, given, bias_form, (*rules, scope, *numbers, backend))
    return _results_of(found, call, (return_lse, return_attn_probs), head_dim, dropout_p)
