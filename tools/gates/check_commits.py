#!/usr/bin/env python3
"""Check the messages of new commits: "area: what", and a body if the reason is speed.

    check_commits.py [--self-test] [BASE]

New commits are the commits since BASE. By default origin's main branch lacks them or, without an
origin, the branch main or the last tag lacks them. Merges are exempt. A subject has at most
100 characters and names one topic; a commit whose area is perf gives its measurement in the body.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

import gate

SUBJECT_CHARACTERS = 100
SUBJECT = re.compile(r"^(?P<areas>[\w./-]+(, [\w./-]+)*): \S")


def complaints(message: str) -> list[str]:
    """The faults of one commit's message."""
    subject, _, body = message.partition("\n")
    if len(subject) > SUBJECT_CHARACTERS:
        return [f"the subject has {len(subject)} characters, at most {SUBJECT_CHARACTERS}"]
    match = SUBJECT.match(subject)
    if not match:
        return ['the subject is not of the form "area: what"']
    found = []
    if subject.endswith("."):
        found.append("the subject ends with a full stop")
    if "; " in subject:
        found.append("the subject names several topics: make a commit of each")
    if "perf" in match["areas"].split(", ") and not re.search(r"\d", body):
        found.append("its area is perf and its body has no measurement")
    return found


def git(*arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", str(gate.ROOT), *arguments], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def default_base() -> str | None:
    """The commit that HEAD is compared with: the first that exists and lacks some of HEAD's
    commits."""
    tag = git("describe", "--tags", "--abbrev=0")
    for base in ("origin/main", "origin/HEAD", "main", (tag or "").strip()):
        is_own = base == "main" and git("merge-base", "--is-ancestor", "HEAD", base) is not None
        if base and git("rev-parse", "--verify", base) is not None and not is_own:
            return base
    return None


def check(options: argparse.Namespace) -> gate.Found:
    """The number of new commits, and a line for each thing that is wrong."""
    base = options.base or default_base()
    if base is None:
        print("skipped: no origin, tag, other branch or BASE says which commits are new")
        return 0, []
    listed = git("log", "--no-merges", "--format=%h%x00%B%x01", f"{base}..HEAD")
    if listed is None:
        return 0, [f"fails: git knows no commit {base}"]
    commits = [entry.strip().split("\0") for entry in listed.split("\1") if entry.strip()]
    print(f"since {base}:")
    return len(commits), [
        f"{name} fails: {problem}: {message.splitlines()[0]}"
        for name, message in commits
        for problem in complaints(message)
    ]


SOUND = (
    "cpu: select splits long sequences\n",
    "cpu, tests: decode has a kernel of its own\n\nIt can be forced by name.\n",
    "perf: cpu/avx512 raises maxima by sums\n\nforward/dense/f32/d128/n4096: 23.1 to 21.5 ms\n",
    "README: what make test prints\n",
)
PLANTS = (
    "fix things\n",
    "cpu: " + "a" * SUBJECT_CHARACTERS + "\n",
    "cpu:no space\n",
    "cpu: one thing; docs: another\n",
    "cpu: one thing.\n",
    "perf: faster\n",
    "perf: faster\n\nIt really is.\n",
)


def self_test() -> list[str]:
    wrong = [f"refused without reason: {text!r}" for text in SOUND if complaints(text)]
    return wrong + [f"did not see {text!r}" for text in PLANTS if not complaints(text)]


def main() -> int:
    base = {"nargs": "?", "metavar": "BASE"}
    return gate.main(__doc__, check, self_test, "{} commits, {} faults", {"base": base})


if __name__ == "__main__":
    sys.exit(main())
