"""Models of quality.py as folders of transformers."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import quality_folder
import quality_model
import torch
from flash_dmattn.transformers import ByteTokenizer, HybridForCausalLM
from quality_model import Config, Model

HYBRID = Config(3, 4, 2, 24, 8, sliding=(2, 2, 0), nope=(0, 0, 2), nope_window=20, nope_recent=12)


def make(config: Config, form: str = "recent") -> Model:
    model = Model(config)
    quality_model.initialise(model, form, 0, initial_a=1.0, dt_std=0.3)
    return model.eval()


@pytest.mark.parametrize("form", ["recent", "sliding", "normalized"])
@torch.no_grad()
def test_logits_agree(form: str, tmp_path: Path) -> None:
    """Scores decide which 32 of 200 keys are kept, or the newest are."""
    config = dataclasses.replace(HYBRID, qk_norm=form == "normalized", rotary_base=5e5)
    if form == "sliding":
        config = dataclasses.replace(config, sliding=(), recent=0, nope_recent=None)
    model = make(config, "sliding" if form == "sliding" else "recent")
    quality_model.save(model, tmp_path / "model.safetensors")
    text = torch.randint(256, (2, 200), generator=torch.Generator().manual_seed(1))
    wanted = model(text)
    assert quality_folder.main([str(tmp_path / "model.safetensors"), str(tmp_path / "out")]) == 0
    hybrid = HybridForCausalLM.from_pretrained(tmp_path / "out").eval()
    found = hybrid(text).logits
    exact = model.double()(text)
    step = torch.finfo(torch.float32).eps * exact.abs().max()
    allowed = 2 * (wanted - exact).abs().max() + step
    assert (found[..., :256] - exact).abs().max() <= allowed <= 1e-4
    assert torch.equal(found[..., 256], found[..., 255])
    assert ByteTokenizer.from_pretrained(tmp_path / "out")("ab")["input_ids"] == [97, 98]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"nope": (0, 0, 1), "sliding": (2, 2, 1)}, "nope: layer 2 has 1 NoPE heads, want 0 or 2"),
        ({"nope": ()}, "nope: no layer has NoPE heads, want one or more"),
        ({"sliding": (2, 0, 0)}, r"layer 1: selects keys, want that only in layers \[2\]"),
        (
            {"window": None, "nope_window": None},
            r"window: is all keys in layers \[2\], want a number",
        ),
        ({"sinks": 2}, "sinks: is 2, want 0"),
        ({"nope_rotary_dim": 16}, "nope_rotary_dim: is 16, want 0"),
    ],
)
def test_models_that_are_no_hybrids(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = dataclasses.replace(HYBRID, **change)
    if config.window is None:
        config = dataclasses.replace(config, recent=0, nope_recent=None, sliding=())
    quality_model.save(make(config, "dense" if config.window is None else "recent"), tmp_path / "m")
    assert quality_folder.main([str(tmp_path / "m"), str(tmp_path / "out")]) == 1
    assert re.search(message, capsys.readouterr().err) and not (tmp_path / "out").exists()
