"""Dynamic mask attention by its definition, in PyTorch alone: what forward_equivalence.py and its
like compare with, and the inputs that forward_performance.py and its like have too."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple, Sequence, Tuple

import flash_dmattn
import torch
from peers import Parser
from peers_common import Disagreement

Tensors = Tuple[torch.Tensor, ...]
PLAIN = 6  # plain evaluations
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Case(NamedTuple):
    """Causal attention of `length` queries to as many keys."""

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    length: int
    window: int

    def name(self) -> str:
        words = "b{}/h{}g{}/d{}/n{}/w{}"
        return words.format(*self)


CASES = (
    Case(1, 4, 2, 64, 256, 64),
    Case(2, 3, 3, 32, 300, 400),
    Case(2, 4, 1, 32, 500, 128),
    Case(1, 8, 2, 128, 1000, 256),
)


class Inputs:
    """Random tensors of a case, and the mask of the best keys of each query by their scores."""

    def __init__(self, case: Case, device: str, dtype: torch.dtype) -> None:
        random = torch.Generator(device).manual_seed(case.length)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random, device=device)

        batch, q_heads, kv_heads, head_dim, length, window = case
        self.case = case
        self.query = draw(batch, length, q_heads, head_dim).to(dtype)
        self.key, self.value = (draw(batch, length, kv_heads, head_dim).to(dtype) for _ in "kv")
        width = kv_heads * head_dim
        self.weights = draw(kv_heads, width) / width**0.5, draw(kv_heads)
        self.attn_bias = draw(batch, kv_heads, length, length).to(dtype)
        self.dout = draw(*self.query.shape).to(dtype)
        score, _ = flash_dmattn.score(self.value, *self.weights)
        self.mask = best_keys(score, window)

    @property
    def rows(self) -> Tensors:
        return self.query, self.key, self.value


def best_keys(score: torch.Tensor, window: int) -> torch.Tensor:
    """Which keys each query keeps of those up to its position: bool [batch, kv_heads, len, len]."""
    length = score.shape[-1]
    visible = torch.ones(length, length, dtype=torch.bool, device=score.device).tril()
    ranked = score[:, :, None].expand(-1, -1, length, -1).masked_fill(~visible, float("-inf"))
    best = ranked.topk(min(window, length), dim=-1).indices
    return torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, best, True) & visible


def bias_of(value: torch.Tensor, dt_proj: torch.Tensor, a_coef: torch.Tensor) -> torch.Tensor:
    """What scores add to the logits of keys: [batch, kv_heads, 1, len]."""
    states = torch.nn.functional.softplus(value.flatten(2) @ dt_proj.T)
    return (a_coef * states).exp().transpose(1, 2)[:, :, None]


class Attention(torch.autograd.Function):
    """Attention of [batch, heads, len, head_dim], and its gradients by docs/algorithm.md, Backward.
    delta comes from out, as in every form of FlashAttention: out is rounded to the tensors' dtype,
    and sums of many gradients differ by that from what autograd computes of the softmax."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        logits = q @ k.mT * q.shape[3] ** -0.5 + bias
        probability = logits.masked_fill(~mask, float("-inf")).softmax(-1)
        out = probability @ v
        ctx.save_for_backward(q, k, v, bias, probability, out)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, bias, probability, out = ctx.saved_tensors
        delta = (dout * out).sum(-1, keepdim=True)
        dlogits = probability * (dout @ v.mT - delta)
        scaled = dlogits * q.shape[3] ** -0.5
        dv = probability.mT @ dout
        return scaled @ k, scaled.mT @ q, dv, dlogits.sum_to_size(bias.shape), None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Attention under a mask and a bias of kv heads, in the dtype of its arguments."""
    group = query.shape[2] // key.shape[2]
    rows = [x.transpose(1, 2) for x in (query, key, value)]
    rest = (x.repeat_interleave(group, 1) for x in (*rows[1:], bias, mask))
    return Attention.apply(rows[0], *rest).transpose(1, 2)


def cast(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """New leaves of the same values in `dtype`, which collect gradients."""
    return [x.detach().to(dtype).clone().requires_grad_() for x in tensors]


def gradients(out: torch.Tensor, leaves: Sequence[torch.Tensor], dout: torch.Tensor) -> Tensors:
    return torch.autograd.grad(out, leaves, dout.to(out.dtype))


def reorder(tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Put positions in another order, along every axis that has as many entries."""
    for axis, size in enumerate(tensor.shape):
        tensor = tensor.index_select(axis, order) if size == len(order) else tensor
    return tensor


Compute = Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor], Tensors]


def evaluate(inputs: Inputs, given: Tensors, compute: Compute) -> tuple[list[Tensors], Tensors]:
    """The results of compute(given, mask, dout), plain and exact. Plain evaluations round every
    step to the inputs' dtype, and differ in the order of positions, so that they add in different
    orders. The exact evaluation is in float64."""
    dtype, device, length = inputs.query.dtype, inputs.query.device, inputs.case.length
    exact = compute(cast(given, torch.float64), inputs.mask, inputs.dout)
    orders = [torch.arange(length), torch.arange(length).flip(0)]
    random = torch.Generator().manual_seed(0)
    orders += [torch.randperm(length, generator=random) for _ in range(PLAIN - len(orders))]
    plain = []
    for order in (x.to(device) for x in orders):
        leaves = cast([reorder(x, order) for x in given], dtype)
        results = compute(leaves, reorder(inputs.mask, order), reorder(inputs.dout, order))
        plain.append(tuple(reorder(x.detach(), order.argsort()) for x in results))
    return plain, tuple(x.detach() for x in exact)


class Comparison(NamedTuple):
    """The largest errors of a tensor and of the worst plain evaluation."""

    what: str
    error: float
    plain: float
    largest: float  # number of the exact tensor
    step: float  # of rounding, of numbers near 1

    @property
    def allowed(self) -> float:
        return 2 * self.plain + self.step * self.largest


def error_of(found: torch.Tensor, exact: torch.Tensor) -> float:
    return (found.double() - exact).abs().max().item()


def compare_all(
    names: Sequence[str], found: Tensors, plain: list[Tensors], exact: Tensors, dtype: torch.dtype
) -> Iterator[Comparison]:
    """Each result with its plain evaluations and the exact one."""
    step = torch.finfo(dtype).eps
    for index, (name, one, want) in enumerate(zip(names, found, exact)):
        worst = max(error_of(results[index], want) for results in plain)
        yield Comparison(name, error_of(one, want), worst, want.abs().max().item(), step)


def default_device() -> str:
    return "cuda" if "cuda" in flash_dmattn.get_available_backends() else "cpu"


def make_parser(program: str, document: str | None) -> Parser:
    parser = Parser(prog=program, description=(document or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default_device())
    parser.add_argument("--dtype", choices=DTYPES, help="of query, key, value and mask")
    return parser


def parse(parser: Parser, arguments: list[str] | None) -> argparse.Namespace:
    args = parser.parse_args(arguments)
    if args.device == "cuda" and default_device() != "cuda":
        parser.error("there is no CUDA device, or no CUDA backend in this build")
    args.dtype = DTYPES[args.dtype or ("float32" if args.device == "cpu" else "bfloat16")]
    return args


def run_equivalence(
    program: str,
    document: str | None,
    comparisons: Callable[[Inputs], Iterator[Comparison]],
    arguments: list[str] | None,
) -> int:
    """Compare on every case. Exit status: 0 equal but for rounding; 1 not; 2 bad usage."""
    args = parse(make_parser(program, document), arguments)
    wrong = 0
    print(f"{'case':26} {'tensor':34} {'error':>9} {'plain':>9} {'allowed':>9}")
    for case in CASES:
        for one in comparisons(Inputs(case, args.device, args.dtype)):
            fits = one.error <= one.allowed  # NaN does not
            wrong += not fits
            numbers = f"{one.error:9.2e} {one.plain:9.2e} {one.allowed:9.2e}"
            print(f"{case.name():26} {one.what:34} {numbers} {'' if fits else 'WRONG'}".rstrip())
    if wrong:
        print(f"{program}: {wrong} tensors differ from their definition", file=sys.stderr)
    return 1 if wrong else 0


def require_equal(inputs: Inputs, found: torch.Tensor, other: torch.Tensor) -> None:
    """Raise Disagreement unless two peers' outputs are equal but for rounding: of weights and of
    outputs, and of sums in float32."""
    error = (found.double() - other.double()).abs().max().item()
    sums = inputs.case.length**0.5 * torch.finfo(torch.float32).eps
    allowed = (4 * torch.finfo(found.dtype).eps + sums) * inputs.value.abs().max().item()
    if not error <= allowed:  # written so that NaN fails
        name = inputs.case.name()
        raise Disagreement(f"{name}: outputs differ by {error:.3g}, allowed {allowed:.3g}")
