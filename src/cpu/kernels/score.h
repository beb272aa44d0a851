/* Score: v times dt_proj, reading v once, then softplus and the coefficient. */
#ifndef FDMA_CPU_KERNELS_SCORE_H
#define FDMA_CPU_KERNELS_SCORE_H

#include "core/element.h"
#include "cpu/kernels/math.h"
#include "cpu/kernels/tile.h"
#include "cpu/parallel.h"

enum {
    dot_heads = 4,
    chunk_keys = 64, /* keys of a task */
};

typedef struct score_context {
    const fdma_problem *problem;
    int64_t width;     /* of a row: kv_heads * head_dim, up to whole vectors */
    int64_t heads;     /* kv_heads, up to whole dot_heads */
    int64_t chunks;    /* of one sequence */
    float *projection; /* [heads][width], zeros past the end */
    float *a;          /* [kv_heads] */
    float *scratch;    /* of thread 0; the others' follow at scratch_size */
    int64_t scratch_size;
} score_context;

/* Scratch of a thread. */
typedef struct score_scratch {
    float *rows; /* [dot_keys][width], for rows that are not whole vectors of float32 */
    float *dots; /* [heads][chunk_keys], then scores */
} score_scratch;

static int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

static score_scratch scratch_of(const score_context *score, int32_t thread) {
    float *const start = score->scratch + thread * score->scratch_size;
    return (score_scratch){.rows = start, .dots = start + dot_keys * score->width};
}

/* Whether the heads of a key lie side by side in float32, ready to be read. */
static bool is_ready(const score_context *score) {
    const fdma_tensor *const v = &score->problem->v;
    const int64_t heads = score->problem->kv_heads, dim = score->problem->head_dim;
    return v->dtype == FDMA_FLOAT32 && score->width == heads * dim &&
           (heads == 1 || v->stride[2] == dim);
}

/* The value states of one key, all heads in a row; zeros past the end are there already. */
static const float *gather_row(const score_context *score, float *to, int64_t b, int64_t j) {
    const fdma_tensor *const v = &score->problem->v;
    const int64_t dim = score->problem->head_dim, offset = b * v->stride[0] + j * v->stride[1];
    if (is_ready(score))
        return row_at(v, offset);
    for (int64_t g = 0; g < score->problem->kv_heads; g++)
        load_row(to + g * dim, row_at(v, offset + g * v->stride[2]), v->dtype, dim);
    return to;
}

/* Products of dot_keys rows with dot_heads projections; dots of a head lie chunk_keys apart. */
static void dot_rows(float *dots, const float *const *rows, const float *projection,
                     int64_t width) {
    vf sums[dot_keys][dot_heads];
    const float *row[dot_keys];
    UNROLL
    for (int key = 0; key < dot_keys; key++) {
        row[key] = rows[key];
        UNROLL
        for (int g = 0; g < dot_heads; g++)
            sums[key][g] = vf_set(0);
    }
    for (int64_t x = 0; x < width; x += vf_width) {
        vf weight[dot_heads];
        UNROLL
        for (int g = 0; g < dot_heads; g++)
            weight[g] = vf_load(projection + g * width + x);
        UNROLL
        for (int key = 0; key < dot_keys; key++) {
            const vf values = vf_load(row[key] + x);
            UNROLL
            for (int g = 0; g < dot_heads; g++)
                sums[key][g] = vf_fma(values, weight[g], sums[key][g]);
        }
    }
    UNROLL
    for (int key = 0; key < dot_keys; key++)
        UNROLL
    for (int g = 0; g < dot_heads; g++)
        dots[g * chunk_keys + key] = vf_sum(sums[key][g]);
}

/* dot_keys keys from j on; those past the end or not valid are not read, a row that is stands
 * in. */
static void dot_keys_at(const score_context *score, const score_scratch *scratch, int64_t b,
                        int64_t j, float *dots) {
    const fdma_problem *const problem = score->problem;
    const float *rows[dot_keys];
    for (int64_t key = 0; key < dot_keys; key++) {
        const bool read = j + key < problem->kv_len && is_valid_key(problem, b, j + key);
        rows[key] = read ? gather_row(score, scratch->rows + key * score->width, b, j + key)
                         : score->projection;
    }
    for (int64_t g = 0; g < score->heads; g += dot_heads)
        dot_rows(dots + g * chunk_keys, rows, score->projection + g * score->width, score->width);
}

static float bias_of(const fdma_problem *problem, float z) {
    return problem->bias_form == FDMA_BIAS_EXP ? expf(z) : z;
}

/* Scores and biases of `count` keys of one head, from their products. */
static void write_scores(const score_context *score, int64_t b, int64_t g, int64_t j, int64_t count,
                         float *dots) {
    const fdma_problem *const problem = score->problem;
    const fdma_tensor *const to = &problem->score, *const bias = &problem->bias;
    for (int64_t x = 0; x < chunk_keys; x += vf_width)
        vf_store(dots + x, vf_mul(vf_set(score->a[g]), softplus_of(vf_load(dots + x))));
    for (int64_t x = 0; x < count; x++) {
        const float z = is_valid_key(problem, b, j + x) ? dots[x] : -INFINITY;
        if (is_present(to))
            ((float *)to->data)[b * to->stride[0] + g * to->stride[1] + j + x] = z;
        if (is_present(bias))
            ((float *)bias->data)[b * bias->stride[0] + g * bias->stride[1] + j + x] =
                bias_of(problem, z);
    }
}

static void score_chunk(const void *context, int64_t index, int32_t thread) {
    const score_context *const score = context;
    const int64_t b = index / score->chunks, first = index % score->chunks * chunk_keys;
    const int64_t left = score->problem->kv_len - first;
    const int64_t count = left < chunk_keys ? left : chunk_keys;
    const score_scratch scratch = scratch_of(score, thread);
    for (int64_t x = 0; x < score->scratch_size; x++)
        scratch.rows[x] = 0;
    for (int64_t x = 0; x < count; x += dot_keys)
        dot_keys_at(score, &scratch, b, first + x, scratch.dots + x);
    for (int64_t g = 0; g < score->problem->kv_heads; g++)
        write_scores(score, b, g, first, count, scratch.dots + g * chunk_keys);
}

static void pack_weights(const score_context *score) {
    const fdma_problem *const problem = score->problem;
    const fdma_tensor *const from = &problem->dt_proj;
    const int64_t used = problem->kv_heads * problem->head_dim;
    for (int64_t x = 0; x < score->heads * score->width; x++)
        score->projection[x] = 0;
    for (int64_t g = 0; g < problem->kv_heads; g++) {
        score->a[g] = (float)fdma_load(&problem->a, g);
        load_row(score->projection + g * score->width, row_at(from, g * from->stride[0]),
                 from->dtype, used);
    }
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
    context->scratch_size = dot_keys * width + heads * chunk_keys;
    context->scratch =
        fdma_arena_take(&arena, (size_t)threads * (size_t)context->scratch_size * sizeof(float));
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
