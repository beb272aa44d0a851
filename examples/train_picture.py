#!/usr/bin/env python3
"""Draw the losses in a file of `examples/train_text.py --json FILE` against steps and minutes.

train_text.py --picture draws them too; this script draws them again from the file:

    pip install matplotlib
    python examples/train_picture.py curves.json --out curves.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import program


def parse() -> argparse.Namespace:
    head, _, _ = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=head)
    parser.add_argument("curves", type=Path, help="a file that train_text.py --json wrote")
    parser.add_argument("--out", type=Path, required=True, help="the picture, .svg or .png")
    options = parser.parse_args()
    if not options.curves.is_file():
        parser.error(f"{options.curves} is not a file")
    return options


if __name__ == "__main__":
    program.begin(parse)

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes

COLOURS = {"selected": "#0072B2", "hybrid": "#009E73", "dense": "#CC79A7"}  # Okabe and Ito's
AXES = (("training steps", 0, 1.0), ("minutes of training", 1, 60.0))  # index and unit of x


def label_of(name: str, run: dict[str, Any]) -> str:
    if name == "dense":
        return f"dense: all {run['length']} bytes"
    last = f"all {run['length']}" if name == "hybrid" else run["keys"]
    return f"{name}: {run['sliding']} bytes, in the last layer {last}"


def draw_runs(axes: Axes, runs: dict[str, Any], index: int, unit: float) -> None:
    """Held-out losses as solid lines, and the losses of every training step as pale ones."""
    for name, run in sorted(runs.items(), reverse=True):
        for curve, alpha, width in (("train", 0.25, 0.8), ("held_out", 1.0, 1.5)):
            points = run[curve]
            label = label_of(name, run) if curve == "held_out" else None
            x, y = [point[index] / unit for point in points], [point[2] for point in points]
            axes.plot(x, y, color=COLOURS[name], label=label, alpha=alpha, linewidth=width)
    axes.grid(color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def draw(runs: dict[str, Any], out: Path) -> None:
    matplotlib.use("svg" if out.suffix == ".svg" else "agg")
    matplotlib.rcParams["svg.hashsalt"] = "fdma"  # the same ids in every run
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axes, (label, index, unit) in zip(panels, AXES):
        draw_runs(axes, runs, index, unit)
        axes.set_xlabel(label)
    panels[0].set_ylabel("bits per byte of held-out text\n(pale: of each training step)")
    panels[1].legend(frameon=False)
    names = sorted({run["text"] for run in runs.values()})
    figure.suptitle(f"A byte-level language model learns {', '.join(names)}", fontsize=10)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    pyplot.close(figure)


def main() -> None:
    options = parse()
    draw(json.loads(options.curves.read_text()), options.out)


if __name__ == "__main__":
    main()
