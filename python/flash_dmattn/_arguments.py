"""What the operators' arguments and results are called, and what shapes and dtypes they have.

Everything that depends on an argument's name is decided here: the checks of shapes and of the rules
of a selection, the shapes and dtypes of results (and with them the fake kernels), the field of the
C struct that an argument goes to, and the name that an error message gives it.

A tensor whose name is "d" and the name of another tensor is that tensor's gradient.
"""

from __future__ import annotations

import math
import operator
from typing import Any, Dict, Mapping, Optional

import torch

from . import _library, _types

MaybeTensor = Optional[torch.Tensor]
Sizes = Dict[str, Any]  # of dimensions: int, or torch.SymInt while a graph is traced
Options = Mapping[str, Any]

# The dimensions of each tensor. "*" is a product. kv_len counts the keys of a call, all_len the
# carried ones too.
QUERY_SHAPE = ("batch", "q_len", "q_heads", "head_dim")
KEY_SHAPE = ("batch", "kv_len", "kv_heads", "head_dim")
SCORE_SHAPE = ("batch", "kv_heads", "kv_len")
TABLE_SHAPE = ("batch", "kv_heads", "rows")
CACHE_SHAPE = ("sequences", "rows", "kv_heads", "head_dim")
PAGED_SHAPE = ("pages", "page_len", "kv_heads", "head_dim")  # instead, with a page table
CACHE_TABLE_SHAPE = ("sequences", "kv_heads", "rows")
LSE_SHAPE = ("batch", "q_heads", "q_len")
# Axes of one of several lengths; those of length 1 are broadcast.
PAIR_SHAPE = ("batch or 1", "q_heads or kv_heads or 1", "q_len or 1", "kv_len or 1")
SHAPES: dict[str, tuple[str, ...]] = {
    "query": QUERY_SHAPE,
    "key": KEY_SHAPE,
    "value": KEY_SHAPE,
    "dt_proj": ("kv_heads", "kv_heads * head_dim"),
    "a_coef": ("kv_heads",),
    "dt_bias": ("kv_heads",),
    "key_valid": ("batch", "kv_len"),
    "starts": ("sequences + 1",),
    "kv_used": ("batch",),
    "sink_logit": ("q_heads",),
    "rng_state": ("seed and offset",),
    "attn_mask": PAIR_SHAPE,
    "attn_bias": PAIR_SHAPE,
    "mask_lists": ("bytes",),
    "score": SCORE_SHAPE,
    "bias": SCORE_SHAPE,
    "expiry": SCORE_SHAPE,
    "slot": SCORE_SHAPE,
    **dict.fromkeys(("out", "out_a", "out_b"), QUERY_SHAPE),
    **dict.fromkeys(("lse", "lse_a", "lse_b"), LSE_SHAPE),
    "probability": (*LSE_SHAPE, "kv_len"),
    **dict.fromkeys(("expiry_all", "slot_all"), ("batch", "kv_heads", "all_len")),
    **dict.fromkeys(("index", "n_tokens", "commit", "seen_in"), ("batch",)),
    **dict.fromkeys(("copy_from", "copy_to"), ("batch",)),
    **dict.fromkeys(("score_in", "position_in"), TABLE_SHAPE),
    **dict.fromkeys(("key_carried", "value_carried"), ("batch", *CACHE_SHAPE[1:])),
    "bias_carried": TABLE_SHAPE,
    **dict.fromkeys(("cache_key", "cache_value"), CACHE_SHAPE),
    **dict.fromkeys(("cache_bias", "cache_score", "cache_position"), CACHE_TABLE_SHAPE),
    "cache_seen": ("sequences",),
    "cache_page_table": ("sequences", "sequence_pages"),
}
# That callers make themselves.
INT32_INPUTS = (
    *("starts", "kv_used", "index", "n_tokens", "commit", "copy_from", "copy_to"),
    "cache_page_table",
)
BOOL_INPUTS = ("key_valid", "attn_mask")
INT32_RESULTS = ("expiry", "slot", "expiry_all", "slot_all")
# float64 if inputs are
FLOAT32_RESULTS = (
    *("score", "bias", "dbias", "dbias_carried", "dsink_logit", "lse", "dlse_a", "dlse_b"),
    "probability",
)

# Fields of the C structs whose names differ from the arguments'.
FIELDS = {
    "query": "q",
    "key": "k",
    "value": "v",
    "a_coef": "a",
    "softmax_scale": "scale",
    "dropout_p": "dropout",
    "keep_window_size": "window",
    "key_carried": "k_carried",
    "value_carried": "v_carried",
    "cache_key": "cache.k",
    "cache_value": "cache.v",
    "cache_bias": "cache.bias",
    "cache_page_table": "cache.page_table",
    **{f"cache_{name}": f"cache.table.{name}" for name in ("score", "position", "seen")},
    **{f"{name}_in": f"table_in.{name}" for name in ("score", "position", "seen")},
    **{"copy_from": "from", "copy_to": "to", "expiry_all": "expiry", "slot_all": "slot"},
}
# Names in error messages that differ from the operators' arguments.
OF_SELECTION = {name: f"selection.{name}" for name in ("expiry", "slot")}
SHOWN = {
    **OF_SELECTION,
    **{f"{name}_all": shown for name, shown in OF_SELECTION.items()},
    **{name: name.replace("_", ".", 1) for name in SHAPES if name.startswith("cache_")},
}
CHOICES = {"scope": _library.SCOPES, "bias_form": _library.BIAS_FORMS}


def differentiated(name: str) -> str | None:
    """The name of the tensor that `name` is the gradient of; None if it is no gradient."""
    return name[1:] if name.startswith("d") and name[1:] in SHAPES else None


def field_of(name: str) -> str:
    """The field of the C struct that the argument or result `name` goes to."""
    source = differentiated(name)
    return FIELDS.get(name, name) if source is None else "d" + FIELDS.get(source, source)


def shape_of(name: str, in_pages: bool = False) -> tuple[str, ...]:
    """The dimensions of the tensor `name` of a call, which may have a page table."""
    shape = SHAPES[differentiated(name) or name]
    return PAGED_SHAPE if in_pages and shape is CACHE_SHAPE else shape


def has_pages(tensors: Mapping[str, MaybeTensor]) -> bool:
    return tensors.get("cache_page_table") is not None


def describe_shape(name: str, in_pages: bool = False) -> str:
    return f"{SHOWN.get(name, name)} is [{', '.join(shape_of(name, in_pages))}]"


def size_of(dimension: str, sizes: Sizes) -> Any:
    """The size of a dimension or of a product of two."""
    if dimension == "all_len" and dimension not in sizes:
        return sizes["kv_len"] + sizes.get("rows", 0)
    first, _, second = dimension.partition(" * ")
    return sizes[first] * sizes[second] if second else sizes[first]


def lengths_of(dimension: str, sizes: Sizes) -> list[int]:
    """The lengths that an axis of PAIR_SHAPE may have, each once."""
    names = dimension.split(" or ")
    return list(dict.fromkeys([*(sizes[name] for name in names[:-1]), int(names[-1])]))


def bind_sizes(tensors: Mapping[str, MaybeTensor]) -> Sizes:
    """The size of each dimension, from the first tensor that has it.

    Raises:
        TypeError: one is not a tensor.
        ValueError: a tensor does not have the rank that its name implies.
    """
    sizes: Sizes = {}
    in_pages = has_pages(tensors)
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        _types.check_tensor(SHOWN.get(name, name), tensor)
        shape = shape_of(name, in_pages)
        if tensor.dim() != len(shape):
            shown = SHOWN.get(name, name)
            raise ValueError(
                f"{shown}: rank is {tensor.dim()}, want {len(shape)}; "
                f"{describe_shape(name, in_pages)}"
            )
        for dimension, size in zip(shape, tensor.shape):
            if shape is not PAIR_SHAPE:
                sizes.setdefault(dimension, size)
    return sizes


def check_sizes(tensors: Mapping[str, MaybeTensor], sizes: Sizes) -> None:
    """Compare every axis with the sizes that bind_sizes() found.

    Raises:
        ValueError: two tensors have different sizes along one dimension.
    """
    message = describe_mismatch(tensors, sizes)
    if message is not None:
        raise ValueError(describe_order(tensors, is_certain=True) or message)


def describe_order(tensors: Mapping[str, MaybeTensor], is_certain: bool) -> str | None:
    """A message for tensors that do not fit each other as they are, but do so if axes 1 and 2 of
    query, key and value, or of one of them, change places; None for others. If it is not certain
    that they do not fit, fewer tensors are taken for such."""
    rows = [name for name in ("query", "key", "value") if tensors.get(name) is not None]
    if not rows:
        return None
    for names in (rows, *([name] for name in rows if is_certain)):
        turned = {**tensors, **{name: tensors[name].transpose(1, 2) for name in names}}
        sizes = bind_sizes(turned)
        heads, kv_heads = sizes.get("q_heads", 0), sizes.get("kv_heads", 0)
        fits = kv_heads > 0 and heads % kv_heads == 0
        if not is_certain:
            fits = fits and kv_heads < sizes["kv_len"] and sizes["q_len"] <= sizes["kv_len"]
        if fits and describe_mismatch(turned, sizes) is None:
            name = "key" if "key" in names else names[0]
            shape, want = list(tensors[name].shape), ", ".join(SHAPES[name])
            count = ("", " of both", " of all three")[len(names) - 1]
            return (
                f"{name}: shape is {shape}, want [{want}]; it looks like [batch, heads, len, "
                "head_dim], as scaled_dot_product_attention has it: transpose axes 1 and 2" + count
            )
    return None


def describe_mismatch(tensors: Mapping[str, MaybeTensor], sizes: Sizes) -> str | None:
    """A message for the first axis that has another size; None if there is none."""
    owners: dict[str, str] = {}  # the tensor that gives each dimension its size
    in_pages = has_pages(tensors)
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        shown = SHOWN.get(name, name)
        for axis, dimension in enumerate(shape_of(name, in_pages)):
            size = tensor.shape[axis]
            if " or " in dimension:
                lengths = lengths_of(dimension, sizes)
                owner = f"want {' or '.join(map(str, lengths))}"
            elif " * " in dimension:
                lengths = [size_of(dimension, sizes)]
                owner = f"want {dimension}, {lengths[0]}"
            else:
                lengths = [size_of(dimension, sizes)]
                owner = f"{owners.setdefault(dimension, shown)} has {lengths[0]}"
            if size not in lengths:
                count = f"{size} element{'' if size == 1 else 's'}"
                shape = describe_shape(name, in_pages)
                return f"{shown}: axis {axis} has {count}, {owner}; {shape}"
    return None


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, biases and lse beside query, key and value of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_absent(result: str, tensors: Mapping[str, MaybeTensor], options: Options) -> bool:
    """Whether a result is left out, by the options or because the tensor that it is the gradient of
    is not given: it is then an empty tensor, because operators cannot return None."""
    if f"wants_{result}" in options:
        return not options[f"wants_{result}"]
    if result in ("ddt_bias", "dsink_logit") and tensors[result[1:]] is None:
        return True
    learned = ("bias", "ddt_proj", "da_coef", "ddt_bias")
    return result in learned and options.get("bias_form") == "none"


def result_like(
    result: str, tensors: Mapping[str, MaybeTensor], sizes: Sizes, options: Options
) -> tuple[tuple[Any, ...], torch.dtype]:
    """The shape and dtype of a result."""
    first = next(tensor for tensor in tensors.values() if tensor is not None)
    if result in INT32_RESULTS:
        dtype = torch.int32
    elif result in FLOAT32_RESULTS:
        dtype = wide(first.dtype)
    else:
        source = tensors.get(differentiated(result) or "")
        dtype = first.dtype if source is None else source.dtype
    if is_absent(result, tensors, options):
        return (0,), dtype
    if result == "dattn_bias":
        return tuple(tensors["attn_bias"].shape), dtype
    return tuple(size_of(dimension, sizes) for dimension in shape_of(result)), dtype


def choose(name: str, value: str) -> int:
    """The enumerator of fdma.h that the string `value` names.

    Raises:
        ValueError: it names none.
    """
    choices = CHOICES[name]
    if not isinstance(value, str) or value not in choices:
        found = repr(value) if isinstance(value, str) else _types.describe(value)
        raise ValueError(f"{name}: is {found}, want one of {', '.join(map(repr, choices))}")
    return choices[value]


def check_int(name: str, value: int) -> int:
    """Check that a number can go to the C library, and return it as an int.

    Raises:
        TypeError: it is not an int.
        ValueError: it is too large.
    """
    if type(value) is not int:
        if not _types.is_int(value):
            raise _types.refusal(name, value, "an int")
        if isinstance(value, torch.SymInt):  # of a graph that is being traced
            return value
        value = operator.index(value)
    if value >= 1 << 63:
        raise ValueError(f"{name}: is {value}, want less than 2**63")
    return value


def check_rules(
    window: int, recent: int, sinks: int, *, name: str = "window", no_recent: str | None = None
) -> tuple[int, int, int]:
    """Check how many keys a selection keeps, and return the three numbers as ints. The C library
    checks a torch.SymInt, when the graph runs.

    `name` is that of the window; `no_recent` says why `recent` has to be 0, where it has to.

    Raises:
        TypeError: one is not an int.
        ValueError: one is out of its range.
    """
    window = check_int(name, window)
    recent, sinks = check_int("recent", recent), check_int("sinks", sinks)
    if isinstance(window, int) and window < 1:
        raise ValueError(f"{name}: is {window}, want 1 or more; kv_len or more keeps all keys")
    if isinstance(recent, int) and recent < 0:
        raise ValueError(f"recent: is {recent}, want 0 or more")
    if no_recent is not None and isinstance(recent, int) and recent > 0:
        raise ValueError(f"recent: is {recent}, want 0 {no_recent}")
    if isinstance(sinks, int) and isinstance(window, int) and not 0 <= sinks <= window:
        raise ValueError(f"sinks: is {sinks}, want 0 to {name}, {window}")
    return window, recent, sinks


def check_gap(gap: float | None, no_gap: str | None = None) -> float:
    """Check a gap, and return it as fdma.h has it, in which 0 means none.

    `no_gap` says why it has to be None, where it has to.

    Raises:
        ValueError: it is out of its range.
    """
    if gap is None:
        return 0.0
    if not _types.is_number(gap):
        raise _types.refusal("gap", gap, "a number or None")
    if isinstance(gap, (int, float)) and not 0 < gap < math.inf:
        raise ValueError(f"gap: is {gap:g}, want a finite number above 0, or None for none")
    if no_gap is not None:
        raise ValueError(f"gap: is {gap:g}, want None {no_gap}")
    return gap


def translate(message: str, tensors: tuple[str, ...], options: tuple[str, ...]) -> str:
    """Put Python's names into a message of the C library, which begins with the name of a field or
    of a dimension and a colon. For a dimension, append the shape of a tensor that has it."""
    field, colon, rest = message.partition(": ")
    shown = {field_of(name): SHOWN.get(name, name) for name in (*tensors, *options)}
    shown["exec.kernel"] = "backend"
    owner = next((name for name in tensors if field in shape_of(name)), None)
    if owner is not None and field not in shown:
        rest = f"{rest}; {describe_shape(owner)}"
    rest = rest.replace("causal is 0", "causal is False")
    rest = rest.replace("0 to window", f"0 to {shown.get('window', 'window')}")
    return shown.get(field, field) + colon + rest
