"""Runs the `fdma` command, and makes input files for it."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from programs import ROOT, Done, run
from safetensors.numpy import save_file
from safetensors.torch import load_file

TOOL = os.environ.get("FDMA_TOOL", str(ROOT / "build" / "fdma"))
EXAMPLE = ROOT / "examples" / "data" / "minilm.safetensors"


def run_tool(*arguments: str | Path, **options: Any) -> Done:
    """Run `fdma` with the arguments; assert that it did not crash."""
    done = run(TOOL, *arguments, **options)
    assert done.returncode in (0, 1, 2), f"exit {done.returncode}: {done.stderr}"
    return done


def refusal(*arguments: str | Path, code: int = 2, **options: Any) -> str:
    """Run `fdma`, which must fail with `code` and one line on stderr; return the line."""
    done = run_tool(*arguments, **options)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.endswith("\n") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def attend_json(*arguments: str | Path) -> dict[str, Any]:
    """Run `fdma attend --json`, which must succeed; return the object that it prints."""
    done = run_tool("attend", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def attend_tensors(
    folder: Path, tensors: dict[str, np.ndarray], *arguments: str
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The report and the outputs of `fdma attend` for a file of these tensors."""
    path, out_path = folder / "in.safetensors", folder / "out.safetensors"
    save_file(tensors, path)
    report = attend_json(path, *arguments, "--out", out_path)
    assert report["out"] == str(out_path)
    return report, load_file(out_path)


def pack(header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    """The bytes of a safetensors file with this header, which may be malformed."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def make_inputs(
    seed: int = 0,
    batch: int = 1,
    q_len: int = 24,
    kv_len: int = 24,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
) -> dict[str, np.ndarray]:
    """Random q, k, v and score in float32, shaped as `fdma attend` expects."""
    random = np.random.default_rng(seed)
    shapes = {
        "q": (batch, q_len, q_heads, head_dim),
        "k": (batch, kv_len, kv_heads, head_dim),
        "v": (batch, kv_len, kv_heads, head_dim),
        "score": (batch, kv_heads, kv_len),
    }
    return {name: random.standard_normal(s).astype(np.float32) for name, s in shapes.items()}
