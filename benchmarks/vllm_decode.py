#!/usr/bin/env python3
"""Tokens a second and memory of requests in vLLM: Doge by the plugin, and a Llama of the same sizes
with vLLM's own attention to all keys.

    vllm_decode.py OUT.json                                  # 4 requests of 4,096 tokens
    vllm_decode.py OUT.json --context 32768 --requests 16    # takes long: the Llama's prompts do

Run it with the Python of an environment that has vLLM and this package; docs/vllm.md says how to
make one. Both engines are in one process. Their prompts come first; then steps of one token for
each request run in turns, and the median of their ratios is printed. Weights are random. The file
has a line of JSON for the machine and the sizes, and one for each engine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

VOCABULARY, PIECE = 1000, 2048


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vllm_decode.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT.json", help="the machine and the engines")
    for name, default, words in (
        ("context", 4096, "tokens of a prompt"),
        ("requests", 4, "requests that are served at the same time"),
        ("steps", 32, "steps that are timed, 3 or more"),
        ("window", 2048, "keys that a query of Doge keeps"),
        ("layers", 4, "layers"),
        ("heads", 4, "query heads"),
        ("kv-heads", 2, "key and value heads"),
        ("gib", 4, "GiB of memory for the requests of each engine"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{words} ({default})")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    if not options.out.absolute().parent.is_dir():
        parser.error(f"OUT.json: is {options.out}, want a file in a folder that is there")
    return options


def tokens_of(options: argparse.Namespace) -> int:
    """New tokens of a request: no request ends while the prompts of others pass, or steps are
    timed."""
    pieces = -(-options.context // PIECE) + 1
    return options.requests * pieces + options.steps


def make_engine(config: Any, options: argparse.Namespace) -> Any:
    from transformers import AutoModelForCausalLM
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return LLM(
            folder,
            dtype=options.dtype,
            max_num_seqs=options.requests,
            max_num_batched_tokens=PIECE,
            max_model_len=options.context + tokens_of(options),
            enable_prefix_caching=False,
            enforce_eager=True,
            skip_tokenizer_init=True,
        ).llm_engine


def fill(engine: Any, options: argparse.Namespace) -> float:
    """Let the prompts pass; the seconds that they took."""
    import torch
    from vllm import SamplingParams

    given = SamplingParams(temperature=0, max_tokens=tokens_of(options), ignore_eos=True)
    given.detokenize = False
    random = torch.Generator().manual_seed(1)
    for number in range(options.requests):
        tokens = torch.randint(VOCABULARY, (options.context,), generator=random).tolist()
        engine.add_request(str(number), {"prompt_token_ids": tokens}, given)
    started, written = time.perf_counter(), set()
    while len(written) < options.requests:
        written |= {one.request_id for one in engine.step() if one.outputs[0].token_ids}
    return time.perf_counter() - started


def running_of(engine: Any) -> list[Any]:
    running: list[Any] = engine.engine_core.engine_core.scheduler.running
    return running


def bytes_of_requests(engine: Any) -> int:
    """By vLLM's own accounting: the pages that are in use."""
    manager = engine.engine_core.engine_core.scheduler.kv_cache_manager
    (group,) = manager.kv_cache_config.kv_cache_groups
    used = manager.block_pool.num_gpu_blocks - 1 - manager.block_pool.get_num_free_blocks()
    return used * group.kv_cache_spec.page_size_bytes * len(group.layer_names)


def rows_of(
    options: argparse.Namespace,
    prompts: dict[str, float],
    seconds: dict[str, list[float]],
    memory: dict[str, float],
) -> list[dict[str, Any]]:
    """A row for each engine: rates, MiB of a request, and rates divided by the rates of "full"."""
    return [
        {
            "engine": name,
            "tokens_per_second": options.requests / statistics.median(own),
            "prompt_tokens_per_second": options.requests * options.context / prompts[name],
            "request_mib": memory[name] / 2**20,
            "ratio": statistics.median(b / a for a, b in zip(own, seconds["full"])),
            "prompt_ratio": prompts["full"] / prompts[name],
        }
        for name, own in seconds.items()
    ]


def main() -> int:
    options = parse()
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(options.gib)
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"})
    import torch
    import transformers
    import vllm
    from machine import describe_machine, write_whole
    from transformers import DogeConfig, LlamaConfig

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64 * options.heads}
    sizes.update({"intermediate_size": 128 * options.heads, "num_hidden_layers": options.layers})
    sizes.update({"num_attention_heads": options.heads, "head_dim": 64})
    sizes.update({"num_key_value_heads": options.kv_heads, "max_position_embeddings": 1 << 17})
    engines = {
        "selected": make_engine(DogeConfig(**sizes, keep_window_size=options.window), options),
        "full": make_engine(LlamaConfig(**sizes), options),
    }
    model = engines["selected"].vllm_config.model_config
    if not model.is_attention_free:  # vLLM then computes attention to all keys, by transformers
        print("vllm_decode.py: vLLM has not found the plugin of flash_dmattn", file=sys.stderr)
        return 1
    prompts = {name: fill(engine, options) for name, engine in engines.items()}
    memory = {name: bytes_of_requests(x) / options.requests for name, x in engines.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(options.steps):
        for name, engine in engines.items():
            started = time.perf_counter()
            engine.step()
            seconds[name].append(time.perf_counter() - started)
    if any(len(running_of(engine)) < options.requests for engine in engines.values()):
        print("vllm_decode.py: want more --gib, as requests waited", file=sys.stderr)
        return 1
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    machine = describe_machine("cpu", **versions, vllm=vllm.__version__)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    rows = rows_of(options, prompts, seconds, memory)
    write_whole(options.out, [{**machine, **settings}, *rows])
    sizes_said = f"{options.requests} requests of {options.context} tokens"
    print(f"{sizes_said}, window {options.window}, {options.dtype}")
    for row in rows:
        speed = f"{row['engine']:9} {row['tokens_per_second']:8.1f} tokens/s"
        first = f"prompts {row['prompt_tokens_per_second']:9.0f} tokens/s"
        print(f"{speed}, {first}, {row['request_mib']:7.2f} MiB a request")
    print(f"times as fast: {rows[0]['ratio']:.2f}, prompts {rows[0]['prompt_ratio']:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
