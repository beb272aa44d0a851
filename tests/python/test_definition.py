"""The definition that benchmarks use as a reference, against the tests' own evaluation, autograd
and PyTorch."""

from __future__ import annotations

from typing import Any

import definition
import evaluate
import pytest
import torch
from definition import Named
from definition_cases import CASES, Case, Inputs, square
from equivalence import Stages

SMALL = square(1, 4, 2, 16, 24, 5)
RULES = [
    {},
    {"window": 1},
    {"window": 100},
    {"recent": 6},
    {"recent": 5, "sinks": 3},
    {"gap": 0.75, "window": 12},
    {"gap": 0.5, "recent": 4, "sinks": 2},
    {"scope": "global"},
    {"scope": "global", "causal": False, "sinks": 2},
    {"window": None},
]


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("padding", ["", "left", "holes", "all"])
def test_kept_keys(rules: dict[str, Any], padding: str) -> None:
    """Compare with a loop in which every query sorts its keys, with ties."""
    case = Case(batch=2, q_len=23, kv_len=31, padding=padding, **{"window": 5, **rules})
    key_valid = Inputs(case, "cpu", torch.float32).key_valid
    random = torch.Generator().manual_seed(1)
    score = torch.randint(6, (2, 2, 31), generator=random) / 4
    want = None
    if case.window is not None:
        options = {name: getattr(case, name) for name in ("recent", "sinks", "gap")}
        want = evaluate.kept_keys(score, case.window, case.scope, key_valid, **options)
    want = evaluate.visible_keys(23, 31, case.causal, want, key_valid)
    assert torch.equal(definition.kept_keys(case, score, key_valid), want.expand(2, 2, 23, 31))


@pytest.mark.parametrize("rules", RULES)
def test_kept_keys_of_packed_sequences(rules: dict[str, Any]) -> None:
    """Each sequence keeps the same keys as by itself, and positions after the last keep none."""
    starts = (0, 9, 9, 20, 27)
    whole = Case(q_len=31, kv_len=31, starts=starts, **{"window": 5, **rules})
    score = torch.randn(1, 2, 31, generator=torch.Generator().manual_seed(1))
    found = definition.kept_keys(whole, score, None)
    want = torch.zeros_like(found)
    for begin, end in ((0, 9), (9, 20), (20, 27)):
        alone = whole._replace(q_len=end - begin, kv_len=end - begin, starts=())
        want[..., begin:end, begin:end] = definition.kept_keys(alone, score[..., begin:end], None)
    assert torch.equal(found, want) and want.any()


def test_conflicts_of_slots() -> None:
    case = Case(batch=1, kv_heads=1, q_len=1, kv_len=4, window=3, recent=0)
    kept = torch.tensor([True, True, True, False]).view(1, 1, 1, 4)
    for slots, want in (([0, 1, 2, 2], 0), ([0, 1, 1, 2], 1), ([3, 1, -1, 0], 2), ([1] * 4, 2)):
        assert definition.slot_conflicts(case, torch.tensor([[slots]]), kept) == want


def leaves_of(tensors: Named, *names: str) -> Named:
    return {name: tensors[name].detach().requires_grad_() for name in names if name in tensors}


@pytest.mark.parametrize("what", ["softcap", "attn-bias/kv-heads", "attn-bias/keys", "mask/global"])
def test_gradients_of_attention(what: str) -> None:
    """Compare the formulas with autograd in float64."""
    case = next(x for x in CASES if x.what == what)._replace(head_dim=8, softcap=1.5)
    inputs = Inputs(case, "cpu", torch.float32)
    given = definition.cast(Stages(inputs).given, torch.float64)
    leaves = leaves_of(given, "query", "key", "value", "bias", "sink_logit", "attn_bias")
    results = definition.attention(case, {**given, **leaves})
    douts = definition.cast({"out": inputs.dout, "lse": inputs.dlse}, torch.float64)
    want = torch.autograd.grad(list(results.values()), list(leaves.values()), list(douts.values()))
    more = {"dout": douts["out"], "dlse": douts["lse"], **results}
    found = definition.attention_gradients(case, {**given, **more})
    assert set(found) == {f"d{name}" for name in leaves}
    for name, one in zip(leaves, want):
        torch.testing.assert_close(found[f"d{name}"], one)


@pytest.mark.parametrize("form", ["exp", "linear"])
def test_gradients_of_scores(form: str) -> None:
    case = Case(batch=2, head_dim=8, bias_form=form, has_dt_bias=True, padding="holes")
    stages = Stages(Inputs(case, "cpu", torch.float32))
    given = definition.cast({**stages.learned, **stages.valid}, torch.float64)
    leaves = leaves_of(given, "value", "dt_proj", "a_coef", "dt_bias")
    score = definition.score(case, {**given, **leaves})
    bias = definition.bias(case, score)["bias"]
    dbias = stages.inputs.dbias.double()
    valid = stages.inputs.key_valid[:, None].expand_as(bias)
    want = torch.autograd.grad(bias[valid], list(leaves.values()), dbias[valid])
    found = definition.score_gradients(case, {**given, "dbias": dbias})
    for name, one in zip(leaves, want):
        torch.testing.assert_close(found[f"d{name}"], one)


def test_attention_is_that_of_pytorch() -> None:
    stages = Stages(Inputs(SMALL._replace(bias_form="none"), "cpu", torch.float32))
    given = definition.cast(stages.given, torch.float64)
    rows = [given[name].transpose(1, 2) for name in ("query", "key", "value")]
    want = evaluate.grouped_sdpa(*rows, attn_mask=given["mask"]).transpose(1, 2)
    torch.testing.assert_close(definition.attention(stages.case, given)["out"], want)


def test_orders_change_nothing_but_rounding() -> None:
    """In float64 all plain evaluations agree in every order."""
    case = next(x for x in CASES if x.what == "attn-bias/keys")._replace(head_dim=8)
    inputs = Inputs(case, "cpu", torch.float32)
    stages = Stages(inputs)
    given = {**stages.given, **stages.learned}
    results = definition.attention(case, definition.cast(given, torch.float64))
    given.update(results, dout=inputs.dout, dlse=inputs.dlse)
    for function in (definition.score, definition.attention, definition.fused_gradients):
        plain, exact = definition.evaluate(case, function, given, torch.float64)
        assert len(plain) >= definition.PLAIN
        one_by_one = function(
            case, definition.cast(given, torch.float64), definition.sum_one_by_one
        )
        for one in (*plain, one_by_one):
            for name, tensor in exact.items():
                torch.testing.assert_close(one[name], tensor)


def test_errors() -> None:
    exact = torch.tensor([1.0, -torch.inf, 2.0]).double()
    assert definition.error_of(torch.tensor([1.5, -torch.inf, 2.0]), exact) == 0.5
    for wrong in (torch.tensor([1.0, torch.inf, 2.0]), torch.tensor([1.0, -torch.inf])):
        assert definition.error_of(wrong, exact) == torch.inf
    nan = definition.error_of(torch.tensor([1.0, -torch.inf, torch.nan]), exact)
    one = definition.Comparison("out", nan, 1.0, 1.0, 1.0)
    assert not one.fits and one.ratio == torch.inf
    assert definition.Comparison("out", 1.0, 0.5, 2.0, 0.5).ratio == 0.5
    overflow = definition.Comparison("out", 1.0, torch.inf)  # in a plain evaluation
    assert not overflow.fits and overflow.ratio == torch.inf
    assert not definition.Comparison("kept keys", 1.0).fits
    assert definition.Comparison("kept keys", 0.0).ratio == 0
