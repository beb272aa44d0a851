"""The dtypes of tensors: which the C library has, and which of them belong together in one call."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from . import _arguments, _library
from ._arguments import MaybeTensor

DTYPES = {
    torch.float32: _library.FLOAT32,
    torch.float16: _library.FLOAT16,
    torch.bfloat16: _library.BFLOAT16,
    torch.float64: _library.FLOAT64,
    torch.int32: _library.INT32,
    torch.int64: _library.INT64,
    torch.uint8: _library.UINT8,
    torch.bool: _library.UINT8,
}
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Tensors that have one dtype in a call.
OF_ONE_DTYPE = (
    *("query", "key", "value", "out_a", "out_b", "key_carried", "value_carried"),
    *("cache_key", "cache_value"),
)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "")


def check_float(name: str, dtype: torch.dtype) -> None:
    """Check an argument of this name that is a dtype.

    Raises:
        NotImplementedError: keys and values cannot have it.
    """
    if dtype not in FLOATS:
        wanted = "float32, float16, bfloat16 or float64"
        raise NotImplementedError(f"{name}: is {name_of(dtype)}, want {wanted}")


def check_dtype(name: str, tensor: torch.Tensor) -> None:
    """Check the dtype of the argument of this name.

    Raises:
        NotImplementedError: the C library does not take it.
    """
    dtype, shown = name_of(tensor.dtype), _arguments.SHOWN.get(name, name)
    if name in _arguments.BOOL_INPUTS and tensor.dtype not in (torch.bool, torch.uint8):
        hint = name == "attn_mask" and tensor.dtype.is_floating_point
        use = "; a mask that is added to logits is an attn_bias" if hint else ""
        raise NotImplementedError(f"{name}: dtype is {dtype}, supported: bool or uint8{use}")
    if name in _arguments.INT32_INPUTS and tensor.dtype != torch.int32:
        raise NotImplementedError(f"{shown}: dtype is {dtype}, supported: int32")
    if tensor.dtype not in DTYPES:
        raise NotImplementedError(f"{shown}: dtype is {dtype}, which no kernel supports")


def check_same_dtype(tensors: Mapping[str, MaybeTensor]) -> None:
    """Check that queries, keys and values have one dtype. Whether kernels have it, the C library
    says.

    Raises:
        ValueError: two have different ones, each of which kernels have.
    """
    first = None
    for name in OF_ONE_DTYPE:
        tensor = tensors.get(name)
        if tensor is None or tensor.dtype not in FLOATS:
            continue
        if first is None:
            first, want = name, tensor.dtype
        elif tensor.dtype != want:
            shown, found = _arguments.SHOWN.get(name, name), name_of(tensor.dtype)
            raise ValueError(f"{shown}: dtype is {found}, {first}'s is {name_of(want)}")
