"""The benchmarks `forward_equivalence`, `backward_equivalence` and `grad_equivalence`: the stages
of the package on each case, compared with their definition. The definition takes the package's own
result of the stage before, so that a fault shows in its own stage: scores give the selection,
scores and selection give out and lse, and these give the gradients."""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import definition
import flash_dmattn
import program
import torch
from benchmarking import Disagreement, choose_device, find_machine, write_whole
from commands import QUICK_KEYS
from definition import Comparison, Named, compare_all
from definition_cases import CASES, DTYPES, Case, Inputs, has_kernels

FUSED, MASKED = "flash_dma_attention: ", "flash_dmattn_func: "
# Tensor cores truncate sums where a plain evaluation in float32 rounds, which doubles the error.
FACTOR = {"cpu": 2.0, "cuda": 4.0}  # of scores and lse


def present(**tensors: torch.Tensor | None) -> Named:
    return {name: x for name, x in tensors.items() if x is not None}


def leaves_of(given: Named, *names: str) -> Named:
    """New leaves, which collect gradients, of the tensors that exist."""
    return {name: given[name].detach().clone().requires_grad_() for name in names if name in given}


class Stages:
    """The package's scores and selection of a case, and calls of the later stages."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.case = inputs, inputs.case
        dt_proj, a_coef = inputs.weights
        self.learned = present(
            value=inputs.value, dt_proj=dt_proj, a_coef=a_coef, dt_bias=inputs.dt_bias
        )
        self.rows = present(query=inputs.query, key=inputs.key, value=inputs.value)
        self.pairs = present(attn_mask=inputs.attn_mask, attn_bias=inputs.attn_bias)
        self.sink = present(sink_logit=inputs.sink_logit)
        self.valid = present(key_valid=inputs.key_valid)
        case = self.case
        self.numbers = {"softmax_scale": case.softmax_scale, "softcap": case.softcap}
        self.rules = {"recent": case.recent, "sinks": case.sinks, "gap": case.gap}
        self.score, bias = flash_dmattn.score(
            **self.learned, **self.valid, bias_form=case.bias_form
        )
        self.bias = present(bias=bias)
        self.selection = None
        if case.window is not None:
            self.selection = flash_dmattn.select(
                self.score,
                case.window,
                scope=case.scope,
                starts=inputs.starts,
                **self.rules,
                **self.valid,
            )
        self.kept = self.keys_of_package()

    def keys_of_package(self) -> torch.Tensor:
        """bool [batch, kv_heads, q_len, kv_len]."""
        case, valid = self.case, self.inputs.key_valid
        if self.selection is None:
            return definition.kept_keys(case, self.score, valid)
        return definition.keys_of_selection(case, self.selection.expiry)

    @property
    def mask(self) -> torch.Tensor:
        """The pairs that all rules allow, bool [batch, q_heads, q_len, kv_len]."""
        case, mask = self.case, definition.of_heads(self.kept, self.case.q_heads)
        if self.inputs.attn_mask is not None:
            mask = mask & definition.of_heads(self.inputs.attn_mask, case.q_heads)
        return mask.expand(case.batch, case.q_heads, case.q_len, case.kv_len)

    @property
    def given(self) -> Named:
        """The inputs of attention's definition."""
        bias = present(attn_bias=self.inputs.attn_bias)
        return {**self.rows, **self.bias, **bias, **self.sink, "mask": self.mask}

    @property
    def options(self) -> dict[str, Any]:
        """The options of attention() and attention_probabilities(), without tensors that have
        gradients."""
        options = {"causal": self.case.causal, "starts": self.inputs.starts, **self.numbers}
        mask = present(attn_mask=self.inputs.attn_mask)
        return {**options, **mask, **self.valid, "selection": self.selection}

    @property
    def is_fused(self) -> bool:
        """True if flash_dma_attention() supports the case."""
        return self.selection is not None and not self.pairs

    @property
    def is_masked(self) -> bool:
        """True if flash_dmattn_func() can take the case as a mask and a bias of pairs."""
        return not self.sink

    def fused(self, tensors: Named) -> tuple[torch.Tensor, ...]:
        """out and lse. The call scores and selects by the kernels of score() and select(), so that
        it keeps the same keys."""
        case = self.case
        return flash_dmattn.flash_dma_attention(
            **tensors,
            **self.valid,
            starts=self.inputs.starts,
            keep_window_size=case.window,
            causal=case.causal,
            scope=case.scope,
            bias_form=case.bias_form,
            return_lse=True,
            **self.numbers,
            **self.rules,
        )

    def masked(self, tensors: Named) -> tuple[torch.Tensor, ...]:
        """out and lse. The mask is numeric, and the biases of keys are left out."""
        case, mask = self.case, self.mask.to(self.inputs.dtype)
        out, lse, _ = flash_dmattn.flash_dmattn_func(
            *(tensors[name] for name in ("query", "key", "value")),
            mask,
            tensors.get("attn_bias"),
            is_causal=case.causal,
            return_attn_probs=True,
            **self.numbers,
        )
        return out, lse

    @property
    def given_masked(self) -> Named:
        return {name: x for name, x in self.given.items() if name != "bias"}

    def compare(self, what: str, found: Named, given: Named, label: str = "") -> list[Comparison]:
        """`what` names the function of definition.py, for results in the dtype of query."""
        function = getattr(definition, what)
        return compare_all(self.case, found, function, given, self.inputs.dtype, label=label)

    def compare_float32(
        self, what: str, found: Named, given: Named, label: str = ""
    ) -> list[Comparison]:
        """For results that are float32 for every dtype of query."""
        function = getattr(definition, what)
        factors = dict.fromkeys(("score", "lse"), FACTOR[self.inputs.device])
        options = {"label": label, "factors": factors}
        return compare_all(self.case, found, function, given, torch.float32, **options)

    def compare_attention(
        self, results: tuple[torch.Tensor, ...], given: Named, label: str = ""
    ) -> list[Comparison]:
        out, lse = ({name: x} for name, x in zip(("out", "lse"), results))
        if self.inputs.dtype == torch.float32:
            return self.compare_float32("attention", {**out, **lse}, given, label)
        return [
            *self.compare("attention", out, given, label),
            *self.compare_float32("attention", lse, given, label),
        ]


def selection_comparisons(stages: Stages) -> Iterator[Comparison]:
    """The number of pairs of a query and a key that only one of both keeps, and of conflicting
    slots."""
    case, selection = stages.case, stages.selection
    want = definition.kept_keys(case, stages.score, stages.inputs.key_valid)
    yield Comparison("kept keys", float((stages.kept != want).sum()))
    yield Comparison("slots", float(definition.slot_conflicts(case, selection.slot, stages.kept)))


def compare_zeros(what: str, tensor: torch.Tensor, zero: torch.Tensor) -> Iterator[Comparison]:
    """The number of nonzero values where `zero` requires 0, if it does anywhere."""
    if zero.any():
        yield Comparison(f"zeros of {what}", float((tensor != 0)[zero].sum()))


def zeros_of_keys(stages: Stages, found: Named, label: str = "") -> Iterator[Comparison]:
    """dkey and dvalue of keys that no query keeps."""
    by_head = stages.mask.any(2).unflatten(1, (stages.case.kv_heads, -1)).any(2)
    for name in ("dkey", "dvalue"):
        if name in found:
            yield from compare_zeros(f"{label}{name}", found[name], ~by_head.mT)


def forward_comparisons(inputs: Inputs) -> Iterator[Comparison]:
    """Scores to out and lse, then out and lse of the functions that do several stages."""
    stages = Stages(inputs)
    given = {**stages.learned, **stages.valid}
    yield from stages.compare_float32("score", {"score": stages.score}, given)
    if stages.bias:
        yield from stages.compare_float32("bias", stages.bias, {"score": stages.score})
    if stages.selection is not None:
        yield from selection_comparisons(stages)
    given = stages.given
    more = {**stages.bias, **stages.sink, **present(attn_bias=inputs.attn_bias)}
    out, lse = flash_dmattn.attention(**stages.rows, **more, **stages.options)
    yield from stages.compare_attention((out, lse), given)
    more = {**stages.bias, **present(attn_bias=inputs.attn_bias)}
    found = flash_dmattn.attention_probabilities(
        inputs.query, inputs.key, lse, **more, **stages.options
    )
    given_lse = {**given, "lse": lse}
    yield from stages.compare_float32("probability", {"probability": found}, given_lse)
    yield from compare_zeros("probability", found, ~stages.mask)
    yield from compare_zeros("out", out.transpose(1, 2), ~stages.mask.any(3))
    if stages.is_fused:
        results = stages.fused({**stages.rows, **stages.learned, **stages.sink})
        yield from stages.compare_attention(results, given, FUSED)
    if stages.is_masked:
        results = stages.masked({**stages.rows, **present(attn_bias=inputs.attn_bias)})
        yield from stages.compare_attention(results, stages.given_masked, MASKED)


def differentiate(
    results: tuple[torch.Tensor, ...], leaves: Named, inputs: Inputs
) -> tuple[Named, Named]:
    """The gradients of the leaves, and the other inputs of their definition."""
    out, lse = results
    found = torch.autograd.grad(results, tuple(leaves.values()), (inputs.dout, inputs.dlse))
    more = {"out": out, "lse": lse, "dout": inputs.dout, "dlse": inputs.dlse}
    named = {f"d{name}": one for name, one in zip(leaves, found)}
    return named, {name: x.detach() for name, x in more.items()}


def backward_comparisons(inputs: Inputs) -> Iterator[Comparison]:
    """Gradients of attention under a selection, and under a mask."""
    stages = Stages(inputs)
    given = stages.given
    leaves = leaves_of(given, "query", "key", "value", "bias", "sink_logit", "attn_bias")
    results = flash_dmattn.attention(**leaves, **stages.options)
    found, more = differentiate(results, leaves, inputs)
    yield from stages.compare("attention_gradients", found, {**given, **more})
    yield from zeros_of_keys(stages, found)
    if stages.is_masked:
        given = stages.given_masked
        leaves = leaves_of(given, "query", "key", "value", "attn_bias")
        found, more = differentiate(stages.masked(leaves), leaves, inputs)
        yield from stages.compare("attention_gradients", found, {**given, **more}, MASKED)
        yield from zeros_of_keys(stages, found, MASKED)


def grad_comparisons(inputs: Inputs) -> Iterator[Comparison]:
    """Gradients of scores, and of flash_dma_attention() through the scores."""
    stages = Stages(inputs)
    form = {"bias_form": stages.case.bias_form}
    if stages.bias:
        leaves = leaves_of(stages.learned, *stages.learned)
        _, bias = flash_dmattn.score(**leaves, **stages.valid, **form)
        found = torch.autograd.grad(bias, tuple(leaves.values()), inputs.dbias)
        named = {f"d{name}": one for name, one in zip(leaves, found)}
        given = {**stages.learned, **stages.valid, "dbias": inputs.dbias}
        yield from stages.compare("score_gradients", named, given, "score: ")
    if stages.is_fused:
        given = {**stages.given, **stages.learned, **stages.valid}
        leaves = leaves_of(given, "query", "key", "value", "sink_logit")
        fixed = {name: x for name, x in stages.learned.items() if name != "value"}
        if stages.bias:
            leaves, fixed = {**leaves, **leaves_of(fixed, *fixed)}, {}
        found, more = differentiate(stages.fused({**leaves, **fixed}), leaves, inputs)
        yield from stages.compare("fused_gradients", found, {**given, **more}, FUSED)
        # dvalue of a key has a term for every kv head that keeps it.
        yield from zeros_of_keys(stages, {"dkey": found["dkey"]}, FUSED)


# ---- the program ----

COMPARISONS = {
    "forward_equivalence": forward_comparisons,
    "backward_equivalence": backward_comparisons,
    "grad_equivalence": grad_comparisons,
}


class Row(NamedTuple):
    """A comparison and its place."""

    case: str
    dtype: str
    one: Comparison

    def fields(self) -> dict[str, Any]:
        one = self.one
        fields = {"case": self.case, "dtype": self.dtype, "tensor": one.what, "error": one.error}
        fields.update(plain=one.plain, largest=one.largest, allowed=one.allowed)
        for name, x in fields.items():
            if isinstance(x, float) and not math.isfinite(x):  # JSON has no infinity and no NaN
                fields[name] = None
        return {**fields, "wrong": not one.fits}

    def line(self) -> str:
        one = self.one
        numbers = f"{one.error:9.2e} {one.plain:9.2e} {one.allowed:9.2e}"
        ending = "" if one.fits else " WRONG"
        return f"{self.case:60} {self.dtype:9} {one.what:36} {numbers}{ending}"


HEADER = f"{'case':60} {'dtype':9} {'tensor':36} {'error':>9} {'plain':>9} {'allowed':>9}"


def choose_cases(args: argparse.Namespace) -> list[Case]:
    cases = [case for case in CASES if args.cases in case.name]
    return [case for case in cases if case.kv_len <= QUICK_KEYS or not args.quick]


def compare_cases(args: argparse.Namespace, rows: list[Row]) -> Iterator[str]:
    """Append a row for each comparison, and print those that are wanted. Yields a line for each
    case without a kernel."""
    cases, shown = choose_cases(args), 0
    total = len(cases) * len(args.dtypes)
    for number, (case, dtype) in enumerate(itertools.product(cases, args.dtypes), 1):
        program.doing(f"{number} of {total}: {case.name} {dtype}")
        try:
            for one in COMPARISONS[args.name](Inputs(case, args.device, DTYPES[dtype])):
                rows.append(Row(case.name, dtype, one))
                if args.verbose or not one.fits:
                    print(*([] if shown else [HEADER]), rows[-1].line(), sep="\n", flush=True)
                    shown += 1
        except NotImplementedError as error:
            yield f"skipped: {case.name} {dtype}: {error}"
    if shown:
        print()


def summarize(rows: Sequence[Row]) -> list[str]:
    """A line for each tensor and dtype: the comparison with the largest ratio to the allowed
    error."""
    groups: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        groups.setdefault(row.one.what, {}).setdefault(row.dtype, []).append(row)
    form = "{:36} {:9} {:>8} {:>9} {:>9} {:>10} {:>6}  {}"
    titles = ("tensor", "dtype", "compared", "error", "allowed", "of allowed", "wrong", "case")
    lines = [form.format(*titles)]
    for what, of_dtypes in groups.items():
        for dtype, group in of_dtypes.items():
            worst = max(group, key=lambda row: row.one.ratio)
            one = worst.one
            numbers = (f"{one.error:.2e}", f"{one.allowed:.2e}", f"{one.ratio:.2f}")
            wrong = sum(not row.one.fits for row in group)
            lines.append(form.format(what, dtype, len(group), *numbers, wrong, worst.case))
    return lines


def choose_dtypes(args: argparse.Namespace) -> None:
    names = [name for name, dtype in DTYPES.items() if has_kernels(args.device, dtype)]
    if args.dtype and args.dtype not in names:
        args.parser.error(f"--dtype: no kernels for {args.dtype} on {args.device}")
    args.dtypes = [args.dtype] if args.dtype else names


def run(args: argparse.Namespace) -> int:
    """Compare every case. Exit status: 0 equal within rounding; 1 not; 2 bad usage."""
    choose_device(args)
    choose_dtypes(args)
    if args.no_progress:
        program.quiet()
    rows: list[Row] = []
    skipped: list[str] = []
    stopped = False
    begin = time.monotonic()
    try:
        for line in compare_cases(args, rows):
            skipped.append(line)
    except KeyboardInterrupt:  # finished comparisons are still reported
        stopped = True
    print(*skipped, *summarize(rows), sep="\n")
    wrong = sum(not row.one.fits for row in rows)
    head = {"program": f"{args.name}.py", "seconds": round(time.monotonic() - begin, 3)}
    head.update(comparisons=len(rows), wrong=wrong, skipped=len(skipped))
    if args.json:
        machine = {**find_machine(args.device), **head}
        write_whole(args.json, [machine, *(row.fields() for row in rows)])
    if stopped:
        raise KeyboardInterrupt
    if not rows:
        raise Disagreement("nothing was compared")
    print(f"{len(rows)} comparisons, {wrong} wrong")
    return 1 if wrong else 0
