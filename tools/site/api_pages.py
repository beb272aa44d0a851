"""The pages of the site's API reference, from the docstrings of the Python package and the comments
of include/fdma.h: a page for each module, one for C, and the places of all names."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import api_reference

C_PAGE = "reference/fdma.md"
LABEL = re.compile(r"([A-Z][a-z]+) {2,}(.*)")
OUTSIDE_OF_CODE = re.compile(r"(^```.*?^```$|^(?: {4}).*?$|`[^`\n]*`)", re.M | re.S)


class Place(NamedTuple):
    page: str
    anchor: str


def page_of(module: Any) -> str:
    return f"reference/{module.__name__}.md"


def heading(level: int, title: str, anchor: str) -> str:
    return f"{'#' * level} {title} {{ #{anchor} }}"


def text_of(text: str) -> str:
    """In text, but not in code, `<query, key>` is no tag of HTML, and a page's name is a link."""
    parts = OUTSIDE_OF_CODE.split(text)
    parts[::2] = (re.sub(r"<(?=\w)", "&lt;", part) for part in parts[::2])
    parts[::2] = (re.sub(r"\bdocs/(\w+\.md)", r"[\1](../\1)", part) for part in parts[::2])
    return "".join(parts)


def python_name(name: str, thing: Any, level: int) -> Iterator[str]:
    short = name.rpartition(".")[2]
    yield heading(level, f"`{name}`", f'{name} data-toc-label="{short}"')
    if not isinstance(thing, property):
        signature = api_reference.signature_of(thing, short)
        yield api_reference.fenced("python", signature)
    yield text_of(api_reference.docstring_text(thing))


def python_page(module: Any) -> Iterator[str]:
    yield f"# {module.__name__}"
    for name in module.__all__:
        thing = getattr(module, name)
        yield from python_name(name, thing, 2)
        if inspect.isclass(thing):
            for method, member in api_reference.methods_of(thing):
                yield from python_name(f"{name}.{method}", member, 3)


def labelled(label: str, body: str) -> str:
    """A part of a comment; the lines of a formula stay as they are."""
    lines = body.split("\n")
    if label == "Formula" and "=" in lines[0]:
        return f"**{label}**\n\n{api_reference.fenced('text', body)}"
    return f"**{label}** {text_of(inspect.cleandoc(body))}"


def comment_body(text: str) -> Iterator[str]:
    """The paragraphs of a comment of the header, and its parts with a label such as "Shapes"."""
    label, lines = "", []
    for line in [*text.split("\n"), "End  "]:
        found = LABEL.match(line)
        if found:
            body = inspect.cleandoc("\n" + "\n".join(lines))
            yield labelled(label, body) if label else text_of(body)
            label, lines = found[1], [found[2]]
        else:
            lines.append(line[11:] if label and line.startswith(" " * 11) else line)


def declared(code: list[str]) -> list[str]:
    """The names of the calls and types that are declared."""
    return re.findall(r"\b(fdma_\w+)\(|^\} (\w+);", "\n".join(code), re.M)


def c_anchor(title: str) -> str:
    return re.split(r"[(, ]", title)[0]


def c_page() -> Iterator[str]:
    yield "# C, fdma.h"
    yield (
        "Every entry of the header. The rules of all calls, from the first call to devices and "
        "threads, are in the comment at the head of [fdma.h](../../include/fdma.h)."
    )
    for title, text, code in api_reference.c_entries():
        if not text:
            yield f"## {title}"
            continue
        yield heading(3, f"`{title}`" if " " not in title else title, c_anchor(title))
        yield from comment_body(text)
        if code:
            yield api_reference.fenced("c", "\n".join(code))


def pages() -> dict[str, str]:
    """The text of each page, by its path in the site."""
    written = {page_of(module): python_page(module) for module in api_reference.MODULES}
    written[C_PAGE] = c_page()
    return {path: "\n\n".join(blocks) + "\n" for path, blocks in written.items()}


@functools.lru_cache(None)
def places() -> dict[str, Place]:
    """Where each name is described: of equal names, the one of the module that stands first."""
    found: dict[str, Place] = {}
    for module in api_reference.MODULES:
        for name in module.__all__:
            found.setdefault(name, Place(page_of(module), name))
    for title, _, code in api_reference.c_entries():
        names = (call or kind for call, kind in declared(code))
        found.update((name, Place(C_PAGE, c_anchor(title))) for name in names)
    return found
