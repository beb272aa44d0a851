"""Runs functions of test modules on the ranks of a process group: processes of this machine that
are connected by gloo.

run_ranks() starts this file as a program, which imports the modules once and then forks, so that
ranks need not import PyTorch themselves. A rank's standard output and error go to a file, and its
result to another one. The process of rank 0 has the store, and ends last unless it fails.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from context_cases import DEVICE_COUNT, Case
from flash_dmattn import _ranks

GRACE = 5  # seconds for the other ranks to end after one has failed
# The ranks of the process group of each size. They do not always begin with rank 0, and are not
# always all ranks.
MEMBERS = {1: [5], 2: [0, 1], 3: [1, 2, 3], 4: [4, 5, 6, 7], 8: list(range(8))}

# ---- In the process of the tests ----


def outputs_of(folder: Path) -> str:
    return "\n".join(
        f"---- {path.stem}\n{path.read_text(errors='replace')}"
        for path in sorted(folder.glob("*.txt"))
    )


def run_ranks(
    functions: Sequence[str], size: int, *, timeout: float, rank_timeout: float = 20
) -> list[Any]:
    """On all ranks the results of functions(rank), each given as "module.function", in a list; None
    for a rank that has left early by os._exit(0). `rank_timeout` is the timeout of the process
    group in seconds.

    Raises:
        AssertionError: a rank raised an error or did not end within `timeout` seconds. The message
            has the output of all ranks.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        numbers = (size, rank_timeout, timeout)
        program = [sys.executable, __file__, name, *map(str, numbers), *functions]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with open(folder / "all ranks.txt", "w") as output:
            started = subprocess.Popen(
                program, env=variables, stdout=output, stderr=output, start_new_session=True
            )
            try:
                status = started.wait(timeout)
            except subprocess.TimeoutExpired:
                status = f"no end within {timeout} s"
            finally:
                try:
                    os.killpg(started.pid, signal.SIGKILL)  # the program and all ranks
                except ProcessLookupError:
                    pass  # all of them have ended
                started.wait()
        assert status == 0, f"{functions}: {status}\n{outputs_of(folder)}"
        files = [folder / f"{rank}.pt" for rank in range(size)]
        return [torch.load(one, weights_only=False) if one.exists() else None for one in files]


class Once:
    """run_ranks(), once for all tests of a module, even if it fails for all of them. Modules with
    ranks of the same number and timeout share the processes."""

    made: dict[tuple[int, float], list[Once]] = {}

    def __init__(
        self, module: str, function: str, size: int, *, timeout: float, rank_timeout: float = 20
    ) -> None:
        self.function, self.size, self.timeout = f"{module}.{function}", size, timeout
        self.rank_timeout, self.message = rank_timeout, ""
        self.found: list[Any] | None = None
        self.sharing = Once.made.setdefault((size, rank_timeout), [])
        self.sharing.append(self)

    def run(self) -> None:
        functions = [one.function for one in self.sharing]
        timeout = sum(one.timeout for one in self.sharing)
        options = {"timeout": timeout, "rank_timeout": self.rank_timeout}
        try:
            ranks = run_ranks(functions, self.size, **options)
        except AssertionError as error:
            for one in self.sharing:
                one.message = str(error)
            return
        for number, one in enumerate(self.sharing):
            one.found = [None if rank is None else rank[number] for rank in ranks]

    def results(self) -> list[Any]:
        """The results. Only the first test that fails has the whole message."""
        if self.found is None and not self.message:
            self.run()
        if self.found is None:
            message, self.message = self.message, "the ranks failed: see the first of these tests"
            raise AssertionError(message)
        return self.found

    def results_of(self, name: str, ranks: Iterable[int] | None = None) -> list[Any]:
        """What these ranks, or all, have recorded under a name."""
        ranks = range(self.size) if ranks is None else ranks
        found = [self.results()[rank][name] for rank in ranks]
        errors = [one for one in found if isinstance(one, str)]
        assert not errors, "\n".join(errors)
        return found


# ---- In the process of a rank ----


def group_of(size: int, transport: str = "gloo") -> dist.ProcessGroup | None:
    """The process group of MEMBERS[size], of 8 ranks; None on ranks that are not in it. Every rank
    creates all groups, in the same order, before it uses one."""
    return groups()[transport, size] if dist.get_rank() in MEMBERS[size] else None


@functools.lru_cache(maxsize=None)
def groups() -> dict[tuple[str, int], dist.ProcessGroup]:
    timeout = dist.distributed_c10d._get_default_store().timeout
    wanted = [("gloo", size) for size in MEMBERS]
    wanted += [("nccl", size) for size in MEMBERS if size <= DEVICE_COUNT]
    return {
        (transport, size): dist.new_group(MEMBERS[size], timeout, transport)
        for transport, size in wanted
    }


def device_of(case: Case, rank: int) -> torch.device:
    if case.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % DEVICE_COUNT)
    torch.cuda.set_device(device)
    return device


def own_tokens(tensor: torch.Tensor, lengths: Sequence[int], rank: int, dim: int = 1) -> Any:
    begin = sum(lengths[:rank])
    return tensor.narrow(dim, begin, lengths[rank])


def attempt(action: Callable[[], Any]) -> Any:
    """The result of a call or the text of its error, so that one fault does not hide others."""
    try:
        return action()
    except Exception:
        traceback.print_exc()
        return traceback.format_exc()


def record(functions: Mapping[str, Callable[[int], Any]], rank: int) -> dict[str, Any]:
    """The results of functions of the rank by their names, or the texts of their errors."""
    found = {}
    for name, function in functions.items():
        print(name, flush=True)
        found[name] = attempt(functools.partial(function, rank))
    return found


def refusal_of(action: Callable[[], Any]) -> dict[str, Any]:
    """The type and message of a call's error, and the seconds until it came."""
    begin = time.monotonic()
    try:
        action()
    except Exception as error:
        kind, message = type(error).__name__, str(error)
    else:
        kind, message = "", "no error"
    return {"kind": kind, "message": message, "seconds": time.monotonic() - begin}


@contextmanager
def received_bytes() -> Iterator[dict[str, int]]:
    """Counts the bytes that this rank receives in collective operations, its own included."""
    found = {"bytes": 0, "operations": 0}

    def counting(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(received: torch.Tensor, *rest: Any, **options: Any) -> Any:
            found["bytes"] += received.numel() * received.element_size()
            found["operations"] += 1
            return operation(received, *rest, **options)

        return run

    kept = _ranks.all_gather, dist.all_to_all_single
    _ranks.all_gather, dist.all_to_all_single = map(counting, kept)
    try:
        yield found
    finally:
        _ranks.all_gather, dist.all_to_all_single = kept


# ---- The program ----


def find_function(name: str) -> Callable[[int], Any]:
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(module), function)


def run_rank(
    rank: int, size: int, listener: socket.socket, done: Any, arguments: list[str]
) -> None:
    folder, _, seconds, all_seconds, *functions = arguments
    with open(Path(folder, f"rank {rank}.txt"), "w") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    faulthandler.dump_traceback_later(0.9 * float(all_seconds))  # if it hangs
    signal.alarm(math.ceil(float(all_seconds)))  # ends it even if the tests are gone
    address, timeout = listener.getsockname(), timedelta(seconds=float(seconds))
    if rank > 0:
        listener.close()
    options = {"master_listen_fd": listener.fileno()} if rank == 0 else {}
    store = dist.TCPStore(*address, size, rank == 0, timeout, **options)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    result = [function(rank) for function in map(find_function, functions)]
    path = Path(folder, f"{rank}.pt")
    torch.save(result, path.with_suffix(".incomplete"))
    path.with_suffix(".incomplete").rename(path)
    if rank == 0:
        done.wait()
    sys.stdout.flush()
    os._exit(0)


def main(arguments: list[str]) -> int:
    size = int(arguments[1])
    signal.alarm(math.ceil(float(arguments[3])))
    torch.set_num_threads(1)
    for name in arguments[4:]:
        find_function(name)  # imported before there are ranks
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    context = multiprocessing.get_context("fork")
    done = context.Event()
    ranks = [
        context.Process(target=run_rank, args=(rank, size, listener, done, arguments))
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    listener.close()
    waiting = list(ranks)
    while waiting and all(one.exitcode in (None, 0) for one in ranks):
        multiprocessing.connection.wait([one.sentinel for one in waiting], 1)
        waiting = [one for one in waiting if one.exitcode is None]
        if waiting == ranks[:1]:  # the others no longer need the store
            done.set()
    end = time.monotonic() + GRACE
    for one in waiting:
        one.join(max(end - time.monotonic(), 0))
    codes = [one.exitcode for one in ranks]
    if any(code != 0 for code in codes):
        print(f"exit codes of the ranks: {codes}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
