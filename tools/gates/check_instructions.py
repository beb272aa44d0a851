#!/usr/bin/env python3
"""Check that attention on the CPU takes no more instructions for a kept pair than it should.

Each case of CASES runs once under valgrind (see instructions.c), which counts the instructions of
the call: the same number in every run, whatever else the machine does, unlike a time. valgrind
offers AVX2 and no AVX-512. The limits leave room for other compilers. They are exceeded if a
kernel is not chosen, a loop is no longer vectorized, or work grows faster than the kept pairs.
Slower memory accesses are not seen: benchmarks/suite.py --compare is for these.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import gate

SOURCE = Path(__file__).with_name("instructions.c")
LIBRARY = gate.ROOT / "build" / "gates" / "narrow" / "libfdma.a"
Q_HEADS = 2  # as in instructions.c
COLLECTED = re.compile(r"Collected : (\d+)")


class Case(NamedTuple):
    name: str
    function: str  # whose instructions are counted
    len: int
    window: int
    most: float  # instructions for a query head, a query and a key that it keeps

    @property
    def pairs(self) -> int:
        return Q_HEADS * sum(min(position + 1, self.window) for position in range(self.len))


# The limits are 1.4 times what gcc 12.2 needs: 38.8, 48.9, 46.8, 120.2 and 117.0. The products
# alone take 16 in forward and 40 in backward.
CASES = (
    Case("dense", "fdma_forward", 1024, 1024, 54),
    Case("selected", "fdma_attention", 1024, 128, 68),
    Case("selected", "fdma_attention", 2048, 128, 66),
    Case("backward", "fdma_attention_backward", 1024, 128, 168),
    Case("backward", "fdma_attention_backward", 2048, 128, 164),
)


def build(source: Path, program: Path, *more: str | Path) -> None:
    command = ("cc", "-std=c11", f"-I{gate.ROOT / 'include'}", source, *more, "-o", program)
    subprocess.run(command, check=True)


def count(function: str, *command: str | Path) -> int:
    """The instructions of a function, and of what it calls, while the command runs.

    Raises:
        ValueError: the command failed, or never called the function.
    """
    options = ("--callgrind-out-file=/dev/null", f"--toggle-collect={function}")
    done = subprocess.run(
        ("valgrind", "--tool=callgrind", *options, *command), capture_output=True, text=True
    )
    found = COLLECTED.search(done.stderr)
    if done.returncode or not found or found[1] == "0":
        raise ValueError(f"{' '.join(map(str, command))} failed: {done.stderr.strip()[-500:]}")
    return int(found[1])


def judge(case: Case, instructions: int) -> list[str]:
    each = instructions / case.pairs
    print(f"{case.name} {case.len} {case.window}: {each:.1f} of at most {case.most:.1f}")
    if each <= case.most:
        return []
    size = f"{case.len} keys, window {case.window}"
    return [f"fails: {case.function}(), {size}: {each:.1f} instructions, at most {case.most:.1f}"]


def check(library: Path) -> gate.Found:
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "instructions"
        build(SOURCE, program, library, "-lm", "-pthread")
        found = []
        for case in CASES:
            words = (case.name, str(case.len), str(case.window))
            found += judge(case, count(case.function, program, *words))
    return len(CASES), found


LOOP = """
#include <stdlib.h>
__attribute__((noinline)) int work(int n) {
    volatile int sum = 0;
    for (int i = 0; i < n; i++)
        sum += i;
    return sum;
}
int main(int count, char **words) {
    volatile int sum = 0;
    for (int i = 0; i < 1000 * count; i++)
        sum += i;
    return work(atoi(words[1])) < 0;
}
"""


def self_test() -> list[str]:
    """The check's mistakes. It must count the function alone, in proportion to its work, and find a
    call that takes twice as many instructions."""
    wrong = []
    with tempfile.TemporaryDirectory() as directory:
        source, program = Path(directory) / "loop.c", Path(directory) / "loop"
        source.write_text(LOOP)
        build(source, program, "-O1")
        few, more, most = (count("work", program, str(n)) for n in (1000, 2000, 3000))
        if most - more != more - few or not 1000 < more - few <= few:
            wrong.append(f"counted {few}, {more} and {most} instructions of 1, 2 and 3 loops")
    case = CASES[0]
    for factor, problems in ((0.9, 0), (2, 1)):
        if len(judge(case, int(factor * case.most * case.pairs))) != problems:
            wrong.append(f"{factor} times the limit: want {problems} faults")
    return wrong


def main() -> int:
    library = {"type": Path, "nargs": "?", "default": LIBRARY}
    return gate.main(
        __doc__,
        lambda options: check(options.library),
        self_test,
        "{} calls counted, {} over their limits",
        {"library": library},
    )


if __name__ == "__main__":
    sys.exit(main())
