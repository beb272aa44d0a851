#!/usr/bin/env python3
"""Compare scores, kept keys, out, lse and probabilities with their definition, in float64.

    python benchmarks/forward_equivalence.py [--device cpu] [--quick]

The definition is evaluated in PyTorch alone, stage by stage: score(), select(), attention() and
attention_probabilities(), then flash_dma_attention(), which does all of them, and
flash_dmattn_func(), which gets the kept keys as a numeric mask. --help states the error bound and
the exit status.
"""

from __future__ import annotations

import sys

import program
from definition_options import equivalence_parser

if __name__ == "__main__":
    program.begin(equivalence_parser("forward_equivalence.py", __doc__).parse_args)

from definition_run import run_equivalence
from definition_stages import forward_comparisons


def main(arguments: list[str] | None = None) -> int:
    return run_equivalence("forward_equivalence.py", __doc__, forward_comparisons, arguments)


if __name__ == "__main__":
    sys.exit(main())
