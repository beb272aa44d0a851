"""Builds that would compute wrong numbers do not compile, and say why."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

REFUSED = {
    "-ffast-math": (["-O2", "-ffast-math"], "", "build without -ffast-math"),
    "-Ofast": (["-Ofast"], "", "-Ofast"),
    "-ffinite-math-only": (["-ffinite-math-only"], "", "-ffinite-math-only"),
    "sizes of 32 bits": ([], "#undef SIZE_MAX\n#define SIZE_MAX UINT32_MAX\n", "64 bits"),
    "pointers of 32 bits": ([], "#undef UINTPTR_MAX\n#define UINTPTR_MAX UINT32_MAX\n", "64 bits"),
}


def compile_core(root: Path, flags: list[str], prelude: str) -> subprocess.CompletedProcess[str]:
    source = f'#include <stdint.h>\n{prelude}#include "core/kernel.h"\n'
    command = ["cc", "-std=c11", "-fsyntax-only", "-Iinclude", "-Isrc", *flags, "-xc", "-"]
    return subprocess.run(command, cwd=root, input=source, capture_output=True, text=True)


@pytest.mark.parametrize("name", REFUSED)
def test_a_build_that_is_refused(name: str, root: Path) -> None:
    flags, prelude, words = REFUSED[name]
    done = compile_core(root, flags, prelude)
    assert done.returncode != 0
    assert words in done.stderr


def test_a_build_that_is_not(root: Path) -> None:
    done = compile_core(root, ["-O3", "-fno-math-errno"], "")
    assert done.returncode == 0, done.stderr
