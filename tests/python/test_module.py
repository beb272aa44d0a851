"""DynamicMaskAttention against its formula in PyTorch, and in the ways that models use it."""

from __future__ import annotations

import copy
from typing import Any

import context_ranks
import evaluate
import flash_dmattn
import pytest
import torch
import torch.distributed.fsdp
from cases import DEVICES
from flash_dmattn.rotary import rotate_heads
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel

HIDDEN, HEADS, KV_HEADS, WINDOW, LENGTH = 48, 6, 2, 7, 40


def make_layer(window: int | None = WINDOW, learned: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    layer = flash_dmattn.DynamicMaskAttention(HIDDEN, HEADS, KV_HEADS, window, **options)
    if learned and window is not None:
        torch.nn.init.normal_(layer.A)
    return layer


def make_states() -> torch.Tensor:
    return torch.randn(2, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(LENGTH))


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding by complex numbers with the parts d and d + half."""
    half = x.shape[-1] // 2
    powers = -torch.arange(half, dtype=x.dtype) / half
    angles = positions[..., None] * torch.tensor(10000.0, dtype=x.dtype) ** powers
    factor = torch.polar(torch.ones_like(angles), angles)[:, :, None, :]
    product = torch.complex(x[..., :half], x[..., half:]) * factor
    return torch.cat((product.real, product.imag), -1)


def by_formula(layer: Any, x: torch.Tensor, key_valid: torch.Tensor | None = None) -> torch.Tensor:
    """The layer as its docstring defines it."""
    positions = torch.arange(x.shape[1])[None]
    query, key, value = (
        projection(x).unflatten(2, (-1, layer.head_dim))
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    if "q_norm.weight" in layer.state_dict():
        query, key = (
            one / (one.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
            for one, weight in ((query, layer.q_norm.weight), (key, layer.k_norm.weight))
        )
    dim, count = layer.nope_rotary_dim, layer.kv_heads - layer.nope_heads
    turned = []
    for one in (query, key):
        whole, nope = one.tensor_split([count * one.shape[2] // layer.kv_heads], 2)
        if dim > 0:
            nope = torch.cat((rotated(nope[..., :dim], positions), nope[..., dim:]), 3)
        turned.append(torch.cat((rotated(whole, positions), nope), 2))
    query, key = turned
    scope = "causal" if layer.causal else "global"
    bias = kept = None
    if layer.window is not None:
        sliding = torch.arange(layer.kv_heads) < layer.sliding_heads
        a_coef = torch.where(sliding, 0.0, layer.A)
        z = a_coef * softplus(layer.dt_proj(value.flatten(2)))
        bias = z.exp().transpose(1, 2)
        score = z.detach().transpose(1, 2)
        rules = {"recent": layer.recent, "sinks": layer.sinks, "gap": layer.gap}
        kept = evaluate.kept_keys(score, layer.window, scope, key_valid, **rules)
    mask = evaluate.visible_keys(x.shape[1], x.shape[1], layer.causal, kept, key_valid)
    out, _ = evaluate.attention(query, key, value, mask, x.dtype, bias=bias, softcap=layer.softcap)
    return layer.o_proj(out.flatten(2))


def gradients_by_formula(
    layer: Any,
    x: torch.Tensor,
    key_valid: torch.Tensor | None,
    dout: torch.Tensor,
    order: torch.Tensor,
) -> list[torch.Tensor]:
    """The output, and the gradients of the input and of every parameter that learns, with the
    channels of the input in another order."""
    layer, back = copy.deepcopy(layer), order.argsort()
    x = x.detach()[..., order].requires_grad_()
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
        projection.weight = torch.nn.Parameter(projection.weight.detach()[:, order])
    out = by_formula(layer, x, key_valid)
    learned = [pair for pair in layer.named_parameters() if pair[1].requires_grad]
    names, tensors = zip(("x", x), *learned)
    found = [out.detach()]
    for name, one in zip(names, torch.autograd.grad(out, tensors, dout.to(out.dtype))):
        has_order = name in ("x", "q_proj.weight", "k_proj.weight", "v_proj.weight")
        found.append(one[..., back] if has_order else one)
    return found


LAYERS: dict[str, dict[str, Any]] = {
    "default": {},
    "scores alone": {"recent": 0},
    "as training starts": {"learned": False},
    "global": {"causal": False},
    "dense": {"window": None},
    "softcap and biases": {"softcap": 1.5, "bias": True},
    "dt_bias": {"dt_bias": True},
    "head_dim": {"head_dim": 16},
    "qk_norm": {"qk_norm": True, "head_dim": 16},
    "recent and sinks": {"recent": 5, "sinks": 2},
    "recent, as training starts": {"recent": 5, "learned": False},
    "sinks, global": {"sinks": 2, "causal": False},
    "gap": {"gap": 0.3},
    "recent, sinks and gap": {"recent": 5, "sinks": 2, "gap": 0.1},
    "a sliding head": {"recent": 5, "sliding_heads": 1},
    "sliding heads alone": {"recent": 0, "sinks": 1, "sliding_heads": KV_HEADS},
    "a NoPE head": {"recent": 5, "nope_heads": 1},
    "NoPE heads alone, normalized": {"nope_heads": KV_HEADS, "head_dim": 16, "qk_norm": True},
    "NoPE heads, partly": {"nope_heads": 1, "nope_rotary_dim": 4, "sliding_heads": 1},
    "dense, a NoPE head, global": {"nope_heads": 1, "window": None, "causal": False},
    "dense, recent and sinks": {"window": None, "recent": 5, "sinks": 2},
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_the_formula(name: str, padded: bool) -> None:
    """Outputs, and the gradients of the input and of every parameter that learns."""
    layer, x = make_layer(**LAYERS[name]), make_states().requires_grad_()
    # Key 0 is valid, so that no row is empty.
    key_valid = (torch.arange(LENGTH) % 5 != 3).expand(2, -1) if padded else None
    out = layer(x, key_valid=key_valid)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator)
    learned = [one for one in layer.parameters() if one.requires_grad]
    found = [out.detach(), *torch.autograd.grad(out, [x, *learned], dout)]
    orders = [torch.randperm(HIDDEN, generator=generator) for _ in range(8)]
    exact = gradients_by_formula(
        copy.deepcopy(layer).double(), x.double(), key_valid, dout, orders[0]
    )
    plain = [gradients_by_formula(layer, x, key_valid, dout, order) for order in orders]
    # These are hundreds of comparisons, with the matrix products of any CPU: on some, one errs more
    # than twice as much as the plain evaluations do.
    for one, *others in zip(found, exact, *plain):
        evaluate.assert_within(one, *others, factor=4)


@pytest.mark.parametrize("recent", [0, 5, None])
def test_training_starts_from_a_sliding_window(recent: int) -> None:
    """A is 0: every bias is 1, which changes no softmax, and the most recent keys are kept."""
    layer, x = make_layer(learned=False, recent=recent), make_states()
    kept = WINDOW + (WINDOW if recent is None else recent)
    assert torch.equal(layer.A, torch.zeros(KV_HEADS))
    dense = make_layer(None)
    dense.load_state_dict(layer.state_dict(), strict=False)
    positions = torch.arange(LENGTH - kept, LENGTH)[None]
    expected = dense(x[:, -kept:], positions=positions)[:, -1]
    torch.testing.assert_close(layer(x)[:, -1], expected)
    layer(x).square().sum().backward()
    assert (layer.A.grad != 0).all(), "a sliding window learns nothing"


def test_defaults() -> None:
    """A causal layer keeps as many recent keys as keys of high scores. There are no sinks."""
    layer, x = make_layer(), make_states()
    assert (layer.recent, layer.sinks, layer.gap) == (WINDOW, 0, None)
    assert make_layer(causal=False).recent == make_layer(None).recent == 0
    assert torch.equal(make_layer(recent=WINDOW, sinks=0)(x), layer(x))
    for rules in ({"recent": 0}, {"recent": 5}, {"sinks": 2}, {"gap": 0.1}):
        assert not torch.allclose(make_layer(**rules)(x), layer(x), rtol=1e-2, atol=1e-2)
    shown = repr(make_layer(recent=5, sinks=2, gap=1.5, sliding_heads=1))
    rules = "window=7, recent=5, sinks=2, gap=1.5, sliding_heads=1, nope_heads=0, causal=True"
    assert rules in shown


@pytest.mark.parametrize("heads", [{"sliding_heads": 1}, {"nope_heads": 1, "nope_rotary_dim": 2}])
def test_kinds_of_heads_in_a_cache(heads: dict[str, int]) -> None:
    """Tokens that enter a cache have the same results as in the whole sequence."""
    layer, x = make_layer(recent=5, **heads), make_states()
    rules = {"recent": layer.recent, "sinks": layer.sinks}
    cache = flash_dmattn.DynamicMaskCache(1, 2, KV_HEADS, layer.head_dim, layer.window, **rules)
    with torch.no_grad():
        steps = [layer(one, cache=cache) for one in x.split(LENGTH // 3 + 1, 1)]
        torch.testing.assert_close(torch.cat(steps, 1), layer(x))


@pytest.mark.parametrize(
    ("heads", "rules", "most"),
    [(-1, {}, KV_HEADS), (KV_HEADS + 1, {}, KV_HEADS), (1, {"causal": False}, 0)],
)
def test_bad_sliding_heads(heads: int, rules: dict[str, Any], most: int) -> None:
    with pytest.raises(ValueError, match=f"sliding_heads: is {heads}, want 0 to {most}"):
        make_layer(sliding_heads=heads, **rules)
    with pytest.raises(TypeError, match="sliding_heads: is 1.0, a float, want an int"):
        make_layer(sliding_heads=1.0)


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"nope_heads": -1}, ValueError, f"nope_heads: is -1, want 0 to {KV_HEADS}"),
        ({"nope_heads": KV_HEADS + 1}, ValueError, f"want 0 to {KV_HEADS}"),
        ({"nope_heads": 1, "rope_base": None}, ValueError, "nope_heads: is 1, want 0 to 0"),
        ({"nope_heads": 1.0}, TypeError, "nope_heads: is 1.0, a float, want an int"),
        ({"nope_rotary_dim": 2}, ValueError, "nope_rotary_dim: is 2, want an even number, 0 to 0"),
        (
            {"nope_heads": 1, "nope_rotary_dim": 10},
            ValueError,
            "is 10, want an even number, 0 to 8",
        ),
        ({"nope_heads": 1, "nope_rotary_dim": 3}, ValueError, "is 3, want an even number, 0 to 8"),
        ({"nope_heads": 1, "nope_rotary_dim": -2}, ValueError, "is -2, want an even number"),
        ({"nope_rotary_dim": 0.0}, TypeError, "nope_rotary_dim: is 0.0, a float, want an int"),
    ],
)
def test_bad_nope_heads(rules: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_layer(**rules)


def test_initial_a() -> None:
    layer = make_layer(learned=False, sliding_heads=1, initial_a=0.25)
    wanted = [0.0] + [0.25] * (KV_HEADS - 1)
    assert layer.A.tolist() == wanted
    torch.nn.init.ones_(layer.A)
    layer.reset_parameters()
    assert layer.A.tolist() == wanted


def test_state_dict() -> None:
    layer = make_layer()
    shapes = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    width = KV_HEADS * 8
    assert shapes == {
        "A": (KV_HEADS,),
        "q_proj.weight": (HEADS * 8, HIDDEN),
        "k_proj.weight": (width, HIDDEN),
        "v_proj.weight": (width, HIDDEN),
        "o_proj.weight": (HIDDEN, HEADS * 8),
        "dt_proj.weight": (KV_HEADS, width),
    }
    normed = make_layer(qk_norm=True).state_dict()
    assert {*normed} == {*shapes, "q_norm.weight", "k_norm.weight"}
    assert normed["q_norm.weight"].shape == normed["k_norm.weight"].shape == (8,)
    with_bias = make_layer(dt_bias=True).state_dict()
    assert {*with_bias} == {*shapes, "dt_proj.bias"}
    assert with_bias["dt_proj.bias"].shape == (KV_HEADS,)
    other = flash_dmattn.DynamicMaskAttention(HIDDEN, HEADS, KV_HEADS, WINDOW)
    x = make_states()
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    other.reset_parameters()
    assert (other.A == 0).all() and not torch.equal(other.q_proj.weight, layer.q_proj.weight)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_adapters_of_dt_proj() -> None:
    """A replaced dt_proj that computes more than its weight is refused; parametrizations are
    accepted."""
    layer, x = make_layer(), make_states()
    before = layer(x)

    class Doubled(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    torch.nn.utils.parametrize.register_parametrization(layer.dt_proj, "weight", Doubled())
    other = make_layer()
    other.load_state_dict({**other.state_dict(), "dt_proj.weight": 2 * other.dt_proj.weight})
    assert torch.equal(layer(x), other(x)) and not torch.equal(layer(x), before)
    layer.dt_proj = torch.nn.Sequential(layer.dt_proj)
    cache = flash_dmattn.DynamicMaskCache(1, 2, KV_HEADS, 8, WINDOW, recent=WINDOW)
    for given in ({}, {"cache": cache}):
        with pytest.raises(NotImplementedError, match="dt_proj: is a Sequential, want a torch.nn"):
            layer(x, **given)


def make_cross(**options: Any) -> Any:
    given = {"causal": False, "rope_base": None, "memory_hidden": 20, **options}
    return make_layer(**given)


@pytest.mark.parametrize("window", [WINDOW, None])
@pytest.mark.parametrize("padded", [False, True])
def test_cross_attention(padded: bool, window: int | None) -> None:
    """Queries from x; keys, values and scores from another sequence."""
    layer, x = make_cross(window=window, qk_norm=True), make_states()[:, :9]
    memory = torch.randn(2, LENGTH, 20, generator=torch.Generator().manual_seed(3))
    memory.requires_grad_()
    key_valid = (torch.arange(LENGTH) % 5 != 3).expand(2, -1) if padded else None
    query = layer.q_norm(layer.q_proj(x).unflatten(2, (HEADS, 8)))
    key = layer.k_norm(layer.k_proj(memory).unflatten(2, (KV_HEADS, 8)))
    value = layer.v_proj(memory).unflatten(2, (KV_HEADS, 8))
    bias = kept = None
    if window is not None:
        z = (layer.A * softplus(layer.dt_proj(value.flatten(2)))).transpose(1, 2)
        bias, kept = z.exp(), evaluate.kept_keys(z.detach(), WINDOW, "global", key_valid)
    mask = evaluate.visible_keys(9, LENGTH, False, kept, key_valid)
    attended, _ = evaluate.attention(query, key, value, mask, x.dtype, bias=bias)
    expected = layer.o_proj(attended.flatten(2))
    out = layer(x, memory=memory, key_valid=key_valid)
    torch.testing.assert_close(out, expected)
    tensors = [memory, *layer.parameters()]
    found = torch.autograd.grad(out.square().sum(), tensors)
    for one, other in zip(found, torch.autograd.grad(expected.square().sum(), tensors)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_bad_memories() -> None:
    x, memory = make_states(), torch.randn(2, 5, 20)
    for options, words in (
        ({"memory_hidden": 0}, "memory_hidden: is 0, want 1 or more"),
        ({"causal": True}, "memory_hidden: is given, want None for a causal layer"),
        ({"rope_base": 1e4}, "memory_hidden: is given, want None for a layer with rope_base"),
    ):
        with pytest.raises(ValueError, match=words):
            make_cross(**options)
    for layer, given, words in (
        (make_layer(), {"memory": memory}, "memory: is given, want None for a layer without"),
        (make_cross(), {}, "memory: is None, want hidden states, as memory_hidden is given"),
        (make_cross(), {"memory": memory[0]}, "memory: rank is 2, want 3; memory is"),
        (make_cross(), {"memory": memory[:1]}, "memory: axis 0 has 1 element, want 2, the batch"),
        (make_cross(), {"memory": x}, "memory: axis 2 has 48 elements, want 20; memory is"),
        (
            make_cross(),
            {"memory": memory, "starts": torch.tensor([0, 5])},
            "starts: is given, want None with memory",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            layer(x, **given)


def test_key_valid_hides_what_stands_there() -> None:
    """Padding on the right changes nothing before it. Padding on the left changes nothing after it,
    if `positions` belong to the text."""
    layer, x = make_layer(), make_states()
    padding = torch.full((2, 9, HIDDEN), 1e3)
    expected = layer(x)
    right = torch.arange(LENGTH + 9).expand(2, -1) < LENGTH
    found = layer(torch.cat((x, padding), 1), key_valid=right)[:, :LENGTH]
    torch.testing.assert_close(found, expected)
    left = torch.arange(LENGTH + 9).expand(2, -1) >= 9
    positions = (torch.arange(LENGTH + 9) - 9).clamp(min=0)[None]
    found = layer(torch.cat((padding, x), 1), key_valid=left, positions=positions)
    assert (found[:, :9] == 0).all()  # these queries keep no key
    torch.testing.assert_close(found[:, 9:], expected)


def test_only_distances_count() -> None:
    layer, x = make_layer(), make_states()
    later = layer(x, positions=torch.arange(1000, 1000 + LENGTH)[None])
    torch.testing.assert_close(later, layer(x), rtol=1e-3, atol=1e-4)
    stretched = layer(x, positions=2 * torch.arange(LENGTH)[None])
    assert not torch.allclose(stretched, layer(x), rtol=1e-2, atol=1e-2)
    without = make_layer(rope_base=None)
    assert torch.equal(without(x), without(x, positions=torch.arange(LENGTH)[None] + 7))
    assert not torch.allclose(without(x), layer(x), rtol=1e-2, atol=1e-2)


def test_angles_are_exact_in_16_bits() -> None:
    """Positions 4000 and 4001 are equal in bfloat16, but their rotations differ."""
    x = torch.ones(1, 2, 1, 16, dtype=torch.bfloat16)
    found = rotate_heads(x, torch.tensor([[4000, 4001]]), 1e4)
    exact = rotated(x.double().float(), torch.tensor([[4000, 4001]]))
    torch.testing.assert_close(found.float(), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_16_bit_parameters(dtype: torch.dtype, device: str) -> None:
    """Parameters in float32, attention in 16 bits. Training steps lower the loss."""
    torch.manual_seed(0)
    layer = flash_dmattn.DynamicMaskAttention(256, 4, 2, 40).to(device)
    torch.nn.init.normal_(layer.A)  # with A = 0 dt_proj has no gradient in the first step
    x, target = torch.randn(2, 2, 300, 256, device=device)
    losses = []
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    for _ in range(5):
        with torch.autocast(device, dtype):
            out = layer(x)
        assert out.dtype == dtype
        loss = (out.float() - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        for one in layer.parameters():
            assert one.grad.dtype == torch.float32
            assert one.grad.isfinite().all() and (one.grad != 0).any()
        optimizer.step()
    assert losses[-1] < losses[0]
    with torch.autocast(device, dtype):
        out = layer(x)
    found = copy.deepcopy(layer).to(dtype)(x.to(dtype))
    # Their scores differ a little, and so do some kept keys.
    assert found.dtype == dtype and (found - out).abs().mean() < 0.05 * out.abs().mean()


@pytest.mark.parametrize(
    "rules", [{}, {"recent": 5, "sinks": 2}, {"gap": 0.3}, {"sliding_heads": 1}, {"nope_heads": 1}]
)
def test_one_compiled_graph(rules: dict[str, Any]) -> None:
    torch._dynamo.reset()
    layer, x = make_layer(**rules), make_states()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    found = torch.autograd.grad(compiled(x).square().sum(), list(layer.parameters()))
    expected = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other)


# ---- in processes: each has one half of the batch, and gradients are the mean of both ----

WRAPPERS = ("ddp", "fsdp") if hasattr(torch.distributed.fsdp, "fully_shard") else ("ddp",)


def run_distributed(rank: int) -> dict[str, list[torch.Tensor]]:
    """The gradients of parameters in each wrapper."""
    found = {}
    for kind in WRAPPERS:
        layer, x = make_layer(), make_states()[rank : rank + 1]
        if kind == "ddp":
            model = DistributedDataParallel(layer)  # it must outlive backward()
        else:
            model = torch.distributed.fsdp.fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        model(x).square().sum().backward()
        gradients = (one.grad for one in layer.parameters())
        found[kind] = [one if kind == "ddp" else one.full_tensor() for one in gradients]
    return found


RUN = context_ranks.Once(__name__, "run_distributed", 2, timeout=60)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_distributed(kind: str) -> None:
    layer, x = make_layer(), make_states()
    layer(x).square().sum().backward()
    first, second = (one[kind] for one in RUN.results())
    for one, other, parameter in zip(first, second, layer.parameters()):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, parameter.grad / 2, rtol=1e-4, atol=1e-4)
