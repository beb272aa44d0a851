"""The layers and the models of the benchmark `model_step`. Models of one layout differ in their
attention alone: projections, norms, feed-forward layers, the head and the loss are the same code.

The plain layer has the attention of a usual transformer, to all keys or to a sliding window, by any
library. Its rotary embedding is one of rotaries_of().
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from importlib.util import find_spec
from typing import Any, Callable, ContextManager, NamedTuple

import peers_flash4
import torch
from flash_dmattn import DynamicMaskAttention, rotary
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

STD = 0.02  # of the initial weights
ROPE_BASE = 10000.0  # DynamicMaskAttention's default


class Layout(NamedTuple):
    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        return self.q_heads * self.head_dim

    def name(self) -> str:
        return f"h{self.q_heads}g{self.kv_heads}/d{self.head_dim}"


class Sizes(NamedTuple):
    """The sizes of a model beside its layout."""

    layers: int
    feed_forward: int
    vocabulary: int
    window: int  # keys that a query keeps by score, and as many of the newest
    piece: int  # tokens whose logits exist at once
    timed: int  # tokens of the steps that are timed together, unless one step has more

    @property
    def keys(self) -> int:
        return 2 * self.window


# ---- rotary embedding ----


class Rotary(NamedTuple):
    """A rotary embedding of plain layers. A model makes the angles once for all layers."""

    name: str
    angles: Callable[[torch.Tensor, torch.dtype], Any]  # of positions [1, len]
    rotate: Callable[[torch.Tensor, Any], torch.Tensor]  # of [batch, len, heads, head_dim]


def make_angles(
    head_dim: int, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [1, len, 1, head_dim / 2]."""
    wide = torch.promote_types(dtype, torch.float32)
    half = head_dim // 2
    rates = ROPE_BASE ** -(torch.arange(half, device=positions.device, dtype=wide) / half)
    angles = (positions[..., None].to(wide) * rates)[:, :, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate_halves(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = angles
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def rotaries_of(layout: Layout) -> list[Rotary]:
    """plain is PyTorch's operations on angles that all layers share, package is
    DynamicMaskAttention.rotate_heads(), operator is the package's operator on a table that all
    layers share."""
    sizes = (layout.width, layout.q_heads, layout.kv_heads)
    package = DynamicMaskAttention(*sizes, None, head_dim=layout.head_dim, device="meta")

    def make_table(positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return rotary.rotary_table(positions[0].int(), layout.head_dim, base=ROPE_BASE)

    return [
        Rotary("plain", functools.partial(make_angles, layout.head_dim), rotate_halves),
        Rotary("package", lambda positions, dtype: positions, package.rotate_heads),
        Rotary("operator", make_table, rotary.rotate),
    ]


# ---- attention ----


class Way(NamedTuple):
    """Causal attention by a library: of query, key and value [batch, len, heads, head_dim] to the
    `keys` newest keys, or to all."""

    name: str
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int | None], torch.Tensor]
    backend: SDPBackend | None = None  # of SDPA

    def chosen(self) -> ContextManager[Any]:
        """A context in which SDPA has this back end alone."""
        return contextlib.nullcontext() if self.backend is None else sdpa_kernel(self.backend)


SDPA_BACKENDS = {
    "cuda": {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    },
    "cpu": {"flash": SDPBackend.FLASH_ATTENTION, "plain": SDPBackend.MATH},
}
# flash_attn_func() of the versions of FlashAttention: its module, and options beside the window.
FLASH_ATTN: dict[str, tuple[str, dict[str, Any]]] = {
    peers_flash4.NAME: ("flash_attn.cute", {"return_lse": True}),
    "flash3": ("flash_attn_interface", {}),
    "flash2": ("flash_attn", {}),
}


def attend_sdpa(
    expands: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: int | None = None,
) -> torch.Tensor:
    """SDPA over all earlier keys, of groups of heads or with a kv head for each query head."""
    assert keys is None
    if expands:
        group = query.shape[2] // key.shape[2]
        key, value = (x.repeat_interleave(group, 2) for x in (key, value))
    rows = [x.transpose(1, 2) for x in (query, key, value)]
    out = scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=not expands)
    return out.transpose(1, 2)


def attend_flash_attn(
    version: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: int | None = None,
) -> torch.Tensor:
    module, options = FLASH_ATTN[version]
    attend = importlib.import_module(module).flash_attn_func
    window = {} if keys is None else {"window_size": (keys - 1, 0)}
    found = attend(query, key, value, causal=True, **window, **options)
    return found[0] if isinstance(found, tuple) else found


def is_installed(version: str) -> bool:
    if version == peers_flash4.NAME:
        return peers_flash4.is_installed()
    return find_spec(FLASH_ATTN[version][0]) is not None


def flash_attn_ways() -> list[Way]:
    return [
        Way(version, functools.partial(attend_flash_attn, version))
        for version in FLASH_ATTN
        if is_installed(version)
    ]


def dense_ways(device: str) -> list[Way]:
    """Attention to all earlier keys."""
    ways = [
        Way(name + end, functools.partial(attend_sdpa, bool(end)), backend)
        for name, backend in SDPA_BACKENDS[device].items()
        for end in ("", "-expanded")
        if end or name != "efficient"  # which has no groups of heads
    ]
    return ways + (flash_attn_ways() if device == "cuda" else [])


# ---- models ----


class PlainAttention(nn.Module):
    """Attention by any Way, with the projections of DynamicMaskAttention under the same names."""

    def __init__(
        self, layout: Layout, way: Way, rotary: Rotary, keys: int | None = None, **kind: Any
    ) -> None:
        super().__init__()
        dim, width = layout.head_dim, layout.width
        self.layout, self.way, self.rotary, self.keys = layout, way, rotary, keys
        self.q_proj = nn.Linear(width, width, bias=False, **kind)
        self.k_proj = nn.Linear(width, layout.kv_heads * dim, bias=False, **kind)
        self.v_proj = nn.Linear(width, layout.kv_heads * dim, bias=False, **kind)
        self.o_proj = nn.Linear(width, width, bias=False, **kind)

    def project(
        self, x: torch.Tensor, angles: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries and keys, and values: [batch, len, heads, head_dim]."""
        layout, rotate = self.layout, self.rotary.rotate
        query = self.q_proj(x).unflatten(2, (layout.q_heads, layout.head_dim))
        key, value = (
            linear(x).unflatten(2, (layout.kv_heads, layout.head_dim))
            for linear in (self.k_proj, self.v_proj)
        )
        return rotate(query, angles), rotate(key, angles), value

    def forward(self, x: torch.Tensor, angles: Any) -> torch.Tensor:
        return self.o_proj(self.way.attend(*self.project(x, angles), self.keys).flatten(2))


def make_selecting(layout: Layout, window: int, **kind: Any) -> DynamicMaskAttention:
    """A layer whose queries keep `window` keys by score, and as many of the newest. The scores of
    different tokens differ from the start, as A is not 0."""
    sizes = (layout.width, layout.q_heads, layout.kv_heads, window)
    options: dict[str, Any] = {"head_dim": layout.head_dim, "initial_a": 1.0, **kind}
    return DynamicMaskAttention(*sizes, recent=window, **options)


def make_sliding(layout: Layout, keys: int, **kind: Any) -> DynamicMaskAttention:
    """A layer whose queries keep the `keys` newest keys."""
    sizes = (layout.width, layout.q_heads, layout.kv_heads, keys)
    options: dict[str, Any] = {"head_dim": layout.head_dim, **kind}
    return DynamicMaskAttention(*sizes, recent=0, sliding_heads=layout.kv_heads, **options)


class Block(nn.Module):
    def __init__(self, width: int, feed_forward: int, attention: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = attention
        self.gate = nn.Linear(width, feed_forward, bias=False)
        self.expand = nn.Linear(width, feed_forward, bias=False)
        self.contract = nn.Linear(feed_forward, width, bias=False)

    def forward(self, x: torch.Tensor, *given: Any) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), *given)
        hidden = self.norm(x)
        return x + self.contract(silu(self.gate(hidden)) * self.expand(hidden))


class Model(nn.Module):
    """From tokens and the tokens that follow them, both [batch, len], to the mean loss.

    `make_attention` makes the attention of a layer. A model with a rotary gives its angles to each.
    """

    def __init__(
        self,
        sizes: Sizes,
        layout: Layout,
        make_attention: Callable[[], nn.Module],
        rotary: Rotary | None,
    ) -> None:
        super().__init__()
        width = layout.width
        self.piece, self.rotary = sizes.piece, rotary
        self.embedding = nn.Embedding(sizes.vocabulary, width)
        self.blocks = nn.ModuleList(
            Block(width, sizes.feed_forward, make_attention()) for _ in range(sizes.layers)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, sizes.vocabulary, bias=False)

    def angles(self, tokens: torch.Tensor) -> tuple[Any, ...]:
        if self.rotary is None:
            return ()
        kind, device = tokens.device.type, tokens.device
        is_narrow = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if is_narrow else self.head.weight.dtype
        positions = torch.arange(tokens.shape[1], device=device, dtype=torch.int32)
        return (self.rotary.angles(positions[None], dtype),)

    def piece_loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.head(x).float(), targets, reduction="sum")

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x, given = self.embedding(tokens), self.angles(tokens)
        for block in self.blocks:
            x = block(x, *given)
        rows = self.norm(x).flatten(0, 1)
        if len(rows) <= self.piece:
            return self.piece_loss(rows, targets.flatten()) / len(rows)
        # The logits of a piece are computed again in backward, so that no two pieces have theirs.
        pieces = zip(rows.split(self.piece), targets.flatten().split(self.piece))
        options = {"use_reentrant": False, "preserve_rng_state": False}
        losses = [checkpoint(self.piece_loss, *piece, **options) for piece in pieces]
        return torch.stack(losses).sum() / len(rows)


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Give the matrices that all models have the same weights. Weights of scores stay."""
    own = next(model.parameters())
    generator = torch.Generator(own.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "dt_proj" not in name:
            parameter.normal_(std=STD, generator=generator)
