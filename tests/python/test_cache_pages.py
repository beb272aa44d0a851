"""A cache in pages gives the same bits as one without."""

from __future__ import annotations

from typing import Any

import flash_dmattn
import pytest
import torch
from cases import DEVICES, NARROW, on_device

SEQUENCES, KV_HEADS, Q_HEADS, HEAD_DIM = 3, 2, 4, 16
RULES = (9, 2, 1)  # window, recent and sinks
ROWS = RULES[0] + RULES[1]
WIDE = [("cpu", torch.float32), ("cpu", torch.bfloat16)]
TARGETS = WIDE + [pytest.param("cuda", dtype, marks=on_device) for dtype in NARROW]


def make_cache(dtype: torch.dtype = torch.float32, device: str = "cpu") -> flash_dmattn.KeyCache:
    rules = {"recent": RULES[1], "sinks": RULES[2], "dtype": dtype, "device": device}
    sizes = 1, SEQUENCES, KV_HEADS, HEAD_DIM, RULES[0]
    return flash_dmattn.DynamicMaskCache(*sizes, **rules).keys


def make_paged(
    page_len: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> flash_dmattn.KeyCache:
    """An empty cache, whose pools hold NaN and whose pages are missing."""
    columns = -(-ROWS // page_len)
    shape = SEQUENCES * columns + 1, page_len, KV_HEADS, HEAD_DIM
    pools = (torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2))
    table = torch.full((SEQUENCES, columns), -1, dtype=torch.int32, device=device)
    others = make_cache(dtype, device)[2:6]
    return flash_dmattn.KeyCache(*pools, *others, *RULES, page_table=table)


def make_tokens(
    count: int, dtype: torch.dtype, generator: torch.Generator, device: str = "cpu"
) -> dict[str, Any]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    heads = {"query": Q_HEADS, "key": KV_HEADS, "value": KV_HEADS}
    rows = {name: normal(SEQUENCES, count, n, HEAD_DIM).to(dtype) for name, n in heads.items()}
    return {**rows, "score": normal(SEQUENCES, KV_HEADS, count)}


def draw_pages(paged: flash_dmattn.KeyCache, generator: torch.Generator) -> torch.Tensor:
    """Pages for all rows, in any order. One page stays unused."""
    order = torch.randperm(paged.key.shape[0], generator=generator).int()[:-1]
    return order.view(SEQUENCES, -1).to(paged.key.device)


def give_pages(paged: flash_dmattn.KeyCache, pages: torch.Tensor, counts: torch.Tensor) -> None:
    """Give each sequence the pages that its first tokens fill."""
    firsts = torch.arange(pages.shape[1], device=pages.device) * paged.key.shape[1]
    filled = counts.clamp(max=ROWS)
    paged.page_table.copy_(torch.where(firsts < filled[:, None], pages, -1))


@pytest.mark.parametrize("page_len", [1, 4, 16])
@pytest.mark.parametrize(("device", "dtype"), TARGETS)
def test_pages_are_as_none(page_len: int, device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(page_len)
    cache, paged = make_cache(dtype, device), make_paged(page_len, dtype, device)
    pages = draw_pages(paged, generator)
    for step in range(20):
        count = 1 + step % 4
        tokens = make_tokens(count, dtype, generator, device)
        commit = torch.randint(count + 1, (SEQUENCES,), generator=generator, dtype=torch.int32)
        commit = commit.to(device)
        give_pages(paged, pages, cache.seen + commit)
        want = flash_dmattn.decode(**tokens, cache=cache, commit=commit, return_lse=True)
        found = flash_dmattn.decode(**tokens, cache=paged, commit=commit, return_lse=True)
        assert all(torch.equal(one, other) for one, other in zip(found, want))
        assert torch.equal(paged.position, cache.position) and torch.equal(paged.seen, cache.seen)
    assert cache.seen.min() > ROWS
    rows = paged.key[pages.long()].flatten(1, 2)[:, :ROWS]
    assert torch.equal(rows, cache.key)


@on_device
def test_pages_change_between_replays_of_a_graph() -> None:
    """The host does not read the page table: a captured call reads it at each replay."""
    dtype, device = torch.bfloat16, "cuda"
    generator = torch.Generator().manual_seed(5)
    cache, paged = make_cache(dtype, device), make_paged(4, dtype, device)
    pages = draw_pages(paged, generator)
    given = make_tokens(1, dtype, generator, device)
    commit = torch.zeros(SEQUENCES, dtype=torch.int32, device=device)
    with torch.cuda.stream(torch.cuda.Stream()):
        flash_dmattn.decode(**given, cache=paged, commit=commit)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = flash_dmattn.decode(**given, cache=paged, commit=commit)
    commit.fill_(1)
    for _ in range(2 * ROWS):
        for name, tokens in make_tokens(1, dtype, generator, device).items():
            given[name].copy_(tokens)
        give_pages(paged, pages, cache.seen + 1)
        graph.replay()
        assert torch.equal(found, flash_dmattn.decode(**given, cache=cache))
        assert torch.equal(paged.position, cache.position) and torch.equal(paged.seen, cache.seen)


@pytest.mark.parametrize("device", DEVICES)
def test_a_token_without_a_page_is_lost(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    paged = make_paged(4, dtype, device)
    paged.page_table[1:, 0] = torch.tensor([0, 1])
    flash_dmattn.decode(**make_tokens(2, dtype, generator, device), cache=paged)
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
