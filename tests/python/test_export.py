"""torch.export: programs of layers and models give the same results at other lengths."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import flash_dmattn
import pytest
import torch
from torch.testing import assert_close

AXES = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2)}


def make_layer(kind: str) -> torch.nn.Module:
    torch.manual_seed(2)
    if kind == "MultiheadAttention":
        return flash_dmattn.MultiheadAttention(32, 4, batch_first=True, window=8).eval()
    options: dict[str, Any] = {"causal": {}, "global": {"causal": False}}[kind]
    layer = flash_dmattn.DynamicMaskAttention(32, 4, 2, 8, **options)
    torch.nn.init.normal_(layer.A)
    return layer.eval()


class SelfAttention(torch.nn.Module):
    """MultiheadAttention of a single input."""

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("kind", ["causal", "global", "MultiheadAttention"])
def test_layers(kind: str, tmp_path: Path) -> None:
    layer = make_layer(kind)
    layer = SelfAttention(layer) if kind == "MultiheadAttention" else layer
    x = torch.randn(2, 40, 32)
    program = torch.export.export(layer, (x,), dynamic_shapes=(AXES,))
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for shape in ((2, 40, 32), (3, 77, 32), (2, 5, 32)):
        x = torch.randn(shape)
        assert_close(loaded(x), layer(x))


def test_operators_stay_whole() -> None:
    """The graph has the package's operator, and decompositions do not replace it."""
    layer = make_layer("causal")
    program = torch.export.export(layer, (torch.randn(2, 40, 32),))
    targets = {str(node.target) for node in program.run_decompositions().graph.nodes}
    assert any(target.startswith("flash_dmattn.flash_dma_") for target in targets), targets


def test_doge() -> None:
    pytest.importorskip("transformers")
    import flash_dmattn.transformers as ours
    from doge_models import CONFIGS, make_tokens
    from transformers import AutoModelForCausalLM

    ours.register()
    config = copy.deepcopy(CONFIGS["doge"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="dynamic_mask").eval()

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(tokens, use_cache=False).logits

    program = torch.export.export(Logits(), (make_tokens(2, 40),), dynamic_shapes=(AXES,))
    targets = [str(node.target) for node in program.graph.nodes]
    assert sum(target.startswith("flash_dmattn.flash_dma_") for target in targets) == 2  # layers
    with torch.no_grad():
        for batch, length in ((2, 40), (3, 77)):
            tokens = make_tokens(batch, length)
            assert_close(program.module()(tokens), Logits()(tokens))
