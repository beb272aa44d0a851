"""The states of vLLM's requests: the carried keys of all layers of a model in one page of memory.

vLLM has a kind of layer whose state has the same size for every request, as recurrent models have:
MambaBase. RequestStates is the one such layer of a model. vLLM gives each request a page, whose
number stands in the block table, and takes it back when the request ends or is preempted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import MambaSpec

from .. import _arguments, streams
from ..streams import TOKENS_MAX, KeyCache, Tokens

NO_PAGE = 0  # the number that vLLM's block table has where a request has no page


class Rules(NamedTuple):
    """Which keys the queries of a layer keep, as in select()."""

    window: int
    recent: int = 0
    bias_form: str = "exp"


class Rows(NamedTuple):
    """Requests that one call of decode() serves, each with 64 new tokens or fewer."""

    tokens: torch.Tensor | None  # [requests, most]: numbers of tokens; None: 0, 1, ..., one each
    n_tokens: torch.Tensor | None  # [requests] int32; None: one each
    pages: torch.Tensor  # [requests] int32; -1: none


class Piece(NamedTuple):
    """More than 64 new tokens of a request."""

    first: int
    last: int
    page: torch.Tensor  # [1] int32
    is_first: bool  # nothing came before


@dataclasses.dataclass
class Step:
    """The requests of a step of the server, for all layers."""

    rows: list[Rows]
    pieces: list[Piece]
    pages: torch.Tensor  # [requests] of requests with new tokens
    computed: torch.Tensor  # [requests] int32: tokens of each that have passed
    begun: torch.Tensor | None  # pages whose requests begin


class StateBackend(AttentionBackend):  # type: ignore[misc]
    """Names the class that makes the metadata of RequestStates."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


register_backend(
    MambaAttentionBackendEnum.CUSTOM, f"{__name__}.{StateBackend.__name__}", is_mamba=True
)


class StepBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Makes the Step of a batch, whose tokens stand one request after the other."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Step:
        batch = common_attn_metadata
        starts = batch.query_start_loc_cpu.tolist()
        lengths = [end - start for start, end in zip(starts, starts[1:])]
        present = [n for n, length in enumerate(lengths) if length > 0]
        blocks = batch.block_table_tensor[: len(lengths), 0]
        computed = batch.seq_lens[: len(lengths)] - (
            batch.query_start_loc[1 : len(lengths) + 1] - batch.query_start_loc[: len(lengths)]
        )
        if len(present) < len(lengths):
            where = self._on_device(present)
            blocks, computed = blocks[where], computed[where]
        starts, lengths = [starts[n] for n in present], [lengths[n] for n in present]
        ends = batch.seq_lens_cpu_upper_bound
        ends = batch.seq_lens.cpu() if ends is None else ends
        totals = [ends[n] for n in present]
        begun = [n for n, (end, length) in enumerate(zip(totals, lengths)) if int(end) == length]
        return self._make(starts, lengths, blocks, computed.to(torch.int32), begun)

    def _make(
        self,
        starts: list[int],
        lengths: list[int],
        blocks: torch.Tensor,
        computed: torch.Tensor,
        begun: list[int],
    ) -> Step:
        pages = torch.where(blocks == NO_PAGE, -1, blocks).to(torch.int32)
        numbers = range(len(lengths))
        single = [n for n in numbers if lengths[n] == 1]
        short = [n for n in numbers if 1 < lengths[n] <= TOKENS_MAX]
        rows = []
        if len(single) == len(lengths) > 0:
            rows.append(Rows(None, None, pages))
        elif single:
            tokens = self._on_device([starts[n] for n in single])[:, None]
            rows.append(Rows(tokens, None, pages[self._on_device(single)]))
        if short:
            own = self._on_device([lengths[n] for n in short])
            steps = torch.arange(max(lengths[n] for n in short), device=self.device)
            steps = steps.minimum(own[:, None] - 1)  # padding repeats the last token
            tokens = self._on_device([starts[n] for n in short])[:, None] + steps
            rows.append(Rows(tokens, own.to(torch.int32), pages[self._on_device(short)]))
        pieces = [
            Piece(starts[n], starts[n] + lengths[n], pages[n : n + 1], n in begun)
            for n in numbers
            if lengths[n] > TOKENS_MAX
        ]
        first = blocks[self._on_device(begun)].long() if begun else None
        return Step(rows, pieces, blocks.long(), computed, first)

    def _on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)


class RequestStates(nn.Module, MambaBase):  # type: ignore[misc]
    """The carried keys of all layers, one page for each request.

    Layers of equal rules are neighbours in a page: k and v [layers, kv_heads, rows, head_dim], and
    bias, score and position [layers, kv_heads, rows], where rows = window + recent.

    Args:
        rules: of each layer.
        kv_heads: of a layer, on this rank.
        head_dim: a multiple of 8.
        dtype: of keys and values.
        config: vLLM's configuration.
        prefix: the name that vLLM knows it by.
    """

    def __init__(
        self,
        rules: Sequence[Rules],
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        config: VllmConfig,
        prefix: str,
    ) -> None:
        super().__init__()
        self.rules, self.kv_heads, self.head_dim = list(rules), kv_heads, head_dim
        self.dtype, self.prefix = dtype, prefix
        self.kinds = list(dict.fromkeys(self.rules))
        self.caches: list[KeyCache] = []
        self.kv_cache: tuple[torch.Tensor, ...] = ()
        config.compilation_config.static_forward_context[prefix] = self

    # ---- what vLLM asks ----

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        shapes: list[tuple[int, ...]] = []
        for kind in self.kinds:
            by_head = (self.rules.count(kind), self.kv_heads, kind.window + kind.recent)
            shapes += [(*by_head, self.head_dim)] * 2 + [by_head] * 3
        return tuple(shapes)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        wide = _arguments.wide(self.dtype)
        return (self.dtype, self.dtype, wide, wide, torch.int32) * len(self.kinds)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.CUSTOM

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MambaSpec:
        """One page for each request, however long it may get."""
        return MambaSpec(
            shapes=self.get_state_shape(),
            dtypes=self.get_state_dtype(),
            block_size=vllm_config.model_config.max_model_len,
            mamba_type=self.mamba_type,
        )

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take the memory of all pages."""
        super().bind_kv_cache(kv_cache)
        states, self.caches = self.kv_cache, []
        pages, device = states[0].shape[0], states[0].device
        self.seen = torch.zeros(len(self.rules), pages, dtype=torch.int32, device=device)
        for layer, kind in enumerate(self.rules):
            first = 5 * self.kinds.index(kind)
            at = self.rules[:layer].count(kind)
            key, value, bias, score, position = (x[:, at] for x in states[first : first + 5])
            rows = (key.transpose(1, 2), value.transpose(1, 2), bias, score, position)
            self.caches.append(KeyCache(*rows, self.seen[layer], kind.window, kind.recent))

    # ---- attention ----

    def begin(self) -> Step | None:
        """Begin a step of the model; None if vLLM only measures memory."""
        steps = get_forward_context().attn_metadata
        if not isinstance(steps, dict) or not self.caches:
            return None
        step: Step = steps[self.prefix]
        self.seen[:, step.pages] = step.computed
        if step.begun is not None:
            for position in self.kv_cache[4::5]:
                position[step.begun] = -1
        return step

    def attend(
        self,
        layer: int,
        step: Step | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        score: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Attention of the step's tokens in a layer, which then enter their requests' states.

        Args:
            layer: its number.
            step: from begin().
            query: [tokens, q_heads, head_dim].
            key, value: [tokens, kv_heads, head_dim].
            score: [kv_heads, tokens] float32.
            scale: of logits.

        Returns:
            out [tokens, q_heads, head_dim].
        """
        if step is None:
            return torch.zeros_like(query)
        cache, form = self.caches[layer], self.rules[layer].bias_form
        packed, by_token = (query, key, value), score.transpose(0, 1)
        out = torch.empty_like(query)
        for rows in step.rows:
            if rows.tokens is None:
                own: Any = [x[: len(rows.pages), None] for x in packed]
                scores = by_token[: len(rows.pages), :, None]
            else:
                own = [x[rows.tokens] for x in packed]
                scores = by_token[rows.tokens].transpose(1, 2)
            given: dict[str, Any] = {"index": rows.pages, "n_tokens": rows.n_tokens}
            given.update({"bias_form": form, "softmax_scale": scale})
            q, k, v = own
            found: Any = streams.decode(q, k, v, cache, score=scores.contiguous(), **given)
            if rows.tokens is None:
                out[: len(rows.pages)] = found[:, 0]
            elif rows.n_tokens is None:
                out[rows.tokens[:, 0]] = found[:, 0]
            else:
                steps = torch.arange(found.shape[1], device=found.device)
                is_token = steps < rows.n_tokens[:, None]
                out[rows.tokens[is_token]] = found[is_token]
        for piece in step.pieces:
            own = [x[None, piece.first : piece.last] for x in packed]
            scores = score[None, :, piece.first : piece.last]
            out[piece.first : piece.last] = enter(cache, piece, own, scores, form, scale)[0]
        return out


def enter(
    cache: KeyCache,
    piece: Piece,
    rows: Any,
    score: torch.Tensor,
    bias_form: str,
    scale: float,
) -> torch.Tensor:
    """Attention of a piece of a request, which enters the cache.

    rows: query, key and value [1, len, heads, head_dim]; score [1, kv_heads, len]."""
    carried, page = None, piece.page
    if not piece.is_first:
        fields: Any = [x.index_select(0, page.clamp(min=0)) for x in cache[:6]]
        carried = KeyCache._make((*fields, *streams.rules_of(cache), None))
    options = (bias_form, scale, 0.0, None)
    weights, absent = (None, None, None), (None, None, None, None)
    tokens = Tokens._make((*rows, weights, *absent, options, score.contiguous()))
    return streams.prefill(cache, page, carried, tokens)
