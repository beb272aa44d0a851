#!/usr/bin/env python3
"""Train four small models, each with attention to all keys and with selected keys, and compare.

    python research/workloads.py OUT [--corpus FOLDER] [--only image series] [--quick]
    python research/workloads.py RESULTS.json --join OUT/*-*.json

The workloads are language (workloads_language.py), image, multimodal and series: real text, and
data that are generated while training. workloads_model.py defines the forms. Both forms of a
workload take the same number of steps, read the same data in the same order, and begin with the
same weights where both have them. The program writes

    OUT/NAME-FORM.json  a run, see workloads_results.py
    OUT/workloads.json  all runs of this call

and prints a table. Steps a second count training, without a first pass, evaluations, and the time
in which data are generated; peak memory is measured in one more pass. --join writes the runs of
several calls into one file. It runs on a CUDA device, if there is one, or on the CPU, with the
package installed or FDMA_LIBRARY and PYTHONPATH in the environment.
Exit status: 0 done; 1 a loss is not a number, or files do not fit together; 2 bad usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import sys
import time
from pathlib import Path
from typing import Any, Callable

import benchmarks_path  # noqa: F401
import program

NAMES = ("language", "image", "multimodal", "series")
FORMS = ("dense", "selected")  # of workloads_model.py
QUICK_KEYS, QUICK_RECENT, QUICK_HELD_OUT = 64, 16, 4


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    head, _, _ = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=head, allow_abbrev=False)
    add = parser.add_argument
    add("out", type=Path, help="a folder; with --join, the file to write")
    add("--join", type=Path, nargs="+", metavar="FILE", help="join files of other calls")
    add("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    add("--forms", nargs="+", choices=FORMS, default=FORMS, metavar="FORM", help=", ".join(FORMS))
    add("--corpus", type=Path, help="folder of corpus.bin and held_out.bin (Python's library)")
    add("--quick", action="store_true", help="tiny models and data, a few steps")
    add("--steps", type=int, help="of training (by workload)")
    add("--batch", type=int, help="sequences in a step (by workload)")
    add("--side", type=int, help="pixels of a side of an image (1024)")
    add("--length", type=int, help="tokens of a text or a series (8192)")
    add("--keys", type=int, help="keys that a query keeps in all, if they are selected (512)")
    add("--recent", type=int, help="of which the newest ones, where attention is causal (64)")
    add("--rate", type=float, default=1.5e-3, help="peak learning rate (0.0015)")
    add("--seed", type=int, default=0, help="of weights and of data (0)")
    add("--compile", action="store_true", help="torch.compile the models")
    add("--device", help="cuda or cpu; by default cuda where there is one")
    options = parser.parse_args(arguments)
    usual = (QUICK_KEYS, QUICK_RECENT) if options.quick else (512, 64)
    options.keys = usual[0] if options.keys is None else options.keys
    options.recent = usual[1] if options.recent is None else options.recent
    check(parser, options)
    options.device = options.device or program.default_device()
    return options


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for name in ("steps", "batch", "length", "keys"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name}: is {value}, want 1 or more")
    if not 0 <= options.recent < options.keys:
        parser.error(f"--recent: is {options.recent}, want 0 to {options.keys - 1}, below --keys")
    if options.side is not None and (options.side < 256 or options.side % 256):
        parser.error(f"--side: is {options.side}, want a multiple of 256")
    if options.corpus is not None:
        for name in ("corpus.bin", "held_out.bin"):
            if not (options.corpus / name).is_file():
                parser.error(f"--corpus: {options.corpus / name} is not a file")
    for path in options.join or ():
        if not path.is_file():
            parser.error(f"--join: {path} is not a file")


if __name__ == "__main__":
    program.begin(parse)

import quality_model
import quality_optimizer
import torch
import workloads_image
import workloads_language
import workloads_multimodal
import workloads_results
import workloads_series
from benchmarking import find_machine, write_whole
from quality_model import narrow
from quality_results import thinned
from torch import nn
from workloads_model import Batch, Sums, Workload

TASKS = {
    "language": (workloads_language, workloads_language.Language),
    "image": (workloads_image, workloads_image.Image),
    "multimodal": (workloads_multimodal, workloads_multimodal.Multimodal),
    "series": (workloads_series, workloads_series.Series),
}
WARM_UP = 100  # steps until the learning rate peaks; if there are fewer than 1,000, a tenth of them
DECAY, CLIP = 0.1, 1.0  # weight decay of matrices, and the largest norm of a gradient
HELD_OUT = 16  # batches
GENERATED = 5  # batches to time the generation of data alone
GROUP = 16  # steps whose batches are made before their clock starts


def make_workload(name: str, options: argparse.Namespace) -> Workload:
    """A workload with the given sizes that it has."""
    module, kind = TASKS[name]
    size = module.QUICK if options.quick else module.USUAL
    fields = {field.name for field in dataclasses.fields(size)}
    given = {key: getattr(options, key) for key in ("steps", "batch", "side", "length")}
    changes = {key: one for key, one in given.items() if one is not None and key in fields}
    size = dataclasses.replace(size, **changes)
    more = (options.corpus,) if name == "language" else ()
    return kind(size, options.seed, torch.device(options.device), *more)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_batches(workload: Workload, device: torch.device) -> float:
    """Seconds to make a batch."""
    workload.batch(0)
    wait(device)
    begin = time.perf_counter()
    for step in range(GENERATED):
        workload.batch(step)
    wait(device)
    return (time.perf_counter() - begin) / GENERATED


class Trainer:
    """A model, its optimizer, and the steps of training."""

    def __init__(self, workload: Workload, model: nn.Module, options: argparse.Namespace) -> None:
        self.workload, self.device = workload, torch.device(options.device)
        self.model = model.to(self.device)
        self.forward = torch.compile(self.model) if options.compile else self.model
        groups = quality_optimizer.parameter_groups(self.model, DECAY, 1.0)
        (self.optimizer,) = quality_optimizer.optimizers_of(groups, "adamw", options.rate)
        self.rate = options.rate
        self.losses: list[torch.Tensor] = []

    def pass_once(self, batch: Batch) -> torch.Tensor:
        """The loss of a batch; sets gradients."""
        with narrow(self.device):
            loss = self.workload.loss(self.forward, batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        return loss.detach()

    def take_step(self, step: int, batch: Batch) -> None:
        steps = self.workload.size.steps
        warm_up = max(1, min(WARM_UP, steps // 10))
        rate = quality_optimizer.rate_at(step, steps, self.rate, warm_up)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        self.losses.append(self.pass_once(batch))
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()

    def run(self) -> float:
        """All steps; returns their seconds."""
        self.pass_once(self.workload.batch(0))
        seconds = 0.0
        for first in range(0, self.workload.size.steps, GROUP):
            steps = range(first, min(first + GROUP, self.workload.size.steps))
            batches = [self.workload.batch(step) for step in steps]
            wait(self.device)
            begin = time.perf_counter()
            for step, batch in zip(steps, batches):
                self.take_step(step, batch)
            wait(self.device)
            seconds += time.perf_counter() - begin
        return seconds

    def find_peak(self) -> int | None:
        """The most memory of a pass with one batch, after training."""
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        self.pass_once(self.workload.batch(0))
        return torch.cuda.max_memory_allocated(self.device)


def means_of(
    measure: Callable[[int], Sums], batches: int, roots: tuple[str, ...]
) -> dict[str, float]:
    """Measures over all held-out batches. Measures in `roots` are the root of the mean."""
    totals: dict[str, list[float]] = {}
    for number in range(batches):
        for name, (total, count) in measure(number).items():
            one = totals.setdefault(name, [0.0, 0])
            one[0] += float(total)
            one[1] += count
    means = {name: total / count for name, (total, count) in totals.items()}
    return {name: math.sqrt(mean) if name in roots else mean for name, mean in means.items()}


@torch.no_grad()
def evaluate(trainer: Trainer, batches: int) -> tuple[dict[str, float], dict[str, float]]:
    """Measures of the model, and of predictions without it."""
    workload = trainer.workload
    roots = getattr(workload, "roots", ())

    def measure(number: int) -> Sums:
        batch = workload.batch(number, is_held_out=True)
        with narrow(trainer.device):
            return workload.measure(trainer.model, batch)

    def without_model(number: int) -> Sums:
        return workload.baseline(workload.batch(number, is_held_out=True))

    return means_of(measure, batches, roots), means_of(without_model, batches, roots)


def run_form(workload: Workload, form: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train and measure one form of a workload."""
    device = torch.device(options.device)
    batch_seconds = time_batches(workload, device)
    torch.compiler.reset()
    gc.collect()  # so that the peak of this model does not include the last one
    if device.type == "cuda":
        torch.cuda.empty_cache()
    model = workload.begin(form, options.keys, options.recent, options.seed)
    trainer = Trainer(workload, model, options)
    seconds, peak = trainer.run(), trainer.find_peak()
    losses = torch.stack(trainer.losses).double().cpu().tolist()
    held_out, baseline = evaluate(trainer, QUICK_HELD_OUT if options.quick else HELD_OUT)
    last = losses[-max(1, len(losses) // 10) :]
    settings = {
        name: getattr(options, name) for name in ("keys", "recent", "rate", "seed", "compile")
    }
    return {
        "workload": workload.name,
        "form": form,
        "data": workload.data,
        "unit": workload.unit,
        "settings": {**settings, "steps": workload.size.steps, "size": repr(workload.size)},
        "parameters": sum(one.numel() for one in model.parameters()),
        "tokens": workload.tokens,
        "steps_per_second": workload.size.steps / seconds,
        "batch_ms": 1e3 * batch_seconds,
        "peak_memory": peak,
        "seconds": seconds,
        "train": thinned([[step, loss] for step, loss in enumerate(losses)]),
        "train_loss": sum(last) / len(last),
        "held_out": held_out,
        "baseline": baseline,
    }


def require_finite(row: dict[str, Any]) -> None:
    for name, loss in (("training", row["train_loss"]), ("held-out", row["held_out"]["loss"])):
        if not math.isfinite(loss):
            sys.exit(f"{row['workload']}-{row['form']}: the {name} loss is not a number")


def join(options: argparse.Namespace) -> None:
    try:
        machine, *rows = workloads_results.join(options.join)
    except ValueError as error:
        sys.exit(f"workloads.py: {error}")
    write_whole(options.out, [machine, *rows])
    print(workloads_results.table(rows))


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.join:
        join(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    machine, rows = find_machine(torch.device(options.device).type), []
    with quality_model.prefer_cudnn():
        for name in options.only:
            try:
                workload = make_workload(name, options)
            except ValueError as error:  # the corpus is too short
                print(f"workloads.py: {error}", file=sys.stderr)
                sys.exit(2)
            for form in options.forms:
                program.doing(f"{name}-{form}")
                row = run_form(workload, form, options)
                require_finite(row)
                workloads_results.write_run(options.out / f"{name}-{form}.json", machine, row)
                rows.append(workloads_results.rounded(row))
                print(f"{name}-{form}: held-out loss {row['held_out']['loss']:.4f}", flush=True)
    write_whole(options.out / "workloads.json", [machine, *rows])
    print(workloads_results.table(rows))


if __name__ == "__main__":
    main()
