#!/usr/bin/env python3
"""Smoke test of a wheel: run it with a Python in which the wheel and PyTorch are installed.

    smoke.py [--device cuda]

It imports the package, makes a call, its gradients and a cache, and compares them with PyTorch's,
all without a compiler on PATH. It runs the command `fdma` and, where cmake and a C compiler are on
PATH, builds and runs C programs against the files in the wheel. The exit status is 1 if anything
fails. It prints one line: versions, and the seconds until the first result.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

USE_C = Path(__file__).resolve().parents[2] / "tests" / "install"


def run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{command} gave {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def close(found: Any, wanted: Any, tolerance: float) -> None:
    distance = (found.float() - wanted.float()).abs().max().item()
    assert distance <= tolerance, f"{distance} apart, want at most {tolerance}"


def check_calls(torch: Any, flash_dmattn: Any, device: str) -> None:
    """With a window of all keys, attention is PyTorch's; with a smaller one there are gradients."""
    dtype, tolerance = (torch.bfloat16, 0.05) if device == "cuda" else (torch.float32, 1e-4)
    make = {"device": device, "dtype": dtype}
    shapes = ((2, 128, 4, 64), (2, 128, 2, 64), (2, 128, 2, 64))
    given = [torch.randn(*shape, **make).requires_grad_() for shape in shapes]
    dense = torch.nn.functional.scaled_dot_product_attention
    repeated = [given[0], *(x.repeat_interleave(2, 2) for x in given[1:])]
    wanted = dense(*(x.transpose(1, 2) for x in repeated), is_causal=True).transpose(1, 2)
    found, _ = flash_dmattn.attention(*given, causal=True)
    close(found, wanted, tolerance)
    weights = torch.randn_like(wanted)
    for one, other in zip(*(torch.autograd.grad(x, given, weights) for x in (found, wanted))):
        close(one, other, 4 * tolerance)

    learned = (torch.randn(2, 128, **make) / 12, torch.ones(2, **make))
    given += [x.requires_grad_() for x in learned]
    out = flash_dmattn.flash_dma_attention(*given, keep_window_size=32, causal=True)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out, given, weights))


def check_cache(torch: Any, flash_dmattn: Any, device: str) -> None:
    """Tokens one by one give what the whole sequence gives."""
    dtype, tolerance = (torch.bfloat16, 0.05) if device == "cuda" else (torch.float32, 1e-4)
    layer = flash_dmattn.DynamicMaskAttention(128, 2, 1, window=24, recent=8)
    layer = layer.to(device=device, dtype=dtype)
    states = torch.randn(2, 80, 128, device=device, dtype=dtype)
    cache = layer.new_cache(batch=2)
    with torch.no_grad():
        out = [layer(states[:, :70], cache=cache)]
        out += [layer(states[:, t : t + 1], cache=cache) for t in range(70, 80)]
        close(torch.cat(out, 1), layer(states), tolerance)


def check_files(version: str) -> str:
    """The command, and a C program; returns what was built."""
    names = {"win32": ".dll", "darwin": ".dylib"}
    package = Path(run(sys.executable, "-m", "flash_dmattn", "--cmake-dir").strip()).parents[1]
    assert (package / f"libfdma{names.get(sys.platform, '.so')}").is_file()
    assert (package / "libfdma.a").is_file()
    assert f"fdma       {version}," in run(sys.executable, "-m", "flash_dmattn", "info")
    if sys.platform != "win32":
        command = Path(sysconfig.get_path("scripts")) / "fdma"
        assert f"fdma       {version}\n" in run(command, "info")
    compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if not (compiler and shutil.which("cmake") and USE_C.is_dir()):
        return "no C program"
    with tempfile.TemporaryDirectory() as folder:
        found = f"-Dfdma_DIR={package / 'cmake' / 'fdma'}"
        run("cmake", "-S", USE_C, "-B", folder, found, f"-DCMAKE_C_COMPILER={compiler}")
        run("cmake", "--build", folder)
        for program in ("use_fdma", "use_fdma_static"):
            run(Path(folder) / program)
        include = run(sys.executable, "-m", "flash_dmattn", "--include-dir").strip()
        assert (Path(include) / "fdma.h").is_file()
    return "C programs"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    device = parser.parse_args().device
    warnings.filterwarnings("error", message="flash_dmattn")
    os.chdir(tempfile.gettempdir())  # away from sources
    path = os.environ["PATH"]
    os.environ["PATH"] = str(Path(sys.executable).parent)  # no compiler
    start = time.monotonic()
    import flash_dmattn
    import torch

    x = torch.randn(1, 256, 2, 64, device=device, dtype=torch.bfloat16)
    flash_dmattn.attention(x, x, x, causal=True)[0].sum().item()
    first = time.monotonic() - start
    from flash_dmattn import _repeat

    has_gil = not sysconfig.get_config_var("Py_GIL_DISABLED")
    assert (_repeat.NATIVE is not None) == (has_gil and sys.platform != "win32")
    check_calls(torch, flash_dmattn, device)
    check_cache(torch, flash_dmattn, device)
    os.environ["PATH"] = path
    built = check_files(flash_dmattn.__version__)
    python = sys.version.split()[0]
    print(f"passed: Python {python}, PyTorch {torch.__version__}, {device}, {built}, "
          f"{first:.1f} s to a first result")  # fmt: skip


if __name__ == "__main__":
    main()
