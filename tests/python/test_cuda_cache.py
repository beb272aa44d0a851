"""Caches on a CUDA device: however a sequence is cut, the results are as for the whole sequence.

Scores are exact numbers times softplus, so that every kernel ranks the keys alike.
"""

from __future__ import annotations

from typing import Any

import evaluate
import flash_dmattn
import pytest
import torch
import torch._dynamo.testing
from cases import NARROW, on_device
from evaluate import assert_same
from test_cache import (
    BATCH,
    LENGTH,
    PIECES,
    RULES,
    WINDOW,
    Tensors,
    assert_same_state,
    attend,
    check_reorder,
    cut,
    in_pieces,
    make_cache,
    make_tokens,
    state,
    whole,
)
from torch.testing import assert_close

DEVICE = "cuda"
NEAR = {"rtol": 0.02, "atol": 0.02}  # for two results in 16 bits, each within the 2x rule
every_dtype = pytest.mark.parametrize("dtype", NARROW)


def make_exact(
    length: int = LENGTH, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[Tensors, Tensors]:
    """make_tokens() on the device, with values and weights whose products have exact sums."""
    rows, weights = make_tokens(length, seed=seed)
    query, key, value = rows
    value = (value * 4).round().clamp(-8, 8) / 4
    dt_proj = (weights[0] * 64).round() / 64
    dt_bias = (weights[2] * 4).round() / 4
    made = (query, key, value), (dt_proj, torch.tensor([0.5, -0.5]), dt_bias)
    rows, weights = (tuple(one.to(DEVICE, dtype) for one in some) for some in made)
    return rows, weights


def new_cache(**options: Any) -> Any:
    return make_cache(**{"device": DEVICE, "dtype": torch.bfloat16, **options})


def assert_whole(out: torch.Tensor, rows: Tensors, weights: Tensors, **options: Any) -> None:
    """The results are within the whole sequence's own tolerance."""
    _, lse = whole(rows, weights, return_lse=True, **options)
    score, bias = flash_dmattn.score(rows[2], *weights[:2], dt_bias=weights[2])
    kept = evaluate.kept_keys(score.cpu(), WINDOW, "causal", **RULES)
    mask = evaluate.visible_keys(rows[0].shape[1], rows[1].shape[1], True, kept)
    on_cpu = (one.cpu() for one in rows)
    evaluate.assert_attention((out, lse), *on_cpu, mask, bias=bias.cpu(), **options)


@on_device
@every_dtype
def test_token_by_token_is_the_whole(dtype: torch.dtype) -> None:
    rows, weights = make_exact(120, dtype)
    cache = new_cache(dtype=dtype)
    outs = [attend(cache, cut(rows, t, 1), weights) for t in range(120)]
    assert_whole(torch.cat(outs, 1), rows, weights)


@on_device
@every_dtype
def test_pieces_are_the_whole(dtype: torch.dtype) -> None:
    """A prefill, steps, and a further prefill."""
    rows, weights = make_exact(dtype=dtype)
    cache, other = new_cache(dtype=dtype), new_cache(dtype=dtype)
    out = in_pieces(cache, rows, weights, softcap=3.0)
    assert_whole(out, rows, weights, softcap=3.0)
    attend(other, rows, weights)
    for name in ("key", "value", "position", "seen"):
        assert torch.equal(state(cache)[name], state(other)[name]), name
    assert cache.keys.seen.tolist() == [LENGTH] * BATCH


@on_device
def test_sequences_of_different_ages() -> None:
    """By n_tokens in a prefill, in a further piece and in steps, and by index."""
    rows, weights = make_exact()
    cache, expected = new_cache(layers=2), whole(rows, weights)
    ages = [0] * BATCH
    generator = torch.Generator().manual_seed(1)
    for most in (90, 70, *[7] * 8):
        counts = torch.randint(0, most + 1, (BATCH,), generator=generator).int()
        piece = [torch.full((BATCH, most, *one.shape[2:]), torch.nan).to(one) for one in rows]
        for b, (age, count) in enumerate(zip(ages, counts.tolist())):
            for to, one in zip(piece, rows):
                to[b, :count] = one[b, age : age + count]
        out = attend(cache, tuple(piece), weights, 1, n_tokens=counts.to(DEVICE))
        for b, count in enumerate(counts.tolist()):
            assert_close(out[b, :count], expected[b, ages[b] : ages[b] + count], **NEAR)
            ages[b] += count
    for chosen, count in (([2, 0], 1), ([1, -1, 0], 3), ([2], 65)):
        where = torch.tensor(chosen, dtype=torch.int32, device=DEVICE)
        piece = [torch.stack([one[b, ages[b] : ages[b] + count] for b in chosen]) for one in rows]
        out = attend(cache, tuple(piece), weights, 1, index=where)
        for n, b in enumerate(chosen):
            if b >= 0:
                assert_close(out[n], expected[b, ages[b] : ages[b] + count], **NEAR)
                ages[b] += count
    assert cache.keys.seen.tolist() == [0] * BATCH + ages


@on_device
def test_padding_on_the_left() -> None:
    """In two pieces. The first has no valid key of one sequence."""
    rows, weights = make_exact(120)
    first = torch.tensor([[0], [20], [75]], device=DEVICE)
    key_valid = torch.arange(120, device=DEVICE) >= first
    expected = whole(rows, weights, key_valid=key_valid)
    cache = new_cache()
    outs = [
        attend(cache, cut(rows, n, count), weights, key_valid=key_valid[:, n : n + count])
        for n, count in ((0, 70), (70, 20))
    ]
    outs += [attend(cache, cut(rows, t, 1), weights) for t in range(90, 120)]
    assert_close(torch.cat(outs, 1)[key_valid], expected[key_valid], **NEAR)


@on_device
@every_dtype
def test_drafts(dtype: torch.dtype) -> None:
    """8 drafts a round. Each sequence accepts another number; one commit serves two layers."""
    rows, weights = make_exact(dtype=dtype)
    wrong, _ = make_exact(8, dtype, seed=9)
    cache, expected = new_cache(layers=2, dtype=dtype), whole(rows, weights)
    ages, generator = [0] * BATCH, torch.Generator().manual_seed(2)
    for _ in range(25):
        accepted = torch.randint(0, 9, (BATCH,), generator=generator).int()
        piece = tuple(one.clone() for one in wrong)
        for b, (age, count) in enumerate(zip(ages, accepted.tolist())):
            for to, one in zip(piece, rows):
                to[b, :count] = one[b, age : age + count]
        for layer in range(2):
            out = attend(cache, piece, weights, layer, draft=True)
        for b, (age, count) in enumerate(zip(ages, accepted.tolist())):
            assert_close(out[b, :count], expected[b, age : age + count], **NEAR)
        cache.commit(accepted.to(DEVICE))
        ages = [age + count for age, count in zip(ages, accepted.tolist())]
    assert cache.keys.seen.tolist() == ages * 2 and min(ages) > 50


@on_device
@pytest.mark.parametrize("drafts", [0, 4])
def test_reorder(drafts: int) -> None:
    rows, weights = make_exact(100)
    check_reorder(new_cache(layers=2), rows, weights, drafts, **NEAR)


@on_device
def test_drop_and_reset() -> None:
    rows, weights = make_exact(100)
    cache, expected = new_cache(), whole(rows, weights)
    attend(cache, rows, weights)
    cache.drop(1)
    where = torch.tensor([1], dtype=torch.int32, device=DEVICE)
    out = attend(cache, tuple(one[:1] for one in rows), weights, index=where)
    assert_close(out, expected[:1], **NEAR)
    assert cache.keys.seen.tolist() == [100] * BATCH
    cache.reset()
    assert_same(attend(cache, rows, weights), expected)


# ---- graphs, the compiler, waiting ----


def step(cache: Any, rows: Tensors, weights: Tensors, accepted: torch.Tensor | None) -> Any:
    """Two layers attend. If `accepted` is given, the tokens are drafts, and these enter the
    cache."""
    draft = accepted is not None
    outs = [attend(cache, rows, weights, layer, draft=draft) for layer in range(2)]
    if draft:
        cache.commit(accepted)
    return torch.cat(outs)


@on_device
@pytest.mark.parametrize("drafts", [0, 5])
def test_one_graph_replayed_is_eager(drafts: int) -> None:
    """A step is captured once, and replayed over all tokens."""
    rows, weights = make_exact()
    count, caches = max(drafts, 1), [new_cache(layers=2) for _ in range(2)]
    given = tuple(one.clone() for one in cut(rows, 0, count))
    accepted = torch.zeros(BATCH, dtype=torch.int32, device=DEVICE) if drafts > 0 else None
    with torch.cuda.stream(torch.cuda.Stream()):
        step(caches[0], given, weights, accepted)
    torch.cuda.synchronize()
    caches[0].reset()
    for cache in caches:
        for layer in range(2):
            attend(cache, cut(rows, 0, 80), weights, layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(caches[0], given, weights, accepted)
    for t in range(80, LENGTH - count):
        for to, one in zip(given, cut(rows, t, count)):
            to.copy_(one)
        if accepted is not None:
            accepted.copy_(torch.arange(t, t + BATCH) % (drafts + 1))
        graph.replay()
        assert_same(found, step(caches[1], given, weights, accepted))
    assert_same_state(state(caches[0]), state(caches[1]))
    assert caches[0].keys.seen.min() > 300


@on_device
def test_saved_sequences_go_on_elsewhere() -> None:
    """On the device and on the CPU, from where they come back."""
    rows, weights = make_exact()
    one, other, host = new_cache(layers=2), new_cache(layers=2), new_cache(layers=2, device="cpu")
    for layer in range(2):
        attend(one, cut(rows, 0, 80), weights, layer)
    for b in range(BATCH):
        state_of_b = one.save(b)
        host.restore(b, state_of_b)
        assert host.save(b) == state_of_b
        other.restore(b, host.save(b))
        with pytest.raises(ValueError, match="state: is truncated"):
            other.restore(b, state_of_b[:-8])
    for t in range(80, 90):
        piece = cut(rows, t, 1)
        assert_same(*(step(cache, piece, weights, None) for cache in (one, other)))


@on_device
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@torch.no_grad()
def test_one_compiled_graph_for_all_steps(backend: str) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    rows, weights = make_exact()
    caches = [new_cache(layers=2) for _ in range(2)]
    for cache in caches:
        step(cache, cut(rows, 0, 80), weights, None)
    for t in range(80, 160):
        piece = cut(rows, t, 1)
        assert_same(
            compiled(caches[0], piece, weights, None), step(caches[1], piece, weights, None)
        )
    assert 0 < counter.frame_count <= 2
    assert_same_state(state(caches[0]), state(caches[1]))


@on_device
def test_no_call_waits() -> None:
    rows, weights = make_exact()
    cache, beams = new_cache(layers=2), torch.tensor([2, 0, 2], device=DEVICE)
    accepted = torch.tensor([1, 0, 3], dtype=torch.int32, device=DEVICE)

    def use() -> None:
        at = 0
        for count in PIECES:
            step(cache, cut(rows, at, count), weights, None)
            at += count
        one_row = tuple(one[:1] for one in cut(rows, 0, 70))
        attend(cache, one_row, weights, index=beams[:1].int(), n_tokens=accepted[:1])
        step(cache, cut(rows, 0, 3), weights, accepted)
        cache.reorder(beams)
        cache.drop(1)
        cache.reset()

    use()
    torch.cuda.set_sync_debug_mode("error")
    try:
        use()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_device
def test_batch_invariant() -> None:
    """Batches of one stream and of 100, for which different kernels are the fastest."""
    rows, weights = make_exact(90)
    cache = new_cache(batch=100, batch_invariant=True)
    other = new_cache(batch=1, batch_invariant=True)
    for t in range(90):
        many = tuple(one.repeat(34, 1, 1, 1)[:100] for one in cut(rows, t, 1))
        alone = attend(other, tuple(one[:1] for one in many), weights)
        assert torch.equal(alone, attend(cache, many, weights)[:1])


@on_device
def test_what_no_kernel_of_the_device_supports() -> None:
    rows, weights = make_exact(3, torch.float32)
    with pytest.raises(NotImplementedError, match="float32"):
        attend(new_cache(dtype=torch.float32), rows, weights)
