"""benchmarks/quality_targets.py: scores that learn from the attention which keys would get."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import quality_model
import quality_targets
import torch
from flash_dmattn import select
from quality_cases import KEYS, RECENT, model_of, refusal_of, train

LENGTH = 40


def states(q_heads: int, kv_heads: int, length: int = LENGTH) -> quality_targets.States:
    generator = torch.Generator().manual_seed(q_heads)
    shapes = [(length, heads, 8) for heads in (q_heads, kv_heads, kv_heads)]
    tensors = [3 * torch.randn(shape, generator=generator) for shape in shapes]
    return quality_targets.States(*tensors)


@pytest.mark.parametrize("queries", [0, 7, 16, 1024])
@pytest.mark.parametrize("recent", [0, 5, 39])
@pytest.mark.parametrize("q_heads, kv_heads", [(4, 2), (3, 3)])
def test_received_attention(
    q_heads: int, kv_heads: int, recent: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality_targets, "PAIRS", queries * LENGTH)
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
            assert got[kv_head, j].item() == pytest.approx(math.log(want), rel=1e-5, abs=1e-4)


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
        states_then = quality_targets.States(query, key, value)
        quality_targets.ScoreTargets.loss(rows, states_then, recent=4, sinks=0).backward()
        optimizer.step()
    assert kept() == 16


@pytest.mark.parametrize("sinks", [0, 3])
def test_loss_of_some_heads_and_keys(sinks: int) -> None:
    """The loss of the last of two kv heads is that of this head alone, without sinks; values are of
    all heads."""
    query, key, value = states(4, 2)
    rows = torch.randn(1, 16)
    got = quality_targets.ScoreTargets.loss(
        rows, quality_targets.States(query, key, value), 5, sinks
    )
    received = quality_targets.received_attention(query[:, 2:], key[:, 1:], value[:, 1:], 5).exp()
    target = received[:, sinks:] / received[:, sinks:].sum()
    score = (value.flatten(1) @ rows.T).T[:, sinks : LENGTH - 5]
    torch.testing.assert_close(got, -(target * torch.log_softmax(score, -1)).sum())


def test_targets_of_keys_that_hardly_get_attention() -> None:
    """Probabilities whose squares are 0 in float32."""
    query, key, value = (20 * one for one in states(2, 1))
    loss = quality_targets.ScoreTargets.loss(
        torch.randn(1, 8), quality_targets.States(query, key, value), 30, 0
    )
    assert torch.isfinite(loss)


@pytest.mark.parametrize("which, taught", [("nope", (False, True)), ("all", (True, True))])
@pytest.mark.usefixtures("few_measurements")
def test_runs_with_targets(
    corpus: Path, tmp_path: Path, which: str, taught: tuple[bool, bool]
) -> None:
    """Heads with targets learn from nothing else, and their A stays."""
    changed = {"nope_heads": 1, "nope_layers": 1, "score_targets": which, "target_every": 2}
    run = train(corpus, tmp_path, "recent", name="targets", **changed)
    assert run["held_out"][0]["target_loss"] > 0
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


def model_with_targets(
    start: int, every: int
) -> tuple[quality_model.Model, quality_targets.ScoreTargets]:
    config = quality_model.config_of("recent", "small", KEYS, RECENT, sliding_heads=2)
    model = quality_model.Model(config)
    quality_model.initialise(model, "recent", 0, 0.005, 0.5)
    return model, quality_targets.ScoreTargets(model, [1] * 6, start, every, factor=1.0)


def test_sliding_heads_have_no_targets() -> None:
    model, targets = model_with_targets(0, 1)
    before = [layer.dt_proj.weight.detach().clone() for layer in model.attentions()]
    targets.learn(0, torch.randint(256, (1, 128)), rate=0.01)
    for layer, was in zip(model.attentions(), before):
        changed = (layer.dt_proj.weight.detach() - was).abs().amax(1)
        assert changed[:2].tolist() == [0, 0] and changed[2] > 0.005


def test_steps_and_sequences_from_which_scores_learn() -> None:
    """Every third step from the second one on, from one sequence after the other."""
    text = torch.randint(256, (2, 128), generator=torch.Generator().manual_seed(1))
    losses = {}
    for number in range(10):
        _, targets = model_with_targets(2, 3)
        targets.learn(number, text, rate=0.01)
        losses[number] = None if targets.last_loss is None else targets.last_loss.item()
    assert [number for number, loss in losses.items() if loss is not None] == [3, 6, 9]
    assert losses[3] == losses[9] != losses[6]


@pytest.mark.usefixtures("few_measurements")
def test_resumed_runs_have_the_same_targets(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = {"score_targets": "all", "target_every": 2}
    train(corpus, tmp_path, "recent", name="with", **targets)
    train(corpus, tmp_path, "recent", name="without")
    for name, changed in (("with", {}), ("without", targets), ("with", {"score_targets": "all"})):
        assert f"{name}.pt: " in refusal_of(
            capsys, corpus, tmp_path, "recent", "--resume", name=name, **changed
        )
    train(corpus, tmp_path, "recent", "--evaluate", name="with")
    train(corpus, tmp_path, "recent", name="negative", initial_a=-0.5)
    start = {"start": tmp_path / "negative.safetensors", "name": "more"}
    message = "negative.safetensors: A of layer 0 is -"
    assert message in refusal_of(capsys, corpus, tmp_path, "recent", **targets, **start)
    train(corpus, tmp_path, "recent", "--new-scores", **targets, **start)
