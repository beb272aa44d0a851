"""Doge with weights that accelerate has offloaded: they exist only during a module's call."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest
import torch

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

import flash_dmattn.transformers as ours  # noqa: E402
from doge_models import LENGTH, assert_near, make_models, make_tokens, registered  # noqa: E402

__all__ = ["registered"]  # a fixture


def to_cpu(model: Any, folder: Path) -> None:
    accelerate.cpu_offload(model, execution_device="cpu")


def to_disk(model: Any, folder: Path) -> None:
    accelerate.disk_offload(model, folder, execution_device="cpu")


@pytest.mark.parametrize("offload", [to_cpu, to_disk])
@pytest.mark.parametrize("name", ["doge", "doge with biases"])
def test_offloaded_weights(name: str, offload: Callable[..., None], tmp_path: Path) -> None:
    eager, selected = make_models(name)
    tokens, mask = make_tokens(), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :20] = 0
    offload(selected, tmp_path)
    attention = selected.model.layers[0].self_attn
    assert attention.dt_proj.weight.is_meta
    assert attention.A.is_meta
    with torch.no_grad():
        wanted = eager(tokens, attention_mask=mask).logits
        assert_near(selected(tokens, attention_mask=mask).logits[mask.bool()], wanted[mask.bool()])
        wanted = eager(tokens).logits
        cache = ours.DogeCache(selected.config)
        pieces = tokens.split([70, 1, LENGTH - 71], 1)
        found = [selected(piece, past_key_values=cache).logits for piece in pieces]
        assert_near(torch.cat(found, 1), wanted)
