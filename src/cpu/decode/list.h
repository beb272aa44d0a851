/* Decode: the keys that a split visits, a list of one head at a time, and the state of a task. */
#pragma once

#include "cpu/common/keys.h"
#include "cpu/common/math.h"

enum {
    shared_rows = 4,  /* rows that share a load of k and v, if a head has more than two */
    decode_keys = 32, /* keys of a list, whose weights are held between the two products */
    decode_heads = 8, /* most heads of a task: neighbours in memory, visited side by side */
    dense_heads = 32, /* the same where all heads keep the same keys */
    decode_sums = vf_width > 8 ? vf_width : 8, /* rows x keys: accumulators of the first product */
    key_vectors = decode_keys / vf_width,
    strip_vectors = 4, /* of channels: accumulators of the second product of one row */
    usual_split = 512, /* keys; more if max_splits would be exceeded */
    max_splits = 32,   /* splits of a sequence */
    page_bytes = 4096,
    line_size = 64, /* bytes of a cache line */
    near_keys = 24, /* from a multiplied row to the one that comes into the L1 cache */
    scan_keys = 16, /* keys that are listed together if all are kept */
    bytes_per_microsecond = 10000, /* read by one thread, roughly */
};

_Static_assert(decode_keys % decode_sums == 0, "whole products fill a list");
_Static_assert(decode_keys % scan_keys == 0, "whole scans fill a list");

static const float zero_row[256]; /* the most channels of a row, in any dtype */

typedef struct decode_context {
    const fdma_problem *problem;
    int64_t rows;      /* rows of a head */
    int64_t padded;    /* rows; if more than two, rounded up to a multiple of shared_rows */
    int64_t width;     /* head_dim, rounded up to whole vectors */
    int64_t heads;     /* heads of a task */
    int64_t head_sets; /* tasks that the heads of one sequence are divided among */
    int64_t split;     /* keys of a split */
    float scale, cap;  /* of logits; cap is 0 without a softcap */
    int64_t splits;
    bool dense; /* tasks use the products in the order of memory */
    int32_t threads;
    float *partial; /* [batch * kv_heads][splits][padded][partial_length] */
    float *scratch; /* thread 0's; the other threads' follow at multiples of scratch_size */
    int64_t scratch_size;
} decode_context;

/* The partial result of a row over one split: out, not yet divided by the sum of the weights; that
 * sum, spread over the lanes of a vector; and the maximum, repeated in all lanes. */
typedef struct decode_partial {
    float *out, *sum, *max;
} decode_partial;

/* The keys of a head that were not visited yet. */
typedef struct decode_cursor {
    int64_t next, end;
    int32_t first_position, last_position;
    const int32_t *expiry; /* NULL: dense */
    const uint8_t *valid;  /* or NULL */
} decode_cursor;

/* Keys of one head. Behind the last of its `count` keys, k repeats this key up to decode_keys and v
 * is a row of zeros, because the last word of weights may have a second term that has no key.
 * Then come the rows of the next list, to prefetch them. */
typedef struct decode_list {
    int32_t count;
    bool masked;           /* some row may not keep some key */
    int64_t head;          /* within the task */
    const int32_t *expiry; /* NULL: dense */
    int32_t key[decode_keys];
    const void *k[2 * decode_keys], *v[2 * decode_keys];
    float bias[decode_keys];
} decode_list;

/* One split of some heads. Lists alternate between the heads, so that memory is read in order. */
typedef struct decode_task {
    const decode_context *decode;
    int64_t b, first_head, heads, split;
    int64_t next_head; /* whose list comes next */
    decode_cursor cursor[dense_heads];
    float *q;       /* [heads][padded][width] */
    float *weights; /* [padded][decode_keys]; without a selection: dense_arrays */
} decode_task;

static int64_t head_of(const decode_task *task, int64_t head) {
    return task->b * task->decode->problem->kv_heads + task->first_head + head;
}

static int64_t partial_length(const decode_context *decode) { return decode->width + 2 * vf_width; }

static decode_partial partial_at(const decode_context *decode, float *out) {
    return (decode_partial){out, out + decode->width, out + decode->width + vf_width};
}

static decode_partial partial_of(const decode_context *decode, int64_t head, int64_t split,
                                 int64_t row) {
    const int64_t index = (head * decode->splits + split) * decode->padded + row;
    return partial_at(decode, decode->partial + index * partial_length(decode));
}

static decode_cursor start_split(const decode_task *task, int64_t head) {
    const fdma_problem *const problem = task->decode->problem;
    const int32_t last = row_position(problem, task->decode->rows - 1);
    return (decode_cursor){
        .next = task->split * task->decode->split,
        .end = min((task->split + 1) * task->decode->split, last + 1),
        .first_position = row_position(problem, 0),
        .last_position = last,
        .expiry = expiry_of_head(problem, task->b, task->first_head + head),
        .valid = valid_keys(problem, task->b),
    };
}

/* Number of the next scan_keys keys that are kept at the first position: in a cache nearly always
 * all, in a long sequence mostly none. */
INLINE int32_t count_kept(const decode_cursor *cursor) {
    int32_t count = 0;
    if (cursor->expiry == NULL)
        return scan_keys;
    for (int n = 0; n < scan_keys; n++)
        count += cursor->expiry[cursor->next + n] > cursor->first_position;
    return count;
}

/* True if the next `count` keys are kept at the first position, as nearly always in a cache. */
INLINE bool are_kept(const decode_cursor *cursor, int32_t count) {
    const int32_t position = cursor->first_position;
    bool kept = true;
    if (cursor->valid != NULL || cursor->next + count > min(cursor->end, (int64_t)position + 1))
        return false;
    for (int32_t n = 0; cursor->expiry != NULL && n < count; n++)
        kept &= cursor->expiry[cursor->next + n] > position;
    return kept;
}

/* Writes the next keys, up to decode_keys, and returns their number; 0 at the end. */
static int32_t next_decode_keys(decode_cursor *cursor, int32_t *keys) {
    decode_cursor here = *cursor; // a local copy stays in registers
    int32_t count = 0;
    if (are_kept(cursor, decode_keys)) {
        for (; count < decode_keys; count++)
            keys[count] = (int32_t)here.next + count;
        cursor->next += count;
        return count;
    }
    while (here.next < here.end && count < decode_keys) {
        const int64_t end = min(here.next + scan_keys, here.end);
        const int32_t kept = end - here.next == scan_keys ? count_kept(&here) : 1;
        if (kept == 0) {
            here.next = end;
            continue;
        }
        if (kept == scan_keys && here.valid == NULL && end - 1 <= here.first_position &&
            count + scan_keys <= decode_keys) {
            for (int n = 0; n < scan_keys; n++)
                keys[count + n] = (int32_t)here.next + n;
            count += scan_keys;
            here.next = end;
            continue;
        }
        for (; here.next < end && count < decode_keys; here.next++) {
            const int32_t j = (int32_t)here.next;
            keys[count] = j;
            count += outlives(here.expiry, here.valid, here.first_position, j);
        }
    }
    cursor->next = here.next;
    return count;
}

/* False if every row keeps all keys of a list. */
static bool is_masked(const decode_cursor *cursor, const decode_list *keys) {
    bool masked = false;
    if (cursor->first_position == cursor->last_position)
        return false;
    for (int32_t n = 0; n < keys->count; n++) {
        const int32_t j = keys->key[n];
        masked |= j > cursor->first_position ||
                  (cursor->expiry != NULL && cursor->expiry[j] <= cursor->last_position);
    }
    return masked;
}

/* Prefetches one line of each page of a list, so that the processor has the addresses of the pages
 * when their rows are prefetched. */
static void open_pages(const fdma_problem *problem, const decode_list *keys) {
    const fdma_tensor *const rows = problem->carried_len > 0 ? &problem->k_carried : &problem->k;
    const int64_t bytes = rows->stride[1] * (int64_t)fdma_dtype_size(rows->dtype);
    const int32_t step = (int32_t)max(page_bytes / max(bytes, 1), 1);
    for (int32_t n = 0; n < keys->count; n += step) {
        __builtin_prefetch(keys->k[n]);
        __builtin_prefetch(keys->v[n]);
    }
}

/* Lists the next keys of the head whose turn it is; the list is empty at the end. */
static void list_decode_keys(decode_task *task, decode_list *keys) {
    const fdma_problem *const problem = task->decode->problem;
    keys->count = 0;
    for (int64_t tried = 0; tried < task->heads && keys->count == 0; tried++) {
        keys->head = task->next_head;
        keys->count = next_decode_keys(&task->cursor[keys->head], keys->key);
        task->next_head = keys->head + 1 < task->heads ? keys->head + 1 : 0;
    }
    if (keys->count == 0)
        return;
    const int64_t g = task->first_head + keys->head;
    for (int32_t n = keys->count; n < decode_keys; n++) {
        keys->key[n] = keys->key[keys->count - 1];
        keys->bias[n] = 0;
    }
    keys->expiry = task->cursor[keys->head].expiry;
    keys->masked = is_masked(&task->cursor[keys->head], keys);
    find_k(problem, task->b, g, keys->key, decode_keys, keys->k);
    find_v(problem, task->b, g, keys->key, keys->count, keys->v);
    for (int32_t n = keys->count; n < decode_keys; n++)
        keys->v[n] = zero_row;
    find_bias(problem, task->b, g, keys->key, keys->count, keys->bias);
    open_pages(problem, keys);
}

/* Puts the rows of a list behind the rows of another. */
static void add_rows_ahead(decode_list *keys, const decode_list *next) {
    memcpy(keys->k + decode_keys, next->k, sizeof *keys->k * decode_keys);
    memcpy(keys->v + decode_keys, next->v, sizeof *keys->v * decode_keys);
}
