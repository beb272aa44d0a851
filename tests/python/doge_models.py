"""Small models of transformers with eager attention and with "dynamic_mask", for tests."""

from __future__ import annotations

import copy
from typing import Any, Iterator

import flash_dmattn.transformers as ours
import pytest
import torch
import transformers
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
    """Without repetitions, as scores of the same token may be equal."""
    random = torch.Generator().manual_seed(6)
    rows = [torch.randperm(1000, generator=random)[:length] for _ in range(batch)]
    return torch.stack(rows)


def assert_near(found: torch.Tensor, wanted: torch.Tensor, allowed: float = 1e-5) -> None:
    assert (found - wanted).abs().max() <= allowed * max(1.0, wanted.abs().max())


@pytest.fixture
def ties_by_recency(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of keys with equal scores torch.topk() takes any, whereas here the newest rank first."""

    class Best:
        def __init__(self, x: torch.Tensor, k: int) -> None:
            order = x.flip(-1).sort(dim=-1, descending=True, stable=True).indices
            self.indices = x.shape[-1] - 1 - order[..., :k]

    def topk(x: torch.Tensor, k: int, dim: int = -1, **rest: Any) -> Any:
        return Best(x, k)

    monkeypatch.setattr(modeling_doge, "torch", Module(torch, topk=topk))
    yield


class Module:
    """A module with some functions in place of its own."""

    def __init__(self, module: Any, **functions: Any) -> None:
        self.module = module
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)
