"""Models of all types in transformers: with our attention they have the same results as with eager
attention, or are refused when they are made.

FDMA_FULL=1 takes all types; otherwise types with special attention are taken, and a few others.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import flash_dmattn.transformers as ours  # noqa: E402
import sweep_transformers as sweep  # noqa: E402
from doge_models import registered  # noqa: E402

__all__ = ["registered"]  # a fixture

# These models, or some of their layers, compute attention in their own code.
REFUSED = """
big_bird bigbird_pegasus bloom canine convbert cpmant data2vec-vision deberta deberta-v2 falcon
fastspeech2_conformer flaubert fsmt gpt_neox_japanese ibert imagegpt led longformer
megatron-bert mobilevit mpnet mpt mra mvp nystromformer openai-gpt rembert roformer rwkv
sam_hq_vision_model sam_vision_model sew-d squeezebert swiftformer tapas visual_bert vitdet vits
wavlm xglm xlm yoso
""".split()
# These have convolutions, recurrences or Fourier transforms in place of attention.
WITHOUT_ATTENTION = """
bit dinov3_convnext falcon_mamba fnet focalnet mamba mobilenet_v1 mobilenet_v2 poolformer regnet
resnet textnet
""".split()
SAMPLE = """
bart blenderbot blenderbot-small m2m_100 marian mbart nllb-moe pegasus pegasus_x plbart whisper
modernbert openai_privacy_filter modernbert-decoder llama4_text phimoe qwen2_moe doge
t5 mt5 umt5 longt5 switch_transformers inkling_text inkling2_text wav2vec2-conformer
bloom gpt_neox_japanese led mvp bigbird_pegasus big_bird canine mpt xglm falcon data2vec-vision
deepseek_v3 deepseek_v4 hy_v4 mistral gemma2 gpt_oss phi3 cohere2 llama bert splinter vit mamba
""".split()


def types() -> list[str]:
    known = sweep.names_of_types()
    if os.environ.get("FDMA_FULL") == "1":
        return known
    return [name for name in SAMPLE if name in known]  # older versions have fewer


@pytest.mark.parametrize("name", types())
def test_every_type(name: str) -> None:
    found = sweep.try_type(name)
    if found.kind == "not made":
        assert name not in SAMPLE
        pytest.skip(found.detail[:100])
    if name in REFUSED:
        assert found.kind == "refused", found
        return
    assert found.kind == "agrees", found
    assert (found.calls == 0) == (name in WITHOUT_ATTENTION), found


def make(name: str, **sizes: Any) -> Any:
    config = transformers.AutoConfig.for_model(name, **sizes)
    return transformers.AutoModel.from_config(config, attn_implementation="dynamic_mask")


BLOOM = {"vocab_size": 300, "hidden_size": 64, "n_layer": 2, "n_head": 4}
MESSAGE = "attn_implementation: is 'dynamic_mask' for Bloom.*, which computes its attention in its"


def test_refusals(tmp_path: Path) -> None:
    """In each of the ways in which a model gets its attention."""
    with pytest.raises(ValueError, match=MESSAGE):
        make("bloom", **BLOOM)
    model = transformers.BloomForCausalLM(transformers.BloomConfig(**BLOOM))
    model.save_pretrained(tmp_path)
    kind = transformers.AutoModelForCausalLM
    with pytest.raises(ValueError, match=MESSAGE):
        kind.from_pretrained(tmp_path, attn_implementation="dynamic_mask")
    config = transformers.BloomConfig(**BLOOM)
    config._attn_implementation = "dynamic_mask"
    with pytest.raises(ValueError, match=MESSAGE):
        transformers.BloomForCausalLM(config)
    kind.from_pretrained(tmp_path, attn_implementation="eager")(torch.ones(1, 5, dtype=torch.long))


class OwnModel(transformers.LlamaForCausalLM):
    """A user's model; its file does not contain the attention."""


def test_models_of_a_user() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, vocab_size=100, num_attention_heads=4)
    model = OwnModel._from_config(config, attn_implementation="dynamic_mask")
    with sweep.counted() as calls:
        model(torch.ones(1, 5, dtype=torch.long))
    assert len(calls) == 1
    assert ours.calls_interface(OwnModel)
