"""flash_dma_attention() in every form of the table in cases.py: against evaluations in float64, as
three steps, in every way in which PyTorch calls it, and with arguments that change nothing."""

from __future__ import annotations

from typing import Any, Callable

import cases
import evaluate
import flash_dmattn
import pytest
import torch
import torch._dynamo
from cases import DEVICES, FORMS, Form, make_form
from evaluate import assert_same
from flash_dmattn import _call, ops
from routes import send_to_dispatcher
from torch.utils.checkpoint import checkpoint

every_form = pytest.mark.parametrize("name", FORMS)
on_every_device = pytest.mark.parametrize("device", DEVICES)
ROWS = ("query", "key", "value")


def make_targets(form: Form) -> cases.Tensors:
    """Gradients of out and of lse."""
    generator = torch.Generator().manual_seed(3)
    query = form.leaves["query"]
    dout = torch.randn(query.shape, generator=generator).to(query)
    dlse = torch.randn(query.transpose(1, 2).shape[:3], generator=generator)
    return dout, dlse.to(form.leaves["a_coef"])


@every_form
def test_against_float64(name: str) -> None:
    """Results, and the gradients of all tensors."""
    form = make_form(name)
    targets, (mask, options) = make_targets(form), form.evaluation()
    bias = None if form.options.get("bias_form") == "none" else form.score()[1]
    given = {"bias": bias, "sink_logit": form.leaves.get("sink_logit"), **options}
    given = {one: x.detach() if torch.is_tensor(x) else x for one, x in given.items()}
    rows = [form.leaves[one].detach() for one in ROWS]
    options["bias_form"] = form.options.get("bias_form", "exp")
    exact = evaluate.fused_gradients(form.leaves, mask, targets, torch.float64, **options)
    plain = evaluate.plain_fused_gradients(form.leaves, mask, targets, **options)
    learned = [at for at, x in enumerate(form.leaves.values()) if x.requires_grad]
    exact, *plain = (tuple(one[at] for at in learned) for one in (exact, *plain))
    for backend in ("cpu", "reference"):
        results = form.attend(backend=backend)
        evaluate.assert_attention(results, *rows, mask, **given)
        found = torch.autograd.grad(results, form.learned, targets)
        evaluate.assert_all_within(found, exact, plain)


@pytest.mark.parametrize("name", [one for one in FORMS if FORMS[one].get("a_coef") != 0])
def test_gradcheck(name: str) -> None:
    """Compare with finite differences in float64, which only the reference supports."""
    form = make_form(name, torch.float64)
    exists = torch.isfinite(form.attend()[1])

    def run(*learned: torch.Tensor) -> Any:
        given = iter(learned)
        leaves = {one: next(given) if x.requires_grad else x for one, x in form.leaves.items()}
        out, lse = form.attend(leaves)
        return out, lse[exists]

    assert torch.autograd.gradcheck(run, form.learned, fast_mode=True)


def chosen_forms() -> list[Any]:
    """Every form in float32 and in one of the other dtypes, on a device in both dtypes, with values
    of head_dim in turn."""
    found = []
    for n, name in enumerate(FORMS):
        others = cases.DTYPES[1:] if cases.FULL else [cases.DTYPES[1 + n % 3]]
        found += [pytest.param(name, "cpu", dtype, 16) for dtype in (torch.float32, *others)]
        for dtype, head_dims in zip(cases.NARROW, ((40, 64, 128, 256), (128, 40, 256, 64))):
            chosen = (name, "cuda", dtype, head_dims[n % 4])
            found.append(pytest.param(*chosen, marks=cases.on_device))
    return found


@pytest.mark.parametrize(("name", "device", "dtype", "head_dim"), chosen_forms())
def test_one_call_is_its_three_steps(
    name: str, device: str, dtype: torch.dtype, head_dim: int, deterministic: None
) -> None:
    """Results, on every device the same keys, and gradients."""
    form = make_form(name, dtype, device=device, head_dim=head_dim)
    (out, lse, *selection), _ = form.steps()
    found, targets = form.attend(), make_targets(form)
    assert_same(found, (out, lse))
    assert_same(form.attend(return_lse=False), out)
    score = form.score()[0].detach().cpu()
    on_cpu = {one: None if x is None else x.cpu() for one, x in form.sequences.items()}
    of_cpu = flash_dmattn.select(score, **form.selecting, **on_cpu)
    assert_same(tuple(x.cpu() for x in selection), of_cpu[:2])
    of_call = torch.autograd.grad(found, form.learned, targets)
    of_steps = torch.autograd.grad((out, lse), form.learned, targets)
    for leaf, one, other in zip(form.learned, of_call, of_steps):
        if leaf is form.leaves["value"]:
            # The gradient is one sum, or two that are rounded and added at the end.
            rounding = 2 * torch.finfo(other.dtype).eps * other.abs().max().item()
            torch.testing.assert_close(one, other, rtol=0, atol=rounding)
        elif one.shape[-1] % 8 == 0 or one.dim() == 1:
            assert torch.equal(one, other)
        else:  # the products of the score are of padded channels in a step, and not in one call
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


@every_form
@on_every_device
def test_probabilities(name: str, device: str) -> None:
    """P v equals out, and P is what attention_probabilities() finds. Results with gradients keep
    them."""
    form = make_form(name, device=device)
    expected = form.attend()
    *both, probability = form.attend(return_attn_probs=True)
    assert_same(tuple(both), expected)
    out, again = form.attend(return_attn_probs=True, return_lse=False)
    assert_same((out, again), (both[0], probability))
    assert out.requires_grad and not probability.requires_grad
    value = evaluate.spread_heads(form.leaves["value"].detach().float().transpose(1, 2), 4)
    scale = 1 / (1 - form.options.get("dropout_p", 0.0))
    step = max(torch.finfo(out.dtype).eps, 60 * torch.finfo(torch.float32).eps)
    error = ((probability @ value).transpose(1, 2) - out.float()).abs().max()
    assert error <= scale * step * value.abs().max()
    assert_same(probability, form.steps()[1])
    if not {"dropout_p", "sink_logit"} & {*form.options, *form.leaves}:
        attends = ~expected[1].isinf()
        sums = probability.sum(-1)
        torch.testing.assert_close(sums, attends.to(sums.dtype))
    found, wanted = (torch.autograd.grad(x.sum(), form.learned[:3]) for x in (out, expected[0]))
    assert_same(found, wanted)


# ---- ways to call it ----


def differentiate(form: Form, attend: Callable[..., Any]) -> cases.Tensors:
    """Results, and gradients, which depend on both."""
    names = list(form.leaves)
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in form.leaves.values()]
    torch.manual_seed(cases.SEED)
    out, lse = attend(lambda *given: form.attend_unseeded(dict(zip(names, given))), leaves)
    loss = out.float().cos().sum() + torch.where(lse.isinf(), 0, lse).sin().sum()
    loss.backward()  # torch.autograd.grad() does not take reentrant checkpoints
    return (out.detach(), lse.detach(), *(x.grad for x in leaves if x.requires_grad))


def directly(function: Callable[..., Any], leaves: list[torch.Tensor]) -> Any:
    return function(*leaves)


def by_dispatcher(function: Callable[..., Any], leaves: list[torch.Tensor]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        send_to_dispatcher(patch)
        return function(*leaves)


def checkpointed(function: Callable[..., Any], leaves: list[torch.Tensor]) -> Any:
    return checkpoint(function, *leaves, use_reentrant=False)


def checkpointed_again(function: Callable[..., Any], leaves: list[torch.Tensor]) -> Any:
    return checkpoint(function, *leaves, use_reentrant=True)


def compiled(function: Callable[..., Any], leaves: list[torch.Tensor]) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves)


WAYS = (directly, by_dispatcher, checkpointed, checkpointed_again)


@every_form
@on_every_device
def test_every_way_gives_the_same(name: str, device: str, deterministic: None) -> None:
    """The first call, calls that are remembered, and calls by the dispatcher alone."""
    form = make_form(name, device=device)
    _call.memory.direct.clear()
    expected = differentiate(form, by_dispatcher)
    for way in (directly, *WAYS):
        assert_same(differentiate(form, way), expected)


@pytest.mark.parametrize("name", FORMS if cases.FULL else [*FORMS][::4])
@on_every_device
def test_compiled(name: str, device: str, deterministic: None) -> None:
    form = make_form(name, device=device)
    assert_same(differentiate(form, compiled), differentiate(form, directly))


@on_every_device
@pytest.mark.parametrize("only", range(7))
def test_one_gradient_alone(only: int, device: str, deterministic: None) -> None:
    """Gradients that are not wanted are not computed, and do not change the others."""
    form = make_form("packed, with rules", device=device)
    form.leaves.update(sink_logit=form.leaves["a_coef"].new_zeros(4).requires_grad_())
    every = differentiate(form, directly)[2:]
    for at, (name, x) in enumerate(form.leaves.items()):
        form.leaves[name] = x.detach().requires_grad_(at == only)
    for way in (directly, by_dispatcher, directly):
        assert torch.equal(differentiate(form, way)[2], every[only])


# ---- arguments that change nothing ----

NEUTRAL: dict[str, Callable[[int], Any]] = {
    "dt_bias": lambda _: torch.zeros(2),
    "sink_logit": lambda _: torch.full((4,), -torch.inf),
    "key_valid": lambda length: torch.ones(2, length).bool(),
    "kv_used": lambda length: cases.ints((length, length)),
    "softcap": lambda _: 0.0,
    "dropout_p": lambda _: 0.0,
    "gap": lambda _: 1e30,
    "scope": lambda _: "causal",
    "bias_form": lambda _: "exp",
    "recent": lambda _: 0,
    "sinks": lambda _: 0,
}


@on_every_device
@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_arguments(name: str, device: str, deterministic: None) -> None:
    """Every bit of the results and of the gradients is the same. Dropout draws no numbers."""
    form, neutral = make_form("all queries", device=device), NEUTRAL[name](60)
    neutral = neutral.to(device) if torch.is_tensor(neutral) else neutral
    found, wanted = (form.attend(**more) for more in ({name: neutral}, {}))
    after = torch.rand(3, device=device)
    torch.manual_seed(cases.SEED)
    assert torch.equal(torch.rand(3, device=device), after)
    assert_same(found, wanted)
    targets = make_targets(form)
    gradients = (torch.autograd.grad(x, form.learned, targets) for x in (found, wanted))
    assert_same(*gradients)
    other = {"dt_bias": [1.5, -2.0], "sink_logit": [0.5, -2.0, 3.0, 0.0], "softcap": 1.0}.get(name)
    if other is not None:
        other = torch.tensor(other, device=device) if isinstance(other, list) else other
        assert not torch.equal(form.attend(**{name: other})[0], wanted[0])


def test_minus_infinity_has_no_gradient() -> None:
    form = make_form("usual")
    sinks = torch.full((4,), -torch.inf, requires_grad=True)
    (gradient,) = torch.autograd.grad(form.attend(sink_logit=sinks)[0].sum(), sinks)
    assert (gradient == 0).all()


def test_the_defaults() -> None:
    form = make_form("usual")
    tensors = [x.detach() for x in cases.make_fused(1100, head_dim=8)]
    assert len(form.leaves) == len(tensors)
    out = flash_dmattn.flash_dma_attention(*tensors)
    said = {"causal": False, "scope": "global", "bias_form": "exp", "softcap": 0.0}
    said.update(recent=0, sinks=0)
    assert torch.equal(out, flash_dmattn.flash_dma_attention(*tensors, 1024, **said))
    assert not torch.equal(out, flash_dmattn.flash_dma_attention(*tensors, 1023, **said))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_window_of_all_keys_takes_recent_and_sinks(backend: str) -> None:
    """Such a window keeps every key already."""
    form, every = make_form("usual"), (1 << 63) - 1
    expected = form.attend(keep_window_size=60, backend=backend)[0]
    for window in (1, 60, every):
        for recent in (60, every):
            rules = {"keep_window_size": window, "recent": recent, "sinks": 1}
            assert torch.equal(form.attend(**rules, backend=backend)[0], expected)
    options = {"causal": False, "backend": backend}
    sinks = form.attend(keep_window_size=every, sinks=every, **options)
    assert_same(sinks, form.attend(keep_window_size=60, **options))


def test_everything_that_the_operator_returns() -> None:
    form = make_form("numbers")
    rules = {**form.selecting, "recent": 9, "sinks": 2}
    score, bias = form.score()
    selection = flash_dmattn.select(score, **rules)
    numbers = form.numbers
    options = (15, 9, 2, "causal", "linear", True, numbers["softmax_scale"], numbers["softcap"])
    found = ops.FUSED.op(*form.leaves.values(), *6 * [None], *options, 0.0, 0.0, False, None)
    out = form.attend(recent=9, sinks=2)
    assert_same(found, (*out, score, bias, *selection[:2]))


# ---- autocast ----


@pytest.mark.parametrize("function", [cases.fused, lambda *tensors: cases.stepwise(*tensors)[0]])
@pytest.mark.parametrize("dtype", cases.NARROW)
@pytest.mark.parametrize("way", [directly, compiled])
@on_every_device
def test_autocast(
    device: str,
    way: Callable[..., Any],
    dtype: torch.dtype,
    function: Callable[..., Any],
    deterministic: None,
) -> None:
    """Query, key and value are cast, weights are not. Gradients have the dtypes of the tensors."""
    tensors = [x.detach().float().requires_grad_() for x in cases.make_fused(60, device=device)]
    with torch.autocast(device, dtype):
        out = way(function, tensors)
        sdpa = evaluate.grouped_sdpa(*(x.transpose(1, 2) for x in tensors[:3]))
        assert out.dtype == sdpa.dtype == dtype
    found = torch.autograd.grad(out.float().cos().sum(), tensors)
    cast = function(*(x.to(dtype) for x in tensors[:3]), *tensors[3:])
    assert torch.equal(out, cast)
    expected = torch.autograd.grad(cast.float().cos().sum(), tensors)
    assert all(one.dtype == torch.float32 for one in found)
    assert_same(found[:2] + found[3:], expected[:2] + expected[3:])
    # dvalue is a sum of two gradients, and one of them may be in `dtype`.
    torch.testing.assert_close(found[2], expected[2], rtol=torch.finfo(dtype).eps, atol=1e-2)


def test_autocast_of_weights() -> None:
    """A narrow weight is cast, a float32 one is not; gradients have the tensors' dtypes."""
    form = make_form("dt_bias")
    with torch.autocast("cpu", torch.bfloat16):
        kept = form.attend()
        cast = form.attend({**form.leaves, "dt_bias": form.leaves["dt_bias"].half()})
    assert kept[0].dtype == torch.bfloat16
    assert_same(cast, kept)
    tensors = [x.detach().bfloat16().requires_grad_() for x in cases.make_fused(20)]
    with torch.autocast("cpu", torch.float16):
        out = cases.fused(*tensors)
    assert out.dtype == torch.float16
    for x, gradient in zip(tensors, torch.autograd.grad(out.float().sum(), tensors)):
        assert gradient.dtype == x.dtype


def test_autocast_leaves_float64_alone() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert cases.fused(*cases.make_fused(8, dtype=torch.float64)).dtype == torch.float64
