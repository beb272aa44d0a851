"""A sequence of a cache goes on in another process from the bytes of fdma_cache_save(), and bytes
that were changed are refused."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import pytest
import torch
from flash_dmattn import KeyCache, _library, decode
from flash_dmattn._call import view
from programs import output_of, python

HEADS, HEAD_DIM, WINDOW, RECENT = 2, 16, 6, 3
LIBRARY = _library.library


def new_cache(sequences: int, dtype: torch.dtype = torch.bfloat16) -> KeyCache:
    rows = WINDOW + RECENT
    keys = [torch.zeros(sequences, rows, HEADS, HEAD_DIM, dtype=dtype) for _ in range(2)]
    numbers = [torch.zeros(sequences, HEADS, rows) for _ in range(2)]
    position = torch.full((sequences, HEADS, rows), -1, dtype=torch.int32)
    seen = torch.zeros(sequences, dtype=torch.int32)
    return KeyCache(*keys, *numbers, position, seen, WINDOW, RECENT)


def struct_of(cache: KeyCache) -> ctypes.Structure:
    structs = _library.HEADER.structs
    key, value, bias, score, position, seen = (view("cache", one) for one in cache[:6])
    return structs["fdma_cache"](
        k=key,
        v=value,
        bias=bias,
        table=structs["fdma_table"](score=score, position=position, seen=seen),
        sequences=cache.key.shape[0],
        kv_heads=HEADS,
        head_dim=HEAD_DIM,
        window=cache.window,
        recent=cache.recent,
        sinks=cache.sinks,
        dtype=key.dtype,
    )


def save(cache: KeyCache, sequence: int) -> bytes:
    one, size = struct_of(cache), ctypes.c_size_t()
    _library.check(LIBRARY.fdma_cache_state_bytes(one, sequence, ctypes.byref(size)))
    state = ctypes.create_string_buffer(size.value)
    _library.check(LIBRARY.fdma_cache_save(one, sequence, state, size.value))
    return state.raw


def restore(cache: KeyCache, sequence: int, state: bytes) -> None:
    _library.check(LIBRARY.fdma_cache_restore(struct_of(cache), sequence, state, len(state)))


def step(cache: KeyCache, sequence: int, number: int) -> torch.Tensor:
    """Decodes token `number` of one stream in a sequence."""
    torch.manual_seed(number)
    query = torch.randn(1, 1, 2 * HEADS, HEAD_DIM).bfloat16()
    key, value = torch.randn(2, 1, 1, HEADS, HEAD_DIM).bfloat16()
    score, index = torch.randn(1, HEADS, 1), torch.tensor([sequence], dtype=torch.int32)
    return decode(query, key, value, cache, score=score, index=index)


def go_on(path: str) -> None:
    """Restores a sequence from a file, decodes 20 tokens and prints their sum's bits."""
    cache = new_cache(1)
    restore(cache, 0, Path(path).read_bytes())
    outs = torch.cat([step(cache, 0, number) for number in range(30, 50)])
    print(outs.view(torch.int16).tolist())


def test_another_process_goes_on(tmp_path: Path) -> None:
    cache, path = new_cache(3), tmp_path / "state"
    for number in range(30):
        step(cache, 2, number)
    path.write_bytes(save(cache, 2))
    here = torch.cat([step(cache, 2, number) for number in range(30, 50)])
    code = f"import test_cache_state; test_cache_state.go_on({str(path)!r})"
    there = output_of(python("-c", code, env={"PYTHONHASHSEED": "0"}, cwd=Path(__file__).parent))
    assert there.strip() == str(here.view(torch.int16).tolist())


def test_changed_bytes_are_refused() -> None:
    cache, other = new_cache(1), new_cache(1)
    for number in range(12):
        step(cache, 0, number)
    state, chance = save(cache, 0), random.Random(5)
    for _ in range(300):
        changed = bytearray(state)
        changed[chance.randrange(len(state))] ^= chance.randrange(1, 256)
        with pytest.raises((ValueError, NotImplementedError), match="^state: "):
            restore(other, 0, bytes(changed))
        with pytest.raises(ValueError, match="^state: "):
            restore(other, 0, state[: chance.randrange(len(state))])
    assert other.seen.item() == 0 and (other.position == -1).all()
    restore(other, 0, state)
    assert save(other, 0) == state


def test_another_dtype_is_refused() -> None:
    state = save(new_cache(1), 0)
    with pytest.raises(ValueError, match="state: its dtype is bfloat16, want the cache's, float32"):
        restore(new_cache(1, torch.float32), 0, state)
