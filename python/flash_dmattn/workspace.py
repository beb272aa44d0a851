"""The workspace of the calls within the limits of a DynamicMaskOptions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from . import _arguments, _call, _types
from ._arguments import autocast
from .fused import flash_dma_attention
from .options import DynamicMaskOptions

FEW = 8  # every number of sequences and of queries up to this is tried


def _numbers_up_to(most: int) -> list[int]:
    """Every small number, powers of two, and `most`. The number of sequences and of queries decides
    the kernel and its number of tasks; within a task a smaller number needs less."""
    numbers = {*range(1, FEW + 1), *(1 << n for n in range(most.bit_length())), most}
    return sorted(n for n in numbers if n <= most)


def _shapes(
    options: DynamicMaskOptions, is_packed: bool, is_causal: bool, dense_len: int
) -> Iterator[tuple[int, int, int]]:
    """Yields batch (packed: the number of sequences), q_len and kv_len of calls that include the
    one with the largest workspace. Calls with up to dense_len keys are processed densely."""
    longest, most = options.max_sequence_length, options.max_batch_size
    assert longest is not None and most is not None
    if is_packed:
        lengths = {*_numbers_up_to(longest), min(dense_len, longest)} - {0}
        yield from ((most, length, length) for length in sorted(lengths))
        return
    for kv_len in sorted({longest, min(dense_len, longest)} - {0}):
        for batch in _numbers_up_to(most):
            for q_len in _numbers_up_to(longest):
                if q_len <= kv_len or kv_len <= dense_len or not is_causal:
                    yield batch, q_len, kv_len


def _meta(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    grad = like.requires_grad
    return torch.empty(shape, dtype=like.dtype, device="meta", requires_grad=grad)


def _ask(
    needed: _call.Workspaces,
    shape: tuple[int, int, int],
    tensors: tuple[torch.Tensor, ...],
    call: dict[str, Any],
) -> None:
    """Ask for the workspace of a call of this shape, and of its gradients."""
    batch, q_len, kv_len = shape
    query, key, value, *weights = tensors
    given = {name: x for name, x in call.items() if name != "generator"}
    for name in ("dt_bias", "sink_logit"):
        if given.get(name) is not None:
            given[name] = _meta(given[name].shape, given[name])
    if given.get("starts") is not None:
        given["starts"] = torch.empty(batch + 1, dtype=torch.int32, device="meta")
        batch = 1
    if given.get("kv_used") is not None:
        given["kv_used"] = torch.empty(batch, dtype=torch.int32, device="meta")
    if given.get("key_valid") is not None:
        given["key_valid"] = _meta((batch, kv_len), given["key_valid"])
    lengths = ((query, q_len), (key, kv_len), (value, kv_len))
    rows: list[Any] = [_meta((batch, length, *x.shape[2:]), x) for x, length in lengths]
    with needed:
        found = flash_dma_attention(*rows, *(_meta(x.shape, x) for x in weights), **given)
        results = [x for x in (found if isinstance(found, tuple) else (found,)) if x.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.empty_like(x) for x in results])


def _most_bytes(
    options: DynamicMaskOptions, index: int, tensors: tuple[torch.Tensor, ...], call: dict[str, Any]
) -> int:
    """workspace_bytes() on a device; `index` is the number of a GPU, -1 for the CPU."""
    kept = options.keep_window_size + call.get("recent", 0)
    has_limit = options.max_selection_ratio < 1  # on density: no call keeps all keys
    is_dense = options.mixed_processing and not has_limit and call.get("gap") is None
    scope = call.get("scope") or ("causal" if call.get("causal") else "global")
    is_packed = call.get("starts") is not None
    if not is_packed:  # workspace with kv_used serves every smaller number of keys and queries
        call = {**call, "kv_used": tensors[0]}
    free = dataclasses.replace(options, block_size=None, max_selection_ratio=1.0)
    needed = _call.Workspaces(index)
    for shape in _shapes(options, is_packed, scope == "causal", kept if is_dense else 0):
        _ask(needed, shape, tensors, {**call, "options": free})
    return needed.most


def workspace_bytes(
    options: DynamicMaskOptions,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dt_proj: torch.Tensor,
    a_coef: torch.Tensor,
    **call: Any,
) -> int:
    """The most workspace that a call of flash_dma_attention() within the limits of `options` needs.

    A call takes its workspace from PyTorch's allocator and gives it back at its end; gradients take
    another one. Nothing is kept here between calls, because the allocators keep it: on a CUDA
    device the calls after the longest one find their memory in the allocator's cache. The number
    says how much has to be free beside the tensors and the results. This function allocates
    nothing, and reads only heads, head_dim, dtypes, device and requires_grad of the tensors.

    Args:
        options: with max_sequence_length and max_batch_size. The calls have up to so many
            sequences, queries and keys.
        query: of one of the calls, [batch, q_len, q_heads, head_dim], of any batch and q_len.
        key: [batch, kv_len, kv_heads, head_dim].
        value: [batch, kv_len, kv_heads, head_dim].
        dt_proj: [kv_heads, kv_heads * head_dim].
        a_coef: [kv_heads].
        call: other arguments of the calls, by name: causal, recent, dropout_p, starts and so on.
            A generator has no effect.

    Returns:
        Bytes, for the current number of threads. If a tensor requires gradients and these need
        more, the bytes for gradients. It is an upper bound: few and short calls may need less, as
        it counts every thread.


    Raises:
        ValueError: options without max_sequence_length or max_batch_size, or what
            flash_dma_attention() raises it for.
        NotImplementedError: as flash_dma_attention().

    Example:
        >>> limits = {"max_sequence_length": 4096, "max_batch_size": 2}
        >>> options = flash_dmattn.DynamicMaskOptions(keep_window_size=256, **limits)
        >>> query, key, value = torch.randn(3, 1, 16, 2, 8)
        >>> tensors = query, key, value, torch.randn(2, 16), torch.ones(2)
        >>> size = flash_dmattn.workspace_bytes(options, *tensors, causal=True)
        >>> 0 < size < 2**25
        True

    Source: arXiv:2508.02124.
    """
    _types.check_call(workspace_bytes, locals())
    _types.check(_types.kinds_of(flash_dma_attention), call)
    for name in ("max_sequence_length", "max_batch_size"):
        if getattr(options, name) is None:
            raise ValueError(f"options: its {name} is None, want a number")
    tensors: tuple[Any, ...] = (query, key, value, dt_proj, a_coef)
    _arguments.check_devices(dict(zip(("query", "key", "value", "dt_proj", "a_coef"), tensors)))
    tensors = autocast("query", tensors[:3], tensors[3:])
    options._check_block_size(query.device)
    return _most_bytes(options, query.get_device(), tensors, call)
