"""Layers of a dense model with a selection, and how their scores learn: for examples/adapt.py.

The scores of a layer that was trained without them have to rank its keys without changing its
logits, to which they are added as exp(score). With A = -1 and a dt_bias of 20,

    score = -softplus(v dt_proj^T + 20), about -20 - v dt_proj^T

so that a score is linear in the value states, while its bias, about exp(-20) = 2e-9, is below the
rounding of the logits. Such a bias passes hardly any gradient on either, so the scores learn from
targets of their own, computed from the attention that the dense layer gives to each key. This
reaches every key, also those that no query keeps. The targets are

largest  the square of the largest probability that the key gets from a query that does not have it
         among its `recent` newest keys: a key that a single later query needs ranks high
mean     the mean of these probabilities: keys that many queries attend to a little rank high
outputs  no target of this kind. The bias keeps its effect, and the scores learn through it. A is 0
         at first, so that all biases are equal and change nothing; then it follows the gradients of
         the difference between the outputs of the dense layer and of the selected one, whose window
         shrinks from the whole length.
"""

from __future__ import annotations

from typing import NamedTuple

import program

if __name__ == "__main__":
    program.belongs_to("adapt.py")

import flash_dmattn
import torch
from flash_dmattn import DynamicMaskAttention
from flash_dmattn.rotary import rotate_heads
from torch import nn
from torch.nn.functional import log_softmax, mse_loss
from torch.nn.utils import parametrize

HARMLESS = 20.0  # dt_bias at which exp(-dt_bias) is below the rounding of float32 logits


class Kept(NamedTuple):
    """Numbers of keys that each query keeps: the newest, and others by their scores."""

    window: int
    recent: int


class Pair(NamedTuple):
    dense: DynamicMaskAttention
    selected: DynamicMaskAttention


def select_from(dense: DynamicMaskAttention, kept: Kept, harmless: bool) -> DynamicMaskAttention:
    """A layer with the projections of `dense`, and with new scores.

    harmless: start from random scores whose bias changes no logit. If False, A is 0 and all scores
    are equal: a sliding window.
    """
    layer = DynamicMaskAttention(
        dense.hidden,
        dense.heads,
        dense.kv_heads,
        kept.window,
        recent=kept.recent,
        head_dim=dense.head_dim,
        dt_bias=True,
        rope_base=dense.rope_base,
    ).to(dense.q_proj.weight.device)
    layer.load_state_dict(dense.state_dict(), strict=False)
    with torch.no_grad():
        layer.A.fill_(-1.0 if harmless else 0.0)
        layer.dt_proj.bias.fill_(HARMLESS if harmless else 0.0)
    return layer


def states_of(layer: DynamicMaskAttention, x: torch.Tensor) -> list[torch.Tensor]:
    """query, key and value [batch, len, heads, head_dim] of hidden states x, as in the layer."""
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    query, key, value = (one(x).unflatten(2, (-1, layer.head_dim)) for one in projections)
    positions = torch.arange(x.shape[1], device=x.device)[None]
    if layer.rope_base is not None:
        query, key = (rotate_heads(one, positions, layer.rope_base) for one in (query, key))
    return [query, key, value]


def received_attention(
    layer: DynamicMaskAttention, x: torch.Tensor, recent: int, largest: bool
) -> torch.Tensor:
    """[batch, kv_heads, len - recent]: of the probabilities that a key gets from later queries the
    largest one's square, or the mean.

    The first `recent` queries from the key on do not count, as
    they keep it anyway; the last `recent` keys have no other query. The query heads of a kv head
    are summed. This takes len x len numbers for each query head, and so short sequences.
    """
    query, key, value = states_of(layer, x)
    _, lse = flash_dmattn.attention(query, key, value, causal=True)
    probability = flash_dmattn.attention_probabilities(query, key, lse, causal=True)
    length = x.shape[1]
    is_later = torch.ones(length, length, device=x.device).tril(-recent)  # [query, key]
    later = (probability * is_later)[..., : length - recent]
    queries = is_later.sum(0)[: length - recent]
    received = later.amax(2).square() if largest else later.sum(2) / queries
    summed: torch.Tensor = received.unflatten(1, (layer.kv_heads, -1)).sum(2)
    return summed


def scores_of(layer: DynamicMaskAttention, x: torch.Tensor) -> torch.Tensor:
    """[batch, kv_heads, len], with gradients: a bias of the form "linear" is the score itself."""
    value = layer.v_proj(x).unflatten(2, (-1, layer.head_dim))
    projection = layer.dt_proj
    _, score = flash_dmattn.score(
        value, projection.weight, layer.A, dt_bias=projection.bias, bias_form="linear"
    )
    assert score is not None  # as it is with bias_form "none"
    return score


def attention_loss(pair: Pair, x: torch.Tensor, largest: bool) -> torch.Tensor:
    """Cross-entropy of the softmax of the scores over all keys with the attention received."""
    recent = pair.selected.recent
    with torch.no_grad():
        received = received_attention(pair.dense, x, recent, largest)
        target = received / received.sum(-1, keepdim=True)
    score = scores_of(pair.selected, x)[..., : target.shape[-1]]
    return -(target * log_softmax(score, -1)).sum(-1).mean()


def output_loss(pair: Pair, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Squared difference of the outputs of both layers, as a fraction of the dense one's square."""
    return mse_loss(pair.selected(x), out) / out.square().mean()


TARGETS = {
    "largest": lambda pair, x, _: attention_loss(pair, x, largest=True),
    "mean": lambda pair, x, _: attention_loss(pair, x, largest=False),
    "outputs": output_loss,
}


def kept_attention(layer: DynamicMaskAttention, x: torch.Tensor) -> float:
    """The fraction of the attention over all keys that is on the kept keys, mean over queries and
    heads. Biases are left out. It is 1 for a dense layer."""
    if layer.window is None:
        return 1.0
    query, key, value = states_of(layer, x)
    score = scores_of(layer, x)
    selection = flash_dmattn.select(score, layer.window, recent=layer.recent)
    _, kept = flash_dmattn.attention(query, key, value, selection=selection, causal=True)
    _, full = flash_dmattn.attention(query, key, value, causal=True)
    return (kept - full).exp().mean().item()


class LowRank(nn.Module):
    """Adds up @ down, of a low rank, to a weight that stays as it is (LoRA, arXiv:2106.09685)."""

    def __init__(self, weight: torch.Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.down = nn.Parameter(torch.randn(rank, columns, device=weight.device) / columns**0.5)
        self.up = nn.Parameter(torch.zeros(rows, rank, device=weight.device))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.up @ self.down


def add_low_rank(layer: DynamicMaskAttention, rank: int) -> list[nn.Parameter]:
    """Add a LowRank, 0 at first, to the four projections; returns the parameters to train."""
    changes: list[nn.Parameter] = []
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
        change = LowRank(projection.weight, rank)
        parametrize.register_parametrization(projection, "weight", change)
        changes += change.parameters()
    return changes
