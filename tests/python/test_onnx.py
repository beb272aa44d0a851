"""flash_dmattn.onnx: exported layers and models have the same results in ONNX Runtime as in
PyTorch, and export refuses what the operators there lack."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Callable

import flash_dmattn
import onnx_sessions as sessions
import pytest
import torch
from flash_dmattn import ops
from onnx_sessions import Tensors, run
from programs import output_of, python
from samples import FULL
from torch import nn

import flash_dmattn.onnx as ours  # isort: skip

HIDDEN = 64
SIZES = {"hidden": HIDDEN, "heads": 4, "kv_heads": 2, "window": 12}
BATCH, LENGTH = torch.export.Dim("batch"), torch.export.Dim("length")
EVERY_LENGTH = {0: BATCH, 1: LENGTH}
LAYERS = {
    "plain": {},
    "every option": {
        "recent": 4,
        "sinks": 2,
        "bias": True,
        "dt_bias": True,
        "sink_logit": True,
        "softcap": 30.0,
        "softmax_scale": 0.2,
        "dropout": 0.1,
        "sliding_heads": 1,
        "nope_heads": 1,
        "nope_rotary_dim": 4,
    },
    "not causal, without positions": {"causal": False, "rope_base": None},
}


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """PyTorch's exporter warns about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def make_layer(dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    torch.manual_seed(4)
    layer = flash_dmattn.DynamicMaskAttention(**{**SIZES, **options}).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 1:  # A, and biases
                parameter.normal_()
    return layer.to(dtype)


def make_x(batch: int, length: int) -> torch.Tensor:
    return torch.randn(batch, length, HIDDEN, generator=torch.Generator().manual_seed(length))


def assert_near(found: torch.Tensor, wanted: torch.Tensor, steps: float = 64) -> None:
    """Equal up to the rounding of projections."""
    step = torch.finfo(wanted.dtype).eps
    assert (found - wanted).abs().max() <= steps * step * max(1.0, wanted.abs().max())


# ---- whole sequences ----


@pytest.mark.parametrize("name", LAYERS if FULL else [*LAYERS][1:])
def test_layer(name: str, tmp_path: Path) -> None:
    layer, file = make_layer(**LAYERS[name]), tmp_path / "layer.onnx"
    ours.export(layer, (make_x(2, 9),), file, dynamic_shapes={"x": EVERY_LENGTH})
    session = sessions.open_session(str(file))
    for batch, length in ((2, 9), (1, 1), (3, 150)):
        x = make_x(batch, length)
        (found,) = run(session, {"x": x})
        with torch.no_grad():
            assert_near(found, layer(x))


class Masked(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, key_valid: torch.Tensor) -> torch.Tensor:
        return self.layer(x, key_valid=key_valid)


def test_padding(tmp_path: Path) -> None:
    layer, file = Masked(make_layer(recent=4)).eval(), tmp_path / "layer.onnx"
    x, valid = make_x(2, 50), torch.ones(2, 50, dtype=torch.bool)
    valid[0, :20], valid[1, 30:] = False, False
    ours.export(layer, (x, valid), file)
    (found,) = run(sessions.open_session(str(file)), {"x": x, "key_valid": valid})
    with torch.no_grad():
        assert_near(found, layer(x, valid))
        assert not torch.allclose(found, layer(x, torch.ones_like(valid)), atol=1e-2)


def test_float16(tmp_path: Path) -> None:
    layer, file = make_layer(torch.float16), tmp_path / "layer.onnx"
    x = make_x(2, 50).half()
    program = ours.export(layer, (x,), file)
    (node,) = (one for one in program.model.graph if one.domain == "fdma")
    assert node.inputs[0].dtype.name == "FLOAT16"
    (found,) = run(sessions.open_session(str(file)), {"x": x})
    with torch.no_grad():
        assert_near(found, layer(x), steps=4)


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, attention_mask=mask, use_cache=False).logits


def test_doge(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    flash_dmattn_transformers = pytest.importorskip("flash_dmattn.transformers")
    flash_dmattn_transformers.register()
    sizes = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "keep_window_size": 12}
    config = transformers.DogeConfig(**sizes, **heads)
    torch.manual_seed(5)
    model = transformers.DogeForCausalLM._from_config(config, attn_implementation="dynamic_mask")
    for name, parameter in model.named_parameters():
        if name.endswith(".A"):
            nn.init.normal_(parameter)
    logits, file = Logits(model).eval(), tmp_path / "doge.onnx"
    tokens = torch.stack([torch.randperm(500)[:90] for _ in range(3)])
    mask = torch.ones(3, 90, dtype=torch.long)
    mask[0, :30] = 0
    shapes = {"tokens": EVERY_LENGTH, "mask": EVERY_LENGTH}
    program = ours.export(
        logits, (tokens[:2, :20].clone(), mask[:2, :20].clone()), file, dynamic_shapes=shapes
    )
    assert sum(node.op_type == "Attention" for node in program.model.graph) == 1
    session = sessions.open_session(str(file))
    for batch, length in ((3, 90), (2, 20)):
        inputs = {"tokens": tokens[:batch, :length], "mask": mask[:batch, :length]}
        (found,) = run(session, inputs)
        with torch.no_grad():
            wanted = logits(*inputs.values())
        there = inputs["mask"].bool()
        assert_near(found[there], wanted[there])


# ---- a cache ----


def step_through(session: Any, cache: Tensors, x: torch.Tensor, lengths: list[int]) -> Any:
    """Outputs for pieces of x, one after the other, and the cache after them."""
    outs = []
    for piece in x.split(lengths, 1):
        out, *after = run(session, {"x": piece, **cache})
        cache = dict(zip(cache, after))
        outs.append(out)
    return torch.cat(outs, 1), cache


@pytest.fixture(scope="module")
def layer_and_session(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Any]:
    layer, file = make_layer(**LAYERS["every option"]), tmp_path_factory.mktemp("step") / "a.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours.export_step(layer, file)
    return layer, sessions.open_session(str(file))


@pytest.mark.parametrize("lengths", [[1] * 130, [130], [100, 1, 1, 28], [65, 64, 1], [2] * 65])
def test_steps_are_the_whole_sequence(layer_and_session: Any, lengths: list[int]) -> None:
    layer, session = layer_and_session
    x = make_x(3, 130)
    found, cache = step_through(session, ours.empty_cache(layer, 3), x, lengths)
    with torch.no_grad():
        assert_near(found, layer(x))
    assert cache["cache_seen"].tolist() == [130] * 3
    out, *after = ours.CachedLayer(layer)(x, *ours.empty_cache(layer, 3).values())
    assert_near(out, found)
    for one, other in zip(after, cache.values()):
        if one.dtype == torch.int32:
            assert torch.equal(one, other)
        else:
            assert_near(other, one)


def test_steps_with_padding(tmp_path: Path) -> None:
    layer, file = make_layer(recent=4, rope_base=None), tmp_path / "step.onnx"
    ours.export_step(layer, file, key_valid=True)
    session = sessions.open_session(str(file))
    valid = torch.ones(2, 90, dtype=torch.bool)
    valid[0, :40] = False
    x, cache, outs = make_x(2, 90), ours.empty_cache(layer, 2), []
    for piece, is_token in zip(x.split([70, 10, 10], 1), valid.split([70, 10, 10], 1)):
        out, *after = run(session, {"x": piece, **cache, "key_valid": is_token})
        cache = dict(zip(cache, after))
        outs.append(out)
    with torch.no_grad():
        assert_near(torch.cat(outs, 1)[valid], layer(x, key_valid=valid)[valid])


def test_names_and_shapes(layer_and_session: Any) -> None:
    layer, session = layer_and_session
    cache = ours.empty_cache(layer, 1)
    assert [one.name for one in session.get_inputs()] == ["x", *cache]
    assert [one.name for one in session.get_outputs()] == ["out", *(f"new_{one}" for one in cache)]
    shapes = {one.name: one.shape for one in session.get_inputs()}
    assert shapes["x"] == ["batch", "len", HIDDEN]
    assert shapes["cache_key"] == ["batch", *cache["cache_key"].shape[1:]]


# ---- what is refused ----


class Call(nn.Module):
    """A call on states that are all made of x."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call
        self.dt_proj, self.a_coef = nn.Parameter(torch.ones(4, 64)), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> Any:
        states = x.unflatten(2, (4, 16))
        return self.call(states, self.dt_proj, self.a_coef)


def fused(**options: Any) -> Call:
    options = {"keep_window_size": 4, "causal": True, **options}
    return Call(lambda x, *weights: flash_dmattn.flash_dma_attention(x, x, x, *weights, **options))


def over_a_cache(x: torch.Tensor, dt_proj: torch.Tensor, a_coef: torch.Tensor) -> torch.Tensor:
    keys = flash_dmattn.DynamicMaskCache(1, 2, 4, 16, 8, recent=0).keys
    return flash_dmattn.decode(x, x, x, keys, dt_proj=dt_proj, a_coef=a_coef)


STARTS, USED = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([5, 9], dtype=torch.int32)
REFUSED = {
    "starts: is given, want None: packed sequences are not exported": fused(starts=STARTS),
    "kv_used: is given, want None: preallocated keys are not exported": fused(kv_used=USED),
    "dropout_p: is 0.1, want 0 to export; eval": fused(dropout_p=0.1),
    "gap: is 0.5, want 0 to export": fused(gap=0.5),
    "backend: is 'cpu', want None to export": fused(backend="cpu"),
    "flash_dma_attention: has no operator for ONNX Runtime, want it without return_lse": fused(
        return_lse=True
    ),
    "attention: has no operator for ONNX Runtime, want flash_dma_attention": Call(
        lambda x, *_: flash_dmattn.attention(x, x, x, attn_mask=torch.ones(1, 1, 9, 9).bool())[0]
    ),
    "score: has no operator for ONNX Runtime, want flash_dma_attention()": Call(
        lambda x, *weights: flash_dmattn.score(x, *weights)[0]
    ),
    "decode: has no operator for ONNX Runtime, want CachedLayer": Call(over_a_cache),
}


@pytest.mark.parametrize("message", REFUSED)
def test_export_refuses(message: str) -> None:
    model = REFUSED[message].eval()
    batch = 1 if message.startswith("starts") else 2
    with pytest.raises(NotImplementedError) as refused:
        ours.export(model, (make_x(batch, 9),))
    assert str(refused.value).startswith(message)


def test_no_argument_is_dropped() -> None:
    """Each argument of the operator goes to the node or is refused. Export would drop a new
    argument that flash_dmattn.onnx does not know."""
    on_node = {"query", "key", "value", "dt_proj", "a_coef", *ours.OPTIONAL, "keep_window_size"}
    on_node |= {"recent", "sinks", "scope", "bias_form", "causal", "softmax_scale", "softcap"}
    refused = {"starts", "kv_used", "rng_state", "dropout_p", "gap", "backend"}
    assert set(ops.FUSED_OUT.arguments) == on_node | refused


def test_a_layer_without_a_window_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="^attention: has no operator .* a window$"):
        ours.export(make_layer(window=None), (make_x(2, 9),))


def test_a_layer_with_lifetimes_is_refused() -> None:
    layer = make_layer(lifetime_units=4)
    with pytest.raises(NotImplementedError, match="^select: has no operator .* lifetime_units, or"):
        ours.export(layer, (make_x(2, 9),))
    for call in (ours.CachedLayer, ours.empty_cache, ours.export_step):
        with pytest.raises(NotImplementedError, match="^layer: has lifetime_units, want 0: "):
            call(layer)


def test_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^model: is in training mode, want eval\(\)$"):
        ours.export(make_layer().train(), (make_x(2, 9),))


def test_what_is_no_layer_is_refused() -> None:
    for call in (ours.CachedLayer, ours.empty_cache, ours.export_step):
        with pytest.raises(TypeError, match="^layer: is a Linear, want a DynamicMaskAttention$"):
            call(nn.Linear(2, 2))


@pytest.mark.parametrize("options", [{"causal": False}, {"gap": 1.0}])
def test_a_layer_without_a_cache_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="^cache: is given, want None"):
        ours.export_step(make_layer(**options))


def test_an_empty_cache_is_refused_for() -> None:
    with pytest.raises(ValueError, match="^layer: its window is None, want an int$"):
        ours.empty_cache(make_layer(window=None))
    with pytest.raises(ValueError, match="^batch: is 0, want 1 or more$"):
        ours.empty_cache(make_layer(), 0)


def test_an_exporter_without_a_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.onnx, "export", lambda model, args: None)
    with pytest.raises(ImportError, match="^PyTorch: is .*, want 2.6 or later to export$"):
        ours.export(make_layer(), (make_x(2, 9),))


# ---- the library ----


def test_where_the_library_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert ours.library_path() == sessions.LIBRARY.absolute()
    monkeypatch.setenv("FDMA_ORT_LIBRARY", str(tmp_path / "absent.so"))
    with pytest.raises(
        ImportError, match="^FDMA_ORT_LIBRARY is '.*absent.so', which is not a file"
    ):
        ours.library_path()
    monkeypatch.delenv("FDMA_ORT_LIBRARY")
    name = r"libfdma_ort\.(so|dylib)"
    with pytest.raises(
        ImportError, match=f"^no library at .*{name}; set FDMA_ORT_LIBRARY to where"
    ):
        ours.library_path()


def test_what_is_imported() -> None:
    program = """
import sys, flash_dmattn
print(sorted({"onnx", "onnxscript", "onnxruntime"} & set(sys.modules)))
import flash_dmattn.onnx
print("onnxruntime" in sys.modules)
"""
    assert output_of(python("-c", program)) == "[]\nFalse\n"
