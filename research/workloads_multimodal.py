"""The workload `multimodal`: patches of a synthetic image and then bytes of text, one sequence.

The text has questions about the image and their answers, such as

    #h3;#f1;#v0;#r2;Ghc3;Krb2;

how many objects have horizontal, falling, vertical and rising stripes, in random order; then for
each object, in random order, by its colour (green, black), its stripes and the row and the column
of its cell. No two objects of an image have one colour; their number is random. Only bytes of
answers count in the loss: those between a question, #h or G, and the semicolon. No object is asked
for twice. Attention is causal; the model predicts the next byte from each byte of the text. In
training, a patch that an object covers by half or more is also asked for the letter of its stripes,
so that pixels are learned early; losses of held-out data count answers alone.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
import workloads_scene
from quality_model import BYTES, to_device
from torch import nn
from torch.nn.functional import cross_entropy
from workloads_model import Batch, Body, Config, Sums, Workload
from workloads_scene import INPUT_SCALE, KINDS, NO_LABEL, PATCH, PatchEmbedding, Scenes

STRIPE_LETTERS = "hvrf"  # of KINDS
COLOURS = {
    "R": (1, -0.5, -0.5),
    "G": (-0.5, 1, -0.5),
    "B": (-0.5, -0.5, 1),
    "W": (1, 1, 1),
    "C": (-0.5, 1, 1),
    "M": (1, -0.5, 1),
    "Y": (1, 1, -0.5),
    "K": (-0.8, -0.8, -0.8),
}
ANSWERS = {"counts": 1, "stripes": 2, "rows": 3, "columns": 4}
PADDING = 0  # the byte after the last answer


@dataclasses.dataclass(frozen=True)
class Size:
    config: Config
    side: int  # pixels
    grid: int  # cells per side, 9 at most: a column is one digit
    objects: tuple[int, int]  # the least and the largest number, at most the number of COLOURS
    batch: int
    steps: int

    @property
    def length(self) -> int:
        """Bytes of the longest text, rounded up to a multiple of 64."""
        longest = len(KINDS) * len("#h9;") + self.objects[1] * len("Ghc3;")
        return -(-longest // 64) * 64


USUAL = Size(Config(6, 6, 3), 1024, 4, (4, 8), 16, 1500)
QUICK = Size(Config(2, 2, 1), 256, 4, (4, 8), 4, 8)


class Model(Body):
    """From patches [batch, patches, CHANNELS * PATCH * PATCH] and bytes [batch, len] to logits of
    the letter of each patch, and of the byte after each byte [batch, patches + len, 256]."""

    def __init__(self, config: Config, side: int) -> None:
        super().__init__(config)
        self.patches = PatchEmbedding(side, config.width)
        self.embedding = nn.Embedding(BYTES, config.width)
        self.head = nn.Linear(config.width, BYTES, bias=False)

    def forward(self, patches: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        length = text.shape[1]
        image, positions = self.patches(patches)
        x = torch.cat((image, INPUT_SCALE * self.embedding(text)), 1)
        after = torch.arange(length, dtype=torch.int32, device=text.device) + self.patches.count
        x = self.run(x, torch.cat((positions, after.expand(2, length)), 1))
        return self.head(x)


def draw(size: Size, random: np.random.Generator) -> tuple[Scenes, np.ndarray]:
    """Descriptions of a batch, and the letters of colours [batch, objects]."""
    least, most = size.objects
    kind = random.integers(len(KINDS), size=(size.batch, most))
    colours = np.tile(np.arange(len(COLOURS)), (size.batch, 1))
    colours = random.permuted(colours, axis=1)[:, :most]
    scenes = workloads_scene.draw_scenes(size.batch, most, size.grid, kind, random)
    scenes.colour[:] = np.array(list(COLOURS.values()))[colours]
    count = random.integers(least, most + 1, size=(size.batch, 1))
    scenes.radius[np.arange(most) >= count] = 0
    return scenes, np.array(list(COLOURS))[colours]


def describe(
    scenes: Scenes, colour: np.ndarray, row: int, grid: int, random: np.random.Generator
) -> list[tuple[str, str]]:
    """Questions about the image `row` of a batch, and their answers."""
    present = np.flatnonzero(scenes.radius[row])
    kinds = scenes.kind[row]
    pairs = []
    for kind in random.permutation(len(KINDS)):
        pairs.append((f"#{STRIPE_LETTERS[kind]}", str((kinds[present] == kind).sum())))
    for one in random.permutation(present):
        line, column = divmod(int(scenes.cell[row, one]), grid)
        answer = f"{STRIPE_LETTERS[kinds[one]]}{chr(ord('a') + line)}{column + 1}"
        pairs.append((str(colour[row, one]), answer))
    return pairs


def write(pairs: list[tuple[str, str]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """text [length + 1] uint8, and the kind of answer of each byte: one of the ANSWERS, or 0."""
    text, answers = np.full(length + 1, PADDING, np.uint8), np.zeros(length + 1, np.uint8)
    at = 0
    for question, answer in pairs:
        whole = f"{question}{answer};".encode()
        text[at : at + len(whole)] = np.frombuffer(whole, np.uint8)
        begin = at + len(question)
        kinds = ("counts",) if question.startswith("#") else ("stripes", "rows", "columns")
        answers[begin : begin + len(answer)] = [ANSWERS[kind] for kind in kinds]
        at += len(whole)
    return text, answers


class Multimodal(Workload):
    name, data, unit = "multimodal", "synthetic images and text", "nats per byte of an answer"

    @property
    def tokens(self) -> int:
        return self.size.batch * ((self.size.side // PATCH) ** 2 + self.size.length)

    def make_model(self, form: str, keys: int, recent: int) -> nn.Module:
        return Model(self.size.config.of_form(form, keys, recent), self.size.side)

    def batch(self, step: int, is_held_out: bool = False) -> Batch:
        size, device = self.size, self.device
        random = self.random_of(step, is_held_out)
        scenes, colour = draw(size, random)
        rows = [
            write(describe(scenes, colour, row, size.grid, random), size.length)
            for row in range(size.batch)
        ]
        text, answers = (to_device(np.stack(one), device).long() for one in zip(*rows))
        patches, covered = workloads_scene.render(scenes, size.side, size.grid, random, device)
        letters = to_device(np.frombuffer(STRIPE_LETTERS.encode(), np.uint8)[scenes.kind], device)
        letters = workloads_scene.label_patches(scenes, covered, letters.long(), size.grid)
        return {
            "patches": patches,
            "letters": letters,
            "text": text[:, :-1].contiguous(),
            "targets": text[:, 1:].contiguous(),
            "answers": answers[:, 1:].contiguous(),
        }

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        logits, targets = model(batch["patches"], batch["text"]).float(), batch["targets"]
        of_patches, of_text = logits.split((batch["letters"].shape[1], targets.shape[1]), 1)
        letters = cross_entropy(of_patches.flatten(0, 1), batch["letters"].flatten())
        answers = torch.where(batch["answers"] > 0, targets, NO_LABEL)
        return letters + cross_entropy(of_text.flatten(0, 1), answers.flatten())

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        """`accuracy` over bytes of answers, and over each kind of answer."""
        targets = batch["targets"]
        logits = model(batch["patches"], batch["text"])[:, -targets.shape[1] :].float()
        losses = cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        is_right = logits.argmax(-1) == targets
        answers = batch["answers"]
        is_answer = answers > 0
        count = int(is_answer.sum())
        sums = {"loss": (losses[is_answer].sum(), count)}
        sums["accuracy"] = (is_right[is_answer].sum(), count)
        for name, kind in ANSWERS.items():
            sums[name] = (is_right[answers == kind].sum(), int((answers == kind).sum()))
        return sums
