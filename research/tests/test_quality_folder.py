"""Models of quality.py as folders of transformers."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import quality_folder
import quality_model
import quality_orders
import safetensors.torch
import torch
from flash_dmattn.transformers import ByteTokenizer, HybridForCausalLM
from quality_model import Config, Model
from quality_retention import Gate

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


@torch.no_grad()
def test_lifetimes_of_quality_orders(tmp_path: Path) -> None:
    """Which keys the last layer attends to is as in quality_orders.py."""
    model, keys = make(HYBRID), 2 * quality_orders.RECENT + 40
    gate = Gate(model.config.width, 2, math.log(1e5), seed=1)
    gate.contract.weight.mul_(20)  # spreads lifetimes, so that few of them are equal as integers
    sizes = {"keys": str(keys), "recent": str(quality_orders.RECENT)}
    safetensors.torch.save_file(gate.state_dict(), tmp_path / "gate", metadata=sizes)
    quality_model.save(model, tmp_path / "m")
    words = [str(tmp_path / "m"), str(tmp_path / "out"), "--gate", str(tmp_path / "gate")]
    assert quality_folder.main(words) == 0
    text = torch.randint(256, (1, 500), generator=torch.Generator().manual_seed(1))
    rule = functools.partial(quality_orders.attend_in_order, gate, torch.ones(2), keys)
    with quality_orders.choosing(model, rule, [gate]):
        wanted = model(text)
    found = HybridForCausalLM.from_pretrained(tmp_path / "out").eval()(text).logits[..., :256]
    assert (found - wanted).abs().max() <= 1e-4 < (model(text) - wanted).abs().max()


def test_gates_that_no_hybrid_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make(HYBRID)
    quality_model.save(model, tmp_path / "m")
    gate = Gate(48, 2, 1.0, seed=1, reads_values=True)
    sizes = {"keys": "200", "recent": "64"}
    safetensors.torch.save_file(gate.state_dict(), tmp_path / "gate", metadata=sizes)
    words = [str(tmp_path / "m"), str(tmp_path / "out"), "--gate", str(tmp_path / "gate")]
    assert quality_folder.main(words) == 1
    assert "gate: reads values, want hidden states" in capsys.readouterr().err


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
