#!/usr/bin/env python3
"""Serve requests in one batch with caches of constant size, and beside it with full caches.

Requests of random lengths arrive over time. A small transformer, of random weights, makes their
tokens with DynamicMaskCache as a pool of sequences; then the same requests are served by the same
loop with a cache of all keys and dense attention, in turns. Run it with the package installed, or
with FDMA_LIBRARY=build/libfdma.so PYTHONPATH=python in the environment:

    python examples/serve.py                       # 16 requests on 8 sequences
    python examples/serve.py --check               # both make the same tokens if nothing is evicted
    python examples/serve.py --draft 3 --train 300 # speculative decoding too

On a CUDA device a step of one token for each sequence is a CUDA graph, for both. 64 sequences that
have 32,768 tokens each, as random keys:

    python examples/serve.py --device cuda --requests 64 --sequences 64 --context 32768 \\
        --output 128:128 --layers 4 --width 2048 --heads 16 --kv-heads 4 --head-dim 128 \\
        --window 1792 --recent 256 --rounds 5 --out FOLDER

serve_loop.py has the queue and the loop, serve_model.py the model and the pool, serve_full.py the
full cache, serve_draft.py speculative decoding. Exit status: 0 done; 1 tokens that differ, or a
file that could not be written; 2 bad usage; 130 ended by Ctrl-C.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any, Dict, List

import program

RIDES = 64  # the longest piece of a prompt that a batch of single tokens can take along
DRAFTS_MOST = RIDES - 1  # with the token before them they are one call of the cache


def two_numbers(text: str) -> tuple[int, int]:
    """LEAST:MOST."""
    try:
        least, most = map(int, text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}, want LEAST:MOST, such as 16:64") from None
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(f"is {text}, want 1 or more, and LEAST up to MOST")
    return least, most


NUMBERS = {  # options: their defaults, least values and help
    "requests": (16, 1, "requests to serve"),
    "sequences": (8, 1, "sequences of the pool: requests that are served at the same time"),
    "context": (0, 0, "tokens, as random keys, that each request has already; its prompt is 1"),
    "piece": (32, 1, f"most tokens of a prompt in a step; up to {RIDES} ride in the batch"),
    "layers": (4, 1, "layers"),
    "width": (256, 8, "width of the hidden states"),
    "heads": (4, 1, "query heads"),
    "kv_heads": (2, 1, "key and value heads"),
    "head_dim": (64, 8, "channels of a head"),
    "window": (96, 1, "keys that a query keeps by score"),
    "recent": (32, 0, "newest keys that it keeps beside these"),
    "draft": (0, 0, "tokens to draft in each round of speculative decoding; 0: none"),
    "draft_layers": (1, 1, "first layers of the model, which draft"),
    "train": (0, 0, "training steps on a text before; without them few drafts are right"),
    "rounds": (3, 1, "times that each server serves all requests, after one that does not count"),
    "seed": (0, 0, "of weights and requests"),
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    head, _, _ = __doc__.partition("\n\n")
    show = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog="serve.py", description=head, formatter_class=show)
    for name, (default, _, words) in NUMBERS.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, default=default, metavar="N", help=words)
    for name, (default, words) in {
        "--prompt": ((16, 96), "tokens of a prompt, LEAST:MOST"),
        "--output": ((16, 48), "tokens to make for a request, LEAST:MOST"),
    }.items():
        parser.add_argument(name, type=two_numbers, default=default, help=words)
    parser.add_argument("--gap", type=float, default=2.0, help="mean steps between two arrivals")
    parser.add_argument("--device", help="cuda or cpu; by default cuda where there is one")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write a file of the times there"
    )
    parser.add_argument("--check", action="store_true", help="compare tokens, in place of times")
    options = parser.parse_args(arguments)
    if message := refusal(options):
        parser.error(message)
    found = program.default_device()
    if options.device == "cuda" != found:
        parser.error("--device: is cuda, but there is none")
    options.device = options.device or found
    if options.check and options.device != "cpu":
        parser.error("--check: want --device cpu, which computes in float32")
    if options.context > 0:
        options.prompt, options.gap = (1, 1), 0
    return options


def refusal(options: argparse.Namespace) -> str | None:
    """The first mistake in the options, or None."""
    for name, (_, least, _) in NUMBERS.items():
        if (found := getattr(options, name)) < least:
            return f"--{name.replace('_', '-')}: is {found}, want {least} or more"
    rows, most = options.window + options.recent, longest(options)
    context = options.context
    wrong = [
        (options.heads % options.kv_heads, "--heads: want a multiple of --kv-heads"),
        (options.head_dim % 8, f"--head-dim: is {options.head_dim}, want a multiple of 8"),
        (options.draft > DRAFTS_MOST, f"--draft: is {options.draft}, want {DRAFTS_MOST} or less"),
        (options.draft_layers > options.layers, "--draft-layers: want --layers or less"),
        (
            options.device not in (None, "cuda", "cpu"),
            f"--device: is {options.device}, want cuda or cpu",
        ),
        (options.out and not options.out.is_dir(), f"--out: {options.out} is not a folder"),
        (0 < context < rows, f"--context: is {context}, want 0, or --window + --recent or more"),
        (
            context > 0 and options.sequences < options.requests,
            "--context: want as many --sequences as --requests",
        ),
    ]
    if options.check:
        wrong += [
            (options.window < most, f"--check: want --window {most} or more, to evict no key"),
            (context > 0 or options.train > 0, "--check: want neither --context nor --train"),
        ]
    return next((message for holds, message in wrong if holds), None)


def longest(options: argparse.Namespace) -> int:
    """Tokens of the longest request."""
    return options.context + options.prompt[1] + options.output[1]


if __name__ == "__main__":
    program.begin(parse)

import torch
from serve_draft import DraftServer
from serve_full import FullPool
from serve_loop import Result, Server, make_requests
from serve_model import BoundedPool, Model, train
from torch import nn
from train_text import read_text

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "examples" / "data" / "text.txt"
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
Results = Dict[str, List[Result]]  # of the rounds, by the name of the server


def make_model(options: argparse.Namespace) -> Model:
    """Random weights. Scores then differ between keys, except with --check: with A = 0 all biases
    are equal, and attention that evicts no key is dense attention."""
    torch.manual_seed(options.seed)
    model = Model(options)
    if options.train:
        loss = train(model.to(options.device), read_text(TEXT), options)
        print(f"{options.train} training steps: loss {loss:.2f} bits per byte")
    elif not options.check:
        for block in model.blocks:
            nn.init.normal_(block.attention.A)
    return model.to(options.device, DTYPES[options.device]).eval()


def make_servers(options: argparse.Namespace, model: Model) -> dict[str, Server]:
    """The servers by their names in results."""
    kind = (options.device, DTYPES[options.device])
    bounded = BoundedPool(options, options.layers, *kind)
    full = FullPool(options, longest(options) + RIDES, *kind)
    servers = {"fdma": Server(model, bounded, options), "full": Server(model, full, options)}
    if options.draft:
        pools = [BoundedPool(options, n, *kind) for n in (options.layers, options.draft_layers)]
        servers["drafts"] = DraftServer(model, *pools, options)
    return servers


def serve_in_turns(
    servers: dict[str, Server], options: argparse.Namespace, text: torch.Tensor, rounds: int
) -> Results:
    """In each round every server serves the same requests, from caches in the same state."""
    results: Results = {name: [] for name in servers}
    for number in range(rounds):
        for name, server in servers.items():
            requests = make_requests(options, text)
            program.doing(f"{name} serves {len(requests)} requests, round {number + 1} of {rounds}")
            for pool in server.pools:
                pool.reset()
                if options.context:
                    pool.fill(options.context)
            results[name].append(server.serve(requests))
    return results


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def row_of(name: str, server: Server, results: Results, case: str) -> dict[str, Any]:
    """The row of a server, which is printed and written to the file."""
    own = results[name]
    seconds = [one for result in own for one in result.seconds]
    rates = [result.rate for result in own]
    row = {
        "case": case,
        "peer": name,
        "tokens_per_second": statistics.median(rates),
        "times": statistics.median(a.rate / b.rate for a, b in zip(results["fdma"], own)),
        "ms": 1e3 * statistics.median(seconds),
        "ms_p99": 1e3 * percentile(seconds, 99),
        "spread": (max(rates) - min(rates)) / statistics.median(rates),
        "cache_bytes": sum(pool.memory_bytes for pool in server.pools),
    }
    if isinstance(server.pools[0], FullPool):
        row["kernel"] = server.pools[0].kernel
    if isinstance(server, DraftServer):
        row["accepted"] = server.right / max(server.drafted, 1)
    return row


def print_row(row: dict[str, Any]) -> None:
    line = "{peer:7} {tokens_per_second:10.1f} {times:7.2f} {ms:9.3f} {ms_p99:9.3f}".format(**row)
    line += f" {row['cache_bytes'] / 2**20:10.1f}"
    line += f"  {row['accepted']:.0%} of the drafts are right" if "accepted" in row else ""
    print(line + (f"  {row['kernel']}" if "kernel" in row else ""))


def compare_tokens(results: Results) -> bool:
    """Print how many requests have the tokens of the bounded cache. Returns whether all do.

    Where keys are evicted a few may differ: keys of equal bytes have equal scores in the first
    layer up to rounding, which depends on the shape of a batch, and decides which of them stay.
    """
    wanted = results["fdma"][0].tokens
    alike = True
    for name, (found, *_) in list(results.items())[1:]:
        same = sum(a == b for a, b in zip(found.tokens, wanted))
        print(f"{name}: {same} of {len(wanted)} requests have the same tokens as fdma")
        alike = alike and same == len(wanted)
    return alike


def write(path: Path, device: str, rows: list[dict[str, Any]]) -> None:
    """A line for the machine and one for each row, as the scripts of benchmarks/ write them."""
    sys.path.append(str(ROOT / "benchmarks"))
    from benchmarking import find_machine, write_whole

    write_whole(path / f"serve-{device}.json", [find_machine(device), *rows])


@torch.no_grad()
def measure(servers: dict[str, Server], options: argparse.Namespace, text: torch.Tensor) -> None:
    """Print the times of all servers, and write them where --out says."""
    serve_in_turns(servers, options, text, 1)
    results = serve_in_turns(servers, options, text, options.rounds)
    dtype = str(DTYPES[options.device]).replace("torch.", "")
    sizes = f"h{options.heads}g{options.kv_heads}/d{options.head_dim}"
    length = (
        f"n{options.context}" if options.context else f"p{options.prompt[0]}-{options.prompt[1]}"
    )
    case = f"serve/{dtype}/b{options.sequences}/{options.layers}/{sizes}/{length}"
    case += f"/w{options.window}+{options.recent}"
    print(f"{case}, {options.requests} requests")
    print("server    tokens/s   times   ms/step    99th %   cache MiB")
    rows = [row_of(name, server, results, case) for name, server in servers.items()]
    for row in rows:
        print_row(row)
    if "drafts" in results:
        compare_tokens({name: results[name] for name in ("fdma", "drafts")})
    if options.out:
        write(options.out, options.device, rows)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    text = read_text(TEXT).held_out
    if not options.check:
        print(
            f"{options.requests} requests, {options.rounds + 1} rounds for each server", flush=True
        )
    model = make_model(options)
    with torch.no_grad():
        servers = make_servers(options, model)
        if options.check:
            return 0 if compare_tokens(serve_in_turns(servers, options, text, 1)) else 1
    try:
        measure(servers, options, text)
    except OSError as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
