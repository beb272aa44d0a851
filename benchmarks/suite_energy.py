"""The energy of a call on an NVIDIA GPU, from the counter of its driver (NVML).

Source: nvmlDeviceGetTotalEnergyConsumption(), which counts millijoules of the whole device.
"""

from __future__ import annotations

import time
from typing import Any, Callable

import torch

try:
    import pynvml  # of the package nvidia-ml-py
except ImportError:
    pynvml = None

WARM_UP = 0.5  # seconds of calls before the counter is read
SECONDS = 2.0  # of calls between two readings: drivers update the counter about ten times a second
GROUP = 0.05  # seconds of calls that the host launches without waiting between them


class NoEnergy(Exception):
    """The driver or a package does not give the energy."""


class Meter:
    """The counter of the current CUDA device."""

    def __init__(self) -> None:
        """Raises NoEnergy if there is none."""
        if pynvml is None:
            raise NoEnergy("the package nvidia-ml-py is not installed")
        try:
            pynvml.nvmlInit()
            device = torch.cuda.get_device_properties(torch.cuda.current_device())
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{device.uuid}")
            self.joules()
        except (pynvml.NVMLError, AttributeError) as error:  # older PyTorch has no uuid
            raise NoEnergy(f"NVML gives no energy: {error}") from error

    def joules(self) -> float:
        return 1e-3 * pynvml.nvmlDeviceGetTotalEnergyConsumption(self.handle)


def time_calls(call: Callable[[], Any], calls: int) -> float:
    """Seconds of `calls` successive calls, until the device has finished them."""
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def warm_up(call: Callable[[], Any]) -> int:
    """Calls for a while. Returns how many calls take about GROUP seconds."""
    torch.cuda.synchronize()
    calls, taken, end = 1, 0.0, time.perf_counter() + WARM_UP
    while time.perf_counter() < end:
        taken = time_calls(call, calls)
        calls = max(1, int(calls * GROUP / taken))
    return calls


def measure_energy(device: str, call: Callable[[], Any], tokens: int) -> dict[str, Any]:
    """The energy of a call of `tokens` tokens, and the mean power; or not_run, the reason why
    not."""
    if device != "cuda":
        return {"not_run": "NVML counts the energy of NVIDIA GPUs alone"}
    try:
        meter = Meter()
    except NoEnergy as error:
        return {"not_run": str(error)}
    group = warm_up(call)
    made, seconds, before = 0, 0.0, meter.joules()
    while seconds < SECONDS:
        seconds += time_calls(call, group)
        made += group
    joules = meter.joules() - before
    if joules <= 0:
        return {"not_run": "the counter of NVML did not change"}
    return {
        "calls": made,
        "seconds": seconds,
        "watts": joules / seconds,
        "joules_per_token": joules / (made * tokens),
        "tokens_per_joule": made * tokens / joules,
    }
