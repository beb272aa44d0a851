"""The examples of the README and of all pages of docs/ are true: each ```c block compiles and runs,
each ```python block runs, the lines that install the library and build with it work, README_zh.md
has the same code, links are valid, and the documents' tables are current.

A ```text block directly after an example is its output.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import flash_dmattn
import pytest
import warm
from programs import ROOT, output_of, python, run

LIBRARY = Path(os.environ["FDMA_LIBRARY"])
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


class Example(NamedTuple):
    code: str
    printed: str | None


def examples(language: str, document: str = "README.md") -> list[Example]:
    """The blocks of one language, each with the text block that follows it, if any."""
    text = (ROOT / document).read_text(encoding="utf-8")
    blocks = list(FENCE.finditer(text))
    found = []
    for block, following in zip(blocks, [*blocks[1:], None]):
        if block[1] != language:
            continue
        told = following is not None and following[1] == "text"
        heading = told and "\n#" in text[block.end() : following.start()]
        found.append(Example(block[2], following[2] if told and not heading else None))
    assert found, f"{document} has no ```{language} block"
    return found


def assert_printed(example: Example, output: str) -> None:
    assert output.strip(), "the example prints nothing"
    if example.printed is not None:
        assert output.split() == example.printed.split()


DOCUMENTS = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


def documents_with(language: str) -> list[str]:
    return [name for name in DOCUMENTS if f"\n```{language}\n" in (ROOT / name).read_text()]


@pytest.mark.parametrize("document", documents_with("python"))
def test_python(document: str, tmp_path: Path) -> None:
    found = examples("python", document)
    if any("flash_dmattn.onnx" in example.code for example in found):
        pytest.importorskip("onnx_sessions")
    if any("from transformers" in example.code for example in found):
        pytest.importorskip("transformers")
    for example in found:
        script = tmp_path / "example.py"
        script.write_text(example.code)
        assert_printed(example, output_of(warm.python(script, cwd=tmp_path)))


def run_c(source: Path, tmp_path: Path, *arguments: str) -> str:
    program = tmp_path / "example"
    strict = ["-std=c11", "-Wall", "-Wextra", "-Werror"]
    link = [f"-I{ROOT / 'include'}", f"-L{LIBRARY.parent}", "-lfdma", "-lm"]
    output_of(run("cc", *strict, source, "-o", program, *link))
    return output_of(run(program, *arguments, env={"LD_LIBRARY_PATH": str(LIBRARY.parent)}))


def has_cuda(example: Example) -> bool:
    return "<cuda_runtime.h>" in example.code


@pytest.mark.parametrize("document", documents_with("c"))
def test_c(document: str, tmp_path: Path) -> None:
    for example in examples("c", document):
        if not has_cuda(example):
            source = tmp_path / "example.c"
            source.write_text(example.code)
            assert_printed(example, run_c(source, tmp_path))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_c_with_cuda(tmp_path: Path) -> None:
    """Compile and link; run if there is a device."""
    found = [x for name in documents_with("c") for x in examples("c", name) if has_cuda(x)]
    assert found
    for example in found:
        (tmp_path / "example.c").write_text(example.code)
        strict = ["-Xcompiler", "-std=c11,-Wall,-Wextra,-Werror", f"-I{ROOT / 'include'}"]
        output_of(run("nvcc", "-c", *strict, "example.c", cwd=tmp_path))
        link = [f"-L{LIBRARY.parent}", "-lfdma", "-lm", "-o", "example"]
        output_of(run("nvcc", "example.o", *link, cwd=tmp_path))
        if "cuda" in flash_dmattn.get_available_backends():
            variables = {"LD_LIBRARY_PATH": str(LIBRARY.parent)}
            assert_printed(example, output_of(run(tmp_path / "example", env=variables)))


LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def anchors(document: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)", text, re.M)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("document", [*DOCUMENTS, "README_zh.md", "CONTRIBUTING.md"])
def test_links(document: str) -> None:
    """Every link to a file of the project, and to a heading of a page, is valid."""
    path = ROOT / document
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    for link in LINK.findall(text):
        if link.startswith(("https://", "http://")):
            continue
        name, _, heading = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        if heading and target.suffix == ".md":
            assert heading in anchors(target), link


def test_installing(tmp_path: Path) -> None:
    """The lines from `cmake --install` on, unchanged, in an empty home."""
    (tmp_path / "example.c").write_text(examples("c")[0].code)
    (tmp_path / "build").symlink_to(LIBRARY.parent)
    lines = re.search(
        r"^    cmake --install .*\n(?:    .*\n)+", (ROOT / "README.md").read_text(), re.M
    )
    assert lines and "pkg-config" in lines[0]
    environment = {"HOME": str(tmp_path), "LD_LIBRARY_PATH": None}
    output = output_of(run("sh", "-ec", lines[0], cwd=tmp_path, env=environment))
    printed = examples("c")[0].printed
    assert printed and output.endswith(printed)


def commands(document: str) -> list[str]:
    """The indented lines outside of fences, without their comments."""
    text = FENCE.sub("", (ROOT / document).read_text(encoding="utf-8"))
    return [line.split("  #")[0].rstrip() for line in re.findall(r"^    \S.*", text, re.M)]


def test_the_chinese_readme_has_the_same_code() -> None:
    for language in ("c", "python"):
        known = examples(language)
        assert all(example in known for example in examples(language, "README_zh.md"))
    known = commands("README.md")
    assert commands("README_zh.md") and set(commands("README_zh.md")) <= set(known)


def test_goals_are_counted() -> None:
    """A caption says how many goals of benchmarks/peers.py the results reach."""
    lines = (ROOT / "benchmarks" / "results" / "peers-cuda.json").read_text().splitlines()
    met = [row["met"] for row in map(json.loads, lines) if row.get("goal")]
    text = " ".join((ROOT / "docs" / "performance.md").read_text().split())
    assert f"{sum(met)} of {len(met)} are reached" in text


def test_tables_are_current() -> None:
    """benchmarks/table.py --update README.md docs/performance.md would change nothing."""
    documents = [ROOT / "README.md", ROOT / "docs" / "performance.md"]
    output_of(python(ROOT / "benchmarks" / "table.py", "--check", *documents))
    assert all("<!-- table " in document.read_text() for document in documents)


def test_old_tables_are_found(tmp_path: Path) -> None:
    """A figure that differs, and a table that tables.txt lacks."""
    table = [ROOT / "benchmarks" / "table.py", "--check", "README.md"]
    text = (ROOT / "README.md").read_text()
    (tmp_path / "README.md").write_text(re.sub(r"\| \d+\.", "| 9999.", text, count=1))
    done = python(*table, cwd=tmp_path)
    assert done.returncode == 1 and "README.md: its tables are not current" in done.stdout
    (tmp_path / "README.md").write_text(text.replace("<!-- table readme-cpu", "<!-- table none"))
    done = python(*table, cwd=tmp_path)
    assert done.returncode == 1 and "has 0 tables none" in done.stderr


C_EXAMPLES = {  # output of each
    "train_step": ["slope by differences", "loss before the step"],
    "generate": [
        "cache 86.0 kB for any number of tokens; all keys would take 3072.0 kB",
        "the whole sequence: 0 of 2000 tokens differ",
    ],
    "context_parallel": ["received by each rank"],
}


@pytest.mark.parametrize("name", C_EXAMPLES)
def test_examples_in_c(name: str, tmp_path: Path) -> None:
    """The first commands in the head of the file compile it and run it, unchanged."""
    for folder in ("include", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "build").symlink_to(LIBRARY.parent)
    head = (ROOT / "examples" / f"{name}.c").read_text().split("*/")[0]
    lines = re.search(r"^ \*     cc (?:.*\n)+?(?= \*\n)", head, re.M)
    assert lines
    commands = re.sub(r"^ \*     ?", "", lines[0], flags=re.M)
    output = output_of(run("sh", "-ec", commands, cwd=tmp_path, env={"LD_LIBRARY_PATH": None}))
    assert all(words in output for words in C_EXAMPLES[name])
    strict = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-Iinclude")
    output_of(run("cc", *strict, f"examples/{name}.c", cwd=tmp_path))
    program = tmp_path / name
    assert output_of(run(program, "--help", cwd=tmp_path)).startswith(f"usage: {name}")
    wrong = run(program, "--wrong", cwd=tmp_path)
    assert wrong.returncode == 2 and wrong.stderr.startswith("usage: ")
