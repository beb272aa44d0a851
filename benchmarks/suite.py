#!/usr/bin/env python3
"""The benchmark `suite`: attention with dynamic masks beside dense attention."""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    import bench

    bench.start("suite")

import program
import torch
from benchmarking import (
    MS,
    Column,
    Row,
    Table,
    choose_device,
    collect,
    find_machine,
    kept,
    reason_of,
)
from commands import LIMIT, QUICK_LIMIT, QUICK_SECONDS, SECONDS, SHORTEST
from compare import Comparison, print_comparisons
from definition_cases import DTYPES, choose_dtype, has_kernels
from suite_items import ITEMS, Plan, Setting
from suite_measure import Bench

Key = tuple[str, str, int]  # case, peer, threads


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse contradictory arguments, and fill in missing ones."""
    error = args.parser.error
    if args.json and not args.compare:
        error("--json is given without --compare OLD")
    if args.json and args.out:
        error("--out is given with --json, which measures nothing")
    choose_device(args)
    if args.dtype and not has_kernels(args.device, DTYPES[args.dtype]):
        error(f"--dtype: no kernels for {args.dtype} on {args.device}")
    if args.longest and args.longest < SHORTEST:
        error(f"--longest is {args.longest}, want {SHORTEST} or more")
    cores = os.cpu_count() or 1
    if args.threads and args.threads > cores:
        error(f"--threads is {args.threads}, and this machine has {cores} cores")
    args.seconds = args.seconds or (QUICK_SECONDS if args.quick else SECONDS)
    args.limit = args.limit or (QUICK_LIMIT if args.quick else LIMIT)


# ---- measurement ----

TABLE = Table(
    52,
    14,
    *MS,
    Column("tokens_per_second", "tokens/s", "12.0f"),
    Column("useful_gflops", "GFLOP/s", "10.1f"),
    Column("of_peak", "of peak", "7.3f"),
    Column("peak_bytes", "peak bytes", "12.0f"),
    Column("mean_bytes", "mean bytes", "12.0f"),
    Column("times", "times", "7.2f"),
    Column("times_dense", "dense", "7.2f"),
    Column("joules_per_token", "J/token", "8.3g"),
    Column("tokens_per_joule", "tokens/J", "9.0f"),
    Column("watts", "W", "5.0f"),
)


def rows_of(bench: Bench, setting: Setting) -> Iterator[Row]:
    """The rows of a setting, or a line that says that its tensors do not fit in the device's
    memory."""
    try:
        yield from ITEMS[setting.item](bench, setting)
    except torch.cuda.OutOfMemoryError as error:
        head = {"case": setting.name(bench.dtype_name), "peer": "fdma", **setting.fields()}
        yield {**head, "threads": torch.get_num_threads(), "not_run": reason_of(error)}


def measure(args: argparse.Namespace) -> tuple[int, Lines]:
    """Measure every item, and write the rows. The status is 1 if outputs are wrong."""
    if args.threads:
        torch.set_num_threads(args.threads)
    machine = {**find_machine(args.device), "program": "suite.py", "quick": args.quick}
    machine.update(seconds=args.seconds, peak="stated" if args.peak else "measured")
    peak = args.peak and 1e12 * args.peak
    bench = Bench(args.device, choose_dtype(args), args.seconds, args.limit, peak)
    settings = [setting for item in args.only for setting in Plan(args).of(item)]
    cases = [
        (one.name(bench.dtype_name), functools.partial(rows_of, bench, one)) for one in settings
    ]
    begin = time.monotonic()
    print(TABLE.head())
    with kept(args.out, machine) as lines:
        try:
            status = collect(args, cases, lines, TABLE.show)
        finally:
            machine["run_seconds"] = round(time.monotonic() - begin, 1)
    return status, Lines(machine, lines[1:])


# ---- comparison of two files ----


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


def run(args: argparse.Namespace) -> int:
    check_arguments(args)
    if args.no_progress:
        program.quiet()
    try:  # find a file that cannot be compared before measuring
        old = read(args.compare) if args.compare else None
        new = read(args.json) if args.json else None
    except (OSError, ValueError) as error:
        args.parser.error(str(error))
    status, new = (0, new) if new else measure(args)
    if old is None or status:
        return status
    try:
        return 1 if report(old, new, args.tolerance) else 0
    except ValueError as error:
        args.parser.error(str(error))
