#!/usr/bin/env python3
"""The benchmark `options`: a mask, a bias, dropout or sink logits, and the call without them."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

if __name__ == "__main__":
    import bench

    bench.start("options")

import flash_dmattn
import torch
from benchmarking import (
    MS,
    QUICK,
    USUAL,
    Column,
    Row,
    Table,
    alternate,
    choose_device,
    make_rows,
    require_close,
    run_cases,
    time_pass,
)
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

BLOCK = 128  # queries and keys of a block in the case `blocks`


class Case(NamedTuple):
    option: str
    training: bool
    heads: tuple[int, int]  # q_heads, kv_heads
    head_dim: int
    keys: int
    window: int
    mask_heads: int = 1
    compares_sdpa: bool = False

    def name(self, dtype: torch.dtype) -> str:
        kind = f"{self.option}-training" if self.training else self.option
        words = [kind, str(dtype).replace("torch.", ""), "h{}g{}".format(*self.heads)]
        words += [f"d{self.head_dim}", f"n{self.keys}"]
        return "/".join(words + ([f"w{self.window}"] if self.window else []))


CASES = {
    "cuda": [
        *(Case("mask", training, (2, 1), 64, 32768, 1024) for training in (False, True)),
        *(Case("mask-bias", training, (2, 1), 64, 32768, 1024) for training in (False, True)),
        *(Case("mask", training, (32, 8), 128, 8192, 2048, 8) for training in (False, True)),
        Case("ones", False, (32, 8), 128, 8192, 0),
        *(Case(f"keys{percent}", False, (32, 8), 128, 8192, 0) for percent in (50, 80, 90)),
        Case("blocks", False, (16, 16), 128, 16384, 0),
        Case("dropout", True, (32, 8), 128, 32768, 2048),
        *(Case("sink", training, (32, 8), 128, 32768, 2048) for training in (False, True)),
    ],
    "cpu": [
        Case("mask", False, (2, 1), 64, 8192, 1024, compares_sdpa=True),
        Case("mask", True, (2, 1), 64, 8192, 1024),
        Case("ones", False, (2, 1), 64, 4096, 0),
        Case("dropout", True, (2, 1), 64, 8192, 1024),
        Case("sink", False, (2, 1), 64, 8192, 1024),
    ],
}


def dtype_of(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


class Inputs:
    def __init__(self, case: Case, device: str) -> None:
        torch.manual_seed(case.keys)
        self.case = case
        self.dtype = dtype_of(device)
        (q_heads, kv_heads), n = case.heads, case.keys
        new = {"device": device, "dtype": self.dtype, "requires_grad": case.training}
        self.query = torch.randn(1, n, q_heads, case.head_dim, **new)
        self.key, self.value = (torch.randn(1, n, kv_heads, case.head_dim, **new) for _ in "kv")
        self.dout = torch.randn_like(self.query, requires_grad=False)
        self.selection = None
        if case.window:
            score = torch.randn(1, case.mask_heads, n, device=device)
            kept = flash_dmattn.select(score, case.window)
            self.expiry = kept.expiry
            self.selection = flash_dmattn.select(
                score.expand(1, kv_heads, n).contiguous(), case.window
            )
        blocks = max(n // BLOCK, 1)
        self.blocks = torch.rand(blocks, blocks, device=device) < 0.25
        self.blocks.fill_diagonal_(True)  # so that every query keeps a key
        self.options = self.make_options(new)

    def make_options(self, new: dict[str, Any]) -> dict[str, Any]:
        case, n = self.case, self.case.keys
        if case.option == "dropout":
            return {"selection": self.selection, "dropout_p": 0.1}
        if case.option == "sink":
            sinks = torch.randn(case.heads[0], device=new["device"])
            return {"selection": self.selection, "sink_logit": sinks.requires_grad_(case.training)}
        if case.option == "ones":
            return {"attn_mask": torch.ones(1, 1, n, n, dtype=torch.bool, device=new["device"])}
        if case.option.startswith("keys"):
            kept = torch.rand(1, 1, 1, n, device=new["device"]) < int(case.option[4:]) / 100
            return {"attn_mask": kept.expand(1, 1, n, n).contiguous()}
        if case.option == "blocks":
            pairs = self.blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            return {"attn_mask": pairs[None, None]}
        position = torch.arange(n, dtype=torch.int32, device=new["device"])
        visible = position[:, None] >= position
        options = {"attn_mask": visible & (position[:, None] < self.expiry[:, :, None, :])}
        if case.option == "mask-bias":
            options["attn_bias"] = torch.randn(1, 1, n, n, **new)
        return options


def attend(inputs: Inputs, options: dict[str, Any]) -> torch.Tensor:
    rows = (inputs.query, inputs.key, inputs.value)
    out = flash_dmattn.attention(*rows, causal=True, **options)[0]
    if inputs.case.training:
        leaves = [x for x in (*rows, *options.values()) if getattr(x, "requires_grad", False)]
        torch.autograd.grad(out, leaves, inputs.dout)
    return out


def sdpa(inputs: Inputs) -> torch.Tensor:
    rows = [x.transpose(1, 2) for x in (inputs.query, inputs.key, inputs.value)]
    mask = inputs.options["attn_mask"]
    return scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def flex(inputs: Inputs) -> Callable[[], torch.Tensor]:
    rows = [x.transpose(1, 2) for x in (inputs.query, inputs.key, inputs.value)]
    n, kept = inputs.case.keys, inputs.blocks

    def keeps(b: Any, h: Any, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return kept[i // BLOCK, j // BLOCK] & (i >= j)

    mask = create_block_mask(keeps, None, None, n, n, device=inputs.query.device)
    compiled = torch.compile(flex_attention)
    return lambda: compiled(*rows, block_mask=mask).transpose(1, 2)


def peers_of(inputs: Inputs) -> dict[str, Callable[[], torch.Tensor]]:
    without = {"selection": inputs.selection}
    found = {
        "fdma": lambda: attend(inputs, inputs.options),
        "without": lambda: attend(inputs, without),
    }
    if "attn_mask" in inputs.options and inputs.query.is_cuda:
        rows = (inputs.query, inputs.key, inputs.options["attn_mask"])
        lists = {"mask_lists": flash_dmattn.mask_lists(*rows, causal=True)}
        found["lists"] = lambda: attend(inputs, inputs.options | lists)
    if inputs.case.option == "blocks":
        del found["without"]
        found["flex"] = flex(inputs)
    if inputs.case.compares_sdpa:
        found["sdpa"] = lambda: sdpa(inputs)
    return found


def check(inputs: Inputs, peers: dict[str, Callable[[], torch.Tensor]]) -> None:
    """Compare masked outputs with every other peer's; the other options change outputs.

    Raises:
        Disagreement: they differ.
    """
    out = peers["fdma"]()
    if inputs.case.option in ("mask", "ones", "blocks"):
        allowed = 1e-4 if inputs.dtype == torch.float32 else 4e-2
        for name, run in peers.items():
            require_close(out, run().double(), allowed, f"{inputs.case.option}: fdma and {name}")


def measure(case: Case, args: argparse.Namespace) -> Iterator[Row]:
    inputs = Inputs(case, args.device)
    peers = peers_of(inputs)
    check(inputs, peers)
    timers = {name: lambda run=run: time_pass(run, args.device) for name, run in peers.items()}
    times = alternate(timers, QUICK if args.quick else USUAL)
    yield from make_rows(case.name(inputs.dtype), times)


def run(args: argparse.Namespace) -> int:
    choose_device(args)
    if args.device == "cpu":
        torch.set_num_threads(1)
    cases = []
    for case in CASES[args.device]:
        window = case.window and max(case.window // args.divide, 1)
        small = case._replace(keys=case.keys // args.divide, window=window)
        name = small.name(dtype_of(args.device))
        cases.append((name, functools.partial(measure, small, args)))
    return run_cases(args, Table(52, 8, *MS, Column("times", "times", "7.3f")), cases)
