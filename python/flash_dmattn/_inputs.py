"""What the functions of the package do with arguments that the C library does not see."""

from __future__ import annotations

import os
import re
from typing import Any, Callable

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from . import _types
from ._device import is_same_device
from .ops import NO_TANGENTS


def refuse_tangents(name: str, *tensors: torch.Tensor | None) -> None:
    """Refuse tensors with forward-mode tangents, which an operator would silently ignore. They
    are visible only here, before dispatch; outside of forward mode there is nothing to check."""
    if getattr(forward_ad, "_current_level", 0) < 0:
        return
    for tensor in tensors:
        is_tensor = isinstance(tensor, torch.Tensor)  # the call refuses others
        if is_tensor and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(NO_TANGENTS.format(name))


DROPS_ALL = 1 - 2**-17  # the least dropout_p that is rounded to 1, as a multiple of 2^-16


def check_dropout(dropout_p: float, name: str = "dropout_p") -> None:
    if type(dropout_p) is not float and not _types.is_number(dropout_p):
        raise _types.refusal(name, dropout_p, "a number from 0 to 1")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"{name}: is {dropout_p}, want a number from 0 to 1")


def kernel_dropout(
    dropout_p: float, rng_state: torch.Tensor | None
) -> tuple[float, torch.Tensor | None]:
    """dropout_p and rng_state as kernels get them. They take numbers that are rounded to less than
    1: with others they compute without dropout, and finish() drops what they return."""
    return (0.0, None) if dropout_p >= DROPS_ALL else (dropout_p, rng_state)


def drop_all(results: torch.Tensor) -> torch.Tensor:
    """Zeros, whose gradients are zeros too."""
    return results.masked_fill(results.new_ones((), dtype=torch.bool), 0)


def pad_head_dim(
    rows: tuple[Any, ...], dt_proj: torch.Tensor | None = None
) -> tuple[tuple[Any, ...], torch.Tensor | None, int | None]:
    """`rows` [batch, len, heads, head_dim], the last of which has kv_heads heads, and dt_proj, with
    zeros in the place of the channels that head_dim lacks to a multiple of 8, which kernels want;
    and head_dim, None if nothing was added. The call refuses tensors that do not fit each other."""
    is_tensor = isinstance(rows[0], torch.Tensor) and rows[0].dim() == 4
    head_dim = rows[0].shape[-1] if is_tensor else 0
    added = (0, -head_dim % 8)
    if added[1] == 0 or head_dim > 256:
        return rows, dt_proj, None
    fits = [isinstance(x, torch.Tensor) and x.shape[3:] == rows[0].shape[3:] for x in rows]
    if not all(fits):
        return rows, dt_proj, None
    if isinstance(dt_proj, torch.Tensor):
        kv_heads = rows[-1].shape[2]
        if dt_proj.dim() != 2 or dt_proj.shape[1] != kv_heads * head_dim:
            return rows, dt_proj, None
        dt_proj = F.pad(dt_proj.unflatten(1, (kv_heads, head_dim)), added).flatten(1)
    return tuple(F.pad(row, added) for row in rows), dt_proj, head_dim


def finish(out: torch.Tensor, head_dim: int | None, dropout_p: float = 0.0) -> torch.Tensor:
    """out of a call with pad_head_dim() and kernel_dropout()."""
    out = out if head_dim is None else out[..., :head_dim].contiguous()
    return drop_all(out) if dropout_p >= DROPS_ALL else out


def draw_state(
    query: torch.Tensor,
    dropout_p: float,
    generator: torch.Generator | None,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The seed and the offset of dropout: rng_state if it is given, otherwise drawn from
    `generator`; None without dropout."""
    check_dropout(dropout_p)
    if generator is not None:
        if not isinstance(generator, torch.Generator):
            raise _types.refusal("generator", generator, "a torch.Generator")
        if not is_same_device(generator.device, query.device):
            raise ValueError(
                f"generator: is on {generator.device}, want {query.device}, where query is"
            )
        if rng_state is not None:
            raise ValueError("generator: is given, want None with rng_state")
    if dropout_p == 0 or rng_state is not None:
        return rng_state
    return torch.randint((1 << 63) - 1, (2,), generator=generator, device=query.device)


def check_no_bool(name: str, number: float | None) -> None:
    """A call with another order of arguments has a bool in the place of a number."""
    if isinstance(number, bool):
        raise TypeError(f"{name}: is {number}, a bool, want a number or None")


def either(name: str, value: Any, other: str, given: Any) -> Any:
    """An argument that has two names."""
    if value is not None and given is not None:
        raise TypeError(f"{other}: is given, want None beside {name}, as both mean the same")
    return given if value is None else value


def choose_scale(softmax_scale: float | None, scale: float | None) -> float | None:
    """The factor of logits, which callers give under one of two names."""
    if softmax_scale is not None:
        check_no_bool("softmax_scale", softmax_scale)
    if scale is None:
        return softmax_scale
    check_no_bool("scale", scale)
    if not _types.is_number(scale):
        raise _types.refusal("scale", scale, "a number or None")
    if not scale > 0:
        raise ValueError(f"scale: is {scale:g}, want a positive number, or None for the default")
    if softmax_scale is None:
        return scale
    if not _types.is_number(softmax_scale):
        raise _types.refusal("softmax_scale", softmax_scale, "a number or None")
    if scale != softmax_scale:
        raise ValueError(f"scale: is {scale}, want None, or softmax_scale, {softmax_scale}")
    return scale


def as_bool_mask(
    mask: torch.Tensor | None, name: str = "attn_mask", added: str = "attn_bias"
) -> torch.Tensor | None:
    """A mask of floating-point numbers as one of bool, true where they are above 0. Other masks
    stay as they are. Axes along which the mask is expanded get length 1, so that the new tensor has
    a number for each number in memory. On the CPU a mask with a number below 0 is refused, with
    `added` as the argument that takes it; on a device nothing waits for its numbers."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor):
        _types.check_tensor(name, mask)
    if not mask.dtype.is_floating_point:
        return mask
    for axis, stride in enumerate(mask.stride()):
        if stride == 0 and mask.shape[axis] > 1:
            mask = mask.narrow(axis, 0, 1)
    if _is_on_host(mask) and mask.numel() > 0 and (least := mask.amin().item()) < 0:
        raise ValueError(
            f"{name}: has the number {least:g}, want 1.0 and 0.0: give it as {added}, or as "
            "booleans"
        )
    return mask > 0


def _is_on_host(tensor: torch.Tensor) -> bool:
    """Whether the numbers of a tensor are there, and nothing has to wait for them."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == "cpu"


def memory_of(device: torch.device) -> int:
    """The bytes that a device has in all."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_probabilities_fit(query: torch.Tensor, key: torch.Tensor, name: str) -> None:
    """Refuse probabilities of more bytes than their device has: PyTorch may seem to allocate them,
    and the system then ends the process. `name` is that of the option that asks for them."""
    if torch.compiler.is_compiling() or query.device.type not in ("cpu", "cuda"):
        return
    if query.dim() != 4 or key.dim() != 4:
        return  # the call refuses them
    batch, q_len, q_heads, _ = query.shape
    kv_len = key.shape[1]
    size = batch * q_heads * q_len * kv_len * max(query.element_size(), 4)
    total = memory_of(query.device)
    if size > total:
        raise MemoryError(
            f"{name}: {batch} x {q_heads} x {q_len} x {kv_len} probabilities take "
            f"{size / 2**30:.1f} GiB, and {query.device} has {total / 2**30:.1f} GiB in all; "
            "ask for those of fewer queries at a time"
        )


# Where a message has the name of an argument.
NAMED = re.compile(
    r"^\w+(?=: )|\b\w+(?= has \d)|(?<=; )\w+(?= is \[)|(?<=where )\w+(?= is$)|\b\w+(?='s is )"
)


def call_renamed(names: dict[str, str], function: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Call `function`; in what it refuses, its arguments have the `names` of the caller's."""
    if torch.compiler.is_compiling():
        return function(*args, **kw)
    try:
        return function(*args, **kw)
    except (TypeError, ValueError, NotImplementedError) as error:
        message = NAMED.sub(lambda found: names.get(found[0], found[0]), str(error))
        raise type(error)(message) from None


def spread(
    attn_bias: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """attn_bias with a number for each pair of every query head: PyTorch adds up the gradients of
    one that is broadcast. The call refuses one that does not fit query, key and value."""
    if any(x.dim() != 4 for x in (attn_bias, query, key, value)):
        return attn_bias
    batch, q_len, q_heads = query.shape[:3]
    heads, kv_heads = attn_bias.shape[1], key.shape[2]
    if heads == kv_heads and 0 < kv_heads < q_heads and q_heads % kv_heads == 0:
        of_group = attn_bias[:, :, None].expand(-1, -1, q_heads // kv_heads, -1, -1)
        attn_bias = of_group.flatten(1, 2)
    shape = (batch, q_heads, q_len, key.shape[1])
    fits = all(size in (1, want) for size, want in zip(attn_bias.shape, shape))
    return attn_bias.expand(shape) if fits else attn_bias


def is_added_in_any_order(attn_bias: Any, deterministic: bool) -> bool:
    """Whether kernels of a device would have to add up the gradient of a bias in a fixed order,
    which they cannot if it is broadcast."""
    if not isinstance(attn_bias, torch.Tensor) or not attn_bias.is_cuda:
        return False
    is_fixed = deterministic or torch.are_deterministic_algorithms_enabled()
    return bool(is_fixed) and attn_bias.requires_grad and torch.is_grad_enabled()
