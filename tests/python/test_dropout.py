"""Dropout: which numbers are drawn, layers, and dropout_p = 1, which drops all probabilities, so
that results and gradients are zeros, as in PyTorch. cases.py has it among features and forms."""

from __future__ import annotations

import math
from typing import Any, Callable

import flash_dma
import flash_dmattn
import pytest
import torch
from cases import DEVICES, make_fused
from evaluate import dropout_factors
from flash_dmattn import DynamicMaskAttention, MultiheadAttention, ops


def fused_with(tensors: list[torch.Tensor], **options: Any) -> Any:
    options = {"keep_window_size": 9, "causal": True, "dropout_p": 0.3, **options}
    return flash_dmattn.flash_dma_attention(*tensors, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_seeds(device: str) -> None:
    tensors = make_fused(100, device=device)
    torch.manual_seed(4)
    first, second = fused_with(tensors), fused_with(tensors)
    torch.manual_seed(4)
    assert torch.equal(fused_with(tensors), first)
    assert not torch.equal(first, second)
    generators = [torch.Generator(device).manual_seed(7) for _ in range(2)]
    own = [fused_with(tensors, generator=generator) for generator in generators]
    assert torch.equal(*own)
    assert torch.equal(fused_with(tensors), second)  # `own` drew none of the default numbers


def test_layer_in_training_and_evaluation() -> None:
    torch.manual_seed(1)
    layer = flash_dmattn.DynamicMaskAttention(32, 4, 2, 16, dropout=0.4)
    dense = flash_dmattn.DynamicMaskAttention(32, 4, 2, None, dropout=0.4)
    x = torch.randn(2, 50, 32)
    for one in (layer, dense):
        assert not torch.equal(one(x), one(x))
        one.eval()
        assert torch.equal(one(x), one(x))
    assert "dropout=0.4" in repr(layer)


def test_mean_is_that_of_no_dropout() -> None:
    torch.manual_seed(2)
    query, key, value, *_ = (x.detach() for x in make_fused(30, head_dim=16))
    plain, _ = flash_dmattn.attention(query, key, value)
    runs = [flash_dmattn.attention(query, key, value, dropout_p=0.25)[0] for _ in range(400)]
    found = torch.stack(runs).double()
    deviation = found.std(0) / math.sqrt(len(runs))
    assert ((found.mean(0) - plain).abs() < 6 * deviation + 1e-5).all()


def test_state_is_optional_in_the_operator() -> None:
    query, key, value, *_ = (x.detach() for x in make_fused(20, head_dim=16))
    given = (query, key, value, *9 * [None], None, None, 0, 0, 0, "causal", True)
    out, _ = ops.ATTENTION.op(*given, 0.0, 0.0, 0.5, False, None)  # seed and offset are 0
    state = torch.zeros(2, dtype=torch.int64)
    same = flash_dmattn.attention(query, key, value, causal=True, dropout_p=0.5, rng_state=state)[0]
    assert torch.equal(out, same)


# ---- all are dropped ----

LENGTH = 12
WEIGHTS = torch.randn(2, 32), torch.ones(2)


def make() -> list[torch.Tensor]:
    return [torch.randn(1, LENGTH, heads, 16).requires_grad_() for heads in (4, 2, 2)]


def packed(*rows: torch.Tensor, dropout_p: float) -> torch.Tensor:
    starts = torch.tensor([0, LENGTH], dtype=torch.int32)
    sizes, rows = (starts, starts, LENGTH, LENGTH), tuple(x[0] for x in rows)
    return flash_dmattn.flash_dmattn_varlen_func(*rows, *sizes, dropout_p=dropout_p)


def attention(*rows: torch.Tensor, dropout_p: float) -> torch.Tensor:
    return flash_dmattn.attention(*rows, dropout_p=dropout_p)[0]


def fused(*rows: torch.Tensor, dropout_p: float) -> torch.Tensor:
    return flash_dmattn.flash_dma_attention(*rows, *WEIGHTS, 5, dropout_p=dropout_p, causal=True)


def forward(*rows: torch.Tensor, dropout_p: float) -> torch.Tensor:
    return flash_dma.fwd(*rows, None, None, p_dropout=dropout_p)[0]


FUNCTIONS: list[Callable[..., Any]] = [attention, fused, packed, forward]
FUNCTIONS.append(flash_dmattn.flash_dmattn_func)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dropout_p", [1, 1.0, 1 - 2**-18])
def test_functions(function: Callable[..., Any], dropout_p: float) -> None:
    rows = make()
    out = function(*rows, dropout_p=dropout_p)
    assert out.shape[-1] == 16 and (out == 0).all()
    assert (function(*rows, dropout_p=0.0) != 0).all()
    for gradient in torch.autograd.grad(out.sum(), rows):
        assert (gradient == 0).all()


def test_lse_and_probabilities() -> None:
    """lse is without dropout, and has its gradients."""
    rows = make()
    out, lse, probability = flash_dmattn.flash_dmattn_func(
        *rows, dropout_p=1.0, return_attn_probs=True
    )
    want = flash_dmattn.attention(*rows)[1]
    assert torch.equal(lse, want) and (probability == 0).all() and (out == 0).all()
    found, wanted = (torch.autograd.grad(x.cos().sum(), rows[:2]) for x in (lse, want))
    assert all(map(torch.equal, found, wanted))
    options = {"dropout_p": 1.0, "return_attn_probs": True, "return_lse": True}
    out, lse, probability = flash_dmattn.flash_dma_attention(*rows, *WEIGHTS, 5, **options)
    assert (probability == 0).all() and (out == 0).all() and lse.isfinite().all()
    state = torch.tensor([1, 2])
    options = {"dropout_p": 1.0, "rng_state": state}
    assert (flash_dmattn.attention_probabilities(*rows[:2], want, **options) == 0).all()


@pytest.mark.parametrize("kv_used", [None, 2])
def test_negative_positions(kv_used: int | None) -> None:
    """Without causal masking a query at a negative position keeps keys, and drops by the floor of
    half its position."""
    kv_len, state = 6, torch.tensor([3, 4])
    query, key, value = (torch.randn(1, n, 2, 8) for n in (9, kv_len, kv_len))
    used = {} if kv_used is None else {"kv_used": torch.tensor([kv_used], dtype=torch.int32)}
    options = {"dropout_p": 0.5, "rng_state": state, **used}
    out, lse = flash_dmattn.attention(query, key, value, **options)
    count = kv_used or kv_len
    logits = torch.einsum("bihd,bjhd->bhij", query, key[:, :count]).double() * 8**-0.5
    factors = dropout_factors((1, 2, 9, count), 2, 0.5, state)
    want = torch.einsum("bhij,bjhd->bihd", logits.softmax(-1) * factors, value[:, :count].double())
    assert (lse.double() - logits.logsumexp(-1)).abs().max() < 1e-5
    assert (out.double() - want).abs().max() < 1e-5


def test_numbers_are_drawn() -> None:
    """As many numbers are drawn as with any dropout, and fwd() returns them."""
    rows = make()
    torch.manual_seed(3)
    *_, state = flash_dma.fwd(*rows, None, None, p_dropout=0.5)
    after = torch.rand(())
    torch.manual_seed(3)
    *_, same = flash_dma.fwd(*rows, None, None, p_dropout=1.0)
    assert torch.equal(state, same) and torch.equal(torch.rand(()), after)


def test_layers() -> None:
    """In training mode a layer returns the bias of its last projection; otherwise dropout is
    off."""
    x = torch.randn(2, LENGTH, 32)
    layer = DynamicMaskAttention(32, 4, 2, window=5, dropout=1.0, bias=True)
    assert torch.equal(layer(x), layer.o_proj.bias.expand_as(x))
    assert not torch.equal(layer.eval()(x), layer.o_proj.bias.expand_as(x))
    for window in (None, 5):
        layer = MultiheadAttention(32, 4, dropout=1.0, batch_first=True, window=window)
        torch.nn.init.normal_(layer.out_proj.bias)
        out, weights = layer(x, x, x)
        assert torch.equal(out, layer.out_proj.bias.expand_as(x)) and (weights == 0).all()
    same = torch.nn.MultiheadAttention(32, 4, dropout=1.0, batch_first=True)
    same.load_state_dict(layer.state_dict(), strict=False)
    found = same(x, x, x)
    assert torch.equal(out, found[0]) and torch.equal(weights, found[1])
