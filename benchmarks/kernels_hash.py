#!/usr/bin/env python3
"""Print a hash of src/cuda: figures with another hash were measured with other kernels."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def kernels_hash(root: Path = ROOT) -> str:
    """The hash of the names and contents of all files in src/cuda."""
    digest = hashlib.sha256()
    for path in sorted((root / "src" / "cuda").rglob("*.*")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    print(kernels_hash())
