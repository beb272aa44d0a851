"""Models of the library transformers, with their attention computed here.

    import flash_dmattn.transformers
    flash_dmattn.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation="dynamic_mask")

Doge selects keys by their scores, as everywhere in this package: in O(q_len * keep_window_size)
time and memory, where its own code makes a mask of q_len * kv_len numbers for each layer. For other
models the masks define the attention (transformers_masks.py).

Only this module and its helpers import transformers, 5.17 or later, below 6.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

import torch
import transformers
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.doge import modeling_doge

from . import _arguments, _types, functional, fused, rotary
from .doge_cache import NAME, DogeCache, KeptKeys, has_plain_weights, scores_of
from .transformers_hybrid import (
    ByteTokenizer,
    HybridCache,
    HybridConfig,
    HybridForCausalLM,
    convert,
    register_hybrid,
)
from .transformers_masks import (
    best_in_window,
    find_starts,
    keep_newest,
    make_mask,
    padding_and_packing,
    read_mask,
    read_padding,
)

__all__ = [
    "ByteTokenizer",
    "DogeCache",
    "HybridCache",
    "HybridConfig",
    "HybridForCausalLM",
    "convert",
    "register",
    "rotary_frequencies",
]

OLDEST, NEXT = (5, 17), (6,)  # versions of transformers: first supported, first unsupported


def check_version(version: str) -> tuple[int, ...]:
    """The first two numbers of a version of transformers, such as "5.17.0".

    Raises:
        ImportError: the version is not supported.
    """
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if not OLDEST <= found < NEXT:
        raise ImportError(f"transformers: is {version}, want 5.17 or later, below 6")
    return found


# The argument of transformers' layers that takes the cache.
CACHE = "cache" if check_version(transformers.__version__) >= (5, 24) else "past_key_values"
StockDogeAttention = modeling_doge.DogeAttention
stock_check = PreTrainedModel.get_correct_attn_implementation
# In these models some layers add the mask to logits in their own code, and others do not.
MIXED = ("bigbird_pegasus", "informer")
rotary.norms[modeling_doge.DogeRMSNorm] = "variance_epsilon"


@torch.compiler.assume_constant_result
@functools.lru_cache(maxsize=None)
def arguments_of(kind: type) -> frozenset[str]:
    """Arguments that transformers' eager attention has for layers of this class and attend() lacks.
    Eager attention ignores all others."""
    source = vars(sys.modules[kind.__module__])
    eager = [x for name, x in source.items() if name.endswith("eager_attention_forward")]
    names = {name for one in eager for name in inspect.signature(one).parameters}
    return frozenset(names - set(inspect.signature(attend).parameters))


def check_others(module: torch.nn.Module, rest: dict[str, Any]) -> None:
    """Refuse arguments that attend() lacks and that change the result."""
    for name in arguments_of(type(module)) & rest.keys():
        if rest[name] is not None:
            raise NotImplementedError(
                f"{name}: is given by {type(module).__name__}, want None: attention with it is not "
                "implemented"
            )


def same_sizes(*rows: torch.Tensor) -> list[torch.Tensor]:
    """Pad the last axes of all rows to one length, a multiple of 8. The zeros do not change
    products, and add only zero channels to values."""
    size = -8 * (-max(row.shape[3] for row in rows) // 8)
    pad = torch.nn.functional.pad
    return [row if row.shape[3] == size else pad(row, (0, size - row.shape[3])) for row in rows]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of a layer, as transformers calls it.

    Args:
        module: the layer. Its is_causal is used if the argument is None.
        query: [batch, q_heads, q_len, head_dim].
        key: [batch, kv_heads, kv_len, head_dim].
        value: [batch, kv_heads, kv_len, head_dim].
        attention_mask: from make_mask(), or [batch, heads or 1, q_len, kv_len]: bool, or numbers
            that are added to the logits.
        dropout: as dropout_p in attention().
        scaling: as softmax_scale there.
        is_causal: a query sees only keys up to its own. Only without a mask, which says so itself.
        sliding_window: not read, as the mask has the window.
        softcap: as in attention().
        s_aux: optional [q_heads], sink logits.
        position_bias: optional [batch or 1, q_heads or 1, q_len, kv_len], added to the logits.
        sinks: optional [batch, q_heads, q_len, 1], sink logits of each query.
        position_ids: [batch, q_len]; not read, as the mask says how sequences are packed.
        cu_seq_lens_q: optional [sequences + 1], where packed sequences begin.
        rest: other arguments that a layer passes on.

    Returns:
        out [batch, q_len, q_heads, head_dim], and None for the probabilities.

    Raises:
        NotImplementedError: an argument in `rest` that transformers' eager attention would use.
        ValueError: a layer of Doge that was made before register(): it has turned make_mask()'s
            result into a mask that need not be causal.
    """
    if isinstance(module, StockDogeAttention):
        raise ValueError(
            f"attn_implementation: is {NAME!r} for a Doge model made before "
            "flash_dmattn.transformers.register(), want the model made after it"
        )
    check_others(module, rest)
    q_len = query.shape[2]
    if attention_mask is not None:
        key, value, options = read_mask(attention_mask, key, value, q_len, cu_seq_lens_q)
    else:
        starts = find_starts(None, cu_seq_lens_q, q_len, key.shape[2])
        causal = getattr(module, "is_causal", True) if is_causal is None else bool(is_causal)
        options = {"causal": causal, "starts": starts}
    if position_bias is not None:
        added = position_bias[..., : key.shape[2]]
        options["attn_bias"] = added + options["attn_bias"] if "attn_bias" in options else added
    size = value.shape[3]
    out, lse = functional.attention(
        *(x.transpose(1, 2) for x in same_sizes(query, key, value)),
        softmax_scale=query.shape[3] ** -0.5 if scaling is None else scaling,
        softcap=softcap or 0.0,
        dropout_p=dropout,
        sink_logit=None if s_aux is None else s_aux.float(),
        **options,
    )
    if sinks is not None:  # a key whose value is 0
        sinks = sinks.squeeze(-1).float().expand_as(lse).contiguous()
        out, _ = functional.merge(out, lse, torch.zeros_like(out), sinks)
    return out[..., :size], None


class DogeAttention(StockDogeAttention):
    """The attention of Doge if attn_implementation is "dynamic_mask"."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        position_ids: torch.Tensor | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As in transformers. `cache` and past_key_values are two names for one argument."""
        cache = past_key_values if cache is None else cache
        if self.config._attn_implementation != NAME:
            rest = {**rest, CACHE: cache, "position_ids": position_ids}
            return super().forward(hidden_states, position_embeddings, attention_mask, **rest)
        is_masked = attention_mask is not None
        attention_mask = read_padding(attention_mask)
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        rotation = rotary.rotation_of(*position_embeddings)
        query = rotation.normalized(self.q_proj(hidden_states).view(shape), self.q_norm)
        key = rotation.normalized(self.k_proj(hidden_states).view(shape), self.k_norm)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        if isinstance(cache, DogeCache):
            cache._check(self.config)
            if rest.get("cu_seq_lens_q") is not None:
                raise ValueError("cu_seq_lens_q: is given, want None with a DogeCache")
            kept = cache.layers[self.layer_idx]  # type: ignore[index]
            if isinstance(kept, KeptKeys):
                out = kept.attend(self, query, key, value, attention_mask)
                return self.o_proj(out.flatten(2)), None
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
            if attention_mask is not None and self.config.sliding_window == 1:
                # transformers returns all keys for a window of 1, and the mask of the newest ones
                newest = -attention_mask.shape[1]
                key, value = key[:, :, newest:], value[:, :, newest:]
        # as in transformers, which looks for packed sequences only if there is no cache
        own_positions = position_ids if cache is None and not is_masked else None
        given = (attention_mask, own_positions, rest.get("cu_seq_lens_q"))
        key, value, options = padding_and_packing(key, value, query.shape[2], *given)
        options["dropout_p"] = self.attention_dropout if self.training else 0.0
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = self._attend(q, k, v, options)
        return self.o_proj(out.flatten(2)), None

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Attention to all keys [batch, kv_len, kv_heads, head_dim], without a DogeCache."""
        options = {"causal": True, "softmax_scale": self.scaling, **options}
        sliding: Any = self.config.sliding_window
        keep = self.keep_window_size
        has_window = sliding is not None and sliding < key.shape[1]
        if has_plain_weights(self) and not has_window:
            weights = (self.dt_proj.weight, self.A, keep)
            given = {"dt_bias": self.dt_proj.bias, **options}
            out: Any = fused.flash_dma_attention(query, key, value, *weights, **given)
            return out
        score = scores_of(self, value)
        padding = {name: options[name] for name in ("key_valid", "starts")}
        if not has_window:
            options["selection"] = functional.select(score.detach(), keep, **padding)
        elif sliding <= keep:
            options["selection"] = keep_newest(
                score.shape, score.device, sliding, options["starts"]
            )
        else:
            rules = (query.shape[1], sliding, keep)
            options["attn_mask"] = best_in_window(score.detach(), *rules, **padding)
        return functional.attention(query, key, value, bias=score.exp(), **options)[0]


def rotary_frequencies(
    config: PreTrainedConfig,
    *,
    length: int | None = None,
    layer_type: str | None = None,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, float]:
    """The frequencies of a model's rotary embedding, by the rule in its configuration: default,
    linear, dynamic (NTK), yarn, longrope, llama3 or proportional.

    Rules other than the default one are computed by transformers.

    Args:
        config: of the model; its rope_parameters have the rule.
        length: tokens of the longest sequence, which the rules dynamic and longrope depend on; None
            for those up to the length of pretraining.
        layer_type: for models whose layers differ: the kind of the layer, a key of rope_parameters.
        device: of the frequencies.

    Returns:
        inv_freq [dim / 2], in radians for each position, and factor, which multiplies cosines and
        sines, as rotary.rotary_table() takes them; its dim is twice the length of inv_freq.

    Raises:
        TypeError: an argument of another type.
        ValueError: a model without rotary embedding, a rule that transformers does not have, or a
            layer_type that the model does not have.
        NotImplementedError: a device that PyTorch does not have here.

    Example:
        >>> from flash_dmattn.rotary import rotary_table
        >>> from flash_dmattn.transformers import rotary_frequencies
        >>> from transformers import LlamaConfig
        >>> rule = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
        >>> config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=rule)
        >>> inv_freq, factor = rotary_frequencies(config)
        >>> rotary_table(100, 16, inv_freq=inv_freq, factor=factor).shape
        torch.Size([100, 16])

    Source: transformers.modeling_rope_utils.
    """
    _types.check_call(rotary_frequencies, locals())
    _arguments.check_device(device)
    if getattr(config, "rope_parameters", None) is None:
        raise ValueError(f"config: has no rope_parameters; it is a {type(config).__name__}")
    config.standardize_rope_params()
    rules = config.rope_parameters
    kinds = [name for name, one in rules.items() if isinstance(one, dict)]  # of layers
    if layer_type not in (kinds or [None]):
        known = " or ".join(map(repr, kinds or [None]))
        raise ValueError(f"layer_type: is {layer_type!r}, want {known}")
    rule = rules if layer_type is None else rules[layer_type]
    kind = rule["rope_type"]
    if kind in ROPE_INIT_FUNCTIONS:
        given = {} if layer_type is None else {"layer_type": layer_type}
        return ROPE_INIT_FUNCTIONS[kind](config, device, seq_len=length, **given)
    if kind != "default":
        known = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
        raise ValueError(f"config: its rope_type is {kind!r}, want one of {known}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = int(head_dim * rule.get("partial_rotary_factor", 1.0)) // 2
    exponents = torch.arange(pairs, dtype=torch.float64, device=device) / pairs
    return rule["rope_theta"] ** -exponents, 1.0


def calls_interface(kind: type[PreTrainedModel]) -> bool:
    """True if models of this class call a registered attention function."""
    source = vars(sys.modules[kind.__module__])
    has_classes = any(name.endswith("_ATTENTION_CLASSES") for name in source)
    of_others = getattr(kind.config_class, "model_type", None) in MIXED
    can = kind._supports_attention_backend or kind._can_set_attn_implementation()
    return can and not has_classes and not of_others


def check_model(
    self: PreTrainedModel, requested_attention: str | None, *rest: Any, **more: Any
) -> str:
    """Replaces transformers' method, which accepts a registered name for every model."""
    if requested_attention == NAME and not calls_interface(type(self)):
        raise ValueError(
            f"attn_implementation: is {NAME!r} for {type(self).__name__}, which computes its "
            "attention in its own code, want 'eager' or another one of its own"
        )
    return stock_check(self, requested_attention, *rest, **more)


def register() -> None:
    """Make attn_implementation="dynamic_mask" and hybrids known to transformers.

    Models that are made from then on with it run their attention here. modeling_doge.DogeAttention
    is replaced by a class with the same parameters, which runs transformers' own attention under
    any other implementation. Give padding as the attention_mask [batch, length] of the model. Give
    packed sequences as one row whose position_ids begin anew in each, or with cu_seq_lens_q. Models
    that compute their attention in their own code are refused when they are made, in
    PreTrainedModel.get_correct_attn_implementation. Calling it again has no effect.

    Returns:
        None.

    Raises:
        ImportError: a version of transformers that is not supported, when this module is imported.

    Example:
        >>> import flash_dmattn.transformers
        >>> from transformers import DogeConfig, DogeForCausalLM
        >>> flash_dmattn.transformers.register()
        >>> sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
        >>> heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        >>> config = DogeConfig(**sizes, **heads, vocab_size=100, keep_window_size=16)
        >>> model = DogeForCausalLM._from_config(config, attn_implementation="dynamic_mask")
        >>> model(torch.arange(50)[None]).logits.shape
        torch.Size([1, 50, 100])

    Source: arXiv:2508.02124; the Doge models.
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)
    modeling_doge.DogeAttention = DogeAttention  # type: ignore[misc]
    PreTrainedModel.get_correct_attn_implementation = check_model  # type: ignore[method-assign]
    register_hybrid()
