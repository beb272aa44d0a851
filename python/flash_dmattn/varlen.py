"""Packed sequences, with the arguments that the functions of flash-attn and flash-dmattn have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from . import _arguments, _types, dmattn
from ._arguments import MaybeTensor, as_bool_mask, call_renamed, check_no_bool, choose_scale
from ._orders import has_scale, in_any_order
from ._signatures import BiasForm, Scope, VarlenKeywords
from .fused import flash_dma_attention
from .options import DynamicMaskOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

WINDOW = 2048  # default of keep_window_size

# Orders of positional arguments: flash-attn's, and flash-dmattn's, which had a mask and a bias
# before the positions up to version 1.0.6.
ROWS = ("q", "k", "v")
POSITIONS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
FLASH_ATTN = (*ROWS, *POSITIONS, "dropout_p", "softmax_scale", "causal")
OPTIONS = ("scale", "is_causal", "softcap", "deterministic", "return_attn_probs", "block_table")
DMATTN = (*ROWS, *POSITIONS, *OPTIONS)
DMATTN_MASKED = (*ROWS, "attn_mask", "attn_bias", *POSITIONS, *OPTIONS)


def _order_of(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[str, ...]:
    if len(args) <= 3:
        return FLASH_ATTN
    is_pairs = isinstance(args[3], torch.Tensor) and args[3].dim() > 1
    if args[3] is None or is_pairs:
        return DMATTN_MASKED
    return DMATTN if len(args) > 7 and has_scale(args[7:], named) else FLASH_ATTN


def _return_lse(given: dict[str, Any]) -> None:
    """flash-dmattn's function returns lse if it returns probabilities."""
    if given.get("return_attn_probs"):
        given["return_lse"] = True


def _starts_of(cu_seqlens_q: Any, cu_seqlens_k: Any) -> torch.Tensor:
    """`starts` of attention(); cumsum() makes int64 of the int32 lengths that it sums up."""
    for name, one in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _types.check_tensor(name, one)
        if one.dtype not in (torch.int32, torch.int64):
            dtype = _arguments.name_of_dtype(one.dtype)
            raise NotImplementedError(f"{name}: dtype is {dtype}, want int32 or int64")
    if cu_seqlens_k.device != cu_seqlens_q.device:
        where = f"want {cu_seqlens_q.device}, where cu_seqlens_q is"
        raise ValueError(f"cu_seqlens_k: is on {cu_seqlens_k.device}, {where}")
    same = cu_seqlens_q is cu_seqlens_k or (
        cu_seqlens_q.shape == cu_seqlens_k.shape and torch.equal(cu_seqlens_q, cu_seqlens_k)
    )
    if not same:
        raise ValueError(
            "cu_seqlens_k: differs from cu_seqlens_q, want the same: packed sequences attend to "
            "themselves"
        )
    return _arguments.starts_in_int32(cu_seqlens_q)


def _pairs_of_total(
    pairs: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor | None:
    """A mask or a bias [heads, total, total]. flash-dmattn has [total, heads, max_seqlen_k], where
    number j of a row belongs to key j of the row's sequence."""
    if pairs is None or not isinstance(pairs, torch.Tensor) or pairs.dim() != 3:
        return pairs  # the call refuses others than None
    total, heads = q.shape[0], (q.shape[1], k.shape[1], 1)
    rows, columns = pairs.shape[1:]
    if pairs.shape[0] in heads and rows in (1, total) and columns in (1, total):
        return pairs
    if pairs.shape[0] != total or rows not in heads:
        return pairs
    at = torch.arange(total, dtype=starts.dtype, device=starts.device)
    begin = starts[torch.searchsorted(starts, at, right=True) - 1]
    column = (at - begin[:, None]).clamp(0, columns - 1).long()
    return pairs.transpose(0, 1).gather(2, column.expand(rows, -1, -1))


def _is_causal(causal: bool, is_causal: bool | None) -> bool:
    _types.check_flag("causal", causal)
    if is_causal is not None:
        dmattn.check_flag("is_causal", is_causal)
    if is_causal is not None and causal and not is_causal:
        raise ValueError("is_causal: is False, want None or True, as causal is True")
    return bool(causal or is_causal)


def _refuse_pairs(attn_mask: torch.Tensor | None, attn_bias: torch.Tensor | None) -> None:
    for name, pairs in (("attn_mask", attn_mask), ("attn_bias", attn_bias)):
        if pairs is not None:
            raise ValueError(f"{name}: is given, want None with dt_proj, which selects the keys")


def _pairs_with_batch(attn_mask: MaybeTensor, attn_bias: MaybeTensor) -> tuple[MaybeTensor, ...]:
    pairs = as_bool_mask(attn_mask), attn_bias
    _types.check_tensors(dict(zip(("attn_mask", "attn_bias"), pairs)))
    return tuple(None if one is None else one[None] for one in pairs)


def _with_batch_axis(name: str, row: torch.Tensor) -> torch.Tensor:
    _types.check_tensor(name, row)
    if row.dim() != 3:
        shape = f"{name} is [total, heads, head_dim]"
        raise ValueError(f"{name}: rank is {row.dim()}, want 3; {shape}")
    return row[None]


def _attend_under(
    rows: tuple[torch.Tensor, ...],
    pairs: tuple[torch.Tensor | None, ...],
    given: dict[str, Any],
    return_attn_probs: bool,
) -> tuple[torch.Tensor, ...]:
    """out, lse, and the probabilities if they are wanted, under a mask and a bias."""
    mask, bias = (_pairs_of_total(x, rows[0][0], rows[1][0], given["starts"]) for x in pairs)
    pairs = _pairs_with_batch(mask, bias)
    name = "return_attn_probs" if return_attn_probs else None
    out, lse, probability, _ = dmattn.attend(*rows, *pairs, **given, probabilities_name=name)
    return (out, lse) if probability is None else (out, lse, probability)


def _rows_of(
    rows: tuple[Any, ...], others: tuple[Any, ...]
) -> tuple[tuple[torch.Tensor, ...], dict[str, str]]:
    """q, k and v [1, total, heads, head_dim], which callers give under either name, and the names
    that messages give to the arguments of attention."""
    rows, names = dmattn.name_rows(rows, others)
    shown = (names.get(name, name) for name in dmattn.NAMES)
    with_batch = tuple(_with_batch_axis(name, row) for name, row in zip(shown, rows))
    return with_batch, {**names, "starts": "cu_seqlens_q"}


def _check_rest(block_table: Any, return_attn_probs: Any, return_lse: Any) -> None:
    if block_table is not None:
        raise NotImplementedError("block_table: is given, want None: keys are in one tensor")
    dmattn.check_flag("return_attn_probs", return_attn_probs)
    _types.check_flag("return_lse", return_lse)


def _numbers_of(
    scale: float | None, softcap: float | None, dropout_p: float | None
) -> dict[str, float | None]:
    """Options for attention(): softcap and dropout_p of None mean 0."""
    check_no_bool("softcap", softcap)
    numbers = {"softcap": softcap, "dropout_p": dropout_p}
    given = {name: 0.0 if number is None else number for name, number in numbers.items()}
    return {"softmax_scale": scale, **given}


def _window_of(options: DynamicMaskOptions | None, keep_window_size: int) -> int:
    return keep_window_size if options is None else options._window_of(keep_window_size, WINDOW)


def _without_batch(results: tuple[torch.Tensor, ...]) -> torch.Tensor | tuple[torch.Tensor, ...]:
    results = tuple(x.squeeze(0) for x in results)  # unlike [0], whose gradient would be copied
    return results if len(results) > 1 else results[0]


def _check_weights(
    dt_proj: torch.Tensor | None,
    a_coef: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    gap: float | None,
    options: DynamicMaskOptions | None,
) -> None:
    """Refuse one of dt_proj and a_coef without the other, and arguments that need both."""
    if (dt_proj is None) != (a_coef is None):
        absent, given = ("a_coef", "dt_proj") if a_coef is None else ("dt_proj", "a_coef")
        raise ValueError(f"{absent}: is None, want a tensor, as {given} is one")
    if dt_bias is not None and dt_proj is None:
        raise ValueError("dt_bias: is a tensor, want None without dt_proj and a_coef")
    if gap is not None and dt_proj is None:
        if not _types.is_number(gap):
            raise _types.refusal("gap", gap, "a number or None")
        raise ValueError(f"gap: is {gap:g}, want None without dt_proj and a_coef")
    if options is not None and not isinstance(options, DynamicMaskOptions):
        raise _types.refusal("options", options, "a DynamicMaskOptions or None")
    if options is not None and dt_proj is None:
        raise ValueError("options: is given, want None without dt_proj and a_coef")


@overload
def flash_dmattn_varlen_func(
    q: torch.Tensor | None = ...,
    k: torch.Tensor | None = ...,
    v: torch.Tensor | None = ...,
    cu_seqlens_q: torch.Tensor | None = ...,
    cu_seqlens_k: torch.Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    dropout_p: float | None = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    *,
    return_attn_probs: Literal[False] | None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[VarlenKeywords],
) -> torch.Tensor: ...


@overload
def flash_dmattn_varlen_func(
    q: torch.Tensor | None = ...,
    k: torch.Tensor | None = ...,
    v: torch.Tensor | None = ...,
    cu_seqlens_q: torch.Tensor | None = ...,
    cu_seqlens_k: torch.Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    dropout_p: float | None = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    *,
    return_attn_probs: Literal[False] | None = ...,
    return_lse: Literal[True],
    **options: Unpack[VarlenKeywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def flash_dmattn_varlen_func(
    q: torch.Tensor | None = ...,
    k: torch.Tensor | None = ...,
    v: torch.Tensor | None = ...,
    cu_seqlens_q: torch.Tensor | None = ...,
    cu_seqlens_k: torch.Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    dropout_p: float | None = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    *,
    return_attn_probs: Literal[True],
    return_lse: Literal[False] = ...,
    **options: Unpack[VarlenKeywords],
) -> tuple[torch.Tensor, ...]: ...


@overload
def flash_dmattn_varlen_func(
    q: torch.Tensor | None = ...,
    k: torch.Tensor | None = ...,
    v: torch.Tensor | None = ...,
    cu_seqlens_q: torch.Tensor | None = ...,
    cu_seqlens_k: torch.Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    dropout_p: float | None = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    *,
    return_attn_probs: Literal[True],
    return_lse: Literal[True],
    **options: Unpack[VarlenKeywords],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


@overload
def flash_dmattn_varlen_func(
    q: torch.Tensor | None = ...,
    k: torch.Tensor | None = ...,
    v: torch.Tensor | None = ...,
    cu_seqlens_q: torch.Tensor | None = ...,
    cu_seqlens_k: torch.Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    dropout_p: float | None = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    *,
    return_attn_probs: bool | None = ...,
    return_lse: bool = ...,
    **options: Unpack[VarlenKeywords],
) -> torch.Tensor | tuple[torch.Tensor, ...]: ...


@in_any_order(_order_of, FLASH_ATTN, _return_lse)
def flash_dmattn_varlen_func(
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float | None = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    query: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    scale: float | None = None,
    dt_proj: torch.Tensor | None = None,
    a_coef: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    sink_logit: torch.Tensor | None = None,
    keep_window_size: int = WINDOW,
    recent: int = 0,
    sinks: int = 0,
    gap: float | None = None,
    scope: Scope | None = None,
    bias_form: BiasForm = "exp",
    softcap: float | None = 0.0,
    generator: torch.Generator | None = None,
    backend: str | None = None,
    deterministic: bool | None = False,
    return_attn_probs: bool | None = False,
    return_lse: bool = False,
    options: DynamicMaskOptions | None = None,
    block_table: None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Self-attention of packed sequences, with the arguments of flash_attn_varlen_func() of
    flash-attn or of flash-dmattn's function.

    Positional arguments may also be in the orders of flash-dmattn: attn_mask and attn_bias in front
    of cu_seqlens_q (0.1 to 1.0.6), and scale, is_causal, softcap, deterministic, return_attn_probs
    behind max_seqlen_k. docs/migrating.md says how they are told apart.

    It is flash_dma_attention() with `starts`; without dt_proj and a_coef it is attention() without
    a selection: every query attends to all keys of its sequence that it can see.

    Args:
        q: [total, q_heads, head_dim]: the queries of all sequences, one after the other.
        k: [total, kv_heads, head_dim].
        v: [total, kv_heads, head_dim].
        cu_seqlens_q: [sequences + 1] int32 or int64: where each sequence starts and, last, the end
            of all.
        cu_seqlens_k: the same positions. It is compared with cu_seqlens_q unless it is the same
            tensor.
        max_seqlen_q: not needed; accepted so that calls of flash_attn_varlen_func() need no change.
        max_seqlen_k: not needed either.
        dropout_p: as in flash_dma_attention(); None for 0.
        softmax_scale: multiplies <q, k>; None for 1 / sqrt(head_dim).
        causal: a query sees only keys at positions up to its own.
        query: another name of q.
        key: another name of k.
        value: another name of v.
        attn_mask: optional [q_heads or kv_heads or 1, total or 1, total or 1], as in
            flash_dmattn_func(): which queries attend to which keys of their sequences. Or, as in
            flash-dmattn, [total, q_heads or kv_heads or 1, max_seqlen_k], where number j of a row
            is for key j of its sequence; it is spread to total * total numbers. Not with dt_proj.
        attn_bias: optional, with axes as attn_mask, as in flash_dmattn_func(). Not with dt_proj.
        is_causal: another name of causal.
        scale: another name of softmax_scale.
        dt_proj: [kv_heads, kv_heads * head_dim], with a_coef; None for attention to all keys.
        a_coef: [kv_heads].
        dt_bias: optional [kv_heads], beside them; None for 0.
        sink_logit: optional [q_heads] float32, as in attention().
        keep_window_size, recent, sinks, gap, scope, bias_form, softcap: as in
            flash_dma_attention().
        generator: as in attention(), on q's device.
        backend: as in score().
        deterministic: as in flash_dma_attention().
        return_attn_probs: also return the probabilities, total * total numbers for each query head.
        return_lse: also return lse.
        options: as in flash_dma_attention(), with dt_proj. Its keep_window_size is the call's, and
            its limits count all sequences together: total and the number of sequences.
        block_table: None; an argument of flash-dmattn's function.

    Returns:
        out [total, q_heads, head_dim]. With return_lse or return_attn_probs a tuple of out, lse
        [q_heads, total] and probabilities [q_heads, total, total], without what is not asked for;
        probabilities are 0 for queries and keys of different sequences, and have no gradient. In an
        order of flash-dmattn return_attn_probs asks for lse too.

    Raises:
        ValueError: cu_seqlens_q and cu_seqlens_k that differ, one of dt_proj and a_coef without the
            other, dt_bias, a gap or options without them, a mask or a bias beside them, two names
            of an option that differ, or what flash_dma_attention() raises it for.
        NotImplementedError: as flash_dma_attention(), or a block_table.
        TypeError: an argument that is given twice, or has another type.
        MemoryError: probabilities that take more memory than the device has.

    Example:
        >>> q, k, v = torch.randn(10, 4, 8), torch.randn(10, 2, 8), torch.randn(10, 2, 8)
        >>> starts = torch.tensor([0, 4, 10], dtype=torch.int32)  # sequences of 4 and 6
        >>> flash_dmattn.flash_dmattn_varlen_func(q, k, v, starts, starts, 6, 6, causal=True).shape
        torch.Size([10, 4, 8])

    Source: arXiv:2508.02124.
    """
    rows, names = _rows_of((q, k, v), (query, key, value))
    starts = _starts_of(cu_seqlens_q, cu_seqlens_k)
    _check_weights(dt_proj, a_coef, dt_bias, gap, options)
    _check_rest(block_table, return_attn_probs, return_lse)
    given: dict[str, Any] = {
        "starts": starts,
        "causal": _is_causal(causal, is_causal),
        "backend": backend,
        **_numbers_of(choose_scale(softmax_scale, scale), softcap, dropout_p),
        "generator": generator,
        "sink_logit": sink_logit,
        "deterministic": dmattn.check_flag("deterministic", deterministic),
    }
    if dt_proj is None or a_coef is None:
        pairs = (attn_mask, attn_bias)
        results = call_renamed(names, _attend_under, rows, pairs, given, return_attn_probs)
    else:
        _refuse_pairs(attn_mask, attn_bias)
        rules = {"recent": recent, "sinks": sinks, "gap": gap, "scope": scope}
        scores = {"bias_form": bias_form, "dt_bias": dt_bias, "options": options}
        given = {**given, **rules, **scores, "return_attn_probs": return_attn_probs}
        call = (*rows, dt_proj, a_coef, _window_of(options, keep_window_size))
        results = call_renamed(names, flash_dma_attention, *call, **given, return_lse=True)
    return _without_batch(results if return_lse else (results[0], *results[2:]))
