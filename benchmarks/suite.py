#!/usr/bin/env python3
"""Measure dynamic mask attention beside dense attention: growth, density, ablations, energy.

It runs on a CUDA device, or with --device cpu and smaller sizes on the CPU, with flash_dmattn
installed, or with PYTHONPATH=python and FDMA_LIBRARY=build/libfdma.so:

    python benchmarks/suite.py --out FILE.json
    python benchmarks/suite.py --compare OLD.json --out NEW.json
    python benchmarks/suite.py --compare OLD.json --json NEW.json

The second measures and then compares, the third only compares; benchmarks/suite_picture.py draws
FILE.json. In each round every peer of a setting runs once, and so does a product of two matrices,
whose rate is the machine's peak. Outputs are compared with float64 before a call is timed;
benchmarks/backward_equivalence.py compares gradients. Exit status: 0 done; 1 wrong outputs, a call
that has become slower, or a file that could not be written; 2 bad usage, or nothing to compare.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import program
import suite_compare
from suite_options import LIMIT, QUICK_LIMIT, QUICK_SECONDS, SECONDS, SHORTEST, make_parser

if __name__ == "__main__":
    program.begin(make_parser(__doc__).parse_args)

import torch
from benchmarking import Disagreement, find_machine, write_whole
from definition_cases import DTYPES, choose_dtype, default_device, has_kernels
from definition_run import Progress
from suite_calls import Setting
from suite_items import ITEMS, Plan
from suite_measure import Bench, Row, reason_of


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    args = parser.parse_args(arguments)
    if args.json and not args.compare:
        parser.error("--json is given without --compare OLD")
    if args.json and args.out:
        parser.error("--out is given with --json, which measures nothing")
    if args.device == "cuda" and default_device() != "cuda":
        parser.error("there is no CUDA device, or no CUDA backend in this build")
    args.device = args.device or default_device()
    if args.dtype and not has_kernels(args.device, DTYPES[args.dtype]):
        parser.error(f"--dtype: no kernels for {args.dtype} on {args.device}")
    if args.longest and args.longest < SHORTEST:
        parser.error(f"--longest is {args.longest}, want {SHORTEST} or more")
    cores = os.cpu_count() or 1
    if args.threads and args.threads > cores:
        parser.error(f"--threads is {args.threads}, and this machine has {cores} cores")
    args.seconds = args.seconds or (QUICK_SECONDS if args.quick else SECONDS)
    args.limit = args.limit or (QUICK_LIMIT if args.quick else LIMIT)
    return args


COLUMNS = (  # the field of a row, its title and its format
    ("ms", "ms", "10.3f"),
    ("spread", "spread", "7.3f"),
    ("tokens_per_second", "tokens/s", "12.0f"),
    ("useful_gflops", "GFLOP/s", "10.1f"),
    ("of_peak", "of peak", "7.3f"),
    ("peak_bytes", "peak bytes", "12.0f"),
    ("mean_bytes", "mean bytes", "12.0f"),
    ("times", "times", "7.2f"),
    ("times_dense", "dense", "7.2f"),
)


def width_of(form: str) -> int:
    return int(form.split(".")[0])


def header() -> str:
    titles = (f"{title:>{width_of(form)}}" for _, title, form in COLUMNS)
    return f"{'case':52} {'peer':14} {' '.join(titles)}"


def format_row(row: Row) -> str:
    head = f"{row['case']:52} {row['peer']:14}"
    if "not_run" in row:
        return f"{head} not run: {row['not_run']}"
    if "joules_per_token" in row:
        energy = (
            "{joules_per_token:.3g} J a token, {tokens_per_joule:.0f} tokens a J, {watts:.0f} W"
        )
        return f"{head} {energy.format(**row)}"
    cells = (
        " " * width_of(form) if row.get(name) is None else format(row[name], form)
        for name, _, form in COLUMNS
    )
    return f"{head} {' '.join(cells)}".rstrip()


def rows_of(bench: Bench, setting: Setting) -> Iterator[Row]:
    """The rows of a setting, or a line that says that its tensors do not fit in the device's
    memory."""
    try:
        yield from ITEMS[setting.item](bench, setting)
    except torch.cuda.OutOfMemoryError as error:
        head = {"case": setting.name(bench.dtype_name), "peer": "fdma", **setting.fields()}
        yield {**head, "threads": torch.get_num_threads(), "not_run": reason_of(error)}


def measure(args: argparse.Namespace, lines: list[dict[str, Any]]) -> None:
    """Append the rows of every item to `lines`, and print them.

    Raises:
        Disagreement: outputs are wrong.
    """
    peak = args.peak and 1e12 * args.peak
    bench = Bench(args.device, choose_dtype(args), args.seconds, args.limit, peak)
    plan = Plan(args)
    settings = [setting for item in args.only for setting in plan.of(item)]
    progress = Progress(len(settings), not args.no_progress)
    progress.print(header())
    try:
        for setting in settings:
            progress.begin(setting.name(bench.dtype_name))
            for row in rows_of(bench, setting):
                lines.append(row)
                progress.print(format_row(row))
            progress.end()
    finally:
        progress.close()


def run(args: argparse.Namespace) -> suite_compare.Lines:
    """Measure, and write the measured rows even if a later setting fails.

    Raises:
        Disagreement: outputs are wrong.
        OSError: the file could not be written.
    """
    if args.threads:
        torch.set_num_threads(args.threads)
    machine = {**find_machine(args.device), "program": "suite.py", "quick": args.quick}
    machine.update(seconds=args.seconds, peak="stated" if args.peak else "measured")
    rows: list[Row] = []
    begin = time.monotonic()
    try:
        measure(args, rows)
    finally:
        if args.out and rows:
            machine["run_seconds"] = round(time.monotonic() - begin, 1)
            write_whole(args.out, [machine, *rows])
    return suite_compare.Lines(machine, rows)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:  # find a file that cannot be compared before measuring
        old = suite_compare.read(args.compare) if args.compare else None
        new = suite_compare.read(args.json) if args.json else None
    except (OSError, ValueError) as error:
        print(f"suite.py: {error}", file=sys.stderr)
        return 2
    try:
        new = new or run(args)
    except (Disagreement, OSError) as error:
        print(f"suite.py: {error}", file=sys.stderr)
        return 1
    if old is None:
        return 0
    try:
        return 1 if suite_compare.report(old, new, args.tolerance) else 0
    except ValueError as error:
        print(f"suite.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
