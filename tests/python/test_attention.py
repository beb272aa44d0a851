"""score, attention and flash_dma_attention against the float64 oracle, on every kernel."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import flash_dmattn
import oracle
import pytest
import torch
from flash_dmattn import _call, _library, ops

KERNELS = list(
    dict.fromkeys(
        row.name
        for row in _library.kernels()
        if row.missing is None and not row.name.startswith("cuda/")
    )
)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def takes(kernel: str, dtype: torch.dtype) -> bool:
    row = torch.zeros(1, 1, 1, 8, dtype=dtype)
    try:
        flash_dmattn.attention(row, row, row, backend=kernel)
    except NotImplementedError:
        return False
    return True


RUNS = [
    pytest.param(kernel, dtype, id=f"{kernel}-{dtype}".replace("torch.", ""))
    for kernel in KERNELS
    for dtype in DTYPES
    if takes(kernel, dtype)
]
WIDE = [kernel for kernel in KERNELS if takes(kernel, torch.float32)]


def test_every_kernel_takes_something() -> None:
    for kernel in KERNELS:
        assert takes(kernel, torch.bfloat16)
        assert takes(kernel, torch.float64) == (kernel == "reference")
    assert {"cpu/scalar", "reference"} <= set(WIDE)


class Case(NamedTuple):
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None  # None: dense
    causal: bool = True
    scope: str = "causal"
    batch: int = 1
    bias: bool = True
    padding: bool = False
    softcap: float = 0.0
    softmax_scale: float | None = None


CASES = {
    "dense": Case(33, 33, 2, 2, 64, causal=False),
    "dense causal": Case(131, 131, 2, 1, 64),
    "dense without bias": Case(70, 70, 3, 3, 40, causal=False, bias=False),
    "more queries than keys": Case(40, 23, 2, 2, 16),
    "more keys than queries": Case(17, 101, 4, 2, 32),
    "one query": Case(1, 77, 4, 1, 128, 20),
    "one key": Case(1, 1, 1, 1, 8, 1),
    "selected": Case(67, 67, 2, 2, 64, 16, batch=2),
    "selected over tiles": Case(211, 211, 4, 2, 128, 48),
    "selected, later queries": Case(50, 150, 2, 1, 64, 30),
    "window 1": Case(41, 41, 2, 1, 24, 1),
    "window of all": Case(37, 37, 2, 1, 16, 37),
    "window beyond all": Case(37, 37, 2, 1, 16, 1 << 40),
    "global": Case(30, 90, 2, 2, 32, 25, False, "global"),
    "global, more queries": Case(90, 30, 2, 2, 32, 12, False, "global"),
    "global causal": Case(60, 60, 4, 2, 32, 25, True, "global"),
    "padding": Case(45, 45, 2, 1, 32, 8, batch=2, padding=True),
    "padding, dense": Case(45, 45, 2, 1, 32, causal=False, batch=2, padding=True),
    "padding, global": Case(45, 45, 2, 1, 32, 8, False, "global", batch=2, padding=True),
    "group of 16": Case(29, 29, 16, 1, 64, 9),
    "group of 3": Case(38, 38, 9, 3, 72, 9),
    "head_dim 256": Case(34, 34, 2, 1, 256, 10),
    "head_dim 8": Case(34, 34, 2, 1, 8, 10),
    "softcap": Case(52, 52, 2, 1, 48, 12, softcap=1.5),
    "scale": Case(52, 52, 2, 1, 48, 12, softmax_scale=0.8),
}


class Input(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    score: torch.Tensor
    bias: torch.Tensor | None
    key_valid: torch.Tensor | None

    def options(self, case: Case) -> dict[str, Any]:
        return {
            "bias": self.bias,
            "softmax_scale": case.softmax_scale,
            "softcap": case.softcap,
        }


@functools.cache
def make_input(name: str, dtype: torch.dtype) -> Input:
    case = CASES[name]
    generator = torch.Generator().manual_seed(sum(map(ord, name)))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    score = normal(case.batch, case.kv_heads, case.kv_len)
    key_valid = None
    if case.padding:
        keys = torch.arange(case.kv_len)
        key_valid = torch.stack([keys % 4 != b for b in range(case.batch)])
        key_valid[0, :7] = False
    keys_shape = (case.batch, case.kv_len, case.kv_heads, case.head_dim)
    return Input(
        query=normal(case.batch, case.q_len, case.q_heads, case.head_dim).to(dtype),
        key=normal(*keys_shape).to(dtype),
        value=normal(*keys_shape).to(dtype),
        score=score,
        bias=score.exp() if case.bias else None,
        key_valid=key_valid,
    )


@functools.cache
def expected_mask(name: str) -> torch.Tensor:
    case = CASES[name]
    given = make_input(name, torch.float32)
    kept = None
    if case.window is not None:
        kept = oracle.kept_keys(given.score, case.window, case.scope, given.key_valid)
        if case.scope == "global":  # one set for all, also for queries beyond the last key
            kept = kept[:, :, :1].expand(-1, -1, max(case.q_len, case.kv_len), -1)
    return oracle.visible_keys(case.q_len, case.kv_len, case.causal, kept, given.key_valid)


def run(name: str, given: Input, backend: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    case = CASES[name]
    selection = None
    if case.window is not None:
        selection = flash_dmattn.select(
            given.score, case.window, scope=case.scope, key_valid=given.key_valid, backend=backend
        )
    return flash_dmattn.attention(
        given.query,
        given.key,
        given.value,
        selection=selection,
        key_valid=given.key_valid,
        causal=case.causal,
        backend=backend,
        **given.options(case),
    )


@pytest.mark.parametrize(("kernel", "dtype"), RUNS)
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, kernel: str, dtype: torch.dtype) -> None:
    given = make_input(name, dtype)
    out, lse = run(name, given, kernel)
    assert out.is_contiguous() and lse.is_contiguous()
    oracle.assert_attention(
        out,
        lse,
        given.query,
        given.key,
        given.value,
        expected_mask(name),
        **given.options(CASES[name]),
    )


@pytest.mark.parametrize(("kernel", "dtype"), RUNS)
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

    def evaluate(at: torch.dtype, order: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        dt = value.to(at).flatten(2)[..., order] @ dt_proj.to(at)[:, order].T
        z = a_coef.to(at) * (dt.clamp(min=0) + torch.log1p(torch.exp(-dt.abs())))
        return torch.where(key_valid[:, None], z.transpose(1, 2), -math.inf)

    orders = oracle.orders_of(kv_heads * head_dim, score.numel())
    plain = [evaluate(oracle.plain_dtype(score.dtype), order) for order in orders]
    oracle.assert_within(score, evaluate(torch.float64), *plain)
    form = {"exp": torch.exp, "linear": torch.clone}.get(bias_form)
    if form is None:
        assert bias is None
    else:
        oracle.assert_within(bias, form(score.double()), form(score))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
def test_flash_dma_attention(causal: bool, dtype: torch.dtype) -> None:
    batch, length, q_heads, kv_heads, head_dim, window = 2, 83, 4, 2, 32, 19
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(batch, length, q_heads, head_dim, generator=generator).to(dtype)
    key, value = torch.randn(2, batch, length, kv_heads, head_dim, generator=generator).to(dtype)
    dt_proj = (torch.randn(kv_heads, kv_heads * head_dim, generator=generator) / 8).to(dtype)
    a_coef = torch.randn(kv_heads, generator=generator).to(dtype)
    out = flash_dmattn.flash_dma_attention(
        query, key, value, dt_proj, a_coef, keep_window_size=window, causal=causal
    )
    scope = "causal" if causal else "global"
    everything = ops.flash_dma_attention_op(
        query, key, value, dt_proj, a_coef, None, window, scope, "exp", causal, 0.0, 0.0, None
    )
    assert torch.equal(out, everything[0])
    _, lse, score, bias, expiry, slot = everything
    selection = flash_dmattn.select(score, window, scope=scope)
    assert torch.equal(expiry, selection.expiry) and torch.equal(slot, selection.slot)
    kept = oracle.kept_keys(score, window, scope)
    mask = oracle.visible_keys(length, length, causal, kept)
    oracle.assert_attention(out, lse, query, key, value, mask, bias=bias)


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


SELECTED = ["selected", "padding", "global", "padding, dense"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", SELECTED)
def test_keys_that_nobody_keeps_are_not_read(name: str, kernel: str) -> None:
    given = make_input(name, torch.float32 if kernel in WIDE else torch.bfloat16)
    unread = ~expected_mask(name).any(2)  # [batch, kv_heads, kv_len]
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
    """-inf weighs nothing, a row of them is empty; +inf and NaN make their rows NaN."""
    generator = torch.Generator().manual_seed(7)
    query = torch.randn(1, 70, 2, 16, generator=generator)
    key, value = torch.randn(2, 1, 70, 1, 16, generator=generator)
    bias = torch.zeros(1, 1, 70)
    bias[..., :20] = -math.inf  # rows 0 to 19 have nothing else
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
    mask = oracle.visible_keys(70, 70, True)
    exact = oracle.evaluate(query, key, value, mask, torch.float64, bias=bias)
    plain = oracle.evaluate(query, key, value, mask, torch.float32, bias=bias)
    oracle.assert_within(out[:, whole], exact.out[:, whole], plain.out[:, whole])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["selected", "padding", "padding, dense"])
def test_a_sequence_does_not_feel_its_batch(name: str, kernel: str) -> None:
    given = make_input(name, torch.bfloat16)
    out, lse = run(name, given, kernel)
    for b in range(CASES[name].batch):
        alone = Input(*(None if part is None else part[b : b + 1] for part in given))
        one_out, one_lse = run(name, alone, kernel)
        assert torch.equal(one_out, out[b : b + 1])
        assert torch.equal(one_lse, lse[b : b + 1])


@pytest.mark.parametrize("name", ["dense causal", "selected over tiles", "group of 16"])
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
    """Stands for the library; keeps the arguments that a call was made with."""

    def __init__(self, library: Any) -> None:  # noqa: ANN401
        self.library = library
        self.calls: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        function = getattr(self.library, name)

        def call(*arguments: Any) -> Any:  # noqa: ANN401
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
    )  # what is prepared calls the library itself
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
    given = make_input("selected", torch.float32)
    for backend in backends:
        if backend != "cuda":  # of other tensors
            run("selected", given, backend)


def test_inputs_stay_as_they_were() -> None:
    given = make_input("padding", torch.float32)
    before = [None if part is None else part.clone() for part in given]
    run("padding", given)
    for part, copy in zip(given, before):
        assert part is None or torch.equal(part, copy)
