"""The training of the models of quality.py and workloads.py: groups of parameters, optimizers and
learning rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from quality_model import Model, is_of_scores
from torch import nn

MOMENTUM = 0.95  # of Muon
COEFFICIENTS, ITERATIONS = (3.4445, -4.775, 2.0315), 5  # of its Newton-Schulz iteration


def parameter_groups(
    model: nn.Module, weight_decay: float, score_rate: float
) -> dict[str, dict[str, Any]]:
    """The groups for optimizers that are not empty. hidden: matrices between two hidden states;
    matrices: the other matrices; vectors; scores: A and dt_proj, whose learning rate is multiplied
    by score_rate. Only hidden and matrices decay."""
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


class Muon(torch.optim.Optimizer):
    """Equals torch.optim.Muon with adjust_lr_fn "match_rms_adamw" and its other defaults, but
    batches the matrices of one shape: in fewer and larger kernels."""

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(parameter.shape, []).append(parameter)
            for parameters in shapes.values():
                self.step_of_shape(parameters, group)

    def step_of_shape(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        rate = group["lr"]
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - MOMENTUM)
        updates = torch._foreach_lerp(gradients, buffers, MOMENTUM)
        update = orthogonalize(torch.stack(updates))
        scale = 0.2 * math.sqrt(max(parameters[0].shape))  # gives a root mean square of 0.2
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        torch._foreach_add_(parameters, list(update.float().unbind()), alpha=-rate * scale)


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """[count, rows, columns] in bfloat16: each matrix with singular values of about 1, by a
    Newton-Schulz iteration, x = a x + (b + c x x^T) x x^T x."""
    x = matrices.bfloat16()
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def optimizers_of(
    groups: dict[str, dict[str, Any]], name: str, rate: float
) -> list[torch.optim.Optimizer]:
    """Optimizers for the groups of parameter_groups(), AdamW first. name: adamw, or muon. With
    muon, Muon has the hidden matrices, with steps as long as AdamW's at this rate."""
    others = [group for kind, group in groups.items() if name == "adamw" or kind != "hidden"]
    is_cuda = others[0]["params"][0].device.type == "cuda"
    optimizers = [torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), fused=is_cuda)]
    if name == "muon":
        optimizers.append(Muon([groups["hidden"]], rate))
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
        """For rows that do not change, so that the norm of all gradients excludes them."""
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
    half a cosine that falls from 1 at step warm_up to a tenth at `steps`."""
    rise = min(1.0, (step - first + 1) / warm_up)
    done = min(1.0, max(0, step - warm_up) / max(1, steps - warm_up))
    return peak * rise * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)
