"""Finds the library under test: FDMA_LIBRARY, else build/libfdma.so. Without it nothing runs."""

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
    """Skipped kernels are never silent: say which ones this machine could not test."""
    from flash_dmattn import _library

    lacking = {
        f"{row.name} ({row.missing})" for row in _library.kernels() if row.missing is not None
    }
    terminalreporter.write_line(f"library {LIBRARY}, not run here: {sorted(lacking) or 'none'}")


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT
