"""What the tests of quality.py have in common: tiny models and a corpus of random words."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quality
import quality_model

LENGTH, KEYS, RECENT = 512, 64, 16
TINY = {
    **{"size": "tiny", "length": LENGTH, "batch": 2, "keys": KEYS, "recent": RECENT},
    **{"recall": 0.5, "warm-up": 2, "pieces": 2, "questions": 4, "curriculum": 3},
    **{"every": 2, "steps": 4, "schedule-steps": 4, "device": "cpu", "initial-a": 0.5},
}


def make_corpus(folder: Path) -> Path:
    """Random words: text without braces."""
    random = np.random.default_rng(0)
    letters = np.frombuffer(b"etaoin shrdlu.\n", np.uint8)
    for name, size in (("corpus.bin", 20_000), ("held_out.bin", 4_000)):
        (folder / name).write_bytes(letters[random.integers(len(letters), size=size)].tobytes())
    return folder


def train(corpus: Path, out: Path, form: str, *flags: str, **changed: Any) -> dict[str, Any]:
    """The log of a run. Options are named as in TINY, with _ for -."""
    options = {**TINY, **{name.replace("_", "-"): value for name, value in changed.items()}}
    words = [f"--{name}={value}" for name, value in options.items() if value is not None]
    arguments = [str(out), "--corpus", str(corpus), "--form", form, *words, *flags]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["quality.py", *arguments])
        quality.main()
    name = changed.get("name", f"{form}-tiny-0")
    return json.loads((out / f"{name}.json").read_text())


def refusal_of(
    capsys: pytest.CaptureFixture[str],
    *arguments: Any,
    **changed: Any,
) -> str:
    """What train(), with these arguments, prints before it ends with status 2."""
    with pytest.raises(SystemExit) as stop:
        train(*arguments, **changed)
    assert stop.value.code == 2
    return capsys.readouterr().err


def model_of(form: str, seed: int = 0, dt_std: float = 0.5) -> quality_model.Model:
    model = quality_model.Model(quality_model.config_of(form, "tiny", KEYS, RECENT))
    quality_model.initialise(model, form, seed, initial_a=0.5, dt_std=dt_std)
    return model
