"""Reads C, CUDA and header files, as clang-format leaves them, for the gates: functions that are
declared and defined, and the calls in a body. Macros are not expanded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

SUFFIXES = (".c", ".h", ".cu", ".cuh", ".cpp")

# Comments, strings and characters, and preprocessor lines with their continuations.
NOT_CODE = re.compile(
    r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|^[ \t]*#(?:\\\n|[^\n])*',
    re.DOTALL | re.MULTILINE,
)
ATTRIBUTE = re.compile(r"__attribute__\s*\(\(.*?\)\)|__launch_bounds__\s*\([^)]*\)", re.DOTALL)
CALL = re.compile(r"\b([A-Za-z_]\w*)\s*(?:<[\w, :]*>\s*)?(?:<<<.*?>>>\s*)?\(", re.DOTALL)


class Function(NamedTuple):
    name: str
    first: int  # line of its signature
    last: int  # line of its closing brace, or of the semicolon of a declaration
    is_static: bool
    body: str | None  # None: only declared


def blank(match: re.Match[str]) -> str:
    """Leaves the line breaks, so that line numbers stay true, and a mark where a string was."""
    return ("''" if match[0][0] in "\"'" else "") + "\n" * match[0].count("\n")


def strip_comments(text: str) -> str:
    return NOT_CODE.sub(blank, text)


def function_name(signature: str) -> str | None:
    """None if it is no function: a type, or a variable and its initialiser."""
    bare = ATTRIBUTE.sub("", signature)
    if "=" in bare or bare.startswith("typedef") or not (match := re.search(r"(\w+)\s*\(", bare)):
        return None
    return match[1]


def make_function(code: str, start: int, signature: str, end: int, body: str | None) -> Function:
    first = start + len(code[start:]) - len(code[start:].lstrip())
    return Function(
        name=function_name(signature) or "",
        first=code.count("\n", 0, first) + 1,
        last=code.count("\n", 0, end) + 1,
        is_static=bool(re.search(r"\b(static|INLINE)\b", signature)),
        body=body,
    )


def functions(text: str) -> Iterator[Function]:
    """Every function that a file declares or defines. Errors: ValueError."""
    code = strip_comments(text)
    depth = 0
    start = 0  # start of the declaration at the outermost level
    opened = 0
    signature = ""
    for brace in re.finditer(r"[{};]", code):
        if brace[0] == "{":
            if depth == 0:
                signature = code[start : brace.start()].strip()
                opened = brace.end()
                if signature == "extern ''":
                    start = brace.end()
                    continue
            depth += 1
        elif brace[0] == "}" and depth > 0:
            depth -= 1
            if depth == 0 and function_name(signature):
                body = code[opened : brace.start()]
                yield make_function(code, start, signature, brace.end(), body)
                start = brace.end()
        elif brace[0] == ";" and depth == 0:
            declared = code[start : brace.start()].strip()
            if "{" not in declared and function_name(declared):
                yield make_function(code, start, declared, brace.end(), None)
            start = brace.end()
    if depth != 0:
        raise ValueError("braces do not balance")


def calls(body: str) -> set[str]:
    """Names that are followed by parentheses: calls, and a few words of the language."""
    return set(CALL.findall(body))
