"""examples/adapt.py: its text, the equality of a selection of all keys, learned scores, and the
table. Models are small here, and train for seconds."""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from programs import ROOT

sys.path.insert(0, str(ROOT / "examples"))
import adapt
import adapt_layers
import recall_text

SHAPE = recall_text.Shape(length=64, labels=2, gap=16)
SMALL = "--length 64 --labels 2 --gap 16 --width 64 --layers 1 --batch 16 --window 8 --recent 4"
SEED = "--seed 3"  # its initial scores keep few of the keys that are needed
KEPT = adapt_layers.Kept(window=8, recent=4)


def parsed(arguments: str) -> argparse.Namespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["adapt.py", *SMALL.split(), "--device", "cpu"])
        sys.argv += arguments.split()
        return adapt.parse()


@pytest.fixture(scope="module")
def source() -> adapt.Source:
    return adapt.Source(parsed(SEED))


@pytest.fixture(scope="module")
def dense(source: adapt.Source) -> adapt.Reader:
    options = parsed(f"--dense-steps 400 {SEED}")
    return adapt.train_dense(options, source.draw(1, recall_text.shortest(2)), source.draw(2))


def test_recalled_bytes_can_be_recalled(source: adapt.Source) -> None:
    """Each byte has occurred before after the same byte, `gap` or more bytes ago."""
    pieces = source.held_out()
    assert pieces.text.shape[1] == SHAPE.length + 1
    assert (pieces.recalled.sum(1) == SHAPE.labels * (recall_text.LABEL_LENGTH - 1)).all()
    for text, recalled in zip(pieces.text.tolist(), pieces.recalled):
        pairs = list(zip(text, text[1:]))
        for number in recalled.nonzero().flatten().tolist():
            (first,) = (j for j in range(number) if pairs[j] == pairs[number])
            assert number - first >= SHAPE.gap
            assert text[:number].count(text[number + 1]) == 1


@pytest.mark.parametrize("harmless", [True, False])
def test_all_keys_kept_is_dense(dense: adapt.Reader, source: adapt.Source, harmless: bool) -> None:
    """It is as exact as the dense model in float32, unless the bias has an effect."""
    text = source.held_out().text[:4, :-1]
    exact = copy.deepcopy(dense).double()(text)
    plain_error = (dense(text) - exact).abs().max()
    model = adapt.with_selection(dense, adapt_layers.Kept(SHAPE.length, 0), harmless)
    assert (model(text) - exact).abs().max() <= 2 * plain_error
    with torch.no_grad():
        model.blocks[0].attention.A.fill_(1.0)
        model.blocks[0].attention.dt_proj.bias.zero_()
    assert (model(text) - exact).abs().max() > 20 * plain_error


def rows_of(dense: adapt.Reader, source: adapt.Source, target: str) -> list[dict[str, float]]:
    """The rows of the table before stage 1 and after it."""
    torch.manual_seed(0)
    before = adapt.with_selection(dense, KEPT, harmless=True)
    after = adapt.train_scores(dense, KEPT, source.draw(3), target, steps=100)
    return [adapt.row_of(model, source.held_out()) for model in (before, after)]


def test_scores_learn_which_keys_are_needed(dense: adapt.Reader, source: adapt.Source) -> None:
    before, after = rows_of(dense, source, "largest")
    assert adapt.row_of(dense, source.held_out())["recalled_bits"] < 0.1
    assert after["recalled_bits"] < before["recalled_bits"] - 2
    assert after["bits"] < before["bits"]


def test_scores_learn_where_attention_is(dense: adapt.Reader, source: adapt.Source) -> None:
    before, after = rows_of(dense, source, "mean")
    assert after["kept_attention"] > before["kept_attention"] + 0.02


def test_scores_learn_through_the_bias(dense: adapt.Reader, source: adapt.Source) -> None:
    """The outputs come nearer to the dense ones than a sliding window, from which training starts,
    and the window has shrunk to its size."""
    model = adapt.train_scores(dense, KEPT, source.draw(3), "outputs", steps=200)
    sliding = adapt.with_selection(dense, KEPT, harmless=False)
    text = source.held_out().text[:, :-1]
    ((x, out),) = adapt.states_of(dense, text)
    losses = [
        adapt_layers.output_loss(pair, x, out).item()
        for one in (model, sliding)
        for pair in adapt.pairs_of(dense, one)
    ]
    assert losses[0] < 0.9 * losses[1]
    assert model.blocks[0].attention.window == KEPT.window


def test_low_rank_changes_begin_with_nothing(dense: adapt.Reader, source: adapt.Source) -> None:
    """Only the low-rank changes learn."""
    pieces = source.held_out()
    model = adapt.with_selection(dense, KEPT, harmless=True)
    unchanged = adapt.train_projections(model, 2, source.draw(4), steps=0)
    assert torch.equal(adapt.losses_of(unchanged, pieces), adapt.losses_of(model, pieces))
    trained = adapt.train_projections(model, 2, source.draw(4), steps=30)
    assert adapt.row_of(trained, pieces)["bits"] < adapt.row_of(model, pieces)["bits"]
    layers = [one.blocks[0].attention for one in (trained, model)]
    change = layers[0].q_proj.weight - layers[1].q_proj.weight
    assert torch.linalg.matrix_rank(change, rtol=1e-3) == 2
    assert torch.equal(layers[0].dt_proj.weight, layers[1].dt_proj.weight)


def run(arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["adapt.py", *SMALL.split(), *arguments.split()])
    adapt.main()


def test_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = "--dense-steps 3 --steps 2 --lora 2 --lora-steps 2"
    run(f"{steps} --device cpu --out {tmp_path / 'new'}", monkeypatch)
    table = json.loads((tmp_path / "new" / "adapt.json").read_text())
    names = ["dense", "sliding window", "selected, before training", "selected, after stage 1"]
    names += ["sliding window, after stage 2", "selected, after stage 2"]
    assert list(table["rows"]) == names
    printed = capsys.readouterr().out
    for name, row in table["rows"].items():
        assert all(0 < number < 10 for number in row.values()), row
        assert any(line.startswith(f"{name}  ") for line in printed.splitlines())
    assert table["rows"]["dense"]["kept_attention"] == 1
    assert table["options"]["window"] == KEPT.window


BAD = {
    "--recent: is -1, want 0 or more": "--recent -1",
    "--window: is 0, want 1 or more": "--window 0",
    "--width: is 96, want a multiple of 64": "--width 96",
    "--labels: is 10, want at most 9": "--labels 10",
    "--length: is 43, want 44 or more for the gap and labels": "--length 43",
}


@pytest.mark.parametrize("message", BAD)
def test_bad_usage(
    message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        run(BAD[message], monkeypatch)
    assert refused.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)
