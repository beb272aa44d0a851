"""benchmarks/bench.py: its names and arguments, the module that the benchmarks share, and the
benchmarks that write NAME-cpu.json, with small sizes on the CPU."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import benchmarking
import commands
import decode
import flash_dmattn
import host_time
import options
import pytest
import streams_inputs
import table
import torch
from benches import main, measured, plant, read, refuse
from cases import with_sdpa
from programs import ROOT, python

TINY_DECODE = [
    decode.Case(2, 4, 2, 16, 64, 32, wide=True),
    decode.Case(1, 4, 2, 16, 999, 16, drafts=8, recent=16),
]
DECODES = ["decode/bf16/b2/h4g2/d16/n64/w32/float32", "decode/bf16/b1/h4g2/d16/n999/w16r16/drafts8"]
HOST_CASES = (
    *("no-gradients", "recording", "dense", "decode", "operator", "operator-backward"),
    "backward",
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(decode, "CPU_CACHE", 3 * 4 * 2 * 2 * 32 * 16)
    monkeypatch.setattr(decode, "all_cases", lambda device: TINY_DECODE)
    monkeypatch.setattr(decode, "DENSE_KEYS", 100)
    for module in (decode, host_time, options):
        monkeypatch.setattr(module, "QUICK", benchmarking.Rounds(2, 2, 0.0))


# ---- arguments ----

NO_DEVICE = "" if benchmarking.has_device() else "there is no CUDA device"
NUMBER, FOLDER = "want a number from 1 to 16777215", "want a folder that exists"
REFUSED = [  # a benchmark, its arguments, and words of the line that refuses them
    ("decode", "", "the following arguments are required: --out"),
    ("decode", "--out /no/such/folder", f"--out: is '/no/such/folder', {FOLDER}"),
    ("decode", "--out . --rounds 3", "unrecognized arguments: --rounds 3"),
    ("decode", "--out . --dev cpu", "unrecognized arguments: --dev cpu"),
    *((name, "--out . --device tpu", "--device: invalid choice: 'tpu'")
      for name in ("decode", "doge", "host_time", "model_step", "options", "streams")),
    *((name, "--device tpu", "--device: invalid choice: 'tpu'")
      for name in ("forward_performance", "backward_performance", "grad_equivalence", "suite")),
    *((name, "--json /no/such/folder/file", "--json: is '/no/such/folder/file', want a file in")
      for name in ("forward_equivalence", "backward_equivalence", "grad_equivalence", "peers")),
    ("forward_performance", "--device cpu --original --lengths 40",
     "--lengths: is given, want none with --original"),
    ("forward_performance", "--device cpu --original --q-len 1",
     "--q-len: is given, want none with --original"),
    ("forward_performance", "--device cpu --divide 2",
     "--divide: is given, want none without --original"),
    ("forward_performance", "--device cpu --heads 3 2", "--heads: is 3, want a multiple of 2"),
    ("forward_performance", "--device cpu --head-dim 12", "--head-dim: is 12, want a multiple of"),
    ("forward_performance", "--device cpu --lengths 40 20 --q-len 21",
     "--q-len: is 21, want at most --lengths, 20"),
    ("model_step", "", "the following arguments are required: --out"),
    ("model_step", "--out . --modes fast", "--modes: invalid choice: 'fast'"),
    ("model_step", "--out . --layouts h8", "--layouts: invalid choice: 'h8'"),
    ("model_step", "--out . --lengths 0", f"--lengths: is '0', {NUMBER}"),
    ("model_step", "--out . --seconds 0", "--seconds: is '0', want a number above 0"),
    ("peers", "--thread 1", "unrecognized arguments: --thread"),
    ("peers", "--device reference", "--device is 'reference'"),
    ("peers", "--threads 0", f"--threads: is '0', {NUMBER}"),
    ("peers", "--threads 100000", "--threads is 100000, and this machine has"),
    ("peers", "--lengths 64,-1", f"--lengths: is '-1', {NUMBER}"),
    ("peers", "--window x", f"--window: is 'x', {NUMBER}"),
    ("peers", "--rounds", "--rounds: expected one argument"),
    ("peers", "--picture time.pdf", "--picture: is 'time.pdf', want a name that ends in"),
    ("peers", "--sliding all", "--sliding needs --device cuda"),
    ("peers", "no-such-case", "no case matches 'no-such-case'"),
    ("ranks", "", "the following arguments are required: FOLDER"),
    ("ranks", "/no/such/folder", f"is '/no/such/folder', {FOLDER}"),
    ("ranks", ". --only weak all", "invalid choice: 'all'"),
    ("ranks", ". --device cpu", "is not a rank, want it started by torchrun"),
    ("suite", "--only weak", "invalid choice: 'weak'"),
    ("suite", "--out /no/such/folder/file.json", "want a file in a folder that exists"),
    ("suite", "--compare /no/such/file", "is '/no/such/file', want a file that exists"),
    ("suite", "--json no-such-file", "is 'no-such-file', want a file that exists"),
    ("suite", "--seconds 0", "is '0', want a number above 0"),
    ("suite", "--tolerance nan", "is 'nan', want a number above 0"),
    ("suite", "--longest 127", "--longest is 127, want 128 or more"),
    ("suite", "--threads 100000", "--threads is 100000, and this machine has"),
    ("suite", f"--json {__file__}", "--json is given without --compare"),
    ("suite", f"--compare {__file__} --json {__file__} --out new.json", "--out is given with"),
    ("compare", "old new --rename b", "--rename is b, want A=B"),
    ("compare", "old new --rounds 0", "--rounds is 0, want 1 or more"),
]  # fmt: skip
if NO_DEVICE:
    REFUSED += [
        ("peers", "--device cuda", "there is no CUDA backend in this build"),
        *(
            (name, "--out .", NO_DEVICE)
            for name in ("decode", "host_time", "model_step", "options", "streams")
        ),
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "words"), REFUSED, ids=[f"{name} {words}" for name, words, _ in REFUSED]
)
def test_bad_usage(
    name: str,
    arguments: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    refuse(name, arguments, words, capsys)


# Words of --help, at the beginning of a line.
PEERS = "fdma fdma-deterministic fdma-sm80 sdpa sdpa-masked mask cudnn flash4 masked read graph"
NAMED = {
    "decode": "fdma read sdpa",
    "streams": "fdma one-sequence whole whole-cached window varlen nested-cudnn flash-attn sdpa",
    "peers": PEERS,
    "suite": " ".join(commands.SUITE_ITEMS) + " ms spread peak_bytes mean_bytes times_dense",
    "ranks": " ".join(commands.RANKS_ITEMS),
    "options": "mask mask-bias ones keysP blocks dropout sink fdma lists without flex sdpa",
    "host_time": " ".join(HOST_CASES) + " fdma sdpa",
    "model_step": " ".join(commands.MODEL_PARTS) + " fdma fdma-float32 dense sliding",
}


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(name, "--help")
    printed = capsys.readouterr().out
    assert done.value.code == 0 and commands.COMMANDS[name].about.split(":")[0][:60] in printed
    for word in NAMED.get(name, "").split():
        assert f"\n  {word}" in printed, word
    kinds = {case.kind for case in streams_inputs.all_cases("cpu")} if name == "streams" else ()
    assert all(f"\n  {kind} " in printed for kind in kinds)


@pytest.mark.parametrize("arguments", ["", "decoder", "decode --out"])
def test_the_program_names_the_benchmark(arguments: str) -> None:
    done = python(ROOT / "benchmarks" / "bench.py", *arguments.split())
    head = "bench.py decode: " if arguments.startswith("decode ") else "bench.py: "
    assert done.returncode == 2 and done.stderr.startswith(head) and done.stdout == ""
    names = done.stderr.split("'")
    assert set(commands.COMMANDS) <= set(names) or arguments != "decoder"


# ---- the shared module ----


def test_tables() -> None:
    ms, ratio = benchmarking.MS[0], benchmarking.Column("ratio", "as fast", "9.2f", 1e3)
    made = benchmarking.Table(6, 4, ms, ratio)
    assert made.head() == "case   peer         ms   as fast"
    row = {"case": "one", "peer": "fdma", "ms": 1.5, "ratio": None}
    assert made.line(row) == "one    fdma      1.500"
    met = {**row, "ratio": 0.5, "goal": "<= 2 ms", "met": True}
    assert made.line(met) == "one    fdma      1.500    500.00  met    <= 2 ms"
    assert made.line({**met, "met": False}).endswith(" MISSED <= 2 ms")
    assert made.line({**row, "not_run": "too large"}) == "one    fdma not run: too large"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, None])
def test_rows_are_kept(error: Any, tmp_path: Path) -> None:
    """On Ctrl-C and after errors, too."""
    path = tmp_path / "rows.json"
    for rows in ([], [{"ms": 1}]):
        try:
            with benchmarking.kept(path, {"machine": "one"}) as lines:
                lines += rows
                if error:
                    raise error
        except (KeyboardInterrupt, RuntimeError) as found:
            assert type(found) is error
        assert path.exists() == bool(rows)
    assert read(path) == ({"machine": "one"}, [{"ms": 1}])


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "host_time-cpu.json").mkdir()
    assert main("host_time", f"--device cpu --quick --out {tmp_path}") == 1
    assert capsys.readouterr().err.startswith("host_time.py: ")


# ---- runs ----

SMALL = {"options": "--divide 64"}
ROWS = {  # the peers of each case
    "decode": {DECODES[0]: ["fdma", "read"], DECODES[1]: ["fdma", "read", "sdpa"]},
    "host_time": dict.fromkeys(HOST_CASES, ["fdma", "sdpa"]),
    "options": {
        "mask/float32/h2g1/d64/n128/w16": ["fdma", "without", "sdpa"],
        "mask-training/float32/h2g1/d64/n128/w16": ["fdma", "without"],
        "ones/float32/h2g1/d64/n64": ["fdma", "without"],
        "dropout-training/float32/h2g1/d64/n128/w16": ["fdma", "without"],
        "sink/float32/h2g1/d64/n128/w16": ["fdma", "without"],
    },
}


@with_sdpa
@pytest.mark.parametrize("name", ROWS)
def test_a_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = measured(name, tmp_path, SMALL.get(name, ""))
    found = [(row["case"], row["peer"]) for row in rows]
    assert status == 0
    assert found == [(case, peer) for case, peers in ROWS[name].items() for peer in peers]
    path = tmp_path / f"{name}-cpu.json"
    machine, _ = read(path)
    assert machine["machine"] and machine["cores"] >= 1 and "commit" in machine
    assert machine["device"] == "cpu" and machine["torch"] == torch.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", machine["date"])
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in printed[3:]] == [list(one) for one in found]
    tables = table.table(path)
    assert machine["machine"] in tables and all(f"| {a} | {b} |" in tables for a, b in found)
    for row in rows:
        assert row["ms"] > 0 and row["spread"] >= 0
        if name == "decode":
            assert (row["of_read"] is None) == (row["peer"] != "fdma") == (row["ratio"] is not None)
        else:
            assert row["times"] > 0 and (row["peer"] != "fdma" or row["times"] == 1)
        if name == "host_time":
            assert row["us"] == pytest.approx(1e3 * row["ms"])
            assert (row["of_sdpa"] is None) == (row["peer"] == "sdpa")
            assert row["goal"] is None and row["met"] is None  # they are for CUDA devices


def with_nan(right: Any, *rows: Any, **given: Any) -> torch.Tensor:
    out = right(*rows, **given)
    out[0, 0, 1, 5] = torch.nan
    return out


def one_more(right: Any, *rows: Any, **given: Any) -> torch.Tensor:
    out = right(*rows, **given)
    rows[3].seen[0] += 1
    return out


MISTAKES = {  # a benchmark, the wrong function, and what it says
    "nan": ("decode", "decode", with_nan, f"decode.py: {DECODES[0]}: wrong"),
    "seen": ("decode", "decode", one_more, f"decode.py: {DECODES[0]}: wrong"),
    "causal": (
        "host_time",
        "attention",
        lambda right, *rows, causal: right(*rows, causal=not causal),
        "host_time.py: dense: fdma and sdpa differ",
    ),
    "unmasked": (
        "options",
        "attention",
        lambda right, *rows, attn_mask=None, **given: right(*rows, **given),
        "options.py: mask: fdma and without differ",
    ),
}


@with_sdpa
@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_outputs_are_found(
    mistake: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Cases with wrong outputs are not written."""
    name, function, change, words = MISTAKES[mistake]
    plant(monkeypatch, flash_dmattn, function, change)
    status, rows = measured(name, tmp_path, SMALL.get(name, ""))
    assert status == 1 and capsys.readouterr().err.startswith(words)
    left = {row["case"].split("/")[0] for row in rows}
    assert left == ({"ones", "dropout-training", "sink"} if name == "options" else set())


# ---- decode ----


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cases_have_names_of_their_own(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    names = [case.name() for case in decode.all_cases(device)]
    assert len(set(names)) == len(names)
    wanted = "decode/bf16/b64/h32g8/d128/n1048576/w2048"
    assert (wanted in names) == (device == "cuda")


def test_the_caches_of_a_pass() -> None:
    """They are full, in the layout of DynamicMaskCache, and larger than the processor's cache."""
    inputs = decode.Inputs(TINY_DECODE[0], "cpu")
    assert inputs.count == 9 == len(inputs.caches)
    made = flash_dmattn.DynamicMaskCache(1, 2, 2, 16, 32, recent=0, dtype=inputs.memory.dtype).keys
    for cache in inputs.caches:
        for one, other in zip(cache[:6], made[:6]):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert cache.key.stride()[1:] == made.key.stride()[1:]
        for head in cache.position.flatten(0, 1).tolist():
            assert len(set(head)) == 32 and min(head) >= 0 and max(head) < 64


# ---- host_time: goals ----


@pytest.mark.parametrize(("ours", "met"), [(1.0, True), (1.3, False)])
def test_goals(ours: float, met: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device: 1.0 is below the bar of four cases, 1.3 of one."""
    times = {"fdma": [2 * ours, ours, ours], "sdpa": [1.0, 1.0, 1.0]}
    monkeypatch.setattr(host_time, "alternate", lambda timers, rounds: times)
    monkeypatch.setattr(host_time, "check", lambda device: None)
    args = argparse.Namespace(device="cuda", quick=True)
    rows = {case: list(host_time.measure(case, {}, args)) for case in HOST_CASES}
    held = {case: (own["goal"], own["met"]) for case, (own, _) in rows.items() if own["goal"]}
    assert held == {
        "no-gradients": ("<= 0.8 of sdpa", False),
        "recording": ("<= 1.2 of sdpa", met),
        "backward": ("<= 1.2 of sdpa", met),
        "operator": ("<= 1.2 of sdpa", met),
        "operator-backward": ("<= 1.5 of sdpa", True),
    }
    assert [one["of_sdpa"] for own in rows.values() for one in own] == 7 * [ours, None]


# ---- doge ----


def test_doge(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rows, training, and a wrong window that it finds."""
    pytest.importorskip("transformers")
    import doge
    import flash_dmattn.transformers as ours

    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 1000}
    monkeypatch.setattr(doge, "SHAPE", {**doge.SHAPE, **sizes})
    monkeypatch.setattr(doge, "GENERATED", 8)
    monkeypatch.setattr(doge, "QUICK", benchmarking.Rounds(2, 2, 0.0))
    cases = [*doge.CASES["cpu"], doge.Case("training", 1, 2048, 256)]
    monkeypatch.setitem(doge.CASES, "cpu", cases)
    status, rows = measured("doge", tmp_path, "--divide 64")
    assert status == 0
    assert [(row["case"], row["peer"]) for row in rows] == [
        *(("forward/float32/2/n64/w4", peer) for peer in ("fdma", "sdpa", "linear")),
        *(("generate/float32/2/n64/w4", peer) for peer in ("fdma", "sdpa")),
        *(("training/float32/1/n32/w4", peer) for peer in ("fdma", "sdpa")),
    ]
    assert all(row["ms"] > 0 and row["times"] > 0 for row in rows)

    def other_window(right: Any, *given: Any, **rest: Any) -> torch.Tensor:
        return right(*given[:-1], given[-1] // 2, **rest)

    plant(monkeypatch, ours.fused, "flash_dma_attention", other_window)
    monkeypatch.setitem(doge.CASES, "cpu", cases[:1])
    assert measured("doge", tmp_path, "--divide 64")[0] == 1
    assert "forward: fdma and sdpa differ" in capsys.readouterr().err


# ---- compare ----


def fake_command(path: Path, milliseconds: dict[str, float]) -> str:
    """A command that writes these figures as `fdma bench --json FILE` does."""
    path.write_text(
        f"#!{sys.executable}\n"
        "import json, sys\n"
        "with open(sys.argv[sys.argv.index('--json') + 1], 'w') as file:\n"
        "    print(json.dumps({'machine': 'none'}), file=file)\n"
        f"    for case, ms in {milliseconds!r}.items():\n"
        "        print(json.dumps({'case': case, 'kernel': sys.argv[0], 'ms': ms}), file=file)\n"
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("new", "options", "status", "words"),
    [
        ({"a": 1.02, "b": 2.0}, "", 0, "2 cases, 0 slower"),
        ({"a": 1.05, "b": 2.0}, "", 1, "2 cases, 1 slower"),
        ({"a": 0.5, "b": 1.0}, "", 0, "0.500"),
        ({"a": 1.0}, "", 1, "timed by one command only"),
        ({"a": 1.0, "c": 2.0}, "--rename b=c", 0, "2 cases, 0 slower"),
    ],
)
def test_compare(
    tmp_path: Path,
    new: dict[str, float],
    options: str,
    status: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands = (fake_command(tmp_path / "old", {"a": 1.0, "b": 2.0}), tmp_path / "new")
    fake_command(tmp_path / "new", new)
    assert main("compare", "{} {} --rounds 2 {}".format(*commands, options)) == status
    assert words in capsys.readouterr().out


def test_a_comparison_keeps_whole_rounds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import compare

    times = iter([2.0, 3.0, 2.0])  # the first round, and one command in the second

    def run_bench(*_: object) -> dict[str, float]:
        if (ms := next(times, None)) is None:
            raise KeyboardInterrupt
        return {"select/x": ms}

    monkeypatch.setattr(compare, "run_bench", run_bench)
    with pytest.raises(KeyboardInterrupt):
        main("compare", "old new --tolerance 1")
    line = capsys.readouterr().out.splitlines()[1].split()
    assert line == ["select/x", "2", "3", "1.500", "1.500"]
