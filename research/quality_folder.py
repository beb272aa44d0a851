#!/usr/bin/env python3
"""Write a model of quality.py as a folder of transformers: a HybridForCausalLM with its tokenizer.

    python research/quality_folder.py OUT/NAME.safetensors FOLDER [--gate FILE]

The logits of the 256 bytes are the model's. Its layers have to be as a HybridConfig has them: all
heads of a layer slide, or all are NoPE heads.

A hybrid multiplies two projections, one of them through an activation: with relu and twice the
weights of `expand` that is relu(expand(x))^2. Its tokenizer has two tokens more. The end of a text,
which also stands before one, is read as a line feed. Both are as likely as byte 255, which no text
in UTF-8 has.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import benchmarks_path  # noqa: F401
import program


def parse(words: list[str] | None = None) -> argparse.Namespace:
    head, _, _ = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=head)
    parser.add_argument("model", type=Path, help="a safetensors file of quality.py")
    parser.add_argument("folder", type=Path, help="is made")
    gate = "lifetimes of the last layer, as quality_orders.py --save writes them"
    parser.add_argument("--gate", type=Path, metavar="FILE", help=gate)
    return parser.parse_args(words)


if __name__ == "__main__":
    program.begin(parse)

import quality_model
import safetensors
import torch
from flash_dmattn.transformers import ByteTokenizer, HybridConfig, HybridForCausalLM

ABSENT = 255  # a byte that no text in UTF-8 has
NAMES = {
    "attention_norm.": "input_layernorm.",
    "norm.": "post_attention_layernorm.",
    "contract.": "mlp.down_proj.",
    "attention.": "self_attn.",
}


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def selecting_of(config: quality_model.Config) -> list[int]:
    """The layers whose heads are NoPE heads.

    Raises ValueError if a hybrid has no such layers.
    """
    every = config.kv_heads
    nope = config.nope or config.layers * (0,)
    for layer, heads in enumerate(nope):
        is_whole = heads in (0, every)
        require(is_whole, f"nope: layer {layer} has {heads} NoPE heads, want 0 or {every}")
    chosen = [layer for layer, heads in enumerate(nope) if heads > 0]
    require(len(chosen) > 0, "nope: no layer has NoPE heads, want one or more")
    wanted = {"nope_rotary_dim": 0, "sinks": 0, "bias_form": "exp"}
    for name, value in wanted.items():
        found = getattr(config, name)
        require(found == value, f"{name}: is {found!r}, want {value!r}")
    return chosen


class Lifetimes(NamedTuple):
    """The gate of the last layer, for `keys` keys with the `recent` newest ones among them."""

    keys: int
    recent: int
    weights: dict[str, torch.Tensor]


def load_lifetimes(path: Path) -> Lifetimes:
    with safetensors.safe_open(path, "pt") as file:
        sizes = file.metadata()
        weights = {name: file.get_tensor(name) for name in file.keys()}
    return Lifetimes(int(sizes["keys"]), int(sizes["recent"]), weights)


def hybrid_config(model: quality_model.Model, lifetimes: Lifetimes | None = None) -> HybridConfig:
    """The configuration of the same model.

    Raises ValueError if there is none.
    """
    config = model.config
    chosen = selecting_of(config)
    for layer, attention in enumerate(model.attentions()):
        slides = attention.window is None or bool((attention.a_coef == 0).all())
        is_hybrids = slides or layer in chosen
        require(is_hybrids, f"layer {layer}: selects keys, want that only in layers {chosen}")
    first = model.attentions()[chosen[0]]
    require(first.window is not None, f"window: is all keys in layers {chosen}, want a number")
    others = [one for n, one in enumerate(model.attentions()) if n not in chosen]
    sliding = others[0].window + others[0].recent if others else None
    keys, recent = first.window + first.recent, first.recent
    if lifetimes is not None:
        last = [config.layers - 1]
        require(chosen == last, f"layers {chosen}: select keys, want {last} alone with --gate")
        require("expand.bias" in lifetimes.weights, "gate: reads values, want hidden states")
        keys, recent = lifetimes.keys, lifetimes.recent
    return HybridConfig(
        vocab_size=258,
        hidden_size=config.width,
        intermediate_size=4 * config.width,
        hidden_act="relu",
        num_hidden_layers=config.layers,
        num_attention_heads=config.q_heads,
        num_key_value_heads=config.kv_heads,
        head_dim=quality_model.HEAD_DIM,
        rms_norm_eps=quality_model.NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": config.rotary_base},
        max_position_embeddings=65536,
        tie_word_embeddings=False,
        sliding_keys=sliding,
        selecting_layers=chosen,
        selecting_keys=keys,
        selecting_recent=recent,
        lifetime_units=0 if lifetimes is None else len(lifetimes.weights["expand.bias"]),
        qk_norm=config.qk_norm,
    )


def hybrid_weights(model: quality_model.Model) -> dict[str, torch.Tensor]:
    """The weights of the model under the names of a hybrid."""
    state, found = model.state_dict(), {}
    for name, weight in state.items():
        if not name.startswith("blocks."):
            continue
        _, layer, rest = name.split(".", 2)
        if rest.startswith("expand."):
            for projection in ("gate_proj", "up_proj"):
                found[f"model.layers.{layer}.mlp.{projection}.weight"] = weight
            continue
        old = next(old for old in NAMES if rest.startswith(old))
        found[f"model.layers.{layer}.{NAMES[old]}{rest[len(old) :]}"] = weight
    embedding, head = state["embedding.weight"], state["head.weight"]
    padding = torch.zeros_like(embedding[:1])
    found["model.embed_tokens.weight"] = torch.cat([embedding, embedding[[ord("\n")]], padding])
    found["lm_head.weight"] = torch.cat([head, head[[ABSENT, ABSENT]]])
    found["model.norm.weight"] = state["norm.weight"]
    return found


def hybrid_of(model: quality_model.Model, lifetimes: Lifetimes | None = None) -> HybridForCausalLM:
    """The hybrid with the weights of the model.

    Raises ValueError if its layers are no hybrid's.
    """
    hybrid = HybridForCausalLM(hybrid_config(model, lifetimes))
    weights = hybrid_weights(model)
    if lifetimes is not None:
        last = f"model.layers.{model.config.layers - 1}.self_attn."
        for name in ("A", "dt_proj.weight"):
            weights.pop(last + name, None)
        weights |= {f"{last}lifetime_gate.{name}": x for name, x in lifetimes.weights.items()}
    hybrid.load_state_dict(weights)
    return hybrid.eval()


def main(words: list[str] | None = None) -> int:
    options = parse(words)
    try:
        lifetimes = None if options.gate is None else load_lifetimes(options.gate)
        hybrid = hybrid_of(quality_model.load(options.model), lifetimes)
    except ValueError as error:
        print(f"{options.model}: {error}", file=sys.stderr)
        return 1
    hybrid.save_pretrained(options.folder)
    ByteTokenizer().save_pretrained(options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
