"""Warns of what makes the package slow or another one than it seems: a CPU without AVX2, and
another project's package in the same folder. It does not need PyTorch."""

from __future__ import annotations

import platform
import warnings
from importlib import metadata
from pathlib import Path

from . import _library

NAME = "flashdma"  # of the distribution, as in pyproject.toml
OTHER = "flash-dmattn"  # a distribution of another project, whose package has the same name


def warn_of_other_package(folder: Path) -> None:
    """Warns if the distribution OTHER has its files in `folder`, where this package is."""
    try:
        other = metadata.distribution(OTHER)
    except metadata.PackageNotFoundError:
        return
    if Path(str(other.locate_file(folder.name))).resolve() == folder.resolve():
        warnings.warn(
            f"flash_dmattn: {OTHER} {other.version} is installed in the folder of {NAME}, and its "
            f"files may have replaced some; `pip uninstall {OTHER} {NAME}`, then install the one "
            "that you want",
            RuntimeWarning,
            stacklevel=2,
        )


def warn_of_old_cpu(machine: str, features: str) -> None:
    """Warns if a CPU of x86-64 lacks AVX2. `features` are those that the library finds."""
    if machine.lower() in ("x86_64", "amd64") and "avx2" not in features.split():
        warnings.warn(
            "flash_dmattn: this CPU lacks AVX2, so that calls on the CPU take many times as long; "
            "want a CPU with AVX2 or, in an emulator or a virtual machine, AVX2 switched on",
            RuntimeWarning,
            stacklevel=2,
        )


warn_of_other_package(Path(__file__).parent)
warn_of_old_cpu(platform.machine(), _library.cpu_features())
