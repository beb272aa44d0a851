"""The `fdma` command: usage, exit codes, what it prints and what it writes."""

from __future__ import annotations

import json
import resource
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import numpy as files
from safetensors import torch as torch_files
from tool import EXAMPLE, TOOL, attend_json, make_inputs, refusal, run_tool

ROUNDING = 1e-4  # float32 stays below that here; a wrong row is off by 0.1
COMMANDS = ["attend", "check", "bench", "info"]


@pytest.fixture
def example(tmp_path: Path) -> Path:
    path = tmp_path / "example.safetensors"
    files.save_file(make_inputs(), path)
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str) -> None:
    done = run_tool(command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: fdma {command}")
    assert done.stderr == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_mistyped_option(command: str) -> None:
    assert "--tread" in refusal(command, "--tread", "2")


def test_mistyped_option_is_recognised() -> None:
    assert "did you mean --window?" in refusal("attend", EXAMPLE, "--windov", "64")


def test_no_command() -> None:
    done = run_tool()
    assert done.returncode == 2
    assert "usage: fdma COMMAND" in done.stderr


def test_unknown_command() -> None:
    assert "'atend'" in refusal("atend")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--window", "4"], "FILE.safetensors is missing"),
        (["f"], "--window N is missing"),
        (["f", "--window"], "--window wants a value"),
        (["f", "--window", "-1"], "--window is '-1'"),
        (["f", "--window", "4x"], "--window is '4x'"),
        (["f", "--window", "99999999999999999999"], "--window is '9999"),
        (["f", "--window", "4", "--scale", "nan"], "--scale is 'nan'"),
        (["f", "--window", "4", "--softcap", "-2"], "--softcap is '-2'"),
        (["f", "--window", "4", "--bias", "cubic"], "--bias is 'cubic'"),
        (["f", "--window", "4", "--dtype", "f64"], "--dtype is 'f64'"),
        (["f", "--window", "4", "--causal=1"], "--causal takes no value"),
        (["f", "--window", "4", "g"], "'g' is one argument too many"),
        (["f", "--window", "4", "--scope", "causal"], "--scope causal wants --causal"),
        (["f", "--window", "4"], "f: cannot be opened: No such file"),
    ],
)
def test_bad_usage_of_attend(arguments: list[str], words: str) -> None:
    assert words in refusal("attend", *arguments)


def test_unknown_kernel(example: Path) -> None:
    assert "nonsense" in refusal("attend", example, "--window", "4", "--kernel", "nonsense")


def test_info_names_kernels_and_choices() -> None:
    done = run_tool("info")
    assert done.returncode == 0
    lines = [line.split() for line in done.stdout.splitlines()]
    for operation in ("score", "select", "lists", "forward"):
        assert ["cpu/scalar", operation, "yes"] in lines
        assert ["reference", operation, "yes"] in lines
    start = lines.index(["forward", "would", "run", "on"]) + 1
    chosen = {line[0]: line[1] for line in lines[start : start + 4]}
    assert set(chosen) == {"f32", "f16", "bf16", "f64"}
    assert chosen["f32"].startswith("cpu/")
    assert chosen["f64"] == "reference"


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
    assert 0 < report["keys_a_query"] <= 64
    assert report["keys_visible"] == (256.5 if mode else 512)
    if dtype != "f32":  # rounding of the output dominates
        assert report["difference_dense"] <= report["output_step"]
        assert report["difference_selected"] <= report["output_step"]


def test_whole_window_carries_all() -> None:
    report = attend_json(EXAMPLE, "--window", "512", "--causal", "--dtype", "f32")
    assert report["mass_mean"] == pytest.approx(1, abs=1e-5)
    assert report["mass_worst"] == pytest.approx(1, abs=1e-5)
    assert report["keys_a_query"] == report["keys_visible"] == 256.5


def kept_keys(score: np.ndarray, window: int, causal: bool, own: bool, q_len: int) -> np.ndarray:
    """Boolean [q_len, kv_len] of one head, by sorting what each query ranks."""
    kv_len = len(score)
    kept = np.zeros((q_len, kv_len), bool)
    for i in range(q_len):
        position = i + kv_len - q_len
        ranked = range(position + 1) if own else range(kv_len)
        best = sorted(ranked, key=lambda j: (score[j], j), reverse=True)[:window]
        kept[i, [j for j in best if not causal or j <= position]] = True
    return kept


def attention(
    inputs: dict[str, np.ndarray],
    kept: np.ndarray,
    bias: np.ndarray,
    softcap: float,
    dtype: type,
) -> tuple[np.ndarray, np.ndarray]:
    """out and lse of batch 1, plainly evaluated in `dtype`; kept [kv_heads, q_len, kv_len]."""
    q, k, v = (inputs[name][0].astype(dtype) for name in "qkv")
    group = q.shape[1] // k.shape[1]
    out = np.zeros(q.shape, dtype)
    lse = np.full((q.shape[1], q.shape[0]), -np.inf, dtype)
    for h in range(q.shape[1]):
        g = h // group
        logits = q[:, h] @ k[:, g].T * dtype(q.shape[2] ** -0.5)
        if softcap > 0:
            logits = dtype(softcap) * np.tanh(logits / dtype(softcap))
        logits = np.where(kept[g], logits + bias[0, g].astype(dtype), dtype(-np.inf))
        for i in np.flatnonzero(kept[g].any(axis=1)):
            most = logits[i].max()
            weights = np.exp(logits[i] - most)
            out[i, h] = weights / weights.sum() @ v[:, g]
            lse[h, i] = most + np.log(weights.sum())
    return out, lse


def assert_close(found: np.ndarray, plain: np.ndarray, exact: np.ndarray) -> None:
    """At most twice the error of plain float32, and one rounding step."""
    finite = np.isfinite(exact)
    assert finite.any()
    assert (np.where(finite, 0, found) == np.where(finite, 0, exact)).all()
    largest = np.abs(exact[finite]).max()
    found, plain, exact = found[finite], plain[finite], exact[finite]
    limit = 2 * np.abs(plain - exact).max() + np.spacing(np.float32(largest))
    assert np.abs(found - exact).max() <= limit


@pytest.mark.parametrize("bias", ["none", "linear", "exp"])
@pytest.mark.parametrize(
    ("mode", "softcap"),
    [([], 0), (["--causal"], 0), (["--causal", "--scope", "global"], 1.5)],
)
def test_outputs_are_attention(tmp_path: Path, bias: str, mode: list[str], softcap: float) -> None:
    inputs = make_inputs(seed=3, q_len=19, kv_len=33)
    path, out_path = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    files.save_file(inputs, path)
    report = attend_json(
        path, "--window", "5", "--bias", bias, *mode, "--softcap", str(softcap), "--out", out_path
    )
    assert report["out"] == str(out_path)
    written = files.load_file(out_path)
    score = inputs["score"]
    terms = {"none": 0 * score, "linear": score, "exp": np.exp(score)}[bias]
    causal, own = "--causal" in mode, mode == ["--causal"]
    kept = np.array([kept_keys(row, 5, causal, own, 19) for row in score[0]])
    exact = attention(inputs, kept, terms, softcap, np.float64)
    plain = attention(inputs, kept, terms, softcap, np.float32)
    assert set(written) == {"out", "lse"}
    assert_close(written["out"][0], plain[0], exact[0])
    assert_close(written["lse"][0], plain[1], exact[1])
    assert report["keys_a_query"] == pytest.approx(kept.sum() / (2 * 19), rel=1e-5)


def test_scores_from_projection(tmp_path: Path) -> None:
    """a * softplus(v . dt_proj), from the file or from the tool, are the same scores."""
    inputs = make_inputs(seed=4)
    random = np.random.default_rng(5)
    dt_proj = random.standard_normal((2, 32)).astype(np.float32)
    a = np.array([0.5, -0.5], np.float32)
    dt = inputs["v"].reshape(24, 32).astype(np.float64) @ dt_proj.T
    inputs["score"] = (np.logaddexp(0, dt) * a).T[None].astype(np.float32).copy()
    brought, derived = tmp_path / "score.safetensors", tmp_path / "projection.safetensors"
    files.save_file(inputs, brought)
    del inputs["score"]
    files.save_file({**inputs, "dt_proj": dt_proj, "a": a}, derived)
    one, two = (attend_json(path, "--window", "6", "--causal") for path in (brought, derived))
    assert one["score_ms"] is None and two["score_ms"] > 0
    assert one["mass_mean"] == pytest.approx(two["mass_mean"], rel=1e-4)
    assert one["mass_worst_row"] == two["mass_worst_row"]


@pytest.mark.parametrize(("dtype", "kind"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_conversion_rounds_to_even(tmp_path: Path, dtype: str, kind: torch.dtype) -> None:
    """The attention over one key is its v: what comes out is what v was converted to."""
    random = np.random.default_rng(6)
    bits = random.integers(0, 2**32, 4096, np.uint32)
    bits[::2] &= 0xFFFFF000  # many ties
    bits[::3] = bits[::3] & 0x807FFFFF | random.integers(98, 143, 1366, np.uint32) << 23
    values = bits.view(np.float32)
    values = np.where(np.abs(values) < 60000, values, 0).reshape(1, 1, 16, 256)
    path, out_path = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    zero = np.zeros_like(values)
    score = np.zeros((1, 16, 1), np.float32)
    files.save_file({"q": zero, "k": zero, "v": values, "score": score}, path)
    attend_json(path, "--window", "1", "--dtype", dtype, "--kernel", "reference", "--out", out_path)
    out = torch_files.load_file(out_path)["out"]
    assert out.dtype == kind
    assert torch.equal(out, torch.from_numpy(values).to(kind))


def test_nan_in_the_input(tmp_path: Path) -> None:
    """NaN is a value: the row that sees it is NaN, in the tool as in the reference."""
    inputs = make_inputs()
    inputs["q"][0, 3, 1, :] = np.nan
    path, out_path = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    files.save_file(inputs, path)
    report = attend_json(path, "--window", "4", "--out", out_path)
    assert report["mass_mean"] is None and report["mass_worst"] is None
    assert report["mass_worst_row"] == [0, 1, 3]
    assert 0 < report["difference_dense"] < ROUNDING
    assert 0 < report["difference_selected"] < ROUNDING
    nan = np.isnan(files.load_file(out_path)["out"])
    assert nan[0, 3, 1].all() and nan.sum() == 16


def test_long_input_is_sampled(tmp_path: Path) -> None:
    path = tmp_path / "long.safetensors"
    files.save_file(make_inputs(q_len=6000, kv_len=6000, q_heads=1, kv_heads=1), path)
    done = run_tool("attend", path, "--window", "100", "--causal")
    assert done.returncode == 0
    assert "sampled: " in done.stdout and "of 6000 queries" in done.stdout
    report = attend_json(path, "--window", "100", "--causal")
    assert report["sampled"] is True
    assert 2 <= report["queries_compared"] < 6000
    assert 0 < report["difference_dense"] < ROUNDING
    assert 0 < report["difference_selected"] < ROUNDING


def test_picture(tmp_path: Path) -> None:
    """A window over everything, causal: a full triangle."""
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
    assert "░ some" in picture[-1] and "queries x" in picture[-2]


def test_output_replaces_and_leaves_no_temporary(example: Path, tmp_path: Path) -> None:
    out_path = tmp_path / "out.safetensors"
    out_path.write_bytes(b"old")
    link = tmp_path / "link.safetensors"
    link.symlink_to(out_path)
    attend_json(example, "--window", "4", "--out", link)
    assert link.is_symlink()
    assert set(files.load_file(out_path)) == {"out", "lse"}
    assert len(list(tmp_path.iterdir())) == 3
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    assert out_path.stat().st_mode == ordinary.stat().st_mode


@pytest.mark.parametrize("old", [b"old", None])
def test_full_disk_keeps_the_old_output(example: Path, tmp_path: Path, old: bytes | None) -> None:
    out_path = tmp_path / "out.safetensors"
    if old:
        out_path.write_bytes(old)
    before = sorted(tmp_path.iterdir())
    limit = 4096  # bytes that a file may have: less than out needs

    def limit_file_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    line = refusal(
        *("attend", example, "--window", "4", "--json", "--out", out_path),
        code=1,
        preexec_fn=limit_file_size,
    )
    assert "cannot be written: File too large" in line
    assert sorted(tmp_path.iterdir()) == before
    if old:
        assert out_path.read_bytes() == old


def test_unwritable_outputs(example: Path, tmp_path: Path) -> None:
    common = ("attend", example, "--window", "4", "--out")
    assert "No space left" in refusal(*common, "/dev/full", code=1)
    assert "No such file" in refusal(*common, tmp_path / "nowhere" / "out", code=1)
    assert "cannot be written" in refusal(*common, tmp_path, code=1)


def test_unwritable_standard_output() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([TOOL, "info"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert "standard output cannot be written" in done.stderr


def bench_lines(tmp_path: Path, *arguments: str) -> list[dict[str, object]]:
    path = tmp_path / "bench.json"
    done = run_tool("bench", *arguments, "--json", path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # progress is for terminals
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_bench_forward(tmp_path: Path) -> None:
    machine, row = bench_lines(tmp_path, "forward/dense/f32/d128/n1024")
    assert list(machine) == ["machine", "cores", "device", "compiler", "date", "commit"]
    assert list(row) == [
        *("case", "kernel", "threads", "ms", "spread"),
        *("useful_gflops", "of_peak", "ns_per_key"),
    ]
    assert row["case"] == "forward/dense/f32/d128/n1024"
    assert row["threads"] == 1 and row["ns_per_key"] is None
    flops = 4 * 128 * sum(i + 1 for i in range(1024))
    assert row["useful_gflops"] * row["ms"] * 1e6 == pytest.approx(flops, rel=1e-4)
    assert 0 < row["of_peak"] < 1.5


def test_bench_select(tmp_path: Path) -> None:
    machine, *rows = bench_lines(tmp_path, "select/falling/*", "--all")
    assert machine["cores"] >= 1
    kernels = {row["kernel"] for row in rows}
    assert "cpu/scalar" in kernels and "reference" not in kernels
    for row in rows:
        assert row["case"] == "select/falling/n131072/w2048"
        assert row["useful_gflops"] is None and row["of_peak"] is None
        assert row["ns_per_key"] * 131072 == pytest.approx(row["ms"] * 1e6, rel=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "backward/dense/f32/d64/n4096",
        "score_backward/f32/d128/n16384/h8g8",
    ],
)
def test_bench_of_every_kernel(tmp_path: Path, name: str) -> None:
    _, *rows = bench_lines(tmp_path, name, "--all")
    kernels = [row["kernel"] for row in rows]
    assert "cpu/scalar" in kernels and "reference" not in kernels
    assert all(row["case"] == name and row["ms"] > 0 for row in rows)


def test_bench_lists(tmp_path: Path) -> None:
    _, row = bench_lines(tmp_path, "lists/iid/t512/n16384/w1024")
    assert row["useful_gflops"] is None and row["of_peak"] is None
    assert row["ns_per_key"] * 16384 == pytest.approx(row["ms"] * 1e6, rel=1e-4)
    assert 0 < row["of_forward"] < 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-case"], "no case matches 'no-such-case'"),
        (["--threads", "0"], "--threads is 0"),
        (["--all", "--kernel", "cpu"], "exclude each other"),
        (["select/falling", "more"], "'more' is one argument too many"),
    ],
)
def test_bad_usage_of_bench(arguments: list[str], words: str) -> None:
    assert words in refusal("bench", *arguments)


def test_bench_of_an_unknown_kernel_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    done = run_tool("bench", "select/falling", "--kernel", "nonsense", "--json", path)
    assert done.returncode == 2 and "nonsense" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["check", "bench"])
@pytest.mark.parametrize(
    ("device", "words"), [("x", "want cpu, cuda or a number"), ("99", "--device is '99'")]
)
def test_devices_that_are_not_there(command: str, device: str, words: str) -> None:
    assert words in refusal(command, "--device", device)
