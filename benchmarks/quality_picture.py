#!/usr/bin/env python3
"""Draw the runs of benchmarks/quality.py.

    benchmarks/quality_picture.py OUT/*.json --to FOLDER [--pairs 8]
    benchmarks/quality_picture.py benchmarks/results/quality-cuda.json --to FOLDER --runs NAME...

The files are those of quality.py, or one that quality_results.py wrote. It writes
quality-losses.svg (held-out loss against steps, seconds of training and position),
quality-recall.svg (accuracy against distance, passkeys against depth, loss against the keys of a
query at test time) and, for each file of quality.py whose queries keep some of the keys,
quality-kept-NAME.svg (the keys that the last query of a text keeps, for each layer and kv head).
Runs of the same form have the same colour, and different lines if their labels differ.
Exit status: 0 done; 1 a run has no evaluation, or is not there; 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib import pyplot
from peers_picture import save
from quality_model import FORMS

COLOURS = dict(
    zip(FORMS, ("#000000", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00"))
)  # Okabe and Ito's
PASSKEY_GROUPS = 8  # of depths
LINES = ("-", "--", ":", "-.")  # of runs of one form
Runs = dict[str, dict[str, Any]]


def read(paths: list[Path]) -> Runs:
    """The runs of files, by their names."""
    runs: Runs = {}
    for path in paths:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        if len(lines) == 1:
            runs[path.stem] = lines[0]
        else:  # of a joined file the first one is the machine
            runs.update((line["run"], line) for line in lines[1:])
    return runs


def label_of(run: dict[str, Any]) -> str:
    """What a query keeps, and what else is not the default of quality.py."""
    settings = run["settings"]
    form, keys, recent = settings["form"], settings["keys"], settings["recent"]
    if form == "dense":
        return "dense"
    if form == "sliding":
        return f"{keys} newest"
    how = "at random" if form.startswith("random") else "by score"
    if form.endswith("recent"):
        label = f"{keys - recent} {how}, {recent} newest"
    else:
        label = f"{keys} {how}"
    if settings["bias_form"] != "exp":
        label += f", {settings['bias_form']} bias"
    return label


def lines_of(runs: Runs) -> dict[str, str]:
    """A line style for each label."""
    styles: dict[str, str] = {}
    of_form: dict[str, int] = {}
    for run in runs.values():
        label, form = label_of(run), run["settings"]["form"]
        if label not in styles:
            number = of_form[form] = of_form.get(form, -1) + 1
            styles[label] = LINES[number % len(LINES)]
    return styles


def colour_of(run: dict[str, Any]) -> str:
    return COLOURS[run["settings"]["form"]]


def plot(axes: pyplot.Axes, runs: Runs, points: Any, labels: tuple[str, str]) -> None:
    """A line for each run through points(run): pairs of x and y."""
    styles = lines_of(runs)
    for run in runs.values():
        drawn, label = points(run), label_of(run)
        if drawn:
            style = {"color": colour_of(run), "linestyle": styles[label], "linewidth": 1.2}
            axes.plot(*zip(*drawn), label=label, **style)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.grid(color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def add_legend(figure: pyplot.Figure, axes: pyplot.Axes) -> None:
    """Below the panels, an entry for each label."""
    handles = {line.get_label(): line for line in axes.get_lines()}
    columns = min(4, len(handles))
    figure.legend(
        handles=handles.values(), loc="outside lower center", ncols=columns, frameon=False
    )


def by_position(run: dict[str, Any]) -> list[tuple[float, float]]:
    """At the middle of each bin of positions."""
    means, length = run["final"]["by_position"], run["settings"]["length"]
    return [((bin + 0.5) * length / len(means), mean) for bin, mean in enumerate(means)]


def draw_losses(runs: Runs) -> pyplot.Figure:
    figure, panels = pyplot.subplots(1, 3, figsize=(11, 4), layout="constrained")

    def against(column: str) -> Any:
        return lambda run: [(row[column], row["bits"]) for row in run["held_out"]]

    bits = "bits per byte of held-out text"
    plot(panels[0], runs, against("step"), ("training steps", bits))
    plot(panels[1], runs, against("seconds"), ("seconds of training", ""))
    plot(panels[2], runs, by_position, ("position in the sequence", ""))
    least = min(row["bits"] for run in runs.values() for row in run["held_out"])
    for axes in panels[:2]:
        axes.set_ylim(least - 0.05, least + 1)
    add_legend(figure, panels[0])
    return figure


def draw_recall(runs: Runs, pairs: int) -> pyplot.Figure:
    figure, panels = pyplot.subplots(1, 3, figsize=(11, 4), layout="constrained")

    def recalled(run: dict[str, Any]) -> list[tuple[int, float]]:
        rows = run["final"]["recall"]
        return [(row["distance"], row["accuracy"]) for row in rows if row["pairs"] == pairs]

    def passkeys(run: dict[str, Any]) -> list[tuple[float, float]]:
        """At the middle of each group of depths, which have few questions each."""
        found = [row["accuracy"] for row in run["final"]["passkey"]]
        size = max(1, len(found) // PASSKEY_GROUPS)
        firsts = range(0, len(found), size)
        return [
            ((first + (size - 1) / 2) / len(found), fmean(found[first : first + size]))
            for first in firsts
        ]

    def windows(run: dict[str, Any]) -> list[tuple[int, float]]:
        return [(row["keys"], row["bits"]) for row in run["final"]["by_window"]]

    plot(panels[0], runs, recalled, ("distance, bytes", f"values recalled, of {pairs} pairs"))
    plot(panels[1], runs, passkeys, ("depth of the passkey", "passkeys recalled"))
    plot(panels[2], runs, windows, ("keys of a query at test time", "bits per byte"))
    for axes in panels[:2]:
        axes.set_ylim(-0.03, 1.03)
    for axes in (panels[0], panels[2]):
        axes.set_xscale("log", base=2)
    add_legend(figure, panels[0])
    return figure


def draw_kept(name: str, run: dict[str, Any]) -> pyplot.Figure:
    """A line of marks for each layer and kv head."""
    heads = [head for layer in run["final"]["kept"]["last_query"] for head in layer]
    of_layer = len(heads) // len(run["final"]["kept"]["last_query"])
    figure, axes = pyplot.subplots(figsize=(11, 1 + 0.16 * len(heads)), layout="constrained")
    axes.eventplot(heads, lineoffsets=range(len(heads)), linewidths=0.3, colors=colour_of(run))
    axes.set_yticks(range(0, len(heads), of_layer), range(len(heads) // of_layer))
    axes.invert_yaxis()
    axes.set_ylabel("layer")
    axes.set_xlabel(f"position of the key ({name}: kept by the last query)")
    axes.set_xlim(0, run["settings"]["length"])
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    head, _, _ = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=head)
    parser.add_argument("files", type=Path, nargs="+", help="of quality.py or quality_results.py")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--runs", nargs="+", metavar="NAME", help="in this order (all)")
    parser.add_argument("--pairs", type=int, default=8, help="of the recall that is drawn (8)")
    options = parser.parse_args()
    runs = read(options.files)
    for name in options.runs or ():
        if name not in runs:
            sys.exit(f"--runs: {name} is not in the files, want one of {', '.join(runs)}")
    runs = {name: runs[name] for name in options.runs or runs}
    for name, run in runs.items():
        if "final" not in run:
            sys.exit(f"{name}: has no evaluation, want one of a run that has ended")
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fdma"  # the same ids in every run
    options.to.mkdir(parents=True, exist_ok=True)
    save(draw_losses(runs), options.to / "quality-losses.svg")
    save(draw_recall(runs, options.pairs), options.to / "quality-recall.svg")
    for name, run in runs.items():
        if run["settings"]["form"] != "dense" and "last_query" in run["final"]["kept"]:
            save(draw_kept(name, run), options.to / f"quality-kept-{name}.svg")


if __name__ == "__main__":
    main()
