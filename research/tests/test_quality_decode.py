"""quality_decode.py: models with either last layer compute the same, if no key is dropped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import quality_decode
import torch
from model_step_decode import CachedWay
from quality_cases import call
from torch.nn.attention import SDPBackend

CONTEXT = 300
WAY = CachedWay("plain", SDPBackend.MATH, "")


def make(batch: int, keys: int | None) -> quality_decode.Model:
    torch.manual_seed(0)
    return quality_decode.Model("tiny", batch, CONTEXT, keys, WAY, "cpu")


@pytest.mark.parametrize("batch", [1, 2])
def test_models_agree(batch: int) -> None:
    models = make(batch, CONTEXT), make(batch, None)
    others = make(batch, 40)
    text = torch.randint(256, (batch, CONTEXT))
    for part in (text[:, :-1], text[:, -1:]):  # prefill, and a step
        ours, plain = (model(part) for model in models)
        few = others(part)
        scale = plain.float().std()
        assert (ours - plain).abs().max() < 0.05 * scale
        assert (few - plain).abs().max() > 0.2 * scale


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--contexts", "600", "--batches", "1", "2", "--keys", "64", "700"]
    path = tmp_path / "rows.json"
    call(quality_decode, "--size", "tiny", "--device", "cpu", *sizes, "--json", path)
    rows = list(map(json.loads, path.read_text().splitlines()))[1:]
    assert [(row["batch"], row["keys"]) for row in rows] == [(1, None), (1, 64), (2, None), (2, 64)]
    whole, kept = rows[0]["cache_bytes"], rows[1]["cache_bytes"]
    keys_and_values = 2 * 64 * 2  # bytes of a row of one head
    assert 0.95 < (whole - kept) / ((600 - 64) * keys_and_values) < 1
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_bad_sizes() -> None:
    with pytest.raises(SystemExit):
        quality_decode.parse(["--contexts", "100"])
