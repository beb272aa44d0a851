"""HybridPlan: arguments, caches, groups of parameters, and targets of a training step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from flash_dmattn import DynamicMaskAttention, HybridPlan
from torch import nn

HIDDEN, LENGTH = 32, 48
SIZES: dict[str, Any] = {"hidden": HIDDEN, "layers": 3, "heads": 4, "kv_heads": 2}
PLAN = HybridPlan(**SIZES, sliding=8, keys=12, recent=5, target_every=2)
SELECTING = 2  # the layer that selects


class Model(nn.Module):
    def __init__(self, plan: HybridPlan = PLAN) -> None:
        super().__init__()
        torch.manual_seed(3)
        made = (DynamicMaskAttention(**plan.arguments(number)) for number in range(plan.layers))
        self.layers = nn.ModuleList(made)
        self.norm = nn.RMSNorm(HIDDEN)

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            own = {**given, "layer": number} if "cache" in given else given
            x = x + layer(self.norm(x), **own)
        return x

    def input_of_last(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = x + layer(self.norm(x), **given)
        return self.norm(x)


def make_input(batch: int = 3, length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(batch, length, HIDDEN, generator=generator)


def gradients(model: nn.Module) -> Iterator[torch.Tensor | None]:
    return (parameter.grad for parameter in model.parameters())


@pytest.fixture(params=[False, True], ids=["eager", "compiled"])
def compiles(request: pytest.FixtureRequest) -> bool:
    torch.compiler.reset()
    return request.param


def run(model: nn.Module, compiles: bool) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model


# ---- what the layers are ----


def test_a_selecting_layer_has_no_positions() -> None:
    """Its queries keep the newest keys and some by score; they do not depend on where these are."""
    layer = Model().layers[SELECTING]
    x = make_input()
    moved = layer(x, positions=torch.arange(LENGTH)[None] * 7 + 3)
    assert torch.equal(moved, layer(x))
    assert (layer.window, layer.recent, layer.sliding_heads) == (7, 5, 0)


@pytest.mark.parametrize("number", [0, 1])
def test_the_other_layers_slide(number: int) -> None:
    """A key that is `sliding` positions back has no influence on a query, and a newer one has."""
    layer, x = Model().layers[number], make_input()
    out = layer(x)
    changed = x.clone()
    changed[:, 20] = 7.0
    differs = (layer(changed) != out).any(2).any(0)
    assert differs.nonzero()[:, 0].tolist() == [*range(20, 28)]


def test_layers_that_keep_all_keys() -> None:
    plan = HybridPlan(**SIZES, sliding=None, keys=12, selecting=[0])
    model = Model(plan)
    assert [layer.window for layer in model.layers] == [6, None, None]
    x = make_input()
    changed = x.clone()
    changed[:, 0] = 7.0
    assert (model.layers[1](changed) != model.layers[1](x)).any(2).all()


def test_caches() -> None:
    """Tokens one by one give what the whole sequence gives, from a cache of fixed size."""
    model, x = Model(), make_input()
    cache = PLAN.caches(model, batch=3)
    assert sorted(one.keys.key.shape[1] for one in cache.caches) == [8, 12]
    with torch.no_grad():
        wanted = model(x)
        pieces = (x[:, :30], *x[:, 30:].split(1, 1))
        found = torch.cat([model(piece, cache=cache) for piece in pieces], 1)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


def test_other_numbers_of_keys() -> None:
    model, x = Model(), make_input()
    layer = model.layers[SELECTING]
    few = layer(x)
    PLAN.set_keys(model, LENGTH)
    assert (layer.window, layer.recent) == (LENGTH - 5, 5)
    all_keys = DynamicMaskAttention(**{**PLAN.arguments(SELECTING), "window": LENGTH, "recent": 0})
    all_keys.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), all_keys(x))
    PLAN.set_keys(model)
    assert torch.equal(layer(x), few)


# ---- training ----


def test_scores_learn_from_targets_alone(compiles: bool) -> None:
    """The loss of the model gives weights of scores no gradient, and targets give no other one."""
    model = Model()
    call, x, dt_proj = run(model, compiles), make_input(), model.layers[SELECTING].dt_proj.weight
    with PLAN.targets(model, step=2) as targets:
        loss = call(x).square().mean()
    of_scores = targets.loss()
    loss.backward()
    before = [None if one is None else one.clone() for one in gradients(model)]
    assert dt_proj.grad is None
    frozen = {name for name, one in model.named_parameters() if not one.requires_grad}
    assert frozen == {
        *(f"layers.{number}.A" for number in range(3)),
        *(f"layers.{number}.dt_proj.weight" for number in range(2)),
    }
    of_scores.backward()
    assert dt_proj.grad is not None and dt_proj.grad.any()
    dt_proj.grad = None
    for one, old in zip(gradients(model), before):
        assert one is old is None or torch.equal(one, old)


@pytest.mark.parametrize("step", [0, 2, 4, 6])
def test_targets_are_of_one_sequence(step: int, compiles: bool) -> None:
    """They equal score_target_loss() of the layer, which projects the layer's input anew."""
    model, x = Model(), make_input()
    layer, turn = model.layers[SELECTING], step // 2 % 3
    with PLAN.targets(model, step) as targets:
        run(model, compiles)(x)
    found = targets.loss()
    wanted = layer.score_target_loss(model.input_of_last(x[turn : turn + 1]))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    (of_found,), (of_wanted,) = (
        torch.autograd.grad(x, layer.dt_proj.weight) for x in (found, wanted)
    )
    torch.testing.assert_close(of_found, of_wanted, rtol=1e-3, atol=1e-5)


def test_the_mean_over_layers() -> None:
    plan = HybridPlan(**SIZES, sliding=8, keys=12, selecting=(0, 2))
    model, x = Model(plan), make_input(batch=1)
    with plan.targets(model, 0) as targets:
        model(x)
    first = model.layers[0].score_target_loss(model.norm(x))
    second = model.layers[2].score_target_loss(model.input_of_last(x))
    torch.testing.assert_close(targets.loss(), (first + second) / 2, rtol=1e-4, atol=1e-5)


def test_padding_and_packing() -> None:
    model, x = Model(), make_input()
    valid = torch.arange(LENGTH) < torch.tensor([[LENGTH], [30], [4]])
    for step, row in ((0, 0), (2, 1), (4, 2)):
        with PLAN.targets(model, step) as targets:
            model(x, key_valid=valid)
        given = {"key_valid": valid[row : row + 1]}
        own = model.input_of_last(x[row : row + 1], **given)
        wanted = model.layers[SELECTING].score_target_loss(own, **given)
        torch.testing.assert_close(targets.loss(), wanted, rtol=1e-4, atol=1e-5)
        assert (wanted == 0) == (row == 2)  # too short
    starts = torch.tensor([0, 20, LENGTH], dtype=torch.int32)
    with PLAN.targets(model, 0) as targets:
        model(x[:1], starts=starts)
    own = model.input_of_last(x[:1], starts=starts)
    wanted = model.layers[SELECTING].score_target_loss(own, starts=starts)
    torch.testing.assert_close(targets.loss(), wanted, rtol=1e-4, atol=1e-5)


def test_autocast() -> None:
    """Attention gets bfloat16, and scores are trained in float32, outside of autocast."""
    model, x = Model(), make_input()
    with PLAN.targets(model, 0) as targets, torch.autocast("cpu", torch.bfloat16):
        model(x)
    assert {one.dtype for one in model.layers[SELECTING].states[:3]} == {torch.bfloat16}
    loss = targets.loss()
    loss.backward()
    with PLAN.targets(model, 0) as exact:
        model(x)
    assert loss.dtype == torch.float32
    assert model.layers[SELECTING].dt_proj.weight.grad.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.loss().item(), rel=0.02)


def test_steps_without_targets() -> None:
    model, x = Model(), make_input()
    plan = HybridPlan(**SIZES, sliding=8, keys=12, target_every=2, target_start=3)
    for step, is_due in ((0, False), (2, False), (3, False), (4, True), (5, False)):
        with plan.targets(model, step) as targets:
            model(x)
        loss = targets.loss()
        assert loss.requires_grad == is_due
        assert (model(x).sum() + loss).requires_grad
        assert all(layer.states is None and not layer.keeps_states for layer in model.layers)


def test_sequences_that_keep_all_keys_have_no_targets() -> None:
    model = Model()
    with PLAN.targets(model, 0) as targets:
        model(make_input(length=5))
    assert targets.loss() == 0


def test_a_training() -> None:
    """Every parameter that is trained is in one group. Scores change in steps with targets alone,
    and the loss of the scores falls."""
    model, x = Model(), make_input(batch=1)
    groups = PLAN.parameter_groups(model, 1e-3, weight_decay=0.1, score_rate=20.0)
    listed = [id(one) for group in groups for one in group["params"]]
    trained = [id(one) for one in model.parameters() if one.requires_grad]
    assert len({*listed}) == len(listed) and {*listed} == {*trained}
    matrices, vectors, scores = groups
    dt_proj = model.layers[SELECTING].dt_proj.weight
    assert scores["params"] == [dt_proj] or scores["params"][0] is dt_proj
    assert {one.dim() for one in matrices["params"]} == {2}
    assert {one.dim() for one in vectors["params"]} == {1}
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.0]
    assert [group["lr"] for group in groups] == pytest.approx([1e-3, 1e-3, 2e-2])
    optimizer, losses = torch.optim.AdamW(groups), []
    for step in range(20):
        before = dt_proj.detach().clone()
        with PLAN.targets(model, step) as targets:
            loss = (model(x) - x.flip(2)).square().mean()
        of_scores = targets.loss()
        (loss + of_scores).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(before, dt_proj) == (step % 2 == 1)
        if step % 2 == 0:
            losses.append(of_scores.item())
    assert losses[-1] < losses[0] - 0.05


def test_a_model_that_did_not_run() -> None:
    with PLAN.targets(Model(), 0) as targets:
        pass
    with pytest.raises(
        ValueError, match="targets: the model has not run, want a call of it within"
    ):
        targets.loss()


def test_a_failed_step_keeps_no_tensors() -> None:
    model, x = Model(), make_input()
    plan = HybridPlan(**SIZES, sliding=8, keys=12)
    with pytest.raises(ArithmeticError):
        with plan.targets(model, 0) as targets:
            model(x)
            raise ArithmeticError
    layers = [one for one in model.modules() if isinstance(one, DynamicMaskAttention)]
    assert all(layer.states is None and not layer.keeps_states for layer in layers)
    with pytest.raises(ValueError, match="targets: the model has not run"):
        targets.loss()


@pytest.mark.parametrize("method", ["caches", "parameter_groups", "targets", "set_keys"])
def test_other_models(method: str) -> None:
    given = {"caches": (1,), "parameter_groups": (1e-3,), "targets": (0,)}.get(method, ())
    with pytest.raises(
        ValueError, match="model: has 0 DynamicMaskAttention layers, want the plan's"
    ):
        getattr(PLAN, method)(nn.Linear(2, 2), *given)
