"""The workload `language`: the byte-level language model of quality_model.py on real text.

The text comes from a folder with the files of quality_text.py, or else from Python's standard
library: its source files in the order of their paths, with one in fifty held out. Losses are in
bits per byte.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sysconfig
from pathlib import Path

import numpy as np
import quality_model
import torch
from quality_model import to_device
from quality_recall import cut_random
from torch import nn
from torch.nn.functional import cross_entropy
from workloads_model import BIAS_FORM, Batch, Sums, Workload

HELD_OUT = 50  # one file in so many


@dataclasses.dataclass(frozen=True)
class Size:
    name: str  # in quality_model.SIZES
    length: int  # bytes of a sequence
    batch: int
    steps: int


USUAL = Size("small", 8192, 8, 1000)
QUICK = Size("tiny", 256, 4, 8)


def read_folder(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Text for training, and held-out text."""
    train, held_out = (
        np.fromfile(folder / name, np.uint8) for name in ("corpus.bin", "held_out.bin")
    )
    return train, held_out


@functools.lru_cache(1)
def read_library() -> tuple[np.ndarray, np.ndarray]:
    """The same from Python's standard library, without installed packages and tests."""
    folder = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    paths = [
        path
        for path in sorted(folder.rglob("*.py"))
        if not skipped & set(path.relative_to(folder).as_posix().split("/"))
    ]
    kinds: tuple[list[bytes], list[bytes]] = ([], [])
    for number, path in enumerate(paths):
        kinds[number % HELD_OUT == HELD_OUT - 1].append(path.read_bytes() + b"\0")
    train, held_out = (np.frombuffer(b"".join(one), np.uint8) for one in kinds)
    return train, held_out


class Language(Workload):
    name, unit = "language", "bits per byte"

    def __init__(self, size: Size, seed: int, device: torch.device, corpus: Path | None) -> None:
        super().__init__(size, seed, device)
        self.data = "Python's standard library" if corpus is None else f"text of {corpus.name}"
        self.texts = read_library() if corpus is None else read_folder(corpus)
        for text in self.texts:
            if len(text) <= size.length:
                least = size.length + 1
                raise ValueError(f"--corpus: has a text of {len(text)} bytes, want {least} or more")

    @property
    def tokens(self) -> int:
        return self.size.batch * self.size.length

    def make_model(self, form: str, keys: int, recent: int) -> nn.Module:
        own = "dense" if form == "dense" else "recent"
        _, _, kv_heads = quality_model.SIZES[self.size.name]
        more = {"bias_form": BIAS_FORM, "sliding_heads": kv_heads // 2}
        config = quality_model.config_of(own, self.size.name, keys, recent, **more)
        return quality_model.Model(config)

    def batch(self, step: int, is_held_out: bool = False) -> Batch:
        random = self.random_of(step, is_held_out)
        text = cut_random(self.texts[is_held_out], self.size.batch, self.size.length + 1, random)
        return {"text": to_device(text, self.device).long()}

    def losses(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The losses [batch, len] in bits, and the mask of predicted bytes."""
        text = batch["text"]
        logits = model(text[:, :-1]).float()
        losses = cross_entropy(logits.transpose(1, 2), text[:, 1:], reduction="none")
        return losses / math.log(2), logits.argmax(-1) == text[:, 1:]

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return self.losses(model, batch)[0].mean()

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        losses, is_right = self.losses(model, batch)
        return {
            "loss": (losses.sum(), losses.numel()),
            "accuracy": (is_right.sum(), is_right.numel()),
        }
