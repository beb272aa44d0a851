#!/usr/bin/env python3
"""Check sizes in C, Python and shell.

Functions have at most 60 lines (120 in CUDA, where a step of an algorithm stays on one page), files
at most 900, and lines of C, whose comments clang-format leaves alone, at most 100 columns.

C is read as clang-format leaves it, by counting braces outside of comments, strings and
preprocessor lines. A function's lines run from its signature to its closing brace.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import c_source
import gate

FUNCTION_LINES, CUDA_FUNCTION_LINES = 60, 120
FILE_LINES = 900
MANUAL, MANUAL_LINES = "include/fdma.h", 1400  # one header for all calls
COLUMNS = 100
TOPS = (".ci", "benchmarks", "cmake", "examples", "include")
TOPS += ("python", "research", "src", "tests", "tools")
SUFFIXES = (*c_source.SUFFIXES, ".py", ".sh", ".cmake")

Function = tuple[str, int, int]  # name, first line, last line


def c_functions(text: str) -> Iterator[Function]:
    for function in c_source.functions(text):
        if function.body is not None:
            yield function.name, function.first, function.last


def python_functions(text: str) -> Iterator[Function]:
    """Parameters and docstrings do not count, because a public function has a line or more of each
    for every argument."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            documented = ast.get_docstring(node) is not None and len(node.body) > 1
            yield node.name, node.body[documented].lineno, node.end_lineno or node.lineno


def check_text(path: str, text: str) -> tuple[int, list[str]]:
    """The number of functions seen, and a line for each thing that is too long."""
    found = []
    lines = len(text.splitlines())
    most = MANUAL_LINES if path == MANUAL else FILE_LINES
    if lines > most:
        found.append(f"{path}: {lines} lines, at most {most}")
    suffix = Path(path).suffix
    for number, line in enumerate(text.splitlines() if suffix in c_source.SUFFIXES else (), 1):
        if len(line) > COLUMNS:
            found.append(f"{path}:{number}: {len(line)} columns, at most {COLUMNS}")
    functions: list[Function] = []
    try:
        if suffix in c_source.SUFFIXES:
            functions = list(c_functions(text))
        elif suffix == ".py":
            functions = list(python_functions(text))
    except (SyntaxError, ValueError) as error:
        found.append(f"{path}: {error}")
    most = CUDA_FUNCTION_LINES if suffix in (".cu", ".cuh") else FUNCTION_LINES
    for name, first, last in functions:
        if last - first + 1 > most:
            found.append(f"{path}:{first}: {name}() has {last - first + 1} lines, at most {most}")
    return len(functions), found


def check(root: Path) -> tuple[int, list[str]]:
    count = 0
    found = []
    for top in TOPS:
        for source in sorted((root / top).rglob("*")):
            if source.is_file() and (source.suffix in SUFFIXES or top == ".ci"):
                text = source.read_text(encoding="utf-8")
                functions, problems = check_text(source.relative_to(root).as_posix(), text)
                count += functions
                found += problems
    return count, found if count > 0 else ["fails: there is no function"]


def c_function(lines: int) -> str:
    """A function that is hard to read: its signature takes two lines, its body has braces."""
    body = [
        '    const char *text = "}{"; // }',
        "    struct point p = {.x = '{'}; /* } */",
    ]
    fill = ["    p.x++;"] * (lines - 3 - len(body))
    signature = ["static struct point make(int a,", "                         int b) {"]
    return "\n".join([*signature, *body, *fill, "}", ""])


def self_test() -> list[str]:
    """The check's mistakes on texts of known sizes."""
    head = "struct point {\n    int x;\n};\n\nstatic const int table[] = {\n"
    head += "    1,\n" * 70 + "};\n\n"
    guard = '#ifdef __cplusplus\nextern "C" {\n#endif\n'
    end = "#ifdef __cplusplus\n}\n#endif\n"
    python = "@cache\ndef long(\n    a: int,\n    b: int,\n) -> None:\n" + "    pass\n"
    wanted = (
        ("a.c", head + c_function(60), 1, 0),
        ("a.c", head + c_function(61), 1, 1),
        ("a.c", c_function(61) + head + c_function(60) + c_function(61), 3, 2),
        ("a.h", guard + c_function(61) + end, 1, 1),
        ("a.cu", c_function(120), 1, 0),
        ("a.cuh", c_function(121), 1, 1),
        ("a.h", guard + "#define M(x) \\\n    {\n" + c_function(60) + end, 1, 0),
        ("a.c", "int x(void) {\n", 0, 1),
        ("a.c", "/* " + "x" * 94 + " */\n/* " + "x" * 95 + " */\n", 0, 1),
        ("a.py", python + "    pass\n" * 59, 1, 0),
        ("a.py", python + "    pass\n" * 60, 1, 1),
        ("a.py", "def long() -> None:\n" + '    """A.\n\n    B."""\n' + "    pass\n" * 60, 1, 0),
        ("a.sh", "true\n" * 900, 0, 0),
        ("a.sh", "true\n" * 901, 0, 1),
    )
    wrong = []
    for index, (path, text, functions, problems) in enumerate(wanted):
        count, found = check_text(path, text)
        if (count, len(found)) != (functions, problems):
            wrong.append(f"text {index}: {count} functions, want {functions}; {found}")
    sound = {"src/sound.c": c_function(60)}
    return wrong + gate.self_test_mistakes(check, sound, [("src/planted.c", c_function(61))])


def main() -> int:
    return gate.main(
        __doc__,
        lambda options: check(gate.ROOT),
        self_test,
        "{} functions, {} too long or unreadable",
    )


if __name__ == "__main__":
    sys.exit(main())
