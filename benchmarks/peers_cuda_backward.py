"""Gradients of flash_dmattn and its peers on a CUDA device: the cases of benchmarks/peers.py whose
kinds end in backward, and training, which is forward and backward.

A backward pass is timed repeatedly over the graph of one forward pass. Gradients are checked with
an output gradient that is 0 except for a few queries, so that float64 is affordable.
"""

from __future__ import annotations

import functools
from typing import Callable

import flash_dmattn
import torch
from peers_common import Disagreement
from peers_cuda_inputs import LONGEST_DENSE, ORDERS, SAMPLES, Case, Goal, Inputs, Peer, best_keys
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention, softplus

Forward = Callable[[Inputs], torch.Tensor]


def cases() -> list[Case]:
    def case(kind: str, *shape: int, goal: Goal | None = None, mask: bool = False) -> Case:
        return Case(kind, *shape, {"fdma": goal} if goal else {}, mask)

    orders = {f"fdma-{order}": Goal("of_iid", 1.2, 1.0) for order in ORDERS if order != "falling"}
    fast = {"fdma-deterministic": Goal("of_fast", 1.4, 1.1)}
    return [
        case("backward", 32, 8, 128, 32768, 2048, goal=Goal("of_dense", 0.50, 0.85)),
        case("backward", 32, 8, 128, 131072, 2048, goal=Goal("of_shorter", 4.4, 4.1)),
        case("backward", 32, 32, 128, 16384, 2048, goal=Goal("of_dense", 0.45, 0.75)),
        case("backward", 2, 1, 64, 32768, 1024, mask=True, goal=Goal("ms", 0.4, 0.22)),
        Case("selected-backward", 32, 8, 128, 32768, 2048, {**orders, **fast}),
        case("dense-backward", 32, 8, 128, 8192, 0, goal=Goal("of_dense", 0.65, 1.0)),
        case("training", 32, 8, 128, 32768, 2048),
    ]


# ---- forward, with its graph ----


def fused(inputs: Inputs) -> torch.Tensor:
    window = inputs.case.window
    return flash_dmattn.flash_dma_attention(
        *inputs.fdma, inputs.dt_proj, inputs.a_coef, keep_window_size=window, causal=True
    )


def selected(inputs: Inputs, order: str, deterministic: bool = False) -> torch.Tensor:
    selection = flash_dmattn.select(inputs.scores[order], inputs.case.window)
    return flash_dmattn.attention(
        *inputs.fdma, selection=selection, causal=True, deterministic=deterministic
    )[0]


def dense(inputs: Inputs) -> torch.Tensor:
    return flash_dmattn.attention(*inputs.fdma, causal=True)[0]


def sdpa(inputs: Inputs, backend: SDPBackend) -> torch.Tensor:
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(*inputs.sdpa, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def masked(inputs: Inputs) -> torch.Tensor:
    query, key, value = inputs.sdpa[0], *inputs.expanded
    return scaled_dot_product_attention(query, key, value, attn_mask=inputs.mask).transpose(1, 2)


# ---- backward ----


def leaves(inputs: Inputs, learns: bool) -> list[torch.Tensor]:
    return [*inputs.fdma, inputs.dt_proj, inputs.a_coef] if learns else [*inputs.fdma]


def backward(
    inputs: Inputs, name: str, forward: Forward, dout: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """The gradients alone, over the graph of the first call."""
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
    """As Peer.keys; the call that computes scores is checked by those."""
    if name in ("cudnn", "flash"):
        return "all"
    return name[5:] if name[5:] in ORDERS else "iid"


def peers_of(case: Case) -> list[Peer]:
    names = ["fdma"]
    if case.kind == "selected-backward":
        names += [*(f"fdma-{order}" for order in ORDERS), "fdma-deterministic"]
    names += ["cudnn", "flash"] if case.length <= LONGEST_DENSE else []
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
    """<out, dout> over the sampled queries, with every step in the tensors' dtype."""
    case = inputs.case
    query, key, value, *weights = tensors
    group = case.q_heads // case.kv_heads
    bias = torch.zeros(case.kv_heads, case.length, dtype=query.dtype, device=query.device)
    if weights:
        dt_proj, a_coef = weights
        bias = torch.exp(a_coef[:, None] * softplus(dt_proj @ value[0].flatten(1).T))
    total = torch.zeros((), dtype=query.dtype, device=query.device)
    for g in range(case.kv_heads):
        heads = slice(g * group, (g + 1) * group)
        logits = (query[0, rows, heads] @ key[0, :, g].T) * case.head_dim**-0.5 + bias[g]
        logits = logits.masked_fill(~kept[g][:, None], -torch.inf)
        out = torch.softmax(logits, 2) @ value[0, :, g]
        total = total + (out * inputs.dout[0, rows, heads].to(out.dtype)).sum()
    return total


def evaluate(
    inputs: Inputs,
    learns: bool,
    rows: torch.Tensor,
    kept: list[torch.Tensor],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """The gradients with every step in `dtype`."""
    tensors = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves(inputs, learns)]
    return torch.autograd.grad(sampled_loss(inputs, tensors, rows, kept), tensors)


def scores_of(inputs: Inputs, peer: Peer) -> torch.Tensor | None:
    """[1, kv_heads, length], by which the peer selects; None if it does not select."""
    if forward_of(inputs.case, peer.name) is fused:
        return flash_dmattn.score(inputs.value, inputs.dt_proj, inputs.a_coef)[0].detach()
    return inputs.scores.get(peer.keys)


def check_peer(inputs: Inputs, peer: Peer) -> None:
    """Compare every gradient with float64, relative to its largest element: the tolerance is twice
    (of another library: four times) the error of a plain evaluation, plus a rounding step.

    Raises:
        Disagreement: a gradient is further away.
    """
    case = inputs.case
    rows = torch.linspace(0, case.length - 1, SAMPLES, device="cuda").long()
    ranked = scores_of(inputs, peer)
    scores = torch.zeros(case.kv_heads, case.length, device="cuda") if ranked is None else ranked[0]
    kept = [
        best_keys(scores[g], rows, 0 if ranked is None else case.window)
        for g in range(case.kv_heads)
    ]
    dout = torch.zeros_like(inputs.dout)
    dout[0, rows] = inputs.dout[0, rows]
    forward = forward_of(case, peer.name)
    found = backward(inputs, f"{peer.name} sampled", forward, dout)
    del inputs.outs[f"{peer.name} sampled"]
    exact = evaluate(inputs, forward is fused, rows, kept, torch.float64)
    plain = evaluate(inputs, forward is fused, rows, kept, torch.bfloat16)
    times = 2 if peer.name.startswith("fdma") else 4
    compare(found, exact, plain, times, f"{case.name()}: {peer.name}")


def compare(
    found: tuple[torch.Tensor, ...],
    exact: tuple[torch.Tensor, ...],
    plain: tuple[torch.Tensor, ...],
    times: float,
    what: str,
) -> None:
    """Raise Disagreement if a gradient is further from `exact` than `times` the error of `plain`,
    plus a rounding step."""
    # the largest of all gradients: the error of da, a single number, may be small by chance
    rough = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(plain, exact))
    for name, own, right in zip(("dq", "dk", "dv", "ddt_proj", "da"), found, exact):
        allowed = (times * rough + torch.finfo(own.dtype).eps) * right.abs().max()
        error = (own - right).abs().max()
        if not error <= allowed:  # written so that NaN fails
            excess = (error / allowed).item()
            raise Disagreement(f"{what}: {name}: {excess:.3g} times what is allowed")


def check_gradients(inputs: Inputs, peers: list[Peer]) -> None:
    """Check the gradients of every peer.

    Raises:
        Disagreement: a gradient is too far from float64.
    """
    for peer in peers:
        check_peer(inputs, peer)
