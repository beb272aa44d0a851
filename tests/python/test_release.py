"""tools/release.py: what it makes of this commit, and what it refuses."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import flash_dmattn
import pytest
from flash_dmattn import _library
from programs import ROOT, Done, output_of, python
from test_wheel import PIP_OPTIONS

VERSION = flash_dmattn.__version__
NAME = re.findall(r'^name = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
SDIST = f"{NAME.replace('-', '_')}-{VERSION}.tar.gz"
FILES = ("include/fdma.h", "CITATION.cff", "CHANGELOG.md", "README.md", "pyproject.toml")
FILES += (".github/CODEOWNERS", "tools/release.py", "tools/program.py")


def release(root: Path, *arguments: str | Path) -> Done:
    return python(root / "tools" / "release.py", *arguments)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    out = tmp_path_factory.mktemp("release") / "out"
    done = release(ROOT, "build", out, "--dry-run")
    assert f"would run: git tag --annotate v{VERSION}" in output_of(done)
    return out


def test_files(made: Path) -> None:
    names = {path.name for path in made.iterdir()}
    assert names == {"SHA256SUMS", "changes.md", SDIST}
    for line in (made / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert digest == hashlib.sha256((made / name).read_bytes()).hexdigest()
    text = (made / "changes.md").read_text()
    assert f"## {VERSION}\n\n{text}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_sdist_builds_and_is_small(made: Path, tmp_path: Path) -> None:
    (sdist,) = made.glob("*.tar.gz")
    assert sdist.stat().st_size < 2e6
    with tarfile.open(sdist) as opened:
        folders = {name.split("/")[1] for name in opened.getnames() if "/" in name}
    assert {"src", "include", "python", "LICENSE"} < folders
    assert not folders & {"research", "docs", "benchmarks", ".github"}
    command = ("-m", "pip", "wheel", *PIP_OPTIONS, "--wheel-dir", tmp_path, sdist)
    output_of(python(*command, env={"FDMA_LIBRARY": str(_library.find())}))
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        (path,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        text = opened.read(path).decode()
    assert re.search(r"^Project-URL: Repository, https://", text, re.MULTILINE)
    assert "Classifier: Programming Language :: Python :: 3\n" in text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 20 and all(re.match("https?://|#", link) for link in links)


def test_two_builds_are_equal(made: Path, tmp_path: Path) -> None:
    output_of(release(ROOT, "build", tmp_path / "again", "--dry-run"))
    assert (tmp_path / "again/SHA256SUMS").read_text() == (made / "SHA256SUMS").read_text()


def test_verify(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "copy"
    shutil.copytree(made, out)
    assert output_of(release(ROOT, "verify", out)) == ""
    (out / "changes.md").write_text("other text\n")
    (out / "extra.whl").touch()
    next(out.glob("*.tar.gz")).unlink()
    done = release(ROOT, "verify", out)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "changes.md: differs from SHA256SUMS",
        "extra.whl: is not in SHA256SUMS",
        f"{SDIST}: is missing",
    ]


def git(root: Path, *arguments: str) -> str:
    names = ("-c", "user.name=A", "-c", "user.email=a@forge.invalid")
    command = ["git", "-C", str(root), *names, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with addresses, and what a release reads."""
    root = tmp_path / "repository"
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / name).read_text()
        if not name.startswith("tools/"):
            text = text.replace("forge.invalid/OWNER", "forge.example/people")
            text = text.replace("@OWNER", "@people")
        (root / name).write_text(text)
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "all")
    return root


def change(root: Path, name: str, old: str, new: str) -> None:
    text = (root / name).read_text()
    assert old in text
    (root / name).write_text(text.replace(old, new))
    git(root, "commit", "--quiet", "--all", "--message", "a change")


REFUSED = [
    ("CITATION.cff", f"version: {VERSION}", "version: 9.1.0", "its version is 9.1.0, want"),
    ("CHANGELOG.md", f"## {VERSION}", "## 9.1.0", "CHANGELOG.md: its version is 9.1.0, want"),
    ("pyproject.toml", "forge.example", "forge.invalid", "Repository is a placeholder"),
    ("CITATION.cff", "forge.example", "other.example", "want repository-code: https://forge.ex"),
    (".github/CODEOWNERS", "@people", "@others", "want @people, the owner of Repository"),
]


@pytest.mark.parametrize(("name", "old", "new", "message"), REFUSED)
def test_refused(
    name: str, old: str, new: str, message: str, repository: Path, tmp_path: Path
) -> None:
    change(repository, name, old, new)
    done = release(repository, "build", tmp_path / "out")
    assert done.returncode == 1 and done.stderr.startswith("stops: ") and message in done.stderr
    assert not (tmp_path / "out").exists() and git(repository, "tag") == ""


def test_a_release_is_tagged_once(repository: Path, tmp_path: Path) -> None:
    git(repository, "config", "user.name", "A")
    git(repository, "config", "user.email", "a@forge.invalid")
    # the sdist of these few files alone
    change(repository, "pyproject.toml", 'license-files = ["LICENSE"]\n', "")
    output_of(release(repository, "build", tmp_path / "out"))
    assert git(repository, "tag") == f"v{VERSION}\n"
    output_of(release(repository, "build", tmp_path / "again"))  # of the same commit
    assert git(repository, "tag") == f"v{VERSION}\n"
    # a forge's checkout may leave a tag without its annotation
    git(repository, "tag", "--force", f"v{VERSION}", "HEAD")
    output_of(release(repository, "build", tmp_path / "forge"))
    change(repository, "README.md", "# FlashDMA\n", "# Another\n")
    done = release(repository, "build", tmp_path / "later")
    assert done.returncode == 1 and f"the tag v{VERSION} is of another commit" in done.stderr
    (repository / "new").touch()
    assert "files are not committed" in release(repository, "build", tmp_path / "later").stderr


def test_the_version_is_written_everywhere(repository: Path) -> None:
    output_of(release(repository, "version", "9.2.1"))
    assert "define FDMA_VERSION_MAJOR 9\n" in (repository / "include/fdma.h").read_text()
    assert "\nversion: 9.2.1\n" in (repository / "CITATION.cff").read_text()
    assert f"\n## 9.2.1\n\n## {VERSION}\n" in (repository / "CHANGELOG.md").read_text()
    done = release(repository, "build", repository.parent / "out")
    assert "CHANGELOG.md: has no text for 9.2.1" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("version", "1.0"), "VERSION: is '1.0', want three numbers"),
        (("build", str(ROOT)), "is not empty"),
        (("verify", str(ROOT)), "has no SHA256SUMS"),
    ],
)
def test_bad_usage(arguments: tuple[str, ...], message: str) -> None:
    done = release(ROOT, *arguments)
    assert done.returncode == 2 and message in done.stderr
