#!/usr/bin/env python3
"""Check the words of code and documents.

Words that docs/glossary.md replaces are not used: some nowhere, others, which plain English needs,
not as parts of names in code. Phrases that make a reader go back ("of which", sentences that begin
with "Whether" or "What") are counted, and there are at most PHRASES of them. The glossary, data,
results and this file are exempt.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

import c_source
import gate

# word, and what to use instead
EVERYWHERE = {
    "stretch": "partition",
    "verdict": "what the check found",
    "floors": "thresholds",
    "facts": "what they are, such as lse and delta",
}
IN_NAMES = {
    "note": "what it holds",
    "carry": "merge",
    "carries": "merged sums",
    "floor": "threshold",
    "fact": "what it holds",
}
# Words of others (torch's functions, C's floorf()), and verbs: carry_elements().
EXCEPTIONS = re.compile(r"floorf?\(|_floor_p[sd]\b|(?<![a-zA-Z0-9_])(note|carry)_(?=[a-z])")

PHRASE = re.compile(
    r"(?i:\b(?:of which|that of|those of)\b)"
    r'|(?:^|[.!?:] +|/\* |^ *\* +|""" *|# |// |- |\| )(?:Whether|What|That of|Those of)\b',
    re.MULTILINE,
)
PHRASES = 106

CODE = (*c_source.SUFFIXES, ".def", ".inc", ".py")
PROSE = (".md", ".sh", ".cmake", ".txt")
FILES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CMakeLists.txt", "Makefile", ".ci/run")
TOPS = ("benchmarks", "cmake", "docs", "examples", "include")
TOPS += ("python", "research", "src", "tests", "tools")
EXEMPT = re.compile(
    r"docs/glossary\.md|docs/figures/|(benchmarks|research)/results/|examples/data/|tests/golden/golden\.inc"
    r"|tests/fuzz/corpus/|tools/gates/check_words\.py"
)


def pattern(words: dict[str, str]) -> re.Pattern[str]:
    """The words and their plurals, as whole words or as parts of a name."""
    return re.compile(rf"(?<![a-zA-Z])({'|'.join(words)})(?:s|es)?(?![a-zA-Z])", re.IGNORECASE)


ANYWHERE, NAMED = pattern(EVERYWHERE), pattern(IN_NAMES)


def python_code(text: str) -> str:
    """The text with comments and strings blank."""
    lines = [list(line) for line in text.splitlines(keepends=True)]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.STRING):
            continue
        (first, begin), (last, end) = token.start, token.end
        for number in range(first, last + 1):
            line = lines[number - 1]
            stop = end if number == last else len(line)
            for column in range(begin if number == first else 0, stop):
                line[column] = line[column] if line[column] == "\n" else " "
    return "".join("".join(line) for line in lines)


def code_of(path: str, text: str) -> str:
    """What of a file is names: nothing of prose."""
    if path.endswith(".py"):
        return python_code(text)
    return c_source.strip_comments(text) if path.endswith(CODE) else ""


def check_text(path: str, text: str) -> list[str]:
    """A line for each line of the file that has a banned word."""
    names = code_of(path, text).splitlines()
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        name_line = names[number - 1] if number <= len(names) else ""
        for words, looked_for, where in (
            (EVERYWHERE, ANYWHERE, line),
            (IN_NAMES, NAMED, name_line),
        ):
            match = looked_for.search(EXCEPTIONS.sub("", where))
            if match:
                instead = words[match[1].lower()]
                found.append(f"{path}:{number}: fails: {match[0]!r}; say {instead}")
                break
    return found


def files_of(root: Path) -> list[Path]:
    found = [root / name for name in FILES]
    for top in TOPS:
        found += [path for path in sorted((root / top).rglob("*")) if path.suffix in CODE + PROSE]
    return [path for path in found if path.is_file()]


def check(root: Path) -> gate.Found:
    """The number of files looked at, a line for each that has a banned word, and one for too many
    phrases."""
    count = 0
    found = []
    phrases: list[str] = []
    for source in files_of(root):
        path = source.relative_to(root).as_posix()
        if not EXEMPT.match(path):
            count += 1
            text = source.read_text(encoding="utf-8")
            found += check_text(path, text)
            phrases += [] if path == "CHANGELOG.md" else [path] * len(PHRASE.findall(text))
    if len(phrases) > PHRASES:
        most = ", ".join(f"{n} in {path}" for path, n in Counter(phrases).most_common(9))
        found.append(f"fails: {len(phrases)} such phrases, at most {PHRASES}: {most}")
    return count, found if count > 0 else ["fails: there is no file"]


SOUND = {
    "README.md": "Each query takes part in the softmax; they share keys in place of masks.\n",
    "docs/algorithm.md": "As in chunked prefill, queries come later than keys.\n",
    "docs/glossary.md": "stretch and verdict are gone.\n",
    "src/core/plan.c": "/* Kernels carry this floor. */\nint carry_elements(void);\n",
    "src/cpu/simd/scalar.h": "static float f(float x) { return x - floorf(x); }\n",
    "python/a.py": '"""A note on this part."""\nfirst, second = x.chunk(2)\n',
}
PLANTS = (
    ("README.md", "A stretch has keys.\n"),
    ("docs/algorithm.md", "A stretch of time; the Verdicts.\n"),
    ("src/core/plan.c", "/* facts of rows */\n"),
    ("src/core/plan.c", "static int stretch_keys;\n"),
    ("src/cpu/simd/scalar.h", "static tile_note note_of(int fact);\n"),
    ("python/a.py", "carries_of_row = 1\n"),
    ("python/a.py", '"""The verdict."""\n'),
    ("tools/gates/run.sh", "for stretch in 1 2; do\n"),
    ("src/core/plan.c", "/* Whether it is. */ /* rows, the last of which is that of k */\n" * 36),
)


def main() -> int:
    return gate.main(
        __doc__,
        lambda options: check(gate.ROOT),
        lambda: gate.self_test_mistakes(check, SOUND, PLANTS),
        "{} files, {} differences from the glossary",
    )


if __name__ == "__main__":
    sys.exit(main())
