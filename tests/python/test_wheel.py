"""Installing: a wheel is built without torch, contains the package with the library, and works
unpacked; the one of tools/wheels/build.sh passes its smoke test; an editable install finds the
library."""

from __future__ import annotations

import platform
import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch
from flash_dmattn import _library
from programs import ROOT, output_of, python, run

# The extension module is built if Python's headers exist.
HAS_HEADERS = (Path(sysconfig.get_path("include")) / "Python.h").is_file()
PROGRAM = f"""
import torch, flash_dma, flash_dma_cuda, flash_dmattn
from flash_dmattn import _library, _repeat
x = torch.randn(1, 5, 2, 8)
assert torch.isfinite(flash_dmattn.attention(x, x, x)[0]).all()
assert torch.isfinite(flash_dma.fwd(x, x, x, None, None)[0]).all()
print(flash_dmattn.__version__, _library.find())
assert (_repeat.NATIVE is not None) == {HAS_HEADERS}
"""

PACKAGES = ("flash_dmattn", "flash_dma", "flash_dma_cuda")
PIP_OPTIONS = ("--no-deps", "--no-build-isolation", "--no-index")


def copy_sources(folder: Path) -> Path:
    """Copy the files that pip reads, and return their folder."""
    source = folder / "source"
    source.mkdir()
    for name in ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("cmake", "include", "src", "python"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    return source


def make_wheel(folder: Path, **env: str | None) -> Path:
    source = copy_sources(folder)
    command = ["-m", "pip", "wheel", *PIP_OPTIONS, "--wheel-dir", folder, source]
    output_of(python(*command, env=env))
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for this machine's system that tools/wheels/build.sh makes."""
    folder = tmp_path_factory.mktemp("released")
    target = platform.machine()
    output_of(run(ROOT / "tools" / "wheels" / "build.sh", folder, target, timeout=1200))
    (wheel,) = folder.glob(f"flashdma-*-py3-none-manylinux_2_28_{target}.whl")
    return wheel


@pytest.fixture(scope="module", params=["released", "built"])
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "released":
        return request.getfixturevalue("released")
    folder = tmp_path_factory.mktemp("wheel-built")
    return make_wheel(folder, FDMA_LIBRARY=str(_library.find()))


# Beside what every wheel has.
RELEASED = {f"cmake/fdma/fdma-{name}.cmake" for name in ("config", "config-version", "targets")}
RELEASED |= {"cmake/fdma/fdma-targets-release.cmake", "pkgconfig/fdma.pc", "bin/fdma", "libfdma.a"}
RELEASED |= {"libfdma_jax.so"}


def test_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    files = {name for name in names if ".dist-info/" not in name and not name.endswith("/")}
    folder = ROOT / "python"
    paths = [path for ending in ("py", "pyi", "typed") for path in folder.rglob(f"*/*.{ending}")]
    sources = {path.relative_to(folder).as_posix() for path in paths}
    assert {"flash_dmattn/_library.py", "flash_dma/py.typed"} < sources
    assert {f"{name}/__init__.py" for name in PACKAGES} < sources
    built = {
        "flash_dmattn/libfdma.so",
        "flash_dmattn/fdma.h",
        *(["flash_dmattn/_native.abi3.so"] if HAS_HEADERS else []),
    }
    name, version, *_ = wheel.name.split("-")
    assert name == "flashdma" and "-py3-none-" in wheel.name
    if "released" in wheel.parent.name:
        built |= {f"flash_dmattn/{name}" for name in RELEASED}
        built |= {f"flashdma-{version}.data/scripts/fdma"}
        assert wheel.stat().st_size < 3e6
        licences = {Path(x).name for x in names if "/licenses/" in x and not x.endswith("/")}
        assert licences == {"LICENSE", "cJSON.txt", "zig.txt"}
    assert files == {*sources, *built}
    with zipfile.ZipFile(wheel) as opened:
        is_built = opened.read("flash_dmattn/libfdma.so") == _library.find().read_bytes()
    assert is_built == ("built" in wheel.parent.name)


def make_environment(folder: Path) -> tuple[Path, Path]:
    """A virtual environment that sees this one's packages: its interpreter, and its own folder of
    packages."""
    output_of(python("-m", "venv", "--without-pip", folder))
    packages = next(folder.glob("lib/python*/site-packages"))
    paths = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "outer.pth").write_text("\n".join(paths) + "\n")  # torch, pip, scikit-build-core
    return folder / "bin" / "python", packages


def test_the_smoke_test(released: Path, tmp_path: Path) -> None:
    inner, packages = make_environment(tmp_path / "environment")
    env = {"FDMA_LIBRARY": None, "PYTHONPATH": None}
    output_of(run(inner, "-m", "pip", "install", *PIP_OPTIONS, released, env=env))
    smoke = ROOT / "tools" / "wheels" / "smoke.py"
    assert output_of(run(inner, smoke, env=env)).splitlines()[-1].startswith("passed: ")
    # cJSON is in the command, so that it reads files
    sample = ROOT / "examples" / "data" / "minilm.safetensors"
    command = packages.parents[2] / "bin" / "fdma"
    assert "kept keys" in output_of(run(command, "attend", sample, "--window", "64", env=env))
    (packages / "flash_dmattn" / "bin" / "fdma").unlink()
    assert "has no bin/fdma; install it anew" in run(command, "info", env=env).stderr


def test_it_works_unpacked(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    env = {"FDMA_LIBRARY": None, "PYTHONPATH": str(tmp_path)}
    version, library = output_of(python("-c", PROGRAM, env=env, cwd=tmp_path)).split()
    assert version == wheel.name.split("-")[1]
    assert Path(library) == tmp_path / "flash_dmattn" / "libfdma.so"


def test_an_editable_install_is_importable(tmp_path: Path) -> None:
    """The sources and the library are then in different folders."""
    source = copy_sources(tmp_path)
    inner, packages = make_environment(tmp_path / "environment")
    output_of(
        run(
            *(inner, "-m", "pip", "install", *PIP_OPTIONS, "--editable", source),
            env={"FDMA_LIBRARY": str(_library.find())},
        )
    )
    program = PROGRAM + "print(flash_dmattn.__file__)"
    env = {"FDMA_LIBRARY": None, "PYTHONPATH": None}
    _, library, module = output_of(run(inner, "-c", program, env=env, cwd=tmp_path)).split()
    assert Path(library) == packages / "flash_dmattn" / "libfdma.so"
    assert Path(module) == source / "python" / "flash_dmattn" / "__init__.py"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_nvcc_without_a_driver(tmp_path: Path) -> None:
    """pip then builds for the CPU, and cmake says why, and how to build the CUDA kernels."""
    options = ("-DSKBUILD=2", "-DFDMA_BUILD_TESTS=OFF")
    done = run("cmake", "-S", ROOT, "-B", tmp_path, *options, env={"FDMA_LIBRARY": None})
    output_of(done)
    assert "no NVIDIA driver" in done.stderr and "FDMA_CUDA=ON" in done.stderr
    assert not (tmp_path / "CMakeFiles" / "fdma_cuda_merge_merge.dir").exists()
