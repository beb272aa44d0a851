"""Run programs, and keep their output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]

Done = subprocess.CompletedProcess


class Seen(NamedTuple):
    """The arguments of one call of the C library."""

    prepared: Any
    name: str  # of the operator
    threads: int
    deterministic: bool
    alignments: tuple[int, ...]  # of the inputs


def run(*command: str | Path, env: dict[str, str | None] | None = None, **options: Any) -> Done:
    """Run with the package on Python's path. `env` sets variables, and removes those that are
    None."""
    changed = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(env or {})}
    variables = {name: text for name, text in changed.items() if text is not None}
    options = {"capture_output": True, "text": True, "timeout": 300, **options}
    return subprocess.run(list(map(str, command)), env=variables, **options)


def python(*arguments: str | Path, **options: Any) -> Done:
    return run(sys.executable, *arguments, **options)


def output_of(done: Done) -> str:
    """stdout of a program, which must have succeeded."""
    assert done.returncode == 0, f"{done.args} gave {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout
