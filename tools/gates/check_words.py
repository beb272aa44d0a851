#!/usr/bin/env python3
"""Check that words which docs/glossary.md replaces are not used.

Some words are banned everywhere; others, which plain English needs, only as parts of names in
code. The glossary, data, results and this file are exempt. Files that unclean_words.txt lists, one
path a line, may still hold such words: these are counted, not refused. The list is to be emptied.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tokenize
from pathlib import Path

import c_source
import gate

# word, and what to use instead
EVERYWHERE = {
    "chunk": "split, partition, task or block",
    "stretch": "partition",
    "epoch": "partition or query block",
    "verdict": "what the check found",
    "floors": "thresholds",
    "facts": "what they are, such as lse and delta",
}
IN_NAMES = {
    "share": "weight",
    "note": "what it holds",
    "carry": "merge",
    "carries": "merged sums",
    "place": "rank, slot, tile or index",
    "part": "split, partition or partial",
    "floor": "threshold",
    "fact": "what it holds",
}
# Words of others ("chunked prefill", transformers' arguments for it, torch's functions, C's
# floorf()), and verbs: share_elements().
EXCEPTIONS = re.compile(
    r"chunked prefill|(prefill|attention)_chunk_size|\.chunk\(|floorf?\(|_floor_p[sd]\b"
    r"|in[-_ ]place|(?<![a-zA-Z0-9_])(share|place|note|carry)_(?=[a-z])"
)

CODE = (*c_source.SUFFIXES, ".def", ".inc", ".py")
PROSE = (".md", ".sh", ".cmake", ".txt")
FILES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CMakeLists.txt", "Makefile", ".ci/run")
TOPS = ("benchmarks", "cmake", "docs", "examples", "include")
TOPS += ("python", "research", "src", "tests", "tools")
EXEMPT = re.compile(
    r"docs/glossary\.md|docs/figures/|(benchmarks|research)/results/|examples/data/|tests/golden/golden\.inc"
    r"|tests/fuzz/corpus/|tools/gates/(check_words\.py|unclean_words\.txt)"
)
UNCLEAN = Path(__file__).with_name("unclean_words.txt")


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
    """The number of files looked at, and a line for each that has a banned word."""
    count = 0
    found = []
    for source in files_of(root):
        path = source.relative_to(root).as_posix()
        if not EXEMPT.match(path):
            count += 1
            found += check_text(path, source.read_text(encoding="utf-8"))
    return count, found if count > 0 else ["fails: there is no file"]


SOUND = {
    "README.md": "Each query takes part in the softmax; they share keys in place of masks.\n",
    "docs/algorithm.md": "As in chunked prefill, queries come later than keys.\n",
    "docs/glossary.md": "chunk, stretch and epoch are gone.\n",
    "src/core/plan.c": "/* Kernels share this place. */\nint share_elements(void);\n",
    "src/cpu/simd/scalar.h": "static float f(float x) { return x - floorf(x); }\n",
    "python/a.py": '"""A note on this part."""\nfirst, second = x.chunk(2)\n',
}
PLANTS = (
    ("README.md", "Every chunk has keys.\n"),
    ("docs/algorithm.md", "A stretch of time; the Epochs.\n"),
    ("src/core/plan.c", "/* facts of rows */\n"),
    ("src/core/plan.c", "static int chunk_keys;\n"),
    ("src/cpu/simd/scalar.h", "static tile_place place_of(int share);\n"),
    ("python/a.py", "shares_of_part = 1\n"),
    ("python/a.py", '"""The verdict."""\n'),
    ("tools/gates/run.sh", "for epoch in 1 2; do\n"),
)


def check_listed(options: argparse.Namespace) -> gate.Found:
    """As check(), without the lines of the files that unclean_words.txt lists."""
    count, found = check(gate.ROOT)
    listed = UNCLEAN.read_text(encoding="utf-8").split() if UNCLEAN.exists() else []
    waiting = {path: [line for line in found if line.startswith(f"{path}:")] for path in listed}
    for path, lines in waiting.items():
        print(*(lines if options.list else ()), sep="\n", end="\n" if options.list else "")
        print(f"{path}: {len(lines)} lines to mend" if lines else f"{path}: clean, take it off")
    known = sum(waiting.values(), [])
    return count, [line for line in found if line not in known]


def main() -> int:
    return gate.main(
        __doc__,
        check_listed,
        lambda: gate.self_test_mistakes(check, SOUND, PLANTS),
        "{} files, {} differences from the glossary",
        {"--list": {"action": "store_true", "help": "print the lines of listed files too"}},
    )


if __name__ == "__main__":
    sys.exit(main())
