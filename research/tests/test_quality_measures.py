"""research/quality*.py: losses by the distance to repeated text, and recall of unmarked needles."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import quality_evaluate
import quality_needles
import quality_results
import torch
from quality_cases import LENGTH, refusal_of, train
from quality_tasks import NIAH

pytestmark = pytest.mark.usefixtures("few_measurements")
FORMS = {
    "assignment": re.compile(rb"\n([a-z]{6} = )([0-9]{5})\n"),
    "sentence": re.compile(rb"( The code of [a-z]{6} is )([a-z]{5})\."),
    "identifier": re.compile(rb" ([a-z]{5}_)([a-z]{5})\("),
    "brackets": re.compile(rb"(\[[A-Z]{3})([A-Z]{3})\]"),
}


def last_occurrence(text: bytes, target: int, size: int) -> int:
    """How far back the `size` bytes that end with byte `target` last occurred; 0: never."""
    begin = target - size + 1
    found = text.rfind(text[begin : target + 1], 0, target) if begin >= 0 else -1
    return begin - found if found >= 0 else 0


@pytest.mark.parametrize("letters", [2, 3, 256])
def test_repetitions_are_the_last_ones(letters: int) -> None:
    random = np.random.default_rng(letters)
    row = random.integers(letters, size=700, dtype=np.uint8)
    row[400:460] = row[30:90]
    row[600:640] = row[410:450]
    found = quality_evaluate.repetitions(row)
    text, size = row.tobytes(), quality_evaluate.REPEATED
    assert found.tolist() == [last_occurrence(text, target, size) for target in range(1, 700)]
    assert found[600 + size - 2] == 190  # from 410, not from 40
    assert len(found) == len(row) - 1 and (found[: size - 1] == 0).all()


def test_losses_are_those_of_their_class() -> None:
    back = np.array([[0, 1, 256, 257], [0, 2304, 2305, 9000]])
    bits = np.array([[1, 2, 4, 8], [16, 32, 64, 128]], np.float32)
    rows = quality_evaluate.sums_by_repetition(bits, back)
    assert [(row["to"], row["bytes"], row["bits"]) for row in rows] == [
        (0, 2, 8.5),
        (256, 2, 3.0),
        (2304, 2, 20.0),
        (8192, 1, 64.0),
        (32768, 1, 128.0),
    ]
    assert [row["of_pieces"] for row in rows][:3] == [
        [[1, 1.0], [1, 16.0]],
        [[2, 6.0], [0, 0.0]],
        [[1, 8.0], [1, 32.0]],
    ]


@pytest.mark.parametrize("distance", [1024, 4096])
def test_needles_are_stated_and_asked_for(distance: int) -> None:
    source = np.frombuffer(b"a few words without needles " * 1000, np.uint8)
    kinds = quality_needles.needles(source, 8192, distance, 3, seed=5)
    assert set(kinds) == set(FORMS)
    for kind, episodes in kinds.items():
        for row, questions in zip(episodes.text, episodes.questions):
            text = row.tobytes()
            assert len(text) == 8193 and len(questions) == quality_needles.NEEDLES
            found = {}  # values and their positions by the name before them
            for match in FORMS[kind].finditer(text):
                found.setdefault(match[1], []).append((match.start(2), match[2]))
            assert len(found) == quality_needles.NEEDLES
            for one in questions:
                ((stated, value), (asked, again)) = next(
                    pair for pair in found.values() if pair[1][0] == one.asked
                )
                assert (stated, value, len(value)) == (one.stated, again, one.size)
                most = quality_needles.GROUP * quality_needles.SLOT
                assert asked == one.asked and abs(asked - stated - distance) < most


def test_needles_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that predicts the byte `distance` back knows all values that are in order."""
    source = np.frombuffer(bytes(range(97, 123)) * 1000, np.uint8)
    monkeypatch.setattr(quality_needles, "GROUP", 1)
    monkeypatch.setattr(quality_evaluate, "NEEDLE_TEXTS", 2)
    evaluation = quality_evaluate.Evaluation(source, 4096, 2, 2, torch.device("cpu"))
    monkeypatch.setattr(evaluation, "_expiries", lambda _, text: [np.zeros((2, 1, 4096), int)])

    class Copies(torch.nn.Module):
        def __init__(self, back: int) -> None:
            super().__init__()
            self.back = back

        def forward(self, text: torch.Tensor) -> torch.Tensor:
            near = torch.nn.functional.pad(text, (self.back, 0))[:, : text.shape[1]]
            return 20 * torch.nn.functional.one_hot(near, 256).float()

    right, wrong = (evaluation.needles(Copies(back)) for back in (1023, 1022))
    assert [row["kind"] for row in right] == list(FORMS)
    for row in right:
        assert row["distance"] == 1024 and row["questions"] == 2 * quality_needles.NEEDLES
        assert (row["accuracy"], row["kept_by_any_head"]) == (1.0, 0.0) and row["bits"] < 1e-3
    assert all(row["accuracy"] < 1 for row in wrong)


def test_runs_say_what_they_read(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = train(corpus, tmp_path, "sliding", tasks=1)
    assert log["final"]["needles"] == []  # no needle fits a sequence of 512 bytes
    names = [row["task"] for row in log["final"]["tasks"]]
    assert names == 2 * ["capacity"] + 3 * ["overwritten"] + 4 * ["chains"] + list(NIAH)
    assert all(0 < row["bits"] < 30 and row["texts"] == 1 for row in log["final"]["tasks"])
    assert sum(row["bytes"] for row in log["final"]["by_repetition"]) == 2 * LENGTH
    (first, row) = quality_results.join([tmp_path / "sliding-tiny-0.json"], "none")
    assert row["sha256"] == log["sha256"] and len(set(log["sha256"].values())) == 2
    assert "by_repetition" not in row["held_out"][0]
    text = (corpus / "corpus.bin").read_bytes()
    (corpus / "corpus.bin").write_bytes(text[::-1])
    refusal = refusal_of(capsys, corpus, tmp_path, "sliding", "--resume", steps=6)
    assert "was trained on another text" in refusal
    refusal = refusal_of(capsys, corpus, tmp_path, "sliding", tasks=-1)
    assert "--tasks: is -1, want 0 or more" in refusal


def test_repetitions_are_compared() -> None:
    settings = {"corpus": "corpus", "length": 512}
    classes = [{"to": 0, "bits": 2.0}, {"to": 256, "bits": 1.0}]
    runs = {
        "full": {"settings": settings, "final": {"by_repetition": classes}},
        "newest": {
            "settings": settings,
            "final": {"by_repetition": [{"to": 0, "bits": 2.0}, {"to": 256, "bits": 1.1}]},
        },
        "older": {"settings": settings, "final": {}},
    }
    table = quality_results.by_repetition(runs, "full")
    assert table[0] == "| run | repeat nothing | to 256 bytes back |"
    assert table[2:] == [
        "| full | 2.0000 | 1.0000 |",
        "| newest | 2.0000 (+0.0 %) | 1.1000 (+10.0 %) |",
    ]
    other = json.loads(json.dumps(runs))
    other["full"]["sha256"], other["newest"]["sha256"] = {"corpus": "a"}, {"corpus": "b"}
    assert len(quality_results.by_repetition(other, "full")) == 3
