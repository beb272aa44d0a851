"""benchmarks/options.py: its rows, and wrong outputs that it finds, with small sizes on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flash_dmattn
import options
import pytest
import torch
from cases import with_sdpa

SMALL = ["--device", "cpu", "--quick", "--divide", "64"]


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


@with_sdpa
def test_every_case_has_its_peers(tmp_path: Path) -> None:
    assert options.main([*SMALL, "--out", str(tmp_path)]) == 0
    _, *rows = map(json.loads, (tmp_path / "options-cpu.json").read_text().splitlines())
    peers: dict[str, list[str]] = {}
    for row in rows:
        peers.setdefault(row["case"], []).append(row["peer"])
        assert row["ms"] > 0 and row["times"] > 0
    assert peers["mask/float32/h2g1/d64/n128/w16"] == ["fdma", "without", "sdpa"]
    assert peers["dropout-training/float32/h2g1/d64/n128/w16"] == ["fdma", "without"]
    assert len(peers) == len(options.CASES["cpu"])


def test_a_mask_without_effect_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attention = flash_dmattn.attention

    def unmasked(*rows: torch.Tensor, attn_mask: Any = None, **rest: Any) -> Any:
        return attention(*rows, **rest)

    monkeypatch.setattr(flash_dmattn, "attention", unmasked)
    assert options.main([*SMALL, "--out", str(tmp_path)]) == 1
    assert "mask: fdma and without differ" in capsys.readouterr().err
