"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def rotate(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """Rotary position embedding: rotate channels d and d + head_dim / 2 of each head by the angle
    position * base^(-2d / head_dim).

    Args:
        x: [batch, len, heads, head_dim].
        positions: [batch or 1, len] integers.
        base: of the angles, which are in radians. They are float32 whatever dtype x has: bfloat16
            cannot tell all positions above 256 apart.

    Returns:
        A tensor like x.

    Source: arXiv:2104.09864, section 3.4.2; halves in place of pairs, as in GPT-NeoX and Llama.
    """
    half = x.shape[-1] // 2
    exponents = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angles = positions[..., None].to(torch.float32) * base**-exponents
    cos, sin = (factor[:, :, None, :].to(x.dtype) for factor in (angles.cos(), angles.sin()))
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def count_positions(
    length: int, starts: torch.Tensor | Sequence[int] | None, device: torch.device
) -> torch.Tensor:
    """Positions [1, length]: 0, 1, ..., beginning anew at each of `starts`."""
    positions = torch.arange(length, device=device, dtype=torch.int32)
    if starts is not None:
        starts = torch.as_tensor(starts, device=device)
        positions = positions - starts[torch.searchsorted(starts, positions, right=True) - 1]
    return positions[None]


def rotate_heads(
    x: torch.Tensor, positions: torch.Tensor, base: float, nope_heads: int, dim: int
) -> torch.Tensor:
    """As rotate(), but only the first `dim` channels of the last nope_heads heads are rotated, with
    the angles of a head of `dim` channels."""
    if nope_heads == 0:
        return rotate(x, positions, base)
    others, nope = x.split((x.shape[2] - nope_heads, nope_heads), 2)
    if dim > 0:
        rotated, rest = nope.split((dim, x.shape[3] - dim), 3)
        nope = torch.cat((rotate(rotated, positions, base), rest), 3)
    return torch.cat((rotate(others, positions, base), nope), 2)
