"""The carried keys of all layers of a model, in a page of memory for each request, and the steps of
a server that continues many requests at once.

Nothing here imports vLLM: states.py says how vLLM hands out pages and steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .. import _arguments, streams
from ..streams import KeyCache, Requests

NO_PAGE = 0  # the number that a table of pages has where a request has none


class Rules(NamedTuple):
    """Which keys the queries of a layer keep, as in select()."""

    window: int
    recent: int = 0
    bias_form: str = "exp"


class Step(NamedTuple):
    """The requests of a step of the server, for all layers."""

    pages: torch.Tensor  # [requests] int32; -1: none
    # None: each request with tokens has one, and these requests come first.
    requests: Requests | None = None


class Pages:
    """The carried keys of all layers, one page for each request.

    Layers of equal rules are neighbours in a page: k and v [layers, kv_heads, rows, head_dim], and
    bias, score and position [layers, kv_heads, rows], where rows = window + recent.

    Args:
        rules: of each layer.
        kv_heads: of a layer, on this rank.
        head_dim: a multiple of 8.
        dtype: of keys and values.
    """

    def __init__(
        self, rules: Sequence[Rules], kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self.rules, self.kv_heads, self.head_dim = list(rules), kv_heads, head_dim
        self.dtype = dtype
        self.kinds = list(dict.fromkeys(self.rules))
        self.caches: list[KeyCache] = []

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the tensors of a page."""
        found: list[tuple[int, ...]] = []
        for kind in self.kinds:
            by_head = (self.rules.count(kind), self.kv_heads, kind.window + kind.recent)
            found += [(*by_head, self.head_dim)] * 2 + [by_head] * 3
        return tuple(found)

    def dtypes(self) -> tuple[torch.dtype, ...]:
        wide = _arguments.wide(self.dtype)
        return (self.dtype, self.dtype, wide, wide, torch.int32) * len(self.kinds)

    def page_bytes(self) -> int:
        return sum(math.prod(a) * b.itemsize for a, b in zip(self.shapes(), self.dtypes()))

    def use(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the states in these tensors: a page's, with an axis of pages in front."""
        pages, device = tensors[0].shape[0], tensors[0].device
        self.positions = tensors[4::5]
        self.seen = torch.zeros(len(self.rules), pages, dtype=torch.int32, device=device)
        self.caches = []
        for layer, kind in enumerate(self.rules):
            first = 5 * self.kinds.index(kind)
            at = self.rules[:layer].count(kind)
            key, value, bias, score, position = (x[:, at] for x in tensors[first : first + 5])
            rows = (key.transpose(1, 2), value.transpose(1, 2), bias, score, position)
            self.caches.append(KeyCache(*rows, self.seen[layer], kind.window, kind.recent))

    def empty(self, pages: torch.Tensor) -> None:
        """Empty these pages [requests], so that requests can begin there."""
        where = pages.long()
        self.seen[:, where] = 0
        for position in self.positions:
            position[where] = -1

    def attend(
        self,
        layer: int,
        step: Step,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        score: torch.Tensor,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """Attention of the step's tokens in a layer, which then enter their requests' states.

        Args:
            layer: its number.
            step: whose requests' tokens stand one after the other; tokens behind them are padding.
            query: [tokens, q_heads, head_dim].
            key, value: [tokens, kv_heads, head_dim].
            score: [kv_heads, tokens] float32.
            out: [tokens, q_heads, head_dim], is written; of padding it has no meaning.
            scale: of logits.
        """
        cache, form = self.caches[layer], self.rules[layer].bias_form
        if step.requests is not None:
            if -1 in step.requests.sequences:
                out.zero_()
            rows = (query, key, value)
            streams.prefill_packed(rows, score, out, cache, step.requests, form, scale)
            return
        count = min(len(step.pages), len(query))  # requests or tokens may be padded
        q, k, v = (x[:count, None] for x in (query, key, value))
        scores = score[:, :count].transpose(0, 1)[..., None].contiguous()
        given: dict[str, Any] = {"bias_form": form, "softmax_scale": scale}
        found = streams.decode(q, k, v, cache, score=scores, index=step.pages[:count], **given)
        out[:count] = found[:, 0]


class StepMaker:
    """Makes the Steps of a server. A step of decoding, of one token for each request, copies
    nothing from the host, and its pages stand in the same memory each time, so that a CUDA graph of
    the model can be replayed for it. For other steps the host waits for the pages of the requests.

    Args:
        states: whose requests begin and go on.
        most: requests of a step, at most.
        device: of the states.
    """

    def __init__(self, states: Pages, most: int, device: torch.device | str) -> None:
        self.states, self.device = states, torch.device(device)
        self.pages = torch.full((most,), -1, dtype=torch.int32, device=device)

    def make(self, starts: list[int], totals: list[int], pages: torch.Tensor) -> Step:
        """The step of these requests. Pages of those that begin are emptied.

        Args:
            starts: the number of each request's first token in the step, and at the end the number
                of tokens. Requests may have none.
            totals: of each request, the tokens that will have passed after the step.
            pages: [requests] integers: the page of each; NO_PAGE: none, and its out is 0.
        """
        lengths = [end - start for start, end in zip(starts, starts[1:])]
        numbers = range(len(lengths))
        begun = {n for n in numbers if totals[n] == lengths[n] > 0}
        if begun:
            self.states.empty(pages[self._on_device(sorted(begun))])
        own = self.pages[: len(lengths)].copy_(pages)
        own.masked_fill_(own == NO_PAGE, -1)
        count = sum(n == 1 for n in lengths)
        if count == starts[-1] and all(lengths[:count]):
            own[count:] = -1
            return Step(own)
        # A request without tokens may have a page that another one has.
        kept = [n for n in numbers if lengths[n]]
        firsts, sequences = [starts[n] for n in kept], own.tolist()
        return Step(own, Requests.of([*firsts, starts[-1]], [sequences[n] for n in kept]))

    def _on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        """Copied without waiting for the device."""
        is_cuda = self.device.type == "cuda"
        found = torch.tensor(numbers, dtype=torch.int64, pin_memory=is_cuda)
        return found.to(self.device, non_blocking=True)


# ---- the operator ----

# vLLM compiles a model once, for steps of all kinds: attention is an operator that no compiler
# looks into, and that finds the states and the step when it runs. The engine says how.


def no_engine(name: str) -> tuple[Pages, Step | None]:
    raise RuntimeError(f"{name}: no engine serves this model, want one that has set pages.find")


find: Callable[[str], tuple[Pages, Step | None]] = no_engine


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score: torch.Tensor,
    out: torch.Tensor,
    layer: int,
    scale: float,
    name: str,
) -> None:
    """Pages.attend() of the states that the engine knows by this name. Without a step, when it only
    measures memory, out is 0."""
    states, step = find(name)
    if step is None:
        out.zero_()
    else:
        states.attend(layer, step, query, key, value, score, out, scale)


LIBRARY = torch.library.Library("flash_dmattn_vllm", "FRAGMENT")
LIBRARY.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor score, Tensor(a!) out, int layer, "
    "float scale, str name) -> ()",
    tags=torch.Tag.pt2_compliant_tag,
)
for _key in ("CPU", "CUDA"):
    LIBRARY.impl("attend", attend, _key)
torch.library.register_fake("flash_dmattn_vllm::attend", lambda *_: None, lib=LIBRARY)
ATTEND = torch.ops.flash_dmattn_vllm.attend.default
