"""Checks of the arguments of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import _arguments
from ._layer_ranks import LayerRanks
from .options import DynamicMaskOptions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from .cache import DynamicMaskCache

HEAD_DIM_MAX = 256  # of the kernels


def require(holds: bool, message: str, error: type[Exception] = ValueError) -> None:
    if not holds:
        raise error(message)


def check_options(
    options: DynamicMaskOptions | None, window: int | None
) -> DynamicMaskOptions | None:
    found = window if options is None else options.keep_window_size
    require(found == window, f"options: its keep_window_size is {found}, want window, {window}")
    return options


def check_sizes(
    hidden: int, heads: int, kv_heads: int, head_dim: int | None, rope_base: float | None
) -> int:
    """The head_dim of a layer of these sizes, of which head_dim may be None."""
    for name, size in (("hidden", hidden), ("heads", heads), ("kv_heads", kv_heads)):
        require(size >= 1, f"{name}: is {size}, want 1 or more")
    require(
        head_dim is not None or hidden % heads == 0,
        f"hidden: is {hidden}, want a multiple of heads, {heads}, if head_dim is None",
    )
    require(heads % kv_heads == 0, f"heads: is {heads}, want a multiple of kv_heads, {kv_heads}")
    dim = hidden // heads if head_dim is None else head_dim
    require(1 <= dim <= HEAD_DIM_MAX, f"head_dim: is {dim}, want 1 to {HEAD_DIM_MAX}")
    takes_dim = dim % 2 == 0 or rope_base is None
    require(takes_dim, f"head_dim: is {dim}, want an even number with rope_base")
    return dim


def check_nope(heads: int, rotary_dim: int, most: int, head_dim: int) -> tuple[int, int]:
    """The NoPE heads of a layer that may have `most`, and their rotated channels."""
    require(
        0 <= _arguments.check_int("nope_heads", heads) <= most,
        f"nope_heads: is {heads}, want 0 to {most}",
    )
    most_dim = head_dim if heads > 0 else 0
    is_dim = 0 <= _arguments.check_int("nope_rotary_dim", rotary_dim) <= most_dim
    wanted = f"nope_rotary_dim: is {rotary_dim}, want an even number, 0 to {most_dim}"
    require(is_dim and rotary_dim % 2 == 0, wanted)
    return heads, rotary_dim


def check_hidden(name: str, length: str, x: torch.Tensor, hidden: int) -> None:
    shape = f"{name} is [batch, {length}, {hidden}]"
    require(x.dim() == 3, f"{name}: rank is {x.dim()}, want 3; {shape}")
    found = x.shape[2]
    require(found == hidden, f"{name}: axis 2 has {found} elements, want {hidden}; {shape}")


def check_positions(positions: torch.Tensor, x: torch.Tensor) -> None:
    """`x` is [batch, len, ...]."""
    fits = positions.dim() == 2 and positions.shape[0] in (1, x.shape[0])
    fits = fits and positions.shape[1] == x.shape[1]
    shape = list(positions.shape)
    require(fits, f"positions: shape is {shape}, want [1 or {x.shape[0]}, {x.shape[1]}]")


def check_memory(hidden: int | None, causal: bool, rope_base: float | None) -> int | None:
    """The width of the memory of a layer with these options."""
    if hidden is not None:
        require(hidden >= 1, f"memory_hidden: is {hidden}, want 1 or more")
        require(not causal, "memory_hidden: is given, want None for a causal layer")
        require(rope_base is None, "memory_hidden: is given, want None for a layer with rope_base")
    return hidden


def check_memory_of_call(
    hidden: int | None,
    x: torch.Tensor,
    memory: torch.Tensor | None,
    cache: DynamicMaskCache | None,
    starts: torch.Tensor | Sequence[int] | None,
) -> None:
    """Check memory, cache and starts of a call; `hidden` is memory_hidden of the layer."""
    if hidden is None:
        require(memory is None, "memory: is given, want None for a layer without memory_hidden")
        return
    require(memory is not None, "memory: is None, want hidden states, as memory_hidden is given")
    check_hidden("memory", "kv_len", memory, hidden)
    require(
        memory.shape[0] == x.shape[0],
        f"memory: axis 0 has {memory.shape[0]} elements, want {x.shape[0]}, the batch of x",
    )
    require(cache is None, "cache: is given, want None with memory")
    require(starts is None, "starts: is given, want None with memory")


def check_ranks(
    group: ProcessGroup | DeviceMesh | None, dropout: float, absent: tuple[Any, ...]
) -> LayerRanks | None:
    """The ranks of a layer. Such a layer has no gap, memory_hidden or options: `absent`."""
    if group is None:
        return None
    for name, given in zip(("gap", "memory_hidden", "options"), absent):
        require(given is None, f"{name}: is given, want None with process_group")
    require(dropout == 0, f"dropout: is {dropout}, want 0 with process_group")
    return LayerRanks(group)
