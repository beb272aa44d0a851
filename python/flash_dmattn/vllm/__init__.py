"""A plugin for the server vLLM: models that attend to selected keys, with a state of fixed size for
each request.

vLLM finds it by the entry point `vllm.general_plugins` and calls register() in each of its
processes. Nothing of vLLM is imported before that.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

__all__ = ["register"]

TESTED = ("0.31", "0.32")  # minor versions of vLLM
# Architectures in config.json, which are the names of classes, and the modules that have these.
MODELS = {"DogeForCausalLM": ".doge", "HybridForCausalLM": ".hybrid"}


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

    With a version of vLLM that is not supported these models are refused once one is asked for, so
    that vLLM goes on serving others.
    """
    from vllm import ModelRegistry

    from ..transformers_hybrid import register_hybrid

    register_hybrid()
    for name in MODELS:
        ModelRegistry.register_model(name, f"{__name__}:{name}")


def __getattr__(name: str) -> Any:
    """The class of a model, which vLLM asks for by its name.

    Raises:
        ImportError: a version of vLLM that is not supported.
    """
    if name not in MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vllm

    check_version(vllm.__version__)
    return getattr(importlib.import_module(MODELS[name], __name__), name)
