"""How the models of quality.py and workloads.py are trained: groups of parameters, optimizers and
learning rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from quality_model import Model, is_of_scores
from torch import nn


def parameter_groups(
    model: nn.Module, weight_decay: float, score_rate: float
) -> dict[str, dict[str, Any]]:
    """Groups for optimizers, those that are not empty: matrices between two hidden states, others,
    vectors, and what scores are computed from. `factor` multiplies the learning rate of each, that
    of the last by score_rate. Only matrices decay, and not those of scores."""
    groups: dict[str, dict[str, Any]] = {
        "hidden": {"params": [], "factor": 1.0, "weight_decay": weight_decay},
        "matrices": {"params": [], "factor": 1.0, "weight_decay": weight_decay},
        "vectors": {"params": [], "factor": 1.0, "weight_decay": 0.0},
        "scores": {"params": [], "factor": score_rate, "weight_decay": 0.0},
    }
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = "matrices" if parameter.dim() == 2 else "vectors"
        kind = "hidden" if kind == "matrices" and name.startswith("blocks.") else kind
        kind = "scores" if is_of_scores(name) else kind
        groups[kind]["params"].append(parameter)
    return {kind: group for kind, group in groups.items() if group["params"]}


def optimizers_of(
    groups: dict[str, dict[str, Any]], name: str, rate: float
) -> list[torch.optim.Optimizer]:
    """Optimizers for the groups of parameter_groups(), AdamW first. name: adamw, or muon, where
    Muon has the hidden matrices, with steps as long as AdamW's at this rate."""
    others = [group for kind, group in groups.items() if name == "adamw" or kind != "hidden"]
    is_cuda = others[0]["params"][0].device.type == "cuda"
    optimizers = [torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), fused=is_cuda)]
    if name == "muon":
        muon = torch.optim.Muon([groups["hidden"]], lr=rate, adjust_lr_fn="match_rms_adamw")
        optimizers.append(muon)
    return optimizers


class ScoreRates:
    """Multiplies the learning rates of the rows of dt_proj (by dt_factor) and of A (by a_factor) of
    the last heads[n] kv heads of layer n. AdamW has one rate for a whole tensor, so after each step
    these rows keep only that fraction of their change."""

    def __init__(
        self, model: Model, heads: Sequence[int], dt_factor: float, a_factor: float
    ) -> None:
        self.rows = [
            (parameter, slice(-count, None), factor)
            for attention, count in zip(model.attentions(), heads)
            if count > 0 and attention.window is not None
            for parameter, factor in (
                (attention.dt_proj.weight, dt_factor),
                (attention.A, a_factor),
            )
        ]

    def drop_gradients(self) -> None:
        """Of rows that do not change, so that the norm of all gradients is without them."""
        for parameter, rows, factor in self.rows:
            if factor == 0 and parameter.grad is not None:
                parameter.grad[rows] = 0

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        before = [parameter.detach()[rows].clone() for parameter, rows, _ in self.rows]
        optimizer.step()
        for (parameter, rows, factor), old in zip(self.rows, before):
            changed = parameter.detach()[rows]
            changed.copy_(torch.lerp(old, changed, factor))


def rate_at(step: int, steps: int, peak: float, warm_up: int, first: int = 0) -> float:
    """The learning rate. It rises linearly over warm_up steps from `first` on, and is multiplied by
    half a cosine that falls from the peak, at step warm_up, to a tenth of it, at `steps`."""
    rise = min(1.0, (step - first + 1) / warm_up)
    done = min(1.0, max(0, step - warm_up) / max(1, steps - warm_up))
    return peak * rise * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)
