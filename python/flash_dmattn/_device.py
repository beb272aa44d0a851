"""What calls ask PyTorch for on each device: new tensors, the current stream, how many threads.

`index` is that of a GPU; -1 is the CPU. PyTorch has faster functions for this than the public ones,
which take as long as a small call; where a version of it lacks them, the public ones serve.
"""

from __future__ import annotations

from typing import Any, Callable, Tuple

import torch

Ints = Tuple[int, ...]
Allocator = Callable[[Ints, Ints, torch.dtype], torch.Tensor]
GUARDS: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)


def thread_count(index: int) -> int:
    return torch.get_num_threads() if index < 0 else 0


def stream_function() -> Callable[[int], int]:
    """A function for the current stream of a device, as CUDA knows it."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # without an object around it
    return raw if raw is not None else lambda index: torch.cuda.current_stream(index).cuda_stream


def device_function() -> Callable[[], int]:
    """A function for the number of the current device."""
    raw = getattr(torch._C, "_cuda_getDevice", None)  # a build without CUDA has none
    return raw if raw is not None else torch.cuda.current_device


def is_same_device(one: torch.device, other: torch.device) -> bool:
    """Whether two names mean one device. Without an index they mean the current device."""
    if one == other:
        return True
    current = torch.cuda.current_device() if one.type == other.type == "cuda" else 0
    first, second = (current if x.index is None else x.index for x in (one, other))
    return one.type == other.type and first == second


def allocators(index: int) -> tuple[Allocator, Allocator]:
    """Functions that make tensors of a shape, strides and a dtype, without values: on the current
    device if that is the one, and on the device wherever the current one is."""
    device = torch.device("cpu") if index < 0 else torch.device("cuda", index)

    def allocate(shape: Ints, stride: Ints, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    name = "_empty_strided_cpu" if index < 0 else "_empty_strided_cuda"
    return getattr(GUARDS, name, allocate), allocate


def allocator(index: int) -> Allocator:
    """A function that makes tensors of a shape, strides and a dtype, without values."""
    on_current, allocate = allocators(index)
    if index < 0 or on_current is allocate:
        return on_current
    current_device = device_function()

    def allocate_fast(shape: Ints, stride: Ints, dtype: torch.dtype) -> torch.Tensor:
        make = on_current if current_device() == index else allocate
        return make(shape, stride, dtype)

    return allocate_fast
