#!/usr/bin/env python3
"""Join runs of research/quality.py into one small file, or compare the runs of such a file.

    research/quality_results.py OUT.json RUN.json... [--kept NAME] [--kernels HASH]
    research/quality_results.py OUT.json --against NAME

The first line of OUT.json has the machine, the time at which the last of the files was written, the
commit (FDMA_COMMIT, or else the tree's) and, for runs on a GPU, the hash of its kernels
(kernels_hash.py). Each other line is a completed run: its settings, held-out losses and recall
during training, at most 60 training losses, and the measurements at its end. A run that was stopped
between its last step and these has the losses and the recall of that step in their place. Only run
--kept has the text and the positions of kept keys, which quality_kept.py draws. A run has the name
of its file. quality_picture.py draws such a file.

With --against, tables in Markdown are printed. The first has for each run its held-out loss and the
difference to the loss of run NAME, if both read the same text. All models read the same pieces of
it, so the standard error of a difference is the standard error of the mean of differences of
pieces. The second, if there are runs that differ only in their seed, has mean and standard
deviation over seeds. The third has the losses of bytes by the distance to the text that they
repeat.
Exit status: 0 done; 1 a run has no evaluation, was on another machine, or is not there; 2 bad
usage.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import benchmarks_path  # noqa: F401
import program
from kernels_hash import kernels_hash


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    head, _, _ = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=head, allow_abbrev=False)
    parser.add_argument("out", type=Path, help="the file to write, or to read with --against")
    parser.add_argument("runs", type=Path, nargs="*", help="files that quality.py wrote")
    parser.add_argument("--kernels", default=kernels_hash(), metavar="HASH", help="(this tree's)")
    parser.add_argument("--kept", metavar="NAME", help="the run whose kept keys are written")
    parser.add_argument("--against", metavar="NAME", help="compare the runs with this one")
    options = parser.parse_args(arguments)
    if bool(options.runs) == (options.against is not None):
        parser.error("give files of runs, or else --against")
    for path in options.runs or [options.out]:
        if not path.is_file():
            parser.error(f"{path} is not a file")
    return options


if __name__ == "__main__":
    program.begin(parse)

from machine import commit, write_whole

LOSSES = 60  # training losses of each run
SETTINGS = (
    "form size keys recent sinks bias_form initial_a score_rate rate warm_up steps batch length "
    "recall recall_weight episodes curriculum seed compile start dt_std sliding_heads score_layers "
    "shortest_span nope_heads nope_layers nope_keys nope_recent nope_rotary_dim nope_a nope_rate "
    "nope_a_rate start_step new_scores score_targets target_start target_every target_rate "
    "target_recent rotary_base decay clip schedule_steps pieces questions optimizer hidden_rate "
    "qk_norm"
).split()
SAME_TEXT = ("corpus", "length")  # settings that must be equal to compare runs
OF_PIECES = ("by_position", "of_pieces", "by_repetition")  # kept for the end only
MEASURES = ("sha256", "parameters", "warm_up_seconds", "bytes_per_second", "peak_memory", "columns")
DIGITS = 5


def rounded(value: Any) -> Any:
    """The value with DIGITS significant digits in every float."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, list):
        return [rounded(one) for one in value]
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return value


def thinned(rows: list[Any], most: int = LOSSES) -> list[Any]:
    """At most `most` rows, evenly spread, including the first and the last one."""
    if len(rows) <= most:
        return rows
    return [rows[number * (len(rows) - 1) // (most - 1)] for number in range(most)]


def final_of(run: dict[str, Any]) -> dict[str, Any] | None:
    """The measurements after the last step: all of them, or those of training; None if the run has
    not come so far."""
    if "final" in run:
        return run["final"]
    ended = [row for row in run["held_out"] if row["step"] == run["settings"]["steps"]]
    return ended[0] if ended else None


def row_of(name: str, run: dict[str, Any], kept: str | None) -> dict[str, Any]:
    settings = {key: run["settings"][key] for key in SETTINGS if key in run["settings"]}
    settings["corpus"] = Path(run["settings"]["corpus"]).name
    held_out = [
        {key: value for key, value in row.items() if key not in OF_PIECES}
        for row in run["held_out"]
    ]
    final = final_of(run)
    if name != kept and "kept" in final:
        final = {**final, "kept": {"values": final["kept"]["values"]}}
    measures = {key: run[key] for key in MEASURES if key in run}
    losses = thinned(run["train"])
    row = {"settings": settings, **measures, "train": losses, "held_out": held_out, "final": final}
    return {"run": name, **rounded(row)}


def machine_of(run: dict[str, Any]) -> dict[str, str]:
    """The run's machine as in the first line, in the words of other results."""
    found, device = run["machine"], run["settings"]["device"]
    return {"machine": found["device"], "device": device, "torch": found["torch"]}


def join(paths: list[Path], kernels: str, kept: str | None = None) -> list[dict[str, Any]]:
    """The lines of the joined file."""
    if kept is not None and kept not in (path.stem for path in paths):
        raise ValueError(f"--kept: {kept} is not a run of these files")
    machine, rows = None, []
    for path in paths:
        run = json.loads(path.read_text())
        if final_of(run) is None:
            raise ValueError(f"{path}: has no evaluation, want one after its last step")
        own = machine_of(run)
        machine = machine or own
        if own != machine:
            raise ValueError(f"{path}: machine is {own}, want {machine}")
        rows.append(row_of(path.stem, run, kept))
    last = time.gmtime(max(path.stat().st_mtime for path in paths))
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", last)
    first = {**machine, "date": date, "commit": commit()}
    return [{**first, "kernels": kernels} if first["device"] == "cuda" else first, *rows]


def table_of(
    columns: tuple[str, ...], rows: list[tuple[str, ...]], words: tuple[str, ...] | None = None
) -> list[str]:
    """Lines of Markdown. If `words` is given, all other columns have numbers, which are aligned on
    the right."""
    lines = ["---" if words is None or column in words else "---:" for column in columns]
    cells = [columns, lines, *rows]
    return ["|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in cells]


def paired(run: dict[str, Any], base: dict[str, Any]) -> tuple[float, float] | None:
    """The mean of the differences of losses of pieces, in bits per byte, and its standard error.
    None if the pieces are unknown, or differ."""
    ours, theirs = (one["final"].get("of_pieces", []) for one in (run, base))
    if len(ours) != len(theirs) or len(ours) < 2:
        return None
    differences = [a - b for a, b in zip(ours, theirs)]
    return fmean(differences), stdev(differences) / math.sqrt(len(differences))


def is_same_text(run: dict[str, Any], base: dict[str, Any]) -> bool:
    """Older runs have no hashes of their text."""
    hashes = {json.dumps(one["sha256"]) for one in (run, base) if "sha256" in one}
    same = all(run["settings"][key] == base["settings"][key] for key in SAME_TEXT)
    return same and len(hashes) < 2


def compare(runs: dict[str, dict[str, Any]], name: str) -> list[str]:
    """The table of all runs against the one of this name."""
    base, rows = runs[name], []
    for own, run in runs.items():
        bits, steps = run["final"]["bits"], run["settings"]["steps"]
        percent = difference = error = ""
        if own != name and is_same_text(run, base):
            percent = f"{100 * (bits / base['final']['bits'] - 1):+.2f} %"
            if found := paired(run, base):
                difference, error = f"{found[0]:+.4f}", f"{found[1]:.4f}"
        rows.append((own, str(steps), f"{bits:.4f}", percent, difference, error))
    against = f"against {name}"
    return table_of(("run", "steps", "loss", against, "paired difference", "its error"), rows)


def by_repetition(runs: dict[str, dict[str, Any]], name: str) -> list[str]:
    """Losses of bytes by the distance to the text that they repeat, and the difference to run NAME,
    for the runs that measured them."""
    base, rows = runs[name], []
    classes = [row["to"] for row in base["final"].get("by_repetition", [])]
    if not classes:
        return []
    for own, run in runs.items():
        found = {row["to"]: row for row in run["final"].get("by_repetition", [])}
        if list(found) != classes or not is_same_text(run, base):
            continue
        cells = []
        for of_base in base["final"]["by_repetition"]:
            bits = found[of_base["to"]]["bits"]
            percent = f" ({100 * (bits / of_base['bits'] - 1):+.1f} %)" if own != name else ""
            cells.append(f"{bits:.4f}{percent}")
        rows.append((own, *cells))
    columns = [f"to {to:,} bytes back" if to else "repeat nothing" for to in classes]
    return table_of(("run", *columns), rows)


def recipe_of(settings: dict[str, Any]) -> str:
    """The settings without the seed, equal for runs that differ only in it. Settings that older
    runs do not have are None or 0 in other runs that do not use them. Files to start with have
    seeds, too."""
    used = {key: value for key, value in settings.items() if value and key != "seed"}
    return json.dumps({**used, "start": "start" in used}, sort_keys=True)


def over_seeds(runs: dict[str, dict[str, Any]]) -> list[str]:
    """The table of recipes with several runs; no lines if there are none."""
    recipes: dict[str, list[str]] = {}
    for name, run in runs.items():
        recipes.setdefault(recipe_of(run["settings"]), []).append(name)
    rows = []
    for names in recipes.values():
        if len(names) > 1:
            bits = [runs[name]["final"]["bits"] for name in names]
            seeds = [str(runs[name]["settings"]["seed"]) for name in names]
            rows.append(
                (", ".join(names), ", ".join(seeds), f"{fmean(bits):.4f}", f"{stdev(bits):.4f}")
            )
    return table_of(("runs", "seeds", "mean loss", "standard deviation"), rows) if rows else []


def print_tables(path: Path, name: str) -> None:
    _, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    runs = {row["run"]: row for row in rows}
    if name not in runs:
        sys.exit(f"--against: {name} is not in {path}, want one of {', '.join(runs)}")
    print(*compare(runs, name), sep="\n")
    for table in (over_seeds(runs), by_repetition(runs, name)):
        if table:
            print("", *table, sep="\n")


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.against is not None:
        print_tables(options.out, options.against)
        return
    try:
        lines = join(options.runs, options.kernels, options.kept)
    except ValueError as error:
        sys.exit(f"quality_results.py: {error}")
    write_whole(options.out, lines)


if __name__ == "__main__":
    main()
