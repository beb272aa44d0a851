"""Shared by the tests here: calls of programs, tiny models of quality.py, and a corpus of random
words."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import quality
import quality_model
import torch

LENGTH, KEYS, RECENT = 512, 64, 16
TINY = {
    "size": "tiny",
    "length": LENGTH,
    "batch": 2,
    "keys": KEYS,
    "recent": RECENT,
    "recall": 0.5,
    "warm-up": 2,
    "pieces": 2,
    "questions": 4,
    "curriculum": 3,
    "every": 2,
    "steps": 4,
    "schedule-steps": 4,
    "device": "cpu",
    "initial-a": 0.5,
}


def call(program: ModuleType, *words: Any) -> None:
    program.main([str(word) for word in words])


def refusal(capsys: pytest.CaptureFixture[str], program: ModuleType, *words: Any) -> str:
    """The stderr of a program that ends with status 2."""
    with pytest.raises(SystemExit) as stop:
        call(program, *words)
    assert stop.value.code == 2
    return capsys.readouterr().err


def make_corpus(folder: Path) -> Path:
    """Random words: text without braces."""
    random = np.random.default_rng(0)
    letters = np.frombuffer(b"etaoin shrdlu.\n", np.uint8)
    for name, size in (("corpus.bin", 20_000), ("held_out.bin", 4_000)):
        (folder / name).write_bytes(letters[random.integers(len(letters), size=size)].tobytes())
    return folder


def training(corpus: Path, out: Path, form: str, *flags: str, **changed: Any) -> list[Any]:
    """The arguments of quality.py. Options are named as in TINY, with _ for -."""
    options = {**TINY, **{name.replace("_", "-"): value for name, value in changed.items()}}
    words = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return [out, "--corpus", corpus, "--form", form, *words, *flags]


def train(corpus: Path, out: Path, form: str, *flags: str, **changed: Any) -> dict[str, Any]:
    """The log of a run."""
    call(quality, *training(corpus, out, form, *flags, **changed))
    name = changed.get("name", f"{form}-tiny-0")
    return json.loads((out / f"{name}.json").read_text())


def refusal_of(capsys: pytest.CaptureFixture[str], *given: Any, **changed: Any) -> str:
    return refusal(capsys, quality, *training(*given, **changed))


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """The weights of a run at its end."""
    return torch.load(folder / f"{name}.pt", weights_only=True)["model"]


def model_of(form: str, seed: int = 0, dt_std: float = 0.5) -> quality_model.Model:
    model = quality_model.Model(quality_model.config_of(form, "tiny", KEYS, RECENT))
    quality_model.initialise(model, form, seed, initial_a=0.5, dt_std=dt_std)
    return model
