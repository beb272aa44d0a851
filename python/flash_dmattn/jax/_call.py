"""Calls of the C library within a program of JAX: one target of XLA's foreign function interface.

While a program is traced, the argument struct of fdma.h is filled in with shapes and options, and
the C library checks it and says how much workspace it needs. The struct becomes an attribute of the
call. src/jax/jax.c, which XLA calls when the program runs, writes the addresses of the buffers into
it. The workspace is one more result, which nobody uses.

Arguments and results are named as the fields of the struct: "q", "selection.expiry",
"cache.table.score".
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
from typing import Any, Dict, Mapping, NoReturn, Tuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from .. import _library

Arrays = Dict[str, Any]  # by field
Shape = Tuple[int, ...]

TARGET = f"fdma_{_library.version()}"  # a program of another version does not find its target
CPU, CUDA = 0, 1  # fdma_exec.device; a program is sized for the first GPU
STRUCTS = _library.HEADER.structs
DTYPES = {
    name: _library.HEADER.enumerators[f"FDMA_{name.upper()}"]
    for name in ("float32", "float16", "bfloat16", "float64", "int32", "uint8")
}
DTYPES["bool"] = DTYPES["uint8"]
RNG_STATE = "rng_state"  # uint32 [4] here, int64 [2] to the C library
# Arguments without an axis of the batch. A result "dX" has the axes of X.
SHARED = ("dt_proj", "a", "dt_bias", "sink_logit", "starts", RNG_STATE)
PAIRS = ("attn_mask", "attn_bias")  # whose axis of the batch may have length 1
# Under vmap a call with one of these runs once for each entry, because its results depend on which
# entry of the batch a sequence is, or because sums over the batch are results.
ENTRY_BY_ENTRY = (
    *("starts", RNG_STATE, "index"),
    *("ddt_proj", "da", "ddt_bias", "dsink_logit", "dattn_bias"),
)
# Names of fields as the package's functions have them.
SHOWN = {
    "q": "query",
    "k": "key",
    "v": "value",
    "a": "a_coef",
    "scale": "softmax_scale",
    "dropout": "dropout_p",
    "exec.kernel": "backend",
    "expiry": "selection.expiry",
    "slot": "selection.slot",
    "cache.k": "cache.key",
    "cache.v": "cache.value",
    **{f"cache.table.{name}": f"cache.{name}" for name in ("score", "position", "seen")},
}


@dataclasses.dataclass(frozen=True)
class Operation:
    """A function of the C library with its options.

    `results` has the field, the shape and the name of the dtype of each result; `reused` pairs a
    result with the argument whose memory it takes over; `window` is the window's name in
    messages."""

    function: str
    options: tuple[tuple[str, Any], ...]
    results: tuple[tuple[str, Shape, str], ...]
    backend: str | None = None
    reused: tuple[tuple[str, str], ...] = ()
    window: str = "window"
    no_gradient: str = "second derivatives are not implemented"


# ---- while a program is traced: the struct ----


def platform() -> str:
    """Where programs run that are traced now."""
    config: Any = jax.config
    chosen = config.jax_default_device
    name = chosen or jax.default_backend()
    return name if isinstance(name, str) else name.platform


def devices() -> list[int]:
    """fdma_exec.device wherever a program may run that is traced now, the default one first.

    Raises:
        NotImplementedError: the default platform has no kernels.
    """
    name = platform()
    if name == "cpu":
        return [CPU, CUDA] if _library.has_cuda() and jax.default_backend() == "gpu" else [CPU]
    if name not in ("gpu", "cuda"):
        raise NotImplementedError(f"jax: the platform is {name!r}, want 'cpu' or 'gpu'")
    if not _library.has_cuda():
        raise NotImplementedError(
            "jax: the platform is 'gpu', but this build of flash_dmattn has no CUDA kernels; "
            "install it anew where nvcc is found: FDMA_CUDA=ON pip install ."
        )
    return [CUDA, CPU]


def view(field: str, shape: Shape, dtype: str) -> _library.Struct:
    """An array as the C library sees it, without an address."""
    if field == RNG_STATE:
        shape, dtype_number = (2,), _library.HEADER.enumerators["FDMA_INT64"]
    else:
        dtype_number = DTYPES[dtype]
    strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    absent = [0] * (4 - len(shape))
    return STRUCTS["fdma_tensor"](
        shape=(*shape, *absent), stride=(*strides, *absent), dtype=dtype_number, rank=len(shape)
    )


class Prepared:
    """The struct of a call, which the C library has checked."""

    def __init__(self, operation: Operation, inputs: Mapping[str, tuple[Shape, str]]) -> None:
        self.operation = operation
        self.args = STRUCTS[f"fdma_{operation.function}_args"]()
        self.selection = STRUCTS["fdma_selection"]()
        results = {field: (shape, dtype) for field, shape, dtype in operation.results}
        owner = dict(operation.reused)
        self.fill_options(inputs)
        taken_over = set(owner.values())
        kinds = {field: kind for field, kind in inputs.items() if field not in taken_over}
        kinds.update(results)
        places = {field: self.place(field, *kind) for field, kind in kinds.items()}
        exec_at = type(self.args).exec.offset
        workspace_at = exec_at + STRUCTS["fdma_exec"].workspace.offset
        has_selection = any(field.startswith("selection.") for field in places)
        pointer_at = type(self.args).selection.offset if has_selection else -8
        if has_selection:
            self.args.selection = ctypes.pointer(self.selection)
        self.plan = [exec_at // 8, pointer_at // 8, ctypes.sizeof(self.args) // 8]
        self.plan += [-1 if field in taken_over else places[field] for field in inputs]
        self.plan += [*(places[field] for field in results), workspace_at // 8]
        self.args.exec.workspace_size = self.workspace_size = self.ask_workspace()

    def fill_options(self, inputs: Mapping[str, tuple[Shape, str]]) -> None:
        ruled = [self.args]
        if hasattr(self.args, "cache"):
            (sequences, _, kv_heads, head_dim), dtype = inputs["cache.k"]
            cache = self.args.cache
            cache.sequences, cache.kv_heads, cache.head_dim = sequences, kv_heads, head_dim
            cache.dtype = DTYPES[dtype]
            ruled.append(cache)
        if "selection.expiry" in inputs:
            self.selection.kv_len = inputs["selection.expiry"][0][-1]
            ruled.append(self.selection)
        for field, value in self.operation.options:
            for struct in ruled:
                if hasattr(type(struct), field):
                    setattr(struct, field, value)

    def place(self, field: str, shape: Shape, dtype: str) -> int:
        """Fill in the field of an array; return the word that will hold its address."""
        struct, offset = self.args, STRUCTS["fdma_tensor"].data.offset
        *outer, last = field.split(".")
        if outer == ["selection"]:
            struct, offset, outer = self.selection, offset + ctypes.sizeof(self.args), []
        for member in outer:
            offset += getattr(type(struct), member).offset
            struct = getattr(struct, member)
        setattr(struct, last, view(field, shape, dtype))
        return (offset + getattr(type(struct), last).offset) // 8

    def ask_workspace(self) -> int:
        """The bytes that the call needs wherever it may run.

        Raises:
            ValueError, NotImplementedError: the C library refuses the call on the default device.
        """
        backend = self.operation.backend
        self.args.exec.kernel = None if backend is None else backend.encode()
        ask = getattr(_library.library, f"fdma_{self.operation.function}_workspace")
        size, most = ctypes.c_size_t(), 0
        for number, device in enumerate(devices()):
            self.args.exec.device = device
            if hasattr(self.args, "cache"):
                self.args.cache.device = device
            status = ask(ctypes.byref(self.args), ctypes.byref(size))
            if status == _library.OK:
                most = max(most, size.value)
            elif number == 0:
                self.refuse(status)
        return most

    def refuse(self, status: int) -> NoReturn:
        try:
            _library.check(status)
        except Exception as error:
            field, colon, rest = str(error).partition(": ")
            shown = {**SHOWN, "window": self.operation.window}
            rest = rest.replace("causal is 0", "causal is False")
            raise type(error)(shown.get(field, field) + colon + rest) from None
        raise AssertionError

    def words(self) -> np.ndarray:
        """The argument struct and, behind it, the selection. The handler fills in all addresses."""
        self.args.exec.kernel = None
        if self.plan[1] >= 0:
            self.args.selection = None
        return np.frombuffer(bytes(self.args) + bytes(self.selection), np.int64)


# ---- the call ----


def call(operation: Operation, inputs: Mapping[str, Any]) -> Arrays:
    """Make a call. Its inputs are arrays by field, without those that are None."""
    given = {field: x for field, x in inputs.items() if x is not None}
    fields = tuple(given)

    @jax.custom_jvp
    def run(*arrays: Any) -> tuple[Any, ...]:
        kinds = {field: (x.shape, x.dtype.name) for field, x in zip(fields, arrays)}
        prepared = Prepared(operation, kinds)
        owner = dict(operation.reused)
        names = [field for field, _, _ in operation.results]
        results = [jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in operation.results]
        results.append(jax.ShapeDtypeStruct((prepared.workspace_size,), np.uint8))
        target = jax.ffi.ffi_call(
            TARGET,
            results,
            input_output_aliases={
                fields.index(owner[name]): at for at, name in enumerate(names) if name in owner
            },
        )
        attributes = {"plan": np.array(prepared.plan, np.int64), "words": prepared.words()}
        backend = operation.backend or ""
        found = target(*arrays, backend=backend, operation=operation.function, **attributes)
        return tuple(found[:-1])

    @run.defjvp
    def refuse(primals: Any, tangents: Any) -> NoReturn:
        raise NotImplementedError(f"flash_dmattn.jax: {operation.no_gradient}")

    batched_run = custom_vmap(run)

    @batched_run.def_vmap
    def batch(size: int, is_batched: list[bool], *arrays: Any) -> tuple[Any, Any]:
        names = [field for field, _, _ in operation.results]
        entries = list(zip(fields, arrays, is_batched))
        lengths = {field: x.shape[moved] for field, x, moved in entries}  # of their first axes
        length = next(lengths[field] for field in ("q", "v", "score") if field in lengths)
        if (
            any(name in ENTRY_BY_ENTRY for name in (*fields, *names))
            or any(field in SHARED and moved for field, _, moved in entries)
            or lengths.get("cache.k", length) != length
        ):
            found = map_entries(batched_run, is_batched, arrays)
        else:
            merged = {field: merge(field, x, moved, size, length) for field, x, moved in entries}
            whole = call(merge_results(operation, size), merged)
            found = tuple(x.reshape(size, -1, *x.shape[1:]) for x in whole.values())
        return tuple(found), (True,) * len(names)

    results = batched_run(*given.values())
    return {field: x for (field, _, _), x in zip(operation.results, results)}


def map_entries(run: Any, is_batched: list[bool], arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """One call for each entry, one after the other."""

    def entry(moving: list[Any]) -> tuple[Any, ...]:
        rest = iter(moving)
        return run(*[next(rest) if moved else x for x, moved in zip(arrays, is_batched)])

    return lax.map(entry, [x for x, moved in zip(arrays, is_batched) if moved])


def merge(field: str, x: Any, moved: bool, size: int, length: int) -> Any:
    """An argument of one call on all entries, whose batch is size * length."""
    if field in SHARED or (field in PAIRS and not moved and x.shape[0] == 1):
        return x
    x = x if moved else jnp.broadcast_to(x, (size, *x.shape))
    if field in PAIRS:
        x = jnp.broadcast_to(x, (size, length, *x.shape[2:]))
    return x.reshape(size * x.shape[1], *x.shape[2:])


def merge_results(operation: Operation, size: int) -> Operation:
    results = [(field, (size * n, *rest), dtype) for field, (n, *rest), dtype in operation.results]
    return dataclasses.replace(operation, results=tuple(results))


def register() -> None:
    """Tell XLA of the handlers.

    Raises:
        ImportError: there is no libfdma_jax.
    """
    beside = _library.PATH.with_name("libfdma_jax.so")
    is_chosen = "FDMA_JAX_LIBRARY" in os.environ or not beside.is_file()
    path = _library.find("FDMA_JAX_LIBRARY", "libfdma_jax") if is_chosen else beside
    try:
        handlers = ctypes.CDLL(str(path))
        capsules = [jax.ffi.pycapsule(handlers.fdma_jax_cpu)]
        if _library.has_cuda():
            capsules.append(jax.ffi.pycapsule(handlers.fdma_jax_cuda))
    except (OSError, AttributeError) as error:
        raise ImportError(f"{path} cannot be used: {error}") from error
    for capsule, name in zip(capsules, ("cpu", "CUDA")):
        jax.ffi.register_ffi_target(TARGET, capsule, platform=name)
