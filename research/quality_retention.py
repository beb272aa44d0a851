"""Gates that score keys, and their training beside a language model that does not change.

A gate reads the hidden state of each token, as the last layer of the model gets it, and gives a
score to the token's key in each kv head. Its training is one of these:

    attention   the sigmoid of a score is the largest probability that a later query gives to the
                key, once it is no longer among the newest
    repetition  the same in text whose second half repeats the first, by queries of the second half,
                which have to find what they repeat (Fast KVzip, arXiv:2601.17668)
    retention   the sigmoid of a score is beta of the key, and the logit of a query that is t bytes
                behind it is multiplied by beta^t. The loss is the divergence of the model's
                predictions from those that it has with all keys, plus capacity_weight times the
                part of a query's keys by which the sum of beta^t exceeds the rows of a cache
                (TRIM-KV, arXiv:2512.03324)
    retention-weights
                the same, where the weight of the key, the exponential function of the logit, is
                multiplied by beta^t, so that it ends as it would without the key
    lifetime    the exponential function of the score is the lifetime of the key. Both the logit and
                the weight are multiplied by 1 / (1 + (t / lifetime)^n), where n grows in training:
                at last a key leaves when it is as old as its lifetime. By the weight alone a key of
                high logit would seem to be found long after that
    lifetime-value
                the same, where the score is a linear function of the values of the key's token

Retention multiplies by beta^t, so lifetimes in proportion to -1 / log(beta) keep the same keys as
long as the threshold of beta^t is constant: the scores of all these gates are logarithms of
lifetimes, up to a constant. Queries are sampled, half of them in proportion to the divergence of
predictions with the newest keys from those with all, and losses are weighted accordingly.

All gates but the last are one network with a layer of UNITS between, as in TRIM-KV. Fast KVzip
compares two projections of rank 16 instead.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from typing import Any, Callable, NamedTuple

import numpy as np
import torch
from flash_dmattn.lifetimes import Sees, attend_fading, sample_places, sharpness_at
from flash_dmattn.score_targets import log_targets
from quality_evaluate import observing
from quality_limits import attend_with, restricted_heads
from quality_model import Attention, Model, narrow, to_device
from quality_needles import EPISODES
from quality_optimizer import rate_at
from quality_recall import Batches
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, kl_div, logsigmoid, silu

UNITS = 512
STD = 0.02  # of the initial weights
CHUNK = 512  # queries whose logits are in memory at once
WARM_UP = 10  # steps
RATED_STEPS = (5, 10)  # these are timed to find how many steps fit --seconds
PARTS = 8  # of the training, for which mean losses are written
NO_OPTIONS = {"softmax_scale": None, "softcap": 0.0, "sink_logit": None}  # of attention
DECAYING = ("retention", "retention-weights", "lifetime", "lifetime-value")
BIAS_RATE = 10.0  # multiplies the learning rate of the bias of a gate that reads values


class Gate(nn.Module):
    """From hidden states, or values side by side, [batch, len, width] to scores [batch, kv_heads,
    len] in float32."""

    def __init__(
        self, width: int, kv_heads: int, bias: float, seed: int, reads_values: bool = False
    ) -> None:
        super().__init__()
        self.reads_values = reads_values
        generator = torch.Generator().manual_seed(seed)
        self.expand = None if reads_values else nn.Linear(width, UNITS)
        self.contract = nn.Linear(width if reads_values else UNITS, kv_heads)
        for layer, first in ((self.expand, 0.0), (self.contract, bias)):
            if layer is not None:
                nn.init.normal_(layer.weight, std=STD, generator=generator)
                nn.init.constant_(layer.bias, first)
        self.scores = torch.empty(0)  # of the last call that read() saw

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        with torch.autocast(states.device.type, enabled=False):
            x = states.float()
            x = x if self.expand is None else silu(self.expand(x))
            return self.contract(x).mT.contiguous()

    def of(self, frozen: Frozen) -> torch.Tensor:
        """Scores [1, kv_heads, len] of the tokens of a sequence."""
        return self(frozen.value.flatten(1)[None] if self.reads_values else frozen.states)

    @torch.no_grad()
    def read(self, _: Attention, given: tuple[torch.Tensor, ...]) -> None:
        """A hook that a layer calls with its arguments, before it computes anything."""
        if not self.reads_values:
            self.scores = self(given[0])


class Frozen(NamedTuple):
    """Results of the model for one sequence, with all keys."""

    entering: torch.Tensor  # [1, len, width]: the input of the last block
    states: torch.Tensor  # [1, len, width]: the input of its attention
    query: torch.Tensor  # [len, q_heads, head_dim]
    key: torch.Tensor  # [len, kv_heads, head_dim]
    value: torch.Tensor
    logits: torch.Tensor  # [1, len, 256]


@torch.no_grad()
def run_frozen(model: Model, text: torch.Tensor) -> Frozen:
    """`text` is [1, len] (int64)."""
    found: dict[str, Any] = {}
    block = model.blocks[-1]

    def enter(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        found["entering"] = given[0]

    def keep(layer: Attention, *rows: torch.Tensor) -> None:
        if layer is block.attention:
            found["rows"] = [x[0] for x in rows]

    with block.register_forward_pre_hook(enter), observing(model, keep), narrow(text.device):
        logits = model(text)
        states = block.attention_norm(found["entering"])
    return Frozen(found["entering"], states, *found["rows"], logits)


# ---- targets: attention and repetition ----


def largest_probabilities(query: torch.Tensor, key: torch.Tensor, recent: int) -> torch.Tensor:
    """[kv_heads, len - recent]: the largest probability of a key from any query of its kv head to
    which it is not one of the `recent` newest keys."""
    group = query.shape[1] // key.shape[1]
    squares = log_targets(query, key.repeat_interleave(group, 1), recent, None, 0.0, None)
    return (squares / 2).unflatten(0, (key.shape[1], group)).amax(1).exp().clamp(max=1)


def target_loss(gate: Gate, model: Model, text: torch.Tensor, recent: int | None) -> torch.Tensor:
    """The loss of the training "attention", or, with recent None, "repetition"."""
    half = text.shape[1] // 2
    if recent is None:  # the query that predicts a byte again is half - 1 behind the byte's key
        text, recent = text[:, :half].repeat(1, 2), half - 1
    frozen = run_frozen(model, text)
    with torch.no_grad():
        targets = largest_probabilities(frozen.query, frozen.key, recent)[:, : len(frozen.key)]
    count = targets.shape[1]
    return binary_cross_entropy_with_logits(gate(frozen.states[:, :count])[0], targets)


# ---- retention and lifetimes ----


def attend_decayed(
    kind: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: torch.Tensor,
    places: torch.Tensor,
    sharpness: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [queries, q_heads, head_dim] of the queries at ascending `places` to the keys up to
    their own, which decay by their scores [kv_heads, len]. Also the sum over these keys of what
    their logits or weights are multiplied by, [kv_heads, queries]."""
    if kind.startswith("lifetime"):
        sees = Sees(places, torch.zeros_like(places), torch.ones_like(scores[0], dtype=torch.bool))
        rows = (query.float(), key.float(), value.float())
        return attend_fading(rows, scores, sees, len(key), sharpness, NO_OPTIONS)
    kv_heads, end = key.shape[1], int(places[-1]) + 1
    ages = (places[:, None] - torch.arange(end, device=key.device)).float()
    is_later = ages < 0
    with torch.autocast(key.device.type, enabled=False):
        log_decay = logsigmoid(scores[:, None, :end]) * ages.clamp(min=0)
        decay = log_decay.exp()
        own = query.float().unflatten(1, (kv_heads, -1))
        logits = torch.einsum("qghd,kgd->ghqk", own, key[:end].float()) / query.shape[2] ** 0.5
        if kind == "retention":
            logits = logits * decay[:, None]
        else:
            logits = logits + log_decay[:, None]
        weights = logits.masked_fill(is_later, -torch.inf).softmax(-1)
        out = torch.einsum("ghqk,kgd->qghd", weights, value[:end].float()).flatten(1, 2)
    return out, decay.masked_fill(is_later, 0.0).sum(-1)


def predict(
    model: Model, entering: torch.Tensor, attention: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """The logarithms [len, 256] of the predictions of a model whose last block has this input and
    this attention."""
    with restricted_heads(model, attention), narrow(entering.device):
        logits = model.head(model.norm(model.blocks[-1](entering)))
    return logits[0].float().log_softmax(-1)


def divergences(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return kl_div(found, wanted, reduction="none", log_target=True).sum(-1)


@torch.no_grad()
def sample_queries(
    model: Model, frozen: Frozen, keys: int, count: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` ascending places, some perhaps repeated, and weights with which a sum over them is
    the mean over all places in expectation."""
    newest = partial(attend_with, "newest", keys, keys - 1)
    wanted = frozen.logits[0].float().log_softmax(-1)
    missed = divergences(predict(model, frozen.entering, newest), wanted)
    return sample_places(missed, torch.ones_like(missed, dtype=torch.bool), count, generator)


def learn_retention(
    gate: Gate,
    kind: str,
    model: Model,
    frozen: Frozen,
    marked: torch.Tensor,
    queries: tuple[torch.Tensor, torch.Tensor],
    options: argparse.Namespace,
    sharpness: float = 1.0,
) -> torch.Tensor:
    """Adds to the gradients of the gate, for both losses of some queries of one sequence, which are
    places and weights. The bytes that only memory can predict, `marked` [len], count as in the
    training of the model: their mean is multiplied by recall_weight. Returns divergence and
    excess."""
    places, weights = queries
    is_marked = marked[places]
    of_marked, of_others = (
        (weights * chosen).sum().clamp(min=1e-9) for chosen in (is_marked, ~is_marked)
    )
    factors = weights * torch.where(is_marked, options.recall_weight / of_marked, 1 / of_others)
    shares = weights / weights.sum()
    scores = gate.of(frozen)[0]
    given = scores.detach().requires_grad_()
    losses = torch.zeros(2, device=places.device)
    for own, factor, share in zip(*(x.split(CHUNK) for x in (places, factors, shares))):
        rows = (frozen.query[own], frozen.key, frozen.value)
        out, held = attend_decayed(kind, *rows, given, own, sharpness)
        found = predict(model, frozen.entering[:, own], partial(replaced, out[None]))
        wanted = frozen.logits[0, own].float().log_softmax(-1)
        excess = (held - options.keys[0]).clamp(min=0) / (own + 1)
        both = torch.stack(
            ((divergences(found, wanted) * factor).sum(), (excess.mean(0) * share).sum())
        )
        (both[0] + options.capacity_weight * both[1]).backward()
        losses += both.detach()
    scores.backward(given.grad)
    return losses


def replaced(out: torch.Tensor, query: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return out.to(query.dtype)


# ---- training ----


def new_gate(model: Model, kind: str, length: int, seed: int) -> Gate:
    """A gate for the last layer. Before training, lifetimes are about `length`."""
    layer = model.attentions()[-1]
    bias = math.log(length) if kind in DECAYING else 0.0
    reads_values = kind == "lifetime-value"
    width = layer.kv_heads * layer.head_dim if reads_values else model.config.width
    return Gate(width, layer.kv_heads, bias, seed, reads_values)


def optimizer_of(gate: Gate) -> torch.optim.Optimizer:
    bias = gate.contract.bias
    others = [one for one in gate.parameters() if one is not bias]
    factor = BIAS_RATE if gate.reads_values else 1.0
    groups = [{"params": others, "factor": 1.0}, {"params": [bias], "factor": factor}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)


def train(
    gate: Gate, kind: str, model: Model, corpus: np.ndarray, options: argparse.Namespace
) -> dict[str, Any]:
    """Trains a gate for the first of options.keys. Returns what there is to say of it."""
    device = torch.device(options.device)
    given = (options.length, options.recall, 0, options.seed, options.shortest_span)
    batches = Batches(corpus, 1, *given, EPISODES[options.episodes])
    optimizer = optimizer_of(gate)
    recent = options.keys[0] // 2 if kind == "attention" else None
    generator = torch.Generator(device).manual_seed(options.seed)
    steps, losses = options.steps, []
    times = {0: time.perf_counter()}
    while len(losses) < steps:
        number = len(losses)
        text, marked, _ = batches(number)
        rows = to_device(text, device).long()[:, :-1]
        optimizer.zero_grad(set_to_none=True)
        if kind in DECAYING:
            frozen = run_frozen(model, rows)
            queries = sample_queries(model, frozen, options.keys[0], options.queries, generator)
            own = (frozen, to_device(marked[0], device), queries, options)
            losses.append(
                learn_retention(gate, kind, model, *own, sharpness_at(number / max(1, steps - 1)))
            )
        else:
            loss = target_loss(gate, model, rows, recent)
            loss.backward()
            losses.append(loss.detach()[None])
        nn.utils.clip_grad_norm_(gate.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(number, steps, options.rate * group["factor"], WARM_UP)
        optimizer.step()
        if len(losses) in (*RATED_STEPS, steps):
            losses[-1].cpu()  # waits for the device
            times[len(losses)] = time.perf_counter()
        if len(losses) == RATED_STEPS[1]:
            steps = min(steps, steps_in(options.seconds, times))
    log = {"gate": kind, "steps": steps, "seconds": round(times[steps] - times[0], 1)}
    if device.type == "cuda":
        log["peak_memory"] = torch.cuda.max_memory_allocated(device)
    parts = torch.stack(losses).float().cpu().tensor_split(PARTS)
    return {**log, "losses": [part.mean(0).tolist() for part in parts if len(part) > 0]}


def steps_in(seconds: float, times: dict[int, float]) -> int:
    """How many steps end before so many seconds are over, by the times at which some ended."""
    first, second = RATED_STEPS
    of_step = (times[second] - times[first]) / (second - first)
    return second + max(0, int((seconds - times[second] + times[0]) / of_step))
