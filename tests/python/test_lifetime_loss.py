"""flash_dmattn.lifetime_loss: by its definition, with its gradient, and what it teaches."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from cases import on_device
from flash_dmattn import DynamicMaskAttention, lifetime_loss, lifetimes
from flash_dmattn.lifetimes import sample_places, sharpness_at
from torch.testing import assert_close

LENGTH, HEADS, KV_HEADS, DIM, WORDS, KEYS = 30, 4, 2, 8, 11, 9


def states(device: str = "cpu", dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """query, key, value, logarithms of lifetimes, and the weight of what follows."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(1, LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    shapes += [(1, KV_HEADS, LENGTH), (HEADS * DIM, WORDS)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    made[3] = made[3] + 2.5
    return tuple(one.to(device, dtype) for one in made)


def every_place(missed: torch.Tensor, valid: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    """In place of a sample, each place once."""
    places = valid.nonzero()[:, 0]
    return places, torch.full_like(missed[places], 1 / len(places))


def loss_by_definition(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_lifetime: torch.Tensor,
    head: torch.Tensor,
    progress: float,
    capacity_weight: float = 1.0,
    scale: float = 1 / math.sqrt(DIM),
    cap: float = 0.0,
    sink: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
) -> float:
    """Of one sequence, [len, ...], in loops. Lifetimes [heads, len] are of the last heads."""
    n, length, group = 2 * 16**progress, len(query), HEADS // KV_HEADS
    total = 0.0
    for i in range(length):
        outs: dict[str, list[torch.Tensor]] = {"fading": [], "whole": []}
        excess = 0.0
        for h in range(HEADS):
            g = h // group
            own = g - KV_HEADS + len(log_lifetime)
            logits = key[: i + 1, g] @ query[i, h] * scale
            logits = cap * torch.tanh(logits / cap) if cap else logits
            ages = i - torch.arange(i + 1)
            if own >= 0:
                ratio = ages.clamp(min=1) / log_lifetime[own, : i + 1].exp()
                factor = 1 / (1 + ratio**n)
                excess += max(0.0, factor.sum().item() - KEYS) / (i + 1) / group
            else:
                factor = (ages < KEYS).double()
            rest = 0.0 if sink is None else sink[h].exp()
            for name, part in (("fading", factor), ("whole", torch.ones(i + 1))):
                weights = (logits * part).exp() * part
                outs[name].append(weights @ value[: i + 1, g] / (weights.sum() + rest))
        found, wanted = (torch.cat(one) @ head for one in (outs["fading"], outs["whole"]))
        wanted, found = wanted.log_softmax(0), found.log_softmax(0)
        divergence = (wanted.exp() * (wanted - found)).sum().item()
        divergence *= 1.0 if weight is None else weight[i].item()
        total += divergence + capacity_weight * excess / len(log_lifetime)
    return total / length


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetimes, "sample_places", every_place)


@pytest.mark.parametrize("queries", [1, 7, 1000])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("progress", [0.0, 0.4, 1.0])
def test_loss(
    progress: float, heads: int, queries: int, whole: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of any number of queries. A head without lifetimes keeps the newest keys."""
    monkeypatch.setattr(lifetimes, "PAIRS", queries * LENGTH * HEADS)
    monkeypatch.setattr(lifetimes, "PLACES", queries)
    *rows, log_lifetime, head = states()
    log_lifetime = log_lifetime[:, -heads:]
    given = {"keys": KEYS, "progress": progress}
    found = lifetime_loss(*rows, log_lifetime, lambda out, _: out.flatten(2) @ head, **given)
    want = loss_by_definition(*(one[0] for one in rows), log_lifetime[0], head, progress)
    assert found.item() == pytest.approx(want, rel=1e-9)


def test_options(whole: None) -> None:
    *rows, log_lifetime, head = states()
    sink, weight = torch.linspace(-1, 1, HEADS).double(), torch.linspace(0, 2, LENGTH)[None]
    given = {"softmax_scale": 0.2, "softcap": 1.5, "sink_logit": sink, "weight": weight.double()}
    given = {**given, "capacity_weight": 0.3, "keys": KEYS, "progress": 0.2}
    found = lifetime_loss(*rows, log_lifetime, lambda out, _: out.flatten(2) @ head, **given)
    want = loss_by_definition(
        *(one[0] for one in rows), log_lifetime[0], head, 0.2, 0.3, 0.2, 1.5, sink, weight[0]
    )
    assert found.item() == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("packed", [False, True])
def test_padding_and_packed_sequences(packed: bool, whole: None) -> None:
    """Padding has no influence, even if it is NaN. Each place counts in the mean once."""
    *rows, log_lifetime, head = states()
    valid = torch.ones(1, LENGTH, dtype=torch.bool)
    if packed:
        starts: Any = [0, 12, 12, 25]
        spans, valid[:, 25:] = [slice(0, 12), slice(12, 25)], False
        given = {"starts": starts}
    else:
        spans, valid[:, :8] = [slice(8, LENGTH)], False
        given = {"key_valid": valid}
    filled = [one.masked_fill(~valid[..., None, None], torch.nan) for one in rows]
    log_lifetime = log_lifetime.masked_fill(~valid, torch.nan).requires_grad_()
    sizes = {"keys": KEYS, "progress": 0.5}

    def predict(out: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return torch.where(valid[:, places, None], out.flatten(2), 0) @ head

    found = lifetime_loss(*filled, log_lifetime, predict, **sizes, **given)
    losses = [
        loss_by_definition(
            *(one[0, span] for one in rows), log_lifetime[0, :, span].detach(), head, 0.5
        )
        * (span.stop - span.start)
        for span in spans
    ]
    assert found.item() == pytest.approx(sum(losses) / int(valid.sum()), rel=1e-9)
    (gradient,) = torch.autograd.grad(found, log_lifetime)
    assert torch.equal((gradient != 0).any(1) & ~valid, torch.zeros_like(valid))
    assert gradient.isfinite().all() and (gradient != 0).any()


def make_layer(dtype: torch.dtype = torch.float64, **options: Any) -> DynamicMaskAttention:
    torch.manual_seed(2)
    given = {"window": 6, "recent": 3, "lifetime_units": 5, "initial_lifetime": 8.0, **options}
    return DynamicMaskAttention(16, HEADS, KV_HEADS, dtype=dtype, **given)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_heads": 1, "nope_heads": 1},
        {"softcap": 2.0, "sink_logit": True, "qk_norm": True},
    ],
    ids=str,
)
def test_gradient(options: dict[str, Any]) -> None:
    """Against differences of the loss, for every parameter of the gate, of a sampled loss."""
    layer = make_layer(**options)
    assert layer.lifetime_gate is not None
    with torch.no_grad():
        for one in layer.lifetime_gate.parameters():
            one.add_(torch.randn_like(one) / 4)
    x = torch.randn(1, LENGTH, 16, dtype=torch.float64)
    head = torch.nn.Linear(16, WORDS, dtype=torch.float64)
    names = [name for name, _ in layer.lifetime_gate.named_parameters()]

    def loss(*parameters: torch.Tensor) -> torch.Tensor:
        changed = copy.deepcopy(layer)
        for name, one in zip(names, parameters):
            owner, _, kind = name.partition(".")
            module = getattr(changed.lifetime_gate, owner)
            del module._parameters[kind]
            setattr(module, kind, one)
        generator = torch.Generator().manual_seed(1)
        given = {"keys": 7, "progress": 0.3, "queries": 12, "generator": generator}
        return changed.lifetime_loss(x, lambda out, places: head(x[:, places] + out), **given)

    parameters = [one.detach().requires_grad_() for one in layer.lifetime_gate.parameters()]
    assert torch.autograd.gradcheck(loss, parameters, eps=1e-6, atol=1e-7, rtol=1e-4)


def test_no_other_parameter_has_a_gradient() -> None:
    layer, head = make_layer(torch.float32), torch.nn.Linear(16, WORDS)
    x = torch.randn(1, LENGTH, 16, requires_grad=True)
    loss = layer.lifetime_loss(x, lambda out, _: head(out), keys=7, progress=0.0)
    loss.backward()
    for name, one in layer.named_parameters():
        assert (one.grad is not None) == name.startswith("lifetime_gate."), name
    assert x.grad is head.weight.grad is None
    with torch.no_grad():
        assert not layer.lifetime_loss(
            x, lambda out, _: head(out), keys=7, progress=0.0
        ).requires_grad


# ---- the sample ----


def test_a_sample_estimates_the_mean() -> None:
    """Half of it is drawn in proportion to what is missed; invalid places are not drawn."""
    missed = torch.tensor([0.0, 3.0, 1.0, -1.0, 0.0, torch.nan], dtype=torch.float64)
    valid = torch.tensor([True, True, True, True, True, False])
    values = torch.tensor([1.0, 5.0, -2.0, 0.5, 3.0, torch.nan], dtype=torch.float64)
    count = 200_000
    places, shares = sample_places(missed, valid, count, torch.Generator().manual_seed(0))
    assert torch.equal(places, places.sort().values) and shares.sum().item() == pytest.approx(1)
    assert (shares * values[places]).sum().item() == pytest.approx(
        values[:5].mean().item(), abs=0.02
    )
    drawn = torch.bincount(places, minlength=6).double() / count
    assert_close(drawn, torch.tensor([0.1, 0.475, 0.225, 0.1, 0.1, 0]).double(), atol=5e-3, rtol=0)


def test_sharpness_grows_by_one_factor() -> None:
    numbers = [sharpness_at(n / 4) for n in range(5)]
    assert numbers == pytest.approx([2, 4, 8, 16, 32])


# ---- what a gate learns ----


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_device)])
def test_a_gate_learns_which_keys_last(device: str) -> None:
    """Every later prediction copies what the marked token says, and other tokens say nothing. The
    gate learns to keep the marked one beyond the rows of the cache, and then selection recalls."""
    torch.manual_seed(1)
    length, keys, hidden, dtype = 64, 12, 32, torch.float32
    layer = DynamicMaskAttention(
        *(hidden, 2, 1, keys - 4),
        **{"recent": 4, "nope_heads": 1, "lifetime_units": 8, "initial_lifetime": 20.0},
    )
    with torch.no_grad():  # the marked key, channel 0, gets all attention; its value is its word
        for linear in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
            linear.weight.zero_()
        layer.q_proj.weight[[0, 16], 1] = 8.0
        layer.k_proj.weight[0, 0] = 8.0
        layer.v_proj.weight[:6, 2:8] = torch.eye(6)
        layer.o_proj.weight[:6, :6] = 6 * torch.eye(6)
    layer = layer.to(device, dtype)

    def make(number: int) -> tuple[torch.Tensor, int, int]:
        """Hidden states, and the place and the word of the marked token."""
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(1, length, hidden, generator=generator) / 4
        x[..., 0], x[..., 1], x[..., 2:8] = 0, 1, 0
        place, word = torch.randint(6, (2,), generator=generator).tolist()
        x[0, place, 0] = 1
        x[0, place, 2 + word] = 1
        return x.to(device, dtype), place, word

    def predict(out: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return out[..., :6]

    def recall() -> float:
        found = [
            (layer(x)[0, -1, :6].argmax().item(), word) for x, _, word in map(make, range(90, 110))
        ]
        return sum(one == word for one, word in found) / len(found)

    def attend() -> Any:
        if device == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return torch.autocast("cpu", enabled=False)

    with torch.no_grad(), attend():
        before = recall()
    assert layer.lifetime_gate is not None
    optimizer = torch.optim.AdamW(layer.lifetime_gate.parameters(), 0.05, weight_decay=0.0)
    steps = 120
    for step in range(steps):
        x, *_ = make(step)
        given = {"keys": keys, "progress": step / (steps - 1), "queries": 40}
        with attend():
            loss = layer.lifetime_loss(x, predict, **given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    layer.calibrate_lifetimes(torch.cat([make(n)[0] for n in range(80, 84)]))
    with torch.no_grad(), attend():
        x, place, _ = make(89)
        lifetime = layer.lifetime_gate(x)[0, 0].exp()
        assert lifetime[place] > length > 4 * lifetime.median()
        assert before < 0.5 and recall() == 1.0


def test_a_compiled_loss_breaks_at_numbers_alone() -> None:
    """The arguments are traced. The first break is where the host reads which tokens are valid."""
    *rows, following = states()

    def predict(out: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return out.flatten(2) @ following

    def loss() -> torch.Tensor:
        return lifetime_loss(*rows, predict, keys=KEYS, progress=0.5)

    with pytest.raises(Exception, match="data-dependent") as raised:
        torch.compile(loss, fullgraph=True, backend="eager")()
    assert "cell variable" not in str(raised.value)
