"""The functions on tensors of a CUDA device: results, streams, graphs, compilation, bad devices.

Without a device only the last tests run."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, Callable

import evaluate
import flash_dmattn
import pytest
import torch
from cases import make_fused
from evaluate import (
    assert_same_specials,
    assert_within,
    kept_keys,
    largest_error,
    visible_keys,
)
from flash_dmattn import _library

BUILT = any(kernel.name.startswith("cuda/") for kernel in _library.kernels())
on_device = pytest.mark.skipif(
    not (torch.cuda.is_available() and _library.library.fdma_device_count() > 1),
    reason="no CUDA device",
)
built = pytest.mark.skipif(not BUILT, reason="the library is built without CUDA")
DTYPES = [torch.float16, torch.bfloat16]
WINDOW = 40

Tensors = list[torch.Tensor]


def make_tensors(
    q_len: int = 150,
    kv_len: int = 300,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    head_dim: int = 64,
) -> Tensors:
    """make_fused() without gradients, a_coef in float32."""
    tensors = make_fused(q_len, kv_len, dtype, head_dim=head_dim, device=device)
    tensors[4] = tensors[4].float()
    return [tensor.detach() for tensor in tensors]


def stepwise(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> Any:
    """All results of the three calls."""
    score, bias = flash_dmattn.score(value, *rest, bias_form="linear")
    selection = flash_dmattn.select(score, WINDOW)
    out, lse = flash_dmattn.attention(
        query, key, value, bias=bias, selection=selection, causal=True
    )
    return out, lse, score, selection.expiry, selection.slot


def fused(*tensors: torch.Tensor) -> torch.Tensor:
    return flash_dmattn.flash_dma_attention(*tensors, keep_window_size=WINDOW, causal=True)


def assert_same(actual: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected)
    else:
        assert len(actual) == len(expected) > 0
        for one, other in zip(actual, expected):
            assert torch.equal(one, other)


def assert_attention(
    results: tuple[torch.Tensor, torch.Tensor],
    tensors: Tensors,
    mask: torch.Tensor,
    **options: Any,
) -> None:
    """out has at most twice the error of a plain evaluation in its dtype, plus a rounding step. lse
    has at most four times that of one in float32: tensor cores truncate sums where a plain
    evaluation rounds, which doubles the error."""
    out, lse = (result.cpu() for result in results)
    given = [tensor.cpu() for tensor in tensors[:3]]
    exact = evaluate.attention(*given, mask, torch.float64, **options)
    assert_within(out, exact.out, evaluate.attention(*given, mask, out.dtype, **options).out)
    assert_same_specials(lse, exact.lse)
    plain = largest_error(evaluate.attention(*given, mask, torch.float32, **options).lse, exact.lse)
    finite = exact.lse[torch.isfinite(exact.lse)]
    step = torch.finfo(torch.float32).eps * finite.abs().max().item()
    assert largest_error(lse, exact.lse) <= 4 * plain + step


@on_device
def test_the_backend_is_there() -> None:
    assert flash_dmattn.get_available_backends()[0] == "cuda"


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_selected(dtype: torch.dtype, causal: bool, head_dim: int) -> None:
    query, key, value, dt_proj, a_coef = make_tensors(dtype=dtype, head_dim=head_dim)
    scope = "causal" if causal else "global"
    score, bias = flash_dmattn.score(value, dt_proj, a_coef)
    selection = flash_dmattn.select(score, WINDOW, scope=scope)
    on_cpu = flash_dmattn.select(score.cpu(), WINDOW, scope=scope)
    assert torch.equal(selection.expiry.cpu(), on_cpu.expiry)
    assert torch.equal(selection.slot.cpu(), on_cpu.slot)
    out, lse = flash_dmattn.attention(
        query, key, value, bias=bias, selection=selection, causal=causal
    )
    assert out.device == query.device and lse.device == query.device
    mask = visible_keys(150, 300, causal, kept_keys(score.cpu(), WINDOW, scope))
    assert_attention((out, lse), [query, key, value], mask, bias=bias.cpu())


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_len", "kv_len"), [(300, 300), (1, 300), (7, 5000), (20, 11)])
def test_dense(dtype: torch.dtype, q_len: int, kv_len: int) -> None:
    query, key, value, *_ = make_tensors(q_len, kv_len, dtype)
    key_valid = (torch.arange(kv_len, device="cuda") % 7 != 3).expand(2, -1)
    out, lse = flash_dmattn.attention(query, key, value, key_valid=key_valid, causal=True)
    mask = visible_keys(q_len, kv_len, True, key_valid=key_valid.cpu())
    assert_attention((out, lse), [query, key, value], mask)


@on_device
def test_one_call_is_its_three_steps() -> None:
    tensors = make_tensors()
    score, bias = flash_dmattn.score(*tensors[2:])
    selection = flash_dmattn.select(score, WINDOW)
    out, _ = flash_dmattn.attention(*tensors[:3], bias=bias, selection=selection, causal=True)
    assert torch.equal(fused(*tensors), out)


@on_device
def test_a_strided_last_axis_is_copied() -> None:
    query, key, value, *_ = make_tensors()
    strided = value.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)
    assert strided.stride(-1) != 1
    expected = flash_dmattn.attention(query, key, value, causal=True)
    assert_same(flash_dmattn.attention(query, key, strided, causal=True), expected)


@on_device
def test_layouts_are_kept_apart() -> None:
    """Alternating calls of different shapes and options give the results of first calls."""
    shapes = [(150, 300), (150, 301), (1, 300), (300, 300)]
    expected = [stepwise(*make_tensors(*shape)) for shape in shapes]
    for _ in range(3):
        for shape, want in zip(shapes, expected):
            assert_same(stepwise(*make_tensors(*shape)), want)


@on_device
@pytest.mark.parametrize("function", [fused, stepwise])
def test_the_current_stream_is_used(function: Callable[..., Any]) -> None:
    """A call is put on the current stream and does not wait: it reads inputs that are made late."""
    tensors = make_tensors()
    expected = function(*tensors)
    late = [torch.zeros_like(tensor) for tensor in tensors]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        for tensor, source in zip(late, tensors):
            tensor.copy_(source)
        found = function(*late)
        assert not stream.query(), "the call waited"
    stream.synchronize()
    assert_same(found, expected)


@on_device
def test_streams_have_their_own_workspace() -> None:
    tensors = [make_tensors(q_len, 400) for q_len in (100, 200, 300, 400)]
    expected = [stepwise(*one) for one in tensors]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in tensors]
    for _ in range(10):
        found = []
        for stream, one in zip(streams, tensors):
            with torch.cuda.stream(stream):
                found.append(stepwise(*one))
        torch.cuda.synchronize()
        for actual, want in zip(found, expected):
            assert_same(actual, want)


@on_device
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
def test_the_tensors_device_is_used() -> None:
    expected = stepwise(*make_tensors(device="cuda:0"))
    found = stepwise(*make_tensors(device="cuda:1"))
    assert torch.cuda.current_device() == 0
    assert all(tensor.device.index == 1 for tensor in found)
    assert_same([tensor.cpu() for tensor in found], [tensor.cpu() for tensor in expected])
    query, *rest = make_tensors(device="cuda:0")
    with pytest.raises(ValueError, match="key: is on cuda:0, want cuda:1"):
        fused(query.to("cuda:1"), *rest)


@on_device
@pytest.mark.parametrize("function", [fused, stepwise])
def test_graphs(function: Callable[..., Any]) -> None:
    tensors = make_tensors()
    function(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = function(*tensors)
    for seed in range(3):
        torch.manual_seed(seed)
        for tensor in tensors[:3]:
            tensor.copy_(torch.randn_like(tensor))
        expected = function(*tensors)
        graph.replay()
        assert_same(found, expected)


@on_device
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("function", [fused, stepwise])
def test_one_compiled_graph(function: Callable[..., Any], backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    tensors = make_tensors()
    assert_same(compiled(*tensors), function(*tensors))


@on_device
def test_no_call_synchronises() -> None:
    tensors = make_tensors()
    stepwise(*tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        stepwise(*tensors)
        fused(*tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_device
@pytest.mark.parametrize("index", range(5))
def test_tensors_of_the_cpu_are_refused(index: int) -> None:
    tensors = make_tensors()
    tensors[index] = tensors[index].cpu()
    name = ["key", "key", "value", "dt_proj", "a_coef"][
        index
    ]  # the first that is not where query is
    with pytest.raises(ValueError, match=f"{name}: is on c"):
        fused(*tensors)


@on_device
def test_types_without_a_kernel_are_refused() -> None:
    tensors = make_tensors(dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="float16"):
        flash_dmattn.attention(*tensors[:3])


@on_device
def test_backends_of_the_cpu_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="cpu"):
        flash_dmattn.attention(*make_tensors()[:3], backend="cpu")


# ---- without a device, or after it has failed ----

ON_CPU = """
import torch, flash_dmattn
x = torch.randn(1, 5, 2, 16)
assert torch.isfinite(flash_dmattn.attention(x, x, x)[0]).all()
"""

NO_DEVICE = """
import ctypes
from flash_dmattn import _library
assert _library.library.fdma_device_count() == 1
assert "cuda" not in flash_dmattn.get_available_backends()
args = _library.ForwardArgs()
for name in ("q", "k", "v", "out"):
    shape = (1, 9, 1, 64)
    setattr(args, name, _library.Tensor(shape=shape, stride=(576, 64, 64, 1), dtype=3, rank=4))
args.exec.device = 1
size = ctypes.c_size_t()
status = _library.library.fdma_forward_workspace(ctypes.byref(args), ctypes.byref(size))
words = _library.library.fdma_last_error().decode()
assert status == _library.CUDA_ERROR, status
assert words.startswith("exec.device: ") and "CUDA" in words, words
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


def run_program(text: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@built
def test_without_a_device_the_cpu_works() -> None:
    run_program(ON_CPU + NO_DEVICE + ON_CPU, CUDA_VISIBLE_DEVICES="")


@on_device
def test_after_a_fault_the_cpu_works() -> None:
    run_program(ON_CPU + AFTER_A_FAULT + ON_CPU)
