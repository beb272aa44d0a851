"""Forward and backward of flash_dmattn and SDPA on the CPU, for the cases of benchmarks/peers.py
whose names begin with training.

Gradients are checked with an output gradient that is 0 except for a few queries, so that float64 is
affordable.
"""

from __future__ import annotations

from typing import Any, Callable

import flash_dmattn
import torch
from benchmarking import require_close
from torch.nn.functional import scaled_dot_product_attention

SAMPLES = 32  # queries whose outputs have gradients, in the check


def fdma(inputs: Any) -> torch.Tensor:
    """The time includes the selection."""
    selection = flash_dmattn.select(inputs.score, inputs.window)
    tensors = [tensor.transpose(1, 2) for tensor in inputs.sdpa]
    return flash_dmattn.attention(*tensors, selection=selection, causal=True)[0].transpose(1, 2)


def sdpa_masked(inputs: Any) -> torch.Tensor:
    return scaled_dot_product_attention(*inputs.sdpa, attn_mask=inputs.mask)


FORWARDS: dict[str, Callable[[Any], torch.Tensor]] = {"fdma": fdma, "sdpa-masked": sdpa_masked}


def step(name: str, inputs: Any, dout: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Forward, then the gradients of query, key and value."""
    dout = inputs.dout if dout is None else dout
    return torch.autograd.grad(FORWARDS[name](inputs), inputs.sdpa, dout)


def evaluate(
    inputs: Any,
    rows: torch.Tensor,
    kept: torch.Tensor,
    dout: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """The gradients, with every step in `dtype`. kept: bool [rows, length]."""
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs.sdpa]
    query, key, value = (leaf[0, 0] for leaf in leaves)
    logits = (query[rows] @ key.T) * query.shape[1] ** -0.5
    out = torch.softmax(logits.masked_fill(~kept, -torch.inf), 1) @ value
    return torch.autograd.grad((out * dout[0, 0, rows].to(dtype)).sum(), leaves)


def check_gradients(
    inputs: Any,
    keys_kept: Callable[..., torch.Tensor],
    what: str,
) -> None:
    """Compare every peer's gradients with float64. The tolerance is twice the error of a plain
    evaluation (eight times for other libraries), plus a rounding step of the largest element.

    Raises:
        Disagreement: a gradient is further away.
    """
    length = inputs.dout.shape[2]
    rows = torch.linspace(0, length - 1, min(SAMPLES, length)).round().long()
    kept = keys_kept(inputs, rows, inputs.window)
    dout = torch.zeros_like(inputs.dout)
    dout[0, 0, rows] = inputs.dout[0, 0, rows]
    exact = evaluate(inputs, rows, kept, dout, torch.float64)
    plain = evaluate(inputs, rows, kept, dout, dout.dtype)
    for peer in FORWARDS:
        times = 2 if peer == "fdma" else 8
        for name, own, right, rough in zip(
            ("dq", "dk", "dv"), step(peer, inputs, dout), exact, plain
        ):
            rounding = torch.finfo(own.dtype).eps * right.abs().max().item()
            allowed = times * (rough.double() - right).abs().max().item() + rounding
            require_close(own, right, allowed, f"{what}: {name} of {peer} and of float64")
