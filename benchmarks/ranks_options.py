"""Arguments of ranks.py, without PyTorch."""

from __future__ import annotations

import argparse
import os

from arguments import Parser, folder, whole_number

ITEM_NAMES = ["weak", "strong", "bytes", "communication", "memory", "host", "ring", "longest"]

MORE = """
Items, each of which is one or more lines of ranks.json:
  weak           --keys tokens on each of 1, 2, 4, ... ranks. efficiency: the time of one device
                 alone with as many tokens, by flash_dma_attention(), over that of the team; of both
                 the slowest rank counts. work: pairs of a query and a kept key of the rank that has
                 most, over those of one device alone, whose first queries see fewer keys
  strong         --total tokens over 2, 4, ... ranks. efficiency: the time of one device over the
                 number of ranks, over the time of the team. ideal_from says whether one device was
                 measured, before the teams, with all tokens, or with --keys tokens and multiplied
  bytes          what each rank receives from others and sends to others, counted in the collective
                 operations of a call, for two lengths; table_bytes: of window + recent keys
  communication  exchange_ms: the collective operations of a call alone, with the same tensors.
                 of_time: the fraction of the call's time that goes if they are replaced by copies
                 of what they returned
  memory         the peak of a call over that of one device alone with the same tokens: what a rank
                 has beside its own tensors
  host           milliseconds until forward returns to the host, if the ranks compare their
                 arguments, and if `lengths` is given
  ring           ring_attention(), dense, of --ring-keys tokens over all ranks, and cuDNN's SDPA of
                 --dense-keys on one device, multiplied by the pairs and divided by the ranks
  longest        --longest tokens over all ranks: time and memory
A line with not_run says why. Times are medians of the rounds in milliseconds, spread is (90th
percentile - 10th percentile) / median, and ratios are medians of the rounds' ratios.
"""


def make_parser(document: str | None) -> Parser:
    parser = Parser(
        prog="ranks.py",
        description=(document or "").split("\n")[0],
        epilog=MORE.strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("out", type=folder, metavar="FOLDER")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add(
        "--only",
        nargs="+",
        choices=ITEM_NAMES,
        default=ITEM_NAMES,
        metavar="ITEM",
        help="default: all",
    )
    add("--dtype", choices=("bf16", "fp16"), default="bf16")
    numbers = {
        **{"q-heads": 32, "kv-heads": 8, "head-dim": 128, "window": 2048},
        **{"keys": 65536, "total": 1 << 20, "ring-keys": 1 << 18, "dense-keys": 32768},
        **{"longest": 1 << 22, "rounds": 9, "calls": 3, "timeout": 300},
    }
    for name, number in numbers.items():
        add(
            f"--{name}", type=whole_number, default=number, metavar="N", help="default: %(default)s"
        )
    add("--recent", type=int, default=0, metavar="N", help="default: %(default)s")
    seconds = "no more rounds of a comparison after these, default: %(default)s"
    add("--seconds", type=float, default=20.0, help=seconds)
    return parser


def parse(document: str | None, arguments: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(document)
    args = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error(
            "is not a rank, want it started by torchrun: "
            "torchrun --nproc-per-node 2 benchmarks/ranks.py FOLDER"
        )
    return args
