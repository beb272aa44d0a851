"""score and attention against evaluations in float64, and by their properties, on kernels of the
CPU, and on a CUDA device if there is one. test_fused.py tests flash_dma_attention()."""

from __future__ import annotations

import math
from typing import Any, Callable

import cases
import evaluate
import flash_dmattn
import pytest
import torch
from cases import (
    CASES,
    DEVICES,
    FEATURES,
    attend,
    fused,
    make_fused,
    make_input,
    make_mask,
    on_device,
    stepwise,
)
from evaluate import assert_same
from flash_dmattn import _library

RUNS = cases.runs_of(cases.KERNELS, cases.DTYPES)
TARGETS = [("cpu", kernel) for kernel in cases.KERNELS]
TARGETS.append(pytest.param("cuda", None, marks=on_device))
NAMES = [*cases.NAMES, "row/empty-rows", "row/1000", *FEATURES]


def test_what_kernels_support() -> None:
    for kernel in cases.KERNELS:
        assert cases.supports(kernel, torch.bfloat16)
        assert cases.supports(kernel, torch.float64) == (kernel == "reference")
    assert {"cpu/scalar", "reference"} <= set(cases.WIDE)


def assert_probabilities(
    found: torch.Tensor, lse: torch.Tensor, given: cases.Input, mask: torch.Tensor, **options: Any
) -> None:
    """They are by the formula from lse, and 0 where a key is not kept or is dropped."""
    options.pop("sink_logit")
    factors = options.pop("factors", torch.ones(()))

    def evaluated(dtype: torch.dtype, order: torch.Tensor) -> torch.Tensor:
        rows = (given.query[..., order], given.key[..., order], given.value)
        heads = evaluate.make_logits(*rows, mask, dtype, **options)
        weights = torch.exp(heads.logits - lse.to(dtype)[..., None]) * factors.to(dtype)
        return torch.where(heads.mask, weights, 0)

    orders = evaluate.orders_of(given.query.shape[3], lse.numel())
    exact = evaluated(torch.float64, orders[0])
    plain = [evaluated(evaluate.plain_dtype(lse.dtype), order) for order in orders]
    evaluate.assert_within(found, exact, *plain)
    assert (found[exact == 0] == 0).all()


@pytest.mark.parametrize(("name", "device", "kernel", "dtype"), cases.chosen_runs(NAMES, RUNS))
def test_against_float64(name: str, device: str, kernel: str | None, dtype: torch.dtype) -> None:
    """out, lse and the probabilities."""
    given, mask = make_input(name, dtype), make_mask(name)
    options = cases.options_of(name, given)
    with torch.no_grad():
        _, results = attend(name, given, kernel, device)
    assert all(one.is_contiguous() and one.device.type == device for one in results)
    evaluate.assert_attention(results, *given[:3], mask, **options)
    if name.startswith("row/1"):
        return
    found = cases.probabilities_of(name, given, results[1], kernel)
    assert found.dtype == results[1].dtype and found.device.type == device
    assert found.is_contiguous()
    assert_probabilities(found.cpu(), results[1].cpu(), given, mask, **options)


SCORES = [f"{form} {weights}" for form in ("exp", "linear", "none") for weights in ("same", "wide")]
SCORE_RUNS = cases.runs_of(cases.kernels_of("score"), cases.DTYPES)


@pytest.mark.parametrize("dt_bias", [None, (1.5, -2.25, 0.5)])
@pytest.mark.parametrize(
    ("name", "device", "kernel", "dtype"), cases.chosen_runs(SCORES, SCORE_RUNS, 4)
)
def test_score(
    name: str, device: str, kernel: str | None, dtype: torch.dtype, dt_bias: Any
) -> None:
    """The weights are of value's dtype or float32. Scores are float32, except of float64. Tensor
    cores truncate sums, which doubles the error."""
    bias_form, weights = name.split()
    batch, kv_len, kv_heads, head_dim = 2, 53, 3, 24
    generator = torch.Generator().manual_seed(3)
    value = torch.randn(batch, kv_len, kv_heads, head_dim, generator=generator).to(dtype)
    kind = dtype if weights == "same" else torch.float32
    dt_proj = (torch.randn(kv_heads, kv_heads * head_dim, generator=generator) / 4).to(kind)
    a_coef = torch.randn(kv_heads, generator=generator).to(kind)
    dt_bias = None if dt_bias is None else torch.tensor(dt_bias, dtype=kind)
    key_valid = torch.rand(batch, kv_len, generator=generator) < 0.8
    given = {"dt_proj": dt_proj, "a_coef": a_coef, "dt_bias": dt_bias, "key_valid": key_valid}
    on_target = {one: None if x is None else x.to(device) for one, x in given.items()}
    score, bias = (
        None if x is None else x.cpu()
        for x in flash_dmattn.score(
            value.to(device), **on_target, bias_form=bias_form, backend=kernel
        )
    )

    def evaluated(at: torch.dtype, order: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        shuffled = value.flatten(2)[..., order].view_as(value)
        score = evaluate.score(shuffled, dt_proj[:, order], a_coef, at, dt_bias)
        return torch.where(key_valid[:, None], score, -math.inf)

    assert score.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    orders = evaluate.orders_of(kv_heads * head_dim, score.numel())
    plain = [evaluated(evaluate.plain_dtype(score.dtype), order) for order in orders]
    factor = 4 if device == "cuda" else 2
    evaluate.assert_within(score, evaluated(torch.float64), *plain, factor=factor)
    form = {"exp": torch.exp, "linear": torch.clone}.get(bias_form)
    if form is None:
        assert bias is None
    else:
        evaluate.assert_within(bias, form(score.double()), form(score))


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


# Cases whose sequences have all tensors of their own, but for sink logits.
ALONE = ["later/steps", "padding/left", "dense/pad-holes", "feature/used", "feature/used-full"]
ALONE += ["feature/used-selected", "feature/sink-selected", "feature/gap-rules"]


def input_for(name: str, kernel: str | None) -> cases.Input:
    return make_input(name, torch.float32 if kernel in cases.WIDE else torch.bfloat16)


def has_unread(name: str) -> bool:
    return bool((~make_mask(name).any(2)).any())


UNREAD = [
    "later/steps",
    "padding/holes",
    "global/causal",
    "dense/pad-left",
    "scores/saw",
    *FEATURES,
]


@pytest.mark.parametrize(
    ("name", "device", "kernel"),
    cases.chosen_targets(list(filter(has_unread, UNREAD)), cases.KERNELS),
)
def test_keys_that_nobody_keeps_are_not_read(name: str, device: str, kernel: str | None) -> None:
    """Nor are biases of pairs that are not kept."""
    given, mask = input_for(name, kernel), make_mask(name)
    kv_heads = given.key.shape[2]
    unread = ~evaluate.spread_heads(mask, CASES[name].q_heads).any(2)
    unread = unread.unflatten(1, (kv_heads, -1)).all(2)  # [batch, kv_heads, kv_len]
    rows = unread.transpose(1, 2)[..., None]
    changes = {one: getattr(given, one).masked_fill(rows, math.nan) for one in ("key", "value")}
    if given.bias is not None:
        changes["bias"] = given.bias.masked_fill(unread, math.nan)
    if given.attn_bias is not None:
        hidden = 1 - evaluate.sum_as(mask.float(), given.attn_bias.shape).clamp(max=1)
        changes["attn_bias"] = given.attn_bias.masked_fill(hidden.bool(), math.nan)
    found = [
        cases.attend_and_differentiate(name, one, kernel, device, deterministic=True)
        for one in (given, given._replace(**changes))
    ]
    assert_same(found[0], found[1])
    gradients = {one: x.cpu() for one, x in zip(given.leaves, found[0][2:])}
    if "bias" in gradients:
        assert (gradients["bias"][unread] == 0).all()
    rows = rows.expand_as(given.key)
    for one in ("key", "value"):
        assert (gradients[one][rows] == 0).all()
        assert rows.all() or (gradients[one][~rows] != 0).any()


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


@pytest.mark.parametrize(
    ("name", "device", "kernel"),
    cases.chosen_targets(ALONE, cases.KERNELS),
)
def test_a_sequence_does_not_feel_its_batch(name: str, device: str, kernel: str | None) -> None:
    given, target = make_input(name, torch.bfloat16), (kernel, device)
    together = cases.attend_and_differentiate(name, given, *target, deterministic=True)
    for b in range(cases.CASES[name].batch):
        one = cases.Input(*(None if x is None else x[b : b + 1] for x in given))
        one = one._replace(sink_logit=given.sink_logit)
        alone = cases.attend_and_differentiate(name, one, *target, deterministic=True)
        found = [x[b : b + 1] for x in together]
        if given.sink_logit is not None:  # its gradient is a sum over all sequences
            alone, found = alone[:-1], found[:-1]
        assert_same(alone, tuple(found))


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("dense/causal-131", cases.WIDE[0]),
        ("scores/saw", "cpu/scalar"),
        ("group/16", "reference"),
        ("feature/pairs-9", cases.WIDE[0]),
        ("feature/sink-selected", cases.WIDE[0]),
    ],
)
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


# ---- attention_probabilities() beside the cases ----


def test_every_name_of_a_kernel_of_forward_will_do() -> None:
    names = [
        one.name
        for one in _library.kernels()
        if one.operation == "forward" and one.missing is None and one.name.startswith("cpu/")
    ]
    query, key = torch.randn(1, 1, 2, 16).bfloat16(), torch.randn(1, 9, 1, 16).bfloat16()
    expected = None
    for name in names:
        _, lse = flash_dmattn.attention(query, key, key, backend=name)
        found = flash_dmattn.attention_probabilities(query, key, lse, backend=name)
        expected = found if expected is None else expected
        torch.testing.assert_close(found, expected)


def test_an_lse_of_more_keys() -> None:
    """A row sums to the share that its keys have in the whole."""
    query, key = torch.randn(1, 5, 2, 16), torch.randn(1, 12, 1, 16)
    halves = key.split(6, 1)
    lses = [flash_dmattn.attention(query, half, half)[1] for half in halves]
    lse = torch.logaddexp(*lses)
    for half, own in zip(halves, lses):
        row_sums = flash_dmattn.attention_probabilities(query, half, lse).sum(-1)
        torch.testing.assert_close(row_sums, torch.exp(own - lse))


def test_a_compiled_call() -> None:
    tensors = [tensor.detach() for tensor in make_fused(20)]

    def call(*tensors: torch.Tensor) -> Any:
        return fused(*tensors, return_attn_probs=True, return_lse=True)

    assert_same(torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors), call(*tensors))


def test_autocast() -> None:
    query, key = torch.randn(1, 5, 2, 16), torch.randn(1, 5, 2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        _, lse = flash_dmattn.attention(query, key, key)
        found = flash_dmattn.attention_probabilities(query, key, lse)
    rows = query.bfloat16(), key.bfloat16()
    assert_same(found, flash_dmattn.attention_probabilities(*rows, lse))
    assert found.dtype == torch.float32 and math.isclose(
        found[0, 0, 0].sum().item(), 1, abs_tol=1e-5
    )
