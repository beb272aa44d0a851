"""The oldest Python, PyTorch, CMake and CUDA: every file names the same versions. Older ones are
refused with a message. The package's sources use nothing that the oldest Python lacks. The import
warns of a CPU without AVX2, and of another project's package in the same folder."""

from __future__ import annotations

import ast
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from flash_dmattn import _environment, _library, _versions
from programs import ROOT, output_of, python

PACKAGE = sorted((ROOT / "python").glob("*/*.py"))
OLDEST_PYTHON = (3, 8)
# Python 3.8 lacks items of built-in types, and these methods and functions. It has dict.update(),
# but torch.compile of PyTorch 2.4 does not trace it.
BUILT_IN = {"dict", "frozenset", "list", "set", "tuple", "type"}
LACKING = {"is_relative_to", "removeprefix", "removesuffix"}
LACKING |= {"ast.unparse", "functools.cache", "itertools.pairwise", "math.lcm"}


def find(path: str, pattern: str) -> str:
    (found,) = re.findall(pattern, (ROOT / path).read_text())
    return found


def oldest(program: str) -> str:
    """The version in the table of docs/install.md."""
    return find("docs/install.md", rf"(?m)^\| {program} \| ([\d.]+) \|")


def test_every_file_names_the_same() -> None:
    python_version = ".".join(map(str, OLDEST_PYTHON))
    assert oldest("Python") == python_version
    assert find("pyproject.toml", r'requires-python = ">=([\d.]+)"') == python_version
    torch_version = ".".join(map(str, _versions.OLDEST_TORCH))
    assert oldest("PyTorch") == torch_version
    assert find("pyproject.toml", r'"torch>=([\d.]+)"') == torch_version
    assert oldest("CMake") == find("CMakeLists.txt", r"cmake_minimum_required\(VERSION ([\d.]+)\)")
    assert oldest("CUDA") == find("cmake/fdma_cuda.cmake", r"set\(fdma_least_cuda ([\d.]+)\)")


@pytest.mark.parametrize("version", ["2.4.0", "2.4.0a0+git1a2b3c", "2.13.0+cpu", "3.0"])
def test_a_pytorch_that_suffices(version: str) -> None:
    _versions.check_torch(version)


def test_a_pytorch_that_is_too_old(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text('__version__ = "2.3.1+cu121"\n')
    path = f"{tmp_path}:{ROOT / 'python'}"
    done = python("-c", "import flash_dmattn; flash_dmattn.select", env={"PYTHONPATH": path})
    assert done.returncode != 0
    assert "ImportError: PyTorch: is 2.3.1+cu121, want 2.4 or later; `pip install" in done.stderr


@pytest.mark.parametrize("machine, features", [("x86_64", "avx2 fma"), ("aarch64", "neon")])
def test_a_cpu_that_suffices(machine: str, features: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _environment.warn_of_old_cpu(machine, features)


@pytest.mark.parametrize("features", ["", "fma f16c"])
def test_a_cpu_without_avx2(features: str) -> None:
    with pytest.warns(RuntimeWarning, match="lacks AVX2"):
        _environment.warn_of_old_cpu("AMD64", features)


def install_record(site: Path, name: str) -> None:
    folder = site / f"{name.replace('-', '_')}-1.2.2.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2.2\n")


def test_the_other_package_in_the_same_folder(tmp_path: Path) -> None:
    """Both projects' wheels write site-packages/flash_dmattn."""
    assert find("pyproject.toml", r'(?m)^name = "(.*)"') == _environment.NAME
    shutil.copytree(ROOT / "python" / "flash_dmattn", tmp_path / "flash_dmattn")
    shutil.copytree(ROOT / "include", tmp_path / "flash_dmattn", dirs_exist_ok=True)
    env = {"PYTHONPATH": str(tmp_path), "FDMA_LIBRARY": str(_library.find())}
    install_record(tmp_path, _environment.NAME)
    assert "RuntimeWarning" not in python("-c", "import flash_dmattn", env=env).stderr
    install_record(tmp_path, _environment.OTHER)
    done = python("-c", "import flash_dmattn", env=env)
    output_of(done)
    assert "flash-dmattn 1.2.2 is installed in the folder of flashdma" in done.stderr
    elsewhere = {**env, "PYTHONPATH": f"{ROOT / 'python'}:{tmp_path}"}
    assert "RuntimeWarning" not in python("-c", "import flash_dmattn", env=elsewhere).stderr


def evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a file that run: all but annotations."""
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from evaluated(child)


def newer_than_oldest(source: str) -> list[str]:
    """Parts of the source that Python 3.8 cannot run, or PyTorch 2.4 cannot compile."""
    tree = ast.parse(source, feature_version=OLDEST_PYTHON)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    abstract = {x.name for one in imports if one.module == "collections.abc" for x in one.names}
    found = []
    for node in evaluated(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            if node.value.id in BUILT_IN | abstract:
                found.append(f"{node.value.id}[]")
        elif isinstance(node, ast.Attribute):
            module = f"{node.value.id}." if isinstance(node.value, ast.Name) else ""
            found += LACKING & {node.attr, module + node.attr}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "update":
            found += ["update(name=)"] if node.keywords else []
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.BitOr):
            if isinstance(node.value, (ast.Dict, ast.DictComp)):
                found.append("|= of a dict")
    return found


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_oldest_python_runs_the_package(path: Path) -> None:
    source = path.read_text()
    assert newer_than_oldest(source) == []
    assert "from __future__ import annotations" in source or "->" not in source


NEWER = {
    "from collections.abc import Mapping\nKeys = Mapping[str, int]": "Mapping[]",
    "a = tuple[int, ...]": "tuple[]",
    "a |= {1: 2}": "|= of a dict",
    "f = functools.cache(len)": "functools.cache",
    "a = name.removeprefix('b')": "removeprefix",
    "a.update(b=1)": "update(name=)",
}


@pytest.mark.parametrize("source", NEWER)
def test_what_is_newer_is_noticed(source: str) -> None:
    assert newer_than_oldest(source) == [NEWER[source]]


def test_what_is_old_enough() -> None:
    source = "import cache\na: list[int] = cache.cache(b[0], Tuple[int])\na |= 3\ncache.update(a)\n"
    assert newer_than_oldest(source) == []
    with pytest.raises(SyntaxError):
        newer_than_oldest("match a:\n    case 1: pass\n")
