"""The docstrings: every public function has Args, Returns, Raises and an Example that is true."""

from __future__ import annotations

import doctest
import inspect
import typing
from typing import Any

import flash_dmattn
import pytest
import torch

PUBLIC = [getattr(flash_dmattn, name) for name in flash_dmattn.__all__]


@pytest.mark.parametrize("thing", PUBLIC, ids=flash_dmattn.__all__)
def test_example(thing: Any) -> None:
    torch.manual_seed(0)
    names = {"flash_dmattn": flash_dmattn, "torch": torch}
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    (found,) = finder.find(thing, thing.__name__, globs=names)
    result = runner.run(found)
    assert result.failed == 0
    assert result.attempted > 0 or thing is flash_dmattn.Selection


@pytest.mark.parametrize("thing", PUBLIC, ids=flash_dmattn.__all__)
def test_sections(thing: Any) -> None:
    text = inspect.getdoc(thing)
    arguments = inspect.signature(thing).parameters
    if thing is flash_dmattn.Selection:
        assert all(f"    {name}: " in text for name in arguments)
        return
    assert "\nExample:\n" in text
    if arguments:
        assert "\nArgs:\n" in text and "\nRaises:\n" in text and "\nSource: " in text
        assert all(f"    {name}: " in text for name in arguments), arguments
    if inspect.isfunction(thing):
        assert "\nReturns:\n" in text
        assert set(typing.get_type_hints(thing)) == {*arguments, "return"}
