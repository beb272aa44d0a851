"""The benchmark `streams`: its cases, the keys that it expects, its rows and the mistakes that it
finds, with tiny sizes on the CPU."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

import benchmarking
import evaluate
import flash_dmattn
import pytest
import streams
import streams_inputs
import table
import torch
from benches import measured, plant
from cases import with_sdpa

TINY = streams_inputs.Sizes((4, 2, 16), (5, 60, 3, 30), 8, (216, 72, 24), (90, 20, 6))
OWN = {
    "packed-forward/bf16/h4g2/d16/n60/s5/w8": ["fdma", "one-sequence"],
    "packed-training/bf16/h4g2/d16/n60/s5/w8": ["fdma", "one-sequence"],
    "packed-selected-forward/bf16/h4g2/d16/n60/s5/w8": ["fdma", "one-sequence"],
    "packed-selected-training/bf16/h4g2/d16/n60/s5/w8": ["fdma", "one-sequence"],
    "packed-dense-forward/bf16/h4g2/d16/n60/s5": ["fdma", "sdpa"],
    "packed-dense-training/bf16/h4g2/d16/n60/s5": ["fdma", "sdpa"],
    "prefill/bf16/h4g2/d16/n216/w24/p72": ["fdma", "whole", "whole-cached"],
    "recent-training/bf16/h4g2/d16/n90/w20r6": ["fdma", "window"],
}
FIELDS = {
    *("case", "peer", "ms", "spread", "useful_gflops", "of_other", "ratio", "goal", "met"),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(streams_inputs.SIZES, "cpu", TINY)
    monkeypatch.setattr(streams, "QUICK", benchmarking.Rounds(2, 2, 0.0))
    monkeypatch.setattr(streams, "WARM_UP", 0)


def case_of(kind: str, training: bool) -> streams_inputs.Case:
    cases = streams_inputs.all_cases("cpu")
    return next(case for case in cases if (case.kind, case.training) == (kind, training))


# ---- cases ----


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_lengths(device: str) -> None:
    sequences, total, shortest, longest = streams_inputs.SIZES[device].packed
    lengths = streams_inputs.packed_lengths(sequences, total, shortest, longest)
    assert (len(lengths), sum(lengths)) == (sequences, total)
    assert (min(lengths), max(lengths)) == (shortest, longest)
    assert lengths == streams_inputs.packed_lengths(sequences, total, shortest, longest)
    assert list(lengths) not in (sorted(lengths), sorted(lengths, reverse=True))


def test_cases_and_goals() -> None:
    cases = {case.name(): case.goal for case in streams_inputs.all_cases("cuda")}
    assert len(cases) == 8
    bars = {name: goal.bar for name, goal in cases.items() if goal}
    assert bars == {
        "packed-training/bf16/h32g8/d128/n32768/s64/w512": 1.25,
        "packed-dense-forward/bf16/h32g8/d128/n32768/s64": 1.0,
        "packed-dense-training/bf16/h32g8/d128/n32768/s64": 1.0,
        "prefill/bf16/h32g8/d128/n131072/w2048/p8192": 1.15,
        "recent-training/bf16/h32g8/d128/n32768/w1792r256": 1.05,
    }
    assert [case.name() for case in streams_inputs.all_cases("cpu")] == [*OWN]
    assert not any(case.goal for case in streams_inputs.all_cases("cpu"))


@pytest.mark.parametrize("kind", ["packed", "packed-dense", "prefill", "recent"])
def test_flops(kind: str) -> None:
    case = case_of(kind, kind == "recent")
    keys = case.window + case.recent or case.length
    pairs = sum(min(position + 1, keys) for n in case.lengths for position in range(n))
    assert case.flops(case.lengths) == (3.5 if case.training else 1) * 4 * 16 * 4 * pairs


@pytest.mark.parametrize(("window", "recent"), [(0, 0), (5, 0), (5, 3), (40, 0)])
def test_kept_keys(window: int, recent: int) -> None:
    lengths = (7, 1, 12)
    score = torch.randint(0, 4, (20,), generator=torch.Generator().manual_seed(0)).float()
    peer = streams.Peer("any", torch.nn.Identity(), lengths, window, recent)
    kept = streams_inputs.kept_keys(peer, score, torch.arange(20))
    for start, length in zip(itertools.accumulate((0, *lengths)), lengths):
        for row in range(start, start + length):
            older = list(range(start, max(start, row + 1 - recent)))
            best = evaluate.best_keys(score.tolist(), older, window or 20)
            newest = range(max(start, row + 1 - recent), row + 1)
            assert kept[row].nonzero().flatten().tolist() == sorted({*best, *newest})


# ---- rows ----


@with_sdpa
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = measured("streams", tmp_path)
    found = [(row["case"], row["peer"]) for row in rows]
    assert status == 0
    assert found == [(case, peer) for case, peers in OWN.items() for peer in peers]
    for row in rows:
        assert row.keys() == FIELDS and row["ms"] > 0 and row["spread"] >= 0
        assert (row["of_other"] is None) == (row["peer"] != "fdma")
        assert (row["ratio"] is None) == (row["peer"] != "sdpa")
    captured = capsys.readouterr()
    assert captured.err == ""
    printed = captured.out.splitlines()
    assert [tuple(line.split()[:2]) for line in printed[3:]] == found
    made = table.table(tmp_path / "streams-cpu.json")
    assert "| of other |" in made and f"| {[*OWN][6]} | whole-cached |" in made


def test_figures() -> None:
    """Figures of packed sequences count useful operations; of other libraries the fastest
    counts."""
    goal = streams_inputs.Goal("of_other", 1.25, 1.1)
    case = case_of("packed", True)._replace(goal=goal)
    times = {"fdma": [2.0, 2.0, 2.2], "one-sequence": [4.0, 5.0, 4.0]}
    ours, one = streams.make_rows(case, streams.peers_of(case, "cpu"), times)
    fewer = case.flops(case.lengths) / case.flops((60,))
    assert fewer < 1
    assert ours["of_other"] == pytest.approx(0.5 / fewer)
    assert ours["useful_gflops"] == pytest.approx(case.flops(case.lengths) / 2e6)
    assert one["useful_gflops"] == pytest.approx(case.flops((60,)) / 4e6)
    assert ours["goal"] == "<= 1.25 of other (aim 1.1)" and one["goal"] is None
    assert ours["met"] is (ours["of_other"] <= 1.25) and one["met"] is None

    case = case_of("packed-dense", False)._replace(goal=goal)
    peers = streams.peers_of(case, "cuda")[:4]
    times = {"fdma": [1.0], "varlen": [4.0], "varlen-expanded": [2.0], "nested-cudnn": [3.0]}
    rows = list(streams.make_rows(case, peers, times))
    assert [row["of_other"] for row in rows] == [0.5, None, None, None]
    assert [row["ratio"] for row in rows] == [None, 4, 2, 3]
    (alone,) = streams.make_rows(case, peers[:1], times)
    assert alone["of_other"] is None and alone["met"] is None


# ---- peers of other libraries, as on a device ----


def causal(query: Any, key: Any, value: Any, starts: Any, groups: bool) -> torch.Tensor:
    """Attention of packed sequences [total, heads, head_dim], one after the other."""
    split = (x.transpose(0, 1).tensor_split(starts[1:-1].long(), 1) for x in (query, key, value))
    sdpa = evaluate.grouped_sdpa if groups else torch.nn.functional.scaled_dot_product_attention
    outs = [sdpa(*rows, is_causal=True) for rows in zip(*split)]
    return torch.cat(outs, 1).transpose(0, 1)


def varlen_of_210(q: Any, k: Any, v: Any, starts: Any, _: Any, *most: int, is_causal: bool) -> Any:
    assert is_causal and most == (30, 30)
    return causal(q, k, v, starts, groups=True)


def varlen_of_213(
    q: Any,
    k: Any,
    v: Any,
    starts: Any,
    _: Any,
    *most: int,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Any:
    assert window_size == (-1, 0) and most == (30, 30)
    return causal(q, k, v, starts, groups=enable_gqa)


def varlen_without_groups(
    q: Any, k: Any, v: Any, starts: Any, _: Any, *most: int, window_size: Any
) -> Any:
    if q.shape != k.shape:
        raise RuntimeError("key has fewer heads\nthan query")
    return causal(q, k, v, starts, groups=False)


@with_sdpa
@pytest.mark.parametrize(
    ("varlen_attn", "name"),
    [
        (varlen_of_210, "varlen"),
        (varlen_of_213, "varlen"),
        (varlen_without_groups, "varlen-expanded"),
    ],
)
def test_varlen_attention(
    varlen_attn: Callable[..., Any],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Called with its real signature, and checked. SDPA of nested tensors has no causal form on the
    CPU, and is left out with the reason."""
    module = SimpleNamespace(varlen_attn=varlen_attn)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    inputs = streams_inputs.Inputs(case_of("packed-dense", True), "cpu")
    monkeypatch.setattr(inputs, "device", "cuda")
    monkeypatch.setattr(streams, "find_spec", lambda name: None)
    monkeypatch.setattr(streams_inputs, "sampled_rows", lambda inputs, _: torch.arange(60))
    assert [peer.name for peer in streams.checked_peers(inputs)] == ["fdma", name]
    printed = capsys.readouterr().err
    assert ": without nested-cudnn: No viable backend" in printed
    assert (": without varlen: key has fewer heads\n" in printed) == (name == "varlen-expanded")


def test_a_wrong_peer_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(
        monkeypatch,
        streams,
        "scaled_dot_product_attention",
        lambda right, *rows, **rules: 1.5 * right(*rows, **rules),
    )
    status, rows = measured("streams", tmp_path)
    assert status == 0 and not [row for row in rows if row["peer"] == "sdpa"]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(": without sdpa: " in line for line in lines)


# ---- mistakes ----


class Doubled(torch.autograd.Function):
    """The output is right, the gradient is not."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor) -> torch.Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> torch.Tensor:
        return 2 * dout


def of_one_sequence(right: Any, q: Any, k: Any, v: Any, *_: Any, **options: Any) -> torch.Tensor:
    one = torch.tensor([0, 60], dtype=torch.int32)
    return right(q, k, v, one, one, 60, 60, **options)


def without_recent(right: Any, *rows: Any, recent: int = 0, **options: Any) -> torch.Tensor:
    return right(*rows, **options)


def forgets(right: Any, cache: Any, *rows: Any) -> torch.Tensor:
    cache.reset()
    return right(cache, *rows)


def with_nan(right: Any, *rows: Any, **options: Any) -> Any:
    out, lse = right(*rows, **options)
    out = out.clone()
    out[0, 30, 1, 5] = torch.nan
    return out, lse


def with_wrong_gradient(right: Any, *rows: Any, **options: Any) -> Any:
    out, lse = right(*rows, **options)
    return Doubled.apply(out), lse


MISTAKES = {  # the wrong function, and how the names of the cases begin that find it
    "starts": (flash_dmattn, "flash_dmattn_varlen_func", of_one_sequence,
               ("packed-f", "packed-t", "packed-d")),
    "recent": (flash_dmattn, "flash_dma_attention", without_recent, "recent"),
    "forgotten": (flash_dmattn.DynamicMaskCache, "attend", forgets, "prefill"),
    "nan": (flash_dmattn, "attention", with_nan, "packed-selected"),
    "gradient": (flash_dmattn, "attention", with_wrong_gradient, "packed-selected-training"),
}  # fmt: skip


@with_sdpa
@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_outputs_are_found(
    mistake: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The other cases are measured and written."""
    *function, begin = MISTAKES[mistake]
    plant(monkeypatch, *function)
    wrong = [name for name in OWN if name.startswith(begin)]
    status, rows = measured("streams", tmp_path)
    assert status == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[:2] for line in lines] == [["streams.py", name] for name in wrong]
    assert all(line.split(": ")[2].startswith("fdma") for line in lines)
    assert {row["case"] for row in rows} == {*OWN} - {*wrong}
