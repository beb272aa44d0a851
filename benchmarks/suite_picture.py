#!/usr/bin/env python3
"""Draw the curves of a file that benchmarks/suite.py wrote.

    benchmarks/suite_picture.py FILE.json --out FILE.svg

Left: the speed of a call over dense attention's, against length. Middle: the memory of a call in
addition to its inputs, against length. Right: tokens a second against sparsity, the fraction of
visible keys that are not kept. Dense attention is SDPA by its fastest back end.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import program
from arguments import drawing_parser

if __name__ == "__main__":
    program.begin(drawing_parser("suite", __doc__).parse_args)

import matplotlib.ticker
from matplotlib import pyplot
from peers_picture import draw_file, save

Row = dict[str, Any]
Points = list[tuple[float, float]]
STYLES = {  # colours from Okabe and Ito's palette for the colour-blind
    ("fdma", "forward"): {"color": "#0072B2", "marker": "D", "label": "flash_dmattn, forward"},
    ("fdma", "training"): {"color": "#56B4E9", "marker": "o", "label": "flash_dmattn, training"},
    ("dense", "forward"): {"color": "#D55E00", "marker": "s", "label": "SDPA, forward"},
    ("dense", "training"): {"color": "#E69F00", "marker": "^", "label": "SDPA, training"},
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
    if peer != "fdma":
        return []
    found = rows_of(rows, "length", peer, kind)
    return sorted((row["length"], row["times_dense"]) for row in found if "times_dense" in row)


def memory(rows: list[Row], peer: str, kind: str) -> Points:
    found = rows_of(rows, "length", peer, kind)
    return sorted((row["length"], row["peak_bytes"] / 2**20) for row in found)


def throughput(rows: list[Row], peer: str, kind: str) -> Points:
    found = rows_of(rows, "density", peer, kind)
    return sorted((1 - row["density"], row["tokens_per_second"]) for row in found)


def draw_panel(axes: pyplot.Axes, rows: list[Row], curve: Any, labels: tuple[str, str]) -> None:
    for (peer, kind), style in STYLES.items():
        if points := curve(rows, peer, kind):
            axes.plot(*zip(*points), markersize=5, **style)
    axes.set_xlabel(labels[0])
    axes.set_title(labels[1])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,.12g}")
    axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axes.grid(color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def caption(machine: Row, rows: list[Row]) -> str:
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


def draw(machine: Row, rows: list[Row], out: Path) -> None:
    """Raises ValueError if a curve has no points at all."""
    for curve, _, title in PANELS:
        if not any(curve(rows, *which) for which in STYLES):
            raise ValueError(f"there is nothing to draw of: {title}")
    figure, panels = pyplot.subplots(1, len(PANELS), figsize=(13, 4.4), layout="constrained")
    for axes, (curve, *labels) in zip(panels, PANELS):
        draw_panel(axes, rows, curve, labels)
    lengths = sorted({row["length"] for row in rows if row["item"] == "length"})
    for axes in panels[:2]:
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=45, ha="right")
        axes.minorticks_off()
    panels[0].set_yscale("linear")
    panels[0].set_ylim(bottom=0)
    panels[0].axhline(1, color="0.5", linewidth=0.8)
    handles = panels[1].get_lines()
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    figure.supxlabel(caption(machine, rows), fontsize="small", color="0.35")
    save(figure, out)


def main(argv: list[str] | None = None) -> int:
    return draw_file("suite", __doc__, draw, argv)


if __name__ == "__main__":
    sys.exit(main())
