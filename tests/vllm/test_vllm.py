"""Models served by vLLM against the same models in transformers, and what the plugin refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flash_dmattn.vllm
import pytest
import serving
import torch
from serving import generate, make_engine, make_model, make_prompts, pages_in_use, serve

NAMES = list(serving.CONFIGS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_model(name, tmp_path_factory.mktemp("model")) for name in NAMES}


@pytest.fixture(scope="module")
def doge(folders: dict[str, Path]) -> Any:
    return make_engine(folders["doge"])


@pytest.fixture(scope="module")
def wanted(folders: dict[str, Path]) -> list[list[int]]:
    """The tokens of 64 requests in transformers."""
    return generate(folders["doge"], make_prompts(64))


@pytest.mark.parametrize("count", [1, 8, 64])
def test_requests_at_once(doge: Any, wanted: list[list[int]], count: int) -> None:
    assert serve(doge, make_prompts(64)[:count]) == wanted[:count]


def test_requests_that_arrive_over_time(doge: Any, wanted: list[list[int]]) -> None:
    most = 0

    def count(_: int) -> None:
        nonlocal most
        most = max(most, pages_in_use(doge))

    assert serve(doge, make_prompts(64), gap=1, after_step=count) == wanted
    assert 8 <= most < 64  # requests of different ages were served together


def test_a_request_has_one_page_whatever_its_length(doge: Any) -> None:
    pages = set()
    serve(doge, [list(range(900))], tokens=100, after_step=lambda _: pages.add(pages_in_use(doge)))
    assert pages == {0, 1}  # 0 after its end
    cache = serving.scheduler_of(doge).kv_cache_config
    (group,) = cache.kv_cache_groups
    rows, heads, head_dim, layers = 48, 2, 32, 3
    row = 2 * head_dim * 4 + 12  # key, value; bias, score, position
    assert group.kv_cache_spec.page_size_bytes == layers * heads * rows * row


def test_preempted_requests_begin_again(doge: Any, wanted: list[list[int]]) -> None:
    def preempt(step: int) -> None:
        if step in (5, 11):
            assert pages_in_use(doge) > 0
            serving.scheduler_of(doge).reset_prefix_cache(reset_running_requests=True)
            assert pages_in_use(doge) == 0

    assert serve(doge, make_prompts(64)[:8], after_step=preempt) == wanted[:8]


def test_a_request_that_is_refused_leaves_the_others(doge: Any, wanted: list[list[int]]) -> None:
    for prompt, message in (([], "prompt"), ([7] * 2000, "1024")):
        with pytest.raises(Exception, match=message):  # of a class of vLLM's
            doge.add_request("wrong", {"prompt_token_ids": prompt}, serving.parameters(4))
    assert serve(doge, make_prompts(64)[:4]) == wanted[:4]


def test_an_aborted_request_gives_its_page_back(doge: Any, wanted: list[list[int]]) -> None:
    doge.add_request("left", {"prompt_token_ids": [1, 2, 3]}, serving.parameters(900))
    doge.step()
    assert pages_in_use(doge) == 1
    doge.abort_request(["left"])
    assert serve(doge, make_prompts(64)[:2]) == wanted[:2]
    assert pages_in_use(doge) == 0


def test_few_pages(folders: dict[str, Path], wanted: list[list[int]]) -> None:
    engine = make_engine(folders["doge"], num_gpu_blocks_override=4, max_num_batched_tokens=64)
    most = []
    found = serve(
        engine, make_prompts(64)[:12], after_step=lambda _: most.append(pages_in_use(engine))
    )
    assert found == wanted[:12]
    assert max(most) == 3


@pytest.mark.parametrize("name", NAMES[1:])
def test_other_models(folders: dict[str, Path], name: str) -> None:
    prompts = make_prompts(24, seed=len(name))
    assert serve(make_engine(folders[name]), prompts, gap=1) == generate(folders[name], prompts)


def test_attention_of_transformers_itself(tmp_path: Path) -> None:
    """Up to the first token that occurs twice: torch.topk() takes any of equal scores."""
    folder, prompts = make_model("doge", tmp_path, ties=True), make_prompts(16, most=300)
    compared = 0
    for prompt, found, eager in zip(
        prompts, serve(make_engine(folder), prompts), generate(folder, prompts, 16, "eager")
    ):
        seen = set(prompt)
        for a, b in zip(found, eager):
            assert a == b
            compared += 1
            if a in seen:
                break
            seen.add(a)
    assert compared >= 16


def test_bfloat16(folders: dict[str, Path]) -> None:
    """The logarithms of probabilities of first tokens: at most twice the error of transformers."""
    from vllm import SamplingParams

    prompts, folder = make_prompts(8), folders["doge"]
    given = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
    engine = make_engine(folder, dtype="bfloat16", max_logprobs=-1)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, given)
    rows: dict[str, torch.Tensor] = {}
    while len(rows) < len(prompts):
        for one in engine.step():
            tokens = one.outputs[0].logprobs[0]
            row = [tokens[token].logprob for token in range(serving.VOCABULARY)]
            rows[one.request_id] = torch.tensor(row)
    exact = serving.first_logprobs(folder, prompts, torch.float32)
    plain = serving.first_logprobs(folder, prompts, torch.bfloat16)
    found = torch.stack([rows[str(number)] for number in range(len(prompts))])
    assert (found - exact).square().mean() <= 4 * (plain - exact).square().mean()


# ---- torch.compile and CUDA graphs ----


@pytest.mark.parametrize("name", ["doge", "hybrid with lifetimes"])
def test_compiled_layers(folders: dict[str, Path], name: str) -> None:
    """One graph for steps of all kinds, by inductor, as vLLM compiles on a CPU by default."""
    prompts = make_prompts(16)
    engine = make_engine(folders[name], enforce_eager=False)
    assert engine.vllm_config.compilation_config.backend == "inductor"
    assert serve(engine, prompts, gap=1) == generate(folders[name], prompts)


@pytest.mark.parametrize("name", ["doge", "hybrid with lifetimes"])
def test_attention_stands_between_compiled_pieces(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As vLLM compiles on a GPU, where it captures each piece, and calls attention between them."""
    from vllm.compilation.counter import compilation_counter
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    on_cpu = CpuPlatform.check_and_update_config

    def as_on_gpu(config: Any) -> None:
        on_cpu(config)
        own = config.compilation_config
        own.mode, own.backend, own.compile_sizes = CompilationMode.VLLM_COMPILE, "eager", []

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(as_on_gpu))
    prompts, layers = make_prompts(16), 3
    engine = make_engine(folders[name], enforce_eager=False)
    with compilation_counter.expect(num_piecewise_graphs_seen=0):
        found = serve(engine, prompts, gap=1)  # nothing is compiled anew
    assert compilation_counter.num_piecewise_capturable_graphs_seen % (layers + 1) == 0
    assert compilation_counter.num_piecewise_graphs_seen % (2 * layers + 1) == 0
    assert compilation_counter.num_piecewise_graphs_seen > 0
    assert found == generate(folders[name], prompts)


def test_steps_of_decoding_can_be_captured(doge: Any) -> None:
    """vLLM asks the builder which steps it may capture whole, and replays them with its pages."""
    from flash_dmattn.vllm.states import StepBuilder
    from vllm.v1.attention.backend import AttentionCGSupport

    found = StepBuilder.get_cudagraph_support(doge.vllm_config, None)
    assert found == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    runner = doge.model_executor.driver_worker.worker.model_runner
    (builder,) = runner.attn_groups[0][0].metadata_builders
    places = set()

    def find_place(_: int) -> None:
        places.add(builder.maker.pages.data_ptr())

    serve(doge, make_prompts(4), after_step=find_place)
    assert len(places) == 1


@pytest.mark.parametrize("name", ["doge with biases", "hybrid with lifetimes"])
def test_two_ranks(folders: dict[str, Path], name: str) -> None:
    """Tensor parallelism, in processes that vLLM starts, which find the plugin by themselves."""
    ranks = Path(__file__).with_name("ranks.py")
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    done = subprocess.run(
        [sys.executable, str(ranks), str(folders[name])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [
        list(map(int, line.split())) for line in done.stdout.splitlines() if line[:1].isdigit()
    ]
    assert found == generate(folders[name], make_prompts(6))


# ---- what is refused ----


@pytest.mark.parametrize("version", ["0.30.1", "0.33.0", "1.0", "0.32.1rc2", "0.31.0+cpu"])
def test_versions(version: str) -> None:
    if version.startswith(("0.31", "0.32")):
        flash_dmattn.vllm.check_version(version)
        return
    with pytest.raises(ImportError, match=f"vllm: is {version}, want 0.31 or 0.32"):
        flash_dmattn.vllm.check_version(version)


def test_another_version_serves_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin refuses its own models alone."""
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    flash_dmattn.vllm.register()
    with pytest.raises(ImportError, match="vllm: is 0.99.0, want 0.31 or 0.32"):
        _ = flash_dmattn.vllm.DogeForCausalLM


def config(**changes: Any) -> Any:
    """The fields of vLLM's configuration that check_config() reads."""
    names = ("speculative_config", "kv_transfer_config", "lora_config")
    own = {name: changes.get(name) for name in names}
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    cache = {"enable_prefix_caching": False, "cache_dtype": "auto"}
    parallel.update({name: changes[name] for name in parallel if name in changes})
    cache.update({name: changes[name] for name in cache if name in changes})
    model = SimpleNamespace(hf_config=SimpleNamespace(num_key_value_heads=2))
    rest = {
        "parallel_config": SimpleNamespace(**parallel),
        "cache_config": SimpleNamespace(**cache),
    }
    return SimpleNamespace(**own, **rest, model_config=model)


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"speculative_config": object()}, "speculative_config: is given, want None"),
        ({"kv_transfer_config": object()}, "kv_transfer_config: is given, want None"),
        ({"lora_config": object()}, "lora_config: is given, want None"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: is 2, want 1"),
        ({"cache_dtype": "fp8"}, "kv_cache_dtype: is fp8, want auto"),
        ({"tensor_parallel_size": 4}, "tensor_parallel_size: is 4, want a divisor of .*, 2"),
    ],
)
def test_settings(setting: dict[str, Any], message: str) -> None:
    from flash_dmattn.vllm.model import check_config

    check_config(config())
    with pytest.raises(NotImplementedError, match=message):
        check_config(config(**setting))


def test_prefix_caching(folders: dict[str, Path]) -> None:
    message = "enable_prefix_caching: is True, want False: the state after a prefix is gone"
    with pytest.raises(NotImplementedError, match=message):
        make_engine(folders["doge"], enable_prefix_caching=True)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("doge", {"is_moe": True}, "is_moe: is True, want False"),
        ("doge", {"sliding_window": 16}, "sliding_window: is 16, want None"),
        ("hybrid", {"sliding_keys": None}, "sliding_keys: is None, want a number"),
    ],
)
def test_models(name: str, change: dict[str, Any], message: str) -> None:
    from flash_dmattn.vllm import doge, hybrid

    given = serving.CONFIGS[name]()
    for field, value in change.items():
        setattr(given, field, value)
    kind: Any = doge.DogeForCausalLM if name == "doge" else hybrid.HybridForCausalLM
    own = config()
    own.model_config.hf_config = given
    with pytest.raises(NotImplementedError, match=message):
        kind(vllm_config=own)


@pytest.mark.parametrize(
    "weights, message",
    [
        ({}, "gate_proj.weight: is not in the folder, nor are 2 more"),
        ({"layer.weight": [1.0, float("nan")]}, "layer.weight: has numbers that are not finite"),
        ({"layer.weight": [1.0, 2.0], "more.weight": [1.0]}, "more.weight: is in the folder, but"),
        ({"layer.weight": [1.0, 2.0]}, "up_proj.weight: is not in the folder, nor are 0 more"),
    ],
)
def test_weights(weights: dict[str, list[float]], message: str) -> None:
    from flash_dmattn.vllm.model import CausalLM

    model = CausalLM.__new__(CausalLM)
    torch.nn.Module.__init__(model)
    model.is_tied, model.layer = False, torch.nn.Module()
    model.layer.weight = torch.nn.Parameter(torch.zeros(2))
    model.gate_up_proj = torch.nn.Module()
    model.gate_up_proj.weight = torch.nn.Parameter(torch.zeros(2))
    model.gate_up_proj.weight.weight_loader = lambda *_: None
    if weights:
        weights = {**weights, "gate_proj.weight": [1.0]}
    pairs = [(name, torch.tensor(numbers)) for name, numbers in weights.items()]
    with pytest.raises(ValueError, match=message):
        model.load_weights(pairs)
