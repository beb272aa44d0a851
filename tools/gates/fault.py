"""A fault that mutate.py plants: a small mistake of a kind that a change may make.

`old` must occur exactly once in `path`. `tests` are tried in order: those that are quick and
likely to fail come first.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    name: str
    path: str  # a file, or a folder that has `old` in one of its files
    old: str
    new: str
    tests: tuple[str, ...]
    wide: bool = False  # needs AVX-512 or AMX kernels, which most faults build without
