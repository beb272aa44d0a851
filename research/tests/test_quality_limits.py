"""research/quality_limits.py: the choices of its rules, and its table."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import quality_limits
import quality_model
import torch
from quality_cases import LENGTH, call, refusal, train
from torch import nn

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
    key, value = (x.repeat_interleave(len(query) // len(key), 0) for x in (key, value))
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


def test_best_keys_for_all_queries() -> None:
    """With one query head and one newest key: of the other keys that a query sees, it keeps the
    keys of largest probability from any later query."""
    query, key, value = (x[:, :, :1] for x in rows_of(40, 1))
    logits = (query[0, :, 0].double() @ key[0, :, 0].double().T / 4).tolist()
    largest = [0.0] * 40
    for n, row in enumerate(logits):
        total = sum(math.exp(x) for x in row[: n + 1])
        for j in range(n):  # the key of position n is the newest one
            largest[j] = max(largest[j], math.exp(row[j]) / total)
    kept = torch.zeros(1, 40, 40, dtype=torch.bool)
    for n in range(40):
        best = sorted(range(n), key=lambda j: -largest[j])[: KEYS - 1]
        kept[0, n, [*best, n]] = True
    found = quality_limits.attend_with("all queries", KEYS, 1, query, key, value)
    assert torch.allclose(found.double(), out_with(kept, query, key, value), atol=1e-5)


def test_random_keys() -> None:
    """Every query keeps KEYS keys, including its RECENT newest ones, and not only the newest."""
    query, key = (nn.functional.pad(x, (0, 40)) for x in rows_of(50, 4)[:2])
    value = torch.eye(50, 56)[None, :, None].repeat(1, 1, 2, 1)  # so that out has the probabilities
    weights = quality_limits.attend_with("random", KEYS, RECENT, query, key, value)[0, :, 0, :50]
    assert ((weights > 0).sum(1) == torch.arange(1, 51).clamp(max=KEYS)).all()
    newest = torch.ones(50, 50, dtype=torch.bool).tril().triu(1 - RECENT)
    assert (weights[newest] > 0).all() and (weights[-1, : 50 - KEYS] > 0).any()


def test_best_keys_are_exact_under_autocast() -> None:
    rows = rows_of(50, 5)
    wanted = quality_limits.attend_with("each query", KEYS, RECENT, *rows)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(quality_limits.attend_with("each query", KEYS, RECENT, *rows), wanted)


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
    newest = partial(quality_limits.attend_with, "newest", KEYS, RECENT)
    with quality_limits.restricted_heads(model, newest):
        found = [layer.attend(*rows) for layer in (first, second)]
    assert torch.equal(found[0], whole[0])
    assert torch.equal(found[1][:, :, :2], whole[1][:, :, :2])
    nope = newest(*(x[:, :, -(x.shape[2] // 2) :] for x in rows))
    assert torch.equal(found[1][:, :, 2:], nope)
    assert torch.equal(second.attend(*rows), whole[1])  # restored


@pytest.mark.usefixtures("few_measurements")
def test_a_table(
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = train(corpus, tmp_path, "dense", nope_heads=1, nope_layers=1, weights="float32")
    model = tmp_path / "dense-tiny-0.safetensors"
    options = ["--corpus", corpus, "--length", LENGTH, "--pieces", 2, "--device", "cpu"]
    options += ["--keys", 64, 256, "--recent", 16, "--json", tmp_path / "rows.json"]
    call(quality_limits, model, *options)
    lines = [json.loads(line) for line in (tmp_path / "rows.json").read_text().splitlines()]
    assert [row["keys"] for row in lines[1:]] == [LENGTH, 64, 256]
    assert {"device", "torch", "commit"} <= set(lines[0])
    for rule in quality_limits.RULES:
        assert lines[1][rule] == pytest.approx(run["final"]["bits"], abs=1e-5)
    assert "| 64 |" in capsys.readouterr().out
    train(corpus, tmp_path, "dense", name="plain")
    for words, message in (
        ([model, "--recent=64", "--keys=64"], "--keys: is 64, want more than --recent"),
        ([model, f"--keys={LENGTH}"], f"--keys: is {LENGTH}, want more than --recent and less"),
        ([model, "--recent=-1"], "--recent: is -1, want 0 or more"),
        ([model, "--length=5000"], "--length: is 5000, want less than"),
        ([model, f"--corpus={tmp_path}"], "held_out.bin is not a file"),
        ([tmp_path / "plain.safetensors"], "has no NoPE heads"),
        (["nothing"], "nothing is not a file"),
    ):
        assert message in refusal(capsys, quality_limits, *options, *words)
