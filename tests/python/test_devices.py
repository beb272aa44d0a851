"""A device without an index is the current one."""

from __future__ import annotations

import flash_dmattn
import pytest
import torch
from flash_dmattn._arguments import is_same_device


@pytest.mark.parametrize(
    ("one", "other", "want"),
    [
        ("cpu", "cpu:0", True),
        ("cuda", "cuda:1", True),
        ("cuda", "cuda:0", False),
        ("cuda:1", "cuda:0", False),
        ("cuda", "cuda", True),
        ("cuda", "cpu", False),
        ("cuda:0", "cpu:0", False),
        ("meta", "meta", True),
    ],
)
def test_same_device(monkeypatch: pytest.MonkeyPatch, one: str, other: str, want: bool) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for names in ((one, other), (other, one)):
        assert is_same_device(*map(torch.device, names)) is want


class Named(torch.Generator):
    """A generator whose device has another name than the device of the tensors."""

    device = torch.device("cpu:0")


def test_generator_of_another_name() -> None:
    rows = torch.randn(3, 1, 20, 2, 8).unbind(0)
    outs = []
    for generator in (torch.Generator(), Named()):
        generator.manual_seed(3)
        outs.append(flash_dmattn.attention(*rows, dropout_p=0.5, generator=generator)[0])
    assert torch.equal(*outs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_generator_of_the_current_gpu() -> None:
    rows = torch.randn(3, 1, 20, 2, 16, device="cuda", dtype=torch.bfloat16).unbind(0)
    generator = torch.Generator("cuda").manual_seed(3)
    out, _ = flash_dmattn.attention(*rows, dropout_p=0.5, generator=generator)
    assert out.isfinite().all()
