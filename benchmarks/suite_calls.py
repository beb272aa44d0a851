"""The calls that benchmarks/suite.py times: their sizes, useful operations, ranges and outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple

import flash_dmattn
import torch
from benchmarking import require_close
from definition_cases import Inputs, square
from peers_cuda_cases import best_keys
from streams_inputs import visible_pairs
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Call = Callable[[], Any]
SAMPLES = 16  # queries whose outputs are compared with float64
LONGEST_PLAIN = 1024  # keys; SDPA's plain evaluation, which stores all logits, is timed up to these

# The back ends of SDPA on each device.
DENSE = {
    "cuda": {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION},
    "cpu": {"flash": SDPBackend.FLASH_ATTENTION, "plain": SDPBackend.MATH},
}


class Setting(NamedTuple):
    """Causal attention of `length` queries to as many keys. Each query keeps `window` keys."""

    item: str
    training: bool  # forward and backward
    batch: int
    heads: tuple[int, int, int]  # q_heads, kv_heads, head_dim
    length: int
    window: int

    @property
    def kind(self) -> str:
        return "training" if self.training else "forward"

    @property
    def density(self) -> float:
        """The fraction of the pairs of a query and a visible key that are kept."""
        return visible_pairs(self.length, self.window) / visible_pairs(self.length, 0)

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def name(self, dtype: str) -> str:
        heads = "h{}g{}/d{}".format(*self.heads)
        sizes = f"b{self.batch}/{heads}/n{self.length}/w{self.window}"
        return f"{self.item}/{self.kind}/{dtype}/{sizes}"

    def fields(self) -> dict[str, Any]:
        q_heads, kv_heads, head_dim = self.heads
        sizes = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
        lengths = {"length": self.length, "window": self.window, "density": self.density}
        return {"item": self.item, "kind": self.kind, "batch": self.batch, **sizes, **lengths}

    def make_inputs(self, device: str, dtype: torch.dtype) -> Inputs:
        return Inputs(square(self.batch, *self.heads, self.length, self.window), device, dtype)


# ---- useful operations: a multiply-add is two ----


def count_attention(setting: Setting, window: int, products: int) -> int:
    """Operations of `products` products of a row of head_dim with each key that a query keeps:
    forward has 2, backward 5. Each query keeps `window` keys; 0: all that it sees."""
    q_heads, _, head_dim = setting.heads
    pairs = visible_pairs(setting.length, window)
    return 2 * products * setting.batch * q_heads * head_dim * pairs


def count_score(setting: Setting, products: int) -> int:
    """Operations of the product of the value states of all kv heads with dt_proj: forward has 1,
    backward 2."""
    _, kv_heads, head_dim = setting.heads
    return 2 * products * setting.tokens * kv_heads * kv_heads * head_dim


def count_selected(setting: Setting, window: int | None = None) -> int:
    """Operations of flash_dma_attention(), with `window` in place of the setting's if given."""
    kept = setting.window if window is None else window
    if setting.training:
        return count_attention(setting, kept, 7) + count_score(setting, 3)
    return count_attention(setting, kept, 2) + count_score(setting, 1)


def count_dense(setting: Setting) -> int:
    return count_attention(setting, 0, 7 if setting.training else 2)


# ---- calls ----


@contextlib.contextmanager
def stage(name: str, device: str) -> Iterator[None]:
    """A range for Nsight Systems on a CUDA device; nothing elsewhere."""
    if device != "cuda":
        yield
        return
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


def make_call(
    attend: Callable[[], torch.Tensor],
    leaves: Sequence[torch.Tensor],
    dout: torch.Tensor | None,
    device: str,
) -> Call:
    """Forward, and the gradients of `leaves` if dout is given."""

    def call() -> torch.Tensor:
        with stage("forward", device):
            out = attend()
        if dout is not None:
            with stage("backward", device):
                torch.autograd.grad(out, leaves, dout)
        return out

    return call


def leaves_of(inputs: Inputs, training: bool) -> list[torch.Tensor]:
    """query, key, value, dt_proj and a_coef for one call."""
    rows = (*inputs.rows, *inputs.weights)
    return [x.detach().requires_grad_(training) for x in rows]


def selected(inputs: Inputs, training: bool, **options: Any) -> Call:
    """flash_dma_attention() with scores and selection."""
    leaves = leaves_of(inputs, training)
    options = {"keep_window_size": inputs.case.window, **options}

    def attend() -> torch.Tensor:
        return flash_dmattn.flash_dma_attention(*leaves, causal=True, **options)

    return make_call(attend, leaves, inputs.dout if training else None, inputs.device)


def dense(inputs: Inputs, training: bool, backend: SDPBackend) -> Call:
    """SDPA over all keys. Its tensors are views [batch, heads, length, head_dim] of the same
    memory."""
    leaves = [x.transpose(1, 2) for x in leaves_of(inputs, False)[:3]]
    leaves = [x.requires_grad_(training) for x in leaves]

    def attend() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)

    dout = inputs.dout.transpose(1, 2) if training else None
    both = make_call(attend, leaves, dout, inputs.device)

    def call() -> torch.Tensor:
        with stage("dense", inputs.device):
            return both()

    return call


def dense_backends(device: str, length: int) -> dict[str, SDPBackend]:
    return {
        name: backend
        for name, backend in DENSE[device].items()
        if name != "plain" or length <= LONGEST_PLAIN
    }


# ---- outputs ----


def attend_plainly(
    inputs: Inputs, rows: torch.Tensor, added: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """out [batch, rows, q_heads, head_dim], with every step in `dtype`. `added` is added to the
    logits [batch, kv_heads, rows, length], and is -inf where a key is not kept."""
    group = inputs.case.q_heads // inputs.case.kv_heads
    query = inputs.query[:, rows].unflatten(2, (-1, group)).to(dtype)  # b i g (heads of g) d
    key, value = inputs.key.to(dtype), inputs.value.to(dtype)
    logits = torch.einsum("bighd,bjgd->bghij", query, key) * inputs.case.head_dim**-0.5
    weights = torch.softmax(logits + added[:, :, None].to(dtype), -1)
    return torch.einsum("bghij,bjgd->bighd", weights, value).flatten(2, 3)


@torch.no_grad()
def check_selected(inputs: Inputs, name: str) -> None:
    """Compare outputs of flash_dma_attention() with float64, by its own scores. An error may be
    twice the error of a plain evaluation, plus a rounding step of the largest output.

    Raises:
        Disagreement: an output is further away.
    """
    length, window = inputs.case.kv_len, inputs.case.window
    out = selected(inputs, False)()
    score, bias = flash_dmattn.score(inputs.value, *inputs.weights)
    rows = torch.linspace(0, length - 1, min(SAMPLES, length), device=out.device).long()
    kept = torch.stack([best_keys(one, rows, window) for one in score.flatten(0, 1)])
    added = torch.where(kept.unflatten(0, score.shape[:2]), bias[:, :, None], -torch.inf)
    exact = attend_plainly(inputs, rows, added, torch.float64)
    plain = attend_plainly(inputs, rows, added, out.dtype)
    error = (plain.double() - exact).abs().max().item()
    allowed = 2 * error + torch.finfo(out.dtype).eps * exact.abs().max().item()
    require_close(out[:, rows], exact, allowed, f"{name}: outputs and float64")
