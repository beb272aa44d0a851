#!/usr/bin/env python3
"""Time a forward and a backward call of dynamic mask attention, beside SDPA, for several lengths.

    python benchmarks/backward_performance.py [--device cpu] [--quick] [--lengths N ...]
    python benchmarks/backward_performance.py --original [--quick] [--out FOLDER]

Peers: flash_dma_attention() with scores and selection, and without their bias; flash_dmattn_func()
and SDPA with a ready mask of the same keys; SDPA over all keys. Columns: ms, the median of the
rounds; spread, (90th - 10th percentile) / median; times, the median of the ratios to
flash_dma_attention(). --original has the rows and columns of the original's tables; --help
describes them, and the exit status.
"""

from __future__ import annotations

import sys

import program
from definition_options import performance_parser

if __name__ == "__main__":
    program.begin(performance_parser("backward_performance.py", __doc__).parse_args)

from performance_run import run_performance


def main(arguments: list[str] | None = None) -> int:
    return run_performance("backward_performance.py", __doc__, True, arguments)


if __name__ == "__main__":
    sys.exit(main())
