#!/usr/bin/env python3
"""The command `table`: Markdown tables of results, and of documents. It raises ValueError for a
file that is not in the right form, or that lacks a case."""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path

if __name__ == "__main__":
    import bench

    bench.start("table")

# The title of a field, and its decimals if it is a number.
FIELDS = {
    "case": ("case", None),
    "kernel": ("kernel", None),
    "peer": ("peer", None),
    "threads": ("threads", None),
    "ms": ("ms", 3),
    "us": ("µs", 1),
    "spread": ("spread", 2),
    "useful_gflops": ("GFLOP/s", 0),
    "of_peak": ("of peak", 2),
    "ns_per_key": ("ns per key", 1),
    "of_read": ("of read", 2),
    "of_dense": ("of dense", 2),
    "of_flash4": ("of flash4", 2),
    "of_iid": ("of iid", 2),
    "of_fast": ("of fast", 2),
    "of_shorter": ("of shorter", 2),
    "of_other": ("of other", 2),
    "of_sdpa": ("of SDPA", 2),
    "times_cudnn": ("times cuDNN", 2),
    "ratio": ("times as fast", 2),
    "goal": ("to reach", None),
    "met": ("reached", None),
    "times": ("times as fast", 2),
    "tokens_per_second": ("tokens/s", 0),
    "GiB": ("GiB", 2),
    "cache_bytes": ("bytes of cache", 0),
    "times_dense": ("times as fast as dense", 2),
    "times_spread": ("spread of that", 2),
    "attention": ("attention", None),
    "rotary": ("rotary", None),
    "not_run": ("not run", None),
}
ORIGIN = {
    "machine": "{}",
    "compiler": "{}",
    "torch": "PyTorch {}",
    "date": "{}",
    "commit": "{}",
    "kernels": "src/cuda {}",
}


def read(path: Path) -> tuple[dict, list[dict]]:
    machine, *rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    if "machine" not in machine or not rows:
        raise ValueError(f"{path}: not the output of fdma bench or a script here")
    return machine, rows


def cell(row: dict, field: str) -> str:
    value = row.get(field)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    decimals = FIELDS[field][1]
    return str(value) if decimals is None else f"{value:.{decimals}f}"


def table(path: Path) -> str:
    machine, rows = read(path)
    used = [field for field in FIELDS if any(row.get(field) is not None for row in rows)]
    origin = ", ".join(
        text.format(machine[key]) for key, text in ORIGIN.items() if machine.get(key)
    )
    lines = [
        f"{origin}:",
        "",
        "| " + " | ".join(FIELDS[field][0] for field in used) + " |",
        "|" + "|".join("---" if FIELDS[field][1] is None else "---:" for field in used) + "|",
    ]
    lines += ["| " + " | ".join(cell(row, field) for field in used) + " |" for row in rows]
    return "\n".join(lines)


RESULTS = Path(__file__).parent / "results"
TABLES = Path(__file__).with_name("tables.txt")
TABLE = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
COLUMN = re.compile(r"(?:(?P<file>\S+\.json):)?(?:(?P<peer>[\w-]+)\.)?(?P<field>\w+)")


def find(file: str, case: str, wanted: dict[str, str]) -> dict:
    """The line of a file for this case (or item) with the wanted values; {} if there is no such
    peer."""
    rows = [row for row in read(RESULTS / file)[1] if case in (row.get("case"), row.get("item"))]
    found = [row for row in rows if all(str(row.get(key)) == wanted[key] for key in wanted)]
    if not rows or len(found) > 1 or (not found and "peer" not in wanted):
        raise ValueError(f"{file}: {len(found)} lines of {case} with {wanted}, want 1")
    return found[0] if found else {}


def figure(row: dict, field: str) -> str:
    value = row.get("useful_gflops" if field == "tflops" else field)
    if value is None:
        return ""
    if field == "tflops":
        return f"{value / 1000:.0f}"
    if field == "useful_gflops" or value >= 1000:
        return f"{value:.0f}"
    if field == "ratio":
        return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
    if field.startswith("of_") or field == "times_cudnn":
        return f"{value:.2f}"
    value = float(f"{value:.2e}")
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"  # three digits


def cell_of(file: str, row: str, column: str) -> str:
    case, *words = row.split()
    match = COLUMN.fullmatch(column)
    if not match:
        raise ValueError(f"column: is {column!r}, want [FILE:][PEER.]FIELD")
    wanted = dict(word.split("=") for word in words)
    if match["peer"]:
        wanted["peer"] = match["peer"]
    return figure(find(match["file"] or file, case, wanted), match["field"])


def origin_of(file: str) -> str:
    machine = read(RESULTS / file)[0]
    words = [machine["machine"], f"PyTorch {machine['torch']}" if "torch" in machine else None]
    words += [machine.get("compiler"), machine["date"][:10], f"commit {machine['commit']}"]
    return f"{', '.join(filter(None, words))} ([{file}](RESULTS/{file}))"


def specification_of(name: str) -> list[str]:
    """The lines that specify a table, beginning with its head."""
    texts = TABLES.read_text().split("\n\n")
    found = [text.splitlines() for text in texts if text.startswith(f"table {name} ")]
    if len(found) != 1:
        raise ValueError(f"{TABLES.name}: has {len(found)} tables {name}, want 1")
    return found[0]


def document_table(name: str) -> str:
    """The table of that name, and the source of its figures."""
    head, *lines = specification_of(name)
    file = head.split()[2]
    title = ""
    columns, rows = [], []
    for line in lines:
        kind, _, text = line.partition(": ")
        what, _, label = (word.strip() for word in text.rpartition("|"))
        if kind == "title":
            title = label
        else:
            {"column": columns, "row": rows}[kind].append((what, label))
    made = ["| " + " | ".join([title, *(label for _, label in columns)]) + " |"]
    made.append("|---|" + "---:|" * len(columns))
    for row, label in rows:
        cells = [cell_of(file, row, column) for column, _ in columns]
        made.append("| " + " | ".join([label, *cells]) + " |")
    files = dict.fromkeys((COLUMN.match(column)["file"] or file) for column, _ in columns)
    return "\n".join([*made, "", "; ".join(map(origin_of, files)) + "."])


def update(document: Path) -> str:
    """The document's text with current tables."""
    results = "../benchmarks/results" if document.parent.name == "docs" else "benchmarks/results"

    def make(match: re.Match[str]) -> str:
        table = document_table(match[2]).replace("(RESULTS/", f"({results}/")
        return f"{match[1]}{table}\n{match[3]}"

    return TABLE.sub(make, document.read_text())


def run(options: argparse.Namespace) -> int:
    if not options.update and not options.check:
        print("\n\n".join(table(path) for path in options.files))
        return 0
    old = [path for path in options.files if update(path) != path.read_text()]
    for path in old:
        print(f"{path}: its tables are not current" if options.check else f"{path}: updated")
        if options.update:
            path.write_text(update(path))
    return 1 if old and options.check else 0
