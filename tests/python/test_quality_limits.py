"""benchmarks/quality_limits.py: what its rules choose, and its table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import quality_limits
import quality_model
import torch
from flash_dmattn import score_target_loss
from quality_cases import LENGTH, train

KEYS, RECENT = 24, 6


def rows_of(length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query [1, length, 4, 16], key and value [1, length, 2, 16]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, length, heads, 16) for heads in (4, 2, 2))
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return 3 * query, key, value


def out_with(kept: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
    """Attention with a mask [heads, queries, keys], by definition, in float64."""
    query, key, value = (x[0].double().transpose(0, 1) for x in rows)
    key, value = (x.repeat_interleave(2, 0) for x in (key, value))
    logits = (query @ key.transpose(1, 2) / 4).masked_fill(~kept, -torch.inf)
    return (logits.softmax(-1) @ value).transpose(0, 1)[None]


@pytest.mark.parametrize("queries", [7, 1024])
def test_best_keys_of_each_query(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality_limits, "QUERIES", queries)
    query, key, value = rows_of(50, 0)
    kept = torch.zeros(4, 50, 50, dtype=torch.bool)
    for head in range(4):
        for n in range(50):
            products = (key[0, : n + 1, head // 2].double() @ query[0, n, head].double()).tolist()
            first = max(0, n + 1 - RECENT)
            best = sorted(range(first), key=lambda one: -products[one])[: KEYS - RECENT]
            kept[head, n, [*best, *range(first, n + 1)]] = True
    found = quality_limits.attend_with("each query", KEYS, RECENT, query, key, value)
    assert torch.allclose(found.double(), out_with(kept, query, key, value), atol=1e-5)


@pytest.mark.parametrize("queries", [7, 1024])
def test_targets_are_those_of_the_loss(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of score_target_loss for dt is softmax(dt) minus the targets."""
    monkeypatch.setattr(quality_limits, "QUERIES", queries)
    query, key, _ = rows_of(32, 1)
    value = torch.eye(32).reshape(1, 32, 2, 16)  # so that dt is a row of dt_proj
    dt_proj = torch.zeros(2, 32, requires_grad=True)
    score_target_loss(query, key, value, dt_proj, recent=RECENT).backward()
    older = 32 - RECENT
    wanted = 1 / older - 2 * dt_proj.grad[:, :older]  # the loss is the mean over two heads
    found = quality_limits.scores_of("all queries", query[0], key[0], RECENT)
    assert (found[:, older:] == 0).all()
    found = found[:, :older] / found.sum(1, keepdim=True)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_newest_keys() -> None:
    rows = rows_of(50, 2)
    distance = torch.arange(50)[:, None] - torch.arange(50)
    kept = ((distance >= 0) & (distance < KEYS)).expand(4, 50, 50)
    found = quality_limits.attend_with("newest", KEYS, RECENT, *rows)
    assert torch.allclose(found.double(), out_with(kept, *rows), atol=1e-5)


@pytest.mark.parametrize("rule", quality_limits.RULES)
def test_as_many_keys_as_there_are(rule: str) -> None:
    rows = rows_of(50, 3)
    found = quality_limits.attend_with(rule, 50, RECENT, *rows)
    kept = torch.ones(4, 50, 50, dtype=torch.bool).tril()
    assert torch.allclose(found.double(), out_with(kept, *rows), atol=1e-5)


def test_other_heads_stay() -> None:
    sizes = {"layers": 2, "q_heads": 4, "kv_heads": 2, "nope": (0, 1)}
    model = quality_model.Model(quality_model.Config(window=None, bias_form="none", **sizes))
    quality_model.initialise(model, "dense", 0, 0.0, 0.5)
    first, second = model.attentions()
    rows = tuple(torch.randn(1, 40, heads, 64) for heads in (4, 2, 2))
    whole = [layer.attend(*rows) for layer in (first, second)]
    with quality_limits.restricted_heads(model, "newest", KEYS, RECENT):
        found = [layer.attend(*rows) for layer in (first, second)]
    assert torch.equal(found[0], whole[0])
    assert torch.equal(found[1][:, :, :2], whole[1][:, :, :2])
    nope = quality_limits.attend_with(
        "newest", KEYS, RECENT, *(x[:, :, -(x.shape[2] // 2) :] for x in rows)
    )
    assert torch.equal(found[1][:, :, 2:], nope)
    assert torch.equal(second.attend(*rows), whole[1])  # again as it was


@pytest.mark.usefixtures("few_measurements")
def test_a_table(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = train(corpus, tmp_path, "dense", nope_heads=1, nope_layers=1, weights="float32")
    command = ["quality_limits.py", str(tmp_path / "dense-tiny-0.safetensors")]
    command += ["--corpus", str(corpus), "--length", str(LENGTH), "--pieces", "2"]
    command += ["--device", "cpu", "--keys", "64", "256", "--recent", "16"]
    command += ["--json", str(tmp_path / "rows.json")]
    monkeypatch.setattr(sys, "argv", command)
    quality_limits.main()
    lines = [json.loads(line) for line in (tmp_path / "rows.json").read_text().splitlines()]
    assert [row["keys"] for row in lines[1:]] == [LENGTH, 64, 256]
    assert lines[1]["each query"] == pytest.approx(run["final"]["bits"], abs=1e-5)
    assert "| 64 |" in capsys.readouterr().out
    for keys in ("64", str(LENGTH)):
        monkeypatch.setattr(sys, "argv", [*command, "--recent", "64", "--keys", keys])
        with pytest.raises(SystemExit) as stop:
            quality_limits.main()
        assert stop.value.code == 2 and f"--keys: is {keys}" in capsys.readouterr().err
