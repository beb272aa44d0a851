/* Which keys a chunk of a few rows visits, a block of one head at a time; and what is kept while it
 * does. See row.h. */
#ifndef FDMA_CPU_DECODE_DECODE_KEYS_H
#define FDMA_CPU_DECODE_DECODE_KEYS_H

#include "cpu/common/keys.h"

enum {
    most_rows = 16,  /* of a head; beyond that a tile of lanes is faster */
    shared_rows = 4, /* rows that share what is loaded, where there are more than one */
    row_keys = 32,   /* keys whose weights are held between the two products */
    row_heads = 8,   /* heads that are walked side by side: neighbours in memory */
    row_sums = vf_width > 8 ? vf_width : 8, /* rows x keys accumulators of the first product */
    strip_vectors = 4,         /* of channels: accumulators of the second product of one row */
    least_chunk = 512,         /* keys */
    most_chunks = 32,          /* of a sequence */
    scan_keys = 16,            /* keys that are skipped together */
    microsecond_bytes = 10000, /* that a thread reads in that time, about */
};

_Static_assert(row_keys % row_sums == 0 && row_keys % scan_keys == 0, "whole steps fill a block");

typedef struct row_context {
    const fdma_problem *problem;
    int64_t rows;   /* of a head */
    int64_t padded; /* the same, up to whole shared_rows */
    int64_t width;  /* head_dim, up to whole vectors */
    int64_t heads;  /* of a task */
    int64_t sets;   /* of heads */
    int64_t chunk;  /* keys */
    int64_t chunks;
    float *partial; /* [batch * kv_heads][chunks][padded][partial_length] */
    float *scratch; /* of thread 0; the others' follow at scratch_size */
    int64_t scratch_size;
} row_context;

/* What is known of a row after some keys: out, not yet divided, then the lanes of its sum, and its
 * maximum in all lanes. */
typedef struct row_partial {
    float *out, *sum, *max;
} row_partial;

/* A head's keys that are still to be visited. */
typedef struct row_walk {
    int64_t next, end;
    int32_t first_position, last_position;
    const int32_t *expiry; /* NULL: dense */
    const uint8_t *valid;  /* or NULL */
} row_walk;

/* A block of keys of one head. Past `count` the last one is repeated. */
typedef struct row_list {
    int32_t count;
    bool cut;              /* some row may not keep some key */
    int64_t head;          /* in the task */
    const int32_t *expiry; /* NULL: dense */
    int32_t key[row_keys];
    const void *k[row_keys], *v[row_keys];
    float bias[row_keys];
} row_list;

/* A task's keys: heads take turns, so that memory is walked in its order. */
typedef struct row_task {
    const row_context *rows;
    int64_t b, first_head, heads, chunk;
    int64_t turn; /* the head whose block is next */
    row_walk walk[row_heads];
    float *q;       /* [heads][padded][width] */
    float *weights; /* [padded][row_keys] */
} row_task;

/* A head of the task among those of all sequences. */
static int64_t head_of(const row_task *task, int64_t head) {
    return task->b * task->rows->problem->kv_heads + task->first_head + head;
}

/* Whether a problem is one for this kernel. */
static bool is_few_rows(const fdma_problem *problem) {
    return problem->q_len * problem->group <= most_rows;
}

static int64_t partial_length(const row_context *rows) { return rows->width + 2 * vf_width; }

static row_partial partial_of(const row_context *rows, int64_t head, int64_t chunk, int64_t row) {
    const int64_t index = (head * rows->chunks + chunk) * rows->padded + row;
    float *const out = rows->partial + index * partial_length(rows);
    return (row_partial){out, out + rows->width, out + rows->width + vf_width};
}

static row_walk start_row_walk(const row_task *task, int64_t head) {
    const fdma_problem *const problem = task->rows->problem;
    const fdma_tensor *const valid = &problem->key_valid;
    const int32_t last = row_position(problem, task->rows->rows - 1);
    const int64_t end = (task->chunk + 1) * task->rows->chunk;
    row_walk walk = {
        .next = task->chunk * task->rows->chunk,
        .end = end <= last ? end : last + 1,
        .first_position = row_position(problem, 0),
        .last_position = last,
        .expiry = expiry_row(problem, task->b, task->first_head + head),
    };
    if (is_present(valid))
        walk.valid = (const uint8_t *)valid->data + task->b * valid->stride[0];
    return walk;
}

/* Whether any of scan_keys keys outlives `position`. */
static bool any_outlives(const int32_t *expiry, int32_t position) {
    int32_t any = 0;
    for (int n = 0; n < scan_keys; n++)
        any |= expiry[n] > position;
    return any != 0;
}

/* Writes up to row_keys keys; 0 at the end. */
static int32_t next_row_keys(row_walk *walk, int32_t *keys) {
    row_walk here = *walk; // a copy of its own can live in registers
    int32_t count = 0;
    while (here.next < here.end && count < row_keys) {
        const int64_t end = here.next + scan_keys < here.end ? here.next + scan_keys : here.end;
        if (here.expiry && end - here.next == scan_keys &&
            !any_outlives(here.expiry + here.next, here.first_position)) {
            here.next = end;
            continue;
        }
        for (; here.next < end && count < row_keys; here.next++) {
            const int32_t j = (int32_t)here.next;
            keys[count] = j;
            count += outlives(here.expiry, here.valid, here.first_position, j);
        }
    }
    walk->next = here.next;
    return count;
}

static bool is_cut(const row_walk *walk, const row_list *list) {
    bool cut = false;
    if (walk->first_position == walk->last_position)
        return false;
    for (int32_t n = 0; n < list->count; n++) {
        const int32_t j = list->key[n];
        cut |= j > walk->first_position || (walk->expiry && walk->expiry[j] <= walk->last_position);
    }
    return cut;
}

/* The next block of the task, of no keys at the end. */
static void list_row_keys(row_task *task, row_list *list) {
    const fdma_problem *const problem = task->rows->problem;
    list->count = 0;
    for (int64_t tried = 0; tried < task->heads && list->count == 0; tried++) {
        list->head = task->turn;
        list->count = next_row_keys(&task->walk[list->head], list->key);
        task->turn = list->head + 1 < task->heads ? list->head + 1 : 0;
    }
    if (list->count == 0)
        return;
    const int64_t g = task->first_head + list->head;
    for (int32_t n = list->count; n < row_keys; n++)
        list->key[n] = list->key[list->count - 1];
    list->expiry = task->walk[list->head].expiry;
    list->cut = is_cut(&task->walk[list->head], list);
    find_rows(&problem->k, task->b, g, list->key, row_keys, list->k);
    find_rows(&problem->v, task->b, g, list->key, row_keys, list->v);
    find_bias(&problem->bias, task->b, g, list->key, row_keys, list->bias);
}

#endif
