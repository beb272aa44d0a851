"""Parts that the models for vLLM share: projections that tensor parallelism divides, and attention
over the states of requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.activations import ACT2FN
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from ..transformers import rotary_frequencies
from .attention import StateAttention, Tokens, place, score_values
from .pages import ATTEND, Rules
from .states import RequestStates

PACKED = {  # weights of a folder, and the part that each is of a weight here
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
LENGTH_RULES = ("dynamic", "longrope")  # of rotary embeddings


def check_config(config: VllmConfig) -> None:
    """Refuse what the models do not serve.

    Raises:
        NotImplementedError: says which setting of vLLM it is.
    """
    model, parallel = config.model_config.hf_config, config.parallel_config
    ranks, kv_heads = parallel.tensor_parallel_size, model.num_key_value_heads
    cache = config.cache_config
    wrong = {
        "speculative_config": (config.speculative_config, None, "drafts cannot leave a state"),
        "kv_transfer_config": (config.kv_transfer_config, None, "states stay where they are"),
        "lora_config": (config.lora_config, None, "adapters are not implemented"),
        "enable_prefix_caching": (
            bool(cache.enable_prefix_caching),
            False,
            "the state after a prefix is gone once more tokens have come",
        ),
        "pipeline_parallel_size": (parallel.pipeline_parallel_size, 1, "a page has all layers"),
        "kv_cache_dtype": (cache.cache_dtype, "auto", "keys have the dtype of the model"),
    }
    for name, (found, wanted, why) in wrong.items():
        if found != wanted:
            shown = found if isinstance(found, (bool, int, str)) else "given"
            raise NotImplementedError(f"{name}: is {shown}, want {wanted}: {why}")
    if kv_heads % ranks != 0:
        raise NotImplementedError(
            f"tensor_parallel_size: is {ranks}, want a divisor of num_key_value_heads, {kv_heads}"
        )


class Sizes(NamedTuple):
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool  # of q_proj, k_proj and v_proj
    output_bias: bool


class Attention(StateAttention):
    """The attention of a layer, with projections of vLLM. `normalizes`: q_norm and k_norm normalize
    heads; nope: queries and keys are not rotated."""

    def __init__(
        self,
        sizes: Sizes,
        layer: int,
        normalizes: bool,
        nope: bool,
        eps: float,
        states: RequestStates,
        config: VllmConfig,
        prefix: str,
    ) -> None:
        ranks = get_tensor_model_parallel_world_size()
        quant = config.quant_config
        qkv_proj = QKVParallelLinear(
            *(sizes.hidden, sizes.head_dim, sizes.heads, sizes.kv_heads),
            bias=sizes.bias,
            quant_config=quant,
            prefix=f"{prefix}.qkv_proj",
        )
        o_proj = RowParallelLinear(
            sizes.heads * sizes.head_dim,
            sizes.hidden,
            bias=sizes.output_bias,
            quant_config=quant,
            prefix=f"{prefix}.o_proj",
        )
        heads = (sizes.heads // ranks, sizes.kv_heads // ranks, sizes.head_dim)
        given: dict[str, Any] = {"eps": eps if normalizes else None, "nope": nope}
        super().__init__((qkv_proj, o_proj), heads, layer, states.prefix, **given)

    def score(self, x: torch.Tensor, value: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        dt_proj: Any = self.dt_proj
        return dt_proj(value, self.A)


class ScoreProjection(nn.Module):
    """dt_proj and A: the scores of all kv heads need the values of all of them, so that each rank
    multiplies its own values, and the ranks add up their products."""

    def __init__(self, kv_heads: int, head_dim: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.ranks = get_tensor_model_parallel_world_size()
        self.rank = get_tensor_model_parallel_rank()
        own_heads = kv_heads // self.ranks
        self.width = own_heads * head_dim
        self.own = slice(own_heads * self.rank, own_heads * (self.rank + 1))
        self.weight = nn.Parameter(torch.empty(kv_heads, self.width, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(kv_heads, dtype=dtype)) if bias else None
        self.weight.weight_loader = self._load  # type: ignore[attr-defined]

    def _load(self, parameter: nn.Parameter, loaded: torch.Tensor) -> None:
        own = loaded.narrow(1, self.rank * self.width, self.width)
        default_weight_loader(parameter, own)

    def forward(self, value: torch.Tensor, a_coef: torch.Tensor) -> torch.Tensor:
        if self.ranks == 1:
            return score_values(value, self.weight, a_coef, self.bias)
        dt = value.flatten(1).float() @ self.weight.float().T
        dt = tensor_model_parallel_all_reduce(dt)[:, self.own]
        dt = dt if self.bias is None else dt + self.bias[self.own].float()
        return (a_coef[self.own].float() * nn.functional.softplus(dt)).T.contiguous()


class MLP(nn.Module):
    def __init__(
        self, hidden: int, width: int, bias: bool, kind: str, config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        quant = config.quant_config
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [width] * 2, bias=bias, quant_config=quant, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(
            width, hidden, bias=bias, quant_config=quant, prefix=f"{prefix}.down_proj"
        )
        self.activation = ACT2FN[kind]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x)[0].chunk(2, 1)
        return self.down_proj(self.activation(gate) * up)[0]


@support_torch_compile(
    dynamic_arg_dims=dict.fromkeys(("input_ids", "positions", "inputs_embeds"), 0)
)
class Model(nn.Module):
    """Embedding, layers and the last norm: what vLLM compiles. make_layer(states, layer, prefix)
    makes a layer that is called with hidden states [tokens, hidden] and Tokens."""

    def __init__(
        self,
        *,
        rules: list[Rules],
        make_layer: Any,
        norm: nn.Module,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        super().__init__()
        config = vllm_config
        check_config(config)
        # Attention runs between pieces that are compiled, and captured, each alone.
        splitting = config.compilation_config.splitting_ops
        if splitting and ATTEND.name() not in splitting:
            splitting.append(ATTEND.name())
        model = config.model_config.hf_config
        head_dim = model.hidden_size // model.num_attention_heads
        head_dim = getattr(model, "head_dim", None) or head_dim
        if head_dim % 8 != 0:
            raise NotImplementedError(f"head_dim: is {head_dim}, want a multiple of 8")
        kv_heads = model.num_key_value_heads // get_tensor_model_parallel_world_size()
        dtype = config.model_config.dtype
        # vLLM asks that a name has one number.
        states = RequestStates(rules, kv_heads, head_dim, dtype, config, f"{prefix}.states.0")
        self.embed_tokens = VocabParallelEmbedding(
            model.vocab_size, model.hidden_size, prefix=f"{prefix}.embed_tokens"
        )
        self.layers = nn.ModuleList(
            make_layer(states, layer, f"{prefix}.layers.{layer}") for layer in range(len(rules))
        )
        self.norm = norm
        rule = (model.rope_parameters or {}).get("rope_type", "default")
        if rule in LENGTH_RULES:
            raise NotImplementedError(f"rope_type: is {rule!r}, whose angles depend on the length")
        inv_freq, factor = rotary_frequencies(model)
        self.factor: float = factor
        self.inv_freq: torch.Tensor
        self.register_buffer("inv_freq", inv_freq.float(), persistent=False)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """input_ids and positions [tokens], inputs_embeds [tokens, hidden]."""
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        tokens = place(positions, self.inv_freq, self.factor)
        for layer in self.layers:
            x = layer(x, tokens)
        return self.norm(x)


class CausalLM(nn.Module):
    """A model with its head, as vLLM calls it."""

    # vLLM reads these as the interfaces IsAttentionFree and HasInnerState: no cache grows.
    is_attention_free = True
    has_inner_state = True
    packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, model: Model, config: VllmConfig, prefix: str) -> None:
        super().__init__()
        given = config.model_config.hf_config
        self.model = model
        self.is_tied = given.tie_word_embeddings
        name = f"{prefix}.lm_head" if prefix else "lm_head"
        head = ParallelLMHead(given.vocab_size, given.hidden_size, prefix=name)
        self.lm_head = head.tie_weights(model.embed_tokens) if self.is_tied else head
        self.logits_processor = LogitsProcessor(given.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        return self.model(input_ids, positions, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def skips(self, name: str) -> bool:
        """True for a weight of a folder that the model does not have."""
        return self.is_tied and name.startswith("lm_head.")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the weights of a folder.

        Raises:
            ValueError: a weight that the model does not have, one that is not finite, or one that
                is missing.
        """
        own: dict[str, Any] = dict(self.named_parameters())
        found = set()
        for name, weight in weights:
            if self.skips(name):
                continue
            if weight.is_floating_point() and not bool(weight.isfinite().all()):
                raise ValueError(f"{name}: has numbers that are not finite")
            part = name.split(".")[-2] if "." in name else ""
            shard: tuple[Any, ...] = ()
            target = name
            if part in PACKED:
                target, shard = name.replace(part, PACKED[part][0]), PACKED[part][1:]
            if target not in own:
                kind = type(self).__name__
                raise ValueError(f"{name}: is in the folder, but {kind} has no such weight")
            load = getattr(own[target], "weight_loader", default_weight_loader)
            load(own[target], weight, *shard)
            found.add(name)
        missing = sorted(x for target in own for x in sources_of(target) if x not in found)
        if missing:
            raise ValueError(f"{missing[0]}: is not in the folder, nor are {len(missing) - 1} more")
        return set(own)


def sources_of(name: str) -> list[str]:
    """The names of a weight's parts in a folder."""
    kind = name.split(".")[-2] if "." in name else ""
    parts = [part for part, (target, _) in PACKED.items() if target == kind]
    return [name.replace(kind, part) for part in parts] or [name]
