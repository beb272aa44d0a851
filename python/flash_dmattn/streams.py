"""Sequences that come in pieces: attention over carried keys, and decoding over a cache of them.

A stream keeps the carried keys: at most window + recent of its tokens for each kv head, however
many there are. fdma.h, "Streams", says which these are and why no others are needed.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch

from . import _arguments, _call, _types, cache_state, ops
from ._arguments import MaybeTensor, autocast, finish, kernel_scale, pad_head_dim, refuse_tangents
from ._signatures import BiasForm, DecodeKeywords

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Unpack

TOKENS_MAX = 64  # new tokens in one decode()


class KeyCache(NamedTuple):
    """The carried keys of many streams, each in a sequence of the cache: fdma_cache of fdma.h.

    Its size does not depend on how many tokens have passed. decode() writes to its tensors. In an
    empty sequence all positions are -1 and `seen` is 0; what the other tensors hold does not
    matter. DynamicMaskCache makes one for all layers of a model.

    Args:
        key: [sequences, rows, kv_heads, head_dim], where rows = window + recent, and head_dim is
            the calls' head_dim rounded up to a multiple of 8; any strides, but the rows of a head
            are read fastest if they are adjacent.
        value: like key.
        bias: [sequences, kv_heads, rows] float32.
        score: [sequences, kv_heads, rows] float32.
        position: [sequences, kv_heads, rows] int32: of each key in its stream; -1 marks an empty
            row.
        seen: [sequences] int32: the number of tokens of each stream so far.
        window, recent, sinks: as in select().
        page_table: optional [sequences, n] int32. With one, `key` and `value` are pools [pages,
            page_len, kv_heads, head_dim], page_len a power of 2, and row r of sequence s is row
            r % page_len of page page_table[s, r // page_len]. Rows fill in the order 0, 1, ...,
            so that a sequence of n tokens needs pages for min(n, rows) rows. The caller sets these
            before a call. A number that is no page, such as -1, is a missing page: no query attends
            to its keys, and a key that would enter it is lost. See fdma_cache in fdma.h.

    Raises:
        TypeError: a field that is missing.

    Example:
        >>> rows = torch.zeros(1, 4, 2, 8)  # one sequence, window 4, 2 heads
        >>> numbers = torch.zeros(1, 2, 4)
        >>> empty = torch.full((1, 2, 4), -1, dtype=torch.int32)
        >>> seen = torch.zeros(1, dtype=torch.int32)
        >>> tensors = rows, rows.clone(), numbers, numbers.clone(), empty, seen
        >>> cache = flash_dmattn.KeyCache(*tensors, window=4)

    Source: docs/algorithm.md, streams.
    """

    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor
    score: torch.Tensor
    position: torch.Tensor
    seen: torch.Tensor
    window: int
    recent: int = 0
    sinks: int = 0
    page_table: torch.Tensor | None = None

    def save(self, sequence: int) -> bytes:
        """A sequence as bytes, so that it can go on later, or in another process or machine.

        They hold the rows that have keys, the sizes, rules and dtype of the cache, and a checksum.
        A cache on a CUDA device is waited for.

        Raises:
            TypeError: sequence is not an int.
            ValueError: there is no such sequence.
            NotImplementedError: a page_table on a CUDA device.

        Example:
            >>> cache = flash_dmattn.DynamicMaskCache(1, 2, kv_heads=2, head_dim=8, window=4)
            >>> state = cache.keys.save(0)
            >>> cache.keys.restore(1, state)
        """
        return cache_state.save(self, sequence)

    def restore(self, sequence: int, state: bytes | bytearray | memoryview) -> None:
        """Make a sequence what another one was when it was saved; it goes on with the same bits.

        The other cache had the same sizes, rules and dtype, and the same bias_form in its calls; it
        may have had more sequences, and been on another device. A state that is refused changes
        nothing.

        Raises:
            TypeError: sequence is not an int, or state is not bytes.
            ValueError: there is no such sequence; a state that is truncated or damaged, or of a
                cache of other sizes, rules or dtype.
            NotImplementedError: a state of another version; a page_table on a CUDA device.
        """
        cache_state.restore(self, sequence, state)


# Functions, because torch.compile of PyTorch 2.4 does not trace properties of a NamedTuple.


def tensors_of(cache: KeyCache) -> tuple[MaybeTensor, ...]:
    """The tensors that operators take, in their order."""
    return (*cache[:6], cache.page_table)


def rules_of(cache: KeyCache) -> tuple[int, int, int]:
    """window, recent and sinks."""
    return cache.window, cache.recent, cache.sinks


def counts(name: str, count: int | MaybeTensor, like: torch.Tensor) -> MaybeTensor:
    """`count` as int32 [batch], on the device of `like` [batch, len, heads, head_dim].

    Raises:
        TypeError: it is neither a tensor nor an int.
        ValueError: it is out of its range, 0 to the length of `like`.
    """
    if count is None or isinstance(count, torch.Tensor):
        return count
    number = _arguments.check_int(name, count)
    if like.dim() != 4:
        return None  # the call refuses it
    if not torch.compiler.is_compiling() and not 0 <= number <= like.shape[1]:
        raise ValueError(f"{name}: is {number}, want 0 to {like.shape[1]}")
    return torch.full((like.shape[0],), number, dtype=torch.int32, device=like.device)


@overload
def decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: KeyCache,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[DecodeKeywords],
) -> torch.Tensor: ...


@overload
def decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: KeyCache,
    *,
    return_lse: Literal[True],
    **options: Unpack[DecodeKeywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: KeyCache,
    *,
    return_lse: bool = ...,
    **options: Unpack[DecodeKeywords],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: KeyCache,
    *,
    dt_proj: torch.Tensor | None = None,
    a_coef: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    score: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
    n_tokens: torch.Tensor | int | None = None,
    commit: torch.Tensor | int | None = None,
    sink_logit: torch.Tensor | None = None,
    bias_form: BiasForm = "exp",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    batch_invariant: bool = False,
    backend: str | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of new tokens over a cache and each other; then the tokens enter the cache.

    A query attends to the same keys as in the whole sequence. The time does not depend on how many
    tokens have passed. The call writes to the cache's tensors, and has no gradient. All numbers
    stay on the device: the host waits for none.

    Args:
        query: [batch, q_len, q_heads, head_dim], q_len at most new_len: query i stands beside token
            i + new_len - q_len. With q_len = 0 tokens are only committed.
        key: [batch, new_len, kv_heads, head_dim], new_len at most 64.
        value: [batch, new_len, kv_heads, head_dim].
        cache: of query's dtype, on its device.
        dt_proj: as in score(), with a_coef; or else `score` is given.
        a_coef: as in score().
        dt_bias: as in score(); None for 0.
        score: [batch, kv_heads, new_len] float32: the score of each new token.
        index: optional [batch] int32: the sequence of the cache for each stream; -1: none, and out
            is 0; None for 0, 1, ...
        n_tokens: [batch] int32 or an int: the first n are tokens, the rest is not read, and its out
            is 0; None for new_len.
        commit: [batch] int32 or an int: the first n enter the cache, the others leave no trace;
            None for all tokens.
        sink_logit: optional [q_heads] float32, as in attention().
        bias_form: as in score(): the same in every call on a cache.
        softmax_scale, softcap: as in attention().
        batch_invariant: a stream has the same bits in a batch of any size. They are the same
            anyhow but on GPUs of compute capability 9.0, where this may take more time.
        backend: as in score().
        return_lse: also return lse.

    Returns:
        out [batch, q_len, q_heads, head_dim]; with return_lse a pair of out and lse [batch,
        q_heads, q_len] float32, in nats.

    Raises:
        TypeError: a query or cache of another type, or an n_tokens or commit that is no int.
        ValueError: shapes, devices or options that are inconsistent; weights beside a score; more
            than 64 new tokens; an n_tokens or commit out of its range as an int, and on the CPU
            also an index, n_tokens or commit.
        NotImplementedError: a dtype, head_dim, device or backend that no kernel supports.

    Example:
        >>> cache = flash_dmattn.DynamicMaskCache(1, 1, kv_heads=2, head_dim=8, window=4)
        >>> query, key, value = torch.randn(1, 3, 4, 8), *torch.randn(2, 1, 3, 2, 8)
        >>> scores = torch.randn(1, 2, 3)
        >>> out = flash_dmattn.decode(query, key, value, cache.keys, score=scores, commit=2)
        >>> out.shape, cache.keys.seen
        (torch.Size([1, 3, 4, 8]), tensor([2], dtype=torch.int32))

    Source: docs/algorithm.md, streams.
    """
    if not isinstance(cache, KeyCache):
        raise _types.refusal("cache", cache, "a KeyCache")
    _types.check_tensor("key", key)
    _types.check_flag("return_lse", return_lse)
    _types.check_flag("batch_invariant", batch_invariant)
    if score is None:
        for name, weight in (("dt_proj", dt_proj), ("a_coef", a_coef)):
            if weight is None:
                raise ValueError(f"{name}: is None, want a torch.Tensor, or else a score")
    refuse_tangents("decode", query, key, value, dt_proj, a_coef, dt_bias, score, sink_logit)
    query, key, value, dt_proj, *rest = autocast(
        "query", (query, key, value), (dt_proj, a_coef, dt_bias)
    )
    rows, dt_proj, head_dim = pad_head_dim((query, key, value), dt_proj)
    if head_dim is not None and cache.key.shape[-1] == head_dim:
        count, wanted = _types.counted(head_dim, "element"), "head_dim is padded to a multiple of 8"
        raise ValueError(f"cache.key: axis 3 has {count}, want {rows[0].shape[-1]}: {wanted}")
    out, lse = ops.DECODE(
        *rows,
        dt_proj,
        *rest,
        score,
        index,
        counts("n_tokens", n_tokens, key),
        counts("commit", commit, key),
        sink_logit,
        *tensors_of(cache),
        *rules_of(cache),
        batch_invariant,
        bias_form,
        kernel_scale(softmax_scale, head_dim),
        softcap,
        backend,
    )
    out = finish(out, head_dim)
    return (out, lse) if return_lse else out


class Tokens(NamedTuple):
    """The next tokens of some sequences, and what to do with them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    weights: tuple[MaybeTensor, ...]  # dt_proj, a_coef and dt_bias
    index: MaybeTensor  # type: ignore[assignment]  # hides tuple.index
    key_valid: MaybeTensor
    n_tokens: MaybeTensor
    sink_logit: MaybeTensor
    options: tuple[str, float, float, str | None]  # bias_form, scale, softcap and backend
    score: MaybeTensor = None  # [batch, kv_heads, len], in place of weights


def prefill(
    cache: KeyCache, where: torch.Tensor, carried: KeyCache | None, tokens: Tokens
) -> torch.Tensor:
    """Attention of the next tokens of the streams in the sequences `where` of `cache`, any number
    of them, over [carried | their own keys]: out. The keys that are still kept enter the cache.
    `carried` is the cache of these sequences alone; None: the sequences count as empty. Tokens from
    n_tokens on are padding, which leaves no trace.
    """
    key, value, key_valid, n_tokens = tokens.key, tokens.value, tokens.key_valid, tokens.n_tokens
    seen = None
    if n_tokens is not None:
        is_token = torch.arange(key.shape[1], device=key.device) < n_tokens[:, None]
        key_valid = is_token if key_valid is None else is_token & key_valid.bool()
        seen = n_tokens.clamp(0, key.shape[1])
        seen = seen if carried is None else carried.seen + seen
    attend = attend_by_weights if tokens.score is None else attend_by_score
    out, *kept = attend(tokens._replace(key_valid=key_valid), carried, rules_of(cache))
    with torch.no_grad():
        rows = (key, value, kept[0], where, *kept[1:])
        ops.CACHE_STORE(*rows, *tensors_of(cache), *rules_of(cache), tokens.options[0], None)
        if seen is not None:
            with cache_state.writing_to(cache):
                cache.seen.index_copy_(0, where.long(), seen.to(torch.int32))
    return out


def attend_by_weights(
    tokens: Tokens, carried: KeyCache | None, rules: tuple[int, int, int]
) -> tuple[torch.Tensor, ...]:
    """out, and the score, expiry and slot of the keys, with scores from the values."""
    query, key, value, weights, _, key_valid, _, sink_logit, options, _ = tokens
    tables: tuple[MaybeTensor, ...] = (None,) * 6
    if carried is not None:
        bias = None if options[0] == "none" else carried.bias
        tables = carried.score, carried.position, carried.seen, carried.key, carried.value, bias
    inputs = (query, key, value, *weights, key_valid, sink_logit)
    return ops.PREFILL(*inputs, *tables, *rules, *options)


def attend_by_score(
    tokens: Tokens, carried: KeyCache | None, rules: tuple[int, int, int]
) -> tuple[torch.Tensor, ...]:
    """The same with the tokens' own scores."""
    query, key, value, _, _, key_valid, _, sink_logit, options, score = tokens
    _, scale, softcap, backend = options
    assert score is not None
    scope = (*rules, "causal")
    bias = bias_of(score, options[0])
    if carried is None:
        kept = ops.SELECT(score, key_valid, None, None, *scope, 0.0, backend)
        rows: tuple[Any, ...] = (query, key, value, bias, key_valid, None, None, sink_logit)
        rows = (*rows, *(None,) * 4)  # rng_state, attn_mask, attn_bias, mask_lists
        out, _ = ops.ATTENTION(*rows, *kept, *scope, True, scale, softcap, 0.0, False, backend)
    else:
        table = (carried.score, carried.position, carried.seen)
        kept = ops.SELECT_CARRIED(score, key_valid, *table, *scope, backend)
        before = None if bias is None else carried.bias
        rows = (query, key, value, bias, carried.key, carried.value, before, sink_logit)
        numbers = (True, scale, softcap, False, backend)
        out, _ = ops.CARRIED_ATTENTION(*rows, *kept, *scope, *numbers)
    return out, score, *kept


def bias_of(score: torch.Tensor, bias_form: str) -> MaybeTensor:
    """The bias of keys with these scores."""
    if bias_form == "none":
        return None
    return score.exp() if bias_form == "exp" else score


# ---- packed tokens of many streams ----


class Requests(NamedTuple):
    """Streams whose next tokens stand one after the other, in memory of the host."""

    starts: ctypes.Array[ctypes.c_int32]  # of each request, and the end of the last one
    sequences: ctypes.Array[ctypes.c_int32]  # of the cache, of each request; -1: none

    @staticmethod
    def of(starts: Sequence[int], sequences: Sequence[int]) -> Requests:
        if len(starts) != len(sequences) + 1:
            raise ValueError(f"starts: has {len(starts)} numbers, want {len(sequences) + 1}")
        return Requests(
            (ctypes.c_int32 * len(starts))(*starts), (ctypes.c_int32 * len(sequences))(*sequences)
        )


_PACKED = tuple(f"packed_{name}" for name in ("query", "key", "value", "score", "out"))
_TABLES = tuple(f"cache_{name}" for name in ("bias", "score", "position", "seen"))
PREFILL_PACKED = _call.Operation(
    "prefill_packed",
    "prefill",
    (*_PACKED, "cache_key", "cache_value", *_TABLES, "cache_page_table"),
    ("window", "recent", "sinks", "requests", "bias_form", "softmax_scale"),
    (),
    mutated=("packed_out", "cache_key", "cache_value", *_TABLES),
)


def prefill_packed(
    rows: tuple[torch.Tensor, ...],
    score: torch.Tensor,
    out: torch.Tensor,
    cache: KeyCache,
    requests: Requests,
    bias_form: str,
    scale: float,
) -> None:
    """fdma_prefill(): attention of the next tokens of the requests, any number of each, over the
    cache, which they then enter, behind the tokens that are in their sequences.

    rows: query [tokens, q_heads, head_dim], key and value [tokens, kv_heads, head_dim]; score:
    [kv_heads, tokens]; out: like query; rows of requests without a sequence, and from the last
    start on, are not written.

    Raises:
        ValueError, NotImplementedError: as decode(), and if two requests have one sequence.
    """
    options = (*rules_of(cache), len(requests.sequences), bias_form, scale)
    given = (*rows, score, out, *tensors_of(cache))
    lists = {"starts": requests.starts, "index": requests.sequences}
    _call.call_with_lists(PREFILL_PACKED, given, options, lists)
