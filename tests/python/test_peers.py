"""The benchmark `peers` on the CPU with tiny lengths: its rows, picture and table, and mistakes
that it finds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import flash_dmattn
import peers
import pytest
import table
import torch
from benches import Row, main, plant, read

LENGTHS, WINDOW = [64, 128], 48
TINY = f"--device cpu --lengths 64,128 --window {WINDOW} --rounds 1"
ONE_LENGTH = "--lengths 64 --threads 1 --rounds 1"
FIELDS = {"case", "peer", "threads", "ms", "spread", "useful_gflops", "ratio"}


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Restore PyTorch's number of threads, which peers sets."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def useful_flops(length: int, window: int) -> int:
    return 4 * peers.HEAD_DIM * sum(min(position + 1, window) for position in range(length))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one tiny run: figures.json, picture.svg."""
    folder = tmp_path_factory.mktemp("peers")
    files = f"--json {folder}/figures.json --picture {folder}/picture.svg"
    assert main("peers", f"{TINY} --threads 1 {files}") == 0
    return folder


@pytest.fixture(scope="module")
def lines(folder: Path) -> list[Row]:
    machine, rows = read(folder / "figures.json")
    return [machine, *rows]


def test_every_case_has_every_peer(lines: list[Row]) -> None:
    peers_of = {
        "forward/dense": ["fdma", "sdpa"],
        "forward/selected": ["fdma", "sdpa", "sdpa-masked", "mask"],
        "training/selected": ["fdma", "sdpa-masked"],
    }
    wanted = [
        (f"{form}/{dtype}/d128/n{length}" + (f"/w{WINDOW}" if "selected" in form else ""), peer)
        for form, names in peers_of.items()
        for dtype in ("f32", "bf16")
        for length in LENGTHS
        for peer in names
    ]
    assert [(row["case"], row["peer"]) for row in lines[1:]] == wanted


def test_figures(lines: list[Row]) -> None:
    """With one round, medians are the times themselves and the spread is 0."""
    for row in lines[1:]:
        assert row.keys() == FIELDS
        assert row["threads"] == 1 and row["ms"] > 0 and row["spread"] == 0
        ours = next(other for other in lines[1:] if other["case"] == row["case"])
        if row["peer"] == "fdma":
            assert row["ratio"] is None
        else:
            assert row["ratio"] == pytest.approx(row["ms"] / ours["ms"])
        length = int(re.search(r"/n(\d+)", row["case"])[1])
        kept = "selected" in row["case"] and row["peer"] != "sdpa"
        flops = useful_flops(length, WINDOW if kept else length)
        flops *= 3.5 if row["case"].startswith("training") else 1
        if row["peer"] == "mask":
            assert row["useful_gflops"] is None
        else:
            assert row["useful_gflops"] == pytest.approx(flops / row["ms"] / 1e6)


def test_picture(folder: Path) -> None:
    picture = (folder / "picture.svg").read_text()
    assert picture.rstrip().endswith("</svg>")
    colours = re.findall(r"stroke: (#[0-9a-f]{6}); stroke-width: 1.5", picture)
    assert len(set(colours)) == 4  # four lines


def test_table(folder: Path, lines: list[Row]) -> None:
    head, _, *rows = table.table(folder / "figures.json").splitlines()
    assert lines[0]["machine"] in head and f"PyTorch {torch.__version__}" in head
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]
    assert len(cells) == 2 + len(lines[1:])
    for row, (case, peer, threads, ms, *_, ratio) in zip(lines[1:], cells[2:]):
        assert (case, peer, threads, ms) == (row["case"], row["peer"], "1", f"{row['ms']:.3f}")
        assert ratio == ("" if row["ratio"] is None else f"{row['ratio']:.2f}")


@pytest.mark.parametrize("pattern", ["dense/bf16", "forward/dense/bf16/*"])
def test_filter(pattern: str) -> None:
    parser = commands.make_parser("peers")
    args = commands.parse(parser, "peers", [*TINY.split(), pattern])
    assert [case.name() for case in peers.check_arguments(args)] == [
        f"forward/dense/bf16/d128/n{length}" for length in LENGTHS
    ]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("mistake", ["nan", "stale", "keys lost"])
def test_a_wrong_output_is_found(
    mistake: str,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """A mistake is found even in a query that is not sampled, and no figures are written."""
    fewer = flash_dmattn.select(torch.arange(64.0)[None, None], 33)

    def wrong(right: Any, *tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        out, lse = right(*tensors, **options)
        if mistake == "nan":
            out[0, 33, 0, 5] = torch.nan
        elif mistake == "stale":
            out[0, 33] = 0
        else:
            out, lse = right(*tensors, **{**options, "selection": fewer})
        return out, lse

    plant(monkeypatch, flash_dmattn, "attention", wrong)
    file = tmp_path / "figures.json"
    assert main("peers", f"{ONE_LENGTH} --json {file} forward/dense/{dtype}/") == 1
    printed = capsys.readouterr().err
    assert "differ by" in printed and printed.count("\n") == 1
    assert not file.exists()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_wrong_selection_is_found(
    dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mask is made from the wrong selection, so that fdma and SDPA agree with each other."""
    plant(monkeypatch, flash_dmattn, "select", lambda right, score, window: right(-score, window))
    assert main("peers", f"{ONE_LENGTH} --window 32 forward/selected/{dtype}/") == 1
    assert "of fdma and of float64 differ by" in capsys.readouterr().err
