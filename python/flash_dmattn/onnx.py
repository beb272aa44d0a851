"""Models as ONNX graphs, which ONNX Runtime runs with the operators of the library libfdma_ort.

    flash_dmattn.onnx.export(model.eval(), (x,), "model.onnx")

    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(flash_dmattn.onnx.library_path()))
    session = onnxruntime.InferenceSession("model.onnx", options)

flash_dma_attention() becomes a node Attention of the domain "fdma", and attention over a cache
becomes a node Decode. Their inputs and attributes have the names of fdma.h, except for a cache's
tensors.

Only this module imports onnx and onnxscript; it does not import onnxruntime.
"""

from __future__ import annotations

import inspect
import os
import warnings
from pathlib import Path
from typing import Any, Callable

import onnxscript
import torch
from onnx import defs
from torch import nn

from . import _arguments, _library, _types, ops, rotary, streams
from ._arguments import finish, kernel_scale, pad_head_dim
from .nn import DynamicMaskAttention
from .streams import KeyCache, Tokens

__all__ = ["CachedLayer", "empty_cache", "export", "export_step", "library_path"]

DOMAIN, VERSION = "fdma", 1
CACHE = ("cache_key", "cache_value", "cache_bias", "cache_score", "cache_position", "cache_seen")


# ---- nodes ----

FLOATS = ("tensor(float)", "tensor(float16)", "tensor(bfloat16)")
TYPES = {  # types of inputs and outputs; one letter stands for one type in a node
    "T": FLOATS,
    "W": FLOATS,
    "A": FLOATS,
    "B": FLOATS,
    "V": ("tensor(bool)", "tensor(uint8)"),
}
FLOAT32, INT32 = "tensor(float)", "tensor(int32)"
STATES = {"q": "T", "k": "T", "v": "T", "dt_proj": "W", "a": "A"}
OPTIONAL = {"dt_bias": "B", "key_valid": "V", "sink_logit": FLOAT32}
CACHED = {
    "cache_k": "T",
    "cache_v": "T",
    "cache_bias": FLOAT32,
    "cache_score": FLOAT32,
    "cache_position": INT32,
    "cache_seen": INT32,
}
ATTRIBUTES = {
    **dict.fromkeys(("window", "recent", "sinks"), "INT"),
    "bias_form": "STRING",
    "scale": "FLOAT",
    "softcap": "FLOAT",
}


def make_operator(
    name: str, inputs: dict[str, str], outputs: dict[str, str], attributes: dict[str, str]
) -> Callable[..., Any]:
    """An operator of the domain, which becomes a node of the exported graph."""
    parameter, option = defs.OpSchema.FormalParameter, defs.OpSchema.FormalParameterOption
    used = {kind for kind in (*inputs.values(), *OPTIONAL.values()) if kind in TYPES}
    schema = defs.OpSchema(
        name,
        DOMAIN,
        VERSION,
        inputs=[
            *(parameter(one, kind) for one, kind in inputs.items()),
            *(parameter(one, kind, param_option=option.Optional) for one, kind in OPTIONAL.items()),
        ],
        outputs=[parameter(one, kind) for one, kind in outputs.items()],
        type_constraints=[(kind, list(TYPES[kind]), "") for kind in sorted(used)],
        attributes=[
            defs.OpSchema.Attribute(one, getattr(defs.OpSchema.AttrType, kind))
            for one, kind in attributes.items()
        ],
    )
    return onnxscript.values.Op(onnxscript.values.Opset(DOMAIN, VERSION), name, schema)


ATTENTION_NODE = make_operator(
    "Attention", STATES, {"out": "T"}, {**ATTRIBUTES, "causal": "INT", "scope": "STRING"}
)
DECODE_NODE = make_operator("Decode", {**STATES, **CACHED}, {"out": "T", **CACHED}, ATTRIBUTES)


def attributes_of(given: dict[str, Any], window: str) -> dict[str, Any]:
    """The attributes that both nodes have; `window` is the name of that argument."""
    return {
        "window": given[window],
        "recent": given["recent"],
        "sinks": given["sinks"],
        "bias_form": given["bias_form"],
        "scale": float(given["softmax_scale"]),
        "softcap": float(given["softcap"]),
    }


def translate_attention(*arguments: Any) -> Any:
    """Translate flash_dmattn::flash_dma_output to a node."""
    given = dict(zip(ops.FUSED_OUT.arguments, arguments))
    tensors = [given[name] for name in ("query", "key", "value", "dt_proj", "a_coef")]
    optional = [given[name] for name in OPTIONAL]
    attributes = attributes_of(given, "keep_window_size")
    causal, scope = int(given["causal"]), given["scope"]
    return ATTENTION_NODE(*tensors, *optional, **attributes, causal=causal, scope=scope)


# ---- rotary embedding, in operators that ONNX has ----


def decompose_table(*arguments: Any) -> torch.Tensor:
    """flash_dmattn::rotary_table in operators of PyTorch, with angles in float64."""
    given = dict(zip(ops.ROTARY_TABLE.arguments, arguments))
    positions, frequencies = given["row_positions"], given["inv_freq"]
    if frequencies is None:
        pairs = given["dim"] // 2
        exponents = torch.arange(pairs, dtype=torch.float64, device=positions.device) / pairs
        frequencies = given["base"] ** -exponents
    angles = positions.to(torch.float64)[:, None] * frequencies.to(torch.float64)
    table = torch.cat((angles.cos(), angles.sin()), 1) * given["factor"]
    return table if given["wide"] else table.to(torch.float32)


def decompose_rotation(*arguments: Any) -> torch.Tensor:
    """flash_dmattn::rotate in operators of PyTorch, for calls of layers: row i of a sequence is
    rotated by row i of the table, whose halves are rotated."""
    given = dict(zip(ops.ROTATE.arguments, arguments))
    for name in ("positions", "starts"):
        require(given[name] is None, f"{name}: is given, want None to export a rotation")
    for name in ("first", "offset", "interleaved"):
        require(given[name] == 0, f"{name}: is {given[name]}, want 0 to export a rotation")
    x, weight, table = given["x"], given["weight"], given["rotary"]
    out = x.to(table.dtype)
    if weight is not None:
        square = out.square().mean(3, keepdim=True)
        out = out * (square + given["eps"]).rsqrt() * weight.to(table.dtype)
    cos, sin = table[: x.shape[1], None].chunk(2, 2)
    pairs, rotated_heads = cos.shape[2], x.shape[2] - given["nope_heads"]
    one, other, rest = out[:, :, :rotated_heads].tensor_split((pairs, 2 * pairs), 3)
    turned = torch.cat((one * cos - other * sin, other * cos + one * sin, rest), 3)
    return torch.cat((turned, out[:, :, rotated_heads:]), 2).to(x.dtype)


def decompose_shared(
    length: int, dim: int, base: float, wide: bool, device: torch.device
) -> torch.Tensor:
    positions = torch.arange(length, device=device)
    return decompose_table(positions, None, dim, base, 1.0, wide, None)


DECOMPOSITIONS = {
    rotary.SHARED_TABLE: decompose_shared,
    ops.ROTARY_TABLE.op: decompose_table,
    ops.ROTATE.op: decompose_rotation,
    ops.REGISTERED.rotate_no_grad.default: decompose_rotation,
}


# ---- attention over a cache, as a function of it ----

CACHED_SCHEMA = (
    "cached_attention(Tensor query, Tensor key, Tensor value, Tensor dt_proj, Tensor a_coef, "
    + "".join(f"Tensor {name}, " for name in CACHE)
    + "Tensor? dt_bias, Tensor? key_valid, Tensor? sink_logit, int window, int recent, int sinks, "
    "str bias_form, float softmax_scale, float softcap) -> (Tensor out, "
    + ", ".join(f"Tensor {name}_out" for name in CACHE)
    + ")"
)
CACHED_ARGUMENTS = tuple(
    one.split(" ")[1] for one in CACHED_SCHEMA.partition("(")[2].partition(")")[0].split(", ")
)


def run_cached(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """The operator in PyTorch: out, and the tensors of the cache with the new tokens. cache_key and
    cache_value are [batch, kv_heads, rows, head_dim]."""
    given = dict(zip(CACHED_ARGUMENTS, arguments))
    after = [given[name].clone() for name in CACHE]
    rules = given["window"], given["recent"], given["sinks"]
    rows = (after[0].transpose(1, 2), after[1].transpose(1, 2))
    fields: tuple[Any, ...] = (*rows, *after[2:], *rules)
    cache = KeyCache(*fields)
    query, key, value = (given[name] for name in ("query", "key", "value"))
    weights = (given["dt_proj"], given["a_coef"], given["dt_bias"])
    options = (given["bias_form"], given["softmax_scale"], given["softcap"], None)
    if key.shape[1] > streams.TOKENS_MAX or given["key_valid"] is not None:
        where = torch.arange(key.shape[0], dtype=torch.int32, device=key.device)
        tokens = Tokens(
            query, key, value, weights, None, given["key_valid"], None, given["sink_logit"], options
        )
        out = streams.prefill(cache, where, cache, tokens)
    else:
        rest = (None, None, None, None, given["sink_logit"], *streams.tensors_of(cache), *rules)
        out, _ = ops.DECODE.op(query, key, value, *weights, *rest, False, *options)
    return (out, *after)


def fake_cached(*arguments: Any) -> tuple[torch.Tensor, ...]:
    given = dict(zip(CACHED_ARGUMENTS, arguments))
    return tuple(given[name].new_empty(given[name].shape) for name in ("query", *CACHE))


ops.LIBRARY.define(CACHED_SCHEMA, tags=torch.Tag.pt2_compliant_tag)
ops.LIBRARY.impl("cached_attention", run_cached, "CompositeExplicitAutograd")
torch.library.register_fake(f"{ops.NAMESPACE}::cached_attention", fake_cached, lib=ops.LIBRARY)
CACHED_ATTENTION = ops.REGISTERED.cached_attention.default


def translate_cached(*arguments: Any) -> Any:
    """Translate flash_dmattn::cached_attention to a node."""
    given = dict(zip(CACHED_ARGUMENTS, arguments))
    tensors = arguments[: CACHED_ARGUMENTS.index("window")]
    return DECODE_NODE(*tensors, **attributes_of(given, "window"))


class LayerCache:
    """The cache of one layer for one call, in place of a DynamicMaskCache. `tensors` holds the
    cache before the call, then the cache after it."""

    bias_form = "exp"

    def __init__(self, tensors: tuple[torch.Tensor, ...], rules: tuple[Any, ...]) -> None:
        fields: tuple[Any, ...] = (*tensors, *rules)
        self.tensors, self.keys = tensors, KeyCache(*fields)

    def positions(self, layer: int, length: int, index: None = None) -> torch.Tensor:
        """Positions of the next tokens, [batch, length]."""
        seen = self.tensors[-1]
        following = torch.arange(length, dtype=torch.int32, device=seen.device)
        return seen[:, None] + following

    def attend(self, layer: int, *states: Any, **options: Any) -> torch.Tensor:
        """Attention of the next tokens, with the arguments of DynamicMaskCache.attend()."""
        optional = (options["dt_bias"], options["key_valid"], options["sink_logit"])
        rows, dt_proj, head_dim = pad_head_dim(states[:3], states[3])
        states = (*rows, dt_proj, *states[4:])
        numbers = (
            self.bias_form,
            kernel_scale(options["softmax_scale"], head_dim),
            options["softcap"],
        )
        rules = streams.rules_of(self.keys)
        out, *after = CACHED_ATTENTION(*states, *self.tensors, *optional, *rules, *numbers)
        self.tensors = tuple(after)
        return finish(out, head_dim)


class CachedLayer(nn.Module):
    """A layer that attends over a cache, as a function of its tensors: it writes to none of them.

        out, *cache = CachedLayer(layer)(x, *cache)

    A graph of it serves prompts and single tokens alike: x has the next tokens of each sequence,
    any number of them, and the input cache has the tokens before them. A model of several layers
    passes on the tensors of each.

    Args:
        layer: a DynamicMaskAttention that is causal, with a window, and without a gap or options.

    Raises:
        TypeError: another kind of layer.
        NotImplementedError: a layer with lifetime_units.
        ValueError: in a call, a layer that has no cache.

    Example:
        >>> layer = flash_dmattn.DynamicMaskAttention(hidden=64, heads=4, kv_heads=2, window=16)
        >>> step, cache = flash_dmattn.onnx.CachedLayer(layer), flash_dmattn.onnx.empty_cache(layer)
        >>> out, *cache = step(torch.randn(1, 100, 64), *cache.values())
        >>> out, *cache = step(torch.randn(1, 1, 64), *cache)
        >>> out.shape, cache[-1]
        (torch.Size([1, 1, 64]), tensor([101], dtype=torch.int32))

    Source: docs/algorithm.md, streams.
    """

    def __init__(self, layer: DynamicMaskAttention) -> None:
        super().__init__()
        check_layer(layer)
        self.layer = layer

    def forward(
        self,
        x: torch.Tensor,
        cache_key: torch.Tensor,
        cache_value: torch.Tensor,
        cache_bias: torch.Tensor,
        cache_score: torch.Tensor,
        cache_position: torch.Tensor,
        cache_seen: torch.Tensor,
        key_valid: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Attention of the next tokens of each sequence, which the returned cache then has.

        Args:
            x: hidden states [batch, len, hidden].
            cache_key: [batch, kv_heads, rows, head_dim], where rows = window + recent; head_dim is
                rounded up to a multiple of 8.
            cache_value: like cache_key.
            cache_bias: [batch, kv_heads, rows] float32.
            cache_score: [batch, kv_heads, rows] float32.
            cache_position: [batch, kv_heads, rows] int32; -1 marks an empty row.
            cache_seen: [batch] int32: the tokens that have passed.
            key_valid: optional [batch, len] bool or uint8, false for padding.
            positions: as in the layer; None continues after the tokens before.

        Returns:
            out [batch, len, hidden], and the six tensors of the cache with these tokens.
        """
        layer = self.layer
        tensors = (cache_key, cache_value, cache_bias, cache_score, cache_position, cache_seen)
        cache = LayerCache(tensors, (layer.window, layer.recent, layer.sinks))
        with torch.no_grad():
            out = layer(x, key_valid=key_valid, positions=positions, cache=cache)
        return (out, *cache.tensors)


def check_layer(layer: DynamicMaskAttention) -> None:
    if not isinstance(layer, DynamicMaskAttention):
        raise _types.refusal("layer", layer, "a DynamicMaskAttention")
    gate = layer.lifetime_gate
    require(gate is None, "layer: has lifetime_units, want 0: lifetimes are not exported")


def empty_cache(layer: DynamicMaskAttention, batch: int = 1) -> dict[str, torch.Tensor]:
    """The tensors of a cache without tokens, for CachedLayer, by the names of the inputs of
    export_step().

    Args:
        layer: a DynamicMaskAttention with a window.
        batch: sequences.

    Returns:
        cache_key, cache_value, cache_bias, cache_score, cache_position and cache_seen.

    Raises:
        TypeError: another kind of layer, or a batch that is not an int.
        NotImplementedError: a layer with lifetime_units.
        ValueError: a batch below 1, or a layer without a window.

    Example:
        >>> layer = flash_dmattn.DynamicMaskAttention(hidden=64, heads=4, kv_heads=2, window=16)
        >>> flash_dmattn.onnx.empty_cache(layer, batch=3)["cache_key"].shape
        torch.Size([3, 2, 32, 16])

    Source: docs/algorithm.md, streams.
    """
    check_layer(layer)
    if _arguments.check_int("batch", batch) < 1:
        raise ValueError(f"batch: is {batch}, want 1 or more")
    if layer.window is None:
        raise ValueError("layer: its window is None, want an int")
    weight = layer.k_proj.weight
    numbers = weight.new_zeros(batch, layer.kv_heads, layer.window + layer.recent)
    rows = numbers[..., None].repeat(1, 1, 1, layer.head_dim + -layer.head_dim % 8)
    table = numbers.to(_arguments.wide(weight.dtype))
    empty = torch.full_like(numbers, -1, dtype=torch.int32)
    seen = empty.new_zeros(batch)
    return dict(zip(CACHE, (rows, rows.clone(), table, table.clone(), empty, seen)))


# ---- export ----

TRANSLATIONS = {ops.FUSED_OUT.op: translate_attention, CACHED_ATTENTION: translate_cached}
# Replacements for other operators of this package.
INSTEAD = {
    "attention": "flash_dma_attention(), or a layer with a window",
    "flash_dma_attention": "it without return_lse and return_attn_probs",
    "select": "a layer without lifetime_units, or flash_dma_attention()",
    "decode": "CachedLayer",
    "prefill": "CachedLayer",
    "cache_store": "CachedLayer",
}


def require(holds: bool, message: str) -> None:
    if not holds:
        raise NotImplementedError(message)


def check_attention(given: dict[str, Any]) -> None:
    """Refuse options that the node Attention lacks. A tensor is a node of the graph."""
    for name, what in (("starts", "packed sequences"), ("kv_used", "preallocated keys")):
        require(given[name] is None, f"{name}: is given, want None: {what} are not exported")
    for name, hint in (("dropout_p", "; eval() turns it off"), ("gap", "")):
        require(given[name] == 0, f"{name}: is {given[name]}, want 0 to export{hint}")
    backend = given["backend"]
    require(backend is None, f"backend: is {backend!r}, want None to export")
    for name in ("keep_window_size", "recent", "sinks"):
        require(isinstance(given[name], int), f"{name}: depends on the inputs, want an int")


def check_program(program: torch.export.ExportedProgram) -> None:
    """Refuse operators of this package, and options of them, that ONNX Runtime lacks."""
    graphs = (
        one for one in program.graph_module.modules() if isinstance(one, torch.fx.GraphModule)
    )
    for node in (node for one in graphs for node in one.graph.nodes):
        if getattr(node.target, "namespace", "") != ops.NAMESPACE:
            continue
        if node.target is ops.FUSED_OUT.op:
            check_attention({**dict(zip(ops.FUSED_OUT.arguments, node.args)), **node.kwargs})
        elif node.target not in {**TRANSLATIONS, **DECOMPOSITIONS}:
            name = node.target._opname.replace("_no_grad", "")
            want = INSTEAD.get(name, "flash_dma_attention()")
            raise NotImplementedError(f"{name}: has no operator for ONNX Runtime, want {want}")


def export(
    model: nn.Module,
    args: tuple[Any, ...],
    file: str | os.PathLike[str] | None = None,
    *,
    kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
    **options: Any,
) -> Any:
    """Export a model whose attention is flash_dma_attention() by torch.onnx.export(dynamo=True).

    Such a model has layers DynamicMaskAttention, or is a Doge with
    attn_implementation="dynamic_mask". The graph computes the same as the model in inference,
    without gradients. libfdma_ort runs its nodes of the domain "fdma". Dropout, packed sequences,
    kv_used, masks of pairs, gap, lifetimes, lse, probabilities, and attention without a window are
    refused.

    Args:
        model: in eval mode.
        args: example inputs.
        file: where to write the graph; None: it is only returned.
        kwargs: further example inputs, by name.
        dynamic_shapes: which axes of the inputs may have other lengths, as for
            torch.export.export(); None for none. An example should have length 2 or more there.
        options: further arguments of torch.onnx.export(), such as input_names and output_names.

    Returns:
        The torch.onnx.ONNXProgram.

    Raises:
        NotImplementedError: the model needs something that the operators for ONNX Runtime lack.
        ValueError: the model is in training mode.
        ImportError: a PyTorch whose exporter accepts no custom operators: 2.6 accepts them.

    Example:
        >>> layer = flash_dmattn.DynamicMaskAttention(hidden=64, heads=4, kv_heads=2, window=16)
        >>> program = flash_dmattn.onnx.export(layer.eval(), (torch.randn(2, 9, 64),))
        >>> [node.op_type for node in program.model.graph if node.domain == "fdma"]
        ['Attention']

    Source: torch.onnx.
    """
    if "custom_translation_table" not in inspect.signature(torch.onnx.export).parameters:
        raise ImportError(f"PyTorch: is {torch.__version__}, want 2.6 or later to export")
    if model.training:
        raise ValueError("model: is in training mode, want eval()")
    options = {"verbose": False, **options, "dynamo": True, "dynamic_shapes": dynamic_shapes}
    table = {**TRANSLATIONS, **(options.pop("custom_translation_table", None) or {})}
    with torch.no_grad(), warnings.catch_warnings():
        # the exporter warns where inputs share an axis
        warnings.filterwarnings("ignore", "# The axis name: ")
        program = torch.export.export(
            model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False
        )
        check_program(program)
        program = program.run_decompositions(DECOMPOSITIONS)
        path = None if file is None else os.fspath(file)
        return torch.onnx.export(program, args, path, custom_translation_table=table, **options)


def export_step(
    layer: DynamicMaskAttention,
    file: str | os.PathLike[str] | None = None,
    *,
    key_valid: bool = False,
    **options: Any,
) -> Any:
    """Export CachedLayer(layer), with any batch and any number of tokens.

    The inputs are x, the tensors of empty_cache() and, if asked for, key_valid; the outputs are out
    and the tensors of the cache with the new tokens, whose names begin with "new_".

    Args:
        layer: as in CachedLayer, in eval mode.
        file: as in export().
        key_valid: whether to add an input key_valid [batch, len] bool, false for padding.
        options: as in export().

    Returns:
        The torch.onnx.ONNXProgram.

    Raises:
        TypeError: another kind of layer.
        ValueError: a layer that has no cache, or is in training mode.
        ImportError: as export().

    Example:
        >>> layer = flash_dmattn.DynamicMaskAttention(hidden=64, heads=4, kv_heads=2, window=16)
        >>> program = flash_dmattn.onnx.export_step(layer.eval())
        >>> [node.op_type for node in program.model.graph if node.domain == "fdma"]
        ['Decode']

    Source: docs/algorithm.md, streams.
    """
    check_layer(layer)
    batch, length = torch.export.Dim("batch"), torch.export.Dim("len")
    weight = layer.k_proj.weight
    inputs = {"x": weight.new_zeros(2, 3, layer.hidden), **empty_cache(layer, 2)}
    shapes = {name: {0: batch, 1: length} if name == "x" else {0: batch} for name in inputs}
    if key_valid:
        inputs["key_valid"] = weight.new_ones(2, 3, dtype=torch.bool)
        shapes["key_valid"] = {0: batch, 1: length}
    names = {
        "input_names": list(inputs),
        "output_names": ["out", *(f"new_{name}" for name in CACHE)],
    }
    step = CachedLayer(layer).train(layer.training)
    return export(step, tuple(inputs.values()), file, dynamic_shapes=shapes, **{**names, **options})


def library_path() -> Path:
    """The path of libfdma_ort, for onnxruntime.SessionOptions.register_custom_ops_library().

    It is the file that the environment variable FDMA_ORT_LIBRARY names or, if that is not set, the
    one beside the package.

    Returns:
        Its path.

    Raises:
        ImportError: the file does not exist.

    Example:
        >>> flash_dmattn.onnx.library_path().name
        'libfdma_ort.so'
    """
    return _library.find("FDMA_ORT_LIBRARY", "libfdma_ort")
