"""Files and table of workloads.py.

The first line of a file has the machine, as in benchmarking.py; each other line is a run. A run has
its settings, `train`, at most 60 training losses as [step, loss], `train_loss`, the mean over the
last tenth of the steps, `held_out`, the loss and other measures on held-out data, and `baseline`,
the measures of predictions without a model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import benchmarks_path  # noqa: F401
from benchmarking import write_whole
from quality_results import rounded, table_of

SAME = ("machine", "device", "torch", "commit", "kernels")  # equal in all files that are joined
COLUMNS = (
    "workload",
    "form",
    "tokens a step",
    "steps",
    "steps/s",
    "against dense",
    "peak memory, GB",
    "training loss",
    "held-out loss",
    "unit",
    "other measures",
)
WORDS = ("workload", "form", "unit", "other measures")  # columns without numbers


def write_run(path: Path, machine: dict[str, Any], row: dict[str, Any]) -> None:
    write_whole(path, [machine, rounded(row)])


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    machine, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    if "machine" not in machine or not all("workload" in row for row in rows):
        raise ValueError(f"{path}: is not a file of workloads.py")
    return machine, rows


def join(paths: list[Path]) -> list[dict[str, Any]]:
    """The lines of a file with the runs of several, by workload and form.

    Raises ValueError for files of different machines, or with the same run twice.
    """
    first: dict[str, Any] = {}
    runs: dict[tuple[str, str, int], dict[str, Any]] = {}
    for path in paths:
        machine, rows = read(path)
        first = first or machine
        for name in SAME:
            found, want = machine.get(name), first.get(name)
            if found != want:
                raise ValueError(f"{path}: {name} is {found}, want {want}, as in {paths[0]}")
        for row in rows:
            key = (row["workload"], row["form"], row["settings"]["seed"])
            if key in runs:
                raise ValueError(f"{path}: has {'-'.join(map(str, key))}, which is there already")
            runs[key] = row
    return [first, *(runs[key] for key in sorted(runs))]


def cells_of(row: dict[str, Any], dense: dict[str, Any] | None) -> dict[str, str]:
    others = {name: value for name, value in row["held_out"].items() if name != "loss"}
    others.update(row["baseline"])
    rate, peak = row["steps_per_second"], row["peak_memory"]
    is_compared = dense is not None and row is not dense
    times = rate / dense["steps_per_second"] if is_compared else None
    return {
        "workload": row["workload"],
        "form": row["form"],
        "tokens a step": str(row["tokens"]),
        "steps": str(row["settings"]["steps"]),
        "steps/s": f"{rate:.3g}",
        "against dense": "" if times is None else f"{times:.2f} x",
        "peak memory, GB": "" if peak is None else f"{peak / 1e9:.2f}",
        "training loss": f"{row['train_loss']:.4f}",
        "held-out loss": f"{row['held_out']['loss']:.4f}",
        "unit": row["unit"],
        "other measures": ", ".join(f"{name} {value:.3f}" for name, value in others.items()),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, with a line for each run. Rates are compared with the rates of `dense`."""
    dense = {
        (row["workload"], row["settings"]["seed"]): row for row in rows if row["form"] == "dense"
    }
    lines = []
    for row in rows:
        cells = cells_of(row, dense.get((row["workload"], row["settings"]["seed"])))
        lines.append(tuple(cells[column] for column in COLUMNS))
    return "\n".join(table_of(COLUMNS, lines, WORDS))
