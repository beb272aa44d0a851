#!/usr/bin/env python3
"""The benchmark `doge`: a model of transformers with its attention here, and transformers' own."""

from __future__ import annotations

import argparse
import copy
import functools
import gc
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

if __name__ == "__main__":
    import bench

    bench.start("doge")

import flash_dmattn.transformers
import torch
from benchmarking import (
    MS,
    QUICK,
    Column,
    Disagreement,
    Rounds,
    Row,
    Table,
    alternate,
    choose_device,
    make_rows,
    require_close,
    run_cases,
    time_wall,
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


def dtype_of(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


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
    small = case._replace(layers=1, tokens=min(case.tokens, 512), window=min(case.window, 64))
    models = make_models(small, device, dtype_of(device))
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


def measure(case: Case, args: argparse.Namespace) -> Iterator[Row]:
    device = args.device
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    check(case, device)
    dtype = dtype_of(device)
    models = make_models(case, device, dtype)
    tokens = torch.randint(SHAPE["vocab_size"], (1, case.tokens), device=device)
    runs = runs_of(case, models, tokens)
    has_memory = device == "cuda" and case.kind != "generate"
    for run in [*runs.values()] * 2:  # rounds that do not count
        run()
    count = GENERATED if case.kind == "generate" else 1
    timers = {peer: lambda run=run: time_wall(run, device) / count for peer, run in runs.items()}
    times = alternate(timers, QUICK if args.quick else ROUNDS)
    for row in make_rows(case.name(dtype), times):
        yield {**row, "GiB": memory_of(runs[row["peer"]])} if has_memory else row


TABLE = Table(36, 8, *MS, Column("times", "times", "7.3f"), Column("GiB", "GiB", "7.2f"))


def run(args: argparse.Namespace) -> int:
    choose_device(args)
    flash_dmattn.transformers.register()
    if args.device == "cpu":
        torch.set_num_threads(2)
    cases = []
    for case in CASES[args.device]:
        window = max(case.window // args.divide, 1)
        small = case._replace(tokens=case.tokens // args.divide, window=window)
        name = small.name(dtype_of(args.device))
        cases.append((name, functools.partial(measure, small, args)))
    return run_cases(args, TABLE, cases)
