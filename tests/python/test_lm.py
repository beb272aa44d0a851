"""examples/lm: the C program has the losses of PyTorch and of the models of research/, writes the
bytes that these find likeliest, draws bytes by their probabilities, and refuses broken files."""

from __future__ import annotations

import math
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, NamedTuple

import evaluate
import pytest
import quality_model
import torch
import warm
from flash_dmattn import DynamicMaskAttention
from programs import ROOT, Done, output_of, run
from safetensors.torch import load_file, save_file
from samples import combinations

FOLDER = ROOT / "examples" / "lm"
PROGRAM = os.environ.get("FDMA_LM", str(ROOT / "build" / "examples" / "lm"))
TEXT = ROOT / "examples" / "data" / "text.txt"
RANDOM_BYTES = torch.randint(256, (1300,), generator=torch.Generator().manual_seed(2))
PROMPTS = {  # with their lengths; pieces of a prompt have 512 bytes
    "some pieces": 1300,
    "none": 0,
    "one byte": 1,
    "shorter than the window": 9,
    "pieces and one byte": 513,
}
LAYERS, WIDTH, KV_HEADS, HEAD_DIM = 2, 128, 2, 32

SINKS = {"window": "24", "recent": "8", "sinks": "4"}
FORMS = {
    "dense": {},
    "window": {"window": "32"},
    "recent": {"window": "20", "recent": "12"},
    "sinks": SINKS,
    "linear": {"window": "32", "recent": "3", "bias_form": "linear"},
    "none": {"window": "32", "bias_form": "none", "rotary_base": "500000.0", "norm_eps": "0.01"},
    "nope": {"window": "20", "recent": "12", "nope": "0 1"},
    "nope window": {**SINKS, "nope": "0 1", "nope_window": "60"},
    "nope recent": {"window": "24", "nope": "0 2", "nope_window": "30", "nope_recent": "30"},
    "least nope window": {**SINKS, "nope": "0 2", "nope_window": "4"},
    "partly nope": {**SINKS, "nope": "2 1", "nope_rotary_dim": "6"},
    "qk_norm": {"window": "20", "recent": "12", "qk_norm": "1", "norm_eps": "0.1"},
}

Write = Callable[..., Path]
Tensors = "dict[str, torch.Tensor]"


def random_weights(has_scores: bool, has_qk_norm: bool = False) -> Tensors:
    """Random weights. With these sizes attention decides much, so that greedy texts do not repeat
    soon."""
    random = torch.Generator().manual_seed(1)

    def normal(*shape: int, size: float) -> torch.Tensor:
        return size * torch.randn(*shape, generator=random)

    def layer(rows: int, columns: int, size: float = 2.0) -> torch.Tensor:
        return normal(rows, columns, size=size / columns**0.5)

    kv_width = KV_HEADS * HEAD_DIM
    weights = {
        "embedding.weight": normal(256, WIDTH, size=1.0),
        "head.weight": layer(256, WIDTH),
        "norm.weight": 1 + normal(WIDTH, size=0.2),
    }
    for n in range(LAYERS):
        block = f"blocks.{n}."
        shapes = {"q": (WIDTH, WIDTH), "k": (kv_width, WIDTH), "v": (kv_width, WIDTH)}
        for name, shape in {**shapes, "o": (WIDTH, WIDTH)}.items():
            weights[f"{block}attention.{name}_proj.weight"] = layer(*shape)
        weights[f"{block}expand.weight"] = layer(4 * WIDTH, WIDTH)
        weights[f"{block}contract.weight"] = layer(WIDTH, 4 * WIDTH, 0.3)
        for name in ("attention_norm", "norm"):
            weights[f"{block}{name}.weight"] = 1 + normal(WIDTH, size=0.2)
        if has_scores:
            weights[f"{block}attention.dt_proj.weight"] = layer(KV_HEADS, kv_width)
            weights[f"{block}attention.A"] = torch.tensor([-0.6, 0.4])
        for name in ("q_norm", "k_norm") if has_qk_norm else ():
            gains = 1.25 + 3.75 * torch.rand(HEAD_DIM, generator=random)
            weights[f"{block}attention.{name}.weight"] = gains
    return weights


@pytest.fixture
def write(lm: ModuleType, tmp_path: Path) -> Write:
    """Write a model file with random weights of so many bits."""
    import convert

    def write_model(form: str, bits: int = 32) -> Path:
        path = tmp_path / "model.safetensors"
        weights = random_weights(form != "dense", "qk_norm" in FORMS[form])
        given = {"head_dim": str(HEAD_DIM), **FORMS[form]}
        save_file(convert.convert(weights, bits), path, convert.metadata_of(weights, given))
        return path

    return write_model


def logits_before(lm: ModuleType, model: Path, prompt: bytes, written: bytes) -> torch.Tensor:
    """PyTorch's logits [len, 256] that predict the written bytes."""
    text = torch.tensor([[*(prompt or b"\n"), *written]])
    with torch.no_grad():
        return lm.run(lm.read_model(model), text)[0, -len(written) - 1 : -1]


def generate(model: Path, prompt: bytes, *arguments: str) -> bytes:
    """The program's output after the prompt."""
    path = model.with_name("prompt")
    path.write_bytes(prompt)
    done = run(PROGRAM, model, "--prompt-file", path, *arguments, text=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(prompt)
    return done.stdout[len(prompt) :]


def loss_of(done: Done) -> float:
    """Bits per byte."""
    return float(output_of(done).split()[0])


def write_text(folder: Path, length: int) -> Path:
    path = folder / "text"
    path.write_bytes(TEXT.read_bytes()[:length])
    return path


def assert_likeliest(logits: torch.Tensor, written: bytes) -> None:
    """Each written byte has the largest of its logits [len, 256] or, in few places, one that is
    smaller by no more than rounding."""
    largest, second = logits.topk(2).values.T
    rounding = 64 * torch.finfo(logits.dtype).eps * logits.abs().max()
    assert (largest - second > rounding).double().mean() > 0.97
    chosen = logits.gather(1, torch.tensor([*written])[:, None])[:, 0]
    assert (largest - chosen <= rounding).all()


def loss_in_c(model: Path, text: Path, *options: str) -> float:
    return loss_of(run(PROGRAM, model, "--loss", text, *options))


@pytest.mark.parametrize(("form", "bits"), combinations(FORMS, [32, 16, 8]))
def test_losses_are_those_of_pytorch(
    form: str, bits: int, lm: ModuleType, write: Write, tmp_path: Path
) -> None:
    """Pieces of 300 bytes; the last one has 99."""
    model, text = write(form, bits), write_text(tmp_path, 1000)
    found = loss_in_c(model, text, "--length", "300")
    assert abs(found - lm.loss(lm.read_model(model), text.read_bytes(), 300)) < 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_losses_are_those_of_the_formulas(
    form: str, lm: ModuleType, write: Write, tmp_path: Path
) -> None:
    """Kept keys are found one query at a time, in float64, without the library."""

    def attend(model: Any, layer: int, *heads: torch.Tensor) -> torch.Tensor:
        length, double = heads[0].shape[1], torch.float64
        if form == "dense":
            mask, bias = evaluate.visible_keys(length, length, True), None
        else:
            name = f"blocks.{layer}.attention."
            weights = (model.weights[f"{name}{one}"] for one in ("dt_proj.weight", "A"))
            score = evaluate.score(heads[2], *weights, double)
            rules = {"recent": model.of_layer("recent", layer), "sinks": model.size("sinks")}
            rounded = score.float()  # makes equal bytes equal in any order of sums
            kept = evaluate.kept_keys(rounded, model.of_layer("window", layer), "causal", **rules)
            mask = evaluate.visible_keys(length, length, True, kept)
            bias = {"exp": score.exp(), "linear": score}.get(model.metadata["bias_form"])
        return evaluate.attention(*heads, mask, double, bias=bias)[0].float()

    model, text = write(form), write_text(tmp_path, 121)
    whole = torch.tensor([[*text.read_bytes()]])
    with torch.no_grad():
        logits = lm.run(lm.read_model(model), whole[:, :-1], attend)[0]
    want = torch.nn.functional.cross_entropy(logits, whole[0, 1:]).item() / math.log(2)
    assert abs(loss_in_c(model, text) - want) < 1e-4


@pytest.mark.parametrize("form", ["dense", "window", "recent", "sinks", "qk_norm"])
def test_the_reference_is_a_model_of_layers(form: str, lm: ModuleType) -> None:
    """Parameters have the same names and meanings as in DynamicMaskAttention. Both compute in
    float64, as layers round after a norm and a rotation, and the reference between them."""
    rules, has_norms = FORMS[form], form == "qk_norm"
    eps = float(rules.get("norm_eps", 1e-5))
    found = random_weights(form != "dense", has_norms)
    weights = {name: one.double() for name, one in found.items()}
    window, recent, sinks = (rules.get(one) for one in ("window", "recent", "sinks"))

    def layer() -> torch.nn.ModuleDict:
        attention = DynamicMaskAttention(
            *(WIDTH, WIDTH // HEAD_DIM, KV_HEADS, window and int(window)),
            **{"recent": int(recent or 0), "sinks": int(sinks or 0), "qk_norm": has_norms},
            norm_eps=eps,
        )
        return torch.nn.ModuleDict(
            {
                "attention_norm": torch.nn.RMSNorm(WIDTH, eps=eps),
                "attention": attention,
                "norm": torch.nn.RMSNorm(WIDTH, eps=eps),
                "expand": torch.nn.Linear(WIDTH, 4 * WIDTH, bias=False),
                "contract": torch.nn.Linear(4 * WIDTH, WIDTH, bias=False),
            }
        )

    model = torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Embedding(256, WIDTH),
            "blocks": torch.nn.ModuleList(layer() for _ in range(LAYERS)),
            "norm": torch.nn.RMSNorm(WIDTH, eps=eps),
            "head": torch.nn.Linear(WIDTH, 256, bias=False),
        }
    )
    model.double().load_state_dict(weights)
    text = RANDOM_BYTES[None, :200]
    import convert

    given = {"head_dim": str(HEAD_DIM), **rules}
    want = lm.run(lm.Model(weights, convert.metadata_of(weights, given)), text)
    with torch.no_grad():
        x = model["embedding"](text)
        for block in model["blocks"]:
            x = x + block["attention"](block["attention_norm"](x))
            x = x + block["contract"](block["expand"](block["norm"](x)).relu().square())
        torch.testing.assert_close(model["head"](model["norm"](x)), want)


@pytest.mark.parametrize(("form", "prompt"), combinations(FORMS, PROMPTS))
def test_greedy_text_is_that_of_pytorch(
    form: str, prompt: str, lm: ModuleType, write: Write
) -> None:
    """The bounded cache against the whole sequence: PyTorch finds each written byte likeliest after
    the bytes before it, so it would write the same text."""
    model, start = write(form), bytes(RANDOM_BYTES[: PROMPTS[prompt]].tolist())
    written = generate(model, start, "--temperature", "0", "--bytes", "200")
    assert len(written) == 200 and len(set(written)) > 8  # no loop of a few bytes
    assert_likeliest(logits_before(lm, model, start, written), written)


@pytest.mark.parametrize("bits", [16, 8])
def test_greedy_text_of_fewer_bits(bits: int, lm: ModuleType, write: Write) -> None:
    """With weights of 8 bits single rows are rounded to 16 bits, which may decide near ties."""
    model = write("recent", bits)
    written = generate(model, b"Light", "--temperature", "0", "--bytes", "200")
    logits = logits_before(lm, model, b"Light", written)
    chosen = logits.gather(1, torch.tensor([*written])[:, None])[:, 0]
    assert (logits.amax(1) - chosen).max() < 2e-3


def test_threads_do_not_matter(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write("recent", 8)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # waiting threads leave the CPUs to others
    start = TEXT.read_bytes()[:600]
    texts = [generate(model, start, "--bytes", "99", "--threads", n) for n in ("1", "2", "3")]
    assert len(texts[0]) == 99 and texts[0] == texts[1] == texts[2]


# ---- models of research/ ----

HEADS: dict[str, dict[str, Any]] = {  # three kv heads, each of two query heads
    "none": {},
    "one of a layer": {"nope": (0, 1)},
    "all of a layer": {"nope": (3, 0)},
    "all": {"nope": (3, 3)},
    "some": {"nope": (1, 2)},
    "some, beside sliding ones": {"nope": (1, 2), "sliding": (2, 1)},
    "all, with a few rotated channels": {"nope": (3, 3), "nope_rotary_dim": 10},
    "some, with half of the channels rotated": {"nope": (2, 1), "nope_rotary_dim": 32},
    "one, and a larger window in its layer": {"nope": (0, 1), "nope_window": 200},
    "one, and a smaller window in its layer": {"nope": (1, 0), "nope_window": 6},
    "all, and another window": {"nope": (3, 3), "nope_window": 60},
    "all, and more newest keys": {"nope": (0, 3), "nope_window": 40, "nope_recent": 60},
    "one, with all channels rotated": {"nope": (0, 1), "nope_rotary_dim": 64},
}
NORMALIZED: dict[str, dict[str, Any]] = {
    "some keys": {},
    "all keys": {"window": None},
    "sliding heads": {"sliding": (2, 1)},
    "NoPE heads": {"nope": (1, 2)},
    "NoPE heads, all keys": {"window": None, "nope": (1, 3)},
    "NoPE heads, some rotated channels": {"nope": (3, 1), "nope_rotary_dim": 10},
    "NoPE and sliding heads": {"nope": (1, 2), "sliding": (2, 1)},
}
KINDS = {**HEADS, **{name: {**one, "qk_norm": True} for name, one in NORMALIZED.items()}}
CONFIGURED = ["--window=24", "--recent=8", "--rotary-base=1000"]  # by options of convert.py


def write_trained(path: Path, window: int | None = 24, **kinds: Any) -> quality_model.Model:
    """Write a model of research/quality_model.py. Its queries and keys are so large that rotation
    matters, or, if they are normalized, so small that norm_eps matters."""
    form = "dense" if window is None else "recent"
    bias_form, recent = ("none", 0) if window is None else ("exp", 8)
    config = quality_model.Config(
        *(2, 6, 3, window, recent), bias_form=bias_form, rotary_base=1000.0, **kinds
    )
    model = quality_model.Model(config)
    quality_model.initialise(model, form, 0, initial_a=0.5, dt_std=0.05)
    factors = {"embedding": 50, "head": 4, "q_proj": 8, "k_proj": 8, "v_proj": 5, "o_proj": 5}
    if config.qk_norm:
        factors.update(embedding=25, q_proj=1 / 64, k_proj=1 / 32, v_proj=3, o_proj=3)
    random = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        parameter.data.mul_(factors.get(name.split(".")[-2], 1))
        if "q_norm" in name or "k_norm" in name:
            parameter.data.uniform_(0.5, 2, generator=random)
    quality_model.save(model, path)
    return model


@torch.no_grad()
def trained_loss(model: quality_model.Model, text: bytes) -> float:
    """Bits per byte of a text in one piece."""
    whole = torch.tensor([[*text]])
    nats = torch.nn.functional.cross_entropy(model(whole[:, :-1])[0], whole[0, 1:])
    return nats.item() / math.log(2)


@pytest.mark.parametrize(("kind", "window"), combinations(KINDS, [40, 1000]))
def test_losses_are_those_of_the_trained_model(
    kind: str, window: int, lm: ModuleType, tmp_path: Path
) -> None:
    """The program and reference.py, with queries that keep some keys, or all."""
    path, text = tmp_path / "model.safetensors", write_text(tmp_path, 400)
    want = trained_loss(write_trained(path, **{"window": window, **KINDS[kind]}), text.read_bytes())
    assert abs(loss_in_c(path, text) - want) < 1e-4
    assert abs(lm.loss(lm.read_model(path), text.read_bytes(), 400) - want) < 1e-4


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize(("kind", "prompt"), combinations(KINDS, [700, 0, 513, 9]))
@torch.no_grad()
def test_greedy_text_is_that_of_the_trained_model(kind: str, prompt: int, tmp_path: Path) -> None:
    """A prompt in pieces of 512 bytes, which may end with a single byte, and then byte by byte."""
    path, start = tmp_path / "model.safetensors", bytes(RANDOM_BYTES[:prompt].tolist())
    model = write_trained(path, **KINDS[kind])
    written = generate(path, start, "--temperature", "0", "--bytes", "100")
    assert len(written) == 100 and len(set(written)) > 20
    logits = model(torch.tensor([[*(start or b"\n"), *written]]))
    assert_likeliest(logits[0, -len(written) - 1 : -1], written)


def losses_of(folder: Path, kinds: list[dict[str, Any]]) -> list[float]:
    text = TEXT.read_bytes()[:400]
    return [trained_loss(write_trained(folder / "model", **kind), text) for kind in kinds]


def least_difference(losses: list[float]) -> float:
    losses = sorted(losses)
    return min(above - below for below, above in zip(losses, losses[1:]))


@pytest.mark.usefixtures("exact_products")
def test_each_choice_of_heads_has_its_own_loss(tmp_path: Path) -> None:
    """The losses above differ by far more than the comparison tolerates, so that the program cannot
    have rotated other heads than the file's, or have kept other keys in their layers."""
    others = ("sliding", "nope_window")
    rules = {name: rule for name, rule in HEADS.items() if not any(one in rule for one in others)}
    del rules["one, with all channels rotated"]  # equals no NoPE heads
    losses = losses_of(tmp_path, [{"window": 1000, **rule} for rule in rules.values()])
    assert least_difference(losses) > 1e-3
    for nope in ((0, 1), (1, 0)):
        windows = [{"nope_window": window} for window in (None, 6, 200, 1000)]
        windows.append({"nope_window": 40, "nope_recent": 60})
        losses = losses_of(tmp_path, [{"window": 40, "nope": nope, **one} for one in windows])
        assert least_difference(losses) > 1e-3


@pytest.mark.parametrize("kind", ["some keys", "all keys"])
def test_other_norms_have_other_losses(kind: str, tmp_path: Path) -> None:
    """They differ by far more than the comparison above tolerates."""
    text = TEXT.read_bytes()[:400]
    losses = []
    for change in ("none", "swapped gains", "no k_norm", "no gains", "eps"):
        model = write_trained(tmp_path / "model.safetensors", **KINDS[kind])
        for one in model.attentions():
            if change == "swapped gains":
                one.q_norm, one.k_norm = one.k_norm, one.q_norm
            elif change == "no k_norm":
                one.k_norm = torch.nn.Identity()
            elif change == "no gains":
                for norm in (one.q_norm, one.k_norm):
                    torch.nn.init.ones_(norm.weight)
            elif change == "eps":
                one.q_norm.eps = one.k_norm.eps = 1e-6
        losses.append(trained_loss(model, text))
    assert min(abs(one - losses[0]) for one in losses[1:]) > 1e-3


@pytest.mark.usefixtures("lm")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ({"qk_norm": True}, []),
        (
            {"nope": (0, 2), "nope_rotary_dim": 10, "nope_window": 20, "nope_recent": 0},
            ["--nope=0 2", "--nope-rotary-dim=10", "--nope-window=20", "--nope-recent=0"],
        ),
        # A model that attends to all keys has no windows, whatever the options say.
        ({"nope": (1, 2), "window": None}, ["--nope=1 2", "--nope-window=20", "--nope-recent=9"]),
    ],
)
def test_conversion_keeps_heads_and_norms(
    kind: dict[str, Any], options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file, and from a checkpoint whose only metadata are options."""
    import convert

    path, checkpoint, out = (tmp_path / name for name in ("a.safetensors", "a.pt", "converted"))
    model, text = write_trained(path, **kind), write_text(tmp_path, 400)
    torch.save(model.state_dict(), checkpoint)
    want = trained_loss(model, text.read_bytes())
    for arguments in ([path, out], [checkpoint, out, *CONFIGURED, *options]):
        monkeypatch.setattr(sys, "argv", ["convert.py", *map(str, arguments)])
        convert.main()
        assert abs(loss_in_c(out, text) - want) < 1e-4


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"nope": ""},
        {"nope": "0 0", "nope_rotary_dim": "8"},
        {"nope_window": "6"},
        {"nope": "0 0", "nope_window": "6"},
    ],
)
def test_files_without_nope_heads(metadata: dict[str, str], tmp_path: Path) -> None:
    """`nope` is absent, empty or 0 in all layers. Then nope_window has no effect."""
    path, text = tmp_path / "model.safetensors", write_text(tmp_path, 400)
    model = write_trained(path, 40)
    given = model.config.metadata()
    del given["nope"], given["nope_rotary_dim"]
    save_file(load_file(path), path, {**given, **metadata})
    assert abs(loss_in_c(path, text) - trained_loss(model, text.read_bytes())) < 1e-4


# ---- sampling ----


def test_bytes_are_drawn_by_their_probabilities(lm: ModuleType, write: Write) -> None:
    """The mean of -log p of the drawn bytes is the mean entropy, up to five standard errors."""
    model = write("recent")
    options = ["--temperature", "0.7", "--min-p", "0", "--bytes", "3000"]
    drawn = generate(model, b"", *options)
    assert drawn == generate(model, b"", *options, "--seed", "1")
    assert drawn != generate(model, b"", *options, "--seed", "2")
    log_p = (logits_before(lm, model, b"", drawn).double() / 0.7).log_softmax(1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(1)
    variance = (p * log_p.square()).sum(1) - entropy.square()
    surprise = -log_p.gather(1, torch.tensor([*drawn])[:, None])[:, 0]
    assert variance.mean() > 0.5
    assert abs((surprise - entropy).mean()) < 5 * (variance.mean() / len(drawn)).sqrt()


def repetitions(text: bytes, at: int) -> list[int]:
    """The bytes that followed the 24 before `at` where these occur in the 400 before it."""
    begins = range(max(0, at - 400), at - 24)
    return [text[begin + 24] for begin in begins if text[begin:at].startswith(text[at - 24 : at])]


@pytest.mark.parametrize("rule", ["--top-p", "--min-p"])
def test_unlikely_bytes_are_left_out(rule: str, lm: ModuleType, write: Write) -> None:
    model = write("recent")
    options = ["--temperature", "1", "--min-p", "0", "--bytes", "1500"]
    drawn = generate(model, b"", *options, rule, "0.5")
    p = logits_before(lm, model, b"", drawn).double().softmax(1)
    for at in range(len(drawn)):
        p[at, repetitions(drawn, at)] = 0
    p /= p.sum(1, keepdim=True)
    chosen = p.gather(1, torch.tensor([*drawn])[:, None])
    likelier = torch.where(p > chosen, p, torch.zeros_like(p)).sum(1)  # sum over likelier bytes
    ratio = (chosen / p.amax(1, keepdim=True))[:, 0]
    if rule == "--top-p":
        assert 0.4 < likelier.max() < 0.5001 and ratio.min() < 0.4
    else:
        assert 0.4999 < ratio.min() < 0.6
    every = generate(model, b"", *options[:-1], "300")
    assert len(set(every)) > len(set(drawn[:300]))


def test_a_text_does_not_repeat_itself(lm: ModuleType, write: Write) -> None:
    """Without attention a byte decides the next one, so the likeliest bytes go round."""
    path = write("recent")
    tensors, metadata = load_file(path), lm.read_model(path).metadata
    for n in range(LAYERS):
        tensors[f"blocks.{n}.attention.o_proj.weight"].zero_()
    save_file(tensors, path, metadata)
    likeliest = generate(path, b"a", "--temperature", "0", "--bytes", "1000")
    repeated = [likeliest[at] in repetitions(likeliest, at) for at in range(1000)]
    assert sum(repeated) > 500
    drawn = generate(path, b"a", "--min-p", "1", "--bytes", "1000")
    assert drawn[:24] == likeliest[:24] and len({*drawn}) > len({*likeliest})
    assert not any(drawn[at] in repetitions(drawn, at) for at in range(1000))


@pytest.mark.parametrize("rule", [["--top-p", "0"], ["--min-p", "1"], ["--temperature", "0"]])
def test_rules_that_leave_the_likeliest_byte(rule: list[str], write: Write) -> None:
    model = write("recent")
    greedy = generate(model, b"a", "--temperature", "0", "--bytes", "60")
    assert generate(model, b"a", "--bytes", "60", *rule) == greedy


# ---- reports ----


def test_the_report(write: Write) -> None:
    done = run(PROGRAM, write("recent", 8), "--prompt", "Light" * 60, "--bytes", "0")
    assert done.returncode == 0 and done.stdout == "Light" * 60
    speed, memory = done.stderr.splitlines()[-2:]
    assert speed.startswith("0 bytes in") and "weights 0.4 MB" in speed
    all_keys = 300 * LAYERS * 2 * KV_HEADS * HEAD_DIM * 4  # float32
    assert all_keys == 307_200  # 0.3 MB
    assert memory == "300 bytes read; caches 0.0 MB; all keys would take 0.3 MB"


def test_a_prompt_of_its_own(write: Write) -> None:
    assert output_of(run(PROGRAM, write("recent"), "--bytes", "0")) == "def median(values):\n"


# ---- remembering ----


class Row(NamedTuple):
    distance: int
    pair: str
    answer: str
    kept: str
    newest: str


def remember(model: Path, distance: int, *options: str) -> list[Row]:
    command = (model, "--remember", str(distance), "--prompt-file", TEXT, *options)
    _, _, _, *table, memory = output_of(run(PROGRAM, *command)).splitlines()
    assert memory.startswith(f"{distance + 15} bytes read; caches ")
    rows = [Row(int(first), *rest) for first, *rest in map(str.split, table)]
    assert [row.distance for row in rows] == [distance // part for part in (16, 4, 2, 1)]
    assert all(row.pair[4:7] == row.answer for row in rows)
    return rows


def test_answers_are_those_of_prompts(lm: ModuleType, write: Write) -> None:
    """A pair, text and a question are read as a prompt of them, with scores and without."""
    path = write("nope recent")
    rows = remember(path, 600, "--seed", "5")
    tensors, metadata = load_file(path), lm.read_model(path).metadata
    for n in range(LAYERS):
        tensors[f"blocks.{n}.attention.A"].zero_()
    newest = path.with_name("newest.safetensors")
    save_file(tensors, newest, metadata)
    for row in rows:
        text = TEXT.read_bytes()[: row.distance]
        prompt = row.pair.encode() + text + b"<" + row.pair[1:4].encode()
        for model, found in ((path, row.kept), (newest, row.newest)):
            answer = generate(model, prompt, "--temperature", "0", "--bytes", "3")
            assert found == "".join(chr(one) if 32 <= one < 127 else "?" for one in answer)
    assert len({row.pair for row in rows}) == 4 and rows != remember(path, 600)


def test_a_model_that_keeps_all_keys_has_nothing_to_show(write: Write) -> None:
    model = write("dense")
    refused = refusal(model, "--remember", "5", "--prompt-file", TEXT)
    assert refused == f"lm: --remember: is given, but the queries of {model} keep all keys\n"


def test_the_trained_model_remembers(lm: ModuleType) -> None:
    """Half of the 1,792 rows of a cache are chosen by score: a pair stays that the newest 1,792
    keys have lost."""
    near, within, far, farthest = remember(FOLDER / "model.safetensors", 7000)
    for row in (near, within, far, farthest):
        assert row.kept == row.answer
    assert near.newest == near.answer
    assert far.newest != far.answer and farthest.newest != farthest.answer


def test_steady_times(write: Write) -> None:
    """A row for each position that has 500 bytes after it."""
    command = [PROGRAM, write("window", 8), "--steady"]
    head, row = output_of(run(*command, "10499")).splitlines()
    position, microseconds, early, ratio, cache, memory = map(float, row.split())
    assert head.split()[0] == "position" and position == 1000
    assert microseconds > 0 and ratio == pytest.approx(microseconds / early, rel=0.01)
    assert memory > cache > 0
    refused = run(*command, "1499")
    assert refused.returncode == 2 and refused.stdout == ""
    assert refused.stderr == "lm: --steady: is below 1500, want bytes around position 1,000\n"


def test_the_trained_model(lm: ModuleType, tmp_path: Path) -> None:
    """Its loss in C equals PyTorch's, on unseen text that is longer than its windows."""
    model, text = FOLDER / "model.safetensors", tmp_path / "text"
    text.write_bytes((ROOT / "docs" / "algorithm.md").read_bytes()[:6000])
    found = loss_in_c(model, text, "--length", "4000")
    assert abs(found - lm.loss(lm.read_model(model), text.read_bytes(), 4000)) < 1e-4
    assert 1 < found < 4  # bits per byte; untrained models have 8


def test_the_reference_as_a_script(lm: ModuleType, write: Write, tmp_path: Path) -> None:
    model, text = write("recent", 8), write_text(tmp_path, 700)
    done = warm.python(FOLDER / "reference.py", model, text, "--length", "200")
    wanted = lm.loss(lm.read_model(model), text.read_bytes(), 200)
    assert loss_of(done) == pytest.approx(wanted, rel=1e-5)


# ---- convert.py ----


def test_conversion_to_8_bits(lm: ModuleType, write: Write, tmp_path: Path) -> None:
    """Each weight changes by at most half a step of its row; dt_proj and vectors stay the same."""
    weights = random_weights(True)
    weights["blocks.0.expand.weight"][5] = 0
    checkpoint, out = tmp_path / "checkpoint.pt", tmp_path / "model.safetensors"
    torch.save({"model": {f"_orig_mod.{name}": one for name, one in weights.items()}}, checkpoint)
    options = "--key model --head-dim 32 --window 20 --recent 12 --bits 8".split()
    printed = output_of(warm.python(FOLDER / "convert.py", checkpoint, out, *options))
    assert printed.endswith(f"{out.stat().st_size} bytes\n")
    made = lm.read_model(out)
    assert made.metadata == {
        **{"layers": "2", "width": "128", "q_heads": "4", "kv_heads": "2", "head_dim": "32"},
        **{"window": "20", "recent": "12", "sinks": "0", "bias_form": "exp"},
        **{"rotary_base": "10000", "norm_eps": "1e-05"},
    }
    assert made.weights.keys() == weights.keys()
    for name, one in weights.items():
        step = one.abs().amax(1, keepdim=True) / 127 if one.dim() == 2 else torch.zeros(())
        if name.endswith("dt_proj.weight"):
            step = torch.zeros(())
        assert ((made.weights[name] - one).abs() <= 0.5001 * step).all(), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--key model", "has no entry 'model'"),
        ("--head-dim 48", "--head-dim: is 48, want a divisor of 128 and 64"),
        ("--head-dim 32", "--window: is missing, want a number for a model with scores"),
    ],
)
def test_bad_conversions(options: str, message: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint.pt"
    torch.save(random_weights(True), checkpoint)
    done = warm.python(FOLDER / "convert.py", checkpoint, tmp_path / "out", *options.split())
    assert done.returncode == 2 and message in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


# ---- broken files and bad usage ----


def refusal(*arguments: str | Path) -> str:
    done = run(PROGRAM, *arguments)
    assert done.returncode == 2, done
    assert done.stdout == "" and done.stderr.count("\n") == 1
    return done.stderr


EXPAND = "blocks.1.expand.weight"
Q_NORM, K_NORM = "blocks.0.attention.q_norm.weight", "blocks.1.attention.k_norm.weight"
BROKEN_TENSORS = {
    "tensor 'norm.weight': is missing": ("norm.weight", None),
    "tensor 'blocks.1.attention.A': is missing": ("blocks.1.attention.A", None),
    f"tensor '{Q_NORM}': is missing": (Q_NORM, None),
    f"tensor '{K_NORM}': is missing": (K_NORM, None),
    f"tensor '{Q_NORM}': axis 0 has 128 elements, want 32": (Q_NORM, torch.ones(128)),
    f"tensor '{K_NORM}': rank is 2, want 1": (K_NORM, torch.ones(2, 32)),
    f"tensor '{EXPAND}.scale': is missing": (f"{EXPAND}.scale", None),
    f"tensor '{EXPAND}': axis 0 has 511 elements, want 512": (
        EXPAND,
        torch.zeros(511, 128, dtype=torch.int8),
    ),
    f"tensor '{EXPAND}': rank is 1, want 2": (EXPAND, torch.zeros(512, dtype=torch.int8)),
    f"tensor '{EXPAND}': dtype is F16, want F32, BF16 or I8": (
        EXPAND,
        torch.zeros(512, 128).half(),
    ),
    f"tensor '{EXPAND}.scale': axis 0 has 1 element, want 512": (f"{EXPAND}.scale", torch.ones(1)),
    f"tensor '{EXPAND}.scale': dtype is F64, want F32": (
        f"{EXPAND}.scale",
        torch.ones(512, dtype=torch.float64),
    ),
    "tensor 'norm.weight': dtype is I8, want F32 or BF16": (
        "norm.weight",
        torch.ones(128, dtype=torch.int8),
    ),
    "tensor 'blocks.0.expand.bias': is none of this model's": (
        "blocks.0.expand.bias",
        torch.zeros(512),
    ),
}


@pytest.mark.parametrize("message", BROKEN_TENSORS)
def test_broken_tensors(message: str, lm: ModuleType, write: Write) -> None:
    path = write("qk_norm", 8)
    tensors, metadata = load_file(path), lm.read_model(path).metadata
    name, changed = BROKEN_TENSORS[message]
    if changed is None:
        del tensors[name]
    else:
        tensors[name] = changed
    save_file(tensors, path, metadata)
    assert refusal(path) == f"lm: {path}: {message}\n"


BROKEN_METADATA = {
    "metadata 'layers': is '0', want an integer from 1 to 1000": {"layers": "0"},
    "metadata 'layers': is '2.5', want an integer from 1 to 1000": {"layers": "2.5"},
    "metadata 'layers': is '', want an integer from 1 to 1000": {"layers": ""},
    "tensor 'blocks.2.attention.q_proj.weight': is missing": {"layers": "3"},
    "tensor 'blocks.1.attention.A': is none of this model's": {"layers": "1"},
    "metadata 'width': is 120, want q_heads * head_dim, 128": {"width": "120"},
    "metadata 'kv_heads': is 3, want a divisor of q_heads, 4": {"kv_heads": "3"},
    "metadata 'head_dim': is 12, want a multiple of 8": {"head_dim": "12"},
    "metadata 'sinks': is '21', want an integer from 0 to 20": {"sinks": "21"},
    "metadata 'bias_form': is 'tanh', want exp, linear or none": {"bias_form": "tanh"},
    "metadata 'bias_form': is 'exp', want none for window 'all'": {"window": "all"},
    "metadata 'norm_eps': is 'nan', want a number above 0": {"norm_eps": "nan"},
    "metadata 'rotary_base': is missing": {"rotary_base": None},
    "metadata 'qk_norm': is '2', want an integer from 0 to 1": {"qk_norm": "2"},
    "metadata 'qk_norm': is '-1', want an integer from 0 to 1": {"qk_norm": "-1"},
    "metadata 'qk_norm': is '', want an integer from 0 to 1": {"qk_norm": ""},
    "metadata 'qk_norm': is 'true', want an integer from 0 to 1": {"qk_norm": "true"},
    "tensor 'blocks.0.attention.k_norm.weight': is none of this model's": {"qk_norm": None},
    "metadata 'nope': has 1 count, want one for each layer, 2": {"nope": "1"},
    "metadata 'nope': has 3 counts, want one for each layer, 2": {"nope": "0 1 2"},
    "metadata 'nope': count 1 is '3', want an integer from 0 to 2": {"nope": "0 3"},
    "metadata 'nope': count 0 is '-1', want an integer from 0 to 2": {"nope": "-1 0"},
    "metadata 'nope': count 0 is '1,', want an integer from 0 to 2": {"nope": "1, 1"},
    "metadata 'nope_rotary_dim': is 7, want an even number": {"nope_rotary_dim": "7"},
    "metadata 'nope_rotary_dim': is '34', want an integer from 0 to 32": {"nope_rotary_dim": "34"},
    "metadata 'nope_rotary_dim': is '-2', want an integer from 0 to 32": {"nope_rotary_dim": "-2"},
    "metadata 'nope_window': is '0', want an integer from 1 to 1073741823": {"nope_window": "0"},
    "metadata 'nope_window': is 'all', want an integer from 1 to 1073741823": {
        "nope_window": "all"
    },
    "metadata 'nope_window': is '4', want an integer from 5 to 1073741823": {
        **{"nope": "0 1", "nope_window": "4", "sinks": "5"}
    },
    "metadata 'nope_window': is '9', want no entry for window 'all'": {
        **{"nope_window": "9", "window": "all", "bias_form": "none"}
    },
    "metadata 'nope_recent': is '-1', want an integer from 0 to 1073741823": {"nope_recent": "-1"},
    "metadata 'nope_recent': is '9', want no entry for window 'all'": {
        **{"nope_recent": "9", "window": "all", "bias_form": "none"}
    },
}


@pytest.mark.parametrize("message", BROKEN_METADATA)
def test_broken_metadata(message: str, lm: ModuleType, write: Write) -> None:
    path = write("qk_norm")
    changed = {**lm.read_model(path).metadata, **BROKEN_METADATA[message]}
    metadata = {name: text for name, text in changed.items() if text is not None}
    save_file(load_file(path), path, metadata)
    assert refusal(path) == f"lm: {path}: {message}\n"


def test_files_of_other_kinds(tmp_path: Path, example: Path) -> None:
    assert refusal(tmp_path / "none").endswith("cannot be opened: No such file or directory\n")
    (tmp_path / "short").write_bytes(b"short")
    assert "not a safetensors file" in refusal(tmp_path / "short")
    assert refusal(example).endswith("has no __metadata__, want that of a language model\n")


BAD_USAGE = {
    "--top-p: is above 1, want a probability": "--top-p 1.5",
    "--min-p: is above 1, want a fraction": "--min-p 2",
    "--prompt-file: is given, want only one of it and --prompt": "--prompt a --prompt-file b",
    "--steady: is given, want only one of it and --loss": "--steady 5 --loss text",
    "--remember: is given, want only one of it, --loss and --steady": "--remember 5 --steady 5",
    "--remember: is given, want a text too, by --prompt-file": "--remember 5",
    "--remember: is 5, want at most 0, the bytes of empty": "--remember 5 --prompt-file empty",
    "--threads: is above 1024, want less": "--threads 1025",
    "nothing: cannot be opened: No such file or directory": "--prompt-file nothing",
    "empty: has 0 bytes, want 2 or more": "--loss empty",
}


@pytest.mark.parametrize("message", BAD_USAGE)
def test_bad_usage(message: str, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write("recent")
    monkeypatch.chdir(model.parent)
    Path("empty").touch()
    assert refusal(model, *BAD_USAGE[message].split()) == f"lm: {message}\n"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_demo_ends_with_the_model(tmp_path: Path) -> None:
    """The model's part runs only if the file exists."""
    model = tmp_path / "model.safetensors"
    make = ("make", "--no-print-directory", "-n", "demo", f"LM_MODEL={model}")
    bare = ("env", "-u", "MAKEFLAGS", "-u", "MFLAGS", *make)
    assert "examples/lm" not in output_of(run(*bare, cwd=ROOT))
    model.touch()
    *_, last = output_of(run(*bare, cwd=ROOT)).splitlines()
    assert last.startswith(f"build/examples/lm {model} --remember")
