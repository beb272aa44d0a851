#!/usr/bin/env python3
"""Time a forward and a backward call of dynamic mask attention, beside SDPA, for several lengths.

    python benchmarks/backward_performance.py [--device cpu] [--quick] [--lengths N ...]

Peers: flash_dma_attention() with scores and selection, and without their bias; flash_dmattn_func()
and SDPA with a mask of the same keys, which is made beforehand; SDPA over all keys. Columns: ms,
the median of the rounds; spread, (90th - 10th percentile) / median; times, the median of the ratios
to flash_dma_attention(). Exit status: 0 done; 1 wrong outputs; 2 bad usage.
"""

from __future__ import annotations

import sys

from definition_times import run_performance


def main(arguments: list[str] | None = None) -> int:
    return run_performance("backward_performance.py", __doc__, True, arguments)


if __name__ == "__main__":
    sys.exit(main())
