"""Inputs of the tests: the shapes and options of tests/cases.def, with random tensors."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, Callable, NamedTuple, Tuple

import evaluate
import flash_dmattn
import pytest
import torch
from flash_dmattn import _arguments, _library

Tensors = Tuple[torch.Tensor, ...]


class Case(NamedTuple):
    """A line of tests/cases.def, which explains the words."""

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

    @property
    def causal(self) -> bool:
        return self.mask != "FULL"

    @property
    def scope(self) -> str:
        return "causal" if self.mask == "CAUSAL" else "global"

    @property
    def rules(self) -> dict[str, int]:
        return {"recent": self.recent, "sinks": self.sinks}


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
    name for name, case in CASES.items() if max(case.rules.values()) > 0 and case.kv_len <= 700
]


class Input(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    score: torch.Tensor
    bias: torch.Tensor | None
    key_valid: torch.Tensor | None
    dout: torch.Tensor


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


@functools.lru_cache(maxsize=None)
def make_input(name: str, dtype: torch.dtype) -> Input:
    case = CASES[name]
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
    return Input(query, key, value, score, bias, make_key_valid(case), dout)


@functools.lru_cache(maxsize=None)
def make_mask(name: str) -> torch.Tensor:
    """bool [batch or 1, kv_heads or 1, q_len, kv_len]."""
    case, given = CASES[name], make_input(name, torch.float32)
    kept = None
    if case.window is not None:
        kept = evaluate.kept_keys(
            given.score, case.window, case.scope, given.key_valid, **case.rules
        )
    return evaluate.visible_keys(case.q_len, case.kv_len, case.causal, kept, given.key_valid)


def options_of(name: str, given: Input) -> dict[str, Any]:
    return {"bias": given.bias, "softcap": CASES[name].softcap}


def attend(
    name: str, given: Input, backend: str | None = None, device: str = "cpu", **options: Any
) -> tuple[dict[str, torch.Tensor], Tensors]:
    """query, key, value and bias as leaves, then out and lse."""
    case = CASES[name]
    key_valid = None if given.key_valid is None else given.key_valid.to(device)
    selection = None
    if case.window is not None:
        selection = flash_dmattn.select(
            given.score.to(device), case.window, scope=case.scope, key_valid=key_valid, **case.rules
        )
    leaves = {
        name: getattr(given, name).to(device).detach().requires_grad_()
        for name in ("query", "key", "value", "bias")
        if getattr(given, name) is not None
    }
    results = flash_dmattn.attention(
        **leaves,
        selection=selection,
        key_valid=key_valid,
        causal=case.causal,
        softcap=case.softcap,
        backend=backend,
        **options,
    )
    return leaves, results


def attend_and_differentiate(name: str, given: Input, *target: Any, **options: Any) -> Tensors:
    """out, lse, and the gradients of query, key, value and bias, if there is one."""
    leaves, (out, lse) = attend(name, given, *target, **options)
    gradients = torch.autograd.grad(out, tuple(leaves.values()), given.dout.to(out.device))
    return (out.detach(), lse.detach(), *gradients)


# ---- kernels and dtypes ----


def supports(kernel: str, dtype: torch.dtype) -> bool:
    """True if a kernel of the CPU supports tensors of `dtype`, forward and backward."""
    row = torch.zeros(1, 1, 1, 8, dtype=dtype, requires_grad=True)
    try:
        out, _ = flash_dmattn.attention(row, row, row, backend=kernel)
        torch.autograd.grad(out, row, torch.zeros_like(out))
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
) -> list[torch.Tensor]:
    """query, key, value, dt_proj and a_coef, which require gradients. The first three are views of
    tensors whose heads come first. The default dtype is one that the device supports; a_coef is
    float32, except beside float64."""
    kv_len = q_len if kv_len is None else kv_len
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    generator = torch.Generator().manual_seed(q_len + kv_len)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    rows = [normal(2, h, n, head_dim).transpose(1, 2) for h, n in ((4, q_len), (2, kv_len))]
    value = normal(2, 2, kv_len, head_dim).transpose(1, 2)
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
