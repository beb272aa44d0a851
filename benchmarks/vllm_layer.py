#!/usr/bin/env python3
"""The layers of the plugin for vLLM without vLLM: decoding steps eager, compiled and in CUDA
graphs, beside the same layers with attention to all keys.

    vllm_layer.py OUT.json                   # on a GPU, a minute
    vllm_layer.py OUT.json --device cpu      # small sizes

Steps and states are flash_dmattn.vllm's; the projections are plain ones. First, requests of
different ages are served, in packed steps with pieces of prompts and steps of decoding, and
compared with each request alone. Then come steps of decoding over filled states: every way is
compared with eager steps, and all are timed in turns, host included. A graph is captured for each
size of a batch and replayed for smaller ones, with padding, as vLLM does. Every row is a line of
JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))  # for program.py


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vllm_layer.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT.json", help="a line of JSON for each row")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="cuda, if there is one")
    parser.add_argument("--seconds", type=int, default=50, help="no case begins later (50)")
    return parser.parse_args()


if __name__ == "__main__":
    OPTIONS = parse()  # before PyTorch is imported

import flash_dmattn
import torch
from benchmarking import (
    Disagreement,
    Rounds,
    alternate,
    find_machine,
    median_ratio,
    plain_allowance,
    require_close,
    summary,
    time_wall,
)
from flash_dmattn.rotary import rotate
from flash_dmattn.vllm import pages
from flash_dmattn.vllm.attention import StateAttention, Tokens, place, score_values
from flash_dmattn.vllm.pages import Pages, Rules, Step, StepMaker
from model_step_decode import CachedWay, attend_cached, cached_ways
from model_step_peers import Reasons, by_speed, release
from torch import nn
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import silu

NAME, VOCABULARY, EPS = "states.0", 1000, 1e-6


class Sizes(NamedTuple):
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int  # of the MLP
    layers: int
    window: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]


SIZES = {
    "cuda": Sizes(4096, 32, 8, 128, 14336, 4, 2048, (1, 16, 64), (4096, 32768)),
    "cpu": Sizes(128, 4, 2, 32, 256, 2, 64, (1, 4), (128, 512)),
}
SMALL = Sizes(256, 4, 2, 64, 512, 2, 48, (), ())  # of the comparison with each request alone
ROUNDS, STEPS = Rounds(3, 7, 0.3), 8  # steps of a round
STEPS_COMPARED = 3

# ---- layers ----


class Linear(nn.Linear):
    """Returns a pair, as the projections of vLLM do."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


class Attention(StateAttention):
    def __init__(self, sizes: Sizes, layer: int) -> None:
        heads, kv_heads, dim = sizes.heads, sizes.kv_heads, sizes.head_dim
        qkv = Linear(sizes.hidden, (heads + 2 * kv_heads) * dim, bias=False)
        projections = (qkv, Linear(heads * dim, sizes.hidden, bias=False))
        super().__init__(projections, (heads, kv_heads, dim), layer, NAME, EPS)
        self.weight = nn.Parameter(torch.randn(kv_heads, kv_heads * dim) * dim**-0.5)
        self.A = nn.Parameter(torch.rand(kv_heads) + 0.5)

    def score(self, x: torch.Tensor, value: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return score_values(value, self.weight, self.A, None)


class Layer(nn.Module):
    def __init__(self, sizes: Sizes, attention: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(sizes.hidden, eps=EPS) for _ in range(2))
        self.attention = attention
        self.gate_up = nn.Linear(sizes.hidden, 2 * sizes.width, bias=False)
        self.down = nn.Linear(sizes.width, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x), tokens)
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, 1)
        return x + self.down(silu(gate) * up)


class Model(nn.Module):
    """The part that vLLM compiles: embedding, layers and the last norm."""

    def __init__(self, sizes: Sizes, attention: type[Attention]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, sizes.hidden)
        self.layers = nn.ModuleList(
            Layer(sizes, attention(sizes, layer)) for layer in range(sizes.layers)
        )
        self.norm = nn.RMSNorm(sizes.hidden, eps=EPS)
        self.register_buffer("inv_freq", 10000 ** -torch.linspace(0, 1, sizes.head_dim // 2))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x, tokens = self.embedding(input_ids), place(positions, self.inv_freq.float(), 1.0)
        for layer in self.layers:
            x = layer(x, tokens)
        return self.norm(x)


# ---- attention to all keys ----


class Whole:
    """Keys and values of all tokens, in each layer [batch, kv_heads, context, head_dim]. A step
    writes the last ones, so that attention needs no mask."""

    def __init__(self, sizes: Sizes, batch: int, context: int, kind: dict[str, Any]) -> None:
        shape = (batch, sizes.kv_heads, context, sizes.head_dim)
        self.rows = [
            tuple(torch.randn(shape, **kind) for _ in range(2)) for _ in range(sizes.layers)
        ]
        self.last = torch.tensor([context - 1], device=kind["device"])
        self.bytes = sum(x.numel() * x.itemsize for pair in self.rows for x in pair) // batch
        self.way: CachedWay
        self.error = 0.0  # of compiled layers against eager ones


whole: Whole  # of the case that runs


def attend_whole(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, layer: int
) -> None:
    keys, values = whole.rows[layer]
    keys.index_copy_(2, whole.last, key[:, :, None])
    values.index_copy_(2, whole.last, value[:, :, None])
    with sdpa_kernel(whole.way.backend):
        out.copy_(attend_cached(whole.way, query[:, None], keys, values).flatten(0, 1))


LIBRARY = torch.library.Library("vllm_layer", "FRAGMENT")
LIBRARY.define("attend(Tensor query, Tensor key, Tensor value, Tensor(a!) out, int layer) -> ()")
LIBRARY.impl("attend", attend_whole, "CompositeExplicitAutograd")
torch.library.register_fake("vllm_layer::attend", lambda *_: None, lib=LIBRARY)


class WholeAttention(Attention):
    """The same layer, whose attention is the other operator."""

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        heads, kv_heads, dim = self.heads, self.kv_heads, self.head_dim
        packed = self.qkv_proj(x)[0].unflatten(1, (heads + 2 * kv_heads, dim))
        query, key, value = packed.split((heads, kv_heads, kv_heads), 1)
        query, key = (self._place(*pair, tokens) for pair in ((query, "q_norm"), (key, "k_norm")))
        out = torch.empty_like(query)
        torch.ops.vllm_layer.attend.default(query, key, value, out, self.layer)
        return self.o_proj(out.flatten(1))[0]


class AloneAttention(Attention):
    """One whole request, without a state."""

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        heads, kv_heads, dim = self.heads, self.kv_heads, self.head_dim
        packed = self.qkv_proj(x)[0].unflatten(1, (heads + 2 * kv_heads, dim))[None]
        query, key, value = packed.split((heads, kv_heads, kv_heads), 2)
        weights = (self.q_norm.weight, self.k_norm.weight)
        table = tokens.table.to(x.dtype if x.dtype == torch.float64 else torch.float32)
        query, key = (
            rotate(rows, table, weight=weight, eps=EPS)
            for rows, weight in zip((query, key), weights)
        )
        out = flash_dmattn.flash_dma_attention(
            query, key, value, self.weight, self.A, keep_window_size=SMALL.window, causal=True
        )
        return self.o_proj(out[0].flatten(1))[0]


# ---- a server ----


class Server:
    """States, and the buffers of steps, which have the same addresses in every step."""

    def __init__(self, sizes: Sizes, requests: int, kind: dict[str, Any]) -> None:
        device = kind["device"]
        self.states = Pages(
            [Rules(sizes.window)] * sizes.layers, sizes.kv_heads, sizes.head_dim, kind["dtype"]
        )
        # As in vLLM, a page is one piece of memory.
        self.memory = torch.zeros(
            requests + 1, self.states.page_bytes(), dtype=torch.uint8, device=device
        )
        tensors, at = [], 0
        for shape, dtype in zip(self.states.shapes(), self.states.dtypes()):
            count = torch.Size(shape).numel() * dtype.itemsize
            tensors.append(self.memory[:, at : at + count].view(dtype).view(-1, *shape))
            at += count
        self.tensors = tensors
        self.states.use(tensors)
        self.maker = StepMaker(self.states, requests, device)
        self.table = torch.zeros(requests, dtype=torch.int32, device=device)
        self.step: Step | None = None
        pages.find = lambda _: (self.states, self.step)

    def begin(self, starts: list[int], totals: list[int]) -> None:
        self.step = self.maker.make(starts, totals, self.table[: len(totals)])

    def fill(self, tokens: int, random: torch.Generator) -> None:
        """States as if this many tokens had passed in each request."""
        self.states.seen.fill_(tokens)
        key, value, bias, score, position = self.tensors
        for x in (key, value):
            x.normal_(generator=random)
        score.normal_(generator=random)
        torch.exp(score, out=bias)
        rows = position.shape[-1]
        for page in position:
            chance = torch.rand(*page.shape[:2], tokens, generator=random, device=page.device)
            kept = chance.topk(min(rows, tokens), sorted=False).indices.sort().values
            page.fill_(-1)
            page[..., : kept.shape[-1]] = kept.to(torch.int32)


def make_model(sizes: Sizes, attention: type[Attention], kind: dict[str, Any]) -> Model:
    torch.manual_seed(0)
    with torch.device(kind["device"]):
        model = Model(sizes, attention)
    return model.to(kind["dtype"]).requires_grad_(False).eval()


def compiled(model: Model, backend: str = "inductor") -> Callable[..., torch.Tensor]:
    """One graph for steps of all sizes; a part that cannot be traced is an error."""

    def keep(guards: Any) -> list[bool]:
        return [guard.guard_type != "SHAPE_ENV" for guard in guards]  # which excludes one token

    options = {"guard_filter_fn": keep}
    return torch.compile(model, fullgraph=True, dynamic=True, backend=backend, options=options)


# ---- requests of different ages against each request alone ----


def schedule(lengths: list[int], piece: int, decoded: int) -> Iterator[list[int]]:
    """The new tokens of each request in each step. A request arrives every second step; its prompt
    comes in pieces, and `decoded` tokens follow, one in a step."""
    passed, step = [0] * len(lengths), 0
    while any(n < length + decoded for n, length in zip(passed, lengths)):
        left = 2 * piece
        new = []
        for number, length in enumerate(lengths):
            more = min(piece, length - passed[number], left) if passed[number] < length else 1
            is_here = 2 * number <= step and passed[number] < length + decoded
            new.append(more if is_here else 0)
            left -= new[-1]
        passed = [a + b for a, b in zip(passed, new)]
        step += 1
        yield new


LENGTHS, DECODED = [1, 64, 65, 300, 130, 7, 200], 12  # tokens of prompts, and after these


def serve_requests(
    model: Callable[..., torch.Tensor], prompts: list[torch.Tensor], kind: dict[str, Any]
) -> tuple[torch.Tensor, int]:
    """Serve requests of different ages: the outputs of their last tokens, and how many kinds of
    steps there were."""
    device, server = kind["device"], Server(SMALL, len(prompts), kind)
    server.memory.fill_(77)  # pages are not cleared
    server.table.copy_(torch.arange(len(prompts), 0, -1))
    passed, kinds = [0] * len(prompts), set()
    # As vLLM does: without a step, of many tokens, so that no graph is made for one token alone.
    model(*torch.zeros(2, 64, dtype=torch.int64, device=device))
    last: dict[int, torch.Tensor] = {}
    for new in schedule(LENGTHS, 100, DECODED):
        own = [p[at : at + n] for p, at, n in zip(prompts, passed, new)]
        where = torch.cat([torch.arange(at, at + n) for at, n in zip(passed, new)])
        starts = [sum(new[:n]) for n in range(len(new) + 1)]
        passed = [a + b for a, b in zip(passed, new)]
        server.begin(starts, passed)
        assert server.step is not None
        kinds.add(server.step.requests is None)
        out = model(torch.cat(own).to(device), where.to(device))
        last.update({n: out[starts[n + 1] - 1].cpu() for n, more in enumerate(new) if more})
    return torch.stack([last[n] for n in range(len(prompts))]), len(kinds)


def check_requests(device: str) -> dict[str, Any]:
    """Outputs of requests served together against each request alone: at most twice the error of a
    plain evaluation in the same dtype. Layers that are traced have the same bits in steps of all
    kinds."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    kind: dict[str, Any] = {"device": device, "dtype": dtype}
    random = torch.Generator().manual_seed(5)
    prompts = [torch.randperm(VOCABULARY, generator=random)[: n + DECODED] for n in LENGTHS]
    model = make_model(SMALL, Attention, kind)
    found, kinds = serve_requests(model, prompts, kind)
    traced, _ = serve_requests(compiled(model, "aot_eager"), prompts, kind)
    alone, wide = (make_model(SMALL, AloneAttention, kind) for _ in range(2))
    wide = wide.double().cpu()
    worst = 0.0
    for number, prompt in enumerate(prompts):
        where = torch.arange(len(prompt))
        plain = alone(prompt.to(device), where.to(device))[-1].cpu()
        exact = wide(prompt, where)[-1]
        allowed = plain_allowance(plain, exact)
        require_close(found[number], exact, allowed, f"request {number}: outputs")
        worst = max(worst, (found[number].double() - exact).abs().max().item() / allowed)
    row = {"row": "requests", "requests": len(prompts), "kinds of steps": kinds}
    return {**row, "error, of allowed": worst, "traced, equal": torch.equal(traced, found)}


# ---- steps of decoding ----


class Steps:
    """Steps of one token for each request, in buffers whose addresses stay."""

    def __init__(self, most: int, device: str) -> None:
        self.device = device
        self.input_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self.positions = torch.zeros(most, dtype=torch.int64, device=device)

    def set(self, padded: int, position: int) -> None:
        """The tokens at a position."""
        random = torch.Generator(self.device).manual_seed(position)
        self.input_ids[:padded].random_(VOCABULARY, generator=random)
        self.positions[:padded] = position

    def call(self, model: Callable[..., torch.Tensor], padded: int) -> torch.Tensor:
        return model(self.input_ids[:padded], self.positions[:padded])

    def capture(
        self, model: Callable[..., torch.Tensor], padded: int
    ) -> Callable[[], torch.Tensor]:
        """A call to warm up, then a graph of the same call, in a pool that all graphs share."""
        self.call(model, padded)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool_of_graphs()):
            out = self.call(model, padded)

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay


@functools.cache
def pool_of_graphs() -> Any:
    return torch.cuda.graph_pool_handle()


Way = Callable[[], torch.Tensor]  # a step of a size


# The ways of calling layers; traced: compiled without fusing operators.
EAGER, TRACED, COMPILED, GRAPH = "eager", "traced", "compiled", ", graph"


class Selecting:
    """Our layers and the ways of calling them for each size of a batch."""

    def __init__(self, sizes: Sizes, kind: dict[str, Any]) -> None:
        device = kind["device"]
        most = max(sizes.batches)
        self.server, self.steps = Server(sizes, most, kind), Steps(most, device)
        self.numbers = torch.arange(1, most + 1, dtype=torch.int32, device=device)
        model = make_model(sizes, Attention, kind)
        calls = {EAGER: model, TRACED: compiled(model, "aot_eager"), COMPILED: compiled(model)}
        self.ways: dict[int, dict[str, Way]] = {}
        for padded in sorted(sizes.batches, reverse=True):
            self.begin(padded, padded, 1)
            own = {n: functools.partial(self.steps.call, x, padded) for n, x in calls.items()}
            for way in own.values():
                way()  # the largest size first: 1 would be compiled for 1 alone
            self.ways[padded] = own
            if device == "cuda":
                for name in (EAGER, COMPILED):
                    own[name + GRAPH] = self.steps.capture(calls[name], padded)

    def begin(self, count: int, padded: int, total: int) -> None:
        """Make the step of `count` requests, each after `total` tokens with the new one."""
        table = self.server.table
        table[:count] = self.numbers[:count]
        table[count:] = 0
        ends = [min(n, count) for n in range(padded + 1)]
        # A total of 1 is a request that begins.
        self.server.begin(ends, [total] * count + [0] * (padded - count))

    def run(self, way: Way, count: int, padded: int, context: int) -> torch.Tensor:
        self.begin(count, padded, context + 1)
        self.steps.set(padded, context)
        return way()

    def compare(self, count: int, padded: int, context: int) -> Iterator[dict[str, Any]]:
        """Some steps by every way, from the same states: outputs and states against eager ones. A
        graph of compiled layers is compared with compiled ones, which round less often."""
        server, device = self.server, self.steps.device
        server.fill(context, torch.Generator(device).manual_seed(1))
        saved = server.memory[: count + 1].clone(), server.states.seen.clone()
        found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, way in self.ways[padded].items():
            server.memory[: count + 1].copy_(saved[0])
            server.states.seen.copy_(saved[1])
            where = range(context, context + STEPS_COMPARED)
            outs = [self.run(way, count, padded, n)[:count].clone() for n in where]
            found[name] = (torch.stack(outs), server.memory[1 : count + 1].clone())
            like = COMPILED if name == COMPILED + GRAPH else EAGER
            out, wanted = found[name][0].double(), found[EAGER][0].double()
            if not out.isfinite().all():
                raise Disagreement(f"{name}: outputs are not finite")
            if name == EAGER:
                continue
            yield {
                "row": "compared",
                "way": name,
                "requests": count,
                "padded": padded,
                "context": context,
                f"equal to {like}": all(map(torch.equal, found[name], found[like])),
                "error": (out - wanted).abs().max().item(),
                "largest": wanted.abs().max().item(),
            }

    def timer(self, name: str, batch: int, context: int) -> Callable[[], float]:
        way = self.ways[batch][name]
        return timer(lambda: self.run(way, batch, batch, context), self.steps.device)


def timer(step: Callable[[], Any], device: str) -> Callable[[], float]:
    """Milliseconds of a step, host included."""

    def run() -> None:
        for _ in range(STEPS):
            step()

    return lambda: time_wall(run, device) / STEPS


def whole_timers(
    sizes: Sizes, models: dict[str, Any], batch: int, context: int, kind: dict[str, Any]
) -> dict[str, Callable[[], float]]:
    """Timers of the layers with attention to all keys, by the fastest kernel of PyTorch."""
    global whole
    device, failed = kind["device"], Reasons()
    whole = Whole(sizes, batch, context, kind)
    query = torch.randn(batch, 1, sizes.heads, sizes.head_dim, **kind)

    def make_call(way: CachedWay) -> Callable[[], Any]:
        def call() -> None:
            with sdpa_kernel(way.backend):
                attend_cached(way, query, *whole.rows[0])

        return call

    ways = [way for way in cached_ways(device) if way.form != "expanded"]
    whole.way = by_speed(ways, make_call, device, failed)[0]
    steps = Steps(batch, device)
    steps.set(batch, context)
    out, other = (steps.call(model, batch).double() for model in models.values())
    whole.error = (out - other).abs().max().item()

    def make(model: Any, captures: bool) -> Callable[[], float]:
        call = functools.partial(steps.call, model, batch)
        run = steps.capture(model, batch) if captures else call

        def step() -> None:
            steps.set(batch, context)
            run()

        return timer(step, device)

    found = {f"whole, {name}": make(model, False) for name, model in models.items()}
    if device == "cuda":
        found |= {f"whole, {name}{GRAPH}": make(model, True) for name, model in models.items()}
    return found


def time_decoding(
    ours: Selecting, sizes: Sizes, kind: dict[str, Any], deadline: float
) -> Iterator[dict[str, Any]]:
    model = make_model(sizes, WholeAttention, kind)
    models = {EAGER: model, COMPILED: compiled(model)}
    whole_timers(sizes, models, max(sizes.batches), min(sizes.contexts), kind)  # compiles
    last = COMPILED + GRAPH * (kind["device"] == "cuda")
    for context in sizes.contexts:
        ours.server.fill(context, torch.Generator(kind["device"]).manual_seed(1))
        for batch in sizes.batches:
            case = {"row": "decoding", "requests": batch, "context": context}
            if time.monotonic() > deadline:
                yield {**case, "not run": "the time is over"}
                continue
            names = [name for name in ours.ways[batch] if name != TRACED]
            timers = {name: ours.timer(name, batch, context) for name in names}
            timers |= whole_timers(sizes, models, batch, context, kind)
            times = alternate(timers, ROUNDS, warm_up=1)
            yield {
                **case,
                "ms": {name: summary(own) for name, own in times.items()},
                "whole by": whole.way.name,
                "times as fast": median_ratio(times[f"whole, {last}"], times[last]),
                "whole, error": whole.error,
                "bytes of a request": ours.server.states.page_bytes(),
                "whole, bytes of a request": whole.bytes,
            }
            del timers
            whole.rows.clear()
            release(kind["device"])


def rows_of(device: str, seconds: float) -> Iterator[dict[str, Any]]:
    sizes, deadline = SIZES[device], time.monotonic() + seconds
    kind = {"device": device, "dtype": torch.bfloat16}
    yield {**find_machine(device), **sizes._asdict(), "dtype": "bfloat16"}
    yield check_requests(device)
    ours = Selecting(sizes, kind)
    for padded in sizes.batches:
        for count in sorted({padded, max(1, padded - 3)}):
            yield from ours.compare(count, padded, min(sizes.contexts))
    yield from time_decoding(ours, sizes, kind, deadline)


def main(options: argparse.Namespace) -> int:
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp())
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    signal.alarm(options.seconds + 30)  # ends the process, whatever it waits for
    begin = time.monotonic()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with torch.inference_mode(), options.out.open("w") as file:
        for row in rows_of(device, options.seconds):
            row["seconds"] = round(time.monotonic() - begin, 1)
            for where in (file, sys.stdout):
                print(json.dumps(row), file=where, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(OPTIONS))
