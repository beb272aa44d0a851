"""research/quality_targets.py: scores that learn from the attention that keys would get."""

from __future__ import annotations

from pathlib import Path

import pytest
import quality_model
import quality_targets
import torch
from flash_dmattn import score_target_loss
from quality_cases import KEYS, RECENT, model_of, refusal_of, train, weights


def test_loss_of_the_last_heads() -> None:
    """The loss takes these rows in place of dt_proj's. The other heads have no effect."""
    config = quality_model.config_of("recent", "small", KEYS, RECENT, sinks=3)
    layer = quality_model.Model(config).attentions()[0]
    tensors = [torch.randn(128, heads, 64) for heads in (6, 3, 3)]
    rows = torch.randn(2, 192)
    got = quality_targets.ScoreTargets.loss(layer, rows, quality_targets.States(*tensors))
    dt_proj = torch.cat((torch.zeros(1, 192), rows))
    batch = [one[None] for one in tensors]
    want = score_target_loss(*batch, dt_proj, recent=RECENT, sinks=3, heads=[1, 2])
    torch.testing.assert_close(got, want)
    got = quality_targets.ScoreTargets.loss(layer, rows, quality_targets.States(*tensors), 60)
    want = score_target_loss(*batch, dt_proj, recent=60, sinks=3, heads=[1, 2])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("which, taught", [("nope", (False, True)), ("all", (True, True))])
@pytest.mark.usefixtures("few_measurements")
def test_runs_with_targets(
    corpus: Path, tmp_path: Path, which: str, taught: tuple[bool, bool]
) -> None:
    """Heads with targets learn from nothing else, and their A does not change."""
    changed = {"nope_heads": 1, "nope_layers": 1, "score_targets": which, "target_every": 2}
    run = train(corpus, tmp_path, "recent", name="targets", **changed)
    assert run["held_out"][0]["target_loss"] > 0
    train(corpus, tmp_path, "recent", name="still", **{**changed, "target_rate": 0.0})
    stays = [a == pytest.approx(first) for (a,), first in zip(run["final"]["a"], (0.5, 0.005))]
    assert stays == list(taught)
    first = model_of("recent", dt_std=quality_model.STD).state_dict()
    taken = {name: weights(tmp_path, name) for name in ("targets", "still")}
    for layer, is_taught in enumerate(taught):
        name = f"blocks.{layer}.attention.dt_proj.weight"
        assert torch.equal(taken["still"][name], first[name]) == is_taught
        assert not torch.equal(taken["targets"][name], first[name])
    before = {"name": "before", "schedule_steps": 4}
    train(corpus, tmp_path, "recent", **{**changed, **before, "steps": 2})
    train(corpus, tmp_path, "recent", "--resume", **{**changed, **before})
    resumed = weights(tmp_path, "before")
    for name, one in taken["targets"].items():
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
