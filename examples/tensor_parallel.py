#!/usr/bin/env python3
"""Decodes with a layer whose heads are divided over processes: tensor parallelism.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

Each rank has some kv heads with their query heads, and a cache for these alone. A score needs the
values of all kv heads. So dt_proj is divided along its input, as in the plan of transformers' Doge
models: a rank multiplies the values of its own heads, and the sum over ranks, kv_heads numbers for
each token, has the scores of all heads. o_proj is divided along its input too, so that there are
two sums over ranks for each layer. Nothing else is exchanged.

Every rank also has the whole layer here, only to compare the results. The scores are sums in
another order, so keys whose scores differ by rounding alone may rank differently.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import program


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompt", type=int, default=300, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=40, help="tokens that follow one by one")
    given = parser.parse_args()
    for name in ("prompt", "tokens"):
        if getattr(given, name) < 1:
            parser.error(f"--{name}: is {getattr(given, name)}, want 1 or more")
    if "RANK" not in os.environ:
        parser.error(
            "is not one of several ranks, want it started by torchrun: "
            "torchrun --nproc-per-node 2 examples/tensor_parallel.py"
        )
    return given


if __name__ == "__main__":
    program.begin(parse)

import flash_dmattn
import torch
import torch.distributed as dist
from flash_dmattn.rotary import rotate_heads
from torch import nn
from torch.nn.functional import linear, softplus

PIECE = 64  # tokens of a call of decode(), at most


class DividedAttention(nn.Module):
    """The heads of a DynamicMaskAttention that one of several ranks has."""

    def __init__(self, whole: flash_dmattn.DynamicMaskAttention, rank: int, ranks: int) -> None:
        super().__init__()
        if whole.kv_heads % ranks:
            raise ValueError(f"{ranks} ranks cannot divide {whole.kv_heads} kv heads evenly")
        self.head_dim, self.base = whole.head_dim, whole.rope_base
        count = whole.kv_heads // ranks
        self.own = slice(rank * count, (rank + 1) * count)

        def take(weight: torch.Tensor, dim: int) -> nn.Parameter:
            """The rows (dim 0) or columns (dim 1) of this rank's heads."""
            return nn.Parameter(weight.detach().chunk(ranks, dim)[rank].clone())

        self.q_weight, self.k_weight, self.v_weight = (
            take(one.weight, 0) for one in (whole.q_proj, whole.k_proj, whole.v_proj)
        )
        self.dt_weight, self.o_weight = take(whole.dt_proj.weight, 1), take(whole.o_proj.weight, 1)
        self.A = take(whole.A, 0)

    def score(self, value: torch.Tensor) -> torch.Tensor:
        """The scores of the own kv heads, [batch, kv_heads, len] float32."""
        dt = linear(value.flatten(2), self.dt_weight).float()
        dist.all_reduce(dt)  # of all kv heads
        return (self.A * softplus(dt[..., self.own])).transpose(1, 2).contiguous()

    def forward(self, x: torch.Tensor, cache: flash_dmattn.KeyCache, seen: int) -> torch.Tensor:
        """The results for the next tokens x [batch, len, hidden], len at most 64, after `seen`
        tokens: [batch, len, hidden]."""
        weights = (self.q_weight, self.k_weight, self.v_weight)
        query, key, value = (linear(x, w).unflatten(2, (-1, self.head_dim)) for w in weights)
        if self.base is not None:
            positions = torch.arange(seen, seen + x.shape[1], device=x.device)[None]
            query, key = (rotate_heads(one, positions, self.base) for one in (query, key))
        out = flash_dmattn.decode(query, key, value, cache, score=self.score(value))
        out = linear(out.flatten(2), self.o_weight)
        dist.all_reduce(out)
        return out


def main() -> None:
    given = parse()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same layer and tokens on all ranks
    sizes: dict[str, Any] = {"window": 48, "recent": 16}
    whole = flash_dmattn.DynamicMaskAttention(256, 8, 4, **sizes)
    nn.init.normal_(whole.A)
    states = torch.randn(2, given.prompt + given.tokens, 256)
    whole, states = whole.to(device, dtype), states.to(device, dtype)
    divided = DividedAttention(whole, rank, ranks)
    kind: dict[str, Any] = {"head_dim": whole.head_dim, "dtype": dtype, "device": device}
    cache = flash_dmattn.DynamicMaskCache(1, 2, whole.kv_heads // ranks, **sizes, **kind)

    steps = [*range(0, given.prompt, PIECE), *range(given.prompt, states.shape[1])]
    outs = []
    program.doing(f"decodes {states.shape[1]} tokens")
    with torch.no_grad():
        for begin, end in zip(steps, [*steps[1:], states.shape[1]]):
            outs.append(divided(states[:, begin:end], cache.keys, begin))
        expected = whole(states)
    error = (torch.cat(outs, 1) - expected).abs().max() / expected.abs().max()
    print(
        f"rank {rank} of {ranks}: {whole.kv_heads // ranks} kv heads, a cache of "
        f"{cache.memory_bytes} bytes, largest difference {error.item():.1e}",
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
