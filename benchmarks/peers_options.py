"""Arguments of peers.py, without PyTorch."""

from __future__ import annotations

import argparse

from arguments import Parser, output, picture, whole_number, whole_numbers

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


def make_parser(document: str | None) -> Parser:
    parser = Parser(
        prog="peers.py",
        description=(document or "").split("\n")[0],
        epilog=MORE.format(cuda=ON_CUDA.strip()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
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
