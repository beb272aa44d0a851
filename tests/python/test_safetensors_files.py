"""Malformed files are refused with one line and exit status 2, and outputs keep their content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Iterable

import numpy as np
import pytest
from safetensors import numpy as files
from tool import attend_json, make_inputs, pack, refusal

GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DATA = bytes(8)


def entry(**changes: Any) -> dict[str, Any]:
    """A header with one tensor, `x`, of eight bytes, with changed fields."""
    fields = {**GOOD, **changes}
    return {"x": {name: value for name, value in fields.items() if value is not None}}


def pair(first: tuple[int, int], second: tuple[int, int]) -> dict[str, Any]:
    """A header with two tensors of bytes at these offsets."""
    return {
        name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in {"x": first, "y": second}.items()
    }


DUPLICATE = b'{"x":' + json.dumps(GOOD).encode() + b',"x":' + json.dumps(GOOD).encode() + b"}"
CUT = "not a safetensors file, or a truncated one"
HUGE = b'{"x":{"dtype":"F32","shape":[1e400],"data_offsets":[0,8]}}'
TWICE = b'{"x":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}'

# Changes of the only entry of a header before 8 bytes, and words of the message.
FIELDS: list[tuple[dict[str, Any], str]] = [
    (dict(dtype=None), "'x': dtype is missing"),
    (dict(shape=None), "'x': shape is missing"),
    (dict(data_offsets=None), "'x': data_offsets is not"),
    (dict(dtype=32), "'x': dtype is missing or not a string"),
    (dict(dtype="F33"), "'x': unknown dtype 'F33'"),
    (dict(shape=2), "'x': shape is missing or not an array"),
    (dict(shape=[-2]), "'x': shape[0] is not an integer"),
    (dict(shape=[1, 2.5]), "'x': shape[1] is not an integer"),
    (dict(shape=["2"]), "'x': shape[0] is not an integer"),
    (dict(shape=[None]), "'x': shape[0] is not an integer"),
    (dict(shape=[2**63]), "'x': shape[0] is not an integer"),
    (dict(shape=[2**53 + 2]), "'x': shape[0] is not an integer"),
    (dict(shape=[2**32, 2**32]), "more than 2^63 elements"),
    (dict(shape=[2**52, 2**7]), "do not fit its shape"),
    (dict(shape=[0, 2**52, 2**52]), "more than 2^63 elements"),
    (dict(shape=[3]), "do not fit its shape: bytes: 8, elements of F32: 3"),
    (dict(shape=[1]), "do not fit its shape: bytes: 8, elements of F32: 1"),
    (dict(data_offsets=[8]), "data_offsets is not two"),
    (dict(data_offsets=[0, 8, 8]), "data_offsets is not two"),
    (dict(data_offsets=[8, 0]), "[8, 0] are no range"),
    (dict(data_offsets=[-8, 0]), "data_offsets is not two"),
    (dict(data_offsets=[0, 2**60]), "data_offsets is not two"),
    (dict(data_offsets=[8, 16]), "[8, 16] are no range"),
    (dict(strides=[1]), "unknown field 'strides'"),
]
MALFORMED = {
    "empty": (b"", "the file is empty"),
    "short": (b"\x02\0\0", "not a safetensors file: its size in bytes is 3, which is too few"),
    "only a length": (pack(b""), "not a safetensors file: the header does not begin with '{'"),
    "length past the end": (pack(entry(), DATA, 1000), f"{CUT}: its header would have 1000"),
    "length one past the end": (pack(b"{}", b"", 3), "would have 3 bytes, the file has 10"),
    "length of 2^64 - 1": (pack(entry(), DATA, 2**64 - 1), "would have 18446744073709551615"),
    "length above the limit": (pack(entry(), DATA, 10**8 + 1), "more than the limit of"),
    "length too small": (pack(entry(), DATA, 20), "the header is not JSON"),
    "length too large": (pack(entry(), DATA, len(json.dumps(entry())) + 4), "header"),
    "truncated data": (pack(entry(), DATA[:-1]), "'x': data_offsets [0, 8] are no range"),
    "no JSON": (pack(b"{x}"), "not a safetensors file: the header is not JSON at byte 10"),
    "an array": (pack(b"[]"), "does not begin with '{'"),
    "text after the end": (pack(b"{} {}"), "text after its end, at byte 11"),
    "a NUL": (pack(b'{"x\0":1}'), "NUL character at byte 11"),
    "an escaped NUL": (pack(b'{"x\\u0000":1}'), "NUL character at byte 11"),
    "deep arrays": (pack(b'{"x":' + b"[" * 10**6), "nested deeper than 4 levels at byte"),
    "deep objects": (pack(b'{"x":' * 10**5), "nested deeper than 4 levels at byte"),
    "too many values": (pack(b'{"x":[' + b"0," * 4_000_002 + b"0]}"), "more than 4000000 values"),
    "entry is a number": (pack({"x": 1}), "tensor 'x': not an object"),
    "shape of 1e400": (pack(HUGE, DATA), "'x': shape[0] is not an integer"),
    "half a byte": (
        pack(entry(dtype="F4", shape=[3], data_offsets=[0, 2]), DATA[:2]),
        "do not fit its shape",
    ),
    "overlap": (pack(pair((0, 6), (4, 8)), DATA), "tensor 'y': overlaps 'x' at byte 4"),
    "same bytes": (pack(pair((0, 8), (0, 8)), DATA), "overlaps"),
    "hole": (pack(pair((0, 3), (5, 8)), DATA), "'y': begins at byte 5 of the data, want 3"),
    "hole at the start": (
        pack(pair((1, 3), (3, 8)), DATA),
        "'x': begins at byte 1 of the data, want 0",
    ),
    "bytes after the last": (
        pack(entry(), DATA + b"12"),
        "data: ends at byte 10, want 8, the end of the last",
    ),
    "names twice": (pack(DUPLICATE, DATA), "header: 'x' occurs twice"),
    "field twice": (pack(TWICE, DATA), "tensor 'x': dtype occurs twice"),
    "metadata is a list": (pack({"__metadata__": [], **entry()}, DATA), "__metadata__: not an"),
    "metadata of 1": (pack({"__metadata__": {"n": 1}, **entry()}, DATA), "'n' is not a string"),
    "newline in a name": (pack({"x\ny": 1}), "tensor 'x?y': not an object"),
    "terminal escape in a name": (pack({"x\x9b31m": 1}), "tensor 'x\\xc2\\x9b31m': not an object"),
    **{str(changes): (pack(entry(**changes), DATA), words) for changes, words in FIELDS},
    **{
        f"number {number.decode()}": (
            pack(json.dumps(entry()).encode().replace(b"[0, 8]", number), DATA),
            f"header: number '{words}' at byte",
        )
        for number, words in [
            (b"[0.0,8]", "0.0"),
            (b"[0,80e-1]", "80e-1"),
            (b"[-0,8]", "-0"),
            (b"[00,8]", "00"),
            (b"[0,08]", "08"),
            (b"[0,8E0]", "8E0"),
        ]
    },
    "fraction in a shape": (
        pack(b'{"x":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}', DATA),
        "header: number '2.0' at byte 37",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file(tmp_path: Path, case: str) -> None:
    content, words = MALFORMED[case]
    path, out_path = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    path.write_bytes(content)
    out_path.write_bytes(b"old")
    line = refusal("attend", path, "--window", "4", "--out", out_path)
    assert line.startswith(f"fdma attend: {path}: ")
    assert words in line
    assert out_path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 2


# Every dtype that the safetensors library writes (0.8.0), by the bits of an element.
DTYPES = {
    4: "F4",
    6: "F6_E2M3 F6_E3M2",
    8: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
    16: "U16 I16 F16 BF16",
    32: "U32 I32 F32",
    64: "U64 I64 F64 C64",
}


def lay_out(names: Iterable[str]) -> tuple[dict[str, Any], bytes]:
    """The header and the data of make_inputs() in this order."""
    tensors, header, data = make_inputs(), {}, b""
    for name in names:
        shape, offsets = list(tensors[name].shape), [len(data), len(data) + tensors[name].nbytes]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        data += tensors[name].tobytes()
    return header, data


def test_other_tensors_have_any_dtype(tmp_path: Path) -> None:
    path = tmp_path / "in.safetensors"
    header, data = lay_out(make_inputs())
    for bits, names in DTYPES.items():
        for dtype in names.split():
            offsets = [len(data), len(data) + bits]  # of eight elements
            fields = {"dtype": dtype, "shape": [8], "data_offsets": offsets}
            header[f'other {dtype} 0.0 "-0'] = fields
            data += bytes(bits)
    path.write_bytes(pack(header, data))
    assert attend_json(path, "--window", "4")["keys_per_query"] == 4


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.safetensors"
    files.save_file(make_inputs(q_len=2, kv_len=2, q_heads=1, kv_heads=1, head_dim=8), path)
    whole = path.read_bytes()
    assert attend_json(path, "--window", "1")["keys_per_query"] == 1
    for length in range(0, len(whole), 5):
        path.write_bytes(whole[:length])
        assert str(path) in refusal("attend", path, "--window", "1")


def test_not_a_file(tmp_path: Path) -> None:
    assert "not a regular file" in refusal("attend", tmp_path, "--window", "1")
    assert "not a regular file" in refusal("attend", "/dev/zero", "--window", "1")


def changed(**changes: np.ndarray | None) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray | None] = {**make_inputs(), **changes}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


UNFIT = {
    "no q": (changed(q=None), "no tensor 'q'"),
    "no score": (changed(score=None), "no tensor 'score', want it or both 'dt_proj' and 'a'"),
    "a alone": (changed(score=None, a=zeros(2)), "want it or both 'dt_proj' and 'a'"),
    "integers": (changed(k=np.zeros((1, 24, 2, 16), np.int32)), "'k': dtype is I32, want F16"),
    "rank 3": (changed(v=zeros(24, 2, 16)), "'v': rank is 3, want 4"),
    "rank 5": (changed(q=zeros(1, 1, 24, 4, 16)), "'q': rank is 5, want 4"),
    "rank 9": (changed(q=zeros(1, 1, 1, 1, 1, 1, 24, 4, 16)), "'q': rank is 9, want 4"),
    "nothing in it": (changed(q=zeros(1, 0, 4, 16)), "'q': has no elements"),
    "other batch": (
        changed(k=zeros(2, 24, 2, 16), v=zeros(2, 24, 2, 16), score=zeros(2, 2, 24)),
        "k: ",
    ),
    "other length": (changed(v=zeros(1, 23, 2, 16)), "v: "),
    "other head_dim": (changed(k=zeros(1, 24, 2, 8)), "k: "),
    "group of 4/3": (
        changed(k=zeros(1, 24, 3, 16), v=zeros(1, 24, 3, 16), score=zeros(1, 3, 24)),
        "q_heads: ",
    ),
    "head_dim 12": (
        changed(q=zeros(1, 24, 4, 12), k=zeros(1, 24, 2, 12), v=zeros(1, 24, 2, 12)),
        "head_dim: ",
    ),
    "score of other keys": (changed(score=zeros(1, 2, 23)), "'score': shape is [1, 2, 23], want"),
    "projection of other size": (
        changed(score=None, a=zeros(2), dt_proj=zeros(2, 31)),
        "dt_proj: ",
    ),
    "a of other size": (changed(score=None, a=zeros(3), dt_proj=zeros(2, 32)), "a: "),
    "more queries than keys": (changed(q=zeros(1, 25, 4, 16)), "q_len: "),
}


@pytest.mark.parametrize("case", UNFIT)
def test_unfit_tensors(tmp_path: Path, case: str) -> None:
    tensors, words = UNFIT[case]
    path, out_path = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    files.save_file(tensors, path)
    line = refusal("attend", path, "--window", "4", "--causal", "--out", out_path)
    assert line.startswith(f"fdma attend: {path}: ")
    assert words in line
    assert not out_path.exists()


def test_other_tensors_may_be_anything(tmp_path: Path) -> None:
    path = tmp_path / "in.safetensors"
    extra = {
        "deep": np.zeros((1,) * 12, np.int8),
        "nothing": np.zeros((0, 5), np.float64),
        "no axes": np.array(1, np.int64),
        "yes": np.ones(3, bool),
    }
    files.save_file({**make_inputs(), **extra}, path, metadata={"made by": "a test"})
    assert attend_json(path, "--window", "4")["window"] == 4


@pytest.mark.parametrize("spaces", [0, 1, 7])
def test_any_alignment(tmp_path: Path, spaces: int) -> None:
    """Data need not be aligned, and tensors may be stored in any order."""
    path = tmp_path / "in.safetensors"
    files.save_file(make_inputs(), path)
    aligned = attend_json(path, "--window", "4", "--causal")
    header, data = lay_out(reversed(make_inputs()))
    path.write_bytes(pack(json.dumps(header).encode() + b" " * spaces, data))
    report = attend_json(path, "--window", "4", "--causal")
    same = ("mass_mean", "mass_worst", "difference_dense", "difference_selected")
    assert [report[name] for name in same] == [aligned[name] for name in same]


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_float_types_are_read(tmp_path: Path, kind: type) -> None:
    path = tmp_path / "in.safetensors"
    files.save_file({name: t.astype(kind) for name, t in make_inputs().items()}, path)
    report = attend_json(path, "--window", "4")
    assert report["dtype"] == ("f16" if kind is np.float16 else "f32")
