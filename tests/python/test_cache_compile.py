"""DynamicMaskCache under torch.compile: one graph for all steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from test_cache import (
    BATCH,
    Tensors,
    assert_same_state,
    attend,
    cut,
    make_cache,
    make_layer,
    make_tokens,
    state,
    whole,
)
from torch.testing import assert_close


class Stack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(make_layer() for _ in range(2))

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x + layer(x, cache=cache, layer=number)
        return x


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@torch.no_grad()
def test_one_graph_for_all_steps(backend: str) -> None:
    """Without graph breaks, 100 steps compile at most twice, and every tensor keeps its address."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    model, x = Stack(), torch.randn(BATCH, 180, 48)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    cache, plain = make_cache(layers=2), make_cache(layers=2)
    addresses = [one.data_ptr() for one in cache.keys[:6]]
    assert_close(model(x[:, :80], cache), model(x[:, :80], plain))
    for t in range(80, 180):
        assert_close(compiled(x[:, t : t + 1], cache), model(x[:, t : t + 1], plain))
    assert 0 < counter.frame_count <= 2
    assert addresses == [one.data_ptr() for one in cache.keys[:6]]
    assert cache.get_seq_length(1) == 180 and torch.equal(cache.keys.seen, plain.keys.seen)


@torch.no_grad()
def test_static_caches_change_no_number_on_the_host() -> None:
    """One graph without symbolic numbers. With these, CUDA graphs would be recorded anew."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model, x = Stack(), torch.randn(BATCH, 130, 48)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    cache, plain = make_cache(layers=2, static=True), make_cache(layers=2)
    assert_close(model(x[:, :80], cache), model(x[:, :80], plain))
    for t in range(80, 130):
        assert_close(compiled(x[:, t : t + 1], cache), model(x[:, t : t + 1], plain))
    assert counter.frame_count == 1
    inputs = [
        node.meta["example_value"] for node in counter.graphs[0].graph.find_nodes(op="placeholder")
    ]
    assert len(inputs) > 0 and all(isinstance(one, torch.Tensor) for one in inputs)
    assert [int(cache.get_seq_length(layer)) for layer in (0, 1)] == [130, 130]
    assert torch.equal(cache.keys.seen, plain.keys.seen)
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    assert_close(model(x[:, :80], cache), model(x[:, :80], make_cache(layers=2)))


@torch.no_grad()
def test_drafts_and_prefills_compile() -> None:
    torch._dynamo.reset()
    rows, weights = make_tokens(100)

    def run(cache: Any) -> Tensors:
        first = attend(cache, cut(rows, 0, 80), weights, n_tokens=80)
        second = attend(cache, cut(rows, 80, 10), weights, draft=True)
        cache.commit(torch.full((BATCH,), 5, dtype=torch.int32))
        return first, second, attend(cache, cut(rows, 85, 15), weights)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    found, expected = make_cache(), make_cache()
    assert_close(compiled(found), run(expected))
    assert_same_state(state(found), state(expected))
    assert_close(run(make_cache())[2], whole(rows, weights)[:, 85:])
