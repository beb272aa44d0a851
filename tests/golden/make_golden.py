#!/usr/bin/env python3
"""Writes golden.inc: small problems and their exact answers, for the C tests of the reference.

Everything is evaluated in float64 with numpy, straight from the definitions: per query, the
visible valid keys are sorted and the best ones attended to. Nothing of the library is used.

Run: python3 make_golden.py > golden.inc (the last bits of sums depend on the BLAS of numpy)
"""

from __future__ import annotations

import dataclasses

import numpy as np

NEVER = -1


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem. mask: "causal", "global" (causal, one ranking) or "full"; window None: dense."""

    name: str
    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    mask: str
    bias_form: str
    softcap: float = 0.0
    scale: float = 0.0
    scores: str = "random"
    padding: str = "none"


CASES = (
    Case("linear", 1, 13, 13, 2, 1, 8, 4, "causal", "linear"),
    Case("exponential", 1, 13, 13, 2, 2, 8, 5, "causal", "exp"),
    Case("softcap", 1, 11, 11, 1, 1, 16, 6, "causal", "linear", softcap=0.75),
    Case("scale", 1, 9, 9, 1, 1, 8, 3, "causal", "none", scale=1.5),
    Case("groups", 2, 10, 10, 6, 2, 8, 4, "causal", "exp", scores="ties"),
    Case("later_queries", 1, 5, 19, 2, 1, 8, 6, "causal", "linear", scores="ties"),
    Case("padding", 2, 14, 14, 2, 1, 8, 3, "causal", "exp", padding="left"),
    Case("holes", 2, 12, 17, 2, 1, 8, 4, "causal", "linear", scores="ties", padding="holes"),
    Case("global_full", 1, 7, 12, 2, 1, 8, 5, "full", "exp", padding="holes"),
    Case("global_causal", 1, 12, 12, 4, 2, 8, 5, "global", "linear"),
    Case("special", 1, 16, 16, 1, 1, 8, 5, "causal", "none", scores="special"),
    Case("rising", 1, 12, 12, 1, 1, 8, 3, "causal", "linear", scores="rising"),
    Case("dense_causal", 1, 9, 12, 2, 1, 8, None, "causal", "linear"),
    Case("dense_full", 1, 6, 10, 2, 2, 8, None, "full", "none", padding="left"),
    Case("empty_rows", 1, 9, 5, 1, 1, 8, None, "causal", "none"),
)


def numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal numbers of 6 significant bits: exact in float32, float16 and bfloat16."""
    x = rng.standard_normal(shape)
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 64) / 64, exponent)


def make_scores(case: Case, rng: np.random.Generator) -> np.ndarray:
    """Scores that the selection ranks, [batch, kv_heads, kv_len]."""
    score = numbers(rng, case.batch, case.kv_heads, case.kv_len)
    if case.scores == "ties":
        return np.round(score)
    if case.scores == "rising":
        return np.sort(score, axis=-1)
    if case.scores == "special":
        score[..., 0] = np.nan
        score[..., 3] = -np.inf
        score[..., 5] = np.inf
        score[..., 6] = -0.0
        score[..., 7] = 0.0
        score[..., 8] = np.inf
        score[..., 10] = np.nan
    return score


def make_valid(case: Case) -> np.ndarray:
    """Which keys are valid, [batch, kv_len]."""
    valid = np.ones((case.batch, case.kv_len), dtype=bool)
    for b in range(case.batch):
        if case.padding == "left":
            valid[b, : 3 + 2 * b] = False
        elif case.padding == "holes":
            valid[b, (np.arange(case.kv_len) * 7 + b) % 5 < 2] = False
    return valid


def best(score: np.ndarray, keys: list[int], window: int) -> set[int]:
    """The `window` best of some keys: higher score, then the later key; NaN below everything."""

    def order(j: int) -> tuple[bool, float, int]:
        unknown = bool(np.isnan(score[j]))
        return (not unknown, 0.0 if unknown else float(score[j]), j)

    return set(sorted(keys, key=order, reverse=True)[:window])


def kept_by(case: Case, score: np.ndarray, valid: np.ndarray, position: int) -> set[int]:
    """The kept set of the query at a position, of one segment of scores."""
    everything = [j for j in range(case.kv_len) if valid[j]]
    visible = everything if case.mask == "full" else [j for j in everything if j <= position]
    if case.window is None:
        return set(visible)
    if case.mask == "causal":
        return best(score, visible, case.window)
    return best(score, everything, case.window) & set(visible)


def select(case: Case, score: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """expiry and slot of one segment, by watching the kept set from position to position."""
    assert case.window is not None
    expiry = np.arange(case.kv_len)
    slot = np.full(case.kv_len, NEVER)
    if case.mask != "causal":
        chosen = best(score, [j for j in range(case.kv_len) if valid[j]], case.window)
        for number, j in enumerate(sorted(chosen)):
            expiry[j], slot[j] = case.kv_len, number
        return expiry, slot
    before: set[int] = set()
    filled = 0
    for position in range(case.kv_len):
        now = kept_by(case, score, valid, position)
        gone, come = before - now, now - before
        assert come <= {position} and len(gone) <= len(come), "a key came back"
        for j in come:
            expiry[j] = case.kv_len
            slot[j] = slot[min(gone)] if gone else filled
            filled += not gone
        for j in gone:
            expiry[j] = position
        before = now
    return expiry, slot


def attend(
    case: Case, q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray, keys: list[int]
) -> tuple[np.ndarray, float]:
    """out and lse of one query over its keys; q [head_dim], k and v [kv_len, head_dim]."""
    scale = case.scale if case.scale > 0 else 1 / np.sqrt(case.head_dim)
    logits = scale * (k[keys] @ q)
    if case.softcap > 0:
        logits = case.softcap * np.tanh(logits / case.softcap)
    logits = logits + bias[keys]
    if len(keys) == 0 or np.all(logits == -np.inf):
        return np.zeros(case.head_dim), -np.inf
    highest = logits.max()
    weights = np.exp(logits - highest)
    return weights @ v[keys] / weights.sum(), float(highest + np.log(weights.sum()))


def emit(values: np.ndarray, name: str, kind: str) -> None:
    """One C array."""

    def text(x: float) -> str:
        if kind == "int32_t":
            return str(int(x))
        if np.isnan(x):
            return "NAN"
        if np.isinf(x):
            return "INFINITY" if x > 0 else "-INFINITY"
        mantissa, exponent = float(x).hex().split("p")
        return mantissa.rstrip("0").rstrip(".") + "p" + exponent

    print(f"static const {kind} {name}[] = {{")
    line = "   "
    for x in values.ravel():
        word = f" {text(x)},"
        if len(line) + len(word) > 100:
            print(line)
            line = "   "
        line += word
    print(line)
    print("};")


def make_bias(case: Case, score: np.ndarray) -> np.ndarray:
    """The additive term of the logits, rounded to float32 as the interface wants it."""
    if case.bias_form == "none":
        return np.zeros_like(score)
    return (np.exp(score) if case.bias_form == "exp" else score).astype(np.float32).astype(float)


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + exp(x)), also where exp(x) is large."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def make_case(case: Case, seed: int) -> None:
    """Prints the arrays of one case and its line of the table."""
    rng = np.random.default_rng(seed)
    q = numbers(rng, case.batch, case.q_len, case.q_heads, case.head_dim)
    k = numbers(rng, case.batch, case.kv_len, case.kv_heads, case.head_dim)
    v = numbers(rng, case.batch, case.kv_len, case.kv_heads, case.head_dim)
    dt_proj = numbers(rng, case.kv_heads, case.kv_heads * case.head_dim)
    a = numbers(rng, case.kv_heads)
    score, valid = make_scores(case, rng), make_valid(case)
    bias = make_bias(case, score)

    dt = np.einsum("bjx,gx->bgj", v.reshape(case.batch, case.kv_len, -1), dt_proj)
    z = a[None, :, None] * softplus(dt)
    z = np.where(valid[:, None, :], z, -np.inf)

    expiry = np.zeros(score.shape)
    slot = np.zeros(score.shape)
    out = np.zeros(q.shape)
    lse = np.zeros((case.batch, case.q_heads, case.q_len))
    group = case.q_heads // case.kv_heads
    for b in range(case.batch):
        for g in range(case.kv_heads):
            if case.window is not None:
                expiry[b, g], slot[b, g] = select(case, score[b, g], valid[b])
        for h in range(case.q_heads):
            for i in range(case.q_len):
                g = h // group
                keys = sorted(kept_by(case, score[b, g], valid[b], i + case.kv_len - case.q_len))
                out[b, i, h], lse[b, h, i] = attend(
                    case, q[b, i, h], k[b, :, g], v[b, :, g], bias[b, g], keys
                )
    inputs = {"q": q, "k": k, "v": v, "dt_proj": dt_proj, "a": a, "score": score, "bias": bias}
    for name, values in {**inputs, "z": z, "out": out, "lse": lse}.items():
        emit(values, f"{case.name}_{name}", "double")
    for name, values in {"valid": valid, "expiry": expiry, "slot": slot}.items():
        emit(values, f"{case.name}_{name}", "int32_t")
    print()


def main() -> None:
    """Prints the file."""
    print("/* golden.inc - written by make_golden.py; see golden_case in test_reference.c. */")
    print("/* clang-format off: numbers */\n")
    for number, case in enumerate(CASES):
        make_case(case, 1000 + number)
    print("static const golden_case golden_cases[] = {")
    for case in CASES:
        window = NEVER if case.window is None else case.window
        fields = (case.batch, case.q_len, case.kv_len, case.q_heads, case.kv_heads, case.head_dim)
        print(f'    {{"{case.name}", {", ".join(map(str, fields))}, {window},')
        print(f"     {int(case.mask != 'full')}, {int(case.mask != 'causal')},", end="")
        print(f" FDMA_BIAS_{case.bias_form.upper()}, {case.softcap}, {case.scale},")
        names = "q k v dt_proj a score bias z out lse valid expiry slot".split()
        for line in (names[:4], names[4:8], names[8:11], names[11:]):
            comma = "}," if line[-1] == "slot" else ","
            print("     " + ", ".join(f"{case.name}_{name}" for name in line) + comma)
    print("};")


if __name__ == "__main__":
    main()
