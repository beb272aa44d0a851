"""mask_lists(): calls with lists against calls that read the mask, on the CPU and on a device."""

from __future__ import annotations

from typing import Any

import flash_dmattn
import pytest
import torch
from cases import DEVICES, on_device

Q_LEN, KV_LEN = 150, 170


def make_call(device: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """query, key, value and a mask for each kv head."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    random = torch.Generator().manual_seed(4)
    shapes = [(2, Q_LEN, 4, 64), *2 * [(2, KV_LEN, 2, 64)]]
    rows = [torch.randn(shape, generator=random).to(device, dtype) for shape in shapes]
    mask = torch.rand(2, 2, Q_LEN, KV_LEN, generator=random) < 0.3
    return [x.requires_grad_() for x in rows], mask.to(device)


def rules() -> dict[str, dict[str, Any]]:
    score = torch.randn(2, 2, KV_LEN, generator=torch.Generator().manual_seed(5))
    return {
        "dense": {},
        "causal": {"causal": True},
        "padded": {"key_valid": torch.arange(KV_LEN).expand(2, -1) % 7 != 2},
        "few keys": {"kv_used": torch.tensor([40, KV_LEN], dtype=torch.int32)},
        "selected": {"causal": True, "selection": flash_dmattn.select(score, 30)},
    }


def moved(given: dict[str, Any], device: str) -> dict[str, Any]:
    def move(x: Any) -> Any:
        if isinstance(x, flash_dmattn.Selection):
            return flash_dmattn.Selection(*map(move, x))
        return x.to(device) if isinstance(x, torch.Tensor) else x

    return {name: move(x) for name, x in given.items()}


def results(rows: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    out, lse = flash_dmattn.attention(*rows, **options)
    kept = torch.where(lse == -torch.inf, 0, lse)
    return [out, lse, *torch.autograd.grad(out.float().cos().sum() + kept.sum(), rows)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", rules())
def test_give_what_the_mask_does(name: str, device: str) -> None:
    rows, mask = make_call(device)
    given = moved(rules()[name], device)
    lists = flash_dmattn.mask_lists(*rows[:2], mask, **given)
    assert lists.dtype == torch.uint8 and lists.device == mask.device
    found = results(rows, attn_mask=mask, mask_lists=lists, **given)
    for one, other in zip(found, results(rows, attn_mask=mask, **given)):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_cpu_needs_no_bytes() -> None:
    rows, mask = make_call("cpu")
    assert flash_dmattn.mask_lists(*rows[:2], mask).shape == (0,)


@on_device
def test_mask_is_not_read_again() -> None:
    rows, mask = make_call("cuda")
    lists = flash_dmattn.mask_lists(*rows[:2], mask, causal=True)
    assert lists.numel() >= 4 * Q_LEN * KV_LEN * 5 // 32
    wanted = results(rows, attn_mask=mask, causal=True)
    empty = torch.zeros_like(mask)
    for one, other in zip(results(rows, attn_mask=empty, mask_lists=lists, causal=True), wanted):
        torch.testing.assert_close(one, other, equal_nan=True)


@on_device
def test_lists_of_another_mask_are_too_small() -> None:
    rows, mask = make_call("cuda")
    lists = flash_dmattn.mask_lists(*rows[:2], mask[:1, :1])
    with pytest.raises(ValueError, match="mask_lists: axis 0 has"):
        flash_dmattn.attention(*rows, attn_mask=mask, mask_lists=lists)


@pytest.mark.parametrize("device", DEVICES)
def test_flash_dmattn_func_takes_them(device: str) -> None:
    rows, mask = make_call(device)
    lists = flash_dmattn.mask_lists(*rows[:2], mask)
    out = flash_dmattn.flash_dmattn_func(*rows, attn_mask=mask, mask_lists=lists)
    assert torch.equal(out, flash_dmattn.flash_dmattn_func(*rows, attn_mask=mask))


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device: str) -> None:
    rows, mask = make_call(device)

    def attend(*given: torch.Tensor) -> torch.Tensor:
        *rows, mask = given
        lists = flash_dmattn.mask_lists(*rows[:2], mask, causal=True)
        return flash_dmattn.attention(*rows, attn_mask=mask, mask_lists=lists, causal=True)[0]

    assert torch.equal(torch.compile(attend, fullgraph=True)(*rows, mask), attend(*rows, mask))
