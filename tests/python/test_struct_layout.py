"""The ctypes mirror agrees with fdma.h: size and fields of structs, enumerators, functions."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
from flash_dmattn import _arguments, _library, ops

STRUCTS = {
    "fdma_tensor": _library.Tensor,
    "fdma_exec": _library.Exec,
    "fdma_score_args": _library.ScoreArgs,
    "fdma_selection": _library.Selection,
    "fdma_select_args": _library.SelectArgs,
    "fdma_lists_args": _library.ListsArgs,
    "fdma_forward_args": _library.ForwardArgs,
    "fdma_attention_args": _library.AttentionArgs,
    "fdma_backward_args": _library.BackwardArgs,
    "fdma_score_backward_args": _library.ScoreBackwardArgs,
    "fdma_attention_backward_args": _library.AttentionBackwardArgs,
    "fdma_merge_args": _library.MergeArgs,
    "fdma_merge_backward_args": _library.MergeBackwardArgs,
    "fdma_kernel_info": _library.KernelInfo,
    "fdma_attention_kernels": _library.AttentionKernels,
    "fdma_attention_backward_kernels": _library.AttentionBackwardKernels,
    "fdma_device_info": _library.DeviceInfo,
}
ENUMERATORS = {
    "FDMA_OK": _library.OK,
    "FDMA_INVALID_ARGUMENT": _library.INVALID_ARGUMENT,
    "FDMA_UNSUPPORTED": _library.UNSUPPORTED,
    "FDMA_WORKSPACE_TOO_SMALL": _library.WORKSPACE_TOO_SMALL,
    "FDMA_CUDA_ERROR": _library.CUDA_ERROR,
    "FDMA_FLOAT32": _library.FLOAT32,
    "FDMA_FLOAT16": _library.FLOAT16,
    "FDMA_BFLOAT16": _library.BFLOAT16,
    "FDMA_FLOAT64": _library.FLOAT64,
    "FDMA_INT32": _library.INT32,
    "FDMA_UINT8": _library.UINT8,
    "FDMA_BIAS_EXP": _library.BIAS_FORMS["exp"],
    "FDMA_BIAS_LINEAR": _library.BIAS_FORMS["linear"],
    "FDMA_BIAS_NONE": _library.BIAS_FORMS["none"],
    "FDMA_SCOPE_DEFAULT": _library.SCOPE_DEFAULT,
    "FDMA_SCOPE_CAUSAL": _library.SCOPES["causal"],
    "FDMA_SCOPE_GLOBAL": _library.SCOPES["global"],
}


@pytest.fixture(scope="module")
def header(root: Path) -> str:
    """fdma.h without its comments."""
    text = (root / "include" / "fdma.h").read_text()
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def layout(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Sizes and offsets, by the C compiler: {"struct": sizeof, "struct.field": offsetof, ...}."""
    lines = []
    for name, mirror in STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, *_ in mirror._fields_:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
            lines.append(f'printf("{name}.{field}# %zu\\n", sizeof((({name} *)0)->{field}));')
    lines += [f'printf("{name} %zu\\n", (size_t){name});' for name in ENUMERATORS]
    folder = tmp_path_factory.mktemp("layout")
    source = folder / "layout.c"
    source.write_text(
        '#include "fdma.h"\n#include <stdio.h>\nint main(void) {\n' + "\n".join(lines) + "\n}\n"
    )
    program = folder / "layout"
    command = ["cc", "-std=c11", f"-I{root / 'include'}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    output = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in map(str.split, output.splitlines())}


def test_every_struct_is_mirrored(header: str) -> None:
    declared = re.findall(r"typedef struct (fdma_\w+) \{", header)
    assert sorted(declared) == sorted(STRUCTS)


@pytest.mark.parametrize("name", STRUCTS)
def test_struct(name: str, layout: dict[str, int], header: str) -> None:
    mirror = STRUCTS[name]
    body = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", header, re.DOTALL).group(1)
    fields = re.findall(r"(\w+)(?:\[\d+\])*[;,]", body)
    assert [field for field, *_ in mirror._fields_] == fields
    assert ctypes.sizeof(mirror) == layout[name]
    for field in fields:
        assert getattr(mirror, field).offset == layout[f"{name}.{field}"], field
        assert getattr(mirror, field).size == layout[f"{name}.{field}#"], field


def test_every_enumerator_is_mirrored(layout: dict[str, int], header: str) -> None:
    bodies = re.findall(r"typedef enum fdma_\w+ \{(.*?)\}", header, re.DOTALL)
    declared = [name for body in bodies for name in re.findall(r"(FDMA_\w+) =", body)]
    assert sorted(declared) == sorted(ENUMERATORS)
    for name, value in ENUMERATORS.items():
        assert value == layout[name], name


def test_every_function_is_declared(header: str) -> None:
    declared = re.findall(r"FDMA_API [\w\s]+?\*?\s*(fdma_\w+)\(([^)]*)\)", header)
    assert sorted(name for name, _ in declared) == sorted(_library.FUNCTIONS)
    for name, parameters in declared:
        count = 0 if parameters == "void" else parameters.count(",") + 1
        assert len(_library.FUNCTIONS[name]) == count, name


OPERATORS = [one for one in vars(ops).values() if isinstance(one, ops.Operator)]
# What a struct lacks is for the selection, for the gradients, or for the allocation of results.
NO_FIELD = {"window", "scope", "deterministic", "wants_dbias"}


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda one: one.name)
def test_every_argument_of_an_operator_has_a_field(operator: ops.Operator) -> None:
    operation = operator.operation
    fields = {name for name, *_ in _library.CALLS[f"fdma_{operation.function}"]._fields_}
    fields |= {"expiry", "slot"} if "selection" in fields else set()
    names = (*operation.tensors, *operation.options, *operation.results)
    assert {_arguments.field_of(name) for name in names} - fields <= NO_FIELD


def test_every_status_is_an_exception() -> None:
    _library.check(_library.OK)
    expected = {
        _library.INVALID_ARGUMENT: ValueError,
        _library.UNSUPPORTED: NotImplementedError,
        _library.WORKSPACE_TOO_SMALL: RuntimeError,
        _library.CUDA_ERROR: RuntimeError,
    }
    for status, exception in expected.items():
        with pytest.raises(exception):
            _library.check(status)
