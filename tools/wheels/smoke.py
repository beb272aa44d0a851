#!/usr/bin/env python3
"""Smoke test of a wheel, with a Python that has PyTorch.

    smoke.py [--device cuda]                  of the package that is installed
    smoke.py [--device cuda] --wheel WHEEL    installs WHEEL in a new folder first

It makes calls, their gradients and a cache, without a compiler on PATH, and compares them with an
evaluation in float64. It runs the command `fdma` and, where JAX and libfdma_jax are, a call in JAX;
where cmake and a C compiler are on PATH, C programs against the files in the wheel. With --device
cuda the test fails unless the package's CUDA kernels run. With --wheel the seconds from the
start of pip to the first result are printed, on the CPU and on the device. The last line begins
with "passed"; the exit status is 1 if anything fails.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

USE_C = Path(__file__).resolve().parents[2] / "tests" / "install"
COMPILERS = ("cc", "gcc", "clang")
BARS = {"cpu": 10, "cuda": 20}  # seconds from the start of pip to the first result
WINDOW, RECENT = 24, 8


def run(*command: object, **variables: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
    )
    if done.returncode != 0:
        raise SystemExit(f"{command} gave {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def evaluate(torch: Any, given: list[Any], keeps: Any) -> tuple[Any, Any]:
    """Attention of each query over the keys that it keeps [batch, kv_heads, q_len, kv_len], in the
    dtype of `given`: query, key, value, weights. Also the gradients of the weighted sum."""
    query, key, value, weights = given
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    groups = query.shape[2] // key.shape[2]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    k, v, keeps = (x.repeat_interleave(groups, 1) for x in (k, v, keeps))
    logits = q @ k.transpose(2, 3) * query.shape[3] ** -0.5
    out = (logits.masked_fill(~keeps, -torch.inf).softmax(-1) @ v).transpose(1, 2)
    return out.detach(), torch.autograd.grad(out, leaves, weights)


def compare(torch: Any, what: str, found: Any, exact: Any, plain: Any) -> None:
    """At most twice the error of a plain evaluation, and a step of rounding."""
    step = torch.finfo(found.dtype).eps * exact.abs().max().item()
    error, usual = ((x.double() - exact).abs().max().item() for x in (found, plain))
    assert error <= 2 * usual + step, f"{what}: error {error}, of a plain evaluation {usual}"


def kept_keys(torch: Any, selection: Any, length: int) -> Any:
    place = torch.arange(length, device=selection.expiry.device)
    return (place <= place[:, None]) & (place[:, None] < selection.expiry[:, :, None])


def inputs(torch: Any, device: str, length: int) -> tuple[list[Any], Any]:
    """query, key, value and weights of the result; integers as scores."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    make = {"device": device, "dtype": dtype}
    heads = (4, 2, 2, 4)
    given = [torch.randn(2, length, count, 64, **make) for count in heads]
    return given, torch.randint(50, (2, 2, length), device=device).float()


def check_calls(torch: Any, flash_dmattn: Any, device: str) -> None:
    """Results and gradients with all keys, and with the keys of a selection."""
    given, scores = inputs(torch, device, 300)
    *tensors, weights = given
    for x in tensors:
        x.requires_grad_()
    for window, recent in ((300, 0), (WINDOW, RECENT)):
        selection = flash_dmattn.select(scores, window, recent=recent)
        keeps = kept_keys(torch, selection, 300)
        assert keeps.sum(-1).max() == min(300, window + recent)
        out, _ = flash_dmattn.attention(*tensors, selection=selection, causal=True)
        gradients = torch.autograd.grad(out, tensors, weights)
        exact = evaluate(torch, [x.double() for x in given], keeps)
        plain = evaluate(torch, given, keeps)
        compare(torch, "out", out.detach(), exact[0], plain[0])
        for name, *three in zip(("dq", "dk", "dv"), gradients, exact[1], plain[1]):
            compare(torch, name, *three)
    learned = [torch.randn(2, 128, device=device) / 12, torch.ones(2, device=device)]
    fused = [*tensors, *(x.requires_grad_() for x in learned)]
    out = flash_dmattn.flash_dma_attention(*fused, keep_window_size=32, causal=True)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out, fused, weights))


def check_cache(torch: Any, flash_dmattn: Any, device: str) -> None:
    """A prompt, tokens one by one and a piece have the results of the whole sequence."""
    given, scores = inputs(torch, device, 120)
    cache = flash_dmattn.DynamicMaskCache(
        1, 2, 2, 64, WINDOW, recent=RECENT, bias_form="none", dtype=given[0].dtype, device=device
    )
    outs, at = [], 0
    with torch.no_grad():
        for count in (70, *[1] * 30, 20):
            here = slice(at, at + count)
            three = [x[:, here] for x in given[:3]]
            outs.append(cache.attend(0, *three, score=scores[..., here]))
            at += count
    keeps = kept_keys(torch, flash_dmattn.select(scores, WINDOW, recent=RECENT), 120)
    exact, _ = evaluate(torch, [x.double() for x in given], keeps)
    plain, _ = evaluate(torch, given, keeps)
    compare(torch, "cache", torch.cat(outs, 1), exact, plain)


def device_functions(torch: Any, call: Any) -> set[str]:
    """The names of the functions that run on the device during a call."""
    activities = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activities.CPU, activities.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return {event.name for event in profile.events() if event.device_type == on_device}


def check_kernels(torch: Any, flash_dmattn: Any) -> str:
    """Fails unless CUDA kernels of this wheel run on the device; returns their names."""
    found = json.loads(run(sys.executable, "-m", "flash_dmattn", "info", "--json"))
    assert found["built_with_cuda"], "the library of this wheel has no CUDA kernels"
    assert len(found["devices"]) > 1, "the library finds no CUDA device"
    chosen = [found["devices"][1][name]["bf16"] for name in ("forward", "backward")]
    tuned = torch.cuda.get_device_capability() == (9, 0)
    start = "cuda/sm90" if tuned else "cuda/"
    assert all(name and name.startswith(start) for name in chosen), f"{chosen}, want {start}"
    x = torch.randn(1, 1024, 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def call() -> None:
        out, _ = flash_dmattn.attention(x, x, x, causal=True, backend="cuda")
        out.sum().backward()

    call()
    names = device_functions(torch, call)
    ours = [x for x in sorted(names) if not re.search("at::|at_cuda_detail|Memcpy|Memset", x)]
    print(f"on the device: {', '.join(ours)}", flush=True)
    if not names:  # not even of sum()
        return f"{' '.join(chosen)} (the profiler sees no functions)"
    assert len(ours) >= 2, f"on the device run {names}, want attention and its gradient"
    return " ".join(chosen)


def check_jax(torch: Any, flash_dmattn: Any, device: str) -> str:
    """A call in JAX, bit for bit as in PyTorch, and its gradient."""
    try:
        import jax
    except ImportError:
        return "no JAX"
    try:
        flash_dmattn._library.find("FDMA_JAX_LIBRARY", "libfdma_jax")
    except ImportError:
        return "no libfdma_jax"
    import flash_dmattn.jax as ours
    import jax.numpy as jnp

    (*given, _), _ = inputs(torch, device, 300)
    given += [torch.randn(2, 128, device=device) / 12, torch.ones(2, device=device)]
    options = {"keep_window_size": WINDOW, "recent": RECENT, "causal": True}
    wanted = flash_dmattn.flash_dma_attention(*given, **options).float().cpu().numpy()

    def call(*arrays: Any) -> Any:
        return ours.flash_dma_attention(*arrays, **options)

    where = jax.devices("gpu" if device == "cuda" else "cpu")[0]
    with jax.default_device(where):
        arrays = []
        for x in given:
            dtype = getattr(jnp, str(x.dtype).rpartition(".")[2])
            arrays.append(jnp.asarray(x.float().cpu().numpy(), dtype))
        found = jax.jit(call)(*arrays)
        assert (jnp.asarray(found, jnp.float32) == wanted).all(), "JAX and PyTorch differ"
        gradient = jax.grad(lambda *arrays: call(*arrays).astype(jnp.float32).var())(*arrays)
        assert jnp.isfinite(gradient.astype(jnp.float32)).all()
    return f"JAX {jax.__version__} on {where.platform}"


def check_licences(has_cjson: bool, has_cuda: bool) -> None:
    """The wheel has the licence of other code that is linked in."""
    files = importlib.metadata.distribution("flashdma").files or []
    found = "".join(x.read_text() for x in files if x.parent.name == "licenses")
    wanted = ["FlashDMA authors"] + ["Dave Gamble"] * has_cjson + ["NVIDIA"] * has_cuda
    for author in wanted:
        assert author in found, f"no text in licenses/ of the wheel names {author}"


def check_files(version: str, device: str) -> str:
    """The command, and C programs; returns what was built."""
    names = {"win32": ".dll", "darwin": ".dylib"}
    package = Path(run(sys.executable, "-m", "flash_dmattn", "--cmake-dir").strip()).parents[1]
    assert (package / f"libfdma{names.get(sys.platform, '.so')}").is_file()
    info = json.loads(run(sys.executable, "-m", "flash_dmattn", "info", "--json"))
    assert info["fdma"] == version
    programs = ["use_fdma"] + ["use_fdma_static"] * (not info["built_with_cuda"])
    assert (package / "libfdma.a").is_file() == (len(programs) == 2)
    if sys.platform != "win32":
        folders = (package.parent / "bin", Path(sysconfig.get_path("scripts")))
        command = next(x / "fdma" for x in folders if (x / "fdma").is_file())
        assert f"fdma       {version}\n" in run(command, "info")
        cases = run(command, "check", "window/", "--one-dtype", "--device", device)
        has_cjson = "generate" in run(command, "--help")
        check_licences(has_cjson, info["built_with_cuda"])
        print(f"fdma check window/: {cases.strip().splitlines()[-1]}", flush=True)
    compiler = next((name for name in COMPILERS if shutil.which(name)), None)
    if not (compiler and shutil.which("cmake") and USE_C.is_dir()):
        return "no C program"
    with tempfile.TemporaryDirectory() as folder:
        found = f"-Dfdma_DIR={package / 'cmake' / 'fdma'}"
        run("cmake", "-S", USE_C, "-B", folder, found, f"-DCMAKE_C_COMPILER={compiler}")
        run("cmake", "--build", folder)
        for program in programs:
            run(Path(folder) / program)
        include = run(sys.executable, "-m", "flash_dmattn", "--include-dir").strip()
        assert (Path(include) / "fdma.h").is_file()
    return "C programs"


def check(device: str, since: float | None, folder: str | None) -> None:
    """All checks of the package that is installed, or of the one in `folder`."""
    warnings.filterwarnings("error", message="flash_dmattn")
    warnings.filterwarnings("default", message="flash_dmattn.* needs a Python with the GIL")
    os.chdir(tempfile.gettempdir())  # away from sources
    path = os.environ["PATH"]
    start = since or time.monotonic()
    with tempfile.TemporaryDirectory() as empty:
        os.environ["PATH"] = empty  # no compiler
        import flash_dmattn
        import torch

        x = torch.randn(1, 256, 2, 64, device=device, dtype=torch.bfloat16)
        flash_dmattn.attention(x, x, x, causal=True)[0].sum().item()
        first = time.monotonic() - start
        bar = f" from the start of pip, the bar is {BARS[device]} s" if since else ""
        print(f"{device}: {first:.1f} s to a first result{bar}", flush=True)
        from flash_dmattn import _library, _repeat

        used = [Path(x).resolve() for x in (_library.PATH, flash_dmattn.__file__)]
        assert not folder or all(Path(folder) in x.parents for x in used), f"{used} are used"
        has_gil = not sysconfig.get_config_var("Py_GIL_DISABLED")
        assert (_repeat.NATIVE is not None) == (has_gil and sys.platform != "win32")
        torch.manual_seed(0)
        check_calls(torch, flash_dmattn, device)
        check_cache(torch, flash_dmattn, device)
        parts = [check_kernels(torch, flash_dmattn)] if device == "cuda" else []
        parts.append(check_jax(torch, flash_dmattn, device))
    os.environ["PATH"] = path
    parts.append(check_files(flash_dmattn.__version__, device))
    python = sys.version.split()[0]
    print(f"passed: Python {python}, PyTorch {torch.__version__}, {device}, {', '.join(parts)}, "
          f"{first:.1f} s to a first result")  # fmt: skip


def install_and_check(wheel: str, device: str) -> None:
    """Installs the wheel anew for each device and checks it in a process of its own."""
    wheel = str(Path(wheel).resolve())
    script = str(Path(__file__).resolve())
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ.pop("FDMA_LIBRARY", None)
    for where in dict.fromkeys(("cpu", device)):
        start = time.monotonic()
        run(sys.executable, "-c", f"import torch; torch.zeros(1, device={where!r})")
        print(f"{where}: {time.monotonic() - start:.1f} s to import PyTorch before", flush=True)
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as empty:
            packages = str(Path(folder).resolve())
            since = time.monotonic()
            options = ("--no-deps", "--no-index", "--quiet", "--target", packages)
            run(sys.executable, "-m", "pip", "install", *options, wheel, PATH=empty)
            command = [sys.executable, script, "--device", where, "--since", str(since)]
            command += ["--folder", packages]
            env = {**os.environ, **variables, "PYTHONPATH": packages}
            status = subprocess.run(command, env=env).returncode
        if status != 0:
            raise SystemExit(f"failed: {where}, exit status {status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--wheel", help="a wheel, which is installed in a new folder first")
    for option in ("--since", "--folder"):  # which a run with --wheel passes on
        parser.add_argument(option, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.wheel:
        install_and_check(given.wheel, given.device)
    else:
        check(given.device, given.since and float(given.since), given.folder)


if __name__ == "__main__":
    main()
