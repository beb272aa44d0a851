"""Small models of transformers with eager attention and with "dynamic_mask", for tests."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import flash_dmattn.transformers as ours
import pytest
import torch
import transformers
from transformers.generation import utils as generation
from transformers.models.doge import modeling_doge

SIZES = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {**SIZES, "max_position_embeddings": 512}
CONFIGS = {
    "doge": transformers.DogeConfig(**SIZES, keep_window_size=24),
    "doge with biases": transformers.DogeConfig(**SIZES, keep_window_size=9, attention_bias=True),
    "doge, all keys": transformers.DogeConfig(**SIZES, keep_window_size=512),
    "llama": transformers.LlamaConfig(**SIZES),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=32),
    "qwen": transformers.Qwen2Config(**SIZES),
    "gemma": transformers.Gemma2Config(**SIZES, head_dim=16, sliding_window=20),
}
LENGTH = 90


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    ours.register()
    ours.register()  # again, without effect


def make_models(name: str, **changes: Any) -> tuple[Any, Any]:
    """The same model with eager attention and with ours, in evaluation mode."""
    torch.manual_seed(len(name))
    made = []
    for implementation in ("eager", "dynamic_mask"):
        config = copy.deepcopy(CONFIGS[name])
        for field, value in changes.items():
            setattr(config, field, value)
        made.append(
            transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation=implementation
            ).eval()
        )
    for parameter_name, parameter in made[0].named_parameters():
        if parameter_name.endswith(".A") or "bias" in parameter_name:
            torch.nn.init.normal_(parameter)
    made[1].load_state_dict(made[0].state_dict())
    return made[0], made[1]


def make_tokens(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    """Tokens without repetitions, because equal tokens may have equal scores."""
    random = torch.Generator().manual_seed(6)
    rows = [torch.randperm(1000, generator=random)[:length] for _ in range(batch)]
    return torch.stack(rows)


def make_mask(left: int = 0, right: int = 0, length: int = LENGTH) -> torch.Tensor:
    """For two rows, the first one with padding on the left, the second one on the right."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :left] = 0
    mask[1, length - right :] = 0
    return mask


def make_positions(ends: list[int]) -> torch.Tensor:
    """[1, len]: positions that begin anew after each end."""
    return torch.cat([torch.arange(b - a) for a, b in zip(ends, ends[1:])])[None]


def in_pieces(model: Any, tokens: torch.Tensor, ends: list[int], cache: Any = None) -> torch.Tensor:
    """The logits of pieces of a row, each after the others in a cache; without a cache alone."""
    given = {} if cache is None else {"past_key_values": cache}
    found = [model(tokens[:, a:b], **given).logits for a, b in zip(ends, ends[1:])]
    return torch.cat(found, 1)


def assert_near(found: torch.Tensor, wanted: torch.Tensor, allowed: float = 1e-5) -> None:
    assert (found - wanted).abs().max() <= allowed * max(1.0, wanted.abs().max())


def separate_scores(*models: Any) -> None:
    """Give Doge models scores that differ by much more than rounding. In the first layer, scores of
    equal tokens would differ only by the rounding of matrix products, so a row for each position is
    added to the layer's input."""
    random = torch.Generator().manual_seed(7)
    table = 0.02 * torch.randn(1024, 64, generator=random)
    weights = [torch.randn(2, 32, generator=random) for _ in models[0].model.layers]

    def add(layer: Any, args: Any, given: dict[str, Any]) -> Any:
        return (args[0] + table[given["position_ids"]], *args[1:]), given

    for model in models:
        model.model.layers[0].register_forward_pre_hook(add, with_kwargs=True)
        for layer, weight in zip(model.model.layers, weights):
            attention = layer.self_attn
            attention.dt_proj.weight.data.copy_(weight)
            attention.A.data.copy_(torch.tensor([-1.5, 1.5]))
            if attention.dt_proj.bias is not None:
                attention.dt_proj.bias.data.mul_(0.2)
                attention.v_proj.bias.data.mul_(0.2)


def make_separate(name: str, **changes: Any) -> tuple[Any, Any]:
    """make_models() with scores that differ, if the model has scores."""
    models = make_models(name, **changes)
    if name.startswith("doge"):
        separate_scores(*models)
    return models


# In last bits, relative to a score, the largest logit, or a sum of logarithms of them: several
# times the errors of the evaluations that are compared.
MARGIN = 16


def best(x: torch.Tensor, k: int, margin: Any) -> Any:
    """torch.topk(), which fails unless the k best exceed the next one by more than margin(the least
    of them)."""
    found = x.topk(min(k + 1, x.shape[-1]))
    if k < x.shape[-1]:
        last, following = found.values[..., k - 1], found.values[..., k]
        hidden = following < -1e6
        assert (hidden | (last - following > margin(last))).all(), "rounding decides what is best"
    return Best(found.values[..., :k], found.indices[..., :k])


class Best(NamedTuple):
    values: torch.Tensor
    indices: torch.Tensor


def best_logits(x: torch.Tensor, k: int, **rest: Any) -> Any:
    margin = MARGIN * torch.finfo(x.dtype).eps * x.abs().masked_fill(x < -1e6, 0).max()
    return best(x, k, lambda least: margin)


def likeliest(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return best_logits(x, 1).indices[..., 0]


def draw(p: torch.Tensor, num_samples: int) -> torch.Tensor:
    """Draws as torch.multinomial() draws one sample."""
    return best_logits(p.log() - torch.empty_like(p).exponential_().log(), num_samples).indices


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test fails if rounding could change a choice of keys or tokens."""

    def topk(x: torch.Tensor, k: int, **rest: Any) -> Any:
        return best(x, k, lambda least: MARGIN * torch.finfo(x.dtype).eps * least)

    monkeypatch.setattr(modeling_doge, "torch", Module(torch, topk=topk))
    choices = {"argmax": likeliest, "topk": best_logits, "multinomial": draw}
    monkeypatch.setattr(generation, "torch", Module(torch, **choices))


class Module:
    def __init__(self, module: Any, **functions: Any) -> None:
        self.module = module
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)
