"""Doge with a sliding_window: a query keeps its best keys in the window."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import flash_dmattn.transformers as ours  # noqa: E402
from doge_models import (  # noqa: E402
    LENGTH,
    assert_near,
    decided,
    make_separate,
    make_tokens,
    registered,
)

__all__ = ["registered", "decided"]  # fixtures
pytestmark = pytest.mark.usefixtures("decided")

# keep_window_size is 24: the first window keeps all keys, the others keep some
windows = pytest.mark.parametrize("sliding", [1, 7, 24, 40, 200])


def make_mask(left: int, right: int) -> torch.Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :left] = 0
    mask[1, LENGTH - right :] = 0
    return mask


@windows
@pytest.mark.parametrize("left, right", [(0, 0), (30, 20)])
def test_logits(sliding: int, left: int, right: int) -> None:
    eager, selected = make_separate("doge", sliding_window=sliding)
    tokens, mask = make_tokens(), make_mask(left, right)
    there = mask.bool()
    with torch.no_grad():
        wanted = eager(tokens, attention_mask=mask).logits
        found = selected(tokens, attention_mask=mask).logits
        unlimited = make_separate("doge")[1](tokens, attention_mask=mask).logits
    assert_near(found[there], wanted[there])
    is_same = (found - unlimited)[there].abs().max() < 1e-5
    assert is_same == (sliding > LENGTH)


def test_padding_in_the_middle() -> None:
    """Padding takes up places in the window, which then holds fewer keys."""
    for sliding in (7, 40):
        eager, selected = make_separate("doge", sliding_window=sliding)
        mask = make_mask(0, 0)
        mask[:, 50:58] = 0
        given = {"attention_mask": mask, "use_cache": False}
        with torch.no_grad():
            wanted = eager(make_tokens(), **given).logits[mask.bool()]
            assert_near(selected(make_tokens(), **given).logits[mask.bool()], wanted)


@pytest.mark.parametrize("sliding", [7, 40])
def test_gradients(sliding: int) -> None:
    pair = make_separate("doge with biases", sliding_window=sliding)
    tokens = make_tokens()
    for model in pair:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    for (_, found), wanted in zip(pair[1].named_parameters(), pair[0].parameters()):
        assert_near(found.grad, wanted.grad)


@pytest.mark.parametrize("sliding", [7, 40])
def test_packed(sliding: int) -> None:
    eager, selected = make_separate("doge", sliding_window=sliding)
    tokens, ends = make_tokens(1), [0, 30, 31, LENGTH]
    positions = torch.cat([torch.arange(b - a) for a, b in zip(ends, ends[1:])])[None]
    with torch.no_grad():
        wanted = [eager(tokens[:, a:b]).logits for a, b in zip(ends, ends[1:])]
        found = selected(tokens, position_ids=positions, use_cache=False).logits
    assert_near(found, torch.cat(wanted, 1))


def caches(config: Any) -> list[Any]:
    return [ours.DogeCache(config), transformers.DynamicCache(config=config)]


@windows
@pytest.mark.parametrize("left", [0, 11])
def test_pieces(sliding: int, left: int) -> None:
    """With a cache the logits are the same as without."""
    eager, selected = make_separate("doge", sliding_window=sliding)
    tokens, mask = make_tokens(), make_mask(left, 0)
    there, ends = mask.bool(), [0, 50, 51, 52, LENGTH]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        wanted = eager(tokens, attention_mask=mask, position_ids=positions).logits[there]
        for cache in caches(selected.config):
            found = [
                selected(
                    tokens[:, a:b],
                    attention_mask=mask[:, :b],
                    position_ids=positions[:, a:b],
                    past_key_values=cache,
                ).logits
                for a, b in zip(ends, ends[1:])
            ]
            assert_near(torch.cat(found, 1)[there], wanted)
            if isinstance(cache, ours.DogeCache) and sliding > 1:  # transformers keeps all for 1
                assert cache.layers[0].keys.shape[2] <= sliding  # whatever the length


@pytest.mark.parametrize("sliding", [7, 40])
def test_crop(sliding: int) -> None:
    _, selected = make_separate("doge", sliding_window=sliding)
    tokens, others = make_tokens(1), make_tokens(2)[1:]
    cache = ours.DogeCache(selected.config)
    cache.activate_past_recording()
    with torch.no_grad():
        wanted = selected(tokens).logits
        selected(torch.cat((tokens[:, :60], others[:, :9]), 1), past_key_values=cache)
        cache.crop(-9)
        assert_near(selected(tokens[:, 60:], past_key_values=cache).logits, wanted[:, 60:])


def test_bad_caches() -> None:
    _, selected = make_separate("doge", sliding_window=7)
    _, unlimited = make_separate("doge")
    tokens = make_tokens(1, 10)
    with pytest.raises(
        ValueError, match="cache: its sliding_window is None, want the model's slid"
    ):
        selected(tokens, past_key_values=ours.DogeCache(unlimited.config))
    with pytest.raises(
        ValueError, match="its sliding_window is 7, want the model's sliding_window, N"
    ):
        unlimited(tokens, past_key_values=ours.DogeCache(selected.config))
    with pytest.raises(NotImplementedError, match="static: is True, want False for a model with a"):
        ours.DogeCache(selected.config, static=True)
