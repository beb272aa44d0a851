"""examples/tensor_parallel.py: ranks with some heads each decode the same as the whole layer."""

from __future__ import annotations

import re

import pytest
from programs import ROOT, output_of, python


def run_ranks(ranks: int) -> str:
    options = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    program = ROOT / "examples" / "tensor_parallel.py"
    done = python(*options, program, env={"OMP_NUM_THREADS": "1"})
    return output_of(done)


@pytest.mark.parametrize("ranks", [1, 2])
def test_results_and_cache(ranks: int) -> None:
    # gloo writes to standard output too, sometimes in the middle of a line.
    line = r"rank (\d) of \d: (\d) kv heads, a cache of (\d+) bytes, \D* ([\d.]+(?:e-\d+)?)"
    found = list(re.finditer(line, run_ranks(ranks)))
    assert sorted(int(one[1]) for one in found) == list(range(ranks))
    rows = 2 * 64 * (4 // ranks)  # of 2 sequences
    for one in found:
        assert int(one[2]) == 4 // ranks
        # k and v of 32 channels, bias, score and position; 2 counts of tokens
        assert int(one[3]) == rows * (2 * 32 * 4 + 12) + 2 * 4
        assert 0 < float(one[4]) < 1e-5
