/* The reference kernels that compute with real numbers, compiled in two precisions:
 * docs/algorithm.md in plain loops.
 *
 * In "reference" the number type is double. In "reference/float32" it is float: these kernels are
 * the plain evaluation, whose error sets the tolerance of all other kernels. They compute as a
 * framework does that has one kernel for each tensor operation. Products are summed in float32, and
 * every intermediate tensor (logits, probabilities, their gradients) is rounded to the dtype of the
 * call. */
#pragma once

#include "core/adapter.h"
#include "core/cache.h"
#include "core/element.h"
#include "core/kernel.h"
#include "core/rotary.h"
#include "reference/reference.h"

#include <string.h>
#include <tgmath.h> // exp() and its like, for either type

#ifdef FDMA_REFERENCE_FLOAT32
#define REFERENCE_NAME "reference/float32"
typedef float real;
#else
#define REFERENCE_NAME "reference"
typedef double real;
#endif

static const real infinity = (real)INFINITY;

static inline real load(const fdma_tensor *tensor, int64_t offset) {
    return (real)fdma_load(tensor, offset);
}

static inline void store(const fdma_tensor *tensor, int64_t offset, real value) {
    fdma_store(tensor, offset, (double)value);
}

/* An element of an intermediate tensor of that dtype. */
static inline real rounded(fdma_dtype dtype, real value) {
#ifdef FDMA_REFERENCE_FLOAT32
    if (dtype == FDMA_FLOAT16 || dtype == FDMA_BFLOAT16) {
        uint16_t bits;
        const fdma_tensor element = {.data = &bits, .dtype = dtype};
        store(&element, 0, value);
        return load(&element, 0);
    }
#endif
    (void)dtype;
    return value;
}

static inline real softplus(real x) { return (x > 0 ? x : 0) + log1p(exp(-fabs(x))); }

/* Elements that are used many times are converted once. */
static inline void load_row(real *row, const fdma_tensor *tensor, int64_t offset, int64_t count) {
    for (int64_t d = 0; d < count; d++)
        row[d] = load(tensor, offset + d);
}

static inline real dot(const real *x, const real *y, int64_t count) {
    real sum = 0;
    for (int64_t d = 0; d < count; d++)
        sum += x[d] * y[d];
    return sum;
}

static inline void put(const fdma_tensor *tensor, int64_t at, real value, bool add) {
    store(tensor, at, add ? load(tensor, at) + value : value);
}

static inline real *take_reals(fdma_arena *arena, int64_t count) {
    return fdma_arena_take(arena, (size_t)count * sizeof(real));
}

/* The row of a key in a tensor shaped as k, or its element in one shaped as bias. */
typedef struct key_row {
    const fdma_tensor *tensor;
    int64_t offset;
} key_row;

static inline key_row row_of_key(const fdma_problem *problem, const fdma_tensor *own,
                                 const fdma_tensor *carried, int64_t b, int64_t j, int64_t g) {
    if (j >= problem->carried_len)
        return (key_row){own, offset_of(own, b, j - problem->carried_len, g)};
    const key_indices at = indices_of_carried(problem, b, j);
    return (key_row){carried, offset_of(carried, at.first, at.row, g)};
}

static inline void load_key(real *row, const fdma_problem *problem, const fdma_tensor *own,
                            const fdma_tensor *carried, int64_t b, int64_t j, int64_t g) {
    const key_row key = row_of_key(problem, own, carried, b, j, g);
    load_row(row, key.tensor, key.offset, problem->head_dim);
}

/* The element of key j in a tensor shaped as bias. */
static inline key_row number_of_key(const fdma_problem *problem, const fdma_tensor *own,
                                    const fdma_tensor *carried, int64_t b, int64_t g, int64_t j) {
    const key_storage storage = storage_of_key(problem, own, carried, j);
    return (key_row){storage.tensor, offset_of(storage.tensor, b, g, storage.index)};
}

/* The sink logit of a query head; -inf if the call has none. */
static inline real sink_logit_of(const fdma_problem *problem, int64_t h) {
    const fdma_tensor *const sink = &problem->sink_logit;
    return is_present(sink) ? load(sink, offset_of(sink, h, 0, 0)) : -infinity;
}

/* x of a pair after dropout: 0, even for NaN, if the pair is dropped; else scaled up. */
static inline real after_dropout(const fdma_problem *problem, bool dropped, real x) {
    return dropped ? 0 : x * (real)dropout_scale(problem->dropout.threshold);
}

typedef struct logit {
    real value;
    real slope; /* derivative of the softcap; 1 without one */
} logit;

/* The logit of query i of head h, whose row is q, and of key j, whose row is k. */
static inline logit logit_of(const fdma_problem *problem, const real *q, const real *k, int64_t b,
                             int64_t h, int64_t i, int64_t j) {
    const fdma_tensor *const pairs = &problem->attn_bias;
    const fdma_dtype dtype = problem->dtype;
    const real scale = (real)problem->scale, cap = (real)problem->softcap;
    real s = rounded(dtype, rounded(dtype, dot(q, k, problem->head_dim)) * scale), slope = 1;
    if (cap > 0) {
        const real capped = rounded(dtype, tanh(s / cap));
        s = rounded(dtype, cap * capped);
        slope = rounded(dtype, 1 - capped * capped);
    }
    if (is_present(&problem->bias)) {
        const key_row bias = number_of_key(problem, &problem->bias, &problem->bias_carried, b,
                                           h / problem->group, j);
        s += load(bias.tensor, bias.offset);
    }
    if (is_present(pairs))
        s += load(pairs, offset_of_pair(problem, pairs, b, h, i, j));
    return (logit){rounded(dtype, s), slope};
}

/* ---- forward, one row after another ---- */

typedef struct row_scratch {
    real *weights; /* [kv_len] */
    real *q, *key; /* [head_dim]: the row's query, and k or v of a key */
    real *out;     /* [head_dim] */
} row_scratch;

static row_scratch take_row(const fdma_problem *problem, fdma_arena *arena) {
    const int64_t dim = problem->head_dim;
    return (row_scratch){take_reals(arena, problem->kv_len), take_reals(arena, dim),
                         take_reals(arena, dim), take_reals(arena, dim)};
}

/* The weights exp(s[j] - row_max) of one row's keys, 0 for keys that it does not keep. Returns
 * their sum plus the weight of the sink logit: 0 for an empty row, NaN if a kept logit is NaN or
 * +inf. */
static real weigh_keys(const fdma_problem *problem, int64_t b, int64_t i, int64_t h,
                       const row_scratch *row, real *row_max) {
    const int64_t g = h / problem->group;
    const real sink = sink_logit_of(problem, h);
    real *const weights = row->weights;
    real sum = 0;
    *row_max = sink;
    load_row(row->q, &problem->q, offset_of(&problem->q, b, i, h), problem->head_dim);
    for (int64_t j = 0; j < problem->kv_len; j++) {
        weights[j] = -infinity;
        if (attends_to(problem, b, h, i, j)) {
            load_key(row->key, problem, &problem->k, &problem->k_carried, b, j, g);
            weights[j] = logit_of(problem, row->q, row->key, b, h, i, j).value;
        }
        *row_max = isnan(weights[j]) || weights[j] > *row_max ? weights[j] : *row_max;
        if (isnan(*row_max))
            return *row_max;
    }
    if (sink != -infinity)
        sum += exp(sink - *row_max); // NaN if the sink logit is NaN or +inf
    for (int64_t j = 0; j < problem->kv_len; j++) {
        weights[j] = weights[j] == -infinity ? 0 : exp(weights[j] - *row_max); // -inf - -inf is NaN
        sum += weights[j];
    }
    return sum;
}

static void attend_row(const fdma_problem *problem, int64_t b, int64_t i, int64_t h,
                       const row_scratch *row) {
    const int64_t g = h / problem->group, p = query_position(problem, i);
    real row_max;
    const real sum = weigh_keys(problem, b, i, h, row, &row_max);
    const row_code code = row_code_of(problem, b, h, p);
    for (int64_t d = 0; d < problem->head_dim; d++)
        row->out[d] = isnan(sum) ? sum : 0;
    for (int64_t j = 0; j < problem->kv_len && sum > 0; j++) {
        if (!attends_to(problem, b, h, i, j))
            continue;
        const bool dropped = is_dropped(problem, code, b, g, j, p);
        const real weight = rounded(problem->dtype, row->weights[j] / sum);
        const real probability = rounded(problem->dtype, after_dropout(problem, dropped, weight));
        load_key(row->key, problem, &problem->v, &problem->v_carried, b, j, g);
        for (int64_t d = 0; d < problem->head_dim; d++)
            row->out[d] += probability * row->key[d];
    }
    for (int64_t d = 0; d < problem->head_dim; d++)
        store(&problem->out, offset_of(&problem->out, b, i, h) + d, row->out[d]);
    if (is_present(&problem->lse))
        store(&problem->lse, offset_of(&problem->lse, b, h, i), row_max + log(sum));
}

static size_t forward_workspace(const fdma_problem *problem) {
    fdma_arena arena = {0};
    take_row(problem, &arena);
    return fdma_arena_size(&arena);
}

static fdma_status run_forward(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const row_scratch row = take_row(problem, &arena);
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t h = 0; h < problem->q_heads; h++)
            for (int64_t i = 0; i < problem->q_len; i++)
                attend_row(problem, b, i, h, &row);
    return FDMA_OK;
}

/* ---- the probability of every query and key, from the lse of forward ---- */

static void write_probabilities(const fdma_problem *problem, int64_t b, int64_t h, int64_t i,
                                const row_scratch *row) {
    const int64_t g = h / problem->group, p = query_position(problem, i);
    const real lse = load(&problem->lse, offset_of(&problem->lse, b, h, i));
    const row_code code = row_code_of(problem, b, h, p);
    load_row(row->q, &problem->q, offset_of(&problem->q, b, i, h), problem->head_dim);
    for (int64_t j = 0; j < problem->kv_len; j++) {
        real probability = 0;
        if (lse != -infinity && attends_to(problem, b, h, i, j)) {
            load_key(row->key, problem, &problem->k, &problem->k_carried, b, j, g);
            probability = exp(logit_of(problem, row->q, row->key, b, h, i, j).value - lse);
            probability =
                after_dropout(problem, is_dropped(problem, code, b, g, j, p), probability);
        }
        store(&problem->probability, offset_of(&problem->probability, b, h, i) + j, probability);
    }
}

static fdma_status run_probabilities(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const row_scratch row = take_row(problem, &arena);
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t h = 0; h < problem->q_heads; h++)
            for (int64_t i = 0; i < problem->q_len; i++)
                write_probabilities(problem, b, h, i, &row);
    return FDMA_OK;
}

/* ---- backward, one row after another ---- */

/* Sums of one (b, g), and inputs of a row and a key. */
typedef struct key_gradients {
    real *dk, *dv;  /* [kv_len, head_dim] */
    real *dbias;    /* [kv_len] */
    real *dpairs;   /* sums of dattn_bias over all (b, g), contiguous */
    real *dq;       /* [head_dim] of the row */
    real *q, *dout; /* [head_dim] of the row */
    real *k, *v;    /* [head_dim] of the key */
} key_gradients;

static key_gradients take_sums(const fdma_problem *problem, fdma_arena *arena) {
    const int64_t keys = problem->kv_len, dim = problem->head_dim;
    return (key_gradients){
        take_reals(arena, keys * dim), take_reals(arena, keys * dim),
        take_reals(arena, keys),       take_reals(arena, count_elements(&problem->dattn_bias)),
        take_reals(arena, dim),        take_reals(arena, dim),
        take_reals(arena, dim),        take_reals(arena, dim),
        take_reals(arena, dim)};
}

static size_t backward_workspace(const fdma_problem *problem) {
    fdma_arena arena = {0};
    take_sums(problem, &arena);
    return fdma_arena_size(&arena);
}

static real dlse_of(const fdma_problem *problem, int64_t b, int64_t i, int64_t h) {
    const fdma_tensor *const dlse = &problem->dlse;
    return is_present(dlse) ? load(dlse, offset_of(dlse, b, h, i)) : 0;
}

/* delta of a row, summed from the last channel to the first. In a row that keeps one key it equals
 * <dout, v>, which is subtracted from it. If both were summed in the same order, their rounding
 * errors would cancel. */
static real delta_of(const fdma_problem *problem, int64_t b, int64_t i, int64_t h) {
    const fdma_tensor *const dout = &problem->dout, *const out = &problem->out;
    real sum = 0;
    for (int64_t d = problem->head_dim - 1; d >= 0; d--)
        sum += rounded(problem->dtype, load(dout, offset_of(dout, b, i, h) + d) *
                                           load(out, offset_of(out, b, i, h) + d));
    return rounded(problem->dtype, sum) - dlse_of(problem, b, i, h);
}

/* Inputs of a row's gradients beside its q and dout. */
typedef struct row_inputs {
    int64_t p; /* its position */
    real lse, delta;
    row_code code;
} row_inputs;

/* Adds the terms of one row, whose q and dout are loaded, and one key. */
static void add_key(const fdma_problem *problem, int64_t b, int64_t h, int64_t i, int64_t j,
                    const row_inputs *row, const key_gradients *sums) {
    const int64_t g = h / problem->group;
    const fdma_dtype dtype = problem->dtype;
    const int64_t dim = problem->head_dim;
    const bool drops = is_dropped(problem, row->code, b, g, j, row->p);
    load_key(sums->k, problem, &problem->k, &problem->k_carried, b, j, g);
    load_key(sums->v, problem, &problem->v, &problem->v_carried, b, j, g);
    const logit s = logit_of(problem, sums->q, sums->k, b, h, i, j);
    const real p = rounded(dtype, exp(s.value - row->lse));
    const real dropped = rounded(dtype, after_dropout(problem, drops, p));
    const real product = rounded(dtype, dot(sums->dout, sums->v, dim));
    const real dp = rounded(dtype, after_dropout(problem, drops, product));
    const real ds = rounded(dtype, p * (dp - row->delta));
    const real dproduct = rounded(dtype, rounded(dtype, ds * s.slope) * (real)problem->scale);
    sums->dbias[j] += ds;
    if (is_present(&problem->dattn_bias)) {
        const fdma_tensor *const to = &problem->dattn_bias;
        const fdma_tensor pairs = dense_pairs(to, sums->dpairs, to->dtype);
        sums->dpairs[offset_of_pair(problem, &pairs, b, h, i, j)] += ds;
    }
    for (int64_t d = 0; d < dim; d++) {
        sums->dv[j * dim + d] += dropped * sums->dout[d];
        sums->dk[j * dim + d] += dproduct * sums->q[d];
        sums->dq[d] += dproduct * sums->k[d];
    }
}

static void add_row(const fdma_problem *problem, int64_t b, int64_t i, int64_t h,
                    const key_gradients *sums) {
    const int64_t dim = problem->head_dim, p = query_position(problem, i);
    const row_inputs row = {.p = p,
                            .lse = load(&problem->lse, offset_of(&problem->lse, b, h, i)),
                            .delta = delta_of(problem, b, i, h),
                            .code = row_code_of(problem, b, h, p)};
    memset(sums->dq, 0, (size_t)dim * sizeof *sums->dq);
    load_row(sums->q, &problem->q, offset_of(&problem->q, b, i, h), dim);
    load_row(sums->dout, &problem->dout, offset_of(&problem->dout, b, i, h), dim);
    for (int64_t j = 0; j < problem->kv_len && row.lse != -infinity; j++)
        if (attends_to(problem, b, h, i, j))
            add_key(problem, b, h, i, j, &row, sums);
    for (int64_t d = 0; d < dim; d++)
        put(&problem->dq, offset_of(&problem->dq, b, i, h) + d, sums->dq[d], problem->accumulate);
}

static void put_keys(const fdma_problem *problem, int64_t b, int64_t g, const key_gradients *sums) {
    const int64_t dim = problem->head_dim;
    for (int64_t j = 0; j < problem->kv_len; j++) {
        const key_row dk = row_of_key(problem, &problem->dk, &problem->dk_carried, b, j, g);
        const key_row dv = row_of_key(problem, &problem->dv, &problem->dv_carried, b, j, g);
        for (int64_t d = 0; d < dim; d++) {
            put(dk.tensor, dk.offset + d, sums->dk[j * dim + d], problem->accumulate);
            put(dv.tensor, dv.offset + d, sums->dv[j * dim + d], problem->accumulate);
        }
        if (is_present(&problem->dbias)) {
            const key_row dbias =
                number_of_key(problem, &problem->dbias, &problem->dbias_carried, b, g, j);
            put(dbias.tensor, dbias.offset, sums->dbias[j], adds_dbias(problem, j));
        }
    }
}

/* Writes dattn_bias, or adds it to the tensor. */
static void put_pairs(const fdma_problem *problem, const key_gradients *sums) {
    const fdma_tensor *const to = &problem->dattn_bias;
    const real *from = sums->dpairs;
    for (int64_t n = 0; n < count_elements(&problem->dattn_bias); n++) {
        const int64_t x3 = n % to->shape[3], rest = n / to->shape[3];
        const int64_t x2 = rest % to->shape[2], x1 = rest / to->shape[2] % to->shape[1];
        const int64_t x0 = rest / to->shape[2] / to->shape[1];
        put(to, offset_of(to, x0, x1, x2) + x3, *from++, problem->add_dattn_bias);
    }
}

/* Minus the sum of the sink's probability times delta, over all rows of a query head. */
static real sink_gradient(const fdma_problem *problem, int64_t h) {
    const real sink = sink_logit_of(problem, h);
    real sum = 0;
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t i = 0; i < problem->q_len; i++) {
            const real lse = load(&problem->lse, offset_of(&problem->lse, b, h, i));
            if (sink != -infinity && lse != -infinity)
                sum -= rounded(problem->dtype, exp(sink - lse)) *
                       (is_empty_row(problem, b, h, i) ? -dlse_of(problem, b, i, h)
                                                       : delta_of(problem, b, i, h));
        }
    return sum;
}

static fdma_status run_backward(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const key_gradients sums = take_sums(problem, &arena);
    const size_t keys = (size_t)problem->kv_len, dim = (size_t)problem->head_dim;
    const int64_t group = problem->q_len > 0 ? problem->group : 0; // without queries it may be huge
    if (is_present(&problem->dattn_bias))
        memset(sums.dpairs, 0, (size_t)count_elements(&problem->dattn_bias) * sizeof *sums.dpairs);
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t g = 0; g < problem->kv_heads; g++) {
            memset(sums.dk, 0, keys * dim * sizeof *sums.dk);
            memset(sums.dv, 0, keys * dim * sizeof *sums.dv);
            memset(sums.dbias, 0, keys * sizeof *sums.dbias);
            for (int64_t i = 0; i < problem->q_len; i++)
                for (int64_t h = g * group; h < (g + 1) * group; h++)
                    add_row(problem, b, i, h, &sums);
            put_keys(problem, b, g, &sums);
        }
    put_pairs(problem, &sums);
    for (int64_t h = 0; h < problem->q_heads && is_present(&problem->dsink_logit); h++)
        put(&problem->dsink_logit, offset_of(&problem->dsink_logit, h, 0, 0),
            sink_gradient(problem, h), problem->add_dsinks);
    return FDMA_OK;
}

/* ---- decode ---- */

/* Decoding with a cache, by its definition: the new tokens of a stream are selected with the
 * cache's table and attended to with its keys. */

static size_t any_select_workspace(const fdma_problem *problem) {
    return fdma_reference_select_workspace(problem);
}

static const fdma_kernel plain_select = {.workspace = any_select_workspace,
                                         .run = fdma_reference_select};
static const adapted_kernel select_kernel = {&plain_select, fdma_host_adapters};

static fdma_problem selection_of(const decode_head *head, const head_selection *selection) {
    const fdma_problem *const problem = head->problem;
    const fdma_table *const table = &problem->cache.table;
    const int64_t rows = problem->carried_len, kv_len = rows + head->tokens;
    fdma_problem one = *problem;
    one.operation = operation_select;
    one.batch = one.kv_heads = 1;
    one.new_len = head->tokens;
    one.kv_len = kv_len;
    one.dtype = problem->score.dtype;
    one.score = fdma_tensor_3d(NULL, one.dtype, 1, 1, head->tokens);
    one.table_in.score = fdma_tensor_3d(NULL, one.dtype, 1, 1, rows);
    one.table_in.position = fdma_tensor_3d(NULL, FDMA_INT32, 1, 1, rows);
    one.table_in.seen = fdma_tensor_1d(NULL, FDMA_INT32, 1);
    one.expiry = fdma_tensor_3d(selection->expiry, FDMA_INT32, 1, 1, kv_len);
    one.slot = fdma_tensor_3d(selection->slot, FDMA_INT32, 1, 1, kv_len);
    if (head->sequence < 0)
        return one; // only its sizes are needed
    one.score.data =
        (uint8_t *)problem->score.data +
        (size_t)offset_of(&problem->score, head->b, head->g, 0) * fdma_dtype_size(one.dtype);
    one.table_in.score.data =
        (uint8_t *)table->score.data +
        (size_t)offset_of(&table->score, head->sequence, head->g, 0) * fdma_dtype_size(one.dtype);
    one.table_in.position.data = int_at(&table->position, head->sequence, head->g, 0);
    one.table_in.seen.data = (int32_t *)table->seen.data + head->sequence;
    return one;
}

static size_t decode_workspace(const fdma_problem *problem) {
    fdma_arena arena = {0};
    const head_selection selection = fdma_take_selection(&arena, problem);
    const decode_head head = {.problem = problem, .sequence = -1, .tokens = problem->new_len};
    const fdma_problem select = selection_of(&head, &selection);
    const size_t selecting = fdma_adapted_workspace(&select_kernel, &select, check_shapes);
    const size_t attending = forward_workspace(problem);
    return fdma_arena_size(&arena) + (selecting > attending ? selecting : attending);
}

static fdma_status decode_one(const fdma_problem *problem, int64_t b, int64_t g) {
    const decode_head head = fdma_decode_head(problem, b, g);
    fdma_arena arena = fdma_arena_of(problem);
    const head_selection selection = fdma_take_selection(&arena, problem);
    fdma_clear_queries(&head);
    if (head.sequence < 0 || head.tokens == 0)
        return FDMA_OK;
    fdma_problem select = selection_of(&head, &selection);
    fdma_set_aside(&select.exec, &arena);
    const fdma_status status = fdma_run_adapted(&select_kernel, &select);
    fdma_hide_missing_rows(&head, &selection);
    fdma_fill_bias(&head, &selection);
    fdma_problem forward;
    fdma_decode_forward(&head, &selection, &forward);
    forward.exec = select.exec;
    if (status == FDMA_OK)
        run_forward(&forward);
    fdma_commit_tokens(&head, &selection);
    return status;
}

static fdma_status run_decode(const fdma_problem *problem) {
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t g = 0; g < problem->kv_heads; g++) {
            const fdma_status status = decode_one(problem, b, g);
            if (status != FDMA_OK)
                return status;
        }
    fdma_count_committed(problem);
    return FDMA_OK;
}

/* ---- score: a * softplus(<v, dt_proj> + dt_bias) of each key, and its bias ---- */

static real dt_of(const fdma_problem *problem, int64_t b, int64_t j, int64_t g) {
    const fdma_tensor *const v = &problem->v, *const dt_proj = &problem->dt_proj;
    const int64_t dim = problem->head_dim;
    real dt = 0;
    for (int64_t other = 0; other < problem->kv_heads; other++)
        for (int64_t d = 0; d < dim; d++)
            dt += load(v, offset_of(v, b, j, other) + d) *
                  load(dt_proj, g * dt_proj->stride[0] + other * dim + d);
    return is_present(&problem->dt_bias) ? dt + load(&problem->dt_bias, g) : dt;
}

/* The bias is computed from the score as rounded to the score's dtype. */
static fdma_status run_score(const fdma_problem *problem) {
    const fdma_tensor *const score = &problem->score, *const bias = &problem->bias;
    const fdma_dtype dtype = is_present(score) ? score->dtype : bias->dtype;
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t g = 0; g < problem->kv_heads; g++)
            for (int64_t j = 0; j < problem->kv_len; j++) {
                const real exact = is_valid_key(problem, b, j)
                                       ? load(&problem->a, g) * softplus(dt_of(problem, b, j, g))
                                       : -infinity;
                const real z = dtype == FDMA_FLOAT32 ? (real)(float)exact : exact;
                if (is_present(score))
                    store(score, offset_of(score, b, g, j), z);
                if (is_present(bias))
                    store(bias, offset_of(bias, b, g, j),
                          problem->bias_form == FDMA_BIAS_EXP ? exp(z) : z);
            }
    return FDMA_OK;
}

/* ---- the gradients of score ---- */

/* Sums over all keys; dv is of one key. */
typedef struct score_gradients {
    real *ddt_proj; /* [kv_heads, kv_heads * head_dim] */
    real *da;       /* [kv_heads] */
    real *ddt_bias; /* [kv_heads] */
    real *dv;       /* [kv_heads * head_dim] */
} score_gradients;

static score_gradients take_score_sums(const fdma_problem *problem, fdma_arena *arena) {
    const int64_t heads = problem->kv_heads, width = heads * problem->head_dim;
    return (score_gradients){take_reals(arena, heads * width), take_reals(arena, heads),
                             take_reals(arena, heads), take_reals(arena, width)};
}

static size_t score_backward_workspace(const fdma_problem *problem) {
    fdma_arena arena = {0};
    take_score_sums(problem, &arena);
    return fdma_arena_size(&arena);
}

static void add_score(const fdma_problem *problem, int64_t b, int64_t j, int64_t g, real dbias,
                      const score_gradients *sums) {
    const fdma_tensor *const v = &problem->v, *const dt_proj = &problem->dt_proj;
    const int64_t dim = problem->head_dim, width = problem->kv_heads * dim;
    const real dt = dt_of(problem, b, j, g), a = load(&problem->a, g);
    const real dz = problem->bias_form == FDMA_BIAS_EXP ? dbias * exp(a * softplus(dt)) : dbias;
    const real ddt = rounded(problem->dtype, dz * a / (1 + exp(-dt)));
    sums->da[g] += dz * softplus(dt);
    sums->ddt_bias[g] += ddt;
    for (int64_t c = 0; c < width; c++) {
        sums->ddt_proj[g * width + c] += ddt * load(v, offset_of(v, b, j, c / dim) + c % dim);
        sums->dv[c] += ddt * load(dt_proj, g * dt_proj->stride[0] + c);
    }
}

/* Adds the terms of one key, unless no gradient reaches it: its v is then not read. */
static void add_scores(const fdma_problem *problem, int64_t b, int64_t j,
                       const score_gradients *sums) {
    const fdma_tensor *const dv = &problem->dv;
    const int64_t dim = problem->head_dim, width = problem->kv_heads * dim;
    bool any = false;
    memset(sums->dv, 0, (size_t)width * sizeof *sums->dv);
    for (int64_t g = 0; g < problem->kv_heads; g++) {
        const real dbias = load(&problem->dbias, offset_of(&problem->dbias, b, g, j));
        if (dbias == 0 || !is_valid_key(problem, b, j))
            continue;
        any = true;
        add_score(problem, b, j, g, dbias, sums);
    }
    for (int64_t c = 0; c < width && any && is_present(dv); c++)
        put(dv, offset_of(dv, b, j, c / dim) + c % dim, rounded(problem->dtype, sums->dv[c]), true);
}

static fdma_status run_score_backward(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const score_gradients sums = take_score_sums(problem, &arena);
    const fdma_tensor *const ddt_proj = &problem->ddt_proj;
    const int64_t heads = problem->kv_heads, width = heads * problem->head_dim;
    memset(sums.ddt_proj, 0, (size_t)(heads * width) * sizeof *sums.ddt_proj);
    memset(sums.da, 0, (size_t)heads * sizeof *sums.da);
    memset(sums.ddt_bias, 0, (size_t)heads * sizeof *sums.ddt_bias);
    const int64_t batch = problem->kv_len > 0 ? problem->batch : 0; // without keys it may be huge
    for (int64_t b = 0; b < batch; b++)
        for (int64_t j = 0; j < problem->kv_len; j++)
            add_scores(problem, b, j, &sums);
    for (int64_t g = 0; g < heads; g++) {
        put(&problem->da, g, sums.da[g], problem->accumulate);
        if (is_present(&problem->ddt_bias))
            put(&problem->ddt_bias, g, sums.ddt_bias[g], problem->accumulate);
        for (int64_t c = 0; c < width; c++)
            put(ddt_proj, g * ddt_proj->stride[0] + c, sums.ddt_proj[g * width + c],
                problem->accumulate);
    }
    return FDMA_OK;
}

/* ---- the merge of two partial results, and its gradients ---- */

typedef struct merge_factors {
    real lse;
    real of[2]; /* exp(lse of a partial result - lse); 0 for an empty one, whose out is not read */
} merge_factors;

static merge_factors factors_of(const fdma_problem *problem, int64_t b, int64_t i, int64_t h) {
    real each[2];
    for (int n = 0; n < 2; n++)
        each[n] = load(&problem->partial[n].lse, offset_of(&problem->partial[n].lse, b, h, i));
    if (isnan(each[0]) || isnan(each[1]))
        return (merge_factors){(real)NAN, {(real)NAN, (real)NAN}};
    const real largest = fmax(each[0], each[1]);
    if (largest == -infinity)
        return (merge_factors){.lse = largest};
    const real lse = largest + log(exp(each[0] - largest) + exp(each[1] - largest));
    return (merge_factors){
        lse,
        {rounded(problem->dtype, exp(each[0] - lse)), rounded(problem->dtype, exp(each[1] - lse))}};
}

static real merged_at(const fdma_problem *problem, const merge_factors *factors, int64_t b,
                      int64_t i, int64_t h, int64_t d) {
    real sum = 0;
    for (int n = 0; n < 2; n++) {
        const fdma_tensor *const out = &problem->partial[n].out;
        if (factors->of[n] != 0)
            sum += rounded(problem->dtype, factors->of[n] * load(out, offset_of(out, b, i, h) + d));
    }
    return rounded(problem->dtype, sum);
}

static fdma_status run_merge(const fdma_problem *problem) {
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t h = 0; h < problem->q_heads; h++)
            for (int64_t i = 0; i < problem->q_len; i++) {
                const merge_factors factors = factors_of(problem, b, i, h);
                for (int64_t d = 0; d < problem->head_dim; d++)
                    store(&problem->out, offset_of(&problem->out, b, i, h) + d,
                          merged_at(problem, &factors, b, i, h, d));
                if (is_present(&problem->lse))
                    store(&problem->lse, offset_of(&problem->lse, b, h, i), factors.lse);
            }
    return FDMA_OK;
}

static void split_gradient(const fdma_problem *problem, int64_t b, int64_t i, int64_t h) {
    const merge_factors factors = factors_of(problem, b, i, h);
    const fdma_tensor *const dout = &problem->dout, *const dlse = &problem->dlse;
    for (int n = 0; n < 2; n++) {
        const fdma_partial *const partial = &problem->partial[n];
        const real factor = factors.of[n];
        real dfactor = is_present(dlse) ? load(dlse, offset_of(dlse, b, h, i)) : 0;
        for (int64_t d = 0; d < problem->head_dim; d++) {
            const real gradient = load(dout, offset_of(dout, b, i, h) + d);
            if (factor != 0)
                dfactor +=
                    gradient * rounded(problem->dtype,
                                       load(&partial->out, offset_of(&partial->out, b, i, h) + d) -
                                           merged_at(problem, &factors, b, i, h, d));
            store(&partial->dout, offset_of(&partial->dout, b, i, h) + d,
                  factor != 0 ? factor * gradient : 0);
        }
        store(&partial->dlse, offset_of(&partial->dlse, b, h, i),
              factor != 0 ? factor * dfactor : 0);
    }
}

static fdma_status run_merge_backward(const fdma_problem *problem) {
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t h = 0; h < problem->q_heads; h++)
            for (int64_t i = 0; i < problem->q_len; i++)
                split_gradient(problem, b, i, h);
    return FDMA_OK;
}

/* ---- rotary embedding ---- */

/* Both kernels compute angles in double, and the plain one rounds the result alone: a framework's
 * float32 angles would permit errors that grow with the position. */
static fdma_status run_rotary_table(const fdma_problem *problem) {
    const fdma_tensor *const rotary = &problem->rotary;
    const int64_t pairs = rotary_dim(problem) / 2;
    rotary_frequencies frequencies;
    fdma_find_frequencies(problem, &frequencies);
    for (int64_t n = 0; n < rotary->shape[0]; n++)
        for (int64_t d = 0; d < pairs; d++) {
            const double angle =
                rotary_angle(table_position(problem, n), frequencies.high[d], frequencies.low[d]);
            const int64_t at = n * rotary->stride[0] + d;
            fdma_store(rotary, at, problem->rotation.factor * cos(angle));
            fdma_store(rotary, at + pairs, problem->rotation.factor * sin(angle));
        }
    return FDMA_OK;
}

enum { most_channels = 256 };

/* A row of x, its place, and the factor by which a norm multiplies it. */
typedef struct rotated_row {
    int64_t b, i, h;
    real x[most_channels];
    real norm; /* 1 without weight */
} rotated_row;

/* The row of `tensor` at the place of index `n`. */
static rotated_row find_row(const fdma_problem *problem, const fdma_tensor *tensor, int64_t n) {
    const int64_t dim = problem->head_dim, row = n / problem->q_heads;
    rotated_row found = {.b = row / problem->q_len, .i = row % problem->q_len, .norm = 1};
    found.h = n % problem->q_heads;
    load_row(found.x, tensor, offset_of(tensor, found.b, found.i, found.h), dim);
    if (is_present(&problem->weight)) {
        const real mean = dot(found.x, found.x, dim) / (real)dim;
        found.norm = 1 / sqrt(mean + (real)problem->rotation.eps);
    }
    return found;
}

/* Rotates the channels of a row, by the negative angle if `sign` is -1. */
static void rotate_row(const fdma_problem *problem, const rotated_row *row, real sign, real *y) {
    const int64_t pairs = rotary_dim(problem) / 2;
    const bool interleaved = problem->rotation.interleaved;
    if (!is_rotated_head(problem, row->h))
        return;
    const int64_t at = rotary_row(problem, row->b, row->i) * problem->rotary.stride[0];
    for (int64_t d = 0; d < pairs; d++) {
        const int64_t one = interleaved ? 2 * d : d, other = interleaved ? one + 1 : d + pairs;
        const real c = load(&problem->rotary, at + d);
        const real s = sign * load(&problem->rotary, at + pairs + d);
        const real x = y[one], z = y[other];
        y[one] = rounded(problem->dtype, x * c) - rounded(problem->dtype, z * s);
        y[other] = rounded(problem->dtype, z * c) + rounded(problem->dtype, x * s);
    }
}

static int64_t count_rows(const fdma_problem *problem) {
    return problem->batch * problem->q_len * problem->q_heads;
}

static real weight_at(const fdma_problem *problem, int64_t d) {
    return is_present(&problem->weight) ? load(&problem->weight, d) : 1;
}

static fdma_status run_rotate(const fdma_problem *problem) {
    const fdma_tensor *const out = &problem->out;
    for (int64_t n = 0; n < count_rows(problem); n++) {
        const rotated_row row = find_row(problem, &problem->x, n);
        real y[most_channels];
        for (int64_t d = 0; d < problem->head_dim; d++)
            y[d] = rounded(problem->dtype, row.x[d] * row.norm * weight_at(problem, d));
        rotate_row(problem, &row, 1, y);
        for (int64_t d = 0; d < problem->head_dim; d++)
            store(out, offset_of(out, row.b, row.i, row.h) + d, y[d]);
    }
    return FDMA_OK;
}

/* Writes dx of a row, and adds to the sums of dweight. */
static void differentiate_row(const fdma_problem *problem, int64_t n, real *sums) {
    const fdma_tensor *const dx = &problem->dx;
    const bool normed = is_present(&problem->weight);
    const rotated_row row = find_row(problem, normed ? &problem->x : &problem->dout, n);
    real u[most_channels], mean = 0;
    load_row(u, &problem->dout, offset_of(&problem->dout, row.b, row.i, row.h), problem->head_dim);
    rotate_row(problem, &row, -1, u);
    for (int64_t d = 0; d < problem->head_dim && normed; d++) {
        u[d] = rounded(problem->dtype, u[d]);
        sums[d] += row.norm * row.x[d] * u[d];
        u[d] *= weight_at(problem, d);
        mean += row.x[d] * u[d] / (real)problem->head_dim;
    }
    for (int64_t d = 0; d < problem->head_dim; d++) {
        const real along = normed ? row.x[d] * row.norm * row.norm * mean : 0;
        store(dx, offset_of(dx, row.b, row.i, row.h) + d, row.norm * (u[d] - along));
    }
}

static fdma_status run_rotate_backward(const fdma_problem *problem) {
    real sums[most_channels] = {0};
    for (int64_t n = 0; n < count_rows(problem); n++)
        differentiate_row(problem, n, sums);
    for (int64_t d = 0; d < problem->head_dim && is_present(&problem->dweight); d++)
        store(&problem->dweight, d, sums[d]);
    return FDMA_OK;
}

/* ---- entries of a table ---- */

static const char *nothing_missing(void) { return NULL; }

static const char *refuses(const fdma_problem *problem) {
    return sizeof(real) == sizeof(float) && problem->dtype == FDMA_FLOAT64 ? "float64 tensors"
                                                                           : NULL;
}

static size_t no_workspace(const fdma_problem *problem) {
    (void)problem;
    return 0;
}

#define KERNEL(OPERATION, WORKSPACE, RUN)                                                          \
    {REFERENCE_NAME, operation_##OPERATION, nothing_missing, refuses, WORKSPACE, RUN, false, 0}

#define REAL_KERNELS                                                                               \
    KERNEL(score, no_workspace, run_score), KERNEL(forward, forward_workspace, run_forward),       \
        KERNEL(backward, backward_workspace, run_backward),                                        \
        KERNEL(decode, decode_workspace, run_decode),                                              \
        KERNEL(score_backward, score_backward_workspace, run_score_backward),                      \
        KERNEL(merge, no_workspace, run_merge),                                                    \
        KERNEL(merge_backward, no_workspace, run_merge_backward),                                  \
        KERNEL(probabilities, forward_workspace, run_probabilities),                               \
        KERNEL(rotary_table, no_workspace, run_rotary_table),                                      \
        KERNEL(rotate, no_workspace, run_rotate),                                                  \
        KERNEL(rotate_backward, no_workspace, run_rotate_backward)
