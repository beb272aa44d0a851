"""What calls ask PyTorch for on each device: new tensors, the current stream, how many threads.

`index` is that of a GPU; -1 is the CPU. PyTorch has faster functions for this than the public ones,
which take as long as a small call; where a version of it lacks them, the public ones serve.
"""

from __future__ import annotations

from typing import Any, Callable, Tuple

import torch

Ints = Tuple[int, ...]
GUARDS: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)


def thread_count(index: int) -> int:
    return torch.get_num_threads() if index < 0 else 0


def current_stream(index: int) -> int:
    """The current stream of a device, as CUDA knows it."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # without an object around it
    return raw(index) if raw is not None else torch.cuda.current_stream(index).cuda_stream


def allocator(index: int) -> Callable[..., torch.Tensor]:
    """A function that makes tensors of a shape, strides and a dtype, without values."""
    device = torch.device("cpu") if index < 0 else torch.device("cuda", index)

    def allocate(shape: Ints, stride: Ints, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    if index < 0:
        return getattr(GUARDS, "_empty_strided_cpu", allocate)
    on_current = getattr(GUARDS, "_empty_strided_cuda", None)
    if on_current is None:
        return allocate

    def allocate_fast(shape: Ints, stride: Ints, dtype: torch.dtype) -> torch.Tensor:
        make = on_current if torch.cuda.current_device() == index else allocate
        return make(shape, stride, dtype)

    return allocate_fast
