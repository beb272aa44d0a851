"""Parameters of tests: every combination with FDMA_FULL=1, otherwise some that have every value."""

from __future__ import annotations

import itertools
import os
from typing import Any, Iterable

FULL = os.environ.get("FDMA_FULL") == "1"


def combinations(*columns: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows with a value of each column. Without FDMA_FULL=1 there are as many rows as the longest
    column has values, which come in turn with those of the other columns."""
    values = [list(column) for column in columns]
    if FULL:
        return list(itertools.product(*values))
    rows = range(max(map(len, values)))
    return [
        tuple(one[(row + at * (row // len(one))) % len(one)] for at, one in enumerate(values))
        for row in rows
    ]
