"""Arguments of the benchmarks. PyTorch is not imported here: --help does not wait for it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn


def whole_number(text: str) -> int:
    # from 2**24 on, integers are not exact as float32 scores, see Inputs
    if not text.isdecimal() or not 1 <= int(text) < 2**24:
        raise argparse.ArgumentTypeError(f"is {text!r}, want a number from 1 to 16777215")
    return int(text)


def whole_numbers(text: str) -> list[int]:
    return [whole_number(word) for word in text.split(",")]


def output(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"is {text!r}, want a file in a folder that exists")
    return path


def picture(text: str) -> Path:
    path = output(text)
    if path.suffix not in (".svg", ".png"):
        raise argparse.ArgumentTypeError(f"is {text!r}, want a name that ends in .svg or .png")
    return path


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"is {text!r}, want a folder that exists")
    return Path(text)


def bare_parser(script: str, document: str | None, more: str = "") -> Parser:
    """The help shows the first line of the script's docstring, then the arguments, then `more`."""
    return Parser(
        prog=script,
        description=(document or "").split("\n")[0],
        epilog=more.strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def make_parser(script: str, document: str | None, more: str) -> Parser:
    """The arguments --out, --device and --quick."""
    parser = bare_parser(script, document, more)
    parser.add_argument("--out", type=folder, required=True, metavar="FOLDER")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    return parser


def drawing_parser(program: str, document: str | None) -> argparse.ArgumentParser:
    """The arguments of a script that draws the output of `program`."""
    parser = argparse.ArgumentParser(description=(document or "").split("\n")[0])
    parser.add_argument("json", type=Path, help=f"a file that {program}.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    return parser
