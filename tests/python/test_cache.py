"""Decoding over a cache: however a sequence is cut, the results are as for the whole sequence;
caches that layers make, for layers of different windows too; one compiled graph for all steps."""

from __future__ import annotations

import ctypes
from typing import Any, Tuple

import evaluate
import flash_dmattn
import pytest
import torch
import torch._dynamo.testing
from flash_dmattn import DynamicMaskAttention, DynamicMaskCache, LayerCaches, _library, ops
from samples import FULL, combinations
from torch.testing import assert_close

BATCH, Q_HEADS, KV_HEADS, HEAD_DIM, WINDOW = 3, 4, 2, 16, 12
RULES = {"recent": 5, "sinks": 2}
LENGTH = 330
PIECES = (100, 3, 64, 1, 1, 90, 2, *[1] * 40, 16, 13)  # of LENGTH tokens
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Tensors = Tuple[torch.Tensor, ...]
assert sum(PIECES) == LENGTH


def make_cache(layers: int = 1, batch: int = BATCH, **options: Any) -> DynamicMaskCache:
    """An empty cache, with NaN in everything that has no meaning."""
    cache = DynamicMaskCache(layers, batch, KV_HEADS, HEAD_DIM, WINDOW, **{**RULES, **options})
    for tensor in cache.keys[:4]:
        tensor.fill_(torch.nan)
    return cache


def make_tokens(
    length: int = LENGTH, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensors, Tensors]:
    """query, key and value of BATCH sequences; dt_proj, a_coef and dt_bias."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    rows = (normal(BATCH, length, heads, HEAD_DIM) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
    weights = normal(KV_HEADS, KV_HEADS * HEAD_DIM) / 4, normal(KV_HEADS), normal(KV_HEADS)
    return tuple(rows), weights


def whole(rows: Tensors, weights: Tensors, **options: Any) -> Any:
    given = {"causal": True, "dt_bias": weights[2], **RULES, **options}
    return flash_dmattn.flash_dma_attention(*rows, *weights[:2], WINDOW, **given)


def cut(tensors: Tensors, first: int, count: int) -> Tensors:
    return tuple(one[:, first : first + count] for one in tensors)


def attend(cache: Any, rows: Tensors, weights: Tensors, layer: int = 0, **options: Any) -> Any:
    return cache.attend(layer, *rows, *weights[:2], dt_bias=weights[2], **options)


def in_pieces(cache: Any, rows: Tensors, weights: Tensors, **options: Any) -> torch.Tensor:
    outs, at = [], 0
    for count in PIECES:
        outs.append(attend(cache, cut(rows, at, count), weights, **options))
        at += count
    return torch.cat(outs, 1)


def state(cache: Any, b: int | None = None) -> dict[str, torch.Tensor]:
    """The filled rows of a cache of one layer, for one sequence or all."""
    kept = cache.keys.position >= 0
    found = {
        "key": torch.where(kept[..., None], cache.keys.key.transpose(1, 2), 0),
        "value": torch.where(kept[..., None], cache.keys.value.transpose(1, 2), 0),
        "bias": torch.where(kept, cache.keys.bias, 0),
        "score": torch.where(kept, cache.keys.score, 0),
        "position": cache.keys.position.clone(),
        "seen": cache.keys.seen.clone(),
    }
    return found if b is None else {name: one[b] for name, one in found.items()}


def assert_same_state(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, one in want.items():
        assert torch.equal(found[name], one), name


@pytest.mark.parametrize(
    ("dtype", "bias_form"),
    [*((dtype, "exp") for dtype in DTYPES), (DTYPES[0], "linear"), (DTYPES[1], "none")],
)
def test_pieces_are_the_whole(dtype: torch.dtype, bias_form: str) -> None:
    """The pieces are within the whole sequence's own tolerance."""
    rows, weights = make_tokens(dtype=dtype)
    cache = make_cache(dtype=dtype, bias_form=bias_form)
    out = in_pieces(cache, rows, weights, softcap=3.0)
    _, lse = whole(rows, weights, bias_form=bias_form, softcap=3.0, return_lse=True)
    score, bias = flash_dmattn.score(rows[2], *weights[:2], dt_bias=weights[2], bias_form=bias_form)
    kept = evaluate.kept_keys(score, WINDOW, "causal", **RULES)
    mask = evaluate.visible_keys(LENGTH, LENGTH, True, kept)
    evaluate.assert_attention((out, lse), *rows, mask, bias=bias, softcap=3.0)
    at_end = [set(row.nonzero()[:, 0].tolist()) for row in kept[:, :, -1].flatten(0, 1)]
    assert [set(one.tolist()) for one in cache.keys.position.flatten(0, 1)] == at_end
    assert cache.keys.seen.tolist() == [LENGTH] * BATCH and cache.get_seq_length() == LENGTH


def test_a_cut_changes_no_row_of_the_cache() -> None:
    rows, weights = make_tokens()
    caches = [make_cache() for _ in range(3)]
    in_pieces(caches[0], rows, weights)
    attend(caches[1], rows, weights)
    for t in range(LENGTH):
        attend(caches[2], cut(rows, t, 1), weights)
    for other in caches[1:]:
        assert_same_state(state(other), state(caches[0]))


def test_layers_are_apart() -> None:
    rows, weights = make_tokens(80)
    other_rows, _ = make_tokens(80, seed=1)
    cache = make_cache(layers=3)
    attend(cache, other_rows, weights, layer=0)
    found = attend(cache, rows, weights, layer=2)
    assert_close(found, whole(rows, weights))
    assert cache.keys.seen.tolist() == [80] * BATCH + [0] * BATCH + [80] * BATCH
    lengths = [cache.get_seq_length(layer) for layer in range(3)]
    assert lengths == [80, 0, 80]


def test_sequences_of_different_ages() -> None:
    """By n_tokens, in prefills and in steps, and by index, compared with each sequence alone, in
    the second of two layers."""
    rows, weights = make_tokens()
    cache, expected = make_cache(layers=2), whole(rows, weights)
    ages = [0] * BATCH
    generator = torch.Generator().manual_seed(1)
    for most in (90, 70, *[7] * 12):
        counts = torch.randint(0, most + 1, (BATCH,), generator=generator).int()
        piece = [torch.zeros(BATCH, most, *one.shape[2:]) for one in rows]
        for b, (age, count) in enumerate(zip(ages, counts.tolist())):
            for to, one in zip(piece, rows):
                to[b, :count] = one[b, age : age + count]
                to[b, count:] = torch.nan
        out = attend(cache, tuple(piece), weights, 1, n_tokens=counts)
        for b, count in enumerate(counts.tolist()):
            assert_close(out[b, :count], expected[b, ages[b] : ages[b] + count])
            ages[b] += count
        assert cache.keys.seen.tolist() == [0] * BATCH + ages
    for chosen, count in (([2, 0], 1), ([1, -1, 0], 3), ([2], 65)):
        where = torch.tensor(chosen, dtype=torch.int32)
        piece = tuple(
            torch.stack([one[b, ages[b] : ages[b] + count] for b in chosen]) for one in rows
        )
        out = attend(cache, piece, weights, 1, index=where)
        for n, b in enumerate(chosen):
            if b < 0:
                assert (out[n] == 0).all()
                continue
            assert_close(out[n], expected[b, ages[b] : ages[b] + count])
            ages[b] += count
    assert cache.keys.seen.tolist() == [0] * BATCH + ages and len(set(ages)) == BATCH
    for b, age in enumerate(ages):
        alone = make_cache(batch=1)
        attend(alone, tuple(one[b : b + 1, :age] for one in rows), weights)
        assert_same_state(state(cache, BATCH + b), state(alone, 0))


def test_padding_on_the_left() -> None:
    rows, weights = make_tokens(120)
    key_valid = torch.arange(90) >= torch.tensor([[0], [20], [89]])
    options = {"key_valid": torch.cat((key_valid, torch.ones(BATCH, 30).bool()), 1)}
    expected = whole(rows, weights, **options)
    cache = make_cache()
    outs = [attend(cache, cut(rows, 0, 90), weights, key_valid=key_valid)]
    outs += [attend(cache, cut(rows, t, 1), weights) for t in range(90, 120)]
    valid = options["key_valid"]
    assert_close(torch.cat(outs, 1)[valid], expected[valid])


def test_ragged_pieces() -> None:
    """One piece is empty, and one has a single token."""
    rows, weights = make_tokens(250)
    expected, cache = whole(rows, weights), make_cache()
    first, counts = torch.tensor([70, 0, 99]).int(), torch.tensor([150, 130, 1]).int()
    attend(cache, cut(rows, 0, 100), weights, n_tokens=first)
    piece = [
        torch.stack([one[b, n : n + 150] for b, n in enumerate(first.tolist())]) for one in rows
    ]
    out = attend(cache, tuple(piece), weights, n_tokens=counts)
    for b, (n, count) in enumerate(zip(first.tolist(), counts.tolist())):
        assert_close(out[b, :count], expected[b, n : n + count])
    assert torch.equal(cache.keys.seen, first + counts)


def test_empty_sequences_are_known_on_the_host() -> None:
    """Only empty sequences have no carried keys in a prefill. Every row is right whatever the cache
    held."""
    rows, weights = make_tokens(80)
    cache, expected = make_cache(layers=2), whole(rows, weights)
    where = torch.tensor([1], dtype=torch.int32)
    for layer in range(2):
        attend(cache, tuple(one[1:2] for one in rows), weights, layer, index=where)
    assert cache._empty == [False] * 2
    cache.drop(2)
    cache.reorder(torch.arange(BATCH))  # the host does not know its numbers
    assert cache._empty == [False] * 2
    for b in range(BATCH):
        assert not any(cache._empty)
        cache.drop(b)
    assert cache._empty == [True] * 2
    cache.reorder(torch.zeros(BATCH).long())
    assert cache._empty == [True] * 2
    assert_close(attend(cache, rows, weights, 1), expected)
    attend(cache, cut(rows, 0, 3), weights, draft=True)
    assert cache._empty == [True, False]
    attend(cache, cut(rows, 3, 1), weights)
    assert cache._empty == [False] * 2
    cache.reset()
    assert cache._empty == [True] * 2


# ---- drafts ----


def test_speculative_decoding_is_plain_decoding() -> None:
    """16 drafts a round. Each sequence accepts a random number of them: accepted drafts are its
    next tokens, the others are wrong."""
    layers, drafts, rounds = 2, 16, 60
    length = drafts * (rounds + 1)
    inputs = [make_tokens(length, seed=layer) for layer in range(layers)]
    expected = [whole(*one) for one in inputs]
    wrong, _ = make_tokens(drafts, seed=9)
    cache, ages = make_cache(layers=layers), torch.zeros(BATCH, dtype=torch.long)
    generator = torch.Generator().manual_seed(2)
    for _ in range(rounds):
        accepted = torch.randint(0, drafts + 1, (BATCH,), generator=generator)
        for layer, (rows, weights) in enumerate(inputs):
            piece = tuple(one.clone() for one in wrong)
            for b, (age, count) in enumerate(zip(ages.tolist(), accepted.tolist())):
                for to, one in zip(piece, rows):
                    to[b, :count] = one[b, age : age + count]
            out = attend(cache, piece, weights, layer, draft=True)
            for b, (age, count) in enumerate(zip(ages.tolist(), accepted.tolist())):
                assert_close(out[b, :count], expected[layer][b, age : age + count])
        assert cache.drafts == drafts
        cache.commit(accepted.int())
        ages += accepted
        assert cache.keys.seen.tolist() == ages.tolist() * layers and cache.drafts == 0
    assert ages.min() > 300
    for layer, (rows, weights) in enumerate(inputs):
        for b, age in enumerate(ages.tolist()):
            alone = make_cache(batch=1)
            attend(alone, tuple(one[b : b + 1, :age] for one in rows), weights)
            assert_same_state(state(cache, layer * BATCH + b), state(alone, 0))


@pytest.mark.parametrize("committing", [False, True])
def test_drafts_one_by_one(committing: bool) -> None:
    """Drafts continue drafts. Tokens that follow the drafts left by crop() let these enter the
    cache."""
    rows, weights = make_tokens(100)
    wrong, _ = make_tokens(100, seed=5)
    cache, expected = make_cache(), whole(rows, weights)
    attend(cache, cut(rows, 0, 70), weights)
    before = state(cache)
    for t in range(70, 76):
        source = rows if t < 73 else wrong
        out = attend(cache, cut(source, t, 1), weights, draft=True)
        if t < 73:
            assert_close(out, expected[:, t : t + 1])
    assert_same_state(state(cache), before)
    assert cache.drafts == 6 and cache.get_seq_length() == 76
    assert cache.positions(0, 2).tolist() == [[76, 77]] * BATCH
    cache.crop(3)
    assert cache.drafts == 3 and cache.get_seq_length() == 73
    if committing:
        cache.commit()
        assert cache.drafts == 0 and cache.get_seq_length() == 73
    for first, count in ((73, 2), (75, 1), (76, 24)):
        out = attend(cache, cut(rows, first, count), weights)
        assert_close(out, expected[:, first : first + count])
    plain = make_cache()
    attend(plain, rows, weights)
    assert_same_state(state(cache), state(plain))
    assert cache.get_seq_length() == 100


def test_ragged_drafts() -> None:
    rows, weights = make_tokens(60)
    cache = make_cache()
    counts = torch.tensor([5, 0, 9], dtype=torch.int32)
    attend(cache, cut(rows, 0, 9), weights, n_tokens=counts, draft=True)
    cache.commit()
    assert torch.equal(cache.keys.seen, counts)


# ---- sequences of a cache ----


def check_reorder(cache: Any, rows: Tensors, weights: Tensors, drafts: int, **near: float) -> None:
    """Two layers. Afterwards every sequence continues the one whose place it took."""
    beams = torch.tensor([2, 0, 2], device=rows[0].device)
    addresses = [one.data_ptr() for one in cache.keys[:6]]
    for layer in range(2):
        attend(cache, cut(rows, 0, 90 - drafts), weights, layer)
        if drafts > 0:
            attend(cache, cut(rows, 90 - drafts, drafts), weights, layer, draft=True)
    cache.reorder(beams)
    moved = tuple(one[beams] for one in rows)
    for layer in range(2):
        out = attend(cache, cut(moved, 90, 10), weights, layer)
        assert_close(out, whole(moved, weights)[:, 90:], **near)
    assert addresses == [one.data_ptr() for one in cache.keys[:6]]


@pytest.mark.parametrize("drafts", [0, 4])
def test_reorder(drafts: int) -> None:
    rows, weights = make_tokens(100)
    check_reorder(make_cache(layers=2), rows, weights, drafts)


def test_drop_and_reset() -> None:
    rows, weights = make_tokens(100)
    cache = make_cache()
    attend(cache, rows, weights)
    cache.drop(1)
    assert cache.keys.seen.tolist() == [100, 0, 100]
    where = torch.tensor([1], dtype=torch.int32)
    out = attend(cache, tuple(one[:1] for one in rows), weights, index=where)
    assert_close(out, whole(rows, weights)[:1])
    attend(cache, cut(rows, 0, 1), weights, draft=True)
    cache.reset()
    assert cache.get_seq_length() == cache.drafts == 0
    assert_close(attend(cache, rows, weights), whole(rows, weights))


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory(dtype: torch.dtype) -> None:
    """The bytes are as from fdma_cache_bytes(), up to the alignment of the six tensors and of the
    whole."""
    cache = make_cache(layers=4, dtype=dtype)
    names = {"window": WINDOW, **RULES, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    number = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}[dtype]
    struct = _library.HEADER.structs["fdma_cache"](sequences=4 * BATCH, dtype=number, **names)
    size = ctypes.c_size_t()
    _library.check(_library.library.fdma_cache_bytes(ctypes.byref(struct), ctypes.byref(size)))
    assert 0 <= size.value - cache.memory_bytes < 7 * 64
    memory = ctypes.create_string_buffer(size.value)
    _library.check(_library.library.fdma_cache_init(ctypes.byref(struct), memory))
    for mine, theirs in ((cache.keys.key, struct.k), (cache.keys.position, struct.table.position)):
        assert tuple(theirs.shape)[: mine.dim()] == mine.shape
        assert tuple(theirs.stride)[: mine.dim()] == mine.stride()


# ---- the function ----


def test_decode() -> None:
    """Tokens that are not committed leave no trace, and streams without a sequence get 0."""
    rows, weights = make_tokens(20)
    cache = make_cache()
    options = dict(zip(("dt_proj", "a_coef", "dt_bias"), weights))
    expected, lse = whole(rows, weights, return_lse=True)
    before = state(cache)
    found = flash_dmattn.decode(*rows, cache.keys, commit=0, return_lse=True, **options)
    assert_close(found, (expected, lse))
    assert_same_state(state(cache), before)
    score, _ = flash_dmattn.score(rows[2], *weights[:2], dt_bias=weights[2])
    query, *others = rows
    found = flash_dmattn.decode(query[:, -1:], *others, cache.keys, score=score, commit=7)
    assert_close(found, expected[:, -1:])
    assert cache.keys.seen.tolist() == [7] * BATCH
    index = torch.tensor([-1, 2], dtype=torch.int32)
    piece = tuple(one[1:, 7:9] for one in rows)
    out, lse = flash_dmattn.decode(
        *piece, cache.keys, index=index, n_tokens=1, return_lse=True, **options
    )
    assert (out[0] == 0).all() and (lse[0] == -torch.inf).all()
    assert_close(out[1, 0], expected[2, 7])
    assert cache.keys.seen.tolist() == [7, 7, 8]


def test_batch_invariant() -> None:
    """On the CPU bits never depend on the batch, so this changes none."""
    rows, weights = make_tokens(20)
    options = dict(zip(("dt_proj", "a_coef", "dt_bias"), weights))
    plain, invariant = make_cache(), make_cache(batch_invariant=True)
    out = attend(plain, rows, weights)
    assert torch.equal(attend(invariant, rows, weights), out)
    out = flash_dmattn.decode(*rows, plain.keys, commit=0, **options)
    again = flash_dmattn.decode(*rows, plain.keys, commit=0, batch_invariant=True, **options)
    assert torch.equal(again, out)
    with pytest.raises(TypeError, match="^batch_invariant: is .*, want a bool"):
        make_cache(batch_invariant=torch.ones(2))
    with pytest.raises(TypeError, match="^batch_invariant: is .*, want a bool"):
        flash_dmattn.decode(*rows, plain.keys, commit=0, batch_invariant=torch.ones(2), **options)


def test_no_gradient() -> None:
    """The call itself works in grad mode."""
    rows, weights = make_tokens(70)
    for count in (3, 70):
        query = rows[0][:, :count].clone().requires_grad_()
        out = attend(make_cache(), (query, *cut(rows[1:], 0, count)), weights)
        with pytest.raises(NotImplementedError, match=r"no gradient, call it within torch.no_grad"):
            out.sum().backward()


def test_a_cache_with_spaced_channels_is_refused() -> None:
    """The call writes to the cache, so it cannot be copied as other tensors are."""
    rows, weights = make_tokens(1)
    keys = make_cache().keys
    spaced = torch.zeros(*keys.key.shape[:3], 2 * HEAD_DIM)[..., ::2]
    with pytest.raises(ValueError, match=r"^cache.key: "):
        flash_dmattn.decode(*rows, keys._replace(key=spaced), score=torch.zeros(BATCH, 2, 1))


# ---- the module ----


def make_layer(**options: Any) -> Any:
    torch.manual_seed(0)
    rules = {"head_dim": HEAD_DIM, **RULES, **options}
    layer = DynamicMaskAttention(48, Q_HEADS, KV_HEADS, WINDOW, **rules)
    torch.nn.init.normal_(layer.A)
    return layer


@pytest.mark.parametrize(("dtype", "rope_base"), combinations(DTYPES, [None, 10000.0]))
@torch.no_grad()
def test_the_module(dtype: torch.dtype, rope_base: float | None) -> None:
    """In 16 bits scores that nearly tie may rank differently, because the projections of one row
    and of many differ in their last bits."""
    layer = make_layer(rope_base=rope_base, dtype=dtype, dt_bias=True, softcap=4.0)
    x = torch.randn(BATCH, LENGTH, 48, generator=torch.Generator().manual_seed(3)).to(dtype)
    cache, outs, at = make_cache(layers=2, dtype=dtype), [], 0
    for count in PIECES:
        draft = count == 13
        outs.append(layer(x[:, at : at + count], cache=cache, layer=1, draft=draft))
        at += count
    found, expected = torch.cat(outs, 1), layer(x)
    assert found.dtype == dtype
    if dtype == torch.float32:
        assert_close(found, expected)
    assert (found - expected).abs().mean() < 0.01 * expected.abs().mean()
    assert cache.get_seq_length(1) == LENGTH and cache.drafts == 0


@torch.no_grad()
def test_the_module_with_an_index() -> None:
    """Steps of all sequences and of some, and a prefill of one: rotary angles follow each sequence,
    not the longest one."""
    evaluate.check_ages(make_layer(), torch.randn(BATCH, 180, 48), make_cache())


@torch.no_grad()
def test_autocast() -> None:
    layer, x = make_layer(), torch.randn(BATCH, 90, 48)
    cache = make_cache(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        outs = [layer(x[:, :80], cache=cache)]
        outs += [layer(x[:, t : t + 1], cache=cache) for t in range(80, 90)]
        expected = layer(x)
    found = torch.cat(outs, 1)
    assert found.dtype == torch.bfloat16
    assert (found - expected).abs().mean() < 0.02 * expected.abs().mean()


def test_the_operators_have_mutated_tensors() -> None:
    cache = tuple(f"cache_{name}" for name in flash_dmattn.KeyCache._fields[:6])
    for operator in (ops.DECODE, ops.CACHE_STORE, ops.CACHE_COPY):
        assert operator.operation.mutated == cache
    assert ops.PREFILL.operation.mutated == ()


# ---- compiled ----


class Stack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(make_layer() for _ in range(2))

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x + layer(x, cache=cache, layer=number)
        return x


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"] if FULL else ["aot_eager"])
@torch.no_grad()
def test_one_graph_for_all_steps(backend: str) -> None:
    """Without graph breaks, 100 steps compile at most twice, and every tensor keeps its address."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    model, x = Stack(), torch.randn(BATCH, 180, 48)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    cache, plain = make_cache(layers=2), make_cache(layers=2)
    addresses = [one.data_ptr() for one in cache.keys[:6]]
    assert_close(model(x[:, :80], cache), model(x[:, :80], plain))
    for t in range(80, 180):
        assert_close(compiled(x[:, t : t + 1], cache), model(x[:, t : t + 1], plain))
    assert 0 < counter.frame_count <= 2
    assert addresses == [one.data_ptr() for one in cache.keys[:6]]
    assert cache.get_seq_length(1) == 180 and torch.equal(cache.keys.seen, plain.keys.seen)


@torch.no_grad()
def test_static_caches_change_no_number_on_the_host() -> None:
    """One graph without symbolic numbers. With these, CUDA graphs would be recorded anew."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model, x = Stack(), torch.randn(BATCH, 130, 48)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    cache, plain = make_cache(layers=2, static=True), make_cache(layers=2)
    assert_close(model(x[:, :80], cache), model(x[:, :80], plain))
    for t in range(80, 130):
        assert_close(compiled(x[:, t : t + 1], cache), model(x[:, t : t + 1], plain))
    assert counter.frame_count == 1
    inputs = [
        node.meta["example_value"] for node in counter.graphs[0].graph.find_nodes(op="placeholder")
    ]
    assert len(inputs) > 0 and all(isinstance(one, torch.Tensor) for one in inputs)
    assert [int(cache.get_seq_length(layer)) for layer in (0, 1)] == [130, 130]
    assert torch.equal(cache.keys.seen, plain.keys.seen)
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    assert_close(model(x[:, :80], cache), model(x[:, :80], make_cache(layers=2)))


@torch.no_grad()
def test_drafts_and_prefills_compile() -> None:
    torch._dynamo.reset()
    rows, weights = make_tokens(100)

    def run(cache: Any) -> Tensors:
        first = attend(cache, cut(rows, 0, 80), weights, n_tokens=80)
        second = attend(cache, cut(rows, 80, 10), weights, draft=True)
        cache.commit(torch.full((BATCH,), 5, dtype=torch.int32))
        return first, second, attend(cache, cut(rows, 85, 15), weights)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    found, expected = make_cache(), make_cache()
    assert_close(compiled(found), run(expected))
    assert_same_state(state(found), state(expected))
    assert_close(run(make_cache())[2], whole(rows, weights)[:, 85:])


# ---- caches that layers make, and one cache for layers of different windows ----

PAIR, TOKENS, HIDDEN = 2, 40, 32
WINDOWS = ({"window": 4}, {"window": 9, "recent": 0, "sinks": 2}, {"window": 4})


@pytest.fixture
def layers() -> list[DynamicMaskAttention]:
    torch.manual_seed(0)
    layers = [DynamicMaskAttention(HIDDEN, 4, 2, **rules) for rules in WINDOWS]
    for layer in layers:
        torch.nn.init.normal_(layer.A)
    return layers


def pass_all(layers: list[DynamicMaskAttention], x: torch.Tensor, cache: Any, **given: Any) -> Any:
    for number, layer in enumerate(layers):
        x = layer(x, cache=cache, layer=number, **given) if cache is not None else layer(x)
    return x


def states(batch: int = PAIR) -> torch.Tensor:
    return torch.randn(batch, TOKENS, HIDDEN)


def close(found: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_layers_of_different_windows(layers: list[DynamicMaskAttention]) -> None:
    x, cache = states(), LayerCaches(layers, PAIR)
    want = pass_all(layers, x, None)
    found = [pass_all(layers, x[:, :30], cache)]
    found += [pass_all(layers, x[:, t : t + 1], cache) for t in range(30, TOKENS)]
    close(torch.cat(found, 1), want)
    assert [one.layers for one in cache.caches] == [2, 1]
    assert [cache.get_seq_length(n) for n in range(3)] == [TOKENS] * 3
    assert cache.memory_bytes == sum(layer.new_cache(PAIR).memory_bytes for layer in layers)
    cache.reset()
    close(pass_all(layers, x[:, :7], cache), pass_all(layers, x[:, :7], None))


@torch.no_grad()
def test_drafts_of_layers(layers: list[DynamicMaskAttention]) -> None:
    """Four drafts: three stay after crop(), and two enter."""
    x, other = states(), states()
    cache, plain = LayerCaches(layers, PAIR), LayerCaches(layers, PAIR)
    for one in (cache, plain):
        pass_all(layers, x[:, :10], one)
    drafts = torch.cat((x[:, 10:12], other[:, :2]), 1)
    pass_all(layers, drafts, cache, draft=True)
    assert cache.drafts == 4
    cache.crop(3)
    assert cache.drafts == 3
    cache.commit(torch.tensor([2, 2], dtype=torch.int32))
    pass_all(layers, x[:, 10:12], plain)
    close(pass_all(layers, x[:, 12:20], cache), pass_all(layers, x[:, 12:20], plain))


@torch.no_grad()
def test_sequences_of_layers(layers: list[DynamicMaskAttention]) -> None:
    x, cache = states(), LayerCaches(layers, PAIR)
    pass_all(layers, x[:, :10], cache)
    cache.reorder(torch.tensor([1, 0]))
    close(
        pass_all(layers, x.flip(0)[:, 10:20], cache),
        pass_all(layers, x, None).flip(0)[:, 10:20],
    )
    cache.drop(1)
    index = torch.tensor([1], dtype=torch.int32)
    close(pass_all(layers, x[:1, :5], cache, index=index), pass_all(layers, x[:1, :5], None))
    assert cache.positions(1, 1, index).tolist() == [[5]]


@torch.no_grad()
def test_attend_of_a_layer() -> None:
    layer = DynamicMaskAttention(HIDDEN, 4, 2, 4)
    cache, alone = LayerCaches([layer, layer], 1), layer.new_cache(1)
    rows = torch.randn(1, 6, 4, 8), *torch.randn(2, 1, 6, 2, 8)
    weights = torch.randn(2, 16), torch.ones(2)
    found = cache.attend(1, *rows, *weights, softcap=2.0)
    assert torch.equal(found, alone.attend(0, *rows, *weights, softcap=2.0))
    assert [cache.get_seq_length(n) for n in (0, 1)] == [0, 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_makes_its_cache(dtype: torch.dtype) -> None:
    rules = {"window": 6, "recent": 3, "sinks": 2, "head_dim": 16}
    layer = DynamicMaskAttention(HIDDEN, 4, 2, **rules, dtype=dtype)
    cache = layer.new_cache(PAIR, layers=3, static=True)
    assert (cache.layers, cache.batch, cache.static) == (3, PAIR, True)
    assert cache.keys.key.shape == (3 * PAIR, 9, 2, 16) and cache.keys.key.dtype == dtype
    assert (cache.keys.window, cache.keys.recent, cache.keys.sinks) == (6, 3, 2)
    with torch.no_grad():
        layer(torch.randn(PAIR, 5, HIDDEN, dtype=dtype), cache=cache, layer=2)


def test_recent_is_window_by_default() -> None:
    """As in a layer; functions have 0, as in the method's documents."""
    assert DynamicMaskCache(1, 1, 2, 8, window=5).keys.recent == 5
    assert DynamicMaskCache(1, 1, 2, 8, window=5, recent=0).keys.recent == 0
    assert DynamicMaskAttention(HIDDEN, 4, 2, 5).recent == 5
    assert flash_dmattn.select(torch.randn(1, 2, 6), 5).recent == 0


def test_what_caches_look_like(layers: list[DynamicMaskAttention]) -> None:
    cache = layers[1].new_cache(PAIR)
    shown = (
        "DynamicMaskCache(layers=1, batch=2, kv_heads=2, head_dim=8, window=9, recent=0, sinks=2, "
        "bias_form='exp', dtype=torch.float32, device=cpu{}): {} tokens, 2744 bytes"
    )
    assert cache.memory_bytes == 2744
    assert repr(cache) == shown.format("", 0)
    static = layers[1].new_cache(PAIR, static=True)
    with torch.no_grad():
        for one in (cache, static):
            layers[1](torch.randn(PAIR, 11, HIDDEN), cache=one)
    assert repr(cache) == shown.format("", 11)
    assert repr(static) == shown.format(", static=True", 11)
    both = LayerCaches(layers, PAIR)
    assert repr(both).startswith("LayerCaches(\n    DynamicMaskCache(layers=2, batch=2,")
    assert repr(both).count("0 tokens") == 2


@torch.no_grad()
def test_a_refused_commit_changes_nothing(layers: list[DynamicMaskAttention]) -> None:
    x, cache = states(), LayerCaches(layers, PAIR)
    pass_all(layers, x[:, :10], cache)
    for number, length in enumerate((3, 2, 3)):
        layers[number](x[:, :length], cache=cache, layer=number, draft=True)
    seen = [one.keys.seen.clone() for one in cache.caches]
    with pytest.raises(
        ValueError, match=r"^count: the layers have \[3, 3, 2\] drafts, want as many"
    ):
        cache.commit(3)
    with pytest.raises(ValueError, match="^b: the layers have"):
        cache.drop(0)
    assert all(torch.equal(one.keys.seen, was) for one, was in zip(cache.caches, seen))
    assert cache.drafts == 3
