"""The library under test is FDMA_LIBRARY, or else build/libfdma.so."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
os.environ.setdefault("FDMA_LIBRARY", str(ROOT / "build" / "libfdma.so"))
sys.path[:0] = [str(ROOT / folder) for folder in ("python", "benchmarks", "research", "examples")]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text for quality.py."""
    from quality_cases import make_corpus

    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def few_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes quality.py measure less, and log the losses of every step."""
    import quality
    import quality_evaluate
    import quality_recall

    monkeypatch.setattr(quality, "READ_EVERY", 1)
    monkeypatch.setattr(quality, "PASSKEY_SEQUENCES", 1)
    monkeypatch.setattr(quality_evaluate, "NEEDLE_TEXTS", 1)
    monkeypatch.setattr(quality_recall, "PASSKEY_DEPTHS", 4)
