#!/usr/bin/env python3
"""Train a small byte-level language model by the recipe of HybridPlan, on Python's documentation.

Four layers of width 256 read 1024 bytes. In three of them a query keeps the newest 64 bytes, and in
the last one 256, half of them the newest and half by score. --form hybrid trains the same model
with all bytes in its last layer, and --form dense one with all bytes in all layers, which
differ in nothing else. The text comes with Python itself, so that nothing is downloaded; the last
tenth of it is held out. Run it with the package installed, or with
FDMA_LIBRARY=build/libfdma.so PYTHONPATH=python in the environment:

    python examples/train_text.py --minutes 3 --json curves.json
    python examples/train_text.py --minutes 3 --json curves.json --form hybrid --picture curves.svg

It shows a progress bar on a terminal if tqdm is installed, and else a line every ten seconds;
--picture needs matplotlib: `pip install tqdm matplotlib`. Losses are in bits per byte. --json adds
this run's curves to those in the file, so that --picture shows all. Ctrl-C ends the training with
what there is. Exit status: 0 done; 2 bad usage; 130 ended by Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import program

HEAD_DIM = 64
FORMS = ("selected", "hybrid", "dense")


def parse() -> argparse.Namespace:
    head, _, _ = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=head)
    parser.add_argument(
        "--text", type=Path, help="a file to train on (default: Python's documentation)"
    )
    parser.add_argument(
        "--form",
        choices=FORMS,
        default="selected",
        help="hybrid: the last layer keeps all bytes; dense: all layers do (default selected)",
    )
    parser.add_argument(
        "--minutes", type=float, help="training time (default 3, unless --steps is given)"
    )
    parser.add_argument("--steps", type=int, help="steps, at most")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument(
        "--length", type=int, default=1024, help="bytes that the model reads at once"
    )
    parser.add_argument(
        "--keys", type=int, default=256, help="bytes that a query keeps in the last layer"
    )
    parser.add_argument(
        "--sliding", type=int, default=64, help="bytes that it keeps in the others, the newest"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help=f"a multiple of {HEAD_DIM}")
    parser.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="add the losses to this file")
    parser.add_argument("--picture", type=Path, help="draw all runs of --json into this file")
    options = parser.parse_args()
    if options.picture and not options.json:
        parser.error("--picture draws the runs in the file of --json: give --json too")
    if options.picture and not importlib.util.find_spec("matplotlib"):
        parser.error("--picture needs matplotlib: pip install matplotlib")
    if options.text and not options.text.is_file():
        parser.error(f"--text: {options.text} is not a file")
    for name in ("batch", "length", "layers", "keys", "sliding"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: is {getattr(options, name)}, want 1 or more")
    if options.width < HEAD_DIM or options.width % HEAD_DIM:
        parser.error(f"--width: is {options.width}, want a multiple of {HEAD_DIM}")
    if options.minutes is None:
        options.minutes = 0 if options.steps else 3
    if (options.steps or 0) <= 0 and options.minutes <= 0:
        parser.error("nothing to do: give --steps or --minutes above 0")
    options.device = options.device or program.default_device()
    return options


if __name__ == "__main__":
    program.begin(parse)

import torch
from flash_dmattn import DynamicMaskAttention, HybridPlan
from torch import nn
from torch.nn.functional import cross_entropy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


try:
    from tqdm import tqdm
except ImportError:
    tqdm = None


BYTES = 256
GROUP = 2  # query heads of a kv head
PEAK_RATE, WARM_UP = 1e-3, 20  # learning rate of AdamW, and the steps until it is reached
LAST_RATE = 0.1  # the learning rate at the end, as a fraction of PEAK_RATE
EVERY = 20  # steps between evaluations
HELD_OUT_ROWS = 8  # pieces of held-out text in an evaluation


class Block(nn.Module):
    """Attention, then two linear layers, each with a residual connection."""

    def __init__(self, width: int, attention: DynamicMaskAttention) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = attention
        self.norm = nn.RMSNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        """`options` go to the attention."""
        x = x + self.attention(self.attention_norm(x), **options)
        return torch.add(x, self.contract(torch.nn.functional.gelu(self.expand(self.norm(x)))))


def sizes_of(width: int) -> dict[str, Any]:
    heads = width // HEAD_DIM
    return {"hidden": width, "heads": heads, "kv_heads": max(1, heads // GROUP)}


def select_alike(
    layers: int, width: int, window: int | None, process_group: ProcessGroup | None = None
) -> Iterator[DynamicMaskAttention]:
    """Layers in which a query keeps `window` bytes, half of them the newest; None: all."""
    recent = 0 if window is None else window // 2
    best = None if window is None else window - recent
    options: dict[str, Any] = {"window": best, "recent": recent, "process_group": process_group}
    return (DynamicMaskAttention(**sizes_of(width), **options) for _ in range(layers))


def layers_of(form: str, plan: HybridPlan) -> Iterator[DynamicMaskAttention]:
    """The layers of a plan, or of a model that differs from it in the keys of some layers alone."""
    given = [plan.arguments(number) for number in range(plan.layers)]
    if form != "selected":
        for one in given if form == "dense" else given[-1:]:
            one.update(window=None, recent=0, sliding_heads=0)
    return (DynamicMaskAttention(**one) for one in given)


class Model(nn.Module):
    """From bytes [batch, len] to the logits of each next byte [batch, len, 256]."""

    def __init__(self, width: int, attentions: Iterator[DynamicMaskAttention]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.blocks = nn.Sequential(*(Block(width, attention) for attention in attentions))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("weight") and parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def each_block(self) -> list[Block]:
        return [one for one in self.blocks if isinstance(one, Block)]

    def embed(self, text: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.embedding(text)
        return embedded

    def forward(self, text: torch.Tensor, **options: Any) -> torch.Tensor:
        """`options` go to the attention of every block."""
        x = self.embed(text)
        for block in self.blocks:
            x = block(x, **options)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Text(NamedTuple):
    name: str
    train: torch.Tensor  # bytes as int64
    held_out: torch.Tensor


def read_text(path: Path | None) -> Text:
    """The file at `path`, or else the language reference that help() shows."""
    if path is not None:
        name, data = path.name, path.read_bytes()
    else:
        topics = importlib.import_module("pydoc_data.topics").topics
        name = f"the documentation of Python {sys.version_info[0]}.{sys.version_info[1]}"
        data = "\n\n".join(topics[topic] for topic in sorted(topics)).encode()
    whole = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    boundary = len(whole) * 9 // 10
    return Text(name, whole[:boundary], whole[boundary:])


def cut(text: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    """Pieces of `text`, each of length + 1 bytes: the inputs, and one byte later the targets."""
    return text[starts[:, None] + torch.arange(length + 1)]


def narrow(device: str | torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast to bfloat16 on a CUDA device, where attention takes 16-bit types only."""
    is_cuda = str(device).startswith("cuda")
    return torch.autocast("cuda", torch.bfloat16) if is_cuda else contextlib.nullcontext()


def loss_of(model: Model, pieces: torch.Tensor, device: str) -> torch.Tensor:
    """Mean loss in bits per byte."""
    pieces = pieces.to(device)
    with narrow(device):
        logits = model(pieces[:, :-1])
    loss = cross_entropy(logits.float().flatten(0, 1), pieces[:, 1:].flatten())
    return loss / math.log(2)


class Progress:
    """The fraction of a run that is done: of its steps or of its time, whichever ends first."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.steps, self.seconds = options.steps, options.minutes * 60
        self.taken, self.spent = 0, 0.0  # steps and seconds so far

    def fraction(self) -> float:
        of_time = self.spent / self.seconds if self.seconds else 0.0
        of_steps = self.taken / self.steps if self.steps else 0.0
        return min(1.0, max(of_time, of_steps))

    def rate(self) -> float:
        """The learning rate: a linear rise, times half a cosine down to LAST_RATE."""
        rise = min(1.0, (self.taken + 1) / WARM_UP)
        fall = LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * self.fraction())) / 2
        return PEAK_RATE * rise * fall


class Bar:
    """A progress bar of tqdm on a terminal; else program.py says how far the training is."""

    def __init__(self) -> None:
        form = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
        self.bar = None
        if tqdm is not None and sys.stderr.isatty():
            self.bar = tqdm(total=100, unit="%", bar_format=form)
            program.quiet()

    def show(self, progress: Progress, loss: float, held_out: float) -> None:
        numbers = {"step": progress.taken, "loss": f"{loss:.3f}", "held_out": f"{held_out:.3f}"}
        if self.bar is not None:
            self.bar.update(100 * progress.fraction() - self.bar.n)
            self.bar.set_postfix(**numbers)
        words = ", ".join(f"{name} {number}" for name, number in numbers.items())
        program.doing(f"{progress.fraction():.0%} of the training, {words}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class Curves:
    """Losses of a run, each as (steps taken, seconds of training, loss)."""

    def __init__(self) -> None:
        self.train: list[tuple[int, float, float]] = []
        self.held_out: list[tuple[int, float, float]] = []
        self.is_whole = True  # False: Ctrl-C has ended the training

    def as_json(self) -> dict[str, Any]:
        def rounded(points: list[tuple[int, float, float]]) -> list[Any]:
            return [[step, round(seconds, 2), round(loss, 4)] for step, seconds, loss in points]

        return {"train": rounded(self.train), "held_out": rounded(self.held_out)}


def groups_of(model: Model, plan: HybridPlan | None) -> list[dict[str, Any]]:
    """The groups of parameters for the optimizer; those whose gradients are clipped come first."""
    if plan is not None:
        return plan.parameter_groups(model, PEAK_RATE)
    by_decay = ([x for x in model.parameters() if (x.dim() > 1) == wide] for wide in (True, False))
    return [{"params": own, "weight_decay": x} for own, x in zip(by_decay, (0.1, 0.0))]


def train(model: Model, text: Text, options: argparse.Namespace, plan: HybridPlan | None) -> Curves:
    """Train until the steps or the minutes are over, or until Ctrl-C. The time of evaluations does
    not count. `plan` is for a model whose scores learn."""
    optimizer = torch.optim.AdamW(groups_of(model, plan), betas=(0.9, 0.95))
    clipped = [weight for group in optimizer.param_groups[:2] for weight in group["params"]]
    generator = torch.Generator().manual_seed(options.seed)
    spread = torch.linspace(0, len(text.held_out) - options.length - 1, HELD_OUT_ROWS).long()
    unseen = cut(text.held_out, spread, options.length)
    progress, curves = Progress(options), Curves()

    def evaluate() -> float:
        with torch.no_grad():
            loss = loss_of(model, unseen, options.device).item()
        curves.held_out.append((progress.taken, progress.spent, loss))
        return loss

    def step() -> float:
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = progress.rate()
        starts = torch.randint(
            len(text.train) - options.length, (options.batch,), generator=generator
        )
        pieces = cut(text.train, starts, options.length)
        if plan is None:
            total = loss = loss_of(model, pieces, options.device)
        else:
            with plan.targets(model, progress.taken) as targets:
                loss = loss_of(model, pieces, options.device)
            total = loss + targets.loss()
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(clipped, 1.0)
        optimizer.step()
        seen_loss = loss.item()
        progress.taken += 1
        progress.spent += time.perf_counter() - begin
        curves.train.append((progress.taken, progress.spent, seen_loss))
        return seen_loss

    bar = Bar()
    try:
        unseen_loss = evaluate()
        while progress.fraction() < 1:
            seen_loss = step()
            if progress.taken % EVERY == 0 or progress.fraction() == 1:
                unseen_loss = evaluate()
            bar.show(progress, seen_loss, unseen_loss)
    except KeyboardInterrupt:
        curves.is_whole = False
    bar.close()
    return curves


def add_run(path: Path, name: str, run: dict[str, Any]) -> dict[str, Any]:
    """Add a run to the file at `path`, which is replaced as a whole; returns all its runs."""
    runs = json.loads(path.read_text()) if path.exists() else {}
    runs[name] = run
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(runs) + "\n")
    unfinished.replace(path)
    return runs


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    text = read_text(options.text)
    if len(text.held_out) < options.length + 1:
        print(f"{text.name}: too short for pieces of {options.length} bytes", file=sys.stderr)
        sys.exit(2)
    sizes = {**sizes_of(options.width), "layers": options.layers, "target_start": WARM_UP}
    plan = HybridPlan(**sizes, keys=options.keys, sliding=options.sliding)
    model = Model(options.width, layers_of(options.form, plan)).to(options.device)
    size = sum(parameter.numel() for parameter in model.parameters())
    form = options.form
    print(f"{text.name}: {len(text.train)} bytes; {size} parameters; {form}; {options.device}")
    curves = train(model, text, options, plan if form == "selected" else None)
    if curves.held_out:
        report(curves, text, options)
    if not curves.is_whole:
        raise KeyboardInterrupt


def report(curves: Curves, text: Text, options: argparse.Namespace) -> None:
    steps, seconds, loss = curves.held_out[-1]
    first = curves.held_out[0][2]
    print(
        f"{steps} steps in {seconds:.1f} s: held-out loss {first:.3f} -> {loss:.3f} bits per byte"
    )
    if not options.json:
        return
    settings = {"keys": options.keys, "sliding": options.sliding, "length": options.length}
    run = {**settings, "text": text.name, **curves.as_json()}
    runs = add_run(options.json, options.form, run)
    if options.picture:
        import train_picture  # needs matplotlib

        train_picture.draw(runs, options.picture)


if __name__ == "__main__":
    main()
