"""Check that messages.txt lists every message of the library and of the command `fdma`.

    check_messages.py [--update]     --update writes the list anew

The list is there to be read as a whole: each message says what is wrong and what is wanted, and the
same thing is said in the same words. Those of the Python package are in tests/python/messages.txt.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import c_source

ROOT = Path(__file__).parents[2]
LIST = ROOT / "tools/gates/messages.txt"
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


def listing() -> str:
    lines = [
        "# Every message of the library and of the command, by folder; see check_messages.py.",
        "# Texts without a colon are parts of messages, such as what a kernel does not support.",
    ]
    seen: set[Path] = set()
    for folder in FOLDERS:
        files = {path for path in (ROOT / folder).rglob("*") if path.suffix in c_source.SUFFIXES}
        found = set().union(*(messages(path.read_text()) for path in files - seen))
        seen |= files
        lines += ["", f"# {folder}", *sorted(found)] if found else []
    return "\n".join(lines) + "\n"


def main() -> int:
    text = listing()
    if "--update" in sys.argv:
        LIST.write_text(text)
    known = LIST.read_text().splitlines() if LIST.exists() else []
    changed = set(known) ^ set(text.splitlines())
    for line in sorted(changed):
        print(f"{'no longer said' if line in known else 'not listed'}: {line}")
    print(f"{text.count(chr(10))} lines, {len(changed)} differences")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
