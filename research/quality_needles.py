"""Unmarked needles for quality.py: recall from text as people write it.

A needle has a name and a value of random letters or digits. It replaces some bytes of held-out
text, and again `distance` bytes later; the second time its value is asked for. Names and values are
random, so that only memory predicts a value. The four kinds are side by side in the same texts:

    assignment    a line "name = 12345"
    sentence      " The code of Name is value."
    identifier    " name_value("
    brackets      "[KEYVAL]", a pair as in training (quality_recall.py) in other delimiters

Models see none of these in training, and only the last kind has delimiters that are rare in text.
With `--episodes mixed` they see assignments and identifiers beside marked pairs, and sentences and
brackets are the kinds that they do not know.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from quality_recall import (
    GROUP,
    LETTERS,
    PAIRS,
    Episodes,
    Needle,
    NeedleDraw,
    Question,
    cut_random,
    draw_pairs,
    needles_of,
)

SMALL = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
DIGITS = np.frombuffer(b"0123456789", np.uint8)
NEEDLES = 4  # of each kind in a text
SLOT = 64  # bytes from one statement to the next
DISTANCES = (1024, 4096, 7168, 16384, 32768, 57344, 131072, 229376)


class Kind(NamedTuple):
    """A needle is `before`, a name, `between`, a value and `after`."""

    before: bytes
    name: tuple[np.ndarray, int]  # its letters, and their number
    between: bytes
    value: tuple[np.ndarray, int]
    after: bytes

    def draw(self, random: np.random.Generator) -> tuple[bytes, int]:
        """A needle, and the start of its value in it."""
        name, value = (
            letters[random.integers(len(letters), size=count)].tobytes()
            for letters, count in (self.name, self.value)
        )
        head = self.before + name + self.between
        return head + value + self.after, len(head)


KINDS = {
    "assignment": Kind(b"\n", (SMALL, 6), b" = ", (DIGITS, 5), b"\n"),
    "sentence": Kind(b" The code of ", (SMALL, 6), b" is ", (SMALL, 5), b"."),
    "identifier": Kind(b" ", (SMALL, 5), b"_", (SMALL, 5), b"("),
    "brackets": Kind(b"[", (LETTERS, 3), b"", (LETTERS, 3), b"]"),
}
BLOCK = NEEDLES * len(KINDS) * SLOT  # bytes that statements take
TRAINED = ("assignment", "identifier")  # with --episodes mixed


def draw_mixed(count: int, random: np.random.Generator) -> list[Needle]:
    """Marked pairs and needles of the kinds TRAINED, of each kind about as many."""
    found = needles_of(draw_pairs(count, random))
    kinds = random.integers(len(TRAINED) + 1, size=count).tolist()
    for number, kind in enumerate(kinds):
        if kind < len(TRAINED):
            needle, at = KINDS[TRAINED[kind]].draw(random)
            found[number] = Needle(needle, needle, at, KINDS[TRAINED[kind]].value[1])
    return found


LONGEST = 16  # bytes of an assignment, the longest of the kinds TRAINED
EPISODES = {"pairs": PAIRS, "mixed": NeedleDraw(draw_mixed, LONGEST)}


def distances_of(length: int) -> list[int]:
    """The distances that fit a sequence."""
    return [one for one in DISTANCES if BLOCK <= one <= length - BLOCK]


def write(text: np.ndarray, at: int, needle: bytes) -> int:
    text[at : at + len(needle)] = np.frombuffer(needle, np.uint8)
    return at


def state_and_ask(
    text: np.ndarray, distance: int, random: np.random.Generator
) -> dict[str, list[Question]]:
    """Write NEEDLES needles of each kind into a text at a random position, and again `distance`
    bytes later, where groups of them change their order. Returns the questions of each kind."""
    kinds = random.permutation(np.repeat(list(KINDS), NEEDLES)).tolist()
    begin = int(random.integers(len(text) - distance - BLOCK + 1))
    needles, stated = [], []
    for number, kind in enumerate(kinds):
        needle, offset = KINDS[kind].draw(random)
        within = int(random.integers(SLOT - len(needle) + 1))
        stated.append(write(text, begin + number * SLOT + within, needle) + offset)
        needles.append((needle, offset, within))
    questions: dict[str, list[Question]] = {kind: [] for kind in KINDS}
    for first in range(0, len(needles), GROUP):
        for index, number in enumerate(first + random.permutation(GROUP)):
            needle, offset, within = needles[number]
            asked = write(text, begin + distance + (first + index) * SLOT + within, needle) + offset
            size = KINDS[kinds[number]].value[1]
            questions[kinds[number]].append(Question(stated[number], asked, size))
    return questions


def needles(
    source: np.ndarray, length: int, distance: int, texts: int, seed: int
) -> dict[str, Episodes]:
    """`texts` sequences of held-out text with needles, and the questions of each kind."""
    random = np.random.default_rng((seed, distance, texts))
    text = cut_random(source, texts, length + 1, random)
    asked = [state_and_ask(row, distance, random) for row in text]
    return {kind: Episodes(text, [one[kind] for one in asked]) for kind in KINDS}
