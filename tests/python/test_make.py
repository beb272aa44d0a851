"""The arguments that `make` passes to CMake: the architectures of this machine's GPUs, and targets
that can be installed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from programs import ROOT, output_of, run

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def commands(target: str, *, smi: str | None, folder: Path, argument: str = "") -> str:
    """Commands that make would run on a machine whose nvidia-smi prints `smi`, or fails if it is
    None."""
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 9\n" if smi is None else f"#!/bin/sh\nprintf '{smi}'\n")
    program.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    # variables that a make which runs the tests exports
    exported = ("MAKEFLAGS", "MFLAGS", "WERROR", "FDMA_FULL", "PART")
    bare = ("env", *(word for name in exported for word in ("-u", name)))
    made = run(*bare, "make", "-n", target, *argument.split(), cwd=ROOT, env={"PATH": path})
    return output_of(made)


@pytest.mark.parametrize(
    ("smi", "argument", "architectures"),
    [
        (None, "", ""),
        (None, "ARCHITECTURES=all", "all"),
        ("8.0\\n", "ARCHITECTURES=120", "120"),
    ],
)
def test_architectures(smi: str | None, argument: str, architectures: str, tmp_path: Path) -> None:
    for target in ("build", "test"):
        printed = commands(target, smi=smi, folder=tmp_path, argument=argument)
        assert f'"-DFDMA_CUDA_ARCHITECTURES={architectures}"' in printed


@pytest.mark.parametrize(("argument", "value"), [("", "OFF"), ("WERROR=ON", "ON")])
def test_warnings_as_errors(argument: str, value: str, tmp_path: Path) -> None:
    """.ci/run passes WERROR=ON to the build, so that the gates compile less."""
    for target in ("test", "gates"):
        printed = commands(target, smi=None, folder=tmp_path, argument=argument)
        assert f"-DFDMA_WERROR={value} " in printed
    assert "make setup-gates build WERROR=ON" in (ROOT / ".ci" / "run").read_text()


def test_the_demo_builds_what_is_installed(tmp_path: Path) -> None:
    assert "--target fdma_installed" in commands("demo", smi=None, folder=tmp_path)
    assert "add_custom_target(fdma_installed" in (ROOT / "cmake/fdma_install.cmake").read_text()


def test_full_runs_what_takes_long(tmp_path: Path) -> None:
    for argument, part in (("", "all"), ("PART=neon", "neon")):
        printed = commands("full", smi=None, folder=tmp_path, argument=argument)
        assert "FDMA_FULL=1" in printed
        assert f"tools/gates/check_full.py --run {part}" in printed
    printed = commands("test", smi=None, folder=tmp_path)
    assert "-m pytest tests/python research/tests/test_smoke.py -q" in printed
