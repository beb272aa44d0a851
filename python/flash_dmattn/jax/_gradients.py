"""The operations that have gradients, each with its backward operation.

Their arguments are dicts of arrays by field, None for those that are not given.
"""

from __future__ import annotations

import functools
from typing import Any, Dict, Tuple

import jax
import jax.numpy as jnp
from jax import Array

from .. import _library
from ._call import Arrays, Operation, call

Options = Tuple[Tuple[str, Any], ...]
Given = Dict[str, Any]


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
