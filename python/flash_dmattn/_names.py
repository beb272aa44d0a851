"""The names of the package: everything here needs PyTorch."""

from __future__ import annotations

from . import (
    _versions,  # noqa: F401 (refuses an old PyTorch)
    pictures,  # noqa: F401
)
from .cache import DynamicMaskCache
from .dmattn import flash_dmattn_func, flash_dmattn_func_auto
from .flash_dmattn_flex import flex_dmattn_func
from .flash_dmattn_interface import (
    flash_dmattn_kvpacked_func,
    flash_dmattn_qkvpacked_func,
    flash_dmattn_varlen_kvpacked_func,
    flash_dmattn_varlen_qkvpacked_func,
)
from .flash_dmattn_triton import triton_dmattn_func
from .functional import Selection, attention, get_available_backends, merge, score, select
from .fused import flash_dma_attention
from .hybrid import HybridPlan
from .layer_caches import LayerCaches
from .lifetimes import lifetime_loss
from .lists import mask_lists
from .mha import MultiheadAttention
from .nn import DynamicMaskAttention
from .options import DynamicMaskOptions
from .probabilities import attention_probabilities
from .score_targets import score_target_loss
from .streams import KeyCache, decode
from .varlen import flash_dmattn_varlen_func
from .workspace import workspace_bytes

# The Triton and FlexAttention backends of flash-dmattn are not here. The package finds
# CUDA_AVAILABLE on access: an import looks for no device.
TRITON_AVAILABLE = triton_dmattn_func is not None
FLEX_AVAILABLE = flex_dmattn_func is not None

__all__ = [
    "DynamicMaskAttention",
    "DynamicMaskCache",
    "DynamicMaskOptions",
    "HybridPlan",
    "KeyCache",
    "LayerCaches",
    "MultiheadAttention",
    "Selection",
    "attention",
    "attention_probabilities",
    "decode",
    "flash_dma_attention",
    "flash_dmattn_func",
    "flash_dmattn_func_auto",
    "flash_dmattn_kvpacked_func",
    "flash_dmattn_qkvpacked_func",
    "flash_dmattn_varlen_func",
    "flash_dmattn_varlen_kvpacked_func",
    "flash_dmattn_varlen_qkvpacked_func",
    "get_available_backends",
    "lifetime_loss",
    "mask_lists",
    "merge",
    "score",
    "score_target_loss",
    "select",
    "workspace_bytes",
]
