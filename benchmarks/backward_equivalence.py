#!/usr/bin/env python3
"""Compare the gradients of flash_dmattn_func() with those of its definition in PyTorch, in float64.

    python benchmarks/backward_equivalence.py [--device cpu]

The mask has the best keys of each query; query, key, value and the bias of every pair have
gradients. Errors and exit status are as in forward_equivalence.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import flash_dmattn
import torch
from definition import (
    Comparison,
    Inputs,
    Tensors,
    attend,
    cast,
    compare_all,
    evaluate,
    gradients,
    run_equivalence,
)

NAMES = [f"flash_dmattn_func: {name}" for name in ("dq", "dk", "dv", "dattn_bias")]


def masked(leaves: Sequence[torch.Tensor], mask: torch.Tensor, dout: torch.Tensor) -> Tensors:
    return gradients(attend(*leaves, mask), leaves, dout)


def comparisons(inputs: Inputs) -> Iterator[Comparison]:
    dtype = inputs.query.dtype
    given = (*inputs.rows, inputs.attn_bias)
    leaves = cast(given, dtype)
    out = flash_dmattn.flash_dmattn_func(
        *leaves[:3], inputs.mask.to(dtype), leaves[3], is_causal=True
    )
    found = gradients(out, leaves, inputs.dout)
    return compare_all(NAMES, found, *evaluate(inputs, given, masked), dtype)


def main(arguments: list[str] | None = None) -> int:
    return run_equivalence("backward_equivalence.py", __doc__, comparisons, arguments)


if __name__ == "__main__":
    sys.exit(main())
