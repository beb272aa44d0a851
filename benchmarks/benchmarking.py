"""Shared by the benchmarks: rounds and times, the machine, tables, and files of rows."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import flash_dmattn
import program
import torch
from commands import Disagreement
from machine import describe_machine, write_whole

WAIT_CYCLES = 10_000_000  # about 5 ms: longer than the host takes to launch a graph


class Rounds(NamedTuple):
    """How many times a case runs: until `seconds` are over, but `least` to `most` times."""

    least: int
    most: int
    seconds: float


USUAL = Rounds(5, 100, 3.0)
QUICK = Rounds(3, 20, 0.3)


def require_close(found: torch.Tensor, wanted: torch.Tensor, allowed: float, what: str) -> None:
    error = (found.double() - wanted).abs().max().item()
    if not error <= allowed:  # written so that NaN fails
        raise Disagreement(f"{what} differ by {error:.3g}, allowed {allowed:.3g}")


def reason_of(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def passes(case: str, peer: str, check: Callable[[], None]) -> bool:
    """True if the check of a peer passes. If it raises any error, a line says why the case is
    measured without the peer."""
    try:
        check()
    except Exception as error:
        print(f"{case}: without {peer}: {reason_of(error)}", file=sys.stderr)
        return False
    return True


def visible_pairs(length: int, keys: int) -> int:
    """Number of pairs of a query and a key that it keeps. A query keeps at most `keys` keys; 0:
    all."""
    full = min(keys or length, length)
    return full * (full + 1) // 2 + (length - full) * full


def plain_allowance(plain: torch.Tensor, exact: torch.Tensor, times: float = 2) -> float:
    """The error allowed in an output: `times` the error of a plain evaluation, which has the
    output's dtype, plus one rounding step of the largest element."""
    error = (plain.double() - exact).abs().max().item()
    return times * error + torch.finfo(plain.dtype).eps * exact.abs().max().item()


def quantiles(values: list[float]) -> list[float]:
    """The first decile, the median and the last decile."""
    fractions = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    return torch.tensor(values, dtype=torch.float64).quantile(fractions).tolist()


def summary(times: list[float]) -> dict[str, float]:
    """The median in ms, and the spread: (90th - 10th percentile) / median."""
    low, median, high = quantiles(times)
    return {"ms": median, "spread": (high - low) / median}


def median_ratio(above: list[float], below: list[float]) -> float:
    return quantiles([a / b for a, b in zip(above, below)])[1]


def find_machine(device: str) -> dict[str, Any]:
    return describe_machine(device, torch=torch.__version__)


Row = Dict[str, Any]
Show = Callable[[List[Row]], None]
Cases = List[Tuple[str, Callable[[], Iterable[Row]]]]  # the name and the measurement of each


# ---- tables ----


class Column(NamedTuple):
    field: str  # of a row
    title: str
    form: str  # as for format(); with a point for numbers
    factor: float = 1

    def cell(self, value: Any) -> str:
        if value is None:
            return " " * int(self.form.split(".")[0])
        return format(value if isinstance(value, str) else self.factor * value, self.form)

    @property
    def head(self) -> str:
        width, point, _ = self.form.partition(".")
        return f"{self.title:{'>' if point or width.endswith('d') else '<'}{width.rstrip('d')}}"


MS = (Column("ms", "ms", "10.3f"), Column("spread", "spread", "7.3f"))
MET = {True: "met   ", False: "MISSED", None: "      "}


class Table:
    """Prints rows: a case, a peer, and the columns of numbers. A row may have a goal, or a reason
    why it was not run."""

    def __init__(self, case: int, peer: int, *columns: Column) -> None:
        self.names = (Column("case", "case", str(case)), Column("peer", "peer", str(peer)))
        self.columns = (*self.names, *columns)

    def head(self) -> str:
        return " ".join(column.head for column in self.columns)

    def line(self, row: Row) -> str:
        shown = self.names if "not_run" in row else self.columns
        cells = [column.cell(row.get(column.field)) for column in shown]
        cells += [f"not run: {row['not_run']}"] if "not_run" in row else []
        cells += [f" {MET[row['met']]} {row['goal']}"] if row.get("goal") else []
        return " ".join(cells).rstrip()

    def show(self, rows: list[Row]) -> None:
        print(*map(self.line, rows), sep="\n", flush=True)


# ---- runs ----


def has_device() -> bool:
    return "cuda" in flash_dmattn.get_available_backends()


def choose_device(args: argparse.Namespace) -> None:
    """Fill in the default of --device, and refuse a device that is not there."""
    if args.device == "cuda" and not has_device():
        args.parser.error("there is no CUDA device, or no CUDA backend in this build")
    args.device = args.device or ("cuda" if has_device() else "cpu")


@contextlib.contextmanager
def kept(path: Path | None, machine: Row) -> Iterator[list[Row]]:
    """The lines of a file, which is written at the end, on an error and on Ctrl-C, if there are
    rows and a path."""
    lines = [machine]
    try:
        yield lines
    finally:
        if path is not None and len(lines) > 1:
            write_whole(path, lines)


def collect(args: argparse.Namespace, cases: Cases, lines: list[Row], show: Show) -> int:
    """Append the rows of all cases to `lines`, and show those of a case once it is measured.
    Returns 1 if a case, which is then left out, has wrong outputs, else 0."""
    status = 0
    for number, (name, measure) in enumerate(cases, 1):
        program.doing(f"{number} of {len(cases)}: {name}")
        try:
            rows = list(measure())
        except Disagreement as error:
            print(f"{args.parser.prog}: {error}", file=sys.stderr)
            status = 1
            continue
        lines += rows
        show(rows)
    return status


def measure_cases(
    args: argparse.Namespace, table: Table, cases: Cases, path: Path | None
) -> tuple[int, list[Row]]:
    """Measure all cases, print their table and write their rows to `path`. Returns the exit status
    and the lines of the file."""
    machine = find_machine(args.device)
    print(", ".join(f"{field} {value}" for field, value in machine.items() if value), end="\n\n")
    print(table.head())
    with kept(path, machine) as lines:
        status = collect(args, cases, lines, table.show)
    held = [row["met"] for row in lines if row.get("met") is not None]
    if held:
        print(f"{sum(held)} of {len(held)} goals reached")
    return status, lines


def run_cases(args: argparse.Namespace, table: Table, cases: Cases) -> int:
    """As measure_cases(). The file is NAME-DEVICE.json in the folder --out."""
    return measure_cases(args, table, cases, args.out / f"{args.name}-{args.device}.json")[0]


# ---- time ----


def time_pass(run: Callable[[], Any], device: str) -> float:
    """Milliseconds; on a CUDA device, time of its stream without the host's."""
    if device == "cpu":
        before = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - before)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(WAIT_CYCLES)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def time_wall(run: Callable[[], Any], device: str) -> float:
    """Milliseconds until the device has finished."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    before = time.perf_counter()
    run()
    wait()
    return 1e3 * (time.perf_counter() - before)


def alternate(
    timers: dict[str, Callable[[], float]], rounds: Rounds, warm_up: int = 0
) -> dict[str, list[float]]:
    """Milliseconds that each timer returned. Each round calls every timer once, after warm_up
    rounds that do not count."""
    for timer in [*timers.values()] * warm_up:
        timer()
    times: dict[str, list[float]] = {name: [] for name in timers}
    end = time.perf_counter() + rounds.seconds
    for made in range(rounds.most):
        if made >= rounds.least and time.perf_counter() > end:
            break
        for name, timer in timers.items():
            times[name].append(timer())
    return times


def make_rows(case: str, times: dict[str, list[float]]) -> Iterator[dict[str, Any]]:
    """A row for each peer of a case: the median in ms, the spread, and the ratio to fdma."""
    for name, own in times.items():
        ratio = median_ratio(own, times["fdma"])
        yield {"case": case, "peer": name, **summary(own), "times": ratio}
