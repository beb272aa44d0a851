"""Arguments of suite.py, without PyTorch."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from arguments import Parser, bare_parser, output, whole_number
from definition_options import DTYPE_NAMES

# Names of the items in suite_items.py.
ITEM_NAMES = ["length", "density", "batch", "heads", "threshold"]
ITEM_NAMES += ["selection", "kernels", "tiles", "stages", "energy"]
SHORTEST, LONGEST, QUICK_LONGEST = 128, 131072, 4096
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
  mean_bytes         on the CPU: the mean of that memory over the time of a call
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


def make_parser(document: str | None) -> Parser:
    parser = bare_parser("suite.py", document, MORE)
    add = parser.add_argument
    add("--out", type=output, metavar="FILE", help="write a line of JSON for each figure")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    add("--dtype", choices=DTYPE_NAMES, help="default: bfloat16, on the CPU float32")
    only = {"nargs": "+", "choices": ITEM_NAMES, "default": [*ITEM_NAMES], "metavar": "ITEM"}
    add("--only", **only, help="default: all")
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
