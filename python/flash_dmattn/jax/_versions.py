"""Refuses a JAX that the package was not tested with."""

from __future__ import annotations

import re

import jax

TESTED = ((0, 10), (0, 11))  # as in docs/jax.md


def check_jax(version: str) -> None:
    """Raises ImportError if `version` of JAX, such as "0.9.2", is not one of those tested."""
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if found not in TESTED:
        wanted = " or ".join(".".join(map(str, one)) for one in TESTED)
        raise ImportError(f"JAX: is {version}, want {wanted}")


check_jax(jax.__version__)
