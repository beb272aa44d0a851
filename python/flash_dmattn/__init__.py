"""Flash Dynamic Mask Attention for PyTorch: attention of each query over its `window` best keys."""

from __future__ import annotations

from typing import Any

from . import (
    _library,
    _versions,  # noqa: F401 (what the package needs)
    pictures,  # noqa: F401
)
from ._library import version
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

__version__ = version()

# The Triton and FlexAttention backends of flash-dmattn are not here. CUDA_AVAILABLE is found on
# access: an import looks for no device.
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


def __getattr__(name: str) -> Any:
    if name == "CUDA_AVAILABLE":
        return "cuda" in _library.backends()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(
        [*__all__, "__version__", "distributed", "onnx", "pictures", "rotary", "transformers"]
    )
