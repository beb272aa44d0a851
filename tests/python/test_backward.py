"""Gradients of attention, scores and merging on the CPU: against autograd through masked SDPA, by
gradcheck, and what must hold of them whatever they are."""

from __future__ import annotations

import functools
from typing import Any, Callable

import flash_dmattn
import oracle
import pytest
import torch
from flash_dmattn import _call, _library, functional, gradients
from gradient_cases import (
    CASES,
    Input,
    Tensors,
    assert_gradients,
    attend,
    formula_gradients,
    fused_by_sdpa,
    make_input,
    make_mask,
    our_gradients,
    plain_fused,
    plain_gradients,
    sdpa_gradients,
)
from torch.utils.checkpoint import checkpoint

NARROW = [torch.float16, torch.bfloat16]


def takes(kernel: str, dtype: torch.dtype) -> bool:
    row = torch.zeros(1, 1, 1, 8, dtype=dtype, requires_grad=True)
    try:
        flash_dmattn.attention(row, row, row, backend=kernel)[0].sum().backward()
    except NotImplementedError:
        return False
    return True


# The fastest first: what autograd takes.
KERNELS = [
    row.name
    for row in _library.kernels()
    if row.operation == "backward" and row.missing is None and not row.name.startswith("cuda/")
]
RUNS = [
    pytest.param(kernel, dtype, id=f"{kernel}-{dtype}".replace("torch.", ""))
    for kernel in KERNELS
    for dtype in (torch.float32, *NARROW)
    if takes(kernel, dtype)
]
WIDE = [kernel for kernel in KERNELS if takes(kernel, torch.float32)]


def test_every_kernel_takes_something() -> None:
    assert "reference" in WIDE
    for kernel in KERNELS:
        assert takes(kernel, torch.bfloat16)
        assert takes(kernel, torch.float64) == (kernel == "reference")


@functools.cache
def exact_gradients(name: str, dtype: torch.dtype) -> Tensors:
    return sdpa_gradients(name, make_input(name, dtype), torch.float64)


@pytest.mark.parametrize(("kernel", "dtype"), RUNS)
@pytest.mark.parametrize("name", CASES)
def test_against_masked_sdpa(name: str, kernel: str, dtype: torch.dtype) -> None:
    given = make_input(name, dtype)
    tensors, results = attend(name, given, backend=kernel)
    found = torch.autograd.grad(results[0], tensors, given.dout)
    assert [one.dtype for one in found] == [dtype] * 3 + [torch.float32]
    plain = plain_gradients(name, given, [one.detach() for one in results])
    assert_gradients(found, exact_gradients(name, dtype), plain)


@pytest.mark.parametrize("name", CASES)
def test_masked_sdpa_in_float32(name: str) -> None:
    """Autograd itself, within a tolerance of float32."""
    given = make_input(name, torch.float32)
    pairs = zip(our_gradients(name, given), sdpa_gradients(name, given, torch.float32))
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def exact_results(name: str, given: Input) -> Tensors:
    qkv = (given.query, given.key, given.value)
    return oracle.evaluate(*qkv, make_mask(name), torch.float64, bias=given.bias)


@pytest.mark.parametrize("name", CASES)
def test_the_formula_of_the_header(name: str) -> None:
    """Exact, it is the gradient: plain evaluations are made by it."""
    given = make_input(name, torch.float32)
    by_formula = formula_gradients(name, given, exact_results(name, given), torch.float64)
    for one, other in zip(by_formula, exact_gradients(name, torch.float32)):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kernel", WIDE)
@pytest.mark.parametrize("name", ["square", "later queries", "empty rows", "window 1", "ties"])
def test_the_gradient_of_lse(name: str, kernel: str) -> None:
    """With that of out, and alone."""
    given, case = make_input(name, torch.float32), CASES[name]
    shape = (case.batch, case.q_heads, case.q_len)
    dlse = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    tensors, results = attend(name, given, backend=kernel)
    both = torch.autograd.grad(results, tensors, (given.dout, dlse), retain_graph=True)
    alone = torch.autograd.grad(results[1], tensors, dlse)
    without = given._replace(dout=torch.zeros_like(given.dout))
    for found, one in ((both, given), (alone, without)):
        exact = formula_gradients(name, one, exact_results(name, one), torch.float64, dlse)
        plain = plain_gradients(name, one, [result.detach() for result in results], dlse)
        assert_gradients(found, exact, plain)


# ---- the fused form, and its steps ----


def make_fused(
    length: int, dtype: torch.dtype = torch.float32, a: float | None = None, seed: int = 0
) -> list[torch.Tensor]:
    """query, key, value, dt_proj and a_coef; the first three as views of heads-first tensors."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    rows = [normal(2, heads, length, 16).transpose(1, 2) for heads in (4, 2, 2)]
    a_coef = normal(2) if a is None else torch.full((2,), a, dtype=dtype)
    return [x.requires_grad_() for x in (*rows, normal(2, 32) / 6, a_coef)]


def fused(*tensors: torch.Tensor, window: int = 5, causal: bool = True) -> torch.Tensor:
    return flash_dmattn.flash_dma_attention(*tensors, keep_window_size=window, causal=causal)


def stepwise(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: torch.Tensor
) -> Tensors:
    """The score itself is a result too, with a gradient of its own."""
    score, bias = flash_dmattn.score(value, *rest)
    selection = flash_dmattn.select(score, 4)
    out, lse = flash_dmattn.attention(
        query, key, value, bias=bias, selection=selection, causal=True, softcap=2.0
    )
    return out, lse, score


def merged(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Tensors:
    """Attention over two halves of the keys; the second has none for the first queries."""
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
    """Finite differences in float64; by the reference, for no other kernel takes float64."""
    function, count = GRADCHECKS[name]
    assert torch.autograd.gradcheck(function, make_fused(12, torch.float64)[:count], fast_mode=True)


def kept_by(
    value: torch.Tensor, dt_proj: torch.Tensor, a: torch.Tensor, window: int, scope: str
) -> torch.Tensor:
    with torch.no_grad():
        score, _ = flash_dmattn.score(value, dt_proj, a)
    return oracle.kept_keys(score, window, scope)


@pytest.mark.parametrize("a", [0.0, None])
@pytest.mark.parametrize(
    ("q_len", "causal", "window"), [(70, True, 9), (31, True, 9), (70, False, 9), (70, True, 70)]
)
def test_fused_against_sdpa(q_len: int, causal: bool, window: int, a: float | None) -> None:
    """All five gradients; a = 0 is where training starts, and all keys tie."""
    tensors = make_fused(70, a=a)
    tensors[0] = tensors[0].detach()[:, :q_len].requires_grad_()
    kept = kept_by(*tensors[2:], window, "causal" if causal else "global")
    mask = oracle.visible_keys(q_len, 70, causal, kept)
    dout = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(3))
    found = torch.autograd.grad(fused(*tensors, window=window, causal=causal), tensors, dout)
    exact = fused_by_sdpa(tensors, mask, dout, torch.float64)
    assert_gradients(found, exact, plain_fused(tensors, mask, dout))


def test_one_call_is_its_three_steps() -> None:
    tensors = make_fused(50)
    score, bias = flash_dmattn.score(*tensors[2:])
    selection = flash_dmattn.select(score, 5)
    out, _ = flash_dmattn.attention(*tensors[:3], bias=bias, selection=selection, causal=True)
    steps = torch.autograd.grad(out.square().sum(), tensors)
    once = torch.autograd.grad(fused(*tensors).square().sum(), tensors)
    for place, (one, other) in enumerate(zip(once, steps)):
        if place == 2:  # two sums that are added at the end, or one
            torch.testing.assert_close(one, other)
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("form", ["exp", "linear", "none"])
def test_bias_forms(form: str) -> None:
    """Without a bias the weights have no gradient, and values only that of attention."""
    tensors = make_fused(20, torch.float64)
    if form == "none":
        tensors[3].requires_grad_(False)
        tensors[4].requires_grad_(False)

    def run(*given: torch.Tensor) -> torch.Tensor:
        return functional.attend(*given, 4, bias_form=form, softcap=1.5)

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


# ---- what holds whatever they are ----


def grads(function: Callable[..., Any], tensors: list[torch.Tensor]) -> Tensors:
    out = function(*tensors)
    return torch.autograd.grad(out.cos().sum(), tensors)


def test_keys_that_nobody_keeps_are_not_read() -> None:
    name = "over tiles"
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
    """A NaN score ranks below all, so that its key is not kept once the window is full; nor is its
    value read by the gradients of the weights. A key that is not valid is not read at all."""
    tensors = make_fused(60)
    key_valid = (torch.arange(60) != 50).expand(2, -1)
    with torch.no_grad():
        for row in (30, 41, 50):
            tensors[2][:, row] = torch.nan
            tensors[1][:, row] = torch.nan

    def run(*given: torch.Tensor) -> torch.Tensor:
        return functional.attend(*given, 5, key_valid=key_valid)

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
                our_gradients("over tiles", make_input("over tiles", torch.float32), "cpu", kernel)
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
    """By the argument, and by PyTorch's switch as it is when backward runs."""
    asked = []

    def spied(operation: Any) -> Any:  # noqa: ANN401
        def draft(*arguments: Any) -> Any:  # noqa: ANN401
            drafted = operation.draft(*arguments)
            asked.append(bool(drafted.args.deterministic))
            return drafted

        return operation._replace(draft=draft)

    monkeypatch.setattr(gradients, "BACKWARD", spied(gradients.BACKWARD))
    monkeypatch.setattr(gradients, "ATTENTION_BACKWARD", spied(gradients.ATTENTION_BACKWARD))
    tensors = make_fused(10)

    def ask(out: torch.Tensor) -> None:
        _call.memory.prepared.clear()  # a call like one before makes no draft
        out.sum().backward()

    for argument in (False, True):
        ask(flash_dmattn.attention(*tensors[:3], deterministic=argument)[0])
    assert asked == [False, True]
    outs = [fused(*tensors), flash_dmattn.attention(*tensors[:3])[0], fused(*tensors)]
    try:
        torch.use_deterministic_algorithms(True)
        ask(outs[0])
        ask(outs[1])
    finally:
        torch.use_deterministic_algorithms(False)
    ask(outs[2])
    assert asked[2:] == [True, True, False]


def test_only_linear_memory_is_kept() -> None:
    """The inputs, out, lse, and 12 bytes for each key and kv head."""
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
    for place, tensor in enumerate(tensors):
        others = [one.detach() for one in tensors]
        others[place] = tensor
        out = fused(*others)
        (alone,) = torch.autograd.grad(out.cos().sum(), [tensor])
        assert torch.equal(alone, grads(fused, tensors)[place])
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
    for place, leaf in enumerate(leaves):
        others = [one.detach() for one in leaves]
        others[place] = leaf
        (alone,) = torch.autograd.grad(loss(*others), [leaf])
        assert torch.equal(alone, every[place])


def test_layouts_of_gradients() -> None:
    """One that is expanded, as sum() makes it, and one whose last axis is strided."""
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
    out = functional.attend(query, key, value, dt_proj, a, 3, scope="global", causal=False)
    tensors = (query, key, value, dt_proj, a)
    for tensor, gradient in zip(tensors, torch.autograd.grad(out.sum(), tensors)):
        assert gradient.shape == tensor.shape and (gradient == 0).all()


def test_backends_without_a_backward_leave_it_to_their_family() -> None:
    assert gradients.backend_for(None, "backward") is None
    assert gradients.backend_for("reference", "backward", "score_backward") == "reference"
    assert gradients.backend_for("cpu/none", "backward") == "cpu"
    assert gradients.backend_for(KERNELS[0], "backward") == KERNELS[0]


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
    """q, k and v in autocast's dtype, weights in float32; gradients in that of the tensors."""
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
    for place, (one, other) in enumerate(zip(found, expected)):
        assert one.dtype == torch.float32
        if place == 2:  # a sum of two, of which one may be in `dtype`
            torch.testing.assert_close(one, other, rtol=torch.finfo(dtype).eps, atol=1e-2)
        else:
            assert torch.equal(one, other)


def test_autocast_takes_weights_of_another_16_bit_type() -> None:
    tensors = make_fused(20, torch.bfloat16)
    with torch.autocast("cpu", torch.float16):
        out = fused(*tensors)
    assert out.dtype == torch.float16
    for tensor, gradient in zip(tensors, torch.autograd.grad(out.float().sum(), tensors)):
        assert gradient.dtype == tensor.dtype


def test_autocast_leaves_float64_alone() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert fused(*make_fused(8, torch.float64)).dtype == torch.float64
