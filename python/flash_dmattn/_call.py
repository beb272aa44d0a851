"""Calls of the C library on torch tensors, on the CPU and on CUDA devices.

The first call for a layout of tensors (shapes, strides, dtypes, device) and a set of options checks
the shapes, fills in the argument struct and asks for the workspace size. Later calls for the same
layout only write addresses into that struct: for small inputs the rest would take longer than the
call itself.

`index` is the number of a GPU; -1 is the CPU. PyTorch's private functions for new tensors and for
the current stream are faster than the public ones, which take as long as a small call. The public
ones are used where a version of PyTorch lacks the private ones.
"""

from __future__ import annotations

import ctypes
import math
import threading
from typing import TYPE_CHECKING, Any, Callable, Iterable, NamedTuple, Tuple, Union

import torch

from . import _arguments, _library
from ._arguments import (
    DTYPES,
    MaybeTensor,
    Options,
    Sizes,
    check_backend,
    check_devices,
    check_dtype,
    check_same_dtype,
)

if TYPE_CHECKING:
    from .ops import Operator

Ints = Tuple[int, ...]
Allocator = Callable[[Ints, Ints, torch.dtype], torch.Tensor]
GUARDS: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
LAYOUTS_MAX = 512  # remembered by a thread
WORKSPACE_KEPT = 1 << 20  # bytes of the workspace that a thread keeps for its calls on the CPU
ALIGNMENT = 16  # bytes: a kernel may need tensors that are aligned so
BUNDLE_ALIGNMENT = 128  # bytes, of results in one tensor: a cache line of a GPU
# Tensors that are fields of fdma_selection, not of the call's own struct.
IN_SELECTION = ("expiry", "slot", "expiry_all", "slot_all")
RULES = ("window", "recent", "sinks", "scope")  # fields of it with the rules of select()

Outputs = Tuple[torch.Tensor, ...]
Returned = Union[Outputs, torch.Tensor, None]  # by an operator
Words = Any  # a struct as an array of uint64


class Operation(NamedTuple):
    """The properties of an operator that a call needs: see ops.py."""

    name: str  # of the operator
    function: str  # of the C library: fdma_<function>()
    tensors: tuple[str, ...]
    options: tuple[str, ...]
    results: tuple[str, ...]
    mutated: tuple[str, ...] = ()  # tensors that the call writes to
    cleared: tuple[str, ...] = ()  # results that begin as zeros, because the C library adds to them
    fixed: tuple[tuple[str, Any], ...] = ()  # options with one value in every call
    bundled: tuple[str, ...] = ()  # results, the last ones, in one tensor of bytes

    def with_results(self, results: tuple[str, ...], bundled: tuple[str, ...] = ()) -> Operation:
        """The operation with some of its results; the call leaves the others out."""
        if results == self.results and not bundled:
            return self
        name = f"{self.name}: {', '.join(results)}; {', '.join(bundled)}"
        return self._replace(name=name, results=results, bundled=bundled)


def thread_count(index: int) -> int:
    return torch.get_num_threads() if index < 0 else 0


def stream_function() -> Callable[[int], int]:
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # without an object around it
    return raw if raw is not None else lambda index: torch.cuda.current_stream(index).cuda_stream


def device_function() -> Callable[[], int]:
    raw = getattr(torch._C, "_cuda_getDevice", None)  # a build without CUDA has none
    return raw if raw is not None else torch.cuda.current_device


def allocators(index: int) -> tuple[Allocator, Allocator]:
    """Two functions that make uninitialised tensors of a shape, strides and a dtype: the first
    needs the device to be the current one, the second does not."""
    device = torch.device("cpu") if index < 0 else torch.device("cuda", index)

    def allocate(shape: Ints, stride: Ints, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    name = "_empty_strided_cpu" if index < 0 else "_empty_strided_cuda"
    return getattr(GUARDS, name, allocate), allocate


def allocator(index: int) -> Allocator:
    """A function that makes uninitialised tensors of a shape, strides and a dtype."""
    on_current, allocate = allocators(index)
    if index < 0 or on_current is allocate:
        return on_current
    current_device = device_function()

    def allocate_fast(shape: Ints, stride: Ints, dtype: torch.dtype) -> torch.Tensor:
        make = on_current if current_device() == index else allocate
        return make(shape, stride, dtype)

    return allocate_fast


def check(status: int, operation: Operation, tensors: dict[str, MaybeTensor] | None = None) -> None:
    """_library.check(), with Python's names of the arguments in the message. The message also says
    if `tensors` seem to have their axes in another order."""
    if status != _library.OK:
        try:
            _library.check(status)
        except Exception as error:
            message = _arguments.translate(str(error), operation.tensors, operation.options)
            for name, tensor in (tensors or {}).items():
                if tensor is not None and tensor.dtype == torch.bool:  # uint8 to the C library
                    found = f"{_arguments.SHOWN.get(name, name)}: dtype is "
                    message = message.replace(f"{found}uint8,", f"{found}bool,")
            if tensors is not None and message.startswith(("q_len: ", "q_heads: ")):
                message = _arguments.describe_order(tensors, is_certain=False) or message
            raise type(error)(message) from None


def view(name: str, tensor: torch.Tensor) -> _library.Struct:
    """`tensor` as the C library sees it.

    Raises:
        NotImplementedError: its dtype is none of the C library's.
    """
    check_dtype(name, tensor)
    absent = (0,) * (4 - tensor.dim())
    return _library.HEADER.structs["fdma_tensor"](
        data=tensor.data_ptr(),
        shape=(*tensor.shape, *absent),
        stride=(*tensor.stride(), *absent),
        dtype=DTYPES[tensor.dtype],
        rank=tensor.dim(),
    )


def unpack(outputs: Outputs) -> Returned:
    """The outputs as an operator returns them: several, the only one, or None."""
    return outputs if len(outputs) > 1 else outputs[0] if outputs else None


def words_of(struct: ctypes.Structure) -> Words:
    return (ctypes.c_uint64 * (ctypes.sizeof(struct) // 8)).from_buffer(struct)


def fill_options(args: _library.Struct, ruled: list[_library.Struct], options: Options) -> None:
    """Write `options` into the struct, and rules into `ruled`: the selection and the cache that the
    call is given."""
    for name, value in options.items():
        field = _arguments.field_of(name)
        number = _arguments.choose(name, value) if name in _arguments.CHOICES else value
        for struct in (args, *ruled) if field in RULES else (args,):
            if hasattr(type(struct), field):
                setattr(struct, field, number)


def make_selection(
    operation: Operation, tensors: dict[str, MaybeTensor]
) -> tuple[_library.Struct | None, bool]:
    """The selection of a call, if it has one, and whether it is an input of the call."""
    make = _library.HEADER.structs["fdma_selection"]
    for name in ("expiry", "expiry_all"):
        given = tensors.get(name)
        if given is not None:
            return make(kv_len=given.shape[-1]), True
        if name in operation.results:
            return make(), False
    return None, False


class Prepared:
    """A call for one layout. It writes into its struct, so only one thread at a time may use it."""

    def __init__(
        self,
        operation: Operation,
        tensors: dict[str, MaybeTensor],
        options: Options,
        exec_fields: dict[str, Any],
    ) -> None:
        sizes = _arguments.bind_sizes(tensors)
        _arguments.check_sizes(tensors, sizes)
        check_same_dtype(tensors)
        self.operation = operation
        self.index = exec_fields["device"] - 1
        self.fill_struct(tensors, {**dict(operation.fixed), **options}, exec_fields)
        # The words of the struct that hold the addresses of the inputs.
        self.inputs = [self.fill_tensor(name, x) for name, x in tensors.items() if x is not None]
        self.plan_outputs(tensors, sizes, options)
        self.zeroed = [
            operation.results.index(x) for x in operation.cleared if x in operation.results
        ]
        if hasattr(self.args, "cache"):
            cache = self.args.cache
            cache.sequences, cache.kv_heads = sizes["sequences"], sizes["kv_heads"]
            cache.head_dim, cache.dtype = sizes["head_dim"], cache.k.dtype
            cache.device = exec_fields["device"]
        self.reference = ctypes.byref(self.args)
        self.function = getattr(_library.library, f"fdma_{operation.function}")
        self.plan_workspace(tensors)

    def fill_struct(
        self, tensors: dict[str, MaybeTensor], options: Options, exec_fields: dict[str, Any]
    ) -> None:
        """Make the argument struct, and fill in everything but tensors."""
        structs = _library.HEADER.structs
        self.args = structs[f"fdma_{self.operation.function}_args"]()
        for name, value in exec_fields.items():
            setattr(self.args.exec, name, value)
        ruled = [self.args.cache] if hasattr(self.args, "cache") else []
        self.selection, is_given = make_selection(self.operation, tensors)
        if self.selection is not None:
            self.args.selection = ctypes.pointer(self.selection)
        if is_given:  # fdma_select() fills in the selection that it makes
            ruled.append(self.selection)
        fill_options(self.args, ruled, options)
        self.args_words = words_of(self.args)
        self.selection_words = words_of(self.selection) if self.selection else None
        exec_at, exec_type = type(self.args).exec.offset, structs["fdma_exec"]
        self.stream_at = (exec_at + exec_type.stream.offset) // 8
        self.workspace_at = (exec_at + exec_type.workspace.offset) // 8
        self.trusted = ctypes.c_int32.from_buffer(self.args, exec_at + exec_type.trusted.offset)

    def plan_workspace(self, tensors: dict[str, MaybeTensor]) -> None:
        """Ask for the size of the workspace, and decide how calls get it and their outputs."""
        size = ctypes.c_size_t()
        ask = getattr(_library.library, f"fdma_{self.operation.function}_workspace")
        check(ask(self.reference, ctypes.byref(size)), self.operation, tensors)
        self.args.exec.workspace_size = self.workspace_size = size.value
        self.allocate = allocator(self.index)
        self.current_stream = stream_function()
        self.current_device = device_function()
        # A call on the CPU has ended when it returns. So all calls of a thread share one workspace,
        # if it is large enough. Other calls allocate one each time.
        self.allocates_workspace = size.value > (WORKSPACE_KEPT if self.index < 0 else 0)
        if size.value and not self.allocates_workspace:
            if memory.workspace is None:  # modes such as FakeTensorMode do not see allocate()
                memory.workspace = self.allocate((WORKSPACE_KEPT,), (1,), torch.uint8)
            self.workspace = memory.workspace
            self.args_words[self.workspace_at] = self.workspace.data_ptr()

    def plan_outputs(self, tensors: dict[str, MaybeTensor], sizes: Sizes, options: Options) -> None:
        """Fill in the fields of the results."""
        # For each new tensor: its shape, strides and dtype, and the words that hold addresses in
        # it, each with an offset in bytes.
        self.outputs: list[tuple[Any, Any, torch.dtype, list[tuple[Words, int, int]]]] = []
        self.bundled: dict[str, tuple[int, Any, torch.dtype]] = {}  # offset, shape and dtype
        targets, bundle_size = [], 0
        for name in self.operation.results:
            shape, dtype = _arguments.result_like(name, tensors, sizes, options)
            room = torch.empty(shape, dtype=dtype, device="meta")
            absent = _arguments.is_absent(name, tensors, options)
            if name not in self.operation.bundled:
                own = [] if absent else [(*self.fill_tensor(name, room), 0)]
                self.outputs.append((tuple(room.shape), room.stride(), dtype, own))
            elif not absent:
                targets.append((*self.fill_tensor(name, room), bundle_size))
                self.bundled[name] = (bundle_size, tuple(room.shape), dtype)
                size = room.numel() * room.element_size()
                bundle_size += -(-size // BUNDLE_ALIGNMENT) * BUNDLE_ALIGNMENT
        if targets:
            self.outputs.append(((bundle_size,), (1,), torch.uint8, targets))

    def fill_tensor(self, name: str, tensor: torch.Tensor) -> tuple[Words, int]:
        """Fill in the field of `tensor`; return the word of the struct that holds its address."""
        in_selection = name in IN_SELECTION
        struct = self.selection if in_selection else self.args
        words = self.selection_words if in_selection else self.args_words
        *outer, field = _arguments.field_of(name).split(".")
        offset = _library.HEADER.structs["fdma_tensor"].data.offset
        for member in outer:
            offset += getattr(type(struct), member).offset
            struct = getattr(struct, member)
        setattr(struct, field, view(name, tensor))
        return words, (getattr(type(struct), field).offset + offset) // 8

    def set_addresses(self, inputs: Iterable[torch.Tensor]) -> None:
        for (words, at), tensor in zip(self.inputs, inputs):
            words[at] = tensor.data_ptr()

    def unpack(self, name: str, bundle: torch.Tensor) -> torch.Tensor:
        """One of the results that are bundled in one tensor."""
        offset, shape, dtype = self.bundled[name]
        return bundle[offset:].view(dtype)[: math.prod(shape)].view(shape)

    def run(self) -> list[torch.Tensor]:
        """Make the call for the inputs whose addresses are set. Its outputs are new tensors."""
        allocate, words = self.allocate, self.args_words
        outputs = []
        for shape, stride, dtype, targets in self.outputs:
            output = allocate(shape, stride, dtype)
            outputs.append(output)
            address = output.data_ptr()
            for written, at, offset in targets:
                written[at] = address + offset
        for index in self.zeroed:
            outputs[index].zero_()
        if self.index >= 0:
            words[self.stream_at] = self.current_stream(self.index)
            # PyTorch knows each tensor's device, so only the current device must be compared
            self.trusted.value = self.current_device() == self.index
        if self.allocates_workspace:
            workspace = allocate((self.workspace_size,), (1,), torch.uint8)
            words[self.workspace_at] = workspace.data_ptr()
        status = self.function(self.reference)
        if status:
            check(status, self.operation)
        return outputs


class Memory(threading.local):
    """The calls that a thread has prepared, by layout."""

    def __init__(self) -> None:
        self.prepared: dict[tuple[Any, ...], Prepared] = {}
        self.workspace: MaybeTensor = None  # of calls on the CPU, once one has needed it
        self.direct: dict[tuple[Any, ...], list[Any]] = {}  # see _repeat.py
        self.workspaces: Workspaces | None = None  # set while calls on meta tensors report theirs


memory = Memory()


def exec_fields_of(backend: str | None, index: int) -> dict[str, Any]:
    """The fields of fdma_exec for a device; `index` is the number of a GPU, -1 for the CPU.

    Raises:
        NotImplementedError: no kernel has the name `backend`.
    """
    check_backend(backend)
    kernel = None if backend is None else backend.encode()
    return {"kernel": kernel, "device": index + 1, "threads": thread_count(index)}


class Workspaces:
    """The largest workspace that calls on meta tensors would need: operators' fake kernels report
    theirs within `with Workspaces(index) as needed`. `index` is as in exec_fields_of()."""

    def __init__(self, index: int) -> None:
        self.index, self.most = index, 0

    def __enter__(self) -> Workspaces:
        memory.workspaces = self
        return self

    def __exit__(self, *raised: object) -> None:
        memory.workspaces = None

    def ask(
        self,
        operation: Operation,
        inputs: tuple[MaybeTensor, ...],
        options: tuple[Any, ...],
        backend: str | None,
    ) -> None:
        tensors = dict(zip(operation.tensors, inputs))
        named = dict(zip(operation.options, options))
        prepared = Prepared(operation, tensors, named, exec_fields_of(backend, self.index))
        self.most = max(self.most, prepared.workspace_size)


def prepare(
    key: tuple[Any, ...],
    operation: Operation,
    tensors: list[MaybeTensor],
    options: tuple[Any, ...],
    exec_fields: dict[str, Any],
) -> Prepared:
    """Prepare the call for the layout `key`, and remember it."""
    if len(memory.prepared) >= LAYOUTS_MAX:
        memory.prepared.clear()
    named = dict(zip(operation.tensors, tensors))
    check_devices(named)
    prepared = Prepared(operation, named, dict(zip(operation.options, options)), exec_fields)
    memory.prepared[key] = prepared
    return prepared


def find(
    operation: Operation,
    inputs: tuple[MaybeTensor, ...],
    options: tuple[Any, ...],
    backend: str | None,
) -> tuple[Prepared, list[torch.Tensor]]:
    """The call on the device of its first input, and the inputs that it is made for.

    A tensor is copied only if its last stride is not 1 and the call does not write to it.

    Raises:
        As call().
    """
    tensors: list[MaybeTensor] = []
    key: list[Any] = [operation.name, options, backend]
    for name, tensor in zip(operation.tensors, inputs):
        if tensor is not None:
            if is_spaced(tensor) and name not in operation.mutated:
                # Without elements contiguous() leaves strides as they are.
                tensor = tensor.contiguous() if tensor.numel() else tensor.new_empty(tensor.shape)
            alignment = tensor.data_ptr() % ALIGNMENT
            device = tensor.get_device()
            key += (tensor.shape, tensor.stride(), tensor.dtype, device, alignment)
        else:
            key.append(None)
        tensors.append(tensor)
    first = tensors[0]
    assert first is not None
    index = first.get_device()  # -1: the CPU
    key.append(thread_count(index))
    whole_key = tuple(key)
    prepared = memory.prepared.get(whole_key)
    if prepared is None:
        exec_fields = exec_fields_of(backend, index)
        prepared = prepare(whole_key, operation, tensors, options, exec_fields)
    return prepared, [tensor for tensor in tensors if tensor is not None]


def is_spaced(tensor: torch.Tensor) -> bool:
    """True if the elements of the last axis are not adjacent; the C library refuses such
    tensors."""
    stride = tensor.stride()
    return bool(stride) and stride[-1] != 1 and tensor.size(-1) > 1


def call(operator: Operator, arguments: tuple[Any, ...]) -> Returned:
    """Make the call of an operator in the current stream of the device.

    Raises:
        ValueError: arguments contradict each other.
        NotImplementedError: no kernel does this.
        RuntimeError: the device failed.
    """
    prepared, given = find(operator.operation, *operator.settle(*arguments))
    prepared.set_addresses(given)
    return unpack(tuple(prepared.run()))


def call_with_lists(
    operation: Operation,
    inputs: tuple[MaybeTensor, ...],
    options: tuple[Any, ...],
    lists: dict[str, Any],
) -> None:
    """Make a call that writes to its inputs. `lists` has arrays of ctypes, by their fields.

    Raises:
        As call().
    """
    prepared, given = find(operation, inputs, options, None)
    prepared.set_addresses(given)
    for name, numbers in lists.items():
        setattr(prepared.args, name, numbers)
    prepared.run()


def make_mask_lists(
    attention: Operation,
    given: dict[str, MaybeTensor],
    options: dict[str, Any],
    backend: str | None,
) -> torch.Tensor:
    """The lists of an attn_mask: fdma_mask_lists(), which takes the arguments of forward.

    Raises:
        As call().
    """
    tensors = {name: given.get(name) for name in attention.tensors}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dim() > 0 and tensor.stride(-1) != 1:
            tensors[name] = tensor.contiguous()
    first = tensors["query"]
    assert first is not None
    index = first.get_device()
    check_devices(tensors)
    prepared = Prepared(attention, tensors, options, exec_fields_of(backend, index))
    size = ctypes.c_size_t()
    ask = _library.library.fdma_mask_lists_size
    check(ask(prepared.reference, ctypes.byref(size)), attention)
    lists = first.new_empty(size.value, dtype=torch.uint8)
    prepared.fill_tensor("mask_lists", lists)
    prepared.function = _library.library.fdma_mask_lists
    prepared.set_addresses([x for x in tensors.values() if x is not None])
    prepared.run()  # its outputs are not written
    return lists
