#!/usr/bin/env python3
"""Give a dense language model, after its training, a selection of keys.

It trains a small dense model on text in which labels recur (recall_text.py), and then replaces its
attention by layers whose queries keep `window` keys by score and the `recent` newest, with the
projections of the dense ones. Stage 1 trains only dt_proj, so that scores rank the keys as the
dense attention would: adapt_layers.py has the targets, and says why the bias of these scores
changes no logit. Stage 2, with --lora RANK, trains changes of low rank of the projections on the
text. The selection has to beat a sliding window of as many keys, in the same model and with as many
steps of stage 2. The text is made for this: labels alone look different from all else, and only
memory predicts their repetition. It shows how scores learn, and not the gain of a selection on
other text.

Run it with the package installed, or with FDMA_LIBRARY=build/libfdma.so PYTHONPATH=python:

    python examples/adapt.py --lora 4 --out adapted

The table is in bits per byte of held-out text: of all bytes, and of the recalled ones. With --out
it is written to FOLDER/adapt.json too. Exit status: 0 done; 2 bad usage; 130 ended by Ctrl-C.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterable, List, Tuple

import program

HEAD_DIM = 32
GROUP = 2  # query heads of a kv head
MAY_BE_ZERO = ("recent", "gap", "lora", "seed")  # options
TARGETS = ("largest", "mean", "outputs")  # of adapt_layers.py
COUNTS = {  # options: default and help
    "length": (256, "bytes that the model reads at once"),
    "labels": (4, "labels of a piece of text, at most 9"),
    "gap": (96, "bytes between labels and their repetition, at least"),
    "window": (24, "keys that a query keeps by score"),
    "recent": (8, "keys that it keeps because they are the newest"),
    "layers": (2, "layers of the model"),
    "width": (128, f"of the model, a multiple of {HEAD_DIM * GROUP}"),
    "batch": (8, "pieces of text in a step"),
    "dense-steps": (600, "steps that train the dense model"),
    "steps": (400, "steps of stage 1"),
    "lora": (0, "rank of stage 2; 0 for no stage 2"),
    "lora-steps": (300, "steps of stage 2"),
    "seed": (0, "of weights and text"),
}


def parse() -> argparse.Namespace:
    head, _, _ = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=head)
    for name, (default, words) in COUNTS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{words} ({default})")
    parser.add_argument(
        "--target",
        choices=TARGETS,
        default="largest",
        help="what scores learn from in stage 1",
    )
    parser.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    parser.add_argument("--out", type=Path, help="write the table to this folder, as adapt.json")
    options = parser.parse_args()
    for name in COUNTS:
        value, least = getattr(options, name.replace("-", "_")), int(name not in MAY_BE_ZERO)
        if value < least:
            parser.error(f"--{name}: is {value}, want {least} or more")
    if options.width % (HEAD_DIM * GROUP):
        parser.error(f"--width: is {options.width}, want a multiple of {HEAD_DIM * GROUP}")
    import recall_text

    options.device = options.device or program.default_device()
    if options.labels > recall_text.MOST_LABELS:
        parser.error(f"--labels: is {options.labels}, want at most {recall_text.MOST_LABELS}")
    least = recall_text.Shape(options.length, options.labels, options.gap).least_length()
    if options.length < least:
        parser.error(f"--length: is {options.length}, want {least} or more for the gap and labels")
    return options


if __name__ == "__main__":
    program.begin(parse)

import adapt_layers
import recall_text
import torch
import train_text
from adapt_layers import Kept, Pair
from flash_dmattn import DynamicMaskAttention
from recall_text import Pieces
from torch import nn
from torch.nn.functional import cross_entropy, pad
from train_text import narrow

ROPE_BASE = 1e5  # slow angles, which leave the match of equal bytes alone at these distances
WARM_UP = 50  # steps until a learning rate is reached
DENSE_RATE, SCORE_RATE, LORA_RATE = 3e-3, 1e-2, 1e-3  # of AdamW
RECALLED_WEIGHT = 3.0  # of the recalled bytes in the loss, beside all bytes
HELD_OUT = 64  # pieces of held-out text in an evaluation
Draw = Callable[[], Pieces]  # pieces to train on
States = List[Tuple[torch.Tensor, torch.Tensor]]  # hidden states of each layer, and its outputs


class Reader(train_text.Model):
    """train_text.py's model, which also reads the byte before each: keys of label characters then
    say what came before them, so that one layer can look up what follows a character."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__(width, train_text.select_alike(layers, width, None))
        self.before = nn.Embedding(train_text.BYTES, width)
        nn.init.normal_(self.before.weight, std=0.02)
        heads = width // HEAD_DIM
        for block in self.each_block():
            block.attention = DynamicMaskAttention(
                width, heads, heads // GROUP, None, rope_base=ROPE_BASE
            )
            for weight in block.attention.parameters():  # of the projections
                nn.init.normal_(weight, std=width**-0.5)

    def embed(self, text: torch.Tensor) -> torch.Tensor:
        before: torch.Tensor = self.before(pad(text[:, :-1], (1, 0)))
        return super().embed(text) + before


def losses_of(model: nn.Module, pieces: Pieces) -> torch.Tensor:
    """[batch, length], in bits per byte."""
    with narrow(pieces.text.device):
        logits = model(pieces.text[:, :-1])
    targets = pieces.text[:, 1:]
    losses = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape) / math.log(2)


def text_loss(model: nn.Module, pieces: Pieces) -> torch.Tensor:
    """The mean over all bytes, plus a weighted mean over the recalled ones, which are few."""
    losses = losses_of(model, pieces)
    return losses.mean() + RECALLED_WEIGHT * losses[pieces.recalled].mean()


def optimize(
    parameters: Iterable[torch.Tensor],
    rate: float,
    steps: int,
    loss_at: Callable[[int], torch.Tensor],
    what: str,
) -> None:
    """`steps` steps of AdamW; the rate rises linearly, then falls as half a cosine to a tenth."""
    trained = list(parameters)
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        fall = 0.1 + 0.9 * (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / WARM_UP) * fall
        program.doing(f"{what}: step {step + 1} of {steps}")
        optimizer.zero_grad()
        loss_at(step).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()


def with_selection(dense: Reader, kept: Kept, harmless: bool) -> Reader:
    """A copy of the model whose layers keep `kept` keys; see adapt_layers.select_from()."""
    model = copy.deepcopy(dense).requires_grad_(False)
    for block in model.each_block():
        block.attention = adapt_layers.select_from(block.attention, kept, harmless)
    return model


def pairs_of(dense: Reader, model: Reader) -> list[Pair]:
    return [Pair(a.attention, b.attention) for a, b in zip(dense.each_block(), model.each_block())]


def states_of(dense: Reader, text: torch.Tensor) -> States:
    """Inputs and outputs of the attention of each layer of the dense model."""
    states = []

    def keep(_: nn.Module, inputs: tuple[torch.Tensor], out: torch.Tensor) -> None:
        states.append((inputs[0], out))

    hooks = [block.attention.register_forward_hook(keep) for block in dense.each_block()]
    with torch.no_grad():
        dense(text)
    for hook in hooks:
        hook.remove()
    return states


def train_scores(dense: Reader, kept: Kept, draw: Draw, target: str, steps: int) -> Reader:
    """Stage 1. Every layer learns from the hidden states of the dense model."""
    through_outputs = target == "outputs"
    model = with_selection(dense, kept, harmless=not through_outputs)
    pairs = pairs_of(dense, model)
    loss_of = adapt_layers.TARGETS[target]

    def loss_at(step: int) -> torch.Tensor:
        text = draw().text[:, :-1]
        if through_outputs:  # a window that shrinks to kept.window in half of the steps
            rest = max(0.0, 1 - 2 * step / steps)
            for pair in pairs:
                pair.selected.window = round(kept.window * (text.shape[1] / kept.window) ** rest)
        with narrow(text.device):
            states = states_of(dense, text)
            losses = [loss_of(pair, *state) for pair, state in zip(pairs, states)]
        return torch.stack(losses).sum()

    parameters = [pair.selected.dt_proj.weight for pair in pairs]
    if through_outputs:
        parameters += [p for _, layer in pairs for p in (layer.dt_proj.bias, layer.A)]
    optimize(parameters, SCORE_RATE, steps, loss_at, "stage 1")
    return model


def train_projections(model: Reader, rank: int, draw: Draw, steps: int) -> Reader:
    """Stage 2: changes of low rank of a copy of the model, trained on the text."""
    model = copy.deepcopy(model).requires_grad_(False)
    changes = [
        change
        for block in model.each_block()
        for change in adapt_layers.add_low_rank(block.attention, rank)
    ]
    optimize(changes, LORA_RATE, steps, lambda _: text_loss(model, draw()), "stage 2")
    return model


@torch.no_grad()
def row_of(model: Reader, pieces: Pieces) -> dict[str, float]:
    """A row of the table."""
    losses = losses_of(model, pieces)
    row = {"bits": losses.mean().item(), "recalled_bits": losses[pieces.recalled].mean().item()}
    with narrow(pieces.text.device):
        kept = [
            adapt_layers.kept_attention(block.attention, x)
            for block, (x, _) in zip(model.each_block(), states_of(model, pieces.text[:, :-1]))
        ]
    return {**row, "kept_attention": sum(kept) / len(kept)}


def train_dense(options: argparse.Namespace, short: Draw, whole: Draw) -> Reader:
    """The first third of the steps is on short pieces with few labels: on long ones it takes many
    steps until the model finds that labels recur."""
    torch.manual_seed(options.seed)
    dense = Reader(options.layers, options.width).to(options.device)
    steps = options.dense_steps

    def loss_at(step: int) -> torch.Tensor:
        return text_loss(dense, short() if step < steps // 3 else whole())

    optimize(dense.parameters(), DENSE_RATE, steps, loss_at, "the dense model")
    return dense.requires_grad_(False)


class Source:
    """Draws pieces of text, the same ones for the same seed and purpose."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.text = recall_text.documentation()
        self.whole = recall_text.Shape(options.length, options.labels, options.gap)
        self.batch, self.seed, self.device = options.batch, options.seed, options.device

    def draw(self, purpose: int, shape: recall_text.Shape | None = None) -> Draw:
        """With another shape a batch has more or fewer pieces, but as many bytes in all."""
        generator = torch.Generator().manual_seed(10 * self.seed + purpose)
        shape = shape or self.whole
        count = max(1, self.batch * self.whole.length // shape.length)
        return lambda: self._pieces(self.text.train, count, shape, generator)

    def held_out(self) -> Pieces:
        generator = torch.Generator().manual_seed(10 * self.seed)
        return self._pieces(self.text.held_out, HELD_OUT, self.whole, generator)

    def _pieces(
        self,
        text: torch.Tensor,
        count: int,
        shape: recall_text.Shape,
        generator: torch.Generator,
    ) -> Pieces:
        pieces = recall_text.make_pieces(text, count, shape, generator)
        return Pieces(*(one.to(self.device) for one in pieces))


def compare(options: argparse.Namespace, rows: dict[str, dict[str, float]]) -> None:
    """Add all rows of the table, which are printed as they are found."""
    source = Source(options)
    unseen = source.held_out()

    def add(name: str, model: Reader) -> None:
        rows[name] = row = row_of(model, unseen)
        numbers = f"{row['bits']:9.3f} {row['recalled_bits']:9.3f} {row['kept_attention']:9.1%}"
        print(f"{name:30} {numbers}", flush=True)

    print(f"{'bits per byte':30} {'all':>9} {'recalled':>9} {'kept':>9}")
    short = recall_text.shortest(min(2, options.labels))
    dense = train_dense(options, source.draw(1, short), source.draw(2))
    add("dense", dense)
    if rows["dense"]["recalled_bits"] > 1:
        print("the dense model recalls little: more --dense-steps may help", file=sys.stderr)
    kept = Kept(options.window, options.recent)
    sliding = with_selection(dense, kept, harmless=False)
    add("sliding window", sliding)
    add("selected, before training", with_selection(dense, kept, harmless=True))
    selected = train_scores(dense, kept, source.draw(3), options.target, options.steps)
    add("selected, after stage 1", selected)
    if options.lora:
        for name, model in (("sliding window", sliding), ("selected", selected)):
            changed = train_projections(model, options.lora, source.draw(4), options.lora_steps)
            add(f"{name}, after stage 2", changed)


def write(options: argparse.Namespace, rows: dict[str, Any], seconds: float) -> None:
    named = {name: value for name, value in vars(options).items() if name != "out"}
    options.out.mkdir(parents=True, exist_ok=True)
    table = {"options": named, "seconds": round(seconds, 1), "rows": rows}
    (options.out / "adapt.json").write_text(json.dumps(table, indent=2) + "\n")


def main() -> None:
    options = parse()
    begin = time.perf_counter()
    rows: dict[str, dict[str, float]] = {}
    try:
        compare(options, rows)
    finally:  # rows that were found are kept, also on Ctrl-C
        seconds = time.perf_counter() - begin
        if options.out is not None and rows:
            write(options, rows, seconds)
    print(f"{seconds:.0f} s on {options.device}")


if __name__ == "__main__":
    main()
