"""DynamicMaskOptions: effects of each option, and refused values with their reasons."""

from __future__ import annotations

import dataclasses
from typing import Any

import flash_dmattn
import pytest
import torch
from flash_dmattn import DynamicMaskOptions, _library, ops
from flash_dmattn.options import CUDA_BLOCK

KV_LEN, KV_HEADS = 40, 2


def make_tensors(q_len: int = KV_LEN, batch: int = 1) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(q_len)
    shapes = [(batch, q_len, 4, 16), *2 * [(batch, KV_LEN, KV_HEADS, 16)], (2, 32), (2,)]
    return [torch.randn(shape, generator=random).requires_grad_() for shape in shapes]


def attend(options: DynamicMaskOptions | None, *tensors: torch.Tensor, **rest: Any) -> Any:
    given = tensors or make_tensors()
    return flash_dmattn.flash_dma_attention(*given, causal=True, options=options, **rest)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, dispatched_only: None) -> list[str]:
    """The operators that calls use, in order. No call is a direct one."""
    names: list[str] = []
    for operator in (ops.SCORE, ops.ATTENTION, ops.FUSED, ops.FUSED_OUT):

        def record(*args: Any, name: str = operator.name, op: Any = operator.op) -> Any:
            names.append(name)
            return op(*args)

        monkeypatch.setattr(operator, "op", record)
    return names


def test_defaults() -> None:
    """Options are frozen, and defaults are as in a call without options."""
    options = DynamicMaskOptions()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.keep_window_size = 3
    assert torch.equal(attend(options), attend(None))
    assert {x.name for x in dataclasses.fields(options)} == {
        *("keep_window_size", "selection_method", "min_density_threshold", "mixed_processing"),
        *("block_size", "use_reordering", "max_sequence_length", "max_batch_size"),
        "max_selection_ratio",
    }


@pytest.mark.parametrize("method", ["exact", "approximate"])
def test_window_and_method(method: str) -> None:
    options = DynamicMaskOptions(keep_window_size=5, selection_method=method)
    want = attend(None, keep_window_size=5)
    assert torch.equal(attend(options), want)
    assert torch.equal(attend(options, keep_window_size=5), want)
    assert not torch.equal(attend(None), want)
    with pytest.raises(ValueError, match="keep_window_size: is 6, want that of options, 5, or its"):
        attend(options, keep_window_size=6)


@pytest.mark.parametrize("bias_form", ["exp", "linear", "none"])
def test_mixed_processing(bias_form: str, called: list[str]) -> None:
    """If all keys are kept, other operators give the same results and gradients."""
    tensors = make_tensors()
    weights = [] if bias_form == "none" else tensors[3:]
    both = []
    for mixed in (True, False):
        options = DynamicMaskOptions(keep_window_size=30, mixed_processing=mixed)
        rest = {"recent": 10, "bias_form": bias_form, "return_lse": True, "softcap": 3.0}
        *results, probability = attend(options, *tensors, return_attn_probs=True, **rest)
        loss = results[0].cos().sum() + results[1].sin().sum()
        gradients = torch.autograd.grad(loss, [*tensors[:3], *weights])
        both.append((*results, probability, *gradients))
    assert called == ["score", "attention", "flash_dma_attention"]
    for one, other in zip(*both):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_the_threshold(called: list[str]) -> None:
    """Calls are dense from that number of keys on, with and without a threshold of 1."""
    tensors = [x.detach() for x in make_tensors()]
    for threshold in (None, 1, 1.0):
        for window, operators in ((39, ["flash_dma_output"]), (40, ["score", "attention"])):
            called.clear()
            options = DynamicMaskOptions(window, min_density_threshold=threshold)
            attend(options, *tensors)
            assert called == operators


def test_dense_calls_with_other_options() -> None:
    """Padding, dropout, sink logits and a kernel by name."""
    tensors = make_tensors(batch=2)
    key_valid = torch.arange(KV_LEN) < torch.tensor([[KV_LEN], [17]])
    rest = {"key_valid": key_valid, "dropout_p": 0.2, "sink_logit": torch.randn(4)}
    rest["backend"] = next(
        one.name
        for one in _library.kernels()
        if one.operation == "decode" and one.missing is None and one.name.startswith("cpu/")
    )  # score has no kernel of this name
    results = []
    for mixed in (True, False):
        random = torch.Generator().manual_seed(1)
        options = DynamicMaskOptions(mixed_processing=mixed)
        results.append(attend(options, *tensors, generator=random, **rest))
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-5)


def test_limits() -> None:
    options = DynamicMaskOptions(8, max_sequence_length=40, max_batch_size=2)
    assert torch.equal(attend(options), attend(None, keep_window_size=8))
    attend(options, *make_tensors(batch=2))
    words = "query: has 3 sequences, want at most options.max_batch_size, 2"
    with pytest.raises(ValueError, match=words):
        attend(options, *make_tensors(batch=3))
    starts = torch.tensor([0, 4, 9, 40], dtype=torch.int32)
    with pytest.raises(ValueError, match=words):
        attend(options, starts=starts)
    attend(options, starts=starts[[0, 1, 3]])
    shorter = DynamicMaskOptions(8, max_sequence_length=39)
    with pytest.raises(ValueError, match=r"query: axis 1 has 40 elements, want at most options\.m"):
        attend(shorter)
    with pytest.raises(ValueError, match=r"key: axis 1 has 40 elements, want at most options\.max"):
        attend(shorter, *make_tensors(q_len=39))


def test_ratio() -> None:
    options = DynamicMaskOptions(10, max_selection_ratio=0.25)
    assert torch.equal(attend(options), attend(None, keep_window_size=10))
    words = r"keep_window_size \+ recent: is 11, want at most options.max_selection_ratio, 0.25, of"
    with pytest.raises(ValueError, match=words):
        attend(options, recent=1)
    attend(DynamicMaskOptions(50))  # all keys: 1 is no limit
    with pytest.raises(ValueError, match=r"is 50, want at most .*, 0.99, of the 40 keys"):
        attend(DynamicMaskOptions(50, max_selection_ratio=0.99))


def test_block_size() -> None:
    for size in (64, CUDA_BLOCK):
        options = DynamicMaskOptions(8, block_size=size)
        words = (
            f"block_size: is {size}, want None on cpu: each kernel chooses the size of its blocks"
        )
        with pytest.raises(NotImplementedError, match=words):
            attend(options)
    cuda = torch.device("cuda")
    DynamicMaskOptions(block_size=CUDA_BLOCK)._check_block_size(cuda)
    with pytest.raises(NotImplementedError, match="block_size: is 64, want 128 or None on cuda"):
        DynamicMaskOptions(block_size=64)._check_block_size(cuda)


def test_limits_at_their_ends() -> None:
    """messages.txt has values beyond them."""
    DynamicMaskOptions(1024, max_sequence_length=4096, max_selection_ratio=0.25)
    DynamicMaskOptions(1024, max_sequence_length=512)  # keeps all keys


def test_tensors_of_another_rank() -> None:
    query, *rest = make_tensors()
    with pytest.raises(ValueError, match="query: rank is 3, want 4"):
        attend(DynamicMaskOptions(), query[0], *rest)


def test_a_compiled_call() -> None:
    options = DynamicMaskOptions(keep_window_size=KV_LEN, max_batch_size=1)
    tensors = [x.detach() for x in make_tensors()]

    def call(*given: torch.Tensor) -> torch.Tensor:
        return attend(options, *given)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), call(*tensors))


# ---- packed sequences and layers ----

STARTS = torch.tensor([0, 4, 9, KV_LEN], dtype=torch.int32)


def pack(options: DynamicMaskOptions | None, **rest: Any) -> Any:
    """flash_dmattn_varlen_func() on sequences of 4, 5 and 31 positions, with gradients."""
    rows, weights = make_tensors()[:3], make_tensors()[3:]
    given = {"dt_proj": weights[0], "a_coef": weights[1], "causal": True, **rest}
    return flash_dmattn.flash_dmattn_varlen_func(
        *(one[0] for one in rows), STARTS, STARTS, 31, 31, options=options, **given
    )


def make_layer(
    options: DynamicMaskOptions | None, **rest: Any
) -> flash_dmattn.DynamicMaskAttention:
    torch.manual_seed(1)
    given = {"window": 8, "recent": 0, **rest}
    layer = flash_dmattn.DynamicMaskAttention(32, 4, KV_HEADS, options=options, **given)
    if layer.window is not None:
        torch.nn.init.normal_(layer.A)
    return layer


def test_packed_sequences(called: list[str]) -> None:
    """The window, the dense calls and every limit are as in flash_dma_attention()."""
    want = pack(None, keep_window_size=5)
    for given in ({}, {"keep_window_size": 5}, {"keep_window_size": 2048}):
        assert torch.equal(pack(DynamicMaskOptions(5), **given), want)
    assert not torch.equal(pack(DynamicMaskOptions(6)), want)
    called.clear()
    torch.testing.assert_close(
        pack(DynamicMaskOptions(KV_LEN)), pack(DynamicMaskOptions(KV_LEN, mixed_processing=False))
    )
    assert called == ["score", "attention", "flash_dma_attention"]
    pack(DynamicMaskOptions(5, max_sequence_length=KV_LEN, max_batch_size=3))
    for words, options in (
        (r"q: has 3 sequences, want at most options\.max_batch", {"max_batch_size": 2}),
        (r"q: axis 1 has 40 elements, want at most options\.", {"max_sequence_length": 39}),
        (r"is 5, want at most options\.max_selection_ratio, 0\.1,", {"max_selection_ratio": 0.1}),
    ):
        with pytest.raises(ValueError, match=words):
            pack(DynamicMaskOptions(5, **options))
    with pytest.raises(NotImplementedError, match="block_size: is 64, want None on cpu"):
        pack(DynamicMaskOptions(5, block_size=64))


def test_layers(called: list[str]) -> None:
    """Layers without options, with limits, and dense if the window has all keys."""
    x = torch.randn(2, 20, 32)
    limited = DynamicMaskOptions(8, max_sequence_length=20, max_batch_size=2)
    assert torch.equal(make_layer(limited)(x), make_layer(None)(x))
    assert "options=DynamicMaskOptions(keep_window_size=8," in repr(make_layer(limited))
    assert "options" not in repr(make_layer(None))
    for words, options in (
        (r"query: has 2 sequences, want at most options\.max_batch", {"max_batch_size": 1}),
        (r"query: axis 1 has 20 elements, want at most options\.", {"max_sequence_length": 19}),
        (
            r"is 8, want at most options\.max_selection_ratio, 0\.3, of",
            {"max_selection_ratio": 0.3},
        ),
    ):
        with pytest.raises(ValueError, match=words):
            make_layer(DynamicMaskOptions(8, **options))(x)
    with pytest.raises(NotImplementedError, match="block_size: is 64, want None on cpu"):
        make_layer(DynamicMaskOptions(8, block_size=64))(x)
    called.clear()
    mixed, selected = (
        DynamicMaskOptions(20, mixed_processing=is_mixed) for is_mixed in (True, False)
    )
    torch.testing.assert_close(
        make_layer(mixed, window=20)(x), make_layer(selected, window=20)(x), atol=1e-6, rtol=1e-5
    )
    assert called == ["score", "attention", "flash_dma_attention"]
