#!/usr/bin/env python3
"""Time Doge, a model of transformers, with its attention here, beside transformers' own.

It needs transformers, and flash_dmattn installed, or PYTHONPATH=python and
FDMA_LIBRARY=build/libfdma.so. It runs on a CUDA device, or with --device cpu on two threads:

    python benchmarks/doge.py --out FOLDER

FOLDER gets doge-cuda.json or doge-cpu.json. In each round every peer of a case runs once. The
hidden states of both are compared in float32. Exit status: 0 done; 1 outputs that differ or a file
that could not be written; 2 bad usage.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

import program
from arguments import Parser, make_parser

MORE = """
Cases: KIND/DTYPE/LAYERS/nTOKENS/wWINDOW, of a model with 8 heads on 4, head_dim 128, random weights
  forward      the hidden states of all tokens
  training     the same and the gradients of all weights
  generate     generate(), for one of 64 greedy tokens after TOKENS tokens that are in the cache
Peers:
  fdma         attn_implementation "dynamic_mask". It generates with a DogeCache; on a CUDA device
               that is static, so that transformers compiles the model for single tokens
  sdpa         attn_implementation "sdpa". It generates with a DynamicCache, but on a CUDA device
               with a StaticCache, for which transformers compiles the model, too
  linear       in forward: the linear layers of the model alone
  fdma-eager   on a CUDA device: not compiled, with a DogeCache that is not static
  sdpa-eager   on a CUDA device: not compiled, with a DynamicCache
Columns: ms, the median of the rounds, with the host's time; spread, (90th - 10th percentile) /
median; times, the median of the rounds' ratios to fdma; GiB, the most memory above the weights (on
a CUDA device, but not of generate).
"""


def own_parser() -> Parser:
    parser = make_parser("doge.py", __doc__, MORE)
    parser.add_argument("--divide", type=int, default=1, help="divide all lengths by this number")
    return parser


if __name__ == "__main__":
    program.begin(own_parser().parse_args)

import flash_dmattn.transformers
import torch
from benchmarking import (
    QUICK,
    Disagreement,
    Rounds,
    alternate,
    make_rows,
    parse,
    require_close,
    time_wall,
    write_rows,
)
from transformers import AutoModelForCausalLM, DogeConfig, DynamicCache, StaticCache

SHAPE = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8}
SHAPE = {**SHAPE, "num_key_value_heads": 4, "vocab_size": 32768}


class Case(NamedTuple):
    kind: str
    layers: int
    tokens: int
    window: int

    def name(self, dtype: torch.dtype) -> str:
        words = [self.kind, str(dtype).replace("torch.", ""), str(self.layers)]
        return "/".join([*words, f"n{self.tokens}", f"w{self.window}"])


CASES = {
    "cuda": [
        Case("forward", 4, 16384, 1024),
        Case("training", 4, 16384, 1024),
        Case("generate", 32, 65536, 1024),
    ],
    "cpu": [Case("forward", 2, 4096, 256), Case("generate", 2, 4096, 256)],
}
GENERATED = 64  # tokens of a call of generate()
ROUNDS = Rounds(5, 20, 3.0)
CALLS_MAX = ROUNDS.most + 2
IMPLEMENTATIONS = {"fdma": "dynamic_mask", "sdpa": "sdpa"}


def make_models(case: Case, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """The same model by peer. Its weights make scores differ by more than rounding does."""
    torch.manual_seed(case.tokens)
    sizes = {**SHAPE, "num_hidden_layers": case.layers, "keep_window_size": case.window}
    config = DogeConfig(**sizes, max_position_embeddings=2 * case.tokens)
    models: dict[str, Any] = {}
    for peer, implementation in IMPLEMENTATIONS.items():
        own = copy.deepcopy(config)
        model = AutoModelForCausalLM.from_config(own, attn_implementation=implementation)
        for name, parameter in model.named_parameters():
            if name.endswith((".A", ".dt_proj.weight", ".v_proj.weight")):
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        if models:
            model.load_state_dict(models["fdma"].state_dict())
        models[peer] = model.eval()
    return {peer: model.to(device, dtype) for peer, model in models.items()}


def forward(model: Any, tokens: torch.Tensor, **given: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.model(tokens, **given)[0]


def train(model: Any, tokens: torch.Tensor) -> None:
    model.model(tokens, use_cache=False)[0].float().square().mean().backward()
    model.zero_grad(set_to_none=True)


def runs_of(case: Case, models: dict[str, Any], tokens: torch.Tensor) -> dict[str, Callable]:
    """The timed calls, by peer."""
    if case.kind == "forward":
        runs: dict[str, Callable] = {
            peer: lambda model=model: forward(model, tokens, use_cache=False)
            for peer, model in models.items()
        }
        return {**runs, "linear": Linears(models["fdma"], tokens)}
    if case.kind == "training":
        return {peer: lambda model=model: train(model, tokens) for peer, model in models.items()}
    return {
        name: Generator(models[name.split("-")[0]], models["fdma"], cache, tokens)
        for name, cache in make_caches(case, models["fdma"].config, tokens.device.type).items()
    }


def make_caches(case: Case, config: Any, device: str) -> dict[str, Any]:
    """An empty cache for each peer that generates."""
    kept = flash_dmattn.transformers.DogeCache
    if device == "cpu":
        return {"fdma": kept(config), "sdpa": DynamicCache(config=config)}
    room = case.tokens + GENERATED * CALLS_MAX
    return {
        "fdma": kept(config, static=True),
        "sdpa": StaticCache(config=config, max_cache_len=room),
        "fdma-eager": kept(config),
        "sdpa-eager": DynamicCache(config=config),
    }


class Linears:
    """The linear layers of a model without its head, one after the other, on inputs of its size."""

    def __init__(self, model: Any, tokens: torch.Tensor) -> None:
        self.layers = [one for one in model.model.modules() if isinstance(one, torch.nn.Linear)]
        like = model.lm_head.weight
        widths = {layer.in_features for layer in self.layers}
        self.inputs = {width: like.new_ones(*tokens.shape, width) for width in widths}

    def __call__(self) -> None:
        with torch.no_grad():
            for layer in self.layers:
                layer(self.inputs[layer.in_features])


class Generator:
    """Generates more tokens at each call."""

    def __init__(self, model: Any, filling: Any, cache: Any, tokens: torch.Tensor) -> None:
        # `filling` has the weights of `model`, whose own attention would store all pairs
        forward(filling, tokens[:, :-1], past_key_values=cache)
        self.model, self.cache, self.tokens = model, cache, tokens

    def __call__(self) -> None:
        given = {"max_new_tokens": GENERATED, "min_new_tokens": GENERATED, "do_sample": False}
        mask = torch.ones_like(self.tokens)
        self.tokens = self.model.generate(
            self.tokens, past_key_values=self.cache, attention_mask=mask, pad_token_id=0, **given
        )


def check(case: Case, device: str) -> None:
    """Compare hidden states in float32, or on a CUDA device in bfloat16.

    Raises:
        Disagreement: they differ.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    small = case._replace(layers=1, tokens=min(case.tokens, 512), window=min(case.window, 64))
    models = make_models(small, device, dtype)
    tokens = torch.randperm(SHAPE["vocab_size"], device=device)[None, : small.tokens]
    found, wanted = (forward(model, tokens, use_cache=False) for model in models.values())
    if device == "cpu":
        require_close(found, wanted.double(), 1e-4, f"{case.kind}: fdma and sdpa")
    elif not found.isfinite().all():
        raise Disagreement(f"{case.kind}: outputs that are no numbers")


def memory_of(run: Callable[[], Any]) -> float:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def measure(case: Case, device: str, rounds: Rounds) -> Iterator[dict[str, Any]]:
    check(case, device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    models = make_models(case, device, dtype)
    tokens = torch.randint(SHAPE["vocab_size"], (1, case.tokens), device=device)
    runs = runs_of(case, models, tokens)
    has_memory = device == "cuda" and case.kind != "generate"
    for run in [*runs.values()] * 2:  # rounds that do not count
        run()
    count = GENERATED if case.kind == "generate" else 1
    timers = {peer: lambda run=run: time_wall(run, device) / count for peer, run in runs.items()}
    for row in make_rows(case.name(dtype), alternate(timers, rounds)):
        yield {**row, "GiB": memory_of(runs[row["peer"]])} if has_memory else row


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for case in CASES[args.device]:
        small = case._replace(
            tokens=case.tokens // args.divide, window=max(case.window // args.divide, 1)
        )
        program.doing(f"{small.kind}, {small.tokens} tokens")
        yield from measure(small, args.device, QUICK if args.quick else ROUNDS)
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()


def print_row(row: dict[str, Any]) -> None:
    line = "{case:36} {peer:8} {ms:10.3f} {spread:7.3f} {times:7.3f}".format(**row)
    print(line, f"{row['GiB']:7.2f}" if "GiB" in row else "", flush=True)


def main(arguments: list[str] | None = None) -> int:
    args = parse(own_parser(), arguments)
    flash_dmattn.transformers.register()
    if args.device == "cpu":
        torch.set_num_threads(2)
    print(f"{'case':36} {'peer':8} {'ms':>10} {'spread':>7} {'times':>7} {'GiB':>7}")
    return write_rows("doge", args, rows_of(args), print_row)


if __name__ == "__main__":
    sys.exit(main())
