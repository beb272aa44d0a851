"""benchmarks/doge.py: its rows, and wrong outputs that it finds, with small sizes on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import doge  # noqa: E402
import flash_dmattn.transformers as ours  # noqa: E402

SMALL = ["--device", "cpu", "--quick", "--divide", "64"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 1000}
    monkeypatch.setattr(doge, "SHAPE", {**doge.SHAPE, **sizes})


def test_every_case_has_its_peers(tmp_path: Path) -> None:
    assert doge.main([*SMALL, "--out", str(tmp_path)]) == 0
    _, *rows = map(json.loads, (tmp_path / "doge-cpu.json").read_text().splitlines())
    names = ("forward/float32/2/n64/w4", "generate/float32/2/n64/w4")
    peers = (("fdma", "sdpa", "linear"), ("fdma", "sdpa"))
    assert [(row["case"], row["peer"]) for row in rows] == [
        (name, peer) for name, of_case in zip(names, peers) for peer in of_case
    ]
    assert all(row["ms"] > 0 and row["times"] > 0 for row in rows)


def test_training_runs() -> None:
    ours.register()
    case = doge.Case("training", 1, 32, 4)
    rows = list(doge.measure(case, "cpu", doge.QUICK))
    assert [row["peer"] for row in rows] == ["fdma", "sdpa"]


def test_wrong_outputs_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attend = ours.fused.flash_dma_attention

    def other_window(query: Any, *rest: Any, **options: Any) -> torch.Tensor:
        *tensors, window = rest
        return attend(query, *tensors, window // 2, **options)

    monkeypatch.setattr(ours.fused, "flash_dma_attention", other_window)
    assert doge.main([*SMALL, "--out", str(tmp_path)]) == 1
    assert "forward: fdma and sdpa differ" in capsys.readouterr().err
