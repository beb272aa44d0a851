/* Score: v times dt_proj, reading v once, then softplus and the coefficient. */
#ifndef FDMA_CPU_KERNELS_SCORE_H
#define FDMA_CPU_KERNELS_SCORE_H

#include "core/element.h"
#include "cpu/kernels/tile.h"
#include "cpu/parallel.h"

enum {
    dot_keys = 2,  /* keys x heads sums in registers */
    dot_heads = 4,
    keys_ahead = 8,
    chunk_keys = 128, /* keys of a task */
};

typedef struct score_context {
    const fdma_problem *problem;
    int64_t width;     /* of a row: kv_heads * head_dim, up to whole vectors */
    int64_t heads;     /* kv_heads, up to whole dot_heads */
    int64_t chunks;    /* of one sequence */
    float *projection; /* [heads][width], zeros past the end */
    float *a;          /* [kv_heads] */
    float *rows;       /* [threads][dot_keys][width] */
} score_context;

static int64_t round_up(int64_t x, int64_t step) {
    return (x + step - 1) / step * step;
}

/* The value states of one key, all heads in a row; zeros past the end are there already. Those of a
 * key some way ahead are asked for on the way. */
static void gather_row(float *to, const fdma_problem *problem, int64_t b, int64_t j) {
    const fdma_tensor *const v = &problem->v;
    const int64_t size = (int64_t)fdma_dtype_size(v->dtype), dim = problem->head_dim;
    const int64_t ahead = j + keys_ahead < problem->kv_len ? keys_ahead * v->stride[1] * size : 0;
    for (int64_t g = 0; g < problem->kv_heads; g++) {
        const uint8_t *const row =
            row_at(v, b * v->stride[0] + j * v->stride[1] + g * v->stride[2]);
        for (int64_t byte = 0; byte < dim * size; byte += 64)
            __builtin_prefetch(row + ahead + byte);
        load_row(to + g * dim, row, v->dtype, dim);
    }
}

static inline __attribute__((always_inline)) void
dot_rows(float dots[dot_keys][dot_heads], const float *rows, const float *projection,
         int64_t width) {
    vf sums[dot_keys][dot_heads];
    UNROLL for (int key = 0; key < dot_keys; key++)
        UNROLL for (int g = 0; g < dot_heads; g++) sums[key][g] = vf_set(0);
    for (int64_t x = 0; x < width; x += vf_width)
        UNROLL for (int g = 0; g < dot_heads; g++) {
            const vf weight = vf_load(projection + g * width + x);
            UNROLL for (int key = 0; key < dot_keys; key++)
                sums[key][g] = vf_fma(vf_load(rows + key * width + x), weight, sums[key][g]);
        }
    UNROLL for (int key = 0; key < dot_keys; key++)
        UNROLL for (int g = 0; g < dot_heads; g++) dots[key][g] = vf_sum(sums[key][g]);
}

static void write_score(const fdma_problem *problem, int64_t b, int64_t g, int64_t j, float z) {
    const fdma_tensor *const score = &problem->score, *const bias = &problem->bias;
    if (is_present(score))
        ((float *)score->data)[b * score->stride[0] + g * score->stride[1] + j] = z;
    if (is_present(bias))
        ((float *)bias->data)[b * bias->stride[0] + g * bias->stride[1] + j] =
            problem->bias_form == FDMA_BIAS_EXP ? expf(z) : z;
}

static float softplus_of(float x) {
    return x != x ? x : (x > 0 ? x : 0) + log1pf(expf(-fabsf(x)));
}

/* Scores of the keys j to j + count - 1, count at most dot_keys; invalid ones are not read. */
static void score_keys_at(const score_context *score, float *rows, int64_t b, int64_t j,
                          int64_t count) {
    const fdma_problem *const problem = score->problem;
    float dots[dot_keys][dot_heads];
    for (int64_t key = 0; key < count; key++)
        if (is_valid_key(problem, b, j + key))
            gather_row(rows + key * score->width, problem, b, j + key);
    for (int64_t first = 0; first < problem->kv_heads; first += dot_heads) {
        dot_rows(dots, rows, score->projection + first * score->width, score->width);
        for (int64_t key = 0; key < count; key++)
            for (int64_t g = first; g < first + dot_heads && g < problem->kv_heads; g++)
                if (is_valid_key(problem, b, j + key))
                    write_score(problem, b, g, j + key,
                                score->a[g] * softplus_of(dots[key][g - first]));
                else
                    write_score(problem, b, g, j + key, -INFINITY);
    }
}

static void score_chunk(const void *context, int64_t index, int32_t thread) {
    const score_context *const score = context;
    const int64_t b = index / score->chunks, first = index % score->chunks * chunk_keys;
    const int64_t left = score->problem->kv_len - first;
    const int64_t end = first + (left < chunk_keys ? left : chunk_keys);
    float *const rows = score->rows + thread * dot_keys * score->width;
    for (int64_t x = 0; x < dot_keys * score->width; x++) rows[x] = 0;
    for (int64_t j = first; j < end; j += dot_keys)
        score_keys_at(score, rows, b, j, end - j < dot_keys ? end - j : dot_keys);
}

static void pack_weights(const score_context *score) {
    const fdma_problem *const problem = score->problem;
    const fdma_tensor *const from = &problem->dt_proj;
    const int64_t used = problem->kv_heads * problem->head_dim;
    for (int64_t x = 0; x < score->heads * score->width; x++) score->projection[x] = 0;
    for (int64_t g = 0; g < problem->kv_heads; g++) score->a[g] = (float)fdma_load(&problem->a, g);
    for (int64_t g = 0; g < problem->kv_heads; g++)
        load_row(score->projection + g * score->width, row_at(from, g * from->stride[0]), from->dtype, used);
}

static int64_t chunks_of(const fdma_problem *problem) {
    return (problem->kv_len + chunk_keys - 1) / chunk_keys;
}

static fdma_arena lay_out_score(const fdma_problem *problem, int32_t threads,
                                score_context *context) {
    fdma_arena arena = fdma_arena_of(problem);
    const int64_t width = round_up(problem->kv_heads * problem->head_dim, vf_width);
    const int64_t heads = round_up(problem->kv_heads, dot_heads);
    *context = (score_context){problem, width, heads, .chunks = chunks_of(problem)};
    context->projection = fdma_arena_take(&arena, (size_t)(heads * width) * sizeof(float));
    context->a = fdma_arena_take(&arena, (size_t)heads * sizeof(float));
    context->rows =
        fdma_arena_take(&arena, (size_t)threads * dot_keys * (size_t)width * sizeof(float));
    return arena;
}

static int32_t score_threads(const fdma_problem *problem) {
    return fdma_thread_count(problem->exec.threads, problem->batch * chunks_of(problem));
}

static size_t score_workspace(const fdma_problem *problem) {
    score_context context;
    const fdma_arena arena = lay_out_score(problem, score_threads(problem), &context);
    return fdma_arena_size(&arena);
}

static fdma_status run_score(const fdma_problem *problem) {
    score_context context;
    const int32_t threads = score_threads(problem);
    lay_out_score(problem, threads, &context);
    pack_weights(&context);
    fdma_parallel_for(threads, problem->batch * context.chunks, score_chunk, &context);
    return FDMA_OK;
}

#endif
