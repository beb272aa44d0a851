"""Gradients of attention, scores and merging on the CPU: against evaluations in float64, by
gradcheck, and by their properties."""

from __future__ import annotations

import functools
from typing import Any, Callable

import evaluate
import flash_dmattn
import pytest
import torch
from cases import (
    CASES,
    DTYPES,
    NAMES,
    WIDE,
    Input,
    Tensors,
    attend,
    kernels_of,
    make_fused,
    make_input,
    make_mask,
    options_of,
    our_gradients,
    takes,
)
from flash_dmattn import _call, ops
from torch.utils.checkpoint import checkpoint

KERNELS = kernels_of("backward")
# In float64 gradcheck judges.
RUNS = [(kernel, dtype) for kernel in KERNELS for dtype in DTYPES[:3] if takes(kernel, dtype)]
NARROW = [torch.float16, torch.bfloat16]
# Backward treats a single query like any other.
CASES_OF_BACKWARD = [name for name in NAMES if CASES[name].q_len > 1]


@functools.cache
def exact_gradients(name: str, dtype: torch.dtype) -> Tensors:
    """By autograd through the evaluation in float64."""
    given = make_input(name, dtype)
    names = ("query", "key", "value", "bias")
    leaves = {
        one: getattr(given, one).double().clone().requires_grad_()
        for one in names
        if getattr(given, one) is not None
    }
    options = {"softcap": CASES[name].softcap, "bias": leaves.get("bias")}
    rows = [leaves[one] for one in names[:3]]
    out, _ = evaluate.attention(*rows, make_mask(name), torch.float64, **options)
    return torch.autograd.grad(out, tuple(leaves.values()), given.dout.double())


def plain_gradients(
    name: str, given: Input, results: Tensors, dlse: torch.Tensor | None = None
) -> list[Tensors]:
    options = options_of(name, given)
    return evaluate.plain_gradients(
        given.dout, dlse, results, given[:3], make_mask(name), **options
    )


@pytest.mark.parametrize(("kernel", "dtype"), RUNS)
@pytest.mark.parametrize("name", CASES_OF_BACKWARD)
def test_against_float64(name: str, kernel: str, dtype: torch.dtype) -> None:
    given = make_input(name, dtype)
    leaves, results = attend(name, given, kernel)
    found = torch.autograd.grad(results[0], tuple(leaves.values()), given.dout)
    assert [one.dtype for one in found[:3]] == [dtype] * 3
    plain = plain_gradients(name, given, results)
    evaluate.assert_all_within(found, exact_gradients(name, dtype), plain)


def exact_results(name: str, given: Input) -> Tensors:
    return evaluate.attention(*given[:3], make_mask(name), torch.float64, **options_of(name, given))


def formula(name: str, given: Input, dlse: torch.Tensor | None = None) -> Tensors:
    results, options = exact_results(name, given), options_of(name, given)
    return evaluate.attention_backward(
        given.dout, dlse, results, *given[:3], make_mask(name), torch.float64, **options
    )


@pytest.mark.parametrize("name", CASES_OF_BACKWARD)
def test_the_formula_of_the_header(name: str) -> None:
    """In float64 it gives what autograd does: plain evaluations are made by it."""
    found = formula(name, make_input(name, torch.float32))
    for one, other in zip(found, exact_gradients(name, torch.float32)):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kernel", WIDE)
@pytest.mark.parametrize(
    "name", ["group/2", "later/steps", "dense/empty-rows", "window/1", "scores/tied"]
)
def test_the_gradient_of_lse(name: str, kernel: str) -> None:
    """The gradient of lse, together with that of out, and alone."""
    given, case = make_input(name, torch.float32), CASES[name]
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


def fused(*tensors: torch.Tensor, window: int = 5, causal: bool = True, **options: Any) -> Any:
    return flash_dmattn.flash_dma_attention(
        *tensors, keep_window_size=window, causal=causal, **options
    )


def stepwise(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: torch.Tensor
) -> Tensors:
    """The three calls; the score is a result with a gradient of its own."""
    score, bias = flash_dmattn.score(value, *rest)
    selection = flash_dmattn.select(score, 4)
    out, lse = flash_dmattn.attention(
        query, key, value, bias=bias, selection=selection, causal=True, softcap=2.0
    )
    return out, lse, score


def merged(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Tensors:
    """Attention over two sets of keys; the first queries see no key of the second."""
    first = flash_dmattn.attention(query, key[:, :5], value[:, :5])
    key_valid = torch.arange(key.shape[1] - 5).expand(2, -1) % 3 != 1
    second = flash_dmattn.attention(
        query, key[:, 5:], value[:, 5:], causal=True, key_valid=key_valid
    )
    return flash_dmattn.merge(*first, *second)


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Tensors:
    return flash_dmattn.attention(query, key, value, causal=True, softmax_scale=0.6, softcap=1.5)


GRADCHECKS: dict[str, tuple[Callable[..., Any], int]] = {
    "fused": (fused, 5),
    "fused, global": (lambda *tensors: fused(*tensors, causal=False), 5),
    "stepwise": (stepwise, 5),
    "merged": (merged, 3),
    "dense": (dense, 3),
}


@pytest.mark.parametrize("name", GRADCHECKS)
def test_gradcheck(name: str) -> None:
    """Against finite differences in float64, which only the reference takes."""
    function, count = GRADCHECKS[name]
    assert torch.autograd.gradcheck(
        function, make_fused(12, dtype=torch.float64)[:count], fast_mode=True
    )


def kept_by(
    value: torch.Tensor, dt_proj: torch.Tensor, a: torch.Tensor, window: int, scope: str
) -> torch.Tensor:
    with torch.no_grad():
        score, _ = flash_dmattn.score(value, dt_proj, a)
    return evaluate.kept_keys(score, window, scope)


@pytest.mark.parametrize("a", [0.0, None])
@pytest.mark.parametrize(
    ("q_len", "causal", "window"), [(70, True, 9), (31, True, 9), (70, False, 9), (70, True, 70)]
)
def test_fused_against_float64(q_len: int, causal: bool, window: int, a: float | None) -> None:
    """All five gradients. Training starts from a = 0, where all keys tie."""
    tensors = make_fused(70, a_coef=a)
    tensors[0] = tensors[0].detach()[:, :q_len].requires_grad_()
    kept = kept_by(*tensors[2:], window, "causal" if causal else "global")
    mask = evaluate.visible_keys(q_len, 70, causal, kept)
    dout = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(3))
    found = torch.autograd.grad(fused(*tensors, window=window, causal=causal), tensors, dout)
    exact = evaluate.fused_gradients(tensors, mask, dout, torch.float64)
    plain = evaluate.plain_fused_gradients(tensors, mask, dout)
    evaluate.assert_all_within(found, exact, plain)


def test_one_call_is_its_three_steps() -> None:
    tensors = make_fused(50)
    score, bias = flash_dmattn.score(*tensors[2:])
    selection = flash_dmattn.select(score, 5)
    out, _ = flash_dmattn.attention(*tensors[:3], bias=bias, selection=selection, causal=True)
    steps = torch.autograd.grad(out.square().sum(), tensors)
    once = torch.autograd.grad(fused(*tensors).square().sum(), tensors)
    for index, (one, other) in enumerate(zip(once, steps)):
        if index == 2:  # dvalue: one sum, or two that are added at the end
            torch.testing.assert_close(one, other)
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("form", ["exp", "linear", "none"])
def test_bias_forms(form: str) -> None:
    """Without a bias dt_proj and a_coef have no gradient, and value only that of attention."""
    tensors = make_fused(20, dtype=torch.float64)
    if form == "none":
        tensors[3].requires_grad_(False)
        tensors[4].requires_grad_(False)

    def run(*given: torch.Tensor) -> torch.Tensor:
        return flash_dmattn.flash_dma_attention(*given, 4, causal=True, bias_form=form, softcap=1.5)

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


# ---- properties ----


def grads(function: Callable[..., Any], tensors: list[torch.Tensor]) -> Tensors:
    out = function(*tensors)
    return torch.autograd.grad(out.cos().sum(), tensors)


def test_keys_that_nobody_keeps_are_not_read() -> None:
    name = "scores/saw"
    given, case = make_input(name, torch.float32), CASES[name]
    never = flash_dmattn.select(given.score, case.window).slot[0] < 0  # [kv_heads, kv_len]
    assert never.any() and not never.all()
    spoilt = never.T[None, :, :, None]
    expected = our_gradients(name, given)
    with_nan = given._replace(
        key=given.key.masked_fill(spoilt, torch.nan),
        value=given.value.masked_fill(spoilt, torch.nan),
        bias=given.bias.masked_fill(never[None], torch.nan),
    )
    for one, other in zip(our_gradients(name, with_nan), expected):
        assert torch.equal(one, other)
    for gradient in expected[1:3]:
        assert (gradient[spoilt.expand_as(gradient)] == 0).all()
        assert (gradient[~spoilt.expand_as(gradient)] != 0).any()
    assert (expected[3][never[None]] == 0).all()


def test_nan_in_values_that_the_fused_form_drops() -> None:
    """A key with a NaN score ranks below all others, so that it is not kept once the window is
    full; its value does not reach the gradients of dt_proj and a_coef either. A key that is not
    valid is not read at all."""
    tensors = make_fused(60)
    key_valid = (torch.arange(60) != 50).expand(2, -1)
    with torch.no_grad():
        for row in (30, 41, 50):
            tensors[2][:, row] = torch.nan
            tensors[1][:, row] = torch.nan

    def run(*given: torch.Tensor) -> torch.Tensor:
        return flash_dmattn.flash_dma_attention(*given, 5, causal=True, key_valid=key_valid)

    found = grads(run, tensors)
    assert all(gradient.isfinite().all() and (gradient != 0).any() for gradient in found)
    for gradient in found[1:3]:
        assert (gradient[:, [30, 41, 50]] == 0).all()


@pytest.mark.parametrize("kernel", WIDE)
def test_the_same_bits_for_any_number_of_threads(kernel: str) -> None:
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            found.append(
                our_gradients("scores/saw", make_input("scores/saw", torch.float32), kernel)
            )
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for one, same in zip(found[0], other):
            assert torch.equal(one, same)


def test_a_sequence_does_not_depend_on_its_batch() -> None:
    tensors = make_fused(40)
    both = grads(lambda *rows: fused(*rows, *tensors[3:]), tensors[:3])
    for b in range(2):
        rows = [tensor.detach()[b : b + 1].requires_grad_() for tensor in tensors[:3]]
        for one, other in zip(grads(lambda *rows: fused(*rows, *tensors[3:]), rows), both):
            assert torch.equal(one, other[b : b + 1])


def test_deterministic_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the argument, or by PyTorch's switch at the time that backward runs."""
    asked = []

    def spied(operation: Any, tensors: Any, options: Any, backend: Any) -> Any:
        named = dict(zip(operation.options, options))
        if operation.function.endswith("backward"):
            asked.append(named["deterministic"])
            _call.memory.prepared.clear()  # so that the call is prepared anew
            found = _call.call(operation, tensors, options, backend)
            (prepared,) = _call.memory.prepared.values()
            assert prepared.args.deterministic == asked[-1]
            return found
        return _call.call(operation, tensors, options, backend)

    monkeypatch.setattr(ops, "call", spied)
    tensors = make_fused(10)
    for argument in (False, True):
        flash_dmattn.attention(*tensors[:3], deterministic=argument)[0].sum().backward()
        fused(*tensors, deterministic=argument).sum().backward()
    assert asked == [False, False, True, True]
    outs = [fused(*tensors), flash_dmattn.attention(*tensors[:3])[0], fused(*tensors)]
    try:
        torch.use_deterministic_algorithms(True)
        outs[0].sum().backward()
        outs[1].sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    outs[2].sum().backward()
    assert asked[4:] == [True, True, False]


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


def test_gradients_that_nobody_wants_are_not_made() -> None:
    tensors = make_fused(10)
    for index, tensor in enumerate(tensors):
        others = [one.detach() for one in tensors]
        others[index] = tensor
        out = fused(*others)
        (alone,) = torch.autograd.grad(out.cos().sum(), [tensor])
        assert torch.equal(alone, grads(fused, tensors)[index])
    assert not fused(*(tensor.detach() for tensor in tensors)).requires_grad
    with torch.no_grad():
        assert not fused(*tensors).requires_grad


def test_one_gradient_of_attention_alone() -> None:
    generator = torch.Generator().manual_seed(11)
    query, key, value = torch.randn(3, 1, 30, 2, 16, generator=generator)
    bias = torch.randn(1, 2, 30, generator=generator)

    def loss(*given: torch.Tensor) -> torch.Tensor:
        out, _ = flash_dmattn.attention(*given[:3], bias=given[3], causal=True)
        return out.cos().sum()

    leaves = [tensor.requires_grad_() for tensor in (query, key, value, bias)]
    every = torch.autograd.grad(loss(*leaves), leaves)
    for index, leaf in enumerate(leaves):
        others = [one.detach() for one in leaves]
        others[index] = leaf
        (alone,) = torch.autograd.grad(loss(*others), [leaf])
        assert torch.equal(alone, every[index])


def test_layouts_of_gradients() -> None:
    """An output gradient that is expanded, as sum() makes it, or has a strided last axis."""
    tensors = make_fused(20)
    out = fused(*tensors)
    ones = torch.ones_like(out)
    expected = torch.autograd.grad(out, tensors, ones, retain_graph=True)
    strided = ones.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)
    assert strided.stride(-1) != 1
    for given in (torch.ones(()).expand(out.shape), strided):
        for one, other in zip(
            torch.autograd.grad(out, tensors, given, retain_graph=True), expected
        ):
            assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(0, 4, 4), (1, 0, 4), (1, 4, 0), (1, 0, 0)])
def test_nothing_to_attend(shape: tuple[int, int, int]) -> None:
    batch, q_len, kv_len = shape
    query = torch.randn(batch, q_len, 4, 16, requires_grad=True)
    key, value = (torch.randn(batch, kv_len, 2, 16, requires_grad=True) for _ in range(2))
    dt_proj, a = torch.randn(2, 32, requires_grad=True), torch.zeros(2, requires_grad=True)
    out = flash_dmattn.flash_dma_attention(query, key, value, dt_proj, a, 3)
    tensors = (query, key, value, dt_proj, a)
    for tensor, gradient in zip(tensors, torch.autograd.grad(out.sum(), tensors)):
        assert gradient.shape == tensor.shape and (gradient == 0).all()


def test_backends_without_a_backward_leave_it_to_their_family() -> None:
    assert ops.backend_for(None, "backward") is None
    assert ops.backend_for("reference", "backward", "score_backward") == "reference"
    assert ops.backend_for("cpu/none", "backward") == "cpu"
    assert ops.backend_for("cpu/scalar/decode", "backward", "score_backward") == "cpu/scalar"
    assert ops.backend_for(KERNELS[0], "backward") == KERNELS[0]


# ---- PyTorch's ways to train ----


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool) -> None:
    tensors = make_fused(40)
    expected = grads(fused, tensors)
    out = checkpoint(fused, *tensors, use_reentrant=use_reentrant)
    out.cos().sum().backward()
    for tensor, other in zip(tensors, expected):
        assert torch.equal(tensor.grad, other)


@pytest.mark.parametrize("function", [fused, lambda *tensors: stepwise(*tensors)[0]])
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(function: Callable[..., Any], dtype: torch.dtype, compiled: bool) -> None:
    """Query, key and value are cast, weights are not; gradients have the dtypes of the tensors."""
    torch._dynamo.reset()
    tensors = make_fused(40)
    run = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    with torch.autocast("cpu", dtype):
        out = run(*tensors)
        assert out.dtype == dtype
        heads_first = [tensor.transpose(1, 2) for tensor in tensors[:3]]
        sdpa = torch.nn.functional.scaled_dot_product_attention(*heads_first, enable_gqa=True)
        assert sdpa.dtype == dtype
    found = torch.autograd.grad(out.float().cos().sum(), tensors)
    cast = function(*(tensor.to(dtype) for tensor in tensors[:3]), *tensors[3:])
    assert torch.equal(out, cast)
    expected = torch.autograd.grad(cast.float().cos().sum(), tensors)
    for index, (one, other) in enumerate(zip(found, expected)):
        assert one.dtype == torch.float32
        if index == 2:  # dvalue is a sum of two gradients, one of which may be in `dtype`
            torch.testing.assert_close(one, other, rtol=torch.finfo(dtype).eps, atol=1e-2)
        else:
            assert torch.equal(one, other)


def test_autocast_takes_weights_of_another_16_bit_type() -> None:
    tensors = make_fused(20, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.float16):
        out = fused(*tensors)
    assert out.dtype == torch.float16
    for tensor, gradient in zip(tensors, torch.autograd.grad(out.float().sum(), tensors)):
        assert gradient.dtype == tensor.dtype


def test_autocast_leaves_float64_alone() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert fused(*make_fused(8, dtype=torch.float64)).dtype == torch.float64
