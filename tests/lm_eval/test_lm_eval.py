"""The command for lm-eval, its model and its tasks, on models with random weights."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import flash_dmattn.lm_eval
import flash_dmattn.transformers as models
import lm_eval
import pytest
import torch
from flash_dmattn.lm_eval import __main__ as command

flash_dmattn.lm_eval.register()
from flash_dmattn.lm_eval import tasks  # noqa: E402
from flash_dmattn.lm_eval.model import DynamicMaskLM  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.tasks.ruler import fwe_utils, niah_utils  # noqa: E402
from transformers import AutoModelForCausalLM, DogeConfig  # noqa: E402

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 258}
SIZES.update(num_attention_heads=4, num_key_value_heads=2)
NAMES = [*tasks.GENERATED, *tasks.IN_TEXT, tasks.LOSS]
LENGTH = 8192
TOKENIZER = models.ByteTokenizer()


def words(count: int) -> str:
    rng = random.Random(0)
    return "".join(rng.choice("abcdefgh      .\n") for _ in range(count))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("models")
    ends = {"eos_token_id": 256, "pad_token_id": 257, "bos_token_id": None}
    configs: dict[str, Any] = {
        "doge": DogeConfig(**SIZES, **ends, keep_window_size=24),
        "hybrid": models.HybridConfig(**SIZES, sliding_keys=16, selecting_keys=32),
    }
    for name, config in configs.items():
        given = {"attn_implementation": "dynamic_mask"}
        model = AutoModelForCausalLM.from_config(config, **given)
        for one in model.parameters():  # scores and logits that differ
            torch.nn.init.normal_(one, std=0.2)
        model.save_pretrained(root / name)
        TOKENIZER.save_pretrained(root / name)
    (root / "text").write_text(words(LENGTH + 20))
    return {name: str(root / name) for name in (*configs, "text")}


@torch.no_grad()
def bits_of(folder: str, text: str) -> float:
    """The loss on a text behind the token of an end, in bits per byte."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="dynamic_mask").eval()
    tokens = torch.tensor([[256, *text.encode()]])
    logits = model(tokens[:, :-1], use_cache=False).logits[0]
    return float(torch.nn.functional.cross_entropy(logits.double(), tokens[0, 1:])) / math.log(2)


@pytest.mark.parametrize("name", ["doge", "hybrid"])
def test_command(folders: dict[str, str], name: str, tmp_path: Path) -> None:
    """All tasks, as a user runs them."""
    file = tmp_path / "results.json"
    given = [folders[name], "--to", str(file), "--text", folders["text"]]
    given += ["--lengths", str(LENGTH), "--samples", "1"]
    line = [sys.executable, "-m", "flash_dmattn.lm_eval", *given]
    done = subprocess.run(line, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [one.split()[0] for one in done.stdout.splitlines()] == NAMES
    found = json.loads(file.read_text())
    assert found["versions"]["lm_eval"] == "0.4.13" and list(found["results"]) == NAMES
    for one in NAMES[:-1]:
        assert 0 <= found["results"][one][f"{LENGTH},none"] <= 1
    bits = found["results"][tasks.LOSS]["bits_per_byte,none"]
    assert bits == pytest.approx(
        bits_of(folders[name], Path(folders["text"]).read_text()), rel=1e-5
    )


def test_samples_are_those_of_lm_eval(folders: dict[str, str]) -> None:
    """The first of its 500, from the same state of random numbers."""
    theirs = {
        "niah_single_1": niah_utils.niah_single_1,
        "niah_multikey_2": niah_utils.niah_multikey_2,
        "niah_multikey_3": niah_utils.niah_multikey_3,
        "ruler_fwe": fwe_utils.fwe_download,
    }
    for name, make in theirs.items():
        random.seed(5)
        wanted = make(pretrained=folders["hybrid"], max_seq_lengths=[1500])["test"]
        random.seed(5)
        (made,) = tasks.make_tasks([name], TOKENIZER, [1500], 3, "")
        found = made["custom_dataset"]()["test"]
        assert len(found) == 3 and found.to_list() == wanted.to_list()[:3]


@pytest.mark.parametrize("name", NAMES[:-1])
def test_samples_have_their_answers(name: str) -> None:
    lengths = [LENGTH, 9000]
    (task,) = tasks.make_tasks([name], TOKENIZER, lengths, 2, words(20000))
    samples = task["custom_dataset"]()["test"].to_list()
    assert [one["max_length"] for one in samples] == [LENGTH, LENGTH, 9000, 9000]
    for one in samples:
        text, answers = one["input"], one["outputs"]
        assert answers and all(answer in text for answer in answers)
        assert len(text.encode()) <= one["max_length"]
        score = task["process_results"]
        other = {str(length): -1.0 for length in lengths}
        length = str(one["max_length"])
        assert score(one, [" ".join(answers)]) == {**other, length: 1.0}
        assert score(one, [answers[0]]) == {**other, length: pytest.approx(1 / len(answers))}
        assert score(one, ["?"]) == {**other, length: 0.0}


def test_doge_generates_with_a_cache_of_constant_size(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def make(config: Any) -> models.DogeCache:
        made.append(models.DogeCache(config))
        return made[-1]

    monkeypatch.setattr(flash_dmattn.lm_eval.model, "DogeCache", make)
    model = DynamicMaskLM(folders["doge"], device="cpu", max_length=400)
    settings = {"do_sample": False, "max_gen_toks": 20, "until": []}
    request = Instance("generate_until", {}, (words(200), settings), 0)
    (found,) = model.generate_until([request], disable_tqdm=True)
    given = TOKENIZER(words(200), return_tensors="pt")
    wanted = model.model.generate(**given, max_new_tokens=20, do_sample=False, use_cache=False)
    assert len(made) == 1 and made[0].get_seq_length() > 200
    assert found == TOKENIZER.decode(wanted[0, 200:], skip_special_tokens=True)


def test_model_of_the_registry(folders: dict[str, str]) -> None:
    assert get_model("flash_dmattn") is DynamicMaskLM
    found: Any = lm_eval.simple_evaluate(
        model="flash_dmattn",
        model_args={"pretrained": folders["hybrid"], "max_length": 300},
        tasks=[tasks.loss_task("a text of some words")],
        device="cpu",
    )
    bits = found["results"][tasks.LOSS]["bits_per_byte,none"]
    assert bits == pytest.approx(bits_of(folders["hybrid"], "a text of some words"), rel=1e-5)


@pytest.mark.parametrize(
    "words_of_call, message",
    [
        (["none"], "pretrained: is 'none', want a folder that has a config.json"),
        (["t5"], "model_type is 't5', want 'doge', 'dynamic_mask_hybrid' or another causal"),
        (["broken"], "config.json: is no JSON"),
        (["bare"], "'bare' has no weights, want a model.safetensors"),
        (["mute"], "'mute' has no tokenizer_config.json, want what the tokenizer's"),
        (["small"], "the tokenizer has 258 tokens, want at most the model's 256"),
        (["hybrid", "--tasks", "hellaswag"], "tasks: has 'hellaswag', want some of niah_single_1"),
        (["hybrid", "--tasks", "text_loss"], "text: is not given, want a file for text_loss"),
        (["hybrid", "--text", "none"], "text: is 'none', want a file of text in UTF-8"),
        (["hybrid", "--text", "latin"], "text: is 'latin', want a file of text in UTF-8"),
        (["hybrid", "--text", "short"], "text: has 5 tokens, want 4096 or more"),
        (["hybrid", "--tasks", "ruler_cwe"], "lengths: has 4096, want .* or more for ruler_cwe"),
        (
            ["hybrid", "--tasks", "ruler_vt", "--lengths", "900"],
            "lengths: has 900, want .* ruler_vt",
        ),
        (["hybrid", "--tasks", "ruler_fwe", "--lengths", "300"], "has 300, want .* ruler_fwe"),
        (
            ["hybrid", "--tasks", "niah_single_1", "--lengths", "300"],
            "Could not generate any sample",
        ),
    ],
)
def test_bad_input(
    folders: dict[str, str],
    words_of_call: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("t5", "broken", "bare", "mute"):
        Path(name).mkdir()
        kind = "t5" if name == "t5" else "doge"
        Path(name, "config.json").write_text(
            "{" if name == "broken" else f'{{"model_type": "{kind}"}}'
        )
    Path("mute/model.safetensors").touch()
    config = models.HybridConfig(**{**SIZES, "vocab_size": 256, "pad_token_id": None})
    models.HybridForCausalLM(config).save_pretrained("small")
    TOKENIZER.save_pretrained("small")
    Path("hybrid").symlink_to(folders["hybrid"])
    Path("latin").write_bytes(b"\xff\xfe")
    Path("short").write_text("short")
    assert command.main([*words_of_call, "--to", "out.json", "--device", "cpu"]) == 1
    assert re.search(message, capsys.readouterr().err) and not Path("out.json").exists()
