"""The probabilities of attention against evaluations in float64, and in every function that returns
them."""

from __future__ import annotations

import math
from typing import Any

import cases
import evaluate
import flash_dmattn
import pytest
import torch
from cases import CASES, DEVICES, attend, fused, make_fused, make_input, make_mask
from evaluate import assert_same
from flash_dmattn import _library

RUNS = cases.runs_of(cases.KERNELS, cases.DTYPES)
USED = torch.tensor([130, 61], dtype=torch.int32)
OPTIONS = [
    {},
    {"causal": False, "bias_form": "none", "recent": 0},
    {"softcap": 2.0, "kv_used": USED},
    {"scope": "global", "recent": 0, "bias_form": "linear"},
]
every_device = pytest.mark.parametrize("device", DEVICES)


def probabilities_of(name: str, given: cases.Input, lse: torch.Tensor, backend: str | None) -> Any:
    """The probabilities of a case, on the device of lse."""
    case, device = CASES[name], lse.device
    query, key, _, score, bias, key_valid, _ = (
        None if one is None else one.to(device) for one in given
    )
    options: dict[str, Any] = {"bias": bias, "key_valid": key_valid}
    if case.window is not None:
        options["selection"] = flash_dmattn.select(
            score, case.window, scope=case.scope, key_valid=key_valid, **case.rules
        )
    options.update(causal=case.causal, softcap=case.softcap, backend=backend)
    return flash_dmattn.attention_probabilities(query, key, lse, **options)


def evaluated(
    name: str, given: cases.Input, lse: torch.Tensor, dtype: torch.dtype, order: torch.Tensor
) -> torch.Tensor:
    """The formula in `dtype`, with products summed over the channels in the given order."""
    rows = (given.query[..., order], given.key[..., order], given.value)
    mask, options = make_mask(name), cases.options_of(name, given)
    heads = evaluate.make_logits(*rows, mask, dtype, options["bias"], None, options["softcap"])
    return torch.where(heads.mask, torch.exp(heads.logits - lse.to(dtype)[..., None]), 0)


@pytest.mark.parametrize(("device", "kernel", "dtype"), RUNS + cases.CUDA_RUNS)
@pytest.mark.parametrize("name", [*cases.NAMES, "row/empty-rows"])
def test_probabilities(name: str, device: str, kernel: str | None, dtype: torch.dtype) -> None:
    given = make_input(name, dtype)
    _, (_, lse) = attend(name, given, kernel, device)
    found = probabilities_of(name, given, lse, kernel)
    lse = lse.detach().cpu()
    assert found.dtype == lse.dtype and found.device.type == device and found.is_contiguous()
    orders = evaluate.orders_of(given.query.shape[3], lse.numel())
    exact = evaluated(name, given, lse, torch.float64, orders[0])
    plain = [evaluated(name, given, lse, evaluate.plain_dtype(lse.dtype), one) for one in orders]
    evaluate.assert_within(found.cpu(), exact, *plain)
    assert (found.cpu()[exact == 0] == 0).all()


@every_device
@pytest.mark.parametrize("options", OPTIONS)
def test_the_fused_form_returns_them(options: dict[str, Any], device: str) -> None:
    """P v equals out, and results with gradients keep them."""
    tensors = make_fused(130, device=device)
    options = {"causal": True, "recent": 5, **options}
    if "kv_used" in options:
        options["kv_used"] = options["kv_used"].to(device)
    expected = fused(*tensors, return_lse=True, **options)
    out, probability = fused(*tensors, return_attn_probs=True, **options)
    assert_same((out, probability), fused(*tensors, return_attn_probs=True, **options))
    assert_same(out, expected[0])
    assert out.requires_grad and not probability.requires_grad
    *both, again = fused(*tensors, return_attn_probs=True, return_lse=True, **options)
    assert_same((*both, again), (*expected, probability))
    group = tensors[0].shape[2] // tensors[2].shape[2]
    value = tensors[2].detach().float().transpose(1, 2).repeat_interleave(group, 1)
    row_sums = probability.sum(-1)
    attends = ~expected[1].isinf()
    torch.testing.assert_close(row_sums[attends], torch.ones_like(row_sums[attends]))
    assert (row_sums[~attends] == 0).all()
    step = max(torch.finfo(out.dtype).eps, 130 * torch.finfo(torch.float32).eps)
    error = ((probability @ value).transpose(1, 2) - out.float()).abs().max()
    assert error <= step * value.abs().max()
    loss, plain = out.float().cos().sum(), expected[0].float().cos().sum()
    needed = tensors[:3]
    assert_same(torch.autograd.grad(loss, needed), torch.autograd.grad(plain, needed))


def test_packed_sequences_have_blocks() -> None:
    """Each sequence has the same probabilities as by itself, and 0 for other sequences."""
    starts = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(20, heads, 16, generator=generator) for heads in (4, 2, 2))
    weights = {"dt_proj": torch.randn(2, 32, generator=generator), "a_coef": torch.ones(2)}
    for given in ({}, {**weights, "keep_window_size": 3}):
        options = {"causal": True, **given}
        packed = flash_dmattn.flash_dmattn_varlen_func(
            q, k, v, starts, starts, 13, 13, return_attn_probs=True, return_lse=True, **options
        )
        expected = torch.zeros(4, 20, 20)
        for span in (slice(0, 7), slice(7, 20)):
            length = torch.tensor([0, span.stop - span.start], dtype=torch.int32)
            rows = [one[span] for one in (q, k, v)]
            _, alone = flash_dmattn.flash_dmattn_varlen_func(
                *rows, length, length, 13, 13, return_attn_probs=True, **options
            )
            expected[:, span, span] = alone
        torch.testing.assert_close(packed[2], expected, rtol=1e-5, atol=1e-6)
        assert [one.shape for one in packed[:2]] == [(20, 4, 16), (4, 20)]


def test_every_name_of_a_kernel_of_forward_will_do() -> None:
    names = [
        one.name
        for one in _library.kernels()
        if one.operation == "forward" and one.missing is None and one.name.startswith("cpu/")
    ]
    query, key = torch.randn(1, 1, 2, 16).bfloat16(), torch.randn(1, 9, 1, 16).bfloat16()
    expected = None
    for name in names:
        _, lse = flash_dmattn.attention(query, key, key, backend=name)
        found = flash_dmattn.attention_probabilities(query, key, lse, backend=name)
        expected = found if expected is None else expected
        torch.testing.assert_close(found, expected)


def test_an_lse_of_more_keys() -> None:
    """A row sums to the share that its keys have in the whole."""
    query, key = torch.randn(1, 5, 2, 16), torch.randn(1, 12, 1, 16)
    halves = key.split(6, 1)
    lses = [flash_dmattn.attention(query, half, half)[1] for half in halves]
    lse = torch.logaddexp(*lses)
    for half, own in zip(halves, lses):
        row_sums = flash_dmattn.attention_probabilities(query, half, lse).sum(-1)
        torch.testing.assert_close(row_sums, torch.exp(own - lse))


def test_a_compiled_call() -> None:
    tensors = [tensor.detach() for tensor in make_fused(20)]

    def call(*tensors: torch.Tensor) -> Any:
        return fused(*tensors, return_attn_probs=True, return_lse=True)

    assert_same(torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors), call(*tensors))


def test_autocast() -> None:
    query, key = torch.randn(1, 5, 2, 16), torch.randn(1, 5, 2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        _, lse = flash_dmattn.attention(query, key, key)
        found = flash_dmattn.attention_probabilities(query, key, lse)
    rows = query.bfloat16(), key.bfloat16()
    assert_same(found, flash_dmattn.attention_probabilities(*rows, lse))
    assert found.dtype == torch.float32 and math.isclose(
        found[0, 0, 0].sum().item(), 1, abs_tol=1e-5
    )
