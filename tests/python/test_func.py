"""Transforms of torch.func: grad, vjp, jacrev and vmap are right, and forward mode is refused."""

from __future__ import annotations

from typing import Any, Callable

import flash_dmattn
import pytest
import torch
from cases import make_fused
from torch import func

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def make() -> list[torch.Tensor]:
    return [x.detach() for x in make_fused(20, head_dim=8)]


def fused(query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return flash_dmattn.flash_dma_attention(query, *others, 4, causal=True)


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    out, lse = flash_dmattn.attention(query, key, value, causal=True)
    return torch.cat((out.flatten(), lse.flatten()))


def merged(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    pieces = [
        one
        for at in (slice(0, 9), slice(9, None))
        for one in flash_dmattn.attention(query, key[:, at], value[:, at])
    ]
    return flash_dmattn.merge(*pieces)[0]


def merge_alone(query: torch.Tensor, *_: Any) -> torch.Tensor:
    lse = torch.zeros(2, 4, 20)
    return flash_dmattn.merge(query, lse, query.cos(), lse)[0]


def all_keys(query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return flash_dmattn.flash_dma_attention(query, *others, 100, causal=True)


def scored(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *weights: Any) -> Any:
    score, bias = flash_dmattn.score(value + query[:, :, :2], *weights)
    return score.cos() + bias


FUNCTIONS = [fused, dense, merged, merge_alone, all_keys, scored]
every_function = pytest.mark.parametrize("function", FUNCTIONS)
Function = Callable[..., torch.Tensor]


def gradients(function: Function, tensors: list[torch.Tensor]) -> Any:
    leaves = [x.clone().requires_grad_() for x in tensors]
    found = torch.autograd.grad(function(*leaves).cos().sum(), leaves, allow_unused=True)
    return [torch.zeros_like(x) if one is None else one for x, one in zip(leaves, found)]


@every_function
def test_grad_and_vjp(function: Function) -> None:
    tensors = make()
    found = func.grad(lambda *x: function(*x).cos().sum(), argnums=tuple(range(5)))(*tensors)
    out, pull_back = func.vjp(function, *tensors)
    for one, same, other in zip(found, pull_back(-out.sin()), gradients(function, tensors)):
        assert torch.equal(one, other) and torch.equal(same, other)


def test_jacrev() -> None:
    tensors = make()
    rows = func.jacrev(lambda query: fused(query, *tensors[1:])[0, :3, 0, 0])(tensors[0])
    for i, row in enumerate(rows):
        query = tensors[0].clone().requires_grad_()
        (wanted,) = torch.autograd.grad(fused(query, *tensors[1:])[0, i, 0, 0], query)
        torch.testing.assert_close(row, wanted)


def test_gradients_of_each_sample() -> None:
    layer = flash_dmattn.DynamicMaskAttention(64, 4, 2, 8)
    torch.nn.init.ones_(layer.A)
    weights = {name: x.detach() for name, x in layer.named_parameters()}
    samples = torch.randn(3, 20, 64)

    def loss(weights: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        return func.functional_call(layer, weights, sample[None]).cos().sum()

    found = func.vmap(func.grad(loss), (None, 0))(weights, samples)
    for n, sample in enumerate(samples):
        layer.zero_grad()
        layer(sample[None]).cos().sum().backward()
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(found[name][n], parameter.grad)


def test_vmap() -> None:
    tensors = make()
    queries = torch.stack((tensors[0], 2 * tensors[0]))
    found = func.vmap(lambda query: fused(query, *tensors[1:]))(queries)
    for one, query in zip(found, queries):
        assert torch.equal(one, fused(query, *tensors[1:]))


# What messages call the functions.
TITLES = {fused: "flash_dma_attention", all_keys: "flash_dma_attention", dense: "attention"}
TITLES.update({merged: "attention|merge", merge_alone: "merge", scored: "score"})


@every_function
def test_forward_mode_is_refused(function: Function) -> None:
    """A tensor without a tangent is accepted where others may have one."""
    query, *others = make()
    message = rf"flash_dmattn.({TITLES[function]}): forward-mode derivatives \(torch.func.jvp\) "
    for transform in (func.jacfwd, func.hessian):
        with pytest.raises(NotImplementedError, match=message + ".* use reverse mode"):
            transform(lambda x: function(x, *others).sum())(query)
    with torch.autograd.forward_ad.dual_level():
        function(query, *others)
        with pytest.raises(NotImplementedError, match=message):
            function(torch.autograd.forward_ad.make_dual(query, torch.ones_like(query)), *others)


@every_function
def test_second_derivatives_are_refused(function: Function) -> None:
    query, *others = make()
    message = f"flash_dmattn.({TITLES[function]}): second derivatives are not implemented"
    gradient = func.grad(lambda x: function(x, *others).cos().sum())
    with pytest.raises(NotImplementedError, match=message):
        func.grad(lambda x: gradient(x).sum())(query)
    query.requires_grad_()
    loss = function(query, *others).square().sum()
    (gradient,) = torch.autograd.grad(loss, query, create_graph=True)
    with pytest.raises(NotImplementedError, match=message):
        gradient.sum().backward()
