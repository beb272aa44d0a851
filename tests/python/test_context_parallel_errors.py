"""Ranks that disagree, refuse their arguments, stay away or are gone: all ranks get the same error,
in bounded time, and then the group works again.

The module runs on the ranks too: record_refusals() and the functions beside it.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import context_ranks
import pytest
import torch
import torch.distributed as dist
from context_ranks import refusal_of
from flash_dmattn import DynamicMaskAttention, distributed
from torch.distributed.device_mesh import init_device_mesh

SIZE = 3  # ranks
ODD, OTHERS = 1, (0, 2)  # the rank that differs from the others
SECONDS = 2  # the timeout of the process group where a rank stays away
SOON = 5  # seconds, ample for ranks to compare their arguments
LENGTH = 6

Arguments = dict[str, Any]


def make_arguments(**options: Any) -> Arguments:
    """Arguments of context_parallel_attention() for a rank, all of the same sizes."""
    sizes = {"batch": 1, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": torch.float32}
    sizes.update({name: options.pop(name) for name in list(options) if name in sizes})
    batch, q_heads, kv_heads, head_dim, dtype = sizes.values()
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    found = {
        "query": normal(batch, LENGTH, q_heads, head_dim),
        "key": normal(batch, LENGTH, kv_heads, head_dim),
        "value": normal(batch, LENGTH, kv_heads, head_dim),
        "dt_proj": normal(kv_heads, kv_heads * head_dim),
        "a_coef": torch.ones(kv_heads),
        "window": 4,
    }
    return {**found, **options}


def attend(**options: Any) -> torch.Tensor:
    return distributed.context_parallel_attention(**make_arguments(**options))


def attend_to_all(**options: Any) -> torch.Tensor:
    found = make_arguments(**options)
    for name in ("dt_proj", "a_coef", "window"):
        found.pop(name)
    return distributed.ring_attention(**found)


def join(**options: Any) -> torch.Tensor:
    options = {"size": 3, "dim": 1, "dtype": torch.float32, "requires_grad": False, **options}
    tensor = torch.ones(2, LENGTH, options["size"], dtype=options["dtype"])
    return distributed.gather_sequence(
        tensor.requires_grad_(options["requires_grad"]), options["dim"]
    )


STARTS = [0, 5, 18]
VALID = torch.ones(1, LENGTH, dtype=torch.bool)
NEEDS_GRADIENTS = make_arguments()["key"].requires_grad_()

# The call, its arguments on the odd rank and on the others, and words of the message: the argument,
# and two values of it.
UNLIKE: dict[str, tuple[Callable[..., Any], Arguments, Arguments, tuple[str, ...]]] = {
    "window": (attend, {"window": 5}, {}, ("window:", "5", "4")),
    "recent": (attend, {"recent": 2}, {}, ("recent:", "2", "0")),
    "sinks": (attend, {"sinks": 2}, {}, ("sinks:", "2", "0")),
    "dtype": (attend, {"dtype": torch.bfloat16}, {}, ("dtype", "bfloat16", "float32")),
    "query heads": (attend, {"q_heads": 2}, {}, ("q_heads:", "2", "4")),
    "kv heads": (attend, {"kv_heads": 4}, {}, ("kv_heads:", "4", "2")),
    "head_dim": (attend, {"head_dim": 16}, {}, ("head_dim:", "16", "8")),
    "batch": (attend, {"batch": 2}, {}, ("batch:", "2", "1")),
    "bias_form": (attend, {"bias_form": "linear"}, {}, ("bias_form:", "linear", "exp")),
    "causal": (attend, {"causal": False}, {}, ("causal:", "False", "True")),
    "softcap": (attend, {"softcap": 2.5}, {}, ("softcap:", "2.5", "0")),
    "softmax_scale": (attend, {"softmax_scale": 0.5}, {}, ("softmax_scale:", "0.5", "None")),
    "backend": (attend, {"backend": "reference"}, {}, ("backend:", "reference", "None")),
    "deterministic": (attend, {"deterministic": True}, {}, ("deterministic:", "True", "False")),
    "starts": (attend, {"starts": [0, 6, 18]}, {"starts": STARTS}, ("starts:",)),
    "starts on one rank": (attend, {"starts": STARTS}, {}, ("starts:", "None")),
    "dt_bias on one rank": (attend, {"dt_bias": torch.ones(2)}, {}, ("dt_bias",)),
    "sink_logit on one rank": (attend, {"sink_logit": torch.ones(4)}, {}, ("sink_logit",)),
    "requires_grad": (attend, {"key": NEEDS_GRADIENTS}, {}, ("requires_grad", "key")),
    "ring dtype": (attend_to_all, {"dtype": torch.bfloat16}, {}, ("dtype", "bfloat16")),
    "ring causal": (attend_to_all, {"causal": False}, {}, ("causal:", "False", "True")),
    "ring key_valid": (attend_to_all, {"key_valid": VALID}, {}, ("key_valid",)),
    "joined shape": (join, {"size": 4}, {}, ("shape", "4", "3")),
    "joined dim": (join, {"dim": 0, "size": 3}, {}, ("dim",)),
    "joined dtype": (join, {"dtype": torch.float16}, {}, ("dtype", "float16", "float32")),
    "joined requires_grad": (join, {"requires_grad": True}, {}, ("requires_grad", "True")),
}

# The odd rank's call with wrong arguments, and the error there.
WRONG: dict[str, tuple[Callable[..., Any], Arguments, str, str]] = {
    "query is none": (attend, {"query": None}, "TypeError", "query"),
    "window is no int": (attend, {"window": 4.5}, "TypeError", "window"),
    "window of 0": (attend, {"window": 0}, "ValueError", "window"),
    "sinks above window": (attend, {"sinks": 5}, "ValueError", "sinks"),
    "recent below 0": (attend, {"recent": -1}, "ValueError", "recent"),
    "recent without causal": (attend, {"recent": 1, "causal": False}, "ValueError", "recent"),
    "key of another length": (
        attend,
        {"key": torch.zeros(1, LENGTH - 1, 2, 8)},
        "ValueError",
        "key",
    ),
    "dt_proj of another shape": (attend, {"dt_proj": torch.zeros(2, 8)}, "ValueError", "dt_proj"),
    "score beside dt_proj": (
        attend,
        {"score": torch.zeros(1, 2, LENGTH), "bias_form": "none"},
        "ValueError",
        "dt_proj",
    ),
    "score with a bias": (
        attend,
        {"score": torch.zeros(1, 2, LENGTH), "dt_proj": None, "a_coef": None},
        "ValueError",
        "score",
    ),
    "key_valid of another shape": (
        attend,
        {"key_valid": torch.ones(1, 2, dtype=torch.bool)},
        "ValueError",
        "key_valid",
    ),
    "bias_form that is none": (attend, {"bias_form": "sine"}, "ValueError", "bias_form"),
    "backend that is none": (attend, {"backend": "abacus"}, "NotImplementedError", "backend"),
    "starts that descend": (attend, {"starts": [0, 9, 5]}, "ValueError", "starts"),
    "starts with a batch": (attend, {"starts": STARTS, "batch": 2}, "ValueError", "starts"),
    "head_dim of 12": (attend, {"head_dim": 12}, "NotImplementedError", "head_dim"),
    "sink_logit of another shape": (
        attend,
        {"sink_logit": torch.zeros(3)},
        "ValueError",
        "sink_logit",
    ),
    "ring key of another length": (
        attend_to_all,
        {"key": torch.zeros(1, LENGTH - 1, 2, 8)},
        "ValueError",
        "key",
    ),
}


# ---- On the ranks ----


def works() -> bool:
    """True if the group of all ranks computes the same as one process."""
    found = distributed.gather_sequence(attend())
    return found.shape[1] == SIZE * LENGTH and bool(torch.isfinite(found).all())


def refuse(call: Callable[..., Any], arguments: Arguments) -> Arguments:
    found = refusal_of(lambda: call(**arguments))
    return {**found, "works": context_ranks.attempt(works)}


def assert_refused(
    call: Callable[..., Any], arguments: Arguments, kind: str, *words: str, works: bool = True
) -> None:
    """The call's error comes soon, and then the group works again."""
    found = refuse(call, arguments) if works else refusal_of(lambda: call(**arguments))
    assert found["kind"] == kind and all(one in found["message"] for one in words), found
    assert found["seconds"] < SOON and found.get("works", True) is True, found


def call_another_function(rank: int) -> Arguments:
    return refuse(attend_to_all if rank == ODD else attend, {})


def give_lengths(rank: int) -> None:
    """Lengths that are wrong on every rank. With lengths, ranks do not compare arguments."""
    for lengths, words in (
        ([LENGTH] * 2, "want 3 numbers of 0 or more"),
        ([LENGTH, -1, LENGTH], "want 3 numbers of 0 or more"),
        ([LENGTH + 1] * SIZE, "this rank has 7, want 6"),
    ):
        assert_refused(attend, {"lengths": lengths}, "ValueError", "lengths: ", words)
    split = functools.partial(distributed.split_sequence, torch.ones(1, 10))
    for lengths, words in (
        ([5, 3, 3], "their sum is 11, want 10"),
        ([10], "want 3 numbers of 0 or more"),
    ):
        assert_refused(split, {"lengths": lengths}, "ValueError", "lengths: ", words)


def give_groups(rank: int) -> None:
    without = dist.new_group([0, 2])
    rectangle = init_device_mesh("cpu", (1, 3), mesh_dim_names=("rows", "columns"))
    words = "group: is a mesh of 2 dimensions, want one"
    assert_refused(attend, {"group": rectangle}, "ValueError", words)
    words = "group: is 'all of them', a str, want"
    assert_refused(attend, {"group": "all of them"}, "TypeError", words)
    layer = DynamicMaskAttention(16, 2, 2, 4, process_group=rectangle)
    words = "group: is a mesh of 2 dimensions, want one"
    assert_refused(layer, {"x": torch.zeros(1, 4, 16)}, "ValueError", words)
    if rank == ODD:
        words = "group: does not have this process as a rank"
        assert_refused(attend, {"group": without}, "ValueError", words, works=False)


def give_what_is_wrong_everywhere(rank: int) -> None:
    """The ranks agree on the arguments, which are wrong on all of them."""
    for call in (attend, attend_to_all):
        for name, value, kind in (
            ("softmax_scale", -1.0, "ValueError"),
            ("softcap", -1.0, "ValueError"),
            ("head_dim", 12, "NotImplementedError"),
            ("backend", "abacus", "NotImplementedError"),
        ):
            assert_refused(call, {name: value}, kind, name)


CHECKS = {one.__name__: one for one in (give_lengths, give_groups, give_what_is_wrong_everywhere)}


def record_refusals(rank: int) -> dict[str, Any]:
    found = {}
    for name, (call, odd, others, _) in UNLIKE.items():
        found[name] = refuse(call, odd if rank == ODD else others)
    for name, (call, odd, *_) in WRONG.items():
        found[name] = refuse(call, odd if rank == ODD else {})
    runs = {"function": call_another_function, **CHECKS}
    return {**found, **context_ranks.record(runs, rank)}


def record_absence(rank: int) -> dict[str, Any]:
    """The odd rank makes no call until the others have an error. Then it leaves."""
    ready = dist.PrefixStore("ready", dist.distributed_c10d._get_default_store())
    calls = {"attend": attend, "ring": attend_to_all}
    groups = {name: dist.new_group(timeout=timedelta(seconds=SECONDS)) for name in calls}
    soon = dist.new_group(timeout=timedelta(seconds=SECONDS // 2))
    for name, group in groups.items():
        options = {"group": group, "lengths": [LENGTH] * SIZE}
        calls[f"{name} with lengths"] = functools.partial(calls[name], **options)
    calls["group of a shorter timeout"] = functools.partial(attend, group=soon)
    usable = dist.new_group(timeout=timedelta(seconds=SECONDS))
    found = {}
    for name, call in calls.items():
        print(name, flush=True)
        if rank != ODD:
            found[name] = refusal_of(call)
            ready.set(f"{name}/{rank}", "")
            continue
        others = [f"{name}/{other}" for other in range(SIZE) if other != ODD]
        while not ready.check(others):  # longer than the store's wait() waits
            time.sleep(0.02)
    if rank == ODD:  # its last call comes too late
        ready.set("late", json.dumps(refusal_of(call)))
    found["late"] = json.loads(ready.get("late"))
    found["usable"] = bool(torch.isfinite(attend(group=soon)).all())
    return {**found, **leave(rank, ODD, usable)}


def leave(rank: int, leaving: int, group: Any) -> dict[str, Any]:
    """A rank ends after a call that all have made. The others make more calls."""
    found = {"before": bool(torch.isfinite(attend(group=group)).all())}
    if rank == leaving:
        os._exit(0)
    found["after"] = refusal_of(lambda: attend(group=group))
    found["again"] = refusal_of(lambda: attend_to_all(group=group))
    return found


def leave_first(rank: int) -> dict[str, Any]:
    """The process with the store leaves."""
    return leave(rank, 0, None)


# ---- In the process of the tests ----

REFUSALS = context_ranks.Once(__name__, "record_refusals", SIZE, timeout=60)
ABSENCE = context_ranks.Once(__name__, "record_absence", SIZE, timeout=60, rank_timeout=SECONDS)


def assert_usable(found: list[Arguments]) -> None:
    for one in found:
        assert one["seconds"] < SOON and one["works"] is True


@pytest.mark.parametrize("name", UNLIKE)
def test_ranks_that_disagree(name: str) -> None:
    """All have the same message, which says which ranks have which value."""
    found = REFUSALS.results_of(name)
    assert_usable(found)
    assert {one["kind"] for one in found} == {"ValueError"}
    (message,) = {one["message"] for one in found}
    words = (*UNLIKE[name][-1], f"rank {ODD}", "ranks 0, 2", "want the same on all ranks")
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", WRONG)
def test_a_rank_that_refuses_its_arguments(name: str) -> None:
    """The other ranks raise its message."""
    _, _, kind, argument = WRONG[name]
    found = REFUSALS.results_of(name)
    assert_usable(found)
    odd = found[ODD]
    assert odd["kind"] == kind and argument in odd["message"], odd
    for one in (found[rank] for rank in OTHERS):
        assert one["kind"] == "ValueError"
        assert one["message"] == f"rank {ODD}: {odd['message']}"


def test_different_functions() -> None:
    found = REFUSALS.results_of("function")
    assert_usable(found)
    (message,) = {one["message"] for one in found}
    assert message.startswith("function: is context_parallel_attention on ranks 0, 2, ring_att")
    assert f"ring_attention on rank {ODD}" in message
    assert {one["kind"] for one in found} == {"ValueError"}


@pytest.mark.parametrize("name", CHECKS)
def test_on_ranks(name: str) -> None:
    assert REFUSALS.results_of(name) == [None] * SIZE


@pytest.mark.parametrize("call", [attend, attend_to_all, join])
def test_no_process_group(call: Callable[..., Any]) -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="^group: torch.distributed has no process group"):
        call()


@pytest.mark.parametrize("name", ["attend", "ring"])
def test_a_rank_that_stays_away(name: str) -> None:
    """The others wait as long as the timeout of the process group."""
    for rank in OTHERS:
        one = ABSENCE.results()[rank][name]
        assert one["kind"] == "RuntimeError" and one["seconds"] < SECONDS + SOON
        want = f"group: rank {ODD} made no call of flash_dmattn within {SECONDS} s"
        assert one["message"] == want


@pytest.mark.parametrize("name", ["attend with lengths", "ring with lengths"])
def test_a_rank_that_stays_away_where_lengths_are_given(name: str) -> None:
    """Operations that wait for it end with the timeout of the process group."""
    for rank in OTHERS:
        one = ABSENCE.results()[rank][name]
        assert one["kind"] == "RuntimeError" and one["seconds"] < SECONDS + SOON


def test_a_group_of_a_shorter_timeout() -> None:
    """The group's own timeout applies, not the timeout of the default process group."""
    for rank in OTHERS:
        one = ABSENCE.results()[rank]["group of a shorter timeout"]
        want = f"group: rank {ODD} made no call of flash_dmattn within {SECONDS // 2} s"
        assert one["kind"] == "RuntimeError" and one["message"] == want


def test_a_rank_that_calls_too_late() -> None:
    """It gets an error as soon as it calls, and the next call works."""
    for rank in OTHERS:
        late = ABSENCE.results()[rank]["late"]
        assert late["kind"] == "ValueError" and late["seconds"] < SECONDS / 2
        assert f"rank {OTHERS[0]}: group: rank {ODD} made no call of" in late["message"]
        assert ABSENCE.results()[rank]["usable"] is True


def test_a_rank_that_has_died() -> None:
    found = ABSENCE.results()
    assert found[ODD] is None
    for rank in OTHERS:
        one = found[rank]
        assert one["before"] is True
        for name in ("after", "again"):
            assert one[name]["kind"] == "RuntimeError" and one[name]["seconds"] < SECONDS + SOON
            assert one[name]["message"].startswith(f"group: rank {ODD} made no call")


def test_the_rank_with_the_store_has_died() -> None:
    options = {"timeout": 60, "rank_timeout": SECONDS}
    found = context_ranks.run_ranks([f"{__name__}.leave_first"], SIZE, **options)
    assert found[0] is None
    for (one,) in found[1:]:
        assert one["before"] is True
        for name in ("after", "again"):
            assert one[name]["kind"] == "RuntimeError" and one[name]["seconds"] < SECONDS + SOON
            assert one[name]["message"].startswith("group: the store of the process group is gone")
