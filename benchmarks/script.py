"""What scripts share that write the times of their cases to a folder: arguments, rounds, rows."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import flash_dmattn
from peers import Parser
from peers_common import Rounds, quantiles


def folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"is {text!r}, want a folder that exists")
    return Path(text)


def make_parser(script: str, document: str | None, more: str) -> Parser:
    """The arguments --out, --device and --quick. `document` is the script's docstring, of which
    the help shows the first line, and then `more`."""
    parser = Parser(
        prog=script,
        description=(document or "").split("\n")[0],
        epilog=more.strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=folder, required=True, metavar="FOLDER")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    return parser


def parse(parser: Parser, arguments: list[str] | None) -> argparse.Namespace:
    args = parser.parse_args(arguments)
    if args.device == "cuda" and "cuda" not in flash_dmattn.get_available_backends():
        parser.error("there is no CUDA device, or no CUDA backend in this build")
    return args


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
