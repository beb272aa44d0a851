/* What the kernels of fdma_decode() know of its streams and keys. On 9.0 a call has two kernels:
 *
 *   place_tokens()    scores of the new tokens; which row each takes, and so which keys each sees
 *   attend_cluster()  attends, merges, and puts the committed tokens into the cache
 *
 * Elsewhere, and for large caches, it has three, after those of fdma_score():
 *
 *   evict_keys()      which row each new token takes
 *   attend_cache()    partial results over splits of the rows, and over the new tokens
 *   finish_decode()   merges them, and puts the committed tokens into the cache
 *
 * Only the last kernel of a call writes to the cache. Keys and positions count new tokens: token m
 * is at position m, and the rows of the cache are before all of them. */
#pragma once

#include "cuda/plan/plan.cuh"

extern "C" {
#include "core/cache.h"
}

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
    decode_stream *streams; // [batch * kv_heads]
    int64_t keys;           // rows + new_len
    // of each (b, g), for every row and then for every new token, as in a forward_plan:
    key_record *records; // [batch * kv_heads][keys]; expiry: the token that evicts the key
    int32_t *list;       // [batch * kv_heads][keys]: the row, or the token; -1: no query sees it
    int32_t *slot;       // [batch * kv_heads][new_len]: the row that a token takes, or -1
    int32_t *expiry;     // [batch * kv_heads][new_len]: the token that evicts a token
    int64_t *row_keys;   // [batch * kv_heads][rows], if these are too many for registers
};

/* The bias of a new token. */
__device__ static float bias_of(fdma_bias_form form, float score) {
    return form == FDMA_BIAS_NONE ? 0 : form == FDMA_BIAS_EXP ? expf(score) : score;
}

__device__ static int32_t clamp(int32_t n, int32_t least, int32_t most) {
    return min(max(n, least), most);
}

/* The sequence of a stream; -1: it is skipped. */
__device__ static int32_t sequence_of(const decode_plan &plan, int32_t b) {
    const int32_t sequence = plan.index != NULL ? plan.index[b] : b;
    return sequence < plan.sequences ? max(sequence, -1) : -1;
}

__device__ static decode_stream stream_of(const decode_plan &plan, int32_t b) {
    const int32_t sequence = sequence_of(plan, b);
    const int32_t tokens =
        plan.n_tokens != NULL ? clamp(plan.n_tokens[b], 0, plan.new_len) : plan.new_len;
    if (sequence < 0 || tokens == 0)
        return {};
    const int32_t committed = plan.commit != NULL ? clamp(plan.commit[b], 0, tokens) : tokens;
    return {sequence, tokens, committed, max(plan.seen[sequence], 0)};
}

/* Writes what a row of the cache says of its key beside k and v. */
__device__ static void write_numbers(const decode_plan &plan, int32_t b, int32_t g, int32_t token,
                                     int32_t sequence, int32_t row, int32_t position) {
    const float score = plan.new_score.at(b, g)[token];
    plan.score.at(sequence, g)[row] = score;
    plan.position.at(sequence, g)[row] = position;
    if (plan.bias_form != FDMA_BIAS_NONE)
        plan.bias.at(sequence, g)[row] = bias_of(plan.bias_form, score);
}

/* Lays out a call in the arena. Scores that are not given are in the workspace. */
decode_plan fdma_cuda_plan_decode(const fdma_problem *problem, fdma_arena *arena);

/* The problem of fdma_score() for the new tokens. */
fdma_problem fdma_cuda_token_problem(const fdma_problem *problem, const decode_plan &plan);

/* Fills in streams, records, list and slot. */
fdma_status fdma_cuda_evict(const fdma_problem *problem, const decode_plan &plan);
