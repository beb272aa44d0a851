"""Pictures of what attention keeps and weighs, with matplotlib, the extra `plot` of the package.

Selection.plot() draws when keys are kept; plot_probabilities() what
attention_probabilities() computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import _types

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .functional import Selection

__all__ = ["plot_probabilities"]

COLOURS = "viridis"  # early keys dark, late ones light: readable without colour vision
LIGHTEST = 0.92  # of the scale: its end would vanish on white
MARK = "#d62728"
LEAST = 1e-4  # probabilities below share the darkest colour: 0 alone, for keys not kept, is white
ROWS = ("keys", "slots")
TEXTS_MAX = 64  # texts of keys beside an axis, more could not be read


def import_matplotlib() -> Any:
    try:
        import matplotlib.collections
        import matplotlib.pyplot
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install matplotlib") from error
    return matplotlib


def check_axes(axes: Any) -> Axes:
    """The axes to draw into: the given ones, or new ones of a new figure.

    Raises:
        TypeError: they are something else.
        ImportError: there is no matplotlib.
    """
    matplotlib = import_matplotlib()
    if axes is None:
        _, axes = matplotlib.pyplot.subplots(layout="constrained")
    if not isinstance(axes, matplotlib.axes.Axes):
        raise _types.refusal("axes", axes, "matplotlib's Axes")
    return axes


def check_index(name: str, value: Any, count: int, counted: str) -> int:
    if not _types.is_int(value):
        raise _types.refusal(name, value, "an int")
    if not 0 <= value < count:
        raise ValueError(
            f"{name}: is {value}, want 0 to {count - 1}; the number of {counted} is {count}"
        )
    return int(value)


def check_texts(texts: Any, kv_len: int) -> list[str] | None:
    if texts is None:
        return None
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise _types.refusal("texts", texts, "a list of str, one for each key")
    if len(texts) != kv_len:
        found = _types.counted(len(texts), "text")
        raise ValueError(f"texts: has {found}, want {kv_len}, one for each key")
    return [str(text) for text in texts]


def write_texts(axis: Any, texts: list[str] | None, rotation: float = 0) -> None:
    if texts is not None and len(texts) <= TEXTS_MAX:
        axis.set_ticks(range(len(texts)), texts, rotation=rotation, fontsize="small")


def plot_selection(
    selection: Selection,
    *,
    batch: int,
    kv_head: int,
    rows: str,
    slot: int | None,
    texts: Sequence[str] | None,
    axes: Axes | None,
) -> Axes:
    """Selection.plot(), which has the description."""
    axes = check_axes(axes)
    if rows not in ROWS:
        raise ValueError(f"rows: is {rows!r}, want 'keys' or 'slots'")
    sequences, heads, kv_len = selection.expiry.shape
    batch = check_index("batch", batch, sequences, "sequences")
    kv_head = check_index("kv_head", kv_head, heads, "kv heads")
    slots = min(selection.window + selection.recent, kv_len)
    if slot is not None:
        slot = check_index("slot", slot, slots, "slots")
    names = check_texts(texts, kv_len)
    expiry = selection.expiry[batch, kv_head].tolist()
    slot_of = selection.slot[batch, kv_head].tolist()
    kept = [j for j, end in enumerate(expiry) if end > j]
    kept.sort(key=lambda j: slot_of[j] == slot)  # red bars last, above their neighbours
    matplotlib = import_matplotlib()
    scale = matplotlib.colormaps[COLOURS]
    colours = [MARK if slot_of[j] == slot else scale(LIGHTEST * j / kv_len) for j in kept]
    edges = colours if rows == "keys" else "white"
    widths = [1.2 if rows == "keys" and slot_of[j] == slot else 0.5 for j in kept]
    boxes = []
    for j in kept:
        begin, end = (0, kv_len) if selection.scope == "global" else (j, expiry[j])
        row = j if rows == "keys" else slot_of[j]
        low, high = row - 0.5, row + 0.5
        boxes.append([(begin, low), (end, low), (end, high), (begin, high)])
    axes.add_collection(
        matplotlib.collections.PolyCollection(
            boxes, facecolors=colours, edgecolors=edges, linewidths=widths, zorder=2
        )
    )
    axes.set_xlim(0, kv_len)
    axes.set_xlabel("position p of the query")
    axes.set_ylim((kv_len if rows == "keys" else slots) - 0.5, -0.5)
    axes.set_ylabel("key j" if rows == "keys" else "slot")
    if rows == "keys":
        axes.set_title(f"{len(kept)} of {_types.counted(kv_len, 'key')} are ever kept")
        axes.plot([0, kv_len], [0, kv_len], color="0.6", linewidth=0.8)
        write_texts(axes.yaxis, names)
    else:
        axes.set_title(f"the keys in their {_types.counted(slots, 'slot')}")
    return axes


def plot_probabilities(
    probabilities: torch.Tensor,
    *,
    batch: int = 0,
    head: int = 0,
    texts: Sequence[str] | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Draw the probabilities that the queries of one head give to keys.

    A row is a query and a column a key, coloured on a logarithmic scale from 1e-4 to 1; smaller
    probabilities are drawn as 1e-4. Keys that a query does not keep are white.

    Args:
        probabilities: [batch, q_heads, q_len, kv_len], from attention_probabilities().
        batch: which sequence.
        head: which query head.
        texts: optional, a text for each key, such as its token: they stand beside the axis of the
            keys, if there are 64 at most, and of the queries, if there are as many.
        axes: matplotlib's Axes to draw into; None for a new figure.

    Returns:
        The Axes; .figure.savefig("picture.png") stores the picture.

    Raises:
        TypeError: an argument of another type.
        ValueError: an index that is out of range, or another number of axes or of texts.
        ImportError: matplotlib is not installed.

    Example:
        >>> x = torch.randn(1, 6, 2, 8)
        >>> out, lse = flash_dmattn.attention(x, x, x, causal=True)
        >>> probabilities = flash_dmattn.attention_probabilities(x, x, lse, causal=True)
        >>> axes = flash_dmattn.pictures.plot_probabilities(probabilities, texts=list("abcdef"))
        >>> axes.get_xlabel()
        'key j'
    """
    axes = check_axes(axes)
    _types.check_tensor("probabilities", probabilities)
    if probabilities.dim() != 4:
        raise ValueError(
            f"probabilities: rank is {probabilities.dim()}, want 4, [batch, q_heads, q_len, kv_len]"
        )
    sequences, heads, q_len, kv_len = probabilities.shape
    batch = check_index("batch", batch, sequences, "sequences")
    head = check_index("head", head, heads, "query heads")
    names = check_texts(texts, kv_len)
    matplotlib = import_matplotlib()
    rows = probabilities[batch, head].detach().float().cpu()
    shown = rows.clamp(min=LEAST).masked_fill(rows == 0, torch.nan).numpy()
    colours = matplotlib.colormaps[COLOURS].with_extremes(bad="white")
    norm = matplotlib.colors.LogNorm(LEAST, 1)
    image = axes.imshow(shown, cmap=colours, norm=norm, interpolation="nearest", aspect="auto")
    axes.figure.colorbar(image, ax=axes, label="probability")
    axes.set_xlabel("key j")
    axes.set_ylabel("query i")
    write_texts(axes.xaxis, names, rotation=90)
    if q_len == kv_len:
        write_texts(axes.yaxis, names)
    return axes
