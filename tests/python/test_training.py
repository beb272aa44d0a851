"""The examples that train, and those over ranks: train_text.py, train_long.py, adapt.py and
tensor_parallel.py. Models are small here, and train for seconds."""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Callable, NamedTuple

import pytest
import torch
import warm
from programs import ROOT, output_of, python
from samples import FULL

sys.path.insert(0, str(ROOT / "examples"))
import adapt
import adapt_layers
import recall_text
import train_long
import train_text
from flash_dmattn import HybridPlan, score_targets

FOLDER = ROOT / "examples"
TEXT = FOLDER / "data" / "text.txt"
Run = Callable[..., int]
BAD = [
    (train_text, "--picture x.svg", "--picture draws the runs in the file of --json: give"),
    (train_text, "--text nothing.txt", "--text: nothing.txt is not a file"),
    (train_text, "--width 100", "--width: is 100, want a multiple of 64"),
    (train_text, "--batch 0", "--batch: is 0, want 1 or more"),
    (train_text, "--minutes 0", "nothing to do"),
    (train_text, "--text short.txt", "too short for pieces of 1024 bytes"),
    (train_long, "--length 0", "--length: is 0, want 1 or more"),
    (train_long, "--length 2", "--length: is 2, want 3 or more"),  # of 3 ranks
    (train_long, "--window 1", "--window: is 1, want 2 or more"),
    (train_long, "--width 100", "--width: is 100, want a multiple of 64"),
    (train_long, "--text nothing.txt", "nothing.txt is not a file"),
    (train_long, "--text short.txt --length 600", "want fewer than the text has: 600 bytes"),
    (train_long, "--text empty.txt", "want fewer than the text has: 0 bytes"),
    (adapt, "--recent -1", "--recent: is -1, want 0 or more"),
    (adapt, "--window 0", "--window: is 0, want 1 or more"),
    (adapt, "--width 96", "--width: is 96, want a multiple of 64"),
    (adapt, "--labels 10", "--labels: is 10, want at most 9"),
    (
        adapt,
        "--labels 2 --gap 16 --length 43",
        "--length: is 43, want 44 or more for the gap",
    ),
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run an example in an empty folder, and return its exit status."""

    def run_in_process(example: ModuleType, *arguments: str | Path) -> int:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [f"{example.__name__}.py", *map(str, arguments)])
        try:
            example.main()
        except SystemExit as stop:
            return stop.code
        return 0

    return run_in_process


@pytest.mark.parametrize(("example", "arguments", "message"), BAD)
def test_bad_usage(
    example: ModuleType,
    arguments: str,
    message: str,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "short.txt").write_text("short " * 100)
    (tmp_path / "empty.txt").touch()
    if "3 or more" in message:
        monkeypatch.setenv("WORLD_SIZE", "3")
    assert run(example, *arguments.split()) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.txt", "short.txt"]


# ---- train_text.py ----

SMALL = ["--length", "96", "--keys", "32", "--sliding", "16", "--width", "64"]
SMALL = [*SMALL, "--layers", "2", "--batch", "2"]


def test_all_forms_learn(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All curves are in one file and one picture. Held-out losses fall below the loss of
    guessing."""
    files = ["--json", "curves.json", "--picture", "curves.svg", "--device", "cpu"]
    for form in train_text.FORMS:
        assert run(train_text, "--steps", "3", *SMALL, *files, "--form", form) == 0
        captured = capsys.readouterr()
        assert "3 steps" in captured.out
    runs = json.loads((tmp_path / "curves.json").read_text())
    assert list(runs) == ["selected", "hybrid", "dense"]
    assert {(one["keys"], one["sliding"]) for one in runs.values()} == {(32, 16)}
    for made in runs.values():
        assert [step for step, _, _ in made["train"]] == [1, 2, 3]
        (first, _, before), (last, _, after) = made["held_out"]
        assert (first, last) == (0, 3)
        assert 7.5 < before < 8.5, "guessing costs 8 bits per byte"
        assert after < before - 0.02
    assert "<svg" in (tmp_path / "curves.svg").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.json", "curves.svg"]


def test_what_the_forms_keep() -> None:
    """Keys of the layers; only the last one has no rotary embedding, in all forms."""
    plan = HybridPlan(**train_text.sizes_of(64), layers=3, keys=32, sliding=16)
    for form, kept in (
        ("selected", [(16, 0), (16, 0), (16, 16)]),
        ("hybrid", [(16, 0), (16, 0), (None, 0)]),
        ("dense", 3 * [(None, 0)]),
    ):
        layers = [*train_text.layers_of(form, plan)]
        assert [(layer.window, layer.recent) for layer in layers] == kept
        assert [layer.nope_heads for layer in layers] == [0, 0, 1]


def test_scores_learn(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets begin after the warm-up."""
    seen = []
    monkeypatch.setattr(train_text, "WARM_UP", 4)
    monkeypatch.setattr(score_targets, "log_targets", watch(score_targets.log_targets, seen))
    for form in train_text.FORMS:
        assert run(train_text, "--steps", "6", *SMALL, "--device", "cpu", "--form", form) == 0
    assert seen == [96]  # one step of one form


def watch(function: Callable[..., torch.Tensor], lengths: list[int]) -> Callable[..., torch.Tensor]:
    def call(query: torch.Tensor, *rest: object) -> torch.Tensor:
        lengths.append(len(query))
        return function(query, *rest)

    return call


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    words: list[str] = []
    monkeypatch.setattr(train_text.program, "doing", words.append)
    return words


def test_time_ends_a_run_too(run: Run, said: list[str]) -> None:
    assert run(train_text, "--minutes", "0.002", *SMALL, "--device", "cpu") == 0
    assert said[-1].startswith("100% of the training, ")


def test_every_step_is_said(run: Run, said: list[str]) -> None:
    assert run(train_text, "--steps", "2", *SMALL, "--device", "cpu") == 0
    assert [words[:30] for words in said] == [
        "50% of the training, step 1, l",
        "100% of the training, step 2, ",
    ]


def test_as_a_script_on_another_text(tmp_path: Path) -> None:
    options = ["--text", TEXT, "--steps", "1", *SMALL, "--device", "cpu"]
    done = warm.python(FOLDER / "train_text.py", *options, cwd=tmp_path)
    assert output_of(done).startswith("text.txt: 42623 bytes")
    assert not list(tmp_path.iterdir())


# ---- train_long.py: losses and gradients do not depend on the number of ranks, and equal a plain
# loop over whole sequences ----

ALONE = {"env": {"OMP_NUM_THREADS": "1"}, "timeout": 120}


def launcher(ranks: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


LENGTH, WINDOW, CHANNELS, LAYERS, STEPS, SEED = 97, 16, 64, 2, 4, 3
LONG = [
    *("--length", str(LENGTH), "--window", str(WINDOW), "--width", str(CHANNELS)),
    *("--layers", str(LAYERS), "--steps", str(STEPS), "--seed", str(SEED), "--device", "cpu"),
]
LINE = re.compile(
    r"step (\d+): loss ([\d.]+) bits per byte, gradient norm ([\d.]+), (\d+) tokens/s, "
    r"memory ([\d ]+) MiB"
)
DIGITS = 1e-6  # rounding of a printed number


class Printed(NamedTuple):
    head: str
    losses: list[float]
    norms: list[float]  # of gradients
    rates: list[int]
    memory: list[list[int]]  # of each step and rank


def run_ranks(ranks: int, *options: str | Path) -> Printed:
    """The output of the program: with one rank as a plain program, with more under torchrun."""
    if ranks == 1:
        done = warm.python(FOLDER / "train_long.py", *options)
    else:
        done = python(*launcher(ranks), FOLDER / "train_long.py", *options, **ALONE)
    head, *lines = output_of(done).splitlines()
    found = [LINE.fullmatch(line) for line in lines]
    assert all(found), lines
    assert [int(one[1]) for one in found] == [*range(1, len(lines) + 1)]
    return Printed(
        head,
        [float(one[2]) for one in found],
        [float(one[3]) for one in found],
        [int(one[4]) for one in found],
        [[int(number) for number in one[5].split()] for one in found],
    )


def train_plainly(rounding: float, seed: int) -> torch.Tensor:
    """Losses and gradient norms [STEPS, 2] of whole sequences, without a process group. Each
    parameter is first changed by a random fraction of itself, at most `rounding`."""
    torch.manual_seed(SEED)
    model = train_text.Model(CHANNELS, train_text.select_alike(LAYERS, CHANNELS, WINDOW))
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in model.parameters():
            one *= 1 + rounding * (2 * torch.rand(one.shape, generator=noise) - 1)
    text = torch.tensor(list(TEXT.read_bytes()))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    generator, found = torch.Generator().manual_seed(SEED), []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            # The first steps of the linear warm-up, times half a cosine from 1 to LAST_RATE.
            fall = (1 + torch.cos(torch.tensor(step / STEPS * torch.pi, dtype=torch.float64))) / 2
            fall = train_text.LAST_RATE + (1 - train_text.LAST_RATE) * fall.item()
            group["lr"] = train_text.PEAK_RATE * (step + 1) / train_text.WARM_UP * fall
        start = torch.randint(len(text) - LENGTH, (1,), generator=generator)
        loss = train_text.loss_of(model, train_text.cut(text, start, LENGTH), "cpu")
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append([loss.item(), norm.item()])
    return torch.tensor(found, dtype=torch.float64)


def test_any_number_of_ranks_trains_alike() -> None:
    """97 bytes are 33, 32 and 32, or 49 and 48, on 3 and 2 ranks. The tolerance is twice the effect
    of one rounding error in each parameter on the plain loop's results, plus the rounding of
    printed numbers and of four float32 operations on a result: both programs add up and then
    divide."""
    want = train_plainly(0.0, 0)
    others = torch.stack([train_plainly(2.0**-23, seed) for seed in range(4)])
    allowed = 2 * (others - want).abs().amax(0) + DIGITS + 4 * 2.0**-23 * want
    assert allowed.max() < 1e-4, "a wrong target or weight changes a loss or a norm by 1e-3"
    for ranks in (1, 2, 3) if FULL else (1, 3):
        found = run_ranks(ranks, "--text", TEXT, *LONG)
        numbers = torch.tensor([found.losses, found.norms], dtype=torch.float64).T
        assert numbers.shape == want.shape
        error = (numbers - want).abs()
        assert (error <= allowed).all(), (ranks, error, allowed)
        size = TEXT.stat().st_size
        assert found.head.startswith(f"ranks: {ranks}, gloo; sequences of 97 of {size} bytes; ")
        assert min(found.rates) > 0
        assert all(len(row) == ranks and min(row) > 1 for row in found.memory)


def test_it_learns() -> None:
    """It trains on Python's documentation, without a file. Guessing costs 8 bits per byte."""
    found = run_ranks(
        2 if FULL else 1, "--length", "256", *LONG[2:-6], "--steps", "12", "--device", "cpu"
    )
    assert 7.5 < found.losses[0] < 8.5
    assert sum(found.losses[-3:]) / 3 < found.losses[0] - 0.2


def test_bytes_of_ranks() -> None:
    """The target of a rank's last byte is the first byte of the next rank."""
    text, lengths = torch.arange(200, dtype=torch.uint8), [4, 1, 3]
    own = [train_long.cut_own(text, 150, lengths, rank) for rank in range(3)]
    assert [one.tolist() for one in own] == [
        [[150, 151, 152, 153, 154]],
        [[154, 155]],
        [[155, 156, 157, 158]],
    ]


def test_a_mapped_file(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(256)))
    assert train_long.read_bytes(tmp_path / "text").tolist() == [*range(256)]


# ---- tensor_parallel.py ----


@pytest.mark.parametrize("ranks", [1, 2] if FULL else [2])
def test_results_and_cache(ranks: int) -> None:
    """Ranks with some heads each decode the same as the whole layer."""
    done = python(*launcher(ranks), FOLDER / "tensor_parallel.py", **ALONE)
    # gloo writes to standard output too, sometimes in the middle of a line.
    line = r"rank (\d) of \d: (\d) kv heads, a cache of (\d+) bytes, \D* ([\d.]+(?:e-\d+)?)"
    found = list(re.finditer(line, output_of(done)))
    assert sorted(int(one[1]) for one in found) == list(range(ranks))
    rows = 2 * 64 * (4 // ranks)  # of 2 sequences
    for one in found:
        assert int(one[2]) == 4 // ranks
        # k and v of 32 channels, bias, score and position; 2 counts of tokens
        assert int(one[3]) == rows * (2 * 32 * 4 + 12) + 2 * 4
        assert 0 < float(one[4]) < 1e-5


# ---- adapt.py: its text, the equality of a selection of all keys, learned scores, the table ----

SHAPE = recall_text.Shape(length=64, labels=2, gap=16)
ADAPTED = "--length 64 --labels 2 --gap 16 --width 64 --layers 1 --batch 16 --window 8 --recent 4"
KEEPS_FEW = "--seed 3"  # its initial scores keep few of the keys that are needed
KEPT = adapt_layers.Kept(window=8, recent=4)


def parsed(arguments: str) -> argparse.Namespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["adapt.py", *ADAPTED.split(), "--device", "cpu"])
        sys.argv += arguments.split()
        return adapt.parse()


@pytest.fixture(scope="module")
def source() -> adapt.Source:
    return adapt.Source(parsed(KEEPS_FEW))


@pytest.fixture(scope="module")
def dense(source: adapt.Source) -> adapt.Reader:
    options = parsed(f"--dense-steps 400 {KEEPS_FEW}")
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


def test_table(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = f"{ADAPTED} --dense-steps 3 --steps 2 --lora 2 --lora-steps 2 --device cpu"
    assert run(adapt, *steps.split(), "--out", tmp_path / "new") == 0
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
