"""A device without an index is the current one."""

from __future__ import annotations

from typing import Any, Callable

import flash_dmattn
import flash_dmattn.distributed
import flash_dmattn.transformers as models
import pytest
import torch
from flash_dmattn import _library
from flash_dmattn._arguments import is_same_device
from flash_dmattn.rotary import rotary_table
from torch.distributed import HashStore
from transformers import DogeConfig, LlamaConfig


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


def make_doge_cache(device: Any) -> None:
    models.DogeCache(DogeConfig()).early_initialization(1, 2, 8, torch.float32, device)


def make_hybrid_cache(device: Any) -> None:
    cache = models.HybridCache(models.HybridConfig(num_hidden_layers=2))
    cache.early_initialization(1, 2, 8, torch.float32, device)


# Calls in which a user names the device.
MAKERS: dict[str, Callable[[Any], Any]] = {
    "DynamicMaskCache": lambda device: flash_dmattn.DynamicMaskCache(1, 1, 2, 8, 4, device=device),
    "DogeCache": make_doge_cache,
    "HybridCache": make_hybrid_cache,
    "DynamicMaskAttention": lambda device: flash_dmattn.DynamicMaskAttention(
        16, 2, 2, 4, device=device
    ),
    "MultiheadAttention": lambda device: flash_dmattn.MultiheadAttention(16, 2, device=device),
    "rotary_table": lambda device: rotary_table(5, 8, device=device),
    "rotary_frequencies": lambda device: models.rotary_frequencies(LlamaConfig(), device=device),
    "sequence_positions": lambda device: flash_dmattn.distributed.sequence_positions(
        4, device=device
    ),
}


@pytest.fixture
def one_rank() -> Any:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("device", ["cuda:99", torch.device("cuda", 99)])
def test_a_device_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, maker: str, device: Any
) -> None:
    monkeypatch.setattr(_library, "has_cuda", lambda: True)
    with pytest.raises(NotImplementedError) as raised:
        MAKERS[maker](device)
    wanted = "device: is cuda:99, want a device on which PyTorch makes tensors here"
    assert str(raised.value) == wanted


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("maker", MAKERS)
def test_the_meta_device(maker: str) -> None:
    if maker != "rotary_frequencies":  # as transformers' own rules, it may read numbers
        MAKERS[maker]("meta")


def test_a_cache_without_cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "has_cuda", lambda: False)
    for maker in ("DynamicMaskCache", "DogeCache", "HybridCache"):
        with pytest.raises(NotImplementedError, match="^device: is cuda, but this build of flash_"):
            MAKERS[maker]("cuda")
