"""The programs in benchmarks/, examples/, research/ and tools/, as their users meet them.

--help and wrong options are answered without PyTorch. Programs say what they do, also without a
terminal. Ctrl-C ends them with the results so far. A missing package is named.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ROOT, output_of, python, run

FILES = sorted(
    path
    for folder in ("benchmarks", "examples", "examples/lm", "research", "tools", "tools/gates")
    for path in (ROOT / folder).glob("*.py")
    if not path.is_symlink()
)
STARTED = [path for path in FILES if '\nif __name__ == "__main__":\n' in path.read_text()]
MODULES = [path for path in STARTED if "\n    program.belongs_to(" in path.read_text()]
PROGRAMS = [path for path in STARTED if path not in MODULES]
HEAVY = (
    "torch",
    "flash_dmattn",
    "matplotlib",
    "transformers",
    "safetensors",
    "numpy",
    "tokenizers",
)
# Its parser takes defaults from modules that import PyTorch.
SLOW = ("quality.py",)
# These have no arguments.
BARE = ("kernels_hash.py", *(path.name for path in (ROOT / "tools" / "gates").glob("*.py")))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


ANSWERING = [path for path in PROGRAMS if path.name not in (*BARE, *SLOW)]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of modules that cannot be imported."""
    folder = tmp_path_factory.mktemp("poisoned")
    for module in HEAVY:
        (folder / f"{module}.py").write_text(f"raise SystemError('{module} is imported')\n")
    return folder


@pytest.mark.parametrize("path", ANSWERING, ids=name_of)
def test_help_does_not_wait_for_imports(path: Path, poisoned: Path) -> None:
    env = {"PYTHONPATH": str(poisoned), "RANK": None}
    shown = output_of(python(path, "--help", env=env))
    assert shown.startswith("usage: ") and len(shown.splitlines()) > 3
    wrong = python(path, "--no-such-option", env=env)
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr
    assert path.name in wrong.stderr and wrong.stdout == ""


@pytest.mark.parametrize("name", SLOW)
def test_help_of_programs_that_import(name: str) -> None:
    """Only the package is on Python's path."""
    (path,) = (path for path in PROGRAMS if path.name == name)
    shown = output_of(python(path, "--help", env={"PYTHONPATH": str(ROOT / "python")}))
    assert shown.startswith("usage: ")


@pytest.mark.parametrize("path", PROGRAMS, ids=name_of)
def test_programs_can_be_started(path: Path) -> None:
    assert os.access(path, os.X_OK) and path.read_text().startswith("#!/usr/bin/env python3\n")


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_name_their_program(path: Path, poisoned: Path) -> None:
    done = python(path, env={"PYTHONPATH": str(poisoned)})
    found = re.fullmatch(rf"{path.name}: is a module of (\w+\.py), and no program\n", done.stderr)
    assert done.returncode == 2 and found is not None
    assert (path.parent / found[1]) in PROGRAMS


@pytest.mark.parametrize("name", ["examples/tensor_parallel.py", "benchmarks/ranks.py"])
def test_ranks_say_how_to_start_them(name: str, tmp_path: Path, poisoned: Path) -> None:
    arguments = [tmp_path] if "ranks" in name else []
    done = python(ROOT / name, *arguments, env={"PYTHONPATH": str(poisoned), "RANK": None})
    assert done.returncode == 2 and f"torchrun --nproc-per-node 2 {name}" in done.stderr


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    text = "raise ModuleNotFoundError(\"No module named 'matplotlib'\", name='matplotlib')\n"
    (tmp_path / "matplotlib.py").write_text(text)
    curves = tmp_path / "curves.json"
    curves.write_text("{}")
    arguments = (curves, "--out", tmp_path / "curves.svg")
    env = {"PYTHONPATH": str(tmp_path)}
    done = python(ROOT / "examples" / "train_picture.py", *arguments, env=env)
    wanted = "train_picture.py: needs matplotlib: pip install matplotlib\n"
    assert (done.returncode, done.stderr) == (2, wanted)


def test_choices_are_those_of_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsers repeat names and numbers from modules that import PyTorch."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import adapt
    import adapt_layers
    import commands
    import definition_cases
    import ranks
    import ranks_common
    import suite_items
    import train_long
    import train_text
    import workloads
    import workloads_model

    assert tuple(adapt_layers.TARGETS) == adapt.TARGETS
    assert tuple(definition_cases.DTYPES) == commands.DTYPE_NAMES
    assert list(ranks.ITEMS) == commands.RANKS_ITEMS
    choices = {one.dest: one.choices for one in commands.make_parser("ranks")._actions}
    assert list(ranks_common.DTYPES) == list(choices["dtype"])
    assert list(suite_items.ITEMS) == commands.SUITE_ITEMS
    assert train_text.HEAD_DIM == train_long.HEAD_DIM
    assert (*workloads.TASKS,) == workloads.NAMES and workloads_model.FORMS == workloads.FORMS


# ---- program.py ----

WAITS = """
import sys
sys.path.insert(0, {folder!r})
import program
program.begin(lambda: None)
program.doing("the first of two")
print("a row", flush=True)
import time
time.sleep(60)
"""


@pytest.mark.parametrize("seconds", ["0", "0.05"])
def test_progress_without_a_terminal(tmp_path: Path, seconds: str) -> None:
    path = tmp_path / "waits.py"
    path.write_text(WAITS.format(folder=str(ROOT / "examples")))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = {**os.environ, "FDMA_PROGRESS_SECONDS": seconds}
    env.pop("RANK", None)
    with subprocess.Popen(
        [sys.executable, path], env=env, preexec_fn=heed_ctrl_c, **pipes
    ) as started:
        assert started.stdout is not None and started.stderr is not None
        assert started.stdout.readline() == "a row\n"
        said = started.stderr.readline()
        while "the first of two" not in said:  # the program imports before that
            said = started.stderr.readline()
        started.send_signal(signal.SIGINT)
        assert started.wait(timeout=60) == 130
        assert re.fullmatch(r"waits\.py: (\d+ s: )?the first of two\n", said)
        assert started.stderr.read().splitlines()[-1] == "waits.py: stopped"


def heed_ctrl_c() -> None:
    """A shell's background jobs ignore Ctrl-C; heed it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_one_of_several_ranks_is_silent(tmp_path: Path) -> None:
    path = tmp_path / "waits.py"
    path.write_text(WAITS.format(folder=str(ROOT / "examples")).replace("sleep(60)", "sleep(0.2)"))
    done = run(sys.executable, path, env={"FDMA_PROGRESS_SECONDS": "0.01", "RANK": "1"})
    assert output_of(done) == "a row\n" and done.stderr == ""


# ---- Ctrl-C in real ones ----


def test_training_keeps_its_curves(tmp_path: Path) -> None:
    """Progress is printed at every step. Ctrl-C reports and writes the results so far."""
    path, text = tmp_path / "curves.json", tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 40)
    sizes = "--steps 100000 --length 64 --keys 16 --layers 1 --width 64 --batch 1 --device cpu"
    program = [sys.executable, ROOT / "examples" / "train_text.py", *sizes.split()]
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "FDMA_PROGRESS_SECONDS": "0"}
    with subprocess.Popen(
        [*program, "--text", text, "--json", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
        preexec_fn=heed_ctrl_c,
    ) as training:
        assert training.stderr is not None and training.stdout is not None
        line = training.stderr.readline()
        while line and "step 3," not in line:
            line = training.stderr.readline()
        assert re.match(r"train_text\.py: \d+% of the training, step 3, loss [\d.]+", line)
        training.send_signal(signal.SIGINT)
        rest = training.stderr.read()
        printed = training.stdout.read()
        assert training.wait(timeout=60) == 130
    assert "Traceback" not in rest and rest.endswith("train_text.py: stopped\n")
    assert "held-out loss" in printed
    assert len(json.loads(path.read_text())["selected"]["train"]) >= 3
