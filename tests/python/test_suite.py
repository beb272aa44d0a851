"""benchmarks/suite.py: its lines, operations, ranges and energy, the mistakes and the slow calls
that it finds, and its picture, with tiny sizes on the CPU."""

from __future__ import annotations

import contextlib
import math
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import benchmarking
import flash_dmattn
import picture
import pytest
import suite
import suite_items
import suite_measure
import torch
from benches import main, plant, read
from cases import with_sdpa
from commands import SUITE_ITEMS
from suite_items import Setting
from torch.nn.attention import SDPBackend
from torch.utils.flop_counter import FlopCounterMode

pytestmark = with_sdpa
TINY = "--device cpu --quick --divide 64 --seconds 0.01"
FORWARD = Setting("length", False, 1, (2, 1, 8), 4, 2)
TRAINING = FORWARD._replace(training=True)
GROUPS = Setting("heads", True, 3, (6, 2, 8), 5, 3)
DENSE = ["dense-flash", "dense-plain"]
PEERS = {
    **dict.fromkeys(("length", "density", "batch", "heads"), {"fdma", *DENSE}),
    "threshold": {"fdma", "all-keys"},
    "selection": {"fdma", "approximate", "recent", "newest"},
    "stages": {"fdma", "score", "select", "forward", "backward", *DENSE},
    "energy": {"fdma"},
}


@pytest.fixture(scope="module", autouse=True)
def small_product() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(suite_measure.PRODUCT, "cpu", 64)
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a run with all items."""
    path = tmp_path_factory.mktemp("suite") / "suite.json"
    assert main("suite", f"{TINY} --out {path}") == 0
    return path


# ---- lines ----


def test_every_item_has_its_peers(written: Path) -> None:
    machine, rows = read(written)
    assert machine["program"] == "suite.py" and machine["device"] == "cpu"
    assert {row["item"] for row in rows} == set(suite_items.ITEMS) == set(SUITE_ITEMS)
    for item, peers in PEERS.items():
        cases: dict[str, set[str]] = {}
        for row in rows:
            if row["item"] == item:
                cases.setdefault(row["case"], set()).add(row["peer"])
        assert list(cases.values()) == [peers] * len(cases), item
    kernels = {row["peer"] for row in rows if row["item"] == "kernels" and "ms" in row}
    assert {"fdma", "cpu/scalar"} <= kernels


def test_figures_are_finite_and_follow_from_each_other(written: Path) -> None:
    for row in read(written)[1]:
        figures = [value for value in row.values() if isinstance(value, float)]
        assert all(math.isfinite(value) and value >= 0 for value in figures), row
        if "not_run" in row:
            assert row["item"] in ("energy", "kernels")
            continue
        assert row["ms"] > 0
        assert row["rounds"] >= 2 and row["peak_bytes"] > 0 and row["peak_gflops"] > 0
        assert 0 < row["mean_bytes"] <= row["peak_bytes"]
        tokens = row["batch"] * row["length"]
        assert row["tokens_per_second"] == pytest.approx(tokens / (1e-3 * row["ms"]))
        if row["peer"] != "select":
            assert row["useful_gflops"] == pytest.approx(1e-9 * row["flop"] / (1e-3 * row["ms"]))
            assert row["of_peak"] > 0


def test_times_as_fast_as_the_fastest_dense_peer(written: Path) -> None:
    rows = [row for row in read(written)[1] if row["item"] == "length"]
    ours = [row for row in rows if row["peer"] == "fdma"]
    assert len(ours) == 12  # of 2, 4, ..., 64 tokens, forward and training
    for one in ours:
        rivals = [row for row in rows if row["case"] == one["case"] and row is not one]
        fastest = min(rivals, key=lambda row: row["ms"])
        assert one["fastest_dense"] == fastest["peer"]
        assert one["times_dense"] == fastest["times"]


def test_settings(written: Path) -> None:
    rows = [row for row in read(written)[1] if row["peer"] == "fdma"]
    lengths = [row["length"] for row in rows if row["item"] == "length"]
    assert lengths == 2 * [2, 4, 8, 16, 32, 64]
    windows = [row["window"] for row in rows if row["item"] == "density"]
    assert windows == 2 * [1, 8, 64]
    density = {row["window"]: row["density"] for row in rows if row["item"] == "density"}
    assert density == {1: 64 / 2080, 8: (36 + 56 * 8) / 2080, 64: 1}
    assert [row["batch"] for row in rows if row["item"] == "batch"] == 2 * [1, 4]
    heads = [(row["q_heads"], row["kv_heads"]) for row in rows if row["item"] == "heads"]
    assert heads == 2 * [(1, 1), (2, 1)]


# ---- useful operations ----


def test_operations_counted_by_hand() -> None:
    """4 queries keep 1, 2, 2 and 2 keys, and see 1, 2, 3 and 4."""
    products, pairs, visible, width = 2 * 2, 7, 10, 2 * 8  # of forward; a multiply-add is two
    score = 2 * 4 * 8
    assert suite_items.count_selected(FORWARD) == products * width * pairs + score == 512
    assert suite_items.count_selected(TRAINING) == 14 * width * pairs + 3 * score == 1760
    assert suite_items.count_dense(FORWARD) == products * width * visible == 640
    assert suite_items.count_dense(TRAINING) == 14 * width * visible == 2240
    # 3 sequences of 5 queries that keep 1, 2, 3, 3 and 3 keys; scores of 2 heads from 2 * 8 numbers
    assert suite_items.count_selected(GROUPS) == 3 * (14 * 6 * 8 * 12 + 3 * 2 * 5 * 2 * 16)


@pytest.mark.parametrize("setting", [FORWARD, TRAINING, GROUPS])
def test_operations_are_those_that_pytorch_counts(setting: Setting) -> None:
    call = suite_items.selected(setting.make_inputs("cpu", torch.float32), setting.training)
    with FlopCounterMode(display=False) as mode:
        call()
    assert suite_items.count_selected(setting) == mode.get_total_flops()


# ---- ranges, limits ----


def test_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranges of calls that a profiler sees on a CUDA device."""
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("end"))
    inputs = TRAINING.make_inputs("cpu", torch.float32)
    suite_items.selected(inputs, True)()
    assert seen == []
    inputs.device = "cuda"  # its tensors stay on the CPU
    suite_items.selected(inputs, True)()
    assert seen == ["forward", "end", "backward", "end"]
    seen.clear()
    suite_items.dense(inputs, False, SDPBackend.MATH)()
    assert seen == ["dense", "forward", "end", "end"]


def test_ranges_of_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def record(name: str, device: str) -> contextlib.nullcontext:
        names.append(name)
        return contextlib.nullcontext()

    monkeypatch.setattr(suite_items, "stage", record)
    bench = suite_measure.Bench("cpu", torch.float32, 0.01, 1.0, 1.0)
    for peer in suite_items.stages_of(bench, FORWARD):
        peer.call()
    whole, dense = ["forward"], ["dense", "forward"]  # of the peers around the stages
    assert names == [*whole, "score", "select", "forward", "backward", *dense, *dense]


def test_calls_that_would_take_too_long(tmp_path: Path) -> None:
    """Every call exceeds this limit, which is known from the second length on."""
    path = tmp_path / "suite.json"
    assert main("suite", f"{TINY} --only length --limit 1e-7 --out {path}") == 0
    rows = [row for row in read(path)[1] if row["kind"] == "forward"]
    assert len(rows) == 18
    for row in rows:
        assert ("not_run" in row) == (row["length"] > 2), row
        assert row.get("not_run", "a call would take about").startswith("a call would take about")


def test_a_dense_back_end_that_does_not_run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(suite_items.DENSE["cpu"], "flash", SDPBackend.CUDNN_ATTENTION)
    path = tmp_path / "suite.json"
    assert main("suite", f"{TINY} --only batch --out {path}") == 0
    rows = {row["peer"]: row for row in read(path)[1]}
    assert "viable backend" in rows["dense-flash"]["not_run"]
    assert rows["fdma"]["fastest_dense"] == "dense-plain"


def test_tensors_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: Any) -> None:
        raise torch.cuda.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Setting, "make_inputs", refuse)
    assert main("suite", f"{TINY} --only stages") == 0
    assert capsys.readouterr().out.endswith("fdma           not run: out of memory\n")


def test_stated_peak(tmp_path: Path) -> None:
    path = tmp_path / "suite.json"
    assert main("suite", f"{TINY} --only stages --peak 0.5 --out {path}") == 0
    machine, rows = read(path)
    assert machine["peak"] == "stated"
    for row in rows:
        assert row["peak_gflops"] == 500
        if row["peer"] != "select":
            assert row["of_peak"] == pytest.approx(row["useful_gflops"] / 500)


def test_wrong_outputs_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Attention to one key too few."""

    def fewer(right: Any, *tensors: Any, keep_window_size: int, **rest: Any) -> torch.Tensor:
        return right(*tensors, keep_window_size=keep_window_size - 1, **rest)

    plant(monkeypatch, flash_dmattn, "flash_dma_attention", fewer)
    assert main("suite", f"{TINY} --only heads") == 1
    assert "outputs and float64 differ by" in capsys.readouterr().err


# ---- memory ----


def event(ts: float, size: int) -> dict[str, object]:
    return {"name": "[memory]", "ts": ts, "args": {"Bytes": size}}


def test_the_most_at_once() -> None:
    def call() -> torch.Tensor:
        first, second = torch.empty(1000), torch.empty(500)
        del first
        return torch.cat([second, torch.empty(200)])

    memory = suite_measure.memory_on_cpu(call)
    assert memory.peak == 4 * (1000 + 500)
    assert memory.mean is not None and 0 < memory.mean < memory.peak


def test_the_mean_is_over_the_time_of_the_call() -> None:
    """Over 10 microseconds 100 bytes are held for 8, and 50 more for 3 of them."""
    call = {"name": "call", "ts": 100.0, "dur": 10.0}
    trace = [event(107, -50), event(102, 100), call, event(104, 50), event(110, -100)]
    assert suite_measure.replay_memory(trace) == (150, pytest.approx((8 * 100 + 3 * 50) / 10))
    kept = suite_measure.replay_memory([call, event(105, 60)])  # held by the result
    assert kept == (60, pytest.approx(30))


def test_the_workspace_counts_every_time() -> None:
    setting = Setting("length", True, 1, (2, 1, 8), 64, 16)
    inputs = setting.make_inputs("cpu", torch.float32)
    call = suite_items.selected(inputs, True)
    first, second = (suite_measure.memory_on_cpu(call).peak for _ in range(2))
    results = sum(x.nbytes for x in (inputs.query, *inputs.rows, *inputs.weights))
    assert first == second > results


# ---- energy ----


class FakeNvml(types.SimpleNamespace):
    """A counter of millijoules, which calls on the device increase."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__(counter=0, wanted=None)

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if handle != "GPU-a-b-c":
            raise self.NVMLError("Not Supported")
        return self.counter


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    found, device = FakeNvml(), types.SimpleNamespace(uuid="a-b-c")
    monkeypatch.setattr(suite_measure, "pynvml", found)
    monkeypatch.setattr(suite_measure, "WARM_UP", 0.01)
    monkeypatch.setattr(suite_measure, "SECONDS", 0.05)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    return found


def test_energy(nvml: FakeNvml) -> None:
    def call() -> None:
        nvml.counter += 3000  # millijoules
        time.sleep(0.001)

    row = suite_measure.measure_energy("cuda", call, 12)
    assert row["joules_per_token"] == pytest.approx(3 / 12)
    assert row["tokens_per_joule"] == pytest.approx(12 / 3)
    assert row["watts"] == pytest.approx(3 * row["calls"] / row["seconds"])
    line = suite.TABLE.line({"case": "energy", "peer": "fdma", **row})
    assert row["seconds"] >= 0.05 and line.split()[2:5] == ["0.25", "4", f"{row['watts']:.0f}"]


def test_no_energy(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason() -> str:
        row = suite_measure.measure_energy("cuda", lambda: time.sleep(0.001), 1)
        assert list(row) == ["not_run"]
        return row["not_run"]

    assert "did not change" in reason()
    other = types.SimpleNamespace(uuid="other")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: other)
    assert reason() == "NVML gives no energy: Not Supported"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: object())
    assert "uuid" in reason()
    monkeypatch.setattr(suite_measure, "pynvml", None)
    assert "nvidia-ml-py is not installed" in reason()


# ---- comparison ----


def change(path: Path, new: Path, wanted: str, **factors: float) -> str:
    """Write a copy with fields of this peer's first row multiplied, and return the row's name."""
    machine, rows = read(path)
    row = next(row for row in rows if row["peer"] == wanted and "ms" in row)
    row.update({name: factor * row[name] for name, factor in factors.items()})
    benchmarking.write_whole(new, [machine, *rows])
    return row["case"]


def compare(old: Path, new: Path, options: str = "") -> int:
    return main("suite", f"--device cpu --compare {old} --json {new} {options}")


@pytest.fixture
def steady(written: Path, tmp_path: Path) -> Path:
    """The run's file, without the spreads of a busy machine."""
    machine, rows = read(written)
    path = tmp_path / "steady.json"
    steady = [{**row, "spread": 0.02} if "spread" in row else row for row in rows]
    benchmarking.write_whole(path, [machine, *steady])
    return path


def test_comparison_with_itself(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(written, written, "--tolerance 1e-6") == 0
    *table, end = capsys.readouterr().out.splitlines()
    timed = [row for row in read(written)[1] if "spread" in row]
    assert end.startswith(f"{len(timed)} lines, 0 slower") and end.endswith(
        "0 lines of one file alone"
    )
    assert len(table) == len(timed) + 3


@pytest.mark.parametrize(
    ("factors", "options", "status"),
    [
        ({"ms": 1.2}, "", 1),
        ({"ms": 1.12}, "", 0),  # 0.10, and two spreads of 0.02
        ({"ms": 1.2}, "--tolerance 0.2", 0),
        ({"ms": 0.5}, "", 0),
        ({"ms": 1.2, "peak_gflops": 1 / 1.2}, "", 0),  # the machine is slower
        ({"ms": 1.2, "spread": 5}, "", 0),
    ],
)
def test_a_planted_slow_down(
    factors: dict[str, float],
    options: str,
    status: int,
    steady: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = change(steady, tmp_path / "new.json", "dense-flash", **factors)
    assert compare(steady, tmp_path / "new.json", options) == status
    marked = [
        line.split()[:2] for line in capsys.readouterr().out.splitlines() if "  slower" in line
    ]
    assert marked == ([[case, "dense-flash"]] if status else [])


def test_a_slow_call_is_measured_and_found(
    steady: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(right: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        time.sleep(0.02)
        return right(*arguments, **options)

    plant(monkeypatch, flash_dmattn, "flash_dma_attention", slow)
    assert main("suite", f"{TINY} --only batch --peak 1 --compare {steady}") == 1
    lines = capsys.readouterr().out.splitlines()
    slower = [line.split()[1] for line in lines if line.endswith("  slower")]
    assert slower.count("fdma") == 4


def test_a_stated_peak_does_not_excuse(steady: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.json"
    change(steady, new, "fdma", ms=1.2, peak_gflops=0.5)
    assert compare(steady, new) == 0
    machine, rows = read(new)
    benchmarking.write_whole(new, [{**machine, "peak": "stated"}, *rows])
    assert compare(steady, new) == 1


def test_what_cannot_be_compared(
    steady: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, rows = read(steady)
    other = tmp_path / "other.json"
    benchmarking.write_whole(other, [machine, *({**row, "threads": 77} for row in rows)])
    with pytest.raises(SystemExit, match="2"):
        compare(steady, other)
    assert "nothing is comparable" in capsys.readouterr().err
    for text, words in (("{", "is not JSON in lines"), ('{"machine": 1}', "suite.py wrote")):
        other.write_text(text)
        with pytest.raises(SystemExit, match="2"):
            compare(other, steady)
        assert words in capsys.readouterr().err


# ---- picture ----


def test_picture(written: Path, tmp_path: Path) -> None:
    out = tmp_path / "suite.svg"
    assert main("picture", f"{written} --out {out}") == 0
    drawn = out.read_text()
    assert drawn.rstrip().endswith("</svg>")
    for text in ("times as fast as dense", "MiB beside inputs", "tokens a second"):
        assert f"<!-- {text} -->" in drawn, text
    assert main("picture", f"{written} --out {out}") == 0 and out.read_text() == drawn


def test_curves(written: Path) -> None:
    rows = read(written)[1]
    lengths = [2, 4, 8, 16, 32, 64]
    assert [x for x, _ in picture.speed_up(rows, "fdma", "training")] == lengths
    assert [x for x, _ in picture.memory(rows, "dense", "forward")] == lengths
    sparsity = [x for x, _ in picture.throughput(rows, "fdma", "forward")]
    assert sparsity == pytest.approx([0, 1 - 484 / 2080, 1 - 64 / 2080])


def test_nothing_to_draw(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine, rows = read(written)
    benchmarking.write_whole(
        tmp_path / "few.json", [machine, *(row for row in rows if row["item"] != "density")]
    )
    assert main("picture", f"{tmp_path}/few.json --out {tmp_path}/few.svg") == 1
    assert "nothing to draw of: tokens a second" in capsys.readouterr().err
    assert not (tmp_path / "few.svg").exists()
