#!/usr/bin/env python3
"""Write class_table.h and compose_tables.h: the classes of characters, and what NFC needs, as the
library `tokenizers` has them, so that its splits and its ids are met. It takes three minutes.

    .venv/bin/python tools/tokenizer/make_tables.py
"""

from __future__ import annotations

import subprocess
import sys
import unicodedata
from pathlib import Path

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

CLASSES = ("Lu", "Ll", "Lt", "Lm", "Lo", "M", "Nd", "Nl", "No", "P", "S")  # as in unicode.h
POINTS = [point for point in range(0x110000) if not 0xD800 <= point < 0xE000]
BATCH = 2048
HANGUL = range(0xAC00, 0xD7A4)  # composed by a rule
SORTED_LAST = "\u0345"  # of combining class 240, the highest: what has a lower one goes before it


def members(name: str) -> set[int]:
    split = pre_tokenizers.Split(Regex(rf"\p{{{name}}}+"), "removed", invert=True)
    found: set[int] = set()
    for first in range(0, len(POINTS), BATCH):
        text = "".join(map(chr, POINTS[first : first + BATCH]))
        found.update(ord(c) for piece, _ in split.pre_tokenize_str(text) for c in piece)
    return found


def runs(values: dict[int, int]) -> list[int]:
    """Where the value changes: the point * 256 + the value from there on; 0 where none is given."""
    found, last = [], 0
    for point in range(0x110000):
        value = values.get(point, 0)
        if value != last:
            found.append(point * 256 + value)
            last = value
    return found


def combining_classes() -> dict[int, int]:
    """Those that the normalizer of `tokenizers` knows: it may be older than Python."""
    order = normalizers.NFD()
    found = {}
    for point in POINTS:
        value = unicodedata.combining(chr(point))
        other = SORTED_LAST if value != 240 else "\u0315"  # of class 232
        first = other + chr(point) if value < 240 else chr(point) + other
        if value and order.normalize_str(first) != first:
            found[point] = value
    return found


def decompositions() -> list[tuple[int, int, int]]:
    """The composed character, and the two or one (then 0) that it is made of."""
    fully, composed = normalizers.NFD(), normalizers.NFC()
    found = []
    for point in POINTS:
        character = chr(point)
        parts = unicodedata.decomposition(character)
        if point in HANGUL or not parts or parts[0] == "<":
            continue
        numbers = [int(part, 16) for part in parts.split()]
        if fully.normalize_str(character) == character:
            continue  # newer than the library
        assert fully.normalize_str("".join(map(chr, numbers))) == fully.normalize_str(character)
        if len(numbers) == 2 and composed.normalize_str(character) != character:
            point = -point  # never composed
        found.append((point, numbers[0], numbers[1] if len(numbers) == 2 else 0))
    return found


def table(name: str, about: str, kind: str, values: list[int]) -> str:
    numbers = ", ".join(hex(v) if v >= 0 else f"-{hex(-v)}" for v in values)
    return f"\n/* {about} */\nstatic const {kind} {name}[] = {{{numbers}}};\n"


def write(name: str, *tables: str) -> None:
    path = Path(__file__).parent / name
    head = f"/* Written by make_tables.py from tokenizers {tokenizers.__version__}. */\n"
    path.write_text(head + "#pragma once\n\n#include <stdint.h>\n" + "".join(tables))
    subprocess.run([Path(sys.executable).parent / "clang-format", "-i", path], check=True)


def main() -> None:
    classes = {p: n for n, name in enumerate(CLASSES, 1) for p in members(name)}
    about = "Where a class begins: the character * 256 + the class."
    write("class_table.h", table("class_runs", about, "uint32_t", runs(classes)))
    triples = sorted(decompositions(), key=lambda triple: abs(triple[0]))
    assert all(not last or unicodedata.category(chr(last))[0] == "M" for _, _, last in triples)
    about = "In threes: the composed character, negative if NFC does not compose it, and its parts."
    write(
        "compose_tables.h",
        table("combining_runs", "Where a combining class begins: the character * 256 + the class.",
              "uint32_t", runs(combining_classes())),
        table("decompositions", about, "int32_t", [v for triple in triples for v in triple]),
    )  # fmt: skip


if __name__ == "__main__":
    main()
