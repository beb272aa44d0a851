#!/usr/bin/env python3
"""The command `picture`: draws results of peers, suite, ranks and model_step."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

if __name__ == "__main__":
    import bench

    bench.start("picture")

import matplotlib
import matplotlib.ticker
from commands import Disagreement
from matplotlib import pyplot

Row = Dict[str, Any]
Points = List[Tuple[float, float]]
COLOURS = {  # of Okabe and Ito's palette for the colour-blind
    "blue": "#0072B2",
    "sky": "#56B4E9",
    "orange": "#E69F00",
    "red": "#D55E00",
    "purple": "#CC79A7",
    "green": "#009E73",
}
GREY = {"fontsize": "small", "color": "0.35"}


def save(figure: pyplot.Figure, out: Path) -> None:
    bare = dict.fromkeys(
        ("Creator", "Date", "Format", "Type")
    )  # without metadata a drawing always has the same bytes
    figure.savefig(out, metadata=bare if out.suffix == ".svg" else None)


def plot(axes: pyplot.Axes, points: Points, label: str, colour: str, marker: str) -> None:
    xs, ys = zip(*points) if points else ((), ())
    axes.plot(xs, ys, color=COLOURS[colour], marker=marker, markersize=5, label=label)


def doubling(axes: pyplot.Axes, values: list[int], form: str = "", **options: Any) -> None:
    """An axis of lengths or ranks, with ticks at these values."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [format(value, form) for value in values], **options)


def add_grid(axes: pyplot.Axes) -> None:
    axes.grid(color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def add_legend(figure: pyplot.Figure, axes: pyplot.Axes) -> None:
    lines = axes.get_lines()
    figure.legend(handles=lines, loc="outside upper center", ncols=len(lines), frameon=False)


# ---- peers on the CPU ----

TITLES = {"f32": "float32", "bf16": "bfloat16"}
CASE = re.compile(r"forward/(?P<form>\w+)/(?P<dtype>\w+)/d\d+/n(?P<length>\d+)(/w(?P<window>\d+))?")


class Line(NamedTuple):
    form: str
    peer: str
    label: str
    colour: str
    marker: str


LINES = (
    Line("selected", "sdpa-masked", "SDPA, masked", "orange", "^"),
    Line("dense", "sdpa", "SDPA, dense", "purple", "s"),
    Line("dense", "fdma", "flash_dmattn, dense", "sky", "o"),
    Line("selected", "fdma", "flash_dmattn, selected", "blue", "D"),
)


def points_of(rows: list[Row], pattern: re.Pattern[str], **wanted: str) -> Points:
    """Pairs of a length and milliseconds, by increasing length, of the rows that have the wanted
    peer and parts of the case's name."""
    found = []
    for row in rows:
        case = pattern.fullmatch(row["case"])
        if case and wanted.items() <= {**case.groupdict(), "peer": row["peer"]}.items():
            found.append((int(case["length"]), row["ms"]))
    return sorted(found)


def draw_lines(axes: pyplot.Axes, lines: dict[Line, Points]) -> list[int]:
    """Milliseconds against length. Returns the lengths."""
    for line, points in lines.items():
        plot(axes, points, line.label, line.colour, line.marker)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    add_grid(axes)
    return sorted({length for points in lines.values() for length, _ in points})


def draw_cpu(machine: Row, rows: list[Row], out: Path) -> None:
    """The rows of the fewest threads."""
    threads = min(row["threads"] for row in rows)
    rows = [row for row in rows if row["threads"] == threads]
    dtypes = [dtype for dtype in TITLES if any(f"/{dtype}/" in row["case"] for row in rows)]
    figure, panels = pyplot.subplots(
        1, len(dtypes), figsize=(9, 4.4), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, dtype in zip(panels[0], dtypes):
        lines = {
            line: points_of(rows, CASE, form=line.form, dtype=dtype, peer=line.peer)
            for line in LINES
        }
        doubling(axes, draw_lines(axes, lines))
        axes.minorticks_off()
        axes.set_title(TITLES[dtype])
        axes.set_xlabel("length (q_len = kv_len)")
    panels[0][0].set_ylabel("milliseconds")
    add_legend(figure, panels[0][0])
    windows = {case["window"] for row in rows if (case := CASE.fullmatch(row["case"]))} - {None}
    where = f"{machine['machine']}, {threads} thread{'s' * (threads > 1)}"
    what = ["causal, one head, head_dim 128", *(f"window {window}" for window in sorted(windows))]
    counted = "times include selection, not making the mask"
    words = f"{where}, PyTorch {machine['torch']}\n{', '.join(what)}; {counted}"
    figure.supxlabel(words, **GREY)
    save(figure, out)


# ---- peers on a CUDA device ----

CUDA_CASE = re.compile(
    r"(?P<kind>[\w-]+)/bf16(/b(?P<batch>\d+))?/h(?P<q_heads>\d+)g(?P<kv_heads>\d+)/d(?P<head_dim>\d+)"
    r"/n(?P<length>\d+)(/w(?P<window>\d+))?"
)
DRAWN_LENGTHS = re.compile(r"attention/bf16/h32g8/d128/n(?P<length>\d+)/w2048")
CUDA_LINES = (
    Line("attention", "flash", "FlashAttention-2, all keys", "green", "v"),
    Line("attention", "cudnn", "cuDNN, all keys", "purple", "s"),
    Line("attention", "fdma", "FlashDMA, 2,048 keys a query", "blue", "D"),
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


def words_of(row: Row) -> str:
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


def lowest_fraction(row: Row) -> float | None:
    """The least of_dense that the row's goal allows, if it has such a goal."""
    if not row["goal"]:
        return None
    _, bar, *words = row["goal"].split()
    if words[:2] == ["times", "cudnn"]:
        return float(bar) * row["of_dense"] / row["times_cudnn"]
    return float(bar) if words[:2] == ["of", "dense"] else None


def draw_fractions(rows: list[Row]) -> pyplot.Figure:
    shown = [row for row in rows if row["peer"].startswith("fdma") and row["of_dense"] is not None]
    heights = range(len(shown))
    size = (9, 1.2 + 0.18 * len(shown))
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    axes.barh(heights, [row["of_dense"] for row in shown], color=COLOURS["blue"])
    for height, row in zip(heights, shown):
        if (bar := lowest_fraction(row)) is not None:
            mark = [height - 0.4, height + 0.4]
            axes.plot([bar, bar], mark, color=COLOURS["red"], linewidth=2)
    axes.set_yticks(heights, [words_of(row) for row in shown], fontsize="small")
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.axvline(1, color="0.5", linewidth=0.8)
    axes.set_xlabel("useful FLOP/s, of dense attention's")
    return figure


def draw_cuda(machine: Row, rows: list[Row], out: Path) -> None:
    times, axes = pyplot.subplots(figsize=(9, 4.4), layout="constrained")
    lines = {line: points_of(rows, DRAWN_LENGTHS, peer=line.peer) for line in CUDA_LINES}
    doubling(axes, draw_lines(axes, lines), ",")
    axes.set_xlabel("length of the sequence")
    axes.set_ylabel("milliseconds")
    axes.legend(frameon=False)
    for figure, where in (
        (times, out),
        (draw_fractions(rows), out.with_name(f"{out.stem}-cases{out.suffix}")),
    ):
        figure.axes[0].spines[["top", "right"]].set_visible(False)
        words = f"{machine['machine']}, PyTorch {machine['torch']}, bfloat16, causal"
        if figure is times:
            words += "; forward, selection included; 32 heads on 8, head_dim 128"
        figure.supxlabel(words, **GREY)
        save(figure, where)


def draw_peers(machine: Row, rows: list[Row], out: Path) -> None:
    (draw_cuda if machine["device"] == "cuda" else draw_cpu)(machine, rows, out)


# ---- suite ----

STYLES = {
    ("fdma", "forward"): ("flash_dmattn, forward", "blue", "D"),
    ("fdma", "training"): ("flash_dmattn, training", "sky", "o"),
    ("dense", "forward"): ("SDPA, forward", "red", "s"),
    ("dense", "training"): ("SDPA, training", "orange", "^"),
}


def rows_of(rows: list[Row], item: str, peer: str, kind: str) -> list[Row]:
    """The rows with times of fdma, or of the fastest dense peer in each setting."""
    timed = [row for row in rows if (row["item"], row["kind"]) == (item, kind) and "ms" in row]
    if peer == "fdma":
        return [row for row in timed if row["peer"] == "fdma"]
    fastest: dict[str, Row] = {}
    for row in timed:
        if row["peer"].startswith("dense-"):
            best = fastest.setdefault(row["case"], row)
            fastest[row["case"]] = min(best, row, key=lambda one: one["ms"])
    return list(fastest.values())


def speed_up(rows: list[Row], peer: str, kind: str) -> Points:
    found = rows_of(rows, "length", peer, kind) if peer == "fdma" else []
    return sorted((row["length"], row["times_dense"]) for row in found if "times_dense" in row)


def memory(rows: list[Row], peer: str, kind: str) -> Points:
    found = rows_of(rows, "length", peer, kind)
    return sorted((row["length"], row["peak_bytes"] / 2**20) for row in found)


def throughput(rows: list[Row], peer: str, kind: str) -> Points:
    found = rows_of(rows, "density", peer, kind)
    return sorted((1 - row["density"], row["tokens_per_second"]) for row in found)


def suite_caption(machine: Row, rows: list[Row]) -> str:
    row = next(row for row in rows if row["item"] in ("length", "density"))
    dtype = row["case"].split("/")[2]
    heads = "{q_heads} heads, {kv_heads} kv heads, head_dim {head_dim}".format(**row)
    windows = {row["window"] for row in rows if row["item"] == "length"}
    at = "".join(f", window {window} against length" for window in windows)
    count = row["threads"]
    threads = f", {count} thread{'s' * (count > 1)}" if machine["device"] == "cpu" else ""
    return f"{machine['machine']}{threads}, PyTorch {machine['torch']}\n{dtype}, {heads}{at}"


PANELS = (
    (speed_up, "length", "times as fast as dense"),
    (memory, "length", "MiB beside inputs"),
    (throughput, "sparsity, 1 - density", "tokens a second"),
)


def draw_suite(machine: Row, rows: list[Row], out: Path) -> None:
    """Raises Disagreement if a curve has no points at all."""
    for curve, _, title in PANELS:
        if not any(curve(rows, *which) for which in STYLES):
            raise Disagreement(f"there is nothing to draw of: {title}")
    figure, panels = pyplot.subplots(1, len(PANELS), figsize=(13, 4.4), layout="constrained")
    for axes, (curve, label, title) in zip(panels, PANELS):
        for which, style in STYLES.items():
            if points := curve(rows, *which):
                plot(axes, points, *style)
        axes.set_xlabel(label)
        axes.set_title(title)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:,.12g}")
        axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        add_grid(axes)
    lengths = sorted({row["length"] for row in rows if row["item"] == "length"})
    for axes in panels[:2]:
        doubling(axes, lengths, ",", rotation=45, ha="right")
        axes.minorticks_off()
    panels[0].set_yscale("linear")
    panels[0].set_ylim(bottom=0)
    panels[0].axhline(1, color="0.5", linewidth=0.8)
    add_legend(figure, panels[1])
    figure.supxlabel(suite_caption(machine, rows), **GREY)
    save(figure, out)


# ---- ranks ----

SCALING = {
    "weak": "weak scaling, {:,} tokens a rank",
    "strong": "strong scaling, {:,} tokens in all",
}


def efficiencies(rows: list[Row], item: str) -> Points:
    """Pairs of a number of ranks and an efficiency. Teams that were not run have none."""
    drawn = [row for row in rows if row["item"] == item and "efficiency" in row]
    return sorted((row["ranks"], row["efficiency"]) for row in drawn)


def draw_scaling(axes: pyplot.Axes, rows: list[Row], item: str) -> None:
    drawn = efficiencies(rows, item)
    keys = {row["keys"] for row in rows if row["item"] == item}
    axes.set_title(SCALING[item].format(*keys))
    plot(axes, drawn, "", "blue", "D")
    for ranks, efficiency in drawn:
        offset = {"textcoords": "offset points", "xytext": (0, -14), "ha": "center"}
        axes.annotate(f"{efficiency:.3f}", (ranks, efficiency), fontsize="small", **offset)
    axes.axhline(1, color="0.5", linewidth=0.8)
    doubling(axes, [ranks for ranks, _ in drawn])
    axes.minorticks_off()
    axes.margins(x=0.1)
    axes.set_ylim(0, max(1.1, *(1.1 * efficiency for _, efficiency in drawn)))
    axes.set_xlabel("ranks")
    add_grid(axes)


def draw_ranks(machine: Row, rows: list[Row], out: Path) -> None:
    items = [item for item in SCALING if efficiencies(rows, item)]
    if not items:
        raise Disagreement("there is no efficiency of weak or strong scaling to draw")
    figure, panels = pyplot.subplots(
        1, len(items), figsize=(9, 4), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, item in zip(panels[0], items):
        draw_scaling(axes, rows, item)
    panels[0][0].set_ylabel("efficiency")
    sizes = "{dtype}, {q_heads} heads, {kv_heads} kv heads, head_dim {head_dim}, window {window}"
    recent = f", recent {machine['recent']}" if machine["recent"] else ""
    where = f"{machine['machine']}, PyTorch {machine['torch']}"
    words = f"{where}\n{sizes.format(**machine)}{recent}; forward and backward of one layer"
    figure.supxlabel(words, **GREY)
    save(figure, out)


# ---- model_step ----

STEP_PEERS = {
    "fdma": ("FlashDMA", "blue", "D"),
    "sliding": ("FlashDMA, sliding window", "sky", "o"),
    "sliding-flash-attn": ("flash-attn, sliding window", "green", "v"),
    "dense": ("all keys", "purple", "s"),
}
STEPS = (
    ("training", "length", "ms", "milliseconds"),
    ("decoding", "context", "us", "microseconds"),
)


def step_points(rows: list[Row], part: str, peer: str, size: str, time: str) -> Points:
    """Pairs of a size and a time, of the first layout of the file with batch 1, not compiled."""
    chosen = {"layout": rows[0]["layout"], "batch": 1, "peer": peer}
    return sorted(
        (row[size], row[time])
        for row in rows
        if row["case"].startswith(part) and time in row and chosen.items() <= row.items()
        if row.get("mode", "eager") == "eager"
    )


def draw_model_step(machine: Row, rows: list[Row], out: Path) -> None:
    """Raises Disagreement if there is no time to draw."""
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 4.4), layout="constrained")
    is_drawn = False
    for axes, (part, size, field, unit) in zip(panels, STEPS):
        lines = {
            Line(part, peer, *style): step_points(rows, part, peer, size, field)
            for peer, style in STEP_PEERS.items()
        }
        drawn = {line: points for line, points in lines.items() if points}
        doubling(axes, draw_lines(axes, drawn), ",", rotation=45, ha="right")
        axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        axes.minorticks_off()
        axes.set_title(f"{part}, a step")
        axes.set_xlabel(f"{size}, tokens")
        axes.set_ylabel(unit)
        if drawn:
            axes.legend(frameon=False)
            is_drawn = True
    if not is_drawn:
        raise Disagreement("there is no time of batch 1 to draw")
    heads, dim = rows[0]["layout"].split("/d")
    q_heads, kv_heads = heads[1:].split("g")
    sizes = f"{q_heads} heads on {kv_heads}, head_dim {dim}, batch 1, window {rows[0]['window']}"
    where = f"{machine['machine']}, PyTorch {machine['torch']}"
    figure.supxlabel(f"{where}\n{sizes} and as many newest keys; training in eager mode", **GREY)
    save(figure, out)


# ---- the command ----


def run(args: argparse.Namespace) -> int:
    matplotlib.use("svg" if args.out.suffix == ".svg" else "agg")
    matplotlib.rcParams["svg.hashsalt"] = "fdma"  # the same ids in every run
    machine, *rows = [json.loads(line) for line in args.json.read_text().splitlines()]
    draw: Callable[[Row, list[Row], Path], None] = draw_peers
    if rows and "layout" in rows[0]:
        draw = draw_model_step
    elif rows and "item" in rows[0]:
        draw = draw_ranks if "ranks" in rows[0] else draw_suite
    try:
        draw(machine, rows, args.out)
    except Disagreement as error:
        raise Disagreement(f"{args.json}: {error}") from None
    return 0
