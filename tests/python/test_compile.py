"""The operators under opcheck, torch.compile, fake tensors and meta tensors."""

from __future__ import annotations

import itertools
from typing import Any, Callable, Tuple

import flash_dmattn
import pytest
import torch
import torch._dynamo.testing
from cases import (
    DEVICES,
    FULL,
    FUNCTIONS,
    Tensors,
    fused,
    gradients,
    make_fused,
    merged,
    results,
    ruled,
    stepwise,
)
from evaluate import assert_same
from flash_dmattn import ops
from torch._subclasses.fake_tensor import FakeTensorMode

Arguments = Tuple[Any, ...]
DENSE = {"bias": None, "expiry": None, "slot": None, "window": 0, "wants_dbias": False}
DENSE.update(recent=0, sinks=0)
PAIRS = {"attn_mask": torch.arange(12).remainder(5)[None, None, None] != 3}
OPTIONAL = ("sink_logit", "rng_state", "attn_mask", "attn_bias", "mask_lists")
PAIRS.update(attn_bias=torch.linspace(-1, 1, 288).view(1, 2, 12, 12), wants_dattn_bias=True)


def make_tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [tensor.detach() for tensor in make_fused(12, dtype=dtype, head_dim=16)]


def make_rules() -> dict[str, tuple[ops.Operator, dict[str, Any]]]:
    return {
        "select global": (ops.SELECT, {"scope": "global", "recent": 0, "backend": "reference"}),
        "select by score alone": (ops.SELECT, {"recent": 0, "sinks": 0}),
        "select with a gap": (ops.SELECT, {"gap": 1.5}),
        "fused with a gap": (ops.FUSED, {"gap": 1.5}),
    }


def make_values() -> dict[str, Any]:
    """An argument of operators for each name."""
    query, key, value, dt_proj, a_coef = make_tensors()
    score = torch.randn(2, 2, 12, generator=torch.Generator().manual_seed(1))
    dlse = torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(2))
    expiry, slot = flash_dmattn.select(score, 4, recent=3, sinks=2)[:2]
    given = {"bias": score, "expiry": expiry, "slot": slot, "window": 4, "causal": True}
    given.update(recent=3, sinks=2, dropout_p=0.0, gap=0.0, batch_invariant=False)
    attended = ops.ATTENTION.op(query, key, value, score, *8 * [None], expiry, slot, *OPTIONS)
    return {
        "query": query,
        "key": key,
        "value": value,
        "dt_proj": dt_proj,
        "a_coef": a_coef,
        **{"key_valid": torch.arange(12).expand(2, 12) % 5 != 1, "score": score, **given},
        **dict.fromkeys(("starts", "kv_used", "dt_bias", *OPTIONAL)),
        "scope": "causal",
        "bias_form": "exp",
        "keep_window_size": 4,
        "backend": None,
        "softmax_scale": 0.5,
        "softcap": 2.0,
        "deterministic": False,
        "wants_dbias": True,
        "wants_dattn_bias": False,
        **dict(zip(("out", "lse", "out_a", "lse_a", "out_b", "lse_b"), 3 * attended)),
        "dout": attended[0].cos(),
        "dlse": dlse,
        "dbias": dlse[:, :2],
    }


def operators() -> dict[str, tuple[Callable[..., Any], Arguments]]:
    """Operators with their arguments, by name from `values`."""
    values = make_values()
    query, key, value = values["query"], values["key"], values["value"]
    packed = {"query": query[:1], "key": key[:1], "value": value[:1], "key_valid": None}
    packed.update(starts=torch.tensor([0, 5, 12], dtype=torch.int32))
    used, dt_bias = {"kv_used": torch.tensor([5, 12]).int()}, {"dt_bias": torch.tensor([0.5, -2.0])}
    in_bfloat16 = dict(zip(ops.FUSED.arguments, make_tensors(torch.bfloat16)))
    cases = {
        "score": (ops.SCORE, {}),
        "score without bias": (ops.SCORE, {"bias_form": "none", "key_valid": None}),
        "score with dt_bias": (ops.SCORE, dt_bias),
        "select": (ops.SELECT, {}),
        "dense": (ops.ATTENTION, DENSE),
        "selected": (ops.ATTENTION, {"key_valid": None}),
        "fused": (ops.FUSED, {"backend": "reference"}),
        "fused without bias": (ops.FUSED, {"bias_form": "none"}),
        "fused with dt_bias": (ops.FUSED, dt_bias),
        "fused with dt_bias, without bias": (ops.FUSED, {**dt_bias, "bias_form": "none"}),
        "fused with dt_bias, out alone": (ops.FUSED_OUT, dt_bias),
        "fused, out alone": (ops.FUSED_OUT, {}),
        "fused in bfloat16": (ops.FUSED, in_bfloat16),
        "fused and packed": (ops.FUSED, packed),
        "score of few keys": (ops.SCORE, used),
        "select of few keys": (ops.SELECT, used),
        "fused over few keys": (ops.FUSED, used),
        "merge": (ops.MERGE, {}),
        **make_rules(),
        **make_masks(),
        **make_sinks(),
        **make_dropout(),
        **make_streams(),
        **make_rotations(),
        "score's backward": (ops.SCORE_BACKWARD, {}),
        "selected's backward": (ops.ATTENTION_BACKWARD, {}),
        "dense's backward": (ops.ATTENTION_BACKWARD, DENSE),
        "dense's backward over few keys": (ops.ATTENTION_BACKWARD, {**DENSE, **used}),
        "fused's backward": (ops.FUSED_BACKWARD, {}),
        "score's backward with dt_bias": (ops.SCORE_BACKWARD, dt_bias),
        "fused's backward with dt_bias": (ops.FUSED_BACKWARD, dt_bias),
        "merge's backward": (ops.MERGE_BACKWARD, {}),
    }
    return {
        name: (operator.op, tuple({**values, **changes}[one] for one in operator.arguments))
        for name, (operator, changes) in cases.items()
    }


def make_dropout() -> dict[str, tuple[ops.Operator, dict[str, Any]]]:
    dropout = {"dropout_p": 0.3, "rng_state": torch.tensor([5, 1 << 40])}
    return {
        "dense with dropout": (ops.ATTENTION, {**DENSE, **dropout}),
        "selected with dropout": (ops.ATTENTION, dropout),
        "fused with dropout": (ops.FUSED, dropout),
        "fused with dropout, out alone": (ops.FUSED_OUT, dropout),
        "probabilities with dropout, alone": (ops.PROBABILITIES, dropout),
        "selected's backward with dropout": (ops.ATTENTION_BACKWARD, dropout),
        "fused's backward with dropout": (ops.FUSED_BACKWARD, dropout),
    }


def make_rotations() -> dict[str, tuple[ops.Operator, dict[str, Any]]]:
    x = torch.randn(2, 12, 3, 16, generator=torch.Generator().manual_seed(3))
    table = {"row_positions": torch.arange(20).int(), "inv_freq": None, "dim": 10, "base": 100.0}
    table.update(factor=1.0, wide=False)
    numbers = {"eps": 0.0, "first": 0, "offset": 0, "nope_heads": 1, "interleaved": False}
    given = {"x": x, "rotary": ops.ROTARY_TABLE.op(*table.values(), None), "weight": None}
    given.update(drotated=x.cos(), positions=None, starts=None, wants_dweight=False, **numbers)
    positions = torch.arange(12).flip(0)[None].int()
    normed = {**given, "weight": x[0, 0, 0], "eps": 0.1, "positions": positions}
    return {
        "rotary table, alone": (ops.ROTARY_TABLE, table),
        "rotate": (ops.ROTATE, given),
        "rotate after a norm": (ops.ROTATE, normed),
        "rotate's backward": (ops.ROTATE_BACKWARD, given),
        "rotate's backward after a norm": (ops.ROTATE_BACKWARD, {**normed, "wants_dweight": True}),
    }


def make_masks() -> dict[str, tuple[ops.Operator, dict[str, Any]]]:
    query, key, value, *_ = make_tensors(torch.bfloat16)
    in_bfloat16 = {"query": query, "key": key, "value": value, "out": query, "dout": query}
    in_bfloat16.update(PAIRS, attn_bias=PAIRS["attn_bias"].bfloat16())
    return {
        "probabilities, dense, alone": (ops.PROBABILITIES, DENSE),
        "probabilities, selected, alone": (ops.PROBABILITIES, {"key_valid": None}),
        "probabilities, masked, alone": (ops.PROBABILITIES, {**DENSE, **PAIRS}),
        "dense with a mask": (ops.ATTENTION, {**DENSE, **PAIRS}),
        "selected with a mask": (ops.ATTENTION, PAIRS),
        "selected's backward with a mask": (ops.ATTENTION_BACKWARD, PAIRS),
        "selected's backward in bfloat16": (ops.ATTENTION_BACKWARD, in_bfloat16),
    }


def make_sinks() -> dict[str, tuple[ops.Operator, dict[str, Any]]]:
    """Operators with sink logits, one of them over few keys."""
    sinks = {"sink_logit": torch.tensor([0.5, -2.0, 3.0, 0.0])}
    used = {"kv_used": torch.tensor([5, 12], dtype=torch.int32)}
    return {
        "dense over few keys": (ops.ATTENTION, {**DENSE, **sinks, **used}),
        "selected with sink logits": (ops.ATTENTION, sinks),
        "fused with sink logits": (ops.FUSED, sinks),
        "fused with sink logits, out alone": (ops.FUSED_OUT, sinks),
        "selected's backward with sink logits": (ops.ATTENTION_BACKWARD, sinks),
        "fused's backward with sink logits": (ops.FUSED_BACKWARD, sinks),
    }


def make_streams() -> dict[str, tuple[ops.Operator, dict[str, Any]]]:
    """Decode, prefill, and their inputs: three tokens after seven that two sequences have
    passed."""
    query, key, value, dt_proj, a_coef = make_tensors()
    cache = flash_dmattn.DynamicMaskCache(1, 2, 2, 16, 4, recent=3, sinks=2)
    cache.attend(0, query[:, :7], key[:, :7], value[:, :7], dt_proj, a_coef)
    names = ("key", "value", "bias", "score", "position", "seen")
    held = dict(zip(names, cache.keys))
    numbers = {"index": [1, 0], "n_tokens": [3, 2], "commit": [2, 0]}
    given = {
        "query": query[:, 7:10],
        "key": key[:, 7:10],
        "value": value[:, 7:10],
        "score": None,
        **dict.fromkeys(("key_valid", "sink_logit")),
        **{name: torch.tensor(one, dtype=torch.int32) for name, one in numbers.items()},
        **{f"cache_{name}": one for name, one in held.items()},
        "cache_page_table": None,
        **{f"{name}_carried": held[name] for name in names[:3]},
        **{f"{name}_in": held[name] for name in names[3:]},
    }
    absent = [f"{name}_carried" for name in names[:3]] + [f"{name}_in" for name in names[3:]]
    first = {**given, **dict.fromkeys(absent)}
    selection = flash_dmattn.select(torch.randn(2, 2, 3), 4, recent=3, sinks=2)
    stored = {**given, "expiry_all": selection.expiry, "slot_all": selection.slot}
    stored["score"] = torch.randn(2, 2, 3)
    copied = {**given, "copy_from": given["index"], "copy_to": given["index"].flip(0)}
    by_score = {**given, "dt_proj": None, "a_coef": None, "score": torch.randn(2, 2, 3)}
    without_bias = {**given, "bias_form": "none", "bias_carried": None}
    pools = {f"cache_{name}": torch.randn(8, 2, 2, 16) for name in names[:2]}
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    in_pages = {**by_score, **pools, "cache_page_table": table}
    return {
        "decode, committing": (ops.DECODE, given),
        "decode, by scores alone": (ops.DECODE, by_score),
        "decode in pages, committing": (ops.DECODE, in_pages),
        "prefill, committing": (ops.PREFILL, given),
        "prefill of empty sequences, committing": (ops.PREFILL, first),
        "store, committing": (ops.CACHE_STORE, stored),
        "store without bias, committing": (ops.CACHE_STORE, {**stored, "bias_form": "none"}),
        "copy, committing": (ops.CACHE_COPY, copied),
        "prefill, committing without bias": (ops.PREFILL, without_bias),
    }


OPTIONS = (
    4,
    3,
    2,
    "causal",
    True,
    0.5,
    2.0,
    0.0,
    False,
    None,
)  # options of ops.ATTENTION, from `window` on
OPERATORS = operators()


def learning(arguments: Arguments) -> Arguments:
    """The same arguments; floating-point tensors require gradients."""
    return tuple(
        x.detach().clone().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x
        for x in arguments
    )


# Operators without a gradient: selections, gradients, out alone, and those that write to a cache.
WITHOUT_GRADIENT = [
    name
    for name in OPERATORS
    if any(one in f"{name} " for one in ("select ", "backward", "alone", "committing"))
]


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str) -> None:
    operator, arguments = OPERATORS[name]
    every = (arguments,) if name in WITHOUT_GRADIENT else (arguments, learning(arguments))
    for given in every if FULL else every[-1:]:
        results = torch.library.opcheck(operator, given)
        assert len(results) == 4 and set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", OPERATORS)
def test_fake_results_are_like_real_ones(name: str) -> None:
    operator, arguments = OPERATORS[name]
    real = operator(*arguments)
    with FakeTensorMode() as mode:
        fake = operator(
            *(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments)
        )
    meta = operator(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments))
    if not isinstance(real, tuple):
        real, fake, meta = (real,), (fake,), (meta,)
    if real == (None,):
        assert fake == meta == real
        return
    assert len(real) == len(fake) == len(meta)
    for one, *others in zip(real, fake, meta):
        for other in others:
            assert (other.shape, other.dtype) == (one.shape, one.dtype)
            assert other.stride() == one.stride()


def test_fake_kernels_check_ranks() -> None:
    query, *rest = (tensor.to("meta") for tensor in make_tensors())
    with pytest.raises(ValueError, match="query: rank is 3, want 4"):
        flash_dmattn.flash_dma_attention(query[0], *rest)


Run = Callable[..., Tensors]


# Without FDMA_FULL=1 mostly graphs with gradients, of which forward is a part. The tests below take
# aot_eager.
CHOSEN = [(gradients, one, "inductor") for one in FUNCTIONS]
CHOSEN += [(results, fused, "inductor"), (gradients, merged, "aot_eager")]
if FULL:
    CHOSEN = list(itertools.product((results, gradients), FUNCTIONS, ("aot_eager", "inductor")))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("run", "function", "backend"), CHOSEN)
def test_one_graph(
    run: Run, function: Callable[..., Any], backend: str, device: str, deterministic: None
) -> None:
    """No graph breaks. Gradients in 16 bits that inductor adds are rounded once less."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    tensors = make_fused(60, 70, device=device)
    found, expected = run(compiled, tensors), run(function, tensors)
    if run is results or device == "cpu":
        assert_same(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("device", DEVICES)
def test_autotuned_layers(device: str, deterministic: None) -> None:
    """mode="max-autotune" tries kernels for the projections around the operators."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    kind = {"device": device, "dtype": dtype}
    layer = flash_dmattn.DynamicMaskAttention(64, 4, 2, window=16, recent=4, **kind)
    torch.nn.init.normal_(layer.A)
    compiled = torch.compile(layer, fullgraph=True, mode="max-autotune")
    allowed = {"rtol": 1e-4, "atol": 1e-4} if device == "cpu" else {"rtol": 0.05, "atol": 0.05}
    for _ in range(3):  # on a device the third call replays a CUDA graph
        x = torch.randn(2, 70, 64, **kind)
        torch.compiler.cudagraph_mark_step_begin()
        wanted, found = (run(x).float().square().mean() for run in (layer, compiled))
        torch.testing.assert_close(found, wanted, **allowed)
        pairs = (torch.autograd.grad(loss, layer.parameters()) for loss in (wanted, found))
        for one, other in zip(*pairs):
            torch.testing.assert_close(other, one, **allowed)


@pytest.mark.parametrize(
    ("run", "function"),
    [(results, fused), *((gradients, function) for function in (fused, stepwise, ruled))],
)
def test_one_graph_for_all_lengths(run: Run, function: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for length in (12, 131, 7):
        tensors = make_fused(length)
        assert_same(run(compiled, tensors), run(function, tensors))
        frames.append(counter.frame_count)
    assert frames[0] > 0 and len(set(frames)) == 1, "compiled again for another length"


@pytest.mark.parametrize("function", [fused, stepwise])
def test_one_graph_for_all_numbers_of_keys(function: Callable[..., Any]) -> None:
    """`recent` and `sinks` may be inputs of the graph."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    tensors, frames = [tensor.detach() for tensor in make_fused(60)], []
    for recent, sinks in ((5, 2), (9, 3), (17, 7)):
        rules = {"recent": recent, "sinks": sinks}
        assert_same(compiled(*tensors, **rules), function(*tensors, **rules))
        frames.append(counter.frame_count)
    assert frames[0] > 0 and len(set(frames)) == 1, "compiled again for another number"
