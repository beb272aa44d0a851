"""The benchmark `peers` on a CUDA device, without one: its cases, the numbers of a row, its checks
of outputs, its table and picture, and runs from inputs to rows. Tensors are on the CPU, SDPA runs
with any back end, and times are given. FlashAttention-4 is a module made by this file, or absent.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Callable

import benchmarking
import evaluate
import flash_dmattn
import peers_cuda
import peers_cuda_cases
import peers_flash4
import peers_sliding
import picture
import pytest
import table
import torch
from benches import Row, main, plant, read, refuse
from cases import SDPA_HAS_GROUPS
from evaluate import grouped_sdpa
from programs import ROOT
from torch.overrides import TorchFunctionMode

BATCH = 2
CASE = peers_cuda_cases.make_case("attention", 4, 2, 16, 90, 20, batch=BATCH, of_dense=(0.7, 1.0))


def make_inputs() -> Any:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(BATCH, 90, heads, 16, generator=generator).bfloat16() for heads in (4, 2, 2)
    )
    score = torch.randint(0, 9, (BATCH, 2, 90), generator=generator).float()  # with ties
    return SimpleNamespace(case=CASE, query=query, key=key, value=value, score=score)


@pytest.mark.parametrize("installed", [False, True])
def test_names_and_goals(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_flash4, "is_installed", lambda: installed)
    cases = peers_cuda_cases.all_cases(quick=False)
    names = [case.name() for case in cases]
    assert len(set(names)) == len(names)
    assert "attention/bf16/h32g8/d128/n1048576/w2048" in names and "select/g1/n32768/w1024" in names
    assert "backward/bf16/b16/h8g4/d64/n1024/w256" in names
    for case in cases:
        peers = [peer.name for peer in peers_cuda.peers_of(case)]
        assert peers[0] == "fdma" and len(set(peers)) == len(peers)
        assert set(case.goals) <= set(peers)
        compared = ("attention", "growing", "dense", "backward", "dense-backward")
        is_dense = case.kind in compared and case.length <= 131072
        assert ("flash4" in peers) == (installed and is_dense)
        needed = {goal.figure for goal in case.goals.values()} & {"of_dense", "times_cudnn"}
        assert "cudnn" in peers or not needed
    quick = peers_cuda_cases.all_cases(quick=True)
    assert 0 < len(quick) < len(cases)
    assert max(case.length for case in quick) == peers_cuda_cases.QUICK_LENGTH


# A goal of each kind.
GOALS = """
attention/bf16/h32g8/d128/n131072/w2048: >= 0.95 of dense (aim 1.1)
backward/bf16/b32/h8g4/d64/n512/w128: >= 0.75 times cudnn (aim 1.2)
one-query/bf16/h2g1/d64/n524288/w1024: <= 0.095 ms (aim 0.06)
selected-backward/bf16/h32g8/d128/n32768/w2048 fdma-deterministic: <= 1.15 of fast (aim 1.05)
"""


def test_goals() -> None:
    cases = {case.name(): case for case in peers_cuda_cases.all_cases(quick=False)}
    for line in GOALS.strip().splitlines():
        case, _, words = line.partition(": ")
        name, _, peer = case.partition(" ")
        assert cases[name].goals[peer or "fdma"].words() == words


def test_goal_without_an_aim() -> None:
    goal = peers_cuda_cases.Goal("times_cudnn", 1.25)
    assert goal.words() == ">= 1.25 times cudnn"
    assert goal.met(1.25) and not goal.met(1.2)


def test_documents_show_cases_that_are_measured() -> None:
    """benchmarks/tables.txt names them."""
    names = [case.name() for case in peers_cuda_cases.all_cases(quick=False)]
    file, shown = "", []
    for line in (ROOT / "benchmarks" / "tables.txt").read_text().splitlines():
        if line.startswith("table "):
            file = line.split()[2]
        elif line.startswith("row: ") and file == "peers-cuda.json":
            shown.append(line.split()[1])
    assert shown and set(shown) <= set(names)


@pytest.mark.parametrize("window", [0, 20, 90, 200])
def test_flops(window: int) -> None:
    pairs = sum(min(position + 1, window or 90) for position in range(90))
    assert CASE.flops(window) == 4 * 16 * 4 * BATCH * pairs


@pytest.mark.parametrize("window", [0, 1, 20, 90])
def test_best_keys(window: int) -> None:
    score = make_inputs().score[0, 0]
    rows = torch.tensor([0, 1, 19, 20, 55, 89])
    kept = peers_cuda.best_keys(score, rows, window)
    for row, keys in zip(rows.tolist(), kept):
        best = evaluate.best_keys(score.tolist(), list(range(row + 1)), window or 90)
        assert keys.nonzero().flatten().tolist() == sorted(best)


def attend(inputs: Any, window: int = 20) -> torch.Tensor:
    selection = flash_dmattn.select(inputs.score, window)
    return flash_dmattn.attention(
        inputs.query, inputs.key, inputs.value, selection=selection, causal=True
    )[0]


def test_right_outputs_pass() -> None:
    inputs = make_inputs()
    peers_cuda.check_output(inputs, attend(inputs), inputs.score, None, "the peer")
    dense, _ = flash_dmattn.attention(inputs.query, inputs.key, inputs.value, causal=True)
    peers_cuda.check_output(inputs, dense, None, None, "the peer")


@pytest.mark.parametrize("mistake", ["nan", "unwritten", "entry", "window", "dense", "order"])
def test_wrong_outputs_are_found(mistake: str) -> None:
    inputs = make_inputs()
    out = attend(inputs, 19 if mistake == "window" else 20)
    if mistake == "nan":
        out[0, 33, 1, 5] = torch.nan
    elif mistake == "unwritten":
        out[0, 89] = 0
    elif mistake == "entry":
        out[1] = out[0]
    elif mistake == "dense":
        out, _ = flash_dmattn.attention(inputs.query, inputs.key, inputs.value, causal=True)
    score = -inputs.score if mistake == "order" else inputs.score
    with pytest.raises(benchmarking.Disagreement, match="the peer"):
        peers_cuda.check_output(inputs, out, score, None, "the peer")


TIMES = {
    "fdma": [2.0, 2.2, 2.1],
    "cudnn": [14.0, 14.0, 15.0],
    "flash": [26.0, 27.0, 25.0],
    "flash4": [10.5, 10.5, 11.0],
}


def make_rows(case: Any = CASE) -> list[Row]:
    peers = [peers_cuda.FUSED, peers_cuda.CUDNN, peers_cuda.FLASH, peers_cuda.FLASH4]
    return [peers_cuda.make_row(case, peer, TIMES, []) for peer in peers]


def test_rows() -> None:
    case = CASE._replace(goals={"fdma": peers_cuda_cases.Goal("of_dense", 0.7, 1.0)}, window=45)
    ours, cudnn, flash, flash4 = make_rows(case)
    assert (ours["ms"], ours["ratio"], ours["of_iid"], ours["of_read"]) == (2.1, None, None, None)
    useful = case.flops(45)
    assert ours["useful_gflops"] == pytest.approx(useful / 2.1e6)
    assert ours["of_dense"] == pytest.approx(useful / case.flops(0) * 7)
    assert ours["of_flash4"] == pytest.approx(useful / case.flops(0) * 11 / 2.1)
    assert ours["times_cudnn"] == pytest.approx(7)
    assert ours["goal"] == ">= 0.7 of dense (aim 1)" and ours["met"] is True
    assert cudnn["of_dense"] == 1 and cudnn["ratio"] == pytest.approx(7) and cudnn["met"] is None
    assert cudnn["times_cudnn"] is None
    assert flash["useful_gflops"] == pytest.approx(case.flops(0) / 26e6)
    assert flash4["of_flash4"] == 1 and flash4["of_dense"] == pytest.approx(4 / 3)


def test_a_row_without_flash4() -> None:
    times = {name: TIMES[name] for name in ("fdma", "cudnn", "flash")}
    case = CASE._replace(goals={"fdma": peers_cuda_cases.Goal("times_cudnn", 7.5, 8.0)})
    row = peers_cuda.make_row(case, peers_cuda.FUSED, times, [])
    assert row["of_flash4"] is None
    assert row["goal"] == ">= 7.5 times cudnn (aim 8)" and row["met"] is False


def test_time_relative_to_a_quarter_of_the_length() -> None:
    cases = {case.name(): case for case in peers_cuda_cases.all_cases(quick=False)}
    short, long = (cases[f"backward/bf16/h32g8/d128/n{n}/w2048"] for n in (32768, 131072))
    peer = peers_cuda.peers_of(long)[0]
    earlier = [(short, 5.0)]
    long = long._replace(goals={"fdma": peers_cuda_cases.Goal("of_shorter", 4.4, 4.1)})
    row = peers_cuda.make_row(long, peer, {"fdma": [21.0, 22.0, 23.0]}, earlier)
    assert row["of_shorter"] == pytest.approx(4.4) and row["met"] is True
    row = peers_cuda.make_row(long, peer, {"fdma": [23.0, 24.0, 25.0]}, earlier)
    assert row["met"] is False
    assert peers_cuda.of_shorter(short._replace(length=65536), 1.0, earlier) is None
    assert peers_cuda.of_shorter(long._replace(batch=2), 1.0, earlier) is None


def test_table_and_picture(tmp_path: Path) -> None:
    machine = {"machine": "A GPU", "device": "cuda", "torch": "2", "date": "today", "commit": "abc"}
    machine["kernels"] = "0123"
    path = tmp_path / "figures.json"
    case = CASE._replace(q_heads=32, kv_heads=8, head_dim=128, length=32768, window=2048, batch=1)
    short = CASE._replace(goals={"fdma": peers_cuda_cases.Goal("times_cudnn", 6.0, 8.0)})
    benchmarking.write_whole(path, [machine, *make_rows(case), *make_rows(short)])
    assert len(read(path)[1]) == 8 and read(path)[1][0]["met"] is True

    made = table.table(path)
    assert "A GPU" in made and "src/cuda 0123" in made
    assert "of flash4 |" in made and "times cuDNN |" in made
    assert "| >= 0.7 of dense (aim 1) | yes |" in made
    assert "| >= 6 times cudnn (aim 8) | yes |" in made

    assert main("picture", f"{path} --out {tmp_path}/figures.svg") == 0
    cases = (tmp_path / "figures-cases.svg").read_text()
    assert cases.rstrip().endswith("</svg>")
    # the minimum that each case of flash_dmattn must reach
    assert cases.count("stroke: #d55e00") == 2
    drawn = (tmp_path / "figures.svg").read_text()
    assert drawn.rstrip().endswith("</svg>") and "stroke: #0072b2" in drawn


def test_words_of_cases() -> None:
    """Every case with a bar has its own words."""
    results = (ROOT / "benchmarks" / "results" / "peers-cuda.json").read_text().splitlines()[1:]
    rows = [row for row in map(json.loads, results) if row["of_dense"] is not None]
    words = [picture.words_of(row) for row in rows if row["peer"].startswith("fdma")]
    assert len(set(words)) == len(words) > 50
    assert "forward: 16 heads on 4, head_dim 128, 32 x 512 keys, window 128" in words
    assert words[-1] == (
        "forward and gradients: 32 heads on 8, head_dim 128, 32,768 keys, window 2,048"
    )


# ---- runs ----

SHAPE = (4, 2, 64, 128)  # q_heads, kv_heads, head_dim, length
ROUNDS = benchmarking.Rounds(2, 2, 0.0)


class OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU instead of a CUDA device."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = {**(kwargs or {})}
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return function(*args, **options)


def time_call(peer: Any, inputs: Any) -> Any:
    peer.run(inputs)
    return SimpleNamespace(elapsed_time=lambda end: float(len(peer.name))), None


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not SDPA_HAS_GROUPS:
        pytest.skip("PyTorch before 2.5: no enable_gqa")
    no_kernel = contextlib.nullcontext()
    monkeypatch.setattr(peers_cuda_cases, "sdpa_kernel", lambda backend: no_kernel)
    monkeypatch.setattr(peers_cuda, "time_call", time_call)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(peers_flash4, "is_installed", lambda: False)
    with OnCpu():
        yield


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, return_lse: bool
) -> tuple[torch.Tensor, None]:
    assert causal and return_lse
    rows = (x.transpose(1, 2) for x in (q, k, v))
    return grouped_sdpa(*rows, is_causal=True).transpose(1, 2), None


def install(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    """Install flash_attn.cute with this flash_attn_func()."""
    modules = {name: ModuleType(name) for name in ("flash_attn", "flash_attn.cute")}
    modules["flash_attn.cute"].flash_attn_func = function  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(peers_flash4, "is_installed", lambda: True)


def rows_of(*cases: Any) -> list[Row]:
    earlier: list[Any] = []
    return [row for case in cases for row in peers_cuda.measure(case, ROUNDS, earlier)]


def case_of(kind: str, window: int, batch: int = 1) -> Any:
    return peers_cuda_cases.make_case(kind, *SHAPE, window, batch=batch, times_cudnn=(1.1, 2.0))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("kind", "window"),
    [
        ("attention", 24),
        ("attention", 128),
        ("dense", 0),
        ("backward", 24),
        ("backward", 128),
        ("dense-backward", 0),
        ("one-query", 24),
        ("training", 24),
    ],
)
@pytest.mark.usefixtures("device")
def test_rows_of_a_case(kind: str, window: int, batch: int) -> None:
    case = case_of(kind, window, batch)
    rows = rows_of(case)
    rivals = ["flash"] if kind == "one-query" else ["cudnn", "flash"]
    assert [row["peer"] for row in rows] == ["fdma", *rivals]
    assert {row["case"] for row in rows} == {case.name()}
    assert [row["ms"] for row in rows] == [len(row["peer"]) for row in rows]
    assert rows[0]["useful_gflops"] == pytest.approx(case.flops(window) / 4e6)
    if kind != "one-query":
        assert rows[0]["times_cudnn"] == 1.25 and rows[0]["met"] is True
        assert rows[0]["of_dense"] == pytest.approx(1.25 * case.flops(window) / case.flops(0))
    assert all(row["of_flash4"] is None for row in rows)


@pytest.mark.parametrize("kind", ["selected", "selected-backward"])
@pytest.mark.usefixtures("device")
def test_peers_of_selected_cases(kind: str) -> None:
    """SDPA runs beside forward only if a goal is relative to it."""
    names = [peer.name for peer in peers_cuda.peers_of(case_of(kind, 24))]
    assert names[:5] == ["fdma", "fdma-rising", "fdma-falling", "fdma-equal", "fdma-sawtooth"]
    assert ("cudnn" in names) == (kind == "selected-backward")
    sm80 = {"fdma-sm80": peers_cuda_cases.Goal("of_dense", 0.85)}
    names = [
        peer.name for peer in peers_cuda.peers_of(case_of("selected", 24)._replace(goals=sm80))
    ]
    assert names[5:] == ["fdma-sm80", "cudnn", "flash"]


def run(cases: list[Any], file: Path, monkeypatch: pytest.MonkeyPatch, options: str) -> int:
    """The program with these cases, on a machine that has a device."""
    monkeypatch.setattr(peers_cuda_cases, "all_cases", lambda quick: cases)
    monkeypatch.setattr(flash_dmattn, "get_available_backends", lambda: ["cpu", "cuda"])
    monkeypatch.setattr(benchmarking, "find_machine", lambda device: {"machine": device})
    return main("peers", f"--device cuda --rounds 1 --json {file} {options}")


@pytest.mark.parametrize(("bar", "last"), [(1.2, "1 of 1"), (1.3, "0 of 1")])
def test_program(
    bar: float,
    last: str,
    device: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    goals = {"fdma": peers_cuda_cases.Goal("times_cudnn", bar)}
    cases = [case_of("attention", 24, 2)._replace(goals=goals), case_of("backward", 24)]
    assert run(cases, tmp_path / "figures.json", monkeypatch, "attention") == 0
    assert capsys.readouterr().out.endswith(f"{last} goals reached\n")
    machine, (ours, *_) = read(tmp_path / "figures.json")
    assert machine == {"machine": "cuda"}
    assert ours["case"] == "attention/bf16/b2/h4g2/d64/n128/w24"
    assert ours["met"] is (bar == 1.2)


# ---- FlashAttention-4 ----


@pytest.mark.parametrize("kind", ["attention", "dense", "backward", "dense-backward"])
@pytest.mark.usefixtures("device")
def test_flash4_is_a_peer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, flash_attn_func)
    case = case_of(kind, 0 if "dense" in kind else 24, batch=2)
    ours, _, _, theirs = rows_of(case)
    assert (ours["peer"], theirs["peer"]) == ("fdma", "flash4")
    assert theirs["of_flash4"] == 1 and theirs["ratio"] == 1.5
    assert ours["of_flash4"] == pytest.approx(1.5 * case.flops(case.window) / case.flops(0))


def fails(*tensors: torch.Tensor, **options: bool) -> Any:
    raise ArithmeticError("cannot compile:\na trace")


def fails_without_a_word(*tensors: torch.Tensor, **options: bool) -> Any:
    raise KeyError


def is_wrong(*tensors: torch.Tensor, **options: bool) -> Any:
    return 1.5 * flash_attn_func(*tensors, **options)[0], None


@pytest.mark.parametrize("kind", ["attention", "dense-backward"])
@pytest.mark.parametrize(
    ("function", "why"),
    [
        (fails, "cannot compile:"),
        (fails_without_a_word, "KeyError"),
        (is_wrong, "times what is allowed"),
        (None, "cannot import name 'flash_attn_func'"),
    ],
)
@pytest.mark.usefixtures("device")
def test_flash4_is_left_out_where_it_fails(
    function: Any,
    why: str,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(monkeypatch, function)
    if function is None:
        del sys.modules["flash_attn.cute"].flash_attn_func
    case = case_of(kind, 0 if "dense" in kind else 24)
    assert [row["peer"] for row in rows_of(case)] == ["fdma", "cudnn", "flash"]
    printed = capsys.readouterr().err
    assert printed.startswith(f"{case.name()}: without flash4: ")
    assert why in printed and printed.count("\n") == 1


PACKAGES = {
    "no flash_attn": ([], False),
    "flash-attn alone": (["flash_attn/__init__.py"], False),
    "flash-attn-4 alone": (["flash_attn/cute/__init__.py"], True),
    "both": (["flash_attn/__init__.py", "flash_attn/cute/__init__.py"], True),
}


@pytest.mark.parametrize("packages", PACKAGES)
def test_whether_flash4_is_installed(
    packages: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither package is imported for this."""
    files, found = PACKAGES[packages]
    for file in files:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise AssertionError('it is imported')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert peers_flash4.is_installed() is found
    assert not [name for name in sys.modules if name.startswith("flash_attn")]


# ---- mistakes ----


@pytest.mark.parametrize("kind", ["attention", "backward"])
@pytest.mark.usefixtures("device")
def test_a_wrong_batch_entry_is_found(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other cases are measured and written."""

    def wrong(right: Any, *rows: Any, **options: Any) -> torch.Tensor:
        out = right(*rows, **options)
        return torch.cat((out[:1], 1.25 * out[1:]))

    plant(monkeypatch, flash_dmattn, "flash_dma_attention", wrong)
    cases, file = [case_of(kind, 24, 2), case_of("dense", 0)], tmp_path / "figures.json"
    assert run(cases, file, monkeypatch, "") == 1
    assert capsys.readouterr().err.startswith(f"peers.py: {kind}/bf16/b2/h4g2/d64/n128/w24: fdma")
    assert {row["case"] for row in read(file)[1]} == {cases[1].name()}


@pytest.mark.usefixtures("device")
def test_a_wrong_rival_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only FlashAttention-4 may be left out."""

    def negative(right: Any, *rows: torch.Tensor, **rules: Any) -> torch.Tensor:
        return -right(*rows, **rules)

    plant(monkeypatch, peers_cuda_cases, "scaled_dot_product_attention", negative)
    with pytest.raises(benchmarking.Disagreement, match="cudnn"):
        rows_of(case_of("attention", 24))


# ---- sliding windows and block-sparse attention of other libraries ----

BLOCKS = {128: 3, 256: 5}  # by window: the blocks that three query blocks keep


def sliding_case(kind: str, window: int = 256) -> Any:
    return peers_cuda_cases.make_case(kind, 4, 2, 64, 384, window, batch=2)


def every_key(inputs: Any, keys: str) -> torch.Tensor:
    """bool [batch, kv_heads, queries, keys]"""
    case = inputs.case
    kept = peers_sliding.kept_keys(inputs, keys, torch.arange(case.length))
    return torch.stack(kept).unflatten(0, (case.batch, case.kv_heads))


def attend_kept(inputs: Any, keys: str, factor: float = 1) -> torch.Tensor:
    mask = every_key(inputs, keys).repeat_interleave(2, 1)
    key, value = (x.repeat_interleave(2, 1) for x in inputs.sdpa[1:])
    out = torch.softmax(
        (inputs.sdpa[0] @ key.mT / 8).masked_fill(~mask, -torch.inf).float(), -1
    ).bfloat16()
    return factor * (out @ value).transpose(1, 2)


@pytest.mark.parametrize("window", BLOCKS)
@pytest.mark.usefixtures("device")
def test_kept_keys_and_pairs(window: int) -> None:
    inputs = peers_sliding.Inputs(sliding_case("attention", window))
    pairs = {"window": inputs.case.flops(window) / (2 * 4 * 4 * 64)}
    pairs["blocks"] = BLOCKS[window] * 128 * 128
    for keys, wanted in pairs.items():
        kept = every_key(inputs, keys)
        assert kept.sum((2, 3)).eq(wanted).all()
        assert kept.diagonal(dim1=2, dim2=3).all()
        assert peers_sliding.kept_pairs(inputs.case, keys) == wanted
    causal = every_key(inputs, "blocks").tril()
    assert peers_sliding.kept_pairs(inputs.case, "causal-blocks") == causal[0, 0].sum()


@pytest.mark.parametrize("kind", ["attention", "backward"])
@pytest.mark.usefixtures("device")
def test_rows_of_sliding_peers(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong peer is left out after a line."""
    made = {
        keys: peers_sliding.Library(functools.partial(attend_kept, keys=keys), keys, "torch", "")
        for keys in ("window", "blocks")
    }
    wrong = functools.partial(attend_kept, keys="window", factor=1.5)
    made["wrong"] = made["window"]._replace(attend=wrong)
    monkeypatch.setattr(peers_sliding, "LIBRARIES", made)
    case = sliding_case(kind)
    rows = list(peers_sliding.measure(case, ROUNDS, list(made)))
    assert [row["peer"] for row in rows] == ["fdma", "cudnn", "window", "blocks"]
    assert capsys.readouterr().err.startswith(f"{case.name()}: without wrong: ")
    pairs, rate = case.flops(256), case.flops(256) / peers_sliding.kept_pairs(case, "window")
    useful = [pairs, case.flops(0), pairs, rate * BLOCKS[256] * 128 * 128]
    for row, flops in zip(rows, useful):
        assert row["useful_gflops"] == pytest.approx(flops / (len(row["peer"]) * 1e6))
        assert row["of_dense"] == pytest.approx(flops / case.flops(0) * 5 / len(row["peer"]))


def test_explicit_gradients() -> None:
    """A library has its own call for gradients."""
    rows = [torch.randn(3, requires_grad=True) for _ in range(3)]

    def attend(*rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rows[0] * rows[1] + rows[2], rows[0]

    def differentiate(dout: torch.Tensor, *saved: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return dout * saved[1], dout * saved[4], dout

    found = peers_sliding.Explicit.apply(attend, differentiate, *rows)
    dout = torch.randn(3)
    for own, wanted in zip(
        torch.autograd.grad(found, rows, dout), (dout * rows[1], dout * rows[0], dout)
    ):
        assert torch.equal(own, wanted)


def test_sliding_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers_flash4, "is_installed", lambda: False)
    monkeypatch.setattr(peers_sliding, "find_spec", lambda name: None)
    monkeypatch.setattr(peers_sliding, "all_cases", lambda: [sliding_case("attention")])
    monkeypatch.setattr(peers_sliding, "measure", lambda case, rounds, names: names)
    assert run([], tmp_path / "none.json", monkeypatch, "--sliding all") == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"without {name}: {library.package} is not installed"
        for name, library in peers_sliding.LIBRARIES.items()
    ]
    monkeypatch.setattr(flash_dmattn, "get_available_backends", lambda: ["cpu", "cuda"])
    refuse("peers", "--device cuda --sliding msa,x", "--sliding: is 'x', want all", capsys)
