"""`fdma generate` has the tokens, logits and texts of transformers on folders that transformers
wrote, draws as it does, in memory that does not grow with the text, and refuses other folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import flash_dmattn.transformers as ours
import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from tool import refusal, run_tool

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 1000}
SIZES = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
SIZES = {**SIZES, "max_position_embeddings": 256, "keep_window_size": 1024}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "biases": {"attention_bias": True, "mlp_bias": True, "vocab_size": 1003},
    "odd sizes": {"hidden_size": 60, "head_dim": 24, "intermediate_size": 101, "vocab_size": 517},
    "one kv head": {"num_key_value_heads": 1, "num_hidden_layers": 3, "rope_parameters": LINEAR},
    "dynamic": {"rope_parameters": DYNAMIC, "rms_norm_eps": 1e-3},
}
WRITTEN = 200
PIECE = 256  # tokens of a prompt that pass together


class Folder(NamedTuple):
    path: Path
    prompt: torch.Tensor


def make_folder(path: Path, length: int, dtype: torch.dtype, **changes: Any) -> Folder:
    """A model with random weights, in shards, and a prompt of distinct tokens: equal ones have
    equal scores, and transformers keeps any of them."""
    torch.manual_seed(len(str(sorted(changes))))
    model = transformers.DogeForCausalLM(transformers.DogeConfig(**{**SIZES, **changes}))
    for name, parameter in model.named_parameters():
        if name.endswith((".A", "residual", "norm.weight", "bias")):
            torch.nn.init.normal_(parameter, 0 if name.endswith(("A", "bias")) else 1, 0.3)
    torch.nn.init.normal_(model.model.embed_tokens.weight, 0, 0.02)  # no text of one token
    model.to(dtype).save_pretrained(path, max_shard_size="200KB")
    return Folder(path, torch.randperm(model.config.vocab_size)[:length])


def ids_of(prompt: torch.Tensor) -> str:
    return ",".join(map(str, prompt.tolist()))


class ExactAngles(torch.nn.Module):
    """Rotary embedding in float64: transformers rounds its angles to float32."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rules, trained = self.config.rope_parameters, self.config.max_position_embeddings
        dim = getattr(self.config, "head_dim", None) or (
            self.config.hidden_size // self.config.num_attention_heads
        )
        base, factor = rules["rope_theta"], rules.get("factor", 1.0)
        length = int(position_ids.max()) + 1
        if rules["rope_type"] == "dynamic" and length > trained:
            base *= (factor * length / trained - (factor - 1)) ** (dim / (dim - 2))
        divisor = factor if rules["rope_type"] == "linear" else 1.0
        frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim) / divisor
        angles = position_ids[..., None] * frequencies.repeat(2)
        return angles.cos(), angles.sin()


def generated(
    folder: Folder, dtype: torch.dtype, attention: str = "eager", tokens: int = WRITTEN
) -> tuple[list[int], torch.Tensor]:
    """The greedy tokens of transformers, and the logits of each."""
    model = transformers.DogeForCausalLM.from_pretrained(
        folder.path, dtype=dtype, attn_implementation=attention
    ).eval()
    if dtype == torch.float64:
        model.model.rotary_emb = ExactAngles(model.config)
    found = model.generate(
        folder.prompt[None],
        max_new_tokens=tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return found.sequences[0, len(folder.prompt) :].tolist(), torch.cat(found.logits)


def run_folder(folder: Folder, tokens: int = WRITTEN) -> tuple[dict[str, Any], torch.Tensor]:
    """The report of `fdma generate`, and its logits."""
    out = folder.path / "logits"
    done = run_tool("generate", folder.path, "--ids", ids_of(folder.prompt), "--max-tokens", tokens,
                    "--logits", out, "--json", "--threads", "2")  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), load_file(out)["logits"]


def check_logits(logits: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """They err at most twice as much as transformers in float32, and a rounding step."""
    allowed = 2 * (plain - exact).abs().max() + exact.abs().max() * torch.finfo(torch.float32).eps
    assert (logits - exact).abs().max() <= allowed


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_and_logits_are_those_of_transformers(tmp_path: Path, shape: str) -> None:
    length = PIECE + 44
    folder = make_folder(tmp_path, length, torch.float32, **SHAPES[shape])
    tokens, plain = generated(folder, torch.float32)
    exact_tokens, exact = generated(folder, torch.float64)
    report, logits = run_folder(folder)
    assert exact_tokens == tokens
    assert report["tokens"] == tokens
    assert report["prompt"] == length
    check_logits(logits, plain, exact)
    assert len(set(tokens)) > 10  # the text says something


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make_folder(tmp_path, 7, dtype)
    tokens, plain = generated(folder, torch.float32, tokens=40)
    report, logits = run_folder(folder, 40)
    assert report["tokens"] == tokens
    check_logits(logits, plain, generated(folder, torch.float64, tokens=40)[1])


@pytest.mark.parametrize("length", [1, 3, 23, 2 * PIECE + 1])
def test_a_window_below_the_length(tmp_path: Path, length: int) -> None:
    folder = make_folder(tmp_path, length, torch.float32, keep_window_size=24)
    found = []  # of several prompts: the largest error of one token's logits is chance
    for seed in range(1 if length > PIECE else 8):
        drawn = torch.randperm(SIZES["vocab_size"], generator=torch.Generator().manual_seed(seed))[
            :length
        ]
        one = folder._replace(prompt=drawn)
        logits = [run_folder(one, 1)[1]]  # no token occurs twice
        logits += [generated(one, dtype, tokens=1)[1] for dtype in (torch.float32, torch.float64)]
        found.append(logits)
    check_logits(*(torch.cat(each) for each in zip(*found)))
    ours.register()
    tokens, _ = generated(folder, torch.float32, "dynamic_mask")
    assert run_folder(folder)[0]["tokens"] == tokens


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, 1000, torch.float32, keep_window_size=32)
    report, _ = run_folder(folder, 1500)  # nearly 10 times max_position_embeddings
    assert len(report["tokens"]) == 1500
    rows, width = 32, 2 * 16
    keys = SIZES["num_hidden_layers"] * rows * width * 2 * 4 * 1e-6  # k and v in float32
    assert keys < report["cache_mb"] < 1.3 * keys
    files = [load_file(file) for file in tmp_path.glob("*.safetensors")]
    weights = sum(tensor.nbytes for file in files for tensor in file.values())
    assert report["weights_mb"] == pytest.approx(weights * 1e-6, rel=1e-4)


def test_output_and_bench(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, 5, torch.float32)
    tokens, _ = generated(folder, torch.float32, tokens=6)
    command = ("generate", folder.path, "--ids", ids_of(folder.prompt), "--max-tokens", 6)
    done = run_tool(*command, "--bench")
    assert done.stdout == ",".join(map(str, tokens)) + "\n"
    assert "written: 6 tokens" in done.stderr and "a plain read of its weights" in done.stderr
    assert "256 tokens of a prompt: " in done.stderr and "openblas" in done.stderr.lower()
    report = json.loads(run_tool(*command, "--bench", "--json", "--threads", 1).stdout)
    assert report["tokens"] == tokens and report["threads"] == 1
    assert all(0 < report[name] for name in ("read_ms", "token_ms", "piece_ms", "products_ms"))
    assert report["blas_ms"] is None or 0 < report["blas_ms"]
    assert (report["blas_ms"] is None) == (report["blas_core"] is None)


class Words(NamedTuple):
    folder: Folder
    by: Tokenizer
    prompt: str


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Words:
    """A model whose tokens are bytes and a special one, and a text of distinct bytes."""
    path = tmp_path_factory.mktemp("words")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    by = Tokenizer(models.BPE(vocab=dict(zip(letters, range(256), strict=True)), merges=[]))
    by.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    by.post_processor = processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", 256)]
    )
    by.decoder = decoders.ByteLevel()
    by.add_special_tokens(["<begin>"])
    by.save(str(path / "tokenizer.json"))
    prompt = "The quick \u00e9\U0001f415, jumbox."
    sizes = {"vocab_size": 257, "keep_window_size": 128, "eos_token_id": None}
    make_folder(path, 1, torch.float32, **sizes)
    return Words(Folder(path, torch.tensor(by.encode(prompt).ids)), by, prompt)


def test_text_streams(words: Words, tmp_path: Path) -> None:
    tokens, _ = generated(words.folder, torch.float32, tokens=60)
    said = words.by.decode(tokens)
    assert "\ufffd" in said  # random bytes
    command = ("generate", words.folder.path, "--max-tokens", 60)
    done = run_tool(*command, "--prompt", words.prompt, text=False)
    assert done.stdout.decode() == said + "\n"
    assert f"prompt: {len(words.folder.prompt)} tokens" in done.stderr.decode()
    file = tmp_path / "prompt"
    file.write_bytes(words.prompt.encode())
    report = json.loads(run_tool(*command, "--prompt-file", file, "--json").stdout)
    assert report["tokens"] == tokens and report["text"] == said
    assert json.loads(run_tool(*command, "--prompt", "", "--json").stdout)["prompt"] == 1


def surprises(words: Words, count: int, rules: dict[str, Any], *options: str) -> list[float]:
    """Of each token drawn: -log of its probability under the rules of transformers, less what is
    expected of a token drawn by them, divided by the standard deviation of all."""
    out = words.folder.path / "logits"
    ids = ids_of(words.folder.prompt)
    done = run_tool("generate", words.folder.path, "--ids", ids, "--logits", out, "--json",
                    "--max-tokens", count, "--threads", 1, *options)  # fmt: skip
    tokens = torch.tensor(json.loads(done.stdout)["tokens"])
    assert len(tokens) == count
    logits = load_file(out)["logits"].double()
    warpers = transformers.LogitsProcessorList(
        [kind(rules[name]) for name, kind in WARPERS.items() if name in rules]
    )
    surprise = -warpers(tokens[:, None], logits).log_softmax(-1)
    weight = (-surprise).exp()
    finite = surprise.where(weight > 0, 0)
    expected = (weight * finite).sum(-1)
    variance = (weight * finite.square()).sum(-1) - expected.square()
    drawn = surprise.gather(1, tokens[:, None])[:, 0]
    return ((drawn - expected) / variance.sum().sqrt()).tolist()


WARPERS = {
    "temperature": transformers.TemperatureLogitsWarper,
    "top_k": transformers.TopKLogitsWarper,
    "top_p": transformers.TopPLogitsWarper,
    "min_p": transformers.MinPLogitsWarper,
}
RULES: list[dict[str, Any]] = [
    {"temperature": 1.5},
    {"temperature": 0.7, "top_k": 12},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.7, "min_p": 0.05},
]


@pytest.mark.parametrize("rules", RULES)
def test_sampling_draws_as_transformers_would(words: Words, rules: dict[str, Any]) -> None:
    options = [str(part) for name, value in rules.items()
               for part in ("--" + name.replace("_", "-"), value)]  # fmt: skip
    found = surprises(words, 1000, rules, *options)
    assert all(abs(value) < float("inf") for value in found)  # nothing that the rules leave out
    assert abs(sum(found)) < 4  # standard deviations


def test_seeds(words: Words) -> None:
    command = ("generate", words.folder.path, "--prompt", "a", "--temperature", "1")
    command += ("--max-tokens", "30")
    first, again, other = (run_tool(*command, "--seed", seed, text=False) for seed in "112")
    assert first.stdout == again.stdout != other.stdout
    greedy = run_tool(*command[:4], "--max-tokens", 30, text=False).stdout
    for rule in (["--top-k", "1"], ["--top-p", "0"], ["--min-p", "1"]):
        assert run_tool(*command, *rule, text=False).stdout == greedy


def test_wrong_prompts(words: Words, whole: Path, tmp_path: Path) -> None:
    path = words.folder.path
    one_of = "want one of --prompt, --prompt-file and --ids"
    assert one_of in refusal("generate", path)
    assert one_of in refusal("generate", path, "--ids", "1", "--prompt", "a")
    assert "tokenizer.json: cannot be opened" in refusal("generate", whole, "--prompt", "a")
    file = tmp_path / "none"
    assert f"--prompt-file: {file}: cannot" in refusal("generate", path, "--prompt-file", file)
    shutil.copytree(whole, tmp_path / "model")
    tree = json.loads((path / "tokenizer.json").read_text())
    for changes, prompt, message in (
        ({"post_processor": None}, "", "the prompt is empty, want a text of one token or more"),
        ({"added_tokens": [{"content": "b", "id": 1000}]}, "b", "the prompt has token 1000, want"),
        ({"decoder": None}, "a", "tokenizer.json: 'decoder': is no text, want ByteLevel"),
    ):
        (tmp_path / "model" / "tokenizer.json").write_text(json.dumps({**tree, **changes}))
        assert message in refusal("generate", tmp_path / "model", "--prompt", prompt)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--top-p", "1.5", "--top-p: is above 1, want a probability"),
        ("--min-p", "1.5", "--min-p: is above 1, want a fraction"),
        ("--max-tokens", "99999999", "--max-tokens: is above 67108864, want less"),
        ("--threads", "9999", "--threads: is above 1024, want less"),
    ],
)
def test_wrong_options(whole: Path, option: str, value: str, message: str) -> None:
    assert message in refusal("generate", whole, "--ids", "1", option, value)


def test_logits_that_cannot_be_written(whole: Path, tmp_path: Path) -> None:
    """They are refused before a token is."""
    command = ("generate", whole, "--ids", "1", "--logits")
    file = tmp_path / "none" / "logits"
    assert f"--logits: {file}: No such file" in refusal(*command, file)
    assert f"--logits: {tmp_path}: Is a directory" in refusal(*command, tmp_path)
    assert "--logits is '', want the name of a file" in refusal(*command, "")
    assert "--prompt-file is '', want" in refusal("generate", whole, "--prompt-file=")
    assert "DIR is '', want a name" in refusal("generate", "", "--ids", "1")


def test_a_text_ends_with_an_end_token(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, 5, torch.float32)
    tokens, _ = generated(folder, torch.float32, tokens=9)
    end = tokens[4]
    change_config(tmp_path, eos_token_id=[end])
    assert run_folder(folder, 9)[0]["tokens"] == tokens[: tokens.index(end) + 1]


def change_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("whole"), 1, torch.float32).path


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"model_type": "llama"}, "'model_type': is llama, want doge"),
    "experts": ({"is_moe": True}, "'is_moe': is true, want false"),
    "sliding": ({"sliding_window": 64}, "'sliding_window': want null"),
    "activation": ({"hidden_act": "gelu"}, "'hidden_act': is gelu, want silu"),
    "frequencies": ({"rope_parameters": {"rope_type": "yarn"}}, "'rope_type': is yarn, want"),
    "two rules": ({"rope_scaling": LINEAR}, "'rope_scaling': stands beside"),
    "rules": ({"rope_parameters": 5}, "'rope_parameters' or 'rope_scaling': is no object"),
    "factor": ({"rope_parameters": {"rope_type": "linear"}}, "'factor': is missing"),
    "no integer": ({"hidden_size": 64.5}, "'hidden_size': want an integer from 8"),
    "head_dim": ({"head_dim": 20}, "'head_dim': is 20, want a multiple of 8 up to 256"),
    "kv heads": ({"num_key_value_heads": 3}, "'num_key_value_heads': is 3, want a divisor"),
    "window": ({"keep_window_size": 0}, "'keep_window_size': want an integer from 1"),
    "vocabulary": ({"vocab_size": 999}, "axis 0 has 1000 elements, want 999"),
    "layers": ({"num_hidden_layers": 3}, "tensor 'model.layers.2.self_attn.q_proj.weight': is"),
    "biases": ({"mlp_bias": True}, "tensor 'model.layers.0.mlp.gate_proj.bias': is missing"),
    "flag": ({"attention_bias": 1}, "'attention_bias': want true or false"),
    "ends": ({"eos_token_id": "end"}, "'eos_token_id': want a token"),
    "no ends": (
        {"eos_token_id": []},
        "'eos_token_id': is an empty list, want null, a token, or up",
    ),
    "end of text": ({"eos_token_id": 1000}, "'eos_token_id': is 1000, want a token, 0 to 999"),
    "negative end": ({"eos_token_id": [7, -1]}, "'eos_token_id': is -1, want a token, 0 to 999"),
    "half an end": ({"eos_token_id": 1.5}, "'eos_token_id': is 1.5, want a token, 0 to 999"),
    "eps": ({"rms_norm_eps": 0}, "'rms_norm_eps': want a number above 0"),
    "null activation": ({"hidden_act": None}, "'hidden_act': is no text, want silu"),
    "null eps": ({"rms_norm_eps": None}, "'rms_norm_eps': want a number above 0"),
    "null window": ({"keep_window_size": None}, "'keep_window_size': want an integer from 1"),
    "null layers": ({"num_hidden_layers": None}, "'num_hidden_layers': want an integer from 1"),
    "null head_dim": ({"head_dim": None}, "'head_dim': want an integer from 8"),
    "null experts": ({"is_moe": None}, "'is_moe': want true or false"),
    "null biases": ({"attention_bias": None}, "'attention_bias': want true or false"),
    "null base": ({"rope_parameters": {"rope_theta": None}}, "'rope_theta': want a number above 0"),
    "null frequencies": ({"rope_parameters": {"rope_type": None}}, "'rope_type': is no text, want"),
    "numbered rule": ({"rope_parameters": {"rope_type": 7}}, "'rope_type': is no text, want"),
}
NULLS = ("num_key_value_heads", "sliding_window", "rope_parameters", "rope_theta", "eos_token_id")


@pytest.mark.parametrize("case", CONFIGS)
def test_other_models_are_refused(tmp_path: Path, whole: Path, case: str) -> None:
    changes, message = CONFIGS[case]
    shutil.copytree(whole, tmp_path / "model")
    change_config(tmp_path / "model", **changes)
    assert message in refusal("generate", tmp_path / "model", "--ids", "1")


@pytest.mark.parametrize("case", [case for case in CONFIGS if case.startswith("null")])
def test_transformers_refuses_these_nulls(tmp_path: Path, whole: Path, case: str) -> None:
    shutil.copyfile(whole / "config.json", tmp_path / "config.json")
    change_config(tmp_path, **CONFIGS[case][0])
    with pytest.raises((StrictDataclassError, TypeError, KeyError)):
        transformers.DogeForCausalLM(transformers.DogeConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize("name", NULLS)
def test_other_nulls_are_read(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path, 5, torch.float32, num_key_value_heads=4)
    tokens, _ = generated(folder, torch.float32, tokens=6)
    change_config(tmp_path, **{name: None})
    assert run_folder(folder, 6)[0]["tokens"] == tokens


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_weights_that_are_not_finite(tmp_path: Path, whole: Path, name: str, value: float) -> None:
    shutil.copytree(whole, tmp_path / "model")
    for file in (tmp_path / "model").glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name].view(-1)[-1] = value
            save_file(tensors, file)
    message = refusal("generate", tmp_path / "model", "--ids", "1")
    assert f"tensor '{name}': has NaN or infinity, want finite numbers" in message


def test_older_checkpoints_are_refused(tmp_path: Path, whole: Path) -> None:
    shutil.copytree(whole, tmp_path / "model")
    for file in (tmp_path / "model").glob("*.safetensors"):
        tensors = load_file(file)
        kept = {name: tensor for name, tensor in tensors.items() if "_norm.w" not in name}
        save_file(kept, file)
    message = refusal("generate", tmp_path / "model", "--ids", "1")
    assert "has no 'q_norm', as Doge-320M and Doge-*-Instruct, want the form of" in message


def test_broken_folders(tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "model"
    assert "config.json: cannot be opened" in refusal("generate", path, "--ids", "1")
    shutil.copytree(whole, path)
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.rename(tmp_path / shard.name)
    assert f"{shard.name}: cannot be opened" in refusal("generate", path, "--ids", "1")
    shard.write_bytes((tmp_path / shard.name).read_bytes()[:-4])
    assert f"{shard.name}: " in refusal("generate", path, "--ids", "1")
    index = path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "../model.safetensors"}}')
    assert "'a': want one of up to" in refusal("generate", path, "--ids", "1")
    index.write_text("{}")
    assert "'weight_map': want the file of each" in refusal("generate", path, "--ids", "1")
    index.write_text("[")
    assert "is no JSON object" in refusal("generate", path, "--ids", "1")
    config = (path / "config.json").read_bytes()
    for more in (b"x", b"{}", b"\n\0", b"\0", b"\x0b"):
        (path / "config.json").write_bytes(config + more)
        message = "config.json: has more behind its JSON object, want nothing there"
        assert message in refusal("generate", path, "--ids", "1")
    twice = config.replace(b"{", b'{"vocab_size": 999, ', 1)
    (path / "config.json").write_bytes(twice)
    assert "'vocab_size': is there twice, want it once" in refusal("generate", path, "--ids", "1")
    (path / "config.json").write_bytes(config + b" \t\r\n")
    index.unlink()
    assert "model.safetensors: cannot be opened" in refusal("generate", path, "--ids", "1")


@pytest.mark.parametrize("ids", ["", "1,", ",1", "1,x", "-1", "1000", "1;2", "9" * 30])
def test_wrong_tokens(whole: Path, ids: str) -> None:
    assert "want 0 to 999" in refusal("generate", whole, "--ids", ids)
