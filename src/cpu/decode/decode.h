/* Forward for few rows, such as one query that is being decoded: channels stand in the lanes, and
 * each row of k and v is read once for all rows of a head that want it. The work is reading: rows
 * of the block to come are asked for ahead of time. One row's keys are cut into chunks, whose
 * results are merged in order, so that threads can share it. */
#ifndef FDMA_CPU_DECODE_DECODE_H
#define FDMA_CPU_DECODE_DECODE_H

#include "cpu/common/softmax.h"
#include "cpu/decode/decode_keys.h"
#include "cpu/parallel.h"

/* Bytes of some channels in a dtype that the compiler knows. */
INLINE int64_t bytes_of(int64_t channels, fdma_dtype dtype) {
    return channels * (dtype == FDMA_FLOAT32 ? 4 : 2);
}

/* A row's channels from d on, in a dtype that the compiler knows. */
INLINE vf channels_of(const void *row, fdma_dtype dtype, int64_t d, int64_t count) {
    if (dtype == FDMA_FLOAT32 && count == vf_width)
        return vf_load((const float *)row + d);
    return load_channels(row, dtype, d, count);
}

/* sums += q k for rows x keys, over `count` channels from d on. */
INLINE void multiply_channels(vf *sums, const float *q, int64_t width, const void *const *k,
                              fdma_dtype dtype, int rows, int64_t d, int64_t count) {
    const int keys = row_sums / rows;
    vf channels[shared_rows];
    UNROLL
    for (int r = 0; r < rows; r++)
        channels[r] = vf_load(q + r * width + d);
    UNROLL
    for (int n = 0; n < keys; n++) {
        const vf key = channels_of(k[n], dtype, d, count);
        UNROLL
        for (int r = 0; r < rows; r++)
            sums[r * keys + n] = vf_fma(key, channels[r], sums[r * keys + n]);
    }
}

/* Products of `rows` rows of q with row_sums / rows keys; those of a row lie row_keys apart. */
INLINE void multiply_keys(float *products, const float *q, int64_t width, const void *const *k,
                          const void *const *ahead, fdma_dtype dtype, int rows, int64_t dim) {
    const int keys = row_sums / rows;
    float lanes[row_sums];
    vf sums[row_sums];
    int64_t d = 0;
    UNROLL
    for (int x = 0; x < row_sums; x++)
        sums[x] = vf_set(0);
    for (; d + vf_width <= dim; d += vf_width) {
        prefetch_rows(ahead, keys, bytes_of(d, dtype));
        multiply_channels(sums, q, width, k, dtype, rows, d, vf_width);
    }
    if (d < dim)
        multiply_channels(sums, q, width, k, dtype, rows, d, dim - d);
    UNROLL
    for (int x = 0; x < row_sums; x += vf_width) {
        vf_transpose(sums + x);
        UNROLL
        for (int step = 1; step < vf_width; step *= 2) {
            UNROLL
            for (int y = 0; y < vf_width; y += 2 * step)
                sums[x + y] = vf_add(sums[x + y], sums[x + y + step]);
        }
        vf_store(lanes + x, sums[x]);
    }
    for (int r = 0; r < rows; r++)
        memcpy(products + r * row_keys, lanes + r * keys, sizeof(float) * (size_t)keys);
}

/* The first product of a block of keys, while the next one's k is asked for. */
INLINE void multiply_block(const row_task *task, const row_list *list, const row_list *next,
                           fdma_dtype dtype, int rows) {
    const row_context *const all = task->rows;
    const float *const q = task->q + list->head * all->padded * all->width;
    for (int n = 0; n < list->count; n += row_sums / rows)
        for (int64_t r = 0; r < all->padded; r += rows)
            multiply_keys(task->weights + r * row_keys + n, q + r * all->width, all->width,
                          list->k + n, (r == 0 ? next : list)->k + n, dtype, rows,
                          all->problem->head_dim);
}

/* out += weights v for rows x some vectors of channels, the last one of `count` channels. */
INLINE void add_channels(float *out, int64_t length, const float *weights, const row_list *list,
                         const row_list *next, fdma_dtype dtype, int rows, int vectors, int64_t d,
                         int64_t count) {
    vf o[shared_rows][strip_vectors];
    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int m = 0; m < vectors; m++)
            o[r][m] = vf_load(out + r * length + d + m * vf_width);
    }
    for (int32_t n = 0; n < list->count; n++) {
        vf channels[strip_vectors];
        for (int m = 0; m < vectors; m++)
            prefetch_rows(next->v + n, 1, bytes_of(d + m * vf_width, dtype));
        UNROLL
        for (int m = 0; m < vectors; m++)
            channels[m] = channels_of(list->v[n], dtype, d + m * vf_width, count);
        UNROLL
        for (int r = 0; r < rows; r++) {
            const vf weight = vf_set(weights[r * row_keys + n]);
            UNROLL
            for (int m = 0; m < vectors; m++)
                o[r][m] = vf_fma(weight, channels[m], o[r][m]);
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int m = 0; m < vectors; m++)
            vf_store(out + r * length + d + m * vf_width, o[r][m]);
    }
}

/* The second product of a block of keys, while the next one's v is asked for. */
INLINE void add_block(const row_task *task, const row_list *list, const row_list *next,
                      fdma_dtype dtype, int rows) {
    const int strip = rows == 1 ? strip_vectors : row_sums / shared_rows;
    const row_context *const all = task->rows;
    const int64_t dim = all->problem->head_dim, length = partial_length(all);
    for (int64_t r = 0; r < all->padded; r += rows) {
        float *const out = partial_of(all, head_of(task, list->head), task->chunk, r).out;
        const float *const weights = task->weights + r * row_keys;
        const row_list *const ahead = r == 0 ? next : list;
        int64_t d = 0;
        for (; d + strip * vf_width <= dim; d += strip * vf_width)
            add_channels(out, length, weights, list, ahead, dtype, rows, strip, d, vf_width);
        for (; d < dim; d += vf_width)
            add_channels(out, length, weights, list, ahead, dtype, rows, 1, d, channels_at(d, dim));
    }
}

/* Products become logits, -inf where the row does not keep the key. */
static void find_row_logits(const row_task *task, const row_list *list, int64_t row) {
    const fdma_problem *const problem = task->rows->problem;
    const float cap = softcap_of(problem), scale = (float)problem->scale;
    const int32_t position = row_position(problem, row);
    const int32_t *const expiry = list->expiry;
    float *const logits = task->weights + row * row_keys;
    for (int32_t n = 0; n < list->count; n += vf_width) {
        vf s = vf_load(logits + n);
        if (cap > 0)
            s = vf_mul(vf_set(cap), tanh_of(vf_mul(s, vf_set(share_of(scale, cap)))));
        s = vf_fma(s, vf_set(cap > 0 ? 1 : scale), vf_load(list->bias + n));
        vf_store(logits + n, vf_keep(s, 0, list->count - n));
    }
    for (int32_t n = 0; list->cut && n < list->count; n++) {
        const int32_t j = list->key[n];
        if (j > position || (expiry && expiry[j] <= position))
            logits[n] = -INFINITY;
    }
}

/* Raises a row's maximum to the greatest lane of `top` and rescales what was summed under the old
 * one. */
static __attribute__((noinline)) void raise_row_max(const row_context *rows, row_partial row,
                                                    vf top) {
    float lanes[vf_width];
    vf_store(lanes, top);
    for (int lane = 1; lane < vf_width; lane++)
        lanes[0] = lanes[lane] > lanes[0] ? lanes[lane] : lanes[0];
    const vf raised = vf_set(lanes[0]);
    const vf below = vf_sub(vf_load(row.max), raised);
    const vf factor = exp2_of(vf_mul(below, vf_set(log2e)));
    for (int64_t d = 0; d < rows->width; d += vf_width)
        vf_store(row.out + d, vf_mul(vf_load(row.out + d), factor));
    vf_store(row.sum, vf_mul(vf_load(row.sum), factor));
    vf_store(row.max, raised);
}

/* The products of a row with a block of keys become weights. */
static void weigh_row(const row_task *task, const row_list *list, int64_t row) {
    const row_partial partial = partial_of(task->rows, head_of(task, list->head), task->chunk, row);
    float *const weights = task->weights + row * row_keys;
    find_row_logits(task, list, row);
    vf top = vf_load(partial.max), sum = vf_load(partial.sum);
    for (int32_t n = 0; n < list->count; n += vf_width)
        top = vf_max(vf_load(weights + n), top);
    if (vf_any_greater(top, vf_load(partial.max))) {
        raise_row_max(task->rows, partial, top);
        sum = vf_load(partial.sum);
    }
    const vf max = vf_load(partial.max);
    for (int32_t n = 0; n < list->count; n += vf_width) {
        const vf weight = exp2_of(vf_mul(vf_sub(vf_load(weights + n), max), vf_set(log2e)));
        vf_store(weights + n, weight);
        sum = vf_add(sum, weight);
    }
    vf_store(partial.sum, sum);
}

INLINE void attend_list_as(const row_task *task, const row_list *list, const row_list *next,
                           fdma_dtype dtype, int rows) {
    multiply_block(task, list, next, dtype, rows);
    for (int64_t row = 0; row < task->rows->padded; row++)
        weigh_row(task, list, row);
    add_block(task, list, next, dtype, rows);
}

/* A copy of the loops for each dtype, for one row and for more. */
static void attend_list(const row_task *task, const row_list *list, const row_list *next) {
    const fdma_dtype dtype = task->rows->problem->dtype;
    const bool one = task->rows->padded == 1;
    if (dtype == FDMA_FLOAT32 && one)
        attend_list_as(task, list, next, FDMA_FLOAT32, 1);
    else if (dtype == FDMA_FLOAT32)
        attend_list_as(task, list, next, FDMA_FLOAT32, shared_rows);
    else if (dtype == FDMA_FLOAT16 && one)
        attend_list_as(task, list, next, FDMA_FLOAT16, 1);
    else if (dtype == FDMA_FLOAT16)
        attend_list_as(task, list, next, FDMA_FLOAT16, shared_rows);
    else if (one)
        attend_list_as(task, list, next, FDMA_BFLOAT16, 1);
    else
        attend_list_as(task, list, next, FDMA_BFLOAT16, shared_rows);
}

/* q of a head in float32 with zeros past the end, and nothing summed yet. Rows beyond the last
 * repeat it. */
static void begin_head(const row_task *task, int64_t head) {
    const row_context *const rows = task->rows;
    const fdma_problem *const problem = rows->problem;
    const int64_t dim = problem->head_dim;
    const tile_place place = {.b = task->b, .g = task->first_head + head};
    for (int64_t row = 0; row < rows->padded; row++) {
        const int64_t used = row < rows->rows ? row : rows->rows - 1;
        const void *const from =
            row_at(&problem->q, row_offset(problem, &problem->q, &place, used));
        const row_partial partial = partial_of(rows, head_of(task, head), task->chunk, row);
        float *const q = task->q + (head * rows->padded + row) * rows->width;
        for (int64_t d = 0; d < dim; d += vf_width) {
            vf_store(q + d, load_channels(from, problem->dtype, d, channels_at(d, dim)));
            vf_store(partial.out + d, vf_set(0));
        }
        vf_store(partial.sum, vf_set(0));
        vf_store(partial.max, vf_set(-FLT_MAX));
    }
}

/* A chunk of the keys of some heads. */
static void attend_chunk(const void *context, int64_t index, int32_t thread) {
    const row_context *const rows = context;
    const uint32_t rounding = flush_subnormals();
    const int64_t set = index / rows->chunks % rows->sets;
    row_task task = {
        .rows = rows,
        .b = index / rows->chunks / rows->sets,
        .first_head = set * rows->heads,
        .heads = rows->problem->kv_heads - set * rows->heads,
        .chunk = index % rows->chunks,
        .q = rows->scratch + thread * rows->scratch_size,
    };
    task.heads = task.heads < rows->heads ? task.heads : rows->heads;
    task.weights = task.q + rows->heads * rows->padded * rows->width;
    for (int64_t head = 0; head < task.heads; head++) {
        begin_head(&task, head);
        task.walk[head] = start_row_walk(&task, head);
    }
    row_list lists[2];
    list_row_keys(&task, &lists[0]);
    for (int now = 0; lists[now].count > 0; now = 1 - now) {
        list_row_keys(&task, &lists[1 - now]);
        attend_list(&task, &lists[now], &lists[lists[1 - now].count > 0 ? 1 - now : now]);
    }
    restore_modes(rounding);
}

/* The chunks of a row become one, the first, of which the sum is returned. */
static float merge_row(const row_context *rows, int64_t head, int64_t row) {
    const row_partial first = partial_of(rows, head, 0, row);
    vf max = vf_load(first.max), total = vf_set(0);
    for (int64_t chunk = 1; chunk < rows->chunks; chunk++)
        max = vf_max(vf_load(partial_of(rows, head, chunk, row).max), max);
    for (int64_t chunk = 0; chunk < rows->chunks; chunk++) {
        const row_partial part = partial_of(rows, head, chunk, row);
        const vf factor = exp2_of(vf_mul(vf_sub(vf_load(part.max), max), vf_set(log2e)));
        total = vf_fma(vf_load(part.sum), factor, total);
        for (int64_t d = 0; d < rows->width; d += vf_width) {
            const vf before = chunk > 0 ? vf_load(first.out + d) : vf_set(0);
            vf_store(first.out + d, vf_fma(vf_load(part.out + d), factor, before));
        }
    }
    vf_store(first.max, max);
    return vf_sum(total);
}

/* Merges the chunks of a head's rows, and writes out and lse. A row that kept nothing has sum 0 and
 * becomes 0. */
static void merge_head(const void *context, int64_t head, int32_t thread) {
    const row_context *const rows = context;
    const fdma_problem *const problem = rows->problem;
    const fdma_tensor *const out = &problem->out, *const lse = &problem->lse;
    const tile_place place = {.b = head / problem->kv_heads, .g = head % problem->kv_heads};
    const uint32_t rounding = flush_subnormals();
    (void)thread;
    for (int64_t row = 0; row < rows->rows; row++) {
        const row_partial merged = partial_of(rows, head, 0, row);
        const float sum = rows->chunks > 0 ? merge_row(rows, head, row) : 0;
        const vf inverse = vf_set(sum == 0 ? 0 : 1 / sum);
        void *const to = row_at(out, row_offset(problem, out, &place, row));
        for (int64_t d = 0; d < problem->head_dim; d += vf_width)
            store_channels(to, problem->dtype, d,
                           sum == 0 ? vf_set(0) : vf_mul(vf_load(merged.out + d), inverse),
                           channels_at(d, problem->head_dim));
        if (!is_present(lse))
            continue;
        const int64_t h = place.g * problem->group + row % problem->group;
        float *const line = (float *)lse->data + place.b * lse->stride[0] + h * lse->stride[1];
        line[row / problem->group] =
            sum == 0 ? -INFINITY : (float)((double)*merged.max + log((double)sum));
    }
    restore_modes(rounding);
}

static int32_t row_threads(const row_context *rows) {
    const fdma_problem *const problem = rows->problem;
    const bool all = !problem->selected || problem->window > problem->kv_len;
    const int64_t keys = all ? problem->kv_len : problem->window;
    const int64_t heads = problem->batch * problem->kv_heads;
    const int64_t bytes =
        2 * heads * keys * problem->head_dim * (int64_t)fdma_dtype_size(problem->dtype);
    return fdma_worthwhile_threads(problem->exec.threads, heads * rows->chunks,
                                   bytes / microsecond_bytes);
}

static int32_t merge_threads(const row_context *rows) {
    const fdma_problem *const problem = rows->problem;
    const int64_t heads = problem->batch * problem->kv_heads;
    const int64_t bytes =
        heads * rows->chunks * rows->rows * partial_length(rows) * (int64_t)sizeof(float);
    return fdma_worthwhile_threads(problem->exec.threads, heads, bytes / microsecond_bytes);
}

/* Heads of a task: those that lie side by side, unless threads would be left without one. */
static int64_t task_heads(const row_context *rows, int32_t threads) {
    const fdma_problem *const problem = rows->problem;
    if (problem->k.stride[2] > problem->k.stride[1])
        return 1;
    int64_t heads = problem->kv_heads < row_heads ? problem->kv_heads : row_heads;
    while (heads > 1 && rows->chunks * problem->batch * problem->kv_heads < 2 * threads * heads)
        heads = (heads + 1) / 2;
    return heads;
}

/* Carves the workspace; the arena's size is what it takes. Chunks depend on kv_len alone, so that
 * results depend on nothing else. */
static fdma_arena lay_out_rows(const fdma_problem *problem, row_context *rows) {
    const int64_t share = (problem->kv_len + most_chunks - 1) / most_chunks;
    const int64_t chunk = share < least_chunk ? least_chunk : share;
    const int64_t count = problem->q_len * problem->group;
    *rows = (row_context){
        .problem = problem,
        .rows = count,
        .padded = count > 1 ? (count + shared_rows - 1) / shared_rows * shared_rows : count,
        .width = (problem->head_dim + vf_width - 1) / vf_width * vf_width,
        .chunk = (chunk + row_keys - 1) / row_keys * row_keys,
    };
    rows->chunks = (problem->kv_len + rows->chunk - 1) / rows->chunk;
    const int32_t threads = row_threads(rows);
    rows->heads = task_heads(rows, threads);
    rows->sets = (problem->kv_heads + rows->heads - 1) / rows->heads;
    rows->scratch_size = rows->padded * (rows->heads * rows->width + row_keys);
    const int64_t partials = problem->batch * problem->kv_heads * rows->chunks * rows->padded;
    fdma_arena arena = fdma_arena_of(problem);
    rows->partial =
        fdma_arena_take(&arena, (size_t)(partials * partial_length(rows)) * sizeof(float));
    rows->scratch = fdma_arena_take(&arena, (size_t)(threads * rows->scratch_size) * sizeof(float));
    return arena;
}

static size_t rows_workspace(const fdma_problem *problem) {
    row_context rows;
    const fdma_arena arena = lay_out_rows(problem, &rows);
    return fdma_arena_size(&arena);
}

static fdma_status run_rows(const fdma_problem *problem) {
    row_context rows;
    lay_out_rows(problem, &rows);
    const int64_t heads = problem->batch * problem->kv_heads;
    fdma_parallel_for(row_threads(&rows), problem->batch * rows.sets * rows.chunks, attend_chunk,
                      &rows);
    fdma_parallel_for(merge_threads(&rows), heads, merge_head, &rows);
    return FDMA_OK;
}

#endif
