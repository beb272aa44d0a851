"""evaluate.py, which judges all results, against scaled_dot_product_attention() and topk()."""

from __future__ import annotations

import math

import cases
import evaluate
import pytest
import torch
from cases import CASES, make_input, make_mask

# SDPA has neither a cap of logits nor sinks, and NaN where a query has no key.
NAMES = [
    name
    for name in (*cases.NAMES, *cases.FEATURES)
    if not (CASES[name].softcap or CASES[name].has_sink or CASES[name].dropout_p)
]


@pytest.mark.parametrize("name", NAMES)
def test_attention(name: str) -> None:
    """All biases and the mask are SDPA's attn_mask."""
    case, given, mask = CASES[name], make_input(name, torch.float32), make_mask(name)
    options = cases.options_of(name, given)
    mask = evaluate.spread_heads(mask, case.q_heads)
    added = torch.zeros(case.batch, case.q_heads, case.q_len, case.kv_len, dtype=torch.float64)
    if given.bias is not None:
        added += evaluate.spread_heads(given.bias.double(), case.q_heads)[:, :, None]
    if given.attn_bias is not None:
        added += evaluate.spread_heads(given.attn_bias.double(), case.q_heads)
    rows = (x.double().transpose(1, 2) for x in given[:3])
    found, lse = evaluate.attention(*given[:3], make_mask(name), torch.float64, **options)
    added = added.masked_fill(~mask, -math.inf)
    want = evaluate.grouped_sdpa(*rows, attn_mask=added, scale=case.softmax_scale)
    empty = ~mask.any(3)
    assert (lse[empty] == -math.inf).all()
    want = want.masked_fill(empty[..., None], 0).transpose(1, 2)
    torch.testing.assert_close(found, want, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("scope", ["causal", "global"])
@pytest.mark.parametrize("window", [1, 13, 77, 600])
def test_kept_keys(window: int, scope: str) -> None:
    """Those of the largest scores, among each prefix or all keys."""
    kv_len = 120
    score = torch.randn(2, 2, kv_len, generator=torch.Generator().manual_seed(1))
    assert all(row.unique().numel() == kv_len for row in score.flatten(0, 1)), "no ties"
    positions = kv_len if scope == "causal" else 1
    ranked = torch.ones(positions, kv_len, dtype=torch.bool)
    ranked = ranked.tril() if scope == "causal" else ranked
    scores = torch.where(ranked, score[:, :, None, :], -math.inf)
    largest = scores.topk(min(window, kv_len)).indices
    want = torch.zeros_like(scores, dtype=torch.bool).scatter(3, largest, True) & ranked
    assert torch.equal(evaluate.kept_keys(score, window, scope), want)
