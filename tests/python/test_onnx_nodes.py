"""libfdma_ort: its nodes give the same bits as the package's calls, and refuse the same
arguments."""

from __future__ import annotations

import ctypes
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flash_dmattn
import onnx_sessions as sessions
import pytest
import torch
from onnx_sessions import CACHE, LIBRARY, Tensors, make_model, make_node, run, run_node
from programs import output_of
from programs import run as run_program
from samples import combinations

import flash_dmattn.onnx as ours  # isort: skip

WINDOW, RECENT = 12, 4
RULES = {"window": WINDOW, "recent": RECENT}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make_states(q_len: int, dtype: torch.dtype = torch.float32, batch: int = 2) -> Tensors:
    """q, k and v, and the weights of scores, in the order of a node's inputs."""
    torch.manual_seed(q_len)
    states = {
        "q": torch.randn(batch, q_len, 4, 16),
        "k": torch.randn(batch, q_len, 2, 16),
        "v": torch.randn(batch, q_len, 2, 16),
        "dt_proj": torch.randn(2, 32) / 5,
        "a": torch.randn(2),
    }
    return {name: tensor.to(dtype) for name, tensor in states.items()}


def make_optional(q_len: int) -> Tensors:
    key_valid = torch.ones(2, q_len, dtype=torch.bool)
    key_valid[0, :9] = False
    return {
        "dt_bias": torch.randn(2),
        "key_valid": key_valid,
        "sink_logit": torch.randn(4),
    }


def make_cache(dtype: torch.dtype = torch.float32) -> Tensors:
    sizes = {"hidden": 64, "heads": 4, "kv_heads": 2, "dtype": dtype, **RULES}
    layer = flash_dmattn.DynamicMaskAttention(**sizes)
    return dict(zip(CACHE, ours.empty_cache(layer, 2).values()))


def assert_equal(found: list[torch.Tensor], wanted: Any) -> None:
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


# ---- attention ----


@pytest.mark.parametrize(("dtype", "wide_weights"), combinations(DTYPES, [False, True]))
def test_attention(dtype: torch.dtype, wide_weights: bool) -> None:
    states = make_states(50, dtype)
    if wide_weights:
        states = {**states, "dt_proj": states["dt_proj"].float(), "a": states["a"].float()}
    wanted = flash_dmattn.flash_dma_attention(*states.values(), WINDOW, causal=True, recent=RECENT)
    assert_equal(run_node("Attention", states, causal=1, **RULES), [wanted])


@pytest.mark.parametrize(
    ("bias_form", "causal"), combinations(["exp", "linear", "none"], [True, False])
)
def test_options(bias_form: str, causal: bool) -> None:
    states, optional = make_states(50), make_optional(50)
    options = {"recent": RECENT if causal else 0, "sinks": 2, "bias_form": bias_form}
    options["softcap"] = 20.0
    wanted = flash_dmattn.flash_dma_attention(
        *states.values(), WINDOW, causal=causal, softmax_scale=0.5, **options, **optional
    )
    attributes = {"window": WINDOW, "causal": int(causal), "scale": 0.5, **options}
    assert_equal(run_node("Attention", {**states, **optional}, **attributes), [wanted])


@pytest.mark.parametrize("name", ["dt_bias", "key_valid", "sink_logit"])
def test_each_optional_input_counts(name: str) -> None:
    states, optional = make_states(50), make_optional(50)
    given = {**dict.fromkeys(optional), name: optional[name]}
    wanted = flash_dmattn.flash_dma_attention(*states.values(), WINDOW, causal=True, **given)
    found = run_node("Attention", {**states, **given}, window=WINDOW, causal=1)
    assert_equal(found, [wanted])
    assert not torch.equal(found[0], run_node("Attention", states, window=WINDOW, causal=1)[0])


def test_global_scope_under_a_causal_mask() -> None:
    states = make_states(50)
    options = {"causal": True, "scope": "global"}
    wanted = flash_dmattn.flash_dma_attention(*states.values(), WINDOW, **options)
    found = run_node("Attention", states, window=WINDOW, causal=1, scope="global")
    assert_equal(found, [wanted])
    assert not torch.equal(found[0], run_node("Attention", states, window=WINDOW, causal=1)[0])


def test_a_key_valid_of_bytes() -> None:
    states, optional = make_states(50), make_optional(50)
    given = {"dt_bias": None, "key_valid": optional["key_valid"]}
    in_bytes = {**given, "key_valid": optional["key_valid"].to(torch.uint8)}
    wanted = run_node("Attention", {**states, **given}, window=WINDOW, causal=1)
    assert_equal(run_node("Attention", {**states, **in_bytes}, window=WINDOW, causal=1), wanted)


# ---- attention over a cache ----


def call_in_torch(states: Tensors, cache: Tensors, optional: Any = (None,) * 3) -> Any:
    """The package's own call over the cache."""
    rest = (*optional, WINDOW, RECENT, 0, "exp", 0.0, 0.0)
    return ours.CACHED_ATTENTION(*states.values(), *cache.values(), *rest)


@pytest.mark.parametrize(
    ("dtype", "lengths"), combinations(DTYPES, [(1, 1, 5), (64, 1), (65, 1, 70)])
)
def test_decode(dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    """Prompts and single tokens, each over the cache before."""
    found = wanted = make_cache(dtype)
    for length in lengths:
        states = make_states(length, dtype)
        out, *after = run_node("Decode", {**states, **found}, **RULES)
        right, *right_after = call_in_torch(states, wanted)
        assert_equal([out, *after], [right, *right_after])
        found, wanted = dict(zip(CACHE, after)), dict(zip(CACHE, right_after))
    assert found["cache_seen"].tolist() == [sum(lengths)] * 2


@pytest.mark.parametrize("length", [30, 80])
def test_padding_of_a_prompt(length: int) -> None:
    states, cache, optional = make_states(length), make_cache(), make_optional(length)
    found = run_node("Decode", {**states, **cache, **optional}, **RULES)
    assert_equal(found, call_in_torch(states, cache, optional.values()))
    positions = found[1 + CACHE.index("cache_position")][0]
    assert positions.max() == length - 1 and not ((positions >= 0) & (positions < 9)).any()


def run_chain(known: bool, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """The outputs of a chain of Decode nodes and, last, the number of tokens so far. If the shapes
    of caches between nodes are known, ONNX Runtime lets a node reuse their memory."""
    cache = make_cache()
    inputs = {f"{name}0": tensor for name, tensor in cache.items()}
    nodes, outputs, values = [], {}, {}
    for step, length in enumerate(lengths):
        states = {f"{name}_{step}": tensor for name, tensor in make_states(length).items()}
        inputs.update(states)
        names = [*states, *(f"{name}{step}" for name in cache)]
        after = {f"{name}{step + 1}": tensor for name, tensor in cache.items()}
        nodes.append(make_node("Decode", names, [f"out{step}", *after], RULES))
        outputs[f"out{step}"] = states[f"q_{step}"]
        values.update(after)
    last = f"cache_seen{len(lengths)}"
    outputs[last] = values.pop(last)
    model = make_model(nodes, inputs, outputs, values if known else {})
    return run(sessions.open_session(model), inputs)


def test_memory_that_is_reused_gives_the_same_bits() -> None:
    lengths = (5, 70, 1, 1)
    found = run_chain(True, lengths)
    assert_equal(found, run_chain(False, lengths))
    assert found[-1].tolist() == [sum(lengths)] * 2


def test_a_cache_bound_to_one_memory() -> None:
    """A session whose inputs and outputs are the same tensors updates them in place."""
    value = sessions.onnxruntime.OrtValue.ortvalue_from_numpy
    cache = make_cache()
    states = make_states(3)
    outputs = {"out": states["q"], **{f"new_{name}": tensor for name, tensor in cache.items()}}
    node = make_node("Decode", [*states, *cache], list(outputs), RULES)
    session = sessions.open_session(make_model([node], {**states, **cache}, outputs, {}))
    bound = {name: value(tensor.clone().numpy()) for name, tensor in cache.items()}
    for _ in range(9):
        binding = session.io_binding()
        for name, tensor in states.items():
            binding.bind_cpu_input(name, tensor.numpy())
        binding.bind_output("out")
        for name, one in bound.items():
            binding.bind_ortvalue_input(name, one)
            binding.bind_ortvalue_output(f"new_{name}", one)
        session.run_with_iobinding(binding)
        out = torch.from_numpy(binding.copy_outputs_to_cpu()[0])
        right, *after = call_in_torch(states, cache)
        cache = dict(zip(CACHE, after))
        assert_equal([out], [right])
    assert_equal([torch.from_numpy(one.numpy()) for one in bound.values()], cache.values())


# ---- what is refused ----

REFUSED = {
    "window: is 0, want 1 or more": {"window": 0},
    "window: is not an int, want one": {"window": 2.5},
    "recent: is -1, want 0 or more": {"recent": -1},
    "softcap: is not a float, want one": {"softcap": "much"},
    "scale: is -1, want a finite number": {"scale": -1.0},
    "bias_form: is 'cubic', want 'exp', 'linear' or 'none'": {"bias_form": "cubic"},
    "scope: is 'far', want 'default', 'causal' or 'global'": {"scope": "far"},
    "q: rank is 3, want 4": {"q": torch.zeros(2, 50, 16)},
    "k: axis 3 has 24 elements, want 16": {"k": torch.zeros(2, 50, 2, 24)},
    "a: axis 0 has 3 elements, want 2": {"a": torch.zeros(3)},
    "a: rank is 0, want 1 to 4": {"a": torch.zeros(())},
    "a: rank is 5, want 1 to 4": {"a": torch.zeros(1, 1, 1, 1, 2)},
    "a: dtype is float64, supported: float32": {"a": torch.zeros(2).double()},
    "key_valid: axis 1 has 49 elements, want 50": {"key_valid": torch.zeros(2, 49).bool()},
    "key_valid: dtype is int64, supported: uint8": {"key_valid": torch.zeros(2, 50).long()},
}


def refusal(name: str, inputs: Tensors, attributes: dict[str, Any]) -> str:
    with pytest.raises(Exception) as refused:
        run_node(name, inputs, **attributes)
    return str(refused.value)


@pytest.mark.parametrize("message", REFUSED)
def test_attention_refuses(message: str) -> None:
    changes = REFUSED[message]
    tensors = {name: one for name, one in changes.items() if isinstance(one, torch.Tensor)}
    numbers = {name: one for name, one in changes.items() if name not in tensors}
    inputs = {**make_states(50), "dt_bias": None, "key_valid": None, **tensors}
    assert message in refusal("Attention", inputs, {"window": 8, "causal": 1, **numbers})


REFUSED_CACHES = {
    "cache_k: rank is 3, want 4; cache_k is [batch, kv_heads, rows, head_dim]": {
        "cache_k": torch.zeros(2, 2, 16)
    },
    "cache_k: axis 0 has 3 elements, want the batch, 2": {"cache_k": torch.zeros(3, 2, 16, 16)},
    "axis 2 has 9 elements, want 16": {"cache_bias": torch.zeros(2, 2, 9)},
    "axis 3 has 8 elements, want 16": {"cache_v": torch.zeros(2, 2, 16, 8)},
    "seen: element 0 is 2147483646, want 0 to": {
        "cache_seen": torch.full((2,), 2**31 - 2, dtype=torch.int32)
    },
}


@pytest.mark.parametrize(("message", "length"), combinations(REFUSED_CACHES, [3, 70]))
def test_decode_refuses(message: str, length: int) -> None:
    inputs = {**make_states(length), **make_cache(), **REFUSED_CACHES[message]}
    assert message in refusal("Decode", inputs, RULES)


@pytest.mark.parametrize("length", [3, 70])
def test_decode_refuses_rows_that_are_not_those_of_its_rules(length: int) -> None:
    inputs = {**make_states(length), **make_cache()}
    assert "16 elements, want" in refusal("Decode", inputs, {**RULES, "recent": 3})


def test_runs_that_overlap() -> None:
    """Several threads may run one session at a time."""
    every = [make_states(length) for length in (40, 70, 100, 130)]
    node = make_node("Attention", list(every[0]), ["out"], {**RULES, "causal": 1})
    states = every[0]
    model = make_model([node], states, {"out": states["q"]}, {}, any_length=True)
    session = sessions.open_session(model)
    options = {"causal": True, "recent": RECENT}
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            for found, one in zip(threads.map(lambda given: run(session, given), every), every):
                wanted = flash_dmattn.flash_dma_attention(*one.values(), WINDOW, **options)
                assert_equal(found, [wanted])


def test_a_run_after_a_refusal() -> None:
    """A session that has refused a run still works."""
    cache, states = make_cache(), make_states(3)
    outputs = {"out": states["q"], **{f"new_{name}": tensor for name, tensor in cache.items()}}
    node = make_node("Decode", [*states, *cache], list(outputs), RULES)
    session = sessions.open_session(make_model([node], {**states, **cache}, outputs, {}))
    wrong = {**cache, "cache_seen": torch.full((2,), -1, dtype=torch.int32)}
    with pytest.raises(Exception, match="seen: element 0 is -1"):
        run(session, {**states, **wrong})
    assert_equal(run(session, {**states, **cache}), call_in_torch(states, cache))


# ---- the library ----


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
def test_the_library_exports_one_function() -> None:
    lines = output_of(run_program("nm", "-D", "--defined-only", "--format=posix", LIBRARY))
    assert [line.split()[0] for line in lines.splitlines()] == ["RegisterCustomOps"]


def test_an_old_onnxruntime_is_refused() -> None:
    """The status for an onnxruntime that has only the first interface, made by a fake OrtApi."""
    said = []
    get_api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
    get_version = ctypes.CFUNCTYPE(ctypes.c_void_p)
    create_status = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p)
    version = ctypes.create_string_buffer(b"1.17.3")

    def record(code: int, message: bytes) -> int:
        said.append(message.decode())
        return 1

    api = (ctypes.c_void_p * 1)(ctypes.cast(kept := create_status(record), ctypes.c_void_p))
    asked = get_api(lambda number: ctypes.addressof(api) if number == 1 else None)
    told = get_version(lambda: ctypes.addressof(version))
    base = (ctypes.c_void_p * 2)(*(ctypes.cast(one, ctypes.c_void_p) for one in (asked, told)))
    register = ctypes.CDLL(str(LIBRARY)).RegisterCustomOps
    register.restype, register.argtypes = ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_void_p]
    assert register(None, ctypes.addressof(base)) == 1
    assert said == ["onnxruntime: is 1.17.3, want 1.18 or later"]
    assert kept is not None
