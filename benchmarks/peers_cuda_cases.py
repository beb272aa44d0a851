"""The cases of a CUDA device that benchmarks/peers.py measures, and their goals."""

from __future__ import annotations

from peers_cuda_inputs import ORDERS, Case, Goal

QUICK_LENGTH = 32768  # the largest length with --quick


def make_case(
    kind: str, *sizes: int, batch: int = 1, mask: bool = False, **goals: tuple[float, float]
) -> Case:
    """A case in which fdma has at most one goal: FIGURE=(bar, aim)."""
    own = [Goal(figure, *bounds) for figure, bounds in goals.items()]
    assert len(own) <= 1
    return Case(kind, *sizes, {"fdma": own[0]} if own else {}, mask, batch)


def forward_cases() -> list[Case]:
    orders = {f"fdma-{order}": Goal("of_iid", 1.15, 1.0) for order in ORDERS}
    sm80 = {"fdma-sm80": Goal("of_dense", 0.85, 1.0)}
    return [
        make_case("attention", 32, 8, 128, 8192, 2048, ms=(0.65, 0.5), mask=True),
        make_case("attention", 32, 8, 128, 32768, 2048, of_dense=(0.88, 1.1)),
        make_case("attention", 32, 8, 128, 131072, 2048, of_dense=(0.95, 1.1)),
        make_case("attention", 32, 8, 128, 1048576, 2048, ms=(85, 66)),
        make_case("attention", 32, 8, 128, 32768, 512, of_dense=(0.75, 1.0)),
        make_case("attention", 32, 32, 128, 16384, 2048, of_dense=(0.82, 0.95)),
        make_case("attention", 32, 32, 128, 32768, 2048, of_dense=(0.65, 0.90)),
        make_case("attention", 16, 16, 128, 16384, 1024, of_dense=(0.70, 0.95)),
        make_case("attention", 16, 4, 64, 32768, 2048, of_dense=(0.82, 1.0)),
        make_case("attention", 32, 8, 64, 32768, 2048, of_dense=(0.60, 0.80)),
        make_case("attention", 16, 4, 256, 32768, 2048, of_dense=(0.60, 0.80)),
        make_case("attention", 2, 1, 64, 32768, 1024, ms=(0.095, 0.07), mask=True),
        Case("selected", 32, 8, 128, 8192, 2048, orders),
        Case("selected", 32, 8, 128, 32768, 2048, {**orders, **sm80}),
        Case("selected", 32, 8, 128, 131072, 2048, orders),
        make_case("dense", 32, 8, 128, 8192, 0, of_dense=(0.80, 1.05)),
        make_case("dense", 32, 8, 128, 32768, 0, of_dense=(0.80, 1.05)),
    ]


def backward_cases() -> list[Case]:
    orders = {f"fdma-{order}": Goal("of_iid", 1.2, 1.0) for order in ORDERS if order != "falling"}
    fast = {"fdma-deterministic": Goal("of_fast", 1.15, 1.05)}
    return [
        make_case("backward", 32, 8, 128, 32768, 2048, of_dense=(0.80, 1.0)),
        make_case("backward", 32, 8, 128, 131072, 2048, of_dense=(0.80, 1.0)),
        make_case("backward", 32, 8, 128, 32768, 512, of_dense=(0.58, 0.75)),
        make_case("backward", 32, 32, 128, 16384, 2048, of_dense=(0.65, 0.80)),
        make_case("backward", 16, 16, 128, 16384, 1024, of_dense=(0.52, 0.80)),
        make_case("backward", 16, 4, 64, 32768, 2048, of_dense=(0.78, 1.0)),
        make_case("backward", 16, 4, 256, 32768, 2048, of_dense=(0.75, 1.0)),
        make_case("backward", 2, 1, 64, 32768, 1024, ms=(0.24, 0.18), mask=True),
        Case("selected-backward", 32, 8, 128, 32768, 2048, {**orders, **fast}),
        make_case("dense-backward", 32, 8, 128, 8192, 0, of_dense=(0.95, 1.1)),
        make_case("dense-backward", 32, 8, 128, 32768, 0, of_dense=(1.00, 1.1)),
        make_case("training", 32, 8, 128, 32768, 2048),
    ]


# q_heads, kv_heads, head_dim, length, window, batch; the bar and the aim of forward and of
# backward, times as fast as cuDNN. Attention to few keys, or to all of them.
SHORT = (
    ((16, 4, 128, 512, 128), 32, (1.0, 1.2), (1.0, 1.2)),
    ((8, 4, 64, 512, 128), 32, (0.85, 1.2), (0.75, 1.2)),
    ((16, 4, 128, 1024, 256), 16, (1.25, 1.6), (1.1, 1.4)),
    ((8, 4, 64, 1024, 256), 16, (1.0, 1.6), (0.9, 1.4)),
    ((16, 4, 128, 2048, 512), 8, (1.6, 2.2), (1.35, 1.8)),
    ((8, 4, 64, 2048, 512), 8, (1.2, 2.2), (1.1, 1.8)),
    ((8, 4, 64, 2048, 2048), 8, (0.95, 1.1), (0.9, 1.1)),
    ((32, 8, 128, 8192, 8192), 1, (0.98, 1.1), (0.95, 1.1)),
)


def short_cases() -> list[Case]:
    found = []
    for sizes, batch, forward, backward in SHORT:
        found.append(make_case("attention", *sizes, batch=batch, times_cudnn=forward))
        found.append(make_case("backward", *sizes, batch=batch, times_cudnn=backward))
    return found


def single_cases() -> list[Case]:
    """Of one operation, or of one query."""
    read = (1 / 1.3, 1 / 1.05)
    launch = {"fdma": Goal("ms", 0.060, 0.030), "graph": Goal("ms", 0.015, 0.008)}
    return [
        make_case("select", 0, 1, 0, 32768, 1024, ms=(0.060, 0.030)),
        make_case("select", 0, 8, 0, 32768, 2048, ms=(0.080, 0.040)),
        make_case("select", 0, 8, 0, 131072, 2048, ms=(0.180, 0.090)),
        make_case("select", 0, 8, 0, 1048576, 2048, ms=(1.5, 0.8)),
        make_case("score", 8, 8, 128, 131072, 0, of_read=read),
        make_case("score", 32, 32, 128, 131072, 0, of_read=read),
        make_case("one-query", 32, 8, 128, 131072, 0, of_read=(1 / 1.25, 1 / 1.1)),
        make_case("one-query", 32, 8, 128, 131072, 2048, ms=(0.125, 0.10)),
        make_case("one-query", 2, 1, 64, 524288, 1024, ms=(0.095, 0.06)),
        Case("launch", 2, 1, 64, 16, 4, launch),
    ]


def all_cases(quick: bool) -> list[Case]:
    """quick: short sequences with head_dim 128 only, and nothing longer than QUICK_LENGTH."""
    short = [case for case in short_cases() if not quick or case.head_dim == 128]
    cases = [*forward_cases(), *short, *single_cases(), *backward_cases()]
    return [case for case in cases if not quick or case.length <= QUICK_LENGTH]
