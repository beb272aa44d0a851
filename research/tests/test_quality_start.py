"""research/quality.py: training that begins with the weights of another model."""

from __future__ import annotations

from pathlib import Path

import pytest
import quality_model
import quality_optimizer
import torch
from quality_cases import model_of, refusal_of, train, weights

pytestmark = pytest.mark.usefixtures("few_measurements")
STILL = 1e-30  # a learning rate that changes no weight


def test_rate_rises_again() -> None:
    """The rate rises over ten of a hundred steps."""
    usual = [quality_optimizer.rate_at(step, 100, 2.0, 10) for step in range(101)]
    assert usual[0] == pytest.approx(0.2) and usual[9] == usual[10] == 2.0
    assert usual[55] == pytest.approx(1.1) and usual[100] == pytest.approx(0.2)
    later = [quality_optimizer.rate_at(step, 100, 2.0, 10, 50) for step in range(50, 101)]
    rise = [min(1.0, (step + 1) / 10) for step in range(51)]
    assert later == pytest.approx([a * b for a, b in zip(usual[50:], rise)])


@pytest.mark.parametrize("form, a", [("recent", 0.5), ("random-recent", 1.0)])
def test_new_scores(corpus: Path, tmp_path: Path, form: str, a: float) -> None:
    train(corpus, tmp_path, "sliding", weights="float32")
    started = {"start": tmp_path / "sliding-tiny-0.safetensors", "start_step": 3, "rate": STILL}
    train(corpus, tmp_path, form, "--new-scores", name="new", **started)
    train(corpus, tmp_path, form, name="old", **started)
    first = model_of(form, dt_std=quality_model.STD).state_dict()
    before, new, old = (weights(tmp_path, name) for name in ("sliding-tiny-0", "new", "old"))
    for name, one in before.items():
        is_of_scores = "dt_proj" in name or name.endswith(".A")
        wanted = first[name] if is_of_scores else one
        torch.testing.assert_close(new[name], wanted, rtol=0, atol=1e-20)
        torch.testing.assert_close(old[name], one, rtol=0, atol=1e-20)
    assert new["blocks.0.attention.A"].item() == a


def test_text_goes_on(corpus: Path, tmp_path: Path) -> None:
    """If training begins after two of four steps, the last two have the same losses."""
    whole = train(corpus, tmp_path, "sliding", rate=STILL, weights="float32")
    start = tmp_path / "sliding-tiny-0.safetensors"
    more = train(corpus, tmp_path, "sliding", start=start, start_step=2, rate=STILL, name="more")
    anew = train(corpus, tmp_path, "sliding", start=start, rate=STILL, name="anew", steps=2)
    rows, want, others = (log["train"][-1] for log in (more, whole, anew))
    assert [row[0] for row in more["train"]] == [row[0] for row in whole["train"] if row[0] > 2]
    assert rows[2:4] == pytest.approx(want[2:4], rel=1e-6)
    assert rows[2:4] != pytest.approx(others[2:4], rel=1e-6)
    seconds = more["train"][-1][1]
    assert more["bytes_per_second"] == pytest.approx(2 * 2 * 512 / seconds, rel=0.01)


def test_dense_and_scores(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(corpus, tmp_path, "sliding")
    train(corpus, tmp_path, "dense", start=tmp_path / "sliding-tiny-0.safetensors")
    start = {"start": tmp_path / "dense-tiny-0.safetensors"}
    train(corpus, tmp_path, "selected", "--new-scores", **start)
    message = "has no blocks.0.attention.A, want a model that has it, or --new-scores"
    assert message in refusal_of(capsys, corpus, tmp_path, "selected", **start)


def test_models_of_another_size(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(corpus, tmp_path, "sliding")
    other = {"start": tmp_path / "sliding-tiny-0.safetensors", "size": "small", "name": "small"}
    message = "embedding.weight is [256, 128], want [256, 384]"
    assert message in refusal_of(capsys, corpus, tmp_path, "sliding", **other)


def test_the_rate_of_a_run_that_begins_later(corpus: Path, tmp_path: Path) -> None:
    """If the rate rises over more steps than there are, AdamW's first step is a fraction of the
    rate."""
    train(corpus, tmp_path, "sliding", weights="float32")
    start = {"start": tmp_path / "sliding-tiny-0.safetensors", "start_step": 3}
    own = {"rate": 0.01, "decay": 0, "warm_up": 1000, "schedule_steps": 10_000}
    train(corpus, tmp_path, "sliding", name="later", **start, **own)
    before, later = (weights(tmp_path, name) for name in ("sliding-tiny-0", "later"))
    changed = (later["norm.weight"] - before["norm.weight"]).abs()
    assert changed.max() == pytest.approx(0.01 / 1000, rel=0.02)


def test_a_run_that_began_later_is_resumed(corpus: Path, tmp_path: Path) -> None:
    train(corpus, tmp_path, "sliding", weights="float32")
    start = {"start": tmp_path / "sliding-tiny-0.safetensors", "start_step": 2, "warm_up": 4}
    train(corpus, tmp_path, "sliding", name="whole", **start, steps=6, schedule_steps=6)
    half = {"name": "half", "schedule_steps": 6}
    train(corpus, tmp_path, "sliding", **start, **half, steps=4)
    log = train(corpus, tmp_path, "sliding", "--resume", **half, warm_up=4, steps=6)
    assert log["settings"]["start_step"] == 2 and log["settings"]["start"] == str(start["start"])
    for name, one in weights(tmp_path, "whole").items():
        torch.testing.assert_close(weights(tmp_path, "half")[name], one, rtol=0, atol=0)
