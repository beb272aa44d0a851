"""Context parallel attention as process groups come and go, and with tensors that change or have no
elements."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import context_ranks
import flash_dmattn
import pytest
import torch
import torch.distributed as dist
from context_ranks import refusal_of
from flash_dmattn import _ranks, distributed

SIZE, LENGTH = 3, 20


def make_rows(batch: int = 1, length: int = LENGTH) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(batch, length, 4, 8), (batch, length, 2, 8), (batch, length, 2, 8), (2, 16), (2,)]
    return [torch.randn(one, generator=generator).requires_grad_() for one in shapes]


def attend(rows: list[torch.Tensor], window: int = 6, **options: Any) -> torch.Tensor:
    return distributed.context_parallel_attention(*rows, window, **options)


# ---- On the ranks ----


def group_made_anew(rank: int) -> list[Any]:
    """Groups of one name, one after the other on the same store. (gloo itself would need another
    store, so only this package's state of the group is new.)"""
    found = []
    for length in (7 + rank, 50 - rank, 30 + 2 * rank):
        found.append(distributed.sequence_positions(length).tolist())
        _ranks.known.pop(dist.group.WORLD)
    return found


def groups_of_one_name(rank: int) -> list[Any]:
    """Rank 0 alone beside ranks 1 and 2, as in a split of all ranks."""
    members = [[0], [1, 2]]
    groups = [dist.new_group(one, group_desc="half") for one in members]
    group = groups[min(rank, 1)]
    return distributed.sequence_positions(5 + rank, group=group).tolist()


def destroyed_before_backward(rank: int) -> dict[str, Any]:
    group = dist.new_group(list(range(SIZE)))
    out = attend(make_rows(), group=group)
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    return refusal_of(lambda: out.sum().backward())


def changed_before_backward(rank: int) -> dict[str, Any]:
    """Padding that changes is noticed before anything is exchanged."""
    found = {}
    for name in ("attend", "ring"):
        rows, valid = make_rows(), torch.arange(LENGTH)[None] > 3
        if name == "attend":
            out = attend(rows, key_valid=valid, bias_form="none")
        else:
            out = distributed.ring_attention(*rows[:3], key_valid=valid)
        valid.fill_(True)
        found[name] = refusal_of(lambda out=out: out.sum().backward())
    return found


def second_derivatives(rank: int) -> dict[str, Any]:
    x = torch.randn(1, 4, 2).requires_grad_()
    whole = distributed.gather_sequence(x)
    (first,) = torch.autograd.grad((whole**3).sum(), x, create_graph=True)
    found = {"gather_sequence": refusal_of(lambda: first.sum().backward())}
    for causal in (True, False):
        rows = make_rows()
        out = attend(rows, causal=causal)
        gradients = torch.autograd.grad((out**2).sum(), rows[:3], create_graph=True)
        penalty = sum((one**2).sum() for one in gradients)
        found[f"causal={causal}"] = refusal_of(functools.partial(backward_with, penalty, rows))
    return found


def backward_with(penalty: torch.Tensor, rows: list[torch.Tensor]) -> None:
    """Backward of a loss that also has another gradient."""
    (penalty + sum(one.sum() for one in rows)).backward()


def no_elements(rank: int) -> dict[str, Any]:
    found = {}
    for name, batch, length, causal in (
        ("batch", 0, LENGTH, True),
        ("batch, not causal", 0, LENGTH, False),
        ("tokens", 2, 0, True),
        ("tokens, not causal", 2, 0, False),
    ):
        rows = make_rows(batch, length)
        out = attend(rows, causal=causal)
        out.sum().backward()
        found[name] = [list(out.shape), *([*one.grad.shape] for one in rows)]
    return found


def starts_and_numbers(rank: int) -> dict[str, Any]:
    many = [0, *range(1, 30), SIZE * LENGTH]
    found = {"many": bool(torch.isfinite(attend(make_rows(), starts=many)).all())}
    options = {"starts": many[:-2] + [many[-1]] if rank == 1 else many}
    found["other many"] = refusal_of(lambda: attend(make_rows(), **options))
    found["nan"] = refusal_of(lambda: attend(make_rows(), softcap=float("nan")))
    lengths = [LENGTH if n == rank else 1 << 30 for n in range(SIZE)]
    found["total"] = refusal_of(lambda: attend(make_rows(), lengths=lengths))
    with torch.inference_mode():
        attend(make_rows(), starts=[0, 11, SIZE * LENGTH])
    attend(make_rows(), starts=[0, 11, SIZE * LENGTH]).sum().backward()
    layer = flash_dmattn.DynamicMaskAttention(32, 4, 2, 6, process_group=dist.group.WORLD)
    found["pickle"] = refusal_of(lambda: pickle.dumps(layer))
    return found


def record(rank: int) -> dict[str, Any]:
    runs = (
        *(groups_of_one_name, destroyed_before_backward, changed_before_backward),
        *(second_derivatives, no_elements, starts_and_numbers, group_made_anew),
    )
    found = {}
    for run in runs:
        print(run.__name__, flush=True)
        found[run.__name__] = run(rank)
    return found


# ---- In the process of the tests ----

RUN = context_ranks.Once(__name__, "record", SIZE, timeout=60)


def on_ranks(name: str) -> list[Any]:
    return [one[name] for one in RUN.results()]


def test_a_group_that_is_made_anew() -> None:
    """The new group does not read what the old one has written."""
    for rank, found in enumerate(on_ranks("group_made_anew")):
        lengths = [[7, 8, 9], [50, 49, 48], [30, 32, 34]]
        for one, all_lengths in zip(found, lengths):
            begin = sum(all_lengths[:rank])
            assert one == [list(range(begin, begin + all_lengths[rank]))]


def test_groups_without_a_common_rank() -> None:
    alone, first, second = on_ranks("groups_of_one_name")
    assert alone == [[*range(5)]]
    assert first == [[*range(6)]] and second == [[*range(6, 13)]]


def test_a_group_that_is_destroyed_before_backward() -> None:
    for one in on_ranks("destroyed_before_backward"):
        assert one["kind"] == "RuntimeError" and one["seconds"] < 5
        assert one["message"] == "group: the process group has been destroyed"


@pytest.mark.parametrize("name", ["attend", "ring"])
def test_padding_that_changes_before_backward(name: str) -> None:
    for one in on_ranks("changed_before_backward"):
        assert one[name]["kind"] == "RuntimeError" and one[name]["seconds"] < 5
        assert "modified by an inplace operation" in one[name]["message"]


@pytest.mark.parametrize("name", ["gather_sequence", "causal=True", "causal=False"])
def test_second_derivatives(name: str) -> None:
    for one in on_ranks("second_derivatives"):
        assert one[name]["kind"] == "RuntimeError"
        assert "differentiate twice" in one[name]["message"]


def test_tensors_without_elements() -> None:
    for one in on_ranks("no_elements"):
        assert len(one) == 4
        for name, (out, *gradients) in one.items():
            batch, length = (0, LENGTH) if "batch" in name else (2, 0)
            assert out == [batch, length, 4, 8]
            rows = [[batch, length, heads, 8] for heads in (4, 2, 2)]
            assert gradients == [*rows, [2, 16], [2]]


def test_many_starts_in_a_message() -> None:
    for one in on_ranks("starts_and_numbers"):
        assert one["many"] is True
        message = one["other many"]["message"]
        assert message.startswith("starts: is 31 numbers of checksum ")
        assert "on ranks 0, 2, 30 numbers of checksum " in message


@pytest.mark.parametrize(
    "name, kind, words",
    [
        ("nan", "ValueError", "softcap: is nan, want"),
        ("total", "ValueError", "query: all ranks have 2147483668 tokens, want at most 2147483647"),
        ("pickle", "TypeError", "process_group: cannot be saved, save the state_dict()"),
    ],
)
def test_numbers_and_files(name: str, kind: str, words: str) -> None:
    for one in on_ranks("starts_and_numbers"):
        assert one[name]["kind"] == kind and words in one[name]["message"]


def test_lengths_with_a_cache() -> None:
    sizes = {"kv_heads": 2, "head_dim": 8, "window": 6, "recent": 0}
    layer = flash_dmattn.DynamicMaskAttention(32, 4, 2, 6, recent=0)
    cache = flash_dmattn.DynamicMaskCache(layers=1, batch=1, **sizes)
    with torch.no_grad(), pytest.raises(ValueError, match="^lengths: is given, want None with a c"):
        layer(torch.randn(1, 3, 32), cache=cache, lengths=[3])
