"""Heads whose head_dim is not a multiple of 8: every function, layer and cache has the results and
gradients of the formula. Kernels get zeros for the missing channels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flash_dmattn
import pytest
import torch
from flash_dmattn import DynamicMaskAttention, DynamicMaskCache
from torch import nn

HEADS, KV_HEADS, LENGTH = 4, 2, 30
EXACT = {"atol": 2e-6, "rtol": 2e-5}
head_dims = pytest.mark.parametrize("head_dim", [3, 12, 20])


def make(head_dim: int, length: int = LENGTH) -> list[torch.Tensor]:
    """query, key, value, dt_proj and a_coef."""
    generator = torch.Generator().manual_seed(head_dim)
    shapes = [(1, length, heads, head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    shapes += [(KV_HEADS, KV_HEADS * head_dim), (KV_HEADS,)]
    leaves = [torch.randn(shape, generator=generator) for shape in shapes]
    leaves[3] /= (KV_HEADS * head_dim) ** 0.5
    leaves[4] /= 4  # so that the bias stays small
    return [x.requires_grad_() for x in leaves]


def attend_in_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, added: torch.Tensor
) -> torch.Tensor:
    """Attention in float64; `added` [..., q_len, kv_len] is added to the logits of each query
    head."""
    rows = (x.transpose(1, 2) for x in (query, key, value))
    out = nn.functional.scaled_dot_product_attention(*rows, added, enable_gqa=True)
    return out.transpose(1, 2)


def scores_in_torch(value: torch.Tensor, dt_proj: torch.Tensor, a_coef: torch.Tensor) -> Any:
    dt = nn.functional.linear(value.flatten(2), dt_proj)
    return (a_coef * nn.functional.softplus(dt)).transpose(1, 2)


def of_selection(score: torch.Tensor, window: int) -> torch.Tensor:
    """A mask of logits: the bias of each query's `window` best keys, and -inf for others."""
    rows = score[:, :, None].expand(-1, -1, score.shape[-1], -1)
    future = torch.ones(rows.shape[-2:], dtype=torch.bool).triu(1)
    best = rows.detach().masked_fill(future, -torch.inf).topk(window, -1).indices
    kept = torch.zeros_like(rows, dtype=torch.bool).scatter(-1, best, True) & ~future
    added = torch.where(kept, rows.exp(), -torch.inf)
    return added.repeat_interleave(HEADS // KV_HEADS, 1)


def check_gradients(found: torch.Tensor, want: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found, want, **EXACT)
    weights = torch.linspace(-1, 1, found.numel()).view_as(found)
    gradients = (
        torch.autograd.grad((x * weights).sum(), leaves, retain_graph=True) for x in (found, want)
    )
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@head_dims
def test_attention(head_dim: int) -> None:
    *rows, _, _ = make(head_dim)
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    causal = torch.zeros(LENGTH, LENGTH).masked_fill(future, -torch.inf)
    want = attend_in_torch(*rows, causal)
    out, lse = flash_dmattn.attention(*rows, causal=True)
    assert out.is_contiguous() and out.shape == rows[0].shape
    check_gradients(out, want, rows)
    check_gradients(flash_dmattn.flash_dmattn_func(*rows, is_causal=True), want, rows)
    weights = flash_dmattn.attention_probabilities(*rows[:2], lse, causal=True)
    value = rows[2].transpose(1, 2).repeat_interleave(HEADS // KV_HEADS, 1)
    torch.testing.assert_close((weights @ value).transpose(1, 2), want, **EXACT)
    halves = [flash_dmattn.attention(rows[0], *x) for x in zip(*(y.split(15, 1) for y in rows[1:]))]
    merged, _ = flash_dmattn.merge(*halves[0], *halves[1])
    check_gradients(merged, attend_in_torch(*rows, torch.zeros(LENGTH, LENGTH)), rows)


def test_new_numbers_in_the_same_tensors() -> None:
    """A remembered call does not keep padded copies."""
    leaves = [x.detach() for x in make(12)]
    options = {"keep_window_size": 7, "causal": True}
    for _ in range(3):
        flash_dmattn.flash_dma_attention(*leaves, **options)
    leaves[0].copy_(leaves[0].flip(1).clone())
    want = attend_in_torch(*leaves[:3], of_selection(scores_in_torch(*leaves[2:]), 7))
    found = flash_dmattn.flash_dma_attention(*leaves, **options)
    torch.testing.assert_close(found, want, **EXACT)


@head_dims
def test_packed(head_dim: int) -> None:
    leaves = make(head_dim)
    starts = torch.tensor([0, 11, LENGTH], dtype=torch.int32)
    rows = [x[0] for x in leaves[:3]]
    weights = {"dt_proj": leaves[3], "a_coef": leaves[4], "keep_window_size": 5}
    for more in ({}, weights):
        sizes = (starts, starts, 19, 19)
        found = flash_dmattn.flash_dmattn_varlen_func(*rows, *sizes, causal=True, **more)
        pieces = []
        for span in (slice(0, 11), slice(11, LENGTH)):
            own = [x[:, span] for x in leaves[:3]]
            score = scores_in_torch(own[2], *leaves[3:])
            score = score if more else torch.zeros_like(score)
            window = 5 if more else score.shape[-1]
            pieces.append(attend_in_torch(*own, of_selection(score, window))[0])
        torch.testing.assert_close(found, torch.cat(pieces), **EXACT)


@pytest.mark.parametrize("draft", [False, True])
def test_decode(draft: bool) -> None:
    """A prompt, single tokens, and committed drafts, against the whole sequence."""
    leaves = [x.detach() for x in make(12)]
    want = attend_in_torch(*leaves[:3], of_selection(scores_in_torch(*leaves[2:]), 7))
    cache = DynamicMaskCache(layers=1, batch=1, kv_heads=KV_HEADS, head_dim=12, window=7, recent=0)
    assert cache.keys.key.shape[-1] == 16
    pieces = [(slice(0, 20), False), (slice(20, 21), False)]
    pieces += [(slice(21, 24), draft), (slice(24, 25), draft)]
    for span, is_draft in pieces:
        tokens = [x[:, span] for x in leaves[:3]]
        found = cache.attend(0, *tokens, *leaves[3:], draft=is_draft)
        torch.testing.assert_close(found, want[:, span], **EXACT)
    if draft:
        cache.commit()
    tokens = [x[:, 25:] for x in leaves[:3]]
    weights = {"dt_proj": leaves[3], "a_coef": leaves[4]}
    found = flash_dmattn.decode(*tokens, cache.keys, **weights)
    torch.testing.assert_close(found, want[:, 25:], **EXACT)


def test_a_cache_of_unpadded_rows_is_refused() -> None:
    leaves = [x.detach() for x in make(12, 3)]
    keys = DynamicMaskCache(1, 1, KV_HEADS, 16, 4).keys
    keys = keys._replace(key=keys.key[..., :12], value=keys.value[..., :12])
    with pytest.raises(ValueError, match=r"^cache\.key: axis 3 has 12 elements, want 16: head_dim"):
        flash_dmattn.decode(*leaves[:3], keys, dt_proj=leaves[3], a_coef=leaves[4])


@pytest.mark.parametrize("rope_base", [None, 1e4])
def test_a_layer(rope_base: float | None) -> None:
    """A layer of head_dim 12, with and without a cache, and its gradients beside a layer of
    head_dim 16 whose weights of the other channels are 0."""
    torch.manual_seed(3)
    sizes = {"hidden": 48, "heads": HEADS, "kv_heads": KV_HEADS, "window": 6, "recent": 2}
    layer = DynamicMaskAttention(**sizes, rope_base=rope_base)
    nn.init.normal_(layer.A)
    x = torch.randn(2, 25, 48, requires_grad=True)
    query, key, value = layer._project(x, x)
    if rope_base is not None:
        at = torch.arange(25)[None]
        query, key = layer.rotate_heads(query, at), layer.rotate_heads(key, at)
    rules = {"recent": 2, "causal": True, "softmax_scale": 12**-0.5}
    padded = [nn.functional.pad(one, (0, 4)) for one in (query, key, value)]
    weight = nn.functional.pad(layer.dt_proj.weight.unflatten(1, (-1, 12)), (0, 4)).flatten(1)
    want = flash_dmattn.flash_dma_attention(*padded, weight, layer.A, 6, **rules)
    want = layer.o_proj(want[..., :12].flatten(2))
    check_gradients(layer(x), want, [x, *layer.parameters()])
    cache = DynamicMaskCache(1, 2, KV_HEADS, 12, 6, recent=2)
    with torch.no_grad():
        steps = [layer(x[:, :20], cache=cache)]
        steps += [layer(x[:, t : t + 1], cache=cache) for t in range(20, 25)]
    torch.testing.assert_close(torch.cat(steps, 1), want, atol=1e-5, rtol=1e-4)


def test_workspace() -> None:
    leaves = [x.detach() for x in make(12)]
    options = flash_dmattn.DynamicMaskOptions(7, max_sequence_length=64, max_batch_size=1)
    assert flash_dmattn.workspace_bytes(options, *leaves, causal=True) > 0


def test_a_layer_over_ranks(tmp_path: Path) -> None:
    """With one rank it equals the layer without a process group."""
    distributed = pytest.importorskip("torch.distributed")
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for window in (6, None):
            torch.manual_seed(3)
            layer = DynamicMaskAttention(48, HEADS, KV_HEADS, window, recent=0)
            spread = DynamicMaskAttention(
                48, HEADS, KV_HEADS, window, recent=0, process_group=distributed.group.WORLD
            )
            spread.load_state_dict(layer.state_dict())
            x = torch.randn(1, 20, 48)
            torch.testing.assert_close(spread(x), layer(x), atol=1e-5, rtol=1e-4)
    finally:
        distributed.destroy_process_group()


def test_a_cached_layer_of_onnx() -> None:
    """As a function of the cache's tensors, before it is exported."""
    onnx = pytest.importorskip("flash_dmattn.onnx")
    torch.manual_seed(3)
    layer = DynamicMaskAttention(48, HEADS, KV_HEADS, 6, recent=2).eval()
    x = torch.randn(1, 20, 48)
    cache = tuple(onnx.empty_cache(layer).values())
    with torch.no_grad():
        first, *cache = onnx.CachedLayer(layer)(x[:, :15], *cache)
        second, *_ = onnx.CachedLayer(layer)(x[:, 15:], *cache)
        want = layer(x)
    torch.testing.assert_close(torch.cat((first, second), 1), want, atol=1e-5, rtol=1e-4)
