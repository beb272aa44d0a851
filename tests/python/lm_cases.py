"""What the tests of examples/lm have in common: the program, what it reads, and what it prints."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from programs import ROOT, Done, output_of, run

FOLDER = ROOT / "examples" / "lm"
PROGRAM = os.environ.get("FDMA_LM", str(ROOT / "build" / "examples" / "lm"))
TEXT = ROOT / "examples" / "data" / "text.txt"
RANDOM_BYTES = torch.randint(256, (1300,), generator=torch.Generator().manual_seed(2))


def generate(model: Path, prompt: bytes, *arguments: str) -> bytes:
    """What the program writes after the prompt."""
    path = model.with_name("prompt")
    path.write_bytes(prompt)
    done = run(PROGRAM, model, "--prompt-file", path, *arguments, text=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(prompt)
    return done.stdout[len(prompt) :]


def loss_of(done: Done) -> float:
    """Bits per byte."""
    return float(output_of(done).split()[0])
