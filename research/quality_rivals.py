#!/usr/bin/env python3
"""Measure what published rules of eviction keep, on a model that was trained with all keys.

    research/quality_rivals.py OUT/NAME.safetensors --corpus CORPUS [--json FILE]

The model comes from quality.py, with NoPE heads (--form dense or sliding, --nope-heads N). Its loss
on held-out text and its recall are measured with each of these heads restricted to --keys rows of a
cache, without more training. A rule chooses the rows:

    all             no restriction
    newest          the newest ones
    sinks           the first 4 and the newest ones (StreamingLLM, arXiv:2309.17453)
    random          half of them the newest ones, half by random scores
    value norm      half the newest ones, half by the norm of the value
    heavy hitters   half the newest ones, half by the attention that all queries so far gave to a
                    key (H2O, arXiv:2306.14048)
    last attention  by the attention of the last query (TOVA, arXiv:2401.06104)
    snap, unseen    for recall alone: all keys until the first question, then the newest 32 and
                    those with most attention from these 32 positions, as largest means of 7
                    neighbours (SnapKV, arXiv:2404.14469)
    snap, seen      the same, chosen again at the last byte before each value, so that the rule
                    knows the question

A rule that reads attention chooses for each kv head, by the sum over its query heads. The caches
of "heavy hitters" and "last attention" have --block rows more, and are cut after each block of
queries. All other heads are as they were trained.
Exit status: 0 done; 2 bad usage, or a model without NoPE heads.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any, Callable

import benchmarks_path  # noqa: F401
import program
import quality_held_out


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    head, _, _ = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=head, allow_abbrev=False)
    quality_held_out.add_options(parser, 65536, 44)
    parser.add_argument("--keys", type=int, default=2304, help="rows of a head's cache (2304)")
    parser.add_argument("--block", type=int, default=16, help="queries between two cuts (16)")
    parser.add_argument("--questions", type=int, default=64, help="about 8 pairs (64)")
    parser.add_argument("--batch", type=int, default=4, help="sequences at once (4)")
    options = parser.parse_args(arguments)
    quality_held_out.check_options(parser, options)
    if not 2 * OBSERVED <= options.keys < options.length:
        parser.error(f"--keys: is {options.keys}, want {2 * OBSERVED} or more, below --length")
    for name in ("block", "pieces", "questions", "batch"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: is {getattr(options, name)}, want 1 or more")
    return options


SINKS = 4
OBSERVED = 32  # positions whose attention "snap" reads
NEIGHBOURS = 7  # whose mean it takes

if __name__ == "__main__":
    program.begin(parse)

import numpy as np
import quality_model
import torch
from benchmarking import find_machine, write_whole
from flash_dmattn import attention, select
from quality_evaluate import Evaluation, run
from quality_limits import logits_of, restricted_heads, scores_of
from quality_model import attend_to_all, prefer_cudnn
from quality_recall import Question, distances_of, fits
from quality_results import table_of
from torch import nn

Rows = torch.Tensor  # [batch, len, heads, head_dim]
Rule = Callable[[Rows, Rows, Rows], Rows]  # of query, key, value
PAIRS = 8


def attend_to_scored(
    rule: str, keys: int, recent: int, sinks: int, query: Rows, key: Rows, value: Rows
) -> Rows:
    """Attention to the `recent` newest keys, the first `sinks`, and those of highest score."""
    if rule == "value norm":
        scores = value.float().norm(dim=3).transpose(1, 2).contiguous()
    else:
        scores = torch.stack([scores_of(rule, q, k, recent) for q, k in zip(query, key)])
    selection = select(scores, keys - recent, recent=recent, sinks=sinks)
    return attention(query, key, value, selection=selection, causal=True)[0]


def attend_and_evict(
    rule: str,
    keys: int,
    recent: int,
    block: int,
    query: Rows,
    key: Rows,
    value: Rows,
    log_beta: torch.Tensor | None = None,
) -> Rows:
    """Attention of queries in blocks to a cache that is cut to `keys` rows after each block: the
    `recent` newest ones and those of most attention from all queries, or from the last one. With
    log_beta [batch, kv_heads, len] it is the largest beta^age instead of the attention."""
    batch, length, kv_heads, dim = key.shape
    queries = query.float().unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
    arriving = [x.float().transpose(1, 2) for x in (key, value)]
    rows = [x[:, :, :0] for x in arriving]
    positions = torch.empty(batch, kv_heads, 0, dtype=torch.int64, device=key.device)
    received = torch.empty(batch, kv_heads, 0, device=key.device)
    pieces = []
    for begin in range(0, length, block):
        own = torch.arange(begin, min(begin + block, length), device=key.device)
        rows = [torch.cat((x, y[:, :, begin : begin + block]), 2) for x, y in zip(rows, arriving)]
        positions = torch.cat((positions, own.expand(batch, kv_heads, -1)), 2)
        with torch.autocast(key.device.type, enabled=False):
            asked = queries[:, :, :, begin : begin + block]
            logits = asked @ rows[0].unsqueeze(2).transpose(3, 4) / dim**0.5
            is_later = positions[:, :, None, None] > own[:, None]
            weights = logits.masked_fill(is_later, -torch.inf).softmax(-1)
            pieces.append(weights @ rows[1].unsqueeze(2))
        if log_beta is not None:
            received = log_beta.gather(2, positions) * (own[-1] - positions)
        elif rule == "heavy hitters":
            received = nn.functional.pad(received, (0, len(own))) + weights.sum((2, 3))
        else:
            received = weights[:, :, :, -1].sum(2)
        if positions.shape[2] > keys:
            is_newest = positions > begin + len(own) - 1 - recent
            best = received.masked_fill(is_newest, torch.inf).topk(keys, sorted=False).indices
            rows = [x.gather(2, best[..., None].expand(-1, -1, -1, dim)) for x in rows]
            positions, received = positions.gather(2, best), received.gather(2, best)
    out = torch.cat(pieces, 3)  # [batch, kv_heads, group, len, head_dim]
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(query.dtype)


class Snap:
    """Attention that is restricted for the queries that predict the values of `questions`, a list
    for each sequence, in the order in which calls have the sequences."""

    def __init__(self, keys: int, is_seen: bool, questions: list[list[Question]]) -> None:
        self.keys, self.is_seen, self.questions, self.done = keys, is_seen, questions, 0

    def __call__(self, query: Rows, key: Rows, value: Rows) -> Rows:
        out = attend_to_all(query, key, value, causal=True).contiguous()
        own = self.questions[self.done : self.done + len(query)]
        self.done += len(query)
        asking, found = (x.unflatten(2, (key.shape[2], -1)) for x in (query, out))
        with torch.autocast(query.device.type, enabled=False):
            for row, questions in enumerate(own):
                first = min(one.asked for one in questions) - 4  # "<" and the name
                for question in questions:
                    end = question.asked if self.is_seen else first
                    answers = slice(question.asked - 1, question.asked - 1 + question.size)
                    for head in range(key.shape[2]):
                        rows = (asking[row, :, head], key[row, :, head], value[row, :, head])
                        found[row, answers, head] = attend_to_observed(
                            *rows, end, answers, self.keys
                        ).to(out.dtype)
        return out


def attend_to_observed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    end: int,
    answers: slice,
    keys: int,
) -> torch.Tensor:
    """Attention [answers, group, head_dim] of one kv head to the keys before `end` that the
    OBSERVED positions before it chose, to these, and to all later ones."""
    begin = end - OBSERVED
    weights = logits_of(query[begin:end], key[:end], begin).softmax(-1).sum((0, 1))[:begin]
    pooled = nn.functional.avg_pool1d(weights[None], NEIGHBOURS, 1, NEIGHBOURS // 2)[0]
    kept = torch.ones(len(key), dtype=torch.bool, device=key.device)
    kept[:begin] = False
    kept[pooled.topk(min(keys - OBSERVED, begin)).indices] = True
    logits = logits_of(query[answers], key, answers.start).masked_fill(~kept, -torch.inf)
    return torch.einsum("hqk,kd->qhd", logits.softmax(-1), value.float())


def rules_of(keys: int, block: int) -> dict[str, Rule]:
    half = keys // 2
    return {
        "all": partial(attend_to_all, causal=True),
        "newest": partial(attend_to_scored, "newest", keys, keys - 1, 0),
        "sinks": partial(attend_to_scored, "newest", keys, keys - SINKS, SINKS),
        "random": partial(attend_to_scored, "random", keys, half, 0),
        "value norm": partial(attend_to_scored, "value norm", keys, half, 0),
        "heavy hitters": partial(attend_and_evict, "heavy hitters", keys, half, block),
        "last attention": partial(attend_and_evict, "last attention", keys, 1, block),
    }


def recall(
    model: nn.Module,
    evaluation: Evaluation,
    questions: int,
    rule_for: Callable[[list[list[Question]]], Rule],
) -> dict[str, float]:
    """The fraction of values about 8 pairs that are right, by distance in bytes. `rule_for` makes
    the rule for texts with these questions."""
    found = {}
    for distance in distances_of(evaluation.length):
        if not fits(PAIRS, distance, evaluation.length):
            continue
        episodes = evaluation.ask({"pairs": PAIRS, "distance": distance}, questions)
        with restricted_heads(model, rule_for(episodes.questions)):
            results = run(model, episodes.text, evaluation.batch, evaluation.device)
        found[str(distance)] = evaluation.scored(results, episodes)["accuracy"]
    return found


def measure(model: nn.Module, evaluation: Evaluation, options: argparse.Namespace) -> list[Any]:
    rows = []
    for name, rule in rules_of(options.keys, options.block).items():
        with restricted_heads(model, rule):
            losses = evaluation.losses(model)
        found = recall(model, evaluation, options.questions, lambda _, rule=rule: rule)
        rows.append({"rule": name, **losses, "recall": found})
    for name, is_seen in (("snap, unseen", False), ("snap, seen", True)):
        found = recall(model, evaluation, options.questions, partial(Snap, options.keys, is_seen))
        rows.append({"rule": name, "recall": found})
    return rows


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    model = quality_model.load(options.model)
    if sum(layer.nope_heads > 0 for layer in model.attentions()) != 1:
        print(f"quality_rivals.py: {options.model}: want one layer of NoPE heads", file=sys.stderr)
        sys.exit(2)
    device = torch.device(options.device)
    source = np.fromfile(options.held_out, np.uint8)
    evaluation = Evaluation(source, options.length, options.batch, options.pieces, device)
    with prefer_cudnn():
        rows = measure(model.to(device), evaluation, options)
    if options.json is not None:
        settings = {name: getattr(options, name) for name in ("keys", "block", "length", "pieces")}
        first = {"model": options.model.name, **find_machine(device.type)}
        write_whole(options.json, [{**first, **settings}, *rows])
    distances = list(rows[0]["recall"])
    cells = [
        (row["rule"], f"{row['bits']:.4f}" if "bits" in row else "")
        + tuple(f"{row['recall'][one]:.2f}" for one in distances)
        for row in rows
    ]
    print(*table_of(("rule", "loss", *distances), cells, {"rule"}), sep="\n")


if __name__ == "__main__":
    main()
