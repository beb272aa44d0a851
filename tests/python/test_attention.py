"""score, attention and flash_dma_attention against evaluations in float64, and by their properties,
on every kernel of the CPU, and on a CUDA device if there is one."""

from __future__ import annotations

import itertools
import math
from typing import Any, Callable

import cases
import evaluate
import flash_dmattn
import pytest
import torch
from cases import DEVICES, attend, fused, make_fused, make_input, make_mask, on_device, stepwise
from evaluate import assert_same
from flash_dmattn import _library, ops

RUNS = cases.runs_of(cases.KERNELS, cases.DTYPES)
TARGETS = [("cpu", kernel) for kernel in cases.KERNELS]
TARGETS.append(pytest.param("cuda", None, marks=on_device))


def test_what_kernels_support() -> None:
    for kernel in cases.KERNELS:
        assert cases.supports(kernel, torch.bfloat16)
        assert cases.supports(kernel, torch.float64) == (kernel == "reference")
    assert {"cpu/scalar", "reference"} <= set(cases.WIDE)


@pytest.mark.parametrize(("device", "kernel", "dtype"), RUNS + cases.CUDA_RUNS)
@pytest.mark.parametrize("name", [*cases.NAMES, "row/empty-rows", "row/1000"])
def test_attention(name: str, device: str, kernel: str | None, dtype: torch.dtype) -> None:
    given = make_input(name, dtype)
    _, results = attend(name, given, kernel, device)
    assert all(one.is_contiguous() and one.device.type == device for one in results)
    evaluate.assert_attention(results, *given[:3], make_mask(name), **cases.options_of(name, given))


@pytest.mark.parametrize("kernel", cases.WIDE)
def test_softmax_scale(kernel: str) -> None:
    query, key, value, *_ = make_input("softcap/selected", torch.float32)
    options = {"softmax_scale": 0.8, "softcap": 1.5}
    results = flash_dmattn.attention(query, key, value, causal=True, backend=kernel, **options)
    mask = evaluate.visible_keys(77, 77, True)
    evaluate.assert_attention(results, query, key, value, mask, **options)


@pytest.mark.parametrize(("device", "kernel", "dtype"), RUNS)
@pytest.mark.parametrize("bias_form", ["exp", "linear", "none"])
@pytest.mark.parametrize("weights", ["same", "float32"])
def test_score(bias_form: str, weights: str, device: str, kernel: str, dtype: torch.dtype) -> None:
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
    {"causal": True, "recent": 25},
    {"causal": True, "recent": 9, "sinks": 3, "key_valid": True},
    {"causal": False, "sinks": 5},
    {"causal": True, "gap": 0.5},
    {"causal": True, "recent": 9, "sinks": 3, "gap": 0.2, "key_valid": True},
]
FUSED_RUNS = [("cpu", dtype, 32) for dtype in cases.DTYPES]
FUSED_RUNS += [
    pytest.param("cuda", dtype, head_dim, marks=on_device)
    for dtype in cases.NARROW
    for head_dim in (40, 64, 128, 256)
]


@pytest.mark.parametrize(("device", "dtype", "head_dim"), FUSED_RUNS)
@pytest.mark.parametrize("form", FORMS)
def test_flash_dma_attention(
    form: dict[str, Any], device: str, dtype: torch.dtype, head_dim: int
) -> None:
    """With every option the results equal the three steps and are within tolerance. Every device
    selects the same keys."""
    q_len, kv_len = 150, 300
    tensors = make_fused(q_len, kv_len, dtype, head_dim=head_dim, device=device)
    tensors = [x.detach() for x in tensors]
    causal, bias_form = form["causal"], form.get("bias_form", "exp")
    on_cpu = (torch.arange(kv_len) % 5 != 1).expand(2, -1) if "key_valid" in form else None
    key_valid = None if on_cpu is None else on_cpu.to(device)
    options = {**form, "key_valid": key_valid}
    out, lse = fused(*tensors, **options, return_lse=True)
    assert torch.equal(out, fused(*tensors, **options))
    if device == "cpu":
        named = fused(*tensors, **options, backend="reference")
        assert torch.allclose(named, out, rtol=0.02, atol=0.02)
    scope = form.get("scope", "causal" if causal else "global")
    softcap, scale = form.get("softcap", 0.0), form.get("softmax_scale")
    rules = {name: form.get(name, 0) for name in ("recent", "sinks")}
    rules["gap"] = form.get("gap")
    score, bias = flash_dmattn.score(*tensors[2:], bias_form=bias_form, key_valid=key_valid)
    selection = flash_dmattn.select(score, cases.WINDOW, scope=scope, key_valid=key_valid, **rules)
    rest = {"key_valid": key_valid, "causal": causal, "bias": bias}
    shape = {"softcap": softcap, "softmax_scale": scale}
    steps = flash_dmattn.attention(*tensors[:3], selection=selection, **rest, **shape)
    assert_same((out, lse), steps)
    score, bias, *rows = [None if x is None else x.cpu() for x in (score, bias, *tensors[:3])]
    of_cpu = flash_dmattn.select(score, cases.WINDOW, scope=scope, key_valid=on_cpu, **rules)
    assert_same((selection.expiry.cpu(), selection.slot.cpu()), of_cpu[:2])
    kept = evaluate.kept_keys(score, cases.WINDOW, scope, on_cpu, **rules)
    mask = evaluate.visible_keys(q_len, kv_len, causal, kept, on_cpu)
    evaluate.assert_attention((out, lse), *rows, mask, bias=bias, **shape)


def test_everything_that_the_fused_operator_returns() -> None:
    tensors = [x.detach() for x in make_fused(60)]
    out, lse, score, bias, *selection = ops.FUSED.op(
        *tensors,
        *6 * [None],
        cases.WINDOW,
        9,
        2,
        "causal",
        "linear",
        True,
        0.0,
        3.0,
        0.0,
        0.0,
        False,
        None,
    )
    assert_same((out, lse, score, *selection), stepwise(*tensors, recent=9, sinks=2))
    assert torch.equal(bias, score)


def test_the_defaults_of_flash_dma_attention() -> None:
    tensors = [x.detach() for x in make_fused(1100, head_dim=8)]
    out = flash_dmattn.flash_dma_attention(*tensors)
    said = {"causal": False, "scope": "global", "bias_form": "exp", "softcap": 0.0}
    said.update(recent=0, sinks=0)
    assert torch.equal(out, flash_dmattn.flash_dma_attention(*tensors, 1024, **said))
    assert not torch.equal(out, flash_dmattn.flash_dma_attention(*tensors, 1023, **said))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_window_of_all_keys_takes_recent_and_sinks(backend: str) -> None:
    """Such a window keeps every key already."""
    tensors = [x.detach() for x in make_fused(60)]
    expected = fused(*tensors, keep_window_size=60, backend=backend)
    every = (1 << 63) - 1
    for window, recent in itertools.product((1, 60, every), (60, every)):
        rules = {"keep_window_size": window, "recent": recent, "sinks": 1}
        assert torch.equal(fused(*tensors, **rules, backend=backend), expected)
    sinks = fused(*tensors, keep_window_size=every, sinks=every, causal=False, backend=backend)
    every_key = fused(*tensors, keep_window_size=60, causal=False, backend=backend)
    assert torch.equal(sinks, every_key)


def test_recent_keeps_the_keys_that_scores_drop() -> None:
    """If scores fall, the window keeps only the first keys; `recent` adds the newest."""
    score = -torch.arange(20.0)[None, None]
    values = torch.eye(24)[None, :20, None]  # channel j of out: the weight of key j
    zeros = torch.zeros_like(values)
    selection = flash_dmattn.select(score, 3, recent=2)
    out, _ = flash_dmattn.attention(zeros, zeros, values, selection=selection, causal=True)
    torch.testing.assert_close(out[0, 19, 0], 0.2 * values[0, [0, 1, 2, 18, 19], 0].sum(0))


@pytest.mark.parametrize(("device", "kernel"), TARGETS)
def test_a_selection_that_says_too_small_a_window(device: str, kernel: str | None) -> None:
    """The CPU attends to all keys of the selection, but may have no room for their gradients. A
    device makes NaN of rows that would lose keys."""
    dtype = torch.float32 if kernel in cases.WIDE else torch.bfloat16
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(1, 700, 2, 16, generator=generator).to(device, dtype) for _ in range(3)]
    tensors[0].requires_grad_()
    selection = flash_dmattn.select(torch.randn(1, 2, 700, generator=generator).to(device), 64)
    small = selection._replace(window=32)
    options = {"causal": True, "backend": kernel}
    right = flash_dmattn.attention(*tensors, selection=selection, **options)
    found = flash_dmattn.attention(*tensors, selection=small, **options)
    if device == "cuda":
        lost = found[1].isnan()  # [batch, q_heads, q_len]
        assert lost.any() and (lost | (found[1] == right[1])).all()
        assert torch.equal(found[0].isnan().all(-1), lost.transpose(1, 2))
        found[0].sum().backward()
        assert tensors[0].grad.isnan().any()
        return
    assert_same(found, right)
    if kernel == "reference":
        found[0].sum().backward()
        return
    with pytest.raises(ValueError, match="selection: keeps 64 keys at some position"):
        found[0].sum().backward()


# ---- properties of results and gradients ----


def input_for(name: str, kernel: str | None) -> cases.Input:
    return make_input(name, torch.float32 if kernel in cases.WIDE else torch.bfloat16)


SELECTED = ["later/steps", "padding/holes", "global/causal", "dense/pad-left", "scores/saw"]


@pytest.mark.parametrize(("device", "kernel"), TARGETS)
@pytest.mark.parametrize("name", SELECTED)
def test_keys_that_nobody_keeps_are_not_read(name: str, device: str, kernel: str | None) -> None:
    given = input_for(name, kernel)
    unread = ~make_mask(name).any(2).expand(given.score.shape)  # [batch, kv_heads, kv_len]
    rows = unread.transpose(1, 2)[..., None]
    poisoned = given._replace(
        key=given.key.masked_fill(rows, math.nan),
        value=given.value.masked_fill(rows, math.nan),
        bias=given.bias.masked_fill(unread, math.nan),
    )
    found = [
        cases.attend_and_differentiate(name, one, kernel, device, deterministic=True)
        for one in (given, poisoned)
    ]
    assert_same(found[0], found[1])
    *_, dkey, dvalue, dbias = (one.cpu() for one in found[0])
    assert unread.any() and (dbias[unread] == 0).all()
    rows = rows.expand_as(dkey)
    for gradient in (dkey, dvalue):
        assert (gradient[rows] == 0).all() and (gradient[~rows] != 0).any()


@pytest.mark.parametrize("kernel", cases.WIDE)
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


@pytest.mark.parametrize(("device", "kernel"), TARGETS)
@pytest.mark.parametrize("name", ["later/steps", "padding/left", "dense/pad-holes"])
def test_a_sequence_does_not_feel_its_batch(name: str, device: str, kernel: str | None) -> None:
    given, target = make_input(name, torch.bfloat16), (kernel, device)
    together = cases.attend_and_differentiate(name, given, *target, deterministic=True)
    for b in range(cases.CASES[name].batch):
        one = cases.Input(*(None if x is None else x[b : b + 1] for x in given))
        alone = cases.attend_and_differentiate(name, one, *target, deterministic=True)
        assert_same(alone, tuple(x[b : b + 1] for x in together))


@pytest.mark.parametrize("kernel", cases.WIDE)
@pytest.mark.parametrize("name", ["dense/causal-131", "scores/saw", "group/16"])
def test_threads_change_nothing(name: str, kernel: str) -> None:
    given = make_input(name, torch.float32)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3, 1):
            torch.set_num_threads(count)
            found.append(cases.attend_and_differentiate(name, given, kernel))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert_same(other, found[0])


@pytest.mark.parametrize("device", DEVICES)
def test_layouts_are_kept_apart(device: str) -> None:
    """Alternating calls of different shapes and options give the results of first calls."""
    shapes = [(150, 300), (150, 301), (1, 300), (300, 300)]
    inputs = [make_fused(*shape, device=device) for shape in shapes]
    expected = [stepwise(*tensors) for tensors in inputs]
    for _ in range(3):
        for tensors, want in zip(inputs, expected):
            assert_same(stepwise(*tensors), want)


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


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch, dispatched_only: None) -> Spy:
    spy = Spy(_library.library)  # known calls have the library's own functions
    monkeypatch.setattr(_library, "library", spy)
    return spy


def spied_forward(spy: Spy, tensors: cases.Tensors) -> _library.Struct:
    flash_dmattn.attention(*tensors, causal=True)
    return spy.calls["fdma_forward"]


def heads_first() -> cases.Tensors:
    return tuple(torch.randn(2, heads, 31, 64).transpose(1, 2) for heads in (4, 2, 2))


def slices_of_one_buffer() -> cases.Tensors:
    return torch.randn(2, 31, 3, 2, 64).unbind(2)


@pytest.mark.parametrize("make", [heads_first, slices_of_one_buffer])
def test_views_are_not_copied(make: Callable[[], cases.Tensors], spy: Spy) -> None:
    tensors = make()
    args = spied_forward(spy, tensors)
    for name, tensor in zip("qkv", tensors):
        seen = getattr(args, name)
        assert not tensor.is_contiguous()
        assert seen.data == tensor.data_ptr()
        assert tuple(seen.stride) == tensor.stride()
        assert tuple(seen.shape) == tensor.shape
    assert args.exec.threads == torch.get_num_threads()


@pytest.mark.parametrize("device", DEVICES)
def test_only_a_strided_last_axis_is_copied(device: str, spy: Spy) -> None:
    query, key = torch.randn(2, 1, 31, 2, 64).bfloat16().to(device)
    value = torch.randn(1, 64, 31, 2).bfloat16().to(device).permute(0, 2, 3, 1)
    expected = flash_dmattn.attention(query, key, value.contiguous(), causal=True)
    args = spied_forward(spy, (query, key, value))
    assert args.q.data == query.data_ptr() and args.k.data == key.data_ptr()
    assert args.v.data != value.data_ptr() and args.v.stride[3] == 1
    assert_same(flash_dmattn.attention(query, key, value, causal=True), expected)


def test_every_call_is_told_what_its_selection_was_made_for(spy: Spy) -> None:
    tensors = make_fused(60)
    for out, *_ in (stepwise(*tensors, **cases.RULES), fused(*tensors, **cases.RULES)[None]):
        out.sum().backward()
    made = [spy.calls[f"fdma_{name}"] for name in ("select", "attention")]
    given = [spy.calls[f"fdma_{name}"] for name in ("forward", "backward", "attention_backward")]
    rules = (cases.WINDOW, *cases.RULES.values())
    for struct in (*made, *(one.selection.contents for one in (*made, *given))):
        assert (struct.window, struct.recent, struct.sinks) == rules


@pytest.mark.parametrize("shape", [(0, 4, 4), (1, 0, 4), (1, 4, 0), (1, 0, 0)])
@pytest.mark.parametrize("selected", [False, True])
def test_nothing_to_attend_to(selected: bool, shape: tuple[int, int, int]) -> None:
    batch, q_len, kv_len = shape
    tensors = [torch.randn(batch, q_len, 4, 16)]
    tensors += [torch.randn(batch, kv_len, 2, 16) for _ in range(2)]
    if selected:
        tensors += [torch.randn(2, 32), torch.zeros(2)]
        out, lse = fused(*(x.requires_grad_() for x in tensors), causal=False, return_lse=True)
    else:
        out, lse = flash_dmattn.attention(*(x.requires_grad_() for x in tensors))
    assert torch.equal(out, torch.zeros(batch, q_len, 4, 16))
    assert torch.equal(lse, torch.full((batch, 4, q_len), -math.inf))
    found = torch.autograd.grad(out.sum(), tensors)
    assert_same(found, tuple(torch.zeros_like(tensor) for tensor in tensors))


def test_backends() -> None:
    backends = flash_dmattn.get_available_backends()
    assert backends[-1] == "reference" and "cpu" in backends
    assert (backends[0] == "cuda") == cases.HAS_DEVICE
    assert len(set(backends)) == len(backends)
    for backend in backends:
        if backend != "cuda":  # "cuda" is for CUDA tensors
            attend("scores/saw", make_input("scores/saw", torch.float32), backend)


def test_inputs_stay_as_they_were() -> None:
    given = make_input("padding/holes", torch.float32)
    before = [None if one is None else one.clone() for one in given]
    cases.attend_and_differentiate("padding/holes", given)
    for one, copy in zip(given, before):
        assert one is None or torch.equal(one, copy)
