"""The checks of the benchmark `model_step`: outputs and gradients of a layer against a plain
evaluation in float64."""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
from benchmarking import plain_allowance, require_close
from model_step_layers import Layout, PlainAttention, Rotary, Way, make_angles, rotate_halves
from torch import nn

BATCH = 2


def narrow(device: str) -> torch.autocast:
    """A context: bfloat16 on a CUDA device, float32 on the CPU."""
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def attend_plainly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: int | None
) -> torch.Tensor:
    """Attention with every step in the tensors' dtype."""
    length, dim = query.shape[1::2]
    query, key, value = (
        x.repeat_interleave(query.shape[2] // x.shape[2], 2).transpose(1, 2)
        for x in (query, key, value)
    )
    place = torch.arange(length, device=query.device)
    distance = place[:, None] - place
    kept = (distance >= 0) & (distance < (keys or length))
    logits = query @ key.transpose(2, 3) * dim**-0.5
    weights = torch.softmax(logits.masked_fill(~kept, -torch.inf), 3)
    return (weights @ value).transpose(1, 2)


def plain_layer(layout: Layout, keys: int, like: nn.Module, dtype: torch.dtype) -> PlainAttention:
    """A plain evaluation of attention to the `keys` newest keys, with the weights of `like`."""
    rotary = Rotary("plain", functools.partial(make_angles, layout.head_dim), rotate_halves)
    kind: dict[str, Any] = {"device": next(like.parameters()).device, "dtype": dtype}
    layer = PlainAttention(layout, Way("plain", attend_plainly), rotary, keys, **kind)
    layer.load_state_dict({name: like.state_dict()[name] for name in layer.state_dict()})
    return layer


def positions_of(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1], device=x.device, dtype=torch.int32)[None]


def evaluate(
    layout: Layout, keys: int, like: nn.Module, x: torch.Tensor, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """results_of() the plain evaluation, in float64 or as narrow() says."""
    layer = plain_layer(layout, keys, like, torch.promote_types(dtype, torch.float32))
    angles = layer.rotary.angles(positions_of(x), dtype)
    return results_of(lambda leaf: layer(leaf, angles), layer, x.to(layer.q_proj.weight.dtype))


def results_of(
    run: Callable[[torch.Tensor], torch.Tensor], layer: Any, x: torch.Tensor
) -> dict[str, torch.Tensor]:
    """A layer's output, and the gradients of x and of the weights that all layers have."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    leaf = x.detach().requires_grad_()
    out = run(leaf)
    dout = torch.linspace(-1, 1, out.numel(), device=x.device).sin().view_as(out)
    leaves = [leaf, *(getattr(layer, name).weight for name in names)]
    gradients = torch.autograd.grad(out, leaves, dout.to(out.dtype))
    return {"out": out.detach(), **dict(zip(("x", *names), gradients))}


@torch.no_grad()
def equalise_scores(layer: nn.Module) -> None:
    """Make all scores 0, so that the bias of all keys is the same, as without one."""
    if hasattr(layer, "A"):
        layer.A.zero_()


def check_layer(
    what: str,
    layout: Layout,
    layer: nn.Module,
    keys: int,
    run: Callable[[torch.Tensor], torch.Tensor],
    length: int,
) -> None:
    """Compare `run`, a call of the layer, with attention to the `keys` newest keys.

    Raises:
        Disagreement: its output or a gradient differs.
    """
    device = next(layer.parameters()).device
    torch.manual_seed(length)
    x = torch.randn(BATCH, length, layout.width, device=device)
    with narrow(device.type):
        found = results_of(run, layer, x)
        plain_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        plain = evaluate(layout, keys, layer, x, plain_dtype)
    exact = evaluate(layout, keys, layer, x, torch.float64)
    for name, tensor in found.items():
        allowed = plain_allowance(plain[name], exact[name])
        require_close(tensor, exact[name], allowed, f"{what}: {name} and a plain evaluation")
