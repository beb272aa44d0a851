"""research/quality_options.py: command lines that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from quality_cases import KEYS, LENGTH, refusal_of

TAUGHT = "recent --score-targets=all"


@pytest.mark.parametrize(
    "words, message",
    [
        (f"recent --recent={KEYS}", f"--recent: is {KEYS}, want 0 to {KEYS - 1}, below --keys"),
        ("recent --batch=0", "--batch: is 0, want 1 or more"),
        ("recent --sliding-heads=2", "--sliding-heads: is 2, want 0 to 1, the kv heads"),
        ("recent --score-layers=0", "--score-layers: is 0, want 1 or more"),
        ("recent --sliding-heads=1 --score-layers=2", "want one of the two"),
        ("recent --shortest-span=63", f"--shortest-span: is 63, want 64 to {LENGTH}"),
        ("recent --length=255", "--length: is 255, want 256 or more"),
        ("recent --length=5000", "held_out.bin is shorter than a sequence of 5000 bytes"),
        ("recent --nope-heads=2", "--nope-heads: is 2, want 0 to 1, the kv heads"),
        ("recent --nope-layers=1", "--nope-layers: is given without --nope-heads"),
        ("recent --nope-keys=200", "--nope-keys: is given without --nope-heads"),
        ("recent --nope-heads=1 --nope-keys=16", "--nope-keys: is 16, want 17 or more"),
        ("recent --nope-heads=1 --nope-keys=19 --sinks=4", "--nope-keys: is 19, want 20 or more"),
        ("sliding --nope-heads=1 --nope-keys=0", "--nope-keys: is 0, want 1 or more"),
        ("dense --nope-heads=1 --nope-keys=99", "--nope-keys: is given with --form dense"),
        ("recent --nope-recent=2", "--nope-recent: is given without --nope-heads"),
        ("recent --nope-heads=1 --nope-recent=2", "--nope-recent: is given without --nope-keys"),
        (
            "sliding --nope-heads=1 --nope-keys=99 --nope-recent=2",
            "--nope-recent: is given without --nope-keys and a form with newest keys",
        ),
        ("recent --nope-heads=1 --nope-keys=99 --nope-recent=-1", "is -1, want 0 or more"),
        ("recent --nope-heads=1 --nope-keys=99 --nope-recent=99", "--nope-keys: is 99, want 100"),
        ("recent --select-start=2", "--select-start: is given without --nope-heads"),
        ("recent --nope-heads=1 --select-start=2", "is given without --nope-keys"),
        (
            "recent --nope-heads=1 --nope-keys=99 --select-start=4",
            "--select-start: is 4, want 0 or more, below --steps",
        ),
        ("recent --nope-heads=1 --nope-keys=99 --select-start=-1", "--select-start: is -1, want 0"),
        ("recent --nope-a=0", "--nope-a: is given without --nope-heads"),
        ("recent --nope-rate=0.1", "--nope-rate: is given without --nope-heads"),
        ("recent --nope-a-rate=0.1", "--nope-a-rate: is given without --nope-heads"),
        ("recent --nope-heads=1 --nope-layers=2", "--nope-layers: is 2, want 0 to 1"),
        ("recent --nope-heads=1 --nope-rate=-1", "--nope-rate: is -1.0, want 0 to 1"),
        ("recent --nope-heads=1 --nope-a-rate=2", "--nope-a-rate: is 2.0, want 0 to 1"),
        ("recent --nope-heads=1 --nope-rotary-dim=3", "is 3, want an even number"),
        ("dense --nope-heads=1 --nope-a=1", "--nope-a: is given with --form dense"),
        ("random --nope-heads=1 --nope-rate=1", "--nope-rate: is given with --form random"),
        ("recent --hidden-rate=-1", "--hidden-rate: is -1, want 0 or more"),
        ("recent --start-step=2", "--start-step: is given without --start"),
        ("recent --new-scores", "--new-scores: is given without --start"),
        ("recent --start=x --start-step=4", "is 4, want 0 or more, below 4"),
        ("recent --start=x --start-step=-1", "is -1, want 0 or more, below 4"),
        ("dense --start=x --new-scores", "--form dense, which has no scores"),
        ("sliding --start=x --new-scores", "--form sliding, which has no scores"),
        ("recent --target-rate=1", "--target-rate: is given without --score-targets"),
        (
            "random-recent --score-targets=all",
            "--score-targets: is given with --form random-recent",
        ),
        ("recent --score-targets=nope", "--score-targets: is nope, want heads that learn scores"),
        (f"{TAUGHT} --sliding-heads=1", "--score-targets: is all, want heads that learn scores"),
        (f"{TAUGHT} --score-layers=9", "--score-targets: is all, want heads that learn scores"),
        (f"{TAUGHT} --initial-a=0", "--initial-a: is 0, want above 0, as A is not trained"),
        (f"{TAUGHT} --nope-heads=1 --nope-a=-1", "--nope-a: is -1, want above 0"),
        (f"{TAUGHT} --nope-heads=1 --nope-rate=0.1", "--nope-rate: is given with --score-targets"),
        (f"{TAUGHT} --target-start=-1", "--target-start: is -1, want 0 or more"),
        (f"{TAUGHT} --target-every=0", "--target-every: is 0, want 1 or more"),
        (f"{TAUGHT} --target-rate=-1", "--target-rate: is -1, want 0 or more"),
        (f"{TAUGHT} --keys=600 --recent=512", "--length: is 512, want more than --recent"),
        (f"{TAUGHT} --target-recent=512", "--length: is 512, want more than --target-recent"),
        (f"{TAUGHT} --target-recent=-1", "--target-recent: is -1, want 0 or more"),
        ("recent --target-recent=8", "--target-recent: is given without --score-targets"),
    ],
)
def test_bad_usage(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert message in refusal_of(capsys, corpus, tmp_path, *words.split())


@pytest.mark.parametrize(
    "words, message",
    [
        ("recent", "give --steps or --seconds"),
        (
            "recent --seconds=9 --nope-heads=1 --nope-keys=99 --select-start=2",
            "--select-start: is given without --steps",
        ),
        ("recent --start=x --start-step=1", "--start-step: is given without --steps"),
    ],
)
def test_without_steps(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert message in refusal_of(capsys, corpus, tmp_path, *words.split(), steps=None)
