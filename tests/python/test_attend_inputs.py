"""The tensors that `fdma attend` takes from a file, their layouts, and its messages about them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import numpy as files
from tool import attend_json, attend_tensors, make_inputs, refusal, run_tool

HEADS_FIRST = ("q", "k", "v")


def heads_first(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same in the layout [batch, heads, len, head_dim]."""
    return {
        name: tensor.swapaxes(1, 2).copy() if name in HEADS_FIRST else tensor
        for name, tensor in inputs.items()
    }


def projection() -> dict[str, np.ndarray]:
    random = np.random.default_rng(5)
    dt_proj = random.standard_normal((2, 32)).astype(np.float32)
    return {"dt_proj": dt_proj, "a": np.array([0.5, -0.5], np.float32)}


def test_layout(tmp_path: Path) -> None:
    """out has the layout of q; everything else is the same."""
    inputs = make_inputs(batch=2, q_len=19, kv_len=33)
    options = ("--window", "4", "--causal")
    usual, found = attend_tensors(tmp_path, inputs, *options)
    report, swapped = attend_tensors(tmp_path, heads_first(inputs), *options, "--layout", "bhld")
    assert usual["layout"] == "blhd" and report["layout"] == "bhld"
    assert report["q"] == usual["q"] == [2, 19, 4, 16]
    assert swapped["out"].transpose(1, 2).equal(found["out"])
    assert swapped["lse"].equal(found["lse"])


@pytest.mark.parametrize("scores", ["score", "projection"])
def test_the_other_layout_is_recognised(tmp_path: Path, scores: str) -> None:
    inputs = make_inputs(q_len=20, kv_len=24)
    if scores == "projection":
        del inputs["score"]
        inputs.update(projection())
    path = tmp_path / "in.safetensors"
    files.save_file(heads_first(inputs), path)
    line = refusal("attend", path, "--window", "4")
    assert "'q' [1, 4, 20, 16] and 'k' [1, 2, 24, 16]: want [batch, len, heads, head_dim]" in line
    assert "give --layout bhld" in line
    files.save_file(inputs, path)
    line = refusal("attend", path, "--window", "4", "--layout", "bhld")
    assert "'q' [1, 20, 4, 16]" in line and "give --layout blhd" in line


def test_names(tmp_path: Path) -> None:
    inputs = make_inputs()
    path, same = tmp_path / "in.safetensors", tmp_path / "same.safetensors"
    files.save_file(inputs, same)
    files.save_file({f"layers.0.{name}": x for name, x in inputs.items()}, path)
    line = refusal("attend", path, "--window", "4")
    assert "no tensor 'q' (the file has layers.0.k, layers.0.q" in line
    named = [word for x in inputs for word in (f"--{x}", f"layers.0.{x}")]
    one, two = attend_json(path, "--window", "4", *named), attend_json(same, "--window", "4")
    assert one["mass_mean"] == two["mass_mean"]
    named[1] = "layers.0.p"
    line = refusal("attend", path, "--window", "4", *named)
    assert "no tensor 'layers.0.p', did you mean 'layers.0." in line


def test_list(tmp_path: Path) -> None:
    path = tmp_path / "in.safetensors"
    files.save_file({**make_inputs(), "n": np.zeros((3, 0), np.int64)}, path)
    done = run_tool("attend", path, "--list")
    assert done.returncode == 0 and done.stderr == ""
    assert sorted(done.stdout.splitlines()) == [
        *("k F32 [1, 24, 2, 16]", "n I64 [3, 0]", "q F32 [1, 24, 4, 16]"),
        *("score F32 [1, 2, 24]", "v F32 [1, 24, 2, 16]"),
    ]


def test_score_beside_a_projection(tmp_path: Path) -> None:
    """The tool uses the score, and says so; --dt-proj makes it use the projection."""
    path = tmp_path / "in.safetensors"
    files.save_file({**make_inputs(), **projection()}, path)
    said = "score is taken; the file has dt_proj and a too\n"
    assert said in run_tool("attend", path, "--window", "4").stdout
    assert "dt_proj" not in attend_json(path, "--window", "4")["inputs"]
    projected = run_tool("attend", path, "--window", "4", "--dt-proj", "dt_proj")
    assert said not in projected.stdout and "\n  score " in projected.stdout
    report = attend_json(path, "--window", "4", "--dt-proj", "dt_proj")
    assert list(report["inputs"]) == ["q", "k", "v", "dt_proj", "a"] and report["score_ms"] > 0


def test_what_the_inputs_hold(tmp_path: Path) -> None:
    """dtypes that differ, and NaN."""
    inputs = make_inputs()
    inputs["k"] = inputs["k"].astype(np.float16)
    inputs["v"] = inputs["v"].astype(np.float64)
    inputs["q"][0, 3, 1, :2] = np.nan
    path = tmp_path / "in.safetensors"
    files.save_file(inputs, path)
    text = run_tool("attend", path, "--window", "4").stdout
    assert "q is F32, k F16, v F64\n" in text and " q has 2 NaN\n" in text
    assert attend_json(path, "--window", "4")["inputs"] == {
        "q": {"dtype": "F32", "nan": 2},
        "k": {"dtype": "F16", "nan": 0},
        "v": {"dtype": "F64", "nan": 0},
        "score": {"dtype": "F32", "nan": 0},
    }


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_that_ran(tmp_path: Path, threads: int) -> None:
    path = tmp_path / "in.safetensors"
    files.save_file(make_inputs(q_len=1024, kv_len=1024, q_heads=8, head_dim=64), path)
    done = attend_json(path, "--window", "64", "--threads", str(threads))
    assert done["threads"] == threads


@pytest.mark.parametrize(
    ("locale", "shade"), [("C", "#"), ("de_DE.ISO-8859-1", "#"), ("C.UTF-8", "█"), (None, "█")]
)
def test_picture_in_the_locale(example: Path, locale: str | None, shade: str) -> None:
    variables = {"LC_ALL": None, "LC_CTYPE": None, "LANG": locale}
    done = run_tool("attend", example, "--window", "24", env=variables)
    assert shade * 24 in done.stdout and done.stdout.isascii() == (shade == "#")
