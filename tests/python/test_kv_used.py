"""Sequences with kv_used: each has the same results and gradients as with its tensors cut to the
keys that exist, whatever stands behind them."""

from __future__ import annotations

from typing import Any, Tuple

import flash_dmattn
import pytest
import torch
from cases import DEVICES, on_device

Q_LEN, KV_LEN = 20, 90
USED = (0, 1, 13, 20, 57, 90)
RULES = [
    {"keep_window_size": 12, "causal": True},
    {"keep_window_size": 9, "recent": 7, "sinks": 2, "causal": True, "softcap": 3.0},
    {"keep_window_size": 20, "causal": False, "bias_form": "linear"},
    {"keep_window_size": 1000, "causal": True, "scope": "global", "bias_form": "none"},
]
Tensors = Tuple[torch.Tensor, ...]


on_every_device = pytest.mark.parametrize("device", DEVICES)


def make_used(numbers: tuple[int, ...] = USED, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def make_tensors(poison: float = torch.nan, device: str = "cpu") -> list[torch.Tensor]:
    """query, key, value, dt_proj and a_coef, which require gradients. `poison` stands behind the
    used keys. On CUDA they are in bfloat16."""
    generator = torch.Generator().manual_seed(3)
    key_shape = (len(USED), KV_LEN, 2, 16)
    shapes = ((len(USED), Q_LEN, 4, 16), key_shape, key_shape, (2, 32), (2,))
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    for b, used in enumerate(USED):
        for rows in tensors[1:3]:
            rows[b, used:] = poison
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return [x.to(device, dtype).requires_grad_() for x in tensors]


def one_by_one(tensors: list[torch.Tensor], causal: bool, **options: Any) -> Tensors:
    """out and lse of the sequences, each in a call of its own, with the keys that exist and, under
    a causal mask, only the queries that stand at one."""
    query, key, value, *weights = tensors
    outs, lses = [], []
    for b, used in enumerate(USED):
        before = max(query.shape[1] - used, 0) if causal else 0
        one = slice(b, b + 1)
        out, lse = flash_dmattn.flash_dma_attention(
            *(query[one, before:], key[one, :used], value[one, :used], *weights),
            causal=causal,
            return_lse=True,
            **options,
        )
        outs.append(torch.cat([out.new_zeros(1, before, 4, 16), out], 1))
        lses.append(torch.cat([lse.new_full((1, 4, before), -torch.inf), lse], 2))
    return torch.cat(outs), torch.cat(lses)


def loss_of(results: Tensors) -> torch.Tensor:
    out, lse = results
    return out.float().cos().sum() + torch.where(lse.isinf(), 0, lse).sin().sum()


@pytest.mark.parametrize("options", RULES)
def test_results_and_gradients_of_the_fused_form(options: dict[str, Any]) -> None:
    tensors = make_tensors()
    whole = flash_dmattn.flash_dma_attention(
        *tensors, kv_used=make_used(), return_lse=True, **options
    )
    alone = one_by_one(tensors, **options)
    torch.testing.assert_close(whole[0], alone[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(whole[1], alone[1], atol=2e-6, rtol=1e-5)
    needed = tensors[:3] if options.get("bias_form") == "none" else tensors
    gradients = [torch.autograd.grad(loss_of(results), needed) for results in (whole, alone)]
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    for b, used in enumerate(USED):
        assert (gradients[0][1][b, used:] == 0).all() and (gradients[0][2][b, used:] == 0).all()


@on_device
@pytest.mark.parametrize("q_len", [1, 5, Q_LEN])
@pytest.mark.parametrize("options", RULES)
def test_results_and_gradients_on_cuda(options: dict[str, Any], q_len: int) -> None:
    """A key has the same score alone and among others, so the selections are equal."""
    tensors = make_tensors(device="cuda")
    tensors[0] = tensors[0].detach()[:, :q_len].clone().requires_grad_()
    whole = flash_dmattn.flash_dma_attention(
        *tensors, kv_used=make_used(device="cuda"), return_lse=True, **options
    )
    alone = one_by_one(tensors, **options)
    torch.testing.assert_close(whole[0], alone[0], atol=0.02, rtol=0.02)
    torch.testing.assert_close(whole[1], alone[1], atol=1e-3, rtol=1e-3)
    needed = tensors[:3] if options.get("bias_form") == "none" else tensors
    gradients = [torch.autograd.grad(loss_of(results), needed) for results in (whole, alone)]
    for one, other in zip(*gradients):
        largest = other.float().abs().max().item()
        torch.testing.assert_close(one, other, atol=0.03 * largest, rtol=0.05)
    for b, used in enumerate(USED):
        assert (gradients[0][1][b, used:] == 0).all() and (gradients[0][2][b, used:] == 0).all()


@on_every_device
@pytest.mark.parametrize("options", RULES)
def test_the_steps_are_the_fused_form(options: dict[str, Any], device: str) -> None:
    tensors, used = make_tensors(device=device), make_used(device=device)
    want = flash_dmattn.flash_dma_attention(*tensors, kv_used=used, return_lse=True, **options)
    rest = dict(options)
    form, window = rest.pop("bias_form", "exp"), rest.pop("keep_window_size")
    rules = {name: rest.pop(name, 0) for name in ("recent", "sinks")}
    scope = rest.pop("scope", "causal" if rest["causal"] else "global")
    score, bias = flash_dmattn.score(*tensors[2:], bias_form=form, kv_used=used)
    selection = flash_dmattn.select(score, window, scope=scope, kv_used=used, **rules)
    found = flash_dmattn.attention(
        *tensors[:3], bias=bias, selection=selection, kv_used=used, **rest
    )
    assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])
    needed = tensors[:3] if form == "none" else tensors
    gradients = [torch.autograd.grad(loss_of(results), needed) for results in (found, want)]
    for one, other in zip(*gradients):
        largest = other.float().abs().max().item()
        tolerance = 0.02 * largest if device == "cuda" else 1e-4
        torch.testing.assert_close(one, other, atol=tolerance, rtol=1e-4)


@on_every_device
def test_scores_of_keys_that_do_not_exist(device: str) -> None:
    tensors, used = make_tensors(device=device), make_used(device=device)
    score, bias = flash_dmattn.score(*tensors[2:], kv_used=used)
    beyond = torch.arange(KV_LEN, device=device) >= used[:, None]
    assert (score.transpose(1, 2)[beyond] == -torch.inf).all()
    assert (bias.transpose(1, 2)[beyond] == 0).all()
    (gradient,) = torch.autograd.grad(bias.sum(), tensors[2])
    assert (gradient[beyond] == 0).all() and (gradient[~beyond] != 0).any()


@on_every_device
@pytest.mark.parametrize("scope", ["causal", "global"])
def test_selection_is_that_of_the_cut_scores(scope: str, device: str) -> None:
    generator = torch.Generator().manual_seed(2)
    score = torch.randint(0, 9, (len(USED), 2, KV_LEN), generator=generator).float().to(device)
    found = flash_dmattn.select(score, 7, scope=scope, sinks=1, kv_used=make_used(device=device))
    for b, used in enumerate(USED):
        alone = flash_dmattn.select(score[b : b + 1, :, :used], 7, scope=scope, sinks=1)
        assert torch.equal(found.expiry[b : b + 1, :, :used], alone.expiry)
        assert torch.equal(found.slot[b : b + 1, :, :used], alone.slot)
        rest = torch.arange(used, KV_LEN, dtype=torch.int32, device=device)
        assert torch.equal(found.expiry[b, :, used:], rest.expand(2, -1))
        assert (found.slot[b, :, used:] == -1).all()


def test_numbers_may_change_from_call_to_call() -> None:
    """A cache that fills up: the layout of the call is remembered, the values of kv_used are
    not."""
    query, key, value = (x.detach()[-1:] for x in make_tensors()[:3])
    used = make_used((0,))
    for length in (1, 40, KV_LEN):
        used[0] = length
        found = flash_dmattn.attention(query[:, :1], key, value, kv_used=used, causal=True)
        alone = flash_dmattn.attention(
            query[:, :1], key[:, :length], value[:, :length], causal=True
        )
        assert torch.equal(found[0], alone[0]) and torch.equal(found[1], alone[1])
    used[0] = KV_LEN + 1
    with pytest.raises(ValueError, match=rf"^kv_used: element 0 is {KV_LEN + 1}, want 0 to"):
        flash_dmattn.attention(query, key, value, kv_used=used)


@on_device
@torch.no_grad()
def test_one_graph_serves_a_cache_that_fills_up() -> None:
    """A step is captured once. It reads kv_used at each replay, even if the values are wrong."""
    tensors, used = make_tensors(0.0, "cuda"), make_used(device="cuda")

    def attend() -> Tensors:
        return flash_dmattn.flash_dma_attention(
            *tensors, kv_used=used, keep_window_size=12, causal=True, return_lse=True
        )

    with torch.cuda.stream(torch.cuda.Stream()):
        attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend()
    wrong = (-1, -(2**31), KV_LEN + 1, 2**31 - 1, 7, KV_LEN)
    for numbers in (USED, USED[::-1], (KV_LEN,) * len(USED), wrong):
        used.copy_(make_used(numbers))
        graph.replay()
        results = [x.clone() for x in found]
        used.clamp_(0, KV_LEN)
        for one, other in zip(results, attend()):
            assert torch.equal(one, other)


def test_compiled() -> None:
    tensors = make_tensors(0.0)
    options = {"keep_window_size": 12, "causal": True}

    def attend(used: torch.Tensor) -> torch.Tensor:
        return flash_dmattn.flash_dma_attention(*tensors, kv_used=used, **options)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for used in (make_used(), make_used(USED[::-1])):
        assert torch.equal(compiled(used), attend(used))
