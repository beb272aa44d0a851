"""Recall episodes for quality.py: text whose marked bytes only memory can predict.

A pair is a key of three capital letters and a value of three. It is stated as "{KEYVAL}" and asked
for later, once, as "<KEYVAL>"; both replace some bytes of other text. The letters are random, so
that the value in a question can be predicted from the statement, and from nothing else: without
memory a byte of it costs log2(26) = 4.7 bits. To predict it is to continue a string that was seen
before, which models learn from ordinary text too. Pairs look like no other text: one can tell from
a statement alone that it is worth keeping.

In training, a sequence has one episode or several, one after the other, each in its own span of
the sequence: the pairs of an episode are stated in the first half of its span and asked for in
the second half in another order. Spans and the numbers of pairs are random; the longest span grows
to the whole sequence in the first `curriculum` steps.

In evaluation, the statements are side by side, and so are the questions, so far behind that each is
`distance` bytes after its statement, except for the change of order in groups of 4.
"""

from __future__ import annotations

import math
from typing import Callable, NamedTuple

import numpy as np

KEY, VALUE = 3, 3  # letters
PAIR = KEY + VALUE + 2  # bytes of a statement or a question
SLOT = PAIR + 4  # bytes from one statement to the next if they are side by side
SHORTEST_SPAN = 128  # by default; the longest span at step 0 is twice as long
MOST_PAIRS = 64  # or other needles of an episode
GROUP = 4  # questions that change their order, in evaluation
STATED, ASKED = b"{}", b"<>"  # around a statement and a question
LETTERS = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", np.uint8)
PASSKEY_DEPTHS = 32


class Question(NamedTuple):
    stated: int  # position of the value's first byte in the statement
    asked: int  # and in the question
    size: int = VALUE  # bytes of the value

    @property
    def distance(self) -> int:
        return self.asked - self.stated


class Pairs(NamedTuple):
    keys: np.ndarray  # [pairs, KEY] uint8, all different
    values: np.ndarray  # [pairs, VALUE] uint8


class Needle(NamedTuple):
    stated: bytes
    asked: bytes
    at: int  # of the value in both
    size: int = VALUE  # of the value


class NeedleDraw(NamedTuple):
    """The needles of training episodes: draw(count, random) makes them."""

    draw: Callable[[int, np.random.Generator], list[Needle]]
    longest: int  # bytes of a statement or a question


def draw_pairs(count: int, random: np.random.Generator) -> Pairs:
    numbers = random.choice(len(LETTERS) ** KEY, count, replace=False)
    digits = [numbers // len(LETTERS) ** digit % len(LETTERS) for digit in range(KEY)]
    values = random.integers(len(LETTERS), size=(count, VALUE))
    return Pairs(LETTERS[np.stack(digits, 1)], LETTERS[values])


def needles_of(pairs: Pairs) -> list[Needle]:
    found = []
    for key, value in zip(*pairs):
        pair = bytes(key) + bytes(value)
        words = (around[:1] + pair + around[1:] for around in (STATED, ASKED))
        found.append(Needle(*words, KEY + 1))
    return found


PAIRS = NeedleDraw(lambda count, random: needles_of(draw_pairs(count, random)), PAIR)


def write(text: np.ndarray, at: int, words: bytes, value: int) -> int:
    """Write words into the text. Returns the position of their byte `value`."""
    text[at : at + len(words)] = np.frombuffer(words, np.uint8)
    return at + value


def scatter(count: int, size: int, begin: int, end: int, random: np.random.Generator) -> np.ndarray:
    """`count` ascending positions from `begin` on, `size` or more bytes apart and before `end`."""
    free = end - begin - count * size
    return begin + np.sort(random.integers(free + 1, size=count)) + size * np.arange(count)


def add_episode(
    text: np.ndarray,
    begin: int,
    span: int,
    needles: list[Needle],
    size: int,
    random: np.random.Generator,
) -> list[Question]:
    """State needles in the first half of text[begin : begin + span], ask for them in the second."""
    count, middle = len(needles), begin + span // 2
    positions = scatter(count, size, begin, middle, random).tolist()
    stated = [write(text, at, one.stated, one.at) for at, one in zip(positions, needles)]
    order = random.permutation(count)
    positions = scatter(count, size, middle, begin + span, random).tolist()
    questions = []
    for number, at in zip(order, positions):
        needle = needles[number]
        asked = write(text, at, needle.asked, needle.at)
        questions.append(Question(stated[number], asked, needle.size))
    return questions


def longest_span(step: int, curriculum: int, length: int, shortest: int = SHORTEST_SPAN) -> int:
    """From twice the shortest span to `length`, by the same factor in every step."""
    first = 2 * shortest
    if step >= curriculum or length <= first:
        return length
    return round(first * (length / first) ** (step / curriculum))


def log_uniform(least: int, most: int, random: np.random.Generator) -> int:
    if most <= least:
        return most
    return round(math.exp(random.uniform(math.log(least), math.log(most))))


def fill(
    text: np.ndarray, shortest: int, longest: int, needles: NeedleDraw, random: np.random.Generator
) -> list[Question]:
    """Put episodes of one random span into all of a text."""
    span = min(log_uniform(shortest, longest, random), len(text))
    episodes = len(text) // span
    most = min(MOST_PAIRS, span // (4 * needles.longest))  # so that half of the span is other text
    count = log_uniform(max(1, most // 8), most, random)
    drawn = needles.draw(episodes * count, random)
    questions = []
    for number in range(episodes):
        own = drawn[number * count : (number + 1) * count]
        questions += add_episode(text, number * span, span, own, needles.longest, random)
    return questions


def mark(length: int, questions: list[Question]) -> np.ndarray:
    """[length] bool: the bytes that only memory can predict."""
    marked = np.zeros(length, bool)
    for question in questions:
        marked[question.asked : question.asked + question.size] = True
    return marked


def fits(count: int, distance: int, length: int) -> bool:
    """True if an episode of evaluation fits, with its questions after all statements."""
    block = count * SLOT
    return block <= distance and block + distance <= length


def ask_at(
    text: np.ndarray, pairs: Pairs, distance: int, random: np.random.Generator
) -> list[Question]:
    """An episode of evaluation at a random position of the text."""
    count = len(pairs.keys)
    begin = int(random.integers(len(text) - distance - count * SLOT + 1))
    order = np.arange(count)
    for first in range(0, count, GROUP):
        own = order[first : first + GROUP]
        own[:] = random.permutation(own)
    needles = needles_of(pairs)
    stated = [
        write(text, begin + number * SLOT, one.stated, one.at) for number, one in enumerate(needles)
    ]
    places = begin + distance + SLOT * np.arange(count)
    return [
        Question(stated[number], write(text, at, needles[number].asked, needles[number].at))
        for at, number in zip(places.tolist(), order)
    ]


def cut_random(
    source: np.ndarray, count: int, length: int, random: np.random.Generator
) -> np.ndarray:
    """[count, length] bytes: pieces of `source` that begin at random positions."""
    starts = random.integers(len(source) - length + 1, size=count)
    return np.stack([source[start : start + length] for start in starts])


class Episodes(NamedTuple):
    text: np.ndarray  # [sequences, length + 1] uint8
    questions: list[list[Question]]  # of each sequence


def associative(
    source: np.ndarray, length: int, count: int, distance: int, questions: int, seed: int
) -> Episodes:
    """Sequences of `count` pairs each, with `questions` questions in all, or a few more."""
    random = np.random.default_rng((seed, count, distance))
    text = cut_random(source, -(-questions // count), length + 1, random)
    return Episodes(
        text, [ask_at(row, draw_pairs(count, random), distance, random) for row in text]
    )


def passkey(source: np.ndarray, length: int, depth: int, sequences: int, seed: int) -> Episodes:
    """One pair, stated after depth / PASSKEY_DEPTHS of the text, and asked for at its end."""
    random = np.random.default_rng((seed, depth))
    text = cut_random(source, sequences, length + 1, random)
    questions = []
    for row in text:
        (needle,) = needles_of(draw_pairs(1, random))
        last = length + 1 - PAIR
        stated = write(row, (last - PAIR) * depth // PASSKEY_DEPTHS, needle.stated, needle.at)
        questions.append([Question(stated, write(row, last, needle.asked, needle.at))])
    return Episodes(text, questions)


def distances_of(length: int) -> list[int]:
    """The distances of the table, up to 7/8 of the sequence."""
    eighths = (0.25, 0.5, 1, 2, 4, 7)
    return [int(length * one / 8) for one in eighths if length * one / 8 >= SLOT]


COUNTS = (4, 8, 16, 32, 64)  # pairs in the table


class Batches:
    """The sequences of training. The sequences of a step depend on the seed and the step only.

    Args:
        corpus: uint8.
        batch, length: a step has `batch` sequences of length + 1 bytes.
        fraction: fraction of the sequences that have episodes.
        curriculum: steps until spans are as long as sequences.
        shortest: bytes of the shortest span.
        needles: of episodes.
    """

    def __init__(
        self,
        corpus: np.ndarray,
        batch: int,
        length: int,
        fraction: float,
        curriculum: int,
        seed: int,
        shortest: int = SHORTEST_SPAN,
        needles: NeedleDraw = PAIRS,
    ) -> None:
        self.corpus, self.batch, self.length = corpus, batch, length
        self.fraction, self.curriculum, self.seed = fraction, curriculum, seed
        self.shortest, self.needles = shortest, needles

    def __call__(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """text [batch, length + 1] uint8; marked [batch, length] bool: the targets that only
        memory can predict; has_episodes [batch] bool."""
        random = np.random.default_rng((self.seed, step))
        text = cut_random(self.corpus, self.batch, self.length + 1, random)
        numbers = step * self.batch + np.arange(self.batch + 1)
        before = np.floor(numbers * self.fraction + 1e-9)
        has_episodes = before[1:] > before[:-1]
        marked = np.zeros((self.batch, self.length), bool)
        longest = longest_span(step, self.curriculum, self.length, self.shortest)
        for row in np.flatnonzero(has_episodes):
            questions = fill(text[row], self.shortest, longest, self.needles, random)
            marked[row] = mark(self.length + 1, questions)[1:]
        return text, marked, has_episodes
