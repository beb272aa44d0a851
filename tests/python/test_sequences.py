"""Packed sequences and preallocated keys: selections and scores, the functions of flash-attn, a
layer, and what is not remembered from call to call. cases.py has them among features and forms."""

from __future__ import annotations

from typing import Any

import evaluate
import flash_dmattn
import pytest
import torch
import torch._dynamo
from cases import DEVICES, ints, kernels_of, make_form, on_device
from flash_dmattn import flash_dmattn_varlen_func

# Sequences of 1, 59, 0 and 40 positions. The last 3 positions belong to none.
STARTS, LENGTH = (0, 1, 60, 60, 100), 103
USED, KV_LEN = (0, 1, 13, 20, 57, 90), 90
WINDOW = {"keep_window_size": 9, "recent": 5, "sinks": 2, "bias_form": "linear"}


def spans() -> list[slice]:
    return [slice(*pair) for pair in zip(STARTS, STARTS[1:]) if pair[0] < pair[1]]


def make_rows() -> list[torch.Tensor]:
    """query, key and value of packed sequences."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(LENGTH, heads, 16, generator=generator) for heads in (4, 2, 2)]


def make_weights() -> dict[str, torch.Tensor]:
    form = make_form("packed, with rules")
    names = ("dt_proj", "a_coef", "dt_bias")
    weights = {name: form.leaves[name].detach().requires_grad_() for name in names}
    return {**weights, "sink_logit": torch.tensor([0.5, -2.0, 3.0, 0.0], requires_grad=True)}


def varlen(*rows: torch.Tensor, starts: Any = STARTS, **options: Any) -> Any:
    starts = ints(starts)
    return flash_dmattn_varlen_func(*rows, starts, starts.clone(), 59, 59, **options)


@pytest.mark.parametrize("scope", ["causal", "global"])
@pytest.mark.parametrize("kernel", kernels_of("select"))
def test_selection_of_packed_sequences_is_exact(kernel: str, scope: str) -> None:
    score = torch.randint(0, 9, (1, 2, LENGTH), generator=torch.Generator().manual_seed(2)).float()
    rules = {"recent": 4, "sinks": 1} if scope == "causal" else {"sinks": 1}
    found = flash_dmattn.select(score, 7, scope=scope, starts=ints(STARTS), backend=kernel, **rules)
    for span in spans():
        expiry, slot = evaluate.selection(score[..., span], 7, scope, None, **rules)
        assert torch.equal(found.expiry[..., span], expiry + span.start)
        assert torch.equal(found.slot[..., span], slot)
    rest = torch.arange(STARTS[-1], LENGTH, dtype=torch.int32)
    assert torch.equal(found.expiry[..., STARTS[-1] :], rest.expand(1, 2, -1))
    assert (found.slot[..., STARTS[-1] :] == -1).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scope", ["causal", "global"])
def test_selection_is_that_of_the_cut_scores(scope: str, device: str) -> None:
    generator = torch.Generator().manual_seed(2)
    score = torch.randint(0, 9, (len(USED), 2, KV_LEN), generator=generator).float().to(device)
    found = flash_dmattn.select(score, 7, scope=scope, sinks=1, kv_used=ints(USED).to(device))
    for b, used in enumerate(USED):
        alone = flash_dmattn.select(score[b : b + 1, :, :used], 7, scope=scope, sinks=1)
        assert torch.equal(found.expiry[b : b + 1, :, :used], alone.expiry)
        assert torch.equal(found.slot[b : b + 1, :, :used], alone.slot)
        rest = torch.arange(used, KV_LEN, dtype=torch.int32, device=device)
        assert torch.equal(found.expiry[b, :, used:], rest.expand(2, -1))
        assert (found.slot[b, :, used:] == -1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_scores_of_keys_that_do_not_exist(device: str) -> None:
    form = make_form("used", device=device)
    score, bias = form.score()
    beyond = torch.arange(60, device=device) >= form.options["kv_used"][:, None]
    assert (score.transpose(1, 2)[beyond] == -torch.inf).all()
    assert (bias.transpose(1, 2)[beyond] == 0).all()
    (gradient,) = torch.autograd.grad(bias.sum(), form.leaves["value"])
    assert (gradient[beyond] == 0).all() and (gradient[~beyond] != 0).any()


@pytest.mark.parametrize("name", ["packed", "used"])
@pytest.mark.parametrize("device", DEVICES)
def test_what_belongs_to_no_sequence_is_not_read(name: str, device: str) -> None:
    """By the fused form. Its gradients are 0."""
    form = make_form(name, device=device)
    wanted = form.attend()
    beyond = torch.zeros(form.leaves["key"].shape[:2], dtype=torch.bool, device=device)
    if name == "packed":
        beyond[:, form.options["starts"][-1] :] = True
    else:
        beyond = torch.arange(60, device=device) >= form.options["kv_used"][:, None]
    for one in ("key", "value"):
        form.leaves[one].data[beyond] = torch.nan
    found = form.attend()
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    gradients = torch.autograd.grad(found[0].sum(), form.learned)
    assert all(x.isfinite().all() for x in gradients)
    assert (gradients[1][beyond] == 0).all() and (gradients[2][beyond] == 0).all()


# ---- the functions of flash-attn ----


@pytest.mark.parametrize("causal", [True, False])
def test_varlen_without_a_window(causal: bool) -> None:
    """Without dt_proj and a_coef attention is dense, as PyTorch computes it for each sequence."""
    rows = make_rows()
    out, lse = varlen(*rows, causal=causal, return_lse=True)
    assert out.shape == (LENGTH, 4, 16) and lse.shape == (4, LENGTH)
    for span in spans():
        q, k, v = (one[span].transpose(0, 1) for one in rows)
        expected = evaluate.grouped_sdpa(q, k, v, is_causal=causal)
        torch.testing.assert_close(out[span].transpose(0, 1), expected, atol=2e-6, rtol=1e-5)


def test_varlen_with_a_window() -> None:
    """All weights reach the call and have gradients."""
    rows, weights = make_rows(), make_weights()
    options = {**weights, **WINDOW}
    out = flash_dmattn_varlen_func(
        *rows, ints(STARTS), ints(STARTS), 59, 59, 0.0, 0.5, True, **options
    )
    expected = flash_dmattn.flash_dma_attention(
        *(x[None] for x in rows), causal=True, softmax_scale=0.5, starts=ints(STARTS), **options
    )
    assert torch.equal(out, expected[0])
    assert all((x != 0).any() for x in torch.autograd.grad(out.cos().sum(), [*weights.values()]))


@pytest.mark.parametrize("options", [{}, WINDOW, {"dropout_p": 0.3}], ids=str)
def test_varlen_returns_probabilities_in_blocks(options: dict[str, Any]) -> None:
    """Each sequence has its own, 0 stands for other sequences, and P v equals out."""
    rows = make_rows()
    weights = make_weights() if "recent" in options else {}
    weights.pop("sink_logit", None)
    given = {"causal": True, "return_attn_probs": True, **weights, **options}
    out, lse, probability = varlen(*rows, **given, return_lse=True)
    values = rows[2].repeat_interleave(2, 1).transpose(0, 1)
    torch.testing.assert_close((probability @ values).transpose(0, 1), out, atol=5e-6, rtol=1e-5)
    inside = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for span in spans():
        inside[span, span] = True
        if "dropout_p" not in options:
            cut, length = (x[span] for x in rows), span.stop - span.start
            _, alone = varlen(*cut, starts=(0, length), **given)
            torch.testing.assert_close(probability[:, span, span], alone, rtol=1e-5, atol=1e-6)
    assert (probability[:, ~inside] == 0).all()
    if "dropout_p" in options:
        pairs = inside.tril().sum() * 4
        assert 0.2 < 1 - (probability > 0).sum() / pairs < 0.4


@pytest.mark.parametrize("window", [8, None])
def test_a_layer(window: int | None) -> None:
    """Rotary positions begin anew in each sequence."""
    torch.manual_seed(5)
    layer = flash_dmattn.DynamicMaskAttention(32, 4, 2, window, recent=3, sinks=1)
    torch.nn.init.normal_(layer.A) if window else None
    x = torch.randn(1, LENGTH, 32)
    out = layer(x, starts=ints(STARTS))
    for span in spans():
        torch.testing.assert_close(out[:, span], layer(x[:, span]), atol=2e-6, rtol=1e-5)


# ---- numbers that change from call to call ----


def test_starts_are_checked_in_every_call() -> None:
    """The layout of the call is remembered, the values of starts are not."""
    form, starts = make_form("packed"), ints((0, 10, 60))
    for last in (57, 60):
        starts[2] = last
        form.attend(starts=starts)
    starts[2] = 61
    with pytest.raises(ValueError, match=r"^starts: element 2 is 61, want 10 to 60$"):
        form.attend(starts=starts)


def test_kv_used_may_change_from_call_to_call() -> None:
    """A cache that fills up: the layout of the call is remembered, the values of kv_used are
    not."""
    query, key, value = (x[None] for x in make_rows())
    used = ints((0,))
    for length in (1, 40, LENGTH):
        used[0] = length
        found = flash_dmattn.attention(query[:, :1], key, value, kv_used=used, causal=True)
        alone = flash_dmattn.attention(
            query[:, :1], key[:, :length], value[:, :length], causal=True
        )
        assert torch.equal(found[0], alone[0]) and torch.equal(found[1], alone[1])
    used[0] = LENGTH + 1
    with pytest.raises(ValueError, match=rf"^kv_used: element 0 is {LENGTH + 1}, want 0 to"):
        flash_dmattn.attention(query, key, value, kv_used=used)


def test_one_compiled_call_for_other_numbers() -> None:
    for name, one, numbers in (
        ("used", "kv_used", (60, 40, 13, 1, 0)),
        ("packed", "starts", (0, 20, 20, 40, 60)),
    ):
        form = make_form(name)
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda given, form=form, one=one: form.attend_unseeded(form.leaves, **{one: given})[0],
            fullgraph=True,
            backend="aot_eager",
        )
        for given in (form.options[one], ints(numbers)):
            assert torch.equal(compiled(given), form.attend(**{one: given})[0])


@on_device
@torch.no_grad()
def test_one_graph_serves_a_cuda_cache_that_fills_up() -> None:
    """A step is captured once. It reads kv_used at each replay, even if the values are wrong."""
    form = make_form("used", device="cuda")
    used = form.options["kv_used"]
    leaves = {name: x.detach() for name, x in form.leaves.items()}
    options = {"causal": True, "return_lse": True, "kv_used": used}

    def attend() -> tuple[torch.Tensor, ...]:
        return flash_dmattn.flash_dma_attention(**leaves, keep_window_size=12, **options)

    with torch.cuda.stream(torch.cuda.Stream()):
        attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend()
    wrong = (-1, -(2**31), 61, 2**31 - 1, 60)
    for numbers in ((0, 1, 13, 40, 60), (60, 40, 13, 1, 0), 5 * (60,), wrong):
        used.copy_(ints(numbers))
        graph.replay()
        results = [x.clone() for x in found]
        used.clamp_(0, 60)
        for one, other in zip(results, attend()):
            assert torch.equal(one, other)
