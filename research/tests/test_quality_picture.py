"""research/quality_results.py --against, quality_kept.py and quality_picture.py --readme, on
made-up results, with answers computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import quality_kept
import quality_picture
import quality_results
from quality_cases import call, refusal
from quality_kept import Head, Kept

LENGTH = 4096
TEXT = "".join(chr(97 + byte % 26) for byte in range(LENGTH))  # a to z, over and over


def settings(form: str, **changed: Any) -> dict[str, Any]:
    own = {"form": form, "size": "tiny", "keys": 8, "recent": 2, "seed": 0, "steps": 100}
    return {**own, "bias_form": "exp", "length": LENGTH, "corpus": "corpus", **changed}


def result(name: str, pieces: list[float], form: str = "recent", **changed: Any) -> dict[str, Any]:
    """A line of a joined file."""
    bits = sum(pieces) / len(pieces)
    final = {"bits": bits, "of_pieces": pieces}
    final["recall"] = [
        {"pairs": 8, "distance": distance, "accuracy": 0.5} for distance in (256, 512)
    ]
    held_out = [{"step": step, "seconds": step / 4, "bits": bits} for step in (50, 100)]
    own = settings(form, **changed)
    return {"run": name, "settings": own, "held_out": held_out, "final": final}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    lines = [{"machine": "a machine"}, *rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# ---- quality_results.py --against ----


def test_differences_of_pieces() -> None:
    """They are 0.1, 0.3 and 0.2: their standard deviation is 0.1, though losses differ by 2."""
    base = result("base", [1.0, 2.0, 3.0], "dense")
    mean, error = quality_results.paired(result("other", [1.1, 2.3, 3.2]), base)
    assert mean == pytest.approx(0.2) and error == pytest.approx(0.1 / 3**0.5)
    assert quality_results.paired(result("fewer", [1.0, 2.0]), base) is None
    del base["final"]["of_pieces"]
    assert quality_results.paired(result("other", [1.1, 2.3, 3.2]), base) is None


def test_tables_against_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = result("old", [2.5], sinks=4)
    del old["final"]["of_pieces"]
    path = write(
        tmp_path / "joined.json",
        result("base", [1.0, 2.0, 3.0], "dense"),
        result("a", [1.1, 2.3, 3.2]),
        result("b", [0.9, 1.7, 2.8], seed=1, score_layers=None, start=None),
        old,
        result("elsewhere", [4.0, 4.0, 4.0], corpus="another"),
        result("longer", [1.1, 2.3, 3.2], steps=200),
    )
    call(quality_results, path, "--against", "base")
    assert capsys.readouterr().out.splitlines() == [
        "| run | steps | loss | against base | paired difference | its error |",
        "| --- | --- | --- | --- | --- | --- |",
        "| base | 100 | 2.0000 | | | |",
        "| a | 100 | 2.2000 | +10.00 % | +0.2000 | 0.0577 |",
        "| b | 100 | 1.8000 | -10.00 % | -0.2000 | 0.0577 |",
        "| old | 100 | 2.5000 | +25.00 % | | |",
        "| elsewhere | 100 | 4.0000 | | | |",
        "| longer | 200 | 2.2000 | +10.00 % | +0.2000 | 0.0577 |",
        "",
        "| runs | seeds | mean loss | standard deviation |",
        "| --- | --- | --- | --- |",
        "| a, b | 0, 1 | 2.0000 | 0.2828 |",  # 0.2 x the root of 2
    ]
    call(quality_results, write(path, old), "--against", "old")
    assert "seeds" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="base is not in .*joined.json, want one of old"):
        call(quality_results, path, "--against", "base")


@pytest.mark.parametrize("words", [[], ["RUN", "--against", "base"]])
def test_runs_are_joined_or_compared(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "joined.json", result("base", [1.0, 2.0]))
    message = "give files of runs, or else --against"
    assert message in refusal(capsys, quality_results, path, *words)


# ---- quality_kept.py ----


def kept_run() -> dict[str, Any]:
    """Two layers of two kv heads. Head 0.1 keeps 0, head 1.0 six bytes from 2,000 on, 32 apart, and
    all heads keep the newest two."""
    newest = [LENGTH - 2, LENGTH - 1]
    spread = [2000 + 32 * number for number in range(6)]
    last_query = [[newest, [0, *newest]], [[*spread, *newest], newest]]
    values = [
        {"distance": 256, "by_head": [[0.9, 0.1], [0.5, 0.0]]},
        {"distance": 512, "by_head": [[0.1, 0.2], [0.4, 0.0]]},
    ]
    run = result("made-up", [1.0, 2.0])
    run["final"]["kept"] = {"text": TEXT, "last_query": last_query, "values": values}
    return run


def test_what_is_kept() -> None:
    kept = Kept(kept_run())
    assert kept.best_head() == Head(1, 0)
    densities = kept.densities()
    assert densities.shape == (4, 128)
    assert densities[:, -1].tolist() == [2 / 32] * 4
    assert densities[1, :2].tolist() == [1 / 32, 0]
    assert densities[2].nonzero()[0].tolist() == [62, 63, 64, 65, 66, 67, 127]


def test_the_excerpt_with_most_kept_bytes() -> None:
    """Among excerpts with as many, the first one counts; the newest keys do not count."""
    kept = Kept(kept_run())
    assert kept.fullest([Head(1, 0)], 161) == 2000
    assert kept.fullest([Head(1, 0)], 200) == 1961
    assert kept.fullest([Head(0, 1)], 100) == 0
    assert kept.fullest([Head(1, 1)], 100) == 0
    assert kept.fullest([Head(1, 0)], 2 * LENGTH) == 0


def drawn_letters(figure: Any) -> list[str]:
    """The marked letters of each excerpt; its other letters are grey."""
    excerpts = [axes for axes in figure.axes if axes.get_xlim() == (0, quality_kept.COLUMNS)]
    return [
        "".join(text.get_text() for text in axes.texts if text.get_color() == "white")
        for axes in excerpts
    ]


def test_kept_bytes_are_marked() -> None:
    heads = [Head(1, 0), Head(0, 1), Head(0, 0)]
    figure = quality_kept.draw("made-up", kept_run(), heads, 1999)
    marked = "".join(TEXT[2000 + 32 * number] for number in range(6))
    assert drawn_letters(figure) == [marked, "", ""]
    figure = quality_kept.draw("made-up", kept_run(), heads, LENGTH - 3)
    assert drawn_letters(figure) == [TEXT[-2:]] * 3
    quality_kept.pyplot.close("all")


def test_picture_of_kept_keys(tmp_path: Path) -> None:
    drawn = []
    for name in ("a.svg", "b.svg"):
        source, out = tmp_path / "made-up.json", tmp_path / name
        source.write_text(json.dumps(kept_run()))
        call(quality_kept, source, "--to", out, "--heads", "1.0")
        drawn.append(out.read_bytes())
    assert drawn[0] == drawn[1]
    assert quality_kept.COLOUR.lower().encode() in drawn[0]
    for words, message in (
        (["--heads", "2.0"], "--heads: is 2.0, want 0.0 to 1.1"),
        (["--begin", LENGTH], f"--begin: is {LENGTH}, want 0 to {LENGTH - 1}"),
        (["--run", "other"], "other is not in the files, want one of made-up"),
    ):
        with pytest.raises(SystemExit, match=message):
            call(quality_kept, source, "--to", tmp_path / "c.svg", *words)
    joined = write(tmp_path / "joined.json", result("one", [1.0]), result("two", [1.0]))
    with pytest.raises(SystemExit, match="two: has no kept keys"):
        call(quality_kept, joined, "--run", "two", "--to", tmp_path / "c.svg")
    assert not (tmp_path / "c.svg").exists()


@pytest.mark.parametrize(
    "words, message",
    [
        (["--heads", "1"], "is 1, want LAYER.HEAD"),
        (["--heads", "1.x"], "is 1.x, want LAYER.HEAD"),
        (["--begin", "-1"], "--begin: is -1, want 0 or more"),
        ([], "--run: is not given, want one of one, two"),
    ],
)
def test_bad_usage_of_the_picture_of_kept_keys(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    joined = write(tmp_path / "joined.json", result("one", [1.0]), result("two", [1.0]))
    assert message in refusal(capsys, quality_kept, joined, "--to", tmp_path / "c.svg", *words)


# ---- quality_picture.py ----


def test_runs_have_the_order_and_labels_that_are_asked_for() -> None:
    runs = {name: result(name, [1.0, 2.0]) for name in ("a", "b", "c")}
    chosen = quality_picture.named(runs, ["c", "a=a label = b"])
    labels = {name: quality_picture.label_of(run) for name, run in chosen.items()}
    assert list(labels.items()) == [("c", "6 by score, 2 newest"), ("a", "a label = b")]
    assert "label" not in runs["a"]
    with pytest.raises(ValueError, match="d is not in the files, want one of a, b, c"):
        quality_picture.named(runs, ["d=label"])


BY_SCORE = "6 by score, 2 newest"
STILL = {"nope_heads": 2, "nope_a_rate": 0.0, "start_step": 50, "new_scores": True}
FORMLESS = {"nope_a": 0.5, "bias_form": "linear", **STILL}
LABELS = [
    ("recent", {"optimizer": "adamw", "hidden_rate": 1.0, "qk_norm": False}, BY_SCORE),
    ("recent", {"score_layers": 4, "sliding_heads": 0}, f"{BY_SCORE}, in 1 of 4 layers"),
    ("recent", {"score_layers": None, "sliding_heads": 3}, f"{BY_SCORE}, sliding heads: 3"),
    (
        "recent",
        {"nope_heads": 2, "nope_layers": [1, 3], "nope_rotary_dim": 32, "nope_rate": 0.1},
        f"{BY_SCORE}, NoPE heads: 2 in layers 1, 3, 32 channels rotated, their rate x 0.1",
    ),
    ("recent", {"nope_heads": 2, "nope_a": 0.005}, f"{BY_SCORE}, NoPE heads: 2"),
    (
        "recent",
        {"optimizer": "muon", "hidden_rate": 3.0, "qk_norm": True},
        f"{BY_SCORE}, optimizer muon, rate of matrices x 3, QK-norm",
    ),
    (
        "recent",
        STILL,
        f"{BY_SCORE}, NoPE heads: 2, new scores, rate of their A x 0, from step 50",
    ),
    ("dense", FORMLESS, "dense, NoPE heads: 2, new scores, from step 50"),
    ("sliding", FORMLESS, "8 newest, NoPE heads: 2, new scores, from step 50"),
    (
        "recent",
        {"score_targets": "all", "target_every": 8, "target_rate": 1.0},
        f"{BY_SCORE}, targets, every 8 steps",
    ),
    (
        "recent",
        {"initial_a": 1.0, "shortest_span": 1024, "sinks": 0},
        f"{BY_SCORE}, A from 1, episodes from 1024",
    ),
    (
        "random-recent",
        {"initial_a": 1.0, "shortest_span": 1024},
        "6 at random, 2 newest, episodes from 1024",
    ),
]


@pytest.mark.parametrize(("form", "changed", "label"), LABELS)
def test_labels(form: str, changed: dict[str, Any], label: str) -> None:
    assert quality_picture.label_of(result("a", [1.0], form, **changed)) == label


def test_labels_have_lines_of_their_own() -> None:
    kinds = ({"score_layers": 4}, {"sliding_heads": 3}, {"initial_a": 1.0}, {"score_layers": 4})
    runs = {str(number): result("a", [1.0], **kind) for number, kind in enumerate(kinds)}
    styles = quality_picture.lines_of(runs)
    assert len(styles) == len({tuple(style.values()) for style in styles.values()}) == 3


def test_picture_of_the_readme(tmp_path: Path) -> None:
    joined = write(
        tmp_path / "joined.json", result("one", [1.0], "dense"), result("two", [1.5], "sliding")
    )
    out = tmp_path / "readme.svg"
    call(quality_picture, joined, "--readme", out, "--runs", "two=a window")
    drawn = out.read_text()
    assert quality_picture.COLOURS[0].lower() in drawn
    assert "<!-- a window -->" in drawn and "<!-- dense -->" not in drawn
    left, right = quality_picture.draw_readme({"one": result("one", [1.0], "dense")}, 8).axes
    assert left.get_lines()[0].get_xydata().tolist() == [[12.5, 1.0], [25.0, 1.0]]
    assert right.get_lines()[0].get_xydata().tolist() == [[256, 0.5], [512, 0.5]]
    quality_picture.pyplot.close("all")


def test_a_picture_needs_a_file_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "give --to or --readme" in refusal(capsys, quality_picture, tmp_path / "joined.json")
