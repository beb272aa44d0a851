"""The states of vLLM's requests, as a layer of vLLM.

vLLM has a kind of layer whose state has the same size for every request, as recurrent models have:
MambaBase. RequestStates is the one such layer of a model. vLLM gives each request a page, whose
number stands in the block table, and takes it back when the request ends or is preempted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import MambaSpec

from . import pages
from .pages import Pages, Rules, Step, StepMaker


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

    # vLLM captures a CUDA graph of steps in which each request has one token.
    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        compilation = vllm_config.compilation_config
        padded = compilation.max_cudagraph_capture_size or 0
        most = max(vllm_config.scheduler_config.max_num_seqs, padded)
        self.maker = StepMaker(compilation.static_forward_context[layer_names[0]], most, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Step:
        batch = common_attn_metadata
        totals = batch.seq_lens_cpu_upper_bound  # exact, as there are no drafts
        totals = batch.seq_lens.cpu() if totals is None else totals
        starts = batch.query_start_loc_cpu.tolist()
        own = batch.block_table_tensor[: len(starts) - 1, 0]
        return self.maker.make(starts, totals.tolist(), own)


class RequestStates(Pages, MambaBase):  # type: ignore[misc]
    """The Pages of a model in vLLM.

    Args:
        rules, kv_heads, head_dim, dtype: as for Pages.
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
        super().__init__(rules, kv_heads, head_dim, dtype)
        self.prefix = prefix
        self.kv_cache: tuple[torch.Tensor, ...] = ()
        config.compilation_config.static_forward_context[prefix] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self.shapes()

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self.dtypes()

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
        self.use(self.kv_cache)


def find(name: str) -> tuple[Pages, Step | None]:
    """The states of the engine that runs, and its step; None if vLLM only measures memory."""
    context = get_forward_context()
    steps = context.attn_metadata
    states: Pages = context.no_compile_layers[name]
    return states, steps[name] if isinstance(steps, dict) and states.caches else None


pages.find = find
