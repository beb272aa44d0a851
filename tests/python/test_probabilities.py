"""attention_probabilities() under every kernel's name, with an lse of more keys, compiled and under
autocast. test_attention.py and test_fused.py compare probabilities with evaluations in float64."""

from __future__ import annotations

import math
from typing import Any

import flash_dmattn
import torch
from cases import fused, make_fused
from evaluate import assert_same
from flash_dmattn import _library


def test_every_name_of_a_kernel_of_forward_will_do() -> None:
    names = [
        one.name
        for one in _library.kernels()
        if one.operation == "forward" and one.missing is None and one.name.startswith("cpu/")
    ]
    query, key = torch.randn(1, 1, 2, 16).bfloat16(), torch.randn(1, 9, 1, 16).bfloat16()
    expected = None
    for name in names:
        _, lse = flash_dmattn.attention(query, key, key, backend=name)
        found = flash_dmattn.attention_probabilities(query, key, lse, backend=name)
        expected = found if expected is None else expected
        torch.testing.assert_close(found, expected)


def test_an_lse_of_more_keys() -> None:
    """A row sums to the share that its keys have in the whole."""
    query, key = torch.randn(1, 5, 2, 16), torch.randn(1, 12, 1, 16)
    halves = key.split(6, 1)
    lses = [flash_dmattn.attention(query, half, half)[1] for half in halves]
    lse = torch.logaddexp(*lses)
    for half, own in zip(halves, lses):
        row_sums = flash_dmattn.attention_probabilities(query, half, lse).sum(-1)
        torch.testing.assert_close(row_sums, torch.exp(own - lse))


def test_a_compiled_call() -> None:
    tensors = [tensor.detach() for tensor in make_fused(20)]

    def call(*tensors: torch.Tensor) -> Any:
        return fused(*tensors, return_attn_probs=True, return_lse=True)

    assert_same(torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors), call(*tensors))


def test_autocast() -> None:
    query, key = torch.randn(1, 5, 2, 16), torch.randn(1, 5, 2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        _, lse = flash_dmattn.attention(query, key, key)
        found = flash_dmattn.attention_probabilities(query, key, lse)
    rows = query.bfloat16(), key.bfloat16()
    assert_same(found, flash_dmattn.attention_probabilities(*rows, lse))
    assert found.dtype == torch.float32 and math.isclose(
        found[0, 0, 0].sum().item(), 1, abs_tol=1e-5
    )
