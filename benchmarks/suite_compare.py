"""Compares two files that benchmarks/suite.py wrote: which calls have become slower."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compare import Comparison, print_comparisons

Row = dict[str, Any]
Key = tuple[str, str, int]  # case, peer, threads


class Lines(NamedTuple):
    machine: Row
    rows: list[Row]


def read(path: Path) -> Lines:
    """Raises ValueError if suite.py did not write the file, OSError if it cannot be read."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON in lines: {error}") from error
    machine = lines[0] if lines else None
    if not isinstance(machine, dict) or machine.get("program") != "suite.py":
        raise ValueError(f"{path}: is not a file that suite.py wrote")
    return Lines(machine, lines[1:])


def timed(rows: Sequence[Row]) -> dict[Key, Row]:
    """The rows whose times were measured in rounds."""
    return {
        (row["case"], row["peer"], row["threads"]): row
        for row in rows
        if "ms" in row and "spread" in row
    }


def compare_rows(old: Row, new: Row, tolerance: float, measured: bool) -> Comparison:
    """The second ratio compares times as multiples of the time of the machine's product, if both
    runs measured it in the rounds of the call. A slower machine does not change it."""
    ratio = new["ms"] / old["ms"]
    speed = new["peak_gflops"] / old["peak_gflops"] if measured else 1.0
    ratios = (ratio, ratio * speed)
    allowed = tolerance + old["spread"] + new["spread"]
    return Comparison(f"{new['case']} {new['peer']}", old["ms"], new["ms"], ratios, allowed)


def origin(machine: Row) -> str:
    return ", ".join(str(machine.get(name)) for name in ("machine", "torch", "date", "commit"))


def report(old: Lines, new: Lines, tolerance: float) -> int:
    """Print a table. Returns the number of lines that are slower.

    Raises:
        ValueError: the files have no settings in common.
    """
    before, after = timed(old.rows), timed(new.rows)
    both = [key for key in after if key in before]
    if not both:
        raise ValueError("nothing is comparable: no line of both has the same settings and a time")
    print(f"old: {origin(old.machine)}\nnew: {origin(new.machine)}")
    measured = old.machine["peak"] == new.machine["peak"] == "measured"
    compared = [compare_rows(before[key], after[key], tolerance, measured) for key in both]
    slower = print_comparisons(compared, ("ms", "of peak"))
    alone = len(before) + len(after) - 2 * len(both)
    print(
        f"{len(both)} lines, {slower} slower by more than {tolerance:.0%} and both spreads; "
        f"{alone} lines of one file alone"
    )
    return slower
