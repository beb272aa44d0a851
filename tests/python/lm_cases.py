"""Shared by the tests of examples/lm: runs of the program, its inputs, and its output."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import quality_model
import torch
from programs import ROOT, Done, output_of, run

FOLDER = ROOT / "examples" / "lm"
PROGRAM = os.environ.get("FDMA_LM", str(ROOT / "build" / "examples" / "lm"))
TEXT = ROOT / "examples" / "data" / "text.txt"
RANDOM_BYTES = torch.randint(256, (1300,), generator=torch.Generator().manual_seed(2))


def generate(model: Path, prompt: bytes, *arguments: str) -> bytes:
    """The program's output after the prompt."""
    path = model.with_name("prompt")
    path.write_bytes(prompt)
    done = run(PROGRAM, model, "--prompt-file", path, *arguments, text=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(prompt)
    return done.stdout[len(prompt) :]


def loss_of(done: Done) -> float:
    """Bits per byte."""
    return float(output_of(done).split()[0])


def write_trained(path: Path, window: int | None, recent: int, **kinds: Any) -> quality_model.Model:
    """Write a model of research/quality_model.py. Its queries and keys are so large that rotation
    matters, or, if they are normalized, so small that norm_eps matters."""
    form = "dense" if window is None else "recent"
    bias_form = "none" if window is None else "exp"
    config = quality_model.Config(
        *(2, 6, 3, window, recent), bias_form=bias_form, rotary_base=1000.0, **kinds
    )
    model = quality_model.Model(config)
    quality_model.initialise(model, form, 0, initial_a=0.5, dt_std=0.05)
    factors = {"embedding": 50, "head": 4, "q_proj": 8, "k_proj": 8, "v_proj": 5, "o_proj": 5}
    if config.qk_norm:
        factors.update(embedding=25, q_proj=1 / 64, k_proj=1 / 32, v_proj=3, o_proj=3)
    random = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        parameter.data.mul_(factors.get(name.split(".")[-2], 1))
        if "q_norm" in name or "k_norm" in name:
            parameter.data.uniform_(0.5, 2, generator=random)
    quality_model.save(model, path)
    return model


@torch.no_grad()
def trained_loss(model: quality_model.Model, text: bytes) -> float:
    """Bits per byte of a text in one piece."""
    whole = torch.tensor([[*text]])
    nats = torch.nn.functional.cross_entropy(model(whole[:, :-1])[0], whole[0, 1:])
    return nats.item() / math.log(2)


def assert_likeliest(logits: torch.Tensor, written: bytes) -> None:
    """Each written byte has the largest of its logits [len, 256] or, in few places, one that is
    smaller by no more than rounding."""
    largest, second = logits.topk(2).values.T
    rounding = 64 * torch.finfo(logits.dtype).eps * logits.abs().max()
    assert (largest - second > rounding).double().mean() > 0.97
    chosen = logits.gather(1, torch.tensor([*written])[:, None])[:, 0]
    assert (largest - chosen <= rounding).all()


@torch.no_grad()
def assert_likeliest_in(model: quality_model.Model, prompt: bytes, written: bytes) -> None:
    text = torch.tensor([[*(prompt or b"\n"), *written]])
    assert_likeliest(model(text)[0, -len(written) - 1 : -1], written)


def differences_after_conversion(
    model: quality_model.Model, path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    """How far the program's losses are from the model's, with files that convert.py makes from
    `path` and from a checkpoint whose only metadata are these options."""
    import convert

    checkpoint, text, out = (
        path.with_name(name) for name in ("checkpoint.pt", "text", "converted")
    )
    text.write_bytes(TEXT.read_bytes()[:400])
    torch.save(model.state_dict(), checkpoint)
    want, differences = trained_loss(model, text.read_bytes()), []
    for arguments in ([path, out], [checkpoint, out, *options]):
        monkeypatch.setattr(sys, "argv", ["convert.py", *map(str, arguments)])
        convert.main()
        differences.append(abs(loss_of(run(PROGRAM, out, "--loss", text)) - want))
    return differences
