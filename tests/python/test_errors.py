"""Bad input is an exception that names the argument, its value and what was wanted."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import flash_dmattn
import pytest
import torch
from flash_dmattn import _library


def randn(*shape: int, **options: Any) -> torch.Tensor:  # noqa: ANN401
    return torch.randn(shape, **options)


QUERY = (1, 6, 4, 16)
KEY = (1, 6, 2, 16)


def attend(**changes: Any) -> None:  # noqa: ANN401
    """A call that is right but for `changes`."""
    given = {"query": randn(*QUERY), "key": randn(*KEY), "value": randn(*KEY)}
    flash_dmattn.attention(**{**given, **changes})


ATTENTION_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"key": randn(1, 7, 2, 16)}, ValueError, r"v: axis 1 has 6 elements, want 7"),
    ({"value": randn(1, 6, 2, 24)}, ValueError, r"v: axis 3 has 24 elements, want 16"),
    ({"query": randn(2, 6, 4, 16)}, ValueError, r"k: axis 0 has 1 elements, want 2"),
    ({"query": randn(1, 6, 3, 16)}, ValueError, r"q_heads: is 3, want a multiple of kv_heads, 2"),
    ({"query": randn(6, 4, 16)}, ValueError, r"q: rank is 3, want 4"),
    ({"key": randn(6, 2, 16)}, ValueError, r"k: rank is 3, want 4"),
    ({"key": randn(1, 1, 6, 2, 16)}, ValueError, r"k: rank is 5, want"),
    ({"bias": torch.zeros(1, 4, 6)}, ValueError, r"bias: axis 1 has 4 elements, want 2"),
    ({"bias": torch.tensor(0.0)}, ValueError, r"bias: rank is 0, want"),
    ({"key_valid": torch.ones(1, 5).bool()}, ValueError, r"key_valid: axis 1 has 5 .*want 6"),
    ({"key_valid": torch.ones(1, 6)}, NotImplementedError, r"key_valid: dtype is float32.*uint8"),
    ({"key_valid": torch.ones(1, 6).long()}, NotImplementedError, r"key_valid: dtype is .*int64"),
    ({"bias": torch.zeros(1, 2, 6).half()}, NotImplementedError, r"bias: dtype is float16"),
    ({"key": randn(*KEY).half()}, NotImplementedError, r"k: dtype is float16.*float32"),
    ({"query": randn(*QUERY).int()}, NotImplementedError, r"q: dtype is int32"),
    ({"softcap": -1.0}, ValueError, r"softcap: is -1, want"),
    ({"softcap": math.nan}, ValueError, r"softcap: is -?nan, want"),
    ({"softmax_scale": -0.5}, ValueError, r"scale: is -0.5, want"),
    ({"softmax_scale": math.nan}, ValueError, r"scale: is -?nan, want"),
    ({"softmax_scale": 0.0}, ValueError, r"softmax_scale: is 0, want a positive number"),
    ({"backend": "gpu"}, NotImplementedError, r"no kernel is named gpu, there are .*reference"),
    ({"backend": "cpu/"}, NotImplementedError, r"no kernel is named cpu/"),
]


@pytest.mark.parametrize(("changes", "exception", "message"), ATTENTION_ERRORS)
def test_attention(changes: dict[str, Any], exception: type[Exception], message: str) -> None:
    attend()
    with pytest.raises(exception, match=message):
        attend(**changes)


@pytest.mark.parametrize("head_dim", [4, 12, 260, 264])
def test_head_dim(head_dim: int) -> None:
    with pytest.raises(
        NotImplementedError, match=rf"head_dim: is {head_dim}, supported: multiples"
    ):
        attend(**{name: randn(1, 6, 2, head_dim) for name in ("query", "key", "value")})


def test_float64_is_for_the_reference_alone() -> None:
    tensors = {name: randn(*KEY, dtype=torch.float64) for name in ("query", "key", "value")}
    attend(**tensors)
    attend(**tensors, backend="reference")
    with pytest.raises(NotImplementedError, match="float64"):
        attend(**tensors, backend="cpu")


def test_a_selection_for_something_else() -> None:
    right = flash_dmattn.select(torch.randn(1, 2, 6), 3)
    attend(selection=right, causal=True)
    with pytest.raises(ValueError, match="selection: its scope is causal, want global"):
        attend(selection=right)
    with pytest.raises(ValueError, match="selection: was made for kv_len 5, want 6"):
        attend(selection=flash_dmattn.select(torch.randn(1, 2, 5), 3), causal=True)
    with pytest.raises(ValueError, match="expiry: axis 1 has 1 elements, want 2"):
        attend(selection=flash_dmattn.select(torch.randn(1, 1, 6), 3), causal=True)
    with pytest.raises(ValueError, match="its window is -3, want 1 or more"):
        attend(selection=right._replace(window=-3), causal=True)
    with pytest.raises(ValueError, match="scope: is 'local', want one of 'causal', 'global'"):
        attend(selection=right._replace(scope="local"), causal=True)
    with pytest.raises(NotImplementedError, match="expiry: dtype is uint8, supported: int32"):
        attend(selection=right._replace(expiry=right.expiry.byte()), causal=True)


def test_more_queries_than_keys_under_causal_scope() -> None:
    selection = flash_dmattn.select(torch.randn(1, 2, 6), 3)
    with pytest.raises(ValueError, match="q_len: is 7, want at most kv_len, 6"):
        attend(query=randn(1, 7, 4, 16), selection=selection, causal=True)


def test_a_selection_made_by_hand() -> None:
    """What the front end never does: a selection without its scope, and no workspace."""
    q = torch.zeros(1, 1, 1, 8)
    expiry = torch.ones(1, 1, 1, dtype=torch.int32)

    def view(tensor: torch.Tensor, dtype: int) -> _library.Tensor:
        shape = (ctypes.c_int64 * tensor.dim())(*tensor.shape)
        return _library.library.fdma_dense_tensor(tensor.data_ptr(), dtype, tensor.dim(), shape)

    rows = view(q, _library.FLOAT32)
    selection = _library.Selection(expiry=view(expiry, _library.INT32), window=3, kv_len=1)
    args = _library.ForwardArgs(
        q=rows,
        k=rows,
        v=rows,
        out=view(torch.zeros_like(q), _library.FLOAT32),
        selection=ctypes.pointer(selection),
        causal=1,
    )
    with pytest.raises(ValueError, match="selection: its scope is 0, want FDMA_SCOPE_CAUSAL"):
        _library.check(_library.library.fdma_forward(ctypes.byref(args)))
    selection.scope = _library.SCOPES["causal"]
    with pytest.raises(RuntimeError, match=r"workspace_size: is 0 bytes, want \d+"):
        _library.check(_library.library.fdma_forward(ctypes.byref(args)))
    args.out = rows
    with pytest.raises(ValueError, match="out: .*shares"):
        _library.check(_library.library.fdma_forward(ctypes.byref(args)))


def test_select() -> None:
    score = torch.randn(1, 2, 6)
    with pytest.raises(ValueError, match="window: is -1, want 1 or more"):
        flash_dmattn.select(score, -1)
    with pytest.raises(ValueError, match="score: rank is 2, want 3"):
        flash_dmattn.select(score[0], 1)
    with pytest.raises(ValueError, match="scope: is 'local', want one of 'causal', 'global'"):
        flash_dmattn.select(score, 1, scope="local")
    with pytest.raises(NotImplementedError, match="score: dtype is float16, supported: float32"):
        flash_dmattn.select(score.half(), 1)
    with pytest.raises(ValueError, match="key_valid: axis 1 has 7 elements, want 6"):
        flash_dmattn.select(score, 1, key_valid=torch.ones(1, 7).bool())
    with pytest.raises((TypeError, RuntimeError), match="window|int"):
        flash_dmattn.select(score, 1.5)
    with pytest.raises((TypeError, RuntimeError, OverflowError), match=r"(?i)overflow|window|int"):
        flash_dmattn.select(score, 1 << 64)


def test_score() -> None:
    value, dt_proj, a_coef = randn(*KEY), randn(2, 32), randn(2)
    flash_dmattn.score(value, dt_proj, a_coef)
    with pytest.raises(ValueError, match="dt_proj: axis 1 has 16 elements, want 32"):
        flash_dmattn.score(value, dt_proj[:, :16], a_coef)
    with pytest.raises(ValueError, match="a: axis 0 has 1 elements, want 2"):
        flash_dmattn.score(value, dt_proj, a_coef[:1])
    with pytest.raises(ValueError, match="bias_form: is 'square', want one of 'exp', 'linear'"):
        flash_dmattn.score(value, dt_proj, a_coef, bias_form="square")
    with pytest.raises(NotImplementedError, match="dt_proj: dtype is float16"):
        flash_dmattn.score(value, dt_proj.half(), a_coef)
    with pytest.raises(ValueError, match="v: rank is 3, want 4"):
        flash_dmattn.score(value[0], dt_proj, a_coef)


def fused(**changes: Any) -> torch.Tensor:  # noqa: ANN401
    given = {
        "query": randn(*QUERY),
        "key": randn(*KEY),
        "value": randn(*KEY),
        "dt_proj": randn(2, 32),
        "a_coef": randn(2),
    }
    return flash_dmattn.flash_dma_attention(**{**given, **changes})


FUSED_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dropout_p": 0.1}, NotImplementedError, "dropout_p: is 0.1; dropout is not implemented"),
    ({"dropout_p": 1.0}, ValueError, r"dropout_p: is 1.0, want a number in \[0, 1\)"),
    ({"dropout_p": -0.1}, ValueError, "dropout_p: is -0.1, want"),
    ({"dropout_p": math.nan}, ValueError, "dropout_p: is nan, want"),
    ({"return_attn_probs": True}, NotImplementedError, "return_attn_probs: "),
    ({"keep_window_size": 0}, ValueError, "window: is 0, want 1 or more"),
    ({"softmax_scale": -1.0}, ValueError, "scale: is -1, want"),
    ({"dt_proj": randn(2, 16)}, ValueError, "dt_proj: axis 1 has 16 elements, want 32"),
    ({"key": randn(1, 6, 3, 16)}, ValueError, r"(q_heads|k|dt_proj|a): "),
    ({"query": randn(1, 7, 4, 16), "causal": True}, ValueError, "q_len: is 7, want at most"),
    ({"query": randn(6, 4, 16)}, ValueError, "q: rank is 3, want 4"),
]


@pytest.mark.parametrize(("changes", "exception", "message"), FUSED_ERRORS)
def test_flash_dma_attention(
    changes: dict[str, Any], exception: type[Exception], message: str
) -> None:
    fused()
    with pytest.raises(exception, match=message):
        fused(**changes)


def test_second_derivatives_say_that_they_are_missing() -> None:
    value = randn(*KEY, requires_grad=True)
    score, bias = flash_dmattn.score(value, randn(2, 32), randn(2))
    selection = flash_dmattn.select(score, 3)
    assert not selection.expiry.requires_grad and not selection.slot.requires_grad
    part = flash_dmattn.attention(randn(*QUERY), randn(*KEY), value)
    results = {"score": bias, "attention": part[0], "merge": flash_dmattn.merge(*part, *part)[0]}
    results["flash_dma_attention"] = fused(value=value)
    for name, result in results.items():
        inputs = part if name == "merge" else (value,)
        gradient = torch.autograd.grad(result.square().sum(), inputs, create_graph=True)[0]
        message = f"flash_dmattn.{name}: second derivatives are not implemented"
        with pytest.raises(NotImplementedError, match=message):
            gradient.sum().backward()
    assert value.grad is None


def test_a_device_without_kernels() -> None:
    """Tensors of a device that holds no numbers give shapes; no other device has kernels."""
    out = fused(**{name: randn(*QUERY, device="meta") for name in ("query", "key", "value")})
    assert out.device.type == "meta" and out.shape == QUERY


def import_package(environment: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    kept = {name: text for name, text in os.environ.items() if name != "FDMA_LIBRARY"}
    return subprocess.run(
        [sys.executable, "-c", "import flash_dmattn"],
        env={**kept, "PYTHONPATH": str(folder), **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def package(root: Path, tmp_path: Path) -> Path:
    """A folder that holds a copy of the package, without a library beside it."""
    ignored = shutil.ignore_patterns("*.so", "*.dylib", "__pycache__")
    shutil.copytree(root / "python" / "flash_dmattn", tmp_path / "flash_dmattn", ignore=ignored)
    return tmp_path


def test_no_library(package: Path) -> None:
    found = import_package({}, package)
    assert found.returncode == 1
    last_line = found.stderr.splitlines()[-1]
    assert last_line.startswith("ImportError: no library at ") and "FDMA_LIBRARY" in last_line


def test_fdma_library_is_not_a_file(package: Path) -> None:
    found = import_package({"FDMA_LIBRARY": str(package / "nothing.so")}, package)
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1].endswith("nothing.so', which is not a file")


def test_fdma_library_is_something_else(package: Path) -> None:
    other = package / "other.so"
    other.write_text("not a library")
    found = import_package({"FDMA_LIBRARY": str(other)}, package)
    assert found.returncode == 1
    assert "ImportError" in found.stderr.splitlines()[-1] and "cannot be used" in found.stderr


def test_the_library_beside_the_package_is_found(package: Path) -> None:
    beside = package / "flash_dmattn" / "libfdma.so"
    shutil.copy(os.environ["FDMA_LIBRARY"], beside)
    found = import_package({}, package)
    assert found.returncode == 0, found.stderr
