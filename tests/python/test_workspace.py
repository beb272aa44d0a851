"""workspace_bytes(): a bound for every call within the limits, not far above them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Callable

import flash_dmattn
import pytest
import torch
from cases import FULL
from flash_dmattn import DynamicMaskOptions, _call, _library, workspace
from programs import Seen

# The CPU and, because meta tensors need no device memory, a device, even an emulated one.
INDICES = [-1, 0] if _library.library.fdma_device_count() > 1 else [-1]
DTYPES = [torch.float32, torch.bfloat16]


def make_tensors(
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    device: str = "meta",
    length: int = 1,
    is_learning: bool = True,
) -> tuple[torch.Tensor, ...]:
    q_heads, kv_heads = heads
    random = torch.Generator().manual_seed(length) if device == "cpu" else None
    shapes = [(1, length, q_heads, head_dim), *2 * [(1, length, kv_heads, head_dim)]]
    shapes += [(kv_heads, kv_heads * head_dim), (kv_heads,)]
    return tuple(
        torch.randn(shape, dtype=dtype, device=device, generator=random).requires_grad_(is_learning)
        for shape in shapes
    )


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def draw_call(draw: random.Random) -> tuple[DynamicMaskOptions, dict[str, Any]]:
    causal = draw.random() < 0.7
    options = DynamicMaskOptions(
        keep_window_size=draw.choice([1, 1, 3, 64, 256, 2048]),
        max_sequence_length=draw.choice([5, 20, 64, 64, 300, 4096, 70000]),
        max_batch_size=draw.choice([1, 2, 5, 19]),
        mixed_processing=draw.random() < 0.7,
    )
    call = {"causal": causal, "dropout_p": draw.choice([0.0, 0.0, 0.2])}
    call["softcap"] = draw.choice([0.0, 3.0])
    call["return_lse"] = draw.random() < 0.5
    call["bias_form"] = draw.choice(["exp", "linear", "none"])
    if causal:
        call |= {"recent": draw.choice([0, 0, 17]), "gap": draw.choice([None, None, 2.0])}
        call |= {"scope": draw.choice(["causal", "causal", "global"])}
        if call["scope"] == "global":
            call |= {"recent": 0, "gap": None}
    if draw.random() < 0.3:
        call["key_valid"] = torch.empty(1, 1, dtype=torch.bool)
    if draw.random() < 0.3:
        call["starts"] = torch.empty(2, dtype=torch.int32)
    return options, call


def draw_shape(
    draw: random.Random, options: DynamicMaskOptions, call: dict[str, Any]
) -> tuple[int, int, int]:
    longest = options.max_sequence_length
    few = min(longest, draw.choice([10, 80, longest]))
    batch, kv_len = draw.randint(1, options.max_batch_size), draw.randint(1, few)
    q_len = draw.choice([1, draw.randint(1, min(longest, 30)), draw.randint(1, longest), kv_len])
    if "starts" in call:
        return batch, kv_len, kv_len
    return batch, min(q_len, kv_len) if call.get("scope") == "causal" else q_len, kv_len


def bytes_of(
    index: int,
    shape: tuple[int, int, int],
    tensors: tuple[torch.Tensor, ...],
    options: DynamicMaskOptions,
    call: dict[str, Any],
) -> int:
    needed = _call.Workspaces(index)
    workspace._ask(needed, shape, tensors, {**call, "options": options})
    return needed.most


# Numbers of threads in turn, or every one with every seed.
COUNTS = (1, 3, 16)
DRAWN = [(n, one) for n in range(24) for one in COUNTS if FULL or one == COUNTS[n % 3]]


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize(("seed", "threads"), DRAWN)
def test_no_call_within_the_limits_needs_more(
    seed: int, index: int, threads: int, set_threads: Callable[[int], None]
) -> None:
    draw = random.Random(100 * seed + threads)
    set_threads(threads)
    heads = draw.choice([(4, 2), (8, 1), (32, 8), (2, 2), (16, 16)])
    dtype = draw.choice(DTYPES) if index < 0 else torch.bfloat16
    head_dim, is_learning = draw.choice([8, 32, 64, 128, 256]), seed % 4 == 0
    tensors = make_tensors(heads, head_dim, dtype, is_learning=is_learning)
    options, call = draw_call(draw)
    bound = workspace._most_bytes(options, index, tensors, call)
    for _ in range(150):
        shape = draw_shape(draw, options, call)
        assert bytes_of(index, shape, tensors, options, call) <= bound, (shape, options, call)


def test_shorter_calls_that_need_more_than_longer_ones(set_threads: Callable[[int], None]) -> None:
    """On a CPU with AVX-512 3131 keys are cut into more tiles than 3216 keys."""
    set_threads(64)
    tensors = make_tensors((2, 2), 64, torch.bfloat16, is_learning=False)
    options = DynamicMaskOptions(64, max_sequence_length=3216, max_batch_size=1)
    call = {"causal": True, "return_lse": True}
    bound = workspace._most_bytes(options, -1, tensors, call)
    for length in range(3000, 3217):
        assert bytes_of(-1, (1, length, length), tensors, options, call) <= bound


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("index", INDICES)
def test_the_longest_call_needs_most_of_it(causal: bool, index: int) -> None:
    options = DynamicMaskOptions(256, max_sequence_length=4096, max_batch_size=4)
    tensors, call = make_tensors((8, 2), 64, torch.bfloat16), {"causal": causal}
    bound = workspace._most_bytes(options, index, tensors, call)
    assert bytes_of(index, (4, 4096, 4096), tensors, options, call) > 0.7 * bound
    assert bytes_of(index, (1, 400, 400), tensors, options, call) < 0.7 * bound


@pytest.mark.parametrize("dtype", DTYPES)
def test_real_calls(dtype: torch.dtype, seen: list[Seen]) -> None:
    """The memory that calls and gradients of many lengths take from the allocator."""
    longest = 120
    options = DynamicMaskOptions(30, max_sequence_length=longest, max_batch_size=1)
    tensors = make_tensors((4, 2), 16, dtype, "cpu", longest)
    needs = []
    for is_learning in (False, True):
        with torch.set_grad_enabled(is_learning):
            needs.append(flash_dmattn.workspace_bytes(options, *tensors, causal=True))
            assert not seen, "asking makes no call"
            for length in (1, 2, 7, 29, 30, 31, 64, longest):
                rows = [x[:, :length] for x in tensors[:3]]
                out = flash_dmattn.flash_dma_attention(
                    *rows, *tensors[3:], causal=True, options=options
                )
                if is_learning:
                    out.sum().backward()
            taken = [one.prepared.workspace_size for one in seen]
            assert len(taken) >= 8 and 0 < max(taken) <= needs[-1]
            seen.clear()
    assert needs[0] < needs[1]


def test_calls_with_probabilities_and_autocast() -> None:
    options = DynamicMaskOptions(8, max_sequence_length=300, max_batch_size=2)
    tensors = make_tensors((4, 2), 16, torch.float32, "cpu")
    given = {"causal": True, "return_attn_probs": True, "return_lse": True, "dropout_p": 0.5}
    random = torch.Generator()
    with torch.no_grad():
        assert flash_dmattn.workspace_bytes(options, *tensors, generator=random, **given) > 0
        narrow = tuple(x.bfloat16() for x in tensors[:3]) + tensors[3:]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = flash_dmattn.workspace_bytes(options, *tensors, causal=True)
        assert found == flash_dmattn.workspace_bytes(options, *narrow, causal=True)
