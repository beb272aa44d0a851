"""The process group of a layer, whose ranks each have consecutive tokens of every sequence."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any, Callable, Sequence

import torch

from ._arguments import finish, pad_head_dim

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def module(name: str) -> ModuleType:
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
        make = module("distributed").sequence_positions
        positions = make(x.shape[1], group=group, device=device, lengths=lengths)
        if starts is None:
            return positions
        sequences = module("_sequences")
        begins = sequences.int32_on(device, sequences.list_starts(starts))
        return positions - begins[torch.searchsorted(begins, positions, right=True) - 1]

    def attend(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
        """context_parallel_attention() of query, key, value, dt_proj, A and the window."""
        attend = module("distributed").context_parallel_attention
        return self._attend_padded(attend, arguments[:3], arguments[3:], options)

    def attend_to_all(self, rows: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
        return self._attend_padded(module("distributed").ring_attention, rows, (), options)

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
