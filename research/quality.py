#!/usr/bin/env python3
"""Train a byte-level language model with one form of attention, and measure how good it is.

    python research/quality.py OUT --corpus FOLDER --form recent --size large --steps 2000
    python research/quality.py OUT --corpus FOLDER --form recent --size large --resume
    python research/quality.py OUT --corpus FOLDER --form recent --size large --evaluate

FOLDER has the files of quality_text.py; quality_model.py defines the forms. The sequences of a step
depend on --seed and the step only, so that all forms read the same text in the same order. A
fraction of them has recall episodes (quality_recall.py). The program writes

    OUT/NAME.json         settings, losses and measurements, anew after every evaluation
    OUT/NAME.pt           model and optimizer, for --resume, every --checkpoint-seconds
    OUT/NAME.safetensors  the weights, at the end

where NAME is form-size-seed unless --name is given. Losses are in bits per byte; seconds count
training, without evaluations and checkpoints. It runs on a CUDA device, if there is one, or on the
CPU, with the package installed or FDMA_LIBRARY and PYTHONPATH in the environment. Started by
torchrun, it divides the sequences of each step among the processes, a GPU each.
Exit status: 0 done; 1 the loss is not a number; 2 bad usage.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import quality_model
import quality_optimizer
import quality_options
import torch
from quality_evaluate import Evaluation
from quality_model import narrow, to_device
from quality_needles import EPISODES
from quality_recall import Batches
from quality_targets import ScoreTargets
from torch import distributed, nn
from torch.nn.functional import cross_entropy

READ_EVERY = 20  # steps between readings of losses, which wait for the device
RATED_STEPS = (10, 20)  # with --seconds, these steps are timed to find the number of steps
QUICK_PAIRS, QUICK_QUESTIONS = (8,), 64  # in evaluations during training
PASSKEY_SEQUENCES = 4  # for each depth


def read_bytes(path: Path) -> np.ndarray:
    return np.fromfile(path, np.uint8)


def hashes_of(corpus: Path) -> dict[str, str]:
    """SHA-256 of the two files of text."""
    return {
        name: hashlib.sha256(read_bytes(corpus / f"{name}.bin")).hexdigest()
        for name in ("corpus", "held_out")
    }


def machine_of(device: torch.device) -> dict[str, str]:
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else platform.processor()
    return {"device": name or platform.machine(), "torch": str(torch.__version__)}


def refuse(path: Path, message: str) -> NoReturn:
    """Exit because of the contents of a file."""
    print(f"quality.py: {path}: {message}", file=sys.stderr)
    sys.exit(2)


def require_same_kind(
    path: Path, model: dict[str, str], config: quality_model.Config, *, is_same_model: bool
) -> None:
    """Exit if the model of a file has other NoPE heads, which its weights do not show, or if only
    one of the two models has normalized queries and keys. With is_same_model, also exit if layers
    with NoPE heads have another window or another number of newest keys; a training that starts
    from the file may change both."""
    for name in ("nope", "nope_rotary_dim", "qk_norm"):
        found, wanted = model.get(name), config.metadata()[name]
        if found is not None and found != wanted:
            refuse(path, f"{name} is '{found}', want '{wanted}'")
    for name in ("nope_window", "nope_recent"):
        found, wanted = (of.get(name, "none") for of in (model, config.metadata()))
        if is_same_model and found != wanted:
            refuse(path, f"{name} is {found}, want {wanted}")


class Ranks:
    """The processes of a training, all on one host. Each takes some sequences of every step; their
    gradients are added up. torchrun says in the environment how many there are."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.count, self.rank, self.device = 1, 0, torch.device(options.device)
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return
        self.count, self.rank = (int(os.environ[name]) for name in ("WORLD_SIZE", "RANK"))
        fits = options.steps is not None and options.batch % self.count == 0
        if not fits or options.score_targets or os.environ["LOCAL_RANK"] != os.environ["RANK"]:
            wanted = f"--steps, no --score-targets, a --batch divisible by {self.count}, one host"
            print(f"quality.py: {self.count} processes want {wanted}", file=sys.stderr)
            sys.exit(2)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        distributed.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    def share(self, arrays: tuple[np.ndarray, ...]) -> list[np.ndarray]:
        """This rank's sequences."""
        return [array[self.rank :: self.count] for array in arrays]

    def add(self, tensors: list[torch.Tensor]) -> None:
        """Replace each tensor by its sum over all ranks."""
        if self.count > 1:
            flat = torch.cat([x.flatten() for x in tensors])
            distributed.all_reduce(flat)
            parts = flat.split([x.numel() for x in tensors])
            torch._foreach_copy_(tensors, [a.view_as(b) for a, b in zip(parts, tensors)])


class Run:
    """The training of one model, up to its current step."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ranks = Ranks(options)
        self.device = self.ranks.device
        config = quality_model.config_of(
            options.form,
            options.size,
            options.keys,
            options.recent,
            sinks=options.sinks,
            bias_form=options.bias_form,
            rotary_base=options.rotary_base,
            sliding_heads=options.sliding_heads,
            score_layers=options.score_layers,
            nope_heads=options.nope_heads,
            nope_layers=options.nope_layers,
            nope_rotary_dim=options.nope_rotary_dim or 0,
            qk_norm=options.qk_norm,
            nope_keys=options.nope_keys,
            nope_recent=options.nope_recent,
        )
        self.model = quality_model.Model(config)
        quality_model.initialise(
            self.model, options.form, options.seed, options.initial_a, options.dt_std
        )
        if options.nope_heads > 0 and options.form in quality_model.LEARNED:
            quality_model.initialise_nope(self.model, options.nope_a)
        if options.start is not None:
            self.start_from(options.start)
        self.model.to(self.device)
        groups = quality_optimizer.parameter_groups(self.model, options.decay, options.score_rate)
        groups["hidden"]["factor"] = options.hidden_rate
        self.optimizers = quality_optimizer.optimizers_of(groups, options.optimizer, options.rate)
        self.targets = self.targets_of_scores()
        self.score_rates = self.rates_of_scores()
        self.first = self.step = options.start_step
        self.steps = options.steps
        settings = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(options).items()
        }
        self.log: dict[str, Any] = {
            "settings": settings,
            "model": config.metadata(),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "machine": {**machine_of(self.device), "ranks": self.ranks.count},
            "sha256": hashes_of(options.corpus),
            "columns": ["step", "seconds", "text bits", "recall bits", "gradient norm"],
            "train": [],
            "held_out": [],
        }
        self.seconds = 0.0
        self.began = 0.0  # when the clock of training was last started
        self.pending: list[torch.Tensor] = []  # sums of steps that were not read yet
        self.counts = [0, 0]  # bytes in these: of texts without episodes, and marked bytes

    def start_from(self, path: Path) -> None:
        """Take the weights of a file."""
        options, start = self.options, quality_model.load(path)
        found, wanted = start.config.metadata(), self.model.config
        require_same_kind(path, found, wanted, is_same_model=options.evaluate)
        try:
            quality_model.start_from(self.model, start, options.new_scores)
        except ValueError as error:
            refuse(path, str(error))
        if not options.evaluate:
            self.require_positive_a(path)

    def targeted_heads(self) -> list[int]:
        """The number of kv heads in each layer whose scores learn from targets; they are the last
        ones."""
        which, layers = self.options.score_targets, self.model.attentions()
        if which == "nope":
            return [layer.nope_heads for layer in layers]
        return [layer.kv_heads - layer.sliding_heads if which else 0 for layer in layers]

    def require_positive_a(self, path: Path) -> None:
        """Exit if targets would teach a head to rank its keys in reverse."""
        for number, (layer, count) in enumerate(
            zip(self.model.attentions(), self.targeted_heads())
        ):
            if count > 0 and (least := layer.A[-count:].min().item()) <= 0:
                message = f"A of layer {number} is {least:g}, want above 0 with --score-targets"
                refuse(path, message)

    def targets_of_scores(self) -> ScoreTargets | None:
        options = self.options
        if options.score_targets is None:
            return None
        rule = (options.target_start, options.target_every, options.target_rate)
        return ScoreTargets(self.model, self.targeted_heads(), *rule, options.target_recent)

    def rates_of_scores(self) -> quality_optimizer.ScoreRates:
        """The learning rates of heads whose scores have another rate than the rest."""
        options = self.options
        if self.targets is not None:
            return quality_optimizer.ScoreRates(self.model, self.targeted_heads(), 0.0, 0.0)
        nope = [layer.nope_heads for layer in self.model.attentions()]
        a_rate = options.nope_rate if options.nope_a_rate is None else options.nope_a_rate
        return quality_optimizer.ScoreRates(self.model, nope, options.nope_rate, a_rate)

    def set_windows(self) -> bool:
        """Gives layers with NoPE heads the window of this step: all keys before --select-start.
        Returns True if a window changed."""
        is_early = self.step < (self.options.select_start or 0)
        config, has_changed = self.model.config, False
        for layer in self.model.attentions():
            if layer.nope_heads > 0 and config.nope_window is not None:
                window = self.options.length if is_early else config.nope_window
                has_changed |= window != layer.window
                layer.window = window
        return has_changed

    def path(self, suffix: str) -> Path:
        return self.options.out / f"{self.options.name}{suffix}"

    def write_log(self) -> None:
        unfinished = self.path(".json.unfinished")
        unfinished.write_text(json.dumps(self.log) + "\n")
        unfinished.replace(self.path(".json"))

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "steps": self.steps,
            "seconds": self.seconds,
            "log": self.log,
        }
        if self.targets is not None:
            state["targets"] = self.targets.state_dict()
        unfinished = self.path(".pt.unfinished")
        torch.save(state, unfinished)
        unfinished.replace(self.path(".pt"))

    def load(self) -> None:
        path = self.path(".pt")
        state = torch.load(path, map_location=self.device, weights_only=True)
        begun = state["log"]["settings"]
        log = state["log"]
        require_same_kind(path, log["model"], self.model.config, is_same_model=True)
        if not self.options.evaluate:
            if log.get("sha256", self.log["sha256"]) != self.log["sha256"]:
                refuse(path, f"was trained on another text than that of {self.options.corpus}")
            for name in quality_options.SAME_TRAINING:
                if (found := begun.get(name)) != getattr(self.options, name):
                    refuse(path, f"{name} is {found}, want {getattr(self.options, name)}")
        self.model.load_state_dict(state["model"])
        if not self.options.evaluate:
            for optimizer, its_state in zip(self.optimizers, state["optimizers"]):
                optimizer.load_state_dict(its_state)
        if self.targets is not None and not self.options.evaluate:
            self.targets.load_state_dict(state["targets"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.first = begun.get("start_step", 0)
        self.steps = state["steps"] if self.options.steps is None else self.options.steps
        beginning = {name: begun[name] for name in quality_options.BEGINNING if name in begun}
        self.log = {**state["log"], "settings": {**self.log["settings"], **beginning}}

    def start_clock(self) -> None:
        self.began = time.perf_counter()

    def read_losses(self) -> None:
        """Wait for the device, and log the losses of the steps since the last reading."""
        if not self.pending:
            return
        sums = torch.stack(self.pending).double().sum(0)
        self.ranks.add([sums[:2]])
        text, marked, norm = sums.tolist()
        now = time.perf_counter()
        self.seconds += now - self.began
        self.began = now
        row = [
            total / count / math.log(2) if count else None
            for total, count in zip((text, marked), self.counts)
        ]
        row.append(norm / len(self.pending))
        self.pending, self.counts = [], [0, 0]
        self.log["train"].append([self.step, round(self.seconds, 3), *row])
        if not all(math.isfinite(number) for number in row if number is not None):
            self.log["failed"] = f"the loss is not a number before step {self.step}"
            self.write_log()
            sys.exit(self.log["failed"])


def warm_up(run: Run, forward: nn.Module, batches: Batches) -> None:
    """One pass without a step, so that the seconds of training exclude compilation. The log has the
    seconds of all such passes."""
    begin = time.perf_counter()
    rows = to_device(run.ranks.share(batches(run.step))[0], run.device).long()
    with narrow(run.device):
        forward(rows[:, :-1]).float().mean().backward()
    run.model.zero_grad(set_to_none=True)
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
    seconds = run.log.get("warm_up_seconds", 0.0) + time.perf_counter() - begin
    run.log["warm_up_seconds"] = round(seconds, 3)


def take_step(run: Run, forward: nn.Module, batches: Batches) -> None:
    """One step of the optimizer. The loss is the mean over unmarked bytes, plus recall_weight times
    the mean over marked ones, which are few."""
    options, device = run.options, run.device
    whole = batches(run.step)
    _, marked, has_episodes = whole
    counts = int((~has_episodes).sum()) * options.length, int(marked.sum())
    unmarked = marked.size - counts[1]
    text, marked, has_episodes = run.ranks.share(whole)
    rows, is_marked = to_device(text, device).long(), to_device(marked, device)
    is_text = to_device(~has_episodes, device)
    steps = options.schedule_steps or run.steps or run.step + 1
    rate = quality_optimizer.rate_at(run.step, steps, options.rate, options.warm_up, run.first)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["factor"]
    with narrow(device):
        logits = forward(rows[:, :-1])
    losses = cross_entropy(
        logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="none"
    ).view(marked.shape)
    of_marked = (losses * is_marked).sum()
    others = losses.sum() - of_marked
    loss = others / unmarked
    loss = loss + options.recall_weight * of_marked / max(1, counts[1])
    run.model.zero_grad(set_to_none=True)
    loss.backward()
    run.ranks.add([p.grad for p in run.model.parameters() if p.grad is not None])
    run.score_rates.drop_gradients()
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), options.clip)
    run.score_rates.step(run.optimizers[0])
    for optimizer in run.optimizers[1:]:
        optimizer.step()
    if run.targets is not None:
        run.targets.learn(run.step, rows[:, :-1], rate)
    of_text = (losses.detach() * is_text[:, None]).sum()
    run.step += 1
    run.pending.append(torch.stack((of_text, of_marked.detach(), norm)))
    run.counts = [a + b for a, b in zip(run.counts, counts)]


def find_steps(run: Run, seconds: float) -> int:
    """With --seconds alone: the number of steps that takes that long at the rate of the first
    ones."""
    (_, first, *_), (_, second, *_) = run.log["train"][-2:]
    of_step = (second - first) / (RATED_STEPS[1] - RATED_STEPS[0])
    return RATED_STEPS[1] + max(1, round((seconds - second) / of_step))


def train(run: Run, evaluation: Evaluation, batches: Batches) -> None:
    options = run.options
    forward = torch.compile(run.model) if options.compile else run.model
    run.set_windows()
    warm_up(run, forward, batches)
    run.start_clock()
    saved = time.perf_counter()
    while run.steps is None or run.step < run.steps:
        if run.set_windows():
            run.read_losses()
            warm_up(run, forward, batches)
            run.start_clock()
        take_step(run, forward, batches)
        is_last = run.step == run.steps
        is_evaluated = is_last or run.step % options.every == 0
        is_rated = run.steps is None and run.step in RATED_STEPS
        if is_evaluated or is_rated or run.step % READ_EVERY == 0:
            run.read_losses()
            if is_rated and run.step == RATED_STEPS[1]:
                run.steps = find_steps(run, options.seconds)
            if is_evaluated and run.ranks.rank == 0:
                quick_evaluation(run, evaluation)
            is_due = time.perf_counter() - saved > options.checkpoint_seconds
            if (is_due or is_last) and run.ranks.rank == 0:
                run.save()
                saved = time.perf_counter()
            run.start_clock()
    run.read_losses()


def quick_evaluation(run: Run, evaluation: Evaluation) -> None:
    """Held-out loss and a little recall, during training."""
    row = {"step": run.step, "seconds": round(run.seconds, 3), **evaluation.losses(run.model)}
    row["recall"] = evaluation.recall(run.model, QUICK_QUESTIONS, QUICK_PAIRS)
    if run.targets is not None and run.targets.last_loss is not None:
        row["target_loss"] = run.targets.last_loss.item()
    run.log["held_out"].append(row)
    trained = (run.step - run.first) * run.options.batch * run.options.length
    run.log["bytes_per_second"] = trained / run.seconds if run.seconds else None
    if run.device.type == "cuda":
        run.log["peak_memory"] = torch.cuda.max_memory_allocated(run.device)
    run.write_log()
    accuracy = " ".join(f"{one['accuracy']:.2f}" for one in row["recall"])
    print(
        f"{run.options.name} step {run.step} of {run.steps}, {run.seconds:.1f} s: "
        f"held out {row['bits']:.4f}, recall by distance {accuracy}",
        flush=True,
    )


def evaluate(run: Run, evaluation: Evaluation) -> None:
    options = run.options
    begin = time.perf_counter()
    run.model.eval()
    run.log["final"] = {
        "step": run.step,
        **evaluation.losses(run.model),
        "recall": evaluation.recall(run.model, options.questions),
        "passkey": evaluation.passkey(run.model, PASSKEY_SEQUENCES),
        "needles": evaluation.needles(run.model),
        "tasks": evaluation.tasks(run.model, options.tasks),
        "by_window": evaluation.by_window(run.model),
        "kept": evaluation.kept(run.model),
    }
    if run.model.config.window is not None:
        run.log["final"]["a"] = [one.a_coef.tolist() for one in run.model.attentions()]
    run.log["final"]["seconds"] = round(time.perf_counter() - begin, 1)
    run.write_log()
    quality_model.save(run.model, run.path(".safetensors"), options.weights)


def main(arguments: list[str] | None = None) -> None:
    head, _, _ = __doc__.partition("\n\n")
    options = quality_options.parse(head, arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options)
    held_out = read_bytes(options.corpus / "held_out.bin")
    evaluation = Evaluation(held_out, options.length, options.batch, options.pieces, run.device)
    if (options.evaluate or options.resume) and run.path(".pt").exists():
        run.load()
    with quality_model.prefer_cudnn():
        if not options.evaluate:
            corpus = read_bytes(options.corpus / "corpus.bin")
            batches = Batches(
                corpus,
                options.batch,
                options.length,
                options.recall,
                options.curriculum,
                options.seed,
                options.shortest_span,
                EPISODES[options.episodes],
            )
            train(run, evaluation, batches)
        if run.ranks.count > 1:  # before others wait for rank 0 until a time is out
            distributed.destroy_process_group()
        if run.ranks.rank == 0:
            evaluate(run, evaluation)


if __name__ == "__main__":
    main()
