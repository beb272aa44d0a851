"""The workload `image`: a vision transformer over patches of synthetic images of high resolution.

One object of an image is red, one is blue, the others are light or dark grey. Each patch that an
object covers by half or more is asked for a direction of stripes: a red or blue patch for its own,
a light one for the red object's, a dark one for the blue object's. So a grey patch needs its own
pixels and the detail of an object that may be anywhere; its own stripes and its position say
nothing. The loss of a constant prediction is log(4).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
import workloads_scene
from quality_model import to_device
from torch import nn
from torch.nn.functional import cross_entropy
from workloads_model import Batch, Body, Config, Sums, Workload
from workloads_scene import KINDS, NO_LABEL, PATCH, PatchEmbedding

RED, BLUE = (1.0, -0.5, -0.5), (-0.5, -0.5, 1.0)
REFERENCES = 2  # the first objects are the red one and the blue one


@dataclasses.dataclass(frozen=True)
class Size:
    config: Config
    side: int  # pixels
    grid: int  # cells per side
    objects: int
    batch: int
    steps: int


USUAL = Size(Config(6, 6, 3, causal=False), 1024, 4, 10, 16, 1200)
QUICK = Size(Config(2, 2, 1, causal=False), 256, 4, 8, 4, 8)


class Model(Body):
    """From patches [batch, len, CHANNELS * PATCH * PATCH] to logits [batch, len, KINDS]."""

    def __init__(self, config: Config, side: int) -> None:
        super().__init__(config)
        self.patches = PatchEmbedding(side, config.width)
        self.head = nn.Linear(config.width, len(KINDS), bias=False)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.head(self.run(*self.patches(patches)))


def draw(size: Size, random: np.random.Generator) -> tuple[workloads_scene.Scenes, np.ndarray]:
    """Descriptions of a batch, and for each object the kind that its patches are asked for."""
    kind = random.integers(len(KINDS), size=(size.batch, size.objects))
    scenes = workloads_scene.draw_scenes(size.batch, size.objects, size.grid, kind, random)
    scenes.colour[:, :REFERENCES] = RED, BLUE
    wanted = np.where(scenes.colour[..., 0] > 0, kind[:, :1], kind[:, 1:REFERENCES])
    return scenes, wanted


class Image(Workload):
    name, data, unit = "image", "synthetic images", "nats per patch"

    @property
    def tokens(self) -> int:
        return self.size.batch * (self.size.side // PATCH) ** 2

    def make_model(self, form: str, keys: int, recent: int) -> nn.Module:
        return Model(self.size.config.of_form(form, keys, recent), self.size.side)

    def batch(self, step: int, is_held_out: bool = False) -> Batch:
        size, device = self.size, self.device
        random = self.random_of(step, is_held_out)
        scenes, wanted = draw(size, random)
        patches, covered = workloads_scene.render(scenes, size.side, size.grid, random, device)
        number = np.tile(np.arange(size.objects), (size.batch, 1))
        number, targets = (
            workloads_scene.label_patches(scenes, covered, to_device(one, device), size.grid)
            for one in (number, wanted)
        )
        return {"patches": patches, "targets": targets, "is_grey": number >= REFERENCES}

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        logits = model(batch["patches"]).float()
        return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        """`accuracy` over all labels, and over patches of grey objects."""
        has_label = batch["targets"] != NO_LABEL
        logits = model(batch["patches"]).float()[has_label]
        targets, is_grey = batch["targets"][has_label], batch["is_grey"][has_label]
        is_right = logits.argmax(-1) == targets
        return {
            "loss": (cross_entropy(logits, targets, reduction="sum"), len(targets)),
            "accuracy": (is_right.sum(), len(targets)),
            "grey": (is_right[is_grey].sum(), int(is_grey.sum())),
        }
