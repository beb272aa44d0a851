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

Here all gates are one network with a layer of UNITS between, as in TRIM-KV. Fast KVzip compares two
projections of rank 16 instead.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from flash_dmattn.score_targets import log_targets
from quality_evaluate import observing
from quality_limits import restricted_heads
from quality_model import Attention, Model, narrow, to_device
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


class Gate(nn.Module):
    """From hidden states [batch, len, width] to scores [batch, kv_heads, len] in float32."""

    def __init__(self, width: int, kv_heads: int, bias: float, seed: int) -> None:
        super().__init__()
        self.expand, self.contract = nn.Linear(width, UNITS), nn.Linear(UNITS, kv_heads)
        generator = torch.Generator().manual_seed(seed)
        for layer, first in ((self.expand, 0.0), (self.contract, bias)):
            nn.init.normal_(layer.weight, std=STD, generator=generator)
            nn.init.constant_(layer.bias, first)
        self.scores = torch.empty(0)  # of the last call that read() saw

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        with torch.autocast(states.device.type, enabled=False):
            return self.contract(silu(self.expand(states.float()))).mT.contiguous()

    @torch.no_grad()
    def read(self, _: Attention, given: tuple[torch.Tensor, ...]) -> None:
        """A hook that a layer calls with its arguments, before it computes anything."""
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


# ---- retention ----


def attend_decayed(
    kind: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_beta: torch.Tensor,
    begin: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [queries, q_heads, head_dim] of the queries from position `begin` on to the keys up
    to their own, with logits or weights multiplied by beta^age; log_beta is [kv_heads, len]. Also
    the sum of beta^age over these keys, [kv_heads, queries]."""
    kv_heads, end = key.shape[1], begin + len(query)
    positions = torch.arange(end, device=key.device)
    ages = (positions[begin:, None] - positions).float()
    is_later = ages < 0
    with torch.autocast(key.device.type, enabled=False):
        log_decay = log_beta[:, None, :end] * ages.clamp(min=0)
        decay = log_decay.exp()
        own = query.float().unflatten(1, (kv_heads, -1))
        logits = torch.einsum("qghd,kgd->ghqk", own, key[:end].float()) / query.shape[2] ** 0.5
        is_product = kind == "retention"
        logits = logits * decay[:, None] if is_product else logits + log_decay[:, None]
        weights = logits.masked_fill(is_later, -torch.inf).softmax(-1)
        out = torch.einsum("ghqk,kgd->qghd", weights, value[:end].float()).flatten(1, 2)
    return out, decay.masked_fill(is_later, 0.0).sum(-1)


def chunks_of(length: int, queries: int, random: np.random.Generator) -> list[slice]:
    """`queries` positions in chunks, one at random in each of equal parts of a sequence."""
    size = min(CHUNK, queries)
    part = length // (queries // size)
    starts = (n * part + int(random.integers(part - size + 1)) for n in range(queries // size))
    return [slice(start, start + size) for start in starts]


def learn_retention(
    gate: Gate,
    kind: str,
    model: Model,
    text: torch.Tensor,
    marked: torch.Tensor,
    chunks: list[slice],
    options: argparse.Namespace,
) -> torch.Tensor:
    """Adds to the gradients of the gate, for both losses of chunks of the queries of one sequence.
    The bytes that only memory can predict, `marked` [len], count as in the training of the model:
    their mean is multiplied by recall_weight. Returns divergence and excess."""
    frozen = run_frozen(model, text)
    chosen = torch.cat([marked[chunk] for chunk in chunks])
    of_marked, of_others = chosen.sum().clamp(min=1), (~chosen).sum().clamp(min=1)
    log_beta = logsigmoid(gate(frozen.states)[0])
    given = log_beta.detach().requires_grad_()
    losses = torch.zeros(2, device=text.device)
    for chunk in chunks:
        own = (frozen.query[chunk], frozen.key, frozen.value)
        out, held = attend_decayed(kind, *own, given, chunk.start)
        attention = partial(replaced, out[None])
        with restricted_heads(model, attention), narrow(text.device):
            hidden = model.blocks[-1](frozen.entering[:, chunk])
            logits = model.head(model.norm(hidden))[0]
        rows = (logits, frozen.logits[0, chunk])
        found, wanted = (one.float().log_softmax(-1) for one in rows)
        divergence = kl_div(found, wanted, reduction="none", log_target=True).sum(-1)
        weights = torch.where(marked[chunk], options.recall_weight / of_marked, 1 / of_others)
        seen = torch.arange(chunk.start, chunk.stop, device=text.device) + 1
        excess = ((held - options.keys[0]).clamp(min=0) / seen).mean() / len(chunks)
        both = torch.stack(((divergence * weights).sum(), excess))
        (both[0] + options.capacity_weight * both[1]).backward()
        losses += both.detach()
    log_beta.backward(given.grad)
    return losses


def replaced(out: torch.Tensor, query: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return out.to(query.dtype)


# ---- training ----


def new_gate(model: Model, kind: str, length: int, seed: int) -> Gate:
    """A gate for the last layer. Before training, beta is about 1 - 1 / length."""
    layer = model.attentions()[-1]
    bias = math.log(length) if kind.startswith("retention") else 0.0
    return Gate(model.config.width, layer.kv_heads, bias, seed)


def train(
    gate: Gate, kind: str, model: Model, corpus: np.ndarray, options: argparse.Namespace
) -> dict[str, Any]:
    """Trains a gate for the first of options.keys. Returns what there is to say of it."""
    device = torch.device(options.device)
    batches = Batches(corpus, 1, options.length, options.recall, 0, options.seed)
    optimizer = torch.optim.AdamW(gate.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    recent = options.keys[0] // 2 if kind == "attention" else None
    steps, losses = options.steps, []
    times = {0: time.perf_counter()}
    while len(losses) < steps:
        number = len(losses)
        text, marked, _ = batches(number)
        rows = to_device(text, device).long()[:, :-1]
        optimizer.zero_grad(set_to_none=True)
        if kind.startswith("retention"):
            chunks = chunks_of(options.length, options.queries, np.random.default_rng(number))
            is_marked = to_device(marked[0], device)
            losses.append(learn_retention(gate, kind, model, rows, is_marked, chunks, options))
        else:
            loss = target_loss(gate, model, rows, recent)
            loss.backward()
            losses.append(loss.detach()[None])
        nn.utils.clip_grad_norm_(gate.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(number, steps, options.rate, WARM_UP)
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
