"""The real input, examples/data/minilm.safetensors: its contents and the quality of its scores."""

from __future__ import annotations

from pathlib import Path

import flash_dmattn
import pytest
import torch
from safetensors.torch import load_file
from samples import combinations

PATH = Path(__file__).resolve().parents[2] / "examples" / "data" / "minilm.safetensors"
LENGTH, HEADS, HEAD_DIM = 512, 12, 32
WINDOW = 64


@pytest.fixture(scope="module")
def data() -> dict[str, torch.Tensor]:
    return load_file(PATH)


@pytest.fixture(scope="module")
def score(data: dict[str, torch.Tensor]) -> torch.Tensor:
    return flash_dmattn.score(data["v"], data["dt_proj"], data["a"])[0]


def kept_mass(data: dict[str, torch.Tensor], score: torch.Tensor, causal: bool) -> torch.Tensor:
    """The fraction of dense attention that goes to the kept keys, mean over queries, [heads]."""
    qkv = [data[name] for name in "qkv"]
    scope = "causal" if causal else "global"
    selection = flash_dmattn.select(score, WINDOW, scope=scope)
    _, lse = flash_dmattn.attention(*qkv, selection=selection, causal=causal)
    _, dense = flash_dmattn.attention(*qkv, causal=causal)
    return (lse - dense).exp().mean(dim=(0, 2))


def rival_score(rival: int | str) -> torch.Tensor:
    if rival == "recent":
        return torch.arange(LENGTH, dtype=torch.float32).expand(1, HEADS, LENGTH).contiguous()
    return torch.rand(1, HEADS, LENGTH, generator=torch.Generator().manual_seed(rival))


def test_contents(data: dict[str, torch.Tensor]) -> None:
    shapes = {name: tuple(t.shape) for name, t in data.items()}
    rows = (1, LENGTH, HEADS, HEAD_DIM)
    assert shapes == dict(q=rows, k=rows, v=rows, dt_proj=(HEADS, HEADS * HEAD_DIM), a=(HEADS,))
    for name, t in data.items():
        assert t.dtype == torch.float16, name
        assert t.isfinite().all(), name
        assert t.float().std() > 0, name
    assert PATH.stat().st_size < 2_000_000


def test_score_predicts_attention_received(
    data: dict[str, torch.Tensor], score: torch.Tensor
) -> None:
    """Spearman's rank correlation of each head, on text that the fit has not seen."""
    q, k = (data[name][0].double().transpose(0, 1) for name in "qk")
    received = (q @ k.transpose(1, 2) / HEAD_DIM**0.5).softmax(-1).sum(1)
    for head in range(HEADS):
        ranks = torch.stack(
            [x.argsort().argsort().double() for x in (score[0, head], received[head])]
        )
        assert torch.corrcoef(ranks)[0, 1] > 0.9, head


# Seeds of random scores, or "recent" for a sliding window; and whether attention is causal.
RIVALS = [*combinations(range(5), (False, True)), ("recent", True)]


@pytest.mark.parametrize(("rival", "causal"), RIVALS)
def test_scores_keep_more_than_others(
    rival: int | str, causal: bool, data: dict[str, torch.Tensor], score: torch.Tensor
) -> None:
    ours, others = (kept_mass(data, one, causal) for one in (score, rival_score(rival)))
    assert (ours > others).all(), (ours, others)
    assert (ours <= 1.001).all(), ours
