"""Attention over the best keys, evaluated in PyTorch alone: the reference of the tests.

It is slow and follows the definition: every query sorts the keys that it sees. The evaluation in
float64 counts as exact. The plain evaluation, in the dtype of query, key and value, has an error
that sets the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Tuple

import numpy as np
import torch

Tensors = Tuple[torch.Tensor, ...]
FUSED = ("query", "key", "value", "dt_proj", "a_coef")


def grouped_sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> torch.Tensor:
    """scaled_dot_product_attention() whose query may have several heads for each head of key."""
    group = query.shape[-3] // key.shape[-3]
    rows = (x.repeat_interleave(group, -3) for x in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, *rows, **options)


class Result(NamedTuple):
    out: torch.Tensor  # [batch, q_len, q_heads, head_dim]
    lse: torch.Tensor  # [batch, q_heads, q_len]


# ---- which keys are kept ----


def rank_of(score: float, j: int) -> tuple[bool, float, int]:
    """Rank of a key, greater is better: NaN below everything, then the score, then the more recent
    key."""
    return (False, 0.0, j) if math.isnan(score) else (True, score, j)


def best_keys(
    score: list[float], keys: list[int], window: int, first: Sequence[int] = ()
) -> list[int]:
    """The `window` best of `keys`. Keys in `first` outrank all others."""
    return sorted(keys, key=lambda j: (j in first, *rank_of(score[j], j)), reverse=True)[:window]


def kept_keys(
    score: torch.Tensor,
    window: int,
    scope: str,
    key_valid: torch.Tensor | None = None,
    *,
    recent: int = 0,
    sinks: int = 0,
    gap: float | None = None,
) -> torch.Tensor:
    """The keys that the query at each position keeps, before causal masking. Of the valid keys that
    it can see it keeps the `recent` newest, and the `window` best of the others. With a gap it
    drops those others, except sinks, that are more than the gap below the best key that it sees.

    score [batch, kv_heads, kv_len]; the result is bool [batch, kv_heads, positions, kv_len].
    positions is kv_len in causal scope; in global scope it is 1, which stands for all.
    """
    batch, kv_heads, kv_len = score.shape
    assert (recent == 0 and gap is None) or scope == "causal"
    positions = kv_len if scope == "causal" else 1
    kept = torch.zeros(batch, kv_heads, positions, kv_len, dtype=torch.bool)
    for b in range(batch):
        valid = [True] * kv_len if key_valid is None else key_valid[b].bool().tolist()
        first = [j for j in range(kv_len) if valid[j]][:sinks]
        for g in range(kv_heads):
            row = score[b, g].tolist()
            for p in range(positions):
                seen = range(p + 1) if scope == "causal" else range(kv_len)
                keys = [j for j in seen if valid[j]]
                others = max(len(keys) - recent, 0)
                kept[b, g, p, keys[others:]] = True
                best = best_keys(row, keys[:others], window, first)
                if gap is not None:
                    numbers = {j: -math.inf if math.isnan(row[j]) else row[j] for j in keys}
                    least = max(numbers.values(), default=-math.inf) - gap
                    best = [j for j in best if j in first or not numbers[j] < least]
                kept[b, g, p, best] = True
    return kept


def expiry_of(kept: torch.Tensor, scope: str) -> torch.Tensor:
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


def slot_of(
    expiry: torch.Tensor, slots_max: int, scope: str, key_valid: torch.Tensor | None
) -> torch.Tensor:
    """slot as fdma.h defines it: free slots in order, then the slot of the evicted key."""
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
                    assert used < slots_max and valid[j], "distinct slots, of valid keys"
                    slots[j] = used
                    used += 1
                else:
                    assert len(leaving) == 1, "each arriving key evicts one"
                    slots[j] = slots[leaving[0]]
    return slot


def selection(
    score: torch.Tensor,
    window: int,
    scope: str,
    key_valid: torch.Tensor | None = None,
    *,
    recent: int = 0,
    sinks: int = 0,
    gap: float | None = None,
) -> Tensors:
    """expiry and slot, by brute force. A gap changes no slots, except for keys that are never
    kept."""
    rules = {"recent": recent, "sinks": sinks}
    kept = kept_keys(score, window, scope, key_valid, **rules)
    expiry = expiry_of(kept.expand(-1, -1, score.shape[-1], -1), scope)
    slot = slot_of(expiry, window + recent, scope, key_valid)
    if gap is None:
        return expiry, slot
    expiry = expiry_of(kept_keys(score, window, scope, key_valid, gap=gap, **rules), scope)
    return expiry, torch.where(expiry > torch.arange(expiry.shape[-1]), slot, -1)


def visible_keys(
    q_len: int,
    kv_len: int,
    causal: bool,
    kept: torch.Tensor | None = None,
    key_valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """The mask of the attention: bool [batch or 1, kv_heads or 1, q_len, kv_len]."""
    position = torch.arange(q_len) + kv_len - q_len
    mask = torch.ones(1, 1, q_len, kv_len, dtype=torch.bool)
    if causal:
        mask = mask & (torch.arange(kv_len) <= position[:, None])
    if kept is not None:
        by_query = position.clamp(min=0) if kept.shape[2] == kv_len else torch.zeros_like(position)
        mask = mask & kept[:, :, by_query]
    if key_valid is not None:
        mask = mask & key_valid.bool()[:, None, None, :]
    return mask


def pieces_of(
    b: int,
    q_len: int,
    kv_len: int,
    kv_used: torch.Tensor | None,
    starts: torch.Tensor | None,
) -> Iterator[tuple[slice, slice]]:
    """The queries and the keys of each sequence in a batch entry that has keys."""
    if starts is not None:
        spans = [slice(*pair) for pair in zip(starts.tolist(), starts.tolist()[1:])]
        yield from ((span, span) for span in spans if span.start < span.stop)
    elif kv_used is None or kv_used[b] > 0:
        yield slice(0, q_len), slice(0, kv_len if kv_used is None else int(kv_used[b]))


def attention_mask(
    q_len: int,
    score: torch.Tensor,
    causal: bool,
    window: int | None,
    scope: str,
    *,
    key_valid: torch.Tensor | None = None,
    kv_used: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    **rules: Any,
) -> torch.Tensor:
    """The mask of the attention: bool [batch, kv_heads, q_len, kv_len]. Each sequence keeps what it
    would keep by itself. The keys are not selected if `window` is None."""
    batch, kv_heads, kv_len = score.shape
    mask = torch.zeros(batch, kv_heads, q_len, kv_len, dtype=torch.bool)
    for b in range(batch):
        one = slice(b, b + 1)
        for queries, keys in pieces_of(b, q_len, kv_len, kv_used, starts):
            valid = None if key_valid is None else key_valid[one, keys]
            kept = None
            if window is not None:
                kept = kept_keys(score[one, :, keys], window, scope, valid, **rules)
            lengths = (queries.stop - queries.start, keys.stop - keys.start)
            mask[one, :, queries, keys] = visible_keys(*lengths, causal, kept, valid)
    return mask


# ---- dropout: docs/algorithm.md in numpy ----


def philox(seed: int, counter: list[np.ndarray]) -> list[np.ndarray]:
    """Philox4x32-10 of Salmon et al., SC 2011: the four words of each counter."""
    low = np.uint64(0xFFFFFFFF)
    x = [np.asarray(word, dtype=np.uint64) & low for word in counter]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        products = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        high, rest = [p >> np.uint64(32) for p in products], [p & low for p in products]
        x = [
            high[1] ^ x[1] ^ np.uint64(key[0]),
            rest[1],
            high[0] ^ x[3] ^ np.uint64(key[1]),
            rest[0],
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return x


def dropout_factors(
    shape: tuple[int, int, int, int], kv_heads: int, dropout_p: float, rng_state: torch.Tensor
) -> torch.Tensor:
    """What dropout multiplies the probabilities by: float64 [batch, q_heads, q_len, kv_len]. The
    last query is aligned with the last key."""
    batch, q_heads, q_len, kv_len = shape
    seed, offset = rng_state.tolist()
    offset_words = [np.uint64(offset & 0xFFFFFFFF), np.uint64(offset >> 32)]
    b, h = np.arange(batch)[:, None, None], np.arange(q_heads)[None, :, None]
    position = np.arange(q_len) + kv_len - q_len
    row_head = 2 * (b * q_heads + h)
    pair_of_rows = np.broadcast_to(position >> 1, (batch, q_heads, q_len))
    flips, adds, *_ = philox(seed, [pair_of_rows, row_head + 0 * pair_of_rows, *offset_words])
    key_head = 2 * (b * kv_heads + h // (q_heads // kv_heads)) + 1
    key = philox(seed, [np.arange(kv_len) + 0 * key_head, key_head, *offset_words])[0]
    words = [x.astype(np.uint32) for x in (flips, adds, key)]
    x = (words[0][..., None] ^ words[2][:, :, None]) * np.uint32(0x7FEB352D) + words[1][..., None]
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    x = x ^ (x >> np.uint32(16))
    is_odd = (position % 2 == 1)[:, None]
    bits = np.where(is_odd, x >> np.uint32(16), x & np.uint32(0xFFFF))
    dropped = math.floor(dropout_p * 65536 + 0.5)
    return torch.from_numpy(bits >= dropped) / (1 - dropped / 65536)


# ---- attention and its gradients ----


def spread_heads(x: torch.Tensor, q_heads: int) -> torch.Tensor:
    """[batch, heads, ...] for each query head. heads is 1, kv_heads or q_heads."""
    return x.repeat_interleave(q_heads // x.shape[1], 1)


def sum_as(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The gradient of a tensor [batch or 1, heads, q_len or 1, kv_len or 1] that was spread."""
    x = x.unflatten(1, (shape[1], -1)).sum(2)
    axes = [axis for axis, size in enumerate(shape) if size == 1]
    return x.sum(axes, keepdim=True) if axes else x


class Heads(NamedTuple):
    """Values that attention and its gradients share, heads first, in one dtype."""

    query: torch.Tensor  # [batch, q_heads, q_len, head_dim]
    key: torch.Tensor  # [batch, q_heads, kv_len, head_dim]: kv heads repeated
    value: torch.Tensor
    mask: torch.Tensor  # bool [batch or 1, q_heads, q_len, kv_len]
    logits: torch.Tensor  # [batch, q_heads, q_len, kv_len], -inf where the mask is false
    slope: torch.Tensor | float  # d logits / d <query, key>


def make_logits(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
) -> Heads:
    q_heads = query.shape[2]
    q = query.to(dtype).transpose(1, 2)
    k, v = (spread_heads(x.to(dtype).transpose(1, 2), q_heads) for x in (key, value))
    mask = spread_heads(mask, q_heads)
    scale = 1 / math.sqrt(query.shape[3]) if softmax_scale is None else softmax_scale
    logits, slope = scale * (q @ k.mT), scale
    if softcap > 0:
        tanh = torch.tanh(logits / softcap)
        logits, slope = softcap * tanh, scale * (1 - tanh * tanh)
    if bias is not None:
        logits = logits + spread_heads(bias.to(dtype), q_heads)[:, :, None, :]
    if attn_bias is not None:
        logits = logits + spread_heads(attn_bias.to(dtype), q_heads)
    return Heads(q, k, v, mask, torch.where(mask, logits, -math.inf), slope)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    dtype: torch.dtype,
    *,
    sink_logit: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
    **options: Any,
) -> Result:
    """Attention under `mask`, with every step in `dtype`. It supports autograd. `factors` are those
    of dropout, and the other options are make_logits()'s."""
    x = make_logits(query, key, value, mask, dtype, **options)
    empty = (x.logits == -math.inf).all(3)
    logits = x.logits.masked_fill(empty[..., None], 0)  # gradients of -inf would be NaN
    lse = torch.logsumexp(logits, 3)
    lse = torch.where((logits == math.inf).any(3), math.nan, lse)
    of_empty = torch.tensor(-math.inf, dtype=dtype)
    if sink_logit is not None:
        sinks = sink_logit.to(dtype)[:, None]
        lse, of_empty = torch.logaddexp(lse, sinks), sinks
    weights = torch.where(x.mask, torch.exp(logits - lse[..., None]), 0)
    weights = weights.masked_fill(empty[..., None], 0)
    weights = weights if factors is None else weights * factors.to(dtype)
    read = x.mask.any(2)[..., None]  # a key that no query keeps is not read
    out = weights @ torch.where(read, x.value, 0)
    return Result(out.transpose(1, 2), torch.where(empty, of_empty, lse))


def attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    results: Tensors,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    sink_logit: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
    **options: Any,
) -> Tensors:
    """dquery, dkey, dvalue and, if they are given, dbias, dattn_bias and dsink_logit by the formula
    of fdma.h, from the rounded out and lse, with every step in `dtype`; the last three are summed
    in float32 at least, dbias row by row. (Autograd in 16 bits is no measure for kernels: it keeps
    forward's weights, so that errors of dP and of its sum cancel. They do not cancel if that sum is
    <dout, out>.)"""
    x = make_logits(query, key, value, mask, dtype, bias=bias, attn_bias=attn_bias, **options)
    group = query.shape[2] // key.shape[2]
    factors = torch.ones((), dtype=dtype) if factors is None else factors.to(dtype)
    out, lse = results
    empty = (x.logits == -math.inf).all(3)
    dout, out = (one.to(dtype).transpose(1, 2) for one in (dout, out))
    delta = (dout * out).sum(3) - (0 if dlse is None else dlse.to(dtype))
    lse = torch.where(empty, 0, lse)  # an empty row keeps no key
    weights = torch.exp(x.logits.to(lse.dtype) - lse[..., None]).to(dtype)
    weights = torch.where(x.mask, weights, 0)
    dlogits = weights * (factors * (dout @ x.value.mT) - delta[..., None])
    dproducts = dlogits * x.slope

    def sum_heads(one: torch.Tensor) -> torch.Tensor:
        return one.unflatten(1, (-1, group)).sum(2)

    dkey, dvalue = dproducts.mT @ x.query, (factors * weights).mT @ dout
    rows = (dproducts @ x.key, sum_heads(dkey), sum_heads(dvalue))
    gradients = tuple(one.transpose(1, 2) for one in rows)
    wide = torch.promote_types(dtype, torch.float32)
    if bias is not None:
        by_row = dlogits.to(wide).unflatten(1, (-1, group)).flatten(2, 3).unbind(2)
        gradients += (sum(by_row[1:], by_row[0]),)
    if attn_bias is not None:
        gradients += (sum_as(dlogits.to(wide), attn_bias.shape).to(dtype),)
    if sink_logit is not None:
        weights = torch.exp(sink_logit.to(lse.dtype)[:, None] - results[1].to(lse.dtype))
        weights = weights.masked_fill(weights.isnan(), 0)  # -inf - -inf: empty, and no sink
        gradients += (-(weights.to(wide) * delta.to(wide)).sum((0, 2)),)
    return gradients


def score(
    value: torch.Tensor,
    dt_proj: torch.Tensor,
    a_coef: torch.Tensor,
    dtype: torch.dtype,
    dt_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores [batch, kv_heads, kv_len], with every step in `dtype`."""
    dt = value.to(dtype).flatten(2) @ dt_proj.to(dtype).T
    dt = dt if dt_bias is None else dt + dt_bias.to(dtype)
    z = a_coef.to(dtype) * (dt.clamp(min=0) + torch.log1p(torch.exp(-dt.abs())))
    return z.transpose(1, 2)


def fused_gradients(
    leaves: dict[str, torch.Tensor],
    mask: torch.Tensor,
    targets: Tensors,
    dtype: torch.dtype,
    bias_form: str = "exp",
    **options: Any,
) -> Tensors:
    """The gradients of flash_dma_attention() for its tensors, by name, under the keys of `mask`;
    0 for those without influence. `targets` are the gradients of out and lse."""
    given = {name: x.detach().to(dtype).clone().requires_grad_() for name, x in leaves.items()}
    query, key, value, dt_proj, a_coef = (given[name] for name in FUSED)
    bias = None
    if bias_form != "none":
        bias = score(value, dt_proj, a_coef, dtype, given.get("dt_bias"))
        bias = bias.exp() if bias_form == "exp" else bias
    options = {"bias": bias, "sink_logit": given.get("sink_logit"), **options}
    results = attention(query, key, value, mask, dtype, **options)
    targets = tuple(x.to(dtype) for x in targets)
    return torch.autograd.grad(
        results, tuple(given.values()), targets, allow_unused=True, materialize_grads=True
    )


# ---- tolerances ----


def largest_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference where `exact` is finite; 0 if it is finite nowhere."""
    finite = torch.isfinite(exact)
    error = (actual.double() - exact)[finite].abs()
    return error.max().item() if error.numel() else 0.0


def assert_same_specials(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """Infinities and NaN must be in the same elements."""
    assert actual.shape == exact.shape
    assert torch.equal(torch.isnan(actual), torch.isnan(exact))
    for infinity in (math.inf, -math.inf):
        assert torch.equal(actual == infinity, exact == infinity)


def plain_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a plain evaluation. Nothing here is more exact than float64, so its error is
    taken from float32, which holds all inputs of the tests, and scaled by the ratio of the rounding
    steps."""
    return torch.float32 if dtype == torch.float64 else dtype


def assert_same(found: torch.Tensor | Tensors, expected: torch.Tensor | Tensors) -> None:
    """A tensor or several are equal in every bit (0 and -0 count as equal)."""
    if isinstance(expected, torch.Tensor):
        found, expected = (found,), (expected,)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected):
        assert torch.equal(one, other)


def assert_within(
    actual: torch.Tensor, exact: torch.Tensor, *plain: torch.Tensor, factor: int = 2
) -> None:
    """`actual` errs at most `factor` times as much as plain evaluations, plus one rounding step.

    In float32 correct kernels come close to this bound. A sum of n products of size t has partial
    sums of size sqrt(k) t after k terms. Each is rounded by up to u of itself, u being half a step,
    so that one accumulator errs by u n t / sqrt(6), root mean square; m accumulators of n / m terms
    err sqrt(m) times less. torch's matrix product has several, a kernel has one: with head_dim 256
    and 1500 seeds, its largest error was 1.2 times the plain error in the mean, and beyond the
    bound in 0.2 % of inputs for lse and 0.6 % for out. Against plain evaluations that add one
    product after the other, as the reference does, these are 0.8 times, 0 % and 0.07 %. So the
    seeds of the inputs are fixed.
    """
    assert exact.numel() > 0, "nothing to compare"
    assert_same_specials(actual, exact)
    size = exact[torch.isfinite(exact)].abs().max().item() if torch.isfinite(exact).any() else 0.0
    step = torch.finfo(actual.dtype).eps
    plain_error = max(largest_error(one, exact) / torch.finfo(one.dtype).eps for one in plain)
    allowed = (factor * plain_error + size) * step
    if actual.dtype == exact.dtype:
        allowed += plain_error * step  # the exact evaluation is itself one more plain one
    error = largest_error(actual, exact)
    assert math.isfinite(allowed)
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def assert_all_within(found: Tensors, exact: Tensors, plain: list[Tensors]) -> None:
    assert len(found) > 0 and {len(found)} == {len(exact), *map(len, plain)}
    for one, want, *others in zip(found, exact, *plain):
        assert_within(one.cpu(), want, *others)


def orders_of(channels: int, numbers: int) -> list[torch.Tensor]:
    """Orders of channels, for plain evaluations of that many numbers. A sum in a single order may
    be accurate by chance, so small outputs use more orders."""
    seeds = range(16 if numbers <= 512 else 4)
    return [torch.randperm(channels, generator=torch.Generator().manual_seed(s)) for s in seeds]


def assert_attention(
    results: Tensors,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    **options: Any,
) -> None:
    """out and lse are within tolerance. The tolerance of lse comes from evaluations in its own
    dtype. Tensor cores truncate sums where a plain evaluation rounds, which doubles the error of
    lse."""
    factor = 4 if results[1].is_cuda else 2
    out, lse = (result.detach().cpu() for result in results)
    exact = attention(query, key, value, mask, torch.float64, **options)
    orders = orders_of(query.shape[3], lse.numel())

    def plain(dtype: torch.dtype) -> list[Result]:
        pairs = [(query[..., order], key[..., order]) for order in orders]
        return [attention(q, k, value, mask, plain_dtype(dtype), **options) for q, k in pairs]

    assert out.dtype == query.dtype
    assert_within(out, exact.out, *(one.out for one in plain(out.dtype)))
    assert_within(lse, exact.lse, *(one.lse for one in plain(lse.dtype)), factor=factor)


def plain_gradients(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    results: Tensors,
    tensors: Tensors,
    mask: torch.Tensor,
    **options: Any,
) -> list[Tensors]:
    """attention_backward() in the dtype of `tensors`, from the out and lse that backward got, with
    the channels in several orders."""
    out, lse = (result.detach().cpu() for result in results)
    sink_logit = options.get("sink_logit")
    numbers = lse.numel() if sink_logit is None else sink_logit.numel()
    found = []
    for order in orders_of(dout.shape[3], numbers):
        back = order.argsort()
        rows = [tensor[..., order] for tensor in (dout, out, *tensors)]
        dtype = plain_dtype(dout.dtype)
        gradients = attention_backward(
            rows[0], dlse, (rows[1], lse), *rows[2:], mask, dtype, **options
        )
        found.append((*(one[..., back] for one in gradients[:3]), *gradients[3:]))
        if sink_logit is not None:
            # Its gradient errs as the given out and lse do: a sample for each order has its own.
            plain_out, _ = attention(*rows[2:], mask, dtype, **options)
            _, plain_lse = attention(*rows[2:], mask, plain_dtype(lse.dtype), **options)
            gradients = attention_backward(
                rows[0], dlse, (plain_out, plain_lse), *rows[2:], mask, dtype, **options
            )
            found.append((*found[-1][:-1], gradients[-1]))
    return found


def plain_fused_gradients(
    leaves: dict[str, torch.Tensor], mask: torch.Tensor, targets: Tensors, **options: Any
) -> list[Tensors]:
    """fused_gradients() in the tensors' dtype, with the channels in many orders, because da_coef
    and ddt_bias are one number per head."""
    dout, dlse = targets
    head_dim, found = dout.shape[3], []

    def shuffle(name: str, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        if name == "dt_proj":
            return x.unflatten(1, (-1, head_dim))[..., order].flatten(1)
        return x[..., order] if x.dim() == 4 else x

    for order in orders_of(head_dim, leaves["a_coef"].numel()):
        shuffled = {name: shuffle(name, x, order) for name, x in leaves.items()}
        given = (mask, (dout[..., order], dlse), dout.dtype)
        gradients = fused_gradients(shuffled, *given, **options)
        back = order.argsort()
        found.append(tuple(shuffle(name, x, back) for name, x in zip(leaves, gradients)))
    return found


def check_ages(layer: Any, x: torch.Tensor, cache: Any, **tolerances: float) -> None:
    """Steps of all three sequences of x [3, 180, hidden] and of some, and a prefill of one, over an
    empty cache, are those of a layer without a cache, though the sequences differ in age."""
    ages = [80, 3, 41]
    layer(x[:, :80], cache=cache, n_tokens=torch.tensor(ages, dtype=torch.int32))
    for chosen, count in ((None, 4), ([2, -1, 0], 4), ([2], 70), ([1, 2], 1)):
        rows = chosen or range(3)
        index = None if chosen is None else torch.tensor(chosen, dtype=torch.int32)
        nexts = torch.stack([x[b, ages[b] : ages[b] + count] for b in rows])
        out = layer(nexts, cache=cache, index=index)
        for n, b in enumerate(rows):
            if b >= 0:
                ages[b] += count
                wanted = layer(x[b : b + 1, : ages[b]])[0, -count:]
                torch.testing.assert_close(out[n], wanted, **tolerances)
    assert cache.keys.seen.tolist() == ages == [88, 8, 120]
