"""Docstrings: every public function has Args, Returns, Raises and an Example that is true. The
reference is generated from them."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import os
import re
import sys
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

import flash_dma
import flash_dma_cuda
import flash_dmattn
import pytest
import torch
from programs import ROOT

MODULES = [flash_dmattn, flash_dma, flash_dma_cuda]
if torch.distributed.is_available():
    MODULES.append(importlib.import_module("flash_dmattn.distributed"))
if importlib.util.find_spec("transformers"):
    MODULES.append(importlib.import_module("flash_dmattn.transformers"))
if importlib.util.find_spec("onnxscript"):
    if Path(os.environ["FDMA_ORT_LIBRARY"]).is_file():
        MODULES.append(importlib.import_module("flash_dmattn.onnx"))
if importlib.util.find_spec("jax") and Path(os.environ["FDMA_JAX_LIBRARY"]).is_file():
    MODULES.append(importlib.import_module("flash_dmattn.jax"))
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in MODULES
    for name in module.__all__
}
reads_types = pytest.mark.skipif(sys.version_info < (3, 10), reason="Python before 3.10: no X | Y")


@pytest.mark.parametrize("thing", PUBLIC.values(), ids=PUBLIC)
def test_example(thing: Any) -> None:
    torch.manual_seed(0)
    names = {"torch": torch, **{module.__name__: module for module in MODULES}}
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    (found,) = finder.find(thing, thing.__name__, globs=names)
    result = runner.run(found)
    assert result.failed == 0
    assert result.attempted > 0 or thing is flash_dmattn.Selection


@reads_types
@pytest.mark.parametrize("thing", PUBLIC.values(), ids=PUBLIC)
def test_sections(thing: Any) -> None:
    text = inspect.getdoc(thing)
    arguments: Any = inspect.signature(thing).parameters
    if hasattr(thing, "model_type"):  # a configuration of transformers, with its own fields
        own = vars(thing)["__annotations__"]
        arguments = [name for name in own if not hasattr(thing.__base__, name)]
    if thing is flash_dmattn.Selection:
        assert all(f"    {name}: " in text for name in arguments)
        return
    assert "\nExample:\n" in text
    if arguments:
        assert "\nArgs:\n" in text and "\nRaises:\n" in text and "\nSource: " in text
        entries = re.findall(r"^    (\w+(?:,\s+\w+)*): ", text, re.MULTILINE)  # "a, b: as there."
        assert set(arguments) <= {name for names in entries for name in re.split(r",\s+", names)}
    if inspect.isfunction(thing):
        assert "\nReturns:\n" in text
        assert set(typing.get_type_hints(thing)) == {*arguments, "return"}


@pytest.fixture(scope="module")
def api_reference() -> ModuleType:
    pytest.importorskip("onnxscript")
    pytest.importorskip("jax")
    sys.path.append(str(ROOT / "tools"))
    return importlib.import_module("api_reference")


@reads_types
def test_the_table_of_names_is_up_to_date(api_reference: ModuleType) -> None:
    assert api_reference.main(["--check"]) == 0


@reads_types
def test_an_old_table_of_names(
    api_reference: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "api_reference.md").read_text()
    monkeypatch.setattr(api_reference, "INDEX", tmp_path / "api_reference.md")
    assert api_reference.main(["--check"]) == 1
    (tmp_path / "api_reference.md").write_text(text.replace("`fdma_decode()`", "`fdma_code()`"))
    assert api_reference.main(["--check"]) == 1


@reads_types
def test_the_reference_has_every_function(api_reference: ModuleType, tmp_path: Path) -> None:
    assert api_reference.main([str(tmp_path / "reference.md")]) == 0
    text = (tmp_path / "reference.md").read_text()
    header = (ROOT / "include" / "fdma.h").read_text()
    calls = re.findall(r"^FDMA_API [\w ]*?\*?(fdma_\w+)\(", header, flags=re.M)
    assert len(calls) > 50
    assert [name for name in calls if f"{name}(" not in text] == []
    assert [name for name in PUBLIC if f"### {name}\n" not in text] == []
    examples = re.findall(r"^ *(>>> .*)", "\n".join(map(inspect.getdoc, PUBLIC.values())), re.M)
    assert [line for line in examples if line not in text] == []
