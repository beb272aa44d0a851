#!/usr/bin/env python3
"""Writes the pages of the site to build/site/pages: the pages of docs/, others that stand
elsewhere, such as README.md, the API reference, and files that pages link to. Links go from page to
page, and names of the interface link to where they are described. tools/site/build.sh makes a site
of them.

It needs the package and its library: set PYTHONPATH and FDMA_LIBRARY as `make test` does.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

import api_pages

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "site" / "pages"
ELSEWHERE = {  # pages outside of docs/, by their paths in the repository
    "README.md": "index.md",
    "README_zh.md": "readme_zh.md",
    "CONTRIBUTING.md": "contributing.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
    "CHANGELOG.md": "changelog.md",
    "research/README.md": "research/index.md",
    "research/studies.md": "research/studies.md",
    "examples/data/README.md": "examples/data.md",
}
MODULE = ROOT / "build" / "site" / "selection.wasm.js"  # compiled by tools/site/build.sh
LANGUAGES = {".py": "python", ".c": "c", ".h": "c", ".cff": "yaml", ".yml": "yaml", ".sh": "sh"}
TEXTS = {*LANGUAGES, ".md", ".txt", ".toml", ".cmake", ""}  # suffixes of files that become pages
WIDE = "---\nhide:\n  - navigation\n---\n\n"  # no other page stands beside the first one
SOURCE = """---
search:
  exclude: true
hide:
  - toc
---

# {name}

`````{language}
{text}
`````
"""
FENCE = re.compile(r"^(```.*?^```[ \t]*$)", re.M | re.S)
LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?!https?:|#)(?P<target>[^)\s#]+)(?P<anchor>#[^)]*)?\)")
A_LINK = re.compile(r"(\[[^\]]*\]\([^)]*\))")
NAME = re.compile(r"(?<![\w.`\[])(?:`(?P<code>\w+)(?:\(\))?`|(?P<call>\w+)\(\))(?![\w`\]])")


def outside_of_code(change: Callable[[str], str], text: str) -> str:
    parts = FENCE.split(text)
    parts[::2] = map(change, parts[::2])
    return "".join(parts)


def place_of(file: str) -> str | None:
    """The path in the site of a file of the repository; None of a folder."""
    if file.startswith("docs/"):
        return file[len("docs/") :]
    if file in ELSEWHERE:
        return ELSEWHERE[file]
    if not (ROOT / file).is_file():
        return None
    return f"source/{file}.md" if Path(file).suffix in TEXTS else f"source/{file}"


def from_page(path: str, target: str) -> str:
    return posixpath.relpath(target, posixpath.dirname(path) or ".")


def link_names(text: str, path: str) -> str:
    """Makes links of the names in lines of text, but not in headings and indented code."""
    places = api_pages.places()

    def link(match: re.Match[str]) -> str:
        name, written = match["code"] or match["call"], match[0].strip("`")
        is_special = "_" in name or name != name.lower()  # `score` alone may be anything
        if name not in places or not (is_special or written.endswith("()")):
            return match[0]
        place = places[name]
        return f"[`{written}`]({from_page(path, place.page)}#{place.anchor})"

    def link_all(line: re.Match[str]) -> str:
        parts = A_LINK.split(line[0])
        parts[::2] = (NAME.sub(link, part) for part in parts[::2])
        return "".join(parts)

    return re.sub(r"^(?!#| {4}).*", link_all, text, flags=re.M)


def list_for_mkdocs(text: str) -> str:
    """Lists as MkDocs reads them: an empty line before a list, and before each item that follows a
    paragraph of its list; further paragraphs of an item are four columns further right, not two."""
    lines: list[str] = []
    in_list, has_paragraphs = False, False
    for line in text.split("\n"):
        if line.startswith("- "):
            if lines and lines[-1] and (has_paragraphs or not in_list):
                lines.append("")
            in_list, has_paragraphs = True, False
        elif line and not line.startswith(" "):
            in_list = in_list and bool(lines[-1])
        elif in_list:
            has_paragraphs |= bool(line) and not lines[-1]
            line = f"  {line}" if line else ""
        lines.append(line)
    return "\n".join(lines)


class Site:
    def __init__(self) -> None:
        self.linked: dict[str, str] = {}  # path in the site of each file that pages link to

    def move_links(self, text: str, path: str, file: str) -> str:
        """Links of a file of the repository, as they are in its page at `path`."""
        places = api_pages.places()

        def move(match: re.Match[str]) -> str:
            words, anchor = match["text"], match["anchor"] or ""
            name = words.strip("[]`")
            target = posixpath.normpath(posixpath.join(posixpath.dirname(file), match["target"]))
            if target.startswith("python/") and name in places:
                place, anchor = places[name].page, f"#{places[name].anchor}"
            else:
                place = place_of(target)
                if place is None:
                    return words[1:-1]
                self.linked[target] = place
            return f"{words}({from_page(path, place)}{anchor})"

        return LINK.sub(move, text)

    def write(self, path: str, text: str) -> None:
        (OUT / path).parent.mkdir(parents=True, exist_ok=True)
        (OUT / path).write_text(text, encoding="utf-8")

    def write_page(self, path: str, file: str, text: str) -> None:
        def change(part: str) -> str:
            return link_names(list_for_mkdocs(self.move_links(part, path, file)), path)

        self.write(path, (WIDE if path == "index.md" else "") + outside_of_code(change, text))

    def write_linked(self) -> None:
        """The files that pages link to and that are no pages: sources as pages, data as it is."""
        for file, path in self.linked.items():
            if not path.startswith("source/"):
                continue
            if Path(file).suffix in TEXTS:
                text = (ROOT / file).read_text(encoding="utf-8").rstrip()
                language = LANGUAGES.get(Path(file).suffix, "text")
                name = posixpath.basename(file)
                self.write(path, SOURCE.format(name=name, language=language, text=text))
            else:
                (OUT / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, OUT / path)


def documents() -> Iterator[tuple[str, str]]:
    """The path in the site and in the repository of each page."""
    yield from ((path, file) for file, path in ELSEWHERE.items())
    for page in (ROOT / "docs").rglob("*.md"):
        path = page.relative_to(ROOT / "docs").as_posix()
        yield path, f"docs/{path}"


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    shutil.copytree(ROOT / "docs", OUT, ignore=shutil.ignore_patterns("*.md", "*.json"))
    shutil.copy(MODULE, OUT / "site")
    site = Site()
    for path, file in documents():
        site.write_page(path, file, (ROOT / file).read_text(encoding="utf-8"))
    for path, text in api_pages.pages().items():
        site.write_page(path, f"docs/{path}", text)
    site.write_linked()


if __name__ == "__main__":
    main()
