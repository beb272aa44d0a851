"""Tuning: which kernels, tiles, splits and numbers of threads are fastest on this CPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Union

import torch

from . import _arguments, _call, _library, _types

PathLike = Union[str, "os.PathLike[str]"]


class TuningShape(NamedTuple):
    """The shape of the calls that tune() measures.

    Args:
        kv_len: keys of each sequence.
        head_dim: elements of a head, a multiple of 8 up to 256.
        q_heads: query heads.
        kv_heads: key and value heads; None for as many as query heads.
        q_len: queries of each sequence, 1 to decode; None for as many as keys.
        batch: sequences.
        window: keys that a query keeps; None for all keys, without a selection.
        causal: whether queries see no later keys.
        dtype: torch.float32, torch.float16 or torch.bfloat16.
        backward: whether the gradients of attention are measured too.

    Raises:
        TypeError: tune() refuses numbers that are not ints.
        ValueError: tune() refuses sizes that attention() refuses.

    Source: the classes of calls are described in fdma.h, "Tuning"

    Example:
        >>> from flash_dmattn import TuningShape
        >>> TuningShape(kv_len=4096, head_dim=128, q_heads=8, kv_heads=2, window=1024).q_len is None
        True
    """

    kv_len: int
    head_dim: int
    q_heads: int
    kv_heads: int | None = None
    q_len: int | None = None
    batch: int = 1
    window: int | None = None
    causal: bool = True
    dtype: torch.dtype = torch.bfloat16
    backward: bool = False


class TuningTrial(NamedTuple):
    """A measurement by tune() of one choice.

    Args:
        shape: the shape that was measured.
        operation: "forward" or "backward".
        kernel: the name of the kernel that ran.
        choice: such as "tile_rows=256"; "rules" for the library's own choice.
        seconds: of one call, the median.
        ratio: the time of a call divided by the time under the rules, measured in turn; the median.
        final: whether this is the last trial of its operation; calls follow its choice from then
            on.

    Raises:
        TypeError: a field is missing.

    Source: fdma.h, fdma_tune()

    Example:
        >>> from flash_dmattn import TuningShape, tune
        >>> trials = tune([TuningShape(kv_len=64, head_dim=16, q_heads=2)], seconds=0.001)
        >>> [(x.operation, x.final) for x in trials][-1]
        ('forward', True)
    """

    shape: TuningShape
    operation: str
    kernel: str
    choice: str
    seconds: float
    ratio: float
    final: bool


def _encode(name: str, path: PathLike) -> bytes:
    if not isinstance(path, (str, os.PathLike)):
        raise _types.refusal(name, path, "a path or None")
    return os.fsencode(path)


def _change_tuning(status: int) -> None:
    """Check the status of a call that may have changed the tuning, and ask for workspaces again."""
    _call.Memory.tunings += 1
    _library.check(status)


def _args_of(shape: TuningShape, seconds: float) -> _library.Struct:
    _types.check_call(TuningShape, shape._asdict())
    if shape.dtype not in _arguments.DTYPES:
        raise NotImplementedError(f"dtype: is {shape.dtype}, which no kernel supports")
    sizes = shape._asdict()
    sizes["kv_heads"] = shape.q_heads if shape.kv_heads is None else shape.kv_heads
    sizes["q_len"] = shape.kv_len if shape.q_len is None else shape.q_len
    sizes["window"] = shape.kv_len if shape.window is None else shape.window
    names = ("batch", "q_len", "kv_len", "q_heads", "kv_heads", "head_dim", "window")
    return _library.HEADER.structs["fdma_tune_args"](
        **{name: _arguments.check_int(name, sizes[name]) for name in names},
        dtype=_arguments.DTYPES[shape.dtype],
        causal=shape.causal,
        backward=shape.backward,
        threads=torch.get_num_threads(),
        seconds=seconds,
    )


def _measure(shape: TuningShape, seconds: float) -> list[TuningTrial]:
    trials: list[TuningTrial] = []

    def report(_: int | None, pointer: ctypes._Pointer[_library.Struct]) -> None:
        trial = pointer.contents
        words = (trial.operation.decode(), trial.kernel.decode(), trial.choice.decode())
        trials.append(TuningTrial(shape, *words, trial.seconds, trial.ratio, bool(trial.final)))

    args = _args_of(shape, seconds)
    args.report = _library.HEADER.types["fdma_tune_report"](report)
    _change_tuning(_library.library.fdma_tune(ctypes.byref(args)))
    return trials


def load_tuning(file: PathLike | None) -> None:
    """Replace the tuning of this process by the tuning in a file.

    Calls on the CPU then follow the tuning if it has an entry for their class, and the library's
    rules otherwise. A process whose environment variable FDMA_TUNING names a file reads it at its
    first call.

    Args:
        file: written by tune() on this machine; None for no tuning.

    Returns:
        None.

    Raises:
        TypeError: `file` is no path.
        FileNotFoundError: there is no such file.
        ValueError: the file cannot be read, is damaged, or is of another version of the library or
            of another CPU. The tuning stays as it was.

    Source: fdma.h, "Tuning"

    Example:
        >>> flash_dmattn.load_tuning(None)
    """
    path = None if file is None else _encode("file", file)
    if file is not None and not Path(os.fsdecode(file)).exists():
        raise FileNotFoundError(f"file: is {os.fsdecode(file)!r}, want a file that is there")
    _change_tuning(_library.library.fdma_tuning_load(path))


def tune(
    shapes: Iterable[TuningShape], file: PathLike | None = None, *, seconds: float = 3.0
) -> list[TuningTrial]:
    """Measure which choices are fastest for calls of these shapes on this CPU, and follow them.

    The library chooses kernels, tiles, splits and numbers of threads by rules that do not know the
    machine. Here each choice competes with the rules, on random tensors. If one takes at least 3 %
    less time, calls of this process follow it from then on; so do calls of similar shapes, as
    fdma.h describes. Calls with attn_mask, attn_bias or dropout, calls that name a `backend`, and
    calls on CUDA devices always follow the rules. Under another tuning results differ by rounding.

    At most torch.get_num_threads() threads are used. Nothing else should run meanwhile.

    Args:
        shapes: of the calls to measure, one after the other.
        file: where to keep the answer, for load_tuning() or FDMA_TUNING. If the file exists, its
            entries for other shapes stay in it, and it replaces the tuning of this process before
            anything is measured. None: the answer is not kept.
        seconds: how long to measure each operation of each shape, about; 0 for 3.

    Returns:
        All measurements, in their order. The last trial of an operation is the one with `final`.

    Raises:
        TypeError: a shape is no TuningShape, a size is no int, or `file` is no path.
        ValueError: a size is refused; the file cannot be read or written, or is of another version
            or CPU.
        NotImplementedError: no kernel takes calls of a shape.

    Source: the wisdom of FFTW, doi:10.1109/JPROC.2004.840301

    Example:
        >>> from flash_dmattn import TuningShape
        >>> shape = TuningShape(kv_len=64, head_dim=16, q_heads=2, window=16)
        >>> trials = flash_dmattn.tune([shape], seconds=0.001)
        >>> trials[-1].ratio <= 1
        True
        >>> flash_dmattn.load_tuning(None)
    """
    path = None if file is None else _encode("file", file)
    if file is not None and Path(file).exists():
        load_tuning(file)
    if not _types.is_number(seconds):
        raise _types.refusal("seconds", seconds, "a number")
    if not isinstance(shapes, Iterable) or isinstance(shapes, (str, TuningShape)):
        raise _types.refusal("shapes", shapes, "a list of TuningShape objects")
    trials: list[TuningTrial] = []
    for shape in shapes:
        if not isinstance(shape, TuningShape):
            raise TypeError(f"shapes: has {shape!r}, want TuningShape objects")
        trials += _measure(shape, seconds)
    if path is not None:
        _library.check(_library.library.fdma_tuning_save(path))
    return trials
