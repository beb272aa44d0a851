"""The attention of a layer over the states of requests, between the projections of a server."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from .. import functional
from ..rotary import rotary_table, rotate, to_int32
from .pages import ATTEND


class Tokens(NamedTuple):
    """The tokens of a step, for all layers."""

    positions: torch.Tensor  # [tokens]
    table: torch.Tensor  # of these, for rotate()


def place(positions: torch.Tensor, inv_freq: torch.Tensor, factor: float) -> Tokens:
    """The tokens at these positions."""
    given: dict[str, Any] = {"inv_freq": inv_freq, "factor": factor}
    return Tokens(positions, rotary_table(to_int32(positions), 2 * len(inv_freq), **given))


class Norm(nn.Module):
    """The weight of a root-mean-square norm of heads, which rotate() computes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))


class StateAttention(nn.Module):
    """The attention of a layer: score() of a subclass says which keys are kept.

    Args:
        projections: qkv_proj and o_proj, whose first result is the product.
        heads: query heads, kv heads and head_dim, on this rank.
        layer: its number.
        states: the name by which the engine knows the Pages.
        eps: of the norms of heads; None: heads are not normalized.
        nope: queries and keys are not rotated.
    """

    def __init__(
        self,
        projections: tuple[nn.Module, nn.Module],
        heads: tuple[int, int, int],
        layer: int,
        states: str,
        eps: float | None = None,
        nope: bool = False,
    ) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = projections
        self.heads, self.kv_heads, self.head_dim = heads
        self.layer, self.states, self.eps, self.nope = layer, states, eps, nope
        if eps is not None:
            self.q_norm, self.k_norm = Norm(self.head_dim), Norm(self.head_dim)

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """x [tokens, hidden]."""
        heads, kv_heads, head_dim = self.heads, self.kv_heads, self.head_dim
        packed = self.qkv_proj(x)[0].unflatten(1, (heads + 2 * kv_heads, head_dim))
        query, key, value = packed.split((heads, kv_heads, kv_heads), 1)
        query, key = (self._place(*pair, tokens) for pair in ((query, "q_norm"), (key, "k_norm")))
        score, out = self.score(x, value, tokens), torch.empty_like(query)
        which = (self.layer, head_dim**-0.5, self.states)
        ATTEND(query, key, value, score, out, *which)
        return self.o_proj(out.flatten(1))[0]

    def _place(self, x: torch.Tensor, norm: str, tokens: Tokens) -> torch.Tensor:
        """Queries or keys [tokens, heads, head_dim], normalized and rotated."""
        given: dict[str, Any] = {"nope_heads": x.shape[1] if self.nope else 0}
        if self.eps is not None:
            given.update(weight=getattr(self, norm).weight, eps=self.eps)
        return rotate(x[None], tokens.table, **given)[0]

    def score(self, x: torch.Tensor, value: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """The scores [kv_heads, tokens] float32 of hidden states x and values [tokens, kv_heads,
        head_dim]."""
        raise NotImplementedError


def score_values(
    value: torch.Tensor, weight: torch.Tensor, a_coef: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The scores [kv_heads, tokens] of values [tokens, kv_heads, head_dim]."""
    given: dict[str, Any] = {"dt_bias": bias, "bias_form": "none"}
    return functional.score(value[None], weight, a_coef, **given)[0][0]
