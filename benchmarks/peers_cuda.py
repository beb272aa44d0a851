"""What benchmarks/peers.py measures on a CUDA device, and how.

The cases and tensors are in peers_cuda_inputs.py and, for gradients, in peers_cuda_backward.py.
Peers alternate. A call is timed by events on its stream, after a kernel that only waits, so that
the host's time does not count; the case "launch" measures the host's time alone.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any, Callable

import flash_dmattn
import peers_cuda_backward
import torch
from flash_dmattn import ops
from peers_common import Disagreement, Rounds, quantiles
from peers_cuda_inputs import (
    LONGEST_DENSE,
    ORDERS,
    PASSES,
    SAMPLES,
    Case,
    Goal,
    Inputs,
    Peer,
    best_keys,
    build_mask,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

WAIT_CYCLES = 3_000_000  # about 1.5 ms: longer than the host takes for a call
QUICK_LENGTH = 32768  # the largest length with --quick
CALLS = 50  # timed together by the host: fewer than fill the queue of a stream

MORE = """
With --device cuda (--threads, --lengths and --window do not apply) cases are
  attention  score, selection, lists and attention in one call, against dense attention
  selected   selection and attention, of given scores in several orders
  dense      all keys through the kernels of flash_dmattn
  select, score, one-query   one operation alone
  launch     the host's time for a call
  backward   the gradients of attention; training: forward and backward
  selected-backward, dense-backward   the gradients of selected and dense
and peers
  fdma       flash_dmattn; the time includes scores and selection unless they are given.
             fdma-rising, ...: with scores in that order
  fdma-deterministic   gradients that are bit-equal from run to run
  fdma-sm80  attention by the kernels for any device of compute capability 8.0 or later
  cudnn, flash   SDPA over all keys, by the back ends of cuDNN and of FlashAttention
  masked, mask   SDPA under the boolean mask of the selection; building that mask
  read       a plain read of the case's keys: half the time of a copy
  graph      the same call in a CUDA graph
Columns: of dense is useful FLOP/s relative to cuDNN's (fdma-sm80: to FlashAttention's); of read is
the time of a plain read over that of the case; of iid is the time
over that with random scores, of fast over that with gradients summed in any order, and of shorter
over that of a quarter of the length.
"""


def attention_cases() -> list[Case]:
    def attention(*shape: int, mask: bool = False, **goal: tuple[float, float]) -> Case:
        ((figure, (bar, aim)),) = goal.items()
        return Case("attention", *shape, {"fdma": Goal(figure, bar, aim)}, mask)

    orders = {f"fdma-{order}": Goal("of_iid", 1.15, 1.0) for order in ORDERS}
    sm80 = {"fdma-sm80": Goal("of_dense", 0.85, 1.0)}
    dense = {"fdma": Goal("of_dense", 0.80, 1.05)}
    return [
        attention(32, 8, 128, 8192, 2048, ms=(0.65, 0.5), mask=True),
        attention(32, 8, 128, 32768, 2048, of_dense=(0.70, 1.0)),
        attention(32, 8, 128, 131072, 2048, of_dense=(0.75, 1.0)),
        attention(32, 8, 128, 1048576, 2048, ms=(85, 66)),
        attention(32, 32, 128, 32768, 2048, of_dense=(0.65, 0.90)),
        attention(32, 8, 64, 32768, 2048, of_dense=(0.60, 0.80)),
        attention(16, 4, 256, 32768, 2048, of_dense=(0.60, 0.80)),
        attention(2, 1, 64, 32768, 1024, ms=(0.16, 0.10), mask=True),
        Case("selected", 32, 8, 128, 8192, 2048, orders),
        Case("selected", 32, 8, 128, 32768, 2048, {**orders, **sm80}),
        Case("selected", 32, 8, 128, 131072, 2048, orders),
        Case("dense", 32, 8, 128, 8192, 0, dense),
        Case("dense", 32, 8, 128, 32768, 0, dense),
    ]


def small_cases() -> list[Case]:
    def select(heads: int, length: int, window: int, bar: float, aim: float) -> Case:
        return Case("select", 0, heads, 0, length, window, {"fdma": Goal("ms", bar, aim)})

    score, row = Goal("of_read", 1 / 1.3, 1 / 1.05), Goal("of_read", 1 / 1.25, 1 / 1.1)
    launch = {"fdma": Goal("ms", 0.060, 0.030), "graph": Goal("ms", 0.015, 0.008)}
    return [
        select(1, 32768, 1024, 0.060, 0.030),
        select(8, 32768, 2048, 0.080, 0.040),
        select(8, 131072, 2048, 0.180, 0.090),
        select(8, 1048576, 2048, 1.5, 0.8),
        Case("score", 8, 8, 128, 131072, 0, {"fdma": score}),
        Case("score", 32, 32, 128, 131072, 0, {"fdma": score}),
        Case("one-query", 32, 8, 128, 131072, 0, {"fdma": row}),
        Case("launch", 2, 1, 64, 16, 4, launch),
    ]


def all_cases(quick: bool) -> list[Case]:
    cases = attention_cases() + small_cases() + peers_cuda_backward.cases()
    return [case for case in cases if not quick or case.length <= QUICK_LENGTH]


def attend(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """The fused call: out, lse, score, bias, expiry, slot."""
    rules = (inputs.case.window, 0, 0, "causal")
    options = (*6 * [None], *rules, "exp", True, 0.0, 0.0, 0.0, 0.0, False, None)
    return ops.FUSED.op(*inputs.fdma, inputs.dt_proj, inputs.a_coef, *options)


def fused(inputs: Inputs) -> torch.Tensor:
    window = inputs.case.window
    return flash_dmattn.flash_dma_attention(
        *inputs.fdma, inputs.dt_proj, inputs.a_coef, keep_window_size=window, causal=True
    )


def selected(inputs: Inputs, order: str, backend: str | None = None) -> torch.Tensor:
    selection = flash_dmattn.select(inputs.scores[order], inputs.case.window)
    out, _ = flash_dmattn.attention(*inputs.fdma, selection=selection, causal=True, backend=backend)
    return out


def dense(inputs: Inputs) -> torch.Tensor:
    return flash_dmattn.attention(*inputs.fdma, causal=True)[0]


def sdpa(inputs: Inputs, backend: SDPBackend) -> torch.Tensor:
    causal = inputs.case.kind != "one-query"  # SDPA aligns a single query with the first key
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(*inputs.sdpa, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2)


def masked(inputs: Inputs) -> torch.Tensor:
    """With keys repeated for each head: only the slowest back end supports groups under a mask."""
    query, key, value = inputs.sdpa[0], *inputs.expanded
    return scaled_dot_product_attention(query, key, value, attn_mask=inputs.mask).transpose(1, 2)


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
READ = Peer("read", copy)
FUSED = Peer("fdma", fused)  # computes its own scores
DENSE = Peer("fdma", dense, "all")
SM80 = Peer("fdma-sm80", functools.partial(selected, order="iid", backend="cuda/sm80"), "iid")


def peers_of(case: Case) -> list[Peer]:
    """The peers of a case, flash_dmattn first."""
    found = {
        "select": lambda: ordered_peers(select, keys=False),
        "selected": lambda: [*ordered_peers(selected, keys=True), SM80, CUDNN, FLASH],
        "score": lambda: [Peer("fdma", score), READ],
        "one-query": lambda: [DENSE, READ, FLASH],
        "dense": lambda: [DENSE, CUDNN, FLASH],
        "launch": lambda: [FUSED, Peer("graph", replay)],
        "attention": lambda: [FUSED, CUDNN, FLASH],
    }.get(case.kind, lambda: peers_cuda_backward.peers_of(case))()
    if case.mask and case.kind not in PASSES:
        found += [Peer("masked", masked, "iid"), Peer("mask", build_mask)]
    return [peer for peer in found if peer.keys != "all" or case.length <= LONGEST_DENSE]


# ---- outputs ----


def evaluate(
    inputs: Inputs, g: int, rows: torch.Tensor, logits_of: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """out [rows, heads of group g, head_dim], with every step in `dtype`. logits_of [rows, length]
    is added to the logits; it is -inf where a key is not kept."""
    group = inputs.case.q_heads // inputs.case.kv_heads
    key, value = (tensor[0, :, g].to(dtype) for tensor in (inputs.key, inputs.value))
    query = inputs.query[0, rows, g * group : (g + 1) * group].to(dtype)
    logits = (query @ key.T) * inputs.case.head_dim**-0.5 + logits_of[:, None].to(dtype)
    return torch.softmax(logits, 2) @ value


def check_output(
    inputs: Inputs,
    out: torch.Tensor,
    score: torch.Tensor | None,
    bias: torch.Tensor | None,
    what: str,
) -> None:
    """Compare sampled queries with float64: the tolerance is twice the error of a plain evaluation,
    plus a rounding step of the row's largest output.

    Raises:
        Disagreement: an output is further away.
    """
    length, window = inputs.case.length, inputs.case.window if score is not None else 0
    require_finite(out, what)
    rows = torch.linspace(0, out.shape[1] - 1, min(SAMPLES, out.shape[1]), device=out.device).long()
    for g in range(inputs.case.kv_heads):
        ranked = torch.zeros(length, device=out.device) if score is None else score[0, g]
        kept = best_keys(ranked, rows + length - out.shape[1], window)
        added = torch.zeros_like(ranked) if bias is None else bias[0, g]
        check_group(inputs, out, g, rows, torch.where(kept, added, -torch.inf), what)


def require_finite(out: torch.Tensor, what: str) -> None:
    if not out.isfinite().all():
        raise Disagreement(f"{what}: not all outputs are finite")


def check_group(
    inputs: Inputs, out: torch.Tensor, g: int, rows: torch.Tensor, added: torch.Tensor, what: str
) -> None:
    """Compare out[0, rows] of the query heads of kv head g; `added` as in evaluate()."""
    group = inputs.case.q_heads // inputs.case.kv_heads
    exact = evaluate(inputs, g, rows, added, torch.float64)
    plain = evaluate(inputs, g, rows, added, out.dtype)
    found = out[0, rows, g * group : (g + 1) * group]
    step = torch.finfo(out.dtype).eps
    allowed = 2 * (plain - exact).abs().amax((1, 2)) + step * exact.abs().amax((1, 2))
    error = (found - exact).abs().amax((1, 2))
    if not (error <= allowed).all():  # written so that NaN fails
        worst = (error / allowed).max().item()
        raise Disagreement(f"{what}, kv head {g}: {worst:.3g} times what is allowed")


def check_outputs(inputs: Inputs, peers: list[Peer]) -> None:
    """Check every peer's outputs; those of the fused call by the scores that it computed."""
    case = inputs.case
    if case.kind in PASSES:
        peers_cuda_backward.check_gradients(inputs, peers)
        return
    if case.kind in ("attention", "launch"):
        out, _, found, bias, *_ = attend(inputs)
        check_output(inputs, out, found, bias, f"{case.name()}: fdma")
        if not torch.equal(fused(inputs), out):
            raise Disagreement(f"{case.name()}: fdma: out differs when it is the only result")
    for peer in peers:
        if peer.keys:
            ranked = inputs.scores.get(peer.keys)
            check_output(inputs, peer.run(inputs), ranked, None, f"{case.name()}: {peer.name}")


# ---- time ----


def time_call(peer: Peer, inputs: Inputs) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(WAIT_CYCLES)
    start.record()
    peer.run(inputs)
    end.record()
    return start, end


def time_launches(peer: Peer, inputs: Inputs) -> float:
    """Milliseconds that the host takes for each of many successive calls."""
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


def ratio(above: list[float], below: list[float]) -> float:
    """The median of the rounds' ratios."""
    return quantiles([a / b for a, b in zip(above, below)])[1]


def make_row(
    case: Case, peer: Peer, times: dict[str, list[float]], earlier: list[tuple[Case, float]]
) -> dict[str, Any]:
    """One peer's row of a case; `earlier` has fdma's medians in the cases before it."""
    own, ours = times[peer.name], times["fdma"]
    low, median, high = quantiles(own)
    attends = peer.keys or peer is FUSED or case.kind in PASSES
    flops = case.flops(0 if peer.keys == "all" else case.window) if attends else None
    rival = times.get("flash" if peer.name == "fdma-sm80" else "cudnn")
    row = {
        "case": case.name(),
        "peer": peer.name,
        "ms": median,
        "spread": (high - low) / median,
        "useful_gflops": flops / (median * 1e6) if flops and case.kind != "launch" else None,
        "of_dense": flops / case.flops(0) * ratio(rival, own) if flops and rival else None,
        "of_read": ratio(times["read"], own) if "read" in times else None,
        "of_iid": ratio(own, ours) if peer.name[5:] in ORDERS else None,
        "of_fast": ratio(own, ours) if peer.name == "fdma-deterministic" else None,
        "of_shorter": of_shorter(case, median, earlier) if peer.name == "fdma" else None,
        "ratio": None if peer.name.startswith("fdma") else ratio(own, ours),
    }
    goal = case.goals.get(peer.name)
    row["goal"] = goal.words() if goal else None
    value = row[goal.figure] if goal else None
    row["met"] = goal.met(value) if goal and value is not None else None
    return row


def of_shorter(case: Case, median: float, earlier: list[tuple[Case, float]]) -> float | None:
    """The time over that of the same case of a quarter of the length."""
    for other, ms in earlier:
        if other._replace(length=4 * other.length, goals={}) == case._replace(goals={}):
            return median / ms
    return None


def measure(cases: list[Case], rounds: Rounds) -> Iterator[dict[str, Any]]:
    """The rows of each case whose outputs agree.

    Raises:
        Disagreement: outputs of a case did not agree; at the end, so that other cases are measured.
    """
    earlier: list[tuple[Case, float]] = []
    wrong = []
    for case in cases:
        inputs = Inputs(case)
        peers = peers_of(case)
        try:
            check_outputs(inputs, peers)
        except Disagreement as error:
            wrong.append(str(error))
            continue
        torch.cuda.empty_cache()
        times = dict(zip([peer.name for peer in peers], alternate(peers, inputs, rounds)))
        for peer in peers:
            yield make_row(case, peer, times, earlier)
        earlier.append((case, quantiles(times["fdma"])[1]))
        del inputs
        torch.cuda.empty_cache()
    if wrong:
        raise Disagreement("; ".join(wrong))


FIGURES = {
    "of_dense": "of dense",
    "of_read": "of read",
    "of_iid": "of iid",
    "of_fast": "of fast",
    "of_shorter": "of shorter",
    "ratio": "as fast",
}


def print_row(row: dict[str, Any]) -> None:
    cells = [f"{row['case']:46} {row['peer']:18} {row['ms']:10.4f} {row['spread']:7.3f}"]
    tflops = row["useful_gflops"] / 1e3 if row["useful_gflops"] else None
    for value in (tflops, *(row[figure] for figure in FIGURES)):
        cells.append(f"{value:10.3f}" if value is not None else " " * 10)
    if row["goal"]:
        cells.append(f" {'met   ' if row['met'] else 'MISSED'} {row['goal']}")
    print(" ".join(cells).rstrip(), flush=True)


def print_head() -> None:
    heads = " ".join(f"{head:>10}" for head in ("TFLOP/s", *FIGURES.values()))
    print(f"{'case':46} {'peer':18} {'ms':>10} {'spread':>7} {heads}")
