"""The benchmarks that compare with the definition: their evaluation, their exit status, and wrong
results that they find, on the CPU."""

from __future__ import annotations

from typing import Any

import backward_equivalence
import backward_performance
import definition
import definition_times
import evaluate
import flash_dmattn
import forward_equivalence
import forward_performance
import grad_equivalence
import pytest
import torch
from cases import with_sdpa
from definition import Attention, Case, Inputs
from programs import assert_refused, help_of

EQUIVALENCE = (forward_equivalence, backward_equivalence, grad_equivalence)
PERFORMANCE = (forward_performance, backward_performance)
SMALL = Case(1, 4, 2, 16, 24, 5)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "CASES", (SMALL, Case(2, 2, 2, 8, 30, 40)))


def test_masks() -> None:
    inputs = Inputs(SMALL, "cpu", torch.float32)
    score, _ = flash_dmattn.score(inputs.value, *inputs.weights)
    visible = torch.ones(24, 24, dtype=torch.bool).tril()
    want = evaluate.kept_keys(score, SMALL.window, "causal") & visible
    assert torch.equal(inputs.mask, want)


def test_gradients_of_the_evaluation() -> None:
    """Those of its formulas are those of finite differences."""
    random = torch.Generator().manual_seed(1)
    rows = [torch.randn(1, 2, 6, 8, generator=random).double().requires_grad_() for _ in "qkv"]
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    for shape in ((1, 2, 6, 6), (1, 2, 1, 6)):
        bias = torch.randn(shape, generator=random).double().requires_grad_()
        assert torch.autograd.gradcheck(lambda *x: Attention.apply(*x, mask), (*rows, bias))


@pytest.mark.parametrize("program", EQUIVALENCE, ids=lambda x: x.__name__)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equivalence(
    program: Any, dtype: str, small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["--device", "cpu", "--dtype", dtype]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) >= 2 * len(definition.CASES)
    assert {line.split()[0] for line in lines} == {case.name() for case in definition.CASES}


@pytest.mark.parametrize("program", EQUIVALENCE, ids=lambda x: x.__name__)
def test_wrong_results_are_found(
    program: Any, small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scale that is a thousandth too large."""
    for name in ("flash_dmattn_func", "flash_dma_attention"):
        function = getattr(flash_dmattn, name)

        def wrong(q: torch.Tensor, *rest: Any, function: Any = function, **options: Any) -> Any:
            return function(q, *rest, softmax_scale=1.001 * q.shape[3] ** -0.5, **options)

        monkeypatch.setattr(flash_dmattn, name, wrong)
    assert program.main(["--device", "cpu"]) == 1
    printed = capsys.readouterr()
    assert "WRONG" in printed.out and "differ from their definition" in printed.err


@with_sdpa
@pytest.mark.parametrize("program", PERFORMANCE, ids=lambda x: x.__name__)
def test_performance(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--device cpu --quick --lengths 40 64 --window 16".split()
    assert program.main(options) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 * 4
    assert all(float(row.split()[-3]) > 0 for row in rows)
    assert float(rows[0].split()[-1]) == 1


@with_sdpa
def test_wrong_outputs_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    function = flash_dmattn.flash_dmattn_func

    def unmasked(*rows: torch.Tensor, **options: Any) -> torch.Tensor:
        return function(*rows[:3], **options)

    monkeypatch.setattr(flash_dmattn, "flash_dmattn_func", unmasked)
    options = "--device cpu --quick --lengths 64 --window 16".split()
    assert forward_performance.main(options) == 1
    assert "b1/h8g2/d64/n64/w16: outputs differ by " in capsys.readouterr().err


@with_sdpa
def test_training_computes_gradients() -> None:
    inputs = Inputs(SMALL, "cpu", torch.float32)
    peers = definition_times.peers_of(inputs, training=True)
    assert len(peers) == 4
    for run in peers.values():
        out = run()
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()


@pytest.mark.parametrize("program", [*EQUIVALENCE, *PERFORMANCE], ids=lambda x: x.__name__)
def test_usage(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--device" in help_of(program.main, capsys)
    assert_refused(program.main, "--device tpu", "--device", capsys)
