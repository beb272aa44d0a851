"""Code that the checks in this folder share: the command line, and a small tree to plant faults
in."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Callable

ROOT = Path(__file__).resolve().parents[2]

# The number of items that a check has looked at (files, functions, messages), and a line for each
# fault.
Found = tuple[int, list[str]]


def self_test_mistakes(
    check: Callable[[Path], Found], sound: Mapping[str, str], plants: Iterable[tuple[str, str]]
) -> list[str]:
    """Test a check on a small tree; return what it got wrong, an empty list if it works.

    The check must find no fault in the files `sound`. Each plant is a path and a text: when the
    text is appended to the file at that path, which may be a new one, the check must find a fault
    there.
    """
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)

        def write(path: str, text: str) -> None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")

        for path, text in sound.items():
            write(path, text)
        wrong = [f"found a fault in a sound file: {line}" for line in check(root)[1]]
        for path, text in plants:
            write(path, sound.get(path, "") + text)
            if not any(path in line for line in check(root)[1]):
                wrong.append(f"did not see {text!r} in {path}")
            (root / path).unlink()
            if path in sound:
                write(path, sound[path])
    return wrong


def main(
    description: str,
    check: Callable[[argparse.Namespace], Found],
    self_test: Callable[[], list[str]],
    summary: str,
    arguments: Mapping[str, Mapping[str, Any]] | None = None,
) -> int:
    """Run the check, or its own test; print the faults and a summary; return the exit status.

    `summary` is a format string: {0} is the number of items, {1} the number of faults. `arguments`
    holds the arguments of this check alone: each name, mapped to its keywords for argparse's
    add_argument().
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--self-test", action="store_true", help="plant faults and find them")
    for name, keywords in (arguments or {}).items():
        parser.add_argument(name, **keywords)
    options = parser.parse_args()
    if options.self_test:
        found, last = self_test(), "self-test: {1} mistakes"
    else:
        (count, found), last = check(options), summary
    print(*found, last.format(0 if options.self_test else count, len(found)), sep="\n")
    return 1 if found else 0
