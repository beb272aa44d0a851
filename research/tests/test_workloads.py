"""research/workloads*.py: models, training and files, with tiny models on the CPU.
test_workloads_data.py tests the data."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import workloads
import workloads_model
import workloads_results
import workloads_series
from quality_cases import call, refusal
from workloads_model import FORMS, Workload

NAMES = workloads.NAMES
KEYS, RECENT = 64, 16
OPTIONS = workloads.parse(["out", "--quick"])


def make(name: str, *flags: str) -> Workload:
    return workloads.make_workload(name, workloads.parse(["out", "--quick", *flags]))


# ---- models ----


@pytest.mark.parametrize("name", NAMES)
def test_forms_begin_with_the_same_weights(name: str) -> None:
    task = make(name)
    dense, selected = (task.begin(form, KEYS, RECENT, 3).state_dict() for form in FORMS)
    assert all(torch.equal(selected[key], weight) for key, weight in dense.items())
    own = {key.rsplit("attention.")[-1] for key in selected.keys() - dense.keys()}
    assert own == {"dt_proj.weight", "A"}
    again = task.begin("dense", KEYS, RECENT, 4).state_dict()
    assert any(not torch.equal(again[key], weight) for key, weight in dense.items())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("axes", [1, 2])
def test_selecting_all_keys_is_dense(causal: bool, axes: int) -> None:
    config = workloads_model.Config(1, 2, 1, causal=causal)
    torch.manual_seed(0)
    dense = workloads_model.Attention(config.of_form("dense", KEYS, RECENT))
    selected = workloads_model.Attention(config.of_form("selected", KEYS, RECENT))
    selected.load_state_dict(dense.state_dict(), strict=False)
    positions = torch.randint(50, (axes, KEYS), dtype=torch.int32)
    x = torch.randn(2, KEYS, config.width)
    assert torch.allclose(dense(x, positions), selected(x, positions), atol=1e-5)
    moved = dense(x, positions.flip(1))
    assert not torch.allclose(dense(x, positions), moved, atol=1e-3)


def test_sliding_heads_are_not_trained() -> None:
    task = make("series", "--steps=2")
    task.size = dataclasses.replace(task.size, config=workloads_model.Config(2, 6, 3))
    trainer = workloads.Trainer(task, task.begin("selected", KEYS, RECENT, 0), OPTIONS)
    trainer.run()
    for layer in trainer.model.attentions():
        assert layer.sliding_heads == 1
        assert layer.A[0] == 0 and (layer.A[1:] != 1).all()
    task.size = dataclasses.replace(task.size, config=workloads_model.Config(1, 4, 2, causal=False))
    assert task.begin("selected", KEYS, RECENT, 0).attentions()[0].sliding_heads == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["language", "multimodal", "series"])
@torch.no_grad()
def test_predictions_do_not_depend_on_what_follows(name: str, form: str) -> None:
    task = make(name)
    model, batch = task.begin(form, KEYS, RECENT, 0), task.batch(0)
    keyword = {"series": "values"}.get(name, "text")
    middle = batch[keyword].shape[1] // 8 * 4
    changed = batch[keyword].clone()
    changed[:, middle:] = changed[:, middle:].flip(1)
    given = [batch["patches"]] if name == "multimodal" else []
    before, after = model(*given, batch[keyword]), model(*given, changed)
    if given:
        before, after = (one[:, -changed.shape[1] :] for one in (before, after))
    end = middle // (workloads_series.PATCH if name == "series" else 1)
    assert torch.allclose(before[:, :end], after[:, :end], atol=1e-5)
    assert not torch.allclose(before[:, end:], after[:, end:], atol=1e-3)


# ---- programs and files ----


def run(out: Path, *flags: str) -> list[dict[str, Any]]:
    """The lines of the file that a call writes."""
    call(workloads, out, *flags)
    path = out / "workloads.json" if out.is_dir() else out
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_runs_are_written_joined_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = ("--quick", "--steps=2", "--only", "image", "series", "--forms")
    runs = [run(tmp_path / form, *tiny, form) for form in FORMS]
    capsys.readouterr()
    files = [str(path) for form in FORMS for path in (tmp_path / form).glob("*-*.json")]
    machine, *rows = run(tmp_path / "joined.json", "--join", *files)
    assert machine["device"] == "cpu"
    names = [(row["workload"], row["form"]) for row in rows]
    assert names == [(name, form) for name in ("image", "series") for form in FORMS]
    assert sorted(map(json.dumps, rows)) == sorted(
        json.dumps(row) for _, *own in runs for row in own
    )
    for row in rows:
        assert [step for step, _ in row["train"]] == [0, 1]
        assert row["train_loss"] == row["train"][-1][1]
    assert all(0 <= row["held_out"]["accuracy"] <= 1 for row in rows[:2])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(rows)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    times = rows[1]["steps_per_second"] / rows[0]["steps_per_second"]
    assert dict(zip(cells[0], cells[3]))["against dense"] == f"{times:.2f} x"
    assert dict(zip(cells[0], cells[2]))["against dense"] == ""
    assert dict(zip(cells[0], cells[5]))["held-out loss"] == f"{rows[3]['held_out']['loss']:.4f}"


def file_of(path: Path, form: str, machine: str) -> Path:
    row = {"workload": "image", "form": form, "settings": {"seed": 0}}
    workloads_results.write_run(path, {"machine": machine, "device": "cpu"}, row)
    return path


def test_files_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    one = file_of(tmp_path / "one.json", "dense", "here")
    again = file_of(tmp_path / "again.json", "dense", "here")
    there = file_of(tmp_path / "there.json", "selected", "there")
    for other, words in ((again, "which is there already"), (there, "machine is there, want here")):
        with pytest.raises(SystemExit, match=words):
            run(tmp_path / "joined.json", "--join", str(one), str(other))
    assert not (tmp_path / "joined.json").exists()


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--steps 0", "--steps: is 0, want 1 or more"),
        ("--keys 8 --recent 8", "--recent: is 8, want 0 to 7, below --keys"),
        ("--side 300", "--side: is 300, want a multiple of 256"),
        ("--join absent.json", "--join: absent.json is not a file"),
    ],
)
def test_bad_usage_is_refused(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refusal(capsys, workloads, "out", *flags.split())


def test_a_short_corpus_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("corpus.bin", "held_out.bin"):
        (tmp_path / name).write_bytes(b"short")
    message = refusal(
        capsys, workloads, tmp_path, "--quick", "--only=language", "--corpus", tmp_path
    )
    assert message == "workloads.py: --corpus: has a text of 5 bytes, want 257 or more\n"


def test_a_selected_model_learns_to_forecast(tmp_path: Path) -> None:
    flags = ("--quick", "--only", "series", "--forms", "selected", "--rate=3e-3", "--steps=100")
    _, row = run(tmp_path, *flags)
    assert row["held_out"]["loss"] < row["baseline"]["last loss"] - 0.2
    assert row["held_out"]["loss"] > row["baseline"]["noise loss"]
