"""Rotary position embedding.

Angles come from tables of cosines and sines, which are right to float32 at any position: float32
cannot hold the angles themselves, as its steps at position 2^20 are 1/8 radian.

Layers share tables (shared_table()) of positions that count from 0. For other positions, which the
host may not know, a call makes a table that has one row for each of them.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as modules

from . import _arguments, _repeat, _types, ops
from ._arguments import MaybeTensor, finish, pad_head_dim, refuse_tangents

__all__ = ["rotary_table", "rotate"]

POSITIONS_MAX = 1 << 31
DIM_MAX = 256
LEAST_ROWS = 256  # of a table that layers share


def rotary_table(
    length: int | torch.Tensor,
    dim: int,
    *,
    base: float = 10000.0,
    inv_freq: torch.Tensor | None = None,
    factor: float = 1.0,
    first: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The cosines and sines of the angles by which rotate() rotates.

    Position p and pair d of channels have factor * cos(p * inv_freq[d]) and factor * sin(p *
    inv_freq[d]).

    Args:
        length: number of positions, which are `first` and those after it; or a tensor [rows] int32
            that has the position of each row, which may be negative.
        dim: channels that are rotated: an even number, 2 to 256.
        base: of the frequencies base^(-2 d / dim), 1 or more.
        inv_freq: optional [dim / 2] float32 or float64, in radians for each position, in place of
            base: for example transformers.rotary_frequencies().
        factor: multiplies cosines and sines; above 0.
        first: the position of the first row, 0 or more; 0 if `length` is a tensor.
        device: of the table if neither `length` nor inv_freq is a tensor; None for torch's default.
        dtype: of the table: float32, or float64 to rotate float64, on the CPU.

    Returns:
        [rows, dim]: in each row dim / 2 cosines, then dim / 2 sines. Angles are computed in more
        than double precision.

    Raises:
        TypeError: an argument of another type.
        ValueError: a number out of its range, an inv_freq of another length or on another device,
            or positions beyond 2^31 - 1.
        NotImplementedError: a dtype or device that no kernel supports.

    Example:
        >>> from flash_dmattn.rotary import rotary_table
        >>> rotary_table(3, 2, base=10000.0)  # cos and sin of 0, 1 and 2 radians
        tensor([[ 1.0000,  0.0000],
                [ 0.5403,  0.8415],
                [-0.4161,  0.9093]])

    Source: arXiv:2104.09864, RoFormer.
    """
    if not torch.compiler.is_compiling():  # PyTorch 2.11 does not trace locals()
        _types.check_call(rotary_table, locals())
        _arguments.check_kernel_device(device)
    if not 2 <= dim <= DIM_MAX or dim % 2 != 0:
        raise ValueError(f"dim: is {dim}, want an even number, 2 to {DIM_MAX}")
    if not 0 < factor < math.inf:
        raise ValueError(f"factor: is {factor:g}, want a finite number above 0")
    if dtype not in (torch.float32, torch.float64):
        found = _arguments.name_of_dtype(dtype)
        raise NotImplementedError(f"dtype: is {found}, want float32 or float64")
    if isinstance(length, torch.Tensor):
        if first != 0:
            raise ValueError(f"first: is {first}, want 0 if length is a tensor")
        positions = length
    else:
        where = device if inv_freq is None else inv_freq.device
        positions = count_from(first, length, where)
    wide = dtype == torch.float64
    refuse_tangents("rotary_table", inv_freq)
    refuse_gradients("inv_freq", inv_freq)
    return ops.ROTARY_TABLE(positions, inv_freq, dim, base, factor, wide, None)


def count_from(first: int, length: int, device: torch.device | str | None) -> torch.Tensor:
    """The positions [length] int32 from `first` on."""
    if not 0 <= _arguments.check_int("length", length) <= POSITIONS_MAX:
        raise ValueError(f"length: is {length}, want 0 to {POSITIONS_MAX}")
    if not 0 <= first <= POSITIONS_MAX - length:
        most, rows = POSITIONS_MAX - length, _types.counted(length, "row")
        raise ValueError(f"first: is {first}, want 0 to {most}, with {rows}")
    return torch.arange(first, first + length, device=device).to(torch.int32)


def refuse_gradients(name: str, tensor: MaybeTensor) -> None:
    if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name}: requires gradients, want a tensor that does not, as {name}.detach(): "
            "a rotation has gradients of x and weight"
        )


def rotate(
    x: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    starts: torch.Tensor | None = None,
    offset: int = 0,
    first: int = 0,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    nope_heads: int = 0,
    interleaved: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Rotary position embedding of queries or keys, after a root-mean-square norm if a weight is
    given, in one pass over x.

    Channels d and d + dim / 2 of a head are rotated by the angle that the table has for the row's
    position and for d. x and weight have gradients.

    Args:
        x: [batch, len, heads, head_dim].
        table: [rows, dim] float32, or float64 for float64 x, from rotary_table(); dim is at most
            head_dim, and the channels from dim on are not rotated.
        positions: optional [batch or 1, len] int32, each one of the table's; None for `offset` and
            those after it.
        starts: optional [sequences + 1] int32, for packed sequences: positions begin anew, with
            `offset`, at each of them. None with positions.
        offset: the position of the first row of each sequence; 0 with positions.
        first: the position of the table's first row, as rotary_table() got it.
        weight: optional [head_dim], of x's dtype or float32: each head of a row is divided by the
            root of its mean square, and multiplied by weight, before it is rotated.
        eps: added to the mean square, 0 or more; not used without weight.
        nope_heads: heads, the last ones, that are normalized but not rotated.
        interleaved: whether channels 2 d and 2 d + 1 are rotated, in place of d and d + dim / 2.
        backend: as in score().

    Returns:
        A new tensor like x. On a CUDA device, where the host does not read positions, the rotated
        channels of a row whose position the table lacks are NaN.

    Raises:
        TypeError: an argument of another type.
        ValueError: shapes, dtypes or devices that are inconsistent, a number out of its range, a
            table without one of the positions, or arguments that exclude each other.
        NotImplementedError: a dtype or backend that no kernel on this machine supports.

    Example:
        >>> from flash_dmattn.rotary import rotary_table, rotate
        >>> table = rotary_table(100, 8)
        >>> query = torch.randn(1, 100, 4, 8)
        >>> torch.equal(rotate(query, table)[:, 90:], rotate(query[:, 90:], table, offset=90))
        True

    Source: arXiv:2104.09864, RoFormer; arXiv:1910.07467, RMSNorm.
    """
    if type(eps) is not float and not _types.is_number(eps):
        raise _types.refusal("eps", eps, "a number")
    given: tuple[Any, ...] = (x, weight, table, positions, starts)
    options = (first, offset, nope_heads, interleaved, backend)
    if not torch.compiler.is_compiling():
        # The arguments of a known call were checked by an earlier call.
        asked = (*given, 0.0 if weight is None else eps, *options)
        out = _repeat.repeat(ops.ROTATE, asked, ops.ROTATE.count)
        if out is not NotImplemented:
            return out
    refuse_tangents("rotate", x, weight, table)
    refuse_gradients("table", table)
    (x,), _, head_dim = pad_head_dim((x,))
    if head_dim is not None:
        weight, eps = pad_norm(weight, eps, head_dim, x)
        check_dim(table, head_dim)
    given = (x, weight, table, positions, starts)
    return finish(ops.ROTATE(*given, 0.0 if weight is None else eps, *options), head_dim)


def check_dim(table: torch.Tensor, head_dim: int) -> None:
    """Refuse a table for more channels than x had before it was padded."""
    _types.check_tensor("table", table)
    if table.dim() == 2 and table.shape[1] > head_dim:
        found, want = table.shape[1], f"an even number from 2 to head_dim, {head_dim}"
        raise ValueError(f"table: axis 1 has {_types.counted(found, 'element')}, want {want}")


def pad_norm(
    weight: MaybeTensor, eps: float, head_dim: int, x: torch.Tensor
) -> tuple[MaybeTensor, float]:
    """The weight and eps of a norm of head_dim channels, for rows x that are padded with zeros:
    their mean square is smaller by a factor."""
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return weight, eps  # the call refuses others
    if weight.shape[0] != head_dim:
        found = f"axis 0 has {_types.counted(weight.shape[0], 'element')}, x has {head_dim}"
        raise ValueError(f"weight: {found}; weight is [head_dim]")
    wide = _arguments.wide(x.dtype)
    if weight.dtype in (x.dtype, torch.float32):
        share = head_dim / x.shape[3]
        weight, eps = weight.to(wide) * share**0.5, eps * share
    return nn.functional.pad(weight, (0, x.shape[3] - head_dim)), eps


# ---- tables that layers share ----

# For each device, dim, base and dtype: tables of the positions from 0 on, the longest one last. The
# shorter ones stay, as captured graphs and work on other streams may still read them.
tables: dict[tuple[Any, ...], list[torch.Tensor]] = {}
LOCK = threading.Lock()


def renew_lock() -> None:
    """A forked child has no thread that would release the lock."""
    global LOCK
    LOCK = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=renew_lock)


def in_new_thread(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result of `make`, called in a thread of its own, or here if Python is ending and starts
    no threads."""
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(make())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=call)
    try:
        thread.start()
    except RuntimeError:
        return make()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def make_table(rows: int, dim: int, **kind: Any) -> torch.Tensor:
    """A table that every stream can read from now on."""
    table = rotary_table(rows, dim, **kind)
    if table.is_cuda:
        torch.cuda.current_stream(table.device).synchronize()
    return table


def find_table(
    length: int, dim: int, base: float, wide: bool, device: torch.device
) -> torch.Tensor:
    """The table that layers share, with `length` or more rows for the positions from 0 on. While a
    CUDA graph is captured a longer one is made for this call alone: it has its numbers only when
    the graph runs.

    Shared tables are made in a thread of their own, because the caller's may have modes,
    transforms of torch.func or a memory pool of CUDA graphs, and these last less long."""
    key = (device, dim, base, wide)
    known = tables.get(key)
    if known and known[-1].shape[0] >= length:
        return known[-1]
    kind: dict[str, Any] = {"base": base, "device": device}
    kind["dtype"] = torch.float64 if wide else torch.float32
    is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if is_captured or device.type not in _arguments.DEVICES:
        return rotary_table(length, dim, **kind)
    with LOCK:
        known = tables.setdefault(key, [])
        if not known or known[-1].shape[0] < length:
            rows = min(max(LEAST_ROWS, 1 << (length - 1).bit_length()), POSITIONS_MAX)
            known.append(in_new_thread(lambda: make_table(rows, dim, **kind)))
        return known[-1]


# The first rows of a shared table, as a new tensor: an operator of a graph may not return the same
# memory twice. The copy takes less time than the cosines of a table.
SHARED_SCHEMA = (
    "shared_rotary_table(SymInt length, int dim, float base, bool wide, str device) -> Tensor"
)


def copy_table(length: int, dim: int, base: float, wide: bool, device: str) -> torch.Tensor:
    return find_table(length, dim, base, wide, torch.device(device))[:length].clone()


def fake_table(length: int, dim: int, base: float, wide: bool, device: str) -> torch.Tensor:
    dtype = torch.float64 if wide else torch.float32
    return torch.empty((length, dim), dtype=dtype, device=device)


ops.LIBRARY.define(SHARED_SCHEMA, tags=torch.Tag.pt2_compliant_tag)
ops.LIBRARY.impl("shared_rotary_table", copy_table, "CompositeExplicitAutograd")
torch.library.register_fake(f"{ops.NAMESPACE}::shared_rotary_table", fake_table, lib=ops.LIBRARY)
SHARED_TABLE = ops.REGISTERED.shared_rotary_table.default


def shared_table(length: int, dim: int, base: float, x: torch.Tensor) -> torch.Tensor:
    """find_table() for x; a copy of it under torch.compile and for tensors of a subclass."""
    if torch.jit.is_tracing():  # length is a tensor, which an operator would take as a constant
        positions = torch.arange(length, device=x.device).to(torch.int32)
        return rotary_table(positions, dim, base=base, dtype=_arguments.wide(x.dtype))
    given = (length, dim, base, x.dtype == torch.float64)
    if torch.compiler.is_compiling() or type(x) not in _repeat.PLAIN_TYPES:
        return SHARED_TABLE(*given, str(x.device))
    return find_table(*given, x.device)


# Norms that rotate() computes, and the attributes that have their eps.
norms: dict[type, str] = {nn.RMSNorm: "eps"}


def is_unhooked(norm: Any) -> bool:
    """False if something may change what a module does."""
    if "forward" in vars(norm):
        return False
    of_all = [modules._global_forward_hooks, modules._global_forward_pre_hooks]
    of_all += [modules._global_backward_hooks, modules._global_backward_pre_hooks]
    own = [norm._forward_hooks, norm._forward_pre_hooks]
    own += [norm._backward_hooks, norm._backward_pre_hooks]
    return not any(of_all + own)


def norm_in_rotation(norm: Any, x: torch.Tensor) -> tuple[torch.Tensor, float] | None:
    """The weight and eps of a norm that rotate() can compute; None if the norm has to be called,
    because it is of another kind, or because hooks may change what it does."""
    if type(norm) not in norms or not is_unhooked(norm):
        return None
    weight, eps = norm.weight, getattr(norm, norms[type(norm)])
    fits = weight is not None and eps is not None and weight.shape == x.shape[3:]
    return (weight, eps) if fits and weight.dtype in (x.dtype, torch.float32) else None


def rotate_in_graph(
    x: torch.Tensor, table: torch.Tensor, nope_heads: int, weight: MaybeTensor, eps: float
) -> torch.Tensor:
    """rotate() by PyTorch's operations, which torch.compile fuses with those around them."""
    wide = x.to(table.dtype)
    if weight is not None:
        wide = nn.functional.rms_norm(wide, wide.shape[3:], weight.to(wide.dtype), eps)
    turned, kept = wide.split((x.shape[2] - nope_heads, nope_heads), 2)
    cos, sin = table[:, None].chunk(2, 2)
    first, second = turned.chunk(2, 3)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), 3)
    return torch.cat((turned, kept), 2).to(x.dtype)


class Rotation(NamedTuple):
    """The tables that rotate queries and keys of one call. Tables and starts as in rotate()."""

    table: torch.Tensor
    nope_table: MaybeTensor = None  # for NoPE heads, with a part of their channels rotated
    starts: MaybeTensor = None
    by_row: bool = False  # the tables have a row for each row of every batch entry, in their order

    def of(
        self, x: torch.Tensor, nope_heads: int = 0, weight: MaybeTensor = None, eps: float = 0.0
    ) -> torch.Tensor:
        """x [batch, len, heads, head_dim] as rotate() returns it."""
        shape = x.shape
        if self._is_fused(x):
            return rotate_in_graph(x, self.table, nope_heads, weight, eps)
        if self.by_row:
            x = x.flatten(0, 1)[None]
        norm: dict[str, Any] = {"starts": self.starts, "weight": weight, "eps": eps}
        if self.nope_table is None or nope_heads == 0:
            out = rotate(x, self.table, nope_heads=nope_heads, **norm)
        else:
            others, nope = x.split((shape[2] - nope_heads, nope_heads), 2)
            pairs = ((others, self.table), (nope, self.nope_table))
            out = torch.cat([rotate(part, table, **norm) for part, table in pairs], 2)
        return out.reshape(shape) if self.by_row else out

    def _is_fused(self, x: torch.Tensor) -> bool:
        """True in a graph of torch.compile if the table has a row for each position of x."""
        if not torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return False
        has_rows = not self.by_row and self.starts is self.nope_table is None
        return has_rows and type(x) is torch.Tensor and self.table.shape[1] == x.shape[3]

    def normalized(self, x: torch.Tensor, norm: Any, nope_heads: int = 0) -> torch.Tensor:
        """The rotated norm(x). One call computes both if it can."""
        known = norm_in_rotation(norm, x)
        return self.of(norm(x), nope_heads) if known is None else self.of(x, nope_heads, *known)


def to_int32(positions: torch.Tensor) -> torch.Tensor:
    """Refuses positions that the host sees and that int32 does not hold."""
    is_wide = positions.dtype == torch.int64 and positions.device.type == "cpu"
    if is_wide and not torch.compiler.is_compiling() and type(positions) in _repeat.PLAIN_TYPES:
        low, high = (int(x) for x in positions.aminmax()) if positions.numel() > 0 else (0, 0)
        if low < -POSITIONS_MAX or high >= POSITIONS_MAX:
            found = low if low < -POSITIONS_MAX else high
            raise ValueError(f"positions: has {found}, want less than 2^31 in size")
    return positions.to(torch.int32)


def rotation_for(
    x: torch.Tensor,
    positions: torch.Tensor | None,
    starts: torch.Tensor | Sequence[int] | None,
    base: float,
    nope_dim: int = 0,
) -> Rotation:
    """The rotation of rows like x [batch, len, heads, head_dim] by the angles of a base; nope_dim
    channels of NoPE heads are rotated.

    Positions are [batch or 1, len] integers, or None for 0, 1, ..., beginning anew at `starts`."""
    if positions is None and starts is None and nope_dim == 0:
        return Rotation(shared_table(x.shape[1], x.shape[3], base, x))
    rows = None if positions is None else to_int32(positions).flatten()
    kind: dict[str, Any] = {"base": base, "dtype": _arguments.wide(x.dtype)}

    def table(dim: int) -> torch.Tensor:
        if rows is None:
            return shared_table(x.shape[1], dim, base, x)
        return rotary_table(rows, dim, **kind)

    tables = (table(x.shape[3]), table(nope_dim) if nope_dim > 0 else None)
    if positions is not None:
        return Rotation(*tables, by_row=positions.shape[0] != 1)
    if starts is not None:
        starts = torch.as_tensor(starts, device=x.device, dtype=torch.int32)
    return Rotation(*tables, starts)


def rotation_of(cos: torch.Tensor, sin: torch.Tensor) -> Rotation:
    """The rotation by the cosines and sines [batch or 1, len, dim] of a model's rotary embedding,
    which has the numbers of each pair of channels twice."""
    halves = [one[..., : one.shape[2] // 2] for one in (cos, sin)]
    table = torch.cat(halves, 2).flatten(0, 1)
    return Rotation(table.to(_arguments.wide(cos.dtype)), by_row=cos.shape[0] > 1)


def rotate_heads(
    x: torch.Tensor,
    positions: torch.Tensor,
    base: float,
    nope_heads: int = 0,
    nope_dim: int = 0,
) -> torch.Tensor:
    """x [batch, len, heads, head_dim] with a rotary embedding at the positions [batch or 1, len].
    Only the first nope_dim channels of the last nope_heads heads are rotated, with the angles of a
    head of so many channels."""
    return rotation_for(x, positions, None, base, nope_dim).of(x, nope_heads)
