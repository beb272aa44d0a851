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
import tempfile
import tokenize
from pathlib import Path

import c_source

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
    "carried": "delta, or what the sums are of",
    "carry": "merge",
    "carries": "merged sums",
    "place": "rank, slot, tile or index",
    "part": "split, partition or partial",
    "floor": "threshold",
    "fact": "what it holds",
}
# Words of others ("chunked prefill", torch's functions, C's floorf()), and verbs: share_elements().
EXCEPTIONS = re.compile(
    r"chunked prefill|\.chunk\(|floorf?\(|_floor_p[sd]\b|in[-_ ]place"
    r"|(?<![a-zA-Z0-9_])(share|place|note|carry)_(?=[a-z])"
)

CODE = (*c_source.SUFFIXES, ".def", ".inc", ".py")
PROSE = (".md", ".sh", ".cmake", ".txt")
FILES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CMakeLists.txt", "Makefile", ".ci/run")
TOPS = ("benchmarks", "cmake", "docs", "examples", "include", "python", "src", "tests", "tools")
EXEMPT = re.compile(
    r"docs/glossary\.md|docs/figures/|benchmarks/results/|examples/data/|tests/golden/golden\.inc"
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


def check(root: Path) -> tuple[int, dict[str, list[str]]]:
    """The number of files looked at, and what is wrong in each that is not clean."""
    count = 0
    found = {}
    for source in files_of(root):
        path = source.relative_to(root).as_posix()
        if EXEMPT.match(path):
            continue
        count += 1
        if lines := check_text(path, source.read_text(encoding="utf-8")):
            found[path] = lines
    return count, found


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


def self_test() -> list[str]:
    """What the check gets wrong on a small tree: nothing, or the gate is worth nothing."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)

        def write(path: str, text: str) -> None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")

        for path, text in SOUND.items():
            write(path, text)
        wrong = [f"refused without reason: {line}" for line in sum(check(root)[1].values(), [])]
        for path, text in PLANTS:
            write(path, SOUND.get(path, "") + text)
            if path not in check(root)[1]:
                wrong.append(f"did not see {text!r} in {path}")
            (root / path).unlink()
            if path in SOUND:
                write(path, SOUND[path])
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--self-test", action="store_true", help="plant words and find them")
    parser.add_argument("--list", action="store_true", help="print the lines of listed files too")
    options = parser.parse_args()
    if options.self_test:
        wrong = self_test()
        print(*wrong, sep="\n", end="\n" if wrong else "")
        print(f"{len(PLANTS)} planted words, {len(wrong)} mistakes")
        return 1 if wrong else 0
    count, found = check(Path(__file__).parents[2])
    listed = UNCLEAN.read_text(encoding="utf-8").split() if UNCLEAN.exists() else []
    refused = [line for path, lines in found.items() if path not in listed for line in lines]
    waiting = [line for path, lines in found.items() if path in listed for line in lines]
    shown = refused + (waiting if options.list else [])
    print(*shown, sep="\n", end="\n" if shown else "")
    for path in listed:
        state = (
            f"{len(found[path])} lines to mend" if path in found else "clean: take it off the list"
        )
        print(f"{path}: {state}")
    print(f"{count} files, {len(refused)} differences from the glossary, {len(waiting)} known")
    return 1 if refused or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
