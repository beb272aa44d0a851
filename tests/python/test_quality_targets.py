"""benchmarks/quality_targets.py: scores that learn from the attention which keys would get."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import quality_model
import quality_targets
import torch
from flash_dmattn import select
from quality_cases import KEYS, RECENT, model_of, train

LENGTH = 40


def states(q_heads: int, kv_heads: int, length: int = LENGTH) -> quality_targets.States:
    generator = torch.Generator().manual_seed(q_heads)
    shapes = [(length, heads, 8) for heads in (q_heads, kv_heads, kv_heads)]
    tensors = [3 * torch.randn(shape, generator=generator) for shape in shapes]
    return quality_targets.States(*tensors)


@pytest.mark.parametrize("queries", [7, 16, 1024])
@pytest.mark.parametrize("recent", [0, 5, 39])
@pytest.mark.parametrize("q_heads, kv_heads", [(4, 2), (3, 3)])
def test_received_attention(
    q_heads: int, kv_heads: int, recent: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality_targets, "QUERIES", queries)
    query, key, value = states(q_heads, kv_heads)
    got = quality_targets.received_attention(query, key, value, recent)
    assert got.shape == (kv_heads, LENGTH - recent)
    for kv_head in range(kv_heads):
        for j in {0, (LENGTH - recent) // 2, LENGTH - recent - 1}:
            want = 0.0
            for head in range(kv_head * q_heads // kv_heads, (kv_head + 1) * q_heads // kv_heads):
                probabilities = []
                for i in range(j + recent, LENGTH):
                    dots = key[: i + 1, kv_head].double() @ query[i, head].double()
                    probabilities.append(torch.softmax(dots / math.sqrt(8), 0)[j].item())
                want += max(probabilities) ** 2
            assert got[kv_head, j].item() == pytest.approx(want, rel=1e-4, abs=1e-30)


def test_scores_learn_which_keys_later_queries_need() -> None:
    """Of 256 keys 16 are marked in one channel of their values, and are what the second half of the
    queries attend to. The heads learn to keep them, though random scores do not."""
    query, key, value = (one / 3 for one in states(2, 1, 256))
    marked = torch.randperm(120, generator=torch.Generator().manual_seed(1))[:16]
    value[:, 0, 0], key[:, 0, 0], query[128:, :, 0] = 0.0, 0.0, 8.0
    value[marked, 0, 0], key[marked, 0, 0] = 1.0, 8.0
    rows = torch.nn.Parameter(0.02 * torch.randn(1, 8, generator=torch.Generator().manual_seed(2)))
    optimizer = torch.optim.Adam([rows], lr=0.05)

    def kept() -> int:
        score = 0.005 * torch.nn.functional.softplus(value.flatten(1) @ rows.detach().T).T
        return int((select(score[None], 16, recent=4).expiry[0, 0, marked] >= 256).sum())

    assert kept() < 8
    for _ in range(100):
        optimizer.zero_grad()
        quality_targets.ScoreTargets.loss(
            rows, quality_targets.States(query, key, value), 4, 1
        ).backward()
        optimizer.step()
    assert kept() == 16


def test_heads_that_have_no_targets_do_not_count() -> None:
    """The loss of the last of two kv heads is that of this head alone; values are of all heads."""
    query, key, value = states(4, 2)
    rows = torch.randn(1, 16)
    loss = quality_targets.ScoreTargets.loss
    got = loss(rows, quality_targets.States(query, key, value), 5, 1)
    target = quality_targets.received_attention(query[:, 2:], key[:, 1:], value[:, 1:], 5)
    score = (value.flatten(1) @ rows.T).T[:, : LENGTH - 5]
    want = -(target / target.sum() * torch.log_softmax(score, -1)).sum()
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("which, taught", [("nope", (False, True)), ("all", (True, True))])
@pytest.mark.usefixtures("few_measurements")
def test_runs_with_targets(
    corpus: Path, tmp_path: Path, which: str, taught: tuple[bool, bool]
) -> None:
    """Heads with targets learn from nothing else, and their A stays."""
    changed = {"nope_heads": 1, "nope_layers": 1, "score_targets": which, "target_every": 2}
    run = train(corpus, tmp_path, "recent", name="targets", **changed)
    train(corpus, tmp_path, "recent", name="still", **{**changed, "target_rate": 0.0})
    stays = [a == pytest.approx(first) for (a,), first in zip(run["final"]["a"], (0.5, 0.005))]
    assert stays == list(taught)
    first = model_of("recent", dt_std=quality_model.STD).state_dict()
    weights = {
        name: torch.load(tmp_path / f"{name}.pt", weights_only=True)["model"]
        for name in ("targets", "still")
    }
    for layer, is_taught in enumerate(taught):
        name = f"blocks.{layer}.attention.dt_proj.weight"
        assert torch.equal(weights["still"][name], first[name]) == is_taught
        assert not torch.equal(weights["targets"][name], first[name])
    before = {"name": "before", "schedule_steps": 4}
    train(corpus, tmp_path, "recent", **{**changed, **before, "steps": 2})
    train(corpus, tmp_path, "recent", "--resume", **{**changed, **before})
    resumed = torch.load(tmp_path / "before.pt", weights_only=True)["model"]
    for name, one in weights["targets"].items():
        torch.testing.assert_close(resumed[name], one, rtol=0, atol=0)


def test_sliding_heads_have_no_targets() -> None:
    config = quality_model.config_of("recent", "small", KEYS, RECENT, sliding_heads=2)
    model = quality_model.Model(config)
    quality_model.initialise(model, "recent", 0, 0.005, 0.5)
    before = [layer.dt_proj.weight.detach().clone() for layer in model.attentions()]
    targets = quality_targets.ScoreTargets(model, [1] * 6, every=1, factor=1.0)
    targets.step(0, torch.randint(256, (1, 128)), rate=0.01)
    for layer, was in zip(model.attentions(), before):
        changed = (layer.dt_proj.weight.detach() - was).abs().amax(1)
        assert changed[:2].tolist() == [0, 0] and changed[2] > 0.005


@pytest.mark.parametrize(
    "form, changed, message",
    [
        ("random-recent", {}, "--score-targets: is given with --form random-recent"),
        (
            "recent",
            {"score_targets": "nope"},
            "--score-targets: is nope, want --nope-heads above 0",
        ),
        ("recent", {"initial_a": 0}, "--initial-a: is 0, want above 0: it does not change"),
        ("recent", {"nope_heads": 1, "nope_a": -1}, "--nope-a: is -1, want above 0"),
        ("recent", {"target_every": 0}, "--target-every: is 0, want 1 or more"),
    ],
)
def test_bad_usage(
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    form: str,
    changed: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as stop:
        train(corpus, tmp_path, form, **{"score_targets": "all", **changed})
    assert stop.value.code == 2 and message in capsys.readouterr().err
