"""tools/gpu_check.sh where there is no GPU; whether the figures kept are of these kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from kernels_hash import kernels_hash  # noqa: E402

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*cuda*.json"))


def run(*arguments: str | Path, path: str = os.environ["PATH"]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", ROOT / "tools" / "gpu_check.sh", *arguments],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--out DIR is missing"),
        (["--out"], "--out wants a folder"),
        (["slow", "--out", "x"], "'slow' is not quick, full or --out DIR"),
    ],
)
def test_bad_usage(arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1


def test_without_a_device(tmp_path: Path) -> None:
    """Where neither nvidia-smi nor torch knows of one."""
    for name in ("sh", "mkdir", "dirname", "date", "head", "tr", "grep"):
        (tmp_path / name).symlink_to(
            next(p for d in os.environ["PATH"].split(":") if (p := Path(d) / name).exists())
        )
    done = run("quick", "--out", tmp_path / "out", path=str(tmp_path))
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
    """Says so where they are older: only a machine with a GPU makes new ones."""
    machine = json.loads(path.read_text().splitlines()[0])
    assert machine["machine"] and machine["device"] == "cuda"
    assert machine["date"] and machine["commit"]
    if machine["kernels"] != kernels_hash():
        pytest.skip(f"{path.name} is older than src/cuda: run tools/gpu_check.sh full")
