"""Sequences of caches as bytes: fdma_cache_save() and fdma_cache_restore() of fdma.h.

The C library saves caches on the CPU. A sequence on another device is copied to the host.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from . import _arguments, _library, _types
from ._call import view

if TYPE_CHECKING:
    from .streams import KeyCache


def struct_of(cache: KeyCache) -> _library.Struct:
    """A cache on the CPU as the C library sees it."""
    names = ("k", "v", "bias", "score", "position", "seen")
    views = {
        name: view(f"cache.{field}", x) for name, field, x in zip(names, cache._fields, cache[:6])
    }
    made = _library.HEADER.structs["fdma_cache"]()
    for name in ("k", "v", "bias"):
        setattr(made, name, views[name])
    for name in ("score", "position", "seen"):
        setattr(made.table, name, views[name])
    made.sequences, made.kv_heads, _ = cache.score.shape
    made.head_dim, made.dtype = cache.key.shape[3], made.k.dtype
    made.window, made.recent, made.sinks = cache.window, cache.recent, cache.sinks
    if cache.page_table is not None:
        made.page_table = view("cache.page_table", cache.page_table)
    return made


def check_sequence(cache: KeyCache, sequence: int) -> None:
    count = cache.seen.shape[0]
    if not 0 <= _arguments.check_int("sequence", sequence) < count:
        raise ValueError(f"sequence: is {sequence}, want 0 to {count - 1}")
    if cache.page_table is not None and cache.seen.device.type != "cpu":
        raise NotImplementedError(
            f"cache.page_table: is on {cache.seen.device}, want a cache without one, or on the CPU"
        )


def check(status: int) -> None:
    """_library.check(), with Python's names in the message."""
    try:
        _library.check(status)
    except (ValueError, NotImplementedError) as error:
        message = str(error).replace("cache.table.", "cache.").replace("fdma_cache_save", "save")
        raise type(error)(message) from None


def state_bytes(cache: KeyCache, sequence: int) -> int:
    """The bytes that a sequence of a cache on the CPU takes now."""
    size = ctypes.c_size_t()
    ask = _library.library.fdma_cache_state_bytes
    check(ask(ctypes.byref(struct_of(cache)), sequence, ctypes.byref(size)))
    return size.value


def save(cache: KeyCache, sequence: int) -> bytes:
    """As KeyCache.save()."""
    check_sequence(cache, sequence)
    if cache.seen.device.type != "cpu":
        rows: Any = (x[sequence : sequence + 1].cpu() for x in cache[:6])
        cache, sequence = cache._replace(**dict(zip(cache._fields, rows))), 0
    state = bytearray(state_bytes(cache, sequence))
    memory = (ctypes.c_char * len(state)).from_buffer(state)
    save = _library.library.fdma_cache_save
    check(save(ctypes.byref(struct_of(cache)), sequence, memory, len(state)))
    del memory
    return bytes(state)


def restore(cache: KeyCache, sequence: int, state: bytes | bytearray | memoryview) -> None:
    """As KeyCache.restore()."""
    check_sequence(cache, sequence)
    own = to_bytes(state)
    if cache.page_table is not None or cache.seen.device.type == "cpu":
        restore = _library.library.fdma_cache_restore
        check(restore(ctypes.byref(struct_of(cache)), sequence, own, len(own)))
        return
    put(cache, sequence, on_host(cache, own))


def restore_all(
    caches: list[tuple[KeyCache, list[int]]], state: bytes | bytearray | memoryview
) -> None:
    """Restore sequences of caches without pages from their states, one behind the other, once all
    have passed the checks.

    Raises:
        ValueError: also if bytes are left.
    """
    rest = to_bytes(state)
    found: list[tuple[KeyCache, int, KeyCache]] = []
    layers = sum(len(sequences) for _, sequences in caches)
    for cache, sequences in caches:
        for sequence in sequences:
            if found and not rest:
                raise ValueError(f"state: has {len(found)} layers, want {layers}")
            host = on_host(cache, rest)
            found.append((cache, sequence, host))
            rest = rest[state_bytes(host, 0) :]
    if rest:
        raise ValueError(
            f"state: has {len(rest)} bytes more than {layers} layers, want a state of as many"
        )
    for each in found:
        put(*each)


def to_bytes(state: Any) -> bytes:
    if not isinstance(state, (bytes, bytearray, memoryview)):
        raise _types.refusal("state", state, "bytes")
    return bytes(state)


def on_host(cache: KeyCache, state: bytes) -> KeyCache:
    """A cache of one sequence on the CPU that has this state."""
    rows: Any = [torch.empty_like(x[:1], device="cpu") for x in cache[:6]]
    host = cache._replace(**dict(zip(cache._fields, rows)))
    restore(host, 0, state)
    return host


def put(cache: KeyCache, sequence: int, host: KeyCache) -> None:
    for to, row in zip(cache[:6], host[:6]):
        to[sequence].copy_(row[0])
