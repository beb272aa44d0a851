"""Types for type checkers: choices by name, the keywords that overloads of a function share, and
functions that return a function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Literal, TypedDict, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import ParamSpec

    from .options import DynamicMaskOptions

    Parameters = ParamSpec("Parameters")

Function = TypeVar("Function")
Scope = Literal["causal", "global"]
BiasForm = Literal["exp", "linear", "none"]


def returns(
    like: Function,
) -> Callable[[Callable[Parameters, Any]], Callable[Parameters, Function]]:
    """Declares that a function returns one that is called as `like` is."""
    return lambda function: function


class Rules(TypedDict, total=False):
    """Of flash_dma_attention() and flash_dmattn_varlen_func()."""

    dt_bias: torch.Tensor | None
    sink_logit: torch.Tensor | None
    recent: int
    sinks: int
    gap: float | None
    scope: Scope | None
    bias_form: BiasForm
    generator: torch.Generator | None
    backend: str | None
    options: DynamicMaskOptions | None


class FusedKeywords(Rules, total=False):
    """Of flash_dma_attention(), with the fields of DynamicMaskOptions."""

    key_valid: torch.Tensor | None
    starts: torch.Tensor | None
    kv_used: torch.Tensor | None
    softcap: float
    deterministic: bool
    selection_method: str
    min_density_threshold: float | None
    mixed_processing: bool
    block_size: int | None
    use_reordering: bool
    max_sequence_length: int | None
    max_batch_size: int | None
    max_selection_ratio: float


class VarlenKeywords(Rules, total=False):
    """Of flash_dmattn_varlen_func()."""

    query: torch.Tensor | None
    key: torch.Tensor | None
    value: torch.Tensor | None
    attn_mask: torch.Tensor | None
    attn_bias: torch.Tensor | None
    is_causal: bool | None
    scale: float | None
    dt_proj: torch.Tensor | None
    a_coef: torch.Tensor | None
    keep_window_size: int
    softcap: float | None
    deterministic: bool | None
    block_table: None


class MaskedKeywords(TypedDict, total=False):
    """Of flash_dmattn_func()."""

    query: torch.Tensor | None
    key: torch.Tensor | None
    value: torch.Tensor | None
    softmax_scale: float | None
    dropout_p: float | None
    generator: torch.Generator | None
    mask_lists: torch.Tensor | None
    backend: str | None


class DecodeKeywords(TypedDict, total=False):
    """Of decode()."""

    dt_proj: torch.Tensor | None
    a_coef: torch.Tensor | None
    dt_bias: torch.Tensor | None
    score: torch.Tensor | None
    index: torch.Tensor | None
    n_tokens: torch.Tensor | int | None
    commit: torch.Tensor | int | None
    sink_logit: torch.Tensor | None
    bias_form: BiasForm
    softmax_scale: float | None
    softcap: float
    batch_invariant: bool
    backend: str | None


class RingKeywords(TypedDict, total=False):
    """Of distributed.ring_attention()."""

    group: ProcessGroup | DeviceMesh | None
    causal: bool
    key_valid: torch.Tensor | None
    sink_logit: torch.Tensor | None
    softmax_scale: float | None
    softcap: float
    deterministic: bool
    backend: str | None
    lengths: Sequence[int] | None


class RankedKeywords(RingKeywords, total=False):
    """Of distributed.context_parallel_attention()."""

    score: torch.Tensor | None
    recent: int
    sinks: int
    dt_bias: torch.Tensor | None
    starts: torch.Tensor | Sequence[int] | None
    bias_form: BiasForm
