"""Context parallel and ring attention: each rank's results against the results of the whole
sequence.

The module runs twice. On the ranks record_cases() computes every case. The tests compare the ranks'
results with evaluations of the whole sequence in evaluate.py. select() gives the selection.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import context_ranks
import evaluate
import flash_dmattn
import pytest
import torch
from context_cases import (
    CASES,
    DEVICE_COUNT,
    LEAVES,
    OF_TOKENS,
    Case,
    Tensors,
    make_tensors,
)
from context_ranks import own_tokens
from flash_dmattn import _arguments, _context, distributed

SELECTED = [name for name, case in CASES.items() if case.window is not None]
# Cases that keep keys with NaN scores have results of NaN.
COMPARED = [name for name, case in CASES.items() if case.total > 0 and case.scores != "NAN"]

OTHER_SEEDS = 8  # further inputs that set the tolerance of gradients of few numbers
REPEATED = {"a_coef", "dt_bias"}

# Cases that are run once more, with only some of the gradients.
PARTLY = ("eight-uneven", "linear", "no-bias", "full-eight", "packed-window-above-all", "bfloat16")
PARTLY += ("ring-uneven", "ring-full", "ring-bfloat16")
CAPTURED = [f"nccl/{name}" for name in ("two-uneven", *PARTLY) if f"nccl/{name}" in CASES]


@functools.lru_cache(maxsize=None)
def kept_of_whole(name: str, seed: int = 0) -> torch.Tensor:
    """bool [batch, kv_heads, total, total]: the keys that each query keeps, by select()."""
    case, given = CASES[name], make_tensors(name, seed)
    if case.window is None:
        valid = given.get("key_valid")
        seen = evaluate.visible_keys(case.total, case.total, case.causal, key_valid=valid)
        return seen.expand(case.batch, case.heads[1], -1, -1)
    weights = (given["dt_proj"], given["a_coef"])
    options = {"dt_bias": given.get("dt_bias"), "backend": case.backend}
    score, _ = flash_dmattn.score(given["value"], *weights, **options)
    starts = None if case.starts is None else torch.tensor(case.starts, dtype=torch.int32)
    options = {"scope": case.scope, "key_valid": given.get("key_valid"), "starts": starts}
    expiry = flash_dmattn.select(score, case.window, **case.rules, **options).expiry
    key = torch.arange(case.total)
    if not case.causal:
        return (expiry > key)[:, :, None, :].expand(-1, -1, case.total, -1)
    query = key[:, None]
    kept = (key <= query) & (query < expiry[:, :, None, :])
    if starts is not None:
        sequence = torch.searchsorted(starts, key, right=True)
        kept = kept & (sequence == sequence[:, None])
    return kept


# ---- On the ranks ----


def kept_of_rank(
    call: _context.Call, table: _context.Table | None, segments: list[_context.Segment]
) -> torch.Tensor:
    """bool [batch, kv_heads, own tokens, total]: the keys that each own query keeps, from expiry in
    the table and for the own keys."""
    own = call.own
    batch, kv_heads, _ = call.score.shape
    total = sum(layout.length for layout in call.layouts)
    kept = torch.zeros(batch, kv_heads, own.length, total, dtype=torch.bool)
    carried = None
    if table is not None:
        # The position of an empty row is -1. It goes to a column behind all others.
        carried = torch.where(table.position >= 0, table.position, total).long().cpu()
    for segment in segments:
        rows = carried.shape[-1] if segment.reads_carried else 0
        begin, end = segment.first, segment.last
        column = torch.arange(own.offset + begin, own.offset + end).expand(batch, kv_heads, -1)
        if not call.causal:
            live, column = (segment.expiry.cpu() > torch.arange(rows))[:, :, None], carried
        else:
            query = rows + torch.arange(end - begin)[:, None]
            key = torch.arange(rows + end - begin)
            live = (key <= query) & (query < segment.expiry.cpu()[:, :, None, :])
            column = torch.cat((carried, column), -1) if segment.reads_carried else column
        column = column[:, :, None, :].expand(-1, -1, end - begin, -1)
        found = torch.zeros(batch, kv_heads, end - begin, total + 1, dtype=torch.int32)
        found.scatter_add_(3, column, live.expand_as(column).int())
        assert (found[..., :-1] <= 1).all(), "a key is kept twice"
        kept[:, :, begin:end] = found[..., :-1] == 1
    return kept


def attend(
    case: Case, rank: int, group: Any, leaves: Tensors, valid: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    options = {**case.options, "causal": case.causal, "backend": case.backend, "return_lse": True}
    options["deterministic"] = case.device != "cpu"  # it makes a difference only on a device
    if valid is not None:
        valid = own_tokens(valid, case.lengths, rank)
        options["key_valid"] = valid.to(torch.uint8) if case.padding == "HOLES" else valid
    if case.gives_lengths:
        options["lengths"] = case.lengths
    if case.window is None:
        return distributed.ring_attention(**leaves, group=group, **options)
    options.update(case.rules, bias_form=case.bias_form)
    if case.starts is not None:  # a list and a tensor are equivalent
        starts = list(case.starts)
        options["starts"] = torch.tensor(starts, dtype=torch.int32) if rank % 2 else starts
    return distributed.context_parallel_attention(
        **leaves, window=case.window, group=group, **options
    )


def run_case(
    name: str, rank: int, group: Any, given: Tensors, differentiated: tuple[str, ...] = LEAVES
) -> Tensors:
    """out, lse and gradients of the own tokens, and the received bytes. Without dout the gradients
    come from lse alone."""
    case = CASES[name]
    leaves = {}
    for key in LEAVES:
        if key in given:
            own = own_tokens(given[key], case.lengths, rank) if key in OF_TOKENS else given[key]
            if key == "key":  # a view of a tensor whose heads come first
                own = own.transpose(1, 2).contiguous().transpose(1, 2)
            leaves[key] = own.detach().clone().requires_grad_(key in differentiated)
    with context_ranks.received_bytes() as forward:
        out, lse = attend(case, rank, group, leaves, given.get("key_valid"))
    targets = {key: leaf for key, leaf in leaves.items() if leaf.requires_grad}
    results = {"dout": (out, 1), "dlse": (lse, 2)}
    results = {key: found for key, found in results.items() if given[key] is not None}
    dresults = [own_tokens(given[key], case.lengths, rank, at) for key, (_, at) in results.items()]
    results = [one for one, _ in results.values()]
    gradients = ()
    with context_ranks.received_bytes() as backward:
        if targets:
            gradients = torch.autograd.grad(
                results, tuple(targets.values()), dresults, allow_unused=True
            )
    found = {"out": out.detach(), "lse": lse.detach()}
    found.update({f"d{key}": gradient for key, gradient in zip(targets, gradients)})
    found["received"] = forward["bytes"], backward["bytes"]
    return found


def poisoned(name: str) -> Tensors:
    """The tensors of a case, with NaN in keys that no query keeps."""
    given = dict(make_tensors(name))
    never = ~kept_of_whole(name).any(2)
    given["key"] = given["key"].masked_fill(never.transpose(1, 2)[..., None], math.nan)
    return given


def run_partly(name: str, rank: int, group: Any) -> Tensors:
    """The results of a case if not everything is asked for, and out if nothing requires
    gradients."""
    given, found = make_tensors(name), {}
    for names in (("query",), ("value",), ("key", "sink_logit")):
        if set(names) <= set(given):
            found["+".join(names)] = run_case(name, rank, group, given, names)
    found["dout of zeros"] = run_case(name, rank, group, {**given, "dout": 0 * given["dout"]})
    found["lse alone"] = run_case(name, rank, group, {**given, "dout": None})
    with torch.no_grad():
        found["nothing"] = run_case(name, rank, group, given, ())
    return found


def run_captured(name: str, rank: int, group: Any, given: Tensors) -> Tensors:
    """The same by a CUDA graph, which NCCL needs deleted before the process group ends."""
    graph = torch.cuda.CUDAGraph()
    # torch.cuda.graph() keeps its own stream, on the device of the first capture, but a process
    # uses other devices in other groups. Threads of NCCL may call CUDA meanwhile.
    stream = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        found = run_case(name, rank, group, given)
    for one in found.values():
        if isinstance(one, torch.Tensor):
            one.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return to_device(found, torch.device("cpu"))


def to_device(found: Any, device: torch.device) -> Any:
    """Move all tensors of a dictionary, and of dictionaries in it, to a device."""
    if isinstance(found, dict):
        return {key: to_device(one, device) for key, one in found.items()}
    return found.to(device) if isinstance(found, torch.Tensor) else found


def record_case(name: str, group: Any, of_all: int) -> Tensors:
    rank = context_ranks.MEMBERS[len(CASES[name].lengths)].index(of_all)
    device = context_ranks.device_of(CASES[name], rank)
    given = to_device(poisoned(name), device)
    select_segments = _context.select_segments
    kept = []

    def recording(call: _context.Call, table: _context.Table | None) -> list[_context.Segment]:
        segments = select_segments(call, table)
        kept.append(kept_of_rank(call, table, segments))
        return segments

    _context.select_segments = recording
    try:
        found = run_case(name, rank, group, given)
    finally:
        _context.select_segments = select_segments
    if kept:
        (found["kept"],) = kept
    if name in PARTLY:
        found["again"] = run_case(name, rank, group, to_device(make_tensors(name), device))
        found["partly"] = run_partly(name, rank, group)
    if name in CAPTURED:
        found["captured"] = run_captured(name, rank, group, given)
    return to_device(found, torch.device("cpu"))


def record_cases(rank: int) -> dict[str, Any]:
    """The results of each case on this rank, or the text of its error."""
    runs = {}
    for name, case in CASES.items():
        group = context_ranks.group_of(len(case.lengths), case.transport)
        if group is not None:
            runs[name] = functools.partial(record_case, name, group)
    return context_ranks.record(runs, rank)


# ---- In the process of the tests ----


SECONDS = 600 if DEVICE_COUNT else 90  # with two cores and no device it takes 25
RUN = context_ranks.Once(__name__, "record_cases", 8, timeout=SECONDS)


def on_ranks(name: str) -> list[Tensors]:
    """The results of a case, in the order of the ranks of its group."""
    return RUN.results_of(name, context_ranks.MEMBERS[len(CASES[name].lengths)])


class Evaluation(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor
    gradients: Tensors
    sizes: Tensors  # of gradients with few numbers: the sums of magnitudes of their terms


def evaluate_bias(
    case: Case, given: Tensors, value: torch.Tensor, order: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor | None, Tensors]:
    """The bias and the tensors it depends on. a_coef and dt_bias are repeated for each key, so that
    their gradients are the terms of sums, [batch, total, kv_heads]."""
    if case.window is None or case.bias_form == "none":
        return None, {}
    by_head = given["dt_proj"].unflatten(1, (-1, case.head_dim))[..., order].flatten(1)
    weights = {"value": value, "dt_proj": by_head, "a_coef": given["a_coef"]}
    if case.has_dt_bias:
        weights["dt_bias"] = given["dt_bias"]
    repeated = (case.batch, case.total, -1)
    weights = {
        key: (x.expand(repeated) if key in REPEATED else x).to(dtype).clone().requires_grad_()
        for key, x in weights.items()
    }
    score = evaluate.score(*list(weights.values())[:3], dtype, weights.get("dt_bias"))
    return score.exp() if case.bias_form == "exp" else score, weights


def evaluate_whole(
    name: str,
    dtype: torch.dtype,
    order: torch.Tensor,
    results: tuple[torch.Tensor, ...] | None,
    seed: int = 0,
) -> Evaluation:
    """out, lse and all gradients by the formulas, with the channels of a head in some order.
    Gradients come from `results`, the rounded out and lse; None: from the ones computed here.
    Scores are float32 at least, as in the package."""
    case, given = CASES[name], make_tensors(name, seed)
    wide = torch.promote_types(dtype, torch.float32)
    back = order.argsort()
    query, dout = given["query"][..., order], given["dout"][..., order]
    # Only keys that are never read have NaN.
    key, value = (given[one].nan_to_num(0)[..., order] for one in ("key", "value"))
    bias, weights = evaluate_bias(case, given, value, order, wide)
    numbers = {"bias": None if bias is None else bias.detach(), **case.options}
    mask = kept_of_whole(name, seed)
    rows = (query, key, value)
    out, lse = evaluate.attention(*rows, mask, dtype, **numbers)
    if case.has_sink_logit:
        sink = given["sink_logit"].to(dtype)[:, None]
        # The sum of the softmax has one more term.
        out = out * torch.sigmoid(lse - sink).transpose(1, 2)[..., None]
        lse = torch.logaddexp(lse, sink)
    used = (out, lse) if results is None else (results[0][..., order], results[1])
    dlse = given["dlse"]
    found = evaluate.attention_backward(dout, dlse, used, *rows, mask, dtype, **numbers)
    gradients, sizes = dict(zip(("query", "key", "value"), found)), {}
    if bias is not None:
        slopes = torch.autograd.grad(bias, tuple(weights.values()), found[3].to(bias.dtype))
        slopes = dict(zip(weights, slopes))
        for key in REPEATED & set(slopes):
            sizes[key] = slopes[key].abs().sum((0, 1))
            slopes[key] = slopes[key].sum((0, 1))
        gradients["value"] = gradients["value"] + slopes.pop("value")
        gradients.update(slopes)
        by_head = gradients["dt_proj"].unflatten(1, (-1, case.head_dim))
        gradients["dt_proj"] = by_head[..., back].flatten(1)
    if case.has_sink_logit:
        delta = (dout.to(wide) * used[0].to(wide)).sum(3).transpose(1, 2) - dlse.to(wide)
        weight = torch.exp(given["sink_logit"].to(wide)[:, None] - used[1].to(wide))
        gradients["sink_logit"] = -(weight * delta).sum((0, 2))
        sizes["sink_logit"] = (weight * delta).abs().sum((0, 2))
    for one in OF_TOKENS:
        gradients[one] = gradients[one][..., back]
    return Evaluation(out[..., back], lse, gradients, sizes)


def joined(name: str, key: str) -> torch.Tensor:
    """A result of the whole sequence: ranks' tokens beside each other, or the sum over ranks."""
    found = [one[key] for one in on_ranks(name)]
    if key[1:] in LEAVES[3:]:
        return sum(one.double() for one in found).to(found[0].dtype)
    return torch.cat(found, 2 if key == "lse" else 1)


@functools.lru_cache(maxsize=None)
def evaluations_of(name: str) -> tuple[Evaluation, list[Evaluation], list[Evaluation]]:
    """The exact evaluation, plain ones in the dtype of the case, and plain ones in lse's dtype."""
    case = CASES[name]
    orders = evaluate.orders_of(case.head_dim, 1)
    dtype = evaluate.plain_dtype(case.dtype)
    results = joined(name, "out"), joined(name, "lse")
    exact = evaluate_whole(name, torch.float64, torch.arange(case.head_dim), None)
    plain = [evaluate_whole(name, dtype, order, results) for order in orders]
    if dtype == torch.float32:
        return exact, plain, plain
    return exact, plain, [evaluate_whole(name, torch.float32, one, None) for one in orders]


@functools.lru_cache(maxsize=None)
def errors_of_other_inputs(name: str) -> list[Tensors]:
    """Errors of plain 16-bit evaluations in gradients of few numbers, for inputs of other seeds,
    relative to the sums of magnitudes of their terms. The order of channels hardly changes values
    that are rounded to 16 bits, so a sum that is accurate by chance is so in every order."""
    case, found = CASES[name], []
    order, dtype = torch.arange(case.head_dim), case.dtype
    for seed in range(1, 1 + OTHER_SEEDS if dtype.itemsize == 2 else 1):
        exact = evaluate_whole(name, torch.float64, order, None, seed)
        rounded = exact.out.to(dtype), exact.lse.to(_arguments.wide(dtype))
        plain = evaluate_whole(name, dtype, order, rounded, seed).gradients
        found.append(
            {
                key: (plain[key].double() - exact.gradients[key]) / size
                for key, size in exact.sizes.items()
            }
        )
    return found


@pytest.mark.parametrize("name", SELECTED)
def test_selection(name: str) -> None:
    """Every query keeps the same keys as in the whole sequence."""
    kept = torch.cat([one["kept"] for one in on_ranks(name)], 2)
    assert torch.equal(kept, kept_of_whole(name))


@pytest.mark.parametrize("name", COMPARED)
def test_results(name: str) -> None:
    exact, plain, in_wide = evaluations_of(name)
    out, lse = joined(name, "out"), joined(name, "lse")
    assert out.dtype == CASES[name].dtype and lse.dtype == _arguments.wide(CASES[name].dtype)
    evaluate.assert_within(out, exact.out, *(one.out for one in plain))
    evaluate.assert_within(lse, exact.lse, *(one.lse for one in in_wide))


@pytest.mark.parametrize("name", COMPARED)
def test_gradients(name: str) -> None:
    case = CASES[name]
    exact, plain, _ = evaluations_of(name)
    expected = {f"d{key}" for key in LEAVES if key in make_tensors(name)}
    assert {key for key in on_ranks(name)[0] if key[1:] in LEAVES} == expected
    compared = [key for key in LEAVES if key in exact.gradients]
    has_bias = case.window is not None and case.bias_form != "none"
    assert len(compared) >= (5 if has_bias else 3)
    for key in compared:
        like = make_tensors(name)[key]
        found, want = joined(name, f"d{key}"), exact.gradients[key]
        others = [one.gradients[key].to(evaluate.plain_dtype(like.dtype)) for one in plain]
        for errors in errors_of_other_inputs(name) if key in exact.sizes else ():
            others.append((want + errors[key] * exact.sizes[key]).to(others[0].dtype))
        assert found.dtype == like.dtype
        evaluate.assert_within(found, want, *others)
    for key in set(LEAVES) & set(make_tensors(name)) - set(compared):
        assert all(one[f"d{key}"] is None for one in on_ranks(name))


@pytest.mark.parametrize("name", CASES)
def test_keys_that_no_query_keeps(name: str) -> None:
    """They are NaN in all of these tests, and have no gradient."""
    never = ~kept_of_whole(name).any(2).transpose(1, 2)
    assert (joined(name, "dkey")[never] == 0).all()


def assert_bit_equal(found: Tensors, want: Tensors) -> None:
    compared = 0
    for key, one in found.items():
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, want[key], rtol=0, atol=0, equal_nan=True)
            compared += one.numel()
    assert compared > 0


@pytest.mark.parametrize("name", PARTLY)
def test_a_second_run(name: str) -> None:
    """It gives the same bits, also with numbers in the keys that no query keeps."""
    for one in on_ranks(name):
        assert_bit_equal(one["again"], one)


@pytest.mark.parametrize("name", PARTLY)
def test_some_of_the_gradients(name: str) -> None:
    """Gradients do not depend on which others are asked for."""
    compared = 0
    for one in on_ranks(name):
        partly = dict(one["partly"])
        of_zeros, of_lse = partly.pop("dout of zeros"), partly.pop("lse alone")
        pairs = [(of_lse, of_zeros), *((found, one) for found in partly.values())]
        for found, want in pairs:
            assert torch.equal(found["out"], one["out"]) and torch.equal(found["lse"], one["lse"])
            for key in found:
                if key[1:] in LEAVES and want[key] is not None:
                    assert torch.equal(found[key], want[key]), key
                    compared += found[key].numel()
    assert compared > 0


@pytest.mark.parametrize("name", CAPTURED)
def test_capture(name: str) -> None:
    """A CUDA graph of a call and its backward gives the same bits."""
    for one in on_ranks(name):
        assert_bit_equal(one["captured"], one)


@pytest.mark.parametrize("name", SELECTED)
def test_received_bytes(name: str) -> None:
    """A rank receives at most window + recent keys of each rank, with score, position and bias,
    whatever the number of tokens; and as many gradients."""
    case = CASES[name]
    keys = min(case.window + case.recent, max(case.lengths))
    size = torch.finfo(case.dtype).bits // 8
    numbers = 3 * torch.finfo(_arguments.wide(case.dtype)).bits // 8
    key_bytes = 2 * case.head_dim * size + numbers
    allowed = len(case.lengths) * case.batch * case.heads[1] * keys * key_bytes
    for one in on_ranks(name):
        assert all(0 <= received <= allowed for received in one["received"])
    if case.starts is None and sum(length > 0 for length in case.lengths) > 1:
        assert sum(one["received"][0] for one in on_ranks(name)) > 0
