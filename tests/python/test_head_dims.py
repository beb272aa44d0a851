"""Heads whose head_dim is not a multiple of 8: layers, caches, and functions that are not among the
features and forms of cases.py. Kernels get zeros for the missing channels."""

from __future__ import annotations

from pathlib import Path

import flash_dmattn
import pytest
import torch
from cases import make_fused
from flash_dmattn import DynamicMaskAttention, DynamicMaskCache
from torch import nn

HEADS, KV_HEADS, LENGTH = 4, 2, 30
EXACT = {"atol": 2e-6, "rtol": 2e-5}
OPTIONS = {"keep_window_size": 7, "causal": True}


def make(head_dim: int, length: int = LENGTH) -> list[torch.Tensor]:
    """query, key, value, dt_proj and a_coef, small enough that no bias alone decides."""
    tensors = make_fused(length, head_dim=head_dim)
    tensors[4].data /= 4
    return [x[:1].detach().requires_grad_() for x in tensors[:3]] + tensors[3:]


def check_gradients(found: torch.Tensor, want: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found, want, **EXACT)
    weights = torch.linspace(-1, 1, found.numel()).view_as(found)
    gradients = (
        torch.autograd.grad((x * weights).sum(), leaves, retain_graph=True) for x in (found, want)
    )
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("head_dim", [3, 12, 20])
def test_functions_of_dense_attention(head_dim: int) -> None:
    rows = make(head_dim)[:3]
    want, lse = flash_dmattn.attention(*rows, causal=True)
    assert want.is_contiguous() and want.shape == rows[0].shape
    check_gradients(flash_dmattn.flash_dmattn_func(*rows, is_causal=True), want, rows)
    halves = [flash_dmattn.attention(rows[0], *x) for x in zip(*(y.split(15, 1) for y in rows[1:]))]
    merged, _ = flash_dmattn.merge(*halves[0], *halves[1])
    check_gradients(merged, flash_dmattn.attention(*rows)[0], rows)
    starts = torch.tensor([0, 11, LENGTH], dtype=torch.int32)
    packed = flash_dmattn.flash_dmattn_varlen_func(
        *(x[0] for x in rows), starts, starts, 19, 19, causal=True
    )
    pieces = [
        flash_dmattn.attention(*x, causal=True)[0][0]
        for x in zip(*(y.split((11, 19), 1) for y in rows))
    ]
    torch.testing.assert_close(packed, torch.cat(pieces), **EXACT)


def test_new_numbers_in_the_same_tensors() -> None:
    """A remembered call does not keep padded copies."""
    leaves = [x.detach() for x in make(12)]
    for _ in range(3):
        flash_dmattn.flash_dma_attention(*leaves, **OPTIONS)
    leaves[0].copy_(leaves[0].flip(1).clone())
    want = flash_dmattn.flash_dma_attention(*leaves, **OPTIONS, backend="reference")
    torch.testing.assert_close(flash_dmattn.flash_dma_attention(*leaves, **OPTIONS), want, **EXACT)


@pytest.mark.parametrize("draft", [False, True])
def test_decode(draft: bool) -> None:
    """A prompt, single tokens, and committed drafts, against the whole sequence."""
    leaves = [x.detach() for x in make(12)]
    want = flash_dmattn.flash_dma_attention(*leaves, **OPTIONS)
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
