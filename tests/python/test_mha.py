"""MultiheadAttention: without a window against torch.nn.MultiheadAttention, with a window against
its formula in PyTorch; the cases of PyTorch's own tests; state, copies, autocast, compiled graphs,
and torch.nn's layers that have it inside."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import pickle
import random
from typing import Any

import evaluate
import flash_dmattn
import pytest
import torch
from flash_dmattn import _arguments
from samples import combinations
from torch._dynamo.testing import CompileCounter
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
    generator = torch.Generator().manual_seed(q_len)
    sizes = ((q_len, layer.embed_dim), (kv_len, layer.kdim), (kv_len, layer.vdim))
    rows = [torch.randn(BATCH, *size, generator=generator) for size in sizes]
    if not batched:
        rows = [row[0] for row in rows]
    elif not layer.batch_first:
        rows = [row.transpose(0, 1) for row in rows]
    return [row.to(layer.out_proj.weight.dtype).requires_grad_() for row in rows]


def make_masks(kinds: dict[str, str], q_len: int, kv_len: int, batched: bool) -> Inputs:
    """Masks under which every query sees key 0."""
    generator = torch.Generator().manual_seed(kv_len)
    batch = (BATCH,) if batched else ()
    shapes = {"padding": (*batch, kv_len), "2-D": (q_len, kv_len)}
    shapes["3-D"] = (BATCH * HEADS if batched else HEADS, q_len, kv_len)
    masks = {}
    for name, kind in kinds.items():
        shape, dtype = kind.split()
        mask = torch.rand(shapes[shape], generator=generator) < 0.4
        mask[..., 0] = False
        if dtype == "float":
            numbers = torch.randn(mask.shape, generator=generator)
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


def torch_cases() -> list[tuple[Any, ...]]:
    switches = ([True, False], [True, False])
    found = combinations(itertools.product(LAYERS, CALLS), *switches)
    return [(*pair, *values) for pair, *values in found]


@pytest.mark.parametrize(("name", "call", "need_weights", "batched"), torch_cases())
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


@pytest.mark.parametrize(
    "options", [{}, {"add_bias_kv": True}, {"bias": False}, {"kdim": 20, "vdim": 12}]
)
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


# ---- the cases of PyTorch's own tests of nn.MultiheadAttention (2.13) ----


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_zero_attn": True},
        {"add_bias_kv": True},
        {"padded": True},
        {"padded": True, "add_bias_kv": True, "add_zero_attn": True},
    ],
)
def test_random_shapes(options: dict[str, Any]) -> None:
    """The first key is seen, because a row without keys is not NaN here."""
    options = dict(options)
    padded = options.pop("padded", False)
    choose = random.Random(len(options))
    torch.manual_seed(0)
    for number in range(50):
        batch, kv_len = choose.randint(2, 10), choose.randint(2, 10)
        heads, head_dim = 2 * choose.randint(2, 5), choose.randint(3, 10)
        width = choose.choice((heads * head_dim, choose.randint(5, 20)))
        sizes = {"embed_dim": heads * head_dim, "num_heads": heads, "kdim": width, "vdim": width}
        layer = flash_dmattn.MultiheadAttention(**sizes, **options)
        other = torch.nn.MultiheadAttention(**sizes, **options)
        other.load_state_dict(layer.state_dict())
        query, key = torch.rand(1, batch, heads * head_dim), torch.rand(kv_len, batch, width)
        hidden, padding = torch.rand(1, kv_len) < 0.5, torch.rand(1, kv_len) < 0.5
        hidden[:, 0], padding[:, 0] = False, False
        given = {"attn_mask": hidden, "average_attn_weights": number % 2 == 0}
        if padded:
            given["key_padding_mask"] = padding.expand(batch, -1)
        for one, expected in zip(layer(query, key, key, **given), other(query, key, key, **given)):
            torch.testing.assert_close(one, expected)


THREE = ((4, 4, 4), (4, 4, 4), (4, 4, 4))
TWO = ((4, 4), (4, 4), (4, 4))
ROWS, KEY_PADDING, ATTN = "`key` and `value` to be", "`key_padding_mask`", "`attn_mask`"
SHAPES: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    (((4, 4, 4), (4, 4), (4, 4, 4)), {}, f"expected {ROWS} 3-D but found 2-D and 3-D tensors resp"),
    (((4, 4, 4), (4, 4, 4), (4, 4)), {}, f"expected {ROWS} 3-D but found 3-D and 2-D tensors resp"),
    (((4, 4), (4, 4, 4), (4, 4)), {}, f"expected {ROWS} 2-D but found 3-D and 2-D tensors resp"),
    (((4, 4), (4, 4), (4, 4, 4)), {}, f"expected {ROWS} 2-D but found 2-D and 3-D tensors resp"),
    (
        THREE,
        {"key_padding_mask": (4,)},
        f"expected {KEY_PADDING} to be `None` or 2-D but found",
    ),
    (
        TWO,
        {"key_padding_mask": (1, 8)},
        f"expected {KEY_PADDING} to be `None` or 1-D but found",
    ),
    (THREE, {"attn_mask": (4,)}, f"expected {ATTN} to be `None`, 2-D or 3-D but found 1-D tensor"),
    (TWO, {"attn_mask": (4,)}, f"expected {ATTN} to be `None`, 2-D or 3-D but found 1-D tensor"),
    (TWO, {"attn_mask": (5, 4, 4)}, rf"Expected {ATTN} shape to be \(4, 4, 4\)"),
]


@pytest.mark.parametrize("options", [{}, {"batch_first": True}])
def test_shapes_that_are_refused(options: dict[str, Any]) -> None:
    layer = make_layer(4, **options)
    for train, need_weights in ((True, True), (False, True), (False, False)):
        for rows, masks, message in SHAPES:
            given = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in masks.items()}
            with pytest.raises(AssertionError, match=message), torch.set_grad_enabled(train):
                layer.train(train)(*map(torch.randn, rows), **given, need_weights=need_weights)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors(layout: torch.layout) -> None:
    """Each sequence has the same results as alone, with gradients, without, and in inference
    mode."""
    torch.manual_seed(0)

    def nested(*lengths: int) -> torch.Tensor:
        pieces = [torch.randn(length, 10) for length in lengths]
        return torch.nested.nested_tensor(pieces, layout=layout)

    query, key, value = nested(4, 6), nested(7, 16), nested(7, 16)
    for options in ({}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"window": 3}):
        layer = flash_dmattn.MultiheadAttention(10, 5, batch_first=True, **options).eval()
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
def test_two_masks_in_evaluation() -> None:
    torch.manual_seed(0)
    layer = flash_dmattn.MultiheadAttention(14, 7, batch_first=True).eval()
    other = torch.nn.MultiheadAttention(14, 7, batch_first=True).train()  # avoids the fast path
    other.load_state_dict(layer.state_dict())
    x = torch.rand(8, 5, 14)
    mask, padding = torch.rand(5, 5) < 0.5, torch.rand(8, 5) < 0.5
    given = {"attn_mask": mask, "key_padding_mask": padding, "need_weights": False}
    seen = ~(mask | padding[:, None]).all(-1)
    assert 0 < seen.sum() < seen.numel()
    torch.testing.assert_close(layer(x, x, x, **given)[0][seen], other(x, x, x, **given)[0][seen])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.float, torch.double])
def test_dtypes(dtype: torch.dtype, training: bool) -> None:
    layer = make_layer(128, batch_first=True).to(dtype).train(training)
    query, key, value = torch.randn(3, 8, 10, 128, dtype=dtype)
    with torch.set_grad_enabled(training):
        out, weights = layer(query, key, value, need_weights=False)
    assert (out.shape, out.dtype, weights) == (query.shape, dtype, None)


@torch.no_grad()
def test_a_bias_of_another_dtype() -> None:
    layer = make_layer(4, batch_first=True, dtype=torch.double).eval()
    layer.in_proj_bias = torch.nn.Parameter(layer.in_proj_bias.half())
    x = torch.randn(4, 4, 4, dtype=torch.double)
    assert layer(x, x, x)[0].dtype == torch.double


def test_a_compiled_encoder() -> None:
    torch._dynamo.reset()
    block = torch.nn.TransformerEncoderLayer(64, 8, 64, batch_first=True, dtype=torch.double)
    block.self_attn = flash_dmattn.MultiheadAttention(64, 8, batch_first=True, dtype=torch.double)
    encoder = torch.nn.TransformerEncoder(block, num_layers=2).eval()
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    x, padding = torch.randn(1, 41, 64, dtype=torch.double), torch.rand(1, 41) > 0.5
    padding[:, :2] = torch.tensor([True, False])
    given = {"mask": None, "src_key_padding_mask": padding}
    torch.testing.assert_close(compiled(x, **given), encoder(x, **given))


# ---- in models ----


def test_state_dict() -> None:
    """To torch.nn's module and from it. With a window there are two more parameters, for the
    score."""
    options = {"add_bias_kv": True, "kdim": 20, "dtype": torch.float64}
    layer, other = make_pair(**options)
    rows = make_rows(layer, 5, 5)
    for one, expected in zip(layer(*rows), other(*rows)):
        torch.testing.assert_close(one, expected)
    back = make_layer(**options)
    back.reset_parameters()
    back.load_state_dict(other.state_dict())
    assert torch.equal(back(*rows)[0], layer(*rows)[0])
    plain, selects = torch.nn.MultiheadAttention(32, HEADS), make_layer(window=100)
    incompatible = selects.load_state_dict(plain.state_dict(), strict=False)
    assert {*incompatible.missing_keys} == {"A", "dt_proj.weight"}
    assert incompatible.unexpected_keys == []
    incompatible = plain.load_state_dict(selects.state_dict(), strict=False)
    assert {*incompatible.unexpected_keys} == {"A", "dt_proj.weight"}
    assert selects.A.shape == (HEADS,) and selects.dt_proj.weight.shape == (HEADS, 32)
    torch.nn.init.zeros_(selects.A)  # all biases are equal, and all keys are kept
    x = torch.randn(6, BATCH, 32)
    torch.testing.assert_close(selects(x, x, x), plain(x, x, x))


@pytest.mark.parametrize("options", [{}, {"window": 4, "sinks": 1}])
def test_initial_parameters(options: dict[str, Any]) -> None:
    """As in torch.nn's module under the same seed; A is 0."""
    torch.manual_seed(5)
    other = torch.nn.MultiheadAttention(32, HEADS).state_dict()
    torch.manual_seed(5)
    layer = flash_dmattn.MultiheadAttention(32, HEADS, **options)
    for name, tensor in other.items():
        assert torch.equal(layer.state_dict()[name], tensor)
    before = copy.deepcopy(layer.state_dict())
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    layer.reset_parameters()
    for name, tensor in layer.state_dict().items():
        assert (tensor != 7).all() and torch.equal(tensor, before[name]) == (tensor == 0).all()
    if options:
        assert (layer.A == 0).all()
        assert "window=4, recent=0, sinks=1, gap=None, bias_form='exp'" in repr(layer)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"window": 4, "recent": 1}])
def test_copies(options: dict[str, Any]) -> None:
    layer, x = make_layer(**options), torch.randn(6, BATCH, 32)
    given = {"attn_mask": causal_mask(6, 6), "is_causal": True}
    out, weights = layer(x, x, x, **given)
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    for one in (*copies, torch.load(saved, weights_only=False)):
        found = one(x, x, x, **given)
        assert torch.equal(found[0], out) and torch.equal(found[1], weights)
        assert isinstance(one, torch.nn.MultiheadAttention)


@pytest.mark.parametrize(
    ("options", "dtype"),
    combinations([{}, {"window": 5}, {"add_bias_kv": True}], [torch.bfloat16, torch.float16]),
)
def test_autocast(options: dict[str, Any], dtype: torch.dtype) -> None:
    layer, x = make_layer(batch_first=True, **options), torch.randn(BATCH, 20, 32)
    mask = torch.randn(20, 20)
    with torch.autocast("cpu", dtype):
        out, weights = layer(x, x, x, attn_mask=mask)
    assert (out.dtype, weights.dtype) == (dtype, torch.float32)
    if not options:
        torch.testing.assert_close(
            out.float(), layer(x, x, x, attn_mask=mask)[0], rtol=0.1, atol=0.1
        )
    out.float().square().mean().backward()
    for parameter in layer.parameters():
        assert parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "need_weights"),
    combinations([{}, {"window": 5, "recent": 2}, {"add_bias_kv": True}], [True, False]),
)
def test_one_compiled_graph(options: dict[str, Any], need_weights: bool) -> None:
    torch._dynamo.reset()
    layer, x = make_layer(batch_first=True, **options), torch.randn(BATCH, 20, 32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    given = {"attn_mask": causal_mask(20, 20), "is_causal": True, "need_weights": need_weights}
    given["key_padding_mask"] = torch.arange(20) >= torch.tensor([[20], [15]])
    found, wanted = (one(x, x, x, **given) for one in (compiled, layer))
    torch.testing.assert_close(found, wanted)
    gradients = (
        torch.autograd.grad(out.square().sum(), list(layer.parameters()))
        for out, _ in (found, wanted)
    )
    for one, expected in zip(*gradients):
        torch.testing.assert_close(one, expected)


@pytest.mark.parametrize("options", [{}, {"window": 5, "recent": 2}])
def test_one_graph_for_all_lengths(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    layer = make_layer(batch_first=True, **options)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for length in (10, 17, 23):
        x, padding = torch.randn(length - 6, length, 32), torch.rand(length - 6, length) < 0.2
        given = {"attn_mask": causal_mask(length, length), "key_padding_mask": padding}
        given["is_causal"] = True
        torch.testing.assert_close(compiled(x, x, x, **given), layer(x, x, x, **given))
    assert counter.frame_count == 1


# ---- inside of torch.nn's layers ----


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list to which each call of forward() adds whether its query is nested."""
    calls: list[bool] = []
    forward = flash_dmattn.MultiheadAttention.forward

    def counted(self: Any, query: torch.Tensor, *args: Any, **options: Any) -> Any:
        calls.append(query.is_nested)
        return forward(self, query, *args, **options)

    monkeypatch.setattr(flash_dmattn.MultiheadAttention, "forward", counted)
    return calls


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("masks", ["none", "padding", "causal", "both"])
def test_transformer_encoder(masks: str, train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's kernel for whole encoder layers does not replace forward()."""
    torch.manual_seed(0)
    calls = count_calls(monkeypatch)
    block = torch.nn.TransformerEncoderLayer(32, HEADS, 64, dropout=0.0, batch_first=True)
    wanted = torch.nn.TransformerEncoder(block, 2).train(train)
    encoder = copy.deepcopy(wanted)
    for one in encoder.layers:
        layer = flash_dmattn.MultiheadAttention(32, HEADS, batch_first=True).train(train)
        layer.load_state_dict(one.self_attn.state_dict())
        one.self_attn = layer
    x, given = torch.randn(BATCH, 9, 32), {}
    valid = torch.arange(9) < torch.tensor([[9], [6]])
    if masks in ("padding", "both"):
        given["src_key_padding_mask"] = ~valid
    if masks in ("causal", "both"):
        given.update(mask=causal_mask(9, 9), is_causal=True)
    with torch.set_grad_enabled(train):
        found = encoder(x, **given)
        assert any(calls) == (masks == "padding" and not train)
        assert len(calls) == 2 + sum(calls)  # nested calls go through forward() twice
        torch.testing.assert_close(found[valid], wanted(x, **given)[valid])


@pytest.mark.parametrize(
    ("options", "layout"),
    combinations(
        [{}, {"add_bias_kv": True}, {"window": 3, "recent": 1}], [torch.jagged, torch.strided]
    ),
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_causal_calls_of_nested_tensors(options: dict[str, Any], layout: torch.layout) -> None:
    """Each sequence has the same results and gradients as alone; weights are padded."""
    layer = make_layer(batch_first=True, **options)
    pieces = [torch.randn(length, 32) for length in (4, 7)]
    alone = [piece.clone().requires_grad_() for piece in pieces]
    x = torch.nested.nested_tensor(pieces, layout=layout, requires_grad=True)
    out, weights = layer(x, x, x, is_causal=True)
    assert weights.shape == (2, 7, 7 + len(options) % 2) and (weights[0, :, 4:7] == 0).all()
    sum(one.square().sum() for one in out.unbind()).backward()
    gradients = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    for n, piece in enumerate(alone):
        given = {"attn_mask": causal_mask(len(piece), len(piece)), "is_causal": True}
        want, want_weights = layer(piece, piece, piece, **given)
        torch.testing.assert_close(out.unbind()[n], want)
        found = weights[n, : len(piece), : len(piece)]
        torch.testing.assert_close(found, want_weights[:, : len(piece)])
        want.square().sum().backward()
    for one, piece in zip(x.grad.unbind(), alone):
        torch.testing.assert_close(one, piece.grad, rtol=1e-4, atol=1e-4)
    for one, parameter in zip(gradients, layer.parameters()):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-4, atol=1e-4)


def test_transformer_decoder_with_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch)
    block = torch.nn.TransformerDecoderLayer(32, HEADS, 64, dropout=0.0).eval()
    block.self_attn = make_layer(window=3, recent=2)
    block.multihead_attn = make_layer(window=4)
    x, memory = torch.randn(9, BATCH, 32), torch.randn(7, BATCH, 32)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(9)
    whole = block(x, memory, tgt_mask=mask, tgt_is_causal=True)
    assert len(calls) == 2
    mask = torch.nn.Transformer.generate_square_subsequent_mask(6)
    first = block(x[:6], memory, tgt_mask=mask, tgt_is_causal=True)
    torch.testing.assert_close(first, whole[:6])


def test_offloaded_weights() -> None:
    """accelerate keeps them on meta, except during a call of the module."""
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    layer = flash_dmattn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 7, 16)
    with torch.no_grad():
        want = layer(x, x, x)[0]
        accelerate.cpu_offload(layer, execution_device="cpu")
        assert layer.out_proj.weight.is_meta
        assert torch.equal(layer(x, x, x)[0], want)
