"""Training of scores, in quality.py's models, by the attention that keys would get.

Heads that have targets train their rows of dt_proj with flash_dmattn.score_target_loss, with an
optimizer and a learning rate of their own, in some steps and from one sequence of the step. Nothing
else learns from it. A of these heads is not trained, and is above 0.

Before step `start` dt_proj keeps its random weights: heads that keep random keys can learn to find
a match, and only then do targets tell which keys are worth keeping.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from flash_dmattn import score_target_loss
from quality_evaluate import observing
from quality_model import Attention, Model, narrow
from torch import nn


class States(NamedTuple):
    """The inputs of a layer's attention for one sequence: [len, heads, head_dim]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class ScoreTargets:
    """Trains the rows of dt_proj of the last heads[n] kv heads of layer n.

    Only queries that no longer have a key among their `recent` newest ones count for its target.
    None: the recent keys of the layer; a query keeps any older key only by its score.
    """

    def __init__(
        self,
        model: Model,
        heads: Sequence[int],
        start: int,
        every: int,
        factor: float,
        recent: int | None = None,
    ) -> None:
        self.model, self.start, self.every, self.factor = model, start, every, factor
        self.recent = recent
        layers = zip(model.attentions(), heads)
        self.layers = [(layer, count) for layer, count in layers if count > 0]
        weights = [layer.dt_proj.weight.detach()[-count:] for layer, count in self.layers]
        self.rows = [nn.Parameter(weight.clone()) for weight in weights]
        self.optimizer = torch.optim.AdamW(self.rows, betas=(0.9, 0.95), weight_decay=0.0)
        self.last_loss: torch.Tensor | None = None

    def learn(self, number: int, text: torch.Tensor, rate: float) -> None:
        """Train these scores at this learning rate, after step `number` of training on this text
        [batch, len] (int64). Does nothing before step `start`, and in most steps."""
        if number < self.start or number % self.every != 0:
            return
        sequence = number // self.every % len(text)
        states = self.states_of(text[sequence : sequence + 1])
        losses = [
            self.loss(layer, rows, states[layer], self.recent)
            for (layer, _), rows in zip(self.layers, self.rows)
        ]
        for group in self.optimizer.param_groups:
            group["lr"] = rate * self.factor
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.stack(losses).mean()
        loss.backward()
        self.last_loss = loss.detach()
        self.optimizer.step()
        self.write_rows()

    @torch.no_grad()
    def write_rows(self) -> None:
        for (layer, count), rows in zip(self.layers, self.rows):
            layer.dt_proj.weight[-count:] = rows

    @torch.no_grad()
    def states_of(self, text: torch.Tensor) -> dict[Attention, States]:
        states: dict[Attention, States] = {}

        def keep(layer: Attention, *tensors: torch.Tensor) -> None:
            states[layer] = States(*(tensor[0] for tensor in tensors))

        with observing(self.model, keep), narrow(text.device):
            self.model(text)
        return states

    @staticmethod
    def loss(
        layer: Attention, rows: torch.Tensor, states: States, recent: int | None = None
    ) -> torch.Tensor:
        """The target loss of the last heads of a layer, with these rows of its dt_proj."""
        others = layer.dt_proj.weight.detach()[: -len(rows)]
        return score_target_loss(
            *(one[None] for one in states),
            torch.cat((others, rows)),
            recent=layer.recent if recent is None else recent,
            sinks=layer.sinks,
            heads=range(layer.kv_heads - len(rows), layer.kv_heads),
        )

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Also copies the rows of the model, whose weights were read before."""
        self.optimizer.load_state_dict(state)
        with torch.no_grad():
            for (layer, count), rows in zip(self.layers, self.rows):
                rows.copy_(layer.dt_proj.weight[-count:])
