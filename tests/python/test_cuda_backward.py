"""Gradients on a CUDA device: against evaluations in float64, and PyTorch's ways to train."""

from __future__ import annotations

import copy
from typing import Any, Callable

import evaluate
import flash_dmattn
import pytest
import torch
from cases import (
    CASES,
    Tensors,
    attend,
    kernels_of,
    make_input,
    our_gradients,
)
from cases import (
    make_fused as make_fused_on,
)
from flash_dmattn import _library
from test_backward import CASES_OF_BACKWARD, exact_gradients, plain_gradients
from test_cuda import run_program
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and _library.library.fdma_device_count() > 1),
    reason="no CUDA device",
)
DTYPES = [torch.float16, torch.bfloat16]
KERNELS = kernels_of("backward", ("cuda",))
WINDOW = 40

Layer = flash_dmattn.DynamicMaskAttention


def test_there_is_a_kernel() -> None:
    assert KERNELS


FRESH_THREADS = """
import threading
import torch, flash_dmattn
x = torch.randn(1, 300, 2, 64, device="cuda", dtype=torch.bfloat16)
found = []
thread = threading.Thread(target=lambda: found.append(flash_dmattn.attention(x, x, x)[0]))
thread.start()
thread.join()
assert torch.equal(found[0], flash_dmattn.attention(x, x, x)[0])
x.requires_grad_()
flash_dmattn.attention(x, x, x)[0].sum().backward()
assert x.grad.isfinite().all()
"""


def test_threads_that_have_not_used_the_device() -> None:
    """The first CUDA call of a thread, and of PyTorch's thread for gradients, is the library's."""
    run_program(FRESH_THREADS)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES_OF_BACKWARD)
def test_against_float64(name: str, dtype: torch.dtype, deterministic: bool) -> None:
    given = make_input(name, dtype)
    leaves, results = attend(name, given, device="cuda", deterministic=deterministic)
    found = torch.autograd.grad(results[0], tuple(leaves.values()), given.dout.cuda())
    assert all(one.device == results[0].device for one in found)
    assert [one.dtype for one in found[:3]] == [dtype] * 3
    plain = plain_gradients(name, given, results)
    evaluate.assert_all_within(found, exact_gradients(name, dtype), plain)


@pytest.mark.parametrize("name", ["group/2", "later/steps", "padding/left", "head-dim/256"])
def test_every_kernel(name: str) -> None:
    """By name, because only the fastest kernel runs otherwise."""
    given = make_input(name, torch.bfloat16)
    tried = []
    for kernel in KERNELS:
        try:
            leaves, results = attend(name, given, kernel, "cuda")
            found = torch.autograd.grad(results[0], tuple(leaves.values()), given.dout.cuda())
        except NotImplementedError:  # another head_dim's
            continue
        plain = plain_gradients(name, given, results)
        evaluate.assert_all_within(found, exact_gradients(name, torch.bfloat16), plain)
        tried.append(kernel)
    assert any(kernel.startswith("cuda/sm80") for kernel in tried)


def make_fused(
    q_len: int = 300, kv_len: int = 300, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    tensors = make_fused_on(q_len, kv_len, dtype, head_dim=64, device="cuda")
    tensors[4] = tensors[4].detach().float().requires_grad_()
    return tensors


def fused(*tensors: torch.Tensor) -> torch.Tensor:
    return flash_dmattn.flash_dma_attention(*tensors, keep_window_size=WINDOW, causal=True)


def stepwise(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: torch.Tensor
) -> torch.Tensor:
    score, bias = flash_dmattn.score(value, *rest, bias_form="linear")
    selection = flash_dmattn.select(score, WINDOW)
    out, lse = flash_dmattn.attention(
        query, key, value, bias=bias, selection=selection, causal=True, deterministic=True
    )
    return out * lse.sigmoid().transpose(1, 2)[..., None]


def merged(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    first = flash_dmattn.attention(query, key[:, :100], value[:, :100], deterministic=True)
    second = flash_dmattn.attention(
        query, key[:, 100:], value[:, 100:], causal=True, deterministic=True
    )
    return flash_dmattn.merge(*first, *second)[0]


FUNCTIONS = [fused, stepwise, merged]


def grads(function: Callable[..., Any], tensors: list[torch.Tensor]) -> Tensors:
    out = function(*tensors)
    learned = tensors[:3] if function is merged else tensors
    return torch.autograd.grad(out.float().cos().sum(), learned)


@pytest.fixture
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_as_on_the_cpu(function: Callable[..., Any]) -> None:
    """Scores are exact numbers, so that both select the same keys."""
    tensors = make_fused()
    with torch.no_grad():  # numbers of few bits, whose sums are exact in every order
        tensors[2].copy_((tensors[2] * 4).round().clamp(-8, 8) / 4)
        tensors[3].copy_((tensors[3] * 64).round() / 64)
        tensors[4].copy_(torch.tensor([0.5, -0.5]))
    on_cpu = [tensor.detach().cpu().requires_grad_() for tensor in tensors]
    for one, other in zip(grads(function, tensors), grads(function, on_cpu)):
        size = other.float().abs().max().item()
        torch.testing.assert_close(one.cpu(), other, rtol=0.05, atol=0.02 * size)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_deterministic_gradients_are_the_same_bits(
    function: Callable[..., Any], dtype: torch.dtype, deterministic: None
) -> None:
    tensors = make_fused(3000, 3000, dtype)
    first = grads(function, tensors)
    for _ in range(20):
        for one, other in zip(grads(function, tensors), first):
            assert torch.equal(one, other)


def test_a_sequence_does_not_depend_on_its_batch(deterministic: None) -> None:
    tensors = make_fused()
    both = grads(fused, tensors)
    for b in range(2):
        rows = [tensor.detach()[b : b + 1].requires_grad_() for tensor in tensors[:3]]
        alone = torch.autograd.grad(fused(*rows, *tensors[3:]).float().cos().sum(), rows)
        for one, other in zip(alone, both):
            assert torch.equal(one, other[b : b + 1])


def test_keys_that_nobody_keeps_are_not_read() -> None:
    name = "scores/saw"
    given, case = make_input(name, torch.bfloat16), CASES[name]
    never = flash_dmattn.select(given.score, case.window).slot[0] < 0
    spoilt = never.T[None, :, :, None]
    with_nan = given._replace(
        key=given.key.masked_fill(spoilt, torch.nan),
        value=given.value.masked_fill(spoilt, torch.nan),
        bias=given.bias.masked_fill(never[None], torch.nan),
    )
    expected = our_gradients(name, given, None, "cuda", deterministic=True)
    for one, other in zip(
        our_gradients(name, with_nan, None, "cuda", deterministic=True), expected
    ):
        assert torch.equal(one, other)
    for gradient in expected[1:3]:
        assert (gradient.cpu()[spoilt.expand_as(gradient)] == 0).all()


def test_nan_in_values_that_the_fused_form_drops() -> None:
    tensors = make_fused()
    key_valid = (torch.arange(300, device="cuda") != 250).expand(2, -1)
    with torch.no_grad():
        for row in (130, 241, 250):
            tensors[2][:, row] = torch.nan
            tensors[1][:, row] = torch.nan

    def run(*given: torch.Tensor) -> torch.Tensor:
        return flash_dmattn.flash_dma_attention(*given, WINDOW, causal=True, key_valid=key_valid)

    found = grads(run, tensors)
    assert all(gradient.isfinite().all() and (gradient != 0).any() for gradient in found)
    for gradient in found[1:3]:
        assert (gradient[:, [130, 241, 250]] == 0).all()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_call_synchronises(function: Callable[..., Any]) -> None:
    tensors = make_fused()
    grads(function, tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        grads(function, tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_graphs(function: Callable[..., Any], deterministic: None) -> None:
    """Forward and backward in one graph, replayed on new inputs."""
    tensors = make_fused()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        grads(function, tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = grads(function, tensors)
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            for tensor in tensors[:3]:
                tensor.copy_(torch.randn_like(tensor))
        expected = grads(function, tensors)
        graph.replay()
        for one, other in zip(found, expected):
            assert torch.equal(one, other)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_compiled_graph(
    function: Callable[..., Any], backend: str, deterministic: None
) -> None:
    torch._dynamo.reset()
    tensors = make_fused()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    learned = tensors[:3] if function is merged else tensors
    found = torch.autograd.grad(compiled(*tensors).float().cos().sum(), learned)
    for one, other in zip(found, grads(function, tensors)):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def test_graphs_that_the_compiler_makes(deterministic: None) -> None:
    """mode="reduce-overhead" captures forward and backward, and replays them."""
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        torch.manual_seed(seed)
        tensors = [torch.randn_like(tensor).requires_grad_() for tensor in make_fused()]
        torch.compiler.cudagraph_mark_step_begin()
        for one, other in zip(grads(compiled, tensors), grads(fused, tensors)):
            torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool, deterministic: None) -> None:
    tensors = make_fused()
    expected = grads(fused, tensors)
    out = checkpoint(fused, *tensors, use_reentrant=use_reentrant)
    out.float().cos().sum().backward()
    for tensor, other in zip(tensors, expected):
        assert torch.equal(tensor.grad, other)


def test_another_stream() -> None:
    """Backward runs on the stream of forward, and does not wait for it."""
    tensors = make_fused()
    expected = grads(stepwise, tensors)
    late = [torch.zeros_like(tensor).requires_grad_() for tensor in tensors]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        with torch.no_grad():
            for tensor, source in zip(late, tensors):
                tensor.copy_(source)
        found = grads(stepwise, late)
        assert not stream.query(), "the call waited"
    stream.synchronize()
    for one, other in zip(found, expected):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_under_autocast(dtype: torch.dtype) -> None:
    """Parameters in float32, attention in 16 bits; one step lowers the loss."""
    torch.manual_seed(0)
    layer = Layer(256, 4, 2, WINDOW).cuda()
    x = torch.randn(2, 300, 256, device="cuda")
    target = torch.randn_like(x)
    losses = []
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    for _ in range(5):
        with torch.autocast("cuda", dtype):
            out = layer(x)
        assert out.dtype == dtype
        loss = (out.float() - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(one.grad.dtype == torch.float32 for one in layer.parameters())
        optimizer.step()
    assert losses[-1] < losses[0]
    with torch.autocast("cuda", dtype):
        out = layer(x)
    narrow = copy.deepcopy(layer).to(dtype)
    found = narrow(x.to(dtype))  # whose scores differ a little, and so some kept keys
    assert found.dtype == dtype and (found - out).abs().mean() < 0.05 * out.abs().mean()


def test_memory_is_linear() -> None:
    """The memory of a step grows with the length, not with its square."""
    peaks = []
    for length in (8192, 16384):
        tensors = make_fused(length, length)
        grads(fused, tensors)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads(fused, tensors)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 2.2 * peaks[0], peaks
