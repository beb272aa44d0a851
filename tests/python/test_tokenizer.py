"""Tokenizers in C (tools/tokenizer) have the tokens and the texts of the library `tokenizers`, for
byte-level ones of the forms in the folders of GPT-2, Llama 3, Qwen2, SmolLM and Doge, and refuse
others."""

from __future__ import annotations

import copy
import json
import random
import unicodedata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from programs import run
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tool import TOOL

TOKENS = Path(TOOL).parent / "tests" / "tokens"
WORDS = (  # of Llama 3, and of Doge
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED = (  # of later tokenizers: words end where small letters are followed by a capital
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SYNTAX = (  # what else is read
    r"\p{^L}++\d|(ab|a)?c++|\s{2}|\S{2,3}|[^\S\r\n]{1,}|.",
    r"(?=\p{Lu}|\p{Nd})[\P{Ll}\-a-c]+|(?:'(?i:s|k))|\.|[]\]x-]",
)
UNREAD = (
    "a*?", "(ab)*", "(?<!a)b", "a{2}+", "^a", "a$", r"\ba", r"\p{Han}", r"\pL", "[a[b]]", "[a&&b]",
    "[b-a]", "[ab", "(a", "a)", "*a", "a{,2}", "a{3,2}", r"(?i:\u00e9)", "(?i:\u00e9)", "\\",
    "a*", "a?|b", "a" * 600, "(" * 200 + "a" + ")" * 200, "(?i:[a-c])", "[a-",
)  # fmt: skip
LINES = 10_000
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
POINTS = [chr(n) for n in range(1, 0x110000) if not 0xD800 <= n < 0xE000]
ADDED = [
    AddedToken("<tool>", normalized=False),
    AddedToken("<tool>s", normalized=False),
    AddedToken("<tool_call>", normalized=True),
    AddedToken("<left>", lstrip=True, special=True),
    AddedToken("<right>", rstrip=True, special=True),
    AddedToken("<\u00e9>", normalized=True),
    AddedToken("<a b>", normalized=False),
]
PARTS = (
    ("abcdefghijklmnopqrstuvwxyzABCSTKk ", 35),
    (" \t\n\r  \u00a0\u2028\u3000\x0b\x0c\x85\u200b", 15),
    ("0123456789\u0663\u00bd\u2167\u06f5", 10),
    (("'s", "'T", "'re", "'VE", "'m", "'ll", "'D", "'\u017f", "'", "\u212a"), 8),
    ("\u0300\u0301\u0323\u0345\u0308\u05b0\u0f74\u1161\u11a8\u3099\u0bbe\u09be\u0344\u2126", 8),
    ([token.content for token in ADDED] + ["<|end|>", "<|end", "  <left>  ", " <right> \n"], 6),
    ([chr(n) for n in range(0xAC00, 0xD7A4)], 3),
    ([chr(n) for n in range(0x21, 0x3000)], 6),
    (POINTS, 9),
)


def splits(expression: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def gpt2() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    return made


def spaced() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return made


def smollm() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return made


def llama3() -> Tokenizer:
    made = Tokenizer(models.BPE(ignore_merges=True))
    made.pre_tokenizer = splits(WORDS)
    made.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", 0), ("<|end|>", 1)]
            ),
        ]
    )
    return made


def qwen2() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = splits(WORDS.replace(r"\p{N}{1,3}", r"\p{N}"))
    return made


def cased() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = splits(CASED)
    return made


KINDS = {kind.__name__: kind for kind in (gpt2, spaced, smollm, llama3, qwen2, cased)}


def odd_text(draw: random.Random) -> str:
    kinds = draw.choices(*zip(*PARTS, strict=True), k=draw.choice([1, 3, 10, 40]))
    return "".join(draw.choice(kind) for kind in kinds)


def odd_bytes(draw: random.Random, text: str) -> bytes:
    """Some are no longer UTF-8; none has a zero."""
    changed = bytearray(text.encode())
    for _ in range(3 if draw.random() < 0.2 else 0):
        changed[draw.randrange(len(changed))] = draw.randrange(1, 256)
    return bytes(changed)


class Trained(NamedTuple):
    path: Path
    by: Tokenizer


@pytest.fixture(scope="module", params=KINDS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(request.param, tmp_path_factory.mktemp(request.param) / "tokenizer.json")


def train(kind: str, path: Path) -> Trained:
    draw = random.Random(kind)
    made = KINDS[kind]()
    made.decoder = decoders.ByteLevel()
    text = "The quick fox's 12345 jumps: don't, DON'T. Many theories of 2024.\n\n    indent(self)"
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([odd_text(draw) for _ in range(3000)] + [text] * 50, trainer)
    made.add_tokens(ADDED)
    made.save(str(path))
    if kind == "gpt2":  # merges as older versions spell them
        tree = json.loads(path.read_text())
        tree["model"]["merges"] = [" ".join(pair) for pair in tree["model"]["merges"]]
        path.write_text(json.dumps(tree))
    return Trained(path, made)


def check_texts(of: Trained, texts: list[bytes]) -> None:
    """The C program has the tokens of `tokenizers`, and decodes them to the same texts."""
    file = of.path.with_name("texts")
    file.write_bytes(b"".join(text + b"\0" for text in texts))
    done = run(TOKENS, of.path, file, text=False)
    assert done.returncode == 0, done.stderr
    records = done.stdout.split(b"\0")
    assert records.pop() == b"" and len(records) == len(texts)
    for text, record in zip(texts, records, strict=True):
        ids, _, decoded = record.partition(b"\n")
        wanted = of.by.encode(text.decode(errors="replace")).ids
        assert [int(number) for number in ids.split(b",") if number] == wanted, text
        assert decoded.decode() == of.by.decode(wanted), text


def test_odd_texts(trained: Trained) -> None:
    draw = random.Random(5)
    texts = [odd_bytes(draw, odd_text(draw)) for _ in range(LINES)]
    long = [" " * 5000, "a" * 3000, "ab" * 20000, "\u0301" * 500, "\n \n" * 100, "don't " * 2000]
    check_texts(trained, texts + [text.encode() for text in long])


def batches() -> list[list[str]]:
    """All characters but most of those that have neither a class nor a composed form."""
    points = [c for c in POINTS if ord(c) < 0x32000 or 0xE0000 <= ord(c) < 0xE0200]
    return [points[first : first + 1000] for first in range(0, len(points), 1000)]


def test_classes_of_all_characters(tmp_path: Path) -> None:
    """Runs of characters of one class are pieces, with a space before each one."""
    names = ("Lu", "Ll", "Lt", "Lm", "Lo", "M", "Nd", "Nl", "No", "P", "S")
    expression = "|".join([rf"\p{{{name}}}+" for name in names] + [r"\s+"])
    check_texts(visible(tmp_path, expression), ["".join(some).encode() for some in batches()])


def test_the_composed_form_of_all_characters(tmp_path: Path) -> None:
    composed = visible(tmp_path, r"\s+", normalizers.NFC())
    texts = ["".join(f"a{c}\u0301 " for c in some) for some in batches()]
    texts += ["".join(unicodedata.normalize("NFD", c) for c in some) for some in batches()]
    check_texts(composed, [text.encode() for text in texts])


def visible(
    folder: Path, expression: str, normalizer: normalizers.Normalizer | None = None
) -> Trained:
    """A tokenizer that has a space before each piece, and a token for each byte."""
    made = Tokenizer(models.BPE(vocab=dict(zip(ALPHABET, range(256), strict=True)), merges=[]))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False),
        ]
    )
    if normalizer is not None:
        made.normalizer = normalizer
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    return Trained(folder / "tokenizer.json", made)


@pytest.mark.parametrize("expression", [WORDS, CASED, *SYNTAX])
def test_pieces(tmp_path: Path, expression: str) -> None:
    draw = random.Random(9)
    texts = [odd_text(draw).encode() for _ in range(2000)]
    check_texts(visible(tmp_path, expression), texts)


def tree_of(path: Path) -> dict[str, Any]:
    made = json.loads(train("llama3", path).path.read_text())
    del made["model"]["merges"][10:]
    return made


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tree_of(tmp_path_factory.mktemp("tree") / "tokenizer.json")


REFUSED: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "wordpiece": (("model", "type"), "WordPiece", "'model.type': is WordPiece, want BPE"),
    "suffix": (("model", "end_of_word_suffix"), "</w>", "'model.end_of_word_suffix': want none"),
    "fallback": (("model", "byte_fallback"), True, "want no dropout and no byte_fallback"),
    "no vocab": (("model", "vocab"), None, "want an object 'vocab'"),
    "bytes": (("model", "vocab"), {"a": 0}, "has no token for byte 0x00, want one for each"),
    "ids": (("model", "vocab", "a"), -1, "'a': want an integer from 0 to"),
    "half an id": (("model", "vocab", "a"), 64.5, "'a': want an integer from 0 to"),
    "half an added id": (("added_tokens", 2, "id"), 9.5, "entry 2: want 'content' and 'id'"),
    "merge": (("model", "merges", 3), ["a", "zzz"], "'model.merges': entry 3: want two tokens"),
    "merge text": (("model", "merges", 3), "ab", "'model.merges': entry 3: want two tokens"),
    "normalizer": (("normalizer",), {"type": "Lowercase"}, "'normalizer': is Lowercase, want"),
    "pieces": (("pre_tokenizer",), {"type": "Metaspace"}, "is Metaspace, want ByteLevel, Split"),
    "no pieces": (("pre_tokenizer",), None, "'pre_tokenizer': is no text, want ByteLevel"),
    "truncation": (("truncation",), {"max_length": 3}, "'truncation': want null: texts are not"),
    "padding": (("padding",), {"strategy": "BatchLongest"}, "'padding': want null: texts are not"),
    "last": (("pre_tokenizer", "pretokenizers", 1), {"type": "Digits"}, "ByteLevel as the last"),
    "behavior": (("pre_tokenizer", "pretokenizers", 0, "behavior"), "Removed", "is Removed, "),
    "string": (("pre_tokenizer", "pretokenizers", 0, "pattern"), {"String": " "}, "with 'Regex'"),
    "decoder": (("decoder",), {"type": "WordPiece"}, "'decoder': is WordPiece, want ByteLevel"),
    "word": (("added_tokens", 2, "single_word"), True, "'<tool>': 'single_word' is true, want"),
    "content": (("added_tokens", 2, "content"), None, "entry 2: want 'content' and 'id'"),
    "post": (("post_processor",), {"type": "BertProcessing"}, "is BertProcessing, want null, "),
    "special": (("post_processor", "processors", 1, "special_tokens"), {}, "want its 'ids' in"),
    "half a special id": (
        ("post_processor", "processors", 1, "special_tokens", "<|begin|>", "ids", 0),
        0.5,
        "'post_processor': want up to",
    ),
}


def refused(folder: Path, tree: dict[str, Any]) -> str:
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    (folder / "texts").write_bytes(b"a\0")
    done = run(TOKENS, folder / "tokenizer.json", folder / "texts")
    assert done.returncode == 2 and done.stdout == ""
    return done.stderr


@pytest.mark.parametrize("case", REFUSED)
def test_other_tokenizers_are_refused(tmp_path: Path, tree: dict[str, Any], case: str) -> None:
    keys, value, message = REFUSED[case]
    changed = copy.deepcopy(tree)
    entry: Any = changed
    for key in keys[:-1]:
        entry = entry[key]
    entry[keys[-1]] = value
    assert message in refused(tmp_path, changed)


@pytest.mark.parametrize("expression", UNREAD)
def test_expressions_that_are_not_read(
    tmp_path: Path, tree: dict[str, Any], expression: str
) -> None:
    changed = copy.deepcopy(tree)
    changed["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = expression
    assert "not read" in refused(tmp_path, changed)
