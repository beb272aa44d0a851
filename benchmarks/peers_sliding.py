"""Sliding windows and block-sparse attention of other libraries, as peers on a CUDA device.

A peer keeps as many keys as flash_dmattn in the same case: the last ones, or blocks of BLOCK keys.
Its rate counts the pairs that it keeps. Most compile their kernels at the first call of a shape.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Callable, NamedTuple

import peers_cuda
import peers_cuda_backward
import peers_cuda_cases
import peers_flash4
import torch
from benchmarking import Rounds, Row, passes, visible_pairs
from peers_cuda_cases import SAMPLES, Case, Peer, make_case

BLOCK = 128  # keys, and queries that keep the same ones where a library selects for blocks of them
# q_heads, kv_heads, head_dim, length, window, batch
SIZES = (
    ((32, 8, 128, 32768, 2048), 1),
    ((32, 8, 128, 32768, 512), 1),
    ((32, 32, 128, 32768, 2048), 1),
    ((16, 4, 64, 32768, 2048), 1),
    ((16, 16, 64, 65536, 1024), 1),
    ((16, 4, 128, 2048, 512), 8),
)


class Inputs(peers_cuda_cases.Inputs):
    """It also holds the key blocks of each query block, its own included: index [batch, kv_heads,
    blocks, kept] in rising order; the first count [batch, kv_heads, blocks] of them are kept. And
    heads by which a library selects: query [batch, kv_heads, length, head_dim], key [batch, 1, ...]
    """

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        blocks = case.length // BLOCK
        number = torch.arange(blocks, device="cuda")
        rank = torch.rand(case.batch, case.kv_heads, blocks, blocks, device="cuda")
        rank[..., number > number[:, None]] = -1
        rank[..., number, number] = 2
        best, index = rank.topk(min(case.window // BLOCK, blocks), dim=-1)
        index = index.masked_fill(best < 0, blocks).sort(-1).values
        self.count = (index < blocks).sum(-1).int()
        self.index = (index % blocks).int()
        shape = (case.length, case.head_dim)
        new = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        self.proxies = tuple(new(case.batch, heads, *shape) for heads in (case.kv_heads, 1))


class Explicit(torch.autograd.Function):
    """forward(query, key, value) gives out and lse. backward() takes dout and these five."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *rows: torch.Tensor) -> torch.Tensor:
        out, lse = forward(*rows)
        ctx.backward_call = backward
        ctx.save_for_backward(*rows, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.backward_call(dout, *ctx.saved_tensors))


# ---- calls: out [batch, length, q_heads, head_dim] with a graph if the inputs need gradients ----


def cudnn_window(inputs: Inputs) -> torch.Tensor:
    import cudnn.sdpa.fwd.torch_op  # noqa: F401 (it registers torch.ops.cudnn)

    options = {"is_causal": True, "window_left": inputs.case.window}
    options["attn_scale"] = inputs.case.head_dim**-0.5
    calls = (torch.ops.cudnn.sdpa_fwd, torch.ops.cudnn.sdpa_bwd)
    run = [functools.partial(call, **options) for call in calls]
    return Explicit.apply(*run, *inputs.sdpa).transpose(1, 2)


def flash_window(inputs: Inputs) -> torch.Tensor:
    """FlashAttention-2 in PyTorch. It counts the keys to the left of a query."""
    length, window = inputs.case.length, inputs.case.window
    bounds = {"window_size_left": window - 1, "window_size_right": 0}
    options = (None, None, length, length, 0.0, True, False)
    return torch.ops.aten._flash_attention_forward(*inputs.fdma, *options, **bounds)[0]


def package_window(inputs: Inputs, module: str, **options: bool) -> torch.Tensor:
    """flash_attn_func() of FlashAttention's packages."""
    bounds = (inputs.case.window - 1, 0)
    call = import_module(module).flash_attn_func
    found = call(*inputs.fdma, causal=True, window_size=bounds, **options)
    return found[0] if isinstance(found, tuple) else found


def cudnn_blocks(inputs: Inputs) -> torch.Tensor:
    """It has no causal mask, so that a query also sees later keys of its own block."""
    from cudnn.block_sparse_attention import api

    group = inputs.case.q_heads // inputs.case.kv_heads
    index, count = (x.repeat_interleave(group, 1) for x in (inputs.index, inputs.count))
    lists = {"q2k_block_index": index, "q2k_block_nums": count}
    options = {"sparse_block_size": BLOCK, "layout": "bshd", **lists}
    run = (
        lambda *rows: api.block_sparse_attention_forward(*rows, **options),
        lambda *rows: api.block_sparse_attention_backward(*rows, **options),
    )
    return Explicit.apply(*run, *inputs.fdma)


def msa(inputs: Inputs) -> torch.Tensor:
    """It selects for each query and kv head by proxy heads: the time includes that, and backward
    the proxies' gradients. It copies tensors, which have another layout."""
    from flash_msa import flash_msa_func

    case = inputs.case
    found, _ = flash_msa_func(*inputs.proxies, *inputs.sdpa, case.window, case.head_dim**-0.5)
    return found.view(inputs.query.shape)


def msa_blocks(inputs: Inputs) -> torch.Tensor:
    """[batch, kv_heads, length, kept], as that call selects them."""
    from flash_msa.flash_msa import select_blocks

    case = inputs.case
    numbers = {"num_blocks": case.length // BLOCK, "top_k_blocks": case.window // BLOCK}
    return select_blocks(*inputs.proxies, scale=case.head_dim**-0.5, **numbers)


# ---- keys ----


def kept_keys(inputs: Inputs, keys: str, rows: torch.Tensor) -> list[torch.Tensor]:
    """bool [rows, length] for each batch entry and kv head."""
    case, device = inputs.case, rows.device
    key = torch.arange(case.length, device=device)
    visible = key <= rows[:, None]
    if keys == "window":
        recent = visible & (key > rows[:, None] - case.window)
        return [recent] * (case.batch * case.kv_heads)
    if keys == "blocks":
        index, count = inputs.index[:, :, rows // BLOCK], inputs.count[:, :, rows // BLOCK, None]
        index = index.where(torch.arange(index.shape[-1], device=device) < count, -1)
    else:
        index = msa_blocks(inputs)[:, :, rows]
    chosen = (index[..., None] == torch.arange(case.length // BLOCK, device=device)).any(-2)
    kept = chosen.repeat_interleave(BLOCK, -1).flatten(0, 1)
    return list(kept if keys == "blocks" else kept & visible)


def kept_pairs(case: Case, keys: str) -> int:
    if keys == "window":
        return visible_pairs(case.length, case.window)
    blocks = case.length // BLOCK
    whole = BLOCK**2 * visible_pairs(blocks, case.window // BLOCK)
    return whole if keys == "blocks" else whole - blocks * BLOCK * (BLOCK - 1) // 2


# ---- peers ----


class Library(NamedTuple):
    """keys: "window", "blocks", or "causal-blocks", in which a query sees no later key."""

    attend: Callable[[Inputs], torch.Tensor]
    keys: str
    package: str
    module: str  # of the package; "": peers_flash4 knows


def package(name: str, module: str, compiled: str, **options: bool) -> Library:
    attend = functools.partial(package_window, module=module, **options)
    return Library(attend, "window", name, compiled)


LIBRARIES = {
    "cudnn-window": Library(cudnn_window, "window", "nvidia-cudnn-frontend", "cudnn"),
    "flash-window": Library(flash_window, "window", "torch", "torch"),
    "flash2-window": package("flash-attn", "flash_attn", "flash_attn_2_cuda"),
    "flash3-window": package("flash_attn_3", "flash_attn_interface", "flash_attn_interface"),
    "flash4-window": package("flash-attn-4", "flash_attn.cute", "", return_lse=True),
    "cudnn-blocks": Library(cudnn_blocks, "blocks", "nvidia-cudnn-frontend", "cudnn"),
    "msa": Library(msa, "causal-blocks", "flash-msa", "flash_msa"),
}


def installed(names: list[str]) -> list[str]:
    """Those whose packages are installed. A line names each other one."""
    found = []
    for name in names:
        module, package = LIBRARIES[name].module, LIBRARIES[name].package
        if find_spec(module) if module else peers_flash4.is_installed():
            found.append(name)
        else:
            print(f"without {name}: {package} is not installed", file=sys.stderr)
    return found


def all_cases() -> list[Case]:
    kinds = ("attention", "backward")
    return [make_case(kind, *sizes, batch=batch) for sizes, batch in SIZES for kind in kinds]


def check(inputs: Inputs, name: str) -> None:
    """Compare sampled outputs, or the gradients of sampled queries, with float64.

    Raises:
        Disagreement: one is further away than allowed.
    """
    (attend, keys, *_), case = LIBRARIES[name], inputs.case
    rows = torch.linspace(0, case.length - 1, SAMPLES, device=inputs.query.device).long()
    kept, what = kept_keys(inputs, keys, rows), f"{case.name()}: {name}"
    if case.kind == "backward":
        peers_cuda_backward.check_gradients(inputs, name, attend, rows, kept)
        return
    out = attend(inputs)
    peers_cuda.require_finite(out, what)
    for (b, g), seen in zip(itertools.product(range(case.batch), range(case.kv_heads)), kept):
        added = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, -torch.inf)
        peers_cuda.check_group(inputs, out, g, rows, added, what, b)


def prepare(case: Case, names: list[str]) -> tuple[Inputs, list[Peer]]:
    """flash_dmattn, cuDNN over all keys, and the libraries that are right.

    Raises:
        Disagreement: one of the first two is wrong.
    """
    torch.cuda.empty_cache()
    inputs = Inputs(case)
    usual = [peer for peer in peers_cuda.peers_of(case) if peer.name in ("fdma", "cudnn")]
    peers = peers_cuda.checked_peers(inputs, usual)
    for name in names:
        if passes(case.name(), name, functools.partial(check, inputs, name)):
            attend, keys, *_ = LIBRARIES[name]
            run = functools.partial(peers_cuda_backward.backward, name=name, forward=attend)
            peers.append(Peer(name, run if case.kind == "backward" else attend, keys))
    torch.cuda.empty_cache()
    return inputs, peers


def measure(case: Case, rounds: Rounds, names: list[str]) -> Iterator[Row]:
    return time_peers(*prepare(case, names), rounds)


def time_peers(inputs: Inputs, peers: list[Peer], rounds: Rounds) -> Iterator[Row]:
    case, found = inputs.case, peers_cuda.alternate(peers, inputs, rounds)
    times = dict(zip([peer.name for peer in peers], found))
    for peer in peers:
        row = peers_cuda.make_row(case, peer, times, [])
        if peer.name in LIBRARIES:
            share = kept_pairs(case, peer.keys) / visible_pairs(case.length, case.window)
            for figure in ("useful_gflops", "of_dense"):
                row[figure] *= share
        yield row
