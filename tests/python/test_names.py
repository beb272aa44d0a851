"""Functions that flash-dmattn has too: their arguments, masks of 1.0 and 0.0, and results, as from
attention()."""

from __future__ import annotations

import inspect
import math
import warnings
from typing import Any

import flash_dmattn
import pytest
import torch
from evaluate import assert_same
from flash_dmattn import _arguments, _library, flash_dmattn_func, flash_dmattn_varlen_func
from test_masks import (
    BATCH,
    HEAD_DIM,
    KV_HEADS,
    KV_LEN,
    Q_HEADS,
    Q_LEN,
    make_pairs,
    make_rows,
)

SHAPE = (BATCH, Q_HEADS, Q_LEN, KV_LEN)


def test_arguments() -> None:
    """Positional arguments are flash-dmattn's, in its order."""
    names = list(inspect.signature(flash_dmattn_func).parameters)
    assert names[:10] == [
        *("q", "k", "v", "attn_mask", "attn_bias", "scale", "is_causal", "softcap"),
        *("deterministic", "return_attn_probs"),
    ]
    assert {"query", "key", "value", "softmax_scale", "dropout_p"} < {*names[10:]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [SHAPE, (1, KV_HEADS, Q_LEN, KV_LEN), (BATCH, 1, 1, KV_LEN)])
def test_masks_of_numbers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """1.0 and 0.0 in the tensors' dtype mean what booleans mean to attention()."""
    query, key, value, _ = make_rows(dtype)
    mask, attn_bias = make_pairs(shape, dtype)
    leaves = (query, key, value, attn_bias.requires_grad_())
    numbers = {"q": query, "k": key, "v": value, "attn_mask": mask.to(dtype)}
    out = flash_dmattn_func(**numbers, attn_bias=attn_bias, is_causal=True)
    options = {"attn_mask": mask, "attn_bias": attn_bias, "causal": True}
    same, _ = flash_dmattn.attention(query, key, value, **options)
    found, wanted = (torch.autograd.grad(x.float().cos().sum(), leaves) for x in (out, same))
    assert_same((out, *found), (same, *wanted))


def test_what_numbers_of_a_mask_mean() -> None:
    query, key, value, _ = make_rows()
    mask, _ = make_pairs((1, 1, Q_LEN, KV_LEN))
    want = flash_dmattn_func(query, key, value, mask)
    numbers = torch.where(mask, 0.25, 0.0)
    assert torch.equal(flash_dmattn_func(query, key, value, numbers), want)
    numbers = torch.where(mask, 1.0, float("nan"))
    assert torch.equal(flash_dmattn_func(query, key, value, numbers), want)
    assert torch.equal(flash_dmattn_func(query, key, value, mask.to(torch.uint8)), want)


def test_a_mask_of_zeros_gives_zeros_without_a_warning() -> None:
    """The quick starts of flash-dmattn do this: they drop the result of scatter()."""
    query, key, value, _ = make_rows()
    zeros = torch.zeros(SHAPE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, lse, probability = flash_dmattn_func(
            query, key, value, attn_mask=zeros, return_attn_probs=True
        )
        gradients = torch.autograd.grad(out.sum(), (query, key, value))
    assert (out == 0).all() and torch.isneginf(lse).all() and (probability == 0).all()
    assert all((x == 0).all() for x in gradients)


def test_an_expanded_mask_is_not_copied_as_a_whole() -> None:
    mask = torch.ones(1, 1, Q_LEN, KV_LEN).expand(BATCH, Q_HEADS, -1, -1)
    found = _arguments.as_bool_mask(mask)
    assert found.shape == (1, 1, Q_LEN, KV_LEN) and found.dtype == torch.bool
    query, key, value, _ = make_rows()
    want = flash_dmattn.attention(query, key, value)[0]
    assert torch.equal(flash_dmattn_func(query, key, value, mask), want)


def test_scale_is_softmax_scale() -> None:
    rows = make_rows()[:3]
    want = flash_dmattn.attention(*rows, softmax_scale=0.3)[0]
    for given in ({"scale": 0.3}, {"softmax_scale": 0.3}, {"scale": 0.3, "softmax_scale": 0.3}):
        assert torch.equal(flash_dmattn_func(*rows, **given), want)
    assert not torch.equal(flash_dmattn_func(*rows), want)
    default = flash_dmattn_func(*rows, scale=1.0 / math.sqrt(HEAD_DIM))
    assert torch.equal(flash_dmattn_func(*rows), default)


def test_options_reach_attention() -> None:
    query, key, value, _ = make_rows()
    options: dict[str, Any] = {"softcap": 1.5, "deterministic": True, "backend": "reference"}
    found = flash_dmattn_func(query, key, value, is_causal=True, **options)
    want = flash_dmattn.attention(query, key, value, causal=True, **options)[0]
    assert torch.equal(found, want)


def test_dropout_and_probabilities() -> None:
    rows = make_rows()[:3]
    torch.manual_seed(5)
    first = flash_dmattn_func(*rows, dropout_p=0.3, return_attn_probs=True)
    torch.manual_seed(5)
    assert torch.equal(flash_dmattn_func(*rows, dropout_p=0.3), first[0])
    given = flash_dmattn_func(*rows, dropout_p=0.3, generator=torch.Generator().manual_seed(5))
    assert torch.equal(given, first[0])
    out, lse, probability = first
    assert lse.shape == SHAPE[:3] and probability.shape == SHAPE
    assert 0.25 < (probability == 0).float().mean() < 0.35
    value = rows[2].transpose(1, 2).repeat_interleave(Q_HEADS // KV_HEADS, 1)
    torch.testing.assert_close((probability @ value).transpose(1, 2), out, atol=1e-5, rtol=1e-5)
    assert out.requires_grad and not probability.requires_grad


def test_a_compiled_call() -> None:
    query, key, value, _ = make_rows()
    mask, attn_bias = make_pairs((1, KV_HEADS, Q_LEN, KV_LEN))

    def call(*given: torch.Tensor) -> torch.Tensor:
        return flash_dmattn_func(*given[:3], given[3], given[4], is_causal=True, scale=0.2)

    given = (query, key, value, mask.float(), attn_bias)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*given), call(*given))


# ---- the function with its backend chosen ----


def test_auto() -> None:
    rows = make_rows()[:3]
    for backend in (None, *flash_dmattn.get_available_backends()):
        if backend != "cuda":
            function = flash_dmattn.flash_dmattn_func_auto(backend=backend)
            want = flash_dmattn_func(*rows, is_causal=True, backend=backend)
            assert torch.equal(function(*rows, is_causal=True), want)


def test_auto_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "backends", lambda: ["cpu", "reference"])
    with pytest.warns(RuntimeWarning, match="there is no CUDA device.*takes CPU tensors"):
        function = flash_dmattn.flash_dmattn_func_auto(backend="cuda")
    rows = make_rows()[:3]
    assert torch.equal(function(*rows), flash_dmattn_func(*rows))
    monkeypatch.setattr(_library, "backends", lambda: ["cuda", "cpu", "reference"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function = flash_dmattn.flash_dmattn_func_auto(backend="cuda")
    with pytest.raises(NotImplementedError, match="cuda"):
        function(*rows)


def test_auto_with_backends_of_others() -> None:
    for name in ("triton", "flex"):
        with pytest.raises(RuntimeError, match=f"backend: is '{name}', which this library does"):
            flash_dmattn.flash_dmattn_func_auto(backend=name)


# ---- packed sequences ----

STARTS = torch.tensor([0, 7, 7, 20], dtype=torch.int32)


def make_packed() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(20, heads, 16, generator=generator) for heads in (4, 2, 2)]


def packed(*rows: torch.Tensor, starts: torch.Tensor = STARTS, **options: Any) -> torch.Tensor:
    return flash_dmattn_varlen_func(*rows, starts, starts, 13, 13, **options)


def test_packed_sequences_under_a_mask() -> None:
    rows = make_packed()
    mask, attn_bias = (x[0] for x in make_pairs((1, 2, 20, 20)))
    options = {"attn_mask": mask.float(), "attn_bias": attn_bias}
    found = packed(*rows, is_causal=True, **options)
    for span in (slice(0, 7), slice(7, 20)):
        alone = flash_dmattn_func(
            *(x[None, span] for x in rows),
            attn_mask=mask[None, :, span, span],
            attn_bias=attn_bias[None, :, span, span],
            is_causal=True,
        )
        torch.testing.assert_close(found[span], alone[0], atol=1e-6, rtol=1e-5)


def test_packed_names() -> None:
    rows = make_packed()
    want = packed(*rows, causal=True, softmax_scale=0.4)
    assert torch.equal(packed(*rows, is_causal=True, scale=0.4), want)
    assert torch.equal(packed(*rows, starts=STARTS.long(), causal=True, scale=0.4), want)
    named = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "max_seqlen_q": 13}
    found = flash_dmattn_varlen_func(*rows, **named, max_seqlen_k=13, is_causal=True, scale=0.4)
    assert torch.equal(found, want)


# ---- probabilities beyond memory ----


def test_probabilities_beyond_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_arguments, "memory_of", lambda device: 4 * math.prod(SHAPE) - 1)
    query, key, value, _ = make_rows()
    words = rf"{BATCH} x {Q_HEADS} x {Q_LEN} x {KV_LEN} probabilities take 0.0 GiB, and cpu has"
    weights = torch.randn(KV_HEADS, KV_HEADS * HEAD_DIM), torch.ones(KV_HEADS)
    _, lse = flash_dmattn.attention(query, key, value)
    with pytest.raises(MemoryError, match=f"return_attn_probs: {words}"):
        flash_dmattn_func(query, key, value, return_attn_probs=True)
    with pytest.raises(MemoryError, match=f"return_attn_probs: {words}"):
        flash_dmattn.flash_dma_attention(query, key, value, *weights, return_attn_probs=True)
    with pytest.raises(MemoryError, match=f"attention_probabilities: {words}"):
        flash_dmattn.attention_probabilities(query, key, lse)
    monkeypatch.setattr(_arguments, "memory_of", lambda device: 4 * math.prod(SHAPE))
    flash_dmattn_func(query, key, value, return_attn_probs=True)


def test_memory_of_this_machine() -> None:
    """No machine can hold 2^24 queries times as many keys; without storage the tensors cost
    nothing."""
    long = torch.zeros(1).expand(1, 1 << 24, 1, 8)
    with pytest.raises(MemoryError, match=r"take 1048576.0 GiB, and cpu has [\d.]+ GiB in all"):
        flash_dmattn_func(long, long, long, return_attn_probs=True)
