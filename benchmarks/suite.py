#!/usr/bin/env python3
"""Measure dynamic mask attention beside dense attention: growth, density, ablations, energy.

It runs on a CUDA device, or with --device cpu and smaller sizes on the CPU, with flash_dmattn
installed, or with PYTHONPATH=python and FDMA_LIBRARY=build/libfdma.so:

    python benchmarks/suite.py --out FILE.json
    python benchmarks/suite.py --compare OLD.json --out NEW.json
    python benchmarks/suite.py --compare OLD.json --json NEW.json

The second measures and then compares, the third only compares; benchmarks/suite_picture.py draws
FILE.json. In each round every peer of a setting runs once, and so does a product of two matrices,
whose rate is the machine's peak. Outputs are compared with float64 before a call is timed;
benchmarks/backward_equivalence.py compares gradients. Exit status: 0 done; 1 wrong outputs, a call
that has become slower, or a file that could not be written; 2 bad usage, or nothing to compare.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import suite_compare
import torch
from arguments import Parser, output, whole_number
from definition_cases import DTYPES, choose_dtype, default_device, has_kernels
from definition_run import Progress
from peers_common import Disagreement, find_machine, write_whole
from suite_calls import Setting
from suite_items import ITEMS, QUICK_LONGEST, SHORTEST, Plan
from suite_measure import Bench, Row, reason_of

SECONDS, QUICK_SECONDS = 1.0, 0.15
LIMIT, QUICK_LIMIT = 20.0, 1.0

MORE = f"""
Items; each has the settings ITEM/PASS/DTYPE/bBATCH/hQ_HEADSgKV_HEADS/dHEAD_DIM/nLENGTH/wWINDOW,
where PASS is forward, or training, which is forward and backward:
  length     128, 256, ... tokens up to --longest, with one window
  density    windows from 1/64 of the length to all of it
  batch      1 to 16 sequences
  heads      query and kv heads
  threshold  fdma, which selects and gathers keys whatever their number, and all-keys, which
             processes all keys densely: where `times` of all-keys is below 1, a call would win if
             it were processed densely from that density on
  selection  fdma selects exactly; approximate; recent: half of the kept keys are the newest ones;
             newest: all but one are
  kernels    attention over a given selection, by each family of kernels that runs on this device;
             fdma is by that which the library chooses
  tiles      rows of a tile and work of a thread, on the CPU, by flash_dmattn.tune(): `times` is the
             time over that by the library's rules; training is backward alone
  stages     the stages one by one: score, select, forward over a given selection, and its
             backward; fdma is forward in one call
  energy     joules a token, from the counter of NVML; it needs the package nvidia-ml-py
Peers: fdma is flash_dma_attention() with scores and selection; dense-NAME is SDPA over all keys by
one of its back ends (cudnn, flash, plain).
Columns, and fields of the lines of FILE.json:
  ms                 median of the rounds
  spread             (90th percentile - 10th percentile) / median
  tokens_per_second  of all sequences
  useful_gflops      useful operations a second; flop are those of a call. A multiply-add is two,
                     of each query with the keys that it keeps, and of scores
  of_peak            useful_gflops over peak_gflops, the machine's: of PyTorch's product of two
                     matrices of this dtype (float16 on the CPU: of float32), which a CPU may
                     exceed, or --peak
  peak_bytes         the most memory that tensors took during a call, beside its inputs
  times              the time over that of the setting's first peer
  times_dense        of fdma: how many times as fast it is as the fastest dense peer
  density            kept pairs of a query and a key over visible ones
Ratios are medians of the rounds' ratios. A line with not_run says why. On a CUDA device every call
is in a range (score, select, forward, backward, dense) that Nsight Systems shows:
  nsys profile --trace cuda,nvtx python benchmarks/suite.py --only stages
--compare prints a table of all lines that both files have. A line is slower if its time has grown
by more than --tolerance and the spreads of both, and so has its time as a multiple of that of the
product of matrices, which tells a slower call from a slower machine.
--quick takes few rounds, few settings, and lengths up to {QUICK_LONGEST}, or half of others.
"""


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"is {text!r}, want a number above 0")
    return value


def existing(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"is {text!r}, want a file that exists")
    return Path(text)


def make_parser() -> Parser:
    parser = Parser(
        prog="suite.py",
        description=(__doc__ or "").split("\n")[0],
        epilog=MORE.strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--out", type=output, metavar="FILE", help="write a line of JSON for each figure")
    add("--device", choices=("cuda", "cpu"), default=default_device())
    add("--dtype", choices=DTYPES, help="default: bfloat16, on the CPU float32")
    add("--only", nargs="+", choices=ITEMS, default=[*ITEMS], metavar="ITEM", help="default: all")
    add("--quick", action="store_true", help="few rounds and settings")
    add("--longest", type=whole_number, metavar="N", help="tokens; default: 131072")
    add("--divide", type=whole_number, default=1, metavar="N", help="divide all lengths by this")
    add("--threads", type=whole_number, metavar="N", help="of the CPU; default: PyTorch's")
    add("--seconds", type=number, help=f"of the rounds of a setting, default: {SECONDS:g}")
    add("--limit", type=number, help=f"leave out calls of more seconds, default: {LIMIT:g}")
    add("--peak", type=number, metavar="TFLOPS", help="the machine's, instead of measuring it")
    add("--compare", type=existing, metavar="OLD", help="a file of an earlier run")
    add("--json", type=existing, metavar="NEW", help="compare this file, and measure nothing")
    tolerance = "0.10: at most 10 %% slower, beside the spreads"
    add("--tolerance", type=number, default=0.10, metavar="T", help=tolerance)
    add("--no-progress", action="store_true", help="no progress bar on a terminal")
    return parser


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.json and not args.compare:
        parser.error("--json is given without --compare OLD")
    if args.json and args.out:
        parser.error("--out is given with --json, which measures nothing")
    if args.device == "cuda" and default_device() != "cuda":
        parser.error("there is no CUDA device, or no CUDA backend in this build")
    if args.dtype and not has_kernels(args.device, DTYPES[args.dtype]):
        parser.error(f"--dtype: no kernels for {args.dtype} on {args.device}")
    if args.longest and args.longest < SHORTEST:
        parser.error(f"--longest is {args.longest}, want {SHORTEST} or more")
    cores = os.cpu_count() or 1
    if args.threads and args.threads > cores:
        parser.error(f"--threads is {args.threads}, and this machine has {cores} cores")
    args.seconds = args.seconds or (QUICK_SECONDS if args.quick else SECONDS)
    args.limit = args.limit or (QUICK_LIMIT if args.quick else LIMIT)
    return args


# ---- lines ----

COLUMNS = {  # and their formats
    **{"ms": "10.3f", "spread": "7.3f", "tokens_per_second": "12.0f", "useful_gflops": "10.1f"},
    **{"of_peak": "7.3f", "peak_bytes": "12.0f", "times": "7.2f", "times_dense": "7.2f"},
}
TITLES = ("ms", "spread", "tokens/s", "GFLOP/s", "of peak", "bytes", "times", "dense")


def width_of(form: str) -> int:
    return int(form.split(".")[0])


def header() -> str:
    titles = (f"{title:>{width_of(form)}}" for title, form in zip(TITLES, COLUMNS.values()))
    return f"{'case':52} {'peer':14} {' '.join(titles)}"


def format_row(row: Row) -> str:
    head = f"{row['case']:52} {row['peer']:14}"
    if "not_run" in row:
        return f"{head} not run: {row['not_run']}"
    if "joules_per_token" in row:
        energy = (
            "{joules_per_token:.3g} J a token, {tokens_per_joule:.0f} tokens a J, {watts:.0f} W"
        )
        return f"{head} {energy.format(**row)}"
    cells = (
        " " * width_of(form) if row.get(name) is None else format(row[name], form)
        for name, form in COLUMNS.items()
    )
    return f"{head} {' '.join(cells)}".rstrip()


def rows_of(bench: Bench, setting: Setting) -> Iterator[Row]:
    """Those of a setting, or a line that says that its tensors do not fit in the device's
    memory."""
    try:
        yield from ITEMS[setting.item](bench, setting)
    except torch.cuda.OutOfMemoryError as error:
        head = {"case": setting.name(bench.dtype_name), "peer": "fdma", **setting.fields()}
        yield {**head, "threads": torch.get_num_threads(), "not_run": reason_of(error)}


def measure(args: argparse.Namespace, lines: list[dict[str, Any]]) -> None:
    """Append the rows of every item to `lines`, and print them.

    Raises:
        Disagreement: outputs are wrong.
    """
    peak = args.peak and 1e12 * args.peak
    bench = Bench(args.device, choose_dtype(args), args.seconds, args.limit, peak)
    plan = Plan(args)
    settings = [setting for item in args.only for setting in plan.of(item)]
    progress = Progress(len(settings), not args.no_progress)
    progress.print(header())
    try:
        for setting in settings:
            progress.begin(setting.name(bench.dtype_name))
            for row in rows_of(bench, setting):
                lines.append(row)
                progress.print(format_row(row))
            progress.end()
    finally:
        progress.close()


def run(args: argparse.Namespace) -> suite_compare.Lines:
    """Measure, and write what was measured even if a later setting fails.

    Raises:
        Disagreement: outputs are wrong.
        OSError: the file could not be written.
    """
    if args.threads:
        torch.set_num_threads(args.threads)
    machine = {**find_machine(args.device), "program": "suite.py", "quick": args.quick}
    machine.update(seconds=args.seconds, peak="stated" if args.peak else "measured")
    rows: list[Row] = []
    begin = time.monotonic()
    try:
        measure(args, rows)
    finally:
        if args.out and rows:
            machine["run_seconds"] = round(time.monotonic() - begin, 1)
            write_whole(args.out, [machine, *rows])
    return suite_compare.Lines(machine, rows)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:  # a file that cannot be compared is found before anything is measured
        old = suite_compare.read(args.compare) if args.compare else None
        new = suite_compare.read(args.json) if args.json else None
    except (OSError, ValueError) as error:
        print(f"suite.py: {error}", file=sys.stderr)
        return 2
    try:
        new = new or run(args)
    except (Disagreement, OSError) as error:
        print(f"suite.py: {error}", file=sys.stderr)
        return 1
    if old is None:
        return 0
    try:
        return 1 if suite_compare.report(old, new, args.tolerance) else 0
    except ValueError as error:
        print(f"suite.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
