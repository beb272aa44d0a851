"""The model that serve.py serves, and its states: one cache of constant size for each sequence.

A pool holds the states of a fixed number of sequences. The model does not know their kind: it calls
pool.attend() in every layer. FullPool in serve_full.py is the other kind.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Iterator
from typing import Callable, NamedTuple

import program

if __name__ == "__main__":
    program.belongs_to("serve.py")

import torch
from flash_dmattn import DynamicMaskAttention, DynamicMaskCache
from torch import nn
from torch.nn.functional import cross_entropy, gelu
from train_text import BYTES, Block, Text, cut, narrow

Attend = Callable[[int, DynamicMaskAttention, torch.Tensor], torch.Tensor]
RATE = 1e-3  # learning rate of AdamW
ROWS, LENGTH = 8, 128  # of a training step: pieces of text, and the bytes in each


class Rows(NamedTuple):
    """The next tokens of some sequences of a pool: a row for each."""

    tokens: torch.Tensor  # [rows, len] int64
    index: torch.Tensor | None  # [rows] int32: the sequence of each row, -1: none; None: 0, 1, ...
    n_tokens: torch.Tensor  # [rows] int32: the first n of a row are tokens, the rest is padding
    alone: int | None = None  # the sequence of the only row, if that is a piece of a prompt
    longest: int = 0  # tokens of the longest sequence of the pool, these included
    draft: bool = False  # the tokens enter no cache before they are committed


class Model(nn.Module):
    """From bytes to the logits of each next byte, with a pool that holds the earlier bytes."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, options.width)
        sizes = (options.width, options.heads, options.kv_heads, options.window)
        rules = {"recent": options.recent, "head_dim": options.head_dim}
        layer = functools.partial(DynamicMaskAttention, *sizes, **rules)
        self.blocks = nn.ModuleList(Block(options.width, layer()) for _ in range(options.layers))
        self.norm = nn.RMSNorm(options.width)
        self.head = nn.Linear(options.width, BYTES, bias=False)
        # Attention is sharp and decides on the next byte, even before any training.
        for block in self.blocks:
            for one in (block.attention.q_proj, block.attention.k_proj):
                nn.init.normal_(one.weight, std=2 * options.width**-0.5)
            for one in (block.attention.v_proj, block.attention.o_proj):
                nn.init.normal_(one.weight, std=options.width**-0.5)
        nn.init.normal_(self.embedding.weight, std=0.3)

    def states(self, tokens: torch.Tensor, attend: Attend, layers: int) -> Iterator[torch.Tensor]:
        """The hidden states [rows, len, width] after each of the first `layers` blocks."""
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks[:layers]):
            x = x + attend(number, block.attention, block.attention_norm(x))
            x = x + block.contract(gelu(block.expand(block.norm(x))))
            yield x

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., 256] in float32: 16 bits would make many of them equal."""
        return nn.functional.linear(self.norm(states).float(), self.head.weight.float())

    def forward(self, rows: Rows, pool: BoundedPool) -> torch.Tensor:
        """Hidden states [rows, len, width] after as many blocks as the pool has layers."""
        pool.begin(rows)
        *_, last = self.states(rows.tokens, functools.partial(pool.attend, rows), pool.layers)
        pool.end(rows)
        return last


def next_tokens(model: Model, pool: BoundedPool, rows: Rows) -> torch.Tensor:
    """[rows] int64: the likeliest byte after the last token of each row."""
    states = model(rows, pool)
    last = (rows.n_tokens.long() - 1).clamp(min=0)[:, None, None]
    states = states.take_along_dim(last, 1)[:, 0]
    return model.logits(states).argmax(-1)


class BoundedPool:
    """window + recent keys for each layer, sequence and kv head, however long a sequence gets."""

    # Rows in any order, only of the sequences that take part, may come; FullPool wants all.
    takes_some = True

    def __init__(
        self, options: argparse.Namespace, layers: int, device: str, dtype: torch.dtype
    ) -> None:
        self.layers = layers
        self.cache = DynamicMaskCache(
            *(layers, options.sequences, options.kv_heads, options.head_dim, options.window),
            recent=options.recent,
            dtype=dtype,
            device=device,
        )

    def begin(self, rows: Rows) -> None:
        """Called before the first layer of a step."""

    def attend(
        self, rows: Rows, number: int, layer: DynamicMaskAttention, x: torch.Tensor
    ) -> torch.Tensor:
        """Attention of x [rows, len, width] in a layer. The cache knows the positions, and the
        tokens enter it. A prefill has no padding here, and needs no n_tokens."""
        n_tokens = rows.n_tokens if rows.alone is None and not rows.draft else None
        given = {"index": rows.index, "n_tokens": n_tokens, "draft": rows.draft}
        return layer(x, cache=self.cache, layer=number, **given)

    def end(self, rows: Rows) -> None:
        """Called after the last layer of a step: the cache has counted the tokens itself."""

    def shape_of(self, longest: int) -> int:
        """Number of keys that a step reads: the shapes of a step depend on nothing else."""
        return self.cache.keys.window + self.cache.keys.recent

    def drop(self, b: int) -> None:
        """Free sequence b for another request."""
        self.cache.drop(b)

    def reset(self) -> None:
        self.cache.reset()

    def fill(self, tokens: int) -> None:
        """Random keys, as if so many tokens had passed in every sequence: the newest `recent` of
        them, and `window` others spread over all positions."""
        keys = self.cache.keys
        for tensor in (keys.key, keys.value, keys.score):
            tensor.normal_()
        keys.bias.copy_(keys.score.exp())
        older = tokens - keys.recent
        position = torch.arange(keys.window + keys.recent, dtype=torch.int64)
        position[: keys.window] *= older
        position[: keys.window] //= keys.window
        position[keys.window :] += older - keys.window
        keys.position.copy_(position)
        keys.seen.fill_(tokens)

    @property
    def memory_bytes(self) -> int:
        return self.cache.memory_bytes


def train(model: Model, text: Text, options: argparse.Namespace) -> float:
    """Train all layers and, for drafts, the first --draft-layers of them with the same head; the
    last loss of all layers, in bits per byte."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(options.seed)
    exits = (options.draft_layers - 1, options.layers - 1)
    for step in range(options.train):
        program.doing(f"trains the model: step {step + 1} of {options.train}")
        starts = torch.randint(len(text.train) - LENGTH, (ROWS,), generator=generator)
        pieces = cut(text.train, starts, LENGTH).to(options.device)
        with narrow(options.device):
            found = list(model.states(pieces[:, :-1], lambda _, layer, x: layer(x), options.layers))
            losses = [
                cross_entropy(model.logits(found[end]).flatten(0, 1), pieces[:, 1:].flatten())
                for end in exits
            ]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
    return losses[-1].item() / math.log(2)
