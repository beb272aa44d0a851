"""Layers for models that are trained: dynamic mask attention with its projections.

The words are those of fdma.h; hidden is the width of the hidden states, heads is q_heads.
"""

from __future__ import annotations

import torch
from torch import nn

from . import functional

WIDEST = 256  # channels of a head that kernels take


def rotate(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """x with channels d and d + head_dim / 2 of each head turned by position * base^(-2d/head_dim).

    Shapes: x [batch, len, heads, head_dim], positions [batch or 1, len] of integers.
    Angles are in radians, and float32 whatever a model is cast to: in 16 bits positions above 256
    run into each other.

    Source: arXiv:2104.09864, section 3.4.2; halves in place of pairs, as in GPT-NeoX and Llama.
    """
    half = x.shape[-1] // 2
    exponents = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angles = positions[..., None].to(torch.float32) * base**-exponents
    cos, sin = (turn[:, :, None, :].to(x.dtype) for turn in (angles.cos(), angles.sin()))
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


class DynamicMaskAttention(nn.Module):
    """Self-attention in which every query sees its `window` best keys, with its projections.

        q, k, v = rotate(q_proj(x)), rotate(k_proj(x)), v_proj(x)
        bias = exp(A * softplus(dt_proj(v)));  kept: the window keys of highest bias in sight
        forward(x) = o_proj(softmax over kept keys(scale * <q, k> + bias) v)

    A begins as zeros, so that all keys tie and the more recent ones win: training starts from a
    sliding window of `window` keys and learns from there which keys are worth keeping longer.

    Args:
        hidden: width of the hidden states.
        heads: query heads.
        kv_heads: key and value heads, a divisor of `heads`; one score for each.
        window: keys that a query keeps; None: all, without scores, which is plain attention.
        head_dim: channels of a head, a multiple of 8 up to 256; None for hidden / heads.
        causal: a query sees only positions up to its own. False: all keys are ranked once, and
            every query sees the best of them.
        bias: whether q_proj, k_proj, v_proj and o_proj have one; dt_proj has none.
        rope_base: base of the rotary angles; None for no positions at all.
        softmax_scale: multiplies logits; None for 1 / sqrt(head_dim).
        softcap: c > 0 makes a logit c * tanh(logit / c); 0 for none.
        device: of the parameters.
        dtype: of the parameters: float32, float16 or bfloat16 (float64 on the CPU, slowly).

    Parameters, and keys of its state_dict (with `bias`, the first four have a .bias as well):
        q_proj.weight   [heads * head_dim, hidden]
        k_proj.weight   [kv_heads * head_dim, hidden]
        v_proj.weight   [kv_heads * head_dim, hidden]
        o_proj.weight   [hidden, heads * head_dim]
        dt_proj.weight  [kv_heads, kv_heads * head_dim], unless window is None
        A               [kv_heads], unless window is None

    Errors: ValueError for sizes that contradict each other; those of flash_dma_attention() for what
    no kernel does, when it is called.

    Source: arXiv:2508.02124; the Doge models.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        window: int | None,
        *,
        head_dim: int | None = None,
        causal: bool = True,
        bias: bool = False,
        rope_base: float | None = 10000.0,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("hidden", hidden), ("heads", heads), ("kv_heads", kv_heads)):
            require(size >= 1, f"{name}: is {size}, want 1 or more")
        divides = head_dim is not None or hidden % heads == 0
        require(divides, f"hidden: is {hidden}, want a multiple of heads, {heads}, or a head_dim")
        require(
            heads % kv_heads == 0, f"heads: is {heads}, want a multiple of kv_heads, {kv_heads}"
        )
        dim = hidden // heads if head_dim is None else head_dim
        fits = dim % 8 == 0 and 8 <= dim <= WIDEST
        require(fits, f"head_dim: is {dim}, want a multiple of 8 from 8 to {WIDEST}")
        if window is not None:
            window = functional.check_window("window", window)
        self.hidden, self.heads, self.kv_heads, self.head_dim = hidden, heads, kv_heads, dim
        self.window, self.causal, self.rope_base = window, causal, rope_base
        self.softmax_scale, self.softcap = softmax_scale, softcap
        place = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden, heads * dim, bias=bias, **place)
        self.k_proj = nn.Linear(hidden, kv_heads * dim, bias=bias, **place)
        self.v_proj = nn.Linear(hidden, kv_heads * dim, bias=bias, **place)
        self.o_proj = nn.Linear(heads * dim, hidden, bias=bias, **place)
        if window is not None:
            self.dt_proj = nn.Linear(kv_heads * dim, kv_heads, bias=False, **place)
            self.A = nn.Parameter(torch.zeros(kv_heads, **place))

    def reset_parameters(self) -> None:
        """Initialise all parameters anew: projections as nn.Linear does, A with zeros."""
        for projection in self.children():
            projection.reset_parameters()
        if self.window is not None:
            nn.init.zeros_(self.A)

    def extra_repr(self) -> str:
        return (
            f"{self.hidden}, heads={self.heads}, kv_heads={self.kv_heads}, "
            f"head_dim={self.head_dim}, window={self.window}, causal={self.causal}"
        )

    def forward(
        self,
        x: torch.Tensor,
        *,
        key_valid: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from each of x's positions.

        Args:
            x: hidden states [batch, len, hidden].
            key_valid: optional [batch, len] bool or uint8, false for padding: never kept, never
                read, and without a gradient. (torch.nn's key_padding_mask is its opposite.)
            positions: optional [batch or 1, len] integers for the rotary angles; None for 0, 1, ...
                Padding on the left wants them. Causality goes by the order in x.

        Returns:
            [batch, len, hidden]. A query that sees no key has attention 0: o_proj's bias alone.
        """
        shape = f"x is [batch, len, {self.hidden}]"
        require(x.dim() == 3, f"x: rank is {x.dim()}, want 3; {shape}")
        require(
            x.shape[2] == self.hidden,
            f"x: axis 2 has {x.shape[2]} elements, want {self.hidden}; {shape}",
        )
        rows = (self.heads, self.head_dim), (self.kv_heads, self.head_dim)
        query = self.q_proj(x).unflatten(2, rows[0])
        key = self.k_proj(x).unflatten(2, rows[1])
        value = self.v_proj(x).unflatten(2, rows[1])
        if self.rope_base is not None:
            if positions is None:
                positions = torch.arange(x.shape[1], device=x.device)[None]
            fits = positions.dim() == 2 and positions.shape[0] in (1, x.shape[0])
            fits = fits and positions.shape[1] == x.shape[1]
            shape = list(positions.shape)
            require(fits, f"positions: is {shape}, want [1 or {x.shape[0]}, {x.shape[1]}]")
            query, key = (rotate(one, positions, self.rope_base) for one in (query, key))
        out = self.attend(query, key, value, key_valid)
        return self.o_proj(out.flatten(2))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_valid: torch.Tensor | None,
    ) -> torch.Tensor:
        """out [batch, len, heads, head_dim] of projected states."""
        options = {
            "key_valid": key_valid,
            "causal": self.causal,
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
        }
        if self.window is None:
            return functional.attention(query, key, value, **options)[0]
        weights = (self.dt_proj.weight, self.A)
        return functional.flash_dma_attention(query, key, value, *weights, self.window, **options)
