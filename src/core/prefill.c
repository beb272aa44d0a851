/* Cuts fdma_prefill() into parts, and these into steps. Everything that differs among requests is a
 * view: of their tokens, and of the rows of their sequences as carried keys. */
#include "core/prefill.h"

#include "core/cache.h"
#include "core/element.h"
#include "core/error.h"
#include "core/integers.h"

#include <math.h>
#include <string.h>

/* ---- the call ---- */

/* Other operations have an axis of batch entries in front. */
static void add_batch_axis(fdma_tensor *tensor) {
    if (!is_present(tensor))
        return;
    for (int axis = tensor->rank++; axis > 0; axis--) {
        tensor->shape[axis] = tensor->shape[axis - 1];
        tensor->stride[axis] = tensor->stride[axis - 1];
    }
    tensor->shape[0] = 1;
    tensor->stride[0] = 0;
}

void fdma_begin_prefill(call_steps *steps) {
    fdma_problem *const whole = &steps->whole;
    fdma_tensor *const tensors[] = {&whole->q,   &whole->k,     &whole->v,
                                    &whole->out, &whole->score, &whole->lse};
    fdma_arena arena = fdma_arena_of(whole);
    const bool is_exp = whole->bias_form == FDMA_BIAS_EXP, paged = has_pages(&whole->cache);
    prefill_requests *const requests = &whole->prefill;
    requests->is_scored = is_present(&whole->score);
    // outside of decode, kernels of devices do not read rows in pages
    requests->in_pieces = paged && whole->exec.device != FDMA_CPU;
    steps->lent = whole->exec.workspace_size;
    whole->batch = 1;
    for (size_t n = 0; n < sizeof tensors / sizeof tensors[0]; n++)
        add_batch_axis(tensors[n]);
    if (!requests->is_scored)
        whole->score = fdma_take_key_floats(&arena, whole);
    if (!requests->in_pieces) {
        if (is_exp)
            whole->bias = fdma_take_key_floats(&arena, whole);
        whole->expiry = fdma_take_key_ints(&arena, whole);
        whole->slot = fdma_take_key_ints(&arena, whole);
        if (paged)
            requests->kept = fdma_take_key_ints(&arena, whole);
    }
    requests->listed = whole->exec.device == FDMA_CPU
                           ? (int32_t *)(uintptr_t)requests->index
                           : fdma_arena_take(&arena, (size_t)requests->count * sizeof(int32_t));
    fdma_set_aside(&whole->exec, &arena);
    steps->scratch = fdma_arena_size(&arena);
}

fdma_status fdma_split_scores(call_steps *steps) {
    steps->problems = steps->split;
    steps->count = 0;
    return steps->whole.prefill.is_scored ? FDMA_OK
                                          : fdma_add_step(steps, &steps->whole, operation_score);
}

void fdma_fill_prompt_bias(const fdma_problem *whole) {
    const fdma_tensor *const score = &whole->score, *const bias = &whole->bias;
    for (int64_t g = 0; g < whole->kv_heads; g++)
        for (int64_t m = 0; m < whole->new_len; m++)
            fdma_store(bias, offset_of(bias, 0, g, m),
                       exp(fdma_load(score, offset_of(score, 0, g, m))));
}

/* ---- its parts ---- */

/* Decode runs requests of up to so many tokens. On the CPU, from 9 tokens on tiles of queries take
 * less time than decode, in which every query reads all rows. */
static int64_t most_decoded(const fdma_problem *whole) {
    return whole->exec.device == FDMA_CPU ? 8 : most_new_tokens;
}

static int64_t sequence_of(const prefill_requests *requests, int64_t n) {
    return requests->index != NULL ? requests->index[n] : n;
}

/* True if request n is of one batch with the requests of the part before it. */
static bool joins(const prefill_requests *requests, const prefill_part *part, int64_t n) {
    return n < requests->count && requests->starts[n + 1] - requests->starts[n] == part->len &&
           sequence_of(requests, n) >= 0;
}

bool fdma_next_part(const fdma_problem *whole, prefill_part *part) {
    const prefill_requests *const requests = &whole->prefill;
    const int32_t *const starts = requests->starts;
    int64_t n = part->request;
    while (n < requests->count &&
           (max(starts[n], part->end) >= starts[n + 1] || sequence_of(requests, n) < 0))
        n++;
    if (n == requests->count)
        return false;
    const int64_t first = max(starts[n], part->end), left = starts[n + 1] - first;
    const int64_t sequence = sequence_of(requests, n);
    const int64_t most = most_decoded(whole), len = requests->in_pieces ? min(left, most) : left;
    *part = (prefill_part){.request = n, .count = 1, .first = first, .len = len};
    part->sequence = sequence;
    part->is_new = whole->exec.device == FDMA_CPU &&
                   ((const int32_t *)whole->cache.table.seen.data)[sequence] == 0;
    while (len <= most && first + len == starts[n + 1] && joins(requests, part, n + part->count))
        part->count++;
    part->end = first + part->count * len;
    return true;
}

/* First parts of one request, with and without carried keys, whose lengths are halved until decode
 * takes them. Then the largest batch of each length that decode takes, and batches of 1, 2, 4, ...
 * requests, which other kernels may run. */
bool fdma_largest_part(const fdma_problem *whole, int n, prefill_part *part) {
    const prefill_requests *const requests = &whole->prefill;
    const int64_t tokens = whole->new_len;
    const int64_t most = min(min(requests->count, whole->cache.sequences), tokens);
    const int64_t longest = min(most_decoded(whole), tokens);
    *part = (prefill_part){.count = 1};
    if (most == 0)
        return false;
    for (int64_t len = tokens; len > longest && !requests->in_pieces; len /= 2, n -= 2)
        if (n < 2) {
            part->len = part->end = len;
            part->is_new = n == 1 && whole->exec.device == FDMA_CPU;
            return true;
        }
    const bool by_len = n < longest;
    const int64_t count = by_len ? tokens / (n + 1) : INT64_C(1) << (n - longest);
    part->count = min(count, most);
    part->len = by_len ? n + 1 : min(longest, tokens / part->count);
    part->end = part->count * part->len;
    return by_len || count <= most;
}

/* ---- their steps ---- */

/* Makes the requests of a part the entries of a batch. */
static void cut_tokens(const prefill_part *part, int axis, fdma_tensor *tensor) {
    if (!is_present(tensor))
        return;
    cut_axis(tensor, axis, part->first, part->len);
    tensor->shape[0] = part->count;
    tensor->stride[0] = part->len * tensor->stride[axis];
}

static void cut_cache(fdma_cache *cache, int64_t sequence, int64_t count) {
    fdma_tensor *const tensors[] = {&cache->bias, &cache->table.score, &cache->table.position,
                                    &cache->table.seen};
    for (size_t n = 0; n < sizeof tensors / sizeof tensors[0]; n++)
        cut_axis(tensors[n], 0, sequence, count);
    cut_axis(has_pages(cache) ? &cache->page_table : &cache->k, 0, sequence, count);
    if (!has_pages(cache))
        cut_axis(&cache->v, 0, sequence, count);
    cache->sequences = count;
}

static fdma_problem cut_part(const fdma_problem *whole, const prefill_part *part) {
    fdma_problem cut = *whole;
    fdma_tensor *const rows[] = {&cut.q, &cut.k, &cut.v, &cut.out};
    fdma_tensor *const numbers[] = {&cut.score, &cut.bias, &cut.lse};
    for (size_t n = 0; n < sizeof rows / sizeof rows[0]; n++)
        cut_tokens(part, 1, rows[n]);
    for (size_t n = 0; n < sizeof numbers / sizeof numbers[0]; n++)
        cut_tokens(part, 2, numbers[n]);
    cut.dt_proj = cut.a = cut.dt_bias = (fdma_tensor){0}; // already in the score
    return cut;
}

/* A tensor of the keys of one request in memory for all tokens. */
static fdma_tensor take_keys(const fdma_problem *cut, const fdma_tensor *all, int64_t kv_len) {
    return fdma_tensor_3d(all->data, all->dtype, 1, cut->kv_heads, kv_len);
}

/* k or v of a sequence as carried keys. Of pools only the shape is right: see split_long(). */
static fdma_tensor carried_of(const fdma_problem *cut, const fdma_tensor *rows) {
    fdma_tensor carried = *rows;
    carried.shape[0] = 1;
    carried.shape[1] = rows_of_cache(&cut->cache);
    return carried;
}

static fdma_status split_short(const prefill_part *part, fdma_problem *cut, call_steps *steps) {
    const prefill_requests *const requests = &cut->prefill;
    if (requests->index == NULL || part->count == 1)
        cut_cache(&cut->cache, part->sequence, part->count);
    else
        cut->index = fdma_tensor_1d(requests->listed + part->request, FDMA_INT32, part->count);
    return fdma_add_step(steps, cut, operation_decode);
}

static fdma_status split_long(const prefill_part *part, fdma_problem *cut, call_steps *steps) {
    fdma_cache *const cache = &cut->cache;
    const int64_t kv_len = part->len + (part->is_new ? 0 : rows_of_cache(cache));
    cut_cache(cache, part->sequence, 1);
    cut->expiry = take_keys(cut, &cut->expiry, kv_len);
    cut->slot = take_keys(cut, &cut->slot, kv_len);
    if (cut->bias_form == FDMA_BIAS_LINEAR)
        cut->bias = cut->score;
    if (!part->is_new) {
        cut->table_in = cache->table;
        cut->k_carried = carried_of(cut, &cache->k);
        cut->v_carried = carried_of(cut, &cache->v);
        if (cut->bias_form != FDMA_BIAS_NONE)
            cut->bias_carried = cache->bias;
    }
    FDMA_TRY(fdma_add_step(steps, cut, operation_select));
    FDMA_TRY(fdma_add_step(steps, cut, operation_forward));
    if (has_pages(cache) && !part->is_new) {
        fdma_problem *const forward = &steps->split[1];
        forward->k_carried = cache->k;
        forward->v_carried = cache->v;
        forward->carried_pages = fdma_pages_of_sequence(cache, 0);
        forward->expiry = take_keys(cut, &cut->prefill.kept, kv_len);
    }
    return fdma_add_step(steps, cut, operation_cache_store);
}

fdma_status fdma_split_part(const prefill_part *part, call_steps *steps) {
    fdma_problem cut = cut_part(&steps->whole, part);
    steps->problems = steps->split;
    steps->count = 0;
    return part->len <= most_decoded(&cut) ? split_short(part, &cut, steps)
                                           : split_long(part, &cut, steps);
}

void fdma_hide_missing_pages(const call_steps *steps) {
    const fdma_problem *const select = &steps->problems[0], *const forward = &steps->problems[1];
    const fdma_cache *const cache = &select->cache;
    if (forward->carried_pages.page == NULL)
        return;
    for (int64_t g = 0; g < select->kv_heads; g++) {
        int32_t *const expiry = int_at(&forward->expiry, 0, g, 0);
        memcpy(expiry, int_at(&select->expiry, 0, g, 0), (size_t)select->kv_len * sizeof *expiry);
        for (int64_t row = 0; row < select->carried_len; row++)
            if (indices_of_row(cache, 0, row).first < 0)
                expiry[row] = (int32_t)row;
    }
}
