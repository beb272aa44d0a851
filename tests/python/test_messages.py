"""Messages for bad input: each names the argument, and says what is wrong and what is wanted.

messages.txt lists them, for the tests and for readers. test_wrong_calls.py tries every argument of
every function.
"""

from __future__ import annotations

import functools
import math  # noqa: F401 (calls in messages.txt use it)
import os
import re
import shutil
from pathlib import Path
from typing import Any, Callable

import flash_dma
import flash_dmattn
import numpy as np  # noqa: F401 (calls in messages.txt use it)
import pytest
import torch
from flash_dmattn import _arguments, _library, ops, rotary
from programs import ROOT, Done, output_of, python, run

QUERY, KEY = (1, 6, 4, 16), (1, 6, 2, 16)
SCORE, LSE = (1, 2, 6), (1, 4, 6)
CORRECT: dict[Callable[..., Any], dict[str, Any]] = {
    flash_dmattn.attention: {"query": QUERY, "key": KEY, "value": KEY},
    flash_dmattn.attention_probabilities: {"query": QUERY, "key": KEY, "lse": LSE},
    flash_dmattn.flash_dma_attention: {
        "query": QUERY,
        "key": KEY,
        "value": KEY,
        "dt_proj": (2, 32),
        "a_coef": (2,),
    },
    flash_dma.fwd: {
        "q": QUERY,
        "k": KEY,
        "v": KEY,
        "zoh": (1, 2, 6, 6),
        "active_mask": torch.ones(1, 2, 6, 6),
    },
    flash_dmattn.flash_dmattn_func: {"q": QUERY, "k": KEY, "v": KEY},
    flash_dmattn.flash_dmattn_varlen_func: {
        "q": QUERY[1:],
        "k": KEY[1:],
        "v": KEY[1:],
        "max_seqlen_q": 4,
        "max_seqlen_k": 4,
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 2, 6]).int()),
    },
    flash_dmattn.score: {"value": KEY, "dt_proj": (2, 32), "a_coef": (2,)},
    flash_dmattn.select: {"score": SCORE, "window": 3},
    flash_dmattn.lifetime_loss: {
        **{"query": QUERY, "key": KEY, "value": KEY, "log_lifetime": SCORE},
        **{"predict": lambda out, _: out.flatten(2), "keys": 3, "progress": 0.5},
    },
    flash_dmattn.merge: {"out_a": QUERY, "lse_a": LSE, "out_b": QUERY, "lse_b": LSE},
    rotary.rotate: {
        "x": QUERY,
        "table": rotary.rotary_table(9, 8, first=2),
        "first": 2,
        "offset": 2,
    },
}


def randn(*shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(shape, **options)


def wrong(function: Callable[..., Any], **changes: Any) -> Any:
    """A correct call, except for `changes`."""
    given = {
        name: randn(*one) if isinstance(one, tuple) else one
        for name, one in CORRECT[function].items()
    }
    return function(**{**given, **changes})


attend = functools.partial(wrong, flash_dmattn.attention)
probabilities = functools.partial(wrong, flash_dmattn.attention_probabilities)
fused = functools.partial(wrong, flash_dmattn.flash_dma_attention)
score = functools.partial(wrong, flash_dmattn.score)
select = functools.partial(wrong, flash_dmattn.select)
lifetime = functools.partial(wrong, flash_dmattn.lifetime_loss)
masked = functools.partial(wrong, flash_dmattn.flash_dmattn_func)
fwd = functools.partial(wrong, flash_dma.fwd)
varlen = functools.partial(wrong, flash_dmattn.flash_dmattn_varlen_func)
merge = functools.partial(wrong, flash_dmattn.merge)
rotate = functools.partial(wrong, rotary.rotate)
rotary_table = rotary.rotary_table
layer = flash_dmattn.DynamicMaskAttention
multihead = flash_dmattn.MultiheadAttention
plan = functools.partial(flash_dmattn.HybridPlan, hidden=48, layers=3, heads=6, kv_heads=2)
new_cache, layer_caches = flash_dmattn.DynamicMaskCache, flash_dmattn.LayerCaches
TOKENS = {"query": (1, 3, 4, 16), "key": (1, 3, 2, 16), "value": (1, 3, 2, 16)}
WEIGHTS = {"dt_proj": (2, 32), "a_coef": (2,)}


def filled(**changes: Any) -> dict[str, Any]:
    """Three tokens of one sequence and their weights, except for `changes`."""
    shapes = {**TOKENS, **WEIGHTS}
    return {**{name: randn(*shape) for name, shape in shapes.items()}, **changes}


def decode(**changes: Any) -> Any:
    given = {"cache": new_cache(1, 1, 2, 16, 4, recent=2).keys, **filled(), **changes}
    return flash_dmattn.decode(**given)


def drafts(layers: int = 1, **changes: Any) -> flash_dmattn.DynamicMaskCache:
    """A cache with three drafts in its first layer."""
    cache = new_cache(layers, 1, 2, 16, 4, recent=2)
    cache.attend(0, **filled(**changes), draft=True)
    return cache


def step(**changes: Any) -> Any:
    """Three tokens in a cache without drafts."""
    given = {"layer": 0, **filled(), **changes}
    return new_cache(1, 1, 2, 16, 4, recent=2).attend(**given)


def two_layers() -> Any:
    return new_cache(2, 2, 2, 16, 4)


def loss(**changes: Any) -> Any:
    given = {**filled(), "recent": 1, **changes}
    given.pop("a_coef")
    return flash_dmattn.score_target_loss(**given)


def workspace_of(**changes: Any) -> Any:
    limits = flash_dmattn.DynamicMaskOptions(max_sequence_length=8, max_batch_size=1)
    return flash_dmattn.workspace_bytes(**{"options": limits, **filled(), **changes})


def nested(*lengths: int) -> torch.Tensor:
    """Sequences of these lengths and of 32 channels."""
    return torch.nested.nested_tensor([randn(one, 32) for one in lengths], layout=torch.jagged)


def count_of(number: int) -> torch.Tensor:
    return torch.tensor([number], dtype=torch.int32)


def read_messages() -> list[tuple[str, str]]:
    """Pairs of a call and the exception that it raises."""
    text = (Path(__file__).parent / "messages.txt").read_text()
    pairs = re.findall(r"^(\w.*)\n    (\w+: .*)$", text, re.MULTILINE)
    assert len(pairs) > 60
    assert 2 * len(pairs) == sum(bool(x) and x[0] != "#" for x in text.splitlines())
    return pairs


MESSAGES = read_messages()


@pytest.mark.parametrize(("call", "expected"), MESSAGES, ids=[call for call, _ in MESSAGES])
def test_message(call: str, expected: str) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011, B017 (its type is compared)
        eval(call)
    found = f"{type(raised.value).__name__}: {raised.value}"
    backends = ", ".join(map(repr, flash_dmattn.get_available_backends()))
    assert found == expected.replace("{backends}", backends)


@pytest.mark.parametrize("function", CORRECT)
def test_correct_calls(function: Callable[..., Any]) -> None:
    wrong(function)


@pytest.mark.parametrize("head_dim", [0, 260, 264])
def test_head_dim(head_dim: int) -> None:
    tensors = {name: randn(1, 6, 2, head_dim) for name in ("query", "key", "value")}
    with pytest.raises(NotImplementedError, match=rf"head_dim: is {head_dim}, supported: mult"):
        attend(**tensors)


def test_float64_is_for_the_reference_alone() -> None:
    shapes = CORRECT[flash_dmattn.attention]
    tensors = {name: randn(*shape).double() for name, shape in shapes.items()}
    attend(**tensors)
    attend(**tensors, backend="reference")
    with pytest.raises(NotImplementedError, match="float64"):
        attend(**tensors, backend="cpu")


def test_sinks_above_the_window_under_the_name_of_the_window() -> None:
    """Compiled graphs ask in this way: their numbers are symbols that Python does not check."""
    query, key, value = torch.randn(1, 8, 2, 8), *torch.randn(2, 1, 8, 1, 8)
    rules = (7, 0, 9, "causal")
    options = (*6 * [None], *rules, "exp", True, 0.0, 0.0, 0.0, 0.0, False, None)
    with pytest.raises(ValueError, match=r"^sinks: is 9, want 0 to keep_window_size, 7$"):
        ops.FUSED.op(query, key, value, torch.randn(1, 8), torch.ones(1), *options)


def test_a_selection_has_no_gradient() -> None:
    expiry, slot, *_ = select(score=randn(*SCORE, requires_grad=True))
    assert not expiry.requires_grad and not slot.requires_grad


def test_cuda_tensors_without_cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "has_cuda", lambda: False)
    on_device = type("OnDevice", (), {"device": torch.device("cuda:0")})()
    with pytest.raises(NotImplementedError) as raised:
        _arguments.check_devices({"query": on_device})
    assert str(raised.value) == (
        "query: is on cuda:0, but this build of flash_dmattn has no CUDA kernels; "
        "install it anew where nvcc is found: FDMA_CUDA=ON pip install ."
    )
    other = type("OnCpu", (), {"device": torch.device("cpu")})()
    with pytest.raises(ValueError) as raised:
        _arguments.check_devices({"query": on_device, "expiry": other})
    assert str(raised.value) == "selection.expiry: is on cpu, want cuda:0, where query is"


def test_cuda_by_name_without_cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [one for one in _library.kernels() if not one.name.startswith("cuda/")]
    monkeypatch.setattr(_library, "kernels", lambda: kernels)
    with pytest.raises(NotImplementedError) as raised:
        attend(backend="cuda")
    assert str(raised.value) == (
        "backend: is 'cuda', but this build of flash_dmattn has no CUDA kernels; "
        "install it anew where nvcc is found: FDMA_CUDA=ON pip install ."
    )


def test_tables_without_cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "has_cuda", lambda: False)
    for device in ("cuda", "cuda:0", torch.device("cuda")):
        with pytest.raises(NotImplementedError) as raised:
            rotary_table(5, 8, device=device)
        assert str(raised.value) == (
            f"device: is {device}, but this build of flash_dmattn has no CUDA kernels; "
            "install it anew where nvcc is found: FDMA_CUDA=ON pip install ."
        )


def test_a_device_without_kernels() -> None:
    """The meta device has only shapes."""
    shapes = CORRECT[flash_dmattn.flash_dma_attention]
    out = fused(**{name: randn(*shape, device="meta") for name, shape in shapes.items()})
    assert out.device.type == "meta" and out.shape == QUERY


def import_package(folder: Path, library: Path | None) -> Done:
    path = {"PYTHONPATH": str(folder), "FDMA_LIBRARY": library and str(library)}
    return python("-c", "import flash_dmattn", env=path)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder that holds a copy of the package, without a library."""
    ignored = shutil.ignore_patterns("*.so", "*.dylib", "__pycache__")
    shutil.copytree(ROOT / "python" / "flash_dmattn", tmp_path / "flash_dmattn", ignore=ignored)
    shutil.copy(ROOT / "include" / "fdma.h", tmp_path / "flash_dmattn")
    return tmp_path


@pytest.mark.parametrize(
    ("library", "words"),
    [
        (None, "ImportError: no library at .*; set FDMA_LIBRARY to where libfdma.so is"),
        ("nothing.so", "ImportError: FDMA_LIBRARY is .*nothing.so', which is not a file"),
        ("other.so", "ImportError: .*other.so cannot be used: .*"),
        ("old.so", r"ImportError: \S*old.so lacks fdma_\w+\(\): it is of another version than .*"),
    ],
)
def test_no_library(library: str | None, words: str, package: Path) -> None:
    (package / "other.so").write_text("not a library")
    source = 'const char *fdma_version(void) { return "0.1.0"; }'
    output_of(run("cc", "-shared", "-fPIC", "-xc", "-", "-o", package / "old.so", input=source))
    done = import_package(package, library and package / library)
    assert done.returncode == 1
    assert re.fullmatch(words, done.stderr.splitlines()[-1])


def test_the_library_in_the_package_is_found(package: Path) -> None:
    shutil.copy(os.environ["FDMA_LIBRARY"], package / "flash_dmattn" / "libfdma.so")
    output_of(import_package(package, None))


def test_no_header(package: Path) -> None:
    (package / "flash_dmattn" / "fdma.h").unlink()
    done = import_package(package, os.environ["FDMA_LIBRARY"])
    words = "ImportError: no header at .*/flash_dmattn/fdma.h; install the package anew"
    assert done.returncode == 1 and re.fullmatch(words, done.stderr.splitlines()[-1])
