"""sum_order.py: other orders of products change the last bits, except with exact_linear()."""

from __future__ import annotations

import pytest
import torch
from programs import output_of, python
from sum_order import exact_linear, product

REPLACED = """
import torch
from sum_order import exact_linear, replace_products
torch.manual_seed(0)
x, y = torch.randn(2, 60, 300)
x[5] = x[2]
layer = torch.nn.Linear(300, 60)
products = (
    lambda: x @ y.T,
    lambda: layer(x),
    lambda: x.expand(2, -1, -1) @ y.T.expand(2, -1, -1),
    lambda: torch.baddbmm(layer.bias, x[None], y.T[None], beta=2, alpha=3),
    lambda: torch.addmv(layer.bias, x, y[0], beta=2, alpha=3),
    lambda: x @ y[0],
    lambda: torch.stack([x[i] @ y[i] for i in range(9)]),
)
exact = lambda: exact_linear(x, layer.weight, layer.bias)
with torch.no_grad():
    before, exact_before = [one() for one in products], exact()
    kept = replace_products(1)
    for number, (was, one) in enumerate(zip(before, products)):
        torch.testing.assert_close(one(), was, atol=2e-4, rtol=0)
        assert not torch.equal(one(), was), number
        assert torch.equal(one(), one()), number
    assert not torch.equal(layer(x)[5], layer(x)[2])
    assert not torch.equal(layer(x[:7])[:4], layer(x)[:4])
    assert torch.equal(exact(), exact_before) and torch.equal(exact()[5], exact()[2])
    assert torch.equal(exact_linear(x[:7], layer.weight, layer.bias), exact()[:7])
print("done")
"""


def test_replaced_products() -> None:
    assert output_of(python("-c", REPLACED)) == "done\n"


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_orders(rows: int) -> None:
    """Each seed has its own order. In float64 all are equal within rounding."""
    random = torch.Generator().manual_seed(3)
    one = torch.randn(rows, 200, generator=random)
    other = torch.randn(200, 40, generator=random)
    found = [product(seed, torch.ops.aten.mm.out, one, other) for seed in (1, 2)]
    assert not torch.equal(*found)
    wide = product(1, torch.ops.aten.mm.out, one.double(), other.double())
    torch.testing.assert_close(wide, one.double() @ other.double(), atol=1e-12, rtol=0)
    rounded = exact_linear(one, other.T)
    assert torch.equal(rounded, wide.float())
