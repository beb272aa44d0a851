"""Puts benchmarks/ on Python's path. The programs here use its modules to begin a program
(program.py), to describe a machine and write results (benchmarking.py, kernels_hash.py), and to
save a picture (peers_picture.py)."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
