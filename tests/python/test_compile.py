"""The operators under opcheck, torch.compile, fake tensors and meta tensors."""

from __future__ import annotations

from typing import Any, Callable

import flash_dmattn
import pytest
import torch
from flash_dmattn import gradients as gradients_ops
from flash_dmattn import ops
from torch._subclasses.fake_tensor import FakeTensorMode

Arguments = tuple[Any, ...]


def make_tensors(length: int = 12, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """query, key, value, dt_proj and a_coef; the first three as views of heads-first tensors."""
    generator = torch.Generator().manual_seed(length)
    views = [
        torch.randn(2, heads, length, 16, generator=generator).to(dtype).transpose(1, 2)
        for heads in (4, 2, 2)
    ]
    dt_proj = torch.randn(2, 32, generator=generator).to(dtype)
    return [*views, dt_proj, torch.randn(2, generator=generator).to(dtype)]


def operators() -> dict[str, tuple[Callable[..., Any], Arguments]]:
    query, key, value, dt_proj, a_coef = make_tensors()
    key_valid = torch.arange(12).expand(2, 12) % 5 != 1
    score = torch.randn(2, 2, 12, generator=torch.Generator().manual_seed(1))
    expiry, slot = ops.select_op(score, 4, "causal", None, None)
    options = ("causal", True, 0.0, 0.0, None)
    fused = (key_valid, 4, "causal", "exp", True, 0.5, 2.0, "reference")
    attended = ops.attention_op(query, key, value, score, expiry, slot, None, 4, *options)
    dlse = torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(2))
    given = (attended[0].cos(), dlse, *attended, query, key, value)
    return {
        "score": (ops.score_op, (value, dt_proj, a_coef, "exp", key_valid, None)),
        "score without bias": (ops.score_op, (value, dt_proj, a_coef, "none", None, None)),
        "select": (ops.select_op, (score, 4, "causal", key_valid, None)),
        "select global": (ops.select_op, (score, 4, "global", None, "reference")),
        "dense": (
            ops.attention_op,
            (query, key, value, None, None, None, key_valid, 0, *options),
        ),
        "selected": (
            ops.attention_op,
            (query, key, value, score, expiry, slot, None, 4, *options),
        ),
        "fused": (ops.flash_dma_attention_op, (query, key, value, dt_proj, a_coef, *fused)),
        "fused, out alone": (
            ops.flash_dma_output_op,
            (query, key, value, dt_proj, a_coef, *fused),
        ),
        "fused in bfloat16": (
            ops.flash_dma_attention_op,
            (*make_tensors(dtype=torch.bfloat16), *fused),
        ),
        "merge": (ops.merge_op, (*attended, *attended, None)),
        "score's backward": (
            gradients_ops.score_backward_op,
            (dlse[:, :2], value, dt_proj, a_coef, key_valid, "exp", None),
        ),
        "selected's backward": (
            gradients_ops.attention_backward_op,
            (*given, score, None, expiry, slot, 4, *options[:-1], False, True, None),
        ),
        "dense's backward": (
            gradients_ops.attention_backward_op,
            (*given, None, None, None, None, 0, *options[:-1], True, False, None),
        ),
        "fused's backward": (
            gradients_ops.flash_dma_attention_backward_op,
            (*given, dt_proj, a_coef, score, None, expiry, slot, 4, "causal", "exp")
            + (*options[1:-1], False, None),
        ),
        "merge's backward": (
            gradients_ops.merge_backward_op,
            (*given[:2], *attended, *attended, None),
        ),
    }


OPERATORS = operators()


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str) -> None:
    operator, arguments = OPERATORS[name]
    results = torch.library.opcheck(operator, arguments)
    assert len(results) == 4 and set(results.values()) == {"SUCCESS"}


def learning(name: str) -> Arguments:
    """The arguments of an operator, those requiring gradients that can."""
    return tuple(
        x.detach().clone().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x
        for x in OPERATORS[name][1]
    )


DIFFERENTIABLE = [name for name in OPERATORS if "backward" not in name and "alone" not in name]


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if "select " not in f"{name} "])
def test_opcheck_of_gradients(name: str) -> None:
    results = torch.library.opcheck(OPERATORS[name][0], learning(name))
    assert len(results) == 4 and set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", OPERATORS)
def test_fake_results_are_like_real_ones(name: str) -> None:
    operator, arguments = OPERATORS[name]
    real = operator(*arguments)
    with FakeTensorMode() as mode:
        fake = operator(
            *(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments)
        )
    meta = operator(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments))
    if isinstance(real, torch.Tensor):
        real, fake, meta = (real,), (fake,), (meta,)
    assert len(real) == len(fake) == len(meta)
    for one, *others in zip(real, fake, meta):
        for other in others:
            assert (other.shape, other.dtype) == (one.shape, one.dtype)
            assert other.stride() == one.stride()


def test_fake_kernels_check_ranks() -> None:
    query, *rest = (tensor.to("meta") for tensor in make_tensors())
    with pytest.raises(ValueError, match="q: rank is 3, want 4"):
        flash_dmattn.flash_dma_attention(query[0], *rest)


def fused(*tensors: torch.Tensor) -> torch.Tensor:
    return flash_dmattn.flash_dma_attention(*tensors, keep_window_size=5, causal=True) * 2


def stepwise(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dt_proj: torch.Tensor,
    a_coef: torch.Tensor,
) -> torch.Tensor:
    score, bias = flash_dmattn.score(value, dt_proj, a_coef, bias_form="linear")
    selection = flash_dmattn.select(score, 5)
    out, lse = flash_dmattn.attention(
        query, key, value, bias=bias, selection=selection, causal=True, softcap=3.0
    )
    return out * lse.exp().transpose(1, 2)[..., None]


@pytest.mark.parametrize("function", [fused, stepwise])
def test_one_graph(function: Callable[..., torch.Tensor]) -> None:
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    tensors = make_tensors()
    assert torch.equal(compiled(*tensors), function(*tensors))


@pytest.mark.parametrize("function", [fused, stepwise])
def test_one_graph_for_all_lengths(function: Callable[..., torch.Tensor]) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for length in (12, 31, 7):
        tensors = make_tensors(length)
        assert torch.equal(compiled(*tensors), function(*tensors))
        frames.append(counter.frame_count)
    assert frames[0] > 0 and len(set(frames)) == 1, "compiled anew for another length"


def test_inductor() -> None:
    compiled = torch.compile(fused, fullgraph=True)
    tensors = make_tensors()
    assert torch.equal(compiled(*tensors), fused(*tensors))


def gradients(function: Callable[..., torch.Tensor], length: int = 12) -> Arguments:
    tensors = [tensor.clone().requires_grad_() for tensor in make_tensors(length)]
    out = function(*tensors)
    assert out.requires_grad
    return torch.autograd.grad(out.square().sum(), tensors)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("function", [fused, stepwise])
def test_one_training_graph(function: Callable[..., torch.Tensor], backend: str) -> None:
    """Forward and backward without graph breaks; fused, all but the C library's is exact."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    exact = function is fused or backend == "aot_eager"
    limits = {} if exact else {"rtol": 1e-4, "atol": 1e-5}  # inductor's exp() is another
    for one, other in zip(gradients(compiled), gradients(function)):
        torch.testing.assert_close(one, other, **(limits or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("function", [fused, stepwise])
def test_one_training_graph_for_all_lengths(function: Callable[..., torch.Tensor]) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for length in (12, 31, 7):
        for one, other in zip(gradients(compiled, length), gradients(function, length)):
            assert torch.equal(one, other)
        frames.append(counter.frame_count)
    assert frames[0] > 0 and len(set(frames)) == 1, "compiled anew for another length"
