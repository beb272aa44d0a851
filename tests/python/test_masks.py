"""attn_mask and attn_bias: dtypes and strides. cases.py has their shapes among the features."""

from __future__ import annotations

import cases
import flash_dmattn
import pytest
import torch
from flash_dmattn import ops
from flash_dmattn._arguments import spread

BATCH, Q_LEN, KV_LEN, Q_HEADS, KV_HEADS, HEAD_DIM = 2, 37, 53, 6, 3, 16


def make_rows(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """query, key, value and a bias for each key."""
    random = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shapes = [(BATCH, Q_LEN, Q_HEADS, HEAD_DIM), *2 * [(BATCH, KV_LEN, KV_HEADS, HEAD_DIM)]]
    rows = [torch.randn(shape, generator=random).to(dtype) for shape in shapes]
    rows.append(torch.randn(BATCH, KV_HEADS, KV_LEN, generator=random).to(wide))
    return [x.requires_grad_() for x in rows]


def make_pairs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=random) < 0.4
    return mask, torch.randn(shape, generator=random).to(dtype)


def repeat_heads(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(Q_HEADS // x.shape[1], 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", cases.PAIR_SHAPES[::5], ids=str)
def test_gradient_in_16_bits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The gradient in 16 bits is the float32 one, rounded once."""
    query, key, value, bias = make_rows(dtype)
    mask, short_bias = make_pairs(shape, dtype)

    def find_gradient(attn_bias: torch.Tensor) -> torch.Tensor:
        options = {"bias": bias, "attn_mask": mask, "attn_bias": attn_bias.requires_grad_()}
        out, _ = flash_dmattn.attention(query, key, value, causal=True, **options)
        return torch.autograd.grad(out.float().cos().sum(), attn_bias)[0]

    assert torch.equal(find_gradient(short_bias), find_gradient(short_bias.float()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradient_has_the_dtype_of_its_tensor(dtype: torch.dtype) -> None:
    """The operator returns this dtype, so that autograd casts nothing."""
    query, key, value, _ = (x.detach() for x in make_rows(torch.bfloat16))
    _, attn_bias = make_pairs((1, 1, Q_LEN, KV_LEN), dtype)
    if dtype == torch.float16:
        query, key, value = (x.half() for x in (query, key, value))
    out, lse = flash_dmattn.attention(query, key, value, attn_bias=attn_bias)
    given = {
        "dout": out,
        "out": out,
        "lse": lse,
        "query": query,
        "key": key,
        "value": value,
        "attn_bias": attn_bias,
        "window": 0,
        "recent": 0,
        "sinks": 0,
        "scope": "causal",
        "causal": False,
        "softmax_scale": HEAD_DIM**-0.5,
        "softcap": 0.0,
        "dropout_p": 0.0,
        "deterministic": False,
        "wants_dbias": False,
        "wants_dattn_bias": True,
    }
    backward = ops.ATTENTION_BACKWARD
    found = backward.op(*(given.get(name) for name in backward.arguments))[-1]
    assert found.dtype == dtype and found.shape == attn_bias.shape


def test_any_strides() -> None:
    query, key, value, _ = make_rows()
    mask, attn_bias = make_pairs((1, Q_HEADS, Q_LEN, KV_LEN))
    want = flash_dmattn.attention(query, key, value, attn_mask=mask, attn_bias=attn_bias)[0]
    swapped = [x.mT.contiguous().mT for x in (mask.to(torch.uint8), attn_bias)]
    expanded = [x.expand(BATCH, -1, -1, -1) for x in (mask, attn_bias)]
    for given in (swapped, expanded):
        pairs = dict(zip(("attn_mask", "attn_bias"), given))
        assert torch.equal(flash_dmattn.attention(query, key, value, **pairs)[0], want)


@pytest.mark.parametrize("shape", [(1, 2, 1, 1), (1, 1, 3, 1), (1, 1, 1), (2, 3, 37, 54)])
def test_biases_that_do_not_fit_are_refused_as_they_are(shape: tuple[int, ...]) -> None:
    attn_bias, rows = torch.zeros(shape), make_rows()[:3]
    assert spread(attn_bias, *rows).shape[-1] == shape[-1]
    with pytest.raises(ValueError, match="attn_bias: (axis|rank)"):
        flash_dmattn.attention(*rows, attn_bias=spread(attn_bias, *rows))


@pytest.mark.parametrize("shape", cases.PAIR_SHAPES[::3], ids=str)
def test_spread_biases_are_the_broadcast_ones(shape: tuple[int, ...]) -> None:
    """Calls on a device need spread biases if gradients have to be the same from run to run."""
    rows, (_, attn_bias) = make_rows()[:3], make_pairs(shape)
    found = []
    for change in (lambda x: x, lambda x: spread(x, *rows)):
        given = attn_bias.clone().requires_grad_()
        out, _ = flash_dmattn.attention(*rows, attn_bias=change(given))
        found.append((out, torch.autograd.grad(out.square().sum(), given)[0]))
    assert spread(attn_bias, *rows).shape == (BATCH, Q_HEADS, Q_LEN, KV_LEN)
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
