"""Puts benchmarks/ and examples/ on Python's path. The programs here use their modules to begin a
program (program.py), to describe a machine and write results (benchmarking.py, kernels_hash.py),
and to save a picture (picture.py)."""

import sys
from pathlib import Path

for folder in ("benchmarks", "examples"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / folder))
