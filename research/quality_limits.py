#!/usr/bin/env python3
"""Measure how many keys NoPE heads need, and the cost of choosing them for all queries.

    research/quality_limits.py OUT/NAME.safetensors --corpus CORPUS [--json FILE]

The model comes from quality.py, with NoPE heads that were trained with all keys (--form dense
--nope-heads N) or with some. The loss of held-out text is measured with these heads restricted to a
number of keys, which always include the --recent newest ones. One of these rules chooses the other
keys; the first two know the future:

    each query   the keys of highest <query, key>, for each query and each query head
    all queries  the keys of highest target of score_target_loss: of largest probability from any
                 later query in attention to all keys, in one order for all queries of a kv head
    newest       the newest ones
    random       the keys of highest random score

"each query" is the limit of few keys; "all queries" is about the limit of scores that do not depend
on the query. These heads do not use the scores of the model and their bias. All other heads are as
they were trained.
Exit status: 0 done; 2 bad usage, or a model without NoPE heads.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import benchmarks_path  # noqa: F401
import program
import quality_held_out


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    head, _, _ = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=head, allow_abbrev=False)
    quality_held_out.add_options(parser, 8192, 24)
    parser.add_argument("--keys", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--recent", type=int, default=64, help="newest keys among them (64)")
    options = parser.parse_args(arguments)
    quality_held_out.check_options(parser, options)
    if options.recent < 0:
        parser.error(f"--recent: is {options.recent}, want 0 or more")
    for keys in options.keys:
        if not options.recent < keys < options.length:
            parser.error(f"--keys: is {keys}, want more than --recent and less than --length")
    return options


if __name__ == "__main__":
    program.begin(parse)

import numpy as np
import quality_model
import torch
from benchmarking import find_machine, write_whole
from flash_dmattn import attention, select
from flash_dmattn.score_targets import log_targets
from quality_evaluate import Evaluation
from quality_model import Attention, Model, attend_to_all, prefer_cudnn
from quality_results import table_of
from torch import nn

RULES = ("each query", "all queries", "newest", "random")
QUERIES = 1024  # logits of so many queries are in memory at once
SEED = 0  # for random scores


def logits_of(query: torch.Tensor, key: torch.Tensor, begin: int) -> torch.Tensor:
    """[heads, queries, keys] float32 of queries [queries, heads, head_dim], the first at position
    `begin`, with keys [keys, head_dim]; -inf for later keys."""
    logits = torch.einsum("qhd,kd->hqk", query.float(), key.float()) / query.shape[2] ** 0.5
    later = torch.ones(logits.shape[1:], dtype=torch.bool, device=query.device).triu(begin + 1)
    return logits.masked_fill(later, -torch.inf)


def best_of_each_query(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: int, recent: int
) -> torch.Tensor:
    """Attention [len, heads, head_dim] of each query to its `keys` best keys of one kv head,
    including the `recent` newest."""
    pieces = []
    for begin in range(0, len(query), QUERIES):
        own = query[begin : begin + QUERIES]
        count = begin + len(own)
        logits = logits_of(own, key[:count], begin)
        newest = torch.ones(logits.shape[1:], dtype=torch.bool, device=key.device)
        newest = newest.triu(begin + 1 - recent)
        ranked = logits.masked_fill(newest & (logits > -torch.inf), torch.inf)
        least = ranked.topk(min(keys, count), -1).values[..., -1:]
        weights = logits.masked_fill(ranked < least, -torch.inf).softmax(-1)
        pieces.append(torch.einsum("hqk,kd->qhd", weights, value[:count].float()))
    return torch.cat(pieces).to(query.dtype)


def scores_of(rule: str, query: torch.Tensor, key: torch.Tensor, recent: int) -> torch.Tensor:
    """[kv_heads, len] float32 for one sequence, for rules with one order of the keys."""
    length, kv_heads, _ = key.shape
    if rule == "newest":
        return key.new_zeros(kv_heads, length, dtype=torch.float32)
    if rule == "random":
        generator = torch.Generator().manual_seed(SEED)
        return torch.rand(kv_heads, length, generator=generator).to(key.device)
    targets = log_targets(query, key, recent, None, 0.0, None)
    return nn.functional.pad(targets.float(), (0, recent))  # these are recent to all queries


def attend_with(
    rule: str, keys: int, recent: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Attention of NoPE heads [batch, len, heads, head_dim] with `keys` keys chosen by a rule."""
    if keys >= key.shape[1]:
        return attend_to_all(query, key, value, causal=True)
    if rule != "each query":
        scores = [scores_of(rule, q, k, recent) for q, k in zip(query, key)]
        selection = select(torch.stack(scores), keys - recent, recent=recent)
        return attention(query, key, value, selection=selection, causal=True)[0]
    kv_heads, out = key.shape[2], []
    with torch.autocast(query.device.type, enabled=False):
        for q, k, v in zip(query.unflatten(2, (kv_heads, -1)), key, value):
            heads = zip(q.unbind(1), k.unbind(1), v.unbind(1))
            out.append(torch.cat([best_of_each_query(*head, keys, recent) for head in heads], 1))
    return torch.stack(out)


def attend(layer: Attention, restricted: Any, *rows: torch.Tensor) -> torch.Tensor:
    """Attention of a layer. Its NoPE heads, the last ones, use `restricted`."""
    query, key, value = rows[:3]
    count = layer.nope_heads * query.shape[2] // layer.kv_heads
    nope = (query[:, :, -count:], *(x[:, :, -layer.nope_heads :] for x in (key, value)))
    found = restricted(*(x.contiguous() for x in nope))
    if layer.nope_heads == layer.kv_heads:
        return found
    out = Attention.attend(layer, *rows)
    return torch.cat((out[:, :, :-count], found), 2)


@contextlib.contextmanager
def restricted_heads(model: Model, restricted: Any) -> Iterator[None]:
    """A context in which the NoPE heads call `restricted` with query, key, value [batch, len,
    heads, head_dim] in place of attention."""
    layers = [layer for layer in model.attentions() if layer.nope_heads > 0]
    for layer in layers:
        layer.attend = partial(attend, layer, restricted)
    try:
        yield
    finally:
        for layer in layers:
            del layer.attend


def measure(model: Model, evaluation: Evaluation, counts: list[int], recent: int) -> list[Any]:
    """A row for each number of keys, first for all of them, with a loss for each rule."""
    rows = []
    for keys in [evaluation.length, *counts]:
        row: dict[str, Any] = {"keys": keys}
        for rule in RULES:
            with restricted_heads(model, partial(attend_with, rule, keys, recent)):
                row[rule] = evaluation.losses(model)["bits"]
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    model = quality_model.load(options.model)
    if not any(layer.nope_heads > 0 for layer in model.attentions()):
        print(f"quality_limits.py: {options.model}: has no NoPE heads", file=sys.stderr)
        sys.exit(2)
    device = torch.device(options.device)
    evaluation = Evaluation(
        np.fromfile(options.held_out, np.uint8), options.length, 4, options.pieces, device
    )
    with prefer_cudnn():
        rows = measure(model.to(device), evaluation, options.keys, options.recent)
    if options.json is not None:
        settings = {name: getattr(options, name) for name in ("recent", "length", "pieces")}
        first = {"model": options.model.name, **find_machine(device.type)}
        write_whole(options.json, [{**first, **settings}, *rows])
    cells = [(f"{row['keys']:,}", *(f"{row[rule]:.3f}" for rule in RULES)) for row in rows]
    print(*table_of(("keys", *RULES), cells), sep="\n")


if __name__ == "__main__":
    main()
