"""dt_bias of the score: results and gradients against evaluations in PyTorch alone."""

from __future__ import annotations

from typing import Any

import cases
import evaluate
import flash_dmattn
import pytest
import torch
from cases import DEVICES, fused, gradients, make_fused
from evaluate import assert_same

KERNELS = cases.kernels_of("score")


def make_tensors(*sizes: int, **options: Any) -> list[torch.Tensor]:
    """make_fused(), and a dt_bias large enough to change the ranking."""
    tensors = make_fused(*sizes, **options)
    dt_bias = torch.tensor([1.5, -2.25]).to(tensors[4])
    return [*tensors, dt_bias.requires_grad_()]


def fused_with(*tensors: torch.Tensor, **options: Any) -> Any:
    return fused(*tensors[:5], dt_bias=tensors[5], **options)


def stepwise_with(*tensors: torch.Tensor, bias_form: str = "exp") -> cases.Tensors:
    """Results of the three calls, among them the score, which has a gradient of its own."""
    score, bias = flash_dmattn.score(*tensors[2:5], dt_bias=tensors[5], bias_form=bias_form)
    selection = flash_dmattn.select(score, cases.WINDOW)
    out, lse = flash_dmattn.attention(*tensors[:3], bias=bias, selection=selection, causal=True)
    return out, lse, score


@pytest.mark.parametrize(
    ("device", "kernel", "dtype"), cases.runs_of(KERNELS, cases.DTYPES[:3]) + cases.CUDA_RUNS
)
def test_score_against_float64(device: str, kernel: str | None, dtype: torch.dtype) -> None:
    """The score is float32, and dt_bias may be float32, whatever value's dtype is."""
    tensors = [x.detach() for x in make_tensors(131, dtype=dtype, device=device)[2:]]
    value, dt_proj, a_coef, dt_bias = (x.cpu() for x in tensors)
    exact = evaluate.score(value, dt_proj, a_coef, torch.float64, dt_bias)
    plain = []
    for order in evaluate.orders_of(value.shape[3], exact.numel()):
        weights = dt_proj.unflatten(1, (-1, value.shape[3]))[..., order].flatten(1)
        shuffled = value[..., order]
        plain.append(evaluate.score(shuffled, weights, a_coef, torch.float32, dt_bias))
    for given in (tensors[3], tensors[3].to(dtype)):  # both hold these numbers exactly
        score, bias = flash_dmattn.score(*tensors[:3], dt_bias=given, backend=kernel)
        evaluate.assert_within(score.cpu(), exact, *plain)
        torch.testing.assert_close(bias, score.exp())


@pytest.mark.parametrize("form", ["exp", "linear", "none"])
@pytest.mark.parametrize("function", [fused_with, stepwise_with])
def test_gradcheck(function: Any, form: str) -> None:
    """Compare with finite differences in float64, which only the reference supports."""
    tensors = make_tensors(60, dtype=torch.float64, head_dim=16)
    if form == "none" and function is fused_with:
        tensors[3:] = [tensor.detach() for tensor in tensors[3:]]

    def run(*given: torch.Tensor) -> Any:
        return function(*given, bias_form=form)

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("causal", [False, True])
def test_fused_gradients_against_float64(causal: bool, backend: str) -> None:
    tensors = make_tensors(70, head_dim=16)
    with torch.no_grad():
        score, _ = flash_dmattn.score(*tensors[2:5], dt_bias=tensors[5])
    kept = evaluate.kept_keys(score, 9, "causal" if causal else "global")
    mask = evaluate.visible_keys(70, 70, causal, kept)
    dout = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(3))
    out = fused_with(*tensors, keep_window_size=9, causal=causal, backend=backend)
    found = torch.autograd.grad(out, tensors, dout)
    exact = evaluate.fused_gradients(tensors, mask, dout, torch.float64)
    plain = evaluate.plain_fused_gradients(tensors, mask, dout)
    evaluate.assert_all_within(found, exact, plain)


@pytest.mark.parametrize("device", DEVICES)
def test_one_call_is_its_three_steps(device: str, deterministic: None) -> None:
    tensors = make_tensors(300, device=device)
    out, lse = fused_with(*tensors, return_lse=True)
    assert_same((out, lse), stepwise_with(*tensors)[:2])
    found = gradients(fused_with, tensors)
    expected = gradients(lambda *given: stepwise_with(*given)[0], tensors)
    assert_same(found[3:], expected[3:])


@pytest.mark.parametrize("device", DEVICES)
def test_none_is_zero(device: str, deterministic: None) -> None:
    """Every bit of the results and of the other gradients is the same."""
    *tensors, dt_bias = make_tensors(300, device=device)
    zeros = torch.zeros_like(dt_bias)

    def with_zeros(*given: torch.Tensor) -> Any:
        return fused(*given, dt_bias=zeros)

    assert torch.equal(with_zeros(*tensors), fused(*tensors))
    assert not torch.equal(fused(*tensors, dt_bias=dt_bias), fused(*tensors))
    assert_same(gradients(with_zeros, tensors), gradients(fused, tensors))


def test_packed_sequences() -> None:
    query, key, value, *weights = make_tensors(60, head_dim=16)
    starts = torch.tensor([0, 25, 60], dtype=torch.int32)
    rows = [x[:1].detach() for x in (query, key, value)]
    named = dict(zip(("dt_proj", "a_coef", "dt_bias"), weights))
    out = flash_dmattn.flash_dmattn_varlen_func(
        *(x[0] for x in rows), starts, starts, 35, 35, causal=True, keep_window_size=9, **named
    )
    expected = fused_with(*rows, *weights, keep_window_size=9, starts=starts)
    assert torch.equal(out, expected[0])
    first = fused_with(*(x[:, :25] for x in rows), *weights, keep_window_size=9)
    torch.testing.assert_close(out[:25], first[0], atol=2e-6, rtol=1e-5)
    (gradient,) = torch.autograd.grad(out.cos().sum(), weights[2])
    assert (gradient != 0).all()


def test_autocast() -> None:
    """A narrow dt_bias is cast, like dt_proj; a float32 one is not."""
    tensors = make_tensors(60, head_dim=16)
    with torch.autocast("cpu", torch.bfloat16):
        kept = fused_with(*tensors)
        cast = fused_with(*tensors[:5], tensors[5].half())
    assert kept.dtype == torch.bfloat16 and torch.equal(kept, cast)
