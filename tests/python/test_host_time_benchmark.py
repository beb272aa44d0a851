"""benchmarks/host_time.py: its rows, and wrong outputs that it finds, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flash_dmattn
import host_time
import pytest
import torch
from cases import with_sdpa

QUICK = ["--device", "cpu", "--quick"]
CASES = ("no-gradients", "recording", "dense", "decode", "backward")


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


@with_sdpa
def test_every_case_has_its_peers(tmp_path: Path) -> None:
    assert host_time.main([*QUICK, "--out", str(tmp_path)]) == 0
    machine, *rows = map(json.loads, (tmp_path / "host_time-cpu.json").read_text().splitlines())
    assert machine["device"] == "cpu"
    found = [(row["case"], row["peer"]) for row in rows]
    assert found == [(case, peer) for case in CASES for peer in ("fdma", "sdpa")]
    for row in rows:
        assert 1 < row["us"] < 1e5 and row["times"] > 0
        assert row["peer"] == "sdpa" or row["times"] == 1


@with_sdpa
def test_wrong_outputs_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attention = flash_dmattn.attention

    def wrong(*rows: torch.Tensor, causal: bool) -> Any:
        return attention(*rows, causal=not causal)

    monkeypatch.setattr(flash_dmattn, "attention", wrong)
    assert host_time.main([*QUICK, "--out", str(tmp_path)]) == 1
    assert "dense: fdma and sdpa differ" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
