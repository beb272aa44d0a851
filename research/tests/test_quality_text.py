"""research/quality_text.py: the documents of packages, and the files of the corpus."""

from __future__ import annotations

from pathlib import Path

import pytest
import quality_text


def test_documents_of_a_package(tmp_path: Path) -> None:
    """Equal files are taken once, long ones are cut at ends of lines, and there is a limit."""
    lines = b"".join(b"line %d of a long file\n" % number for number in range(30_000))
    for name, data in (("a.txt", lines), ("b.txt", lines), ("c.txt", b"x" * 300), ("d.py", b"")):
        (tmp_path / name).write_bytes(data)
    source = quality_text.Source("package", r"\.txt$", 10)
    documents = quality_text.documents_of(source, tmp_path, set())
    assert sorted(b"".join(documents)) == sorted(lines + b"x" * 300)
    assert all(len(document) <= quality_text.LONGEST for document in documents)
    assert all(document.endswith((b"\n", b"x")) for document in documents)
    few = quality_text.documents_of(source._replace(most=0.4), tmp_path, set())
    assert 250_000 < sum(map(len, few)) <= 400_000
    with pytest.raises(LookupError, match="no file that matches"):
        quality_text.documents_of(source._replace(pattern="rst$"), tmp_path, set())


def test_the_corpus_and_held_out_text_are_apart(tmp_path: Path) -> None:
    documents = [b"document %d\n" % number for number in range(300)]
    size = quality_text.write(tmp_path, list(documents), [], seed=1)
    whole = [(tmp_path / f"{name}.bin").read_bytes() for name in ("held_out", "corpus")]
    found = [data.split(b"\0")[:-1] for data in whole]
    assert (len(found[0]), len(found[1]), len(whole[1])) == (3, 297, size)
    assert sorted(found[0] + found[1]) == sorted(documents)
    assert found[1] != [one for one in documents if one in found[1]], "shuffled"
