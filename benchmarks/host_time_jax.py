#!/usr/bin/env python3
"""Time small jitted calls of flash_dmattn.jax in alternation with jax.nn.dot_product_attention.

    python benchmarks/host_time_jax.py OUT.json --rounds 15

One sequence of 64 tokens, causal, head_dim 64. Columns: the medians of both times in microseconds,
and the median of the ratios of neighbouring times. On a GPU, bfloat16 alone. The file has a line of
JSON for the machine and one for each row.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import program

LENGTH, WINDOW, HEAD_DIM = 64, 32, 64
HEADS = ((1, 1), (8, 2))  # query heads and kv heads


def parse() -> argparse.Namespace:
    head, _, _ = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=head)
    parser.add_argument("out", type=Path, metavar="OUT.json", help="the machine and the rows")
    parser.add_argument("--rounds", type=int, default=15, help="medians are over so many")
    parser.add_argument("--calls", type=int, default=300, help="of each function in a round")
    options = parser.parse_args()
    if min(options.rounds, options.calls) < 1:
        parser.error("--rounds and --calls: want 1 or more")
    return options


if __name__ == "__main__":
    program.begin(parse)

import flash_dmattn.jax as fdma
import jax
import jax.numpy as jnp
from jax import random
from machine import describe_machine, write_whole


def make_calls(q_heads: int, kv_heads: int, dtype: Any) -> tuple[Callable[[], Any], ...]:
    query = random.normal(random.key(0), (1, LENGTH, q_heads, HEAD_DIM), dtype)
    key, value = random.normal(random.key(1), (2, 1, LENGTH, kv_heads, HEAD_DIM), dtype)
    dt_proj = random.normal(random.key(2), (kv_heads, kv_heads * HEAD_DIM)) / 12
    a_coef = jnp.ones(kv_heads)
    ours = jax.jit(lambda *x: fdma.flash_dma_attention(*x, WINDOW, causal=True))
    dense = jax.jit(lambda *x: jax.nn.dot_product_attention(*x, is_causal=True))
    return (
        lambda: ours(query, key, value, dt_proj, a_coef).block_until_ready(),
        lambda: dense(query, key, value).block_until_ready(),
    )


def time_calls(call: Callable[[], Any], calls: int) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def main() -> None:
    options = parse()
    on_gpu = jax.default_backend() == "gpu"
    device, sizes = "cuda" if on_gpu else "cpu", {"length": LENGTH, "window": WINDOW}
    lines = [{**describe_machine(device, jax=jax.__version__), **sizes, "head_dim": HEAD_DIM}]
    print("query heads, kv heads, dtype: fdma, dot_product_attention, ratio")
    for dtype in (jnp.bfloat16,) if on_gpu else (jnp.float32, jnp.bfloat16):
        for heads in HEADS:
            calls = make_calls(*heads, dtype)
            for call in calls:
                call()
            pairs = [
                [time_calls(call, options.calls) for call in calls] for _ in range(options.rounds)
            ]
            ours, dense = (statistics.median(times) * 1e6 for times in zip(*pairs))
            ratio = statistics.median(one / other for one, other in pairs)
            name = f"{heads[0]}, {heads[1]}, {jnp.dtype(dtype).name}"
            print(f"{name}: {ours:.0f} us, {dense:.0f} us, {ratio:.2f}", flush=True)
            row = {"q_heads": heads[0], "kv_heads": heads[1], "dtype": jnp.dtype(dtype).name}
            lines.append({**row, "us": ours, "dense_us": dense, "ratio": ratio})
    write_whole(options.out, lines)


if __name__ == "__main__":
    main()
