"""The machine and the commit of figures, and files of them. It needs no PyTorch."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flash_dmattn import _library
from kernels_hash import kernels_hash

ROOT = Path(__file__).resolve().parent.parent


def commit() -> str | None:
    """The commit of the tree, or FDMA_COMMIT if there is no git."""
    if given := os.environ.get("FDMA_COMMIT"):
        return given
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:  # git is not installed
        return None
    return done.stdout.strip() or None


def describe_machine(device: str, **versions: str) -> dict[str, Any]:
    """The machine, versions of packages, and the date and commit of figures."""
    info = _library.HEADER.structs["fdma_device_info"]()
    index = 1 if device == "cuda" else 0
    _library.check(_library.library.fdma_describe_device(index, ctypes.byref(info)))
    machine = {
        "machine": info.name.decode(),
        "cores": info.cores,
        "device": device,
        **versions,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(),
    }
    return {**machine, "kernels": kernels_hash()} if device == "cuda" else machine


def write_whole(path: Path, lines: list[dict[str, Any]]) -> None:
    """Replace the whole file at once, so that a reader never sees half of it."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines))
    unfinished.replace(path)
