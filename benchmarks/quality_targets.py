"""Scores of quality.py's models that learn from the attention which keys would get.

A score learns through its bias only from queries that keep its key, and what it learns there is
what lowers their loss, not what later queries need. So heads may have targets instead: the square
of the largest probability, over all keys, that a key gets from a query which does not have it among
its `recent` newest ones, summed over the query heads of its kv head. The softmax of the scores
before softplus is trained to match these numbers, divided by their sum over the keys, with a
learning rate of its own. Queries, keys and values learn nothing from it. A stays as it is, above 0,
so that scores have the order of what is trained.

All pairs of a query and a key are computed for that, in some steps, of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import flash_dmattn
import torch
from quality_evaluate import narrow, observing
from quality_model import Attention, Model
from torch import nn
from torch.nn.functional import linear, log_softmax

QUERIES = 1024  # of which all logits are in memory at once


def received_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, recent: int
) -> torch.Tensor:
    """[kv_heads, len - recent] float32: of query [len, q_heads, head_dim] and key and value
    [len, kv_heads, head_dim], the square of the largest probability that each key gets from a query
    that comes `recent` or more positions later, summed over the query heads of its kv head."""
    length, kv_heads, head_dim = key.shape
    _, lse = flash_dmattn.attention(query[None], key[None], value[None], causal=True)
    by_group = query.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    lse = lse[0].unflatten(0, (kv_heads, -1))[..., None]
    largest = torch.full(by_group.shape[:3], -torch.inf, device=query.device)
    position = torch.arange(length, device=query.device)
    for begin in range(0, length, QUERIES):
        end = min(begin + QUERIES, length)
        count = end - recent  # of keys that these queries do not have among their newest
        if count <= 0:
            continue
        rows = by_group[:, :, begin:end].flatten(1, 2) @ key[:count].permute(1, 2, 0)
        logits = rows.unflatten(1, (-1, end - begin)).float() * head_dim**-0.5
        is_newer = position[:count] > position[begin:end, None] - recent
        logits = (logits - lse[:, :, begin:end]).masked_fill_(is_newer, -torch.inf)
        old = largest[:, :, :count]
        old.copy_(torch.maximum(old, logits.amax(2)))
    return largest[..., : length - recent].exp().square().sum(1)


class States(NamedTuple):
    """What a layer attends with, in one sequence: [len, heads, head_dim]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class ScoreTargets:
    """Trains the rows of dt_proj of the last heads[n] kv heads of layer n."""

    def __init__(self, model: Model, heads: Sequence[int], every: int, factor: float) -> None:
        self.model, self.every, self.factor = model, every, factor
        layers = zip(model.attentions(), heads)
        self.layers = [(layer, count) for layer, count in layers if count > 0]
        weights = [layer.dt_proj.weight.detach()[-count:] for layer, count in self.layers]
        self.rows = [nn.Parameter(weight.clone()) for weight in weights]
        self.optimizer = torch.optim.AdamW(self.rows, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, step: int, text: torch.Tensor, rate: float) -> None:
        """After a step of training with this text [batch, len] (int64), at this learning rate."""
        if step % self.every != 0:
            return
        sequence = step // self.every % len(text)
        states = self.states_of(text[sequence : sequence + 1])
        losses = [
            self.loss(rows, states[layer], layer.recent, count)
            for (layer, count), rows in zip(self.layers, self.rows)
        ]
        for group in self.optimizer.param_groups:
            group["lr"] = rate * self.factor
        self.optimizer.zero_grad(set_to_none=True)
        torch.stack(losses).mean().backward()
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
    def loss(rows: torch.Tensor, states: States, recent: int, count: int) -> torch.Tensor:
        """Cross-entropy of the softmax of a head's scores with its targets, mean over heads."""
        query, key, value = states
        heads = count * query.shape[1] // key.shape[1]
        with torch.no_grad():
            received = received_attention(
                query[:, -heads:], key[:, -count:], value[:, -count:], recent
            )
            target = received / received.sum(-1, keepdim=True)
        score = linear(value[: target.shape[1]].flatten(1).float(), rows).T
        return -(target * log_softmax(score, -1)).sum(-1).mean()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Also takes over the rows of the model, whose weights were read before."""
        self.optimizer.load_state_dict(state)
        with torch.no_grad():
            for (layer, count), rows in zip(self.layers, self.rows):
                rows.copy_(layer.dt_proj.weight[-count:])
