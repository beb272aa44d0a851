"""flash_dmattn.transformers: models of transformers have the results of its eager attention, and
their masks become arguments of attention()."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from programs import output_of, python

transformers = pytest.importorskip("transformers")

import flash_dmattn  # noqa: E402
import flash_dmattn.transformers as ours  # noqa: E402
from doge_models import (  # noqa: E402
    CONFIGS,
    LENGTH,
    assert_near,
    decided,
    in_pieces,
    make_mask,
    make_models,
    make_positions,
    make_separate,
    make_tokens,
    registered,
)
from flash_dmattn import functional, transformers_masks  # noqa: E402
from samples import combinations  # noqa: E402
from transformers.models.doge import modeling_doge  # noqa: E402

__all__ = ["decided", "registered"]  # fixtures

every_model = pytest.mark.parametrize("name", CONFIGS)


TINY = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
PAIRS = {"attn_mask", "attn_bias"}  # with numbers for each query and key
ENDS = [0, 30, 31, LENGTH]
PADDINGS = [(0, 0), (20, 0), (0, 20), (7, 30)]


@pytest.mark.parametrize(("name", "padding"), combinations(CONFIGS, PADDINGS))
@pytest.mark.usefixtures("decided")
def test_logits(name: str, padding: tuple[int, int]) -> None:
    eager, selected = make_separate(name)
    tokens, mask = make_tokens(), make_mask(*padding)
    with torch.no_grad():
        wanted = eager(tokens, attention_mask=mask).logits
        found = selected(tokens, attention_mask=mask).logits
    there = mask.bool()
    assert_near(found[there], wanted[there])


@every_model
def test_gradients(name: str) -> None:
    pair = make_models(name)
    tokens, mask = make_tokens(), make_mask(9, 5)
    # a padding query sees no key: eager attention then takes the mean of all values
    is_predicted = mask.bool() & mask.roll(1, 1).bool()
    labels = tokens.masked_fill(~is_predicted, -100)
    for model in pair:
        model.train()
        model(tokens, attention_mask=mask, labels=labels).loss.backward()
    for (parameter_name, found), wanted in zip(pair[1].named_parameters(), pair[0].parameters()):
        if wanted.grad is None:  # a layer keeps all keys equally
            assert found.grad is None or found.grad.abs().max() == 0, parameter_name
            continue
        assert_near(found.grad, wanted.grad)


@every_model
@pytest.mark.usefixtures("decided")
def test_packed(name: str) -> None:
    """One row whose position_ids begin anew, and the same with cu_seq_lens_q."""
    eager, selected = make_separate(name)
    tokens, starts = make_tokens(1), torch.tensor(ENDS)
    with torch.no_grad():
        given = {"position_ids": make_positions(ENDS), "use_cache": False}
        wanted = in_pieces(eager, tokens, ENDS)
        for more in ({}, {"cu_seq_lens_q": starts}):
            assert_near(selected(tokens, **given, **more).logits, wanted)
        mask = (torch.arange(LENGTH) < LENGTH - 3).long()[None]
        found = selected(tokens, attention_mask=mask, cu_seq_lens_q=starts, **given).logits
        assert_near(found[:, :-3], wanted[:, :-3])


@pytest.mark.parametrize(
    ("name", "begins", "use_cache"),
    combinations(CONFIGS, [(5, 5), (0, 1), (4, 100)], [False, True]),
)
@pytest.mark.usefixtures("decided")
def test_positions_that_begin_anew(name: str, begins: tuple[int, int], use_cache: bool) -> None:
    """transformers defines where sequences are packed: at any jump, without a cache."""
    eager, selected = make_separate(name)
    positions = torch.cat([torch.arange(20) + begin for begin in begins])[None]
    given = {"position_ids": positions, "use_cache": use_cache}
    with torch.no_grad():
        wanted = eager(make_tokens(1, 40), **given).logits
        assert_near(selected(make_tokens(1, 40), **given).logits, wanted)


@pytest.mark.parametrize("last", [0, 1])
@every_model
@pytest.mark.usefixtures("decided")
def test_positions_beside_a_mask_are_of_one_sequence(name: str, last: int) -> None:
    """With an attention_mask, of ones too, transformers does not look for packed sequences."""
    eager, selected = make_separate(name)
    mask = torch.ones(1, 40, dtype=torch.int64)
    mask[0, -1] = last
    positions = torch.cat((torch.arange(15), torch.arange(25)))[None]
    given = {"position_ids": positions, "attention_mask": mask, "use_cache": False}
    with torch.no_grad():
        wanted = eager(make_tokens(1, 40), **given).logits[:, :-1]
        assert_near(selected(make_tokens(1, 40), **given).logits[:, :-1], wanted)


@pytest.mark.parametrize(("name", "cache"), combinations(CONFIGS, [None, "static"]))
@pytest.mark.usefixtures("decided")
def test_generated_tokens(name: str, cache: str | None) -> None:
    eager, selected = make_separate(name)
    given = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    tokens, mask = make_tokens(2, 50), make_mask(11, length=50)
    if cache is not None:
        given["cache_implementation"] = cache
    wanted = eager.generate(tokens, attention_mask=mask, **given)
    assert torch.equal(selected.generate(tokens, attention_mask=mask, **given), wanted)


@pytest.mark.parametrize(
    ("name", "left", "chunk", "count"), combinations(CONFIGS, [0, 11], [None, 8], [1, 2])
)
@pytest.mark.usefixtures("decided")
def test_prompts_in_a_static_cache(name: str, left: int, chunk: int | None, count: int) -> None:
    """Prompts longer than a sliding window. generate() makes the masks before the model does."""
    eager, selected = make_separate(name)
    given: dict[str, Any] = {"cache_implementation": "static", "prefill_chunk_size": chunk}
    given |= {"max_new_tokens": 1, "do_sample": count > 1, "num_return_sequences": count}
    given |= {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    tokens, mask = make_tokens(2, 50), make_mask(left, length=50)
    wanted, found = (
        model.generate(tokens, attention_mask=mask, **given).logits[0]
        for model in (eager, selected)
    )
    assert_near(found, wanted)


def test_saved_models(tmp_path: Path) -> None:
    """from_pretrained() accepts the implementation too."""
    eager, _ = make_models("doge with biases")
    eager.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="dynamic_mask"
    )
    tokens = make_tokens()
    with torch.no_grad():
        assert_near(loaded(tokens).logits, eager(tokens).logits)


@pytest.mark.parametrize("name", ["doge", "mistral"])
def test_checkpointed(name: str) -> None:
    _, selected = make_models(name)
    tokens, gradients = make_tokens(), []
    selected.train()
    for enabled in (False, True):
        if enabled:
            selected.gradient_checkpointing_enable()
        selected.zero_grad()
        selected(tokens, labels=tokens, use_cache=False).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in selected.parameters()])
    for one, other in zip(*gradients):
        assert torch.equal(one, other)


def test_other_implementations_stay() -> None:
    """The layers that replace Doge's compute the same as before with any other implementation."""
    eager, _ = make_models("doge")
    assert type(eager.model.layers[0].self_attn) is ours.DogeAttention
    plain = ours.StockDogeAttention(eager.config, 0).eval()
    plain.load_state_dict(eager.model.layers[0].self_attn.state_dict())
    hidden = torch.randn(2, 40, 64)
    angles = eager.model.rotary_emb(hidden, torch.arange(40)[None])
    mask = torch.zeros(2, 1, 40, 40).masked_fill(torch.ones(40, 40).triu(1).bool(), -1e9)
    for one, other in zip(
        plain(hidden, angles, mask), eager.model.layers[0].self_attn(hidden, angles, mask)
    ):
        assert torch.equal(one, other)


def test_models_made_by_their_class() -> None:
    config = copy.deepcopy(CONFIGS["doge"])
    config._attn_implementation = "dynamic_mask"
    model, tokens = transformers.DogeForCausalLM(config).eval(), make_tokens()
    assert type(model.model.layers[0].self_attn) is ours.DogeAttention
    with torch.no_grad():  # later tokens change nothing
        assert_near(model(tokens).logits[:, :30], model(tokens[:, :30]).logits)


def test_probabilities_of_eager_attention_are_recorded() -> None:
    eager, _ = make_models("doge")
    found = eager(make_tokens(), output_attentions=True).attentions
    assert [one.shape for one in found] == 2 * [(2, 4, LENGTH, LENGTH)]


def test_a_model_made_before_registering_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own mask would let queries see later keys."""
    monkeypatch.setattr(modeling_doge, "DogeAttention", ours.StockDogeAttention)
    config = copy.deepcopy(CONFIGS["doge"])
    config._attn_implementation = "dynamic_mask"
    with pytest.raises(ValueError, match="attn_implementation: is 'dynamic_mask' for a Doge model"):
        transformers.DogeForCausalLM(config)(make_tokens())


def test_nothing_grows_with_the_square_of_the_length() -> None:
    _, selected = make_models("doge")
    tokens = make_tokens(1, 400)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, tuple) else (result,):
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.numel())
            return result

    with torch.no_grad(), Watch():
        selected.model(tokens, attention_mask=torch.ones_like(tokens))
    assert largest < 400 * 400


def test_a_model_with_rules_of_its_own() -> None:
    """Its rules are a mask of pairs of a query and a key."""
    eager, selected = make_models("llama")
    tokens = make_tokens()
    mask = (torch.rand(2, 1, LENGTH, LENGTH) < 0.5) | torch.eye(LENGTH, dtype=torch.bool)
    mask &= torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.no_grad():
        wanted = eager(tokens, attention_mask=added).logits
        assert_near(selected(tokens, attention_mask=mask).logits, wanted)
        assert_near(selected(tokens, attention_mask=added).logits, wanted)


def test_bad_input() -> None:
    _, selected = make_models("doge")
    tokens = make_tokens()
    with pytest.raises(ValueError, match="attention_mask: rank is 4, want 2; attention_mask is"):
        selected(tokens, attention_mask=torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool))
    positions = torch.arange(LENGTH).remainder(40).expand(2, -1)
    with pytest.raises(ValueError, match="position_ids: has packed sequences in 2 rows, want 1"):
        selected(tokens, position_ids=positions, use_cache=False)
    _, selected = make_models("llama")
    for mask in (torch.ones(2, LENGTH, LENGTH), torch.ones(2, LENGTH, LENGTH, dtype=torch.bool)):
        with pytest.raises(NotImplementedError, match="attention_mask: rank is 3, want 2 or 4"):
            selected(tokens, attention_mask=mask)
    for version in ("4.57.1", "5.16.0", "6.0.0"):
        with pytest.raises(ImportError, match=f"transformers: is {version}, want 5.17 or later"):
            ours.check_version(version)
    ours.check_version("5.17.0.dev0")


def test_the_package_does_not_import_transformers() -> None:
    program = "import sys, flash_dmattn; print('transformers' in sys.modules)"
    assert output_of(python("-c", program)).strip() == "False"


@pytest.mark.parametrize(
    ("name", "left"), combinations(["doge", "doge with biases", "llama", "mistral"], [0, 20])
)
def test_bfloat16(name: str, left: int) -> None:
    """Errors of logits, and of the gradient of all parameters, relative to float32 are at most
    twice eager's errors, plus a rounding. (For parameters of two numbers, such as A, either may be
    nearer by chance: keys with close scores change places.)"""
    models = make_models(name)
    for parameter_name, parameter in models[0].named_parameters():
        if parameter_name.endswith(("dt_proj.weight", "v_proj.weight")):  # scores that differ
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    models[1].load_state_dict(models[0].state_dict())
    exact = copy.deepcopy(models[0].bfloat16()).float()
    tokens, mask = make_tokens(), make_mask(left)
    given = {"attention_mask": mask, "use_cache": False}

    def run(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(tokens, **given).logits[mask.bool()].float()
        parameters = [one for one in model.parameters() if one.requires_grad]
        gradients = torch.autograd.grad(logits.square().mean(), parameters)
        return logits.detach(), torch.cat([gradient.float().flatten() for gradient in gradients])

    runs = [run(one) for one in (exact, models[0], models[1].bfloat16())]
    sizes = (lambda x: x.abs().max(), lambda x: x.norm())  # of logits, and of the gradient
    for size, wanted, eager, found in zip(sizes, *runs):
        rounding = torch.finfo(torch.bfloat16).eps * size(wanted)
        assert size(found - wanted) <= 2 * size(eager - wanted) + rounding


@pytest.mark.skipif(transformers.__version__ < "5.23", reason="it cannot run experts")
def test_experts() -> None:
    """Without padding: transformers' router mixes the tokens of a batch."""
    eager, selected = make_models("doge", is_moe=True, num_experts=16, num_experts_per_tok=4)
    tokens = make_tokens()
    with torch.no_grad():
        assert_near(selected(tokens).logits, eager(tokens).logits)


@pytest.mark.parametrize("name", ["doge", "doge with biases"])
def test_the_layer_of_this_package_is_that_of_doge(name: str) -> None:
    """DynamicMaskAttention has the parameters and results of Doge's layer."""
    eager, _ = make_models(name)
    config, stock = eager.config, eager.model.layers[0].self_attn
    layer = flash_dmattn.DynamicMaskAttention(
        *(config.hidden_size, config.num_attention_heads, config.num_key_value_heads),
        config.keep_window_size,
        recent=0,
        qk_norm=True,
        norm_eps=config.rms_norm_eps,
        bias=config.attention_bias,
        dt_bias=config.attention_bias,
    )
    layer.load_state_dict(stock.state_dict())
    x = torch.randn(2, LENGTH, config.hidden_size)
    angles = eager.model.rotary_emb(x, torch.arange(LENGTH)[None])
    hidden = torch.ones(LENGTH, LENGTH).triu(1).bool()
    mask = torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(hidden, torch.finfo(x.dtype).min)
    assert_near(layer(x), stock(x, angles, attention_mask=mask)[0])


# ---- masks ----


def options_of(model: Any, *given: Any, **more: Any) -> list[dict[str, Any]]:
    """The arguments of each layer for attention(), except None."""
    with mock.patch.object(functional, "attention", wraps=functional.attention) as watched:
        with torch.no_grad():
            model(*given, **more)
    calls = [call.kwargs for call in watched.call_args_list]
    assert len(calls) == 2
    return [{key: x for key, x in call.items() if x is not None} for call in calls]


@pytest.mark.parametrize("name, windows", [("llama", ()), ("mistral", (0, 1)), ("gemma", (0,))])
def test_no_mask_of_pairs(name: str, windows: tuple[int, ...]) -> None:
    """Causal masks, sliding windows, padding and packed sequences need no mask of pairs."""
    _, selected = make_models(name)
    for left in (0, 9):
        found = options_of(selected, make_tokens(), attention_mask=make_mask(left))
        for number, options in enumerate(found):
            assert options["causal"] and not options.keys() & PAIRS
            assert ("selection" in options) == (number in windows)
            assert ("key_valid" in options) == (left > 0)
    given = {"position_ids": make_positions(ENDS), "use_cache": False}
    for number, options in enumerate(options_of(selected, make_tokens(1), **given)):
        assert options["starts"].tolist() == ENDS and not options.keys() & PAIRS
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
        mask = make_mask(left, length=LENGTH + 1 + step)
        given = {"past_key_values": cache, "attention_mask": mask}
        for options in options_of(selected, make_tokens(2, 1), **given):
            assert not options.keys() & (PAIRS | {"selection"})
            assert ("key_valid" in options) == (left > 0)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma"])
def test_packed_sequences_in_several_rows(name: str) -> None:
    eager, selected = make_models(name)
    given = {"position_ids": make_positions(ENDS).expand(2, -1), "use_cache": False}
    with torch.no_grad():
        wanted = eager(make_tokens(), **given).logits
        assert_near(selected(make_tokens(), **given).logits, wanted)


@pytest.mark.parametrize("name", ["mistral", "gemma"])
def test_padding_in_the_middle_of_a_window(name: str) -> None:
    """Padding takes up places in the window, which then holds fewer keys."""
    eager, selected = make_models(name)
    mask = make_mask()
    mask[:, 40:55] = 0
    given = {"attention_mask": mask}
    with torch.no_grad():
        wanted = eager(make_tokens(), **given).logits[mask.bool()]
        assert_near(selected(make_tokens(), **given).logits[mask.bool()], wanted)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_decoder_that_is_not_causal(name: str) -> None:
    eager, selected = make_models(name, is_causal=False)
    for mask in (make_mask(), make_mask(9)):
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
    tokens, mask = make_tokens(2, 9), make_mask(left, length=9)
    given = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    given.update(output_logits=True, return_dict_in_generate=True)
    torch._dynamo.reset()
    wanted = selected.generate(tokens, **given)
    given.update(cache_implementation="static", compile_config=compiled)
    found = selected.generate(tokens, **given)
    assert len(graphs) == count
    assert_near(found.logits[0], wanted.logits[0])
    assert_near(found.logits[1], wanted.logits[1])
