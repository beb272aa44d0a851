#!/usr/bin/env python3
"""Check that what only `make full` runs has passed since its inputs changed.

    check_full.py               fails for each part that failed, or whose inputs have changed
    check_full.py --run PART    runs a part, or `all` of them, and writes its line of full.txt

`make test` and `make gates` run a sample of some tests; a part is all tests of one such sample. Its
inputs are the files that can break what the sample leaves out. full.txt has a line for each part:
its last run and a hash of its inputs or, where there is no such run, the reason. A part without a
run is skipped; it has not passed.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Callable, NamedTuple

import gate

LIST = "tools/gates/full.txt"
RUN = re.compile(r"\S+ \d{4}-\d\d-\d\d \w+\+? (\d+) passed, (\d+) failed, inputs (\w+)")
# The summaries of pytest and of the gates, and that of ctest.
COUNT = re.compile(r"(\d+) (passed|failed)\b|% tests passed(?:, (\d+) tests failed)? out of (\d+)")


class Part(NamedTuple):
    command: str
    inputs: str  # patterns of files


KERNELS = "src/core/*.[ch] src/cpu/**/*.[ch] src/reference/*.[ch]"
DEVICE = "src/cuda/**/*.[ch]* src/core/*.h"
MODELS = "python/flash_dmattn/doge*.py python/flash_dmattn/transformers*.py"
MODELS += " python/flash_dmattn/cache.py python/flash_dmattn/layer_caches.py"
PYTEST = ".venv/bin/python -m pytest -q"
SWEEP = "tests/python/test_transformers_models.py"
PARTS = {
    "model_types": Part(f"{PYTEST} {SWEEP}", f"{MODELS} {SWEEP}"),
    "python": Part(
        f"{PYTEST} tests/python",
        "include/*.h src/**/*.[ch] python/**/*.py tests/python/*.py examples/**/*.py",
    ),
    "research": Part(f"{PYTEST} research/tests", "research/**/*.py python/flash_dmattn/nn.py"),
    "vllm": Part(
        "tests/vllm/run.sh",
        "python/flash_dmattn/vllm/*.py python/flash_dmattn/streams.py tests/vllm/*.*",
    ),
    "lm_eval": Part(
        "tests/lm_eval/run.sh", f"{MODELS} python/flash_dmattn/lm_eval/*.py tests/lm_eval/*.*"
    ),
    "last_bits": Part("tools/gates/run.sh last_bits", f"{MODELS} tests/python/sum_order.py"),
    "clang": Part("tools/gates/run.sh clang", KERNELS),
    "older_cpus": Part("tools/gates/run.sh older_cpus", KERNELS),
    "sanitizers": Part("tools/gates/run.sh sanitizers", KERNELS),
    "neon": Part("tools/gates/run.sh neon", KERNELS),
    "fuzzers": Part("tools/gates/run.sh fuzz_build fuzzers", f"{KERNELS} tests/fuzz/*.[ch]"),
    "wheels": Part("tools/wheels/check.sh", "tools/wheels/* pyproject.toml cmake/*.cmake"),
    "cuda": Part("tools/gates/run.sh cuda", DEVICE),
    "emulated": Part("tools/gates/run.sh emulated", f"{DEVICE} tests/emulator/**/*.[ch]*"),
}


def hash_of(root: Path, inputs: str) -> str:
    """A hash of the names and contents of the files that the patterns match."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in inputs.split() for path in root.glob(pattern)}):
        found.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def check(
    root: Path, parts: dict[str, Part] = PARTS, say: Callable[[str], None] = print
) -> gate.Found:
    lines = (root / LIST).read_text(encoding="utf-8").splitlines()
    last = {line.split()[0]: line for line in lines if line and not line.startswith("#")}
    found = [f"{LIST} fails: there is no part {name}" for name in last if name not in parts]
    for name, part in parts.items():
        line = last.get(name, "")
        ran = RUN.fullmatch(line)
        if line.startswith(f"{name} not run: "):
            say(f"skipped: {line}")
        elif not ran or ran[1] == "0" or ran[2] != "0":
            found.append(f"{LIST} fails: {name} has not passed; run `make full PART={name}`")
        elif ran[3] != hash_of(root, part.inputs):
            found.append(
                f"{LIST} fails: {name}: {part.inputs} changed; run `make full PART={name}`"
            )
    return len(parts), found


def counts(output: str) -> tuple[int, int]:
    """The numbers of passed and of failed tests in all summaries."""
    passed = failed = 0
    for number, what, lost, total in COUNT.findall(output):
        passed += int(number if what == "passed" else 0) + int(total or 0) - int(lost or 0)
        failed += int(number if what == "failed" else 0) + int(lost or 0)
    return passed, failed


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=gate.ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def run(name: str) -> list[str]:
    """Run a part and write its line; return what was wrong."""
    part, inputs = PARTS[name], hash_of(gate.ROOT, PARTS[name].inputs)
    commit = (git("rev-parse", "--short", "HEAD") or "unknown") + "+" * bool(git("diff", "HEAD"))
    words = part.command.split()
    logs = [gate.ROOT / f"build/gates/{word}.log" for word in words[1:] if "run.sh" in words[0]]
    for log in logs:
        log.unlink(missing_ok=True)
    print(f"== {name}: {part.command}", flush=True)
    done = subprocess.run(words, cwd=gate.ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    texts = [done.stdout, *(log.read_text(errors="replace") for log in logs if log.exists())]
    passed, failed = counts("\n".join(texts))
    if re.search("^skip ", done.stdout, re.M) or inputs != hash_of(gate.ROOT, part.inputs):
        return [f"{name} fails: it cannot run here, or its inputs changed while it ran"]
    failed = failed or int(done.returncode != 0)
    line = (
        f"{name} {datetime.date.today()} {commit} {passed} passed, {failed} failed, inputs {inputs}"
    )
    text = (gate.ROOT / LIST).read_text(encoding="utf-8")
    text = re.sub(rf"^{name} .*$", line, text, flags=re.M)
    (gate.ROOT / LIST).write_text(text, encoding="utf-8")
    return [line] if failed else []


def self_test() -> list[str]:
    parts = {"part": Part("true", "src/a.c src/c*")}
    sound = {"src/a.c": "int a;\n", "src/b.h": "int b;\n", LIST: "# none\n"}
    texts = "2 failed, 5 passed, 1 skipped in 3s\n98% tests passed, 1 tests failed out of 40\n"
    texts += "100% tests passed out of 7\n"  # of newer versions of ctest
    wrong = [] if counts(f"{texts}gates: 1 passed, 0 failed") == (52, 3) else ["counted wrongly"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "src").mkdir()
        (Path(folder) / "src/a.c").write_text(sound["src/a.c"])
        passed = (
            f"part 2026-01-02 0a1b2c+ 3 passed, 0 failed, inputs {hash_of(Path(folder), 'src/*.c')}"
        )
    for line in (passed, "part not run: it takes an hour"):
        sound[LIST] = f"# a comment\n{line}\n"
        plants = [
            (LIST, "other not run: it is gone\n"),
            (LIST, f"{passed.replace('0 f', '1 f')}\n"),
        ]
        plants += [(LIST, "part not run\n"), (LIST, f"{passed[:-1]}\n")]
        plants += [("src/a.c", "int c;\n"), ("src/c", "int c;\n")] if line == passed else []
        wrong += gate.self_test_mistakes(lambda root: check(root, parts, str), sound, plants)
    return wrong


def main() -> int:
    def checked(options: argparse.Namespace) -> gate.Found:
        if not options.run:
            return check(gate.ROOT)
        names = list(PARTS) if options.run == "all" else [options.run]
        return len(names), [line for name in names for line in run(name)]

    part = {"choices": [*PARTS, "all"], "metavar": "PART", "help": ", ".join(PARTS)}
    return gate.main(__doc__, checked, self_test, "{} parts, {} faults", {"--run": part})


if __name__ == "__main__":
    sys.exit(main())
