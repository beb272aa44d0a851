"""Every argument of every public callable, replaced by something else: each call is legal, or is
refused with the name of the argument and what is wanted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import flash_dmattn
import pytest
import torch
import wrong_calls
from flash_dmattn import distributed
from wrong_calls import Call, wrong_values

# Arguments that may differ from their annotation.
UNUSED = {"None", "text", "a list", "an ndarray", "a number"}
LEGAL = {
    # Part of flash-attn's order, but not needed here.
    ("flash_dmattn_varlen_func", "max_seqlen_q"): UNUSED,
    ("flash_dmattn_varlen_func", "max_seqlen_k"): UNUSED,
    ("flash_dmattn_varlen_func with scores", "max_seqlen_q"): UNUSED,
    ("flash_dmattn_varlen_func with scores", "max_seqlen_k"): UNUSED,
    ("flash_dmattn_varlen_qkvpacked_func", "max_seqlen"): UNUSED,
    # Not read without dt_proj.
    ("flash_dmattn_varlen_func", "keep_window_size"): UNUSED,
    ("flash_dmattn_varlen_func", "recent"): UNUSED,
    ("flash_dmattn_varlen_func", "sinks"): UNUSED,
    ("flash_dmattn_varlen_func", "bias_form"): UNUSED,
    ("flash_dmattn_varlen_func", "scope"): UNUSED,
    # Describes how the selection was made.
    ("Selection", "gap"): UNUSED,
    # A mask of 1.0 and 0.0.
    ("mask_lists", "attn_mask"): {"another dtype"},
    ("flash_dmattn_func", "attn_mask"): {"another dtype"},
    ("flash_dmattn_qkvpacked_func", "attn_mask"): {"another dtype"},
    ("flash_dmattn_kvpacked_func", "attn_mask"): {"another dtype"},
    ("MultiheadAttention.forward", "key_padding_mask"): {"another dtype"},
    # Rotation computes with any numbers.
    ("DynamicMaskAttention.forward", "positions"): {"another dtype"},
    ("DynamicMaskAttention.rotate_heads", "positions"): {"another dtype"},
    ("DynamicMaskAttention.rotate_heads", "x"): {"another dtype"},
    # torch.nn's module takes None as well.
    ("MultiheadAttention.forward", "need_weights"): {"None"},
    ("MultiheadAttention.forward", "average_attn_weights"): {"None"},
    ("MultiheadAttention.forward", "is_causal"): {"None"},
    # Every tensor has tokens.
    ("split_sequence", "tensor"): {"another rank", "another dtype", "another device"},
    ("gather_sequence", "tensor"): {"another rank", "another dtype"},
    # The name of a new file.
    ("tune", "file"): {"text"},
}
ERRORS = (TypeError, ValueError, NotImplementedError)
# torch.nn's classes for shapes, and PyTorch's words for ranks.
OF_TORCH = (*ERRORS, AssertionError, RuntimeError)
WANTED = re.compile(r"want|supported|which no kernel supports|'s is |should be|expected")


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """tune() may write a file. No tuning is left."""
    monkeypatch.chdir(tmp_path)
    yield
    flash_dmattn.load_tuning(None)


MAKERS = (
    *(wrong_calls.scoring, wrong_calls.attending, wrong_calls.records),
    *(wrong_calls.caches, wrong_calls.layers),
)
CALLS: dict[str, Call] = {name: call for make in MAKERS for name, call in make().items()}
CALLS.update(wrong_calls.ranks())


def is_legal(name: str, argument: str, annotation: str, kind: str) -> bool:
    by_annotation = {"None": "None" in annotation, "a number": "float" in annotation}
    return by_annotation.get(kind, False) or kind in LEGAL.get((name, argument), ())


def fault_of(name: str, argument: str, value: object, may_pass: bool) -> str | None:
    """The fault in the call's answer to this value of an argument; None if it is right."""
    call = CALLS[name]
    errors = OF_TORCH if name == "MultiheadAttention.forward" else ERRORS
    try:
        call.function(**{**call.given, argument: value})
    except FileNotFoundError as error:
        return None if "file: is 'text', want" in str(error) else repr(error)
    except errors as error:
        message = str(error)
        is_named = re.search(rf"\b{argument}\b", message) is not None
        return None if is_named and WANTED.search(message) else repr(error)
    except Exception as error:
        return repr(error)
    return None if may_pass else "is not refused"


@pytest.mark.parametrize("name", [*CALLS, "DogeCache"])
def test_wrong_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "DogeCache":
        transformers = pytest.importorskip("transformers")
        from flash_dmattn.transformers import DogeCache

        given = {"config": transformers.DogeConfig(num_hidden_layers=1)}
        monkeypatch.setitem(CALLS, name, Call(DogeCache, given))
    call = CALLS[name]
    call.function(**call.given)
    faults = {}
    for argument, parameter in call.parameters().items():
        for kind, value in wrong_values(call.given.get(argument)):
            may_pass = is_legal(name, argument, str(parameter.annotation), kind)
            fault = fault_of(name, argument, value, may_pass)
            if fault is not None:
                faults[argument, kind] = fault
    assert not faults


@pytest.mark.parametrize(("name", "argument"), LEGAL)
def test_what_is_legal(name: str, argument: str) -> None:
    values = dict(wrong_values(CALLS[name].given.get(argument)))
    for kind in LEGAL[name, argument] - {"None"}:
        CALLS[name].function(**{**CALLS[name].given, argument: values[kind]})


def public_methods(of: type) -> set[str]:
    """The public methods of a class, with the class itself."""
    own = (name for name, one in vars(of).items() if callable(one) and not name.startswith("_"))
    return {of.__name__, *(f"{of.__name__}.{name}" for name in own if name != "extra_repr")}


def test_every_callable_is_called() -> None:
    """TuningTrial is a result."""
    found = {name.split(" with ")[0].split(" of ")[0] for name in CALLS}
    functions = {*flash_dmattn.__all__, *distributed.__all__, "flash_dma.fwd"} - {"TuningTrial"}
    classes = ("DynamicMaskAttention", "DynamicMaskCache", "LayerCaches", "MultiheadAttention")
    methods = set().union(*(public_methods(getattr(flash_dmattn, name)) for name in classes))
    assert found == functions | methods


def test_names_of_the_package() -> None:
    names = dir(flash_dmattn)
    assert set(flash_dmattn.__all__) < set(names)
    assert {"cache", "ops", "nn", "version"}.isdisjoint(names)
    assert all(hasattr(flash_dmattn, name) for name in flash_dmattn.__all__)
