/* The gradients of scores: of each key in v, of all keys in dt_proj and a. A few keys at a time
 * share what is read of the weights and of their gradients; these are summed chunk by chunk, and
 * the chunks, which depend on kv_len alone, in their order. */
#ifndef FDMA_CPU_SCORE_SCORE_BACKWARD_H
#define FDMA_CPU_SCORE_SCORE_BACKWARD_H

#include "core/element.h"
#include "cpu/common/tile.h"
#include "cpu/parallel.h"

enum {
    gradient_keys = 4,          /* at a time */
    most_gradient_chunks = 16,  /* of a sequence */
    least_gradient_chunk = 256, /* keys */
    line_floats = 16,           /* of a cache line; whole vectors */
    gradient_flops = 20000,     /* that a thread does in a microsecond, about */
};

_Static_assert(line_floats % vf_width == 0, "whole vectors");

typedef struct gradient_context {
    const fdma_problem *problem;
    int64_t row;    /* kv_heads * head_dim */
    int64_t width;  /* the same, up to an odd number of cache lines: rows a multiple of 4 KB apart
                       would make loads from one wait for stores to another */
    int64_t chunk;  /* keys */
    int64_t chunks; /* of every sequence */
    float *weights; /* [kv_heads][width], zeros past the end */
    float *a;       /* [kv_heads] */
    float *sums;    /* [chunks][kv_heads][width]: of ddt_proj */
    double *da;     /* [chunks][kv_heads] */
    float *scratch; /* of thread 0; the others' follow at scratch_size */
    int64_t scratch_size;
} gradient_context;

/* Some keys, side by side. */
typedef struct gradient_batch {
    const gradient_context *context;
    int64_t b;
    int count;
    int64_t key[gradient_keys];
    float *v;    /* [gradient_keys][width] */
    float *dv;   /* the same */
    float *sums; /* [kv_heads][width], of the chunk */
    double *da;  /* [kv_heads] */
} gradient_batch;

static float dbias_of(const fdma_problem *problem, int64_t b, int64_t g, int64_t j) {
    const fdma_tensor *const dbias = &problem->dbias;
    return ((const float *)dbias->data)[b * dbias->stride[0] + g * dbias->stride[1] + j];
}

/* dt of `keys` keys, of which v is [keys][width]. In double precision: of a few keys, da is one
 * number that hangs on every bit of theirs. */
INLINE void find_dt(double *dt, const float *v, int64_t width, const float *weights, int64_t row,
                    int keys) {
    enum { sums = 8 }; // rows are multiples of 8 channels
    double sum[gradient_keys][sums] = {{0}};
    for (int64_t x = 0; x < row; x += sums) {
        UNROLL
        for (int key = 0; key < keys; key++) {
            UNROLL
            for (int n = 0; n < sums; n++)
                sum[key][n] += (double)v[key * width + x + n] * (double)weights[x + n];
        }
    }
    for (int key = 0; key < keys; key++) {
        const double *const s = sum[key];
        dt[key] = (s[0] + s[4]) + (s[1] + s[5]) + (s[2] + s[6]) + (s[3] + s[7]);
    }
}

/* The gradient of dt; that of a is added to its sum, a number in which rounding errors of all keys
 * would meet. */
static float gradient_of_dt(const gradient_batch *batch, int64_t g, double dt, float dbias) {
    const gradient_context *const context = batch->context;
    const double a = (double)context->a[g], power = exp(-fabs(dt));
    const double softplus = fmax(dt, 0) + log1p(power);
    const bool is_exp = context->problem->bias_form == FDMA_BIAS_EXP;
    const double dz = is_exp ? (double)dbias * exp(a * softplus) : (double)dbias;
    batch->da[g] += dz * softplus;
    return (float)(dz * a * (dt < 0 ? power : 1) / (1 + power));
}

/* `keys` of the batch from `first` on, of which each has a gradient of head g's score. */
INLINE void add_head(const gradient_batch *batch, int64_t g, int first, int keys,
                     const float *ddt) {
    const int64_t width = batch->context->width;
    const float *const weights = batch->context->weights + g * width;
    const float *const v = batch->v + first * width;
    float *const sums = batch->sums + g * width;
    float *const dv = batch->dv + first * width;
    for (int64_t x = 0; x < width; x += vf_width) {
        const vf weight = vf_load(weights + x);
        vf sum = vf_load(sums + x);
        UNROLL
        for (int key = 0; key < keys; key++) {
            const vf gradient = vf_set(ddt[key]);
            float *const at = dv + key * width + x;
            sum = vf_fma(gradient, vf_load(v + key * width + x), sum);
            vf_store(at, vf_fma(gradient, weight, vf_load(at)));
        }
        vf_store(sums + x, sum);
    }
}

/* `keys` of the batch from `first` on, each of which has a part in head g. */
INLINE void differentiate_head(const gradient_batch *batch, int64_t g, int first, int keys,
                               const float *dbias) {
    const int64_t width = batch->context->width;
    double dt[gradient_keys];
    float ddt[gradient_keys];
    find_dt(dt, batch->v + first * width, width, batch->context->weights + g * width,
            batch->context->row, keys);
    for (int key = 0; key < keys; key++)
        ddt[key] = gradient_of_dt(batch, g, dt[key], dbias[first + key]);
    add_head(batch, g, first, keys, ddt);
}

/* What one head's scores of the batch give; a key whose dbias is 0 has no part in it. */
static void work_on_head(const gradient_batch *batch, int64_t g) {
    float dbias[gradient_keys];
    int count = 0;
    for (int key = 0; key < batch->count; key++) {
        dbias[key] = dbias_of(batch->context->problem, batch->b, g, batch->key[key]);
        count += dbias[key] != 0;
    }
    if (count == gradient_keys) {
        differentiate_head(batch, g, 0, gradient_keys, dbias);
        return;
    }
    for (int key = 0; key < batch->count; key++)
        if (dbias[key] != 0)
            differentiate_head(batch, g, key, 1, dbias);
}

static void load_batch(const gradient_batch *batch) {
    const fdma_problem *const problem = batch->context->problem;
    const int64_t width = batch->context->width, dim = problem->head_dim;
    memset(batch->dv, 0, sizeof(float) * (size_t)(gradient_keys * width));
    memset(batch->v, 0, sizeof(float) * (size_t)(gradient_keys * width));
    for (int key = 0; key < batch->count; key++)
        for (int64_t g = 0; g < problem->kv_heads; g++)
            load_row(batch->v + key * width + g * dim,
                     head_row(&problem->v, batch->b, batch->key[key], g), problem->dtype, dim);
}

static void add_dv(const gradient_batch *batch) {
    const fdma_problem *const problem = batch->context->problem;
    const int64_t width = batch->context->width, dim = problem->head_dim;
    for (int key = 0; key < batch->count; key++)
        for (int64_t g = 0; g < problem->kv_heads; g++) {
            void *const to = head_row(&problem->dv, batch->b, batch->key[key], g);
            for (int64_t d = 0; d < dim; d += vf_width) {
                const int64_t count = channels_at(d, dim);
                const vf sum = vf_load_first(batch->dv + key * width + g * dim + d, count);
                const vf held = load_channels(to, problem->dtype, d, count);
                store_channels(to, problem->dtype, d, vf_add(held, sum), count);
            }
        }
}

static void work_on_batch(gradient_batch *batch) {
    if (batch->count == 0)
        return;
    load_batch(batch);
    for (int64_t g = 0; g < batch->context->problem->kv_heads; g++)
        work_on_head(batch, g);
    if (is_present(&batch->context->problem->dv))
        add_dv(batch);
    batch->count = 0;
}

/* Whether anything reaches a key. */
static bool has_gradient(const fdma_problem *problem, int64_t b, int64_t j) {
    bool any = false;
    for (int64_t g = 0; g < problem->kv_heads; g++)
        any |= dbias_of(problem, b, g, j) != 0;
    return any && is_valid_key(problem, b, j);
}

/* The keys of one chunk in every sequence. */
static void add_chunk(const void *data, int64_t index, int32_t thread) {
    const gradient_context *const context = data;
    const fdma_problem *const problem = context->problem;
    const int64_t first = index * context->chunk, last = first + context->chunk;
    const int64_t end = last < problem->kv_len ? last : problem->kv_len;
    const int64_t size = problem->kv_heads * context->width;
    const uint32_t rounding = keep_subnormals();
    gradient_batch batch = {
        .context = context,
        .v = context->scratch + thread * context->scratch_size,
        .sums = context->sums + index * size,
        .da = context->da + index * problem->kv_heads,
    };
    batch.dv = batch.v + gradient_keys * context->width;
    memset(batch.sums, 0, sizeof(float) * (size_t)size);
    memset(batch.da, 0, sizeof(double) * (size_t)problem->kv_heads);
    for (batch.b = 0; batch.b < problem->batch; batch.b++) {
        for (int64_t j = first; j < end; j++) {
            if (!has_gradient(problem, batch.b, j))
                continue;
            batch.key[batch.count++] = j;
            if (batch.count == gradient_keys)
                work_on_batch(&batch);
        }
        work_on_batch(&batch);
    }
    restore_modes(rounding);
}

static void pack_score_weights(const gradient_context *context) {
    const fdma_problem *const problem = context->problem;
    const fdma_tensor *const from = &problem->dt_proj;
    memset(context->weights, 0, sizeof(float) * (size_t)(problem->kv_heads * context->width));
    for (int64_t g = 0; g < problem->kv_heads; g++) {
        context->a[g] = (float)fdma_load(&problem->a, g);
        load_row(context->weights + g * context->width, row_at(from, g * from->stride[0]),
                 from->dtype, context->row);
    }
}

/* Writes a gradient, or adds it to what is there. */
static void put_gradient(const fdma_problem *problem, const fdma_tensor *tensor, int64_t at,
                         double sum) {
    fdma_store(tensor, at, problem->accumulate ? fdma_load(tensor, at) + sum : sum);
}

/* Adds the sums of the other chunks to the first's. */
static void write_weight_gradients(const gradient_context *context) {
    const fdma_problem *const problem = context->problem;
    const fdma_tensor *const ddt_proj = &problem->ddt_proj;
    const int64_t heads = problem->kv_heads, size = heads * context->width;
    for (int64_t g = 0; g < heads; g++) {
        double da = 0;
        for (int64_t chunk = 0; chunk < context->chunks; chunk++)
            da += context->da[chunk * heads + g];
        put_gradient(problem, &problem->da, g, da);
        for (int64_t c = 0; c < context->row; c++) {
            double sum = 0;
            for (int64_t chunk = 0; chunk < context->chunks; chunk++)
                sum += (double)context->sums[chunk * size + g * context->width + c];
            put_gradient(problem, ddt_proj, g * ddt_proj->stride[0] + c, sum);
        }
    }
}

static int32_t gradient_threads(const gradient_context *context) {
    const fdma_problem *const problem = context->problem;
    const double flops =
        6.0 * (double)(problem->batch * problem->kv_len * problem->kv_heads) * (double)context->row;
    return fdma_worthwhile_threads(problem->exec.threads, context->chunks,
                                   (int64_t)fmin(flops / gradient_flops, 1e15));
}

static fdma_arena lay_out_gradients(const fdma_problem *problem, gradient_context *context) {
    const int64_t share = (problem->kv_len + most_gradient_chunks - 1) / most_gradient_chunks;
    const int64_t chunk = share < least_gradient_chunk ? least_gradient_chunk : share;
    const int64_t row = problem->kv_heads * problem->head_dim;
    const int64_t lines = ((row + line_floats - 1) / line_floats) | 1;
    fdma_arena arena = fdma_arena_of(problem);
    *context = (gradient_context){
        .problem = problem,
        .row = row,
        .width = lines * line_floats,
        .chunk = chunk,
        .chunks = (problem->kv_len + chunk - 1) / chunk,
    };
    const size_t heads = (size_t)problem->kv_heads, width = (size_t)context->width;
    const size_t chunks = (size_t)context->chunks;
    context->scratch_size = 2 * gradient_keys * context->width;
    context->weights = fdma_arena_take(&arena, heads * width * sizeof(float));
    context->a = fdma_arena_take(&arena, heads * sizeof(float));
    context->sums = fdma_arena_take(&arena, chunks * heads * width * sizeof(float));
    context->da = fdma_arena_take(&arena, chunks * heads * sizeof(double));
    context->scratch = fdma_arena_take(&arena, (size_t)gradient_threads(context) *
                                                   (size_t)context->scratch_size * sizeof(float));
    return arena;
}

static size_t score_backward_workspace(const fdma_problem *problem) {
    gradient_context context;
    const fdma_arena arena = lay_out_gradients(problem, &context);
    return fdma_arena_size(&arena);
}

static fdma_status run_score_backward(const fdma_problem *problem) {
    gradient_context context;
    lay_out_gradients(problem, &context);
    pack_score_weights(&context);
    fdma_parallel_for(gradient_threads(&context), context.chunks, add_chunk, &context);
    write_weight_gradients(&context);
    return FDMA_OK;
}

#endif
