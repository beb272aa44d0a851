/* Score: z = a * softplus(<v, dt_proj> + dt_bias) of each key and kv head.
 *
 * The value states of a key, of all kv heads side by side, are multiplied with dt_proj a slab of
 * channels at a time. The slab of a batch of keys stays in the L1 cache while all heads are
 * multiplied, and the next slab is prefetched into it meanwhile. The weights come from the L2
 * cache, a few heads at a time. */
#pragma once

#include "cpu/common/math.h"
#include "cpu/common/tile.h"
#include "cpu/parallel.h"

enum {
    dot_heads = 4,       /* heads whose sums are in registers at a time */
    batch_keys = 8,      /* keys that are multiplied with one slab before the next: see below */
    task_keys = 256,     /* keys of a task */
    slab_channels = 512, /* channels of v, about: adding up lanes then takes a tenth of the time */
    line_bytes = 64,     /* bytes of a cache line */
    score_bytes = 10000, /* bytes of v that a thread works through per microsecond, about */
};

/* batch_keys: if rows are a multiple of 4 KB apart, each row of a batch takes a way of the same
 * sets of the L1 cache, which has 8 or 12 ways. */

_Static_assert(batch_keys % dot_keys == 0 && task_keys % batch_keys == 0,
               "a task is a whole number of batches, a batch of products");
_Static_assert((dot_heads * dot_keys) % vf_width == 0, "sums of a product fill whole vectors");

typedef struct score_context {
    const fdma_problem *problem;
    int64_t slab_heads; /* heads of v in a slab */
    int64_t slabs;
    int64_t width;         /* width of a slab: slab_heads * head_dim, rounded up to whole vectors */
    int64_t heads;         /* kv_heads, rounded up to a multiple of dot_heads */
    int64_t tasks;         /* tasks of one sequence */
    int64_t channel_size;  /* bytes of a channel of v */
    int64_t head_bytes;    /* from one head of v to the next */
    int64_t slab_runs;     /* pieces of memory that a slab of a key consists of */
    int64_t run_bytes;     /* bytes of each of them */
    int64_t slab_lines;    /* lines of the cache that a slab of a key consists of */
    int64_t product_lines; /* lines of the next slab to prefetch before each product */
    bool is_ready;         /* slabs of v are multiplied where they are */
    int32_t threads;
    float *projection; /* [slabs][heads][width]: dt_proj, padded with zeros */
    float *a;          /* [kv_heads] */
    float *dt_bias;    /* [kv_heads], zeros without dt_bias */
    float *scratch;    /* [threads][scratch_size] */
    int64_t scratch_size;
    int64_t *line_offsets; /* [slab_lines]: bytes from a slab of a key to each of its lines */
} score_context;

/* The scratch memory of one thread. */
typedef struct score_scratch {
    float *rows; /* [batch_keys][width], for slabs that are not ready */
    float *sums; /* [heads / dot_heads][batch_keys / dot_keys][dot_heads][dot_keys] */
    float *dots; /* [heads][task_keys], then scores */
} score_scratch;

static score_scratch scratch_of(const score_context *score, int32_t thread) {
    float *const start = score->scratch + thread * score->scratch_size;
    float *const sums = start + batch_keys * score->width;
    return (score_scratch){start, sums, sums + score->heads * batch_keys};
}

/* The number of heads in a slab: the last one may have fewer. */
static int64_t heads_of(const score_context *score, int64_t slab) {
    return min(score->problem->kv_heads - slab * score->slab_heads, score->slab_heads);
}

/* True if slabs of v are whole vectors of contiguous float32. */
static bool has_ready_slabs(const fdma_problem *problem, int64_t slab_heads) {
    const fdma_tensor *const v = &problem->v;
    return v->dtype == FDMA_FLOAT32 && problem->head_dim % vf_width == 0 &&
           (slab_heads == 1 || v->stride[2] == problem->head_dim);
}

/* Converts a row to float32. The dtype is a constant where this is inlined. */
INLINE void widen_row(float *to, const void *row, fdma_dtype dtype, int64_t dim) {
    int64_t d = 0;
    for (; d + vf_width <= dim; d += vf_width)
        vf_store(to + d, load_channels(row, dtype, d, vf_width));
    if (d < dim)
        vf_store_first(to + d, load_channels(row, dtype, d, dim - d), dim - d);
}

/* Converts a slab of one key to float32 in `row`, and fills the last vector with zeros. */
static const float *gather_slab(const score_context *score, float *row, int64_t heads,
                                const uint8_t *from) {
    const fdma_tensor *const v = &score->problem->v;
    const int64_t dim = score->problem->head_dim;
    float *to = row;
    for (int64_t g = 0; g < heads; g++, from += score->head_bytes, to += dim)
        if (v->dtype == FDMA_FLOAT32)
            widen_row(to, from, FDMA_FLOAT32, dim);
        else if (v->dtype == FDMA_FLOAT16)
            widen_row(to, from, FDMA_FLOAT16, dim);
        else
            widen_row(to, from, FDMA_BFLOAT16, dim);
    for (; (to - row) % vf_width != 0; to++)
        *to = 0;
    return row;
}

/* Adds the products of dot_keys rows with dot_heads projections to `sums`. Not inlined, because
 * addresses of the loops around it would take registers of its loop. In that loop the sums are in
 * the order of the weights, for which GCC makes faster scalar code. */
NOINLINE void dot_rows(float *sums, const float *const *rows, const float *projection,
                       int64_t stride, int64_t width) {
    vf s[dot_keys * dot_heads], of_head[dot_heads * dot_keys];
    const float *row[dot_keys];
    UNROLL
    for (int key = 0; key < dot_keys; key++)
        row[key] = rows[key];
    clear_vectors(s, 0, dot_keys * dot_heads);
    for (int64_t x = 0; x < width; x += vf_width) {
        vf weight[dot_heads];
        UNROLL
        for (int g = 0; g < dot_heads; g++)
            weight[g] = vf_load(projection + g * stride + x);
        UNROLL
        for (int key = 0; key < dot_keys; key++) {
            const vf values = vf_load(row[key] + x);
            UNROLL
            for (int g = 0; g < dot_heads; g++)
                s[key * dot_heads + g] = vf_fma(values, weight[g], s[key * dot_heads + g]);
        }
    }
    UNROLL
    for (int n = 0; n < dot_heads * dot_keys; n++)
        of_head[n] = s[n % dot_keys * dot_heads + n / dot_keys];
    UNROLL
    for (int n = 0; n < dot_heads * dot_keys; n += vf_width)
        vf_store(sums + n, vf_add(vf_load(sums + n), vf_sum_each(of_head + n)));
}

/* The lines of the next slab of a batch of keys that are not prefetched yet. */
typedef struct next_slab {
    const uint8_t *const *key; /* the key of the first of them */
    int64_t offset;            /* bytes from a key to its slab */
    int64_t line;              /* the first of them, counted within the slab of the key */
    int64_t left;              /* the number of them */
} next_slab;

/* Prefetches the lines that are due before one product into the L1 cache: lines of one key, then of
 * the next. It runs so often that it must do without divisions. */
static void prefetch_lines(const score_context *score, next_slab *next) {
    const int64_t *const offsets = score->line_offsets;
    int64_t count = min(score->product_lines, next->left);
    next->left -= count;
    while (count > 0) {
        const uint8_t *const key = *next->key;
        const int64_t end = min(next->line + count, score->slab_lines);
        count -= end - next->line;
        for (int64_t line = next->line; key != NULL && line < end; line++)
            __builtin_prefetch(key + next->offset + offsets[line]);
        next->line = end;
        if (end == score->slab_lines) {
            next->line = 0;
            next->key++;
        }
    }
}

/* A slab of one key of the batch in float32. For a key that must not be read, the weights serve as
 * finite numbers: its products are not used. */
static const float *slab_row(const score_context *score, const score_scratch *scratch, int64_t slab,
                             const uint8_t *key, int64_t index, const float *weights) {
    if (key == NULL)
        return weights;
    const uint8_t *const from = key + slab * score->slab_heads * score->head_bytes;
    if (score->is_ready)
        return (const float *)from;
    return gather_slab(score, scratch->rows + index * score->width, heads_of(score, slab), from);
}

/* Multiplies a slab of batch_keys keys. Meanwhile prefetches the next slab: of these keys or, after
 * the last slab, of the keys behind them. */
static void dot_slab(const score_context *score, const score_scratch *scratch, int64_t slab,
                     const uint8_t *const *keys) {
    const float *const weights = score->projection + slab * score->heads * score->width;
    const int64_t width = round_up(heads_of(score, slab) * score->problem->head_dim, vf_width);
    const bool last = slab + 1 == score->slabs;
    next_slab next = {
        .key = last ? keys + batch_keys : keys,
        .offset = last ? 0 : (slab + 1) * score->slab_heads * score->head_bytes,
        .left = batch_keys * score->slab_lines,
    };
    const float *rows[batch_keys];
    float *sums = scratch->sums;
    for (int64_t key = 0; key < batch_keys; key++)
        rows[key] = slab_row(score, scratch, slab, keys[key], key, weights);
    for (int64_t g = 0; g < score->heads; g += dot_heads)
        for (int64_t key = 0; key < batch_keys; key += dot_keys, sums += dot_heads * dot_keys) {
            prefetch_lines(score, &next);
            dot_rows(sums, rows + key, weights + g * score->width, score->width, width);
        }
}

/* The addresses of `count` keys from j on; NULL for keys that are not valid or do not exist, which
 * must not be read. */
static void find_keys(const score_context *score, int64_t b, int64_t j, const uint8_t **keys,
                      int64_t count) {
    const int64_t end = score->problem->kv_len;
    for (int64_t key = 0; key < count; key++) {
        const bool read = j + key < end && is_valid_key(score->problem, b, j + key);
        keys[key] = read ? head_row(&score->problem->v, b, j + key, 0) : NULL;
    }
}

/* dt, less dt_bias, of batch_keys keys. The prefetches also read the addresses of as many keys
 * behind them. */
static void dot_batch(const score_context *score, const score_scratch *scratch,
                      const uint8_t *const *keys, float *dots) {
    const float *sums = scratch->sums;
    memset(scratch->sums, 0, sizeof(float) * (size_t)(score->heads * batch_keys));
    for (int64_t slab = 0; slab < score->slabs; slab++)
        dot_slab(score, scratch, slab, keys);
    for (int64_t first = 0; first < score->heads; first += dot_heads)
        for (int64_t key = 0; key < batch_keys; key += dot_keys)
            for (int64_t g = first; g < first + dot_heads; g++, sums += dot_keys)
                memcpy(dots + g * task_keys + key, sums, sizeof(float) * dot_keys);
}

/* Writes scores and biases of `count` keys of one head from `dots`, which are overwritten. */
static void write_scores(const score_context *score, int64_t b, int64_t g, int64_t j, int64_t count,
                         float *dots) {
    const fdma_problem *const problem = score->problem;
    const size_t bytes = (size_t)count * sizeof(float);
    for (int64_t x = 0; x < count; x += vf_width) {
        const vf dt = vf_add(vf_load(dots + x), vf_set(score->dt_bias[g]));
        vf_store(dots + x, vf_mul(vf_set(score->a[g]), softplus_of(dt)));
    }
    for (int64_t x = 0; x < count && is_present(&problem->key_valid); x++)
        if (!is_valid_key(problem, b, j + x))
            dots[x] = -INFINITY;
    if (is_present(&problem->score))
        memcpy(float_at(&problem->score, b, g, j), dots, bytes);
    if (!is_present(&problem->bias))
        return;
    for (int64_t x = 0; x < count && problem->bias_form == FDMA_BIAS_EXP; x++)
        dots[x] = expf(dots[x]);
    memcpy(float_at(&problem->bias, b, g, j), dots, bytes);
}

static void score_task(const void *context, int64_t index, int32_t thread) {
    const score_context *const score = context;
    const int64_t b = index / score->tasks, first = index % score->tasks * task_keys;
    const int64_t count = min(score->problem->kv_len - first, task_keys);
    const score_scratch scratch = scratch_of(score, thread);
    const uint8_t *keys[task_keys + batch_keys];
    find_keys(score, b, first, keys, round_up(count, batch_keys) + batch_keys);
    for (int64_t x = 0; x < count; x += batch_keys)
        dot_batch(score, &scratch, keys + x, scratch.dots + x);
    for (int64_t g = 0; g < score->problem->kv_heads; g++)
        write_scores(score, b, g, first, count, scratch.dots + g * task_keys);
}

/* Packs dt_proj, a and dt_bias of one head; heads beyond kv_heads have weights of 0. */
static void pack_head(const void *context, int64_t g, int32_t thread) {
    const score_context *const score = context;
    const fdma_problem *const problem = score->problem;
    const fdma_tensor *const from = &problem->dt_proj;
    const bool is_head = g < problem->kv_heads;
    (void)thread;
    if (is_head) {
        score->a[g] = (float)fdma_load(&problem->a, g);
        score->dt_bias[g] = dt_bias_of(problem, g);
    }
    for (int64_t slab = 0; slab < score->slabs; slab++) {
        const int64_t first = slab * score->slab_heads * problem->head_dim;
        float *const to = score->projection + (slab * score->heads + g) * score->width;
        memset(to, 0, sizeof(float) * (size_t)score->width);
        if (is_head)
            load_row(to, row_at(from, g * from->stride[0] + first), from->dtype,
                     heads_of(score, slab) * problem->head_dim);
    }
}

/* Lists the lines of a slab of a key. If rows do not begin with a line, the last is missing. */
static void find_lines(const score_context *score) {
    int64_t *offset = score->line_offsets;
    for (int64_t run = 0; run < score->slab_runs; run++)
        for (int64_t byte = 0; byte < score->run_bytes; byte += line_bytes)
            *offset++ = run * score->head_bytes + byte;
}

/* Divides the workspace, and returns the bytes that the call needs of it. */
static size_t plan_score(const fdma_problem *problem, score_context *context) {
    fdma_arena arena = fdma_arena_of(problem);
    const int64_t slab_heads = min(slab_channels / problem->head_dim, problem->kv_heads);
    const int64_t slabs = divide_up(problem->kv_heads, slab_heads);
    const int64_t width = round_up(slab_heads * problem->head_dim, vf_width);
    const int64_t heads = round_up(problem->kv_heads, dot_heads);
    const int64_t size = (int64_t)fdma_dtype_size(problem->v.dtype);
    const int64_t keys = problem->batch * problem->kv_len;
    const int64_t bytes = keys * problem->kv_heads * problem->head_dim * size;
    const int64_t tasks = divide_up(problem->kv_len, task_keys);
    const int64_t runs = problem->v.stride[2] == problem->head_dim ? 1 : slab_heads;
    const int64_t run_bytes = slab_heads / runs * problem->head_dim * size;
    const int64_t lines = runs * divide_up(run_bytes, line_bytes);
    *context = (score_context){
        .problem = problem,
        .slab_heads = slab_heads,
        .slabs = slabs,
        .width = width,
        .heads = heads,
        .tasks = tasks,
        .channel_size = size,
        .head_bytes = problem->v.stride[2] * size,
        .slab_runs = runs,
        .run_bytes = run_bytes,
        .slab_lines = lines,
        .product_lines = divide_up(lines * dot_heads * dot_keys, heads),
        .is_ready = has_ready_slabs(problem, slab_heads),
        .threads = fdma_worthwhile_threads(problem->exec.threads, problem->batch * tasks,
                                           bytes / score_bytes),
        .projection = take_floats(&arena, slabs * heads * width),
        .a = take_floats(&arena, heads),
        .dt_bias = take_floats(&arena, heads),
        .scratch_size = batch_keys * width + heads * (batch_keys + task_keys),
    };
    context->scratch = take_floats(&arena, context->threads * context->scratch_size);
    context->line_offsets = fdma_arena_take(&arena, (size_t)lines * sizeof(int64_t));
    return fdma_arena_size(&arena);
}

static size_t score_workspace(const fdma_problem *problem) {
    score_context context;
    return plan_score(problem, &context);
}

static fdma_status run_score(const fdma_problem *problem) {
    score_context context;
    plan_score(problem, &context);
    find_lines(&context);
    fdma_parallel_for(problem->exec.parallel, 1, context.heads, pack_head, &context);
    fdma_parallel_for(problem->exec.parallel, context.threads, problem->batch * context.tasks,
                      score_task, &context);
    return FDMA_OK;
}
