"""A cache in pages gives what one without gives, bit for bit."""

from __future__ import annotations

from typing import Any

import flash_dmattn
import pytest
import torch

SEQUENCES, KV_HEADS, Q_HEADS, HEAD_DIM = 3, 2, 4, 16
RULES = (9, 2, 1)  # window, recent and sinks
ROWS = RULES[0] + RULES[1]


def make_cache(dtype: torch.dtype = torch.float32) -> flash_dmattn.KeyCache:
    cache = flash_dmattn.DynamicMaskCache(
        1, SEQUENCES, KV_HEADS, HEAD_DIM, RULES[0], recent=RULES[1], sinks=RULES[2], dtype=dtype
    )
    return cache.keys


def make_paged(page_len: int, dtype: torch.dtype = torch.float32) -> flash_dmattn.KeyCache:
    """An empty cache, whose pools hold NaN and whose pages are missing."""
    columns = -(-ROWS // page_len)
    pools = (
        torch.full((SEQUENCES * columns + 1, page_len, KV_HEADS, HEAD_DIM), torch.nan, dtype=dtype)
        for _ in range(2)
    )
    table = torch.full((SEQUENCES, columns), -1, dtype=torch.int32)
    return flash_dmattn.KeyCache(*pools, *make_cache(dtype)[2:6], *RULES, page_table=table)


def make_tokens(count: int, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    heads = {"query": Q_HEADS, "key": KV_HEADS, "value": KV_HEADS}
    rows = {name: normal(SEQUENCES, count, n, HEAD_DIM).to(dtype) for name, n in heads.items()}
    return {**rows, "score": normal(SEQUENCES, KV_HEADS, count)}


@pytest.mark.parametrize("page_len", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_are_as_none(page_len: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(page_len)
    cache, paged = make_cache(dtype), make_paged(page_len, dtype)
    order = torch.randperm(paged.key.shape[0], generator=generator).int()[:-1]
    pages = order.view(SEQUENCES, -1)
    firsts = torch.arange(pages.shape[1]) * page_len  # the first row of each page
    for step in range(20):
        count = 1 + step % 4
        tokens = make_tokens(count, dtype, generator)
        commit = torch.randint(count + 1, (SEQUENCES,), generator=generator, dtype=torch.int32)
        filled = (cache.seen + commit).clamp(max=ROWS)
        paged.page_table.copy_(torch.where(firsts < filled[:, None], pages, -1))
        want = flash_dmattn.decode(**tokens, cache=cache, commit=commit, return_lse=True)
        found = flash_dmattn.decode(**tokens, cache=paged, commit=commit, return_lse=True)
        assert all(torch.equal(one, other) for one, other in zip(found, want))
        assert torch.equal(paged.position, cache.position) and torch.equal(paged.seen, cache.seen)
    assert cache.seen.min() > ROWS
    rows = paged.key[pages.long()].flatten(1, 2)[:, :ROWS]
    assert torch.equal(rows, cache.key)


def test_a_token_without_a_page_is_lost() -> None:
    generator = torch.Generator().manual_seed(0)
    paged = make_paged(4)
    paged.page_table[1:, 0] = torch.tensor([0, 1])
    flash_dmattn.decode(**make_tokens(2, torch.float32, generator), cache=paged)
    assert paged.seen.tolist() == [2, 2, 2]
    assert (paged.position >= 0).sum(-1).tolist() == [[0, 0], [2, 2], [2, 2]]
    assert paged.key[2:].isnan().all()


def refuse(error: type[Exception], message: str, **fields: Any) -> None:
    tokens = make_tokens(1, torch.float32, torch.Generator())
    with pytest.raises(error) as raised:
        flash_dmattn.decode(**tokens, cache=make_paged(4)._replace(**fields))
    assert str(raised.value).startswith(message)


def test_wrong_page_tables_are_refused() -> None:
    table = torch.zeros(SEQUENCES, 3, dtype=torch.int32)
    pool = torch.zeros(5, 4, KV_HEADS, HEAD_DIM)
    refuse(
        NotImplementedError,
        "cache.page_table: dtype is int64, supported: int32",
        page_table=table.long(),
    )
    refuse(ValueError, "cache.page_table: rank is 1, want 2", page_table=table[0])
    refuse(ValueError, "cache.page_table: axis 0 has 2 elements", page_table=table[:2])
    refuse(
        ValueError,
        "cache.page_table: axis 1 has 2 elements, want 3 or more pages of 4 rows",
        page_table=table[:, :2],
    )
    refuse(ValueError, "cache.value: axis 0 has 5 elements", value=pool)
    three = torch.zeros(9, 3, KV_HEADS, HEAD_DIM)
    message = "cache.key: axis 1 has 3 elements, want a power of 2"
    refuse(ValueError, message, key=three, value=three.clone())
