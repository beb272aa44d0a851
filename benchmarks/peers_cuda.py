"""The measurements of the benchmark `peers` on a CUDA device.

The cases and their tensors are in peers_cuda_cases.py, and the gradients in peers_cuda_backward.py.
Peers alternate. A call is timed by events on its stream, after a kernel that only waits, so that
the host's time does not count; the case "launch" measures the host's time alone.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator
from typing import Any, Callable

import flash_dmattn
import peers_cuda_backward
import peers_flash4
import torch
from benchmarking import (
    Column,
    Disagreement,
    Rounds,
    Row,
    Table,
    median_ratio,
    passes,
    quantiles,
    summary,
)
from flash_dmattn import ops
from peers_cuda_cases import (
    LONGEST_DENSE,
    ORDERS,
    PASSES,
    SAMPLES,
    Case,
    Inputs,
    Peer,
    best_keys,
    build_mask,
    dense,
    fused,
    masked,
    sdpa,
    selected,
)
from torch.nn.attention import SDPBackend

WAIT_CYCLES = 3_000_000  # about 1.5 ms: longer than the host takes for a call
ROUNDS = Rounds(5, 100, 2.0)  # of each case
CALLS = 50  # timed together by the host; fewer than the queue of a stream holds


def attend(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """The fused call: out, lse, score, bias, expiry, slot."""
    rules = (inputs.case.window, 0, 0, "causal")
    options = (*6 * [None], *rules, "exp", True, 0.0, 0.0, 0.0, 0.0, False, None)
    return ops.FUSED.op(*inputs.fdma, inputs.dt_proj, inputs.a_coef, *options)


def copy(inputs: Inputs) -> None:
    inputs.spare.copy_(inputs.value)
    if inputs.case.kind == "one-query":
        inputs.spare.copy_(inputs.key)


def replay(inputs: Inputs) -> None:
    if inputs.graph is None:
        inputs.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(inputs.graph):
            fused(inputs)
    inputs.graph.replay()


def ordered_peers(run: Callable[..., Any], keys: bool) -> list[Peer]:
    """One peer for each order of the scores, random ones first."""
    peers = []
    for order in ("iid", *ORDERS):
        name = "fdma" if order == "iid" else f"fdma-{order}"
        peers.append(Peer(name, functools.partial(run, order=order), order if keys else ""))
    return peers


def select(inputs: Inputs, order: str) -> Any:
    return flash_dmattn.select(inputs.scores[order], inputs.case.window)


def score(inputs: Inputs) -> Any:
    return flash_dmattn.score(inputs.value, inputs.dt_proj, inputs.a_coef)


CUDNN = Peer("cudnn", functools.partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION), "all")
FLASH = Peer("flash", functools.partial(sdpa, backend=SDPBackend.FLASH_ATTENTION), "all")
FLASH4 = Peer(peers_flash4.NAME, peers_flash4.attend, "all")
READ = Peer("read", copy)
FUSED = Peer("fdma", fused)  # computes its own scores
DENSE = Peer("fdma", dense, "all")
SM80 = Peer("fdma-sm80", functools.partial(selected, order="iid", backend="cuda/sm80"), "iid")


def selected_peers(case: Case) -> list[Peer]:
    """Other libraries' peers are included only if a goal needs them."""
    found = ordered_peers(selected, keys=True)
    return found + ([SM80, CUDNN, FLASH] if SM80.name in case.goals else [])


def peers_of(case: Case) -> list[Peer]:
    """The peers of a case, flash_dmattn first."""
    rivals = [CUDNN, FLASH] + ([FLASH4] if peers_flash4.is_installed() else [])
    found = {
        "select": lambda: ordered_peers(select, keys=False),
        "selected": lambda: selected_peers(case),
        "score": lambda: [Peer("fdma", score), READ],
        "one-query": lambda: [FUSED, FLASH] if case.window else [DENSE, READ, FLASH],
        "dense": lambda: [DENSE, *rivals],
        "launch": lambda: [FUSED, Peer("graph", replay)],
        "attention": lambda: [FUSED, *rivals],
        "growing": lambda: [FUSED, *rivals],
    }.get(case.kind, lambda: peers_cuda_backward.peers_of(case))()
    if case.mask and case.kind not in PASSES:
        found += [Peer("masked", masked, "iid"), Peer("mask", build_mask)]
    is_affordable = case.length <= LONGEST_DENSE or case.kind == "one-query"
    return [peer for peer in found if peer.keys != "all" or is_affordable]


# ---- outputs ----


def evaluate(
    inputs: Inputs,
    b: int,
    g: int,
    rows: torch.Tensor,
    logits_of: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """out [rows, heads of group g, head_dim] of batch entry b, with every step in `dtype`.
    logits_of [rows, length] is added to the logits, and is -inf where a key is not kept."""
    group = inputs.case.q_heads // inputs.case.kv_heads
    key, value = (tensor[b, :, g].to(dtype) for tensor in (inputs.key, inputs.value))
    query = inputs.query[b, rows, g * group : (g + 1) * group].to(dtype)
    logits = (query @ key.T) * inputs.case.head_dim**-0.5 + logits_of[:, None].to(dtype)
    return torch.softmax(logits, 2) @ value


def check_output(
    inputs: Inputs,
    out: torch.Tensor,
    score: torch.Tensor | None,
    bias: torch.Tensor | None,
    what: str,
) -> None:
    """Compare sampled queries with float64. The tolerance is twice the error of a plain evaluation,
    plus a rounding step of the row's largest output.

    Raises:
        Disagreement: an output is further away.
    """
    length, window = inputs.case.length, inputs.case.window if score is not None else 0
    require_finite(out, what)
    rows = torch.linspace(0, out.shape[1] - 1, min(SAMPLES, out.shape[1]), device=out.device).long()
    for b, g in itertools.product(range(len(out)), range(inputs.case.kv_heads)):
        ranked = torch.zeros(length, device=out.device) if score is None else score[b, g]
        kept = best_keys(ranked, rows + length - out.shape[1], window)
        added = torch.zeros_like(ranked) if bias is None else bias[b, g]
        check_group(inputs, out, g, rows, torch.where(kept, added, -torch.inf), what, b)


def require_finite(out: torch.Tensor, what: str) -> None:
    if not out.isfinite().all():
        raise Disagreement(f"{what}: not all outputs are finite")


def check_group(
    inputs: Inputs,
    out: torch.Tensor,
    g: int,
    rows: torch.Tensor,
    added: torch.Tensor,
    what: str,
    b: int = 0,
) -> None:
    """Compare out[b, rows] of the query heads of kv head g; `added` is logits_of in evaluate()."""
    group = inputs.case.q_heads // inputs.case.kv_heads
    exact = evaluate(inputs, b, g, rows, added, torch.float64)
    plain = evaluate(inputs, b, g, rows, added, out.dtype)
    found = out[b, rows, g * group : (g + 1) * group]
    step = torch.finfo(out.dtype).eps
    allowed = 2 * (plain - exact).abs().amax((1, 2)) + step * exact.abs().amax((1, 2))
    error = (found - exact).abs().amax((1, 2))
    if not (error <= allowed).all():  # written so that NaN fails
        worst = (error / allowed).max().item()
        where = f"batch entry {b}, kv head {g}"
        raise Disagreement(f"{what}, {where}: {worst:.3g} times what is allowed")


def check_fused(inputs: Inputs) -> None:
    """Check the fused call by its own scores. Without them its output must have the same bits,
    except that a single query then gets its keys in another order."""
    case, what = inputs.case, f"{inputs.case.name()}: fdma"
    out, _, found, bias, *_ = attend(inputs)
    check_output(inputs, out, found, bias, what)
    alone = fused(inputs)
    if case.kind == "one-query":
        check_output(inputs, alone, found, bias, what)
    elif not torch.equal(alone, out):
        raise Disagreement(f"{what}: out differs when it is the only result")


def check_peer(inputs: Inputs, peer: Peer) -> None:
    case = inputs.case
    if case.kind in PASSES:
        peers_cuda_backward.check_peer(inputs, peer)
    elif peer is FUSED:
        check_fused(inputs)
    elif peer.keys:
        ranked = inputs.scores.get(peer.keys)
        check_output(inputs, peer.run(inputs), ranked, None, f"{case.name()}: {peer.name}")


def checked_peers(inputs: Inputs, peers: list[Peer]) -> list[Peer]:
    """The peers whose outputs or gradients are right.

    Raises:
        Disagreement: a peer that is not from an optional package is wrong.
    """
    right = []
    for peer in peers:
        check = functools.partial(check_peer, inputs, peer)
        if peer.name != peers_flash4.NAME:
            check()
        elif not passes(inputs.case.name(), peer.name, check):  # it compiles at its first call
            continue
        right.append(peer)
    return right


# ---- time ----


def time_call(peer: Peer, inputs: Inputs) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(WAIT_CYCLES)
    start.record()
    peer.run(inputs)
    end.record()
    return start, end


def time_launches(peer: Peer, inputs: Inputs) -> float:
    """Milliseconds of host time for each of many successive calls."""
    torch.cuda.synchronize()
    before = time.perf_counter()
    for _ in range(CALLS):
        peer.run(inputs)
    return 1e3 * (time.perf_counter() - before) / CALLS


def alternate(peers: list[Peer], inputs: Inputs, rounds: Rounds) -> list[list[float]]:
    """The milliseconds of each peer in each round, after a round that does not count."""
    times: list[list[float]] = [[] for _ in peers]
    begin = time.perf_counter()
    while len(times[0]) <= rounds.least or (
        len(times[0]) <= rounds.most and time.perf_counter() < begin + rounds.seconds
    ):
        if inputs.case.kind == "launch":
            found = [time_launches(peer, inputs) for peer in peers]
        else:
            events = [time_call(peer, inputs) for peer in peers]
            torch.cuda.synchronize()
            found = [start.elapsed_time(end) for start, end in events]
        for peer, own, ms in zip(peers, times, found):
            own.append(ms / 2 if peer.name == "read" else ms)
    return [own[1:] for own in times]


def make_row(
    case: Case, peer: Peer, times: dict[str, list[float]], earlier: list[tuple[Case, float]]
) -> Row:
    """One peer's row of a case. `earlier` has fdma's medians in earlier cases."""
    own, ours = times[peer.name], times["fdma"]
    measured = summary(own)
    median = measured["ms"]
    is_ours = peer.name.startswith("fdma")
    attends = peer.keys or peer is FUSED or case.kind in PASSES
    flops = case.flops(0 if peer.keys == "all" else case.window) if attends else None

    def rate_over(rival: str) -> float | None:
        """Useful FLOP/s over those of a peer that attends to all keys."""
        if not flops or rival not in times:
            return None
        return flops / case.flops(0) * median_ratio(times[rival], own)

    row = {
        "case": case.name(),
        "peer": peer.name,
        **measured,
        "useful_gflops": flops / (median * 1e6) if flops and case.kind != "launch" else None,
        "of_dense": rate_over("flash" if peer.name == "fdma-sm80" else "cudnn"),
        "of_flash4": rate_over(peers_flash4.NAME),
        "of_read": median_ratio(times["read"], own) if "read" in times else None,
        "of_iid": median_ratio(own, ours) if peer.name[5:] in ORDERS else None,
        "of_fast": median_ratio(own, ours) if peer.name == "fdma-deterministic" else None,
        "of_shorter": of_shorter(case, median, earlier) if peer.name == "fdma" else None,
        "times_cudnn": median_ratio(times["cudnn"], own) if is_ours and "cudnn" in times else None,
        "ratio": None if is_ours else median_ratio(own, ours),
    }
    goal = case.goals.get(peer.name)
    row["goal"] = goal.words() if goal else None
    value = row[goal.figure] if goal else None
    row["met"] = goal.met(value) if goal and value is not None else None
    return row


def of_shorter(case: Case, median: float, earlier: list[tuple[Case, float]]) -> float | None:
    """The time over the time of the same case with a quarter of the length."""
    for other, ms in earlier:
        if other._replace(length=4 * other.length, goals={}) == case._replace(goals={}):
            return median / ms
    return None


def measure(case: Case, rounds: Rounds, earlier: list[tuple[Case, float]]) -> Iterator[Row]:
    """The rows of a case, which is added to `earlier`.

    Raises:
        Disagreement: outputs did not agree.
    """
    torch.cuda.empty_cache()
    inputs = Inputs(case)
    peers = checked_peers(inputs, peers_of(case))
    torch.cuda.empty_cache()
    times = dict(zip([peer.name for peer in peers], alternate(peers, inputs, rounds)))
    for peer in peers:
        yield make_row(case, peer, times, earlier)
    earlier.append((case, quantiles(times["fdma"])[1]))


TABLE = Table(
    46,
    18,
    Column("ms", "ms", "10.4f"),
    Column("spread", "spread", "7.3f"),
    Column("useful_gflops", "TFLOP/s", "11.3f", 1e-3),
    Column("of_dense", "of dense", "11.3f"),
    Column("of_flash4", "of flash4", "11.3f"),
    Column("of_read", "of read", "11.3f"),
    Column("of_iid", "of iid", "11.3f"),
    Column("of_fast", "of fast", "11.3f"),
    Column("of_shorter", "of shorter", "11.3f"),
    Column("times_cudnn", "times cudnn", "11.3f"),
    Column("ratio", "as fast", "11.3f"),
)
