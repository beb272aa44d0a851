"""Builds that would compute wrong numbers do not compile, with a reason."""

from __future__ import annotations

import pytest
from programs import ROOT, Done, output_of, run

REFUSED = {
    "-ffast-math": (["-O2", "-ffast-math"], "", "build without -ffast-math"),
    "-Ofast": (["-Ofast"], "", "-Ofast"),
    "-ffinite-math-only": (["-ffinite-math-only"], "", "-ffinite-math-only"),
    "sizes of 32 bits": ([], "#undef SIZE_MAX\n#define SIZE_MAX UINT32_MAX\n", "64 bits"),
    "pointers of 32 bits": ([], "#undef UINTPTR_MAX\n#define UINTPTR_MAX UINT32_MAX\n", "64 bits"),
}


def compile_core(flags: list[str], prelude: str) -> Done:
    source = f'#include <stdint.h>\n{prelude}#include "core/kernel.h"\n'
    options = ["-std=c11", "-fsyntax-only", "-Iinclude", "-Isrc", *flags]
    return run("cc", *options, "-xc", "-", cwd=ROOT, input=source)


@pytest.mark.parametrize("name", REFUSED)
def test_a_build_that_is_refused(name: str) -> None:
    flags, prelude, words = REFUSED[name]
    done = compile_core(flags, prelude)
    assert done.returncode != 0
    assert words in done.stderr


def test_a_build_that_is_not() -> None:
    output_of(compile_core(["-O3", "-fno-math-errno"], ""))
