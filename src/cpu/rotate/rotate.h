/* Rotary embedding, a norm before it, and the gradients of both: one row at a time, with channels
 * in the lanes. A row is loaded once and written once. */
#pragma once

#include "core/rotary.h"
#include "cpu/common/tile.h"
#include "cpu/parallel.h"

#include <math.h>

enum {
    row_floats = 256 + vf_width, /* of a row: vectors may begin at its last channel */
    rotated_rows = 512,          /* rows of a task, at least, unless there are fewer */
    rotated_bytes = 5000,        /* bytes that one thread rotates in a microsecond, roughly */
    table_pairs = 4096,          /* pairs of a table in a task, at least */
    table_speed = 25,            /* pairs that one thread computes in a microsecond, roughly */
};

/* ---- the table ---- */

typedef struct rotary_table_call {
    const fdma_problem *problem;
    rotary_frequencies frequencies;
    int64_t rows; /* of a task */
} rotary_table_call;

static void fill_table_rows(const void *context, int64_t index, int32_t thread) {
    const rotary_table_call *const call = context;
    const fdma_problem *const problem = call->problem;
    const fdma_tensor *const rotary = &problem->rotary;
    const int64_t pairs = rotary_dim(problem) / 2;
    const int64_t end = min((index + 1) * call->rows, rotary->shape[0]);
    const double factor = problem->rotation.factor;
    (void)thread;
    for (int64_t n = index * call->rows; n < end; n++) {
        float *const row = float_at(rotary, n, 0, 0);
        const double position = table_position(problem, n);
        for (int64_t d = 0; d < pairs; d++) {
            const double angle =
                rotary_angle(position, call->frequencies.high[d], call->frequencies.low[d]);
            row[d] = (float)(factor * cos(angle));
            row[pairs + d] = (float)(factor * sin(angle));
        }
    }
}

static size_t rotary_table_workspace(const fdma_problem *problem) {
    (void)problem;
    return 0;
}

static fdma_status run_rotary_table(const fdma_problem *problem) {
    const int64_t rows = problem->rotary.shape[0], pairs = rotary_dim(problem) / 2;
    rotary_table_call call = {.problem = problem, .rows = divide_up(table_pairs, pairs)};
    const int64_t tasks = divide_up(rows, call.rows);
    const int32_t threads =
        fdma_worthwhile_threads(problem->exec.threads, tasks, rows * pairs / table_speed);
    fdma_find_frequencies(problem, &call.frequencies);
    fdma_parallel_for(problem->exec.parallel, threads, tasks, fill_table_rows, &call);
    return FDMA_OK;
}

/* ---- rows ---- */

/* The factors of one position: out[d] = x[d] c[d] + partner[d] s[d], where the partner of a channel
 * is the other one of its pair. Channels that are not rotated have c = 1 and s = -0, with which a
 * product and a sum change no bit of them. */
typedef struct row_factors {
    float c[row_floats], s[row_floats];
    float partner[row_floats];
    float weight[row_floats];
} row_factors;

/* Sets the factors for row i of sequence b. sign: -1 for the gradient. */
static void find_factors(const fdma_problem *problem, int64_t b, int64_t i, float sign,
                         row_factors *factors) {
    const int64_t pairs = rotary_dim(problem) / 2;
    const bool interleaved = problem->rotation.interleaved;
    const int64_t step = interleaved ? 2 : 1, other = interleaved ? 1 : pairs;
    const float *const row = float_at(&problem->rotary, rotary_row(problem, b, i), 0, 0);
    for (int64_t d = 0; d < pairs; d++) {
        factors->c[step * d] = factors->c[step * d + other] = row[d];
        factors->s[step * d] = -sign * row[pairs + d];
        factors->s[step * d + other] = sign * row[pairs + d];
    }
}

static void begin_factors(const fdma_problem *problem, row_factors *factors) {
    for (int64_t d = 0; d < row_floats; d++) {
        factors->c[d] = 1;
        factors->s[d] = -0.0F;
        factors->partner[d] = 0;
        factors->weight[d] = 1;
    }
    for (int64_t d = 0; d < problem->head_dim && is_present(&problem->weight); d++)
        factors->weight[d] = (float)fdma_load(&problem->weight, d);
}

/* Copies the channels that are rotated, and swaps the two of each pair. */
static void swap_pairs(const fdma_problem *problem, const float *x, float *partner) {
    const size_t pairs = (size_t)rotary_dim(problem) / 2;
    if (!problem->rotation.interleaved) {
        memcpy(partner, x + pairs, pairs * sizeof *x);
        memcpy(partner + pairs, x, pairs * sizeof *x);
        return;
    }
    for (size_t d = 0; d < pairs; d++) { // in words of 64 bits, which compilers vectorize
        uint64_t pair;
        memcpy(&pair, x + 2 * d, sizeof pair);
        pair = pair >> 32 | pair << 32;
        memcpy(partner + 2 * d, &pair, sizeof pair);
    }
}

/* Rotates a row in place. Channels past head_dim are rotated, too, and mean nothing. */
static void rotate_floats(const fdma_problem *problem, row_factors *factors, float *x) {
    swap_pairs(problem, x, factors->partner);
    for (int64_t d = 0; d < problem->head_dim; d += vf_width) {
        const vf product = vf_mul(vf_load(x + d), vf_load(factors->c + d));
        vf_store(x + d, vf_fma(vf_load(factors->partner + d), vf_load(factors->s + d), product));
    }
}

/* Loads a row; the channels of the last vector past head_dim are 0. */
static void load_floats(const fdma_problem *problem, const void *row, float *x) {
    for (int64_t d = 0; d < problem->head_dim; d += vf_width)
        vf_store(x + d, load_channels(row, problem->dtype, d, channels_at(d, problem->head_dim)));
}

static void store_floats(const fdma_problem *problem, void *row, const float *x) {
    for (int64_t d = 0; d < problem->head_dim; d += vf_width)
        store_channels(row, problem->dtype, d, vf_load(x + d), channels_at(d, problem->head_dim));
}

static float product_of_floats(const float *x, const float *y, int64_t count) {
    vf sum = vf_set(0);
    for (int64_t d = 0; d < count; d += vf_width)
        sum = vf_fma(vf_load(x + d), vf_load(y + d), sum);
    return vf_sum(sum);
}

/* The factor of a row's norm, before the weight. */
static float norm_of(const fdma_problem *problem, const float *x) {
    const float dim = (float)problem->head_dim;
    const float mean = product_of_floats(x, x, problem->head_dim) / dim;
    return 1 / sqrtf(mean + (float)problem->rotation.eps);
}

static void rotate_head(const fdma_problem *problem, row_factors *factors, int64_t b, int64_t i,
                        int64_t h) {
    float x[row_floats];
    load_floats(problem, head_row(&problem->x, b, i, h), x);
    if (is_present(&problem->weight)) {
        const vf norm = vf_set(norm_of(problem, x));
        for (int64_t d = 0; d < problem->head_dim; d += vf_width)
            vf_store(x + d, vf_mul(vf_mul(vf_load(x + d), norm), vf_load(factors->weight + d)));
    }
    if (is_rotated_head(problem, h))
        rotate_floats(problem, factors, x);
    store_floats(problem, head_row(&problem->out, b, i, h), x);
}

/* Makes dx of u = dout before the rotation, in place, and adds to the sums of dweight. */
static void differentiate_norm(const fdma_problem *problem, const row_factors *factors,
                               const void *row, float *u, float *sums) {
    const int64_t dim = problem->head_dim;
    float x[row_floats];
    load_floats(problem, row, x);
    const vf norm = vf_set(norm_of(problem, x));
    for (int64_t d = 0; d < dim; d += vf_width) {
        const vf normed = vf_mul(vf_load(x + d), norm), gradient = vf_load(u + d);
        vf_store(x + d, normed);
        vf_store(sums + d, vf_fma(normed, gradient, vf_load(sums + d)));
        vf_store(u + d, vf_mul(gradient, vf_load(factors->weight + d)));
    }
    const vf along = vf_set(-product_of_floats(x, u, dim) / (float)dim);
    for (int64_t d = 0; d < dim; d += vf_width)
        vf_store(u + d, vf_mul(norm, vf_fma(along, vf_load(x + d), vf_load(u + d))));
}

static void unrotate_head(const fdma_problem *problem, row_factors *factors, int64_t b, int64_t i,
                          int64_t h, float *sums) {
    float u[row_floats];
    load_floats(problem, head_row(&problem->dout, b, i, h), u);
    if (is_rotated_head(problem, h))
        rotate_floats(problem, factors, u);
    if (is_present(&problem->weight))
        differentiate_norm(problem, factors, head_row(&problem->x, b, i, h), u, sums);
    store_floats(problem, head_row(&problem->dx, b, i, h), u);
}

/* ---- tasks ---- */

/* Positions of a task, which has all of their heads. The order of dweight's sums depends on it, so
 * it does not depend on threads. */
static int64_t positions_of_task(const fdma_problem *problem) {
    return divide_up(rotated_rows, max(problem->q_heads, 1));
}

static int64_t tasks_of_rotation(const fdma_problem *problem) {
    return divide_up(problem->batch * problem->q_len, positions_of_task(problem));
}

/* The sums of dweight of each task. */
static float *take_weight_sums(fdma_arena *arena, const fdma_problem *problem) {
    const bool wanted = is_present(&problem->dweight);
    return take_floats(arena, wanted ? tasks_of_rotation(problem) * problem->head_dim : 0);
}

typedef struct rotate_call {
    const fdma_problem *problem;
    float *sums;
} rotate_call;

static void rotate_positions(const void *context, int64_t index, int32_t thread) {
    const rotate_call *const call = context;
    const fdma_problem *const problem = call->problem;
    const bool backward = problem->operation == operation_rotate_backward;
    const int64_t count = positions_of_task(problem);
    const int64_t end = min((index + 1) * count, problem->batch * problem->q_len);
    float sums[row_floats] = {0};
    row_factors factors;
    (void)thread;
    begin_factors(problem, &factors);
    for (int64_t n = index * count; n < end; n++) {
        const int64_t b = n / problem->q_len, i = n % problem->q_len;
        find_factors(problem, b, i, backward ? -1 : 1, &factors);
        for (int64_t h = 0; h < problem->q_heads; h++)
            if (backward)
                unrotate_head(problem, &factors, b, i, h, sums);
            else
                rotate_head(problem, &factors, b, i, h);
    }
    if (is_present(&problem->dweight))
        memcpy(call->sums + index * problem->head_dim, sums,
               (size_t)problem->head_dim * sizeof *sums);
}

/* Adds the sums of the tasks in their order. */
static void add_weight_sums(const fdma_problem *problem, const float *sums, int64_t tasks) {
    for (int64_t d = 0; d < problem->head_dim; d++) {
        double sum = 0;
        for (int64_t n = 0; n < tasks; n++)
            sum += (double)sums[n * problem->head_dim + d];
        *float_at(&problem->dweight, d, 0, 0) = (float)sum;
    }
}

static size_t rotate_workspace(const fdma_problem *problem) {
    fdma_arena arena = {0};
    take_weight_sums(&arena, problem);
    return fdma_arena_size(&arena);
}

static fdma_status run_rotate(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const rotate_call call = {problem, take_weight_sums(&arena, problem)};
    const int64_t rows = problem->batch * problem->q_len * problem->q_heads;
    const int64_t bytes = rows * problem->head_dim * (int64_t)fdma_dtype_size(problem->dtype);
    const int64_t tasks = tasks_of_rotation(problem);
    const int32_t threads =
        fdma_worthwhile_threads(problem->exec.threads, tasks, bytes / rotated_bytes);
    fdma_parallel_for(problem->exec.parallel, threads, tasks, rotate_positions, &call);
    if (is_present(&problem->dweight))
        add_weight_sums(problem, call.sums, tasks);
    return FDMA_OK;
}
