"""Synthetic images for workloads.py: discs with stripes, in many colours, on a noisy background.

An image is a grid of square cells. A cell has one object or none, somewhere in it: a disc whose
stripes have one of four directions, and a wavelength and a phase without meaning. The background is
noise of three scales.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from quality_model import to_device
from torch import nn
from torch.nn.functional import interpolate

KINDS = ("horizontal", "vertical", "rising", "falling")  # directions of stripes
CHANNELS = 3
PATCH = 16  # pixels per side of a patch
NO_LABEL = -100  # targets that cross_entropy() ignores
INPUT_SCALE = 16  # initial weights have deviation 0.02: this makes embeddings as strong as pixels
SMALLEST, LARGEST = 0.3, 0.45  # radius of an object, as a fraction of the side of its cell
WAVELENGTH = (5.0, 10.0)  # pixels, across the stripes
MEAN, CONTRAST = 0.5, 0.7  # of the stripes, times the colour
NOISE = ((32, 0.15), (8, 0.1), (1, 0.1))  # pixels from one sample to the next, and the deviation


@dataclasses.dataclass(frozen=True)
class Scenes:
    """Descriptions of images: each array is [batch, objects]. Each object has its own cell."""

    cell: np.ndarray  # row * grid + column
    kind: np.ndarray
    colour: np.ndarray  # [batch, objects, CHANNELS]
    centre: np.ndarray  # [batch, objects, 2]: y and x in the cell, as fractions of its side
    radius: np.ndarray  # as a fraction of the side of the cell; 0 for an absent object
    wavelength: np.ndarray  # pixels
    phase: np.ndarray  # radians


def draw_scenes(
    batch: int, objects: int, grid: int, kind: np.ndarray, random: np.random.Generator
) -> Scenes:
    """Objects of given kinds in random cells, all of them grey."""
    cell = random.permuted(np.tile(np.arange(grid * grid), (batch, 1)), axis=1)[:, :objects]
    radius = random.uniform(SMALLEST, LARGEST, (batch, objects))
    centre = random.uniform(radius[..., None], 1 - radius[..., None], (batch, objects, 2))
    wavelength = random.uniform(*WAVELENGTH, (batch, objects))
    phase = random.uniform(0, 2 * math.pi, (batch, objects))
    grey = random.uniform(0.5, 1, (batch, objects)) * random.choice((-1, 1), (batch, objects))
    colour = np.repeat(grey[..., None], CHANNELS, -1)
    return Scenes(cell, kind, colour, centre, radius, wavelength, phase)


def spread(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """[batch, objects, 1, 1] float32"""
    return to_device(numbers.astype(np.float32), device)[..., None, None]


def cover(scenes: Scenes, pixels: int, device: torch.device) -> torch.Tensor:
    """[batch, objects, pixels, pixels] bool: the pixels of its cell that each object covers."""
    y, x = (spread(scenes.centre[..., axis], device) for axis in (0, 1))
    axis = (torch.arange(pixels, device=device) + 0.5) / pixels
    return (axis - x) ** 2 + (axis[:, None] - y) ** 2 < spread(scenes.radius, device) ** 2


def draw_stripes(scenes: Scenes, pixels: int, device: torch.device) -> torch.Tensor:
    """[batch, objects, pixels, pixels]: the brightness of each object in its cell."""
    angle = np.deg2rad((90, 0, 45, 135))[scenes.kind]  # of the normal; rows go down
    axis = torch.arange(pixels, dtype=torch.float32, device=device)
    across = axis * spread(np.cos(angle), device)
    across = across + axis[:, None] * spread(np.sin(angle), device)
    turns = across / spread(scenes.wavelength, device)
    return MEAN + CONTRAST * torch.sin(2 * math.pi * turns + spread(scenes.phase, device))


def make_background(
    batch: int, side: int, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """[batch, CHANNELS, side, side]"""
    image = torch.zeros(batch, CHANNELS, side, side, device=device)
    for pixels, deviation in NOISE:
        shape = (batch, CHANNELS, side // pixels, side // pixels)
        noise = deviation * torch.randn(shape, generator=generator, device=device)
        smooth = noise if pixels == 1 else interpolate(noise, size=(side, side), mode="bilinear")
        image += smooth
    return image


def paint(
    scenes: Scenes, covered: torch.Tensor, grid: int, generator: torch.Generator
) -> torch.Tensor:
    """Images as patches [batch, patches, CHANNELS * PATCH * PATCH], row by row."""
    device = covered.device
    batch, _, pixels, _ = covered.shape
    side = grid * pixels
    image = make_background(batch, side, generator, device)
    cells = image.view(batch, CHANNELS, grid, pixels, grid, pixels)
    # [batch, cells, pixels, pixels, channels]
    cells = cells.permute(0, 2, 4, 3, 5, 1).flatten(1, 2)
    index = to_device(scenes.cell, device)
    rows = torch.arange(batch, device=device)[:, None]
    colour = to_device(scenes.colour.astype(np.float32), device)
    bright = covered * draw_stripes(scenes, pixels, device)
    cells[rows, index] += bright[..., None] * colour[:, :, None, None]
    image = cells.unflatten(1, (grid, grid)).permute(0, 5, 1, 3, 2, 4)
    patches = image.reshape(batch, CHANNELS, side // PATCH, PATCH, side // PATCH, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def render(
    scenes: Scenes, side: int, grid: int, random: np.random.Generator, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images as patches, see paint(), and the pixels that objects cover, see cover()."""
    generator = torch.Generator(device).manual_seed(int(random.integers(1 << 62)))
    covered = cover(scenes, side // grid, device)
    return paint(scenes, covered, grid, generator), covered


def label_patches(
    scenes: Scenes, covered: torch.Tensor, label: torch.Tensor, grid: int
) -> torch.Tensor:
    """[batch, patches]: the label [batch, objects] of the object that covers half of a patch or
    more; NO_LABEL if there is none."""
    batch, _, pixels, _ = covered.shape
    count = pixels // PATCH
    blocks = covered.unflatten(3, (count, PATCH)).unflatten(2, (count, PATCH))
    is_covered = blocks.float().mean((3, 5)) >= 0.5  # [batch, objects, count, count]
    labels = torch.where(is_covered, label[..., None, None], NO_LABEL)
    cells = torch.full((batch, grid * grid, count, count), NO_LABEL, device=covered.device)
    index = to_device(scenes.cell, covered.device)
    cells[torch.arange(batch, device=covered.device)[:, None], index] = labels
    return cells.unflatten(1, (grid, grid)).transpose(2, 3).flatten(1)


class PatchEmbedding(nn.Module):
    """From patches [batch, len, CHANNELS * PATCH * PATCH] to hidden states [batch, len, width], and
    the row and the column of each patch [2, len] int32."""

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.count = side // PATCH  # of a side
        self.project = nn.Linear(CHANNELS * PATCH * PATCH, width, bias=False)
        self.row = nn.Embedding(self.count, width)
        self.column = nn.Embedding(self.count, width)

    def forward(self, patches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        axis = torch.arange(self.count, dtype=torch.int32, device=patches.device)
        row, column = axis.repeat_interleave(self.count), axis.repeat(self.count)
        where = self.row(row) + self.column(column)
        return self.project(patches) + INPUT_SCALE * where, torch.stack((row, column))
