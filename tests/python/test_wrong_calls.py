"""Every argument of every public callable, replaced by something else: each call is legal, or is
refused with the name of the argument and what is wanted."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

import flash_dma
import flash_dmattn
import numpy as np
import pytest
import torch
from flash_dmattn import distributed, rotary

# ---- a valid call of each ----

QUERY, KEY, LSE = (1, 6, 4, 16), (1, 6, 2, 16), (1, 4, 6)
HIDDEN = 64  # 4 heads of 16


class Call(NamedTuple):
    """A function, and valid arguments for it."""

    function: Callable[..., Any]
    given: dict[str, Any]
    signature: Callable[..., Any] | None = None  # has the arguments' names, if function has not

    def parameters(self) -> dict[str, inspect.Parameter]:
        found = inspect.signature(self.signature or self.function).parameters
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        return {name: one for name, one in found.items() if one.kind not in kinds}


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def rows() -> dict[str, Any]:
    return {"query": randn(*QUERY), "key": randn(*KEY), "value": randn(*KEY)}


def weights() -> dict[str, Any]:
    return {"dt_proj": randn(2, 32), "a_coef": randn(2), "dt_bias": randn(2)}


def keys() -> dict[str, Any]:
    return {"key_valid": torch.ones(1, 6).bool(), "kv_used": ints(6)}


def pairs() -> dict[str, Any]:
    return {"attn_mask": torch.ones(1, 1, 6, 6).bool(), "attn_bias": randn(1, 1, 6, 6)}


def new_cache(**options: Any) -> flash_dmattn.DynamicMaskCache:
    return flash_dmattn.DynamicMaskCache(1, 1, 2, 16, 4, **options)


def new_layer(**options: Any) -> flash_dmattn.DynamicMaskAttention:
    return flash_dmattn.DynamicMaskAttention(HIDDEN, 4, 2, 4, **options)


def with_drafts() -> flash_dmattn.DynamicMaskCache:
    cache = new_cache()
    cache.attend(0, **rows(), **weights(), draft=True)
    return cache


def scoring() -> dict[str, Call]:
    """Functions that compute or take scores."""
    package = flash_dmattn
    limits = package.DynamicMaskOptions(4, max_sequence_length=8, max_batch_size=1)
    dt_proj, a_coef, dt_bias = weights().values()
    target = {**rows(), "dt_proj": dt_proj, "key_valid": keys()["key_valid"], "heads": [0]}
    halves = {"out_a": randn(*QUERY), "lse_a": randn(*LSE), "out_b": randn(*QUERY)}
    fused = {**rows(), **weights(), **keys(), "sink_logit": randn(4)}
    packed = {**rows(), "starts": ints(0, 2, 6)}
    bytes_of = {"options": limits, **rows(), "dt_proj": dt_proj, "a_coef": a_coef}
    lived = {**rows(), "log_lifetime": randn(1, 2, 6), **learning(64), "sink_logit": randn(4)}
    return {
        "score": Call(package.score, {"value": randn(*KEY), **weights(), **keys()}),
        "select": Call(package.select, {"score": randn(1, 2, 6), "window": 3, **keys()}),
        "flash_dma_attention": Call(package.flash_dma_attention, fused),
        "flash_dma_attention of packed sequences": Call(
            package.flash_dma_attention, {**packed, **weights(), "causal": True}
        ),
        "score_target_loss": Call(package.score_target_loss, {**target, "recent": 2}),
        "lifetime_loss": Call(package.lifetime_loss, lived),
        "merge": Call(package.merge, {**halves, "lse_b": randn(*LSE)}),
        "workspace_bytes": Call(package.workspace_bytes, bytes_of),
        "get_available_backends": Call(package.get_available_backends, {}),
    }


def attending() -> dict[str, Call]:
    """Functions that attend by a mask or to all keys."""
    package = flash_dmattn
    named = {"q": randn(*QUERY), "k": randn(*KEY), "v": randn(*KEY)}
    query, key, value = named.values()
    lists = package.mask_lists(query, key, pairs()["attn_mask"])
    _, lse = package.attention(query, key, value)
    dropped = {"dropout_p": 0.5, "rng_state": torch.tensor([1, 2])}
    dense = {**rows(), **keys(), **pairs(), "bias": randn(1, 2, 6), "sink_logit": randn(4)}
    looked_at = {"query": query, "key": key, **keys()}
    packed = {
        **{name: one[0] for name, one in named.items()},
        "cu_seqlens_q": ints(0, 2, 6),
        "cu_seqlens_k": ints(0, 2, 6),
        "max_seqlen_q": 4,
        "max_seqlen_k": 4,
    }
    fwd = {**named, "zoh": randn(1, 2, 6, 6), "active_mask": torch.ones(1, 2, 6, 6)}
    return {
        "attention": Call(package.attention, {**dense, **dropped}),
        "attention of packed sequences": Call(
            package.attention, {**rows(), "starts": ints(0, 2, 6), "causal": True}
        ),
        "attention_probabilities": Call(
            package.attention_probabilities, {**looked_at, **pairs(), "lse": lse}
        ),
        "mask_lists": Call(package.mask_lists, {**looked_at, "attn_mask": pairs()["attn_mask"]}),
        "flash_dmattn_func": Call(
            package.flash_dmattn_func, {**named, **pairs(), "mask_lists": lists}
        ),
        "flash_dmattn_func_auto": Call(package.flash_dmattn_func_auto, {}),
        "flash_dmattn_varlen_func": Call(package.flash_dmattn_varlen_func, packed),
        "flash_dmattn_varlen_func with scores": Call(
            package.flash_dmattn_varlen_func, {**packed, **weights(), "sink_logit": randn(4)}
        ),
        "flash_dma.fwd": Call(flash_dma.fwd, {**fwd, "out": torch.empty(QUERY)}),
        **packed_rows(packed),
    }


def packed_rows(packed: dict[str, Any]) -> dict[str, Call]:
    """Functions that take query, key and value in one tensor."""
    package = flash_dmattn
    q, k, starts = packed["q"], packed["k"], packed["cu_seqlens_q"]
    sizes = {name: packed[name] for name in packed if name not in ("q", "k", "v")}
    kv, qkv = torch.stack((k, k), 1), torch.stack((k, k, k), 1)
    one = {"cu_seqlens": starts, "max_seqlen": 4}
    return {
        "flash_dmattn_qkvpacked_func": Call(
            package.flash_dmattn_qkvpacked_func, {"qkv": qkv[None], **pairs()}
        ),
        "flash_dmattn_kvpacked_func": Call(
            package.flash_dmattn_kvpacked_func, {"q": q[None], "kv": kv[None], **pairs()}
        ),
        "flash_dmattn_varlen_qkvpacked_func": Call(
            package.flash_dmattn_varlen_qkvpacked_func, {"qkv": qkv, **one}
        ),
        "flash_dmattn_varlen_kvpacked_func": Call(
            package.flash_dmattn_varlen_kvpacked_func, {"q": q, "kv": kv, **sizes}
        ),
    }


def records() -> dict[str, Call]:
    """Records, which are checked by the functions that take them."""
    package = flash_dmattn
    selection = package.select(randn(1, 2, 6), 3)._asdict()
    cache = new_cache().keys._asdict()

    def attend(**fields: Any) -> Any:
        return package.attention(**rows(), selection=package.Selection(**fields), causal=True)

    def decode(**fields: Any) -> Any:
        tokens = {name: x[:, :3] for name, x in rows().items()}
        return package.decode(**tokens, **weights(), cache=package.KeyCache(**fields))

    return {
        "Selection": Call(attend, selection, package.Selection),
        "KeyCache": Call(decode, cache, package.KeyCache),
        "DynamicMaskOptions": Call(package.DynamicMaskOptions, {}),
    }


def caches() -> dict[str, Call]:
    package, cache = flash_dmattn, new_cache()
    counted = {**rows(), **weights(), "index": ints(0), "n_tokens": ints(6)}
    decoded = {**counted, "commit": ints(2), "cache": cache.keys, "sink_logit": randn(4)}
    scored = {**rows(), "score": randn(1, 2, 6), "cache": cache.keys}
    padded = {**rows(), **weights(), "key_valid": keys()["key_valid"], "layer": 0}
    sizes = {"layers": 1, "batch": 1, "kv_heads": 2, "head_dim": 16, "window": 4}
    several = package.LayerCaches([new_layer(), new_layer(recent=0)], 1)
    attended = {"layer": 0, **counted, "sink_logit": randn(4)}
    numbers = {"layer": 0, "length": 3, "index": ints(0)}
    return {
        "decode": Call(package.decode, decoded),
        "decode with scores": Call(package.decode, scored),
        "DynamicMaskCache": Call(package.DynamicMaskCache, sizes),
        "DynamicMaskCache.attend": Call(cache.attend, attended),
        "DynamicMaskCache.attend with padding": Call(
            lambda **given: new_cache().attend(**given), padded, cache.attend
        ),
        "DynamicMaskCache.positions": Call(cache.positions, numbers),
        "DynamicMaskCache.crop": Call(cache.crop, {"count": 0}),
        "DynamicMaskCache.commit": Call(
            lambda **given: with_drafts().commit(**given), {"count": ints(1)}, cache.commit
        ),
        "DynamicMaskCache.reorder": Call(cache.reorder, {"beam_idx": ints(0)}),
        "DynamicMaskCache.drop": Call(cache.drop, {"b": 0}),
        "DynamicMaskCache.save": Call(cache.save, {"b": 0}),
        "DynamicMaskCache.restore": Call(cache.restore, {"b": 0, "state": cache.save(0)}),
        "DynamicMaskCache.reset": Call(cache.reset, {}),
        "DynamicMaskCache.get_seq_length": Call(cache.get_seq_length, {}),
        "LayerCaches": Call(package.LayerCaches, {"layers": [new_layer()], "batch": 1}),
        "LayerCaches.of_layer": Call(several.of_layer, {"layer": 1}),
        "LayerCaches.attend": Call(several.attend, attended, cache.attend),
        "LayerCaches.positions": Call(several.positions, numbers),
        "LayerCaches.crop": Call(several.crop, {"count": 0}),
        "LayerCaches.commit": Call(several.commit, {}),
        "LayerCaches.reorder": Call(several.reorder, {"beam_idx": ints(0)}),
        "LayerCaches.drop": Call(several.drop, {"b": 0}),
        "LayerCaches.save": Call(several.save, {"b": 0}),
        "LayerCaches.restore": Call(several.restore, {"b": 0, "state": several.save(0)}),
        "LayerCaches.reset": Call(several.reset, {}),
        "LayerCaches.get_seq_length": Call(several.get_seq_length, {}),
    }


def rotations() -> dict[str, Call]:
    numbers = {"base": 100.0, "inv_freq": None, "factor": 1.0, "first": 0, "device": None}
    norm = {"weight": randn(16), "eps": 1e-6, "nope_heads": 1, "interleaved": True}
    given = {"x": randn(*QUERY), "table": rotary.rotary_table(9, 6), "backend": None}
    return {
        "rotary_table": Call(
            rotary.rotary_table, {"length": 5, "dim": 6, **numbers, "dtype": torch.float32}
        ),
        "rotary_table of positions": Call(
            rotary.rotary_table, {"length": ints(3, 1), "dim": 6, "inv_freq": randn(3)}
        ),
        "rotate": Call(rotary.rotate, {**given, **norm, "positions": ints(*range(6))[None]}),
        "rotate of packed sequences": Call(
            rotary.rotate, {**given, "starts": ints(0, 2, 6), "offset": 1, "first": 1}
        ),
    }


def learning(words: int) -> dict[str, Any]:
    """Arguments of lifetime_loss(), but for rows."""
    head = torch.nn.Linear(words, 3)
    given = {"predict": lambda out, _: head(out.flatten(2)), "keys": 3, "progress": 0.5}
    return {**given, "weight": torch.ones(1, 6), "key_valid": keys()["key_valid"]}


def layers() -> dict[str, Call]:
    package, x = flash_dmattn, randn(1, 6, HIDDEN)
    gated = new_layer(lifetime_units=4)
    layer, cross = new_layer(), new_layer(causal=False, rope_base=None, memory_hidden=HIDDEN)
    cached = {"x": x, "cache": layer.new_cache(1), "layer": 0, "index": ints(0)}
    plain = {"x": x, "key_valid": keys()["key_valid"], "positions": torch.arange(6)[None]}
    rotated = {"x": randn(*QUERY), "positions": torch.arange(6)[None]}
    sizes = {"hidden": HIDDEN, "heads": 4, "kv_heads": 2, "window": 4}
    multihead = package.MultiheadAttention(HIDDEN, 4, batch_first=True)
    masks = {"key_padding_mask": torch.zeros(1, 6).bool(), "attn_mask": randn(6, 6)}
    same = {"query": x, "key": x, "value": x}
    return {
        "DynamicMaskAttention": Call(package.DynamicMaskAttention, sizes),
        "DynamicMaskAttention.forward": Call(layer.forward, plain),
        "DynamicMaskAttention.forward of packed sequences": Call(
            layer.forward, {"x": x, "starts": ints(0, 2, 6)}
        ),
        "DynamicMaskAttention.forward with a cache": Call(
            layer.forward, {**cached, "n_tokens": ints(3)}
        ),
        "DynamicMaskAttention.forward with memory": Call(cross.forward, {"x": x, "memory": x}),
        "DynamicMaskAttention.attend": Call(
            layer.attend, {**rows(), "key_valid": keys()["key_valid"], "starts": None}
        ),
        "DynamicMaskAttention.rotate_heads": Call(layer.rotate_heads, rotated),
        "DynamicMaskAttention.score_target_loss": Call(layer.score_target_loss, {"x": x}),
        "DynamicMaskAttention.lifetime_loss": Call(
            gated.lifetime_loss, {"x": x, **learning(HIDDEN)}
        ),
        "DynamicMaskAttention.calibrate_lifetimes": Call(
            gated.calibrate_lifetimes, {"x": x, "keys": 3}
        ),
        "DynamicMaskAttention.new_cache": Call(layer.new_cache, {"batch": 1}),
        "DynamicMaskAttention.reset_parameters": Call(layer.reset_parameters, {}),
        "MultiheadAttention": Call(
            package.MultiheadAttention, {"embed_dim": HIDDEN, "num_heads": 4, "window": 4}
        ),
        "MultiheadAttention.forward": Call(multihead.forward, {**same, **masks}),
        "MultiheadAttention.reset_parameters": Call(multihead.reset_parameters, {}),
    }


def plans() -> dict[str, Call]:
    sizes = {"hidden": HIDDEN, "layers": 1, "heads": 4, "kv_heads": 2}
    plan = flash_dmattn.HybridPlan(**sizes, keys=4)
    model = torch.nn.Sequential(flash_dmattn.DynamicMaskAttention(**plan.arguments(0)))
    trained = {"model": model, "rate": 1e-3, "weight_decay": 0.1, "score_rate": 1.0}
    return {
        "HybridPlan": Call(flash_dmattn.HybridPlan, {**sizes, "selecting": [0], "keys": 4}),
        "HybridPlan.arguments": Call(plan.arguments, {"layer": 0}),
        "HybridPlan.caches": Call(plan.caches, {"model": model, "batch": 1}),
        "HybridPlan.parameter_groups": Call(plan.parameter_groups, trained),
        "HybridPlan.targets": Call(plan.targets, {"model": model, "step": 0}),
        "HybridPlan.set_keys": Call(plan.set_keys, {"model": model, "keys": 4}),
    }


def ranks() -> dict[str, Call]:
    """Functions that need a process group; it has one rank."""
    given = {**rows(), **weights(), "key_valid": keys()["key_valid"], "sink_logit": randn(4)}
    dense = {**rows(), "key_valid": keys()["key_valid"], "sink_logit": randn(4)}
    of_ranks = distributed.context_parallel_attention
    return {
        "context_parallel_attention": Call(of_ranks, {**given, "window": 3, "lengths": [6]}),
        "ring_attention": Call(distributed.ring_attention, dense),
        "split_lengths": Call(distributed.split_lengths, {"total": 6, "ranks": 1}),
        "split_sequence": Call(distributed.split_sequence, {"tensor": randn(1, 6)}),
        "gather_sequence": Call(distributed.gather_sequence, {"tensor": randn(1, 6)}),
        "sequence_positions": Call(distributed.sequence_positions, {"length": 6}),
    }


def wrong_values(value: Any) -> Iterator[tuple[str, Any]]:
    """Replacements for `value`, each with a name."""
    yield "None", None
    yield "text", "text"
    yield "a list", [1.5]
    yield "an ndarray", np.ones((2, 3))
    yield "a number", 1.5
    if isinstance(value, torch.Tensor):
        yield "another rank", value[None]
        is_float = value.dtype.is_floating_point
        yield "another dtype", value.to(torch.complex64 if is_float else torch.float16)
        yield "another device", value.to("meta")


# ---- wrong calls ----

# Arguments that may differ from their annotation.
UNUSED = {"None", "text", "a list", "an ndarray", "a number"}
LEGAL = {
    # Part of flash-attn's order, but not needed here.
    ("flash_dmattn_varlen_func", "max_seqlen_q"): UNUSED,
    ("flash_dmattn_varlen_func", "max_seqlen_k"): UNUSED,
    ("flash_dmattn_varlen_func with scores", "max_seqlen_q"): UNUSED,
    ("flash_dmattn_varlen_func with scores", "max_seqlen_k"): UNUSED,
    ("flash_dmattn_varlen_qkvpacked_func", "max_seqlen"): UNUSED,
    # Not read without dt_proj.
    ("flash_dmattn_varlen_func", "keep_window_size"): UNUSED,
    ("flash_dmattn_varlen_func", "recent"): UNUSED,
    ("flash_dmattn_varlen_func", "sinks"): UNUSED,
    ("flash_dmattn_varlen_func", "bias_form"): UNUSED,
    ("flash_dmattn_varlen_func", "scope"): UNUSED,
    # Describes how the selection was made.
    ("Selection", "gap"): UNUSED,
    # A mask of 1.0 and 0.0.
    ("mask_lists", "attn_mask"): {"another dtype"},
    ("flash_dmattn_func", "attn_mask"): {"another dtype"},
    ("flash_dmattn_qkvpacked_func", "attn_mask"): {"another dtype"},
    ("flash_dmattn_kvpacked_func", "attn_mask"): {"another dtype"},
    ("MultiheadAttention.forward", "key_padding_mask"): {"another dtype"},
    # torch.nn's module takes None as well.
    ("MultiheadAttention.forward", "need_weights"): {"None"},
    ("MultiheadAttention.forward", "average_attn_weights"): {"None"},
    ("MultiheadAttention.forward", "is_causal"): {"None"},
    # Every tensor has tokens.
    ("split_sequence", "tensor"): {"another rank", "another dtype", "another device"},
    ("gather_sequence", "tensor"): {"another rank", "another dtype"},
}
ERRORS = (TypeError, ValueError, NotImplementedError)
# torch.nn's classes for shapes, and PyTorch's words for ranks.
OF_TORCH = (*ERRORS, AssertionError, RuntimeError)
WANTED = re.compile(r"want|supported|which no kernel supports|'s is |should be|expected")


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


MAKERS = (scoring, attending, rotations, records, caches, layers, plans)
CALLS: dict[str, Call] = {name: call for make in MAKERS for name, call in make().items()}
CALLS.update(ranks())


def is_legal(name: str, argument: str, annotation: str, kind: str) -> bool:
    by_annotation = {"None": "None" in annotation, "a number": "float" in annotation}
    return by_annotation.get(kind, False) or kind in LEGAL.get((name, argument), ())


def fault_of(name: str, argument: str, value: object, may_pass: bool) -> str | None:
    """The fault in the call's answer to this value of an argument; None if it is right."""
    call = CALLS[name]
    errors = OF_TORCH if name == "MultiheadAttention.forward" else ERRORS
    try:
        call.function(**{**call.given, argument: value})
    except errors as error:
        message = str(error)
        is_named = re.search(rf"\b{argument}\b", message) is not None
        return None if is_named and WANTED.search(message) else repr(error)
    except Exception as error:
        return repr(error)
    return None if may_pass else "is not refused"


def of_transformers(name: str) -> Call:
    transformers = pytest.importorskip("transformers")
    ours = importlib.import_module("flash_dmattn.transformers")
    sizes = {"hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": 1}
    sizes = {**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
    if name == "convert":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        return Call(ours.convert, {"model": model, "selecting": [0], "keys": 4})
    config = transformers.DogeConfig if name == "DogeCache" else ours.HybridConfig
    return Call(getattr(ours, name), {"config": config(**sizes)})


@pytest.mark.parametrize("name", [*CALLS, "DogeCache", "HybridCache", "convert"])
def test_wrong_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name not in CALLS:
        monkeypatch.setitem(CALLS, name, of_transformers(name))
    call = CALLS[name]
    call.function(**call.given)
    faults = {}
    for argument, parameter in call.parameters().items():
        for kind, value in wrong_values(call.given.get(argument)):
            may_pass = is_legal(name, argument, str(parameter.annotation), kind)
            fault = fault_of(name, argument, value, may_pass)
            if fault is not None:
                faults[argument, kind] = fault
    assert not faults


@pytest.mark.parametrize(("name", "argument"), LEGAL)
def test_what_is_legal(name: str, argument: str) -> None:
    values = dict(wrong_values(CALLS[name].given.get(argument)))
    for kind in LEGAL[name, argument] - {"None"}:
        CALLS[name].function(**{**CALLS[name].given, argument: values[kind]})


def public_methods(of: type) -> set[str]:
    """The public methods of a class, with the class itself."""
    own = (name for name, one in vars(of).items() if callable(one) and not name.startswith("_"))
    return {of.__name__, *(f"{of.__name__}.{name}" for name in own if name != "extra_repr")}


def test_every_callable_is_called() -> None:
    found = {name.split(" with ")[0].split(" of ")[0] for name in CALLS}
    functions = {*flash_dmattn.__all__, *distributed.__all__, *rotary.__all__, "flash_dma.fwd"}
    classes = ("DynamicMaskAttention", "DynamicMaskCache", "LayerCaches", "MultiheadAttention")
    classes = (*classes, "HybridPlan")
    methods = set().union(*(public_methods(getattr(flash_dmattn, name)) for name in classes))
    assert found == functions | methods


def test_names_of_the_package() -> None:
    names = dir(flash_dmattn)
    assert set(flash_dmattn.__all__) < set(names)
    assert {"cache", "ops", "nn", "version"}.isdisjoint(names)
    assert all(hasattr(flash_dmattn, name) for name in flash_dmattn.__all__)
