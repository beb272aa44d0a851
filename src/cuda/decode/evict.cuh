/* What the kernels of fdma_decode() know of its streams and keys. A call has three kernels:
 *
 *   evict_keys()      which row each new token takes, and so which keys each token sees
 *   attend_cache()    partial results over splits of the rows, and over the new tokens
 *   finish_decode()   merges them, and puts the committed tokens into the cache
 *
 * Only the last one writes to the cache. Keys and positions count new tokens: token m is at
 * position m, and the rows of the cache are before all of them. */
#pragma once

#include "cuda/plan/plan.cuh"

enum { most_new_tokens = 64 }; // of a call

/* A stream of a call, as index, n_tokens, commit and the cache's seen say; clamped, since they may
 * hold anything. */
struct decode_stream {
    int32_t sequence; // of the cache
    int32_t tokens;   // 0 also if the stream is skipped
    int32_t committed;
    int32_t seen; // tokens before the new ones
};

/* The position of a new token in its stream. */
__device__ static int32_t token_position(const decode_stream &stream, int32_t token) {
    return min(stream.seen, INT32_MAX - most_new_tokens) + token;
}

/* A call. What is not a view of the caller's tensors is in the workspace. */
struct decode_plan {
    head_view k, v; // of the cache
    number_view<float> bias, score;
    number_view<int32_t> position;
    number_view<float> new_score;
    int32_t *seen;
    const int32_t *index, *n_tokens, *commit; // NULL: absent
    int32_t sequences, batch, kv_heads;
    int32_t rows, new_len, q_len;
    int32_t sinks, recent;
    fdma_bias_form bias_form;
    decode_stream *streams; // [batch]
    int64_t keys;           // rows + new_len
    // of each (b, g), for every row and then for every new token, as in a forward_plan:
    key_record *records; // [batch * kv_heads][keys]; expiry: the token that evicts the key
    int32_t *list;       // [batch * kv_heads][keys]: the row, or the token; -1: no query sees it
    int32_t *slot;       // [batch * kv_heads][new_len]: the row that a token takes, or -1
};

/* Lays out a call in the arena. */
decode_plan fdma_cuda_plan_decode(const fdma_problem *problem, fdma_arena *arena);

/* Fills in streams, records, list and slot. */
fdma_status fdma_cuda_evict(const fdma_problem *problem, const decode_plan &plan);
