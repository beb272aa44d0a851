/* whole_stream.h - one call on all tokens of some streams, which gives the expected results of
 * calls on pieces of them; and the indices of keys in its tensors. */
#pragma once

#include "backend.h"
#include "gradient.h"

enum { streams = 3, kv_heads = 2, q_heads = 6 };

typedef struct stream_case {
    int64_t window, recent, sinks, head_dim;
    int64_t len; /* of the longest stream */
    fdma_bias_form bias_form;
    double softcap;
    int levels; /* number of distinct scores; 0: computed from v */
} stream_case;

/* The streams as sequences of a batch, padded to the longest length, and one call on them. */
typedef struct whole_call {
    const stream_case *test;
    fdma_dtype dtype;
    fdma_tensor q, k, v, dt_proj, a, dt_bias, score, bias, out, lse;
    fdma_tensor key_valid, dout; /* absent unless a test sets them */
    fdma_selection selection;
} whole_call;

static inline whole_call new_whole(const stream_case *test, fdma_dtype dtype) {
    const int64_t len = test->len, dim = test->head_dim;
    uint64_t state = (uint64_t)len;
    whole_call x = {.test = test, .dtype = dtype};
    x.q = new_tensor(dtype, streams, len, q_heads, dim);
    x.k = new_tensor(dtype, streams, len, kv_heads, dim);
    x.v = new_tensor(dtype, streams, len, kv_heads, dim);
    x.dt_proj = new_tensor(dtype, kv_heads, kv_heads * dim, -1, -1);
    x.a = new_tensor(FDMA_FLOAT32, kv_heads, -1, -1, -1);
    x.dt_bias = new_tensor(dtype, kv_heads, -1, -1, -1);
    fdma_tensor *const random[] = {&x.q, &x.k, &x.v, &x.dt_proj, &x.a, &x.dt_bias};
    for (int n = 0; n < TEST_COUNT(random); n++)
        fill_random(*random[n], &state, 1);
    x.score = new_output(FDMA_FLOAT32, streams, kv_heads, len, -1);
    if (test->bias_form != FDMA_BIAS_NONE)
        x.bias = new_output(FDMA_FLOAT32, streams, kv_heads, len, -1);
    x.out = new_output(dtype, streams, len, q_heads, dim);
    x.lse = new_output(FDMA_FLOAT32, streams, q_heads, len, -1);
    x.selection = new_selection(streams, kv_heads, len);
    return x;
}

/* The index of key j of a head: its row's first element in a tensor shaped as k, its element in a
 * tensor shaped as bias. */
static inline int64_t index_of_key(fdma_tensor tensor, int64_t b, int64_t j, int64_t g) {
    const bool has_rows = tensor.rank == 4;
    return b * tensor.stride[0] + (has_rows ? j : g) * tensor.stride[1] +
           (has_rows ? g : j) * tensor.stride[2];
}

/* Copies a key of a head from one tensor shaped as k or as bias to another of that shape. Tensors
 * may be absent. */
static inline void copy_key(fdma_tensor to, int64_t to_b, int64_t to_j, fdma_tensor from,
                            int64_t from_b, int64_t from_j, int64_t g) {
    const size_t size = dtype_size(to.dtype);
    if (to.rank > 0)
        memcpy((char *)to.data + (size_t)index_of_key(to, to_b, to_j, g) * size,
               (const char *)from.data + (size_t)index_of_key(from, from_b, from_j, g) * size,
               size * (size_t)(to.rank == 4 ? to.shape[3] : 1));
}

static inline int32_t int_at(fdma_tensor tensor, int64_t b, int64_t g, int64_t j) {
    return ((const int32_t *)tensor.data)[index_of_key(tensor, b, j, g)];
}
