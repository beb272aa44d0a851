"""The measurements of the benchmark `suite`: alternating times, the largest memory, the machine's
rate, and the energy of a call."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple

import torch
from benchmarking import (
    Rounds,
    Row,
    alternate,
    median_ratio,
    quantiles,
    reason_of,
    summary,
    time_pass,
)

try:
    import pynvml  # of the package nvidia-ml-py
except ImportError:
    pynvml = None

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # without the profiler's lines on stderr

SEVERAL = Rounds(4, 100, 0)  # the first of them does not count
LONG = Rounds(2, 2, 0)  # for calls that take longer than all rounds of others
SHORT = 0.1  # of the longest time of a call
BRIEF = 0.1  # seconds
CALL = "call"  # the range of a call in a profiler's trace
PRODUCT = {"cuda": 8192, "cpu": 1024}  # rows and columns of the matrices of machine_product()

Call = Callable[[], Any]


class Peer(NamedTuple):
    name: str
    call: Call
    flop: int | None = None  # useful operations, if known


class Memory(NamedTuple):
    """Bytes in addition to a call's inputs."""

    peak: int
    mean: float | None  # over the time of the call, if known


class Figures(NamedTuple):
    """The measurements of a peer, or why there are none."""

    times: list[float]  # ms, one for each round
    memory: Memory
    not_run: str = ""


NO_MEMORY = Memory(0, None)

# ---- memory ----


def replay_memory(events: list[dict[str, Any]]) -> Memory:
    """Computes the memory from the allocations and releases of a profiler's trace, and from the
    range CALL in it."""
    (call,) = (event for event in events if event.get("name") == CALL)
    found = [event for event in events if event.get("name") == "[memory]"]
    held = most = 0
    byte_time, last = 0.0, call["ts"]
    for event in sorted(found, key=lambda event: event["ts"]):
        byte_time += held * (event["ts"] - last)
        last = event["ts"]
        held += event["args"]["Bytes"]
        most = max(most, held)
    byte_time += held * max(0.0, call["ts"] + call["dur"] - last)
    return Memory(most, byte_time / call["dur"])


def profiler() -> torch.profiler.profile:
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )


@functools.lru_cache(None)
def begin_profiling() -> None:
    """The profiler requires that its first run is on the main thread."""
    with profiler():
        pass


def profile_memory(call: Call, threads: int) -> Memory:
    torch.set_num_threads(threads)
    with profiler() as profile, torch.profiler.record_function(CALL):
        out = call()
    del out  # it must live until the trace has ended
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return replay_memory(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def memory_on_cpu(call: Call) -> Memory:
    """Runs in a new thread: a thread's workspace stays allocated, so its later calls would seem to
    need none."""
    begin_profiling()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(profile_memory, call, torch.get_num_threads()).result()


def memory_on_cuda(call: Call) -> Memory:
    """Without the mean: the host allocates while the device still computes earlier work."""
    call()  # allocations of first calls do not count
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = call()
    torch.cuda.synchronize()
    del out
    return Memory(torch.cuda.max_memory_allocated() - before, None)


# ---- time ----


def machine_product(device: str, dtype: torch.dtype) -> Peer:
    """The product of two square matrices. Its rate counts as the machine's peak. CPUs compute
    float16 as float32, and PyTorch's own float16 product is no measure for that."""
    size = PRODUCT[device]
    dtype = torch.float32 if (device, dtype) == ("cpu", torch.float16) else dtype
    left, right = torch.randn(2, size, size, device=device, dtype=dtype)
    return Peer("product", lambda: left @ right, 2 * size**3)


class Bench:
    """The device and the duration of measurements, and earlier results."""

    def __init__(
        self, device: str, dtype: torch.dtype, seconds: float, limit: float, peak: float | None
    ) -> None:
        self.device, self.dtype = device, dtype
        self.seconds, self.limit = seconds, limit
        self.peak = peak  # FLOP/s, if stated
        self.product = None if peak else machine_product(device, dtype)
        self.last: dict[tuple[str, str, str], tuple[float, int]] = {}

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).replace("torch.", "")

    def too_long(self, setting: Any, peer: Peer) -> str:
        """Why a call is not made: its last time, scaled by operations, is too long. Short calls do
        not scale like that."""
        ms, flop = self.last.get((setting.item, setting.kind, peer.name), (0.0, 1))
        if not peer.flop or 1e-3 * ms < SHORT * self.limit:
            return ""
        seconds = 1e-3 * ms * peer.flop / flop
        return f"a call would take about {seconds:.1f} s" if seconds > self.limit else ""

    def begin(self, setting: Any, peer: Peer) -> tuple[Figures, float]:
        """The first call of a peer: its memory, and its time in seconds."""
        if reason := self.too_long(setting, peer):
            return Figures([], NO_MEMORY, reason), 0.0
        before = time.perf_counter()
        try:
            memory = (memory_on_cuda if self.device == "cuda" else memory_on_cpu)(peer.call)
        except (torch.cuda.OutOfMemoryError, NotImplementedError) as error:
            return Figures([], NO_MEMORY, reason_of(error)), 0.0
        except RuntimeError as error:
            if not peer.name.startswith("dense"):
                raise
            return Figures([], NO_MEMORY, reason_of(error)), 0.0
        return Figures([], memory), time.perf_counter() - before

    def measure(self, setting: Any, peers: Sequence[Peer]) -> dict[str, Figures]:
        """Figures of each peer, and of the machine's product. Each round runs all of them once."""
        found, spent = {}, {}
        for peer in peers:
            found[peer.name], spent[peer.name] = self.begin(setting, peer)
        running = [peer for peer in peers if not found[peer.name].not_run]
        if not running:
            return found
        running += [self.product] if self.product else []
        timers = {peer.name: self.timer(peer, spent.get(peer.name, 1.0)) for peer in running}
        is_long = sum(spent.values()) > max(0.5, 2 * self.seconds)
        rounds = LONG if is_long else SEVERAL._replace(seconds=self.seconds)
        for name, times in alternate(timers, rounds).items():
            counted = times if is_long else times[1:]
            found[name] = found.get(name, Figures([], NO_MEMORY))._replace(times=counted)
        for peer in peers:
            if found[peer.name].times and peer.flop:
                key = (setting.item, setting.kind, peer.name)
                self.last[key] = min(found[peer.name].times), peer.flop
        return found

    def timer(self, peer: Peer, first: float) -> Callable[[], float]:
        """The timer of a call whose first run took `first` seconds. A short call runs once more
        before, so that caches hold its own tensors."""

        def time_call() -> float:
            if first < BRIEF:
                peer.call()
            return time_pass(peer.call, self.device)

        return time_call

    # ---- rows ----

    def peak_of(self, rates: Figures | None) -> float | None:
        """The machine's operations per second, from these rounds or as stated."""
        if self.product is None:
            return self.peak
        return self.product.flop / (1e-3 * quantiles(rates.times)[1]) if rates else None

    def row(self, setting: Any, peer: Peer, found: dict[str, Figures]) -> Row:
        figures = found[peer.name]
        head = {"case": setting.name(self.dtype_name), "peer": peer.name}
        head.update(threads=torch.get_num_threads(), **setting.fields())
        if figures.not_run:
            return {**head, "not_run": figures.not_run}
        head.update(summary(figures.times), rounds=len(figures.times))
        head.update(tokens_per_second=1e3 * setting.tokens / head["ms"])
        head.update(peak_bytes=figures.memory.peak)
        if figures.memory.mean is not None:
            head.update(mean_bytes=round(figures.memory.mean))
        peak = self.peak_of(found.get("product"))
        head["peak_gflops"] = peak / 1e9
        if peer.flop:
            head.update(flop=peer.flop, useful_gflops=peer.flop / (1e6 * head["ms"]))
            head["of_peak"] = self.of_peak(peer, found, peak)
        return head

    def of_peak(self, peer: Peer, found: dict[str, Figures], peak: float) -> float:
        times = found[peer.name].times
        if self.product is None:
            return peer.flop / (1e-3 * quantiles(times)[1] * peak)
        return peer.flop / self.product.flop * median_ratio(found["product"].times, times)

    def rows(self, setting: Any, peers: Sequence[Peer]) -> Iterator[Row]:
        """The rows of a setting. `times` is the peer's time over the first peer's. The first peer's
        `times_dense` is the fastest dense peer's time over its own."""
        found = self.measure(setting, peers)
        ours = found[peers[0].name].times
        rivals = [peer.name for peer in peers if peer.name.startswith("dense-")]
        rivals = [name for name in rivals if found[name].times]
        fastest = min(rivals, key=lambda name: quantiles(found[name].times)[1], default=None)
        for peer in peers:
            row = self.row(setting, peer, found)
            if "ms" in row and ours and peer is not peers[0]:
                row["times"] = median_ratio(found[peer.name].times, ours)
            if "ms" in row and fastest and peer is peers[0]:
                row["times_dense"] = median_ratio(found[fastest].times, ours)
                row["fastest_dense"] = fastest
            yield row


# ---- energy ----

# nvmlDeviceGetTotalEnergyConsumption() counts millijoules of the whole NVIDIA GPU.
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
