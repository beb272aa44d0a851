"""The peers of a case of the benchmark `model_step`: the fastest way of each in a short probe, the
reasons of those that do not run, and the rows."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple, Protocol, TypeVar

import torch
from benchmarking import (
    Disagreement,
    Rounds,
    Row,
    alternate,
    quantiles,
    reason_of,
    summary,
    time_pass,
)
from model_step_layers import FLASH_ATTN

PROBE = Rounds(3, 7, 0.3)
NO_MEMORY = "out of memory"
Reasons = dict[str, str]  # by name, why something does not run


class Named(Protocol):
    @property
    def name(self) -> str: ...


Option = TypeVar("Option", bound=Named)
Made = TypeVar("Made")


def tried(make: Callable[[], Made], name: str, failed: Reasons) -> Made | None:
    """Call `make`. If it raises any error, add the reason to `failed` and return None.

    Raises:
        Disagreement: outputs that are wrong, unless they are of a package that is optional.
    """
    try:
        return make()
    except Disagreement:
        if name not in FLASH_ATTN:  # only another package may be wrong
            raise
        failed[name] = "its outputs are wrong"
    except Exception as error:
        is_memory = isinstance(error, torch.cuda.OutOfMemoryError)
        failed[name] = NO_MEMORY if is_memory else reason_of(error)
    return None


def words_of(failed: Reasons) -> str:
    return ", ".join(f"{name}: {reason}" for name, reason in failed.items())


def release(device: str) -> None:
    """Free the memory of what is no longer used."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def by_speed(
    options: Sequence[Option],
    make_call: Callable[[Option], Callable[[], Any]],
    device: str,
    failed: Reasons,
) -> list[Option]:
    """The options whose calls run, the fastest first."""

    def make_timer(option: Option) -> Callable[[], float]:
        timer = functools.partial(time_pass, make_call(option), device)
        timer()
        return timer

    found = {
        one.name: tried(functools.partial(make_timer, one), one.name, failed) for one in options
    }
    timers = {name: timer for name, timer in found.items() if timer is not None}
    times = alternate(timers, PROBE, warm_up=1)
    running = [one for one in options if one.name in times]
    return sorted(running, key=lambda one: quantiles(times[one.name])[1])


def fastest(
    options: Sequence[Option], make_call: Callable[[Option], Callable[[], Any]], device: str
) -> Option:
    """Raises RuntimeError if none runs."""
    failed: Reasons = {}
    running = by_speed(options, make_call, device, failed)
    if not running:
        raise RuntimeError(words_of(failed))
    return running[0]


def first_that_runs(
    options: Sequence[Option], make: Callable[[Option], Made], device: str, failed: Reasons
) -> Made | None:
    """Returns the product of the first option that raises no error. If memory is short for one, no
    other is tried."""
    for option in options:
        release(device)
        made = tried(functools.partial(make, option), option.name, failed)
        if made is not None or failed[option.name] == NO_MEMORY:
            return made
    return None


def against(dense: list[float], own: list[float]) -> Row:
    """How many times as fast as dense a peer is: the median of the rounds, and the spread."""
    low, median, high = quantiles([a / b for a, b in zip(dense, own)])
    return {"times_dense": median, "times_spread": (high - low) / median}


class Peer(NamedTuple):
    variants: Sequence[Any]  # the fastest first; each has a name
    failed: Reasons  # the variants that were tried and do not run


Timer = Callable[[], float]


def measure_peers(
    head: Row,
    find: Callable[[], dict[str, Peer]],
    make: Callable[[str, Any], tuple[Timer, Row]],
    device: str,
    rounds: Rounds,
    tokens: int,
) -> Iterator[Row]:
    """Time the first variant that runs of each peer of find(), in alternation. `make` takes the
    name of a peer and a variant, and returns a timer and fields of the row. A peer without a time
    has the reason in its row. `tokens` is the number of tokens of a step."""
    failed: Reasons = {}
    peers = tried(find, "probe", failed) or {"all": Peer([], failed)}
    rows: dict[str, Row] = {}
    timers: dict[str, Timer] = {}
    for name, (variants, reasons) in peers.items():
        made = first_that_runs(variants, functools.partial(make, name), device, reasons)
        rows[name] = {**head, "peer": name}
        if made is not None:
            timers[name], found = made
            rows[name].update(found)
        if reasons:
            rows[name]["not_run" if made is None else "without"] = words_of(reasons)
    times = tried(lambda: alternate(timers, rounds), "in the rounds", failed) or {}
    for name, row in rows.items():
        if name in times:
            row.update(summary(times[name]), rounds=len(times[name]))
            row.update(tokens_per_second=1e3 * tokens / row["ms"])
            row.update(against(times["dense"], times[name]) if "dense" in times else {})
        elif name in timers:
            row.update(not_run=words_of(failed))
        yield row
