"""The plugin for vLLM as far as it needs no vLLM. tests/vllm has the rest."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import flash_dmattn
import flash_dmattn.vllm
import pytest
import torch
from flash_dmattn import streams
from programs import ROOT, output_of, python


def test_nothing_is_imported_before_vllm_asks() -> None:
    code = "import sys, flash_dmattn.vllm; print({'vllm', 'transformers'} & {*sys.modules})"
    assert output_of(python("-c", code)).strip() == "set()"


def test_entry_point() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    entry = (
        '[project.entry-points."vllm.general_plugins"]\nflash_dmattn = "flash_dmattn.vllm:register"'
    )
    assert entry in text


@pytest.mark.parametrize("version", ["0.31.0", "0.32.1rc2", "0.32.0+cpu"])
def test_supported_versions(version: str) -> None:
    flash_dmattn.vllm.check_version(version)


@pytest.mark.parametrize("version", ["0.30.1", "0.33.0", "1.32", "0.3.2"])
def test_another_version_refuses_the_models(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pytest.importorskip("transformers")
    models: dict[str, str] = {}
    registry = SimpleNamespace(register_model=models.__setitem__)
    fake = SimpleNamespace(ModelRegistry=registry, __version__=version)
    monkeypatch.setitem(sys.modules, "vllm", fake)  # type: ignore[arg-type]
    flash_dmattn.vllm.register()
    assert models["DogeForCausalLM"] == "flash_dmattn.vllm:DogeForCausalLM"
    for name in models:
        with pytest.raises(ImportError, match=f"vllm: is {version}, want 0.31 or 0.32"):
            getattr(flash_dmattn.vllm, name)
    with pytest.raises(AttributeError, match="has no attribute 'Other'"):
        flash_dmattn.vllm.Other  # noqa: B018


@pytest.mark.parametrize("form", ["exp", "linear", "none"])
@pytest.mark.parametrize("length", [90, 200])
def test_pieces_with_scores_equal_pieces_with_weights(form: str, length: int) -> None:
    """Two pieces that enter a cache, one with given scores and one with the weights of these."""
    torch.manual_seed(length)
    weights = (torch.randn(2, 32) / 4, torch.rand(2))
    query, key, value = torch.randn(1, length, 4, 16), *torch.randn(2, 1, length, 2, 16)
    score, _ = flash_dmattn.score(value, *weights, bias_form="none")
    found, caches = [], []
    for scored in (False, True):
        cache = flash_dmattn.DynamicMaskCache(1, 1, 2, 16, 24, recent=8, bias_form=form)
        out, index = [], torch.zeros(1, dtype=torch.int32)
        for first, last in ((0, 70), (70, length)):
            rows: Any = [x[:, first:last] for x in (query, key, value)]
            given = (None, None, None) if scored else (*weights, None)
            own = score[:, :, first:last].contiguous() if scored else None
            rest: Any = (None, None, None, None, (form, 0.25, 0.0, None), own)
            carried = cache.keys if first > 0 else None
            tokens = streams.Tokens._make((*rows, given, *rest))
            out.append(streams.prefill(cache.keys, index, carried, tokens))
        found.append(torch.cat(out, 1))
        caches.append(cache.keys)
    torch.testing.assert_close(*found)  # biases differ in last bits
    for one, other in zip(*(keys[:6] for keys in caches)):
        assert torch.equal(one, other)
