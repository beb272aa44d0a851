"""Calls of the package and the types of their results. The gate `types` checks them with mypy and
pyright; each line that ends in `# wrong` must be refused by both."""

from __future__ import annotations

import flash_dmattn
import torch
from flash_dmattn import distributed
from typing_extensions import assert_type

x = torch.randn(1, 8, 2, 8)
proj, coef = torch.ones(2, 16), torch.ones(2)
lengths = torch.tensor([0, 8], dtype=torch.int32)
asked = bool(torch.rand(()) < 0.5)

fused = flash_dmattn.flash_dma_attention
assert_type(fused(x, x, x, proj, coef), torch.Tensor)
assert_type(fused(x, x, x, proj, coef, 4, 0.0, True, None, False, recent=2), torch.Tensor)
out, lse = fused(x, x, x, proj, coef, return_lse=True, scope="global")
assert_type(lse, torch.Tensor)
out, probabilities = fused(x, x, x, proj, coef, return_attn_probs=True)
out, lse, probabilities = fused(x, x, x, proj, coef, return_lse=True, return_attn_probs=True)
fused(x, x, x, proj, coef, return_lse=asked)
fused(x, x, x, proj, coef, mixed_processing=True, block_size=64)
print(fused(x, x, x, proj, coef).shape)
print(fused(x, x, x, proj, coef, return_lse=True).shape)  # wrong
fused(x, x, x, proj, coef, scope="local")  # wrong
fused(x, x, x, proj, coef, bias_form="square")  # wrong
fused(x, x, x, proj, coef, window=4)  # wrong
fused(x, x, x, proj)  # wrong

packed = flash_dmattn.flash_dmattn_varlen_func
assert_type(packed(x[0], x[0], x[0], lengths, lengths, 8, 8), torch.Tensor)
out, lse = packed(x[0], x[0], x[0], lengths, lengths, dt_proj=proj, a_coef=coef, return_lse=True)
packed(x[0], x[0], x[0], lengths, lengths, scope="local")  # wrong

masked = flash_dmattn.flash_dmattn_func
assert_type(masked(x, x, x, is_causal=True), torch.Tensor)
out, lse, probabilities = masked(query=x, key=x, value=x, return_attn_probs=True)
masked(x, x, x, causal=True)  # wrong
chosen = flash_dmattn.flash_dmattn_func_auto(backend="cpu")
assert_type(chosen(x, x, x, is_causal=True), torch.Tensor)
out, lse, probabilities = chosen(query=x, key=x, value=x, return_attn_probs=True)
chosen(x, x, x, causal=True)  # wrong
flash_dmattn.flash_dmattn_func_auto(8)  # wrong

qkv, kv = torch.randn(1, 8, 3, 2, 8), torch.randn(1, 8, 2, 2, 8)
all_packed = flash_dmattn.flash_dmattn_qkvpacked_func
assert_type(all_packed(qkv, None, None, True, 0.5), torch.Tensor)
out, lse, probabilities = all_packed(qkv, is_causal=True, return_attn_probs=True)
all_packed(qkv, causal=True)  # wrong
print(all_packed(qkv, return_attn_probs=True).shape)  # wrong
keys_packed = flash_dmattn.flash_dmattn_kvpacked_func
assert_type(keys_packed(x, kv, None, None, 0.5, True), torch.Tensor)
out, lse, probabilities = keys_packed(x, kv, is_causal=True, return_attn_probs=True)
keys_packed(kv, is_causal=True)  # wrong
rows_packed = flash_dmattn.flash_dmattn_varlen_qkvpacked_func
assert_type(rows_packed(qkv[0], cu_seqlens=lengths, max_seqlen=8), torch.Tensor)
assert_type(rows_packed(qkv[0], None, None, lengths, 8, 0.5, True), torch.Tensor)
out, lse, probabilities = rows_packed(qkv[0], None, None, lengths, 8, return_attn_probs=True)
rows_packed(qkv[0], cu_seqlens_q=lengths)  # wrong
both_packed = flash_dmattn.flash_dmattn_varlen_kvpacked_func
assert_type(both_packed(x[0], kv[0], None, None, lengths, lengths, 8, 8), torch.Tensor)
both_packed(x[0], kv[0], None, None, lengths, lengths, 8, 8, window=4)  # wrong

score, bias = flash_dmattn.score(x, proj, coef, bias_form="linear")
selection = flash_dmattn.select(score, 4, recent=2, scope="causal")
assert_type(selection.expiry, torch.Tensor)
flash_dmattn.select(score, 4, scope="local")  # wrong
flash_dmattn.score(x, proj, coef, bias_form="square")  # wrong

cache = flash_dmattn.DynamicMaskCache(1, 1, 2, 8, window=4, bias_form="exp")
assert_type(flash_dmattn.decode(x, x, x, cache.keys, dt_proj=proj, a_coef=coef), torch.Tensor)
out, lse = flash_dmattn.decode(x, x, x, cache.keys, score=score, return_lse=True)
flash_dmattn.DynamicMaskCache(1, 1, 2, 8, window=4, bias_form="square")  # wrong

layer = flash_dmattn.DynamicMaskAttention(16, 2, 2, window=4)
assert_type(layer(torch.randn(1, 8, 16)), torch.Tensor)
out, weights = flash_dmattn.MultiheadAttention(16, 2)(x, x, x)
assert_type(out, torch.Tensor)

assert_type(distributed.ring_attention(x, x, x, causal=True), torch.Tensor)
out, lse = distributed.context_parallel_attention(x, x, x, proj, coef, 4, return_lse=True)
assert_type(distributed.gather_sequence(x), torch.Tensor)
