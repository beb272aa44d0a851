"""One sequence over many processes: each rank of a process group has some consecutive tokens of it.

Tensors go between ranks through torch.distributed: NCCL between CUDA devices, gloo between CPUs.
(With gloo, tensors of CUDA devices go through the memory of the host.) Every rank of the group
calls the same functions in the same order, with its own tokens and otherwise the same arguments.
Ranks may have different numbers of tokens, or none.

Before they exchange anything, the ranks compare their arguments from host to host. If one rank
disagrees, refuses its arguments or does not call within the timeout of the process group, all of
them raise an error that says so. `lengths`, the number of tokens of each rank, saves the
comparison, some 0.1 ms for 8 ranks. All ranks give it or none does, and the caller then vouches for
the arguments. If a rank fails elsewhere, for example in another layer, the others wait for the
timeout. Once a rank has left out a call, the group cannot be used any more: make another one.

Backward is not compared. It runs on all ranks or on none: a rank without tokens, or one whose loss
does not depend on the result, has to run it too. If a rank is missing, the others wait until the
timeout; NCCL then ends their processes. One thread at a time uses a group.

dt_proj, a_coef, dt_bias and sink_logit are the same on all ranks, and each rank has the gradients
from its own tokens. The sum over ranks is the gradient of the whole.
DistributedDataParallel and FSDP take the mean over ranks: the gradient of the mean of the ranks'
losses.

Under torch.compile calls are made between graphs, not in them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Literal, Sequence, Tuple, TypeVar, overload

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from . import _arguments, _context, _ring, _sequences, _types, ops
from ._arguments import autocast, check_same_device, kernel_scale, refuse_tangents
from ._ranks import LENGTH, Ranks, ranks_of
from ._sequences import GatherTokens, check_lengths, describe_starts, lay_out, list_starts
from ._signatures import BiasForm, RankedKeywords, RingKeywords

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "context_parallel_attention",
    "gather_sequence",
    "ring_attention",
    "sequence_positions",
    "split_lengths",
    "split_sequence",
]

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """torch.compiler.disable(), which has no types."""
    disabled: Function = torch.compiler.disable(function)
    return disabled


Tensors = Tuple[torch.Tensor, ...]
MOST_TOKENS = (1 << 31) - 1  # of all ranks: positions are int32


def _settings_of(function: str, tensors: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The settings that have to be the same on all ranks, and the number of own tokens.

    Raises:
        ValueError: the shapes or devices of tensors contradict each other.
    """
    sizes = _arguments.bind_sizes(tensors)
    check_same_device(tensors)
    _arguments.check_sizes(tensors, sizes)
    if sizes["q_len"] != sizes["kv_len"]:
        count = _types.counted(sizes["kv_len"], "element")
        raise ValueError(f"key: axis 1 has {count}, want {sizes['q_len']}, as query has")
    names = ("batch", "q_heads", "kv_heads", "head_dim")
    found: dict[str, Any] = {
        "function": function,
        **{name: sizes[name] for name in names},
        **options,
    }
    found["device"] = tensors["query"].device.type
    compared = {name: tensor for name, tensor in tensors.items() if name != "key_valid"}
    for name, tensor in compared.items():
        kind = None if tensor is None else str(tensor.dtype).replace("torch.", "")
        found[f"dtype of {name}"] = kind
        found[f"requires_grad of {name}"] = bool(
            tensor is not None and tensor.requires_grad and torch.is_grad_enabled()
        )
    return {**found, LENGTH: sizes["q_len"]}


def _agree(
    ranks: Ranks, lengths: Sequence[int] | None, settings_of: Callable[[], dict[str, Any]]
) -> list[int]:
    """The number of tokens of each rank, once all agree on everything else; or `lengths`, if given.
    settings_of() may refuse the arguments of this rank."""
    if lengths is None:
        try:
            settings = settings_of()
        except Exception as error:
            ranks.refuse(error)
            raise
        return ranks.compare(settings)
    own, found = settings_of()[LENGTH], check_lengths(ranks, lengths)
    if found[ranks.rank] != own:
        raise ValueError(f"lengths: this rank has {found[ranks.rank]}, want {own}, its tokens")
    return found


def _autocast_rows(tensors: dict[str, Any], *weights: str) -> None:
    """Cast query, key, value and the weights of these names as autocast() does."""
    rows = ("query", "key", "value")
    found = autocast("query", *(tuple(tensors[x] for x in some) for some in (rows, weights)))
    tensors.update(zip((*rows, *weights), found))


def _check_selected(tensors: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Check the arguments of this rank, prepare `tensors` and `options` for the call, and return
    the settings that ranks compare."""
    names = ("query", "key", "value", "dt_proj", "a_coef", "dt_bias")
    _types.check(_types.kinds_of(context_parallel_attention), {**tensors, **options})
    weights = {name: tensors[name] for name in names[3:5]}
    form, score = options["bias_form"], tensors["score"]
    _arguments.check_score(score, weights, tensors["dt_bias"], form, "with")
    _autocast_rows(tensors, *names[3:])
    causal, rules = options["causal"], ("window", "recent", "sinks")
    no_recent = None if causal else "if causal is False"
    found = _arguments.check_rules(*(options[name] for name in rules), no_recent=no_recent)
    options.update(zip(rules, found))
    options["starts"] = starts = list_starts(options["starts"])
    if starts is not None and not (causal and tensors["query"].shape[0] == 1):
        raise ValueError("starts: is given, want None unless causal is True and batch is 1")
    compared = {**options, "starts": describe_starts(starts)}
    settings = _settings_of("context_parallel_attention", tensors, **compared)
    if score is not None:
        tensors["score"], tensors["bias"] = score.detach(), None
        return settings
    backend = options["backend"] and ops.backend_for(options["backend"], "score")
    rest = (tensors["key_valid"], None, form, backend)
    # SCORE checks some of the arguments. On a device it runs while the ranks compare.
    with torch.no_grad():
        given = (tensors[name] for name in names[3:])
        tensors["score"], tensors["bias"] = ops.SCORE(tensors["value"], *given, *rest)
    return settings


def _attend(
    ranks: Ranks, lengths: list[int], tensors: dict[str, Any], options: dict[str, Any]
) -> Tensors:
    """out and lse of context_parallel_attention()."""
    total = sum(lengths)
    if total > MOST_TOKENS:
        raise ValueError(f"query: all ranks have {total} tokens, want at most {MOST_TOKENS}")
    # A query keeps no more keys than there are in all.
    window = max(min(options["window"], total), 1)
    recent = min(options["recent"], max(total - window, 0))
    bias = None if options["bias_form"] == "none" else tensors["bias"]
    call = _context.Call(
        *(ranks, lay_out(lengths, options["starts"]), tensors["score"], bias),
        *(tensors["key_valid"], window, recent, min(options["sinks"], window)),
        *(options["causal"], options["bias_form"], kernel_scale(options["softmax_scale"])),
        *(options["softcap"], options["deterministic"], options["backend"]),
    )
    names = ("query", "key", "value", "dt_proj", "a_coef", "dt_bias", "sink_logit")
    return _context.ContextAttention.apply(call, *(tensors[name] for name in names))


@overload
def context_parallel_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dt_proj: torch.Tensor | None,
    a_coef: torch.Tensor | None,
    window: int,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[RankedKeywords],
) -> torch.Tensor: ...


@overload
def context_parallel_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dt_proj: torch.Tensor | None,
    a_coef: torch.Tensor | None,
    window: int,
    *,
    return_lse: Literal[True],
    **options: Unpack[RankedKeywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def context_parallel_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dt_proj: torch.Tensor | None,
    a_coef: torch.Tensor | None,
    window: int,
    *,
    return_lse: bool = ...,
    **options: Unpack[RankedKeywords],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


@uncompiled
def context_parallel_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dt_proj: torch.Tensor | None,
    a_coef: torch.Tensor | None,
    window: int,
    *,
    score: torch.Tensor | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    causal: bool = True,
    recent: int = 0,
    sinks: int = 0,
    dt_bias: torch.Tensor | None = None,
    key_valid: torch.Tensor | None = None,
    starts: torch.Tensor | Sequence[int] | None = None,
    sink_logit: torch.Tensor | None = None,
    bias_form: BiasForm = "exp",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    backend: str | None = None,
    return_lse: bool = False,
    lengths: Sequence[int] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Dynamic mask attention over a sequence that the ranks of a group hold, some consecutive
    tokens each: flash_dma_attention() of the whole sequence, for each rank's own tokens.

    The selection is bit-equal to the selection in the whole sequence; results are equal up to
    rounding. A rank receives at most window + recent keys of each other rank, whatever the number
    of tokens, and backward returns as many gradients. Nothing is read back from a device.

    Args:
        query: [batch, q_len, q_heads, head_dim], of the own tokens.
        key: [batch, q_len, kv_heads, head_dim].
        value: [batch, q_len, kv_heads, head_dim].
        dt_proj: [kv_heads, kv_heads * head_dim], as in score(); None if `score` is given.
        a_coef: [kv_heads], as in score(); None if `score` is given.
        window: keys that a query keeps, as keep_window_size of flash_dma_attention().
        score: [batch, kv_heads, q_len] float32: the score of each own token, which adds no bias:
            bias_form has to be "none". It has no gradient.
        group: the ranks, in the order of their tokens: a process group, a mesh of one dimension, or
            None for all processes.
        causal: a query sees only keys at positions up to its own. If False, all keys are ranked
            once, and every query keeps the best of them.
        recent: as in flash_dma_attention().
        sinks: as there; they are the first keys of the whole sequence.
        dt_bias: optional [kv_heads], as in score(); None for 0.
        key_valid: optional [batch, q_len] bool or uint8, false for padding.
        starts: for packed sequences, which may begin and end on any rank: positions at which they
            begin and, last, the end of all, as in attention(), but counted from the first token of
            the first rank: a list, or a tensor on the CPU. batch is 1.
        sink_logit: optional [q_heads] float32, as in attention().
        bias_form: as in flash_dma_attention().
        softmax_scale, softcap: as in attention().
        deterministic: as in attention(); what ranks exchange is always added in their order.
        backend: as in score().
        return_lse: also return lse.
        lengths: tokens of each rank, by a caller who vouches for the arguments; None: the ranks
            compare them.

    Returns:
        out [batch, q_len, q_heads, head_dim] of the own tokens; with return_lse a pair of out and
        lse [batch, q_heads, q_len] float32, in nats.

    Raises:
        TypeError: a query that is not a tensor, a window, recent or sinks that is not an int, or a
            group of another type.
        ValueError: shapes, devices or options that are inconsistent, or not the same on all ranks.
        NotImplementedError: a dtype, head_dim, device or backend that no kernel supports.
        RuntimeError: there is no process group, or a rank has not made this call in time.

    Example:
        >>> torch.distributed.init_process_group(
        ...     "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        ... )  # torchrun starts more of them
        >>> query, key, value = torch.randn(1, 16, 4, 8), *torch.randn(2, 1, 16, 2, 8)
        >>> weights = torch.randn(2, 16), torch.ones(2)
        >>> out = flash_dmattn.distributed.context_parallel_attention(
        ...     query, key, value, *weights, window=5
        ... )
        >>> out.shape
        torch.Size([1, 16, 4, 8])
        >>> torch.distributed.destroy_process_group()

    Source: docs/algorithm.md, one sequence over several processes.
    """
    ranks = ranks_of(group)
    _types.check_flag("return_lse", return_lse)
    refuse_tangents("context_parallel_attention", query, key, value, dt_proj, a_coef, dt_bias)
    options = {
        "window": window,
        "recent": recent,
        "sinks": sinks,
        "causal": causal,
        "bias_form": bias_form,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "deterministic": deterministic,
        "backend": backend,
        "starts": starts,
    }
    names = ("query", "key", "value", "dt_proj", "a_coef", "dt_bias", "key_valid", "sink_logit")
    given = (query, key, value, dt_proj, a_coef, dt_bias, key_valid, sink_logit)
    tensors = {**dict(zip(names, given)), "score": score}
    lengths = _agree(ranks, lengths, lambda: _check_selected(tensors, options))
    out, lse = _attend(ranks, lengths, tensors, options)
    return (out, lse) if return_lse else out


@overload
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[RingKeywords],
) -> torch.Tensor: ...


@overload
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[RingKeywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    return_lse: bool = ...,
    **options: Unpack[RingKeywords],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


@uncompiled
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    causal: bool = True,
    key_valid: torch.Tensor | None = None,
    sink_logit: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    backend: str | None = None,
    return_lse: bool = False,
    lengths: Sequence[int] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Dense attention over a sequence that the ranks of a group hold: attention() of the whole
    sequence, for each rank's own tokens.

    The keys of all ranks go round a ring, while each rank attends to those that it holds. With
    causal masking later ranks have more to do, and the others wait for them.

    Args:
        query: [batch, q_len, q_heads, head_dim], of the own tokens.
        key: [batch, q_len, kv_heads, head_dim].
        value: [batch, q_len, kv_heads, head_dim].
        group: as in context_parallel_attention().
        causal: a query sees only keys at positions up to its own.
        key_valid: optional [batch, q_len] bool or uint8, false for padding; on all ranks or on
            none.
        sink_logit: optional [q_heads] float32, as in attention().
        softmax_scale, softcap: as in attention().
        deterministic: as in attention(); what ranks exchange is always added in one order.
        backend: as in score().
        return_lse: also return lse.
        lengths: as in context_parallel_attention().

    Returns:
        As context_parallel_attention().

    Raises:
        As context_parallel_attention().

    Example:
        >>> torch.distributed.init_process_group(
        ...     "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        ... )
        >>> query, key, value = torch.randn(1, 16, 4, 8), *torch.randn(2, 1, 16, 2, 8)
        >>> flash_dmattn.distributed.ring_attention(query, key, value).shape
        torch.Size([1, 16, 4, 8])
        >>> torch.distributed.destroy_process_group()

    Source: arXiv:2310.01889.
    """
    ranks = ranks_of(group)
    _types.check_flag("return_lse", return_lse)
    refuse_tangents("ring_attention", query, key, value, sink_logit)
    names = ("query", "key", "value", "key_valid", "sink_logit")
    tensors: dict[str, Any] = dict(zip(names, (query, key, value, key_valid, sink_logit)))
    options: dict[str, Any] = {"causal": causal, "softmax_scale": softmax_scale, "softcap": softcap}
    options = {**options, "deterministic": deterministic, "backend": backend}

    def call_of(lengths: list[int]) -> _ring.Call:
        numbers = (causal, kernel_scale(softmax_scale), softcap, deterministic, backend)
        return _ring.Call(ranks, lengths, key_valid, *numbers)

    def settle() -> dict[str, Any]:
        _types.check(_types.kinds_of(ring_attention), {**tensors, **options})
        _autocast_rows(tensors)
        valid = None if key_valid is None else str(key_valid.dtype)
        settings = _settings_of("ring_attention", tensors, **options, key_valid=valid)
        call_of([]).check(**tensors)
        return settings

    call = call_of(_agree(ranks, lengths, settle))
    rows = (tensors[name] for name in names[:3])
    out, lse = _ring.RingAttention.apply(call, *rows, sink_logit)
    return (out, lse) if return_lse else out


def split_lengths(total: int, ranks: int, multiple: int = 1) -> list[int]:
    """How many tokens each rank has if a sequence is split as evenly as possible.

    Args:
        total: tokens of the sequence.
        ranks: number of ranks.
        multiple: every length is a multiple of this, except the length of the last rank with
            tokens.

    Returns:
        One length for each rank. Their sum is `total`, and the longer ones come first. Where there
        are too few tokens, the last ranks have none.

    Raises:
        ValueError: a total below 0, or ranks or a multiple below 1.

    Example:
        >>> flash_dmattn.distributed.split_lengths(100, 3, multiple=8)
        [40, 32, 28]

    Source: docs/training.md.
    """
    for name, number in (("total", total), ("ranks", ranks), ("multiple", multiple)):
        least = 0 if name == "total" else 1
        if _arguments.check_int(name, number) < least:
            raise ValueError(f"{name}: is {number}, want {least} or more")
    blocks = -(-total // multiple)
    counts = [blocks // ranks + (rank < blocks % ranks) for rank in range(ranks)]
    ends = [min(at * multiple, total) for at in [*_sequences.offsets_of(counts)[1:], blocks]]
    return [end - begin for begin, end in zip([0, *ends], ends)]


def split_sequence(
    tensor: torch.Tensor,
    dim: int = 1,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    lengths: Sequence[int] | None = None,
) -> torch.Tensor:
    """The own tokens of a tensor that each rank has whole. Nothing is sent.

    Args:
        tensor: [..., total, ...]: token ids, positions, labels or hidden states.
        dim: the axis of tokens.
        group: as in context_parallel_attention().
        lengths: tokens of each rank; None for split_lengths(total, ranks).

    Returns:
        A view of `tensor` with the tokens of this rank.

    Raises:
        ValueError: lengths that are not one for each rank, or have another sum.

    Example:
        >>> torch.distributed.init_process_group(
        ...     "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        ... )
        >>> flash_dmattn.distributed.split_sequence(torch.arange(6)[None])
        tensor([[0, 1, 2, 3, 4, 5]])
        >>> torch.distributed.destroy_process_group()

    Source: docs/training.md.
    """
    ranks, total = ranks_of(group), _types.length_of("tensor", tensor, "dim", dim)
    found = check_lengths(ranks, split_lengths(total, ranks.size) if lengths is None else lengths)
    if sum(found) != total:
        raise ValueError(f"lengths: their sum is {sum(found)}, want {total}, as tensor has tokens")
    return tensor.narrow(dim, _sequences.offsets_of(found)[ranks.rank], found[ranks.rank])


@uncompiled
def gather_sequence(
    tensor: torch.Tensor,
    dim: int = 1,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    lengths: Sequence[int] | None = None,
) -> torch.Tensor:
    """The whole sequence, gathered from the own tokens of each rank.

    Backward returns the sum, in the order of ranks, of all ranks' gradients of the own tokens: if
    each rank computes the same loss of the whole sequence, divide it by the number of ranks.

    Args:
        tensor: [..., length, ...]: the own tokens; the length may differ between ranks, nothing
            else.
        dim: the axis of tokens.
        group, lengths: as in context_parallel_attention().

    Returns:
        [..., total, ...], the same on all ranks.

    Raises:
        ValueError: tensors that are not the same on all ranks but for the length.
        RuntimeError: there is no process group, or a rank has not made this call in time.

    Example:
        >>> torch.distributed.init_process_group(
        ...     "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        ... )
        >>> flash_dmattn.distributed.gather_sequence(torch.arange(3)[None])
        tensor([[0, 1, 2]])
        >>> torch.distributed.destroy_process_group()

    Source: docs/training.md.
    """
    ranks = ranks_of(group)

    def prepare() -> dict[str, Any]:
        length = _types.length_of("tensor", tensor, "dim", dim)
        if tensor.is_meta:
            raise ValueError("tensor: is on meta, want a device that has its numbers")
        shape = list(tensor.shape)
        del shape[dim]
        return {
            "function": "gather_sequence",
            "shape of tensor without dim": str(shape),
            "dim": dim % tensor.dim(),
            "dtype": str(tensor.dtype),
            "device": tensor.device.type,
            LENGTH: length,
            "requires_grad": tensor.requires_grad and torch.is_grad_enabled(),
        }

    lengths = _agree(ranks, lengths, prepare)
    return GatherTokens.apply(ranks, lengths, tensor.transpose(0, dim)).transpose(0, dim)


@uncompiled
def sequence_positions(
    length: int,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    device: torch.device | str | None = None,
    lengths: Sequence[int] | None = None,
) -> torch.Tensor:
    """The positions of the own tokens in the whole sequence.

    Args:
        length: number of own tokens.
        group: as in context_parallel_attention().
        device: of the result.
        lengths: as there.

    Returns:
        [1, length] int64: the number of tokens of earlier ranks, and the numbers that follow it.

    Raises:
        RuntimeError: there is no process group, or a rank has not made this call in time.
        NotImplementedError: a device that PyTorch does not have here.

    Example:
        >>> torch.distributed.init_process_group(
        ...     "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        ... )
        >>> flash_dmattn.distributed.sequence_positions(4)
        tensor([[0, 1, 2, 3]])
        >>> torch.distributed.destroy_process_group()

    Source: docs/training.md.
    """
    ranks = ranks_of(group)
    _types.check_call(sequence_positions, locals())

    def prepare() -> dict[str, Any]:
        _arguments.check_device(device)
        return {"function": "sequence_positions", LENGTH: length}

    lengths = _agree(ranks, lengths, prepare)
    begin = _sequences.offsets_of(lengths)[ranks.rank]
    return torch.arange(begin, begin + length, device=device)[None]
