#!/usr/bin/env python3
"""Train a small byte-level language model in JAX, and let it write with a cache of constant size.

Two layers slide, and the last one keeps keys by their learned scores. It reads a text, which may be
a file of yours, and prints losses in bits per byte, then a continuation:

    python examples/train_jax.py --steps 200 --text examples/data/text.txt
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import program

TEXT = Path(__file__).parent / "data" / "text.txt"


def parse() -> argparse.Namespace:
    head, _, _ = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=head)
    parser.add_argument("--text", type=Path, default=TEXT, help="a file to learn")
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a step")
    parser.add_argument("--length", type=int, default=256, help="bytes of a sequence")
    parser.add_argument("--write", type=int, default=200, help="bytes to write")
    options = parser.parse_args()
    if not options.text.is_file():
        parser.error(f"--text: {options.text} is not a file")
    if min(options.steps, options.batch, options.length, options.write) < 1:
        parser.error("--steps, --batch, --length and --write: want 1 or more")
    if options.text.stat().st_size < options.length + 2:
        parser.error(f"--text: {options.text} is shorter than --length + 2")
    return options


if __name__ == "__main__":
    program.begin(parse)

import flash_dmattn.jax as fdma
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, nn, random

WIDTH, HEADS, KV_HEADS, HEAD_DIM = 128, 4, 2, 32
# Of each layer: keys kept by score, and the newest ones that are kept beside them. Layers that
# slide rotate query and key by their positions; the selecting layer does not.
LAYERS = ({"window": 1, "recent": 63}, {"window": 1, "recent": 63}, {"window": 64, "recent": 64})
SLIDING = 1  # window of a layer that slides
RATE, MOMENTUM = 1e-3, 0.9
PROMPT = b"The "

Parameters = Any


def make_parameters(key: Any) -> Parameters:
    def normal(key: Any, *shape: int) -> Any:
        return random.normal(key, shape) / shape[0] ** 0.5

    def layer(key: Any) -> Parameters:
        keys = random.split(key, 5)
        return {
            "qkv": normal(keys[0], WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
            "out": normal(keys[1], HEADS * HEAD_DIM, WIDTH),
            "up": normal(keys[2], WIDTH, 4 * WIDTH),
            "down": normal(keys[3], 4 * WIDTH, WIDTH),
            "dt_proj": normal(keys[4], KV_HEADS * HEAD_DIM, KV_HEADS).T,
            "a_coef": jnp.zeros(KV_HEADS),
        }

    first, last, *keys = random.split(key, 2 + len(LAYERS))
    embedding, head = normal(first, WIDTH, 256).T, normal(last, WIDTH, 256)
    return {"embedding": embedding, "head": head, "layers": [layer(one) for one in keys]}


def normalize(x: Any) -> Any:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def rotate(x: Any, positions: Any) -> Any:
    """Rotary embedding of x [batch, len, heads, head_dim] at positions [batch or 1, len]."""
    frequencies = 1e4 ** (-jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = positions[:, :, None, None] * frequencies
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def rows_of(layer: Parameters, rules: dict[str, int], x: Any, positions: Any) -> Any:
    """query, key and value [batch, len, heads, head_dim]."""
    rows = (normalize(x) @ layer["qkv"]).reshape(*x.shape[:2], -1, HEAD_DIM)
    query, key, value = jnp.split(rows, (HEADS, HEADS + KV_HEADS), axis=2)
    query, key = normalize(query), normalize(key)
    if rules["window"] == SLIDING:
        query, key = rotate(query, positions), rotate(key, positions)
    return query, key, value


def finish_layer(layer: Parameters, x: Any, out: Any) -> Any:
    x = x + out.reshape(*x.shape[:2], -1) @ layer["out"]
    return x + nn.gelu(normalize(x) @ layer["up"]) @ layer["down"]


def logits_of(parameters: Parameters, text: Any) -> Any:
    x, positions = parameters["embedding"][text], jnp.arange(text.shape[1])[None]
    for layer, rules in zip(parameters["layers"], LAYERS):
        weights = layer["dt_proj"], layer["a_coef"]
        keeps = {"keep_window_size": rules["window"], "recent": rules["recent"], "causal": True}
        rows = rows_of(layer, rules, x, positions)
        out = fdma.flash_dma_attention(*rows, *weights, **keeps)
        x = finish_layer(layer, x, out)
    return normalize(x) @ parameters["head"]


def loss_of(parameters: Parameters, text: Any) -> Any:
    """Bits per byte of text [batch, length + 1]."""
    logits = nn.log_softmax(logits_of(parameters, text[:, :-1]))
    chosen = jnp.take_along_axis(logits, text[:, 1:, None], axis=-1)
    return -chosen.mean() / jnp.log(2.0)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(parameters: Parameters, moments: Parameters, text: Any) -> Any:
    """A step of descent by the signs of the gradients' running mean."""
    loss, gradients = jax.value_and_grad(loss_of)(parameters, text)
    moments = jax.tree.map(lambda m, g: MOMENTUM * m + (1 - MOMENTUM) * g, moments, gradients)
    parameters = jax.tree.map(lambda p, m: p - RATE * jnp.sign(m), parameters, moments)
    return parameters, moments, loss


@functools.partial(jax.jit, static_argnums=2)
def write(parameters: Parameters, prompt: Any, count: int) -> Any:
    """The likeliest `count` bytes after prompt [1, length], over one cache a layer."""
    caches, x = [], parameters["embedding"][prompt]
    for layer, rules in zip(parameters["layers"], LAYERS):
        cache = fdma.KeyCache.empty(1, KV_HEADS, HEAD_DIM, **rules)
        weights = {"dt_proj": layer["dt_proj"], "a_coef": layer["a_coef"]}
        rows = rows_of(layer, rules, x, jnp.arange(prompt.shape[1])[None])
        out, cache = fdma.prefill(*rows, cache, **weights)
        x = finish_layer(layer, x, out)
        caches.append(cache)
    first = (normalize(x[:, -1]) @ parameters["head"]).argmax(-1)

    def step(state: Any, _: None) -> Any:
        caches, byte = state
        x, after = parameters["embedding"][byte][:, None], []
        for layer, rules, cache in zip(parameters["layers"], LAYERS, caches):
            rows = rows_of(layer, rules, x, cache.seen[:, None])
            weights = {"dt_proj": layer["dt_proj"], "a_coef": layer["a_coef"]}
            out, cache = fdma.decode(*rows, cache, **weights)
            x = finish_layer(layer, x, out)
            after.append(cache)
        following = (normalize(x[:, 0]) @ parameters["head"]).argmax(-1)
        return (after, following), byte[0]

    _, written = lax.scan(step, (caches, first), None, count)
    return written


def main() -> None:
    options = parse()
    text = np.frombuffer(options.text.read_bytes(), np.uint8).astype(np.int32)
    parameters = make_parameters(random.key(0))
    moments = jax.tree.map(jnp.zeros_like, parameters)
    generator = np.random.default_rng(0)
    program.doing("compiles the step")
    for step in range(1, options.steps + 1):
        starts = generator.integers(0, len(text) - options.length, options.batch)
        batch = np.stack([text[at : at + options.length + 1] for at in starts])
        parameters, moments, loss = train_step(parameters, moments, batch)
        if step % max(options.steps // 10, 1) == 0 or step == 1:
            print(f"step {step}: {loss:.2f} bits per byte", flush=True)
        program.doing(f"step {step} of {options.steps}")
    program.doing("writes")
    written = write(parameters, jnp.array([list(PROMPT)]), options.write)
    print((PROMPT + bytes(written.astype(np.uint8))).decode("utf-8", "replace"))


if __name__ == "__main__":
    main()
