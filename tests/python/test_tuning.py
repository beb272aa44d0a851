"""tune() and load_tuning(): measurements, files, their effect on calls, and refusals."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import flash_dmattn
import pytest
import torch
from flash_dmattn import TuningShape, _library, load_tuning, tune
from programs import ROOT, output_of, python, run

SHAPE = TuningShape(kv_len=600, head_dim=16, q_heads=2, kv_heads=1, q_len=2, window=200)
CLASS = "forward float32 causal=1 head_dim=16 rows=4 keys=512 kept=512"
TOOL = os.environ.get("FDMA_TOOL", str(ROOT / "build" / "fdma"))


@pytest.fixture(autouse=True)
def no_tuning() -> Any:
    load_tuning(None)
    yield
    load_tuning(None)


def lines() -> list[str]:
    found: list[str] = []
    while (line := _library.library.fdma_tuning_line(len(found))) is not None:
        found.append(line.decode())
    return found


def write(path: Path, *entries: str) -> Path:
    """Write a file of this machine with these entries."""
    _library.check(_library.library.fdma_tuning_save(os.fsencode(path)))
    path.write_text(path.read_text() + "".join(f"{entry}\n" for entry in entries))
    return path


def choosing(**choices: int) -> str:
    numbers = {"tile_rows": 0, "split_keys": 0, "thread_work": 0, **choices}
    return f"{CLASS} kernel=rules " + " ".join(f"{name}={n}" for name, n in numbers.items())


def attend() -> torch.Tensor:
    """A call of CLASS."""
    random = torch.Generator().manual_seed(1)
    query = torch.randn(1, 2, 2, 16, generator=random)
    key, value = torch.randn(2, 1, 600, 1, 16, generator=random)
    return flash_dmattn.attention(query, key, value, causal=True)[0]


def test_calls_follow_a_file(tmp_path: Path) -> None:
    """The layout of the second call is known, but not the workspace that its choice needs."""
    entry = choosing(split_keys=32)
    path = write(tmp_path / "tuning", entry)
    rules = attend()
    load_tuning(path)
    assert lines() == [entry]
    tuned = attend()
    assert not torch.equal(tuned, rules)
    torch.testing.assert_close(tuned, rules)
    load_tuning(None)
    assert torch.equal(attend(), rules)


def test_the_environment_names_a_file(tmp_path: Path) -> None:
    entry = choosing(split_keys=32)
    path = write(tmp_path / "tuning", entry)
    program = (
        "import ctypes, os; x = ctypes.CDLL(os.environ['FDMA_LIBRARY']).fdma_tuning_line; "
        "x.restype = ctypes.c_char_p; print(x(0))"
    )
    assert output_of(python("-c", program, env={"FDMA_TUNING": str(path)})) == f"{entry.encode()}\n"
    done = python("-c", program, env={"FDMA_TUNING": str(tmp_path / "none")})
    assert output_of(done) == "None\n"
    assert done.stderr.startswith("fdma: FDMA_TUNING is ignored: ")
    assert entry in output_of(run(TOOL, "info", env={"FDMA_TUNING": str(path)}))
    assert "none: calls follow the rules" in output_of(run(TOOL, "info", env={"FDMA_TUNING": None}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_trials(dtype: torch.dtype) -> None:
    shape = SHAPE._replace(dtype=dtype, backward=True)
    trials = tune([shape], seconds=0.001)
    assert {trial.shape for trial in trials} == {shape}
    final = {trial.operation: trial for trial in trials if trial.final}
    assert list(final) == ["forward", "backward"]
    assert sum(trial.final for trial in trials) == 2 < len(trials)
    kept = [line.split()[0] for line in lines()]
    assert kept == [name for name, trial in final.items() if trial.choice != "rules"]
    for trial in trials:
        assert trial.kernel.startswith("cpu/") and trial.seconds > 0 and trial.ratio > 0
        assert trial.ratio == 1 or trial.choice != "rules"


def test_a_file_keeps_other_shapes(tmp_path: Path) -> None:
    entry = choosing(split_keys=32)
    path = write(tmp_path / "tuning", entry)
    tune([SHAPE._replace(head_dim=24)], path, seconds=0.001)
    written = path.read_text().splitlines()
    assert written[3] == entry and written[3:] == lines()
    new = tmp_path / "new"
    load_tuning(None)
    tune([], new)
    assert new.read_text().splitlines() == written[:3]


def test_a_dense_shape() -> None:
    shape = TuningShape(kv_len=64, head_dim=16, q_heads=2, causal=False)
    assert tune([shape], seconds=0.001)[-1].final


def refused(kind: type[Exception], words: str, call: Any, *arguments: Any) -> None:
    with pytest.raises(kind, match=words) as raised:
        call(*arguments)
    assert type(raised.value) is kind


def test_wrong_files(tmp_path: Path) -> None:
    refused(FileNotFoundError, "want a file that is there", load_tuning, tmp_path / "none")
    refused(ValueError, "cannot be", load_tuning, tmp_path)  # a folder
    refused(ValueError, "seconds: is -1", lambda: tune([SHAPE], seconds=-1))
    wrong = write(tmp_path / "wrong", choosing(split_keys=-1))
    refused(ValueError, "line 4: split_keys is -1", tune, [SHAPE], wrong)
    refused(ValueError, "cannot be written", tune, [], tmp_path / "none" / "file")


def test_the_tool(tmp_path: Path) -> None:
    path = write(tmp_path / "tuning", choosing(split_keys=32))
    shape = ("--keys", "64", "--head-dim", "16", "--heads", "2", "--kv-heads", "1", "--window", "9")
    tuning = (TOOL, "tune", "--seconds", "0.001", *shape, "--backward", "--file", path)
    printed = output_of(run(*tuning)).splitlines()
    assert printed[0].split() == ["operation", "ms", "ratio", "choice", "(kernel)"]
    operations = [line.split()[0] for line in printed if " keeps " in line]
    assert operations == ["forward", "backward"]
    assert printed[printed.index("tuning") + 1 :] == [
        f"  {line}" for line in path.read_text().splitlines()[3:]
    ]
    assert choosing(split_keys=32) in path.read_text()
    alone = output_of(run(TOOL, "tune", "--dense", "--global", "--seconds", "0.001", *shape[:-2]))
    assert "forward" in alone
    for arguments, words in (
        (("--keys", "0"), "--keys"),
        (("--head-dim", "12"), "head_dim: is 12"),
        (("--file", tmp_path), "cannot be"),
        (("--threads", "3000000000"), "--threads"),
    ):
        done = run(TOOL, "tune", *arguments)
        assert done.returncode == 2 and words in done.stderr
