"""The cases of context parallel attention: tokens of each rank, options and tensors."""

from __future__ import annotations

import functools
import math
import os
from typing import Any, NamedTuple

import torch
from flash_dmattn import _arguments

# Otherwise the count initialises CUDA, which must not happen in a process that forks.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
DEVICE_COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0
Tensors = dict[str, Any]
LEAVES = ("query", "key", "value", "dt_proj", "a_coef", "dt_bias", "sink_logit")
OF_TOKENS = LEAVES[:3]  # the others are parameters, the same on all ranks

# ---- The cases ----


class Case(NamedTuple):
    lengths: tuple[int, ...]  # tokens of each rank
    window: int | None  # None: ring_attention(), over all keys
    recent: int = 0
    sinks: int = 0
    batch: int = 1
    heads: tuple[int, int] = (4, 2)  # q_heads and kv_heads
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    causal: bool = True
    bias_form: str = "exp"
    softcap: float = 0.0
    softmax_scale: float | None = None
    scores: str = "IID"
    padding: str = "NONE"
    starts: tuple[int, ...] | None = None
    has_dt_bias: bool = False
    has_sink_logit: bool = False
    backend: str | None = None
    gives_lengths: bool = False  # of all ranks, to the call
    device: str = "cpu"
    transport: str = "gloo"

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def rules(self) -> dict[str, int]:
        return {"recent": self.recent, "sinks": self.sinks}

    @property
    def scope(self) -> str:
        return "causal" if self.causal else "global"

    @property
    def options(self) -> dict[str, Any]:
        return {"softmax_scale": self.softmax_scale, "softcap": self.softcap}


BOTH = {"recent": 5, "sinks": 3}
EVERYTHING = {"has_dt_bias": True, "has_sink_logit": True, "softcap": 3.0, "softmax_scale": 0.4}
EIGHT = (20, 7, 0, 33, 1, 12, 0, 16)

CASES = {
    # ---- ranks and lengths ----
    "one-rank": Case((40,), 9, **BOTH, **EVERYTHING),
    "two-ranks": Case((30, 30), 9),
    "two-uneven": Case((11, 50), 9, **BOTH, batch=2),
    "three-uneven": Case((40, 3, 21), 9, **BOTH),
    "three-first-empty": Case((0, 25, 30), 6, **BOTH, batch=3),
    "three-last-empty": Case((25, 30, 0), 6, **BOTH),
    "three-only-middle": Case((0, 30, 0), 6, **BOTH),
    "four-ranks": Case((24, 25, 24, 23), 10, **BOTH, batch=2),
    "eight-uneven": Case(EIGHT, 9, **BOTH, **EVERYTHING),
    "eight-long": Case((50,) * 8, 20, **BOTH),
    "fewer-tokens-than-ranks": Case((1, 0, 1, 1, 0, 0, 1, 1), 3),
    "one-token": Case((0, 0, 0, 1, 0, 0, 0, 0), 3, **BOTH),
    "no-token": Case((0, 0, 0), 3),
    "lengths": Case(EIGHT, 9, **BOTH, gives_lengths=True),
    # ---- window, recent, sinks ----
    "window-1": Case((20, 20, 20), 1),
    "window-above-rank": Case((10, 12, 9, 11), 25, batch=2),
    "window-above-all": Case((10, 12, 9, 11), 100, **BOTH),
    "window-huge": Case((10, 12, 9), (1 << 63) - 1),
    "recent-alone": Case((20, 9, 30), 6, recent=11),
    "recent-above-rank": Case((6, 5, 6, 30), 4, recent=14),
    "sinks-alone": Case((20, 9, 30), 6, sinks=4),
    "sinks-above-first-rank": Case((2, 3, 20, 20), 9, sinks=7, recent=4),
    "sinks-are-window": Case((4, 20, 20), 6, sinks=6),
    # ---- options ----
    "linear": Case((20, 31, 9), 7, **BOTH, bias_form="linear", **EVERYTHING),
    "no-bias": Case((20, 31, 9), 7, **BOTH, bias_form="none", has_sink_logit=True),
    "softcap": Case((20, 31), 7, softcap=2.0),
    "softmax-scale": Case((20, 31), 7, softmax_scale=0.7),
    "sink-logit": Case((20, 31), 7, has_sink_logit=True),
    "dt-bias": Case((20, 31), 7, has_dt_bias=True),
    # ---- without causal masking ----
    "full": Case((20, 31, 9), 7, causal=False, batch=2),
    "full-eight": Case(EIGHT, 9, causal=False, sinks=3, **EVERYTHING),
    "full-linear": Case((13, 14), 9, causal=False, bias_form="linear"),
    "full-no-bias": Case((13, 14), 9, causal=False, bias_form="none"),
    "full-window-above-all": Case((13, 0, 14), 90, causal=False),
    "full-padding": Case((13, 12, 14), 9, causal=False, batch=2, padding="HOLES"),
    "full-tied": Case((13, 12, 14), 9, causal=False, scores="TIED"),
    # ---- heads, head_dim, dtypes ----
    "no-groups": Case((20, 31, 9), 7, heads=(4, 4), **BOTH),
    "one-kv-head": Case((20, 31, 9), 7, heads=(3, 1), **BOTH),
    "head-dim-8": Case((20, 31), 7, head_dim=8, **BOTH),
    "head-dim-40": Case((20, 31), 7, head_dim=40, **BOTH),
    "head-dim-64": Case((20, 31, 20, 5), 7, head_dim=64, **BOTH),
    "bfloat16": Case((30, 31, 20, 15), 9, dtype=torch.bfloat16, **BOTH, **EVERYTHING),
    "bfloat16-eight": Case(EIGHT, 9, dtype=torch.bfloat16, head_dim=64, batch=2),
    "bfloat16-full": Case((30, 31, 20), 9, dtype=torch.bfloat16, causal=False, sinks=2),
    "float16": Case((30, 31, 20, 15), 9, dtype=torch.float16, **BOTH, **EVERYTHING),
    "float16-linear": Case((30, 31), 9, dtype=torch.float16, bias_form="linear", head_dim=40),
    "float64": Case((9, 0, 13), 5, dtype=torch.float64, backend="reference", **BOTH, **EVERYTHING),
    "float64-full": Case((9, 13), 5, dtype=torch.float64, backend="reference", causal=False),
    "reference": Case((9, 12, 13), 5, backend="reference", **BOTH, **EVERYTHING),
    # ---- padding ----
    "padding-left": Case((20, 20, 20), 7, **BOTH, batch=3, padding="LEFT"),
    "padding-right": Case((20, 20, 20), 7, **BOTH, batch=3, padding="RIGHT"),
    "padding-holes": Case((20, 20, 20, 20), 7, **BOTH, batch=2, padding="HOLES"),
    "padding-first-rank": Case((12, 20, 20), 7, **BOTH, batch=2, padding="RANK 0"),
    "padding-middle-rank": Case((12, 20, 20), 7, **BOTH, batch=2, padding="RANK 1"),
    "padding-sequence": Case((12, 20, 20), 7, **BOTH, batch=2, padding="SEQUENCE"),
    "padding-all": Case((12, 20), 7, **BOTH, padding="SEQUENCE"),
    "padding-window-above-rank": Case((9, 8, 9, 20), 18, batch=2, padding="HOLES", sinks=4),
    # ---- scores ----
    "tied": Case((20, 13, 20), 7, **BOTH, batch=2, scores="TIED"),
    "steps": Case((20, 13, 20, 11), 7, **BOTH, scores="STEPS"),
    "steps-eight": Case((13,) * 8, 9, scores="STEPS"),
    "rising": Case((20, 13, 20), 7, scores="RISING"),
    "falling": Case((20, 13, 20), 7, recent=5, scores="FALLING"),
    "nan": Case((20, 13, 20), 7, scores="NAN"),
    "nan-late": Case((20, 13, 20), 7, sinks=2, scores="NAN LATE"),
    "nan-packed": Case((20, 13, 20), 7, **BOTH, starts=(0, 9, 40, 53), scores="NAN"),
    "falling-padding": Case((20, 13, 20), 7, **BOTH, batch=2, scores="FALLING", padding="LEFT"),
    # ---- packed sequences ----
    "packed-on-borders": Case((20, 20, 20), 6, starts=(0, 20, 40, 60)),
    "packed-across": Case((20, 20, 20), 6, **BOTH, starts=(0, 13, 33, 60)),
    "packed-three-ranks": Case((20, 10, 20, 10), 6, **BOTH, starts=(0, 15, 45, 60)),
    "packed-one-sequence": Case((20, 10, 20), 6, **BOTH, starts=(0, 50)),
    "packed-many": Case((9, 30, 9), 4, **BOTH, starts=(0, 7, 11, 14, 20, 27, 33, 41, 48)),
    "packed-empty": Case((9, 30, 9), 4, sinks=2, starts=(0, 0, 9, 9, 9, 22, 39, 39, 48, 48)),
    "packed-behind-last": Case((20, 20, 20), 6, **BOTH, starts=(0, 13, 29)),
    "packed-none-in-any": Case((8, 8), 6, starts=(0, 0)),
    "packed-short-ranks": Case((3, 2, 0, 4, 1, 9, 3, 12), 5, **BOTH, starts=(0, 4, 20, 34)),
    "packed-sinks-elsewhere": Case((4, 3, 20), 9, sinks=6, recent=2, starts=(0, 2, 27)),
    "packed-window-above-all": Case((9, 8, 9), 90, starts=(0, 5, 21, 26), **EVERYTHING),
    "packed-padding": Case((20, 20, 20), 6, **BOTH, starts=(0, 13, 33, 60), padding="HOLES"),
    "packed-tied": Case((20, 20, 20), 6, **BOTH, starts=(0, 13, 33, 60), scores="TIED"),
    "packed-lengths": Case((20, 20, 20), 6, starts=(0, 13, 45, 60), gives_lengths=True),
    "packed-bfloat16": Case((20, 20, 20), 6, dtype=torch.bfloat16, starts=(0, 13, 45, 60)),
    # ---- all keys ----
    "ring-one-rank": Case((30,), None),
    "ring-two-ranks": Case((30, 30), None, batch=2),
    "ring-uneven": Case((11, 0, 25, 7), None, softcap=3.0, has_sink_logit=True),
    "ring-eight": Case(EIGHT, None, softmax_scale=0.4, has_sink_logit=True),
    "ring-fewer-tokens": Case((1, 0, 1, 1, 0, 0, 1, 1), None),
    "ring-full": Case((11, 0, 25, 7), None, causal=False, softcap=3.0, has_sink_logit=True),
    "ring-full-eight": Case(EIGHT, None, causal=False),
    "ring-padding": Case((12, 20, 20), None, batch=3, padding="LEFT", has_sink_logit=True),
    "ring-padding-rank": Case((12, 20, 20), None, batch=2, padding="RANK 1"),
    "ring-padding-first": Case((12, 20, 20), None, batch=2, padding="RANK 0"),
    "ring-full-padding": Case((12, 20, 20), None, causal=False, batch=2, padding="HOLES"),
    "ring-padding-all": Case((12, 20), None, causal=False, batch=2, padding="SEQUENCE"),
    "ring-heads": Case((12, 20), None, heads=(3, 1), head_dim=40),
    "ring-bfloat16": Case((12, 20, 9, 13), None, dtype=torch.bfloat16, has_sink_logit=True),
    "ring-float16": Case((12, 20, 9), None, dtype=torch.float16, causal=False, softcap=3.0),
    "ring-float64": Case((12, 9), None, dtype=torch.float64, backend="reference"),
    "ring-lengths": Case((12, 0, 9), None, gives_lengths=True),
}


def cases_on_devices() -> dict[str, Case]:
    """The same on CUDA devices, in 16 bits: through gloo with all ranks on any number of devices,
    and through NCCL if each rank has a device."""
    found = {}
    for name, case in CASES.items():
        if case.backend is None and not case.scores.startswith("NAN"):
            dtype = torch.bfloat16 if case.dtype == torch.float32 else case.dtype
            on_device = case._replace(dtype=dtype, device="cuda")
            found[f"cuda/{name}"] = on_device
            if len(case.lengths) <= DEVICE_COUNT:
                found[f"nccl/{name}"] = on_device._replace(transport="nccl")
    return found


if DEVICE_COUNT > 0:
    CASES.update(cases_on_devices())


def make_valid(case: Case) -> torch.Tensor | None:
    """bool [batch, total]; sequences have padding of different lengths."""
    key, b = torch.arange(case.total), torch.arange(case.batch)[:, None]
    if case.padding.startswith("RANK"):
        rank = int(case.padding[-1])
        begin = sum(case.lengths[:rank])
        return ((key < begin) | (key >= begin + case.lengths[rank])).expand(case.batch, -1)
    return {
        "NONE": None,
        "LEFT": key >= 9 * (b + 1),
        "RIGHT": key < case.total - 9 * (b + 1),
        "HOLES": (key + b) % 7 > 1,
        "SEQUENCE": (key >= 0) & (b > 0),
    }[case.padding]


def make_channel(case: Case) -> torch.Tensor | None:
    """[total]: the only channel from which a token's score comes; None if all channels count."""
    position = torch.arange(case.total, dtype=torch.float64)
    generator = torch.Generator().manual_seed(case.total)
    found = {
        "TIED": position * 0,
        "STEPS": torch.randint(3, (case.total,), generator=generator).double(),
        "RISING": position / 16,
        "FALLING": -position / 16,
    }.get(case.scores)
    # Not 0: there evaluate.score() has the right value, but autograd has a wrong slope.
    return None if found is None else found + 1 / 32


@functools.lru_cache(maxsize=None)
def make_tensors(name: str, seed: int = 0) -> Tensors:
    """All tensors of the whole sequence. dout and dlse are the gradients of the results."""
    case = CASES[name]
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 10_000 * seed)
    (q_heads, kv_heads), dim = case.heads, case.head_dim
    wide = _arguments.wide(case.dtype)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    of_query, of_key = ((case.batch, case.total, heads, dim) for heads in case.heads)
    found = {"query": normal(*of_query), "key": normal(*of_key), "value": normal(*of_key)}
    if case.window is not None:
        found["dt_proj"] = normal(kv_heads, kv_heads * dim) / dim**0.5
        # In 16 bits a plain evaluation rounds the bias. A smaller bias loses less.
        found["a_coef"] = normal(kv_heads) / (4 if wide != case.dtype else 1)
    channel = make_channel(case)
    if channel is not None:
        found["value"][..., 0] = channel[:, None]
        found["dt_proj"] = torch.eye(kv_heads, dtype=torch.float64).repeat_interleave(dim, 1)
        found["dt_proj"] *= (torch.arange(kv_heads * dim) % dim == 0).double()
        found["a_coef"] = found["a_coef"].abs() + 0.5
    if case.has_dt_bias:
        found["dt_bias"] = normal(kv_heads)
    if case.has_sink_logit:
        found["sink_logit"] = normal(q_heads)
    found["dout"] = normal(*of_query)
    found["dlse"] = normal(case.batch, q_heads, case.total)
    in_wide = ("a_coef", "dt_bias", "sink_logit", "dlse")
    found = {key: x.to(wide if key in in_wide else case.dtype) for key, x in found.items()}
    if case.scores.startswith("NAN"):
        least = case.window if case.scores == "NAN LATE" else 0
        found["value"][:, least::3] = math.nan
    valid = make_valid(case)
    if valid is not None:  # padding is never read
        found["key"][~valid], found["value"][~valid] = math.nan, math.nan
        found["key_valid"] = valid
    return found
