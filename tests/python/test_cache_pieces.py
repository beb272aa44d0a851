"""Prefills of a cache in several pieces, with and without carried keys."""

from __future__ import annotations

import torch
from test_cache import (
    BATCH,
    attend,
    cut,
    make_cache,
    make_tokens,
    whole,
)
from torch.testing import assert_close


def test_ragged_pieces() -> None:
    """One piece is empty, and one has a single token."""
    rows, weights = make_tokens(250)
    expected, cache = whole(rows, weights), make_cache()
    first, counts = torch.tensor([70, 0, 99]).int(), torch.tensor([150, 130, 1]).int()
    attend(cache, cut(rows, 0, 100), weights, n_tokens=first)
    piece = [
        torch.stack([one[b, n : n + 150] for b, n in enumerate(first.tolist())]) for one in rows
    ]
    out = attend(cache, tuple(piece), weights, n_tokens=counts)
    for b, (n, count) in enumerate(zip(first.tolist(), counts.tolist())):
        assert_close(out[b, :count], expected[b, n : n + count])
    assert torch.equal(cache.keys.seen, first + counts)


def test_empty_sequences_are_known_on_the_host() -> None:
    """Only empty sequences have no carried keys in a prefill. Every row is right whatever the cache
    held."""
    rows, weights = make_tokens(80)
    cache, expected = make_cache(layers=2), whole(rows, weights)
    where = torch.tensor([1], dtype=torch.int32)
    for layer in range(2):
        attend(cache, tuple(one[1:2] for one in rows), weights, layer, index=where)
    assert cache._empty == [False] * 2
    cache.drop(2)
    cache.reorder(torch.arange(BATCH))  # the host does not know its numbers
    assert cache._empty == [False] * 2
    for b in range(BATCH):
        assert not any(cache._empty)
        cache.drop(b)
    assert cache._empty == [True] * 2
    cache.reorder(torch.zeros(BATCH).long())
    assert cache._empty == [True] * 2
    assert_close(attend(cache, rows, weights, 1), expected)
    attend(cache, cut(rows, 0, 3), weights, draft=True)
    assert cache._empty == [True, False]
    attend(cache, cut(rows, 3, 1), weights)
    assert cache._empty == [False] * 2
    cache.reset()
    assert cache._empty == [True] * 2
