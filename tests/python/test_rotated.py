"""Layers whose rotation and attention are one direct call. It has the results of the three calls
that it stands for, bit for bit, and is not made where something has to see these."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from cases import on_device
from flash_dmattn import DynamicMaskAttention, rotary, rotated
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.usefixtures("direct")
OLD = not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")  # PyTorch 2.4
records = pytest.mark.skipif(OLD, reason="this PyTorch cannot be asked for hooks")
LENGTH = 20


def make_layer(**options: Any) -> DynamicMaskAttention:
    torch.manual_seed(0)
    sizes = {"hidden": 32, "heads": 4, "kv_heads": 2, "window": 5, "initial_a": 1.0}
    return DynamicMaskAttention(**{**sizes, **options})


def make_states(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randn(batch, length, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each try of rotated.repeat() from now on, whether the call was known."""
    found: list[bool] = []

    def repeat(call: rotated.Call) -> Any:
        out = original(call)
        found.append(out is not NotImplemented)
        return out

    original = rotated.repeat
    monkeypatch.setattr(rotated, "repeat", repeat)
    return found


def run(layer: DynamicMaskAttention, x: torch.Tensor, **given: Any) -> list[torch.Tensor]:
    """The output, and the gradients of x and of the parameters that learn."""
    leaf = x.detach().requires_grad_()
    out = layer(leaf, **given)
    learned = [one for one in layer.parameters() if one.requires_grad]
    loss = out.float().cos().sum()
    found = torch.autograd.grad(loss, [leaf, *learned], allow_unused=True)
    return [out.detach(), *(x for x in found if x is not None)]


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, found, wanted))


LAYERS: dict[str, dict[str, Any]] = {
    "default": {},
    "as many kv heads": {"kv_heads": 4},
    "one head": {"heads": 1, "kv_heads": 1},
    "sliding": {"sliding_heads": 2},
    "sliding, sink logits": {"sliding_heads": 2, "sink_logit": True},
    "NoPE": {"nope_heads": 1},
    "dt_bias, sink logits": {"dt_bias": True, "sink_logit": True},
    "rules": {"recent": 3, "sinks": 2, "gap": 0.5},
    "global": {"causal": False},
    "scale and softcap": {"softmax_scale": 0.3, "softcap": 2.0},
    "targets only": {"targets_only": True},
}


@records
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_results_are_equal(name: str, padded: bool, made: list[bool]) -> None:
    layer, x = make_layer(**LAYERS[name]), make_states()
    key_valid = (torch.arange(LENGTH) % 5 != 3).expand(2, -1) if padded else None
    wanted = run(layer, x, key_valid=key_valid)
    for _ in range(2):
        assert_same(run(layer, x, key_valid=key_valid), wanted)
    assert made == [False, True, True]
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(layer(x, key_valid=key_valid), wanted[0])
    assert made[3:] == [False, True]


@records
@on_device
@pytest.mark.parametrize("name", LAYERS)
def test_results_on_a_device(name: str, made: list[bool], deterministic: None) -> None:
    layer = make_layer(**LAYERS[name], device="cuda", dtype=torch.bfloat16)
    x = make_states().to("cuda", torch.bfloat16)
    wanted = run(layer, x)
    for _ in range(2):
        assert_same(run(layer, x), wanted)
    assert made == [False, True, True]


@records
def test_what_does_not_need_gradients(made: list[bool]) -> None:
    layer, x = make_layer(), make_states()
    layer.q_proj.requires_grad_(False)
    x = x.clone()  # q then needs none
    for names in (("k_proj",), ("v_proj",), ("dt_proj",)):
        for one in ("k_proj", "v_proj", "dt_proj"):
            getattr(layer, one).requires_grad_(one in names)
        learned = [one for one in layer.parameters() if one.requires_grad]
        found = [torch.autograd.grad(layer(x).cos().sum(), learned) for _ in range(3)]
        assert_same(list(found[0]), list(found[1]))
        assert_same(list(found[0]), list(found[2]))
    assert made == [False, True, True] * 3


@records
def test_lengths_and_tables(made: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer sequence has another table, and so has a layer with another base."""
    monkeypatch.setattr(rotary, "tables", {})
    layers = [make_layer(), make_layer(rope_base=50.0)]
    cases = [(layer, make_states(1, length)) for length in (9, 700) for layer in layers]
    wanted = [run(*case) for case in cases]
    assert not torch.equal(wanted[0][0], wanted[1][0])
    for case, want in zip(cases * 2, wanted * 2):
        assert_same(run(*case), want)
    assert made[-4:] == [True] * 4


@records
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype: torch.dtype, made: list[bool]) -> None:
    layer, x = make_layer(), make_states()
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    plain = run(layer, x)
    for _ in range(2):
        with torch.autocast("cpu", dtype):
            narrow = [run(layer, x) for _ in range(3)]
            assert narrow[0][0].dtype == dtype
            assert_same(narrow[1], narrow[0])
            assert_same(narrow[2], narrow[0])
        with torch.autocast("cpu", other):
            assert run(layer, x)[0].dtype == other
        assert_same(run(layer, x), plain)
    assert made == [False] + [False, True, True, False, True] + [True] * 5


def overridden(layer: DynamicMaskAttention) -> None:
    attend = layer.attend
    vars(layer)["attend"] = lambda *given: attend(*given)


def hooked(layer: DynamicMaskAttention) -> None:
    layer.k_norm.register_forward_hook(lambda *given: None)


def drops(layer: DynamicMaskAttention) -> None:
    layer.dropout = 0.5


def keeps(layer: DynamicMaskAttention) -> None:
    layer.keeps_states = True


CHANGES: list[Callable[[DynamicMaskAttention], None]] = [overridden, hooked, drops, keeps]


@pytest.mark.parametrize("change", CHANGES)
def test_what_stands_between(
    change: Callable[[DynamicMaskAttention], None], made: list[bool]
) -> None:
    layer, x = make_layer(), make_states()
    for _ in range(2):
        layer(x)
    assert made[-1] is True
    change(layer)
    count = len(made)
    layer(x)
    assert len(made) == count
    assert layer.states is None or layer.states.query.shape == (2, LENGTH, 4, 8)


PARTLY = {"nope_heads": 1, "nope_rotary_dim": 2}


@pytest.mark.parametrize(
    "options", [{"window": None}, {"rope_base": None}, {"qk_norm": True}, PARTLY]
)
def test_other_layers(options: dict[str, Any], made: list[bool]) -> None:
    layer = make_layer(**options)
    layer(make_states())
    assert made == []


def test_arguments_of_other_calls(made: list[bool]) -> None:
    layer, x = make_layer(), make_states(1)
    layer(x, positions=torch.arange(LENGTH)[None])
    layer(x, starts=torch.tensor([0, 7, LENGTH], dtype=torch.int32))
    layer(x, cache=layer.new_cache(1))
    assert made == []


@records
def test_checkpointing_sees_what_is_saved(made: list[bool]) -> None:
    layer, x = make_layer(), make_states().requires_grad_()
    wanted = run(layer, x)
    run(layer, x)
    for _ in range(2):
        out = checkpoint(layer, x, use_reentrant=False)
        found = torch.autograd.grad(out.cos().sum(), x)
        assert torch.equal(found[0], wanted[1])


@records
def test_gradients_where_a_mode_watches(made: list[bool]) -> None:
    """Backward then goes through the dispatcher, which sees all its operators."""
    layer, x = make_layer(), make_states().requires_grad_()
    wanted = run(layer, x)
    out = layer(x)
    assert made == [False, True]
    learned = [one for one in layer.parameters() if one.requires_grad]
    with FlopCounterMode(display=False) as counter:
        found = torch.autograd.grad(out.cos().sum(), [x, *learned])
    assert_same([out.detach(), *found], wanted)
    names = {str(name) for name in counter.get_flop_counts()["Global"]}
    assert any("flash_dma_attention_backward" in name for name in names)


@records
def test_second_derivatives_are_refused() -> None:
    layer, x = make_layer(), make_states().requires_grad_()
    for _ in range(2):
        (first,) = torch.autograd.grad(layer(x).cos().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives are not implemented"):
        first.sum().backward()


def test_errors_are_those_of_the_layer(made: list[bool]) -> None:
    layer, x = make_layer(), make_states()
    for _ in range(2):
        layer(x)
    with pytest.raises(ValueError, match="key_valid"):
        layer(x, key_valid=torch.ones(2, LENGTH + 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="^x: axis 2 has 31 elements"):
        layer(x[..., :31])
    assert torch.equal(layer(x), layer(x)) and made[-1] is True
