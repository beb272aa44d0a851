"""Models of all types in transformers: with our attention they have the same results as with eager
attention, or are refused when they are made.

FDMA_FULL=1 takes all types; otherwise types with special attention are taken, and a few others.
"""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple
from unittest import mock

import pytest
import torch
from samples import FULL

transformers = pytest.importorskip("transformers")

import flash_dmattn.transformers as ours  # noqa: E402
from doge_models import registered  # noqa: E402
from flash_dmattn import functional, fused  # noqa: E402
from transformers import (  # noqa: E402
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
)
from transformers.models.auto import modeling_auto  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

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
bart whisper pegasus_x modernbert openai_privacy_filter modernbert-decoder llama4_text phimoe doge
t5 umt5 longt5 inkling2_text wav2vec2-conformer bloom led falcon data2vec-vision deepseek_v3
deepseek_v4 mistral gemma2 gpt_oss cohere2 vit mamba
""".split()


NAME = "dynamic_mask"
ALLOWED = 1e-4  # relative to eager's largest number
PARAMETERS_MAX = 30_000_000
VOCABULARY, WINDOW, TOKENS = 300, 9, 40
FIELDS = {  # value: names of fields that get it, if a configuration has them
    1: "encoder_layers decoder_layers num_experts_per_tok max_window_layers first_k_dense_replace "
    "n_group topk_group bos_token_id decoder_start_token_id",
    2: "num_hidden_layers n_layer num_layers num_key_value_heads num_local_experts num_experts "
    "n_routed_experts eos_token_id global_attn_every_n_layers no_rope_layer_interval",
    4: "num_attention_heads encoder_attention_heads decoder_attention_heads n_head num_heads",
    8: "patch_size num_mel_bins rotary_dim",
    WINDOW: "sliding_window attention_chunk_size",
    WINDOW + 1: "local_attention",
    16: "head_dim d_kv q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim "
    "query_pre_attn_scalar",
    32: "image_size moe_intermediate_size",
    40: "max_source_positions",
    64: "hidden_size d_model n_embd embedding_size word_embed_proj_dim max_target_positions",
    96: "intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff mlp_hidden_size",
    128: "max_position_embeddings n_positions",
    VOCABULARY: "vocab_size",
}
VALUES = {name: number for number, names in FIELDS.items() for name in names.split()}
VALUES = {**VALUES, "pad_token_id": 0, "use_sliding_window": True, "attn_logit_softcapping": 5.0}
MEMBERS = ("text_config", "vision_config", "audio_config")  # of models with several parts
# Some types derive the number of heads from other sizes, and have to leave it unset; others need as
# many as the queries have.
CHANGES: tuple[dict[str, int | None], ...] = (
    {},
    {"head_dim": None},
    {"head_dim": None, "num_key_value_heads": None},
    {"num_key_value_heads": 4},
)


class Outcome(NamedTuple):
    """The outcome of a model type: "agrees", "differs", "refused", "error", or, if eager attention
    does not get so far, "not made"."""

    kind: str
    name: str
    detail: str
    error: float = 0.0  # the largest, relative to eager's range
    calls: int = 0  # of our attention


@contextlib.contextmanager
def counted() -> Iterator[list[None]]:
    """A list that grows with each call of this package's attention."""
    calls: list[None] = []

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(None)
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for module, name in ((functional, "attention"), (fused, "flash_dma_attention")):
            patched = mock.patch.object(module, name, counting(getattr(module, name)))
            stack.enter_context(patched)
        yield calls


def make_config(kind: type, changes: dict[str, int | None]) -> Any:
    usual = kind()
    if usual.model_type != "whisper" and any(hasattr(usual, member) for member in MEMBERS):
        raise ValueError("is made of several models")
    values = {name: x for name, x in {**VALUES, **changes}.items() if x is not None}
    names = [name for name in values if hasattr(usual, name)]
    return kind(**{name: values[name] for name in names}, global_head_dim=16)


def make_model(auto: Any, config: Any, implementation: str) -> Any:
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    return auto.from_config(config, attn_implementation=implementation).eval()


def make_eager(auto: Any, config: Any) -> Any:
    """A model with eager attention and weights that matter."""
    with torch.device("meta"):
        made = make_model(auto, config, "eager")
    if sum(one.numel() for one in made.parameters()) > PARAMETERS_MAX:
        raise ValueError("has too many parameters")
    model = make_model(auto, config, "eager")
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15, generator=random)
    return model


def make_cases(kind: type) -> tuple[Any, Any, list[Any]]:
    """A small configuration, its model with eager attention, and the results for each input.

    Raises:
        ValueError: no input gives a result.
    """
    for changes in CHANGES:
        try:
            config = make_config(kind, changes)
            model = make_eager(AutoModel, config)
            cases = [(given, rows, result_of(model, given)) for given, rows in inputs_of(model)]
            return config, model, cases
        except Exception as error:  # of any kind, for example a missing package
            last = f"{type(error).__name__}: {error}"
    raise ValueError(last)


def make_tokens(length: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(2)
    rows = [torch.randperm(VOCABULARY - 10, generator=random)[:length] + 5 for _ in range(2)]
    return torch.stack(rows)


def inputs_of(model: Any) -> Iterator[tuple[dict[str, Any], torch.Tensor | None]]:
    """Inputs, and the rows of the results that are not padding; None for all."""
    random, config, wanted = torch.Generator().manual_seed(3), model.config, model.main_input_name
    if wanted == "pixel_values":
        sizes = (2, getattr(config, "num_channels", 3), 32, 32)
        yield {wanted: torch.randn(sizes, generator=random)}, None
    elif wanted == "input_features":
        given = {wanted: torch.randn(2, 8, 80, generator=random)}
        yield {**given, "decoder_input_ids": make_tokens(12)}, None
    elif wanted == "input_values":
        yield {wanted: torch.randn(2, 4000, generator=random)}, None
    else:
        for length in (WINDOW - 3, TOKENS):
            for is_padded in (False, True):
                yield inputs_of_text(config, length, is_padded)


def inputs_of_text(
    config: Any, length: int, is_padded: bool
) -> tuple[dict[str, Any], torch.Tensor | None]:
    tokens, mask = make_tokens(length), torch.ones(2, length, dtype=torch.long)
    given = {"input_ids": tokens}
    if is_padded:
        mask[1, length - length // 3 :] = 0
        given["attention_mask"] = mask
    if config.is_encoder_decoder:  # its results come from the decoder, which has no padding
        return {**given, "decoder_input_ids": make_tokens(length // 2)}, None
    return given, mask.bool() if is_padded else None


def result_of(model: Any, given: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        found = model(**given)
    hidden = getattr(found, "last_hidden_state", None)
    return (found[0] if hidden is None else hidden).double()


def error_of(found: torch.Tensor, wanted: torch.Tensor, rows: torch.Tensor | None) -> float:
    """The largest difference, relative to the largest wanted number; NaN if either has NaN."""
    if rows is not None and found.shape[:2] == rows.shape:
        found, wanted = found[rows], wanted[rows]
    return float((found - wanted).abs().max() / wanted.abs().max())


def exact_of(model: Any, given: dict[str, Any]) -> torch.Tensor:
    """The result in float64."""
    wide = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
    return result_of(copy.deepcopy(model).double(), wide)


def error_of_steps(found: Any, wanted: Any) -> float:
    """The same for the logits of generated tokens, up to the first token that rounding may
    change."""
    worst = 0.0
    for step, (one, other) in enumerate(zip(found.logits, wanted.logits)):
        worst = max(worst, error_of(one.double(), other.double(), None))
        at = step - len(wanted.logits)
        if not torch.equal(found.sequences[:, at], wanted.sequences[:, at]):
            break
    return worst


def compare_generated(kind: type, config: Any) -> float | None:
    """The error of generation, with caches; None if eager attention cannot generate."""
    is_pair = config.is_encoder_decoder
    mapping = "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING" if is_pair else "MODEL_FOR_CAUSAL_LM_MAPPING"
    if kind not in getattr(modeling_auto, mapping):
        return None
    auto = AutoModelForSeq2SeqLM if is_pair else AutoModelForCausalLM
    length = TOKENS // 2
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :5] = 0
    given = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    given.update(output_logits=True, return_dict_in_generate=True, attention_mask=mask)
    if is_pair:
        given["decoder_start_token_id"] = 1
    try:
        eager = make_eager(auto, config)
        wanted = eager.generate(make_tokens(length), **given)
    except Exception:  # of any kind: there is nothing to compare with
        return None
    model = make_model(auto, config, NAME)
    model.load_state_dict(eager.state_dict())
    return error_of_steps(model.generate(make_tokens(length), **given), wanted)


def try_type(name: str) -> Outcome:
    kind, worst = CONFIG_MAPPING[name], 0.0
    try:
        config, eager, cases = make_cases(kind)
    except ValueError as error:
        return Outcome("not made", name, str(error))
    try:
        model = make_model(AutoModel, config, NAME)
        model.load_state_dict(eager.state_dict())
        with counted() as calls:
            for given, rows, wanted in cases:
                found = result_of(model, given)
                error = error_of(found, wanted, rows)
                if error > ALLOWED:  # a model may round as much as that in float32
                    error = error_of(found, exact_of(eager, given), rows)
                worst = max(worst, error)
        of_steps = compare_generated(kind, config)
    except Exception as error:
        is_refusal = str(error).startswith(f"attn_implementation: is '{NAME}' for ")
        detail = f"{type(error).__name__}: {error}"
        return Outcome("refused" if is_refusal else "error", name, detail)
    detail = "" if of_steps is None else f"generated {of_steps:.1e}"
    worst = max(worst, of_steps or 0.0)
    return Outcome("agrees" if worst <= ALLOWED else "differs", name, detail, worst, len(calls))


def types() -> list[str]:
    mapping = modeling_auto.MODEL_MAPPING
    known = sorted(name for name in CONFIG_MAPPING if CONFIG_MAPPING[name] in mapping)
    return known if FULL else [name for name in SAMPLE if name in known]


@pytest.mark.parametrize("name", types())
def test_every_type(name: str) -> None:
    found = try_type(name)
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
    with counted() as calls:
        model(torch.ones(1, 5, dtype=torch.long))
    assert len(calls) == 1
    assert ours.calls_interface(OwnModel)
