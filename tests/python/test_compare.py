"""benchmarks/compare.py with commands that print given figures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from programs import ROOT, python

COMPARE = ROOT / "benchmarks" / "compare.py"


def fake_command(path: Path, milliseconds: dict[str, float]) -> Path:
    """A command that writes these figures as `fdma bench --json FILE` does."""
    path.write_text(
        f"#!{sys.executable}\n"
        "import json, sys\n"
        "with open(sys.argv[sys.argv.index('--json') + 1], 'w') as file:\n"
        "    print(json.dumps({'machine': 'none'}), file=file)\n"
        f"    for case, ms in {milliseconds!r}.items():\n"
        "        print(json.dumps({'case': case, 'kernel': sys.argv[0], 'ms': ms}), file=file)\n"
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("new", "options", "status", "words"),
    [
        ({"a": 1.02, "b": 2.0}, (), 0, "2 cases, 0 slower"),
        ({"a": 1.05, "b": 2.0}, (), 1, "2 cases, 1 slower"),
        ({"a": 0.5, "b": 1.0}, (), 0, "0.500"),
        ({"a": 1.0}, (), 1, "timed by one command only"),
        ({"a": 1.0, "c": 2.0}, ("--rename", "b=c"), 0, "2 cases, 0 slower"),
        ({"a": 1.0, "c": 2.0}, ("--rename", "b"), 2, ""),
    ],
)
def test_compare(
    tmp_path: Path, new: dict[str, float], options: tuple[str, ...], status: int, words: str
) -> None:
    old_command = fake_command(tmp_path / "old", {"a": 1.0, "b": 2.0})
    new_command = fake_command(tmp_path / "new", new)
    done = python(COMPARE, old_command, new_command, "--rounds", "2", *options)
    assert done.returncode == status, done.stdout + done.stderr
    assert words in done.stdout
