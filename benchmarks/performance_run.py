"""Runs forward_performance.py and backward_performance.py: options, tables, JSON, exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import definition_times
import original_times
import torch
from arguments import Parser
from benchmarking import QUICK, USUAL, Disagreement, Rounds, find_machine, write_whole
from definition_cases import Case, Inputs, choose_dtype
from definition_options import ORIGINAL_HEAD_DIMS, WINDOW, performance_parser
from definition_run import parse

LENGTHS = {"cuda": (1024, 2048, 4096, 8192, 16384), "cpu": (512, 1024, 2048, 4096)}
ORIGINAL = Rounds(5, 40, 0.25)  # of each of many cases
SIZES = ("lengths", "windows", "q_len", "batch", "heads")  # that the original's tables have
Lines = Iterator[tuple[list[dict[str, Any]], str]]


def check_arguments(parser: Parser, args: argparse.Namespace) -> None:
    """Refuse contradictory sizes, and fill in missing ones."""
    given = [name for name in SIZES if getattr(args, name) is not None]
    if args.original and given:
        parser.error(f"--{given[0].replace('_', '-')}: is given, want none with --original")
    if args.divide is not None and not args.original:
        parser.error("--divide: is given, want none without --original")
    args.head_dim = args.head_dim or (list(ORIGINAL_HEAD_DIMS) if args.original else [64])
    for size in args.head_dim:
        if size % 8 or size > 256:
            parser.error(f"--head-dim: is {size}, want a multiple of 8 up to 256")
    args.lengths = args.lengths or LENGTHS[args.device]
    args.windows, args.batch = args.windows or [WINDOW], args.batch or 1
    args.heads = args.heads or [8, 2]
    if args.heads[0] % args.heads[1]:
        parser.error(
            f"--heads: is {args.heads[0]}, want a multiple of {args.heads[1]}, the kv heads"
        )
    if args.q_len is not None and args.q_len > min(args.lengths):
        parser.error(f"--q-len: is {args.q_len}, want at most --lengths, {min(args.lengths)}")


def time_cases(args: argparse.Namespace, training: bool, rounds: Rounds) -> Lines:
    """The rows of each case of the given sizes, with their printed lines."""
    print(f"{'case':40} {'peer':20} {'ms':>10} {'spread':>7} {'times':>7}")
    for length in args.lengths:
        for window in args.windows:
            for head_dim in args.head_dim:
                q_len = args.q_len or length
                case = Case("", args.batch, *args.heads, head_dim, q_len, length, window)
                inputs = Inputs(case, args.device, choose_dtype(args))
                for row in definition_times.measure(inputs, training, args.device, rounds):
                    line = "{:40} {:20} {:10.3f} {:7.3f} {:7.3f}".format(*row)
                    yield [row._asdict()], line


def time_original(args: argparse.Namespace, training: bool, rounds: Rounds) -> Lines:
    """The rows of each case of the original's table, with their printed lines."""
    print(original_times.HEADER)
    how = (training, args.device, choose_dtype(args), rounds)
    for case, published in original_times.make_cases(training, args.head_dim, args.divide or 1):
        rows = list(original_times.measure(case, published, *how))
        yield rows, original_times.describe(rows)


def run_performance(
    program: str, document: str | None, training: bool, arguments: list[str] | None
) -> int:
    """Time every case. Exit status: 0 done; 1 wrong outputs; 2 bad usage."""
    parser = performance_parser(program, document)
    args = parse(parser, arguments)
    check_arguments(parser, args)
    usual, run = (ORIGINAL, time_original) if args.original else (USUAL, time_cases)
    what = "backward" if training else "forward"
    name = f"{what}-{'original' if args.original else 'performance'}-{args.device}.json"
    found = [{**find_machine(args.device), "dtype": str(choose_dtype(args)).split(".")[1]}]
    try:
        with torch.set_grad_enabled(training):
            for rows, line in run(args, training, QUICK if args.quick else usual):
                print(line, flush=True)
                found += rows
                if args.out is not None:
                    write_whole(args.out / name, found)
    except (Disagreement, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    return 0
