"""Files that a public forge reads: workflows, templates, and checks before a commit.

Schemas and zizmor, which looks for weak workflows, read the files without a network. The commands
of workflows are checked by shellcheck.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from extra import in_extra
from programs import ROOT, Done, output_of, run

FORGE = ROOT / ".github"
WORKFLOWS = sorted((FORGE / "workflows").glob("*.yml"))
FORMS = sorted((FORGE / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "github-issue-forms": FORMS,
    "github-issue-config": [FORGE / "ISSUE_TEMPLATE" / "config.yml"],
    "dependabot": [FORGE / "dependabot.yml"],
    "citation-file-format": [ROOT / "CITATION.cff"],
}
PINNED = (ROOT / "tests" / "requirements.txt").read_text()


def check_schema(name: str, *paths: Path) -> Done:
    return in_extra("--builtin-schema", f"vendor.{name}", *paths, program="check-jsonschema")


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas(name: str, tmp_path: Path) -> None:
    assert SCHEMAS[name]
    output_of(check_schema(name, *SCHEMAS[name]))
    planted = tmp_path / "planted.yml"
    planted.write_text("unknown: [1]\n")
    assert check_schema(name, planted).returncode == 1


def test_weaknesses(tmp_path: Path) -> None:
    arguments = ("--offline", "--no-progress", "--config", FORGE / "zizmor.yml")
    output_of(in_extra(*arguments, FORGE, program="zizmor"))
    planted = tmp_path / ".github" / "workflows" / "planted.yml"
    planted.parent.mkdir(parents=True)
    text = WORKFLOWS[0].read_text()
    planted.write_text(text + "      - run: echo ${{ github.event.issue.title }}\n")
    done = in_extra(*arguments, planted, program="zizmor")
    assert done.returncode > 0 and "template-injection" in done.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_workflows_run(path: Path, tmp_path: Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    scripts = [step["run"] for step in steps if "run" in step]
    for number, script in enumerate(scripts):
        file = tmp_path / f"{number}.sh"
        file.write_text(f"#!/bin/bash -e\n{script}\n")
        output_of(run(Path(sys.executable).parent / "shellcheck", file))
        assert set(re.findall(r"\bmake ([a-z-]+)", script)) <= set(targets)
    assert all(job["runs-on"] and "permissions" in job for job in jobs.values())


def test_checks_before_a_commit_are_those_of_the_gates() -> None:
    settings = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (local,) = settings["repos"]
    hooks = {hook["id"]: hook for hook in local["hooks"]}
    assert {"clang-format", "ruff-format", "ruff-check", "shellcheck", "gates"} == set(hooks)
    for hook in hooks.values():
        for package in hook.get("additional_dependencies", ()):
            assert f"{package}\n" in PINNED
    for gate in re.findall(r"for gate in ([\w ]+);", hooks["gates"]["entry"])[0].split():
        assert (ROOT / "tools" / "gates" / f"check_{gate}.py").is_file()


def test_the_container_is_set_up_by_what_is_here() -> None:
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert container["postCreateCommand"].startswith("tools/setup.sh gates && make build ")


def test_addresses_are_set_in_one_place() -> None:
    """Elsewhere no file has a placeholder, but those that tools/release.py compares."""
    listed = run("git", "-C", ROOT, "grep", "-lE", r"forge\.invalid|@OWNER")
    if listed.returncode > 1:
        pytest.skip("not a clone")
    names = set(listed.stdout.splitlines())
    compared = {".github/CODEOWNERS", "CITATION.cff", "pyproject.toml"}
    assert {name for name in names if not name.startswith("tests/")} <= compared
