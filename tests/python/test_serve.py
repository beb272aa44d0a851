"""examples/serve.py: a batch has the tokens that the model makes from whole sequences, without a
cache, with drafts and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import warm
from cases import on_device
from programs import ROOT, output_of
from samples import combinations

SMALL = "--layers 2 --width 64 --window 12 --recent 4 --requests 9 --sequences 4 --gap 1"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import serve

    return serve


@torch.no_grad()
def served(example: Any, arguments: str) -> tuple[Any, Any, Any]:
    """The model, the server and the requests, which are done."""
    options = example.parse(f"{SMALL} --device cpu {arguments}".split())
    model, requests = example.make_model(options), example.make_requests(options)
    server = example.Server(model, options)
    server.serve(requests)
    return model, server, requests


@torch.no_grad()
def wrong(example: Any, model: Any, requests: Any) -> int:
    """Requests whose tokens differ on the whole sequence."""
    return sum(not example.is_of_whole_sequence(model, one) for one in requests)


@pytest.mark.parametrize(("piece", "draft"), combinations([7, 64, 100], [0, 3]))
def test_batches_make_the_same_tokens_as_whole_sequences(
    piece: int, draft: int, example: Any
) -> None:
    """Pieces of more than 64 tokens are calls of their own."""
    arguments = f"--prompt 160 --piece {piece} --draft {draft}"
    model, server, requests = served(example, arguments)
    assert wrong(example, model, requests) == 0
    assert [len(one.made) for one in requests] == [one.wanted for one in requests]
    assert server.steps < sum(one.wanted for one in requests), "requests are batched"
    assert sorted(server.free) == [0, 1, 2, 3] and not server.running
    assert (server.cache.keys.seen == 0).all()
    assert (0 < server.right < server.drafted) == (draft > 0)


def test_drafts_save_steps(example: Any) -> None:
    arguments = "--requests 4 --gap 0 --prompt 9 --output 200 --seed 3"
    _, plain, requests = served(example, arguments)
    _, server, again = served(example, f"{arguments} --draft 5")
    assert [one.made for one in again] == [one.made for one in requests]
    assert server.steps < plain.steps


def test_evicted_keys_matter(example: Any) -> None:
    """The tokens of the tests above depend on the keys that a query keeps."""
    _, _, requests = served(example, "")
    _, _, others = served(example, "--window 300")
    assert sum(a.made != b.made for a, b in zip(requests, others)) > 5


@pytest.mark.parametrize("name", ["drop", "commit"])
def test_wrong_calls_of_the_cache_are_found(
    name: str, example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence that the next request does not find empty, and drafts that all enter."""
    cache = example.DynamicMaskCache
    commit = cache.commit
    wrong_calls = {"drop": lambda self, b: None, "commit": lambda self, accepted: commit(self)}
    monkeypatch.setattr(cache, name, wrong_calls[name])
    model, _, requests = served(example, "--draft 3")
    assert wrong(example, model, requests) > 2


@pytest.mark.parametrize(("most", "found"), [(0, []), (1, [3]), (3, [3, 9, 1]), (9, [3, 9, 1, 2])])
def test_drafts_follow_the_last_occurrence(most: int, found: list[int], example: Any) -> None:
    assert example.look_up([1, 2, 8, 1, 2, 3, 9, 1, 2], most) == found
    assert example.look_up([1, 2, 3], most) == []


def test_as_a_script() -> None:
    arguments = f"{SMALL} --device cpu --draft 2".split()
    done = warm.python(ROOT / "examples" / "serve.py", *arguments)
    first, cache, drafts, same = output_of(done).splitlines()
    assert first.startswith("9 requests: ") and drafts.startswith("drafts: ")
    rows_of_layer = 4 * 1 * 16  # sequences, kv heads, window + recent
    size = 2 * (rows_of_layer * (2 * 64 * 4 + 12) + 4 * 4)
    assert cache == f"cache: {size} bytes for 4 sequences"
    assert same == "9 of 9 requests have the tokens of the whole sequence"


BAD = {
    "--requests: is 0, want 1 or more": "--requests 0",
    "--recent: is -1, want 0 or more": "--recent -1",
    "--draft: is 64, want 63 or less": "--draft 64",
    "--width: is 96, want a multiple of 64": "--width 96",
    "--device: invalid choice: 'tpu'": "--device tpu",
    "--piece: invalid int value: 'all'": "--piece all",
}


@pytest.mark.parametrize("message", BAD)
def test_bad_usage(message: str, example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        example.main(BAD[message].split())
    assert refused.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@on_device
def test_on_a_device(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """In bfloat16 rounding changes some of the tokens."""
    assert example.main(f"{SMALL} --device cuda --draft 2 --piece 70 --prompt 160".split()) == 0
    same = capsys.readouterr().out.splitlines()[-1]
    assert int(same.split()[0]) >= 3
