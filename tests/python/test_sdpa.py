"""Against scaled_dot_product_attention: dense, causal, and under a selection as a mask."""

from __future__ import annotations

import math

import evaluate
import flash_dmattn
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_input(dtype: torch.dtype, q_len: int, kv_len: int) -> Tensors:
    """Tensors whose heads come first, as in PyTorch's models."""
    generator = torch.Generator().manual_seed(q_len * 7 + kv_len)
    query = torch.randn(2, 4, q_len, 64, generator=generator).to(dtype)
    key, value = torch.randn(2, 2, 2, kv_len, 64, generator=generator).to(dtype)
    return query, key, value


def sdpa(tensors: Tensors, dtype: torch.dtype, mask: torch.Tensor | None) -> torch.Tensor:
    query, key, value = (tensor.to(dtype) for tensor in tensors)
    mask = None if mask is None else mask.repeat_interleave(2, 1)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def assert_as_good_as_sdpa(
    out: torch.Tensor, tensors: Tensors, mask: torch.Tensor | None = None
) -> None:
    plain = sdpa(tensors, tensors[0].dtype, mask)
    exact = sdpa(tensors, torch.float64, mask)
    evaluate.assert_within(out.transpose(1, 2), exact, plain)


def top_mask(score: torch.Tensor, window: int) -> torch.Tensor:
    """The keys of the `window` largest scores of each prefix; no two scores are equal."""
    kv_len = score.shape[-1]
    assert all(row.unique().numel() == kv_len for row in score.flatten(0, 1))
    visible = torch.ones(kv_len, kv_len, dtype=torch.bool).tril()
    prefixes = torch.where(visible, score[:, :, None, :], -math.inf)
    best = prefixes.topk(min(window, kv_len)).indices
    return torch.zeros_like(prefixes, dtype=torch.bool).scatter(3, best, True) & visible


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_len", "kv_len"), [(333, 333), (1, 257), (65, 190)])
def test_dense(q_len: int, kv_len: int, dtype: torch.dtype) -> None:
    tensors = make_input(dtype, q_len, kv_len)
    views = [tensor.transpose(1, 2) for tensor in tensors]
    assert_as_good_as_sdpa(flash_dmattn.attention(*views)[0], tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_len", "kv_len"), [(333, 333), (1, 257), (65, 190)])
def test_causal(q_len: int, kv_len: int, dtype: torch.dtype) -> None:
    tensors = make_input(dtype, q_len, kv_len)
    views = [tensor.transpose(1, 2) for tensor in tensors]
    mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len).expand(2, 2, -1, -1)
    assert_as_good_as_sdpa(flash_dmattn.attention(*views, causal=True)[0], tensors, mask)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 60, 300, 600])
@pytest.mark.parametrize("with_bias", [False, True])
def test_selected(with_bias: bool, window: int, dtype: torch.dtype) -> None:
    tensors = make_input(dtype, 517, 517)
    score = torch.randn(2, 2, 517, generator=torch.Generator().manual_seed(window))
    mask = top_mask(score, window)
    bias = None
    if with_bias:
        bias = score.to(dtype).float()  # so that a mask of this dtype holds it exactly
        mask = torch.where(mask, bias[:, :, None, :].double(), -math.inf)
    out, _ = flash_dmattn.attention(
        *(tensor.transpose(1, 2) for tensor in tensors),
        bias=bias,
        selection=flash_dmattn.select(score, window),
        causal=True,
    )
    assert_as_good_as_sdpa(out, tensors, mask)


@pytest.mark.parametrize("dtype", DTYPES)
def test_global_scope(dtype: torch.dtype) -> None:
    tensors = make_input(dtype, 200, 400)
    score = torch.randn(2, 2, 400, generator=torch.Generator().manual_seed(1))
    best = score.topk(77).indices
    mask = torch.zeros(2, 2, 400, dtype=torch.bool).scatter(2, best, True)
    out, _ = flash_dmattn.attention(
        *(tensor.transpose(1, 2) for tensor in tensors),
        selection=flash_dmattn.select(score, 77, scope="global"),
    )
    assert_as_good_as_sdpa(out, tensors, mask[:, :, None, :].expand(-1, -1, 200, -1))
