#!/usr/bin/env python3
"""Plants the faults of faults.py and mask_faults.py, one at a time: a test must fail for each.

    mutate.py [--texts] [--everything] [NAME ...]

The script works in build/mutate, in a copy of the tree as it is now (a git worktree with the
changes that are not committed), and builds there for the CPU. For each fault it replaces one text
in one file, builds what the fault's tests need, and runs these in order until one fails. A fault
that compiles and fails no test survives. NAME restricts the run to faults whose name or path
contains it, such as src/cpu.

--texts only checks that every text still occurs exactly once, and that the tests are there.
--everything runs all C tests before it calls a fault a survivor. Exit status: 1 if a fault
survives, does not compile or has lost its text; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from fault import Fault
from faults import FAULTS
from mask_faults import MASKS

ROOT = Path(__file__).resolve().parents[2]
SCRATCH = ROOT / "build" / "mutate"
TREE = SCRATCH / "tree"
TEST_SECONDS = 300  # a test that takes longer hangs, which counts as a failure
# ISAs that most builds leave out: a fault in a CPU kernel then compiles twice, not five times.
NARROW = ("avx512", "avx512bf16", "amx")

ENVIRONMENT = {
    **os.environ,
    "OMP_WAIT_POLICY": "passive",
    "PYTHONDONTWRITEBYTECODE": "1",
    **({"CMAKE_C_COMPILER_LAUNCHER": "ccache"} if shutil.which("ccache") else {}),
}


def run(*command: str | Path, seconds: int | None = None) -> subprocess.CompletedProcess[str]:
    """The command in the copy of the tree, with low priority; 124 where it ran out of time."""
    words = ["nice", "-n", "10", *map(str, command)]
    try:
        return subprocess.run(
            words, cwd=TREE, env=ENVIRONMENT, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 124, "", f"longer than {seconds} s")


def git(*arguments: str | Path, folder: Path = ROOT) -> str:
    command = ["git", "-C", str(folder), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def copy_tree() -> None:
    """Makes TREE hold what the working tree holds, without touching files that are equal."""
    commit = git("stash", "create") or git("rev-parse", "HEAD")
    if not (TREE / ".git").exists():
        git("worktree", "prune")
        git("worktree", "add", "--detach", "--force", TREE, commit)
    git("checkout", "--detach", "--force", commit, folder=TREE)
    git("clean", "-fdq", folder=TREE)


def configure(wide: bool) -> Path:
    """The build folder with all ISAs or with the narrow choice; configured once."""
    folder = SCRATCH / ("wide" if wide else "narrow")
    if not (folder / "build.ninja").exists():
        skipped = [] if wide else [f"-DFDMA_COMPILES_{isa}=OFF" for isa in NARROW]
        options = ("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DFDMA_CUDA=OFF", *skipped)
        done = run("cmake", "-S", ".", "-B", folder, *options)
        if done.returncode != 0:
            sys.exit(f"mutate: {done.stdout}{done.stderr}")
    return folder


def targets_of(test: str) -> list[str]:
    kind, *_ = test.split()
    if kind == "check":
        return ["fdma_tool"]
    return ["fdma_tool", "fdma_shared", "fdma_python", "tokens"] if kind == "pytest" else [kind]


def build(folder: Path, targets: list[str]) -> str | None:
    """None, or the compiler's first error."""
    done = run("cmake", "--build", folder, "-j", "2", "--target", *targets)
    if done.returncode == 0:
        return None
    output = done.stdout + done.stderr
    error = re.search(r"^.*(error:|Error).*$", output, re.MULTILINE)
    return error[0] if error else output[-300:]


def run_test(folder: Path, test: str) -> int:
    """`test_NAME` is a C test, `check FILTER` the command, `pytest FILE [-k WORD]` Python's."""
    kind, *rest = test.split()
    if kind == "check":
        return run(folder / "fdma", "check", *rest, seconds=TEST_SECONDS).returncode
    if kind != "pytest":
        return run(folder / "tests" / kind, seconds=TEST_SECONDS).returncode
    ENVIRONMENT["FDMA_LIBRARY"] = str(folder / "libfdma.so")
    ENVIRONMENT["FDMA_TOOL"] = str(folder / "fdma")
    # The one that `make` has built: faults of src/ort are not planted.
    ENVIRONMENT["FDMA_ORT_LIBRARY"] = str(ROOT / "build" / "libfdma_ort.so")
    ENVIRONMENT["PYTHONPATH"] = str(TREE / "python")
    python = ROOT / ".venv" / "bin" / "python"
    file, *words = rest
    options = ("-q", "-x", "-p", "no:cacheprovider", *words)
    done = run(python, "-m", "pytest", f"tests/python/{file}", *options, seconds=TEST_SECONDS)
    if done.returncode not in (0, 1, 124):
        sys.exit(f"mutate: {test}: pytest exits {done.returncode}\n{done.stdout}{done.stderr}")
    return done.returncode


def run_all(folder: Path) -> str | None:
    """The first C test that fails, of all."""
    if build(folder, ["all"]) is not None:
        return None
    done = run("ctest", "--test-dir", folder, "-j", "2", "--stop-on-failure", "-LE", "install")
    failed = re.search(r"- (\w+) \(Failed\)", done.stdout)
    return failed[1] if failed else None


def plant(fault: Fault) -> tuple[str, str]:
    """The finding ("caught", "SURVIVED" or "BROKEN"), and the test or the reason."""
    source = find_source(TREE, fault)
    assert source is not None
    text = source.read_text(encoding="utf-8")
    folder = configure(fault.wide)
    source.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    try:
        for test in fault.tests:
            error = build(folder, targets_of(test))
            if error is not None:
                return "BROKEN", f"does not compile: {error}"
            status = run_test(folder, test)
            if status != 0:
                return "caught", f"{test}{' (hangs)' if status == 124 else ''}"
        if OPTIONS.everything and (test := run_all(folder)):
            return "caught", f"{test} (not among the fault's tests)"
    finally:
        source.write_text(text, encoding="utf-8")
    return "SURVIVED", ", ".join(fault.tests)


def count_text(root: Path, fault: Fault) -> dict[Path, int]:
    """The number of times that each possible file of the fault has its text, for files that have
    it."""
    path = root / fault.path
    files = sorted(path.rglob("*.[chp]*")) if path.is_dir() else [path]
    counts = {
        file: file.read_text(encoding="utf-8").count(fault.old) for file in files if file.is_file()
    }
    return {file: count for file, count in counts.items() if count > 0}


def find_source(root: Path, fault: Fault) -> Path | None:
    """The file that has the fault's text, if it occurs exactly once."""
    counts = count_text(root, fault)
    return next(iter(counts)) if list(counts.values()) == [1] else None


def lost_texts(root: Path, faults: list[Fault]) -> list[str]:
    """A line for each fault whose text does not occur exactly once, or whose tests are gone."""
    lines = []
    for fault in faults:
        if find_source(root, fault) is None:
            count = sum(count_text(root, fault).values())
            lines.append(f"LOST      {fault.name}: {fault.path} has {fault.old!r} {count} times")
        for test in fault.tests:
            kind, *words = test.split()
            file = f"python/{words[0]}" if kind == "pytest" else f"c/{kind}.c"
            if kind != "check" and not (root / "tests" / file).exists():
                lines.append(f"LOST      {fault.name}: its test {file} is not there")
    return lines


def check_sound(faults: list[Fault]) -> None:
    """Without a fault every test must pass, or a failure shows nothing."""
    for wide in sorted({fault.wide for fault in faults}):
        folder = configure(wide)
        tests = sorted({test for fault in faults if fault.wide == wide for test in fault.tests})
        error = build(folder, sorted({target for test in tests for target in targets_of(test)}))
        if error is not None:
            sys.exit(f"mutate: the tree itself does not compile: {error}")
        for test in tests:
            if run_test(folder, test) != 0:
                sys.exit(f"mutate: {test} fails without a fault")


def main() -> int:
    names = OPTIONS.names or [""]
    faults = [
        f for f in (*FAULTS, *MASKS) if any(name in f.name or name in f.path for name in names)
    ]
    if not faults:
        print(f"mutate: no fault's name or path contains {' or '.join(names)}", file=sys.stderr)
        return 2
    lost = lost_texts(ROOT, faults)
    print(*lost, sep="\n", end="\n" if lost else "", flush=True)
    if OPTIONS.texts:
        print(f"{len(faults)} faults, {len(lost)} without their text")
        return 1 if lost else 0
    faults = [fault for fault in faults if not lost_texts(ROOT, [fault])]
    copy_tree()
    check_sound(faults)
    counts = {"caught": 0, "SURVIVED": 0, "BROKEN": 0}
    for fault in faults:
        begin = time.monotonic()
        found, by = plant(fault)
        counts[found] += 1
        print(f"{found:9s} {fault.name}: {by} ({time.monotonic() - begin:.0f} s)", flush=True)
    caught, survived, broken = counts.values()
    print(
        f"{caught} of {len(faults) + len(lost)} faults caught, {survived} survived, "
        f"{broken} did not compile, {len(lost)} lost their text"
    )
    return 0 if caught == len(faults) and not lost else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", action="store_true", help="only check that texts are there")
    parser.add_argument("--everything", action="store_true", help="all C tests before giving up")
    parser.add_argument("names", nargs="*", metavar="NAME")
    OPTIONS = parser.parse_args()
    sys.exit(main())
