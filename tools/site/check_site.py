#!/usr/bin/env python3
"""Checks the site in build/site/html, as a reader has it from disk: links, and in Chromium errors
of the console, widths, the search, and the page of the selection against the Python package.

    check_site.py               all checks; the exit status is 1 if any fails
    check_site.py --self-test   show that planted faults are found
    check_site.py --picture     draw docs/figures/selection.png

It needs what `tools/setup.sh gates` installs, and PYTHONPATH and FDMA_LIBRARY as `make test` does.
"""

from __future__ import annotations

import argparse
import html.parser
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site" / "html"
SEARCHES = {  # the page that the search has to name first
    "speculative": "serving.html",
    "sinks": "algorithm.html",
    "onnxruntime": "onnx.html",
    "fdma_decode": "reference/fdma.html",
    "HybridPlan": "reference/flash_dmattn.html",
}
CASES = 1000
LOADS = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src")}
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844), "picture": (1000, 1200)}


UNREAD = re.compile(r"\]\(|\*\*|^- \w|^\| ", re.M)  # Markdown that was not understood
CODE = ("code", "pre", "script", "style")


class Page(html.parser.HTMLParser):
    """The ids of a page, its text outside of code, and what it links to and loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = ""
        self.in_code = 0
        self.ids: set[str] = set()
        self.links: list[tuple[str, bool]] = []  # address, and whether it is loaded with the page
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.in_code += tag in CODE
        values = dict(attrs)
        self.ids |= {values[name] or "" for name in ("id", "name") if name in values}
        for name in ("href", "src"):
            address = values.get(name)
            if address is not None and values.get("rel") != "canonical":
                self.links.append((address, (tag, name) in LOADS))

    def handle_endtag(self, tag: str) -> None:
        self.in_code -= tag in CODE

    def handle_data(self, data: str) -> None:
        self.text += "" if self.in_code else data


def text_faults(site: Path) -> Iterator[str]:
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    for path, page in pages.items():
        name = path.relative_to(site)
        if name.name == "404.html":  # a server shows it, with addresses from the top
            continue
        unread = UNREAD.search(page.text)
        if unread:
            around = page.text[max(0, unread.start() - 40) : unread.end() + 40]
            yield f"{name} shows Markdown: {around!r}"
        for address, is_loaded in page.links:
            if address.startswith(("https:", "http:", "//")):
                if is_loaded:
                    yield f"{name} loads {address}, want nothing of another host"
                continue
            if address.startswith(("mailto:", "data:", "javascript:")):
                continue
            file, anchor = urldefrag(address)
            target = (path.parent / unquote(file)).resolve() if file else path
            if not target.is_file():
                yield f"{name} links to {address}, which is not there"
            elif anchor and target in pages and unquote(anchor) not in pages[target].ids:
                yield f"{name} links to {address}, which has no such place"


class Browser:
    def __init__(self, site: Path = SITE) -> None:
        self.site = site
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        for argument in ("headless=new", "no-sandbox", "disable-gpu", "hide-scrollbars"):
            options.add_argument(f"--{argument}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService("/usr/bin/chromedriver")
        self.driver = webdriver.Chrome(options=options, service=service)
        self.driver.set_script_timeout(60)

    def set_width(self, width: str, scale: int = 1) -> None:
        size = dict(zip(("width", "height"), WIDTHS[width]))
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {**size, "deviceScaleFactor": scale, "mobile": width == "phone"},
        )

    def open(self, name: str) -> None:
        self.driver.get((self.site / name).as_uri())

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, script: str, *arguments: Any) -> Any:
        """The result of a script once it is not null, false or empty; after 20 s whatever it is."""
        for _ in range(400):
            result = self.run(script, *arguments)
            if result:
                break
            time.sleep(0.05)
        return result

    def said(self) -> list[str]:
        """The lines of the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


WIDER = "const page = document.documentElement; return page.scrollWidth - page.clientWidth"


def page_faults(browser: Browser) -> Iterator[str]:
    """The console of every page, and whether a page is wider than a phone."""
    names = sorted(
        path.relative_to(browser.site).as_posix() for path in browser.site.rglob("*.html")
    )
    for width in ("desktop", "phone"):
        browser.set_width(width)
        for name in names:
            if name == "404.html":
                continue
            browser.open(name)
            yield from (f"{name}: the console says {words}" for words in browser.said())
            wide = browser.run(WIDER)
            if wide > 0:
                yield f"{name} is {wide} pixels wider than a {width}"


FOUND = """
const link = document.querySelector(".md-search-result__item a");
const shown = document.querySelector(".md-search-result__meta").textContent;
return /\\d/.test(shown) && link ? link.href.split(/[?#]/)[0] : null;
"""
TYPE = """
const input = document.querySelector("input[name=query]");
document.querySelector("#__search").click();
input.focus();
input.value = arguments[0];
input.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
"""


def search_faults(browser: Browser) -> Iterator[str]:
    browser.set_width("desktop")
    for words, page in SEARCHES.items():
        browser.open("install.html")
        browser.run(TYPE, words)
        first = browser.until(FOUND)
        if first != (browser.site / page).as_uri():
            yield f"the search for {words} finds {first} first, want {page}"
        yield from (f"the search for {words}: the console says {said}" for said in browser.said())


def selection_cases() -> list[dict[str, Any]]:
    """Scores with ties, NaN, infinity and both zeros, rules, and what the package selects."""
    import random

    import flash_dmattn
    import torch

    special = [0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1.0]
    cases = []
    for seed in range(CASES):
        rng = random.Random(seed)
        keys = rng.randint(1, 96)
        window, recent = rng.randint(1, 24), rng.choice([0, rng.randint(0, 24)])
        sinks = rng.choice([0, rng.randint(0, window)])
        drawn = [rng.random() for _ in range(keys)], rng.choices(special, k=keys)
        score = torch.tensor(rng.choice([*drawn, rng.choices([0.25, 0.5, 0.75], k=keys)]))
        selection = flash_dmattn.select(score[None, None], window, recent=recent, sinks=sinks)
        cases.append(
            {
                "scores": [str(x) for x in score.tolist()],  # JSON has no NaN
                "rules": [window, recent, sinks],
                "expiry": selection.expiry.flatten().tolist(),
                "slot": selection.slot.flatten().tolist(),
            }
        )
    return cases


COMPARE = """
const number = {nan: NaN, inf: Infinity, "-inf": -Infinity};
return JSON.parse(arguments[0]).flatMap((want, index) => {
  const scores = Float32Array.from(want.scores, (x) => x in number ? number[x] : Number(x));
  const got = selectKeys(scores, ...want.rules);
  const ranked = scores.every((_, p) =>
    rankAnew(scores, p, ...want.rules).join() === keptKeys(got, p).join());
  const same = ["expiry", "slot"].every((name) => got[name].join() === want[name].join());
  return same && ranked ? [] : [index];
});
"""
SLIDE = """
const page = selectionPage;
const said = new Set();
for (page.sliders.query.value = 0; ; page.sliders.query.value++) {
  page.sliders.query.dispatchEvent(new Event("input"));
  said.add(page.find(".selection-cache").children.length);
  if (page.sliders.query.value === page.sliders.query.max) break;
}
return [[...said], page.value("window") + page.value("recent"), page.agreeing, page.scores.length];
"""


def selection_faults(browser: Browser) -> Iterator[str]:
    browser.set_width("desktop")
    browser.open("selection.html")
    if not browser.until("return Boolean(window.selectionPage)"):
        yield "selection.html: its sliders do not appear within 20 s"
        return
    cases = selection_cases()
    wrong = browser.run(COMPARE, json.dumps(cases))
    if wrong:
        first = {name: cases[wrong[0]][name] for name in ("scores", "rules")}
        yield f"selection.html: {len(wrong)} of {CASES} selections differ, the first of {first}"
    sizes, rows, agreeing, keys = browser.run(SLIDE)
    if sizes != [rows]:
        yield f"selection.html: the cache has {sizes} rows, want {rows} for every query"
    if agreeing != keys:
        yield f"selection.html: ranked anew {agreeing} of {keys} queries agree"
    yield from (f"selection.html: the console says {said}" for said in browser.said())


DRAWN = """
selectionPage.scores.forEach((_, j, scores) => { scores[j] = (j * j * 7 + j * 5) % 31 / 31; });
selectionPage.update();
"""


PLANTS = [  # the check, the file, what stands there, what is planted, words of the fault
    (
        page_faults,
        "selection.html",
        "</body>",
        "<script>planted()</script>",
        "planted is not defined",
    ),
    (page_faults, "selection.html", "</body>", '<p style="width: 2000px">x', "pixels wider"),
    (selection_faults, "site/selection.js", "j > r);", "j < r);", "selections differ"),
    (selection_faults, "site/selection.js", "const rows =", "const rows = 1 +", "want 10 for"),
]


def draw_picture(browser: Browser) -> None:
    """The picture that stands for the page where it has no sliders."""
    browser.set_width("picture")
    browser.open("selection.html")
    browser.until("return Boolean(window.selectionPage)")
    browser.run(DRAWN)
    element = browser.driver.find_element("id", "selection")
    (ROOT / "docs" / "figures" / "selection.png").write_bytes(element.screenshot_as_png)


def planted_faults() -> Iterator[str]:
    """Planted faults that no check finds, in copies of a part of the site."""
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder).resolve()
        for name in ("assets", "site"):
            shutil.copytree(SITE / name, site / name)
        browser = Browser(site)
        for check, name, sound, fault, words in PLANTS:
            for part in {"selection.html", "site/selection.js", name}:
                shutil.copy(SITE / part, site / part)
            text = (site / name).read_text(encoding="utf-8")
            (site / name).write_text(text.replace(sound, fault, 1), encoding="utf-8")
            if sound not in text or not any(words in found for found in check(browser)):
                yield f"{fault} in {name} is not found"
        browser.driver.quit()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", action="store_true", help="draw docs/figures/selection.png")
    parser.add_argument("--self-test", action="store_true", help="look for planted faults")
    given = parser.parse_args()
    if given.self_test:
        missed = list(planted_faults())
        print("\n".join(missed) or f"site: {len(PLANTS)} planted faults are found")
        return 1 if missed else 0
    browser = Browser()
    try:
        if given.picture:
            draw_picture(browser)
            return 0
        faults = list(text_faults(SITE))
        for check in (page_faults, search_faults, selection_faults):
            faults += check(browser)
    finally:
        browser.driver.quit()
    for fault in faults:
        print(f"fails: {fault}")
    print(f"site: {len(faults)} differences")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
