"""The cases of PyTorch's own tests of nn.MultiheadAttention, on this package's MultiheadAttention.

They are written anew after test/nn/test_multihead_attention.py of PyTorch 2.13. A test here has the
same name as there, and the functions inside its test_multihead_attention are the rows of
HELPER_CASES. These are left out: test_multihead_self_attn_two_masks_fast_path_mock, which requires
that PyTorch's kernel for inference is called; and test_multihead_attn_saved_kv and
test_multihead_attn_all_arguments1 to 3, which give static keys to the function
torch.nn.functional.multi_head_attention_forward and do not call the module.
"""

from __future__ import annotations

import random
from typing import Any

import flash_dmattn
import numpy as np
import pytest
import torch

MultiheadAttention = flash_dmattn.MultiheadAttention
HELPER_CASES: dict[str, dict[str, bool]] = {
    "test_multihead_attn_add_zero_attn": {"add_zero_attn": True},
    "test_multihead_attn_add_bias_kv": {"add_bias_kv": True},
    "test_multihead_attn_no_masking": {},
    "test_multihead_attn_key_padding_mask": {"padded": True},
    "test_multihead_attn_add_bias_kv_zero_attn": {
        "padded": True,
        "add_bias_kv": True,
        "add_zero_attn": True,
    },
}


def in_numpy(
    layer: Any, query: np.ndarray, key: np.ndarray, seen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Result and weights in float64, for [batch, len, width] and seen [batch, q_len, kv_len]. Keys
    are also the values, and all queries see the keys that the layer appends."""

    def numbers(tensor: torch.Tensor) -> np.ndarray:
        return tensor.detach().double().numpy()

    if layer.in_proj_weight is None:
        weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    else:
        weights = layer.in_proj_weight.chunk(3)
    biases = np.split(numbers(layer.in_proj_bias), 3)
    rows = [
        x @ numbers(weight).T + bias for x, weight, bias in zip((query, key, key), weights, biases)
    ]
    batch = len(query)
    for n, learned in ((1, layer.bias_k), (2, layer.bias_v)):
        if learned is not None:
            more = np.broadcast_to(numbers(learned), (batch, 1, layer.embed_dim))
            rows[n] = np.concatenate((rows[n], more), 1)
        if layer.add_zero_attn:
            rows[n] = np.concatenate((rows[n], np.zeros((batch, 1, layer.embed_dim))), 1)
    appended = rows[1].shape[1] - seen.shape[2]
    seen = np.concatenate((seen, np.ones((*seen.shape[:2], appended), bool)), 2)
    shape = (layer.num_heads, layer.head_dim)
    q, k, v = (row.reshape(*row.shape[:2], *shape).transpose(0, 2, 1, 3) for row in rows)
    logits = q @ k.transpose(0, 1, 3, 2) / np.sqrt(layer.head_dim)
    logits = np.where(seen[:, None], logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    heads = (weights @ v).transpose(0, 2, 1, 3).reshape(query.shape)
    return heads @ numbers(layer.out_proj.weight).T + numbers(layer.out_proj.bias), weights


@pytest.mark.parametrize("average_attn_weights", [True, False])
@pytest.mark.parametrize("name", HELPER_CASES)
def test_multihead_attention(name: str, average_attn_weights: bool) -> None:
    """Random shapes against numpy. The first key is seen, because a row without keys is not NaN
    here."""
    options = dict(HELPER_CASES[name])
    padded = options.pop("padded", False)
    choose, numbers = random.Random(name), np.random.default_rng(len(name))
    torch.manual_seed(0)
    for _ in range(100):
        batch, kv_len = choose.randint(2, 10), choose.randint(2, 10)
        heads, head_dim = 2 * choose.randint(2, 5), choose.randint(3, 10)
        width = choose.choice((heads * head_dim, choose.randint(5, 20)))
        layer = MultiheadAttention(heads * head_dim, heads, kdim=width, vdim=width, **options)
        query = numbers.random((batch, 1, heads * head_dim))
        key = numbers.random((batch, kv_len, width))
        allowed, padding = numbers.random((1, kv_len)) < 0.5, numbers.random((1, kv_len)) < 0.5
        allowed[:, 0], padding[:, 0] = True, False
        padding = np.repeat(padding & padded, batch, 0)
        given = {
            "attn_mask": torch.zeros(1, kv_len).masked_fill(~torch.tensor(allowed), -torch.inf),
            "key_padding_mask": torch.tensor(padding) if padded else None,
            "average_attn_weights": average_attn_weights,
        }
        rows = [torch.tensor(x).float().transpose(0, 1) for x in (query, key)]
        out, weights = layer(*rows, rows[1], **given)
        want, want_weights = in_numpy(layer, query, key, allowed[None] & ~padding[:, None])
        np.testing.assert_allclose(out.transpose(0, 1).detach().numpy(), want, atol=1e-5)
        want_weights = want_weights.mean(1) if average_attn_weights else want_weights
        np.testing.assert_allclose(weights.numpy(), want_weights, atol=1e-5)


def test_multihead_attn_3d_attn_mask() -> None:
    """Under one mask per batch entry, each entry has the same result as alone under its own
    mask."""
    torch.manual_seed(0)
    batch, q_len, kv_len, heads = 8, 2, 3, 4
    layer = MultiheadAttention(8, heads)
    query, key = torch.rand(q_len, batch, 8), torch.rand(kv_len, batch, 8)
    masks = torch.zeros(batch, q_len, kv_len).masked_fill(
        torch.rand(batch, q_len, kv_len) < 0.5, -torch.inf
    )
    together, _ = layer(query, key, key, attn_mask=masks.repeat_interleave(heads, 0))
    for n, mask in enumerate(masks):
        one = slice(n, n + 1)
        alone, _ = layer(query[:, one], key[:, one], key[:, one], attn_mask=mask)
        torch.testing.assert_close(together[:, one], alone)


def test_multihead_attn_no_bias() -> None:
    layer = MultiheadAttention(8, 4, bias=False)
    assert layer.in_proj_bias is None and layer.out_proj.bias is None


SHAPES: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    (
        ((4, 4, 4), (4, 4), (4, 4, 4)),
        {},
        "expected `key` and `value` to be 3-D but found 2-D and 3-D tensors respectively",
    ),
    (
        ((4, 4, 4), (4, 4, 4), (4, 4)),
        {},
        "expected `key` and `value` to be 3-D but found 3-D and 2-D tensors respectively",
    ),
    (
        ((4, 4, 4), (4, 4, 4), (4, 4, 4)),
        {"key_padding_mask": (4,)},
        "expected `key_padding_mask` to be `None` or 2-D but found 1-D tensor instead",
    ),
    (
        ((4, 4, 4), (4, 4, 4), (4, 4, 4)),
        {"attn_mask": (4,)},
        "expected `attn_mask` to be `None`, 2-D or 3-D but found 1-D tensor instead",
    ),
    (
        ((4, 4), (4, 4, 4), (4, 4)),
        {},
        "expected `key` and `value` to be 2-D but found 3-D and 2-D tensors respectively",
    ),
    (
        ((4, 4), (4, 4), (4, 4, 4)),
        {},
        "expected `key` and `value` to be 2-D but found 2-D and 3-D tensors respectively",
    ),
    (
        ((4, 4), (4, 4), (4, 4)),
        {"key_padding_mask": (1, 8)},
        "expected `key_padding_mask` to be `None` or 1-D but found 2-D tensor instead",
    ),
    (
        ((4, 4), (4, 4), (4, 4)),
        {"attn_mask": (4,)},
        "expected `attn_mask` to be `None`, 2-D or 3-D but found 1-D tensor instead",
    ),
    (
        ((4, 4), (4, 4), (4, 4)),
        {"attn_mask": (5, 4, 4)},
        r"Expected `attn_mask` shape to be \(4, 4, 4\)",
    ),
]


def refuse_shapes(layer: Any, **options: Any) -> None:
    for rows, masks, message in SHAPES:
        given = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in masks.items()}
        with pytest.raises(AssertionError, match=message):
            layer(*map(torch.randn, rows), **given, **options)


def test_multihead_attn_invalid_shape() -> None:
    layer = MultiheadAttention(4, 4)
    refuse_shapes(layer)
    with torch.no_grad():
        refuse_shapes(layer.eval())


@torch.no_grad()
def test_multihead_attn_fast_path_invalid_shape() -> None:
    layer = MultiheadAttention(4, 4, batch_first=True).eval()
    refuse_shapes(layer)
    refuse_shapes(layer, need_weights=False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_multihead_attn_nested_tensor_outside_fast_path(layout: torch.layout) -> None:
    """Each sequence has the same results as alone, with gradients, without, and in inference
    mode."""
    torch.manual_seed(0)

    def nested(*lengths: int) -> torch.Tensor:
        pieces = [torch.randn(length, 10) for length in lengths]
        return torch.nested.nested_tensor(pieces, layout=layout)

    query, key, value = nested(4, 6), nested(7, 16), nested(7, 16)
    for options in ({}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"window": 3}):
        layer = MultiheadAttention(10, 5, batch_first=True, **options).eval()
        for mode in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
            for rows in ((query, query, query), (query, key, value)):
                with mode:
                    out, _ = layer(*rows)
                    assert out.is_nested and out.layout == layout
                    for one, *alone in zip(out.unbind(), *(row.unbind() for row in rows)):
                        torch.testing.assert_close(one, layer(*alone)[0])
    empty = torch.nested.nested_tensor([])
    with pytest.raises(AssertionError, match="2D or batched 3D tensor but received 1-D query"):
        layer(empty, empty, empty)


@torch.no_grad()
def test_multihead_self_attn_two_masks_fast_path() -> None:
    torch.manual_seed(0)
    layer = MultiheadAttention(14, 7, batch_first=True).eval()
    other = torch.nn.MultiheadAttention(14, 7, batch_first=True).train()  # avoids the fast path
    other.load_state_dict(layer.state_dict())
    x = torch.rand(8, 5, 14)
    mask, padding = torch.rand(5, 5) < 0.5, torch.rand(8, 5) < 0.5
    given = {"attn_mask": mask, "key_padding_mask": padding, "need_weights": False}
    seen = ~(mask | padding[:, None]).all(-1)
    assert 0 < seen.sum() < seen.numel()
    torch.testing.assert_close(layer(x, x, x, **given)[0][seen], other(x, x, x, **given)[0][seen])


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.float, torch.double])
def test_multihead_attention_dtype(dtype: torch.dtype) -> None:
    layer = MultiheadAttention(128, 8).to(dtype)
    query, key, value = torch.randn(3, 10, 8, 128, dtype=dtype)
    out, _ = layer(query, key, value)
    assert (out.shape, out.dtype) == (query.shape, dtype)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.float, torch.double])
def test_multihead_attention_dtype_batch_first(dtype: torch.dtype, training: bool) -> None:
    layer = MultiheadAttention(128, 8, batch_first=True).to(dtype).train(training)
    query, key, value = torch.randn(3, 8, 10, 128, dtype=dtype)
    with torch.set_grad_enabled(training):
        out, weights = layer(query, key, value, need_weights=False)
    assert (out.shape, out.dtype, weights) == (query.shape, dtype, None)


@torch.no_grad()
def test_multihead_attn_fast_path_query_and_bias_have_different_dtypes() -> None:
    layer = MultiheadAttention(4, 4, batch_first=True, dtype=torch.double).eval()
    layer.in_proj_bias = torch.nn.Parameter(layer.in_proj_bias.half())
    x = torch.randn(4, 4, 4, dtype=torch.double)
    assert layer(x, x, x)[0].dtype == torch.double


@torch.no_grad()
def test_multihead_attn_fast_path_small_test() -> None:
    layer = MultiheadAttention(4, 4, batch_first=True, dtype=torch.double).eval()
    x = torch.randn(4, 4, 4, dtype=torch.double)
    assert layer(x, x, x)[0].shape == x.shape


def test_fast_path_check_with_mask_does_not_break_in_compile() -> None:
    torch._dynamo.reset()
    block = torch.nn.TransformerEncoderLayer(64, 8, 64, batch_first=True, dtype=torch.double)
    block.self_attn = MultiheadAttention(64, 8, batch_first=True, dtype=torch.double)
    encoder = torch.nn.TransformerEncoder(block, num_layers=2).eval()
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    x, padding = torch.randn(1, 41, 64, dtype=torch.double), torch.rand(1, 41) > 0.5
    padding[:, :2] = torch.tensor([True, False])
    given = {"mask": None, "src_key_padding_mask": padding}
    torch.testing.assert_close(compiled(x, **given), encoder(x, **given))


@torch.no_grad()
def test_multihead_attn_in_proj_bias_none() -> None:
    layer = MultiheadAttention(2, 2, bias=False, dtype=torch.double)
    x = torch.rand(2, 2, 2, dtype=torch.double)
    assert layer(x, x, x)[0].shape == x.shape


@torch.no_grad()
def test_multihead_attn_in_proj_weight_none() -> None:
    layer = MultiheadAttention(4, 4, vdim=2, kdim=2, dtype=torch.double)
    query, key = torch.rand(4, 4, 4).double(), torch.rand(4, 4, 2).double()
    assert layer(query, key, key)[0].shape == query.shape
