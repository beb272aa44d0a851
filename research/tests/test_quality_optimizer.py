"""research/quality*.py: Muon, and models whose queries and keys are normalized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import quality_model
import quality_optimizer
import torch
from quality_cases import KEYS, RECENT, model_of, refusal_of, train, weights
from torch import nn

pytestmark = pytest.mark.usefixtures("few_measurements")
SHAPES = ((48, 48), (24, 48), (48, 48), (96, 48), (24, 48), (48, 96), (24, 48))
BOTH = ["--optimizer=muon", "--qk-norm"]


def test_muon_is_that_of_pytorch() -> None:
    """With matrices of several shapes, and one without a gradient in the second step."""
    generator = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, int]) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    own = [nn.Parameter(random(shape)) for shape in SHAPES]
    theirs = [nn.Parameter(one.detach().clone()) for one in own]
    group = {"weight_decay": 0.3, "factor": 1.0}
    muon = quality_optimizer.Muon([{"params": own, **group}], 0.01)
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("PyTorch before 2.9: no Muon")
    reference = torch.optim.Muon(
        [{"params": theirs, **group}], lr=0.01, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(3):
        before = [one.detach().clone() for one in own]
        for number, (a, b) in enumerate(zip(own, theirs)):
            has_gradient = step != 1 or number != 2
            a.grad = random(a.shape) if has_gradient else None
            b.grad = a.grad.clone() if has_gradient else None
        muon.step()
        reference.step()
        for a, b, was in zip(own, theirs, before):
            assert (a - b).norm() <= 0.01 * (b - was).norm()
    assert not any(torch.equal(a, was) for a, was in zip(own, before))


@pytest.mark.parametrize("form", ["dense", "recent"])
@pytest.mark.parametrize("nope", [(), (0, 1)])
def test_normalized_queries_and_keys(form: str, nope: tuple[int, ...], tmp_path: Path) -> None:
    """Their lengths have no effect, but their gains do; also in a model read from a file."""
    window = None if form == "dense" else KEYS
    sizes = {"layers": 2, "q_heads": 4, "kv_heads": 2, "nope": nope}
    config = quality_model.Config(window=window, recent=RECENT, qk_norm=True, **sizes)
    model = quality_model.Model(config)
    quality_model.initialise(model, form, 0, 1.0, 0.5)
    quality_model.save(model, tmp_path / "model.safetensors")
    again = quality_model.load(tmp_path / "model.safetensors")
    assert again.config == config
    text = torch.randint(256, (1, 100), generator=torch.Generator().manual_seed(1))
    logits = again(text)
    for attention in model.attentions():
        attention.q_proj.weight.data *= 30
        attention.k_proj.weight.data *= 20
    torch.testing.assert_close(model(text), logits, rtol=0, atol=2e-3)
    for number in (0, 1):
        for name in ("q_norm", "k_norm"):
            gain = getattr(model.attentions()[number], name).weight.data
            gain *= 10
            assert (model(text) - logits).abs().max() > 0.01
            gain /= 10


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_matrices_of_muon_have_their_own_rate(corpus: Path, tmp_path: Path, rate: float) -> None:
    train(corpus, tmp_path, "recent", "--optimizer=muon", hidden_rate=rate, weights="float32")
    file = tmp_path / "recent-tiny-0.safetensors"
    later = quality_model.load(file).state_dict()
    first = model_of("recent", dt_std=quality_model.STD).state_dict()
    for name, one in first.items():
        is_hidden = one.dim() == 2 and name.startswith("blocks.") and "dt_proj" not in name
        assert torch.equal(one, later[name]) == (is_hidden and rate == 0), name


def test_a_resumed_run_with_muon(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(corpus, tmp_path, "recent", *BOTH, name="whole")
    train(corpus, tmp_path, "recent", *BOTH, name="halves", steps=2)
    log = train(corpus, tmp_path, "recent", *BOTH, "--resume", name="halves")
    assert log["model"]["qk_norm"] == "1" and log["settings"]["optimizer"] == "muon"
    whole, halves = (weights(tmp_path, name) for name in ("whole", "halves"))
    for name, one in whole.items():
        torch.testing.assert_close(halves[name], one, rtol=0, atol=0)
    given: dict[str, Any] = {"name": "halves", "steps": 6}
    flags = ["--resume", "--qk-norm"]
    message = refusal_of(capsys, corpus, tmp_path, "recent", *flags, **given)
    assert "halves.pt: optimizer is muon, want adamw" in message
    flags = [*BOTH, "--resume", "--hidden-rate=3"]
    message = refusal_of(capsys, corpus, tmp_path, "recent", *flags, **given)
    assert "halves.pt: hidden_rate is 1.0, want 3.0" in message
    measured = train(corpus, tmp_path, "recent", "--evaluate", "--qk-norm", name="halves")
    assert measured["final"]["bits"] == log["final"]["bits"]


@pytest.mark.parametrize("found, wanted", [("1", "0"), ("0", "1")])
def test_files_with_other_normalization(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], found: str, wanted: str
) -> None:
    flags = {"0": [], "1": ["--qk-norm"]}
    train(corpus, tmp_path, "recent", *flags[found])
    start = {"start": tmp_path / "recent-tiny-0.safetensors", "name": "other"}
    message = refusal_of(capsys, corpus, tmp_path, "recent", *flags[wanted], **start)
    assert f"qk_norm is '{found}', want '{wanted}'" in message
