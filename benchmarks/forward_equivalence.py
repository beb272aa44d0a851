#!/usr/bin/env python3
"""Compare outputs with the definition of dynamic mask attention in PyTorch, in float64.

    python benchmarks/forward_equivalence.py [--device cpu]

The mask has the best keys of each query. flash_dmattn_func() gets it as numbers, with a bias for
every pair; flash_dma_attention() selects the keys itself. The error may be twice that of the worst
of several plain evaluations in the tensors' dtype, and one step of rounding. Exit status: 0 equal
but for rounding; 1 not; 2 bad usage.
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
    bias_of,
    compare_all,
    evaluate,
    run_equivalence,
)


def masked(leaves: Sequence[torch.Tensor], mask: torch.Tensor, dout: torch.Tensor) -> Tensors:
    return (attend(*leaves, mask),)


def scored(leaves: Sequence[torch.Tensor], mask: torch.Tensor, dout: torch.Tensor) -> Tensors:
    query, key, value, dt_proj, a_coef = leaves
    return (attend(query, key, value, bias_of(value, dt_proj, a_coef), mask),)


def comparisons(inputs: Inputs) -> Iterator[Comparison]:
    dtype = inputs.query.dtype
    given = (*inputs.rows, inputs.attn_bias)
    found = flash_dmattn.flash_dmattn_func(
        *inputs.rows, inputs.mask.to(dtype), inputs.attn_bias, is_causal=True
    )
    yield from compare_all(["flash_dmattn_func"], (found,), *evaluate(inputs, given, masked), dtype)
    given = (*inputs.rows, *inputs.weights)
    window = inputs.case.window
    found = flash_dmattn.flash_dma_attention(*given, keep_window_size=window, causal=True)
    yield from compare_all(
        ["flash_dma_attention"], (found,), *evaluate(inputs, given, scored), dtype
    )


def main(arguments: list[str] | None = None) -> int:
    return run_equivalence("forward_equivalence.py", __doc__, comparisons, arguments)


if __name__ == "__main__":
    sys.exit(main())
