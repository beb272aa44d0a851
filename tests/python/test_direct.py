"""Direct calls, without PyTorch's dispatcher: when they are made, and that results are the same."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
from typing import Any, Callable, List

import flash_dmattn
import pytest
import torch
from cases import make_small, require_gradients
from evaluate import assert_same
from flash_dmattn import _call, _repeat, autograd, ops
from programs import Seen
from routes import forget, send_to_dispatcher
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

OLD = not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")  # PyTorch 2.4
records = pytest.mark.skipif(OLD, reason="this PyTorch cannot be asked for hooks")
Tensors = List[torch.Tensor]
pytestmark = pytest.mark.usefixtures("direct")


def fused(*tensors: torch.Tensor, window: Any = 4, **options: Any) -> Any:
    return flash_dmattn.flash_dma_attention(*tensors, window, causal=True, **options)


def gradients(tensors: Tensors, function: Callable[..., Any] = fused) -> Any:
    return torch.autograd.grad(function(*tensors).cos().sum(), tensors)


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that the dispatcher calls from now on. No call is remembered from before."""
    called: list[str] = []

    def spied(operator: ops.Operator, arguments: tuple[Any, ...]) -> Any:
        called.append(operator.name)
        return call(operator, arguments)

    call = _call.call
    monkeypatch.setattr(_call, "call", spied)
    monkeypatch.setattr(_repeat, "call_operator", forget)
    monkeypatch.setattr(_call, "memory", _call.Memory())
    return called


OPTIONS = {
    "keep_window_size": 4,
    "recent": 0,
    "sinks": 0,
    "scope": "causal",
    "bias_form": "exp",
    "causal": True,
    "softmax_scale": 0.0,
    "softcap": 0.0,
    "dropout_p": 0.0,
    "gap": 0.0,
    "deterministic": False,
    "backend": None,
}


def dispatch(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """The operator of flash_dma_attention(), as compiled graphs call it; test_operators.py has more
    about it."""
    return ops.FUSED.op(*tensors, *6 * [None], *{**OPTIONS, **options}.values())


def with_lse(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return fused(*tensors, return_lse=True)


Function = Callable[..., Any]
has_guards = pytest.mark.skipif(
    not (_repeat.CAN_ASK and _repeat.has_guards()), reason="this PyTorch has no guards"
)
every_route = pytest.mark.parametrize("call", [with_lse, pytest.param(dispatch, marks=has_guards)])


def by_dispatcher(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The result of `run` if no direct call is made or remembered."""
    with monkeypatch.context() as patch:
        send_to_dispatcher(patch)
        return run()


def test_eager_calls_are_direct(dispatched: list[str]) -> None:
    tensors = make_small()
    for _ in range(2):
        with torch.no_grad():
            fused(*tensors)
            flash_dmattn.attention(*tensors[:3], causal=True)
            scores, _ = flash_dmattn.score(tensors[2], *tensors[3:])
            flash_dmattn.select(scores, 3)
            cache = flash_dmattn.DynamicMaskCache(1, 2, 2, 8, 4)
            cache.attend(0, *(x[:, :1] for x in tensors[:3]), *tensors[3:])
    assert dispatched == []


@records
def test_recorded_calls_are_direct(dispatched: list[str]) -> None:
    for _ in range(2):
        gradients(require_gradients(make_small()))
        gradients(require_gradients(make_small()), lambda *x: fused(*x, return_lse=True)[1])
        gradients(
            require_gradients(make_small())[:3],
            lambda *x: flash_dmattn.attention(*x, causal=True)[0],
        )
    assert dispatched == []


@records
def test_only_out_and_lse_have_gradients() -> None:
    options = (4, 0, 0, "causal", "exp", True, 0.0, 0.0, 0.0, 0.0, False, None)
    for _ in range(2):
        results = ops.FUSED(*require_gradients(make_small()), *6 * [None], *options)
        assert [x.requires_grad for x in results] == [True, True, *4 * [False]]


@records
def test_results_that_are_not_used_have_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def spied(call: Any, dout: Any, dlse: Any, kept: Any) -> Any:
        seen.append(dlse)
        return call_backward(call, dout, dlse, kept)

    call_backward = autograd.call_backward
    monkeypatch.setattr(autograd, "call_backward", spied)
    for _ in range(2):
        gradients(
            require_gradients(make_small())[:3],
            lambda *x: flash_dmattn.attention(*x, causal=True)[0],
        )
    assert seen == [None, None]


def test_masks_and_biases_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(learns_bias: bool) -> Any:
        torch.manual_seed(2)
        rows = require_gradients(make_small()[:3])
        bias = torch.randn(1, 1, 20, 20, requires_grad=learns_bias)
        mask = torch.rand(1, 2, 20, 20) < 0.6
        out, lse = flash_dmattn.attention(*rows, attn_mask=mask, attn_bias=bias, causal=True)
        loss = out.cos().sum() + lse.clamp(-9).cos().sum()
        return torch.autograd.grad(loss, [*rows, bias] if learns_bias else rows)

    for learns_bias in (False, True, False):
        wanted = by_dispatcher(lambda: run(learns_bias), monkeypatch)  # noqa: B023
        assert_same(run(learns_bias), wanted)


@records
def test_known_calls_of_flash_dmattn_func_are_not_checked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(learns: bool) -> Any:
        rows = [x.requires_grad_(learns) for x in make_small()[:3]]
        pairs = torch.rand(1, 2, 20, 20) < 0.6, torch.randn(1, 1, 20, 20, requires_grad=learns)
        out = flash_dmattn.flash_dmattn_func(*rows, *pairs, is_causal=True)
        mask, bias = pairs
        wanted = flash_dmattn.attention(*rows, attn_mask=mask, attn_bias=bias, causal=True)[0]
        return [
            torch.autograd.grad(x.cos().sum(), [*rows, bias]) if learns else x
            for x in (out, wanted)
        ]

    for learns in (False, True):
        with monkeypatch.context() as patch:
            assert_same(*run(learns))
            for name in ("attend", "attend_alone"):
                patch.setattr(f"flash_dmattn.dmattn.{name}", None)
            assert_same(*run(learns))


def shift(x: torch.Tensor) -> torch.Tensor:
    """The same numbers at an address that is not a multiple of 16."""
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


@every_route
def test_layouts_are_told_apart(
    call: Function, monkeypatch: pytest.MonkeyPatch, seen: list[Seen]
) -> None:
    """Calls of other shapes, strides, alignments and dtypes alternate. The results are as from
    calls that are looked up by layout."""
    whole = [x.contiguous() for x in make_small(24)]
    layouts = [
        whole,
        [*(x[:, :17] for x in whole[:3]), *whole[3:]],
        [*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in whole[:3]), *whole[3:]],
        [*map(shift, whole)],
        [*whole[:4], shift(whole[4])],
        [x.bfloat16() for x in whole],
        [*(x.bfloat16() for x in whole[:3]), *whole[3:]],
        [x[:1] for x in whole[:3]] + whole[3:],
        [whole[0][:, -9:], *whole[1:]],
        [torch.nn.Parameter(whole[0]), *whole[1:]],
    ]
    with torch.no_grad():
        wanted = [by_dispatcher(lambda: call(*x), monkeypatch) for x in layouts]  # noqa: B023
        for _ in range(3):
            for tensors, expected in zip(layouts, wanted):
                assert_same(call(*tensors), expected)
    assert len({one.alignments for one in seen}) == 3
    known: dict[Any, Any] = {}
    for one in seen:
        assert known.setdefault(one.prepared, one.alignments) == one.alignments


def test_alignments_are_told_apart() -> None:
    """Kernels depend on alignment."""
    whole = make_small(24)
    shifted = [*map(shift, whole)]
    with torch.no_grad():
        for _ in range(3):
            for tensors in (whole, shifted, [*whole[:4], shifted[4]]):
                fused(*tensors)
    for calls in _call.memory.direct.values():
        assert len({tuple(call.alignments) for call in calls}) == len(calls) == 3


@records
def test_requires_grad_is_told_apart() -> None:
    """requires_grad of any tensor, and grad mode, change in turn."""
    tensors = make_small()
    for _ in range(2):
        assert not fused(*tensors).requires_grad
        for at in range(5):
            given = [*tensors]
            given[at] = tensors[at].clone().requires_grad_()
            with torch.no_grad():
                fused(*given)
            out = fused(*given)
            (gradient,) = torch.autograd.grad(out.cos().sum(), [given[at]])
            assert gradient.abs().sum() > 0
            with torch.no_grad():
                assert not fused(*given).requires_grad
            with torch.inference_mode():
                assert fused(*given).is_inference()


def test_what_watches_sees_operators(dispatched: list[str]) -> None:
    tensors = make_small()
    fused(*tensors)
    seen: list[str] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with FlopCounterMode(display=False) as counter:
        fused(*tensors)
    assert counter.get_total_flops() > 0
    with Mode():
        fused(*tensors)
    assert any("flash_dma_output" in name for name in seen)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fused(*tensors)
    assert any(event.key == "flash_dmattn::flash_dma_output" for event in profile.key_averages())
    traced = torch.jit.trace(lambda *x: fused(*x), tuple(tensors), check_trace=False)
    assert "flash_dma_output" in str(traced.graph)
    assert len(dispatched) >= 4


def test_fake_tensors_first() -> None:
    """The calls that a thread remembers are real, though its first call was on fake tensors."""
    tensors = make_small()
    with FakeTensorMode() as mode:
        fused(*map(mode.from_tensor, tensors))
    wanted = fused(*(x.clone() for x in tensors), backend="reference")
    torch.testing.assert_close(fused(*tensors), wanted)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_see_operators(dispatched: list[str]) -> None:
    tensors = make_small()
    wanted = fused(*tensors)
    mapped = torch.func.vmap(lambda query: fused(query, *tensors[1:]))(tensors[0][None])
    assert torch.equal(mapped[0], wanted)
    found = torch.func.grad(lambda *x: fused(*x).cos().sum())(*tensors)
    assert torch.equal(found, gradients(require_gradients(tensors))[0])
    assert dispatched


class Subclass(torch.Tensor):
    pass


def test_other_tensors_go_the_long_way(dispatched: list[str]) -> None:
    tensors = make_small()
    with torch.no_grad():
        run_others(tensors, fused(*tensors), dispatched)


def run_others(tensors: Tensors, wanted: torch.Tensor, dispatched: list[str]) -> None:
    assert not dispatched
    assert torch.equal(fused(tensors[0].as_subclass(Subclass), *tensors[1:]), wanted)
    negative = torch._neg_view(-tensors[0])  # its memory holds other numbers
    assert torch.equal(fused(negative, *tensors[1:]), wanted)
    assert fused(*(x.to("meta") for x in tensors)).is_meta
    spread = torch.stack((tensors[0], tensors[0]), -1)[..., 0]
    assert torch.equal(fused(spread, *tensors[1:]), wanted)
    same = flash_dmattn.attention(tensors[0], tensors[0], tensors[0])[0]
    copies = flash_dmattn.attention(*(tensors[0].clone() for _ in range(3)))[0]
    assert torch.equal(same, copies)
    assert len(dispatched) == 4


@records
def test_hooks_for_saved_tensors() -> None:
    tensors = require_gradients(make_small())
    wanted = gradients(tensors)  # a direct call is remembered
    packed: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        packed.append(x)
        return x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = fused(*tensors)
    assert len(packed) >= 8
    assert_same(torch.autograd.grad(out.cos().sum(), tensors), wanted)


def test_arguments_are_checked_after_others_like_them() -> None:
    tensors = make_small()
    fused(*tensors, window=1)
    with pytest.raises(TypeError, match="keep_window_size: is True, a bool, want an int"):
        fused(*tensors, window=True)
    with pytest.raises(TypeError, match="keep_window_size: is 1.0, a float, want an int"):
        fused(*tensors, window=1.0)
    with pytest.raises(ValueError, match="recent: is -1, want 0 or more"):
        fused(*tensors, recent=-1)
    with pytest.raises(ValueError, match="value: axis 1 has 20 elements, key has 19"):
        fused(tensors[0], tensors[1][:, :19], *tensors[2:], scope="global")


@pytest.mark.parametrize("at", [0, 1, 2])
def test_nested_tensors_after_others(at: int) -> None:
    """PyTorch's guards throw an exception of C++ for them, which would end the process."""
    tensors = make_small()
    names = ("query", "key", "value")
    fused(*tensors)
    tensors[at] = torch.nested.nested_tensor(list(tensors[at].detach()))
    with pytest.raises(NotImplementedError, match=f"^{names[at]}: layout is nested, want a dense"):
        fused(*tensors)


def test_autocast_is_followed() -> None:
    tensors = make_small()
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        assert fused(*tensors).dtype == torch.float32
        with torch.autocast("cpu", dtype):
            assert fused(*tensors).dtype == dtype
            narrow = [x.bfloat16() for x in tensors]
            assert fused(*narrow).dtype == dtype


@every_route
def test_threads_have_their_own(call: Function) -> None:
    """Threads make calls of one layout at once, and another thread computes gradients."""
    inputs = [require_gradients(make_small()) for _ in range(4)]
    for at, tensors in enumerate(inputs):
        tensors[0].data *= at + 1

    def learn(tensors: Tensors) -> Any:
        return gradients(tensors, lambda *x: call(*x)[0])

    wanted = [learn(tensors) for tensors in inputs]
    found: dict[int, list[Any]] = {at: [] for at in range(4)}

    def run(at: int) -> None:
        for _ in range(50):
            found[at].append(learn(inputs[at]))

    threads = [threading.Thread(target=run, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at, expected in enumerate(wanted):
        assert len(found[at]) == 50
        for one in found[at]:
            assert_same(one, expected)


def test_few_layouts_are_tried() -> None:
    """However many there are, the oldest ones of the same options are forgotten."""
    with torch.no_grad():
        for length in range(2, 20):
            fused(*make_small(length))
    assert max(map(len, _call.memory.direct.values())) <= _repeat.LAYOUTS_MAX


def count_references(objects: list[Any]) -> list[int]:
    return [sys.getrefcount(x) for x in objects]


def test_nothing_leaks() -> None:
    """Calls leak neither references nor memory."""
    plain, learned = make_small(8), require_gradients(make_small(8))
    window, softcap = 1000003, 2.5
    cache = flash_dmattn.DynamicMaskCache(1, 2, 2, 8, 4)

    def run(times: int) -> None:
        for _ in range(times):
            with torch.no_grad():
                fused(*plain, window=window, softcap=softcap)
                dispatch(*plain, softcap=softcap)
                cache.attend(0, *(x[:, :1] for x in plain[:3]), *plain[3:])
            torch.autograd.grad(fused(*learned, window=window).sum(), learned)
            torch.autograd.grad(flash_dmattn.attention(*learned[:3])[1].sum(), learned[:2])

    run(20)
    calls = [call for calls in _call.memory.direct.values() for call in calls]
    watched = [*plain, *learned, window, softcap, torch.Tensor, torch.float32, ops.FUSED, *calls]
    watched += [NotImplemented, *(x.native for x in calls), *(x.prepared for x in calls)]
    gc.collect()
    before = count_references(watched)
    tracemalloc.start()
    try:
        run(300)  # free lists of the interpreter fill up
        gc.collect()
        start, _ = tracemalloc.get_traced_memory()
        run(900)  # five calls each
        gc.collect()
        end, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    grown = [one for one, old in zip(count_references(watched), before) if one > old + 8]
    assert grown == []
    assert end - start < 60_000  # an int for each call takes more


@every_route
def test_errors_of_repeated_calls(call: Function) -> None:
    """The message is the C library's, and the next call works."""
    tensors = make_small()
    with torch.no_grad():
        wanted = call(*tensors)
        (prepared,) = _call.memory.prepared.values()
        prepared.args.exec.workspace_size = 1
        for _ in range(2):
            with pytest.raises(RuntimeError, match="workspace_size: is 1 byte, want"):
                call(*tensors)
        prepared.args.exec.workspace_size = prepared.workspace_size
        assert_same(call(*tensors), wanted)


@records
def test_errors_of_recorded_calls() -> None:
    tensors = require_gradients(make_small())
    fused(*tensors)
    (prepared,) = {call.prepared for x in _call.memory.direct.values() for call in x}
    prepared.args.exec.workspace_size = 1
    with pytest.raises(RuntimeError, match="workspace_size: is 1 byte, want"):
        fused(*tensors)
    prepared.args.exec.workspace_size = prepared.workspace_size
    assert fused(*tensors).requires_grad


@records
def test_gradients_again_where_a_mode_watches(dispatched: list[str]) -> None:
    """Backward of a direct call through the dispatcher, which gets the bundled results."""
    tensors = require_gradients(make_small())
    wanted = gradients(tensors)
    out = fused(*tensors)
    loss = out.cos().sum()
    with FlopCounterMode(display=False):
        found = torch.autograd.grad(loss, tensors)
    assert dispatched == ["flash_dma_attention_backward"]
    assert_same(found, wanted)


def test_without_guards(monkeypatch: pytest.MonkeyPatch, dispatched: list[str]) -> None:
    """A PyTorch with other guards."""
    tensors = make_small()
    _repeat.has_guards.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(_repeat, "GUARDS", None)
        out = fused(*tensors)
    _repeat.has_guards.cache_clear()
    assert dispatched == ["flash_dma_output"]
    assert torch.equal(out, fused(*tensors))


def test_without_the_module(dispatched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls go through the dispatcher, and the first one warns."""
    tensors = make_small()
    wanted = fused(*tensors)
    assert not dispatched
    monkeypatch.setattr(_repeat, "NATIVE", None)
    monkeypatch.setattr(_repeat, "repeat", _repeat.repeat_nothing)
    _repeat.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="the extension module _native is missing") as warned:
        found = [fused(*tensors) for _ in range(3)]
    assert len(warned) == 1 and dispatched == 3 * ["flash_dma_output"]
    for one in found:
        assert torch.equal(one, wanted)
