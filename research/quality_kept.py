#!/usr/bin/env python3
"""Draw which keys a run of research/quality.py keeps.

    research/quality_kept.py OUT/NAME.json --to FILE.svg [--heads LAYER.HEAD ...] [--begin BYTE]
    research/quality_kept.py OUT/*.json --run NAME --to FILE.svg

Above, a line for each layer and kv head. Left: positions of the keys that the last query of a
held-out text keeps. Right: the fraction of the bytes of recalled values that are still kept at
their question, by distance. Below, for each head of --heads, an excerpt of the text with the kept
bytes of the head marked; the end of a line is drawn as an arrow. The default of --heads is the head
that keeps most values at the greatest distance, and the default of --begin is the excerpt in which
these heads keep most bytes by score.
Exit status: 0 done; 1 the run has no kept keys, head or bytes to draw; 2 bad usage.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import benchmarks_path  # noqa: F401
import program


def head_of(word: str) -> Head:
    layer, dot, kv_head = word.partition(".")
    if not (dot and layer.isdecimal() and kv_head.isdecimal()):
        raise argparse.ArgumentTypeError(f"is {word}, want LAYER.HEAD")
    return Head(int(layer), int(kv_head))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    head, _, _ = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=head, allow_abbrev=False)
    parser.add_argument("files", type=Path, nargs="+", help="that quality.py wrote")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE.svg")
    parser.add_argument("--run", metavar="NAME", help="of several runs, the one to draw")
    parser.add_argument("--heads", type=head_of, nargs="+", default=[], metavar="LAYER.HEAD")
    parser.add_argument("--begin", type=int, metavar="BYTE", help="first byte of the excerpt")
    options = parser.parse_args(arguments)
    if options.begin is not None and options.begin < 0:
        parser.error(f"--begin: is {options.begin}, want 0 or more")
    for path in options.files:
        if not path.is_file():
            parser.error(f"{path} is not a file")
    return options


if __name__ == "__main__":
    program.begin(parse)

import matplotlib
import numpy as np
from matplotlib import pyplot
from matplotlib.collections import PolyCollection
from picture import save
from quality_picture import label_of, read

COLOUR, GREY = "#0072B2", "#595959"
BIN = 32  # bytes of a cell on the left
COLUMNS, LINES = 122, 7  # of an excerpt
SIGNS = {"\n": "\u21b5", "\t": "\u21e5"}  # drawn for bytes that are not letters
# in points: a figure has 72 an inch
WIDTH, SIDE = 792.0, 8.0
HEAD_HEIGHT = 8.0  # of a line in the upper panels
LETTER, LINE = 10.0, 13.0  # size of a letter, height of a line
ADVANCE = 0.602 * LETTER  # width of a letter of DejaVu Sans Mono
BASE = 0.75  # of letters, below the upper end of their line, in lines
TITLE, AXIS, BAR = 22.0, 34.0, 8.0  # heights


class Head(NamedTuple):
    layer: int
    kv_head: int

    def __str__(self) -> str:
        return f"{self.layer}.{self.kv_head}"


class Kept:
    """The kept keys of a run. Raises ValueError if they were not measured."""

    def __init__(self, run: dict[str, Any]) -> None:
        found = run.get("final", {}).get("kept", {})
        if "last_query" not in found or not found["values"]:
            raise ValueError("has no kept keys, want a file of quality.py, of a run that has ended")
        settings = run["settings"]
        self.length = settings["length"]
        self.text: str = found["text"]
        layers = found["last_query"]
        self.layers, self.kv_heads = len(layers), len(layers[0])
        self.is_kept = np.zeros((self.layers, self.kv_heads, self.length), bool)
        for layer, heads in enumerate(layers):
            for kv_head, positions in enumerate(heads):
                self.is_kept[layer, kv_head, positions] = True
        own = settings.get("nope_recent")
        recent = settings["recent"] if own is None else own
        self.newest = recent if settings["form"].endswith("recent") else 0
        self.distances = [row["distance"] for row in found["values"]]
        rows = [row["by_head"] for row in found["values"]]
        self.values = np.array(rows).transpose(1, 2, 0)  # [layers, kv_heads, distances]

    def require(self, head: Head) -> None:
        if not (head.layer < self.layers and head.kv_head < self.kv_heads):
            last = Head(self.layers - 1, self.kv_heads - 1)
            raise ValueError(f"--heads: is {head}, want 0.0 to {last}")

    def best_head(self) -> Head:
        """The head that keeps most values at the greatest distance."""
        layer, kv_head = divmod(int(self.values[..., -1].argmax()), self.kv_heads)
        return Head(layer, kv_head)

    def densities(self) -> np.ndarray:
        """[heads, bins]: the fraction of the keys of a bin that are kept."""
        starts = np.arange(0, self.length, BIN)
        sizes = np.minimum(BIN, self.length - starts)
        counts = np.add.reduceat(self.is_kept.astype(float), starts, axis=2) / sizes
        return counts.reshape(-1, len(starts))

    def fullest(self, heads: list[Head], size: int) -> int:
        """The start of the `size` bytes that `heads` keep most of, without the newest keys."""
        by_score = sum(self.is_kept[head].astype(int) for head in heads)[: -self.newest or None]
        if len(by_score) <= size:
            return 0
        sums = np.concatenate([[0], np.cumsum(by_score)])
        return int((sums[size:] - sums[:-size]).argmax())


def add_panel(figure: pyplot.Figure, left: float, top: float, size: tuple[float, float]) -> Any:
    """Axes at a position from the upper left corner, in points."""
    height = 72 * figure.get_figheight()
    width, tall = size
    return figure.add_axes((left / WIDTH, 1 - (top + tall) / height, width / WIDTH, tall / height))


def add_bar(figure: pyplot.Figure, image: Any, left: float, top: float, width: float) -> None:
    """The colours of an image, and their meaning."""
    axes = add_panel(figure, left, top, (width, BAR))
    ticks = np.linspace(*image.get_clim(), 3)
    bar = figure.colorbar(image, cax=axes, orientation="horizontal", ticks=ticks)
    bar.outline.set_linewidth(0.5)
    bar.ax.set_xticklabels([f"{100 * tick:g} %" for tick in ticks], fontsize=9)


def draw_lines(axes: pyplot.Axes, cells: np.ndarray, most: float, kept: Kept, width: float) -> Any:
    """An image with a line for each head, `width` wide, and white lines between the layers."""
    rows = len(cells)
    extent = (0, width, rows, 0)
    colours = {"cmap": "Blues", "vmin": 0, "vmax": most}
    image = axes.imshow(cells, aspect="auto", interpolation="nearest", extent=extent, **colours)
    for row in range(kept.kv_heads, rows, kept.kv_heads):
        axes.axhline(row, color="white", linewidth=1.5)
        axes.axhline(row, color="0.75", linewidth=0.5)
    for spine in axes.spines.values():
        spine.set_linewidth(0.5)
    return image


def draw_heads(figure: pyplot.Figure, kept: Kept, heads: list[Head]) -> float:
    """The upper panels. Returns their height in points."""
    rows = kept.layers * kept.kv_heads
    tall, left, width = rows * HEAD_HEIGHT, 62.0, 500.0
    axes = add_panel(figure, left, TITLE, (width, tall))
    axes.set_title("keys that the last query of a text keeps", fontsize=11)
    image = draw_lines(axes, kept.densities(), 0.5, kept, kept.length)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("position of the key")
    middles = [(layer + 0.5) * kept.kv_heads for layer in range(kept.layers)]
    axes.set_yticks(middles, [f"layer {layer}" for layer in range(kept.layers)])
    axes.tick_params(axis="y", length=0)
    below = TITLE + tall + AXIS
    add_bar(figure, image, left, below + 6, 150)
    across = (left + 165) / WIDTH
    down = (below + 14) / (72 * figure.get_figheight())
    figure.text(across, 1 - down, f"of {BIN} keys side by side are kept", fontsize=10)

    left, width = left + width + 44, 166.0
    axes = add_panel(figure, left, TITLE, (width, tall))
    axes.set_title("bytes of values still kept", fontsize=11)
    cells = kept.values.reshape(rows, -1)
    image = draw_lines(axes, cells, 1.0, kept, len(kept.distances))
    middles = [number + 0.5 for number in range(len(kept.distances))]
    axes.set_xticks(middles, [f"{distance:,}" for distance in kept.distances], fontsize=8)
    axes.set_xlabel("bytes from statement to question")
    drawn = [head.layer * kept.kv_heads + head.kv_head + 0.5 for head in heads]
    axes.set_yticks(drawn, [f"{head} \u25b8" for head in heads])
    axes.tick_params(axis="y", length=0, labelcolor=COLOUR)
    add_bar(figure, image, left, below + 6, width)
    return below + 6 + BAR + 22


def draw_excerpt(axes: pyplot.Axes, text: str, is_kept: np.ndarray) -> None:
    """Letters of kept bytes are white on colour, the others grey."""
    axes.set_xlim(0, COLUMNS)
    axes.set_ylim(LINES, 0)
    axes.axis("off")
    style = {"family": "DejaVu Sans Mono", "fontsize": LETTER, "parse_math": False}
    boxes = []
    for line in range(LINES):
        begin = line * COLUMNS
        signs = [SIGNS.get(sign, sign) for sign in text[begin : begin + COLUMNS]]
        words = "".join(sign if sign.isprintable() else "\u00b7" for sign in signs)
        axes.text(0, line + BASE, words, color=GREY, zorder=1, **style)
        marked = is_kept[begin : begin + len(words)]
        edges = np.flatnonzero(np.diff(np.concatenate([[0], marked, [0]])))
        for left, right in edges.reshape(-1, 2):
            low = line + 0.98  # leaves a gap to the box below
            boxes.append([(left, line), (right, line), (right, low), (left, low)])
            axes.text(left, line + BASE, words[left:right], color="white", zorder=3, **style)
    axes.add_collection(PolyCollection(boxes, facecolors=COLOUR, linewidths=0, zorder=2))


def draw(name: str, run: dict[str, Any], heads: list[Head], begin: int | None) -> pyplot.Figure:
    kept = Kept(run)
    heads = heads or [kept.best_head()]
    for head in heads:
        kept.require(head)
    size = COLUMNS * LINES
    begin = kept.fullest(heads, size) if begin is None else begin
    if begin >= kept.length:
        raise ValueError(f"--begin: is {begin}, want 0 to {kept.length - 1}")
    upper = TITLE + kept.layers * kept.kv_heads * HEAD_HEIGHT + AXIS + BAR + 28
    below = TITLE + LINES * LINE
    caption = textwrap.wrap(f"{name}; the keys of a query: {label_of(run)}", COLUMNS)
    height = upper + len(heads) * (below + 4) + 10 + LINE * len(caption)
    figure = pyplot.figure(figsize=(WIDTH / 72, height / 72))
    top = draw_heads(figure, kept, heads)
    for head in heads:
        left = (WIDTH - COLUMNS * ADVANCE) / 2
        axes = add_panel(figure, left, top + TITLE, (COLUMNS * ADVANCE, LINES * LINE))
        end = min(begin + size, kept.length)
        fraction = kept.is_kept[head][begin:end].mean()
        words = f"layer {head.layer}, kv head {head.kv_head} keeps {100 * fraction:.0f} % of these"
        words += f" bytes, positions {begin:,} to {end - 1:,}"
        axes.set_title(words, fontsize=11, loc="left", color=COLOUR)
        draw_excerpt(axes, kept.text[begin:end], kept.is_kept[head][begin:end])
        top += below + 4
    lines = {"ha": "center", "va": "bottom", "fontsize": "small", "color": "0.35"}
    figure.text(0.5, 4 / height, "\n".join(caption), **lines)
    return figure


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    runs = read(options.files)
    if options.run is None and len(runs) > 1:
        print(f"--run: is not given, want one of {', '.join(runs)}", file=sys.stderr)
        sys.exit(2)
    name = options.run or next(iter(runs))
    if name not in runs:
        sys.exit(f"--run: {name} is not in the files, want one of {', '.join(runs)}")
    matplotlib.use("svg" if options.to.suffix == ".svg" else "agg")
    matplotlib.rcParams["svg.hashsalt"] = "fdma"  # the same ids in every run
    matplotlib.rcParams["savefig.dpi"] = 216  # of the images of the upper panels
    try:
        save(draw(name, runs[name], options.heads, options.begin), options.to)
    except ValueError as error:
        sys.exit(f"quality_kept.py: {name}: {error}")


if __name__ == "__main__":
    main()
