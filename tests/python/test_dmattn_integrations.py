"""flash_dmattn.integrations and utils.padding, as layers written for flash-dmattn call them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flash_dmattn.integrations import flash_dynamic_mask_attention as integration
from flash_dmattn.utils import padding
from torch import nn

BATCH, HEADS, KV_HEADS, HEAD_DIM, LENGTH = 2, 4, 2, 16, 24
LEAST = torch.finfo(torch.float32).min


class Layer(nn.Module):
    """The attributes that flash_dynamic_mask_attention_forward() reads."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2, 2)
        self.is_causal = True
        for name, value in attributes.items():
            setattr(self, name, value)


def make(q_len: int = LENGTH) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(q_len)
    shapes = [(BATCH, HEADS, q_len), *2 * [(BATCH, KV_HEADS, LENGTH)]]
    rows = [torch.randn(*shape, HEAD_DIM, generator=generator) for shape in shapes]
    return (*rows, torch.randn(BATCH, KV_HEADS, LENGTH, generator=generator))


def forward(layer: nn.Module, *tensors: Any, **named: Any) -> torch.Tensor:
    out, weights = integration.flash_dynamic_mask_attention_forward(layer, *tensors, **named)
    assert weights is None
    return out


def in_torch(rows: tuple[torch.Tensor, ...], added: torch.Tensor, scale: float) -> torch.Tensor:
    added = added.repeat_interleave(HEADS // added.shape[1], 1)
    options = {"attn_mask": added, "scale": scale, "enable_gqa": True}
    return nn.functional.scaled_dot_product_attention(*rows, **options).transpose(1, 2)


def seen(q_len: int) -> torch.Tensor:
    return torch.ones(q_len, LENGTH, dtype=torch.bool).tril(LENGTH - q_len)


@pytest.mark.parametrize("q_len", [1, 5, LENGTH])
@pytest.mark.parametrize("window", [None, 6, LENGTH])
def test_a_causal_mask_and_a_window(q_len: int, window: int | None) -> None:
    """As layers of 1.0.1 to 1.2.0 call it: a causal bool mask of four axes, a bias of keys, and the
    layer's window; and as layers from 1.2.1 on, which pass the window."""
    *rows, bias = make(q_len)
    mask = seen(q_len)[None, None].expand(BATCH, KV_HEADS, -1, -1)
    added = bias[:, :, None].expand(-1, -1, q_len, -1).masked_fill(~mask, -torch.inf)
    if window is not None:
        least = added.topk(window, -1).values[..., -1:]
        added = added.masked_fill(added < least, -torch.inf)
    want = in_torch(rows, added, 0.3)
    wide = bias[:, :, None].expand(-1, -1, q_len, -1)
    calls = [(Layer(keep_window_size=window), bias, {"scaling": 0.3})]
    calls += [(Layer(), wide, {"scaling": 0.3, "window_size": window})]
    calls += [(Layer(is_causal=False), wide, {"scale": 0.3, "keep_window_size": window})]
    for layer, given, named in calls:
        found = forward(layer, *rows, mask, given, **named)
        torch.testing.assert_close(found, want, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("q_len", [1, 5, LENGTH])
@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
def test_padding(q_len: int, kind: torch.dtype) -> None:
    """A mask [batch, key_len], with and without a bias. out is 0 where queries are padding."""
    *rows, bias = make(q_len)
    valid = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    valid[1, :20] = False
    for given in (bias, None):
        added = torch.zeros_like(bias) if given is None else bias
        added = added[:, :, None].masked_fill(~valid[:, None, None] | ~seen(q_len), LEAST)
        want = in_torch(rows, added, HEAD_DIM**-0.5)
        want = want.masked_fill(~valid[:, -q_len:, None, None], 0)
        found = forward(Layer(), *rows, valid.to(kind), given)
        torch.testing.assert_close(found, want, atol=2e-6, rtol=2e-5)


def test_padding_and_a_window() -> None:
    *rows, bias = make()
    valid = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    valid[0, 18:] = False
    kept = bias.masked_fill(~valid[:, None], -torch.inf).topk(7, -1).indices
    mask = torch.zeros_like(bias, dtype=torch.bool).scatter(-1, kept, True)[:, :, None]
    added = bias[:, :, None].masked_fill(~(mask & valid[:, None, None]), -torch.inf)
    added = added.expand(-1, -1, LENGTH, -1)
    want = in_torch(rows, added, HEAD_DIM**-0.5).masked_fill(~valid[:, :, None, None], 0)
    found = forward(Layer(is_causal=False), *rows, valid, bias, window_size=7)
    torch.testing.assert_close(found, want, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "position_ids"])
def test_packed_sequences(name: str) -> None:
    *rows, bias = (x[:1] for x in make())
    at = torch.arange(LENGTH)
    row = (at >= 9).int()
    given = {"cu_seq_lens_q": torch.tensor([0, 9, LENGTH]), "position_ids": (at - 9 * row)[None]}
    hidden = ~seen(LENGTH) | (row[:, None] != row)
    added = bias[:, :, None].masked_fill(hidden, -torch.inf)
    want = in_torch(rows, added, HEAD_DIM**-0.5)
    found = forward(Layer(), *rows, None, bias, **{name: given[name]})
    torch.testing.assert_close(found, want, atol=2e-6, rtol=2e-5)


def test_states_of_float32_beside_narrow_weights() -> None:
    *rows, bias = make()
    layer = Layer()
    layer.q_proj.bfloat16()
    found = forward(layer, *rows, None, bias)
    assert found.dtype == torch.bfloat16
    want = forward(Layer(), *(x.bfloat16() for x in rows), None, bias.bfloat16())
    assert torch.equal(found, want)


def test_what_is_refused() -> None:
    *rows, bias = make()
    with pytest.raises(NotImplementedError, match="^head_mask: is given, want None"):
        forward(Layer(), *rows, None, bias, head_mask=torch.ones(HEADS))
    with pytest.warns(UserWarning, match="^output_attentions: is True, but there are no"):
        forward(Layer(), *rows, None, bias, output_attentions=True)


# ---- padded batches as packed sequences ----


@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
def test_unpad_and_pad(kind: torch.dtype) -> None:
    states = torch.randn(3, 5, 4)
    lengths = (5, 0, 2)
    valid = torch.arange(5) < torch.tensor(lengths)[:, None]
    valid[2] = torch.tensor([False, False, False, True, True])
    packed, indices, starts, longest, used = padding.unpad_input(states, valid.to(kind))
    assert torch.equal(packed, states[valid]) and longest == 5
    assert starts.tolist() == [0, 5, 5, 7] and starts.dtype == torch.int32
    assert used.tolist() == [*lengths]
    want = states.masked_fill(~valid[..., None], 0)
    assert torch.equal(padding.pad_input(packed, indices, 3, 5), want)
    unused = torch.zeros_like(valid)
    unused[1, 0] = True
    packed, _, starts, _, used = padding.unpad_input(states, valid.to(kind), unused.to(kind))
    assert starts.tolist() == [0, 5, 6, 8] and used.tolist() == [*lengths]
    assert torch.equal(packed[5], states[1, 0])


@pytest.mark.parametrize("q_len", [1, 3, 6])
def test_upad(q_len: int) -> None:
    query, (key, value) = torch.randn(2, q_len, 4, 8), torch.randn(2, 2, 6, 2, 8)
    valid = torch.tensor([[True] * 6, [False] * 2 + [True] * 4])
    room = [torch.cat((x, torch.full((2, 3, 2, 8), torch.nan)), 1) for x in (key, value)]
    if q_len != 6:  # more keys than the mask has, as in static caches
        key_layer, value_layer = room
    else:
        key_layer, value_layer = key, value
    found = padding.upad_input(query, key_layer, value_layer, valid, q_len, padding.unpad_input)
    queries = valid[:, -q_len:]
    assert torch.equal(found[0], query[queries])
    assert torch.equal(found[1], key[valid]) and torch.equal(found[2], value[valid])
    assert torch.equal(found[3].long(), queries.flatten().nonzero()[:, 0])
    assert found[4][1].tolist() == [0, 6, 10] and found[5] == (q_len, 6)
    assert found[4][0].diff().tolist() == queries.sum(1).tolist()
