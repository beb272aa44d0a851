"""The notebook in examples, run from beginning to end in a kernel of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

from extra import in_extra
from programs import ROOT, output_of

NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"
EXECUTE = """
import sys
import nbclient, nbformat
book = nbformat.read(sys.argv[1], 4)
nbformat.validate(book)
nbclient.NotebookClient(book, timeout=300, kernel_name="python3").execute()
nbformat.write(book, sys.argv[2])
"""


def test_it_runs(tmp_path: Path) -> None:
    env = {"JUPYTER_PLATFORM_DIRS": "1", "HOME": str(tmp_path), "MPLBACKEND": None}
    done = tmp_path / "done.ipynb"
    output_of(in_extra("-c", EXECUTE, NOTEBOOK, done, env=env, cwd=tmp_path, timeout=600))
    outputs = [
        one for cell in json.loads(done.read_text())["cells"] for one in cell.get("outputs", ())
    ]
    printed = "".join("".join(one["text"]) for one in outputs if one["output_type"] == "stream")
    assert sum("image/png" in one.get("data", ()) for one in outputs) == 2
    (right,) = re.findall(r"^right answers: (\d+)%$", printed, re.MULTILINE)
    assert int(right) > 60  # by chance 12
    (kept,) = re.findall(r"^kept by score until the questions: (.*)$", printed, re.MULTILINE)
    (marks,) = re.findall(r"^marks in the text: (...)$", printed, re.MULTILINE)
    assert len(kept) <= 8 and len(set(marks) & set(kept)) >= 2
    assert len(re.findall(r"^[xyz] -> ., right is .$", printed, re.MULTILINE)) == 3
    assert "after 120 tokens" in printed


def test_it_is_stored_without_outputs() -> None:
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None
