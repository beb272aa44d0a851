"""Installing: a wheel is built without torch, holds the library beside the package, and works
unpacked; an editable install finds the library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from flash_dmattn import _library

PROGRAM = """
import torch, flash_dmattn
from flash_dmattn import _library
x = torch.randn(1, 5, 2, 8)
assert torch.isfinite(flash_dmattn.attention(x, x, x)[0]).all()
print(flash_dmattn.__version__, _library.find())
"""


WITHOUT_LIBRARY = {name: text for name, text in os.environ.items() if name != "FDMA_LIBRARY"}


def copy_sources(root: Path, folder: Path) -> Path:
    """Copy the files that pip reads; their folder."""
    source = folder / "source"
    source.mkdir()
    for name in ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source / name)
    for name in ("cmake", "include", "src", "python"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(root / name, source / name, ignore=ignored)
    return source


def make_wheel(root: Path, folder: Path, environment: dict[str, str]) -> Path:
    source = copy_sources(root, folder)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    wheels = list(folder.glob("*.whl"))
    assert len(wheels) == 1
    return wheels[0]


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheel(
        root, tmp_path_factory.mktemp("wheel"), {**WITHOUT_LIBRARY, "FDMA_CUDA": "OFF"}
    )


def test_contents(wheel: Path) -> None:
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert files == {
        f"flash_dmattn/{name}"
        for name in (
            "__init__.py",
            "_arguments.py",
            "_call.py",
            "_library.py",
            "autograd.py",
            "functional.py",
            "libfdma.so",
            "nn.py",
            "ops.py",
            "py.typed",
        )
    }
    assert wheel.name.startswith("flash_dmattn-") and "-py3-none-" in wheel.name


def test_it_works_unpacked(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**WITHOUT_LIBRARY, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    version, library = done.stdout.split()
    assert version == wheel.name.split("-")[1]
    assert Path(library) == tmp_path / "flash_dmattn" / "libfdma.so"


def test_a_library_that_is_built_goes_into_the_wheel(root: Path, tmp_path: Path) -> None:
    built = _library.find()
    wheel = make_wheel(root, tmp_path, {**WITHOUT_LIBRARY, "FDMA_LIBRARY": str(built)})
    with zipfile.ZipFile(wheel) as files:
        assert files.read("flash_dmattn/libfdma.so") == built.read_bytes()


def test_an_editable_install_is_importable(root: Path, tmp_path: Path) -> None:
    """The sources and the library are then in different folders."""
    source = copy_sources(root, tmp_path)
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    packages = next(environment.glob("lib/python*/site-packages"))
    paths = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "outer.pth").write_text("\n".join(paths) + "\n")  # torch, pip, scikit-build-core
    command = [environment / "bin" / "python", "-m", "pip", "install", "--no-deps", "--no-index"]
    done = subprocess.run(
        [*command, "--no-build-isolation", "--editable", source],
        env={**WITHOUT_LIBRARY, "FDMA_LIBRARY": str(_library.find())},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run(
        [environment / "bin" / "python", "-c", PROGRAM + "print(flash_dmattn.__file__)"],
        env={name: text for name, text in WITHOUT_LIBRARY.items() if name != "PYTHONPATH"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    _, library, module = done.stdout.split()
    assert Path(library) == packages / "flash_dmattn" / "libfdma.so"
    assert Path(module) == source / "python" / "flash_dmattn" / "__init__.py"


@pytest.mark.skipif(shutil.which("nvcc") is None or torch.cuda.is_available(), reason="no nvcc")
def test_nvcc_without_a_driver(root: Path, tmp_path: Path) -> None:
    """pip then builds for the CPU, and cmake says why, and how to build the CUDA kernels."""
    done = subprocess.run(
        ["cmake", "-S", root, "-B", tmp_path, "-DSKBUILD=2", "-DFDMA_BUILD_TESTS=OFF"],
        env=WITHOUT_LIBRARY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "no NVIDIA driver" in done.stderr and "FDMA_CUDA=ON" in done.stderr
    assert not (tmp_path / "CMakeFiles" / "fdma_cuda_merge_merge.dir").exists()
