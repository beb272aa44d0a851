"""Gradients of flash_dmattn and its peers on a CUDA device, for the cases of the benchmark `peers`
whose kinds end in backward, and for training, which is forward and backward.

A backward pass is timed repeatedly over the graph of one forward pass. Gradients are checked with
an output gradient that is 0 except for a few queries, so that float64 is affordable.
"""

from __future__ import annotations

import functools
from typing import Callable

import flash_dmattn
import peers_flash4
import torch
from benchmarking import Disagreement
from peers_cuda_cases import (
    LONGEST_DENSE,
    ORDERS,
    SAMPLES,
    Case,
    Inputs,
    Peer,
    best_keys,
    dense,
    fused,
    masked,
    sdpa,
    selected,
)
from torch.nn.attention import SDPBackend
from torch.nn.functional import softplus

Forward = Callable[[Inputs], torch.Tensor]


# ---- backward ----


def leaves(inputs: Inputs, learns: bool) -> list[torch.Tensor]:
    return [*inputs.fdma, inputs.dt_proj, inputs.a_coef] if learns else [*inputs.fdma]


def backward(
    inputs: Inputs, name: str, forward: Forward, dout: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """The gradients alone, from the graph of the first call."""
    if name not in inputs.outs:
        inputs.outs[name] = forward(inputs)
    of = leaves(inputs, forward is fused)
    dout = inputs.dout if dout is None else dout
    return torch.autograd.grad(inputs.outs[name], of, dout, retain_graph=True)


def train(inputs: Inputs, forward: Forward) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(forward(inputs), leaves(inputs, forward is fused), inputs.dout)


FORWARDS: dict[str, Forward] = {
    "cudnn": functools.partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "flash": functools.partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    peers_flash4.NAME: peers_flash4.attend,
    "masked": masked,
    "fdma-deterministic": functools.partial(selected, order="iid", deterministic=True),
    **{f"fdma-{order}": functools.partial(selected, order=order) for order in ORDERS},
}
OURS: dict[str, Forward] = {
    "backward": fused,
    "training": fused,
    "dense-backward": dense,
    "selected-backward": functools.partial(selected, order="iid"),
}


def forward_of(case: Case, name: str) -> Forward:
    return OURS[case.kind] if name == "fdma" else FORWARDS[name]


def keys_of(name: str) -> str:
    """As Peer.keys. A call that computes scores is checked by its own scores."""
    if name in ("cudnn", "flash", peers_flash4.NAME):
        return "all"
    return name[5:] if name[5:] in ORDERS else "iid"


def peers_of(case: Case) -> list[Peer]:
    names = ["fdma"]
    if case.kind == "selected-backward":
        names += [*(f"fdma-{order}" for order in ORDERS), "fdma-deterministic"]
    if case.length <= LONGEST_DENSE:
        names += ["cudnn", "flash"]
        if case.kind in ("backward", "dense-backward") and peers_flash4.is_installed():
            names.append(peers_flash4.NAME)
    names += ["masked"] if case.mask else []
    peers = []
    for name in names:
        forward = forward_of(case, name)
        run = (
            functools.partial(train, forward=forward)
            if case.kind == "training"
            else functools.partial(backward, name=name, forward=forward)
        )
        peers.append(Peer(name, run, "all" if case.window == 0 else keys_of(name)))
    return peers


# ---- gradients, checked ----


def sampled_loss(
    inputs: Inputs, tensors: list[torch.Tensor], rows: torch.Tensor, kept: list[torch.Tensor]
) -> torch.Tensor:
    """<out, dout> over the sampled queries of each batch entry, with every step in the tensors'
    dtype. a_coef has a value for each key. kept: bool [rows, length] for each batch entry and kv
    head."""
    case = inputs.case
    query, key, value, *weights = tensors
    group = case.q_heads // case.kv_heads
    shape = len(query), case.kv_heads, case.length
    bias = torch.zeros(shape, dtype=query.dtype, device=query.device)
    if weights:
        dt_proj, a_coef = weights  # a_coef [batch, kv_heads, length]
        bias = torch.exp(a_coef * softplus(dt_proj @ value.flatten(2).mT))
    total = torch.zeros((), dtype=query.dtype, device=query.device)
    for b, (q, k, v, biases) in enumerate(zip(query, key, value, bias)):
        for g in range(case.kv_heads):
            heads = slice(g * group, (g + 1) * group)
            logits = (q[rows, heads] @ k[:, g].T) * case.head_dim**-0.5 + biases[g]
            logits = logits.masked_fill(~kept[b * case.kv_heads + g][:, None], -torch.inf)
            out = torch.softmax(logits, 2) @ v[:, g]
            total = total + (out * inputs.dout[b, rows, heads].to(out.dtype)).sum()
    return total


def evaluate(
    inputs: Inputs,
    learns: bool,
    rows: torch.Tensor,
    kept: list[torch.Tensor],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """The gradients with every step in `dtype`. The gradient of a_coef is given as its terms, one
    for each key: [batch, kv_heads, length]."""
    tensors = [leaf.detach().to(dtype) for leaf in leaves(inputs, learns)]
    if learns:
        shape = len(inputs.query), -1, inputs.case.length
        tensors[-1] = tensors[-1][None, :, None].expand(shape).clone()
    for tensor in tensors:
        tensor.requires_grad_()
    return torch.autograd.grad(sampled_loss(inputs, tensors, rows, kept), tensors)


def scores_of(inputs: Inputs, peer: Peer) -> torch.Tensor | None:
    """The scores [batch, kv_heads, length] by which the peer selects; None if it does not
    select."""
    if forward_of(inputs.case, peer.name) is fused:
        return flash_dmattn.score(inputs.value, inputs.dt_proj, inputs.a_coef)[0].detach()
    return inputs.scores.get(peer.keys)


def check_peer(inputs: Inputs, peer: Peer) -> None:
    """Check the gradients of a peer of these cases.

    Raises:
        Disagreement: a gradient is further away.
    """
    case = inputs.case
    rows = torch.linspace(0, case.length - 1, SAMPLES, device="cuda").long()
    ranked = scores_of(inputs, peer)
    scores = inputs.scores["iid"] if ranked is None else ranked
    window = 0 if ranked is None else case.window
    kept = [best_keys(score, rows, window) for score in scores.flatten(0, 1)]
    check_gradients(inputs, peer.name, forward_of(case, peer.name), rows, kept)


def check_gradients(
    inputs: Inputs, name: str, forward: Forward, rows: torch.Tensor, kept: list[torch.Tensor]
) -> None:
    """Compare every gradient with float64, relative to its largest element, if only these rows of
    out have gradients. The tolerance is twice the error of a plain evaluation (four times for other
    libraries), plus a rounding step. kept: as in sampled_loss().

    Raises:
        Disagreement: a gradient is further away.
    """
    dout = torch.zeros_like(inputs.dout)
    dout[:, rows] = inputs.dout[:, rows]
    found = backward(inputs, f"{name} sampled", forward, dout)
    del inputs.outs[f"{name} sampled"]
    exact = evaluate(inputs, forward is fused, rows, kept, torch.float64)
    plain = evaluate(inputs, forward is fused, rows, kept, torch.bfloat16)
    times = 2 if name.startswith("fdma") else 4
    compare(found, exact, plain, times, f"{inputs.case.name()}: {name}")


def compare(
    found: tuple[torch.Tensor, ...],
    exact: tuple[torch.Tensor, ...],
    plain: tuple[torch.Tensor, ...],
    times: float,
    what: str,
) -> None:
    """Raise Disagreement if a gradient is further from `exact` than `times` the error of `plain`,
    plus a rounding step of its largest element. For da, exact and plain hold the terms. Terms may
    cancel, but their errors do not, so da counts as at least the root of the terms' sum of
    squares."""
    # the largest over all gradients: da has few numbers, so its error may be small by chance
    sizes = [right.abs().max() for right in exact[:4]]
    if len(exact) > 4:
        terms, exact = exact[4], (*exact[:4], exact[4].sum((0, 2)))
        plain = (*plain[:4], plain[4].sum((0, 2)))
        sizes.append(torch.maximum(terms.norm(dim=(0, 2)).max(), exact[4].abs().max()))
    rough = max(((a - b).abs().max() / s).item() for a, b, s in zip(plain, exact, sizes))
    for name, own, right, size in zip(("dq", "dk", "dv", "ddt_proj", "da"), found, exact, sizes):
        allowed = (times * rough + torch.finfo(own.dtype).eps) * size
        error = (own - right).abs().max()
        if not error <= allowed:  # written so that NaN fails
            excess = (error / allowed).item()
            raise Disagreement(f"{what}: {name}: {excess:.3g} times what is allowed")
