#!/usr/bin/env python3
"""Draw when keys are live, and in which slots: docs/figures/lifetimes.svg.

Reads a safetensors file with v, dt_proj and a, scores and selects with flash_dmattn (causal scope)
and draws one kv head. Left: each kept key is a bar over the positions at which it is live. Right:
the same bars, in the row of their slot. Both colour a key by its index, and show the keys of one
slot in red.

Run it, from the repository's root, with flash_dmattn installed (or PYTHONPATH=python and
FDMA_LIBRARY=build/libfdma.so):

    pip install matplotlib safetensors
    python tools/plot_lifetimes.py
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import program

ROOT = Path(__file__).resolve().parent.parent


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=ROOT / "examples/data/minilm.safetensors")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/figures/lifetimes.svg")
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--head", type=int, default=0, help="kv head")
    return parser.parse_args(argv)


if __name__ == "__main__":
    program.begin(parse)

import flash_dmattn
import matplotlib
from matplotlib import pyplot
from safetensors.torch import load_file

COLOURS = "viridis"  # early keys dark, late ones light: readable without colour vision
LIGHTEST = 0.92  # of the scale: its end would vanish on white
MARK = "#d62728"


@dataclass
class Lifetimes:
    """One kv head's selection: the positions of key j are range(j, expiry[j])."""

    expiry: list[int]
    slot: list[int]
    window: int

    def kept(self) -> list[int]:
        return [j for j, end in enumerate(self.expiry) if end > j]

    def busiest_slot(self) -> int:
        """The slot that holds the most keys, one after another."""
        slots = [self.slot[j] for j in self.kept()]
        return max(range(self.window), key=slots.count)


def read_lifetimes(path: Path, window: int, head: int) -> Lifetimes:
    tensors = load_file(path)
    score, _ = flash_dmattn.score(tensors["v"], tensors["dt_proj"], tensors["a"])
    selection = flash_dmattn.select(score, window)
    return Lifetimes(selection.expiry[0, head].tolist(), selection.slot[0, head].tolist(), window)


def draw_bars(
    axes: pyplot.Axes, life: Lifetimes, rows: list[int], marked: int, gap: str | None
) -> None:
    """Draws a bar for each kept key j in row rows[j], red for slot `marked`. gap: its outline."""
    colours = matplotlib.colormaps[COLOURS]
    for j in life.kept():
        in_slot = life.slot[j] == marked
        colour = MARK if in_slot else colours(LIGHTEST * j / len(rows))
        axes.broken_barh(
            [(j, life.expiry[j] - j)],
            (rows[j] - 0.5, 1.0),
            facecolor=colour,
            edgecolor=gap or colour,
            linewidth=1.0 if in_slot else 0.2,
            zorder=3 if in_slot else 2,
        )


def draw(life: Lifetimes, out: Path) -> None:
    kv_len, marked = len(life.expiry), life.busiest_slot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 5), layout="constrained")
    draw_bars(left, life, list(range(kv_len)), marked, gap=None)
    left.plot([0, kv_len], [0, kv_len], color="0.6", linewidth=0.8)
    left.set_title(f"lifetimes: {len(life.kept())} of {kv_len} keys are ever kept")
    left.set_ylabel("key j")
    draw_bars(right, life, life.slot, marked, gap="white")
    right.set_title(f"the same keys in their {life.window} slots (red: slot {marked})")
    right.set_ylabel("slot")
    right.set_ylim(life.window - 0.5, -0.5)
    left.set_ylim(kv_len, 0)
    for axes in (left, right):
        axes.set_xlim(0, kv_len)
        axes.set_xlabel("position p of the query")
    limits = matplotlib.colors.Normalize(0, kv_len / LIGHTEST)
    scale = matplotlib.cm.ScalarMappable(limits, COLOURS)
    figure.colorbar(scale, ax=right, label="key j").ax.set_ylim(0, kv_len)
    bare = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # so that the bytes repeat
    figure.savefig(out, metadata=bare if out.suffix == ".svg" else None)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    matplotlib.use("svg" if args.out.suffix == ".svg" else "agg")
    matplotlib.rcParams["svg.hashsalt"] = "fdma"  # ids that do not change from run to run
    draw(read_lifetimes(args.data, args.window, args.head), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
