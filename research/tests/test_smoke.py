"""Both trainings from their command line to a table of results, in two steps. `make test` runs
these tests of research/ alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import quality_results
import workloads
from quality_cases import call, train


@pytest.mark.usefixtures("few_measurements")
def test_a_language_model(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads = {"nope_heads": 1, "nope_layers": 1, "score_targets": "nope", "target_every": 1}
    log = train(corpus, tmp_path, "recent", steps=2, schedule_steps=2, **heads)
    assert [row["step"] for row in log["held_out"]] == [2]
    assert log["held_out"][0]["target_loss"] > 0 and log["final"]["by_window"]
    assert (tmp_path / "recent-tiny-0.safetensors").is_file()
    call(quality_results, tmp_path / "joined.json", tmp_path / "recent-tiny-0.json")
    capsys.readouterr()
    call(quality_results, tmp_path / "joined.json", "--against", "recent-tiny-0")
    assert capsys.readouterr().out.splitlines()[:3] == [
        "| run | steps | loss | against recent-tiny-0 | paired difference | its error |",
        "| --- | --- | --- | --- | --- | --- |",
        f"| recent-tiny-0 | 2 | {log['final']['bits']:.4f} | | | |",
    ]


def test_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(workloads, tmp_path, "--quick", "--steps=2", "--only=series", "--device=cpu")
    machine, *rows = map(json.loads, (tmp_path / "workloads.json").read_text().splitlines())
    assert machine["device"] == "cpu" and [row["form"] for row in rows] == ["dense", "selected"]
    table = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[-2:]]
    times = rows[1]["steps_per_second"] / rows[0]["steps_per_second"]
    assert f"{times:.2f} x" in table[1]
    for row, cells in zip(rows, table):
        assert f"{row['held_out']['loss']:.4f}" in cells
