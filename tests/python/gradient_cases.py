"""Gradients of attention over kept keys, once more: autograd through masked SDPA, for the tests of
the CPU and of CUDA devices. Which keys are kept is found by sorting, see oracle.py.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import flash_dmattn
import oracle
import torch
from torch.nn.functional import scaled_dot_product_attention, softplus

Tensors = tuple[torch.Tensor, ...]


class Case(NamedTuple):
    q_len: int
    kv_len: int
    window: int
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    scores: str = "random"
    scope: str = "causal"
    causal: bool = True
    padding: str = "none"
    batch: int = 1


CASES = {
    "square": Case(67, 67, 16, batch=2),
    "over tiles": Case(300, 300, 40, head_dim=32),
    "later queries": Case(50, 150, 30),
    "one query": Case(1, 90, 20, batch=8),
    "window 1": Case(41, 41, 1),
    "window of all but one": Case(70, 70, 69),
    "window of all": Case(70, 70, 70),
    "ties": Case(80, 80, 11, scores="equal"),
    "keys that come and go in a tile": Case(80, 80, 3, scores="rising"),
    "first keys stay": Case(80, 80, 5, scores="falling"),
    "sawtooth": Case(150, 150, 12, scores="sawtooth"),
    "one key stays": Case(120, 120, 4, scores="one stays"),
    "empty rows": Case(60, 60, 8, padding="first", batch=2),
    "padding": Case(60, 60, 8, padding="some", batch=2),
    "no valid key": Case(12, 12, 4, padding="all"),
    "global": Case(40, 90, 17, scope="global", causal=False),
    "global, more queries": Case(90, 40, 17, scope="global", causal=False),
    "global causal": Case(60, 60, 17, scope="global"),
    "head_dim 8": Case(40, 40, 9, head_dim=8),
    "head_dim 256": Case(40, 40, 9, head_dim=256),
    **{f"group of {n}": Case(45, 45, 9, n, 1, 32) for n in (1, 2, 3, 5, 8, 16)},
}


class Input(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    score: torch.Tensor
    bias: torch.Tensor
    key_valid: torch.Tensor | None
    dout: torch.Tensor


def make_score(case: Case, generator: torch.Generator) -> torch.Tensor:
    shape = (case.batch, case.kv_heads, case.kv_len)
    rising = torch.arange(case.kv_len, dtype=torch.float32).expand(shape).contiguous()
    if case.scores == "one stays":
        rising[..., 3] = 1e6
    return {
        "random": torch.randn(shape, generator=generator),
        "equal": torch.zeros(shape),
        "rising": rising,
        "falling": -rising,
        "sawtooth": rising % 29,
        "one stays": rising,
    }[case.scores]


def make_key_valid(case: Case) -> torch.Tensor | None:
    key = torch.arange(case.kv_len).expand(case.batch, -1)
    return {
        "none": None,
        "first": key >= 20,  # the first 20 queries see nothing
        "some": key % 7 != 2,
        "all": key < 0,
    }[case.padding]


@functools.cache
def make_input(name: str, dtype: torch.dtype) -> Input:
    case = CASES[name]
    generator = torch.Generator().manual_seed(sum(map(ord, name)))

    def rows(length: int, heads: int) -> torch.Tensor:
        """Heads first in memory, as PyTorch's models have them."""
        shape = (case.batch, heads, length, case.head_dim)
        return torch.randn(shape, generator=generator).to(dtype).transpose(1, 2)

    query, dout = rows(case.q_len, case.q_heads), rows(case.q_len, case.q_heads)
    key, value = rows(case.kv_len, case.kv_heads), rows(case.kv_len, case.kv_heads)
    bias = torch.randn(case.batch, case.kv_heads, case.kv_len, generator=generator)
    score = make_score(case, generator)
    # A bias that every dtype holds: SDPA takes it in the mask, in q's dtype.
    bias = bias.to(torch.bfloat16).float()
    return Input(query, key, value, score, bias, make_key_valid(case), dout)


@functools.cache
def make_mask(name: str) -> torch.Tensor:
    """bool [batch or 1, kv_heads, q_len, kv_len]."""
    case = CASES[name]
    given = make_input(name, torch.float32)
    kept = oracle.kept_keys(given.score, case.window, case.scope, given.key_valid)
    return oracle.visible_keys(case.q_len, case.kv_len, case.causal, kept, given.key_valid)


def leaves(tensors: Tensors, dtype: torch.dtype) -> list[torch.Tensor]:
    return [tensor.detach().to(dtype).clone().requires_grad_() for tensor in tensors]


def masked_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    group = query.shape[2] // key.shape[2]
    logits = torch.where(mask, bias[:, :, None, :], -math.inf).repeat_interleave(group, 1)
    heads_first = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    return scaled_dot_product_attention(*heads_first, attn_mask=logits, enable_gqa=True).transpose(
        1, 2
    )


def sdpa_gradients(name: str, given: Input, dtype: torch.dtype) -> Tensors:
    """dq, dk, dv and dbias, with every step in `dtype`."""
    tensors = leaves((given.query, given.key, given.value, given.bias), dtype)
    out = masked_sdpa(*tensors, make_mask(name))
    return torch.autograd.grad(out, tensors, given.dout.to(dtype))


def formula_gradients(
    name: str,
    given: Input,
    results: Tensors,
    dtype: torch.dtype,
    dlse: torch.Tensor | None = None,
) -> Tensors:
    """dq, dk, dv and dbias by the formula of fdma.h, from out and lse as they are rounded, with
    every step in `dtype`; dbias summed row by row in float32 at least."""
    group = given.query.shape[2] // given.key.shape[2]
    mask = make_mask(name).repeat_interleave(group, 1)
    query, out, dout = (x.to(dtype).transpose(1, 2) for x in (given.query, results[0], given.dout))
    key, value = (
        x.to(dtype).transpose(1, 2).repeat_interleave(group, 1) for x in (given.key, given.value)
    )
    scale = query.shape[3] ** -0.5
    bias = given.bias.to(dtype).repeat_interleave(group, 1)[:, :, None, :]
    carried = (dout * out).sum(3) - (0 if dlse is None else dlse.to(dtype))
    lse = torch.where(results[1] == -math.inf, 0, results[1])[..., None]  # an empty row keeps none
    weights = torch.exp((scale * (query @ key.mT) + bias).to(lse.dtype) - lse).to(dtype)
    weights = torch.where(mask, weights, 0)
    dlogits = weights * (dout @ value.mT - carried[..., None])

    def sum_heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (-1, group)).sum(2)

    dkey, dvalue = scale * dlogits.mT @ query, weights.mT @ dout
    by_len = [scale * dlogits @ key, sum_heads(dkey), sum_heads(dvalue)]
    wide = torch.promote_types(dtype, torch.float32)
    rows = dlogits.to(wide).unflatten(1, (-1, group)).flatten(2, 3).unbind(2)
    dbias = functools.reduce(torch.add, rows)
    return (*(x.transpose(1, 2) for x in by_len), dbias)


def plain_gradients(
    name: str, given: Input, results: Tensors, dlse: torch.Tensor | None = None
) -> list[Tensors]:
    """formula_gradients() in the tensors' dtype, of the out and lse that backward was given,
    channels in several orders: what a kernel may be twice as far from exact as. (Autograd through
    SDPA keeps the weights of forward, so that errors of dP and of its sum cancel; they do not where
    that sum is <dout, out>.)"""
    found = []
    out, lse = (result.cpu() for result in results)
    for order in oracle.orders_of(given.query.shape[3], lse.numel()):
        names = ("query", "key", "value", "dout")
        shuffled = given._replace(**{one: getattr(given, one)[..., order] for one in names})
        *rows, dbias = formula_gradients(
            name, shuffled, (out[..., order], lse), given.query.dtype, dlse
        )
        found.append((*(row[..., order.argsort()] for row in rows), dbias))
    return found


def fused_by_sdpa(
    tensors: Tensors, mask: torch.Tensor, dout: torch.Tensor, dtype: torch.dtype
) -> Tensors:
    """The gradients of flash_dma_attention() in its five tensors, for the keys of `mask`."""
    query, key, value, dt_proj, a = given = leaves(tensors, dtype)
    dt = value.flatten(2) @ dt_proj.T
    bias = torch.exp(a * softplus(dt, threshold=1e3)).transpose(1, 2)
    return torch.autograd.grad(masked_sdpa(query, key, value, bias, mask), given, dout.to(dtype))


def plain_fused(tensors: Tensors, mask: torch.Tensor, dout: torch.Tensor) -> list[Tensors]:
    """fused_by_sdpa() in the tensors' dtype, channels in many orders: da is one number a head."""
    head_dim = dout.shape[3]
    found = []
    for order in oracle.orders_of(head_dim, tensors[4].numel()):
        back = order.argsort()
        *rows, weights, a = tensors
        by_head = weights.unflatten(1, (-1, head_dim))
        shuffled = (*(row[..., order] for row in rows), by_head[..., order].flatten(1), a)
        *drows, dweights, da = fused_by_sdpa(shuffled, mask, dout[..., order], dout.dtype)
        dweights = dweights.unflatten(1, (-1, head_dim))[..., back].flatten(1)
        found.append((*(drow[..., back] for drow in drows), dweights, da))
    return found


def attend(
    name: str,
    given: Input,
    device: str = "cpu",
    backend: str | None = None,
    deterministic: bool = False,
) -> tuple[Tensors, Tensors]:
    """query, key, value and bias as leaves; out and lse."""
    case = CASES[name]
    key_valid = None if given.key_valid is None else given.key_valid.to(device)
    selection = flash_dmattn.select(
        given.score.to(device), case.window, scope=case.scope, key_valid=key_valid
    )
    tensors = tuple(
        tensor.to(device).detach().requires_grad_()
        for tensor in (given.query, given.key, given.value, given.bias)
    )
    results = flash_dmattn.attention(
        *tensors[:3],
        bias=tensors[3],
        selection=selection,
        key_valid=key_valid,
        causal=case.causal,
        backend=backend,
        deterministic=deterministic,
    )
    return tensors, results


def our_gradients(
    name: str,
    given: Input,
    device: str = "cpu",
    backend: str | None = None,
    deterministic: bool = False,
) -> Tensors:
    """dq, dk, dv and dbias."""
    tensors, (out, _) = attend(name, given, device, backend, deterministic)
    return torch.autograd.grad(out, tensors, given.dout.to(device))


def assert_gradients(found: Tensors, exact: Tensors, plain: list[Tensors]) -> None:
    """By oracle.assert_within()."""
    assert len(found) > 0 and {len(found)} == {len(exact), *map(len, plain)}
    for one, want, *others in zip(found, exact, *plain):
        oracle.assert_within(one.cpu(), want, *others)
