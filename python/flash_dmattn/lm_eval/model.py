"""The model `flash_dmattn` of lm-eval: its model of transformers, with attention computed here and
a cache of constant size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..doge_cache import NAME, DogeCache
from ..transformers import register
from ..transformers_hybrid import CACHE, TYPE

register()


def check_folder(folder: str) -> None:
    """Refuse what is no folder of a causal language model with its tokenizer.

    Raises:
        ValueError: the folder, and what was wanted.
    """
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise ValueError(f"pretrained: is {folder!r}, want a folder that has a config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: is no JSON: {error}") from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind != TYPE and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(
            f"{file}: model_type is {kind!r}, want 'doge', {TYPE!r} or another causal language "
            "model"
        )
    if not any(Path(folder).glob("*.safetensors")):
        raise ValueError(f"pretrained: {folder!r} has no weights, want a model.safetensors")
    if not (Path(folder) / "tokenizer_config.json").is_file():
        raise ValueError(
            f"pretrained: {folder!r} has no tokenizer_config.json, want what the tokenizer's "
            "save_pretrained() writes"
        )


@register_model("flash_dmattn")
class DynamicMaskLM(HFLM):
    """A folder that transformers wrote, with attn_implementation "dynamic_mask".

    Args:
        pretrained: the folder.
        given: as of lm-eval's model `hf`.

    Raises:
        ValueError: the folder has no causal language model, or a model that computes its attention
            in its own code.
    """

    def __init__(self, pretrained: str, **given: Any) -> None:
        check_folder(pretrained)
        super().__init__(pretrained=pretrained, attn_implementation=NAME, **given)
        tokens, known = len(self.tokenizer), int(self.config.vocab_size)
        if tokens > known:
            raise ValueError(
                f"pretrained: the tokenizer has {tokens} tokens, want at most the model's {known}"
            )
        # lm-eval scores whole texts, for which a cache would be filled in vain.
        self.model.config.use_cache = False

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **given: Any
    ) -> torch.Tensor:
        if self.config.model_type == "doge":
            given[CACHE] = DogeCache(self.model.config)
        return super()._model_generate(context, max_length, stop, **given)
