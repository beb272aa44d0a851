"""Sink logits of layers. cases.py has them among features and forms of attention."""

from __future__ import annotations

import flash_dmattn
import pytest
import torch


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
