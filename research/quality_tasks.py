"""Harder tasks than quality_recall.py and quality_needles.py have, for quality.py.

Each task writes statements into held-out text and asks for something behind them; all but "copying"
ask at the end of the text. Names and values are random. Models are trained with marked pairs alone,
each stated and asked for once; everything else here is new to them. So some tasks have a wrong
answer beside the right one. A model that knows neither prefers each in half of the cases.

    capacity    16 to 1,024 marked pairs, side by side at a random place or spread over the text;
                ASKED of them are asked for
    overwritten KEYS marked pairs, each stated 2 to 4 times with other values, spread over the text.
                The last value is right, the first one is the wrong answer
    chains      lines "a = 12345", then "b = a", "c = b" for so many hops, CHAINS such chains spread
                over the text; "c = " is asked for. The wrong answer is the value of another chain
    frequent    invented words in random order fill half of the text. 3 of them occur 12 or 48 times
                and the others 3 times, or 10 of them 30 times; they are asked for as a list. The
                wrong answers are others. The list follows at once, or after 3/8 of the text
    copying     256 random words, or as many bytes of held-out text from another place, and
                `distance` bytes later the same once more, asked for from byte FREE on
    niah_*      sentences " The code of NAME is VALUE." at random places; some are asked for
    position    no question: the loss of documents from their first byte, by octaves of the position

RULER (arXiv:2404.06654) has thirteen tasks. Two of them need data of others; here are the rest, in
bytes, without instructions, and with another wording:

    niah_single_1 to _3, niah_multikey_1 to _3, niah_multivalue, niah_multiquery
            the tasks of these names. Values of niah_multivalue are asked for in the order in which
            they were stated; its wrong answers are values that do not occur
    variable tracking       chains with 4 hops, but of four chains, and from the last name to the
                            value
    common words            frequent with 10 words: 30 times against 3
    frequent words          frequent with 3 words: 12 or 48 times against 3, where RULER draws from
                            a zeta distribution
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from quality_needles import DIGITS, SMALL
from quality_recall import LETTERS, PAIR, SLOT, VALUE, Question, cut_random, draw_pairs

if TYPE_CHECKING:
    from quality_evaluate import Results

PAIRS = (16, 64, 256, 512, 1024)  # of "capacity", as far as they fit
ASKED = 16  # of them
KEYS, TIMES = 8, (2, 3, 4)  # of "overwritten"
CHAINS, HOPS = 4, (0, 1, 2, 4)
NAME, NUMBER, CODE, UUID = 6, 5, 7, 36  # letters, digits, digits, and bytes
OTHERS = 3  # times that other words of "frequent" occur
FREQUENT = ((3, 12), (3, 48), (10, 30))  # words, and the times that they occur
PARAGRAPH, FREE = 1536, 32  # bytes of "copying"; the first ones are not asked for
COPIED_FROM = (2048, 4096, 6144, 16384, 32768, 57344)  # bytes back
FIRST = 256  # bytes of the first octave
DASHES = (8, 4, 4, 4, 12)  # hexadecimal digits of the parts of a UUID
SETTINGS = "pairs is_spread times hops count apart of distance to".split()  # in tables
HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
NOISE = b" Rain fell on the hill. A dog slept. Nobody came. The lamp was lit. It rained again."


class Line(NamedTuple):
    """A statement or a question."""

    before: bytes
    value: bytes
    after: bytes

    @property
    def size(self) -> int:
        return len(self.before) + len(self.value) + len(self.after)


class Asked(NamedTuple):
    question: Question
    wrong: bytes | None = None  # another answer of the same size


class Case(NamedTuple):
    """A task with its settings. `build` writes one text, and returns what it asks for."""

    row: dict[str, Any]  # as in the results
    build: Callable[..., list[Asked]]


class Task(NamedTuple):
    """The texts of a case."""

    row: dict[str, Any]
    text: np.ndarray  # [texts, length + 1] uint8
    questions: list[list[Question]]  # of each text
    other: np.ndarray | None  # the texts with wrong answers, if there are any


class Niah(NamedTuple):
    """A task of RULER's kind "needle in a haystack"."""

    haystack: str  # noise, text or needles
    has_uuids: tuple[bool, bool] = (False, False)  # as names, and as values
    names: int = 1
    values: int = 1  # of each name
    asked: int = 1

    def line_size(self) -> int:
        name, value = (UUID if own else size for own, size in zip(self.has_uuids, (NAME, CODE)))
        return sentence(b"", b"").size + name + value


NIAH = {
    "niah_single_1": Niah("noise"),
    "niah_single_2": Niah("text"),
    "niah_single_3": Niah("text", (False, True)),
    "niah_multikey_1": Niah("text", names=4),
    "niah_multikey_2": Niah("needles"),
    "niah_multikey_3": Niah("needles", (True, True)),
    "niah_multivalue": Niah("text", values=4, asked=4),
    "niah_multiquery": Niah("text", names=4, asked=4),
}


def words(count: int, letters: np.ndarray, size: int, random: np.random.Generator) -> list[bytes]:
    """Random words, all different."""
    numbers = random.choice(len(letters) ** size, count, replace=False)
    digits = [numbers // len(letters) ** digit % len(letters) for digit in range(size)]
    return [row.tobytes() for row in letters[np.stack(digits, 1)]]


def uuids(count: int, random: np.random.Generator) -> list[bytes]:
    return [
        b"-".join(HEX[random.integers(16, size=size)].tobytes() for size in DASHES)
        for _ in range(count)
    ]


def put(text: np.ndarray, at: int, line: Line) -> int:
    """Write a line into the text. Returns the position of its value."""
    text[at : at + line.size] = np.frombuffer(b"".join(line), np.uint8)
    return at + len(line.before)


def state(text: np.ndarray, lines: list[Line], end: int, random: np.random.Generator) -> list[int]:
    """Write lines in this order at random places before `end`. Returns the positions of values."""
    sizes = np.array([line.size for line in lines])
    gaps = np.sort(random.integers(end - sizes.sum() + 1, size=len(lines)))
    starts = gaps + np.cumsum(sizes) - sizes
    return [put(text, int(at), line) for at, line in zip(starts, lines)]


def ask(text: np.ndarray, lines: list[Line], gap: int = 0) -> list[int]:
    """Write lines at the end of the text, `gap` bytes apart. Returns the positions of values."""
    positions, at = [], start_of(text, lines, gap)
    for line in lines:
        positions.append(put(text, at, line))
        at += line.size + gap
    return positions


def start_of(text: np.ndarray, lines: list[Line], gap: int = 0) -> int:
    """Where ask() begins."""
    return len(text) - sum(line.size + gap for line in lines)


def marked(around: bytes, key: bytes, value: bytes) -> Line:
    return Line(around[:1] + key, value, around[1:])


def capacity(
    text: np.ndarray, random: np.random.Generator, pairs: int, is_spread: bool
) -> list[Asked]:
    own = [(bytes(key), bytes(value)) for key, value in zip(*draw_pairs(pairs, random))]
    chosen = random.choice(pairs, ASKED, replace=False)
    questions = [marked(b"<>", *own[number]) for number in chosen]
    end = start_of(text, questions, SLOT - PAIR)
    lines = [marked(b"{}", *one) for one in own]
    if is_spread:
        stated = state(text, lines, end, random)
    else:
        begin = int(random.integers(end - pairs * SLOT + 1))
        stated = [put(text, begin + number * SLOT, line) for number, line in enumerate(lines)]
    asked = ask(text, questions, SLOT - PAIR)
    return [Asked(Question(stated[n], at, VALUE)) for n, at in zip(chosen, asked)]


def overwritten(text: np.ndarray, random: np.random.Generator, times: int) -> list[Asked]:
    keys = [bytes(key) for key in draw_pairs(KEYS, random).keys]
    values = []  # of a key they differ in each byte
    for _ in keys:
        letters = np.stack([random.permutation(LETTERS)[:times] for _ in range(VALUE)], 1)
        values.append([row.tobytes() for row in letters])
    order = random.permutation(np.repeat(np.arange(KEYS), times)).tolist()
    numbers = [order[:place].count(key) for place, key in enumerate(order)]
    lines = [marked(b"{}", keys[key], values[key][n]) for key, n in zip(order, numbers)]
    chosen = random.permutation(KEYS).tolist()
    questions = [marked(b"<>", keys[key], values[key][-1]) for key in chosen]
    positions = state(text, lines, start_of(text, questions, SLOT - PAIR), random)
    stated = dict(zip(order, positions))  # the last ones
    asked = ask(text, questions, SLOT - PAIR)
    return [
        Asked(Question(stated[key], at, VALUE), values[key][0]) for key, at in zip(chosen, asked)
    ]


def chains(text: np.ndarray, random: np.random.Generator, hops: int) -> list[Asked]:
    own = iter(words(CHAINS * (hops + 1), SMALL, NAME, random))
    names = [[next(own) for _ in range(hops + 1)] for _ in range(CHAINS)]
    values = words(CHAINS, DIGITS, NUMBER, random)
    order = random.permutation(np.repeat(np.arange(CHAINS), hops + 1)).tolist()
    lines = []
    for place, chain in enumerate(order):
        hop = order[:place].count(chain)
        value = names[chain][hop - 1] if hop else values[chain]
        lines.append(Line(b"\n" + names[chain][hop] + b" = ", value, b"\n"))
    chosen = random.permutation(CHAINS).tolist()
    questions = [Line(b"\n" + names[one][-1] + b" = ", values[one], b"\n") for one in chosen]
    positions = state(text, lines, start_of(text, questions), random)
    stated = {chain: positions[order.index(chain)] for chain in chosen}  # the first lines
    asked = ask(text, questions)
    return [
        Asked(Question(stated[one], at, NUMBER), values[(one + 1) % CHAINS])
        for one, at in zip(chosen, asked)
    ]


def frequent(
    text: np.ndarray, random: np.random.Generator, count: int, times: int, apart: int
) -> list[Asked]:
    number = len(text) // 2 // (NAME + 1)  # words in the text
    others = (number - count * times) // OTHERS
    own = words(count + others, SMALL, NAME, random)
    order = random.permutation(np.repeat(np.arange(len(own)), count * [times] + others * [OTHERS]))
    lines = [Line(b" ", own[one], b"") for one in order]
    chosen = random.permutation(count)
    heads = [b"\nThe most frequent words: ", *(count - 1) * [b" "]]
    questions = [Line(head, own[one], b"") for head, one in zip(heads, chosen)]
    begin = start_of(text, questions) - apart - len(lines) * (NAME + 1)
    stated = {}  # the last places
    for place, (one, line) in enumerate(zip(order, lines)):
        stated[int(one)] = put(text, begin + place * (NAME + 1), line)
    wrong = count + random.choice(others, count, replace=False)
    return [
        Asked(Question(stated[int(one)], at, NAME), own[other])
        for one, other, at in zip(chosen, wrong, ask(text, questions))
    ]


def copying(
    text: np.ndarray, random: np.random.Generator, source: np.ndarray, of: str, distance: int
) -> list[Asked]:
    if of == "words":
        size = PARAGRAPH // 256 - 1
        paragraph = b"".join(word + b" " for word in words(256, SMALL, size, random))
    else:
        paragraph = cut_random(source, 1, PARAGRAPH, random)[0].tobytes()
    begin = int(random.integers(len(text) - distance - PARAGRAPH + 1))
    line = Line(paragraph[:FREE], paragraph[FREE:], b"")
    stated, asked = (put(text, begin + offset, line) for offset in (0, distance))
    return [Asked(Question(stated, asked, PARAGRAPH - FREE))]


def sentence(name: bytes, value: bytes) -> Line:
    return Line(b" The code of " + name + b" is ", value, b".")


def niah(text: np.ndarray, random: np.random.Generator, kind: Niah) -> list[Asked]:
    size = kind.line_size()
    count = kind.names
    if kind.haystack == "needles":
        count = len(text) // size - kind.asked
    elif kind.haystack == "noise":
        text[:] = np.resize(np.frombuffer(NOISE, np.uint8), len(text))
    has_uuids, of_values = kind.has_uuids
    names = uuids(count, random) if has_uuids else words(count, SMALL, NAME, random)
    names = [name for name in names for _ in range(kind.values)]
    given = 2 * len(names)  # the second half does not occur
    values = uuids(given, random) if of_values else words(given, DIGITS, CODE, random)
    lines = [sentence(*one) for one in zip(names, values)]
    chosen = random.permutation(len(lines))[: kind.asked].tolist()
    if kind.values > 1:
        chosen.sort()
    questions = [lines[one] for one in chosen]
    stated = state(text, lines, start_of(text, questions), random)
    found = []
    for one, at in zip(chosen, ask(text, questions)):
        wrong = values[one + len(lines)] if count == 1 else values[(one + 1) % len(lines)]
        found.append(Asked(Question(stated[one], at, len(values[one])), wrong))
    return found


def cases_of(source: np.ndarray, length: int) -> list[Case]:
    """The cases that fit a sequence."""
    cases = []

    def add(task: str, room: int, build: Callable[..., list[Asked]], **settings: Any) -> None:
        if room <= length:
            cases.append(Case({"task": task, **settings}, partial(build, **settings)))

    for pairs in PAIRS:
        for is_spread in (False, True):
            add("capacity", (pairs + ASKED) * SLOT, capacity, pairs=pairs, is_spread=is_spread)
    for times in TIMES:
        add("overwritten", KEYS * (times * PAIR + SLOT), overwritten, times=times)
    for hops in HOPS:
        add("chains", CHAINS * (hops + 2) * (2 * NAME + 5), chains, hops=hops)
    for count, times in FREQUENT:
        room = 2 * count * (times + OTHERS) * (NAME + 1)
        for apart in (0, 3 * length // 8):
            add("frequent", room, frequent, count=count, times=times, apart=apart)
    for of in ("words", "text"):
        for distance in COPIED_FROM:
            build = partial(copying, source=source)
            add("copying", distance + PARAGRAPH, build, of=of, distance=distance)
    for name, kind in NIAH.items():
        lines = kind.names * kind.values + kind.asked + 1
        add(name, lines * kind.line_size(), partial(niah, kind=kind))
    return cases


def tasks(source: np.ndarray, length: int, texts: int, seed: int) -> Iterator[Task]:
    """The tasks that fit a sequence, each with so many texts."""
    for case in cases_of(source, length):
        random = np.random.default_rng([seed, texts, *str(case.row).encode()])
        text = cut_random(source, texts, length + 1, random)
        asked = [case.build(row, random) for row in text]
        other = text.copy()
        for row, own in zip(other, asked):
            for one in own:
                if one.wrong is not None:
                    at, size = one.question.asked, one.question.size
                    row[at : at + size] = np.frombuffer(one.wrong, np.uint8)
        questions = [[one.question for one in own] for own in asked]
        has_choice = asked[0][0].wrong is not None
        yield Task(case.row, text, questions, other if has_choice else None)


def mean_and_error(of_texts: list[Any]) -> tuple[float, float]:
    """The mean over all questions, and its standard error over texts, each with as many."""
    means = np.array(of_texts, np.float64).mean(1)
    error = means.std(ddof=1) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    return float(means.mean()), float(error)


def scored(task: Task, results: Results, others: Results | None) -> dict[str, Any]:
    """The row of a task. accuracy: the fraction of answers with all bytes right, and its error;
    of_bytes: the fraction of their bytes; bits: per byte of answers, and, stated_bits, of the same
    bytes where they were stated. If there are wrong answers, wrong is the fraction of them with all
    bytes predicted, and chosen the fraction of right answers that cost fewer bits."""

    def of(found: np.ndarray, first: str = "asked") -> list[list[np.ndarray]]:
        """The slices of all questions from the results [texts, length] of target bytes."""
        return [
            [row[(at := getattr(one, first) - 1) : at + one.size] for one in own]
            for row, own in zip(found, task.questions)
        ]

    def mean_of(slices: list[list[np.ndarray]]) -> float:
        return float(np.mean([one.mean() for own in slices for one in own]))

    questions = [one for own in task.questions for one in own]
    row = {**task.row, "texts": len(task.text), "questions": len(questions)}
    row["mean_distance"] = round(float(np.mean([one.distance for one in questions])))
    right = [[one.all() for one in own] for own in of(results.is_right)]
    row["accuracy"], row["error"] = mean_and_error(right)
    row["of_bytes"] = mean_of(of(results.is_right))
    row["bits"] = mean_of(of(results.bits))
    row["stated_bits"] = mean_of(of(results.bits, "stated"))
    if others is not None:
        row["wrong"], _ = mean_and_error([[x.all() for x in own] for own in of(others.is_right)])
        pairs = zip(of(results.bits), of(others.bits))
        fewer = [[x.sum() < y.sum() for x, y in zip(a, b)] for a, b in pairs]
        row["chosen"], row["chosen_error"] = mean_and_error(fewer)
    return row


def documents(source: np.ndarray, length: int, texts: int) -> np.ndarray:
    """[at most `texts`, length + 1] bytes: the beginnings of documents that are long enough. A zero
    byte follows each document."""
    ends = np.flatnonzero(source == 0)
    starts = np.concatenate(([0], ends + 1))[: len(ends)]
    starts = starts[ends - starts > length]
    chosen = starts[np.linspace(0, len(starts) - 1, min(texts, len(starts))).astype(np.int64)]
    return source[chosen[:, None] + np.arange(length + 1)]


def by_octave(bits: np.ndarray) -> list[dict[str, Any]]:
    """Mean losses [texts, length] of the positions from half of `to` on, or from 0, before `to`,
    with their errors over texts."""
    rows, begin, end = [], 0, FIRST
    while begin < bits.shape[1]:
        mean, error = mean_and_error(bits[:, begin:end])
        row = {"task": "position", "to": min(end, bits.shape[1]), "texts": len(bits)}
        rows.append({**row, "bits": mean, "error": error})
        begin, end = end, 2 * end
    return rows


def table_rows(rows: list[dict[str, Any]]) -> dict[str, str]:
    """The columns of tables for the rows of one model, by task and settings: bits of "copying" and
    "position"; accuracy of others and, behind a comma, chosen."""
    found = {}
    for row in rows:
        settings = {name: row[name] for name in SETTINGS if name in row}
        label = ", ".join([row["task"], *(f"{name} {one}" for name, one in settings.items())])
        if row["task"] in ("copying", "position"):
            found[label] = f"{row['bits']:.3f}"
        else:
            chosen = f", {row['chosen']:.2f}" if "chosen" in row else ""
            found[label] = f"{row['accuracy']:.2f}{chosen}"
    return found
