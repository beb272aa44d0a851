"""research/quality*.py: heads without rotary embedding, and the learning rate of their scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import quality
import quality_model
import quality_optimizer
import torch
from flash_dmattn.rotary import rotate_heads
from quality_cases import KEYS, LENGTH, RECENT, model_of, refusal_of, train, weights
from quality_evaluate import windows

pytestmark = pytest.mark.usefixtures("few_measurements")


def two_layers(**rules: Any) -> quality_model.Model:
    """The second of two kv heads of the second layer is a NoPE head."""
    sizes = {"layers": 2, "q_heads": 4, "kv_heads": 2, "nope": (0, 1)}
    model = quality_model.Model(quality_model.Config(window=KEYS, recent=RECENT, **sizes, **rules))
    quality_model.initialise(model, "recent", 0, 1.0, 0.5)
    return model


def test_layers_with_nope_heads() -> None:
    def heads(**rules: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        config = quality_model.config_of("recent", "small", KEYS, RECENT, **rules)
        return config.sliding, config.nope

    assert heads(nope_heads=2) == ((), (2, 2, 2, 2, 2, 2))
    some = heads(sliding_heads=2, nope_heads=2, nope_layers=[1, 4])
    assert some == ((2, 1, 2, 2, 1, 2), (0, 2, 0, 0, 2, 0))


@pytest.mark.parametrize("dim", [0, 16])
@pytest.mark.parametrize("heads", [2, 4])
def test_rotary_embedding(heads: int, dim: int, tmp_path: Path) -> None:
    """Of queries (4 heads) and keys (2), in a model and in the model read from its file."""
    model = two_layers(nope_rotary_dim=dim)
    quality_model.save(model, tmp_path / "model.safetensors")
    x, positions = torch.randn(1, 9, heads, 64), torch.arange(9)[None]
    turned = rotate_heads(x, positions, 10000.0)
    partly = x.clone()
    if dim > 0:
        partly[..., :dim] = rotate_heads(x[..., :dim], positions, 10000.0)
    nope = torch.cat((turned[:, :, : heads // 2], partly[:, :, heads // 2 :]), 2)
    for one in (model, quality_model.load(tmp_path / "model.safetensors")):
        first, second = (layer.rotate_heads(x, positions) for layer in one.attentions())
        assert torch.equal(first, turned) and torch.equal(second, nope)


def test_nope_heads_do_not_know_positions() -> None:
    """With one layer that keeps all keys, the last query's output does not depend on the order of
    the others."""
    text = torch.randint(256, (1, 40), generator=torch.Generator().manual_seed(1))
    other = torch.cat((text[:, :-1].flip(1), text[:, -1:]), 1)
    for nope in (2, 1, 0):
        sizes = {"layers": 1, "q_heads": 4, "kv_heads": 2, "nope": (nope,)}
        model = quality_model.Model(quality_model.Config(window=KEYS, **sizes))
        quality_model.initialise(model, "selected", 0, 1.0, 0.5)
        layer = model.attentions()[0]
        for projection in (layer.q_proj, layer.k_proj):
            projection.weight.data.mul_(20)
        logits = [model(one)[0, -1] for one in (text, other)]
        assert ((logits[0] - logits[1]).abs().max() < 1e-5) == (nope == 2)


def test_a_of_nope_heads() -> None:
    model = two_layers()
    quality_model.initialise_nope(model, 0.25)
    assert [layer.A.tolist() for layer in model.attentions()] == [[1, 1], [1, 0.25]]


@pytest.mark.parametrize("factor, of_a", [(0.0, 0.0), (0.25, 0.25), (0.25, 0.0), (1.0, 0.5)])
def test_rate_of_nope_scores(factor: float, of_a: float) -> None:
    """The first step of AdamW is as long as the rate, for any gradients."""
    model = two_layers()
    groups = quality_optimizer.parameter_groups(model, 0.1, 1.0)
    (optimizer,) = quality_optimizer.optimizers_of(groups, "adamw", 0.01)
    rates = quality_optimizer.ScoreRates(model, (0, 1), factor, of_a)
    scores = [getattr(layer, name) for layer in model.attentions() for name in ("dt_proj", "A")]
    scores = [getattr(one, "weight", one) for one in scores]
    before = [one.detach().clone() for one in scores]
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    rates.step(optimizer)
    for number, (was, one) in enumerate(zip(before, scores)):
        change = (one.detach() - was).abs()
        torch.testing.assert_close(change[0], torch.full_like(change[0], 0.01), rtol=0.01, atol=0)
        own = 0.01 * (1.0 if number < 2 else of_a if number == 3 else factor)
        torch.testing.assert_close(change[1], torch.full_like(change[1], own), rtol=0.01, atol=0)


@pytest.mark.parametrize(
    "rate, a_rate, has_first_a, has_first_weight",
    [
        (None, None, False, False),
        (0.0, None, True, True),
        (None, 0.0, True, False),
        (0.0, 0.5, False, True),
    ],
)
def test_runs_with_nope_heads(
    corpus: Path,
    tmp_path: Path,
    rate: float | None,
    a_rate: float | None,
    has_first_a: bool,
    has_first_weight: bool,
) -> None:
    rates = {"nope_rate": rate, "nope_a_rate": a_rate}
    run = train(corpus, tmp_path, "recent", nope_heads=1, nope_layers=1, **rates)
    assert run["model"]["nope"] == "0 1" and run["settings"]["nope_a"] == 0.005
    state = weights(tmp_path, "recent-tiny-0")
    learned, nope = (state[f"blocks.{layer}.attention.A"] for layer in (0, 1))
    assert run["final"]["a"] == [learned.tolist(), nope.tolist()]
    assert learned.item() != 0.5
    assert (nope.item() == pytest.approx(0.005, abs=1e-9)) == has_first_a
    first = model_of("recent", dt_std=quality_model.STD).state_dict()
    is_first = [
        torch.equal(state[name], first[name])
        for name in (f"blocks.{layer}.attention.dt_proj.weight" for layer in (0, 1))
    ]
    assert is_first == [False, has_first_weight]


@pytest.mark.parametrize("form", ["dense", "sliding"])
def test_nope_heads_without_scores(corpus: Path, tmp_path: Path, form: str) -> None:
    run = train(corpus, tmp_path, form, nope_heads=1, nope_layers=1)
    a = {"dense": None, "sliding": [[0.0], [0.0]]}
    assert run["model"]["nope"] == "0 1" and run["final"].get("a") == a[form]
    model = quality_model.load(tmp_path / f"{form}-tiny-0.safetensors")
    assert [layer.nope_heads for layer in model.attentions()] == [0, 1]


def test_random_scores_of_nope_heads_stay(corpus: Path, tmp_path: Path) -> None:
    train(corpus, tmp_path, "random-recent", nope_heads=1)
    state = weights(tmp_path, "random-recent-tiny-0")
    assert [state[f"blocks.{layer}.attention.A"].item() for layer in (0, 1)] == [1, 1]


@pytest.mark.parametrize(("form", "recent"), [("recent", RECENT), ("sliding", 0)])
def test_keys_of_layers_with_nope_heads(
    form: str, recent: int, corpus: Path, tmp_path: Path
) -> None:
    """A run, the model of its file, and other windows at test time, in proportion."""
    run = train(corpus, tmp_path, form, nope_heads=1, nope_layers=1, nope_keys=3 * KEYS)
    model = quality_model.load(tmp_path / f"{form}-tiny-0.safetensors")
    first, second = model.attentions()
    assert [layer.window + layer.recent for layer in (first, second)] == [KEYS, 3 * KEYS]
    assert first.recent == second.recent == recent
    if form == "recent":
        first_layer, second_layer = run["final"]["kept"]["last_query"]
        assert [len(head) for head in (*first_layer, *second_layer)] == [KEYS, 3 * KEYS]
    text = torch.randint(256, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    with windows(model, 2.0):
        found = model(text)
    first.window, second.window = 2 * KEYS - recent, 6 * KEYS - recent
    assert torch.equal(found, model(text))


def test_newest_keys_of_layers_with_nope_heads(corpus: Path, tmp_path: Path) -> None:
    kinds = {"nope_heads": 1, "nope_layers": 1, "nope_keys": 3 * KEYS}
    run = train(corpus, tmp_path, "recent", **kinds, nope_recent=2 * KEYS)
    model = quality_model.load(tmp_path / "recent-tiny-0.safetensors")
    found = [(layer.window, layer.recent) for layer in model.attentions()]
    assert found == [(KEYS - RECENT, RECENT), (KEYS, 2 * KEYS)]
    _, (nope,) = run["final"]["kept"]["last_query"]
    assert set(nope) >= set(range(LENGTH - 2 * KEYS, LENGTH)) and len(nope) == 3 * KEYS


def test_all_keys_before_select_start(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the step at which selection starts, a run is the same as one that keeps all keys. A
    resumed run is the same run."""
    found = []
    take_step = quality.take_step

    def noting(run: quality.Run, *given: Any) -> None:
        found.append([layer.window for layer in run.model.attentions()])
        take_step(run, *given)

    monkeypatch.setattr(quality, "take_step", noting)
    kinds: dict[str, Any] = {"nope_heads": 1, "nope_layers": 1}
    late = train(
        corpus, tmp_path, "recent", nope_keys=3 * KEYS, name="late", select_start=2, **kinds
    )
    own = KEYS - RECENT
    assert found == 2 * [[own, LENGTH]] + 2 * [[own, 3 * KEYS - RECENT]]
    full = train(
        corpus,
        tmp_path,
        "recent",
        nope_keys=LENGTH + RECENT,
        name="full",
        schedule_steps=4,
        **kinds,
    )
    first, last = zip(late["held_out"], full["held_out"])
    assert first[0]["bits"] == first[1]["bits"] and last[0]["bits"] != last[1]["bits"]
    model = quality_model.load(tmp_path / "late.safetensors")
    assert [layer.window for layer in model.attentions()] == [own, 3 * KEYS - RECENT]
    kinds.update(nope_keys=3 * KEYS, name="halves", select_start=2)
    train(corpus, tmp_path, "recent", steps=3, **kinds)
    train(corpus, tmp_path, "recent", "--resume", **kinds)
    train(corpus, tmp_path, "recent", "--resume", **{**kinds, "steps": None})
    whole, halves = weights(tmp_path, "late"), weights(tmp_path, "halves")
    assert all(torch.equal(whole[name], halves[name]) for name in whole)


def test_files_with_other_nope_heads(
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(corpus, tmp_path, "recent", nope_heads=1, nope_layers=1)
    file = tmp_path / "recent-tiny-0.safetensors"
    own = {"nope_heads": 1, "nope_layers": 1, "nope_keys": KEYS}
    for flags, rules in (
        (["--resume"], {}),
        ([], {"start": file, "name": "other"}),
        ([], {"start": file, "name": "other", "nope_heads": 1}),
        (["--resume"], {"nope_heads": 1, "nope_layers": 1, "nope_rotary_dim": 2}),
        (["--resume"], {"nope_heads": 1, "nope_layers": 1, "nope_keys": 40}),
        (["--evaluate"], {"nope_heads": 1, "nope_layers": 1, "nope_keys": 40, "steps": None}),
        (
            ["--evaluate"],
            {"nope_heads": 1, "nope_layers": 1, "nope_keys": 40, "start": file, "name": "other"},
        ),
        (["--resume"], {**own, "nope_recent": 20}),
    ):
        assert "recent-tiny-0" in refusal_of(capsys, corpus, tmp_path, "recent", *flags, **rules)
    kinds = {"nope_heads": 1, "nope_layers": 1, "start": file}
    train(corpus, tmp_path, "recent", name="other", **kinds)
    train(corpus, tmp_path, "recent", name="wider", nope_keys=3 * KEYS, **kinds)


def test_windows_too_small_for_sinks_are_not_measured(corpus: Path, tmp_path: Path) -> None:
    """With half of the keys, the layer with NoPE heads would have a window of 2."""
    kinds = {"nope_heads": 1, "nope_layers": 1, "nope_keys": 36, "sinks": 4, "keys": 256}
    run = train(corpus, tmp_path, "recent", **kinds)
    assert [row["keys"] for row in run["final"]["by_window"]] == [256, 512]
