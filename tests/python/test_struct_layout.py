"""The package reads fdma.h as the C compiler does: size and fields of structs, enumerators,
functions. Its tensors, and the operators' tensors, agree with the list in src/core/signatures.c."""

from __future__ import annotations

import ctypes
import re
from typing import NamedTuple

import pytest
from flash_dmattn import _arguments, _library, ops
from programs import ROOT, output_of, run

STRUCTS = _library.HEADER.structs
ENUMERATORS = _library.HEADER.enumerators
HEADER = re.sub(r"/\*.*?\*/", "", (ROOT / "include" / "fdma.h").read_text(), flags=re.DOTALL)


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Sizes and offsets, by the C compiler: {"struct": sizeof, "struct.field": offsetof, ...}."""
    lines = []
    for name in STRUCTS:
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field in fields_of(name):
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
            lines.append(f'printf("{name}.{field}# %zu\\n", sizeof((({name} *)0)->{field}));')
    lines += [f'printf("{name} %zu\\n", (size_t){name});' for name in ENUMERATORS]
    program = tmp_path_factory.mktemp("layout") / "layout"
    source = program.with_suffix(".c")
    source.write_text(
        '#include "fdma.h"\n#include <stdio.h>\nint main(void) {\n' + "\n".join(lines) + "\n}\n"
    )
    output_of(run("cc", "-std=c11", f"-I{ROOT / 'include'}", source, "-o", program))
    printed = output_of(run(program)).splitlines()
    return {name: int(number) for name, number in map(str.split, printed)}


def fields_of(name: str) -> list[str]:
    body = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", HEADER, re.DOTALL).group(1)
    return re.findall(r"(\w+)(?:\[\d+\])*[;,]", body)


def mirrored_fields(name: str) -> dict[str, type]:
    return dict(STRUCTS[name]._fields_)


def test_every_struct_is_mirrored() -> None:
    assert sorted(re.findall(r"typedef struct (fdma_\w+) \{", HEADER)) == sorted(STRUCTS)


@pytest.mark.parametrize("name", STRUCTS)
def test_struct(name: str, layout: dict[str, int]) -> None:
    mirror = STRUCTS[name]
    assert list(mirrored_fields(name)) == fields_of(name)
    assert ctypes.sizeof(mirror) == layout[name]
    for field in fields_of(name):
        assert getattr(mirror, field).offset == layout[f"{name}.{field}"], field
        assert getattr(mirror, field).size == layout[f"{name}.{field}#"], field


def test_every_enumerator_is_mirrored(layout: dict[str, int]) -> None:
    bodies = re.findall(r"typedef enum fdma_\w+ \{(.*?)\}", HEADER, re.DOTALL)
    declared = [name for body in bodies for name in re.findall(r"(FDMA_\w+) =", body)]
    assert sorted(declared) == sorted(ENUMERATORS)
    for name, value in ENUMERATORS.items():
        assert value == layout[name], name


def test_every_function_is_declared() -> None:
    declared = re.findall(r"FDMA_API [\w\s]+?\*?\s*(fdma_\w+)\(([^)]*)\)", HEADER)
    assert sorted(name for name, _ in declared) == sorted(_library.HEADER.functions)
    for name, parameters in declared:
        count = 0 if parameters == "void" else parameters.count(",") + 1
        assert len(_library.HEADER.functions[name][1]) == count, name


def test_types_of_functions() -> None:
    functions, pointer = _library.HEADER.functions, ctypes.POINTER
    args, tensor = STRUCTS["fdma_forward_args"], STRUCTS["fdma_tensor"]
    number, text = ctypes.c_int32, ctypes.c_char_p
    assert functions["fdma_last_error"] == (text, [])
    assert functions["fdma_kernel_name"] == (text, [number])
    assert functions["fdma_forward"] == (ctypes.c_int, [pointer(args)])
    assert functions["fdma_forward_kernel"] == (ctypes.c_int, [pointer(args), pointer(text)])
    numbers = pointer(ctypes.c_int64)
    assert functions["fdma_dense_tensor"] == (
        tensor,
        [ctypes.c_void_p, ctypes.c_int, number, numbers],
    )


def test_a_struct_has_its_size() -> None:
    args = STRUCTS["fdma_forward_args"](scale=2.0)
    assert args.size == ctypes.sizeof(args) and args.scale == 2.0 and args.q.data is None
    assert STRUCTS["fdma_exec"](device=1).device == 1  # it has no size of its own


class Listed(NamedTuple):
    """A line of src/core/signatures.c, which explains the words."""

    dims: str
    dtypes: str
    in_selection: bool


def with_macros(text: str, body: str) -> str:
    """A table of tensors with the rows of its macros written out."""
    macros = dict(re.findall(r"#define (\w+)\([^)]*\)((?:[^\n]*\\\n)+[^\n]*)", text))
    body = re.sub(r"(CARRIED(?:_GRADIENTS)?|PAIRS)\(\w+\)", lambda one: macros[one[1]], body)
    body = re.sub(
        r'CACHE\(\w+, "(\w)"\)',
        lambda one: macros["CACHE"].replace('" r "', one[1]).replace('" r', f'{one[1]}"'),
        body,
    )
    for table in ("in", "out"):
        rows = macros["TABLE_OF"].replace("table.", f"table_{table}.")
        body = re.sub(
            rf'TABLE_{table.upper()}\(\w+,(?: "(\w)",)? (\w+)\)',
            lambda call, rows=rows: rows.replace(" dtypes,", f" {call[2]},").replace(
                '" rows', f'{call[1] or "z"}"'
            ),
            body,
        )
    return body


def read_tensors() -> dict[str, dict[str, Listed]]:
    """The tensors of each operation, by field."""
    found: dict[str, dict[str, Listed]] = {}
    text = (ROOT / "src" / "core" / "signatures.c").read_text()
    for operation, body in re.findall(
        r"tensor_entry (\w+)_tensors\[\] = \{(.*?)^\};", text, re.DOTALL | re.MULTILINE
    ):
        found[operation] = {}
        rows = re.findall(r"(ARG|MEMBER|SELECTION)\(([^()]*)\)", with_macros(text, body))
        for kind, row in rows:
            words = row.replace('"', "").split(", ")
            name = words[0] if kind == "SELECTION" else words[1]
            found[operation][name] = Listed(words[-3], words[-2], kind == "SELECTION")
    return found


TENSORS = read_tensors()
assert {f"fdma_{name}_args" for name in TENSORS} == {x for x in STRUCTS if "args" in x}
DIMENSIONS = {
    "b": "batch",
    "i": "q_len",
    "j": "kv_len",
    "h": "q_heads",
    "g": "kv_heads",
    "d": "head_dim",
    "c": "kv_heads * head_dim",
    "s": "sequences + 1",
    "n": "kv_len",
    "r": "rows",
    "z": "rows",
    "p": "sequences",
    "e": "batch",
    "x": "sequence_pages",
    "y": "bytes",
    "2": "seed and offset",
    "t": "rows",
    "w": "dim",
    "v": "pairs",
    **dict(zip("BHIJ", _arguments.PAIR_SHAPE)),
}
OF_ROTATION = {"i": "len", "h": "heads"}
OPERATORS = [one for one in vars(ops).values() if isinstance(one, ops.Operator)]
# Options for the selection, the gradients, or the allocation of results.
NO_FIELD = {"window", "recent", "sinks", "scope", "deterministic"}
NO_FIELD |= {
    "dim",
    "wide",
    "wants_dweight",
    "wants_dbias",
    "wants_dbias_carried",
    "wants_dattn_bias",
}


def tensors_of(struct: str, prefix: str = "") -> list[str]:
    """The tensors of a struct, and of the structs in it."""
    names = []
    for name, kind in mirrored_fields(struct).items():
        if kind is STRUCTS["fdma_tensor"]:
            names.append(prefix + name)
        elif kind in (STRUCTS["fdma_table"], STRUCTS["fdma_cache"]):
            names += tensors_of(kind.__name__, f"{prefix}{name}.")
    return names


@pytest.mark.parametrize("operation", TENSORS)
def test_the_tensors_of_a_struct(operation: str) -> None:
    listed = [name for name, one in TENSORS[operation].items() if not one.in_selection]
    fields = mirrored_fields(f"fdma_{operation}_args")
    assert sorted(listed) == sorted(tensors_of(f"fdma_{operation}_args"))
    selected = [name for name, one in TENSORS[operation].items() if one.in_selection]
    assert ("selection" in fields) == (selected == ["expiry", "slot"])


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda one: one.name)
def test_the_arguments_of_an_operator(operator: ops.Operator) -> None:
    """Each has a field. Tensors have the shapes, and results the dtypes, of the library's list."""
    operation = operator.operation
    listed = TENSORS[operation.function]
    for name in (*operation.tensors, *operation.results):
        one = listed[_arguments.field_of(name)]
        # tensors of a selection that counts carried keys
        dimensions = {**DIMENSIONS, "j": "all_len" if name.endswith("_all") else "kv_len"}
        if operation.function.startswith("rotate"):
            dimensions.update(OF_ROTATION)
        assert _arguments.shape_of(name) == tuple(dimensions[letter] for letter in one.dims)
        if name in operation.results:
            assert (one.dtypes == "int32") == (name in _arguments.INT32_RESULTS)
            assert (one.dtypes == "wide") == (name in _arguments.FLOAT32_RESULTS)
    fields = mirrored_fields(f"fdma_{operation.function}_args")
    assert {_arguments.field_of(name) for name in operation.options} - set(fields) <= NO_FIELD


def test_every_status_is_an_exception() -> None:
    _library.check(_library.OK)
    expected = {
        ENUMERATORS["FDMA_INVALID_ARGUMENT"]: ValueError,
        ENUMERATORS["FDMA_UNSUPPORTED"]: NotImplementedError,
        ENUMERATORS["FDMA_WORKSPACE_TOO_SMALL"]: RuntimeError,
        ENUMERATORS["FDMA_CUDA_ERROR"]: RuntimeError,
    }
    for status, exception in expected.items():
        with pytest.raises(exception):
            _library.check(status)
