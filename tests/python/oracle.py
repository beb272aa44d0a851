"""Attention over the best keys, once more, in PyTorch alone: what the tests compare with.

It is slow and follows the definition: every query sorts the keys that it sees. Evaluated in float64
it is the oracle; evaluated in the dtype of q, k and v it is what a kernel may be twice as far from
the oracle as.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch


class Result(NamedTuple):
    out: torch.Tensor  # [batch, q_len, q_heads, head_dim]
    lse: torch.Tensor  # [batch, q_heads, q_len]


def rank_of(score: float, j: int) -> tuple[bool, float, int]:
    """Greater is better: NaN below everything, then the score, then the more recent key."""
    return (False, 0.0, j) if math.isnan(score) else (True, score, j)


def best_keys(score: list[float], keys: list[int], window: int) -> list[int]:
    return sorted(keys, key=lambda j: rank_of(score[j], j), reverse=True)[:window]


def kept_keys(
    score: torch.Tensor, window: int, scope: str, key_valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Which keys the query at each position keeps, before causal masking.

    score [batch, kv_heads, kv_len]; the result is bool [batch, kv_heads, kv_len positions, kv_len].
    """
    batch, kv_heads, kv_len = score.shape
    kept = torch.zeros(batch, kv_heads, kv_len, kv_len, dtype=torch.bool)
    for b in range(batch):
        valid = [True] * kv_len if key_valid is None else key_valid[b].bool().tolist()
        for g in range(kv_heads):
            row = score[b, g].tolist()
            for p in range(kv_len):
                seen = range(p + 1) if scope == "causal" else range(kv_len)
                keys = [j for j in seen if valid[j]]
                kept[b, g, p, best_keys(row, keys, window)] = True
    return kept


def visible_keys(
    q_len: int,
    kv_len: int,
    causal: bool,
    kept: torch.Tensor | None = None,
    key_valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """The mask of the attention: bool [batch or 1, kv_heads or 1, q_len, kv_len]."""
    position = torch.arange(q_len) + kv_len - q_len
    mask = torch.ones(1, 1, q_len, kv_len, dtype=torch.bool)
    if causal:
        mask = mask & (torch.arange(kv_len) <= position[:, None])
    if kept is not None:
        mask = mask & kept[:, :, position.clamp(min=0)]
    if key_valid is not None:
        mask = mask & key_valid.bool()[:, None, None, :]
    return mask


def evaluate(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
) -> Result:
    """The attention under `mask`, with every step in `dtype`."""
    group = query.shape[2] // key.shape[2]
    q = query.to(dtype).transpose(1, 2)
    k, v = (x.to(dtype).transpose(1, 2).repeat_interleave(group, 1) for x in (key, value))
    mask = mask.expand(-1, key.shape[2], -1, -1).repeat_interleave(group, 1)
    scale = 1 / math.sqrt(query.shape[3]) if softmax_scale is None else softmax_scale
    logits = scale * (q @ k.transpose(2, 3))
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.to(dtype).repeat_interleave(group, 1)[:, :, None, :]
    logits = torch.where(mask, logits, -math.inf)
    lse = torch.logsumexp(logits, 3)
    lse = torch.where((logits == math.inf).any(3), math.nan, lse)
    weights = torch.where(mask, torch.exp(logits - lse[..., None]), 0)
    weights = torch.where((lse == -math.inf)[..., None], 0, weights)
    read = mask.any(2)[..., None]  # a key that nobody keeps is not read
    out = weights @ torch.where(read, v, 0)
    return Result(out.transpose(1, 2), lse)


def largest_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference where the oracle is finite; 0 where nothing is."""
    finite = torch.isfinite(exact)
    error = (actual.double() - exact)[finite].abs()
    return error.max().item() if error.numel() else 0.0


def assert_same_specials(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """Infinities and NaN stand at the same places."""
    assert actual.shape == exact.shape
    assert torch.equal(torch.isnan(actual), torch.isnan(exact))
    for infinity in (math.inf, -math.inf):
        assert torch.equal(actual == infinity, exact == infinity)


def plain_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a plain evaluation is made in. Nothing is more exact than float64 here, so its error is
    taken from float32, which holds all the tests' inputs, and scaled by the two rounding steps."""
    return torch.float32 if dtype == torch.float64 else dtype


def assert_within(actual: torch.Tensor, exact: torch.Tensor, *plain: torch.Tensor) -> None:
    """`actual` errs at most twice as much as plain evaluations do, plus one rounding step."""
    assert exact.numel() > 0, "nothing to compare"
    assert_same_specials(actual, exact)
    size = exact[torch.isfinite(exact)].abs().max().item() if torch.isfinite(exact).any() else 0.0
    step = torch.finfo(actual.dtype).eps
    plain_error = max(largest_error(one, exact) / torch.finfo(one.dtype).eps for one in plain)
    allowed = (2 * plain_error + size) * step
    if actual.dtype == exact.dtype:
        allowed += plain_error * step  # the oracle itself is one more plain evaluation
    error = largest_error(actual, exact)
    assert math.isfinite(allowed)
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def orders_of(channels: int, numbers: int) -> list[torch.Tensor]:
    """Orders of channels for plain evaluations of so many numbers. Sums in any order are as good,
    but one alone may err by luck little, and how PyTorch sums depends on the CPU: few numbers want
    many.
    """
    seeds = range(16 if numbers <= 64 else 4)
    return [torch.randperm(channels, generator=torch.Generator().manual_seed(s)) for s in seeds]


def assert_attention(
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    **options: Any,  # noqa: ANN401
) -> None:
    """out and lse obey assert_within(); lse, a float32 number, by evaluations in float32."""
    exact = evaluate(query, key, value, mask, torch.float64, **options)
    orders = orders_of(query.shape[3], lse.numel())

    def plain(dtype: torch.dtype) -> list[Result]:
        pairs = [(query[..., order], key[..., order]) for order in orders]
        return [evaluate(q, k, value, mask, plain_dtype(dtype), **options) for q, k in pairs]

    assert out.dtype == query.dtype
    assert_within(out, exact.out, *(one.out for one in plain(out.dtype)))
    assert_within(lse, exact.lse, *(one.lse for one in plain(lse.dtype)))
