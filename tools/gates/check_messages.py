#!/usr/bin/env python3
"""Check that messages.txt lists every message of the library and of the command `fdma`.

After a change of messages, --update writes the list anew. It is there to be read as a whole: each
message says what is wrong and what is wanted, and the same thing is said in the same words. The
messages of the Python package are in tests/python/messages.txt.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import c_source
import gate

LIST = "tools/gates/messages.txt"
HEAD = (
    "# Every message of the library and of the command, by folder; see check_messages.py.",
    "# Texts without a colon are parts of messages, such as what a kernel does not support.",
)
FOLDERS = ("src/core", "src/cpu", "src/cuda", "src/reference", "src", "tools")

COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|/\*.*?\*/|//[^\n]*', re.DOTALL)
# Statements whose strings are messages, or parts of them.
STATEMENT = re.compile(
    r"\b((FDMA_REQUIRE|fdma_fail|print_error|refuse|must)\(|(want|verb|end) =|snprintf\(message,)"
    r'|\breturn (?!.*printf)[^;]*"',
    re.DOTALL,
)
STRING = re.compile(r'"(?:\\.|[^"\\\n])*"(?:\s*(?:PRI\w+|"(?:\\.|[^"\\\n])*"))*')
NUMBERS = {"PRId64": "lld", "PRIu64": "llu"}


def statements(text: str) -> list[str]:
    """A file's statements. No message contains a brace, or a semicolon without a space after it."""
    code = COMMENT.sub(lambda match: match[1] or " ", text)
    return re.split(r"(?:;(?=\s*\n)|[{}])", code)


def messages(text: str) -> set[str]:
    found = set()
    for statement in statements(text):
        if not STATEMENT.search(statement):
            continue
        for string in STRING.findall(statement):
            pieces = re.findall(r'"((?:\\.|[^"\\\n])*)"|(PRI\w+)', string)
            message = "".join(piece + NUMBERS.get(number, "") for piece, number in pieces).strip()
            if " " in message and "#" not in message:
                found.add(message)
    return found


def said_in(root: Path) -> dict[str, dict[str, str]]:
    """The messages of each folder, with the file that says each."""
    said: dict[str, dict[str, str]] = {}
    seen: set[Path] = set()
    for folder in FOLDERS:
        files = {path for path in (root / folder).rglob("*") if path.suffix in c_source.SUFFIXES}
        said[folder] = {
            message: str(path.relative_to(root))
            for path in sorted(files - seen)
            for message in messages(path.read_text(encoding="utf-8"))
        }
        seen |= files
    return said


def listing(said: Mapping[str, Iterable[str]]) -> str:
    lines = list(HEAD)
    for folder, found in said.items():
        lines += ["", f"# {folder}", *sorted(found)] if found else []
    return "\n".join(lines) + "\n"


def check(root: Path) -> gate.Found:
    said = said_in(root)
    text, listed = listing(said), (root / LIST).read_text(encoding="utf-8")
    found = [
        f"{path}: not listed: {message}"
        for in_folder in said.values()
        for message, path in in_folder.items()
        if message not in listed.splitlines()
    ]
    gone = sorted(set(listed.splitlines()) - set(text.splitlines()))
    found += [f"{LIST}: no longer said: {line}" for line in gone]
    if text != listed and not found:
        found = [f"{LIST}: its lines are not in order"]
    return sum(map(len, said.values())), found


def self_test() -> list[str]:
    call = 'int f(void) {{\n    return fdma_fail(1, "{}: is wrong, want right");\n}}\n'
    sound = {
        "src/core/sound.c": call.format("x"),
        LIST: listing({"src/core": ["x: is wrong, want right"]}),
    }
    return gate.self_test_mistakes(
        check, sound, [("tools/planted.c", call.format("y")), (LIST, "z: is wrong, want right\n")]
    )


def main() -> int:
    update = {"action": "store_true", "help": "write the list anew"}

    def run(options: argparse.Namespace) -> gate.Found:
        if options.update:
            (gate.ROOT / LIST).write_text(listing(said_in(gate.ROOT)), encoding="utf-8")
        return check(gate.ROOT)

    return gate.main(__doc__, run, self_test, "{} messages, {} differences", {"--update": update})


if __name__ == "__main__":
    sys.exit(main())
