"""Doge for vLLM, from the folder that transformers writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm

from .attention import Tokens
from .model import MLP, Attention, CausalLM, Model, ScoreProjection, Sizes
from .pages import Rules
from .states import RequestStates


class DogeAttention(Attention):
    def __init__(
        self,
        sizes: Sizes,
        layer: int,
        eps: float,
        states: RequestStates,
        config: VllmConfig,
        prefix: str,
    ) -> None:
        super().__init__(sizes, layer, True, False, eps, states, config, prefix)
        dtype = config.model_config.dtype
        self.dt_proj = ScoreProjection(sizes.kv_heads, sizes.head_dim, sizes.bias, dtype)
        self.A = nn.Parameter(torch.empty(sizes.kv_heads, dtype=dtype))


class DogeLayer(nn.Module):
    def __init__(self, states: RequestStates, layer: int, config: VllmConfig, prefix: str) -> None:
        super().__init__()
        given = config.model_config.hf_config
        hidden, eps, bias = given.hidden_size, given.rms_norm_eps, given.attention_bias
        heads = (given.num_attention_heads, given.num_key_value_heads)
        sizes = Sizes(hidden, *heads, states.head_dim, bias, bias)
        self.input_layernorm = RMSNorm(hidden, eps=eps)
        self.self_attn = DogeAttention(sizes, layer, eps, states, config, f"{prefix}.self_attn")
        self.input_residual = nn.Parameter(torch.ones(hidden))
        self.post_attention_layernorm = RMSNorm(hidden, eps=eps)
        kind = (given.intermediate_size, given.mlp_bias, given.hidden_act)
        self.mlp = MLP(hidden, *kind, config, f"{prefix}.mlp")
        self.post_attention_residual = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        x = self.input_residual * x + self.self_attn(self.input_layernorm(x), tokens)
        return self.post_attention_residual * x + self.mlp(self.post_attention_layernorm(x))


class DogeForCausalLM(CausalLM):
    """Doge as a causal language model of vLLM.

    Args:
        vllm_config: vLLM's configuration.
        prefix: of the names of its layers.

    Raises:
        NotImplementedError: a model with experts or with a sliding_window, or a setting of vLLM
            that is not served.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        given = vllm_config.model_config.hf_config
        if given.is_moe:
            raise NotImplementedError("is_moe: is True, want False: experts are not implemented")
        if given.sliding_window is not None:
            raise NotImplementedError(f"sliding_window: is {given.sliding_window}, want None")
        rules = [Rules(given.keep_window_size)] * given.num_hidden_layers

        def make(states: RequestStates, layer: int, name: str) -> DogeLayer:
            return DogeLayer(states, layer, vllm_config, name)

        norm = RMSNorm(given.hidden_size, eps=given.rms_norm_eps)
        name = f"{prefix}.model" if prefix else "model"
        parts: dict[str, Any] = {"rules": rules, "make_layer": make, "norm": norm}
        model = Model(**parts, vllm_config=vllm_config, prefix=name)
        super().__init__(model, vllm_config, prefix)
