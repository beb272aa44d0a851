"""The library under test is the file FDMA_LIBRARY, or else build/libfdma.so."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = Path(os.environ.setdefault("FDMA_LIBRARY", str(ROOT / "build" / "libfdma.so")))
sys.path.insert(0, str(ROOT / "python"))


def pytest_configure(config: pytest.Config) -> None:
    if not LIBRARY.is_file():
        raise pytest.UsageError(f"no library at {LIBRARY}: run `make`, or set FDMA_LIBRARY")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the kernels that this machine could not test, so that no skip is silent."""
    from flash_dmattn import _library

    lacking = {
        f"{one.name} ({one.missing})" for one in _library.kernels() if one.missing is not None
    }
    terminalreporter.write_line(
        f"library {LIBRARY}, kernels that do not run here: {sorted(lacking) or 'none'}"
    )


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT
