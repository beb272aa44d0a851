#!/usr/bin/env python3
"""The benchmark `streams`: packed sequences, a prefill in pieces and recent keys."""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Callable

if __name__ == "__main__":
    import bench

    bench.start("streams")

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
    median_ratio,
    passes,
    quantiles,
    run_cases,
    summary,
    time_pass,
)
from streams_inputs import Case, Inputs, Peer, all_cases, check
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

WARM_UP = 3  # rounds that do not count


def varlen_arguments(inputs: Inputs, expanded: bool = False) -> list[Any]:
    """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k."""
    rows = (inputs.query, *(inputs.expanded if expanded else inputs.fdma[1:]))
    longest = max(inputs.case.lengths)
    return [*(x.squeeze(0) for x in rows), inputs.starts, inputs.starts, longest, longest]


def packed_fused(inputs: Inputs) -> torch.Tensor:
    weights = {"dt_proj": inputs.dt_proj, "a_coef": inputs.a_coef}
    return flash_dmattn.flash_dmattn_varlen_func(
        *varlen_arguments(inputs), causal=True, keep_window_size=inputs.case.window, **weights
    )[None]


def packed_dense(inputs: Inputs) -> torch.Tensor:
    return flash_dmattn.flash_dmattn_varlen_func(*varlen_arguments(inputs), causal=True)[None]


def fused(inputs: Inputs, window: int, recent: int = 0) -> torch.Tensor:
    return flash_dmattn.flash_dma_attention(
        *inputs.fdma,
        inputs.dt_proj,
        inputs.a_coef,
        keep_window_size=window,
        recent=recent,
        causal=True,
    )


def selected(inputs: Inputs, packed: bool) -> torch.Tensor:
    starts = inputs.starts if packed else None
    selection = inputs.selections[packed]
    return flash_dmattn.attention(*inputs.fdma, selection=selection, starts=starts, causal=True)[0]


def prefill(inputs: Inputs, piece: int) -> list[torch.Tensor]:
    """The outputs of the pieces, which enter an empty cache one after the other."""
    inputs.cache.reset()
    pieces = zip(*(x.split(piece, 1) for x in inputs.fdma))
    return [inputs.cache.attend(0, *rows, inputs.dt_proj, inputs.a_coef) for rows in pieces]


def varlen(inputs: Inputs, expanded: bool) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters  # they depend on torch's version
    options: dict[str, Any] = {"is_causal": True}
    if "window_size" in parameters:
        options = {"window_size": (-1, 0)}
    if "enable_gqa" in parameters:
        options["enable_gqa"] = not expanded
    return varlen_attn(*varlen_arguments(inputs, expanded), **options)[None]


def flash_attn(inputs: Inputs) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(*varlen_arguments(inputs), causal=True)[None]


def nested(inputs: Inputs, backend: SDPBackend) -> torch.Tensor:
    lengths = inputs.case.lengths
    limits = {"min_seqlen": min(lengths), "max_seqlen": max(lengths)}
    rows = [
        torch.nested.nested_tensor_from_jagged(x.squeeze(0), inputs.offsets, **limits)
        for x in (inputs.query, *inputs.expanded)
    ]
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in rows), is_causal=True)
    return out.transpose(1, 2).values()[None]


def sdpa(inputs: Inputs) -> torch.Tensor:
    split = (x.transpose(1, 2).split(inputs.case.lengths, 2) for x in inputs.fdma)
    outs = [
        scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True) for rows in zip(*split)
    ]
    return torch.cat(outs, 2).transpose(1, 2)


def rivals_of(case: Case, device: str) -> list[Peer]:
    """The peers of other libraries, whether or not they run here."""
    lengths = case.lengths
    if device == "cpu":
        return [Peer("sdpa", sdpa, lengths, 0, ours=False)]

    def rival(name: str, forward: Callable[..., Any], expanded: bool, unless: str = "") -> Peer:
        return Peer(name, forward, lengths, 0, expanded=expanded, ours=False, unless=unless)

    cudnn = functools.partial(nested, backend=SDPBackend.CUDNN_ATTENTION)
    flash = functools.partial(nested, backend=SDPBackend.FLASH_ATTENTION)
    found = [
        rival("varlen", functools.partial(varlen, expanded=False), False),
        rival("varlen-expanded", functools.partial(varlen, expanded=True), True, "varlen"),
        rival("nested-cudnn", cudnn, True),
        rival("nested-flash", flash, True, "varlen"),
    ]
    return found + ([rival("flash-attn", flash_attn, False)] if find_spec("flash_attn") else [])


def peers_of(case: Case, device: str) -> list[Peer]:
    """flash_dmattn first, then the peers to compare it with."""
    lengths, one, window = case.lengths, (case.length,), case.window
    if case.kind == "packed-dense":
        return [Peer("fdma", packed_dense, lengths, 0), *rivals_of(case, device)]
    if case.kind == "packed-selected":
        return [
            Peer(name, functools.partial(selected, packed=packed), own, window, keys="given")
            for name, packed, own in (("fdma", True, lengths), ("one-sequence", False, one))
        ]
    whole = functools.partial(fused, window=window)
    if case.kind == "packed":
        return [
            Peer("fdma", packed_fused, lengths, window, keys="computed"),
            Peer("one-sequence", whole, one, window, keys="computed"),
        ]
    if case.kind == "prefill":
        return [
            Peer(name, forward, one, window, keys="computed")
            for name, forward in (
                ("fdma", functools.partial(prefill, piece=case.piece)),
                ("whole", whole),
                ("whole-cached", functools.partial(prefill, piece=case.length)),
            )
        ]
    both = functools.partial(fused, window=window, recent=case.recent)
    wide = window + case.recent
    return [
        Peer("fdma", both, one, window, case.recent, "computed"),
        Peer("window", functools.partial(fused, window=wide), one, wide, 0, "computed"),
    ]


def checked_peers(inputs: Inputs) -> list[Peer]:
    """The peers that run, after a check of each.

    Raises:
        Disagreement: outputs of flash_dmattn are wrong.
    """
    found: list[Peer] = []
    for peer in peers_of(inputs.case, inputs.device):
        if peer.unless in [other.name for other in found]:
            continue
        own_check = functools.partial(check, inputs, peer)
        if peer.ours:
            own_check()
        elif not passes(inputs.case.name(), peer.name, own_check):
            continue
        found.append(peer)
    return found


def find_other(peers: list[Peer], times: dict[str, list[float]]) -> Peer | None:
    """The peer to compare the first one with: a second one of ours, or the fastest other
    library."""
    if len(peers) < 2 or peers[1].ours:
        return peers[1] if len(peers) > 1 else None
    return min(peers[1:], key=lambda peer: quantiles(times[peer.name])[1])


def make_rows(case: Case, peers: list[Peer], times: dict[str, list[float]]) -> Iterator[Row]:
    other = find_other(peers, times)
    for peer in peers:
        own, is_fdma = times[peer.name], peer.name == "fdma"
        measured = summary(own)
        flops = case.flops(peer.lengths)
        of_other = None
        if is_fdma and other is not None:
            of_other = median_ratio(own, times[other.name]) * case.flops(other.lengths) / flops
        goal = case.goal if is_fdma else None
        yield {
            "case": case.name(),
            "peer": peer.name,
            **measured,
            "useful_gflops": flops / (measured["ms"] * 1e6),
            "of_other": of_other,
            "ratio": None if peer.ours else median_ratio(own, times["fdma"]),
            "goal": goal.words() if goal else None,
            "met": goal.met(of_other) if goal and of_other is not None else None,
        }


def measure(case: Case, args: argparse.Namespace) -> Iterator[Row]:
    """The rows of a case.

    Raises:
        Disagreement: outputs of flash_dmattn are wrong.
    """
    inputs = Inputs(case, args.device)
    peers = checked_peers(inputs)
    if args.device == "cuda":
        torch.cuda.empty_cache()
    timers = {
        peer.name: lambda peer=peer: time_pass(lambda: peer.run(inputs), args.device)
        for peer in peers
    }
    yield from make_rows(case, peers, alternate(timers, QUICK if args.quick else USUAL, WARM_UP))


TABLE = Table(
    56,
    15,
    *MS,
    Column("useful_gflops", "TFLOP/s", "9.3f", 1e-3),
    Column("of_other", "of other", "9.3f"),
    Column("ratio", "as fast", "9.3f"),
)


def run(args: argparse.Namespace) -> int:
    choose_device(args)
    cases = [
        (case.name(), functools.partial(measure, case, args)) for case in all_cases(args.device)
    ]
    return run_cases(args, TABLE, cases)
