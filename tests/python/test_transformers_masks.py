"""Masks of transformers, and the arguments of attention() that they become."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

transformers = pytest.importorskip("transformers")

import flash_dmattn.transformers as ours  # noqa: E402
from doge_models import (  # noqa: E402
    LENGTH,
    assert_near,
    make_models,
    make_tokens,
    registered,
)
from flash_dmattn import functional, transformers_masks  # noqa: E402

__all__ = ["registered"]  # a fixture

TINY = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
PAIRS = ("attn_mask", "attn_bias")  # with numbers for each query and key
ENDS = [0, 30, 31, LENGTH]
POSITIONS = torch.cat([torch.arange(b - a) for a, b in zip(ENDS, ENDS[1:])])[None]


def options_of(model: Any, *given: Any, **more: Any) -> list[dict[str, Any]]:
    """The arguments of each layer for attention(), except None."""
    with mock.patch.object(functional, "attention", wraps=functional.attention) as watched:
        with torch.no_grad():
            model(*given, **more)
    calls = [call.kwargs for call in watched.call_args_list]
    assert len(calls) == 2
    return [{key: x for key, x in call.items() if x is not None} for call in calls]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name, windows", [("llama", ()), ("mistral", (0, 1)), ("gemma", (0,))])
def test_no_mask_of_pairs(name: str, windows: tuple[int, ...], padded: bool) -> None:
    """Causal masks, sliding windows, padding and packed sequences need no mask of pairs."""
    _, selected = make_models(name)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, : 9 * padded] = 0
    for number, options in enumerate(options_of(selected, make_tokens(), attention_mask=mask)):
        assert options["causal"]
        assert not options.keys() & set(PAIRS)
        assert ("selection" in options) == (number in windows)
        assert ("key_valid" in options) == padded
    given = {"position_ids": POSITIONS, "use_cache": False}
    for number, options in enumerate(options_of(selected, make_tokens(1), **given)):
        assert options["starts"].tolist() == ENDS
        assert not options.keys() & set(PAIRS)
        assert ("selection" in options) == (number in windows)


def test_blocks_have_a_mask_in_compiled_code() -> None:
    """Dynamo cannot tell them from packed sequences."""
    kinds = {transformers.LlamaConfig: False, transformers.Gemma3TextConfig: True}
    for kind, has_blocks in kinds.items():
        transformers.AutoModel.from_config(kind(**TINY))  # loads its module
        assert transformers_masks.has_blocks(kind) == has_blocks


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_steps_have_no_mask_of_pairs(name: str) -> None:
    _, selected = make_models(name)
    cache = transformers.DynamicCache(config=selected.config)
    with torch.no_grad():
        selected(make_tokens(), past_key_values=cache)
    for step, left in enumerate((0, 70)):
        mask = torch.ones(2, LENGTH + 1 + step, dtype=torch.long)
        mask[0, :left] = 0
        given = {"past_key_values": cache, "attention_mask": mask}
        for options in options_of(selected, make_tokens(2, 1), **given):
            assert not options.keys() & {*PAIRS, "selection"}
            assert ("key_valid" in options) == (left > 0)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma"])
def test_packed_sequences_in_several_rows(name: str) -> None:
    eager, selected = make_models(name)
    given = {"position_ids": POSITIONS.expand(2, -1), "use_cache": False}
    with torch.no_grad():
        wanted = eager(make_tokens(), **given).logits
        assert_near(selected(make_tokens(), **given).logits, wanted)


@pytest.mark.parametrize("name", ["mistral", "gemma"])
def test_padding_in_the_middle_of_a_window(name: str) -> None:
    """Padding takes up places in the window, which then holds fewer keys."""
    eager, selected = make_models(name)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[:, 40:55] = 0
    given = {"attention_mask": mask}
    with torch.no_grad():
        wanted = eager(make_tokens(), **given).logits[mask.bool()]
        assert_near(selected(make_tokens(), **given).logits[mask.bool()], wanted)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("left", [0, 9])
def test_a_decoder_that_is_not_causal(name: str, left: int) -> None:
    eager, selected = make_models(name, is_causal=False)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :left] = 0
    with torch.no_grad():
        wanted = eager(make_tokens(), attention_mask=mask).logits[mask.bool()]
        assert_near(selected(make_tokens(), attention_mask=mask).logits[mask.bool()], wanted)


def test_masks_of_the_model_beside_a_position_bias() -> None:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(vocab_size=1000, decoder_start_token_id=1, **sizes)
    made = []
    for name in ("eager", "dynamic_mask"):
        torch.manual_seed(0)
        kind = transformers.T5EncoderModel
        made.append(kind._from_config(config, attn_implementation=name).eval())
    for parameter in made[0].parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    made[1].load_state_dict(made[0].state_dict())
    allowed = (torch.rand(2, 1, LENGTH, LENGTH) < 0.5) | torch.eye(LENGTH, dtype=torch.bool)
    added = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    with torch.no_grad():
        wanted = made[0](make_tokens(), attention_mask=added)[0]
        for mask in (added, allowed):
            assert_near(made[1](make_tokens(), attention_mask=mask)[0], wanted)


def eager_attention_forward(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, slopes: Any = None, **_: Any
) -> None:
    """A stand-in for transformers' eager attention, with the arguments that it takes."""


class Layer(torch.nn.Module):
    is_causal = True


def test_unknown_arguments() -> None:
    """Arguments that eager attention takes are refused, those that it ignores are ignored."""
    rows = torch.randn(3, 2, 4, 10, 16)
    wanted, _ = ours.attend(Layer(), *rows, None)
    found, _ = ours.attend(Layer(), *rows, None, slopes=None, use_cache=True, indices=rows)
    assert torch.equal(found, wanted)
    with pytest.raises(NotImplementedError, match="slopes: is given by Layer, want None"):
        ours.attend(Layer(), *rows, None, slopes=torch.ones(4))
    with pytest.raises(NotImplementedError, match="attention_mask: rank is 5, want 2 or 4"):
        ours.attend(Layer(), *rows, torch.ones(1, 1, 1, 10, 10, dtype=torch.bool))


def test_sinks_of_queries() -> None:
    """One sink for each query, or the same for all queries of a head."""
    query, key, value = torch.randn(3, 2, 4, 10, 16)
    sinks = torch.randn(4)
    wanted, _ = ours.attend(Layer(), query, key, value, None, s_aux=sinks)
    each = sinks[None, :, None, None].expand(2, 4, 10, 1)
    assert_near(ours.attend(Layer(), query, key, value, None, sinks=each)[0], wanted)


def test_heads_of_other_sizes() -> None:
    query, key = torch.randn(2, 2, 4, 10, 27)
    value = torch.randn(2, 4, 10, 5)
    found, _ = ours.attend(Layer(), query, key, value, None)
    given = {"is_causal": True}
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, **given)
    assert_near(found, wanted.transpose(1, 2))


@pytest.mark.parametrize("name, count, left", [("llama", 1, 3), ("mistral", 2, 0)])
def test_static_caches_compile_once(name: str, count: int, left: int) -> None:
    """generate() compiles one graph for single tokens, and no more as the length grows, except a
    second one for transformers' cache of a sliding window."""
    _, selected = make_models(name)
    graphs = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    compiled = transformers.CompileConfig(backend=backend, mode=None, fullgraph=True)
    compiled._compile_all_devices = True
    tokens, mask = make_tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :left] = 0
    given = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    given.update(output_logits=True, return_dict_in_generate=True)
    torch._dynamo.reset()
    wanted = selected.generate(tokens, **given)
    given.update(cache_implementation="static", compile_config=compiled)
    found = selected.generate(tokens, **given)
    assert len(graphs) == count
    assert_near(found.logits[0], wanted.logits[0])
    assert_near(found.logits[1], wanted.logits[1])
