"""What the functions of the package do with arguments that the C library does not see."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def refuse_tangents(name: str, *tensors: torch.Tensor | None) -> None:
    """Refuse tensors with forward-mode tangents, which an operator would silently ignore. They
    are visible only here, before dispatch; outside of forward mode there is nothing to check."""
    if getattr(forward_ad, "_current_level", 0) < 0:
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"flash_dmattn.{name}: forward-mode derivatives (torch.func.jvp) are not "
                "implemented, use reverse mode (torch.autograd.grad)"
            )


def check_dropout(dropout_p: float, name: str = "dropout_p") -> None:
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
            raise TypeError(f"generator: is a {type(generator).__name__}, want a torch.Generator")
        if generator.device != query.device:
            raise ValueError(
                f"generator: is on {generator.device}, want {query.device}, where query is"
            )
        if rng_state is not None:
            raise ValueError("generator: is given, want None with rng_state")
    if dropout_p == 0 or rng_state is not None:
        return rng_state
    return torch.randint((1 << 63) - 1, (2,), generator=generator, device=query.device)
