"""Selection is exact: every kernel gives the same bits as brute force."""

from __future__ import annotations

import itertools
import math
from typing import Any, Callable, Dict, Tuple

import evaluate
import flash_dmattn
import pytest
import torch
from cases import FULL, kernels_of
from evaluate import assert_same

KERNELS = kernels_of("select")
KV_LEN = 97
ALL_KEYS = (1 << 63) - 1  # FDMA_WINDOW_ALL


def some(values: list[float]) -> Callable[[torch.Generator], torch.Tensor]:
    """Random scores mixed with the given values."""

    def scores(generator: torch.Generator) -> torch.Tensor:
        normal = torch.randn(KV_LEN, generator=generator)
        pick = torch.randint(0, 2 * len(values), (KV_LEN,), generator=generator)
        chosen = torch.tensor(values + [0.0] * len(values))[pick]
        return torch.where(pick < len(values), chosen, normal)

    return scores


PATTERNS: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
    "random": lambda generator: torch.randn(KV_LEN, generator=generator),
    "tied": lambda generator: torch.randint(0, 4, (KV_LEN,), generator=generator).float(),
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


PADDINGS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "none": lambda _: None,
    "left": lambda keys: torch.stack([keys >= 20, keys >= 0]),
    "scattered": lambda keys: torch.stack([keys % 3 != 1, keys % 5 != 0]),
    "all": lambda keys: torch.stack([keys < 0, keys >= KV_LEN - 5]),
}
TABLE = [
    (scope, pattern, padding)
    for scope in ("causal", "global")
    for pattern in PATTERNS
    for padding in PADDINGS
]
Call = Tuple[int, int, Dict[str, Any]]  # kv_len, window and rules


def all_calls(scope: str) -> list[Call]:
    sizes = [(KV_LEN, window) for window in (1, 2, 13, 64, KV_LEN - 1, KV_LEN, 1000)]
    sizes += itertools.product((0, 1, 2, 3, 8, 17, 40), (1, 2, 7, 17, 45))
    calls: list[Call] = [(*size, {}) for size in sizes]
    windows = [(window, sinks) for window in (1, 2, 5) for sinks in range(window + 1)]
    windows.append((ALL_KEYS, 2))
    for kv_len in (1, 2, 5, 11, 23, 40):
        newest = [0, 1, 3, kv_len, kv_len + 7, ALL_KEYS] if scope == "causal" else [0]
        for (window, sinks), recent in itertools.product(windows, newest):
            calls.append((kv_len, window, {"recent": recent, "sinks": sinks}))
    if scope == "global":
        return calls
    rules = ((1, 0, 0), (7, 0, 2), (5, 4, 1), (ALL_KEYS, 3, 0), (2, 60, 2))
    gaps = itertools.product((1, 5, 23, 40), (1e-45, 0.5, 2.0), rules)
    for kv_len, gap, (window, recent, sinks) in gaps:
        calls.append((kv_len, window, {"recent": recent, "sinks": sinks, "gap": gap}))
    for window, recent, sinks in ((5, 0, 2), (1, 1, 0), (5, 3, 1), (2, 30, 2), (20, 20, 20)):
        calls.append((KV_LEN, window, {"recent": recent, "sinks": sinks}))
    return calls


def assert_slots(slot: torch.Tensor, kept: torch.Tensor) -> None:
    """The keys that a query keeps have the slots 0, 1, 2, ... without gaps, so that a table with a
    row for each slot holds them. kept is bool [batch, kv_heads, positions, kv_len]."""
    none = torch.iinfo(slot.dtype).max
    found = torch.where(kept, slot[:, :, None], none).sort(-1).values
    numbers = torch.arange(slot.shape[-1], dtype=slot.dtype)
    wanted = torch.where(numbers < kept.sum(-1, keepdim=True), numbers, none)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(("scope", "pattern", "padding"), TABLE)
def test_equals_brute_force_on_every_kernel(scope: str, pattern: str, padding: str) -> None:
    """Every call with some patterns of scores and some paddings; with all if FDMA_FULL is 1."""
    calls, step = all_calls(scope), 1 if FULL else {"causal": 52, "global": 26}[scope]
    for kv_len, window, rules in calls[TABLE.index((scope, pattern, padding)) % step :: step]:
        score = make_scores(pattern)[..., :kv_len]
        key_valid = PADDINGS[padding](torch.arange(KV_LEN))
        key_valid = None if key_valid is None else key_valid[:, :kv_len]
        expected = evaluate.selection(score, window, scope, key_valid, **rules)
        for name in KERNELS:
            found = flash_dmattn.select(
                score, window, scope=scope, key_valid=key_valid, backend=name, **rules
            )
            assert_same(found[:2], expected)
            numbers = {"recent": 0, "sinks": 0, "gap": None, **rules}
            assert found[2:] == (window, scope, *numbers.values())
        if scope == "causal" and "gap" not in rules:
            kept = evaluate.kept_keys(score, window, scope, key_valid, **rules)
            assert_slots(expected[1], kept)
            assert torch.equal(expected[1] >= 0, kept.any(2))


LONG_RULES = [(1, 0, 0), (100, 0, 0), (1024, 0, 0), (1, 1, 1), (100, 50, 4), (1024, 300, 0)]
LONG_RULES.append((7, 2000, 7))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_kernels_agree_on_long_sequences(pattern: str) -> None:
    score = make_scores(pattern).repeat(1, 1, 33)  # kv_len 3201, longer than any block
    first, step = (0, 1) if FULL else ([*PATTERNS].index(pattern) % 4, 4)
    for window, recent, sinks in LONG_RULES[first::step]:
        rules = {"recent": recent, "sinks": sinks}
        found = [flash_dmattn.select(score, window, backend=name, **rules)[:2] for name in KERNELS]
        assert KERNELS[-1] == "reference" and len(found) > 1
        for one in found[:-1]:
            assert_same(one, found[-1])


def test_strided_scores_and_bytes_as_key_valid() -> None:
    score = make_scores("random")
    wide = torch.zeros(2, KV_LEN, 2).transpose(1, 2)  # the last axis is strided: copied
    wide.copy_(score)
    key_valid = PADDINGS["scattered"](torch.arange(KV_LEN))
    expected = flash_dmattn.select(score, 7, key_valid=key_valid)
    assert wide.stride(-1) == 2
    strided = flash_dmattn.select(wide, 7, key_valid=key_valid.to(torch.uint8))
    assert_same(strided[:2], expected[:2])


def test_no_sequence() -> None:
    selection = flash_dmattn.select(torch.empty(0, 2, 5), 3)
    assert selection.expiry.shape == selection.slot.shape == (0, 2, 5)
    assert selection.expiry.dtype == selection.slot.dtype == torch.int32


def test_threads_change_nothing() -> None:
    score = torch.randn(3, 5, 1000, generator=torch.Generator().manual_seed(5))
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(flash_dmattn.select(score, 50, recent=20, sinks=3)[:2])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert_same(other, results[0])
