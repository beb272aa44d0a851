#!/usr/bin/env python3
"""Draw the efficiency of many ranks from a file that benchmarks/ranks.py wrote.

    benchmarks/ranks_picture.py FOLDER/ranks.json --out FILE.svg

Left: weak scaling, with the same number of tokens on each rank for any number of ranks. Right:
strong scaling, with one sequence over all ranks. Efficiency 1 means that a team is as fast as its
devices would be alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import program
from arguments import drawing_parser

if __name__ == "__main__":
    program.begin(drawing_parser("ranks", __doc__).parse_args)

from matplotlib import pyplot
from peers_picture import draw_file, save

PANELS = {
    "weak": "weak scaling, {:,} tokens a rank",
    "strong": "strong scaling, {:,} tokens in all",
}


def points(rows: list[dict[str, Any]], item: str) -> list[tuple[int, float]]:
    """Pairs of a number of ranks and an efficiency. Teams that were not run have none."""
    drawn = [row for row in rows if row["item"] == item and "efficiency" in row]
    return sorted((row["ranks"], row["efficiency"]) for row in drawn)


def draw_panel(axes: pyplot.Axes, rows: list[dict[str, Any]], item: str) -> None:
    drawn = points(rows, item)
    keys = {row["keys"] for row in rows if row["item"] == item}
    axes.set_title(PANELS[item].format(*keys))
    axes.plot(*zip(*drawn), color="#0072B2", marker="D", markersize=5)
    for ranks, efficiency in drawn:
        offset = {"textcoords": "offset points", "xytext": (0, -14), "ha": "center"}
        axes.annotate(f"{efficiency:.3f}", (ranks, efficiency), fontsize="small", **offset)
    axes.axhline(1, color="0.5", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks([ranks for ranks, _ in drawn], [str(ranks) for ranks, _ in drawn])
    axes.minorticks_off()
    axes.margins(x=0.1)
    axes.set_ylim(0, max(1.1, *(1.1 * efficiency for _, efficiency in drawn)))
    axes.set_xlabel("ranks")
    axes.grid(color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def caption(machine: dict[str, Any]) -> str:
    sizes = "{dtype}, {q_heads} heads, {kv_heads} kv heads, head_dim {head_dim}, window {window}"
    recent = f", recent {machine['recent']}" if machine["recent"] else ""
    where = f"{machine['machine']}, PyTorch {machine['torch']}"
    return f"{where}\n{sizes.format(**machine)}{recent}; forward and backward of one layer"


def draw(machine: dict[str, Any], rows: list[dict[str, Any]], out: Path) -> None:
    items = [item for item in PANELS if points(rows, item)]
    if not items:
        raise ValueError("there is no efficiency of weak or strong scaling to draw")
    figure, panels = pyplot.subplots(
        1, len(items), figsize=(9, 4), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, item in zip(panels[0], items):
        draw_panel(axes, rows, item)
    panels[0][0].set_ylabel("efficiency")
    figure.supxlabel(caption(machine), fontsize="small", color="0.35")
    save(figure, out)


def main(argv: list[str] | None = None) -> int:
    return draw_file("ranks", __doc__, draw, argv)


if __name__ == "__main__":
    sys.exit(main())
