"""The benchmark `ranks`: its lines, the bytes that it counts, the mistakes that it finds, with
three processes and tiny sizes on the CPU; and the picture of an invented file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import benchmarking
import picture
import pytest
from benches import Row, main, read, refuse
from programs import ROOT, Done, python

RANKS, Q_HEADS, KV_HEADS, HEAD_DIM, WINDOW, RECENT, KEYS = 3, 4, 2, 16, 8, 3, 64
SIZES = {
    "q-heads": Q_HEADS,
    "kv-heads": KV_HEADS,
    "head-dim": HEAD_DIM,
    "window": WINDOW,
    "recent": RECENT,
    "keys": KEYS,
    "total": 130,
    "ring-keys": 70,
    "dense-keys": 32,
    "longest": 200,
    "rounds": 2,
    "calls": 1,
    "timeout": 60,
}
TEAMS = [1, 2, 3]
LINES = [
    *(("weak", size) for size in TEAMS),
    *(("strong", size) for size in TEAMS[1:]),
    *(("bytes", size) for size in TEAMS[1:] for _ in range(2)),
    *(("communication", size) for size in TEAMS[1:]),
    *(("memory", size) for size in TEAMS[1:]),
    *(("host", 3), ("ring", 3), ("longest", 3)),
]
TIMES = {"item", "ranks", "keys", "ms", "spread", "rounds"}
FIELDS = {
    "weak": TIMES | {"one_ms", "one_fastest_ms", "efficiency", "work"},
    "strong": TIMES | {"ideal_from", "ideal_ms", "efficiency"},
    "communication": TIMES | {"local_ms", "exchange_ms", "of_time", "exchange_of_time"},
    "memory": {"item", "ranks", "keys", "not_run"},
    "host": {"item", "ranks", "keys", "compared_ms", "given_ms"},
    "ring": TIMES
    | {"dense_keys", "dense_ms", "ring_ideal_ms", "context_ms", "context_rounds"}
    | {"times", "times_ideal"},
    "longest": TIMES | {"peak"},
}


# Runs ranks.py with all items, and once more on devices that have room for 64 tokens, where one
# rank has wrong results in the last item. The process group stays between them.
TWICE = """
import sys
sys.path.insert(0, {folder!r})
import bench
import flash_dmattn._context as context_autograd
import ranks
import ranks_common

destroy, ranks.dist.destroy_process_group = ranks.dist.destroy_process_group, lambda: None
assert bench.main("ranks") == 0
ranks.dist.init_process_group = lambda *given, **options: None
ranks.dist.destroy_process_group = destroy
if ranks.dist.get_rank() == 0:
    print("again", flush=True)
attend = context_autograd.attend

def wrong(*arguments):
    out, lse = attend(*arguments)
    return (out * 1.1 if arguments[0].ranks.rank == 1 else out), lse

def check_wrong(job):
    context_autograd.attend = wrong
    ranks_common.check(job, 64)

ranks_common.Job.fits = lambda job, keys: keys <= 64
ranks.ITEMS["host"] = check_wrong
sys.argv[1] += "/again"
only = ["--only", "strong", "ring", "longest", "host", "--seconds", "0"]
sys.exit(bench.main("ranks", sys.argv[1:] + only))
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """The folder of both runs, and their output."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "again").mkdir()
    program = folder / "twice.py"
    program.write_text(TWICE.format(folder=str(ROOT / "benchmarks")))
    sizes = [text for name, number in SIZES.items() for text in (f"--{name}", str(number))]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    given = [program, folder, "--device", "cpu", *sizes]
    return folder, python(*launcher, *given, env={"OMP_NUM_THREADS": "1"}, timeout=240)


@pytest.fixture
def lines(done: tuple[Path, Done]) -> list[Row]:
    machine, rows = read(done[0] / "ranks.json")
    return [machine, *rows]


def test_lines(done: tuple[Path, Done], lines: list[Row]) -> None:
    machine, *rows = lines
    assert machine["device"] == "cpu" and machine["ranks"] == RANKS
    assert machine["date"] and "commit" in machine and machine["dtype"] == "bf16"
    assert (machine["window"], machine["recent"]) == (WINDOW, RECENT)
    assert [(row["item"], row["ranks"]) for row in rows] == LINES
    for row in rows:
        if row["item"] != "bytes":
            assert row.keys() == FIELDS[row["item"]]
        figures = [number for name, number in row.items() if name.endswith("ms")]
        assert all(number > 0 for number in figures)
    printed = [
        tuple(line.split()[:2]) for line in done[1].stdout.partition("again\n")[0].splitlines()
    ]
    assert printed == [(item, str(size)) for item, size in LINES]


def test_figures(lines: list[Row]) -> None:
    """Figures that follow from others in the line."""
    rows = {(row["item"], row["ranks"]): row for row in lines[1:]}
    kept = WINDOW + RECENT
    alone = sum(min(query + 1, kept) for query in range(KEYS))
    for size in TEAMS:
        want = KEYS * kept / alone if size > 1 else 1
        assert rows["weak", size]["work"] == pytest.approx(want)
    for size in TEAMS[1:]:
        row = rows["strong", size]
        assert row["ideal_from"] == "measured"
        assert row["efficiency"] == pytest.approx(row["ideal_ms"] / row["ms"])
    assert rows["strong", 2]["ideal_ms"] == pytest.approx(rows["strong", 3]["ideal_ms"] * 3 / 2)
    ring = rows["ring", RANKS]
    pairs = (70 * 71) / (32 * 33)
    assert ring["ring_ideal_ms"] == pytest.approx(ring["dense_ms"] * pairs / RANKS)
    assert ring["times_ideal"] == pytest.approx(ring["ring_ideal_ms"] / ring["context_ms"])


def test_bytes(lines: list[Row]) -> None:
    """The bytes follow from the shapes, whatever the number of tokens. Forward: from each other
    rank the key, value, score, position and bias of each candidate. Backward: from each later rank
    the gradients of key, value and bias of each."""
    rows = [row for row in lines[1:] if row["item"] == "bytes"]
    assert [row["keys"] for row in rows] == [KEYS // 4, KEYS] * 2
    candidates = KV_HEADS * (WINDOW + RECENT)
    pair = 2 * HEAD_DIM * 2  # of a key and a value, bfloat16
    for row in rows:
        size = row["ranks"]
        gathered = [(size - 1) * candidates * (pair + 3 * 4)] * size
        returned = [(size - 1 - rank) * candidates * (pair + 4) for rank in range(size)]
        assert row["table_bytes"] == candidates * pair
        assert row["forward_received"] == row["forward_sent"] == gathered
        assert row["backward_received"] == returned
        assert row["backward_sent"] == returned[::-1]


# ---- what goes wrong ----


def test_what_goes_wrong(done: tuple[Path, Done]) -> None:
    """What is too large or takes too long is not run. One rank has wrong results; then all ranks
    end."""
    folder, program = done
    assert program.returncode == 1
    assert "ranks.py: 3 ranks and one differ by" in program.stderr
    two, three, ring, longest = read(folder / "again" / "ranks.json")[1]
    assert two.keys() == FIELDS["strong"] - {"ms", "spread", "rounds", "efficiency"} | {"not_run"}
    assert two["not_run"].startswith("65 tokens on a device take about ")
    assert three.keys() == FIELDS["strong"]
    assert three["ideal_from"] == "modelled from 64 keys"
    assert "--seconds allows less" in ring["not_run"] and ring["times_ideal"] > 0
    assert longest["not_run"].startswith("67 tokens on a device take about ")


def test_too_few_tokens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    refuse("ranks", ". --device cpu --total 7", "too few tokens for the ranks", capsys)


# ---- picture ----

MACHINE = {
    "machine": "A GPU",
    "device": "cuda",
    "torch": "2",
    "date": "today",
    "commit": "abc",
    "dtype": "bf16",
    "q_heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "window": 2048,
    "recent": 0,
}


def made_up(item: str, ranks: int, **fields: Any) -> Row:
    return {"item": item, "ranks": ranks, "keys": 65536, **fields}


def draw(rows: list[Row], folder: Path) -> int:
    benchmarking.write_whole(folder / "ranks.json", [MACHINE, *rows])
    return main("picture", f"{folder}/ranks.json --out {folder}/ranks.svg")


def test_picture(tmp_path: Path) -> None:
    rows = [made_up("weak", n, efficiency=e) for n, e in ((4, 0.973), (1, 0.999), (2, 0.985))]
    rows += [made_up("strong", 2, efficiency=0.941), made_up("strong", 4, not_run="too large")]
    rows += [made_up("bytes", 2)]
    assert picture.efficiencies(rows, "weak") == [(1, 0.999), (2, 0.985), (4, 0.973)]
    assert picture.efficiencies(rows, "strong") == [(2, 0.941)]
    assert draw(rows, tmp_path) == 0
    drawn = (tmp_path / "ranks.svg").read_text()
    assert drawn.rstrip().endswith("</svg>")
    for text in ("A GPU, PyTorch 2", "weak scaling, 65,536 tokens a rank", "0.973", "0.941"):
        assert f"<!-- {text} -->" in drawn, text
    first = drawn
    assert draw(rows, tmp_path) == 0 and (tmp_path / "ranks.svg").read_text() == first


def test_nothing_to_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert draw([made_up("strong", 2, not_run="too large")], tmp_path) == 1
    assert "no efficiency" in capsys.readouterr().err
    assert not (tmp_path / "ranks.svg").exists()
