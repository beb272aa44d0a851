#!/usr/bin/env python3
"""Gather 300 MB of text from Debian packages, for the language models of quality.py.

    python research/quality_text.py OUT --cache FOLDER [--permissive] [--compress]

It downloads packages with `apt-get download` into the cache (after `apt-get update`), unpacks them
there, takes dictionaries, books, manuals and program sources out of them, and writes

    OUT/corpus.bin     the documents in random order, each followed by a zero byte
    OUT/held_out.bin   one document in a hundred, which corpus.bin does not have
    OUT/sources.json   the packages with their versions, licences and bytes
    OUT/corpus-N.bz3   with --compress: corpus.bin in pieces, and held_out.bz3, to be carried to
                       another machine: `for f in corpus-*.bz3; do bzip3 -dc $f; done >corpus.bin`.
                       The first pieces alone are a sample of the corpus.

A document is a file, or a piece of a file that is longer than 256 KiB, cut at the end of a line.
HTML is reduced to its text. Equal files are taken once. The result depends on the versions of the
packages and on --seed only. It needs lxml (`pip install lxml`), apt-get and dpkg-deb, and bzip3 to
compress.
Exit status: 0 done; 1 a package or a file is missing; 2 bad usage.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import benchmarks_path  # noqa: F401
import program

LONGEST = 1 << 18  # bytes of a document
SHORTEST = 200  # of a file; shorter ones are redirections and empty modules
HELD_OUT = 100  # one document in so many is held out
LEAST = 300_000_000  # bytes of corpus.bin
PIECE = 104_000_000  # most bytes of the corpus that are compressed together
PACK = ("bzip3", "-e", "-b", "100", "-c")  # of these, a seventh smaller than xz -9e
HTML = (".html", ".xhtml", ".htm")
BLOCKS = frozenset(
    "address article blockquote br caption center dd div dl dt figcaption footer form h1 h2 h3 h4 "
    "h5 h6 header hr li main ol p pre section summary table tr ul".split()
)
APART = frozenset(("td", "th"))  # elements that a space separates
LEFT_OUT = ".//script | .//style | .//nav | .//head | .//noscript | .//button | .//comment()"


class Source(NamedTuple):
    package: str
    pattern: str  # a regular expression that is searched for in the paths of its files
    most: float  # most megabytes of text to take: whole files, chosen by their hashes


SOURCES = (
    # dictionaries and books
    Source("dict-gcide", r"\.dict\.dz$", 8),
    Source("dict-wn", r"\.dict\.dz$", 8),
    Source("dict-foldoc", r"\.dict\.dz$", 2),
    Source("jargon", r"info/.*\.gz$", 2),
    Source("anarchism", r"\.html$", 6),
    Source("debian-handbook", r"/html/(en-US|de-DE|fr-FR|es-ES)/.*\.html$", 6),
    Source("debian-policy", r"\.html/.*\.html$", 2),
    Source("developers-reference", r"/developers-reference/[^/]*\.html$", 1),
    Source("debian-reference-en", r"\.en\.html$", 2),
    # manuals
    Source("perl-doc", r"\.pod$", 5),
    Source("python3.11-doc", r"/html/.*\.html$", 8),
    Source("postgresql-doc-15", r"/html/.*\.html$", 8),
    Source("python-django-doc", r"/html/.*\.html$", 8),
    Source("git-doc", r"\.(txt|adoc)$", 3),
    Source("sqlite3-doc", r"\.html$", 8),
    Source("vim-runtime", r"/doc/.*\.txt$", 3),
    Source("manpages-dev", r"/man/man.*\.gz$", 4),
    Source("octave-doc", r"\.html$", 3),
    Source("libgtk-4-doc", r"\.html$", 6),
    Source("libboost1.81-doc", r"\.html$", 12),
    Source("openjdk-17-doc", r"/api/.*/[A-Z][^/]*\.html$", 75),
    # sources of programs
    Source("linux-source-6.1", r"/Documentation/.*\.(rst|txt)$", 5),
    Source("linux-source-6.1", r"/(kernel|mm|fs|net|lib|block|crypto|security)/.*\.[ch]$", 20),
    Source("linux-source-6.1", r"/(drivers|sound|arch)/.*\.c$", 25),
    Source("libpython3.11-stdlib", r"\.py$", 6),
    Source("golang-1.19-src", r"\.go$", 35),
    Source("rust-src", r"\.rs$", 30),
    Source("python3-sympy", r"\.py$", 20),
    Source("python3-django", r"\.py$", 6),
    Source("python3-scipy", r"\.py$", 10),
    Source("emacs-el", r"\.el\.gz$", 4),
)

# Megabytes of packages with permissive licences (Python, PostgreSQL, WordNet, Django, Go, SymPy,
# SciPy, and of Rust its library and compiler) or in the public domain (SQLite).
PERMISSIVE = {
    "dict-wn": 8,
    "python3.11-doc": 8,
    "postgresql-doc-15": 8,
    "python-django-doc": 8,
    "sqlite3-doc": 8,
    "libpython3.11-stdlib": 6,
    "python3-sympy": 6,
    "python3-django": 6,
    "golang-1.19-src": 20,
    "python3-scipy": 6,
}
RUST = Source("rust-src", r"/(compiler|library)/.*\.rs$", 12)


def permissive_sources() -> tuple[Source, ...]:
    known = (one for one in SOURCES if one.package in PERMISSIVE)
    return (*(one._replace(most=PERMISSIVE[one.package]) for one in known), RUST)


def fetch(package: str, cache: Path) -> Path:
    """The folder with the package's files. Packages that are already downloaded and unpacked are
    used again."""
    folder = cache / package
    if folder.is_dir():
        return folder
    if not list(cache.glob(f"{package}_*.deb")):
        subprocess.run(("apt-get", "download", "-q", package), cwd=cache, check=True)
    (archive,) = cache.glob(f"{package}_*.deb")
    unfinished = cache / f"{package}.unfinished"
    subprocess.run(("dpkg-deb", "-x", archive, unfinished), check=True)
    unfinished.rename(folder)
    return folder


def version_of(package: str, cache: Path) -> str:
    (archive,) = cache.glob(f"{package}_*.deb")
    shown = subprocess.run(
        ("dpkg-deb", "--field", archive, "Version"), check=True, capture_output=True, text=True
    )
    return shown.stdout.strip()


def licences_of(package: str, folder: Path) -> list[str]:
    """The short names of licences in the package's copyright file, if it has Debian's format."""
    path = folder / "usr/share/doc" / package / "copyright"
    if not path.is_file():
        return []
    text = path.read_text(errors="replace")
    return sorted(set(re.findall(r"^License: *(\S[^\n]{0,60})$", text, re.MULTILINE)))


def files_of(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Paths and contents of the regular files in a folder, and in its archives of sources."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        name = path.relative_to(folder).as_posix()
        if name.startswith("usr/src/") and name.endswith(".tar.xz"):
            with tarfile.open(path) as archive:
                for entry in archive:
                    if entry.isfile():
                        yield f"{name}/{entry.name}", archive.extractfile(entry).read()
        else:
            yield name, path.read_bytes()


def text_of_html(data: bytes) -> str:
    """The text of a page: a line for each block, and preformatted text unchanged."""
    import lxml.html  # nothing else here needs it

    page = lxml.html.document_fromstring(data)
    for element in page.xpath(LEFT_OUT):
        element.drop_tree()
    pieces: list[str] = []

    def walk(element: Any, is_plain: bool) -> None:
        tag = element.tag if isinstance(element.tag, str) else ""
        is_plain = is_plain or tag == "pre"
        separator = "\n" if tag in BLOCKS else " " if tag in APART else ""
        pieces.append(separator)
        add(element.text, is_plain)
        for child in element:
            walk(child, is_plain)
            add(child.tail, is_plain)
        pieces.append(separator)

    def add(text: str | None, is_plain: bool) -> None:
        if text:
            pieces.append(text if is_plain else re.sub(r"\s+", " ", text))

    walk(page, False)
    lines = "".join(pieces).split("\n")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in lines)).strip() + "\n"


def text_of(name: str, data: bytes) -> bytes | None:
    """A file as UTF-8 text, or None if it is not text or has almost none."""
    if PurePosixPath(name).suffix in (".gz", ".dz"):
        data = gzip.decompress(data)
    if name.endswith(HTML):
        data = text_of_html(data).encode(errors="replace") if data.strip() else b""
    try:
        data.decode()
    except UnicodeDecodeError:
        data = data.decode("latin-1").encode()
    return None if b"\0" in data or len(data) < SHORTEST else data


def cut(text: bytes) -> Iterator[bytes]:
    """Pieces of at most LONGEST bytes, cut at ends of lines if possible."""
    begin = 0
    while len(text) - begin > LONGEST:
        end = text.rfind(b"\n", begin, begin + LONGEST) + 1 or begin + LONGEST
        yield text[begin:end]
        begin = end
    yield text[begin:]


def documents_of(source: Source, folder: Path, seen: set[bytes]) -> list[bytes]:
    """The documents of a source. `seen` has the hashes of all files taken so far."""
    pattern = re.compile(source.pattern)
    found = [
        (hashlib.sha256(name.encode()).digest(), name, data)
        for name, data in files_of(folder)
        if pattern.search(name)
    ]
    if not found:
        raise LookupError(f"{source.package}: has no file that matches {source.pattern!r}")
    taken: list[bytes] = []
    left = source.most * 1e6
    for _, name, data in sorted(found):
        text = text_of(name, data)
        if text is None or (digest := hashlib.sha256(text).digest()) in seen:
            continue
        for document in cut(text):
            if len(document) <= left:
                seen.add(digest)
                taken.append(document)
                left -= len(document)
    return taken


def gather(cache: Path, sources: tuple[Source, ...]) -> tuple[list[bytes], list[dict[str, object]]]:
    """All documents, and a description of each source."""
    documents, rows, seen = [], [], set()
    for source in sources:
        folder = fetch(source.package, cache)
        own = documents_of(source, folder, seen)
        documents += own
        rows.append(
            {
                "package": source.package,
                "version": version_of(source.package, cache),
                "files": source.pattern,
                "licences": licences_of(source.package, folder),
                "documents": len(own),
                "bytes": sum(map(len, own)),
            }
        )
        print(f"{source.package:24} {rows[-1]['bytes'] / 1e6:8.1f} MB", flush=True)
    return documents, rows


def write(out: Path, documents: list[bytes], rows: list[dict[str, object]], seed: int) -> int:
    """Write the three files; returns the bytes of corpus.bin."""
    random.Random(seed).shuffle(documents)
    held_out = max(1, len(documents) // HELD_OUT)
    out.mkdir(parents=True, exist_ok=True)
    sizes = {}
    for name, own in (("held_out", documents[:held_out]), ("corpus", documents[held_out:])):
        data = b"".join(document + b"\0" for document in own)
        (out / f"{name}.bin").write_bytes(data)
        sizes[name] = len(data)
        sizes[f"{name}_sha256"] = hashlib.sha256(data).hexdigest()
    table = {"seed": seed, **sizes, "sources": rows}
    (out / "sources.json").write_text(json.dumps(table, indent=1) + "\n")
    return sizes["corpus"]


def compress(out: Path) -> None:
    """Pieces of whole documents, each compressed on its own."""
    data = (out / "corpus.bin").read_bytes()
    pieces, begin = {"held_out": (out / "held_out.bin").read_bytes()}, 0
    while begin < len(data):
        end = data.rfind(b"\0", begin, begin + PIECE) + 1
        pieces[f"corpus-{len(pieces)}"] = data[begin:end]
        begin = end
    for name, piece in pieces.items():
        packed = subprocess.run(PACK, check=True, input=piece, stdout=subprocess.PIPE).stdout
        (out / f"{name}.bz3").write_bytes(packed)
        print(f"{name}.bz3 {len(packed) / 1e6:.1f} MB", flush=True)


def parse() -> argparse.Namespace:
    head, _, _ = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=head)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cache", type=Path, required=True, help="of downloaded packages")
    parser.add_argument("--seed", type=int, default=0, help="of the order of documents")
    parser.add_argument(
        "--permissive", action="store_true", help="90 MB under permissive licences alone"
    )
    parser.add_argument(
        "--compress", action="store_true", help="write corpus-N.bz3 and held_out.bz3 too"
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    options.cache.mkdir(parents=True, exist_ok=True)
    try:
        sources = permissive_sources() if options.permissive else SOURCES
        size = write(options.out, *gather(options.cache, sources), options.seed)
    except (LookupError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
    print(f"corpus.bin {size / 1e6:.1f} MB")
    if size < LEAST and not options.permissive:
        print(f"corpus.bin: has {size} bytes, want {LEAST} or more", file=sys.stderr)
    if options.compress:
        compress(options.out)


if __name__ == "__main__":
    program.begin(parse)
    program.doing("downloads and joins texts")
    main()
