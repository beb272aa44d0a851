"""Programs for flash-dmattn 0.1 to 1.2: its modules, names, orders of arguments and masks."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import flash_dmattn
import numpy as np
import pytest
import torch
from flash_dmattn import flash_dmattn_func, flash_dmattn_interface, flash_dmattn_varlen_func
from flash_dmattn.utils.mask import create_mask, dynamic_mask
from test_masks import make_pairs, make_rows

STARTS = torch.tensor([0, 7, 20], dtype=torch.int32)
SIZES = (STARTS, STARTS, 13, 13)
HEADS, KV_HEADS, TOTAL = 4, 2, 20


def make_packed() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(TOTAL, one, 16, generator=generator) for one in heads]


# ---- modules and names ----

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
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="module 'flash_dmattn' has no attribute 'no_name'"):
        _ = flash_dmattn.no_name


# ---- flash_dmattn_func ----


def test_order() -> None:
    query, key, value, _ = make_rows()
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
    rows = make_rows()[:3]
    torch.manual_seed(7)
    want = flash_dmattn_func(*rows, **meaning)
    torch.manual_seed(7)
    assert torch.equal(flash_dmattn_func(*rows, None, None, *positional, **named), want)
    assert not torch.equal(want, flash_dmattn_func(*rows, scale=0.9))


def test_a_call_in_no_order() -> None:
    rows = make_rows()[:3]
    with pytest.raises(TypeError, match="^is_causal: is 0.5, a float, want a bool"):
        flash_dmattn_func(*rows, None, None, None, 0.5)
    with pytest.raises(TypeError, match="^softcap: is True, a bool, want a number"):
        flash_dmattn_func(*rows, None, None, None, None, True)
    with pytest.raises(TypeError, match="^scale: is given by position and by name"):
        flash_dmattn_func(*rows, None, None, None, scale=0.5)


def test_messages_have_the_names_of_the_call() -> None:
    query, key, value, _ = make_rows()
    for names in (("q", "k", "v"), ("query", "key", "value")):
        rows = dict(zip(names, (query, key, value[:, 1:])))
        with pytest.raises(ValueError, match=f"^{names[2]}: axis 1 has .* {names[1]} has"):
            flash_dmattn_func(**rows)
        with pytest.raises(TypeError, match=f"^{names[0]}: is .*, a list"):
            flash_dmattn_func(**{**rows, names[0]: [1.0]})


def test_arguments_of_auto_have_no_effect() -> None:
    rows = make_rows()[:3]
    function = flash_dmattn.flash_dmattn_func_auto(None, is_causal=True, head_dim=16)
    assert torch.equal(function(*rows), flash_dmattn_func(*rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_that_are_added_are_refused(dtype: torch.dtype) -> None:
    rows = [x.to(dtype) for x in make_rows()[:3]]
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
    with pytest.raises(ValueError, match="^scale: is 0, want a positive number"):
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
