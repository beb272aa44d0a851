"""The comparison of serve.py: a pool that keeps the keys and values of all tokens.

Attention over them is dense: torch.nn.functional.scaled_dot_product_attention with a mask for the
lengths or, where torch has it, FlashAttention with a length for each sequence, whichever is faster
on the device. It has the projections of the same layers.
"""

from __future__ import annotations

import argparse
import functools
from typing import Callable

import program

if __name__ == "__main__":
    program.belongs_to("serve.py")

import torch
from flash_dmattn import DynamicMaskAttention
from flash_dmattn.rotary import rotate_heads
from serve_model import Rows
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

# On a CUDA device each length has a CUDA graph of its own, so there are few of them.
ROUND = {"cuda": 256, "cpu": 64}  # a step reads a multiple of so many keys
BACKENDS = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
TRIALS = 5  # timed calls of each kernel
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def by_sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Attention to the keys at positions up to the query's: out [rows, len, heads, head_dim].

    The query heads that share a kv head become queries of this head, so that a kernel reads each
    key once.

    Args:
        query: [rows, len, heads, head_dim].
        key: [rows, keys, kv_heads, head_dim].
        value: like key.
        positions: [rows, len], of the queries.
    """
    length, kv_heads = query.shape[1], key.shape[2]
    group = query.shape[2] // kv_heads
    query = query.unflatten(2, (kv_heads, group)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    hidden = torch.arange(key.shape[1], device=key.device) > positions[..., None]
    mask = torch.zeros(hidden.shape, dtype=query.dtype, device=key.device)
    mask.masked_fill_(hidden, -torch.inf)
    if length > 1:
        mask = mask.repeat_interleave(group, 1)
    out = scaled_dot_product_attention(
        query, key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask[:, None]
    )
    return out.unflatten(2, (length, group)).permute(0, 2, 1, 3, 4).flatten(2, 3)


def by_backend(backend: SDPBackend) -> Attention:
    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return by_sdpa(*tensors)

    return attend


def by_lengths(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """by_sdpa() of one query for each row, which reads no key beyond the length of its sequence.

    Raises:
        ImportError, TypeError: this version of torch has no such function.
    """
    from torch.nn.attention.varlen import varlen_attn

    rows, keys = key.shape[:2]
    numbers = torch.arange(rows + 1, dtype=torch.int32, device=key.device)
    # `key` is the first keys of a tensor with room for more: row n begins at n * room.
    room = key.stride(0) // key.stride(1)
    packed = (
        one.as_strided((rows * room, *one.shape[2:]), one.stride()[1:]) for one in (key, value)
    )
    used = (positions[:, 0] + 1).int()
    starts = (numbers, numbers * room)
    out = varlen_attn(query[:, 0], *packed, *starts, 1, keys, enable_gqa=True, seqused_k=used)
    return out[:, None]


class FullPool:
    """Keys and values of all tokens: [sequences, room, kv_heads, head_dim] for each layer."""

    takes_some = False

    def __init__(
        self, options: argparse.Namespace, longest: int, device: str, dtype: torch.dtype
    ) -> None:
        """`longest`: tokens of the longest sequence, and of the padding that may follow it."""
        self.layers, self.device = options.layers, device
        self.round = ROUND[device]
        self.room = round_up(longest, self.round)
        shape = (options.sequences, self.room, options.kv_heads, options.head_dim)
        make = functools.partial(torch.zeros, shape, dtype=dtype, device=device)
        self.tensors = [(make(), make()) for _ in range(options.layers)]
        self.seen = torch.zeros(options.sequences, dtype=torch.int32, device=device)
        self.kernel, self.attention = "sdpa", by_sdpa
        if device == "cuda":
            query = torch.zeros(shape[0], 1, options.heads, shape[3], dtype=dtype, device=device)
            self.kernel, self.attention = fastest(query, *self.tensors[0])

    def begin(self, rows: Rows) -> None:
        """The sequences, positions and keys of a step, which are the same in all layers."""
        self.sequences = slice(None) if rows.alone is None else slice(rows.alone, rows.alone + 1)
        steps = torch.arange(rows.tokens.shape[1], dtype=torch.int32, device=self.device)
        self.positions = (self.seen[self.sequences, None] + steps).long()
        self.numbers = torch.arange(len(self.positions), device=self.device)[:, None]
        self.length = self.shape_of(rows.longest)

    def attend(
        self, rows: Rows, number: int, layer: DynamicMaskAttention, x: torch.Tensor
    ) -> torch.Tensor:
        """Attention of x [rows, len, width] to all keys of its sequences.

        Keys of padding are stored too, at positions that the next tokens overwrite.
        """
        heads = (layer.q_proj, layer.k_proj, layer.v_proj)
        query, key, value = (one(x).unflatten(2, (-1, layer.head_dim)) for one in heads)
        query, key = (rotate_heads(one, self.positions, layer.rope_base) for one in (query, key))
        keys, values = (one[self.sequences] for one in self.tensors[number])
        keys[self.numbers, self.positions] = key
        values[self.numbers, self.positions] = value
        attention = self.attention if x.shape[1] == 1 and rows.alone is None else by_sdpa
        out = attention(query, keys[:, : self.length], values[:, : self.length], self.positions)
        return layer.o_proj(out.flatten(2))

    def end(self, rows: Rows) -> None:
        self.seen[self.sequences] += rows.n_tokens

    def shape_of(self, longest: int) -> int:
        """Number of keys that a step reads: the longest sequence's, rounded up."""
        return round_up(longest, self.round)

    def drop(self, b: int) -> None:
        self.seen[b] = 0

    def reset(self) -> None:
        self.seen.zero_()

    def fill(self, tokens: int) -> None:
        """Random keys, as if so many tokens had passed in every sequence."""
        for tensor in sum(self.tensors, ()):
            tensor.normal_()
        self.seen.fill_(tokens)

    @property
    def memory_bytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in sum(self.tensors, ()))


def fastest(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[str, Attention]:
    """The name and the function of the fastest attention for one query of each row over all
    keys."""
    kernels: dict[str, Attention] = {"sdpa": by_sdpa, "lengths": by_lengths}
    kernels.update((name, by_backend(one)) for name, one in BACKENDS.items())
    positions = torch.full((len(query), 1), key.shape[1] - 1, device=query.device)
    times = {}
    for name, attention in kernels.items():
        try:
            attention(query, key, value, positions)
        except (ImportError, TypeError, RuntimeError):  # not of this torch, or not of this device
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(TRIALS):
            attention(query, key, value, positions)
        end.record()
        end.synchronize()
        times[name] = start.elapsed_time(end)
    name = min(times, key=times.get)
    return name, kernels[name]
