"""The package as a repository of Hugging Face's `kernels`, loaded by its get_local_kernel()."""

from __future__ import annotations

import json
import platform
import shutil
import zipfile
from pathlib import Path

import pytest
from extra import in_extra
from flash_dmattn import _library
from programs import ROOT, output_of, python
from test_wheel import make_wheel

SCRIPT = ROOT / "tools" / "kernels_layout.py"
# Run where kernels is installed: the package, a second copy of it and the hub's own checks.
PROGRAM = """
import importlib, sys
from pathlib import Path
import flash_dmattn, torch
from kernels import get_local_kernel
from kernels._rust import Digest, DigestAlgorithm, Metadata

one, two = (get_local_kernel(Path(path), backend="cpu") for path in sys.argv[1:3])
assert len({x.__name__ for x in (flash_dmattn, one, two)}) == 3
x = torch.randn(1, 50, 2, 16, requires_grad=True)
weights = torch.randn(2, 32), torch.ones(2)
want = flash_dmattn.flash_dma_attention(x, x, x, *weights, keep_window_size=8, causal=True)
(gradient,) = torch.autograd.grad(want.sum(), x)
for package in (one, two):
    call = package.flash_dma_attention
    for again in (call, torch.compile(call, fullgraph=True, backend="eager")):
        out = again(x, x, x, *weights, keep_window_size=8, causal=True)
        assert torch.equal(out, want)
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], gradient)
    variant = Path(package.__file__).parent
    metadata = Metadata.read_from_file(variant / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    assert hasattr(getattr(torch.ops, metadata.id), "attention") and package.__name__ == metadata.id
    library = importlib.import_module("._library", package.__name__)
    assert library.find().parent == variant
    assert importlib.import_module("._repeat", package.__name__).NATIVE is not None
    assert package.Selection is not flash_dmattn.Selection
    # The folder for older versions of kernels.
    spec = importlib.util.spec_from_file_location("older", variant / "flash_dmattn" / "__init__.py")
    older = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(older)
    assert older.flash_dma_attention is package.flash_dma_attention
print("loaded")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return make_wheel(folder, FDMA_LIBRARY=str(_library.find()))


def lay_out(wheel: Path, out: Path, *options: str) -> Path:
    return Path(output_of(python(SCRIPT, wheel, out, *options)).strip())


def test_get_local_kernel(wheel: Path, tmp_path: Path) -> None:
    """Beside the installed package, and beside another build of it."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    other = tmp_path / wheel.name
    shutil.copy(wheel, other)
    with zipfile.ZipFile(other, "a") as opened:
        opened.writestr("flash_dmattn/another.py", "NUMBER = 2\n")
    lay_out(wheel, tmp_path / "one")
    lay_out(other, tmp_path / "two")
    env = {"PYTHONPATH": str(tmp_path / "installed"), "FDMA_LIBRARY": None, "HF_HUB_OFFLINE": "1"}
    env["PYTHONDONTWRITEBYTECODE"] = "1"  # or the files would not be those that were laid out
    done = in_extra("-c", PROGRAM, tmp_path / "one", tmp_path / "two", env=env)
    assert output_of(done) == "loaded\n"


def test_what_is_laid_out(wheel: Path, tmp_path: Path) -> None:
    machine = platform.machine()
    cpu = lay_out(wheel, tmp_path)
    assert cpu.name == f"torch-stable-abi24-cpu-{machine}-linux"
    cuda = lay_out(wheel, tmp_path, "--cuda", "13.0", "--archs", "9.0", "12.0+PTX")
    assert cuda.name == f"torch-stable-abi24-cu130-{machine}-linux"
    for variant, backend in (
        (cpu, {"type": "cpu"}),
        (cuda, {"type": "cuda", "archs": ["9.0", "12.0+PTX"]}),
    ):
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["backend"] == backend and metadata["license"] == "BSD-3-Clause"
        files = {str(x.relative_to(variant)) for x in variant.rglob("*") if x.is_file()}
        assert files == {*metadata["digest"]["files"], "metadata.json"}
        assert {"__init__.py", "libfdma.so", "fdma.h", "flash_dmattn/__init__.py"} < files
        assert not files & {"transformers.py", "onnx.py"}
    assert {x.name for x in tmp_path.iterdir()} == {"README.md", "LICENSE", "build"}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("absent.whl", (), "absent.whl is not a file"),
        ("x-1-py3-none-any.whl", (), "its name has no system that `kernels` knows"),
        ("", ("--cuda", "13"), "--cuda: is 13, want a version such as 13.0"),
        ("", ("--cuda", "13.0"), "--cuda and --archs: give both, or neither"),
    ],
)
def test_mistakes(
    name: str, options: tuple[str, ...], message: str, wheel: Path, tmp_path: Path
) -> None:
    (tmp_path / "x-1-py3-none-any.whl").touch()
    done = python(SCRIPT, tmp_path / name if name else wheel, tmp_path / "out", *options)
    assert done.returncode == 2 and message in done.stderr and not (tmp_path / "out").exists()
