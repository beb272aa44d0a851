"""tools/gpu_check.sh without a GPU, and the test that stored figures belong to these kernels."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from kernels_hash import kernels_hash
from programs import ROOT, Done, run

RESULTS = sorted(
    path
    for folder in ("benchmarks", "research")
    for path in (ROOT / folder / "results").glob("*cuda*.json")
)


def gpu_check(*arguments: str | Path, **options: Any) -> Done:
    return run("sh", ROOT / "tools" / "gpu_check.sh", *arguments, **options)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--out DIR is missing"),
        (["--out"], "--out needs a folder"),
        (["slow", "--out", "x"], "'slow' is not quick, full or --out DIR"),
    ],
)
def test_bad_usage(arguments: list[str], words: str) -> None:
    done = gpu_check(*arguments)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1


def test_without_a_device(tmp_path: Path) -> None:
    """Neither nvidia-smi nor torch knows a device."""
    for name in ("sh", "mkdir", "dirname", "date", "head", "tr", "grep"):
        (tmp_path / name).symlink_to(
            next(p for d in os.environ["PATH"].split(":") if (p := Path(d) / name).exists())
        )
    done = gpu_check("quick", "--out", tmp_path / "out", env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert "no CUDA device" in done.stderr


def test_the_hash_is_of_names_and_contents(tmp_path: Path) -> None:
    folder = tmp_path / "src" / "cuda" / "sm80"
    folder.mkdir(parents=True)
    (folder / "one.cu").write_text("1")
    first = kernels_hash(tmp_path)
    assert first == kernels_hash(tmp_path)
    (folder / "one.cu").write_text("2")
    second = kernels_hash(tmp_path)
    (folder / "one.cu").rename(folder / "two.cu")
    assert len({first, second, kernels_hash(tmp_path)}) == 3


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_results_are_of_these_kernels(path: Path) -> None:
    """Skip with a message if gpu_check.sh makes these figures and they are older: only a machine
    with a GPU makes new ones."""
    machine = json.loads(path.read_text().splitlines()[0])
    assert machine["machine"] and machine["device"] == "cuda"
    assert machine["date"] and machine["commit"]
    if machine["kernels"] != kernels_hash() and path.parents[1].name == "benchmarks":
        pytest.skip(f"{path.name} is older than src/cuda: run tools/gpu_check.sh full")
