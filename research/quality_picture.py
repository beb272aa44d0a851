#!/usr/bin/env python3
"""Draw the runs of research/quality.py.

    research/quality_picture.py OUT/*.json --to FOLDER [--pairs 8]
    research/quality_picture.py RESULTS.json --to FOLDER --runs NAME NAME=LABEL ...
    research/quality_picture.py RESULTS.json --readme FILE.svg --runs NAME=LABEL ...

The files come from quality.py, or one from quality_results.py. The program writes
quality-losses.svg (held-out loss against steps, seconds of training and position) and
quality-recall.svg (accuracy against distance, passkeys against depth, loss against the keys of a
query at test time), or with --readme one small picture (held-out loss against seconds of training,
accuracy against distance). Runs of the same label have the same line. A label names the keys that a
query keeps and the other unusual settings, unless --runs has another; --runs also orders the runs.
quality_kept.py draws the keys that a run keeps.
Exit status: 0 done; 1 a run has no evaluation, or is not there; 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import benchmarks_path  # noqa: F401
import program


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    head, _, _ = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=head)
    parser.add_argument("files", type=Path, nargs="+", help="of quality.py or quality_results.py")
    parser.add_argument("--to", type=Path, metavar="FOLDER")
    parser.add_argument("--readme", type=Path, metavar="FILE.svg", help="one small picture")
    parser.add_argument("--runs", nargs="+", metavar="NAME[=LABEL]", help="in this order (all)")
    parser.add_argument("--pairs", type=int, default=8, help="of the recall that is drawn (8)")
    options = parser.parse_args(arguments)
    if options.to is None and options.readme is None:
        parser.error("give --to or --readme")
    return options


if __name__ == "__main__":
    program.begin(parse)

import matplotlib
from matplotlib import pyplot
from picture import save

COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00")  # Okabe and Ito's
LINES = ("-", "--", ":", "-.")  # for the first labels, the next ones, ...
PASSKEY_GROUPS = 8  # of depths
USUAL = {  # settings that labels do not mention, and their names in labels
    "initial_a": (0.0, "A from {}"),
    "score_rate": (1.0, "rate of scores x {}"),
    "sinks": (0, "{} sinks"),
    "shortest_span": (128, "episodes from {}"),
    "episodes": ("pairs", "{} episodes"),
    "rotary_base": (10000.0, "rotary base {}"),
    "nope_keys": (None, "{} keys there"),
    "nope_rotary_dim": (0, "{} channels rotated"),
    "nope_a": (0.005, "their A from {}"),
    "nope_rate": (0.03, "their rate x {}"),
    "nope_a_rate": (None, "rate of their A x {}"),
    "start_step": (0, "from step {}"),
    "target_start": (0, "learning from step {} on"),
    "target_every": (4, "every {} steps"),
    "target_rate": (1.0, "at rate x {}"),
    "optimizer": ("adamw", "optimizer {}"),
    "hidden_rate": (1.0, "rate of matrices x {}"),
    "qk_norm": (False, "QK-norm"),
}
# settings of learned scores
OF_LEARNED = ("initial_a", "score_rate", "nope_a", "nope_rate", "nope_a_rate")
Runs = dict[str, dict[str, Any]]


def read(paths: list[Path]) -> Runs:
    """The runs of files, by name."""
    runs: Runs = {}
    for path in paths:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        if len(lines) == 1:
            runs[path.stem] = lines[0]
        else:  # the first row of a joined file is the machine
            runs.update((line["run"], line) for line in lines[1:])
    return runs


def label_of(run: dict[str, Any]) -> str:
    """The label of --runs, or else the keys that a query keeps and the settings that are not the
    usual ones."""
    if "label" in run:
        return run["label"]
    settings = run["settings"]
    form, keys, recent = settings["form"], settings["keys"], settings["recent"]
    how = "at random" if form.startswith("random") else "by score"
    if form in ("dense", "sliding"):
        words = ["dense" if form == "dense" else f"{keys} newest"]
    elif form.endswith("recent"):
        words = [f"{keys - recent} {how}, {recent} newest"]
    else:
        words = [f"{keys} {how}"]
    if heads := settings.get("sliding_heads"):
        words.append(f"sliding heads: {heads}")
    if settings.get("score_layers"):
        words.append(f"in 1 of {settings['score_layers']} layers")
    if nope := settings.get("nope_heads"):
        layers = settings.get("nope_layers")
        where = "" if layers is None else f" in layers {', '.join(map(str, layers))}"
        words.append(f"NoPE heads: {nope}{where}")
    is_learned = form in ("selected", "recent")
    if settings.get("new_scores"):
        words.append("new scores")
    if targets := settings.get("score_targets"):
        words.append("targets of NoPE heads" if targets == "nope" else "targets")
    if is_learned and settings["bias_form"] != "exp":
        words.append(f"{settings['bias_form']} bias")
    for name, (usual, phrase) in USUAL.items():
        is_used = is_learned or name not in OF_LEARNED
        value = settings.get(name)
        if is_used and value not in (None, usual):
            words.append(phrase.format(value if isinstance(value, str) else f"{value:g}"))
    return ", ".join(words)


def lines_of(runs: Runs) -> dict[str, dict[str, str]]:
    """The colour and the line style of each label."""
    labels = dict.fromkeys(label_of(run) for run in runs.values())
    return {
        label: {
            "color": COLOURS[number % len(COLOURS)],
            "linestyle": LINES[number // len(COLOURS) % len(LINES)],
        }
        for number, label in enumerate(labels)
    }


def plot(
    axes: pyplot.Axes, runs: Runs, points: Any, labels: tuple[str, str], **others: Any
) -> None:
    """A line for each run through points(run): pairs of x and y."""
    styles = lines_of(runs)
    for number, run in enumerate(runs.values()):
        drawn, label = points(run), label_of(run)
        if drawn:  # the first lines are wider, so that they are visible beneath later ones
            width = 1.2 + 0.6 * max(0, 3 - number)
            axes.plot(*zip(*drawn), label=label, linewidth=width, **styles[label], **others)
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


def losses_against(column: str) -> Any:
    return lambda run: [(row[column], row["bits"]) for row in run["held_out"]]


def limits_of_losses(runs: Runs) -> tuple[float, float]:
    """Limits of an axis: losses more than 1 bit above the least one are not drawn."""
    losses = [row["bits"] for run in runs.values() for row in run["held_out"]]
    return min(losses) - 0.05, min(min(losses) + 1, max(losses) + 0.05)


def recalled_of(run: dict[str, Any], pairs: int) -> list[tuple[int, float]]:
    rows = run["final"]["recall"]
    return [(row["distance"], row["accuracy"]) for row in rows if row["pairs"] == pairs]


def draw_losses(runs: Runs) -> pyplot.Figure:
    figure, panels = pyplot.subplots(1, 3, figsize=(11, 4), layout="constrained")

    bits = "bits per byte of held-out text"
    plot(panels[0], runs, losses_against("step"), ("training steps", bits))
    plot(panels[1], runs, losses_against("seconds"), ("seconds of training", ""))
    plot(panels[2], runs, by_position, ("position in the sequence", ""))
    for axes in panels[:2]:
        axes.set_ylim(*limits_of_losses(runs))
    add_legend(figure, panels[0])
    return figure


def draw_recall(runs: Runs, pairs: int) -> pyplot.Figure:
    figure, panels = pyplot.subplots(1, 3, figsize=(11, 4), layout="constrained")

    def passkeys(run: dict[str, Any]) -> list[tuple[float, float]]:
        """At the middle of each group of depths, because a depth has few questions."""
        found = [row["accuracy"] for row in run["final"]["passkey"]]
        size = max(1, len(found) // PASSKEY_GROUPS)
        firsts = range(0, len(found), size)
        return [
            ((first + (size - 1) / 2) / len(found), fmean(found[first : first + size]))
            for first in firsts
        ]

    def windows(run: dict[str, Any]) -> list[tuple[float, float]]:
        trained = run["settings"]["keys"]
        return [(row["keys"] / trained, row["bits"]) for row in run["final"]["by_window"]]

    recalled = partial(recalled_of, pairs=pairs)
    plot(panels[0], runs, recalled, ("distance, bytes", f"values recalled, of {pairs} pairs"))
    plot(panels[1], runs, passkeys, ("depth of the passkey", "passkeys recalled"))
    plot(panels[2], runs, windows, ("keys at test time / in training", "bits per byte"))
    for axes in panels[:2]:
        axes.set_ylim(-0.03, 1.03)
    for axes in (panels[0], panels[2]):
        axes.set_xscale("log", base=2)
    add_legend(figure, panels[0])
    return figure


def draw_readme(runs: Runs, pairs: int) -> pyplot.Figure:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    drawn = {"marker": "o", "markersize": 4}
    plot(left, runs, losses_against("seconds"), ("seconds of training", ""), **drawn)
    left.set_title("held-out loss, bits per byte")
    left.set_ylim(*limits_of_losses(runs))
    recalled = partial(recalled_of, pairs=pairs)
    plot(right, runs, recalled, ("bytes from statement to question", ""), **drawn)
    right.set_title(f"values recalled, of {pairs} pairs")
    right.set_ylim(-0.03, 1.03)
    right.yaxis.set_major_formatter(lambda accuracy, _: f"{100 * accuracy:.0f} %")
    right.set_xscale("log", base=2)
    distances = sorted({x for run in runs.values() for x, _ in recalled(run)})
    right.set_xticks(distances, [f"{distance:,}" for distance in distances])
    right.minorticks_off()
    add_legend(figure, left)
    return figure


def named(runs: Runs, words: list[str]) -> Runs:
    """The runs of --runs, in its order, with its labels. Raises ValueError if one is missing."""
    chosen: Runs = {}
    for word in words:
        name, equals, label = word.partition("=")
        if name not in runs:
            raise ValueError(f"--runs: {name} is not in the files, want one of {', '.join(runs)}")
        chosen[name] = {**runs[name], "label": label} if equals else runs[name]
    return chosen


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    runs = read(options.files)
    try:
        runs = named(runs, options.runs or list(runs))
    except ValueError as error:
        sys.exit(str(error))
    for name, run in runs.items():
        if "final" not in run:
            sys.exit(f"{name}: has no evaluation, want one of a run that has ended")
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fdma"  # the same ids in every run
    if options.readme is not None:
        save(draw_readme(runs, options.pairs), options.readme)
    if options.to is not None:
        options.to.mkdir(parents=True, exist_ok=True)
        save(draw_losses(runs), options.to / "quality-losses.svg")
        save(draw_recall(runs, options.pairs), options.to / "quality-recall.svg")


if __name__ == "__main__":
    main()
