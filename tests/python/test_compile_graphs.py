"""torch.compile: one graph for all lengths and batches, of layers and of caches.

PyTorch takes a size for a constant until it has seen a second value, so every case may compile
twice. If sizes change one after the other, each change is one more compilation: in these cases all
sizes change with the second call.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, Iterator

import flash_dmattn
import pytest
import torch
from cases import FULL
from torch.testing import assert_close

BATCHES = (3, 5, 6)
LENGTHS = tuple(range(9, 29 if FULL else 17))  # longer than the windows, which are 8
# Sizes of other dimensions differ from these: PyTorch first takes equal sizes for one size.
SIZES = {"hidden": 32, "heads": 4, "kv_heads": 2, "window": 8}
CACHE = {"kv_heads": 2, "head_dim": 8, "window": 8, "recent": 8}
DYNAMIC = (None, True)  # torch.compile finds out which sizes change, or is told
MOST = 2

Function = Callable[..., torch.Tensor]
Options = Callable[[int, int], dict[str, Any]]  # for a call with this batch and length


def in_turn(values: Iterable[Any]) -> list[tuple[Any, bool | None]]:
    """Values with both ways to compile if FDMA_FULL is 1, otherwise with one of these in turn."""
    return [
        (one, dynamic)
        for n, one in enumerate(values)
        for at, dynamic in enumerate(DYNAMIC)
        if FULL or n % 2 == at
    ]


class Counter:
    """A backend that runs graphs as traced, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Function:
        self.graphs += 1
        return graph.forward


def compile_counted(function: Function, dynamic: bool | None) -> tuple[Function, Counter]:
    torch._dynamo.reset()
    counter = Counter()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=counter)
    return compiled, counter


def shapes() -> Iterator[tuple[int, int]]:
    """Every batch with every length. Neighbours differ in both."""
    for n, length in enumerate(LENGTHS):
        for b in range(3):
            yield BATCHES[(b + n) % 3], LENGTHS[(LENGTHS.index(length) + b) % len(LENGTHS)]


def no_options(batch: int, length: int) -> dict[str, Any]:
    return {}


def mask(batch: int, length: int) -> dict[str, Any]:
    return {"key_valid": torch.arange(length).expand(batch, length) > 0}


def positions(rows: int | None = None) -> Options:
    return lambda batch, length: {
        "positions": torch.arange(length).expand(batch if rows is None else rows, length)
    }


def memory(batch: int, length: int) -> dict[str, Any]:
    return {"memory": torch.randn(batch, 2 * length, 24)}


OPTIONS = flash_dmattn.DynamicMaskOptions(keep_window_size=8)
CROSS = {"causal": False, "rope_base": None, "memory_hidden": 24}
LAYERS: dict[str, tuple[dict[str, Any], Options]] = {
    "plain": ({}, no_options),
    "positions": ({}, positions()),
    "positions of one row": ({"window": None}, positions(1)),
    "padding, qk_norm, biases": ({"qk_norm": True, "bias": True, "dt_bias": True}, mask),
    "NoPE, sliding": ({"nope_heads": 1, "nope_rotary_dim": 4, "sliding_heads": 1}, no_options),
    "sinks, gap": ({"sinks": 2, "recent": 3, "gap": 1.0, "sink_logit": True}, no_options),
    "no rotary embedding": ({"rope_base": None, "softcap": 5.0}, no_options),
    "memory": (CROSS, memory),
    # Calls that keep all keys are graphs of their own, because they are processed densely.
    "options": ({"options": OPTIONS, "recent": 0}, no_options),
}


@pytest.mark.parametrize(("name", "dynamic"), in_turn(LAYERS))
@torch.no_grad()
def test_layers(name: str, dynamic: bool | None) -> None:
    options, more = LAYERS[name]
    layer = flash_dmattn.DynamicMaskAttention(**{**SIZES, **options}).eval()
    compiled, counter = compile_counted(layer, dynamic)
    for batch, length in shapes():
        x, rest = torch.randn(batch, length, 32), more(batch, length)
        out = compiled(x, **rest)
    assert_close(out, layer(x, **rest))
    assert 0 < counter.graphs <= MOST


@torch.no_grad()
def test_sizes_that_are_marked() -> None:
    """PyTorch refuses a graph that makes a dynamic size a constant."""
    layer = flash_dmattn.DynamicMaskAttention(**SIZES).eval()
    compiled, counter = compile_counted(layer, None)
    for batch, length in shapes():
        x = torch.randn(batch, length, 32)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 1)
        compiled(x)
    assert counter.graphs == 1


@pytest.mark.parametrize("dynamic", DYNAMIC if FULL else DYNAMIC[:1])
@torch.no_grad()
def test_packed_sequences(dynamic: bool | None) -> None:
    layer = flash_dmattn.DynamicMaskAttention(**SIZES).eval()
    compiled, counter = compile_counted(layer, dynamic)
    for sequences, length in shapes():
        x = torch.randn(1, sequences * length, 32)
        starts = torch.arange(sequences + 1, dtype=torch.int32) * length
        out = compiled(x, starts=starts)
    assert_close(out, layer(x, starts=starts))
    assert 0 < counter.graphs <= MOST


def test_training() -> None:
    layer = flash_dmattn.DynamicMaskAttention(**SIZES)
    compiled, counter = compile_counted(layer, None)
    for batch, length in shapes():
        compiled(torch.randn(batch, length, 32)).sum().backward()
    assert layer.dt_proj.weight.grad is not None
    assert 0 < counter.graphs <= MOST


@pytest.mark.parametrize(("window", "dynamic"), in_turn([8, None]))
@torch.no_grad()
def test_multihead_attention(window: int | None, dynamic: bool | None) -> None:
    layer = flash_dmattn.MultiheadAttention(32, 4, batch_first=True, window=window).eval()
    compiled, counter = compile_counted(layer, dynamic)
    for batch, length in shapes():
        x, padding = torch.randn(batch, length, 32), torch.zeros(batch, length, dtype=torch.bool)
        out, _ = compiled(x, x, x, padding, need_weights=False)
    assert_close(out, layer(x, x, x, padding, need_weights=False)[0])
    assert 0 < counter.graphs <= MOST


# ---- caches ----


def make_cache(batch: int, layers: int = 1, **options: Any) -> flash_dmattn.DynamicMaskCache:
    return flash_dmattn.DynamicMaskCache(layers=layers, batch=batch, **CACHE, **options)


def make_model() -> Callable[..., torch.Tensor]:
    layer = flash_dmattn.DynamicMaskAttention(**SIZES).eval()

    def run(x: torch.Tensor, cache: Any, draft: bool = False) -> torch.Tensor:
        return layer(x, cache=cache, draft=draft)

    return run


@pytest.mark.parametrize("dynamic", DYNAMIC if FULL else DYNAMIC[:1])
@torch.no_grad()
def test_tokens(dynamic: bool | None) -> None:
    """Single tokens after prompts of different lengths."""
    model = make_model()
    compiled, counter = compile_counted(model, dynamic)
    caches, plain = [[make_cache(batch) for batch in BATCHES] for _ in range(2)]
    for n, batch in enumerate(BATCHES):
        prompt = torch.randn(batch, 30 + n, 32)
        model(prompt, caches[n])
        model(prompt, plain[n])
    for _ in range(20):
        for batch, cache, other in zip(BATCHES, caches, plain):
            x = torch.randn(batch, 1, 32)
            assert_close(compiled(x, cache), model(x, other))
    assert 0 < counter.graphs <= MOST
    assert [cache.get_seq_length() for cache in caches] == [50, 51, 52]


class Holder(torch.nn.Module):
    """A module with a cache as an attribute: PyTorch takes numbers there for constants."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = flash_dmattn.DynamicMaskAttention(**SIZES)
        self.cache = make_cache(3, layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, cache=self.cache, layer=1)


@torch.no_grad()
def test_tokens_of_a_module_with_a_cache() -> None:
    """One graph, even with calls between that are not compiled. The length is known again."""
    model = Holder().eval()
    compiled, counter = compile_counted(model, None)
    model(torch.randn(3, 70, 32))
    for n in range(20):
        compiled(torch.randn(3, 1, 32))
        if n % 5 == 0:
            assert model.cache.get_seq_length(1) == 71 + n + n // 5
            model(torch.randn(3, 1, 32))
    assert model.cache.get_seq_length(1) == 94 and model.cache.get_seq_length(0) == 0
    assert counter.graphs == 1


@torch.no_grad()
def test_length_in_compiled_code() -> None:
    model = Holder().eval()

    def step(x: torch.Tensor) -> torch.Tensor:
        model(x)
        return model.cache.get_seq_length(1)

    compiled, counter = compile_counted(step, None)
    found = [int(compiled(torch.randn(3, 1, 32))) for _ in range(12)]
    assert found == list(range(1, 13)) and counter.graphs == 1


@pytest.mark.parametrize(("longer", "dynamic"), in_turn([0, 60]))  # decode and prefill
@torch.no_grad()
def test_prompts(dynamic: bool | None, longer: int) -> None:
    """Prompts of one call, up to 64 tokens and above."""
    model = make_model()
    compiled, counter = compile_counted(model, dynamic)
    for batch, length in shapes():
        x, cache = torch.randn(batch, longer + length, 32), make_cache(batch)
        out = compiled(x, cache)
    assert_close(out, model(x, make_cache(batch)))
    assert cache.get_seq_length() == longer + length
    assert 0 < counter.graphs <= MOST


@torch.no_grad()
def test_prompts_then_tokens() -> None:
    """A prompt and a token are two graphs."""
    model = make_model()
    compiled, counter = compile_counted(model, True)
    for batch, length in shapes():
        cache = make_cache(batch)
        compiled(torch.randn(batch, 60 + length, 32), cache)
        compiled(torch.randn(batch, 1, 32), cache)
    assert counter.graphs == 2


@torch.no_grad()
def test_static_caches() -> None:
    """One graph for all tokens of a cache, and no more than two for caches of all batches."""
    model = make_model()
    compiled, counter = compile_counted(model, None)
    for batch in BATCHES:
        cache = make_cache(batch, static=True)
        for _ in range(20):
            compiled(torch.randn(batch, 1, 32), cache)
        assert int(cache.get_seq_length()) == 20
        assert counter.graphs == 1 or batch != BATCHES[0]
    assert counter.graphs <= MOST


@torch.no_grad()
def test_drafts() -> None:
    """Different numbers of drafts, and different numbers that stay."""
    model = make_model()

    def step(x: torch.Tensor, cache: Any, accepted: torch.Tensor) -> torch.Tensor:
        out = model(x, cache, draft=True)
        cache.commit(accepted)
        return out

    compiled, counter = compile_counted(step, None)
    caches = {batch: make_cache(batch) for batch in BATCHES}
    for batch, cache in caches.items():
        model(torch.randn(batch, 20 + batch, 32), cache)
    for batch, length in shapes():
        accepted = torch.full((batch,), length - 3, dtype=torch.int32)
        compiled(torch.randn(batch, length, 32), caches[batch], accepted)
    assert 0 < counter.graphs <= MOST


@torch.no_grad()
def test_dropped_sequences_are_empty() -> None:
    """The host's knowledge of sequences is right after every order of calls."""
    cache, x = make_cache(3), torch.randn(3, 1, 32)
    model = make_model()
    model(x, cache)
    cache.drop(0)
    cache.drop(0)
    cache.drop(1)
    assert cache._empty == [False]
    cache.drop(2)
    assert cache._empty == [True]
    model(x, cache)
    assert cache._empty == [False]
    cache.drop(1)
    cache.reorder(torch.tensor([0, 1, 0]))
    cache.drop(0)
    cache.drop(2)
    assert cache._empty == [False]


@torch.no_grad()
def test_cache_of_doge() -> None:
    """Tokens of a model of transformers, over its cache."""
    transformers = pytest.importorskip("transformers", minversion="4.56")
    import flash_dmattn.transformers as integration

    integration.register()
    config = transformers.DogeConfig(
        **{"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "keep_window_size": 8},
    )
    model = transformers.DogeForCausalLM._from_config(config, attn_implementation="dynamic_mask")
    model.eval()
    compiled, counter = compile_counted(model, None)
    caches = [integration.DogeCache(config) for _ in BATCHES]
    for n, batch in enumerate(BATCHES):
        model(torch.randint(50, (batch, 30 + n)), past_key_values=caches[n])
    for _ in range(20):
        for batch, cache in zip(BATCHES, caches):
            compiled(torch.randint(50, (batch, 1)), past_key_values=cache)
    assert [cache.get_seq_length() for cache in caches] == [50, 51, 52]
    assert 0 < counter.graphs <= MOST
