#!/usr/bin/env python3
"""Compare flash_dmattn with PyTorch's scaled_dot_product_attention (SDPA) in one process.

Both read the same tensors. On the CPU every case is causal, with batch 1, one head and
head_dim 128 (--help lists the cases of a CUDA device). In each round every peer of a
case runs once, so that a load on the machine slows all of them. Run it from the repository's root,
with flash_dmattn installed, or with PYTHONPATH=python and FDMA_LIBRARY=build/libfdma.so:

    python benchmarks/peers.py --device cpu --json FILE --picture docs/figures/peers-cpu.svg

The outputs of a case are checked before it is timed, see check_outputs(). Exit status: 0 done; 1
outputs disagree or a file could not be written; 2 bad usage.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.util import find_spec
from typing import Any, Callable, NamedTuple

import program
from arguments import Parser, bare_parser, output, picture, whole_number, whole_numbers

WINDOW = 2048

MORE = """
Cases: forward/dense (causal, all keys), forward/selected (the window best keys of each query) and
training/selected (forward and the gradients of q, k and v).
Peers:
  fdma         flash_dmattn; the time of a selected case includes its selection
  sdpa         scaled_dot_product_attention(is_causal=True): all keys, in selected cases too
  sdpa-masked  scaled_dot_product_attention under the boolean mask of the selection, built before
  mask         building that mask from flash_dmattn's selection; the time includes selecting
Columns:
  ms             median of the rounds
  spread         (90th percentile - 10th percentile) / median
  GFLOP/s        useful operations: 4 * head_dim (training: 3.5 times that) for each pair of a
                 query and a key that it keeps; of all keys for sdpa
  times as fast  the peer's time over fdma's time in the same round, median of the rounds
{cuda}
FILTER is a substring of cases' names or, if it has * or ?, a pattern for whole names.
"""

ON_CUDA = """
With --device cuda (--threads, --lengths and --window do not apply) cases are
  attention  score, selection, lists and attention in one call, against dense attention
  selected   selection and attention, of given scores in several orders
  dense      all keys through the kernels of flash_dmattn
  select, score   one operation alone
  one-query  attention of one query: with a window as attention, without one as dense
  launch     the host's time for a call
  backward   the gradients of attention; training: forward and backward
  selected-backward, dense-backward   the gradients of selected and dense
and peers
  fdma       flash_dmattn; the time includes scores and selection unless they are given.
             fdma-rising, ...: with scores in that order
  fdma-deterministic   gradients that are bit-equal from run to run
  fdma-sm80  attention by the kernels for any device of compute capability 8.0 or later
  cudnn, flash   SDPA over all keys, by the back ends of cuDNN and of FlashAttention
  flash4     flash_attn_func() of the package flash-attn-4 over all keys, if it is installed: in
             attention, dense and their gradients. A case in which it fails is measured without it,
             after a line that says why
  masked, mask   SDPA under the boolean mask of the selection; building that mask
  read       a plain read of the case's keys: half the time of a copy
  graph      the same call in a CUDA graph
A case without bBATCH in its name has batch 1.
Columns: of dense is useful FLOP/s relative to cuDNN's (fdma-sm80: to FlashAttention's), of flash4
relative to flash4's; of read is the time of a plain read over that of the case; of iid is the time
over that with random scores, of fast over that with gradients summed in any order, and of shorter
over that of a quarter of the length; times cudnn is the time of cudnn over that of the row's peer,
and as fast is the time of the row's peer over that of fdma.
"""


def make_parser() -> Parser:
    parser = bare_parser("peers.py", __doc__, MORE.format(cuda=ON_CUDA.strip()))
    add = parser.add_argument
    add("filter", nargs="?", metavar="FILTER", help="which cases (default: all)")
    add("--device", default="cpu", help="where to run: cpu or cuda (default: cpu)")
    add("--json", type=output, metavar="FILE", help="also write the figures, one object per line")
    add("--picture", type=picture, metavar="FILE", help="draw time against length (.svg, .png)")
    add("--threads", type=whole_number, nargs="+", metavar="N", help="default: 1 2")
    add("--lengths", type=whole_numbers, metavar="N,...", help="default: 1024 to 16384, doubling")
    add("--window", type=whole_number, default=WINDOW, metavar="N", help="default: %(default)s")
    add("--rounds", type=whole_number, metavar="N", help="exactly N rounds per case")
    add("--quick", action="store_true", help="few rounds, lengths up to 4096 (cuda: 32768)")
    return parser


if __name__ == "__main__":
    program.begin(make_parser().parse_args)

import flash_dmattn
import peers_cuda
import peers_cuda_cases
import peers_training
import torch
from benchmarking import (
    QUICK,
    USUAL,
    Disagreement,
    Rounds,
    alternate,
    find_machine,
    median_ratio,
    require_close,
    summary,
    time_pass,
    write_whole,
)
from torch.nn.functional import scaled_dot_product_attention

HEAD_DIM = 128
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
LENGTHS = [1024, 2048, 4096, 8192, 16384]
BLOCK = 256  # queries that share a tolerance
SAMPLES = 16  # queries of a block that determine its tolerance
QUICK_LENGTHS = [1024, 2048, 4096]
TRAINING_LENGTHS = [8192]
QUICK_TRAINING_LENGTHS = [4096]


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
        full = min(window or self.length, self.length)
        pairs = full * (full + 1) // 2 + (self.length - full) * full
        return (3.5 if self.training else 1) * 4.0 * HEAD_DIM * pairs


class Inputs:
    """The tensors of a case: query, key, value [1, 1, length, head_dim] for SDPA, views of the same
    memory for flash_dmattn, and score [1, 1, length] with distinct numbers."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(case.length)
        shape = (3, 1, 1, case.length, HEAD_DIM)
        self.window = case.window
        self.sdpa = torch.randn(shape, generator=generator).to(DTYPES[case.dtype]).unbind()
        self.fdma = [tensor.transpose(1, 2) for tensor in self.sdpa]
        self.score = torch.randperm(case.length, generator=generator).float()[None, None]
        self.mask = build_mask(self) if case.window else None
        if case.training:
            self.dout = torch.randn(shape[1:], generator=generator).to(DTYPES[case.dtype])
            self.sdpa = tuple(tensor.clone().requires_grad_() for tensor in self.sdpa)


def fdma_dense(inputs: Inputs) -> torch.Tensor:
    return flash_dmattn.attention(*inputs.fdma, causal=True)[0].transpose(1, 2)


def fdma_selected(inputs: Inputs) -> torch.Tensor:
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


# The peers of each device, flash_dmattn first.
PEERS = {
    "cpu": {
        "dense": (Peer("fdma", fdma_dense, "all"), Peer("sdpa", sdpa_dense, "all")),
        "selected": (
            Peer("fdma", fdma_selected, "kept"),
            Peer("sdpa", sdpa_dense, "all"),
            Peer("sdpa-masked", sdpa_masked, "kept"),
            Peer("mask", build_mask, "none"),
        ),
        "training": tuple(
            Peer(name, functools.partial(peers_training.step, name), "kept")
            for name in peers_training.FORWARDS
        ),
    },
}
DEVICES = ("cpu", "cuda")


def peers_of(device: str, case: Case) -> tuple[Peer, ...]:
    if case.training:
        return PEERS[device]["training"]
    return PEERS[device]["selected" if case.window else "dense"]


class Block(NamedTuple):
    """The exact outputs of some of BLOCK consecutive queries."""

    rows: slice
    sample: torch.Tensor  # their positions
    exact: torch.Tensor  # out [samples, head_dim] float64
    allowed: float  # the largest error allowed in an output


def evaluate(
    inputs: Inputs, rows: torch.Tensor, kept: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """out [rows, head_dim], with every step in `dtype`. kept: bool [rows, the first keys]."""
    query, key, value = (tensor[0, 0, : kept.shape[1]].to(dtype) for tensor in inputs.sdpa)
    logits = (query[rows] @ key.T) * HEAD_DIM**-0.5
    return torch.softmax(logits.masked_fill(~kept, -torch.inf), 1) @ value


def keys_kept(inputs: Inputs, rows: torch.Tensor, window: int) -> torch.Tensor:
    """bool [rows, keys up to the last row], by sorting; window 0: all keys up to the row."""
    key = torch.arange(int(rows[-1]) + 1)
    visible = key <= rows[:, None]
    if not 0 < window < len(key):
        return visible
    scores = inputs.score[0, 0, : len(key)].expand_as(visible).masked_fill(~visible, -torch.inf)
    best = torch.zeros_like(visible).scatter(1, scores.topk(window).indices, True)
    return best & visible


def allowance(
    inputs: Inputs,
    sample: torch.Tensor,
    kept: torch.Tensor,
    exact: torch.Tensor,
    dtype: torch.dtype,
) -> float:
    """The error allowed in an output in `dtype`: twice the error of a plain evaluation, plus one
    rounding step of the largest output."""
    plain = evaluate(inputs, sample, kept, dtype)
    error = (plain.double() - exact).abs().max().item()
    return 2 * error + torch.finfo(dtype).eps * exact.abs().max().item()


def reference_blocks(inputs: Inputs, window: int) -> list[Block]:
    """Each block of queries has its own tolerance, because outputs shrink with more keys."""
    blocks = []
    length, dtype = inputs.sdpa[0].shape[2], inputs.sdpa[0].dtype
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        sample = torch.linspace(start, end - 1, min(SAMPLES, end - start)).round().long()
        kept = keys_kept(inputs, sample, window)
        exact = evaluate(inputs, sample, kept, torch.float64)
        blocks.append(
            Block(slice(start, end), sample, exact, allowance(inputs, sample, kept, exact, dtype))
        )
    return blocks


def check_outputs(
    case: Case, peers: tuple[Peer, ...], inputs: Inputs, references: dict[str, list[Block]]
) -> None:
    """Compare every peer's output with the exact output at the sampled queries. If it attends to
    the same keys as fdma, also compare with fdma at all queries, within twice the tolerance.

    Raises:
        Disagreement: an output is further away.
    """
    if case.training:
        peers_training.check_gradients(inputs, keys_kept, case.name())
        return
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


def make_row(
    case: Case, peer: Peer, threads: int, times: list[float], ours: list[float]
) -> dict[str, Any]:
    measured = summary(times)
    window = {"all": 0, "kept": case.window}.get(peer.keys)
    return {
        "case": case.name(),
        "peer": peer.name,
        "threads": threads,
        **measured,
        "useful_gflops": None if window is None else case.flops(window) / (measured["ms"] * 1e6),
        "ratio": None if times is ours else median_ratio(times, ours),
    }


def measure(args: argparse.Namespace, cases: list[Case]) -> Iterator[dict[str, Any]]:
    """The rows of each case, for each number of threads.

    Raises:
        Disagreement: outputs of peers are too far apart.
    """
    for case in cases:
        inputs = Inputs(case)
        peers = peers_of(args.device, case)
        windows = {"all": 0, "kept": case.window}
        references = {
            keys: reference_blocks(inputs, windows[keys])
            for keys in {peer.keys for peer in peers} - {"none"}
            if not case.training
        }
        for threads in args.threads:
            torch.set_num_threads(threads)  # flash_dmattn obeys it, too
            check_outputs(case, peers, inputs, references)  # also warms up
            timers = {
                peer.name: functools.partial(time_pass, functools.partial(peer.run, inputs), "cpu")
                for peer in peers
            }
            times = alternate(timers, args.rounds)
            for peer in peers:
                yield make_row(case, peer, threads, times[peer.name], times[peers[0].name])


def print_row(row: dict[str, Any]) -> None:
    formats = {"useful_gflops": "10.1f", "ratio": "13.2f"}
    cells = [
        format(row[field], form) if row[field] is not None else " " * int(form.split(".")[0])
        for field, form in formats.items()
    ]
    line = (
        f"{row['case']:40} {row['peer']:12} {row['threads']:7} {row['ms']:10.3f}"
        f" {row['spread']:8.3f} {' '.join(cells)}"
    )
    print(line.rstrip(), flush=True)


def print_head() -> None:
    print(
        f"{'case':40} {'peer':12} {'threads':>7} {'ms':>10} {'spread':>8} {'GFLOP/s':>10}"
        f" {'times as fast':>13}"
    )


def select_cases(args: argparse.Namespace) -> list[Case] | list[peers_cuda.Case]:
    if args.device == "cuda":
        return named(peers_cuda_cases.all_cases(args.quick), args.filter)
    lengths = args.lengths or (QUICK_LENGTHS if args.quick else LENGTHS)
    cases = [
        Case(dtype, length, window)
        for window in (0, args.window)
        for dtype in DTYPES
        for length in lengths
    ]
    longer = args.lengths or (QUICK_TRAINING_LENGTHS if args.quick else TRAINING_LENGTHS)
    cases += [Case(dtype, length, args.window, True) for dtype in DTYPES for length in longer]
    return named(cases, args.filter)


def named(cases: list[Any], wanted: str | None) -> list[Any]:
    """The cases that FILTER matches."""
    wanted = wanted or ""
    if any(mark in wanted for mark in "*?["):
        return [case for case in cases if fnmatch(case.name(), wanted)]
    return [case for case in cases if wanted in case.name()]


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[Case]]:
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.device not in flash_dmattn.get_available_backends():
        parser.error(
            f"--device {args.device}: there is no {args.device.upper()} backend in this build"
        )
    if args.device not in DEVICES:
        parser.error(f"--device is {args.device!r}, want one of {', '.join(DEVICES)}")
    cores = os.cpu_count() or 1
    args.threads = args.threads or [threads for threads in (1, 2) if threads <= cores]
    if max(args.threads) > cores:
        parser.error(f"--threads is {max(args.threads)}, and this machine has {cores} cores")
    usual = peers_cuda.ROUNDS if args.device == "cuda" else USUAL
    args.rounds = (
        Rounds(args.rounds, args.rounds, 0) if args.rounds else QUICK if args.quick else usual
    )
    if not (cases := select_cases(args)):
        parser.error(f"no case matches {args.filter!r}")
    if args.picture and not find_spec("matplotlib"):
        parser.error("--picture needs matplotlib, which is not installed")
    return args, cases


def collect(args: argparse.Namespace, cases: list[Case], rows: list[dict[str, Any]]) -> None:
    """Measure, print the rows and add them to `rows`.

    Raises:
        Disagreement: outputs of peers are too far apart.
    """
    if args.device == "cuda":
        peers_cuda.print_head()
        for row in peers_cuda.measure(cases, args.rounds):
            rows.append(row)
            peers_cuda.print_row(row)
        held = [row["met"] for row in rows if row["met"] is not None]
        print(f"{sum(held)} of {len(held)} goals reached")
    else:
        print_head()
        for row in measure(args, cases):
            rows.append(row)
            print_row(row)


def run(args: argparse.Namespace, cases: list[Case]) -> None:
    """Measure and write the files.

    Raises:
        Disagreement: outputs of peers are too far apart.
        OSError: a file could not be written.
    """
    machine = find_machine(args.device)
    print(", ".join(f"{field} {value}" for field, value in machine.items() if value), end="\n\n")
    rows: list[dict[str, Any]] = []
    try:
        collect(args, cases, rows)
    finally:  # write the measured rows even if a later case fails
        if args.json and rows:
            write_whole(args.json, [machine, *rows])
    if args.picture:
        import peers_picture  # needs matplotlib

        peers_picture.draw(machine, rows, args.picture)


def main(argv: list[str] | None = None) -> int:
    args, cases = parse(argv)
    try:
        run(args, cases)
    except (Disagreement, OSError) as error:
        print(f"peers.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
