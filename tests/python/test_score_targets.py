"""flash_dmattn.score_target_loss: scores learn which keys get attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from flash_dmattn import DynamicMaskAttention, score_target_loss, score_targets, select

LENGTH = 40


def states(
    q_heads: int, kv_heads: int, length: int = LENGTH, batch: int = 1
) -> tuple[torch.Tensor, ...]:
    """query, key and value."""
    generator = torch.Generator().manual_seed(q_heads)
    shapes = [(batch, length, heads, 8) for heads in (q_heads, kv_heads, kv_heads)]
    return tuple(3 * torch.randn(shape, generator=generator) for shape in shapes)


def weight(kv_heads: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return 0.1 * torch.randn(kv_heads, kv_heads * 8, generator=generator)


def loss_of_head(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dt_proj: torch.Tensor,
    head: int,
    recent: int,
    sinks: int = 0,
    scale: float = 1 / math.sqrt(8),
    cap: float = 0.0,
) -> float:
    """The loss of one sequence by the definition, in float64."""
    length, group = len(query), query.shape[1] // key.shape[1]
    own, predicted = slice(head * group, (head + 1) * group), slice(sinks, length - recent)
    logits = torch.einsum("ihd,jd->hij", query[:, own].double(), key[:, head].double()) * scale
    logits = cap * torch.tanh(logits / cap) if cap else logits
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    probabilities = logits.masked_fill(~seen, -math.inf).softmax(2) * seen.tril(-recent)
    target = probabilities.amax(1).square().sum(0)[predicted]
    dt = (value.flatten(1).double() @ dt_proj[head].double())[predicted]
    return ((target * (dt.logsumexp(0) - dt)).sum() / target.sum()).item()


@pytest.mark.parametrize("queries", [0, 7, 16, 1024])
@pytest.mark.parametrize("recent, sinks", [(0, 0), (5, 3), (39, 0), (0, 30)])
@pytest.mark.parametrize("q_heads, kv_heads", [(4, 2), (3, 3)])
def test_loss(
    q_heads: int,
    kv_heads: int,
    recent: int,
    sinks: int,
    queries: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(score_targets, "PROBABILITIES", queries * LENGTH * q_heads)
    query, key, value = states(q_heads, kv_heads, batch=2)
    dt_proj = weight(kv_heads)
    want = [
        [loss_of_head(*one, dt_proj, head, recent, sinks) for head in range(kv_heads)]
        for one in zip(query, key, value)
    ]
    rules = {"recent": recent, "sinks": sinks}
    got = score_target_loss(query, key, value, dt_proj, **rules)
    assert got.item() == pytest.approx(sum(map(sum, want)) / (2 * kv_heads), rel=1e-5)
    one = score_target_loss(query[1:], key[1:], value[1:], dt_proj, heads=[1], **rules)
    assert one.item() == pytest.approx(want[1][1], rel=1e-5)


@pytest.mark.parametrize(
    "rules, own", [({"softmax_scale": 0.1}, {"scale": 0.1}), ({"softcap": 2.0}, {"cap": 2.0})]
)
def test_logits_are_those_of_attention(rules: dict[str, float], own: dict[str, float]) -> None:
    query, key, value = states(2, 1)
    want = loss_of_head(query[0], key[0], value[0], weight(1), 0, 5, **own)
    got = score_target_loss(query, key, value, weight(1), recent=5, **rules)
    assert got.item() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_packed_sequences(as_tensor: bool) -> None:
    """The loss is the mean over the sequences except the empty one and the one that is too short.
    The last tokens belong to none."""
    tensors, starts = states(4, 2), [0, 12, 12, 20, 37]
    spans = [slice(0, 12), slice(20, 37)]
    want = [
        loss_of_head(*(one[0, span] for one in tensors), weight(2), head, 5, 3)
        for span in spans
        for head in (0, 1)
    ]
    rules = {"recent": 5, "sinks": 3}
    given = torch.tensor(starts, dtype=torch.int32) if as_tensor else starts
    got = score_target_loss(*tensors, weight(2), starts=given, **rules)
    assert got.item() == pytest.approx(sum(want) / 4, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_padding(dtype: torch.dtype) -> None:
    """Padding does not change the loss, wherever it is, even if it is NaN. A sequence with too few
    valid tokens has no part in the loss."""
    tensors = states(4, 2, batch=4)
    valid = torch.ones(4, LENGTH, dtype=torch.bool)
    valid[0, :9], valid[1, [3, 20, 21, 39]], valid[2, 8:] = False, False, False
    want = [
        loss_of_head(*(one[b, valid[b]] for one in tensors), weight(2), head, 5, 3)
        for b in (0, 1, 3)
        for head in (0, 1)
    ]
    padded = [one.masked_fill(~valid[..., None, None], math.nan) for one in tensors]
    got = score_target_loss(*padded, weight(2), recent=5, sinks=3, key_valid=valid.to(dtype))
    assert got.item() == pytest.approx(sum(want) / 6, rel=1e-5)


def test_packed_sequences_with_padding() -> None:
    tensors, valid = states(2, 1), torch.ones(1, LENGTH, dtype=torch.bool)
    valid[0, [0, 1, 19, 30]] = False
    spans = [torch.arange(2, 19), torch.tensor([*range(20, 30), *range(31, LENGTH)])]
    want = [loss_of_head(*(one[0, span] for one in tensors), weight(1), 0, 5) for span in spans]
    starts = torch.tensor([0, 20, LENGTH], dtype=torch.int32)
    got = score_target_loss(*tensors, weight(1), recent=5, starts=starts, key_valid=valid)
    assert got.item() == pytest.approx(sum(want) / 2, rel=1e-5)


def test_no_sequence_that_is_long_enough() -> None:
    dt_proj = weight(2).requires_grad_()
    loss = score_target_loss(*states(4, 2), dt_proj, recent=40, starts=[0, 20, LENGTH])
    loss.backward()
    assert loss.item() == 0 and loss.dtype == torch.float32 and (dt_proj.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    tensors = [one.to(dtype) for one in states(4, 2)]
    want = sum(loss_of_head(*(one[0] for one in tensors), weight(2), head, 5) for head in (0, 1))
    got = score_target_loss(*tensors, weight(2), recent=5)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert got.item() == pytest.approx(want / 2, rel=1e-9 if dtype == torch.float64 else 1e-5)


def test_only_dt_proj_of_these_heads_has_a_gradient() -> None:
    tensors = [one.requires_grad_() for one in states(4, 2)]
    dt_proj = weight(2).requires_grad_()
    score_target_loss(*tensors, dt_proj, recent=5, heads=[1]).backward()
    assert [one.grad for one in tensors] == [None] * 3
    assert (dt_proj.grad[0] == 0).all() and (dt_proj.grad[1] != 0).all()
    step = torch.zeros(2, 16)
    step[1, 3] = 1e-3
    change = [
        loss_of_head(*(one[0].detach() for one in tensors), dt_proj.detach() + sign * step, 1, 5)
        for sign in (1, -1)
    ]
    slope = (change[0] - change[1]) / 2e-3
    assert dt_proj.grad[1, 3].item() == pytest.approx(slope, rel=1e-3)


@pytest.mark.parametrize("rope_base", [None, 100.0])
def test_loss_of_a_layer(rope_base: float | None) -> None:
    """The loss of the tensors with which the layer attends; by default of the heads that learn."""
    torch.manual_seed(3)
    rules = {"recent": 4, "sinks": 2, "softcap": 3.0, "softmax_scale": 0.7, "qk_norm": True}
    layer = DynamicMaskAttention(32, 4, 2, 8, sliding_heads=1, rope_base=rope_base, **rules)
    x, seen = torch.randn(2, LENGTH, 32), []
    attend = layer.attend
    layer.attend = lambda *given: seen.append(given[:3]) or attend(*given)
    layer(x)
    rules.pop("qk_norm")
    want = score_target_loss(*seen[0], layer.dt_proj.weight, heads=[1], **rules)
    torch.testing.assert_close(layer.score_target_loss(x, [1]), want)
    with pytest.raises(ValueError, match="heads: has 0, want none of the sliding heads"):
        layer.score_target_loss(x, [0, 1])
    loss = layer.score_target_loss(x)
    torch.testing.assert_close(loss, layer.score_target_loss(x, [1]))
    loss.backward()
    graded = [name for name, one in layer.named_parameters() if one.grad is not None]
    assert graded == ["dt_proj.weight"]
    assert (layer.dt_proj.weight.grad[0] == 0).all() and (layer.dt_proj.weight.grad[1] != 0).all()


@pytest.mark.parametrize("given", ["starts", "list", "padding"])
def test_loss_of_a_layer_with_several_lengths(given: str) -> None:
    """The loss of packed or padded sequences is the mean of their single losses, with rotary
    embedding."""
    torch.manual_seed(3)
    layer = DynamicMaskAttention(32, 4, 2, 8, recent=4, rope_base=100.0)
    x = torch.randn(1, LENGTH, 32)
    alone = [layer.score_target_loss(one) for one in (x[:, :15], x[:, 15:])]
    if given != "padding":
        starts = [0, 15, LENGTH]
        starts = starts if given == "list" else torch.tensor(starts, dtype=torch.int32)
        got = layer.score_target_loss(x, starts=starts)
    else:
        rows = torch.full((2, 25, 32), 9.0)
        rows[0, 10:], rows[1] = x[0, :15], x[0, 15:]
        positions = torch.arange(25).repeat(2, 1)
        positions[0] -= 10
        valid = positions >= 0
        got = layer.score_target_loss(rows, key_valid=valid, positions=positions.clamp(min=0))
    torch.testing.assert_close(got, sum(alone) / 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_layer_in_which_all_heads_slide(dtype: torch.dtype) -> None:
    layer = DynamicMaskAttention(32, 4, 2, 8, sliding_heads=2, dtype=dtype)
    loss = layer.score_target_loss(torch.randn(1, LENGTH, 32, dtype=dtype))
    assert loss.item() == 0 and not loss.requires_grad
    assert not layer.dt_proj.weight.requires_grad and not layer.A.requires_grad
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("rules", [{"causal": False}, {"window": None}])
def test_layers_without_targets(rules: dict[str, Any]) -> None:
    layer = DynamicMaskAttention(**{"hidden": 32, "heads": 4, "kv_heads": 2, "window": 8, **rules})
    with pytest.raises(ValueError, match="want a causal layer with a window"):
        layer.score_target_loss(torch.randn(1, LENGTH, 32))


def test_under_autocast() -> None:
    """The loss is computed from bfloat16 states, but dt is not computed in bfloat16."""
    tensors = states(4, 2)
    narrow = [one.bfloat16() for one in tensors]
    want = score_target_loss(*narrow[:2], tensors[2], weight(2), recent=5)
    with torch.autocast("cpu", torch.bfloat16):
        got = score_target_loss(*tensors, weight(2), recent=5)
    torch.testing.assert_close(got, want)


def test_scores_learn_which_keys_later_queries_need() -> None:
    """16 of 256 keys are marked in one channel of their values, and the second half of the queries
    attends to them. The heads learn to keep them, though random scores do not."""
    query, key, value = (one / 3 for one in states(2, 1, 256))
    marked = torch.randperm(120, generator=torch.Generator().manual_seed(1))[:16]
    value[..., 0], key[..., 0], query[:, 128:, :, 0] = 0.0, 0.0, 8.0
    value[:, marked, 0, 0], key[:, marked, 0, 0] = 1.0, 8.0
    dt_proj = torch.nn.Parameter(weight(1) / 5)
    optimizer = torch.optim.Adam([dt_proj], lr=0.05)

    def kept() -> int:
        dt = value[0].flatten(1) @ dt_proj.detach().T
        score = 0.005 * torch.nn.functional.softplus(dt).T
        return int((select(score[None], 16, recent=4).expiry[0, 0, marked] >= 256).sum())

    assert kept() < 8
    for _ in range(100):
        optimizer.zero_grad()
        score_target_loss(query, key, value, dt_proj, recent=4).backward()
        optimizer.step()
    assert kept() == 16


def test_targets_of_keys_that_hardly_get_attention() -> None:
    """Probabilities whose squares are 0 in float32."""
    tensors = [20 * one for one in states(2, 1)]
    assert torch.isfinite(score_target_loss(*tensors, weight(1), recent=30))


@pytest.mark.parametrize(
    "changed, error, message",
    [
        ({"dt_proj": None}, TypeError, "dt_proj: is None, want a torch.Tensor"),
        ({"heads": [1.0]}, TypeError, "heads: is [1.0], a list, want a list of ints"),
        ({"heads": [1, 1]}, ValueError, "heads: is [1, 1], want each head once"),
        ({"query": 1}, TypeError, "query: is 1, an int, want a torch.Tensor"),
        ({"key": torch.ones(1)}, ValueError, "key: rank is 1, want 4; key is [batch, kv_len"),
        ({"query": torch.ones(1, 40, 3, 8)}, ValueError, "has 3 heads, want a multiple of key's"),
        ({"query": torch.ones(1, 41, 4, 8)}, ValueError, "key: axis 1 has 40 elements, want 41"),
        ({"value": torch.ones(1, 40, 1, 8)}, ValueError, "value: axis 2 has 1 element, key has 2"),
        ({"key": torch.ones(1, 40, 2, 16)}, ValueError, "key: axis 3 has 16 elements, query has 8"),
        ({"dt_proj": torch.ones(2, 8)}, ValueError, "has 8 elements, want kv_heads * head_dim, 16"),
        ({"recent": -1}, ValueError, "recent: is -1, want 0 or more"),
        ({"sinks": -1}, ValueError, "sinks: is -1, want 0 or more"),
        ({"recent": 30, "sinks": 10}, ValueError, "len: is 40, want more than recent + sinks, 40"),
        ({"heads": [2]}, ValueError, "heads: has 2, want 0 to 1"),
        ({"heads": []}, ValueError, "heads: is empty, want one or more"),
        ({"key_valid": [True] * 40}, TypeError, "key_valid: is a list, want a torch.Tensor"),
        (
            {"key_valid": torch.ones(1, 39, dtype=torch.bool)},
            *(ValueError, "key_valid: axis 1 has 39 elements, key has"),
        ),
        (
            {"key_valid": torch.ones(1, 40)},
            *(NotImplementedError, "key_valid: dtype is float32, supported: bool or uint8"),
        ),
        (
            {"starts": torch.tensor([0, 40])},
            *(NotImplementedError, "starts: dtype is int64, supported: int32"),
        ),
        (
            {"starts": torch.zeros(1, 2, dtype=torch.int32)},
            *(ValueError, "starts: rank is 2, want 1"),
        ),
        ({"starts": [0, 41]}, ValueError, "starts: ends with 41, want at most len, 40"),
        ({"starts": [1, 40]}, ValueError, "starts: is [1, 40], want 0 and then numbers that do"),
    ],
)
def test_bad_arguments(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    names = ("query", "key", "value")
    given = {**dict(zip(names, states(4, 2))), "dt_proj": weight(2), "recent": 5, **changed}
    with pytest.raises(error) as caught:
        score_target_loss(**given)
    assert message in str(caught.value)


def test_packed_sequences_of_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="query: batch is 2, want 1 with starts"):
        score_target_loss(*states(4, 2, batch=2), weight(2), recent=5, starts=[0, LENGTH])


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="query: batch is 0, want 1 or more"):
        score_target_loss(*(one[:0] for one in states(4, 2)), weight(2), recent=5)


def test_a_compiled_loss() -> None:
    """One graph has all of it."""
    rows, dt_proj = states(4, 2), weight(2).requires_grad_()
    layer = DynamicMaskAttention(32, 4, 2, 7, recent=3, rope_base=None)
    x = torch.randn(1, LENGTH, 32, generator=torch.Generator().manual_seed(1))
    for loss in (
        lambda: score_target_loss(*rows, dt_proj, recent=5),
        lambda: layer.score_target_loss(x),
    ):
        compiled = torch.compile(loss, fullgraph=True, backend="eager")
        assert torch.equal(compiled(), loss())
