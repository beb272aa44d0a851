#!/usr/bin/env python3
"""Compare the gradients of score() and flash_dma_attention() with their definition, in float64.

    python benchmarks/grad_equivalence.py [--device cpu] [--quick]

query, key, value, dt_proj, a_coef, dt_bias and the sink logits have gradients. The gradients of the
weights, and one term of value's, go through the scores. The choice of keys has no gradient. --help
states the error bound and the exit status.
"""

from __future__ import annotations

import sys

import program
from definition_options import equivalence_parser

if __name__ == "__main__":
    program.begin(equivalence_parser("grad_equivalence.py", __doc__).parse_args)

from definition_run import run_equivalence
from definition_stages import grad_comparisons


def main(arguments: list[str] | None = None) -> int:
    return run_equivalence("grad_equivalence.py", __doc__, grad_comparisons, arguments)


if __name__ == "__main__":
    sys.exit(main())
