#!/usr/bin/env python3
"""The benchmark `ranks`: attention over a sequence that many ranks hold, and what they exchange."""

from __future__ import annotations

import contextlib
import os
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, Callable

if __name__ == "__main__":
    import bench

    bench.start("ranks")

import program
import torch
import torch.distributed as dist
from benchmarking import (
    Rounds,
    Row,
    choose_device,
    find_machine,
    median_ratio,
    quantiles,
    summary,
    visible_pairs,
    write_whole,
)
from flash_dmattn.distributed import ring_attention, split_lengths
from ranks_common import (
    WARM_UP,
    Job,
    Recording,
    Team,
    Tokens,
    alternate,
    check,
    counted,
    slowest,
    time_calls,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

CHECKED_KEYS = 4096  # of each rank, at most


def describe(times: list[float]) -> Row:
    return {**summary(times), "rounds": len(times)}


def rounds_of(job: Job, least: int = 3) -> Rounds:
    return Rounds(min(least, job.args.rounds), job.args.rounds, job.args.seconds)


def measure(
    job: Job,
    team: Team,
    calls: dict[str, Callable[[], Any]],
    warm_up: int = WARM_UP,
    least: int = 3,
) -> dict[str, list[list[float]]]:
    """Milliseconds of each call [round][rank], after calls that do not count."""
    for call in calls.values():
        for _ in range(warm_up):
            call()
    timers = {
        name: lambda call=call: time_calls(call, job.args.calls, team)
        for name, call in calls.items()
    }
    return alternate(team, timers, rounds_of(job, least))


def fits(job: Job, team: Team, keys: int) -> bool:
    return all(row[0] for row in team.gather(float(job.fits(keys))))


def too_large(job: Job, keys: int) -> str:
    need = keys * job.bytes_per_key / 2**30
    return f"{keys} tokens on a device take about {need:.0f} GiB"


def on_teams(
    job: Job, teams: list[Team], item: Callable[[Job, Team], Iterator[Row]]
) -> Iterator[Row]:
    """The rows of each team, measured on its ranks. The other ranks wait."""
    for team in teams:
        rows = list(item(job, team)) if job.rank < team.size else []
        job.wait()
        yield from ({"ranks": team.size, **row} for row in rows)


def weak(job: Job, team: Team) -> Iterator[Row]:
    keys, kept = job.args.keys, job.args.window + job.args.recent
    tokens, lengths = Tokens(job, keys), [keys] * team.size
    calls = {"one": tokens.run_alone, "team": lambda: tokens.run(team, lengths)}
    found = measure(job, team, calls)
    one, many = slowest(found["one"]), slowest(found["team"])
    pairs = visible_pairs(keys * team.size, kept) - visible_pairs(keys * (team.size - 1), kept)
    yield {
        "keys": keys,
        **describe(many),
        "one_ms": quantiles(one)[1],
        "one_fastest_ms": quantiles([min(row) for row in found["one"]])[1],
        "efficiency": median_ratio(one, many),
        "work": pairs / visible_pairs(keys, kept),
    }


def time_tokens(job: Job, count: int) -> float:
    """Milliseconds of `count` tokens on the first rank's device. Only this rank calls it."""
    tokens = Tokens(job, count)
    return quantiles(slowest(measure(job, job.teams[0], {"one": tokens.run_alone})["one"]))[1]


def time_alone(job: Job) -> tuple[float, str]:
    """Milliseconds of all --total tokens on one device, and the source of that number."""
    total, keys = job.args.total, job.args.keys
    number, measured = 0.0, 0.0
    if job.rank == 0:
        if job.fits(total):
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                number, measured = time_tokens(job, total), 1.0
        if not measured:
            job.free()
            number = time_tokens(job, keys) * total / keys
    job.wait()
    number, measured = job.everyone.gather(number, measured)[0]
    return number, "measured" if measured else f"modelled from {keys} keys"


def strong(job: Job) -> Iterator[Row]:
    one, source = time_alone(job)

    def of_team(job: Job, team: Team) -> Iterator[Row]:
        lengths = split_lengths(job.args.total, team.size)
        head = {"keys": job.args.total, "ideal_from": source, "ideal_ms": one / team.size}
        if not fits(job, team, lengths[0]):
            yield {**head, "not_run": too_large(job, lengths[0])}
            return
        tokens = Tokens(job, lengths[job.rank])
        times = slowest(measure(job, team, {"team": lambda: tokens.run(team, lengths)})["team"])
        row = {**head, **describe(times)}
        yield {**row, "efficiency": head["ideal_ms"] / row["ms"]}

    yield from on_teams(job, job.teams[1:], of_team)


def count_bytes(job: Job, team: Team, keys: int) -> Row:
    """The bytes that each rank exchanges."""
    tokens = Tokens(job, keys)
    with counted() as forward:
        out = tokens.forward(team, [keys] * team.size)
    with counted() as backward:
        tokens.gradients(out)
    numbers = (forward.received, forward.sent, backward.received, backward.sent)
    names = ("forward_received", "forward_sent", "backward_received", "backward_sent")
    columns = zip(*team.gather(*(float(number) for number in numbers)))
    return {name: [int(x) for x in column] for name, column in zip(names, columns)}


def bytes_moved(job: Job, team: Team) -> Iterator[Row]:
    for keys in (job.args.keys // 4, job.args.keys):
        yield {"keys": keys, "table_bytes": job.table_bytes(), **count_bytes(job, team, keys)}


def communication(job: Job, team: Team) -> Iterator[Row]:
    keys = job.args.keys
    tokens, lengths = Tokens(job, keys), [keys] * team.size

    def run() -> None:
        tokens.run(team, lengths)

    recording = Recording(run)
    calls = {
        "team": run,
        "local": lambda: recording.run_locally(run),
        "exchange": recording.exchange_alone,
    }
    found = {name: slowest(times) for name, times in measure(job, team, calls).items()}
    yield {
        "keys": keys,
        **describe(found["team"]),
        "local_ms": quantiles(found["local"])[1],
        "exchange_ms": quantiles(found["exchange"])[1],
        "of_time": 1 - median_ratio(found["local"], found["team"]),
        "exchange_of_time": median_ratio(found["exchange"], found["team"]),
    }


def peak_of(job: Job, call: Callable[[], Any]) -> int:
    """The most bytes of tensors during a call, including tensors from before it."""
    call()
    job.free()
    torch.cuda.reset_peak_memory_stats(job.device)
    call()
    torch.cuda.synchronize(job.device)
    return torch.cuda.max_memory_allocated(job.device)


def memory(job: Job, team: Team) -> Iterator[Row]:
    keys, table = job.args.keys, job.table_bytes()
    if job.device.type != "cuda":
        yield {"keys": keys, "not_run": "PyTorch counts the memory of CUDA devices alone"}
        return
    tokens, lengths = Tokens(job, keys), [keys] * team.size
    one = peak_of(job, tokens.run_alone)
    rows = team.gather(peak_of(job, lambda: tokens.run(team, lengths)), one)
    above = [int(many - alone) for many, alone in rows]
    yield {
        "keys": keys,
        "table_bytes": table,
        "peak": [int(row[0]) for row in rows],
        "above": above,
        "tables_a_rank": max(above) / table / team.size,
    }


def host(job: Job, team: Team) -> Iterator[Row]:
    keys = job.args.keys
    tokens, lengths = Tokens(job, keys), [keys] * team.size

    def launch(known: list[int] | None) -> float:
        team.wait()
        before = time.perf_counter()
        out = tokens.forward(team, known)
        taken = 1e3 * (time.perf_counter() - before)
        del out
        return taken

    timers = {"compared": lambda: launch(None), "given": lambda: launch(lengths)}
    for timer in timers.values():
        timer()
    found = alternate(team, timers, rounds_of(job))
    compared, given = (slowest(found[name]) for name in timers)
    names = {"compared_ms": compared, "given_ms": given}
    yield {"keys": keys, **{name: quantiles(times)[1] for name, times in names.items()}}


def time_dense(job: Job, team: Team) -> float:
    """Milliseconds of SDPA over --dense-keys tokens on each rank's own device; the slowest
    rank's."""
    tokens = Tokens(job, job.args.dense_keys)
    rows = [x.detach().transpose(1, 2).requires_grad_() for x in tokens.rows]
    gradient = tokens.dout.transpose(1, 2)
    backend = SDPBackend.CUDNN_ATTENTION if job.args.device == "cuda" else SDPBackend.MATH

    def call() -> None:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out, rows, gradient)

    return quantiles(slowest(measure(job, team, {"dense": call})["dense"]))[1]


def ring(job: Job, team: Team) -> Iterator[Row]:
    """Warms up the ring with few tokens. Skips it if the yardstick predicts more than --seconds."""
    total, dense_keys = job.args.ring_keys, job.args.dense_keys
    dense = time_dense(job, team)
    job.free()
    ideal = dense * visible_pairs(total, 0) / visible_pairs(dense_keys, 0) / team.size
    head = {"keys": total, "dense_keys": dense_keys, "dense_ms": dense, "ring_ideal_ms": ideal}
    lengths = split_lengths(total, team.size)
    if not fits(job, team, 2 * lengths[0]):  # gradients that go round are float32
        yield {**head, "not_run": too_large(job, 2 * lengths[0])}
        return
    tokens = Tokens(job, lengths[job.rank])
    context = slowest(measure(job, team, {"c": lambda: tokens.run(team, lengths)})["c"])
    row = {**head, "context_ms": quantiles(context)[1], "context_rounds": len(context)}
    row["times_ideal"] = ideal / row["context_ms"]
    # With causal masking the last of n ranks has 2 - 1 / n times the mean work.
    expected = ideal * (2 - 1 / team.size) / 1e3
    if expected > job.args.seconds:
        yield {**row, "not_run": f"it would take about {expected:.0f} s, --seconds allows less"}
        return

    def run(own: Tokens, known: list[int]) -> None:
        own.gradients_of_rows(ring_attention(*own.rows, group=team.group, lengths=known))

    few = split_lengths(min(total, 1024 * team.size), team.size)
    small = Tokens(job, few[job.rank])
    run(small, few)
    timers = {
        "ring": lambda: time_calls(lambda: run(tokens, lengths), 1, team),
        "context": lambda: time_calls(lambda: tokens.run(team, lengths), 1, team),
    }
    found = alternate(team, timers, rounds_of(job, least=1))
    times, context = slowest(found["ring"]), slowest(found["context"])
    yield {**row, **describe(times), "times": median_ratio(times, context)}


def longest(job: Job, team: Team) -> Iterator[Row]:
    lengths = split_lengths(job.args.longest, team.size)
    head = {"keys": job.args.longest}
    if not fits(job, team, lengths[0]):
        yield {**head, "not_run": too_large(job, lengths[0])}
        return
    tokens = Tokens(job, lengths[job.rank])
    on_cuda = job.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(job.device)
    calls = {"team": lambda: tokens.run(team, lengths)}
    times = slowest(measure(job, team, calls, warm_up=1, least=1)["team"])
    peak = torch.cuda.max_memory_allocated(job.device) if on_cuda else 0
    peaks = [int(row[0]) for row in team.gather(float(peak))]
    yield {**head, **describe(times), "peak": peaks if on_cuda else None}


ITEMS: dict[str, Callable[[Job], Iterator[Row]]] = {
    "weak": lambda job: on_teams(job, job.teams, weak),
    "strong": strong,
    "bytes": lambda job: on_teams(job, job.teams[1:], bytes_moved),
    "communication": lambda job: on_teams(job, job.teams[1:], communication),
    "memory": lambda job: on_teams(job, job.teams[1:], memory),
    "host": lambda job: on_teams(job, [job.everyone], host),
    "ring": lambda job: on_teams(job, [job.everyone], ring),
    "longest": lambda job: on_teams(job, [job.everyone], longest),
}


def find_bytes_per_key(job: Job) -> None:
    """Measured with a call on --keys tokens, on a device whose memory PyTorch counts."""
    if job.device.type == "cuda":
        tokens = Tokens(job, job.args.keys)
        job.bytes_per_key = peak_of(job, tokens.run_alone) / job.args.keys
        del tokens
        job.free()


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def print_row(row: Row) -> None:
    named = [
        f"{name} {shown(value)}" for name, value in row.items() if name not in ("item", "ranks")
    ]
    print(f"{row['item']:13} {row['ranks']:3}  {', '.join(named)}", flush=True)


def measure_all(job: Job) -> None:
    """Raises Disagreement, on all ranks, if results are wrong."""
    args = job.args
    check(job, min(CHECKED_KEYS, args.keys))
    find_bytes_per_key(job)
    names = ("q_heads", "kv_heads", "head_dim", "window", "recent", "dtype", "calls")
    settings = {"ranks": job.size, **{name: getattr(args, name) for name in names}}
    lines = [{**find_machine(args.device), **settings}]
    for name in args.only:
        program.doing(name)
        for row in ITEMS[name](job):
            lines.append({"item": name, **row})
            if job.rank == 0:
                print_row(lines[-1])
        if job.rank == 0:
            write_whole(args.out / "ranks.json", lines)


def run(args: Namespace) -> int:
    choose_device(args)
    fewest = min(args.total, args.ring_keys, args.longest)
    if args.keys < 4 or fewest < int(os.environ["WORLD_SIZE"]):
        args.parser.error(
            "--keys, --total, --ring-keys or --longest is too few tokens for the ranks"
        )
    measure_all(Job(args))
    dist.destroy_process_group()
    return 0
