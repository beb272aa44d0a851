#!/usr/bin/env python3
"""Serve requests in one batch: the calls that an engine of your own makes to a cache.

Requests of random bytes arrive over time, and a small transformer of random weights continues them
by its likeliest bytes. Its DynamicMaskCache is a pool of sequences; a request has one from its
first token to its last, and then the next request begins there. All tokens of a step are one batch:
pieces of prompts, and the newest tokens of requests of other ages. With --draft the bytes that
followed an earlier occurrence of the last two are drafts, which the model checks in the same call.
Run it with the package installed, or with FDMA_LIBRARY=build/libfdma.so PYTHONPATH=python in the
environment:

    python examples/serve.py                        # 16 requests on 8 sequences
    python examples/serve.py --draft 3 --piece 100  # with drafts; long pieces come by themselves

It compares the bytes of each request with those that the model makes from the whole sequence,
without a cache. On a CPU they are the same; on a CUDA device, in bfloat16, rounding changes some.
Exit status: 0 done; 1 bytes that differ on a CPU; 2 bad usage; 130 ended by Ctrl-C.
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Dict, List

import program

NUMBERS = {  # options: their defaults, least values and help
    "requests": (16, 1, "requests to serve"),
    "sequences": (8, 1, "sequences of the cache: requests that are served at the same time"),
    "prompt": (96, 1, "tokens of a prompt, at most"),
    "output": (64, 1, "tokens to make for a request, at most"),
    "gap": (2, 0, "steps between two arrivals, the mean"),
    "piece": (32, 1, "tokens of a prompt in a step, at most"),
    "draft": (0, 0, "drafts of a request in a step, at most 63; 0: none"),
    "window": (24, 1, "keys that a query keeps by score"),
    "recent": (8, 0, "newest keys that it keeps beside these"),
    "layers": (2, 1, "layers"),
    "width": (128, 64, "of the hidden states, a multiple of 64"),
    "seed": (0, 0, "of weights and requests"),
}
BATCH_MOST = 64  # tokens of a sequence in a call for several of them


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    head, _, _ = (__doc__ or "").partition("\n\n")
    show = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog="serve.py", description=head, formatter_class=show)
    for name, (default, _, words) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=words)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="by default cuda if there is one")
    options = parser.parse_args(arguments)
    for name, (_, least, _) in NUMBERS.items():
        if (found := getattr(options, name)) < least:
            parser.error(f"--{name}: is {found}, want {least} or more")
    if options.draft >= BATCH_MOST:
        parser.error(f"--draft: is {options.draft}, want {BATCH_MOST - 1} or less")
    if options.width % 64:
        parser.error(f"--width: is {options.width}, want a multiple of 64")
    found = program.default_device()
    if options.device == "cuda" != found:
        parser.error("--device: is cuda, but there is none")
    options.device = options.device or found
    return options


if __name__ == "__main__":
    program.begin(parse)

import torch
import train_text
from flash_dmattn import DynamicMaskAttention, DynamicMaskCache
from torch import nn

Pieces = Dict[int, List[int]]  # the next tokens of requests, by their sequences


class Model(train_text.Model):
    """From bytes to the logits of each next byte, with a cache that holds the earlier bytes."""

    def __init__(self, options: argparse.Namespace) -> None:
        sizes = train_text.sizes_of(options.width)
        sizes.update(window=options.window, recent=options.recent)
        super().__init__(
            options.width, (DynamicMaskAttention(**sizes) for _ in range(options.layers))
        )
        # Attention is sharp and decides on the next byte. Scores differ between keys, except in the
        # first layer, where equal bytes would differ by rounding alone.
        nn.init.normal_(self.embedding.weight, std=0.3)
        for name, parameter in self.blocks.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                nn.init.normal_(parameter, std=2 * options.width**-0.5)
            elif name.endswith(("v_proj.weight", "o_proj.weight")):
                nn.init.normal_(parameter, std=options.width**-0.5)
            elif name.endswith(".A") and not name.startswith("0."):
                nn.init.normal_(parameter)

    def read(self, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
        """[rows, len] -> [rows, len, 256] float32: 16 bits would make many of them equal.
        `options` go to the attention of every layer."""
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x, layer=number, **options)
        return nn.functional.linear(self.norm(x).float(), self.head.weight.float())


@dataclass
class Request:
    arrival: float  # the step at which it arrives
    prompt: list[int]
    wanted: int  # tokens to make
    made: list[int] = field(default_factory=list)
    passed: int = 0  # tokens that are in the cache: all but the last one made, after the prompt

    def piece(self, most: int, drafts: int) -> list[int]:
        """The next tokens: of the prompt at most so many, or the last one made and its drafts."""
        text = self.prompt + self.made
        if self.passed < len(self.prompt):
            return text[self.passed : self.passed + most]
        return text[self.passed :] + look_up(text, drafts)

    def take(self, piece: list[int], next_tokens: list[int]) -> int:
        """Note what the model makes after each token of a piece. Returns how many of these enter
        the cache: the tokens of the text, and the drafts up to the first wrong one."""
        left = len(self.prompt) + len(self.made) - self.passed
        known = accepted = min(len(piece), left)
        while accepted < len(piece) and piece[accepted] == next_tokens[accepted - 1]:
            accepted += 1
        self.passed += accepted
        if known == left:
            self.made += next_tokens[known - 1 : accepted]
        return accepted


def look_up(text: list[int], most: int) -> list[int]:
    """The tokens, `most` or fewer, that followed the last two where these last occurred."""
    for start in range(len(text) - 3, -1, -1):
        if text[start : start + 2] == text[-2:]:
            return text[start + 2 : start + 2 + most]
    return []


class Server:
    def __init__(self, model: Model, options: argparse.Namespace) -> None:
        self.model, self.options = model, options
        sizes = train_text.sizes_of(options.width)
        self.cache = DynamicMaskCache(
            options.layers,
            options.sequences,
            sizes["kv_heads"],
            train_text.HEAD_DIM,
            options.window,
            recent=options.recent,
            dtype=model.head.weight.dtype,
            device=options.device,
        )
        self.steps = self.drafted = self.right = 0
        self.running: dict[int, Request] = {}  # by their sequences
        self.free = list(range(options.sequences))

    def serve(self, requests: list[Request]) -> None:
        """Serve until every request, in the order of arrival, has its tokens."""
        waiting = deque(requests)
        while waiting or self.running:
            while waiting and self.free and waiting[0].arrival <= self.steps:
                self.running[self.free.pop()] = waiting.popleft()
            self.step()
            program.doing(f"step {self.steps}: {len(self.running)} requests run")

    def step(self) -> None:
        """Pass the next tokens of all requests, and let those that are done leave."""
        self.steps += 1
        pieces = {
            b: one.piece(self.options.piece, self.options.draft) for b, one in self.running.items()
        }
        for b in [b for b, piece in pieces.items() if len(piece) > BATCH_MOST]:
            self.pass_known({b: pieces.pop(b)})
        if pieces and self.options.draft:
            self.pass_drafts(pieces)
        elif pieces:
            self.pass_known(pieces)
        for b, one in list(self.running.items()):
            if len(one.made) >= one.wanted:
                del one.made[one.wanted :], self.running[b]
                self.cache.drop(b)  # the next request begins with an empty sequence
                self.free.append(b)

    def pass_known(self, pieces: Pieces) -> None:
        """Pass tokens that enter the cache at once. Each row of the batch names its sequence."""
        numbers = sorted(pieces)
        tokens, n_tokens = self.rows(pieces, numbers)
        index = self.int32(numbers)
        found = self.model.read(tokens, cache=self.cache, index=index, n_tokens=n_tokens)
        for b, next_tokens in zip(numbers, found.argmax(-1).tolist()):
            self.running[b].take(pieces[b], next_tokens)

    def pass_drafts(self, pieces: Pieces) -> None:
        """Pass tokens and their drafts. There is a row for each sequence, and a token enters the
        cache when it is committed."""
        numbers = list(range(self.options.sequences))
        tokens, n_tokens = self.rows(pieces, numbers)
        found = self.model.read(tokens, cache=self.cache, n_tokens=n_tokens, draft=True)
        next_tokens, accepted = found.argmax(-1).tolist(), [0] * len(numbers)
        for b, piece in pieces.items():
            one = self.running[b]
            is_prompt = one.passed < len(one.prompt)
            accepted[b] = one.take(piece, next_tokens[b])
            if not is_prompt:
                self.drafted += len(piece) - 1
                self.right += accepted[b] - 1
        self.cache.commit(self.int32(accepted))

    def rows(self, pieces: Pieces, numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of these sequences, padded to the longest piece, and how many each has."""
        rows = [pieces.get(b, []) for b in numbers]
        longest = max(map(len, rows))
        tokens = torch.tensor([one + [0] * (longest - len(one)) for one in rows])
        return tokens.to(self.options.device), self.int32([len(one) for one in rows])

    def int32(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.options.device)


def make_model(options: argparse.Namespace) -> Model:
    torch.manual_seed(options.seed)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    return Model(options).to(options.device, dtype).eval()


def make_requests(options: argparse.Namespace) -> list[Request]:
    """Requests in the order of arrival, the same for the same options."""
    generator = random.Random(options.seed)
    requests, arrival = [], 0.0
    for _ in range(options.requests):
        prompt = generator.choices(range(train_text.BYTES), k=generator.randint(1, options.prompt))
        requests.append(Request(arrival, prompt, generator.randint(1, options.output)))
        arrival += generator.expovariate(1 / options.gap) if options.gap else 0
    return requests


def is_of_whole_sequence(model: Model, request: Request) -> bool:
    """The model makes the same tokens from all earlier ones at once, without a cache."""
    text = torch.tensor([request.prompt + request.made[:-1]], device=model.head.weight.device)
    made = model.read(text)[0, len(request.prompt) - 1 :].argmax(-1)
    return made.tolist() == request.made


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    model, requests = make_model(options), make_requests(options)
    server = Server(model, options)
    server.serve(requests)
    made = sum(len(one.made) for one in requests)
    print(f"{len(requests)} requests: {made} tokens in {server.steps} steps")
    print(f"cache: {server.cache.memory_bytes} bytes for {options.sequences} sequences")
    if options.draft:
        print(f"drafts: {server.right} of {server.drafted} are right")
    same = sum(is_of_whole_sequence(model, one) for one in requests)
    print(f"{same} of {len(requests)} requests have the tokens of the whole sequence")
    return int(options.device == "cpu" and same < len(requests))


if __name__ == "__main__":
    raise SystemExit(main())
