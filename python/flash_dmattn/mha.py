"""torch.nn.MultiheadAttention on FlashDMA's kernels, with or without a selection of keys.

The layer takes torch.nn's masks and turns them into arguments of attention(). The dimensions are as
in fdma.h; torch.nn's L is q_len, S is kv_len, N is batch and E is embed_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Tuple

import torch
from torch import nn
from torch.nn import functional as F

from . import _arguments, _types
from ._arguments import check_dropout, check_probabilities_fit, draw_state
from ._layer_checks import HEAD_DIM_MAX, check_input, check_types, require
from ._signatures import BiasForm
from .functional import attention, score, select
from .fused import flash_dma_attention
from .nn import ALL_KEYS
from .probabilities import attention_probabilities

Rows = Tuple[torch.Tensor, ...]  # query, key and value
MaybeTensor = _arguments.MaybeTensor


class MaskArguments(NamedTuple):
    """Arguments of attention() that torch.nn's masks become, under the same names."""

    key_valid: MaybeTensor
    bias: MaybeTensor
    attn_mask: MaybeTensor
    attn_bias: MaybeTensor
    causal: bool


def call_forward(module: nn.Module, args: tuple[Any, ...]) -> None:
    """A forward pre-hook that changes nothing. Without gradients torch.nn.TransformerEncoderLayer
    replaces its modules by one PyTorch kernel, unless one of them has a hook."""


def check_dtype(name: str, mask: MaybeTensor) -> None:
    if mask is not None and not (mask.dtype == torch.bool or mask.dtype.is_floating_point):
        found = str(mask.dtype).replace("torch.", "")
        raise AssertionError(f"{name}: dtype is {found}, want bool or a floating-point dtype")


def check_equal(name: str, found: Any, want: Any, error: type[Exception]) -> None:
    """Refuse a wrong length. Lengths are formatted into a message only then, because that makes
    constants of them in a graph that is being traced."""
    if found != want:
        raise error(f"{name} is {found}, want {want}")


def split_padding(
    mask: MaybeTensor, heads: int, kv_len: int, dtype: torch.dtype
) -> tuple[MaybeTensor, MaybeTensor]:
    """key_valid and bias of a key_padding_mask [batch, len]. Both have kv_len keys; keys from len
    on are valid. The bias has this dtype."""
    if mask is None:
        return None, None
    added = (0, kv_len - mask.shape[1])
    if mask.dtype == torch.bool:
        return F.pad(~mask, added, value=True), None
    valid = F.pad(mask != -torch.inf, added, value=True)
    return valid, F.pad(mask.to(dtype), added)[:, None].expand(-1, heads, -1)


def split_pairs(
    mask: MaybeTensor, heads: int, kv_len: int, dtype: torch.dtype
) -> tuple[MaybeTensor, MaybeTensor]:
    """attn_mask and attn_bias of a torch.nn mask [q_len, len] or [batch * heads, q_len, len]. Both
    have kv_len keys, and all queries see the keys from len on. `dtype` is query's."""
    if mask is None:
        return None, None
    mask = mask[None, None] if mask.dim() == 2 else mask.unflatten(0, (-1, heads))
    added = (0, kv_len - mask.shape[-1])
    if mask.dtype == torch.bool:
        return F.pad(~mask, added, value=True), None
    mask = mask if mask.dtype in (torch.float32, dtype) else mask.to(dtype)
    return None, F.pad(mask, added)


def pad_nested(rows: Rows) -> tuple[Rows, torch.Tensor, list[int]]:
    """Nested query, key and value as padded tensors (one tensor if they are one), the
    key_padding_mask of the keys, and the lengths of the queries."""
    query, key, value = rows
    lengths = [[len(one) for one in rows[n].unbind()] for n in (0, 1)]
    wide_query = query.to_padded_tensor(0.0)
    wide_key = wide_query if key is query else key.to_padded_tensor(0.0)
    wide_value = wide_key if value is key else value.to_padded_tensor(0.0)
    ends = torch.tensor(lengths[1], device=query.device)[:, None]
    padding = torch.arange(wide_key.shape[1], device=query.device) >= ends
    return (wide_query, wide_key, wide_value), padding, lengths[0]


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention, computed by this library; with a window every query attends to
    its `window` best keys.

    It has the arguments, parameters, state_dict and results of torch.nn.MultiheadAttention, from
    which it derives, and can replace it, for example as self_attn of nn.TransformerEncoderLayer.
    With a window it has two more parameters, for scores: load a state_dict of torch.nn's module
    with strict=False, because it has neither of them.

        score = A * softplus(dt_proj(v)), where v is the projected value
        forward(query, key, value) = out_proj(softmax(<q, k> / sqrt(head_dim) + exp(score)) v),
            over the kept keys; without a window over all keys, and without exp(score)

    A is initialised with zeros, as in DynamicMaskAttention.

    Differences from torch.nn's module: a query that sees no key has the attention 0, so that the
    result is out_proj's bias, where torch.nn's is NaN. Weights have no gradient. dropout is rounded
    to a multiple of 2^-16, and drops other probabilities. On CUDA devices float32 and float64 are
    refused. torch.jit.script cannot compile it. A head_dim that is not a multiple of 8 works: its
    channels are padded with zeros, which take memory and time.

    Args:
        embed_dim: width of queries and results, num_heads * head_dim; head_dim is at most 256.
        num_heads: heads of queries, keys and values.
        dropout: probability with which each attention probability becomes 0 in training mode; the
            others are divided by 1 - dropout.
        bias: whether the projections have a bias.
        add_bias_kv: whether each sequence gets one more key, which is learned and which every query
            sees; False with a window, which may drop it.
        add_zero_attn: whether each sequence gets one more key of zeros; False with a window.
        kdim: width of keys; None for embed_dim.
        vdim: width of values; None for embed_dim.
        batch_first: whether inputs are [batch, len, width] in place of [len, batch, width].
        device: of the parameters.
        dtype: of the parameters: float32, float16 or bfloat16 (float64 on the CPU, slowly).
        window: keys that a query keeps, 1 or more; None for all of them, without scores.
        recent: keys that a query keeps beside these because they are the newest that it can see, 0
            or more. With recent > 0 every call has to be causal.
        sinks: keys, 0 to window, that outrank all others whatever their scores: the first ones of
            the sequence that are no padding. They count in the window.
        gap: as in DynamicMaskAttention. With a gap every call has to be causal.
        bias_form: "exp": exp(score) is added to the logits; "linear": the score itself; "none":
            nothing, so that dt_proj and A have no gradients. If window is None, bias_form, recent,
            sinks and gap change nothing.

    Parameters, by their names, which are the keys of the state_dict:
        in_proj_weight   [3 * embed_dim, embed_dim]; with another kdim or vdim in its place
            q_proj_weight [embed_dim, embed_dim], k_proj_weight [embed_dim, kdim] and
            v_proj_weight [embed_dim, vdim]
        in_proj_bias     [3 * embed_dim], with `bias`
        out_proj.weight  [embed_dim, embed_dim]
        out_proj.bias    [embed_dim], with `bias`
        bias_k, bias_v   [1, 1, embed_dim], with `add_bias_kv`
        dt_proj.weight   [num_heads, embed_dim], unless window is None
        A                [num_heads], unless window is None

    Raises:
        AssertionError: an embed_dim that is no multiple of num_heads (torch.nn raises this).
        TypeError: a window, recent or sinks that is not an int.
        ValueError: a size, window, recent, sinks, gap, bias_form or dropout out of its range, or
            add_bias_kv or add_zero_attn with a window.
        NotImplementedError: a device that PyTorch does not have here.

    Example:
        >>> layer = flash_dmattn.MultiheadAttention(64, 4, batch_first=True, window=16, recent=4)
        >>> x = torch.randn(2, 100, 64)
        >>> layer(x, x, x, need_weights=False, is_causal=True)[0].shape
        torch.Size([2, 100, 64])
        >>> like_torch = flash_dmattn.MultiheadAttention(64, 4, batch_first=True)
        >>> other = torch.nn.MultiheadAttention(64, 4, batch_first=True)
        >>> like_torch.load_state_dict(other.state_dict())
        <All keys matched successfully>
        >>> torch.allclose(like_torch(x, x, x)[0], other(x, x, x)[0], atol=1e-5)
        True

    Source: arXiv:1706.03762, section 3.2; arXiv:2508.02124.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        window: int | None = None,
        recent: int = 0,
        sinks: int = 0,
        gap: float | None = None,
        bias_form: BiasForm = "exp",
    ) -> None:
        check_types(MultiheadAttention, locals())
        check_dropout(dropout, "dropout")
        rules = _arguments.check_rules(ALL_KEYS if window is None else window, recent, sinks)
        _arguments.check_gap(gap)
        _arguments.choose("bias_form", bias_form)
        for name, given in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            fits = window is None or not given
            message = f"{name}: is True, want False with a window, which may drop the key"
            require(fits, message)
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        more = (bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first)
        super().__init__(embed_dim, num_heads, dropout, *more, **kind)
        widest = HEAD_DIM_MAX * num_heads
        message = f"embed_dim: is {embed_dim}, want at most {widest}, {HEAD_DIM_MAX} for each head"
        require(embed_dim <= widest, message)
        self.window = None if window is None else rules[0]
        self.recent, self.sinks = rules[1:]
        self.gap, self.bias_form = gap, bias_form
        if window is not None:
            self.dt_proj = nn.Linear(embed_dim, num_heads, bias=False, **kind)
            self.A = nn.Parameter(torch.zeros(num_heads, **kind))
        self.register_forward_pre_hook(call_forward)

    def reset_parameters(self) -> None:
        """Initialise all parameters anew, as the constructor does."""
        self.out_proj.reset_parameters()
        self._reset_parameters()
        if self.window is not None:
            self.dt_proj.reset_parameters()
            nn.init.zeros_(self.A)

    def extra_repr(self) -> str:
        shown = f"{self.embed_dim}, num_heads={self.num_heads}, window={self.window}"
        if self.window is not None:
            shown += f", recent={self.recent}, sinks={self.sinks}, gap={self.gap}"
            shown += f", bias_form={self.bias_form!r}"
        return f"{shown}, dropout={self.dropout}, batch_first={self.batch_first}"

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of the queries over the keys, as torch.nn.MultiheadAttention has it.

        With a window, keys are ranked before attn_mask is applied: a query attends to the kept keys
        that attn_mask allows. Padding is not ranked. In a causal call each query ranks the keys up
        to its own position, otherwise all keys are ranked once.

        Args:
            query: [q_len, batch, embed_dim]; [batch, q_len, embed_dim] with batch_first;
                [q_len, embed_dim] without a batch. With batch_first, query, key and value may also
                be nested tensors, without masks.
            key: [kv_len, batch, kdim], or with its axes as query's.
            value: [kv_len, batch, vdim], or with its axes as query's.
            key_padding_mask: optional [batch, kv_len], [kv_len] without a batch: bool, true for
                keys that are padding, which are never read; or floating-point numbers, which are
                added to the logits of a key. (key_valid of the other layers is its inverse.)
            need_weights: whether to return the weights: q_len * kv_len numbers for each head,
                which are not in memory otherwise.
            attn_mask: optional [q_len, kv_len] or [batch * num_heads, q_len, kv_len]: bool, true
                where a query does not attend to a key; or floating-point numbers, which are added
                to the logits.
            average_attn_weights: whether weights are the mean over the heads.
            is_causal: a query sees only keys at positions up to its own. attn_mask has to be given
                too, as this mask. It is read only if q_len is not kv_len or keys are appended, and
                even then a call without weights and padding does not read it: as in torch.nn, query
                i then sees the first i + 1 keys, appended ones included. With a window attn_mask
                may be None and is not read, and q_len has to be kv_len.

        Returns:
            The result, with query's axes, and the weights [batch, q_len, kv_len], or [batch,
            num_heads, q_len, kv_len] if they are not averaged; without a batch the first axis is
            absent. The weights are None without need_weights. They include dropout, and the keys
            that add_bias_kv and add_zero_attn append.

        Raises:
            AssertionError: ranks, widths or lengths that contradict each other, or a mask of
                integers.
            RuntimeError: an attn_mask of another shape, or none if is_causal is True and window
                None.
            ValueError: arguments that cannot be combined with the layer's window.
            NotImplementedError: a dtype that no kernel of the device supports.
            MemoryError: weights that take more memory than the device has.
        """
        for name, row in (("query", query), ("key", key), ("value", value)):
            _types.check_tensor(name, row)
            check_input(name, row, self.out_proj)
        _types.check_tensors({"key_padding_mask": key_padding_mask, "attn_mask": attn_mask})
        _types.check_flags(
            ("need_weights", "average_attn_weights", "is_causal"),
            (need_weights, average_attn_weights, is_causal),
            none=True,
        )
        if query.is_nested and query.dim() == 3:
            given = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
            rest = (need_weights, average_attn_weights, is_causal)
            return self._forward_nested((query, key, value), given, *rest)
        call = (query, key, value, key_padding_mask, attn_mask, self.num_heads)
        batched = F._mha_shape_check(*call)  # type: ignore[attr-defined]
        self._check_widths(query, key, value)
        rows = self._project(query, key, value)
        if not batched:
            rows = tuple(row[None] for row in rows)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            rows = tuple(row.transpose(0, 1) for row in rows)
        self._check_masks(rows, key_padding_mask, attn_mask)
        masks = self._mask_arguments(rows, key_padding_mask, attn_mask, is_causal, need_weights)
        out, weights = self._attend(self._append_keys(rows), masks, need_weights)
        out = out.transpose(0, 1) if batched and not self.batch_first else out
        out = self.out_proj(out.flatten(2))
        if weights is not None:
            weights = weights.to(query.dtype)
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights[0]
        return out if batched else out[0], weights

    if TYPE_CHECKING:

        def __call__(
            self, *args: Any, **named: Any
        ) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def _forward_nested(
        self,
        rows: Rows,
        masks: dict[str, MaybeTensor],
        need_weights: bool,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """forward() of nested tensors. The weights are padded."""
        message = "query: is nested, want a plain tensor without batch_first"
        require(self.batch_first, message, AssertionError)
        for name, row in zip(("key", "value"), rows[1:]):
            message = f"{name}: is a plain tensor, want it nested, as query is"
            require(row.is_nested, message, AssertionError)
        for name, mask in masks.items():
            require(mask is None, f"{name}: is given, want None if query is nested", AssertionError)
        padded, padding, lengths = pad_nested(rows)
        mask = None
        if is_causal and self.window is None:
            shape = (padded[0].shape[1], padded[1].shape[1])
            mask = torch.ones(shape, dtype=torch.bool, device=padding.device).triu(1)
        call: list[Any] = [*padded, padding, need_weights, mask, average_attn_weights, is_causal]
        out, weights = self.forward(*call)
        pieces = [one[:length] for one, length in zip(out, lengths)]
        return torch.nested.as_nested_tensor(pieces, layout=rows[0].layout), weights

    def _check_widths(self, *rows: torch.Tensor) -> None:
        widths = (self.embed_dim, self.kdim, self.vdim)
        for name, row, width in zip(("query", "key", "value"), rows, widths):
            if row.shape[-1] != width:
                count = _types.counted(row.shape[-1], "element")
                raise AssertionError(f"{name}: its last axis has {count}, want {width}")
        found, want = (list(row.shape[:-1]) for row in (rows[2], rows[1]))
        check_equal("value: shape without its last axis", found, want, AssertionError)

    def _check_masks(self, rows: Rows, padding: MaybeTensor, attn_mask: MaybeTensor) -> None:
        (batch, q_len), (key_batch, kv_len) = rows[0].shape[:2], rows[1].shape[:2]
        check_equal("key: batch", key_batch, batch, AssertionError)
        for name, mask in (("key_padding_mask", padding), ("attn_mask", attn_mask)):
            check_dtype(name, mask)
            if mask is not None and mask.device != rows[0].device:
                where = f"want {rows[0].device}, where query is"
                raise ValueError(f"{name}: is on {mask.device}, {where}")
        if padding is not None:
            found = list(padding.shape)
            check_equal("key_padding_mask: shape", found, [batch, kv_len], AssertionError)
        if attn_mask is not None:
            found, want = list(attn_mask.shape), [q_len, kv_len]
            want = want if len(found) == 2 else [batch * self.num_heads, *want]
            check_equal("attn_mask: shape", found, want, RuntimeError)

    def _project(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Rows:
        """Project the inputs; the rows keep their axes, and the last axis is split into heads and
        head_dim."""
        bias, heads = None, (self.num_heads, self.head_dim)
        if self.in_proj_bias is not None:
            bias = self.in_proj_bias.to(self.out_proj.weight.dtype)
        if self.in_proj_weight is not None and query is key and key is value:
            rows = F.linear(query, self.in_proj_weight, bias).chunk(3, -1)
        else:
            if self.in_proj_weight is None:
                weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            else:
                weights = self.in_proj_weight.chunk(3)
            biases = (None, None, None) if bias is None else bias.chunk(3)
            rows = tuple(map(F.linear, (query, key, value), weights, biases))
        return tuple(row.unflatten(-1, heads) for row in rows)

    def _append_keys(self, rows: Rows) -> Rows:
        """The rows [batch, len, heads, head_dim], with the keys of add_bias_kv and
        add_zero_attn."""
        query, *keys = rows
        if self.bias_k is not None:
            shape = (keys[0].shape[0], 1, *keys[0].shape[2:])
            learned: tuple[Any, ...] = (self.bias_k, self.bias_v)
            more = (one.unflatten(-1, shape[2:]).expand(shape) for one in learned)
            keys = [torch.cat(pair, 1) for pair in zip(keys, more)]
        if self.add_zero_attn:
            keys = [F.pad(one, (0, 0, 0, 0, 0, 1)) for one in keys]
        return (query, *keys)

    def _resolve_causal(
        self, lengths: tuple[int, int, int], attn_mask: MaybeTensor, is_causal: bool, unread: bool
    ) -> tuple[bool, MaybeTensor]:
        """Decide if the call is causal, and which attn_mask is read. `lengths` counts queries,
        keys, and keys with the appended ones. If `unread` is true and the call is causal, torch.nn
        reads no mask: query i then sees the first i + 1 keys, appended ones included."""
        q_len, kv_len, all_len = lengths
        if self.window is not None:
            needs_causal = self.recent > 0 or self.gap is not None
            message = f"is_causal: is False, want True for recent {self.recent} and gap {self.gap}"
            require(is_causal or not needs_causal, message)
            if is_causal:
                check_equal(
                    "query: length of a causal call with a window", q_len, kv_len, ValueError
                )
            return is_causal, None if is_causal else attn_mask
        if not is_causal:
            return False, attn_mask
        message = "attn_mask: is None, want the causal mask if is_causal is True"
        require(attn_mask is not None, message, RuntimeError)
        if q_len == all_len and (kv_len == all_len or unread):
            return True, None
        if unread:
            assert attn_mask is not None
            shape = (q_len, all_len)
            attn_mask = torch.ones(shape, dtype=torch.bool, device=attn_mask.device).triu(1)
        return False, attn_mask

    def _mask_arguments(
        self,
        rows: Rows,
        padding: MaybeTensor,
        attn_mask: MaybeTensor,
        is_causal: bool,
        need_weights: bool,
    ) -> MaskArguments:
        query, key = rows[:2]
        q_len, kv_len, heads = query.shape[1], key.shape[1], self.num_heads
        all_len = kv_len + (self.bias_k is not None) + bool(self.add_zero_attn)
        unread = padding is None and not need_weights
        lengths = (q_len, kv_len, all_len)
        causal, attn_mask = self._resolve_causal(lengths, attn_mask, is_causal, unread)
        keys = split_padding(padding, heads, all_len, _arguments.wide(query.dtype))
        return MaskArguments(*keys, *split_pairs(attn_mask, heads, all_len, query.dtype), causal)

    def _attend(
        self, rows: Rows, masks: MaskArguments, need_weights: bool
    ) -> tuple[torch.Tensor, MaybeTensor]:
        """out [batch, q_len, heads, head_dim], and the weights of all heads if they are needed."""
        query, key, value = rows
        if need_weights:
            check_probabilities_fit(query, key, "need_weights")
        options: dict[str, Any] = {"key_valid": masks.key_valid, "causal": masks.causal}
        options["dropout_p"] = dropout_p = self.dropout if self.training else 0.0
        if self.window is not None and masks[1:4] == (None, None, None):
            result = self._attend_fused((query, key, value), options, need_weights)
            out, weights = result if need_weights else (result, None)
        else:
            options["bias"], options["selection"] = self._select(value, masks)
            options["rng_state"] = draw_state(query, dropout_p, None)
            options = {**options, "attn_mask": masks.attn_mask, "attn_bias": masks.attn_bias}
            out, lse = attention(query, key, value, **options)
            weights = attention_probabilities(query, key, lse, **options) if need_weights else None
        return out, weights

    def _attend_fused(self, rows: Rows, options: dict[str, Any], need_weights: bool) -> Any:
        rules: dict[str, Any] = {"recent": self.recent, "sinks": self.sinks, "gap": self.gap}
        rules = {**rules, "bias_form": self.bias_form, "return_attn_probs": need_weights}
        options = {**options, **rules}
        call: tuple[Any, ...] = (*rows, self.dt_proj.weight, self.A, self.window)
        return flash_dma_attention(*call, **options)

    def _select(self, value: torch.Tensor, masks: MaskArguments) -> tuple[MaybeTensor, Any]:
        """The bias and selection of attention() for these values."""
        if self.window is None:
            return masks.bias, None
        options: dict[str, Any] = {"key_valid": masks.key_valid}
        weights = (self.dt_proj.weight, self.A)
        scores, bias = score(value, *weights, bias_form=self.bias_form, **options)
        options = {**options, "recent": self.recent, "sinks": self.sinks, "gap": self.gap}
        options["scope"] = "causal" if masks.causal else "global"
        selection = select(scores, self.window, **options)
        if bias is None or masks.bias is None:
            return masks.bias if bias is None else bias, selection
        return bias + masks.bias, selection
