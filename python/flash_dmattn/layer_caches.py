"""One cache for layers that keep different numbers of keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from . import _arguments, _types, cache_state
from .cache import DynamicMaskCache

if TYPE_CHECKING:
    from .nn import DynamicMaskAttention


class LayerCaches:
    """The cache of a list of layers, whose windows may differ.

    It takes the place of a DynamicMaskCache and has its methods: each layer is called with it and
    with the layer's number in the list. Layers of equal sizes and rules share a DynamicMaskCache.

    Args:
        layers: a list of DynamicMaskAttention, in the order of their numbers.
        batch: sequences.
        static: as in DynamicMaskCache.

    Attributes:
        caches: the DynamicMaskCache of each kind of layer.

    Raises:
        TypeError: layers of another kind, or a batch that is not an int.
        ValueError: no layers, a batch below 1, or a layer that has no cache.

    Example:
        >>> windows = 12, 12, 40
        >>> layers = [flash_dmattn.DynamicMaskAttention(64, 4, 2, window) for window in windows]
        >>> cache = flash_dmattn.LayerCaches(layers, batch=2)
        >>> x = torch.randn(2, 100, 64)
        >>> with torch.no_grad():
        ...     for number, layer in enumerate(layers):
        ...         x = layer(x, cache=cache, layer=number)
        >>> cache.get_seq_length(), len(cache.caches)
        (100, 2)

    Source: docs/algorithm.md, streams.
    """

    def __init__(
        self, layers: Iterable[DynamicMaskAttention], batch: int, *, static: bool = False
    ) -> None:
        if not isinstance(layers, Iterable) or isinstance(layers, str):
            raise _types.refusal("layers", layers, "a list of DynamicMaskAttention")
        kinds: dict[tuple[Any, ...], list[int]] = {}
        layers = list(layers)
        for number, layer in enumerate(layers):
            if not hasattr(layer, "new_cache"):
                found = _types.describe(layer)
                raise TypeError(f"layers: has {found}, want DynamicMaskAttention layers")
            own = (layer.kv_heads, layer.head_dim, layer.window, layer.recent, layer.sinks)
            like = layer._like_cache
            kind = (*own, layer._cache_form, like.dtype, like.device)
            kinds.setdefault(kind, []).append(number)
        if not layers:
            raise ValueError("layers: is empty, want one or more")
        self.caches: list[DynamicMaskCache] = []
        by_layer: dict[int, tuple[DynamicMaskCache, int]] = {}
        for numbers in kinds.values():
            first = layers[numbers[0]]
            cache = first.new_cache(batch, layers=len(numbers), static=static)
            self.caches.append(cache)
            by_layer.update((number, (cache, at)) for at, number in enumerate(numbers))
        self._by_layer = [by_layer[number] for number in range(len(layers))]
        self.layers, self.batch, self.static = len(layers), self.caches[0].batch, static

    def of_layer(self, layer: int) -> tuple[DynamicMaskCache, int]:
        """The cache of a layer, and the layer's number in it."""
        if not 0 <= _arguments.check_int("layer", layer) < self.layers:
            raise ValueError(f"layer: is {layer}, want 0 to {self.layers - 1}")
        return self._by_layer[layer]

    def attend(self, layer: int, *arguments: Any, **options: Any) -> torch.Tensor:
        """As DynamicMaskCache.attend()."""
        cache, number = self.of_layer(layer)
        return cache.attend(number, *arguments, **options)

    def positions(self, layer: int, length: int, index: torch.Tensor | None = None) -> torch.Tensor:
        """As DynamicMaskCache.positions()."""
        cache, number = self.of_layer(layer)
        return cache.positions(number, length, index)

    @property
    def drafts(self) -> int:
        """Tokens of the first layer that are not committed."""
        return self.caches[0].drafts

    def _check_drafts(self, name: str) -> None:
        """Refuse layers with different numbers of drafts. If all caches have as many, the first one
        refuses a wrong call before any has changed."""
        lengths = [
            0 if one is None else one.key.shape[1] for cache in self.caches for one in cache._drafts
        ]
        if min(lengths) != max(lengths):
            raise ValueError(f"{name}: the layers have {lengths} drafts, want as many in each")

    def crop(self, count: int) -> None:
        """As DynamicMaskCache.crop()."""
        for cache in self.caches:
            cache.crop(count)

    def commit(self, count: torch.Tensor | int | None = None) -> None:
        """As DynamicMaskCache.commit()."""
        self._check_drafts("count")
        for cache in self.caches:
            cache.commit(count)

    def reorder(self, beam_idx: torch.Tensor) -> None:
        """As DynamicMaskCache.reorder()."""
        for cache in self.caches:
            cache.reorder(beam_idx)

    def drop(self, b: int) -> None:
        """As DynamicMaskCache.drop()."""
        self._check_drafts("b")
        for cache in self.caches:
            cache.drop(b)

    def save(self, b: int) -> bytes:
        """As DynamicMaskCache.save()."""
        self._check_drafts("b")
        return cache_state.save_all(self._places(b))

    def _places(self, b: int) -> list[cache_state.Place]:
        """Where sequence b is, in each layer."""
        return [cache._places(b)[at] for cache, at in self._by_layer]

    def restore(self, b: int, state: bytes | bytearray | memoryview) -> None:
        """As DynamicMaskCache.restore()."""
        self._check_drafts("b")
        cache_state.restore_all(self._places(b), state)
        for cache in self.caches:
            cache._restored(b)

    def reset(self) -> None:
        """Empty all sequences, and forget drafts."""
        for cache in self.caches:
            cache.reset()

    def get_seq_length(self, layer: int = 0) -> int | torch.Tensor:
        """As DynamicMaskCache.get_seq_length()."""
        cache, number = self.of_layer(layer)
        return cache.get_seq_length(number)

    @property
    def memory_bytes(self) -> int:
        """The bytes of all tensors of the caches, which never change. Drafts are not counted."""
        return sum(cache.memory_bytes for cache in self.caches)

    def __repr__(self) -> str:
        lines = "".join(f"\n    {cache!r}," for cache in self.caches)
        return f"LayerCaches({lines}\n)"
