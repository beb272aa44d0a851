#!/usr/bin/env python3
"""Writes the API reference from the docstrings of the Python package and from include/fdma.h.

    api_reference.py OUT.md     write the whole text to a file
    api_reference.py --index    write the table of its names, docs/api_reference.md
    api_reference.py --check    fail if docs/api_reference.md is not what --index would write

It needs the package and its library: set PYTHONPATH and FDMA_LIBRARY as `make test` does.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import program


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument("out", nargs="?", type=Path, metavar="OUT.md", help="write the whole text")
    form.add_argument("--index", action="store_true", help="write the table of names")
    form.add_argument("--check", action="store_true", help="compare the table of names")
    return parser.parse_args(argv)


if __name__ == "__main__":
    program.begin(parse)

import flash_dma
import flash_dma_cuda
import flash_dmattn
import flash_dmattn.distributed
import flash_dmattn.jax
import flash_dmattn.onnx
import flash_dmattn.rotary
import flash_dmattn.transformers

ROOT = Path(__file__).resolve().parents[1]
INDEX = ROOT / "docs" / "api_reference.md"
HEADER = ROOT / "include" / "fdma.h"
WIDTH = 100
MODULES = (
    flash_dmattn,
    flash_dmattn.pictures,
    flash_dmattn.rotary,
    flash_dmattn.distributed,
    flash_dmattn.transformers,
    flash_dmattn.onnx,
    flash_dmattn.jax,
    flash_dma,
    flash_dma_cuda,
)
SECTIONS = ("Args:", "Attributes:", "Returns:", "Raises:", "Example:")
OPENING = """# API reference

The docstrings of the Python package, whose examples the tests run, and the C header fdma.h.

[Python](#python) · [C](#c)
"""
INDEX_OPENING = """# API reference

Every public name of Python and C, with one line each. A Python name links to the module whose
docstring has its arguments, results, errors and an example; a C name is documented above its
declaration in [fdma.h](../include/fdma.h). `tools/api_reference.py reference.md` writes all of
these texts into one file.

[Python](#python) · [C](#c)
"""


def signature_of(thing: Any, name: str) -> str:
    """The signature on one line or, if that is too long, with a line for each argument."""
    signature = inspect.signature(thing)
    arguments = [x for x in signature.parameters.values() if x.name != "self"]
    words = [str(x).replace("'", "") for x in arguments]  # annotations are strings
    first_named = next((n for n, x in enumerate(arguments) if x.kind == x.KEYWORD_ONLY), None)
    if first_named is not None:
        words.insert(first_named, "*")
    result = signature.return_annotation
    end = "" if result in (signature.empty, "None") else f" -> {result}"
    line = f"{name}({', '.join(words)}){end}"
    lines = "".join(f"    {word},\n" for word in words)
    return line if len(line) <= WIDTH else f"{name}(\n{lines}){end}"


def sections_of(text: str) -> Iterator[tuple[str, str]]:
    """The sections of a docstring, by name, and the text around them, whose name is empty."""
    name, lines = "", []
    for line in text.splitlines():
        begins = line in SECTIONS or line.startswith("Source: ")
        ends = name != "" and line != "" and not line.startswith(" ")
        if begins or ends:
            yield name, inspect.cleandoc("\n" + "\n".join(lines))
            name, _, rest = line.partition(":") if begins else ("", "", line)
            lines = [rest.strip()] if name in ("", "Source") else []
        else:
            lines.append(line)
    yield name, inspect.cleandoc("\n" + "\n".join(lines))


def list_of(body: str) -> str:
    """A section of names and their descriptions, as a list. Other lines stay text."""
    return re.sub(r"^(\w[\w.]*): ", r"- `\1`: ", body, flags=re.M).replace("\n    ", "\n  ")


def fenced(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def section_text(name: str, body: str) -> str:
    if not name:  # an indented block after a line of text becomes code
        return re.sub(r":\n(?= )", ":\n\n", body)
    if name == "Example":
        return fenced("python", body)
    return f"**{name}** {body}" if name == "Source" else f"**{name}**\n\n{list_of(body)}"


def docstring_text(thing: Any) -> str:
    text = inspect.getdoc(thing) or ""
    sections = (section_text(*section) for section in sections_of(text))
    return "\n\n".join(section for section in sections if section)


def methods_of(thing: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class of this package that have a docstring."""
    fields = {*getattr(thing, "_fields", ()), *getattr(thing, "__dataclass_fields__", ())}
    for name, member in list(vars(thing).items()):
        is_function = callable(member) and not isinstance(member, type)
        is_method = is_function or isinstance(member, property)
        if not name.startswith("_") and name not in fields and is_method and member.__doc__:
            yield name, member


def class_text(name: str, thing: type) -> Iterator[str]:
    for method, member in methods_of(thing):
        yield f"#### {name}.{method}"
        if not isinstance(member, property):
            yield fenced("python", signature_of(member, method))
        yield docstring_text(member)


def python_text() -> Iterator[str]:
    yield "## Python"
    for module in MODULES:
        for name in module.__all__:
            thing = getattr(module, name)
            yield f"### {module.__name__}.{name}"
            yield fenced("python", signature_of(thing, name))
            yield docstring_text(thing)
            if inspect.isclass(thing):
                yield from class_text(name, thing)


def first_sentence(text: str) -> str:
    """The first sentence of a text's first paragraph, as a cell of a table."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=\.) ", paragraph)[0].rstrip(".").replace("|", "\\|")


def table_of(rows: list[str]) -> str:
    return "\n".join(["| name | what it is |", "|---|---|", *rows])


def python_index() -> Iterator[str]:
    yield "## Python"
    for module in MODULES:
        rows = []
        for name in module.__all__:
            thing = getattr(module, name)
            source = f"../python/{thing.__module__.replace('.', '/')}"
            path = (
                f"{source}.py"
                if (ROOT / "docs" / f"{source}.py").is_file()
                else f"{source}/__init__.py"
            )
            line = first_sentence(inspect.getdoc(thing) or "")
            rows.append(f"| [`{name}`]({path}) | {line} |")
        yield f"### {module.__name__}"
        yield table_of(rows)


def comment_text(comment: str) -> str:
    """The text of a comment of the header, without its marks."""
    body = re.sub(r"^/\*!? ?|\s*\*/$", "", comment)
    return "\n".join(re.sub(r"^ \*(  )?", "", line).rstrip() for line in body.split("\n")).strip()


def declarations_of(text: str) -> Iterator[tuple[str, str]]:
    """The top-level comments and declarations of the header: their kind and text."""
    pattern = re.compile(
        r"(?P<entry>/\*! .*?\*/)|(?P<section>^/\* [A-Z][\w ]* \*/$)"
        r"|(?P<type>^typedef .*?^\} \w+;|^typedef [^{;]*;)|(?P<call>^FDMA_API .*?;)",
        re.M | re.S,
    )
    body = text[text.index('extern "C" {') :]
    for match in pattern.finditer(body):
        yield match.lastgroup or "", match.group()


def entry_text(title: str, text: str, code: list[str]) -> Iterator[str]:
    yield f"#### {title}"
    yield fenced("text", text)
    if code:
        yield fenced("c", "\n".join(code))


def c_entries() -> Iterator[tuple[str, str, list[str]]]:
    """Title, text and declarations of each entry: the calls behind it, the type that it names, and
    the types before it that belong to no other entry. A section is a title alone."""
    title, text = "", ""
    code: list[str] = []
    types: list[str] = []
    for kind, found in declarations_of(HEADER.read_text()):
        if kind in ("entry", "section") and title:
            yield title, text, code
            title, code = "", []
        if kind == "section":
            yield comment_text(found), "", []
        elif kind == "entry":
            title, _, text = comment_text(found).partition(" - ")
            code, types = types, []
        elif kind == "call":  # without the macro, lines go on that many columns further left
            code.append(found.replace("FDMA_API ", "").replace("\n" + 9 * " ", "\n"))
        else:
            (code if found.endswith(f"}} {title};") else types).append(found)
    yield title, text, code


def c_text() -> Iterator[str]:
    yield "## C"
    for title, text, code in c_entries():
        yield from entry_text(title, text, code) if text else [f"### {title}"]


def c_index() -> Iterator[str]:
    yield "## C"
    section, rows = "", []
    for kind, found in [*declarations_of(HEADER.read_text()), ("section", "")]:
        if kind == "section":
            if rows:
                yield f"### {section}"
                yield table_of(rows)
            section, rows = comment_text(found), []
        elif kind == "entry":
            title, _, text = comment_text(found).partition(" - ")
            rows.append(f"| `{title}` | {first_sentence(text)} |")


def document_of(opening: str, *blocks: str) -> str:
    return "\n".join([opening, "\n\n".join(blocks), ""])


def main(argv: list[str] | None = None) -> int:
    given = parse(argv)
    if given.out is not None:
        given.out.write_text(document_of(OPENING, *python_text(), *c_text()))
        return 0
    text = document_of(INDEX_OPENING, *python_index(), *c_index())
    if given.index:
        INDEX.write_text(text)
        return 0
    if INDEX.exists() and INDEX.read_text() == text:
        return 0
    print(f"{INDEX} is not up to date: run tools/api_reference.py --index")
    return 1


if __name__ == "__main__":
    sys.exit(main())
