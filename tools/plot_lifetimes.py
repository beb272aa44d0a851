#!/usr/bin/env python3
"""Draw when keys are live, and in which slots: docs/figures/lifetimes.svg.

Reads a safetensors file with v, dt_proj and a, scores and selects with flash_dmattn (causal scope)
and draws one kv head by Selection.plot(). Left: each kept key is a bar over the positions at which
it is live. Right: the same bars, in the row of their slot. Both colour a key by its index, and show
the keys of the busiest slot in red.

Run it, from the repository's root, with flash_dmattn installed (or PYTHONPATH=python and
FDMA_LIBRARY=build/libfdma.so):

    pip install matplotlib safetensors
    python tools/plot_lifetimes.py
"""

from __future__ import annotations

import argparse
import sys
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
from flash_dmattn import pictures
from matplotlib import pyplot
from safetensors.torch import load_file


def read_selection(path: Path, window: int) -> flash_dmattn.Selection:
    tensors = load_file(path)
    score, _ = flash_dmattn.score(tensors["v"], tensors["dt_proj"], tensors["a"])
    return flash_dmattn.select(score, window)


def draw(selection: flash_dmattn.Selection, head: int, out: Path) -> None:
    slot = selection.slot[0, head]
    kv_len, busiest = len(slot), int(slot[slot >= 0].mode().values)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 5), layout="constrained")
    selection.plot(kv_head=head, slot=busiest, axes=left)
    selection.plot(kv_head=head, rows="slots", slot=busiest, axes=right)
    left.set_title(f"lifetimes: {left.get_title()}")
    right.set_title(f"{right.get_title().replace('the', 'the same', 1)} (red: slot {busiest})")
    limits = matplotlib.colors.Normalize(0, kv_len / pictures.LIGHTEST)
    scale = matplotlib.cm.ScalarMappable(limits, pictures.COLOURS)
    figure.colorbar(scale, ax=right, label="key j").ax.set_ylim(0, kv_len)
    bare = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # so that the bytes repeat
    figure.savefig(out, metadata=bare if out.suffix == ".svg" else None)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    matplotlib.use("svg" if args.out.suffix == ".svg" else "agg")
    matplotlib.rcParams["svg.hashsalt"] = "fdma"  # ids that do not change from run to run
    draw(read_selection(args.data, args.window), args.head, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
