"""The programs that compare every stage with its definition: the planted faults that they find, by
stage; their output and files; their exit status, on the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Callable

import equivalence
import flash_dmattn
import pytest
import torch
from benches import main, plant, read, refuse
from definition_cases import CASES, Case

FORWARD, BACKWARD, GRAD = "forward_equivalence", "backward_equivalence", "grad_equivalence"
CPU = "--device cpu"
FLOAT32 = f"{CPU} --dtype float32"
# Together they cover every gradient and every stage.
SMALL = (
    Case("small", q_len=20, kv_len=30, window=6, has_dt_bias=True, head_dim=16),
    Case("small/sink", q_len=20, kv_len=30, window=6, has_sink_logit=True, head_dim=16),
    Case("small/pairs", attn_bias="bhij", q_len=20, kv_len=30, window=6, head_dim=16),
    Case("small/empty-rows", kv_heads=1, q_len=20, kv_len=12, window=None, head_dim=16),
)
# One short case of each kind.
KINDS = {case.what.split("/")[0]: case for case in reversed(CASES) if case.kv_len <= 150}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equivalence, "CASES", SMALL)


RUNS = [(FORWARD, "float32"), (BACKWARD, "bfloat16"), (GRAD, "float32")]
if os.environ.get("FDMA_FULL") == "1":
    RUNS += [(FORWARD, "bfloat16"), (BACKWARD, "float32"), (GRAD, "bfloat16")]


@pytest.mark.parametrize(("program", "dtype"), RUNS)
def test_equivalence(
    program: str, dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = tuple(KINDS.values())
    monkeypatch.setattr(equivalence, "CASES", cases)
    assert len(cases) >= 18
    assert main(program, f"{CPU} --dtype {dtype}") == 0
    printed = capsys.readouterr()
    header, *summary, end = printed.out.splitlines()
    assert header.split()[:3] == ["tensor", "dtype", "compared"] and len(summary) >= 9
    assert end.endswith(" comparisons, 0 wrong") and int(end.split()[0]) >= 3 * len(cases)
    assert printed.err == ""  # not a terminal: no progress bar


# ---- planted faults ----


class WrongGradient(torch.autograd.Function):
    """The same numbers, with other gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, change: Callable[..., Any]) -> torch.Tensor:
        ctx.change = change
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.change(gradient), None


def wrong_expiry(expiry: torch.Tensor, slot: torch.Tensor, *rules: Any) -> Any:
    changed = expiry.clone()
    changed[0, 0, -2] = 30 - 2 if changed[0, 0, -2] > 28 else 30  # one key, for the last query
    return flash_dmattn.Selection(changed, slot, *rules)


def wrong_slot(expiry: torch.Tensor, slot: torch.Tensor, *rules: Any) -> Any:
    changed = slot.clone()
    kept = (expiry[0, 0] == 30).nonzero()[:, 0]
    changed[0, 0, kept[0]] = changed[0, 0, kept[1]]
    return flash_dmattn.Selection(expiry, changed, *rules)


def wrong_first(first: torch.Tensor, *rest: torch.Tensor) -> Any:
    return (first * 1.0001, *rest) if rest else first * 1.0001


def leaking(first: torch.Tensor, *rest: torch.Tensor) -> Any:
    return (first + 1e-12, *rest) if rest else first + 1e-12


def missing(out: torch.Tensor, *rest: torch.Tensor) -> Any:
    return out.masked_fill(out == out.amax(), torch.nan), *rest


def wrong_lse(out: torch.Tensor, lse: torch.Tensor) -> Any:
    return out, lse + 1e-4


FORWARD_FAULTS = [
    ("score", lambda score, _: (score * 1.0001, (score * 1.0001).exp()), "score"),
    ("score", lambda score, bias: (score, bias * 1.0001), "bias"),
    ("select", wrong_expiry, "kept keys"),
    ("select", wrong_slot, "slots"),
    ("attention", wrong_first, "out"),
    ("attention", missing, "out"),
    ("attention", wrong_lse, "lse"),
    ("attention_probabilities", wrong_first, "probability"),
    ("attention_probabilities", leaking, "zeros of probability"),
    ("attention", leaking, "zeros of out"),
    ("flash_dma_attention", wrong_first, "flash_dma_attention: out"),
    ("flash_dma_attention", wrong_lse, "flash_dma_attention: lse"),
    ("flash_dmattn_func", wrong_first, "flash_dmattn_func: out"),
]


def first_wrong(program: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The first tensor that a program finds to be wrong, which it has to print."""
    assert main(program, f"{FLOAT32} --json {path}") == 1
    head, rows = read(path)
    found = [row["tensor"] for row in rows if row["wrong"]]
    printed, _, summary = capsys.readouterr().out.partition("of allowed")
    lines = [line for line in printed.splitlines() if line.endswith("WRONG")]
    assert sum(int(line.split()[-2]) for line in summary.splitlines()[1:-1]) == len(found)
    assert len(lines) == len(found) == head["wrong"] > 0
    assert f" {found[0]} " in lines[0]
    return found[0]


@pytest.mark.parametrize(
    ("name", "change", "tensor"),
    FORWARD_FAULTS,
    ids=[f"{fault[2]}-{fault[1].__name__}" for fault in FORWARD_FAULTS],
)
def test_wrong_results_are_found(
    name: str,
    change: Callable[..., Any],
    tensor: str,
    small: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first wrong tensor belongs to the stage with the fault."""

    def wrong(right: Any, *tensors: Any, **options: Any) -> Any:
        results = right(*tensors, **options)
        return change(*results) if isinstance(results, tuple) else change(results)

    plant(monkeypatch, flash_dmattn, name, wrong)
    assert first_wrong(FORWARD, tmp_path / "found.json", capsys) == tensor


ROWS = ("query", "key", "value")


def change_leaf(monkeypatch: pytest.MonkeyPatch, name: str, leaf: str, change: Any) -> None:
    """Pass an argument of one of the package's functions through `change`."""

    def wrong(right: Any, *rows: torch.Tensor, **options: Any) -> Any:
        options.update(zip(("query", "key", "value", "attn_mask", "attn_bias"), rows))
        if options.get(leaf) is not None:
            options[leaf] = WrongGradient.apply(options[leaf], change)
        return right(*[options.pop(x) for x in ROWS if rows], **options)

    plant(monkeypatch, flash_dmattn, name, wrong)


GRADIENT_FAULTS = [
    *((BACKWARD, "attention", x, "") for x in (*ROWS, "bias", "sink_logit")),
    (BACKWARD, "attention", "attn_bias", ""),
    *((BACKWARD, "flash_dmattn_func", x, "flash_dmattn_func: ") for x in (*ROWS, "attn_bias")),
    *((GRAD, "score", x, "score: ") for x in ("value", "dt_proj", "a_coef", "dt_bias")),
    *(
        (GRAD, "flash_dma_attention", x, "flash_dma_attention: ")
        for x in (*ROWS, "dt_proj", "a_coef", "dt_bias", "sink_logit")
    ),
]


@pytest.mark.parametrize(
    ("program", "name", "leaf", "label"),
    GRADIENT_FAULTS,
    ids=[f"{f[3]}d{f[2]}" for f in GRADIENT_FAULTS],
)
def test_wrong_gradients_are_found(
    program: str,
    name: str,
    leaf: str,
    label: str,
    small: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change_leaf(monkeypatch, name, leaf, lambda gradient: 1.001 * gradient)
    found = first_wrong(program, tmp_path / "found.json", capsys)
    assert found == f"{label}d{leaf}"


LEAKS = [
    (BACKWARD, "attention", "value", "zeros of dvalue"),
    (BACKWARD, "attention", "key", "zeros of dkey"),
    (BACKWARD, "flash_dmattn_func", "key", "zeros of flash_dmattn_func: dkey"),
    (GRAD, "flash_dma_attention", "key", "zeros of flash_dma_attention: dkey"),
]


@pytest.mark.parametrize(
    ("program", "name", "leaf", "tensor"), LEAKS, ids=[leak[3] for leak in LEAKS]
)
def test_gradients_of_keys_that_are_not_kept_are_found(
    program: str,
    name: str,
    leaf: str,
    tensor: str,
    small: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change_leaf(monkeypatch, name, leaf, lambda gradient: gradient + 1e-12)
    assert first_wrong(program, tmp_path / "found.json", capsys) == tensor


# ---- options ----


def test_json(small: None, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert main(FORWARD, f"{FLOAT32} --json {path}") == 0
    head, rows = read(path)
    assert head["program"] == "forward_equivalence.py" and head["device"] == "cpu"
    assert {"machine", "cores", "commit", "torch", "date", "seconds"} <= set(head)
    assert head["comparisons"] == len(rows) and head["wrong"] == head["skipped"] == 0
    assert {row["case"] for row in rows} == {case.name for case in SMALL}
    for row in rows:
        assert row["dtype"] == "float32" and row["wrong"] is False
        assert 0 <= row["error"] <= row["allowed"]
        assert row["allowed"] >= 2 * row["plain"]
    assert any(row["error"] > 0 for row in rows)


def test_names_of_cases() -> None:
    """A name belongs to one case, and fits in its column."""
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) and max(map(len, names)) <= 60


def test_lines_of_cases(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    """--verbose has a line for each comparison, --cases selects cases."""
    assert main(BACKWARD, f"{FLOAT32} --verbose --cases small/pairs") == 0
    header, *lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert header.split() == ["case", "dtype", "tensor", "error", "plain", "allowed"]
    assert {line.split()[0] for line in lines} == {SMALL[2].name}
    assert {line.split()[2] for line in lines} >= {"dquery", "dkey", "dvalue", "dattn_bias"}


def test_all_dtypes(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(GRAD, CPU) == 0
    summary = capsys.readouterr().out.splitlines()[1:-1]
    assert {line.rsplit(None, 7)[1] for line in summary} == {"float32", "bfloat16", "float16"}


def test_quick(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(equivalence, "CASES", (SMALL[0], Case("long", q_len=1, kv_len=200)))
    assert main(FORWARD, f"{FLOAT32} --verbose --quick") == 0
    printed = capsys.readouterr().out
    assert "small/" in printed and "long/" not in printed


def test_nothing_compared(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(FORWARD, f"{FLOAT32} --cases of-no-case") == 1
    assert "nothing was compared" in capsys.readouterr().err


def test_cases_without_kernels(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*tensors: Any, **options: Any) -> None:
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(flash_dmattn, "score", refuse)
    assert main(FORWARD, FLOAT32) == 1
    printed = capsys.readouterr()
    assert printed.out.count(": no kernel") == len(SMALL) and "nothing was compared" in printed.err


@pytest.mark.parametrize("program", [FORWARD, BACKWARD, GRAD])
def test_a_dtype_without_kernels(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(equivalence, "has_kernels", lambda device, dtype: False)
    refuse(program, "--device cpu --dtype float16", "no kernels for float16", capsys)
