"""FlashAttention-4 as a peer on a CUDA device, if the package flash-attn-4 is installed.

It is flash_attn.cute, a package inside flash_attn, whose other parts flash-attn may have installed.
It compiles its kernels at the first call of a shape.
"""

from __future__ import annotations

from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any

import torch

NAME = "flash4"


def is_installed() -> bool:
    """True if flash_attn.cute is installed. Imports neither that nor flash_attn."""
    outer = find_spec("flash_attn")
    folders = outer.submodule_search_locations if outer else None
    return folders is not None and PathFinder.find_spec("flash_attn.cute", folders) is not None


def attend(inputs: Any) -> torch.Tensor:
    """Causal attention to all keys of inputs.fdma, differentiable: out [batch, length, q_heads,
    head_dim]."""
    from flash_attn.cute import flash_attn_func

    # always with lse, so that calls with and without gradients use one compiled kernel
    return flash_attn_func(*inputs.fdma, causal=True, return_lse=True)[0]
