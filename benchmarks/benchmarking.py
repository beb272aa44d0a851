"""Shared by the benchmarks: rounds and times, the machine, files of rows, options of scripts."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Callable, NamedTuple

import flash_dmattn
import torch
from arguments import Parser
from flash_dmattn import _library
from kernels_hash import kernels_hash

ROOT = Path(__file__).resolve().parent.parent
WAIT_CYCLES = 10_000_000  # about 5 ms: longer than the host takes to launch a graph


class Rounds(NamedTuple):
    """How many times a case runs: until `seconds` are over, but `least` to `most` times."""

    least: int
    most: int
    seconds: float


USUAL = Rounds(5, 100, 3.0)
QUICK = Rounds(3, 20, 0.3)


class Disagreement(Exception):
    """Two outputs differ by more than rounding explains."""


def require_close(found: torch.Tensor, wanted: torch.Tensor, allowed: float, what: str) -> None:
    error = (found.double() - wanted).abs().max().item()
    if not error <= allowed:  # written so that NaN fails
        raise Disagreement(f"{what} differ by {error:.3g}, allowed {allowed:.3g}")


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


def commit() -> str | None:
    """The commit of the tree, or FDMA_COMMIT if there is no git."""
    if given := os.environ.get("FDMA_COMMIT"):
        return given
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:  # git is not installed
        return None
    return done.stdout.strip() or None


def find_machine(device: str) -> dict[str, Any]:
    info = _library.HEADER.structs["fdma_device_info"]()
    index = 1 if device == "cuda" else 0
    _library.check(_library.library.fdma_describe_device(index, ctypes.byref(info)))
    machine = {
        "machine": info.name.decode(),
        "cores": info.cores,
        "device": device,
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(),
    }
    return {**machine, "kernels": kernels_hash()} if device == "cuda" else machine


def write_whole(path: Path, lines: list[dict[str, Any]]) -> None:
    """Replace the whole file at once, so that a reader never sees half of it."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines))
    unfinished.replace(path)


def parse(parser: Parser, arguments: list[str] | None) -> argparse.Namespace:
    args = parser.parse_args(arguments)
    if args.device == "cuda" and "cuda" not in flash_dmattn.get_available_backends():
        parser.error("there is no CUDA device, or no CUDA backend in this build")
    return args


@contextlib.contextmanager
def kept(path: Path, machine: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """The lines of a file. It is written at the end, or on Ctrl-C if there are rows."""
    lines = [machine]
    try:
        yield lines
    except KeyboardInterrupt:
        if len(lines) > 1:
            write_whole(path, lines)
        raise
    write_whole(path, lines)


def write_rows(
    name: str,
    args: argparse.Namespace,
    rows: Iterable[dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
) -> int:
    """Show each row once it is measured, and write all of them to NAME-DEVICE.json in the folder
    --out. Returns the exit status: 0; 1 if outputs are wrong, or the file cannot be written."""
    try:
        with kept(args.out / f"{name}-{args.device}.json", find_machine(args.device)) as lines:
            for row in rows:
                lines.append(row)
                show(row)
    except (Disagreement, OSError) as error:
        print(f"{name}.py: {error}", file=sys.stderr)
        return 1
    return 0


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
