/* Random caches, and the arguments of calls with a cache. */
#pragma once

#include "arguments.h"

/* The rows of a page are mostly a power of 2. The table holds numbers of pages and of missing
 * pages, or any numbers. */
static void make_pages(call *to, fdma_cache *cache, int64_t rows) {
    const int64_t page_len =
        seldom(&to->in) ? take_up_to(&to->in, 9) : INT64_C(1) << take_up_to(&to->in, 4);
    const int64_t pages = 1 + take_up_to(&to->in, 15);
    const int64_t pool_shape[] = {pages, page_len, to->kv_heads, to->head_dim};
    const int64_t enough = page_len > 0 ? (rows + page_len - 1) / page_len : 1;
    const int64_t table_shape[] = {cache->sequences, enough + take_up_to(&to->in, 1)};
    cache->k = make(to, true, to->dtype, 4, pool_shape);
    cache->v = make(to, true, to->dtype, 4, pool_shape);
    cache->page_table = make(to, false, FDMA_INT32, 2, table_shape);
    fill_numbers(to, &cache->page_table, -1, pages);
}

static fdma_cache make_cache(call *to) {
    const fdma_dtype dtype = to->dtype;
    fdma_cache cache = {.sequences = 1 + take_up_to(&to->in, 3),
                        .kv_heads = to->kv_heads,
                        .head_dim = to->head_dim,
                        .window = 1 + take_up_to(&to->in, 19),
                        .recent = make_rule(to, 9),
                        .sinks = make_rule(to, 2),
                        .dtype = seldom(&to->in) ? (fdma_dtype)take_up_to(&to->in, 7) : dtype,
                        .device = seldom(&to->in) ? take(&to->in) : 0};
    const int64_t rows = (int64_t)((uint64_t)cache.window + (uint64_t)cache.recent);
    const int64_t row_shape[] = {cache.sequences, rows, to->kv_heads, to->head_dim};
    const int64_t shape[] = {cache.sequences, to->kv_heads, rows};
    if (take_up_to(&to->in, 3) == 3 && rows > 0 && rows < 1000) {
        make_pages(to, &cache, rows);
    } else {
        cache.k = make(to, true, dtype, 4, row_shape);
        cache.v = make(to, true, dtype, 4, row_shape);
    }
    cache.bias = make(to, true, FDMA_FLOAT32, 3, shape);
    cache.table.score = make(to, true, FDMA_FLOAT32, 3, shape);
    cache.table.position = make(to, true, FDMA_INT32, 3, shape);
    cache.table.seen = make(to, true, FDMA_INT32, 1, shape);
    fill_numbers(to, &cache.table.seen, 0, 200);
    return cache;
}

static void make_decode(call *to) {
    const int64_t proj_shape[] = {to->kv_heads, wrap(to->kv_heads, to->head_dim)};
    fdma_decode_args *const args = &to->args.decode;
    *args = (fdma_decode_args){.size = sizeof *args, .exec = make_exec(&to->in)};
    args->scale = make_number(&to->in);
    args->softcap = make_number(&to->in);
    args->bias_form = (fdma_bias_form)take_up_to(&to->in, seldom(&to->in) ? 3 : 2);
    args->batch_invariant = make_reserved(&to->in);
    args->cache = make_cache(to);
    args->index = maybe_numbers(to, -1, args->cache.sequences - 1);
    args->q = make_queries(to, false);
    args->k = make_keys(to);
    args->v = make_keys(to);
    args->score = maybe_per_key(to, false);
    if (args->score.rank == 0) {
        args->dt_proj = make(to, false, to->dtype, 2, proj_shape);
        args->a = make(to, false, to->dtype, 1, proj_shape);
        args->dt_bias = maybe_dt_bias(to);
    }
    args->n_tokens = maybe_numbers(to, 0, to->kv_len);
    args->commit = maybe_numbers(to, 0, to->kv_len / 2);
    args->out = make_queries(to, true);
    args->lse = maybe_lse(to);
    to->work = elements(&args->q) * (60 + (double)args->k.shape[1]) + elements(&args->cache.k);
}

/* A list in memory of its own, as the call takes it without a tensor. */
static int32_t *make_host_list(call *to, int64_t count) {
    block *const mine = &to->blocks[to->count++];
    *mine = (block){.bytes = calloc((size_t)count, sizeof(int32_t)),
                    .size = (size_t)count * sizeof(int32_t)};
    MUST(mine->bytes != NULL);
    return (int32_t *)(void *)mine->bytes;
}

/* Lists of some requests, which mostly have consecutive tokens and sequences. */
static void make_requests(call *to, fdma_prefill_args *args) {
    const int64_t requests = take_up_to(&to->in, 5), sequences = args->cache.sequences;
    int32_t *const starts = make_host_list(to, requests + 1);
    int32_t *const index = take_up_to(&to->in, 1) ? make_host_list(to, requests + 1) : NULL;
    const bool is_usual = to->kv_len > 0 && to->kv_len < 200;
    const int64_t most = is_usual ? 2 * to->kv_len / (requests + 1) : 0;
    for (int64_t n = 0; n < requests; n++) {
        starts[n + 1] = starts[n] + (most > 0 ? (int32_t)take_up_to(&to->in, most) : 0);
        if (index != NULL)
            index[n] =
                (int32_t)(seldom(&to->in) ? take(&to->in) - 128 : (n + requests) % sequences);
    }
    if (seldom(&to->in))
        starts[take_up_to(&to->in, requests)] = (int32_t)strange_number(&to->in);
    args->requests = seldom(&to->in) ? -1 : requests;
    args->starts = seldom(&to->in) ? NULL : starts;
    args->index = index;
}

static void make_prefill(call *to) {
    const int64_t proj_shape[] = {to->kv_heads, wrap(to->kv_heads, to->head_dim)};
    const int64_t q_shape[] = {to->kv_len, to->q_heads, to->head_dim};
    const int64_t k_shape[] = {to->kv_len, to->kv_heads, to->head_dim};
    const int64_t score_shape[] = {to->kv_heads, to->kv_len};
    const int64_t lse_shape[] = {to->q_heads, to->kv_len};
    fdma_prefill_args *const args = &to->args.prefill;
    *args = (fdma_prefill_args){.size = sizeof *args, .exec = make_exec(&to->in)};
    args->scale = make_number(&to->in);
    args->softcap = make_number(&to->in);
    args->bias_form = (fdma_bias_form)take_up_to(&to->in, seldom(&to->in) ? 3 : 2);
    args->reserved = make_reserved(&to->in);
    args->cache = make_cache(to);
    args->q = make(to, false, to->dtype, 3, q_shape);
    args->k = make(to, false, to->dtype, 3, k_shape);
    args->v = make(to, false, to->dtype, 3, k_shape);
    args->score = make_optional(to, false, FDMA_FLOAT32, 2, score_shape);
    if (args->score.rank == 0) {
        args->dt_proj = make(to, false, to->dtype, 2, proj_shape);
        args->a = make(to, false, to->dtype, 1, proj_shape);
        args->dt_bias = maybe_dt_bias(to);
    }
    args->out = make(to, true, to->dtype, 3, q_shape);
    args->lse = make_optional(to, true, FDMA_FLOAT32, 2, lse_shape);
    make_requests(to, args);
    to->packed = true; // the call may need less workspace than the worst lists
    to->work = elements(&args->q) * (60 + (double)args->k.shape[0]) + elements(&args->cache.k);
}

/* Indices of sequences, mostly consecutive from a random one. */
static void fill_in_order(call *to, const fdma_tensor *tensor, int64_t sequences) {
    uint8_t *at = tensor->data;
    if (at == NULL || to->shared)
        return;
    const block *const mine = &to->blocks[to->count - 1];
    int32_t number = (int32_t)take_up_to(&to->in, sequences - 1);
    while (at + sizeof number <= mine->bytes + mine->size && !seldom(&to->in)) {
        memcpy(at, &number, sizeof number);
        at += sizeof number;
        number = (int32_t)((number + 1) % sequences);
    }
}

/* The selection holds any numbers. Mostly it declares the rules of the cache. */
static void make_cache_store(call *to) {
    fdma_cache_store_args *const args = &to->args.cache_store;
    *args = (fdma_cache_store_args){.size = sizeof *args, .exec = make_exec(&to->in)};
    args->bias_form = (fdma_bias_form)take_up_to(&to->in, seldom(&to->in) ? 3 : 2);
    args->reserved = make_reserved(&to->in);
    args->cache = make_cache(to);
    args->starts = maybe_starts(to);
    args->index = maybe_numbers(to, -1, args->cache.sequences - 1);
    args->k = make_keys(to);
    args->v = make_keys(to);
    args->score = make_per_key(to, false, FDMA_FLOAT32);
    to->rows = take_up_to(&to->in, 1) && !to->packed ? args->cache.bias.shape[2] : 0;
    make_selection(to, false, args->cache.window,
                   seldom(&to->in) ? FDMA_SCOPE_GLOBAL : FDMA_SCOPE_CAUSAL);
    if (to->selection.slot.rank == 0 && !seldom(&to->in))
        to->selection.slot = make_per_key(to, false, FDMA_INT32);
    if (!seldom(&to->in)) {
        to->selection.recent = args->cache.recent;
        to->selection.sinks = args->cache.sinks;
    }
    if (!seldom(&to->in))
        args->selection = &to->selection;
    to->work = elements(&args->cache.k) + elements(&args->k) * (double)to->rows;
}

static void make_cache_copy(call *to) {
    fdma_cache_copy_args *const args = &to->args.cache_copy;
    *args = (fdma_cache_copy_args){.size = sizeof *args, .exec = make_exec(&to->in)};
    args->reserved = make_reserved(&to->in);
    args->cache = make_cache(to);
    const int64_t sequences = args->cache.sequences, count = take_up_to(&to->in, sequences);
    args->from = make(to, false, FDMA_INT32, 1, &count);
    fill_numbers(to, &args->from, -1, sequences - 1);
    args->to = make(to, false, FDMA_INT32, 1, &count);
    fill_in_order(to, &args->to, sequences);
    to->work = elements(&args->cache.k);
}
