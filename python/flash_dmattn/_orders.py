"""Functions whose positional arguments may stand in several orders."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Tuple

Order = Tuple[str, ...]
Named = Dict[str, Any]


# A number beside one of these names is no scale: names of the scale, and names that flash-dmattn
# lacks.
BESIDE_DROPOUT = (
    "softmax_scale",
    "scale",
    "causal",
    "generator",
    "dt_proj",
    "a_coef",
    "dt_bias",
    "options",
)


def is_yes_or_no(value: Any) -> bool:
    """True for a value that can only mean yes or no: a bool (also of NumPy or PyTorch), 0 or 1."""
    kind = type(value).__name__
    return kind in ("bool", "bool_") or isinstance(value, int) and value in (0, 1)


def has_scale(args: tuple[Any, ...], named: Named) -> bool:
    """True if `args` begin with scale, is_causal and softcap, as in flash-dmattn; false if they
    begin with dropout_p, softmax_scale and a bool, as in flash-attn. A scale is never 0. A first
    number that can be either is a scale."""
    first, second, third, *_ = (*args, None, None, None)
    is_number = isinstance(first, (int, float))  # others are refused under this name
    if not is_number or is_yes_or_no(second) or "dropout_p" in named:
        return True
    if first == 0 or second is not None or is_yes_or_no(third):
        return False
    return not any(name in named for name in BESIDE_DROPOUT)


def in_any_order(
    order_of: Callable[[tuple[Any, ...], Named], Order],
    usual: Order,
    adapt: Callable[[Named], None] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator. Positional arguments get the names that order_of() returns; adapt() changes the
    arguments of a call in another order than `usual`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            order = order_of(args, named)
            if len(args) > len(order):
                raise TypeError(
                    f"{function.__name__}: has {len(args)} positional arguments, want at most "
                    f"{len(order)}: {', '.join(order)}"
                )
            for name in order[: len(args)]:
                if name in named:
                    raise TypeError(f"{name}: is given by position and by name, want it once")
            given = {**dict(zip(order, args)), **named}
            if adapt is not None and order is not usual:
                adapt(given)
            return function(**given)

        return call

    return decorate
