"""dropout_p = 1 drops all probabilities: results and gradients are zeros, as in PyTorch."""

from __future__ import annotations

from typing import Any, Callable

import flash_dma
import flash_dmattn
import pytest
import torch
from flash_dmattn import DynamicMaskAttention, MultiheadAttention

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


def test_compiled() -> None:
    rows = make()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    assert (compiled(*rows, dropout_p=1.0) == 0).all()
