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
        assert (row["of_sdpa"] is None) == (row["peer"] == "sdpa")
        assert row["goal"] is None and row["met"] is None  # they are for CUDA devices


@pytest.mark.parametrize(("ours", "met"), [(1.0, True), (1.3, False)])
def test_goals(
    ours: float,
    met: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As on a device: 1.0 is below the bar of two cases, 1.3 below none."""
    times = {"fdma": [2 * ours, ours, ours], "sdpa": [1.0, 1.0, 1.0]}
    monkeypatch.setattr(host_time, "alternate", lambda timers, rounds: times)
    inputs = host_time.Inputs("cpu", True)
    monkeypatch.setattr(host_time, "Inputs", lambda device, learns: inputs)
    monkeypatch.setattr(host_time, "make_cases", lambda device: dict.fromkeys(CASES[:4], {}))
    monkeypatch.setattr(host_time, "time_calls", lambda run, device: 0.0)
    rows = list(host_time.measure("cuda", host_time.QUICK))
    held = {row["case"]: (row["goal"], row["met"]) for row in rows if row["goal"]}
    assert held == {
        "no-gradients": ("<= 0.8 of sdpa", False),
        "recording": ("<= 1.2 of sdpa", met),
        "backward": ("<= 1.2 of sdpa", met),
    }
    assert [row["of_sdpa"] for row in rows] == 5 * [ours, None]
    host_time.print_row(rows[0])
    host_time.print_row(rows[1])
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(f"{ours:8.3f}  MISSED <= 0.8 of sdpa")
    assert second.endswith(f"{1 / ours:7.3f}")


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
