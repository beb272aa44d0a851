"""The command of the package: what this machine has, and which kernels run on it.

    python -m flash_dmattn info            as text
    python -m flash_dmattn info --json     for reports of faults
    python -m flash_dmattn version
    python -m flash_dmattn --cmake-dir     the folder to give to CMake as fdma_DIR
    python -m flash_dmattn --include-dir   the folder of fdma.h

`info` prints the same as `fdma info` for the library that the package uses, and the versions of
Python and PyTorch, if there is one. The folders are in an installed package, where libfdma is
beside fdma.h. Exit status: 0 done; 1 no library was found; 2 bad usage, or no such folder.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
from pathlib import Path
from typing import Any

from . import _library

DTYPES = {"f32": 1, "f16": 2, "bf16": 3, "f64": 4}  # fdma_dtype
OPERATIONS = ("forward", "decode", "backward")
LENGTH, HEADS, HEAD_DIM = 1024, 8, 128  # of the calls whose kernels are shown


def chosen(operation: str, args: _library.Struct) -> str | None:
    """The kernel that would run; None if there is none."""
    name = ctypes.c_char_p()
    ask = getattr(_library.library, f"fdma_{operation}_kernel")
    status = ask(ctypes.byref(args), ctypes.byref(name))
    return name.value.decode() if status == _library.OK and name.value else None


def choices(device: int) -> dict[str, dict[str, str | None]]:
    """The kernels of causal calls, by operation and dtype."""
    structs, make = _library.HEADER.structs, _library.library.fdma_tensor_4d
    where = structs["fdma_exec"](device=device)
    found: dict[str, dict[str, str | None]] = {name: {} for name in OPERATIONS}
    for name, dtype in DTYPES.items():
        x = make(None, dtype, 1, LENGTH, HEADS, HEAD_DIM)
        one = make(None, dtype, 1, 1, HEADS, HEAD_DIM)
        lse = _library.library.fdma_tensor_3d(None, DTYPES["f32"], 1, HEADS, LENGTH)
        shared = {"k": x, "v": x, "causal": 1, "exec": where}
        backward = dict.fromkeys(("dout", "out", "q", "dq", "dk", "dv"), x)
        for operation, query in (("forward", x), ("decode", one)):
            args = structs["fdma_forward_args"](q=query, out=query, **shared)
            found[operation][name] = chosen("forward", args)
        args = structs["fdma_backward_args"](lse=lse, **backward, **shared)
        found["backward"][name] = chosen("backward", args)
    return found


def describe(device: int) -> dict[str, Any]:
    info = _library.HEADER.structs["fdma_device_info"]()
    _library.check(_library.library.fdma_describe_device(device, ctypes.byref(info)))
    named = {"name": info.name.decode(), "cores": info.cores, "features": info.features.decode()}
    return {**named, **choices(device)}


def collect() -> dict[str, Any]:
    try:
        import torch

        from . import _repeat
    except ModuleNotFoundError:  # programs in C or JAX need none
        versions: dict[str, Any] = {"torch": None, "extension_module": False}
    else:
        versions = {"torch": torch.__version__, "extension_module": _repeat.NATIVE is not None}
    return {
        "fdma": _library.version(),
        "library": str(_library.find()),
        "python": platform.python_version(),
        **versions,
        "built_with_cuda": _library.has_cuda(),
        "devices": [describe(n) for n in range(_library.library.fdma_device_count())],
        "kernels": [kernel._asdict() for kernel in _library.kernels()],
    }


def lines_of(found: dict[str, Any]) -> list[str]:
    torch, module = found["torch"] or "none", "with" if found["extension_module"] else "without"
    width = max(len(kernel["name"]) for kernel in found["kernels"])
    lines = [
        f"fdma       {found['fdma']}, {found['library']}",
        f"python     {found['python']}, torch {torch}, {module} the extension module",
    ]
    for number, device in enumerate(found["devices"]):
        where = f"cuda {number}" if number else "cpu"
        unit = "multiprocessors" if number else "cores"
        lines += ["", f"{where:10} {device['name']}, {device['cores']} {unit}"]
        lines.append(f"features   {device['features'] or 'none that kernels use'}")
        titles = ("forward", "one query (decode)")
        lines.append(f"runs       {titles[0]:{width}} {titles[1]:{width}} backward")
        for dtype in DTYPES:
            names = [device[operation][dtype] or "none" for operation in OPERATIONS]
            lines.append(f"  {dtype:8} {names[0]:{width}} {names[1]:{width}} {names[2]}")
    if len(found["devices"]) == 1:
        info = _library.HEADER.structs["fdma_device_info"]()
        _library.library.fdma_describe_device(1, ctypes.byref(info))
        lines += ["", f"cuda       none: {_library.library.fdma_last_error().decode()}"]
    lines += ["", f"{'kernel':{width}} {'operation':14} available"]
    for kernel in found["kernels"]:
        state = "yes" if kernel["missing"] is None else f"no: lacks {kernel['missing']}"
        lines.append(f"{kernel['name']:{width}} {kernel['operation']:14} {state}")
    return lines


def installed(name: str) -> Path:
    """The folder of the package that contains the file `name`, for programs in C.

    Raises:
        FileNotFoundError: it has none, as in the sources.
    """
    for folder in _library.folders():
        if (folder / name).is_file():
            return (folder / name).parent
    raise FileNotFoundError(f"no {name} in {_library.folders()[-1]}; install a wheel")


FOLDERS = {"--cmake-dir": "cmake/fdma/fdma-config.cmake", "--include-dir": "fdma.h"}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flash_dmattn", description="What this machine has, and what runs on it."
    )
    wanted = parser.add_mutually_exclusive_group()
    for option, name in FOLDERS.items():
        wanted.add_argument(
            option, dest="name", action="store_const", const=name, help=f"the folder of {name}"
        )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    info = commands.add_parser("info", help="versions, CPU features, devices, kernels")
    info.add_argument("--json", action="store_true", help="one JSON object, for reports of faults")
    commands.add_parser("version", help="the version of the library")
    given = parser.parse_args(arguments)
    if given.name is not None:
        try:
            print(installed(given.name))
        except FileNotFoundError as error:
            parser.error(str(error))
    elif given.command is None:
        parser.error("want a command, info or version, or an option")
    elif given.command == "version":
        print(_library.version())
    elif given.json:
        print(json.dumps(collect()))
    else:
        print("\n".join(lines_of(collect())))


if __name__ == "__main__":
    main()
