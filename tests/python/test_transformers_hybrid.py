"""Hybrids as models of transformers: attention, generation with caches of fixed size, training,
files, the tokenizer, and Llama, Qwen2 and Qwen3 as hybrids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import flash_dmattn  # noqa: E402
import flash_dmattn.transformers as ours  # noqa: E402
import flash_dmattn.transformers_hybrid as hybrids  # noqa: E402
from doge_models import in_pieces, make_mask, make_positions, registered  # noqa: E402
from flash_dmattn import DynamicMaskAttention, DynamicMaskCache  # noqa: E402
from flash_dmattn.lifetimes import lifetime_scale  # noqa: E402
from test_doge import generate_counted  # noqa: E402

__all__ = ["registered"]  # a fixture

LENGTH, SLIDING, KEYS, RECENT = 60, 12, 24, 10
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
SIZES = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
RULES = {"sliding_keys": SLIDING, "selecting_keys": KEYS, "selecting_recent": RECENT}
RULES = {**RULES, "target_every": 2, "eos_token_id": None}


def make_model(**changes: Any) -> Any:
    """In evaluation mode, with scores that differ by much more than rounding."""
    torch.manual_seed(1)
    model = ours.HybridForCausalLM(ours.HybridConfig(**{**SIZES, **RULES, **changes})).eval()
    for layer in model.model.layers:
        if layer.self_attn.window is not None:
            torch.nn.init.normal_(layer.self_attn.dt_proj.weight, std=3.0)
    return model


def make_tokens(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(8))


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.fixture(autouse=True)
def no_gradients(request: pytest.FixtureRequest) -> Any:
    with torch.set_grad_enabled("trains" in request.fixturenames):
        yield


@pytest.fixture
def trains() -> None:
    """The test records gradients."""


def test_rounding_does_not_decide() -> None:
    """The tests compare results that depend on the order of scores: at each position, the worst
    score that is kept exceeds the next one by far more than rounding."""
    model, scores = make_model(), []
    layer = model.model.layers[2].self_attn
    layer.v_proj.register_forward_hook(lambda _, __, value: scores.append(layer.dt_proj(value)))
    model(make_tokens())
    for of_head in scores[0].transpose(1, 2).flatten(0, 1):
        for end in range(KEYS + 1, LENGTH + 1):
            best = of_head[: end - RECENT].sort(descending=True).values
            window = KEYS - RECENT
            assert best[window - 1] - best[window] > 1e-4


def test_attention_is_that_of_dynamic_mask_attention() -> None:
    """The same weights in layers of the plan, with their own rotary embedding."""
    model, states, plan = make_model(), [], make_model().config.plan
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(
            lambda _, given, named, out: states.append((named["hidden_states"], out[0])),
            with_kwargs=True,
        )
    model(make_tokens())
    for number, (layer, (given, found)) in enumerate(zip(model.model.layers, states)):
        own = DynamicMaskAttention(**plan.arguments(number))
        own.load_state_dict(layer.self_attn.state_dict())
        near(found, own(given))


# ---- caches ----


@pytest.mark.parametrize("sliding", [SLIDING, None])
@pytest.mark.parametrize("ends", [[0, LENGTH], [0, 40, 41, 42, LENGTH], [0, 5, 25, LENGTH]])
def test_prompts_in_pieces(ends: list[int], sliding: int | None) -> None:
    model, tokens = make_model(sliding_keys=sliding), make_tokens()
    cache = ours.HybridCache(model.config)
    wanted = model(tokens, use_cache=False).logits
    near(in_pieces(model, tokens, ends, cache), wanted)
    assert cache.get_seq_length() == LENGTH
    assert cache.layers[2].kept.keys.key.shape[1] == KEYS
    cache.reset()
    found = model.model(tokens, past_key_values=cache).last_hidden_state
    near(model.lm_head(found), wanted)
    assert cache.get_seq_length() == LENGTH


def assert_likeliest(model: Any, found: torch.Tensor, prompt: int, left: int = 0) -> None:
    """Each token after the prompt is the likeliest one of the model without a cache, or rounding
    cannot tell it from that one."""
    for b, row in enumerate(found):
        own = row[left if b == 0 else 0 :]
        logits = model(own[None, :-1], use_cache=False).logits[0, -(len(row) - prompt) :]
        chosen = logits.gather(1, row[prompt:, None])[:, 0]
        assert (chosen >= logits.amax(1) - 1e-4).all()


@pytest.mark.parametrize("sliding", [SLIDING, None])
@pytest.mark.parametrize("left", [0, 7])
def test_generation(sliding: int | None, left: int) -> None:
    model, tokens = make_model(sliding_keys=sliding), make_tokens(length=30)
    mask = make_mask(left, length=30)
    given = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    found = model.generate(tokens, attention_mask=mask, **given)
    assert_likeliest(model, found.sequences, 30, left)
    cache = getattr(found, "cache", None) or found.past_key_values
    assert isinstance(cache, ours.HybridCache)
    kept = [one.kept for one in cache.layers if hasattr(one, "kept")]
    assert all(isinstance(one, DynamicMaskCache) for one in kept)
    rows = [one.keys.key.shape[1] for one in kept]
    assert rows == ([KEYS] if sliding is None else [SLIDING, SLIDING, KEYS])


def test_a_of_layers_that_slide_counts_as_0() -> None:
    """In caches, too."""
    model, tokens = make_model(), make_tokens()
    wanted = model(tokens, use_cache=False).logits
    for layer in model.model.layers[:2]:
        layer.self_attn.A.fill_(1.0)
    cache = ours.HybridCache(model.config)
    pieces = [model(own, past_key_values=cache).logits for own in tokens.split(LENGTH // 2, 1)]
    near(torch.cat(pieces, 1), wanted)


def test_a_static_cache() -> None:
    model, tokens = make_model(), make_tokens(length=30)
    given = {"max_new_tokens": 20, "do_sample": False}
    found = model.generate(tokens, cache_implementation="static", **given)
    assert_likeliest(model, found, 30)


def test_sequences_are_moved() -> None:
    """As beams do it."""
    model, tokens = make_model(), make_tokens()
    cache = ours.HybridCache(model.config)
    model(tokens[:, :50], past_key_values=cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0, 1]))
    wanted = model(tokens[[0, 1, 1]], use_cache=False).logits[:, 50:]
    near(model(tokens[[0, 1, 1], 50:], past_key_values=cache).logits, wanted)


def test_a_saved_cache() -> None:
    model, tokens = make_model(), make_tokens()
    cache, other = (ours.HybridCache(model.config) for _ in range(2))
    model(tokens[:, :50], past_key_values=cache)
    other.early_initialization(2, 2, 16, model.dtype, model.device)
    for b in range(2):
        other.restore(b, cache.save(b))
    found, wanted = (model(tokens[:, 50:], past_key_values=x).logits for x in (other, cache))
    assert torch.equal(found, wanted)


def test_beams_have_the_scores_of_their_sequences() -> None:
    model, tokens = make_model(), make_tokens(length=30)
    given = {"max_new_tokens": 12, "num_beams": 3, "length_penalty": 0.0, "do_sample": False}
    found = model.generate(tokens, output_scores=True, return_dict_in_generate=True, **given)
    for row, score in zip(found.sequences, found.sequences_scores):
        likelihood = model(row[None], use_cache=False).logits[0, 29:-1].log_softmax(-1)
        near(likelihood.gather(1, row[30:, None]).sum(), score)


def test_assisted_generation() -> None:
    """Candidates come from the prompt, which repeats, so that some are accepted."""
    model, tokens = make_model(), make_tokens(1, 20).repeat(1, 3)
    drafted = {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 1}
    given = {"max_new_tokens": 40, "do_sample": False}
    found, calls = generate_counted(model, tokens, **drafted, **given)
    assert_likeliest(model, found, 60)
    assert 1 < calls < 40


def test_bad_caches() -> None:
    model, tokens = make_model(), make_tokens(1, 10)
    other = ours.HybridCache(make_model(selecting_keys=40).config)
    with pytest.raises(ValueError, match=r"cache: has \(30, 10\) for window and recent of layer 2"):
        model(tokens, past_key_values=other)
    with pytest.raises(ValueError, match="cache: is a DynamicCache, want a HybridCache or None"):
        model(tokens, past_key_values=transformers.DynamicCache())
    with pytest.raises(ValueError, match="cu_seq_lens_q: is given, want None with a cache"):
        starts = torch.tensor([0, 10], dtype=torch.int32)
        model(tokens, cu_seq_lens_q=starts, past_key_values=ours.HybridCache(model.config))
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, vocab_size=256))
    with pytest.raises(ValueError, match="cache: is a HybridCache, want another one unless"):
        llama(tokens, past_key_values=ours.HybridCache(model.config))
    with pytest.raises(NotImplementedError, match="static: is True, want False for a model with"):
        ours.HybridCache(make_model(sliding_keys=None).config, static=True)
    with pytest.raises(TypeError, match="config: is a LlamaConfig, want a HybridConfig"):
        ours.HybridCache(llama.config)
    with pytest.raises(ValueError, match="cache_implementation: is 'quantized', want 'static'"):
        model.generate(tokens, cache_implementation="quantized", max_new_tokens=2)
    with torch.enable_grad(), pytest.raises(
        ValueError, match="use_cache: is True, want a call within"
    ):
        model(tokens, use_cache=True)


# ---- padding and packing ----


def test_padding() -> None:
    model, tokens = make_model(), make_tokens()
    mask = make_mask(7, 9, LENGTH)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    near(found[0, 7:], model(tokens[:1, 7:]).logits[0])
    near(found[1, :-9], model(tokens[1:, :-9]).logits[0])


@pytest.mark.parametrize("by_positions", [True, False])
def test_packing(by_positions: bool) -> None:
    model, tokens, ends = make_model(), make_tokens(1), [0, 13, 50, LENGTH]
    given: dict[str, Any] = {"position_ids": make_positions(ends), "use_cache": False}
    if not by_positions:
        given["cu_seq_lens_q"] = torch.tensor(ends, dtype=torch.int32)
    near(model(tokens, **given).logits, in_pieces(model, tokens, ends))


# ---- training ----


@pytest.mark.usefixtures("trains")
@pytest.mark.parametrize("compiles", [False, True])
def test_the_loss_has_targets(compiles: bool) -> None:
    """In every second call; they have a gradient for weights of scores alone, and do not count in
    the number."""
    torch.compiler.reset()
    model, tokens = make_model().train(), make_tokens(1)
    call = torch.compile(model, backend="aot_eager") if compiles else model
    dt_proj = model.model.layers[2].self_attn.dt_proj.weight
    losses, found = [], []
    for _ in range(4):
        loss = call(tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
        found.append(dt_proj.grad)
        assert model.model.embed_tokens.weight.grad.any()
        model.zero_grad()
    assert [one is not None for one in found] == [True, False, True, False]
    inputs: list[torch.Tensor] = []
    hook = model.model.layers[2].self_attn.register_forward_pre_hook(
        lambda _, given, named: inputs.append(named["hidden_states"]), with_kwargs=True
    )
    plain = model.eval()(tokens, labels=tokens).loss.item()
    hook.remove()
    alone = DynamicMaskAttention(**model.config.plan.arguments(2))
    alone.load_state_dict(model.model.layers[2].self_attn.state_dict())
    of_scores = alone.score_target_loss(inputs[0])
    assert losses == pytest.approx([plain] * 4, rel=1e-5)
    (wanted,) = torch.autograd.grad(of_scores, alone.dt_proj.weight)
    torch.testing.assert_close(found[0], wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("trains")
@pytest.mark.parametrize("checkpoints", [False, True])
def test_targets_beside_any_loss(checkpoints: bool) -> None:
    """The gradient of the targets has the factor of the model's loss, and 1 beside another loss. It
    does not need weights of other layers that learn."""
    model, tokens = make_model(target_every=1).train(), make_tokens(1)
    if checkpoints:
        model.gradient_checkpointing_enable()
    dt_proj = model.model.layers[2].self_attn.dt_proj.weight

    def learned(loss: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss.backward()
        assert dt_proj.grad is not None
        return dt_proj.grad.clone()

    model.model.calls = 0
    whole = learned(model(tokens, labels=tokens).loss)
    assert whole.any()
    for loss, factor in (
        (lambda: model(tokens, labels=tokens).loss / 4, 0.25),
        (lambda: model(tokens).logits.square().mean() * 3, 1.0),
        (lambda: model(tokens, labels=tokens).logits.square().mean() * 3, 1.0),
        (lambda: model.model(tokens).last_hidden_state.sum() * 5, 1.0),
    ):
        model.model.calls = 0
        torch.testing.assert_close(learned(loss()), whole * factor, rtol=1e-5, atol=1e-8)
    model.requires_grad_(False)
    dt_proj.requires_grad_(True)
    torch.testing.assert_close(learned(model(tokens, labels=tokens).loss), whole)


@pytest.mark.usefixtures("trains")
def test_training_without_targets() -> None:
    tokens, found = make_tokens(1), []
    for every in (0, 1):
        model = make_model(target_every=every).train()
        loss, logits, *_ = model(tokens, labels=tokens, return_dict=False)
        loss.backward()
        assert logits.shape == (1, LENGTH, 258)
        found.append(model.model.layers[2].self_attn.dt_proj.weight.grad)
    assert found[0] is None and found[1].any()


# ---- files ----


def test_files(tmp_path: Path) -> None:
    model, tokens = make_model(), make_tokens()
    model.save_pretrained(tmp_path)
    ours.ByteTokenizer().save_pretrained(tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(read) is ours.HybridForCausalLM and read.config.plan == model.config.plan
    assert torch.equal(read(tokens).logits, model(tokens).logits)
    narrow = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    dtypes = {name: one.dtype for name, one in narrow.named_parameters()}
    wide = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert wide == {name for name in dtypes if name.endswith((".dt_proj.weight", ".A"))}
    assert narrow.generate(tokens, max_new_tokens=3).shape == (2, LENGTH + 3)
    assert type(transformers.AutoTokenizer.from_pretrained(tmp_path)) is ours.ByteTokenizer
    base = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert torch.equal(base(tokens).last_hidden_state, model.model(tokens).last_hidden_state)


def test_first_weights() -> None:
    """A is 0 where a layer slides, and small where it selects."""
    found = [layer.self_attn.A.tolist() for layer in make_model().model.layers]
    assert found == [[0.0, 0.0], [0.0, 0.0], pytest.approx([0.005, 0.005])]


def test_other_implementations() -> None:
    config = ours.HybridConfig(**SIZES, **RULES)
    with pytest.raises(ValueError, match="attn_implementation: is 'eager', want 'dynamic_mask' or"):
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


# ---- the tokenizer ----


@pytest.mark.parametrize("text", ["", "a  b\n\t c ", "é 漢字 \U0001f600", "\x00\x7f", "a <end> b"])
def test_bytes(text: str) -> None:
    tokenizer = ours.ByteTokenizer()
    tokens = tokenizer(text)["input_ids"]
    pieces = text.split("<end>")
    wanted = list(pieces[0].encode())
    for piece in pieces[1:]:
        wanted += [256, *piece.encode()]
    assert tokens == wanted
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode([*tokens, 257], skip_special_tokens=True) == "".join(pieces)


def test_bytes_that_are_no_text() -> None:
    assert ours.ByteTokenizer().decode([97, 255, 98]) == "a\ufffdb"


def test_batches_of_texts() -> None:
    tokenizer = ours.ByteTokenizer(padding_side="left")
    found = tokenizer(["abc", "é"], padding=True, return_tensors="pt")
    assert found["input_ids"].tolist() == [[97, 98, 99], [257, 195, 169]]
    assert found["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (256, 257, 258)


# ---- other models as hybrids ----

SCALED = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
SCALED = {**SCALED, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
OTHERS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES, vocab_size=258, rope_parameters=SCALED),
    "llama with biases": transformers.LlamaConfig(
        **SIZES, vocab_size=258, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "qwen2": transformers.Qwen2Config(**SIZES, vocab_size=258),
    "qwen3": transformers.Qwen3Config(**SIZES, vocab_size=258, head_dim=24),
}


def make_other(name: str) -> Any:
    torch.manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_config(OTHERS[name]).eval()
    for of_weight, one in model.named_parameters():
        if "bias" in of_weight or "norm" in of_weight:
            one.data.add_(torch.randn_like(one), alpha=0.3)
    return model


@pytest.mark.parametrize("name", OTHERS)
def test_windows_of_the_whole_length_keep_the_logits(name: str, tmp_path: Path) -> None:
    model, tokens = make_other(name), make_tokens()
    wanted = model(tokens).logits
    for sliding, keys, selecting in ((None, 2 * LENGTH, None), (LENGTH, LENGTH, [0, 2])):
        hybrid = ours.convert(model, sliding=sliding, keys=keys, selecting=selecting)
        near(hybrid(tokens, use_cache=False).logits, wanted)
        cache = ours.HybridCache(hybrid.config)
        near(in_pieces(hybrid, tokens, [0, 40, 41, LENGTH], cache), wanted)
    assert hybrid.model.layers[1].mlp.up_proj.weight is model.model.layers[1].mlp.up_proj.weight
    hybrid.save_pretrained(tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(read(tokens, use_cache=False).logits, hybrid(tokens, use_cache=False).logits)


def test_a_hybrid_with_fewer_keys_begins_with_the_newest() -> None:
    """The layer that selects keeps its newest keys as long as its scores have not learned."""
    model, tokens = make_other("llama"), make_tokens()
    hybrid = ours.convert(model, sliding=8, keys=20)
    slides = ours.convert(model, sliding=20, keys=8, selecting=[0, 1])
    first = ours.convert(model, sliding=8, keys=20, recent=0)
    wanted = first(tokens, use_cache=False).logits
    near(hybrid(tokens, use_cache=False).logits, wanted)
    near(slides(tokens, use_cache=False).logits, wanted)
    assert (wanted - model(tokens).logits).abs().max() > 0.01


@pytest.mark.usefixtures("trains")
def test_adapters_of_projections() -> None:
    """A projection that is replaced by a module of its name, as PEFT does it, is called."""
    model = ours.convert(make_other("llama"), sliding=SLIDING, keys=KEYS).train()

    class Adapter(torch.nn.Module):
        def __init__(self, base: torch.nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = torch.nn.Linear(base.in_features, 2, bias=False)
            self.up = torch.nn.Linear(2, base.out_features, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))

    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    for layer in model.model.layers:
        for name in projections:
            setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name)))
    tokens = make_tokens()
    model(tokens, labels=tokens).loss.backward()
    for layer in model.model.layers:
        assert all(getattr(layer.self_attn, name).up.weight.grad.any() for name in projections)
    assert model.model.layers[2].self_attn.dt_proj.weight.grad.any()


def test_models_that_are_not_taken() -> None:
    doge = transformers.DogeForCausalLM(transformers.DogeConfig(**SIZES, vocab_size=20))
    for other in (doge, make_other("llama").model):
        with pytest.raises(TypeError, match="model: is a .*, want a LlamaForCausalLM, Qwen2For"):
            ours.convert(other)
    sliding = transformers.Qwen2Config(**SIZES, use_sliding_window=True, max_window_layers=1)
    with pytest.raises(ValueError, match="model: has sliding layers, want all keys in all layers"):
        ours.convert(transformers.Qwen2ForCausalLM(sliding))
    with pytest.raises(ValueError, match="selecting: has 3, want 0 to 2"):
        ours.convert(make_other("qwen3"), selecting=[3])


# ---- lifetimes ----


@pytest.fixture
def gated(registered: None) -> Any:
    """A model whose last layer has lifetimes, which are no half tokens in the tests."""
    torch.manual_seed(4)
    config = ours.HybridConfig(**{**SIZES, **RULES, "lifetime_units": 16, "initial_lifetime": 60.0})
    model = ours.HybridForCausalLM(config).eval()
    gate = model.model.layers[2].self_attn.lifetime_gate
    with torch.no_grad():
        gate.expand.weight.mul_(10)
        gate.contract.weight.mul_(40)
    return model


def lifetimes_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    layer, entering, _ = model._last(tokens, None)
    found: torch.Tensor = layer.lifetime_gate(model.model.layers[2].input_layernorm(entering)).exp()
    return found


def test_rounding_does_not_decide_lifetimes(gated: Any) -> None:
    lifetime = lifetimes_of(gated, make_tokens())
    assert ((lifetime % 1 - 0.5).abs() > 1e-5 * lifetime.clamp(min=1)).all()
    assert lifetime.std() > 5


@pytest.mark.parametrize("ends", [[0, LENGTH], [0, 40, 41, 42, LENGTH], [0, 5, 25, LENGTH]])
def test_lifetimes_over_a_cache(ends: list[int], gated: Any) -> None:
    cache, tokens = ours.HybridCache(gated.config), make_tokens()
    wanted = gated(tokens, use_cache=False).logits
    near(in_pieces(gated, tokens, ends, cache), wanted)
    assert [one.kept.bias_form for one in cache.layers] == ["exp", "exp", "none"]
    assert cache.layers[2].kept.keys.key.shape[1] == KEYS
    newest = HybridKeepsNewest(gated)(tokens, use_cache=False).logits
    assert (newest - wanted).abs().max() > 0.01


class HybridKeepsNewest:
    """The model with equal lifetimes."""

    def __init__(self, model: Any) -> None:
        self.model = ours.HybridForCausalLM(model.config).eval()
        self.model.load_state_dict(model.state_dict())
        self.model.model.layers[2].self_attn.lifetime_gate.reset_parameters()

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.model(*given, **named)


@pytest.mark.parametrize("left", [0, 7])
@pytest.mark.parametrize("kind", [None, "static"])
def test_generation_with_lifetimes(kind: str | None, left: int, gated: Any) -> None:
    tokens, mask = make_tokens(length=30), make_mask(left, length=30)
    given = {"max_new_tokens": 20, "do_sample": False, "cache_implementation": kind}
    found = gated.generate(tokens, attention_mask=mask, **given)
    assert_likeliest(gated, found, 30, left)


def test_drafts_with_lifetimes(gated: Any) -> None:
    """Tokens that crop() removes leave no trace."""
    tokens, cache = make_tokens(), ours.HybridCache(gated.config)
    for layer in cache.layers:
        layer.activate_past_recording()
    gated(tokens[:, :50], past_key_values=cache)
    gated(tokens[:, :4], past_key_values=cache)
    cache.crop(-4)
    found = gated(tokens[:, 50:], past_key_values=cache).logits
    near(found, gated(tokens, use_cache=False).logits[:, 50:])


def test_files_of_a_model_with_lifetimes(tmp_path: Path, gated: Any) -> None:
    gated.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = make_tokens()
    assert torch.equal(again(tokens).logits, gated(tokens).logits)
    narrow = ours.HybridForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    gate = narrow.model.layers[2].self_attn.lifetime_gate
    assert narrow.dtype == torch.bfloat16 and gate.expand.weight.dtype == torch.float32


def test_the_gate_learns_alone(trains: None, gated: Any) -> None:
    """Its loss is the function's, with predictions of the whole model."""
    tokens = make_tokens(1)
    given = {"progress": 0.5, "queries": 500}
    losses = [
        gated.lifetime_loss(tokens, **given, generator=torch.Generator().manual_seed(3), **more)
        for more in ({}, {"attention_mask": torch.ones_like(tokens)}, {"keys": KEYS})
    ]
    assert losses[0] == losses[1] == losses[2] > 0
    losses[0].backward()
    names = {name for name, one in gated.named_parameters() if one.grad is not None}
    assert names and all(".2.self_attn.lifetime_gate." in name for name in names)
    gate = gated.model.layers[2].self_attn.lifetime_gate
    optimizer = torch.optim.SGD(gate.parameters(), 0.5)
    optimizer.step()
    after = gated.lifetime_loss(tokens, **given, generator=torch.Generator().manual_seed(3))
    assert after < losses[0]
    gated.train()
    assert torch.isfinite(gated(tokens, labels=tokens).loss)


def test_predictions_are_those_of_the_model(gated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that lifetime_loss() gets computes the model's logits from attention's."""
    tokens, found = make_tokens(1), []
    monkeypatch.setattr(hybrids, "lifetime_loss", lambda *given, **_: found.append(given))
    gated.lifetime_loss(tokens, progress=0.5)
    query, key, value, log_lifetime, predict = found[0]
    gated.config.plan.set_keys(gated, 1000)
    out, _ = flash_dmattn.attention(query, key, value, causal=True)
    near(predict(out, torch.arange(LENGTH)), gated(tokens, use_cache=False).logits)
    near(log_lifetime.exp(), lifetimes_of(gated, tokens))


def test_calibration_of_a_model(gated: Any) -> None:
    for keys in (None, 12):
        gated.calibrate_lifetimes(make_tokens(), keys)
        scale = lifetime_scale(
            lifetimes_of(gated, make_tokens()).log(), KEYS if keys is None else keys
        )
        torch.testing.assert_close(scale, torch.ones(2).double(), rtol=1e-4, atol=0)


def test_models_without_a_last_gate_are_refused() -> None:
    for changes in ({}, {"lifetime_units": 8, "selecting_layers": [1]}):
        config = ours.HybridConfig(**{**SIZES, **RULES, **changes})
        with pytest.raises(ValueError, match="want the last layer alone, and lifetime_units"):
            ours.HybridForCausalLM(config).lifetime_loss(make_tokens(1), progress=0.0)


def test_conversion_with_lifetimes() -> None:
    sizes = {**SIZES, "vocab_size": 100}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    hybrid = ours.convert(model, sliding=None, keys=LENGTH, lifetime_units=8)
    tokens = make_tokens() % 100
    near(hybrid(tokens).logits, model(tokens).logits)
    gate = hybrid.model.layers[2].self_attn.lifetime_gate
    assert gate.contract.bias.exp().tolist() == pytest.approx([65536.0] * 2)
    assert hybrid.model.layers[2].self_attn.window == LENGTH // 2
