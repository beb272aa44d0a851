"""The tools of the benchmark `ranks`: the ranks and their groups, the tokens of a rank, rounds that
all ranks make together, and the collective operations of a call, counted or replaced."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Callable, NamedTuple
from unittest import mock

import flash_dmattn
import torch
import torch.distributed as dist
from benchmarking import Disagreement, Rounds
from flash_dmattn import _ranks
from flash_dmattn.distributed import context_parallel_attention

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WAIT_CYCLES = 10_000_000  # about 5 ms: longer than the host takes to launch a call
WARM_UP = 2  # calls of each timer before the first round
FITS = 0.9  # of a device's memory: the estimated use of a call may be this much

Timer = Callable[[], float]


class Team(NamedTuple):
    """The first `size` ranks, as a process group."""

    size: int
    group: dist.ProcessGroup
    device: torch.device

    def wait(self) -> None:
        """Wait until all ranks of the team are here and their devices are idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            dist.barrier(self.group, device_ids=[self.device.index])
            torch.cuda.synchronize(self.device)
        else:
            dist.barrier(self.group)

    def gather(self, *numbers: float) -> list[list[float]]:
        """The numbers of every rank, in the order of ranks."""
        own = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self.group)
        return torch.stack(found).tolist()


class Job:
    """This process among those that measure together."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        limit = timedelta(seconds=args.timeout)
        if args.device == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
            dist.init_process_group("nccl", device_id=self.device, timeout=limit)
        else:
            dist.init_process_group("gloo", timeout=limit)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Ranks outside a team wait on the host, so that their devices are idle.
        self.host = dist.new_group(backend="gloo", timeout=limit)
        sizes = [size for size in (2**n for n in range(20)) if size < self.size] + [self.size]
        self.teams = [self.make_team(size, limit) for size in sizes]
        self.bytes_per_key = 0.0  # of a call on one device, with all its tensors; 0: unknown

    def make_team(self, size: int, limit: timedelta) -> Team:
        if size == self.size:
            return Team(size, dist.group.WORLD, self.device)
        return Team(size, dist.new_group(list(range(size)), timeout=limit), self.device)

    @property
    def everyone(self) -> Team:
        return self.teams[-1]

    def wait(self) -> None:
        """Wait on the host until all ranks are here."""
        self.free()
        dist.all_reduce(torch.zeros(1), group=self.host)

    def free(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def fits(self, keys: int) -> bool:
        """True if, by estimate, a call with `keys` own tokens fits this rank's device."""
        if self.device.type != "cuda":
            return True
        total = torch.cuda.get_device_properties(self.device).total_memory
        return keys * self.bytes_per_key <= FITS * total

    def table_bytes(self) -> int:
        """Bytes of the keys and values that one query keeps."""
        args = self.args
        rows = (args.window + args.recent) * args.kv_heads
        return 2 * rows * args.head_dim * DTYPES[args.dtype].itemsize


class Tokens:
    """A rank's own tokens, the weights, which are equal on all ranks, and the gradient of out."""

    def __init__(self, job: Job, count: int, rank: int | None = None) -> None:
        args, device = job.args, job.device
        generator = torch.Generator(device).manual_seed(1 + (job.rank if rank is None else rank))
        weights = torch.Generator(device).manual_seed(0)
        kind = {"device": device, "dtype": DTYPES[args.dtype]}

        def new(heads: int) -> torch.Tensor:
            return torch.randn(1, count, heads, args.head_dim, generator=generator, **kind)

        self.query, self.dout = new(args.q_heads), new(args.q_heads)
        self.key, self.value = new(args.kv_heads), new(args.kv_heads)
        width = args.kv_heads * args.head_dim
        self.dt_proj = torch.randn(args.kv_heads, width, generator=weights, **kind)
        self.dt_proj /= math.sqrt(width)
        self.a_coef = torch.randn(args.kv_heads, generator=weights, device=device)
        for leaf in self.leaves:
            leaf.requires_grad_()
        self.rules = {"recent": args.recent}
        self.window = args.window

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [*self.rows, self.dt_proj, self.a_coef]

    def forward_alone(self) -> torch.Tensor:
        return flash_dmattn.flash_dma_attention(
            *self.leaves, keep_window_size=self.window, causal=True, **self.rules
        )

    def forward(self, team: Team, lengths: list[int] | None) -> torch.Tensor:
        return context_parallel_attention(
            *self.leaves, self.window, group=team.group, lengths=lengths, **self.rules
        )

    def gradients(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, self.leaves, self.dout)

    @property
    def rows(self) -> list[torch.Tensor]:
        return [self.query, self.key, self.value]

    def gradients_of_rows(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The gradients of dense attention, which has no scores."""
        return torch.autograd.grad(out, self.rows, self.dout)

    def run_alone(self) -> None:
        self.gradients(self.forward_alone())

    def run(self, team: Team, lengths: list[int] | None) -> None:
        self.gradients(self.forward(team, lengths))


# ---- time ----


def time_calls(call: Callable[[], Any], calls: int, team: Team) -> float:
    """Milliseconds per call of successive calls that begin together on all ranks of the team."""
    team.wait()
    if team.device.type == "cpu":
        before = time.perf_counter()
        for _ in range(calls):
            call()
        return 1e3 * (time.perf_counter() - before) / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(WAIT_CYCLES)  # meanwhile the host launches the first call
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def alternate(team: Team, timers: dict[str, Timer], rounds: Rounds) -> dict[str, list[list[float]]]:
    """The numbers of every rank [round][rank], for each timer. In each round all ranks call every
    timer once; the first rank's clock decides which round is the last."""
    found: dict[str, list[list[float]]] = {name: [] for name in timers}
    begin = time.perf_counter()
    for made in range(1, rounds.most + 1):
        own = [timer() for timer in timers.values()]
        rows = team.gather(*own, time.perf_counter() - begin)
        for name, column in zip(timers, zip(*rows)):
            found[name].append([*column])
        if made >= rounds.least and rows[0][-1] > rounds.seconds:
            break
    return found


def slowest(numbers: list[list[float]]) -> list[float]:
    """For each round. The time of a team is the time of its slowest rank."""
    return [max(row) for row in numbers]


# ---- traffic between ranks ----


class Traffic:
    """Bytes from and to other ranks."""

    def __init__(self) -> None:
        self.received = self.sent = 0

    def add(self, received: int, sent: int) -> None:
        self.received += received
        self.sent += sent


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Count the traffic of flash_dmattn's collective operations.

    all_gather: a rank receives what each other rank sends, and each receives its own tensor.
    """
    traffic = Traffic()
    gather, exchange = _ranks.all_gather, dist.all_to_all_single

    def all_gather(received: torch.Tensor, sent: torch.Tensor, **options: Any) -> Any:
        moved = bytes_of(received) - bytes_of(sent)
        traffic.add(moved, moved)
        return gather(received, sent, **options)

    def all_to_all(
        received: torch.Tensor, sent: torch.Tensor, to_here: Any, to_there: Any, **options: Any
    ) -> Any:
        rank = dist.get_rank(options["group"])
        own = [bytes_of(x.split(n)[rank]) for x, n in ((received, to_here), (sent, to_there))]
        traffic.add(bytes_of(received) - own[0], bytes_of(sent) - own[1])
        return exchange(received, sent, to_here, to_there, **options)

    with replaced(all_gather, all_to_all):
        yield traffic


@contextlib.contextmanager
def replaced(all_gather: Callable[..., Any], all_to_all: Callable[..., Any]) -> Iterator[None]:
    """Makes flash_dmattn call these instead of the collective operations of torch.distributed."""
    with mock.patch.object(_ranks, "all_gather", all_gather):
        with mock.patch.object(dist, "all_to_all_single", all_to_all):
            yield


class Done:
    """A completed operation."""

    def wait(self) -> None:
        pass


class Recording:
    """The collective operations of a call. They can be repeated without the rest of the call, or
    replaced by copies of their results."""

    def __init__(self, call: Callable[[], Any]) -> None:
        # for each operation: received, the other arguments, options
        self.gathers: list[tuple[Any, ...]] = []
        self.exchanges: list[tuple[Any, ...]] = []
        gather, exchange = _ranks.all_gather, dist.all_to_all_single
        self.operations = gather, exchange

        def all_gather(received: torch.Tensor, *given: Any, **options: Any) -> Any:
            self.gathers.append((received, given, options))
            return gather(received, *given, **options)

        def all_to_all(received: torch.Tensor, *given: Any, **options: Any) -> Any:
            self.exchanges.append((received, given, options))
            return exchange(received, *given, **options)

        with replaced(all_gather, all_to_all):
            call()

    def exchange_alone(self) -> None:
        """The same operations on tensors of the same shapes, in the same order."""
        for operation, recorded in zip(self.operations, (self.gathers, self.exchanges)):
            rooms = [torch.empty_like(received) for received, _, _ in recorded]
            works = [
                operation(room, *given, **options)
                for room, (_, given, options) in zip(rooms, recorded)
            ]
            for work in works:
                work.wait()

    def run_locally(self, call: Callable[[], Any]) -> None:
        """The call, with a copy on the own device in place of each operation."""
        gathers, exchanges = iter(self.gathers), iter(self.exchanges)

        def all_gather(received: torch.Tensor, _: torch.Tensor, **options: Any) -> Done:
            received.copy_(next(gathers)[0])
            return Done()

        def all_to_all(received: torch.Tensor, *_: Any, **options: Any) -> Done:
            received.copy_(next(exchanges)[0])
            return Done()

        with replaced(all_gather, all_to_all):
            call()


# ---- results, checked ----


def check(job: Job, count: int) -> None:
    """Compare out and gradients of all ranks, `count` tokens each, with one call on all tokens.

    Each call rounds a result to its dtype once, and each rank that adds to the gradient of a key
    rounds it once more.

    Raises:
        Disagreement: on all ranks.
    """
    tokens, size = Tokens(job, count), job.size
    out = tokens.forward(job.everyone, None)
    found = (out, *tokens.gradients(out)[:3])
    every = [Tokens(job, count, rank) for rank in range(size)]
    whole = every[0]
    with torch.no_grad():
        for name in ("query", "key", "value", "dout"):
            setattr(whole, name, torch.cat([getattr(one, name) for one in every], 1))
    for leaf in whole.leaves:
        leaf.requires_grad_()
    whole_out = whole.forward_alone()
    want = (whole_out, *whole.gradients(whole_out)[:3])
    worst = 0.0
    for one, other in zip(found, want):
        own = other.narrow(1, job.rank * count, count).double()
        error = (one.double() - own).abs().max() / other.double().abs().max()
        worst = max(worst, error.item()) if error == error else math.inf
    worst = max(row[0] for row in job.everyone.gather(worst))
    step = torch.finfo(DTYPES[job.args.dtype]).eps / 2
    allowed = (size + 2) * step
    if not worst <= allowed:
        raise Disagreement(f"{size} ranks and one differ by {worst:.3g}, allowed {allowed:.3g}")
