"""Flash Dynamic Mask Attention for PyTorch: attention of each query over its `window` best keys.

PyTorch is imported with the first name that is used, and not for flash_dmattn.jax. Where a program
has imported it before, all of the package is loaded at once: exported programs need its operators.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

try:
    from . import _environment, _library  # noqa: F401 (the first one warns)
    from ._library import version
except ImportError as error:
    if sys.argv[:1] != ["-m"]:
        raise
    sys.exit(f"flash_dmattn: {error}")  # `python -m flash_dmattn` needs no traceback

if TYPE_CHECKING:
    from ._names import *  # noqa: F403

__version__ = version()

# Modules that no other module of the package imports: they need more than PyTorch, or another
# library.
SEPARATE = ("distributed", "jax", "onnx", "transformers")


def _load() -> None:
    names = importlib.import_module("._names", __name__)
    found = {name: value for name, value in vars(names).items() if not name.startswith("_")}
    globals().update({**found, "__all__": names.__all__})


def __getattr__(name: str) -> Any:
    """Called for a name that is not among the globals."""
    if name == "CUDA_AVAILABLE":
        return "cuda" in _library.backends()
    if name == "__all__" or not (name.startswith("__") or name in SEPARATE):
        if importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f".{name}", __name__)
        _load()
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    names = __getattr__("__all__")
    return sorted([*names, "__version__", "pictures", "rotary", *SEPARATE])


if "torch" in sys.modules:
    _load()
