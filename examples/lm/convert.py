#!/usr/bin/env python3
"""Write a model file for examples/lm from the parameters of a model in PyTorch.

    python examples/lm/convert.py CHECKPOINT MODEL.safetensors --window 448 --recent 64 --bits 8

CHECKPOINT is a safetensors file, or one that torch.save() has written, with the tensors that
model.h lists. --key names the entry of a checkpoint that has them. Numbers of heads and layers
follow from their shapes. Whatever the safetensors file says of the rest in its metadata counts
unless an option says otherwise.

With --bits 8 each row of a matrix becomes integers from -127 to 127 and a scale: its largest
magnitude becomes 127. dt_proj stays float32: it is small, and the order of the keys depends on it.
Exit status: 0 done; 2 bad usage or a checkpoint of another kind of model.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

BITS = (8, 16, 32)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--key", help="the entry of the checkpoint that has the parameters")
    parser.add_argument("--bits", type=int, choices=BITS, default=32)
    parser.add_argument("--window", type=int, help="keys that a query keeps by their score")
    parser.add_argument("--recent", type=int, help="newest keys that it keeps (default 0)")
    parser.add_argument("--sinks", type=int, help="first keys that it keeps (default 0)")
    parser.add_argument("--bias-form", choices=("exp", "linear", "none"), help="default exp")
    parser.add_argument("--head-dim", type=int, help="default 64")
    parser.add_argument("--rotary-base", type=float, help="default 10000")
    parser.add_argument("--nope", help="NoPE heads of each layer, as in '0 2' (default none)")
    parser.add_argument("--nope-window", type=int, help="of layers with them (default --window)")
    parser.add_argument("--nope-recent", type=int, help="newest keys in them (default --recent)")
    parser.add_argument("--nope-rotary-dim", type=int, help="their rotated channels (default 0)")
    parser.add_argument("--norm-eps", type=float, help="default 1e-5")
    return parser


if __name__ == "__main__":
    make_parser().parse_args()  # --help and wrong options end here, before PyTorch is imported

import torch
from safetensors import safe_open
from safetensors.torch import save_file

DTYPES = {
    8: torch.float32,
    16: torch.bfloat16,
    32: torch.float32,
}  # of tensors that are not quantised
DEFAULTS = {
    "recent": "0",
    "sinks": "0",
    "bias_form": "exp",
    "head_dim": "64",
    "rotary_base": "10000",
    "norm_eps": "1e-05",
}
Tensors = "dict[str, torch.Tensor]"


def read_checkpoint(path: Path, key: str | None) -> tuple[Tensors, dict[str, str]]:
    """The parameters, and the metadata of a safetensors file."""
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    found = torch.load(path, map_location="cpu", weights_only=True)
    if key is not None:
        if not isinstance(found, dict) or key not in found:
            raise ValueError(f"{path}: has no entry {key!r}")
        found = found[key]
    if not isinstance(found, dict) or not all(isinstance(x, torch.Tensor) for x in found.values()):
        raise ValueError(f"{path}: is no dictionary of tensors, want one, or --key")
    prefix = "_orig_mod."  # prefix of the parameters of a module that torch.compile() has made
    return {name.replace(prefix, "", 1): tensor for name, tensor in found.items()}, {}


def find(tensors: Tensors, name: str) -> torch.Tensor:
    if name not in tensors:
        raise ValueError(f"tensor {name!r}: is missing")
    return tensors[name]


def metadata_of(tensors: Tensors, given: dict[str, str]) -> dict[str, str]:
    """The metadata of the model file, from shapes and from `given`."""
    has_scores = "blocks.0.attention.dt_proj.weight" in tensors
    chosen = {**DEFAULTS, **given}
    head_dim = int(chosen["head_dim"])
    width = find(tensors, "embedding.weight").shape[1]
    k_rows = find(tensors, "blocks.0.attention.k_proj.weight").shape[0]
    if width % head_dim or k_rows % head_dim:
        raise ValueError(f"--head-dim: is {head_dim}, want a divisor of {width} and {k_rows}")
    if not has_scores:
        chosen.update(window="all", recent="0", sinks="0", bias_form="none")
        for name in ("nope_window", "nope_recent"):
            chosen.pop(name, None)
    if "blocks.0.attention.q_norm.weight" in tensors:
        chosen.update(qk_norm="1")
    if chosen.get("window", "all") == "all" and has_scores:
        raise ValueError("--window: is missing, want a number for a model with scores")
    sizes = {
        "layers": len({name.split(".")[1] for name in tensors if name.startswith("blocks.")}),
        "width": width,
        "q_heads": width // head_dim,
        "kv_heads": k_rows // head_dim,
    }
    return {**chosen, **{name: str(size) for name, size in sizes.items()}}


def quantise(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers [rows, columns] and scales [rows]; a row of zeros has scale 1."""
    scale = matrix.abs().amax(1) / 127
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (matrix / scale[:, None]).round().to(torch.int8), scale


def convert(tensors: Tensors, bits: int) -> Tensors:
    """The tensors of the model file, with 32, 16 or 8 bits for a number of a matrix."""
    made = {}
    for name, tensor in tensors.items():
        wide = tensor.detach().to(torch.float32)
        if bits == 8 and wide.dim() == 2 and not name.endswith("dt_proj.weight"):
            made[name], made[f"{name}.scale"] = quantise(wide)
        else:
            made[name] = wide.to(DTYPES[bits]).contiguous()
    return made


def main() -> None:
    parser = make_parser()
    options = vars(parser.parse_args())
    checkpoint, out, key, bits = (options.pop(one) for one in ("checkpoint", "out", "key", "bits"))
    if not checkpoint.is_file():
        parser.error(f"{checkpoint} is not a file")
    try:
        tensors, metadata = read_checkpoint(checkpoint, key)
        given = {name: f"{value}" for name, value in options.items() if value is not None}
        metadata = metadata_of(tensors, {**metadata, **given})
    except ValueError as error:
        parser.error(str(error))
    save_file(convert(tensors, bits), out, metadata)
    print(f"{out}: {os.path.getsize(out)} bytes")


if __name__ == "__main__":
    sys.exit(main())
