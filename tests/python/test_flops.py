"""FlopCounterMode counts the products of the pairs that are kept, and of scores."""

from __future__ import annotations

from typing import Any

import flash_dmattn
import pytest
import torch
from cases import make_fused
from torch.utils.flop_counter import FlopCounterMode

BATCH, Q_HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 64
SCORES = 2 * BATCH * 30 * KV_HEADS * KV_HEADS * HEAD_DIM  # of 30 keys


def make_rows(q_len: int = 30, kv_len: int = 30) -> list[torch.Tensor]:
    shapes = [(BATCH, q_len, Q_HEADS, HEAD_DIM), *2 * [(BATCH, kv_len, KV_HEADS, HEAD_DIM)]]
    shapes += [(KV_HEADS, KV_HEADS * HEAD_DIM), (KV_HEADS,)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def attention_flops(q_len: int, kv_len: int, kept: int, causal: bool, products: int = 2) -> int:
    pairs = 0
    for i in range(q_len):
        visible = i + kv_len - q_len + 1 if causal else kv_len
        pairs += max(0, min(visible, kept))
    return 2 * products * BATCH * Q_HEADS * HEAD_DIM * pairs


def counted(run: Any) -> int:
    with FlopCounterMode(display=False) as mode:
        run()
    return mode.get_total_flops()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("q_len, kv_len", [(30, 30), (1, 30), (7, 30), (40, 30)])
def test_dense(q_len: int, kv_len: int, causal: bool) -> None:
    rows = make_rows(q_len, kv_len)[:3]
    found = counted(lambda: flash_dmattn.attention(*rows, causal=causal))
    assert found == attention_flops(q_len, kv_len, kv_len, causal)


@pytest.mark.parametrize("grad", [False, True])
def test_selected(grad: bool) -> None:
    tensors = make_rows()

    def run() -> None:
        with torch.set_grad_enabled(grad):
            out = flash_dmattn.flash_dma_attention(*tensors, 6, causal=True, recent=3)
        if grad:
            out.sum().backward()

    wanted = SCORES + attention_flops(30, 30, 9, True)
    if grad:
        wanted += 2 * SCORES + attention_flops(30, 30, 9, True, 5)
    assert counted(run) == wanted


def test_steps() -> None:
    query, key, value, dt_proj, a_coef = make_rows()

    def run() -> None:
        score, bias = flash_dmattn.score(value, dt_proj, a_coef)
        selection = flash_dmattn.select(score, 5)
        options = {"bias": bias, "selection": selection, "causal": True}
        flash_dmattn.attention(query, key, value, **options)[0].sum().backward()

    wanted = SCORES + attention_flops(30, 30, 5, True) + attention_flops(30, 30, 5, True, 5)
    assert counted(run) == wanted + 2 * SCORES  # the gradient of scores, from dbias


def test_cache() -> None:
    layer = flash_dmattn.DynamicMaskAttention(
        256, Q_HEADS, KV_HEADS, 8, recent=4, head_dim=HEAD_DIM
    )
    cache = flash_dmattn.DynamicMaskCache(1, BATCH, KV_HEADS, HEAD_DIM, 8, recent=4)
    with torch.no_grad():
        layer(torch.randn(BATCH, 70, 256), cache=cache)
        found = counted(lambda: layer(torch.randn(BATCH, 1, 256), cache=cache))
    projections = 2 * BATCH * 256 * (2 * Q_HEADS + 2 * KV_HEADS) * HEAD_DIM
    assert found == projections + SCORES // 30 + 2 * 2 * BATCH * Q_HEADS * HEAD_DIM * 12


def test_a_model_has_fewer_than_a_dense_one() -> None:
    tensors = make_fused(600)
    dense = counted(lambda: flash_dmattn.attention(*tensors[:3], causal=True))
    selected = counted(lambda: flash_dmattn.flash_dma_attention(*tensors, 20, causal=True))
    assert selected < dense / 4
