"""research/quality*.py: the data of training, recall episodes, the keys that forms keep, resumed
runs, and the files, with tiny models on the CPU."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quality
import quality_evaluate
import quality_model
import quality_needles
import quality_optimizer
import quality_picture
import quality_recall
import quality_results
import torch
from quality_cases import KEYS, LENGTH, RECENT, TINY, call, model_of, train, training, weights
from torch import nn

pytestmark = pytest.mark.usefixtures("few_measurements")
STATED = re.compile(rb"\{([A-Z]{3})([A-Z]{3})\}")
ASKED = re.compile(rb"<([A-Z]{3})([A-Z]{3})>")


def questions_in(text: bytes) -> list[tuple[int, int, bytes, bytes]]:
    """Distance, position and both values of every question, found without quality_recall."""
    stated = {}
    for match in STATED.finditer(text):
        assert match[1] not in stated, "two equal keys"
        stated[match[1]] = match.start(2), match[2]
    return [
        (match.start(2) - stated[match[1]][0], match.start(2), match[2], stated[match[1]][1])
        for match in ASKED.finditer(text)
    ]


# ---- data ----


@pytest.mark.parametrize("step", [0, 1, 3, 50])
def test_training_marks_what_only_memory_can_predict(corpus: Path, step: int) -> None:
    source = quality.read_bytes(corpus / "corpus.bin")
    batches = quality_recall.Batches(source, 4, LENGTH, 0.5, 4, seed=7)
    text, marked, has_episodes = batches(step)
    assert has_episodes.sum() == 2
    longest = quality_recall.longest_span(step, 4, LENGTH)
    for row, row_marked, has in zip(text, marked, has_episodes):
        found = questions_in(row.tobytes())
        assert bool(found) == has
        expected = np.zeros(LENGTH + 1, bool)
        for distance, position, value, stated in found:
            assert value == stated
            assert quality_recall.PAIR <= distance < longest
            expected[position : position + quality_recall.VALUE] = True
        assert (row_marked == expected[1:]).all()


def test_training_with_mixed_needles(corpus: Path) -> None:
    """Every marked value stands behind the same letters before, and all kinds are asked for."""
    source = quality.read_bytes(corpus / "corpus.bin")
    needles = quality_needles.EPISODES["mixed"]
    batches = quality_recall.Batches(source, 4, LENGTH, 0.5, 0, seed=7, needles=needles)
    seen = {"pair": 0, "assignment": 0, "identifier": 0}
    for text, marked, _ in map(batches, range(20)):
        for row, is_value in zip(text, marked):
            edges = np.flatnonzero(np.diff(np.concatenate([[0], is_value, [0]]))) + 1
            for begin, end in edges.reshape(-1, 2).tolist():
                words = row[begin - 3 : end].tobytes()
                assert row.tobytes().find(words) + len(words) < begin - 3
                ends = {b" = ": "assignment", b"_": "identifier"}
                kind = ends.get(words[:3], ends.get(words[2:3], "pair"))
                assert end - begin == (3 if kind == "pair" else 5)
                seen[kind] += 1
    assert min(seen.values()) > 20


def test_spans_grow_to_the_whole_sequence() -> None:
    spans = [quality_recall.longest_span(step, 100, 8192) for step in range(0, 120, 10)]
    assert spans[0] == 256 and spans[5] == 1448 and spans[10:] == [8192, 8192]
    assert spans == sorted(spans)


@pytest.mark.parametrize("count", [4, 16])
def test_evaluation_asks_at_the_distance(corpus: Path, count: int) -> None:
    source = quality.read_bytes(corpus / "held_out.bin")
    episodes = quality_recall.associative(source, LENGTH, count, 256, 40, seed=3)
    assert len(episodes.text) == -(-40 // count)
    in_order = []
    for row, questions in zip(episodes.text, episodes.questions):
        found = questions_in(row.tobytes())
        assert [(q.distance, q.asked) for q in questions] == [one[:2] for one in found]
        distances = [distance for distance, *_ in found]
        assert len(found) == count and np.mean(distances) == 256
        assert max(abs(np.array(distances) - 256)) <= 3 * quality_recall.SLOT
        in_order.append(set(distances) == {256})
    assert not all(in_order)


def test_all_forms_read_the_same_sequences(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: dict[str, list[bytes]] = {"dense": [], "sliding": []}
    draw = quality_recall.Batches.__call__
    for form, seen in read.items():

        def record(
            self: quality_recall.Batches, step: int, seen: list[bytes] = seen
        ) -> tuple[np.ndarray, ...]:
            made = draw(self, step)
            seen.append(made[0].tobytes())
            return made

        monkeypatch.setattr(quality_recall.Batches, "__call__", record)
        train(corpus, tmp_path, form)
    assert read["dense"] == read["sliding"]
    assert len(set(read["dense"])) == TINY["steps"]


# ---- models ----


def expiry(form: str) -> np.ndarray:
    """[layers, kv_heads, LENGTH] for a text of random bytes."""
    model = model_of(form)
    text = np.random.default_rng(1).integers(256, size=(1, LENGTH + 1), dtype=np.uint8)
    evaluation = quality_evaluate.Evaluation(text[0], LENGTH, 1, 1, torch.device("cpu"))
    return np.concatenate(evaluation._expiries(model, text))


def test_forms_keep_what_they_say() -> None:
    position = np.arange(LENGTH)
    newest = np.minimum(position + KEYS, LENGTH)
    assert (expiry("dense") == LENGTH).all()
    assert (expiry("sliding") == newest).all()
    for form in ("selected", "recent", "random", "random-recent"):
        found = expiry(form)
        assert ((found == LENGTH).sum(2) == KEYS).all()
        assert (found != newest).any()
        always = np.minimum(position + RECENT, LENGTH)
        assert (found >= always).all() == form.endswith("recent")


@pytest.mark.parametrize("form", ["sliding", "random"])
def test_scores_that_are_not_learned_stay(corpus: Path, tmp_path: Path, form: str) -> None:
    train(corpus, tmp_path, form, dt_std=0.5)
    state = weights(tmp_path, f"{form}-tiny-0")
    before = model_of(form).state_dict()
    scores = [name for name in state if "dt_proj" in name or name.endswith(".A")]
    assert len(scores) == 4
    for name in state:
        assert torch.equal(state[name], before[name]) == (name in scores)


@pytest.mark.parametrize("form", ["recent", "random-recent"])
def test_sliding_layers_stay_and_others_learn(corpus: Path, tmp_path: Path, form: str) -> None:
    train(corpus, tmp_path, form, dt_std=0.5, score_layers=2)
    state = weights(tmp_path, f"{form}-tiny-0")
    sliding, scored = (state[f"blocks.{layer}.attention.A"] for layer in (0, 1))
    assert (sliding == 0).all()
    assert (
        (scored == 1).all() if form == "random-recent" else ((scored != 0.5) & (scored != 0)).all()
    )


def test_sliding_heads_keep_the_newest_keys(tmp_path: Path) -> None:
    """With any A, also in a model that is read from a file."""
    sizes = {"layers": 2, "q_heads": 2, "kv_heads": 2, "sliding": (1, 0)}
    config = quality_model.Config(window=KEYS - RECENT, recent=RECENT, bias_form="linear", **sizes)
    model = quality_model.Model(config)
    quality_model.initialise(model, "recent", 0, 1.0, 0.5)
    assert [layer.A.tolist() for layer in model.attentions()] == [[0, 1], [1, 1]]
    model.attentions()[0].A.data.fill_(1.0)
    quality_model.save(model, tmp_path / "model.safetensors")
    again = quality_model.load(tmp_path / "model.safetensors")
    assert [layer.sliding_heads for layer in again.attentions()] == [1, 0]
    assert [layer.A.tolist() for layer in again.attentions()] == [[0, 1], [1, 1]]
    text = np.random.default_rng(1).integers(256, size=(1, LENGTH + 1), dtype=np.uint8)
    evaluation = quality_evaluate.Evaluation(text[0], LENGTH, 1, 1, torch.device("cpu"))
    newest = np.minimum(np.arange(LENGTH) + KEYS, LENGTH)
    for one in (model, again):
        found = np.concatenate(evaluation._expiries(one, text))  # [layers, kv_heads, LENGTH]
        assert (found == newest).all(2).tolist() == [[True, False], [False, False]]


def test_layers_with_sliding_heads() -> None:
    def sliding(**rules: int) -> tuple[int, ...]:
        return quality_model.config_of("recent", "small", KEYS, RECENT, **rules).sliding

    assert sliding() == ()
    assert sliding(sliding_heads=2) == (2, 2, 2, 2, 2, 2)
    assert sliding(score_layers=3) == (3, 3, 0, 3, 3, 0)
    assert sliding(score_layers=1) == (0, 0, 0, 0, 0, 0)


def test_learned_scores_have_their_own_rate() -> None:
    groups = quality_optimizer.parameter_groups(model_of("recent"), 0.1, 3.0)
    own = {
        kind: (len(group["params"]), group["factor"], group["weight_decay"])
        for kind, group in groups.items()
    }
    matrices = {"hidden": (12, 1.0, 0.1), "matrices": (2, 1.0, 0.1)}
    assert own == {**matrices, "vectors": (5, 1.0, 0.0), "scores": (4, 3.0, 0.0)}


def test_forms_begin_with_the_same_weights() -> None:
    dense, recent = (model_of(form).state_dict() for form in ("dense", "recent"))
    assert all(torch.equal(recent[name], weight) for name, weight in dense.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_files_hold_the_model(tmp_path: Path, dtype: str) -> None:
    model = model_of("recent")
    path = tmp_path / "model.safetensors"
    quality_model.save(model, path, dtype)
    again = quality_model.load(path)
    assert again.config == model.config
    for name, weight in again.state_dict().items():
        before = model.state_dict()[name]
        if dtype == "float32" or (dtype == "int8" and before.dim() == 1):
            assert torch.equal(weight, before)
        elif dtype == "bfloat16":
            assert torch.equal(weight, before.bfloat16().float())
        else:  # half a unit of its row, and the rounding of a product
            unit = before.abs().amax(1, keepdim=True) / 127
            assert ((weight - before).abs() <= unit * 0.5001).all()
    assert not torch.equal(again.head.weight, again.head.weight.roll(1))


# ---- evaluation ----


class Lookup(nn.Module):
    """Predicts the values of questions by a search for their statements; elsewhere a zero byte."""

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*text.shape, 256)
        for row, scores in zip(text, logits):
            data = bytes(row.tolist())
            values = dict(STATED.findall(data))
            for match in re.finditer(rb"<([A-Z]{3})", data):
                for number, byte in enumerate(values[match[1]]):
                    if match.end() - 1 + number < len(data):
                        scores[match.end() - 1 + number, byte] = 50.0
        return logits


class Constant(nn.Module):
    """Gives every byte the same probability."""

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*text.shape, 256)


def test_evaluation_of_models_that_know_all_and_nothing(corpus: Path) -> None:
    source = quality.read_bytes(corpus / "held_out.bin")
    evaluation = quality_evaluate.Evaluation(source, LENGTH, 3, 2, torch.device("cpu"))
    for model, accuracy, bits in ((Lookup(), 1, 0), (Constant(), 0, 8)):
        rows = evaluation.recall(model, 8, (4, 16)) + evaluation.passkey(model, 2)
        assert len(rows) == 4 + 1 + 4
        for row in rows:
            assert row["accuracy"] == accuracy and row["bits"] == pytest.approx(bits, abs=1e-6)
    losses = evaluation.losses(Constant())
    assert losses["bits"] == pytest.approx(8) and losses["by_position"] == pytest.approx([8] * 16)


# ---- runs ----


def test_a_resumed_run_is_the_same_run(corpus: Path, tmp_path: Path) -> None:
    whole = train(corpus, tmp_path, "recent", name="whole")
    train(corpus, tmp_path, "recent", name="halves", steps=2)
    halves = train(corpus, tmp_path, "recent", "--resume", name="halves")
    (a, b) = ([[row[0], *row[2:]] for row in log["train"]] for log in (whole, halves))
    assert [row[0] for row in a] == [1, 2, 3, 4]
    assert a == b
    assert whole["final"]["by_position"] == halves["final"]["by_position"]
    models = [weights(tmp_path, name) for name in ("whole", "halves")]
    assert all(torch.equal(weight, models[1][name]) for name, weight in models[0].items())


def test_a_run_writes_everything(corpus: Path, tmp_path: Path) -> None:
    log = train(corpus, tmp_path, "selected")
    assert [row["step"] for row in log["held_out"]] == [2, 4]
    assert log["train"][0][2] == pytest.approx(8, abs=0.1) or log["train"][0][2] is None
    assert log["train"][-1][1] > log["train"][0][1] > 0
    assert log["held_out"][1]["bits"] < 8
    assert {"settings", "model", "parameters", "machine", "bytes_per_second"} <= set(log)
    final = log["final"]
    assert [row["keys"] for row in final["by_window"]] == [128, 256, 512]
    assert [row["depth"] for row in final["passkey"]] == [0, 1, 2, 3]
    assert {(row["pairs"], row["distance"]) for row in final["recall"]} >= {(4, 64), (16, 256)}
    assert len(final["by_position"]) == 16
    kept = final["kept"]
    assert [[len(head) for head in layer] for layer in kept["last_query"]] == [[KEYS], [KEYS]]
    assert len(kept["text"]) == LENGTH
    again = train(corpus, tmp_path, "selected", "--evaluate", steps=None)["final"]
    assert {**again, "seconds": 0} == {**final, "seconds": 0}


def test_weights_of_a_file_are_measured(corpus: Path, tmp_path: Path) -> None:
    final = train(corpus, tmp_path, "recent", weights="float32")["final"]
    started = {"start": tmp_path / "recent-tiny-0.safetensors", "name": "again", "steps": None}
    again = train(corpus, tmp_path, "recent", "--evaluate", **started)["final"]
    assert again["step"] == 0 and again["by_position"] == final["by_position"]


def test_kept_values(corpus: Path, tmp_path: Path) -> None:
    """A sliding window keeps a value exactly as far as it reaches."""
    rows = train(corpus, tmp_path, "sliding", keys=200)["final"]["kept"]["values"]
    assert {row["distance"]: row["kept"] for row in rows} == {256: 0.0}
    rows = train(corpus, tmp_path, "sliding", keys=320)["final"]["kept"]["values"]
    assert {row["distance"]: row["kept_by_any_head"] for row in rows} == {256: 1.0}


def test_pictures(corpus: Path, tmp_path: Path) -> None:
    for form in ("dense", "recent"):
        train(corpus, tmp_path, form)
    logs = sorted(tmp_path.glob("*.json"))
    arguments = (*logs, "--to", tmp_path / "drawn", "--pairs=4")
    call(quality_picture, *arguments)
    drawn = {path.name: path.read_text() for path in (tmp_path / "drawn").iterdir()}
    assert sorted(drawn) == ["quality-losses.svg", "quality-recall.svg"]
    for colour in quality_picture.COLOURS[:2]:  # one for each run
        assert colour.lower() in drawn["quality-losses.svg"]
    run = json.loads(logs[0].read_text())
    assert [x for x, _ in quality_picture.by_position(run)][::15] == [16.0, 496.0]
    del run["final"]
    logs[0].write_text(json.dumps(run))
    with pytest.raises(SystemExit, match="dense-tiny-0: has no evaluation"):
        call(quality_picture, *arguments)


def join(monkeypatch: pytest.MonkeyPatch, out: Path, *runs: Any) -> list[dict[str, Any]]:
    """The lines of the file that quality_results.py makes of runs."""
    monkeypatch.setenv("FDMA_COMMIT", "abc")
    call(quality_results, out, *runs)
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_joined_runs(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the measurements of the runs, without text, and their pictures are the same."""
    runs = {form: train(corpus, tmp_path, form) for form in ("dense", "selected")}
    paths = [tmp_path / f"{form}-tiny-0.json" for form in runs]
    joined = tmp_path / "joined.json"
    machine, *rows = join(monkeypatch, joined, *paths)
    assert machine["commit"] == "abc" and machine["torch"] == str(torch.__version__)
    assert machine["device"] == "cpu" and machine["machine"] and "kernels" not in machine
    assert [row["run"] for row in rows] == ["dense-tiny-0", "selected-tiny-0"]
    for row, run in zip(rows, runs.values()):
        assert row["settings"]["corpus"] == corpus.name and row["settings"]["keys"] == KEYS
        assert [line[0] for line in row["train"]] == [1, 2, 3, 4]
        assert [line["step"] for line in row["held_out"]] == [2, 4]
        final, whole = row["final"], run["final"]
        assert final["bits"] == pytest.approx(whole["bits"], rel=1e-4)
        assert final["by_position"] == pytest.approx(whole["by_position"], rel=1e-4)
        for name in ("recall", "passkey", "by_window"):
            assert len(final[name]) == len(whole[name])
        assert list(final["kept"]) == ["values"]
    *_, selected = join(monkeypatch, joined, *paths, "--kept=selected-tiny-0")
    assert (
        selected["final"]["kept"]["last_query"] == runs["selected"]["final"]["kept"]["last_query"]
    )
    for name, files in (("apart", paths), ("joined", [joined])):
        call(quality_picture, *files, "--to", tmp_path / name, "--runs", "selected-tiny-0")
        drawn = {path.name for path in (tmp_path / name).iterdir()}
        assert drawn == {"quality-losses.svg", "quality-recall.svg"}


def test_runs_that_cannot_be_joined(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(corpus, tmp_path, "dense")
    whole, other = tmp_path / "dense-tiny-0.json", tmp_path / "other.json"
    for changed, message in (
        ({"machine": {**run["machine"], "torch": "1.0"}}, "other.json: machine is"),
        ({"final": None, "held_out": []}, "other.json: has no evaluation"),
        ({"final": None, "held_out": run["held_out"][:-1]}, "other.json: has no evaluation"),
    ):
        log = {name: value for name, value in {**run, **changed}.items() if value is not None}
        other.write_text(json.dumps(log))
        with pytest.raises(SystemExit, match=message):
            join(monkeypatch, tmp_path / "joined.json", whole, other)
        assert not (tmp_path / "joined.json").exists()


def test_a_run_that_was_stopped_in_its_evaluation(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is joined with the losses and the recall of its last step."""
    run = train(corpus, tmp_path, "dense")
    del run["final"]
    path = tmp_path / "dense-tiny-0.json"
    path.write_text(json.dumps(run))
    _, row = join(monkeypatch, tmp_path / "joined.json", path)
    assert row["final"]["step"] == 4 and "needles" not in row["final"]
    for name in ("bits", "of_pieces", "by_repetition"):
        assert row["final"][name] == quality_results.rounded(run["held_out"][-1][name])


def test_thinned_losses() -> None:
    rows = quality_results.thinned(list(range(259)), 60)
    assert len(rows) == 60 and rows[0] == 0 and rows[-1] == 258
    assert {b - a for a, b in zip(rows, rows[1:])} == {4, 5}
    assert quality_results.thinned([1, 2], 60) == [1, 2]


# ---- several processes ----


def torchrun(*words: Any) -> subprocess.CompletedProcess[str]:
    """quality.py in two processes, with one thread each."""
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    given = [*program, str(Path(quality.__file__)), *map(str, words)]
    return subprocess.run(given, capture_output=True, text=True, env=environment, check=False)


def test_two_processes_train_as_one(corpus: Path, tmp_path: Path) -> None:
    """Each has half of the sequences of a step, and they add up gradients: the weights are the same
    up to rounding, and so are the losses in the log."""
    changed: dict[str, Any] = {"batch": 4, "name": "model", "steps": 3}
    done = torchrun(*training(corpus, tmp_path / "two", "recent", **changed))
    assert done.returncode == 0, done.stderr
    call(quality, *training(corpus, tmp_path / "one", "recent", **changed))
    one, two = (weights(tmp_path / name, "model") for name in ("one", "two"))
    call(quality, *training(corpus, tmp_path / "none", "recent", **{**changed, "steps": 0}))
    start = quality_model.load(tmp_path / "none/model.safetensors").state_dict()
    for name, tensor in one.items():
        assert (two[name] - tensor).norm() < 0.02 * (start[name] - tensor).norm(), name
    logs = [json.loads((tmp_path / name / "model.json").read_text()) for name in ("one", "two")]
    assert [log["machine"]["ranks"] for log in logs] == [1, 2]
    row, other = (log["train"][-1] for log in logs)  # of step 3 alone
    assert row[0] == other[0] == 3
    assert row[2:] == pytest.approx(other[2:], rel=1e-3)


@pytest.mark.parametrize(
    ("changed", "local_rank"),
    [({"steps": None}, "1"), ({"score_targets": "max"}, "1"), ({"batch": 3}, "1"), ({}, "0")],
)
def test_processes_that_cannot_divide_a_step(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changed: dict[str, Any],
    local_rank: str,
) -> None:
    given: dict[str, Any] = {"device": "cpu", "steps": 3, "score_targets": None, "batch": 4}
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", local_rank)):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        quality.Ranks(argparse.Namespace(**{**given, **changed}))
    words = "2 processes want --steps, no --score-targets, a --batch divisible by 2, one host"
    assert f"quality.py: {words}" in capsys.readouterr().err


def test_one_process_needs_no_other_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    options = argparse.Namespace(device="cpu", steps=None, score_targets="max", batch=3)
    assert quality.Ranks(options).count == 1
