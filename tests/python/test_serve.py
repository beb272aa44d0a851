"""examples/serve.py: a batch gives the same tokens as each request alone, as dense attention if no
key is evicted, and as the model without drafts."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import warm
from cases import on_device
from programs import ROOT, output_of
from samples import combinations
from torch.testing import assert_close

SIZES = "--layers 2 --width 32 --heads 4 --kv-heads 2 --head-dim 8 --requests 9 --sequences 4"
SMALL = f"{SIZES} --prompt 3:90 --output 2:20 --gap 1.5"
EVICTING = f"{SMALL} --window 12 --recent 4"
ON_CPU = "--device cpu"


@pytest.fixture
def example(exact_products: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Equal bytes have equal scores in the first layer."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import serve
    import serve_draft
    import serve_full
    import serve_loop
    import serve_model

    modules = (serve, serve_draft, serve_full, serve_loop, serve_model)
    return SimpleNamespace(**{one.__name__: one for one in modules}, main=serve.main)


def make(example: Any, arguments: str) -> tuple[Any, dict[str, Any]]:
    """The options, and the servers of the same model."""
    options = example.serve.parse(arguments.split())
    return options, example.serve.make_servers(options, example.serve.make_model(options))


@torch.no_grad()
def serve(example: Any, server: Any, options: Any) -> Any:
    text = example.serve.read_text(example.serve.TEXT).held_out
    for pool in server.pools:
        pool.reset()
    return server.serve(example.serve_loop.make_requests(options, text))


# ---- tokens ----


@pytest.mark.parametrize("piece", [7, 64, 80])
def test_dense_attention_makes_the_same_tokens(
    piece: int, example: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pieces of prompts run inside batches, or as prefills."""
    arguments = f"{SMALL} {ON_CPU} --check --window 110 --draft 2 --piece {piece}"
    assert example.main(arguments.split()) == 0
    words = "9 of 9 requests have the same tokens as fdma"
    assert capsys.readouterr().out.splitlines() == [f"full: {words}", f"drafts: {words}"]


def test_a_sequence_that_is_not_emptied_is_found(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example.serve_model.BoundedPool, "drop", lambda pool, b: None)
    assert example.main(f"{SMALL} {ON_CPU} --check --window 500".split()) == 1
    assert "of 9 requests" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "piece"), combinations(["fdma", "full"], [7, 80]))
def test_a_batch_makes_the_tokens_of_each_request_alone(
    name: str, piece: int, example: Any
) -> None:
    """The same holds if each sequence has a row in every step, as in a CUDA graph."""
    options, servers = make(example, f"{EVICTING} {ON_CPU} --piece {piece}")
    server = servers[name]
    batched = serve(example, server, options)
    assert len(batched.seconds) < sum(map(len, batched.tokens)), "requests are batched"
    alone, others = make(example, f"{EVICTING} {ON_CPU} --piece {piece} --sequences 1")
    assert serve(example, others[name], alone).tokens == batched.tokens
    server.has_all_rows = True
    assert serve(example, server, options).tokens == batched.tokens
    lengths = {len(one) for one in batched.tokens}
    assert min(lengths) >= 2 and max(lengths) <= 20 and len(lengths) > 3


def test_evicted_keys_matter(example: Any) -> None:
    """The tokens of the tests above depend on the keys that a query keeps."""
    options, servers = make(example, f"{EVICTING} {ON_CPU}")
    found, other = (serve(example, servers[name], options).tokens for name in ("fdma", "full"))
    assert sum(a != b for a, b in zip(found, other)) > 5


@pytest.mark.parametrize(("draft", "layers"), [(1, 1), (4, 1), (3, 2)])
def test_drafts_do_not_change_the_tokens(draft: int, layers: int, example: Any) -> None:
    """Drafts of the whole model are always right; drafts of one layer, after some training,
    sometimes."""
    drafting = f"--draft {draft} --draft-layers {layers} --train 30"
    options, servers = make(example, f"{EVICTING} {ON_CPU} {drafting}")
    plain = serve(example, servers["fdma"], options)
    server = servers["drafts"]
    found = serve(example, server, options)
    assert found.tokens == plain.tokens
    assert 0 < server.right <= server.drafted
    assert (server.right == server.drafted) == (layers == 2)
    assert len(found.seconds) < len(plain.seconds)


def test_context(example: Any) -> None:
    """Requests begin after random keys, in every server."""
    arguments = f"{EVICTING} {ON_CPU} --context 200 --sequences 9 --draft 1 --output 3:3"
    options, servers = make(example, arguments)
    results = example.serve.serve_in_turns(servers, options, torch.arange(50), 1)
    assert {len(tokens) for (one,) in results.values() for tokens in one.tokens} == {3}
    assert [len(one.seconds) for (one,) in results.values()][:2] == [3, 3], "all begin at once"
    keys = servers["fdma"].pool.cache.keys
    servers["fdma"].pool.fill(200)
    position = keys.position[0, 0].tolist()
    assert position[12:] == [196, 197, 198, 199]
    assert len(set(position)) == 16 and max(position[:12]) < 196
    assert (keys.seen == 200).all() and torch.equal(keys.bias, keys.score.exp())


# ---- the command ----


def test_times(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"{EVICTING} {ON_CPU} --draft 2 --rounds 2 --out {tmp_path}"
    assert example.main(arguments.split()) == 0
    sys.path.remove(str(ROOT / "benchmarks"))
    printed = capsys.readouterr().out
    machine, *rows = map(json.loads, (tmp_path / "serve-cpu.json").read_text().splitlines())
    assert machine["device"] == "cpu"
    assert [row["peer"] for row in rows] == ["fdma", "full", "drafts"]
    assert {row["case"] for row in rows} == {"serve/float32/b4/2/h4g2/d8/p3-90/w12+4"}
    assert rows[0]["times"] == 1 and rows[1]["kernel"] == "sdpa" and 0 <= rows[2]["accepted"] < 1
    for row in rows:
        assert row["tokens_per_second"] > 0 and 0 < row["ms"] <= row["ms_p99"]
        assert f"{row['peer']:7} {row['tokens_per_second']:10.1f}" in printed
    rows_of_layer = 4 * 2 * 16  # sequences, kv heads, window + recent
    assert rows[0]["cache_bytes"] == 2 * (rows_of_layer * (2 * 8 * 4 + 12) + 4 * 4)
    assert rows[1]["cache_bytes"] == 2 * 2 * 4 * 192 * 2 * 8 * 4, "90 + 20 + 64 keys, rounded up"


def test_as_a_script() -> None:
    arguments = f"{SMALL} {ON_CPU} --check --window 110".split()
    done = warm.python(ROOT / "examples" / "serve.py", *arguments)
    assert output_of(done) == "full: 9 of 9 requests have the same tokens as fdma\n"


BAD = {
    "--requests: is 0, want 1 or more": "--requests 0",
    "--heads: want a multiple of --kv-heads": "--heads 3",
    "--head-dim: is 12, want a multiple of 8": "--head-dim 12",
    "--draft: is 64, want 63 or less": "--draft 64",
    "--draft-layers: want --layers or less": "--draft-layers 9",
    "--device: is tpu, want cuda or cpu": "--device tpu",
    "--out: nowhere is not a folder": "--out nowhere",
    "--context: is 5, want 0, or --window + --recent or more": "--context 5",
    "--context: want as many --sequences as --requests": "--context 500",
    "--check: want --window 144 or more, to evict no key": "--check",
    "--check: want neither --context nor --train": "--check --window 500 --train 1",
    "--prompt: is '4', want LEAST:MOST, such as 16:64": "--prompt 4",
    "--output: is 5:4, want 1 or more, and LEAST up to MOST": "--output 5:4",
}


@pytest.mark.parametrize("message", BAD)
def test_bad_usage(message: str, example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        example.main(f"{ON_CPU} {BAD[message]}".split())
    assert refused.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


# ---- CUDA ----


@pytest.fixture
def fake_graphs(example: Any, monkeypatch: pytest.MonkeyPatch) -> type:
    """Graphs that run the step again on the CPU, with the inputs of a real graph."""
    graphs = example.serve_loop.Graphs
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: stream)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)

    class Fake(graphs):
        def capture(self, rows: Any) -> Any:
            graph, inputs, out = super().capture(rows)
            graph.replay = lambda: out.copy_(self.run(inputs))
            return graph, inputs, out

    def copied(rows: Any, device: str) -> Any:
        return example.serve_model.Rows(
            *(None if one is None else one.clone() for one in rows[:3]), *rows[3:]
        )

    monkeypatch.setattr(example.serve_loop, "on_device", copied)
    return Fake


@pytest.mark.parametrize("name", ["fdma", "full", "drafts"])
def test_inputs_of_graphs(name: str, example: Any, fake_graphs: type) -> None:
    """Capturing leaves no trace in a cache, and a replay uses its own tokens and sequences."""
    options, servers = make(example, f"{EVICTING} {ON_CPU} --draft 2 --piece 70")
    server = servers[name]
    expected = serve(example, server, options).tokens
    server.has_all_rows = True
    graphs = fake_graphs(server.graphs.run, "cuda")
    server.graphs = graphs
    if name == "drafts":
        graphs = server.rounds = fake_graphs(server.round, "cuda")
    assert serve(example, server, options).tokens == expected
    assert len(graphs.captured) == (2 if name == "full" else 1), "lengths of up to 64 and 128"


@on_device
@pytest.mark.parametrize("name", ["fdma", "full", "drafts"])
def test_graphs_make_the_tokens_of_single_kernels(name: str, example: Any) -> None:
    arguments = f"{EVICTING} --device cuda --draft 2 --piece 70".replace(
        "head-dim 8", "head-dim 64"
    )
    options, servers = make(example, arguments)
    server = servers[name]
    found = serve(example, server, options)
    steps = server.rounds if name == "drafts" else server.graphs
    assert len(steps.captured) >= 1
    steps.device, moved = "cpu", example.serve_loop.on_device
    example.serve_loop.on_device = lambda rows, device: moved(rows, "cuda")
    try:
        assert serve(example, server, options).tokens == found.tokens
    finally:
        example.serve_loop.on_device = moved


@on_device
def test_every_kernel_of_the_full_cache(example: Any) -> None:
    """Within rounding of float32, at different lengths."""
    full = example.serve_full
    new = dict(device="cuda", dtype=torch.bfloat16)
    query, keys = torch.randn(3, 1, 8, 64, **new), torch.randn(2, 3, 512, 2, 64, **new)
    key, value = keys[:, :, :256]
    positions = torch.tensor([[0], [100], [255]], device="cuda")
    wide = [one.float().cpu() for one in (query, key, value)]
    expected = full.by_sdpa(*wide, positions.cpu())
    kernels = {"sdpa": full.by_sdpa, "lengths": full.by_lengths}
    kernels.update((name, full.by_backend(one)) for name, one in full.BACKENDS.items())
    ran = 0
    for attention in kernels.values():
        try:
            found = attention(query, key, value, positions)
        except (ImportError, TypeError, RuntimeError):
            continue
        assert_close(found.float().cpu(), expected, rtol=0.02, atol=0.02)
        ran += 1
    assert ran >= 2
