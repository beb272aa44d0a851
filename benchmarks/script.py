"""What scripts share that write the times of their cases to a folder: rounds and rows."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import flash_dmattn
from arguments import Parser
from peers_common import Rounds, quantiles, write_whole


def parse(parser: Parser, arguments: list[str] | None) -> argparse.Namespace:
    args = parser.parse_args(arguments)
    if args.device == "cuda" and "cuda" not in flash_dmattn.get_available_backends():
        parser.error("there is no CUDA device, or no CUDA backend in this build")
    return args


@contextlib.contextmanager
def kept(path: Path, machine: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """The lines of a file, which is written at the end, or on Ctrl-C if there are rows."""
    lines = [machine]
    try:
        yield lines
    except KeyboardInterrupt:
        if len(lines) > 1:
            write_whole(path, lines)
        raise
    write_whole(path, lines)


def alternate(timers: dict[str, Callable[[], float]], rounds: Rounds) -> dict[str, list[float]]:
    """What each timer returned, in milliseconds. In each round every timer is called once."""
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
        low, median, high = quantiles(own)
        ratios = [x / base for x, base in zip(own, times["fdma"])]
        yield {
            "case": case,
            "peer": name,
            "ms": median,
            "spread": (high - low) / median,
            "times": quantiles(ratios)[1],
        }
