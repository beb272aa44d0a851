"""Pictures: what is drawn is what queries keep, and the probabilities that they give."""

from __future__ import annotations

import doctest
import re
import sys
from pathlib import Path
from typing import Any

import flash_dmattn
import pytest
import torch
from programs import ROOT, output_of, python

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("agg")
from flash_dmattn import pictures  # noqa: E402
from matplotlib import pyplot  # noqa: E402

WINDOW, RECENT, KV_LEN = 5, 3, 60
SCORES = torch.randn(2, 3, KV_LEN, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def close_figures() -> Any:
    yield
    pyplot.close("all")


def bars_of(axes: Any) -> list[tuple[float, float, float, tuple[float, ...]]]:
    """First and last position, row and colour of each bar."""
    (bars,) = axes.collections
    found = []
    for path, colour in zip(bars.get_paths(), bars.get_facecolors()):
        low, high = path.vertices.min(0), path.vertices.max(0)
        assert high[1] - low[1] == 1
        found.append((low[0], high[0], (low[1] + high[1]) / 2, tuple(colour)))
    return found


def kept_by_sorting(scores: torch.Tensor, p: int) -> set[int]:
    """The keys of the query at position p: the newest, and the best of the others."""
    newest = set(range(max(0, p + 1 - RECENT), p + 1))
    others = [j for j in range(p + 1) if j not in newest]
    return newest | set(sorted(others, key=lambda j: (-scores[j], -j))[:WINDOW])


def test_bars_are_over_the_positions_that_keep_the_key() -> None:
    selection = flash_dmattn.select(SCORES, WINDOW, recent=RECENT)
    bars = bars_of(selection.plot(batch=1, kv_head=2))
    for p in range(KV_LEN):
        drawn = {int(row) for begin, end, row, _ in bars if begin <= p < end}
        assert drawn == kept_by_sorting(SCORES[1, 2], p)


def test_keys_of_a_slot_follow_one_another() -> None:
    selection = flash_dmattn.select(SCORES, WINDOW, recent=RECENT)
    axes = selection.plot(rows="slots", slot=4)
    bars = sorted((row, begin, end, colour) for begin, end, row, colour in bars_of(axes))
    assert {row for row, *_ in bars} == set(range(WINDOW + RECENT))
    for (row, _, end, _), (next_row, begin, _, _) in zip(bars, bars[1:]):
        assert row != next_row or begin >= end
    red = matplotlib.colors.to_rgba(pictures.MARK)
    assert {row for row, *_, colour in bars if colour == red} == {4}
    assert {colour for row, *_, colour in bars if row == 4} == {red}


def test_in_global_scope_bars_are_over_all_positions() -> None:
    axes = flash_dmattn.select(SCORES, WINDOW, scope="global").plot()
    best = set(SCORES[0, 0].topk(WINDOW).indices.tolist())
    assert {row for _, _, row, _ in bars_of(axes)} == best
    assert {(begin, end) for begin, end, _, _ in bars_of(axes)} == {(0, KV_LEN)}


def test_probabilities() -> None:
    probabilities = torch.zeros(1, 2, 3, 4)
    probabilities[0, 1, 0, 0] = 1
    probabilities[0, 1, 2] = torch.tensor([0.5, 0.499999, 1e-6, 0])
    axes = pictures.plot_probabilities(probabilities, head=1, texts=["the", "key", "of", "4"])
    shown = axes.images[0].get_array()
    assert shown.mask.tolist() == (probabilities[0, 1] == 0).tolist()  # white
    assert shown[2, 0] == 0.5 and shown[2, 2] == pytest.approx(1e-4)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["the", "key", "of", "4"]
    with_nan = pictures.plot_probabilities(torch.full((1, 1, 2, 2), torch.nan))
    assert with_nan.images[0].get_array().mask.all()


def test_given_axes_are_drawn_into_and_stored(tmp_path: Path) -> None:
    figure, (left, right) = pyplot.subplots(1, 2)
    texts = [str(j) for j in range(KV_LEN)]
    assert flash_dmattn.select(SCORES, WINDOW).plot(axes=left, texts=texts) is left
    assert [x.get_text() for x in left.get_yticklabels()] == texts
    assert pictures.plot_probabilities(torch.ones(1, 1, 4, 4), axes=right) is right
    figure.savefig(tmp_path / "picture.png")
    pixels = pyplot.imread(tmp_path / "picture.png")
    assert len({tuple(pixel) for row in pixels for pixel in row}) > 20


@pytest.mark.parametrize("thing", [flash_dmattn.Selection.plot, pictures.plot_probabilities])
def test_examples(thing: Any) -> None:
    names = {"torch": torch, "flash_dmattn": flash_dmattn}
    (found,) = doctest.DocTestFinder().find(thing, globs=names)
    result = doctest.DocTestRunner().run(found)
    assert result.failed == 0 and result.attempted > 2


SELECTION = flash_dmattn.select(SCORES, WINDOW)
MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"batch": 2}, ValueError, "batch: is 2, want 0 to 1; the number of sequences is 2"),
    ({"batch": "0"}, TypeError, "batch: is '0', a str, want an int"),
    ({"kv_head": -1}, ValueError, "kv_head: is -1, want 0 to 2; the number of kv heads is 3"),
    ({"rows": "queries"}, ValueError, "rows: is 'queries', want 'keys' or 'slots'"),
    ({"slot": WINDOW}, ValueError, "slot: is 5, want 0 to 4; the number of slots is 5"),
    ({"texts": ["a"]}, ValueError, "texts: has 1 text, want 60, one for each key"),
    ({"texts": "abc"}, TypeError, "texts: is 'abc', a str, want a list of str"),
    ({"axes": 1}, TypeError, "axes: is 1, an int, want matplotlib's Axes"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), MISTAKES)
def test_mistakes(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as refused:
        SELECTION.plot(**arguments)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (None, TypeError, "probabilities: is None, want a torch.Tensor"),
        (torch.ones(3, 3), ValueError, "probabilities: rank is 2, want 4"),
    ],
)
def test_mistakes_in_probabilities(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as refused:
        pictures.plot_probabilities(value)
    assert str(refused.value).startswith(message)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="^pictures need matplotlib: pip install matplotlib$"):
        SELECTION.plot()


def test_the_figure_of_the_documents(tmp_path: Path) -> None:
    out = tmp_path / "lifetimes.svg"
    shown = output_of(python(ROOT / "tools" / "plot_lifetimes.py", "--out", out, "--window", "16"))
    groups = re.findall(r'<g id="PolyCollection_\d">(.*?)</g>', out.read_text(), re.DOTALL)
    left, right = (group.count("<path") for group in groups)
    assert left == right > 16 and shown == ""
