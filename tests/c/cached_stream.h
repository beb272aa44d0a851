/* cached_stream.h - streams whose tokens come in pieces, each with a sequence of a cache. One call
 * on all tokens gives the expected result of every piece and the expected contents of the cache. */
#pragma once

#include "whole_stream.h"

enum { sequences = 5, most_tokens = 5 };

static const stream_case cases[] = {
    {1, 0, 0, 8, 30, FDMA_BIAS_EXP, 0, 3},       {7, 0, 0, 64, 60, FDMA_BIAS_LINEAR, 0, 5},
    {16, 4, 3, 128, 90, FDMA_BIAS_EXP, 0, 0},    {12, 1, 0, 40, 70, FDMA_BIAS_NONE, 2, 4},
    {33, 9, 2, 32, 150, FDMA_BIAS_LINEAR, 0, 0}, {4, 20, 4, 24, 80, FDMA_BIAS_EXP, 1.5, 2},
    {3, 0, 3, 16, 50, FDMA_BIAS_LINEAR, 0, 6},   {100, 29, 0, 64, 60, FDMA_BIAS_EXP, 0, 0},
};

static inline void make_scores(whole_call *x, const char *kernel) {
    if (kernel != NULL && is_device_kernel(kernel))
        kernel = "cuda/sm80"; // the kernel of score, for every decode kernel
    fdma_score_args args = {.size = sizeof args,
                            .v = x->v,
                            .dt_proj = x->dt_proj,
                            .a = x->a,
                            .dt_bias = x->dt_bias,
                            .score = x->score,
                            .exec = {.kernel = kernel}};
    uint64_t state = 3;
    CHECK_OK(run_score(&args));
    for (int64_t n = 0; n < count_of(x->score) && x->test->levels > 0; n++)
        ((float *)x->score.data)[n] = (float)random_below(&state, x->test->levels);
    for (int64_t n = 0; n < count_of(x->bias); n++) {
        const float score = ((const float *)x->score.data)[n];
        ((float *)x->bias.data)[n] = x->test->bias_form == FDMA_BIAS_EXP ? expf(score) : score;
    }
}

static inline void attend_whole(whole_call *x, const char *kernel) {
    // The scores must have the same bits in both; `kernel` may attend in other dtypes only.
    make_scores(x, kernel);
    fdma_select_args select = {.size = sizeof select,
                               .score = x->score,
                               .key_valid = x->key_valid,
                               .selection = &x->selection,
                               .window = x->test->window,
                               .recent = x->test->recent,
                               .sinks = x->test->sinks,
                               .exec = {.kernel = "reference"}};
    CHECK_OK(run_select(&select));
    fdma_forward_args forward = {.size = sizeof forward,
                                 .q = x->q,
                                 .k = x->k,
                                 .v = x->v,
                                 .bias = x->bias,
                                 .key_valid = x->key_valid,
                                 .out = x->out,
                                 .lse = x->lse,
                                 .selection = &x->selection,
                                 .softcap = x->test->softcap,
                                 .causal = 1};
    CHECK_OK(run_forward(&forward));
}

/* A cache full of NaN, in which every sequence is empty. */
static inline fdma_cache new_cache(const stream_case *test, fdma_dtype dtype) {
    fdma_cache cache = {.sequences = sequences,
                        .kv_heads = kv_heads,
                        .head_dim = test->head_dim,
                        .window = test->window,
                        .recent = test->recent,
                        .sinks = test->sinks,
                        .dtype = dtype};
    size_t bytes = 0;
    CHECK_OK(fdma_cache_bytes(&cache, &bytes));
    void *const memory = test_alloc_guarded(bytes);
    memset(memory, 0xff, bytes); // NaN in every dtype
    CHECK_OK(fdma_cache_init(&cache, memory));
    return cache;
}

/* ---- steps ---- */

/* One call: its streams, in the order of `index`, and the tokens that follow their committed
 * ones. */
typedef struct step {
    int64_t batch, new_len, q_len;
    int32_t stream[streams], index[streams], tokens[streams], commit[streams];
    fdma_tensor q, k, v, score, out, lse;
} step;

static inline void copy_token(fdma_tensor to, int64_t b, int64_t to_token, fdma_tensor all,
                              int64_t stream, int64_t from_token) {
    for (int64_t h = 0; h < to.shape[to.rank == 4 ? 2 : 1]; h++)
        copy_key(to, b, to_token, all, stream, from_token, h);
}

/* Gives a step, whose sizes and lists are set, the tokens that follow the first `seen` ones. */
static inline void make_step(const whole_call *x, const int32_t *seen, step *s) {
    const int64_t dim = x->test->head_dim;
    s->q = new_tensor(x->dtype, s->batch, s->q_len, q_heads, dim);
    s->k = new_tensor(x->dtype, s->batch, s->new_len, kv_heads, dim);
    s->v = new_tensor(x->dtype, s->batch, s->new_len, kv_heads, dim);
    s->score = new_tensor(FDMA_FLOAT32, s->batch, kv_heads, s->new_len, -1);
    s->out = new_output(x->dtype, s->batch, s->q_len, q_heads, dim);
    s->lse = new_output(FDMA_FLOAT32, s->batch, q_heads, s->q_len, -1);
    for (int64_t n = 0; n < s->batch * s->new_len; n++) {
        const int64_t b = n / s->new_len, m = n % s->new_len, i = m - (s->new_len - s->q_len);
        const int64_t p = seen[s->stream[b]] + m;
        if (m >= s->tokens[b])
            continue;
        copy_token(s->k, b, m, x->k, s->stream[b], p);
        copy_token(s->v, b, m, x->v, s->stream[b], p);
        copy_token(s->score, b, m, x->score, s->stream[b], p);
        if (i >= 0)
            copy_token(s->q, b, i, x->q, s->stream[b], p);
    }
}

static inline void plan_step(const whole_call *x, const int32_t *seen, uint64_t *state, step *s) {
    s->batch = 1 + random_below(state, streams);
    s->new_len = 1 + random_below(state, most_tokens);
    s->q_len = 1 + random_below(state, s->new_len);
    const int32_t first = (int32_t)random_below(state, streams);
    for (int64_t b = 0; b < s->batch; b++) {
        const int32_t stream = (first + (int32_t)b) % streams;
        const int64_t left = x->test->len / (stream + 1) - seen[stream];
        const int64_t most = left < s->new_len ? left : s->new_len;
        s->stream[b] = stream;
        s->index[b] = random_below(state, 9) > 0 ? 4 - stream : -1;
        s->tokens[b] = (int32_t)(random_below(state, 2) ? most : random_below(state, most + 1));
        s->commit[b] = (int32_t)random_below(state, s->tokens[b] + 1);
    }
    make_step(x, seen, s);
}

static inline fdma_decode_args step_args(const whole_call *x, const fdma_cache *cache, step *s,
                                         const char *kernel) {
    fdma_decode_args args = {.size = sizeof args,
                             .cache = *cache,
                             .index = fdma_tensor_1d(s->index, FDMA_INT32, s->batch),
                             .q = s->q,
                             .k = s->k,
                             .v = s->v,
                             .n_tokens = fdma_tensor_1d(s->tokens, FDMA_INT32, s->batch),
                             .commit = fdma_tensor_1d(s->commit, FDMA_INT32, s->batch),
                             .out = s->out,
                             .lse = s->lse,
                             .softcap = x->test->softcap,
                             .bias_form = x->test->bias_form,
                             .exec = {.kernel = kernel, .threads = 2}};
    if (x->test->levels > 0)
        args.score = s->score;
    else
        args.dt_proj = x->dt_proj, args.a = x->a, args.dt_bias = x->dt_bias;
    return args;
}

static inline void run_step(const whole_call *x, const fdma_cache *cache, step *s,
                            const char *kernel) {
    fdma_decode_args args = step_args(x, cache, s, kernel);
    if (kernel != NULL && !is_device_kernel(kernel) && !operation_takes("decode", kernel, x->dtype))
        args.exec.kernel = NULL; // of another operation, and its point decodes other dtypes
    CHECK_OK(run_decode(&args));
}

static inline bool is_taken(const whole_call *x, const fdma_cache *cache, const char *kernel) {
    const int32_t none[streams] = {0};
    uint64_t state = 1;
    step s = {0};
    plan_step(x, none, &state, &s);
    fdma_decode_args args = step_args(x, cache, &s, kernel);
    return call_takes(operation_decode, &args);
}

/* Row i of an entry equals the row of its token in the whole call. A row without a token is
 * empty. */
static inline void check_step(const whole_call *x, const int32_t *seen, const step *s) {
    const int64_t dim = x->test->head_dim;
    const double tolerance = x->dtype == FDMA_FLOAT32 ? 2e-5 : 4 * step_of(x->dtype);
    for (int64_t n = 0; n < s->batch * s->q_len * q_heads; n++) {
        const int64_t b = n / q_heads / s->q_len, i = n / q_heads % s->q_len, h = n % q_heads;
        const int64_t m = i + s->new_len - s->q_len, p = seen[s->stream[b]] + m;
        const bool empty = s->index[b] < 0 || m >= s->tokens[b];
        const float lse = ((const float *)s->lse.data)[(b * q_heads + h) * s->q_len + i];
        const int64_t row = (s->stream[b] * q_heads + h) * x->test->len + p;
        if (empty)
            CHECK(lse == -INFINITY);
        else
            CHECK_NEAR(lse, ((const float *)x->lse.data)[row], 2e-5 * (1 + fabsf(lse)));
        for (int64_t d = 0; d < dim; d++) {
            const int64_t at = ((b * s->q_len + i) * q_heads + h) * dim + d;
            const int64_t from = ((s->stream[b] * x->test->len + p) * q_heads + h) * dim + d;
            const double want = empty ? 0 : load_double(x->out.data, x->dtype, from);
            CHECK_NEAR(load_double(s->out.data, x->dtype, at), want, tolerance);
        }
    }
}

/* The rows of a sequence hold the keys that are kept after `seen` tokens, each in its slot. */
static inline void check_cache(const whole_call *x, const fdma_cache *cache, const int32_t *seen) {
    const int64_t rows = x->test->window + x->test->recent;
    for (int64_t n = 0; n < streams * kv_heads; n++) {
        const int64_t stream = n / kv_heads, g = n % kv_heads, sequence = 4 - stream;
        int64_t kept = 0, filled = 0;
        CHECK_INT(((const int32_t *)cache->table.seen.data)[sequence], seen[stream]);
        for (int64_t p = 0; p < seen[stream]; p++) {
            if (int_at(x->selection.expiry, stream, g, p) < seen[stream])
                continue;
            const int32_t row = int_at(x->selection.slot, stream, g, p);
            CHECK_INT(int_at(cache->table.position, sequence, g, row), p);
            kept++;
        }
        for (int64_t row = 0; row < rows; row++)
            filled += int_at(cache->table.position, sequence, g, row) >= 0;
        CHECK_INT(filled, kept);
    }
}

static inline int64_t len_of_stream(const whole_call *x, int64_t stream) {
    return x->test->len / (stream + 1);
}

/* Decodes the tokens that remain after the first `seen` of each stream, in random steps. */
static inline void decode_streams(const whole_call *x, const fdma_cache *cache, int32_t *seen,
                                  uint64_t *state, const char *kernel) {
    for (int n = 0; n < 4 * x->test->len && seen[0] < x->test->len; n++) {
        step s = {0};
        plan_step(x, seen, state, &s);
        run_step(x, cache, &s, kernel);
        check_step(x, seen, &s);
        for (int64_t b = 0; b < s.batch; b++)
            seen[s.stream[b]] += s.index[b] >= 0 ? s.commit[b] : 0;
        check_cache(x, cache, seen);
    }
    CHECK(seen[0] > 2 * x->test->len / 3);
}

/* Decodes and commits the next token of stream 0 in the sequences of `index`, each of them with
 * `seen` tokens of it. */
static inline void decode_token(const whole_call *x, const fdma_cache *cache, int32_t seen,
                                const int32_t *index, int64_t batch, const char *kernel) {
    const int32_t passed[streams] = {seen};
    step s = {.batch = batch, .new_len = 1, .q_len = 1};
    for (int64_t b = 0; b < batch; b++) {
        s.index[b] = index[b];
        s.tokens[b] = s.commit[b] = 1;
    }
    make_step(x, passed, &s);
    run_step(x, cache, &s, kernel);
    check_step(x, passed, &s);
}
