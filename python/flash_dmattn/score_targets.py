"""A loss that trains scores by the attention that keys would get."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import linear, log_softmax

from . import _arguments, _types
from ._arguments import check_dtype, check_same_device
from ._sequences import list_starts
from .functional import attention
from .probabilities import attention_probabilities

PROBABILITIES = 1 << 26  # in memory at once, but at least one query's


def score_target_loss(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dt_proj: torch.Tensor,
    *,
    recent: int,
    sinks: int = 0,
    heads: Sequence[int] | None = None,
    key_valid: torch.Tensor | None = None,
    starts: torch.Tensor | Sequence[int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """A loss for dt_proj: scores should rank keys by the attention that later queries give them.

    Through the bias of attention a score learns only from queries that keep its key, and only as
    far as it lowers the loss of that step. This loss compares scores with the attention that
    queries would give if they kept all keys. For each query head, take the largest probability that
    any query gives to a key in causal attention to all keys of its sequence; queries to which the
    key is one of the `recent` newest do not count. The target of a key is the sum of the squares of
    these probabilities over the query heads of its kv head. The loss is the cross-entropy of the
    softmax over keys of dt, the scores before softplus, with the targets divided by their sum.

    Add it to the loss of a model, or give dt_proj an optimizer of its own, in every step or only in
    some. It has a gradient for dt_proj alone. Scores rank keys in the order of dt only if a_coef is
    positive: with 0 all scores are equal, and with a negative number their order is reversed. So
    let a_coef be a small positive constant for these heads, such as 0.005. Then scores choose keys
    and hardly change their weights. dt_bias and sink logits have no influence.

    It computes all pairs of a query and a key, for one sequence after the other. The host reads
    key_valid and starts: it waits for a device that has them, and no CUDA graph can capture the
    call. Under autocast, call it where attention is called, as query and key have to be of a dtype
    that attention() supports on their device.

    Args:
        query: [batch, len, q_heads, head_dim], as attention() gets it (after rotary embedding).
        key: [batch, len, kv_heads, head_dim].
        value: [batch, len, kv_heads, head_dim].
        dt_proj: [kv_heads, kv_heads * head_dim], as in score().
        recent: how many newest keys a query keeps whatever their scores are. With key_valid or
            starts a sequence of at most recent + sinks valid tokens has no part in the loss;
            without them len has to be greater than that.
        sinks: how many first keys all queries keep; they have no targets.
        heads: the kv heads whose scores learn; None: all. The others have no part in the loss.
        key_valid: optional [batch, len] bool or uint8, false for padding, which counts neither as
            keys nor as queries.
        starts: optional [sequences + 1] int32 or a list, for packed sequences: batch is 1, and
            sequence n has the tokens starts[n] to starts[n + 1] - 1. Tokens from starts[-1] on
            belong to no sequence.
        softmax_scale, softcap: as in attention().
        backend: as in score().

    Returns:
        One number, in float32 (float64 if query is): the mean over these heads and over the
        sequences that have a part in the loss, whatever their lengths; 0 if there are none.

    Raises:
        TypeError: a query, key, value, dt_proj or key_valid that is not a tensor, or a number that
            is no int.
        ValueError: shapes that are inconsistent, a negative number, len that is not greater than
            recent + sinks, no heads, a head that is not there or is given twice, or starts that
            do not begin at 0, descend, end after len, or are for more than a batch of 1.
        NotImplementedError: a dtype, head_dim or backend that no kernel on this machine supports.

    Example:
        >>> x = torch.randn(1, 20, 2, 8)
        >>> dt_proj = torch.zeros(2, 16, requires_grad=True)
        >>> loss = flash_dmattn.score_target_loss(x, x, x, dt_proj, recent=4)
        >>> loss.backward()
        >>> dt_proj.grad.shape
        torch.Size([2, 16])

    Source: docs/quality.md, where models were trained with it.
    """
    if not torch.compiler.is_compiling():  # PyTorch 2.11 does not trace locals()
        _types.check_call(score_target_loss, locals())
    tensors = {"query": query, "key": key, "value": value, "dt_proj": dt_proj}
    if key_valid is not None:
        tensors["key_valid"] = key_valid
    check_same_device(tensors)
    if isinstance(starts, torch.Tensor):
        tensors["starts"] = starts
    _check_shapes(tensors)
    for name, tensor in tensors.items():
        check_dtype(name, tensor)
    length, kv_heads = key.shape[1:3]
    for name, count in (("recent", recent), ("sinks", sinks)):
        if _arguments.check_int(name, count) < 0:
            raise ValueError(f"{name}: is {count}, want 0 or more")
    if length <= recent + sinks and key_valid is None and starts is None:
        raise ValueError(f"len: is {length}, want more than recent + sinks, {recent + sinks}")
    chosen = _chosen_heads(heads, kv_heads)
    losses = []
    for b, tokens in _valid_tokens(key.shape[0], length, starts, key_valid):
        q, k, v = (one.detach()[b, tokens] for one in (query, key, value))
        if len(k) <= recent + sinks:
            continue
        own = q.unflatten(1, (kv_heads, -1))[:, chosen].flatten(1, 2), k[:, chosen]
        with torch.no_grad():
            target = log_targets(*own, recent, softmax_scale, softcap, backend)[:, sinks:].softmax(
                -1
            )
        dtype = target.dtype
        states = v[sinks : len(k) - recent].flatten(1).to(dtype)
        with torch.autocast(query.device.type, enabled=False):
            dt = linear(states, dt_proj[chosen].to(dtype)).T
        losses.append(-(target * log_softmax(dt, -1)).sum(-1).mean())
    return torch.stack(losses).mean() if losses else no_loss(dt_proj, query.dtype)


def no_loss(dt_proj: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A loss of 0, with a gradient of zeros for dt_proj, for a query of this dtype."""
    return dt_proj[:0].sum().to(_arguments.wide(dtype))


def _valid_tokens(
    batch: int,
    length: int,
    starts: torch.Tensor | Sequence[int] | None,
    key_valid: torch.Tensor | None,
) -> Iterator[tuple[int, slice | torch.Tensor]]:
    """Yields the batch entry of each sequence, and its valid tokens."""
    if starts is None:
        spans = [(b, 0, length) for b in range(batch)]
    else:
        if batch != 1:
            raise ValueError(f"query: batch is {batch}, want 1 with starts")
        found = list_starts(starts.tolist() if isinstance(starts, torch.Tensor) else starts)
        assert found is not None
        if found[-1] > length:
            raise ValueError(f"starts: ends with {found[-1]}, want at most len, {length}")
        spans = [(0, begin, end) for begin, end in zip(found, found[1:])]
    if key_valid is None:
        yield from ((b, slice(begin, end)) for b, begin, end in spans)
        return
    valid = key_valid.cpu()
    for b, begin, end in spans:
        yield b, (begin + valid[b, begin:end].nonzero()[:, 0]).to(key_valid.device)


def _chosen_heads(heads: Sequence[int] | None, kv_heads: int) -> list[int]:
    given = range(kv_heads) if heads is None else heads
    chosen = [_arguments.check_int("heads", head) for head in given]
    for head in chosen:
        if not 0 <= head < kv_heads:
            raise ValueError(f"heads: has {head}, want 0 to {kv_heads - 1}")
    if not chosen:
        raise ValueError("heads: is empty, want one or more")
    if len({*chosen}) < len(chosen):
        raise ValueError(f"heads: is {chosen}, want each head once")
    return chosen


def _check_shapes(tensors: dict[str, torch.Tensor]) -> None:
    sizes = _arguments.bind_sizes(tensors)
    _arguments.check_sizes(tensors, sizes)
    q_len, kv_len, q_heads, kv_heads = (
        sizes[name] for name in ("q_len", "kv_len", "q_heads", "kv_heads")
    )
    if q_len != kv_len:
        found = _types.counted(kv_len, "element")
        raise ValueError(f"key: axis 1 has {found}, want {q_len}, as query has")
    if kv_heads == 0 or q_heads % kv_heads != 0:
        found = _types.counted(q_heads, "head")
        raise ValueError(f"query: has {found}, want a multiple of key's, {kv_heads}")
    if sizes["batch"] == 0:
        raise ValueError("query: batch is 0, want 1 or more")


def log_targets(
    query: torch.Tensor,
    key: torch.Tensor,
    recent: int,
    softmax_scale: float | None,
    softcap: float,
    backend: str | None,
) -> torch.Tensor:
    """The log of the target of each key that is not recent to the last query,
    [kv_heads, len - recent], from query [len, q_heads, head_dim] and key
    [len, kv_heads, head_dim]."""
    length, kv_heads, _ = key.shape
    rules: dict[str, Any] = {"causal": True, "softmax_scale": softmax_scale}
    rules = {**rules, "softcap": softcap, "backend": backend}
    query, key = query[None], key[None]
    _, lse = attention(query, key, key, **rules)
    largest = lse.new_full((query.shape[2], length), torch.finfo(lse.dtype).tiny)
    queries = max(1, PROBABILITIES // (length * query.shape[2]))
    for begin in range(0, length, queries):
        end = min(begin + queries, length)
        own = query[:, begin:end], key[:, :end], lse[..., begin:end]
        probability = attention_probabilities(*own, **rules)[0]
        old = largest[:, : max(0, end - recent)]  # keys that are not recent to the last query
        of_piece = probability.tril(begin - recent).amax(1)
        old.copy_(torch.maximum(old, of_piece[:, : old.shape[1]]))
    return (2 * largest[:, : length - recent].log()).unflatten(0, (kv_heads, -1)).logsumexp(1)
