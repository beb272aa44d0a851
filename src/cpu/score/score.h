/* Score: v times dt_proj, reading v once, then softplus and the coefficient. */
#ifndef FDMA_CPU_SCORE_SCORE_H
#define FDMA_CPU_SCORE_SCORE_H

#include "core/element.h"
#include "core/integers.h"
#include "cpu/common/math.h"
#include "cpu/common/tile.h"
#include "cpu/parallel.h"

enum {
    dot_heads = 4,
    batch_keys = 16,     /* keys by which a slab of weights passes */
    chunk_keys = 256,    /* keys of a task */
    slab_channels = 256, /* of v, about: 8 heads' weights for them fit the L1 cache beside v's */
    score_bytes = 10000, /* of v, that a thread works through in a microsecond, about */
};

_Static_assert(batch_keys % dot_keys == 0 && chunk_keys % batch_keys == 0, "whole steps");

typedef struct score_context {
    const fdma_problem *problem;
    int64_t slab_heads; /* of v, side by side */
    int64_t slabs;
    int64_t width;                    /* of a slab: slab_heads * head_dim, up to whole vectors */
    int64_t heads;                    /* kv_heads, up to whole dot_heads */
    int64_t chunks;                   /* of one sequence */
    int64_t channel_size, head_bytes; /* of v; from one head to the next */
    bool is_ready;                    /* slabs of v need no conversion */
    float *projection;                /* [slabs][heads][width], zeros past the end */
    float *a;                         /* [kv_heads] */
    float *scratch;                   /* of thread 0; the others' follow at scratch_size */
    int64_t scratch_size;
} score_context;

/* Scratch of a thread. */
typedef struct score_scratch {
    float *rows; /* [dot_keys][width], for slabs that are not whole vectors of float32 */
    float *sums; /* [heads][batch_keys][vf_width] */
    float *dots; /* [heads][chunk_keys], then scores */
} score_scratch;

static score_scratch scratch_of(const score_context *score, int32_t thread) {
    float *const start = score->scratch + thread * score->scratch_size;
    float *const sums = start + dot_keys * score->width;
    return (score_scratch){start, sums, sums + score->heads * batch_keys * vf_width};
}

/* Heads of a slab; the last one may have fewer. */
static int64_t heads_of(const score_context *score, int64_t slab) {
    const int64_t left = score->problem->kv_heads - slab * score->slab_heads;
    return left < score->slab_heads ? left : score->slab_heads;
}

/* Whether slabs lie side by side in float32, ready to be read. */
static bool has_ready_slabs(const fdma_problem *problem, int64_t slab_heads) {
    const fdma_tensor *const v = &problem->v;
    return v->dtype == FDMA_FLOAT32 && problem->head_dim % vf_width == 0 &&
           (slab_heads == 1 || v->stride[2] == problem->head_dim);
}

/* A row's channels in float32; the dtype is known to the compiler. */
INLINE void widen_row(float *to, const void *row, fdma_dtype dtype, int64_t dim) {
    int64_t d = 0;
    for (; d + vf_width <= dim; d += vf_width)
        vf_store(to + d, load_channels(row, dtype, d, vf_width));
    if (d < dim)
        vf_store_first(to + d, load_channels(row, dtype, d, dim - d), dim - d);
}

/* A slab of the value states of one key, put together where zeros past the end are already. */
static const float *gather_slab(const score_context *score, float *to, int64_t heads,
                                const uint8_t *from) {
    const fdma_tensor *const v = &score->problem->v;
    const int64_t dim = score->problem->head_dim;
    for (int64_t g = 0; g < heads; g++, from += score->head_bytes, to += dim) {
        if (v->dtype == FDMA_FLOAT32)
            widen_row(to, from, FDMA_FLOAT32, dim);
        else if (v->dtype == FDMA_FLOAT16)
            widen_row(to, from, FDMA_FLOAT16, dim);
        else
            widen_row(to, from, FDMA_BFLOAT16, dim);
    }
    return to - heads * dim;
}

/* sums += products of dot_keys rows with dot_heads projections, lane by lane. The same channels, of
 * `size` bytes, of the rows `ahead` are asked for; none if size is 0. */
INLINE void dot_rows(float *sums, const float *const *rows, const float *projection, int64_t stride,
                     int64_t width, const uint8_t *const *ahead, int size) {
    vf s[dot_keys][dot_heads];
    const float *row[dot_keys];
    UNROLL
    for (int key = 0; key < dot_keys; key++) {
        row[key] = rows[key];
        UNROLL
        for (int g = 0; g < dot_heads; g++)
            s[key][g] = vf_load(sums + (g * batch_keys + key) * vf_width);
    }
    for (int64_t x = 0; x < width; x += vf_width) {
        vf weight[dot_heads];
        UNROLL
        for (int g = 0; g < dot_heads; g++)
            weight[g] = vf_load(projection + g * stride + x);
        if (size > 0 && x * size % 64 == 0) {
            UNROLL
            for (int key = 0; key < dot_keys; key++)
                __builtin_prefetch(ahead[key] + x * size, 0, 2);
        }
        UNROLL
        for (int key = 0; key < dot_keys; key++) {
            const vf values = vf_load(row[key] + x);
            UNROLL
            for (int g = 0; g < dot_heads; g++)
                s[key][g] = vf_fma(values, weight[g], s[key][g]);
        }
    }
    UNROLL
    for (int key = 0; key < dot_keys; key++) {
        UNROLL
        for (int g = 0; g < dot_heads; g++)
            vf_store(sums + (g * batch_keys + key) * vf_width, s[key][g]);
    }
}

/* The slab of one of the batch's keys, ready to be multiplied; weights stand in for keys that are
 * not to be read. */
static const float *slab_row(const score_context *score, const score_scratch *scratch, int64_t slab,
                             const uint8_t *key, int64_t index, const float *weights) {
    if (!key)
        return weights;
    const uint8_t *const from = key + slab * score->slab_heads * score->head_bytes;
    if (score->is_ready)
        return (const float *)from;
    return gather_slab(score, scratch->rows + index * score->width, heads_of(score, slab), from);
}

/* A slab of dot_keys keys; as many more, in `keys` too, are asked for. */
static void dot_slab(const score_context *score, const score_scratch *scratch, int64_t slab,
                     const uint8_t *const *keys, float *sums) {
    const float *const weights = score->projection + slab * score->heads * score->width;
    const int64_t width = round_up(heads_of(score, slab) * score->problem->head_dim, vf_width);
    const int64_t offset = slab * score->slab_heads * score->head_bytes;
    const float *rows[dot_keys];
    const uint8_t *ahead[dot_keys];
    for (int64_t key = 0; key < dot_keys; key++) {
        const uint8_t *const next = keys[key + dot_keys];
        rows[key] = slab_row(score, scratch, slab, keys[key], key, weights);
        ahead[key] = next ? next + offset : (const uint8_t *)weights;
    }
    if (score->channel_size == 4)
        dot_rows(sums, rows, weights, score->width, width, ahead, 4);
    else
        dot_rows(sums, rows, weights, score->width, width, ahead, 2);
    for (int64_t g = dot_heads; g < score->heads; g += dot_heads)
        dot_rows(sums + g * batch_keys * vf_width, rows, weights + g * score->width, score->width,
                 width, NULL, 0);
}

/* Where keys are; NULL for those from `end` on or not valid, which are not read. */
static void find_keys(const score_context *score, int64_t b, int64_t j, int64_t end,
                      const uint8_t **keys, int64_t count) {
    const fdma_tensor *const v = &score->problem->v;
    const uint8_t *const data = v->data;
    for (int64_t key = 0; key < count; key++) {
        const int64_t offset = b * v->stride[0] + (j + key) * v->stride[1];
        const bool read = j + key < end && is_valid_key(score->problem, b, j + key);
        keys[key] = read ? data + offset * score->channel_size : NULL;
    }
}

/* The products of batch_keys keys from j on; those from `end` on are not there. */
static void dot_batch(const score_context *score, const score_scratch *scratch, int64_t b,
                      int64_t j, int64_t end, float *dots) {
    const uint8_t *keys[batch_keys + dot_keys];
    find_keys(score, b, j, end, keys, batch_keys + dot_keys);
    memset(scratch->sums, 0, sizeof(float) * (size_t)(score->heads * batch_keys * vf_width));
    for (int64_t slab = 0; slab < score->slabs; slab++) {
        // zeros where the last slab ends, and the others went on
        if (!score->is_ready && (slab == 0 || slab == score->slabs - 1))
            memset(scratch->rows, 0, sizeof(float) * (size_t)(dot_keys * score->width));
        for (int64_t key = 0; key < batch_keys; key += dot_keys)
            dot_slab(score, scratch, slab, keys + key, scratch->sums + key * vf_width);
    }
    for (int64_t g = 0; g < score->problem->kv_heads; g++) {
        const float *const sums = scratch->sums + g * batch_keys * vf_width;
        for (int64_t key = 0; key < batch_keys; key++)
            dots[g * chunk_keys + key] = vf_sum(vf_load(sums + key * vf_width));
    }
}

static float *line_of(const fdma_tensor *tensor, int64_t b, int64_t g, int64_t j) {
    return (float *)tensor->data + b * tensor->stride[0] + g * tensor->stride[1] + j;
}

/* Scores and biases of `count` keys of one head, from their products. */
static void write_scores(const score_context *score, int64_t b, int64_t g, int64_t j, int64_t count,
                         float *dots) {
    const fdma_problem *const problem = score->problem;
    const size_t bytes = (size_t)count * sizeof(float);
    for (int64_t x = 0; x < count; x += vf_width)
        vf_store(dots + x, vf_mul(vf_set(score->a[g]), softplus_of(vf_load(dots + x))));
    for (int64_t x = 0; x < count && is_present(&problem->key_valid); x++)
        if (!is_valid_key(problem, b, j + x))
            dots[x] = -INFINITY;
    if (is_present(&problem->score))
        memcpy(line_of(&problem->score, b, g, j), dots, bytes);
    if (!is_present(&problem->bias))
        return;
    for (int64_t x = 0; x < count && problem->bias_form == FDMA_BIAS_EXP; x++)
        dots[x] = expf(dots[x]);
    memcpy(line_of(&problem->bias, b, g, j), dots, bytes);
}

static void score_chunk(const void *context, int64_t index, int32_t thread) {
    const score_context *const score = context;
    const int64_t b = index / score->chunks, first = index % score->chunks * chunk_keys;
    const int64_t left = score->problem->kv_len - first;
    const int64_t count = left < chunk_keys ? left : chunk_keys;
    const score_scratch scratch = scratch_of(score, thread);
    const uint32_t rounding = keep_subnormals();
    for (int64_t x = 0; x < count; x += batch_keys)
        dot_batch(score, &scratch, b, first + x, first + count, scratch.dots + x);
    for (int64_t g = 0; g < score->problem->kv_heads; g++)
        write_scores(score, b, g, first, count, scratch.dots + g * chunk_keys);
    restore_modes(rounding);
}

static void pack_weights(const score_context *score) {
    const fdma_problem *const problem = score->problem;
    const fdma_tensor *const from = &problem->dt_proj;
    const int64_t dim = problem->head_dim;
    const size_t slab_size = (size_t)(score->heads * score->width);
    memset(score->projection, 0, sizeof(float) * (size_t)score->slabs * slab_size);
    for (int64_t g = 0; g < problem->kv_heads; g++) {
        score->a[g] = (float)fdma_load(&problem->a, g);
        for (int64_t slab = 0; slab < score->slabs; slab++) {
            const int64_t first = g * from->stride[0] + slab * score->slab_heads * dim;
            load_row(score->projection + slab * (int64_t)slab_size + g * score->width,
                     row_at(from, first), from->dtype, heads_of(score, slab) * dim);
        }
    }
}

static int64_t chunks_of(const fdma_problem *problem) {
    return (problem->kv_len + chunk_keys - 1) / chunk_keys;
}

static fdma_arena lay_out_score(const fdma_problem *problem, int32_t threads,
                                score_context *context) {
    fdma_arena arena = fdma_arena_of(problem);
    const int64_t most = slab_channels / problem->head_dim;
    const int64_t slab_heads = most < problem->kv_heads ? most : problem->kv_heads;
    const int64_t slabs = (problem->kv_heads + slab_heads - 1) / slab_heads;
    const int64_t width = round_up(slab_heads * problem->head_dim, vf_width);
    const int64_t heads = round_up(problem->kv_heads, dot_heads);
    const int64_t size = (int64_t)fdma_dtype_size(problem->v.dtype);
    *context = (score_context){
        .problem = problem,
        .slab_heads = slab_heads,
        .slabs = slabs,
        .width = width,
        .heads = heads,
        .chunks = chunks_of(problem),
        .channel_size = size,
        .head_bytes = problem->v.stride[2] * size,
        .is_ready = has_ready_slabs(problem, slab_heads),
    };
    context->projection = fdma_arena_take(&arena, (size_t)(slabs * heads * width) * sizeof(float));
    context->a = fdma_arena_take(&arena, (size_t)heads * sizeof(float));
    context->scratch_size = dot_keys * width + heads * batch_keys * vf_width + heads * chunk_keys;
    context->scratch =
        fdma_arena_take(&arena, (size_t)threads * (size_t)context->scratch_size * sizeof(float));
    return arena;
}

static int32_t score_threads(const fdma_problem *problem) {
    const int64_t row = problem->kv_heads * problem->head_dim;
    const int64_t bytes =
        problem->batch * problem->kv_len * row * (int64_t)fdma_dtype_size(problem->v.dtype);
    return fdma_worthwhile_threads(problem->exec.threads, problem->batch * chunks_of(problem),
                                   bytes / score_bytes);
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
