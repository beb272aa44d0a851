"""The functions of flash_dmattn.jax. Names and defaults are those of the functions for PyTorch."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any, Dict, Tuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _describe, _library
from ._call import Arrays, Operation, call

Array = jax.Array
Options = Tuple[Tuple[str, Any], ...]
Given = Dict[str, Any]  # arrays by field, None for those that are not given

TOKENS_MAX = 64  # new tokens in one decode()
ROWS = "batch, {}, {}, head_dim"
AXES = {
    "query": ROWS.format("q_len", "q_heads"),
    "key": ROWS.format("kv_len", "kv_heads"),
    "value": ROWS.format("kv_len", "kv_heads"),
    "dt_proj": "kv_heads, kv_heads * head_dim",
    "a_coef": "kv_heads",
    "dt_bias": "kv_heads",
    "score": "batch, kv_heads, kv_len",
    "bias": "batch, kv_heads, kv_len",
    "key_valid": "batch, kv_len",
    "starts": "sequences + 1",
    "kv_used": "batch",
    "sink_logit": "q_heads",
    "attn_mask": "batch or 1, q_heads or kv_heads or 1, q_len or 1, kv_len or 1",
    "index": "batch",
    "n_tokens": "batch",
    "commit": "batch",
}
AXES["attn_bias"] = AXES["attn_mask"]
DTYPES = {
    **dict.fromkeys(("key_valid", "attn_mask"), ("bool", "uint8")),
    **dict.fromkeys(("starts", "kv_used", "index", "n_tokens", "commit"), ("int32",)),
    **dict.fromkeys(("score", "bias", "sink_logit"), ("float32", "float64")),
}
FLOATS = ("float32", "float16", "bfloat16", "float64")
DROPS_ALL = 1 - 2**-17  # the least dropout_p that is rounded to 1, as a multiple of 2^-16


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["expiry", "slot"],
    meta_fields=["window", "scope", "recent", "sinks", "gap"],
)
@dataclasses.dataclass(frozen=True)
class Selection:
    """The keys that queries keep: the result of select(), and an argument of attention(). It is a
    pytree of its arrays `expiry` and `slot`; the other fields are static.

    Attributes:
        expiry: [batch, kv_heads, kv_len] int32: the first position at which a key is no longer
            kept; j itself for a key j that is never kept.
        slot: [batch, kv_heads, kv_len] int32: the number, below window + recent, under which a kept
            key is stored while it is live; -1 for a key that is never kept.
        window, scope, recent, sinks, gap: as in select().
    """

    expiry: Array
    slot: Array
    window: int
    scope: str
    recent: int = 0
    sinks: int = 0
    gap: float | None = None


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

    Attributes:
        key: [sequences, rows, kv_heads, head_dim], where rows = window + recent, and head_dim is
            rounded up to a multiple of 8.
        value: like key.
        bias: [sequences, kv_heads, rows] float32.
        score: [sequences, kv_heads, rows] float32.
        position: [sequences, kv_heads, rows] int32: of each key in its stream; -1 marks an empty
            row.
        seen: [sequences] int32: the number of tokens of each stream so far.
        window, recent, sinks: as in select().
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


# ---- checks of arguments; the C library checks what is not checked here ----


def refusal(name: str, value: Any, wanted: str) -> TypeError:
    if isinstance(value, jax.core.Tracer):
        wanted += ", which has to be known when the program is traced"
        return TypeError(f"{name}: is a traced array, want {wanted}")
    return _describe.refusal(name, value, wanted)


def check_int(name: str, value: Any) -> int:
    """The argument as an int.

    Raises:
        TypeError: it is none, or is an array of a traced program, whose numbers are not known.
        ValueError: it is too large.
    """
    try:
        if isinstance(value, (bool, np.bool_, jax.core.Tracer)):
            raise TypeError
        number = operator.index(value)
    except (TypeError, ValueError):  # ValueError: an array of several elements
        raise refusal(name, value, "an int") from None
    if number >= 1 << 63:
        raise ValueError(f"{name}: is {number}, want less than 2**63")
    return number


def check_number(name: str, value: Any, wanted: str = "a number") -> float:
    """The argument as a float.

    Raises:
        TypeError: it is not a number, or is an array of a traced program.
    """
    try:
        if isinstance(value, (str, bytes, jax.core.Tracer)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):  # ValueError: an array of several elements
        raise refusal(name, value, wanted) from None


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise refusal(name, value, "a bool")
    return bool(value)


def check_rules(
    window: Any, recent: Any, sinks: Any, name: str = "window", no_recent: str | None = None
) -> tuple[int, int, int]:
    """How many keys a selection keeps, as ints. `no_recent` is the reason if recent has to be 0.

    Raises:
        TypeError: one is not an int.
        ValueError: one is out of its range.
    """
    window, recent = check_int(name, window), check_int("recent", recent)
    sinks = check_int("sinks", sinks)
    if window < 1:
        raise ValueError(f"{name}: is {window}, want 1 or more; kv_len or more keeps all keys")
    if recent < 0 or (recent > 0 and no_recent):
        raise ValueError(f"recent: is {recent}, want 0 {no_recent or 'or more'}")
    if not 0 <= sinks <= window:
        raise ValueError(f"sinks: is {sinks}, want 0 to {name}, {window}")
    return window, recent, sinks


def check_gap(gap: Any, no_gap: str | None = None) -> float:
    """The gap as fdma.h has it: 0 means none."""
    if gap is None:
        return 0.0
    number = check_number("gap", gap, "a number or None")
    if not 0 < number < math.inf:
        raise ValueError(f"gap: is {gap:g}, want a finite number above 0, or None for none")
    if no_gap is not None:
        raise ValueError(f"gap: is {gap:g}, want None {no_gap}")
    return number


def choose(name: str, value: Any, choices: dict[str, int]) -> int:
    if not isinstance(value, str) or value not in choices:
        found = repr(value) if isinstance(value, str) else _describe.describe(value)
        raise ValueError(f"{name}: is {found}, want one of {', '.join(map(repr, choices))}")
    return choices[value]


def check_backend(backend: Any) -> str | None:
    if backend is not None and not isinstance(backend, str):
        raise refusal("backend", backend, "a str or None")
    return backend


def check_array(name: str, value: Any, shown: str | None = None) -> Array:
    """The argument as an array of JAX.

    Raises:
        TypeError: it is none.
        ValueError: it has another rank than its name implies.
        NotImplementedError: no kernel takes its dtype.
    """
    shown = shown or name
    if not isinstance(value, (jax.Array, np.ndarray)):
        raise refusal(shown, value, "a jax.Array")
    array = jnp.asarray(value)
    axes = AXES[name]
    rank = axes.count(",") + 1
    if array.ndim != rank:
        raise ValueError(f"{shown}: rank is {array.ndim}, want {rank}; {shown} is [{axes}]")
    dtypes = DTYPES.get(name, FLOATS)
    if array.dtype.name not in dtypes:
        wanted = " or ".join(dtypes) if name in DTYPES else ", ".join(dtypes)
        raise NotImplementedError(f"{shown}: dtype is {array.dtype.name}, supported: {wanted}")
    return array


def check_arrays(arguments: dict[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """The arguments as arrays; those that are optional may be None."""
    return {
        name: None if x is None and name in optional else check_array(name, x)
        for name, x in arguments.items()
    }


def check_selection(selection: Any) -> None:
    if selection is not None and not isinstance(selection, Selection):
        raise refusal("selection", selection, "select()'s result")


def scale_of(softmax_scale: Any, head_dim: int) -> float:
    """softmax_scale as fdma.h has it; head_dim is the one before padding."""
    if softmax_scale is None:
        return 0.0 if head_dim % 8 == 0 else head_dim**-0.5
    number = check_number("softmax_scale", softmax_scale, "a number or None")
    if not 0 < number < math.inf:
        raise ValueError(
            f"softmax_scale: is {number:g}, want a finite number above 0, or None for the default"
        )
    return number


def draw_state(dropout_p: Any, rng_key: Any) -> tuple[float, Array | None]:
    """dropout_p for the kernels, and the seed and the offset, drawn from `rng_key`."""
    number = check_number("dropout_p", dropout_p, "a number from 0 to 1")
    if not 0 <= number <= 1:
        raise ValueError(f"dropout_p: is {number:g}, want a number from 0 to 1")
    if number == 0 or number >= DROPS_ALL:
        return 0.0, None
    if rng_key is None:
        raise ValueError("rng_key: is None, want a key of jax.random with a dropout_p above 0")
    try:
        return number, jax.random.bits(rng_key, (4,), jnp.uint32)
    except (TypeError, ValueError):
        raise refusal("rng_key", rng_key, "a key of jax.random") from None


def finish(out: Array, head_dim: int, dropout_p: Any = 0.0) -> Array:
    """out without the channels that pad() has added, and 0 if all probabilities are dropped."""
    out = out if out.shape[-1] == head_dim else out[..., :head_dim]
    return out if dropout_p < DROPS_ALL else jnp.zeros_like(out)


def pad(rows: dict[str, Array], dt_proj: Array | None = None) -> tuple[dict[str, Array], Any]:
    """Add channels of zeros to rows [batch, len, heads, head_dim] and dt_proj up to a multiple of 8,
    which kernels need. The call refuses arrays that do not fit each other."""
    *_, kv_heads, head_dim = rows["value"].shape
    added = -head_dim % 8
    if added == 0 or any(x.shape[-1] != head_dim for x in rows.values()):
        return rows, dt_proj
    if dt_proj is not None and dt_proj.shape[1] == kv_heads * head_dim:
        split = dt_proj.reshape(-1, kv_heads, head_dim)
        split = jnp.pad(split, ((0, 0), (0, 0), (0, added)))
        dt_proj = split.reshape(dt_proj.shape[0], -1)
    widths = ((0, 0),) * 3 + ((0, added),)
    return {name: jnp.pad(x, widths) for name, x in rows.items()}, dt_proj


def wide(array: Array) -> str:
    """The dtype of scores, biases and lse beside rows of this array's dtype."""
    return "float64" if array.dtype == jnp.float64 else "float32"


def like(field: str, array: Array, dtype: str | None = None) -> tuple[str, Any, str]:
    """A result of an operation with the shape of an array."""
    return field, array.shape, dtype or array.dtype.name


def lse_of(q: Array) -> tuple[str, Any, str]:
    batch, q_len, q_heads, _ = q.shape
    return "lse", (batch, q_heads, q_len), wide(q)


def of_keys(v: Array) -> tuple[int, int, int]:
    batch, kv_len, kv_heads, _ = v.shape
    return batch, kv_heads, kv_len


def bare(tree: Any) -> Any:
    """The values of what a forward rule of custom_vjp is given with symbolic_zeros=True."""
    return jax.tree.map(lambda x: x.value, tree, is_leaf=lambda x: hasattr(x, "perturbed"))


def is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


def or_none(cotangent: Any) -> Array | None:
    return None if is_zero(cotangent) else cotangent


# ---- score ----


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run_score(form: str, backend: str | None, given: Given) -> tuple[Array, Array | None]:
    v = given["v"]
    names = ("score",) if form == "none" else ("score", "bias")
    results = tuple((name, of_keys(v), wide(v)) for name in names)
    options = (("bias_form", _library.BIAS_FORMS[form]),)
    found = call(Operation("score", options, results, backend), given)
    return found["score"], found.get("bias")


def run_score_forward(form: str, backend: str | None, given: Given) -> Any:
    given = bare(given)
    return run_score(form, backend, given), given


def run_score_backward(form: str, backend: str | None, given: Given, cotangents: Any) -> Any:
    """The sum of the gradients from both results. The linear bias is the score itself."""
    backend = _library.backend_for(backend, "score_backward")
    dscore, dbias = cotangents
    pairs = ((dscore, "linear"), *([] if form == "none" else [(dbias, form)]))
    total: Given = {name: None for name in given}
    learned = [name for name in ("dt_proj", "a", "dt_bias") if given[name] is not None]
    for cotangent, used in pairs:
        if is_zero(cotangent):
            continue
        results = tuple(like(f"d{name}", given[name]) for name in ("v", *learned))
        operation = Operation(
            "score_backward",
            (("bias_form", _library.BIAS_FORMS[used]),),
            results,
            backend,
            reused=(("dv", "zeros"),),
        )
        inputs = {"dbias": cotangent, **given, "zeros": jnp.zeros_like(given["v"])}
        found = call(operation, inputs)
        for name in ("v", *learned):
            before = total[name]
            total[name] = found[f"d{name}"] if before is None else before + found[f"d{name}"]
    return (total,)


run_score.defvjp(run_score_forward, run_score_backward, symbolic_zeros=True)
jit_score = jax.jit(run_score, static_argnums=(0, 1))


# ---- attention ----

OF_SELECTION = ("selection.expiry", "selection.slot")
GRADIENTS = ("q", "k", "v", "bias", "sink_logit", "attn_bias")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run_attention(options: Options, backend: str | None, given: Given) -> tuple[Array, Array]:
    q = given["q"]
    found = call(
        Operation("forward", forward_only(options), (like("out", q), lse_of(q)), backend), given
    )
    return found["out"], found["lse"]


def forward_only(options: Options) -> Options:
    return tuple(pair for pair in options if pair[0] != "deterministic")


def run_attention_forward(options: Options, backend: str | None, given: Given) -> Any:
    wanted = [name for name in GRADIENTS if getattr(given[name], "perturbed", False)]
    given = bare(given)
    out, lse = run_attention(options, backend, given)
    return (out, lse), (given, out, lse, dict.fromkeys(wanted))


def run_attention_backward(
    options: Options, backend: str | None, kept: Any, cotangents: Any
) -> Any:
    given, out, lse, wanted = kept
    dout, dlse = map(or_none, cotangents)
    found: Arrays = {}
    if not (dout is None and dlse is None):
        names = ["q", "k", "v", *(name for name in GRADIENTS[3:] if name in wanted)]
        operation = Operation(
            "backward",
            options,
            tuple(like(f"d{name}", given[name]) for name in names),
            _library.backend_for(backend, "backward"),
        )
        dout = jnp.zeros_like(out) if dout is None else dout
        found = call(operation, {"dout": dout, "dlse": dlse, "out": out, "lse": lse, **given})
    return ({name: found.get(f"d{name}") for name in given},)


run_attention.defvjp(run_attention_forward, run_attention_backward, symbolic_zeros=True)
jit_attention = jax.jit(run_attention, static_argnums=(0, 1))


# ---- score, select and attend in one call ----

KEPT = ("bias", *OF_SELECTION)  # results that the gradients need, beside out and lse


def run_whole(
    options: Options, backend: str | None, names: tuple[str, ...], given: Given
) -> Arrays:
    """fdma_attention() with the results `names` beside out."""
    q, v = given["q"], given["v"]
    results = {
        "lse": lse_of(q),
        **{name: (name, of_keys(v), wide(v)) for name in ("score", "bias")},
    }
    results.update({name: (name, of_keys(v), "int32") for name in OF_SELECTION})
    wanted = (like("out", q), *(results[name] for name in names))
    operation = Operation("attention", options, wanted, backend, window="keep_window_size")
    return call(operation, given)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def run_fused(
    options: Options, deterministic: bool, backend: str | None, with_lse: bool, given: Given
) -> tuple[Array, ...]:
    names = ("lse",) if with_lse else ()
    found = run_whole(options, backend, names, given)
    return tuple(found[name] for name in ("out", *names))


def run_fused_forward(
    options: Options, deterministic: bool, backend: str | None, with_lse: bool, given: Given
) -> Any:
    given = bare(given)
    has_bias = dict(options)["bias_form"] != _library.BIAS_FORMS["none"]
    names = ("lse", *(KEPT if has_bias else OF_SELECTION))
    found = run_whole(options, backend, names, given)
    return tuple(found[name] for name in ("out", *("lse",) * with_lse)), (given, found)


def run_fused_backward(
    options: Options,
    deterministic: bool,
    backend: str | None,
    with_lse: bool,
    kept: Any,
    cotangents: Any,
) -> Any:
    given, results = kept
    dout, dlse = map(or_none, (*cotangents, *(None,) * (not with_lse)))
    found: Arrays = {}
    if not (dout is None and dlse is None):
        names = ["q", "k", "v", *(("dt_proj", "a", "dt_bias") if "bias" in results else ())]
        names = [name for name in (*names, "sink_logit") if given[name] is not None]
        operation = Operation(
            "attention_backward",
            (*options, ("deterministic", deterministic)),
            tuple(like(f"d{name}", given[name]) for name in names),
            _library.backend_for(backend, "backward", "score_backward"),
        )
        dout = jnp.zeros_like(results["out"]) if dout is None else dout
        found = call(operation, {"dout": dout, "dlse": dlse, **results, **given})
    return ({name: found.get(f"d{name}") for name in given},)


run_fused.defvjp(run_fused_forward, run_fused_backward, symbolic_zeros=True)
jit_fused = jax.jit(run_fused, static_argnums=(0, 1, 2, 3))


# ---- what has no gradients ----


@functools.partial(jax.jit, static_argnums=(0, 1))
def jit_select(options: Options, backend: str | None, given: Given) -> tuple[Array, Array]:
    results = tuple(like(name, given["score"], "int32") for name in OF_SELECTION)
    found = call(Operation("select", options, results, backend), given)
    return found["selection.expiry"], found["selection.slot"]


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


# ---- the public functions ----


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

    Source: arXiv:2508.02124, section 3.
    """
    named = {"value": value, "dt_proj": dt_proj, "a_coef": a_coef, "dt_bias": dt_bias}
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

    Source: arXiv:2508.02124, section 3.
    """
    named = {"score": score, "key_valid": key_valid, "starts": starts, "kv_used": kv_used}
    given = check_arrays(named, ("key_valid", "starts", "kv_used"))
    scope_number = choose("scope", scope, _library.SCOPES)
    no_recent = "with scope 'global'" if scope == "global" else None
    rules = check_rules(window, recent, sinks, no_recent=no_recent)
    options = (*zip(("window", "recent", "sinks"), rules), ("scope", scope_number))
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

    Source: arXiv:2205.14135; arXiv:2508.02124.
    """
    named = {"query": query, "key": key, "value": value, "bias": bias, "key_valid": key_valid}
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
        >>> from jax import random
        >>> query = random.normal(random.key(0), (2, 16, 4, 8))
        >>> key, value = random.normal(random.key(1), (2, 2, 16, 2, 8))
        >>> dt_proj, a_coef = random.normal(random.key(2), (2, 16)), jax.numpy.ones(2)
        >>> out = flash_dmattn.jax.flash_dma_attention(
        ...     query, key, value, dt_proj, a_coef, keep_window_size=5, causal=True
        ... )
        >>> out.shape
        (2, 16, 4, 8)

    Source: arXiv:2508.02124.
    """
    named = {"query": query, "key": key, "value": value, "dt_proj": dt_proj, "a_coef": a_coef}
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


def check_cache(cache: Any, array: Array) -> Given:
    """The arrays of a cache by field. `array` is the key that enters it."""
    if not isinstance(cache, KeyCache):
        raise refusal("cache", cache, "a KeyCache")
    check_rules(cache.window, cache.recent, cache.sinks, "cache.window")
    head_dim = -(-array.shape[-1] // 8) * 8
    if cache.key.shape[-1] != head_dim:
        raise ValueError(
            f"cache.key: axis 3 has {cache.key.shape[-1]} elements, want {head_dim}: head_dim, "
            "rounded up to a multiple of 8"
        )
    return {field: getattr(cache, name) for field, name in CACHE_FIELDS.items()}


def cache_after(found: Arrays, cache: KeyCache) -> KeyCache:
    """The cache of the arrays among the results of a call."""
    return dataclasses.replace(
        cache, **{name: found[field] for field, name in CACHE_FIELDS.items()}
    )


def rules_of(cache: KeyCache) -> Options:
    return tuple((name, getattr(cache, name)) for name in ("window", "recent", "sinks"))


def counts(name: str, count: Any, batch: int) -> Array | None:
    """A number of tokens for each stream, from one for all or an array."""
    if count is None or isinstance(count, (jax.Array, np.ndarray)):
        return None if count is None else check_array(name, count)
    return jnp.full((batch,), check_int(name, count), jnp.int32)


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
) -> tuple[Array, ...]:
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
        TypeError, ValueError, NotImplementedError: as attention(). When a program runs on the CPU,
            jax.errors.JaxRuntimeError for an index, n_tokens or commit out of its range.

    Example:
        >>> from jax import random
        >>> cache = flash_dmattn.jax.KeyCache.empty(1, kv_heads=2, head_dim=8, window=4)
        >>> query = random.normal(random.key(0), (1, 3, 4, 8))
        >>> key, value = random.normal(random.key(1), (2, 1, 3, 2, 8))
        >>> scores = random.normal(random.key(2), (1, 2, 3))
        >>> out, cache = flash_dmattn.jax.decode(query, key, value, cache, score=scores, commit=2)
        >>> out.shape, cache.seen.tolist()
        ((1, 3, 4, 8), [2])

    Source: docs/algorithm.md, streams.
    """
    named = {"query": query, "key": key, "value": value, "dt_proj": dt_proj, "a_coef": a_coef}
    if score is None:
        for name in ("dt_proj", "a_coef"):
            if named[name] is None:
                raise ValueError(f"{name}: is None, want a jax.Array, or else a score")
    named.update(dt_bias=dt_bias, score=score, index=index, sink_logit=sink_logit)
    x = check_arrays(named, tuple(named)[3:])
    arrays = check_cache(cache, x["key"])
    rows, padded = pad({name: x[name] for name in ("query", "key", "value")}, x["dt_proj"])
    batch = query.shape[0]
    options: Options = (
        *rules_of(cache),
        ("bias_form", choose("bias_form", bias_form, _library.BIAS_FORMS)),
        ("scale", scale_of(softmax_scale, query.shape[-1])),
        ("softcap", check_number("softcap", softcap)),
        ("batch_invariant", check_flag("batch_invariant", batch_invariant)),
    )
    given = {"q": rows["query"], "k": rows["key"], "v": rows["value"], "dt_proj": padded}
    given.update(a=x["a_coef"], dt_bias=x["dt_bias"], score=x["score"], index=x["index"])
    given.update(n_tokens=counts("n_tokens", n_tokens, batch))
    given.update(commit=counts("commit", commit, batch), sink_logit=x["sink_logit"], **arrays)
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
    """Causal attention of a prompt of any length, whose keys then replace those of the cache.

    decode() goes on as if the cache had seen the prompt token by token. It has no gradient.

    Args:
        query: [sequences, len, q_heads, head_dim].
        key, value: [sequences, len, kv_heads, head_dim].
        cache: a KeyCache of query's dtype. Its window, recent and sinks are those of attention.
        dt_proj, a_coef, dt_bias: as in score().
        key_valid: optional [sequences, len] bool or uint8, false for padding, which is never kept.
        sink_logit, softmax_scale, softcap: as in attention().
        bias_form: as in flash_dma_attention(): the same in every call on a cache.
        backend: as in score().

    Returns:
        out [sequences, len, q_heads, head_dim] and the new KeyCache.

    Raises:
        TypeError, ValueError, NotImplementedError: as attention().

    Source: docs/algorithm.md, streams.
    """
    named = {"query": query, "key": key, "value": value, "dt_proj": dt_proj, "a_coef": a_coef}
    named.update(dt_bias=dt_bias, key_valid=key_valid, sink_logit=sink_logit)
    x = check_arrays(named, tuple(named)[5:])
    arrays = check_cache(cache, x["key"])
    if query.shape[0] != cache.key.shape[0]:
        raise ValueError(
            f"query: axis 0 has {query.shape[0]} elements, want one for each sequence of the cache, "
            f"{cache.key.shape[0]}"
        )
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
