"""Sessions of ONNX Runtime with libfdma_ort, and graphs of single nodes of the domain "fdma". Tests
that import this are skipped if the library or the packages are missing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

LIBRARY = Path(os.environ["FDMA_ORT_LIBRARY"])
if not LIBRARY.is_file():
    pytest.skip(f"no library at {LIBRARY}: build with FDMA_ORT=ON", allow_module_level=True)

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

Tensors = dict[str, torch.Tensor]
TYPES = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.float64: onnx.TensorProto.DOUBLE,
    torch.int32: onnx.TensorProto.INT32,
    torch.int64: onnx.TensorProto.INT64,
    torch.uint8: onnx.TensorProto.UINT8,
    torch.bool: onnx.TensorProto.BOOL,
}
# The tensors of a cache, by their names in messages.
CACHE = ("cache_k", "cache_v", "cache_bias", "cache_score", "cache_position", "cache_seen")


def open_session(model: Any) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # tests look at exceptions
    options.register_custom_ops_library(str(LIBRARY))
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(session: Any, inputs: Tensors) -> list[torch.Tensor]:
    feed = {name: tensor.numpy() for name, tensor in inputs.items()}
    return [torch.from_numpy(out) for out in session.run(None, feed)]


def make_info(name: str, tensor: torch.Tensor, any_length: bool) -> Any:
    shape = [None] * tensor.dim() if any_length else list(tensor.shape)
    return onnx.helper.make_tensor_value_info(name, TYPES[tensor.dtype], shape)


def make_model(
    nodes: list[Any],
    inputs: Tensors,
    outputs: Tensors,
    values: Tensors,
    any_length: bool = False,
) -> bytes:
    """The bytes of a graph. `values` are tensors between nodes whose shapes ONNX Runtime is told;
    with any_length it is told no lengths."""
    infos = (
        [make_info(*one, any_length) for one in some.items()] for some in (inputs, outputs, values)
    )
    inputs_of, outputs_of, values_of = infos
    graph = onnx.helper.make_graph(nodes, "graph", inputs_of, outputs_of, value_info=values_of)
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("fdma", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9)
    return model.SerializeToString()


def make_node(name: str, inputs: list[str], outputs: list[str], attributes: dict[str, Any]) -> Any:
    return onnx.helper.make_node(name, inputs, outputs, domain="fdma", **attributes)


def run_node(name: str, inputs: dict[str, Any], **attributes: Any) -> list[torch.Tensor]:
    """The outputs of one node. bfloat16 goes through a cast, as numpy lacks it. An input that is
    None is left out."""
    given = {one: tensor for one, tensor in inputs.items() if tensor is not None}
    outputs = {"out": given["q"], **{f"new_{one}": given[one] for one in CACHE if one in given}}
    nodes, feed, shown = [], {}, {}
    for one, tensor in given.items():
        narrow = tensor.dtype == torch.bfloat16
        feed[one] = tensor.float() if narrow else tensor
        if narrow:
            feed[f"wide_{one}"] = feed.pop(one)
            cast = onnx.helper.make_node("Cast", [f"wide_{one}"], [one], to=TYPES[torch.bfloat16])
            nodes.append(cast)
    names = [one if one in given else "" for one in inputs]
    nodes.append(make_node(name, names, list(outputs), attributes))
    for one, tensor in outputs.items():
        narrow = tensor.dtype == torch.bfloat16
        shown[f"wide_{one}" if narrow else one] = tensor.float() if narrow else tensor
        if narrow:
            cast = onnx.helper.make_node("Cast", [one], [f"wide_{one}"], to=TYPES[torch.float32])
            nodes.append(cast)
    found = run(open_session(make_model(nodes, feed, shown, {})), feed)
    return [out.to(like.dtype) for out, like in zip(found, outputs.values())]
