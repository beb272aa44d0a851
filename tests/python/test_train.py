"""examples/train_text.py: a few steps of both models, its files, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Callable

import pytest
from programs import ROOT, output_of, python

# A small model, because these tests are for the command line and the loop.
SMALL = ["--length", "96", "--window", "16", "--width", "64", "--layers", "2", "--batch", "2"]

Run = Callable[..., int]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import train_text

    return train_text


@pytest.fixture
def run(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the example in an empty folder, and return its exit status."""

    def run_in_process(*arguments: str) -> int:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["train_text.py", *arguments])
        try:
            example.main()
        except SystemExit as stop:
            return stop.code
        return 0

    return run_in_process


def test_both_forms_learn(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both curves are in one file and one picture. Held-out losses fall below the loss of
    guessing."""
    files = ["--json", "curves.json", "--picture", "curves.svg", "--device", "cpu"]
    for form in ([], ["--dense"]):
        assert run("--steps", "3", *SMALL, *files, *form) == 0
        captured = capsys.readouterr()
        assert "3 steps" in captured.out
    runs = json.loads((tmp_path / "curves.json").read_text())
    assert list(runs) == ["selected", "dense"]
    assert (runs["selected"]["window"], runs["dense"]["window"]) == (16, None)
    for made in runs.values():
        assert [step for step, _, _ in made["train"]] == [1, 2, 3]
        (first, _, before), (last, _, after) = made["held_out"]
        assert (first, last) == (0, 3)
        assert 7.5 < before < 8.5, "guessing costs 8 bits per byte"
        assert after < before - 0.02
    assert "<svg" in (tmp_path / "curves.svg").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.json", "curves.svg"]


@pytest.fixture
def said(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    words: list[str] = []
    monkeypatch.setattr(example.program, "doing", words.append)
    return words


def test_time_ends_a_run_too(run: Run, said: list[str]) -> None:
    assert run("--minutes", "0.002", *SMALL, "--device", "cpu") == 0
    assert said[-1].startswith("100% of the training, ")


def test_every_step_is_said(run: Run, said: list[str]) -> None:
    assert run("--steps", "2", *SMALL, "--device", "cpu") == 0
    assert [words[:30] for words in said] == [
        "50% of the training, step 1, l",
        "100% of the training, step 2, ",
    ]


def test_as_a_script_on_another_text(tmp_path: Path) -> None:
    text = ROOT / "examples" / "data" / "text.txt"
    options = ["--text", text, "--steps", "1", *SMALL, "--device", "cpu"]
    done = python(ROOT / "examples" / "train_text.py", *options, cwd=tmp_path)
    assert output_of(done).startswith("text.txt: 42623 bytes")
    assert not list(tmp_path.iterdir())


BAD = {
    "--picture draws the runs in the file of --json: give --json too": ["--picture", "x.svg"],
    "nothing.txt is not a file": ["--text", "nothing.txt"],
    "--width: is 100, want a multiple of 64": ["--width", "100"],
    "--batch: is 0, want 1 or more": ["--batch", "0"],
    "nothing to do": ["--minutes", "0"],
    "too short for pieces of 1024 bytes": ["--text", "short.txt"],
}


@pytest.mark.parametrize("message", BAD)
def test_bad_usage(
    message: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("short " * 100)
    assert run(*BAD[message]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]
