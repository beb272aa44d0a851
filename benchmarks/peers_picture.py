#!/usr/bin/env python3
"""Draw the rows of `benchmarks/peers.py`: milliseconds against length, one panel for each dtype.
For a CUDA device there is one panel, and a second picture, FILE-cases.svg, of the useful FLOP/s of
each case relative to dense attention.

peers.py --picture draws its own measurements; this script draws a file of peers.py --json:

    pip install matplotlib
    python benchmarks/peers_picture.py FILE.json --out FILE.svg
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, Callable, NamedTuple

import program
from arguments import drawing_parser

if __name__ == "__main__":
    program.begin(drawing_parser("peers", __doc__).parse_args)

import matplotlib
from matplotlib import pyplot

TITLES = {"f32": "float32", "bf16": "bfloat16"}
CASE = re.compile(r"forward/(?P<form>\w+)/(?P<dtype>\w+)/d\d+/n(?P<length>\d+)(/w(?P<window>\d+))?")


class Line(NamedTuple):
    form: str
    peer: str
    label: str
    colour: str  # from Okabe and Ito's palette for the colour-blind
    marker: str


LINES = (
    Line("selected", "sdpa-masked", "SDPA, masked", "#E69F00", "^"),
    Line("dense", "sdpa", "SDPA, dense", "#CC79A7", "s"),
    Line("dense", "fdma", "flash_dmattn, dense", "#56B4E9", "o"),
    Line("selected", "fdma", "flash_dmattn, selected", "#0072B2", "D"),
)


def points(rows: list[dict[str, Any]], line: Line, dtype: str) -> list[tuple[int, float]]:
    """Pairs of a length and milliseconds, by increasing length."""
    found = []
    for row in rows:
        case = CASE.fullmatch(row["case"])
        if case and (case["form"], case["dtype"], row["peer"]) == (line.form, dtype, line.peer):
            found.append((int(case["length"]), row["ms"]))
    return sorted(found)


def draw_panel(axes: pyplot.Axes, rows: list[dict[str, Any]], dtype: str) -> None:
    lengths = set()
    for line in LINES:
        drawn = points(rows, line, dtype)
        lengths.update(length for length, _ in drawn)
        axes.plot(
            [length for length, _ in drawn],
            [ms for _, ms in drawn],
            color=line.colour,
            marker=line.marker,
            markersize=5,
            label=line.label,
        )
    axes.set_title(TITLES[dtype])
    axes.set_xlabel("length (q_len = kv_len)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(lengths), [str(length) for length in sorted(lengths)])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def caption(machine: dict[str, Any], rows: list[dict[str, Any]], threads: int) -> str:
    """The machine, the inputs and the contents of the times."""
    windows = {case["window"] for row in rows if (case := CASE.fullmatch(row["case"]))} - {None}
    where = [
        machine["machine"],
        "1 thread" if threads == 1 else f"{threads} threads",
        f"PyTorch {machine['torch']}",
    ]
    what = ["causal, one head, head_dim 128", *(f"window {window}" for window in sorted(windows))]
    counted = "times include selection, not making the mask"
    return f"{', '.join(where)}\n{', '.join(what)}; {counted}"


CUDA_CASE = re.compile(
    r"(?P<kind>[\w-]+)/bf16(/b(?P<batch>\d+))?/h(?P<q_heads>\d+)g(?P<kv_heads>\d+)/d(?P<head_dim>\d+)"
    r"/n(?P<length>\d+)(/w(?P<window>\d+))?"
)
DRAWN_LENGTHS = re.compile(r"attention/bf16/h32g8/d128/n(?P<length>\d+)/w2048")
CUDA_LINES = (
    Line("attention", "flash", "FlashAttention-2, all keys", "#009E73", "v"),
    Line("attention", "cudnn", "cuDNN, all keys", "#CC79A7", "s"),
    Line("attention", "fdma", "FlashDMA, 2,048 keys a query", "#0072B2", "D"),
)
KINDS = {  # words for a kind of case
    "attention": "forward",
    "selected": "forward, selection given",
    "dense": "forward, all keys",
    "backward": "gradients",
    "selected-backward": "gradients, selection given",
    "dense-backward": "gradients, all keys",
    "training": "forward and gradients",
}
PEERS = {"sm80": "kernels for 8.0", "deterministic": "deterministic"}  # others: orders of scores


def draw_times(axes: pyplot.Axes, rows: list[dict[str, Any]]) -> None:
    lengths = set()
    for line in CUDA_LINES:
        drawn = []
        for row in rows:
            case = DRAWN_LENGTHS.fullmatch(row["case"])
            if case and row["peer"] == line.peer:
                drawn.append((int(case["length"]), row["ms"]))
        own, times = zip(*sorted(drawn)) if drawn else ((), ())
        lengths.update(own)
        axes.plot(own, times, color=line.colour, marker=line.marker, markersize=5, label=line.label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(lengths), [f"{length:,}" for length in sorted(lengths)])
    axes.set_xlabel("length of the sequence")
    axes.set_ylabel("milliseconds")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(color="0.9", linewidth=0.6)
    axes.legend(frameon=False)


def words_of(row: dict[str, Any]) -> str:
    """The case of a CUDA device and, if it is not the usual one, the peer."""
    case = CUDA_CASE.fullmatch(row["case"])
    assert case is not None
    words = [f"{KINDS[case['kind']]}: {case['q_heads']} heads on {case['kv_heads']}"]
    keys = f"{int(case['length']):,} keys"
    words += [
        f"head_dim {case['head_dim']}",
        f"{case['batch']} x {keys}" if case["batch"] else keys,
    ]
    if case["window"]:
        words.append(f"window {int(case['window']):,}")
    _, _, form = row["peer"].partition("-")
    if form:
        words.append(PEERS.get(form, f"{form} scores"))
    return ", ".join(words)


def lowest_fraction(row: dict[str, Any]) -> float | None:
    """The least of_dense that the row's goal allows, if it has such a goal."""
    if not row["goal"]:
        return None
    _, bar, *words = row["goal"].split()
    if words[:2] == ["times", "cudnn"]:
        return float(bar) * row["of_dense"] / row["times_cudnn"]
    return float(bar) if words[:2] == ["of", "dense"] else None


def draw_fractions(rows: list[dict[str, Any]]) -> pyplot.Figure:
    shown = [row for row in rows if row["peer"].startswith("fdma") and row["of_dense"] is not None]
    heights = range(len(shown))
    size = (9, 1.2 + 0.18 * len(shown))
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    axes.barh(heights, [row["of_dense"] for row in shown], color="#0072B2")
    for height, row in zip(heights, shown):
        if (bar := lowest_fraction(row)) is not None:
            axes.plot([bar, bar], [height - 0.4, height + 0.4], color="#D55E00", linewidth=2)
    axes.set_yticks(heights, [words_of(row) for row in shown], fontsize="small")
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.axvline(1, color="0.5", linewidth=0.8)
    axes.set_xlabel("useful FLOP/s, of dense attention's")
    return figure


def draw_cuda(machine: dict[str, Any], rows: list[dict[str, Any]], out: Path) -> None:
    times, axes = pyplot.subplots(figsize=(9, 4.4), layout="constrained")
    draw_times(axes, rows)
    for figure, where in (
        (times, out),
        (draw_fractions(rows), out.with_name(f"{out.stem}-cases{out.suffix}")),
    ):
        figure.axes[0].spines[["top", "right"]].set_visible(False)
        words = f"{machine['machine']}, PyTorch {machine['torch']}, bfloat16, causal"
        if figure is times:
            words += "; forward, selection included; 32 heads on 8, head_dim 128"
        figure.supxlabel(words, fontsize="small", color="0.35")
        save(figure, where)


def save(figure: pyplot.Figure, out: Path) -> None:
    bare = dict.fromkeys(
        ("Creator", "Date", "Format", "Type")
    )  # without metadata a drawing always has the same bytes
    figure.savefig(out, metadata=bare if out.suffix == ".svg" else None)


def draw(machine: dict[str, Any], rows: list[dict[str, Any]], out: Path) -> None:
    """Draw the rows; on the CPU, only the rows of the fewest threads."""
    if machine["device"] == "cuda":
        draw_cuda(machine, rows, out)
        return
    threads = min(row["threads"] for row in rows)
    rows = [row for row in rows if row["threads"] == threads]
    dtypes = [dtype for dtype in TITLES if any(f"/{dtype}/" in row["case"] for row in rows)]
    figure, panels = pyplot.subplots(
        1, len(dtypes), figsize=(9, 4.4), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, dtype in zip(panels[0], dtypes):
        draw_panel(axes, rows, dtype)
    panels[0][0].set_ylabel("milliseconds")
    lines = panels[0][0].get_lines()
    figure.legend(handles=lines, loc="outside upper center", ncols=len(lines), frameon=False)
    figure.supxlabel(caption(machine, rows, threads), fontsize="small", color="0.35")
    save(figure, out)


Draw = Callable[[dict[str, Any], list[dict[str, Any]], Path], None]


def draw_file(program: str, document: str | None, draw: Draw, argv: list[str] | None) -> int:
    """The program that draws FILE.json, given the machine's line and others, to --out. The exit
    status is 1 if draw() raises ValueError."""
    args = drawing_parser(program, document).parse_args(argv)
    matplotlib.use("svg" if args.out.suffix == ".svg" else "agg")
    matplotlib.rcParams["svg.hashsalt"] = "fdma"  # the same ids in every run
    machine, *rows = [json.loads(line) for line in args.json.read_text().splitlines()]
    try:
        draw(machine, rows, args.out)
    except ValueError as error:
        print(f"{program}_picture.py: {args.json}: {error}", file=sys.stderr)
        return 1
    return 0


def main(argv: list[str] | None = None) -> int:
    return draw_file("peers", __doc__, draw, argv)


if __name__ == "__main__":
    sys.exit(main())
