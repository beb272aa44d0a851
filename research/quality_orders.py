#!/usr/bin/env python3
"""Train a hybrid on with few keys in its last layer, in orders of the keys that gates learned.

    research/quality_orders.py OUT --rules RULE ... [options] --corpus CORPUS --start BASE ...

All other options are options of quality.py, for a training that goes on from a file of it (--start)
with all keys (--form sliding --nope-keys LENGTH). All heads of the model's last layer, and of no
other, are NoPE heads. The program takes these steps:

    1  The model is trained up to step --select-start.
    2  It does not change while gates of its last layer learn beside it (quality_retention.py).
    3  For each of --rules, the model of step 1 is trained up to --steps with the keys that the rule
       chooses in the last layer, and is measured. Gates do not change.

A rule is a name and a number of keys, with a colon between: all, newest:KEYS, GATE:KEYS for the
gates of quality_retention.py whose keys decay, GATE/half:KEYS, or GATE+OTHER:KEYS. A gate's score
of a key is fixed once the token is read, and so is the order of two keys:

    GATE       the newest RECENT keys, and the keys of largest position + c * exp(score), at which
               their lifetimes end. c is found for each head so that the keys that live fill the
               rows of the cache in the mean
    GATE/half  half the newest, half by score
    GATE+OTHER the first half of the kv heads as GATE, the others as OTHER/half, where OTHER may be
               one of the gates "attention" and "repetition", too

Losses and recall are measured as in quality_gates.py. The rules of --untrained are measured with
the model of step 1. OUT/NAME.orders.json has a line for each measurement and each gate. --state
keeps the model and its optimizers at --select-start in a file: a later run with other rules reads
it and omits step 1.
Exit status: 0 done; 1 the loss is not a number; 2 bad usage, or another kind of model.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import benchmarks_path  # noqa: F401
import program

RECENT = 64  # newest keys beside those by lifetime
NAMES = ("all", "newest")
GATES = ("retention", "retention-weights", "lifetime", "lifetime-value")
OTHERS = (*GATES, "attention", "repetition")


@dataclasses.dataclass(frozen=True)
class Order:
    """A rule of --rules."""

    name: str
    keys: int | None  # None for all
    is_half: bool = False
    other: str | None = None

    @property
    def gates(self) -> tuple[str, ...]:
        return tuple(one for one in (self.name, self.other) if one in OTHERS)


def order_of(word: str) -> Order:
    name, _, keys = word.partition(":")
    if word == "all":
        return Order("all", None)
    gate, slash, half = name.partition("/")
    first, plus, other = name.partition("+")
    is_known = name == "newest" or (gate in GATES and half == ("half" if slash else ""))
    is_known = is_known or (first in GATES and other in OTHERS)
    if not is_known or not keys.isdecimal() or int(keys) <= 2 * RECENT:
        known = "all, newest:KEYS, GATE:KEYS, GATE/half:KEYS or GATE+OTHER:KEYS with a gate of "
        known += f"{', '.join(GATES)} and another of {', '.join(OTHERS)}"
        message = f"is {word}, want {known}, and KEYS above {2 * RECENT}"
        raise argparse.ArgumentTypeError(message)
    return Order(first if plus else gate, int(keys), bool(slash), other or None)


def parse(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The options of this program, and the words for quality.py."""
    head, _, _ = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=head, allow_abbrev=False)
    add = parser.add_argument
    add("--rules", type=order_of, nargs="+", required=True, help="of trained models, in this order")
    add("--untrained", type=order_of, nargs="+", default=[], help="rules without more training")
    add("--state", type=Path, metavar="FILE", help="of the training at --select-start")
    add("--save", action="store_true", help="the weights of each trained model and of its gate")
    add("--gate-keys", type=int, default=2304, help="for which gates learn (2304)")
    add("--gate-steps", type=int, default=400, help="of one sequence each (400)")
    add("--gate-seconds", type=float, default=60.0, help="of training a gate, at most (60)")
    add("--queries", type=int, default=2048, help="of a step of a gate (2048)")
    add("--gate-rate", type=float, default=2e-3, help="peak learning rate of gates (0.002)")
    add("--gate-span", type=int, default=4096, help="bytes of their episodes, at least (4096)")
    add("--capacity-weight", type=float, default=1.0, help="of the loss of too many keys (1)")
    options, others = parser.parse_known_args(arguments)
    for name, least in (("gate_keys", 1), ("gate_steps", 1), ("queries", 1), ("gate_span", 64)):
        if (value := getattr(options, name)) < least:
            parser.error(f"--{name.replace('_', '-')}: is {value}, want {least} or more")
    for name in ("gate_seconds", "gate_rate", "capacity_weight"):
        if not (value := getattr(options, name)) > 0:
            parser.error(f"--{name.replace('_', '-')}: is {value:g}, want above 0")
    return options, others


if __name__ == "__main__":
    program.begin(parse)

import quality
import quality_gates
import quality_model
import quality_options
import quality_tasks
import safetensors.torch
import torch
from benchmarking import find_machine, write_whole
from flash_dmattn import attention, select
from flash_dmattn.lifetimes import lifetime_scale
from quality_evaluate import Evaluation
from quality_limits import attend_with, restricted_heads
from quality_model import Model, to_device
from quality_needles import EPISODES
from quality_recall import Batches
from quality_results import table_of
from quality_retention import Gate, new_gate, run_frozen, train
from quality_rivals import Rows, Rule

CALIBRATION = 4  # sequences from which c is found
NO_SETTINGS = ("rules", "untrained", "state", "save")  # options that other rows show


def attend_in_order(
    gate: Gate,
    scale: torch.Tensor | None,
    keys: int,
    query: Rows,
    key: Rows,
    value: Rows,
    heads: slice = slice(None),
) -> Rows:
    """Attention of the queries of some kv heads to `keys` keys of a gate's order: without a scale,
    half are the newest."""
    with torch.no_grad():
        scores = gate(value.flatten(2)) if gate.reads_values else gate.scores
        recent = keys // 2 if scale is None else RECENT
        if scale is not None:
            places = torch.arange(scores.shape[2], device=scores.device)
            scores = places + scale[:, None] * scores.exp()
        selection = select(scores[:, heads].contiguous(), keys - recent, recent=recent)
    own = query.unflatten(2, (key.shape[2], -1))[:, :, heads].flatten(2, 3)
    rows = (own, key[:, :, heads], value[:, :, heads])
    return attention(*rows, selection=selection, causal=True)[0]


def attend_divided(
    first: Gate,
    scale: torch.Tensor,
    other: Gate,
    keys: int,
    query: Rows,
    key: Rows,
    value: Rows,
) -> Rows:
    """Attention to `keys` keys: half of the kv heads in the order of one gate, and the others to
    half of the newest keys and half by the scores of another gate."""
    half = key.shape[2] // 2
    rows = (keys, query, key, value)
    outs = (
        attend_in_order(first, scale, *rows, slice(half)),
        attend_in_order(other, None, *rows, slice(half, None)),
    )
    return torch.cat(outs, 2)


@contextlib.contextmanager
def choosing(model: Model, rule: Rule | None, gates: list[Gate]) -> Iterator[None]:
    """A context in which the last layer has this rule, or, with None, its own keys."""
    with contextlib.ExitStack() as stack:
        for gate in gates:
            stack.callback(model.attentions()[-1].register_forward_pre_hook(gate.read).remove)
        if rule is not None:
            stack.enter_context(restricted_heads(model, rule))
        yield


class Trial:
    """A training up to --select-start, and what follows it by each rule."""

    def __init__(self, own: argparse.Namespace, given: argparse.Namespace) -> None:
        self.own, self.given = own, given
        self.run = quality.Run(given)
        self.model, self.device = self.run.model, self.run.device
        corpus = quality.read_bytes(given.corpus / "corpus.bin")
        sizes = (given.batch, given.length, given.recall, given.curriculum, given.seed)
        needles = EPISODES[given.episodes]
        self.corpus, self.batches = corpus, Batches(corpus, *sizes, given.shortest_span, needles)
        held_out = quality.read_bytes(given.corpus / "held_out.bin")
        measured = (given.length, min(4, given.pieces), given.pieces, self.device)
        self.evaluation = Evaluation(held_out, *measured)
        self.gates: dict[str, Gate] = {}
        self.scores: dict[str, torch.Tensor] = {}
        settings = {name: value for name, value in vars(own).items() if name not in NO_SETTINGS}
        machine = find_machine(self.device.type)
        log = {name: self.run.log[name] for name in ("settings", "model", "sha256")}
        self.rows: list[dict[str, Any]] = [{**machine, **settings, **log}]

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        write_whole(self.run.path(".orders.json"), self.rows)

    def train_until(self, last: int) -> None:
        self.run.start_clock()
        while self.run.step < last:
            quality.take_step(self.run, self.model, self.batches)
            if self.run.step % quality.READ_EVERY == 0 or self.run.step == last:
                self.run.read_losses()

    def state(self) -> dict[str, Any]:
        run = self.run
        optimizers = [one.state_dict() for one in run.optimizers]
        parts = {"model": self.model.state_dict(), "optimizers": optimizers}
        return {**parts, "step": run.step, "seconds": run.seconds}

    def restore(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)
        self.model.load_state_dict(state["model"])
        for optimizer, own in zip(self.run.optimizers, state["optimizers"]):
            optimizer.load_state_dict(own)
        self.run.step, self.run.seconds = state["step"], state["seconds"]

    def begin(self, start: int) -> None:
        """The training up to this step, or its file."""
        path = self.own.state
        if path is not None and path.is_file():
            self.restore(torch.load(path, map_location=self.device, weights_only=True))
            return
        program.doing(f"trains up to step {start}")
        self.train_until(start)
        if path is not None:
            unfinished = path.with_name(path.name + ".unfinished")
            torch.save(self.state(), unfinished)
            unfinished.replace(path)

    def learn(self, kind: str) -> None:
        """Trains a gate, and keeps scores of texts that it did not learn from."""
        own, given = self.own, self.given
        program.doing(f"trains the gate {kind}")
        names = {"steps": own.gate_steps, "seconds": own.gate_seconds, "keys": [own.gate_keys]}
        names |= {"rate": own.gate_rate, "capacity_weight": own.capacity_weight}
        same = ("recall", "recall_weight", "length", "episodes")
        names |= {name: getattr(given, name) for name in same}
        names |= {"shortest_span": min(own.gate_span, given.length)}
        names |= {"queries": own.queries, "seed": given.seed + 100, "device": given.device}
        gate = new_gate(self.model, kind, given.length, given.seed).to(self.device)
        self.add(train(gate, kind, self.model, self.corpus, argparse.Namespace(**names)))
        sizes = (1, given.length, given.recall, 0, given.seed + 200, names["shortest_span"])
        texts = Batches(self.corpus, *sizes, EPISODES[given.episodes])
        found = []
        for number in range(CALIBRATION):
            text = to_device(texts(number)[0], self.device).long()[:, :-1]
            with torch.no_grad():
                found.append(gate.of(run_frozen(self.model, text)))
        self.gates[kind], self.scores[kind] = gate.requires_grad_(False), torch.cat(found)

    def rule_of(self, order: Order) -> tuple[Rule | None, list[Gate]]:
        if order.keys is None or order.keys >= self.given.length:
            return None, []
        if not order.gates:
            return partial(attend_with, "newest", order.keys, order.keys - 1), []
        gates = [self.gates[name] for name in order.gates]
        scores = self.scores[order.name]
        scale = None if order.is_half else lifetime_scale(scores, order.keys).float()
        if scale is not None and len(gates) == 2:
            return partial(attend_divided, gates[0], scale, gates[1], order.keys), gates
        return partial(attend_in_order, gates[0], scale, order.keys), gates

    def measure(self, order: Order, trained: int) -> None:
        given = argparse.Namespace(questions=self.given.questions, tasks=self.given.tasks)
        rule, gates = self.rule_of(order)
        plain = partial(quality_model.attend_to_all, causal=True) if rule is None else rule
        begin = time.perf_counter()
        with choosing(self.model, None, gates):
            found = quality_gates.measure(self.model, self.evaluation, plain, given)
        found["measured_in"] = round(time.perf_counter() - begin, 1)  # seconds
        row = {**dataclasses.asdict(order), "trained": trained}
        if self.device.type == "cuda":
            row["peak_memory"] = torch.cuda.max_memory_allocated(self.device)
        self.add({**row, "seconds": round(self.run.seconds, 1), **found})

    def follow(self) -> None:
        """Everything, for all rules."""
        start, steps = self.given.select_start, self.given.steps
        if self.given.compile:
            for block in self.model.blocks[:-1]:
                block.compile()
        self.begin(start)
        state = copy.deepcopy(self.state())
        numbered = [(order, start) for order in self.own.untrained]
        for order, last in [*numbered, *((order, steps) for order in self.own.rules)]:
            self.restore(state)
            self.prepare(order)
            program.doing(f"goes on with {order.name}, {order.keys} keys")
            rule, gates = self.rule_of(order)
            with choosing(self.model, rule, gates):
                self.train_until(last)
            if self.own.save:
                self.save(order, last - start)
            with eager():
                self.measure(order, last - start)

    def save(self, order: Order, trained: int) -> None:
        """OUT/NAME.RULE-KEYS-STEPS.safetensors, and the same with .gate, for quality_folder.py."""
        stem = f".{rule_name(dataclasses.asdict(order))}-{order.keys or 'all'}-{trained}"
        stem = stem.replace("/", "-").replace(" ", "-")
        quality_model.save(self.model, self.run.path(f"{stem}.safetensors"), "bfloat16")
        if order.keys is None or order.is_half or len(order.gates) != 1:
            return
        gate = self.gates[order.name].state_dict()
        state = {name: one.detach().cpu() for name, one in gate.items()}
        scale = lifetime_scale(self.scores[order.name], order.keys).float().cpu()
        state["contract.bias"] = state["contract.bias"] + scale.log()
        path = self.run.path(f"{stem}.gate.safetensors")
        sizes = {"keys": str(order.keys), "recent": str(RECENT)}
        safetensors.torch.save_file(state, path, metadata=sizes)

    def prepare(self, order: Order) -> None:
        """Trains the gates of an order that were not yet trained."""
        for name in order.gates:
            if name in self.gates:
                continue
            learned = [one for one in self.model.parameters() if one.requires_grad]
            self.model.requires_grad_(False)
            with eager():
                self.learn(name)
            for parameter in learned:
                parameter.requires_grad_()

    def show(self) -> None:
        measured = [row for row in self.rows if "trained" in row]
        distances = list(measured[0]["recall"])
        back = list(measured[0]["needles"]["identifier"])
        cells = [
            (rule_name(row), str(row["keys"] or "all"))
            + (str(row["trained"]), f"{row['bits']:.4f}")
            + tuple(f"{row['recall'][one]:.2f}" for one in distances)
            + tuple(f"{row['needles']['identifier'][one]:.2f}" for one in back)
            for row in measured
        ]
        names = ("rule", "keys", "trained", "loss", *distances)
        names += tuple(f"identifier {one}" for one in back)
        print(*table_of(names, cells, {"rule"}), sep="\n")
        columns = [quality_tasks.table_rows(row["tasks"]) for row in measured]
        if columns[0]:
            rules = [f"{rule_name(row)} {row['keys'] or ''}".strip() for row in measured]
            cells = [(task, *(column[task] for column in columns)) for task in columns[0]]
            print("", *table_of(("task", *rules), cells, {"task"}), sep="\n")


def rule_name(row: dict[str, Any]) -> str:
    other = "" if row["other"] is None else f"+{row['other']}"
    return row["name"] + "/half" * row["is_half"] + other


def eager() -> Any:
    """A context in which what torch.compile compiled runs without it."""
    return torch.compiler.set_stance("force_eager")


def main(arguments: list[str] | None = None) -> None:
    own, words = parse(arguments)
    given = quality_options.parse("the options of quality.py", words)
    if given.start is None or not given.select_start:
        print("quality_orders.py: want --start and --select-start", file=sys.stderr)
        sys.exit(2)
    given.out.mkdir(parents=True, exist_ok=True)
    trial = Trial(own, given)
    *others, last = trial.model.attentions()
    if any(layer.nope_heads > 0 for layer in others) or last.nope_heads < last.kv_heads:
        message = "want NoPE heads in all of the last layer, and in no other"
        print(f"quality_orders.py: {given.start}: {message}", file=sys.stderr)
        sys.exit(2)
    if any(len(order.gates) == 2 for order in (*own.rules, *own.untrained)) and last.kv_heads < 2:
        print(f"quality_orders.py: {given.start}: want two kv heads or more", file=sys.stderr)
        sys.exit(2)
    with quality_model.prefer_cudnn():
        trial.follow()
    trial.show()


if __name__ == "__main__":
    main()
