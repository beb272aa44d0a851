"""Packed sequences: each has the same results and gradients as by itself."""

from __future__ import annotations

from typing import Any, Tuple

import evaluate
import flash_dmattn
import pytest
import torch
from cases import kernels_of, on_device

# Sequences of 1, 59, 0 and 40 positions. The last 3 positions belong to none.
STARTS = (0, 1, 60, 60, 100)
LENGTH = 103
RULES = [
    {"keep_window_size": 12, "causal": True},
    {"keep_window_size": 9, "recent": 7, "sinks": 2, "causal": True, "softcap": 3.0},
    {"keep_window_size": 12, "recent": 3, "sinks": 1, "gap": 0.3, "causal": True},
    {"keep_window_size": 20, "causal": False, "bias_form": "linear"},
    {"keep_window_size": 1000, "causal": True, "scope": "global", "bias_form": "none"},
]
Tensors = Tuple[torch.Tensor, ...]


def make_starts() -> torch.Tensor:
    return torch.tensor(STARTS, dtype=torch.int32)


def make_tensors(seed: int = 0) -> list[torch.Tensor]:
    """query, key, value, dt_proj and a_coef, which require gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, LENGTH, 4, 16), (1, LENGTH, 2, 16), (1, LENGTH, 2, 16), (2, 32), (2,))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def spans() -> list[slice]:
    return [slice(*pair) for pair in zip(STARTS, STARTS[1:]) if pair[0] < pair[1]]


def one_by_one(tensors: list[torch.Tensor], **options: Any) -> Tensors:
    """out and lse of the sequences, each in a call of its own; 0 and -inf outside of sequences."""
    rows, weights = tensors[:3], tensors[3:]
    found = [
        flash_dmattn.flash_dma_attention(
            *(one[:, span] for one in rows), *weights, return_lse=True, **options
        )
        for span in spans()
    ]
    rest = LENGTH - STARTS[-1]
    out = torch.cat([one[0] for one in found] + [found[0][0].new_zeros(1, rest, 4, 16)], 1)
    lse = torch.cat([one[1] for one in found] + [found[0][1].new_full((1, 4, rest), -torch.inf)], 2)
    return out, lse


@pytest.mark.parametrize("options", RULES)
def test_results_and_gradients_of_the_fused_form(options: dict[str, Any]) -> None:
    tensors = make_tensors()
    packed = flash_dmattn.flash_dma_attention(
        *tensors, starts=make_starts(), return_lse=True, **options
    )
    alone = one_by_one(tensors, **options)
    torch.testing.assert_close(packed[0], alone[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(packed[1], alone[1], atol=2e-6, rtol=1e-5)
    needed = tensors[:3] if options.get("bias_form") == "none" else tensors
    gradients = [
        torch.autograd.grad(out.cos().sum() + lse[..., : STARTS[-1]].sin().sum(), needed)
        for out, lse in (packed, alone)
    ]
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert all((one[:, STARTS[-1] :] == 0).all() for one in gradients[0][:3])


@on_device
@pytest.mark.parametrize("options", RULES)
def test_results_and_gradients_on_cuda(options: dict[str, Any]) -> None:
    """A key has the same score alone and among others, so the selections are equal."""
    tensors = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in make_tensors()]
    starts = make_starts().cuda()
    packed = flash_dmattn.flash_dma_attention(*tensors, starts=starts, return_lse=True, **options)
    alone = one_by_one(tensors, **options)
    torch.testing.assert_close(packed[0], alone[0], atol=0.02, rtol=0.02)
    torch.testing.assert_close(packed[1], alone[1], atol=1e-3, rtol=1e-3)
    needed = tensors[:3] if options.get("bias_form") == "none" else tensors
    gradients = [torch.autograd.grad(out.float().cos().sum(), needed) for out, _ in (packed, alone)]
    for one, other in zip(*gradients):
        largest = other.float().abs().max().item()
        torch.testing.assert_close(one, other, atol=0.03 * largest, rtol=0.05)
    assert all((one[:, STARTS[-1] :] == 0).all() for one in gradients[0][:3])


@pytest.mark.parametrize("scope", ["causal", "global"])
@pytest.mark.parametrize("kernel", kernels_of("select"))
def test_selection_is_exact(kernel: str, scope: str) -> None:
    score = torch.randint(0, 9, (1, 2, LENGTH), generator=torch.Generator().manual_seed(2)).float()
    rules = {"recent": 4, "sinks": 1} if scope == "causal" else {"sinks": 1}
    found = flash_dmattn.select(
        score, 7, scope=scope, starts=make_starts(), backend=kernel, **rules
    )
    for span in spans():
        expiry, slot = evaluate.selection(score[..., span], 7, scope, None, **rules)
        assert torch.equal(found.expiry[..., span], expiry + span.start)
        assert torch.equal(found.slot[..., span], slot)
    rest = torch.arange(STARTS[-1], LENGTH, dtype=torch.int32)
    assert torch.equal(found.expiry[..., STARTS[-1] :], rest.expand(1, 2, -1))
    assert (found.slot[..., STARTS[-1] :] == -1).all()


@pytest.mark.parametrize("causal", [True, False])
def test_the_function_of_flash_attn(causal: bool) -> None:
    """Without dt_proj and a_coef attention is dense, as PyTorch computes it for each sequence."""
    rows = [x.detach()[0] for x in make_tensors(3)[:3]]
    starts = make_starts()
    out, lse = flash_dmattn.flash_dmattn_varlen_func(
        *rows, starts, starts.clone(), 59, 59, causal=causal, return_lse=True
    )
    assert out.shape == (LENGTH, 4, 16) and lse.shape == (4, LENGTH)
    for span in spans():
        q, k, v = (one[span].transpose(0, 1) for one in rows)
        expected = evaluate.grouped_sdpa(q, k, v, is_causal=causal)
        torch.testing.assert_close(out[span].transpose(0, 1), expected, atol=2e-6, rtol=1e-5)


def test_the_function_of_flash_attn_with_a_window() -> None:
    tensors = [x.detach() for x in make_tensors(4)]
    starts, weights = make_starts(), dict(zip(("dt_proj", "a_coef"), tensors[3:]))
    rules = {"keep_window_size": 9, "recent": 5, "sinks": 2, "bias_form": "linear"}
    rows = [one[0] for one in tensors[:3]]
    out = flash_dmattn.flash_dmattn_varlen_func(
        *rows, starts, starts, 59, 59, 0.0, 0.5, True, **weights, **rules
    )
    expected = flash_dmattn.flash_dma_attention(
        *tensors, causal=True, softmax_scale=0.5, starts=starts, **rules
    )
    assert torch.equal(out, expected[0])


@pytest.mark.parametrize("window", [8, None])
def test_the_layer(window: int | None) -> None:
    """Rotary positions begin anew in each sequence."""
    torch.manual_seed(5)
    layer = flash_dmattn.DynamicMaskAttention(32, 4, 2, window, recent=3, sinks=1)
    torch.nn.init.normal_(layer.A) if window else None
    x = torch.randn(1, LENGTH, 32)
    out = layer(x, starts=make_starts())
    for span in spans():
        torch.testing.assert_close(out[:, span], layer(x[:, span]), atol=2e-6, rtol=1e-5)


def test_compiled() -> None:
    layer = flash_dmattn.DynamicMaskAttention(32, 4, 2, 8, recent=3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, LENGTH, 32)
    for starts in (make_starts(), torch.tensor([0, 50, 50, 70, 103], dtype=torch.int32)):
        assert torch.equal(compiled(x, starts=starts), layer(x, starts=starts))


def test_starts_are_checked_in_every_call() -> None:
    """The layout of the call is remembered, the values of starts are not."""
    tensors = [x.detach() for x in make_tensors()]
    for last in (100, 103):
        starts = torch.tensor([0, 10, last], dtype=torch.int32)
        flash_dmattn.flash_dma_attention(*tensors, 5, causal=True, starts=starts)
    starts[2] = 104
    with pytest.raises(ValueError, match=r"^starts: element 2 is 104, want 10 to 103$"):
        flash_dmattn.flash_dma_attention(*tensors, 5, causal=True, starts=starts)
