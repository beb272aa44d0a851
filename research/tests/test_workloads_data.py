"""The data of research/workloads*.py: their dependences, and that answers are right."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import numpy as np
import pytest
import torch
import workloads
import workloads_image
import workloads_multimodal
import workloads_scene
import workloads_series
from workloads_model import Batch, Workload
from workloads_scene import PATCH

NAMES = workloads.NAMES
CPU = torch.device("cpu")
NEIGHBOUR = {"horizontal": (0, 1), "vertical": (1, 0), "rising": (-1, 1), "falling": (1, 1)}
ANSWERS = re.compile(r"(#?\w)(\w+);")


def make(name: str, *flags: str) -> Workload:
    return workloads.make_workload(name, workloads.parse(["out", "--quick", *flags]))


def is_equal(one: Batch, other: Batch) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def pixels_of(patches: torch.Tensor, row: int, side: int) -> np.ndarray:
    """[side, side, channels] of an image."""
    count = side // PATCH
    image = patches[row].view(count, count, -1, PATCH, PATCH).permute(0, 3, 1, 4, 2)
    return image.reshape(side, side, -1).numpy()


def discs(scenes: workloads_scene.Scenes, row: int, grid: int, side: int) -> list[np.ndarray]:
    """[side, side] bool for each object of an image, in coordinates of the whole image."""
    down, right = np.mgrid[:side, :side] + 0.5
    cell = side / grid
    found = []
    for number in range(scenes.cell.shape[1]):
        line, column = divmod(scenes.cell[row, number], grid)
        y, x = (np.array((line, column)) + scenes.centre[row, number]) * cell
        found.append(np.hypot(down - y, right - x) < scenes.radius[row, number] * cell)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_batches_depend_on_seed_and_step_only(name: str) -> None:
    one, other = make(name), make(name, "--seed=1")
    want = one.batch(3)
    one.batch(4)
    assert is_equal(make(name).batch(3), want)
    for changed in (one.batch(4), one.batch(3, is_held_out=True), other.batch(3)):
        assert not is_equal(changed, want)


def test_objects_are_painted_where_and_as_they_are_described(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workloads_scene, "NOISE", ())
    task = make("image")
    size = task.size
    scenes, _ = workloads_image.draw(size, np.random.default_rng((0, 0, 2)))
    image = pixels_of(task.batch(2)["patches"], 1, size.side)
    covered = discs(scenes, 1, size.grid, size.side)
    assert (image[~np.any(covered, 0)] == 0).all()
    for number, inside in enumerate(covered):
        colour = scenes.colour[1, number]
        brightness = image[inside] / colour
        assert np.allclose(brightness, brightness[:, :1], atol=1e-5)
        one = np.where(inside, image[..., 0] / colour[0], np.nan)
        kind = workloads_scene.KINDS[scenes.kind[1, number]]
        same = {
            name: np.nanmax(np.abs(np.roll(one, [-step for step in steps], (0, 1)) - one))
            for name, steps in NEIGHBOUR.items()
        }
        assert same[kind] < 1e-3
        assert all(same[name] > 0.3 for name in same if name != kind)


def test_labels_of_patches_are_right() -> None:
    task = make("image")
    size = task.size
    scenes, _ = workloads_image.draw(size, np.random.default_rng((0, 0, 5)))
    targets = task.batch(5)["targets"]
    count = size.side // PATCH
    labelled = 0
    for row in range(size.batch):
        want = np.full((count, count), workloads_scene.NO_LABEL)
        for number, inside in enumerate(discs(scenes, row, size.grid, size.side)):
            is_red = number == 0 or number > 1 and scenes.colour[row, number].sum() > 0
            covered = inside.reshape(count, PATCH, count, PATCH).mean((1, 3)) >= 0.5
            want[covered] = scenes.kind[row, 0 if is_red else 1]
        assert (targets[row].numpy() == want.ravel()).all()
        labelled += (want != workloads_scene.NO_LABEL).sum()
    assert labelled > 20


def test_an_objects_own_stripes_and_cell_say_nothing() -> None:
    size = dataclasses.replace(workloads_image.QUICK, batch=4000)
    scenes, wanted = workloads_image.draw(size, np.random.default_rng(0))
    for known in (scenes.kind, scenes.cell):
        for one in range(known.max() + 1):
            of_known = wanted[:, 2:][known[:, 2:] == one]
            assert (abs(np.bincount(of_known, minlength=4) / len(of_known) - 0.25) < 0.05).all()


def test_answers_about_images_are_right() -> None:
    task = make("multimodal")
    size, batch = task.size, task.batch(1)
    scenes, _ = workloads_multimodal.draw(size, np.random.default_rng((0, 0, 1)))
    kind_of = dict(zip("hvrf", range(4)))
    for row in range(size.batch):
        text = bytes(batch["text"][row].tolist()).decode().rstrip("\0")
        found = ANSWERS.findall(text)
        assert "".join("{}{};".format(*one) for one in found) == text
        objects = {
            tuple(colour): (kind, divmod(cell, size.grid))
            for cell, colour, kind, radius in zip(
                scenes.cell[row], scenes.colour[row], scenes.kind[row], scenes.radius[row]
            )
            if radius > 0
        }
        count = Counter(kind for kind, _ in objects.values())
        asked = set()
        for question, answer in found:
            if question.startswith("#"):
                assert int(answer) == count[kind_of[question[1]]]
                continue
            colour = workloads_multimodal.COLOURS[question]
            cell = ord(answer[1]) - ord("a"), int(answer[2]) - 1
            assert (kind_of[answer[0]], cell) == objects[colour]
            asked.add(colour)
        assert asked == set(objects) and len(found) == 4 + len(asked)
        answers = "".join(one[1] for one in found).encode()
        is_answer = batch["answers"][row] > 0
        assert bytes(batch["targets"][row][is_answer].tolist()) == answers
        assert torch.equal(batch["targets"][row, :-1], batch["text"][row, 1:])
        letters = set(batch["letters"][row].tolist()) - {-100}
        assert letters == {ord("hvrf"[kind]) for kind in count}


def test_seasons_repeat_and_regimes_return() -> None:
    random = np.random.default_rng(0)
    season = workloads_series.draw_season(workloads_series.SHORT, 5, random)
    wave = workloads_series.season_at(season, 9600, CPU)
    for row, period in zip(wave, season["period"].astype(int)):
        assert torch.allclose(row[period:], row[:-period], atol=1e-4)
        assert not torch.allclose(row[period // 2 :], row[: -(period // 2)], atol=0.1)
    assert torch.allclose(wave.std(1), torch.ones(5), atol=0.05)
    numbers = workloads_series.steps_between((10, 30), 4, 500, random)
    for row in numbers:
        lengths = np.bincount(row)
        assert (np.diff(row) >= 0).all() and len(lengths) > 10
        assert ((lengths[:-1] >= 10) & (lengths[:-1] < 30)).all()


def test_forecasts_without_a_model() -> None:
    task = make("series")
    batch = task.batch(0, is_held_out=True)
    values, period = batch["values"].double().numpy(), batch["period"].tolist()
    errors: dict[str, list[float]] = {"last": [], "seasonal": []}
    for row, own in zip(values, period):
        for at in range(workloads_series.PATCH, len(row)):
            last = at // workloads_series.PATCH * workloads_series.PATCH - 1
            change = row[max(0, at - own)] - row[max(0, last - own)]
            errors["last"].append(row[at] - row[last])
            errors["seasonal"].append(row[at] - row[last] - change)
    found = task.baseline(batch)
    for name, list_of in errors.items():
        error = torch.tensor(list_of, dtype=torch.float64)
        deviation = error.square().mean().sqrt()
        want = -torch.distributions.Normal(0, deviation).log_prob(error).mean()
        total, count = found[f"{name} loss"]
        assert count == len(error)
        assert float(total) / count == pytest.approx(float(want), rel=1e-4)
    assert found["noise loss"][0] < found["seasonal loss"][0]
