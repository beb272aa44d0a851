"""Small models in folders, an engine of vLLM in this process, and requests for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import flash_dmattn.transformers as ours
import torch
import transformers

os.environ.update(
    {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DISABLE_COMPILE_CACHE": "1",
    }
)
ours.register()

VOCABULARY = 1000
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
}
HYBRID = {**SIZES, "pad_token_id": None, "sliding_keys": 24, "selecting_keys": 64}
CONFIGS: dict[str, Any] = {
    "doge": lambda: transformers.DogeConfig(**SIZES, keep_window_size=48),
    "doge with biases": lambda: transformers.DogeConfig(
        **SIZES, keep_window_size=100, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "hybrid": lambda: ours.HybridConfig(**HYBRID, selecting_layers=[1, 2]),
    "hybrid with lifetimes": lambda: ours.HybridConfig(
        **HYBRID, selecting_recent=16, lifetime_units=16
    ),
}


def make_model(name: str, folder: Path, ties: bool = False) -> Path:
    """The folder of a model of random weights, whose scores differ between keys. Scores of the
    first layer depend on the token alone, so that equal tokens have equal scores up to rounding;
    unless `ties`, all scores are exactly equal there, and the newest keys stay."""
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    for where, weight in model.named_parameters():
        if where.endswith(".A"):
            if "doge" in name or bool(weight.any()):  # it is 0 in layers that slide
                torch.nn.init.uniform_(weight, 0.5, 2.0)
        elif where.endswith("contract.bias"):
            weight.data.fill_(4.0)
        elif weight.dim() > 1 or "bias" in where:
            wide = "dt_proj" in where or "lifetime_gate" in where
            torch.nn.init.normal_(weight, std=0.5 if wide else 0.08)
    if "doge" in name and not ties:
        model.model.layers[0].self_attn.dt_proj.weight.data.zero_()
    model.save_pretrained(folder)
    return folder


def make_prompts(count: int, most: int = 500, seed: int = 3) -> list[list[int]]:
    """Prompts of 1 to `most` tokens, which differ from each other."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, most + 1, (count,), generator=random).tolist()
    lengths[:3] = [1, 64, 65]  # decode() takes 64 tokens
    rows = [torch.randperm(VOCABULARY, generator=random)[:length] for length in lengths[:count]]
    return [row.tolist() for row in rows]


# When vLLM deletes an engine it closes the process groups that all engines of a process share.
engines: list[Any] = []


def make_engine(folder: Path, **changes: Any) -> Any:
    from vllm import LLM

    options = {"dtype": "float32", "max_num_seqs": 64, "max_num_batched_tokens": 512}
    options.update({"max_model_len": 1024, "enforce_eager": True, "skip_tokenizer_init": True})
    options["num_gpu_blocks_override"] = 80
    engines.append(LLM(str(folder), **{**options, **changes}))
    return engines[-1].llm_engine


def parameters(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def scheduler_of(engine: Any) -> Any:
    return engine.engine_core.engine_core.scheduler


def pages_in_use(engine: Any) -> int:
    """By vLLM's own accounting; it keeps one page for itself."""
    pool = scheduler_of(engine).kv_cache_manager.block_pool
    return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()


def serve(
    engine: Any,
    prompts: list[list[int]],
    tokens: int = 16,
    gap: int = 0,
    after_step: Any = None,
) -> list[list[int]]:
    """The tokens of each request. A request arrives every `gap` steps; 0: all at once.
    after_step(step) is called after each step."""
    found: dict[str, list[int]] = {}
    arrived = step = 0
    while len(found) < len(prompts):
        while arrived < len(prompts) and step >= gap * arrived:
            given = {"prompt_token_ids": prompts[arrived]}
            engine.add_request(str(arrived), given, parameters(tokens))
            arrived += 1
        for one in engine.step():
            if one.finished:
                found[one.request_id] = list(one.outputs[0].token_ids)
        step += 1
        if after_step is not None:
            after_step(step)
    return [found[str(number)] for number in range(len(prompts))]


def load(folder: Path, implementation: str, dtype: torch.dtype) -> Any:
    given: dict[str, Any] = {"attn_implementation": implementation, "dtype": dtype}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **given).eval()


@torch.no_grad()
def first_logprobs(folder: Path, prompts: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    """[prompts, vocabulary]: logarithms of probabilities of the token after each prompt."""
    model = load(folder, "dynamic_mask", dtype)
    last = [model(torch.tensor([prompt]), use_cache=False).logits[0, -1] for prompt in prompts]
    return torch.stack(last).float().log_softmax(1)


@torch.no_grad()
def generate(
    folder: Path, prompts: list[list[int]], tokens: int = 16, implementation: str = "dynamic_mask"
) -> list[list[int]]:
    """The tokens that transformers generates for each prompt alone."""
    model, found = load(folder, implementation, torch.float32), []
    for prompt in prompts:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False)
        found.append(out[0, len(prompt) :].tolist())
    return found
