"""Check that a shared library exports exactly the functions that fdma.h declares."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HEADER = Path(__file__).parents[2] / "include" / "fdma.h"
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
DECLARATION = re.compile(r"^FDMA_API\s[^;(]*?\b(\w+)\s*\(", re.MULTILINE)


def declared(header: Path) -> set[str]:
    return set(DECLARATION.findall(COMMENT.sub("", header.read_text(encoding="utf-8"))))


def exported(library: Path) -> set[str]:
    nm = ("nm", "--dynamic", "--defined-only", "--format=posix", str(library))
    lines = subprocess.run(nm, check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[0] for line in lines}


def check(header: Path, library: Path) -> list[str]:
    want, have = declared(header), exported(library)
    found = [f"{name}() is declared but not exported" for name in sorted(want - have)]
    found += [f"{name} is exported but not declared" for name in sorted(have - want)]
    return found if want else ["the header declares nothing"]


def self_test() -> list[str]:
    """What the check gets wrong on libraries that are right, lack a function, have one more."""
    names = sorted(declared(HEADER))
    wanted = (
        (names, []),
        (names[1:], [f"{names[0]}() is declared but not exported"]),
        ([*names, "leak"], ["leak is exported but not declared"]),
    )
    wrong = []
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory) / "planted.c", Path(directory) / "planted.so"
        for functions, problems in wanted:
            source.write_text("".join(f"void {name}(void) {{}}\n" for name in functions))
            subprocess.run(("cc", "-shared", "-fPIC", "-o", library, source), check=True)
            found = check(HEADER, library)
            if found != problems:
                wrong.append(f"found {found}, want {problems}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path, nargs="?", help="such as build/libfdma.so")
    parser.add_argument("--self-test", action="store_true", help="plant faults and find them")
    options = parser.parse_args()
    if options.self_test:
        wrong = self_test()
        print(*wrong, sep="\n", end="\n" if wrong else "")
        print(f"self-test: {len(wrong)} mistakes")
        return 1 if wrong else 0
    if options.library is None:
        parser.error("which library?")
    found = check(HEADER, options.library)
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{len(declared(HEADER))} functions declared, {len(found)} differences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
