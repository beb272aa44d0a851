"""The measurements of quality.py: losses, recall, kept keys.

Losses are in bits per byte. Text is numpy uint8 [sequences, length + 1]: a model reads all bytes
but the last, and its targets are all but the first.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import quality_needles
import quality_recall as recall
import quality_tasks
import torch
from flash_dmattn import select
from flash_dmattn.functional import score
from quality_model import Attention, Model, narrow
from torch import nn
from torch.nn.functional import cross_entropy

BINS = 16  # number of bins of positions
WINDOWS = (128, 256, 512, 1024, 2048)  # keys per query at test time
KEPT_PAIRS = 16
NEEDLE_TEXTS = 32  # with needles, for each distance
EVALUATION_SEED = 1234  # differs from the seeds of training
REPEATED = 13  # bytes: a byte ends a repetition if the last so many bytes occurred earlier
REACHES = (256, 2304, 8192, 32768, 262144)  # bytes back: bounds of the classes of repetitions


class Results(NamedTuple):
    bits: np.ndarray  # [sequences, length] float32
    is_right: np.ndarray  # [sequences, length] bool: true if the most probable byte is the target


@torch.no_grad()
def run(model: nn.Module, text: np.ndarray, batch: int, device: torch.device) -> Results:
    bits, is_right = [], []
    for begin in range(0, len(text), batch):
        rows = torch.from_numpy(text[begin : begin + batch]).to(device).long()
        with narrow(device):
            logits = model(rows[:, :-1])
        targets = rows[:, 1:]
        losses = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        bits.append((losses.view(targets.shape) / math.log(2)).cpu())
        is_right.append((logits.argmax(-1) == targets).cpu())
    return Results(torch.cat(bits).numpy(), torch.cat(is_right).numpy())


def pieces_of(source: np.ndarray, count: int, length: int) -> np.ndarray:
    """[count, length + 1] bytes: evenly spread pieces of `source`."""
    starts = np.linspace(0, len(source) - length - 1, count).astype(np.int64)
    return np.stack([source[start : start + length + 1] for start in starts])


def repetitions(row: np.ndarray) -> np.ndarray:
    """[length] int64 for a row of length + 1 bytes: for each target byte, how far back the REPEATED
    bytes that end with it last occurred; 0 if they did not."""
    words = np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(row, 8)).view(np.uint64)
    ends = len(row) - REPEATED + 1
    first, last = words[:ends, 0], words[REPEATED - 8 :, 0]  # the two words overlap
    order = np.lexsort((last, first))  # stable: equal strings stay in the order of positions
    is_same = (np.diff(first[order]) == 0) & (np.diff(last[order]) == 0)
    found = np.zeros(len(row) - 1, np.int64)
    found[order[1:][is_same] + REPEATED - 2] = np.diff(order)[is_same]
    return found


def sums_by_repetition(bits: np.ndarray, back: np.ndarray) -> list[dict[str, Any]]:
    """Mean losses of target bytes by the distance to the text that they repeat: above the reach of
    the row before, and at most `to` bytes; `to` is 0 for bytes that repeat nothing. Both arguments
    are [sequences, length]. of_pieces: the bytes of each sequence and their sum."""
    rows = []
    for least, most in zip((-1, 0, *REACHES), (0, *REACHES)):
        chosen = (back > least) & (back <= most)
        if chosen.any():
            counts, sums = chosen.sum(1), np.where(chosen, bits, 0).sum(1, dtype=np.float64)
            row = {"to": most, "bytes": int(counts.sum()), "bits": float(sums.sum() / counts.sum())}
            pairs = [[int(count), round(float(one), 2)] for count, one in zip(counts, sums)]
            rows.append({**row, "of_pieces": pairs})
    return rows


class Evaluation:
    """Measures models on held-out text. `batch` sequences are evaluated at once."""

    def __init__(
        self, held_out: np.ndarray, length: int, batch: int, pieces: int, device: torch.device
    ) -> None:
        self.source, self.length, self.batch, self.device = held_out, length, batch, device
        self.text = pieces_of(held_out, pieces, length)
        self.back = np.stack([repetitions(row) for row in self.text])
        self.made: dict[int, list[quality_tasks.Task]] = {}  # tasks, by their number of texts

    def losses(self, model: nn.Module) -> dict[str, Any]:
        """The mean over all bytes, its standard error over pieces, and means by position, by piece,
        and by the distance to repeated text."""
        bits = run(model, self.text, self.batch, self.device).bits
        of_pieces = bits.mean(1, dtype=np.float64)
        by_position = [own.mean(dtype=np.float64) for own in np.array_split(bits, BINS, 1)]
        return {
            "bits": float(of_pieces.mean()),
            "error": float(of_pieces.std(ddof=1) / math.sqrt(len(bits))) if len(bits) > 1 else 0.0,
            "by_position": [float(mean) for mean in by_position],
            "of_pieces": [round(float(mean), 5) for mean in of_pieces],
            "by_repetition": sums_by_repetition(bits, self.back),
        }

    def _answers(self, model: nn.Module, episodes: recall.Episodes) -> dict[str, Any]:
        return self.scored(run(model, episodes.text, self.batch, self.device), episodes)

    @staticmethod
    def scored(results: Results, episodes: recall.Episodes) -> dict[str, Any]:
        """The number of values with all bytes right, and bits per byte of values."""
        spans = [
            (row, slice(question.asked - 1, question.asked - 1 + question.size))
            for row, questions in enumerate(episodes.questions)
            for question in questions
        ]
        right = [results.is_right[row, span].all() for row, span in spans]
        bits = [results.bits[row, span].mean() for row, span in spans]
        return {
            "questions": len(spans),
            "accuracy": float(np.mean(right)),
            "bits": float(np.mean(bits)),
        }

    def recall(
        self, model: nn.Module, questions: int, counts: tuple[int, ...] = recall.COUNTS
    ) -> list[dict[str, Any]]:
        """A row for every number of pairs and every distance that fit the length."""
        rows = []
        for count in counts:
            for distance in recall.distances_of(self.length):
                if recall.fits(count, distance, self.length):
                    row = {"pairs": count, "distance": distance}
                    rows.append({**row, **self._answers(model, self.ask(row, questions))})
        return rows

    def ask(self, row: dict[str, int], questions: int) -> recall.Episodes:
        sizes = (row["pairs"], row["distance"], questions)
        return recall.associative(self.source, self.length, *sizes, EVALUATION_SEED)

    def passkey(self, model: nn.Module, sequences: int) -> list[dict[str, Any]]:
        """A row for every depth."""
        rows = []
        for depth in range(recall.PASSKEY_DEPTHS):
            episodes = recall.passkey(self.source, self.length, depth, sequences, EVALUATION_SEED)
            rows.append({"depth": depth, **self._answers(model, episodes)})
        return rows

    def needles(self, model: Model) -> list[dict[str, Any]]:
        """A row for each distance that fits and each kind of unmarked needle."""
        rows = []
        for distance in quality_needles.distances_of(self.length):
            given = (self.source, self.length, distance, NEEDLE_TEXTS, EVALUATION_SEED)
            kinds = quality_needles.needles(*given)
            text = next(iter(kinds.values())).text  # the same for all kinds
            results = run(model, text, self.batch, self.device)
            expiries = self._expiries(model, text)
            for kind, episodes in kinds.items():
                row = {"kind": kind, "distance": distance, **self.scored(results, episodes)}
                kept = kept_values(expiries, episodes)
                rows.append({**row, "kept_by_any_head": kept["kept_by_any_head"]})
        return rows

    def tasks(self, model: nn.Module, texts: int) -> list[dict[str, Any]]:
        """A row for each task of quality_tasks.py that fits, and for each octave of positions, with
        so many texts each; none for 0 texts."""
        if texts == 0:
            return []
        given = (self.source, self.length, texts)
        if texts not in self.made:
            self.made[texts] = list(quality_tasks.tasks(*given, EVALUATION_SEED))
        rows = []
        for task in self.made[texts]:
            results, others = run(model, task.text, self.batch, self.device), None
            if task.other is not None:
                others = run(model, task.other, self.batch, self.device)
            rows.append(quality_tasks.scored(task, results, others))
        text = quality_tasks.documents(*given)
        if len(text) > 0:
            rows += quality_tasks.by_octave(run(model, text, self.batch, self.device).bits)
        return rows

    def by_window(self, model: Model) -> list[dict[str, Any]]:
        """Losses with other windows than in training: a query keeps `keys` keys in all. In layers
        with a window of their own, their number is multiplied by the same factor."""
        rows = []
        config = model.config
        if config.window is None:
            return rows
        for keys in WINDOWS:
            factor = keys / (config.window + config.recent)
            least = min(windows_of(model, factor))
            if keys <= self.length and least >= max(1, config.sinks):
                with windows(model, factor):
                    bits = self.losses(model)["bits"]
                rows.append({"keys": keys, "bits": bits, "perplexity": 2**bits})
        return rows

    def kept(self, model: Model) -> dict[str, Any]:
        """The keys that the last query of a piece keeps, and the bytes of recalled values that are
        kept by the queries that predict them."""
        found: dict[str, Any] = {"text": bytes(self.text[0, :-1]).decode("latin-1")}
        expiries = self._expiries(model, self.text[:1])
        found["last_query"] = [
            [np.flatnonzero(head == self.length).tolist() for head in layer[0]]
            for layer in expiries
        ]
        found["values"] = []
        for distance in recall.distances_of(self.length):
            if recall.fits(KEPT_PAIRS, distance, self.length):
                row = {"pairs": KEPT_PAIRS, "distance": distance}
                episodes = self.ask(row, 4 * KEPT_PAIRS)
                expiries = self._expiries(model, episodes.text)
                found["values"].append({**row, **kept_values(expiries, episodes)})
        return found

    def _expiries(self, model: Model, text: np.ndarray) -> list[np.ndarray]:
        """Expiries [sequences, kv_heads, length] of each layer. A key that the last query keeps has
        the value length."""
        found: dict[Attention, list[np.ndarray]] = {layer: [] for layer in model.attentions()}

        def keep(layer: Attention, _: Any, __: Any, value: torch.Tensor) -> None:
            found[layer].append(expiry_of(layer, value))

        with observing(model, keep):
            run(model, text, self.batch, self.device)
        return [np.concatenate(of_layer) for of_layer in found.values()]


def kept_values(expiries: list[np.ndarray], episodes: recall.Episodes) -> dict[str, Any]:
    """The fractions of value bytes that are kept until their question, by the expiries [sequences,
    kv_heads, length] of each layer."""
    kept = []
    for row, questions in enumerate(episodes.questions):
        for question in questions:
            for byte in range(question.size):
                last = question.asked + byte - 1  # the query that predicts this byte
                key = question.stated + byte
                kept.append([layer[row, :, key] > last for layer in expiries])
    table = np.array(kept)  # [bytes, layers, kv_heads]
    return {
        "kept": float(table.mean()),
        "kept_by_any_head": float(table.any((1, 2)).mean()),
        "by_head": table.mean(0).round(4).tolist(),
    }


def expiry_of(layer: Attention, value: torch.Tensor) -> np.ndarray:
    """Expiry [batch, kv_heads, len] of each key of a call."""
    batch, length, heads, _ = value.shape
    if layer.window is None:
        return np.full((batch, heads, length), length)
    scores, _ = score(value, layer.dt_proj.weight, layer.a_coef, bias_form="none")
    rules = {"recent": layer.recent, "sinks": layer.sinks}
    return select(scores, layer.window, **rules).expiry.clamp(max=length).cpu().numpy()


def windows_of(model: Model, factor: float) -> list[int]:
    """The window of each layer with which queries keep `factor` times as many keys in all, and the
    same number of recent ones."""
    layers = model.attentions()
    return [round((one.window + one.recent) * factor) - one.recent for one in layers]


@contextlib.contextmanager
def windows(model: Model, factor: float) -> Iterator[None]:
    """A context in which the layers of a model have the windows of windows_of()."""
    before = [layer.window for layer in model.attentions()]
    try:
        for layer, window in zip(model.attentions(), windows_of(model, factor)):
            layer.window = window
        yield
    finally:
        for layer, own in zip(model.attentions(), before):
            layer.window = own


@contextlib.contextmanager
def observing(model: Model, observe: Any) -> Iterator[None]:
    """A context in which `observe` is called with every layer and its queries, keys and values."""
    try:
        for layer in model.attentions():
            layer.observe = observe
        yield
    finally:
        for layer in model.attentions():
            layer.observe = None
