"""Continuous batching, as serve.py does it: a queue of requests over a pool of sequences.

A request waits until a sequence of the pool is free. In each step at most one request passes a
piece of its prompt, and every request whose prompt has passed, up to its last token, gets its next
token. Then requests that have all their tokens leave, and their sequences are free for others.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from typing import Callable, Dict, List, NamedTuple, Tuple, Union

import program

if __name__ == "__main__":
    program.belongs_to("serve.py")

import torch
from serve_full import FullPool
from serve_model import BoundedPool, Model, Rows, next_tokens

Pool = Union[BoundedPool, FullPool]
Pieces = Dict[int, List[int]]  # the next tokens of sequences, by the number of the sequence
Captured = Tuple[torch.cuda.CUDAGraph, Rows, torch.Tensor]  # a graph, its inputs and its output


class Request:
    def __init__(self, arrival: int, prompt: list[int], wanted: int, context: int) -> None:
        self.arrival = arrival  # the step at which it arrives
        self.prompt = prompt
        self.wanted = wanted  # tokens to make
        self.context = context  # tokens before the prompt, which are in the cache already
        self.passed = 0  # tokens of the prompt that have entered the cache
        self.made: list[int] = []

    @property
    def length(self) -> int:
        """Tokens in the cache. The last one that was made is not there yet."""
        return self.context + self.passed + max(len(self.made) - 1, 0)

    @property
    def is_prompt_done(self) -> bool:
        return self.passed == len(self.prompt)

    @property
    def is_ready(self) -> bool:
        """The next token that passes the model, be it the last of the prompt, gives a new one."""
        return self.passed >= len(self.prompt) - 1

    def piece(self, most: int) -> list[int]:
        """The tokens that come next: of its prompt at most so many, or the last one made."""
        if self.is_prompt_done:
            return self.made[-1:]
        return self.prompt[self.passed : self.passed + most]


def make_requests(options: argparse.Namespace, text: torch.Tensor) -> list[Request]:
    """Requests in the order of their arrival, whose prompts are pieces of `text`. They are the same
    for the same options."""
    generator = random.Random(options.seed)
    requests, arrival = [], 0.0
    for _ in range(options.requests):
        length = generator.randint(*options.prompt)
        start = generator.randrange(len(text))
        prompt = text[(start + torch.arange(length)) % len(text)].tolist()
        wanted = generator.randint(*options.output)
        requests.append(Request(int(arrival), prompt, wanted, options.context))
        arrival += generator.expovariate(1 / options.gap) if options.gap else 0
    return requests


class Graphs:
    """Runs steps. On a CUDA device one of a token for each sequence is captured as a CUDA graph for
    each `shape`, and replayed: the host then launches one graph in place of hundreds of kernels."""

    def __init__(self, run: Callable[[Rows], torch.Tensor], device: str) -> None:
        self.run, self.device = run, device
        self.captured: dict[int, Captured] = {}
        self.memory = torch.cuda.graph_pool_handle() if device == "cuda" else None

    def __call__(self, rows: Rows, shape: int) -> torch.Tensor:
        if self.device == "cpu" or rows.alone is not None or rows.tokens.shape[1] > 1:
            return self.run(on_device(rows, self.device))
        if shape not in self.captured:
            self.captured[shape] = self.capture(rows)
        graph, inputs, out = self.captured[shape]
        for tensor, given in zip(inputs[:3], rows[:3]):
            if tensor is not None:
                tensor.copy_(given)
        graph.replay()
        return out

    def capture(self, rows: Rows) -> Captured:
        """The step runs first without any token: capturing needs kernels and libraries that are
        loaded."""
        inputs = on_device(rows, self.device)
        inputs.n_tokens.zero_()
        if inputs.index is not None:
            inputs.index.fill_(-1)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.run(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory):
            out = self.run(inputs)
        return graph, inputs, out


def on_device(rows: Rows, device: str) -> Rows:
    moved = (None if one is None else one.to(device) for one in rows[:3])
    return Rows(*moved, *rows[3:])


class Result(NamedTuple):
    tokens: list[list[int]]  # of each request
    seconds: list[float]  # of each step

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(map(len, self.tokens)) / sum(self.seconds)


class Server:
    """Serves requests with a model over a pool. One may serve several times: graphs are kept."""

    rides = 64  # the longest piece of a prompt that a batch of single tokens takes along

    def __init__(self, model: Model, pool: Pool, options: argparse.Namespace) -> None:
        self.model, self.pool = model, pool
        self.pools: list[Pool] = [pool]
        self.piece, self.sequences = options.piece, options.sequences
        # A CUDA graph has constant shapes: a row for each sequence, also if it takes no part.
        self.has_all_rows = options.device == "cuda" or not pool.takes_some
        self.graphs = Graphs(self.forward, options.device)
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # by the sequence that each has
        self.free: list[int] = []

    def serve(self, requests: list[Request]) -> Result:
        """Serve until all requests have their tokens. The pool is as it was at the start, or
        filled."""
        self.waiting, self.running = deque(requests), {}
        self.free = list(range(self.sequences))
        seconds, clock = [], 0
        while self.waiting or self.running:
            if not self.running:
                clock = max(clock, self.waiting[0].arrival)
            before = time.perf_counter()
            self.step(clock)
            seconds.append(time.perf_counter() - before)
            clock += 1
        return Result([one.made[: one.wanted] for one in requests], seconds)

    def step(self, clock: int) -> None:
        """Take requests in, pass a piece of a prompt, make a token for each other request."""
        while self.waiting and self.free and self.waiting[0].arrival <= clock:
            self.running[self.free.pop(0)] = self.waiting.popleft()
        pieces = {b: one.piece(1) for b, one in self.running.items() if one.is_ready}
        filling = [b for b, one in self.running.items() if not one.is_ready]
        for b in filling[:1]:
            piece = self.running[b].piece(self.piece)
            if len(piece) > self.rides:
                self.prefill(b, piece)
            else:
                pieces[b] = piece
        if pieces:
            self.decode(pieces)
        for b, request in list(self.running.items()):
            if len(request.made) >= request.wanted:
                del self.running[b]
                for pool in self.pools:
                    pool.drop(b)
                self.free.append(b)

    def prefill(self, b: int, piece: list[int]) -> None:
        """A piece of a prompt by itself: one row, of any length."""
        rows = Rows(
            torch.tensor([piece]),
            torch.tensor([b], dtype=torch.int32),
            torch.tensor([len(piece)], dtype=torch.int32),
            b,
            self.running[b].length + len(piece),
        )
        self.take({b: piece}, [b], self.run(rows))

    def decode(self, pieces: Pieces) -> None:
        """The next tokens of several sequences in one batch, by sequence: up to 64 of each."""
        rows, numbers = self.rows_of(pieces)
        self.take(pieces, numbers, self.run(rows))

    def forward(self, rows: Rows) -> torch.Tensor:
        return next_tokens(self.model, self.pool, rows)

    def run(self, rows: Rows) -> list[int]:
        """The next token of each row, read back: a server sends it at once."""
        return self.graphs(rows, self.pool.shape_of(rows.longest)).tolist()

    def rows_of(self, pieces: Pieces) -> tuple[Rows, list[int]]:
        """The rows of a step, padded to the longest piece, and the sequence of each. A row that
        takes no part has index -1 and n_tokens 0."""
        numbers = list(range(self.sequences)) if self.has_all_rows else sorted(pieces)
        given = [pieces.get(b, []) for b in numbers]
        most = max(map(len, given))
        tokens = torch.tensor([one + [0] * (most - len(one)) for one in given])
        index = [b if one else -1 for b, one in zip(numbers, given)]
        counts = [len(one) for one in given]
        longest = max(one.length for one in self.running.values()) + most
        sizes = (torch.tensor(one, dtype=torch.int32) for one in (index, counts))
        return Rows(tokens, *sizes, None, longest), numbers

    def take(self, pieces: Pieces, numbers: list[int], tokens: list[int]) -> None:
        """Note which tokens have entered the cache, and the next token of whole prompts."""
        for b, token in zip(numbers, tokens):
            if b not in pieces:
                continue
            request = self.running[b]
            if not request.is_prompt_done:
                request.passed += len(pieces[b])
            if request.is_prompt_done:
                request.made.append(token)
