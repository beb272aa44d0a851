"""examples/train_long.py: its losses and gradients do not depend on the number of ranks, and equal
a plain loop over whole sequences."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from programs import ROOT, output_of, python

PROGRAM = ROOT / "examples" / "train_long.py"
TEXT = ROOT / "examples" / "data" / "text.txt"
LENGTH, WINDOW, WIDTH, LAYERS, STEPS, SEED = 97, 16, 64, 2, 4, 3
SMALL = [
    *("--length", str(LENGTH), "--window", str(WINDOW), "--width", str(WIDTH)),
    *("--layers", str(LAYERS), "--steps", str(STEPS), "--seed", str(SEED), "--device", "cpu"),
]
LINE = re.compile(
    r"step (\d+): loss ([\d.]+) bits per byte, gradient norm ([\d.]+), (\d+) tokens/s, "
    r"memory ([\d ]+) MiB"
)
DIGITS = 1e-6  # rounding of a printed number


class Printed(NamedTuple):
    head: str
    losses: list[float]
    norms: list[float]  # of gradients
    rates: list[int]
    memory: list[list[int]]  # of each step and rank


def run(ranks: int, *options: str | Path) -> Printed:
    """The output of the program: with one rank as a plain program, with more under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    alone = {"RANK": None, "WORLD_SIZE": None, "OMP_NUM_THREADS": "1"}
    done = python(*(launcher if ranks > 1 else ()), PROGRAM, *options, env=alone, timeout=120)
    head, *lines = output_of(done).splitlines()
    found = [LINE.fullmatch(line) for line in lines]
    assert all(found), lines
    assert [int(one[1]) for one in found] == [*range(1, len(lines) + 1)]
    return Printed(
        head,
        [float(one[2]) for one in found],
        [float(one[3]) for one in found],
        [int(one[4]) for one in found],
        [[int(number) for number in one[5].split()] for one in found],
    )


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import train_long
    import train_text

    return train_long, train_text


def train_plainly(train_text: ModuleType, rounding: float, seed: int) -> torch.Tensor:
    """Losses and gradient norms [STEPS, 2] of whole sequences, without a process group. Each
    parameter is first changed by a random fraction of itself, at most `rounding`."""
    torch.manual_seed(SEED)
    model = train_text.Model(LAYERS, WIDTH, WINDOW)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in model.parameters():
            one *= 1 + rounding * (2 * torch.rand(one.shape, generator=noise) - 1)
    text = torch.tensor(list(TEXT.read_bytes()))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    generator, found = torch.Generator().manual_seed(SEED), []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            # The first steps of the linear warm-up, times half a cosine from 1 to LAST_RATE.
            fall = (1 + torch.cos(torch.tensor(step / STEPS * torch.pi, dtype=torch.float64))) / 2
            fall = train_text.LAST_RATE + (1 - train_text.LAST_RATE) * fall.item()
            group["lr"] = train_text.PEAK_RATE * (step + 1) / train_text.WARM_UP * fall
        start = torch.randint(len(text) - LENGTH, (1,), generator=generator)
        loss = train_text.loss_of(model, train_text.cut(text, start, LENGTH), "cpu")
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append([loss.item(), norm.item()])
    return torch.tensor(found, dtype=torch.float64)


def test_any_number_of_ranks_trains_alike(examples: tuple[ModuleType, ModuleType]) -> None:
    """97 bytes are 49 and 48, or 33, 32 and 32, on 2 and 3 ranks. The tolerance is twice the effect
    of one rounding error in each parameter on the plain loop's results, plus the rounding of
    printed numbers and of four float32 operations on a result: both programs add up and then
    divide."""
    want = train_plainly(examples[1], 0.0, 0)
    others = torch.stack([train_plainly(examples[1], 2.0**-23, seed) for seed in range(4)])
    allowed = 2 * (others - want).abs().amax(0) + DIGITS + 4 * 2.0**-23 * want
    assert allowed.max() < 1e-4, "a wrong target or weight changes a loss or a norm by 1e-3"
    for ranks in (1, 2, 3):
        found = run(ranks, "--text", TEXT, *SMALL)
        numbers = torch.tensor([found.losses, found.norms], dtype=torch.float64).T
        assert numbers.shape == want.shape
        error = (numbers - want).abs()
        assert (error <= allowed).all(), (ranks, error, allowed)
        size = TEXT.stat().st_size
        assert found.head.startswith(f"ranks: {ranks}, gloo; sequences of 97 of {size} bytes; ")
        assert min(found.rates) > 0
        assert all(len(row) == ranks and min(row) > 1 for row in found.memory)


def test_it_learns() -> None:
    """It trains on Python's documentation, without a file. Guessing costs 8 bits per byte."""
    found = run(2, "--length", "256", *SMALL[2:-6], "--steps", "12", "--device", "cpu")
    assert 7.5 < found.losses[0] < 8.5
    assert sum(found.losses[-3:]) / 3 < found.losses[0] - 0.2


def test_bytes_of_ranks(examples: tuple[ModuleType, ModuleType]) -> None:
    """The target of a rank's last byte is the first byte of the next rank."""
    train_long, _ = examples
    text, lengths = torch.arange(200, dtype=torch.uint8), [4, 1, 3]
    own = [train_long.cut_own(text, 150, lengths, rank) for rank in range(3)]
    assert [one.tolist() for one in own] == [
        [[150, 151, 152, 153, 154]],
        [[154, 155]],
        [[155, 156, 157, 158]],
    ]


def test_a_mapped_file(examples: tuple[ModuleType, ModuleType], tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(256)))
    assert examples[0].read_bytes(tmp_path / "text").tolist() == [*range(256)]


BAD = {
    "--length: is 0, want 1 or more": ["--length", "0"],
    "--length: is 2, want 3 or more": ["--length", "2"],  # of 3 ranks
    "--window: is 1, want 2 or more": ["--window", "1"],
    "--width: is 100, want a multiple of 64": ["--width", "100"],
    "nothing.txt is not a file": ["--text", "nothing.txt"],
    "want fewer than the text has: 600 bytes": ["--text", "short.txt", "--length", "600"],
    "want fewer than the text has: 0 bytes": ["--text", "empty.txt"],
}


@pytest.mark.parametrize("message", BAD)
def test_bad_usage(
    message: str,
    examples: tuple[ModuleType, ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "short.txt").write_text("short " * 100)
    (tmp_path / "empty.txt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_long.py", *BAD[message]])
    if "3 or more" in message:
        monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit) as stop:
        examples[0].main()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
