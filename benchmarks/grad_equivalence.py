#!/usr/bin/env python3
"""Compare gradients of flash_dma_attention() with those of its definition in PyTorch, in float64.

    python benchmarks/grad_equivalence.py [--device cpu]

query, key, value, dt_proj and a_coef have gradients: those of the weights, and a part of value's,
go through the scores. Which keys are kept has none. Errors and exit status are as in
forward_equivalence.py.
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
    gradients,
    run_equivalence,
)

NAMES = [f"flash_dma_attention: d{name}" for name in ("query", "key", "value", "dt_proj", "a_coef")]


def scored(leaves: Sequence[torch.Tensor], mask: torch.Tensor, dout: torch.Tensor) -> Tensors:
    query, key, value, dt_proj, a_coef = leaves
    out = attend(query, key, value, bias_of(value, dt_proj, a_coef), mask)
    return gradients(out, leaves, dout)


def comparisons(inputs: Inputs) -> Iterator[Comparison]:
    given = (*inputs.rows, *inputs.weights)
    leaves = [x.detach().clone().requires_grad_() for x in given]
    window = inputs.case.window
    out = flash_dmattn.flash_dma_attention(*leaves, keep_window_size=window, causal=True)
    found = gradients(out, leaves, inputs.dout)
    return compare_all(NAMES, found, *evaluate(inputs, given, scored), inputs.query.dtype)


def main(arguments: list[str] | None = None) -> int:
    return run_equivalence("grad_equivalence.py", __doc__, comparisons, arguments)


if __name__ == "__main__":
    sys.exit(main())
