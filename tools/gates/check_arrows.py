#!/usr/bin/env python3
"""Check that every #include goes the way the architecture allows.

A zone is a part of the tree; a file belongs to the first zone whose prefix its path begins with.
Each zone names the zones that it may include besides itself. Whatever is not named is refused.
A header of CUDA kernels, and a source of theirs whose launch is in a host.cu beside it, reaches
neither fdma.h nor a header of the host, not even through others.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import gate

# (zone, path prefix). More special prefixes stand first.
ZONES = (
    ("public", "include/"),
    ("core", "src/core/"),
    ("reference row", "src/reference/reference.h"),
    ("reference", "src/reference/"),
    ("cpu row", "src/cpu/cpu.h"),
    ("cpu threads", "src/cpu/parallel."),
    ("cpu threads", "src/cpu/threads."),
    ("cpu simd", "src/cpu/simd/"),
    ("cpu common", "src/cpu/common/"),
    ("cpu score", "src/cpu/score/"),
    ("cpu select", "src/cpu/select/"),
    ("cpu decode", "src/cpu/decode/"),
    ("cpu cache", "src/cpu/cache/"),
    ("cpu forward", "src/cpu/forward/"),
    ("cpu backward", "src/cpu/backward/"),
    ("cpu merge", "src/cpu/merge/"),
    ("cpu probabilities", "src/cpu/probabilities/"),
    ("cpu rotate", "src/cpu/rotate/"),
    ("cpu isa", "src/cpu/isa/"),
    ("cpu", "src/cpu/"),
    ("cuda row", "src/cuda/cuda.h"),
    ("cuda devices", "src/cuda/devices.h"),
    ("cuda device", "src/cuda/device/"),
    ("cuda plan", "src/cuda/plan/"),
    ("cuda mma", "src/cuda/mma/"),
    ("cuda score", "src/cuda/score/"),
    ("cuda select", "src/cuda/select/"),
    ("cuda decode", "src/cuda/decode/"),
    ("cuda adapt", "src/cuda/adapt/"),
    ("cuda forward sm80", "src/cuda/forward/sm80/"),
    ("cuda forward sm90", "src/cuda/forward/sm90/"),
    ("cuda backward sm80", "src/cuda/backward/sm80/"),
    ("cuda backward sm90", "src/cuda/backward/sm90/"),
    ("cuda merge", "src/cuda/merge/"),
    ("cuda probabilities", "src/cuda/probabilities/"),
    ("cuda rotate", "src/cuda/rotate/"),
    ("cuda", "src/cuda/"),
    ("entry", "src/fdma.c"),
    ("ort", "src/ort/"),
    ("jax", "src/jax/"),
    ("extension", "src/python/"),
    ("cases", "tests/cases.def"),
    ("fuzz", "tests/fuzz/"),
    ("tokens", "tests/tokens/"),
    ("tests", "tests/"),
    ("check run", "tools/check/run.c"),
    ("tools", "tools/"),
    ("examples", "examples/"),
    ("python", "python/"),
)

TESTED = ("include", "src", "tests")
CPU_KERNEL = ("public", "core", "cpu threads", "cpu simd", "cpu common")
CPU_OPERATIONS = tuple(
    f"cpu {operation}"
    for operation in "score select decode cache forward backward merge probabilities rotate".split()
)
CUDA_KERNEL = ("public", "core", "cuda devices", "cuda device", "cuda plan")
ALLOWED = {
    "public": (),
    "core": ("public",),
    "reference row": ("public", "core"),
    "reference": ("public", "core", "reference row"),
    "cpu row": ("public", "core"),
    "cpu threads": ("public", "core", "cpu simd"),
    "cpu simd": ("public", "core"),
    "cpu common": CPU_KERNEL,
    "cpu score": CPU_KERNEL,
    "cpu select": CPU_KERNEL,
    "cpu decode": CPU_KERNEL,
    "cpu cache": CPU_KERNEL,
    "cpu forward": CPU_KERNEL,
    "cpu backward": (*CPU_KERNEL, "cpu forward"),
    "cpu merge": CPU_KERNEL,
    "cpu probabilities": CPU_KERNEL,
    "cpu rotate": CPU_KERNEL,
    "cpu isa": (*CPU_KERNEL, *CPU_OPERATIONS),
    "cpu": ("public", "core", "cpu row", "cpu threads", "cpu simd", "cpu isa"),
    "cuda row": ("public", "core"),
    "cuda devices": ("public", "core"),
    "cuda device": ("public", "core", "cuda devices"),
    "cuda plan": (*CUDA_KERNEL, "cuda row"),
    "cuda score": CUDA_KERNEL,
    "cuda select": CUDA_KERNEL,
    "cuda mma": CUDA_KERNEL,
    "cuda adapt": CUDA_KERNEL,
    "cuda decode": (*CUDA_KERNEL, "cuda row", "cuda mma", "cuda score"),
    "cuda forward sm80": (*CUDA_KERNEL, "cuda mma"),
    "cuda forward sm90": CUDA_KERNEL,
    "cuda backward sm80": (*CUDA_KERNEL, "cuda mma"),
    "cuda backward sm90": CUDA_KERNEL,
    "cuda merge": CUDA_KERNEL,
    "cuda probabilities": CUDA_KERNEL,
    "cuda rotate": CUDA_KERNEL,
    "cuda": ("public", "core", "cuda row", "cuda devices"),
    "entry": ("public", "core", "reference row", "cpu row", "cpu threads", "cuda row"),
    "ort": ("public",),
    "jax": ("public",),
    "extension": (),
    "cases": (),
    "fuzz": ("public", "tools"),
    "tokens": ("tools",),
    "tests": tuple(zone for zone, prefix in ZONES if prefix.split("/")[0] in TESTED),
    "check run": ("public", "core", "tools"),
    "tools": ("public", "cases"),
    "examples": ("public", "tools"),
    "python": ("public",),
}

# System headers that belong to one zone of src/: intrinsics are words of the vocabulary, and there
# is one place for threads.
SYSTEM_OWNERS = {"immintrin.h": "cpu simd", "arm_neon.h": "cpu simd", "omp.h": "cpu threads"}

# Folders of kernels, except for headers of the host.
KERNEL_FOLDERS = tuple(f"src/cuda/{name}/" for name in "device plan mma forward backward".split())
KERNEL_SUFFIX, HOST_SUFFIX, MANUAL = ".cuh", "host.cuh", "include/fdma.h"
HOST_SOURCE = "host.cu"

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)
SUFFIXES = (".c", ".h", ".def", ".inc", ".cu", ".cuh", ".cpp")


def zone_of(path: str) -> str | None:
    return next((zone for zone, prefix in ZONES if path.startswith(prefix)), None)


def resolve(root: Path, source: Path, name: str) -> str | None:
    """The repository's file that `name` means in `source`, by the build's include directories."""
    folders = (source.parent, *(root / top for top in ("include", "src", "tests", "tools")))
    for directory in folders:
        candidate = (directory / name).resolve()
        if candidate.is_file() and candidate.is_relative_to(root):
            return candidate.relative_to(root).as_posix()
    return None


def complaint(root: Path, source: Path, quote: str, name: str) -> str | None:
    path = source.relative_to(root).as_posix()
    zone = zone_of(path)
    if zone is None:
        return "is in no zone of the architecture"
    target = resolve(root, source, name)
    if target is None:
        owner = SYSTEM_OWNERS.get(name)
        if quote == '"':
            return f'includes "{name}", which is not there'
        if owner and path.startswith("src/") and zone != owner:
            return f"includes <{name}>, which belongs to {owner}"
        return None
    target_zone = zone_of(target)
    if target_zone == zone or target_zone in ALLOWED[zone]:
        return None
    return f"({zone}) includes {target} ({target_zone})"


def is_of_host(path: str) -> bool:
    return path == MANUAL or path.endswith(HOST_SUFFIX)


def way_to_host(targets: dict[str, list[str]], path: str) -> list[str] | None:
    """The includes by which a file reaches a header of the host."""
    ways = [[path]]
    seen = {path}
    for way in ways:
        for target in targets.get(way[-1], ()):
            if is_of_host(target):
                return [*way, target]
            if target not in seen:
                seen.add(target)
                ways.append([*way, target])
    return None


def is_of_kernels(targets: dict[str, list[str]], path: str) -> bool:
    """True for a header of kernels, and for a source of kernels with a host.cu beside it."""
    folder, _, name = path.rpartition("/")
    has_host = f"{folder}/{HOST_SOURCE}" in targets and name != HOST_SOURCE
    suffixes = (KERNEL_SUFFIX, ".cu") if has_host else KERNEL_SUFFIX
    return path.startswith(KERNEL_FOLDERS) and path.endswith(suffixes) and not is_of_host(path)


def host_in_kernels(targets: dict[str, list[str]]) -> list[str]:
    """A line for each file of kernels that reaches a header of the host."""
    ways = (way_to_host(targets, path) for path in sorted(targets) if is_of_kernels(targets, path))
    return [f"{' includes '.join(way)}, which is of the host" for way in ways if way]


def check(root: Path) -> tuple[int, list[str]]:
    """The number of includes looked at, and a line for each that is not allowed."""
    root = root.resolve()
    count = 0
    found = []
    targets: dict[str, list[str]] = {}
    for top in sorted({prefix.split("/")[0] for _, prefix in ZONES}):
        for source in sorted((root / top).rglob("*")):
            if source.suffix not in SUFFIXES:
                continue
            text = source.read_text(encoding="utf-8")
            for match in INCLUDE.finditer(text):
                count += 1
                target = resolve(root, source, match[2])
                if target is not None:
                    targets.setdefault(source.relative_to(root).as_posix(), []).append(target)
                problem = complaint(root, source, match[1], match[2])
                if problem:
                    line = text.count("\n", 0, match.start()) + 1
                    found.append(f"{source.relative_to(root)}:{line}: {problem}")
    found += host_in_kernels(targets)
    return count, found if count > 0 else ["fails: there is no include"]


# A small tree in order, and includes that must each be refused when planted in it.
SOUND = {
    "include/fdma.h": "#include <stddef.h>",
    "src/core/error.h": '#include "fdma.h"',
    "src/reference/reference.h": '#include "core/error.h"',
    "src/reference/reference.c": '#include "reference/reference.h"',
    "src/cpu/cpu.h": '#include "core/error.h"',
    "src/cpu/cpu.c": '#include "cpu/isa/isa.h"',
    "src/cpu/parallel.h": "#include <stddef.h>",
    "src/cpu/parallel.c": "#include <omp.h>",
    "src/cpu/simd/avx2.h": "#include <immintrin.h>",
    "src/cpu/forward/forward.h": '#include "cpu/parallel.h"',
    "src/cpu/isa/isa.h": '#include "core/error.h"',
    "src/cpu/isa/avx2.c": '#include "cpu/simd/avx2.h"\n#include "cpu/forward/forward.h"',
    "src/fdma.c": '#include "cpu/cpu.h"\n#include "reference/reference.h"',
    "src/core/integers.h": "#include <stdint.h>",
    "src/cuda/device/host.cuh": '#include "core/error.h"\n#include "cuda/device/view.cuh"',
    "src/cuda/device/view.cuh": '#include "core/integers.h"',
    "src/cuda/plan/plan.cuh": '#include "cuda/device/view.cuh"',
    "src/cuda/plan/host.cuh": '#include "cuda/device/host.cuh"\n#include "cuda/plan/plan.cuh"',
    "src/cuda/forward/sm80/forward.cu": '#include "cuda/plan/host.cuh"',
    "src/cuda/forward/sm90/forward.cu": '#include "cuda/plan/plan.cuh"',
    "src/cuda/forward/sm90/host.cu": '#include "cuda/plan/host.cuh"',
    "src/ort/ort.h": "#include <onnxruntime_c_api.h>\n#include <fdma.h>",
    "src/python/call.h": "#include <Python.h>",
    "tests/cases.def": "",
    "tests/c/test_select.c": '#include "core/error.h"\n#include "cases.def"',
    "tests/fuzz/fuzz_safetensors.c": '#include "common/safetensors.h"',
    "tools/common/safetensors.h": "#include <stdint.h>",
    "tools/check/check.c": '#include <fdma.h>\n#include "cases.def"',
}
PLANTS = (
    ("include/fdma.h", '\n#include "core/error.h"'),
    ("src/core/error.h", '\n#include "cpu/cpu.h"'),
    ("src/core/error.h", '\n#include "reference/reference.h"'),
    ("src/reference/reference.c", '\n#include "cpu/cpu.h"'),
    ("src/cpu/cpu.c", '\n#include "reference/reference.h"'),
    ("src/cpu/simd/avx2.h", '\n#include "cpu/forward/forward.h"'),
    ("src/cpu/forward/forward.h", '\n#include "cpu/isa/isa.h"'),
    ("src/cpu/forward/forward.h", "\n#include <immintrin.h>"),
    ("src/cpu/forward/forward.h", "\n#  include <omp.h>"),
    ("src/cpu/parallel.h", '\n#include "cpu/forward/forward.h"'),
    ("src/cpu/isa/avx2.c", '\n#include "cpu/cpu.h"'),
    ("src/fdma.c", '\n#include "cpu/isa/isa.h"'),
    ("src/fdma.c", '\n#include "nowhere.h"'),
    ("src/core/integers.h", '\n#include "core/error.h"'),
    ("src/cuda/device/view.cuh", '\n#include "cuda/device/host.cuh"'),
    ("src/cuda/plan/plan.cuh", '\n#include "cuda/plan/host.cuh"'),
    ("src/cuda/forward/sm90/forward.cu", '\n#include "cuda/plan/host.cuh"'),
    ("src/ort/ort.h", '\n#include "core/error.h"'),
    ("src/python/call.h", '\n#include "core/error.h"'),
    ("tools/check/check.c", '\n#include "../../src/core/error.h"'),
    ("examples/attend.c", '\n#include "core/error.h"'),
    ("src/elsewhere/new.c", '\n#include "fdma.h"'),
)


def main() -> int:
    return gate.main(
        __doc__,
        lambda options: check(gate.ROOT),
        lambda: gate.self_test_mistakes(check, SOUND, PLANTS),
        "{} includes, {} against the arrows",
    )


if __name__ == "__main__":
    sys.exit(main())
