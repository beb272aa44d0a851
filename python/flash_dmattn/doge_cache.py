"""The cache of transformers' Doge: keep_window_size keys for each layer and kv head.

transformers.py has the layers that attend through it.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

from . import _arguments, _types, cache_state, functional, streams
from ._signatures import BiasForm
from .cache import Drafts, DynamicMaskCache, join
from .streams import TOKENS_MAX

NAME = "dynamic_mask"  # of the attention implementation; "flash" in a name means FlashAttention


def has_plain_weights(layer: Any) -> bool:
    """True if dt_proj of a DogeAttention computes no more than its weights say: it has no adapter,
    hook or tensor parallelism. Kernels then compute scores from the weights."""
    dt_proj = layer.dt_proj
    hooks = dt_proj._forward_hooks or dt_proj._forward_pre_hooks
    hooks = hooks or "forward" in vars(dt_proj)  # accelerate's, which load offloaded weights
    is_parallel = hasattr(dt_proj.weight, "device_mesh")  # a DTensor
    return type(dt_proj) is torch.nn.Linear and not hooks and not is_parallel


def a_of(layer: Any) -> torch.Tensor:
    """A of a layer, with 0 for the sliding heads of a hybrid."""
    a_coef: torch.Tensor = getattr(layer, "a_coef", layer.A)
    return a_coef


def score_by_module(layer: Any, value: torch.Tensor) -> torch.Tensor:
    """The scores [batch, kv_heads, len], float32, of values [batch, len, kv_heads, head_dim], by a
    call of dt_proj.

    Raises:
        NotImplementedError: gradients through a dt_proj that is tensor-parallel.
    """
    dt, a_coef = layer.dt_proj(value.flatten(2)), a_of(layer)
    kv_heads, mesh = value.shape[2], getattr(layer.dt_proj.weight, "device_mesh", None)
    if dt.shape[2] != kv_heads and mesh is not None:  # scores of all ranks
        if torch.is_grad_enabled() and dt.requires_grad:
            raise NotImplementedError(
                "dt_proj: is tensor-parallel, want torch.no_grad(): its gradients are not "
                "implemented"
            )
        mine = slice(kv_heads * mesh.get_local_rank(), kv_heads * (mesh.get_local_rank() + 1))
        dt, a_coef = dt[:, :, mine], a_coef[mine]
    return (a_coef.float() * torch.nn.functional.softplus(dt.float())).transpose(1, 2)


def scores_of(layer: Any, value: torch.Tensor) -> torch.Tensor:
    """The scores [batch, kv_heads, len], float32, of values [batch, len, kv_heads, head_dim]."""
    if not has_plain_weights(layer):
        return score_by_module(layer, value)
    weights = (layer.dt_proj.weight, a_of(layer))
    return functional.score(value, *weights, dt_bias=layer.dt_proj.bias, bias_form="none")[0]


class KeptKeys(CacheLayerMixin):
    """The keys of a layer of Doge that later queries may keep. The layer attends through it; it
    does not give keys back.

    With record_past the newest tokens, 64 at most, are drafts: they are kept beside the cache, and
    enter it when more tokens come after crop() has settled how many stay.

    Args:
        window: of the layer, its keep_window_size.
        static: as in DogeCache.
        recent: of the layer.
        bias_form: as in DynamicMaskCache; "none" for a layer that gives scores.
    """

    owner = "DogeCache"
    users = f"the model is Doge with attn_implementation={NAME!r}"

    def __init__(
        self, window: int, static: bool, recent: int = 0, bias_form: BiasForm = "exp"
    ) -> None:
        super().__init__()
        self.window, self.recent, self.bias_form = window, recent, bias_form
        self.is_compileable, self.is_croppable = static, not static
        self.kept: Any = None  # a DynamicMaskCache, once it is initialised
        self.record_past = False
        self._drafts: Drafts | None = None
        self._settled = 0  # number of first drafts that crop() can no longer remove

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, kv_heads, _, head_dim = key_states.shape
        kind: dict[str, Any] = {"dtype": key_states.dtype, "device": key_states.device}
        self.kept = self._make(batch, kv_heads, head_dim, **kind)
        self.is_initialized = True

    def _make(self, *sizes: int, dtype: torch.dtype, device: torch.device) -> DynamicMaskCache:
        rules: dict[str, Any] = {"window": self.window, "recent": self.recent}
        rules.update({"static": self.is_compileable, "bias_form": self.bias_form})
        return DynamicMaskCache(1, *sizes, **rules, dtype=dtype, device=device)

    def positions(self, length: int) -> torch.Tensor:
        """[batch, length] int32: the positions of the next tokens, once it is initialised."""
        drafts = 0 if self._drafts is None else self._drafts.key.shape[1]
        positions: torch.Tensor = self.kept.positions(0, length) + drafts
        return positions

    # ---- attention ----

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_valid: torch.Tensor | None,
        score: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the next tokens.

        Args:
            layer: a DogeAttention.
            query: [batch, q_heads, len, head_dim].
            key: [batch, kv_heads, len, head_dim].
            value: like key.
            key_valid: optional [batch, len] bool, false for padding.
            score: [batch, kv_heads, len] float32, of a layer that gives scores.

        Returns:
            out [batch, len, q_heads, head_dim].
        """
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if not self.record_past:
            self._commit()
            return self._enter(layer, query, key, value, key_valid, score)
        first = max(key.shape[1] - TOKENS_MAX, 0)  # the first token that becomes a draft
        if key_valid is not None:  # drafts cannot be padding
            padding = (~key_valid[:, first:]).any(0).nonzero()
            first += int(padding[-1]) + 1 if padding.shape[0] > 0 else 0
        if first == 0:
            return self._draft(layer, query, key, value, score)
        self._commit()
        before = None if key_valid is None else key_valid[:, :first]
        q, k, v = (x[:, :first] for x in (query, key, value))
        out = self._enter(layer, q, k, v, before, None if score is None else score[..., :first])
        if first == key.shape[1]:
            return out
        q, k, v = (x[:, first:] for x in (query, key, value))
        score = None if score is None else score[..., first:]
        return torch.cat((out, self._draft(layer, q, k, v, score)), 1)

    def _enter(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_valid: torch.Tensor | None,
        score: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of tokens [batch, len, heads, head_dim] that enter the cache."""
        n_tokens = None
        if key_valid is not None and key.shape[1] == 1:
            n_tokens, key_valid = key_valid[:, 0].to(torch.int32), None
        if score is not None:
            scored: dict[str, Any] = {"score": score}
        elif has_plain_weights(layer):
            scored = {"dt_proj": layer.dt_proj.weight, "a_coef": a_of(layer)}
            scored["dt_bias"] = layer.dt_proj.bias
        else:
            return self._enter_in_pieces(layer, (query, key, value), key_valid, n_tokens)
        return self.kept.attend(
            *(0, query, key, value),
            **scored,
            key_valid=key_valid,
            n_tokens=n_tokens,
            softmax_scale=layer.scaling,
        )

    def _enter_in_pieces(
        self,
        layer: Any,
        rows: tuple[torch.Tensor, ...],
        key_valid: torch.Tensor | None,
        n_tokens: torch.Tensor | None,
    ) -> torch.Tensor:
        """The same with scores that kernels do not compute, 64 tokens at a time."""
        if key_valid is not None:
            raise NotImplementedError(
                f"attention_mask: has padding, want none in a prompt for a {self.owner} while "
                "dt_proj has an adapter or a hook, or is tensor-parallel"
            )
        found: list[Any] = []
        for query, key, value in zip(*(x.split(TOKENS_MAX, 1) for x in rows)):
            given: dict[str, Any] = {"score": score_by_module(layer, value), "n_tokens": n_tokens}
            given["softmax_scale"] = layer.scaling
            found.append(streams.decode(query, key, value, self.kept.keys, **given))
            self.kept._count(0, key.shape[1])
        return torch.cat(found, 1)

    # ---- drafts ----

    def _draft(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        score: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of at most 64 tokens that become drafts, after the present drafts."""
        score = scores_of(layer, value) if score is None else score
        count = 0 if self._drafts is None else self._drafts.key.shape[1]
        excess = count + key.shape[1] - TOKENS_MAX
        if excess > 0:  # the oldest have to enter now
            self._commit(max(excess, self._settled))
        rows = join(self._drafts, Drafts(key, value, score, None))
        entering, self._drafts = self._settled, rows
        out: Any = streams.decode(
            *(query, *rows[:2], self.kept.keys),
            score=rows.score,
            commit=entering,
            softmax_scale=layer.scaling,
            bias_form=self.bias_form,
        )
        self._forget(entering)
        return out

    def _commit(self, count: int | None = None) -> None:
        """Let the first `count` drafts, None for all, enter the cache."""
        if self._drafts is None:
            return
        key, value, score, _ = self._drafts
        count = key.shape[1] if count is None else count
        given: dict[str, Any] = {"commit": count, "bias_form": self.bias_form}
        streams.decode(key[:, :0], key, value, self.kept.keys, score=score, **given)
        self._forget(count)

    def _forget(self, count: int) -> None:
        """Forget the first `count` drafts, which have entered the cache."""
        if count > 0:
            assert self._drafts is not None
            self.kept._count(0, count)
            key, value, score, _ = self._drafts
            rows = Drafts(key[:, count:], value[:, count:], score[:, :, count:], None)
            self._drafts = rows if rows.key.shape[1] > 0 else None
        self._settled = max(self._settled - count, 0)

    def activate_past_recording(self) -> None:
        """Let crop() remove tokens that come from now on."""
        if self.is_croppable:
            self.record_past = True

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """Remove the last -tokens_to_remove tokens. The remaining tokens are settled: the next
        crop() cannot remove them."""
        tokens_to_remove = int(tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: is {tokens_to_remove}, want 0 or less")
        drafts = 0 if self._drafts is None else self._drafts.key.shape[1]
        removable = drafts - self._settled
        if -tokens_to_remove > removable:
            raise ValueError(
                f"tokens_to_remove: is {tokens_to_remove}, want 0 to {-removable}: a {self.owner} "
                "can remove the tokens that came after activate_past_recording() and the last "
                "crop(), 64 at most, none up to the last padding, and none if it is static"
            )
        self._settled = drafts + tokens_to_remove
        if tokens_to_remove < 0:
            assert self._drafts is not None
            key, value, score, _ = self._drafts
            stay = self._settled
            rows = Drafts(key[:, :stay], value[:, :stay], score[:, :, :stay], None)
            self._drafts = rows if stay > 0 else None

    # ---- what transformers asks ----

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> Any:
        raise ValueError(f"cache: is a {self.owner}, want another one unless {self.users}")

    def get_seq_length(self) -> Any:
        """The number of tokens; a static cache has it as a tensor, which compiled code can count
        up."""
        if self.kept is None:
            return 0
        drafts = 0 if self._drafts is None else self._drafts.key.shape[1]
        return self.kept.get_seq_length() + drafts

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # the mask covers the new tokens alone

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None:
        raise NotImplementedError(f"offload: a {self.owner} stays on its device")

    def reset(self) -> None:
        self._drafts, self._settled = None, 0
        if self.kept is not None:
            self.kept.reset()

    # ---- sequences ----

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.kept is not None:
            self._commit()
            self.kept.reorder(beam_idx.to(self.kept.keys.seen.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.kept is not None:
            self.batch_select_indices(torch.arange(self.kept.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Select these sequences, each any number of times."""
        if self.kept is None:
            return
        self._commit()
        before = self.kept
        rows = before.keys.key  # [batch, rows, kv_heads, head_dim]
        sizes = (indices.shape[0], *rows.shape[2:])
        self.kept = self._make(*sizes, dtype=rows.dtype, device=rows.device)
        for to, source in zip(self.kept.keys[:6], before.keys[:6]):
            to.copy_(source.index_select(0, indices.to(rows.device)))
        self.kept._count(0, 0)
        self.kept._lengths = before._lengths[:]


class KeptKeysCache(Cache):
    """A cache whose sequences can be saved as bytes: of layers with KeptKeys."""

    def early_initialization(
        self, batch_size: int, num_heads: Any, head_dim: Any, dtype: torch.dtype, device: Any
    ) -> None:
        """As of transformers' Cache.

        Raises:
            NotImplementedError: a dtype or device that no kernel supports.
        """
        _arguments.check_kernel_device(device)
        super().early_initialization(batch_size, num_heads, head_dim, dtype, device)

    def _kept(self) -> list[DynamicMaskCache]:
        """The keys of the layers."""
        found: list[DynamicMaskCache] = []
        for number, layer in enumerate(self.layers):
            if not isinstance(layer, KeptKeys):
                raise NotImplementedError(
                    f"cache: its layer {number} is a {type(layer).__name__} of transformers, want "
                    "layers of constant size to save or restore"
                )
            if layer.kept is None:
                raise ValueError(
                    "cache: has no sizes yet, want a call of the model before, or "
                    "early_initialization(batch, kv_heads, head_dim, dtype, device)"
                )
            if layer._drafts is not None:
                raise ValueError("cache: has tokens of assisted generation that crop() may remove")
            found.append(layer.kept)
        return found

    def save(self, b: int = 0) -> bytes:
        """Sequence b as bytes, so that generate() can go on later, or in another process.

        Raises:
            TypeError: b is not an int.
            ValueError: there is no such sequence; a cache without tokens, or one that assisted
                generation has left tokens in that crop() may remove.
            NotImplementedError: a model with layers whose cache is one of transformers.
        """
        return cache_state.save_all([kept._places(b)[0] for kept in self._kept()])

    def restore(self, b: int, state: bytes | bytearray | memoryview) -> None:
        """Make sequence b what another one was when it was saved, in a cache of the same model. A
        state that is refused changes nothing.

            cache.early_initialization(1, kv_heads, head_dim, model.dtype, model.device)
            cache.restore(0, state)

        Raises:
            TypeError: b is not an int, or state is not bytes.
            ValueError: as in save(); a state that is truncated or damaged, or of a cache of other
                layers, sizes, rules or dtype.
            NotImplementedError: as in save(); a state of another version.
        """
        kept = self._kept()
        cache_state.restore_all([one._places(b)[0] for one in kept], state)
        for one in kept:
            one._restored(b)


class DogeCache(KeptKeysCache):
    """A cache for Doge that has keep_window_size keys for each layer and kv head, whatever the
    length: generate() gives the same tokens as with a cache of all keys. For a model with a
    sliding_window it has the keys of that window, from which each query selects its own.

        model.generate(tokens, past_key_values=DogeCache(model.config))

    It serves greedy search, sampling, beams, assisted generation, prompts in several calls, and
    padding.

    Args:
        config: of the model, which has to have attn_implementation "dynamic_mask".
        static: on a CUDA device generate() compiles the model for single tokens and runs it as a
            CUDA graph, as it does with transformers' StaticCache. Its first call takes longer, and
            later tokens cost the host much less. Such a cache does not serve assisted generation.

    Raises:
        TypeError: a config of another kind of model.
        NotImplementedError: a static cache for a model with a sliding_window.
        ValueError: a call of a model that has another window or is no Doge; a crop() of more tokens
            than can be removed.

    Example:
        >>> import flash_dmattn.transformers
        >>> from transformers import DogeConfig, DogeForCausalLM
        >>> flash_dmattn.transformers.register()
        >>> sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
        >>> heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        >>> config = DogeConfig(**sizes, **heads, vocab_size=100, keep_window_size=16)
        >>> model = DogeForCausalLM._from_config(config, attn_implementation="dynamic_mask")
        >>> cache = flash_dmattn.transformers.DogeCache(config)
        >>> model.generate(torch.arange(50)[None], past_key_values=cache, max_new_tokens=5).shape
        torch.Size([1, 55])

    Source: docs/algorithm.md, streams.
    """

    def __init__(self, config: transformers.DogeConfig, static: bool = False) -> None:
        if not isinstance(config, transformers.DogeConfig):
            raise _types.refusal("config", config, "a DogeConfig")
        _types.check_flag("static", static)
        window = self.sliding_window = config.sliding_window
        self.window = config.keep_window_size
        if static and window is not None:
            raise NotImplementedError(
                f"static: is True, want False for a model with a sliding_window, {window}"
            )
        count = range(config.num_hidden_layers)
        if window is None:
            super().__init__(layers=[KeptKeys(self.window, static) for _ in count])
        else:
            super().__init__(layers=[DynamicSlidingWindowLayer(window) for _ in count])

    def _check(self, config: transformers.DogeConfig) -> None:
        """Check that the windows are as in a model's configuration."""
        for name, own in (
            ("keep_window_size", self.window),
            ("sliding_window", self.sliding_window),
        ):
            wanted = getattr(config, name)
            if own != wanted:
                raise ValueError(f"cache: its {name} is {own}, want the model's {name}, {wanted}")
