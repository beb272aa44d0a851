"""Doge with a dt_proj that is more than its weight: adapters, hooks, tensor parallelism."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import output_of, python

transformers = pytest.importorskip("transformers")

import flash_dmattn.transformers as ours  # noqa: E402
from doge_models import (  # noqa: E402
    LENGTH,
    assert_near,
    decided,
    make_models,
    make_separate,
    make_tokens,
    registered,
)

__all__ = ["decided", "registered"]  # fixtures


class Adapter(torch.nn.Module):
    """A linear layer with a change of low rank, which has its weight under the layer's own name."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def add_adapters(*models: Any) -> None:
    for model in models:
        torch.manual_seed(4)
        for layer in model.model.layers:
            layer.self_attn.dt_proj = Adapter(layer.self_attn.dt_proj)


def add_hooks(*models: Any) -> None:
    for model in models:
        for layer in model.model.layers:
            layer.self_attn.dt_proj.register_forward_hook(lambda module, args, out: 3 * out)


changed = pytest.mark.parametrize("change", [add_adapters, add_hooks])


@changed
@pytest.mark.parametrize("left", [0, 20])
def test_logits_and_gradients(left: int, change: Any) -> None:
    models = make_models("doge with biases")
    tokens, mask = make_tokens(), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :left] = 0
    before = models[1](tokens, attention_mask=mask).logits
    change(*models)
    eager, found = (model(tokens, attention_mask=mask).logits[mask.bool()] for model in models)
    assert_near(found, eager)
    assert (found - before[mask.bool()]).abs().max() > 1e-3
    for logits in (eager, found):
        logits.square().mean().backward()
    for (name, one), other in zip(models[1].named_parameters(), models[0].parameters()):
        assert one.grad is not None, name
        assert_near(one.grad, other.grad, 1e-4)


@changed
@pytest.mark.usefixtures("decided")
def test_generated_tokens(change: Any) -> None:
    models = make_separate("doge")
    change(*models)
    tokens = make_tokens(2, LENGTH)  # more than one piece
    given = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    wanted = models[0].generate(tokens, **given)
    cache = ours.DogeCache(models[1].config)
    assert torch.equal(models[1].generate(tokens, past_key_values=cache, **given), wanted)
    one = {**given, "prompt_lookup_num_tokens": 5}
    cache = ours.DogeCache(models[1].config)
    found = models[1].generate(tokens[:1], past_key_values=cache, **one)
    assert torch.equal(found, models[1].generate(tokens[:1], **given))
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :5] = 0
    with pytest.raises(NotImplementedError, match="attention_mask: has padding, want none in a"):
        models[1](tokens, attention_mask=mask, past_key_values=ours.DogeCache(models[1].config))


PARALLEL = """
import sys
import flash_dmattn.transformers as ours
import torch
from transformers import AutoModelForCausalLM

ours.register()
folder, rank = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
kind = {"attn_implementation": "dynamic_mask", "tp_plan": "auto"}
model = AutoModelForCausalLM.from_pretrained(folder, **kind)
tokens = torch.load(f"{folder}/tokens.pt")
with torch.no_grad():
    logits = [model(tokens).logits]
    cache = ours.DogeCache(model.config)
    logits += [model(piece, past_key_values=cache).logits for piece in tokens.split(70, 1)]
try:
    model(tokens)
except NotImplementedError as error:
    assert "dt_proj: is tensor-parallel, want torch.no_grad()" in str(error)
else:
    raise AssertionError("gradients are not refused")
torch.save(logits, f"{folder}/logits-{rank}.pt")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def test_tensor_parallelism(tmp_path: Path) -> None:
    """Two processes, each with one kv head of each layer. (transformers' own attention fails,
    because its mask has the heads of both.)"""
    pytest.importorskip("accelerate")
    eager, _ = make_models("doge")
    eager.save_pretrained(tmp_path)
    tokens = make_tokens()
    torch.save(tokens, tmp_path / "tokens.pt")
    script = tmp_path / "parallel.py"
    script.write_text(PARALLEL)
    shared = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(29600 + os.getpid() % 300),
    }

    def run(rank: int) -> Any:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **shared}
        return python(script, tmp_path, str(rank), env=own)

    with ThreadPoolExecutor() as pool:
        for done in pool.map(run, (0, 1)):
            output_of(done)
    with torch.no_grad():
        wanted = eager(tokens).logits
    for rank in (0, 1):
        whole, *pieces = torch.load(tmp_path / f"logits-{rank}.pt")
        assert_near(whole, wanted)
        assert_near(torch.cat(pieces, 1), wanted)
