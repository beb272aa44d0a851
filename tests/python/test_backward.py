"""Gradients of attention and merging: against evaluations in float64, by gradcheck, and by their
properties. On a CUDA device too, if there is one. test_fused.py tests flash_dma_attention()."""

from __future__ import annotations

import functools
import itertools
from typing import Any, Callable

import cases
import evaluate
import flash_dmattn
import pytest
import torch
from cases import DEVICES, FEATURES, attend, fused, gradients, make_fused, make_input, make_mask
from evaluate import assert_same
from flash_dmattn import ops
from programs import Seen

KERNELS = cases.kernels_of("backward")
WIDE = [kernel for kernel in KERNELS if kernel in cases.WIDE]
# Backward treats a single query as any other.
CASES_OF_BACKWARD = [name for name in cases.NAMES if cases.CASES[name].q_len > 1]
CASES_OF_BACKWARD += FEATURES


@functools.lru_cache(maxsize=None)
def exact_gradients(name: str, dtype: torch.dtype) -> cases.Tensors:
    """Gradients by autograd through the evaluation in float64."""
    given = make_input(name, dtype)
    leaves = {one: x.double().clone().requires_grad_() for one, x in given.leaves.items()}
    options = {**cases.options_of(name, given), **leaves}
    rows = [options.pop(one) for one in ("query", "key", "value")]
    out, _ = evaluate.attention(*rows, make_mask(name), torch.float64, **options)
    return torch.autograd.grad(out, tuple(leaves.values()), given.dout.double())


def plain_gradients(
    name: str, given: cases.Input, results: cases.Tensors, dlse: torch.Tensor | None = None
) -> list[cases.Tensors]:
    options = cases.options_of(name, given)
    return evaluate.plain_gradients(
        given.dout, dlse, results, given[:3], make_mask(name), **options
    )


def assert_gradients(
    name: str, device: str, kernel: str | None, dtype: torch.dtype, **options: Any
) -> None:
    given = make_input(name, dtype)
    leaves, results = attend(name, given, kernel, device, **options)
    found = torch.autograd.grad(results[0], tuple(leaves.values()), given.dout.to(device))
    assert all(one.device == results[0].device for one in found)
    assert [one.dtype for one in found[:3]] == [dtype] * 3
    plain = plain_gradients(name, given, results)
    evaluate.assert_all_within(found, exact_gradients(name, dtype), plain)


@pytest.mark.parametrize(
    ("name", "device", "kernel", "dtype"),
    cases.chosen_runs(CASES_OF_BACKWARD, cases.runs_of(KERNELS, cases.DTYPES)),
)
def test_against_float64(name: str, device: str, kernel: str | None, dtype: torch.dtype) -> None:
    for deterministic in (False, True) if device == "cuda" else (False,):
        assert_gradients(name, device, kernel, dtype, deterministic=deterministic)


def formula(name: str, given: cases.Input, dlse: torch.Tensor | None = None) -> cases.Tensors:
    options = cases.options_of(name, given)
    results = evaluate.attention(*given[:3], make_mask(name), torch.float64, **options)
    return evaluate.attention_backward(
        given.dout, dlse, results, *given[:3], make_mask(name), torch.float64, **options
    )


@pytest.mark.parametrize("name", CASES_OF_BACKWARD)
def test_the_formula_of_the_header(name: str) -> None:
    """In float64 the formula, which plain evaluations use, equals autograd."""
    found = formula(name, make_input(name, torch.float32))
    torch.testing.assert_close(found, exact_gradients(name, torch.float32))


NAMES_OF_LSE = ["group/2", "later/steps", "dense/empty-rows", "window/1", "scores/tied"]
NAMES_OF_LSE += ["feature/sink-padding", "feature/dropout-selected"]
NAMES_OF_LSE += ["feature/used-selected", "feature/packed-selected", "feature/bias-selected"]


@pytest.mark.parametrize(("name", "device", "kernel"), cases.chosen_targets(NAMES_OF_LSE, WIDE))
def test_the_gradient_of_lse(name: str, device: str, kernel: str | None) -> None:
    """The gradient of lse, alone and together with the gradient of out."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    given, case = make_input(name, dtype), cases.CASES[name]
    shape = (case.batch, case.q_heads, case.q_len)
    dlse = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    leaves, results = attend(name, given, kernel, device)
    tensors = tuple(leaves.values())
    targets = (given.dout.to(device), dlse.to(device))
    both = torch.autograd.grad(results, tensors, targets, retain_graph=True)
    alone = torch.autograd.grad(
        results[1], tensors, targets[1], allow_unused=True, materialize_grads=True
    )
    without = given._replace(dout=torch.zeros_like(given.dout))
    for found, one in ((both, given), (alone, without)):
        plain = plain_gradients(name, one, results, dlse)
        evaluate.assert_all_within(found, formula(name, one, dlse), plain)


@pytest.mark.parametrize("function", cases.FUNCTIONS)
def test_gradcheck(function: Callable[..., Any]) -> None:
    """Compare with finite differences in float64, which only the reference supports."""
    tensors = make_fused(60, dtype=torch.float64, head_dim=16)
    assert torch.autograd.gradcheck(function, tensors, fast_mode=True)


@pytest.mark.parametrize("form", ["exp", "linear", "none"])
def test_bias_forms_of_score(form: str) -> None:
    """The score has a gradient of its own, beside the gradient of the bias."""
    _, _, *weights = make_fused(30, dtype=torch.float64, head_dim=16)
    weights.append(torch.tensor([1.5, -2.25], dtype=torch.float64, requires_grad=True))

    def run(*given: torch.Tensor) -> cases.Tensors:
        found = flash_dmattn.score(*given[:3], dt_bias=given[3], bias_form=form)
        return tuple(x for x in found if x is not None)

    assert torch.autograd.gradcheck(run, weights, fast_mode=True)


# ---- properties ----


@pytest.mark.parametrize("device", DEVICES)
def test_nan_in_values_that_the_fused_form_drops(device: str) -> None:
    """A key with a NaN score ranks below all others, so that it is dropped once the window is full.
    Its value does not reach the gradients of dt_proj and a_coef either. A key that is not valid is
    not read at all."""
    tensors = make_fused(300, device=device)
    key_valid = (torch.arange(300, device=device) != 250).expand(2, -1)
    dropped = [130, 241, 250]
    with torch.no_grad():
        tensors[1][:, dropped] = torch.nan
        tensors[2][:, dropped] = torch.nan
    found = gradients(lambda *given: fused(*given, key_valid=key_valid), tensors)
    assert all(gradient.isfinite().all() and (gradient != 0).any() for gradient in found)
    for gradient in found[1:3]:
        assert (gradient[:, dropped] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", cases.FUNCTIONS)
def test_deterministic_gradients_are_the_same_bits(
    function: Callable[..., Any], device: str, deterministic: None
) -> None:
    length, times = (3000, 20) if device == "cuda" else (300, 3)
    tensors = make_fused(length, device=device)
    first = gradients(function, tensors)
    for _ in range(times):
        assert_same(gradients(function, tensors), first)


def test_deterministic_is_asked_for(seen: list[Seen]) -> None:
    """The argument asks for it, or PyTorch's switch at the time when backward runs."""
    tensors = make_fused(10)
    calls = itertools.product((False, True), (False, True), (torch.sum, torch.norm))
    for argument, switch, reduce in calls:  # norm's gradient is contiguous: a direct call takes it
        dense, _ = flash_dmattn.attention(*tensors[:3], deterministic=argument)
        outs = [dense, fused(*tensors, deterministic=argument)]
        torch.use_deterministic_algorithms(switch)
        try:
            for out in outs:
                reduce(out).backward()
        finally:
            torch.use_deterministic_algorithms(False)
        asked = [one.deterministic for one in seen if "backward" in one.name]
        assert asked[-2:] == [argument or switch] * 2
    assert len(asked) == 16


def test_only_linear_memory_is_kept() -> None:
    """Autograd keeps the inputs, out, lse, and 12 bytes for each key and kv head."""
    tensors = make_fused(512)
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = fused(*tensors)
    of_inputs = {tensor.data_ptr() for tensor in tensors}
    assert of_inputs < set(kept)
    rest = sum(x.nbytes for address, x in kept.items() if address not in of_inputs)
    batch, length, q_heads, head_dim = out.shape
    assert rest == out.nbytes + 4 * batch * length * q_heads + 12 * batch * length * 2
    out.sum().backward()


@pytest.mark.parametrize("name", ["feature/bias-selected", "feature/mask-selected"])
@pytest.mark.parametrize("is_dispatched", [False, True])
def test_one_gradient_alone(is_dispatched: bool, name: str, request: pytest.FixtureRequest) -> None:
    """Gradients that are not wanted are not computed, and do not change the others. Direct calls
    and those by the dispatcher find out by themselves what is wanted."""
    if is_dispatched:
        request.getfixturevalue("dispatched_only")
    given = make_input(name, torch.float32)
    leaves, (out, _) = attend(name, given)
    every = torch.autograd.grad(out, tuple(leaves.values()), given.dout)
    for wanted, gradient in zip(leaves, every):
        leaves, (out, _) = attend(name, given, is_learning=wanted)
        assert torch.equal(torch.autograd.grad(out, leaves[wanted], given.dout)[0], gradient)
    assert not fused(*(tensor.detach() for tensor in make_fused(10))).requires_grad
    with torch.no_grad():
        assert not fused(*make_fused(10)).requires_grad


def test_layouts_of_gradients() -> None:
    """An expanded output gradient, as from sum(), or one with a strided last axis."""
    tensors = make_fused(20)
    out = fused(*tensors)
    ones = torch.ones_like(out)
    strided = ones.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)
    assert strided.stride(-1) != 1
    expected, *found = (
        torch.autograd.grad(out, tensors, given, retain_graph=True)
        for given in (ones, torch.ones(()).expand(out.shape), strided)
    )
    for one in found:
        assert_same(one, expected)


def test_backends_without_a_backward_leave_it_to_their_family() -> None:
    assert ops.backend_for(None, "backward") is None
    assert ops.backend_for("reference", "backward", "score_backward") == "reference"
    assert ops.backend_for("cpu/none", "backward") == "cpu"
    assert ops.backend_for("cpu/scalar/decode", "backward", "score_backward") == "cpu/scalar"
    assert ops.backend_for(KERNELS[0], "backward") == KERNELS[0]
