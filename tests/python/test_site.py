"""The pages of the site: links of the repository lead to them, names of the interface lead to where
they are described, and tools/site/check_site.py finds what is wrong with a page. The gate `site`
builds all of it."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from programs import ROOT


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    pytest.importorskip("onnxscript")
    pytest.importorskip("jax")
    sys.path += [str(ROOT / "tools"), str(ROOT / "tools" / "site")]
    return importlib.import_module("site_pages")


@pytest.fixture(scope="module")
def check() -> ModuleType:
    sys.path.append(str(ROOT / "tools" / "site"))
    return importlib.import_module("check_site")


MOVED = [  # path in the site, file, a link of the file, the link of the page
    ("index.md", "README.md", "[a](docs/c.md#threads)", "[a](c.md#threads)"),
    ("c.md", "docs/c.md", "[a](../README.md#limits)", "[a](index.md#limits)"),
    ("c.md", "docs/c.md", "[a](../include/fdma.h)", "[a](source/include/fdma.h.md)"),
    (
        "c.md",
        "docs/c.md",
        "[a](../examples/data/minilm.safetensors)",
        "[a](source/examples/data/minilm.safetensors)",
    ),
    ("c.md", "docs/c.md", "[a](../benchmarks/results)", "a"),
    ("c.md", "docs/c.md", "[a](#b) [a](https://c.d/e)", "[a](#b) [a](https://c.d/e)"),
    ("research/studies.md", "research/studies.md", "![a](../docs/figures/train.svg)", None),
    (
        "api_reference.md",
        "docs/api_reference.md",
        "[`select`](../python/flash_dmattn/functional.py)",
        "[`select`](reference/flash_dmattn.md#select)",
    ),
]


@pytest.mark.parametrize(("path", "file", "link", "moved"), MOVED)
def test_links_move(pages: ModuleType, path: str, file: str, link: str, moved: str | None) -> None:
    assert pages.Site().move_links(link, path, file) == (moved or "![a](../figures/train.svg)")


def test_files_that_are_linked_are_written(
    pages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "OUT", tmp_path)
    site = pages.Site()
    text = "[a](../include/fdma.h) [b](../benchmarks/results/cuda.json) `fdma_select()`"
    site.write_page("c.md", "docs/c.md", f"{text}\n\n```c\nfdma_select(); [a](b.md)\n```\n")
    site.write_linked()
    written = (tmp_path / "c.md").read_text()
    assert "[`fdma_select()`](reference/fdma.md#fdma_select)" in written
    assert "\nfdma_select(); [a](b.md)\n" in written
    assert "#define FDMA_H" in (tmp_path / "source/include/fdma.h.md").read_text()
    copied = tmp_path / "source/benchmarks/results/cuda.json"
    assert copied.read_bytes() == (ROOT / "benchmarks/results/cuda.json").read_bytes()


def test_names_become_links(pages: ModuleType) -> None:
    def linked(text: str) -> str:
        return pages.link_names(text, "research/index.md")

    assert linked("see `HybridPlan`") == (
        "see [`HybridPlan`](../reference/flash_dmattn.md#HybridPlan)"
    )
    assert linked("as select() does") == (
        "as [`select()`](../reference/flash_dmattn.md#select) does"
    )
    for text in (
        "a `score`",
        "# `HybridPlan`",
        "    HybridPlan()",
        "[`HybridPlan`](x.md)",
        "[a `HybridPlan` of it](x.md)",
        "`no_name()`",
    ):
        assert linked(text) == text


LISTS = [
    ("text\n- a\n  b\n- c\n\n- d\n\n| x |\n- e", "text\n\n- a\n    b\n- c\n\n- d\n\n| x |\n\n- e"),
    ("- a\n\n  | x |\n\n  b\n- c\n- d", "- a\n\n    | x |\n\n    b\n\n- c\n- d"),
    ("- a\nb\n- c\n\nd\n\n  e", "- a\nb\n- c\n\nd\n\n  e"),
]


@pytest.mark.parametrize(("given", "wanted"), LISTS)
def test_lists(pages: ModuleType, given: str, wanted: str) -> None:
    assert pages.list_for_mkdocs(given) == wanted


def test_every_name_is_described(pages: ModuleType) -> None:
    api_pages = pages.api_pages
    texts = api_pages.pages()
    missing = [
        name
        for name, place in api_pages.places().items()
        if not re.search(rf"^##+ .* \{{ #{place.anchor}[ }}]", texts[place.page], re.M)
    ]
    assert missing == [] and len(api_pages.places()) > 120
    assert "`fdma_tensor_2d`" not in texts[api_pages.C_PAGE]
    assert api_pages.places()["fdma_tensor_2d"].anchor == "fdma_tensor_1d"


def test_text_becomes_markdown(pages: ModuleType) -> None:
    given = "scale * <query, key>, `a<b>`\n\n    <code>\n\n```c\n#include <math.h>\n```\n"
    assert pages.api_pages.text_of(given) == given.replace("<query", "&lt;query")
    assert pages.api_pages.text_of("see docs/c.md") == "see [c.md](../c.md)"


SOUND = (
    '<code>**</code><a id="a" href="b.html#c">b</a><a href="https://x.org">x</a><img src="d.png">'
)
FAULTS = [
    ('<a href="e.html"></a>', "a.html links to e.html, which is not there"),
    ('<a href="b.html#e"></a>', "a.html links to b.html#e, which has no such place"),
    ('<a href="#e"></a>', "a.html links to #e, which has no such place"),
    ('<img src="e.png">', "a.html links to e.png, which is not there"),
    ("<p>a [b](c)</p>", "a.html shows Markdown: 'bxa [b](c)'"),
    (
        '<script src="https://x.org/y.js"></script>',
        "a.html loads https://x.org/y.js, want nothing of another host",
    ),
]


def test_faults_of_texts_are_found(check: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text('<p id="c">')
    (tmp_path / "d.png").touch()
    (tmp_path / "a.html").write_text(SOUND)
    assert list(check.text_faults(tmp_path)) == []
    for fault, words in FAULTS:
        (tmp_path / "a.html").write_text(SOUND + fault)
        assert list(check.text_faults(tmp_path)) == [words]
