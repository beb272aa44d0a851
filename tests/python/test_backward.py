"""Gradients of attention, scores and merging: against evaluations in float64, by gradcheck, and in
the ways of training in PyTorch. On a CUDA device too, if there is one."""

from __future__ import annotations

import functools
import itertools
from typing import Any, Callable

import cases
import evaluate
import flash_dmattn
import pytest
import torch
from cases import DEVICES, attend, fused, gradients, make_fused, make_input, make_mask, stepwise
from evaluate import assert_same
from flash_dmattn import ops
from programs import Seen
from torch.utils.checkpoint import checkpoint

KERNELS = cases.kernels_of("backward")
# Backward treats a single query as any other.
CASES_OF_BACKWARD = [name for name in cases.NAMES if cases.CASES[name].q_len > 1]


@functools.lru_cache(maxsize=None)
def exact_gradients(name: str, dtype: torch.dtype) -> cases.Tensors:
    """Gradients by autograd through the evaluation in float64."""
    given = make_input(name, dtype)
    names = ("query", "key", "value", "bias")
    leaves = {
        one: getattr(given, one).double().clone().requires_grad_()
        for one in names
        if getattr(given, one) is not None
    }
    options = {"softcap": cases.CASES[name].softcap, "bias": leaves.get("bias")}
    rows = [leaves[one] for one in names[:3]]
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


# float64 is left to gradcheck.
@pytest.mark.parametrize(
    ("device", "kernel", "dtype"), cases.runs_of(KERNELS, cases.DTYPES[:3]) + cases.CUDA_RUNS
)
@pytest.mark.parametrize("name", CASES_OF_BACKWARD)
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


@pytest.mark.parametrize("kernel", cases.WIDE)
@pytest.mark.parametrize(
    "name", ["group/2", "later/steps", "dense/empty-rows", "window/1", "scores/tied"]
)
def test_the_gradient_of_lse(name: str, kernel: str) -> None:
    """The gradient of lse, alone and together with the gradient of out."""
    given, case = make_input(name, torch.float32), cases.CASES[name]
    shape = (case.batch, case.q_heads, case.q_len)
    dlse = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    leaves, results = attend(name, given, kernel)
    tensors = tuple(leaves.values())
    both = torch.autograd.grad(results, tensors, (given.dout, dlse), retain_graph=True)
    alone = torch.autograd.grad(
        results[1], tensors, dlse, allow_unused=True, materialize_grads=True
    )
    without = given._replace(dout=torch.zeros_like(given.dout))
    for found, one in ((both, given), (alone, without)):
        plain = plain_gradients(name, one, results, dlse)
        evaluate.assert_all_within(found, formula(name, one, dlse), plain)


# ---- the fused form, and its steps ----


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: torch.Tensor
) -> cases.Tensors:
    return flash_dmattn.attention(query, key, value, causal=True, softmax_scale=0.6, softcap=1.5)


def biased(*tensors: torch.Tensor) -> cases.Tensors:
    """Attention under a bias that is differentiated like the other tensors."""
    return flash_dmattn.attention(*tensors[:3], bias=tensors[3], causal=True)


def in_global_scope(*tensors: torch.Tensor) -> torch.Tensor:
    return fused(*tensors, causal=False)


@pytest.mark.parametrize("function", [*cases.FUNCTIONS, dense, in_global_scope])
def test_gradcheck(function: Callable[..., Any]) -> None:
    """Compare with finite differences in float64, which only the reference supports."""
    tensors = make_fused(60, dtype=torch.float64, head_dim=16)
    assert torch.autograd.gradcheck(function, tensors, fast_mode=True)


@pytest.mark.parametrize("function", [fused, stepwise])
@pytest.mark.parametrize("form", ["exp", "linear", "none"])
def test_bias_forms(form: str, function: Callable[..., Any]) -> None:
    """Without a bias dt_proj and a_coef have only the score's gradient, and value has only the
    gradient of attention."""
    tensors = make_fused(60, dtype=torch.float64, head_dim=16)
    if form == "none" and function is fused:
        tensors[3:] = [tensor.detach() for tensor in tensors[3:]]

    def run(*given: torch.Tensor) -> Any:
        return function(*given, bias_form=form, softcap=1.5)

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("a", [0.0, None])
@pytest.mark.parametrize(
    ("q_len", "causal", "window", "rules"),
    [
        (70, True, 9, {}),
        (31, True, 9, {}),
        (70, False, 9, {}),
        (70, True, 70, {}),
        (70, True, 9, {"recent": 5}),
        (31, True, 9, {"recent": 20, "sinks": 3}),
        (70, False, 9, {"sinks": 4}),
    ],
)
def test_fused_against_float64(
    q_len: int, causal: bool, window: int, rules: dict[str, int], a: float | None, backend: str
) -> None:
    """All five gradients. Training starts from a = 0, when all keys tie."""
    tensors = make_fused(70, head_dim=16, a_coef=a)
    tensors[0] = tensors[0].detach()[:, :q_len].requires_grad_()
    with torch.no_grad():
        score, _ = flash_dmattn.score(*tensors[2:])
    kept = evaluate.kept_keys(score, window, "causal" if causal else "global", **rules)
    mask = evaluate.visible_keys(q_len, 70, causal, kept)
    dout = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(3))
    out = fused(*tensors, keep_window_size=window, causal=causal, backend=backend, **rules)
    found = torch.autograd.grad(out, tensors, dout)
    exact = evaluate.fused_gradients(tensors, mask, dout, torch.float64)
    plain = evaluate.plain_fused_gradients(tensors, mask, dout)
    evaluate.assert_all_within(found, exact, plain)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rules", [{}, cases.RULES])
def test_one_call_is_its_three_steps(
    rules: dict[str, int], device: str, deterministic: None
) -> None:
    def once(*tensors: torch.Tensor) -> cases.Tensors:
        return fused(*tensors, bias_form="linear", softcap=3.0, return_lse=True, **rules)

    def steps(*tensors: torch.Tensor) -> cases.Tensors:
        return stepwise(*tensors, **rules)[:2]

    tensors = make_fused(300, device=device)
    assert_same(once(*tensors), steps(*tensors))
    dquery, dkey, dvalue, *rest = gradients(once, tensors)
    *same, other, ddt_proj, da_coef = gradients(steps, tensors)
    assert_same((dquery, dkey, *rest), (*same, ddt_proj, da_coef))
    # The gradient is one sum, or two that are rounded and added at the end.
    rounding = 2 * torch.finfo(other.dtype).eps * other.abs().max().item()
    torch.testing.assert_close(dvalue, other, rtol=0, atol=rounding)


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
def test_a_sequence_does_not_depend_on_its_batch(device: str, deterministic: None) -> None:
    """The fused form."""
    *rows, dt_proj, a_coef = make_fused(300, device=device)
    both = gradients(lambda *given: fused(*given, dt_proj, a_coef), rows)
    for b in range(2):
        one = [tensor.detach()[b : b + 1].requires_grad_() for tensor in rows]
        alone = gradients(lambda *given: fused(*given, dt_proj, a_coef), one)
        assert_same(alone, tuple(gradient[b : b + 1] for gradient in both))


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


@pytest.mark.parametrize("function", [fused, biased])
def test_one_gradient_alone(function: Callable[..., Any]) -> None:
    """Gradients that are not wanted are not computed, and do not change the others."""
    tensors = make_fused(60)
    if function is biased:
        tensors[3:] = [torch.randn(2, 2, 60, requires_grad=True)]
    every = gradients(function, tensors)
    for index, tensor in enumerate(tensors):
        others = [one.detach() for one in tensors]
        others[index] = tensor
        (alone,) = gradients(lambda _, given=others: function(*given), [tensor])
        assert torch.equal(alone, every[index])
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


# ---- PyTorch's ways to train ----


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool, device: str, deterministic: None) -> None:
    def checkpointed(*tensors: torch.Tensor) -> torch.Tensor:
        return checkpoint(fused, *tensors, use_reentrant=use_reentrant)

    tensors = make_fused(300, device=device)
    checkpointed(*tensors).float().cos().sum().backward()
    assert_same(tuple(tensor.grad for tensor in tensors), gradients(fused, tensors))


@pytest.mark.parametrize("function", [fused, lambda *tensors: stepwise(*tensors)[0]])
@pytest.mark.parametrize("dtype", cases.NARROW)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_autocast(
    device: str,
    compiled: bool,
    dtype: torch.dtype,
    function: Callable[..., Any],
    deterministic: None,
) -> None:
    """Query, key and value are cast, weights are not. Gradients have the dtypes of the tensors."""
    torch._dynamo.reset()
    tensors = [tensor.detach().float().requires_grad_() for tensor in make_fused(60, device=device)]
    run = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    with torch.autocast(device, dtype):
        out = run(*tensors)
        assert out.dtype == dtype
        heads_first = [tensor.transpose(1, 2) for tensor in tensors[:3]]
        sdpa = evaluate.grouped_sdpa(*heads_first)
        assert sdpa.dtype == dtype
    found = torch.autograd.grad(out.float().cos().sum(), tensors)
    cast = function(*(tensor.to(dtype) for tensor in tensors[:3]), *tensors[3:])
    assert torch.equal(out, cast)
    expected = torch.autograd.grad(cast.float().cos().sum(), tensors)
    assert all(one.dtype == torch.float32 for one in found)
    assert_same(found[:2] + found[3:], expected[:2] + expected[3:])
    # dvalue is a sum of two gradients, and one of them may be in `dtype`.
    torch.testing.assert_close(found[2], expected[2], rtol=torch.finfo(dtype).eps, atol=1e-2)


def test_autocast_takes_weights_of_another_16_bit_type() -> None:
    tensors = [tensor.detach().bfloat16().requires_grad_() for tensor in make_fused(20)]
    with torch.autocast("cpu", torch.float16):
        out = fused(*tensors)
    assert out.dtype == torch.float16
    for tensor, gradient in zip(tensors, torch.autograd.grad(out.float().sum(), tensors)):
        assert gradient.dtype == tensor.dtype


def test_autocast_leaves_float64_alone() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert fused(*make_fused(8, dtype=torch.float64)).dtype == torch.float64
