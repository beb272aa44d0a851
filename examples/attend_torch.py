#!/usr/bin/env python3
"""Attention over 64 of 1024 keys in PyTorch: how much of the dense attention do they carry?

Run it with the package installed, or with FDMA_LIBRARY=build/libfdma.so PYTHONPATH=python in the
environment.
"""

from __future__ import annotations

import argparse

import program


def parse() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()


if __name__ == "__main__":
    program.begin(parse)

import flash_dmattn
import torch

torch.manual_seed(0)
batch, length, q_heads, kv_heads, head_dim, window = 1, 1024, 8, 2, 64, 64
query = torch.randn(batch, length, q_heads, head_dim)
key, value = torch.randn(2, batch, length, kv_heads, head_dim)
dt_proj = torch.randn(kv_heads, kv_heads * head_dim) / 12
a_coef = torch.full((kv_heads,), 0.7)

# In one call, as a layer does.
out = flash_dmattn.flash_dma_attention(
    query, key, value, dt_proj, a_coef, keep_window_size=window, causal=True
)

# In three calls, which give the kept keys and the lse too.
score, bias = flash_dmattn.score(value, dt_proj, a_coef)
selection = flash_dmattn.select(score, window)
same, lse = flash_dmattn.attention(query, key, value, bias=bias, selection=selection, causal=True)
_, dense_lse = flash_dmattn.attention(query, key, value, bias=bias, causal=True)

mass = (lse - dense_lse).exp()
ever_kept = (selection.slot >= 0).float().mean()
print(f"backends {', '.join(flash_dmattn.get_available_backends())}")
print(f"out {tuple(out.shape)}, the same in one call and in three: {torch.equal(out, same)}")
print(f"{window} keys carry {mass.mean():.1%} of the dense attention (worst {mass.min():.1%})")
print(f"{ever_kept:.1%} of the keys are ever kept")
