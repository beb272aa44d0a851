"""The functions of the package: attention of each query over its best keys.

The terms are as in fdma.h: batch, q_len, kv_len, q_heads, kv_heads, head_dim, window.

Tensors may have any strides: `x.transpose(1, 2)` of a [batch, heads, len, head_dim] tensor costs
nothing. Only a tensor whose last axis is not contiguous is copied first. Results are contiguous.

All tensors of a call are on the CPU, or all on one CUDA device. A call for a CUDA device is
enqueued on the device's current stream and returns without waiting. On CUDA devices query, key and
value are float16 or bfloat16; on the CPU they are float32, float16 or bfloat16, or float64 for the
slow kernel "reference". On the CPU at most torch.get_num_threads() threads are used.

All functions but select() and attention_probabilities() are differentiable, once, in reverse mode.
Second derivatives and forward mode (torch.func.jvp) raise NotImplementedError. The choice of keys
is not differentiable, and keys that no query keeps have gradients of exactly 0. On the CPU
gradients are bit-equal from run to run; on a CUDA device the gradients of attention are bit-equal
only if `deterministic` or torch.use_deterministic_algorithms(True) is set. The kernels of `backend`
compute gradients too; if a named kernel has none, another kernel of the same backend computes them.

Packed sequences stand one after the other in one batch entry, without padding. `starts`
[sequences + 1] int32 has the position at which each begins and, last, the end of all: [0, 4, 10]
are sequences of 4 and 6. batch is 1, and q_len is kv_len. Each sequence gets the same results as by
itself. Positions from the last start on keep no key. On a device starts are not checked: starts
that descend or are too large are clamped.

Preallocated keys have room for more than there are. `kv_used` [batch] int32 says how many exist.
Sequence b has the first kv_used[b] keys, and gets the same results as if all tensors of keys were
cut to these. Query i stands at position i + kv_used[b] - q_len; a query that stands before all keys
keeps none. Keys from kv_used[b] on are not read, and their gradients are 0. A selection that was
made with kv_used is used with the same kv_used. It is not for packed sequences. Numbers below 0 or
above kv_len are errors; on a device they are clamped.

Under torch.autocast query, key and value are cast to autocast's dtype, as
scaled_dot_product_attention does; scores, biases and lse stay float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import _arguments, _library, _types, ops
from ._arguments import (
    autocast,
    draw_state,
    finish,
    is_added_in_any_order,
    kernel_dropout,
    kernel_scale,
    pad_head_dim,
    refuse_tangents,
    spread,
)
from ._signatures import BiasForm, Scope

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Selection(NamedTuple):
    """The keys that queries keep: the result of select(), and an argument of attention().

    The query at position p keeps key j if j <= p < expiry[j]. (In global scope without causal
    masking every query keeps key j if expiry[j] > j.)

    Attributes:
        expiry: [batch, kv_heads, kv_len] int32: the first position at which a key is no longer
            kept; j itself for a key j that is never kept.
        slot: [batch, kv_heads, kv_len] int32: the number, below window + recent, under which a kept
            key is stored while it is live; -1 for a key that is never kept.
        window: keys that a query keeps, at most, beside the `recent` newest.
        scope: "causal" or "global", as in select().
        recent: keys that it keeps, at most, because they are the newest that it can see.
        sinks: how many of the first keys outrank all others.
        gap: as in select(). When a key leaves because of it, its slot stays empty for a while.
    """

    expiry: torch.Tensor
    slot: torch.Tensor
    window: int
    scope: Scope
    recent: int = 0
    sinks: int = 0
    gap: float | None = None

    def plot(
        self,
        *,
        batch: int = 0,
        kv_head: int = 0,
        rows: str = "keys",
        slot: int | None = None,
        texts: Sequence[str] | None = None,
        axes: Axes | None = None,
    ) -> Axes:
        """Draw which keys the queries of one kv head keep, with matplotlib.

        A kept key is a bar over the positions of the queries that keep it: from its own position to
        its expiry, or over all positions in global scope. Early keys are dark, late ones light.

        Args:
            batch: which sequence.
            kv_head: which kv head.
            rows: what stands in a row: "keys", each key in its own; "slots", keys in the row of
                their slot, one after another.
            slot: optional: the keys of this slot are red.
            texts: optional, a text for each key, such as its token: they stand beside the rows of
                keys, if there are 64 at most.
            axes: matplotlib's Axes to draw into; None for a new figure.

        Returns:
            The Axes; .figure.savefig("picture.png") stores the picture.

        Raises:
            TypeError: an argument of another type.
            ValueError: an index that is out of range, another number of texts, or unknown rows.
            ImportError: matplotlib is not installed.

        Example:
            >>> selection = flash_dmattn.select(torch.randn(1, 2, 100), 8, recent=4)
            >>> axes = selection.plot(kv_head=1, rows="slots")
            >>> axes.get_title()
            'the keys in their 12 slots'
        """
        from . import pictures

        return pictures.plot_selection(
            self, batch=batch, kv_head=kv_head, rows=rows, slot=slot, texts=texts, axes=axes
        )


def get_available_backends() -> list[str]:
    """The values that `backend` can have on this machine, the preferred one first.

    A kernel's whole name, such as "cpu/avx2", may be given as `backend` too. "cuda" is for tensors
    on CUDA devices, the other backends are for tensors on the CPU.

    Returns:
        Names, such as ["cuda", "cpu", "reference"].

    Example:
        >>> "reference" in flash_dmattn.get_available_backends()
        True
    """
    return _library.backends()


def _rules_of(selection: Selection | None) -> tuple[Any, ...]:
    """The fields of a selection in the order of the operators' schemas, `expiry` to `scope`."""
    if selection is None:
        return None, None, 0, 0, 0, "causal"
    if not isinstance(selection, Selection):
        raise _types.refusal("selection", selection, "select()'s result")
    expiry, slot, window, scope, recent, sinks, _ = selection
    if expiry is None or slot is None:
        raise ValueError("selection: its expiry or slot is None, want select()'s result")
    if not isinstance(scope, str) or scope not in _library.SCOPES:
        raise ValueError(f"selection: its scope is {scope!r}, want 'causal' or 'global'")
    return expiry, slot, window, recent, sinks, scope


def score(
    value: torch.Tensor,
    dt_proj: torch.Tensor,
    a_coef: torch.Tensor,
    *,
    dt_bias: torch.Tensor | None = None,
    bias_form: BiasForm = "exp",
    key_valid: torch.Tensor | None = None,
    kv_used: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Score and bias of each key, computed from the value states of all kv heads.

    score = a_coef * softplus(value @ dt_proj^T + dt_bias), where the heads of `value` are
    concatenated.
    The bias is exp(score), score or None, depending on bias_form.

    Args:
        value: [batch, kv_len, kv_heads, head_dim].
        dt_proj: [kv_heads, kv_heads * head_dim], of value's dtype or float32.
        a_coef: [kv_heads], of value's dtype or float32.
        dt_bias: optional [kv_heads], of value's dtype or float32; None for 0.
        bias_form: "exp", "linear" or "none".
        key_valid: optional [batch, kv_len] bool or uint8, false for padding. Such a key is not
            read, and its score is -inf.
        kv_used: optional [batch] int32, how many keys exist; the others count as padding.
        backend: one of get_available_backends() or a kernel's name; None for the fastest.

    Returns:
        score and bias, both [batch, kv_heads, kv_len] float32 (float64 if value is). The bias, in
        nats, is added to logits; it is None if bias_form is "none".

    Raises:
        TypeError: an argument of another type.
        ValueError: shapes or devices that are inconsistent, or an unknown bias_form.
        NotImplementedError: a dtype, head_dim or backend that no kernel on this machine supports.

    Example:
        >>> value = torch.zeros(1, 5, 2, 8)  # 5 keys of 2 heads
        >>> scores, bias = flash_dmattn.score(value, torch.ones(2, 16), torch.ones(2))
        >>> scores[0, 0]  # softplus(0)
        tensor([0.6931, 0.6931, 0.6931, 0.6931, 0.6931])

    Source: arXiv:2508.02124, section 3.
    """
    refuse_tangents("score", value, dt_proj, a_coef, dt_bias)
    value, dt_proj, *rest = autocast("value", (value,), (dt_proj, a_coef, dt_bias))
    (value,), dt_proj, _ = pad_head_dim((value,), dt_proj)
    tensors = (value, dt_proj, *rest)
    scores, bias = ops.SCORE(*tensors, key_valid, kv_used, bias_form, backend)
    return scores, None if bias_form == "none" else bias


def select(
    score: torch.Tensor,
    window: int,
    *,
    recent: int = 0,
    sinks: int = 0,
    gap: float | None = None,
    scope: Scope = "causal",
    key_valid: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    kv_used: torch.Tensor | None = None,
    backend: str | None = None,
) -> Selection:
    """The `window` keys of highest score among those that each query can see.

    Of equal scores the more recent key ranks first; NaN ranks below everything. The result is
    exact: every backend gives the same bits. It is not differentiable.

    Args:
        score: [batch, kv_heads, kv_len] float32 (float64 for the backend "reference").
        window: number of keys that a query keeps, 1 or more; kv_len or more keeps
            all of them.
        recent: number of keys that a query keeps beside these because they are the newest that it
            can see, 0 or more; 0 in global scope. The window then has the best of the older keys,
            and a query keeps window + recent keys. A language model needs the tokens just before a
            query, which scores alone may not keep.
        sinks: number of keys, 0 to window, that outrank all others whatever their scores: the
            first ones of the sequence that are valid. They count in the window.
        gap: of these keys a query keeps only sinks, the `recent` newest, and those whose score is
            at most this far below the highest score of all valid keys up to its position. A finite
            number above 0; None, as it has to be in global scope, leaves no key out.
        scope: "causal": each query ranks the keys up to its own position. "global": all keys are
            ranked once, and every query keeps the best of them.
        key_valid: optional [batch, kv_len] bool or uint8, false for padding, which is never kept.
        starts: optional [sequences + 1] int32, for packed sequences, which stand one after the
            other in a batch of 1: the position at which each begins, and the end of all.
        kv_used: optional [batch] int32: how many keys of each sequence exist; the others are not
            read. Query i has position i + kv_used[b] - q_len.
        backend: as in score().

    Returns:
        A Selection.

    Raises:
        TypeError: an argument of another type.
        ValueError: shapes or devices that are inconsistent, a window, recent, sinks or gap out of
            its range, or an unknown scope.
        NotImplementedError: a dtype or backend that no kernel on this machine supports.

    Example:
        >>> scores = torch.tensor([[[3.0, 1.0, 2.0, 0.0]]])
        >>> flash_dmattn.select(scores, 2).expiry  # key 2 evicts key 1
        tensor([[[4, 2, 4, 3]]], dtype=torch.int32)
        >>> flash_dmattn.select(scores, 1, recent=1).expiry  # the newest and the best older key
        tensor([[[4, 2, 3, 4]]], dtype=torch.int32)
        >>> flash_dmattn.select(scores, 4, gap=2).expiry[0, 0, 3]  # key 3 is 3 below key 0
        tensor(3, dtype=torch.int32)

    Source: arXiv:2508.02124, section 3.
    """
    _arguments.choose("scope", scope)
    no_recent = "with scope 'global'" if scope == "global" else None
    rules = _arguments.check_rules(window, recent, sinks, no_recent=no_recent)
    options = (*rules, scope, _arguments.check_gap(gap, no_recent), backend)
    expiry, slot = ops.SELECT(score, key_valid, starts, kv_used, *options)
    return Selection(expiry, slot, rules[0], scope, *rules[1:], gap)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    selection: Selection | None = None,
    key_valid: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    kv_used: torch.Tensor | None = None,
    sink_logit: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    mask_lists: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    rng_state: torch.Tensor | None = None,
    backend: str | None = None,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query over the keys of `selection`, or over all visible keys without one.

    Args:
        query: [batch, q_len, q_heads, head_dim]; q_heads is a multiple of kv_heads, head_dim 256 at
            most. Query i has position i + kv_len - q_len.
        key: [batch, kv_len, kv_heads, head_dim], of query's dtype.
        value: [batch, kv_len, kv_heads, head_dim], of query's dtype.
        bias: optional [batch, kv_heads, kv_len] float32 (float64 if query is), added to the logits.
        selection: from select(). Its scope must be "global" unless `causal` is set.
        key_valid: optional [batch, kv_len] bool or uint8, false for padding, which is never read.
        starts: optional [sequences + 1] int32, for packed sequences, which stand one after the
            other in a batch of 1: the position at which each begins, and the end of all.
        kv_used: optional [batch] int32: how many keys of each sequence exist; the others are not
            read. Query i has position i + kv_used[b] - q_len.
        sink_logit: optional [q_heads] float32 (float64 if query is): the logit of one more term in
            the sum of each row of a head, which has no value. lse counts it.
        attn_mask: optional bool or uint8, false where a query does not attend to a key:
            [batch or 1, q_heads or kv_heads or 1, q_len or 1, kv_len or 1], broadcast. On a CUDA
            device also of 16-bit numbers, true where they are above 0.
        attn_bias: optional, with axes as attn_mask, of query's dtype or float32: added to the
            logits of kept keys and not read elsewhere.
        mask_lists: optional, from mask_lists(): the lists of attn_mask, so that it is not read.
        causal: a query sees only keys at positions up to its own.
        softmax_scale: multiplies <query, key>; None for 1 / sqrt(head_dim).
        softcap: c > 0 turns the scaled product x into c * tanh(x / c), before the bias is added; 0
            for none.
        dropout_p: probability with which each of the probabilities becomes 0; the others are
            divided by 1 - dropout_p. It is rounded to a multiple of 2^-16; 1 drops all. lse is
            without dropout.
        generator: on query's device: dropout draws two numbers from it. None for the default one,
            which torch.manual_seed() sets.
        rng_state: optional [2] int64 on query's device, in place of the numbers that dropout draws:
            calls with the same rng_state drop the same probabilities.
        backend: as in score().
        deterministic: make gradients bit-equal from run to run on CUDA devices as well.

    Returns:
        out [batch, q_len, q_heads, head_dim] of query's dtype, and lse [batch, q_heads, q_len],
        float32 (float64 if query is), in nats. A query that keeps no key has out = 0, and
        lse = -inf or its sink_logit.

    Raises:
        TypeError: an argument of another type.
        ValueError: shapes, devices or options that are inconsistent, or a selection made for
            other keys.
        NotImplementedError: a dtype, head_dim or backend that no kernel on this machine supports.

    Example:
        >>> x = torch.randn(1, 6, 2, 8)
        >>> selection = flash_dmattn.select(torch.randn(1, 2, 6), 3)
        >>> out, lse = flash_dmattn.attention(x, x, x, selection=selection, causal=True)
        >>> out.shape, lse.shape
        (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 6]))

    Source: arXiv:2205.14135, arXiv:2508.02124.
    """
    refuse_tangents("attention", query, key, value, bias, sink_logit, attn_bias)
    rows, _, head_dim = pad_head_dim(autocast("query", (query, key, value)))
    rng_state = draw_state(query, dropout_p, generator, rng_state)
    kernel_p, rng_state = kernel_dropout(dropout_p, rng_state)
    if attn_bias is not None and is_added_in_any_order(attn_bias, deterministic):
        attn_bias = spread(attn_bias, *rows)
    out, lse = ops.ATTENTION(
        *rows,
        *(bias, key_valid, starts, kv_used, sink_logit, rng_state, attn_mask, attn_bias),
        mask_lists,
        *_rules_of(selection),
        causal,
        kernel_scale(softmax_scale, head_dim),
        softcap,
        kernel_p,
        deterministic,
        backend,
    )
    return finish(out, head_dim, dropout_p), lse


def merge(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys, from attention() over each of them.

    lse = log(exp(lse_a) + exp(lse_b)), out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b.

    Args:
        out_a: [batch, q_len, q_heads, head_dim], attention over the first set.
        lse_a: [batch, q_heads, q_len] float32 (float64 if out_a is), in nats. Where it is -inf the
            query has no key in this set, and its out_a is not read.
        out_b: like out_a, over the second set.
        lse_b: like lse_a.
        backend: as in score().

    Returns:
        out and lse, shaped as out_a and lse_a.

    Raises:
        TypeError: an argument of another type.
        ValueError: shapes, dtypes or devices that are inconsistent.
        NotImplementedError: a dtype, head_dim or backend that no kernel on this machine supports.

    Example:
        >>> query, key = torch.randn(1, 4, 2, 8), torch.randn(1, 10, 2, 8)
        >>> halves = [flash_dmattn.attention(query, x, x) for x in key.split(5, dim=1)]
        >>> out, lse = flash_dmattn.merge(*halves[0], *halves[1])
        >>> torch.allclose(out, flash_dmattn.attention(query, key, key)[0], atol=1e-5)
        True

    Source: arXiv:2205.14135, section 3.1.
    """
    refuse_tangents("merge", out_a, lse_a, out_b, lse_b)
    (out_a, out_b), _, head_dim = pad_head_dim((out_a, out_b))
    out, lse = ops.MERGE(out_a, lse_a, out_b, lse_b, backend)
    return finish(out, head_dim), lse
