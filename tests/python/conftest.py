"""The libraries under test: the files FDMA_LIBRARY, FDMA_ORT_LIBRARY and FDMA_JAX_LIBRARY, by
default libfdma.so, libfdma_ort.so and libfdma_jax.so in build/."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from programs import ROOT, Seen

LIBRARY = Path(os.environ.setdefault("FDMA_LIBRARY", str(ROOT / "build" / "libfdma.so")))
for name in ("ort", "jax"):  # which need not exist
    library = ROOT / "build" / f"libfdma_{name}.so"
    os.environ.setdefault(f"FDMA_{name.upper()}_LIBRARY", str(library))
sys.path[:0] = [str(ROOT / folder) for folder in ("python", "benchmarks", "research", "examples")]


SUM_ORDER = os.environ.get("FDMA_TEST_SUM_ORDER")  # a seed or None: see sum_order.py
kept = []


def pytest_configure(config: pytest.Config) -> None:
    if not LIBRARY.is_file():
        raise pytest.UsageError(f"no library at {LIBRARY}: run `make`, or set FDMA_LIBRARY")
    if SUM_ORDER:
        from sum_order import replace_products

        kept.append(replace_products(int(SUM_ORDER)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the kernels that this machine could not test, so that no skip is silent."""
    from flash_dmattn import _library, _repeat

    lacking = {
        f"{one.name} ({one.missing})" for one in _library.kernels() if one.missing is not None
    }
    terminalreporter.write_line(
        f"library {LIBRARY}, kernels that do not run here: {sorted(lacking) or 'none'}"
    )
    if _repeat.NATIVE is None:
        terminalreporter.write_line("there is no extension module: its tests are skipped")


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Make gradients on a CUDA device bit-equal from run to run."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A small input of `fdma attend`."""
    from safetensors.numpy import save_file
    from tool import make_inputs

    path = tmp_path / "example.safetensors"
    save_file(make_inputs(), path)
    return path


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extension module makes calls, and remembers none from before."""
    from flash_dmattn import _call, _repeat

    if _repeat.NATIVE is None:
        pytest.skip("there is no extension module")
    monkeypatch.setattr(_call, "memory", _call.Memory())


@pytest.fixture
def dispatched_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls go through the dispatcher, and none is remembered from before."""
    from routes import send_to_dispatcher

    send_to_dispatcher(monkeypatch)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """The calls of the C library from now on. None is remembered from before."""
    from flash_dmattn import _call

    found: list[Seen] = []
    prepare = _call.Prepared.__init__
    function_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)

    def spied(self: _call.Prepared, *rest: Any) -> None:
        prepare(self, *rest)
        function = self.function

        def look(_: int) -> int:
            deterministic = bool(getattr(self.args, "deterministic", False))
            alignments = tuple(words[at] % _call.ALIGNMENT for words, at in self.inputs)
            name = self.operation.name
            found.append(Seen(self, name, self.args.exec.threads, deterministic, alignments))
            return function(self.reference)

        self.function = function_type(look)

    monkeypatch.setattr(_call.Prepared, "__init__", spied)
    monkeypatch.setattr(_call, "memory", _call.Memory())
    return found


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers give the same bits on every CPU and in every row."""
    import sum_order
    import torch

    monkeypatch.setattr(torch.nn.functional, "linear", sum_order.exact_linear)


@pytest.fixture
def lm(exact_products: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """examples/lm/reference.py. Equal bytes have equal scores in the first layer."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "lm"))
    import sum_order

    import reference

    monkeypatch.setattr(reference, "linear", sum_order.exact_linear)
    return reference
