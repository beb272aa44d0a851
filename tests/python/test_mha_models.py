"""MultiheadAttention in models: state, copies, autocast, compiled graphs, torch.nn's layers."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import flash_dmattn
import pytest
import torch
from test_mha import BATCH, HEADS, causal_mask, make_layer, make_pair, make_rows
from torch._dynamo.testing import CompileCounter


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


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"add_bias_kv": True}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, options: dict[str, Any]) -> None:
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


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", [{}, {"window": 5, "recent": 2}, {"add_bias_kv": True}])
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


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"window": 3, "recent": 1}])
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
