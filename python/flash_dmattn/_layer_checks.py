"""Checks of the arguments of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

import torch
from torch import nn

from . import _arguments, _types
from .cache import DynamicMaskCache
from .layer_caches import LayerCaches
from .options import DynamicMaskOptions

if TYPE_CHECKING:
    from .nn import DynamicMaskAttention

HEAD_DIM_MAX = 256  # of the kernels
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def require(holds: bool, message: str, error: type[Exception] = ValueError) -> None:
    if not holds:
        raise error(message)


def check_types(layer: type, given: dict[str, Any]) -> None:
    _types.check_call(layer, given)
    _arguments.check_device(given["device"])
    if given["dtype"] is not None:
        _arguments.check_float("dtype", given["dtype"])


def check_options(
    options: DynamicMaskOptions | None, window: int | None
) -> DynamicMaskOptions | None:
    found = window if options is None else options.keep_window_size
    require(found == window, f"options: its keep_window_size is {found}, want window, {window}")
    return options


def check_sizes(
    hidden: int, heads: int, kv_heads: int, head_dim: int | None, rope_base: float | None
) -> int:
    """Check the sizes of a layer, and return its head_dim, which may be given as None."""
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
    """Check the number of NoPE heads of a layer, at most `most`, and of their rotated channels."""
    require(
        0 <= _arguments.check_int("nope_heads", heads) <= most,
        f"nope_heads: is {heads}, want 0 to {most}",
    )
    most_dim = head_dim if heads > 0 else 0
    is_dim = 0 <= _arguments.check_int("nope_rotary_dim", rotary_dim) <= most_dim
    wanted = f"nope_rotary_dim: is {rotary_dim}, want an even number, 0 to {most_dim}"
    require(is_dim and rotary_dim % 2 == 0, wanted)
    return heads, rotary_dim


def check_gate(units: int, lifetime: float) -> None:
    """Check lifetime_units and initial_lifetime."""
    require(
        _arguments.check_int("lifetime_units", units) >= 0,
        f"lifetime_units: is {units}, want 0 or more",
    )
    is_lifetime = 0 < lifetime < float("inf")
    require(is_lifetime, f"initial_lifetime: is {lifetime}, want a finite number above 0")


def check_lifetimes(
    module: DynamicMaskAttention, units: int, lifetime: float, dt_bias: bool
) -> None:
    """check_gate(), and a check against the other options of a layer."""
    check_gate(units, lifetime)
    if units == 0:
        return
    wants = "want 0 unless the layer is causal, has a window, and not all heads slide"
    selects = module.causal and module.window is not None
    selects = selects and module.sliding_heads < module.kv_heads
    require(selects, f"lifetime_units: is {units}, {wants}")
    for name in ("gap", "options"):
        is_absent = getattr(module, name) is None
        require(is_absent, f"{name}: is given, want None with lifetime_units")
    flags = {"dt_bias": dt_bias, "targets_only": module.targets_only}
    for name, flag in flags.items():
        require(not flag, f"{name}: is True, want False with lifetime_units")
    found = module.initial_a
    require(found == 0, f"initial_a: is {found}, want 0 with lifetime_units")


# A size that is formatted into a message becomes a constant of a graph that is being traced. So
# messages are formatted only where a check fails.


def check_hidden(name: str, length: str, x: torch.Tensor, hidden: int) -> None:
    _types.check_tensor(name, x)
    if x.dim() != 3:
        found = f"rank is {x.dim()}, want 3"
    elif x.shape[2] != hidden:
        found = f"axis 2 has {_types.counted(x.shape[2], 'element')}, want {hidden}"
    else:
        return
    raise ValueError(f"{name}: {found}; {name} is [batch, {length}, {hidden}]")


def check_like(name: str, x: torch.Tensor, layer: str, weight: torch.Tensor) -> None:
    """Check that states can be multiplied by a weight of the layer. PyTorch's own message names
    neither of them."""
    if x.device != weight.device:
        raise ValueError(f"{name}: is on {x.device}, want {weight.device}, where {layer} is")
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        found, want = _arguments.name_of_dtype(x.dtype), _arguments.name_of_dtype(weight.dtype)
        raise ValueError(f"{name}: dtype is {found}, {layer}'s is {want}")


# torch.nn.MultiheadAttention has the second one.
PLAIN = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)


def check_input(name: str, x: torch.Tensor | None, linear: Any) -> None:
    """check_like() for the input of a projection. It is skipped if the projection may compute more
    than its weight says: it has been replaced, or it has hooks, for example hooks that bring a
    weight from another device."""
    if x is None or torch.compiler.is_compiling():
        return
    is_plain = type(linear) in PLAIN and "forward" not in vars(linear)
    if is_plain and not linear._forward_pre_hooks and not linear.weight.is_meta:
        check_like(name, x, "the layer", linear.weight)


def check_positions(positions: torch.Tensor, x: torch.Tensor) -> None:
    """`x` is [batch, len, heads, head_dim]."""
    _types.check_tensor("x", x)
    _types.check_tensor("positions", positions)
    if x.dim() != 4:
        raise ValueError(f"x: rank is {x.dim()}, want 4; x is [batch, len, heads, head_dim]")
    if positions.dtype not in INTEGERS:
        found = _arguments.name_of_dtype(positions.dtype)
        raise ValueError(f"positions: dtype is {found}, want integers")
    if positions.device != x.device:
        raise ValueError(f"positions: is on {positions.device}, want {x.device}, where x is")
    fits = positions.dim() == 2 and positions.shape[0] in (1, x.shape[0])
    if not fits or positions.shape[1] != x.shape[1]:
        shape = list(positions.shape)
        raise ValueError(f"positions: shape is {shape}, want [1 or {x.shape[0]}, {x.shape[1]}]")


def check_memory(hidden: int | None, causal: bool, rope_base: float | None) -> int | None:
    """Check a layer's memory_hidden against its other options."""
    if hidden is not None:
        require(hidden >= 1, f"memory_hidden: is {hidden}, want 1 or more")
        require(not causal, "memory_hidden: is given, want None for a causal layer")
        require(rope_base is None, "memory_hidden: is given, want None for a layer with rope_base")
    return hidden


def check_memory_of_call(
    hidden: int | None,
    x: torch.Tensor,
    memory: torch.Tensor | None,
    cache: DynamicMaskCache | LayerCaches | None,
    starts: torch.Tensor | Sequence[int] | None,
) -> None:
    """Check memory, cache and starts of a call; `hidden` is memory_hidden of the layer."""
    if hidden is None:
        require(memory is None, "memory: is given, want None for a layer without memory_hidden")
        return
    require(memory is not None, "memory: is None, want hidden states, as memory_hidden is given")
    assert memory is not None
    check_hidden("memory", "kv_len", memory, hidden)
    if memory.shape[0] != x.shape[0]:
        found = _types.counted(memory.shape[0], "element")
        raise ValueError(f"memory: axis 0 has {found}, want {x.shape[0]}, the batch of x")
    require(cache is None, "cache: is given, want None with memory")
    require(starts is None, "starts: is given, want None with memory")


def check_cache(
    module: DynamicMaskAttention,
    x: torch.Tensor,
    cache: DynamicMaskCache | LayerCaches | None,
    layer: int,
    index: torch.Tensor | None,
) -> tuple[DynamicMaskCache | None, int]:
    """Check the cache of a call: return the cache that has the keys of the layer, and the layer's
    number in it."""
    _arguments.check_int("layer", layer)
    if cache is None:
        return None, 0
    if isinstance(cache, LayerCaches):
        cache, layer = cache.of_layer(layer)
    if not hasattr(cache, "attend"):
        raise _types.refusal("cache", cache, "a DynamicMaskCache")
    selects = module.causal and module.window is not None
    require(selects, "cache: is given, want None unless the layer is causal and has a window")
    require(module.gap is None, f"cache: is given, want None for a layer of gap {module.gap}")
    require(module.options is None, "cache: is given, want None for a layer with options")
    found, want = cache.bias_form, module._cache_form
    require(found == want, f"cache: its bias_form is {found!r}, want {want!r}")
    for name in ("window", "recent", "sinks"):
        found, want = getattr(cache.keys, name), getattr(module, name)
        if found != want:
            raise ValueError(f"cache: its {name} is {found}, want the layer's, {want}")
    if index is None and isinstance(cache, DynamicMaskCache) and cache.batch != x.shape[0]:
        count = _types.counted(cache.batch, "sequence")
        raise ValueError(f"cache: has {count}, x has {x.shape[0]}")
    return cache, layer


def check_takes_cache(module: DynamicMaskAttention) -> None:
    selects = module.causal and module.window is not None
    wanted = "new_cache: want a causal layer with a window, without a gap and options"
    require(selects and module.gap is None and module.options is None, wanted)


def check_starts(
    starts: torch.Tensor | Sequence[int] | None, x: torch.Tensor, takes_list: bool = True
) -> None:
    if starts is None:
        return
    if not isinstance(starts, torch.Tensor):
        if not (takes_list and _types.is_list_of_ints(starts)):
            kinds = (
                "a torch.Tensor, a list of ints or None" if takes_list else "a torch.Tensor or None"
            )
            raise _types.refusal("starts", starts, kinds)
        for number in starts:
            most = _arguments.INT32_MAX
            require(0 <= number <= most, f"starts: has {number}, want 0 to {most}")
        return
    if starts.dim() != 1:
        shape = "starts is [sequences + 1]"
        raise ValueError(f"starts: rank is {starts.dim()}, want 1; {shape}")
    if starts.device.type not in ("cpu", x.device.type):
        raise ValueError(f"starts: is on {starts.device}, want {x.device}, where x is")


def check_options_of_call(
    positions: torch.Tensor | None,
    cache: DynamicMaskCache | LayerCaches | None,
    starts: torch.Tensor | Sequence[int] | None,
    index: torch.Tensor | None,
    n_tokens: torch.Tensor | int | None,
    draft: bool,
    lengths: Sequence[int] | None,
) -> None:
    """Check types, and refuse arguments that only a call with, or without, a cache may have."""
    _types.check_flag("draft", draft)
    if positions is not None:
        _types.check_tensor("positions", positions)
    if cache is None:
        require(index is None, "index: is given, want None without a cache")
        require(n_tokens is None, "n_tokens: is given, want None without a cache")
        require(not draft, "draft: is True, want False without a cache")
    else:
        require(starts is None, "starts: is given, want None with a cache")
        require(lengths is None, "lengths: is given, want None with a cache")
