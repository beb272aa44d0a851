"""Tasks that lm-eval runs without a network: RULER's, with data that they generate, and the loss on
a local text.

Prompts, answers and scores are as in lm-eval's tasks of the same names. Lengths, the number of
samples and the text between needles are given here; nltk's sentences are found by a pattern.
"""

from __future__ import annotations

import functools
import math
import re
import unittest.mock
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import nltk

with unittest.mock.patch.object(nltk, "download", lambda *_, **__: False):  # of a file
    from lm_eval.tasks.ruler import niah_utils, prepare_niah

from lm_eval.tasks.ruler import common_utils, cwe_utils, fwe_utils, vt_utils

GENERATED = "niah_single_1 niah_multikey_2 niah_multikey_3 ruler_vt ruler_cwe ruler_fwe".split()
IN_TEXT = "niah_single_2 niah_single_3 niah_multikey_1 niah_multivalue niah_multiquery".split()
LOSS = "text_loss"
# RULER's tables: what is between the needles, the kinds of keys and values, and how many needles.
NEEDLES: dict[str, tuple[str, str, str, dict[str, int]]] = {
    "niah_single_1": ("repeat", "words", "numbers", {}),
    "niah_single_2": ("essay", "words", "numbers", {}),
    "niah_single_3": ("essay", "words", "uuids", {}),
    "niah_multikey_1": ("essay", "words", "numbers", {"num_needle_k": 4}),
    "niah_multikey_2": ("needle", "words", "numbers", {}),
    "niah_multikey_3": ("needle", "uuids", "uuids", {}),
    "niah_multivalue": ("essay", "words", "numbers", {"num_needle_v": 4}),
    "niah_multiquery": ("essay", "words", "numbers", {"num_needle_q": 4}),
}
EXAMPLE = 500  # tokens of the example before the chains of ruler_vt, with tokens of several bytes
ANSWERS = {"niah": 128, "ruler_vt": 30, "ruler_cwe": 120, "ruler_fwe": 50}  # tokens
NOISE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)

Samples = list[dict[str, Any]]


def sentences_of(text: str) -> list[str]:
    """The sentences of a text, by their last characters."""
    return re.split(r"(?<=[.!?])\s+", text)


prepare_niah.sent_tokenize = sentences_of


def tokens_of(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text).input_ids)


def require_room(task: str, length: int, least: int) -> None:
    """Refuse a length for which RULER's loops do not end, as no sample is so short."""
    if length < least:
        raise ValueError(
            f"lengths: has {length}, want {least} or more for {task} with the model's tokenizer"
        )


def make_needles(
    name: str, words: Sequence[str], tokenizer: Any, length: int, count: int
) -> Samples:
    between, keys, values, numbers = NEEDLES[name]
    given = list(words) if between == "essay" else prepare_niah.get_haystack(type_haystack=between)
    made: Samples = prepare_niah.generate_samples(
        given,
        max_seq_length=length,
        template=niah_utils.TEMPLATE,
        type_haystack=between,
        type_needle_k=keys,
        type_needle_v=values,
        num_samples=count,
        TOKENIZER=tokenizer,
        **numbers,
    )
    return made


def make_chains(tokenizer: Any, length: int, count: int) -> Samples:
    """Chains of variables. A byte is a token of fewer letters: the example is longer with bytes."""
    room = EXAMPLE * max(1, tokens_of(tokenizer, NOISE) // 25)
    make = vt_utils.sys_vartrack_w_noise_random
    example = make(tokenizer=tokenizer, num_samples=1, max_seq_length=room, incremental=5)[0]
    text, _ = vt_utils.generate_input_output(10, 1, 4)
    shown = f"{example['input']} {' '.join(example['outputs'])}\n\n"
    least = tokens_of(tokenizer, text) + tokens_of(tokenizer, shown) + 100
    require_room("ruler_vt", length, least)
    made: Samples = make(
        tokenizer=tokenizer, num_samples=count, max_seq_length=length, icl_example=example
    )
    return made


def make_common(tokenizer: Any, length: int, count: int) -> Samples:
    """Lists in which ten words are common. Their search begins with 10 words."""
    example, text, _ = cwe_utils.generate_input_output(10, length)
    least = math.ceil(1.125 * (tokens_of(tokenizer, example) + tokens_of(tokenizer, text))) + 120
    require_room("ruler_cwe", length, least)
    made: Samples = cwe_utils.sys_word_pair_random(
        num_samples=count, max_seq_length=length, tokenizer=tokenizer
    )
    return made


def make_frequent(tokenizer: Any, length: int, count: int) -> Samples:
    """Coded words, with three that are frequent."""
    require_room("ruler_fwe", length, 3 * tokens_of(tokenizer, fwe_utils.TEMPLATE))
    made: Samples = fwe_utils.sys_kwext(tokenizer, length, num_samples=count)
    return made


def score_sample(lengths: Sequence[int], sample: dict[str, Any], answers: list[str]) -> Any:
    """The part of a sample's answers that was found, under its length, and -1 under the others."""
    found = common_utils.string_match_all(
        common_utils.postprocess_pred(answers), [sample["outputs"]]
    )
    return {str(one): found if one == sample["max_length"] else -1.0 for one in lengths}


def ruler_task(
    name: str, make: Callable[..., Samples], tokenizer: Any, lengths: Sequence[int], count: int
) -> Any:
    """A task as lm-eval's files describe it, with other data."""

    def dataset(**_: Any) -> dict[str, datasets.Dataset]:
        samples = [one for length in lengths for one in make(tokenizer, length, count)]
        if not all(one["outputs"] for one in samples):
            raise ValueError(f"lengths: has {min(lengths)}, want more for {name}")
        return {"test": datasets.Dataset.from_list(samples)}

    aggregation = {"aggregation": common_utils.aggregate_metrics, "higher_is_better": True}
    return {
        "task": name,
        "custom_dataset": dataset,
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "{{input}}",
        "doc_to_target": "{{outputs}}",
        "gen_prefix": "{{gen_prefix}}",
        "target_delimiter": "\n\n" if name == "ruler_cwe" else " ",
        "process_results": functools.partial(score_sample, lengths),
        "metric_list": [{"metric": str(length), **aggregation} for length in lengths],
        "generation_kwargs": {
            "do_sample": False,
            "temperature": 0.0,
            "max_gen_toks": ANSWERS.get(name, ANSWERS["niah"]),
            "until": [],
        },
        "metadata": {"version": 1.0},
    }


def score_text(sample: dict[str, Any], results: list[float]) -> Any:
    counts = (len(sample["text"].split()), len(sample["text"].encode()))
    words, count = ((results[0], number) for number in counts)
    return {"word_perplexity": words, "byte_perplexity": count, "bits_per_byte": count}


def loss_task(text: str) -> Any:
    """The loss on a text, whose windows have as many tokens as the model's max_length."""

    def dataset(**_: Any) -> dict[str, datasets.Dataset]:
        return {"test": datasets.Dataset.from_list([{"text": text}])}

    names = ("word_perplexity", "byte_perplexity", "bits_per_byte")
    return {
        "task": LOSS,
        "custom_dataset": dataset,
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "process_results": score_text,
        "metric_list": [{"metric": name} for name in names],
        "metadata": {"version": 1.0},
    }


def read_text(file: str | None) -> str:
    """The text of a file.

    Raises:
        ValueError: no file, or no UTF-8.
    """
    if file is None:
        return ""
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"text: is {file!r}, want a file of text in UTF-8: {error}") from None


def make_tasks(
    names: Sequence[str], tokenizer: Any, lengths: Sequence[int], count: int, text: str
) -> list[Any]:
    """The tasks of these names for lm-eval.

    Args:
        names: of GENERATED, IN_TEXT and LOSS.
        tokenizer: counts the tokens of samples.
        lengths: tokens of a sample, with its answer, at most.
        count: samples of each task and length.
        text: for IN_TEXT and LOSS.

    Raises:
        ValueError: a text that is shorter than a sample.
    """
    if {*names} & {*IN_TEXT, LOSS} and tokens_of(tokenizer, text) < max(lengths):
        raise ValueError(
            f"text: has {tokens_of(tokenizer, text)} tokens, want {max(lengths)} or more, as many "
            "as the greatest of lengths"
        )
    makers = {"ruler_vt": make_chains, "ruler_cwe": make_common, "ruler_fwe": make_frequent}
    found = []
    for name in names:
        if name == LOSS:
            found.append(loss_task(text))
            continue
        needles = functools.partial(make_needles, name, text.split())
        found.append(ruler_task(name, makers.get(name, needles), tokenizer, lengths, count))
    return found
