"""Doge in transformers: generation with the kept keys alone gives the same tokens as with a cache
of all keys; a dt_proj that is more than its weight; offloaded weights; sliding windows."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import context_ranks
import pytest
import torch
import torch.distributed as dist

transformers = pytest.importorskip("transformers")

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
from samples import combinations  # noqa: E402

__all__ = ["decided", "registered"]  # fixtures

# ---- caches ----

DOGE = ("doge", "doge with biases", "doge, all keys")


def generate_both(name: str, **given: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Tokens of eager attention with a cache of all keys, tokens with a DogeCache, and that
    cache."""
    eager, selected = make_separate(name)
    tokens, mask = make_tokens(2, 50), make_mask(11, length=50)
    given = {"max_new_tokens": 40, "attention_mask": mask, "pad_token_id": 0, **given}
    torch.manual_seed(9)
    wanted = eager.generate(tokens, **given)
    cache = ours.DogeCache(selected.config)
    torch.manual_seed(9)
    return wanted, selected.generate(tokens, past_key_values=cache, **given), cache


@pytest.mark.parametrize(
    ("name", "given"),
    combinations(
        DOGE,
        [
            {"do_sample": False},
            {"do_sample": True},
            {"do_sample": False, "num_beams": 3, "max_new_tokens": 12},
        ],
    ),
)
@pytest.mark.usefixtures("decided")
def test_generated_tokens_of_kept_keys(name: str, given: dict[str, Any]) -> None:
    wanted, found, cache = generate_both(name, **given)
    assert torch.equal(found, wanted)
    assert cache.get_seq_length() == wanted.shape[1] - 1
    rows = {layer.kept.keys.key.shape[1] for layer in cache.layers}
    assert rows == {CONFIGS[name].keep_window_size}  # whatever the length


def test_prompts_in_several_calls() -> None:
    _, selected = make_separate("doge")
    tokens = make_tokens(2, LENGTH)
    cache = ours.DogeCache(selected.config)
    with torch.no_grad():
        wanted = selected(tokens).logits
        assert_near(in_pieces(selected, tokens, [0, 70, 71, 72, LENGTH], cache), wanted)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert_near(selected(tokens, past_key_values=cache).logits, wanted)


def test_sequences_are_moved() -> None:
    _, selected = make_separate("doge")
    tokens = make_tokens(2, 60)
    cache = ours.DogeCache(selected.config)
    with torch.no_grad():
        selected(tokens[:, :50], past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0, 1]))
        given = tokens[[0, 1, 1], 50:]
        wanted = selected(tokens[[0, 1, 1]]).logits[:, 50:]
        assert_near(selected(given, past_key_values=cache).logits, wanted)
    assert cache.get_seq_length() == 60


def test_generation_goes_on_from_saved_caches() -> None:
    """In another cache, whose sequences stand in another order."""
    _, selected = make_separate("doge")
    given = {"max_new_tokens": 15, "do_sample": False, "pad_token_id": 0}
    cache = ours.DogeCache(selected.config)
    tokens = selected.generate(make_tokens(2, 50), past_key_values=cache, **given)
    states = [cache.save(b) for b in range(2)]
    wanted = selected.generate(tokens, past_key_values=cache, **given)
    other = ours.DogeCache(selected.config)
    with pytest.raises(ValueError, match="cache: has no sizes yet, want a call of the model"):
        other.restore(0, states[1])
    config = selected.config
    head_dim = config.hidden_size // config.num_attention_heads
    heads = config.num_key_value_heads
    other.early_initialization(2, heads, head_dim, selected.dtype, selected.device)
    for b in range(2):
        other.restore(b, states[1 - b])
    assert other.get_seq_length() == 64
    found = selected.generate(tokens.flip(0), past_key_values=other, **given)
    assert torch.equal(found.flip(0), wanted)


def test_caches_that_cannot_be_saved() -> None:
    _, selected = make_separate("doge")
    cache = ours.DogeCache(selected.config)
    with torch.no_grad():
        selected(make_tokens(1, 50), past_key_values=cache)
        cache.layers[0].activate_past_recording()
        selected(make_tokens(1, 2), past_key_values=cache)
    with pytest.raises(ValueError, match="cache: has tokens of assisted generation that crop"):
        cache.save()
    sliding = transformers.DogeConfig(num_hidden_layers=2, sliding_window=16)
    with pytest.raises(NotImplementedError, match="cache: its layer 0 is a DynamicSlidingWindow"):
        ours.DogeCache(sliding).save()


def test_bad_caches() -> None:
    _, selected = make_separate("doge")
    eager_llama, llama = make_separate("llama")
    tokens = make_tokens(1, 10)
    other = ours.DogeCache(CONFIGS["doge with biases"])
    with pytest.raises(ValueError, match="cache: its keep_window_size is 9, want the model.s"):
        selected(tokens, past_key_values=other)
    for model in (llama, eager_llama):
        with pytest.raises(ValueError, match="cache: is a DogeCache, want another one unless"):
            model(tokens, past_key_values=ours.DogeCache(CONFIGS["doge"]))
    with pytest.raises(NotImplementedError, match="offload: a DogeCache stays on its device"):
        other.layers[0].offload()
    with pytest.raises(TypeError, match="config: is a LlamaConfig, want a DogeConfig"):
        ours.DogeCache(llama.config)


def generate_counted(model: Any, *tokens: torch.Tensor, **given: Any) -> tuple[torch.Tensor, int]:
    """The result of model.generate(), and how often it called the model."""
    calls: list[None] = []
    hook = model.model.register_forward_hook(lambda *_: calls.append(None))
    generated = model.generate(*tokens, **given)
    hook.remove()
    return generated, len(calls)


@pytest.mark.parametrize(("name", "drafts"), combinations(DOGE, [3, 30]))
@pytest.mark.usefixtures("decided")
def test_assisted_generation(name: str, drafts: int) -> None:
    """Candidates come from the prompt, which repeats, so that some are accepted."""
    eager, selected = make_separate(name)
    tokens = make_tokens(1, 40).repeat(1, 3)
    given = {"max_new_tokens": 80, "do_sample": False, "pad_token_id": 0}
    wanted = selected.generate(tokens, **given)
    eager(wanted)  # fails if its choice of keys is a near tie
    cache = ours.DogeCache(selected.config)
    drafted = {"prompt_lookup_num_tokens": drafts, "max_matching_ngram_size": 1}
    found, calls = generate_counted(selected, tokens, past_key_values=cache, **drafted, **given)
    assert torch.equal(found, wanted)
    assert 1 < calls < 80  # some candidates were accepted
    assert cache.get_seq_length() == 120 + 79


@pytest.mark.parametrize("name", DOGE)
@pytest.mark.usefixtures("decided")
def test_assistant_models(name: str) -> None:
    """The assistant is the model with other weights in its last layer, so that it is right
    sometimes."""
    eager, selected = make_separate(name)
    _, assistant = make_separate(name)
    last = assistant.model.layers[-1].mlp.down_proj.weight
    torch.nn.init.normal_(last, std=0.05)
    given = {"max_new_tokens": 50, "do_sample": False, "pad_token_id": 0}
    tokens = make_tokens(1, 50)
    wanted = selected.generate(tokens, **given)
    eager(wanted)  # fails if its choice of keys is a near tie
    cache = ours.DogeCache(selected.config)
    given = {**given, "assistant_model": assistant}
    found, calls = generate_counted(selected, tokens, past_key_values=cache, **given)
    assert torch.equal(found, wanted)
    assert 5 < calls < 50  # some candidates were accepted


@pytest.mark.parametrize("length", [30, 100])
def test_assisted_generation_after_padding(length: int) -> None:
    """Tokens after the last padding can be removed, in prompts of fewer than 64 tokens too. All
    keys are kept, because the scores of equal tokens tie up to rounding."""
    _, selected = make_models("doge, all keys")
    tokens, mask = make_tokens(1, length // 2).repeat(1, 2), torch.ones(1, length, dtype=torch.long)
    mask[0, :3] = 0
    given = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    given.update(prompt_lookup_num_tokens=5, max_matching_ngram_size=1, attention_mask=mask)
    cache = ours.DogeCache(selected.config)
    found, calls = generate_counted(selected, tokens, past_key_values=cache, **given)
    assert 1 < calls < 30  # some candidates were accepted
    mask = torch.cat((mask, torch.ones(1, 30, dtype=torch.long)), 1)
    with torch.no_grad():
        logits = selected(found, attention_mask=mask).logits[:, length - 1 : -1]
    chosen = logits.gather(2, found[:, length:, None])[..., 0]
    assert_near(chosen, logits.amax(2))


def test_crop_behind_padding() -> None:
    _, selected = make_separate("doge")
    tokens, others = make_tokens(1), make_tokens(2)[1:]
    mask = torch.ones(1, LENGTH, dtype=torch.long)
    mask[0, :5] = mask[0, 20:24] = 0
    cache = ours.DogeCache(selected.config)
    cache.activate_past_recording()
    with torch.no_grad():
        wanted = selected(tokens, attention_mask=mask).logits[:, 24:]
        given = {"past_key_values": cache, "attention_mask": mask[:, :50]}
        selected(torch.cat((tokens[:, :24], others[:, :26]), 1), **given)
        cache.crop(-26)
        given["attention_mask"] = mask
        assert_near(selected(tokens[:, 24:], **given).logits, wanted)
        with pytest.raises(ValueError, match="want 0 to -64: a DogeCache can remove"):
            cache.crop(-65)


@pytest.mark.parametrize("pieces", [[70, 1, 1, 5, 13], [10, 40, 40], [90]])
def test_crop(pieces: list[int]) -> None:
    """Removed tokens leave no trace, whatever they have evicted."""
    _, selected = make_separate("doge")
    tokens, others = make_tokens(1), make_tokens(2)[1:]
    cache, seen = ours.DogeCache(selected.config), 0
    cache.activate_past_recording()
    with torch.no_grad():
        wanted = selected(tokens).logits
        for length in pieces:
            wrong = min(64 - min(length, 64), 20)
            piece = torch.cat((tokens[:, seen : seen + length], others[:, :wrong]), 1)
            logits = selected(piece, past_key_values=cache).logits
            assert_near(logits[:, :length], wanted[:, seen : seen + length])
            cache.crop(-wrong)
            seen += length
            assert cache.get_seq_length() == seen
        cache.layers[0].record_past = cache.layers[1].record_past = False
        more = selected(others[:, :7], past_key_values=cache).logits
        assert_near(more, selected(torch.cat((tokens, others[:, :7]), 1)).logits[:, seen:])


def test_drafts_that_nothing_settles() -> None:
    """Without crop() the newest 64 tokens can be removed, and the older ones have entered."""
    _, selected = make_separate("doge")
    tokens = make_tokens(1)
    cache = ours.DogeCache(selected.config)
    cache.activate_past_recording()
    with torch.no_grad():
        for token in tokens.split(9, 1):
            selected(token, past_key_values=cache)
        with pytest.raises(
            ValueError, match="tokens_to_remove: is -65, want 0 to -64: a DogeCache"
        ):
            cache.crop(-65)
        cache.crop(-64)
        logits = selected(tokens[:, 26:], past_key_values=cache).logits
        assert_near(logits, selected(tokens).logits[:, 26:])


def test_bad_crops() -> None:
    _, selected = make_separate("doge")
    tokens = make_tokens(1, 40)
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[0, 30] = 0
    with torch.no_grad():
        for static, given in ((True, {}), (False, {"attention_mask": mask})):
            cache = ours.DogeCache(selected.config, static)
            assert cache.is_croppable != static
            cache.activate_past_recording()
            selected(tokens, past_key_values=cache, **given)
            cache.crop(0)
            with pytest.raises(ValueError, match="tokens_to_remove: is -1, want 0 to 0: a Doge"):
                cache.crop(-1)
    with pytest.raises(ValueError, match="tokens_to_remove: is 5, want 0 or less"):
        cache.crop(5)
    with pytest.raises(ValueError, match="that can be cropped|want 0 to 0: a DogeCache"):
        cache = ours.DogeCache(selected.config, static=True)
        given = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 9}
        selected.generate(tokens.repeat(1, 2), past_key_values=cache, pad_token_id=0, **given)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.usefixtures("decided")
def test_static_caches_compile_once(padded: bool) -> None:
    """generate() compiles the model for one token, and not again as the length grows."""
    eager, selected = make_separate("doge")
    graphs = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    compiled = transformers.CompileConfig(backend=backend, mode=None, fullgraph=True)
    compiled._compile_all_devices = True
    tokens, mask = make_tokens(2, 50), make_mask(11 * padded, length=50)
    given = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    wanted = selected.generate(tokens, past_key_values=ours.DogeCache(selected.config), **given)
    written = torch.cat((mask, torch.ones(2, 40, dtype=torch.long)), 1)
    eager(wanted, attention_mask=written)  # fails if its choice of keys is a near tie
    torch._dynamo.reset()
    for _ in range(2):  # the second time with another cache
        cache = ours.DogeCache(selected.config, static=True)
        found = selected.generate(tokens, past_key_values=cache, compile_config=compiled, **given)
        assert torch.equal(found, wanted)
        assert int(cache.get_seq_length()) == 89
    assert len(graphs) == 1


def test_padding_among_single_tokens() -> None:
    """A row may end before the others do. Its padding leaves no trace."""
    _, selected = make_separate("doge")
    tokens = make_tokens(2, 60)
    cache = ours.DogeCache(selected.config)
    with torch.no_grad():
        selected(tokens[:, :50], past_key_values=cache)
        mask = torch.ones(2, 51, dtype=torch.long)
        mask[1, 50] = 0
        selected(tokens[:, 50:51], past_key_values=cache, attention_mask=mask)
        mask = torch.cat((mask, torch.ones(2, 9, dtype=torch.long)), 1)
        positions = torch.stack((torch.arange(51, 60), torch.arange(50, 59)))
        given = {"attention_mask": mask, "position_ids": positions}
        found = selected(tokens[:, 51:], past_key_values=cache, **given).logits
        whole = torch.cat((tokens[1:, :50], tokens[1:, 51:]), 1)
        assert_near(found[1:], selected(whole).logits[:, 50:])
        assert_near(found[:1], selected(tokens[:1]).logits[:, 51:])


@pytest.mark.usefixtures("decided")
def test_many_tokens() -> None:
    """500 tokens after a prompt of 200, with a window of 64."""
    eager, selected = make_separate("doge", keep_window_size=64, max_position_embeddings=1024)
    tokens = make_tokens(1, 200)
    given = {"max_new_tokens": 500, "min_new_tokens": 500, "do_sample": False, "pad_token_id": 0}
    wanted = eager.generate(tokens, **given)
    found = selected.generate(tokens, past_key_values=ours.DogeCache(selected.config), **given)
    assert torch.equal(found, wanted)


@pytest.mark.usefixtures("decided")
def test_prompts_that_generate_cuts_and_continues() -> None:
    """Prompts with prefill_chunk_size, and a second prompt after the tokens of the first."""
    eager, selected = make_separate("doge")
    tokens = make_tokens(1, 150)
    given = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    wanted = [selected.generate(tokens[:, :90], **given)]
    wanted.append(selected.generate(torch.cat((wanted[0], tokens[:, 90:]), 1), **given))
    cache = ours.DogeCache(selected.config)
    eager(wanted[1])  # fails if its choice of keys is a near tie
    cut = {"past_key_values": cache, "prefill_chunk_size": 16, **given}
    found = [selected.generate(tokens[:, :90], **cut)]
    longer = torch.cat((found[0], tokens[:, 90:]), 1)
    found.append(selected.generate(longer, past_key_values=cache, **given))
    for one, other in zip(found, wanted):
        assert torch.equal(one, other)


# ---- dt_proj with adapters and hooks, in ranks, offloaded ----


class Adapter(torch.nn.Module):
    """A linear layer with a change of low rank, which has its weight under the layer's own name."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def add_adapters(*models: Any) -> None:
    for model in models:
        torch.manual_seed(4)
        for layer in model.model.layers:
            layer.self_attn.dt_proj = Adapter(layer.self_attn.dt_proj)


def add_hooks(*models: Any) -> None:
    for model in models:
        for layer in model.model.layers:
            layer.self_attn.dt_proj.register_forward_hook(lambda module, args, out: 3 * out)


changed = pytest.mark.parametrize("change", [add_adapters, add_hooks])


@changed
@pytest.mark.parametrize("left", [0, 20])
def test_logits_and_gradients_of_others(left: int, change: Any) -> None:
    models = make_models("doge with biases")
    tokens, mask = make_tokens(), make_mask(left)
    before = models[1](tokens, attention_mask=mask).logits
    change(*models)
    eager, found = (model(tokens, attention_mask=mask).logits[mask.bool()] for model in models)
    assert_near(found, eager)
    assert (found - before[mask.bool()]).abs().max() > 1e-3
    for logits in (eager, found):
        logits.square().mean().backward()
    for (name, one), other in zip(models[1].named_parameters(), models[0].parameters()):
        assert one.grad is not None, name
        assert_near(one.grad, other.grad, 1e-4)


@changed
@pytest.mark.usefixtures("decided")
def test_generated_tokens_of_others(change: Any) -> None:
    models = make_separate("doge")
    change(*models)
    tokens = make_tokens(2, LENGTH)  # more than one piece
    given = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    wanted = models[0].generate(tokens, **given)
    cache = ours.DogeCache(models[1].config)
    assert torch.equal(models[1].generate(tokens, past_key_values=cache, **given), wanted)
    one = {**given, "prompt_lookup_num_tokens": 5}
    cache = ours.DogeCache(models[1].config)
    found = models[1].generate(tokens[:1], past_key_values=cache, **one)
    assert torch.equal(found, models[1].generate(tokens[:1], **given))
    with pytest.raises(NotImplementedError, match="attention_mask: has padding, want none in a"):
        models[1](
            tokens, attention_mask=make_mask(5), past_key_values=ours.DogeCache(models[1].config)
        )


def run_parallel(rank: int) -> dict[str, Any]:
    """The logits of the whole text and of pieces in a cache, and the refusal of gradients."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    ours.register()
    with tempfile.TemporaryDirectory() as folder:
        of_first = [folder]
        dist.broadcast_object_list(of_first)
        make_models("doge")[0].save_pretrained(folder)  # only the first rank writes all files
        dist.barrier()
        kind = {"attn_implementation": "dynamic_mask", "tp_plan": "auto"}
        model = transformers.AutoModelForCausalLM.from_pretrained(of_first[0], **kind)
        dist.barrier()
    tokens = make_tokens()
    with torch.no_grad():
        found = {"whole": model(tokens).logits}
        cache = ours.DogeCache(model.config)
        found["pieces"] = in_pieces(model, tokens, [0, 70, LENGTH], cache)
    return {**found, **context_ranks.refusal_of(lambda: model(tokens))}


RUN = context_ranks.Once(__name__, "run_parallel", 2, timeout=120)


def test_tensor_parallelism() -> None:
    """Two processes, each with one kv head of each layer. (transformers' own attention fails,
    because its mask has the heads of both.)"""
    pytest.importorskip("accelerate")
    with torch.no_grad():
        wanted = make_models("doge")[0](make_tokens()).logits
    for found in RUN.results():
        assert_near(found["whole"], wanted)
        assert_near(found["pieces"], wanted)
        assert found["kind"] == "NotImplementedError"
        assert "dt_proj: is tensor-parallel, want torch.no_grad()" in found["message"]


@pytest.mark.parametrize(
    ("name", "place"), combinations(["doge", "doge with biases"], ["cpu", "disk"])
)
def test_offloaded_weights(name: str, place: str, tmp_path: Path) -> None:
    """With accelerate, weights exist only during a module's call."""
    accelerate = pytest.importorskip("accelerate")
    eager, selected = make_models(name)
    tokens, mask = make_tokens(), make_mask(20)
    if place == "cpu":
        accelerate.cpu_offload(selected, execution_device="cpu")
    else:
        accelerate.disk_offload(selected, tmp_path, execution_device="cpu")
    attention = selected.model.layers[0].self_attn
    assert attention.dt_proj.weight.is_meta and attention.A.is_meta
    with torch.no_grad():
        wanted = eager(tokens, attention_mask=mask).logits
        assert_near(selected(tokens, attention_mask=mask).logits[mask.bool()], wanted[mask.bool()])
        cache = ours.DogeCache(selected.config)
        found = in_pieces(selected, tokens, [0, 70, 71, LENGTH], cache)
        assert_near(found, eager(tokens).logits)


# ---- sliding windows: a query keeps its best keys in the window ----

# keep_window_size is 24: the first window keeps all keys, the others keep some
SLIDING = [1, 7, 24, 40, 200]


def caches(config: Any) -> list[Any]:
    return [ours.DogeCache(config), transformers.DynamicCache(config=config)]


@pytest.mark.parametrize(
    ("sliding", "left", "right"), sorted({*combinations(SLIDING, [0, 30], [0, 20]), (1, 0, 20)})
)
@pytest.mark.usefixtures("decided")
def test_sliding_windows(sliding: int, left: int, right: int) -> None:
    """With a cache the logits are the same as without."""
    eager, selected = make_separate("doge", sliding_window=sliding)
    tokens, mask = make_tokens(), make_mask(left, right)
    there, ends = mask.bool(), [0, 50, 51, 52, LENGTH]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        wanted = eager(tokens, attention_mask=mask).logits
        found = selected(tokens, attention_mask=mask).logits
        unlimited = make_separate("doge")[1](tokens, attention_mask=mask).logits
        assert_near(found[there], wanted[there])
        is_same = (found - unlimited)[there].abs().max() < 1e-5
        assert is_same == (sliding > LENGTH)
        wanted = eager(tokens, attention_mask=mask, position_ids=positions).logits[there]
        for cache in caches(selected.config):
            found = [
                selected(
                    tokens[:, a:b],
                    attention_mask=mask[:, :b],
                    position_ids=positions[:, a:b],
                    past_key_values=cache,
                ).logits
                for a, b in zip(ends, ends[1:])
            ]
            assert_near(torch.cat(found, 1)[there], wanted)
            if isinstance(cache, ours.DogeCache) and sliding > 1:  # transformers keeps all for 1
                assert cache.layers[0].keys.shape[2] <= sliding  # whatever the length


@pytest.mark.parametrize("sliding", [7, 40])
@pytest.mark.usefixtures("decided")
def test_calls_with_sliding_windows(sliding: int) -> None:
    """Padding in the middle, which takes up places in the window; packed sequences; crop()."""
    eager, selected = make_separate("doge", sliding_window=sliding)
    tokens, others, ends = make_tokens(1), make_tokens(2)[1:], [0, 30, 31, LENGTH]
    mask = make_mask()
    mask[:, 50:58] = 0
    given = {"attention_mask": mask, "use_cache": False}
    cache = ours.DogeCache(selected.config)
    cache.activate_past_recording()
    with torch.no_grad():
        wanted = eager(make_tokens(), **given).logits[mask.bool()]
        assert_near(selected(make_tokens(), **given).logits[mask.bool()], wanted)
        found = selected(tokens, position_ids=make_positions(ends), use_cache=False).logits
        assert_near(found, in_pieces(eager, tokens, ends))
        wanted = selected(tokens).logits
        selected(torch.cat((tokens[:, :60], others[:, :9]), 1), past_key_values=cache)
        cache.crop(-9)
        assert_near(selected(tokens[:, 60:], past_key_values=cache).logits, wanted[:, 60:])


@pytest.mark.parametrize("sliding", [7, 40])
@pytest.mark.usefixtures("decided")
def test_gradients_with_sliding_windows(sliding: int) -> None:
    pair, tokens = make_separate("doge with biases", sliding_window=sliding), make_tokens()
    for model in pair:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    for found, wanted in zip(pair[1].parameters(), pair[0].parameters()):
        assert_near(found.grad, wanted.grad)


def test_caches_of_other_windows() -> None:
    _, selected = make_separate("doge", sliding_window=7)
    _, unlimited = make_separate("doge")
    for model, other, words in (
        (selected, unlimited, "cache: its sliding_window is None, want the model's slid"),
        (unlimited, selected, "its sliding_window is 7, want the model's sliding_window, N"),
    ):
        with pytest.raises(ValueError, match=words):
            model(make_tokens(1, 10), past_key_values=ours.DogeCache(other.config))
    with pytest.raises(NotImplementedError, match="static: is True, want False for a model with a"):
        ours.DogeCache(selected.config, static=True)
