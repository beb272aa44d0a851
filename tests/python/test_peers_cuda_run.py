"""benchmarks/peers_cuda.py from inputs to rows without a device: tensors are on the CPU, SDPA runs
with any back end, and times are given. FlashAttention-4 is a module made by this file, or is
absent."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Callable

import benchmarking
import flash_dmattn
import peers
import peers_cuda
import peers_cuda_backward
import peers_cuda_cases
import peers_flash4
import pytest
import torch
from cases import with_sdpa
from evaluate import grouped_sdpa
from torch.overrides import TorchFunctionMode

pytestmark = with_sdpa
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


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (peers_cuda, peers_cuda_backward):
        monkeypatch.setattr(module, "sdpa_kernel", lambda backend: contextlib.nullcontext())
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


def rows_of(*cases: Any) -> list[dict[str, Any]]:
    return list(peers_cuda.measure(list(cases), ROUNDS))


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


@pytest.mark.parametrize(("bar", "last"), [(1.2, "1 of 1"), (1.3, "0 of 1")])
def test_program(
    bar: float,
    last: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    goals = {"fdma": peers_cuda_cases.Goal("times_cudnn", bar)}
    cases = [case_of("attention", 24, 2)._replace(goals=goals), case_of("backward", 24)]
    monkeypatch.setattr(peers_cuda_cases, "all_cases", lambda quick: cases)
    monkeypatch.setattr(flash_dmattn, "get_available_backends", lambda: ["cpu", "cuda"])
    monkeypatch.setattr(peers, "find_machine", lambda device: {"machine": device})
    file = tmp_path / "figures.json"
    arguments = ["--device", "cuda", "--rounds", "1", "--json", str(file), "attention"]
    assert peers.main(arguments) == 0
    assert capsys.readouterr().out.endswith(f"{last} goals reached\n")
    machine, ours, *_ = map(json.loads, file.read_text().splitlines())
    assert machine == {"machine": "cuda"}
    assert ours["case"] == "attention/bf16/b2/h4g2/d64/n128/w24"
    assert ours["met"] is (bar == 1.2)


# ---- FlashAttention-4 ----


@pytest.mark.parametrize("kind", ["attention", "dense", "backward", "dense-backward"])
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
    monkeypatch.undo()  # is_installed() itself
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
def test_a_wrong_batch_entry_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other cases are measured, then the mistake is an error."""
    right = flash_dmattn.flash_dma_attention

    def wrong(query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        out = right(query, *rest, **options)
        return torch.cat((out[:1], 1.25 * out[1:]))

    for module in (peers_cuda, peers_cuda_backward):
        monkeypatch.setattr(module.flash_dmattn, "flash_dma_attention", wrong)
    rows = []
    with pytest.raises(benchmarking.Disagreement, match=f"{kind}/bf16/b2/.*: fdma"):
        for row in peers_cuda.measure([case_of(kind, 24, 2), case_of("dense", 0)], ROUNDS):
            rows.append(row["case"])
    assert set(rows) == {case_of("dense", 0).name()}


def test_a_wrong_rival_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only FlashAttention-4 may be left out."""
    right = peers_cuda.scaled_dot_product_attention
    monkeypatch.setattr(
        peers_cuda, "scaled_dot_product_attention", lambda *rows, **rules: -right(*rows, **rules)
    )
    with pytest.raises(benchmarking.Disagreement, match="cudnn"):
        rows_of(case_of("attention", 24))
