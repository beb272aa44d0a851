"""A language model in which most layers slide and few layers select: arguments of its layers, their
cache, and how their scores are trained.

docs/quality.md has the models that were trained so, and docs/training.md the recipe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from . import _arguments, _types
from ._layer_checks import check_gate, check_sizes, require
from .layer_caches import LayerCaches
from .nn import DynamicMaskAttention
from .score_targets import score_target_loss

RECENT = 64  # newest keys beside the ones that live longest
INITIAL_A = 0.005  # above 0, as scores rank keys only then, and so small that it hardly adds bias
SCORE_BETAS = (0.9, 0.95)  # of Adam, for scores


@dataclasses.dataclass(frozen=True)
class HybridPlan:
    """The layers of a hybrid: most of them slide, and the `selecting` ones have heads without
    rotary embedding whose queries keep `keys` keys, the `recent` newest and the others by score.

        layers = [DynamicMaskAttention(**plan.arguments(number)) for number in range(plan.layers)]
        optimizer = torch.optim.AdamW(plan.parameter_groups(model, 1e-3))
        for step, text in enumerate(texts):
            with plan.targets(model, step) as targets:
                loss = loss_of(model, text)
            (loss + targets.loss()).backward()
            optimizer.step()
            optimizer.zero_grad()

    The scores learn from score_target_loss() alone, for one sequence of the batch, in every
    `target_every`-th step. Their weights should be float32: train with autocast. With
    lifetime_units they are lifetimes, and learn in a phase of their own; docs/training.md has it.

    Args:
        hidden: width of the hidden states.
        layers: number of layers.
        heads: query heads of a layer.
        kv_heads: key and value heads of a layer.
        head_dim: channels of a head; None for hidden / heads.
        sliding: keys that a query keeps in the layers that slide, the newest ones; None for all
            keys, with which the model has no cache of fixed size.
        selecting: numbers of the layers that select; None for the last one alone.
        keys: keys that a query keeps in these layers, 1 or more.
        recent: how many of them are the newest; None for half, or for 64, but at most half, with
            lifetime_units.
        rope_base: base of the rotary angles in the layers that slide.
        target_every: scores learn in every so many steps, 1 or more.
        target_start: the first step in which they learn.
        lifetime_units: as in DynamicMaskAttention, of the layers that select; 0 for scores from
            values, which learn from targets. lifetime_loss() serves the last layer alone.
        initial_lifetime: as in DynamicMaskAttention, if lifetime_units is not 0.

    Raises:
        TypeError: an argument of another type.
        ValueError: a number out of its range, sizes that contradict each other, or layers that are
            not there or named twice.

    Example:
        >>> plan = flash_dmattn.HybridPlan(hidden=64, layers=4, heads=4, kv_heads=2, keys=96)
        >>> plan.arguments(3)["window"], plan.arguments(3)["recent"], plan.arguments(0)["window"]
        (48, 48, 256)
        >>> kinds = map(plan.arguments, range(plan.layers))
        >>> model = torch.nn.ModuleList(flash_dmattn.DynamicMaskAttention(**one) for one in kinds)
        >>> x = torch.randn(2, 300, 64)
        >>> with plan.targets(model, step=0) as targets:
        ...     for layer in model:
        ...         x = x + layer(x)
        >>> (x.square().mean() + targets.loss()).backward()
        >>> [layer.dt_proj.weight.grad is not None for layer in model]
        [False, False, False, True]

    Source: docs/quality.md.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int | None = None
    sliding: int | None = 256
    selecting: Sequence[int] | None = None
    keys: int = 9216
    recent: int | None = None
    rope_base: float = 10000.0
    target_every: int = 4
    target_start: int = 0
    lifetime_units: int = 0
    initial_lifetime: float = 65536.0

    def __post_init__(self) -> None:
        _types.check_call(HybridPlan, vars(self))
        base = self.rope_base
        check_sizes(self.hidden, self.heads, self.kv_heads, self.head_dim, base)
        require(1 <= base < float("inf"), f"rope_base: is {base}, want a finite number, 1 or more")
        check_gate(self.lifetime_units, self.initial_lifetime)
        layers, sliding, recent = self.layers, self.sliding, self.recent
        require(layers >= 1, f"layers: is {layers}, want 1 or more")
        is_sliding = sliding is None or sliding >= 1
        require(is_sliding, f"sliding: is {sliding}, want 1 or more, or None")
        require(self.keys >= 1, f"keys: is {self.keys}, want 1 or more")
        takes = recent is None or 0 <= recent < self.keys
        require(takes, f"recent: is {recent}, want 0 to {self.keys - 1}, below keys, or None")
        every, start = self.target_every, self.target_start
        require(every >= 1, f"target_every: is {every}, want 1 or more")
        require(start >= 0, f"target_start: is {start}, want 0 or more")
        selecting = (layers - 1,) if self.selecting is None else tuple(self.selecting)
        require(len(selecting) > 0, "selecting: is empty, want one layer or more")
        for number in selecting:
            is_layer = 0 <= number < layers
            require(is_layer, f"selecting: has {number}, want 0 to {layers - 1}")
        once = len({*selecting}) == len(selecting)
        require(once, f"selecting: is {list(selecting)}, want each layer once")
        object.__setattr__(self, "selecting", selecting)
        newest = self.keys // 2 if self.lifetime_units == 0 else min(RECENT, self.keys // 2)
        object.__setattr__(self, "recent", newest if recent is None else recent)

    def arguments(self, layer: int) -> dict[str, Any]:
        """The keyword arguments of DynamicMaskAttention for a layer.

        Raises:
            TypeError, ValueError: no number of a layer.
        """
        if not 0 <= _arguments.check_int("layer", layer) < self.layers:
            raise ValueError(f"layer: is {layer}, want 0 to {self.layers - 1}")
        sizes = ("hidden", "heads", "kv_heads", "head_dim", "rope_base")
        given: dict[str, Any] = {name: getattr(self, name) for name in sizes}
        given.update({"qk_norm": True, "window": self.sliding, "recent": 0})
        if layer in self._selecting:
            window = self.keys - self._recent
            given.update({"window": window, "recent": self._recent, "nope_heads": self.kv_heads})
            if self.lifetime_units == 0:
                given.update({"initial_a": INITIAL_A, "targets_only": True})
            else:
                given["lifetime_units"] = self.lifetime_units
                given["initial_lifetime"] = self.initial_lifetime
        elif self.sliding is not None:
            given.update({"sliding_heads": self.kv_heads, "targets_only": True})
        return given

    def caches(self, model: nn.Module, batch: int, *, static: bool = False) -> LayerCaches:
        """An empty cache for all layers of a model.

        Args:
            model: has as many DynamicMaskAttention layers as the plan, in their order.
            batch: sequences.
            static: as in DynamicMaskCache.

        Raises:
            TypeError: as LayerCaches.
            ValueError: as LayerCaches; or a model with another number of layers.
        """
        return LayerCaches(self._layers_of(model), batch, static=static)

    def parameter_groups(
        self,
        model: nn.Module,
        rate: float,
        *,
        weight_decay: float = 0.1,
        score_rate: float = 1.0,
    ) -> list[dict[str, Any]]:
        """The groups of a model's parameters for AdamW: matrices, which decay; vectors, which do
        not; and the weights of scores, or of gates of lifetimes, which have an optimizer of their
        own. Clip the gradients of the first two alone: the targets have no part in the norm then. A
        step without targets leaves scores as they are, if zero_grad() sets gradients to None, as it
        does by default.

        Args:
            model: as in caches().
            rate: learning rate.
            weight_decay: of matrices.
            score_rate: multiplies the learning rate of scores.

        Raises:
            TypeError: an argument of another type.
            ValueError: a model with another number of layers.
        """
        _types.check_call(HybridPlan.parameter_groups, locals())
        layers = self._layers_of(model)
        chosen = [layers[number] for number in self._selecting]
        gates = [layer.lifetime_gate for layer in chosen if layer.lifetime_gate is not None]
        scores: list[Any] = [one for gate in gates for one in gate.parameters()]
        scores = scores or [layer.dt_proj.weight for layer in chosen]
        known = {id(weight) for weight in scores}
        others = [one for one in model.parameters() if one.requires_grad and id(one) not in known]
        matrices, vectors = ([x for x in others if (x.dim() > 1) == wide] for wide in (True, False))
        own = {"lr": rate * score_rate, "betas": SCORE_BETAS, "weight_decay": 0.0}
        return [
            {"params": matrices, "lr": rate, "weight_decay": weight_decay},
            {"params": vectors, "lr": rate, "weight_decay": 0.0},
            {"params": scores, **own},
        ]

    def targets(self, model: nn.Module, step: int) -> StepTargets:
        """A context around the forward of a training step, and the loss of the scores after it.

        Args:
            model: as in caches(). It may be compiled.
            step: the number of the step, from 0 on.

        Raises:
            TypeError: an argument of another type.
            ValueError: a negative step, or a model with another number of layers.
        """
        if _arguments.check_int("step", step) < 0:
            raise ValueError(f"step: is {step}, want 0 or more")
        layers = self._layers_of(model)
        is_due = step >= self.target_start and step % self.target_every == 0
        is_due = is_due and self.lifetime_units == 0
        chosen = [layers[number] for number in self._selecting] if is_due else []
        return StepTargets(chosen, step // self.target_every)

    def set_keys(self, model: nn.Module, keys: int | None = None) -> None:
        """Let queries of the selecting layers keep another number of keys from now on: all, as the
        length of the sequences, in the first part of a training. As many as before are the newest.

        Args:
            model: as in caches().
            keys: more than `recent`; None for the plan's.

        Raises:
            TypeError: an argument of another type.
            ValueError: a number out of its range, or a model with another number of layers.
        """
        keys = self.keys if keys is None else _arguments.check_int("keys", keys)
        require(keys > self._recent, f"keys: is {keys}, want more than recent, {self._recent}")
        layers = self._layers_of(model)
        for number in self._selecting:
            layers[number].window = keys - self._recent

    @property
    def _selecting(self) -> tuple[int, ...]:
        assert self.selecting is not None
        return tuple(self.selecting)

    @property
    def _recent(self) -> int:
        assert self.recent is not None
        return self.recent

    def _layers_of(self, model: nn.Module) -> list[DynamicMaskAttention]:
        if not isinstance(model, nn.Module):
            raise _types.refusal("model", model, "a torch.nn.Module")
        found = [one for one in model.modules() if isinstance(one, DynamicMaskAttention)]
        if len(found) != self.layers:
            have = f"has {_types.counted(len(found), 'DynamicMaskAttention layer')}"
            raise ValueError(f"model: {have}, want the plan's, {self.layers}")
        return found


class StepTargets:
    """A context in which layers keep their queries, keys and values; see HybridPlan.targets().

    Args:
        layers: those whose scores learn in this step.
        turn: which sequence of a batch they learn from, modulo the batch.
    """

    def __init__(self, layers: list[DynamicMaskAttention], turn: int) -> None:
        self.layers, self.turn = layers, turn

    def __enter__(self) -> StepTargets:
        for layer in self.layers:
            layer.keeps_states, layer.states = True, None
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        for layer in self.layers:
            layer.keeps_states = False
            if kind is not None:  # the step has failed, and loss() will not take them
                layer.states = None

    def loss(self) -> torch.Tensor:
        """The mean of the layers' score_target_loss(), which has a gradient for the selecting
        layers' dt_proj alone; 0 without a gradient in a step without targets, with lifetimes, or if
        every query keeps all keys as its newest. Of packed sequences all have a part in it.

        Raises:
            ValueError: the model was not called within the context.
        """
        losses = [loss for layer in self.layers for loss in self._losses(layer)]
        return torch.stack(losses).mean() if losses else torch.zeros(())

    def _losses(self, layer: DynamicMaskAttention) -> list[torch.Tensor]:
        """The loss of a layer, if it has one. It forgets its states."""
        states, layer.states = layer.states, None
        require(states is not None, "targets: the model has not run, want a call of it within them")
        assert states is not None
        query, key, value, key_valid, starts = states
        batch, length = query.shape[:2]
        if length <= layer.recent + layer.sinks:
            return []
        one = slice(self.turn % batch, self.turn % batch + 1)
        valid = None if key_valid is None else key_valid[one]
        rules: dict[str, Any] = {"recent": layer.recent, "sinks": layer.sinks}
        rules = {**rules, "softmax_scale": layer.softmax_scale, "softcap": layer.softcap}
        rows = (query[one], key[one], value[one], gathered(layer.dt_proj.weight))
        return [score_target_loss(*rows, key_valid=valid, starts=starts, **rules)]


def gathered(weight: Any) -> torch.Tensor:
    """All of a weight that FSDP2 divides among ranks, outside its layer's forward(). As of other
    weights, the gradient is the mean over ranks."""
    whole: torch.Tensor = weight
    if hasattr(weight, "full_tensor"):
        from torch.distributed.tensor import Partial

        means = [Partial("avg")] * weight.device_mesh.ndim
        whole = weight.full_tensor(grad_placements=means)
    return whole
