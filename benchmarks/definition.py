"""The definition of dynamic mask attention in PyTorch alone: every stage by its formula in
docs/algorithm.md, in the precision of the given tensors. equivalence.py compares the package with
it.

Tensors have the names of the package's arguments, and AXES has the axes of each. A function takes
tensors by name and returns results by name; dX is the gradient of X.
"""

from __future__ import annotations

import math
from typing import Callable, Dict, NamedTuple

import torch
from definition_cases import Case
from torch.nn.functional import softplus

Named = Dict[str, torch.Tensor]
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of matrices
Compute = Callable[[Case, Named, Product], Named]
Orders = Dict[str, torch.Tensor]  # indices along an axis
PLAIN = 6  # number of plain evaluations
FEW = 64  # numbers: so few sums may be accurate by chance, so they get more plain evaluations
PLAIN_OF_FEW = 16

# The letters are defined in docs/glossary.md; c is a channel of the value states of all kv heads.
AXES = {
    "query": "bihd",
    "key": "bjgd",
    "value": "bjgd",
    "out": "bihd",
    "lse": "bhi",
    "dt_proj": "gc",
    "a_coef": "g",
    "dt_bias": "g",
    "score": "bgj",
    "bias": "bgj",
    "key_valid": "bj",
    "mask": "bhij",
    "attn_bias": "bhij",
    "sink_logit": "h",
    "probability": "bhij",
}
# A plain evaluation leaves these in float32: exp(s - lse) is one step of a softmax, whose sums
# PyTorch computes in float32 for every dtype.
WIDE = ("lse", "dlse", "sink_logit")


def axes_of(name: str) -> str:
    return AXES[name] if name in AXES else AXES[name[1:]]


# ---- kept keys ----


def sequence_of(case: Case, device: torch.device) -> torch.Tensor:
    """The index of each position's sequence [kv_len]; -1 for none."""
    number = torch.zeros(case.kv_len, dtype=torch.long, device=device)
    if case.starts:
        number.fill_(-1)
        for n, (begin, end) in enumerate(zip(case.starts, case.starts[1:])):
            number[begin:end] = n
    return number


def candidates(case: Case, key_valid: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """The keys that a query could attend to regardless of positions: the valid keys of its
    sequence, bool [batch or 1, 1, q_len, kv_len]."""
    number = sequence_of(case, device)
    if case.starts:  # here q_len is kv_len
        same = (number[:, None] == number) & (number >= 0)
    else:
        same = torch.ones(case.q_len, case.kv_len, dtype=torch.bool, device=device)
    return same[None, None] if key_valid is None else same & key_valid[:, None, None]


def kept_keys(case: Case, score: torch.Tensor, key_valid: torch.Tensor | None) -> torch.Tensor:
    """The keys that each query keeps: every query sorts all keys that it sees. bool [batch,
    kv_heads, q_len, kv_len]. Scores are finite except for padding."""
    device, shape = score.device, (*score.shape[:2], case.q_len, case.kv_len)
    position = torch.arange(case.q_len, device=device) + case.kv_len - case.q_len
    past = torch.arange(case.kv_len, device=device) <= position[:, None]
    valid = candidates(case, key_valid, device)
    visible = valid & past if case.causal else valid
    if case.window is None:
        return visible.expand(shape)
    seen = visible if case.scope == "causal" else valid
    newest = seen & (seen.flip(-1).cumsum(-1).flip(-1) <= case.recent)
    first = valid & (valid.cumsum(-1) <= case.sinks)
    # Sinks rank before all others: [batch, kv_heads, q_len or 1, kv_len].
    rank = score[:, :, None].double().masked_fill(first, math.inf)
    # A stable sort of the flipped keys: of equal scores the key with the larger index is first.
    order = case.kv_len - 1 - rank.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    others = (seen & ~newest).expand(shape).gather(-1, order)
    chosen = others & (others.cumsum(-1) <= case.window)
    best = torch.zeros_like(chosen).scatter(-1, order, chosen)
    if case.gap is not None:
        numbers = score[:, :, None].double()
        highest = numbers.masked_fill(~seen, -math.inf).amax(-1, keepdim=True)
        best &= first | (numbers >= highest - case.gap)
    return (newest | best) & visible


def keys_of_selection(case: Case, expiry: torch.Tensor) -> torch.Tensor:
    """The keys that each query keeps by the rule of expiry in docs/algorithm.md."""
    device, j = expiry.device, torch.arange(case.kv_len, device=expiry.device)
    position = torch.arange(case.q_len, device=device)[:, None] + case.kv_len - case.q_len
    ends = expiry[:, :, None]
    if case.causal:
        return (j <= position) & (position < ends)
    return (ends > j) & candidates(case, None, device)


def slot_conflicts(case: Case, slot: torch.Tensor, kept: torch.Tensor) -> int:
    """The number of kept keys, over all queries, with the slot of another kept key, or with a slot
    not below window + recent."""
    slots = case.window + case.recent
    number = slot[:, :, None].expand(kept.shape).long()
    outside = kept & ((number < 0) | (number >= slots))
    inside = kept & ~outside
    counts = torch.zeros(*kept.shape[:3], slots, dtype=torch.long, device=kept.device)
    counts.scatter_add_(-1, number.clamp(0, slots - 1), inside.long())
    return int(outside.sum() + (counts - 1).clamp(min=0).sum())


# ---- the stages ----


def of_heads(tensor: torch.Tensor, q_heads: int) -> torch.Tensor:
    """One entry for each query head along axis 1, which has 1, kv_heads or q_heads entries."""
    size = tensor.shape[1]
    return tensor if size == 1 else tensor.repeat_interleave(q_heads // size, 1)


def sum_to(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """[batch, q_heads, q_len, kv_len] summed to a shape with axes of 1, or with kv_heads."""
    if shape[1] not in (1, tensor.shape[1]):
        tensor = tensor.unflatten(1, (shape[1], -1)).sum(2)
    return tensor.sum_to_size(shape)


def sum_one_by_one(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right, with each sum in one accumulator, like some kernels. PyTorch's products have
    several accumulators, whose errors are smaller by the square root of their number."""
    right = right.expand(*left.shape[:-2], *right.shape[-2:])
    total = left.new_zeros(*left.shape[:-1], right.shape[-1])
    for k in range(left.shape[-1]):
        total.addcmul_(left[..., k : k + 1], right[..., k : k + 1, :])
    return total


def sum_truncated(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right as tensor cores compute it: they add 16 products at a time to a float32 sum and
    round toward zero."""
    right = right.expand(*left.shape[:-2], *right.shape[-2:])
    total = left.new_zeros(*left.shape[:-1], right.shape[-1])
    for k in range(0, left.shape[-1], 16):
        products = left[..., k : k + 16].double() @ right[..., k : k + 16, :].double()
        wide = total.double() + products
        near = wide.to(total.dtype)
        lower = torch.nextafter(near, torch.zeros_like(near))
        total = torch.where(near.double().abs() > wide.abs(), lower, near)
    return total


def states_of(given: Named, product: Product) -> torch.Tensor:
    """dt [batch, kv_heads, kv_len]."""
    dt = product(given["value"].flatten(2), given["dt_proj"].mT)
    return (dt + given["dt_bias"] if "dt_bias" in given else dt).transpose(1, 2)


def score(case: Case, given: Named, product: Product = torch.matmul) -> Named:
    z = given["a_coef"][:, None] * softplus(states_of(given, product))
    if "key_valid" in given:
        z = z.masked_fill(~given["key_valid"][:, None], -math.inf)
    return {"score": z}


def bias(case: Case, given: Named, product: Product = torch.matmul) -> Named:
    return {"bias": given["score"].exp() if case.bias_form == "exp" else given["score"]}


def make_logits(
    case: Case, given: Named, product: Product
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Logits [batch, q_heads, q_len, kv_len], and their derivative in <query, key>."""
    query, key = (given[name].transpose(1, 2) for name in ("query", "key"))
    slope = case.softmax_scale or case.head_dim**-0.5
    logits = slope * product(query, of_heads(key, case.q_heads).mT)
    if case.softcap:
        tanh = torch.tanh(logits / case.softcap)
        logits, slope = case.softcap * tanh, slope * (1 - tanh * tanh)
    if "bias" in given:
        logits = logits + of_heads(given["bias"], case.q_heads)[:, :, None]
    if "attn_bias" in given:
        logits = logits + of_heads(given["attn_bias"], case.q_heads)
    return logits, slope


def weigh(logits: torch.Tensor, lse: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Probabilities from lse, in the precision of the logits."""
    probability = torch.exp(logits.to(lse.dtype) - lse[..., None])
    return torch.where(mask, probability, 0).to(logits.dtype)


def probability(case: Case, given: Named, product: Product = torch.matmul) -> Named:
    logits, _ = make_logits(case, given, product)
    return {"probability": weigh(logits, given["lse"], given["mask"])}


def attention(case: Case, given: Named, product: Product = torch.matmul) -> Named:
    logits, _ = make_logits(case, given, product)
    wide = torch.promote_types(logits.dtype, torch.float32)
    terms = logits.to(wide).masked_fill(~given["mask"], -math.inf)
    if "sink_logit" in given:
        sink = given["sink_logit"].to(wide)[:, None, None].expand(*terms.shape[:3], 1)
        terms = torch.cat([terms, sink], -1)
    lse = torch.logsumexp(terms, -1)
    value = of_heads(given["value"].transpose(1, 2), case.q_heads)
    out = product(weigh(logits, lse, given["mask"]), value)
    return {"out": out.transpose(1, 2), "lse": lse}


def attention_gradients(case: Case, given: Named, product: Product = torch.matmul) -> Named:
    """By docs/algorithm.md, Backward, from the given out and lse. (delta is <dout, out>: sums of
    many gradients differ from autograd's by the rounding of out.)"""
    logits, slope = make_logits(case, given, product)
    query, dout, out = (given[name].transpose(1, 2) for name in ("query", "dout", "out"))
    key, value = (of_heads(given[name].transpose(1, 2), case.q_heads) for name in ("key", "value"))
    probability = weigh(logits, given["lse"], given["mask"])
    delta = (dout * out).sum(-1) - given["dlse"].to(dout.dtype)
    dlogits = probability * (product(dout, value.mT) - delta[..., None])
    dproducts = dlogits * slope
    found = {"dquery": product(dproducts, key).transpose(1, 2)}
    for name, weights, rows in (("dkey", dproducts, query), ("dvalue", probability, dout)):
        by_head = product(weights.mT, rows).unflatten(1, (case.kv_heads, -1))
        found[name] = by_head.sum(2).transpose(1, 2)
    if "bias" in given:
        shape = torch.Size((case.batch, case.kv_heads, 1, case.kv_len))
        found["dbias"] = sum_to(dlogits, shape)[:, :, 0]
    if "attn_bias" in given:
        found["dattn_bias"] = sum_to(dlogits, given["attn_bias"].shape)
    if "sink_logit" in given:
        weight = torch.exp(given["sink_logit"][:, None] - given["lse"])
        found["dsink_logit"] = -(weight * delta).sum((0, 2))
    return found


def score_gradients(case: Case, given: Named, product: Product = torch.matmul) -> Named:
    """From dbias. A key without a bias, which is padding, has no gradient."""
    dt = states_of(given, product)
    a_coef, states = given["a_coef"][:, None], softplus(dt)
    slope = (a_coef * states).exp() if case.bias_form == "exp" else 1
    dz = given["dbias"] * slope
    if "key_valid" in given:
        dz = dz.masked_fill(~given["key_valid"][:, None], 0)
    ddt = dz * a_coef * torch.sigmoid(dt)
    rows = ddt.transpose(1, 2)  # [batch, kv_len, kv_heads]
    found = {
        "dvalue": product(rows, given["dt_proj"]).view_as(given["value"]),
        "ddt_proj": product(rows.flatten(0, 1).mT, given["value"].flatten(0, 1).flatten(1)),
        "da_coef": (dz * states).sum((0, 2)),
    }
    return {**found, "ddt_bias": ddt.sum((0, 2))} if "dt_bias" in given else found


def fused_gradients(case: Case, given: Named, product: Product = torch.matmul) -> Named:
    """The gradients of flash_dma_attention(): value also has one through its scores."""
    found = attention_gradients(case, given, product)
    if case.bias_form == "none":
        return found
    learned = score_gradients(case, {**given, "dbias": found.pop("dbias")}, product)
    return {**found, **learned, "dvalue": found["dvalue"] + learned["dvalue"]}


# ---- plain evaluations ----


def cast(given: Named, dtype: torch.dtype) -> Named:
    wide = torch.promote_types(dtype, torch.float32)
    return {
        name: x.detach().to(wide if name in WIDE else dtype) if x.is_floating_point() else x
        for name, x in given.items()
    }


def reorder(name: str, tensor: torch.Tensor, orders: Orders) -> torch.Tensor:
    """Permute the indices of some axes; an axis of length 1 is broadcast."""
    for axis, letter in enumerate(axes_of(name)):
        if letter in orders and tensor.shape[axis] > 1:
            tensor = tensor.index_select(axis, orders[letter])
    return tensor


def make_orders(case: Case, count: int, device: torch.device) -> list[Orders]:
    """Orders of queries, keys and channels: unchanged, reversed, and random."""
    found = []
    sizes = {"i": case.q_len, "j": case.kv_len, "d": case.head_dim}
    random = torch.Generator().manual_seed(0)
    for number in range(count):
        orders = {letter: torch.randperm(size, generator=random) for letter, size in sizes.items()}
        if number < 2:
            orders = {letter: torch.arange(size) for letter, size in sizes.items()}
        if number == 1:
            orders = {letter: order.flip(0) for letter, order in orders.items()}
        heads = torch.arange(case.kv_heads)[:, None] * case.head_dim
        orders["c"] = (heads + orders["d"]).flatten()
        found.append({letter: order.to(device) for letter, order in orders.items()})
    return found


def evaluate(
    case: Case, compute: Compute, given: Named, dtype: torch.dtype
) -> tuple[list[Named], Named]:
    """The results of compute(), plain and exact. Plain evaluations round every step to `dtype`, and
    permute queries, keys and channels, so that they add in different orders. If `dtype` is the
    dtype of the kernels' accumulators, one more evaluation adds in one accumulator, and on a CUDA
    device another one truncates sums. The exact evaluation is in float64."""
    exact = compute(case, cast(given, torch.float64), torch.matmul)
    count = PLAIN_OF_FEW if min(x.numel() for x in exact.values()) <= FEW else PLAIN
    plain, device = [], next(iter(given.values())).device
    for orders in make_orders(case, count, device):
        shuffled = {name: reorder(name, x, orders) for name, x in given.items()}
        found = compute(case, cast(shuffled, dtype), torch.matmul)
        back = {letter: order.argsort() for letter, order in orders.items()}
        plain.append({name: reorder(name, x, back) for name, x in found.items()})
    if dtype == torch.float32:
        products = (sum_one_by_one,) + ((sum_truncated,) if device.type == "cuda" else ())
        plain += [compute(case, cast(given, dtype), product) for product in products]
    return plain, exact


class Comparison(NamedTuple):
    """The largest errors of a tensor and of the worst plain evaluation. For sets of keys, and for
    numbers that must be 0, the error is the number of wrong ones, and must be 0."""

    what: str
    error: float
    plain: float = 0.0
    largest: float = 0.0  # element of the exact tensor
    step: float = 0.0  # rounding step of numbers near 1
    factor: float = 2.0  # multiplies plain errors

    @property
    def allowed(self) -> float:
        return self.factor * self.plain + self.step * self.largest

    @property
    def fits(self) -> bool:
        """False with NaN, and where a plain evaluation overflows, which would allow anything."""
        return self.error <= self.allowed < math.inf

    @property
    def ratio(self) -> float:
        """The error over the allowed error."""
        if self.fits and self.error == 0:
            return 0.0
        is_number = 0 < self.allowed < math.inf and self.error == self.error
        return self.error / self.allowed if is_number else math.inf


def error_of(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference of finite numbers; infinite if other numbers differ."""
    found, finite = found.detach().double(), exact.isfinite()
    if found.shape != exact.shape or not torch.equal(found[~finite], exact[~finite]):
        return math.inf
    errors = (found - exact)[finite].abs()
    return errors.max().item() if errors.numel() else 0.0


def compare_all(
    case: Case,
    found: Named,
    compute: Compute,
    given: Named,
    dtype: torch.dtype,
    *,
    label: str = "",
    factors: dict[str, float] | None = None,
) -> list[Comparison]:
    """Each result with its plain evaluations in `dtype` and the exact one. `factors` has the
    factors of plain errors that are not 2."""
    plain, exact = evaluate(case, compute, given, dtype)
    step, comparisons = torch.finfo(dtype).eps, []
    for name, one in found.items():
        want = exact[name]
        if want.numel() == 0:
            raise ValueError(f"{name}: has no numbers to compare")
        worst = max(error_of(results[name], want) for results in plain)
        finite = want[want.isfinite()].abs()
        largest = finite.max().item() if finite.numel() else 0.0
        error = error_of(one, want)
        factor = (factors or {}).get(name, 2.0)
        comparisons.append(Comparison(label + name, error, worst, largest, step, factor))
    return comparisons
