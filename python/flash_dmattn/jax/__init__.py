"""Flash Dynamic Mask Attention for JAX: attention of each query over its `window` best keys.

    import flash_dmattn.jax as fdma

The functions have the names of the package's for PyTorch. They take arrays of JAX, on the CPU and
on CUDA devices; this module does not import PyTorch. They work under jax.jit, jax.grad and
jax.vmap.
Options are static: numbers and names, not traced arrays. docs/jax.md has examples.
"""

from . import (
    _call,
    _versions,  # noqa: F401 (refuses a JAX of another version)
)
from ._cache import KeyCache, decode, prefill
from ._functions import Selection, attention, flash_dma_attention, score, select

_call.register()

__all__ = [
    "KeyCache",
    "Selection",
    "attention",
    "decode",
    "flash_dma_attention",
    "prefill",
    "score",
    "select",
]
