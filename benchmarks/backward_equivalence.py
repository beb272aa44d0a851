#!/usr/bin/env python3
"""Compare the gradients of attention() and flash_dmattn_func() with their definition, in float64.

    python benchmarks/backward_equivalence.py [--device cpu] [--quick]

Gradients of out and lse: query, key, value, the bias of keys, the sink logits and the bias of
pairs. attention() takes a selection, flash_dmattn_func() a mask of the same keys. --help states the
error bound and the exit status.
"""

from __future__ import annotations

import sys

import program
from definition_options import equivalence_parser

if __name__ == "__main__":
    program.begin(equivalence_parser("backward_equivalence.py", __doc__).parse_args)

from definition_run import run_equivalence
from definition_stages import backward_comparisons


def main(arguments: list[str] | None = None) -> int:
    return run_equivalence("backward_equivalence.py", __doc__, backward_comparisons, arguments)


if __name__ == "__main__":
    sys.exit(main())
