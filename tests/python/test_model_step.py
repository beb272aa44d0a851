"""The benchmark `model_step` with tiny sizes on the CPU: its cases, rows, table and picture, peers
that do not run, and mistakes that it finds."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import benchmarking
import commands
import model_step
import model_step_checks
import model_step_decode
import model_step_layers
import model_step_peers
import pytest
import table
import torch
from benches import Row, main, plant, read
from cases import with_sdpa
from programs import ROOT

pytestmark = with_sdpa
FEW = "--layouts h8g4d128 --batches 2"
TRAINING = "training/b2/h8g4/d16/n48/w16r16/eager"
DECODING = "decoding/b2/h8g4/d16/n40/w16r16"
TINY = model_step.Case(model_step_layers.Layout(4, 2, 16), 2, 48, "eager", model_step.TINY)


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_step, "QUICK", benchmarking.Rounds(2, 2, 0.0))
    monkeypatch.setattr(model_step_peers, "PROBE", benchmarking.Rounds(1, 1, 0.0))
    for module in (model_step, model_step_decode):
        monkeypatch.setattr(module, "CHECKED", 80)


def measured(folder: Path, options: str) -> tuple[int, list[Row]]:
    """The exit status and the rows of a run; one without rows writes no file."""
    status = main("model_step", f"--device cpu --quick --out {folder} {options}")
    path = folder / "model-step-cpu.json"
    return status, read(path)[1] if path.exists() else []


def parsed(options: str) -> Any:
    parser = commands.make_parser("model_step")
    return commands.parse(parser, "model_step", f"--out . {options}".split())


# ---- cases ----


def names_of(options: str) -> list[str]:
    args = parsed(options)
    sizes = model_step.SIZES
    cases = [*model_step.decoding_cases(args, sizes), *model_step.training_cases(args, sizes)]
    return [case.name() for case in cases]


def test_cases() -> None:
    names = names_of("")
    assert len(set(names)) == len(names) == 2 * (8 * 2 + 3 * 3) + 2 * 9 * 3
    wanted = {
        "training/b8/h16g4/d64/n131072/w1024r1024/eager",
        "training/b1/h8g4/d128/n65536/w1024r1024/captured",
        "training/b1/h8g4/d128/n65536/w1024r1024/graphs",
        "decoding/b64/h8g4/d128/n131072/w1024r1024",
    }
    assert wanted <= set(names)
    assert not any("/b8/" in name and not name.endswith("eager") for name in names if "tr" in name)
    assert names.index("training/b1/h8g4/d128/n4096/w1024r1024/compiled") < names.index(
        "training/b1/h8g4/d128/n4096/w1024r1024/graphs"
    )


def test_chosen_cases() -> None:
    options = "--modes graphs --lengths 2048 --contexts 64 --batches 3 --layouts h16g4d64"
    assert names_of(options) == [
        "decoding/b3/h16g4/d64/n64/w1024r1024",
        "training/b3/h16g4/d64/n2048/w1024r1024/graphs",
    ]


def test_steps_of_a_time() -> None:
    """Short steps are timed together."""
    case = TINY._replace(batch=1, sizes=model_step.SIZES)
    assert [case._replace(length=n).steps for n in (1024, 16384, 131072)] == [16, 1, 1]


# ---- a run ----


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = measured(tmp_path, f"{FEW} --lengths 48 --contexts 40")
    assert status == 0
    found = [(row["case"], row["peer"]) for row in rows]
    peers = {DECODING: ("fdma", "fdma-float32", "dense"), TRAINING: ("fdma", "dense", "sliding")}
    assert found == [(case, peer) for case, names in peers.items() for peer in names]
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in printed[3:]] == [list(one) for one in found]
    for row in rows:
        assert row["ms"] > 0 and row["rounds"] == 2 and row["times_dense"] > 0
        assert row["times_dense"] == 1 or row["peer"] != "dense"
        tokens = 2 if row["case"] == DECODING else 2 * 48
        assert row["tokens_per_second"] == pytest.approx(1e3 * tokens / row["ms"])
        own = row["peer"] != "dense"
        assert own == (row["attention"] == "fdma") == ("rotary" not in row)
    of_dense = 2 * 2 * 4 * 40 * 16 * 2  # k and v, batch, heads, keys, channels, bytes
    assert rows[2]["cache_bytes"] == of_dense and rows[2]["us"] == 1e3 * rows[2]["ms"]
    of_row = 2 * 16 * 2 + 12
    assert rows[0]["cache_bytes"] == pytest.approx(2 * 4 * 32 * of_row, rel=0.01)
    path = tmp_path / "model-step-cpu.json"
    text = table.table(path)
    assert all(f"| {case} | {peer} |" in text for case, peer in found)
    assert "times as fast as dense" in text and "bytes of cache" in text


def test_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    machine = {"machine": "one", "torch": "2", "device": "cuda"}
    head = {"layout": "h8g4/d128", "window": 1024, "batch": 1}
    rows = [
        {**head, "case": "training/x", "length": length, "mode": "eager", "peer": peer, "ms": ms}
        for peer, ms in (("fdma", 1.0), ("dense", 2.0))
        for length in (1024, 2048)
    ]
    rows.append({**head, "case": "decoding/x", "context": 512, "peer": "fdma", "us": 9.0})
    rows.append({**head, "case": "training/x", "length": 4096, "mode": "eager", "peer": "dense"})
    path, out = tmp_path / "rows.json", tmp_path / "rows.svg"
    benchmarking.write_whole(path, [machine, *rows])
    assert main("picture", f"{path} --out {out}") == 0
    drawn = out.read_text()
    assert drawn.count('style="fill: none; stroke: #0072b2') >= 2  # fdma, in both panels
    assert "#cc79a7" in drawn and "#56b4e9" not in drawn  # dense, and no sliding window
    benchmarking.write_whole(path, [machine, rows[-1]])
    assert main("picture", f"{path} --out {out}") == 1
    assert "there is no time of batch 1 to draw" in capsys.readouterr().err


def test_a_run_that_is_ended_early(tmp_path: Path) -> None:
    """By SIGTERM, as timeout does: it writes the cases that are done."""
    command = [sys.executable, ROOT / "benchmarks" / "bench.py", "model_step", "--quick"]
    command += ["--device", "cpu", "--out", tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stderr is not None
        next(line for line in run.stdout if line.startswith(b"decoding/"))
        run.terminate()
        said = run.stderr.read()
        assert run.wait() == 130 and b"stopped" in said and b"Traceback" not in said
    machine, rows = read(tmp_path / "model-step-cpu.json")
    assert machine["device"] == "cpu" and {row["peer"] for row in rows} >= {"fdma", "dense"}


# ---- peers that do not run ----


class Option:
    def __init__(self, name: str) -> None:
        self.name = name


@pytest.mark.parametrize(
    ("errors", "made", "failed"),
    [
        ({"a": None}, "a", {}),
        ({"a": ValueError("no kernel\nmore")}, "b", {"a": "no kernel"}),
        ({"a": torch.cuda.OutOfMemoryError("of 9 GiB")}, None, {"a": "out of memory"}),
        ({"a": ValueError(), "b": KeyError("k")}, None, {"a": "ValueError", "b": "'k'"}),
    ],
)
def test_the_first_that_runs(
    errors: dict[str, Any], made: str | None, failed: dict[str, str]
) -> None:
    """Without memory the next option is not tried."""

    def make(option: Option) -> str:
        if error := errors.get(option.name):
            raise error
        return option.name

    found: dict[str, str] = {}
    options = [Option("a"), Option("b")]
    assert model_step_peers.first_that_runs(options, make, "cpu", found) == made
    assert found == failed


def test_options_by_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_call(option: Option) -> Any:
        if option.name == "none":
            raise RuntimeError("no kernel")
        return option.name

    ms = {"slow": 3.0, "fast": 1.0}
    monkeypatch.setattr(model_step_peers, "time_pass", lambda name, device: ms[name])
    failed: dict[str, str] = {}
    options = [Option("slow"), Option("none"), Option("fast")]
    found = model_step_peers.by_speed(options, make_call, "cpu", failed)
    assert [one.name for one in found] == ["fast", "slow"] and failed == {"none": "no kernel"}
    with pytest.raises(RuntimeError, match="none: no kernel"):
        model_step_peers.fastest([Option("none")], make_call, "cpu")


def test_rows_of_peers_that_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Dense has another back end, of which a row says why it does not run, or no row with a
    time."""

    def refuses(*_: Any) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    right = model_step.dense_ways("cpu")
    ways = [model_step_layers.Way("odd", refuses), *right]
    monkeypatch.setattr(model_step, "dense_ways", lambda device: ways)
    options = f"{FEW} --only training --lengths 48"
    status, (_, dense, _) = measured(tmp_path, options)
    assert status == 0 and dense["without"] == "odd: no such kernel" and dense["ms"] > 0
    del ways[1:]
    status, rows = measured(tmp_path, options)
    ours, dense, _ = rows
    assert status == 0 and dense["not_run"] == "odd: no such kernel" and "ms" not in dense
    assert ours["ms"] > 0 and "times_dense" not in ours
    assert "odd: no such kernel" in table.table(tmp_path / "model-step-cpu.json")


def test_rows_of_a_case_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*_: Any) -> list[torch.Tensor]:
        raise torch.cuda.OutOfMemoryError("of 9 GiB")

    monkeypatch.setattr(model_step, "probe_rows", fails)
    status, (row,) = measured(tmp_path, f"{FEW} --only training --lengths 48")
    assert status == 0 and row["case"] == TRAINING and row["not_run"] == "probe: out of memory"


# ---- mistakes ----


def shorter(right: Any, layout: Any, keys: int, **kind: Any) -> Any:
    return right(layout, keys - 1, **kind)


def not_causal(right: Any, *rows: Any, is_causal: bool = False, **given: Any) -> torch.Tensor:
    return right(*rows, is_causal=False, **given)


def steeper(right: Any, query: Any, key: Any, value: Any, **given: Any) -> torch.Tensor:
    """The same output with another gradient of the values."""
    return right(query, key, value + (value - value.detach()), **given)


def without_last(right: Any, query: Any, keys: Any, values: Any, **given: Any) -> torch.Tensor:
    return right(query, keys[:, :, :-1], values[:, :, :-1], **given)


def at_the_start(right: Any, decoder: Any, number: int, x: Any, start: int) -> None:
    right(decoder, number, x, 0)


MISTAKES: dict[str, tuple[Any, str, Any, str, str]] = {
    "a shorter sliding window": (
        model_step, "make_sliding", shorter, "training", "sliding (fdma): out and a plain",
    ),
    "dense attention that sees later keys": (
        model_step_layers, "scaled_dot_product_attention", not_causal, "training", ": out and a",
    ),
    "a gradient of dense attention": (
        model_step_layers, "scaled_dot_product_attention", steeper, "training", ": x and a",
    ),
    "a decoding step without its own token": (
        model_step_decode, "scaled_dot_product_attention", without_last, "decoding", ": dense (",
    ),
    "a prompt's second piece in the place of the first": (
        model_step_decode.Dense, "put", at_the_start, "decoding", ": dense (",
    ),
    "a cache of another window": (
        model_step_decode, "make_selecting", shorter, "decoding", "fdma (fdma)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(
    mistake: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    owner, name, change, part, words = MISTAKES[mistake]
    plant(monkeypatch, owner, name, change)
    status, rows = measured(tmp_path, f"{FEW} --only {part} --lengths 48 --contexts 40")
    error = capsys.readouterr().err
    assert status == 1 and rows == []
    assert error.startswith("model_step.py: ") and words in error and "differ by" in error


# ---- flash-attn, as on a device ----


def fake_flash_attn(extra: int) -> ModuleType:
    """A module whose sliding window has `extra` keys too many."""

    def flash_attn_func(
        query: Any, key: Any, value: Any, causal: bool, window_size: tuple[int, int] = (-1, -1)
    ) -> tuple[torch.Tensor, None]:
        assert causal
        left, right = window_size
        keys = None if left < 0 else left + 1 + extra
        assert right == (-1 if keys is None else 0)
        return model_step_checks.attend_plainly(query, key, value, keys), None

    module = ModuleType("flash_attn")
    vars(module)["flash_attn_func"] = flash_attn_func
    return module


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(model_step_layers, "is_installed", lambda version: version == "flash2")
    yield lambda module: monkeypatch.setitem(sys.modules, "flash_attn", module)


@pytest.mark.parametrize("extra", [0, 1])
def test_flash_attn(extra: int, installed: Any) -> None:
    """Its sliding window is a peer if its outputs are right. It may be the dense peer."""
    installed(fake_flash_attn(extra))
    assert "flash2" in [way.name for way in model_step_layers.dense_ways("cuda")]
    (rotary, *_) = model_step_layers.rotaries_of(TINY.layout)
    ways = model_step_layers.flash_attn_ways()
    for keys, peer, is_right in ((None, "dense", True), (32, "sliding-flash-attn", extra == 0)):
        (variant,), failed = model_step.ranked(TINY, ways, keys, rotary, "cpu")
        check = functools.partial(model_step.check_variant, TINY, peer, variant, "cpu")
        model_step_peers.tried(check, variant.name, failed)
        assert failed == ({} if is_right else {"flash2": "its outputs are wrong"})


# ---- models ----


def model_of(make: Any, rotary: Any = None, piece: int = 64) -> model_step_layers.Model:
    sizes = model_step.TINY._replace(piece=piece)
    model = model_step_layers.Model(sizes, TINY.layout, make, rotary)
    model_step_layers.initialise(model, seed=0)
    return model


def plain_model(piece: int = 64) -> model_step_layers.Model:
    (rotary, *_) = model_step_layers.rotaries_of(TINY.layout)
    (way, *_) = model_step_layers.dense_ways("cpu")
    make = functools.partial(model_step_layers.PlainAttention, TINY.layout, way, rotary)
    return model_of(make, rotary, piece)


def test_models_have_the_same_weights() -> None:
    ours = model_of(functools.partial(model_step_layers.make_selecting, TINY.layout, 16))
    plain = plain_model().state_dict()
    found = ours.state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in plain.items())
    others = {name.rpartition("attention.")[2] for name in set(found) - set(plain)}
    assert others == {"A", "dt_proj.weight"}


def test_the_loss_in_pieces() -> None:
    """Logits in pieces do not change the loss and its gradients."""
    tokens, targets = torch.randint(model_step.TINY.vocabulary, (2, 2, 48))
    whole, pieces = plain_model(96), plain_model(40)
    for model in (whole, pieces):
        model(tokens, targets).backward()
    with torch.no_grad():
        torch.testing.assert_close(pieces(tokens, targets), whole(tokens, targets))
    for one, other in zip(pieces.parameters(), whole.parameters()):
        torch.testing.assert_close(one.grad, other.grad)


def test_rotary_embeddings_are_equal() -> None:
    query = torch.randn(2, 30, 4, 16)
    positions = torch.arange(30)[None]
    first, *others = [
        rotary.rotate(query, rotary.angles(positions, query.dtype))
        for rotary in model_step_layers.rotaries_of(TINY.layout)
    ]
    assert others and not torch.allclose(first, query)
    for other in others:
        torch.testing.assert_close(other, first)


def test_training_lowers_the_loss() -> None:
    make = functools.partial(model_step_layers.make_selecting, TINY.layout)
    variant = model_step.Variant("fdma", lambda kept: make(kept // 2))
    trainer = model_step.Trainer(TINY, variant, "cpu")
    losses = [trainer.step().item() for _ in range(30)]
    assert losses[-1] < losses[0] - 0.01
