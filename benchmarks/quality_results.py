#!/usr/bin/env python3
"""Join runs of benchmarks/quality.py into one small file.

    benchmarks/quality_results.py OUT.json RUN.json... [--kernels HASH]

The first line of OUT.json says the machine, the time at which the last of the files was written,
the commit (FDMA_COMMIT, or else that of the tree) and, of runs on a GPU, the hash of its kernels
(kernels_hash.py). Each other line is a run that has ended: its settings, held-out losses and recall
during training, at most 60 training losses, and what was measured at its end, without the text and
the positions of kept keys. A run has the name of its file. quality_picture.py draws such a file.
Exit status: 0 done; 1 a run has no evaluation, or was on another machine; 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from kernels_hash import kernels_hash
from peers_common import commit, write_whole

LOSSES = 60  # of training, of each run
SETTINGS = (
    *("form", "size", "keys", "recent", "sinks", "bias_form", "initial_a", "score_rate", "rate"),
    *("warm_up", "steps", "batch", "length", "recall", "recall_weight", "curriculum", "seed"),
    *("compile", "start"),
)
MEASURES = ("parameters", "warm_up_seconds", "bytes_per_second", "peak_memory", "columns")
DIGITS = 5


def rounded(value: Any) -> Any:
    """The value with DIGITS significant digits in every float."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, list):
        return [rounded(one) for one in value]
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return value


def thinned(rows: list[Any], most: int = LOSSES) -> list[Any]:
    """At most `most` rows, evenly spread, the first and the last one among them."""
    if len(rows) <= most:
        return rows
    return [rows[number * (len(rows) - 1) // (most - 1)] for number in range(most)]


def row_of(name: str, run: dict[str, Any]) -> dict[str, Any]:
    settings = {key: run["settings"][key] for key in SETTINGS}
    settings["corpus"] = Path(run["settings"]["corpus"]).name
    held_out = [
        {key: value for key, value in row.items() if key != "by_position"}
        for row in run["held_out"]
    ]
    final = {**run["final"], "kept": {"values": run["final"]["kept"]["values"]}}
    measures = {key: run[key] for key in MEASURES if key in run}
    losses = thinned(run["train"])
    row = {"settings": settings, **measures, "train": losses, "held_out": held_out, "final": final}
    return {"run": name, **rounded(row)}


def machine_of(run: dict[str, Any]) -> dict[str, str]:
    """What the first line says of a run's machine, in the words of other results."""
    found, device = run["machine"], run["settings"]["device"]
    return {"machine": found["device"], "device": device, "torch": found["torch"]}


def join(paths: list[Path], kernels: str) -> list[dict[str, Any]]:
    """The lines of the joined file."""
    machine, rows = None, []
    for path in paths:
        run = json.loads(path.read_text())
        if "final" not in run:
            raise ValueError(f"{path}: has no evaluation, want one of a run that has ended")
        own = machine_of(run)
        machine = machine or own
        if own != machine:
            raise ValueError(f"{path}: machine is {own}, want {machine}")
        rows.append(row_of(path.stem, run))
    last = time.gmtime(max(path.stat().st_mtime for path in paths))
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", last)
    first = {**machine, "date": date, "commit": commit()}
    return [{**first, "kernels": kernels} if first["device"] == "cuda" else first, *rows]


def main() -> None:
    head, _, _ = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=head, allow_abbrev=False)
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("runs", type=Path, nargs="+", help="files that quality.py wrote")
    parser.add_argument("--kernels", default=kernels_hash(), metavar="HASH", help="(this tree's)")
    options = parser.parse_args()
    for path in options.runs:
        if not path.is_file():
            parser.error(f"{path} is not a file")
    try:
        lines = join(options.runs, options.kernels)
    except ValueError as error:
        sys.exit(f"quality_results.py: {error}")
    write_whole(options.out, lines)


if __name__ == "__main__":
    main()
