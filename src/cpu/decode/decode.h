/* Decode: forward for few rows of each kv head, such as one new query. Channels stand in the lanes,
 * and each row of k and v is read once for all rows that keep its key. The time goes into reading
 * memory, so the rows of the next block are prefetched; one row of each head without a selection is
 * multiplied in the order of memory (decode_dense.h). The keys are divided into splits, which
 * threads work on independently and whose partial results are merged in order. */
#pragma once

#include "cpu/common/math.h"
#include "cpu/decode/decode_dense.h"
#include "cpu/parallel.h"

/* Turns products into logits, -inf where the row does not keep the key. */
static void find_row_logits(const decode_task *task, const decode_block *keys, int64_t row) {
    const fdma_problem *const problem = task->decode->problem;
    const float cap = softcap_of(problem), scale = (float)problem->scale;
    const int32_t position = row_position(problem, row);
    const int32_t *const expiry = keys->expiry;
    float *const logits = task->weights + row * decode_keys;
    for (int32_t n = 0; n < keys->count; n += vf_width) {
        vf s = vf_load(logits + n);
        if (cap > 0)
            s = vf_mul(vf_set(cap), tanh_of(vf_mul(s, vf_set(scale_over_cap(scale, cap)))));
        s = vf_fma(s, vf_set(cap > 0 ? 1 : scale), vf_load(keys->bias + n));
        vf_store(logits + n, vf_keep(s, 0, keys->count - n));
    }
    for (int32_t n = 0; keys->masked && n < keys->count; n++) {
        const int32_t j = keys->key[n];
        if (j > position || (expiry != NULL && expiry[j] <= position))
            logits[n] = -INFINITY;
    }
}

/* Raises the maximum of a row to the greatest lane of `top`, and rescales everything that was
 * summed under the old maximum. */
NOINLINE void raise_row_max(const decode_context *decode, decode_partial row, vf top) {
    float lanes[vf_width];
    vf_store(lanes, top);
    for (int lane = 1; lane < vf_width; lane++)
        lanes[0] = lanes[lane] > lanes[0] ? lanes[lane] : lanes[0];
    const vf raised = vf_set(lanes[0]);
    const vf below = vf_sub(vf_load(row.max), raised);
    const vf factor = exp2_of(vf_mul(below, vf_set(log2e)));
    for (int64_t d = 0; d < decode->width; d += vf_width)
        vf_store(row.out + d, vf_mul(vf_load(row.out + d), factor));
    vf_store(row.sum, vf_mul(vf_load(row.sum), factor));
    vf_store(row.max, raised);
}

/* Turns the products of a row and a block of keys into weights, stored as words of keys. */
static void weigh_row(const decode_task *task, const decode_block *keys, int64_t row) {
    const decode_partial partial =
        partial_of(task->decode, head_of(task, keys->head), task->split, row);
    float *const weights = task->weights + row * decode_keys;
    find_row_logits(task, keys, row);
    vf top = vf_load(partial.max), sum = vf_set(0);
    for (int32_t n = 0; n < keys->count; n += vf_width)
        top = vf_max(vf_load(weights + n), top);
    if (vf_any_greater(top, vf_load(partial.max)))
        raise_row_max(task->decode, partial, top);
    const vf max = vf_load(partial.max);
    for (int32_t n = 0; n < keys->count; n += vf_width) {
        const vf weight = exp2_of(vf_mul(vf_sub(vf_load(weights + n), max), vf_set(log2e)));
        vf_store_terms(weights + n / terms, weight);
        sum = vf_add(sum, weight);
    }
    vf_store(partial.sum, vf_add(vf_load(partial.sum), sum));
}

INLINE void attend_block_as(const decode_task *task, const decode_block *now,
                            const decode_block *next, fdma_dtype dtype, int rows) {
    multiply_block(task, now, next, dtype, rows);
    for (int64_t row = 0; row < task->decode->padded; row++)
        weigh_row(task, now, row);
    add_block(task, now, next, dtype, rows);
}

INLINE void attend_block_of(const decode_task *task, const decode_block *now,
                            const decode_block *next, fdma_dtype dtype) {
    if (task->decode->padded == 1)
        attend_block_as(task, now, next, dtype, 1);
    else if (task->decode->padded == 2)
        attend_block_as(task, now, next, dtype, 2);
    else
        attend_block_as(task, now, next, dtype, shared_rows);
}

/* The loops are compiled for each dtype and for one, two and more rows. */
static void attend_decode_block(const decode_task *task, const decode_block *now,
                                const decode_block *next) {
    if (task->decode->problem->dtype == FDMA_FLOAT32)
        attend_block_of(task, now, next, FDMA_FLOAT32);
    else if (task->decode->problem->dtype == FDMA_FLOAT16)
        attend_block_of(task, now, next, FDMA_FLOAT16);
    else
        attend_block_of(task, now, next, FDMA_BFLOAT16);
}

/* Turns the products of all heads and a block of keys into weights, and prefetches the first rows
 * of v. */
static void weigh_heads(const decode_task *task, const dense_arrays *arrays, decode_block *keys) {
    decode_task one = *task;
    for (int64_t head = 0; head < task->heads; head++) {
        prefetch_first_values(task, keys, head);
        find_bias(task->decode->problem, task->b, task->first_head + head, keys->key, decode_keys,
                  keys->bias);
        keys->head = head;
        one.weights = arrays->weights + head * decode_keys;
        weigh_row(&one, keys, 0);
    }
}

INLINE void attend_heads_of(const decode_task *task, const dense_arrays *arrays, decode_block *keys,
                            fdma_dtype dtype) {
    multiply_heads(task, arrays, keys, dtype);
    weigh_heads(task, arrays, keys);
    add_heads(task, arrays, keys, dtype);
}

static void attend_heads(const decode_task *task, const dense_arrays *arrays, decode_block *keys) {
    const decode_context *const decode = task->decode;
    if (decode->problem->dtype == FDMA_FLOAT32)
        attend_heads_of(task, arrays, keys, FDMA_FLOAT32);
    else if (decode->problem->dtype == FDMA_FLOAT16)
        attend_heads_of(task, arrays, keys, FDMA_FLOAT16);
    else
        attend_heads_of(task, arrays, keys, FDMA_BFLOAT16);
    for (int64_t head = 0; head < task->heads; head++) {
        float *const out = partial_of(decode, head_of(task, head), task->split, 0).out;
        const float *const sums = arrays->sums + head * decode->width;
        for (int64_t d = 0; d < decode->width; d += vf_width)
            vf_store(out + d, vf_add(vf_load(out + d), vf_load(sums + d)));
    }
}

static void attend_dense_split(const decode_task *task) {
    const dense_arrays arrays = dense_arrays_of(task);
    decode_task first = *task; // all heads have the keys of one
    decode_block keys;
    first.heads = 1;
    for (;;) {
        first.next_head = 0;
        list_decode_keys(&first, &keys);
        if (keys.count == 0)
            return;
        attend_heads(task, &arrays, &keys);
    }
}

/* Loads q of a head, with zeros past the last channel, and clears its partial results.
 * Rows beyond the last one repeat it. */
static void begin_head(const decode_task *task, int64_t head) {
    const decode_context *const decode = task->decode;
    const fdma_problem *const problem = decode->problem;
    const int64_t dim = problem->head_dim;
    const row_range rows = {.b = task->b, .g = task->first_head + head};
    for (int64_t row = 0; row < decode->padded; row++) {
        const void *const from =
            row_of_lane(problem, &problem->q, &rows, min(row, decode->rows - 1));
        const decode_partial partial = partial_of(decode, head_of(task, head), task->split, row);
        float *const q = task->q + (head * decode->padded + row) * decode->width;
        load_query(q, from, problem->dtype, dim);
        for (int64_t d = 0; d < dim; d += vf_width)
            vf_store(partial.out + d, vf_set(0));
        vf_store(partial.sum, vf_set(0));
        vf_store(partial.max, vf_set(-FLT_MAX));
    }
}

/* Lists the first block of the next split, which this thread will probably take next. */
static void list_next_split(const decode_task *task, decode_block *keys) {
    decode_task next = *task;
    next.split++;
    next.next_head = 0;
    for (int64_t head = 0; head < next.heads; head++)
        next.cursor[head] = start_split(&next, head);
    list_decode_keys(&next, keys);
}

static void attend_selected_split(decode_task *task) {
    decode_block blocks[2], after;
    list_decode_keys(task, &blocks[0]);
    for (int now = 0; blocks[now].count > 0; now = 1 - now) {
        const decode_block *next = &blocks[1 - now];
        list_decode_keys(task, &blocks[1 - now]);
        if (next->count == 0) {
            list_next_split(task, &after);
            next = after.count > 0 ? &after : &blocks[now];
        }
        attend_decode_block(task, &blocks[now], next);
    }
}

static void attend_split(const void *context, int64_t index, int32_t thread) {
    const decode_context *const decode = context;
    const uint32_t modes = flush_subnormals();
    const int64_t set = index / decode->splits % decode->head_sets;
    const int64_t first_head = set * decode->heads;
    decode_task task = {
        .decode = decode,
        .b = index / decode->splits / decode->head_sets,
        .first_head = first_head,
        .heads = min(decode->problem->kv_heads - first_head, decode->heads),
        .split = index % decode->splits,
        .q = decode->scratch + thread * decode->scratch_size,
    };
    task.weights = task.q + decode->heads * decode->padded * decode->width;
    for (int64_t head = 0; head < task.heads; head++) {
        begin_head(&task, head);
        task.cursor[head] = start_split(&task, head);
    }
    if (decode->dense)
        attend_dense_split(&task);
    else
        attend_selected_split(&task);
    restore_modes(modes);
}

/* Merges the partial results of a row into the one of the first split, and returns its sum. */
static float merge_splits(const decode_context *decode, int64_t head, int64_t row) {
    const decode_partial merged = partial_of(decode, head, 0, row);
    vf max = vf_load(merged.max), total = vf_set(0);
    for (int64_t split = 1; split < decode->splits; split++)
        max = vf_max(vf_load(partial_of(decode, head, split, row).max), max);
    for (int64_t split = 0; split < decode->splits; split++) {
        const decode_partial partial = partial_of(decode, head, split, row);
        const vf factor = exp2_of(vf_mul(vf_sub(vf_load(partial.max), max), vf_set(log2e)));
        total = vf_fma(vf_load(partial.sum), factor, total);
        for (int64_t d = 0; d < decode->width; d += vf_width) {
            const vf before = split > 0 ? vf_load(merged.out + d) : vf_set(0);
            vf_store(merged.out + d, vf_fma(vf_load(partial.out + d), factor, before));
        }
    }
    vf_store(merged.max, max);
    return vf_sum(total);
}

/* Merges the splits of a head, and writes out and lse. */
static void merge_head(const void *context, int64_t head, int32_t thread) {
    const decode_context *const decode = context;
    const fdma_problem *const problem = decode->problem;
    const row_range rows = rows_of_head(problem, head);
    const uint32_t modes = flush_subnormals();
    (void)thread;
    for (int64_t row = 0; row < decode->rows; row++) {
        const decode_partial merged = partial_of(decode, head, 0, row);
        const float sum = decode->splits > 0 ? merge_splits(decode, head, row) : 0;
        const float max = sum == 0 ? 0 : *merged.max;
        const float sink = sink_of_row(problem, rows.g, row);
        void *const to = row_of_lane(problem, &problem->out, &rows, row);
        const vf inverse = vf_set(inverse_of_sum(max, sum, sink));
        if (sum != 0)
            restore_order(merged.out, problem->dtype, problem->head_dim);
        for (int64_t d = 0; d < problem->head_dim; d += vf_width)
            store_channels(to, problem->dtype, d,
                           sum == 0 ? inverse : vf_mul(vf_load(merged.out + d), inverse),
                           channels_at(d, problem->head_dim));
        if (is_present(&problem->lse))
            *float_of_lane(problem, &problem->lse, &rows, row) = lse_of_row(max, sum, sink);
    }
    restore_modes(modes);
}

static int32_t threads_to_read(const fdma_problem *problem, int64_t tasks, int64_t bytes) {
    return fdma_tuned_threads(problem->exec.threads, tasks, bytes / bytes_per_microsecond,
                              fdma_tuned(problem)->thread_work);
}

/* Heads of a task: neighbours in memory, and few enough that each thread has two tasks. */
static int64_t heads_of_task(const fdma_problem *problem, int64_t most, int64_t splits,
                             int32_t threads) {
    if (problem->k.stride[2] > problem->k.stride[1])
        return 1;
    int64_t heads = min(problem->kv_heads, most);
    while (heads > 1 && splits < 2 * threads * heads)
        heads = divide_up(heads, 2);
    return heads;
}

/* Divides the heads among tasks. Without a selection, the keys of one row are read in the order of
 * memory if a task has all heads, or if the rows of a head follow each other. */
static void divide_heads(const fdma_problem *problem, int64_t splits, decode_context *decode) {
    const bool dense = !problem->selected && problem->carried_len == 0 && decode->padded == 1;
    const bool by_head = problem->k.stride[2] > problem->k.stride[1];
    const int64_t heads = heads_of_task(problem, dense_heads, splits, decode->threads);
    decode->dense = dense && (by_head || heads == problem->kv_heads);
    decode->heads =
        decode->dense ? heads : heads_of_task(problem, decode_heads, splits, decode->threads);
}

/* The most splits of a sequence. They depend on kv_len and on the tuning alone, so that results
 * depend neither on the threads nor on the batch. By the rules no smaller kv_len has more splits;
 * with a tuning it may. */
static int64_t most_splits(const fdma_problem *problem) {
    const int64_t tuned = fdma_tuned(problem)->split_keys;
    const int64_t usual = tuned > 0 ? tuned : usual_split;
    if (problem->any_len && problem->tuning != NULL)
        return max_splits;
    return min(max((problem->kv_len + usual / 2) / usual, 1), max_splits);
}

/* Divides the workspace, and returns the bytes that the call needs of it. */
static size_t plan_decode(const fdma_problem *problem, decode_context *decode) {
    const int64_t rows = problem->q_len * problem->group;
    const int64_t heads = problem->batch * problem->kv_heads;
    const int64_t key_bytes = problem->head_dim * (int64_t)fdma_dtype_size(problem->dtype);
    *decode = (decode_context){
        .problem = problem,
        .rows = rows,
        .padded = rows > 2 ? round_up(rows, shared_rows) : rows,
        .width = round_up(problem->head_dim, vf_width),
    };
    const int64_t most = most_splits(problem);
    decode->split = round_up(max(divide_up(problem->kv_len, most), 1), decode_keys);
    decode->splits = problem->any_len ? most : divide_up(problem->kv_len, decode->split);
    const int64_t splits = heads * decode->splits;
    decode->threads =
        threads_to_read(problem, splits, 2 * heads * keys_of_query(problem) * key_bytes);
    divide_heads(problem, splits, decode);
    if (problem->any_len) {
        decode->threads = fdma_thread_count(problem->exec.threads, INT32_MAX);
        decode->heads = problem->kv_heads;
    }
    decode->head_sets = divide_up(problem->kv_heads, decode->heads);
    decode->scratch_size = decode->padded * decode->heads * decode->width +
                           max(decode->padded * decode_keys, dense_scratch(decode));
    fdma_arena arena = fdma_arena_of(problem);
    decode->partial = take_floats(&arena, splits * decode->padded * partial_length(decode));
    decode->scratch = take_floats(&arena, decode->threads * decode->scratch_size);
    return fdma_arena_size(&arena);
}

static size_t decode_workspace(const fdma_problem *problem) {
    decode_context decode;
    return plan_decode(problem, &decode);
}

static fdma_status run_decode(const fdma_problem *problem) {
    decode_context decode;
    plan_decode(problem, &decode);
    const int64_t heads = problem->batch * problem->kv_heads, splits = heads * decode.splits;
    const int64_t bytes = splits * decode.rows * partial_length(&decode) * (int64_t)sizeof(float);
    fdma_parallel_for(decode.threads, problem->batch * decode.head_sets * decode.splits,
                      attend_split, &decode);
    fdma_parallel_for(threads_to_read(problem, heads, bytes), heads, merge_head, &decode);
    return FDMA_OK;
}
