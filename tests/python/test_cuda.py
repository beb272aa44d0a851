"""Behaviour that only a CUDA device can show: streams, graphs, waiting, kernels by name, failures.
Other tests with cuda in their names run on a device too. Without one, only one test runs here."""

from __future__ import annotations

import gc
from typing import Any, Callable

import cases
import flash_dmattn
import pytest
import torch
from cases import fused, gradients, make_fused, on_device, results, stepwise
from evaluate import assert_same
from flash_dmattn import _library
from programs import output_of, python
from test_backward import assert_gradients

built = pytest.mark.skipif(not _library.has_cuda(), reason="the library is built without CUDA")
every_function = pytest.mark.parametrize("function", cases.FUNCTIONS)
forward_and_backward = pytest.mark.parametrize("run", [results, gradients])

Run = Callable[..., cases.Tensors]


def on_cuda(q_len: int = 300, kv_len: int = 300, **options: Any) -> list[torch.Tensor]:
    return make_fused(q_len, kv_len, **{"device": "cuda", **options})


@on_device
@pytest.mark.parametrize("name", ["group/2", "later/steps", "padding/left", "head-dim/256"])
def test_every_kernel_of_backward(name: str) -> None:
    """Each is named, because otherwise only the fastest kernel runs."""
    tried = []
    for kernel in cases.kernels_of("backward", ("cuda",)):
        try:
            assert_gradients(name, "cuda", kernel, torch.bfloat16)
        except NotImplementedError:  # a kernel for another head_dim
            continue
        tried.append(kernel)
    assert any(kernel.startswith("cuda/sm80") for kernel in tried)


@on_device
@every_function
def test_gradients_are_those_of_the_cpu(function: Callable[..., Any]) -> None:
    """Scores are exact numbers, so that both devices select the same keys."""
    tensors = on_cuda()
    with torch.no_grad():  # numbers of few bits have exact sums in every order
        tensors[2].copy_((tensors[2] * 4).round().clamp(-8, 8) / 4)
        tensors[3].copy_((tensors[3] * 64).round() / 64)
        tensors[4].copy_(torch.tensor([0.5, -0.5]))
    on_cpu = [tensor.detach().cpu().requires_grad_() for tensor in tensors]
    for one, other in zip(gradients(function, tensors), gradients(function, on_cpu)):
        size = other.float().abs().max().item()
        torch.testing.assert_close(one.cpu(), other, rtol=0.05, atol=0.02 * size)


@on_device
@every_function
@forward_and_backward
def test_the_current_stream_is_used(
    run: Run, function: Callable[..., Any], deterministic: None
) -> None:
    """A call is enqueued on the current stream and does not wait: it reads inputs that are made
    late."""
    tensors = on_cuda()
    expected = run(function, tensors)
    late = [torch.zeros_like(tensor).requires_grad_() for tensor in tensors]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for cycles in (200_000_000, 4_000_000_000):  # 0.1 s; 2 s if the machine is busy
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            with torch.no_grad():
                for tensor, source in zip(late, tensors):
                    tensor.copy_(source)
            found = run(function, late)
            returned_first = not stream.query()
        stream.synchronize()
        if returned_first:
            break
    assert returned_first, "the call waited"
    assert_same(found, expected)


@on_device
def test_streams_have_their_own_workspace() -> None:
    tensors = [on_cuda(q_len, 400) for q_len in (100, 200, 300, 400)]
    expected = [results(stepwise, one) for one in tensors]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in tensors]
    for _ in range(10):
        found = []
        for stream, one in zip(streams, tensors):
            with torch.cuda.stream(stream):
                found.append(results(stepwise, one))
        torch.cuda.synchronize()
        for actual, want in zip(found, expected):
            assert_same(actual, want)


@on_device
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
def test_the_tensors_device_is_used() -> None:
    expected = results(stepwise, on_cuda(device="cuda:0"))
    found = results(stepwise, on_cuda(device="cuda:1"))
    assert torch.cuda.current_device() == 0
    assert all(tensor.device.index == 1 for tensor in found)
    assert_same(tuple(x.cpu() for x in found), tuple(x.cpu() for x in expected))
    query, *rest = on_cuda(device="cuda:0")
    with pytest.raises(ValueError, match="key: is on cuda:0, want cuda:1"):
        fused(query.to("cuda:1"), *rest)


@on_device
@every_function
@forward_and_backward
def test_graphs(run: Run, function: Callable[..., Any], deterministic: None) -> None:
    """One graph of a step, replayed on new inputs."""
    tensors = on_cuda()
    with torch.cuda.stream(torch.cuda.Stream()):
        run(function, tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(function, tensors)
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            for tensor in tensors[:3]:
                tensor.copy_(torch.randn_like(tensor))
        expected = run(function, tensors)
        graph.replay()
        assert_same(found, expected)


@on_device
def test_graphs_that_the_compiler_makes(deterministic: None) -> None:
    """mode="reduce-overhead" captures forward and backward, and replays them."""
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        torch.manual_seed(seed)
        tensors = [torch.randn_like(tensor).requires_grad_() for tensor in on_cuda()]
        torch.compiler.cudagraph_mark_step_begin()
        for one, other in zip(gradients(compiled, tensors), gradients(fused, tensors)):
            torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


@on_device
@every_function
@forward_and_backward
def test_no_call_synchronises(run: Run, function: Callable[..., Any]) -> None:
    tensors = on_cuda()
    run(function, tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(function, tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_device
def test_memory_is_linear() -> None:
    """The memory of a step grows with the length, not with its square."""
    peaks = []
    for length in (8192, 16384):
        tensors = on_cuda(length, length)
        gradients(fused, tensors)
        gc.collect()  # tensors of earlier tests must not go while this one measures
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients(fused, tensors)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 2.2 * peaks[0], peaks


@on_device
@pytest.mark.parametrize("index", range(5))
def test_tensors_of_the_cpu_are_refused(index: int) -> None:
    tensors = on_cuda()
    tensors[index] = tensors[index].detach().cpu()
    # The first tensor that is not on query's device.
    name = ["key", "key", "value", "dt_proj", "a_coef"][index]
    with pytest.raises(ValueError, match=f"{name}: is on c"):
        fused(*tensors)


@on_device
@pytest.mark.parametrize(
    ("dtype", "backend", "words"),
    [(torch.float64, None, "float16"), (torch.bfloat16, "cpu", "cpu")],
)
def test_what_no_kernel_of_the_device_supports(
    dtype: torch.dtype, backend: Any, words: str
) -> None:
    tensors = on_cuda(dtype=dtype)
    with pytest.raises(NotImplementedError, match=words):
        flash_dmattn.attention(*tensors[:3], backend=backend)


# ---- programs of their own ----

ON_CPU = """
import torch, flash_dmattn
x = torch.randn(1, 5, 2, 16)
assert torch.isfinite(flash_dmattn.attention(x, x, x)[0]).all()
"""

NO_DEVICE = """
from flash_dmattn import _library
assert _library.library.fdma_device_count() == 1
assert "cuda" not in flash_dmattn.get_available_backends()
"""

AFTER_A_FAULT = """
x = torch.randn(1, 300, 2, 64, device="cuda", dtype=torch.bfloat16)
flash_dmattn.attention(x, x, x)
torch.cuda.synchronize()
wrong = torch.full((1,), 1000, device="cuda")
try:
    torch.zeros(4, device="cuda").index_select(0, wrong)
    torch.cuda.synchronize()
except RuntimeError:
    pass
try:
    flash_dmattn.attention(x, x, x)
    torch.cuda.synchronize()
    raise SystemExit("the fault does not show")
except RuntimeError as error:
    assert "CUDA" in str(error) or "device" in str(error), error
"""

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


@built
def test_without_a_device_the_cpu_works() -> None:
    output_of(python("-c", ON_CPU + NO_DEVICE + ON_CPU, env={"CUDA_VISIBLE_DEVICES": ""}))


@on_device
def test_after_a_fault_the_cpu_works() -> None:
    output_of(python("-c", ON_CPU + AFTER_A_FAULT + ON_CPU))


@on_device
def test_threads_that_have_not_used_the_device() -> None:
    """The first CUDA call of a thread, and of PyTorch's thread for gradients, is the library's."""
    output_of(python("-c", FRESH_THREADS))


@on_device
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_gradients_of_broadcast_biases_are_the_same_from_run_to_run(heads: int) -> None:
    """Programs for flash-dmattn have a bias for each kv head, and ask for determinism."""
    rows = [torch.randn(1, 300, count, 32, device="cuda").bfloat16() for count in (8, 2, 2)]
    attn_bias = torch.randn(1, heads, 300, 300, device="cuda").bfloat16()
    found = []
    for _ in range(3):
        given = [x.clone().requires_grad_() for x in (*rows, attn_bias)]
        out = flash_dmattn.flash_dmattn_func(
            *given[:3], attn_bias=given[3], is_causal=True, deterministic=True
        )
        found.append(torch.autograd.grad(out.float().square().sum(), given))
    for one, other in ((found[0], found[1]), (found[0], found[2])):
        assert all(torch.equal(a, b) for a, b in zip(one, other))
    assert found[0][3].shape == attn_bias.shape and found[0][3].abs().max() > 0


@on_device
@pytest.mark.parametrize("q_len", [300, 3])
@pytest.mark.parametrize("kv_len", [304, 301])  # whole vectors of 16 bytes, and not
def test_masks_of_numbers_keep_what_those_of_booleans_do(q_len: int, kv_len: int) -> None:
    query = torch.randn(1, q_len, 4, 64, device="cuda").bfloat16()
    key, value = torch.randn(2, 1, kv_len, 2, 64, device="cuda").bfloat16()
    attn_mask = torch.rand(1, 2, q_len, kv_len, device="cuda") < 0.3
    attn_bias = torch.randn(1, 1, q_len, kv_len, device="cuda").bfloat16()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        one, other = (
            flash_dmattn.flash_dmattn_func(query, key, value, mask, attn_bias)
            for mask in (attn_mask, torch.where(attn_mask, 1.0, -1.0).to(dtype))
        )
        assert torch.equal(one, other)
