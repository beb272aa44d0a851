#!/usr/bin/env python3
"""Make a release: its files, their checksums, and the tag.

    release.py version 0.3.0                    write the version wherever it stands
    release.py build OUT [--cuda] [TARGET...]   make the files in OUT, then the tag
    release.py build OUT --dry-run              the same without the tag, whatever is still missing
    release.py verify OUT                       compare the files in OUT with their checksums

`build` works from the commit that is checked out. It stops if files are not committed, if
include/fdma.h, CITATION.cff and CHANGELOG.md name different versions, if another commit has the
tag, or if an address in pyproject.toml is still a placeholder (.invalid). OUT then has the sdist, a
wheel for each TARGET of tools/wheels/build.sh, SHA256SUMS, and changes.md, the version's part of
CHANGELOG.md. Links of README.md become absolute, as an index shows it alone. Two builds of a commit
give the same sdist. It needs scikit-build-core. Exit status: 0 done; 1 something is missing or
differs; 2 bad usage.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import program

ROOT = Path(__file__).resolve().parents[1]
HEADER, CITATION, CHANGES = "include/fdma.h", "CITATION.cff", "CHANGELOG.md"
SUMS, CHANGES_MADE = "SHA256SUMS", "changes.md"
PARTS = ("MAJOR", "MINOR", "PATCH")
PLACEHOLDER = ".invalid"  # a domain that never exists: RFC 2606
LINK = re.compile(r"(!?\[[^]]*\]\()(?!https?:|#|mailto:)([^)]+)\)")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    head, *_ = __doc__.split("\n\n")
    parser = argparse.ArgumentParser(description=head)
    steps = parser.add_subparsers(dest="step", required=True, metavar="STEP")
    version = steps.add_parser("version", help="write the version wherever it stands")
    version.add_argument("version", metavar="VERSION", help="such as 0.3.0")
    build = steps.add_parser("build", help="make the files of a release, then the tag")
    build.add_argument("out", type=Path, metavar="OUT", help="an empty folder, or a new one")
    build.add_argument(
        "targets", nargs="*", metavar="TARGET", help="wheels, as tools/wheels/build.sh names them"
    )
    build.add_argument("--cuda", action="store_true", help="wheels with CUDA kernels")
    build.add_argument("--dry-run", action="store_true", help="report what is missing, tag nothing")
    verify = steps.add_parser("verify", help="compare files with their checksums")
    verify.add_argument("out", type=Path, metavar="OUT")
    options = parser.parse_args(argv)
    if options.step == "version" and not re.fullmatch(r"\d+\.\d+\.\d+", options.version):
        parser.error(f"VERSION: is {options.version!r}, want three numbers, such as 0.3.0")
    if options.step == "build" and options.out.exists() and any(options.out.iterdir()):
        parser.error(f"OUT: {options.out} is not empty")
    if options.step == "verify" and not (options.out / SUMS).is_file():
        parser.error(f"OUT: {options.out} has no {SUMS}")
    return options


if __name__ == "__main__":
    program.begin(parse)


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def version_of_header() -> str:
    text = read(HEADER)
    return ".".join(re.findall(rf"#define FDMA_VERSION_{part} (\d+)", text)[0] for part in PARTS)


def changes() -> tuple[str, str]:
    """The version of the newest part of CHANGELOG.md, and its text."""
    _, part, *_ = re.split(r"^## ", read(CHANGES), maxsplit=2, flags=re.MULTILINE)
    version, _, text = part.partition("\n")
    return version.strip(), text.strip() + "\n"


def addresses() -> dict[str, str]:
    """[project.urls] of pyproject.toml, the one place where addresses are set."""
    _, _, part = read("pyproject.toml").partition("\n[project.urls]\n")
    return dict(re.findall(r'^(\w+) = "(.*)"$', part.partition("\n[")[0], re.MULTILINE))


def tagged(version: str) -> str:
    """The commit that has the tag of the version; empty if there is no such tag."""
    commit = "%(if)%(*objectname)%(then)%(*objectname)%(else)%(objectname)%(end)"
    return git("for-each-ref", f"--format={commit}", f"refs/tags/v{version}")


def missing(version: str) -> list[str]:
    """A line for each reason against a release."""
    found = []
    if git("status", "--porcelain"):
        found.append("files are not committed, see git status")
    citation = re.findall(r"^version: (.+)$", read(CITATION), re.MULTILINE)
    named, text = changes()
    for path, other in ((CITATION, citation[0]), (CHANGES, named)):
        if other != version:
            found.append(f"{path}: its version is {other}, want {version}, as in {HEADER}")
    if len(text) < 2:
        found.append(f"{CHANGES}: has no text for {version}")
    if tagged(version) not in ("", git("rev-parse", "HEAD")):
        found.append(f"the tag v{version} is of another commit")
    for name, address in addresses().items():
        if PLACEHOLDER in address:
            found.append(f"pyproject.toml: {name} is a placeholder, {address}")
    repository = addresses()["Repository"]
    if f"\nrepository-code: {repository}\n" not in read(CITATION):
        found.append(f"{CITATION}: want repository-code: {repository}, as in pyproject.toml")
    owner = "@" + repository.split("/")[3]
    if f" {owner}" not in read(".github/CODEOWNERS"):
        found.append(f".github/CODEOWNERS: want {owner}, the owner of Repository in pyproject.toml")
    return found


def replace(path: str, pattern: str, text: str) -> None:
    old = read(path)
    new, count = re.subn(pattern, text, old, flags=re.MULTILINE)
    assert count == 1, (path, pattern, count)
    (ROOT / path).write_text(new, encoding="utf-8")


def set_version(version: str) -> None:
    for part, number in zip(PARTS, version.split(".")):
        replace(HEADER, rf"^(#define FDMA_VERSION_{part}) \d+$", rf"\1 {number}")
    replace(CITATION, r"^version: .+$", f"version: {version}")
    named, _ = changes()
    if named != version:
        replace(CHANGES, rf"^## {re.escape(named)}$", f"## {version}\n\n## {named}")


def export(folder: Path, version: str) -> None:
    """The committed files, with the links of README.md absolute."""
    archive = folder / "committed.tar"
    git("archive", "--format=tar", f"--output={archive}", "HEAD")
    with tarfile.open(archive) as opened:
        opened.extractall(folder)
    archive.unlink()
    repository = addresses()["Repository"]

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1].startswith("!") else "blob"
        return f"{link[1]}{repository}/{kind}/v{version}/{link[2]})"

    readme = folder / "README.md"
    readme.write_text(LINK.sub(absolute, readme.read_text("utf-8")), "utf-8")


def build_sdist(folder: Path, out: Path) -> None:
    code = "import sys; from scikit_build_core.build import build_sdist as b; b(sys.argv[1])"
    env = {**os.environ, "SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct")}
    subprocess.run([sys.executable, "-c", code, str(out)], check=True, cwd=folder, env=env)


def sums_of(out: Path) -> dict[str, str]:
    files = sorted(path for path in out.iterdir() if path.name != SUMS)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def verify(out: Path) -> list[str]:
    """A line for each file that differs from SHA256SUMS, which `sha256sum --check` reads too."""
    lines = (out / SUMS).read_text().splitlines()
    wanted = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    found = sums_of(out)
    return [
        f"{name}: {'is missing' if name not in found else 'differs from ' + SUMS}"
        if name in wanted
        else f"{name}: is not in {SUMS}"
        for name in sorted({*wanted, *found})
        if wanted.get(name) != found.get(name)
    ]


def build(out: Path, targets: list[str], cuda: bool, dry_run: bool) -> int:
    version = version_of_header()
    stops = missing(version)
    for line in stops:
        print(f"{'would stop' if dry_run else 'stops'}: {line}", file=sys.stderr)
    if stops and not dry_run:
        return 1
    out.mkdir(parents=True, exist_ok=True)
    out = out.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program.doing("exports the commit")
        export(folder, version)
        program.doing("makes the sdist")
        build_sdist(folder, out)
        if targets:
            program.doing(f"makes wheels for {', '.join(targets)}")
            command = ["tools/wheels/build.sh", str(out), *["--cuda"] * cuda, *targets]
            subprocess.run(command, check=True, cwd=folder)
    (out / CHANGES_MADE).write_text(changes()[1], encoding="utf-8")
    sums = sums_of(out)
    (out / SUMS).write_text("".join(f"{digest}  {file}\n" for file, digest in sums.items()))
    for file in sums:
        print(f"{(out / file).stat().st_size / 1e6:8.2f} MB  {file}")
    tag = ["tag", "--annotate", f"v{version}", "--message", f"FlashDMA {version}"]
    if dry_run:
        print("would run: git " + " ".join(tag))
    elif not tagged(version):
        git(*tag)
        print(f"tagged: push it with git push origin v{version}")
    return 0


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.step == "version":
        set_version(options.version)
        return 0
    if options.step == "build":
        return build(options.out, options.targets, options.cuda, options.dry_run)
    faults = verify(options.out)
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
