#!/usr/bin/env python3
"""The benchmark `peers`: flash_dmattn and PyTorch's SDPA in one process. The cases of the CPU are
here, those of a CUDA device in peers_cuda.py."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.util import find_spec
from typing import Any, Callable, NamedTuple

if __name__ == "__main__":
    import bench

    bench.start("peers")

import flash_dmattn
import peers_cuda
import peers_cuda_cases
import peers_sliding
import torch
from benchmarking import (
    MS,
    QUICK,
    USUAL,
    Column,
    Rounds,
    Row,
    Table,
    alternate,
    measure_cases,
    median_ratio,
    plain_allowance,
    require_close,
    summary,
    time_pass,
    visible_pairs,
)
from peers_cuda_cases import best_keys
from torch.nn.functional import scaled_dot_product_attention

HEAD_DIM = 128
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
LENGTHS, QUICK_LENGTHS = [1024, 2048, 4096, 8192, 16384], [1024, 2048, 4096]
TRAINING_LENGTHS, QUICK_TRAINING_LENGTHS = [8192], [4096]
BLOCK = 256  # queries that share a tolerance
SAMPLES = 16  # queries of a block that determine its tolerance
GRADIENT_SAMPLES = 32  # queries whose outputs have gradients, in the check


class Case(NamedTuple):
    dtype: str
    length: int  # q_len and kv_len
    window: int  # 0: dense
    training: bool = False  # forward and backward

    def name(self) -> str:
        kind = "training" if self.training else "forward"
        form, end = ("selected", f"/w{self.window}") if self.window else ("dense", "")
        return f"{kind}/{form}/{self.dtype}/d{HEAD_DIM}/n{self.length}{end}"

    def flops(self, window: int) -> float:
        """Useful floating-point operations if each query keeps `window` keys; 0: all keys."""
        pairs = visible_pairs(self.length, window)
        return (3.5 if self.training else 1) * 4.0 * HEAD_DIM * pairs


class Inputs:
    """The tensors of a case: query, key, value [1, 1, length, head_dim] for SDPA, views of the same
    memory for flash_dmattn, and score [1, 1, length] with distinct numbers."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(case.length)
        shape = (3, 1, 1, case.length, HEAD_DIM)
        self.window = case.window
        self.sdpa = torch.randn(shape, generator=generator).to(DTYPES[case.dtype]).unbind()
        self.score = torch.randperm(case.length, generator=generator).float()[None, None]
        self.mask = build_mask(self) if case.window else None
        if case.training:
            self.dout = torch.randn(shape[1:], generator=generator).to(DTYPES[case.dtype])
            self.sdpa = tuple(tensor.clone().requires_grad_() for tensor in self.sdpa)
        self.fdma = [tensor.transpose(1, 2) for tensor in self.sdpa]


# ---- peers ----


def fdma_dense(inputs: Inputs) -> torch.Tensor:
    return flash_dmattn.attention(*inputs.fdma, causal=True)[0].transpose(1, 2)


def fdma_selected(inputs: Inputs) -> torch.Tensor:
    """The time includes the selection."""
    selection = flash_dmattn.select(inputs.score, inputs.window)
    out, _ = flash_dmattn.attention(*inputs.fdma, selection=selection, causal=True)
    return out.transpose(1, 2)


def sdpa_dense(inputs: Inputs) -> torch.Tensor:
    return scaled_dot_product_attention(*inputs.sdpa, is_causal=True)


def sdpa_masked(inputs: Inputs) -> torch.Tensor:
    return scaled_dot_product_attention(*inputs.sdpa, attn_mask=inputs.mask)


def build_mask(inputs: Inputs) -> torch.Tensor:
    """bool [1, 1, length, length], built from expiry, which is the cheapest way."""
    expiry = flash_dmattn.select(inputs.score, inputs.window).expiry
    key = torch.arange(expiry.shape[-1], dtype=torch.int32)
    position = key[:, None]
    return (key <= position) & (position < expiry[:, :, None])


class Peer(NamedTuple):
    name: str
    run: Callable[[Inputs], Any]
    keys: str  # keys of each query: "all", "kept", or "none" if the peer computes no attention


# flash_dmattn is first.
DENSE = (Peer("fdma", fdma_dense, "all"), Peer("sdpa", sdpa_dense, "all"))
SELECTED = (
    Peer("fdma", fdma_selected, "kept"),
    Peer("sdpa", sdpa_dense, "all"),
    Peer("sdpa-masked", sdpa_masked, "kept"),
    Peer("mask", build_mask, "none"),
)


def step(peer: Peer, inputs: Inputs, dout: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Forward, then the gradients of query, key and value."""
    return torch.autograd.grad(peer.run(inputs), inputs.sdpa, inputs.dout if dout is None else dout)


def peers_of(case: Case) -> tuple[Peer, ...]:
    if case.training:
        return tuple(peer for peer in SELECTED if peer.keys == "kept")
    return SELECTED if case.window else DENSE


# ---- outputs and gradients, checked ----


def evaluate(
    tensors: tuple[torch.Tensor, ...], rows: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """out [rows, head_dim], with every step in the dtype of query, key and value. kept: bool [rows,
    the first keys]."""
    query, key, value = (tensor[0, 0, : kept.shape[1]] for tensor in tensors)
    logits = (query[rows] @ key.T) * HEAD_DIM**-0.5
    return torch.softmax(logits.masked_fill(~kept, -torch.inf), 1) @ value


class Block(NamedTuple):
    """The exact outputs of some of BLOCK consecutive queries."""

    rows: slice
    sample: torch.Tensor  # their positions
    exact: torch.Tensor  # out [samples, head_dim] float64
    allowed: float  # the largest error allowed in an output


def reference_blocks(inputs: Inputs, window: int) -> list[Block]:
    """Each block of queries has its own tolerance, because outputs shrink with more keys."""
    blocks = []
    length, exact_inputs = inputs.sdpa[0].shape[2], tuple(x.double() for x in inputs.sdpa)
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        sample = torch.linspace(start, end - 1, min(SAMPLES, end - start)).round().long()
        kept = best_keys(inputs.score[0, 0, :end], sample, window)
        exact = evaluate(exact_inputs, sample, kept)
        allowed = plain_allowance(evaluate(inputs.sdpa, sample, kept), exact)
        blocks.append(Block(slice(start, end), sample, exact, allowed))
    return blocks


def check_outputs(
    case: Case, peers: tuple[Peer, ...], inputs: Inputs, references: dict[str, list[Block]]
) -> None:
    """Compare every peer's output with the exact output at the sampled queries. If it attends to
    the same keys as fdma, also compare with fdma at all queries, within twice the tolerance.

    Raises:
        Disagreement: an output is further away.
    """
    first = peers[0]
    ours = first.run(inputs)[0, 0]
    for peer in peers:
        if peer.keys == "none":
            continue
        out = ours if peer is first else peer.run(inputs)[0, 0]
        for block in references[peer.keys]:
            what = f"{case.name()}: queries {block.rows.start} to {block.rows.stop - 1} of"
            samples = f"{what} {peer.name} and of float64"
            require_close(out[block.sample], block.exact, block.allowed, samples)
            if peer.keys == first.keys and peer is not first:
                both = f"{what} {peer.name} and of {first.name}"
                require_close(out[block.rows], ours[block.rows], 2 * block.allowed, both)


def check_gradients(case: Case, peers: tuple[Peer, ...], inputs: Inputs) -> None:
    """Compare every peer's gradients with float64. The output gradient is 0 except for a few
    queries, so that float64 is affordable. The tolerance is twice the error of a plain evaluation
    (eight times for other libraries), plus a rounding step of the largest element.

    Raises:
        Disagreement: a gradient is further away.
    """
    rows = torch.linspace(0, case.length - 1, min(GRADIENT_SAMPLES, case.length)).round().long()
    kept = best_keys(inputs.score[0, 0], rows, inputs.window)
    dout = torch.zeros_like(inputs.dout)
    dout[0, 0, rows] = inputs.dout[0, 0, rows]

    def differentiate(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = tuple(tensor.detach().to(dtype).requires_grad_() for tensor in inputs.sdpa)
        out = evaluate(leaves, rows, kept)
        return torch.autograd.grad((out * dout[0, 0, rows].to(dtype)).sum(), leaves)

    exact, plain = differentiate(torch.float64), differentiate(dout.dtype)
    for peer in peers:
        times = 2 if peer is peers[0] else 8
        found = step(peer, inputs, dout)
        for name, own, right, rough in zip(("dq", "dk", "dv"), found, exact, plain):
            what = f"{case.name()}: {name} of {peer.name} and of float64"
            require_close(own, right, plain_allowance(rough, right, times), what)


# ---- rows ----


def make_row(case: Case, peer: Peer, threads: int, times: dict[str, list[float]]) -> Row:
    own, measured = times[peer.name], summary(times[peer.name])
    window = {"all": 0, "kept": case.window}.get(peer.keys)
    return {
        "case": case.name(),
        "peer": peer.name,
        "threads": threads,
        **measured,
        "useful_gflops": None if window is None else case.flops(window) / (measured["ms"] * 1e6),
        "ratio": None if peer.name == "fdma" else median_ratio(own, times["fdma"]),
    }


def measure(case: Case, args: argparse.Namespace) -> Iterator[Row]:
    """The rows of a case, for each number of threads.

    Raises:
        Disagreement: outputs of peers are too far apart.
    """
    inputs, peers = Inputs(case), peers_of(case)
    windows = {"all": 0, "kept": case.window}
    references = {
        keys: reference_blocks(inputs, windows[keys])
        for keys in {peer.keys for peer in peers} - {"none"}
        if not case.training
    }
    for threads in args.threads:
        torch.set_num_threads(threads)  # flash_dmattn obeys it, too
        if case.training:  # a check also warms up
            check_gradients(case, peers, inputs)
            runs = {peer.name: functools.partial(step, peer, inputs) for peer in peers}
        else:
            check_outputs(case, peers, inputs, references)
            runs = {peer.name: functools.partial(peer.run, inputs) for peer in peers}
        timers = {name: functools.partial(time_pass, run, "cpu") for name, run in runs.items()}
        times = alternate(timers, args.rounds)
        for peer in peers:
            yield make_row(case, peer, threads, times)


TABLE = Table(
    40,
    12,
    Column("threads", "threads", "7d"),
    *MS,
    Column("useful_gflops", "GFLOP/s", "10.1f"),
    Column("ratio", "times as fast", "13.2f"),
)


# ---- the program ----


def all_cases(args: argparse.Namespace) -> list[Case]:
    lengths = args.lengths or (QUICK_LENGTHS if args.quick else LENGTHS)
    longer = args.lengths or (QUICK_TRAINING_LENGTHS if args.quick else TRAINING_LENGTHS)
    cases = [
        Case(dtype, length, window)
        for window in (0, args.window)
        for dtype in DTYPES
        for length in lengths
    ]
    return cases + [Case(dtype, length, args.window, True) for dtype in DTYPES for length in longer]


def named(cases: list[Any], wanted: str | None) -> list[Any]:
    """The cases that FILTER matches."""
    wanted = wanted or ""
    if any(mark in wanted for mark in "*?["):
        return [case for case in cases if fnmatch(case.name(), wanted)]
    return [case for case in cases if wanted in case.name()]


def check_arguments(args: argparse.Namespace) -> list[Any]:
    """Refuse what does not fit this machine, and fill in missing arguments. Returns the cases."""
    error, is_cuda = args.parser.error, args.device == "cuda"
    if args.device not in flash_dmattn.get_available_backends():
        error(f"--device {args.device}: there is no {args.device.upper()} backend in this build")
    if args.device not in ("cpu", "cuda"):
        error(f"--device is {args.device!r}, want one of cpu, cuda")
    cores = os.cpu_count() or 1
    args.threads = args.threads or [threads for threads in (1, 2) if threads <= cores]
    if max(args.threads) > cores:
        error(f"--threads is {max(args.threads)}, and this machine has {cores} cores")
    usual = peers_cuda.ROUNDS if is_cuda else USUAL
    args.rounds = (
        Rounds(args.rounds, args.rounds, 0) if args.rounds else QUICK if args.quick else usual
    )
    if args.sliding:
        args.sliding = check_sliding(args)
        cases = peers_sliding.all_cases()
    else:
        cases = peers_cuda_cases.all_cases(args.quick) if is_cuda else all_cases(args)
    if not (cases := named(cases, args.filter)):
        error(f"no case matches {args.filter!r}")
    if args.picture and not find_spec("matplotlib"):
        error("--picture needs matplotlib, which is not installed")
    return cases


def check_sliding(args: argparse.Namespace) -> list[str]:
    """The names of --sliding, those alone whose packages are installed."""
    if args.device != "cuda":
        args.parser.error("--sliding needs --device cuda")
    known = list(peers_sliding.LIBRARIES)
    names = known if args.sliding == "all" else args.sliding.split(",")
    for name in names:
        if name not in known:
            args.parser.error(f"--sliding: is {name!r}, want all or some of {', '.join(known)}")
    return peers_sliding.installed(names)


def run(args: argparse.Namespace) -> int:
    cases, earlier = check_arguments(args), []
    if args.sliding is not None:
        table, rest = peers_cuda.TABLE, (args.rounds, args.sliding)
        measure_case = peers_sliding.measure
    elif args.device == "cuda":
        table, rest = peers_cuda.TABLE, (args.rounds, earlier)
        measure_case = peers_cuda.measure
    else:
        table, rest, measure_case = TABLE, (args,), measure
    calls = [(case.name(), functools.partial(measure_case, case, *rest)) for case in cases]
    status, (machine, *rows) = measure_cases(args, table, calls, args.json)
    if args.picture and rows:
        import picture  # needs matplotlib

        picture.draw_peers(machine, rows, args.picture)
    return status
