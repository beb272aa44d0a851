"""The cases of the benchmarks of equivalence. Performance and suite use their inputs, too."""

from __future__ import annotations

import argparse
from typing import NamedTuple, Tuple

import flash_dmattn
import torch

Tensors = Tuple[torch.Tensor, ...]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Case(NamedTuple):
    """Attention of q_len queries to kv_len keys. A query attends to the `window` best keys and the
    `recent` newest, or to all keys if window is None."""

    what: str = ""
    batch: int = 1
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    q_len: int = 67
    kv_len: int = 67
    window: int | None = 16
    causal: bool = True
    scope: str = "causal"
    recent: int = 0
    sinks: int = 0
    gap: float | None = None
    softcap: float = 0.0
    softmax_scale: float | None = None
    bias_form: str = "exp"
    padding: str = ""  # which keys are not valid: left, holes, all (keys of the first sequence)
    starts: tuple[int, ...] = ()
    attn_mask: str = ""  # axes with more than one entry: of b, h or g, i, j
    attn_bias: str = ""  # as attn_mask
    has_dt_bias: bool = False
    has_sink_logit: bool = False
    is_tied: bool = False  # all scores are equal

    @property
    def name(self) -> str:
        window = "all" if self.window is None else f"w{self.window}"
        keys = f"n{self.kv_len}" if self.q_len == self.kv_len else f"n{self.q_len}-{self.kv_len}"
        heads = f"b{self.batch}/h{self.q_heads}g{self.kv_heads}/d{self.head_dim}"
        sizes = f"{heads}/{keys}/{window}"
        return f"{self.what}/{sizes}" if self.what else sizes


def square(
    batch: int, q_heads: int, kv_heads: int, head_dim: int, length: int, window: int, what: str = ""
) -> Case:
    """Causal attention of `length` queries to as many keys."""
    return Case(what, batch, q_heads, kv_heads, head_dim, length, length, window)


GLOBAL = {"causal": False, "scope": "global"}
CASES = (
    square(1, 4, 2, 64, 256, 64, "length"),
    square(2, 3, 3, 32, 300, 400, "length"),
    square(2, 4, 1, 32, 500, 128, "length"),
    square(1, 8, 2, 128, 1000, 256, "length"),
    square(1, 4, 2, 64, 1537, 512, "length"),
    Case("length/odd", batch=2, q_len=131, kv_len=131, head_dim=40),
    Case("length/one-key", q_len=1, kv_len=1),
    Case("queries/one", q_len=1, kv_len=129),
    Case("queries/one", q_len=1, kv_len=1001, window=100, batch=3),
    Case("queries/few", q_len=7, kv_len=250, recent=5),
    Case("queries/last", q_len=50, kv_len=120, batch=2),
    Case("queries/more-than-keys", q_len=90, kv_len=61, window=None),
    Case("queries/more-than-keys/global-causal", q_len=90, kv_len=61, scope="global"),
    Case("queries/more-than-keys/global", q_len=90, kv_len=61, **GLOBAL),
    Case("batch", batch=7, q_len=33, kv_len=45),
    *(
        Case("group", q_heads=n * g, kv_heads=g)
        for n, g in ((1, 1), (1, 5), (8, 1), (3, 2), (5, 1))
    ),
    *(Case("head-dim", head_dim=size) for size in (8, 16, 48, 64, 80, 96, 128, 160, 192, 256)),
    *(Case("window", window=size) for size in (1, 2, 7, 66, 67, 68, 1000)),
    Case("dense", window=None),
    Case("dense/global", window=None, **GLOBAL),
    Case("scope/global", **GLOBAL),
    Case("scope/global", q_len=40, kv_len=150, batch=2, **GLOBAL),
    Case("scope/global-causal", scope="global"),
    Case("scope/global-sinks", sinks=3, **GLOBAL),
    Case("recent", recent=8),
    Case("recent/all", recent=100),
    Case("recent/window-1", recent=20, window=1, batch=2),
    Case("sinks", sinks=4),
    Case("sinks/window", sinks=16, recent=9),
    Case("gap", gap=0.3, window=40),
    Case("gap/recent-sinks", gap=0.2, window=30, recent=6, sinks=2, batch=2),
    Case("softcap", softcap=1.5),
    Case("softcap/global", softcap=0.7, **GLOBAL),
    Case("scale", softmax_scale=0.3),
    Case("scale/softcap", softmax_scale=0.5, softcap=2.0, window=None),
    Case("bias/linear", bias_form="linear"),
    Case("bias/none", bias_form="none"),
    Case("bias/dt", has_dt_bias=True, batch=2),
    Case("bias/tied", is_tied=True),
    Case("sink-logit", has_sink_logit=True),
    Case("sink-logit/empty-rows", has_sink_logit=True, q_len=80, kv_len=50, window=None),
    Case("padding/left", padding="left", batch=3),
    Case("padding/holes", padding="holes", batch=2, recent=5, sinks=2, gap=0.4),
    Case("padding/all", padding="all", batch=2),
    Case("padding/global", padding="holes", batch=2, **GLOBAL),
    Case("packed", starts=(0, 30, 31, 67)),
    Case("packed/rest", starts=(0, 20, 50), recent=4, sinks=1),
    Case("packed/empty", starts=(0, 0, 40, 40, 67), gap=0.3, has_sink_logit=True),
    Case("packed/padding", starts=(0, 25, 67), padding="holes"),
    Case("packed/global", starts=(0, 30, 67), **GLOBAL),
    Case("packed/dense", starts=(0, 30, 67), window=None, **GLOBAL),
    Case("mask", attn_mask="bhij", batch=2),
    Case("mask/kv-heads", attn_mask="bgij", window=None),
    Case("mask/one", attn_mask="ij", window=None, q_len=50, kv_len=93),
    Case("mask/keys", attn_mask="bj", batch=2, recent=4),
    Case("mask/global", attn_mask="hij", has_sink_logit=True, **GLOBAL),
    Case("attn-bias", attn_bias="bhij", batch=2),
    Case("attn-bias/kv-heads", attn_bias="gij", batch=2, window=None),
    Case("attn-bias/keys", attn_bias="bhj", softcap=2.0),
    Case("attn-bias/queries", attn_bias="i", bias_form="none"),
    Case("attn-bias/mask", attn_bias="bgij", attn_mask="ij", batch=2, **GLOBAL),
    Case("attn-bias/padding", attn_bias="hij", padding="left", batch=2, bias_form="none"),
)


def make_key_valid(case: Case, device: str) -> torch.Tensor | None:
    """bool [batch, kv_len]; padding differs in length between sequences."""
    key = torch.arange(case.kv_len, device=device)
    b = torch.arange(case.batch, device=device)[:, None]
    return {
        "": None,
        "left": key >= 7 * b + 3,
        "holes": (key + b) % 5 != 2,
        "all": (key >= 0) & (b > 0),
    }[case.padding]


class Inputs:
    """Random tensors of a case. Tensors that the case does not use are None."""

    def __init__(self, case: Case, device: str, dtype: torch.dtype) -> None:
        random = torch.Generator(device).manual_seed(case.kv_len)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random, device=device)

        def pairs(axes: str) -> torch.Tensor | None:
            """[batch or 1, q_heads or kv_heads or 1, q_len or 1, kv_len or 1]."""
            heads = case.q_heads if "h" in axes else case.kv_heads if "g" in axes else 1
            sizes = (("b", case.batch), ("h", heads), ("i", case.q_len), ("j", case.kv_len))
            broadcast = (letter not in axes and letter != "h" for letter, _ in sizes)
            shape = [1 if one else size for one, (_, size) in zip(broadcast, sizes)]
            return draw(*shape) if axes else None

        batch, width = case.batch, case.kv_heads * case.head_dim
        self.case, self.device, self.dtype = case, device, dtype
        self.query = draw(batch, case.q_len, case.q_heads, case.head_dim).to(dtype)
        keys = (batch, case.kv_len, case.kv_heads, case.head_dim)
        self.key, self.value = (draw(*keys).to(dtype) for _ in "kv")
        # Biases exp(score) are about 1 to 5: 16 bits would round everything away beside much larger
        # ones.
        a_coef = 0.4 * draw(case.kv_heads)
        self.weights = draw(case.kv_heads, width) / width**0.5, a_coef * (not case.is_tied)
        self.dout = draw(*self.query.shape).to(dtype)
        self.dlse = draw(batch, case.q_heads, case.q_len)
        self.dbias = draw(batch, case.kv_heads, case.kv_len)
        self.dt_bias = draw(case.kv_heads) if case.has_dt_bias else None
        self.sink_logit = draw(case.q_heads) if case.has_sink_logit else None
        mask, attn_bias = pairs(case.attn_mask), pairs(case.attn_bias)
        self.attn_mask = None if mask is None else mask > -0.5
        self.attn_bias = None if attn_bias is None else attn_bias.to(dtype)
        self.key_valid = make_key_valid(case, device)
        starts = torch.tensor(case.starts, dtype=torch.int32, device=device)
        self.starts = starts if case.starts else None

    @property
    def rows(self) -> Tensors:
        return self.query, self.key, self.value


def choose_dtype(args: argparse.Namespace) -> torch.dtype:
    """The requested dtype, or one that the device has kernels for."""
    return DTYPES[args.dtype or ("float32" if args.device == "cpu" else "bfloat16")]


def has_kernels(device: str, dtype: torch.dtype) -> bool:
    """True if attention and its gradients have kernels for tensors of `dtype`."""
    row = torch.zeros(1, 1, 1, 8, dtype=dtype, device=device, requires_grad=True)
    try:
        out, _ = flash_dmattn.attention(query=row, key=row, value=row)
        torch.autograd.grad(out, row, torch.zeros_like(out))
    except NotImplementedError:
        return False
    return True
