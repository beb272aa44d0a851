"""The layer with a process group, and the functions that cut and join sequences, on the ranks of
process groups, against the layer without a group and the whole sequence.

The module runs twice: record() on the ranks, the tests on its results.
"""

from __future__ import annotations

import copy
import functools
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
        found[f"d{name.removeprefix('module.')}"] = parameter.grad
    return found


def run_case(name: str, rank: int, group: Any) -> Tensors:
    return run_layer(make_layer(CASES[name], group), CASES[name], rank)


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


def run_with_checkpoint(rank: int) -> Tensors:
    """Backward repeats the forward pass of each of two layers."""
    layer = make_layer(WHOLE, context_ranks.group_of(8))

    def twice(x: torch.Tensor) -> torch.Tensor:
        return layer(layer(x))

    def in_checkpoints(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    found = {}
    x, dout = (own_tokens(one, WHOLE.lengths, rank) for one in make_states(WHOLE))
    for run in (twice, in_checkpoints):
        layer.zero_grad(set_to_none=True)
        given = x.clone().requires_grad_()
        out = run(given)
        out.backward(dout)
        gradients = [parameter.grad for parameter in layer.parameters()]
        found[run.__name__] = [out.detach(), given.grad, *gradients]
    return found


def run_copies(rank: int) -> Tensors:
    group = context_ranks.group_of(8)
    layer = make_layer(WHOLE, group)
    replica, loaded = (
        copy.deepcopy(layer),
        DynamicMaskAttention(HIDDEN, 4, 2, WHOLE.window, process_group=group, **WHOLE.options),
    )
    loaded.load_state_dict(make_layer(WHOLE).state_dict())
    found = {"keys": list(layer.state_dict())}
    for name, one in (("layer", layer), ("replica", replica), ("loaded", loaded)):
        found[name] = run_layer(one, WHOLE, rank)["out"]
    found["apart"] = all(
        one.data_ptr() != other.data_ptr()
        for one, other in zip(layer.parameters(), replica.parameters())
    )
    return found


def run_with_cache(rank: int) -> torch.Tensor:
    """Every rank decodes the whole sequence by itself: the group does not matter."""
    case = CASES["two-ranks"]
    layer = make_layer(case, context_ranks.group_of(8))
    rules = {"window": layer.window, "recent": layer.recent}
    cache = DynamicMaskCache(layers=1, batch=2, kv_heads=2, head_dim=8, **rules)
    with torch.no_grad():
        return layer(make_states(case)[0], cache=cache)


def run_in_bfloat16(rank: int) -> torch.Tensor:
    """Under autocast."""
    layer = make_layer(WHOLE, context_ranks.group_of(8))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        return layer(own_tokens(make_states(WHOLE)[0], WHOLE.lengths, rank))


def run_helpers(rank: int) -> dict[int, Tensors]:
    """The functions that cut and join sequences, in groups of several sizes."""
    found = {}
    for size, members in MEMBERS.items():
        group = context_ranks.group_of(size)
        if group is None:
            continue
        own, lengths = members.index(rank), EIGHT[:size]
        total = sum(lengths)
        whole = torch.arange(2.0 * total * 3).view(2, total, 3)
        one = found[size] = {}
        one["split"] = distributed.split_sequence(whole, group=group)
        one["split as told"] = distributed.split_sequence(whole, group=group, lengths=lengths)
        swapped = whole.transpose(0, 1)
        one["split axis 0"] = distributed.split_sequence(swapped, 0, group=group, lengths=lengths)
        one["is a view"] = one["split"].untyped_storage().data_ptr() == whole.data_ptr()
        given = own_tokens(whole, lengths, own)
        one["positions"] = distributed.sequence_positions(lengths[own], group=group)
        one["positions as told"] = distributed.sequence_positions(
            lengths[own], group=group, lengths=lengths
        )
        one["joined"] = distributed.gather_sequence(given, group=group)
        one["joined as told"] = distributed.gather_sequence(given, group=group, lengths=lengths)
        one["joined integers"] = distributed.gather_sequence(given.long(), group=group)
        one["joined axis 0"] = distributed.gather_sequence(given.transpose(0, 1), 0, group=group)
        one["joined last axis"] = distributed.gather_sequence(given.mT, -1, group=group)
        for dtype in (torch.float32, torch.bfloat16):
            leaf = given.detach().clone().to(dtype).requires_grad_()
            joined = distributed.gather_sequence(leaf, group=group)
            joined.backward(((own + 1) * whole).to(dtype))
            one[f"gradient {dtype}"] = leaf.grad
    return found


def record(rank: int) -> dict[str, Any]:
    found = {}
    runs = {"helpers": run_helpers, "mesh": run_on_mesh, "data parallel": run_in_data_parallel}
    runs.update({"fully sharded": run_in_fully_sharded, "checkpoint": run_with_checkpoint})
    runs.update(copies=run_copies, cache=run_with_cache, bfloat16=run_in_bfloat16)
    for name, run in runs.items():
        print(name, flush=True)
        found[name] = context_ranks.attempt(functools.partial(run, rank))
    for name, case in CASES.items():
        group = context_ranks.group_of(len(case.lengths))
        if group is not None:
            print(name, flush=True)
            own = MEMBERS[len(case.lengths)].index(rank)
            found[name] = context_ranks.attempt(functools.partial(run_case, name, own, group))
    return found


# ---- In the process of the tests ----

RUN = context_ranks.Once(__name__, "record", 8, timeout=90)


def on_ranks(name: str, size: int = 8) -> list[Any]:
    found = [RUN.results()[rank][name] for rank in MEMBERS[size]]
    errors = [one for one in found if isinstance(one, str)]
    assert not errors, "\n".join(errors)
    return found


def run_whole(
    case: Case, dtype: torch.dtype, order: torch.Tensor, layer: DynamicMaskAttention | None = None
) -> Tensors:
    """out and all gradients of the layer without a group, on the whole sequence, with hidden
    channels in another order."""
    layer = copy.deepcopy(layer or make_layer(case)).to(dtype)
    inputs = [f"{name}_proj.weight" for name in "qkv"]
    with torch.no_grad():
        for name in inputs:
            parameter = layer.get_parameter(name)
            parameter.copy_(parameter[:, order])
    x, dout = (one.to(dtype) for one in make_states(case))
    x = x[..., order].requires_grad_()
    starts = None if case.starts is None else torch.tensor(case.starts, dtype=torch.int32)
    out = layer(x, key_valid=make_valid(case), starts=starts, positions=make_positions(case))
    out.backward(dout)
    found = {"out": out.detach(), "dx": x.grad}
    found.update({f"d{name}": one.grad for name, one in layer.named_parameters()})
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


def test_checkpoints() -> None:
    for one in on_ranks("checkpoint"):
        assert len(one["twice"]) > 2
        evaluate.assert_same(tuple(one["in_checkpoints"]), tuple(one["twice"]))


def test_copies() -> None:
    for one in on_ranks("copies"):
        assert one["keys"] == list(make_layer(WHOLE).state_dict())
        assert torch.equal(one["replica"], one["layer"]) and one["apart"]
        assert torch.equal(one["loaded"], one["layer"])


def test_a_cache_needs_no_ranks() -> None:
    case = CASES["two-ranks"]
    with torch.no_grad():
        layer = make_layer(case)
        rules = {"window": layer.window, "recent": layer.recent}
        cache = DynamicMaskCache(layers=1, batch=2, kv_heads=2, head_dim=8, **rules)
        want = layer(make_states(case)[0], cache=cache)
    for one in on_ranks("cache"):  # matrix products of processes may differ in their last bits
        torch.testing.assert_close(one, want)


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


# ---- Functions that cut and join sequences ----


@pytest.mark.parametrize("size", MEMBERS)
def test_split_sequence(size: int) -> None:
    lengths = EIGHT[:size]
    whole = torch.arange(2.0 * sum(lengths) * 3).view(2, sum(lengths), 3)
    found = [one[size] for one in on_ranks("helpers", size)]
    even = [one["split"] for one in found]
    assert [one.shape[1] for one in even] == distributed.split_lengths(sum(lengths), size)
    assert torch.equal(torch.cat(even, 1), whole)
    assert all(one["is a view"] for one in found[:1])
    for rank, one in enumerate(found):
        assert torch.equal(one["split as told"], own_tokens(whole, lengths, rank))
        assert torch.equal(one["split axis 0"], one["split as told"].transpose(0, 1))


@pytest.mark.parametrize("size", MEMBERS)
def test_gather_sequence(size: int) -> None:
    """Every rank has all tokens, and their gradients added in the order of ranks."""
    lengths = EIGHT[:size]
    whole = torch.arange(2.0 * sum(lengths) * 3).view(2, sum(lengths), 3)
    for rank, ranks in enumerate(on_ranks("helpers", size)):
        found = ranks[size]
        assert torch.equal(found["joined"], whole) and torch.equal(found["joined as told"], whole)
        assert found["joined integers"].dtype == torch.int64
        assert torch.equal(found["joined integers"], whole.long())
        assert torch.equal(found["joined axis 0"], whole.transpose(0, 1))
        assert torch.equal(found["joined last axis"], whole.mT)
        for dtype in (torch.float32, torch.bfloat16):
            total = sum(((other + 1) * whole).to(dtype).float() for other in range(size))
            want = own_tokens(total, lengths, rank).to(dtype)
            assert torch.equal(found[f"gradient {dtype}"], want)


@pytest.mark.parametrize("size", MEMBERS)
def test_sequence_positions(size: int) -> None:
    lengths = EIGHT[:size]
    for rank, one in enumerate(on_ranks("helpers", size)):
        want = own_tokens(torch.arange(sum(lengths))[None], lengths, rank)
        assert torch.equal(one[size]["positions"], want)
        assert torch.equal(one[size]["positions as told"], want)


@pytest.mark.parametrize("multiple", [1, 8, 32])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("total", [0, 1, 7, 64, 100, 257])
def test_split_lengths(total: int, ranks: int, multiple: int) -> None:
    """All tokens are split. Only the last rank with tokens may have no multiple, and lengths differ
    by one multiple at most."""
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
