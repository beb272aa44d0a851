"""The FLOPs of the operators, for torch.utils.flop_counter.FlopCounterMode.

A multiply-add counts as two operations. The products of attention count for each query and the keys
that it keeps, and so do the products of scores. Products that a kernel computes and then masks do
not count. A formula sees shapes alone. It counts padding, packed sequences and attn_mask as if
every visible pair were kept, and a global selection as if every query saw all the keys it keeps.
"""

from __future__ import annotations

from typing import Any, Mapping

from torch.utils.flop_counter import flop_registry, register_flop_formula

from . import (
    autograd,  # noqa: F401 (makes operators that record no gradients)
    ops,
)

FORWARD, BACKWARD = 2, 5  # products of a row of head_dim with each kept key


def count_pairs(q_len: int, kv_len: int, kept: int, causal: bool) -> int:
    """The number of pairs of a query and a key that it keeps, at most `kept` of its visible keys.
    The last query is at the position of the last key."""

    def up_to(visible: int) -> int:
        """The pairs of the queries that see 1, 2, ..., `visible` keys."""
        growing = min(visible, kept)
        return growing * (growing + 1) // 2 + (visible - growing) * kept

    if not causal:
        return q_len * min(kv_len, kept)
    return up_to(kv_len) - up_to(max(kv_len - q_len, 0))


def count_attention(given: Mapping[str, Any], products: int) -> int:
    batch, q_len, q_heads, head_dim = given["query"]
    kv_len = given["key"][1]
    window = given.get("window", given.get("keep_window_size"))
    selects = "expiry" not in given or given["expiry"] is not None
    kept = window + given["recent"] if selects else kv_len
    kv_len += kept if "key_carried" in given else 0
    pairs = count_pairs(q_len, kv_len, kept, given.get("causal", True))
    return 2 * products * batch * q_heads * head_dim * pairs


def count_score(given: Mapping[str, Any], products: int) -> int:
    batch, kv_len, kv_heads, head_dim = given["value"]
    return 2 * products * batch * kv_len * kv_heads * kv_heads * head_dim


def count_decode(given: Mapping[str, Any]) -> int:
    """Each token sees the rows of the cache, and the call's tokens up to itself."""
    batch, q_len, q_heads, head_dim = given["query"]
    kept = given["window"] + given["recent"]
    scores = 0 if given["dt_proj"] is None else count_score(given, 1)
    return scores + 2 * FORWARD * batch * q_heads * head_dim * q_len * kept


FORMULAS = {
    ops.SCORE: lambda given: count_score(given, 1),
    ops.SCORE_BACKWARD: lambda given: count_score(given, 2),
    ops.SCORE_BACKWARD_ADDED: lambda given: count_score(given, 2),
    ops.ATTENTION: lambda given: count_attention(given, FORWARD),
    ops.ATTENTION_BACKWARD: lambda given: count_attention(given, BACKWARD),
    ops.CARRIED_ATTENTION: lambda given: count_attention(given, FORWARD),
    ops.CARRIED_ATTENTION_BACKWARD: lambda given: count_attention(given, BACKWARD),
    ops.PROBABILITIES: lambda given: count_attention(given, 1),
    ops.DECODE: count_decode,
}
FORMULAS[ops.FUSED] = FORMULAS[ops.FUSED_OUT] = FORMULAS[ops.PREFILL] = lambda given: (
    count_score(given, 1) + count_attention(given, FORWARD)
)
FORMULAS[ops.FUSED_BACKWARD] = lambda given: (
    (0 if given["bias_form"] == "none" else count_score(given, 2))
    + count_attention(given, BACKWARD)
)


def register(operator: ops.Operator, count: Any) -> None:
    """Have FlopCounterMode count calls of the operator. If the operator has gradients, the mode
    sees `name_no_grad` in its place."""

    def formula(*arguments: Any, **_: Any) -> int:
        return count(dict(zip(operator.arguments, arguments)))

    for name in (operator.name, f"{operator.name}_no_grad"):
        packet = getattr(ops.REGISTERED, name, None)
        if packet is not None:
            register_flop_formula(packet)(formula)
            # PyTorch 2.4 keeps formulas by overload, and looks for them by packet
            flop_registry.setdefault(packet, flop_registry.get(packet.default))


for _operator, _count in FORMULAS.items():
    register(_operator, _count)
