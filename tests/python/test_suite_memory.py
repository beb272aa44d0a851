"""The memory of a call in benchmarks/suite.py: the maximum, and the mean over its time."""

from __future__ import annotations

import pytest
import suite_calls
import suite_measure
import torch
from cases import with_sdpa
from suite_calls import Setting

pytestmark = with_sdpa


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
    call = suite_calls.selected(inputs, True)
    first, second = (suite_measure.memory_on_cpu(call).peak for _ in range(2))
    results = sum(x.nbytes for x in (inputs.query, *inputs.rows, *inputs.weights))
    assert first == second > results
