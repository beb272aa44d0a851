"""The C library as ctypes sees it: the declarations of fdma.h, and nothing of PyTorch.

The header is read when this module is imported, so that structs, enumerators and functions are
declared in one place. It is the header of the sources, or the one installed beside the library.

The library is the file that FDMA_LIBRARY names or, if that is not set, the one beside this file.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from ctypes import POINTER
from pathlib import Path
from typing import Any, NamedTuple

BASIC_TYPES = {
    "char": ctypes.c_char,
    "double": ctypes.c_double,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "size_t": ctypes.c_size_t,
    "uint64_t": ctypes.c_uint64,
}
POINTERS = {"char": ctypes.c_char_p, "void": ctypes.c_void_p}  # other pointers are typed
DECLARATION = re.compile(
    r"typedef enum (?P<enum>\w+) \{(?P<values>.*?)\}"
    r"|typedef struct (?P<struct>\w+) \{(?P<members>.*?)\}"
    r"|typedef void \(\*(?P<callback>\w+)\)\((?P<given>.*?)\);"
    r"|FDMA_API (?P<result>[\w ]+\*?) ?\b(?P<function>\w+)\((?P<parameters>.*?)\);",
    re.DOTALL,
)


class Struct(ctypes.Structure):
    """A struct of the header. Fields that are not given are zero, but its own size is filled in."""

    def __init__(self, **fields: Any) -> None:
        if hasattr(type(self), "size"):
            fields["size"] = ctypes.sizeof(self)
        super().__init__(**fields)


class Header:
    """The declarations of fdma.h, by their names in C."""

    def __init__(self, text: str) -> None:
        self.types: dict[str, Any] = {**BASIC_TYPES}
        self.structs: dict[str, type[Struct]] = {}
        self.enumerators: dict[str, int] = {}
        self.functions: dict[str, tuple[Any, list[Any]]] = {}  # type of the result, and arguments
        for found in DECLARATION.finditer(re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)):
            self.declare(**found.groupdict())

    def declare(self, enum: str, struct: str, callback: str, function: str, **rest: str) -> None:
        if enum:
            self.types[enum] = ctypes.c_int
            values = re.findall(r"(\w+) = (\d+)", rest["values"])
            self.enumerators.update({name: int(value) for name, value in values})
        elif struct:
            fields = [one for line in rest["members"].split(";") for one in self.fields_of(line)]
            made = type(struct, (Struct,), {"_fields_": fields})
            self.types[struct] = self.structs[struct] = made
        elif callback:
            self.types[callback] = ctypes.CFUNCTYPE(None, *self.arguments_of(rest["given"]))
        else:
            (_, result), *_ = self.fields_of(rest["result"] + " result")
            self.functions[function] = (result, self.arguments_of(rest["parameters"]))

    def fields_of(self, line: str) -> list[tuple[str, Any]]:
        """The names and types in a declaration such as "const char *name" or "int64_t k, v[4]"."""
        word, _, names = re.sub(r"\bconst\b|\s+", " ", line).strip().partition(" ")
        fields = []
        for name in names.split(",") if names else ():
            length = re.search(r"\[(\d+)\]", name)
            kind: Any = self.types.get(word)
            for star in range(name.count("*")):
                kind = POINTERS[word] if star == 0 and word in POINTERS else POINTER(kind)
            kind = kind * int(length[1]) if length else kind
            fields.append((re.findall(r"\w+", name)[0], kind))
        return fields

    def arguments_of(self, parameters: str) -> list[Any]:
        if parameters == "void":
            return []
        return [kind for one in parameters.split(",") for _, kind in self.fields_of(one)]


class Kernel(NamedTuple):
    """A kernel of the library. `missing` names what this machine lacks for it; None: it can run."""

    name: str
    operation: str
    missing: str | None


def folders() -> list[Path]:
    """The folders of the package: an editable install has the sources and the library in two."""
    return [Path(folder) for folder in sys.modules[__package__].__path__]


def find(variable: str = "FDMA_LIBRARY", name: str = "libfdma") -> Path:
    """The path of a library: the file that the environment variable names, or the file of this name
    beside this one.

    Raises:
        ImportError: the file does not exist; the message says where it was looked for.
    """
    chosen = os.environ.get(variable)
    if chosen:
        if not Path(chosen).is_file():
            raise ImportError(f"{variable} is {chosen!r}, which is not a file")
        return Path(chosen).absolute()
    name += {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
    candidates = [folder / name for folder in folders()]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    tried = " or ".join(map(str, candidates))
    raise ImportError(f"no library at {tried}; set {variable} to where {name} is")


def read_header() -> Header:
    """fdma.h from the sources of this file, or as installed.

    Raises:
        ImportError: the file does not exist.
    """
    sources = Path(__file__).resolve().parents[2] / "include"
    candidates = [folder / "fdma.h" for folder in (sources, *folders())]
    for candidate in candidates:
        if candidate.is_file():
            return Header(candidate.read_text(encoding="utf-8"))
    raise ImportError(f"no header at {' or '.join(map(str, candidates))}; install the package anew")


PATH = find()
HEADER = read_header()
OK, INVALID_ARGUMENT, UNSUPPORTED = (
    HEADER.enumerators[f"FDMA_{name}"] for name in ("OK", "INVALID_ARGUMENT", "UNSUPPORTED")
)


def named(prefix: str) -> dict[str, int]:
    """The enumerators whose names begin with `prefix`, by the rest of their names in small
    letters."""
    found = HEADER.enumerators.items()
    return {name[len(prefix) :].lower(): n for name, n in found if name.startswith(prefix)}


BIAS_FORMS = named("FDMA_BIAS_")
SCOPES = {name: number for name, number in named("FDMA_SCOPE_").items() if name != "default"}
ERRORS: dict[int, type[Exception]] = {
    INVALID_ARGUMENT: ValueError,
    UNSUPPORTED: NotImplementedError,
}


def load(path: Path) -> ctypes.CDLL:
    """The library at `path`, with its functions declared.

    Raises:
        ImportError: the file is no library, or is a library of another version.
    """
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"{path} cannot be used: {error}") from error
    for name, (result, arguments) in HEADER.functions.items():
        function = getattr(loaded, name, None)
        if function is None:
            raise ImportError(
                f"{path} lacks {name}(): it is of another version than the package; build or "
                "install both from the same sources"
            )
        function.restype, function.argtypes = result, arguments
    return loaded


library = load(PATH)


def check(status: int) -> None:
    """Turn the status of this thread's last call into an exception with its message.

    Raises:
        ValueError: FDMA_INVALID_ARGUMENT.
        NotImplementedError: FDMA_UNSUPPORTED.
        RuntimeError: any other failure.
    """
    if status != OK:
        raise ERRORS.get(status, RuntimeError)(library.fdma_last_error().decode())


def version() -> str:
    """The library's version, "major.minor.patch"."""
    return library.fdma_version().decode()


def cpu_features() -> str:
    """The features of this CPU that kernels use, such as "avx2 fma". It looks for no device."""
    info = HEADER.structs["fdma_device_info"]()
    check(library.fdma_describe_device(0, ctypes.byref(info)))
    return info.features.decode()


def kernels() -> list[Kernel]:
    """All kernels of the library in the order of preference, also those that cannot run here."""
    found = []
    for index in range(library.fdma_kernel_count()):
        info = HEADER.structs["fdma_kernel_info"]()
        check(library.fdma_describe_kernel(index, ctypes.byref(info)))
        missing = None if info.missing is None else info.missing.decode()
        found.append(Kernel(info.name.decode(), info.operation.decode(), missing))
    return found


def backends() -> list[str]:
    """The first components of the names of kernels that can run here, in the order of
    preference."""
    names = [kernel.name for kernel in kernels() if kernel.missing is None]
    return list(dict.fromkeys(name.split("/")[0] for name in names))


@functools.lru_cache(maxsize=None)
def backend_for(backend: str | None, *operations: str) -> str | None:
    """The longest path prefix of the name `backend` under which each of `operations` has a kernel.

    A name that suits forward, such as cpu/avx2/decode, need not exist for backward."""
    for operation in operations:
        if backend is None:
            break
        names = [kernel.name for kernel in kernels() if kernel.operation == operation]
        while "/" in backend and not any(f"{name}/".startswith(f"{backend}/") for name in names):
            backend = backend.rpartition("/")[0]
    return backend


def has_cuda() -> bool:
    """True if the library was built with CUDA kernels, whether this machine can use them or not."""
    return any(kernel.name.startswith("cuda/") for kernel in kernels())
