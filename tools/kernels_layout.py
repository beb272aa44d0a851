#!/usr/bin/env python3
"""Lay the package out as a repository of Hugging Face's library `kernels`.

    kernels_layout.py WHEEL OUT                                  the variant for CPUs
    kernels_layout.py WHEEL OUT --cuda 13.0 --archs 8.0 9.0 12.0+PTX

It takes the package out of a wheel, and adds a build variant to OUT/build, with the metadata that
`kernels` reads, a licence and a card. get_local_kernel(OUT) then loads the package without a
network, and the folder is what is uploaded to the hub. The library is compiled without PyTorch, so
that one variant, of the stable ABI, serves every PyTorch from the oldest supported one on. Modules
that import other packages than PyTorch are left out, as the hub asks.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import sys
import zipfile
from pathlib import Path

import program

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "flash_dmattn"
LICENCE = "BSD-3-Clause"
# Models of transformers, export, and files that C programs are built with.
LEFT_OUT = re.compile(
    r"(transformers\w*|onnx|doge_cache)\.py|integrations/|.*\.(a|cmake|pc|exe)|bin/"
)
SYSTEMS = {"linux": "linux", "win": "windows", "macosx": "darwin"}
MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
TAG = re.compile(r"-(?:many)?(linux|win|macosx)\w*?_(x86_64|amd64|aarch64|arm64)\.whl$")
# Older versions of `kernels` look for the package in a folder of its name.
FORWARD = '''"""The package of the folder above, for versions of `kernels` that look for it here."""

import importlib.util
import sys
from pathlib import Path

NAME = {name!r}
if NAME not in sys.modules:
    spec = importlib.util.spec_from_file_location(NAME, Path(__file__).parents[1] / "__init__.py")
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])
globals().update(
    (key, value) for key, value in vars(sys.modules[NAME]).items() if not key.startswith("__")
)
'''
CARD = """---
license: bsd-3-clause
tags:
- kernel
---

# flash-dmattn

Flash Dynamic Mask Attention: each query attends only to the keys of highest score that it can see.

    from kernels import get_kernel
    flash_dmattn = get_kernel(NAME_OF_THIS_REPOSITORY, version={major}, trust_remote_code=True)
    out = flash_dmattn.flash_dma_attention(query, key, value, dt_proj, a_coef, keep_window_size=256)
"""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("wheel", type=Path, metavar="WHEEL")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder of the repository")
    parser.add_argument(
        "--cuda", metavar="VERSION", help="a variant for CUDA devices: the wheel's CUDA, as 13.0"
    )
    parser.add_argument(
        "--archs", nargs="+", metavar="CC", help="compute capabilities, as 9.0 or 12.0+PTX"
    )
    options = parser.parse_args(argv)
    if not options.wheel.is_file():
        parser.error(f"{options.wheel} is not a file")
    if TAG.search(options.wheel.name) is None:
        parser.error(f"{options.wheel.name}: its name has no system that `kernels` knows")
    if options.cuda and not re.fullmatch(r"\d\d\.\d", options.cuda):
        parser.error(f"--cuda: is {options.cuda}, want a version such as 13.0")
    if bool(options.cuda) != bool(options.archs):
        parser.error("--cuda and --archs: give both, or neither")
    return options


if __name__ == "__main__":
    program.begin(parse)


def oldest_torch() -> str:
    """The digits of the oldest version of PyTorch that the package accepts."""
    text = (ROOT / "python" / PACKAGE / "_versions.py").read_text()
    found = re.search(r"^OLDEST_TORCH = \((\d+), (\d+)\)", text, re.MULTILINE)
    assert found is not None
    return "".join(found.groups())


def files_of(wheel: zipfile.ZipFile) -> dict[str, bytes]:
    """The files of the package, by their paths in it."""
    begin = f"{PACKAGE}/"
    names = [name for name in wheel.namelist() if name.startswith(begin) and name[-1] != "/"]
    paths = {name[len(begin) :]: name for name in names}
    return {path: wheel.read(name) for path, name in paths.items() if not LEFT_OUT.fullmatch(path)}


def sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def version_of(wheel: zipfile.ZipFile) -> str:
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    found = re.search(r"^Version: (.+)$", wheel.read(metadata).decode(), re.MULTILINE)
    assert found is not None
    return found[1]


def lay_out(path: Path, out: Path, cuda: str | None, archs: list[str] | None) -> Path:
    """Write the variant into out/build, and return its folder."""
    found = TAG.search(path.name)
    assert found is not None
    system, machine = SYSTEMS[found[1]], MACHINES[found[2]]
    with zipfile.ZipFile(path) as wheel:
        files, version = files_of(wheel), version_of(wheel)
    backend = f"cu{cuda.replace('.', '')}" if cuda else "cpu"
    folder = out / "build" / f"torch-stable-abi{oldest_torch()}-{backend}-{machine}-{system}"
    content = b"".join(name.encode() + sha256(files[name]) for name in sorted(files))
    # Two builds may be loaded in one process, so the name depends on what is in them.
    name = f"_{PACKAGE}_{backend}_{hashlib.sha256(content).hexdigest()[:12]}"
    files[f"{PACKAGE}/__init__.py"] = FORWARD.format(name=name).encode()
    for file, content in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
    major = int(version.split(".")[0])
    metadata = {
        "id": name,
        "name": PACKAGE.replace("_", "-"),
        "version": major,
        "license": LICENCE,
        "python-depends": [],
        "backend": {"type": "cuda", "archs": archs} if cuda else {"type": "cpu"},
        "digest": {
            "algorithm": "sha256",
            "files": {
                file: base64.b64encode(sha256(files[file])).decode() for file in sorted(files)
            },
        },
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    (out / "README.md").write_text(CARD.format(major=major))
    (out / "LICENSE").write_bytes((ROOT / "LICENSE").read_bytes())
    return folder


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    folder = lay_out(options.wheel, options.out, options.cuda, options.archs)
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
