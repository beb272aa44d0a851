"""benchmarks/decode.py: its arguments, its cases, and the rows of tiny ones on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import benchmarking
import decode
import flash_dmattn
import pytest
from cases import with_sdpa
from programs import ROOT, assert_refused, help_of, output_of, python

TINY = [decode.Case(2, 4, 2, 16, 64, 32), decode.Case(1, 4, 2, 16, 999, 32, drafts=8)]
NAMES = ["decode/bf16/b2/h4g2/d16/n64/w32", "decode/bf16/b1/h4g2/d16/n999/w32/drafts8"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "CPU_CACHE", 3 * 4 * 2 * 2 * 32 * 16)
    monkeypatch.setattr(decode, "all_cases", lambda device: TINY)
    monkeypatch.setattr(decode, "DENSE_KEYS", 100)
    monkeypatch.setattr(decode, "QUICK", benchmarking.Rounds(2, 2, 0.0))


@with_sdpa
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    path = tmp_path / "decode-cpu.json"
    machine, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert machine["machine"] and machine["device"] == "cpu" and machine["date"]
    assert "commit" in machine
    found = [(row["case"], row["peer"]) for row in rows]
    peers = [(0, "fdma"), (0, "read"), (1, "fdma"), (1, "read"), (1, "sdpa")]
    assert found == [(NAMES[case], peer) for case, peer in peers]
    for row in rows:
        assert row["ms"] > 0 and row["spread"] >= 0
        assert (row["of_read"] is None) == (row["peer"] != "fdma") == (row["ratio"] is not None)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in printed[1:]] == [list(one) for one in found]
    table = output_of(python(ROOT / "benchmarks" / "table.py", path))
    assert machine["machine"] in table and f"| {NAMES[1]} | sdpa |" in table


def test_cases_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for device in ("cpu", "cuda"):
        names = [case.name() for case in decode.all_cases(device)]
        assert len(set(names)) == len(names)
    assert "decode/bf16/b64/h32g8/d128/n1048576/w2048" in names


def test_the_caches_of_a_pass() -> None:
    """They are full, in the layout of DynamicMaskCache, and larger than the processor's cache."""
    inputs = decode.Inputs(TINY[0], "cpu")
    assert inputs.count == 9 == len(inputs.caches)
    made = flash_dmattn.DynamicMaskCache(1, 2, 2, 16, 32, recent=0, dtype=inputs.memory.dtype).keys
    for cache in inputs.caches:
        for one, other in zip(cache[:6], made[:6]):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert cache.key.stride()[1:] == made.key.stride()[1:]
        for head in cache.position.flatten(0, 1).tolist():
            assert len(set(head)) == 32 and min(head) >= 0 and max(head) < 64


@pytest.mark.parametrize("mistake", ["nan", "seen"])
def test_wrong_outputs_are_found(
    mistake: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    right = flash_dmattn.decode

    def wrong(query: Any, key: Any, value: Any, cache: Any, **options: Any) -> Any:
        out = right(query, key, value, cache, **options)
        if mistake == "nan":
            out[0, 0, 1, 5] = float("nan")
        else:
            cache.seen[0] += 1
        return out

    monkeypatch.setattr(flash_dmattn, "decode", wrong)
    assert decode.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(f"decode.py: {NAMES[0]}: wrong") and printed.count("\n") == 1
    assert not list(tmp_path.iterdir())


# Arguments, and words of the line that refuses them.
REFUSED = {
    "": "the following arguments are required: --out",
    "--out /no/such/folder": "--out: is '/no/such/folder', want a folder",
    "--out . --device tpu": "--device: invalid choice: 'tpu'",
    "--out . --rounds 3": "unrecognized arguments: --rounds 3",
    "--out . --dev cpu": "unrecognized arguments: --dev cpu",
}
if "cuda" not in flash_dmattn.get_available_backends():
    REFUSED["--out ."] = "there is no CUDA device"


@pytest.mark.parametrize("arguments", REFUSED)
def test_bad_usage(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(decode.main, arguments, REFUSED[arguments], capsys)


def test_help_names_every_peer(capsys: pytest.CaptureFixture[str]) -> None:
    printed = help_of(decode.main, capsys)
    for peer in ("fdma", "read", "sdpa"):
        assert f"\n  {peer} " in printed
