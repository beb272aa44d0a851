#!/usr/bin/env python3
"""Train gates that tell which keys a model will need, and measure what they keep.

    research/quality_gates.py OUT/NAME.safetensors --corpus CORPUS [--json FILE]

The model comes from quality.py and was trained with all keys; all heads of its last layer, and of
no other, are NoPE heads (--form sliding --nope-heads ... --nope-layers ... --nope-keys LENGTH). It
does not change. For each of --gates, a gate of the last layer's hidden states learns
(quality_retention.py) from text as the model learned from, with recall episodes. Then loss and
recall are measured as in quality_rivals.py, for each number of --keys:

    all                    no restriction, without a gate; once
    newest                 the newest keys, without a gate
    attention              half the newest, half by the score of the gate "attention"
    repetition             half the newest, half by the score of the gate "repetition"
    retention              by beta^age, as the gate "retention" is trained and used; the cache has
                           --block rows more, and is cut after each block of queries
    retention, no decay    half the newest, half by beta of the same gate
    retention-weights      as the last two rules, by the gate "retention-weights"
        and its "no decay"

By beta^age a key can outrank another one that outranked it before. In all other rules the order of
two keys never changes, which is what flash_dmattn.select() takes. Gates are trained for the first
number of --keys. Recall is of 8 pairs, of the needles of quality_needles.py and, with --tasks, of
the tasks of quality_tasks.py.
Exit status: 0 done; 2 bad usage, or another kind of model.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

import benchmarks_path  # noqa: F401
import program
import quality_held_out

GATES = ("attention", "repetition", "retention", "retention-weights")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    head, _, _ = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=head, allow_abbrev=False)
    quality_held_out.add_options(parser, 65536, 44)
    add = parser.add_argument
    add("--gates", nargs="+", choices=GATES, default=list(GATES), help="which ones (all)")
    add("--keys", type=int, nargs="+", default=[2304, 4608], help="rows of a head's cache")
    add("--steps", type=int, default=400, help="of training, of one sequence each (400)")
    add("--seconds", type=float, default=50.0, help="of training a gate, at most (50)")
    add("--queries", type=int, default=8192, help='of a step of "retention" (8192)')
    add("--rate", type=float, default=2e-3, help="peak learning rate (0.002)")
    add("--recall", type=float, default=0.5, help="fraction of sequences with episodes (0.5)")
    add("--shortest-span", type=int, default=128, help="bytes of an episode, at least (128)")
    add("--episodes", choices=("pairs", "mixed"), default="pairs", help="kinds of needles (pairs)")
    add("--recall-weight", type=float, default=0.5, help="of the loss of recalled bytes (0.5)")
    add("--capacity-weight", type=float, default=1.0, help="of the loss of too many keys (1)")
    add("--seed", type=int, default=1, help="of gates and of data (1)")
    add("--block", type=int, default=128, help='queries between two cuts of "retention" (128)')
    add("--questions", type=int, default=64, help="about 8 pairs (64)")
    add("--batch", type=int, default=4, help="sequences at once in measurements (4)")
    quality_held_out.add_tasks(parser)
    options = parser.parse_args(arguments)
    quality_held_out.check_options(parser, options)
    check(parser, options)
    return options


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """The options that quality_rivals.py lacks. Sets options.text."""
    options.text = options.corpus / "corpus.bin"
    if not options.text.is_file():
        parser.error(f"{options.text} is not a file")
    if options.text.stat().st_size <= options.length:
        parser.error(f"--length: is {options.length}, want less than {options.text} has bytes")
    for keys in options.keys:
        if not 2 <= keys < options.length:
            parser.error(f"--keys: is {keys}, want 2 or more, below --length")
    for name in ("block", "pieces", "questions", "batch", "steps", "queries"):
        if (value := getattr(options, name)) < 1:
            parser.error(f"--{name}: is {value}, want 1 or more")
    if options.queries > options.length:
        parser.error(f"--queries: is {options.queries}, want at most --length")
    if not 64 <= options.shortest_span <= options.length:
        parser.error(f"--shortest-span: is {options.shortest_span}, want 64 to {options.length}")
    for name in ("seconds", "rate", "capacity_weight"):
        if not (value := getattr(options, name)) > 0:
            parser.error(f"--{name.replace('_', '-')}: is {value:g}, want above 0")


if __name__ == "__main__":
    program.begin(parse)

import numpy as np
import quality_model
import quality_needles
import torch
from benchmarking import find_machine, write_whole
from flash_dmattn import attention, select
from quality_evaluate import EVALUATION_SEED, NEEDLE_TEXTS, Evaluation, run
from quality_limits import restricted_heads
from quality_model import Model, prefer_cudnn
from quality_results import table_of
from quality_retention import Gate, new_gate, train
from quality_rivals import Rows, Rule, attend_and_evict, recall, rules_of
from torch.nn.functional import logsigmoid

NEEDLES_BACK = (4096, 16384, 57344, 229376)  # bytes
SETTINGS = ("length", "pieces", "block", "queries", "rate", "recall")  # in the results
SETTINGS += ("recall_weight", "capacity_weight", "seed", "shortest_span", "episodes")


def attend_by_gate(gate: Gate, keys: int, query: Rows, key: Rows, value: Rows) -> Rows:
    """Attention to `keys` keys: half are the newest, half have the highest scores."""
    half = keys // 2
    selection = select(gate.scores, keys - half, recent=half)
    return attention(query, key, value, selection=selection, causal=True)[0]


def attend_by_decay(gate: Gate, keys: int, block: int, *rows: Rows) -> Rows:
    return attend_and_evict("retention", keys, 1, block, *rows, log_beta=logsigmoid(gate.scores))


def rules_with(kind: str, gate: Gate, keys: int, block: int) -> dict[str, Rule]:
    by_gate = partial(attend_by_gate, gate, keys)
    if not kind.startswith("retention"):
        return {kind: by_gate}
    return {kind: partial(attend_by_decay, gate, keys, block), f"{kind}, no decay": by_gate}


def needles(model: Model, evaluation: Evaluation, rule: Rule) -> dict[str, dict[str, float]]:
    """The fraction of values of each kind of needle that are right, by distance in bytes."""
    found: dict[str, dict[str, float]] = {kind: {} for kind in quality_needles.KINDS}
    for distance in quality_needles.distances_of(evaluation.length):
        if distance in NEEDLES_BACK:
            given = (evaluation.source, evaluation.length, distance, NEEDLE_TEXTS, EVALUATION_SEED)
            kinds = quality_needles.needles(*given)
            text = next(iter(kinds.values())).text  # the same for all kinds
            with restricted_heads(model, rule):
                results = run(model, text, evaluation.batch, evaluation.device)
            for kind, episodes in kinds.items():
                found[kind][str(distance)] = evaluation.scored(results, episodes)["accuracy"]
    return found


def measure(
    model: Model, evaluation: Evaluation, rule: Rule, options: argparse.Namespace
) -> dict[str, Any]:
    with restricted_heads(model, rule):
        losses = evaluation.losses(model)
        tasks = evaluation.tasks(model, options.tasks)
    found = recall(model, evaluation, options.questions, lambda _: rule)
    found = {"recall": found, "needles": needles(model, evaluation, rule)}
    return {**losses, **found, "tasks": tasks}


class Table:
    """The rows so far, in a file and on the screen."""

    def __init__(self, options: argparse.Namespace) -> None:
        settings = {name: getattr(options, name) for name in SETTINGS}
        machine = find_machine(torch.device(options.device).type)
        self.path = options.json
        self.rows: list[dict[str, Any]] = [{"model": options.model.name, **machine, **settings}]

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self.path is not None:
            write_whole(self.path, self.rows)

    def show(self) -> None:
        measured = [row for row in self.rows if "rule" in row]
        distances = list(measured[0]["recall"])
        back = list(measured[0]["needles"]["identifier"])
        cells = [
            (row["rule"], str(row["keys"]), f"{row['bits']:.4f}")
            + tuple(f"{row['recall'][one]:.2f}" for one in distances)
            + tuple(f"{row['needles']['identifier'][one]:.2f}" for one in back)
            for row in measured
        ]
        names = ("rule", "keys", "loss", *distances, *(f"identifier {one}" for one in back))
        print(*table_of(names, cells, {"rule"}), sep="\n")


def measure_all(
    model: Model, evaluation: Evaluation, options: argparse.Namespace, table: Table
) -> None:
    given = {"all": [options.length], "newest": options.keys}
    for name, counts in given.items():
        program.doing(f"measures {name}")
        for keys in counts:
            rule = rules_of(keys, options.block)[name]
            row = measure(model, evaluation, rule, options)
            table.add({"rule": name, "keys": keys, **row})
    corpus = np.memmap(options.text, np.uint8, mode="r")
    layer = model.attentions()[-1]
    for kind in options.gates:
        program.doing(f"trains the gate {kind}")
        gate = new_gate(model, kind, options.length, options.seed).to(options.device)
        table.add(train(gate, kind, model, corpus, options))
        program.doing(f"measures the gate {kind}")
        with layer.register_forward_pre_hook(gate.read):
            for keys in options.keys:
                for name, rule in rules_with(kind, gate, keys, options.block).items():
                    row = measure(model, evaluation, rule, options)
                    table.add({"rule": name, "keys": keys, **row})


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    model = quality_model.load(options.model).requires_grad_(False)
    *others, last = model.attentions()
    if any(layer.nope_heads > 0 for layer in others) or last.nope_heads < last.kv_heads:
        message = "want NoPE heads in all of the last layer, and in no other"
        print(f"quality_gates.py: {options.model}: {message}", file=sys.stderr)
        sys.exit(2)
    device = torch.device(options.device)
    source = np.fromfile(options.held_out, np.uint8)
    evaluation = Evaluation(source, options.length, options.batch, options.pieces, device)
    table = Table(options)
    with prefer_cudnn():
        measure_all(model.to(device), evaluation, options, table)
    table.show()


if __name__ == "__main__":
    main()
