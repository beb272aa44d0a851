#!/usr/bin/env python3
"""Every benchmark of this folder, by its name.

    python benchmarks/bench.py --help
    python benchmarks/bench.py NAME --help
    python benchmarks/bench.py NAME [options]

They need flash_dmattn installed, or PYTHONPATH=python and FDMA_LIBRARY=build/libfdma.so. In each
round every peer of a case runs once, so that a load on the machine slows all of them. Times are
medians of the rounds, and spread is (90th percentile - 10th percentile) / median. A line on stderr
says every ten seconds what is running. Results are lines of JSON: the machine, then a line for each
row. Outputs are checked before a call is timed; a case with wrong outputs is left out. Exit status:
0 done; 1 wrong outputs, or a file that could not be written; 2 bad usage. benchmarks/NAME.py is
another name of `bench.py NAME`.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import NoReturn

import commands
import program

NAMES = "\n".join(f"  {name:22}{one.about}" for name, one in commands.COMMANDS.items())


def main(name: str, arguments: list[str] | None = None, prog: str | None = None) -> int:
    """Runs the benchmark `name`. Returns the exit status."""
    parser = commands.make_parser(name, prog)
    args = commands.parse(parser, name, arguments)
    module = importlib.import_module(commands.COMMANDS[name].module)
    try:
        return module.run(args)
    except (commands.Disagreement, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1


def start(name: str, arguments: list[str] | None = None, prog: str | None = None) -> NoReturn:
    """As a program: wrong arguments are refused before the imports that take seconds."""
    parser = commands.make_parser(name, prog)
    program.begin(lambda: commands.parse(parser, name, arguments))
    sys.exit(main(name, arguments, prog))


def choose(arguments: list[str]) -> NoReturn:
    assert __doc__ is not None
    about, _, more = __doc__.partition("\n")
    parser = commands.Parser(
        "bench.py", None, about, f"NAME is one of\n{NAMES}\n{more}", formatter_class=commands.RAW
    )
    parser.add_argument("name", choices=commands.COMMANDS, metavar="NAME")
    name = parser.parse_args(arguments[:1]).name
    start(name, arguments[1:], f"{Path(sys.argv[0]).name} {name}")


if __name__ == "__main__":
    choose(sys.argv[1:])
