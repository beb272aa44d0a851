"""Run benchmarks in this process, and read what they write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Dict

import bench
import pytest

Row = Dict[str, Any]


def main(name: str, arguments: str) -> int:
    return bench.main(name, arguments.split())


def read(path: Path) -> tuple[Row, list[Row]]:
    machine, *rows = map(json.loads, path.read_text().splitlines())
    return machine, rows


def measured(name: str, folder: Path, options: str = "") -> tuple[int, list[Row]]:
    """The exit status and the rows of a run with --out on the CPU; a run without rows writes no
    file."""
    status = main(name, f"--device cpu --quick --out {folder} {options}")
    path = folder / f"{name}-cpu.json"
    return status, read(path)[1] if path.exists() else []


def refuse(name: str, arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bad usage gives status 2, and one line with these words on stderr alone."""
    with pytest.raises(SystemExit) as refused:
        main(name, arguments)
    printed = capsys.readouterr()
    assert refused.value.code == 2 and printed.out == ""
    assert words in printed.err and printed.err.count("\n") == 1
    assert printed.err.startswith(f"{name}.py: ")


def plant(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]
) -> None:
    """Call change(the function, its arguments) in place of a function."""
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *rows, **given: change(right, *rows, **given))
