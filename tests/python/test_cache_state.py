"""A sequence of a cache goes on in another process from the bytes of save(), and bytes that were
changed are refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_dmattn import (
    DynamicMaskAttention,
    DynamicMaskCache,
    KeyCache,
    LayerCaches,
    cache_state,
    decode,
)
from programs import output_of, python

HEADS, HEAD_DIM, WINDOW, RECENT = 2, 16, 6, 3


def new_cache(sequences: int, dtype: torch.dtype = torch.bfloat16) -> KeyCache:
    rows = WINDOW + RECENT
    keys = [torch.zeros(sequences, rows, HEADS, HEAD_DIM, dtype=dtype) for _ in range(2)]
    numbers = [torch.zeros(sequences, HEADS, rows) for _ in range(2)]
    position = torch.full((sequences, HEADS, rows), -1, dtype=torch.int32)
    seen = torch.zeros(sequences, dtype=torch.int32)
    return KeyCache(*keys, *numbers, position, seen, WINDOW, RECENT)


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
    cache.restore(0, Path(path).read_bytes())
    outs = torch.cat([step(cache, 0, number) for number in range(30, 50)])
    print(outs.view(torch.int16).tolist())


def test_another_process_goes_on(tmp_path: Path) -> None:
    cache, path = new_cache(3), tmp_path / "state"
    for number in range(30):
        step(cache, 2, number)
    path.write_bytes(cache.save(2))
    here = torch.cat([step(cache, 2, number) for number in range(30, 50)])
    code = f"import test_cache_state; test_cache_state.go_on({str(path)!r})"
    there = output_of(python("-c", code, env={"PYTHONHASHSEED": "0"}, cwd=Path(__file__).parent))
    assert there.strip() == str(here.view(torch.int16).tolist())


def test_changed_bytes_are_refused() -> None:
    cache, other = new_cache(1), new_cache(1)
    for number in range(12):
        step(cache, 0, number)
    state, chance = cache.save(0), random.Random(5)
    for _ in range(300):
        changed = bytearray(state)
        changed[chance.randrange(len(state))] ^= chance.randrange(1, 256)
        with pytest.raises((ValueError, NotImplementedError), match="^state: "):
            other.restore(0, bytes(changed))
        with pytest.raises(ValueError, match="^state: "):
            other.restore(0, state[: chance.randrange(len(state))])
    assert other.seen.item() == 0 and (other.position == -1).all()
    other.restore(0, state)
    assert other.save(0) == state


def test_another_dtype_is_refused() -> None:
    state = new_cache(1).save(0)
    with pytest.raises(ValueError, match="state: its dtype is bfloat16, want the cache's, float32"):
        new_cache(1, torch.float32).restore(0, state)


def test_wrong_arguments() -> None:
    cache = new_cache(2)
    state = cache.save(0)
    for wrong in (-1, 2):
        with pytest.raises(ValueError, match=f"sequence: is {wrong}, want 0 to 1"):
            cache.save(wrong)
        with pytest.raises(ValueError, match=f"sequence: is {wrong}, want 0 to 1"):
            cache.restore(wrong, state)
    with pytest.raises(TypeError, match="sequence: is 0.0, a float, want an int"):
        cache.save(0.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="state: is 'state', a str, want bytes"):
        cache.restore(0, "state")  # type: ignore[arg-type]
    cache.position[1, 0, 0] = 3
    with pytest.raises(ValueError, match="^cache.position: "):
        cache.save(1)


@pytest.mark.parametrize("name", KeyCache._fields)
def test_wrong_fields_are_named(name: str) -> None:
    values: list[Any] = ["a", 1.5, torch.zeros(1, 1, 1, 1, 1), None, 2**64 + 1, -(2**64), 10**5000]
    for value in values:
        if name == "page_table" and value is None:
            continue
        cache = new_cache(1)._replace(**{name: value})
        with pytest.raises((TypeError, ValueError), match=f"^cache.{name}: (is|rank is) ") as found:
            cache.save(0)
        with pytest.raises(found.type) as again:
            cache.restore(0, b"")
        assert str(again.value) == str(found.value)


def test_fields_that_contradict_each_other() -> None:
    cache = new_cache(2)
    with pytest.raises(ValueError, match="cache.seen: axis 0 has 1 elements?, cache.key has 2"):
        cache._replace(seen=cache.seen[:1]).save(0)
    with pytest.raises(ValueError, match="cache.score: is on meta, want cpu, where cache.key is"):
        cache._replace(score=cache.score.to("meta")).save(0)


def test_pages_and_views() -> None:
    """A sequence with pages, and one whose rows stand far from each other."""
    cache, spaced = new_cache(2), new_cache(8)
    wide = KeyCache(*(x[::3] for x in spaced[:5]), spaced.seen[:3], WINDOW, RECENT)
    pool = [torch.zeros(6, 4, HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2)]
    table = torch.tensor([[0, 1, 2], [4, 3, 5]], dtype=torch.int32)
    paged = new_cache(2)._replace(key=pool[0], value=pool[1], page_table=table)
    for number in range(8):
        step(cache, 1, number)
    for other in (wide, paged):
        other.restore(1, bytearray(cache.save(1)))
        assert torch.equal(step(cache, 1, 99), step(other, 1, 99))
        assert other.save(1) == cache.save(1)


# ---- all layers of a model ----


def make_layers(windows: tuple[int, ...]) -> list[DynamicMaskAttention]:
    torch.manual_seed(2)
    return [DynamicMaskAttention(32, 2, 1, window, recent=3) for window in windows]


def pass_tokens(
    layers: list[DynamicMaskAttention], cache: DynamicMaskCache | LayerCaches, x: torch.Tensor
) -> torch.Tensor:
    with torch.no_grad():
        for number, layer in enumerate(layers):
            x = x + layer(x, cache=cache, layer=number)
    return x


@pytest.mark.parametrize("windows", [(5, 5, 5), (5, 9, 5)])
@pytest.mark.parametrize("static", [False, True])
def test_layers_go_on(windows: tuple[int, ...], static: bool) -> None:
    """Two sequences change places, in a cache where others have passed."""
    layers = make_layers(windows)
    one, other = (LayerCaches(layers, 2, static=static) for _ in range(2))
    if len({*windows}) == 1:
        one, other = one.caches[0], other.caches[0]  # type: ignore[assignment]
    prompt, new = torch.randn(2, 70, 32), torch.randn(2, 1, 32)
    pass_tokens(layers, one, prompt)
    pass_tokens(layers, other, torch.randn(2, 9, 32))
    other.drop(0)
    for b in range(2):
        other.restore(b, one.save(1 - b))
    assert int(other.get_seq_length()) == 70
    found = pass_tokens(layers, other, new.flip(0)).flip(0)
    assert torch.equal(found, pass_tokens(layers, one, new))
    long = torch.randn(2, 80, 32)
    found = pass_tokens(layers, other, long.flip(0)).flip(0)
    assert torch.equal(found, pass_tokens(layers, one, long))


def test_a_state_of_other_layers_changes_nothing() -> None:
    layers = make_layers((5, 9, 5))
    cache = LayerCaches(layers, 2)
    pass_tokens(layers, cache, torch.randn(2, 20, 32))
    state, before = cache.save(0), cache.save(1)
    first = cache.caches[0].save(0)
    of_order = LayerCaches(make_layers((5, 5, 9)), 2)
    a_layer, a_row = 24 + 16, 32 + 3 * 16  # of the state of all layers, and the first one's
    size = len(cache.caches[0].keys.save(0))
    one, third = state[a_row : a_row + size], state[-size:]
    assert len(one) == len(third) and one != third
    wrong = {
        b"": "state: has 0 bytes, want a state of all layers, of at least 32",
        cache.caches[0].keys.save(0): "state: does not begin as a state of all layers, want bytes",
        first: "state: has 2 layers, want 3",
        of_order.save(0): "state: its window is 5, want the cache's, 9",
        state + b"more": f"state: has {len(state) + 4} bytes, want {len(state)}",
        state[:-8]: f"state: is truncated: has {len(state) - 8} bytes, want {len(state)}",
        state[:a_row] + third + state[a_row + size : -size] + one: "state: is damaged: its check",
        state[:a_row] + third + state[a_row + size :]: "state: is damaged: its checksum is",
        state[:a_layer] + b"\0" + state[a_layer + 1 :]: "state: is damaged: its checksum is",
    }
    for given, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            cache.restore(1, given)
        assert cache.save(1) == before
    with pytest.raises(NotImplementedError, match="state: its version is 3, supported: 1"):
        cache.restore(1, state[:8] + b"\3" + state[9:])
    with pytest.raises(ValueError, match="b: is 2, want 0 to 1"):
        cache.save(2)
    with torch.no_grad():
        layers[0](torch.randn(2, 1, 32), cache=cache.caches[0], layer=0, draft=True)
    with pytest.raises(ValueError, match="b: there are drafts"):
        cache.caches[0].save(0)


def test_a_state_of_another_kind_is_refused() -> None:
    """Rows are as wide for each head_dim from 9 to 16."""
    sizes: dict[str, Any] = {"layers": 2, "batch": 1, "kv_heads": 2, "window": 4}
    state = DynamicMaskCache(head_dim=16, **sizes).save(0)
    for head_dim in (14, 15):
        with pytest.raises(ValueError, match=f"its head_dim is 16, want the cache's, {head_dim}"):
            DynamicMaskCache(head_dim=head_dim, **sizes).restore(0, state)
    for form in ("linear", "none"):
        with pytest.raises(ValueError, match=f"its bias_form is 'exp', want the cache's, '{form}'"):
            DynamicMaskCache(head_dim=16, bias_form=form, **sizes).restore(0, state)


def test_each_layer_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, read, restore = DynamicMaskCache(9, 1, 2, 8, 4), [], cache_state.restore
    state = cache.save(0)

    def count(cache: KeyCache, sequence: int, state: bytes) -> None:
        read.append(len(state))
        restore(cache, sequence, state)

    monkeypatch.setattr(cache_state, "restore", count)
    cache.restore(0, state)
    assert len(read) == 9 and sum(read) < len(state)


def test_caches_of_inference_mode() -> None:
    """Every call that writes to one may be made outside of it."""
    layers = make_layers((5, 5))
    with torch.inference_mode():
        cache = LayerCaches(layers, 2).caches[0]
    plain = LayerCaches(layers, 2).caches[0]
    prompt, count = torch.randn(2, 70, 32), torch.tensor([70, 66], dtype=torch.int32)
    with torch.no_grad():
        for one in (cache, plain):
            for number, layer in enumerate(layers):
                layer(prompt, cache=one, layer=number, n_tokens=count)
    assert cache.save(1) == plain.save(1)
    cache.restore(0, plain.save(1))
    assert cache.save(0) == plain.save(1)
    cache.drop(0)
    cache.reset()
    assert (cache.keys.seen == 0).all() and (cache.keys.position == -1).all()
