"""Speculative decoding, as serve.py --draft does it: some layers draft, and all of them check.

In each round the first layers of the model, with a pool of their own, draft K tokens one by one.
Then the whole model passes the last token and the K drafts at once, and says what it would have
made after each. The drafts that it agrees with enter both caches; so does the token before them.
Every round thus makes 1 to K + 1 tokens, the same as the whole model alone.
"""

from __future__ import annotations

import argparse

import program

if __name__ == "__main__":
    program.belongs_to("serve.py")

import torch
from serve_loop import Graphs, Pieces, Server
from serve_model import BoundedPool, Model, Rows


class DraftServer(Server):
    """A Server whose steps are rounds. Drafts have no index: a round has a row for each sequence,
    and none of the tokens of a row with n_tokens 0 enter the cache. A piece of a prompt comes by
    itself."""

    rides = 0

    def __init__(
        self, model: Model, pool: BoundedPool, drafts: BoundedPool, options: argparse.Namespace
    ) -> None:
        super().__init__(model, pool, options)
        self.drafts, self.count = drafts, options.draft
        self.caches = (drafts.cache, pool.cache)
        self.pools.append(drafts)
        self.has_all_rows = True
        self.rounds = Graphs(self.round, options.device)
        self.drafted = self.right = 0  # drafts, and drafts that the model agreed with

    def round(self, rows: Rows) -> torch.Tensor:
        """[sequences, K + 2] int64: what the model makes after each of K + 1 tokens, and how many
        of the K drafts are right."""
        tokens = [rows.tokens]
        for _ in range(self.count + 1):
            states = self.model(rows._replace(tokens=tokens[-1]), self.drafts)
            tokens.append(self.model.logits(states).argmax(-1))
        drafted = torch.cat(tokens[:-1], 1)  # the last one has only passed the drafts' layers
        states = self.model(rows._replace(tokens=drafted), self.pool)
        made = self.model.logits(states).argmax(-1)
        right = (made[:, :-1] == drafted[:, 1:]).cumprod(1).sum(1)
        # The token before the drafts, and the right drafts, enter both caches.
        accepted = ((right + 1) * rows.n_tokens).int()
        for cache in self.caches:
            cache.commit(accepted)
        return torch.cat((made, right[:, None]), 1)

    def forward(self, rows: Rows) -> torch.Tensor:
        """A piece of a prompt enters both caches."""
        self.model(rows, self.drafts)
        return super().forward(rows)

    def decode(self, pieces: Pieces) -> None:
        """A round, in which each sequence of `pieces` has one token."""
        rows, _ = self.rows_of(pieces)
        rows = rows._replace(index=None, draft=True)
        found = self.rounds(rows, self.pool.shape_of(rows.longest)).tolist()
        for b in pieces:
            *made, right = found[b]
            request = self.running[b]
            request.passed = len(request.prompt)
            request.made += made[: right + 1]
            self.drafted += self.count
            self.right += right
