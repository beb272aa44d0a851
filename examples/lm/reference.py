#!/usr/bin/env python3
"""The model of examples/lm in PyTorch, in float32: the loss of a text, as lm --loss computes it.

    python examples/lm/reference.py MODEL.safetensors TEXT --length 8192

Run it with the package installed, or with FDMA_LIBRARY=build/libfdma.so PYTHONPATH=python in the
environment. Exit status: 0 done; 2 bad usage.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Callable, NamedTuple


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--length", type=int, default=8192, help="bytes of a piece")
    options = parser.parse_args()
    for path in (options.model, options.text):
        if not path.is_file():
            parser.error(f"{path} is not a file")
    if options.length < 1:
        parser.error(f"--length: is {options.length}, want 1 or more")
    if options.text.stat().st_size < 2:
        size = options.text.stat().st_size
        parser.error(f"{options.text}: has {size} bytes, want 2 or more")
    return options


if __name__ == "__main__":
    parse()  # --help and wrong options end here, before PyTorch is imported

import torch
from flash_dmattn import attention, flash_dma_attention, rotary
from safetensors import safe_open
from torch.nn.functional import cross_entropy, linear, rms_norm

Attend = Callable[..., torch.Tensor]


class Model(NamedTuple):
    """A model file."""

    weights: dict[str, torch.Tensor]  # float32
    metadata: dict[str, str]

    def size(self, name: str) -> int:
        """A whole number of the metadata."""
        return int(self.metadata[name])

    def nope_heads(self, layer: int) -> int:
        """The number of NoPE heads among the kv heads of a layer."""
        counts = self.metadata.get("nope", "").split()
        return int(counts[layer]) if counts else 0

    def of_layer(self, name: str, layer: int) -> int:
        """window or recent of a layer of a model that does not attend to all keys."""
        has_own = self.nope_heads(layer) > 0 and f"nope_{name}" in self.metadata
        return self.size(f"nope_{name}" if has_own else name)


def read_model(path: Path) -> Model:
    """Weights of 8 bits are multiplied by the scales of their rows."""
    with safe_open(path, "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}
        metadata = file.metadata()
    weights = {}
    for name, tensor in stored.items():
        if tensor.dtype is torch.int8:
            weights[name] = tensor.float() * stored[f"{name}.scale"][:, None]
        elif not name.endswith(".scale"):
            weights[name] = tensor.float()
    return Model(weights, metadata)


def attend(model: Model, layer: int, *heads: torch.Tensor) -> torch.Tensor:
    """Attention of a layer, to all keys or to those that it keeps, [batch, len, q_heads, head_dim].

    `heads` are its queries, keys and values."""
    if model.metadata["window"] == "all":
        return attention(*heads, causal=True)[0]
    name = f"blocks.{layer}.attention."
    scores = model.weights[f"{name}dt_proj.weight"], model.weights[f"{name}A"]
    return flash_dma_attention(
        *(*heads, *scores, model.of_layer("window", layer)),
        causal=True,
        recent=model.of_layer("recent", layer),
        sinks=model.size("sinks"),
        bias_form=model.metadata["bias_form"],
    )


def rotate_heads(model: Model, layer: int, x: torch.Tensor) -> torch.Tensor:
    """Queries or keys [batch, len, heads, head_dim] with rotary embedding. Of a NoPE head only the
    first nope_rotary_dim channels have one."""
    positions = torch.arange(x.shape[1])[None]
    base, dim = float(model.metadata["rotary_base"]), int(model.metadata.get("nope_rotary_dim", 0))
    nope = model.nope_heads(layer) * x.shape[2] // model.size("kv_heads")
    return rotary.rotate_heads(x, positions, base, nope, dim)


def run(model: Model, text: torch.Tensor, attend: Attend = attend) -> torch.Tensor:
    """Logits [batch, len, 256] of the byte that follows each position of text [batch, len]."""
    weights, dim = model.weights, model.size("head_dim")
    eps = float(model.metadata["norm_eps"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], eps)

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, weights[f"{name}.weight"])

    x = weights["embedding.weight"][text]
    for n in range(model.size("layers")):
        block = f"blocks.{n}."
        normed = norm(x, f"{block}attention_norm")
        q, k, v = (
            project(normed, f"{block}attention.{one}_proj").unflatten(2, (-1, dim)) for one in "qkv"
        )
        if int(model.metadata.get("qk_norm", 0)) == 1:
            q, k = norm(q, f"{block}attention.q_norm"), norm(k, f"{block}attention.k_norm")
        q, k = (rotate_heads(model, n, one) for one in (q, k))
        attended = attend(model, n, q, k, v)
        x = x + project(attended.flatten(2), f"{block}attention.o_proj")
        inner = project(norm(x, f"{block}norm"), f"{block}expand").relu().square()
        x = x + project(inner, f"{block}contract")
    return project(norm(x, "norm"), "head")


@torch.no_grad()
def loss(model: Model, text: bytes, length: int) -> float:
    """Bits per byte. The text is cut into pieces of `length` bytes. Each piece predicts the bytes
    that follow its own: every byte of the text but the first is predicted once."""
    whole = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    nats = 0.0
    for first in range(0, len(whole) - 1, length):
        piece = whole[first : first + length + 1]
        nats += cross_entropy(run(model, piece[None, :-1])[0], piece[1:], reduction="sum").item()
    return nats / math.log(2) / (len(whole) - 1)


def main() -> None:
    options = parse()
    text = options.text.read_bytes()
    print(f"{loss(read_model(options.model), text, options.length):.6f} bits per byte")


if __name__ == "__main__":
    main()
