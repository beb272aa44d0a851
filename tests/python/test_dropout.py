"""Dropout: the dropped probabilities, against the generator in numpy, and results and gradients
with these dropped, against PyTorch alone."""

from __future__ import annotations

import math
from typing import Any

import flash_dmattn
import numpy as np
import pytest
import torch
from cases import DEVICES, make_fused
from flash_dmattn import ops

SIZES = {"head_dim": 16}
WINDOW = 9
STATE = (0x0123456789ABCDEF, 0x7FEDCBA987654321)


# ---- docs/algorithm.md, dropout, in numpy ----


def philox(seed: int, counter: list[np.ndarray]) -> list[np.ndarray]:
    """Philox4x32-10 of Salmon et al., SC 2011: the four words of each counter."""
    low = np.uint64(0xFFFFFFFF)
    x = [np.asarray(word, dtype=np.uint64) & low for word in counter]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        products = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        high, rest = [p >> np.uint64(32) for p in products], [p & low for p in products]
        x = [
            high[1] ^ x[1] ^ np.uint64(key[0]),
            rest[1],
            high[0] ^ x[3] ^ np.uint64(key[1]),
            rest[0],
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return x


def kept_pairs(
    shape: tuple[int, int, int, int], kv_heads: int, dropout_p: float, state: tuple[int, int]
) -> np.ndarray:
    """The kept pairs [batch, q_heads, q_len, kv_len]. The last query is aligned with the last
    key."""
    batch, q_heads, q_len, kv_len = shape
    seed, offset = state
    offset_words = [np.uint64(offset & 0xFFFFFFFF), np.uint64(offset >> 32)]
    b, h = np.arange(batch)[:, None, None], np.arange(q_heads)[None, :, None]
    position = np.arange(q_len) + kv_len - q_len
    row_head = 2 * (b * q_heads + h)
    pair_of_rows = np.broadcast_to(position >> 1, (batch, q_heads, q_len))
    flips, adds, *_ = philox(seed, [pair_of_rows, row_head + 0 * pair_of_rows, *offset_words])
    key_head = 2 * (b * kv_heads + h // (q_heads // kv_heads)) + 1
    key = philox(seed, [np.arange(kv_len) + 0 * key_head, key_head, *offset_words])[0]
    words = [x.astype(np.uint32) for x in (flips, adds, key)]
    x = (words[0][..., None] ^ words[2][:, :, None]) * np.uint32(0x7FEB352D) + words[1][..., None]
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    x = x ^ (x >> np.uint32(16))
    is_odd = (position % 2 == 1)[:, None]
    bits = np.where(is_odd, x >> np.uint32(16), x & np.uint32(0xFFFF))
    return bits >= math.floor(dropout_p * 65536 + 0.5)


def rounded(dropout_p: float) -> float:
    return math.floor(dropout_p * 65536 + 0.5) / 65536


# ---- attention in PyTorch ----


def attend_in_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kept: np.ndarray, p: float
) -> torch.Tensor:
    """Causal attention over all keys, in float64, with dropout."""
    query, key, value = (x.double() for x in (query, key, value))
    group = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(group, 2) for x in (key, value))
    logits = torch.einsum("bihd,bjhd->bhij", query, key) * query.shape[3] ** -0.5
    hidden = torch.ones(logits.shape[2:], dtype=torch.bool).triu(1 + key.shape[1] - query.shape[1])
    weights = logits.masked_fill(hidden, float("-inf")).softmax(3)
    weights = weights * torch.from_numpy(kept) / (1 - rounded(p))
    return torch.einsum("bhij,bjhd->bihd", weights, value)


def fused_with(tensors: list[torch.Tensor], **options: Any) -> Any:
    options = {"keep_window_size": WINDOW, "causal": True, "dropout_p": 0.3, **options}
    return flash_dmattn.flash_dma_attention(*tensors, **options)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("queries", [70, 41])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_dense_against_numpy(backend: str, queries: int, p: float) -> None:
    query, key, value, *_ = make_fused(70, **SIZES)
    query = query[:, 70 - queries :].detach().requires_grad_()
    given = (query, key, value)
    state = torch.tensor(STATE)
    out, lse = flash_dmattn.attention(
        *given, causal=True, dropout_p=p, rng_state=state, backend=backend
    )
    batch, _, q_heads, _ = query.shape
    kept = kept_pairs((batch, q_heads, queries, 70), key.shape[2], p, STATE)
    assert 0.8 * p < 1 - kept.mean() < 1.2 * p
    expected = attend_in_torch(*given, kept, p)
    scale = 1 / (1 - p)
    torch.testing.assert_close(out.double(), expected, atol=2e-6 * scale, rtol=1e-5)
    assert torch.equal(lse, flash_dmattn.attention(*given, causal=True, backend=backend)[1])
    found = torch.autograd.grad(out.cos().sum(), given)
    wanted = torch.autograd.grad(expected.cos().sum(), given)
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, atol=2e-5 * scale, rtol=1e-4)


@pytest.mark.parametrize("form", ["exp", "linear", "none"])
def test_gradcheck(form: str) -> None:
    """Compare with finite differences in float64, which only the reference supports."""
    tensors = make_fused(40, dtype=torch.float64, **SIZES)
    if form == "none":
        tensors[3:5] = [tensor.detach() for tensor in tensors[3:5]]

    def run(*given: torch.Tensor) -> Any:
        generator = torch.Generator().manual_seed(3)  # every call drops the same pairs
        return fused_with(list(given), bias_form=form, return_lse=True, generator=generator)

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


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


@pytest.mark.parametrize("device", DEVICES)
def test_no_dropout_draws_nothing(device: str) -> None:
    tensors = make_fused(60, device=device)
    torch.manual_seed(4)
    expected = torch.rand(3, device=device)
    torch.manual_seed(4)
    plain = fused_with(tensors, dropout_p=0.0)
    assert torch.equal(torch.rand(3, device=device), expected)
    assert torch.equal(plain, flash_dmattn.flash_dma_attention(*tensors, WINDOW, causal=True))


def check_probabilities(probability: torch.Tensor, out: torch.Tensor, value: torch.Tensor) -> None:
    """out is the sum of values weighted by the probabilities, some of them dropped."""
    assert 0.2 < (probability == 0).double().sum() / probability.numel()
    group = out.shape[2] // value.shape[2]
    values = value.detach().repeat_interleave(group, 2)
    expected = torch.einsum("bhij,bjhd->bihd", probability, values)
    torch.testing.assert_close(out.detach(), expected, atol=5e-6, rtol=1e-5)


def test_probabilities_have_dropout() -> None:
    tensors = make_fused(50, **SIZES)
    options = {"return_attn_probs": True, "bias_form": "linear"}
    out, probability = fused_with(tensors, **options)
    check_probabilities(probability, out, tensors[2])
    visible = torch.ones(50, 50, dtype=torch.bool).tril()
    _, plain = fused_with(tensors, **options, dropout_p=0.0)
    dropped = (probability == 0) & (plain > 0)
    assert 0.2 < dropped.sum() / (plain > 0).sum() < 0.4
    assert not probability[..., ~visible].any()


def test_probabilities_of_attention() -> None:
    query, key, value, *_ = make_fused(50, **SIZES)
    options = {"causal": True, "dropout_p": 0.3, "rng_state": torch.tensor(STATE)}
    out, lse = flash_dmattn.attention(query, key, value, **options)
    probability = flash_dmattn.attention_probabilities(query, key, lse, **options)
    check_probabilities(probability, out, value)


@pytest.mark.parametrize("selects", [False, True])
def test_packed_sequences(selects: bool) -> None:
    query, key, value, dt_proj, a_coef = make_fused(60, **SIZES)
    rows = [x[0].detach() for x in (query, key, value)]
    starts = torch.tensor([0, 25, 60], dtype=torch.int32)
    weights = {"dt_proj": dt_proj, "a_coef": a_coef, "keep_window_size": WINDOW} if selects else {}
    options = {"return_attn_probs": True, "bias_form": "linear"}
    out, probability = flash_dmattn.flash_dmattn_varlen_func(
        *rows, starts, starts, 35, 35, 0.3, causal=True, **options, **weights
    )
    check_probabilities(probability[None], out[None], rows[2][None])


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
    query, key, value, *_ = (x.detach() for x in make_fused(30, **SIZES))
    plain, _ = flash_dmattn.attention(query, key, value)
    runs = [flash_dmattn.attention(query, key, value, dropout_p=0.25)[0] for _ in range(400)]
    found = torch.stack(runs).double()
    deviation = found.std(0) / math.sqrt(len(runs))
    assert ((found.mean(0) - plain).abs() < 6 * deviation + 1e-5).all()


def test_compiled() -> None:
    tensors = make_fused(30, **SIZES)

    def run(*given: torch.Tensor) -> torch.Tensor:
        return fused_with(list(given)).cos()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.manual_seed(5)
    expected = run(*tensors)
    wanted = torch.autograd.grad(expected.sum(), tensors)
    torch.manual_seed(5)
    found = compiled(*tensors)
    assert torch.equal(found, expected)
    for one, other in zip(torch.autograd.grad(found.sum(), tensors), wanted):
        torch.testing.assert_close(one, other)


def test_checkpointed() -> None:
    """The forward pass that checkpointing repeats drops the same probabilities."""
    tensors = make_fused(30, **SIZES)
    torch.manual_seed(5)
    wanted = torch.autograd.grad(fused_with(tensors).cos().sum(), tensors)
    torch.manual_seed(5)
    out = torch.utils.checkpoint.checkpoint(
        lambda *given: fused_with(list(given)), *tensors, use_reentrant=False
    )
    for one, other in zip(torch.autograd.grad(out.cos().sum(), tensors), wanted):
        assert torch.equal(one, other)


def test_state_is_optional_in_the_operator() -> None:
    query, key, value, *_ = (x.detach() for x in make_fused(20, **SIZES))
    given = (query, key, value, *9 * [None], None, None, 0, 0, 0, "causal", True)
    out, _ = ops.ATTENTION.op(*given, 0.0, 0.0, 0.5, False, None)  # seed and offset are 0
    state = torch.zeros(2, dtype=torch.int64)
    same = flash_dmattn.attention(query, key, value, causal=True, dropout_p=0.5, rng_state=state)[0]
    assert torch.equal(out, same)
