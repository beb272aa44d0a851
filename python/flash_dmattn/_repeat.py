"""Calls in eager mode that go to the C library directly, without PyTorch's dispatcher.

The dispatcher takes longer than a small call itself. It is needed if something watches or changes
operators: torch.compile, export, tracing, transforms of torch.func, modes (fake tensors, FLOP
counting), tensor subclasses, the profiler, hooks for saved tensors. The tensors and the thread's
dispatch keys are inspected once, at the first call for a layout, which is planned here. The
extension module _native (src/python) makes this call and the later ones. Each has a guard:
torch.compile's own test of tensors, which compares types, dispatch keys, dtypes, devices, shapes,
strides and requires_grad in one C++ call.

The operators, which compiled graphs call, repeat calls in the same way where no gradients are
recorded: what PyTorch's object for an operator calls is replaced by a function of _native, and the
dispatcher gets the calls that it does not know.

All calls go through the dispatcher if the module is missing, with one warning, or if PyTorch lacks
something that direct calls need.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import sys
import sysconfig
import warnings
from importlib.machinery import ExtensionFileLoader
from typing import TYPE_CHECKING, Any, Callable, List, NamedTuple, Sequence, Tuple

import torch
from torch.autograd import forward_ad

from . import _call, _library
from ._arguments import DEVICES, MaybeTensor
from ._call import GUARDS, allocators, device_function, stream_function

if TYPE_CHECKING:
    from .ops import Operator

INTERFACE = 7  # version of the interface between _native and this file
NAME, FILE = f"{__package__}._native", "_native.abi3.so"
MISSING = (
    "flash_dmattn: the extension module _native is missing, so that small calls take several times "
    "as long; to build it, install Python's headers (Debian: python3-dev), then the package anew"
)
NEEDS_GIL = (
    "flash_dmattn: the extension module _native needs a Python with the GIL, so that small calls "
    "take several times as long"
)
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
OPTION_TYPES = (int, float, bool, str, type(None))
LAYOUTS_MAX = 8  # per set of options; they are tried one after the other

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
# The address of the C++ function that code of torch.compile calls in place of data_ptr().
DATA_PTR = getattr(GUARDS, "_torchinductor_pyobject_tensor_data_ptr", 0)
# Returns the hooks for saved tensors that are set. PyTorch 2.4 has no such function.
saved_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)

Given = List[torch.Tensor]
Sources = List[Tuple[int, int]]  # per tensor: the index of a given tensor, and an offset in it
# Identifies a call: a head, which stands for the function; its arguments, first tensors or None,
# then options; and the number of those first arguments.
Known = Tuple[Any, Tuple[Any, ...], int]

is_deterministic = getattr(
    torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)


def load_native() -> Any:
    """Load the extension module from the folder of the C library, where the build puts it, or from
    this file's folder. None if there is none, or only one for another version of this package."""
    # A free-threaded interpreter has other object layouts, and loading by path does not check them.
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    if NAME in sys.modules:
        return sys.modules[NAME]
    folders = (_library.find().parent, *_library.folders())
    path = next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)
    if path is None:
        return None
    loader = ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError:  # this interpreter cannot load the file, for example PyPy
        return None
    if module.INTERFACE != INTERFACE:
        return None
    sys.modules[NAME] = module
    return module


def find_native() -> Any:
    """The extension module, set up; None if all calls go through the dispatcher."""
    found = load_native() if CAN_ASK else None
    if found is not None:
        watchers = (_len_torch_dispatch_stack, _len_torch_function_stack, _profiler_enabled)
        states = (torch.is_grad_enabled, torch.get_num_threads, is_deterministic)
        found.configure(watchers, saved_hooks, states, vars(forward_ad), vars(_call), PLAIN_TYPES)
    return found


NATIVE = find_native()


@functools.lru_cache(maxsize=None)
def warn_once() -> None:
    if CAN_ASK:
        why = NEEDS_GIL if sysconfig.get_config_var("Py_GIL_DISABLED") else MISSING
        warnings.warn(why, RuntimeWarning, stacklevel=4)  # the caller of the public function


def repeat_nothing(head: Any, arguments: tuple[Any, ...], count: int) -> Any:
    """repeat() without NATIVE."""
    warn_once()
    return NotImplemented


# repeat(*known): the results of a remembered call. NotImplemented if there is none, or if something
# needs the dispatcher that no guard notices: a mode, the profiler, or forward mode, in which
# tensors have tangents.
repeat = repeat_nothing if NATIVE is None else NATIVE.repeat


class Record(NamedTuple):
    """The parts of a call that autograd records: see autograd.py."""

    apply: Any  # of the autograd.Function
    backward: Operator
    taken: int  # gradients of results that the backward operator takes, dout and dlse at most
    options: tuple[Any, ...]  # of the backward operator
    kept: list[int]  # indices of the saved tensors in [given inputs, results]
    # Where each tensor of the backward operator is in `kept`; the name of a bundled one.
    sources: list[int | str | None]
    results: list[int]  # indices of the backward operator's results that exist
    gradients: list[int | None]  # for each given input, the index of its gradient in `results`
    rotation: Any = None  # of queries and keys before the call: see rotated.py


class Link(NamedTuple):
    """Another C call that a direct call makes before or after its own. Tensors have the numbers of
    the direct call: inputs first, then outputs."""

    prepared: _call.Prepared
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class DirectCall:
    """A call for tensors of one layout, in one state of PyTorch, with its guard.

    The outputs of `before`, in its order, come after all others."""

    def __init__(
        self,
        inputs: list[int],
        given: Given,
        prepared: _call.Prepared,
        count: int,
        record: Record | None = None,
        sources: Sources | None = None,
        before: Sequence[Link] = (),
        after: Sequence[Link] = (),
    ) -> None:
        self.inputs = inputs  # indices of the tensors that are given
        self.prepared = prepared
        self.guard = make_guard(given).check
        self.alignments = alignments_of(given)
        self.record = record
        self.before, self.after = before, after
        sources = [(at, 0) for at in range(len(given))] if sources is None else sources
        self.native = make_native(self, count, sources)

    def fits(self, given: Given) -> bool:
        return self.guard(*given) and alignments_of(given) == self.alignments


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
    """True if PyTorch's guards, which are undocumented, do what this module needs."""
    one, other = torch.empty(2, 3, device="cpu"), torch.empty(3, 2, device="cpu")
    try:
        check = make_guard([one, other]).check
        return check(one, other) and not check(other, one)
    except (AttributeError, SystemError, TypeError):
        return False


def is_plain_state() -> bool:
    """True if the thread dispatches as it does by default or in inference mode."""
    included = _dispatch_tls_local_include_set().remove(DispatchKey.ADInplaceOrView)
    without_autograd = _dispatch_tls_is_dispatch_key_excluded(DispatchKey.AutogradOther)
    return repr(included) == repr(DispatchKeySet(DispatchKey.BackendSelect)) and not (
        without_autograd and torch.is_grad_enabled()
    )


@functools.lru_cache(maxsize=None)
def plain_keys(device: str) -> tuple[str, ...]:
    """The dispatch keys of plain tensors, as text, because key sets of PyTorch 2.4 never
    compare equal."""
    found = []
    for is_inference in (False, True):
        with torch.inference_mode(is_inference):
            found.append(repr(_dispatch_keys(torch.empty(0, device=device))))
    return tuple(found)


def is_plain(tensor: Any) -> bool:
    if type(tensor) not in PLAIN_TYPES or tensor.device.type not in DEVICES:
        return False
    return repr(_dispatch_keys(tensor)) in plain_keys(tensor.device.type)


def begin(operator: Operator, arguments: tuple[Any, ...], count: int, known: Known) -> Any:
    """Make the first call for a layout, remember it as `known`, and return the first `count`
    results. The tensors of `known` have the operator's order. NotImplemented if the dispatcher has
    to make the call."""
    if NATIVE is None or NATIVE.is_watched():
        return NotImplemented
    call = plan(operator, arguments, operator.operation.results[:count])
    return NotImplemented if call is None else make_first(call, known)


def can_be_direct(given: Given, fixed: Given, options: tuple[Any, ...]) -> bool:
    """False if the dispatcher has to make a call with the tensors `given`. The call does not write
    to `fixed`, some of them."""
    if any(map(_call.is_spaced, fixed)):  # they are copied first
        return False
    if len(set(map(id, given))) < len(given):  # guards refuse a tensor given twice
        return False
    fits = all(type(x) in OPTION_TYPES for x in options) and all(map(is_plain, given))
    return fits and is_plain_state() and has_guards()


def needs_gradients(given: Given) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in given)


def can_record() -> bool:
    """Hooks for saved tensors, which checkpointing sets, have to see the saved tensors."""
    return saved_hooks is not None and not saved_hooks(False)


def plan(
    operator: Operator, arguments: tuple[Any, ...], results: tuple[str, ...]
) -> DirectCall | None:
    """A new direct call for these arguments, with some of the operator's results; None if the
    dispatcher has to make it."""
    tensors, options, backend = operator.settle(*arguments)
    inputs = [at for at, tensor in enumerate(tensors) if tensor is not None]
    given = [tensors[at] for at in inputs]
    names = operator.operation.tensors
    fixed = [tensors[at] for at in inputs if names[at] not in operator.operation.mutated]
    if not can_be_direct(given, fixed, (*options, backend)):
        return None
    operation, record = operator.operation.with_results(results), None
    if needs_gradients(given):
        if operator.plan_record is None or not can_record():
            return None
        operation, record = operator.plan_record(arguments, len(results))
    prepared, _ = _call.find(operation, tensors, options, backend)
    call = DirectCall(inputs, given, prepared, len(results), record)
    return call if call.fits(given) else None


def bypass_dispatcher(operator: Operator, op: Any) -> None:
    """Let calls of `op`, the operator as PyTorch has it, be direct calls.

    Compiled graphs and other callers in Python call `op`, which calls its attribute `_op`. It is
    replaced before anything uses it, because the hash of `op` is the hash of `_op`."""
    if NATIVE is None:
        return
    dispatch = op._op

    def call(*arguments: Any, **named: Any) -> Any:
        return call_operator(operator, dispatch, arguments, named)

    op._op = NATIVE.bypass(dispatch, call, operator.count, operator.key_at)


def call_operator(
    operator: Operator,
    dispatch: Callable[..., Any],
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    """Call an operator through the dispatcher, and remember the call.

    Raises:
        As _call.call().
    """
    results = dispatch(*arguments, **named)
    if not named and can_repeat(operator, arguments):
        remember_operator(operator, dispatch, arguments)
    return results


def can_repeat(operator: Operator, arguments: tuple[Any, ...]) -> bool:
    """False if no direct call takes these arguments of an operator. plan() asks more."""
    given = [x for x in arguments[: operator.count] if x is not None]
    return (
        operator.is_one_call
        and not NATIVE.is_watched()
        and all(type(x) in PLAIN_TYPES for x in given)
        and not needs_gradients(given)
    )


def remember_operator(
    operator: Operator, dispatch: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """Remember a call of an operator, if a guard can tell it from others. The head has the shapes
    with the lengths, so that few guards are tried if many lengths alternate. No call is forgotten
    for a new one: making calls anew in turns would take longer than the dispatcher."""
    head = (dispatch, arguments[0].shape, arguments[operator.key_at].shape)
    if any(type(length) is not int for shape in head[1:] for length in shape):
        return  # symbols, which no key has
    known = (head, arguments, operator.count)
    if len(_call.memory.direct.get(NATIVE.make_key(*known), ())) < LAYOUTS_MAX:
        call = plan(operator, arguments, operator.operation.results)
        if call is not None:
            remember(known, call)


def address(words: _call.Words, at: int) -> int:
    return ctypes.addressof(words) + 8 * at


def step_of(prepared: _call.Prepared) -> tuple[Any, ...]:
    """The C call of a Prepared, as Call takes it."""
    on_device = prepared.index >= 0
    return (
        ctypes.cast(prepared.function, ctypes.c_void_p).value,
        ctypes.addressof(prepared.args),
        functools.partial(_call.check, operation=prepared.operation),
        address(prepared.args_words, prepared.stream_at) if on_device else 0,
        ctypes.addressof(prepared.trusted) if on_device else 0,
    )


def make_native(call: DirectCall, count: int, sources: Sources) -> Any:
    """The Call of _native that makes a call as Prepared.run() does and returns the first `count`
    results. `sources` says where it finds the address of each input of its own C call."""
    prepared, record = call.prepared, call.record
    inputs = len(call.inputs)
    targets = [(address(*word), *source) for word, source in zip(prepared.inputs, sources)]
    outputs = []
    for number, (shape, stride, dtype, own) in enumerate(prepared.outputs, inputs):
        targets += [(address(words, at), number, offset) for words, at, offset in own]
        outputs.append(((shape, stride, dtype), number - inputs in prepared.zeroed))
    if prepared.allocates_workspace:
        word = address(prepared.args_words, prepared.workspace_at)
        targets.append((word, inputs + len(outputs), 0))
        outputs.append((((prepared.workspace_size,), (1,), torch.uint8), False))
    for link in (*call.before, *call.after):
        assert not link.prepared.allocates_workspace
        pairs = zip(link.prepared.inputs, link.inputs)
        targets += [(address(*word), number, 0) for word, number in pairs]
        for number, (shape, stride, dtype, own) in zip(link.outputs, link.prepared.outputs):
            targets += [(address(words, at), number, 0) for words, at, _ in own]
            if link in call.before:
                outputs.append(((shape, stride, dtype), False))
    index = prepared.index
    on_device = (index, device_function(), stream_function())
    made = [link.prepared for link in call.before]
    made += [prepared, *(link.prepared for link in call.after)]
    return NATIVE.Call(
        made,
        tuple(map(step_of, made)),
        call.guard,
        None if record is None else record.apply,
        allocators(index),
        on_device if index >= 0 else (None, None, None),
        (torch.Tensor.data_ptr, DATA_PTR, *PLAIN_TYPES),
        tuple(zip(call.inputs, call.alignments)),
        tuple(outputs),
        tuple(targets),
        count,
        () if record is None else tuple(record.kept),
    )


def call_backward(
    call: DirectCall, dout: torch.Tensor, dlse: MaybeTensor, kept: _call.Outputs
) -> _call.Outputs:
    """The present results of a recorded call's backward operator, from the gradients of out and lse
    and the `kept` tensors."""
    record = call.record
    assert record is not None
    given = (dout, *kept) if dlse is None else (dout, dlse, *kept)
    known = (call, given, len(given))
    is_eager = not torch.compiler.is_compiling()
    if is_eager:
        results = repeat(*known)
        if results is not NotImplemented:
            return results if len(record.results) > 1 else (results,)
    tensors = [
        call.prepared.unpack(at, kept[-1])
        if isinstance(at, str)
        else at
        if at is None
        else kept[at]
        for at in record.sources
    ]
    arguments = (*(dout, dlse)[: record.taken], *tensors, *record.options)
    if is_eager and not NATIVE.is_watched():
        results = begin_backward(call, given, arguments, len(kept))
        if results is not NotImplemented:
            return results if len(record.results) > 1 else (results,)
    found = record.backward.dispatch(*arguments)
    results = tuple(found[at] for at in record.results)
    return results if record.rotation is None else record.rotation.undo(results, kept[0])


def begin_backward(
    call: DirectCall, given: _call.Outputs, arguments: tuple[Any, ...], kept: int
) -> Any:
    """begin() for the backward operator of a recorded call. The remembered call takes the tensors
    that call_backward() gets; the last `kept` of them were saved by forward."""
    record = call.record
    assert record is not None
    names = tuple(record.backward.operation.results[at] for at in record.results)
    planned = plan(record.backward, arguments, names)
    if planned is None:
        return NotImplemented
    count = len(given)
    sources = [(at, 0) for at in range(count - kept)]  # dout and dlse
    for at in record.sources:
        if isinstance(at, str):
            sources.append((count - 1, call.prepared.bundled[at][0]))
        elif at is not None:
            sources.append((count - kept + at, 0))
    after: Sequence[Link] = ()
    if record.rotation is not None:
        table = count - kept
        after = record.rotation.plan_undo(planned.prepared, given[table], table, count)
    inputs, own = [*range(count)], planned.prepared
    again = DirectCall(inputs, [*given], own, len(names), None, sources, after=after)
    return make_first(again, (call, given, count))


def make_first(call: DirectCall, known: Known) -> Any:
    remember(known, call)
    return repeat(*known)


def remember(known: Known, call: DirectCall) -> None:
    """Remember a call, in front of older ones."""
    key = NATIVE.make_key(*known)
    if key is None:
        return
    calls = _call.memory.direct
    if len(calls) >= _call.LAYOUTS_MAX:
        calls.clear()
    same = calls.setdefault(key, [])
    same.insert(0, call)
    del same[LAYOUTS_MAX:]
