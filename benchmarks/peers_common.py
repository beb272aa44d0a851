"""What benchmarks/peers.py needs on every device: rounds, quantiles, the machine, files."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flash_dmattn import _library
from kernels_hash import kernels_hash

ROOT = Path(__file__).resolve().parent.parent


class Rounds(NamedTuple):
    """How many times a case is run: until `seconds` are over, `least` to `most` times."""

    least: int
    most: int
    seconds: float


USUAL = Rounds(5, 100, 3.0)
QUICK = Rounds(3, 20, 0.3)


class Disagreement(Exception):
    """Two outputs are further apart than rounding explains."""


def require_close(found: torch.Tensor, wanted: torch.Tensor, allowed: float, what: str) -> None:
    error = (found.double() - wanted).abs().max().item()
    if not error <= allowed:  # written so that NaN fails
        raise Disagreement(f"{what} differ by {error:.3g}, allowed {allowed:.3g}")


def quantiles(values: list[float]) -> list[float]:
    """The first decile, the median and the last decile."""
    fractions = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    return torch.tensor(values, dtype=torch.float64).quantile(fractions).tolist()


def commit() -> str | None:
    """The commit of the tree, from FDMA_COMMIT if there is no git."""
    if given := os.environ.get("FDMA_COMMIT"):
        return given
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:  # git is not installed
        return None
    return done.stdout.strip() or None


def find_machine(device: str) -> dict[str, Any]:
    info = _library.HEADER.structs["fdma_device_info"]()
    index = 1 if device == "cuda" else 0
    _library.check(_library.library.fdma_describe_device(index, ctypes.byref(info)))
    machine = {
        "machine": info.name.decode(),
        "cores": info.cores,
        "device": device,
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(),
    }
    return {**machine, "kernels": kernels_hash()} if device == "cuda" else machine


def write_whole(path: Path, lines: list[dict[str, Any]]) -> None:
    """Replace the file as a whole, so that a reader never sees half of it."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines))
    unfinished.replace(path)
