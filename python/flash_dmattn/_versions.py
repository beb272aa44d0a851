"""Refuses a PyTorch that is too old for the package."""

from __future__ import annotations

import re

import torch

OLDEST_TORCH = (2, 4)  # as in pyproject.toml


def check_torch(version: str) -> None:
    """Raises ImportError if `version` of PyTorch, such as "2.3.1+cu121", is too old."""
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if found < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(
            f"PyTorch: is {version}, want {oldest} or later; `pip install -U torch` installs one"
        )


check_torch(torch.__version__)
