"""Shared by the workloads of workloads.py: their interface, and a body of layers.

The layers are the ones of quality_model.py. In the form `dense` a query attends to all keys that it
can see, by PyTorch; in the form `selected` to `keys` keys, the `recent` newest and the others of
highest learned score, by this library. Half of the kv heads, rounded down, have a sliding window.
If attention is not causal no key is newest: all `keys` are chosen by score, in all heads.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Dict, Tuple

import numpy as np
import quality_model
import torch
from flash_dmattn import DynamicMaskAttention, flash_dma_attention
from flash_dmattn.rotary import rotate_heads
from quality_model import HEAD_DIM, NORM_EPS, Block, attend_to_all
from torch import nn

FORMS = ("dense", "selected")
INITIAL_A = 1.0
BIAS_FORM = "linear"
ROTARY_BASE = 10000.0

Batch = Dict[str, torch.Tensor]
Sums = Dict[str, Tuple[torch.Tensor, int]]  # for each measure: a sum, and the number of its terms


@dataclasses.dataclass(frozen=True)
class Config:
    """The configuration of the layers of a model."""

    layers: int
    q_heads: int
    kv_heads: int
    window: int | None = None  # keys by score; None for all keys
    recent: int = 0
    causal: bool = True

    @property
    def width(self) -> int:
        return self.q_heads * HEAD_DIM

    @property
    def sliding_heads(self) -> int:
        return self.kv_heads // 2 if self.causal and self.window is not None else 0

    def of_form(self, form: str, keys: int, recent: int) -> Config:
        """The layers of a form. With `selected` a query keeps `keys` keys."""
        if form == "dense":
            return dataclasses.replace(self, window=None, recent=0)
        newest = recent if self.causal else 0
        return dataclasses.replace(self, window=keys - newest, recent=newest)


class Attention(DynamicMaskAttention):
    """Attention with rotary embeddings of positions on one axis or several."""

    def __init__(self, config: Config) -> None:
        super().__init__(
            config.width,
            config.q_heads,
            config.kv_heads,
            config.window,
            recent=config.recent,
            causal=config.causal,
            sliding_heads=config.sliding_heads,
        )

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [batch, len, width]; positions [axes, len]: each axis turns an equal number of the
        channels of a head."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = turn(query, positions), turn(key, positions)
        if self.window is None:
            out = attend_to_all(query, key, value, self.causal)
        else:
            out = flash_dma_attention(
                query,
                key,
                value,
                self.dt_proj.weight,
                self.a_coef,
                self.window,
                causal=self.causal,
                recent=self.recent,
                bias_form=BIAS_FORM,
            )
        return self.o_proj(out.flatten(2))


def turn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [batch, len, heads, head_dim] by positions [axes, len]."""
    pieces = x.split(x.shape[-1] // len(positions), -1)
    turned = [
        rotate_heads(piece, axis[None], ROTARY_BASE) for piece, axis in zip(pieces, positions)
    ]
    return torch.cat(turned, -1)


class Body(nn.Module):
    """Layers and a last norm, from x [batch, len, width] to the same shape. Subclasses embed their
    inputs. No parameter is a bias, so initialise() sets all of them by the seed."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        attentions = (Attention(config) for _ in range(config.layers))
        self.blocks = nn.ModuleList(Block(config.width, attention) for attention in attentions)
        self.norm = nn.RMSNorm(config.width, eps=NORM_EPS)

    def run(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, positions)
        return self.norm(x)

    def attentions(self) -> list[Attention]:
        return [block.attention for block in self.blocks]


class Workload(abc.ABC):
    """A task: its model, its data and its loss.

    Batches depend on the seed, the step and the device only. Held-out batches are drawn with
    another key of the random generator, or from other text.
    """

    name: str
    data: str  # the source of the data
    unit: str  # of the loss

    def __init__(self, size: Any, seed: int, device: torch.device) -> None:
        """size: of the model and of the data, and the steps of training."""
        self.size, self.seed, self.device = size, seed, device

    @property
    @abc.abstractmethod
    def tokens(self) -> int:
        """Tokens in a step."""

    def random_of(self, step: int, is_held_out: bool) -> np.random.Generator:
        return np.random.default_rng((self.seed, int(is_held_out), step))

    @abc.abstractmethod
    def make_model(self, form: str, keys: int, recent: int) -> nn.Module:
        """The model of a form, without its initial weights."""

    @abc.abstractmethod
    def batch(self, step: int, is_held_out: bool = False) -> Batch:
        """The data of a step, on the device."""

    @abc.abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The mean loss of a batch."""

    @abc.abstractmethod
    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        """The loss of a held-out batch, by the name `loss`, and other useful measures."""

    def baseline(self, batch: Batch) -> Sums:
        """The measures of predictions without a model, on a held-out batch."""
        return {}

    def begin(self, form: str, keys: int, recent: int, seed: int) -> nn.Module:
        """The model with its initial weights, which are equal in both forms where both have
        them."""
        model = self.make_model(form, keys, recent)
        quality_model.initialise(model, form, seed, INITIAL_A, quality_model.STD)
        return model
