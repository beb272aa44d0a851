"""The layer with a process group, and the functions that cut and join sequences, on the ranks of
process groups, against the layer without a group and the whole sequence.

The module runs twice: record() on the ranks, the tests on its results.
"""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any, NamedTuple

import context_ranks
import evaluate
import pytest
import torch
from context_cases import Tensors
from context_ranks import MEMBERS, own_tokens
from flash_dmattn import DynamicMaskAttention, DynamicMaskCache, DynamicMaskOptions, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

HIDDEN = 32
EIGHT = (11, 0, 7, 13, 1, 9, 2, 17)


class Case(NamedTuple):
    lengths: tuple[int, ...]  # tokens of each rank
    window: int | None
    options: dict[str, Any] = {}  # of the layer
    batch: int = 2
    padding: int = 0  # positions on the left of sequence 0; each next one has 3 less
    starts: tuple[int, ...] | None = None
    gives_positions: bool = False
    gives_lengths: bool = False

    @property
    def total(self) -> int:
        return sum(self.lengths)


RICH = {"bias": True, "qk_norm": True, "dt_bias": True, "sink_logit": True, "softcap": 4.0}

CASES = {
    "one-rank": Case((25,), 6),
    "two-ranks": Case((20, 11), 6),
    "three-sinks": Case((20, 11, 9), 6, {"sinks": 3, "recent": 4}),
    "three-sliding": Case((20, 11, 9), 6, {"sliding_heads": 1, "recent": 4}),
    "three-nope": Case((20, 11, 9), 6, {"nope_heads": 1, "nope_rotary_dim": 2}),
    "eight": Case(EIGHT, 6, RICH),
    "four-full": Case((9, 14, 0, 9), 7, {"causal": False, "sinks": 2}),
    "three-full-without-rope": Case((9, 14, 9), 7, {"causal": False, "rope_base": None}),
    "four-padding": Case((9, 14, 9, 13), 6, RICH, padding=12),
    "four-positions": Case((9, 14, 9, 13), 6, padding=12, gives_positions=True),
    "eight-lengths": Case(EIGHT, 6, gives_lengths=True),
    "packed": Case((9, 14, 9, 13), 5, batch=1, starts=(0, 4, 17, 17, 38, 45)),
    "packed-borders": Case((9, 14, 9), 5, RICH, batch=1, starts=(0, 9, 23, 32)),
    "packed-lengths": Case((9, 14, 9), 5, batch=1, starts=(0, 4, 25, 29), gives_lengths=True),
    "all-keys": Case((9, 14, 9, 13), None, {"sink_logit": True}),
    "all-keys-eight": Case(EIGHT, None, {"bias": True, "qk_norm": True, "softcap": 4.0}),
    "all-keys-padding": Case((9, 14, 9), None, padding=12, gives_lengths=True),
    "all-keys-full": Case((9, 14, 9), None, {"causal": False}),
}
LIVES = {"lifetime_units": 6, "initial_lifetime": 12.0, "recent": 4}
CASES.update(
    {
        "two-lifetimes": Case((20, 11), 6, LIVES),
        "eight-lifetimes": Case(EIGHT, 6, {**LIVES, "sinks": 2, "sink_logit": True}),
        "four-lifetimes-padding": Case(
            (9, 14, 9, 13), 6, {**LIVES, "sliding_heads": 1}, padding=12
        ),
        "three-lifetimes-positions": Case(
            (9, 14, 9), 6, LIVES, padding=12, gives_positions=True, gives_lengths=True
        ),
        "packed-lifetimes": Case((9, 14, 9, 13), 5, LIVES, batch=1, starts=(0, 4, 17, 17, 38, 45)),
    }
)
WHOLE = Case(EIGHT, 6, RICH)  # for the wrappers, which use the group of all ranks


def make_layer(case: Case, group: Any = None) -> DynamicMaskAttention:
    """A layer with the same parameters on all ranks, none of them 0."""
    options = dict(case.options)
    if group is not None:
        options["process_group"] = group
    torch.manual_seed(5)
    layer = DynamicMaskAttention(HIDDEN, 4, 2, case.window, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape) / 8)
        if layer.lifetime_gate is not None:
            layer.lifetime_gate.contract.weight.mul_(8)
    return layer


def make_states(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """x, and the gradient of the output, which is 0 for padding."""
    generator = torch.Generator().manual_seed(case.total + case.batch)
    x, dout = torch.randn(2, case.batch, case.total, HIDDEN, generator=generator)
    valid = make_valid(case)
    return x, dout if valid is None else dout * valid[..., None]


def make_valid(case: Case) -> torch.Tensor | None:
    if case.padding == 0:
        return None
    return torch.arange(case.total) >= case.padding - 3 * torch.arange(case.batch)[:, None]


def make_positions(case: Case) -> torch.Tensor | None:
    valid = make_valid(case)
    return (valid.long().cumsum(1) - 1).clamp(min=0) if case.gives_positions else None


# ---- On the ranks ----


def run_layer(layer: torch.nn.Module, case: Case, rank: int, **options: Any) -> Tensors:
    """out, and the gradients of the own tokens x and of the parameters."""

    def own(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else own_tokens(tensor, case.lengths, rank)

    x, dout = map(own, make_states(case))
    x = x.clone().requires_grad_()
    valid, positions = own(make_valid(case)), own(make_positions(case))
    for name, given in (("key_valid", valid), ("positions", positions), ("starts", case.starts)):
        if given is not None:
            options[name] = given
    if case.gives_lengths:
        options["lengths"] = case.lengths
    out = layer(x, **options)
    out.backward(dout)
    found = {"out": out.detach(), "dx": x.grad}
    for name, parameter in layer.named_parameters():
        if parameter.grad is not None:  # gates have none
            found[f"d{name.removeprefix('module.')}"] = parameter.grad
    return found


def run_on_mesh(rank: int) -> Tensors:
    """On a mesh of one dimension, and on each dimension of a mesh of two."""
    line = init_device_mesh("cpu", (8,))
    rectangle = init_device_mesh("cpu", (2, 4), mesh_dim_names=("rows", "columns"))
    case = CASES["four-padding"]
    found = {"line": run_layer(make_layer(WHOLE, line), WHOLE, rank)}
    columns = make_layer(case, rectangle["columns"])
    found["columns"] = run_layer(columns, case, rectangle["columns"].get_local_rank())
    case = CASES["two-ranks"]
    rows = make_layer(case, rectangle["rows"])
    found["rows"] = run_layer(rows, case, rectangle["rows"].get_local_rank())
    return found


def run_in_data_parallel(rank: int) -> Tensors:
    group = context_ranks.group_of(8)
    layer = DistributedDataParallel(make_layer(WHOLE, group), process_group=group)
    return run_layer(layer, WHOLE, rank)


def run_in_fully_sharded(rank: int) -> Tensors:
    mesh = init_device_mesh("cpu", (8,))
    layer = make_layer(WHOLE, mesh.get_group())
    fully_shard(layer, mesh=mesh)
    found = run_layer(layer, WHOLE, rank)
    return {
        name: one.full_tensor() if hasattr(one, "full_tensor") else one
        for name, one in found.items()
    }


def check_checkpoints(rank: int) -> None:
    """Backward repeats the forward pass of each of two layers."""
    layer = make_layer(WHOLE, context_ranks.group_of(8))

    def in_checkpoint(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False)

    found = []
    x, dout = (own_tokens(one, WHOLE.lengths, rank) for one in make_states(WHOLE))
    for run in (layer, in_checkpoint):
        layer.zero_grad(set_to_none=True)
        given = x.clone().requires_grad_()
        out = run(run(given))
        out.backward(dout)
        gradients = (parameter.grad for parameter in layer.parameters())
        found.append((out.detach(), given.grad, *gradients))
    evaluate.assert_same(*found)


def check_copies(rank: int) -> None:
    group = context_ranks.group_of(8)
    layer = make_layer(WHOLE, group)
    assert list(layer.state_dict()) == list(make_layer(WHOLE).state_dict())
    loaded = DynamicMaskAttention(HIDDEN, 4, 2, WHOLE.window, process_group=group, **WHOLE.options)
    loaded.load_state_dict(make_layer(WHOLE).state_dict())
    replica = copy.deepcopy(layer)
    want = run_layer(layer, WHOLE, rank)["out"]
    for other in (replica, loaded):
        assert torch.equal(run_layer(other, WHOLE, rank)["out"], want)
    for one, other in zip(layer.parameters(), replica.parameters()):
        assert one.data_ptr() != other.data_ptr()


def check_a_cache(rank: int) -> None:
    """Every rank decodes the whole sequence by itself: the group does not matter."""
    case, found = CASES["two-ranks"], []
    for group in (context_ranks.group_of(8), None):
        layer = make_layer(case, group)
        rules = {"window": layer.window, "recent": layer.recent}
        cache = DynamicMaskCache(layers=1, batch=2, kv_heads=2, head_dim=8, **rules)
        with torch.no_grad():
            found.append(layer(make_states(case)[0], cache=cache))
    torch.testing.assert_close(*found)


def run_in_bfloat16(rank: int) -> torch.Tensor:
    """Under autocast."""
    layer = make_layer(WHOLE, context_ranks.group_of(8))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        return layer(own_tokens(make_states(WHOLE)[0], WHOLE.lengths, rank))


def check_helpers(rank: int) -> None:
    """The functions that cut and join sequences, in groups of several sizes. Every rank has all
    tokens of a joined sequence, and their gradients added in the order of ranks."""
    for size, members in MEMBERS.items():
        group = context_ranks.group_of(size)
        if group is None:
            continue
        own, lengths = members.index(rank), EIGHT[:size]
        total = sum(lengths)
        whole = torch.arange(2.0 * total * 3).view(2, total, 3)
        given, swapped = own_tokens(whole, lengths, own), whole.transpose(0, 1)
        told = {"group": group, "lengths": lengths}

        even = distributed.split_lengths(total, size)
        split = distributed.split_sequence(whole, group=group)
        assert torch.equal(split, own_tokens(whole, even, own))
        assert split.untyped_storage().data_ptr() == whole.data_ptr() or own > 0  # a view
        assert torch.equal(distributed.split_sequence(whole, **told), given)
        split = distributed.split_sequence(swapped, 0, **told)
        assert torch.equal(split, given.transpose(0, 1))

        want = own_tokens(torch.arange(total)[None], lengths, own)
        for options in ({"group": group}, told):
            found = distributed.sequence_positions(lengths[own], **options)
            assert torch.equal(found, want)
            assert torch.equal(distributed.gather_sequence(given, **options), whole)
        joined = distributed.gather_sequence(given.long(), group=group)
        assert joined.dtype == torch.int64 and torch.equal(joined, whole.long())
        joined = distributed.gather_sequence(given.transpose(0, 1), 0, group=group)
        assert torch.equal(joined, swapped)
        assert torch.equal(distributed.gather_sequence(given.mT, -1, group=group), whole.mT)
        for dtype in (torch.float32, torch.bfloat16):
            leaf = given.detach().clone().to(dtype).requires_grad_()
            distributed.gather_sequence(leaf, group=group).backward(((own + 1) * whole).to(dtype))
            sums = sum(((other + 1) * whole).to(dtype).float() for other in range(size))
            assert torch.equal(leaf.grad, own_tokens(sums, lengths, own).to(dtype))


CHECKS = {
    check.__name__: check
    for check in (check_checkpoints, check_copies, check_a_cache, check_helpers)
}


def record(rank: int) -> dict[str, Any]:
    runs = {**CHECKS, "mesh": run_on_mesh, "data parallel": run_in_data_parallel}
    runs.update({"fully sharded": run_in_fully_sharded, "bfloat16": run_in_bfloat16})
    for name, case in CASES.items():
        group = context_ranks.group_of(len(case.lengths))
        if group is not None:
            own = MEMBERS[len(case.lengths)].index(rank)
            layer = functools.partial(make_layer, case, group)
            runs[name] = lambda _, layer=layer, case=case, own=own: run_layer(layer(), case, own)
    return context_ranks.record(runs, rank)


# ---- In the process of the tests ----

RUN = context_ranks.Once(__name__, "record", 8, timeout=90)


def on_ranks(name: str, size: int = 8) -> list[Any]:
    return RUN.results_of(name, MEMBERS[size])


def run_whole(
    case: Case, dtype: torch.dtype, order: torch.Tensor, layer: DynamicMaskAttention | None = None
) -> Tensors:
    """out and all gradients of the layer without a group, on the whole sequence, with hidden
    channels in another order."""
    layer = copy.deepcopy(layer or make_layer(case)).to(dtype)
    inputs = [f"{name}_proj.weight" for name in "qkv"]
    gate = [] if layer.lifetime_gate is None else ["lifetime_gate.expand.weight"]
    with torch.no_grad():
        for name in (*inputs, *gate):
            parameter = layer.get_parameter(name)
            parameter.copy_(parameter[:, order])
    x, dout = (one.to(dtype) for one in make_states(case))
    x = x[..., order].requires_grad_()
    starts = None if case.starts is None else torch.tensor(case.starts, dtype=torch.int32)
    out = layer(x, key_valid=make_valid(case), starts=starts, positions=make_positions(case))
    out.backward(dout)
    found = {"out": out.detach(), "dx": x.grad}
    learned = ((name, one.grad) for name, one in layer.named_parameters())
    found.update({f"d{name}": gradient for name, gradient in learned if gradient is not None})
    back = order.argsort()
    for name in ("dx", *(f"d{one}" for one in inputs)):
        found[name] = found[name][..., back]
    return found


def assert_layer(found: list[Tensors], case: Case, ranks_of_mean: int = 1) -> None:
    """out and gradients are within tolerance. Gradients of parameters are summed over ranks, unless
    each rank has the mean over `ranks_of_mean`."""
    in_order = torch.arange(HIDDEN)
    exact = run_whole(case, torch.float64, in_order)
    orders = [in_order, *evaluate.orders_of(HIDDEN, 1)]
    plain = [run_whole(case, torch.float32, order) for order in orders]
    assert all(one.keys() == exact.keys() for one in found) and len(exact) >= 6
    valid = make_valid(case)
    for name, want in exact.items():
        if name in ("out", "dx"):
            tensor = torch.cat([one[name] for one in found], 1)
            others = [one[name] for one in plain]
            if name == "out" and valid is not None:
                tensor, want, *others = (one[valid] for one in (tensor, want, *others))
        elif ranks_of_mean == 1:
            tensor = sum(one[name].double() for one in found).float()
            others = [one[name] for one in plain]
        else:
            for one in found[1:]:
                assert torch.equal(one[name], found[0][name])
            tensor, others = ranks_of_mean * found[0][name], [one[name] for one in plain]
        evaluate.assert_within(tensor, want, *others)


@pytest.mark.parametrize("name", CASES)
def test_against_the_layer_without_a_group(name: str) -> None:
    case = CASES[name]
    assert_layer(on_ranks(name, len(case.lengths)), case)


@pytest.mark.parametrize("name", [name for name in CASES if "lifetimes" in name])
def test_rounding_does_not_decide_lifetimes(name: str) -> None:
    layer = make_layer(CASES[name])
    assert layer.lifetime_gate is not None
    with torch.no_grad():
        lifetime = layer.lifetime_gate(make_states(CASES[name])[0]).exp()
    assert ((lifetime % 1 - 0.5).abs() > 1e-5 * lifetime.clamp(min=1)).all()
    assert lifetime.std() > 3


def test_meshes() -> None:
    found = on_ranks("mesh")
    assert_layer([one["line"] for one in found], WHOLE)
    for begin in (0, 4):
        columns = [one["columns"] for one in found[begin : begin + 4]]
        assert_layer(columns, CASES["four-padding"])
    for column in range(4):
        assert_layer([one["rows"] for one in found[column::4]], CASES["two-ranks"])


@pytest.mark.parametrize("wrapper", ["data parallel", "fully sharded"])
def test_wrappers_take_the_mean_over_ranks(wrapper: str) -> None:
    assert_layer(on_ranks(wrapper), WHOLE, ranks_of_mean=8)


@pytest.mark.parametrize("name", CHECKS)
def test_on_ranks(name: str) -> None:
    assert RUN.results_of(name) == [None] * 8


def test_autocast() -> None:
    """Ranks round as the whole sequence does: float32 projections and queries in bfloat16."""
    found = torch.cat(on_ranks("bfloat16"), 1)
    assert found.dtype == torch.bfloat16
    exact = run_whole(WHOLE, torch.float64, torch.arange(HIDDEN))["out"]
    layer, x = make_layer(WHOLE), make_states(WHOLE)[0]
    plain = []
    for order in evaluate.orders_of(HIDDEN, 1):
        one = copy.deepcopy(layer)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            for name in "qkv":
                weight = one.get_parameter(f"{name}_proj.weight")
                weight.copy_(weight[:, order])
            plain.append(one(x[..., order]))
    evaluate.assert_within(found, exact, *plain)


@pytest.mark.parametrize("name", ["gap", "dropout", "memory_hidden", "options"])
def test_options_that_need_the_whole_sequence(name: str) -> None:
    options = {"gap": 1.0, "dropout": 0.1, "memory_hidden": 8}
    options["options"] = DynamicMaskOptions(keep_window_size=6)
    more = {"causal": False, "rope_base": None} if name == "memory_hidden" else {}
    with pytest.raises(ValueError, match=f"^{name}: .*process_group"):
        DynamicMaskAttention(
            HIDDEN, 4, 2, 6, process_group=object(), **more, **{name: options[name]}
        )


def test_lengths_without_a_group() -> None:
    layer = make_layer(CASES["one-rank"])
    with pytest.raises(ValueError, match="^lengths: is given, want None without a process_group"):
        layer(torch.zeros(1, 4, HIDDEN), lengths=[4])


@pytest.mark.parametrize("total", [0, 1, 7, 64, 100, 257])
def test_split_lengths(total: int) -> None:
    """All tokens are split. Only the last rank with tokens may have no multiple, and lengths differ
    by one multiple at most."""
    for ranks, multiple in itertools.product((1, 2, 3, 8), (1, 8, 32)):
        found = distributed.split_lengths(total, ranks, multiple=multiple)
        assert len(found) == ranks and sum(found) == total and min(found) >= 0
        blocks = [-(-length // multiple) for length in found]
        assert max(blocks) - min(blocks) <= 1 and blocks == sorted(blocks, reverse=True)
        has_tokens = [length for length in found if length > 0]
        assert all(length % multiple == 0 for length in has_tokens[:-1])


@pytest.mark.parametrize(
    ("name", "arguments"), [("total", (-1, 2)), ("ranks", (4, 0)), ("multiple", (4, 2, 0))]
)
def test_split_lengths_refuses(name: str, arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"^{name}: is -?[0-9]+, want [01] or more"):
        distributed.split_lengths(*arguments)
