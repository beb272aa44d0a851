"""Layers for models: dynamic mask attention with its projections.

The terms are as in fdma.h; `hidden` is the width of the hidden states, `heads` is q_heads.
"""

from __future__ import annotations

import importlib
import math
from types import ModuleType
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Sequence

import torch
from torch import nn

from . import _arguments, _types, functional, fused, rotated
from ._arguments import check_dropout, finish, pad_head_dim
from ._layer_checks import (
    check_cache,
    check_hidden,
    check_input,
    check_lifetimes,
    check_memory,
    check_memory_of_call,
    check_nope,
    check_options,
    check_options_of_call,
    check_positions,
    check_sizes,
    check_starts,
    check_takes_cache,
    check_types,
    require,
)
from .cache import DynamicMaskCache
from .layer_caches import LayerCaches
from .lifetimes import LifetimeGate, Predict, check_places, check_predict, lifetime_loss
from .options import DynamicMaskOptions
from .rotary import is_unhooked, rotate_heads, rotation_for, shared_table
from .score_targets import no_loss, score_target_loss

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

ALL_KEYS = (1 << 63) - 1  # a window that keeps every key


class States(NamedTuple):
    """The arguments of a layer's attend(), without their gradients."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_valid: torch.Tensor | None
    starts: torch.Tensor | Sequence[int] | None


class DynamicMaskAttention(nn.Module):
    """Attention in which every query attends to its `window` best keys, with projections.

        q, k, v = rotate(q_norm(q_proj(x))), rotate(k_norm(k_proj(x))), v_proj(x)
        score = A * softplus(dt_proj(v)), where dt_proj has a bias if dt_bias is True
        forward(x) = o_proj(softmax(scale * <q, k> + exp(score)) v), over the kept keys: of the keys
            that a query can see, the `recent` newest, and of the others the `window` keys of
            highest score; with sink_logit the sum of the softmax has one more term for each head

    With lifetime_units the score of a key is the position at which its life ends, by a gate that
    reads the hidden state of its token, and there is no bias: LifetimeGate has the formula. The
    gate learns from lifetime_loss() alone, and calibrate_lifetimes() follows.

    A is initialised with initial_a. If that is 0, all keys have equal scores, so that the most
    recent ones are kept: training starts (if causal) from a sliding window of window + recent keys,
    including the first `sinks` keys of the sequence, and learns which keys to keep longer.

    The settings below are for the layers of a language model, where docs/quality.md measured them;
    HybridPlan makes the arguments of a model of the first three:

    - sliding_heads=kv_heads, recent=0: a sliding window. Use it in most layers, with a small
      window: models of such layers had a lower loss than dense attention after the same text.
    - nope_heads=kv_heads, targets_only=True, initial_a=0.005, in one of the last layers: keys from
      all of the sequence are recalled from a cache of fixed size, as far as they fit into it. With
      half of the keys the newest, as recent=None has it, the loss is lower than with few newest
      ones, which recall more of what is marked.
    - nope_heads=kv_heads, lifetime_units=512, recent=64 in that layer: a lower loss and better
      recall than with score targets and as many keys, after one more phase of training.
    - window=None in that layer: the lowest loss and the best recall, with a cache that grows.
    - the defaults, in all layers: a higher loss than with a sliding window, and no recall beyond
      it. Scores that learn through the bias recall about half of what targets teach them.
    - recent=0 with scores in all heads and layers, as Doge has it: by far the highest loss, where
      the window is much shorter than the sequence.

    Args:
        hidden: width of the hidden states.
        heads: query heads.
        kv_heads: key and value heads, a divisor of `heads`. Each key has a score for each of them.
        window: keys that a query keeps, 1 or more; None for plain attention over all keys, without
            scores.
        recent: keys that a query keeps beside these because they are the newest that it can see, 0
            or more; 0 if `causal` is False. None is for `window` in a causal layer, where a query
            then keeps up to twice `window` keys: a language model needs the tokens just before a
            query, which scores alone may not keep. Doge selects by scores alone: recent=0.
        sinks: keys, 0 to window, that outrank all others whatever their scores: the first ones of
            the sequence that are valid. They count in the window. If window is None, a query keeps
            all keys, whatever recent and sinks are.
        gap: of these keys a query keeps only sinks, the `recent` newest, and those whose score is
            at most this far below the highest score of all valid keys up to its position. None, as
            it has to be if window is None or `causal` is False, leaves no key out. A layer with a
            gap has no cache.
        sliding_heads: kv heads, the first ones, that learn no scores: their A counts as 0, so that
            they keep the window + recent newest keys. 0 if `causal` is False or window is None. If
            all heads slide, dt_proj and A do not require gradients.
        nope_heads: kv heads, the last ones, that have no rotary embedding (NoPE), like their query
            heads. Their logits do not depend on distance. 0 if rope_base is None.
        nope_rotary_dim: channels of NoPE heads that are rotated nevertheless, the first ones, with
            the angles of a head with so many channels: an even number, 0 without such heads.
        initial_a: A before training, except in sliding heads.
        targets_only: whether scores learn from score_target_loss() alone: A stays as it is, and the
            bias passes no gradient on to dt_proj.
        lifetime_units: width of the gate that gives lifetimes of keys, in place of dt_proj and A; 0
            for none. The layer then has a window, a head that does not slide, no gap and no
            options, and causal is True. Lifetimes count the tokens in x, whatever `positions` says.
        initial_lifetime: lifetimes before training, about: a number above 0.
        head_dim: channels of a head, 1 to 256, even with rope_base; None for hidden / heads.
        causal: a query sees only keys at positions up to its own. If False, all keys are ranked
            once, and every query keeps the best of them.
        bias: whether q_proj, k_proj, v_proj and o_proj have a bias.
        qk_norm: whether q_norm and k_norm normalize each head of queries and keys by its root mean
            square (torch.nn.RMSNorm), before they are rotated. Without, they are the identity.
        norm_eps: added to the mean square.
        memory_hidden: width of `memory`, the hidden states that keys and values come from in
            cross-attention; None for self-attention.
        dt_bias: whether dt_proj has a bias.
        dropout: probability with which each attention probability becomes 0 in training mode; the
            others are divided by 1 - dropout. Calls with a cache have no dropout.
        sink_logit: whether each query head learns a sink logit, so that its probabilities may sum
            to less than 1. It is initialised with zeros.
        rope_base: base of the rotary angles, 1 or more; None for no position embedding.
        softmax_scale: multiplies <query, key>; None for 1 / sqrt(head_dim).
        softcap: c > 0 turns the scaled product x into c * tanh(x / c), before the bias is added; 0
            for none.
        options: as in flash_dma_attention(), for every call of the layer. Its keep_window_size has
            to be `window`. A layer with options has no cache.
        process_group: ranks that each have consecutive tokens of every sequence: a process group of
            torch.distributed or a mesh of one dimension, as in distributed.py. The layer then has
            no gap, dropout, memory or options. With a cache the group does not matter.
        device: of the parameters.
        dtype: of the parameters: float32, float16 or bfloat16 (float64 on the CPU, slowly).

    Parameters, by their names, which are the keys of the state_dict (with `bias`, the first four
    have a .bias too; with `dt_bias`, dt_proj has one, [kv_heads]):
        q_proj.weight   [heads * head_dim, hidden]
        k_proj.weight   [kv_heads * head_dim, hidden], or memory_hidden columns if that is given
        v_proj.weight   like k_proj.weight
        o_proj.weight   [hidden, heads * head_dim]
        q_norm.weight   [head_dim], and k_norm.weight, if asked for
        dt_proj.weight  [kv_heads, kv_heads * head_dim], unless window is None
        A               [kv_heads], unless window is None
        sink_logit      [heads], if asked for
    and, with lifetime_units, in place of dt_proj and A, in float32 (float64 if dtype is):
        lifetime_gate.expand.weight    [lifetime_units, hidden], and .bias [lifetime_units]
        lifetime_gate.contract.weight  [kv_heads - sliding_heads, lifetime_units], and .bias

    Raises:
        TypeError: a window, recent, sinks or number of heads that is not an int.
        ValueError: sizes that contradict each other, options of another window, or a window,
            recent, sinks, gap, number of heads or dropout out of its range.
        NotImplementedError: a device that PyTorch does not have here.

    Example:
        >>> layer = flash_dmattn.DynamicMaskAttention(hidden=64, heads=4, kv_heads=2, window=16)
        >>> layer(torch.randn(2, 100, 64)).shape
        torch.Size([2, 100, 64])

    Source: arXiv:2508.02124; the Doge models.
    """

    sink_logit: nn.Parameter | None
    lifetime_gate: LifetimeGate | None

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        window: int | None,
        *,
        recent: int | None = None,
        sinks: int = 0,
        gap: float | None = None,
        sliding_heads: int = 0,
        nope_heads: int = 0,
        nope_rotary_dim: int = 0,
        initial_a: float = 0.0,
        targets_only: bool = False,
        lifetime_units: int = 0,
        initial_lifetime: float = 65536.0,
        head_dim: int | None = None,
        causal: bool = True,
        bias: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        memory_hidden: int | None = None,
        dt_bias: bool = False,
        sink_logit: bool = False,
        dropout: float = 0.0,
        rope_base: float | None = 10000.0,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        options: DynamicMaskOptions | None = None,
        process_group: ProcessGroup | DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_types(DynamicMaskAttention, locals())
        super().__init__()
        dim = check_sizes(hidden, heads, kv_heads, head_dim, rope_base)
        if recent is None:
            recent = window if causal and window is not None else 0
        no_recent = None if causal else "if causal is False"
        rules = _arguments.check_rules(
            ALL_KEYS if window is None else window, recent, sinks, no_recent=no_recent
        )
        self.hidden, self.heads, self.kv_heads, self.head_dim = hidden, heads, kv_heads, dim
        self.window = None if window is None else rules[0]
        self.recent, self.sinks = rules[1:]
        _arguments.check_gap(gap, "if window is None" if window is None else no_recent)
        self.gap, self.initial_a = gap, initial_a
        self._set_kinds(sliding_heads, nope_heads, nope_rotary_dim, causal, rope_base)
        self.options = check_options(options, self.window)
        self.softmax_scale, self.softcap, self.dropout = softmax_scale, softcap, dropout
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        self.memory_hidden = check_memory(memory_hidden, causal, rope_base)
        self.ranks = check_ranks(process_group, dropout, (gap, memory_hidden, options))
        source = hidden if memory_hidden is None else memory_hidden
        self.q_proj = nn.Linear(hidden, heads * dim, bias=bias, **kind)
        self.k_proj = nn.Linear(source, kv_heads * dim, bias=bias, **kind)
        self.v_proj = nn.Linear(source, kv_heads * dim, bias=bias, **kind)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(dim, eps=norm_eps, **kind) if qk_norm else nn.Identity() for _ in range(2)
        )
        self.o_proj = nn.Linear(heads * dim, hidden, bias=bias, **kind)
        self.targets_only, self.keeps_states = targets_only, False
        self.states: States | None = None
        check_lifetimes(self, lifetime_units, initial_lifetime, dt_bias)
        self._add_scores(dt_bias, sink_logit, kind, lifetime_units, initial_lifetime)

    def _set_kinds(
        self, sliding: int, nope: int, rotary_dim: int, causal: bool, rope_base: float | None
    ) -> None:
        """Set which heads slide, and which have no rotary embedding."""
        self.causal, self.rope_base = causal, rope_base
        is_base = rope_base is None or 1 <= rope_base < math.inf
        require(is_base, f"rope_base: is {rope_base}, want a finite number, 1 or more, or None")
        most = self.kv_heads if causal and self.window is not None else 0
        self.sliding_heads = _arguments.check_int("sliding_heads", sliding)
        require(0 <= sliding <= most, f"sliding_heads: is {sliding}, want 0 to {most}")
        most = 0 if rope_base is None else self.kv_heads
        self.nope_heads, self.nope_rotary_dim = check_nope(nope, rotary_dim, most, self.head_dim)

    def _add_scores(
        self, dt_bias: bool, sink_logit: bool, kind: dict[str, Any], units: int, lifetime: float
    ) -> None:
        gate = None
        if units > 0:
            own = {**kind, "dtype": _arguments.wide(self.k_proj.weight.dtype)}
            sizes = (self.hidden, units, self.kv_heads, self.sliding_heads)
            gate = LifetimeGate(*sizes, lifetime, **own)
        elif self.window is not None:
            width = self.kv_heads * self.head_dim
            self.dt_proj = nn.Linear(width, self.kv_heads, bias=dt_bias, **kind)
            self.A = nn.Parameter(torch.empty(self.kv_heads, **kind))
            self._reset_a()
            self.A.requires_grad_(not (self.targets_only or self._all_slide))
            self.dt_proj.requires_grad_(not self._all_slide)
        self.register_module("lifetime_gate", gate)
        zeros = nn.Parameter(torch.zeros(self.heads, **kind)) if sink_logit else None
        self.register_parameter("sink_logit", zeros)

    def reset_parameters(self) -> None:
        """Initialise all parameters anew: projections as nn.Linear does, A with initial_a, and sink
        logits with zeros."""
        for child in self.children():
            reset: Any = getattr(child, "reset_parameters", None)
            if reset is not None:  # nn.Identity may have none
                reset()
        if self._has_weights:
            self._reset_a()
        if self.sink_logit is not None:
            nn.init.zeros_(self.sink_logit)

    @torch.no_grad()
    def _reset_a(self) -> None:
        self.A.fill_(self.initial_a)[: self.sliding_heads] = 0

    @property
    def _has_weights(self) -> bool:
        """True if scores come from dt_proj and A."""
        return self.window is not None and self.lifetime_gate is None

    @property
    def _all_slide(self) -> bool:
        return self.sliding_heads == self.kv_heads

    @property
    def a_coef(self) -> torch.Tensor:
        """A with 0 for the sliding heads. Scores are computed from it."""
        heads = self.sliding_heads
        if self._all_slide:
            return torch.zeros_like(self.A)
        return nn.functional.pad(self.A[heads:], (heads, 0)) if heads else self.A

    @property
    def _bias_form(self) -> str:
        """If all heads slide, all keys have the same bias, exp(0), which has no effect but beside a
        sink logit."""
        return "none" if self._all_slide and self.sink_logit is None else "exp"

    @property
    def _wide_sink_logit(self) -> torch.Tensor | None:
        """The sink logits in float32 (float64 if the layer is)."""
        sink = self.sink_logit
        return None if sink is None else sink.to(_arguments.wide(sink.dtype))

    def extra_repr(self) -> str:
        return (
            f"{self.hidden}, heads={self.heads}, kv_heads={self.kv_heads}, "
            f"head_dim={self.head_dim}, window={self.window}, recent={self.recent}, "
            f"sinks={self.sinks}, gap={self.gap}, sliding_heads={self.sliding_heads}, "
            f"nope_heads={self.nope_heads}, causal={self.causal}, dropout={self.dropout}"
            + ("" if (gate := self.lifetime_gate) is None else f", lifetime_units={gate.units}")
            + ("" if self.options is None else f", options={self.options}")
        )

    def forward(
        self,
        x: torch.Tensor,
        *,
        memory: torch.Tensor | None = None,
        key_valid: torch.Tensor | None = None,
        starts: torch.Tensor | Sequence[int] | None = None,
        positions: torch.Tensor | None = None,
        cache: DynamicMaskCache | LayerCaches | None = None,
        layer: int = 0,
        index: torch.Tensor | None = None,
        n_tokens: torch.Tensor | int | None = None,
        draft: bool = False,
        lengths: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Attention of every position of x; with a cache, also to the tokens before x.

        A cache makes x the next tokens of its sequences, 1 or any number, and they enter it. The
        results equal those for the whole sequences up to rounding. Call it within torch.no_grad().

        Args:
            x: hidden states [batch, len, hidden].
            memory: hidden states [batch, kv_len, memory_hidden], for a layer with memory_hidden:
                keys and values come from them. No cache and no starts then.
            key_valid: optional [batch, kv_len] bool or uint8, false for padding, which is never
                kept and never read, and has no gradient. (torch.nn's key_padding_mask is its
                inverse.) Without memory kv_len is len.
            starts: optional [sequences + 1] int32, for packed sequences: x is [1, len, hidden], and
                sequence n has the positions starts[n] to starts[n + 1] - 1. With a process_group
                they count the tokens of all ranks: a list or a tensor on the CPU.
            positions: optional [batch or 1, len] integers for the rotary angles; None for 0, 1,
                ..., beginning anew in each packed sequence. Give them if there is padding on the
                left, then in every call with the same cache: None counts padding as tokens.
                Causality depends on the order in x, not on these numbers. With a cache None
                continues after the tokens before x.
            cache: of the tokens before x, with this layer's kv_heads, head_dim, window, recent and
                sinks, and bias_form "none" if it has lifetimes. The layer has to be causal, without
                a gap and options, and starts None.
            layer: the number of this layer in the cache.
            index: with a cache: as in its attend(). x is then [streams, len, hidden].
            n_tokens: with a cache: as in its attend().
            draft: with a cache: the tokens do not enter it; see DynamicMaskCache.
            lengths: with a process_group: as in context_parallel_attention().

        Returns:
            [batch, len, hidden]. Where a query keeps no key, the attention is 0, and the result is
            o_proj's bias.

        Raises:
            ValueError: shapes that contradict each other, a cache of another kind of layer, or
                hidden states beyond the limits of options.
            NotImplementedError: a dtype or head_dim that no kernel of the device supports, or a
                dt_proj that has been replaced, by an adapter for example. (Parametrizations of
                torch.nn.utils are taken.)
        """
        check_hidden("x", "len", x, self.hidden)
        check_input("x", x, self.q_proj)
        check_memory_of_call(self.memory_hidden, x, memory, cache, starts)
        check_input("memory", memory, self.k_proj)
        check_starts(starts, x, takes_list=self.ranks is not None)
        check_options_of_call(positions, cache, starts, index, n_tokens, draft, lengths)
        cache, layer = check_cache(self, x, cache, layer, index)
        query, key, value = self._project(x, x if memory is None else memory)
        call = None
        if cache is positions is starts is lengths is None and self._takes_rotated(query):
            call = self._rotated_call(query, key, value, key_valid)
            out = rotated.repeat(call)
            if out is not NotImplemented:
                return self.o_proj(out.flatten(2))
        counted, gate = None, self.lifetime_gate
        rotates = self.rope_base is not None and positions is None
        if rotates or gate is not None:
            if cache is not None:
                counted = cache.positions(layer, x.shape[1], index)
            elif self.ranks is not None:
                counted = self.ranks.positions(x, starts, lengths)
        positions = counted if rotates else positions
        query, key = self._place(query, key, positions, starts)
        scored: dict[str, Any] = {}
        if gate is not None:
            if counted is None:
                counted = torch.arange(x.shape[1], device=x.device)[None]
            scored["score"] = gate.score(x, counted)
        if cache is None:
            out = self.attend(query, key, value, key_valid, starts, lengths, **scored)
            if call is not None:
                rotated.remember(call)
        else:
            weights: list[torch.Tensor] = []
            if gate is None:
                *weights, scored["dt_bias"] = self._score_weights()
            out = _arguments.call_renamed(
                {"key": "x"},
                cache.attend,
                layer,
                query,
                key,
                value,
                *weights,
                **scored,
                index=index,
                key_valid=key_valid,
                n_tokens=n_tokens,
                draft=draft,
                sink_logit=self._wide_sink_logit,
                softmax_scale=self.softmax_scale,
                softcap=self.softcap,
            )
        return self.o_proj(out.flatten(2))

    if TYPE_CHECKING:

        def __call__(self, *args: Any, **named: Any) -> torch.Tensor: ...

    def score_target_loss(
        self,
        x: torch.Tensor,
        heads: Sequence[int] | None = None,
        *,
        key_valid: torch.Tensor | None = None,
        starts: torch.Tensor | Sequence[int] | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """flash_dmattn.score_target_loss() of this layer: a loss that has a gradient for dt_proj
        alone, and trains scores to rank keys by the attention that later queries give them.

        Args:
            x: as forward() gets it: [batch, len, hidden]. One of the sequences of a step can be
                enough: the time grows with the squares of their lengths.
            heads: the kv heads whose scores learn, none of them sliding; None: all that do not
                slide.
            key_valid: as in forward(); padding counts neither as keys nor as queries.
            starts: as in forward(), or a list.
            positions: as in forward().

        Returns:
            One number, in float32 (float64 if x is); 0 if all heads slide, or no sequence has more
            than recent + sinks valid tokens.

        Raises:
            TypeError, NotImplementedError: as flash_dmattn.score_target_loss().
            ValueError: as that function; or a layer that is not causal, has no window, or has a
                process_group; or a head that slides.
        """
        wanted = "score_target_loss: want a causal layer with a window, without process_group and "
        wanted += "lifetime_units"
        require(self.causal and self._has_weights and self.ranks is None, wanted)
        if not torch.compiler.is_compiling():  # PyTorch 2.11 does not trace locals()
            _types.check_call(DynamicMaskAttention.score_target_loss, locals())
        check_hidden("x", "len", x, self.hidden)
        check_input("x", x, self.q_proj)
        check_starts(starts, x)
        if heads is None:
            if self._all_slide:
                return no_loss(self._score_weights()[0], x.dtype)
            heads = range(self.sliding_heads, self.kv_heads)
        for head in heads:
            slides = head in range(self.sliding_heads)
            require(not slides, f"heads: has {head}, want none of the sliding heads")
        with torch.no_grad():
            query, key, value = self._project(x, x)
            query, key = self._place(query, key, positions, starts)
        return score_target_loss(
            *(query, key, value, self._score_weights()[0]),
            recent=self.recent,
            sinks=self.sinks,
            heads=heads,
            key_valid=key_valid,
            starts=starts,
            softmax_scale=self.softmax_scale,
            softcap=self.softcap,
        )

    def lifetime_loss(
        self,
        x: torch.Tensor,
        predict: Predict,
        *,
        keys: int,
        progress: float,
        queries: int = 2048,
        weight: torch.Tensor | None = None,
        capacity_weight: float = 1.0,
        key_valid: torch.Tensor | None = None,
        starts: torch.Tensor | Sequence[int] | None = None,
        positions: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """flash_dmattn.lifetime_loss() of this layer: a loss that has a gradient for lifetime_gate
        alone. The layer has to be the last of the model in which a position sees others.

        Args:
            x: as forward() gets it: [1, len, hidden].
            predict: a function of what forward() returns for some positions, [1, n, hidden], and of
                these positions [n] int64, to the logits of the model there, [1, n, vocabulary].
            keys: keys that queries will keep, whatever the layer's window and recent are now.
            progress: 0 to 1: how much of the training of the gate is done.
            queries, weight, capacity_weight, generator: as in flash_dmattn.lifetime_loss().
            key_valid: as in forward(); padding counts neither as keys nor as queries.
            starts: as in forward(), or a list.
            positions: as in forward().

        Returns:
            One number, in float32 (float64 if x is).

        Raises:
            TypeError, NotImplementedError: as flash_dmattn.lifetime_loss().
            ValueError: as that function; or a layer without lifetime_units, or with a
                process_group.
        """
        gate = self._gate("lifetime_loss")
        if not torch.compiler.is_compiling():
            _types.check_call(DynamicMaskAttention.lifetime_loss, locals())
        check_hidden("x", "len", x, self.hidden)
        check_input("x", x, self.q_proj)
        require(x.shape[0] == 1, f"x: batch is {x.shape[0]}, want 1")
        check_starts(starts, x)
        with torch.no_grad():
            query, key, value = self._project(x, x)
            query, key = self._place(query, key, positions, starts)
        check_predict(predict)
        check_places("key_valid", key_valid, x)
        own = x.detach()
        own = own if key_valid is None else own.masked_fill(~key_valid.bool()[..., None], 0)

        def predict_from(out: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return predict(self.o_proj(out.flatten(2)), places)

        return lifetime_loss(
            *(query, key, value, gate(own), predict_from),
            keys=keys,
            progress=progress,
            queries=queries,
            weight=weight,
            capacity_weight=capacity_weight,
            key_valid=key_valid,
            starts=starts,
            sink_logit=self._wide_sink_logit,
            softmax_scale=self.softmax_scale,
            softcap=self.softcap,
            generator=generator,
        )

    def calibrate_lifetimes(self, x: torch.Tensor, keys: int | None = None) -> None:
        """Multiply the lifetimes of each head by a factor, in lifetime_gate.contract.bias, so that
        as many keys live as queries keep, in the mean over the second halves of some sequences.

        Args:
            x: as forward() gets it, [sequences, len, hidden], without padding: texts that the gate
                has not learned from.
            keys: keys that queries will keep; None for window + recent.

        Raises:
            TypeError: keys is not an int.
            ValueError: a layer without lifetime_units or with a process_group, a shape of x, no
                sequences, or a number of keys out of its range: from three quarters of len on, no
                lifetimes are long enough.
        """
        gate = self._gate("calibrate_lifetimes")
        check_hidden("x", "len", x, self.hidden)
        check_input("x", x, self.q_proj)
        assert self.window is not None
        keys = self.window + self.recent if keys is None else _arguments.check_int("keys", keys)
        require(keys >= 1, f"keys: is {keys}, want 1 or more")
        require(x.shape[0] >= 1, "x: axis 0 has 0 elements, want 1 or more")
        fits = 4 * keys < 3 * x.shape[1]
        require(fits, f"keys: is {keys}, want fewer than 3/4 of len, which is {x.shape[1]}")
        gate.calibrate(x, keys)

    def _gate(self, method: str) -> LifetimeGate:
        has_gate = self.lifetime_gate is not None and self.ranks is None
        wanted = "want a layer with lifetime_units, without process_group"
        require(has_gate, f"{method}: {wanted}")
        assert self.lifetime_gate is not None
        return self.lifetime_gate

    def _project(
        self, x: torch.Tensor, source: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project x to queries and source to keys and values, [batch, len, heads, head_dim], not
        normalized or rotated."""
        q_shape, kv_shape = (self.heads, self.head_dim), (self.kv_heads, self.head_dim)
        query, key = (
            self.q_proj(x).unflatten(2, q_shape),
            self.k_proj(source).unflatten(2, kv_shape),
        )
        return query, key, self.v_proj(source).unflatten(2, kv_shape)

    def _score_weights(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """dt_proj's weight, A and dt_proj's bias, from which kernels compute the scores."""
        linear = getattr(self.dt_proj, "original_module", self.dt_proj)  # of PEFT's modules_to_save
        kind = type(self.dt_proj)
        require(
            isinstance(linear, nn.Linear),
            f"dt_proj: is a {kind.__name__}, want a torch.nn.Linear, whose weight is all of it",
            NotImplementedError,
        )
        return self.dt_proj.weight, self.a_coef, self.dt_proj.bias

    def _bias_weights(self) -> list[torch.Tensor | None]:
        """The same as attention gets them, for the bias."""
        weights = self._score_weights()
        return [x.detach() if self.targets_only and x is not None else x for x in weights]

    def new_cache(self, batch: int, *, layers: int = 1, static: bool = False) -> DynamicMaskCache:
        """An empty cache of this layer's sizes, rules, dtype and device, for `layers` layers with
        the same ones; LayerCaches is for layers that differ. static as in DynamicMaskCache.

        Raises:
            TypeError, ValueError: as DynamicMaskCache; a layer that cannot have a cache.
        """
        check_takes_cache(self)
        rules: dict[str, Any] = {"window": self.window, "recent": self.recent, "sinks": self.sinks}
        like = self._like_cache
        kind: dict[str, Any] = {"dtype": like.dtype, "device": like.device, "static": static}
        kind["bias_form"] = self._cache_form
        return DynamicMaskCache(layers, batch, self.kv_heads, self.head_dim, **rules, **kind)

    @property
    def _like_cache(self) -> torch.Tensor:
        """A tensor of the dtype and on the device that a cache has."""
        return self.A if self._has_weights else self.k_proj.weight

    @property
    def _cache_form(self) -> str:
        """bias_form of a cache."""
        return "exp" if self.lifetime_gate is None else "none"

    def rotate_heads(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Queries or keys [batch, len, heads, head_dim] with rotary embedding, without it in NoPE
        heads."""
        check_positions(positions, x)
        base: Any = self.rope_base
        return rotate_heads(x, positions, base, self._nope_heads_of(x), self.nope_rotary_dim)

    def _nope_heads_of(self, x: torch.Tensor) -> int:
        """How many heads of queries or keys are NoPE heads."""
        return self.nope_heads * x.shape[2] // self.kv_heads

    def _place(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        positions: torch.Tensor | None,
        starts: torch.Tensor | Sequence[int] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """query and key, normalized and with rotary embedding; positions as in forward()."""
        if self.rope_base is None:
            return self.q_norm(query), self.k_norm(key)
        if positions is not None:
            check_positions(positions, query)
        rotation = rotation_for(query, positions, starts, self.rope_base, self.nope_rotary_dim)
        query = rotation.normalized(query, self.q_norm, self._nope_heads_of(query))
        return query, rotation.normalized(key, self.k_norm, self._nope_heads_of(key))

    def _takes_rotated(self, query: torch.Tensor) -> bool:
        """True if rotation and attention may be one call, because nothing stands between them or
        has to see their tensors."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return False
        if self.rope_base is None or not self._has_weights or type(query) is not torch.Tensor:
            return False
        norms = (self.q_norm, self.k_norm)
        return (
            not (self.keeps_states or self.nope_rotary_dim or (self.training and self.dropout))
            and self.ranks is self.options is None
            and all(type(norm) is nn.Identity and is_unhooked(norm) for norm in norms)
            and type(self).attend is DynamicMaskAttention.attend
            and "attend" not in vars(self)
        )

    def _rotated_call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_valid: torch.Tensor | None,
    ) -> rotated.Call:
        """_place() and attend() as one call."""
        assert self.rope_base is not None and self.window is not None
        weights = (*self._bias_weights(),)
        return rotated.Call(
            (query, key, value),
            weights,
            key_valid,
            self._wide_sink_logit,
            shared_table(query.shape[1], self.head_dim, self.rope_base, query),
            (self._nope_heads_of(query), self.nope_heads),
            (
                *(self.window, self.recent, self.sinks, "causal" if self.causal else "global"),
                *(self._bias_form, self.causal, self.softmax_scale or 0.0, self.softcap, 0.0),
                *(self.gap or 0.0, False, None),
            ),
        )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_valid: torch.Tensor | None,
        starts: torch.Tensor | Sequence[int] | None,
        lengths: Sequence[int] | None = None,
        score: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of projected states: out [batch, len, heads, head_dim]. A layer with
        lifetimes has a score [batch, kv_heads, kv_len]."""
        wants = "None" if self.lifetime_gate is None else "a torch.Tensor"
        fits = (score is None) == (self.lifetime_gate is None)
        require(fits, f"score: is {'None' if score is None else 'given'}, want {wants}")
        if self.keeps_states:
            q, k, v = (x.detach() for x in _arguments.autocast("query", (query, key, value)))
            self.states = States(q, k, v, key_valid, starts)
        if self.ranks is not None:
            return self._attend_over_ranks(query, key, value, key_valid, starts, lengths, score)
        require(lengths is None, "lengths: is given, want None without a process_group")
        options: dict[str, Any] = {
            "key_valid": key_valid,
            "starts": starts,
            "sink_logit": self._wide_sink_logit,
            "causal": self.causal,
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
            "dropout_p": self.dropout if self.training else 0.0,
        }
        if self.window is None:
            return functional.attention(query, key, value, **options)[0]
        rules: dict[str, Any] = {"recent": self.recent, "sinks": self.sinks}
        if score is not None:
            rules.update({"key_valid": key_valid, "starts": starts})
            selection = functional.select(score, self.window, **rules)
            return functional.attention(query, key, value, selection=selection, **options)[0]
        *weights, dt_bias = self._bias_weights()
        rules.update({"gap": self.gap, "dt_bias": dt_bias})
        call: tuple[Any, ...] = (query, key, value, *weights, self.window)
        given: dict[str, Any] = {**rules, **options, "options": self.options}
        given["bias_form"] = self._bias_form
        out: Any = fused.flash_dma_attention(*call, **given)
        return out

    def _attend_over_ranks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_valid: torch.Tensor | None,
        starts: torch.Tensor | Sequence[int] | None,
        lengths: Sequence[int] | None,
        score: torch.Tensor | None,
    ) -> torch.Tensor:
        assert self.ranks is not None
        options: dict[str, Any] = {
            "causal": self.causal,
            "key_valid": key_valid,
            "lengths": lengths,
            "sink_logit": self._wide_sink_logit,
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
        }
        rows = (query, key, value)
        if self.window is None:
            require(starts is None, "starts: is given, want None if window is None")
            return self.ranks.attend_to_all(rows, options)
        rules: dict[str, Any] = {"recent": self.recent, "sinks": self.sinks, "starts": starts}
        weights: list[torch.Tensor | None] = [None, None]
        if score is None:
            *weights, rules["dt_bias"] = self._bias_weights()
        else:
            rules.update({"score": score, "bias_form": "none"})
        return self.ranks.attend((*rows, *weights, self.window), {**options, **rules})


def own_module(name: str) -> ModuleType:
    """Import a module that exists only in a PyTorch with torch.distributed."""
    return importlib.import_module(f".{name}", __package__)


class LayerRanks:
    """The ranks of a layer. Copies of the layer share them."""

    def __init__(self, process_group: ProcessGroup | DeviceMesh) -> None:
        self.process_group = process_group

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerRanks:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("process_group: cannot be saved, save the state_dict() of the layer")

    def positions(
        self,
        x: torch.Tensor,
        starts: torch.Tensor | Sequence[int] | None,
        lengths: Sequence[int] | None,
    ) -> torch.Tensor:
        """Positions [1, length] of the own tokens x, which begin anew at each of `starts`."""
        group, device = self.process_group, x.device
        make = own_module("distributed").sequence_positions
        positions = make(x.shape[1], group=group, device=device, lengths=lengths)
        if starts is None:
            return positions
        sequences = own_module("_sequences")
        begins = sequences.int32_on(device, sequences.list_starts(starts))
        return positions - begins[torch.searchsorted(begins, positions, right=True) - 1]

    def attend(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
        """context_parallel_attention() of query, key, value, dt_proj, A and the window."""
        attend = own_module("distributed").context_parallel_attention
        return self._attend_padded(attend, arguments[:3], arguments[3:], options)

    def attend_to_all(self, rows: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
        return self._attend_padded(own_module("distributed").ring_attention, rows, (), options)

    def _attend_padded(
        self,
        attend: Callable[..., torch.Tensor],
        rows: tuple[Any, ...],
        rest: tuple[Any, ...],
        options: dict[str, Any],
    ) -> torch.Tensor:
        dt_proj, *others = rest or (None,)
        rows, dt_proj, head_dim = pad_head_dim(rows, dt_proj)
        if head_dim is not None and options["softmax_scale"] is None:
            options = {**options, "softmax_scale": head_dim**-0.5}
        rest = (dt_proj, *others) if rest else ()
        return finish(attend(*rows, *rest, group=self.process_group, **options), head_dim)


def check_ranks(
    group: ProcessGroup | DeviceMesh | None, dropout: float, absent: tuple[Any, ...]
) -> LayerRanks | None:
    """The ranks of a layer. Such a layer has no gap, memory_hidden or options (`absent`)."""
    check_dropout(dropout, "dropout")
    if group is None:
        return None
    for name, given in zip(("gap", "memory_hidden", "options"), absent):
        require(given is None, f"{name}: is given, want None with process_group")
    require(dropout == 0, f"dropout: is {dropout}, want 0 with process_group")
    if not hasattr(group, "get_group") and not hasattr(group, "rank"):  # of a mesh, of a group
        raise _types.refusal("process_group", group, "a ProcessGroup, a DeviceMesh or None")
    return LayerRanks(group)
