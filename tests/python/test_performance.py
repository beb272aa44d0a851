"""Benchmarks that time calls by their sizes, and benchmarks of the original's tables, on the
CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import benchmarking
import definition
import flash_dmattn
import performance
import pytest
import table
import torch
from benches import main, plant, read
from cases import with_sdpa
from definition_cases import Inputs, square

SMALL = square(1, 4, 2, 16, 24, 5)


@pytest.mark.parametrize("pairs", [1, 1 << 20])
@pytest.mark.parametrize("sizes", [{}, {"q_len": 1}, {"q_len": 7}, {"window": 24}, {"window": 99}])
def test_masks(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], pairs: int) -> None:
    """Equal scores are ordered by the definition."""
    monkeypatch.setattr(performance, "PAIRS_AT_ONCE", pairs)
    case = SMALL._replace(**sizes)
    score = torch.randint(4, (1, 2, 24), generator=torch.Generator().manual_seed(1)) / 4
    want = definition.kept_keys(case, score, None)
    assert torch.equal(performance.best_keys(score, case.window, case.q_len), want)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(performance, "QUICK", benchmarking.Rounds(2, 2, 0.0))


@with_sdpa
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_sizes(
    direction: str, q_len: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every combination of sizes is a case. It fails if outputs of peers differ."""
    sizes = f"--lengths 40 --windows 8 50 --q-len {q_len} --batch 2 --heads 6 3 --head-dim 16 24"
    assert main(f"{direction}_performance", f"--device cpu --quick {sizes} --out {tmp_path}") == 0
    machine, rows = table.read(tmp_path / f"{direction}-performance-cpu.json")
    assert machine["dtype"] == "float32"
    names = [f"b2/h6g3/d{d}/n{q_len}-40/w{w}" for w in (8, 50) for d in (16, 24)]
    assert [row["case"] for row in rows[::4]] == names and len(rows) == 16
    assert all(row["ms"] > 0 for row in rows) and rows[0]["times"] == 1
    _, *printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 16 and all(float(line.split()[-3]) > 0 for line in printed)


def test_equal_scores_are_no_disagreement() -> None:
    """The masks keep the same keys as the package, whatever their scores."""
    case = SMALL._replace(is_tied=True, kv_len=300, q_len=300, window=64)
    inputs = Inputs(case, "cpu", torch.float32)
    outs = [run() for run in performance.peers_of(inputs, training=False).values()]
    performance.require_equal(inputs, outs[0], outs[1])


@with_sdpa
def test_wrong_outputs_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unmasked(right: Any, *rows: torch.Tensor, **options: Any) -> torch.Tensor:
        return right(*rows[:3], **options)

    plant(monkeypatch, flash_dmattn, "flash_dmattn_func", unmasked)
    assert main("forward_performance", "--device cpu --quick --lengths 64 --window 16") == 1
    assert "b1/h8g2/d64/n64/w16: outputs differ by " in capsys.readouterr().err


@with_sdpa
def test_training_computes_gradients() -> None:
    inputs = Inputs(SMALL, "cpu", torch.float32)
    peers = performance.peers_of(inputs, training=True)
    assert len(peers) == 4
    for run in peers.values():
        out = run()
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()


# ---- the original's tables ----


def test_published_rows() -> None:
    """Speed-ups are the quotients of the times, if these are known."""
    forward, backward = performance.read_tables().values()
    assert len(forward) == 43 and len(backward) == 19
    for row in (*forward, *backward):
        low, high = ((row.sdpa_ms + x) / (row.fdma_ms - x) for x in (-0.005, 0.005))
        assert low - 0.05 <= row.times <= high + 0.05


def test_cases_of_the_tables_have_names_of_their_own() -> None:
    for direction in ("forward", "backward"):
        cases = performance.make_cases(direction, [128, 64], 1)
        assert len({case.name for case, _ in cases}) == len(cases)
        for case, row in cases:
            assert case[5:8] == row[:3] and (case.q_heads, case.kv_heads) == (2, 1)


@with_sdpa
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_original(direction: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every row, divided by 256. It fails if outputs of calls to the same keys differ."""
    sizes = "--original --divide 256 --head-dim 32"
    assert main(f"{direction}_performance", f"--device cpu --quick {sizes} --out {tmp_path}") == 0
    _, *lines = capsys.readouterr().out.splitlines()
    _, rows = table.read(tmp_path / f"{direction}-original-cpu.json")
    published = performance.read_tables()[direction]
    assert len(lines) == len(published) and len(rows) == 4 * len(published)
    for one, line, group in zip(published, lines, zip(*[iter(rows)] * 4)):
        assert [row["peer"] for row in group] == ["fused", "given", "sdpa-mask", "sdpa"]
        assert group[0]["times"] == 1 and all(row["ms"] > 0 for row in group)
        for row in group[:2]:
            assert row["goal"] == one.times
            assert row["met"] == (row["ratio"] >= one.times) != ("reason" in row)
            assert f"{row['peer']}: {'yes' if row['met'] else 'no'}" in line


@with_sdpa
def test_masks_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their columns are left out, with a note."""
    monkeypatch.setattr(performance, "free_memory", lambda device: 24 * 2 * 100 * 100)
    options = f"--device cpu --quick --original --divide 256 --head-dim 16 --out {tmp_path}"
    assert main("forward_performance", options) == 0
    _, rows = read(tmp_path / "forward-original-cpu.json")
    absent = {row["case"] for row in rows if "ms" not in row}
    assert absent == {row["case"] for row in rows if "/n128/" in row["case"]}
    for row in rows:
        if row["case"] in absent:
            assert ("ms" in row) == (row["peer"] in ("fused", "sdpa"))
            assert row["peer"] == "sdpa" or "does not fit into memory" in row["reason"]
    assert "unknown (SDPA with a mask of every pair does not fit" in capsys.readouterr().out


@with_sdpa
def test_gradients_of_the_original() -> None:
    """Our backward calls have a gradient for every input."""
    (case, _), *_ = performance.make_cases("backward", [16], 8)
    inputs = Inputs(case, "cpu", torch.float32)
    peers = performance.original_peers(inputs, training=True)
    assert {name: len(peer.leaves) for name, peer in peers.items()} == {
        performance.FUSED: 5,
        performance.GIVEN: 4,
        performance.MASKED: 3,
        performance.DENSE: 3,
    }
    grads = {name: run() for name, run in performance.check_peers(inputs, peers).items()}
    for found, want in zip(grads[performance.GIVEN], grads[performance.MASKED]):
        torch.testing.assert_close(found, want)
