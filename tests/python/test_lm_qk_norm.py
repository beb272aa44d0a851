"""examples/lm: model files with normalized queries and keys, written by research/quality_model.py,
have the losses and the texts of those models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
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
from quality_model import Attention, Model

pytestmark = pytest.mark.usefixtures("exact_products")

KINDS: dict[str, dict[str, Any]] = {  # three kv heads, each of two query heads
    "some keys": {"window": 24},
    "all keys": {"window": None, "recent": 0},
    "sliding heads": {"window": 24, "sliding": (2, 1)},
    "NoPE heads": {"window": 24, "nope": (1, 2)},
    "NoPE heads, all keys": {"window": None, "recent": 0, "nope": (1, 3)},
    "NoPE heads, some rotated channels": {"window": 24, "nope": (3, 1), "nope_rotary_dim": 10},
    "NoPE and sliding heads": {"window": 24, "nope": (1, 2), "sliding": (2, 1)},
}


def write(path: Path, kind: str) -> Model:
    return write_trained(path, **{"recent": 8, **KINDS[kind]}, qk_norm=True)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_the_trained_model(kind: str, lm: ModuleType, tmp_path: Path) -> None:
    """The program and reference.py."""
    path, text = tmp_path / "model.safetensors", tmp_path / "text"
    model = write(path, kind)
    text.write_bytes(TEXT.read_bytes()[:400])
    want = trained_loss(model, text.read_bytes())
    assert abs(loss_of(run(PROGRAM, path, "--loss", text)) - want) < 1e-4
    assert abs(lm.loss(lm.read_model(path), text.read_bytes(), 400) - want) < 1e-4


@pytest.mark.parametrize("prompt", [0, 9, 513, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_that_of_the_trained_model(kind: str, prompt: int, tmp_path: Path) -> None:
    """A prompt in pieces of 512 bytes, which may end with a single byte, and then byte by byte."""
    path, start = tmp_path / "model.safetensors", bytes(RANDOM_BYTES[:prompt].tolist())
    model = write(path, kind)
    written = generate(path, start, "--temperature", "0", "--bytes", "100")
    assert len(written) == 100 and len(set(written)) > 20
    assert_likeliest_in(model, start, written)


def swap_gains(one: Attention) -> None:
    one.q_norm, one.k_norm = one.k_norm, one.q_norm


def drop_k_norm(one: Attention) -> None:
    one.k_norm = torch.nn.Identity()


def drop_gains(one: Attention) -> None:
    for norm in (one.q_norm, one.k_norm):
        torch.nn.init.ones_(norm.weight)


def change_eps(one: Attention) -> None:
    one.q_norm.eps = one.k_norm.eps = 1e-6


@pytest.mark.parametrize("change", [swap_gains, drop_k_norm, drop_gains, change_eps])
@pytest.mark.parametrize("kind", ["some keys", "all keys"])
def test_other_norms_have_other_losses(
    kind: str, change: Callable[[Attention], None], tmp_path: Path
) -> None:
    """They differ by far more than the comparison above tolerates."""
    model, text = write(tmp_path / "model.safetensors", kind), TEXT.read_bytes()[:400]
    before = trained_loss(model, text)
    for attention in model.attentions():
        change(attention)
    assert abs(trained_loss(model, text) - before) > 1e-3


def test_conversion_keeps_the_norms(
    lm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    model = write(path, "some keys")
    options = ["--window=24", "--recent=8", "--rotary-base=1000"]
    assert max(differences_after_conversion(model, path, options, monkeypatch)) < 1e-4
