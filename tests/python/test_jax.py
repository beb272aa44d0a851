"""flash_dmattn.jax: bit for bit as the package for PyTorch, under JAX's transforms, and in words.

Tests with "cuda" in their names run where JAX has a GPU: `pytest tests/python/test_jax.py -k cuda`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import evaluate
import flash_dmattn
import pytest
import torch
from cases import FORMS, Form, make_form
from evaluate import assert_same
from programs import ROOT, output_of, python

jax = pytest.importorskip("jax")
if not os.path.exists(os.environ["FDMA_JAX_LIBRARY"]):
    pytest.skip("there is no libfdma_jax", allow_module_level=True)

import flash_dmattn.jax as ours  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flash_dmattn.jax import _versions  # noqa: E402
from jax import lax, random  # noqa: E402

HAS_GPU = jax.default_backend() == "gpu"
OPTIONS = {"keep_window_size": 5, "causal": True}


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cuda" and not HAS_GPU:
        pytest.skip("JAX has no GPU")
    with jax.default_device(jax.devices("gpu" if request.param == "cuda" else "cpu")[0]):
        yield request.param


@pytest.fixture
def on_cpu() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def to_jax(x: Any) -> Any:
    """A tensor as an array, and whatever else as it is."""
    return jnp.from_dlpack(x.detach().contiguous()) if isinstance(x, torch.Tensor) else x


def to_torch(x: Any) -> torch.Tensor:
    return torch.from_dlpack(x)


def draw(form: Form) -> Any:
    """The numbers that PyTorch draws for dropout, as JAX draws them."""
    return jnp.asarray(form.draw().cpu().numpy().view("uint32"))


def attend_and_differentiate(form: Form, targets: Any) -> tuple[torch.Tensor, ...]:
    """out, lse and the gradients of the form's leaves that have some."""
    leaves = {name: to_jax(x) for name, x in form.leaves.items()}
    learned = [name for name, x in form.leaves.items() if x.requires_grad]
    options = {name: to_jax(x) for name, x in form.options.items()}
    options.update(return_lse=True, deterministic=True)
    if "dropout_p" in options:
        options["rng_key"] = random.key(0)

    def attend(given: dict[str, Any]) -> Any:
        return ours.flash_dma_attention(**{**leaves, **given}, **options)

    results, back = jax.vjp(attend, {name: leaves[name] for name in learned})
    (gradients,) = back(tuple(map(to_jax, targets)))
    return tuple(map(to_torch, (*results, *(gradients[name] for name in learned))))


def make_targets(form: Form) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of out and of lse."""
    generator = torch.Generator().manual_seed(3)
    query = form.leaves["query"]
    dout = torch.randn(query.shape, generator=generator).to(query)
    dlse = torch.randn(query.transpose(1, 2).shape[:3], generator=generator)
    return dout, dlse.to(form.leaves["a_coef"])


@pytest.mark.parametrize("name", FORMS)
def test_the_bits_of_pytorch(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = make_form(name, device=device)
    monkeypatch.setattr(random, "bits", lambda *_: draw(form))
    targets = make_targets(form)
    wanted = form.attend(deterministic=True)
    wanted = (*wanted, *torch.autograd.grad(wanted, form.learned, targets))
    assert_same(attend_and_differentiate(form, targets), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bits_of_pytorch_in_16_bits(dtype: torch.dtype, device: str) -> None:
    form = make_form("rules and padding", dtype, device=device)
    targets = make_targets(form)
    wanted = form.attend(deterministic=True)
    wanted = (*wanted, *torch.autograd.grad(wanted, form.learned, targets))
    assert_same(attend_and_differentiate(form, targets), wanted)


@pytest.mark.parametrize("name", ["usual", "numbers", "rules and padding", "dt_bias"])
@pytest.mark.usefixtures("on_cpu")
def test_gradients_against_float64(name: str) -> None:
    form = make_form(name)
    targets, (mask, options) = make_targets(form), form.evaluation()
    options["bias_form"] = form.options.get("bias_form", "exp")
    exact = evaluate.fused_gradients(form.leaves, mask, targets, torch.float64, **options)
    plain = evaluate.plain_fused_gradients(form.leaves, mask, targets, **options)
    evaluate.assert_all_within(attend_and_differentiate(form, targets)[2:], exact, plain)


# ---- single steps ----


def leaves_of(device: str, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    return make_form("usual", dtype, device=device).leaves


def test_attention_and_masks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """attention() with a selection, a mask, a bias of pairs, a sink logit and dropout."""
    leaves = leaves_of(device)
    query, key, value, dt_proj, a_coef = leaves.values()
    score, bias = flash_dmattn.score(value.detach(), dt_proj.detach(), a_coef.detach())
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand((1, 4, 35, 60), generator=generator).to(device) > 0.2
    pairs = torch.randn((2, 1, 35, 60), generator=generator).to(query).requires_grad_()
    sink = torch.tensor([0.5, -2.0, 3.0, 1.0], device=device, requires_grad=True)
    state = torch.tensor([12345678901234, 99], device=device)
    numbers = {"causal": True, "softcap": 3.0, "dropout_p": 0.3, "softmax_scale": 0.2}
    selection = flash_dmattn.select(score, 12, recent=4, sinks=1)
    given = (query, key, value, bias.requires_grad_(), sink, pairs)
    names = ("bias", "sink_logit", "attn_bias")
    more = {**numbers, "attn_mask": mask, "selection": selection, "rng_state": state}
    wanted = flash_dmattn.attention(*given[:3], **dict(zip(names, given[3:])), **more)
    targets = [torch.randn(x.shape, generator=generator).to(x) for x in wanted]
    wanted = (*wanted, *torch.autograd.grad(wanted, given, targets))

    monkeypatch.setattr(random, "bits", lambda *_: jnp.asarray(state.cpu().numpy().view("uint32")))
    same = ours.select(to_jax(score), 12, recent=4, sinks=1)
    assert_same((to_torch(same.expiry), to_torch(same.slot)), tuple(selection[:2]))
    options = {**numbers, "attn_mask": to_jax(mask), "selection": same, "rng_key": random.key(0)}

    def attend(query: Any, key: Any, value: Any, *rest: Any) -> Any:
        return ours.attention(query, key, value, **dict(zip(names, rest)), **options)

    results, back = jax.vjp(attend, *map(to_jax, given))
    found = (*results, *back(tuple(map(to_jax, targets))))
    assert_same(tuple(map(to_torch, found)), wanted)


@pytest.mark.parametrize("form", ["exp", "linear", "none"])
def test_score(form: str, device: str) -> None:
    _, _, *given = leaves_of(device).values()
    score, bias = flash_dmattn.score(*given, bias_form=form)
    wanted = (score,) if bias is None else (score, bias)
    targets = [torch.ones_like(x) for x in wanted]
    wanted = (*wanted, *torch.autograd.grad(wanted, given, targets))

    def attend(*arrays: Any) -> Any:
        found = ours.score(*arrays, bias_form=form)
        return found[0] if found[1] is None else found

    results, back = jax.vjp(attend, *map(to_jax, given))
    ones = jax.tree.map(jnp.ones_like, results)
    found = (*jax.tree.leaves(results), *back(ones))
    assert_same(tuple(map(to_torch, found)), wanted)


@pytest.mark.usefixtures("on_cpu")
def test_a_bias_that_needs_no_gradient() -> None:
    """Only what is differentiated is computed: the gradient of attn_bias has q_len * kv_len
    numbers."""
    query, key, value, *_ = map(to_jax, leaves_of("cpu").values())
    pairs = jnp.ones((1, 1, 35, 60))

    def loss(query: Any, pairs: Any) -> Any:
        return ours.attention(query, key, value, attn_bias=pairs)[0].sum()

    for wanted, has_pairs in ((0, False), ((0, 1), True)):
        program = jax.jit(jax.grad(loss, wanted)).lower(query, pairs).as_text()
        (backward,) = [line for line in program.splitlines() if 'operation = "backward"' in line]
        assert ("tensor<1x1x35x60xf32>" in backward.split("->")[1]) is has_pairs


# ---- transforms ----


def make_arrays(batch: int = 3, length: int = 12) -> list[Any]:
    """query, key, value, dt_proj and a_coef."""
    keys = random.split(random.key(7), 4)
    query = random.normal(keys[0], (batch, length, 4, 8))
    key, value = random.normal(keys[1], (2, batch, length, 2, 8))
    return [query, key, value, random.normal(keys[2], (2, 16)) / 4, random.normal(keys[3], (2,))]


def one_entry(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
    """flash_dma_attention() of one sequence."""
    rows = (x[None] for x in (query, key, value))
    return ours.flash_dma_attention(*rows, *rest, **{**OPTIONS, **options})[0]


def assert_equal(found: Any, wanted: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype and jnp.array_equal(one, other)


BATCHED = (0, 0, 0, None, None)


@pytest.mark.usefixtures("on_cpu")
def test_vmap_over_the_batch_is_one_call() -> None:
    arrays = make_arrays()
    found = jax.vmap(one_entry, BATCHED)(*arrays)
    assert_equal(found, ours.flash_dma_attention(*arrays, **OPTIONS))
    program = jax.jit(jax.vmap(one_entry, BATCHED)).lower(*arrays).as_text()
    assert program.count("stablehlo.custom_call") == 1 and "while" not in program


@pytest.mark.usefixtures("on_cpu")
def test_gradients_under_vmap() -> None:
    """The gradients of weights are sums over entries, in another order than in one call."""
    arrays = make_arrays()
    every = (0, 1, 2, 3, 4)

    def entry_loss(*given: Any) -> Any:
        return (one_entry(*given) ** 2).sum()

    def loss(*given: Any) -> Any:
        return (ours.flash_dma_attention(*given, **OPTIONS) ** 2).sum()

    wanted = jax.grad(loss, every)(*arrays)
    each = jax.vmap(jax.grad(entry_loss, every), BATCHED)(*arrays)
    for at, one in enumerate(arrays[0]):
        alone = jax.grad(entry_loss, every)(one, arrays[1][at], arrays[2][at], *arrays[3:])
        assert_equal([x[at] for x in each], alone)
    outer = jax.grad(lambda *x: jax.vmap(entry_loss, BATCHED)(*x).sum(), every)(*arrays)
    assert_equal(outer[:3], wanted[:3])
    for one, other in zip(outer[3:], wanted[3:]):
        assert jnp.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("on_cpu")
def test_vmap_over_other_arguments() -> None:
    """Weights, packed sequences and dropout take a call for each entry, with its own results."""
    query, key, value, dt_proj, a_coef = make_arrays()
    weights = jnp.stack([dt_proj, 2 * dt_proj, -dt_proj])
    arrays = (query, key, value, weights, a_coef)
    drop = {"dropout_p": 0.5, "rng_key": random.key(1)}
    packed = {"starts": jnp.array([0, 5, 12], jnp.int32)}
    for axes, options in (((0, 0, 0, 0, None), {}), (BATCHED, drop), (BATCHED, packed)):
        given = arrays if axes[3] == 0 else (query, key, value, dt_proj, a_coef)
        attend = functools.partial(one_entry, **options)
        found = jax.vmap(attend, axes)(*given)
        for at in range(3):
            entry = [x if axis is None else x[at] for x, axis in zip(given, axes)]
            assert_equal(found[at], attend(*entry))


@pytest.mark.usefixtures("on_cpu")
def test_vmap_with_masks() -> None:
    """Masks and biases of pairs that entries share, and that they have of their own."""
    query, key, value, *_ = make_arrays()
    shared = random.bernoulli(random.key(2), 0.7, (1, 1, 12, 12))
    own = random.normal(random.key(3), (3, 1, 4, 12, 12))

    def attend(query: Any, key: Any, value: Any, attn_bias: Any) -> Any:
        rows = (x[None] for x in (query, key, value))
        return ours.attention(*rows, attn_mask=shared, attn_bias=attn_bias)

    found = jax.vmap(attend)(query, key, value, own)
    for at in range(3):
        assert_equal([x[at] for x in found], attend(query[at], key[at], value[at], own[at]))


@pytest.mark.usefixtures("on_cpu")
def test_what_has_no_derivative() -> None:
    query, *rest = make_arrays(1)

    def loss(query: Any) -> Any:
        return (ours.flash_dma_attention(query, *rest, **OPTIONS) ** 2).sum()

    with pytest.raises(NotImplementedError, match="second derivatives are not implemented"):
        jax.grad(lambda x: jax.grad(loss)(x).sum())(query)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (query,), (query,))
    expiry = jax.grad(lambda x: ours.select(x, 2).expiry.sum().astype(float) + x.sum())
    assert_equal(expiry(jnp.ones((1, 1, 4))), jnp.ones((1, 1, 4)))


# ---- decoding ----


def test_decoding(device: str) -> None:
    """A prompt and single tokens, in a compiled loop, against PyTorch's cache and the whole
    sequence."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    leaves = [x.detach() for x in make_form("all queries", dtype, device=device).leaves.values()]
    query, key, value, dt_proj, a_coef = leaves
    weights = {"dt_proj": dt_proj, "a_coef": a_coef}
    sizes = {"kv_heads": 2, "head_dim": 16, "window": 9, "recent": 4, "sinks": 2}
    caches = flash_dmattn.DynamicMaskCache(1, 2, **sizes, dtype=dtype, device=device)
    with torch.no_grad():
        caches.attend(0, query[:, :40], key[:, :40], value[:, :40], **weights)
        steps = [[x[:, n : n + 1] for x in (query, key, value)] for n in range(40, 60)]
        wanted = [flash_dmattn.decode(*step, caches.keys, **weights) for step in steps]

    rows, given = [to_jax(x) for x in leaves[:3]], {name: to_jax(x) for name, x in weights.items()}
    cache = ours.KeyCache.empty(2, **sizes, dtype=rows[0].dtype)
    out, cache = ours.prefill(*[x[:, :40] for x in rows], cache, **given)

    @jax.jit
    def generate(cache: Any, *rows: Any) -> Any:
        def step(cache: Any, token: Any) -> Any:
            out, cache = ours.decode(*[x[:, None] for x in token], cache, **given)
            return cache, out[:, 0]

        return lax.scan(step, cache, tuple(jnp.moveaxis(x, 1, 0) for x in rows))

    cache, outs = generate(cache, *[x[:, 40:] for x in rows])
    assert_same(to_torch(jnp.moveaxis(outs, 0, 1)), torch.cat(wanted, 1))
    for name in ("key", "value", "bias", "score", "position", "seen"):
        assert_same(to_torch(getattr(cache, name)), getattr(caches.keys, name))
    whole = ours.flash_dma_attention(
        *rows, **given, keep_window_size=9, recent=4, sinks=2, causal=True
    )
    assert_equal(out, whole[:, :40])


@pytest.mark.usefixtures("on_cpu")
def test_decoding_of_some_streams() -> None:
    """index, n_tokens and commit; one sequence at a time under vmap; scores of one's own."""
    query, key, value, dt_proj, a_coef = make_arrays(2, 4)
    weights = {"dt_proj": dt_proj, "a_coef": a_coef}
    cache = ours.KeyCache.empty(3, 2, 8, 4, recent=2)
    index = jnp.array([2, -1], jnp.int32)
    out, lse, one = ours.decode(
        query, key, value, cache, **weights, index=index, n_tokens=3, commit=2, return_lse=True
    )
    assert one.seen.tolist() == [0, 0, 2] and (out[1] == 0).all() and jnp.isneginf(lse[1]).all()
    assert (out[0, :3] != 0).all() and (out[0, 3:] == 0).all()
    alone = ours.flash_dma_attention(
        query, key, value, **weights, keep_window_size=4, recent=2, causal=True
    )
    assert jnp.allclose(out[0, :3], alone[0, :3], atol=1e-5)

    scores = random.normal(random.key(5), (2, 2, 4))
    empty = ours.KeyCache.empty(2, 2, 8, 4)
    both, after = ours.decode(query, key, value, empty, score=scores)

    def decode(query: Any, key: Any, value: Any, score: Any, cache: Any) -> Any:
        rows = (x[None] for x in (query, key, value))
        cache = jax.tree.map(lambda x: x[None], cache)
        return jax.tree.map(lambda x: x[0], ours.decode(*rows, cache, score=score[None]))

    assert_equal(jax.vmap(decode)(query, key, value, scores, empty), (both, after))


@pytest.mark.usefixtures("on_cpu")
def test_a_donated_cache_is_written_in_place() -> None:
    query, key, value, dt_proj, a_coef = make_arrays(1, 1)
    cache = ours.KeyCache.empty(1, 2, 8, 64)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache: Any) -> Any:
        return ours.decode(query, key, value, cache, dt_proj=dt_proj, a_coef=a_coef)[1]

    before = cache.key.unsafe_buffer_pointer()
    cache = step(cache)
    assert cache.key.unsafe_buffer_pointer() == before and cache.seen.tolist() == [1]


def test_head_dims(device: str) -> None:
    """A head_dim that is no multiple of 8, in decode() and prefill()."""
    form = make_form("head_dim 12", device=device)
    rows = [to_jax(x) for x in form.leaves.values()]
    query, key, value, dt_proj, a_coef = rows
    key, value = key[:, :35], value[:, :35]
    weights = {"dt_proj": dt_proj, "a_coef": a_coef}
    cache = ours.KeyCache.empty(2, 2, 12, 50, dtype=query.dtype)
    out, cache = ours.prefill(query[:, :34], key[:, :34], value[:, :34], cache, **weights)
    last, _ = ours.decode(query[:, 34:], key[:, 34:], value[:, 34:], cache, **weights)
    whole = ours.flash_dma_attention(query, key, value, **weights, keep_window_size=50, causal=True)
    assert out.shape[-1] == last.shape[-1] == 12
    assert jnp.allclose(
        jnp.concatenate([out, last], 1), whole, atol=1e-5 if device == "cpu" else 0.05
    )


@pytest.mark.usefixtures("on_cpu")
def test_the_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It trains, and what it writes over caches is what the whole sequence gives."""
    import train_jax

    sizes = "--steps 2 --batch 2 --length 40 --write 4"
    monkeypatch.setattr("sys.argv", ["train_jax.py", *sizes.split()])
    train_jax.main()
    assert re.match(r"step 1: [\d.]+ bits per byte\nstep 2: ", capsys.readouterr().out)
    parameters = train_jax.make_parameters(random.key(1))
    prompt = random.randint(random.key(2), (1, 100), 0, 256)
    written = train_jax.write(parameters, prompt, 6)
    whole = jnp.concatenate([prompt, written[None, :-1]], 1)
    assert_equal(train_jax.logits_of(parameters, whole)[0, 99:].argmax(-1), written)


# ---- bad input ----

TRACED = "is a traced array, want {}, which has to be known when the program is traced"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"query": [1.0]}, "query: is [1.0], a list, want a jax.Array"),
        (
            {"query": (1, 12, 4)},
            "query: rank is 3, want 4; query is [batch, q_len, q_heads, head_dim]",
        ),
        ({"query": (1, 12, 3, 8)}, "q_heads: is 3, want a positive multiple of kv_heads, 2"),
        ({"value": (1, 5, 2, 8)}, "value: axis 1 has 5 elements, want 12"),
        ({"a_coef": (1,)}, "a_coef: axis 0 has 1 element, want 2"),
        ({"key_valid": (1, 12)}, "key_valid: dtype is float32, supported: bool or uint8"),
        ({"key": jnp.bfloat16}, "key: dtype is bfloat16, supported: float32"),
        (
            {"value": jnp.int32},
            "value: dtype is int32, supported: float32, float16, bfloat16, float64",
        ),
        (
            {"keep_window_size": 0},
            "keep_window_size: is 0, want 1 or more; kv_len or more keeps all keys",
        ),
        ({"keep_window_size": 4.0}, "keep_window_size: is 4.0, a float, want an int"),
        ({"recent": -1}, "recent: is -1, want 0 or more"),
        ({"recent": 1, "causal": False}, "recent: is 1, want 0 if causal is False"),
        ({"sinks": 6}, "sinks: is 6, want 0 to keep_window_size, 5"),
        ({"gap": -1.0}, "gap: is -1, want a finite number above 0, or None for none"),
        (
            {"scope": "causal", "causal": False},
            "scope: is 'causal', want 'global' if causal is False",
        ),
        ({"bias_form": "x"}, "bias_form: is 'x', want one of 'exp', 'linear', 'none'"),
        (
            {"softmax_scale": 0},
            "softmax_scale: is 0, want a finite number above 0, or None for the default",
        ),
        ({"softcap": -1.0}, "softcap: is -1, want a finite number, 0 or more"),
        ({"dropout_p": 0.5}, "rng_key: is None, want a key of jax.random with a dropout_p above 0"),
        ({"causal": 1}, "causal: is 1, an int, want a bool"),
        ({"backend": "gpu"}, "backend: no kernel name begins with gpu, want one of .*"),
        ({"return_lse": 2}, "return_lse: is 2, an int, want a bool"),
    ],
)
@pytest.mark.usefixtures("on_cpu")
def test_messages(change: dict[str, Any], words: str) -> None:
    """Refused while the program is traced: nothing runs."""
    given = dict(zip(evaluate.FUSED, make_arrays(1))) | OPTIONS
    for name, value in change.items():
        if isinstance(value, tuple):
            value = jnp.ones(value)
        elif not isinstance(value, (int, float, str, list)):
            value = given[name].astype(value)
        given[name] = value
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as raised:
        jax.eval_shape(lambda: ours.flash_dma_attention(**given))
    assert re.fullmatch(words if words.endswith("*") else re.escape(words), str(raised.value))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("keep_window_size", "an int"), ("softcap", "a number"), ("causal", "a bool")],
)
@pytest.mark.usefixtures("on_cpu")
def test_options_are_static(name: str, wanted: str) -> None:
    arrays = make_arrays(1)
    attend = jax.jit(lambda x: ours.flash_dma_attention(*arrays, **{**OPTIONS, name: x}))
    with pytest.raises(TypeError) as raised:
        attend(1)
    assert str(raised.value) == f"{name}: {TRACED.format(wanted)}"


@pytest.mark.usefixtures("on_cpu")
def test_messages_of_caches() -> None:
    query, key, value, dt_proj, a_coef = make_arrays(2, 3)
    rows, weights = (query, key, value), {"dt_proj": dt_proj, "a_coef": a_coef}
    cache = ours.KeyCache.empty(2, 2, 8, 4)
    many = [jnp.zeros((2, 65, heads, 8)) for heads in (4, 2, 2)]
    small = [x[..., :4] for x in rows]
    for call, words in (
        (lambda: ours.decode(*rows, cache), "dt_proj: is None, want a jax.Array, or else a score"),
        (lambda: ours.decode(*rows, None, **weights), "cache: is None, want a KeyCache"),
        (
            lambda: ours.decode(*many, cache, **weights),
            "key: axis 1 has 65 elements, want at most 64 tokens",
        ),
        (
            lambda: ours.decode(*[x.astype(jnp.bfloat16) for x in rows], cache, **weights),
            "cache.key: dtype is float32, supported: bfloat16",
        ),
        (
            lambda: ours.prefill(*[x[:1] for x in rows], cache, **weights),
            "query: axis 0 has 1 element, want one for each sequence of the cache, 2",
        ),
        (lambda: ours.KeyCache.empty(0, 2, 8, 4), "sequences: is 0, want 1 or more"),
        (
            lambda: ours.attention(*rows, selection=3),
            "selection: is 3, an int, want select()'s result",
        ),
        (
            lambda: ours.attention(*rows, selection=ours.select(jnp.ones((2, 2, 3)), 2)),
            "selection: its scope is causal, want global if causal is False",
        ),
        (
            lambda: ours.decode(*small, ours.KeyCache.empty(2, 2, 20, 4), **weights),
            "cache.key: axis 3 has 24 elements, want 8: head_dim, rounded up to a multiple of 8",
        ),
    ):
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as raised:
            call()
        assert str(raised.value) == words


@pytest.mark.usefixtures("on_cpu")
def test_messages_of_decoding_by_score() -> None:
    query, key, value, dt_proj, a_coef = make_arrays(2, 3)
    rows, scores = (query, key, value), jnp.zeros((2, 2, 3))
    cache = ours.KeyCache.empty(2, 2, 8, 4)
    for call, words in (
        (
            lambda: ours.decode(*rows, cache, score=scores, dt_proj=dt_proj),
            "dt_proj: is given, want none with score",
        ),
        (
            lambda: ours.decode(*rows, cache, score=scores, a_coef=a_coef),
            "a_coef: is given, want none with score",
        ),
        (
            lambda: ours.decode(*rows, cache, score=scores, n_tokens=2**32 + 1),
            "n_tokens: is 4294967297, want 0 to 3",
        ),
        (
            lambda: ours.decode(*rows, cache, score=scores, commit=-(2**32) + 1),
            "commit: is -4294967295, want 0 to 3",
        ),
        (
            lambda: ours.decode(*rows, cache, score=scores, commit=2**64),
            "commit: is 18446744073709551616, want less than 2**63",
        ),
        (
            lambda: ours.decode(*rows, dataclasses.replace(cache, window=2**64 + 4), score=scores),
            "cache.window: is 18446744073709551620, want less than 2**63",
        ),
        (
            lambda: ours.decode(*rows, dataclasses.replace(cache, sinks=-(2**64)), score=scores),
            "sinks: is -18446744073709551616, want -2**63 or more",
        ),
    ):
        with pytest.raises(ValueError) as raised:
            call()
        assert str(raised.value) == words


@pytest.mark.usefixtures("on_cpu")
def test_numbers_that_are_known_when_the_program_runs() -> None:
    rows = make_arrays(2, 3)
    cache = ours.KeyCache.empty(2, 2, 8, 4)
    index = jnp.array([0, 7], jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="index: element 1 is 7, want -1 to 1"):
        jax.block_until_ready(
            ours.decode(*rows[:3], cache, dt_proj=rows[3], a_coef=rows[4], index=index)
        )


@pytest.mark.parametrize("version", ["0.9.2", "0.12.0.dev1", "1.0"])
def test_another_jax(version: str) -> None:
    with pytest.raises(ImportError, match=f"JAX: is {re.escape(version)}, want 0.10 or 0.11"):
        _versions.check_jax(version)
    _versions.check_jax("0.11.2")


IMPORTS = """
import sys
import flash_dmattn
assert not {"torch", "jax"} & set(sys.modules)
import flash_dmattn.jax as ours
assert "torch" not in sys.modules
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
rows = jax.random.normal(jax.random.key(0), (3, 4, 12, 2, 8))
attend = lambda *x: ours.flash_dma_attention(*x, jnp.ones((2, 16)) / 9, jnp.ones(2), 5, causal=True)
split = jax.shard_map(attend, mesh=mesh, in_specs=P("batch"), out_specs=P("batch"))
print(jnp.array_equal(jax.jit(split)(*rows), attend(*rows)), "torch" in sys.modules)
print(flash_dmattn.attention.__name__, "torch" in sys.modules)
"""


def test_without_pytorch_on_two_devices() -> None:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = python("-c", IMPORTS, env={**flags, "PYTHONPATH": str(ROOT / "python")})
    assert output_of(done).split("\n")[:2] == ["True False", "attention True"]


def test_no_library() -> None:
    env = {"FDMA_JAX_LIBRARY": "nothing.so", "PYTHONPATH": str(ROOT / "python")}
    done = python("-c", "import flash_dmattn.jax", env=env)
    assert "ImportError: FDMA_JAX_LIBRARY is 'nothing.so', which is not a file" in done.stderr


def test_host_time_is_written_to_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import host_time_jax

    file = tmp_path / "out.json"
    words = ["host_time_jax.py", str(file), "--rounds", "2", "--calls", "1"]
    monkeypatch.setattr("sys.argv", words)
    host_time_jax.main()
    machine, *rows = map(json.loads, file.read_text().splitlines())
    device = "cuda" if HAS_GPU else "cpu"
    wanted = {"jax": jax.__version__, "device": device, "length": 64, "window": 32}
    assert wanted.items() <= machine.items() and {"machine", "date", "commit"} <= machine.keys()
    found = [(row["q_heads"], row["kv_heads"], row["dtype"]) for row in rows]
    dtypes = ["bfloat16"] if HAS_GPU else ["float32", "bfloat16"]
    assert found == [(*heads, dtype) for dtype in dtypes for heads in ((1, 1), (8, 2))]
    assert all(row[name] > 0 for row in rows for name in ("us", "dense_us", "ratio"))
