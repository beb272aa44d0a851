"""The extension module _native, which is optional: src/python has it in C.

It is looked for beside the C library, where the build puts it, and then beside this file.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

from . import _library

INTERFACE = 2  # of _native: what it and _direct.py expect of each other
NAME = f"{__package__}._native"
FILE = "_native.abi3.so"


def load() -> Any:
    """The module; None if it is not there, or is one for another version of this package."""
    # A free-threaded interpreter has other object layouts, and loading by path does not refuse.
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    if NAME in sys.modules:
        return sys.modules[NAME]
    folders = [_library.find().parent, *map(Path, sys.modules[__package__].__path__)]
    path = next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)
    if path is None:
        return None
    try:
        spec = importlib.util.spec_from_file_location(
            NAME, path, loader=ExtensionFileLoader(NAME, str(path))
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError:  # the file does not load in this interpreter, for example PyPy
        return None
    if module.INTERFACE != INTERFACE:
        return None
    sys.modules[NAME] = module
    return module
