"""research/quality_tasks.py: what the texts say, and how answers are scored."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import quality_evaluate
import quality_tasks
import torch
from quality_recall import Question
from quality_tasks import Task

LENGTH, TEXTS = 4096, 2
UUID = rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
SENTENCE = re.compile(rb" The code of (" + UUID + rb"|[a-z]{6}) is (" + UUID + rb"|[0-9]{7})\.")


def source_of(size: int) -> np.ndarray:
    """Random words without line ends, braces, capital letters and digits."""
    letters = np.frombuffer(b"etaoin shrdlu,.", np.uint8)
    return letters[np.random.default_rng(0).integers(len(letters), size=size)]


@pytest.fixture(scope="module")
def made() -> list[Task]:
    return list(quality_tasks.tasks(source_of(20_000), LENGTH, TEXTS, seed=3))


def texts_of(made: list[Task], name: str) -> Iterator[tuple[dict[str, Any], bytes, bytes, Any]]:
    """Settings, a text, the same with wrong answers, and the questions: of all texts of a task."""
    found = [task for task in made if task.row["task"] == name]
    assert found
    for task in found:
        assert task.text.shape == (TEXTS, LENGTH + 1)
        other = task.text if task.other is None else task.other
        for text, wrong, questions in zip(task.text, other, task.questions):
            differs = np.flatnonzero(text != wrong)
            spans = [range(one.asked, one.asked + one.size) for one in questions]
            assert {int(at) for at in differs} <= {at for span in spans for at in span}
            yield task.row, text.tobytes(), wrong.tobytes(), questions


def value_at(text: bytes, question: Question, is_stated: bool = False) -> bytes:
    at = question.stated if is_stated else question.asked
    return text[at : at + question.size]


def test_all_tasks_that_fit(made: list[Task]) -> None:
    assert Counter(task.row["task"] for task in made) == {
        "capacity": 6,
        "overwritten": 3,
        "chains": 4,
        "frequent": 4,
        "copying": 2,
        **dict.fromkeys(quality_tasks.NIAH, 1),
    }
    rows = [case.row for case in quality_tasks.cases_of(source_of(70_000), 65536)]
    assert {"task": "capacity", "pairs": 1024, "is_spread": True} in rows
    assert {"task": "copying", "of": "text", "distance": 57344} in rows
    again = list(quality_tasks.tasks(source_of(20_000), LENGTH, TEXTS, seed=3))
    assert all((a.text == b.text).all() for a, b in zip(made, again))


def test_capacity(made: list[Task]) -> None:
    extents: dict[bool, list[int]] = {False: [], True: []}
    for row, text, _, questions in texts_of(made, "capacity"):
        found = {one[1]: one for one in re.finditer(rb"\{([A-Z]{3})([A-Z]{3})\}", text)}
        assert len(found) == row["pairs"] and len(questions) == quality_tasks.ASKED
        for one in questions:
            asked = re.fullmatch(rb"<([A-Z]{3})([A-Z]{3})>", text[one.asked - 4 : one.asked + 4])
            assert asked is not None and found[asked[1]][2] == asked[2]
            assert found[asked[1]].start(2) == one.stated and one.size == 3
        if row["pairs"] == 16:
            places = [one.start() for one in found.values()]
            extents[row["is_spread"]].append(max(places) - min(places))
    assert max(extents[False]) == 15 * quality_tasks.SLOT and min(extents[True]) > LENGTH // 2


def test_overwritten(made: list[Task]) -> None:
    for row, text, wrong, questions in texts_of(made, "overwritten"):
        found: dict[bytes, list[Any]] = {}
        for one in re.finditer(rb"\{([A-Z]{3})([A-Z]{3})\}", text):
            found.setdefault(one[1], []).append(one)
        assert len(questions) == len(found) == quality_tasks.KEYS
        for one in questions:
            own = found[text[one.asked - 3 : one.asked]]
            assert len(own) == row["times"] and own[-1].start(2) == one.stated
            assert value_at(text, one) == own[-1][2] and value_at(wrong, one) == own[0][2]
            assert len({each[2][0] for each in own}) == row["times"]


def test_chains(made: list[Task]) -> None:
    for row, text, wrong, questions in texts_of(made, "chains"):
        lines = re.findall(rb"\n([a-z]{6}) = ([a-z]{6}|[0-9]{5})\n", text)
        stated, asked = lines[: -quality_tasks.CHAINS], lines[-quality_tasks.CHAINS :]
        values: dict[bytes, tuple[bytes, int]] = {}  # of names, and their hops
        for name, given in stated:
            values[name] = (
                (given, 0) if given.isdigit() else (values[given][0], values[given][1] + 1)
            )
        assert len(stated) == len(values) == quality_tasks.CHAINS * (row["hops"] + 1)
        given = {value for value, _ in values.values()}
        assert len(given) == quality_tasks.CHAINS
        for one, (name, value) in zip(questions, asked):
            assert (value_at(text, one), row["hops"]) == values[name] == (value, row["hops"])
            assert value_at(text, one, is_stated=True) == value
            assert value_at(wrong, one) in given - {value}


def test_frequent(made: list[Task]) -> None:
    for row, text, wrong, questions in texts_of(made, "frequent"):
        head = text.index(b"\nThe most frequent words: ")
        before = text[: head - row["apart"]].split(b" ")
        counts = Counter(before)
        assert len(before[-1]) == 6 and len(questions) == row["count"]
        right, others = ([value_at(one, each) for each in questions] for one in (text, wrong))
        assert [counts[word] for word in right] == row["count"] * [row["times"]]
        assert [counts[word] for word in others] == row["count"] * [quality_tasks.OTHERS]
        assert (
            text.endswith(b" " + b" ".join(right)) and len(set(right + others)) == 2 * row["count"]
        )
        for one, word in zip(questions, right):
            assert one.stated == text[:head].rindex(word)


def test_few_other_words() -> None:
    """In the shortest text for 10 words there are as many others, and each is a wrong answer."""
    length = 2 * 10 * (30 + quality_tasks.OTHERS) * 7
    text = source_of(length + 1)
    asked = quality_tasks.frequent(text, np.random.default_rng(0), 10, 30, 3 * length // 8)
    counts = Counter(text.tobytes().split(b" "))
    assert len({one.wrong for one in asked}) == 10
    assert all(counts[one.wrong] == quality_tasks.OTHERS for one in asked)


def test_copying(made: list[Task]) -> None:
    kinds = set()
    for row, text, _, questions in texts_of(made, "copying"):
        (one,) = questions
        first, again = one.stated - quality_tasks.FREE, one.asked - quality_tasks.FREE
        size = quality_tasks.PARAGRAPH
        assert text[first : first + size] == text[again : again + size]
        assert one.distance == row["distance"] and one.size == size - quality_tasks.FREE
        is_words = re.fullmatch(rb"([a-z]{5} ){256}", text[first : first + size]) is not None
        kinds.add((row["of"], is_words))
    assert kinds == {("words", True), ("text", False)}


@pytest.mark.parametrize("name", quality_tasks.NIAH)
def test_niah(made: list[Task], name: str) -> None:
    kind = quality_tasks.NIAH[name]
    for _, text, wrong, questions in texts_of(made, name):
        found = [(one[1], one[2], one.start(2)) for one in SENTENCE.finditer(text)]
        stated, asked = found[: -kind.asked], found[-kind.asked :]
        count = len(stated) if kind.haystack == "needles" else kind.names * kind.values
        assert len(stated) == count and len(asked) == len(questions)
        if kind.haystack == "needles":
            assert count * kind.line_size() > 0.9 * LENGTH
        assert (text.count(b"Nobody came.") > 20) == (kind.haystack == "noise")
        names, values, places = zip(*stated)
        assert len(set(names)) == count // kind.values and len(set(values)) == count
        sizes = [(36 if is_uuid else usual) for is_uuid, usual in zip(kind.has_uuids, (6, 7))]
        for one, (asking, value, at) in zip(questions, asked):
            place = places.index(one.stated)
            assert (names[place], values[place], one.asked) == (asking, value, at)
            assert [len(asking), len(value)] == sizes and one.size == len(value)
            assert value_at(wrong, one) != value
            assert (value_at(wrong, one) in values) == (
                kind.names > 1 or kind.haystack == "needles"
            )
        places = [one.stated for one in questions]
        assert len(set(places)) == kind.asked
        assert kind.values == 1 or places == sorted(places)


def results_of(bits: Any, is_right: Any) -> quality_evaluate.Results:
    return quality_evaluate.Results(np.array(bits, np.float32), np.array(is_right, bool))


def test_scores() -> None:
    """Two texts of two questions each, about two bytes."""
    questions = 2 * [[Question(1, 5, 2), Question(3, 7, 2)]]
    task = Task({"task": "none"}, np.zeros((2, 10), np.uint8), questions, None)
    right = results_of(
        [[8, 8, 4, 4, 1, 3, 2, 2, 0], [8, 8, 4, 4, 5, 5, 0, 0, 0]],
        [[0, 0, 0, 0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 1, 1, 1, 1, 0]],
    )
    wrong = results_of(
        [[0, 0, 0, 0, 2, 3, 2, 2, 0], [0, 0, 0, 0, 4, 5, 1, 0, 0]],
        [[0, 0, 0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1, 0, 1, 0]],
    )
    row = quality_tasks.scored(task, right, None)
    assert row == {
        "task": "none",
        "texts": 2,
        "questions": 4,
        "mean_distance": 4,
        "accuracy": 0.75,
        "error": pytest.approx(0.25),
        "of_bytes": 0.875,
        "bits": 2.25,
        "stated_bits": 6.0,
    }
    both = quality_tasks.scored(task, right, wrong)
    assert both == {**row, "wrong": 0.25, "chosen": 0.5, "chosen_error": 0.0}
    labels = quality_tasks.table_rows(
        [{**both, "task": "chains", "hops": 2}, {**row, "task": "copying"}]
    )
    assert labels == {"chains, hops 2": "0.75, 0.50", "copying": "2.250"}


def test_octaves_of_documents() -> None:
    sizes = (700, 600, 90, 601, 5000)
    source = np.concatenate([[*(size * [number + 1]), 0] for number, size in enumerate(sizes)])
    found = quality_tasks.documents(source, 600, 9)
    assert found.shape == (3, 601) and (found == np.array([[1], [4], [5]])).all()
    assert quality_tasks.documents(source, 600, 2)[:, 0].tolist() == [1, 5]
    assert quality_tasks.documents(source[:-1], 600, 9)[:, 0].tolist() == [1, 4]  # no end
    assert len(quality_tasks.documents(source, 6000, 9)) == 0
    bits = np.repeat([[1.0, 2.0, 4.0, 5.0], [3.0, 2.0, 4.0, 5.0]], (256, 256, 512, 88), 1)
    assert quality_tasks.by_octave(bits) == [
        {"task": "position", "to": 256, "texts": 2, "bits": 2.0, "error": 1.0},
        {"task": "position", "to": 512, "texts": 2, "bits": 2.0, "error": 0.0},
        {"task": "position", "to": 1024, "texts": 2, "bits": 4.0, "error": 0.0},
        {"task": "position", "to": 1112, "texts": 2, "bits": 5.0, "error": 0.0},
    ]


class Induction(torch.nn.Module):
    """Predicts the byte that followed the longest match of the last bytes, among the `window` bytes
    before."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        found = np.stack([self.predict(row) for row in text.numpy()])
        return 20 * torch.nn.functional.one_hot(torch.from_numpy(found), 256).float()

    def predict(self, row: np.ndarray) -> np.ndarray:
        predicted = np.zeros(len(row), np.int64)
        match = np.zeros(len(row) + 1, np.int64)  # bytes that end with each and equal the last ones
        for place in range(1, len(row)):
            match[1 : place + 1] = np.where(row[:place] == row[place], match[:place] + 1, 0)
            first = max(0, place - self.window)
            own = match[first + 1 : place + 1]
            predicted[place] = row[place - np.argmax(own[::-1])]
        return predicted


def test_a_model_that_remembers_and_one_that_forgets() -> None:
    device = torch.device("cpu")
    source = np.append(source_of(20_000), np.uint8(0))  # one document
    evaluation = quality_evaluate.Evaluation(source, LENGTH, TEXTS, 2, device)
    assert evaluation.tasks(Induction(1), 0) == []
    all_keys, newest = (evaluation.tasks(Induction(window), TEXTS) for window in (LENGTH, 512))
    assert [row["to"] for row in all_keys[27:]] == [256, 512, 1024, 2048, 4096]
    for row, short in zip(all_keys[:27], newest):
        kind, accuracy = row["task"], row["accuracy"]
        if kind == "capacity":
            assert accuracy > 0.85 > 0.5 > short["accuracy"] and row["stated_bits"] > 20
        elif kind == "overwritten":
            assert accuracy > 0.85 and row["wrong"] < 0.1 and row["chosen"] > 0.85
            assert short["accuracy"] < accuracy
        elif kind == "chains":
            assert accuracy == (1 if row["hops"] == 0 else 0)
        elif kind == "copying":
            assert row["of_bytes"] > 0.99 > 0.2 > short["of_bytes"] and row["bits"] < 0.3
        elif kind == "niah_multivalue":
            assert accuracy < 1
        elif kind.startswith("niah"):
            assert accuracy == 1 > short["accuracy"]
