"""Programs for flash-dmattn 0.1 to 1.2 run unchanged: its quick starts, modules, names, orders of
arguments and masks, and flash_dmattn.integrations and utils.padding, as layers written for it call
them. Also the files on citing and conduct."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import flash_dmattn
import numpy as np
import pytest
import torch
import warm
from flash_dmattn import flash_dmattn_func, flash_dmattn_interface, flash_dmattn_varlen_func
from flash_dmattn.integrations import flash_dynamic_mask_attention as integration
from flash_dmattn.utils import padding
from flash_dmattn.utils.mask import create_mask, dynamic_mask
from programs import ROOT, output_of, python
from torch import nn
from torch.utils.checkpoint import checkpoint

STARTS = torch.tensor([0, 7, 20], dtype=torch.int32)
SIZES = (STARTS, STARTS, 13, 13)
BATCH, HEADS, KV_HEADS, HEAD_DIM, TOTAL = 2, 4, 2, 16, 20
Q_LEN, KV_LEN, LENGTH = 9, 13, 24
LEAST = torch.finfo(torch.float32).min


def make_rows() -> list[torch.Tensor]:
    """query, key and value."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((Q_LEN, HEADS), *2 * [(KV_LEN, KV_HEADS)])
    return [torch.randn(BATCH, *size, HEAD_DIM, generator=generator) for size in sizes]


def make_pairs(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask and a bias."""
    generator = torch.Generator().manual_seed(1)
    return torch.rand(shape, generator=generator) < 0.4, torch.randn(shape, generator=generator)


# ---- modules and names ----


def make_packed() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(TOTAL, one, HEAD_DIM, generator=generator) for one in heads]


IMPORTS = """
from flash_dmattn import CUDA_AVAILABLE, TRITON_AVAILABLE, FLEX_AVAILABLE
from flash_dmattn import flash_dmattn_func, triton_dmattn_func, flex_dmattn_func
from flash_dmattn import flash_dmattn_varlen_func, get_available_backends, flash_dmattn_func_auto
from flash_dmattn import flash_dmattn_kvpacked_func, flash_dmattn_qkvpacked_func
from flash_dmattn import flash_dmattn_varlen_kvpacked_func, flash_dmattn_varlen_qkvpacked_func
import flash_dmattn.flash_dmattn_interface as interface
from flash_dmattn.flash_dmattn_interface import flash_dmattn_func as same
from flash_dmattn.flash_dmattn_triton import triton_dmattn_func as triton
from flash_dmattn.flash_dmattn_flex import flex_dmattn_func as flex
from flash_dmattn.integrations.import_utils import is_flash_dmattn_available
from flash_dmattn.integrations.flash_dynamic_mask_attention import (
    flash_dynamic_mask_attention_forward,
)
from flash_dmattn.integrations.modeling_flash_dynamic_mask_attention_utils import (
    _flash_dynamic_mask_attention_forward,
    fdma_peft_integration_check,
)
from flash_dmattn.utils.mask import create_mask, dynamic_mask
from flash_dmattn.utils.padding import (
    get_unpad_data, index_first_axis, pad_input, unpad_input, upad_input,
)

assert same is interface.flash_dmattn_func is flash_dmattn_func
assert TRITON_AVAILABLE is False and FLEX_AVAILABLE is False
assert triton_dmattn_func is flex_dmattn_func is triton is flex is None
assert CUDA_AVAILABLE is is_flash_dmattn_available() is ("cuda" in get_available_backends())
"""


def test_imports() -> None:
    """In a new process, in which nothing else has imported the modules."""
    output_of(python("-c", IMPORTS))


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="module 'flash_dmattn' has no attribute 'no_name'"):
        _ = flash_dmattn.no_name


# ---- flash_dmattn_func ----


def test_order() -> None:
    query, key, value = make_rows()
    mask, attn_bias = make_pairs((1, 1, *query.shape[1:2], key.shape[1]))
    named = {"attn_mask": mask, "attn_bias": attn_bias, "scale": 0.3, "is_causal": True}
    want = flash_dmattn_func(q=query, k=key, v=value, **named, softcap=2.0, return_attn_probs=True)
    given = (query, key, value, mask, attn_bias, 0.3, True, 2.0, True, True)
    for found, one in zip(flash_dmattn_func(*given), want):
        assert torch.equal(found, one)
    by_name = flash_dmattn_func(query=query, key=key, value=value, **named, softcap=2.0)
    assert torch.equal(by_name, want[0])


BEHIND_BIAS: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]] = {
    # behind attn_bias: by position, by name, and what they mean
    "scale": ((0.25,), {}, {"scale": 0.25}),
    "scale, causal": ((0.25, True), {}, {"scale": 0.25, "is_causal": True}),
    "scale, not causal": ((0.25, None, 2.0), {}, {"scale": 0.25, "softcap": 2.0}),
    "no scale": ((None, True), {}, {"is_causal": True}),
    "scale, named": ((0.25,), {"is_causal": True}, {"scale": 0.25, "is_causal": True}),
    "scale, dropout": ((0.25,), {"dropout_p": 0.5}, {"scale": 0.25, "dropout_p": 0.5}),
    "earlier, no dropout": ((0.0, None, True), {}, {"is_causal": True}),
    "earlier, 0": ((0.0,), {}, {}),
    "earlier, scale": ((0.25, 0.5), {}, {"dropout_p": 0.25, "scale": 0.5}),
    "earlier, scale named": ((0.25,), {"scale": 0.5}, {"dropout_p": 0.25, "scale": 0.5}),
    "earlier, all": (
        (0.25, 0.5, True, 2.0, True, False),
        {},
        {"dropout_p": 0.25, "scale": 0.5, "is_causal": True, "softcap": 2.0},
    ),
}


@pytest.mark.parametrize("case", BEHIND_BIAS)
def test_what_follows_the_bias(case: str) -> None:
    """The order of 0.1 to 1.2, and the earlier one if a call can mean nothing else."""
    positional, named, meaning = BEHIND_BIAS[case]
    rows = make_rows()
    torch.manual_seed(7)
    want = flash_dmattn_func(*rows, **meaning)
    torch.manual_seed(7)
    assert torch.equal(flash_dmattn_func(*rows, None, None, *positional, **named), want)
    assert not torch.equal(want, flash_dmattn_func(*rows, scale=0.9))


def test_a_call_in_no_order() -> None:
    rows = make_rows()
    with pytest.raises(TypeError, match="^is_causal: is 0.5, a float, want a bool"):
        flash_dmattn_func(*rows, None, None, None, 0.5)
    with pytest.raises(TypeError, match="^softcap: is True, a bool, want a number"):
        flash_dmattn_func(*rows, None, None, None, None, True)
    with pytest.raises(TypeError, match="^scale: is given by position and by name"):
        flash_dmattn_func(*rows, None, None, None, scale=0.5)


def test_messages_have_the_names_of_the_call() -> None:
    query, key, value = make_rows()
    for names in (("q", "k", "v"), ("query", "key", "value")):
        rows = dict(zip(names, (query, key, value[:, 1:])))
        with pytest.raises(ValueError, match=f"^{names[2]}: axis 1 has .* {names[1]} has"):
            flash_dmattn_func(**rows)
        with pytest.raises(TypeError, match=f"^{names[0]}: is .*, a list"):
            flash_dmattn_func(**{**rows, names[0]: [1.0]})


def test_arguments_of_auto_have_no_effect() -> None:
    rows = make_rows()
    function = flash_dmattn.flash_dmattn_func_auto(None, is_causal=True, head_dim=16)
    assert torch.equal(function(*rows), flash_dmattn_func(*rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_that_are_added_are_refused(dtype: torch.dtype) -> None:
    rows = [x.to(dtype) for x in make_rows()]
    allowed, _ = make_pairs((1, 1, rows[0].shape[1], rows[1].shape[1]))
    for least in (-torch.inf, torch.finfo(dtype).min, -1.0):
        added = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, least)
        with pytest.raises(ValueError, match="^attn_mask: has the number -.*give it as attn_bias"):
            flash_dmattn_func(*rows, added)
        expanded = added.expand(-1, rows[0].shape[2], -1, -1)
        with pytest.raises(ValueError, match="^attn_mask: has the number -"):
            flash_dmattn_func(*rows, attn_mask=expanded)


# ---- packed query, key and value ----


def test_packed_tensors() -> None:
    qkv = torch.randn(2, 9, 3, KV_HEADS, 16)
    query = torch.randn(2, 9, HEADS, 16)
    mask, attn_bias = (x for x in make_pairs((2, KV_HEADS, 9, 9)))
    pairs, options = (mask, attn_bias), {"scale": 0.3, "is_causal": True}
    of_qkv = flash_dmattn_interface.flash_dmattn_qkvpacked_func
    of_kv = flash_dmattn_interface.flash_dmattn_kvpacked_func
    found = of_qkv(qkv, *pairs, True, 0.3)
    assert torch.equal(found, flash_dmattn_func(*qkv.unbind(2), *pairs, **options))
    found = of_kv(query, qkv[:, :, 1:], *pairs, 0.3, True)
    assert torch.equal(found, flash_dmattn_func(query, *qkv.unbind(2)[1:], *pairs, **options))
    with pytest.raises(
        ValueError, match=r"^qkv: shape is \[2, 9, 2, 2, 16\], want \[batch, len, 3, heads"
    ):
        flash_dmattn_interface.flash_dmattn_qkvpacked_func(qkv[:, :, 1:])


@pytest.mark.parametrize("flag", [1, 0, np.True_, True])
def test_flags_are_no_numbers(flag: Any) -> None:
    """By name there is no doubt, and by position 0.3 before a flag is a scale."""
    query, qkv = torch.randn(2, 9, HEADS, 16), torch.randn(2, 9, 3, KV_HEADS, 16)
    key, value = qkv[:, :, 1], qkv[:, :, 2]
    want = flash_dmattn_func(query, key, value, scale=0.3, is_causal=bool(flag))
    of_kv = flash_dmattn_interface.flash_dmattn_kvpacked_func
    assert torch.equal(of_kv(query, qkv[:, :, 1:], scale=0.3, is_causal=flag), want)
    assert torch.equal(flash_dmattn_func(query, key, value, None, None, 0.3, flag), want)
    want = flash_dmattn_func(key, key, value, scale=0.3, is_causal=bool(flag))
    of_qkv = flash_dmattn_interface.flash_dmattn_qkvpacked_func
    assert torch.equal(of_qkv(qkv[:, :, [1, 1, 2]], scale=0.3, is_causal=flag), want)
    with pytest.raises(ValueError, match="^scale: is 0, want a finite number above 0, or None"):
        of_qkv(qkv, scale=0.0, is_causal=flag)


def test_names_of_this_package_say_that_a_number_is_dropout() -> None:
    rows = make_packed()
    torch.manual_seed(7)
    want = flash_dmattn_varlen_func(*rows, *SIZES, dropout_p=0.5)
    generator = torch.Generator().manual_seed(7)
    assert torch.equal(flash_dmattn_varlen_func(*rows, *SIZES, 0.5, generator=generator), want)


def test_packed_tensors_of_packed_sequences() -> None:
    query, key, value = make_packed()
    kv, qkv = torch.stack((key, value), 1), torch.stack((key, key, value), 1)
    call = flash_dmattn_interface.flash_dmattn_varlen_kvpacked_func
    want = flash_dmattn_varlen_func(query, key, value, *SIZES, is_causal=True, scale=0.3)
    assert torch.equal(call(query, kv, None, None, *SIZES, 0.3, True), want)
    call = flash_dmattn_interface.flash_dmattn_varlen_qkvpacked_func
    want = flash_dmattn_varlen_func(key, key, value, *SIZES, is_causal=True, scale=0.3)
    assert torch.equal(call(qkv, None, None, STARTS, 13, 0.3, True), want)
    assert torch.equal(call(qkv, cu_seqlens=STARTS, max_seqlen=13, scale=0.3, is_causal=True), want)


# ---- flash_dmattn_varlen_func ----


def seeded(*args: Any, **named: Any) -> torch.Tensor:
    torch.manual_seed(7)
    return flash_dmattn_varlen_func(*args, **named)


ORDERS: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]] = {
    # behind max_seqlen_k: by position, by name, and what they mean
    "flash-attn, no dropout": ((0.0, None, True), {}, {"causal": True}),
    "flash-attn": ((0.25, 0.5, True), {}, {"dropout_p": 0.25, "scale": 0.5, "causal": True}),
    "flash-attn, default scale": ((0.25, None, True), {}, {"dropout_p": 0.25, "causal": True}),
    "flash-attn, two": ((0.25, 0.5), {}, {"dropout_p": 0.25, "scale": 0.5}),
    "flash-attn, 0": ((0.0,), {}, {}),
    "flash-attn, causal": ((0.25,), {"causal": True}, {"dropout_p": 0.25, "causal": True}),
    "flash-attn, scale": ((0.25,), {"softmax_scale": 0.5}, {"dropout_p": 0.25, "scale": 0.5}),
    "flash-dmattn 1.2": ((0.25, True, 2.0), {}, {"scale": 0.25, "causal": True, "softcap": 2.0}),
    "flash-dmattn 1.2, scale alone": ((0.25,), {}, {"scale": 0.25}),
    "flash-dmattn 1.2, no scale": ((None, True), {}, {"causal": True}),
    "flash-dmattn 1.2, softcap": ((0.25, None, 2.0), {}, {"scale": 0.25, "softcap": 2.0}),
    "flash-dmattn 1.2, named": ((0.25,), {"is_causal": True}, {"scale": 0.25, "causal": True}),
    "flash-dmattn 1.2, all": (
        (0.25, True, 2.0, True, False, None),
        {},
        {"scale": 0.25, "causal": True, "softcap": 2.0},
    ),
}


@pytest.mark.parametrize("case", ORDERS)
def test_orders_without_a_mask(case: str) -> None:
    positional, named, meaning = ORDERS[case]
    rows = make_packed()
    want = seeded(*rows, *SIZES, **meaning)
    assert torch.equal(seeded(*rows, *SIZES, *positional, **named), want)
    assert not torch.equal(want, seeded(*rows, *SIZES, scale=0.9))


def of_dmattn(pairs: torch.Tensor) -> torch.Tensor:
    """Convert [heads, total, total] to flash-dmattn's [total, heads, max_seqlen_k]."""
    found = pairs.new_ones(TOTAL, pairs.shape[0], 13)
    for begin, end in ((0, 7), (7, 20)):
        found[begin:end, :, : end - begin] = pairs[:, begin:end, begin:end].transpose(0, 1)
    return found


@pytest.mark.parametrize("heads", [1, KV_HEADS, HEADS])
def test_order_with_a_mask(heads: int) -> None:
    """The order of versions 0.1 to 1.0.6, with masks in the shape here and in theirs."""
    rows = make_packed()
    mask, attn_bias = (x[0] for x in make_pairs((1, heads, TOTAL, TOTAL)))
    options = {"scale": 0.3, "is_causal": True, "softcap": 2.0}
    want = flash_dmattn_varlen_func(*rows, *SIZES, attn_mask=mask, attn_bias=attn_bias, **options)
    assert torch.equal(
        flash_dmattn_varlen_func(*rows, mask, attn_bias, *SIZES, 0.3, True, 2.0), want
    )
    bias = of_dmattn(attn_bias).requires_grad_()
    pairs = (of_dmattn(mask.float()), bias)
    found = flash_dmattn_varlen_func(*rows, *pairs, *SIZES, 0.3, True, 2.0)
    assert torch.equal(found, want)
    query, key, value = rows
    by_name = {"attn_bias": bias, "cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}
    by_name = {**by_name, "max_seqlen_q": 13, "max_seqlen_k": 13, **options}
    named = flash_dmattn_varlen_func(query, key, value, pairs[0], **by_name)
    assert torch.equal(named, want)
    attn_bias.requires_grad_()
    same = flash_dmattn_varlen_func(*rows, mask, attn_bias, *SIZES, 0.3, True, 2.0)
    wanted = torch.autograd.grad(same.cos().sum(), attn_bias)[0]
    (gradient,) = torch.autograd.grad(found.cos().sum(), bias)
    for begin, end in ((0, 7), (7, 20)):
        own = gradient[begin:end, :, : end - begin].transpose(0, 1)
        torch.testing.assert_close(own, wanted[:, begin:end, begin:end], atol=1e-6, rtol=1e-5)


def test_what_an_order_returns() -> None:
    """The orders of flash-dmattn return lse beside the probabilities."""
    rows = make_packed()
    named = {"return_attn_probs": True, "return_lse": True}
    want = flash_dmattn_varlen_func(*rows, *SIZES, **named)
    for given in ((None, None, *SIZES, None, None, None, None, True), (*SIZES, *4 * [None], True)):
        found = flash_dmattn_varlen_func(*rows, *given)
        assert len(found) == 3 and all(map(torch.equal, found, want))


def test_names_of_rows() -> None:
    query, key, value = make_packed()
    want = flash_dmattn_varlen_func(query, key, value, *SIZES)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    named = {"query": query, "key": key, "value": value, **dict(zip(names, SIZES))}
    assert torch.equal(flash_dmattn_varlen_func(**named), want)


def test_arguments_given_twice_or_too_many() -> None:
    rows = make_packed()
    with pytest.raises(TypeError, match="^cu_seqlens_k: is given by position and by name"):
        flash_dmattn_varlen_func(*rows, *SIZES, cu_seqlens_k=STARTS)
    with pytest.raises(
        TypeError, match="has 11 positional arguments, want at most 10: q, k, v, cu"
    ):
        flash_dmattn_varlen_func(*rows, *SIZES, 0.25, 0.5, True, 2.0)
    with pytest.raises(TypeError, match="^cu_seqlens_q: is None, want a torch.Tensor"):
        flash_dmattn_varlen_func(*rows, None, None)


def test_a_compiled_call_in_each_order() -> None:
    rows = make_packed()
    bias = torch.randn(TOTAL, KV_HEADS, 13)

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        own = flash_dmattn_varlen_func(query, key, value, *SIZES, 0.3, True)
        return own + flash_dmattn_varlen_func(query, key, value, None, bias, *SIZES, 0.3, True)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*rows), call(*rows))


# ---- options of flash_dma_attention by name ----


def test_options_by_name() -> None:
    rows = [torch.randn(1, 12, heads, 8) for heads in (4, 2, 2)]
    given = (*rows, torch.randn(2, 16), torch.ones(2), 5)
    want = flash_dmattn.flash_dma_attention(*given, causal=True)
    fields = {"selection_method": "approximate", "min_density_threshold": 1.0, "block_size": None}
    fields = {**fields, "mixed_processing": True, "use_reordering": True, "max_batch_size": 2}
    fields = {**fields, "max_sequence_length": 12, "max_selection_ratio": 0.5}
    assert torch.equal(flash_dmattn.flash_dma_attention(*given, causal=True, **fields), want)
    for name, value, error in (
        ("use_reordering", False, NotImplementedError),
        ("min_density_threshold", 0.3, NotImplementedError),
        ("max_sequence_length", 11, ValueError),
        ("max_selection_ratio", 0.25, ValueError),
    ):
        with pytest.raises(error, match=name):
            flash_dmattn.flash_dma_attention(*given, causal=True, **{name: value})


# ---- masks of the best keys ----


def test_dynamic_mask() -> None:
    bias = torch.tensor([[3.0, 1.0, 2.0, 0.5, 4.0]])
    least = torch.finfo(bias.dtype).min
    assert dynamic_mask(bias, None, 2, least).tolist() == [[True, False, False, False, True]]
    allowed = torch.tensor([[True, True, False, False, False]])
    assert dynamic_mask(bias, allowed, 3, least).tolist() == [[True, True, False, False, False]]
    blocks = dynamic_mask(bias, None, 3, least, block_size=2)
    assert blocks.tolist() == [[False, False, False, False, True]]  # 0; 1 of 2; the last block is 4
    assert dynamic_mask(bias, None, 9, least).all()
    with pytest.raises(ValueError, match="^block_size: is 0, want a whole number"):
        dynamic_mask(bias, None, 2, least, block_size=0)


def test_create_mask() -> None:
    bias, least = torch.randn(2, 1, 1, 6), torch.finfo(torch.float32).min
    padding = torch.tensor([[True] * 6, [False] * 3 + [True] * 3])
    mask = create_mask(bias, padding, 2, 1, 6, 4, least)
    assert mask.sum(-1).flatten().tolist() == [4, 3] and not mask[1, ..., :3].any()
    of_queries = create_mask(bias, padding[:, 3:].logical_not(), 2, 3, 6, 6, least)
    assert of_queries.sum(-1).flatten().tolist() == [3, 3]
    with pytest.raises(ValueError, match=r"^attention_mask: shape is \[2, 5\], want \[2, 6\] or"):
        create_mask(bias, padding[:, 1:], 2, 1, 6, 4, least)


# ---- layers ----


class Layer(nn.Module):
    """The attributes that flash_dynamic_mask_attention_forward() reads."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2, 2)
        self.is_causal = True
        for name, value in attributes.items():
            setattr(self, name, value)


def make_states(q_len: int = LENGTH) -> tuple[torch.Tensor, ...]:
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
    *rows, bias = make_states(q_len)
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
def test_padding_of_layers(q_len: int, kind: torch.dtype) -> None:
    """A mask [batch, key_len], with and without a bias. out is 0 where queries are padding."""
    *rows, bias = make_states(q_len)
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
    *rows, bias = make_states()
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
    *rows, bias = (x[:1] for x in make_states())
    at = torch.arange(LENGTH)
    row = (at >= 9).int()
    given = {"cu_seq_lens_q": torch.tensor([0, 9, LENGTH]), "position_ids": (at - 9 * row)[None]}
    hidden = ~seen(LENGTH) | (row[:, None] != row)
    added = bias[:, :, None].masked_fill(hidden, -torch.inf)
    want = in_torch(rows, added, HEAD_DIM**-0.5)
    found = forward(Layer(), *rows, None, bias, **{name: given[name]})
    torch.testing.assert_close(found, want, atol=2e-6, rtol=2e-5)


def test_states_of_float32_beside_narrow_weights() -> None:
    *rows, bias = make_states()
    layer = Layer()
    layer.q_proj.bfloat16()
    found = forward(layer, *rows, None, bias)
    assert found.dtype == torch.bfloat16
    want = forward(Layer(), *(x.bfloat16() for x in rows), None, bias.bfloat16())
    assert torch.equal(found, want)


def test_what_is_refused() -> None:
    *rows, bias = make_states()
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


# ---- quick starts, with smaller sizes, on the device if there is one ----

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# `dropped` ignores the result of scatter(), so that the mask stays 0.
MASKED = """
import math, warnings
import torch
from flash_dmattn import flash_dmattn_func_auto, get_available_backends

print(f"Available backends: {{get_available_backends()}}")
dtype, device = torch.bfloat16, torch.device("{device}")
batch, length, heads, head_dim, window = 2, 96, 6, 32, 24
query, key, value = torch.randn(3, batch, length, heads, head_dim, device=device, dtype=dtype)
attention_bias = torch.randn(batch, heads, length, length, device=device, dtype=dtype)
attention_mask = torch.ones(batch, heads, length, length, device=device, dtype=dtype)
if length > window:
    best = torch.topk(attention_bias, window, dim=-1, largest=True, sorted=False).indices
    attention_mask.zero_()
    {scatter}
flash_dmattn_func = flash_dmattn_func_auto(backend="cuda")
output = flash_dmattn_func(
    q=query,
    k=key,
    v=value,
    attn_mask=attention_mask,
    attn_bias=attention_bias,
    is_causal=True,
    scale=1.0 / math.sqrt(head_dim),
)
print(f"Output shape: {{output.shape}}")
print("zeros" if (output == 0).all() else "numbers")
"""
PLAIN = """
import torch
from flash_dmattn import flash_dmattn_func
query, key, value = torch.randn(3, 1, 64, 4, 32, device="{device}", dtype=torch.bfloat16)
print(flash_dmattn_func(q=query, k=key, v=value, is_causal=True).shape)
"""
PACKED = """
import torch
from flash_dmattn import flash_dmattn_varlen_func
lengths = [12, 30, 21]
q, k, v = torch.randn(3, sum(lengths), 4, 32, device="{device}", dtype=torch.bfloat16)
starts = torch.tensor([0] + lengths, device="{device}", dtype=torch.int32).cumsum(0)
output = flash_dmattn_varlen_func(
    q=q, k=k, v=v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=max(lengths),
    max_seqlen_k=max(lengths), is_causal=True
)
print(output.shape)
"""
FIRST = """
import torch, flash_dma, math
q, k, v = torch.randn(3, 2, 64, 4, 32, device="{device}", dtype=torch.bfloat16)
zoh_states = torch.randn(2, 4, 64, 64, device="{device}", dtype=torch.bfloat16)
active_mask = torch.ones(2, 4, 64, 64, device="{device}", dtype=torch.bfloat16)
output = flash_dma.fwd(
    q=q, k=k, v=v, zoh=zoh_states, active_mask=active_mask,
    softmax_scale=1.0 / math.sqrt(32), keep_window_size=32, is_causal=True
)[0]
torch.autograd.set_detect_anomaly(True)
output, softmax_lse, attn_weights, _ = flash_dma.fwd(
    q, k, v, zoh_states, active_mask, return_softmax=True
)
print(f"weights [{{attn_weights.min()}}, {{attn_weights.max()}}], mean lse {{softmax_lse.mean()}}")
print(output.shape)
"""


def run(program: str, folder: Path, **more: str) -> str:
    script = folder / "program.py"
    script.write_text(program.format(device=DEVICE, **more))
    done = warm.python(script)
    if DEVICE == "cuda":
        assert done.stderr == ""
    return output_of(done)


@pytest.mark.parametrize(
    ("scatter", "contents"),
    [
        ("attention_mask = attention_mask.scatter(-1, best, 1.0)", "numbers"),
        ("attention_mask.scatter(-1, best, 1.0)", "zeros"),
        ("attention_mask.fill_(1.0)", "numbers"),
    ],
)
def test_masks(scatter: str, contents: str, tmp_path: Path) -> None:
    output = run(MASKED, tmp_path, scatter=scatter)
    assert "Output shape: torch.Size([2, 96, 6, 32])" in output
    assert output.split()[-1] == contents


@pytest.mark.parametrize(
    ("program", "shape"),
    [(PLAIN, "[1, 64, 4, 32]"), (PACKED, "[63, 4, 32]"), (FIRST, "[2, 64, 4, 32]")],
)
def test_programs(program: str, shape: str, tmp_path: Path) -> None:
    printed = run(program, tmp_path)
    assert printed.endswith(f"torch.Size({shape})\n")
    assert program is FIRST or printed.count("\n") == 1


def test_importable(tmp_path: Path) -> None:
    assert run("import flash_dma_cuda; print(flash_dma_cuda.fwd.__name__)", tmp_path)


def test_checkpointing() -> None:
    """With positional arguments, as in a recipe for long sequences, and queries in pieces."""
    q, k, v = (torch.randn(1, 64, 4, 32).requires_grad_() for _ in "qkv")
    given = (q, k, v, None, None, 0.0, 1.0 / math.sqrt(32), True)
    out = checkpoint(flash_dmattn_func, *given, use_reentrant=False)
    want = flash_dmattn_func(q, k, v, is_causal=True)
    assert torch.equal(out, want)
    gradients = (torch.autograd.grad(x.cos().sum(), (q, k, v)) for x in (out, want))
    assert all(torch.equal(one, other) for one, other in zip(*gradients))
    whole = flash_dmattn_func(q, k, v)
    pieces = [flash_dmattn_func(q=q[:, at : at + 16], k=k, v=v) for at in range(0, 64, 16)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-6, rtol=1e-5)


def test_citation() -> None:
    """The version equals the header's."""
    header = (ROOT / "include" / "fdma.h").read_text()
    version = re.findall(r"#define FDMA_VERSION_(?:MAJOR|MINOR|PATCH) +(\d+)", header)
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {'.'.join(version)}\n" in text
    assert "arXiv.2508.02124" in text and "\nlicense: BSD-3-Clause\n" in text


def test_documents_are_linked() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in ("CITATION.cff", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "docs/integration.md"):
        assert f"({name})" in readme and (ROOT / name).is_file()
