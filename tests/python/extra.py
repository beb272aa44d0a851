"""Programs and packages of tests/requirements-extra.txt, which have an environment of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from programs import ROOT, Done, run

EXTRA = Path(os.environ.get("FDMA_EXTRA", ROOT / ".venv" / "extra"))


def in_extra(*arguments: str | Path, program: str = "python", **options: Any) -> Done:
    """Run Python, or another program, of the environment."""
    path = EXTRA / "bin" / program
    if not path.exists():
        pytest.skip(f"{path} is not there: tools/setup.sh tests makes it")
    env = {"PYTHONPATH": str(ROOT / "python"), **options.pop("env", {})}
    return run(path, *arguments, env=env, **options)
