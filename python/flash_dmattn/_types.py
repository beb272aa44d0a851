"""Checks of arguments by type. A message names the argument, its value, and the types wanted.

The types of an argument are written once, in the annotations of a function or in the schema of an
operator. Values that PyTorch and ctypes convert, such as numbers of NumPy, are accepted too.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Callable, NamedTuple, Tuple

import torch

from ._describe import (  # noqa: F401 (some are used as ones of these)
    check_int64,
    counted,
    describe,
    is_vast,
    refusal,
)


class Kind(NamedTuple):
    types: tuple[type, ...]  # the usual ones, accepted without a further test
    fits: Callable[[Any], bool]
    wanted: str


MISSING = object()
Kinds = Tuple[Tuple[str, Kind], ...]  # of arguments, by name


def check_tensor(name: str, value: Any) -> None:
    """Check that an argument is a tensor.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(value, torch.Tensor):
        raise refusal(name, value, "a torch.Tensor")


def check_tensors(tensors: Mapping[str, Any]) -> None:
    """check_tensor() for each that is not None."""
    for name, value in tensors.items():
        if value is not None:
            check_tensor(name, value)


def length_of(name: str, value: Any, axis_name: str, axis: Any) -> int:
    """The length of a tensor along the axis that the argument `axis_name` gives.

    Raises:
        TypeError: the value is not a tensor, or the axis not an int.
        ValueError: the tensor has no such axis.
    """
    check_tensor(name, value)
    if not is_int(axis):
        raise refusal(axis_name, axis, "an int")
    rank = value.dim()
    if not -rank <= axis < rank:
        raise ValueError(f"{axis_name}: is {axis}, want {-rank} to {rank - 1}, an axis of {name}")
    return value.shape[axis]


def is_int(value: Any) -> bool:
    if isinstance(value, torch.SymInt):  # while a graph is traced
        return True
    try:
        operator.index(value)
    except (TypeError, RuntimeError, ValueError):  # ValueError: an array of several elements
        return False
    return not isinstance(value, bool)


def is_scalar(value: Any) -> bool:
    """True if a value of PyTorch or NumPy is a single number."""
    return getattr(value, "ndim", 0) == 0


def is_number(value: Any) -> bool:
    if isinstance(value, (int, float)):
        return not is_vast(value)
    return hasattr(value, "__float__") and is_scalar(value)


def is_flag(value: Any) -> bool:
    """True for a bool or a number such as 1, which counts as a bool, as a C int does."""
    if isinstance(value, (bool, torch.SymBool, torch.SymInt)):
        return True
    if is_int(value):
        return -(1 << 31) <= operator.index(value) < 1 << 31
    return hasattr(value, "ndim") and is_scalar(value)


def is_list_of_ints(value: Any) -> bool:
    is_list = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
    return is_list and is_whole(value) and all(map(is_int, value))


def is_whole(value: Any) -> bool:
    """True if a list can be read twice and is on the host."""
    return hasattr(value, "__len__") and getattr(value, "ndim", 1) == 1


def is_device(value: Any) -> bool:
    try:
        torch.device(value)
    except (TypeError, RuntimeError):
        return False
    return True


def of_types(wanted: str, *types: type) -> Kind:
    return Kind(types, lambda value: isinstance(value, types), wanted)


KINDS = {
    "torch.Tensor": of_types("a torch.Tensor", torch.Tensor, torch.nn.Parameter),
    "torch.Generator": of_types("a torch.Generator", torch.Generator),
    "torch.dtype": of_types("a torch.dtype", torch.dtype),
    "torch.device": Kind((torch.device,), is_device, "a torch.device"),
    "int": Kind((int,), is_int, "an int"),
    "float": Kind((float,), is_number, "a number"),
    "bool": Kind((bool,), is_flag, "a bool"),
    "str": of_types("a str", str),
    "Scope": of_types("a str", str),
    "BiasForm": of_types("a str", str),
    "Sequence[int]": Kind((), is_list_of_ints, "a list of ints"),
    "PathLike": of_types("a path", str, os.PathLike),
    "None": of_types("None", type(None)),
}
# Types as schemas of operators name them.
IN_SCHEMAS = {"Tensor": "torch.Tensor", "SymInt": "int"}


def kind_of(annotation: str, names: Mapping[str, Any]) -> Kind | None:
    """The kind for an annotation; None if it names none of KINDS and no class among `names`."""
    found = []
    words = annotation.split(" | ")
    if "torch.device" in words:
        words.remove("str")  # the name of a device
    for word in words:
        kind = KINDS.get(word)
        if kind is None and word != "Any" and isinstance(names.get(word), type):
            kind = of_types(f"a {word}", names[word])
        if kind is None:
            return None
        found.append(kind)
    *most, last = [kind.wanted for kind in found]
    wanted = f"{', '.join(most)} or {last}" if most else last
    types = tuple(one for kind in found for one in kind.types)
    return Kind(types, lambda value: any(kind.fits(value) for kind in found), wanted)


@functools.lru_cache(maxsize=None)
def kinds_of(function: Callable[..., Any]) -> Kinds:
    """The kinds of the arguments of a function, or of the fields of a class."""
    names = vars(sys.modules[function.__module__])
    found = []
    for one in inspect.signature(function).parameters.values():
        annotation = getattr(one.annotation, "__forward_arg__", one.annotation)
        kind = kind_of(str(annotation), names)
        if kind is not None:
            found.append((one.name, kind))
    return tuple(found)


def kinds_in_schema(pairs: list[list[str]]) -> Kinds:
    """The kinds of the arguments of an operator, from pairs of a type and a name."""
    found = []
    for word, name in pairs:
        annotation = IN_SCHEMAS.get(word.rstrip("?").partition("(")[0], word.rstrip("?"))
        kind = kind_of(annotation + " | None" * word.endswith("?"), {})
        assert kind is not None, word
        found.append((name, kind))
    return tuple(found)


def check(kinds: Kinds, values: Mapping[str, Any]) -> None:
    """Check those arguments that are in `values`.

    Raises:
        TypeError: an argument has none of its types.
    """
    for name, kind in kinds:
        value = values.get(name, MISSING)
        if type(value) not in kind.types and value is not MISSING and not kind.fits(value):
            raise refusal(name, value, kind.wanted)


def check_call(function: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Check the arguments of a call by the function's annotations. While a graph is traced, nothing
    is checked.

    Raises:
        TypeError: an argument has none of its types.
    """
    if not torch.compiler.is_compiling():
        check(kinds_of(function), values)


def check_flag(name: str, value: Any) -> None:
    """Check that an argument says yes or no.

    Raises:
        TypeError: it is something else.
    """
    if type(value) is not bool and not is_flag(value):
        raise refusal(name, value, "a bool")


def check_flags(names: tuple[str, ...], values: tuple[Any, ...], none: bool = False) -> None:
    """check_flag() for several arguments, which may be None if `none` is true."""
    for name, value in zip(names, values):
        if type(value) is not bool and not (none and value is None):
            check_flag(name, value)
