"""Rotary embedding: tables, rotations and layers against the formulas in float64."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import flash_dmattn
import pytest
import torch
import torch._dynamo.testing
from cases import DEVICES
from flash_dmattn import onnx, ops, rotary
from flash_dmattn.rotary import rotary_table, rotate
from programs import output_of, python

FAR = 1 << 20
DTYPES = {"cpu": ("float32", "float16", "bfloat16", "float64"), "cuda": ("float16", "bfloat16")}


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def frequencies(dim: int, base: float = 10000.0) -> torch.Tensor:
    return base ** (-torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))


def by_formula(
    x: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    factor: float = 1.0,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    nope_heads: int = 0,
    interleaved: bool = False,
) -> torch.Tensor:
    """x rotated in its own dtype, by the angles in float64. positions are [batch or 1, len]."""
    pairs = inv_freq.shape[0]
    angles = positions.double()[..., None, None] * inv_freq
    cos, sin = ((factor * one).to(x.dtype) for one in (angles.cos(), angles.sin()))
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.to(x.dtype)
    of_rotated, rest = x.tensor_split([2 * pairs], 3)
    shape = (pairs, 2) if interleaved else (2, pairs)
    one, other = of_rotated.unflatten(3, shape).unbind(4 if interleaved else 3)
    turned = torch.stack(
        (one * cos - other * sin, other * cos + one * sin), 4 if interleaved else 3
    )
    out = torch.cat((turned.flatten(3), rest), 3)
    heads = x.shape[2] - nope_heads
    return torch.cat((out[:, :, :heads], x[:, :, heads:]), 2)


def assert_near(
    found: torch.Tensor, exact: torch.Tensor, plain: Sequence[torch.Tensor], most_angle: float
) -> None:
    """`found` errs at most twice as much as the worst of `plain`, plus a rounding of the result,
    plus what the formula's own angles and sums in float64 may be off."""
    size = exact.abs().max().item()
    rounding = size * torch.finfo(found.dtype).eps
    error = max((one.double() - exact).abs().max().item() for one in plain)
    doubt = size * 2**-50 * (1 + most_angle)
    difference = (found.double().cpu() - exact).abs().max().item()
    assert difference <= 2 * error + rounding + doubt


# ---- tables ----


@pytest.mark.parametrize("device", DEVICES)
def test_tables_are_exact(device: str) -> None:
    """The difference from float64 is a rounding, and what an angle in float64 may be off."""
    for first, dim, base in ((0, 64, 1e4), (FAR + 1, 128, 5e5), (2**31 - 60, 8, 1e4)):
        found = rotary_table(50, dim, base=base, first=first, device=device).double().cpu()
        angles = (first + torch.arange(50).double())[:, None] * frequencies(dim, base)
        exact = torch.cat((angles.cos(), angles.sin()), 1)
        torch.testing.assert_close(found, exact, rtol=2**-24, atol=2**-50 * angles.max().item())


@pytest.mark.parametrize("device", DEVICES)
def test_tables_of_given_positions_and_frequencies(device: str) -> None:
    positions = ints(3, -5, FAR, 0, 2**31 - 1, 3).to(device)
    whole = rotary_table(6, 16, base=500.0, device=device)
    listed = rotary_table(positions, 16, base=500.0)
    assert torch.equal(listed[0], whole[3]) and torch.equal(listed[3], whole[0])
    assert torch.equal(listed[1], torch.cat((whole[5, :8], -whole[5, 8:])))  # cos and -sin of 5
    inv_freq = frequencies(16, 500.0).to(device)
    given = rotary_table(positions, 16, inv_freq=inv_freq, factor=1.5)
    torch.testing.assert_close(given, 1.5 * listed, rtol=1e-6, atol=1e-6)
    wide = rotary_table(6, 16, base=500.0, dtype=torch.float64)
    assert wide.dtype == torch.float64 and torch.equal(wide.float(), whole.cpu())


# ---- rotations ----

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "interleaved": {"interleaved": True},
    "NoPE heads": {"nope_heads": 2},
    "a part of the channels": {"dim": 10},
    "norm": {"norm": True},
    "norm, NoPE head, interleaved": {"norm": True, "nope_heads": 1, "interleaved": True},
    "head_dim 12, norm": {"head_dim": 12, "norm": True},
    "head_dim 12": {"head_dim": 12, "dim": 6},
    "offset": {"offset": FAR + 7},
    "starts": {"starts": [0, 3, 3, 8, 20], "batch": 1},
    "positions": {"positions": 2},
    "positions of all": {"positions": 1, "norm": True},
}


class Turn:
    """The arguments of rotate() and of by_formula() for an entry of OPTIONS."""

    def __init__(self, name: str, device: str, dtype: str) -> None:
        options = {"head_dim": 16, "batch": 2, **OPTIONS[name]}
        head_dim = options["head_dim"]
        dim = options.get("dim", head_dim)
        kind = {"device": device, "dtype": getattr(torch, dtype)}
        self.x = normal(options["batch"], 20, 3, head_dim).to(**kind).requires_grad_()
        self.dout = normal(options["batch"], 20, 3, head_dim, seed=1).to(**kind)
        self.options = {
            name: options[name] for name in ("nope_heads", "interleaved") if name in options
        }
        self.leaves = [self.x]
        if "norm" in options:
            weight = normal(head_dim, seed=2).to(**kind).requires_grad_()
            self.options.update(weight=weight, eps=1e-3)
            self.leaves.append(weight)
        first = options.get("offset", 0)
        positions = first + torch.arange(20)[None]
        self.given: dict[str, Any] = {"offset": first, "first": first}
        if "starts" in options:
            starts = torch.tensor(options["starts"])
            positions = positions - starts[torch.searchsorted(starts, positions, right=True) - 1]
            self.given["starts"] = starts.int().to(device)
        elif "positions" in options:
            generator = torch.Generator().manual_seed(3)
            positions = FAR + torch.randint(40, (options["positions"], 20), generator=generator)
            self.given = {"positions": positions.int().to(device), "first": FAR}
        self.places = (positions, frequencies(dim))
        wide = torch.float64 if dtype == "float64" else torch.float32
        self.given["table"] = rotary_table(
            40, dim, first=self.given["first"], device=device, dtype=wide
        )

    def run(self) -> list[torch.Tensor]:
        """The result and its gradients."""
        out = rotate(self.x, **self.given, **self.options)
        return [out.detach(), *torch.autograd.grad(out, self.leaves, self.dout)]

    def evaluate(self, dtype: torch.dtype, order: torch.Tensor) -> list[torch.Tensor]:
        """The same by the formula, with its rows in another order."""
        leaves = [one.detach().cpu().to(dtype).requires_grad_() for one in self.leaves]
        options = {**self.options, "weight": leaves[1] if len(leaves) > 1 else None}
        positions, inv_freq = self.places
        out = by_formula(leaves[0][:, order], positions[:, order], inv_freq, **options)
        gradients = torch.autograd.grad(out, leaves, self.dout.to(out)[:, order])
        return [out.detach()[:, order.argsort()], *gradients]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIONS)
def test_rotations_and_gradients(name: str, device: str) -> None:
    for dtype in DTYPES[device]:
        turn = Turn(name, device, dtype)
        orders = [torch.randperm(20, generator=torch.Generator().manual_seed(n)) for n in range(8)]
        exact = turn.evaluate(torch.float64, orders[0])
        plain = zip(*(turn.evaluate(turn.x.dtype, order) for order in orders))
        for one, other, worst in zip(turn.run(), exact, plain):
            assert one.dtype == turn.x.dtype
            assert_near(one, other, worst, turn.places[0].max().item())


def test_finite_differences() -> None:
    x, weight = normal(1, 4, 2, 8).requires_grad_(), normal(8, seed=1).requires_grad_()
    table = rotary_table(ints(3, FAR, 0, 7), 6, dtype=torch.float64)

    def turn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rotate(x, table, weight=weight, eps=0.1, nope_heads=1)

    assert torch.autograd.gradcheck(turn, (x, weight))
    assert torch.autograd.gradcheck(lambda x: rotate(x, table, interleaved=True), (x,))


def test_only_a_norm_saves_x() -> None:
    x, table = torch.randn(1, 9, 2, 8, requires_grad=True), rotary_table(9, 8)
    saved: list[torch.Tensor] = []
    for call in range(2):  # the second one is a direct call, without hooks
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
            rotate(x, table)
        assert [one.data_ptr() for one in saved] == [table.data_ptr()], call
        saved.clear()
    context = rotate(x, table).grad_fn
    held = getattr(context, "saved_tensors", (table,))
    assert all(one is None or one.data_ptr() != x.data_ptr() for one in held)


def test_strides_and_narrow_views() -> None:
    whole = torch.randn(2, 3, 11, 32)
    x, table = whole.transpose(1, 2)[..., 8:24], rotary_table(11, 16)
    assert torch.equal(rotate(x, table), rotate(x.contiguous(), table))
    spaced = whole.transpose(1, 2)[..., ::2]
    assert torch.equal(rotate(spaced, table), rotate(spaced.contiguous(), table))


def test_compiled_whole() -> None:
    """One graph for every length, with gradients."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    frames = []
    weight = torch.randn(16, requires_grad=True)

    def turn(x: torch.Tensor) -> torch.Tensor:
        table = rotary_table(x.shape[1], 16)
        return rotate(rotate(x, table, weight=weight), table, nope_heads=1).square().sum()

    compiled = torch.compile(turn, fullgraph=True, dynamic=True, backend=counter)
    for length in (5, 9, 300, 700):
        x = torch.randn(2, length, 3, 16, requires_grad=True)
        found, want = (torch.autograd.grad(one(x), (x, weight)) for one in (compiled, turn))
        torch.testing.assert_close(found, want)
        frames.append(counter.frame_count)
    assert frames == frames[:1] * 4


def test_transforms() -> None:
    x, table = torch.randn(3, 2, 7, 2, 8), rotary_table(7, 8)
    found = torch.func.vmap(lambda one: rotate(one, table))(x)
    assert torch.equal(found, torch.stack([rotate(one, table) for one in x]))
    gradient = torch.func.grad(lambda one: rotate(one, table).square().sum())(x[0])
    torch.testing.assert_close(gradient, 2 * x[0])  # a rotation keeps the sum of squares
    with pytest.raises(NotImplementedError, match="rotate: forward-mode"):
        torch.func.jvp(lambda one: rotate(one, table), (x[0],), (x[0],))


@pytest.mark.parametrize("compiles", [False, True])
def test_tables_and_frequencies_have_no_gradients(compiles: bool) -> None:
    x, table, rates = torch.randn(1, 5, 2, 8), rotary_table(9, 8), torch.rand(4)

    def by_table(table: torch.Tensor) -> torch.Tensor:
        return rotate(x, table)

    def by_rates(rates: torch.Tensor) -> torch.Tensor:
        return rotate(x, rotary_table(5, 8, inv_freq=rates))

    for name, call, given in (("table", by_table, table), ("inv_freq", by_rates, rates)):
        call = torch.compile(call, backend="aot_eager") if compiles else call
        call(given)
        with pytest.raises(
            NotImplementedError, match=f"^{name}: requires gradients, want a tensor"
        ):
            call(given.clone().requires_grad_())
        with torch.no_grad():
            call(given.clone().requires_grad_())


def test_weights_of_heads_that_are_padded() -> None:
    x, table = torch.randn(1, 4, 2, 6, dtype=torch.bfloat16), rotary_table(9, 6)
    with pytest.raises(ValueError, match="^weight: axis 0 has 8 elements, x has 6; weight is"):
        rotate(x, table, weight=torch.ones(8))
    with pytest.raises(NotImplementedError, match="^weight: dtype is float16, supported"):
        rotate(x, table, weight=torch.ones(6, dtype=torch.float16))


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(1, 5, 1, 8, requires_grad=True)
    out = rotate(x, rotary_table(5, 8), weight=torch.ones(8))
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="rotate: second derivatives"):
        first.sum().backward()


def test_the_form_for_onnx() -> None:
    """The decomposition into operators of PyTorch, which export() uses."""
    positions = ints(0, 3, FAR, 7, 9)
    given = (positions, None, 8, 500.0, 1.5, False, None)
    table = ops.ROTARY_TABLE(*given)
    torch.testing.assert_close(onnx.decompose_table(*given), table, rtol=1e-6, atol=1e-6)
    x, weight = torch.randn(2, 5, 3, 16), torch.randn(16)
    for norm, eps, nope_heads in ((None, 0.0, 0), (weight, 0.1, 1), (weight, 0.1, 3)):
        call = (x, norm, table, None, None, eps, 0, 0, nope_heads, False, None)
        torch.testing.assert_close(onnx.decompose_rotation(*call), ops.ROTATE(*call))


# ---- tables that layers share ----


@pytest.fixture
def no_tables(monkeypatch: pytest.MonkeyPatch) -> dict[Any, list[torch.Tensor]]:
    monkeypatch.setattr(rotary, "tables", {})
    return rotary.tables


@pytest.mark.parametrize("device", DEVICES)
def test_shared_tables_grow_by_doubling(device: str, no_tables: Any) -> None:
    """Tables that calls have used stay where they are."""
    x = torch.randn(1, 9, 1, 8, device=device, dtype=torch.bfloat16)
    first = rotary.shared_table(9, 8, 1e4, x)
    assert rotary.shared_table(first.shape[0], 8, 1e4, x) is first
    rows = first.shape[0]
    second = rotary.shared_table(rows + 1, 8, 1e4, x)
    assert second.shape[0] == 2 * rows and torch.equal(second[:rows], first)
    assert rotary.shared_table(3 * rows, 8, 1e4, x).shape[0] == 4 * rows
    assert rotary.shared_table(9, 8, 500.0, x) is not second
    assert rotary.shared_table(9, 4, 1e4, x).shape[1] == 4
    (kept,) = [one for key, one in no_tables.items() if key[1:3] == (8, 1e4)]
    assert kept[0] is first and kept[1] is second


def test_layers_and_copies_share_tables(no_tables: Any) -> None:
    layers = [flash_dmattn.DynamicMaskAttention(32, 4, 2, 8) for _ in range(2)]
    layers.append(copy.deepcopy(layers[0]))
    for layer in layers:
        layer(torch.randn(1, 20, 32))
    assert [len(one) for one in no_tables.values()] == [1]
    assert not any("table" in name for name in layers[0].state_dict())


def test_tables_made_in_inference_mode_serve_training(no_tables: Any) -> None:
    layer, x = flash_dmattn.DynamicMaskAttention(32, 4, 2, 8), torch.randn(1, 20, 32)
    with torch.inference_mode():
        expected = layer(x)
    out = layer(x)
    out.sum().backward()
    assert torch.equal(out, expected) and layer.q_proj.weight.grad is not None


def test_tables_made_under_transforms_serve_others(no_tables: Any) -> None:
    layer, x = flash_dmattn.DynamicMaskAttention(32, 4, 2, 8), torch.randn(3, 1, 20, 32)
    found = torch.func.vmap(layer)(x)
    assert len(no_tables) == 1
    torch.testing.assert_close(found, torch.stack([layer(one) for one in x]))


def test_fake_and_meta_tensors_leave_no_table(no_tables: Any) -> None:
    from torch._subclasses import FakeTensorMode

    layer, x = flash_dmattn.DynamicMaskAttention(32, 4, 2, 8), torch.randn(1, 20, 32)
    assert copy.deepcopy(layer).to("meta")(x.to("meta")).shape == x.shape
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert copy.deepcopy(layer)(mode.from_tensor(x)).shape == x.shape
    assert not no_tables


def test_opcheck_of_the_copy() -> None:
    found = torch.library.opcheck(rotary.SHARED_TABLE, (9, 8, 1e4, False, "cpu"))
    assert set(found.values()) == {"SUCCESS"}


def test_the_copy_in_code_of_cpp() -> None:
    """Inductor's wrapper in C++ can make the operator's arguments."""
    x = torch.randn(5, 8)
    double = torch.compile(
        lambda x: x * rotary.SHARED_TABLE(x.shape[0], 8, 1e4, False, "cpu"),
        options={"cpp_wrapper": True},
    )
    torch.testing.assert_close(double(x), x * rotary_table(5, 8))


ENDING = """
import atexit, os, sys, threading
import flash_dmattn, torch
from flash_dmattn import rotary

layer = flash_dmattn.DynamicMaskAttention(32, 4, 2, 8)
call = lambda length: print(layer(torch.randn(1, length, 32)).shape[1], flush=True)
with rotary.LOCK:  # as if another thread made a table
    child = os.fork()
    if child == 0:
        call(9)
        os._exit(0)
assert os.waitpid(child, 0)[1] == 0
main = threading.main_thread()
threading.Thread(target=lambda: (main.join(), call(300))).start()
atexit.register(call, 600)
"""


def test_tables_in_a_forked_child_and_when_python_ends() -> None:
    assert output_of(python("-W", "ignore", "-c", ENDING)).split() == ["9", "300", "600"]


def test_compiled_layers_share_tables(no_tables: Any) -> None:
    layer, x = flash_dmattn.DynamicMaskAttention(32, 4, 2, 8), torch.randn(1, 20, 32)
    with torch.no_grad():
        found = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    ((table,),) = no_tables.values()
    torch.testing.assert_close(found, layer(x))
    assert no_tables[(x.device, 8, 1e4, False)] == [table]


@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "nope_heads": 1}, {"starts": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_in_graphs(options: dict[str, Any], dtype: torch.dtype) -> None:
    """A compiled layer rotates by PyTorch's operations, where the table has a row for each one."""
    options = dict(options)
    starts = torch.tensor([0, 7, 20], dtype=torch.int32) if options.pop("starts", 0) else None
    layer = make_layer(**options).to(dtype)
    x = torch.randn(2 if starts is None else 1, 20, 48, dtype=dtype, requires_grad=True)
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, fullgraph=True, backend=keep)
    found, want = (one(x, starts=starts) for one in (compiled, layer))
    names = {str(node.target) for node in graphs[0].graph.nodes}
    assert any("rotate" in name for name in names) == (starts is not None)
    parameters = [x, *layer.parameters()]
    gradients = [torch.autograd.grad(one.cos().sum(), parameters) for one in (found, want)]
    loose = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found, want, **loose)
    torch.testing.assert_close(*gradients, **loose)


def test_exported_layers_keep_the_operator() -> None:
    layer = make_layer().requires_grad_(False)
    graph = torch.export.export(layer, (torch.randn(1, 20, 48),)).graph
    assert any("rotate" in str(node.target) for node in graph.nodes)


def test_threads_share_tables(no_tables: Any) -> None:
    x, found = torch.randn(1, 5000, 1, 64), []
    threads = [
        threading.Thread(target=lambda: found.append(rotary.shared_table(5000, 64, 1e4, x)))
        for _ in range(8)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(found) == 8 and all(one is found[0] for one in found)


# ---- layers ----


def make_layer(**options: Any) -> flash_dmattn.DynamicMaskAttention:
    torch.manual_seed(0)
    layer = flash_dmattn.DynamicMaskAttention(48, 6, 2, 7, **options)
    torch.nn.init.normal_(layer.A)
    if options.get("qk_norm"):
        torch.nn.init.normal_(layer.q_norm.weight)
    return layer


def states(batch: int = 2, length: int = 40) -> torch.Tensor:
    return normal(batch, length, 48).float()


@pytest.mark.parametrize("base", [1e4, 5e5])
def test_a_layer_rotates_by_the_formula_at_far_positions(base: float) -> None:
    layer, x = make_layer(rope_base=base, nope_heads=1, nope_rotary_dim=4), normal(2, 9, 6, 8)
    positions = FAR * torch.arange(1, 19).view(2, 9)
    found = layer.rotate_heads(x.float(), positions)
    whole = by_formula(x, positions, frequencies(8, base))
    part = by_formula(x, positions, frequencies(4, base))
    exact = torch.cat((whole[:, :, :3], part[:, :, 3:]), 2)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)


def test_positions_of_every_kind_agree() -> None:
    """No positions, one row of them, a row for each sequence, packed sequences, every dtype."""
    layer, x = make_layer(qk_norm=True, nope_heads=1, nope_rotary_dim=4), states()
    expected = layer(x)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        positions = torch.arange(40, dtype=dtype)[None]
        torch.testing.assert_close(layer(x, positions=positions), expected)
        torch.testing.assert_close(layer(x, positions=positions.expand(2, -1)), expected)
    packed = layer(x.view(1, 80, 48), starts=ints(0, 40, 80))
    torch.testing.assert_close(packed.view_as(x), expected, rtol=1e-4, atol=1e-5)


def test_positions_that_int32_does_not_hold_are_refused() -> None:
    layer, x = make_layer(), states()
    for first, shown in (
        (2**31 - 4, 2**31 + 35),
        (2**32, 2**32 + 39),
        (-(2**31) - 1, -(2**31) - 1),
    ):
        with pytest.raises(ValueError, match=f"^positions: has {shown}, want less than 2"):
            layer(x, positions=(first + torch.arange(40))[None])


def test_an_empty_batch_may_have_positions() -> None:
    layer, x = make_layer(), states()[:0]
    assert layer(x, positions=torch.zeros(0, 40, dtype=torch.long)).shape == x.shape


@torch.no_grad()
def test_a_traced_layer_takes_other_lengths() -> None:
    layer, x = make_layer(qk_norm=True), states()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that shapes are compared
        traced = torch.jit.trace(layer, (x,), check_trace=False)
    for other in (x[:, :5], torch.cat((x, x), 1)):
        torch.testing.assert_close(traced(other), layer(other))


def test_padding_on_the_left_may_have_negative_positions() -> None:
    layer, x = make_layer(), states()
    key_valid = torch.ones(2, 40, dtype=torch.bool)
    key_valid[1, :15] = False
    positions = key_valid.cumsum(1) - 1
    positions[1, :15] = torch.arange(-15, 0)
    found = layer(x, key_valid=key_valid, positions=positions)
    assert found.isfinite().all()
    torch.testing.assert_close(found[1, 15:], layer(x[1:, 15:])[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_steps_after_a_prompt_at_far_positions() -> None:
    """Positions that the cache counts, from 2^20 on, and the same given to the whole sequence."""
    layer, x = make_layer(qk_norm=True), states()
    whole = layer(x, positions=(FAR + torch.arange(40))[None])
    cache = layer.new_cache(2)
    found = [layer(x[:, :30], cache=cache, positions=(FAR + torch.arange(30))[None])]
    for at in range(30, 40):
        positions = torch.full((2, 1), FAR + at)
        found.append(layer(x[:, at : at + 1], cache=cache, positions=positions))
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-4, atol=1e-5)
    cache = layer.new_cache(2)
    counted = [layer(x[:, :30], cache=cache)]
    counted += [layer(x[:, at : at + 1], cache=cache) for at in range(30, 40)]
    torch.testing.assert_close(torch.cat(counted, 1), layer(x), rtol=1e-4, atol=1e-5)


class Doubled(torch.nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.norm(x)


def test_norms_that_are_more_than_their_weight_are_called() -> None:
    layer, x = make_layer(qk_norm=True), states()
    seen = copy.deepcopy(layer)
    calls: list[Any] = []
    seen.q_norm.register_forward_hook(lambda *given: calls.append(given))
    torch.testing.assert_close(seen(x), layer(x))
    assert len(calls) == 1
    replaced, doubled = copy.deepcopy(layer), copy.deepcopy(layer)
    replaced.k_norm = Doubled(replaced.k_norm)
    with torch.no_grad():
        doubled.k_norm.weight *= 2
    torch.testing.assert_close(replaced(x), doubled(x))
    without = copy.deepcopy(layer)
    without.q_norm = torch.nn.RMSNorm(8, eps=1e-6, elementwise_affine=False)
    with torch.no_grad():
        layer.q_norm.weight.fill_(1)
    torch.testing.assert_close(without(x), layer(x))


def test_hooks_of_all_modules_see_norms() -> None:
    layer, x, seen = make_layer(qk_norm=True), states(), []
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *given: seen.append(type(module))
    )
    try:
        found = layer(x)
    finally:
        hook.remove()
    assert seen.count(torch.nn.RMSNorm) == 2
    torch.testing.assert_close(found, layer(x))


@pytest.mark.parametrize("device", DEVICES)
def test_norms_under_autocast(device: str) -> None:
    """Weights in float32, rows in bfloat16. The gradient of the weight has its dtype."""
    layer = make_layer(qk_norm=True).to(device)
    with torch.autocast(device, torch.bfloat16):
        out = layer(states().to(device))
    out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16 and layer.q_norm.weight.grad.dtype == torch.float32
    wide = copy.deepcopy(layer).cpu()
    wide.zero_grad()
    wide(states()).square().sum().backward()
    one, other = layer.q_norm.weight.grad.cpu(), wide.q_norm.weight.grad
    assert (one - other).norm() < 0.1 * other.norm()


def test_float32_norms_of_float64_rows() -> None:
    """Of 6 channels, which are padded to 8."""
    table = rotary_table(5, 6, dtype=torch.float64)
    x = torch.randn(1, 5, 2, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(6, requires_grad=True)
    found = rotate(x, table, weight=weight)
    wanted = rotate(torch.nn.functional.rms_norm(x, (6,), weight.double(), 1e-6), table)
    torch.testing.assert_close(found, wanted)
    grads = [torch.autograd.grad(out.square().sum(), (x, weight)) for out in (found, wanted)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_captured_graphs_keep_their_table(device: str, no_tables: Any) -> None:
    """A graph that is replayed after the table has grown, and one that is captured without any."""
    layer = make_layer().to(device, torch.bfloat16)
    x = states().to(device, torch.bfloat16)
    with torch.no_grad():
        expected = layer(x)
        for is_warm in (True, False):
            if not is_warm:
                no_tables.clear()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = layer(x)
            assert bool(no_tables) == is_warm
            layer(states(1, 2000).to(device, torch.bfloat16))
            graph.replay()
            torch.testing.assert_close(out, expected)


# ---- models of transformers ----

LONG = {"original_max_position_embeddings": 64}
RULES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, **LONG},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONG},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "factor": 4.0, **LONG},
}


@pytest.mark.parametrize("length", [40, 256])
@pytest.mark.parametrize("kind", RULES)
def test_scaling_rules(kind: str, length: int) -> None:
    transformers = pytest.importorskip("transformers")
    from flash_dmattn.transformers import rotary_frequencies
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rule = {"rope_type": kind, "rope_theta": 10000.0, **RULES[kind]}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 128}
    config = transformers.LlamaConfig(**sizes, rope_parameters=rule)
    embedding = LlamaRotaryEmbedding(config)
    cos, sin = embedding(torch.zeros(1), torch.arange(length)[None])
    inv_freq, factor = rotary_frequencies(config, length=length)
    table = rotary_table(length, 16, inv_freq=inv_freq, factor=factor)
    want = torch.cat((cos[0, :, :8], sin[0, :, :8]), 1)
    # angles of transformers are rounded to float32, and so are its frequencies
    torch.testing.assert_close(table, want, rtol=1e-6, atol=2 * length * 2**-24)


def test_models_without_the_rules_are_refused() -> None:
    transformers = pytest.importorskip("transformers")
    from flash_dmattn.transformers import rotary_frequencies

    with pytest.raises(ValueError, match="^config: has no rope_parameters; it is a GPT2Config"):
        rotary_frequencies(transformers.GPT2Config())
    with pytest.raises(ValueError, match="^layer_type: is 'x', want None"):
        rotary_frequencies(transformers.LlamaConfig(), layer_type="x")
    with pytest.raises(ValueError, match="^layer_type: is None, want '[a-z_]+' or '[a-z_]+'"):
        rotary_frequencies(transformers.Gemma3TextConfig())


def test_an_unknown_rule_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    from flash_dmattn.transformers import rotary_frequencies

    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4)
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1e4}
    with pytest.raises(ValueError, match="config: its rope_type is 'spiral', want one of default"):
        rotary_frequencies(config)
