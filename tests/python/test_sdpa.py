"""Compare with scaled_dot_product_attention: dense, causal, and under a selection as a mask."""

from __future__ import annotations

import math

import evaluate
import flash_dmattn
import pytest
import torch
from cases import FULL

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LENGTHS = [(333, 333), (1, 257), (65, 190)]
# q_len, kv_len, window (None: dense), scope, whether the score is the bias
CASES = [(*lengths, None, scope, False) for lengths in LENGTHS for scope in ("global", "causal")]
CASES += [(517, 517, window, "causal", bias) for window in (1, 60, 300, 600) for bias in (0, 1)]
CASES += [(200, 400, 77, "global", False)]


def best(score: torch.Tensor, window: int, scope: str) -> torch.Tensor:
    """bool [batch, kv_heads, positions, kv_len]: the keys of the `window` largest scores, among
    each prefix or all keys. No two scores are equal."""
    kv_len = score.shape[-1]
    assert all(row.unique().numel() == kv_len for row in score.flatten(0, 1))
    ranked = torch.ones(kv_len, kv_len, dtype=torch.bool)
    ranked = ranked.tril() if scope == "causal" else ranked
    scores = torch.where(ranked, score[:, :, None, :], -math.inf)
    largest = scores.topk(min(window, kv_len)).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(3, largest, True) & ranked


CHOSEN = [(*case, DTYPES[n % 3]) for n, case in enumerate(CASES)]
if FULL:
    CHOSEN = [(*case, dtype) for case in CASES for dtype in DTYPES]


@pytest.mark.parametrize(("q_len", "kv_len", "window", "scope", "has_bias", "dtype"), CHOSEN)
def test_against_sdpa(
    q_len: int, kv_len: int, window: int | None, scope: str, has_bias: bool, dtype: torch.dtype
) -> None:
    causal = scope == "causal"
    generator = torch.Generator().manual_seed(q_len * 7 + kv_len)
    query = torch.randn(2, 4, q_len, 64, generator=generator).to(dtype)  # heads come first
    key, value = torch.randn(2, 2, 2, kv_len, 64, generator=generator).to(dtype)
    score = torch.randn(2, 2, kv_len, generator=generator)
    mask = torch.ones(2, 2, q_len, kv_len, dtype=torch.bool)
    mask = mask.tril(kv_len - q_len) if causal else mask
    selection = None
    if window is not None:
        selection = flash_dmattn.select(score, window, scope=scope)
        mask = mask & best(score, window, scope)[:, :, -q_len:]
    bias = score.to(dtype).float() if has_bias else None  # exact in a mask of this dtype
    out, _ = flash_dmattn.attention(
        *(tensor.transpose(1, 2) for tensor in (query, key, value)),
        bias=bias,
        selection=selection,
        causal=causal,
    )

    def sdpa(at: torch.dtype) -> torch.Tensor:
        tensors = (tensor.to(at) for tensor in (query, key, value))
        given = mask if bias is None else torch.where(mask, bias[:, :, None, :].to(at), -math.inf)
        given = given.repeat_interleave(2, 1)
        return evaluate.grouped_sdpa(*tensors, attn_mask=given)

    evaluate.assert_within(out.transpose(1, 2), sdpa(torch.float64), sdpa(dtype))
