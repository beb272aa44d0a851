"""Bad input of masks, biases and dropout, under every name that takes them: NaN and infinity in a
bias, masks that do not broadcast, other dtypes and devices, generators of other devices."""

from __future__ import annotations

from typing import Any, Callable

import flash_dma
import flash_dmattn
import pytest
import torch
from cases import DEVICES
from test_masks import BATCH, KV_HEADS, KV_LEN, Q_HEADS, Q_LEN, make_pairs, make_rows, repeat_heads

NAN, INFINITY = float("nan"), float("inf")
PAIRS = (BATCH, KV_HEADS, Q_LEN, KV_LEN)
OTHER = {"cpu": "meta", "cuda": "cpu"}  # a device without the other tensors


def attention(
    rows: list[torch.Tensor], mask: torch.Tensor | None, bias: torch.Tensor | None, **rest: Any
) -> torch.Tensor:
    return flash_dmattn.attention(*rows, attn_mask=mask, attn_bias=bias, **rest)[0]


def dmattn(
    rows: list[torch.Tensor], mask: torch.Tensor | None, bias: torch.Tensor | None, **rest: Any
) -> torch.Tensor:
    numbers = None if mask is None else mask.to(rows[0].dtype)
    return flash_dmattn.flash_dmattn_func(*rows, numbers, bias, **rest)


def fwd(
    rows: list[torch.Tensor],
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    generator: torch.Generator | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    numbers = None if mask is None else mask.to(rows[0].dtype)
    options = {"p_dropout": dropout_p, "gen": generator}
    return flash_dma.fwd(*rows, bias, numbers, keep_window_size=1, **options)[0]  # masks count


Attend = Callable[..., torch.Tensor]
FUNCTIONS = [attention, dmattn, fwd]
every_function = pytest.mark.parametrize("attend", FUNCTIONS, ids=lambda x: x.__name__)


def make(device: str) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    rows = [x.detach().to(device).requires_grad_() for x in make_rows(dtype)[:3]]
    mask, bias = (x.to(device) for x in make_pairs(PAIRS, dtype))
    return rows, mask, bias


def assert_equal_but_for_rounding(
    found: torch.Tensor, want: torch.Tensor, value: torch.Tensor
) -> None:
    """Weights and outputs are each rounded to steps of the largest value."""
    allowed = 4 * torch.finfo(found.dtype).eps * value.abs().max().item()
    torch.testing.assert_close(found, want, atol=allowed, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wrong", [NAN, INFINITY, -INFINITY])
@every_function
def test_numbers_at_masked_pairs_do_not_matter(attend: Attend, wrong: float, device: str) -> None:
    rows, mask, bias = make(device)
    spoilt = bias.masked_fill(~mask, wrong).requires_grad_()
    plain = bias.clone().requires_grad_()
    outs = [attend(rows, mask, one) for one in (spoilt, plain)]
    assert torch.equal(*outs) and outs[0].isfinite().all()
    gradients = [
        torch.autograd.grad(out.cos().sum(), (*rows, one))
        for out, one in zip(outs, (spoilt, plain))
    ]
    assert all(x.isfinite().all() for x in gradients[0])
    assert (gradients[0][3][~mask] == 0).all()
    if device == "cpu":  # elsewhere the order of sums differs from run to run
        assert all(torch.equal(one, other) for one, other in zip(*gradients))


@pytest.mark.parametrize("device", DEVICES)
@every_function
def test_nan_at_a_kept_pair_propagates(attend: Attend, device: str) -> None:
    """NaN reaches the row of each query head to which the pair belongs, and no other row."""
    rows, mask, bias = make(device)
    mask[1, 2, 5, 7] = True
    spoilt = bias.clone()
    spoilt[1, 2, 5, 7] = NAN
    out, plain = attend(rows, mask, spoilt), attend(rows, mask, bias)
    group = Q_HEADS // KV_HEADS
    expected = torch.zeros(BATCH, Q_LEN, Q_HEADS, dtype=torch.bool, device=device)
    expected[1, 5, 2 * group : 3 * group] = True
    assert torch.equal(out.isnan().all(-1), expected)
    assert_equal_but_for_rounding(out[~expected], plain[~expected], rows[2])
    (dquery,) = torch.autograd.grad(out.cos().sum(), rows[0])
    assert torch.equal(dquery.isnan().any(-1), expected)


@pytest.mark.parametrize("device", DEVICES)
@every_function
def test_nan_without_a_mask_propagates(attend: Attend, device: str) -> None:
    rows, _, bias = make(device)
    bias[0, :, 3, 4] = NAN
    out = attend(rows, None, bias)
    assert out[0, 3].isnan().all() and not out[1].isnan().any()
    assert out.isnan().any(-1).sum() == Q_HEADS


@pytest.mark.parametrize("device", DEVICES)
@every_function
def test_an_infinite_bias(attend: Attend, device: str) -> None:
    """-inf at all kept pairs of a row leaves it without a key; -inf at some drops these keys."""
    rows, mask, bias = make(device)
    bias[0, 0, 0] = -INFINITY
    assert (attend(rows, mask, bias)[0, 0, : Q_HEADS // KV_HEADS] == 0).all()
    dropped = mask & (torch.arange(KV_LEN, device=device) % 3 == 0)
    found = attend(rows, mask, bias.masked_fill(dropped, -INFINITY))
    want = attend(rows, mask & ~dropped, bias)
    assert_equal_but_for_rounding(found, want, rows[2])


@pytest.mark.parametrize("device", DEVICES)
@every_function
def test_pairs_that_do_not_fit(attend: Attend, device: str) -> None:
    rows, mask, bias = make(device)
    for axis, size in enumerate(PAIRS):
        shape = [x + 1 if n == axis else x for n, x in enumerate(PAIRS)]
        words = rf": axis {axis} has {size + 1} elements, want "
        for pairs in ((mask.new_ones(shape), None), (None, bias.new_ones(shape))):
            with pytest.raises(ValueError, match=words):
                attend(rows, *pairs)
    for pairs in ((mask[0], None), (None, bias[0])):
        with pytest.raises(ValueError, match=": rank is 3, want 4"):
            attend(rows, *pairs)


@pytest.mark.parametrize("device", DEVICES)
@every_function
def test_pairs_of_another_device_or_dtype(attend: Attend, device: str) -> None:
    rows, mask, bias = make(device)
    other = OTHER[device]
    for pairs in ((mask.to(other), None), (None, bias.to(other))):
        with pytest.raises(ValueError, match=f": is on {other}, want {device}"):
            attend(rows, *pairs)
    for wrong in (bias.half(), bias.double(), mask):
        with pytest.raises(NotImplementedError, match=": dtype is .*, supported: "):
            attend(rows, None, wrong)


def test_masks_of_integers() -> None:
    rows, mask, _ = make("cpu")
    with pytest.raises(NotImplementedError, match="attn_mask: dtype is int64, supported: bool or"):
        flash_dmattn.flash_dmattn_func(*rows, mask.long())
    with pytest.raises(NotImplementedError, match="supported: bool or uint8; a mask that is added"):
        flash_dmattn.attention(*rows, attn_mask=mask.float())


@every_function
def test_dropout_and_generators(attend: Attend) -> None:
    rows, mask, bias = make("cpu")
    for wrong in (1.5, -0.1, NAN):
        with pytest.raises(ValueError, match="(dropout_p|p_dropout): is .*, want a number from 0"):
            attend(rows, mask, bias, dropout_p=wrong)
    on_meta = [x.to("meta") for x in rows]
    with pytest.raises(ValueError, match="(generator|gen): is on cpu, want meta, where q"):
        attend(on_meta, None, None, dropout_p=0.1, generator=torch.Generator())
    with pytest.raises(TypeError, match="(generator|gen): is .*, a str, want a torch.Generator"):
        attend(rows, None, None, generator="cpu")
    for probability in (0.0, 0.999):
        assert attend(rows, mask, bias, dropout_p=probability).isfinite().all()


def test_repeated_heads() -> None:
    """The mask of a kv head applies to its query heads."""
    rows, mask, bias = make("cpu")
    want = attention(rows, repeat_heads(mask), repeat_heads(bias))
    assert torch.equal(attention(rows, mask, bias), want)
