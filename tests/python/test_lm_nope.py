"""examples/lm: model files with NoPE heads, written by research/quality_model.py, have the losses
and the texts of those models."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lm_cases import (
    PROGRAM,
    RANDOM_BYTES,
    TEXT,
    assert_likeliest_in,
    differences_after_conversion,
    generate,
    loss_of,
    trained_loss,
    write_trained,
)
from programs import run
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.usefixtures("exact_products")

HEADS: dict[str, dict[str, Any]] = {  # three kv heads, each of two query heads
    "none": {},
    "one of a layer": {"nope": (0, 1)},
    "all of a layer": {"nope": (3, 0)},
    "all": {"nope": (3, 3)},
    "some": {"nope": (1, 2)},
    "some, beside sliding ones": {"nope": (1, 2), "sliding": (2, 1)},
    "all, with a few rotated channels": {"nope": (3, 3), "nope_rotary_dim": 10},
    "some, with half of the channels rotated": {"nope": (2, 1), "nope_rotary_dim": 32},
    "one, and a larger window in its layer": {"nope": (0, 1), "nope_window": 200},
    "one, and a smaller window in its layer": {"nope": (1, 0), "nope_window": 6},
    "all, and another window": {"nope": (3, 3), "nope_window": 60},
    "one, with all channels rotated": {"nope": (0, 1), "nope_rotary_dim": 64},
}


@pytest.mark.parametrize("window", [40, 1000])
@pytest.mark.parametrize("heads", HEADS)
def test_losses_are_those_of_the_trained_model(
    heads: str, window: int, lm: ModuleType, tmp_path: Path
) -> None:
    """The program and reference.py, with queries that keep some keys, or all."""
    path, text = tmp_path / "model.safetensors", tmp_path / "text"
    model = write_trained(path, window, 8, **HEADS[heads])
    text.write_bytes(TEXT.read_bytes()[:400])
    want = trained_loss(model, text.read_bytes())
    assert abs(loss_of(run(PROGRAM, path, "--loss", text)) - want) < 1e-4
    assert abs(lm.loss(lm.read_model(path), text.read_bytes(), 400) - want) < 1e-4


def test_each_choice_of_heads_has_its_own_loss(tmp_path: Path) -> None:
    """The losses above differ by far more than the comparison tolerates, so that the program cannot
    have rotated other heads than the file's."""
    text = TEXT.read_bytes()[:400]
    others = ("sliding", "nope_window")
    rules = {name: rule for name, rule in HEADS.items() if not any(one in rule for one in others)}
    del rules["one, with all channels rotated"]  # equals no NoPE heads
    losses = [
        trained_loss(write_trained(tmp_path / "model", 1000, 8, **rule), text)
        for rule in rules.values()
    ]
    losses.sort()
    assert min(above - below for below, above in zip(losses, losses[1:])) > 1e-3


@pytest.mark.parametrize("prompt", [0, 9, 700])
@pytest.mark.parametrize("heads", HEADS)
def test_greedy_text_is_that_of_the_trained_model(heads: str, prompt: int, tmp_path: Path) -> None:
    """A prompt in pieces of 512 bytes, and then byte by byte."""
    path, start = tmp_path / "model.safetensors", bytes(RANDOM_BYTES[:prompt].tolist())
    model = write_trained(path, 24, 8, **HEADS[heads])
    written = generate(path, start, "--temperature", "0", "--bytes", "100")
    assert len(written) == 100 and len(set(written)) > 20
    assert_likeliest_in(model, start, written)


def test_the_window_of_layers_with_nope_heads_matters(tmp_path: Path) -> None:
    """Each of these windows has a loss of its own, which differs by far more than the comparisons
    above tolerate."""
    path, text = tmp_path / "model.safetensors", TEXT.read_bytes()[:400]
    for nope in ((0, 1), (1, 0)):
        losses = [
            trained_loss(write_trained(path, 40, 8, nope=nope, nope_window=window), text)
            for window in (None, 6, 200, 1000)
        ]
        losses.sort()
        assert min(above - below for below, above in zip(losses, losses[1:])) > 1e-3


def test_conversion_keeps_the_heads(
    lm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    model = write_trained(path, 40, 8, nope=(0, 2), nope_rotary_dim=10, nope_window=20)
    options = ["--window=40", "--recent=8", "--rotary-base=1000"]
    options += ["--nope=0 2", "--nope-rotary-dim=10", "--nope-window=20"]
    assert max(differences_after_conversion(model, path, options, monkeypatch)) < 1e-4


def test_conversion_of_a_model_that_attends_to_all_keys(
    lm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has no windows, whatever the options say."""
    path = tmp_path / "model.safetensors"
    model = write_trained(path, None, 0, nope=(1, 2))
    options = ["--window=40", "--rotary-base=1000", "--nope=1 2", "--nope-window=20"]
    assert max(differences_after_conversion(model, path, options, monkeypatch)) < 1e-4


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"nope": ""},
        {"nope": "0 0", "nope_rotary_dim": "8"},
        {"nope_window": "6"},
        {"nope": "0 0", "nope_window": "6"},
    ],
)
def test_files_without_nope_heads(metadata: dict[str, str], tmp_path: Path) -> None:
    """`nope` is absent, empty or 0 in all layers. Then nope_window has no effect."""
    path, text = tmp_path / "model.safetensors", tmp_path / "text"
    text.write_bytes(TEXT.read_bytes()[:400])
    model = write_trained(path, 40, 8)
    given = model.config.metadata()
    del given["nope"], given["nope_rotary_dim"]
    save_file(load_file(path), path, {**given, **metadata})
    found = loss_of(run(PROGRAM, path, "--loss", text))
    assert abs(found - trained_loss(model, text.read_bytes())) < 1e-4
