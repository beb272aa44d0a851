"""The masks of transformers, in forms that let a layer compute its attention fast.

transformers makes one mask for all layers of a kind. make_mask() says the same in a tensor that the
model hands to its layers, and read_mask() reads it there:

    None                                all keys; made for one query only
    [0] int32                           causal
    [batch, 1, 1, 1, keys] bool         causal; false for padding
    [sequences + 1] int32               causal in packed sequences, which begin there
    [1, 1, 1, 1, window, 0] int32       causal, in a sliding window
    [batch, 1, 1, 1, window, keys] bool the same; false for padding
    [1, 1, 1, 1, window, sequences + 1] int32
                                        the same in packed sequences
    [batch, 1, 1, keys] bool            not causal; false for padding
    [batch, heads or 1, q_len, keys]    any other mask: bool, or numbers added to the logits

A static cache has room for more than the `keys` keys that are filled in. All `window` rows of a
mask are one row in memory. generate() makes the masks of static caches itself, and the model then
calls make_mask() with them; transformers treats a mask of two axes as padding. So no form has two
axes, and none has three, which a mask of a user may have.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, Callable, NamedTuple

import torch
from transformers import masking_utils
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
)

from . import functional


def code_of(name: str, *given: Any) -> Any:
    """The code of the closures that a function of transformers makes; None if it does not exist."""
    factory = getattr(masking_utils, name, None)
    return None if factory is None else factory(*given).__code__


# transformers composes masks from closures, which are recognised by their code.
BOTH = code_of("and_masks", causal_mask_function)
WINDOW = code_of("sliding_window_overlay", 1)
PACKED = code_of("packed_sequence_mask_function", None)
OWN_POSITIONS = code_of("remap_positions_for_packed_sequence", None, None)

# Types of models whose layers have rules of their own: their masks are padding alone.
RULED = ("doge", "dynamic_mask_hybrid")


class Rules(NamedTuple):
    """The pairs that a mask function allows, as rules."""

    causal: bool = False
    window: int | None = None  # keys, the query's own included
    packed: torch.Tensor | None = None  # [batch, q_len], the number of each token's sequence


def rules_of(function: Callable[..., Any]) -> Rules | None:
    """The rules of a mask function of transformers; None if Rules cannot express them."""
    if function is causal_mask_function:
        return Rules(causal=True)
    if function is bidirectional_mask_function:
        return Rules()
    code: Any = getattr(function, "__code__", None)
    is_known = code is not None and code in (BOTH, WINDOW, PACKED, OWN_POSITIONS)
    if not is_known or torch.compiler.is_dynamo_compiling():
        return None  # Dynamo cannot read closures
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    free = dict(zip(code.co_freevars, cells))
    if code is WINDOW:
        return Rules(window=free["sliding_window"])
    if code is PACKED:
        return Rules(packed=free["packed_sequence_mask"])
    if code is OWN_POSITIONS:  # positions within sequences: distances are the same as in the row
        return rules_of(free["mask_function"])
    several = [rules_of(one) for one in free["mask_functions"]]
    found = [one for one in several if one is not None]
    if len(found) < len(several):
        return None
    windows = [one.window for one in found if one.window is not None]
    packed = [one.packed for one in found if one.packed is not None]
    if len(windows) > 1 or len(packed) > 1:
        return None
    window, rows = windows[0] if windows else None, packed[0] if packed else None
    return Rules(any(one.causal for one in found), window, rows)


def module_of(kind: type) -> Any:
    """The module with the models of this kind of configuration, or None."""
    return sys.modules.get(kind.__module__.replace(".configuration_", ".modeling_"))


@torch.compiler.assume_constant_result
def looks_at_masks(kind: type) -> bool:
    """True if models with this kind of configuration compute with a mask before attention does:
    they choose keys by an index of their own, or compress them."""
    source = module_of(kind)
    names = () if source is None else vars(source)
    return any(name.endswith(("Indexer", "Compressor")) for name in names)


@torch.compiler.assume_constant_result
def has_blocks(kind: type) -> bool:
    """True if models with this kind of configuration have blocks of tokens, such as an image, that
    see each other in both directions."""
    source = module_of(kind)
    return source is None or "block_sequence_ids" in inspect.getsource(source)


def is_packed_form(function: Callable[..., Any], local_size: int | None, config: Any) -> bool:
    """True if Dynamo traces the causal mask that transformers makes of position_ids. Without a
    cache it has this form for every model; position_ids are not read (see find_starts())."""
    return (
        torch.compiler.is_dynamo_compiling()
        and local_size is None
        and getattr(function, "__code__", None) is BOTH
        and not has_blocks(type(config))
    )


def padding_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor,
    kv_offset: int,
    attention_mask: torch.Tensor | None,
    device: torch.device | None,
) -> torch.Tensor | None:
    """The padding of a causal mask: None, or [batch, keys] bool."""
    if kv_length == q_length:  # the keys belong to the queries, the last tokens
        mask = None if attention_mask is None else attention_mask[:, -q_length:]
    else:
        filled = int(q_offset) + q_length - kv_offset
        if attention_mask is not None:
            mask = attention_mask[:, kv_offset : kv_offset + min(kv_length, filled)]
        elif kv_length > filled:
            return torch.ones(batch_size, filled, dtype=torch.bool, device=device)
        else:
            mask = None
    if mask is None:
        return None
    if torch.compiler.is_compiling() or mask.shape[1] < kv_length or not mask.all():
        return mask
    return None


def as_padding(row: torch.Tensor) -> torch.Tensor:
    """A row [batch, keys] with five axes."""
    return row[:, None, None, None]


def as_rows(row: torch.Tensor, window: int) -> torch.Tensor:
    """A row [batch, keys] or [n] with six axes. The one for the window takes no memory."""
    rows = row[:, None, None, None, None] if row.dim() == 2 else row[None, None, None, None, None]
    return rows.expand(-1, -1, -1, -1, window, -1)


def in_window(rules: Rules, layout: dict[str, Any]) -> torch.Tensor:
    """The mask of several queries, if Rules can express it. All keys up to the last query are
    filled in; unused room may follow. `layout` has the arguments of padding_of()."""
    end = layout["q_length"] + int(layout["q_offset"]) - layout["kv_offset"]
    row: Any
    if rules.packed is not None:
        count = torch.unique_consecutive(rules.packed[0], return_counts=True)[1]
        row = torch.nn.functional.pad(count.cumsum(0), (1, 0)).to(torch.int32)
    else:
        row = padding_of(**layout)
    if row is None:  # with None the layer would have to know that it is causal
        row = torch.empty(0, dtype=torch.int32, device=layout["device"])
    if rules.window is None or rules.window >= end:
        return row if row.dtype == torch.int32 else as_padding(row)
    return as_rows(row, rules.window)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | None = None,
    config: Any = None,
    **rest: Any,
) -> torch.Tensor | None:
    """The mask that transformers passes to the layers of a model: see the top of this module.

    Args:
        batch_size: sequences.
        q_length: queries of each.
        kv_length: keys of each, unused room of a static cache included.
        q_offset: position of the first query.
        kv_offset: position of the first key.
        mask_function: which query sees which key, padding aside.
        attention_mask: optional [batch, length] bool, false for padding; or a result of this
            function, which is returned.
        allow_is_causal_skip: false if the model itself reads the mask, if sequences are packed, and
            for a step of a static cache.
        use_vmap: the model has a mask function of its own.
        device: of the mask.
        config: of the model.
        rest: more arguments of transformers' sdpa_mask().
    """
    if attention_mask is not None and attention_mask.dim() != 2:
        if attention_mask.dim() == 3:
            raise NotImplementedError("attention_mask: rank is 3, want 2 or 4")
        return attention_mask
    layout: dict[str, Any] = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "attention_mask": attention_mask,
        "device": device,
    }
    given = {**rest, **layout, "mask_function": mask_function, "use_vmap": use_vmap}
    given = {**given, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    if looks_at_masks(type(config)):
        return eager_mask(**given)
    if getattr(config, "model_type", None) in RULED:
        row = padding_of(**layout)
        if row is None:  # with a mask of ones transformers does not look for packed sequences
            return None if attention_mask is None else attention_mask.new_empty(0).int()
        return as_padding(row)
    if not use_vmap and is_packed_form(mask_function, rest.get("local_size"), config):
        return in_window(Rules(causal=True), layout)
    rules: Any = None if use_vmap else rules_of(mask_function)
    if rules == Rules():  # the same for all queries
        return sdpa_mask(**{**given, "q_length": 1, "q_offset": 0})
    if q_length == 1:
        mask: Any = sdpa_mask(**given)
        is_static = isinstance(q_offset, torch.Tensor) or not allow_is_causal_skip
        is_always = is_static or torch.compiler.is_compiling()
        return mask if is_always or not mask.all() else None
    if not is_expressed(rules, layout, allow_is_causal_skip):
        return sdpa_mask(**given)
    return in_window(rules, layout)


def is_expressed(rules: Rules | None, layout: dict[str, Any], may_skip: bool) -> bool:
    """True if in_window() can express the mask of several queries."""
    if rules is None or not rules.causal:
        return False
    if rules.packed is not None:
        return rules.packed.shape[0] == 1
    q_offset, mask = layout["q_offset"], layout["attention_mask"]
    if not may_skip or isinstance(q_offset, torch.Tensor) and torch.compiler.is_compiling():
        return False
    end = int(q_offset) + layout["q_length"] - layout["kv_offset"]
    has_mask_of_all = mask is None or mask.shape[1] >= layout["kv_offset"] + end
    return layout["q_length"] <= end <= layout["kv_length"] and has_mask_of_all


# ---- in a layer ----


def find_starts(
    position_ids: torch.Tensor | None, sizes: torch.Tensor | None, q_len: int, kv_len: int
) -> torch.Tensor | None:
    """The starts of packed sequences, [sequences + 1] int32; None if each row has one sequence.

    Args:
        position_ids: [batch, q_len], which go up by 1 in each sequence.
        sizes: cu_seq_lens_q, if the model was given it. Otherwise position_ids are read, and the
            host waits for them; not while a graph is traced.
        q_len: number of queries.
        kv_len: number of keys.

    Raises:
        ValueError: packed sequences in several rows.
    """
    if sizes is not None:
        return sizes.to(torch.int32)
    if position_ids is None or position_ids.dim() != 2 or torch.compiler.is_compiling():
        return None
    if q_len != kv_len or q_len < 2:
        return None
    begins = position_ids.diff(dim=-1) != 1
    if not begins.any():
        return None
    if position_ids.shape[0] != 1:
        raise ValueError(
            f"position_ids: has packed sequences in {position_ids.shape[0]} rows, want 1 row"
        )
    ends = begins[0].nonzero()[:, 0] + 1
    return torch.cat((ends.new_zeros(1), ends, ends.new_full((1,), q_len))).to(torch.int32)


def padding_and_packing(
    key: torch.Tensor,
    value: torch.Tensor,
    q_len: int,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    sizes: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The keys and values [batch, kv_heads, kv_len, head_dim] that are filled in, and the arguments
    key_valid and starts of attention(). With padding, position_ids do not separate sequences."""
    if attention_mask is not None:
        filled, position_ids = attention_mask.shape[1], None
        key, value = key[:, :, :filled], value[:, :, :filled]
    starts = find_starts(position_ids, sizes, q_len, key.shape[2])
    return key, value, {"key_valid": attention_mask, "starts": starts}


def keep_newest(
    sizes: torch.Size, device: torch.device, window: int, starts: torch.Tensor | None
) -> functional.Selection:
    """The selection of a sliding window. `sizes` are batch, kv_heads and kv_len. With equal scores
    the newest keys rank first. Padding counts in the window."""
    return functional.select(torch.zeros(sizes, device=device), window, starts=starts)


def best_in_window(
    score: torch.Tensor,
    q_len: int,
    window: int,
    keep: int,
    key_valid: torch.Tensor | None,
    starts: torch.Tensor | None,
) -> torch.Tensor:
    """The mask [batch, kv_heads, q_len, kv_len] of the `keep` keys of highest score in the sliding
    window of each query. A Selection cannot express it: a key that is not kept at first is kept
    later, when better keys have left the window.

    Args:
        score: [batch, kv_heads, kv_len].
        q_len: number of queries.
        window: keys of the window, the query's own included; more than `keep`.
        keep: as select()'s window.
        key_valid, starts: as there.
    """
    batch, kv_heads, kv_len = score.shape
    at = torch.arange(kv_len, device=score.device)
    keys = at[kv_len - q_len :, None] - at[:window]  # keys of each query, newest first
    is_seen = keys >= 0
    keys = keys.clamp(min=0)
    if starts is not None:
        number = torch.searchsorted(starts.to(at.dtype), at, right=True)
        is_seen = is_seen & (number[keys] == number[kv_len - q_len :, None])
    if key_valid is not None:
        is_seen = is_seen & key_valid[:, None, keys]
    ranked = score[:, :, keys].masked_fill(~is_seen | score[:, :, keys].isnan(), float("-inf"))
    best = ranked.sort(dim=-1, descending=True, stable=True).indices[..., :keep]
    columns = keys.masked_fill(~is_seen, kv_len)  # column kv_len is cut off below
    columns = columns.expand(batch, kv_heads, -1, -1).gather(-1, best)
    mask = score.new_zeros((batch, kv_heads, q_len, kv_len + 1), dtype=torch.bool)
    return mask.scatter_(-1, columns, True)[..., :kv_len]


def read_padding(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The padding [batch, keys] in a mask of make_mask() for Doge; None if there is none.

    Raises:
        ValueError: a mask of another form.
    """
    if mask is None or mask.dim() == 2:
        return mask
    if mask.dim() == 5 and mask.shape[1:4] == (1, 1, 1):
        return mask[:, 0, 0, 0]
    if mask.dim() == 1 and mask.shape[0] == 0:
        return None
    raise ValueError(
        f"attention_mask: rank is {mask.dim()}, want 2; attention_mask is [batch, kv_len], nonzero "
        "for keys that are not padding"
    )


def read_mask(
    mask: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_len: int,
    sizes: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Read a mask of make_mask(), or one of the model's own with four axes.

    Args:
        mask: not None.
        key: [batch, kv_heads, kv_len, head_dim].
        value: [batch, kv_heads, kv_len, head_dim].
        q_len: number of queries.
        sizes: as in find_starts().

    Returns:
        The keys and values that are filled in, and arguments of attention().

    Raises:
        NotImplementedError: a mask of another rank.
    """
    if mask.dim() == 4:
        mask = mask[..., : key.shape[2]]
        if mask.dtype != torch.bool:
            return key, value, {"attn_bias": mask}
        if mask.shape[1:3] == (1, 1):
            return key, value, {"key_valid": mask[:, 0, 0].expand(key.shape[0], -1)}
        return key, value, {"attn_mask": mask}
    has_starts, window = mask.dtype == torch.int32, None
    has_form = mask.shape[1:4] == (1, 1, 1)
    if mask.dim() == 6 and has_form:
        window, row = mask.shape[4], mask[:, 0, 0, 0, 0]
        row = row[0] if has_starts else row
    elif mask.dim() == 5 and has_form and not has_starts:
        row = mask[:, 0, 0, 0]
    elif mask.dim() == (1 if has_starts else 2):
        row = mask
    else:
        raise NotImplementedError(f"attention_mask: rank is {mask.dim()}, want 2 or 4")
    if has_starts:
        is_all = row.shape[0] == 0
        starts = find_starts(None, sizes, q_len, key.shape[2]) if is_all else row
        options: dict[str, Any] = {"starts": starts}
    else:
        key, value, options = padding_and_packing(key, value, q_len, row, None, sizes)
    if window is not None:
        options["selection"] = keep_newest(key.shape[:3], key.device, window, options["starts"])
    return key, value, {"causal": True, **options}
