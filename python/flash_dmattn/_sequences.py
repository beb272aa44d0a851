"""The positions of each rank's tokens, in one sequence or in several packed ones, and a function
that gathers the tokens of all ranks."""

from __future__ import annotations

import bisect
import functools
import zlib
from itertools import accumulate
from typing import Any, NamedTuple, Sequence

import torch
from torch.autograd.function import once_differentiable

from ._arguments import wide
from ._ranks import Ranks
from ._types import counted, is_list_of_ints, refusal

STARTS_SHOWN = 16  # in messages
TENSORS_KEPT = 256  # tensors that int32_on() keeps


class Layout(NamedTuple):
    """The tokens of a rank.

    The first `head` of them continue a sequence that earlier ranks have begun. The others form
    sequences of their own; the last of these may continue on later ranks.
    """

    offset: int  # tokens of all earlier ranks
    length: int
    begin: int  # position at which the sequence of the first own token begins
    head: int
    tail: int  # first own token of a sequence that later ranks continue, or `length`
    starts: list[int] | None  # of the sequences from `head` on, counted from there; None: one


def check_lengths(ranks: Ranks, lengths: Sequence[int]) -> list[int]:
    if not is_list_of_ints(lengths):
        raise refusal("lengths", lengths, "a list of ints or None")
    found = [int(length) for length in lengths]
    if len(found) != ranks.size or min(found) < 0:
        raise ValueError(f"lengths: are {found}, want {counted(ranks.size, 'number')} of 0 or more")
    return found


def list_starts(starts: torch.Tensor | Sequence[int] | None) -> list[int] | None:
    if starts is None:
        return None
    if isinstance(starts, torch.Tensor) and starts.device.type != "cpu":
        raise ValueError(f"starts: is on {starts.device}, want a list, or a tensor on the CPU")
    if not isinstance(starts, torch.Tensor) and not is_list_of_ints(starts):
        raise refusal("starts", starts, "a torch.Tensor or a list of ints")
    found = starts.tolist() if isinstance(starts, torch.Tensor) else [int(x) for x in starts]
    ascends = all(x <= y for x, y in zip(found, found[1:]))
    if len(found) < 2 or found[0] != 0 or not ascends:
        raise ValueError(f"starts: is {found}, want 0 and then numbers that do not descend")
    return found


def describe_starts(starts: list[int] | None) -> str | None:
    """The numbers, or a checksum if they are many."""
    if starts is None or len(starts) <= STARTS_SHOWN:
        return None if starts is None else str(starts)
    return f"{len(starts)} numbers of checksum {zlib.crc32(str(starts).encode())}"


@functools.lru_cache(maxsize=TENSORS_KEPT)
def tensor_of(device: torch.device, numbers: tuple[int, ...]) -> torch.Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # At each replay the graph would read host memory that has been freed.
        raise RuntimeError(
            "capture: call once with the same lengths and starts before a CUDA graph is captured"
        )
    with torch.inference_mode(False):  # or later calls could not save it for backward
        return torch.tensor(numbers, dtype=torch.int32).to(
            device
        )  # blocking: any stream may read it


def int32_on(device: torch.device, numbers: Sequence[int]) -> torch.Tensor:
    """Numbers of the host as a tensor of a device. The host waits for the copy only once, as the
    layers of a model use the same numbers. A tensor that a CUDA graph reads is kept for good."""
    found = tensor_of(device, tuple(numbers))
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        captured[device, tuple(numbers)] = found
    return found


captured: dict[tuple[torch.device, tuple[int, ...]], torch.Tensor] = {}


def offsets_of(lengths: list[int]) -> list[int]:
    return [0, *accumulate(lengths)][:-1]


def lay_out(lengths: list[int], starts: list[int] | None) -> list[Layout]:
    """The layout of each rank. `starts` belong to packed sequences, as in attention()."""
    pairs = zip(offsets_of(lengths), lengths)
    if starts is None:
        return [Layout(at, length, 0, length if at else 0, 0, None) for at, length in pairs]
    return [lay_out_packed(at, length, starts) for at, length in pairs]


def lay_out_packed(offset: int, length: int, starts: list[int]) -> Layout:
    """Tokens from starts[-1] on belong to no sequence."""
    end = offset + length

    def begin_of(position: int) -> int:
        """The start of the sequence that has this position."""
        return starts[bisect.bisect_right(starts, position) - 1]

    begin, head = offset, 0
    if offset < starts[-1]:
        begin = begin_of(offset)
        if begin < offset:
            head = min(starts[bisect.bisect_right(starts, offset)] - offset, length)
    goes_on = length > 0 and end < starts[-1] and begin_of(end) != end
    tail = max(begin_of(end) - offset, 0) if goes_on else length
    first = offset + head
    own = [at - first for at in starts if first < at < end]
    behind = [0, *own, max(min(starts[-1], end) - first, 0)]
    return Layout(offset, length, begin, head, tail, behind)


class GatherTokens(torch.autograd.Function):
    """apply(ranks, lengths, tensor): all tokens, along the first axis."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, lengths: list[int], tensor: torch.Tensor) -> torch.Tensor:
        ctx.ranks, ctx.lengths = ranks, lengths
        room = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
        room[: len(tensor)] = tensor
        blocks = ranks.gather(room).wait()
        return torch.cat([block[:length] for block, length in zip(blocks, lengths)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ranks, lengths = ctx.ranks, ctx.lengths
        own = lengths[ranks.rank]
        shape = (ranks.size, own, *gradient.shape[1:])
        found = ranks.exchange(gradient, lengths, [own] * ranks.size, shape).wait()
        total = found[0].to(wide(gradient.dtype))
        for one in found[1:]:
            total = total + one
        return None, None, total.to(gradient.dtype)
