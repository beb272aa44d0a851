/* Random tensors and other parts of argument structs. Most are nearly right. Every tensor is a heap
 * block of exactly the bytes that it describes, so that AddressSanitizer sees any access
 * outside. */
#pragma once

#include "fdma.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    max_blocks = 40,
    max_elements = 1 << 14, /* of a tensor that gets memory */
    max_struct = 8200,      /* bytes: more than the largest size that a struct may state */
};

/* The input, read from its front. After its end zeros follow, which mean the plain choice
 * everywhere. */
typedef struct source {
    const uint8_t *bytes;
    size_t left;
} source;

typedef struct block {
    uint8_t *bytes;
    uint8_t *before; /* its contents before the call */
    size_t size;
    bool output;
} block;

typedef struct call {
    source in;
    block blocks[max_blocks];
    size_t count;
    bool shared;   /* two tensors share a block */
    bool unbacked; /* a tensor with elements has no data */
    bool packed;   /* the call has starts */
    bool cut;      /* the call has kv_used */
    int64_t rows;  /* number of carried keys; 0: there are none */
    int64_t batch, q_len, kv_len, q_heads, kv_heads, head_dim;
    fdma_dtype dtype;
    double work; /* multiply-adds, approximately */
    fdma_selection selection;
    union {
        size_t size;
        fdma_score_args score;
        fdma_rotary_table_args rotary_table;
        fdma_rotate_args rotate;
        fdma_rotate_backward_args rotate_backward;
        fdma_select_args select;
        fdma_forward_args forward;
        fdma_attention_args attention;
        fdma_decode_args decode;
        fdma_prefill_args prefill;
        fdma_cache_store_args cache_store;
        fdma_cache_copy_args cache_copy;
        fdma_probabilities_args probabilities;
        fdma_backward_args backward;
        fdma_score_backward_args score_backward;
        fdma_attention_backward_args attention_backward;
        fdma_merge_args merge;
        fdma_merge_backward_args merge_backward;
    } args;
} call;

#define MUST(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s; last error: %s\n", __FILE__, __LINE__, #condition,         \
                    fdma_last_error());                                                            \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static uint8_t take(source *in) {
    if (in->left == 0)
        return 0;
    in->left--;
    return *in->bytes++;
}

static int64_t take_up_to(source *in, int64_t largest) { return take(in) % (largest + 1); }

/* True for about one input in 16. */
static bool seldom(source *in) { return take(in) >= 240; }

static int64_t strange_number(source *in) {
    static const int64_t strange[] = {
        -1,
        0,
        1,
        2,
        INT32_MAX,
        (int64_t)INT32_MAX + 1,
        INT64_MAX,
        INT64_MIN,
        INT64_C(1) << 62,
        INT64_C(1) << 61,
        INT64_C(1) << 40,
        UINT32_MAX,
        257,
        7,
    };
    const uint8_t index = take(in);
    if (index < sizeof strange / sizeof *strange)
        return strange[index];
    return (int64_t)((uint64_t)index << (take(in) % 64));
}

static const char *make_kernel(source *in) {
    static const char *const names[] = {NULL,        NULL,        "cpu", "cpu/scalar", "cpu/avx2",
                                        "reference", "cpu/avx51", "",    "cpu/"};
    return names[take(in) % (sizeof names / sizeof *names)];
}

/* Tasks on the calling thread: all, or every second one. */
static void run_some(void *context, int64_t count, fdma_task task, void *task_context) {
    for (int64_t index = 0; index < count; index += context != NULL ? 2 : 1)
        task(task_context, index);
}

static const fdma_parallel *make_parallel(source *in) {
    static int some;
    static const fdma_parallel made[] = {{sizeof *made, run_some, NULL},
                                         {sizeof *made, run_some, &some},
                                         {sizeof *made, NULL, NULL},
                                         {sizeof *made - 1, run_some, NULL}};
    return &made[take(in) % (sizeof made / sizeof *made)];
}

static fdma_exec make_exec(source *in) {
    fdma_exec exec = {.kernel = make_kernel(in), .threads = (int32_t)take_up_to(in, 3)};
    if (seldom(in))
        exec.threads = (int32_t)strange_number(in);
    if (seldom(in))
        exec.device = (int32_t)strange_number(in);
    if (seldom(in))
        exec.reserved = take(in);
    if (seldom(in))
        exec.parallel = make_parallel(in);
    if (seldom(in))
        exec.stream = &exec;
    return exec;
}

static double make_number(source *in) {
    static const double numbers[] = {
        0, 0, 1, 0.125, 30, -1, 1e-300, 1e300, (double)INFINITY, (double)NAN};
    return numbers[take(in) % (sizeof numbers / sizeof *numbers)];
}

/* a * b modulo 2^64. */
static int64_t wrap(int64_t a, int64_t b) { return (int64_t)((uint64_t)a * (uint64_t)b); }

static size_t element_size(fdma_dtype dtype) {
    switch (dtype) {
    case FDMA_FLOAT64:
    case FDMA_INT64:
        return 8;
    case FDMA_FLOAT16:
    case FDMA_BFLOAT16:
        return 2;
    case FDMA_UINT8:
        return 1;
    default:
        return 4;
    }
}

/* Elements from the first to the last, inclusive; -1: too many to be given memory. */
static int64_t extent(const fdma_tensor *tensor) {
    __int128 last = 0;
    if (tensor->rank < 1 || tensor->rank > 4)
        return 0;
    for (int axis = 0; axis < tensor->rank; axis++)
        if (tensor->shape[axis] <= 0)
            return 0;
    for (int axis = 0; axis < tensor->rank; axis++) {
        if (tensor->shape[axis] == 1)
            continue;
        if (tensor->stride[axis] < 0)
            return -1;
        last += (__int128)(tensor->shape[axis] - 1) * tensor->stride[axis];
        if (last >= max_elements)
            return -1;
    }
    return (int64_t)last + 1;
}

/* Random bits; small integers (as int32: good expiries); or halves, which the float dtypes turn
 * into numbers near 1. */
static void fill(source *in, block *to) {
    const uint8_t how = take(in);
    uint32_t state = take(in) + 1u;
    for (size_t i = 0; i < to->size; i++) {
        state = state * 1664525u + 1013904223u;
        const uint8_t random = (uint8_t)(state >> 24);
        if (how < 96)
            to->bytes[i] = i % 4 == 0 ? random % 16 : 0;
        else if (how < 192)
            to->bytes[i] = i % 2 == 1 ? (uint8_t)(0x3c | (random & 0x83)) : random;
        else
            to->bytes[i] = random;
    }
}

static void give_memory(call *to, fdma_tensor *tensor, bool output) {
    const int64_t elements = extent(tensor);
    if (elements < 0)
        to->unbacked = true;
    if (elements <= 0)
        return;
    const size_t bytes = (size_t)elements * element_size(tensor->dtype);
    if (to->count > 0 && seldom(&to->in)) {
        block *const other = &to->blocks[take(&to->in) % to->count];
        if (other->size >= bytes) {
            to->shared = true;
            tensor->data = other->bytes + (take(&to->in) % 2 ? other->size - bytes : 0);
            return;
        }
    }
    if (seldom(&to->in)) {
        to->unbacked = true;
        return;
    }
    const size_t shift = seldom(&to->in) ? take(&to->in) % 16u : 0;
    block *const mine = &to->blocks[to->count++];
    *mine = (block){.bytes = malloc(shift + bytes), .size = shift + bytes, .output = output};
    MUST(mine->bytes != NULL);
    fill(&to->in, mine);
    tensor->data = mine->bytes + shift;
}

static void bend(source *in, fdma_tensor *tensor) {
    const int axis = take(in) % 4;
    switch (take(in) % 8) {
    case 0:
        tensor->stride[axis] = 0;
        break;
    case 1:
        tensor->shape[axis] = strange_number(in);
        break;
    case 2:
        tensor->stride[axis] = strange_number(in);
        break;
    case 3:
        tensor->rank = (int32_t)strange_number(in);
        break;
    case 4:
        tensor->dtype = (fdma_dtype)take_up_to(in, 7);
        break;
    case 5:
        tensor->shape[axis] ^= take_up_to(in, 3);
        break;
    case 6:
        *tensor = (fdma_tensor){0};
        break;
    default:
        tensor->stride[0] ^= take_up_to(in, 15);
        break;
    }
}

static fdma_tensor make(call *to, bool output, fdma_dtype dtype, int32_t rank,
                        const int64_t *shape) {
    fdma_tensor tensor = fdma_dense_tensor(NULL, dtype, rank, shape);
    if (rank == 4 && take_up_to(&to->in, 3) == 3) { /* the axis of heads before the sequence */
        tensor.stride[1] = shape[3];
        tensor.stride[2] = wrap(shape[3], shape[1]);
    }
    if (seldom(&to->in))
        bend(&to->in, &tensor);
    give_memory(to, &tensor, output);
    return tensor;
}

static fdma_tensor make_optional(call *to, bool output, fdma_dtype dtype, int32_t rank,
                                 const int64_t *shape) {
    return take_up_to(&to->in, 1) ? make(to, output, dtype, rank, shape) : (fdma_tensor){0};
}

/* The tensors of each kind that fdma.h describes. */
static fdma_tensor make_queries(call *to, bool output) {
    const int64_t shape[] = {to->batch, to->q_len, to->q_heads, to->head_dim};
    return make(to, output, to->dtype, 4, shape);
}

/* As many as queries: what a rotation has of k. */
static fdma_tensor make_rotated_keys(call *to, bool output) {
    const int64_t shape[] = {to->batch, to->q_len, to->kv_heads, to->head_dim};
    return make(to, output, to->dtype, 4, shape);
}

static fdma_tensor make_key_rows(call *to, bool output) {
    const int64_t shape[] = {to->batch, to->kv_len, to->kv_heads, to->head_dim};
    return make(to, output, to->dtype, 4, shape);
}

static fdma_tensor make_keys(call *to) { return make_key_rows(to, false); }

static fdma_tensor make_per_key(call *to, bool output, fdma_dtype dtype) {
    const int64_t shape[] = {to->batch, to->kv_heads, to->kv_len};
    return make(to, output, dtype, 3, shape);
}

static fdma_tensor maybe_per_key(call *to, bool output) {
    const int64_t shape[] = {to->batch, to->kv_heads, to->kv_len};
    return make_optional(to, output, FDMA_FLOAT32, 3, shape);
}

static fdma_tensor maybe_valid(call *to) {
    const int64_t shape[] = {to->batch, to->kv_len};
    return make_optional(to, false, FDMA_UINT8, 2, shape);
}

/* With carried keys, which exclude dropout, mostly 0. */
static double make_dropout(call *to) {
    return to->rows == 0 || seldom(&to->in) ? make_number(&to->in) : 0;
}

static fdma_tensor maybe_rng_state(call *to) {
    const int64_t shape[] = {2};
    return make_optional(to, false, FDMA_INT64, 1, shape);
}

/* Without a mask mostly absent. */
static fdma_tensor maybe_mask_lists(call *to, const fdma_tensor *attn_mask) {
    const int64_t shape[] = {take_up_to(&to->in, 9)};
    return attn_mask->rank > 0 || seldom(&to->in) ? make_optional(to, false, FDMA_UINT8, 1, shape)
                                                  : (fdma_tensor){0};
}

/* For forward and backward, which take none with carried keys. */
static fdma_tensor maybe_valid_keys(call *to) {
    return to->rows == 0 || seldom(&to->in) ? maybe_valid(to) : (fdma_tensor){0};
}

static int32_t make_causal(call *to) {
    return to->rows > 0 && !seldom(&to->in) ? 1 : (int32_t)take_up_to(&to->in, 1);
}

/* Mostly in ascending order. */
static fdma_tensor maybe_starts(call *to) {
    const int64_t shape[] = {1 + take_up_to(&to->in, 4)};
    if (!to->packed)
        return (fdma_tensor){0};
    const fdma_tensor starts = make(to, false, FDMA_INT32, 1, shape);
    uint8_t *at = starts.data;
    if (at == NULL || to->shared)
        return starts;
    const block *const mine = &to->blocks[to->count - 1];
    for (int32_t start = 0; at + sizeof start <= mine->bytes + mine->size && !seldom(&to->in);) {
        memcpy(at, &start, sizeof start);
        at += sizeof start;
        start += take(&to->in) % 9;
    }
    return starts;
}

/* Mostly numbers from `least` to `most`. */
static void fill_numbers(call *to, const fdma_tensor *tensor, int32_t least, int64_t most) {
    uint8_t *at = tensor->data;
    if (at == NULL || to->shared || most < least || most > INT32_MAX)
        return;
    const block *const mine = &to->blocks[to->count - 1];
    for (int32_t number; at + sizeof number <= mine->bytes + mine->size && !seldom(&to->in);) {
        number = (int32_t)(least + take(&to->in) % (most - least + 1));
        memcpy(at, &number, sizeof number);
        at += sizeof number;
    }
}

static fdma_tensor maybe_numbers(call *to, int32_t least, int64_t most) {
    const fdma_tensor numbers = make_optional(to, false, FDMA_INT32, 1, &to->batch);
    fill_numbers(to, &numbers, least, most);
    return numbers;
}

/* Packed sequences and streams exclude kv_used. */
static fdma_tensor maybe_used(call *to) {
    const bool alone = !to->packed && to->rows == 0;
    const fdma_tensor used =
        alone || seldom(&to->in) ? maybe_numbers(to, 0, to->kv_len) : (fdma_tensor){0};
    to->cut = used.rank > 0;
    return used;
}

/* A tensor of pairs, broadcast along random axes. */
static fdma_tensor make_pairs(call *to, fdma_dtype dtype) {
    const uint8_t axes = (uint8_t)take(&to->in);
    const int64_t heads[] = {1, to->q_heads, to->kv_heads, to->q_heads};
    const int64_t shape[] = {axes & 1 ? to->batch : 1, heads[axes >> 1 & 3],
                             axes & 8 ? to->q_len : 1, axes & 16 ? to->kv_len : 1};
    return make(to, false, dtype, 4, shape);
}

/* Carried keys exclude tensors of pairs. */
static void give_pairs(call *to, fdma_tensor *mask, fdma_tensor *bias, fdma_tensor *dbias) {
    const bool allowed = to->rows == 0 || seldom(&to->in);
    if (allowed && take_up_to(&to->in, 1))
        *mask = make_pairs(to, FDMA_UINT8);
    if (allowed && take_up_to(&to->in, 1))
        *bias = make_pairs(to, take_up_to(&to->in, 1) ? to->dtype : FDMA_FLOAT32);
    if (dbias != NULL && bias->rank == 4 && take_up_to(&to->in, 1))
        *dbias =
            make(to, true, take_up_to(&to->in, 1) ? bias->dtype : FDMA_FLOAT32, 4, bias->shape);
}

/* ---- streams ---- */

static fdma_tensor make_carried_rows(call *to, bool output) {
    const int64_t shape[] = {to->batch, to->rows, to->kv_heads, to->head_dim};
    return to->rows > 0 ? make(to, output, to->dtype, 4, shape) : (fdma_tensor){0};
}

static fdma_tensor make_carried_numbers(call *to, bool output, fdma_dtype dtype) {
    const int64_t shape[] = {to->batch, to->kv_heads, to->rows};
    return to->rows > 0 ? make(to, output, dtype, 3, shape) : (fdma_tensor){0};
}

static fdma_table make_table(call *to, bool output) {
    fdma_table table = {0};
    if (to->rows == 0)
        return table;
    table.score = make_carried_numbers(to, output, FDMA_FLOAT32);
    table.position = make_carried_numbers(to, output, FDMA_INT32);
    table.seen = make(to, output, FDMA_INT32, 1, &to->batch);
    fill_numbers(to, &table.seen, 0, 200);
    return table;
}

/* A table has as many rows as a query keeps keys. */
static void fit_rows(call *to, int64_t *window, int64_t *recent) {
    if (to->rows == 0 || seldom(&to->in))
        return;
    *recent = take_up_to(&to->in, to->rows - 1);
    *window = to->rows - *recent;
}

static fdma_tensor make_lse(call *to, bool output) {
    const int64_t shape[] = {to->batch, to->q_heads, to->q_len};
    return make(to, output, FDMA_FLOAT32, 3, shape);
}

static fdma_tensor maybe_per_row(call *to, bool output) {
    return take_up_to(&to->in, 1) ? make_lse(to, output) : (fdma_tensor){0};
}

static fdma_tensor maybe_lse(call *to) { return maybe_per_row(to, true); }

/* recent or sinks: mostly 0. */
static int64_t make_rule(call *to, int64_t most) {
    if (seldom(&to->in))
        return strange_number(&to->in);
    return take(&to->in) % 4 == 0 ? take_up_to(&to->in, most) : 0;
}

/* Mostly 0. */
static double make_gap(call *to) { return take(&to->in) % 4 == 0 ? make_number(&to->in) : 0; }

static void make_selection(call *to, bool output, int64_t window, fdma_scope scope) {
    to->selection = (fdma_selection){.size = sizeof to->selection};
    const int64_t new_len = to->kv_len;
    to->kv_len = (int64_t)((uint64_t)new_len + (uint64_t)to->rows); // both count carried keys
    to->selection.expiry = make_per_key(to, output, FDMA_INT32);
    if (to->rows > 0 || take_up_to(&to->in, 1))
        to->selection.slot = make_per_key(to, output, FDMA_INT32);
    to->selection.window = seldom(&to->in) ? strange_number(&to->in) : window;
    to->selection.kv_len = seldom(&to->in) ? strange_number(&to->in) : to->kv_len;
    to->selection.scope = scope;
    if (seldom(&to->in))
        to->selection.size = (size_t)strange_number(&to->in) % max_struct;
    if (seldom(&to->in))
        to->selection.reserved = take(&to->in);
    to->selection.recent = make_rule(to, 9);
    to->kv_len = new_len;
}

static fdma_tensor maybe_dt_bias(call *to) {
    const fdma_dtype dtype = seldom(&to->in) ? FDMA_FLOAT32 : to->dtype;
    return take_up_to(&to->in, 1) ? make(to, false, dtype, 1, &to->kv_heads) : (fdma_tensor){0};
}

/* The gradient of dt_bias; seldom given without dt_bias. */
static fdma_tensor maybe_ddt_bias(call *to, const fdma_tensor *dt_bias) {
    const bool given = dt_bias->rank > 0 || seldom(&to->in);
    return given && take_up_to(&to->in, 1) ? make(to, true, dt_bias->dtype, 1, &to->kv_heads)
                                           : (fdma_tensor){0};
}

/* ---- rotations ---- */

static fdma_tensor make_rotary(call *to, bool output, int64_t rows) {
    const int64_t shape[] = {rows, 2 * (1 + take_up_to(&to->in, 15))};
    return make(to, output, seldom(&to->in) ? to->dtype : FDMA_FLOAT32, 2, shape);
}

/* Mostly positions of the table; packed sequences exclude them. */
static fdma_tensor maybe_positions(call *to, int64_t first, int64_t rows) {
    const int64_t shape[] = {take_up_to(&to->in, 1) ? to->batch : 1, to->q_len};
    const bool allowed = !to->packed || seldom(&to->in);
    if (!allowed || take_up_to(&to->in, 1) == 0)
        return (fdma_tensor){0};
    const fdma_tensor positions = make(to, false, FDMA_INT32, 2, shape);
    if (first >= 0 && first < 1000 && rows > 0 && rows < 1000)
        fill_numbers(to, &positions, (int32_t)first, first + rows - 1);
    return positions;
}

static fdma_tensor maybe_norm_weight(call *to) {
    const fdma_dtype dtype = take_up_to(&to->in, 1) ? FDMA_FLOAT32 : to->dtype;
    return make_optional(to, false, dtype, 1, &to->head_dim);
}

static int32_t make_reserved(source *in) { return seldom(in) ? take(in) : 0; }

static double elements(const fdma_tensor *tensor) {
    double product = 1;
    for (int axis = 0; axis < tensor->rank && axis < 4; axis++)
        product *= (double)tensor->shape[axis];
    return product;
}
