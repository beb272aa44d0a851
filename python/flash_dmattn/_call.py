"""Calls of the C library on torch tensors, on the CPU and on CUDA devices.

The first call for tensors of some layout (shapes, strides, dtypes, device) fills in its argument
struct and asks for the size of its workspace. Later ones for the same layout only write addresses
into that struct: for small inputs the rest takes longer than the call itself.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Callable, NamedTuple, Optional

import torch

from . import _library

DTYPES = {
    torch.float32: _library.FLOAT32,
    torch.float16: _library.FLOAT16,
    torch.bfloat16: _library.BFLOAT16,
    torch.float64: _library.FLOAT64,
    torch.int32: _library.INT32,
    torch.uint8: _library.UINT8,
    torch.bool: _library.UINT8,
}
MOST_LAYOUTS = 512  # that a thread remembers
ALIGNMENT = 16  # bytes: which kernels take a tensor may depend on it

Outputs = tuple[torch.Tensor, ...]
MaybeTensor = Optional[torch.Tensor]


class Draft(NamedTuple):
    """A call's structs with its options in them, and room for its outputs."""

    args: _library.Sized
    selection: _library.Selection | None  # that `args` points to
    outputs: tuple[tuple[str, torch.Tensor], ...]  # by field; "": not the C library's
    added_to: tuple[str, ...] = ()  # outputs that the call adds to what they hold: begun with 0


class Operation(NamedTuple):
    """A function of the C library: fdma_<name>()."""

    name: str
    inputs: tuple[str, ...]  # fields of its struct, or of its selection
    draft: Callable[..., Draft]  # of the inputs and the options


def view(name: str, tensor: torch.Tensor) -> _library.Tensor:
    """`tensor` as the C library sees it. Errors: ValueError, NotImplementedError."""
    if not 1 <= tensor.dim() <= 4:
        raise ValueError(f"{name}: rank is {tensor.dim()}, want 1 to 4")
    if tensor.dtype not in DTYPES:
        raise NotImplementedError(f"{name}: dtype is {tensor.dtype}, which no kernel takes")
    absent = (0,) * (4 - tensor.dim())
    return _library.Tensor(
        data=tensor.data_ptr(),
        shape=(*tensor.shape, *absent),
        stride=(*tensor.stride(), *absent),
        dtype=DTYPES[tensor.dtype],
        rank=tensor.dim(),
    )


Words = Any  # a struct as an array of uint64


def words_of(struct: ctypes.Structure) -> Words:
    return (ctypes.c_uint64 * (ctypes.sizeof(struct) // 8)).from_buffer(struct)


class Prepared:
    """A call for one layout. Not for two threads at once: they would write into the same struct."""

    def __init__(
        self,
        operation: Operation,
        draft: Draft,
        tensors: list[MaybeTensor],
        exec_fields: dict[str, Any],
    ) -> None:
        self.args, self.selection = draft.args, draft.selection
        for name, value in exec_fields.items():
            setattr(self.args.exec, name, value)
        self.args_words = words_of(self.args)
        self.selection_words = words_of(self.selection) if self.selection else None
        given = [*zip(operation.inputs, tensors), *draft.outputs]
        # An absent input's address is never written: its place is one that nobody reads.
        self.places = [self.place(name, tensor) for name, tensor in given]
        self.outputs = [(tuple(tensor.shape), tensor.dtype) for _, tensor in draft.outputs]
        names = [name for name, _ in draft.outputs]
        self.added_to = [names.index(name) for name in draft.added_to]
        exec_at = type(self.args).exec.offset
        self.stream_at = (exec_at + _library.Exec.stream.offset) // 8
        self.workspace_at = (exec_at + _library.Exec.workspace.offset) // 8
        self.reference = ctypes.byref(self.args)
        self.function = getattr(_library.library, f"fdma_{operation.name}")
        size = ctypes.c_size_t()
        ask = getattr(_library.library, f"fdma_{operation.name}_workspace")
        _library.check(ask(self.reference, ctypes.byref(size)))
        self.args.exec.workspace_size = self.workspace_size = size.value

    def place(self, name: str, tensor: MaybeTensor) -> tuple[Words, int] | None:
        """Where the address of `tensor` is written; fills in all of its field."""
        if tensor is None or not name:
            return None
        in_selection = name in ("expiry", "slot")
        struct = self.selection if in_selection else self.args
        setattr(struct, name, view(name, tensor))
        words = self.selection_words if in_selection else self.args_words
        return words, (getattr(type(struct), name).offset + _library.Tensor.data.offset) // 8

    def run(self, addresses: list[int], stream: int, first: torch.Tensor) -> Outputs:
        """Make the call for inputs at `addresses`; outputs and workspace are new, like `first`."""
        outputs = tuple([first.new_empty(shape, dtype=dtype) for shape, dtype in self.outputs])
        for place in self.added_to:
            outputs[place].zero_()
        addresses += [tensor.data_ptr() for tensor in outputs]
        for place, address in zip(self.places, addresses):
            if place is not None:
                place[0][place[1]] = address
        self.args_words[self.stream_at] = stream
        if self.workspace_size:
            workspace = first.new_empty(self.workspace_size, dtype=torch.uint8)
            self.args_words[self.workspace_at] = workspace.data_ptr()
        _library.check(self.function(self.reference))
        return outputs


class Memory(threading.local):
    """What a thread has prepared, by layout."""

    def __init__(self) -> None:
        self.prepared: dict[tuple[Any, ...], Prepared] = {}


memory = Memory()


def check_devices(operation: Operation, tensors: list[MaybeTensor]) -> None:
    """Errors: ValueError where they are not all on one device."""
    places = [(name, x.device) for name, x in zip(operation.inputs, tensors) if x is not None]
    first, device = places[0]
    for name, other in places:
        if other != device:
            raise ValueError(f"{name}: is on {other}, want {device}, where {first} is")


def remember(
    key: tuple[Any, ...],
    operation: Operation,
    tensors: list[MaybeTensor],
    options: tuple[Any, ...],
    exec_fields: dict[str, Any],
) -> Prepared:
    if len(memory.prepared) >= MOST_LAYOUTS:
        memory.prepared.clear()
    check_devices(operation, tensors)
    draft = operation.draft(*tensors, *options)
    prepared = memory.prepared[key] = Prepared(operation, draft, tensors, exec_fields)
    return prepared


def call(
    operation: Operation,
    inputs: tuple[MaybeTensor, ...],
    options: tuple[Any, ...],
    backend: str | None,
) -> Outputs:
    """Make the call on the device of its first input, in that device's current stream.

    A tensor is taken as it is, without a copy unless its last stride is not 1. Errors: those of
    _library.check().
    """
    tensors: list[MaybeTensor] = []
    addresses: list[int] = []
    key: list[Any] = [operation.draft, options, backend]
    for tensor in inputs:
        address = 0
        if tensor is not None:
            stride = tensor.stride()
            if stride and stride[-1] != 1 and tensor.size(-1) > 1:
                # Where there are no elements, contiguous() leaves strides as they are.
                tensor = tensor.contiguous() if tensor.numel() else tensor.new_empty(tensor.shape)
                stride = tensor.stride()
            address = tensor.data_ptr()
            key += (tensor.shape, stride, tensor.dtype, tensor.get_device(), address % ALIGNMENT)
        else:
            key.append(None)
        tensors.append(tensor)
        addresses.append(address)
    first = tensors[0]
    assert first is not None
    index = first.get_device()  # -1: the CPU
    threads = torch.get_num_threads() if index < 0 else 0
    stream = torch._C._cuda_getCurrentRawStream(index) if index >= 0 else 0
    key.append(threads)
    whole_key = tuple(key)
    prepared = memory.prepared.get(whole_key)
    if prepared is None:
        kernel = None if backend is None else backend.encode()
        where = {"kernel": kernel, "device": index + 1, "threads": threads}
        prepared = remember(whole_key, operation, tensors, options, where)
    return prepared.run(addresses, stream, first)
