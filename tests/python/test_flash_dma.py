"""The modules flash_dma and flash_dma_cuda: results as from attention(), and refusals."""

from __future__ import annotations

import functools
import inspect

import flash_dma
import flash_dma_cuda
import flash_dmattn
import pytest
import torch
from cases import on_device
from evaluate import assert_same
from flash_dmattn import _arguments
from test_masks import (
    BATCH,
    KV_HEADS,
    KV_LEN,
    Q_HEADS,
    Q_LEN,
    make_pairs,
    make_rows,
)

PAIRS = (BATCH, KV_HEADS, Q_LEN, KV_LEN)


def test_arguments() -> None:
    optional = {"out": None, "p_dropout": 0.0, "softmax_scale": None, "is_causal": False}
    optional.update(keep_window_size=2048, softcap=0.0, return_softmax=False, gen=None)
    empty = inspect.Parameter.empty
    expected = [*((name, empty) for name in "q k v zoh active_mask".split()), *optional.items()]
    for module in (flash_dma, flash_dma_cuda):
        parameters = inspect.signature(module.fwd).parameters.values()
        assert [(x.name, x.default) for x in parameters] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [KV_HEADS, Q_HEADS])
def test_it_is_attention(heads: int, dtype: torch.dtype) -> None:
    """Every result and gradient is that of attention() and attention_probabilities()."""
    query, key, value, _ = make_rows(dtype)
    mask, zoh = make_pairs((BATCH, heads, Q_LEN, KV_LEN), dtype)
    leaves, options = (query, key, value, zoh.requires_grad_()), {"softcap": 2.0}
    output, lse, p, rng_state = flash_dma.fwd(
        *(*leaves, mask.to(dtype)),
        is_causal=True,
        keep_window_size=KV_LEN - 1,
        return_softmax=True,
        **options,
    )
    options.update(attn_mask=mask, attn_bias=zoh, causal=True)
    want = flash_dmattn.attention(query, key, value, **options)
    probability = flash_dmattn.attention_probabilities(query, key, want[1], **options)
    assert_same((output, lse, p), (*want, probability))
    assert rng_state.shape == (0,)
    found, wanted = (torch.autograd.grad(x.cos().sum(), leaves) for x in (output, want[0]))
    assert_same(found, wanted)


def test_only_what_is_asked_for() -> None:
    query, key, value, _ = make_rows()
    result = flash_dma.fwd(query, key, value, None, None, softmax_scale=0.3)
    assert isinstance(result, list)
    output, lse, p, rng_state = result
    want = flash_dmattn.attention(query, key, value, softmax_scale=0.3)
    assert torch.equal(output, want[0]) and torch.equal(lse, want[1])
    assert p.numel() == 0 and rng_state.numel() == 0 and rng_state.dtype == torch.int64


def test_a_mask_counts_if_there_are_more_keys_than_the_window() -> None:
    query, key, value, _ = make_rows()
    mask, zoh = make_pairs(PAIRS)
    under, beside = (
        flash_dmattn.attention(query, key, value, attn_mask=one, attn_bias=zoh)[0]
        for one in (mask, None)
    )
    assert not torch.equal(under, beside)
    for size, want in ((1, under), (KV_LEN - 1, under), (KV_LEN, beside), (2048, beside)):
        for given in (mask, mask.float()):
            options = {"keep_window_size": size}
            assert torch.equal(flash_dma.fwd(query, key, value, zoh, given, **options)[0], want)
    numbers = {"attn_mask": mask.float(), "attn_bias": zoh}
    assert torch.equal(flash_dmattn.flash_dmattn_func(query, key, value, **numbers), under)


def test_a_mask_of_zeros_gives_zeros() -> None:
    query, key, value, _ = make_rows()
    zeros = torch.zeros(PAIRS)
    options = {"keep_window_size": 1, "return_softmax": True}
    output, lse, p, _ = flash_dma.fwd(query, key, value, zeros, zeros, **options)
    assert (output == 0).all() and torch.isneginf(lse).all() and (p == 0).all()


def test_dropout() -> None:
    query, key, value, _ = make_rows()
    mask, zoh = make_pairs(PAIRS)
    given = (query, key, value, zoh, mask)
    fwd = functools.partial(flash_dma.fwd, keep_window_size=4)
    first = fwd(*given, p_dropout=0.4, gen=torch.Generator().manual_seed(3))
    again = fwd(*given, None, 0.4, gen=torch.Generator().manual_seed(3))
    rng_state = first[3]
    assert torch.equal(first[0], again[0]) and torch.equal(rng_state, again[3])
    options = {"attn_bias": zoh, "attn_mask": mask, "dropout_p": 0.4, "rng_state": rng_state}
    want = flash_dmattn.attention(query, key, value, **options)[0]
    assert torch.equal(first[0], want)
    assert not torch.equal(want, fwd(*given)[0])


def test_out() -> None:
    query, key, value, _ = (x.detach() for x in make_rows())
    want = flash_dma.fwd(query, key, value, None, None)[0]
    out = torch.full_like(query, 7)
    found = flash_dma.fwd(query, key, value, None, None, out)[0]
    assert found is out and torch.equal(out, want)


def test_anomaly_detection() -> None:
    """The example of PyTorch's debug mode."""
    query, key, value, _ = make_rows()
    mask, zoh = make_pairs(PAIRS)
    with torch.autograd.set_detect_anomaly(True):
        output, _, weights, _ = flash_dma.fwd(
            query, key, value, zoh, mask.float(), return_softmax=True
        )
        output.square().sum().backward()
    assert query.grad.isfinite().all() and 0 <= weights.min() and weights.max() <= 1


def test_a_softmax_beyond_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, _ = make_rows()
    monkeypatch.setattr(_arguments, "memory_of", lambda device: 0)
    words = rf"^return_softmax: {BATCH} x {Q_HEADS} x {Q_LEN} x {KV_LEN} probabilities take "
    with pytest.raises(MemoryError, match=words):
        flash_dma.fwd(query, key, value, None, None, return_softmax=True)
    flash_dma.fwd(query, key, value, None, None)


def test_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [x.bfloat16() for x in make_rows()[:3]]
    monkeypatch.setattr(flash_dma_cuda, "get_available_backends", lambda: ["cpu", "reference"])
    with pytest.raises(NotImplementedError, match=r"^flash_dma_cuda\.fwd: there is no CUDA device"):
        flash_dma_cuda.fwd(*rows, None, None)
    assert not flash_dma_cuda.CUDA_AVAILABLE
    monkeypatch.setattr(flash_dma_cuda, "get_available_backends", lambda: ["cuda", "cpu"])
    assert flash_dma_cuda.CUDA_AVAILABLE
    with pytest.raises(ValueError, match=r"^q: is on cpu, want a CUDA device; flash_dma\.fwd"):
        flash_dma_cuda.fwd(*rows, None, None)


@on_device
def test_on_a_cuda_device() -> None:
    rows = [x.detach().bfloat16().cuda() for x in make_rows()[:3]]
    mask, zoh = (x.cuda() for x in make_pairs(PAIRS, torch.bfloat16))
    want = flash_dmattn.attention(*rows, attn_mask=mask, attn_bias=zoh, causal=True)[0]
    for module in (flash_dma, flash_dma_cuda):
        found = module.fwd(*rows, zoh, mask.bfloat16(), is_causal=True, keep_window_size=1)[0]
        assert torch.equal(found, want)
