"""Texts that `fdma` prints for other programs: its manual page, and completion of command lines."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from programs import output_of, run
from tool import TOOL, refusal, run_tool

COMMANDS = ["attend", "check", "bench", "info", "man", "completion"]
# Typed words, the last one to complete, and words that must and must not be offered.
TYPED = [
    (["ch"], {"check"}, {"bench"}),
    (["attend", "--sco"], {"--scope", "--score"}, {"--scale"}),
    (["attend", "--scope", ""], {"causal", "global"}, {"exp"}),
    (["attend", "--bias", "l"], {"linear"}, {"exp", "blhd"}),
    (["attend", "--window", ""], set(), {"--window", "causal"}),
    (["attend", "--out", "some"], {"some file.safetensors"}, {"--out"}),
    (["attend", "some"], {"some file.safetensors"}, set()),
    (["check", "some"], set(), {"some file.safetensors"}),
    (["check", "--device", "c"], {"cpu", "cuda"}, set()),
    (["completion", ""], {"bash", "zsh", "fish"}, {"causal"}),
]


def options_of(command: str) -> set[str]:
    return set(re.findall(r"^  (--[\w-]+)", run_tool(command, "--help").stdout, re.MULTILINE))


def complete_in_bash(words: list[str], folder: Path) -> set[str]:
    script = (
        f'source <("{TOOL}" completion bash)\nCOMP_WORDS=("$@")\nCOMP_CWORD=$(($# - 1))\n'
        "_fdma 2>&1\nprintf '%s\\n' \"${COMPREPLY[@]}\"\n"
    )
    shown = output_of(run("bash", "-c", script, "bash", "fdma", *words, cwd=folder))
    return {line for line in shown.splitlines() if line}


def complete_in_fish(words: list[str], folder: Path) -> set[str]:
    script = f"'{TOOL}' completion fish | source\ncomplete -C \"$argv\""
    env = {"PATH": f"{Path(TOOL).parent}:/usr/bin:/bin", "HOME": str(folder)}
    done = run("fish", "--no-config", "-c", script, "fdma", *words, cwd=folder, env=env)
    names = (line.split("\t")[0] for line in output_of(done).splitlines())
    return {name.replace("\\ ", " ") for name in names}


@pytest.mark.parametrize("shell", ["bash", "fish"])
@pytest.mark.parametrize(
    ("words", "offered", "others"),
    TYPED,
    ids=lambda x: " ".join(sorted(x) if isinstance(x, set) else x),
)
def test_completion(
    shell: str, words: list[str], offered: set[str], others: set[str], tmp_path: Path
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "some file.safetensors").touch()
    complete = complete_in_bash if shell == "bash" else complete_in_fish
    found = complete(words, tmp_path)
    assert offered <= found and not others & found


def test_bash_splits_at_the_equals_sign(tmp_path: Path) -> None:
    words = ["attend", "--scope", "="]
    assert complete_in_bash(words, tmp_path) == {"causal", "global"}
    assert complete_in_bash([*words, "glo"], tmp_path) == {"global"}


@pytest.mark.parametrize("command", COMMANDS)
def test_bash_offers_all_options(command: str, tmp_path: Path) -> None:
    assert complete_in_bash([command, "--"], tmp_path) == options_of(command) | {"--help"}


def test_zsh_reads_all_options(tmp_path: Path) -> None:
    text = run_tool("completion", "zsh").stdout
    named = {option for command in COMMANDS for option in options_of(command)}
    assert named == set(re.findall(r"'(--[\w-]+)=?\[", text)) - {"--help"}
    if shutil.which("zsh"):
        (tmp_path / "_fdma").write_text(text)
        output_of(run("zsh", "-n", tmp_path / "_fdma"))


def test_the_manual_page_has_all_options(tmp_path: Path) -> None:
    page = run_tool("man").stdout
    for command in COMMANDS:
        (section,) = re.findall(rf"^\.SS fdma {command}\n(.*?)(?=^\.S[SH] )", page, re.M | re.S)
        assert options_of(command) == set(re.findall(r"^\.B (--[\w-]+)", section, re.M))
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    (tmp_path / "fdma.1").write_text(page)
    done = run("groff", "-man", "-ww", "-Tascii", "-P-c", tmp_path / "fdma.1")
    assert "--dt-proj NAME" in re.sub(".\b", "", output_of(done)) and done.stderr == ""


def test_an_unknown_shell() -> None:
    message = "fdma completion: SHELL is 'ksh', want one of bash, zsh, fish\n"
    assert refusal("completion", "ksh") == message
    assert "SHELL is missing" in refusal("completion")
