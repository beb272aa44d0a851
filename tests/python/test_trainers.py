"""Adapters of PEFT, the trainers of TRL, and wrappers of processes around hybrids: their scores
learn, and are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import context_ranks
import flash_dmattn.transformers as ours
import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2}
SCORES = "layers.1.self_attn.dt_proj"  # of the layer that selects


def make_converted() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=2, vocab_size=258)
    llama = transformers.LlamaForCausalLM(config)
    return ours.convert(llama, sliding=16, selecting=[1], keys=32)


def make_hybrid() -> Any:
    torch.manual_seed(0)
    rules = {"num_hidden_layers": 2, "sliding_keys": 16, "selecting_keys": 32}
    return ours.HybridForCausalLM(ours.HybridConfig(**SIZES, **rules))


def adapters() -> Any:
    projections = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return peft.LoraConfig(
        r=4, target_modules=projections, modules_to_save=["dt_proj"], task_type="CAUSAL_LM"
    )


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def moved(model: nn.Module, before: dict[str, torch.Tensor]) -> list[str]:
    now = dict(model.named_parameters())
    return [name for name, one in before.items() if not torch.equal(one, now[name])]


def test_adapters(tmp_path: Path) -> None:
    """Scores are saved with the adapters, and a merged model has both."""
    tokens = torch.arange(100)[None]
    model = peft.get_peft_model(make_converted(), adapters()).train()
    before = copies(model)
    optimizer = torch.optim.AdamW((x for x in model.parameters() if x.requires_grad), lr=1e-2)
    for _ in range(2):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    changed = moved(model, before)
    assert f"base_model.model.model.{SCORES}.modules_to_save.default.weight" in changed
    assert all("lora" in name or "modules_to_save" in name for name in changed)
    wanted = model.eval()(tokens).logits
    with model.disable_adapter():
        torch.testing.assert_close(model(tokens).logits, make_converted().eval()(tokens).logits)
    model.save_pretrained(tmp_path)
    read = peft.PeftModel.from_pretrained(make_converted(), tmp_path).eval()
    torch.testing.assert_close(read(tokens).logits, wanted)
    merged = read.merge_and_unload()
    assert type(merged) is ours.HybridForCausalLM
    torch.testing.assert_close(merged(tokens).logits, wanted, rtol=1e-4, atol=1e-5)
    assert merged.generate(tokens, max_new_tokens=3).shape == (1, 103)


@pytest.mark.parametrize(("is_adapted", "packing"), [(False, True), (True, False)])
def test_sft_trainer(tmp_path: Path, is_adapted: bool, packing: bool) -> None:
    """Its loss is not the model's own, and the scores learn all the same."""
    rows = ["one two three " * 12, "def f(x): return x\n" * 10]
    given = datasets.Dataset.from_dict({"text": rows * 4})
    options = {"max_steps": 2, "per_device_train_batch_size": 2, "max_length": 150, "bf16": False}
    options |= {"learning_rate": 1e-2, "use_cpu": True, "save_strategy": "no", "report_to": []}
    trainer = trl.SFTTrainer(
        model=make_converted() if is_adapted else make_hybrid(),
        args=trl.SFTConfig(output_dir=str(tmp_path), packing=packing, **options),
        train_dataset=given,
        processing_class=ours.ByteTokenizer(),
        peft_config=adapters() if is_adapted else None,
    )
    before = copies(trainer.model)
    losses = trainer.train().training_loss
    assert 0 < losses < 10
    assert any(SCORES in name for name in moved(trainer.model, before))


# ---- in processes: each has one text, and gradients are the mean of both ----

WRAPPERS = ("ddp", "fsdp") if hasattr(torch.distributed.fsdp, "fully_shard") else ("ddp",)
RATE = 0.5


def texts() -> torch.Tensor:
    return torch.randint(256, (2, 100), generator=torch.Generator().manual_seed(1))


def make_trained() -> Any:
    """A hybrid whose scores learn in every other step."""
    model = make_hybrid().train()
    model.config.target_every = 2
    return model


def wrapped(kind: str, model: Any) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    mesh = init_device_mesh("cpu", (2,))
    for part in (*model.model.layers, model):
        torch.distributed.fsdp.fully_shard(part, mesh=mesh)
    return model  # type: ignore[no-any-return]


def run_distributed(rank: int) -> dict[str, Any]:
    """The parameters after three steps in each wrapper, and how a divided gate is refused."""
    found: dict[str, Any] = {}
    text = texts()[rank : rank + 1]
    for kind in WRAPPERS:
        inner = make_trained()
        model = wrapped(kind, inner)
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        for _ in range(3):
            model(text, labels=text).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = {
            name: getattr(one, "full_tensor", lambda one=one: one)()
            for name, one in inner.named_parameters()
        }
        found[kind] = {name: one.detach() for name, one in whole.items()}
    rules = {"num_hidden_layers": 2, "sliding_keys": 16, "selecting_keys": 32, "lifetime_units": 8}
    if "fsdp" in WRAPPERS:
        gated = wrapped("fsdp", ours.HybridForCausalLM(ours.HybridConfig(**SIZES, **rules)))
        with pytest.raises(ValueError) as refused:
            gated.lifetime_loss(text, progress=0.0)
        found["refused"] = str(refused.value)
    return found


RUN = context_ranks.Once(__name__, "run_distributed", 2, timeout=60)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_distributed(kind: str) -> None:
    model = make_trained()
    before = copies(model)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(3):
        for text in texts().split(1):
            model.model.calls = step
            (model(text, labels=text).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert any(SCORES in name for name in moved(model, before))
    first, second = (one[kind] for one in RUN.results())
    for name, one in model.named_parameters():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], one.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif("fsdp" not in WRAPPERS, reason="PyTorch has no fully_shard")
def test_a_divided_gate_is_refused() -> None:
    message = "model: fully_shard() divides its parameters among ranks, want whole ones"
    assert all(one["refused"].startswith(message) for one in RUN.results())
