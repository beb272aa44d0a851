"""research/quality_rivals.py: the rows that its rules keep, and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import quality_rivals
import torch
from quality_cases import LENGTH, call, refusal, train
from quality_recall import Question
from torch import nn

KEYS, LEN = 20, 60


def rows_of(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query [2, LEN, 4, 16], key and value [2, LEN, 2, 16]."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(2, LEN, heads, 16, generator=generator) for heads in (4, 2, 2))
    return 3 * query, key, value


def out_with(kept: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
    """Attention with a mask [batch, kv_heads, queries, keys], by definition, in float64."""
    query, key, value = (x.double().transpose(1, 2) for x in rows)
    key, value, kept = (x.repeat_interleave(2, 1) for x in (key, value, kept))
    logits = (query @ key.transpose(2, 3) / 4).masked_fill(~kept, -torch.inf)
    return (logits.softmax(-1) @ value).transpose(1, 2)


def evicted(
    rule: str, recent: int, block: int, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """The mask of one kv head, [queries, keys], by a cache that is a dictionary: query [LEN, 2,
    16], key [LEN, 16]."""
    kept = torch.zeros(LEN, LEN, dtype=torch.bool)
    cache: dict[int, float] = {}  # position: attention received
    for begin in range(0, LEN, block):
        end = min(begin + block, LEN)
        cache.update((position, 0.0) for position in range(begin, end))
        for n in range(begin, end):
            seen = [position for position in sorted(cache) if position <= n]
            kept[n, seen] = True
            weights = (query[n].double() @ key[seen].double().T / 4).softmax(-1).sum(0).tolist()
            if rule == "last attention":
                cache = dict.fromkeys(cache, 0.0)
            for position, weight in zip(seen, weights):
                cache[position] += weight
        newest = [position for position in cache if position >= end - recent]
        others = sorted(set(cache) - set(newest), key=lambda one: -cache[one])
        if len(cache) > KEYS:
            cache = {one: cache[one] for one in [*newest, *others[: KEYS - len(newest)]]}
    return kept


@pytest.mark.parametrize("block", [1, 7])
@pytest.mark.parametrize(("rule", "recent"), [("heavy hitters", 10), ("last attention", 1)])
def test_evictions_by_attention(rule: str, recent: int, block: int) -> None:
    query, key, value = rows_of(0)
    kept = torch.stack(
        [
            torch.stack(
                [
                    evicted(rule, recent, block, query[b, :, 2 * g : 2 * g + 2], key[b, :, g])
                    for g in range(2)
                ]
            )
            for b in range(2)
        ]
    )
    assert kept[:, :, -1].sum(-1).min() >= KEYS
    found = quality_rivals.attend_and_evict(rule, KEYS, recent, block, query, key, value)
    assert torch.allclose(found.double(), out_with(kept, query, key, value), atol=1e-5)


@pytest.mark.parametrize("rule", ["newest", "sinks", "value norm"])
def test_keys_by_age_and_norm(rule: str) -> None:
    query, key, value = rows_of(1)
    kept = torch.zeros(2, 2, LEN, LEN, dtype=torch.bool)
    norms = value.double().norm(dim=3)
    for b in range(2):
        for g in range(2):
            for n in range(LEN):
                ranks = {
                    "newest": [(0.0, -j) for j in range(n + 1)],
                    "sinks": [(float(j >= 4), -j) for j in range(n + 1)],
                    "value norm": [
                        (float(j <= n - KEYS // 2), -norms[b, j, g].item()) for j in range(n + 1)
                    ],
                }[rule]
                best = sorted(range(n + 1), key=ranks.__getitem__)
                kept[b, g, n, best[:KEYS]] = True
    found = quality_rivals.rules_of(KEYS, 1)[rule](query, key, value)
    assert torch.allclose(found.double(), out_with(kept, query, key, value), atol=1e-5)


@pytest.mark.parametrize("is_seen", [True, False])
def test_keys_that_the_last_positions_read(is_seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries that predict a value attend to the chosen keys, all others to all keys."""
    monkeypatch.setattr(quality_rivals, "OBSERVED", 5)
    query, key, value = rows_of(2)
    questions = [[Question(3, 40), Question(9, 52)], [Question(5, 44)]]
    kept = torch.ones(2, 2, LEN, LEN, dtype=torch.bool).tril()
    for b, own in enumerate(questions):
        for question in own:
            end = question.asked if is_seen else own[0].asked - 4
            for g in range(2):
                total = torch.zeros(end - 5, dtype=torch.float64)
                for n in range(end - 5, end):
                    for head in (2 * g, 2 * g + 1):
                        logits = key[b, : n + 1, g].double() @ query[b, n, head].double() / 4
                        total += logits.softmax(0)[: end - 5]
                padded = nn.functional.pad(total, (3, 3))
                means = torch.stack([padded[n : n + 7].mean() for n in range(end - 5)])
                dropped = means.argsort(descending=True)[KEYS - 5 :]
                for n in range(question.asked - 1, question.asked + 2):
                    kept[b, g, n, dropped] = False
    found = quality_rivals.Snap(KEYS, is_seen, questions)(query, key, value)
    assert torch.allclose(found.double(), out_with(kept, query, key, value), atol=1e-5)


@pytest.mark.usefixtures("few_measurements")
def test_a_table(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(corpus, tmp_path, "dense", nope_heads=1, nope_layers=1, weights="float32")
    model = tmp_path / "dense-tiny-0.safetensors"
    options = ["--corpus", corpus, "--length", LENGTH, "--pieces", 2, "--device", "cpu"]
    options += ["--keys", 64, "--questions", 8, "--batch", 2, "--json", tmp_path / "rows.json"]
    call(quality_rivals, model, *options)
    first, *rows = (json.loads(line) for line in (tmp_path / "rows.json").read_text().splitlines())
    assert {"device", "torch", "commit"} <= set(first)
    assert rows[0]["bits"] == pytest.approx(run["final"]["bits"], abs=1e-5)
    assert [row["rule"] for row in rows[-2:]] == ["snap, unseen", "snap, seen"]
    assert all(0 <= one <= 1 for row in rows for one in row["recall"].values())
    assert "| heavy hitters |" in capsys.readouterr().out
    train(corpus, tmp_path, "dense", name="plain")
    for words, message in (
        ([model, "--keys=63"], "--keys: is 63, want 64 or more, below --length"),
        ([model, "--block=0"], "--block: is 0, want 1 or more"),
        ([model, "--length=5000"], "--length: is 5000, want less than"),
        ([tmp_path / "plain.safetensors"], "want one layer of NoPE heads"),
        (["nothing"], "nothing is not a file"),
    ):
        assert message in refusal(capsys, quality_rivals, *options, *words)
