"""The results, times and pictures of `fdma attend`; the tensors that it takes from a file, their
layouts, and its messages about them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import evaluate
import numpy as np
import pytest
import torch
from safetensors import numpy as files
from samples import combinations
from tool import EXAMPLE, attend_json, attend_tensors, make_inputs, refusal, run_tool

ROUNDING = 1e-4  # rounding errors of float32 are smaller here; a wrong row is off by 0.1


def projection() -> dict[str, np.ndarray]:
    random = np.random.default_rng(5)
    dt_proj = random.standard_normal((2, 32)).astype(np.float32)
    return {"dt_proj": dt_proj, "a": np.array([0.5, -0.5], np.float32)}


def test_the_input_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "in.safetensors"
    files.save_file(make_inputs(), path)
    content = path.read_bytes()
    (tmp_path / "link").symlink_to(path)
    os.link(path, tmp_path / "hard")
    (tmp_path / "folder").mkdir()
    for name in ("in.safetensors", "link", "hard", "folder/../in.safetensors"):
        line = refusal("attend", path, "--window", "4", "--out", tmp_path / name)
        assert f"--out is '{tmp_path / name}', which is the input, want another file" in line
    assert "which is the input" in refusal(
        "attend", tmp_path / "link", "--window", "4", "--out", path
    )
    assert path.read_bytes() == content and len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(
    ("dtype", "mode"),
    [
        ("f16", []),
        ("f16", ["--causal"]),
        ("f16", ["--causal", "--scope", "global"]),
        ("bf16", ["--causal"]),
        ("f32", []),
    ],
)
def test_real_input(dtype: str, mode: list[str]) -> None:
    report = attend_json(EXAMPLE, "--window", "64", "--dtype", dtype, *mode)
    assert report["dtype"] == dtype
    assert report["queries_compared"] == 512 and report["sampled"] is False
    assert 0 < report["mass_worst"] <= report["mass_mean"] <= 1
    assert 0 < report["keys_per_query"] <= 64
    assert report["keys_visible"] == (256.5 if mode else 512)
    if dtype != "f32":  # rounding of the output dominates
        assert report["difference_dense"] <= report["output_step"]
        assert report["difference_selected"] <= report["output_step"]


def test_whole_window_has_all_the_mass() -> None:
    report = attend_json(EXAMPLE, "--window", "512", "--causal", "--dtype", "f32")
    assert report["mass_mean"] == pytest.approx(1, abs=1e-5)
    assert report["mass_worst"] == pytest.approx(1, abs=1e-5)
    assert report["keys_per_query"] == report["keys_visible"] == 256.5


@pytest.mark.parametrize(
    ("bias", "mode"),
    combinations(["none", "linear", "exp"], [[], ["--causal"], ["--causal", "--scope", "global"]]),
)
def test_outputs_are_attention(tmp_path: Path, bias: str, mode: list[str]) -> None:
    inputs, softcap = make_inputs(seed=3, q_len=19, kv_len=33), 1.5 if len(mode) > 1 else 0
    options = ("--window", "5", "--bias", bias, *mode, "--softcap", str(softcap))
    report, written = attend_tensors(tmp_path, inputs, *options)
    q, k, v, score = (torch.from_numpy(inputs[name]) for name in ("q", "k", "v", "score"))
    terms = {"none": None, "linear": score, "exp": score.exp()}[bias]
    causal, scope = "--causal" in mode, "causal" if mode == ["--causal"] else "global"
    mask = evaluate.visible_keys(19, 33, causal, evaluate.kept_keys(score, 5, scope))
    assert set(written) == {"out", "lse"}
    results = (written["out"], written["lse"])
    evaluate.assert_attention(results, q, k, v, mask, bias=terms, softcap=softcap)
    assert report["keys_per_query"] == pytest.approx(mask.sum().item() / (2 * 19), rel=1e-5)


def test_newest_keys_and_sinks(tmp_path: Path) -> None:
    inputs = make_inputs(seed=8, q_len=19, kv_len=33)
    options = ("--window", "5", "--recent", "3", "--sinks", "2", "--causal", "--bias", "linear")
    report, written = attend_tensors(tmp_path, inputs, *options)
    q, k, v, score = (torch.from_numpy(inputs[name]) for name in ("q", "k", "v", "score"))
    kept = evaluate.kept_keys(score, 5, "causal", recent=3, sinks=2)
    mask = evaluate.visible_keys(19, 33, True, kept)
    evaluate.assert_attention((written["out"], written["lse"]), q, k, v, mask, bias=score)
    assert (report["window"], report["recent"], report["sinks"]) == (5, 3, 2)
    refused = run_tool("attend", tmp_path / "absent.safetensors", "--window", "5", "--recent", "-1")
    assert refused.returncode == 2 and "--recent" in refused.stderr


def test_scores_from_projection(tmp_path: Path) -> None:
    """Scores a * softplus(v . dt_proj) are the same from the file and from the tool."""
    inputs = make_inputs(seed=4)
    weights = projection()
    dt = inputs["v"].reshape(24, 32).astype(np.float64) @ weights["dt_proj"].T
    inputs["score"] = (np.logaddexp(0, dt) * weights["a"]).T[None].astype(np.float32).copy()
    brought, derived = tmp_path / "score.safetensors", tmp_path / "projection.safetensors"
    files.save_file(inputs, brought)
    del inputs["score"]
    files.save_file({**inputs, **weights}, derived)
    one, two = (attend_json(path, "--window", "6", "--causal") for path in (brought, derived))
    assert one["score_ms"] is None and two["score_ms"] > 0
    assert one["mass_mean"] == pytest.approx(two["mass_mean"], rel=1e-4)
    assert one["mass_worst_row"] == two["mass_worst_row"]


@pytest.mark.parametrize(("dtype", "kind"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_conversion_rounds_to_even(tmp_path: Path, dtype: str, kind: torch.dtype) -> None:
    """Attention over one key returns the converted v of that key."""
    random = np.random.default_rng(6)
    bits = random.integers(0, 2**32, 4096, np.uint32)
    bits[::2] &= 0xFFFFF000  # many ties
    bits[::3] = bits[::3] & 0x807FFFFF | random.integers(98, 143, 1366, np.uint32) << 23
    values = bits.view(np.float32)
    values = np.where(np.abs(values) < 60000, values, 0).reshape(1, 1, 16, 256)
    zero = np.zeros_like(values)
    tensors = {"q": zero, "k": zero, "v": values, "score": np.zeros((1, 16, 1), np.float32)}
    options = ("--window", "1", "--dtype", dtype, "--kernel", "reference")
    _, written = attend_tensors(tmp_path, tensors, *options)
    assert written["out"].dtype == kind
    assert torch.equal(written["out"], torch.from_numpy(values).to(kind))


def test_nan_in_the_input(tmp_path: Path) -> None:
    """A row with NaN in its q is NaN, in the kernel and in the reference."""
    inputs = make_inputs()
    inputs["q"][0, 3, 1, :] = np.nan
    report, written = attend_tensors(tmp_path, inputs, "--window", "4")
    assert report["mass_mean"] is None and report["mass_worst"] is None
    assert report["mass_worst_row"] == [0, 1, 3]
    assert 0 < report["difference_dense"] < ROUNDING
    assert 0 < report["difference_selected"] < ROUNDING
    nan = written["out"].isnan()
    assert nan[0, 3, 1].all() and nan.sum() == 16


def test_long_input_is_sampled(tmp_path: Path) -> None:
    path = tmp_path / "long.safetensors"
    files.save_file(make_inputs(q_len=6000, kv_len=6000, q_heads=1, kv_heads=1), path)
    done = run_tool("attend", path, "--window", "100", "--causal")
    assert done.returncode == 0
    assert "of 6000 queries compared" in done.stdout
    report = attend_json(path, "--window", "100", "--causal")
    assert report["sampled"] is True
    assert 2 <= report["queries_compared"] < 6000
    assert 0 < report["difference_dense"] < ROUNDING
    assert 0 < report["difference_selected"] < ROUNDING


def test_picture(tmp_path: Path) -> None:
    """A causal window over all keys is a full triangle."""
    path = tmp_path / "in.safetensors"
    files.save_file(make_inputs(q_len=8, kv_len=8), path)
    done = run_tool("attend", path, "--window", "8", "--causal")
    rows = [line for line in done.stdout.splitlines() if line[:6].strip().isdigit()]
    assert [line[7:] for line in rows] == ["█" * (i + 1) + " " * (7 - i) for i in range(8)]


@pytest.mark.parametrize("mode", [[], ["--causal"]])
def test_picture_fits_a_terminal(mode: list[str]) -> None:
    done = run_tool("attend", EXAMPLE, "--window", "64", *mode)
    lines = done.stdout.splitlines()
    start = next(n for n, line in enumerate(lines) if line.strip().endswith("511"))
    picture = [line for line in lines[start:] if line]
    assert 5 < len(picture) <= 24
    assert max(map(len, picture)) <= 80
    assert "░ some" in picture[-1] and "covers" in picture[-2]


def test_times_have_a_spread(example: Path) -> None:
    report = attend_json(example, "--window", "4", "--causal")
    assert report["runs"] >= 3
    for name in ("dense_ms", "select_ms", "selected_ms"):
        low, high = report[f"{name}_range"]
        assert 0 < low <= report[name] <= high
    fastest = report["dense_ms_range"][0] / report["selected_ms_range"][0]
    assert report["speedup"] == pytest.approx(fastest, rel=1e-4)
    medians = report["dense_ms"] / report["selected_ms"]
    assert report["speedup_median"] == pytest.approx(medians, rel=1e-4)
    text = run_tool("attend", example, "--window", "4", "--causal").stdout
    assert re.search(r"dense +fastest [\d.]+ ms, median [\d.]+, slowest [\d.]+\n", text)
    assert re.search(r"speedup +[\d.]+ by the fastest runs, [\d.]+ by the medians\n", text)


@pytest.mark.parametrize(
    ("bias", "dtype"), combinations(["none", "linear", "exp"], ["f32", "f16", "bf16"])
)
def test_decoding(example: Path, bias: str, dtype: str) -> None:
    """Decoding one by one after a prefill, and from the first position on."""
    options = ("--window", "4", "--recent", "2", "--sinks", "1", "--causal", "--dtype", dtype)
    for count in (10, 24):
        report = attend_json(example, *options, "--bias", bias, "--decode", str(count))
        assert report["decode_tokens"] == count
        assert report["difference_decode"] <= report["difference_allowed"] < 0.2
        assert 0 < report["decode_ms_range"][0] <= report["decode_ms"]
        assert report["full_cache_bytes"] == 2 * 24 * 2 * 16 * (4 if dtype == "f32" else 2)
        rows = 6 * 2 * 16 * (4 if dtype == "f32" else 2)  # 6 of 2 heads
        assert 2 * rows < report["cache_bytes"] < 2 * rows + 6 * 2 * 12 + 7 * 64


def test_decoding_a_batch(tmp_path: Path) -> None:
    """A batch with fewer queries than keys, and NaN in some of them."""
    path = tmp_path / "batch.safetensors"
    inputs = make_inputs(batch=3, q_len=20, kv_len=200)
    inputs["q"][1, 15] = np.nan
    files.save_file(inputs, path)
    report = attend_json(path, "--window", "30", "--causal", "--decode", "20")
    assert report["difference_decode"] <= report["difference_allowed"]
    done = run_tool("attend", path, "--window", "30", "--causal", "--decode", "20")
    assert re.search(r"decode +20 tokens: fastest [\d.]+ ms a token, median", done.stdout)
    assert "largest difference from the whole sequence" in done.stdout


def test_decoding_is_refused(example: Path) -> None:
    wrong = refusal("attend", example, "--window", "4", "--decode", "3")
    assert wrong == "fdma attend: --decode needs --causal, and causal scope\n"
    wrong = refusal("attend", example, "--window", "4", "--causal", "--decode", "25")
    assert wrong == "fdma attend: --decode is 25, want at most the file's 24 positions\n"


# ---- inputs ----

HEADS_FIRST = ("q", "k", "v")


def heads_first(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same in the layout [batch, heads, len, head_dim]."""
    return {
        name: tensor.swapaxes(1, 2).copy() if name in HEADS_FIRST else tensor
        for name, tensor in inputs.items()
    }


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
