"""Programs for flash-dmattn run unchanged: with the names, keywords and values of its quick starts,
and smaller sizes, on the device if there is one, or on the CPU. Also the files on citing and
conduct."""

from __future__ import annotations

import math
import re

import pytest
import torch
from programs import ROOT, output_of, python

BATCH, LENGTH, HEADS, HEAD_DIM, WINDOW = 2, 96, 6, 32, 24
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# `dropped` ignores the result of scatter(), so that the mask stays 0.
MASKED = """
import math, warnings
import torch
from flash_dmattn import flash_dmattn_func_auto, get_available_backends

print(f"Available backends: {{get_available_backends()}}")
dtype, device = torch.bfloat16, torch.device("{device}")
batch, length, heads, head_dim, window = {sizes}
query, key, value = torch.randn(3, batch, length, heads, head_dim, device=device, dtype=dtype)
attention_bias = torch.randn(batch, heads, length, length, device=device, dtype=dtype)
attention_mask = torch.ones(batch, heads, length, length, device=device, dtype=dtype)
if length > window:
    best = torch.topk(attention_bias, window, dim=-1, largest=True, sorted=False).indices
    attention_mask.zero_()
    {scatter}
flash_dmattn_func = flash_dmattn_func_auto(backend="cuda")
output = flash_dmattn_func(
    q=query,
    k=key,
    v=value,
    attn_mask=attention_mask,
    attn_bias=attention_bias,
    is_causal=True,
    scale=1.0 / math.sqrt(head_dim),
)
print(f"Output shape: {{output.shape}}")
print("zeros" if (output == 0).all() else "numbers")
"""
PLAIN = """
import torch
from flash_dmattn import flash_dmattn_func
query, key, value = torch.randn(3, 1, 64, 4, 32, device="{device}", dtype=torch.bfloat16)
print(flash_dmattn_func(q=query, k=key, v=value, is_causal=True).shape)
"""
PACKED = """
import torch
from flash_dmattn import flash_dmattn_varlen_func
lengths = [12, 30, 21]
q, k, v = torch.randn(3, sum(lengths), 4, 32, device="{device}", dtype=torch.bfloat16)
starts = torch.tensor([0] + lengths, device="{device}", dtype=torch.int32).cumsum(0)
output = flash_dmattn_varlen_func(
    q=q, k=k, v=v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=max(lengths),
    max_seqlen_k=max(lengths), is_causal=True
)
print(output.shape)
"""
FIRST = """
import torch, flash_dma, math
q, k, v = torch.randn(3, 2, 64, 4, 32, device="{device}", dtype=torch.bfloat16)
zoh_states = torch.randn(2, 4, 64, 64, device="{device}", dtype=torch.bfloat16)
active_mask = torch.ones(2, 4, 64, 64, device="{device}", dtype=torch.bfloat16)
output = flash_dma.fwd(
    q=q, k=k, v=v, zoh=zoh_states, active_mask=active_mask,
    softmax_scale=1.0 / math.sqrt(32), keep_window_size=32, is_causal=True
)[0]
torch.autograd.set_detect_anomaly(True)
output, softmax_lse, attn_weights, _ = flash_dma.fwd(
    q, k, v, zoh_states, active_mask, return_softmax=True
)
print(f"weights [{{attn_weights.min()}}, {{attn_weights.max()}}], mean lse {{softmax_lse.mean()}}")
print(output.shape)
"""


def run(program: str, **more: str) -> str:
    sizes = str((BATCH, LENGTH, HEADS, HEAD_DIM, WINDOW))
    done = python("-c", program.format(device=DEVICE, sizes=sizes, **more))
    if DEVICE == "cuda":
        assert done.stderr == ""
    return output_of(done)


@pytest.mark.parametrize(
    ("scatter", "contents"),
    [
        ("attention_mask = attention_mask.scatter(-1, best, 1.0)", "numbers"),
        ("attention_mask.scatter(-1, best, 1.0)", "zeros"),
        ("attention_mask.fill_(1.0)", "numbers"),
    ],
)
def test_masks(scatter: str, contents: str) -> None:
    output = run(MASKED, scatter=scatter)
    assert f"Output shape: torch.Size([{BATCH}, {LENGTH}, {HEADS}, {HEAD_DIM}])" in output
    assert output.split()[-1] == contents


def test_plain() -> None:
    assert run(PLAIN) == "torch.Size([1, 64, 4, 32])\n"


def test_packed() -> None:
    assert run(PACKED) == "torch.Size([63, 4, 32])\n"


def test_first_interface() -> None:
    assert run(FIRST).endswith("torch.Size([2, 64, 4, 32])\n")


def test_importable() -> None:
    assert output_of(python("-c", "import flash_dma_cuda; print(flash_dma_cuda.fwd.__name__)"))


def test_checkpointing() -> None:
    """With positional arguments, as in a recipe for long sequences, and queries in pieces."""
    from flash_dmattn import flash_dmattn_func
    from torch.utils.checkpoint import checkpoint

    q, k, v = (torch.randn(1, 64, 4, 32).requires_grad_() for _ in "qkv")
    given = (q, k, v, None, None, 0.0, 1.0 / math.sqrt(32), True)
    out = checkpoint(flash_dmattn_func, *given, use_reentrant=False)
    want = flash_dmattn_func(q, k, v, is_causal=True)
    assert torch.equal(out, want)
    gradients = (torch.autograd.grad(x.cos().sum(), (q, k, v)) for x in (out, want))
    assert all(torch.equal(one, other) for one, other in zip(*gradients))
    whole = flash_dmattn_func(q, k, v)
    pieces = [flash_dmattn_func(q=q[:, at : at + 16], k=k, v=v) for at in range(0, 64, 16)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-6, rtol=1e-5)


def test_citation() -> None:
    """The version equals the header's."""
    header = (ROOT / "include" / "fdma.h").read_text()
    version = re.findall(r"#define FDMA_VERSION_(?:MAJOR|MINOR|PATCH) +(\d+)", header)
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {'.'.join(version)}\n" in text
    assert "arXiv.2508.02124" in text and "\nlicense: BSD-3-Clause\n" in text


def test_documents_are_linked() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in ("CITATION.cff", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "docs/integration.md"):
        assert f"({name})" in readme and (ROOT / name).is_file()
