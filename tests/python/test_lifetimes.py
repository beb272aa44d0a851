"""Layers whose scores are lifetimes: the scores by their formula, in whole sequences, packed,
padded, and over caches; caches that are given scores; plans of such layers."""

from __future__ import annotations

import copy
from typing import Any

import evaluate
import flash_dmattn
import pytest
import torch
from cases import on_device
from flash_dmattn import DynamicMaskAttention, DynamicMaskCache, HybridPlan, LayerCaches
from flash_dmattn.lifetimes import LONGEST, LifetimeGate, lifetime_scale
from torch.testing import assert_close

HIDDEN, HEADS, KV_HEADS, WINDOW, RECENT, UNITS, BATCH, LENGTH = 48, 4, 2, 12, 5, 16, 3, 274
PIECES = (100, 3, 64, 1, 1, 2, *[1] * 20, 70, 13)
assert sum(PIECES) == LENGTH
MARGIN = 0.02  # from half a token, of lifetimes: rounding of products does not decide


def make_layer(**options: Any) -> DynamicMaskAttention:
    """Lifetimes are mostly 1 to 1000, in every head other ones."""
    torch.manual_seed(0)
    given: dict[str, Any] = {"window": WINDOW, "recent": RECENT, "lifetime_units": UNITS, **options}
    layer = DynamicMaskAttention(HIDDEN, HEADS, KV_HEADS, **{"initial_lifetime": 30.0, **given})
    spread(layer)
    return layer


def spread(layer: Any) -> None:
    with torch.no_grad():
        layer.lifetime_gate.expand.weight.mul_(15)
        layer.lifetime_gate.contract.weight.mul_(25)


def lifetimes_by_formula(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """[batch, heads that do not slide, len], in float64, before rounding."""
    gate = copy.deepcopy(layer.lifetime_gate).double()
    units = x.double() @ gate.expand.weight.T + gate.expand.bias
    units = units * torch.sigmoid(units)
    return (units @ gate.contract.weight.T + gate.contract.bias).exp().transpose(1, 2)


def make_states(layer: Any, batch: int = BATCH, length: int = LENGTH) -> torch.Tensor:
    """Hidden states whose lifetimes are no half tokens, so that rounding does not decide."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(1, 2 * batch * length, HIDDEN, generator=generator)
    lifetime = lifetimes_by_formula(layer, x)
    is_safe = ((lifetime % 1 - 0.5).abs() > MARGIN) & (lifetime < 2000)
    is_safe = is_safe.all(1)[0]
    return x[0, is_safe][: batch * length].view(batch, length, HIDDEN)


def attention_by_formula(
    layer: Any, x: torch.Tensor, key_valid: torch.Tensor | None = None
) -> torch.Tensor:
    """A layer without rotary embedding, as its docstring and LifetimeGate's define it."""
    query, key, value = (
        one(x).unflatten(2, (-1, layer.head_dim))
        for one in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    lifetime = lifetimes_by_formula(layer, x).round()
    lifetime = torch.nn.functional.pad(lifetime, (0, 0, layer.sliding_heads, 0))
    score = torch.arange(x.shape[1]) + lifetime
    rules = {"recent": layer.recent, "sinks": layer.sinks}
    kept = evaluate.kept_keys(score, layer.window, "causal", key_valid, **rules)
    mask = evaluate.visible_keys(x.shape[1], x.shape[1], True, kept, key_valid)
    options = {"softcap": layer.softcap, "sink_logit": layer.sink_logit}
    out, _ = evaluate.attention(query, key, value, mask, x.dtype, **options)
    return layer.o_proj(out.flatten(2))


# ---- the layer ----


@pytest.mark.parametrize(
    "options",
    [{}, {"recent": 0, "sinks": 3}, {"sliding_heads": 1}, {"softcap": 2.0, "sink_logit": True}],
    ids=str,
)
@pytest.mark.parametrize("padded", [False, True])
def test_the_formula(options: dict[str, Any], padded: bool) -> None:
    layer = make_layer(rope_base=None, **options)
    x = make_states(layer)[:, :90].requires_grad_()
    key_valid = (torch.arange(90) % 5 != 3).expand(BATCH, -1) if padded else None
    out, want = layer(x, key_valid=key_valid), attention_by_formula(layer, x, key_valid)
    assert_close(out, want, atol=1e-5, rtol=1e-4)
    learned = {
        name: one for name, one in layer.named_parameters() if not name.startswith("lifetime_gate")
    }
    assert len(learned) < len([*layer.named_parameters()])
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found, wanted = (torch.autograd.grad(y, [x, *learned.values()], dout) for y in (out, want))
    for one, other in zip(found, wanted):
        assert_close(one, other, atol=1e-4, rtol=1e-3)


def test_the_loss_of_a_model_gives_gates_no_gradient() -> None:
    layer = make_layer()
    layer(make_states(layer)).square().mean().backward()
    assert {name for name, one in layer.named_parameters() if one.grad is None} == {
        f"lifetime_gate.{part}.{kind}"
        for part in ("expand", "contract")
        for kind in ("weight", "bias")
    }


@pytest.mark.parametrize("first", [0, 1000, LONGEST - LENGTH])
def test_scores(first: int) -> None:
    """They are exact, wherever a sequence begins, in float32, and autocast has no influence."""
    layer = make_layer(sliding_heads=1)
    gate, x = layer.lifetime_gate, make_states(layer)
    assert gate is not None
    positions = first + torch.arange(LENGTH)
    with torch.autocast("cpu", torch.bfloat16):
        found = gate.score(x, positions[None])
    assert found.dtype == torch.float32 and not found.requires_grad
    want = positions.expand(BATCH, 1, -1)
    want = torch.cat((want, positions + lifetimes_by_formula(layer, x).round().long()), 1)
    assert torch.equal(found.long(), want)


def test_lifetimes_end_somewhere() -> None:
    """Neither infinite nor too long a lifetime makes a score infinite; NaN stays NaN."""
    gate = LifetimeGate(2, 1, 1, 0, 1.0)
    with torch.no_grad():
        gate.expand.weight.fill_(1)
        gate.contract.weight.fill_(1)
    x = torch.tensor([[[1e30, 0.0], [30.0, 0.0], [torch.nan, 0.0]]])
    scores = gate.score(x, torch.arange(3)[None])[0, 0]
    assert scores[:2].tolist() == [LONGEST, LONGEST + 1] and scores[2].isnan()


def test_packed_sequences() -> None:
    layer = make_layer()
    x, starts = make_states(layer, 1), [0, 70, 71, 200]
    out = layer(x, starts=torch.tensor(starts, dtype=torch.int32))
    for begin, end in zip(starts, starts[1:]):
        assert_close(out[:, begin:end], layer(x[:, begin:end]))


@pytest.mark.parametrize("cached", [False, True])
@torch.no_grad()
def test_padding_on_the_left(cached: bool) -> None:
    layer = make_layer()
    x = make_states(layer)
    key_valid = torch.arange(LENGTH) >= torch.tensor([[0], [20], [150]])
    positions = (torch.arange(LENGTH) - torch.tensor([[0], [20], [150]])).clamp(min=0)
    filled = x.masked_fill(~key_valid[..., None], torch.nan)
    if cached:
        cache, outs = layer.new_cache(BATCH), []
        for begin, end in ((0, 160), (160, 220)):
            span = slice(begin, end)
            given = {"key_valid": key_valid[:, span], "positions": positions[:, span]}
            outs.append(layer(filled[:, span], cache=cache, **given))
        for t in range(220, LENGTH):
            outs.append(layer(x[:, t : t + 1], cache=cache, positions=positions[:, t : t + 1]))
        out = torch.cat(outs, 1)
    else:
        out = layer(filled, key_valid=key_valid, positions=positions)
    for b, begin in enumerate((0, 20, 150)):
        assert_close(out[b, begin:], layer(x[b : b + 1, begin:])[0], atol=1e-5, rtol=1e-4)


# ---- caches ----


@torch.no_grad()
def in_pieces(module: Any, x: torch.Tensor, cache: Any, **given: Any) -> torch.Tensor:
    """The last piece is of drafts."""
    outs, at = [], 0
    for count in PIECES:
        draft = count == PIECES[-1]
        outs.append(module(x[:, at : at + count], cache=cache, draft=draft, **given))
        at += count
    return torch.cat(outs, 1)


@pytest.mark.parametrize(
    "options",
    [{}, {"rope_base": None, "sinks": 2}, {"sliding_heads": 1, "nope_heads": 1, "head_dim": 10}],
    ids=str,
)
def test_pieces_are_the_whole(options: dict[str, Any]) -> None:
    layer = make_layer(**options)
    x, cache = make_states(layer), layer.new_cache(BATCH, layers=2)
    found = in_pieces(layer, x, cache, layer=1)
    assert_close(found, layer(x), atol=1e-5, rtol=1e-4)
    assert cache.drafts == 0 and cache._drafts[1] is not None
    cache.crop(0)
    assert cache.keys.seen.tolist() == [0] * BATCH + [LENGTH - PIECES[-1]] * BATCH
    other = layer.new_cache(BATCH)
    with torch.no_grad():
        layer(x[:, : -PIECES[-1]], cache=other)
    assert torch.equal(cache.keys.position[BATCH:].sort().values, other.keys.position.sort().values)


@torch.no_grad()
def test_other_numbers_of_tokens() -> None:
    """By n_tokens and index, of sequences of different ages."""
    layer = make_layer()
    evaluate.check_ages(layer, make_states(layer), layer.new_cache(BATCH), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_drafts_enter() -> None:
    """Each sequence accepts its own number of drafts; others follow."""
    layer = make_layer()
    x, cache = make_states(layer), layer.new_cache(BATCH)
    layer(x[:, :90], cache=cache)
    other = x.flip(0)
    layer(torch.cat((x[:, 90:94], other[:, 94:97]), 1), cache=cache, draft=True)
    accepted = [4, 2, 0]
    cache.commit(torch.tensor(accepted, dtype=torch.int32))
    nexts = torch.stack([x[b, 90 + n : 100 + n] for b, n in enumerate(accepted)])
    out = layer(nexts, cache=cache)
    for b, n in enumerate(accepted):
        want = layer(x[b : b + 1, : 100 + n])[0, -10:]
        assert_close(out[b], want, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_steps_compile() -> None:
    """One graph for the tokens, and another for the prompt."""
    torch._dynamo.reset()
    layer = make_layer()
    x, cache = make_states(layer), layer.new_cache(BATCH, static=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    outs = [compiled(x[:, :100], cache=cache)]
    outs += [compiled(x[:, t : t + 1], cache=cache) for t in range(100, 130)]
    assert_close(torch.cat(outs, 1), layer(x[:, :130]), atol=1e-5, rtol=1e-4)
    assert_close(compiled(x), layer(x))


@torch.no_grad()
def test_caches_of_layers_apart() -> None:
    """A layer with lifetimes has a cache of its own, even if another one has its rules."""
    layers = [make_layer(), DynamicMaskAttention(HIDDEN, HEADS, KV_HEADS, WINDOW, recent=RECENT)]
    cache = LayerCaches(layers, BATCH)
    assert [one.bias_form for one in cache.caches] == ["none", "exp"]
    x = make_states(layers[0])
    for number, layer in enumerate(layers):
        found = in_pieces(layer, x, cache, layer=number)
        assert_close(found, layer(x), atol=1e-5, rtol=1e-4)


# ---- scores that the caller gives ----


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_device)])
@torch.no_grad()
def test_a_cache_takes_scores(device: str) -> None:
    """Prompts in pieces, steps, and drafts are the whole sequence, with a key in the same rows."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(2)
    query, key, value = (
        torch.randn(BATCH, LENGTH, heads, 16, generator=generator).to(device, dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    score = torch.randint(50, (BATCH, KV_HEADS, LENGTH), generator=generator).float()
    score[0, :, 7], score[1, :, 9] = torch.nan, torch.inf
    score = score.to(device)
    sizes: dict[str, Any] = {"recent": RECENT, "sinks": 2, "bias_form": "none", "dtype": dtype}
    cache = DynamicMaskCache(1, BATCH, KV_HEADS, 16, WINDOW, **sizes, device=device)
    other = copy.deepcopy(cache)
    options: dict[str, Any] = {"softcap": 3.0, "sink_logit": torch.ones(HEADS, device=device)}
    outs, at = [], 0
    for count in PIECES:
        rows = (one[:, at : at + count] for one in (query, key, value))
        given = {"score": score[..., at : at + count], "draft": count == PIECES[-1]}
        outs.append(cache.attend(0, *rows, **given, **options))
        at += count
    selection = flash_dmattn.select(score, WINDOW, recent=RECENT, sinks=2)
    want, lse = flash_dmattn.attention(
        query, key, value, selection=selection, causal=True, **options
    )
    kept = evaluate.kept_keys(score.cpu(), WINDOW, "causal", recent=RECENT, sinks=2)
    mask = evaluate.visible_keys(LENGTH, LENGTH, True, kept)
    on_cpu = (one.cpu() for one in (query, key, value))
    own = {**options, "sink_logit": options["sink_logit"].cpu()}
    evaluate.assert_attention((torch.cat(outs, 1), lse), *on_cpu, mask, **own)
    cache.commit()
    other.attend(0, query, key, value, score=score)
    for name in ("position", "score", "seen"):
        assert torch.equal(getattr(cache.keys, name), getattr(other.keys, name)), name
    assert want.shape == (BATCH, LENGTH, HEADS, 16)


# ---- parameters ----


def test_parameters() -> None:
    layer = make_layer(sliding_heads=1, dtype=torch.bfloat16)
    shapes = {
        name: (list(one.shape), one.dtype)
        for name, one in layer.state_dict().items()
        if not name.endswith("_proj.weight")
    }
    assert shapes == {
        "lifetime_gate.expand.weight": ([UNITS, HIDDEN], torch.float32),
        "lifetime_gate.expand.bias": ([UNITS], torch.float32),
        "lifetime_gate.contract.weight": ([1, UNITS], torch.float32),
        "lifetime_gate.contract.bias": ([1], torch.float32),
    }
    assert layer(torch.randn(1, 30, HIDDEN).bfloat16()).dtype == torch.bfloat16
    cache = layer.new_cache(1)
    assert cache.keys.key.dtype == torch.bfloat16 and "lifetime_units=16" in repr(layer)
    again = make_layer(sliding_heads=1, initial_lifetime=9.0)
    again.load_state_dict(layer.state_dict())
    layer = layer.float()
    x = make_states(layer, 1)
    assert torch.equal(again(x), layer(x))
    again.reset_parameters()
    assert again.lifetime_gate is not None
    assert_close(again.lifetime_gate(x).exp(), torch.full((1, 1, LENGTH), 9.0), rtol=0.05, atol=0)


# ---- how many keys live ----


@pytest.mark.parametrize("keys", [5, 40, 100])
def test_as_many_keys_live_as_are_asked_for(keys: int) -> None:
    generator = torch.Generator().manual_seed(4)
    log_lifetime = 2 * torch.randn(3, 2, 400, generator=generator) + 5
    lifetime = lifetime_scale(log_lifetime, keys)[:, None] * log_lifetime.exp().double()
    begin = torch.arange(400)
    instants = torch.arange(200, 400, 1 / 64, dtype=torch.float64)[:, None, None, None]
    lives = (begin <= instants) & (instants < begin + lifetime)
    assert_close(
        lives.sum(-1).double().mean((0, 1)),
        torch.full((2,), float(keys)).double(),
        rtol=0.01,
        atol=0,
    )


def test_calibration() -> None:
    """With the number of keys of the layer, or another one, whatever the lifetimes were."""
    layer = make_layer(sliding_heads=1)
    gate, x = layer.lifetime_gate, make_states(layer)
    assert gate is not None
    for keys in (None, 40):
        layer.calibrate_lifetimes(x, keys)
        scale = lifetime_scale(gate(x), WINDOW + RECENT if keys is None else keys)
        assert_close(scale, torch.ones(1).double(), rtol=1e-5, atol=0)
    before = copy.deepcopy(gate.state_dict())
    for keys in (3 * x.shape[1] // 4 + 1, 10 * x.shape[1]):
        with pytest.raises(ValueError, match=f"keys: is {keys}, want fewer than 3/4 of len"):
            layer.calibrate_lifetimes(x, keys)
    with pytest.raises(ValueError, match="x: axis 0 has 0 elements"):
        layer.calibrate_lifetimes(x[:0], 40)
    assert all(torch.equal(one, before[name]) for name, one in gate.state_dict().items())
    most = 3 * x.shape[1] // 4 - 1  # can be reached
    layer.calibrate_lifetimes(x, most)
    layer.calibrate_lifetimes(x, 40)
    assert_close(lifetime_scale(gate(x), 40), torch.ones(1).double(), rtol=1e-5, atol=0)


# ---- plans ----

SIZES: dict[str, Any] = {"hidden": HIDDEN, "layers": 3, "heads": HEADS, "kv_heads": KV_HEADS}


def test_a_plan() -> None:
    plan = HybridPlan(**SIZES, keys=200, sliding=16, lifetime_units=UNITS, initial_lifetime=50.0)
    model = torch.nn.ModuleList(DynamicMaskAttention(**plan.arguments(n)) for n in range(3))
    rules = [(one.window, one.recent, one.lifetime_gate is not None) for one in model]
    assert rules == [(16, 0, False), (16, 0, False), (136, 64, True)]
    assert HybridPlan(**SIZES, keys=100, lifetime_units=UNITS).recent == 50
    gate = model[2].lifetime_gate
    *others, of_gate = plan.parameter_groups(model, 0.1, score_rate=2.0)
    assert of_gate["params"] == [*gate.parameters()] and of_gate["lr"] == 0.2
    known = {id(one) for group in others for one in group["params"]}
    assert known.isdisjoint(map(id, gate.parameters()))
    with plan.targets(model, 0) as targets:
        model[2](torch.randn(1, 90, HIDDEN))
    assert targets.loss() == 0
    plan.set_keys(model, 1000)
    assert model[2].window == 936
    assert [one.bias_form for one in plan.caches(model, 2).caches] == ["exp", "none"]
