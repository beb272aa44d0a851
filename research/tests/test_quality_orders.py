"""research/quality_orders.py: the keys that an order keeps, and the training with each."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import quality_gates
import quality_orders
import quality_retention
import torch
from flash_dmattn.lifetimes import lifetime_scale
from quality_cases import LENGTH, call, refusal, train
from quality_retention import Gate

KEYS, LEN = 70, 200


def gate_with(scores: torch.Tensor) -> Gate:
    gate = Gate(8, 2, 0.0, seed=0)
    gate.scores = scores
    return gate


def scores_of(sequences: int) -> torch.Tensor:
    return 3 + 2 * torch.randn(sequences, 2, LEN, generator=torch.Generator().manual_seed(0))


def test_gates_are_those_of_the_module() -> None:
    assert quality_orders.GATES == quality_retention.DECAYING


def test_lifetimes_fill_the_rows() -> None:
    scores = scores_of(3)
    scale = lifetime_scale(scores, KEYS).tolist()
    for head in range(2):
        lives = [[scale[head] * one.exp().item() for one in row[head]] for row in scores]
        alive = [
            sum(n - j < row[j] for j in range(n + 1)) for row in lives for n in range(LEN // 2, LEN)
        ]
        assert sum(alive) / len(alive) == pytest.approx(KEYS, abs=1)


@pytest.mark.parametrize("is_half", [False, True])
def test_keys_in_order(is_half: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, LEN, h, 16, generator=generator) for h in (4, 2, 2))
    scores = scores_of(1)
    scale = None if is_half else torch.tensor([0.5, 2.0])
    out = quality_orders.attend_in_order(gate_with(scores), scale, KEYS, query, key, value)
    recent = KEYS // 2 if is_half else quality_orders.RECENT
    for head in range(4):
        g = head // 2
        ranks = scores[0, g].double()
        if scale is not None:
            ranks = torch.arange(LEN) + scale[g] * ranks.exp()
        for n in (0, 68, 69, 70, 130, LEN - 1):
            older = sorted(range(max(0, n + 1 - recent)), key=lambda j: -ranks[j].item())
            kept = older[: KEYS - recent] + list(range(max(0, n + 1 - recent), n + 1))
            weights = (key[0, kept, g] @ query[0, n, head] / 4).softmax(0)
            wanted = weights @ value[0, kept, g]
            torch.testing.assert_close(out[0, n, head], wanted, rtol=1e-4, atol=1e-5)


def test_divided_heads() -> None:
    """Each half of the kv heads attends as if the other had the same rule."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, LEN, h, 16, generator=generator) for h in (4, 2, 2))
    first, other = gate_with(scores_of(1)), gate_with(scores_of(1).flip(2))
    scale = torch.tensor([0.5, 2.0])
    rows = (KEYS, query, key, value)
    found = quality_orders.attend_divided(first, scale, other, *rows)
    alone = quality_orders.attend_in_order(first, scale, *rows)
    half = quality_orders.attend_in_order(other, None, *rows)
    torch.testing.assert_close(found, torch.cat((alone[:, :, :2], half[:, :, 2:]), 2))
    assert not torch.allclose(alone[:, :, 2:], half[:, :, 2:])


def test_rules_with_two_gates() -> None:
    order = quality_orders.order_of("lifetime+repetition:4608")
    assert order == quality_orders.Order("lifetime", 4608, False, "repetition")
    assert order.gates == ("lifetime", "repetition")
    for word in ("repetition+lifetime:4608", "lifetime+:4608", "lifetime+newest:4608"):
        with pytest.raises(argparse.ArgumentTypeError, match="want all, newest:KEYS"):
            quality_orders.order_of(word)


def test_scores_of_values() -> None:
    """A gate that reads values keeps what one with the same scores does."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, LEN, h, 16, generator=generator) for h in (4, 2, 2))
    gate = Gate(32, 2, 3.0, seed=0, reads_values=True)
    same = gate_with((value.flatten(2) @ gate.contract.weight.T + gate.contract.bias).mT)
    scale = torch.tensor([0.5, 2.0])
    found, wanted = (
        quality_orders.attend_in_order(one, scale, KEYS, query, key, value) for one in (gate, same)
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.usefixtures("few_measurements")
def test_a_table(
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quality_gates, "NEEDLES_BACK", (1024,))
    monkeypatch.setattr(quality_gates, "NEEDLE_TEXTS", 1)
    monkeypatch.setattr(quality_orders, "CALIBRATION", 1)
    heads = {"nope_heads": 1, "nope_layers": 1, "nope_keys": LENGTH}
    run = train(corpus, tmp_path, "sliding", **heads, weights="float32", batch=1)
    model = tmp_path / "sliding-tiny-0.safetensors"
    start = ["--start", model, "--corpus", corpus, "--form=sliding", "--size=tiny", "--batch=1"]
    start += [f"--length={LENGTH}", "--keys=64", "--recent=16", "--nope-heads=1", "--device=cpu"]
    start += ["--pieces=2", "--questions=8", "--steps=3", f"--nope-keys={LENGTH}", "--recall=0.5"]
    own = ["--gate-keys=140", "--gate-steps=2", "--queries=32", "--untrained", "newest:140"]
    rules = ["all", "newest:140", "lifetime:140", "retention/half:160", "lifetime-value:200"]
    last = [*start, "--nope-layers=1", "--select-start=1", "--name=o"]
    call(quality_orders, tmp_path, *own, "--rules", *rules, *last, "--tasks=1")
    lines = (tmp_path / "o.orders.json").read_text().splitlines()
    first, *rows = map(json.loads, lines)
    assert {"device", "torch", "commit", "gate_rate", "sha256"} <= set(first)
    assert [row["gate"] for row in rows if "gate" in row] == [
        "lifetime",
        "retention",
        "lifetime-value",
    ]
    measured = [row for row in rows if "bits" in row]
    assert [(row["name"], row["keys"], row["trained"]) for row in measured] == [
        ("newest", 140, 0),
        ("all", None, 2),
        ("newest", 140, 2),
        ("lifetime", 140, 2),
        ("retention", 160, 2),
        ("lifetime-value", 200, 2),
    ]
    assert len({row["bits"] for row in measured}) == 6 and run["final"]["bits"] > 0
    shown = capsys.readouterr().out
    assert "| retention/half | 160 | 2 |" in shown
    assert "\n| task | newest 140 | all | newest 140 | lifetime 140 | retention/half 160 |" in shown
    assert "\n| niah_single_1 | 0.00, " in shown
    *_, answers = zip(*([task["bits"] for task in row["tasks"]] for row in measured))
    assert len(answers) == 6 and len(set(answers)) > 3  # each rule has its own keys
    state = ["--state", tmp_path / "state.pt", "--rules", "newest:140"]
    for name in ("writes", "reads"):
        call(quality_orders, tmp_path, *state, *last, f"--name={name}")
        *_, row = map(json.loads, (tmp_path / f"{name}.orders.json").read_text().splitlines())
        assert row["bits"] == measured[2]["bits"] and row["trained"] == 2
    for words, message in (
        ([*last, "--rules", "lifetime:128"], "--rules: is lifetime:128, want all, newest:KEYS"),
        ([*last, "--rules", "oldest:140"], "is oldest:140, want all, newest:KEYS, GATE:KEYS,"),
        ([*last, "--rules", "all", "--queries=0"], "--queries: is 0, want 1 or more"),
        ([*last, "--rules", "all", "--gate-rate=0"], "--gate-rate: is 0, want above 0"),
        ([*start, "--nope-layers=1", "--rules=all"], "want --start and --select-start"),
        ([*last, "--nope-layers", 0, "--rules=all"], "nope is '0 1', want '1 0'"),
        ([*last, "--rules", "lifetime+repetition:140"], "want two kv heads or more"),
    ):
        assert message in refusal(capsys, quality_orders, tmp_path, *words)
    train(corpus, tmp_path, "sliding", **{**heads, "nope_layers": 0}, name="first", batch=1)
    start[1] = tmp_path / "first.safetensors"
    words = [*start, "--nope-layers=0", "--select-start=1", "--rules=all"]
    message = "first.safetensors: want NoPE heads in all of the last layer, and in no other"
    assert message in refusal(capsys, quality_orders, tmp_path, *words)
