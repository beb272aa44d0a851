"""The plugin for vLLM as far as it needs no vLLM. tests/vllm has the rest."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flash_dmattn
import flash_dmattn.vllm
import pytest
import torch
import vllm_decode
import vllm_layer
from cases import on_device
from flash_dmattn import streams
from flash_dmattn._signatures import BiasForm
from flash_dmattn.vllm import pages
from flash_dmattn.vllm.pages import Pages, Rules, StepMaker
from programs import ROOT, output_of, python


def test_nothing_is_imported_before_vllm_asks() -> None:
    code = "import sys, flash_dmattn.vllm; print({'vllm', 'transformers'} & {*sys.modules})"
    assert output_of(python("-c", code)).strip() == "set()"


def test_entry_point() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    entry = (
        '[project.entry-points."vllm.general_plugins"]\nflash_dmattn = "flash_dmattn.vllm:register"'
    )
    assert entry in text


@pytest.mark.parametrize("version", ["0.31.0", "0.32.1rc2", "0.32.0+cpu"])
def test_supported_versions(version: str) -> None:
    flash_dmattn.vllm.check_version(version)


@pytest.mark.parametrize("version", ["0.30.1", "0.33.0", "1.32", "0.3.2"])
def test_another_version_refuses_the_models(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pytest.importorskip("transformers")
    models: dict[str, str] = {}
    registry = SimpleNamespace(register_model=models.__setitem__)
    fake = SimpleNamespace(ModelRegistry=registry, __version__=version)
    monkeypatch.setitem(sys.modules, "vllm", fake)  # type: ignore[arg-type]
    flash_dmattn.vllm.register()
    assert models["DogeForCausalLM"] == "flash_dmattn.vllm:DogeForCausalLM"
    for name in models:
        with pytest.raises(ImportError, match=f"vllm: is {version}, want 0.31 or 0.32"):
            getattr(flash_dmattn.vllm, name)
    with pytest.raises(AttributeError, match="has no attribute 'Other'"):
        flash_dmattn.vllm.Other  # noqa: B018


@pytest.mark.parametrize("form", ["exp", "linear", "none"])
@pytest.mark.parametrize("length", [90, 200])
def test_pieces_with_scores_equal_pieces_with_weights(form: str, length: int) -> None:
    """Two pieces that enter a cache, one with given scores and one with the weights of these."""
    torch.manual_seed(length)
    weights = (torch.randn(2, 32) / 4, torch.rand(2))
    query, key, value = torch.randn(1, length, 4, 16), *torch.randn(2, 1, length, 2, 16)
    score, _ = flash_dmattn.score(value, *weights, bias_form="none")
    found, caches = [], []
    for scored in (False, True):
        cache = flash_dmattn.DynamicMaskCache(1, 1, 2, 16, 24, recent=8, bias_form=form)
        out, index = [], torch.zeros(1, dtype=torch.int32)
        for first, last in ((0, 70), (70, length)):
            rows: Any = [x[:, first:last] for x in (query, key, value)]
            given = (None, None, None) if scored else (*weights, None)
            own = score[:, :, first:last].contiguous() if scored else None
            rest: Any = (None, None, None, None, (form, 0.25, 0.0, None), own)
            carried = cache.keys if first > 0 else None
            tokens = streams.Tokens._make((*rows, given, *rest))
            out.append(streams.prefill(cache.keys, index, carried, tokens))
        found.append(torch.cat(out, 1))
        caches.append(cache.keys)
    torch.testing.assert_close(*found)  # biases differ in last bits
    for one, other in zip(*(keys[:6] for keys in caches)):
        assert torch.equal(one, other)


# ---- steps and pages, which do not need vLLM ----


def test_requests_of_different_ages() -> None:
    """Packed steps of prompts in pieces and of decoding against each request alone, also through
    one traced graph for steps of all kinds."""
    with torch.inference_mode():
        row = vllm_layer.check_requests("cpu")
    assert row["kinds of steps"] == 2
    assert row["traced, equal"]


def make_states(requests: int) -> tuple[Pages, StepMaker]:
    states = Pages([Rules(4), Rules(2, 1), Rules(4)], 2, 8, torch.float32)
    tensors = [torch.ones(requests + 1, *own) for own in states.shapes()]
    states.use([x.to(dtype) for x, dtype in zip(tensors, states.dtypes())])
    return states, StepMaker(states, requests, "cpu")


def test_bytes_of_a_page() -> None:
    states, _ = make_states(1)
    rows = 2 * 4 + 2 + 1
    assert states.page_bytes() == 2 * rows * (2 * 8 * 4 + 12)


def test_steps_of_decoding_have_one_place() -> None:
    """A CUDA graph reads the pages of each step in the memory where it was captured."""
    states, maker = make_states(4)
    for table, wanted in (([3, 1, 2, 0], [3, 1, 2, -1]), ([2, 4, 0, 0], [2, 4, -1, -1])):
        count = sum(page > 0 for page in table)
        starts = [min(n, count) for n in range(5)]
        step = maker.make(starts, [9] * count + [0] * (4 - count), torch.tensor(table))
        assert step.pages.tolist() == wanted
        assert step.pages.data_ptr() == maker.pages.data_ptr()
        assert step.requests is None


def test_padding_takes_part_in_nothing() -> None:
    """Requests without tokens that have pages, more requests than tokens, and tokens of none."""
    states, maker = make_states(4)
    step = maker.make([0, 1, 2, 2], [1, 1, 5], torch.tensor([1, 2, 3]))
    before = [x.clone() for cache in states.caches for x in cache[:6]]
    for tokens in (2, 5):
        query, key, value = torch.randn(tokens, 4, 8), *torch.randn(2, tokens, 2, 8)
        out = torch.full_like(query, 7)
        states.attend(1, step, query, key, value, torch.randn(2, tokens), out, 0.5)
        assert (out[2:3] == 0).all()  # of the third request, which has no page
        assert (out[3:] == 7).all()
        assert not (out[:2] == 7).any()
    after = [x for cache in states.caches for x in cache[:6]]
    assert states.caches[1].seen.tolist() == [0, 2, 2, 0, 0]
    for old, new in zip(before, after):
        assert torch.equal(old[[0, 3, 4]], new[[0, 3, 4]])


@pytest.mark.parametrize("count", [1, 2])
def test_requests_without_tokens_may_have_any_page(count: int) -> None:
    """Steps of decoding and mixed ones. A request without tokens has the page of another one, and
    there are more requests than pages."""
    states, _ = make_states(2)
    maker = StepMaker(states, 5, "cpu")
    starts = [0, count, count + 1, count + 1, count + 1, count + 1]
    step = maker.make(starts, [count, 1, 9, 0, 0], torch.tensor([1, 2, 1, 0, 0]))
    tokens = count + 1
    query, key, value = torch.randn(tokens, 4, 8), *torch.randn(2, tokens, 2, 8)
    out = torch.full_like(query, 7)
    states.attend(0, step, query, key, value, torch.randn(2, tokens), out, 0.5)
    assert states.seen[0].tolist() == [0, count, 1]
    assert not (out == 7).any()


def test_more_requests_without_a_page_than_pages() -> None:
    states, _ = make_states(1)
    maker = StepMaker(states, 4, "cpu")
    step = maker.make([0, 1, 3, 4, 5], [1, 2, 1, 1], torch.tensor([0, 1, 0, 0]))
    query, key, value = torch.randn(5, 4, 8), *torch.randn(2, 5, 2, 8)
    out = torch.full_like(query, 7)
    states.attend(0, step, query, key, value, torch.randn(2, 5), out, 0.5)
    assert states.seen[0].tolist() == [0, 2]
    assert [bool((row == 0).all()) for row in out] == [True, False, False, True, True]


def test_only_pages_of_new_requests_are_emptied() -> None:
    states, maker = make_states(3)
    states.seen.fill_(5)
    maker.make([0, 70, 71, 72], [70, 9, 1], torch.tensor([3, 1, 2]))
    assert states.seen.tolist() == [[5, 5, 0, 0]] * 3
    for cache in states.caches:
        assert (cache.position[:2] == 1).all()
        assert (cache.position[2:] == -1).all()


STEPS = ((0, 1, 70, 0, 9), (2, 1, 66, 3, 9), (1, 1, 1, 64, 9), (130, 1, 1, 65, 9))  # new tokens


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_device)])
@pytest.mark.parametrize("form", ["exp", "linear", "none"])
def test_packed_tokens_are_as_decoded_one_by_one(form: BiasForm, device: str) -> None:
    """Requests in any order of sequences, and one without a sequence, whose rows of out stay. The
    caches have the same bits; out differs in rounding."""
    torch.manual_seed(3)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shape: Any = {"kv_heads": 2, "head_dim": 16, "window": 24, "recent": 8, "sinks": 1}
    shape.update(bias_form=form, dtype=dtype, device=device)
    packed, single = (flash_dmattn.DynamicMaskCache(1, 5, **shape).keys for _ in range(2))
    sequences = [3, 0, 4, 1, -1]
    for new in STEPS:
        starts = [sum(new[:n]) for n in range(6)]
        sizes = (4, 2, 2)
        query, key, value = (torch.randn(starts[-1] + 2, n, 16).to(device, dtype) for n in sizes)
        score = torch.randn(2, starts[-1] + 2).to(device)
        out = torch.full_like(query, 7)
        requests = streams.Requests.of(starts, sequences)
        streams.prefill_packed((query, key, value), score, out, packed, requests, form, 0.25)
        wanted = torch.full_like(query, 7)
        for n in range(4):
            index = torch.tensor([sequences[n]], dtype=torch.int32, device=device)
            for t in range(starts[n], starts[n + 1]):
                rows: Any = (x[None, t : t + 1] for x in (query, key, value))
                own: Any = {"score": score[None, :, t : t + 1].contiguous(), "index": index}
                own.update(bias_form=form, softmax_scale=0.25)
                wanted[t] = flash_dmattn.decode(*rows, single, **own)[0, 0]
        near = 1e-5 if device == "cpu" else 0.03
        torch.testing.assert_close(out, wanted, rtol=near, atol=near)
        assert torch.equal(packed.seen, single.seen)
        assert torch.equal(packed.position, single.position)
        kept = single.position >= 0
        for one, other in zip(packed[2 + (form == "none") : 4], single[2 + (form == "none") : 4]):
            assert torch.equal(one[kept], other[kept])
        for one, other in zip(packed[:2], single[:2]):
            assert torch.equal(one.transpose(1, 2)[kept], other.transpose(1, 2)[kept])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_device)])
def test_more_requests_than_a_launch_lists(device: str) -> None:
    """A device gets the list of sequences 512 numbers at a time."""
    torch.manual_seed(4)
    count, dtype = 1050, torch.float32 if device == "cpu" else torch.bfloat16
    shape: Any = {"kv_heads": 1, "head_dim": 8, "window": 4, "dtype": dtype, "device": device}
    packed, single = (flash_dmattn.DynamicMaskCache(1, count, **shape).keys for _ in range(2))
    order = torch.randperm(count)
    for _ in range(2):
        rows: Any = [torch.randn(count, 1, 8).to(device, dtype) for _ in range(3)]
        score, out = torch.randn(1, count).to(device), torch.empty_like(rows[0])
        requests = streams.Requests.of(range(count + 1), order.tolist())
        streams.prefill_packed(rows, score, out, packed, requests, "exp", 1.0)
        own: Any = {"score": score.view(count, 1, 1), "index": order.int().to(device)}
        alone: Any = (x[:, None] for x in rows)
        wanted = flash_dmattn.decode(*alone, single, softmax_scale=1.0, **own)
        assert torch.equal(out, wanted[:, 0])
    for one, other in zip(packed, single):
        assert not isinstance(one, torch.Tensor) or torch.equal(one, other)


def test_two_requests_in_one_sequence() -> None:
    cache = flash_dmattn.DynamicMaskCache(1, 3, kv_heads=2, head_dim=8, window=4).keys
    query, key, value = torch.randn(5, 4, 8), *torch.randn(2, 5, 2, 8)
    score, out = torch.randn(2, 5), torch.full_like(query, 7)
    for lists, message in (
        (([0, 2, 5], [1, 1]), "index: element 1 is 1, want a number that it has only once"),
        (([0, 2, 6], [1, 2]), "starts: element 2 is 6, want 2 to 5"),
        (([0, 2, 5], [1, 3]), "index: element 1 is 3, want -1 to 2"),
    ):
        requests = streams.Requests.of(*lists)
        with pytest.raises(ValueError, match=message):
            streams.prefill_packed((query, key, value), score, out, cache, requests, "exp", 1.0)
    with pytest.raises(ValueError, match="starts: has 2 numbers, want 4"):
        streams.Requests.of([0, 2], [0, 1, 2])
    with pytest.raises(ValueError, match=r"score: axis 1 has 4 elements, query has 5; score is"):
        requests = streams.Requests.of([0, 2, 5], [1, 2])
        rows = (query, key, value)
        streams.prefill_packed(rows, score[:, :4], out, cache, requests, "exp", 1.0)
    assert (out == 7).all() and cache.seen.tolist() == [0, 0, 0]


def test_no_engine() -> None:
    with pytest.raises(RuntimeError, match="model.states: no engine serves this model, want one"):
        pages.no_engine("model.states")


# ---- benchmarks/vllm_decode.py ----


class FakeEngine:
    """An engine, as far as the benchmark reads it. A request has a page of 3 MiB in 2 layers."""

    def __init__(self, config: Any) -> None:
        is_doge = config.model_type == "doge"
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(is_attention_free=is_doge))
        spec = SimpleNamespace(page_size_bytes=3 << 20)
        group = SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"])
        self.running: list[Any] = []
        free = lambda: 9 - len(self.running)  # noqa: E731
        pool = SimpleNamespace(num_gpu_blocks=10, get_num_free_blocks=free)
        kept = SimpleNamespace(kv_cache_groups=[group])
        manager = SimpleNamespace(kv_cache_config=kept, block_pool=pool)
        scheduler = SimpleNamespace(running=self.running, kv_cache_manager=manager)
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))

    def add_request(self, name: str, prompt: dict[str, list[int]], _: Any) -> None:
        assert len(prompt["prompt_token_ids"]) == 50
        outputs = [SimpleNamespace(token_ids=[1])]
        self.running.append(SimpleNamespace(request_id=name, outputs=outputs))

    def step(self) -> list[Any]:
        return self.running


def test_decoding_is_written_to_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "")  # restored after the test
    fake = SimpleNamespace(SamplingParams=SimpleNamespace, __version__="0.32.0")
    monkeypatch.setitem(sys.modules, "vllm", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(vllm_decode, "make_engine", lambda config, _: FakeEngine(config))
    file = tmp_path / "out.json"
    words = ["vllm_decode.py", str(file), "--context", "50", "--requests", "3", "--steps", "5"]
    monkeypatch.setattr(sys, "argv", words)
    assert vllm_decode.main() == 0
    machine, *rows = map(json.loads, file.read_text().splitlines())
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    wanted = {**versions, "vllm": "0.32.0", "device": "cpu", "context": 50, "requests": 3}
    assert wanted.items() <= machine.items() and {"machine", "date", "commit"} <= machine.keys()
    assert [row["engine"] for row in rows] == ["selected", "full"]
    assert [row["request_mib"] for row in rows] == [6, 6]
    assert rows[1]["ratio"] == rows[1]["prompt_ratio"] == 1


def test_rows_of_decoding() -> None:
    options = SimpleNamespace(requests=4, context=100)
    seconds = {"selected": [2.0, 1.0, 1.0], "full": [4.0, 5.0, 3.0]}
    prompts, memory = {"selected": 8.0, "full": 20.0}, {"selected": 1 << 20, "full": 3 << 19}
    own, full = vllm_decode.rows_of(options, prompts, seconds, memory)
    assert own == {
        "engine": "selected",
        "tokens_per_second": 4.0,
        "prompt_tokens_per_second": 50.0,
        "request_mib": 1.0,
        "ratio": 3.0,
        "prompt_ratio": 2.5,
    }
    assert (full["tokens_per_second"], full["request_mib"], full["ratio"]) == (1.0, 1.5, 1.0)


def test_a_file_of_decoding_in_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["vllm_decode.py", str(tmp_path / "none" / "out.json")])
    with pytest.raises(SystemExit):
        vllm_decode.main()
