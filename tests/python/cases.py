"""Inputs of the tests: the shapes and options of tests/cases.def, and a table of the features that
attention has beside these, with random tensors."""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path
from typing import Any, Callable, NamedTuple, Sequence, Tuple

import evaluate
import flash_dmattn
import pytest
import torch
from flash_dmattn import _arguments, _library
from samples import FULL

Tensors = Tuple[torch.Tensor, ...]


class Case(NamedTuple):
    """A line of tests/cases.def, which explains the words, and what only features have."""

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    window: int | None  # None: dense
    mask: str
    bias_form: str
    softcap: float
    scores: str
    layout: str
    padding: str
    recent: int = 0
    sinks: int = 0
    gap: float | None = None
    softmax_scale: float | None = None
    kv_used: tuple[int, ...] | None = None
    starts: tuple[int, ...] | None = None
    mask_shape: tuple[int, ...] | None = None  # of attn_mask
    bias_shape: tuple[int, ...] | None = None  # of attn_bias
    has_sink: bool = False
    dropout_p: float = 0.0

    @property
    def causal(self) -> bool:
        return self.mask != "FULL"

    @property
    def scope(self) -> str:
        return "causal" if self.mask == "CAUSAL" else "global"

    @property
    def rules(self) -> dict[str, Any]:
        return {"recent": self.recent, "sinks": self.sinks, "gap": self.gap}

    @property
    def numbers(self) -> dict[str, Any]:
        return {"softcap": self.softcap, "softmax_scale": self.softmax_scale}


def read_cases() -> dict[str, Case]:
    text = (Path(__file__).parents[1] / "cases.def").read_text()
    found = {}
    for line in re.findall(r"^CASE(?:_RULES)?\((.*)\)$", text, re.MULTILINE):
        name, *rest = (field.strip().strip('"') for field in line.split(","))
        sizes, (mask, form, softcap, *words) = [int(number) for number in rest[:7]], rest[7:13]
        rules = [int(number) for number in rest[13:]]
        window = None if sizes[6] < 0 else sizes[6]
        found[name] = Case(*sizes[:6], window, mask, form, float(softcap), *words, *rules)
    assert len(found) > 100
    return found


CASES = read_cases()
# One of each kind, all small: the C tests run all of them on every kernel.
NAMES = """
    dense/one dense/one-gqa dense/causal-131 dense/full-65 dense/later dense/more-queries
    dense/empty-rows dense/softcap dense/exp dense/pad-left dense/pad-holes dense/pad-all
    group/1 group/2 group/3 group/5 group/8 group/16 head-dim/8 head-dim/40 head-dim/72
    head-dim/128 head-dim/256 window/1 window/2 window/len-1 window/len window/len+7 window/huge
    scores/tied scores/rising scores/falling scores/saw later/steps global/full global/causal
    global/more global/padding padding/left padding/holes padding/all softcap/selected
    softcap/global row/full row/seven-queries
""".split()
NAMES += [
    name for name, case in CASES.items() if max(case.recent, case.sinks) > 0 and case.kv_len <= 700
]

# ---- features ----

PLAIN = {
    **{"batch": 2, "q_len": 37, "kv_len": 53, "q_heads": 6, "kv_heads": 3, "head_dim": 16},
    **{"window": None, "mask": "CAUSAL", "bias_form": "LINEAR", "softcap": 0.0, "scores": "IID"},
    **{"layout": "PLAIN", "padding": "NONE"},
}
SELECTED = {"window": 9, "recent": 7, "sinks": 2, "softcap": 3.0}
IN_GLOBAL_SCOPE = {"window": 20, "mask": "GLOBAL"}
USED = {"batch": 6, "q_len": 20, "kv_len": 90, "kv_used": (0, 1, 13, 20, 57, 90)}
# Sequences of 1, 59, 0 and 40 positions. The last 3 positions belong to none.
PACKED = {"batch": 1, "q_len": 103, "kv_len": 103, "starts": (0, 1, 60, 60, 100)}
# Every combination of broadcast axes; the heads may also be kv heads.
PAIR_SHAPES = list(itertools.product((1, 2), (1, 3, 6), (1, 37), (1, 53)))
PAIRS = {"mask_shape": PAIR_SHAPES[-1], "bias_shape": PAIR_SHAPES[-1]}
FEATURES: dict[str, dict[str, Any]] = {
    "feature/scale": {"softmax_scale": 0.8, "softcap": 1.5, "bias_form": "NONE"},
    "feature/gap": {"window": 20, "gap": 0.5},
    "feature/gap-rules": {**SELECTED, "gap": 0.2, "padding": "HOLES"},
    "feature/used": USED,
    "feature/used-full": {**USED, "mask": "FULL", "padding": "HOLES"},
    "feature/used-selected": {**USED, **SELECTED},
    "feature/used-global": {**USED, **IN_GLOBAL_SCOPE},
    "feature/packed": PACKED,
    "feature/packed-full": {**PACKED, "mask": "FULL", "bias_form": "NONE"},
    "feature/packed-selected": {**PACKED, **SELECTED, "gap": 0.3},
    "feature/packed-global": {**PACKED, **IN_GLOBAL_SCOPE},
    "feature/mask-selected": {**SELECTED, "mask_shape": (2, 3, 37, 53), "has_sink": True},
    "feature/bias-selected": {**IN_GLOBAL_SCOPE, "bias_shape": (1, 3, 37, 53)},
    "feature/sink": {"has_sink": True},
    "feature/sink-padding": {"has_sink": True, "padding": "ALL", "mask": "FULL"},
    "feature/sink-selected": {"has_sink": True, **SELECTED},
    # 1 / (1 - dropout_p) is exact in float32, which kernels multiply by. Forms have other numbers.
    "feature/dropout": {"dropout_p": 0.75, "bias_form": "NONE"},
    "feature/dropout-half": {"dropout_p": 0.5, "mask": "FULL", **PAIRS},
    "feature/dropout-selected": {"dropout_p": 0.5, "has_sink": True, **SELECTED},
    **{
        f"feature/pairs-{n}": {
            **{"mask_shape": PAIR_SHAPES[-1 - n], "bias_shape": shape},
            **{"mask": ("CAUSAL", "FULL")[n % 2], "softcap": 1.5 * (n % 3 == 0)},
        }
        for n, shape in enumerate(PAIR_SHAPES)
    },
    # Kernels get zeros for the missing channels.
    "feature/head-dim-3": {"head_dim": 3},
    "feature/head-dim-12": {"head_dim": 12, **SELECTED},
    "feature/head-dim-20": {"head_dim": 20, "mask": "FULL", "bias_form": "NONE"},
    "feature/head-dim-packed": {"head_dim": 12, **PACKED},
}
CASES.update({name: Case(**{**PLAIN, **one}) for name, one in FEATURES.items()})


class Input(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    score: torch.Tensor
    bias: torch.Tensor | None
    attn_bias: torch.Tensor | None
    sink_logit: torch.Tensor | None
    key_valid: torch.Tensor | None
    kv_used: torch.Tensor | None
    starts: torch.Tensor | None
    attn_mask: torch.Tensor | None
    rng_state: torch.Tensor | None
    dout: torch.Tensor

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        """What has a gradient."""
        names = ("query", "key", "value", "bias", "attn_bias", "sink_logit")
        found = {name: getattr(self, name) for name in names}
        return {name: x for name, x in found.items() if x is not None}

    def on(self, device: str) -> Input:
        return Input(*(None if x is None else x.to(device) for x in self))


def make_score(case: Case, generator: torch.Generator) -> torch.Tensor:
    shape = (case.batch, case.kv_heads, case.kv_len)
    rising = torch.arange(case.kv_len, dtype=torch.float32).expand(shape).contiguous()
    return {
        "IID": torch.randn(shape, generator=generator),
        "TIED": torch.zeros(shape),
        "RISING": rising,
        "FALLING": -rising,
        "SAW": rising % 29,
        "STEPS": torch.randint(4, shape, generator=generator).float(),
    }[case.scores]


def make_key_valid(case: Case) -> torch.Tensor | None:
    """bool [batch, kv_len]; sequences have padding of different lengths."""
    key, b = torch.arange(case.kv_len), torch.arange(case.batch)[:, None]
    return {
        "NONE": None,
        "LEFT": key >= 7 * (b + 1),
        "RIGHT": key < case.kv_len - 7 * (b + 1),
        "HOLES": (key + b) % 7 != 2,
        "ALL": (key >= 0) & (b > 0),  # the first sequence has no valid key
    }[case.padding]


def ints(numbers: Sequence[int] | None) -> torch.Tensor | None:
    return None if numbers is None else torch.tensor(numbers, dtype=torch.int32)


def make_pairs(
    case: Case, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """attn_mask and attn_bias. Some queries have no key."""
    mask = bias = None
    if case.mask_shape is not None:
        mask = torch.rand(case.mask_shape, generator=generator) < 0.4
    if case.bias_shape is not None:
        bias = torch.randn(case.bias_shape, generator=generator).to(dtype)
    return mask, bias


@functools.lru_cache(maxsize=None)
def make_input(name: str, dtype: torch.dtype) -> Input:
    case, wide = CASES[name], _arguments.wide(dtype)
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 1)

    def rows(length: int, heads: int) -> torch.Tensor:
        """[batch, length, heads, head_dim], in the layout of the case."""
        shape = (case.batch, length, 3 * heads, case.head_dim)
        packed = torch.randn(shape, generator=generator).to(dtype)
        middle = packed[:, :, heads : 2 * heads]
        if case.layout == "SWAP":
            return middle.transpose(1, 2).contiguous().transpose(1, 2)
        return middle if case.layout == "PACK" else middle.contiguous()

    query, dout = rows(case.q_len, case.q_heads), rows(case.q_len, case.q_heads)
    key, value = rows(case.kv_len, case.kv_heads), rows(case.kv_len, case.kv_heads)
    bias = torch.randn(case.batch, case.kv_heads, case.kv_len, generator=generator)
    # A bias that every dtype can hold, so that a plain evaluation in 16 bits has no error from it.
    bias = None if case.bias_form == "NONE" else bias.to(torch.bfloat16).float()
    score = make_score(case, generator)
    attn_mask, attn_bias = make_pairs(case, dtype, generator)
    return Input(
        **{"query": query, "key": key, "value": value, "score": score, "bias": bias, "dout": dout},
        **{"attn_mask": attn_mask, "attn_bias": attn_bias, "key_valid": make_key_valid(case)},
        **{"kv_used": ints(case.kv_used), "starts": ints(case.starts)},
        sink_logit=torch.linspace(-2, 3, case.q_heads).to(wide) if case.has_sink else None,
        rng_state=torch.tensor(STATE) if case.dropout_p > 0 else None,
    )


STATE = (0x0123456789ABCDEF, 0x7FEDCBA987654321)  # seed and offset of dropout


@functools.lru_cache(maxsize=None)
def make_mask(name: str) -> torch.Tensor:
    """bool [batch, kv_heads or q_heads, q_len, kv_len]."""
    case, given = CASES[name], make_input(name, torch.float32)
    sequences = {one: getattr(given, one) for one in ("key_valid", "kv_used", "starts")}
    mask = evaluate.attention_mask(
        *(case.q_len, given.score, case.causal, case.window, case.scope), **sequences, **case.rules
    )
    if given.attn_mask is None:
        return mask
    return evaluate.spread_heads(mask, case.q_heads) & evaluate.spread_heads(
        given.attn_mask, case.q_heads
    )


def options_of(name: str, given: Input) -> dict[str, Any]:
    """The options of evaluations."""
    case = CASES[name]
    options = {one: getattr(given, one) for one in ("bias", "attn_bias", "sink_logit")}
    if case.dropout_p > 0:
        shape = (case.batch, case.q_heads, case.q_len, case.kv_len)
        options["factors"] = evaluate.dropout_factors(
            shape, case.kv_heads, case.dropout_p, given.rng_state
        )
    return {**options, **case.numbers}


def attend(
    name: str,
    given: Input,
    backend: str | None = None,
    device: str = "cpu",
    is_learning: bool | str = True,
    **options: Any,
) -> tuple[dict[str, torch.Tensor], Tensors]:
    """The input's leaves, of which one may be named as the only one with a gradient, then out and
    lse."""
    case, given = CASES[name], given.on(device)
    sequences = {one: getattr(given, one) for one in ("key_valid", "kv_used", "starts")}
    selection = None
    if case.window is not None:
        selection = flash_dmattn.select(
            given.score, case.window, scope=case.scope, **sequences, **case.rules
        )
    leaves = {
        one: x.detach().requires_grad_(is_learning in (True, one))
        for one, x in given.leaves.items()
    }
    results = flash_dmattn.attention(
        **leaves,
        **sequences,
        selection=selection,
        attn_mask=given.attn_mask,
        causal=case.causal,
        dropout_p=case.dropout_p,
        rng_state=given.rng_state,
        backend=backend,
        **case.numbers,
        **options,
    )
    return leaves, results


def attend_and_differentiate(name: str, given: Input, *target: Any, **options: Any) -> Tensors:
    """out, lse, and the gradients of the leaves."""
    leaves, (out, lse) = attend(name, given, *target, **options)
    gradients = torch.autograd.grad(out, tuple(leaves.values()), given.dout.to(out.device))
    return (out.detach(), lse.detach(), *gradients)


def probabilities_of(name: str, given: Input, lse: torch.Tensor, backend: str | None) -> Any:
    """The probabilities of a case, on the device of lse."""
    case, given = CASES[name], given.on(lse.device.type)
    sequences = {one: getattr(given, one) for one in ("key_valid", "kv_used", "starts")}
    options = {one: getattr(given, one) for one in ("bias", "attn_mask", "attn_bias", "rng_state")}
    if case.window is not None:
        options["selection"] = flash_dmattn.select(
            given.score, case.window, scope=case.scope, **sequences, **case.rules
        )
    options.update(causal=case.causal, dropout_p=case.dropout_p, backend=backend, **case.numbers)
    return flash_dmattn.attention_probabilities(given.query, given.key, lse, **sequences, **options)


# ---- kernels and dtypes ----


def supports(kernel: str, dtype: torch.dtype) -> bool:
    """True if a kernel of the CPU supports tensors of `dtype`, forward and backward."""
    row, value = torch.zeros(2, 1, 1, 1, 8, dtype=dtype)
    value.requires_grad_()
    try:
        out, _ = flash_dmattn.attention(row, row, value, backend=kernel)
        torch.autograd.grad(out, value, torch.zeros_like(out))
    except NotImplementedError:
        return False
    return True


def kernels_of(operation: str, backends: tuple[str, ...] = ("cpu", "reference")) -> list[str]:
    """Names of an operation's kernels that this machine can run, in the order of preference,
    without the third component, which says for which rows a forward kernel is."""
    names = [
        re.sub("/(tile|decode)$", "", kernel.name)
        for kernel in _library.kernels()
        if kernel.operation == operation
        and kernel.missing is None
        and kernel.name != "reference/float32"  # its error is a tolerance of `fdma check`
        and kernel.name.split("/")[0] in backends
    ]
    return list(dict.fromkeys(names))


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
NARROW = [torch.float16, torch.bfloat16]  # the dtypes of CUDA kernels
KERNELS = kernels_of("forward")
WIDE = [kernel for kernel in KERNELS if supports(kernel, torch.float32)]
HAS_DEVICE = torch.cuda.is_available() and _library.library.fdma_device_count() > 1
on_device = pytest.mark.skipif(not HAS_DEVICE, reason="no CUDA device")
SDPA_HAS_GROUPS = "enable_gqa" in (torch.nn.functional.scaled_dot_product_attention.__doc__ or "")
# For tests of benchmarks that time scaled_dot_product_attention.
with_sdpa = pytest.mark.skipif(not SDPA_HAS_GROUPS, reason="PyTorch before 2.5: no enable_gqa")
DEVICES = ["cpu", pytest.param("cuda", marks=on_device)]


def runs_of(kernels: list[str], dtypes: list[torch.dtype]) -> list[Any]:
    """Values of (device, kernel, dtype): every kernel of the CPU with the dtypes it supports."""
    runs = [("cpu", one, dtype) for one in kernels for dtype in dtypes if supports(one, dtype)]
    return [pytest.param(*run, id=f"{run[1]}-{run[2]}") for run in runs]


# The same on a CUDA device, for the kernel that it prefers.
CUDA_RUNS = [
    pytest.param("cuda", None, dtype, marks=on_device, id=f"cuda-{dtype}") for dtype in NARROW
]


def chosen_runs(names: Sequence[str], runs: list[Any], each: int = 2) -> list[Any]:
    """Values of (name, device, kernel, dtype): every name with `each` of the runs in turn, so that
    neighbours have other kernels and dtypes; with all of them if FDMA_FULL is 1. On a CUDA device
    with all dtypes."""
    found = []
    for n, name in enumerate(names):
        places = range(len(runs))
        if not FULL:
            places = [(n + k * len(runs) // each) % len(runs) for k in range(each)]
        for run in [*(runs[at] for at in places), *CUDA_RUNS]:
            found.append(pytest.param(name, *run.values, marks=run.marks, id=f"{name}-{run.id}"))
    return found


def chosen_targets(names: Sequence[str], kernels: Sequence[str]) -> list[Any]:
    """Values of (name, device, kernel): each name with one of the kernels in turn, or with all if
    FDMA_FULL is 1, and on a CUDA device."""
    found = []
    for n, name in enumerate(names):
        mine = kernels if FULL else [kernels[n % len(kernels)]]
        found += [pytest.param(name, "cpu", one, id=f"{name}-{one}") for one in mine]
        found.append(pytest.param(name, "cuda", None, marks=on_device, id=f"{name}-cuda"))
    return found


# ---- the fused form and its steps ----

WINDOW = 40
RULES = {"recent": 9, "sinks": 2}


def make_fused(
    q_len: int,
    kv_len: int | None = None,
    dtype: torch.dtype | None = None,
    *,
    head_dim: int = 64,
    device: str = "cpu",
    a_coef: float | None = None,
    batch: int = 2,
) -> list[torch.Tensor]:
    """query, key, value, dt_proj and a_coef, which require gradients. The first three are views of
    tensors whose heads come first. The default dtype is one that the device supports; a_coef is
    float32, except beside float64."""
    kv_len = q_len if kv_len is None else kv_len
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    generator = torch.Generator().manual_seed(q_len + kv_len)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    rows = [normal(batch, h, n, head_dim).transpose(1, 2) for h, n in ((4, q_len), (2, kv_len))]
    value = normal(batch, 2, kv_len, head_dim).transpose(1, 2)
    a = normal(2) if a_coef is None else torch.full((2,), a_coef, device=device)
    a = a.to(_arguments.wide(dtype))
    dt_proj = normal(2, 2 * head_dim) / head_dim**0.5
    return [x.requires_grad_() for x in (*rows, value, dt_proj, a)]


def make_small(length: int = 20) -> list[torch.Tensor]:
    """As make_fused() with head_dim 8, without gradients."""
    return [x.detach() for x in make_fused(length, head_dim=8)]


def require_gradients(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.clone().requires_grad_() for x in tensors]


def fused(*tensors: torch.Tensor, **options: Any) -> Any:
    options = {"keep_window_size": WINDOW, "causal": True, **options}
    return flash_dmattn.flash_dma_attention(*tensors, **options)


def stepwise(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *weights: torch.Tensor,
    bias_form: str = "linear",
    softcap: float = 3.0,
    **rules: int,
) -> Tensors:
    """All results of the three calls, among them the score, which has a gradient of its own."""
    score, bias = flash_dmattn.score(value, *weights, bias_form=bias_form)
    selection = flash_dmattn.select(score, WINDOW, **rules)
    out, lse = flash_dmattn.attention(
        query, key, value, bias=bias, selection=selection, causal=True, softcap=softcap
    )
    return out, lse, score, selection.expiry, selection.slot


def merged(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: torch.Tensor) -> Any:
    """Attention over two sets of keys. The first queries see no key of the second set."""
    first = flash_dmattn.attention(query, key[:, :20], value[:, :20])
    key_valid = torch.arange(key.shape[1] - 20, device=key.device).expand(2, -1) % 3 != 1
    second = flash_dmattn.attention(
        query, key[:, 20:], value[:, 20:], causal=True, key_valid=key_valid
    )
    return flash_dmattn.merge(*first, *second)


def ruled(*tensors: torch.Tensor) -> Tensors:
    """Both forms with `recent` and `sinks`."""
    return fused(*tensors, **RULES), *stepwise(*tensors, **RULES)[:2]


FUNCTIONS = [fused, stepwise, merged, ruled]


def results(function: Callable[..., Any], tensors: list[torch.Tensor]) -> Tensors:
    with torch.no_grad():
        found = function(*tensors)
    return found if isinstance(found, tuple) else (found,)


def gradients(function: Callable[..., Any], tensors: list[torch.Tensor]) -> Tensors:
    """The gradients of a loss that depends on every result; 0 for tensors without influence."""
    found = function(*tensors)
    found = found if isinstance(found, tuple) else (found,)
    loss = sum(one.float().cos().sum() for one in found if one.requires_grad)
    return torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True)


# ---- forms of flash_dma_attention() ----

RULES_AND_PADDING = {"recent": 9, "sinks": 3, "key_valid": True}
FORM_USED = {"batch": 5, "q_len": 20, "kv_used": (0, 1, 13, 40, 60)}
FORM_PACKED = {"batch": 1, "q_len": 60, "starts": (0, 1, 30, 30, 57)}
FORMS: dict[str, dict[str, Any]] = {
    "usual": {},
    "all queries": {"q_len": 60},
    "all keys": {"q_len": 60, "keep_window_size": 60},
    "equal scores": {"a_coef": 0.0},  # as in the beginning of a training
    "not causal": {"causal": False},
    "global": {"scope": "global"},
    "numbers": {"bias_form": "linear", "softcap": 1.5, "softmax_scale": 0.3},
    "without bias": {"causal": False, "bias_form": "none"},
    "padding": {"key_valid": True},
    "recent": {"recent": 25, "a_coef": 0.0},
    "rules and padding": RULES_AND_PADDING,
    "sinks": {"causal": False, "sinks": 5},
    "gap": {"gap": 0.5},
    "gap, rules and padding": {**RULES_AND_PADDING, "gap": 0.2},
    "used": FORM_USED,
    "used, with rules": {**FORM_USED, "recent": 7, "sinks": 2, "softcap": 3.0, "sink_logit": True},
    "used, not causal": {**FORM_USED, "causal": False, "bias_form": "linear"},
    "used, global": {**FORM_USED, "scope": "global", "keep_window_size": 1000, "bias_form": "none"},
    "packed": FORM_PACKED,
    "packed, with rules": {**FORM_PACKED, "recent": 7, "sinks": 2, "softcap": 3.0, "dt_bias": True},
    "packed, gap": {**FORM_PACKED, "recent": 3, "sinks": 1, "gap": 0.3},
    "packed, not causal": {**FORM_PACKED, "causal": False, "bias_form": "linear"},
    "packed, global": {**FORM_PACKED, "scope": "global", "bias_form": "none"},
    "dt_bias": {"dt_bias": True},
    "dt_bias, not causal": {"dt_bias": True, "causal": False, "bias_form": "linear"},
    "dt_bias, without bias": {"dt_bias": True, "bias_form": "none"},
    "sink_logit": {"sink_logit": True},
    "sink_logit, linear": {"sink_logit": True, "bias_form": "linear"},
    "sink_logit, without bias": {"sink_logit": True, "bias_form": "none"},
    "dropout": {"dropout_p": 0.3},
    "dropout, linear": {"dropout_p": 0.5, "bias_form": "linear", "key_valid": True},
    "dropout, without bias": {"dropout_p": 0.1, "bias_form": "none", "sink_logit": True},
    "head_dim 3": {"head_dim": 3},
    "head_dim 12": {"head_dim": 12, "causal": False},
    "head_dim 20": {"head_dim": 20, "bias_form": "linear"},
    "head_dim 12, packed": {"head_dim": 12, **FORM_PACKED},
}
SEED = 5  # of dropout


class Form(NamedTuple):
    """A call of flash_dma_attention(): tensors that have gradients, and the rest."""

    leaves: dict[str, torch.Tensor]
    options: dict[str, Any]

    @property
    def learned(self) -> list[torch.Tensor]:
        return [x for x in self.leaves.values() if x.requires_grad]

    def attend(self, leaves: dict[str, torch.Tensor] | None = None, **more: Any) -> Any:
        """out and lse. Every call drops the same probabilities."""
        torch.manual_seed(SEED)
        return self.attend_unseeded(leaves or self.leaves, **more)

    def attend_unseeded(self, leaves: dict[str, torch.Tensor], **more: Any) -> Any:
        given = {"return_lse": True, **self.options, **more}
        return flash_dmattn.flash_dma_attention(**leaves, **given)

    @property
    def sequences(self) -> dict[str, torch.Tensor | None]:
        return {name: self.options.get(name) for name in ("key_valid", "kv_used", "starts")}

    @property
    def selecting(self) -> dict[str, Any]:
        """Arguments of select() behind the score, but for the sequences."""
        given = self.options
        default = "causal" if given["causal"] else "global"
        rules = {name: given.get(name, 0) for name in ("recent", "sinks")}
        window, scope = given["keep_window_size"], given.get("scope", default)
        return {"window": window, "scope": scope, "gap": given.get("gap"), **rules}

    @property
    def numbers(self) -> dict[str, Any]:
        softcap, scale = self.options.get("softcap", 0.0), self.options.get("softmax_scale")
        return {"softcap": softcap, "softmax_scale": scale}

    def score(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        weights = {name: self.leaves.get(name) for name in ("dt_proj", "a_coef", "dt_bias")}
        sequences = {name: x for name, x in self.sequences.items() if name != "starts"}
        form = self.options.get("bias_form", "exp")
        return flash_dmattn.score(self.leaves["value"], **weights, **sequences, bias_form=form)

    def steps(self) -> tuple[Tensors, torch.Tensor]:
        """out, lse, expiry and slot by the three calls, and the probabilities by a fourth."""
        score, bias = self.score()
        selection = flash_dmattn.select(score, **self.selecting, **self.sequences)
        query, key, value = (self.leaves[name] for name in ("query", "key", "value"))
        given = {"bias": bias, "selection": selection, "causal": self.options["causal"]}
        given.update(**self.sequences, **self.numbers)
        if "dropout_p" in self.options:
            given.update(dropout_p=self.options["dropout_p"], rng_state=self.draw())
        sink_logit = self.leaves.get("sink_logit")
        out, lse = flash_dmattn.attention(query, key, value, sink_logit=sink_logit, **given)
        probability = flash_dmattn.attention_probabilities(query, key, lse, **given)
        return (out, lse, selection.expiry, selection.slot), probability

    def draw(self) -> torch.Tensor:
        """The seed and the offset of dropout in attend()."""
        torch.manual_seed(SEED)
        return torch.randint((1 << 63) - 1, (2,), device=self.leaves["query"].device)

    def evaluation(self) -> tuple[torch.Tensor, dict[str, Any]]:
        """The mask, by the library's scores, and the options of evaluations."""
        score = self.score()[0].detach()
        q_len, q_heads = self.leaves["query"].shape[1:3]
        rules = self.selecting
        where = (q_len, score, self.options["causal"], rules.pop("window"), rules.pop("scope"))
        options = self.numbers
        if "dropout_p" in self.options:
            shape = (len(score), q_heads, q_len, score.shape[2])
            probability = self.options["dropout_p"]
            options["factors"] = evaluate.dropout_factors(shape, 2, probability, self.draw())
        return evaluate.attention_mask(*where, **self.sequences, **rules), options


def make_form(
    name: str, dtype: torch.dtype | None = None, *, device: str = "cpu", head_dim: int = 16
) -> Form:
    form = {"keep_window_size": 15, "causal": True, "q_len": 35, "batch": 2, **FORMS[name]}
    sizes = {one: form.pop(one) for one in ("batch", "a_coef", "head_dim") if one in form}
    sizes = {"head_dim": head_dim, "device": device, **sizes}
    tensors = make_fused(form.pop("q_len"), 60, dtype, **sizes)
    tensors[4].data /= 4  # so that no bias is so large that it alone decides
    leaves = dict(zip(evaluate.FUSED, tensors))
    others = {"dt_bias": [1.5, -2.25], "sink_logit": [0.5, -2.0, 3.0, 40.0]}
    for one, numbers in others.items():
        if form.pop(one, False):
            leaves[one] = torch.tensor(numbers).to(tensors[4]).requires_grad_()
    if form.get("bias_form") == "none":  # the weights choose keys and have no gradients
        leaves.update({one: x.detach() for one, x in leaves.items() if one[:2] in ("dt", "a_")})
    if "key_valid" in form:
        form["key_valid"] = (torch.arange(60, device=device) % 5 != 1).expand(sizes["batch"], -1)
    for one in ("kv_used", "starts"):
        if one in form:
            form[one] = ints(form[one]).to(device)
    return Form(leaves, form)
