"""Caches that layers make, and one cache for layers of different windows."""

from __future__ import annotations

from typing import Any

import flash_dmattn
import pytest
import torch
from flash_dmattn import DynamicMaskAttention, DynamicMaskCache, LayerCaches

BATCH, LENGTH, HIDDEN = 2, 40, 32
RULES = ({"window": 4}, {"window": 9, "recent": 0, "sinks": 2}, {"window": 4})


@pytest.fixture
def layers() -> list[DynamicMaskAttention]:
    torch.manual_seed(0)
    layers = [DynamicMaskAttention(HIDDEN, 4, 2, **rules) for rules in RULES]
    for layer in layers:
        torch.nn.init.normal_(layer.A)
    return layers


def run(layers: list[DynamicMaskAttention], x: torch.Tensor, cache: Any, **given: Any) -> Any:
    for number, layer in enumerate(layers):
        x = layer(x, cache=cache, layer=number, **given) if cache is not None else layer(x)
    return x


def states(batch: int = BATCH) -> torch.Tensor:
    return torch.randn(batch, LENGTH, HIDDEN)


def close(found: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_layers_of_different_windows(layers: list[DynamicMaskAttention]) -> None:
    x, cache = states(), LayerCaches(layers, BATCH)
    want = run(layers, x, None)
    found = [run(layers, x[:, :30], cache)]
    found += [run(layers, x[:, t : t + 1], cache) for t in range(30, LENGTH)]
    close(torch.cat(found, 1), want)
    assert [one.layers for one in cache.caches] == [2, 1]
    assert [cache.get_seq_length(n) for n in range(3)] == [LENGTH] * 3
    assert cache.memory_bytes == sum(layer.new_cache(BATCH).memory_bytes for layer in layers)
    cache.reset()
    close(run(layers, x[:, :7], cache), run(layers, x[:, :7], None))


@torch.no_grad()
def test_drafts_of_layers(layers: list[DynamicMaskAttention]) -> None:
    """Four drafts: three stay after crop(), and two enter."""
    x, other = states(), states()
    cache, plain = LayerCaches(layers, BATCH), LayerCaches(layers, BATCH)
    for one in (cache, plain):
        run(layers, x[:, :10], one)
    drafts = torch.cat((x[:, 10:12], other[:, :2]), 1)
    run(layers, drafts, cache, draft=True)
    assert cache.drafts == 4
    cache.crop(3)
    assert cache.drafts == 3
    cache.commit(torch.tensor([2, 2], dtype=torch.int32))
    run(layers, x[:, 10:12], plain)
    close(run(layers, x[:, 12:20], cache), run(layers, x[:, 12:20], plain))


@torch.no_grad()
def test_sequences_of_layers(layers: list[DynamicMaskAttention]) -> None:
    x, cache = states(), LayerCaches(layers, BATCH)
    run(layers, x[:, :10], cache)
    cache.reorder(torch.tensor([1, 0]))
    close(run(layers, x.flip(0)[:, 10:20], cache), run(layers, x, None).flip(0)[:, 10:20])
    cache.drop(1)
    index = torch.tensor([1], dtype=torch.int32)
    close(run(layers, x[:1, :5], cache, index=index), run(layers, x[:1, :5], None))
    assert cache.positions(1, 1, index).tolist() == [[5]]


@torch.no_grad()
def test_attend_of_a_layer() -> None:
    layer = DynamicMaskAttention(HIDDEN, 4, 2, 4)
    cache, alone = LayerCaches([layer, layer], 1), layer.new_cache(1)
    rows = torch.randn(1, 6, 4, 8), *torch.randn(2, 1, 6, 2, 8)
    weights = torch.randn(2, 16), torch.ones(2)
    found = cache.attend(1, *rows, *weights, softcap=2.0)
    assert torch.equal(found, alone.attend(0, *rows, *weights, softcap=2.0))
    assert [cache.get_seq_length(n) for n in (0, 1)] == [0, 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_makes_its_cache(dtype: torch.dtype) -> None:
    rules = {"window": 6, "recent": 3, "sinks": 2, "head_dim": 16}
    layer = DynamicMaskAttention(HIDDEN, 4, 2, **rules, dtype=dtype)
    cache = layer.new_cache(BATCH, layers=3, static=True)
    assert (cache.layers, cache.batch, cache.static) == (3, BATCH, True)
    assert cache.keys.key.shape == (3 * BATCH, 9, 2, 16) and cache.keys.key.dtype == dtype
    assert (cache.keys.window, cache.keys.recent, cache.keys.sinks) == (6, 3, 2)
    with torch.no_grad():
        layer(torch.randn(BATCH, 5, HIDDEN, dtype=dtype), cache=cache, layer=2)


def test_recent_is_window_by_default() -> None:
    """As in a layer; functions have 0, as in the method's documents."""
    assert DynamicMaskCache(1, 1, 2, 8, window=5).keys.recent == 5
    assert DynamicMaskCache(1, 1, 2, 8, window=5, recent=0).keys.recent == 0
    assert DynamicMaskAttention(HIDDEN, 4, 2, 5).recent == 5
    assert flash_dmattn.select(torch.randn(1, 2, 6), 5).recent == 0


def test_what_caches_look_like(layers: list[DynamicMaskAttention]) -> None:
    cache = layers[1].new_cache(BATCH)
    shown = (
        "DynamicMaskCache(layers=1, batch=2, kv_heads=2, head_dim=8, window=9, recent=0, sinks=2, "
        "bias_form='exp', dtype=torch.float32, device=cpu{}): {} tokens, 2744 bytes"
    )
    assert cache.memory_bytes == 2744
    assert repr(cache) == shown.format("", 0)
    static = layers[1].new_cache(BATCH, static=True)
    with torch.no_grad():
        for one in (cache, static):
            layers[1](torch.randn(BATCH, 11, HIDDEN), cache=one)
    assert repr(cache) == shown.format("", 11)
    assert repr(static) == shown.format(", static=True", 11)
    both = LayerCaches(layers, BATCH)
    assert repr(both).startswith("LayerCaches(\n    DynamicMaskCache(layers=2, batch=2,")
    assert repr(both).count("0 tokens") == 2


@torch.no_grad()
def test_a_refused_commit_changes_nothing(layers: list[DynamicMaskAttention]) -> None:
    x, cache = states(), LayerCaches(layers, BATCH)
    run(layers, x[:, :10], cache)
    for number, length in enumerate((3, 2, 3)):
        layers[number](x[:, :length], cache=cache, layer=number, draft=True)
    seen = [one.keys.seen.clone() for one in cache.caches]
    with pytest.raises(
        ValueError, match=r"^count: the layers have \[3, 3, 2\] drafts, want as many"
    ):
        cache.commit(3)
    with pytest.raises(ValueError, match="^b: the layers have"):
        cache.drop(0)
    assert all(torch.equal(one.keys.seen, was) for one, was in zip(cache.caches, seen))
    assert cache.drafts == 3
