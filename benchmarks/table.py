"""Turns the JSON lines of `fdma bench` or `benchmarks/peers.py --json FILE` into a Markdown table.

    benchmarks/table.py FILE [FILE ...]

Units: ms a call, spread relative to it, useful GFLOP/s, share of the peak loop that ran in
alternation, time of a plain read as a share of the case's, selection and lists in ns a key, lists
as a share of the attention over their selection, useful FLOP/s as a share of dense attention's,
time as a multiple of that of random scores, of gradients in any order and of the case of a quarter
of the length, how many times as fast as the peer flash_dmattn is.
Errors: a file that is not such JSON lines raises ValueError.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

COLUMNS = {
    "case": "case",
    "kernel": "kernel",
    "peer": "peer",
    "threads": "threads",
    "ms": "ms",
    "spread": "spread",
    "useful_gflops": "GFLOP/s",
    "of_peak": "of peak",
    "ns_per_key": "ns a key",
    "of_read": "of read",
    "of_forward": "of forward",
    "of_dense": "of dense",
    "of_iid": "of iid",
    "of_fast": "of fast",
    "of_shorter": "of shorter",
    "ratio": "times as fast",
    "goal": "to reach",
    "met": "reached",
}
DECIMALS = {
    "ms": 3,
    "spread": 2,
    "useful_gflops": 0,
    "of_peak": 2,
    "ns_per_key": 1,
    "of_read": 2,
    "of_forward": 4,
    "of_dense": 2,
    "of_iid": 2,
    "of_fast": 2,
    "of_shorter": 2,
    "ratio": 2,
}
FACTS = {
    "machine": "{}",
    "compiler": "{}",
    "torch": "PyTorch {}",
    "date": "{}",
    "commit": "{}",
    "kernels": "src/cuda {}",
}


def read(path: Path) -> tuple[dict, list[dict]]:
    """The machine's line, and the rows of the cases."""
    machine, *rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    if "machine" not in machine or not rows:
        raise ValueError(f"{path}: not the output of fdma bench or benchmarks/peers.py --json")
    return machine, rows


def cell(row: dict, field: str) -> str:
    value = row.get(field)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.{DECIMALS[field]}f}" if field in DECIMALS else str(value)


def table(path: Path) -> str:
    machine, rows = read(path)
    used = [field for field in COLUMNS if any(row.get(field) is not None for row in rows)]
    facts = ", ".join(text.format(machine[key]) for key, text in FACTS.items() if machine.get(key))
    lines = [
        f"{facts}:",
        "",
        "| " + " | ".join(COLUMNS[field] for field in used) + " |",
        "|" + "|".join("---:" if field in DECIMALS else "---" for field in used) + "|",
    ]
    lines += ["| " + " | ".join(cell(row, field) for field in used) + " |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="JSON lines of benchmarks as Markdown tables")
    parser.add_argument("files", nargs="+", type=Path)
    print("\n\n".join(table(path) for path in parser.parse_args().files))


if __name__ == "__main__":
    main()
