"""Values as messages name them. Nothing here needs PyTorch or JAX."""

from __future__ import annotations

import sys
from typing import Any

SHOWN_MAX = 40  # characters of a list in a message


def is_vast(value: Any) -> bool:
    """True for an int that no float64 is near to. PyTorch and ctypes do not convert it."""
    return isinstance(value, int) and abs(value) > sys.float_info.max


def describe(value: Any) -> str:
    """A value as messages name it: "None", "'8', a str", "[1.5], a list", "an ndarray"."""
    if is_vast(value):
        return "an int beyond float64"  # Python may refuse to print it
    name = type(value).__name__
    kind = f"{'an' if name[0] in 'aeiouAEIOU' or name == 'ndarray' else 'a'} {name}"
    if value is None:
        return "None"
    is_short = type(value) in (list, tuple) and len(repr(value)) <= SHOWN_MAX
    return f"{value!r}, {kind}" if is_short or isinstance(value, (int, float, str)) else kind


def counted(count: Any, noun: str) -> str:
    """ "1 key" or "2 keys"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def check_int64(name: str, number: int) -> int:
    """Check that ctypes and PyTorch can convert an int: ctypes takes it modulo 2**64.

    Raises:
        ValueError: it does not fit int64.
    """
    if not -(1 << 63) <= number < 1 << 63:
        found = "an int beyond float64" if is_vast(number) else number
        wanted = "less than 2**63" if number > 0 else "-2**63 or more"
        raise ValueError(f"{name}: is {found}, want {wanted}")
    return number


def refusal(name: str, value: Any, wanted: str) -> TypeError:
    return TypeError(f"{name}: is {describe(value)}, want {wanted}")
