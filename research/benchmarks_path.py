"""Puts benchmarks/ on Python's path. The programs here take from it how a program begins
(program.py), what describes a machine and writes results (benchmarking.py, kernels_hash.py), and
how a picture is saved (peers_picture.py)."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
