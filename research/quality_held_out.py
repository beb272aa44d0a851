"""The options of programs that measure a model of quality.py on held-out text."""

from __future__ import annotations

import argparse
from pathlib import Path

import benchmarks_path  # noqa: F401
import program


def add_options(parser: argparse.ArgumentParser, length: int, pieces: int) -> None:
    """The options that check_options() reads, with these defaults of --length and --pieces."""
    add = parser.add_argument
    add("model", type=Path, help="a file that quality.py wrote")
    add("--corpus", type=Path, required=True, help="folder of held_out.bin")
    add("--length", type=int, default=length, help=f"bytes of a piece ({length})")
    add("--pieces", type=int, default=pieces, help=f"of held-out text ({pieces})")
    add("--device", help="cuda or cpu; by default cuda where there is one")
    add("--json", type=Path, metavar="FILE", help="write the rows there, too")


def texts_of(word: str) -> int:
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"is {word}, want 0 or more")
    return int(word)


def add_tasks(parser: argparse.ArgumentParser) -> None:
    """The option for quality_tasks.py."""
    given = {"type": texts_of, "nargs": "?", "const": 32, "default": 0, "metavar": "TEXTS"}
    what = "measure the tasks of quality_tasks.py, each with so many texts (0; --tasks alone: 32)"
    parser.add_argument("--tasks", help=what, **given)


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with status 2 where a file is missing or too short. Sets options.held_out and, if it is
    not given, options.device."""
    options.held_out = options.corpus / "held_out.bin"
    for path in (options.model, options.held_out):
        if not path.is_file():
            parser.error(f"{path} is not a file")
    if options.held_out.stat().st_size <= options.length:
        parser.error(f"--length: is {options.length}, want less than {options.held_out} has bytes")
    options.device = options.device or program.default_device()
