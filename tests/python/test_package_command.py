"""`python -m flash_dmattn` reports the same as the `fdma` command."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import flash_dmattn
import pytest
import torch
from flash_dmattn import __main__ as command
from programs import output_of, python
from tool import run_tool


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    command.main([*arguments])
    return capsys.readouterr().out


def test_info_as_the_command_finds_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "info", "--json"))
    wanted = json.loads(run_tool("info", "--json").stdout)
    for name in ("fdma", "devices", "kernels"):
        assert found[name] == wanted[name], name
    assert found["torch"] == torch.__version__


def test_info_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "info", "--json"))
    lines = [line.split() for line in printed(capsys, "info").splitlines()]
    for kernel in found["kernels"]:
        (line,) = (x for x in lines if x[:2] == [kernel["name"], kernel["operation"]])
        assert line[2] == ("yes" if kernel["missing"] is None else "no:")
    cpu = found["devices"][0]
    for dtype, kernel in cpu["forward"].items():
        names = [kernel, cpu["decode"][dtype], cpu["backward"][dtype]]
        assert [dtype, *names] in lines
    assert ["features", *cpu["features"].split()] in lines


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "version") == f"{flash_dmattn.__version__}\n"


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        command.main(["infos"])
    assert refused.value.code == 2 and "'infos'" in capsys.readouterr().err


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        command.main([])
    assert refused.value.code == 2 and "want a command" in capsys.readouterr().err


def test_sources_have_no_cmake_files(capsys: pytest.CaptureFixture[str]) -> None:
    """test_wheel.py has the folders of a wheel."""
    with pytest.raises(SystemExit) as refused:
        command.main(["--cmake-dir"])
    assert refused.value.code == 2
    assert "no cmake/fdma/fdma-config.cmake in" in capsys.readouterr().err


def test_without_a_library() -> None:
    """In sources that were not built: a sentence, not a traceback."""
    done = python("-m", "flash_dmattn", "info", env={"FDMA_LIBRARY": None})
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("flash_dmattn: no library at ") and "; set FDMA_LIBRARY to" in line
    assert "Traceback" in python("-c", "import flash_dmattn", env={"FDMA_LIBRARY": None}).stderr


def test_without_pytorch(tmp_path: Path) -> None:
    """Programs in C or JAX need none."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('hidden', name='torch')")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    def told(*arguments: str) -> str:
        return output_of(python("-m", "flash_dmattn", *arguments, env=env))

    assert told("version") == f"{flash_dmattn.__version__}\n"
    found = json.loads(told("info", "--json"))
    assert found["torch"] is None and not found["extension_module"] and found["kernels"]
    assert "torch none, without the extension module" in told("info").splitlines()[1]


def test_the_message_of_an_unknown_backend_names_it() -> None:
    x = torch.zeros(1, 4, 1, 8)
    with pytest.raises(NotImplementedError, match="python -m flash_dmattn info"):
        flash_dmattn.attention(x, x, x, backend="nonsense")
