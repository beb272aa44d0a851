"""Operators, as compiled graphs call them: the direct calls that they remember, and that these are
made for nothing else."""

from __future__ import annotations

from typing import Any, Callable, List

import flash_dmattn
import pytest
import torch
import torch._dynamo
from cases import make_small, require_gradients
from evaluate import assert_same
from flash_dmattn import _call, _repeat, ops
from programs import Seen
from test_direct import OPTIONS, Subclass, by_dispatcher, dispatch, has_guards
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils.flop_counter import FlopCounterMode

pytestmark = [pytest.mark.usefixtures("direct"), has_guards]
Tensors = List[torch.Tensor]


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    torch._dynamo.reset()


def attend(*tensors: torch.Tensor) -> torch.Tensor:
    return flash_dmattn.flash_dma_attention(*tensors, 4, causal=True)


def compiled(function: Callable[..., Any] = attend) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False)


def gradients(function: Callable[..., Any], tensors: Tensors) -> tuple[torch.Tensor, ...]:
    out = function(*tensors)
    return (out.detach(), *torch.autograd.grad(out.cos().sum(), tensors))


def not_again(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The result of `run`, which fails if a layout is looked for: all its calls must be
    remembered."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a layout is looked for")

    with monkeypatch.context() as patch:
        patch.setattr(_call, "find", refuse)
        return run()


def remembered() -> list[_repeat.DirectCall]:
    """The direct calls of operators. Their keys begin with a tuple, keys of functions do not."""
    items = _call.memory.direct.items()
    return [call for key, calls in items if isinstance(key[0], tuple) for call in calls]


def test_operators_make_direct_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, leaves, graph = make_small(), require_gradients(make_small()), compiled()
    wanted = gradients(attend, leaves)
    found = dispatch(*tensors)
    for _ in range(2):  # a mode watches while the graph is made
        assert_same(gradients(graph, leaves), wanted)
    for _ in range(2):
        assert_same(not_again(lambda: dispatch(*tensors), monkeypatch), found)
        assert_same(not_again(lambda: gradients(graph, leaves), monkeypatch), wanted)
    names = {call.prepared.operation.name for call in remembered()}
    assert names == {"flash_dma_attention", "flash_dma_attention_backward"}


def test_compiled_layouts_are_told_apart() -> None:
    """A graph for all lengths, and gradients."""
    graph = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for _ in range(2):
        for length in (20, 33, 12, 47, 9, 28):
            leaves = require_gradients(make_small(length))
            assert_same(gradients(graph, leaves), gradients(attend, leaves))


def test_requires_grad_is_told_apart() -> None:
    """requires_grad of any tensor, grad mode and inference mode change in turn."""
    tensors, graph = make_small(), compiled()
    plain = attend(*tensors)
    for _ in range(2):
        assert torch.equal(graph(*tensors), plain)
        for at in (0, 2, 4):
            given = [*tensors]
            given[at] = tensors[at].clone().requires_grad_()
            out = graph(*given)
            (found,) = torch.autograd.grad(out.cos().sum(), [given[at]])
            (wanted,) = torch.autograd.grad(attend(*given).cos().sum(), [given[at]])
            assert torch.equal(out, plain) and torch.equal(found, wanted)
            with torch.no_grad():
                assert not dispatch(*given)[0].requires_grad
            assert dispatch(*given)[0].requires_grad
        with torch.inference_mode():
            assert dispatch(*tensors)[0].is_inference()
        assert not dispatch(*tensors)[0].is_inference()


def test_options_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_small()
    changes: list[dict[str, Any]] = [
        *({}, {"keep_window_size": 1}, {"keep_window_size": 7}, {"recent": 1}, {"sinks": 1}),
        *({"scope": "global"}, {"causal": False, "scope": "global"}, {"bias_form": "linear"}),
        *({"bias_form": "none"}, {"softmax_scale": 1.0}, {"softcap": 1.0}, {"gap": 1.0}),
        {"backend": "reference"},
    ]
    wanted = [by_dispatcher(lambda: dispatch(*tensors, **x), monkeypatch) for x in changes]  # noqa: B023
    for _ in range(3):
        for options, expected in zip(changes, wanted):
            assert_same(dispatch(*tensors, **options), expected)


def test_tensors_that_may_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor at one argument is not taken for an equal one at another."""
    query, key, value = make_small()[:3]
    length = torch.tensor([9, 20], dtype=torch.int32)
    options = (0, 0, 0, "causal", True, 0.0, 0.0, 0.0, False, None)

    def run(at: int | None) -> Any:
        others: list[Any] = 11 * [None]
        if at is not None:
            others[at] = length if at == 3 else torch.arange(40).view(2, 20) % 3 != 1
        return ops.ATTENTION.op(query, key, value, *others, *options)

    wanted = [by_dispatcher(lambda: run(at), monkeypatch) for at in (None, 1, 3)]  # noqa: B023
    for _ in range(3):
        for at, expected in zip((None, 1, 3), wanted):
            assert_same(run(at), expected)


def test_the_number_of_threads_is_followed(seen: list[Seen]) -> None:
    tensors, before = make_small(), torch.get_num_threads()
    counts = (1, 2, 3, 1, 3, 2)
    try:
        for count in counts:
            torch.set_num_threads(count)
            dispatch(*tensors)
            dispatch(*tensors)
    finally:
        torch.set_num_threads(before)
    assert [one.threads for one in seen] == [count for count in counts for _ in range(2)]


def test_the_deterministic_switch_is_followed(seen: list[Seen]) -> None:
    """A graph that was made before follows a change of the switch."""
    leaves, graph, switches = (
        require_gradients(make_small()),
        compiled(),
        (False, True, False, True),
    )
    for switch in switches:
        torch.use_deterministic_algorithms(switch)
        try:
            gradients(graph, leaves)
        finally:
            torch.use_deterministic_algorithms(False)
    backward = [one.deterministic for one in seen if one.name.endswith("backward")]
    assert backward == [*switches]


def test_tensors_that_no_guard_tells() -> None:
    """After a call with plain tensors of the same layouts."""
    query, key, value = make_small()[:3]

    def dense(*tensors: torch.Tensor) -> torch.Tensor:
        options = (0, 0, 0, "causal", True, 0.0, 0.0, 0.0, False, None)
        return ops.ATTENTION.op(*tensors, *11 * [None], *options)[0]

    wanted = dense(query, key, value)
    spread = torch.stack((query, query), -1)[..., 0]
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(dense(query, key, value), wanted)
            assert torch.equal(dense(query.as_subclass(Subclass), key, value), wanted)
            assert torch.equal(dense(torch._neg_view(-query), key, value), wanted)
            assert torch.equal(dense(spread, key, value), wanted)
            assert torch.equal(dense(query, key, key), dense(query, key, key.clone()))
            assert dense(*(x.to("meta") for x in (query, key, value))).is_meta
    # With and without grad mode; the operator, and the one that it calls for want of gradients.
    assert len(remembered()) == 4


def test_tensors_that_are_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache, and gradients that are added to or begin as zeros."""
    query, key, value, dt_proj, a_coef = make_small(1)
    _, _, values, *_ = make_small()
    dbias = torch.randn(2, 2, 20, generator=torch.Generator().manual_seed(3))

    def run() -> Any:
        cache = flash_dmattn.DynamicMaskCache(1, 2, 2, 8, 4)
        found = []
        with torch.no_grad():
            for step in range(8):
                given = [x * (step + 1) for x in (query, key, value)]
                found.append(attend_to(cache, given))
                found += ops.SCORE_BACKWARD.op(
                    dbias, values, dt_proj, a_coef, *3 * [None], "exp", None
                )
                dvalue = values.clone()
                found += ops.SCORE_BACKWARD_ADDED.op(
                    dbias, values, dt_proj, a_coef, *3 * [None], dvalue, "exp", None
                )
                found.append(dvalue)
        return tuple(found)

    def attend_to(cache: Any, given: Tensors) -> torch.Tensor:
        with monkeypatch.context() as patch:  # as if something watches
            patch.setattr(ops.Operator, "__call__", ops.Operator.dispatch)
            return cache.attend(0, *given, dt_proj, a_coef)

    wanted = by_dispatcher(run, monkeypatch)
    for _ in range(2):
        assert_same(run(), wanted)
    assert_same(not_again(run, monkeypatch), wanted)
    assert {"decode", "score_backward", "score_backward_added"} == {
        call.prepared.operation.name for call in remembered()
    }


def test_layouts_in_turns_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither layouts of the same shapes nor lengths are forgotten."""
    made: list[Any] = []
    prepare = _repeat.DirectCall.__init__

    def spied(self: Any, *rest: Any) -> None:
        made.append(self)
        prepare(self, *rest)

    monkeypatch.setattr(_repeat.DirectCall, "__init__", spied)
    whole = make_small(24)
    spaced = [torch.cat((x, x), 1) for x in whole[:3]]
    strides = [[x.clone() for x in whole] for _ in range(7)]
    for at in range(7):
        for index in range(3):
            if at >> index & 1:
                strides[at][index] = spaced[index][:, :24]
    for _ in range(4):
        for tensors in strides:
            dispatch(*tensors)
    assert len(made) == 14  # also for the operator that it calls for want of gradients
    lengths = [make_small(length) for length in range(2, 12)]
    for tensors in lengths:
        dispatch(*tensors)
    for _ in range(2):
        for tensors in lengths:
            not_again(lambda: dispatch(*tensors), monkeypatch)  # noqa: B023
    assert len(made) == 34
    assert max(map(len, _call.memory.direct.values())) <= _repeat.LAYOUTS_MAX


def test_few_layouts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_call, "LAYOUTS_MAX", 4)
    for length in range(2, 20):
        dispatch(*make_small(length))
        assert len(_call.memory.prepared) <= 4 and len(_call.memory.direct) <= 4
    tensors = make_small()
    with torch.no_grad():
        for at in range(32):  # all combinations of tensors that require gradients
            dispatch(*(x.clone().requires_grad_(bool(at >> n & 1)) for n, x in enumerate(tensors)))
    assert max(map(len, _call.memory.direct.values())) <= _repeat.LAYOUTS_MAX


def test_what_watches_sees_remembered_calls() -> None:
    tensors = make_small()
    with torch.no_grad():
        for _ in range(2):
            dispatch(*tensors)
        with FlopCounterMode(display=False) as counter:
            dispatch(*tensors)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            dispatch(*tensors)
    assert counter.get_total_flops() > 0
    assert any(one.key == "flash_dmattn::flash_dma_attention" for one in profile.key_averages())


def test_keywords() -> None:
    tensors = make_small()
    wanted = dispatch(*tensors)
    for _ in range(2):
        named = dict(zip(ops.FUSED.arguments, (*tensors, *6 * [None], *OPTIONS.values())))
        assert_same(ops.FUSED.op(**named), wanted)
        assert_same(ops.FUSED.op(named.pop("query"), **named), wanted)


def test_lengths_that_are_symbols() -> None:
    """PyTorch's own tensors with them have the type of plain ones."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 3)
    lse = mode.from_tensor(torch.zeros(2, 4, 20), symbolic_context=dynamic)
    tensor = torch._to_functional_tensor(lse)
    assert type(tensor) is torch.Tensor and not isinstance(tensor.shape[2], int)
    for _ in range(2):
        expiry, _ = ops.SELECT.op(tensor, *3 * [None], 3, 0, 0, "causal", 0.0, None)
        assert expiry.shape == tensor.shape


@pytest.mark.parametrize("at", [0, 1, 11])
def test_arguments_of_another_type(at: int) -> None:
    """PyTorch refuses them, after a call like theirs too."""
    arguments = [*make_small(), *6 * [None], *OPTIONS.values()]
    ops.FUSED.op(*arguments)
    ops.FUSED.op(*arguments)
    for wrong in ("text", object(), 1.5):
        with pytest.raises(RuntimeError, match=r"flash_dmattn::flash_dma_attention\(\) Expected"):
            ops.FUSED.op(*arguments[:at], wrong, *arguments[at + 1 :])
    with pytest.raises(RuntimeError, match="missing value"):
        ops.FUSED.op()


def test_without_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch with other guards."""
    tensors = make_small()
    wanted = dispatch(*tensors)
    with monkeypatch.context() as patch:
        patch.setattr(_repeat, "has_guards", lambda: False)
        patch.setattr(_call, "memory", _call.Memory())
        for _ in range(2):
            assert_same(dispatch(*tensors), wanted)
        assert not remembered()
