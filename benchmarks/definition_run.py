"""Runs the cases of forward_equivalence.py and its like: options, the table, JSON, exit status."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple

import program as progress_lines
from arguments import Parser
from benchmarking import find_machine, write_whole
from definition import Comparison
from definition_cases import CASES, DTYPES, Case, Inputs, default_device, has_kernels
from definition_options import QUICK_KEYS, equivalence_parser
from definition_options import make_parser as make_parser  # for definition_times.py

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

Compare = Callable[[Inputs], Iterator[Comparison]]


class Row(NamedTuple):
    """A comparison and its place."""

    case: str
    dtype: str
    one: Comparison

    def fields(self) -> dict[str, Any]:
        one = self.one
        fields = {"case": self.case, "dtype": self.dtype, "tensor": one.what, "error": one.error}
        fields.update(plain=one.plain, largest=one.largest, allowed=one.allowed)
        for name, x in fields.items():
            if isinstance(x, float) and not math.isfinite(x):  # JSON has no infinity and no NaN
                fields[name] = None
        return {**fields, "wrong": not one.fits}

    def line(self) -> str:
        one = self.one
        numbers = f"{one.error:9.2e} {one.plain:9.2e} {one.allowed:9.2e}"
        ending = "" if one.fits else " WRONG"
        return f"{self.case:60} {self.dtype:9} {one.what:36} {numbers}{ending}"


HEADER = f"{'case':60} {'dtype':9} {'tensor':36} {'error':>9} {'plain':>9} {'allowed':>9}"


def parse(parser: Parser, arguments: list[str] | None) -> argparse.Namespace:
    args = parser.parse_args(arguments)
    if args.device == "cuda" and default_device() != "cuda":
        parser.error("there is no CUDA device, or no CUDA backend in this build")
    args.device = args.device or default_device()
    return args


def parse_equivalence(
    program: str, document: str | None, arguments: list[str] | None
) -> argparse.Namespace:
    parser = equivalence_parser(program, document)
    args = parse(parser, arguments)
    names = [name for name, dtype in DTYPES.items() if has_kernels(args.device, dtype)]
    if args.dtype and args.dtype not in names:
        parser.error(f"--dtype: no kernels for {args.dtype} on {args.device}")
    args.dtypes = [args.dtype] if args.dtype else names
    return args


def choose_cases(args: argparse.Namespace) -> list[Case]:
    cases = [case for case in CASES if args.cases in case.name]
    return [case for case in cases if case.kv_len <= QUICK_KEYS or not args.quick]


class Progress:
    """A bar on stderr if that is a terminal and tqdm is installed, else the lines of program.py.
    Rows go to stdout above the bar."""

    def __init__(self, total: int, wanted: bool) -> None:
        shown = wanted and tqdm is not None and sys.stderr.isatty()
        self.bar = tqdm(total=total, unit="case", file=sys.stderr) if shown else None
        self.total, self.begun = total, 0
        self.has_rows = False
        if self.bar is not None:
            progress_lines.quiet()

    def begin(self, what: str) -> None:
        self.begun += 1
        progress_lines.doing(f"{self.begun} of {self.total}: {what}")
        if self.bar is not None:
            self.bar.set_postfix_str(what)

    def end(self) -> None:
        if self.bar is not None:
            self.bar.update()

    def show(self, row: Row) -> None:
        if not self.has_rows:
            self.print(HEADER)
        self.has_rows = True
        self.print(row.line())

    def print(self, line: str) -> None:
        if self.bar is None:
            print(line, flush=True)
        else:
            self.bar.write(line, file=sys.stdout)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def compare_cases(
    args: argparse.Namespace, compare: Compare, rows: list[Row], progress: Progress
) -> Iterator[str]:
    """Append a row for each comparison. Yields a line for each case without a kernel."""
    for case in choose_cases(args):
        for dtype in args.dtypes:
            progress.begin(f"{case.name} {dtype}")
            try:
                for one in compare(Inputs(case, args.device, DTYPES[dtype])):
                    rows.append(Row(case.name, dtype, one))
                    if args.verbose or not one.fits:
                        progress.show(rows[-1])
            except NotImplementedError as error:
                yield f"skipped: {case.name} {dtype}: {error}"
            progress.end()


def summarize(rows: Sequence[Row]) -> list[str]:
    """A line for each tensor and dtype: the comparison with the largest ratio to the allowed
    error."""
    groups: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        groups.setdefault(row.one.what, {}).setdefault(row.dtype, []).append(row)
    form = "{:36} {:9} {:>8} {:>9} {:>9} {:>10} {:>6}  {}"
    titles = ("tensor", "dtype", "compared", "error", "allowed", "of allowed", "wrong", "case")
    lines = [form.format(*titles)]
    for what, of_dtypes in groups.items():
        for dtype, group in of_dtypes.items():
            worst = max(group, key=lambda row: row.one.ratio)
            one = worst.one
            numbers = (f"{one.error:.2e}", f"{one.allowed:.2e}", f"{one.ratio:.2f}")
            wrong = sum(not row.one.fits for row in group)
            lines.append(form.format(what, dtype, len(group), *numbers, wrong, worst.case))
    return lines


def write_json(path: Path, args: argparse.Namespace, head: dict[str, Any], rows: list[Row]) -> None:
    """Write the machine and the run to the first line, then a line for each comparison."""
    write_whole(path, [{**find_machine(args.device), **head}, *(row.fields() for row in rows)])


def run_equivalence(
    program: str, document: str | None, compare: Compare, arguments: list[str] | None
) -> int:
    """Compare every case. Exit status: 0 equal within rounding; 1 not; 2 bad usage."""
    args = parse_equivalence(program, document, arguments)
    rows: list[Row] = []
    skipped: list[str] = []
    stopped = False
    progress = Progress(len(choose_cases(args)) * len(args.dtypes), not args.no_progress)
    begin = time.monotonic()
    try:
        for line in compare_cases(args, compare, rows, progress):
            skipped.append(line)
    except KeyboardInterrupt:  # finished comparisons are still reported
        stopped = True
    finally:
        progress.close()
    if progress.has_rows:
        print()
    print(*skipped, *summarize(rows), sep="\n")
    wrong = sum(not row.one.fits for row in rows)
    head = {"program": program, "seconds": round(time.monotonic() - begin, 3)}
    head.update(comparisons=len(rows), wrong=wrong, skipped=len(skipped))
    try:
        if args.json:
            write_json(args.json, args, head, rows)
    except OSError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    if stopped:
        raise KeyboardInterrupt
    if not rows:
        print(f"{program}: nothing was compared", file=sys.stderr)
        return 1
    print(f"{len(rows)} comparisons, {wrong} wrong")
    return 1 if wrong else 0
