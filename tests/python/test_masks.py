"""attn_mask and attn_bias: results and gradients against PyTorch alone, and against SDPA."""

from __future__ import annotations

import itertools
from typing import Any, Tuple

import flash_dmattn
import pytest
import torch
from flash_dmattn import ops
from flash_dmattn._arguments import spread

BATCH, Q_LEN, KV_LEN, Q_HEADS, KV_HEADS, HEAD_DIM = 2, 37, 53, 6, 3, 16
Tensors = Tuple[torch.Tensor, ...]


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


def attend_in_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    *,
    causal: bool = False,
    softcap: float = 0.0,
) -> torch.Tensor:
    """The definition, step by step, in float64."""
    q, k, v = (x.double().transpose(1, 2) for x in (query, key, value))
    s = q @ repeat_heads(k).mT * HEAD_DIM**-0.5
    s = softcap * torch.tanh(s / softcap) if softcap > 0 else s
    s = s if bias is None else s + repeat_heads(bias.double())[:, :, None]
    s = s if attn_bias is None else s + repeat_heads(attn_bias.double())
    kept = torch.ones(s.shape, dtype=torch.bool)
    if causal:
        kept = kept.tril(s.shape[3] - s.shape[2])
    if mask is not None:
        kept = kept & repeat_heads(mask)
    some = kept.any(3, keepdim=True)
    logits = torch.where(some, s.masked_fill(~kept, float("-inf")), 0)
    weights = torch.where(some, logits.softmax(3), 0)
    return (weights @ repeat_heads(v)).transpose(1, 2)


def shapes() -> list[tuple[int, ...]]:
    """Every combination of broadcast axes; the heads may also be kv heads."""
    lengths = (1, BATCH), (1, KV_HEADS, Q_HEADS), (1, Q_LEN), (1, KV_LEN)
    return list(itertools.product(*lengths))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("shape", shapes(), ids=str)
def test_against_torch(shape: tuple[int, ...], backend: str) -> None:
    index = shapes().index(shape)
    rows = make_rows(seed=index)
    mask, _ = make_pairs(shapes()[-1 - index])
    attn_bias = make_pairs(shape)[1].requires_grad_()
    options = {"causal": index % 2 == 0, "softcap": 1.5 * (index % 3 == 0)}
    out, _ = flash_dmattn.attention(
        *rows[:3], bias=rows[3], attn_mask=mask, attn_bias=attn_bias, backend=backend, **options
    )
    want = attend_in_torch(*rows, mask, attn_bias, **options)
    torch.testing.assert_close(out.double(), want, atol=4e-6, rtol=1e-5)
    leaves = (*rows, attn_bias)
    found = torch.autograd.grad(out.cos().sum(), leaves)
    wanted = torch.autograd.grad(want.cos().sum(), leaves)
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, atol=3e-5, rtol=1e-4)


def test_gradcheck() -> None:
    """Compare with finite differences in float64, which only the reference supports."""
    rows = make_rows(torch.float64)
    mask, attn_bias = make_pairs((1, KV_HEADS, Q_LEN, KV_LEN), torch.float64)

    def run(*given: torch.Tensor) -> Any:
        query, key, value, bias, pairs = given
        options = {"bias": bias, "attn_mask": mask, "attn_bias": pairs, "softcap": 2.0}
        return flash_dmattn.attention(query, key, value, causal=True, **options)

    leaves = (*rows, attn_bias.requires_grad_())
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_float", [False, True])
def test_against_sdpa(dtype: torch.dtype, is_float: bool) -> None:
    query, key, value, _ = make_rows(dtype)
    mask, attn_bias = make_pairs((BATCH, 1, Q_LEN, KV_LEN), dtype)
    mask[..., 5] = True  # SDPA has NaN in rows without keys
    given = {"attn_bias": attn_bias.requires_grad_()} if is_float else {"attn_mask": mask}
    out, _ = flash_dmattn.attention(query, key, value, **given)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    want = torch.nn.functional.scaled_dot_product_attention(
        q, *(repeat_heads(x) for x in (k, v)), attn_mask=attn_bias if is_float else mask
    ).transpose(1, 2)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(out, want, atol=16 * step, rtol=4 * step)
    leaves = (query, key, value, *([attn_bias] if is_float else []))
    found = torch.autograd.grad(out.float().cos().sum(), leaves)
    wanted = torch.autograd.grad(want.float().cos().sum(), leaves)
    for one, other in zip(found, wanted):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, atol=64 * step, rtol=16 * step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", shapes()[::5], ids=str)
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


def test_rows_without_keys_and_nan() -> None:
    query, key, value, _ = make_rows()
    mask, attn_bias = make_pairs((1, 1, Q_LEN, KV_LEN))
    mask[0, 0, 7] = False
    mask[..., 3] = False
    key.data[:, 3] = value.data[:, 3] = float("nan")
    spoilt = attn_bias.masked_fill(~mask, float("nan")).requires_grad_()
    out, lse = flash_dmattn.attention(query, key, value, attn_mask=mask, attn_bias=spoilt)
    plain, _ = flash_dmattn.attention(query, key, value, attn_mask=mask, attn_bias=attn_bias)
    assert torch.equal(out, plain) and (out[:, 7] == 0).all()
    assert torch.isneginf(lse[..., 7]).all()
    dkey, dbias = torch.autograd.grad(out.cos().sum(), (key, spoilt))
    assert (dkey[:, 3] == 0).all() and dkey.isfinite().all()
    assert (dbias[~mask] == 0).all() and dbias.isfinite().all()


def test_any_strides() -> None:
    query, key, value, _ = make_rows()
    mask, attn_bias = make_pairs((1, Q_HEADS, Q_LEN, KV_LEN))
    want = flash_dmattn.attention(query, key, value, attn_mask=mask, attn_bias=attn_bias)[0]
    swapped = [x.mT.contiguous().mT for x in (mask.to(torch.uint8), attn_bias)]
    expanded = [x.expand(BATCH, -1, -1, -1) for x in (mask, attn_bias)]
    for given in (swapped, expanded):
        pairs = dict(zip(("attn_mask", "attn_bias"), given))
        assert torch.equal(flash_dmattn.attention(query, key, value, **pairs)[0], want)


def test_probabilities() -> None:
    query, key, value, bias = make_rows()
    mask, attn_bias = make_pairs((1, KV_HEADS, Q_LEN, KV_LEN))
    options = {"bias": bias, "attn_mask": mask, "attn_bias": attn_bias, "causal": True}
    out, lse = flash_dmattn.attention(query, key, value, **options)
    found = flash_dmattn.attention_probabilities(query, key, lse, **options)
    weighted = (found @ repeat_heads(value.transpose(1, 2))).transpose(1, 2)
    torch.testing.assert_close(weighted, out, atol=1e-5, rtol=1e-5)
    assert (found[repeat_heads(~mask).expand_as(found)] == 0).all()


def test_compile() -> None:
    rows = make_rows()
    mask, attn_bias = make_pairs((1, 1, Q_LEN, KV_LEN))
    attn_bias.requires_grad_()

    def run(query: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        key, value, bias, pairs, kept = given
        options = {"bias": bias, "attn_mask": kept, "attn_bias": 2 * pairs}
        return flash_dmattn.attention(query, key, value, **options)[0].cos()

    given = (*rows, attn_bias, mask)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(*given).sum(), given[:5])
    for one, other in zip(found, torch.autograd.grad(run(*given).sum(), given[:5])):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["attn_mask", "attn_bias"])
def test_wrong_shapes(name: str) -> None:
    query, key, value, _ = make_rows()
    wrong = {
        (Q_LEN, KV_LEN): "rank is 2, want 4",
        (3, 1, Q_LEN, KV_LEN): "axis 0 has 3 elements, want 2 or 1",
        (1, 2, Q_LEN, KV_LEN): "axis 1 has 2 elements, want 6 or 3 or 1",
        (1, 1, KV_LEN, KV_LEN): "axis 2 has 53 elements, want 37 or 1",
        (1, 1, Q_LEN, Q_LEN): "axis 3 has 37 elements, want 53 or 1",
    }
    for shape, message in wrong.items():
        given = dict(zip(("attn_mask", "attn_bias"), make_pairs(shape)))
        with pytest.raises(ValueError, match=f"{name}: {message}"):
            flash_dmattn.attention(query, key, value, **{name: given[name]})


def test_wrong_dtypes() -> None:
    query, key, value, _ = make_rows(torch.bfloat16)
    mask, attn_bias = make_pairs((1, 1, Q_LEN, KV_LEN))
    with pytest.raises(NotImplementedError, match="attn_mask: dtype is float32, supported: bool"):
        flash_dmattn.attention(query, key, value, attn_mask=attn_bias)
    for wrong in (attn_bias.half(), mask):
        with pytest.raises(NotImplementedError, match="attn_bias: dtype is .*, supported: float32"):
            flash_dmattn.attention(query, key, value, attn_bias=wrong)


@pytest.mark.parametrize("heads", [1, KV_HEADS, Q_HEADS])
@pytest.mark.parametrize("axes", list(itertools.product((False, True), repeat=3)))
def test_spread_biases_are_the_broadcast_ones(heads: int, axes: tuple[bool, ...]) -> None:
    """Calls on a device need spread biases if gradients have to be the same from run to run."""
    sizes = [size if whole else 1 for size, whole in zip((BATCH, Q_LEN, KV_LEN), axes)]
    rows = make_rows()[:3]
    _, attn_bias = make_pairs((sizes[0], heads, *sizes[1:]))
    found = []
    for change in (lambda x: x, lambda x: spread(x, *rows)):
        given = attn_bias.clone().requires_grad_()
        out, _ = flash_dmattn.attention(*rows, attn_bias=change(given))
        found.append((out, torch.autograd.grad(out.square().sum(), given)[0]))
    assert spread(attn_bias, *rows).shape == (BATCH, Q_HEADS, Q_LEN, KV_LEN)
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 2, 1, 1), (1, 1, 3, 1), (1, 1, 1), (2, 3, 37, 54)])
def test_biases_that_do_not_fit_are_refused_as_they_are(shape: tuple[int, ...]) -> None:
    attn_bias, rows = torch.zeros(shape), make_rows()[:3]
    assert spread(attn_bias, *rows).shape[-1] == shape[-1]
    with pytest.raises(ValueError, match="attn_bias: (axis|rank)"):
        flash_dmattn.attention(*rows, attn_bias=spread(attn_bias, *rows))
