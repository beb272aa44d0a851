"""The names of arguments and results of calls, and their shapes, dtypes and devices.

Everything that depends on an argument's name is decided here: the checks of shapes, dtypes and
devices and of the rules of a selection, the shapes and dtypes of results (and with them the fake
kernels), the field of the C struct that an argument goes to, and the name that an error message
gives it. The last part is what the package's functions do with arguments before the call.

A tensor whose name is "d" and the name of another tensor is that tensor's gradient.
"""

from __future__ import annotations

import math
import operator
import os
import re
from typing import Any, Callable, Dict, Mapping, Optional, Tuple

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from . import _library, _types

MaybeTensor = Optional[torch.Tensor]
Tensors = Tuple[torch.Tensor, ...]
MaybeTensors = Tuple[MaybeTensor, ...]
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
# Axes that may have one of several lengths; an axis of length 1 is broadcast.
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
    **dict.fromkeys(("packed_query", "packed_out"), ("tokens", *QUERY_SHAPE[2:])),
    **dict.fromkeys(("packed_key", "packed_value"), ("tokens", *KEY_SHAPE[2:])),
    "packed_score": ("kv_heads", "tokens"),
    "cache_page_table": ("sequences", "sequence_pages"),
    **dict.fromkeys(("x", "rotated"), ("batch", "len", "heads", "head_dim")),
    "rotated_key": KEY_SHAPE,
    "weight": ("head_dim",),
    "rotary": ("rows", "dim"),
    "positions": ("batch or 1", "len"),
    "row_positions": ("rows",),
    "inv_freq": ("pairs",),
}
# Callers make these themselves.
INT32_INPUTS = (
    *("starts", "kv_used", "index", "n_tokens", "commit", "copy_from", "copy_to"),
    *("cache_page_table", "positions", "row_positions"),
)
INT32_MAX = (1 << 31) - 1
BOOL_INPUTS = ("key_valid", "attn_mask")
NUMERIC_MASKS = (torch.float16, torch.bfloat16)  # that CUDA kernels read, true above 0
INT32_RESULTS = ("expiry", "slot", "expiry_all", "slot_all")
# float64 if the inputs are float64
FLOAT32_RESULTS = (
    *("score", "bias", "dbias", "dbias_carried", "dsink_logit", "lse", "dlse_a", "dlse_b"),
    *("probability", "dweight", "rotary"),
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
    **{f"packed_{name}": name[0] for name in ("query", "key", "value")},
    **{f"packed_{name}": name for name in ("score", "out")},
    "copy_from": "from",
    "copy_to": "to",
    "expiry_all": "expiry",
    "slot_all": "slot",
    "rotated": "out",
    "rotated_key": "k_out",
    "key_nope_heads": "k_nope_heads",
    "row_positions": "positions",
}
# Names in error messages that differ from the operators' arguments.
OF_SELECTION = {name: f"selection.{name}" for name in ("expiry", "slot")}
SHOWN = {
    **OF_SELECTION,
    **{f"{name}_all": shown for name, shown in OF_SELECTION.items()},
    **{name: name.replace("_", ".", 1) for name in SHAPES if name.startswith("cache_")},
    **{name: name[7:] for name in SHAPES if name.startswith("packed_")},
    "rotary": "table",
    "row_positions": "length",
}
DTYPES = {
    getattr(torch, name): _library.HEADER.enumerators[f"FDMA_{name.upper()}"]
    for name in ("float32", "float16", "bfloat16", "float64", "int32", "int64", "uint8")
}
DTYPES[torch.bool] = DTYPES[torch.uint8]
DEVICES = ("cpu", "cuda")
ROWS = ("query", "key", "value")
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Tensors that have one dtype in a call.
OF_ONE_DTYPE = (
    *("query", "key", "value", "out_a", "out_b", "key_carried", "value_carried"),
    *("packed_query", "packed_key", "packed_value", "packed_out", "cache_key", "cache_value"),
)
NO_CUDA = (
    "but this build of flash_dmattn has no CUDA kernels; install it anew where nvcc is found: "
    "FDMA_CUDA=ON pip install ."
)
NO_TANGENTS = (
    "flash_dmattn.{}: forward-mode derivatives (torch.func.jvp) are not implemented, use reverse "
    "mode (torch.autograd.grad)"
)
CHOICES = {"scope": _library.SCOPES, "bias_form": _library.BIAS_FORMS}


def differentiated(name: str) -> str | None:
    """The name of the tensor whose gradient `name` is; None if it is no gradient."""
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


def describe_order(tensors: Mapping[str, Any], is_certain: bool) -> str | None:
    """A message if swapping axes 1 and 2 of query, key and value, or of one of them, makes the
    tensors fit each other; None otherwise. If it is not certain that they do not fit as they are,
    the test is stricter."""
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
                count = _types.counted(size, "element")
                shape = describe_shape(name, in_pages)
                return f"{shown}: axis {axis} has {count}, {owner}; {shape}"
    return None


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, biases and lse beside query, key and value of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_absent(result: str, tensors: Mapping[str, MaybeTensor], options: Options) -> bool:
    """True if the options leave a result out, or if the tensor whose gradient it is was not given.
    The result is then an empty tensor, because operators cannot return None."""
    if f"wants_{result}" in options:
        return not options[f"wants_{result}"]
    if result in ("ddt_bias", "dsink_logit") and tensors[result[1:]] is None:
        return True
    learned = ("bias", "ddt_proj", "da_coef", "ddt_bias")
    return result in learned and options.get("bias_form") == "none"


def is_unread(name: str, tensors: Mapping[str, MaybeTensor]) -> bool:
    """True if a call's gradients do not depend on this tensor of the call."""
    return name == "x" and tensors["weight"] is None


def result_like(
    result: str, tensors: Mapping[str, Any], sizes: Sizes, options: Options
) -> tuple[tuple[Any, ...], torch.dtype]:
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
    if result == "rotary":
        return (sizes["rows"], options["dim"]), torch.float64 if options["wide"] else dtype
    if result == "dattn_bias":
        return tuple(tensors["attn_bias"].shape), dtype
    return tuple(size_of(dimension, sizes) for dimension in shape_of(result)), dtype


def name_of_dtype(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "")


def check_float(name: str, dtype: torch.dtype) -> None:
    """Check an argument that is a dtype.

    Raises:
        NotImplementedError: keys and values cannot have it.
    """
    if dtype not in FLOATS:
        wanted = "float32, float16, bfloat16 or float64"
        raise NotImplementedError(f"{name}: is {name_of_dtype(dtype)}, want {wanted}")


def check_dtype(name: str, tensor: torch.Tensor) -> None:
    """Check the dtype of the argument of this name.

    Raises:
        NotImplementedError: the C library does not take it.
    """
    dtype, shown = name_of_dtype(tensor.dtype), SHOWN.get(name, name)
    numbers = tensor.dtype in NUMERIC_MASKS and name == "attn_mask" and tensor.is_cuda
    if name in BOOL_INPUTS and tensor.dtype not in (torch.bool, torch.uint8) and not numbers:
        hint = name == "attn_mask" and tensor.dtype.is_floating_point
        use = "; a mask that is added to logits is an attn_bias" if hint else ""
        raise NotImplementedError(f"{name}: dtype is {dtype}, supported: bool or uint8{use}")
    if name in INT32_INPUTS and tensor.dtype != torch.int32:
        raise NotImplementedError(f"{shown}: dtype is {dtype}, supported: int32")
    if tensor.dtype not in DTYPES:
        raise NotImplementedError(f"{shown}: dtype is {dtype}, which no kernel supports")


def check_same_dtype(tensors: Mapping[str, MaybeTensor]) -> None:
    """Check that queries, keys and values have one dtype. The C library refuses a dtype without
    kernels.

    Raises:
        ValueError: two have different dtypes, and kernels exist for both.
    """
    first = None
    for name in OF_ONE_DTYPE:
        tensor = tensors.get(name)
        if tensor is None or tensor.dtype not in FLOATS:
            continue
        if first is None:
            first, want = name, tensor.dtype
        elif tensor.dtype != want:
            shown, found = SHOWN.get(name, name), name_of_dtype(tensor.dtype)
            raise ValueError(f"{shown}: dtype is {found}, {first}'s is {name_of_dtype(want)}")


def is_same_device(one: torch.device, other: torch.device) -> bool:
    """True if two names mean one device. A name without an index means the current device."""
    if one == other:
        return True
    current = torch.cuda.current_device() if one.type == other.type == "cuda" else 0
    first, second = (current if x.index is None else x.index for x in (one, other))
    return one.type == other.type and first == second


def check_same_device(tensors: Mapping[str, MaybeTensor]) -> tuple[str, torch.device]:
    """The name and the device of the first tensor; all others must be on that device.

    Raises:
        ValueError: the tensors are on different devices.
    """
    devices = [(name, x.device) for name, x in tensors.items() if x is not None]
    first, device = devices[0]
    for name, other in devices:
        if not is_same_device(other, device):
            shown = SHOWN.get(name, name)
            owner = SHOWN.get(first, first)
            raise ValueError(f"{shown}: is on {other}, want {device}, where {owner} is")
    return first, device


def check_devices(tensors: Mapping[str, MaybeTensor]) -> None:
    """Refuse tensors of devices that one call cannot serve.

    Raises:
        ValueError: the tensors are on different devices.
        NotImplementedError: they are on a CUDA device, and the library was built without CUDA.
    """
    first, device = check_same_device(tensors)
    if device.type == "cuda" and not _library.has_cuda():
        raise NotImplementedError(f"{first}: is on {device}, {NO_CUDA}")


def check_device(device: torch.device | str | None) -> None:
    """Refuse a device on which PyTorch makes no tensors: its own errors do not name the argument.

    Raises:
        NotImplementedError: this PyTorch or this machine has no such device.
    """
    if device is None or torch.compiler.is_compiling():
        return
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, ImportError, AttributeError) as error:
        wanted = "want a device on which PyTorch makes tensors here"
        raise NotImplementedError(f"device: is {device}, {wanted}") from error


def check_kernel_device(device: torch.device | str | None) -> None:
    """check_device() for tensors that only kernels of this package use.

    Raises:
        NotImplementedError: also if this build has no kernels for the device.
    """
    kind = "cpu" if device is None else torch.device(device).type
    if kind not in (*DEVICES, "meta"):
        raise NotImplementedError(f"device: is {device}, want cpu, cuda or meta")
    if kind == "cuda" and not _library.has_cuda():
        raise NotImplementedError(f"device: is {device}, {NO_CUDA}")
    check_device(device)


def check_backend(backend: str | None) -> None:
    """Refuse a backend that is not a path prefix of any kernel's name.

    Raises:
        TypeError: `backend` is neither a str nor None.
        NotImplementedError: no kernel's name has this prefix.
    """
    if backend is None:
        return
    if not isinstance(backend, str):
        raise _types.refusal("backend", backend, "a str or None")
    names = [kernel.name for kernel in _library.kernels()]
    if not any(f"{name}/".startswith(f"{backend}/") for name in names):
        if backend.split("/")[0] == "cuda" and not _library.has_cuda():
            raise NotImplementedError(f"backend: is {backend!r}, {NO_CUDA}")
        usable = ", ".join(map(repr, _library.backends()))
        raise NotImplementedError(
            f"backend: no kernel is named {backend!r}, want one of {usable}, "
            "or the name of a kernel that `python -m flash_dmattn info` lists"
        )


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
        ValueError: it does not fit int64.
    """
    if type(value) is not int:
        if not _types.is_int(value):
            raise _types.refusal(name, value, "an int")
        if isinstance(value, torch.SymInt):  # while a graph is traced
            return value
        value = operator.index(value)
    return _types.check_int64(name, value)


def starts_in_int32(starts: torch.Tensor) -> torch.Tensor:
    """The numbers in int32. One that int32 does not hold stays out of the range of `starts`."""
    fits = starts.dtype == torch.int32
    return starts if fits else starts.clamp(-1, INT32_MAX).to(torch.int32)


def check_rules(
    window: int, recent: int, sinks: int, *, name: str = "window", no_recent: str | None = None
) -> tuple[int, int, int]:
    """Check how many keys a selection keeps, and return the three numbers as ints. The C library
    checks a torch.SymInt, when the graph runs.

    `name` is the window's name in messages; `no_recent` is the reason if `recent` has to be 0.

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
    """Check a gap, and return it as fdma.h has it: 0 means none.

    `no_gap` is the reason if the gap has to be None.

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
    rest = rest.replace(" of rotary", f" of {SHOWN['rotary']}")
    rest = rest.replace("causal is 0", "causal is False")
    rest = rest.replace("0 to window", f"0 to {shown.get('window', 'window')}")
    return shown.get(field, field) + colon + rest


# The places in a message where an argument's name stands.
NAMED = re.compile(
    r"^\w+(?=: )|\b\w+(?= has \d)|(?<=; )\w+(?= is \[)|(?<=where )\w+(?= is$)|\b\w+(?='s is )"
)


def call_renamed(names: dict[str, str], function: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Call `function`. Its error messages use the caller's `names` of arguments."""
    if torch.compiler.is_compiling():
        return function(*args, **kw)
    try:
        return function(*args, **kw)
    except (TypeError, ValueError, NotImplementedError) as error:
        message = NAMED.sub(lambda found: names.get(found[0], found[0]), str(error))
        raise type(error)(message) from None


def refuse_tangents(name: str, *tensors: torch.Tensor | None) -> None:
    """Refuse tensors with forward-mode tangents, which an operator would silently ignore. They
    are visible only here, before dispatch; outside of forward mode there is nothing to check."""
    if getattr(forward_ad, "_current_level", 0) < 0:
        return
    for tensor in tensors:
        is_tensor = isinstance(tensor, torch.Tensor)  # the call refuses others
        if is_tensor and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(NO_TANGENTS.format(name))


DROPS_ALL = 1 - 2**-17  # the least dropout_p that is rounded to 1, as a multiple of 2^-16


def check_dropout(dropout_p: float, name: str = "dropout_p") -> None:
    if type(dropout_p) is not float and not _types.is_number(dropout_p):
        raise _types.refusal(name, dropout_p, "a number from 0 to 1")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"{name}: is {dropout_p}, want a number from 0 to 1")


def kernel_dropout(
    dropout_p: float, rng_state: torch.Tensor | None
) -> tuple[float, torch.Tensor | None]:
    """dropout_p and rng_state for kernels, which take a dropout_p that rounds to less than 1. With
    a larger one they compute without dropout, and finish() drops all results."""
    return (0.0, None) if dropout_p >= DROPS_ALL else (dropout_p, rng_state)


def drop_all(results: torch.Tensor) -> torch.Tensor:
    """Zeros, whose gradients are zeros too."""
    return results.masked_fill(results.new_ones((), dtype=torch.bool), 0)


def pad_head_dim(
    rows: tuple[Any, ...], dt_proj: torch.Tensor | None = None
) -> tuple[tuple[Any, ...], Any, int | None]:
    """Pad `rows` [batch, len, heads, head_dim] and dt_proj with channels of zeros to a multiple of
    8, which kernels need. The last of `rows` has kv_heads heads. Also returns the old head_dim,
    None if nothing was added. The call refuses tensors that do not fit each other."""
    is_tensor = isinstance(rows[0], torch.Tensor) and not rows[0].is_nested and rows[0].dim() == 4
    head_dim = rows[0].shape[-1] if is_tensor else 0
    added = (0, -head_dim % 8)
    if added[1] == 0 or head_dim > 256:
        return rows, dt_proj, None
    fits = [isinstance(x, torch.Tensor) and x.shape[3:] == rows[0].shape[3:] for x in rows]
    if not all(fits):
        return rows, dt_proj, None
    if isinstance(dt_proj, torch.Tensor):
        kv_heads = rows[-1].shape[2]
        if dt_proj.dim() != 2 or dt_proj.shape[1] != kv_heads * head_dim:
            return rows, dt_proj, None
        dt_proj = F.pad(dt_proj.unflatten(1, (kv_heads, head_dim)), added).flatten(1)
    return tuple(F.pad(row, added) for row in rows), dt_proj, head_dim


def finish(out: torch.Tensor, head_dim: int | None, dropout_p: float = 0.0) -> torch.Tensor:
    """Complete out after pad_head_dim() and kernel_dropout(): cut padded channels, drop all if
    asked."""
    out = out if head_dim is None else out[..., :head_dim].contiguous()
    return drop_all(out) if dropout_p >= DROPS_ALL else out


def draw_state(
    query: torch.Tensor,
    dropout_p: float,
    generator: torch.Generator | None,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The seed and the offset of dropout: rng_state if it is given, otherwise drawn from
    `generator`; None without dropout."""
    check_dropout(dropout_p)
    if generator is not None:
        if not isinstance(generator, torch.Generator):
            raise _types.refusal("generator", generator, "a torch.Generator")
        if not is_same_device(generator.device, query.device):
            raise ValueError(
                f"generator: is on {generator.device}, want {query.device}, where query is"
            )
        if rng_state is not None:
            raise ValueError("generator: is given, want None with rng_state")
    if dropout_p == 0 or rng_state is not None:
        return rng_state
    return torch.randint((1 << 63) - 1, (2,), generator=generator, device=query.device)


def kernel_scale(softmax_scale: float | None, head_dim: int | None = None) -> float:
    """softmax_scale as fdma.h has it: 0 means the default. `head_dim` comes from pad_head_dim()."""
    if softmax_scale is None:
        return 0.0 if head_dim is None else head_dim**-0.5
    if type(softmax_scale) is not float and not _types.is_number(softmax_scale):
        raise _types.refusal("softmax_scale", softmax_scale, "a number or None")
    if isinstance(softmax_scale, (int, float)) and not 0 < softmax_scale < math.inf:
        raise ValueError(
            f"softmax_scale: is {softmax_scale:g}, want a finite number above 0, or None for the "
            "default"
        )
    return softmax_scale


def check_score(score: Any, weights: dict[str, Any], dt_bias: Any, form: str, where: str) -> None:
    """Check that a call has either the weights that scores are computed from or a score, which adds
    no bias. `where` names what has the bias_form `form`."""
    if score is None:
        for name, weight in weights.items():
            _types.check_tensor(name, weight)
        return
    _types.check_tensor("score", score)
    for name, weight in {**weights, "dt_bias": dt_bias}.items():
        if weight is not None:
            raise ValueError(f"{name}: is given, want None beside a score")
    if form != "none":
        raise ValueError(f"score: is given, want None {where} bias_form {form!r}")


def autocast(name: str, rows: tuple[Any, ...], weights: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    """Cast `rows` (query, key and value) and `weights` (dt_proj, a_coef, dt_bias) to autocast's
    dtype if autocast is on. float32 weights stay as they are: kernels take them with rows of any
    dtype. `name` is the name of rows[0]."""
    for row in rows:
        if not isinstance(row, torch.Tensor):
            at = [isinstance(x, torch.Tensor) for x in rows].index(False)
            _types.check_tensor(ROWS[at] if at > 0 else name, row)
    device = rows[0].device.type
    if device not in DEVICES or not torch.is_autocast_enabled(device):
        return (*rows, *weights)
    dtype = torch.get_autocast_dtype(device)
    narrow = (torch.float16, torch.bfloat16)
    floats = (torch.float32, *narrow)  # float64 is not cast
    return (
        *(row.to(dtype) if row.dtype in floats else row for row in rows),
        *(one.to(dtype) if getattr(one, "dtype", None) in narrow else one for one in weights),
    )


def head_under_autocast(head: Any, tensor: Any) -> Any:
    """The head of direct calls whose tensors may be cast. Under autocast it has the dtype."""
    device = tensor.device.type if isinstance(tensor, torch.Tensor) else None
    if device not in DEVICES or not torch.is_autocast_enabled(device):
        return head
    return head, torch.get_autocast_dtype(device)


def check_no_bool(name: str, number: float | None) -> None:
    """Refuse a bool in place of a number: the call has another order of arguments."""
    if isinstance(number, bool):
        raise TypeError(f"{name}: is {number}, a bool, want a number or None")


def either(name: str, value: Any, other: str, given: Any) -> Any:
    """The value of an argument that has two names."""
    if value is not None and given is not None:
        raise TypeError(f"{other}: is given, want None beside {name}, as both mean the same")
    return given if value is None else value


def choose_scale(softmax_scale: float | None, scale: float | None) -> float | None:
    if softmax_scale is not None:
        check_no_bool("softmax_scale", softmax_scale)
    if scale is None:
        return softmax_scale
    check_no_bool("scale", scale)
    if not _types.is_number(scale):
        raise _types.refusal("scale", scale, "a number or None")
    if not 0 < scale < math.inf:
        raise ValueError(
            f"scale: is {scale:g}, want a finite number above 0, or None for the default"
        )
    if softmax_scale is None:
        return scale
    if not _types.is_number(softmax_scale):
        raise _types.refusal("softmax_scale", softmax_scale, "a number or None")
    if scale != softmax_scale:
        raise ValueError(f"scale: is {scale}, want None, or softmax_scale, {softmax_scale}")
    return scale


def as_bool_mask(
    mask: torch.Tensor | None, name: str = "attn_mask", added: str = "attn_bias"
) -> torch.Tensor | None:
    """A mask of floating-point numbers as bool, true where they are above 0. Other masks stay as
    they are, and those whose numbers CUDA kernels read fast. Expanded axes get length 1, so that
    the new tensor has no more elements than the mask has in memory. On the CPU a mask with a number
    below 0 is refused, and the message names `added` as the argument for it; on a device the host
    does not wait for the numbers."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor):
        _types.check_tensor(name, mask)
    if not mask.dtype.is_floating_point or _is_read_by_vectors(mask):
        return mask
    for axis, stride in enumerate(mask.stride()):
        if stride == 0 and mask.shape[axis] > 1:
            mask = mask.narrow(axis, 0, 1)
    if _is_on_host(mask) and mask.numel() > 0 and (least := mask.amin().item()) < 0:
        raise ValueError(
            f"{name}: has the number {least:g}, want 1.0 and 0.0: give it as {added}, or as "
            "booleans"
        )
    return mask > 0


def _is_read_by_vectors(mask: torch.Tensor) -> bool:
    """True if CUDA kernels read the mask's numbers 16 bytes at a time."""
    if not mask.is_cuda or mask.dtype not in NUMERIC_MASKS or mask.dim() != 4:
        return False
    starts = (mask.storage_offset(), *mask.stride()[:3])
    return mask.stride(3) == 1 and all(start % 8 == 0 for start in starts)


def _is_on_host(tensor: torch.Tensor) -> bool:
    """True if the numbers can be read without waiting for a device."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == "cpu"


def memory_of(device: torch.device) -> int:
    """The total memory of a device in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_probabilities_fit(query: torch.Tensor, key: torch.Tensor, name: str) -> None:
    """Refuse probabilities that are larger than the memory of their device: PyTorch may seem to
    allocate them, and the system then ends the process. `name` is the option that asks for them."""
    if torch.compiler.is_compiling() or query.device.type not in ("cpu", "cuda"):
        return
    if query.dim() != 4 or key.dim() != 4:
        return  # the call refuses them
    batch, q_len, q_heads, _ = query.shape
    kv_len = key.shape[1]
    size = batch * q_heads * q_len * kv_len * max(query.element_size(), 4)
    total = memory_of(query.device)
    if size > total:
        raise MemoryError(
            f"{name}: {batch} x {q_heads} x {q_len} x {kv_len} probabilities take "
            f"{size / 2**30:.1f} GiB, and {query.device} has {total / 2**30:.1f} GiB in all; "
            "ask for those of fewer queries at a time"
        )


def spread(
    attn_bias: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """attn_bias expanded to each pair of every query head, so that PyTorch sums the gradient of a
    broadcast bias. The call refuses a bias that does not fit query, key and value."""
    if any(x.dim() != 4 for x in (attn_bias, query, key, value)):
        return attn_bias
    batch, q_len, q_heads = query.shape[:3]
    heads, kv_heads = attn_bias.shape[1], key.shape[2]
    if heads == kv_heads and 0 < kv_heads < q_heads and q_heads % kv_heads == 0:
        of_group = attn_bias[:, :, None].expand(-1, -1, q_heads // kv_heads, -1, -1)
        attn_bias = of_group.flatten(1, 2)
    shape = (batch, q_heads, q_len, key.shape[1])
    fits = all(size in (1, want) for size, want in zip(attn_bias.shape, shape))
    return attn_bias.expand(shape) if fits else attn_bias


def is_added_in_any_order(attn_bias: Any, deterministic: bool) -> bool:
    """True if the gradient of a bias has to be summed in a fixed order on a device. Kernels cannot
    do this for a broadcast bias."""
    if not isinstance(attn_bias, torch.Tensor) or not attn_bias.is_cuda:
        return False
    is_fixed = deterministic or torch.are_deterministic_algorithms_enabled()
    return bool(is_fixed) and attn_bias.requires_grad and torch.is_grad_enabled()
