"""examples/lm: files of models with NoPE heads, written by benchmarks/quality_model.py, have the
losses and the texts of those models."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import quality_model
import torch
from lm_cases import PROGRAM, RANDOM_BYTES, TEXT, generate, loss_of
from programs import run
from safetensors.torch import load_file, save_file

HEADS: dict[str, dict[str, Any]] = {  # three kv heads, each of two query heads
    "none": {},
    "one of a layer": {"nope": (0, 1)},
    "all of a layer": {"nope": (3, 0)},
    "all": {"nope": (3, 3)},
    "some": {"nope": (1, 2)},
    "some, beside sliding ones": {"nope": (1, 2), "sliding": (2, 1)},
    "all, with a few rotated channels": {"nope": (3, 3), "nope_rotary_dim": 10},
    "some, with half of the channels rotated": {"nope": (2, 1), "nope_rotary_dim": 32},
    "one, with all channels rotated": {"nope": (0, 1), "nope_rotary_dim": 64},
}


def write(path: Path, window: int, recent: int, **heads: Any) -> quality_model.Model:
    """Writes a model whose queries and keys are so large that rotation matters."""
    config = quality_model.Config(2, 6, 3, window, recent, rotary_base=1000.0, **heads)
    model = quality_model.Model(config)
    quality_model.initialise(model, "recent", 0, initial_a=0.5, dt_std=0.05)
    factors = {"embedding": 50, "head": 4, "q_proj": 8, "k_proj": 8, "v_proj": 5, "o_proj": 5}
    for name, parameter in model.named_parameters():
        parameter.data.mul_(factors.get(name.split(".")[-2], 1))
    quality_model.save(model, path)
    return model


@torch.no_grad()
def loss(model: quality_model.Model, text: bytes) -> float:
    """Bits per byte of a text in one piece."""
    whole = torch.tensor([[*text]])
    nats = torch.nn.functional.cross_entropy(model(whole[:, :-1])[0], whole[0, 1:])
    return nats.item() / math.log(2)


@pytest.mark.parametrize("window", [40, 1000])
@pytest.mark.parametrize("heads", HEADS)
def test_losses_are_those_of_the_trained_model(
    heads: str, window: int, lm: ModuleType, tmp_path: Path
) -> None:
    """Of the program and of reference.py, where queries keep some of the keys and where all."""
    path, text = tmp_path / "model.safetensors", tmp_path / "text"
    model = write(path, window, 8, **HEADS[heads])
    text.write_bytes(TEXT.read_bytes()[:400])
    want = loss(model, text.read_bytes())
    assert abs(loss_of(run(PROGRAM, path, "--loss", text)) - want) < 1e-4
    assert abs(lm.loss(lm.read_model(path), text.read_bytes(), 400) - want) < 1e-4


def test_each_choice_of_heads_has_its_own_loss(tmp_path: Path) -> None:
    """The losses above differ by far more than what the comparison tolerates, so that no other
    heads than those of the file can have been rotated."""
    text = TEXT.read_bytes()[:400]
    rules = {name: rule for name, rule in HEADS.items() if "sliding" not in rule}
    del rules["one, with all channels rotated"]  # is as none
    losses = [loss(write(tmp_path / "model", 1000, 8, **rule), text) for rule in rules.values()]
    losses.sort()
    assert min(above - below for below, above in zip(losses, losses[1:])) > 1e-3


@pytest.mark.parametrize("prompt", [0, 9, 700])
@pytest.mark.parametrize("heads", HEADS)
def test_greedy_text_is_that_of_the_trained_model(heads: str, prompt: int, tmp_path: Path) -> None:
    """A prompt in pieces of 512 bytes, and then byte by byte."""
    path, start = tmp_path / "model.safetensors", bytes(RANDOM_BYTES[:prompt].tolist())
    model = write(path, 24, 8, **HEADS[heads])
    written = generate(path, start, "--temperature", "0", "--bytes", "100")
    assert len(written) == 100 and len(set(written)) > 20
    with torch.no_grad():
        logits = model(torch.tensor([[*(start or b"\n"), *written]]))[0, -101:-1]
    assert logits.argmax(1).tolist() == [*written]


def test_conversion_keeps_the_heads(
    lm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a file's metadata, and for a checkpoint without metadata those of options."""
    import convert

    path, checkpoint = tmp_path / "model.safetensors", tmp_path / "checkpoint.pt"
    text, out = tmp_path / "text", tmp_path / "out.safetensors"
    text.write_bytes(TEXT.read_bytes()[:400])
    model = write(path, 40, 8, nope=(1, 2), nope_rotary_dim=10)
    torch.save(model.state_dict(), checkpoint)
    options = ["--window=40", "--recent=8", "--rotary-base=1000"]
    options += ["--nope=1 2", "--nope-rotary-dim=10"]
    for arguments in ([path, out], [checkpoint, out, *options]):
        monkeypatch.setattr(sys, "argv", ["convert.py", *map(str, arguments)])
        convert.main()
        found = loss_of(run(PROGRAM, out, "--loss", text))
        assert abs(found - loss(model, text.read_bytes())) < 1e-4


@pytest.mark.parametrize("metadata", [{}, {"nope": ""}, {"nope": "0 0", "nope_rotary_dim": "8"}])
def test_files_without_nope_heads(metadata: dict[str, str], tmp_path: Path) -> None:
    """`nope` is absent, empty or 0 in all layers."""
    path, text = tmp_path / "model.safetensors", tmp_path / "text"
    text.write_bytes(TEXT.read_bytes()[:400])
    model = write(path, 40, 8)
    given = model.config.metadata()
    del given["nope"], given["nope_rotary_dim"]
    save_file(load_file(path), path, {**given, **metadata})
    found = loss_of(run(PROGRAM, path, "--loss", text))
    assert abs(found - loss(model, text.read_bytes())) < 1e-4
