"""A plugin for the server vLLM: models that attend to selected keys, with a state of fixed size for
each request.

vLLM finds it by the entry point `vllm.general_plugins` and calls register() in each of its
processes. Nothing of vLLM is imported before that.
"""

from __future__ import annotations

import re

__all__ = ["register"]

TESTED = ("0.31", "0.32")  # minor versions of vLLM
MODELS = {  # architectures in config.json, and the classes that serve them
    "DogeForCausalLM": "flash_dmattn.vllm.doge:DogeForCausalLM",
    "HybridForCausalLM": "flash_dmattn.vllm.hybrid:HybridForCausalLM",
}
BACKEND = "flash_dmattn.vllm.states.StateBackend"


def check_version(version: str) -> None:
    """Refuse a version of vLLM, such as "0.32.0", that the plugin was not tested with.

    Raises:
        ImportError: the version is not supported.
    """
    minor = ".".join(re.findall(r"\d+", version)[:2])
    if minor not in TESTED:
        raise ImportError(f"vllm: is {version}, want {' or '.join(TESTED)}")


def register() -> None:
    """Make vLLM know Doge and the hybrids of flash_dmattn.transformers. vLLM calls it by itself.

    Raises:
        ImportError: a version of vLLM or transformers that is not supported.

    Example:
        >>> import flash_dmattn.vllm
        >>> flash_dmattn.vllm.register()  # doctest: +SKIP

    Source: docs/vllm.md.
    """
    import vllm

    check_version(vllm.__version__)
    from vllm import ModelRegistry
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend

    from ..transformers_hybrid import register_hybrid

    register_backend(MambaAttentionBackendEnum.CUSTOM, BACKEND, is_mamba=True)
    register_hybrid()
    for architecture, path in MODELS.items():
        ModelRegistry.register_model(architecture, path)
