"""The cache of a model that generates: the carried keys of all its layers.

A cache has window + recent rows for each layer, sequence and kv head, however many tokens pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from . import _arguments, _types, cache_state, ops, streams
from ._arguments import MaybeTensor, autocast, call_renamed, finish, kernel_scale, pad_head_dim
from ._signatures import BiasForm
from .streams import TOKENS_MAX, KeyCache, Tokens

INDEX_DTYPES = (torch.int32, torch.int64)


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


class Drafts(NamedTuple):
    """Tokens of one layer that are not committed."""

    key: torch.Tensor  # [batch, tokens, kv_heads, head_dim]
    value: torch.Tensor
    score: torch.Tensor  # [batch, kv_heads, tokens]
    n_tokens: torch.Tensor | None  # [batch] int32; None: all are tokens


def join(first: Drafts | None, second: Drafts) -> Drafts:
    if first is None:
        return second
    pairs = zip(first[:3], second[:3], (1, 1, 2))
    key, value, score = (torch.cat((one, other), axis) for one, other, axis in pairs)
    return Drafts(key, value, score, None)


class DynamicMaskCache:
    """The carried keys of all layers of a model, for a batch of sequences of any length.

    Every layer attends through the cache as it would over the whole sequence, in constant memory
    and, for a new token, in constant time. Nothing is read back from the device, and every tensor
    keeps its address. A cache has no gradients: generate within torch.no_grad().

    Only the calls of these methods since reset() tell the host whether all sequences of a layer are
    empty: it does not see tokens that a replayed CUDA graph or decode() over `keys` has put in, and
    a prefill that follows them alone replaces them.

    Drafts, for speculative decoding, are tokens that attend(draft=True) has passed through the
    model: they see the tokens before them, but have not entered the cache. commit(n) lets the first
    n of them enter and forgets the others; n may differ between sequences. Further tokens, drafts
    or not, continue after the drafts; call crop(n) first to keep only n of them. If tokens follow
    that are not drafts, the remaining drafts enter the cache with them.

        logits = model(drafts, cache, draft=True)  # each layer calls attend(draft=True)
        cache.commit(accepted)                     # [batch] int32

    Args:
        layers: of the model. Layers with another window, recent or sinks need a cache of their own.
        batch: sequences.
        kv_heads: key and value heads of a layer.
        head_dim: channels of a head, 256 at most; rows have it rounded up to a multiple of 8.
        window: keys that a query keeps, 1 or more.
        recent: keys that it keeps beside these because they are the newest; None for `window`, as
            in DynamicMaskAttention.
        sinks: first keys of a sequence that outrank all others, 0 to window.
        bias_form: as in score().
        dtype: of keys and values; None for torch's default dtype.
        device: of the cache; None for torch's default device.
        static: no number on the host changes as tokens enter, so that a function compiled with
            torch.compile(mode="reduce-overhead") is one CUDA graph for all of them.
        batch_invariant: as in decode().

    Attributes:
        keys: a KeyCache of layers * batch sequences. Sequence b of a layer has the number
            layer * batch + b.

    Raises:
        TypeError: a size that is not an int.
        ValueError: a size that is out of its range.
        NotImplementedError: a dtype or device that no kernel supports.

    Example:
        >>> sizes = {"kv_heads": 2, "head_dim": 16, "window": 12, "recent": 4}
        >>> layer = flash_dmattn.DynamicMaskAttention(hidden=64, heads=4, **sizes)
        >>> cache = flash_dmattn.DynamicMaskCache(layers=1, batch=2, **sizes)
        >>> with torch.no_grad():
        ...     prompt = layer(torch.randn(2, 100, 64), cache=cache)
        ...     token = layer(torch.randn(2, 1, 64), cache=cache)
        >>> token.shape, cache.get_seq_length()
        (torch.Size([2, 1, 64]), 101)

    Source: docs/algorithm.md, streams.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        window: int,
        *,
        recent: int | None = None,
        sinks: int = 0,
        bias_form: BiasForm = "exp",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        static: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        if not torch.compiler.is_compiling():
            _types.check_call(DynamicMaskCache, locals())
            _arguments.check_kernel_device(device)
        sizes = {"layers": layers, "batch": batch, "kv_heads": kv_heads}
        for name, size in sizes.items():
            require(_arguments.check_int(name, size) >= 1, f"{name}: is {size}, want 1 or more")
        takes_dim = 1 <= _arguments.check_int("head_dim", head_dim) <= 256
        require(takes_dim, f"head_dim: is {head_dim}, want 1 to 256")
        self._head_dim = head_dim
        head_dim += -head_dim % 8
        rules = _arguments.check_rules(window, window if recent is None else recent, sinks)
        _arguments.choose("bias_form", bias_form)
        self.layers, self.batch, self.bias_form, self.static = layers, batch, bias_form, static
        self.batch_invariant = batch_invariant
        dtype = torch.get_default_dtype() if dtype is None else dtype
        _arguments.check_float("dtype", dtype)
        sequences, rows = layers * batch, rules[0] + rules[1]

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        by_head = (sequences, kv_heads, rows)  # the rows of a head are adjacent
        wide = _arguments.wide(dtype)
        self.keys = KeyCache(
            zeros(*by_head, head_dim, dtype=dtype).transpose(1, 2),
            zeros(*by_head, head_dim, dtype=dtype).transpose(1, 2),
            zeros(*by_head, dtype=wide),
            zeros(*by_head, dtype=wide),
            zeros(*by_head, dtype=torch.int32) - 1,
            zeros(sequences, dtype=torch.int32),
            *rules,
        )
        if static and not torch.compiler.is_compiling():
            for tensor in self.keys[:6]:  # otherwise CUDA graphs refuse to write to them
                torch._dynamo.mark_static_address(tensor)
        numbers = torch.arange(sequences, dtype=torch.int32, device=device)
        self._indices = numbers.view(layers, batch).unbind(0)
        # State on the host. No list has an entry for each sequence: a compiled function would then
        # be one graph for each number of sequences.
        self._empty = [True] * layers  # per layer: all sequences are known to be empty
        self._dropped: list[tuple[int, ...]] = [()] * layers  # dropped since tokens entered
        self._drafts: list[Drafts | None] = [None] * layers
        # Tokens that have entered; None if the host does not know.
        self._lengths: list[int | None] = [0] * layers

    # ---- attention ----

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dt_proj: torch.Tensor | None = None,
        a_coef: torch.Tensor | None = None,
        *,
        dt_bias: torch.Tensor | None = None,
        score: torch.Tensor | None = None,
        index: torch.Tensor | None = None,
        key_valid: torch.Tensor | None = None,
        n_tokens: torch.Tensor | int | None = None,
        draft: bool = False,
        sink_logit: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        backend: str | None = None,
    ) -> torch.Tensor:
        """Attention of the next tokens of each sequence, which then enter the cache.

        Up to 64 tokens are a decode(); more, or any with key_valid, are a prefill, which may come
        in pieces.

        Args:
            layer: 0 to layers - 1.
            query: [batch, len, q_heads, head_dim].
            key: [batch, len, kv_heads, head_dim], of the cache's dtype.
            value: like key.
            dt_proj, a_coef, dt_bias: as in score(); or else `score` is given.
            score: [batch, kv_heads, len] float32: the score of each token, which adds no bias: the
                cache's bias_form has to be "none".
            index: optional [streams] int32: the sequences of the batch that these tokens continue;
                query, key and value are then [streams, ...]. -1: none (not in a prefill).
            key_valid: optional [batch, len] bool or uint8, false for padding, which is never kept,
                but counts as tokens that have passed.
            n_tokens: [batch] int32 or an int: the first n are tokens, the rest is padding that
                leaves no trace; None for len.
            draft: the tokens do not enter the cache. Drafts have no index and no key_valid; where
                they have n_tokens, commit() has to follow.
            sink_logit: optional [q_heads] float32, as in attention().
            softmax_scale, softcap: as in attention().
            backend: as in score().

        Returns:
            out [batch, len, q_heads, head_dim]; out of padding has no meaning.

        Raises:
            TypeError: arguments of another type.
            ValueError: shapes, devices or options that are inconsistent; more than 64 drafts.
            NotImplementedError: a dtype, device or backend that no kernel supports.
        """
        self._check_layer(layer)
        _types.check_flag("draft", draft)
        weights: dict[str, Any] = {"dt_proj": dt_proj, "a_coef": a_coef}
        _arguments.check_score(score, weights, dt_bias, self.bias_form, "in a cache of")
        if key_valid is not None:
            _types.check_tensor("key_valid", key_valid)
        query, key, value, dt_proj, *others = autocast(
            "query", (query, key, value), (dt_proj, a_coef, dt_bias)
        )
        rows, dt_proj, head_dim = pad_head_dim((query, key, value), dt_proj)
        if not torch.compiler.is_compiling() and head_dim not in (None, self._head_dim):
            raise ValueError(f"key: head_dim is {head_dim}, want the cache's, {self._head_dim}")
        query, key, value = rows
        learned = (dt_proj, *others)
        count = streams.counts("n_tokens", n_tokens, key)
        options = (self.bias_form, kernel_scale(softmax_scale, head_dim), softcap, backend)
        batch, length = key.shape[:2]
        if index is None and batch != self.batch:
            found = _types.counted(batch, "element")
            raise ValueError(f"key: axis 0 has {found}, want the batch, {self.batch}")
        follows_drafts = draft or self._drafts[layer] is not None
        is_prefill = length > TOKENS_MAX or key_valid is not None
        if not follows_drafts and not is_prefill:
            where = self._sequences(layer, index, -1)
            rows = (query, key, value, *learned, score, where, count, None, sink_logit)
            out, _ = ops.DECODE(*rows, *streams.tensors_of(self.keys), *self._rules(), *options)
            self._count(layer, length)
            return finish(out, head_dim)
        rest = (index, key_valid, count, sink_logit, options, score)
        tokens = Tokens(query, key, value, learned, *rest)
        if follows_drafts:
            return finish(self._follow_drafts(layer, tokens, draft), head_dim)
        out = self._prefill(layer, tokens)
        self._count(layer, length)
        return finish(out, head_dim)

    def _rules(self) -> tuple[int | bool, ...]:
        """The arguments of ops.DECODE between the tensors and the options of a call."""
        return (*streams.rules_of(self.keys), self.batch_invariant)

    def _count(self, layer: int, length: int) -> None:
        """Count tokens that have entered sequences of the layer, whichever these are."""
        if not self.static:
            # Compiled code that reads the number would be one graph for each number.
            known = None if torch.compiler.is_compiling() else self._lengths[layer]
            self._lengths[layer] = None if known is None else known + length
        self._empty[layer], self._dropped[layer] = False, ()

    def _check_layer(self, layer: int) -> None:
        if not 0 <= _arguments.check_int("layer", layer) < self.layers:
            raise ValueError(f"layer: is {layer}, want 0 to {self.layers - 1}")

    def _check_numbers(self, name: str, numbers: torch.Tensor) -> None:
        _types.check_tensor(name, numbers)
        if numbers.dtype not in INDEX_DTYPES:
            dtype = _arguments.name_of_dtype(numbers.dtype)
            raise NotImplementedError(f"{name}: dtype is {dtype}, want int32 or int64")
        if numbers.device != self.keys.seen.device:
            where = f"want {self.keys.seen.device}, where the cache is"
            raise ValueError(f"{name}: is on {numbers.device}, {where}")

    def _check_range(self, name: str, numbers: torch.Tensor, least: int) -> None:
        """Check the numbers of sequences, if the host can read them without waiting."""
        if numbers.device.type != "cpu" or torch.compiler.is_compiling():
            return
        for n, number in enumerate(numbers.tolist()):
            if not least <= number < self.batch:
                wanted = f"want {least} to {self.batch - 1}"
                raise ValueError(f"{name}: element {n} is {number}, {wanted}")

    def _sequences(self, layer: int, index: MaybeTensor, least: int) -> torch.Tensor:
        """The numbers in `keys` of the batch's sequences `index`, from `least` on. -1 and, on a
        device, numbers of no sequence become -1: they must not reach another layer."""
        if index is None:
            return self._indices[layer]
        self._check_numbers("index", index)
        if index.dim() != 1:
            raise ValueError(f"index: rank is {index.dim()}, want 1; index is [streams]")
        self._check_range("index", index, least)
        is_there = (index >= 0) & (index < self.batch)
        return torch.where(is_there, index + layer * self.batch, -1).to(torch.int32)

    def _prefill(self, layer: int, tokens: Tokens) -> torch.Tensor:
        """Let tokens of any number enter the cache."""
        tensors, rules = self.keys[:6], streams.rules_of(self.keys)
        where = self._sequences(layer, tokens.index, 0)
        if self._empty[layer]:
            return streams.prefill(self.keys, where, None, tokens)
        if tokens.index is None:
            first = layer * self.batch
            carried = [one[first : first + self.batch] for one in tensors]
        else:
            carried = [one.index_select(0, where) for one in tensors]
        fields: tuple[Any, ...] = (*carried, *rules)
        return streams.prefill(self.keys, where, KeyCache(*fields), tokens)

    # ---- drafts ----

    def _follow_drafts(self, layer: int, tokens: Tokens, draft: bool) -> torch.Tensor:
        """Attention of tokens that are drafts or follow drafts."""
        waiting = self._drafts[layer]
        message = "want None in drafts and after them"
        require(tokens.index is None, f"index: is a tensor, {message}")
        require(tokens.key_valid is None, f"key_valid: is a tensor, {message}")
        ragged = waiting is not None and (
            tokens.n_tokens is not None or waiting.n_tokens is not None
        )
        require(not ragged, "n_tokens: is given beside earlier drafts, commit() these first")
        query, key, value, weights = tokens[:4]
        *_, backend = tokens.options
        score = tokens.score
        if score is None:
            score, _ = ops.SCORE(value, *weights, None, None, "none", backend)
        drafts = join(waiting, Drafts(key, value, score, tokens.n_tokens))
        length = drafts.key.shape[1]
        if length > TOKENS_MAX:
            raise ValueError(f"key: makes {length} drafts, want at most {TOKENS_MAX}")
        commit = streams.counts("commit", 0, key) if draft else None
        where = self._indices[layer]
        counts = (drafts.n_tokens, commit, tokens.sink_logit)
        rows = (query, *drafts[:2], None, None, None, drafts.score, where, *counts)
        out, _ = ops.DECODE(*rows, *streams.tensors_of(self.keys), *self._rules(), *tokens.options)
        if not draft:
            self._count(layer, length)
        self._drafts[layer] = drafts if draft else None
        return out

    @property
    def drafts(self) -> int:
        """Tokens that have not been committed, in the first layer."""
        return 0 if self._drafts[0] is None else self._drafts[0].key.shape[1]

    def crop(self, count: int) -> None:
        """Forget the drafts from number `count` on, in every layer and sequence. The first `count`
        stay drafts.

        Raises:
            TypeError: count is not an int.
            ValueError: it is negative.
        """
        if _arguments.check_int("count", count) < 0:
            raise ValueError(f"count: is {count}, want 0 or more")
        for layer, one in enumerate(self._drafts):
            if one is None:
                continue
            require(one.n_tokens is None, "count: drafts with n_tokens can only be committed")
            rows = (one.key[:, :count], one.value[:, :count], one.score[:, :, :count])
            self._drafts[layer] = Drafts(*rows, None) if count > 0 else None

    def commit(self, count: torch.Tensor | int | None = None) -> None:
        """Let the first `count` drafts of each sequence enter the cache, and forget the others. It
        is one call for all layers, whose drafts must have the same number.

        Args:
            count: [batch] int32 or an int; None for all. Without drafts only None and 0 are
                accepted.

        Raises:
            TypeError: count is neither a tensor nor an int.
            ValueError: layers have different numbers of drafts; on the CPU also a count that is
                negative or above that number.
        """
        if count is not None and not isinstance(count, torch.Tensor):
            _arguments.check_int("count", count)
        waiting = [one for one in self._drafts if one is not None]
        if not waiting:
            absent = count is None or (not isinstance(count, torch.Tensor) and count == 0)
            if not absent:
                raise ValueError(f"count: is {count}, but there are no drafts")
            return
        lengths = [0 if one is None else one.key.shape[1] for one in self._drafts]
        if min(lengths) != max(lengths):
            raise ValueError(f"count: the layers have {lengths} drafts")
        key, value, score = (torch.cat(same) for same in zip(*(one[:3] for one in waiting)))
        n_tokens = None
        if waiting[0].n_tokens is not None:
            n_tokens = torch.cat([one.n_tokens for one in waiting if one.n_tokens is not None])
        commit = count
        if count is not None and not isinstance(count, torch.Tensor):
            if not 0 <= _arguments.check_int("count", count) <= lengths[0]:
                raise ValueError(f"count: is {count}, want 0 to the drafts, {lengths[0]}")
        if isinstance(count, torch.Tensor):
            if list(count.shape) != [self.batch]:
                raise ValueError(f"count: shape is {list(count.shape)}, want [{self.batch}]")
            commit = count.repeat(self.layers)
        call_renamed(
            {"commit": "count"},
            streams.decode,
            key[:, :0],
            key,
            value,
            self.keys,
            score=score,
            n_tokens=n_tokens,
            commit=commit,
            bias_form=self.bias_form,
        )
        entered = count if isinstance(count, int) else lengths[0]
        for layer in range(self.layers):
            self._count(layer, entered)
        self._drafts = [None] * self.layers

    # ---- sequences ----

    def positions(self, layer: int, length: int, index: torch.Tensor | None = None) -> torch.Tensor:
        """[batch, length] int32: the positions of the next `length` tokens of a layer."""
        self._check_layer(layer)
        _arguments.check_int("length", length)
        if not torch.compiler.is_compiling() and length < 0:
            raise ValueError(f"length: is {length}, want 0 or more")
        first = layer * self.batch
        if index is None:
            seen = self.keys.seen[first : first + self.batch]
        else:
            seen = self.keys.seen[self._sequences(layer, index, -1).clamp(min=0)]
        waiting = self._drafts[layer]
        drafts = 0 if waiting is None else waiting.key.shape[1]
        steps = torch.arange(drafts, drafts + length, dtype=torch.int32, device=seen.device)
        return seen[:, None] + steps

    def reorder(self, beam_idx: torch.Tensor) -> None:
        """Make sequence b of every layer what sequence beam_idx[b] was, drafts included.

        Args:
            beam_idx: [batch] integers.

        Raises:
            TypeError: it is not a tensor.
            ValueError: it has another shape or device, or numbers of no sequence.
            NotImplementedError: it has another dtype.
        """
        self._check_numbers("beam_idx", beam_idx)
        if list(beam_idx.shape) != [self.batch]:
            raise ValueError(f"beam_idx: shape is {list(beam_idx.shape)}, want [{self.batch}]")
        self._check_range("beam_idx", beam_idx, 0)
        tensors, rules = streams.tensors_of(self.keys), streams.rules_of(self.keys)
        for layer, numbers in enumerate(self._indices):
            source = numbers.index_select(0, beam_idx)
            ops.CACHE_COPY(*tensors, source, numbers, *rules, None)
            self._dropped[layer] = ()
        for layer, one in enumerate(self._drafts):
            if one is not None:
                moved = (None if x is None else x.index_select(0, beam_idx) for x in one)
                self._drafts[layer] = Drafts._make(moved)

    def drop(self, b: int) -> None:
        """Empty sequence b in every layer, so that another can begin there. It has no drafts then.

        Raises:
            TypeError: b is not an int.
            ValueError: there is no such sequence, or there are drafts.
        """
        self._check_settled(b)
        with cache_state.writing_to(self.keys):
            self.keys.position.unflatten(0, (self.layers, self.batch))[:, b] = -1
            self.keys.seen.unflatten(0, (self.layers, self.batch))[:, b] = 0
        for layer in range(self.layers):
            self._dropped[layer] = tuple({*self._dropped[layer], b})
            self._empty[layer] |= len(self._dropped[layer]) == self.batch

    def save(self, b: int) -> bytes:
        """Sequence b of all layers as bytes, so that it can go on later, or in another process or
        machine. A CUDA device is waited for.

        Raises:
            TypeError: b is not an int.
            ValueError: there is no such sequence, or there are drafts.
        """
        return cache_state.save_all(self._places(b))

    def restore(self, b: int, state: bytes | bytearray | memoryview) -> None:
        """Make sequence b what another one was when it was saved, in a cache of as many layers and
        of the same sizes, rules, dtype and bias_form. A state that is refused changes nothing.

        Raises:
            TypeError: b is not an int, or state is not bytes.
            ValueError: there is no such sequence, or there are drafts; a state that is truncated or
                damaged, or of a cache of other layers, sizes, rules, dtype or bias_form.
            NotImplementedError: a state of another version.
        """
        cache_state.restore_all(self._places(b), state)
        self._restored(b)

    def _restored(self, b: int) -> None:
        """Count the tokens of a sequence that has been restored."""
        self._empty = [False] * self.layers
        self._dropped = [tuple({*own} - {b}) for own in self._dropped]
        self._lengths = [None] * self.layers

    def _places(self, b: int) -> list[cache_state.Place]:
        """Where sequence b is, in each layer."""
        self._check_settled(b)
        kind = (self._head_dim, self.bias_form)
        numbers = range(b, self.layers * self.batch, self.batch)
        return [cache_state.Place(self.keys, number, *kind) for number in numbers]

    def _check_settled(self, b: int) -> None:
        if not 0 <= _arguments.check_int("b", b) < self.batch:
            raise ValueError(f"b: is {b}, want 0 to {self.batch - 1}")
        require(self.drafts == 0, "b: there are drafts, commit() or crop() them first")

    def reset(self) -> None:
        """Empty all sequences, and forget drafts."""
        with cache_state.writing_to(self.keys):
            self.keys.position.fill_(-1)
            self.keys.seen.zero_()
        self._drafts = [None] * self.layers
        self._lengths = [0] * self.layers
        self._empty, self._dropped = [True] * self.layers, [()] * self.layers

    def get_seq_length(self, layer: int = 0) -> int | torch.Tensor:
        """Tokens that have entered, and drafts. This is a number kept on the host, which also
        counts tokens that n_tokens, `index` or a tensor in commit() left out. The exact numbers,
        without drafts, are in `keys.seen`. The largest of them is returned instead

        - of a static cache, as a tensor [] without drafts;
        - in compiled code, as a tensor [];
        - after a call in compiled code, read back from the device once.
        """
        self._check_layer(layer)
        waiting = self._drafts[layer]
        drafts = 0 if waiting is None else waiting.key.shape[1]
        is_compiling = torch.compiler.is_compiling()
        known = None if self.static or is_compiling else self._lengths[layer]
        if known is None:
            exact = self.keys.seen[layer * self.batch : (layer + 1) * self.batch].max()
            if self.static:
                return exact
            if is_compiling:
                return exact + drafts
            known = self._lengths[layer] = int(exact)
        return known + drafts

    @property
    def memory_bytes(self) -> int:
        """The bytes of all tensors of the cache, which never change. Drafts are not counted."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.keys[:6])

    def __repr__(self) -> str:
        heads, keys = self.keys.key.shape[2:], self.keys
        static = ", static=True" if self.static else ""
        tokens = _types.counted(int(self.get_seq_length()), "token")
        return (
            f"DynamicMaskCache(layers={self.layers}, batch={self.batch}, kv_heads={heads[0]}, "
            f"head_dim={heads[1]}, window={keys.window}, recent={keys.recent}, "
            f"sinks={keys.sinks}, bias_form={self.bias_form!r}, dtype={keys.key.dtype}, "
            f"device={keys.key.device}{static}): {tokens}, {self.memory_bytes} bytes"
        )
