"""MultiheadAttention: without a window against torch.nn.MultiheadAttention, with a window against
its formula in PyTorch."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import evaluate
import flash_dmattn
import pytest
import torch
from flash_dmattn import _arguments
from torch.nn.functional import softplus

BATCH, HEADS = 2, 4
Inputs = dict[str, Any]


def make_layer(embed_dim: int = 32, **options: Any) -> Any:
    """A layer whose parameters are all random, even those that are initialised with 0."""
    torch.manual_seed(0)
    layer = flash_dmattn.MultiheadAttention(embed_dim, HEADS, **options)
    for name, parameter in layer.named_parameters():
        if parameter.dim() == 1 or name == "A":
            torch.nn.init.normal_(parameter)
    return layer


def make_pair(embed_dim: int = 32, **options: Any) -> tuple[Any, torch.nn.MultiheadAttention]:
    """The same layer here and in torch.nn."""
    layer = make_layer(embed_dim, **options)
    other = torch.nn.MultiheadAttention(embed_dim, HEADS, **options)
    other.load_state_dict(layer.state_dict())
    return layer, other


def causal_mask(q_len: int, kv_len: int) -> torch.Tensor:
    return torch.ones(q_len, kv_len).triu(1).bool()


def make_rows(layer: Any, q_len: int, kv_len: int, batched: bool = True) -> list[torch.Tensor]:
    """query, key and value with the axes that the layer takes."""
    random = torch.Generator().manual_seed(q_len)
    sizes = ((q_len, layer.embed_dim), (kv_len, layer.kdim), (kv_len, layer.vdim))
    rows = [torch.randn(BATCH, *size, generator=random) for size in sizes]
    if not batched:
        rows = [row[0] for row in rows]
    elif not layer.batch_first:
        rows = [row.transpose(0, 1) for row in rows]
    return [row.to(layer.out_proj.weight.dtype).requires_grad_() for row in rows]


def make_masks(kinds: dict[str, str], q_len: int, kv_len: int, batched: bool) -> Inputs:
    """Masks under which every query sees key 0."""
    random = torch.Generator().manual_seed(kv_len)
    batch = (BATCH,) if batched else ()
    shapes = {"padding": (*batch, kv_len), "2-D": (q_len, kv_len)}
    shapes["3-D"] = (BATCH * HEADS if batched else HEADS, q_len, kv_len)
    masks = {}
    for name, kind in kinds.items():
        shape, dtype = kind.split()
        mask = torch.rand(shapes[shape], generator=random) < 0.4
        mask[..., 0] = False
        if dtype == "float":
            numbers = torch.randn(mask.shape, generator=random)
            mask = numbers.masked_fill(mask, -torch.inf).requires_grad_()
        masks[name] = mask
    return masks


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch_first": {"batch_first": True},
    "no bias": {"bias": False},
    "add_bias_kv": {"add_bias_kv": True},
    "add_zero_attn": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    "kdim and vdim": {"kdim": 20, "vdim": 12, "bias": False},
    "vdim": {"vdim": 12, "add_bias_kv": True},
    "head_dim 3": {"embed_dim": 12, "add_zero_attn": True},
    "head_dim 13": {"embed_dim": 52, "batch_first": True},
}
PADDING = {"bool": "padding bool", "float": "padding float"}
CALLS: dict[str, Inputs] = {
    "no masks": {},
    "bool padding": {"key_padding_mask": PADDING["bool"]},
    "float padding": {"key_padding_mask": PADDING["float"]},
    "bool mask": {"attn_mask": "2-D bool"},
    "float mask": {"attn_mask": "2-D float"},
    "bool mask of heads": {"attn_mask": "3-D bool"},
    "float mask of heads": {"attn_mask": "3-D float"},
    "two bool masks": {"key_padding_mask": PADDING["bool"], "attn_mask": "2-D bool"},
    "two float masks": {"key_padding_mask": PADDING["float"], "attn_mask": "3-D float"},
    "causal": {"is_causal": True},
    "causal and padding": {"is_causal": True, "key_padding_mask": PADDING["bool"]},
}


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", LAYERS)
def test_against_torch(name: str, call: str, need_weights: bool, batched: bool) -> None:
    """Outputs, weights, and gradients of inputs, masks and parameters. Queries are as many as keys,
    fewer, or one more: as many as keys with an appended one."""
    layer, other = make_pair(**LAYERS[name])
    for q_len, kv_len in ((6, 6), (5, 9), (6, 5)):
        kinds = {key: one for key, one in CALLS[call].items() if key != "is_causal"}
        rows = make_rows(layer, q_len, kv_len, batched)
        given: Inputs = make_masks(kinds, q_len, kv_len, batched)
        if "is_causal" in CALLS[call]:
            given.update(is_causal=True, attn_mask=causal_mask(q_len, kv_len))
        given.update(need_weights=need_weights, average_attn_weights=q_len == kv_len)
        (out, weights), (want, want_weights) = layer(*rows, **given), other(*rows, **given)
        torch.testing.assert_close(out, want)
        assert (weights is None) == (not need_weights)
        torch.testing.assert_close(weights, want_weights)
        tensors = [*rows, *(x for x in given.values() if getattr(x, "requires_grad", False))]
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        found = torch.autograd.grad(out, [*tensors, *layer.parameters()], dout)
        wanted = torch.autograd.grad(want, [*tensors, *other.parameters()], dout)
        for one, expected in zip(found, wanted):
            torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("same", ["none", "keys", "query and key", "all"])
def test_inputs_that_are_one_tensor(same: str) -> None:
    layer, other = make_pair(batch_first=True)
    x, y = torch.randn(2, BATCH, 6, 32)
    pairs = {"none": (x, y, x), "keys": (x, y, y), "query and key": (x, x, y), "all": (x, x, x)}
    rows = pairs[same]
    for one, expected in zip(layer(*rows), other(*rows)):
        torch.testing.assert_close(one, expected)
        assert one.shape == expected.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("embed_dim", [32, 52])
def test_16_bits(dtype: torch.dtype, embed_dim: int) -> None:
    """Within twice the error of torch.nn's module in the same dtype, plus a rounding step."""
    layer, other = make_pair(embed_dim, dtype=dtype)
    exact = copy.deepcopy(other).double()
    rows = make_rows(layer, 6, 9)
    mask = make_masks({"attn_mask": "3-D float"}, 6, 9, True)["attn_mask"].detach().to(dtype)
    results = layer(*rows, attn_mask=mask)
    plain = other(*rows, attn_mask=mask)
    truth = exact(*(row.double() for row in rows), attn_mask=mask.double())
    for one, also, expected in zip(results, plain, truth):
        assert one.dtype == dtype
        step = torch.finfo(dtype).eps * expected.abs().max()
        allowed = 2 * (also - expected).abs().max() + step
        assert (one - expected).abs().max() <= allowed


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}])
def test_float64(options: dict[str, Any]) -> None:
    """Masks of floats of another dtype are accepted too; torch.nn refuses them."""
    layer, other = make_pair(dtype=torch.float64, **options)
    rows = make_rows(layer, 6, 9)
    kinds = {"attn_mask": "3-D float", "key_padding_mask": "padding float"}
    masks = make_masks(kinds, 6, 9, True)
    wide = {name: one.detach().double() / 3 for name, one in masks.items()}
    narrow = {name: one.float() for name, one in wide.items()}
    exact = {"rtol": 1e-12, "atol": 1e-12}  # much less than a rounding to float32
    torch.testing.assert_close(layer(*rows, **wide), other(*rows, **wide), **exact)
    rounded = {name: one.double() for name, one in narrow.items()}
    torch.testing.assert_close(layer(*rows, **narrow), other(*rows, **rounded), **exact)
    rows = [row.float() for row in rows]
    layer, other = (one.float() for one in (layer, other))
    torch.testing.assert_close(layer(*rows, **wide), other(*rows, **narrow))


def test_weights_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1000, BATCH, 32)
    monkeypatch.setattr(_arguments, "memory_of", lambda device: 1 << 20)
    for layer in (make_layer(), make_layer(window=5)):
        with pytest.raises(MemoryError, match=r"^need_weights: 2 x 4 x 1000 x 1000 prob"):
            layer(x, x, x)
        layer(x, x, x, need_weights=False)


def test_arguments_are_those_of_torch() -> None:
    for name in ("__init__", "forward"):
        found = inspect.signature(getattr(flash_dmattn.MultiheadAttention, name)).parameters
        wanted = inspect.signature(getattr(torch.nn.MultiheadAttention, name)).parameters
        assert list(found)[: len(wanted)] == list(wanted)
        for key, parameter in wanted.items():
            assert found[key].default == parameter.default
            assert found[key].kind == parameter.kind
        more = list(found.values())[len(wanted) :]
        assert all(one.kind == one.KEYWORD_ONLY for one in more)


def test_a_query_that_sees_no_key() -> None:
    """torch.nn's result is NaN there."""
    layer, other = make_pair(batch_first=True)
    x = torch.randn(BATCH, 5, 32, requires_grad=True)
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[2] = True
    for attn_mask in (mask, torch.zeros(5, 5).masked_fill(mask, -torch.inf)):
        out, weights = layer(x, x, x, attn_mask=attn_mask)
        want, want_weights = other(x, x, x, attn_mask=attn_mask)
        assert want[:, 2].isnan().all()
        assert torch.equal(out[:, 2], layer.out_proj.bias.expand(BATCH, -1))
        assert (weights[:, 2] == 0).all()
        rest = [0, 1, 3, 4]
        torch.testing.assert_close(out[:, rest], want[:, rest])
        torch.testing.assert_close(weights[:, rest], want_weights[:, rest])
        (gradient,) = torch.autograd.grad(out.square().sum(), x)
        assert gradient.isfinite().all()
    padding = torch.zeros(BATCH, 5, dtype=torch.bool)
    padding[1] = True
    out, weights = layer(x, x, x, key_padding_mask=padding)
    assert torch.equal(out[1], layer.out_proj.bias.expand(5, -1)) and (weights[1] == 0).all()


def test_padding_is_not_read() -> None:
    layer, _ = make_pair(batch_first=True)
    x, padding = torch.randn(BATCH, 6, 32), torch.arange(6) >= torch.tensor([[6], [4]])
    key = x.masked_fill(padding[..., None], torch.nan)
    for mask in (padding, torch.zeros(BATCH, 6).masked_fill(padding, -torch.inf)):
        out, _ = layer(x, key, key, key_padding_mask=mask)
        assert torch.equal(out, layer(x, x, x, key_padding_mask=mask)[0])


def test_dropout() -> None:
    layer = make_layer(batch_first=True, dropout=0.3)
    x = torch.randn(BATCH, 40, 32)
    torch.manual_seed(1)
    out, weights = layer(x, x, x, average_attn_weights=False)
    assert abs((weights == 0).float().mean() - 0.3) < 0.03
    value = layer._project(x, x, x)[2]
    by_weights = torch.einsum("bhij,bjhd->bihd", weights, value).flatten(2)
    torch.testing.assert_close(out, layer.out_proj(by_weights))
    torch.manual_seed(1)
    assert torch.equal(layer(x, x, x, need_weights=False)[0], out)
    assert not torch.equal(layer(x, x, x)[0], out)
    layer.eval()
    without = make_layer(batch_first=True)
    assert torch.equal(layer(x, x, x)[0], without(x, x, x)[0])
    rows, whole = (
        weights.masked_fill(weights == 0, torch.nan),
        layer(x, x, x, None, True, None, False),
    )
    kept = ~rows.isnan()
    torch.testing.assert_close(rows[kept], whole[1][kept] / (1 - 0.3), rtol=1e-4, atol=1e-6)


def test_weights_have_no_gradient() -> None:
    x = torch.randn(BATCH, 6, 32)
    assert not make_layer()(x, x, x)[1].requires_grad


# ---- with a window ----


def by_formula(
    layer: Any,
    x: torch.Tensor,
    causal: bool,
    padding: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
    added: torch.Tensor | float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer as its docstring defines it, for a batch_first x: the result and the weights."""
    projected = torch.nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    query, key, value = (row.unflatten(2, (HEADS, -1)).transpose(1, 2) for row in projected)
    score = (layer.A * softplus(layer.dt_proj(projected[2]))).transpose(1, 2)
    kept = evaluate.kept_keys(
        score.detach(),
        layer.window,
        "causal" if causal else "global",
        None if padding is None else ~padding,
        recent=layer.recent,
        sinks=layer.sinks,
        gap=layer.gap,
    )
    kept = kept & torch.ones(x.shape[1], x.shape[1]).tril().bool() if causal else kept
    kept = kept if allowed is None else kept & allowed
    bias = {"exp": score.exp(), "linear": score, "none": torch.zeros_like(score)}[layer.bias_form]
    logits = query @ key.mT * layer.head_dim**-0.5 + bias[:, :, None] + added
    kept = kept.expand(logits.shape)
    some = kept.any(3, keepdim=True)
    weights = torch.where(some, logits.masked_fill(~kept, -torch.inf), 0).softmax(3)
    weights = torch.where(some, weights, 0)
    return layer.out_proj((weights @ value).transpose(1, 2).flatten(2)), weights


WINDOWS: dict[str, dict[str, Any]] = {
    "window": {"window": 5},
    "every key": {"window": 1000},
    "recent and sinks": {"window": 4, "recent": 3, "sinks": 1},
    "gap": {"window": 8, "gap": 0.3},
    "linear": {"window": 5, "bias_form": "linear"},
    "none": {"window": 5, "bias_form": "none"},
    "head_dim 3": {"window": 5, "embed_dim": 12},
}


def window_cases() -> list[tuple[str, bool, str]]:
    """recent and gap need causal calls, which do not read a mask of pairs."""
    padding = ("none", "bool padding", "float padding")
    causal = [(name, True, masks) for name in WINDOWS for masks in padding]
    others = [name for name, one in WINDOWS.items() if not {"recent", "gap"} & {*one}]
    return causal + [(name, False, one) for name in others for one in (*padding, "bool", "float")]


@pytest.mark.parametrize(("name", "causal", "masks"), window_cases())
def test_the_formula_of_a_window(name: str, causal: bool, masks: str) -> None:
    """Outputs, weights and gradients. A mask of pairs is applied after the ranking of keys."""
    layer = make_layer(batch_first=True, **WINDOWS[name])
    length = 20
    x = torch.randn(BATCH, length, layer.embed_dim, requires_grad=True)
    padding = (torch.arange(length) % 5 == 3).expand(BATCH, -1)
    pairs = torch.rand(length, length) < 0.3
    numbers = torch.randn(BATCH * HEADS, length, length)
    cases: dict[str, tuple[Inputs, Inputs]] = {
        "none": ({}, {}),
        "bool padding": ({"key_padding_mask": padding}, {"padding": padding}),
        "float padding": (
            {"key_padding_mask": numbers[:BATCH, 0].masked_fill(padding, -torch.inf)},
            {"padding": padding, "added": numbers[:BATCH, 0][:, None, None]},
        ),
        "bool": ({"attn_mask": pairs}, {"allowed": ~pairs}),
        "float": ({"attn_mask": numbers}, {"added": numbers.unflatten(0, (BATCH, HEADS))}),
    }
    given, options = cases[masks]
    found = layer(x, x, x, is_causal=causal, average_attn_weights=False, **given)
    wanted = by_formula(layer, x, causal, **options)
    for one, expected in zip(found, wanted):
        torch.testing.assert_close(one, expected)
    quiet, no_weights = layer(x, x, x, need_weights=False, is_causal=causal, **given)
    assert no_weights is None
    torch.testing.assert_close(quiet, found[0])
    tensors = [x, *layer.parameters()]
    dout = torch.randn(x.shape)
    gradients = (
        torch.autograd.grad(one, tensors, dout, allow_unused=True) for one in (quiet, wanted[0])
    )
    for one, expected in zip(*gradients):
        expected = one if expected is None else expected
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)


def test_a_window_of_other_keys() -> None:
    """Keys and values have another length and width. The windows of all queries are the same."""
    layer = make_layer(batch_first=True, window=3, kdim=20, vdim=12)
    query, key, value = (x.detach() for x in make_rows(layer, 7, 11))
    _, weights = layer(query, key, value, average_attn_weights=False)
    assert weights.shape == (BATCH, HEADS, 7, 11)
    assert ((weights > 0).sum(3) == 3).all()
    assert ((weights > 0) == (weights > 0)[:, :, :1]).all()


def test_causal_calls_with_a_window_do_not_read_the_mask() -> None:
    layer, x = make_layer(window=5, recent=2), torch.randn(20, BATCH, 32)
    out, _ = layer(x, x, x, is_causal=True)
    for mask in (causal_mask(20, 20), torch.full((20, 20), torch.nan)):
        assert torch.equal(layer(x, x, x, attn_mask=mask, is_causal=True)[0], out)
