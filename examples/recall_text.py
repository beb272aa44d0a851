"""Text that a model can only predict if it remembers what was far before: for examples/adapt.py.

Each piece is a piece of Python's documentation, in lower case and without digits, with labels in
it: words of random capital letters and digits, such as " K7QZ ". Every label is stated once in the
first part of a piece and once more, in another order, in the last part, with at least `gap` other
bytes between the two parts. No character occurs in two labels of a piece. So the first character
of a repeated label says which one it is, and the characters after it, here called recalled bytes,
can be predicted from its first occurrence, and from nothing else: a model without memory guesses
among 36 characters, which costs 5.2 bits per byte.

Labels look like no other byte of the text, and all of them are asked for: it is text in which one
can tell from a key alone that it is worth keeping. Ordinary text has less of this.
"""

from __future__ import annotations

from typing import NamedTuple

import program

if __name__ == "__main__":
    program.belongs_to("adapt.py")

import torch
import train_text

CHARACTERS = torch.tensor(list(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"))
LABEL_LENGTH = 4
SPACE = 32
MOST_LABELS = len(CHARACTERS) // LABEL_LENGTH  # none of whose characters are equal
STATED = LABEL_LENGTH + 2  # bytes that a label takes with the spaces around it


class Pieces(NamedTuple):
    text: torch.Tensor  # [batch, length + 1] bytes as int64: inputs, and one byte later targets
    recalled: torch.Tensor  # [batch, length] bool: targets that only memory can predict


class Shape(NamedTuple):
    length: int  # bytes that a model reads at once
    labels: int  # labels of a piece, at most 9
    gap: int  # bytes between the labels and their repetition, at least

    def least_length(self) -> int:
        return self.gap + 2 * self.labels * (STATED + 1)


def shortest(labels: int) -> Shape:
    """Pieces of little else than labels."""
    gap = 8
    return Shape(gap + 2 * labels * (STATED + 4), labels, gap)


def documentation() -> train_text.Text:
    """Python's documentation, in which only labels will have capital letters and digits."""
    text = train_text.read_text(None)

    def plain(data: torch.Tensor) -> torch.Tensor:
        lower = bytes(data.tolist()).lower()
        return torch.tensor([byte for byte in lower if not chr(byte).isdigit()])

    return train_text.Text(text.name, plain(text.train), plain(text.held_out))


def make_piece(source: torch.Tensor, shape: Shape, generator: torch.Generator) -> Pieces:
    """One piece, without the axis of the batch."""

    def below(limit: int, count: int) -> list[int]:
        return torch.randint(limit, (count,), generator=generator).sort().values.tolist()

    order = torch.randperm(len(CHARACTERS), generator=generator)
    labels = CHARACTERS[order[: shape.labels * LABEL_LENGTH]].view(shape.labels, LABEL_LENGTH)
    again = labels[torch.randperm(shape.labels, generator=generator)]
    filler = shape.length + 1 - 2 * shape.labels * STATED
    begin = below(len(source) - filler, 1)[0]
    before = (filler - shape.gap) // 2  # bytes among which the labels are stated
    offsets = below(before, shape.labels)  # of the labels in the filler
    offsets += [before + shape.gap + offset for offset in below(before, shape.labels)]
    text, recalled, taken = [], [], 0
    for number, (offset, label) in enumerate(zip(offsets, [*labels.tolist(), *again.tolist()])):
        text += [*source[begin + taken : begin + offset].tolist(), SPACE, *label, SPACE]
        is_repeated = number >= shape.labels
        recalled += [False] * (offset - taken + 2) + [is_repeated] * (LABEL_LENGTH - 1) + [False]
        taken = offset
    text += source[begin + taken : begin + filler].tolist()
    recalled += [False] * (filler - taken)
    return Pieces(torch.tensor(text), torch.tensor(recalled[1:]))


def make_pieces(
    source: torch.Tensor, count: int, shape: Shape, generator: torch.Generator
) -> Pieces:
    made = [make_piece(source, shape, generator) for _ in range(count)]
    return Pieces(*(torch.stack(column) for column in zip(*made)))
