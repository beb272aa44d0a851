"""The byte-level language model of quality.py: its forms and its files.

    x = embedding[byte]
    each layer: x += attention(rmsnorm(x)); x += contract(relu(expand(rmsnorm(x)))^2)
    logits = head(rmsnorm(x))

A form determines the keys that a query keeps:

    dense          all
    selected       the `keys` of highest score
    recent         the `recent` newest, and of the others the keys - recent of highest score
    sliding        the `keys` newest: A is 0 and stays so, and of equal scores the newest rank first
    random         the `keys` of highest score, where scores are not learned: A is 1, dt_proj stays
                   as it was initialised, and no bias is added to logits
    random-recent  as recent, with such scores

In the forms with scores, the argument sliding_heads of DynamicMaskAttention gives some kv heads a
sliding window; the others learn scores, or have random ones. In all forms the last kv heads of a
layer can be NoPE heads: only nope_rotary_dim channels of their queries and keys have a rotary
embedding (0: none), so that matches in the other channels do not depend on the distance. Their A
and their rows of dt_proj have learning rates of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

import numpy as np
import safetensors
import safetensors.torch
import torch
from flash_dmattn import DynamicMaskAttention, flash_dma_attention
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import relu, scaled_dot_product_attention

BYTES = 256
HEAD_DIM = 64
NORM_EPS = 1e-5
STD = 0.02  # of the initial weights
FORMS = ("dense", "selected", "recent", "sliding", "random", "random-recent")
LEARNED = ("selected", "recent")  # forms whose scores are trained
SIZES = {  # layers, q_heads, kv_heads: 59, 23, 10, 5 and 0.5 million parameters
    "huge": (9, 12, 6),
    "large": (8, 8, 4),
    "small": (6, 6, 3),
    "mini": (7, 4, 2),
    "tiny": (2, 2, 1),
}
DENSE_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]  # the preferred one first


@dataclasses.dataclass(frozen=True)
class Config:
    """The definition of a model, without its weights."""

    layers: int
    q_heads: int
    kv_heads: int
    window: int | None  # None for all keys
    recent: int = 0
    sinks: int = 0
    bias_form: str = "exp"
    rotary_base: float = 10000.0
    # how many kv heads of each layer have a sliding window, the first ones, and how many are NoPE
    # heads, the last ones; (): none
    sliding: tuple[int, ...] = ()
    nope: tuple[int, ...] = ()
    nope_rotary_dim: int = 0  # channels of a NoPE head that have a rotary embedding, the first ones
    qk_norm: bool = False  # true if each head of queries and keys is normalized
    nope_window: int | None = None  # window of the layers with NoPE heads; None: as in other layers
    nope_recent: int | None = None  # newest keys in the layers with NoPE heads, likewise

    @property
    def width(self) -> int:
        return self.q_heads * HEAD_DIM

    def metadata(self) -> dict[str, str]:
        """The strings in a file of the model, beside the weights."""
        values = {**dataclasses.asdict(self), "width": self.width, "head_dim": HEAD_DIM}
        for name in ("nope_window", "nope_recent"):
            if values[name] is None:
                del values[name]
        window = "all" if self.window is None else self.window
        values.update(norm_eps=NORM_EPS, window=window, qk_norm=int(self.qk_norm))
        for name in ("sliding", "nope"):
            values[name] = " ".join(map(str, values[name]))
        return {name: str(value) for name, value in values.items()}

    @staticmethod
    def of_metadata(strings: dict[str, str]) -> Config:
        names = ("layers", "q_heads", "kv_heads", "recent", "sinks")
        heads = {name: strings.get(name, "").split() for name in ("sliding", "nope")}
        return Config(
            **{name: int(strings[name]) for name in names},
            **{name: tuple(map(int, counts)) for name, counts in heads.items()},
            nope_rotary_dim=int(strings.get("nope_rotary_dim", 0)),
            qk_norm=bool(int(strings.get("qk_norm", 0))),
            nope_window=int(strings["nope_window"]) if "nope_window" in strings else None,
            nope_recent=int(strings["nope_recent"]) if "nope_recent" in strings else None,
            window=None if strings["window"] == "all" else int(strings["window"]),
            bias_form=strings["bias_form"],
            rotary_base=float(strings["rotary_base"]),
        )


def newest_of(form: str, recent: int) -> int:
    """The number of newest keys that the queries of a form keep beside those by score."""
    return recent if form.endswith("recent") else 0


def config_of(
    form: str,
    size: str,
    keys: int,
    recent: int,
    sinks: int = 0,
    bias_form: str = "exp",
    rotary_base: float = 10000.0,
    sliding_heads: int = 0,
    score_layers: int | None = None,
    nope_heads: int = 0,
    nope_layers: Sequence[int] | None = None,
    nope_rotary_dim: int = 0,
    qk_norm: bool = False,
    nope_keys: int | None = None,
    nope_recent: int | None = None,
) -> Config:
    """The model of a form in which a query keeps `keys` keys in all. In each layer the first
    `sliding_heads` kv heads have a sliding window; with score_layers, all heads have one except in
    every score_layers-th layer. The last `nope_heads` of all layers, or of nope_layers (counted
    from 0), are NoPE heads, even if they were among the sliding ones; nope_rotary_dim of their
    channels have a rotary embedding. In these layers, also in their other heads, a query keeps
    `nope_keys` keys in all, the nope_recent newest among them; None: `keys` and `recent`. qk_norm:
    as in DynamicMaskAttention."""
    layers, _, kv_heads = SIZES[size]
    nope: tuple[int, ...] = ()
    if nope_heads > 0:
        chosen = range(layers) if nope_layers is None else nope_layers
        nope = tuple(nope_heads if n in chosen else 0 for n in range(layers))
    if form == "dense":
        kinds = {"nope": nope, "nope_rotary_dim": nope_rotary_dim, "qk_norm": qk_norm}
        return Config(*SIZES[size], None, rotary_base=rotary_base, **kinds)
    newest = newest_of(form, recent)
    if form.startswith("random"):
        bias_form = "none"
    sliding: tuple[int, ...] = ()
    if score_layers is not None:
        sliding = tuple(0 if (n + 1) % score_layers == 0 else kv_heads for n in range(layers))
    elif sliding_heads > 0:
        sliding = layers * (sliding_heads,)
    if nope:
        sliding = tuple(min(a, kv_heads - b) for a, b in zip(sliding, nope))
    own = newest if nope_recent is None else nope_recent
    return Config(
        *SIZES[size],
        window=keys - newest,
        recent=newest,
        sinks=sinks,
        bias_form=bias_form,
        rotary_base=rotary_base,
        sliding=sliding,
        nope=nope,
        nope_rotary_dim=nope_rotary_dim,
        qk_norm=qk_norm,
        nope_window=None if nope_keys is None else nope_keys - own,
        nope_recent=nope_recent,
    )


def attend_to_all(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
) -> torch.Tensor:
    """PyTorch's attention of [batch, len, heads, head_dim], with grouped heads."""
    rows = [x.transpose(1, 2) for x in (query, key, value)]
    out = scaled_dot_product_attention(*rows, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2)


class Attention(DynamicMaskAttention):
    """DynamicMaskAttention with a bias_form. Attention to all keys is PyTorch's.

    `observe`, if it is set, is called with the layer and the queries, keys and values of every
    call, [batch, len, heads, head_dim].
    """

    def __init__(self, config: Config, layer: int) -> None:
        nope = config.nope[layer] if config.nope else 0
        has_own = nope > 0 and config.nope_window is not None
        has_own_recent = nope > 0 and config.nope_recent is not None
        super().__init__(
            config.width,
            config.q_heads,
            config.kv_heads,
            config.nope_window if has_own else config.window,
            recent=config.nope_recent if has_own_recent else config.recent,
            sinks=config.sinks,
            qk_norm=config.qk_norm,
            norm_eps=NORM_EPS,
            rope_base=config.rotary_base,
            sliding_heads=config.sliding[layer] if config.sliding else 0,
            nope_heads=nope,
            nope_rotary_dim=config.nope_rotary_dim if nope > 0 else 0,
        )
        self.bias_form = config.bias_form
        self.observe: Callable[..., None] | None = None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
    ) -> torch.Tensor:
        """Attention of projected states: out [batch, len, heads, head_dim]."""
        if self.observe is not None:
            self.observe(self, query, key, value)
        if self.window is None:
            return attend_to_all(query, key, value, causal=True)
        return flash_dma_attention(
            query,
            key,
            value,
            self.dt_proj.weight,
            self.a_coef,
            self.window,
            causal=True,
            recent=self.recent,
            sinks=self.sinks,
            bias_form=self.bias_form,
        )


class Block(nn.Module):
    """A layer with any attention over hidden states [batch, len, width] and the attention's other
    inputs."""

    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.attention = attention
        self.norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor, *given: Any) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), *given)
        hidden = relu(self.expand(self.norm(x)))
        return x + self.contract(hidden * hidden)


class Model(nn.Module):
    """From bytes [batch, len] (int64) to the logits of each next byte [batch, len, 256]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.embedding = nn.Embedding(BYTES, width)
        attentions = (Attention(config, layer) for layer in range(config.layers))
        self.blocks = nn.ModuleList(Block(width, attention) for attention in attentions)
        self.norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embedding(text)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def attentions(self) -> list[Attention]:
        return [block.attention for block in self.blocks]


def narrow(device: torch.device) -> torch.autocast:
    """A context: bfloat16 on a CUDA device, where attention takes 16-bit types only, and float32 on
    the CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device, without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def prefer_cudnn() -> Any:
    """A context in which attention to all keys uses cuDNN if possible."""
    return sdpa_kernel(DENSE_BACKENDS, set_priority=True)


@torch.no_grad()
def initialise(model: nn.Module, form: str, seed: int, initial_a: float, dt_std: float) -> None:
    """Initial weights depend on the seed. Forms share the weights that they have in common. A is 0
    in sliding heads, and initial_a in other heads with learned scores."""
    generator = torch.Generator().manual_seed(seed)
    last = STD / math.sqrt(2 * model.config.layers)  # of matrices whose output is added to x
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or "dt_proj" in name:
            continue
        std = last if name.endswith(("o_proj.weight", "contract.weight")) else STD
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    if form == "dense":
        return
    for attention in model.attentions():
        weight = attention.dt_proj.weight
        weight.copy_(torch.randn(weight.shape, generator=generator) * dt_std)
        is_random = form.startswith("random")
        attention.A.fill_(0.0 if form == "sliding" else 1.0 if is_random else initial_a)
        attention.A[: attention.sliding_heads] = 0.0
        is_learned = form in LEARNED
        attention.dt_proj.requires_grad_(is_learned)
        attention.A.requires_grad_(is_learned)


@torch.no_grad()
def initialise_nope(model: Model, nope_a: float) -> None:
    """Another A for the NoPE heads, after initialise()."""
    for attention in model.attentions():
        if attention.nope_heads > 0:
            attention.A[-attention.nope_heads :] = nope_a


def is_of_scores(name: str) -> bool:
    """True if the parameter of this name belongs to the computation of scores."""
    return ".dt_proj." in name or name.endswith(".A")


@torch.no_grad()
def start_from(model: Model, other: Model, has_new_scores: bool) -> None:
    """Takes the weights of another model, which may have other forms of attention. With
    has_new_scores the weights of scores do not change.

    Raises ValueError if the other model has another size, or lacks scores that are needed.
    """
    found, state = other.state_dict(), model.state_dict()
    for name, tensor in state.items():
        if has_new_scores and is_of_scores(name):
            continue
        if name not in found:
            advice = ", or --new-scores" if is_of_scores(name) else ""
            raise ValueError(f"has no {name}, want a model that has it{advice}")
        if (shape := list(found[name].shape)) != list(tensor.shape):
            raise ValueError(f"{name} is {shape}, want {list(tensor.shape)}")
        state[name] = found[name]
    model.load_state_dict(state)


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Int8 [rows, columns] and the scale of each row, whose largest magnitude becomes 127."""
    scale = weight.float().abs().amax(1) / 127
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale


def save(model: Model, path: Path, dtype: str = "float32") -> None:
    """Write a safetensors file. dtype: float32, bfloat16 or int8; int8 is used for matrices
    only."""
    tensors: dict[str, torch.Tensor] = {}
    state = model.state_dict()
    for layer, attention in enumerate(model.attentions()):
        if attention.sliding_heads > 0:  # for readers that do not know sliding heads
            state[f"blocks.{layer}.attention.A"] = attention.a_coef
    for name, parameter in state.items():
        weight = parameter.detach().cpu()
        if dtype == "int8" and weight.dim() == 2:
            tensors[name], tensors[f"{name}.scale"] = quantise(weight)
        else:
            tensors[name] = weight.to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(contiguous, path, metadata=model.config.metadata())


def load(path: Path) -> Model:
    """The model of a file that save() wrote, with weights in float32."""
    with safetensors.safe_open(path, "pt") as file:
        model = Model(Config.of_metadata(file.metadata()))
        stored = {name: file.get_tensor(name) for name in file.keys()}
    weights = {}
    for name, tensor in stored.items():
        if name.endswith(".scale"):
            continue
        scale = stored.get(f"{name}.scale")
        weights[name] = tensor.float() if scale is None else tensor.float() * scale[:, None]
    model.load_state_dict(weights)
    return model
