#!/usr/bin/env python3
"""Smoke test of the library in a wheel, with a Python that has no PyTorch.

    smoke_library.py FOLDER     FOLDER is an unpacked wheel

It loads the library as the package does, with the header in the wheel, and makes calls on one
thread and on two. Windows' CPython runs it under wine.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import types

HEAD_DIM, KEYS = 8, 4096
Row = ctypes.c_float * HEAD_DIM
Rows = ctypes.c_float * (HEAD_DIM * KEYS)


def mean_of_values(package: types.ModuleType, threads: int) -> list[float]:
    """A query over keys of equal logits, whose values are 0 + d and 2 + d in turn."""
    library, structs = package.library, package.HEADER.structs
    values = [float(n // HEAD_DIM % 2 * 2 + n % HEAD_DIM) for n in range(HEAD_DIM * KEYS)]
    memory = {"q": Row(), "k": Rows(), "v": Rows(*values), "out": Row()}
    sizes = {"q": 1, "k": KEYS, "v": KEYS, "out": 1}
    float32 = package.HEADER.enumerators["FDMA_FLOAT32"]
    args = structs["fdma_forward_args"](
        **{
            name: library.fdma_tensor_4d(
                ctypes.addressof(memory[name]), float32, 1, size, 1, HEAD_DIM
            )
            for name, size in sizes.items()
        }
    )
    args.exec.threads = threads
    needed = ctypes.c_size_t()
    package.check(library.fdma_forward_workspace(ctypes.byref(args), ctypes.byref(needed)))
    workspace = ctypes.create_string_buffer(needed.value + 1)
    args.exec.workspace = ctypes.addressof(workspace)
    args.exec.workspace_size = needed.value
    package.check(library.fdma_forward(ctypes.byref(args)))
    return list(memory["out"])


def main() -> None:
    (folder,) = sys.argv[1:]
    # The package itself imports PyTorch; the module of its library does not.
    package = types.ModuleType("flash_dmattn")
    package.__path__ = [f"{folder}/flash_dmattn"]
    sys.modules["flash_dmattn"] = package
    library = importlib.import_module("flash_dmattn._library")
    for threads in (1, 2):
        for d, found in enumerate(mean_of_values(library, threads)):
            assert abs(found - (d + 1)) < 1e-4, f"is {found}, want {d + 1}"
    # not platform.platform(), which asks Windows in a way that wine lacks
    print(f"passed: {sys.platform}, CPU features {library.cpu_features()}")


if __name__ == "__main__":
    main()
