#!/usr/bin/env python3
"""Train a small byte-level language model on long sequences, each spread over many processes.

The model comes from train_text.py. Each rank has consecutive bytes of a sequence of 262,144 bytes
(8,192 on a CPU), and every byte attends to the best and the newest of all bytes before it, on any
rank. NCCL joins CUDA devices, which compute in bfloat16, and gloo joins CPUs.
Run it with the package installed, or with FDMA_LIBRARY=build/libfdma.so PYTHONPATH=python in the
environment; as a plain program it is the only rank:

    torchrun --nproc-per-node 8 examples/train_long.py --steps 100
    python examples/train_long.py --length 4096 --steps 10 --device cpu

The text is a file, or else Python's own documentation. The loss, in bits per byte, is the mean over
the whole sequence, so that the number of ranks changes it only by rounding. Memory is given by
rank: on a CUDA device the peak of PyTorch's tensors in the step, on a CPU the largest resident size
so far. Exit status: 0 done; 2 bad usage; 130 ended by Ctrl-C.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import program

HEAD_DIM = 64  # of train_text.py
LENGTHS = {"cuda": 262144, "cpu": 8192}


def read_bytes(path: Path | None) -> torch.Tensor:
    """The text as uint8. A file is mapped: each rank reads only the pages that it needs."""
    import torch
    from train_text import read_text

    if path is None:
        text = read_text(None)
        return torch.cat([text.train, text.held_out]).to(torch.uint8)
    size = path.stat().st_size  # an empty file cannot be mapped
    return torch.from_file(str(path), size=size, dtype=torch.uint8) if size else torch.empty(0)


def parse() -> argparse.Namespace:
    head, _, _ = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=head)
    parser.add_argument(
        "--text", type=Path, help="a file to train on (default: Python's documentation)"
    )
    parser.add_argument(
        "--length", type=int, help="bytes of a sequence (default 262144, on a CPU 8192)"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--window", type=int, default=2048, help="bytes that each byte keeps, half of them newest"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help=f"a multiple of {HEAD_DIM}")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="default: cuda where there is one"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(minutes=0)  # which Progress reads: steps alone end a run
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    least = {"length": ranks, "steps": 1, "window": 2, "layers": 1}
    for name, number in least.items():
        given = getattr(options, name)
        if given is not None and given < number:
            parser.error(f"--{name}: is {given}, want {number} or more")
    if options.width < HEAD_DIM or options.width % HEAD_DIM:
        parser.error(f"--width: is {options.width}, want a multiple of {HEAD_DIM}")
    if options.text and not options.text.is_file():
        parser.error(f"--text: {options.text} is not a file")
    options.device = options.device or program.default_device()
    options.length = options.length or LENGTHS[options.device]
    options.bytes = read_bytes(options.text)
    found = len(options.bytes)
    if found <= options.length:
        parser.error(f"--length: is {options.length}, want fewer than the text has: {found} bytes")
    return options


if __name__ == "__main__":
    program.begin(parse)

import torch
import torch.distributed as dist
from flash_dmattn.distributed import split_lengths
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from train_text import Model, Progress, narrow, select_alike

MIB = 2**20


class Ranks(NamedTuple):
    """This process among those that train together."""

    rank: int
    size: int
    device: torch.device


def join_ranks(kind: str) -> Ranks:
    """Join the processes that torchrun has started, or else be the only one."""
    device = torch.device(kind)
    is_cuda = kind == "cuda"
    if is_cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:  # port 0: any free one
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    dist.init_process_group("nccl" if is_cuda else "gloo", device_id=device if is_cuda else None)
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


def cut_own(text: torch.Tensor, start: int, lengths: list[int], rank: int) -> torch.Tensor:
    """[1, len + 1] int64: a rank's own bytes of the sequence that begins at `start`, and the byte
    behind them, which is the first one of the next rank."""
    begin = start + sum(lengths[:rank])
    return text[begin : begin + lengths[rank] + 1].long()[None]


def sum_losses(
    model: nn.Module, piece: torch.Tensor, lengths: list[int] | None, device: torch.device
) -> torch.Tensor:
    """The sum, in bits, of the losses of a rank's own bytes. Each byte predicts the next."""
    piece = piece.to(device)
    with narrow(device):
        logits = model(piece[:, :-1], lengths=lengths)
    total = cross_entropy(logits.float().flatten(0, 1), piece[:, 1:].flatten(), reduction="sum")
    return total / math.log(2)


def memory_of(device: torch.device) -> int:
    """Bytes; see the head of this file."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def gather_numbers(numbers: list[float], ranks: Ranks) -> list[list[float]]:
    """The numbers of every rank, in the order of ranks."""
    own = torch.tensor(numbers, dtype=torch.float64, device=ranks.device)
    found = [torch.empty_like(own) for _ in range(ranks.size)]
    dist.all_gather(found, own)
    return torch.stack(found).tolist()


class Step(NamedTuple):
    number: int
    loss: float  # bits per byte, the mean over all bytes of the sequence
    gradient_norm: float  # before it is clipped
    rate: float  # tokens of all ranks per second
    memory: list[float]  # bytes of each rank

    def describe(self) -> str:
        memory = " ".join(f"{one / MIB:.0f}" for one in self.memory)
        return (
            f"step {self.number}: loss {self.loss:.6f} bits per byte, "
            f"gradient norm {self.gradient_norm:.6f}, {self.rate:.0f} tokens/s, memory {memory} MiB"
        )


def train(
    model: nn.Module, text: torch.Tensor, options: argparse.Namespace, ranks: Ranks
) -> Iterator[Step]:
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(options.seed)  # the same sequences on all ranks
    lengths = split_lengths(options.length, ranks.size)
    progress = Progress(options)
    while progress.fraction() < 1:
        begin = time.perf_counter()
        if ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(ranks.device)
        for group in optimizer.param_groups:
            group["lr"] = progress.rate()
        start = int(torch.randint(len(text) - options.length, (), generator=generator))
        piece = cut_own(text, start, lengths, ranks.rank)
        # In the first step the ranks compare the arguments of attention. These stay the same.
        known = lengths if progress.taken else None
        own_sum = sum_losses(model, piece, known, ranks.device)
        # The loss is the sum over all ranks / length. DistributedDataParallel takes the mean of the
        # ranks' gradients, so each rank multiplies its sum by the number of ranks. (The mean of the
        # ranks' own means would be wrong where one rank has more bytes than another.)
        optimizer.zero_grad()
        (own_sum * (ranks.size / options.length)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rows = gather_numbers([own_sum.item(), memory_of(ranks.device)], ranks)
        sums, memory = zip(*rows)
        progress.taken += 1
        rate = options.length / (time.perf_counter() - begin)
        yield Step(progress.taken, sum(sums) / options.length, norm.item(), rate, [*memory])


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    torch.manual_seed(options.seed)
    sizes = (options.layers, options.width, options.window)
    attentions = select_alike(*sizes, process_group=dist.group.WORLD)
    plain = Model(options.width, attentions).to(ranks.device)
    count = sum(parameter.numel() for parameter in plain.parameters())
    devices = [ranks.device.index] if ranks.device.type == "cuda" else None
    model = DistributedDataParallel(plain, device_ids=devices)
    if ranks.rank == 0:
        print(
            f"ranks: {ranks.size}, {dist.get_backend()}; sequences of {options.length} of "
            f"{len(options.bytes)} bytes; {count} parameters; window {options.window}"
        )
    program.doing(f"step 1 of {options.steps}")
    for step in train(model, options.bytes, options, ranks):
        if ranks.rank == 0:
            print(step.describe(), flush=True)
        program.doing(f"step {step.number + 1} of {options.steps}")


def main() -> None:
    options = parse()
    ranks = join_ranks(options.device)
    # The model is gone when run() returns. If it were the last owner of the process group, it would
    # end gloo's threads while it holds Python's lock, for which one of them may be waiting.
    run(options, ranks)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
