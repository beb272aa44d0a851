#!/usr/bin/env python3
"""Check that a shared library exports exactly the functions that fdma.h declares."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import gate

HEADER = gate.ROOT / "include" / "fdma.h"
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
DECLARATION = re.compile(r"^FDMA_API\s[^;(]*?\b(\w+)\s*\(", re.MULTILINE)


def declared(header: Path) -> set[str]:
    return set(DECLARATION.findall(COMMENT.sub("", header.read_text(encoding="utf-8"))))


def exported(library: Path) -> set[str]:
    if library.suffix == ".dll":
        dump = ("x86_64-w64-mingw32-objdump", "--private-headers", str(library))
        printed = subprocess.run(dump, check=True, capture_output=True, text=True).stdout
        names = printed.partition("[Ordinal/Name Pointer] Table")[2].partition("\n\n")[0]
        return set(re.findall(r"\[ *\d+\] (?:\+base\[ *\d+\] +)?(?:\w+ )?(\w+)$", names, re.M))
    nm = ("nm", "--dynamic", "--defined-only", "--format=posix", str(library))
    lines = subprocess.run(nm, check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[0] for line in lines}


def check(library: Path) -> gate.Found:
    want, have = declared(HEADER), exported(library)
    found = [f"{name}() is declared but not exported" for name in sorted(want - have)]
    found += [f"{name} is exported but not declared" for name in sorted(have - want)]
    return len(want), found if want else ["fails: the header declares nothing"]


def self_test() -> list[str]:
    """The check's mistakes on libraries that are right, lack a function, or have one more."""
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
            _, found = check(library)
            if found != problems:
                wrong.append(f"found {found}, want {problems}")
    return wrong


def main() -> int:
    library = {"type": Path, "nargs": "?", "default": gate.ROOT / "build" / "libfdma.so"}
    return gate.main(
        __doc__,
        lambda options: check(options.library),
        self_test,
        "{} functions declared, {} differences",
        {"library": library},
    )


if __name__ == "__main__":
    sys.exit(main())
