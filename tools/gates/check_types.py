#!/usr/bin/env python3
"""Check the types that users of the Python package see, by mypy and by pyright: the Python programs
of all documents and of examples/, and the calls of tests/types. mypy also checks the package.

mypy is strict for all but the package (pyproject.toml), pyright has its standard mode. Each line of
tests/types that ends in `# wrong` must be refused by both.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gate

FENCE = re.compile(r"^```python\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
FOLDER = gate.ROOT / "build" / "gates" / "types"
PROGRAMS = ("examples/*.py", "tests/types/*.py")
PACKAGES = ("python/flash_dmattn", "python/flash_dma", "python/flash_dma_cuda")
# Faults of other packages, which a program that uses them cannot avoid.
OTHERS = re.compile(
    r'Cannot access attribute "generate" for class "\w+ForCausalLM"'  # of transformers' own, too
)
Fault = tuple[str, int, str]  # file, line, message


def extract() -> list[Path]:
    """The programs of all documents, each in a file DOCUMENT_LINE.py."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("*.py"):
        old.unlink()
    found = []
    for document in [*gate.ROOT.glob("README*.md"), *(gate.ROOT / "docs").glob("*.md")]:
        text = document.read_text(encoding="utf-8")
        for block in FENCE.finditer(text):
            line = text.count("\n", 0, block.start()) + 2
            found.append(FOLDER / f"{document.stem}_{line}.py")
            found[-1].write_text(block[1], encoding="utf-8")
    return found


def mypy(programs: list[Path]) -> list[Fault]:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--cache-dir",
        "build/gates/mypy",
        "--no-error-summary",
    ]
    command += [*map(str, programs), *PACKAGES]
    done = subprocess.run(command, cwd=gate.ROOT, capture_output=True, text=True)
    lines = re.findall(r"^(.+?):(\d+): error: (.*)$", done.stdout, re.M)
    if done.returncode not in (0, 1) or (done.returncode and not lines):
        sys.exit(f"mypy failed: {done.stdout}{done.stderr}")
    return [(str(gate.ROOT / path), int(line), f"mypy: {text}") for path, line, text in lines]


def pyright(programs: list[Path]) -> list[Fault]:
    settings = FOLDER / "pyrightconfig.json"
    roots = [str(gate.ROOT / path) for path in ("python", "examples", "benchmarks")]
    # Paths that are not relative to this file are not found.
    include = [os.path.relpath(gate.ROOT / path, FOLDER) for path in programs]
    given = {"include": include, "extraPaths": roots, "typeCheckingMode": "standard"}
    settings.write_text(json.dumps(given))
    command = [sys.executable, "-m", "pyright", "--outputjson", "-p", str(settings)]
    done = subprocess.run(
        [*command, "--pythonpath", sys.executable], capture_output=True, text=True, cwd=gate.ROOT
    )
    try:
        found = json.loads(done.stdout)
    except json.JSONDecodeError:
        sys.exit(f"pyright failed: {done.stdout}{done.stderr}")
    if found["summary"]["filesAnalyzed"] < len(programs):
        sys.exit(f"pyright saw {found['summary']['filesAnalyzed']} of {len(programs)} programs")
    return [
        (
            one["file"],
            one["range"]["start"]["line"] + 1,
            f"pyright: {one['message'].splitlines()[0]}",
        )
        for one in found["generalDiagnostics"]
        if one["severity"] == "error" and not OTHERS.match(one["message"])
    ]


def wrong_lines(programs: list[Path]) -> set[tuple[str, int]]:
    return {
        (str(path), number)
        for path in programs
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if line.endswith("# wrong")
    }


def main() -> int:
    programs = extract()
    programs += [path for name in PROGRAMS for path in sorted(gate.ROOT.glob(name))]
    wrong = wrong_lines(programs)
    if not wrong:
        sys.exit("fails: tests/types has no wrong line")
    problems = []
    for check in (mypy, pyright):
        found = check(programs)
        problems += [fault for fault in found if fault[:2] not in wrong]
        missed = wrong - {fault[:2] for fault in found}
        problems += [(*place, f"{check.__name__}: does not refuse it") for place in missed]
    for path, line, text in sorted(problems):
        print(f"{Path(path).relative_to(gate.ROOT)}:{line}: error: {text}")
    print(f"{len(programs)} programs, {len(wrong)} wrong calls, {len(problems)} against the types")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
