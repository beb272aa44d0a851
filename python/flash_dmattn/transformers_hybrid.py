"""A hybrid as a model of transformers: most of its layers slide, and few select.

Its parts and the names of its weights are Llama's. Attention is DynamicMaskAttention, with the
rotary embedding of the model, and caches are as Doge's. hybrid.py has the rules of its layers.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import (
    AttentionMaskInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizer,
    initialization,
)
from transformers.cache_utils import DynamicLayer
from transformers.models.llama import modeling_llama as llama

from . import _types, functional
from ._signatures import BiasForm
from .doge_cache import NAME, KeptKeys, KeptKeysCache
from .hybrid import HybridPlan, StepTargets
from .lifetimes import LifetimeGate, lifetime_loss
from .nn import DynamicMaskAttention, States
from .rotary import rotation_of
from .transformers_masks import find_starts, make_mask, read_padding

TYPE = "dynamic_mask_hybrid"
CONVERTED = ("llama", "qwen2", "qwen3")  # types of models that convert() takes
SCORES = ("dt_proj.weight", "A")  # parameters of a layer
GATE = "lifetime_gate"  # of a layer, in place of these
# The argument of transformers' layers that takes the cache.
HAS_CACHE = "cache" in inspect.signature(llama.LlamaModel.forward).parameters
CACHE = "cache" if HAS_CACHE else "past_key_values"


class HybridConfig(LlamaConfig):
    """The configuration of a hybrid: Llama's, whose other fields it has, and the rules of layers.

    Args:
        sliding_keys: as `sliding` in HybridPlan.
        selecting_layers: as `selecting` there, and the next two as `keys` and `recent`.
        selecting_keys: keys that a query keeps in these layers.
        selecting_recent: how many of them are the newest.
        selecting_nope: whether these layers have no rotary embedding.
        qk_norm: whether each head of queries and keys is normalized.
        output_bias: whether o_proj has a bias; None: as attention_bias says for q_proj, k_proj and
            v_proj.
        target_every: in training, every so many calls of the model teach the scores; 0 for none.
        target_start: the first such call.
        lifetime_units: as in HybridPlan. Such scores learn from lifetime_loss() of the model.
        initial_lifetime: as in HybridPlan.

    Raises:
        TypeError, ValueError: as HybridPlan, when a model is made.

    Example:
        >>> config = flash_dmattn.transformers.HybridConfig(
        ...     vocab_size=258, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        ...     num_attention_heads=4, num_key_value_heads=2, sliding_keys=16, selecting_keys=32)
        >>> config.plan.arguments(2)["window"]
        16

    Source: docs/quality.md.
    """

    model_type = TYPE
    base_model_tp_plan = {}

    vocab_size: int = 258
    hidden_size: int = 512
    intermediate_size: int = 1408
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 256
    pad_token_id: int | None = 257
    sliding_keys: int | None = 256
    selecting_layers: list[int] | None = None
    selecting_keys: int = 9216
    selecting_recent: int | None = None
    selecting_nope: bool = True
    qk_norm: bool = True
    output_bias: bool | None = None
    target_every: int = 4
    target_start: int = 0
    lifetime_units: int = 0
    initial_lifetime: float = 65536.0

    @property
    def plan(self) -> HybridPlan:
        """The rules of the layers."""
        return HybridPlan(
            hidden=self.hidden_size,
            layers=self.num_hidden_layers,
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads or self.num_attention_heads,
            head_dim=self.head_dim,
            sliding=self.sliding_keys,
            selecting=self.selecting_layers,
            keys=self.selecting_keys,
            recent=self.selecting_recent,
            target_every=max(1, self.target_every),
            target_start=self.target_start,
            lifetime_units=self.lifetime_units,
            initial_lifetime=self.initial_lifetime,
        )


class HybridAttention(DynamicMaskAttention):
    """The attention of a layer, called as Llama's."""

    def __init__(self, config: HybridConfig, layer_idx: int) -> None:
        given = {**config.plan.arguments(layer_idx), "qk_norm": config.qk_norm}
        if not config.selecting_nope:
            given["nope_heads"] = 0
        given.update({"norm_eps": config.rms_norm_eps, "dropout": config.attention_dropout})
        super().__init__(**given, bias=config.attention_bias)
        self.layer_idx, self.scaling = layer_idx, self.head_dim**-0.5
        self.first_a = 0.0 if self.sliding_heads > 0 else self.initial_a
        if config.output_bias is not None:
            channels = self.heads * self.head_dim
            self.o_proj = nn.Linear(channels, self.hidden, bias=config.output_bias)

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        position_ids: torch.Tensor | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        """As in transformers. `cache` and past_key_values are two names for one argument."""
        cache = past_key_values if cache is None else cache
        padding, sizes = read_padding(attention_mask), rest.get("cu_seq_lens_q")
        query, key, value = self._project(hidden_states, hidden_states)
        rotation = rotation_of(*position_embeddings)
        query = rotation.normalized(query, self.q_norm, self._nope_heads_of(query))
        key = rotation.normalized(key, self.k_norm, self._nope_heads_of(key))
        if cache is not None:
            if sizes is not None:
                raise ValueError("cu_seq_lens_q: is given, want None with a cache")
            out = self._attend_cached(hidden_states, query, key, value, padding, cache)
        else:
            positions = None if attention_mask is not None else position_ids
            starts = find_starts(positions, sizes, query.shape[1], query.shape[1])
            score = None
            if self.lifetime_gate is not None:
                counted = torch.arange(query.shape[1], device=query.device)[None]
                score = self.lifetime_gate.score(hidden_states, counted)
            out = self.attend(query, key, value, padding, starts, score=score)
        return self.o_proj(out.flatten(2)), None

    def _attend_cached(
        self,
        x: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        padding: torch.Tensor | None,
        cache: Any,
    ) -> torch.Tensor:
        """Attention to the tokens in the cache, too, which these tokens enter."""
        if not isinstance(cache, HybridCache):
            raise ValueError(f"cache: is a {type(cache).__name__}, want a HybridCache or None")
        kept = cache.of_layer(self)
        if isinstance(kept, KeptKeys):
            q, k, v = (one.transpose(1, 2) for one in (query, key, value))
            own = None if padding is None else padding[:, -query.shape[1] :]
            if self.lifetime_gate is None:
                return kept.attend(self, q, k, v, own)
            if not kept.is_initialized:
                kept.lazy_initialization(k, v)
            score = self.lifetime_gate.score(x, kept.positions(x.shape[1]))
            return kept.attend(self, q, k, v, own, score)
        keys, values = kept.update(key.transpose(1, 2), value.transpose(1, 2))
        rows = (query, keys.transpose(1, 2), values.transpose(1, 2))
        return functional.attention(*rows, causal=True, key_valid=padding)[0]


class HybridKeys(KeptKeys):
    """The keys of a layer that later queries may keep."""

    owner = "HybridCache"
    users = "the model is a hybrid"


class HybridCache(KeptKeysCache):
    """A cache for a hybrid: each layer has as many rows as a query keeps keys there, whatever the
    length. Layers that keep all keys have all rows.

        model.generate(tokens, past_key_values=HybridCache(model.config))

    generate() makes one by itself. It serves what a DogeCache serves.

    Args:
        config: of the model.
        static: as in DogeCache; for a model without layers that keep all keys.

    Raises:
        TypeError: a config of another kind of model.
        NotImplementedError: a static cache for a model with layers that keep all keys.
        ValueError: a call of a model with other rules.

    Example:
        >>> config = flash_dmattn.transformers.HybridConfig(
        ...     hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        ...     num_key_value_heads=2, sliding_keys=16, selecting_keys=32)
        >>> model = flash_dmattn.transformers.HybridForCausalLM(config).eval()
        >>> cache = flash_dmattn.transformers.HybridCache(config)
        >>> model.generate(torch.arange(100)[None], past_key_values=cache, max_new_tokens=5).shape
        torch.Size([1, 105])
        >>> [layer.kept.keys.key.shape[1] for layer in cache.layers]
        [16, 16, 32]

    Source: docs/algorithm.md, streams.
    """

    def __init__(self, config: HybridConfig, static: bool = False) -> None:
        if not isinstance(config, HybridConfig):
            raise _types.refusal("config", config, "a HybridConfig")
        _types.check_flag("static", static)
        plan = config.plan
        given = [plan.arguments(number) for number in range(plan.layers)]
        self.rules = [(one["window"], one["recent"]) for one in given]
        self.full = [number for number, one in enumerate(given) if one["window"] is None]
        forms: list[BiasForm] = ["none" if one.get("lifetime_units") else "exp" for one in given]
        if static and self.full:
            raise NotImplementedError(
                "static: is True, want False for a model with layers that keep all keys"
            )
        super().__init__(
            layers=[
                DynamicLayer() if window is None else HybridKeys(window, static, recent, form)
                for (window, recent), form in zip(self.rules, forms)
            ]
        )

    def of_layer(self, layer: HybridAttention) -> Any:
        """The keys of a layer that has the same rules as the cache."""
        rules = (layer.window, layer.recent)
        number = layer.layer_idx
        known = self.rules[number] if number < len(self.rules) else None
        if known != rules:
            raise ValueError(
                f"cache: has {known} for window and recent of layer {number}, want the model's, "
                f"{rules}"
            )
        return self.layers[number]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """The mask covers all tokens if a layer keeps all keys, else the new ones."""
        number = self.full[0] if self.full else layer_idx
        layer: Any = self.layers[number]
        return layer.get_mask_sizes(query_length)


class HybridDecoderLayer(llama.LlamaDecoderLayer):
    def __init__(self, config: HybridConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = HybridAttention(config, layer_idx)  # type: ignore[assignment]


AttentionMaskInterface.register(NAME, make_mask)


class HybridPreTrainedModel(llama.LlamaPreTrainedModel):
    config: HybridConfig
    config_class = HybridConfig
    _no_split_modules = ["HybridDecoderLayer"]
    _can_record_outputs = {"hidden_states": HybridDecoderLayer}
    _keep_in_fp32_modules_strict = ["dt_proj", "A", GATE]  # of scores

    def get_correct_attn_implementation(
        self, requested_attention: str | None, *_: Any, **__: Any
    ) -> str:
        if requested_attention not in (None, NAME):
            raise ValueError(
                f"attn_implementation: is {requested_attention!r}, want {NAME!r} or None for a "
                "hybrid"
            )
        return NAME

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, HybridAttention) and module._has_weights:
            initialization.constant_(module.A, module.first_a)
        if isinstance(module, LifetimeGate):
            initialization.constant_(module.contract.bias, math.log(module.lifetime))


class AddedLoss(torch.autograd.Function):
    """Hidden states as they are, whose backward adds the gradient of another loss.

    That loss has the factor that backward gave the model's own, as in gradient accumulation, or 1
    where a program computes a loss of its own.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, loss: torch.Tensor, factors: Any) -> torch.Tensor:
        ctx.factors, ctx.like = factors, loss.detach()
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        factor = ctx.factors.pop() if ctx.factors else 1.0
        return grad, torch.ones_like(ctx.like) * factor, None


class KeptFactor(torch.autograd.Function):
    """A loss as it is, whose backward keeps the factor for AddedLoss."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, factors: list[torch.Tensor]) -> torch.Tensor:
        ctx.factors = factors
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.factors[:] = [grad]
        return grad, None


class HybridModel(HybridPreTrainedModel, llama.LlamaModel):
    """The layers of a hybrid, without its head.

    In training the hidden states of every target_every-th call have the gradient of the scores'
    target loss, too, for the weights of scores alone, whatever loss a program computes from them.
    """

    def __init__(self, config: HybridConfig) -> None:
        PreTrainedModel.__init__(self, config)
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        numbers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(HybridDecoderLayer(config, number) for number in numbers)
        self.norm = llama.LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = llama.LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.calls = 0
        self.factors: list[torch.Tensor] | None = None  # of the last call, if it teaches
        self.post_init()

    @functools.wraps(llama.LlamaModel.forward, assigned=())
    def forward(self, *given: Any, **named: Any) -> Any:  # type: ignore[override]
        """As in transformers, but a cache is made only where no gradients are recorded: it would
        cut them off."""
        if named.get("cache") is None and named.get("past_key_values") is None:
            use, records = named.get("use_cache"), torch.is_grad_enabled()
            if use and records:
                raise ValueError("use_cache: is True, want a call within torch.no_grad() with it")
            use = self.config.use_cache and not records if use is None else use
            named["use_cache"], named[CACHE] = use, HybridCache(self.config) if use else None
        is_taught = self.config.target_every > 0 and self.config.lifetime_units == 0
        if is_taught and self.training and torch.is_grad_enabled():
            return self._forward_with_targets(given, named)
        self.factors = None
        return super().forward(*given, **named)

    @torch.compiler.disable(recursive=False)
    def _forward_with_targets(self, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        is_record = named.pop("return_dict", None)
        with self.config.plan.targets(self, self.calls) as targets:
            out = super().forward(*given, **named, return_dict=True)
        self.calls += 1
        of_scores, hidden = targets.loss(), out.last_hidden_state
        self.factors = [] if of_scores.requires_grad else None
        if self.factors is not None:
            out.last_hidden_state = AddedLoss.apply(hidden, of_scores, self.factors)
        is_record = self.config.return_dict if is_record is None else is_record
        return out if is_record else out.to_tuple()


class HybridForCausalLM(HybridPreTrainedModel, llama.LlamaForCausalLM):
    """A hybrid as a causal language model of transformers.

    In training every target_every-th call adds the gradient of the scores' target loss, for their
    weights alone, so that Trainer and other loops train them. The loss of a call with labels=... is
    the model's own. The weights of scores stay float32 in a model that is loaded in another dtype.

    Args:
        config: a HybridConfig.

    Raises:
        ValueError: rules of layers that contradict each other, or an attn_implementation.

    Example:
        >>> config = flash_dmattn.transformers.HybridConfig(
        ...     hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        ...     num_key_value_heads=2, sliding_keys=16, selecting_keys=32)
        >>> model = flash_dmattn.transformers.HybridForCausalLM(config)
        >>> tokens = torch.randint(256, (2, 100))
        >>> model(tokens, labels=tokens).loss.backward()
        >>> model.model.layers[1].self_attn.dt_proj.weight.grad.shape
        torch.Size([2, 32])

    Source: docs/quality.md.
    """

    def __init__(self, config: HybridConfig) -> None:
        PreTrainedModel.__init__(self, config)
        self.model = HybridModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @property
    def loss_function(self) -> Callable[..., torch.Tensor]:
        """transformers' loss of logits and labels; its backward tells AddedLoss its factor."""
        compute = super().loss_function

        @torch.compiler.disable(recursive=False)
        def compute_kept(*given: Any, **named: Any) -> torch.Tensor:
            factors, loss = self.model.factors, compute(*given, **named)
            return loss if factors is None else KeptFactor.apply(loss, factors)

        return compute_kept

    @loss_function.setter
    def loss_function(self, value: Callable[..., torch.Tensor]) -> None:
        self._loss_function = value

    def lifetime_loss(
        self,
        input_ids: torch.Tensor,
        *,
        progress: float,
        attention_mask: torch.Tensor | None = None,
        keys: int | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """flash_dmattn.lifetime_loss() of the last layer, which has to be the only one that
        selects: a loss that has a gradient for its gate alone. Call it in eval mode.

        Args:
            input_ids: [1, len].
            progress: 0 to 1: how much of the training of the gate is done.
            attention_mask: as in forward().
            keys: keys that queries will keep in this layer; None for selecting_keys.
            options: queries, weight, capacity_weight and generator of that function.

        Raises:
            ValueError: as that function; or a model without lifetime_units, or that selects in
                other layers.
        """
        layer, entering, states = self._last(input_ids, attention_mask)
        block = self.model.layers[-1]

        def predict(out: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            x = entering[:, places] + layer.o_proj(out.flatten(2))
            x = x + block.mlp(block.post_attention_layernorm(x))
            logits: torch.Tensor = self.lm_head(self.model.norm(x))
            return logits

        padding = states.key_valid
        with torch.no_grad():
            x = block.input_layernorm(entering)
            x = x if padding is None else x.masked_fill(~padding.bool()[..., None], 0)
        return lifetime_loss(
            *(states.query, states.key, states.value, layer.lifetime_gate(x), predict),
            keys=self.config.selecting_keys if keys is None else keys,
            progress=progress,
            key_valid=padding,
            **options,
        )

    def calibrate_lifetimes(self, input_ids: torch.Tensor, keys: int | None = None) -> None:
        """As DynamicMaskAttention.calibrate_lifetimes(), for the last layer and the tokens
        [sequences, len] of texts without padding."""
        found = []
        for one in input_ids.split(1):
            layer, entering, _ = self._last(one, None)
            found.append(self.model.layers[-1].input_layernorm(entering))
        with torch.no_grad():
            keys = self.config.selecting_keys if keys is None else keys
            layer.calibrate_lifetimes(torch.cat(found), keys)

    @torch.no_grad()
    def _last(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> tuple[Any, torch.Tensor, States]:
        """The attention of the last layer, what enters that layer, and queries, keys and values
        there."""
        plan, entered = self.config.plan, []
        block: Any = self.model.layers[-1]
        chosen = list(plan.selecting or ())
        is_last = plan.lifetime_units > 0 and chosen == [plan.layers - 1]
        if not is_last:
            raise ValueError(
                f"selecting_layers: are {chosen}, want the last layer alone, and lifetime_units"
            )

        def enter(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            entered.append(given[0] if given else named["hidden_states"])

        layer = block.self_attn
        if hasattr(layer.o_proj.weight, "full_tensor"):
            raise ValueError(
                "model: fully_shard() divides its parameters among ranks, want whole ones, as the "
                "gate learns on one device"
            )
        with block.register_forward_pre_hook(enter, with_kwargs=True), StepTargets([layer], 0):
            self.model(input_ids, attention_mask=attention_mask, use_cache=False)
        states, layer.states = layer.states, None
        return layer, entered[0], states

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *rest: Any, **more: Any
    ) -> None:
        kind = generation_config.cache_implementation
        is_given = model_kwargs.get(CACHE) is not None
        if is_given or generation_config.use_cache is False:
            prepare: Any = super()._prepare_cache_for_generation  # type: ignore[misc]
            prepare(generation_config, model_kwargs, *rest, **more)
            return
        if kind not in (None, "dynamic", "static"):
            raise ValueError(
                f"cache_implementation: is {kind!r}, want 'static', 'dynamic' or None for a hybrid"
            )
        model_kwargs[CACHE] = HybridCache(self.config, static=kind == "static")


class ByteTokenizer(PreTrainedTokenizer):
    """The bytes of a text in UTF-8 as tokens 0 to 255, and tokens for the end of a text and for
    padding, 256 and 257.

    Args:
        eos_token: the text that stands for the end.
        pad_token: the text that stands for padding.
        given: as in transformers' PreTrainedTokenizer.

    Raises:
        TypeError, ValueError: as transformers does.

    Example:
        >>> tokenizer = flash_dmattn.transformers.ByteTokenizer()
        >>> tokenizer("a\u00e9")["input_ids"], tokenizer.decode([97, 195, 169, 256])
        ([97, 195, 169], 'a\u00e9<end>')

    Source: RFC 3629, UTF-8.
    """

    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, eos_token: str = "<end>", pad_token: str = "<pad>", **given: Any) -> None:
        super().__init__(eos_token=eos_token, pad_token=pad_token, **given)

    @property
    def vocab_size(self) -> int:
        return 256

    def get_vocab(self) -> dict[str, int]:
        return {**{chr(byte): byte for byte in range(256)}, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text.encode("utf-8").decode("latin-1"))

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        added = self.added_tokens_encoder
        pieces = (one.encode("utf-8" if one in added else "latin-1") for one in tokens)
        return b"".join(pieces).decode("utf-8", errors="replace")

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        return token_ids_0 + (token_ids_1 or [])

    def save_vocabulary(self, *_: Any, **__: Any) -> tuple[str, ...]:
        return ()  # there is nothing to save


def register_hybrid() -> None:
    """Make transformers' Auto classes know hybrids."""
    AutoConfig.register(TYPE, HybridConfig, exist_ok=True)
    AutoModel.register(HybridConfig, HybridModel, exist_ok=True)
    AutoModelForCausalLM.register(HybridConfig, HybridForCausalLM, exist_ok=True)
    AutoTokenizer.register(HybridConfig, slow_tokenizer_class=ByteTokenizer, exist_ok=True)


def convert(
    model: PreTrainedModel,
    *,
    sliding: int | None = 256,
    selecting: Sequence[int] | None = None,
    keys: int = 9216,
    recent: int | None = None,
    nope: bool = False,
    lifetime_units: int = 0,
    initial_lifetime: float = 65536.0,
) -> HybridForCausalLM:
    """A Llama, Qwen2 or Qwen3 as a hybrid, to be trained further.

    The hybrid has the model's own weights, not copies. Weights of scores are 0: all scores are
    equal, and the selecting layers keep their newest keys, until the scores have learned. Gates of
    lifetimes are new, and have nearly equal lifetimes. With keys
    for the whole length, and sliding=None or as many, it gives the logits of the model.

    Args:
        model: the model, with all keys in all layers.
        sliding: keys that a query keeps in the layers that do not select, the newest ones; None for
            all.
        selecting: numbers of the layers that select; None for the last one alone.
        keys: keys that a query keeps in these layers, 1 or more.
        recent: how many of them are the newest; None for half.
        nope: whether these layers lose their rotary embedding, which changes the model.
        lifetime_units, initial_lifetime: as in HybridPlan.

    Returns:
        The hybrid, in the mode and on the device of the model.

    Raises:
        TypeError: a model of another kind, or an argument of another type.
        ValueError: rules of layers that contradict each other, or a model with sliding layers.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        >>> heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, vocab_size=100)).eval()
        >>> hybrid = flash_dmattn.transformers.convert(model, sliding=None, keys=64)
        >>> tokens = torch.randint(100, (1, 30))
        >>> torch.allclose(hybrid(tokens).logits, model(tokens).logits, atol=1e-5)
        True

    Source: docs/training.md.
    """
    _types.check_call(convert, locals())
    old = model.config
    is_known = old.model_type in CONVERTED and type(model).__name__.endswith("ForCausalLM")
    if not is_known:
        wanted = "a LlamaForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM"
        raise _types.refusal("model", model, wanted)
    if "sliding_attention" in (getattr(old, "layer_types", None) or ()):
        raise ValueError("model: has sliding layers, want all keys in all layers")
    names = {one.name for one in dataclasses.fields(LlamaConfig)}
    names = {name for name in names if hasattr(old, name)} - {"architectures"}
    given = {name: copy.deepcopy(getattr(old, name)) for name in sorted(names)}
    is_qwen2 = old.model_type == "qwen2"
    given.update(
        {
            "sliding_keys": sliding,
            "selecting_layers": None if selecting is None else list(selecting),
            "selecting_keys": keys,
            "selecting_recent": recent,
            "selecting_nope": nope,
            "lifetime_units": lifetime_units,
            "initial_lifetime": initial_lifetime,
            "qk_norm": old.model_type == "qwen3",
            "attention_bias": is_qwen2 or old.attention_bias,
            "output_bias": False if is_qwen2 else None,
        }
    )
    return take_weights(HybridConfig(**given), model)


def take_weights(config: HybridConfig, model: PreTrainedModel) -> HybridForCausalLM:
    """A hybrid with the weights of a model, and with weights of scores that are 0."""
    with torch.device("meta"):
        hybrid = HybridForCausalLM(config)
    found = hybrid.load_state_dict(model.state_dict(keep_vars=True), strict=False, assign=True)
    names = tuple(f"self_attn.{name}" for name in SCORES)
    missing = [name for name in found.missing_keys if not name.endswith(names)]
    missing = [name for name in missing if f".{GATE}." not in name]
    assert not missing and not found.unexpected_keys, (missing, found.unexpected_keys)
    for layer in hybrid.model.layers:
        attention: Any = layer.self_attn
        if attention.lifetime_gate is not None:
            attention.lifetime_gate.to_empty(device=model.device).reset_parameters()
        elif attention.window is not None:
            dt_proj, a_coef = attention.dt_proj.weight, attention.A
            zeros = torch.zeros(dt_proj.shape, device=model.device)
            attention.dt_proj.weight = nn.Parameter(zeros, dt_proj.requires_grad)
            first = torch.full(a_coef.shape, attention.first_a, device=model.device)
            attention.A = nn.Parameter(first, a_coef.requires_grad)
    hybrid.model.rotary_emb = model.model.rotary_emb
    hybrid.tie_weights()
    hybrid.generation_config = copy.deepcopy(model.generation_config)
    return hybrid.train(model.training)
