#!/usr/bin/env python3
"""Train a byte-level language model with one form of attention, and measure how good it is.

    python benchmarks/quality.py OUT --corpus FOLDER --form recent --size large --steps 2000
    python benchmarks/quality.py OUT --corpus FOLDER --form recent --size large --resume
    python benchmarks/quality.py OUT --corpus FOLDER --form recent --size large --evaluate

FOLDER has the files of quality_text.py, the forms are those of quality_model.py. The sequences of a
step depend on --seed and the step only, so that all forms read the same text in the same order; a
fraction of them has recall episodes (quality_recall.py). It writes

    OUT/NAME.json         settings, losses and measurements, anew after every evaluation
    OUT/NAME.pt           model and optimizer, for --resume, every --checkpoint-seconds
    OUT/NAME.safetensors  the weights, at the end

where NAME is form-size-seed unless --name is given. Losses are in bits per byte; seconds are those
of training, without evaluations and checkpoints. It runs on a CUDA device, if there is one, or on
the CPU, with the package installed or FDMA_LIBRARY and PYTHONPATH in the environment.
Exit status: 0 done; 1 the loss is not a number; 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import quality_model
import torch
from quality_evaluate import Evaluation, narrow
from quality_recall import Batches
from quality_targets import ScoreTargets
from torch import nn
from torch.nn.functional import cross_entropy

READ_EVERY = 20  # steps between readings of losses, which wait for the device
RATES = {"large": 1e-3, "small": 1.5e-3, "tiny": 2e-3}  # peak learning rates
# usual settings of NoPE heads; with this A their bias hardly changes attention
NOPE = {"nope_rotary_dim": 0, "nope_a": 0.005, "nope_rate": 0.03}
RATED_STEPS = (10, 20)  # with --seconds, the steps that are timed to find their number
QUICK_PAIRS, QUICK_QUESTIONS = (8,), 64  # of evaluations during training
PASSKEY_SEQUENCES = 4  # of each depth


def read_bytes(path: Path) -> np.ndarray:
    return np.fromfile(path, np.uint8)


def machine_of(device: torch.device) -> dict[str, str]:
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else platform.processor()
    return {"device": name or platform.machine(), "torch": str(torch.__version__)}


def require_same_nope(path: Path, model: dict[str, str], config: quality_model.Config) -> None:
    """Exit if the model of a file has other NoPE heads, which its weights do not tell."""
    for name in ("nope", "nope_rotary_dim"):
        found, wanted = model.get(name), config.metadata()[name]
        if found is not None and found != wanted:
            print(f"quality.py: {path}: {name} is '{found}', want '{wanted}'", file=sys.stderr)
            sys.exit(2)


class Run:
    """The training of one model, as far as it has come."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        config = quality_model.config_of(
            *(options.form, options.size, options.keys, options.recent, options.sinks),
            *(options.bias_form, options.rotary_base),
            *(options.sliding_heads, options.score_layers),
            *(options.nope_heads, options.nope_layers, options.nope_rotary_dim or 0),
        )
        self.model = quality_model.Model(config)
        quality_model.initialise(
            self.model, options.form, options.seed, options.initial_a, options.dt_std
        )
        if options.nope_heads > 0 and options.form in quality_model.LEARNED:
            quality_model.initialise_nope(self.model, options.nope_a)
        if options.start is not None:
            start = quality_model.load(options.start)
            require_same_nope(options.start, start.config.metadata(), config)
            try:
                quality_model.start_from(self.model, start, options.new_scores)
            except ValueError as error:
                print(f"quality.py: {options.start}: {error}", file=sys.stderr)
                sys.exit(2)
        self.model.to(self.device)
        groups = quality_model.parameter_groups(self.model, options.decay, options.score_rate)
        self.optimizer = torch.optim.AdamW(
            groups, lr=options.rate, betas=(0.9, 0.95), fused=self.device.type == "cuda"
        )
        self.targets: ScoreTargets | None = None
        self.score_rates = self.rates_of_scores()
        self.step, self.steps = options.start_step, options.steps
        settings = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(options).items()
        }
        self.log: dict[str, Any] = {
            "settings": settings,
            "model": config.metadata(),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "machine": machine_of(self.device),
            "columns": ["step", "seconds", "text bits", "recall bits", "gradient norm"],
            "train": [],
            "held_out": [],
        }
        self.seconds = 0.0
        self.began = 0.0  # when the clock of training was started last
        self.pending: list[torch.Tensor] = []  # sums of the steps that were not read yet
        self.counts = [0, 0]  # of bytes in these: of text without episodes, and marked ones

    def rates_of_scores(self) -> quality_model.ScoreRates:
        """For the heads whose scores have another learning rate than the rest; sets `targets`."""
        options, layers = self.options, self.model.attentions()
        nope = [layer.nope_heads for layer in layers]
        if options.score_targets is None:
            a_rate = options.nope_rate if options.nope_a_rate is None else options.nope_a_rate
            return quality_model.ScoreRates(self.model, nope, options.nope_rate, a_rate)
        learned = [layer.kv_heads - layer.sliding_heads for layer in layers]
        heads = nope if options.score_targets == "nope" else learned
        rule = (options.target_every, options.target_rate)
        self.targets = ScoreTargets(self.model, heads, *rule)
        return quality_model.ScoreRates(self.model, heads, 0.0, 0.0)

    def path(self, suffix: str) -> Path:
        return self.options.out / f"{self.options.name}{suffix}"

    def write_log(self) -> None:
        unfinished = self.path(".json.unfinished")
        unfinished.write_text(json.dumps(self.log) + "\n")
        unfinished.replace(self.path(".json"))

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
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
        state = torch.load(self.path(".pt"), map_location=self.device, weights_only=True)
        require_same_nope(self.path(".pt"), state["log"]["model"], self.model.config)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.targets is not None:
            self.targets.load_state_dict(state["targets"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.steps = state["steps"] if self.options.steps is None else self.options.steps
        self.log = {**state["log"], "settings": self.log["settings"]}

    def start_clock(self) -> None:
        self.began = time.perf_counter()

    def read_losses(self) -> None:
        """Wait for the device, and log the losses of the steps since the last reading."""
        if not self.pending:
            return
        text, marked, norm = torch.stack(self.pending).cpu().double().sum(0).tolist()
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


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device, without waiting for it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def warm_up(run: Run, forward: nn.Module, batches: Batches) -> None:
    """One pass without a step, so that compilation is not in the seconds of training."""
    begin = time.perf_counter()
    rows = to_device(batches(run.step)[0], run.device).long()
    with narrow(run.device):
        forward(rows[:, :-1]).float().mean().backward()
    run.optimizer.zero_grad(set_to_none=True)
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
    run.log["warm_up_seconds"] = round(time.perf_counter() - begin, 3)


def take_step(run: Run, forward: nn.Module, batches: Batches) -> None:
    """One step of the optimizer. The loss is the mean over unmarked bytes, and recall_weight times
    the mean over marked ones, which are few."""
    options, device = run.options, run.device
    text, marked, has_episodes = batches(run.step)
    counts = int((~has_episodes).sum()) * options.length, int(marked.sum())
    rows, is_marked = to_device(text, device).long(), to_device(marked, device)
    is_text = to_device(~has_episodes, device)
    steps = options.schedule_steps or run.steps or run.step + 1
    rate = quality_model.rate_at(run.step, steps, options.rate, options.warm_up, options.start_step)
    for group in run.optimizer.param_groups:
        group["lr"] = rate * group["factor"]
    with narrow(device):
        logits = forward(rows[:, :-1])
    losses = cross_entropy(
        logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="none"
    ).view(marked.shape)
    of_marked = (losses * is_marked).sum()
    others = losses.sum() - of_marked
    loss = others / (marked.size - counts[1])
    loss = loss + options.recall_weight * of_marked / max(1, counts[1])
    run.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), options.clip)
    run.score_rates.step(run.optimizer)
    if run.targets is not None:
        run.targets.step(run.step, rows[:, :-1], rate)
    of_text = (losses.detach() * is_text[:, None]).sum()
    run.step += 1
    run.pending.append(torch.stack((of_text, of_marked.detach(), norm)))
    run.counts = [a + b for a, b in zip(run.counts, counts)]


def find_steps(run: Run, seconds: float) -> int:
    """With --seconds alone: as many steps as take so long at the rate of the first ones."""
    (_, first, *_), (_, second, *_) = run.log["train"][-2:]
    of_step = (second - first) / (RATED_STEPS[1] - RATED_STEPS[0])
    return RATED_STEPS[1] + max(1, round((seconds - second) / of_step))


def train(run: Run, evaluation: Evaluation, batches: Batches) -> None:
    options = run.options
    forward = torch.compile(run.model) if options.compile else run.model
    warm_up(run, forward, batches)
    run.start_clock()
    saved = time.perf_counter()
    while run.steps is None or run.step < run.steps:
        take_step(run, forward, batches)
        is_last = run.step == run.steps
        is_evaluated = is_last or run.step % options.every == 0
        is_rated = run.steps is None and run.step in RATED_STEPS
        if is_evaluated or is_rated or run.step % READ_EVERY == 0:
            run.read_losses()
            if is_rated and run.step == RATED_STEPS[1]:
                run.steps = find_steps(run, options.seconds)
            if is_evaluated:
                quick_evaluation(run, evaluation)
            is_due = time.perf_counter() - saved > options.checkpoint_seconds
            if is_due or is_last:
                run.save()
                saved = time.perf_counter()
            run.start_clock()
    run.read_losses()


def quick_evaluation(run: Run, evaluation: Evaluation) -> None:
    """Held-out loss and a little recall, during training."""
    row = {"step": run.step, "seconds": round(run.seconds, 3), **evaluation.losses(run.model)}
    row["recall"] = evaluation.recall(run.model, QUICK_QUESTIONS, QUICK_PAIRS)
    run.log["held_out"].append(row)
    trained = (run.step - run.options.start_step) * run.options.batch * run.options.length
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
    """All measurements."""
    options = run.options
    begin = time.perf_counter()
    run.model.eval()
    run.log["final"] = {
        "step": run.step,
        **evaluation.losses(run.model),
        "recall": evaluation.recall(run.model, options.questions),
        "passkey": evaluation.passkey(run.model, PASSKEY_SEQUENCES),
        "by_window": evaluation.by_window(run.model),
        "kept": evaluation.kept(run.model),
    }
    if run.model.config.window is not None:
        run.log["final"]["a"] = [one.a_coef.tolist() for one in run.model.attentions()]
    run.log["final"]["seconds"] = round(time.perf_counter() - begin, 1)
    run.write_log()
    quality_model.save(run.model, run.path(".safetensors"), options.weights)


def add_scores(parser: argparse.ArgumentParser) -> None:
    """Options of which heads have scores, and of how they learn."""
    add = parser.add_argument
    add("--sliding-heads", type=int, default=0, help="kv heads of a layer without scores (0)")
    add("--score-layers", type=int, help="scores in the last of every so many layers (all)")
    add("--nope-heads", type=int, default=0, help="NoPE kv heads of a layer (0)")
    add("--nope-layers", type=int, nargs="+", help="layers that have them, from 0 (all)")
    add("--nope-rotary-dim", type=int, help="channels of them that are rotated (0)")
    add("--nope-a", type=float, help="their A before training (0.005)")
    add("--nope-rate", type=float, help="multiplies the rate of their dt_proj and A (0.03)")
    add("--nope-a-rate", type=float, help="multiplies that of A instead, 0: A stays (--nope-rate)")
    add("--bias-form", choices=("exp", "linear", "none"), default="exp")
    add("--initial-a", type=float, default=0.0, help="A before training, where it is learned (0)")
    add("--dt-std", type=float, default=quality_model.STD, help="of dt_proj's weights (0.02)")
    add("--score-rate", type=float, default=1.0, help="multiplies the rate of dt_proj and A (1)")
    add("--score-targets", choices=("nope", "all"), help="heads whose scores learn from targets")
    add("--target-every", type=int, default=8, help="steps between steps of these scores (8)")
    add("--target-rate", type=float, default=1.0, help="multiplies their learning rate (1)")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    head, _, _ = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=head, allow_abbrev=False)
    add = parser.add_argument
    add("out", type=Path)
    add("--corpus", type=Path, required=True, help="folder of corpus.bin and held_out.bin")
    add("--form", choices=quality_model.FORMS, required=True)
    add("--size", choices=tuple(quality_model.SIZES), default="small")
    add("--name", help="of the files that are written (form-size-seed)")
    add("--steps", type=int)
    add("--seconds", type=float, help="without --steps: train for about so long")
    add("--schedule-steps", type=int, help="steps of the learning rate's schedule (--steps)")
    add("--batch", type=int, default=8, help="sequences in a step (8)")
    add("--length", type=int, default=8192, help="bytes of a sequence (8192)")
    add("--keys", type=int, default=512, help="keys that a query keeps in all (512)")
    add("--recent", type=int, default=64, help="of which the newest ones, in two forms (64)")
    add("--sinks", type=int, default=0)
    add_scores(parser)
    add("--rotary-base", type=float, default=10000.0)
    add("--rate", type=float, help="peak learning rate (by size)")
    add("--warm-up", type=int, default=100, help="steps (100)")
    add("--decay", type=float, default=0.1, help="weight decay of matrices (0.1)")
    add("--clip", type=float, default=1.0, help="largest norm of a gradient (1)")
    add("--recall", type=float, default=0.1, help="fraction of sequences with episodes (0.1)")
    add("--recall-weight", type=float, default=0.2, help="of the loss of recalled bytes (0.2)")
    add("--curriculum", type=int, default=600, help="steps until episodes are long (600)")
    add("--shortest-span", type=int, default=128, help="bytes of an episode, at least (128)")
    add("--seed", type=int, default=0, help="of weights and of data (0)")
    add("--start", type=Path, help="weights to begin with: a file of this program")
    add("--start-step", type=int, default=0, help="with --start: data and rate begin there (0)")
    add("--new-scores", action="store_true", help="with --start: without its A and dt_proj")
    add("--weights", choices=("float32", "bfloat16", "int8"), default="bfloat16", help="as written")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--every", type=int, default=200, help="steps between evaluations (200)")
    add("--pieces", type=int, default=48, help="of held-out text (48)")
    add("--questions", type=int, default=256, help="of each number of pairs and distance (256)")
    add("--checkpoint-seconds", type=float, default=120.0)
    add("--resume", action="store_true", help="go on from OUT/NAME.pt, if it exists")
    add("--evaluate", action="store_true", help="only measure: OUT/NAME.pt, or else --start")
    options = parser.parse_args(arguments)
    options.rate = options.rate or RATES[options.size]
    if options.nope_heads > 0:
        for name, usual in NOPE.items():
            if getattr(options, name) is None:
                setattr(options, name, usual)
    options.name = options.name or f"{options.form}-{options.size}-{options.seed}"
    check(parser, options)
    return options


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    counts = ("batch", "length", "keys", "every", "pieces", "questions", "warm_up", "target_every")
    for name in counts:
        if (value := getattr(options, name)) < 1:
            parser.error(f"--{name.replace('_', '-')}: is {value}, want 1 or more")
    if not 0 <= options.recent < options.keys:
        parser.error(f"--recent: is {options.recent}, want 0 to {options.keys - 1}, below --keys")
    check_sliding(parser, options)
    check_nope(parser, options)
    check_start(parser, options)
    check_targets(parser, options)
    if not 64 <= options.shortest_span <= options.length:
        parser.error(f"--shortest-span: is {options.shortest_span}, want 64 to {options.length}")
    if not 0 <= options.recall <= 1:
        parser.error(f"--recall: is {options.recall}, want 0 to 1")
    if options.length < 256:
        parser.error(f"--length: is {options.length}, want 256 or more")
    is_saved = (options.out / f"{options.name}.pt").exists()
    if not options.evaluate and options.steps is None and options.seconds is None:
        if not (options.resume and is_saved):
            parser.error("give --steps or --seconds")
    if options.evaluate and not is_saved and options.start is None:
        parser.error("--evaluate: there is no checkpoint, want one, or --start")
    for name in ("corpus.bin", "held_out.bin"):
        if not (options.corpus / name).is_file():
            parser.error(f"--corpus: {options.corpus / name} is not a file")
        if (options.corpus / name).stat().st_size <= options.length:
            parser.error(f"--corpus: {name} is shorter than a sequence of {options.length} bytes")


def check_sliding(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    _, _, most = quality_model.SIZES[options.size]
    heads, layers = options.sliding_heads, options.score_layers
    if not 0 <= heads <= most:
        parser.error(f"--sliding-heads: is {heads}, want 0 to {most}, the kv heads")
    if layers is not None and layers < 1:
        parser.error(f"--score-layers: is {layers}, want 1 or more")
    if heads > 0 and layers is not None:
        parser.error("--sliding-heads: is given with --score-layers, want one of the two")
    has_kinds = heads > 0 or layers is not None
    if has_kinds and options.form in ("dense", "sliding"):
        parser.error(f"--form: is {options.form}, which has no scores, want another one")


def check_nope(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    layers, _, most = quality_model.SIZES[options.size]
    heads, dim = options.nope_heads, options.nope_rotary_dim
    if not 0 <= heads <= most:
        parser.error(f"--nope-heads: is {heads}, want 0 to {most}, the kv heads")
    if heads == 0:
        for name in ("nope_layers", "nope_a_rate", *NOPE):
            if getattr(options, name) is not None:
                parser.error(f"--{name.replace('_', '-')}: is given without --nope-heads")
        return
    if not 0 <= dim <= quality_model.HEAD_DIM or dim % 2 != 0:
        parser.error(f"--nope-rotary-dim: is {dim}, want an even number up to the head_dim")
    for layer in options.nope_layers or ():
        if not 0 <= layer < layers:
            parser.error(f"--nope-layers: is {layer}, want 0 to {layers - 1}")
    for name in ("nope_rate", "nope_a_rate"):
        if not 0 <= (getattr(options, name) or 0) <= 1:
            parser.error(f"--{name.replace('_', '-')}: is {getattr(options, name)}, want 0 to 1")


def check_start(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.start is None:
        for name in ("start_step", "new_scores"):
            if getattr(options, name):
                parser.error(f"--{name.replace('_', '-')}: is given without --start")
    if options.start_step != 0 and not options.evaluate:
        if options.steps is None or not 0 <= options.start_step < options.steps:
            parser.error(f"--start-step: is {options.start_step}, want 0 or more, below --steps")
    if options.new_scores and options.form == "dense":
        parser.error("--new-scores: is given with --form dense, which has no scores")


def check_targets(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.score_targets is None:
        return
    if options.form not in quality_model.LEARNED:
        parser.error(f"--score-targets: is given with --form {options.form}, want learned scores")
    if options.score_targets == "nope" and options.nope_heads == 0:
        parser.error("--score-targets: is nope, want --nope-heads above 0")
    own = [("nope_a", options.nope_a)] if options.nope_heads > 0 else []
    own += [("initial_a", options.initial_a)] if options.score_targets == "all" else []
    for name, a in own:
        if a <= 0:
            parser.error(f"--{name.replace('_', '-')}: is {a:g}, want above 0: it does not change")


def main() -> None:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options)
    evaluation = Evaluation(
        *(read_bytes(options.corpus / "held_out.bin"), options.length, options.batch),
        *(options.pieces, run.device),
    )
    if (options.evaluate or options.resume) and run.path(".pt").exists():
        run.load()
    with quality_model.prefer_cudnn():
        if not options.evaluate:
            corpus = read_bytes(options.corpus / "corpus.bin")
            batches = Batches(
                *(corpus, options.batch, options.length, options.recall),
                *(options.curriculum, options.seed, options.shortest_span),
            )
            train(run, evaluation, batches)
        evaluate(run, evaluation)


if __name__ == "__main__":
    main()
