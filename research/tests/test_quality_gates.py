"""research/quality_gates.py and quality_retention.py: losses and targets of gates, the keys that
they keep, and the table."""

from __future__ import annotations

import argparse
import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import quality_gates
import quality_model
import quality_retention
import torch
from flash_dmattn import lifetimes
from quality_cases import LENGTH, call, refusal, train
from quality_retention import Gate
from torch import nn

KEYS, LEN = 20, 60
RETENTION = ("retention", "retention-weights")
DECAYING = (*RETENTION, "lifetime", "lifetime-value")


def rows_of(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query [LEN, 4, 16], key and value [LEN, 2, 16]."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(LEN, heads, 16, generator=generator) for heads in (4, 2, 2))
    return 3 * query, key, value


def logits_of(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[4, LEN, LEN] in float64, with later keys."""
    query, key = (x.double().transpose(0, 1) for x in (query, key))
    return query @ key.repeat_interleave(2, 0).transpose(1, 2) / 4


def out_with(kept: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
    """Attention with a mask [kv_heads, LEN, LEN], by definition, in float64."""
    query, key, value = rows
    logits = logits_of(query, key).masked_fill(~kept.repeat_interleave(2, 0), -torch.inf)
    values = value.double().transpose(0, 1).repeat_interleave(2, 0)
    return (logits.softmax(-1) @ values).transpose(0, 1)


def tiny_model() -> quality_model.Model:
    """A model whose queries and keys are so large that attention differs from a mean."""
    config = quality_model.config_of(
        "sliding", "tiny", 16, 4, nope_heads=1, nope_layers=[1], nope_keys=LENGTH
    )
    model = quality_model.Model(config)
    quality_model.initialise(model, "sliding", 0, initial_a=0.0, dt_std=0.1)
    with torch.no_grad():
        for layer in model.attentions():
            layer.q_proj.weight *= 5
            layer.k_proj.weight *= 5
            layer.v_proj.weight *= 50
    return model.requires_grad_(False)


def text_of(length: int) -> torch.Tensor:
    return torch.randint(256, (1, length), generator=torch.Generator().manual_seed(1))


# ---- targets ----


def test_largest_probabilities_of_later_queries() -> None:
    query, key, _ = rows_of(0)
    recent = 7
    logits = logits_of(query, key)
    wanted = torch.zeros(2, LEN - recent, dtype=torch.float64)
    for head in range(4):
        for n in range(recent, LEN):
            of_query = logits[head, n, : n + 1].softmax(0)[: n - recent + 1]
            own = wanted[head // 2, : len(of_query)]
            own.copy_(torch.maximum(own, of_query))
    found = quality_retention.largest_probabilities(query, key, recent)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-6)


def test_targets_are_of_the_states_that_the_gate_reads() -> None:
    """The gate's hook and its training see the same states, and the loss is a cross-entropy."""
    model, text = tiny_model(), text_of(64)
    gate = Gate(128, 1, 0.5, seed=0)
    with model.attentions()[-1].register_forward_pre_hook(gate.read):
        model(text)
    frozen = quality_retention.run_frozen(model, text)
    assert torch.equal(gate.scores, gate(frozen.states))
    chances = gate.scores[0, :, :-9].sigmoid().double()
    targets = quality_retention.largest_probabilities(frozen.query, frozen.key, 9).double()
    wanted = -(targets * chances.log() + (1 - targets) * (1 - chances).log()).mean()
    found = quality_retention.target_loss(gate, model, text, 9)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_repetition_reads_the_first_half_twice() -> None:
    model, text = tiny_model(), text_of(64)
    gate = Gate(128, 1, 0.5, seed=0)
    changed = text.clone()
    changed[:, 32:] = 7
    found, other = (
        quality_retention.target_loss(gate, model, one, None).item() for one in (text, changed)
    )
    doubled = torch.cat((text[:, :32], text[:, :32]), 1)
    with model.attentions()[-1].register_forward_pre_hook(gate.read):
        model(doubled)
    frozen = quality_retention.run_frozen(model, doubled)
    targets = quality_retention.largest_probabilities(frozen.query, frozen.key, 31)
    assert targets.shape == (1, 33)  # the byte that is predicted again first, and 32 later ones
    wanted = nn.functional.binary_cross_entropy(gate.scores[0, :, :33].sigmoid(), targets)
    assert found == other == pytest.approx(wanted.item(), rel=1e-5)


# ---- retention ----


def decays_of(
    kind: str, scores: torch.Tensor, ages: torch.Tensor, sharpness: float
) -> torch.Tensor:
    """[2, queries, LEN] by definition."""
    if kind.startswith("retention"):
        return scores.sigmoid()[:, None] ** ages
    return 1 / (1 + (ages.clamp(min=1) / scores.exp()[:, None]) ** sharpness)


@pytest.mark.parametrize("kind", DECAYING)
def test_decayed_attention(kind: str) -> None:
    """Outputs, sums and gradients of queries, one of them twice, are as in the definition in
    float64."""
    query, key, value = rows_of(1)
    scores = 3 + torch.randn(2, LEN, generator=torch.Generator().manual_seed(3))
    ages = (torch.arange(LEN)[:, None] - torch.arange(LEN)).clamp(min=0)
    exact = scores.double().requires_grad_()
    decay = decays_of(kind, exact, ages, 3.0)
    logits, decays = logits_of(query, key), decay.repeat_interleave(2, 0)
    weights = (logits if kind == "retention-weights" else logits * decays).exp()
    weights = weights if kind == "retention" else weights * decays
    values = value.double().transpose(0, 1).repeat_interleave(2, 0)
    weights = weights.tril()
    wanted = (weights / weights.sum(-1, keepdim=True) @ values).transpose(0, 1)
    sums = decay.tril().sum(-1)
    given = scores.clone().requires_grad_()
    places = torch.tensor([0, 3, 4, 9, 9, 30, LEN - 1])
    parts = [
        quality_retention.attend_decayed(kind, query[own], key, value, given, own, 3.0)
        for own in places.split(4)
    ]
    out, held = (torch.cat(of_parts, axis) for of_parts, axis in zip(zip(*parts), (0, 1)))
    wanted, sums = wanted[places], sums[:, places]
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(held.double(), sums, rtol=1e-5, atol=1e-5)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    ((out * weights).sum() + held.square().sum() / LEN).backward()
    ((wanted * weights).sum() + sums.square().sum() / LEN).backward()
    scale = exact.grad.abs().max().item()
    torch.testing.assert_close(given.grad.double(), exact.grad, rtol=1e-4, atol=1e-5 * scale)


FEW = 5  # keys for which gates learn
PLACES = torch.tensor([5, 5, 12, 30, 33, 40, 50, 63])
WEIGHTS = torch.tensor([0.5, 0.5, 3.0, 1.0, 2.0, 1.0, 4.0, 1.0])


def learned(
    kind: str, model: quality_model.Model, bias: float, marked: torch.Tensor
) -> tuple[Gate, list[float]]:
    gate = quality_retention.new_gate(model, kind, 64, 0)
    nn.init.constant_(gate.contract.bias, bias)
    options = argparse.Namespace(keys=[FEW], recall_weight=0.5, capacity_weight=3.0)
    frozen = quality_retention.run_frozen(model, text_of(64))
    given = (frozen, marked, (PLACES, WEIGHTS), options, 3.0)
    return gate, quality_retention.learn_retention(gate, kind, model, *given).tolist()


@pytest.mark.parametrize("kind", DECAYING)
def test_losses_of_decays(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without decay the model predicts as it does, and holds all keys. With decay, the losses are
    as in a model whose attention is decayed in one piece."""
    monkeypatch.setattr(quality_retention, "CHUNK", 3)
    model, marked = tiny_model(), torch.zeros(64, dtype=torch.bool)
    marked[[30, 33, 50]] = True
    shares = WEIGHTS / WEIGHTS.sum()
    _, (divergence, excess) = learned(kind, model, 40.0, marked)
    too_many = (PLACES + 1 - FEW).clamp(min=0) / (PLACES + 1)
    assert divergence == pytest.approx(0, abs=1e-6)
    assert excess == pytest.approx((too_many * shares).sum().item(), rel=1e-5)

    gate, (divergence, excess) = learned(kind, model, 3.5, marked)
    frozen = quality_retention.run_frozen(model, text_of(64))
    copy = quality_retention.new_gate(model, kind, 64, 0)
    nn.init.constant_(copy.contract.bias, 3.5)
    own = (frozen.query, frozen.key, frozen.value, copy.of(frozen)[0], torch.arange(64), 3.0)
    out, held = quality_retention.attend_decayed(kind, *own)
    block = model.blocks[-1]
    hidden = frozen.entering + block.attention.o_proj(out.flatten(1)[None])
    between = nn.functional.relu(block.expand(block.norm(hidden))).square()
    logits = model.head(model.norm(hidden + block.contract(between)))[0]
    wanted, found = (x.log_softmax(-1) for x in (frozen.logits[0], logits))
    of_bytes = (wanted.exp() * (wanted - found)).sum(-1)[PLACES]
    is_marked = marked[PLACES]
    exact = sum(
        factor * (of_bytes * WEIGHTS)[chosen].sum() / WEIGHTS[chosen].sum()
        for factor, chosen in ((1.0, ~is_marked), (0.5, is_marked))
    )
    exact_excess = (((held[0, PLACES] - FEW).clamp(min=0) / (PLACES + 1)) * shares).sum()
    assert exact.item() > 1e-5 and exact_excess.item() > 0
    assert divergence == pytest.approx(exact.item(), rel=1e-3)
    assert excess == pytest.approx(exact_excess.item(), rel=1e-4)
    (exact + 3 * exact_excess).backward()
    for one, other in zip(gate.parameters(), copy.parameters()):
        scale = other.grad.abs().max().item()
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4 * scale)


def test_the_package_has_the_same_loss_of_lifetimes(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash_dmattn.lifetime_loss, for the same queries, and its gradient."""
    model, text = tiny_model(), text_of(64)
    gate, losses = learned("lifetime", model, 3.5, torch.zeros(64, dtype=torch.bool))
    frozen = quality_retention.run_frozen(model, text)
    other = quality_retention.new_gate(model, "lifetime", 64, 0)
    nn.init.constant_(other.contract.bias, 3.5)
    shares = WEIGHTS / WEIGHTS.sum()
    monkeypatch.setattr(lifetimes, "sample_places", lambda *_: (PLACES, shares))
    monkeypatch.setattr(lifetimes, "sharpness_at", lambda _: 3.0)

    def predict(out: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        own = partial(quality_retention.replaced, out)
        return quality_retention.predict(model, frozen.entering[:, places], own)[None]

    rows = (x[None] for x in (frozen.query, frozen.key, frozen.value))
    given = {"keys": FEW, "progress": 0.5, "capacity_weight": 3.0}
    loss = lifetimes.lifetime_loss(*rows, other.of(frozen), predict, **given)
    assert loss.item() == pytest.approx(losses[0] + 3 * losses[1], rel=1e-5)
    loss.backward()
    for one, same in zip(other.parameters(), gate.parameters()):
        scale = same.grad.abs().max().item()
        torch.testing.assert_close(one.grad, same.grad, rtol=1e-4, atol=1e-5 * scale)


def test_sampled_queries_give_means() -> None:
    """Sums with these weights are means over the sequence, and places whose prediction needs old
    keys are chosen more often."""
    model = tiny_model()
    frozen = quality_retention.run_frozen(model, text_of(64))
    generator = torch.Generator().manual_seed(0)
    places, weights = quality_retention.sample_queries(model, frozen, 8, 40000, generator)
    assert torch.equal(places, places.sort().values)
    values = torch.randn(64, generator=generator)
    assert (values[places] * weights).sum().item() == pytest.approx(values.mean().item(), abs=0.02)
    counts = places.bincount(minlength=64) * 64 / 40000
    assert counts[:8].max() < 0.6 and counts.max() > 1.5  # the first queries miss nothing


# ---- rules ----


def gate_with(scores: torch.Tensor) -> Gate:
    gate = Gate(128, 2, 0.0, seed=0)
    gate.scores = scores
    return gate


def test_keys_by_gate() -> None:
    rows = rows_of(2)
    scores = torch.randn(1, 2, LEN, generator=torch.Generator().manual_seed(5))
    kept = torch.zeros(2, LEN, LEN, dtype=torch.bool)
    for g in range(2):
        for n in range(LEN):
            older = sorted(range(max(0, n + 1 - KEYS // 2)), key=lambda j: -scores[0, g, j].item())
            kept[g, n, older[: KEYS // 2]] = True
            kept[g, n, max(0, n + 1 - KEYS // 2) : n + 1] = True
    gate = gate_with(scores)
    kinds = {"attention": "attention", **{kind: f"{kind}, no decay" for kind in RETENTION}}
    for kind, name in kinds.items():
        rule = quality_gates.rules_with(kind, gate, KEYS, 4)[name]
        found = rule(*(x[None] for x in rows))[0]
        torch.testing.assert_close(found.double(), out_with(kept, *rows), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", [1, 7])
def test_keys_by_decay(block: int) -> None:
    """After each block the keys of largest beta^age stay, of those that were still there."""
    rows = rows_of(3)
    scores = 3 + torch.randn(1, 2, LEN, generator=torch.Generator().manual_seed(6))
    kept = torch.zeros(2, LEN, LEN, dtype=torch.bool)
    for g in range(2):
        beta = [1 / (1 + math.exp(-x)) for x in scores[0, g].tolist()]
        cache: list[int] = []
        for begin in range(0, LEN, block):
            end = min(begin + block, LEN)
            cache += range(begin, end)
            for n in range(begin, end):
                kept[g, n, [j for j in cache if j <= n]] = True
            cache.sort(key=lambda j: -(beta[j] ** (end - 1 - j)))
            cache = sorted(cache[:KEYS])
    assert not kept[:, -1, : LEN - KEYS - block].sum(-1).eq(0).all()  # not the newest alone
    rule = quality_gates.rules_with("retention", gate_with(scores), KEYS, block)["retention"]
    found = rule(*(x[None] for x in rows))[0]
    torch.testing.assert_close(found.double(), out_with(kept, *rows), rtol=1e-4, atol=1e-5)


# ---- training ----


@pytest.mark.parametrize("kind", [*quality_gates.GATES, "lifetime", "lifetime-value"])
def test_training_lowers_the_loss(kind: str) -> None:
    model = tiny_model()
    corpus = np.random.default_rng(0).integers(97, 123, 4000).astype(np.uint8)
    options = argparse.Namespace(
        **{"keys": [KEYS], "steps": 16, "seconds": 1000.0, "queries": 128, "rate": 2e-3},
        **{"recall": 0.5, "recall_weight": 0.5, "capacity_weight": 1.0},
        **{"seed": 0, "length": 256, "shortest_span": 128, "episodes": "pairs", "device": "cpu"},
    )
    gate = quality_retention.new_gate(model, kind, 256, 0)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    log = quality_retention.train(gate, kind, model, corpus, options)
    assert log["steps"] == 16 and len(log["losses"]) == 8
    assert sum(log["losses"][-1]) < 0.9 * sum(log["losses"][0])
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    options.seconds = 1e-3  # less than one step takes
    gate = quality_retention.new_gate(model, kind, 256, 0)
    assert quality_retention.train(gate, kind, model, corpus, options)["steps"] == 10


def test_steps_in_seconds() -> None:
    times = {0: 100.0, 5: 130.0, 10: 140.0}  # 2 seconds a step, 40 seconds in all
    assert quality_retention.steps_in(50.0, times) == 15
    assert quality_retention.steps_in(51.9, times) == 15
    assert quality_retention.steps_in(20.0, times) == 10


# ---- the program ----


@pytest.mark.usefixtures("few_measurements")
def test_a_table(
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quality_gates, "NEEDLES_BACK", (1024,))
    monkeypatch.setattr(quality_gates, "NEEDLE_TEXTS", 1)
    heads = {"nope_heads": 1, "nope_layers": 1, "nope_keys": LENGTH, "weights": "float32"}
    run = train(corpus, tmp_path, "sliding", **heads)
    model = tmp_path / "sliding-tiny-0.safetensors"
    options = ["--corpus", corpus, "--pieces", 2, "--device", "cpu", "--questions", 8]
    options += ["--keys", 64, "--queries", 64, "--steps", 2, "--json", tmp_path / "rows.json"]
    call(quality_gates, model, *options, "--length", LENGTH)
    first, *rows = map(json.loads, (tmp_path / "rows.json").read_text().splitlines())
    assert {"device", "torch", "commit", "rate"} <= set(first)
    measured = [row for row in rows if "rule" in row]
    gates = ["attention", "repetition"]
    gates += [name for kind in RETENTION for name in (kind, f"{kind}, no decay")]
    assert [row["rule"] for row in measured] == ["all", "newest", *gates]
    assert measured[0]["bits"] == pytest.approx(run["final"]["bits"], abs=1e-5)
    assert [row["gate"] for row in rows if "gate" in row] == list(quality_gates.GATES)
    assert "| retention, no decay | 64 |" in capsys.readouterr().out
    longer = [*options, "--length", 2560, "--gates", "attention"]
    call(quality_gates, model, *longer)
    *_, last = map(json.loads, (tmp_path / "rows.json").read_text().splitlines())
    assert set(last["needles"]["identifier"]) == {"1024"}
    assert "| identifier 1024 |" in capsys.readouterr().out
    train(corpus, tmp_path, "dense", name="plain")
    train(corpus, tmp_path, "dense", name="both", nope_heads=1)
    for words, message in (
        ([model, "--keys", LENGTH], f"--keys: is {LENGTH}, want 2 or more, below --length"),
        ([model, "--block=0"], "--block: is 0, want 1 or more"),
        ([model, "--queries=513"], "--queries: is 513, want at most --length"),
        ([model, "--shortest-span=9"], f"--shortest-span: is 9, want 64 to {LENGTH}"),
        ([model, "--rate=0"], "--rate: is 0, want above 0"),
        ([model, "--capacity-weight=0"], "--capacity-weight: is 0, want above 0"),
        ([tmp_path / "plain.safetensors"], "want NoPE heads in all of the last layer"),
        ([tmp_path / "both.safetensors"], "want NoPE heads in all of the last layer"),
        (["nothing"], "nothing is not a file"),
    ):
        given = [*options, "--length", LENGTH, *words]
        assert message in refusal(capsys, quality_gates, *given)
    (corpus / "corpus.bin").rename(corpus / "moved.bin")
    try:
        given = [*options, "--length", LENGTH, model]
        assert "corpus.bin is not a file" in refusal(capsys, quality_gates, *given)
    finally:
        (corpus / "moved.bin").rename(corpus / "corpus.bin")
