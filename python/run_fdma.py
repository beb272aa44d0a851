#!/usr/bin/env python
"""The command `fdma` of a wheel: runs the program inside the package, without importing PyTorch."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

found = find_spec("flash_dmattn")
folders = found.submodule_search_locations if found else None
programs = [Path(folder) / "bin" / "fdma" for folder in folders or ()]
program = next((path for path in programs if path.is_file()), None)
if program is None:
    sys.exit("fdma: the package flash_dmattn of this Python has no bin/fdma; install it anew")
os.execv(program, [sys.argv[0], *sys.argv[1:]])
