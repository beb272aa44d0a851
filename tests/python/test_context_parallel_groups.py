"""Context parallel attention as process groups come and go, and with tensors that change or have no
elements."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
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


def refuse(error: type[Exception], words: str, action: Callable[[], Any]) -> None:
    """The error comes without waiting for another rank."""
    found = refusal_of(action)
    assert found["kind"] == error.__name__ and words in found["message"], found
    assert found["seconds"] < 5


# ---- On the ranks ----


def groups_of_one_name(rank: int) -> None:
    """Rank 0 alone beside ranks 1 and 2, as in a split of all ranks."""
    members = [[0], [1, 2]]
    groups = [dist.new_group(one, group_desc="half") for one in members]
    found = distributed.sequence_positions(5 + rank, group=groups[min(rank, 1)])
    assert found.tolist() == [[*range(5)], [*range(6)], [*range(6, 13)]][rank : rank + 1]


def destroyed_before_backward(rank: int) -> None:
    group = dist.new_group(list(range(SIZE)))
    out = attend(make_rows(), group=group)
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    words = "group: the process group has been destroyed"
    refuse(RuntimeError, words, lambda: out.sum().backward())


def padding_that_changes_before_backward(rank: int) -> None:
    """It is noticed before anything is exchanged."""
    for is_ring in (False, True):
        rows, valid = make_rows(), torch.arange(LENGTH)[None] > 3
        if is_ring:
            out = distributed.ring_attention(*rows[:3], key_valid=valid)
        else:
            out = attend(rows, key_valid=valid, bias_form="none")
        valid.fill_(True)
        words = "modified by an inplace operation"
        refuse(RuntimeError, words, lambda out=out: out.sum().backward())


def second_derivatives(rank: int) -> None:
    x = torch.randn(1, 4, 2).requires_grad_()
    whole = distributed.gather_sequence(x)
    (first,) = torch.autograd.grad((whole**3).sum(), x, create_graph=True)
    refuse(RuntimeError, "differentiate twice", lambda: first.sum().backward())
    for causal in (True, False):
        rows = make_rows()
        out = attend(rows, causal=causal)
        gradients = torch.autograd.grad((out**2).sum(), rows[:3], create_graph=True)
        # The loss also has another gradient.
        penalty = sum((one**2).sum() for one in gradients) + sum(one.sum() for one in rows)
        refuse(RuntimeError, "differentiate twice", penalty.backward)


def tensors_without_elements(rank: int) -> None:
    for batch, length, causal in itertools.product((0, 2), (0, LENGTH), (True, False)):
        if batch * length == 0:
            rows = make_rows(batch, length)
            out = attend(rows, causal=causal)
            out.sum().backward()
            assert out.shape == rows[0].shape
            assert all(one.grad.shape == one.shape for one in rows)


def starts_and_numbers(rank: int) -> None:
    many = [0, *range(1, 30), SIZE * LENGTH]
    assert torch.isfinite(attend(make_rows(), starts=many)).all()
    options = {"starts": many[:-2] + [many[-1]] if rank == 1 else many}
    found = refusal_of(lambda: attend(make_rows(), **options))["message"]
    assert found.startswith("starts: is 31 numbers of checksum ")
    assert "on ranks 0, 2, 30 numbers of checksum " in found
    words = "softcap: is nan, want"
    refuse(ValueError, words, lambda: attend(make_rows(), softcap=float("nan")))
    lengths = [LENGTH if n == rank else 1 << 30 for n in range(SIZE)]
    words = "query: all ranks have 2147483668 tokens, want at most 2147483647"
    refuse(ValueError, words, lambda: attend(make_rows(), lengths=lengths))
    with torch.inference_mode():
        attend(make_rows(), starts=[0, 11, SIZE * LENGTH])
    attend(make_rows(), starts=[0, 11, SIZE * LENGTH]).sum().backward()
    layer = flash_dmattn.DynamicMaskAttention(32, 4, 2, 6, process_group=dist.group.WORLD)
    words = "process_group: cannot be saved, save the state_dict()"
    refuse(TypeError, words, lambda: pickle.dumps(layer))


def group_made_anew(rank: int) -> None:
    """Groups of one name, one after the other on the same store: the new one does not read what the
    old one has written. (gloo itself would need another store, so only this package's state of the
    group is new.)"""
    for lengths in ([7, 8, 9], [50, 49, 48], [30, 32, 34]):
        begin, own = sum(lengths[:rank]), lengths[rank]
        found = distributed.sequence_positions(own).tolist()
        assert found == [list(range(begin, begin + own))]
        _ranks.known.pop(dist.group.WORLD)


CHECKS = {
    check.__name__: check
    for check in (
        *(groups_of_one_name, destroyed_before_backward, padding_that_changes_before_backward),
        *(second_derivatives, tensors_without_elements, starts_and_numbers, group_made_anew),
    )
}


def record(rank: int) -> dict[str, Any]:
    return context_ranks.record(CHECKS, rank)


# ---- In the process of the tests ----

RUN = context_ranks.Once(__name__, "record", SIZE, timeout=60)


@pytest.mark.parametrize("name", CHECKS)
def test_on_ranks(name: str) -> None:
    assert RUN.results_of(name) == [None] * SIZE


def test_lengths_with_a_cache() -> None:
    sizes = {"kv_heads": 2, "head_dim": 8, "window": 6, "recent": 0}
    layer = flash_dmattn.DynamicMaskAttention(32, 4, 2, 6, recent=0)
    cache = flash_dmattn.DynamicMaskCache(layers=1, batch=1, **sizes)
    with torch.no_grad(), pytest.raises(ValueError, match="^lengths: is given, want None with a c"):
        layer(torch.randn(1, 3, 32), cache=cache, lengths=[3])
