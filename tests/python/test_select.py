"""Selection is exact: every kernel gives the same bits as brute force."""

from __future__ import annotations

import math
from typing import Callable

import evaluate
import flash_dmattn
import pytest
import torch
from cases import kernels_of

KV_LEN = 97
WINDOWS = [1, 2, 13, 64, KV_LEN - 1, KV_LEN, 1000]


def usable_kernels() -> list[str]:
    """The kernels that can select on this machine's CPU."""
    return kernels_of("select")


def random_scores(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(KV_LEN, generator=generator)


def tied_scores(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 4, (KV_LEN,), generator=generator).float()


def some(values: list[float]) -> Callable[[torch.Generator], torch.Tensor]:
    """Random scores mixed with the given values."""

    def scores(generator: torch.Generator) -> torch.Tensor:
        normal = torch.randn(KV_LEN, generator=generator)
        pick = torch.randint(0, 2 * len(values), (KV_LEN,), generator=generator)
        chosen = torch.tensor(values + [0.0] * len(values))[pick]
        return torch.where(pick < len(values), chosen, normal)

    return scores


PATTERNS: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
    "random": random_scores,
    "tied": tied_scores,
    "equal": lambda _: torch.full((KV_LEN,), 0.25),
    "rising": lambda _: torch.arange(KV_LEN).float(),
    "falling": lambda _: -torch.arange(KV_LEN).float(),
    "sawtooth": lambda _: (torch.arange(KV_LEN) % 11).float(),
    "nan": some([math.nan]),
    "all nan": lambda _: torch.full((KV_LEN,), math.nan),
    "negative nan": some([math.nan, math.copysign(math.nan, -1.0), -math.inf]),
    "infinite": some([math.inf, -math.inf]),
    "zeros": some([0.0, -0.0]),
    "signed zeros": lambda _: torch.where(torch.arange(KV_LEN) % 3 == 0, -0.0, 0.0),
    "denormal": some([1e-45, -1e-45, 0.0, 1e-40, -1e-40]),
}


def make_scores(pattern: str) -> torch.Tensor:
    """[2, 2, KV_LEN]; the rows of random patterns differ."""
    generator = torch.Generator().manual_seed(sum(map(ord, pattern)))
    rows = [PATTERNS[pattern](generator) for _ in range(4)]
    return torch.stack(rows).reshape(2, 2, KV_LEN)


def make_padding(name: str) -> torch.Tensor | None:
    keys = torch.arange(KV_LEN)
    masks = {
        "none": None,
        "left": torch.stack([keys >= 20, keys >= 0]),
        "scattered": torch.stack([keys % 3 != 1, keys % 5 != 0]),
        "all": torch.stack([keys < 0, keys >= KV_LEN - 5]),
    }
    return masks[name]


def expected_expiry(kept: torch.Tensor, scope: str) -> torch.Tensor:
    """expiry as fdma.h defines it, from the keys that are kept at each position."""
    kv_len = kept.shape[-1]
    expiry = torch.empty(kept.shape[:2] + (kv_len,), dtype=torch.int32)
    for j in range(kv_len):
        life = kept[:, :, j:, j]  # [batch, kv_heads, positions from j on]
        first_out = torch.where(life.all(-1), kv_len, j + (~life).int().argmax(-1))
        if scope == "causal":
            after = torch.arange(j, kv_len) >= first_out[..., None]
            assert not (life & after).any(), "a key that was evicted is kept again"
        expiry[:, :, j] = first_out
    return expiry


def expected_slot(
    expiry: torch.Tensor, window: int, scope: str, key_valid: torch.Tensor | None
) -> torch.Tensor:
    """slot as fdma.h defines it: free slots in order, then that of the evicted key."""
    slot = torch.full_like(expiry, -1)
    batch, kv_heads, kv_len = expiry.shape
    for b in range(batch):
        valid = [True] * kv_len if key_valid is None else key_valid[b].bool().tolist()
        for g in range(kv_heads):
            ends = expiry[b, g].tolist()
            slots = slot[b, g]
            used = 0
            for j in (j for j in range(kv_len) if ends[j] > j):
                leaving = [r for r in range(j) if ends[r] == j and slots[r] >= 0]
                if scope == "global" or not leaving:
                    assert used < window and valid[j]
                    slots[j] = used
                    used += 1
                else:
                    assert len(leaving) == 1, "each arriving key evicts one"
                    slots[j] = slots[leaving[0]]
    return slot


@pytest.mark.parametrize("scope", ["causal", "global"])
@pytest.mark.parametrize("padding", ["none", "left", "scattered", "all"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_equals_brute_force_on_every_kernel(pattern: str, padding: str, scope: str) -> None:
    score = make_scores(pattern)
    key_valid = make_padding(padding)
    names = usable_kernels()
    assert names
    for window in WINDOWS:
        kept = evaluate.kept_keys(score, window, scope, key_valid).expand(-1, -1, KV_LEN, -1)
        expiry = expected_expiry(kept, scope)
        slot = expected_slot(expiry, window, scope, key_valid)
        for name in names:
            selection = flash_dmattn.select(
                score, window, scope=scope, key_valid=key_valid, backend=name
            )
            assert torch.equal(selection.expiry, expiry), (name, window)
            assert torch.equal(selection.slot, slot), (name, window)
            assert (selection.window, selection.scope) == (window, scope)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("window", [1, 100, 1024])
def test_kernels_agree_on_long_sequences(pattern: str, window: int) -> None:
    score = make_scores(pattern).repeat(1, 1, 33)  # kv_len 3201, longer than any block
    reference = flash_dmattn.select(score, window, backend="reference")
    names = [name for name in usable_kernels() if name != "reference"]
    assert names, "no kernel but the reference runs here"
    for name in names:
        selection = flash_dmattn.select(score, window, backend=name)
        assert torch.equal(selection.expiry, reference.expiry), name
        assert torch.equal(selection.slot, reference.slot), name


@pytest.mark.parametrize("pattern", ["random", "tied", "nan", "sawtooth"])
def test_live_keys_have_distinct_slots(pattern: str) -> None:
    window = 13
    expiry, slot, *_ = flash_dmattn.select(make_scores(pattern), window)
    keys = torch.arange(KV_LEN)
    for p in range(KV_LEN):
        live = (keys <= p) & (p < expiry)
        assert torch.equal(live.sum(-1), torch.full((2, 2), min(p + 1, window)))
        for row in range(4):
            slots = slot.flatten(0, 1)[row][live.flatten(0, 1)[row]]
            assert sorted(slots.tolist()) == list(range(min(p + 1, window)))


def test_strided_scores_and_bytes_as_key_valid() -> None:
    score = make_scores("random")
    wide = torch.zeros(2, KV_LEN, 2).transpose(1, 2)  # the last axis is strided: copied
    wide.copy_(score)
    key_valid = make_padding("scattered")
    expected = flash_dmattn.select(score, 7, key_valid=key_valid)
    assert wide.stride(-1) == 2
    strided = flash_dmattn.select(wide, 7, key_valid=key_valid.to(torch.uint8))
    assert torch.equal(strided.expiry, expected.expiry)
    assert torch.equal(strided.slot, expected.slot)


@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 2, 0)])
def test_nothing_to_select(shape: tuple[int, ...]) -> None:
    selection = flash_dmattn.select(torch.empty(shape), 3)
    assert selection.expiry.shape == selection.slot.shape == shape
    assert selection.expiry.dtype == selection.slot.dtype == torch.int32


def test_threads_change_nothing() -> None:
    score = torch.randn(3, 5, 1000, generator=torch.Generator().manual_seed(5))
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(flash_dmattn.select(score, 50))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert torch.equal(results[0].expiry, other.expiry)
        assert torch.equal(results[0].slot, other.slot)
