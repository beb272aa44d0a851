"""The arguments of functions before a call: what the C library does not check, and what it does not
do itself."""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .. import _describe

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


def refusal(name: str, value: Any, wanted: str) -> TypeError:
    if isinstance(value, jax.core.Tracer):
        wanted += ", which has to be known when the program is traced"
        return TypeError(f"{name}: is a traced array, want {wanted}")
    return _describe.refusal(name, value, wanted)


def check_int(name: str, value: Any) -> int:
    """The argument as an int.

    Raises:
        TypeError: it is none, or is an array of a traced program, whose numbers are not known.
        ValueError: it does not fit int64.
    """
    try:
        if isinstance(value, (bool, np.bool_, jax.core.Tracer)):
            raise TypeError
        number = operator.index(value)
    except (TypeError, ValueError):  # ValueError: an array of several elements
        raise refusal(name, value, "an int") from None
    return _describe.check_int64(name, number)


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
    """Add channels of zeros to rows [batch, len, heads, head_dim] and dt_proj up to a multiple of
    8, which kernels need. The call refuses arrays that do not fit each other."""
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
