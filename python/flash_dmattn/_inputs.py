"""What the functions of the package do with arguments that the C library does not see."""

from __future__ import annotations

import os
import re
from typing import Any, Callable

import torch
from torch.autograd import forward_ad

from . import _types
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


def check_dropout(dropout_p: float, name: str = "dropout_p") -> None:
    if type(dropout_p) is not float and not _types.is_number(dropout_p):
        raise _types.refusal(name, dropout_p, "a number in [0, 1)")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"{name}: is {dropout_p}, want a number in [0, 1)")


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
        if generator.device != query.device:
            raise ValueError(
                f"generator: is on {generator.device}, want {query.device}, where query is"
            )
        if rng_state is not None:
            raise ValueError("generator: is given, want None with rng_state")
    if dropout_p == 0 or rng_state is not None:
        return rng_state
    return torch.randint((1 << 63) - 1, (2,), generator=generator, device=query.device)


def choose_scale(softmax_scale: float | None, scale: float | None) -> float | None:
    """The factor of logits, which callers give under one of two names."""
    if scale is None:
        return softmax_scale
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


def as_bool_mask(mask: torch.Tensor | None, name: str = "attn_mask") -> torch.Tensor | None:
    """A mask of floating-point numbers as one of bool, true where they are above 0. Other masks
    stay as they are. Axes along which the mask is expanded get length 1, so that the new tensor has
    a number for each number in memory."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor):
        _types.check_tensor(name, mask)
    if not mask.dtype.is_floating_point:
        return mask
    for axis, stride in enumerate(mask.stride()):
        if stride == 0 and mask.shape[axis] > 1:
            mask = mask.narrow(axis, 0, 1)
    return mask > 0


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
