/* The gradients of scores: in v for each key, in dt_proj, a and dt_bias summed over all keys.
 *
 * A few keys at a time share each load of the weights and of the weights' gradients. Keys are cut
 * into ranges, which depend on kv_len alone. The sums of the ranges are added in their order, so
 * that results do not depend on the number of threads. */
#pragma once

#include "cpu/common/tile.h"
#include "cpu/parallel.h"

enum {
    gradient_keys = 4,      /* keys of a batch */
    most_ranges = 16,       /* ranges of a sequence */
    least_range_keys = 256, /* keys of a range */
    line_floats = 16,       /* floats of a cache line */
    gradient_flops = 20000, /* done by one thread per microsecond, about */
};

_Static_assert(line_floats % vf_width == 0, "a cache line is a whole number of vectors");

typedef struct gradient_context {
    const fdma_problem *problem;
    int64_t row;   /* kv_heads * head_dim */
    int64_t width; /* `row` rounded up to an odd number of cache lines: if rows were a multiple of
                       4 KB apart, loads from one would wait for stores to another */
    int64_t range_keys, ranges; /* of every sequence */
    int32_t threads;
    float *weights;   /* [kv_heads][width]: dt_proj, padded with zeros */
    float *a;         /* [kv_heads] */
    float *dt_bias;   /* [kv_heads], zeros without dt_bias */
    float *sums;      /* [ranges][kv_heads][width]: ddt_proj of each range */
    double *da;       /* [ranges][kv_heads] */
    double *ddt_bias; /* [ranges][kv_heads] */
    float *scratch;   /* [threads][scratch_size] */
    int64_t scratch_size;
} gradient_context;

/* Keys that share each load of the weights. */
typedef struct gradient_batch {
    const gradient_context *context;
    int64_t b;
    int count;
    int64_t key[gradient_keys];
    float *v;         /* [gradient_keys][width] */
    float *dv;        /* [gradient_keys][width] */
    float *sums;      /* [kv_heads][width], of the range */
    double *da;       /* [kv_heads] */
    double *ddt_bias; /* [kv_heads] */
} gradient_batch;

/* dt, less dt_bias, of `keys` keys, whose v is [keys][width]. In double precision, because da adds
 * up softplus(dt) of all keys to a single number. */
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

/* The gradient of dt. Adds it and the gradient of a to their sums in double precision, because the
 * rounding errors of all keys would add up there. */
static float gradient_of_dt(const gradient_batch *batch, int64_t g, double dt, float dbias) {
    const gradient_context *const context = batch->context;
    const double a = (double)context->a[g], power = exp(-fabs(dt));
    const double softplus = fmax(dt, 0) + log1p(power);
    const bool is_exp = context->problem->bias_form == FDMA_BIAS_EXP;
    const double dz = is_exp ? (double)dbias * exp(a * softplus) : (double)dbias;
    batch->da[g] += dz * softplus;
    const double ddt = dz * a * (dt < 0 ? power : 1) / (1 + power);
    batch->ddt_bias[g] += ddt;
    return (float)ddt;
}

/* Adds the contributions of `keys` keys of the batch, from `first` on, to dv and ddt_proj through
 * head g. */
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

INLINE void differentiate_head(const gradient_batch *batch, int64_t g, int first, int keys,
                               const float *dbias) {
    const int64_t width = batch->context->width;
    const double dt_bias = (double)batch->context->dt_bias[g];
    double dt[gradient_keys];
    float ddt[gradient_keys];
    find_dt(dt, batch->v + first * width, width, batch->context->weights + g * width,
            batch->context->row, keys);
    for (int key = 0; key < keys; key++)
        ddt[key] = gradient_of_dt(batch, g, dt[key] + dt_bias, dbias[first + key]);
    add_head(batch, g, first, keys, ddt);
}

/* Finds the gradients through head g of all keys of the batch whose dbias is not 0. */
static void work_on_head(const gradient_batch *batch, int64_t g) {
    float dbias[gradient_keys];
    int count = 0;
    for (int key = 0; key < batch->count; key++) {
        dbias[key] = *float_at(&batch->context->problem->dbias, batch->b, g, batch->key[key]);
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
        for (int64_t g = 0; g < problem->kv_heads; g++)
            write_row(problem, head_row(&problem->dv, batch->b, batch->key[key], g),
                      batch->dv + key * width + g * dim, 1, true);
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

/* True if a key is valid and its dbias is not 0 in some head. */
static bool has_gradient(const fdma_problem *problem, int64_t b, int64_t j) {
    bool any = false;
    for (int64_t g = 0; g < problem->kv_heads; g++)
        any |= *float_at(&problem->dbias, b, g, j) != 0;
    return any && is_valid_key(problem, b, j);
}

static void add_range(const void *data, int64_t index, int32_t thread) {
    const gradient_context *const context = data;
    const fdma_problem *const problem = context->problem;
    const int64_t first = index * context->range_keys;
    const int64_t end = min(first + context->range_keys, problem->kv_len);
    const int64_t size = problem->kv_heads * context->width;
    gradient_batch batch = {
        .context = context,
        .v = context->scratch + thread * context->scratch_size,
        .sums = context->sums + index * size,
        .da = context->da + index * problem->kv_heads,
        .ddt_bias = context->ddt_bias + index * problem->kv_heads,
    };
    batch.dv = batch.v + gradient_keys * context->width;
    memset(batch.sums, 0, sizeof(float) * (size_t)size);
    memset(batch.da, 0, sizeof(double) * (size_t)problem->kv_heads);
    memset(batch.ddt_bias, 0, sizeof(double) * (size_t)problem->kv_heads);
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
}

static void pack_weights(const void *data, int64_t g, int32_t thread) {
    const gradient_context *const context = data;
    const fdma_tensor *const from = &context->problem->dt_proj;
    float *const to = context->weights + g * context->width;
    (void)thread;
    context->a[g] = (float)fdma_load(&context->problem->a, g);
    context->dt_bias[g] = dt_bias_of(context->problem, g);
    memset(to, 0, sizeof(float) * (size_t)context->width);
    load_row(to, row_at(from, g * from->stride[0]), from->dtype, context->row);
}

/* Writes a gradient, or with `accumulate` adds it to the tensor. */
static void put_gradient(const fdma_problem *problem, const fdma_tensor *tensor, int64_t at,
                         double sum) {
    fdma_store(tensor, at, problem->accumulate ? fdma_load(tensor, at) + sum : sum);
}

/* The sum over all ranges of one head's numbers in [ranges][kv_heads]. */
static double sum_ranges(const gradient_context *context, const double *of_range, int64_t g) {
    double sum = 0;
    for (int64_t range = 0; range < context->ranges; range++)
        sum += of_range[range * context->problem->kv_heads + g];
    return sum;
}

static void write_weight_gradients(const void *data, int64_t g, int32_t thread) {
    const gradient_context *const context = data;
    const fdma_problem *const problem = context->problem;
    const fdma_tensor *const ddt_proj = &problem->ddt_proj;
    const int64_t heads = problem->kv_heads, size = heads * context->width;
    (void)thread;
    put_gradient(problem, &problem->da, g, sum_ranges(context, context->da, g));
    if (is_present(&problem->ddt_bias))
        put_gradient(problem, &problem->ddt_bias, g, sum_ranges(context, context->ddt_bias, g));
    for (int64_t c = 0; c < context->row; c++) {
        double sum = 0;
        for (int64_t range = 0; range < context->ranges; range++)
            sum += (double)context->sums[range * size + g * context->width + c];
        put_gradient(problem, ddt_proj, g * ddt_proj->stride[0] + c, sum);
    }
}

static int32_t gradient_threads(const gradient_context *context) {
    const fdma_problem *const problem = context->problem;
    const double flops =
        6.0 * (double)(problem->batch * problem->kv_len * problem->kv_heads) * (double)context->row;
    return fdma_worthwhile_threads(problem->exec.threads, context->ranges,
                                   (int64_t)fmin(flops / gradient_flops, 1e15));
}

/* Divides the workspace, and returns the bytes that the call needs of it. */
static size_t plan_gradients(const fdma_problem *problem, gradient_context *context) {
    const int64_t range_keys = max(divide_up(problem->kv_len, most_ranges), least_range_keys);
    const int64_t row = problem->kv_heads * problem->head_dim;
    const int64_t lines = divide_up(row, line_floats) | 1;
    fdma_arena arena = fdma_arena_of(problem);
    *context = (gradient_context){
        .problem = problem,
        .row = row,
        .width = lines * line_floats,
        .range_keys = range_keys,
        .ranges = divide_up(problem->kv_len, range_keys),
    };
    const int64_t heads = problem->kv_heads, size = heads * context->width;
    context->threads = gradient_threads(context);
    context->scratch_size = 2 * gradient_keys * context->width;
    context->weights = take_floats(&arena, size);
    context->a = take_floats(&arena, heads);
    context->dt_bias = take_floats(&arena, heads);
    context->sums = take_floats(&arena, context->ranges * size);
    context->da = fdma_arena_take(&arena, (size_t)(context->ranges * heads) * sizeof(double));
    context->ddt_bias = fdma_arena_take(&arena, (size_t)(context->ranges * heads) * sizeof(double));
    context->scratch = take_floats(&arena, context->threads * context->scratch_size);
    return fdma_arena_size(&arena);
}

static size_t score_backward_workspace(const fdma_problem *problem) {
    gradient_context context;
    return plan_gradients(problem, &context);
}

static fdma_status run_score_backward(const fdma_problem *problem) {
    gradient_context context;
    plan_gradients(problem, &context);
    fdma_parallel_for(problem->exec.parallel, 1, problem->kv_heads, pack_weights, &context);
    fdma_parallel_for(problem->exec.parallel, context.threads, context.ranges, add_range, &context);
    fdma_parallel_for(problem->exec.parallel, context.threads, problem->kv_heads,
                      write_weight_gradients, &context);
    return FDMA_OK;
}
