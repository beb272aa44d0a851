/* See check/problem.h. */
#include "check/problem.h"

#include "check/pairs.h"
#include "check/rotary.h"
#include "common/arrays.h"
#include "common/random.h"

#include <math.h>

/* ---- score, select, lists and forward ---- */

/* Scores that are NaN, infinite, zero or denormal. Most rows still have finite results: the early
 * NaN are evicted by every later key, and only the rows after the one late +inf become NaN. */
static float special_score(const check_case *test, int64_t j, float ordinary) {
    const int64_t quarter = test->kv_len / 4;
    const bool early_nan = check_is_selected(test) && j < quarter;
    if (j % 9 == 4 && (early_nan || j > 3 * quarter))
        return NAN;
    if (j == 7 * test->kv_len / 8 && check_is_causal(test))
        return INFINITY;
    switch (j % 8) {
    case 1:
        return -INFINITY;
    case 3:
        return j % 3 != 0 ? 0.0F : -0.0F;
    case 5:
        return j % 3 != 0 ? 1e-41F : -1e-41F;
    default:
        return ordinary;
    }
}

static float score_of(const check_case *test, int64_t j, uint64_t *random) {
    const float relative = (float)j / (float)test->kv_len;
    const float ordinary = (float)(1.5 * random_normal(random));
    switch (test->scores) {
    case SCORES_TIED:
        return 0.25F;
    case SCORES_RISING:
        return 4 * relative - 2;
    case SCORES_FALLING:
        return 2 - 4 * relative;
    case SCORES_CLIMB:
        return 3 * (float)j;
    case SCORES_DIVE:
        return -3 * (float)j;
    case SCORES_SAW:
        return (float)(j % 23) / 8;
    case SCORES_STEPS:
        return (float)(random_bits(random) >> 62) / 2;
    case SCORES_CROWN:
        return j == 0 ? 3 : (float)(j % 2);
    case SCORES_SPECIAL:
        return special_score(test, j, ordinary);
    default:
        return ordinary;
    }
}

static void fill_scores(check_problem *problem, uint64_t *random) {
    const check_case *test = problem->test;
    for (int64_t at = 0; at < test->batch * test->kv_heads * test->kv_len; at++) {
        const int64_t j = at % test->kv_len, b = at / test->kv_len / test->kv_heads;
        const float ranked = score_of(test, j, random);
        const float score = check_key_is_valid(test, b, j) ? ranked : NAN;
        const float bias = test->bias_form == FDMA_BIAS_EXP ? expf(score) : score;
        check_store(problem->score, at, (double)score);
        if (problem->bias.rank > 0)
            check_store(problem->bias, at, (double)bias);
    }
}

/* Writes key_valid, and NaN to the k and v of keys that are not valid, which nobody may read. */
static void spoil_invalid_keys(check_problem *problem) {
    const check_case *test = problem->test;
    const int64_t width = test->kv_heads * test->head_dim;
    for (int64_t key = 0; key < test->batch * test->kv_len; key++) {
        const bool valid = check_key_is_valid(test, key / test->kv_len, key % test->kv_len);
        ((uint8_t *)problem->key_valid.data)[key] = valid;
        for (int64_t i = 0; i < width && !valid; i++) {
            check_store(problem->k, key * width + i, (double)NAN);
            check_store(problem->v, key * width + i, (double)NAN);
        }
    }
}

static void allocate_inputs(check_problem *problem) {
    const check_case *test = problem->test;
    const int64_t q_shape[4] = {test->batch, test->q_len, test->q_heads, test->head_dim};
    const int64_t kv_shape[4] = {test->batch, test->kv_len, test->kv_heads, test->head_dim};
    const int64_t proj_shape[2] = {test->kv_heads, test->kv_heads * test->head_dim};
    const int64_t score_shape[3] = {test->batch, test->kv_heads, test->kv_len};
    const int64_t valid_shape[2] = {test->batch, test->kv_len};
    const int64_t lse_shape[3] = {test->batch, test->q_heads, test->q_len};
    const int64_t pair_shape[4] = {test->batch, test->q_heads, test->q_len, test->kv_len};
    const fdma_dtype dtype = problem->dtype;

    problem->q = check_layout_tensor(dtype, test->layout, q_shape);
    problem->k = check_layout_tensor(dtype, test->layout, kv_shape);
    problem->v = check_layout_tensor(dtype, test->layout, kv_shape);
    problem->dt_proj = check_tensor(dtype, 2, proj_shape);
    problem->a = check_tensor(dtype, 1, &test->kv_heads);
    problem->score = check_tensor(FDMA_FLOAT32, 3, score_shape);
    problem->forward_lse = check_tensor(FDMA_FLOAT32, 3, lse_shape);
    problem->probability = fdma_dense_tensor(NULL, FDMA_FLOAT32, 4, pair_shape);
    if (check_has_dt_bias(test))
        problem->dt_bias = check_tensor(dtype, 1, &test->kv_heads);
    if (check_has_sink_logit(test))
        problem->sink_logit = check_tensor(FDMA_FLOAT32, 1, &test->q_heads);
    if (check_has_rng_state(test)) {
        const int64_t numbers = 2;
        problem->rng_state = check_tensor(FDMA_INT64, 1, &numbers);
        ((int64_t *)problem->rng_state.data)[0] = (int64_t)check_seed(test);
        ((int64_t *)problem->rng_state.data)[1] = test->kv_len;
    }
    if (test->bias_form != FDMA_BIAS_NONE)
        problem->bias = check_tensor(FDMA_FLOAT32, 3, score_shape);
    if (test->padding != PADDING_NONE)
        problem->key_valid = check_tensor(FDMA_UINT8, 2, valid_shape);
    if (check_is_packed(test)) {
        const int64_t starts = test->sequences + 1;
        problem->starts = check_tensor(FDMA_INT32, 1, &starts);
    }
    if (check_is_selected(test)) {
        problem->selection = (fdma_selection){
            .size = sizeof problem->selection,
            .expiry = check_tensor(FDMA_INT32, 3, score_shape),
            .slot = check_tensor(FDMA_INT32, 3, score_shape),
            .window = test->window,
            .recent = test->recent,
            .sinks = test->sinks,
            .kv_len = test->kv_len,
            .scope = check_scope(test),
            .gap = check_gap(test),
        };
    }
}

/* ---- decode ---- */

enum { most_tokens = 64 }; /* tokens of a call of fdma_decode() */

static int64_t tokens_of(const check_case *test) {
    const int64_t tokens = test->q_len < test->kv_len ? test->q_len : test->kv_len;
    return tokens < most_tokens ? tokens : most_tokens;
}

bool check_has_decode(const check_case *test) {
    return test->batch > 0 && test->mask == MASK_CAUSAL && check_is_selected(test) &&
           !check_is_packed(test) && test->padding == PADDING_NONE &&
           test->recent <= test->kv_len && test->window <= test->kv_len;
}

/* Copies `count` positions of every sequence, [batch, len, heads, dim] or [batch, heads, len]. */
static void copy_positions(fdma_tensor to, fdma_tensor from, int64_t first, int64_t count) {
    const double *const values = check_widen(from);
    const bool by_row = from.rank == 4;
    const int64_t outer = by_row ? from.shape[0] : from.shape[0] * from.shape[1];
    const int64_t inner = by_row ? from.shape[2] * from.shape[3] : 1;
    const int64_t from_len = from.shape[by_row ? 1 : 2], to_len = to.shape[by_row ? 1 : 2];
    for (int64_t o = 0; o < outer; o++)
        for (int64_t n = 0; n < count * inner; n++)
            check_store(to, o * to_len * inner + n, values[(o * from_len + first) * inner + n]);
}

/* The stream begins with the `past` keys before the tokens. All of these keys have a row. Rows
 * without a key hold NaN. */
static void fill_cache(check_problem *problem, int64_t first, int64_t past) {
    const check_case *test = problem->test;
    fdma_cache *const cache = &problem->cache;
    const int64_t rows = cache->k.shape[1];
    check_fill(cache->k, (double)NAN);
    check_fill(cache->v, (double)NAN);
    copy_positions(cache->k, problem->k, first, past);
    copy_positions(cache->v, problem->v, first, past);
    copy_positions(cache->table.score, problem->score, first, past);
    if (problem->bias.rank > 0)
        copy_positions(cache->bias, problem->bias, first, past);
    for (int64_t n = 0; n < test->batch * test->kv_heads * rows; n++)
        ((int32_t *)cache->table.position.data)[n] = n % rows < past ? (int32_t)(n % rows) : -1;
    for (int64_t b = 0; b < test->batch; b++)
        ((int32_t *)cache->table.seen.data)[b] = (int32_t)past;
}

fdma_cache check_empty_cache(const check_problem *problem, int64_t sequences) {
    const check_case *const test = problem->test;
    const int64_t rows = test->window + test->recent;
    const int64_t row_shape[4] = {sequences, rows, test->kv_heads, test->head_dim};
    const int64_t number_shape[3] = {sequences, test->kv_heads, rows};
    return (fdma_cache){
        .k = check_layout_tensor(problem->dtype, test->layout, row_shape),
        .v = check_layout_tensor(problem->dtype, test->layout, row_shape),
        .bias = check_tensor(FDMA_FLOAT32, 3, number_shape),
        .table = {.score = check_tensor(FDMA_FLOAT32, 3, number_shape),
                  .position = check_tensor(FDMA_INT32, 3, number_shape),
                  .seen = check_tensor(FDMA_INT32, 1, &sequences)},
        .sequences = sequences,
        .kv_heads = test->kv_heads,
        .head_dim = test->head_dim,
        .window = test->window,
        .recent = test->recent,
        .sinks = test->sinks,
        .dtype = problem->dtype,
    };
}

static void make_decode_inputs(check_problem *problem) {
    const check_case *test = problem->test;
    const int64_t tokens = tokens_of(test), before = test->kv_len - tokens;
    const int64_t rows = test->window + test->recent, dim = test->head_dim;
    const int64_t past = before < rows ? before : rows;
    const int64_t q_shape[4] = {test->batch, tokens, test->q_heads, dim};
    const int64_t new_shape[4] = {test->batch, tokens, test->kv_heads, dim};
    const int64_t score_shape[3] = {test->batch, test->kv_heads, tokens};
    const int64_t lse_shape[3] = {test->batch, test->q_heads, tokens};
    problem->cache = check_empty_cache(problem, test->batch);
    problem->new_q = check_layout_tensor(problem->dtype, test->layout, q_shape);
    problem->new_k = check_layout_tensor(problem->dtype, test->layout, new_shape);
    problem->new_v = check_layout_tensor(problem->dtype, test->layout, new_shape);
    problem->new_score = check_tensor(FDMA_FLOAT32, 3, score_shape);
    problem->new_lse = check_tensor(FDMA_FLOAT32, 3, lse_shape);
    problem->commit = check_tensor(FDMA_INT32, 1, &test->batch);
    copy_positions(problem->new_q, problem->q, test->q_len - tokens, tokens);
    copy_positions(problem->new_k, problem->k, before, tokens);
    copy_positions(problem->new_v, problem->v, before, tokens);
    copy_positions(problem->new_score, problem->score, before, tokens);
    fill_cache(problem, before - past, past);
}

void check_make_inputs(check_problem *problem, const check_case *test, fdma_dtype dtype,
                       int32_t device) {
    const double width = (double)(test->kv_heads * test->head_dim);
    uint64_t random = check_seed(test), random_of_dt_bias = random + 2, random_of_sink = random + 3;
    *problem = (check_problem){.test = test, .dtype = dtype, .device = device};
    allocate_inputs(problem);
    check_fill_normal(problem->q, &random, 1);
    check_fill_normal(problem->k, &random, 1);
    check_fill_normal(problem->v, &random, 1);
    check_fill_normal(problem->dt_proj, &random, 1 / sqrt(width));
    check_fill_normal(problem->a, &random, 1);
    check_fill_normal(problem->dt_bias, &random_of_dt_bias, 1);
    check_fill_normal(problem->sink_logit, &random_of_sink, 2);
    fill_scores(problem, &random);
    check_make_pairs(problem);
    if (problem->key_valid.rank > 0)
        spoil_invalid_keys(problem);
    for (int64_t n = 0; n < element_count(&problem->starts); n++)
        ((int32_t *)problem->starts.data)[n] = (int32_t)check_start(test, n);
    if (check_has_decode(test))
        make_decode_inputs(problem);
    check_make_rotary(problem);
}

/* ---- gradients and merge ---- */

/* Stores the reference's result in `to`, rounded to its dtype, as a caller would hold it. */
static fdma_tensor rounded(const check_result *result, fdma_tensor to) {
    check_store_all(to, result->reference);
    return to;
}

static fdma_tensor tensor_like(const check_problem *problem, const fdma_tensor *like) {
    return check_layout_tensor(problem->dtype, problem->test->layout, like->shape);
}

static fdma_tensor random_lse(const check_problem *problem, uint64_t *random, double deviation) {
    const fdma_tensor lse = check_tensor_like(problem->forward_lse);
    check_fill_normal(lse, random, deviation);
    return lse;
}

static void make_backward_inputs(check_problem *problem, uint64_t *random) {
    const check_result *const forward = problem->results[CHECK_FORWARD];
    problem->forward_out = rounded(&forward[0], tensor_like(problem, &problem->q));
    problem->forward_lse = rounded(&forward[1], random_lse(problem, random, 0));
    problem->dout = tensor_like(problem, &problem->q);
    check_fill_normal(problem->dout, random, 1);
    if (random_bits(random) % 2 == 0)
        problem->dlse = random_lse(problem, random, 1);
}

/* dbias is 0 for some keys in all heads, whose v may then not be read, and for others in some
 * heads: queries did not keep them. */
static void make_score_backward_inputs(check_problem *problem, uint64_t *random) {
    const check_case *test = problem->test;
    const int64_t kv_len = test->kv_len, heads = test->kv_heads, dim = test->head_dim;
    const double *v = check_widen(problem->v);
    problem->score_dbias = check_tensor(FDMA_FLOAT32, 3, problem->score.shape);
    problem->score_v = tensor_like(problem, &problem->v);
    problem->prior_dv = tensor_like(problem, &problem->v);
    check_fill_normal(problem->score_dbias, random, 1);
    check_fill_normal(problem->prior_dv, random, 1);
    for (int64_t key = 0; key < test->batch * kv_len; key++) {
        const int64_t b = key / kv_len, j = key % kv_len;
        const bool unread = j % 4 == 1, valid = check_key_is_valid(test, b, j);
        for (int64_t g = 0; g < heads; g++)
            if (unread || !valid || (j + g) % 3 == 2)
                check_store(problem->score_dbias, (b * heads + g) * kv_len + j,
                            valid ? 0 : (double)NAN);
        for (int64_t i = key * heads * dim; i < (key + 1) * heads * dim; i++)
            check_store(problem->score_v, i, unread ? (double)NAN : v[i]);
    }
}

/* True if partial result `n` of a row is empty. Some rows have two empty ones. */
static bool is_empty_partial(int64_t row, int n) { return row % (n == 0 ? 3 : 5) == 1; }

static void empty_partial(check_problem *problem, int64_t row, int n) {
    const check_case *test = problem->test;
    const int64_t q_len = test->q_len, heads = test->q_heads, dim = test->head_dim;
    const int64_t i = row % q_len, h = row / q_len % heads, b = row / q_len / heads;
    check_store(problem->partial_lse[n], row, -(double)INFINITY);
    for (int64_t d = 0; d < dim; d++) // out of an empty partial result may not be read
        check_store(problem->partial_out[n], ((b * q_len + i) * heads + h) * dim + d, (double)NAN);
}

static void make_merge_inputs(check_problem *problem, uint64_t *random) {
    const check_case *test = problem->test;
    for (int n = 0; n < 2; n++) {
        problem->partial_out[n] = tensor_like(problem, &problem->q);
        problem->partial_lse[n] = random_lse(problem, random, 3);
        check_fill_normal(problem->partial_out[n], random, 1);
        for (int64_t row = 0; row < test->batch * test->q_heads * test->q_len; row++)
            if (is_empty_partial(row, n))
                empty_partial(problem, row, n);
    }
    if (test->scores == SCORES_SPECIAL && test->q_len > 2)
        check_store(problem->partial_lse[0], 2, (double)NAN); // makes the whole row NaN
}

void check_make_gradient_inputs(check_problem *problem) {
    uint64_t random = check_seed(problem->test) + 1;
    make_backward_inputs(problem, &random);
    make_score_backward_inputs(problem, &random);
    make_merge_inputs(problem, &random);
}
