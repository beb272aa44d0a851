"""Matrix products of PyTorch on the CPU: with sums in another order, as on another CPU, and with
sums that do not depend on order.

The last bits of a product depend on the machine and, on most, on the number of rows and on the
place of a row among them. If equal tokens have equal scores, these bits would decide which keys are
kept; such tests use exact_linear() for linear layers. The environment variable FDMA_TEST_SUM_ORDER,
the seed of replace_products(), shows which tests depend on such bits."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

plain_linear = torch.nn.functional.linear


def exact_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums in float64, rounded once: the same bits on every CPU, and for equal rows."""
    wide = None if bias is None else bias.double()
    return plain_linear(x.double(), weight.double(), wide).to(x.dtype)


@functools.lru_cache(None)
def permutation(inner: int, seed: int, rows: int, first: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed + 1000 * (2 * rows + first))
    return torch.randperm(inner, generator=random)


def product(seed: int, plain: Any, *tensors: torch.Tensor, **factors: Any) -> torch.Tensor:
    """one [..., rows, inner] times other [..., inner, columns], after a tensor to add, if any. The
    permutation of the inner dimension depends on the number of rows, on whether a row's index is
    even, and on the seed. `plain` also has a variant with an argument `out`, which is not
    replaced."""
    *added, one, other = tensors
    rows, inner = one.shape[-2:]
    out = one.new_empty(*one.shape[:-1], other.shape[-1])
    added = [x.expand(out.shape) for x in added]
    for first in range(min(rows, 2)):
        order = permutation(inner, seed, rows, first)
        mine = [x[..., first::2, :] for x in (*added, one[..., order])]
        target = out[..., first::2, :]
        target.copy_(plain(*mine, other[..., order, :], out=torch.empty_like(target), **factors))
    return out


def replace_products(seed: int) -> torch.library.Library:
    """Replace products as long as the returned library is kept."""
    aten = torch.ops.aten

    def mv(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return product(seed, aten.mm.out, one, other[:, None])[:, 0]

    def addmv(added: Any, one: torch.Tensor, other: torch.Tensor, **factors: Any) -> torch.Tensor:
        column = added.expand(len(one))[:, None]
        return product(seed, aten.addmm.out, column, one, other[:, None], **factors)[:, 0]

    def dot(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return product(seed, aten.mm.out, one[None], other[:, None])[0, 0]

    functions = {"mv": mv, "addmv": addmv, "dot": dot}
    for name in ("mm", "addmm", "bmm", "baddbmm"):
        functions[name] = functools.partial(product, seed, getattr(aten, name).out)
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings that kernels are replaced
        for name, function in functions.items():
            library.impl(name, function, "CPU", allow_override=True)
    return library
