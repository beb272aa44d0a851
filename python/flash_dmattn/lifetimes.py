"""Lifetimes of keys: the gate that gives them, and how it learns.

The score of a key is the position at which its life ends. It is fixed once the token is read, so
that select() takes it, and a cache of a fixed number of rows has the keys that live longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import torch
from torch import nn
from torch.nn.functional import kl_div, linear, logsigmoid, silu

from . import _arguments, _types
from ._layer_checks import require
from ._sequences import list_starts
from .functional import attention, select

STD = 0.02  # of initial weights
LONGEST = 1 << 23  # a lifetime, so that its sum with a position up to this is exact in float32
MOST_LOG = 40.0  # of lifetimes and factors: far above any length
SHARPNESS = (2.0, 32.0)  # at the beginning and at the end of the training
PAIRS = 1 << 26  # of a query head and a key, whose logits are in memory at once
PLACES = 2048  # queries whose predictions are in memory at once

Predict = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class LifetimeGate(nn.Module):
    """The lifetimes of keys from the hidden states of their tokens.

        log_lifetime = contract(silu(expand(x)))
        lifetime = round(exp(log_lifetime)), at most 2^23
        score = position + lifetime

    A lifetime is a number of tokens. It is computed in float32 (float64 if x is), whatever autocast
    says. Lifetimes are whole numbers, so that scores are exact for positions up to 2^23, and their
    order does not depend on where a sequence begins. Beyond, scores are rounded to float32, and of
    equal ones the later key ranks first.

    Args:
        hidden: width of the hidden states.
        units: width of the layer between.
        kv_heads: key and value heads.
        sliding_heads: how many of them, the first ones, have lifetimes of 0: they keep the newest
            keys.
        lifetime: of all keys before training, about.
        device: of the parameters.
        dtype: of the parameters: float32 or float64.

    Source: docs/quality.md.
    """

    def __init__(
        self,
        hidden: int,
        units: int,
        kv_heads: int,
        sliding_heads: int,
        lifetime: float,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.units, self.sliding_heads, self.lifetime = units, sliding_heads, lifetime
        heads, kind = kv_heads - sliding_heads, {"device": device, "dtype": dtype}
        self.expand = nn.Linear(hidden, units, **kind)  # type: ignore[arg-type]
        self.contract = nn.Linear(units, heads, **kind)  # type: ignore[arg-type]
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for one in (self.expand, self.contract):
            nn.init.normal_(one.weight, std=STD)
            nn.init.zeros_(one.bias)
        self.contract.bias.fill_(self.lifetime).log_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logarithms of lifetimes, [batch, kv_heads - sliding_heads, len], of hidden
        states [batch, len, hidden]."""
        dtype = _arguments.wide(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            units = silu(apply(self.expand, x.to(dtype)))
            return apply(self.contract, units).transpose(1, 2)

    @torch.no_grad()
    def score(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Scores [batch, kv_heads, len] of tokens with hidden states [batch, len, hidden] at
        `positions` [batch or 1, len]."""
        lifetime = self(x).exp().clamp(max=LONGEST).round()
        if self.sliding_heads > 0:
            lifetime = nn.functional.pad(lifetime, (0, 0, self.sliding_heads, 0))
        return positions[:, None] + lifetime

    @torch.no_grad()
    def calibrate(self, x: torch.Tensor, keys: int) -> None:
        """Multiply the lifetimes of each head by a factor, in contract.bias, so that `keys` keys
        live in the second half of sequences of hidden states [sequences, len, hidden], in the
        mean."""
        self.contract.bias.add_(lifetime_scale(self(x), keys).log())


def apply(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """The layer in the dtype of x. Only a call of the layer sees hooks and adapters."""
    if layer.weight.dtype == x.dtype:
        found: torch.Tensor = layer(x)
        return found
    return linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))


def lifetime_scale(log_lifetime: torch.Tensor, keys: int) -> torch.Tensor:
    """Factors of lifetimes [heads], in float64, from [sequences, heads, len]: with them as many
    keys live as `keys` says, in the mean over the second half of the sequences."""
    length, half = log_lifetime.shape[2], log_lifetime.shape[2] // 2
    begin = torch.arange(length, device=log_lifetime.device, dtype=torch.float64)
    lives = log_lifetime.double().clamp(max=MOST_LOG).exp()
    low = lives.new_full((lives.shape[1],), -MOST_LOG)
    high = -low
    for _ in range(60):  # bisection
        middle = (low + high) / 2
        end = (begin + middle.exp()[:, None] * lives).clamp(max=length)
        alive = (end - begin.clamp(min=half)).clamp(min=0).sum(2).mean(0)
        is_more = alive > keys * (length - half)
        low, high = torch.where(is_more, low, middle), torch.where(is_more, middle, high)
    return middle.exp()


# ---- training ----


def lifetime_loss(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_lifetime: torch.Tensor,
    predict: Predict,
    *,
    keys: int,
    progress: float,
    queries: int = 2048,
    weight: torch.Tensor | None = None,
    capacity_weight: float = 1.0,
    key_valid: torch.Tensor | None = None,
    starts: torch.Tensor | Sequence[int] | None = None,
    sink_logit: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """A loss for lifetimes: with keys that fade when they are old, predictions should stay as they
    are with all keys, and no more keys should live than a cache has rows.

    The logit and the weight of a key of age t are multiplied by 1 / (1 + (t / lifetime)^n), where n
    grows from 2 to 32 during the training: at last a key is gone when it is as old as its lifetime.
    The loss is the divergence of the model's predictions from its predictions with all keys, plus
    capacity_weight times the part of a query's keys by which the sum of these factors exceeds
    `keys`. Both are estimates of the mean over all queries from a sample. Half of the sample is
    drawn in proportion to the divergence with the `keys` newest keys. `recent` and sinks have no
    part in it.

    The loss has a gradient for log_lifetime alone. The layer has to be the last of the model in
    which a position sees others. predict() is called with attention's output for some positions,
    and with these positions: it has to give the logits that the rest of the model computes there.
    The model should be in eval mode. This computes all pairs of the sampled queries and the keys,
    and twice the predictions of all positions. The host reads key_valid and starts. Under autocast,
    call it where attention is called, as query and key have to be of a dtype that attention()
    supports on their device.

    Args:
        query: [1, len, q_heads, head_dim], as attention() gets it (after rotary embedding).
        key: [1, len, kv_heads, head_dim].
        value: [1, len, kv_heads, head_dim].
        log_lifetime: [1, heads, len] float32 (float64 if query is): the logarithms of lifetimes in
            tokens, for the last `heads` kv heads, 1 to kv_heads; the others keep the `keys` newest
            keys.
        predict: a function of out [1, n, q_heads, head_dim] and places [n] int64, the positions of
            these queries, to logits [1, n, vocabulary].
        keys: keys that a query may keep, 1 or more: the rows of the cache.
        progress: how much of the training is done, 0 to 1; it sets n.
        queries: how many are sampled, 1 or more.
        weight: optional [1, len] float32: what the divergence of each query is multiplied by.
        capacity_weight: of the part of the keys that is too many.
        key_valid: optional [1, len] bool or uint8, false for padding, which counts neither as keys
            nor as queries.
        starts: optional [sequences + 1] int32 or a list, for packed sequences.
        sink_logit, softmax_scale, softcap: as in attention().
        generator: on query's device, for the sample; None for the default one.

    Returns:
        One number, in float32 (float64 if query is).

    Raises:
        TypeError: an argument of another type.
        ValueError: shapes that are inconsistent, a batch that is not 1, a number out of its range,
            or logits of another shape from predict().
        NotImplementedError: a dtype or head_dim that no kernel on this machine supports.

    Example:
        >>> x = torch.randn(1, 50, 2, 8)
        >>> log_lifetime = torch.zeros(1, 2, 50, requires_grad=True)
        >>> head = torch.nn.Linear(16, 10)
        >>> given = {"keys": 12, "progress": 0.5, "queries": 20}
        >>> def predict(out, places):
        ...     return head(out.flatten(2))
        >>> flash_dmattn.lifetime_loss(x, x, x, log_lifetime, predict, **given).backward()
        >>> log_lifetime.grad.shape
        torch.Size([1, 2, 50])

    Source: docs/quality.md; arXiv:2512.03324, TRIM-KV, which multiplies logits by beta^t.
    """
    if not torch.compiler.is_compiling():  # PyTorch 2.11 does not trace locals()
        _types.check_call(lifetime_loss, locals())
    tensors = {"query": query, "key": key, "value": value}
    numbers = {"keys": keys, "queries": queries}
    check_loss(tensors, log_lifetime, predict, numbers, progress, capacity_weight)
    length, device = query.shape[1], query.device
    for name, one in (("weight", weight), ("key_valid", key_valid)):
        check_places(name, one, query)
    begins, valid, starts = places_of(starts, key_valid, length, device)
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "softcap": softcap}
    options["sink_logit"] = sink_logit
    given = {**options, "causal": True, "key_valid": key_valid, "starts": starts}
    with torch.no_grad():
        rows = _arguments.autocast("query", (query.detach(), key.detach(), value.detach()))
        equal = torch.zeros(1, key.shape[2], length, device=device)
        newest: Any = select(equal, keys, key_valid=key_valid, starts=starts)
        whole, few = (attention(*rows, selection=one, **given)[0] for one in (None, newest))
        missed = torch.cat(
            [
                divergences(predict(few[:, one], one), predict(whole[:, one], one), len(one))
                for one in torch.arange(length, device=device).split(PLACES)
            ]
        )
        places, shares = sample_places(missed, valid, queries, generator)
    dtype = _arguments.wide(query.dtype)
    q, k, v = (x[0].to(dtype).masked_fill(~valid[:, None, None], 0) for x in rows)
    scores = log_lifetime[0].to(dtype).masked_fill(~valid, 0)
    fixed = scores.detach().requires_grad_()
    factors = shares if weight is None else shares * weight[0, places].to(shares.dtype)
    loss, gradient = torch.zeros_like(fixed[0, 0]), torch.zeros_like(fixed)
    count = max(1, PAIRS // (length * query.shape[2]))
    for one, factor, share in zip(*(x.split(count) for x in (places, factors, shares))):
        with torch.no_grad():
            wanted = predict(whole[:, one], one)
        sees = Sees(one, begins[one], valid)
        with torch.enable_grad():
            out, held = attend_fading(
                (q[one], k, v), fixed, sees, keys, sharpness_at(progress), options
            )
            found = predict(out[None].to(whole.dtype), one)
            require(found.requires_grad, "predict: its logits have no gradient, want one for out")
            part = (divergences(found, wanted, len(one)) * factor).sum()
            excess = ((held - keys).clamp(min=0) / sees.counts()).mean(0)
            part = part + capacity_weight * (excess * share).sum()
            gradient += torch.autograd.grad(part, fixed)[0]
        loss += part.detach()
    slope = (scores * gradient).sum()
    return loss + (slope - slope.detach())  # its gradient, and not its number


class Sees(NamedTuple):
    """Some queries of a sequence, or of several packed ones, and the keys that they can see."""

    places: torch.Tensor  # [queries] int64, ascending
    begins: torch.Tensor  # [queries] int64: the positions at which their sequences begin
    valid: torch.Tensor  # [len] bool

    def ages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ages [queries, keys] of the keys up to the last query, and which of them are visible."""
        keys = torch.arange(int(self.places[-1]) + 1, device=self.places.device)
        ages = self.places[:, None] - keys
        return ages, (ages >= 0) & (keys >= self.begins[:, None]) & self.valid[: len(keys)]

    def counts(self) -> torch.Tensor:
        """How many keys are visible to each query [queries]."""
        before = nn.functional.pad(self.valid.long().cumsum(0), (1, 0))
        return before[self.places + 1] - before[self.begins]


def sharpness_at(progress: float) -> float:
    """The exponent n, which grows by the same factor in every step."""
    first, last = SHARPNESS
    return first * (last / first) ** progress


def attend_fading(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    log_lifetime: torch.Tensor,
    sees: Sees,
    keys: int,
    sharpness: float,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [queries, q_heads, head_dim] of queries to keys that fade, with lifetimes
    [heads, len]; the first kv heads, which have none, keep the `keys` newest. Also the sum of the
    keys' factors for each query, [heads, queries]."""
    query, key, value = rows
    kv_heads, (ages, visible) = key.shape[1], sees.ages()
    end, dtype = ages.shape[1], query.dtype
    with torch.autocast(query.device.type, enabled=False):
        distance = log_lifetime[:, None, :end] - ages.clamp(min=1).to(dtype).log()
        log_factor = logsigmoid(sharpness * distance)
        held = log_factor.exp().masked_fill(~visible, 0).sum(-1)
        sliding = torch.where(ages < keys, 0.0, -torch.inf).to(dtype)
        sliding = sliding.expand(kv_heads - len(log_lifetime), -1, -1)
        log_factor = torch.cat((sliding, log_factor))[:, None]
        scale = options["softmax_scale"] or query.shape[2] ** -0.5
        own = query.unflatten(1, (kv_heads, -1))
        logits = torch.einsum("qghd,kgd->ghqk", own, key[:end]) * scale
        if cap := options["softcap"]:
            logits = cap * torch.tanh(logits / cap)
        logits = (logits * log_factor.exp() + log_factor).masked_fill(~visible, -torch.inf)
        lse = logits.logsumexp(-1, keepdim=True)
        if (sink := options["sink_logit"]) is not None:
            lse = torch.logaddexp(lse, sink.detach().to(dtype).view(kv_heads, -1, 1, 1))
        out = torch.einsum("ghqk,kgd->qghd", (logits - lse).exp(), value[:end]).flatten(1, 2)
    return out, held


def divergences(found: torch.Tensor, wanted: torch.Tensor, count: int) -> torch.Tensor:
    """The divergence [count] of predictions from the wanted ones, from logits [1, count,
    vocabulary]."""
    fits = found.dim() == 3 and found.shape == wanted.shape and found.shape[:2] == (1, count)
    shape = list(found.shape)
    require(fits, f"predict: shape of its logits is {shape}, want [1, {count}, vocabulary]")
    one, other = (x[0].to(_arguments.wide(x.dtype)).log_softmax(-1) for x in (found, wanted))
    return kl_div(one, other, reduction="none", log_target=True).sum(-1)


def sample_places(
    missed: torch.Tensor, valid: torch.Tensor, count: int, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` ascending places among the valid ones [len], some perhaps repeated, half of them
    drawn in proportion to `missed` [len]. Also weights, whose sum is 1, with which a sum over them
    estimates the mean over all valid places."""
    even = valid.to(missed.dtype)
    missed = missed.clamp(min=0).masked_fill(~valid, 0)  # of padding it may be NaN
    chance = even / even.sum() + missed / missed.sum().clamp(min=1e-9)
    places = chance.multinomial(count, replacement=True, generator=generator).sort().values
    shares = 1 / chance[places]
    return places, shares / shares.sum()


def places_of(
    starts: torch.Tensor | Sequence[int] | None,
    key_valid: torch.Tensor | None,
    length: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The position [len] at which the sequence of each token begins, which tokens [len] are in one
    and valid, and starts as a tensor."""
    places = torch.arange(length, device=device)
    begins, valid = torch.zeros_like(places), torch.ones_like(places, dtype=torch.bool)
    if starts is not None:
        found = list_starts(starts.tolist() if isinstance(starts, torch.Tensor) else starts)
        assert found is not None
        require(found[-1] <= length, f"starts: ends with {found[-1]}, want at most len, {length}")
        starts = torch.tensor(found, dtype=torch.int32, device=device)
        at = torch.searchsorted(starts, places.int(), right=True) - 1
        begins, valid = starts[at].long(), places < found[-1]
    if key_valid is not None:
        valid = valid & key_valid[0].bool()
    require(bool(valid.any()), "key_valid: has no valid token, want one or more")
    return begins, valid, starts


def check_loss(
    tensors: dict[str, torch.Tensor],
    log_lifetime: torch.Tensor,
    predict: Any,
    numbers: dict[str, int],
    progress: float,
    capacity_weight: float,
) -> None:
    _arguments.check_same_device({**tensors, "log_lifetime": log_lifetime})
    for name, one in tensors.items():
        require(one.dim() == 4, f"{name}: rank is {one.dim()}, want 4")
        require(one.shape[0] == 1, f"{name}: batch is {one.shape[0]}, want 1")
    length, kv_heads = tensors["key"].shape[1:3]
    found = tensors["query"].shape[1]
    count = _types.counted(found, "element")
    require(found == length, f"query: axis 1 has {count}, want {length}, as key has")
    shape = list(log_lifetime.shape)
    fits = len(shape) == 3 and shape[0] == 1 and 1 <= shape[1] <= kv_heads and shape[2] == length
    wanted = f"want [1, 1 to {kv_heads}, {length}]"
    require(fits, f"log_lifetime: shape is {shape}, {wanted}")
    check_wide("log_lifetime", log_lifetime, tensors["query"])
    check_predict(predict)
    for name, number in numbers.items():
        require(_arguments.check_int(name, number) >= 1, f"{name}: is {number}, want 1 or more")
    require(0 <= progress <= 1, f"progress: is {progress}, want 0 to 1")
    is_weight = 0 <= capacity_weight < torch.inf
    wanted = "want a finite number, 0 or more"
    require(is_weight, f"capacity_weight: is {capacity_weight}, {wanted}")


def check_predict(predict: Any) -> None:
    if not callable(predict):
        raise _types.refusal("predict", predict, "a function")


def check_wide(name: str, x: torch.Tensor, query: torch.Tensor) -> None:
    found, want = (_arguments.name_of_dtype(d) for d in (x.dtype, _arguments.wide(query.dtype)))
    if found != want:
        raise NotImplementedError(f"{name}: dtype is {found}, want {want}")


def check_places(name: str, x: torch.Tensor | None, query: torch.Tensor) -> None:
    """Check a tensor that has a number for each position of query [1, len, ...]."""
    if x is None:
        return
    _types.check_tensor(name, x)
    shape, want = list(x.shape), [1, query.shape[1]]
    require(shape == want, f"{name}: shape is {shape}, want {want}")
    require(x.device == query.device, f"{name}: is on {x.device}, want {query.device}")
    if name == "weight":
        check_wide(name, x, query)
