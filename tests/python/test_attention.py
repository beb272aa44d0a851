"""score, attention and flash_dma_attention against evaluations in float64, on every kernel."""

from __future__ import annotations

import math
from typing import Any

import evaluate
import flash_dmattn
import pytest
import torch
from cases import (
    CASES,
    DTYPES,
    KERNELS,
    NAMES,
    RUN_IDS,
    RUNS,
    WIDE,
    Input,
    Tensors,
    attend,
    make_fused,
    make_input,
    make_mask,
    options_of,
    takes,
)
from flash_dmattn import _call, _library, ops


def test_every_kernel_takes_something() -> None:
    for kernel in KERNELS:
        assert takes(kernel, torch.bfloat16)
        assert takes(kernel, torch.float64) == (kernel == "reference")
    assert {"cpu/scalar", "reference"} <= set(WIDE)


def run(name: str, given: Input, backend: str | None = None) -> Tensors:
    """out and lse."""
    return tuple(one.detach() for one in attend(name, given, backend)[1])


@pytest.mark.parametrize(("kernel", "dtype"), RUNS, ids=RUN_IDS)
@pytest.mark.parametrize("name", [*NAMES, "row/empty-rows"])
def test_attention(name: str, kernel: str, dtype: torch.dtype) -> None:
    given = make_input(name, dtype)
    results = run(name, given, kernel)
    assert all(one.is_contiguous() for one in results)
    evaluate.assert_attention(results, *given[:3], make_mask(name), **options_of(name, given))


@pytest.mark.parametrize("kernel", WIDE)
def test_softmax_scale(kernel: str) -> None:
    query, key, value, *_ = make_input("softcap/selected", torch.float32)
    options = {"softmax_scale": 0.8, "softcap": 1.5}
    results = flash_dmattn.attention(query, key, value, causal=True, backend=kernel, **options)
    mask = evaluate.visible_keys(77, 77, True)
    evaluate.assert_attention(results, query, key, value, mask, **options)


@pytest.mark.parametrize(("kernel", "dtype"), RUNS, ids=RUN_IDS)
@pytest.mark.parametrize("bias_form", ["exp", "linear", "none"])
@pytest.mark.parametrize("weights", ["same", "float32"])
def test_score(bias_form: str, weights: str, kernel: str, dtype: torch.dtype) -> None:
    batch, kv_len, kv_heads, head_dim = 2, 53, 3, 24
    generator = torch.Generator().manual_seed(3)
    value = torch.randn(batch, kv_len, kv_heads, head_dim, generator=generator).to(dtype)
    kind = dtype if weights == "same" else torch.float32
    dt_proj = (torch.randn(kv_heads, kv_heads * head_dim, generator=generator) / 4).to(kind)
    a_coef = torch.randn(kv_heads, generator=generator).to(kind)
    key_valid = torch.rand(batch, kv_len, generator=generator) < 0.8
    score, bias = flash_dmattn.score(
        value, dt_proj, a_coef, bias_form=bias_form, key_valid=key_valid, backend=kernel
    )

    def evaluated(at: torch.dtype, order: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        shuffled = value.flatten(2)[..., order].view_as(value)
        score = evaluate.score(shuffled, dt_proj[:, order], a_coef, at)
        return torch.where(key_valid[:, None], score, -math.inf)

    orders = evaluate.orders_of(kv_heads * head_dim, score.numel())
    plain = [evaluated(evaluate.plain_dtype(score.dtype), order) for order in orders]
    evaluate.assert_within(score, evaluated(torch.float64), *plain)
    form = {"exp": torch.exp, "linear": torch.clone}.get(bias_form)
    if form is None:
        assert bias is None
    else:
        evaluate.assert_within(bias, form(score.double()), form(score))


FORMS: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": False},
    {"causal": True, "scope": "global"},
    {"causal": True, "bias_form": "linear", "softcap": 1.5, "softmax_scale": 0.3},
    {"causal": False, "bias_form": "none"},
    {"causal": True, "key_valid": True},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_flash_dma_attention(form: dict[str, Any], dtype: torch.dtype) -> None:
    """With every option the results equal those of the three steps, and are within tolerance."""
    length, window = 83, 19
    tensors = [x.detach() for x in make_fused(length, dtype=dtype, head_dim=32)]
    causal, bias_form = form["causal"], form.get("bias_form", "exp")
    key_valid = (torch.arange(length) % 5 != 1).expand(2, -1) if "key_valid" in form else None
    options = {**form, "key_valid": key_valid, "keep_window_size": window}
    out, lse = flash_dmattn.flash_dma_attention(*tensors, **options, return_lse=True)
    assert torch.equal(out, flash_dmattn.flash_dma_attention(*tensors, **options))
    named = flash_dmattn.flash_dma_attention(*tensors, **options, backend="reference")
    assert torch.allclose(named, out, rtol=0.02, atol=0.02)
    scope = form.get("scope", "causal" if causal else "global")
    softcap, scale = form.get("softcap", 0.0), form.get("softmax_scale")
    score, bias = flash_dmattn.score(*tensors[2:], bias_form=bias_form, key_valid=key_valid)
    selection = flash_dmattn.select(score, window, scope=scope, key_valid=key_valid)
    rest = {"key_valid": key_valid, "causal": causal}
    shape = {"bias": bias, "softcap": softcap, "softmax_scale": scale}
    steps = flash_dmattn.attention(*tensors[:3], selection=selection, **rest, **shape)
    assert torch.equal(out, steps[0]) and torch.equal(lse, steps[1])
    kept = evaluate.kept_keys(score, window, scope, key_valid)
    mask = evaluate.visible_keys(length, length, causal, kept, key_valid)
    evaluate.assert_attention((out, lse), *tensors[:3], mask, **shape)


def test_everything_that_the_fused_operator_returns() -> None:
    tensors = [x.detach() for x in make_fused(40)]
    out, lse, score, bias, expiry, slot = ops.FUSED.op(
        *tensors, None, 7, "causal", "exp", True, 0.0, 0.0, False, None
    )
    steps = flash_dmattn.score(*tensors[2:])
    assert torch.equal(score, steps[0]) and torch.equal(bias, steps[1])
    selection = flash_dmattn.select(score, 7)
    assert torch.equal(expiry, selection.expiry) and torch.equal(slot, selection.slot)
    given = {"bias": bias, "selection": selection, "causal": True}
    for one, other in zip((out, lse), flash_dmattn.attention(*tensors[:3], **given)):
        assert torch.equal(one, other)


def test_the_defaults_of_flash_dma_attention() -> None:
    generator = torch.Generator().manual_seed(6)
    query = torch.randn(1, 1100, 1, 8, generator=generator)
    key, value = torch.randn(2, 1, 1100, 1, 8, generator=generator)
    dt_proj, a_coef = torch.randn(1, 8, generator=generator), torch.ones(1)
    out = flash_dmattn.flash_dma_attention(query, key, value, dt_proj, a_coef)
    score, bias = flash_dmattn.score(value, dt_proj, a_coef)
    selection = flash_dmattn.select(score, 1024, scope="global")
    expected, _ = flash_dmattn.attention(query, key, value, bias=bias, selection=selection)
    assert (selection.slot < 0).sum() == 1100 - 1024
    assert torch.equal(out, expected)


SELECTED = ["later/steps", "padding/holes", "global/causal", "dense/pad-left"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", SELECTED)
def test_keys_that_nobody_keeps_are_not_read(name: str, kernel: str) -> None:
    given = make_input(name, torch.float32 if kernel in WIDE else torch.bfloat16)
    unread = ~make_mask(name).any(2)  # [batch, kv_heads, kv_len]
    assert unread.any()
    poison = unread.expand(given.score.shape).transpose(1, 2)[..., None]
    poisoned = given._replace(
        key=torch.where(poison, math.nan, given.key),
        value=torch.where(poison, math.nan, given.value),
        bias=torch.where(unread, math.nan, given.bias),
    )
    for clean, other in zip(run(name, given, kernel), run(name, poisoned, kernel)):
        assert torch.equal(clean, other)


@pytest.mark.parametrize("kernel", WIDE)
def test_special_logits(kernel: str) -> None:
    """A logit of -inf has no weight, and a row of only such logits is empty; a logit of +inf or NaN
    makes its row NaN."""
    generator = torch.Generator().manual_seed(7)
    query = torch.randn(1, 70, 2, 16, generator=generator)
    key, value = torch.randn(2, 1, 70, 1, 16, generator=generator)
    bias = torch.zeros(1, 1, 70)
    bias[..., :20] = -math.inf  # rows 0 to 19 have no other logits
    bias[..., 40] = math.inf
    key[:, 60] = math.nan
    query[:, 25] = math.nan
    out, lse = flash_dmattn.attention(query, key, value, bias=bias, causal=True, backend=kernel)
    assert torch.equal(out[:, :20], torch.zeros(1, 20, 2, 16))
    assert torch.equal(lse[..., :20], torch.full((1, 2, 20), -math.inf))
    rows = torch.arange(70)
    broken = (rows >= 40) | (rows == 25)
    assert torch.equal(torch.isnan(lse), broken.expand(1, 2, 70))
    assert torch.equal(torch.isnan(out), broken[None, :, None, None].expand(out.shape))
    whole = ~broken & (rows >= 20)
    mask = evaluate.visible_keys(70, 70, True)
    exact = evaluate.attention(query, key, value, mask, torch.float64, bias=bias)
    plain = evaluate.attention(query, key, value, mask, torch.float32, bias=bias)
    evaluate.assert_within(out[:, whole], exact.out[:, whole], plain.out[:, whole])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["later/steps", "padding/left", "dense/pad-holes"])
def test_a_sequence_does_not_feel_its_batch(name: str, kernel: str) -> None:
    given = make_input(name, torch.bfloat16)
    out, lse = run(name, given, kernel)
    for b in range(CASES[name].batch):
        alone = Input(*(None if one is None else one[b : b + 1] for one in given))
        one_out, one_lse = run(name, alone, kernel)
        assert torch.equal(one_out, out[b : b + 1])
        assert torch.equal(one_lse, lse[b : b + 1])


@pytest.mark.parametrize("name", ["dense/causal-131", "scores/saw", "group/16"])
def test_threads_change_nothing(name: str) -> None:
    given = make_input(name, torch.float32)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 1):
            torch.set_num_threads(count)
            results.append(run(name, given))
    finally:
        torch.set_num_threads(threads)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


class Spy:
    """Stands in for the library, and keeps the arguments of its calls."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.calls: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.library, name)

        def call(*arguments: Any) -> Any:
            if len(arguments) == 1:
                self.calls[name] = arguments[0]._obj
            return function(*arguments)

        return call


def spied_forward(
    monkeypatch: pytest.MonkeyPatch, tensors: tuple[torch.Tensor, ...]
) -> _library.ForwardArgs:
    spy = Spy(_library.library)
    monkeypatch.setattr(_library, "library", spy)
    monkeypatch.setattr(
        _call, "memory", _call.Memory()
    )  # prepared calls have the library's own functions
    flash_dmattn.attention(*tensors, causal=True)
    return spy.calls["fdma_forward"]


def test_transposed_views_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tuple(torch.randn(2, heads, 31, 64).transpose(1, 2) for heads in (4, 2, 2))
    args = spied_forward(monkeypatch, tensors)
    for name, tensor in zip("qkv", tensors):
        seen = getattr(args, name)
        assert not tensor.is_contiguous()
        assert seen.data == tensor.data_ptr()
        assert tuple(seen.stride) == tensor.stride()
        assert tuple(seen.shape) == tensor.shape
    assert args.exec.threads == torch.get_num_threads()


def test_slices_of_one_packed_buffer_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = torch.randn(2, 31, 3, 2, 64)
    args = spied_forward(monkeypatch, packed.unbind(2))
    for name, tensor in zip("qkv", packed.unbind(2)):
        assert getattr(args, name).data == tensor.data_ptr()
        assert tuple(getattr(args, name).stride) == tensor.stride()


def test_only_a_strided_last_axis_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = torch.randn(2, 1, 31, 2, 64)
    value = torch.randn(1, 64, 31, 2).permute(0, 2, 3, 1)
    expected = flash_dmattn.attention(query, key, value.contiguous(), causal=True)
    args = spied_forward(monkeypatch, (query, key, value))
    assert args.q.data == query.data_ptr() and args.k.data == key.data_ptr()
    assert args.v.data != value.data_ptr() and args.v.stride[3] == 1
    out, _ = flash_dmattn.attention(query, key, value, causal=True)
    assert torch.equal(out, expected[0])


@pytest.mark.parametrize(
    ("q_shape", "kv_shape"),
    [
        ((0, 5, 2, 16), (0, 5, 1, 16)),
        ((2, 0, 2, 16), (2, 5, 1, 16)),
        ((2, 5, 2, 16), (2, 0, 1, 16)),
    ],
)
def test_nothing_to_attend_to(q_shape: tuple[int, ...], kv_shape: tuple[int, ...]) -> None:
    out, lse = flash_dmattn.attention(
        torch.randn(q_shape), torch.randn(kv_shape), torch.randn(kv_shape)
    )
    assert torch.equal(out, torch.zeros(q_shape))
    assert torch.equal(lse, torch.full((q_shape[0], q_shape[2], q_shape[1]), -math.inf))


def test_backends() -> None:
    backends = flash_dmattn.get_available_backends()
    assert backends[-1] == "reference" and "cpu" in backends
    assert len(set(backends)) == len(backends)
    given = make_input("scores/saw", torch.float32)
    for backend in backends:
        if backend != "cuda":  # which takes CUDA tensors only
            run("scores/saw", given, backend)


def test_inputs_stay_as_they_were() -> None:
    given = make_input("padding/holes", torch.float32)
    before = [None if one is None else one.clone() for one in given]
    run("padding/holes", given)
    for one, copy in zip(given, before):
        assert one is None or torch.equal(one, copy)
