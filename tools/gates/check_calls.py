#!/usr/bin/env python3
"""Check who defines what a header declares, and that no files call each other in a circle.

A function that a header declares is defined in the header's folder, or in one above or below it,
so that a folder links to nothing but what it includes. The public header is exempt: the whole
library defines its functions.

A file calls another where the body of one of its functions names a function of the other before
parentheses; a table of function pointers is no call. Files that reach themselves that way are a
circle. A name that several files define means the caller's own; where it has none, the name is
left out.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import c_source
import gate

TOPS = ("src", "tools")
HEADERS = (".h", ".cuh")

Functions = dict[str, list[c_source.Function]]  # by path


def read(root: Path) -> Functions:
    found = {}
    for top in TOPS:
        for source in sorted((root / top).rglob("*")):
            if source.suffix in c_source.SUFFIXES:
                text = source.read_text(encoding="utf-8")
                found[source.relative_to(root).as_posix()] = list(c_source.functions(text))
    return found


def folder_of(path: str) -> str:
    return path.rsplit("/", 1)[0]


def are_kin(one: str, other: str) -> bool:
    """True if one folder is the other, or lies in it."""
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def misplaced(files: Functions) -> list[str]:
    """A line for each function that a header declares and only strange folders define."""
    defined = defaultdict(set)
    for path, functions in files.items():
        for function in functions:
            if function.body is not None:
                defined[function.name].add(folder_of(path))
    lines = []
    for path, functions in files.items():
        for function in functions if path.endswith(HEADERS) else ():
            folders = defined[function.name]
            kin = any(are_kin(folder_of(path), folder) for folder in folders)
            if function.body is None and folders and not kin:
                where = " and ".join(sorted(folders))
                lines.append(f"{path}:{function.first}: {function.name}() is defined in {where}")
    return lines


def callees(files: Functions) -> dict[str, dict[str, str]]:
    """For each file the files that it calls, with one function as a witness."""
    definers = defaultdict(set)
    for path, functions in files.items():
        for function in functions:
            if function.body is not None:
                definers[function.name].add(path)
    graph: dict[str, dict[str, str]] = {path: {} for path in files}
    for path, functions in files.items():
        for function in functions:
            for name in sorted(c_source.calls(function.body or "")):
                candidates = definers.get(name, set())
                if len(candidates) == 1 and path not in candidates:
                    graph[path][next(iter(candidates))] = name
    return graph


def find_circle(graph: dict[str, dict[str, str]]) -> list[str] | None:
    """The files of one circle in the order of their calls."""
    done: set[str] = set()

    def visit(path: str, above: list[str]) -> list[str] | None:
        if path in above:
            return above[above.index(path) :]
        if path in done:
            return None
        done.add(path)
        for callee in sorted(graph[path]):
            if circle := visit(callee, [*above, path]):
                return circle
        return None

    return next((circle for path in sorted(graph) if (circle := visit(path, []))), None)


def circles(files: Functions) -> list[str]:
    """A line for each circle; its last call is left out to find the next one."""
    graph = callees(files)
    lines = []
    while circle := find_circle(graph):
        steps = [
            f"{caller} calls {graph[caller][callee]}() of {callee}"
            for caller, callee in zip(circle, [*circle[1:], circle[0]])
        ]
        lines.append("circle: " + ", ".join(steps))
        del graph[circle[-1]][circle[0]]
    return lines


def check(root: Path) -> tuple[int, list[str]]:
    """The number of functions looked at, and a line for each fault."""
    files = read(root)
    count = sum(map(len, files.values()))
    return count, misplaced(files) + circles(files) if count > 0 else ["fails: no function"]


# A small tree in order; each plant adds text to one of its files, and must be refused.
SOUND = {
    "src/core/plan.h": "int fdma_plan(int x);\n",
    "src/core/plan.c": "int fdma_plan(int x) { return x; }\n",
    "src/core/checks.c": "static int twice(int x) {\n    return fdma_plan(x) + fdma_plan(x);\n}\n",
    "src/cpu/isa/isa.h": "int helper(void);\n",
    "src/cpu/merge/merge.h": "static int run_merge(void) { return helper() + fdma_plan(1); }\n",
    "src/cpu/table.c": "struct row {\n    int (*run)(void);\n};\nint helper(void) { return 0; }\n"
    "static const struct row rows[] = {{run_merge}};\n",
    "src/cuda/plan/plan.cuh": "void plan_lists(int x);\n",
    "src/cuda/plan/lists.cu": 'extern "C" {\nvoid plan_lists(int x) { kernel<4><<<x, 1>>>(x); }\n}',
    "tools/common/device.h": "int find_device(void);\n",
    "tools/common/device.c": "int find_device(void) { return 0; }\n",
    "tools/check/check.c": "int main(void) { return find_device(); }\n",
    # The circle of the last plant goes through this function.
    "src/cuda/plan/launch.cu": "void launch(int x) { plan_lists(x); }\n",
}
PLANTS = (
    ("src/cuda/forward/sm80/tile.cuh", "void plan_lists(int x);\n"),
    ("tools/check/check.h", "int find_device(\n    void);\n"),
    ("src/core/plan.c", "int use(int x) { return twice(x); }\n"),
    ("tools/common/device.c", "int back(void) { return main(); }\n"),
    ("src/cpu/table.c", "int call(void) { return run_merge(); }\n"),
    ("src/cuda/plan/lists.cu", "\ntemplate <int n> void kernel(int x) { launch(x); }\n"),
)


def main() -> int:
    return gate.main(
        __doc__,
        lambda options: check(gate.ROOT),
        lambda: gate.self_test_mistakes(check, SOUND, PLANTS),
        "{} functions, {} against the arrows",
    )


if __name__ == "__main__":
    sys.exit(main())
