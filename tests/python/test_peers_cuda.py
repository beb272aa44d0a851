"""benchmarks/peers_cuda.py without a device: its cases, the numbers of a row, its checks of
outputs, and the programs that print and draw its rows. CPU tensors stand in for its inputs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import benchmarking
import evaluate
import flash_dmattn
import peers_cuda
import peers_cuda_cases
import peers_flash4
import peers_picture
import pytest
import torch
from programs import ROOT, output_of, python

BATCH = 2
CASE = peers_cuda_cases.make_case("attention", 4, 2, 16, 90, 20, batch=BATCH, of_dense=(0.7, 1.0))


def make_inputs() -> Any:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(BATCH, 90, heads, 16, generator=generator).bfloat16() for heads in (4, 2, 2)
    )
    score = torch.randint(0, 9, (BATCH, 2, 90), generator=generator).float()  # with ties
    return SimpleNamespace(case=CASE, query=query, key=key, value=value, score=score)


@pytest.mark.parametrize("installed", [False, True])
def test_names_and_goals(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_flash4, "is_installed", lambda: installed)
    cases = peers_cuda_cases.all_cases(quick=False)
    names = [case.name() for case in cases]
    assert len(set(names)) == len(names)
    assert "attention/bf16/h32g8/d128/n1048576/w2048" in names and "select/g1/n32768/w1024" in names
    assert "backward/bf16/b16/h8g4/d64/n1024/w256" in names
    for case in cases:
        peers = [peer.name for peer in peers_cuda.peers_of(case)]
        assert peers[0] == "fdma" and len(set(peers)) == len(peers)
        assert set(case.goals) <= set(peers)
        compared = ("attention", "dense", "backward", "dense-backward")
        is_dense = case.kind in compared and case.length <= 131072
        assert ("flash4" in peers) == (installed and is_dense)
        needed = {goal.figure for goal in case.goals.values()} & {"of_dense", "times_cudnn"}
        assert "cudnn" in peers or not needed
    quick = peers_cuda_cases.all_cases(quick=True)
    assert 0 < len(quick) < len(cases)
    assert max(case.length for case in quick) == peers_cuda_cases.QUICK_LENGTH


# Name of a case, and the goal of fdma or of the named peer.
GOALS = """
dense-backward/bf16/h32g8/d128/n32768: >= 1 of dense (aim 1.1)
dense-backward/bf16/h32g8/d128/n8192: >= 0.95 of dense (aim 1.1)
backward/bf16/h32g8/d128/n32768/w2048: >= 0.8 of dense (aim 1)
backward/bf16/h32g8/d128/n131072/w2048: >= 0.8 of dense (aim 1)
backward/bf16/h16g16/d128/n16384/w1024: >= 0.52 of dense (aim 0.8)
attention/bf16/h32g8/d128/n131072/w2048: >= 0.95 of dense (aim 1.1)
attention/bf16/h2g1/d64/n32768/w1024: <= 0.095 ms (aim 0.07)
backward/bf16/h2g1/d64/n32768/w1024: <= 0.24 ms (aim 0.18)
attention/bf16/b16/h16g4/d128/n1024/w256: >= 1.25 times cudnn (aim 1.6)
backward/bf16/b32/h8g4/d64/n512/w128: >= 0.75 times cudnn (aim 1.2)
attention/bf16/h32g8/d128/n8192/w8192: >= 0.98 times cudnn (aim 1.1)
backward/bf16/b8/h8g4/d64/n2048/w2048: >= 0.9 times cudnn (aim 1.1)
one-query/bf16/h2g1/d64/n524288/w1024: <= 0.095 ms (aim 0.06)
selected-backward/bf16/h32g8/d128/n32768/w2048 fdma-deterministic: <= 1.15 of fast (aim 1.05)
"""


@pytest.mark.parametrize("line", GOALS.strip().splitlines())
def test_goals(line: str) -> None:
    name, words = line.split(": ")
    name, _, peer = name.partition(" ")
    (case,) = (c for c in peers_cuda_cases.all_cases(quick=False) if c.name() == name)
    assert case.goals[peer or "fdma"].words() == words


def test_goal_without_an_aim() -> None:
    goal = peers_cuda_cases.Goal("times_cudnn", 1.25)
    assert goal.words() == ">= 1.25 times cudnn"
    assert goal.met(1.25) and not goal.met(1.2)


def test_documents_show_cases_that_are_measured() -> None:
    """benchmarks/tables.txt names them."""
    names = [case.name() for case in peers_cuda_cases.all_cases(quick=False)]
    file, shown = "", []
    for line in (ROOT / "benchmarks" / "tables.txt").read_text().splitlines():
        if line.startswith("table "):
            file = line.split()[2]
        elif line.startswith("row: ") and file == "peers-cuda.json":
            shown.append(line.split()[1])
    assert shown and set(shown) <= set(names)


@pytest.mark.parametrize("window", [0, 20, 90, 200])
def test_flops(window: int) -> None:
    pairs = sum(min(position + 1, window or 90) for position in range(90))
    assert CASE.flops(window) == 4 * 16 * 4 * BATCH * pairs


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


@pytest.mark.parametrize("mistake", ["nan", "unwritten", "entry", "window", "dense", "order"])
def test_wrong_outputs_are_found(mistake: str) -> None:
    inputs = make_inputs()
    out = attend(inputs, 19 if mistake == "window" else 20)
    if mistake == "nan":
        out[0, 33, 1, 5] = torch.nan
    elif mistake == "unwritten":
        out[0, 89] = 0
    elif mistake == "entry":
        out[1] = out[0]
    elif mistake == "dense":
        out, _ = flash_dmattn.attention(inputs.query, inputs.key, inputs.value, causal=True)
    score = -inputs.score if mistake == "order" else inputs.score
    with pytest.raises(benchmarking.Disagreement, match="the peer"):
        peers_cuda.check_output(inputs, out, score, None, "the peer")


TIMES = {
    "fdma": [2.0, 2.2, 2.1],
    "cudnn": [14.0, 14.0, 15.0],
    "flash": [26.0, 27.0, 25.0],
    "flash4": [10.5, 10.5, 11.0],
}


def make_rows(case: Any = CASE) -> list[dict[str, Any]]:
    peers = [peers_cuda.FUSED, peers_cuda.CUDNN, peers_cuda.FLASH, peers_cuda.FLASH4]
    return [peers_cuda.make_row(case, peer, TIMES, []) for peer in peers]


def test_rows() -> None:
    case = CASE._replace(goals={"fdma": peers_cuda_cases.Goal("of_dense", 0.7, 1.0)}, window=45)
    ours, cudnn, flash, flash4 = make_rows(case)
    assert (ours["ms"], ours["ratio"], ours["of_iid"], ours["of_read"]) == (2.1, None, None, None)
    useful = case.flops(45)
    assert ours["useful_gflops"] == pytest.approx(useful / 2.1e6)
    assert ours["of_dense"] == pytest.approx(useful / case.flops(0) * 7)
    assert ours["of_flash4"] == pytest.approx(useful / case.flops(0) * 11 / 2.1)
    assert ours["times_cudnn"] == pytest.approx(7)
    assert ours["goal"] == ">= 0.7 of dense (aim 1)" and ours["met"] is True
    assert cudnn["of_dense"] == 1 and cudnn["ratio"] == pytest.approx(7) and cudnn["met"] is None
    assert cudnn["times_cudnn"] is None
    assert flash["useful_gflops"] == pytest.approx(case.flops(0) / 26e6)
    assert flash4["of_flash4"] == 1 and flash4["of_dense"] == pytest.approx(4 / 3)


def test_a_row_without_flash4() -> None:
    times = {name: TIMES[name] for name in ("fdma", "cudnn", "flash")}
    case = CASE._replace(goals={"fdma": peers_cuda_cases.Goal("times_cudnn", 7.5, 8.0)})
    row = peers_cuda.make_row(case, peers_cuda.FUSED, times, [])
    assert row["of_flash4"] is None
    assert row["goal"] == ">= 7.5 times cudnn (aim 8)" and row["met"] is False


def test_printed_row(capsys: pytest.CaptureFixture[str]) -> None:
    peers_cuda.print_head()
    peers_cuda.print_row(make_rows()[0])
    head, line = capsys.readouterr().out.splitlines()
    ends = {field: head.index(field) + len(field) for field in ("of dense", "of flash4")}
    ends["times cudnn"] = head.index("times cudnn") + len("times cudnn")
    row = make_rows()[0]
    assert line[: ends["of dense"]].endswith(f" {row['of_dense']:.3f}")
    assert line[: ends["of flash4"]].endswith(f" {row['of_flash4']:.3f}")
    assert line[: ends["times cudnn"]].endswith(" 7.000")
    assert line.endswith(f"{'met   ' if row['met'] else 'MISSED'} >= 0.7 of dense (aim 1)")


def test_time_relative_to_a_quarter_of_the_length() -> None:
    cases = {case.name(): case for case in peers_cuda_cases.all_cases(quick=False)}
    short, long = (cases[f"backward/bf16/h32g8/d128/n{n}/w2048"] for n in (32768, 131072))
    peer = peers_cuda.peers_of(long)[0]
    earlier = [(short, 5.0)]
    long = long._replace(goals={"fdma": peers_cuda_cases.Goal("of_shorter", 4.4, 4.1)})
    row = peers_cuda.make_row(long, peer, {"fdma": [21.0, 22.0, 23.0]}, earlier)
    assert row["of_shorter"] == pytest.approx(4.4) and row["met"] is True
    row = peers_cuda.make_row(long, peer, {"fdma": [23.0, 24.0, 25.0]}, earlier)
    assert row["met"] is False
    assert peers_cuda.of_shorter(short._replace(length=65536), 1.0, earlier) is None
    assert peers_cuda.of_shorter(long._replace(batch=2), 1.0, earlier) is None


def test_table_and_picture(tmp_path: Path) -> None:
    machine = {"machine": "A GPU", "device": "cuda", "torch": "2", "date": "today", "commit": "abc"}
    machine["kernels"] = "0123"
    path = tmp_path / "figures.json"
    case = CASE._replace(q_heads=32, kv_heads=8, head_dim=128, length=32768, window=2048, batch=1)
    short = CASE._replace(goals={"fdma": peers_cuda_cases.Goal("times_cudnn", 6.0, 8.0)})
    benchmarking.write_whole(path, [machine, *make_rows(case), *make_rows(short)])
    assert len(path.read_text().splitlines()) == 9
    assert json.loads(path.read_text().splitlines()[1])["met"] is True

    table = output_of(python(ROOT / "benchmarks" / "table.py", path))
    assert "A GPU" in table and "src/cuda 0123" in table
    assert "of flash4 |" in table and "times cuDNN |" in table
    assert "| >= 0.7 of dense (aim 1) | yes |" in table
    assert "| >= 6 times cudnn (aim 8) | yes |" in table

    picture = tmp_path / "figures.svg"
    output_of(python(ROOT / "benchmarks" / "peers_picture.py", path, "--out", picture))
    cases = (tmp_path / "figures-cases.svg").read_text()
    assert cases.rstrip().endswith("</svg>")
    # the minimum that each case of flash_dmattn must reach
    assert cases.count("stroke: #d55e00") == 2
    drawn = picture.read_text()
    assert drawn.rstrip().endswith("</svg>") and "stroke: #0072b2" in drawn


def test_words_of_cases() -> None:
    """Every case with a bar has its own words."""
    results = (ROOT / "benchmarks" / "results" / "peers-cuda.json").read_text().splitlines()[1:]
    rows = [row for row in map(json.loads, results) if row["of_dense"] is not None]
    words = [peers_picture.words_of(row) for row in rows if row["peer"].startswith("fdma")]
    assert len(set(words)) == len(words) > 50
    assert "forward: 16 heads on 4, head_dim 128, 32 x 512 keys, window 128" in words
    assert words[-1] == (
        "forward and gradients: 32 heads on 8, head_dim 128, 32,768 keys, window 2,048"
    )
