"""Decoding over a cache of the keys that streams carry."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .. import _library
from .._describe import counted
from ._arguments import (
    check_array,
    check_arrays,
    check_backend,
    check_flag,
    check_int,
    check_number,
    check_rules,
    choose,
    finish,
    pad,
    refusal,
    scale_of,
)
from ._call import Arrays, Operation, call
from ._gradients import OF_SELECTION, Given, Options, like, lse_of, run_whole


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["key", "value", "bias", "score", "position", "seen"],
    meta_fields=["window", "recent", "sinks"],
)
@dataclasses.dataclass(frozen=True)
class KeyCache:
    """The keys that many streams carry: a pytree of arrays whose size does not depend on how many
    tokens have passed. decode() and prefill() return a new one. A program that donates its cache
    (jax.jit(step, donate_argnames="cache")) writes to it in place; others copy it.
    KeyCache.empty() makes one.

    Args:
        key: [sequences, rows, kv_heads, head_dim], where rows = window + recent, and head_dim is
            rounded up to a multiple of 8.
        value: like key.
        bias: [sequences, kv_heads, rows] float32.
        score: [sequences, kv_heads, rows] float32.
        position: [sequences, kv_heads, rows] int32: of each key in its stream; -1 marks an empty
            row.
        seen: [sequences] int32: the number of tokens of each stream so far.
        window, recent, sinks: as in select().

    Raises:
        TypeError: a field that is missing.

    Example:
        >>> cache = flash_dmattn.jax.KeyCache.empty(1, kv_heads=2, head_dim=8, window=4)
        >>> cache.key.shape
        (1, 4, 2, 8)

    Source: docs/algorithm.md, streams.
    """

    key: Array
    value: Array
    bias: Array
    score: Array
    position: Array
    seen: Array
    window: int
    recent: int = 0
    sinks: int = 0

    @classmethod
    def empty(
        cls,
        sequences: int,
        kv_heads: int,
        head_dim: int,
        window: int,
        *,
        recent: int = 0,
        sinks: int = 0,
        dtype: Any = jnp.float32,
    ) -> KeyCache:
        """A cache without keys.

        Args:
            sequences: number of streams.
            kv_heads, head_dim: of key and value in decode().
            window, recent, sinks: as in select().
            dtype: of key and value in decode().

        Raises:
            TypeError: a number is not an int.
            ValueError: a number is out of its range.
        """
        sizes = {"sequences": sequences, "kv_heads": kv_heads, "head_dim": head_dim}
        for name, size in sizes.items():
            if check_int(name, size) < 1:
                raise ValueError(f"{name}: is {size}, want 1 or more")
        window, recent, sinks = check_rules(window, recent, sinks)
        table = (sequences, kv_heads, window + recent)
        rows = (sequences, window + recent, kv_heads, -(-head_dim // 8) * 8)
        return cls(
            jnp.zeros(rows, dtype),
            jnp.zeros(rows, dtype),
            jnp.zeros(table, jnp.float32),
            jnp.full(table, -jnp.inf, jnp.float32),
            jnp.full(table, -1, jnp.int32),
            jnp.zeros(sequences, jnp.int32),
            window,
            recent,
            sinks,
        )


CACHE_FIELDS = {
    "cache.k": "key",
    "cache.v": "value",
    "cache.bias": "bias",
    "cache.table.score": "score",
    "cache.table.position": "position",
    "cache.table.seen": "seen",
}


PUBLIC = {"decode": "decode", "cache_store": "prefill"}  # the functions that write to a cache


def write_cache(
    function: str, options: Options, backend: str | None, given: Given, *results: Any
) -> Arrays:
    """The results of a call that writes to a cache, the arrays of the new cache among them."""
    fields = [name for name in given if name.startswith("cache.")]
    results = (*results, *(like(name, given[name]) for name in fields))
    operation = Operation(
        function,
        options,
        results,
        backend,
        tuple((name, name) for name in fields),
        no_gradient=f"{PUBLIC[function]} has no gradient",
    )
    return call(operation, given)


@functools.partial(jax.jit, static_argnums=(0, 1))
def jit_decode(options: Options, backend: str | None, given: Given) -> Arrays:
    q = given["q"]
    return write_cache("decode", options, backend, given, like("out", q), lse_of(q))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def jit_prefill(
    options: Options, rules: Options, backend: str | None, given: Given, cache: Given
) -> tuple[Array, Arrays]:
    names = ("score", *OF_SELECTION)
    found = run_whole((*options, *rules), backend, names, given)
    stored = {"k": given["k"], "v": given["v"], **{name: found[name] for name in names}, **cache}
    scope = ("scope", _library.SCOPES["causal"])  # of the selection
    store_options = (*rules, scope, ("bias_form", dict(options)["bias_form"]))
    return found["out"], write_cache("cache_store", store_options, None, stored)


def check_cache(cache: Any, array: Array) -> Given:
    """The arrays of a cache by field. `array` is the key that enters it."""
    if not isinstance(cache, KeyCache):
        raise refusal("cache", cache, "a KeyCache")
    check_rules(cache.window, cache.recent, cache.sinks, "cache.window")
    head_dim = -(-array.shape[-1] // 8) * 8
    if cache.key.shape[-1] != head_dim:
        count, wanted = counted(cache.key.shape[-1], "element"), "rounded up to a multiple of 8"
        raise ValueError(f"cache.key: axis 3 has {count}, want {head_dim}: head_dim, {wanted}")
    return {field: getattr(cache, name) for field, name in CACHE_FIELDS.items()}


def cache_after(found: Arrays, cache: KeyCache) -> KeyCache:
    """The cache of the arrays among the results of a call."""
    return dataclasses.replace(
        cache, **{name: found[field] for field, name in CACHE_FIELDS.items()}
    )


def rules_of(cache: KeyCache) -> Options:
    return tuple((name, getattr(cache, name)) for name in ("window", "recent", "sinks"))


def counts(name: str, count: Any, tokens: Array) -> Array | None:
    """A number of `tokens` for each stream, from an array or from one number for all."""
    if count is None or isinstance(count, (jax.Array, np.ndarray)):
        return None if count is None else check_array(name, count)
    batch, most = tokens.shape[:2]
    if not 0 <= check_int(name, count) <= most:
        raise ValueError(f"{name}: is {count}, want 0 to {most}")
    return jnp.full((batch,), count, jnp.int32)


def decode(
    query: Array,
    key: Array,
    value: Array,
    cache: KeyCache,
    *,
    dt_proj: Array | None = None,
    a_coef: Array | None = None,
    dt_bias: Array | None = None,
    score: Array | None = None,
    index: Array | None = None,
    n_tokens: Array | int | None = None,
    commit: Array | int | None = None,
    sink_logit: Array | None = None,
    bias_form: str = "exp",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    batch_invariant: bool = False,
    backend: str | None = None,
    return_lse: bool = False,
) -> tuple[Any, ...]:
    """Attention of new tokens over a cache and each other; then the tokens enter the cache.

    A query attends to the same keys as in the whole sequence. The time does not depend on how many
    tokens have passed. It has no gradient.

    Args:
        query: [batch, q_len, q_heads, head_dim], q_len at most new_len: query i stands beside token
            i + new_len - q_len.
        key: [batch, new_len, kv_heads, head_dim], new_len at most 64.
        value: [batch, new_len, kv_heads, head_dim].
        cache: a KeyCache of query's dtype.
        dt_proj: as in score(), with a_coef; or else `score` is given.
        a_coef: as in score().
        dt_bias: as in score(); None for 0.
        score: [batch, kv_heads, new_len] float32: the score of each new token.
        index: optional [batch] int32: the sequence of the cache for each stream; -1: none, and out
            is 0; None for 0, 1, ...
        n_tokens: [batch] int32 or an int: the first n are tokens, the rest is not read, and its out
            is 0; None for new_len.
        commit: [batch] int32 or an int: the first n enter the cache, the others leave no trace;
            None for all tokens.
        sink_logit: optional [q_heads] float32, as in attention().
        bias_form: as in flash_dma_attention(): the same in every call on a cache.
        softmax_scale, softcap: as in attention().
        batch_invariant: a stream has the same bits in a batch of any size on GPUs of compute
            capability 9.0 too.
        backend: as in score().
        return_lse: also return lse.

    Returns:
        out [batch, q_len, q_heads, head_dim] and the new KeyCache; with return_lse out, lse
        [batch, q_heads, q_len] float32, and the cache.

    Raises:
        TypeError, ValueError, NotImplementedError: as attention(); a ValueError also for weights
            beside a score, and for an n_tokens or commit out of its range as an int. When a program
            runs on the CPU, jax.errors.JaxRuntimeError for one in an array, or for an index.

    Example:
        >>> from jax import random, numpy as jnp
        >>> cache = flash_dmattn.jax.KeyCache.empty(1, kv_heads=2, head_dim=8, window=4)
        >>> query = random.normal(random.key(0), (1, 3, 4, 8))
        >>> key, value = random.normal(random.key(1), (2, 1, 3, 2, 8))
        >>> scores = random.normal(random.key(2), (1, 2, 3))
        >>> out, cache = flash_dmattn.jax.decode(query, key, value, cache, score=scores, commit=2)
        >>> out.shape, cache.seen.tolist()
        ((1, 3, 4, 8), [2])

    Source: docs/algorithm.md, streams.
    """
    named: Given = {
        "query": query,
        "key": key,
        "value": value,
        "dt_proj": dt_proj,
        "a_coef": a_coef,
    }
    if score is None:
        for name in ("dt_proj", "a_coef"):
            if named[name] is None:
                raise ValueError(f"{name}: is None, want a jax.Array, or else a score")
    named.update(dt_bias=dt_bias, score=score, index=index, sink_logit=sink_logit)
    x = check_arrays(named, tuple(named)[3:])
    arrays = check_cache(cache, x["key"])
    rows, padded = pad({name: x[name] for name in ("query", "key", "value")}, x["dt_proj"])
    options: Options = (
        *rules_of(cache),
        ("bias_form", choose("bias_form", bias_form, _library.BIAS_FORMS)),
        ("scale", scale_of(softmax_scale, query.shape[-1])),
        ("softcap", check_number("softcap", softcap)),
        ("batch_invariant", check_flag("batch_invariant", batch_invariant)),
    )
    given = {"q": rows["query"], "k": rows["key"], "v": rows["value"], "dt_proj": padded}
    given.update(a=x["a_coef"], dt_bias=x["dt_bias"], score=x["score"], index=x["index"])
    given.update(n_tokens=counts("n_tokens", n_tokens, x["key"]))
    given.update(commit=counts("commit", commit, x["key"]), sink_logit=x["sink_logit"], **arrays)
    check_flag("return_lse", return_lse)
    found = jit_decode(options, check_backend(backend), given)
    out, after = finish(found["out"], query.shape[-1]), cache_after(found, cache)
    return (out, found["lse"], after) if return_lse else (out, after)


def prefill(
    query: Array,
    key: Array,
    value: Array,
    cache: KeyCache,
    *,
    dt_proj: Array,
    a_coef: Array,
    dt_bias: Array | None = None,
    key_valid: Array | None = None,
    sink_logit: Array | None = None,
    bias_form: str = "exp",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    backend: str | None = None,
) -> tuple[Array, KeyCache]:
    """Causal attention of a prompt of any length, whose keys then replace the cache's.

    decode() goes on as if the cache had seen the prompt token by token. It has no gradient.

    Args:
        query: [sequences, len, q_heads, head_dim].
        key, value: [sequences, len, kv_heads, head_dim].
        cache: a KeyCache of query's dtype. Attention has its window, recent and sinks.
        dt_proj, a_coef, dt_bias: as in score().
        key_valid: optional [sequences, len] bool or uint8, false for padding, which is never kept.
        sink_logit, softmax_scale, softcap: as in attention().
        bias_form: as in flash_dma_attention(): the same in every call on a cache.
        backend: as in score().

    Returns:
        out [sequences, len, q_heads, head_dim] and the new KeyCache.

    Raises:
        TypeError, ValueError, NotImplementedError: as attention().

    Example:
        >>> from jax import random, numpy as jnp
        >>> query, key = random.normal(random.key(0), (2, 1, 30, 2, 8))
        >>> weights = {"dt_proj": jnp.ones((2, 16)) / 9, "a_coef": jnp.ones(2)}
        >>> cache = flash_dmattn.jax.KeyCache.empty(1, kv_heads=2, head_dim=8, window=4)
        >>> out, cache = flash_dmattn.jax.prefill(query, key, key, cache, **weights)
        >>> out.shape, cache.seen.tolist()
        ((1, 30, 2, 8), [30])

    Source: docs/algorithm.md, streams.
    """
    named: Given = {
        "query": query,
        "key": key,
        "value": value,
        "dt_proj": dt_proj,
        "a_coef": a_coef,
    }
    named.update(dt_bias=dt_bias, key_valid=key_valid, sink_logit=sink_logit)
    x = check_arrays(named, tuple(named)[5:])
    arrays = check_cache(cache, x["key"])
    if query.shape[0] != cache.key.shape[0]:
        count, wanted = (
            counted(query.shape[0], "element"),
            "want one for each sequence of the cache",
        )
        raise ValueError(f"query: axis 0 has {count}, {wanted}, {cache.key.shape[0]}")
    rows, padded = pad({name: x[name] for name in ("query", "key", "value")}, x["dt_proj"])
    options: Options = (
        ("bias_form", choose("bias_form", bias_form, _library.BIAS_FORMS)),
        ("causal", True),
        ("scale", scale_of(softmax_scale, query.shape[-1])),
        ("softcap", check_number("softcap", softcap)),
    )
    given = {"q": rows["query"], "k": rows["key"], "v": rows["value"], "dt_proj": padded}
    given.update(a=x["a_coef"], dt_bias=x["dt_bias"], key_valid=x["key_valid"])
    given.update(sink_logit=x["sink_logit"])
    out, found = jit_prefill(options, rules_of(cache), check_backend(backend), given, arrays)
    return finish(out, query.shape[-1]), cache_after(found, cache)
