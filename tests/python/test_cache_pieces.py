"""Prefills of a cache in several pieces: which have carried keys, and which are decoded instead."""

from __future__ import annotations

import pytest
import torch
from flash_dmattn import streams
from test_cache import (
    BATCH,
    assert_same_state,
    attend,
    cut,
    in_pieces,
    make_cache,
    make_tokens,
    state,
    whole,
)
from torch.testing import assert_close


def test_pieces_without_carried_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device whose prefill takes none: by steps, after the first piece of all sequences."""
    monkeypatch.setattr(streams, "CARRYING", ())
    rows, weights = make_tokens()
    expected, alone = whole(rows, weights), make_cache()
    attend(alone, rows, weights)
    cache = make_cache()
    assert_close(in_pieces(cache, rows, weights), expected)
    assert_same_state(state(cache), state(alone))
    cache.drop(0)
    where = torch.tensor([0], dtype=torch.int32)
    out = attend(cache, tuple(one[:1] for one in rows), weights, index=where)
    assert_close(out, expected[:1])
    assert_same_state(state(cache), state(alone))
    with pytest.raises(NotImplementedError, match=r"^key_valid: is given for sequences that are n"):
        attend(cache, cut(rows, 0, 2), weights, key_valid=torch.ones(BATCH, 2).bool())


def test_ragged_pieces_without_carried_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "CARRYING", ())
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
    """Only then a prefill has no carried keys; every row is right whatever the cache held."""
    rows, weights = make_tokens(80)
    cache, expected = make_cache(layers=2), whole(rows, weights)
    where = torch.tensor([1], dtype=torch.int32)
    for layer in range(2):
        attend(cache, tuple(one[1:2] for one in rows), weights, layer, index=where)
    assert cache._empty == [[False] * BATCH] * 2
    cache.drop(2)
    cache.reorder(torch.arange(BATCH))  # its numbers are not known on the host
    assert cache._empty == [[False] * BATCH] * 2
    for b in range(BATCH):
        assert not any(map(all, cache._empty))
        cache.drop(b)
    assert cache._empty == [[True] * BATCH] * 2
    cache.reorder(torch.zeros(BATCH).long())
    assert cache._empty == [[True] * BATCH] * 2
    assert_close(attend(cache, rows, weights, 1), expected)
    attend(cache, cut(rows, 0, 3), weights, draft=True)
    assert cache._empty == [[True] * BATCH, [False] * BATCH]
    attend(cache, cut(rows, 3, 1), weights)
    assert cache._empty == [[False] * BATCH] * 2
    cache.reset()
    assert cache._empty == [[True] * BATCH] * 2
