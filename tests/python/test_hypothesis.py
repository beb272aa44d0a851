"""Attention of any shape, stride, dtype and window that the header allows, against evaluations in
float64."""

from __future__ import annotations

import math
from typing import Callable

import evaluate
import flash_dmattn
import torch
from cases import FULL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

bounded = settings(
    derandomize=True,
    deadline=None,
    max_examples=150 if FULL else 50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

Draw = Callable[[st.SearchStrategy], object]
LAYOUTS = ["contiguous", "heads first", "packed", "every other", "last first", "repeated", "offset"]


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same [batch, len, heads, head_dim] numbers, with other strides."""
    batch, length, heads, head_dim = tensor.shape

    def room(*shape: int) -> torch.Tensor:
        return torch.full(shape, math.nan, dtype=tensor.dtype)

    buffers = {
        "contiguous": lambda: room(*tensor.shape),
        "heads first": lambda: room(batch, heads, length, head_dim).transpose(1, 2),
        "packed": lambda: room(batch, length, 3 * heads, head_dim)[:, :, heads : 2 * heads],
        "every other": lambda: room(batch, 2 * length, heads, head_dim + 3)[:, ::2, :, :head_dim],
        "last first": lambda: room(head_dim, heads, length, batch).permute(3, 2, 1, 0),
        "offset": lambda: room(tensor.numel() + 1)[1:].view_as(tensor),
    }
    return buffers[layout]().copy_(tensor)


@st.composite
def key_masks(draw: Draw, batch: int, kv_len: int) -> torch.Tensor | None:
    if not draw(st.booleans()):
        return None
    bits = draw(st.lists(st.booleans(), min_size=batch * kv_len, max_size=batch * kv_len))
    return torch.tensor(bits, dtype=torch.bool).reshape(batch, kv_len)


@bounded
@given(st.data())
def test_attention(data: st.DataObject) -> None:
    batch, kv_heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    q_heads = kv_heads * data.draw(st.integers(1, 5))
    head_dim = 8 * data.draw(st.integers(1, 12))
    q_len, kv_len = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 70))
    causal = data.draw(st.booleans())
    scopes = ["global", "causal"] if causal and q_len <= kv_len else ["global"]
    scope = data.draw(st.sampled_from(scopes))
    window = data.draw(st.one_of(st.none(), st.integers(1, 75)))
    recent = data.draw(st.integers(0, 80)) if scope == "causal" else 0
    rules = {"recent": recent, "sinks": data.draw(st.integers(0, window or 0))}
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    key_valid = data.draw(key_masks(batch, kv_len))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def tensor(length: int, heads: int) -> torch.Tensor:
        values = torch.randn(batch, length, heads, head_dim, generator=generator).to(dtype)
        layout = data.draw(st.sampled_from(LAYOUTS))
        if layout == "repeated":
            return values[:1, :, :1].expand_as(values)
        return lay_out(values, layout)

    query, key, value = tensor(q_len, q_heads), tensor(kv_len, kv_heads), tensor(kv_len, kv_heads)
    score = torch.randn(batch, kv_heads, kv_len, generator=generator)
    bias = score if data.draw(st.booleans()) else None
    softcap = data.draw(st.sampled_from([0.0, 0.7, 30.0]))
    selection = kept = None
    if window is not None:
        selection = flash_dmattn.select(score, window, scope=scope, key_valid=key_valid, **rules)
        kept = evaluate.kept_keys(score, window, scope, key_valid, **rules)
    out, lse = flash_dmattn.attention(
        query,
        key,
        value,
        bias=bias,
        selection=selection,
        key_valid=key_valid,
        causal=causal,
        softcap=softcap,
    )
    mask = evaluate.visible_keys(q_len, kv_len, causal, kept, key_valid)
    evaluate.assert_attention((out, lse), query, key, value, mask, bias=bias, softcap=softcap)
