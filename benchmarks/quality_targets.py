"""Scores of quality.py's models that learn from the attention which keys would get.

A score learns through its bias only from queries that keep its key, and what it learns there is
what lowers their loss, not what later queries need. So heads may have targets instead. Of each key
the target is the square of the largest probability, in a softmax over all earlier keys, among the
queries that do not have it among their `recent` newest keys, summed over the query heads of its kv
head. The softmax of the scores before softplus is trained to match the targets divided by their sum
over the keys, with a learning rate of its own. Queries, keys and values learn nothing from it. A
stays as it is, above 0, so that keys rank by what is trained.

Before step `start` dt_proj keeps its random weights: heads that keep random keys can learn to find
a match, and only then do targets tell which keys are worth keeping.

In some steps all pairs of a query and a key of one sequence are computed for that.
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

PAIRS = (
    1 << 24
)  # of a head whose probabilities are in memory at once, but a query has all of its own
TINY = torch.finfo(torch.float32).tiny


def received_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, recent: int
) -> torch.Tensor:
    """[kv_heads, len - recent] float32: of query [len, q_heads, head_dim] and key and value
    [len, kv_heads, head_dim], the logarithm of the target of each key: that of the square of the
    largest probability that the key gets from a query which comes `recent` or more positions later,
    summed over the query heads of its kv head."""
    length, kv_heads, _ = key.shape
    query, key, value = (one[None] for one in (query, key, value))
    _, lse = flash_dmattn.attention(query, key, value, causal=True)
    largest = torch.full((query.shape[2], length), TINY, device=query.device)
    queries = max(1, PAIRS // length)
    for begin in range(0, length, queries):
        end = min(begin + queries, length)
        own = query[:, begin:end], key[:, :end], lse[..., begin:end]
        probability = flash_dmattn.attention_probabilities(*own, causal=True)[0]
        old = largest[:, : max(0, end - recent)]  # keys that some of these queries do not have
        received = probability.tril(begin - recent).amax(1)
        old.copy_(torch.maximum(old, received[:, : old.shape[1]]))
    largest = largest[:, : length - recent].log().unflatten(0, (kv_heads, -1))
    return (2 * largest).logsumexp(1)


class States(NamedTuple):
    """What a layer attends with, in one sequence: [len, heads, head_dim]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class ScoreTargets:
    """Trains the rows of dt_proj of the last heads[n] kv heads of layer n."""

    def __init__(
        self, model: Model, heads: Sequence[int], start: int, every: int, factor: float
    ) -> None:
        self.model, self.start, self.every, self.factor = model, start, every, factor
        layers = zip(model.attentions(), heads)
        self.layers = [(layer, count) for layer, count in layers if count > 0]
        weights = [layer.dt_proj.weight.detach()[-count:] for layer, count in self.layers]
        self.rows = [nn.Parameter(weight.clone()) for weight in weights]
        self.optimizer = torch.optim.AdamW(self.rows, betas=(0.9, 0.95), weight_decay=0.0)
        self.last_loss: torch.Tensor | None = None

    def learn(self, number: int, text: torch.Tensor, rate: float) -> None:
        """Train these scores at this learning rate, after step `number` of training with this text
        [batch, len] (int64); before step `start`, and in most steps, do nothing."""
        if number < self.start or number % self.every != 0:
            return
        sequence = number // self.every % len(text)
        states = self.states_of(text[sequence : sequence + 1])
        losses = [
            self.loss(rows, states[layer], layer.recent, layer.sinks)
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
    def loss(rows: torch.Tensor, states: States, recent: int, sinks: int) -> torch.Tensor:
        """Cross-entropy of the softmax of a head's scores with its targets, mean over the heads of
        these rows of dt_proj. It leaves out keys that all queries keep, the first `sinks`."""
        query, key, value = states
        count = len(rows)
        heads = count * query.shape[1] // key.shape[1]
        with torch.no_grad():
            received = received_attention(
                query[:, -heads:], key[:, -count:], value[:, -count:], recent
            )
            target = received[:, sinks:].softmax(-1)
        score = linear(value[sinks : received.shape[1]].flatten(1).float(), rows).T
        return -(target * log_softmax(score, -1)).sum(-1).mean()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Also takes over the rows of the model, whose weights were read before."""
        self.optimizer.load_state_dict(state)
        with torch.no_grad():
            for (layer, count), rows in zip(self.layers, self.rows):
                rows.copy_(layer.dt_proj.weight[-count:])
