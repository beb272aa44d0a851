#!/usr/bin/env python3
"""The command `compare`: two builds of the `fdma` command, timed in alternation."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    import bench

    bench.start("compare")

import program


def run_bench(command: str, pattern: str, options: Sequence[str]) -> dict[str, float]:
    """Milliseconds of every case that `command` times for `pattern`, with any kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        subprocess.run(
            [command, "bench", pattern, *options, "--json", str(path)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if "case" in row]
    several = Counter(row["case"] for row in rows)  # --all times a case with several kernels
    return {
        f"{row['case']} {row['kernel']}" if several[row["case"]] > 1 else row["case"]: row["ms"]
        for row in rows
    }


Pairs = dict[str, list[tuple[float, float]]]


class Rounds(NamedTuple):
    times: Pairs  # (old, new) of each round, by case
    unmatched: set[str]  # cases of one command only
    is_whole: bool  # False: Ctrl-C ended them


def compare(
    commands: tuple[str, str],
    pattern: str,
    rounds: int,
    options: Sequence[str],
    rename: Sequence[str],
) -> Rounds:
    """Rounds of the old and the new command. `rename` has a piece of the old command's case names
    and its replacement in the new one's."""
    old, new = commands
    times: Pairs = {}
    unmatched: set[str] = set()
    for index in range(rounds):
        program.doing(f"round {index + 1} of {rounds}")
        order = (old, new) if index % 2 == 0 else (new, old)
        patterns = {old: pattern.replace(rename[1], rename[0]), new: pattern}
        try:
            figures = {one: run_bench(one, patterns[one], options) for one in order}
        except KeyboardInterrupt:
            if not times:
                raise
            return Rounds(times, unmatched, False)
        figures[old] = {case.replace(rename[0], rename[1]): ms for case, ms in figures[old].items()}
        unmatched |= figures[old].keys() ^ figures[new].keys()
        for case in figures[old].keys() & figures[new].keys():
            times.setdefault(case, []).append((figures[old][case], figures[new][case]))
    return Rounds(times, unmatched, True)


def ratios(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """New over old: the ratio of the least times, and the median of the rounds' ratios."""
    least = min(new for _, new in pairs) / min(old for old, _ in pairs)
    return least, statistics.median(new / old for old, new in pairs)


class Comparison(NamedTuple):
    """Times of a case, and two ratios of new over old."""

    case: str
    old_ms: float
    new_ms: float
    ratios: tuple[float, float]
    tolerance: float

    @property
    def is_slower(self) -> bool:
        """Both ratios must say so, because a load on the machine may change either."""
        return min(self.ratios) > 1 + self.tolerance

    def line(self) -> str:
        numbers = "{:10.4g} {:10.4g} {:7.3f} {:7.3f}".format(self.old_ms, self.new_ms, *self.ratios)
        return f"{self.case:66} {numbers}{'  slower' if self.is_slower else ''}"


def print_comparisons(compared: Iterable[Comparison], titles: tuple[str, str]) -> int:
    """Print a table with these titles of the two ratios. Returns how many cases are slower."""
    print("{:66} {:>10} {:>10} {:>7} {:>7}".format("case", "old ms", "new ms", *titles))
    slower = 0
    for one in compared:
        print(one.line())
        slower += one.is_slower
    return slower


def run(args: argparse.Namespace) -> int:
    passed_on = [
        word
        for name in ("device", "threads", "kernel")
        if (value := getattr(args, name)) is not None
        for word in (f"--{name}", value)
    ]
    times, unmatched, is_whole = compare(
        (str(Path(args.old).resolve()), str(Path(args.new).resolve())),
        args.filter,
        args.rounds,
        passed_on,
        args.rename.split("=", 1),
    )
    compared = [
        Comparison(
            case,
            min(old for old, _ in pairs),
            min(new for _, new in pairs),
            ratios(pairs),
            args.tolerance,
        )
        for case, pairs in sorted(times.items())
    ]
    slower = print_comparisons(compared, ("least", "median"))
    rows = []
    for one in compared:
        least, median = one.ratios
        numbers = {"old_ms": one.old_ms, "new_ms": one.new_ms, "least": least, "median": median}
        rows.append({"case": one.case, **numbers})
    for case in sorted(unmatched):
        print(f"{case:66} timed by one command only")
    if args.json is not None:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(times)} cases, {slower} slower by more than {args.tolerance:.0%}")
    if not is_whole:
        raise KeyboardInterrupt
    return 1 if slower or unmatched or not times else 0
