"""Sequences of caches as bytes: fdma_cache_save() and fdma_cache_restore() of fdma.h.

The C library saves caches on the CPU. A sequence on another device is copied to the host. The
states of all layers of a model stand in one, with a checksum that depends on their order.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ContextManager, NamedTuple

import torch

from . import _arguments, _library, _types
from ._call import view

if TYPE_CHECKING:
    from .streams import KeyCache


class Place(NamedTuple):
    """A sequence of one layer of a model, and what its state does not say."""

    cache: KeyCache
    sequence: int
    head_dim: int  # of calls; rows have a multiple of 8
    bias_form: str


# A state of all layers begins with this, and with a LAYER for each; then come their states.
HEADER = struct.Struct("<8sIIQQ")  # magic, version, layers, bytes in all, CRC-32 of what follows
LAYER = struct.Struct("<IIQ")  # head_dim, bias_form, bytes of its state
MAGIC, VERSION = b"FDMAlays", 1
FORMS = {number: name for name, number in _library.BIAS_FORMS.items()}


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
    """Check the fields of a cache, as a call of an operator would, and the number of a sequence."""
    fields = {f"cache_{name}": x for name, x in zip(cache._fields, cache[:6])}
    for name in cache._fields[:6]:
        _types.check_tensor(f"cache.{name}", getattr(cache, name))
    if cache.page_table is not None:
        fields["cache_page_table"] = cache.page_table
    _arguments.check_sizes(fields, _arguments.bind_sizes(fields))
    _arguments.check_same_device(fields)
    for name in ("window", "recent", "sinks"):
        _arguments.check_int(f"cache.{name}", getattr(cache, name))
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
        message = str(error).replace("fdma_cache_save", "save")
        for field, name in (("table.", ""), ("k:", "key:"), ("v:", "value:")):
            message = message.replace(f"cache.{field}", f"cache.{name}")
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
    put(cache, sequence, on_host(cache, memoryview(own)))


def save_all(places: list[Place]) -> bytes:
    """The sequences of the layers of a model, in the order of the layers."""
    states = [save(one.cache, one.sequence) for one in places]
    kinds = [(one.head_dim, _library.BIAS_FORMS[one.bias_form]) for one in places]
    body = b"".join([*(LAYER.pack(*kind, len(s)) for kind, s in zip(kinds, states)), *states])
    size = HEADER.size + len(body)
    return HEADER.pack(MAGIC, VERSION, len(places), size, zlib.crc32(body)) + body


def restore_all(places: list[Place], state: bytes | bytearray | memoryview) -> None:
    """Restore sequences of caches without pages from what save_all() has returned, once all have
    passed the checks.

    Raises:
        ValueError: also if bytes are left.
    """
    whole = memoryview(to_bytes(state))
    layers = check_whole(whole, len(places))
    at = HEADER.size + LAYER.size * len(places)
    found: list[KeyCache] = []
    for one, (head_dim, bias_form, size) in zip(places, layers):
        check_field("head_dim", head_dim, one.head_dim)
        check_field("bias_form", FORMS.get(bias_form, bias_form), one.bias_form)
        found.append(on_host(one.cache, whole[at : at + size]))
        at += size
    for one, host in zip(places, found):
        put(one.cache, one.sequence, host)


def check_whole(state: memoryview, layers: int) -> list[tuple[int, ...]]:
    """Check the bytes of a state of all layers; return the LAYER of each."""
    if len(state) < HEADER.size:
        least = f"want a state of all layers, of at least {HEADER.size}"
        raise ValueError(f"state: has {_types.counted(len(state), 'byte')}, {least}")
    magic, version, count, size, checksum = HEADER.unpack_from(state)
    if magic != MAGIC:
        raise ValueError("state: does not begin as a state of all layers, want bytes of save()")
    if version != VERSION:
        raise NotImplementedError(f"state: its version is {version}, supported: {VERSION}")
    if len(state) != size:
        found = "is truncated: has" if len(state) < size else "has"
        raise ValueError(f"state: {found} {_types.counted(len(state), 'byte')}, want {size}")
    own = zlib.crc32(state[HEADER.size :])
    if own != checksum:
        raise ValueError(f"state: is damaged: its checksum is {own:x}, want {checksum:x}")
    if count != layers:
        raise ValueError(f"state: has {_types.counted(count, 'layer')}, want {layers}")
    table = state[HEADER.size : HEADER.size + LAYER.size * layers]
    return [*LAYER.iter_unpack(table)]


def check_field(name: str, found: Any, want: Any) -> None:
    if found != want:
        raise ValueError(f"state: its {name} is {found!r}, want the cache's, {want!r}")


def to_bytes(state: Any) -> bytes:
    if not isinstance(state, (bytes, bytearray, memoryview)):
        raise _types.refusal("state", state, "bytes")
    return bytes(state)


def on_host(cache: KeyCache, state: memoryview) -> KeyCache:
    """A cache of one sequence on the CPU that has this state."""
    rows: Any = [torch.empty_like(x[:1], device="cpu") for x in cache[:6]]
    host = cache._replace(**dict(zip(cache._fields, rows)))
    restore(host, 0, bytes(state))
    return host


def writing_to(cache: KeyCache) -> ContextManager[Any]:
    """A context in which PyTorch writes to a cache, which may have been made in inference mode."""
    is_inference = not torch.compiler.is_compiling() and cache.seen.is_inference()
    return torch.inference_mode() if is_inference else nullcontext()


def put(cache: KeyCache, sequence: int, host: KeyCache) -> None:
    with writing_to(cache):
        for to, row in zip(cache[:6], host[:6]):
            to[sequence].copy_(row[0])
