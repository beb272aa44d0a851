"""Sink logits: results and gradients against a softmax with one more column, in PyTorch alone."""

from __future__ import annotations

from typing import Any

import flash_dmattn
import pytest
import torch
from cases import DEVICES, make_fused
from evaluate import assert_same

SIZES = {"head_dim": 16}
WINDOW = 9


def make_tensors(length: int, **options: Any) -> list[torch.Tensor]:
    """make_fused(), and a sink logit for each of its four query heads."""
    tensors = make_fused(length, **SIZES, **options)
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    sinks = torch.tensor([0.5, -2.0, 3.0, 40.0], dtype=wide, device=tensors[0].device)
    return [*tensors, sinks.requires_grad_()]


def attend_in_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Causal attention over all keys, in float64."""
    query, key, value, sinks = (x.double() for x in (query, key, value, sinks))
    group = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(group, 2) for x in (key, value))
    logits = torch.einsum("bihd,bjhd->bhij", query, key) * query.shape[3] ** -0.5
    hidden = torch.ones(logits.shape[2:], dtype=torch.bool).triu(1)
    logits = logits.masked_fill(hidden, float("-inf"))
    column = sinks[None, :, None, None].expand(*logits.shape[:3], 1)
    weights = torch.cat((logits, column), 3).softmax(3)[..., :-1]
    return torch.einsum("bhij,bjhd->bihd", weights, value)


def fused_with(*tensors: torch.Tensor, **options: Any) -> Any:
    options = {"keep_window_size": WINDOW, "causal": True, **options}
    return flash_dmattn.flash_dma_attention(*tensors[:5], sink_logit=tensors[5], **options)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_dense_against_torch(backend: str) -> None:
    query, key, value, _, _, sinks = make_tensors(70)
    given = (query, key, value, sinks)
    out, _ = flash_dmattn.attention(*given[:3], sink_logit=sinks, causal=True, backend=backend)
    expected = attend_in_torch(*given)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)
    found = torch.autograd.grad(out.cos().sum(), given)
    wanted = torch.autograd.grad(expected.cos().sum(), given)
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("form", ["exp", "linear", "none"])
def test_gradcheck(form: str) -> None:
    """Compare with finite differences in float64, which only the reference supports."""
    tensors = make_tensors(40, dtype=torch.float64)
    if form == "none":
        tensors[3:5] = [tensor.detach() for tensor in tensors[3:5]]

    def run(*given: torch.Tensor) -> Any:
        return fused_with(*given, bias_form=form, return_lse=True)

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


@pytest.mark.parametrize("device", DEVICES)
def test_minus_infinity_is_none(device: str, deterministic: None) -> None:
    *tensors, sinks = make_tensors(300, device=device)
    none = torch.full_like(sinks, float("-inf"))
    plain = flash_dmattn.flash_dma_attention(*tensors, WINDOW, causal=True)
    assert torch.equal(fused_with(*tensors, none), plain)
    assert not torch.equal(fused_with(*tensors, sinks), plain)
    leaves = [*tensors, none.requires_grad_()]
    found = torch.autograd.grad(fused_with(*leaves).float().cos().sum(), leaves)
    assert_same(found[:5], torch.autograd.grad(plain.float().cos().sum(), tensors))
    assert (found[5] == 0).all()


def test_packed_sequences() -> None:
    query, key, value, *weights, sinks = make_tensors(60)
    starts = torch.tensor([0, 25, 60], dtype=torch.int32)
    rows = [x[:1].detach() for x in (query, key, value)]
    named = {"dt_proj": weights[0], "a_coef": weights[1], "sink_logit": sinks}
    out = flash_dmattn.flash_dmattn_varlen_func(
        *(x[0] for x in rows), starts, starts, 35, 35, causal=True, keep_window_size=WINDOW, **named
    )
    first = fused_with(*(x[:, :25] for x in rows), *weights, sinks)
    torch.testing.assert_close(out[:25], first[0], atol=2e-6, rtol=1e-5)
    (gradient,) = torch.autograd.grad(out.cos().sum(), sinks)
    assert (gradient[:3] != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_with_a_cache(dtype: torch.dtype) -> None:
    """A prompt of more than 64 tokens, single tokens and drafts, against the whole sequence."""
    torch.manual_seed(1)
    layer = flash_dmattn.DynamicMaskAttention(32, 4, 2, 16, sink_logit=True, dtype=dtype)
    assert layer.state_dict()["sink_logit"].shape == (4,)
    layer.sink_logit.data.copy_(torch.tensor([0.5, -2.0, 1.0, 3.0]))
    cache = flash_dmattn.DynamicMaskCache(1, 1, 2, 8, 16, recent=16, dtype=dtype)
    x = torch.randn(1, 90, 32).to(dtype)
    with torch.no_grad():
        pieces = [layer(x[:, :70], cache=cache)]
        pieces += [layer(x[:, n : n + 1], cache=cache) for n in range(70, 80)]
        pieces.append(layer(x[:, 80:], cache=cache, draft=True))
        whole = layer(x)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=tolerance, rtol=tolerance)
    layer(x).float().cos().sum().backward()
    assert layer.sink_logit.grad.dtype == dtype and (layer.sink_logit.grad != 0).all()
    layer.reset_parameters()
    assert (layer.sink_logit == 0).all()


def test_layer_without() -> None:
    layer = flash_dmattn.DynamicMaskAttention(32, 4, 2, 16)
    assert layer.sink_logit is None and "sink_logit" not in layer.state_dict()


def test_wrong_shape() -> None:
    *tensors, sinks = make_tensors(20)
    with pytest.raises(ValueError, match="sink_logit: axis 0 has 2 elements"):
        fused_with(*tensors, sinks[:2])
