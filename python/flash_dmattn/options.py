"""The options of dynamic mask attention that its proposal names, as one object."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from . import _arguments, _types

METHODS = ("exact", "approximate")
WINDOW = 1024  # default of keep_window_size
CUDA_BLOCK = 128  # least number of queries that share a list of keys on a CUDA device


def _check_count(name: str, value: Any, none_means: str) -> None:
    if value is not None and _arguments.check_int(name, value) < 1:
        raise ValueError(f"{name}: is {value}, want 1 or more, or None for {none_means}")


def _check_ratio(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _types.refusal(name, value, "a number")
    if not 0 < value <= 1:
        raise ValueError(f"{name}: is {value}, want a number above 0, up to 1")


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise _types.refusal(name, value, "a bool")


@dataclasses.dataclass(frozen=True)
class DynamicMaskOptions:
    """How flash_dma_attention() selects and processes keys, and how large its calls may be.

    Every option is honoured or refused: a value that no kernel has raises NotImplementedError, with
    the reason. Options that contradict each other raise ValueError.

    Args:
        keep_window_size: number of keys that a query keeps, 1 or more. The call uses it; its own
            argument must have the same value or its default.
        selection_method: "exact" or "approximate". Both select exactly the best keys, with the same
            bits: the exact selection takes 3 to 6 % of a call's time, so that an approximate one
            has little to save.
        min_density_threshold: density from which calls are processed densely. Density is the share
            of all keys that a query keeps, min(keep_window_size + recent, kv_len) / kv_len. 1.0, or
            None for 1.0: a call that keeps all keys. Numbers below 1 raise NotImplementedError: a
            dense tile would compute the logits of keys that the query does not keep, and drop them.
        mixed_processing: process a call densely if its density has reached the threshold: its keys
            are neither selected nor gathered. If False, every call selects and gathers keys. The
            results are equal up to rounding. torch.compile makes a graph for each of the two.
        block_size: the least number of queries that share a list of keys. None lets the kernel
            choose. On a CUDA device that is 128, 256 or 512, by the lengths of the call, and 128
            means the same as None. Other numbers raise NotImplementedError at the call, and so do
            all numbers on the CPU, where the width of vectors decides. `backend` chooses the
            kernel.
        use_reordering: gather the kept keys in memory order, not in the order of their scores.
            False raises NotImplementedError, as no kernel has another order.
        max_sequence_length: the most queries and the most keys of a call, of all packed sequences
            together; None for no limit. A call with more raises ValueError. No memory is allocated
            for the limits ahead of calls: workspace_bytes() says how much calls within them need.
        max_batch_size: the most sequences of a call, packed ones too; None for no limit. A call
            with more raises ValueError.
        max_selection_ratio: the largest density of a call, above 0 and up to 1, which is no limit.
            A call whose queries keep a larger share of its keys raises ValueError.

    Raises:
        TypeError: an option of another type.
        ValueError: an option out of its range; min_density_threshold without mixed_processing; a
            keep_window_size that is above max_selection_ratio * max_sequence_length, if the ratio
            is below 1, so that every call would be refused.
        NotImplementedError: a value that no kernel has.

    Example:
        >>> options = flash_dmattn.DynamicMaskOptions(keep_window_size=4, max_sequence_length=64)
        >>> query, key, value = torch.randn(3, 1, 16, 2, 8)
        >>> weights = torch.randn(2, 16), torch.ones(2)
        >>> out = flash_dmattn.flash_dma_attention(query, key, value, *weights, options=options)
        >>> out.shape
        torch.Size([1, 16, 2, 8])

    Source: arXiv:2508.02124.
    """

    keep_window_size: int = WINDOW
    selection_method: str = "exact"
    min_density_threshold: float | None = None
    mixed_processing: bool = True
    block_size: int | None = None
    use_reordering: bool = True
    max_sequence_length: int | None = None
    max_batch_size: int | None = None
    max_selection_ratio: float = 1.0

    def __post_init__(self) -> None:
        _arguments.check_rules(self.keep_window_size, 0, 0, name="keep_window_size")
        names = " or ".join(map(repr, METHODS))
        if not isinstance(self.selection_method, str):
            raise _types.refusal("selection_method", self.selection_method, names)
        if self.selection_method not in METHODS:
            raise ValueError(f"selection_method: is {self.selection_method!r}, want {names}")
        _check_bool("mixed_processing", self.mixed_processing)
        _check_bool("use_reordering", self.use_reordering)
        _check_count("block_size", self.block_size, "the kernel's")
        _check_count("max_sequence_length", self.max_sequence_length, "no limit")
        _check_count("max_batch_size", self.max_batch_size, "no limit")
        _check_ratio("max_selection_ratio", self.max_selection_ratio)
        self._check_density()
        if not self.use_reordering:
            raise NotImplementedError(
                "use_reordering: is False, want True: every kernel gathers keys in the order of "
                "memory"
            )
        if self.max_sequence_length is not None and self.max_selection_ratio < 1:
            most = self.max_selection_ratio * self.max_sequence_length
            if self.keep_window_size > most:
                raise ValueError(
                    f"keep_window_size: is {self.keep_window_size}, want at most "
                    f"max_selection_ratio * max_sequence_length, {most:g}"
                )

    def _check_density(self) -> None:
        threshold = self.min_density_threshold
        if threshold is None:
            return
        _check_ratio("min_density_threshold", threshold)
        if not self.mixed_processing:
            raise ValueError(
                f"min_density_threshold: is {threshold}, want None if mixed_processing is False: "
                "no call is then processed densely"
            )
        if threshold < 1:
            raise NotImplementedError(
                f"min_density_threshold: is {threshold}, want 1.0 or None: kernels process keys "
                "densely only where queries keep all of them"
            )

    def _window_of(self, keep_window_size: int, default: int = WINDOW) -> int:
        """The window of a call with this argument, which is ignored if it is the default."""
        _arguments.check_int("keep_window_size", keep_window_size)
        if keep_window_size not in (default, self.keep_window_size):
            raise ValueError(
                f"keep_window_size: is {keep_window_size}, want that of options, "
                f"{self.keep_window_size}, or its default, {default}"
            )
        return self.keep_window_size

    def _check_call(
        self, query: torch.Tensor, key: torch.Tensor, starts: torch.Tensor | None, kept: int
    ) -> None:
        """Refuse a call beyond the limits. Its queries keep up to `kept` keys."""
        if query.dim() != 4 or key.dim() != 4:
            return  # the call refuses them
        if starts is not None:
            _types.check_tensor("starts", starts)
        batch = query.shape[0] if starts is None else starts.shape[0] - 1
        kv_len = key.shape[1]
        if self.max_batch_size is not None and batch > self.max_batch_size:
            raise ValueError(
                f"query: has {batch} sequences, want at most options.max_batch_size, "
                f"{self.max_batch_size}"
            )
        for name, tensor in (("query", query), ("key", key)):
            most, length = self.max_sequence_length, tensor.shape[1]
            if most is not None and length > most:
                raise ValueError(
                    f"{name}: axis 1 has {length} elements, want at most "
                    f"options.max_sequence_length, {most}"
                )
        if self.max_selection_ratio < 1 and min(kept, kv_len) > self.max_selection_ratio * kv_len:
            raise ValueError(
                f"keep_window_size + recent: is {kept}, want at most options.max_selection_ratio, "
                f"{self.max_selection_ratio}, of the {_types.counted(kv_len, 'key')}"
            )
        self._check_block_size(query.device)

    def _check_block_size(self, device: torch.device) -> None:
        if self.block_size is None or (device.type == "cuda" and self.block_size == CUDA_BLOCK):
            return
        wanted = f"{CUDA_BLOCK} or None" if device.type == "cuda" else "None"
        raise NotImplementedError(
            f"block_size: is {self.block_size}, want {wanted} on {device}: each kernel chooses the "
            "size of its blocks"
        )

    def _is_dense(self, kept: int, key: torch.Tensor) -> bool:
        """True if a call whose queries keep up to `kept` keys is processed densely."""
        return self.mixed_processing and key.dim() == 4 and kept >= key.shape[1]


def options_of(
    keep_window_size: int, options: DynamicMaskOptions | None, fields: dict[str, Any]
) -> DynamicMaskOptions:
    """The options of a call that has some of their `fields` as arguments."""
    known = [field.name for field in dataclasses.fields(DynamicMaskOptions)]
    for name in fields:
        if name not in known:
            raise TypeError(f"flash_dma_attention() has no argument {name!r}")
        if options is not None:
            raise ValueError(f"{name}: is given, want it in options, which are given too")
    return DynamicMaskOptions(keep_window_size=keep_window_size, **fields)
