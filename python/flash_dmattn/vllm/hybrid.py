"""Hybrids of flash_dmattn.transformers for vLLM: layers that slide, and layers that select."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.layernorm import RMSNorm

from ..lifetimes import LifetimeGate
from ..transformers_hybrid import GATE, SCORES, HybridConfig
from .attention import Tokens
from .model import MLP, Attention, CausalLM, Model, ScoreProjection, Sizes
from .pages import Rules
from .states import RequestStates


class HybridAttention(Attention):
    """The attention of a layer. The scores of a sliding layer are 0: of equal ones later keys rank
    first."""

    def __init__(self, layer: int, states: RequestStates, config: VllmConfig, prefix: str) -> None:
        given: HybridConfig = config.model_config.hf_config
        plan, bias = given.plan, given.attention_bias
        rules = plan.arguments(layer)
        out_bias = bias if given.output_bias is None else given.output_bias
        sizes = Sizes(plan.hidden, plan.heads, plan.kv_heads, states.head_dim, bias, out_bias)
        selects = rules.get("sliding_heads", 0) == 0
        nope = selects and given.selecting_nope
        eps = given.rms_norm_eps
        super().__init__(sizes, layer, given.qk_norm, nope, eps, states, config, prefix)
        self.kind = "slides"
        if selects and plan.lifetime_units > 0:
            self.kind = "lives"
            units = (plan.lifetime_units, plan.kv_heads, 0, plan.initial_lifetime)
            self.lifetime_gate = LifetimeGate(plan.hidden, *units, dtype=torch.float32)
        elif selects:
            self.kind = "scores"
            wide = torch.float32
            self.dt_proj = ScoreProjection(plan.kv_heads, states.head_dim, False, wide)
            self.A = nn.Parameter(torch.empty(plan.kv_heads, dtype=wide))

    def score(self, x: torch.Tensor, value: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        if self.kind == "scores":
            return super().score(x, value, tokens)
        if self.kind == "slides":
            return torch.zeros(value.shape[1], len(value), device=value.device)
        score = self.lifetime_gate.score(x[None], tokens.positions[None])[0]
        own = len(score) // get_tensor_model_parallel_world_size()
        first = own * get_tensor_model_parallel_rank()
        return score[first : first + own]


class HybridLayer(nn.Module):
    def __init__(self, states: RequestStates, layer: int, config: VllmConfig, prefix: str) -> None:
        super().__init__()
        given = config.model_config.hf_config
        hidden, eps = given.hidden_size, given.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps=eps)
        self.self_attn = HybridAttention(layer, states, config, f"{prefix}.self_attn")
        self.post_attention_layernorm = RMSNorm(hidden, eps=eps)
        kind = (given.intermediate_size, given.mlp_bias, given.hidden_act)
        self.mlp = MLP(hidden, *kind, config, f"{prefix}.mlp")

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), tokens)
        return x + self.mlp(self.post_attention_layernorm(x))


class HybridForCausalLM(CausalLM):
    """A hybrid as a causal language model of vLLM.

    Args:
        vllm_config: vLLM's configuration.
        prefix: of the names of its layers.

    Raises:
        NotImplementedError: a model with layers that keep all keys, or a setting of vLLM that is
            not served.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        given: HybridConfig = vllm_config.model_config.hf_config
        plan = given.plan
        if plan.sliding is None:
            raise NotImplementedError(
                "sliding_keys: is None, want a number: layers that keep all keys are not served"
            )
        rules = []
        for layer in range(plan.layers):
            own = plan.arguments(layer)
            ranks_only = own.get("sliding_heads", 0) > 0 or plan.lifetime_units > 0
            rules.append(Rules(own["window"], own["recent"], "none" if ranks_only else "exp"))

        def make(states: RequestStates, layer: int, name: str) -> HybridLayer:
            return HybridLayer(states, layer, vllm_config, name)

        norm = RMSNorm(given.hidden_size, eps=given.rms_norm_eps)
        name = f"{prefix}.model" if prefix else "model"
        parts: dict[str, Any] = {"rules": rules, "make_layer": make, "norm": norm}
        model = Model(**parts, vllm_config=vllm_config, prefix=name)
        super().__init__(model, vllm_config, prefix)
        self.sliding = {n for n in range(plan.layers) if n not in (plan.selecting or ())}

    def skips(self, name: str) -> bool:
        """The weights of scores of sliding layers, too: they have no effect."""
        words = name.split(".")
        of_score = name.endswith(SCORES) or GATE in words
        return super().skips(name) or (of_score and int(words[2]) in self.sliding)
