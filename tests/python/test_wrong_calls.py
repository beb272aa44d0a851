"""Every argument of every public callable, given something else: each call is refused with the name
of the argument and what is wanted, or is legal."""

from __future__ import annotations

import re
from collections.abc import Iterator

import flash_dmattn
import pytest
import torch
import wrong_calls
from wrong_calls import Call, wrong_values

# Legal, although another type than usual.
LEGAL: dict[tuple[str, str], str] = {}
ERRORS = (TypeError, ValueError, NotImplementedError)


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def all_calls() -> dict[str, Call]:
    makers = (
        *(wrong_calls.scoring, wrong_calls.attending, wrong_calls.records),
        *(wrong_calls.caches, wrong_calls.layers, wrong_calls.ranks),
    )
    return {name: call for make in makers for name, call in make().items()}


CALLS = all_calls()


@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments(name: str) -> None:
    CALLS[name].function(**CALLS[name].given)
    faults = []
    for argument, parameter in CALLS[name].parameters().items():
        for kind, wrong in wrong_values(CALLS[name].given.get(argument)):
            found = refusal(name, argument, wrong)
            print(name, "|", argument, "|", kind, "|", found)
