"""Tests what benchmarks/peers_cuda.py does without a device: its cases, the numbers of a row, and
its checks of outputs; and the programs that print and draw its rows. CPU tensors stand in for its
inputs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import evaluate
import flash_dmattn
import peers_common
import peers_cuda
import pytest
import torch
from programs import ROOT, output_of, python

CASE = peers_cuda.Case(
    "attention", 4, 2, 16, 90, 20, {"fdma": peers_cuda.Goal("of_dense", 0.7, 1.0)}
)


def make_inputs() -> Any:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, 90, heads, 16, generator=generator).bfloat16() for heads in (4, 2, 2)
    )
    score = torch.randint(0, 9, (1, 2, 90), generator=generator).float()  # with ties
    return SimpleNamespace(case=CASE, query=query, key=key, value=value, score=score)


def test_names_and_goals() -> None:
    cases = peers_cuda.all_cases(quick=False)
    names = [case.name() for case in cases]
    assert len(set(names)) == len(names)
    assert "attention/bf16/h32g8/d128/n1048576/w2048" in names and "select/g1/n32768/w1024" in names
    for case in cases:
        peers = [peer.name for peer in peers_cuda.peers_of(case)]
        assert peers[0] == "fdma" and len(set(peers)) == len(peers)
        assert set(case.goals) <= set(peers)
    quick = peers_cuda.all_cases(quick=True)
    assert 0 < len(quick) < len(cases)
    assert max(case.length for case in quick) == peers_cuda.QUICK_LENGTH


@pytest.mark.parametrize("window", [0, 20, 90, 200])
def test_flops(window: int) -> None:
    pairs = sum(min(position + 1, window or 90) for position in range(90))
    assert CASE.flops(window) == 4 * 16 * 4 * pairs


@pytest.mark.parametrize("window", [0, 1, 20, 90])
def test_best_keys(window: int) -> None:
    score = make_inputs().score[0, 0]
    rows = torch.tensor([0, 1, 19, 20, 55, 89])
    kept = peers_cuda.best_keys(score, rows, window)
    for row, keys in zip(rows.tolist(), kept):
        best = evaluate.best_keys(score.tolist(), list(range(row + 1)), window or 90)
        assert keys.nonzero().flatten().tolist() == sorted(best)


def attend(inputs: Any, window: int = 20) -> torch.Tensor:
    selection = flash_dmattn.select(inputs.score, window)
    return flash_dmattn.attention(
        inputs.query, inputs.key, inputs.value, selection=selection, causal=True
    )[0]


def test_right_outputs_pass() -> None:
    inputs = make_inputs()
    peers_cuda.check_output(inputs, attend(inputs), inputs.score, None, "the peer")
    dense, _ = flash_dmattn.attention(inputs.query, inputs.key, inputs.value, causal=True)
    peers_cuda.check_output(inputs, dense, None, None, "the peer")


@pytest.mark.parametrize("mistake", ["nan", "unwritten", "window", "dense", "order"])
def test_wrong_outputs_are_found(mistake: str) -> None:
    inputs = make_inputs()
    out = attend(inputs, 19 if mistake == "window" else 20)
    if mistake == "nan":
        out[0, 33, 1, 5] = torch.nan
    elif mistake == "unwritten":
        out[0, 89] = 0
    elif mistake == "dense":
        out, _ = flash_dmattn.attention(inputs.query, inputs.key, inputs.value, causal=True)
    score = -inputs.score if mistake == "order" else inputs.score
    with pytest.raises(peers_common.Disagreement, match="the peer"):
        peers_cuda.check_output(inputs, out, score, None, "the peer")


def make_rows() -> list[dict[str, Any]]:
    case = peers_cuda.all_cases(quick=False)[1]
    times = {"fdma": [2.0, 2.2, 2.1], "cudnn": [14.0, 14.0, 15.0], "flash": [26.0, 27.0, 25.0]}
    return [peers_cuda.make_row(case, peer, times, []) for peer in peers_cuda.peers_of(case)]


def test_rows() -> None:
    case = peers_cuda.all_cases(quick=False)[1]
    ours, cudnn, flash = make_rows()
    assert (ours["ms"], ours["ratio"], ours["of_iid"], ours["of_read"]) == (2.1, None, None, None)
    useful = case.flops(2048)
    assert ours["useful_gflops"] == pytest.approx(useful / 2.1e6)
    assert ours["of_dense"] == pytest.approx(useful / case.flops(0) * 7)
    assert ours["goal"] == ">= 0.7 of dense (aim 1)" and ours["met"] is True
    assert cudnn["of_dense"] == 1 and cudnn["ratio"] == pytest.approx(7) and cudnn["met"] is None
    assert flash["useful_gflops"] == pytest.approx(case.flops(0) / 26e6)


def test_time_relative_to_a_quarter_of_the_length() -> None:
    cases = [case for case in peers_cuda.all_cases(quick=False) if case.kind == "backward"]
    short, long = cases[:2]
    assert (short.length, long.length) == (32768, 131072)
    peer = peers_cuda.peers_of(long)[0]
    earlier = [(short, 5.0)]
    row = peers_cuda.make_row(long, peer, {"fdma": [21.0, 22.0, 23.0]}, earlier)
    assert row["of_shorter"] == pytest.approx(4.4) and row["met"] is True
    row = peers_cuda.make_row(long, peer, {"fdma": [23.0, 24.0, 25.0]}, earlier)
    assert row["met"] is False
    assert peers_cuda.of_shorter(cases[2], 1.0, earlier) is None


def test_table_and_picture(tmp_path: Path) -> None:
    machine = {"machine": "A GPU", "device": "cuda", "torch": "2", "date": "today", "commit": "abc"}
    machine["kernels"] = "0123"
    path = tmp_path / "figures.json"
    peers_common.write_whole(path, [machine, *make_rows()])
    assert len(path.read_text().splitlines()) == 4
    assert json.loads(path.read_text().splitlines()[1])["met"] is True

    table = output_of(python(ROOT / "benchmarks" / "table.py", path))
    assert "A GPU" in table and "src/cuda 0123" in table
    assert "| >= 0.7 of dense (aim 1) | yes |" in table

    picture = tmp_path / "figures.svg"
    output_of(python(ROOT / "benchmarks" / "peers_picture.py", path, "--out", picture))
    assert picture.read_text().rstrip().endswith("</svg>")
