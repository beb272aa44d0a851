"""Selection is exact: every kernel gives the same bits as brute force."""

from __future__ import annotations

import math
from typing import Callable

import evaluate
import flash_dmattn
import pytest
import torch
from cases import kernels_of
from evaluate import assert_same

KERNELS = kernels_of("select")
KV_LEN = 97
# kv_len and window
SIZES = [(KV_LEN, window) for window in (1, 2, 13, 64, KV_LEN - 1, KV_LEN, 1000)]
SIZES += [(kv_len, window) for kv_len in (0, 1, 2, 3, 8, 17, 40) for window in (1, 2, 7, 17, 45)]


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


def make_padding(name: str) -> torch.Tensor | None:
    keys = torch.arange(KV_LEN)
    masks = {
        "none": None,
        "left": torch.stack([keys >= 20, keys >= 0]),
        "scattered": torch.stack([keys % 3 != 1, keys % 5 != 0]),
        "all": torch.stack([keys < 0, keys >= KV_LEN - 5]),
    }
    return masks[name]


@pytest.mark.parametrize("scope", ["causal", "global"])
@pytest.mark.parametrize("padding", ["none", "left", "scattered", "all"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_equals_brute_force_on_every_kernel(pattern: str, padding: str, scope: str) -> None:
    for kv_len, window in SIZES:
        score, key_valid = make_scores(pattern)[..., :kv_len], make_padding(padding)
        key_valid = None if key_valid is None else key_valid[:, :kv_len]
        expected = evaluate.selection(score, window, scope, key_valid)
        for name in KERNELS:
            *found, seen_window, seen_scope = flash_dmattn.select(
                score, window, scope=scope, key_valid=key_valid, backend=name
            )
            assert_same(found, expected)
            assert (seen_window, seen_scope) == (window, scope)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("window", [1, 100, 1024])
def test_kernels_agree_on_long_sequences(pattern: str, window: int) -> None:
    score = make_scores(pattern).repeat(1, 1, 33)  # kv_len 3201, longer than any block
    found = [flash_dmattn.select(score, window, backend=name)[:2] for name in KERNELS]
    assert KERNELS[-1] == "reference" and len(found) > 1
    for one in found[:-1]:
        assert_same(one, found[-1])


def test_strided_scores_and_bytes_as_key_valid() -> None:
    score = make_scores("random")
    wide = torch.zeros(2, KV_LEN, 2).transpose(1, 2)  # the last axis is strided: copied
    wide.copy_(score)
    key_valid = make_padding("scattered")
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
            results.append(flash_dmattn.select(score, 50)[:2])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert_same(other, results[0])
