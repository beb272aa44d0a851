"""Calls in eager mode that go to the C library directly, without PyTorch's dispatcher.

The dispatcher takes as long as a small call itself. It is needed where something watches or changes
operators: torch.compile, export, tracing, transforms of torch.func, modes (fake tensors, counted
FLOPs), subclasses of tensors, the profiler, hooks for saved tensors. is_watched() and is_plain()
look for these. What tensors and the thread's dispatch keys tell is looked at once, at the first
call for a layout. Later calls have a guard: torch.compile's own test of tensors, which compares
types, dispatch keys, dtypes, devices, shapes, strides and requires_grad in one call of C++.

The kernels of operators, which the dispatcher calls in compiled graphs, repeat calls in the same
way. They remember theirs apart from those of eager mode: a guard compares dispatch keys as the
thread includes and excludes them, which differs within a kernel.

A version of PyTorch that lacks what this takes has no direct calls.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any, List, NamedTuple, Tuple

import torch
from torch.autograd import forward_ad

from . import _call, _extension
from ._arguments import MaybeTensor
from ._device import GUARDS, allocators, device_function, stream_function

if TYPE_CHECKING:
    from .ops import Operator

DEVICES = ("cpu", "cuda")
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
OPTION_TYPES = (int, float, bool, str, type(None))
LAYOUTS_MAX = 4  # of one set of options, which are tried one after the other
STATES_MAX = 8  # of one layout in kernels: dispatch keys, types of tensors and their requires_grad

try:  # none of it is in PyTorch's documentation
    from torch._C import (
        DispatchKey,
        DispatchKeySet,
        _dispatch_keys,
        _dispatch_tls_is_dispatch_key_excluded,
        _dispatch_tls_local_include_set,
        _len_torch_dispatch_stack,
        _len_torch_function_stack,
    )
    from torch._C._autograd import _profiler_enabled

    CAN_ASK = True
except ImportError:
    CAN_ASK = False
# The address of the C++ function that code made by torch.compile calls, in place of data_ptr().
DATA_PTR = getattr(GUARDS, "_torchinductor_pyobject_tensor_data_ptr", 0)
# The hooks for saved tensors that are set; PyTorch 2.4 does not tell.
saved_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)

Given = List[torch.Tensor]
Sources = List[Tuple[int, int]]  # of tensors: the number of a given one, and the offset in it


class Record(NamedTuple):
    """What autograd records of a call: see autograd.py."""

    apply: Any  # of the autograd.Function
    native_apply: Any  # of the one whose forward is in C, None without NATIVE
    backward: Operator
    options: tuple[Any, ...]  # of the backward operator
    kept: list[int]  # where what is saved is among given inputs and results
    # Where each tensor of the backward operator is among these; the name of one that is bundled.
    sources: list[int | str | None]
    results: list[int]  # indices of the backward operator's results that exist
    gradients: list[int | None]  # for each given input, where its gradient is in `results`


class DirectCall:
    """A call for tensors of one layout, in one state of PyTorch, with its guard."""

    def __init__(
        self, inputs: list[int], given: Given, prepared: _call.Prepared, sources: Sources
    ) -> None:
        self.inputs = inputs  # which tensors are given
        self.prepared = prepared
        # Of each word that holds the address of an input: the number of the tensor, and the offset.
        self.targets = [(*word, *source) for word, source in zip(prepared.inputs, sources)]
        self.guard = make_guard(given).check
        self.alignments = alignments_of(given)
        self.is_aligned = not any(self.alignments)
        self.record: Record | None = None
        self.count = 0  # of the results that it returns
        self.native: Any = None  # what NATIVE needs of it

    def fits(self, given: Given) -> bool:
        """Whether the call can be made for these tensors, whose addresses it notes."""
        if not self.guard(*given):
            return False
        bits = 0
        for words, at, index, offset in self.targets:
            words[at] = address = given[index].data_ptr() + offset
            bits |= address
        if self.is_aligned:
            return not bits % _call.ALIGNMENT
        return alignments_of(given) == self.alignments

    def make(self, given: Given) -> _call.Returned:
        """The results of the call for the tensors that fit it."""
        if self.record is not None:
            return self.record.apply(self, *given)
        return _call.unpack(tuple(self.prepared.run()))


def alignments_of(given: Given) -> list[int]:
    return [tensor.data_ptr() % _call.ALIGNMENT for tensor in given]


def make_guard(given: Given) -> Any:
    return GUARDS.TensorGuards(
        *given,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in given],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in given],
    )


@functools.lru_cache(maxsize=None)
def has_guards() -> bool:
    """Whether PyTorch's guards, which are not in its documentation, are what this module needs."""
    one, other = torch.empty(2, 3, device="cpu"), torch.empty(3, 2, device="cpu")
    try:
        check = make_guard([one, other]).check
        return check(one, other) and not check(other, one)
    except (AttributeError, SystemError, TypeError):
        return False


is_deterministic = getattr(
    torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)


def is_watched() -> bool:
    """Whether something that no guard notices needs the dispatcher: a mode, the profiler, hooks for
    saved tensors (checkpointing counts these), or forward mode, in which tensors have tangents."""
    return not CAN_ASK or bool(
        _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or _profiler_enabled()
        or (saved_hooks is not None and torch.is_grad_enabled() and saved_hooks(False))
        or getattr(forward_ad, "_current_level", 0) >= 0
    )


def find_native() -> Any:
    """The extension module, set up; None without it."""
    found = _extension.load() if CAN_ASK else None
    if found is not None:
        watchers = (_len_torch_dispatch_stack, _len_torch_function_stack, _profiler_enabled)
        states = (torch.is_grad_enabled, torch.get_num_threads, is_deterministic)
        found.configure(watchers, saved_hooks, states, vars(forward_ad), vars(_call), _call.Memory)
    return found


NATIVE = find_native()  # makes the calls that are remembered, if it is there


def is_plain_state() -> bool:
    """Whether the thread dispatches as it does by default, or in inference mode."""
    included = _dispatch_tls_local_include_set().remove(DispatchKey.ADInplaceOrView)
    without_autograd = _dispatch_tls_is_dispatch_key_excluded(DispatchKey.AutogradOther)
    return repr(included) == repr(DispatchKeySet(DispatchKey.BackendSelect)) and not (
        without_autograd and torch.is_grad_enabled()
    )


@functools.lru_cache(maxsize=None)
def plain_keys(device: str) -> tuple[str, ...]:
    """The dispatch keys of tensors that are nothing but numbers in memory, as text: sets of PyTorch
    2.4 are not equal to others."""
    found = []
    for is_inference in (False, True):
        with torch.inference_mode(is_inference):
            found.append(repr(_dispatch_keys(torch.empty(0, device=device))))
    return tuple(found)


def is_plain(tensor: Any) -> bool:
    if type(tensor) not in PLAIN_TYPES or tensor.device.type not in DEVICES:
        return False
    return repr(_dispatch_keys(tensor)) in plain_keys(tensor.device.type)


def key_in_python(head: Any, arguments: tuple[Any, ...], count: int) -> tuple[Any, ...] | None:
    """make_key() without NATIVE."""
    options = arguments[count:]
    return (
        head,
        *map(type, arguments[:count]),
        *options,
        *map(type, options),
        *(torch.is_grad_enabled(), torch.get_num_threads(), is_deterministic()),
        _call.Memory.tunings,
    )


def repeat_in_python(head: Any, arguments: tuple[Any, ...], count: int) -> Any:
    """repeat() without NATIVE."""
    if is_watched():
        return NotImplemented
    try:
        calls = _call.memory.direct.get(make_key(head, arguments, count), ())
    except TypeError:  # an option that has no hash
        return NotImplemented
    for call in calls:
        given = [arguments[at] for at in call.inputs]
        if call.fits(given):
            return call.make(given)
    return NotImplemented


# make_key(head, arguments, count): what tells the calls of a function, `head`, apart, beside the
# layouts of tensors; None for arguments that no call is remembered for. The first `count` arguments
# are tensors or None, the others options. Those that are equal, such as 1 and True, may have other
# meanings, and so their types count.
make_key = key_in_python if NATIVE is None else NATIVE.make_key
# repeat(head, arguments, count): the results of a call that is remembered; NotImplemented if none
# is.
repeat = repeat_in_python if NATIVE is None else NATIVE.repeat


def begin(
    operator: Operator,
    arguments: tuple[Any, ...],
    count: int,
    known_as: tuple[Any, ...] | None = None,
) -> Any:
    """The results of the first call for a layout; NotImplemented if the dispatcher has to make it.
    `count` is that of the results that are wanted, the first ones. The call is remembered by the
    operator's arguments and by `known_as`, other arguments of repeat(), whose tensors have the same
    order."""
    if is_watched():
        return NotImplemented
    call = add(operator, arguments, operator.operation.results[:count])
    if call is None:
        return NotImplemented
    remember(make_key((operator, count), arguments, operator.count), call)
    # Autocast's dtype may vary.
    if known_as is not None and not torch.is_autocast_enabled(arguments[0].device.type):
        remember(make_key(*known_as), call)
    return call.make([arguments[at] for at in call.inputs])


def add(
    operator: Operator, arguments: tuple[Any, ...], results: tuple[str, ...]
) -> DirectCall | None:
    """A new direct call for these arguments, with some of the operator's results; None if the
    dispatcher has to make the call."""
    tensors, options, backend = operator.settle(*arguments)
    inputs = [at for at, tensor in enumerate(tensors) if tensor is not None]
    given = [tensors[at] for at in inputs]
    fits = all(type(x) in OPTION_TYPES for x in (*options, backend)) and all(map(is_plain, given))
    if not fits or not is_plain_state() or not has_guards():
        return None
    names = operator.operation.tensors
    is_copied = any(
        _call.is_spaced(tensors[at]) and names[at] not in operator.operation.mutated
        for at in inputs
    )
    if is_copied or len(set(map(id, given))) < len(given):  # guards refuse a tensor given twice
        return None
    needs_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    operation, record = operator.operation.with_results(results), None
    if needs_gradients:
        if operator.plan_record is None or saved_hooks is None:
            return None
        operation, record = operator.plan_record(arguments, len(results))
    prepared, _ = _call.find(operation, tensors, options, backend)
    call = DirectCall(inputs, given, prepared, [(at, 0) for at in range(len(given))])
    call.record, call.count = record, len(results)
    return call if call.fits(given) else None


def call_operator(operator: Operator, arguments: tuple[Any, ...]) -> _call.Returned:
    """The kernel of an operator: makes a call that is remembered, or the first one for a layout.

    Raises:
        As _call.call().
    """
    # With the shapes that say the lengths, few guards are tried, however many lengths take turns.
    head = (operator, arguments[0].shape, arguments[operator.key_at].shape)
    results = repeat(head, arguments, operator.count)
    if results is not NotImplemented:
        return results
    remember = functools.partial(remember_in_kernel, head, arguments)
    return _call.call(operator, arguments, remember)


def remember_in_kernel(
    head: tuple[Any, ...], arguments: tuple[Any, ...], prepared: _call.Prepared, given: Given
) -> None:
    """Remember the call that `prepared` makes for the tensors `given`, under `head`, if a guard can
    tell these from others. A call that repeat() no longer finds is remembered again, not made anew,
    which would take as long as the rest of a small call."""
    operator = head[0]
    own = [id(x) for x in arguments[: operator.count] if x is not None]
    is_copied = own != [*map(id, given)]
    # Guards refuse a tensor given twice; where something watches, repeat() tries no guard.
    if is_copied or len(set(own)) < len(own) or is_watched():
        return
    known = _call.memory.in_kernels.setdefault(prepared, [])
    for call in known:
        if call.fits(given):
            break
    else:
        if len(known) >= STATES_MAX:
            return
        call = make_in_kernel(operator, arguments, prepared, given)
        if call is None:
            return
        known.append(call)
    remember(make_key(head, arguments, operator.count), call)


def make_in_kernel(
    operator: Operator, arguments: tuple[Any, ...], prepared: _call.Prepared, given: Given
) -> DirectCall | None:
    """A new direct call for these arguments; None if a tensor is of a subclass, or if guards do not
    tell what differs."""
    are_plain = all(type(x) in PLAIN_TYPES for x in given)
    if not are_plain or torch._C._are_functorch_transforms_active() or not has_guards():
        return None
    inputs = [at for at, x in enumerate(arguments[: operator.count]) if x is not None]
    call = DirectCall(inputs, given, prepared, [(at, 0) for at in range(len(given))])
    call.count = len(operator.operation.results)
    return call


def make_native(call: DirectCall) -> Any:
    """The Call of _native that makes a call in the way of Prepared.run()."""
    prepared, record = call.prepared, call.record

    def address(words: _call.Words, at: int) -> int:
        return ctypes.addressof(words) + 8 * at

    inputs = len(call.inputs)
    targets = [(address(words, at), *source) for words, at, *source in call.targets]
    outputs = []
    for number, (shape, stride, dtype, own) in enumerate(prepared.outputs, inputs):
        targets += [(address(words, at), number, offset) for words, at, offset in own]
        outputs.append(((shape, stride, dtype), number - inputs in prepared.zeroed))
    if prepared.allocates_workspace:
        word = address(prepared.args_words, prepared.workspace_at)
        targets.append((word, inputs + len(outputs), 0))
        outputs.append((((prepared.workspace_size,), (1,), torch.uint8), False))
    index = prepared.index
    device = (None, None, None, 0, 0)
    if index >= 0:
        stream_word = address(prepared.args_words, prepared.stream_at)
        trusted = ctypes.addressof(prepared.trusted)
        device = (index, device_function(), stream_function(), stream_word, trusted)
    return NATIVE.Call(
        prepared,
        ctypes.cast(prepared.function, ctypes.c_void_p).value,
        ctypes.addressof(prepared.args),
        call.guard,
        None if record is None else record.native_apply,
        functools.partial(_call.check, operation=prepared.operation),
        allocators(index),
        device,
        (torch.Tensor.data_ptr, DATA_PTR, *PLAIN_TYPES),
        tuple(zip(call.inputs, call.alignments)),
        tuple(outputs),
        tuple(targets),
        call.count,
        () if record is None else tuple(record.kept),
    )


def call_backward(
    call: DirectCall, dout: torch.Tensor, dlse: MaybeTensor, kept: _call.Outputs
) -> _call.Outputs:
    """The results of the backward operator of a recorded call that are not absent, from the
    gradients of out and lse and from what was kept."""
    record = call.record
    assert record is not None
    given = (dout, *kept) if dlse is None else (dout, dlse, *kept)
    is_eager = not torch.compiler.is_compiling()
    if is_eager:
        results = repeat(call, given, len(given))
        if results is not NotImplemented:
            return results
    tensors = [
        call.prepared.unpack(at, kept[-1])
        if isinstance(at, str)
        else at
        if at is None
        else kept[at]
        for at in record.sources
    ]
    arguments = (dout, dlse, *tensors, *record.options)
    names = tuple(record.backward.operation.results[at] for at in record.results)
    added = add(record.backward, arguments, names) if is_eager and not is_watched() else None
    if added is None:
        found = record.backward.dispatch(*arguments)
        return tuple(found[at] for at in record.results)
    # From now on the call takes what is given here.
    sources = [(at, 0) for at in range(len(given) - len(kept))]  # dout and dlse
    for at in record.sources:
        if isinstance(at, str):
            sources.append((len(given) - 1, call.prepared.bundled[at][0]))
        elif at is not None:
            sources.append((len(given) - len(kept) + at, 0))
    again = DirectCall(list(range(len(given))), list(given), added.prepared, sources)
    again.count = len(names)
    remember(make_key(call, given, len(given)), again)
    return added.make([arguments[at] for at in added.inputs])


def remember(key: tuple[Any, ...] | None, call: DirectCall) -> None:
    """Keep a call, the newest first."""
    if key is None:
        return
    if NATIVE is not None and call.native is None:
        call.native = make_native(call)
    known = _call.memory.direct
    if len(known) >= _call.LAYOUTS_MAX:
        known.clear()
    calls = known.setdefault(key, [])
    calls.insert(0, call)
    del calls[LAYOUTS_MAX:]
