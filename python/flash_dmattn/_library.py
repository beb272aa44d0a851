"""The C library as ctypes sees it: a mirror of fdma.h, and nothing of PyTorch.

Every class mirrors the struct of its name (ForwardArgs is fdma_forward_args), field for field; what
the fields mean is written in fdma.h.

The library is the file that FDMA_LIBRARY names or, where that is not set, the one beside this file.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import (
    POINTER,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any, NamedTuple

OK, INVALID_ARGUMENT, UNSUPPORTED, WORKSPACE_TOO_SMALL, CUDA_ERROR = range(5)
FLOAT32, FLOAT16, BFLOAT16, FLOAT64, INT32, UINT8, INT64 = range(1, 8)
BIAS_FORMS = {"exp": 0, "linear": 1, "none": 2}
SCOPE_DEFAULT = 0
SCOPES = {"causal": 1, "global": 2}

ERRORS: dict[int, type[Exception]] = {
    INVALID_ARGUMENT: ValueError,
    UNSUPPORTED: NotImplementedError,
}


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("shape", c_int64 * 4),
        ("stride", c_int64 * 4),
        ("dtype", c_int),
        ("rank", c_int32),
        ("reserved", c_int32 * 4),
    ]


class Exec(ctypes.Structure):
    _fields_ = [
        ("workspace", c_void_p),
        ("workspace_size", c_size_t),
        ("stream", c_void_p),
        ("kernel", c_char_p),
        ("device", c_int32),
        ("threads", c_int32),
        ("trusted", c_int32),
        ("reserved", c_int32 * 3),
    ]


def tensors(names: str) -> list[tuple[str, Any]]:
    return [(name, Tensor) for name in names.split()]


class Sized(ctypes.Structure):
    """A struct that begins with its own size; the fields that are not given are zero."""

    _fields_ = [("size", c_size_t)]

    def __init__(self, **fields: Any) -> None:
        super().__init__(size=ctypes.sizeof(self), **fields)


class ScoreArgs(Sized):
    _fields_ = [
        *tensors("v dt_proj a dt_bias key_valid score bias"),
        ("bias_form", c_int),
        ("reserved", c_int32),
        ("exec", Exec),
        *tensors("kv_used"),
    ]


class Selection(Sized):
    _fields_ = [
        *tensors("expiry slot"),
        ("window", c_int64),
        ("recent", c_int64),
        ("sinks", c_int64),
        ("kv_len", c_int64),
        ("scope", c_int),
        ("reserved", c_int32),
        ("gap", c_double),
    ]


class Table(ctypes.Structure):
    _fields_ = [*tensors("score position seen"), ("reserved", c_int32 * 8)]


class SelectArgs(Sized):
    _fields_ = [
        *tensors("score key_valid starts"),
        ("table_in", Table),
        ("table_out", Table),
        ("selection", POINTER(Selection)),
        ("window", c_int64),
        ("recent", c_int64),
        ("sinks", c_int64),
        ("scope", c_int),
        ("reserved", c_int32),
        ("exec", Exec),
        *tensors("kv_used"),
        ("gap", c_double),
    ]


class ListsArgs(Sized):
    _fields_ = [
        ("selection", POINTER(Selection)),
        *tensors("starts list count"),
        ("q_len", c_int64),
        ("tile_len", c_int64),
        ("causal", c_int32),
        ("reserved", c_int32),
        ("exec", Exec),
        *tensors("kv_used"),
    ]


class ForwardArgs(Sized):
    _fields_ = [
        *tensors("q k v bias key_valid starts k_carried v_carried bias_carried out lse"),
        ("selection", POINTER(Selection)),
        ("scale", c_double),
        ("softcap", c_double),
        ("causal", c_int32),
        ("reserved", c_int32),
        ("exec", Exec),
        *tensors("kv_used sink_logit"),
        ("dropout", c_double),
        ("seed", c_uint64),
        ("offset", c_uint64),
        *tensors("rng_state attn_mask attn_bias mask_lists"),
    ]


class AttentionArgs(Sized):
    _fields_ = [
        *tensors("q k v dt_proj a dt_bias key_valid starts"),
        ("table_in", Table),
        ("table_out", Table),
        *tensors("k_carried v_carried bias_carried out lse score bias"),
        ("selection", POINTER(Selection)),
        ("window", c_int64),
        ("recent", c_int64),
        ("sinks", c_int64),
        ("scope", c_int),
        ("bias_form", c_int),
        ("scale", c_double),
        ("softcap", c_double),
        ("causal", c_int32),
        ("reserved", c_int32),
        ("exec", Exec),
        *tensors("kv_used sink_logit"),
        ("dropout", c_double),
        ("seed", c_uint64),
        ("offset", c_uint64),
        *tensors("rng_state"),
        ("gap", c_double),
    ]


class BackwardArgs(Sized):
    _fields_ = [
        *tensors("dout dlse out lse q k v bias key_valid starts k_carried v_carried bias_carried"),
        *tensors("dq dk dv dbias dk_carried dv_carried dbias_carried"),
        ("selection", POINTER(Selection)),
        ("scale", c_double),
        ("softcap", c_double),
        ("causal", c_int32),
        ("deterministic", c_int32),
        ("accumulate", c_int32),
        ("reserved", c_int32),
        ("exec", Exec),
        *tensors("kv_used sink_logit dsink_logit"),
        ("dropout", c_double),
        ("seed", c_uint64),
        ("offset", c_uint64),
        *tensors("rng_state attn_mask attn_bias dattn_bias mask_lists"),
    ]


class Cache(ctypes.Structure):
    _fields_ = [
        *tensors("k v bias"),
        ("table", Table),
        ("sequences", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("window", c_int64),
        ("recent", c_int64),
        ("sinks", c_int64),
        ("dtype", c_int),
        ("device", c_int32),
        *tensors("page_table"),
        ("reserved", c_int32 * 24),
    ]


class DecodeArgs(Sized):
    _fields_ = [
        ("cache", Cache),
        *tensors("index q k v dt_proj a dt_bias score n_tokens commit out lse"),
        ("scale", c_double),
        ("softcap", c_double),
        ("bias_form", c_int),
        ("reserved", c_int32),
        ("exec", Exec),
        *tensors("sink_logit"),
    ]


class CacheStoreArgs(Sized):
    _fields_ = [
        ("cache", Cache),
        *tensors("index k v score starts"),
        ("selection", POINTER(Selection)),
        ("bias_form", c_int),
        ("reserved", c_int32),
        ("exec", Exec),
    ]


class CacheCopyArgs(Sized):
    _fields_ = [
        ("cache", Cache),
        *tensors("from to"),
        ("reserved", c_int32),
        ("exec", Exec),
    ]


class ProbabilitiesArgs(Sized):
    _fields_ = [
        *tensors("q k bias key_valid starts kv_used k_carried bias_carried lse probability"),
        ("selection", POINTER(Selection)),
        ("scale", c_double),
        ("softcap", c_double),
        ("causal", c_int32),
        ("reserved", c_int32),
        ("exec", Exec),
        ("dropout", c_double),
        ("seed", c_uint64),
        ("offset", c_uint64),
        *tensors("rng_state attn_mask attn_bias"),
    ]


class ScoreBackwardArgs(Sized):
    _fields_ = [
        *tensors("dbias v dt_proj a dt_bias key_valid dv ddt_proj da ddt_bias"),
        ("bias_form", c_int),
        ("accumulate", c_int32),
        ("exec", Exec),
        *tensors("kv_used"),
    ]


class AttentionBackwardArgs(Sized):
    _fields_ = [
        *tensors("dout dlse out lse q k v dt_proj a dt_bias bias key_valid starts"),
        *tensors("k_carried v_carried bias_carried"),
        *tensors("dq dk dv ddt_proj da ddt_bias dk_carried dv_carried dbias_carried"),
        ("selection", POINTER(Selection)),
        ("scale", c_double),
        ("softcap", c_double),
        ("bias_form", c_int),
        ("causal", c_int32),
        ("deterministic", c_int32),
        ("accumulate", c_int32),
        ("exec", Exec),
        *tensors("kv_used sink_logit dsink_logit"),
        ("dropout", c_double),
        ("seed", c_uint64),
        ("offset", c_uint64),
        *tensors("rng_state"),
    ]


class MergeArgs(Sized):
    _fields_ = [
        *tensors("out_a lse_a out_b lse_b out lse"),
        ("exec", Exec),
    ]


class MergeBackwardArgs(Sized):
    _fields_ = [
        *tensors("dout dlse out_a lse_a out_b lse_b dout_a dlse_a dout_b dlse_b"),
        ("exec", Exec),
    ]


class KernelInfo(Sized):
    _fields_ = [
        ("name", c_char_p),
        ("operation", c_char_p),
        ("missing", c_char_p),
    ]


class AttentionKernels(Sized):
    _fields_ = [
        ("score", c_char_p),
        ("select", c_char_p),
        ("forward", c_char_p),
    ]


class AttentionBackwardKernels(Sized):
    _fields_ = [
        ("score", c_char_p),
        ("backward", c_char_p),
        ("score_backward", c_char_p),
    ]


class DeviceInfo(Sized):
    _fields_ = [
        ("name", c_char * 96),
        ("features", c_char * 256),
        ("cores", c_int32),
        ("reserved", c_int32),
    ]


class Kernel(NamedTuple):
    """A kernel of the library; `missing` names what this machine lacks for it, or is None."""

    name: str
    operation: str
    missing: str | None


# The argument struct of each call; each has a query for its workspace.
CALLS: dict[str, type[Sized]] = {
    "fdma_score": ScoreArgs,
    "fdma_select": SelectArgs,
    "fdma_lists": ListsArgs,
    "fdma_forward": ForwardArgs,
    "fdma_probabilities": ProbabilitiesArgs,
    "fdma_attention": AttentionArgs,
    "fdma_cache_store": CacheStoreArgs,
    "fdma_cache_copy": CacheCopyArgs,
    "fdma_decode": DecodeArgs,
    "fdma_backward": BackwardArgs,
    "fdma_score_backward": ScoreBackwardArgs,
    "fdma_attention_backward": AttentionBackwardArgs,
    "fdma_merge": MergeArgs,
    "fdma_merge_backward": MergeBackwardArgs,
}
# What a call answers with when it is asked for its kernels: several names for a fused one.
KERNEL_NAMES: dict[str, Any] = {
    **dict.fromkeys(CALLS, c_char_p),
    "fdma_attention": AttentionKernels,
    "fdma_attention_backward": AttentionBackwardKernels,
}

# Arguments of each function; all but those of RESULTS return an fdma_status.
FUNCTIONS: dict[str, list[Any]] = {
    "fdma_last_error": [],
    "fdma_status_name": [c_int],
    "fdma_version": [],
    "fdma_dense_tensor": [c_void_p, c_int, c_int32, POINTER(c_int64)],
    **{f"fdma_tensor_{n}d": [c_void_p, c_int, *[c_int64] * n] for n in range(1, 5)},
    **{name: [POINTER(args)] for name, args in CALLS.items()},
    **{f"{name}_workspace": [POINTER(args), POINTER(c_size_t)] for name, args in CALLS.items()},
    **{
        f"{name}_kernel": [POINTER(args), POINTER(KERNEL_NAMES[name])]
        for name, args in CALLS.items()
    },
    "fdma_mask_lists": [POINTER(ForwardArgs)],
    "fdma_mask_lists_size": [POINTER(ForwardArgs), POINTER(c_size_t)],
    "fdma_cache_bytes": [POINTER(Cache), POINTER(c_size_t)],
    "fdma_cache_init": [POINTER(Cache), c_void_p],
    "fdma_cache_drop": [POINTER(Cache), c_int64],
    "fdma_kernel_count": [],
    "fdma_kernel_name": [c_int32],
    "fdma_describe_kernel": [c_int32, POINTER(KernelInfo)],
    "fdma_device_count": [],
    "fdma_describe_device": [c_int32, POINTER(DeviceInfo)],
    "fdma_tune": [c_void_p],  # the struct is in tuning.py
    "fdma_tuning_load": [c_char_p],
    "fdma_tuning_save": [c_char_p],
    "fdma_tuning_line": [c_int32],
}
RESULTS: dict[str, Any] = {
    "fdma_last_error": c_char_p,
    "fdma_status_name": c_char_p,
    "fdma_version": c_char_p,
    "fdma_dense_tensor": Tensor,
    **{f"fdma_tensor_{n}d": Tensor for n in range(1, 5)},
    "fdma_kernel_count": c_int32,
    "fdma_kernel_name": c_char_p,
    "fdma_device_count": c_int32,
    "fdma_tuning_line": c_char_p,
}


def find(variable: str = "FDMA_LIBRARY", name: str = "libfdma") -> Path:
    """Where a library is: the file that the environment variable names, or the one of this name
    beside this file.

    Raises:
        ImportError: it is not there; the message says where it was looked for.
    """
    chosen = os.environ.get(variable)
    if chosen:
        if not Path(chosen).is_file():
            raise ImportError(f"{variable} is {chosen!r}, which is not a file")
        return Path(chosen).absolute()
    name += ".dylib" if sys.platform == "darwin" else ".so"
    # An editable install has two folders: that of the sources, and that of the library.
    candidates = [Path(folder) / name for folder in sys.modules[__package__].__path__]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    tried = " or ".join(map(str, candidates))
    raise ImportError(f"no library at {tried}; set {variable} to where {name} is")


def load(path: Path) -> ctypes.CDLL:
    """The library at `path`, with its functions declared.

    Raises:
        ImportError: the file is no library, or one of another version.
    """
    try:
        loaded = ctypes.CDLL(str(path))
        for name, arguments in FUNCTIONS.items():
            function = getattr(loaded, name)
            function.argtypes = arguments
            function.restype = RESULTS.get(name, c_int)
    except (OSError, AttributeError) as error:
        raise ImportError(f"{path} cannot be used: {error}") from error
    return loaded


library = load(find())


def check(status: int) -> None:
    """Turn the status of the call just made by this thread into an exception with its message.

    Raises:
        ValueError: FDMA_INVALID_ARGUMENT.
        NotImplementedError: FDMA_UNSUPPORTED.
        RuntimeError: any other failure.
    """
    if status != OK:
        raise ERRORS.get(status, RuntimeError)(library.fdma_last_error().decode())


def version() -> str:
    """The library's version, "major.minor.patch"."""
    return library.fdma_version().decode()


def kernels() -> list[Kernel]:
    """All kernels of the library in the order of preference, those that cannot run here too."""
    found = []
    for index in range(library.fdma_kernel_count()):
        info = KernelInfo()
        check(library.fdma_describe_kernel(index, ctypes.byref(info)))
        missing = None if info.missing is None else info.missing.decode()
        found.append(Kernel(info.name.decode(), info.operation.decode(), missing))
    return found


def backends() -> list[str]:
    """The first components of the names of kernels that can run here, the preferred one first."""
    names = [kernel.name for kernel in kernels() if kernel.missing is None]
    return list(dict.fromkeys(name.split("/")[0] for name in names))


def has_cuda() -> bool:
    """Whether the library was built with CUDA kernels, usable on this machine or not."""
    return any(kernel.name.startswith("cuda/") for kernel in kernels())
