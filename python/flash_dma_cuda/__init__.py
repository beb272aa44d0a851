"""flash_dma for tensors of CUDA devices alone. It can be imported on every machine. CUDA_AVAILABLE
is true if there are a CUDA device and kernels for it; otherwise fwd() is refused."""

from __future__ import annotations

from typing import Any

import flash_dma
import torch
from flash_dmattn import get_available_backends

__all__ = ["fwd"]


def __getattr__(name: str) -> Any:
    if name == "CUDA_AVAILABLE":  # found on access: an import looks for no device
        return "cuda" in get_available_backends()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    zoh: torch.Tensor | None,
    active_mask: torch.Tensor | None,
    out: torch.Tensor | None = None,
    p_dropout: float = 0.0,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    keep_window_size: int = 2048,
    softcap: float = 0.0,
    return_softmax: bool = False,
    gen: torch.Generator | None = None,
) -> list[torch.Tensor]:
    """flash_dma.fwd() for tensors of a CUDA device.

    Args:
        q: on a CUDA device, float16 or bfloat16; otherwise, and all others, as in flash_dma.fwd().
        k, v, zoh, active_mask, out, p_dropout, softmax_scale, is_causal, keep_window_size, softcap,
            return_softmax, gen: as there.

    Returns:
        As flash_dma.fwd().

    Raises:
        NotImplementedError: no CUDA device, or a build without CUDA kernels; or as flash_dma.fwd().
        ValueError: a q that is on another device; or as flash_dma.fwd().

    Example:
        >>> x = torch.randn(1, 6, 2, 8, dtype=torch.bfloat16)
        >>> if "cuda" in flash_dmattn.get_available_backends():
        ...     x = x.cuda()
        ...     output = flash_dma_cuda.fwd(x, x, x, None, None, is_causal=True)[0]

    Source: arXiv:2205.14135, arXiv:2508.02124.
    """
    if "cuda" not in get_available_backends():
        raise NotImplementedError(
            "flash_dma_cuda.fwd: there is no CUDA device, or flash_dmattn was installed without "
            "CUDA kernels (FDMA_CUDA=ON pip install . builds them); flash_dma.fwd takes CPU tensors"
        )
    if isinstance(q, torch.Tensor) and q.device.type != "cuda":
        raise ValueError(
            f"q: is on {q.device}, want a CUDA device; flash_dma.fwd takes CPU tensors"
        )
    options = (p_dropout, softmax_scale, is_causal, keep_window_size, softcap, return_softmax, gen)
    return flash_dma.fwd(q, k, v, zoh, active_mask, out, *options)
