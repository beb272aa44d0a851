"""Benchmarks that time calls by their sizes, and benchmarks of the original's tables, on the
CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import backward_performance
import definition
import definition_times
import flash_dmattn
import forward_performance
import original_tables
import original_times
import pytest
import table
import torch
from cases import with_sdpa
from definition_cases import Inputs, square
from programs import assert_refused, help_of

PERFORMANCE = (forward_performance, backward_performance)
SMALL = square(1, 4, 2, 16, 24, 5)


@pytest.mark.parametrize("pairs", [1, 1 << 20])
@pytest.mark.parametrize("sizes", [{}, {"q_len": 1}, {"q_len": 7}, {"window": 24}, {"window": 99}])
def test_masks(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], pairs: int) -> None:
    """Equal scores are ordered by the definition."""
    monkeypatch.setattr(definition_times, "PAIRS_AT_ONCE", pairs)
    case = SMALL._replace(**sizes)
    score = torch.randint(4, (1, 2, 24), generator=torch.Generator().manual_seed(1)) / 4
    want = definition.kept_keys(case, score, None)
    assert torch.equal(definition_times.best_keys(score, case.window, case.q_len), want)


@with_sdpa
@pytest.mark.parametrize("program", PERFORMANCE, ids=lambda x: x.__name__)
def test_performance(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--device cpu --quick --lengths 40 64 --window 16".split()
    assert program.main(options) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 * 4
    assert all(float(row.split()[-3]) > 0 for row in rows)
    assert float(rows[0].split()[-1]) == 1


@with_sdpa
@pytest.mark.parametrize("q_len", [1, 3])
def test_sizes(q_len: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every combination of sizes is a case. It fails if outputs of peers differ."""
    sizes = f"--lengths 40 --windows 8 50 --q-len {q_len} --batch 2 --heads 6 3 --head-dim 16 24"
    options = f"--device cpu --quick {sizes} --out {tmp_path}".split()
    assert forward_performance.main(options) == 0
    machine, rows = table.read(tmp_path / "forward-performance-cpu.json")
    assert machine["dtype"] == "float32"
    names = [f"b2/h6g3/d{d}/n{q_len}-40/w{w}" for w in (8, 50) for d in (16, 24)]
    assert [row["case"] for row in rows[::4]] == names and len(rows) == 16
    assert all(row["ms"] > 0 for row in rows)


def test_equal_scores_are_no_disagreement() -> None:
    """The masks keep the same keys as the package, whatever their scores."""
    case = SMALL._replace(is_tied=True, kv_len=300, q_len=300, window=64)
    inputs = Inputs(case, "cpu", torch.float32)
    outs = [run() for run in definition_times.peers_of(inputs, training=False).values()]
    definition_times.require_equal(inputs, outs[0], outs[1])


@with_sdpa
def test_wrong_outputs_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    function = flash_dmattn.flash_dmattn_func

    def unmasked(*rows: torch.Tensor, **options: Any) -> torch.Tensor:
        return function(*rows[:3], **options)

    monkeypatch.setattr(flash_dmattn, "flash_dmattn_func", unmasked)
    options = "--device cpu --quick --lengths 64 --window 16".split()
    assert forward_performance.main(options) == 1
    assert "b1/h8g2/d64/n64/w16: outputs differ by " in capsys.readouterr().err


@with_sdpa
def test_training_computes_gradients() -> None:
    inputs = Inputs(SMALL, "cpu", torch.float32)
    peers = definition_times.peers_of(inputs, training=True)
    assert len(peers) == 4
    for run in peers.values():
        out = run()
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()


@pytest.mark.parametrize("program", PERFORMANCE, ids=lambda x: x.__name__)
def test_usage(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--device" in help_of(program.main, capsys)
    assert_refused(program.main, "--device tpu", "--device", capsys)


# ---- the original's tables ----


def test_published_rows() -> None:
    """Speed-ups are the quotients of the times, if these are known."""
    assert len(original_tables.FORWARD) == 43 and len(original_tables.BACKWARD) == 19
    for row in (*original_tables.FORWARD, *original_tables.BACKWARD):
        low, high = ((row.sdpa_ms + x) / (row.fdma_ms - x) for x in (-0.005, 0.005))
        assert low - 0.05 <= row.times <= high + 0.05


def test_cases_of_the_tables_have_names_of_their_own() -> None:
    for training in (False, True):
        cases = original_times.make_cases(training, [128, 64], 1)
        assert len({case.name for case, _ in cases}) == len(cases)
        for case, row in cases:
            assert case[5:8] == row[:3] and (case.q_heads, case.kv_heads) == (2, 1)


@with_sdpa
@pytest.mark.parametrize("program", PERFORMANCE, ids=lambda x: x.__name__)
def test_original(program: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every row, divided by 256. It fails if outputs of calls to the same keys differ."""
    sizes = "--original --divide 256 --head-dim 32"
    assert program.main(f"--device cpu --quick {sizes} --out {tmp_path}".split()) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    kind = "forward" if program is forward_performance else "backward"
    _, rows = table.read(tmp_path / f"{kind}-original-cpu.json")
    published = getattr(original_tables, kind.upper())
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
    monkeypatch.setattr(original_times, "free_memory", lambda device: 24 * 2 * 100 * 100)
    options = f"--device cpu --quick --original --divide 256 --head-dim 16 --out {tmp_path}"
    assert forward_performance.main(options.split()) == 0
    rows = [json.loads(x) for x in (tmp_path / "forward-original-cpu.json").open()][1:]
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
    (case, _), *_ = original_times.make_cases(True, [16], 8)
    inputs = Inputs(case, "cpu", torch.float32)
    peers = original_times.peers_of(inputs, training=True)
    assert {name: len(peer.leaves) for name, peer in peers.items()} == {
        original_times.FUSED: 5,
        original_times.GIVEN: 4,
        original_times.MASKED: 3,
        original_times.DENSE: 3,
    }
    grads = {name: run() for name, run in original_times.check_peers(inputs, peers).items()}
    for found, want in zip(grads[original_times.GIVEN], grads[original_times.MASKED]):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--original --lengths 40", "--lengths: is given, want none with --original"),
        ("--original --q-len 1", "--q-len: is given, want none with --original"),
        ("--divide 2", "--divide: is given, want none without --original"),
        ("--heads 3 2", "--heads: is 3, want a multiple of 2"),
        ("--head-dim 12", "--head-dim: is 12, want a multiple of 8"),
        ("--lengths 40 20 --q-len 21", "--q-len: is 21, want at most --lengths, 20"),
    ],
)
def test_sizes_that_contradict(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(forward_performance.main, f"--device cpu {options}", message, capsys)
