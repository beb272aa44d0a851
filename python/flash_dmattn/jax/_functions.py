"""Scores, selections and attention, with the names and defaults of the functions for PyTorch."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import jax
from jax import Array, lax

from .. import _library
from ._arguments import (
    check_arrays,
    check_backend,
    check_flag,
    check_gap,
    check_number,
    check_rules,
    choose,
    draw_state,
    finish,
    pad,
    refusal,
    scale_of,
)
from ._call import Operation, call
from ._gradients import (
    OF_SELECTION,
    Given,
    Options,
    jit_attention,
    jit_fused,
    jit_score,
    like,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._signatures import BiasForm, Scope


class Keywords(TypedDict, total=False):
    """Of flash_dma_attention()."""

    dt_bias: Array | None
    key_valid: Array | None
    starts: Array | None
    kv_used: Array | None
    sink_logit: Array | None
    recent: int
    sinks: int
    gap: float | None
    scope: Scope | None
    bias_form: BiasForm
    softcap: float
    rng_key: Array | None
    backend: str | None
    deterministic: bool


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["expiry", "slot"],
    meta_fields=["window", "scope", "recent", "sinks", "gap"],
)
@dataclasses.dataclass(frozen=True)
class Selection:
    """The keys that queries keep: the result of select(), and an argument of attention(). It is a
    pytree of its arrays `expiry` and `slot`; the other fields are static.

    Args:
        expiry: [batch, kv_heads, kv_len] int32: the first position at which a key is no longer
            kept; j itself for a key j that is never kept.
        slot: [batch, kv_heads, kv_len] int32: the number, below window + recent, under which a kept
            key is stored while it is live; -1 for a key that is never kept.
        window, scope, recent, sinks, gap: as in select().

    Raises:
        TypeError: a field that is missing.

    Example:
        >>> import jax.numpy as jnp
        >>> scores = jnp.array([[[3.0, 1.0, 2.0, 0.0]]])
        >>> flash_dmattn.jax.select(scores, 2).window
        2

    Source: docs/algorithm.md, selection.
    """

    expiry: Array
    slot: Array
    window: int
    scope: str
    recent: int = 0
    sinks: int = 0
    gap: float | None = None


def check_selection(selection: Any) -> None:
    if selection is not None and not isinstance(selection, Selection):
        raise refusal("selection", selection, "select()'s result")


@functools.partial(jax.jit, static_argnums=(0, 1))
def jit_select(options: Options, backend: str | None, given: Given) -> tuple[Array, Array]:
    results = tuple(like(name, given["score"], "int32") for name in OF_SELECTION)
    found = call(Operation("select", options, results, backend), given)
    return found["selection.expiry"], found["selection.slot"]


def score(
    value: Array,
    dt_proj: Array,
    a_coef: Array,
    *,
    dt_bias: Array | None = None,
    bias_form: str = "exp",
    key_valid: Array | None = None,
    kv_used: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, Array | None]:
    """Score and bias of each key, computed from the value states of all kv heads.

    score = a_coef * softplus(value @ dt_proj^T + dt_bias), where the heads of `value` are
    concatenated.

    Args:
        value: [batch, kv_len, kv_heads, head_dim].
        dt_proj: [kv_heads, kv_heads * head_dim], of value's dtype or float32.
        a_coef: [kv_heads], of value's dtype or float32.
        dt_bias: optional [kv_heads], of value's dtype or float32; None for 0.
        bias_form: "exp", "linear" or "none".
        key_valid: optional [batch, kv_len] bool or uint8, false for padding. Such a key is not
            read, and its score is -inf.
        kv_used: optional [batch] int32, how many keys exist; the others count as padding.
        backend: a kernel's name or the beginning of one, such as "cpu"; None for the fastest.

    Returns:
        score and bias, both [batch, kv_heads, kv_len] float32. The bias is None if bias_form is
        "none".

    Raises:
        TypeError, ValueError, NotImplementedError: as attention().

    Example:
        >>> import jax.numpy as jnp
        >>> value = jnp.zeros((1, 5, 2, 8))  # 5 keys of 2 heads
        >>> ones = jnp.ones((2, 16))
        >>> scores, bias = flash_dmattn.jax.score(value, ones, ones[:, 0])
        >>> [round(x, 4) for x in scores[0, 0].tolist()]  # softplus(0)
        [0.6931, 0.6931, 0.6931, 0.6931, 0.6931]

    Source: arXiv:2508.02124, section 3.
    """
    named: Given = {"value": value, "dt_proj": dt_proj, "a_coef": a_coef, "dt_bias": dt_bias}
    named.update(key_valid=key_valid, kv_used=kv_used)
    x = check_arrays(named, ("dt_bias", "key_valid", "kv_used"))
    choose("bias_form", bias_form, _library.BIAS_FORMS)
    rows, dt_proj = pad({"value": x["value"]}, x["dt_proj"])
    given = {"v": rows["value"], "dt_proj": dt_proj, "a": x["a_coef"], "dt_bias": x["dt_bias"]}
    given.update(key_valid=x["key_valid"], kv_used=x["kv_used"])
    return jit_score(bias_form, check_backend(backend), given)


def select(
    score: Array,
    window: int,
    *,
    recent: int = 0,
    sinks: int = 0,
    gap: float | None = None,
    scope: str = "causal",
    key_valid: Array | None = None,
    starts: Array | None = None,
    kv_used: Array | None = None,
    backend: str | None = None,
) -> Selection:
    """The `window` keys of highest score among those that each query can see.

    Of equal scores the more recent key ranks first; NaN ranks below everything. The result is
    exact: every backend gives the same bits. It is not differentiable.

    Args:
        score: [batch, kv_heads, kv_len] float32.
        window: number of keys that a query keeps, 1 or more; kv_len or more keeps all of them.
        recent: number of keys that a query keeps beside these because they are the newest that it
            can see, 0 or more; 0 in global scope.
        sinks: number of keys, 0 to window, that outrank all others whatever their scores: the
            first ones of the sequence that are valid. They count in the window.
        gap: of these keys a query keeps only sinks, the `recent` newest, and those whose score is
            at most this far below the highest score of all valid keys up to its position. None, as
            it has to be in global scope, leaves no key out.
        scope: "causal": each query ranks the keys up to its own position. "global": all keys are
            ranked once, and every query keeps the best of them.
        key_valid: optional [batch, kv_len] bool or uint8, false for padding, which is never kept.
        starts: optional [sequences + 1] int32, for packed sequences in a batch of 1: the position
            at which each begins, and the end of all.
        kv_used: optional [batch] int32: how many keys of each sequence exist.
        backend: as in score().

    Returns:
        A Selection.

    Raises:
        TypeError, ValueError, NotImplementedError: as attention().

    Example:
        >>> import jax.numpy as jnp
        >>> scores = jnp.array([[[3.0, 1.0, 2.0, 0.0]]])
        >>> flash_dmattn.jax.select(scores, 2).expiry.tolist()  # key 2 evicts key 1
        [[[4, 2, 4, 3]]]

    Source: arXiv:2508.02124, section 3.
    """
    named: Given = {"score": score, "key_valid": key_valid, "starts": starts, "kv_used": kv_used}
    given = check_arrays(named, ("key_valid", "starts", "kv_used"))
    scope_number = choose("scope", scope, _library.SCOPES)
    no_recent = "with scope 'global'" if scope == "global" else None
    rules = check_rules(window, recent, sinks, no_recent=no_recent)
    options: Options = (*zip(("window", "recent", "sinks"), rules), ("scope", scope_number))
    options += (("gap", check_gap(gap, no_recent)),)
    given["score"] = lax.stop_gradient(given["score"])
    expiry, slot = jit_select(options, check_backend(backend), given)
    return Selection(expiry, slot, rules[0], scope, *rules[1:], gap=gap)


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    bias: Array | None = None,
    selection: Selection | None = None,
    key_valid: Array | None = None,
    starts: Array | None = None,
    kv_used: Array | None = None,
    sink_logit: Array | None = None,
    attn_mask: Array | None = None,
    attn_bias: Array | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    rng_key: Array | None = None,
    backend: str | None = None,
    deterministic: bool = False,
) -> tuple[Array, Array]:
    """Attention of each query over the keys of `selection`, or over all visible keys without one.

    It is differentiable, once, in reverse mode, in query, key, value, bias, sink_logit and
    attn_bias.

    Args:
        query: [batch, q_len, q_heads, head_dim]; q_heads is a multiple of kv_heads, head_dim 256 at
            most. Query i has position i + kv_len - q_len.
        key: [batch, kv_len, kv_heads, head_dim], of query's dtype.
        value: [batch, kv_len, kv_heads, head_dim], of query's dtype.
        bias: optional [batch, kv_heads, kv_len] float32, added to the logits.
        selection: from select(). Its scope must be "global" unless `causal` is set.
        key_valid: optional [batch, kv_len] bool or uint8, false for padding, which is never read.
        starts: as in select().
        kv_used: as in select(). Query i has position i + kv_used[b] - q_len.
        sink_logit: optional [q_heads] float32: the logit of one more term in the sum of each row
            of a head, which has no value. lse counts it.
        attn_mask: optional bool or uint8, false where a query does not attend to a key:
            [batch or 1, q_heads or kv_heads or 1, q_len or 1, kv_len or 1], broadcast.
        attn_bias: optional, with axes as attn_mask, of query's dtype or float32: added to the
            logits of kept keys and not read elsewhere.
        causal: a query sees only keys at positions up to its own.
        softmax_scale: multiplies <query, key>; None for 1 / sqrt(head_dim).
        softcap: c > 0 turns the scaled product x into c * tanh(x / c), before the bias is added; 0
            for none.
        dropout_p: probability with which each of the probabilities becomes 0; the others are
            divided by 1 - dropout_p. It is rounded to a multiple of 2^-16; 1 drops all. lse is
            without dropout.
        rng_key: a key of jax.random, for a dropout_p above 0. Calls with the same one drop the same
            probabilities.
        backend: as in score().
        deterministic: make gradients bit-equal from run to run on CUDA devices as well.

    Returns:
        out [batch, q_len, q_heads, head_dim] of query's dtype, and lse [batch, q_heads, q_len]
        float32, in nats. A query that keeps no key has out = 0, and lse = -inf or its sink_logit.

    Raises:
        TypeError: an argument of another type, such as an option that is a traced array.
        ValueError: shapes or options that are inconsistent.
        NotImplementedError: a dtype, head_dim, platform or backend without kernels. A derivative of
            second order.

    Example:
        >>> from jax import random, numpy as jnp
        >>> query, key = random.normal(random.key(0), (2, 1, 10, 2, 8))
        >>> out, lse = flash_dmattn.jax.attention(query, key, key, causal=True)
        >>> out.shape, lse.shape
        ((1, 10, 2, 8), (1, 2, 10))

    Source: arXiv:2205.14135; arXiv:2508.02124.
    """
    named: Given = {
        "query": query,
        "key": key,
        "value": value,
        "bias": bias,
        "key_valid": key_valid,
    }
    named.update(starts=starts, kv_used=kv_used, sink_logit=sink_logit)
    named.update(attn_mask=attn_mask, attn_bias=attn_bias)
    x = check_arrays(named, tuple(named)[3:])
    check_selection(selection)
    rows, _ = pad({name: x.pop(name) for name in ("query", "key", "value")})
    kernel_p, rng_state = draw_state(dropout_p, rng_key)
    options: Options = (
        ("causal", check_flag("causal", causal)),
        ("scale", scale_of(softmax_scale, query.shape[-1])),
        ("softcap", check_number("softcap", softcap)),
        ("dropout", kernel_p),
        ("deterministic", check_flag("deterministic", deterministic)),
    )
    given = {"q": rows["query"], "k": rows["key"], "v": rows["value"], **x, "rng_state": rng_state}
    if selection is not None:
        given.update(zip(OF_SELECTION, (selection.expiry, selection.slot)))
        names = ("window", "recent", "sinks")
        options += tuple((name, getattr(selection, name)) for name in names)
        options += (("scope", choose("selection.scope", selection.scope, _library.SCOPES)),)
    out, lse = jit_attention(options, check_backend(backend), given)
    return finish(out, query.shape[-1], dropout_p), lse


@overload
def flash_dma_attention(
    query: Array,
    key: Array,
    value: Array,
    dt_proj: Array,
    a_coef: Array,
    keep_window_size: int = ...,
    dropout_p: float = ...,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **keywords: Unpack[Keywords],
) -> Array: ...
@overload
def flash_dma_attention(
    query: Array,
    key: Array,
    value: Array,
    dt_proj: Array,
    a_coef: Array,
    keep_window_size: int = ...,
    dropout_p: float = ...,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    *,
    return_lse: Literal[True],
    **keywords: Unpack[Keywords],
) -> tuple[Array, Array]: ...
def flash_dma_attention(
    query: Array,
    key: Array,
    value: Array,
    dt_proj: Array,
    a_coef: Array,
    keep_window_size: int = 2048,
    dropout_p: float = 0.0,
    causal: bool = False,
    softmax_scale: float | None = None,
    *,
    dt_bias: Array | None = None,
    key_valid: Array | None = None,
    starts: Array | None = None,
    kv_used: Array | None = None,
    sink_logit: Array | None = None,
    recent: int = 0,
    sinks: int = 0,
    gap: float | None = None,
    scope: str | None = None,
    bias_form: str = "exp",
    softcap: float = 0.0,
    rng_key: Array | None = None,
    backend: str | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Dynamic mask attention in one call: score(), select() and attention().

    It is differentiable, once, in reverse mode, in query, key, value, dt_proj, a_coef, dt_bias and
    sink_logit.

    Args:
        query, key, value: as in attention().
        dt_proj, a_coef, dt_bias: as in score().
        keep_window_size: number of keys that a query keeps, 1 or more; kv_len or more keeps all of
            them.
        dropout_p, causal, softmax_scale, key_valid, starts, kv_used, sink_logit: as in attention().
        recent, sinks, gap: as in select(), of keep_window_size.
        scope: "causal" or "global", as in select(). None for "causal" if `causal` is set, else
            "global".
        bias_form: "exp": exp(score) is added to the logits; "linear": the score itself; "none":
            nothing, so that dt_proj, a_coef and dt_bias have no gradients.
        softcap, rng_key, backend, deterministic: as in attention().
        return_lse: also return lse.

    Returns:
        out [batch, q_len, q_heads, head_dim] of query's dtype; with return_lse a pair of out and
        lse [batch, q_heads, q_len] float32, in nats.

    Raises:
        TypeError, ValueError, NotImplementedError: as attention().

    Example:
        >>> from jax import random, numpy as jnp
        >>> query = random.normal(random.key(0), (2, 16, 4, 8))
        >>> key, value = random.normal(random.key(1), (2, 2, 16, 2, 8))
        >>> dt_proj, a_coef = random.normal(random.key(2), (2, 16)), jnp.ones(2)
        >>> out = flash_dmattn.jax.flash_dma_attention(
        ...     query, key, value, dt_proj, a_coef, keep_window_size=5, causal=True
        ... )
        >>> out.shape
        (2, 16, 4, 8)

    Source: arXiv:2508.02124.
    """
    named: Given = {
        "query": query,
        "key": key,
        "value": value,
        "dt_proj": dt_proj,
        "a_coef": a_coef,
    }
    named.update(dt_bias=dt_bias, key_valid=key_valid, starts=starts, kv_used=kv_used)
    x = check_arrays({**named, "sink_logit": sink_logit}, tuple(named)[5:] + ("sink_logit",))
    check_flag("causal", causal)
    if scope is None:
        scope = "causal" if causal else "global"
    scope_number = choose("scope", scope, _library.SCOPES)
    if scope == "causal" and not causal:
        raise ValueError("scope: is 'causal', want 'global' if causal is False")
    reason = "with scope 'global'" if causal else "if causal is False"
    no_recent = reason if scope == "global" else None
    rules = check_rules(keep_window_size, recent, sinks, "keep_window_size", no_recent)
    rows, padded = pad({name: x[name] for name in ("query", "key", "value")}, x["dt_proj"])
    kernel_p, rng_state = draw_state(dropout_p, rng_key)
    options: Options = (
        *zip(("window", "recent", "sinks"), rules),
        ("gap", check_gap(gap, no_recent)),
        ("scope", scope_number),
        ("bias_form", choose("bias_form", bias_form, _library.BIAS_FORMS)),
        ("causal", causal),
        ("scale", scale_of(softmax_scale, query.shape[-1])),
        ("softcap", check_number("softcap", softcap)),
        ("dropout", kernel_p),
    )
    given = {"q": rows["query"], "k": rows["key"], "v": rows["value"], "dt_proj": padded}
    given.update(a=x["a_coef"], dt_bias=x["dt_bias"], rng_state=rng_state)
    names = ("key_valid", "starts", "kv_used", "sink_logit")
    given.update({name: x[name] for name in names})
    with_lse = check_flag("return_lse", return_lse)
    static = options, check_flag("deterministic", deterministic), check_backend(backend), with_lse
    out, *lse = jit_fused(*static, given)
    out = finish(out, query.shape[-1], dropout_p)
    return (out, *lse) if with_lse else out
