"""flash-dmattn's module of this name."""

from __future__ import annotations

from .. import _library

__all__ = ["is_flash_dmattn_available"]


def is_flash_dmattn_available() -> bool:
    """True if there is a CUDA device and the library has kernels for it, as in flash-dmattn. The
    functions take CPU tensors on every machine."""
    return "cuda" in _library.backends()
