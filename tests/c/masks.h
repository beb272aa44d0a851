/* masks.h - attn_mask and attn_bias for the C tests, and calls with them. */
#pragma once

#include "backend.h"
#include "gradient.h"

static const problem mask_sizes[] = {
    SIZES(2, 70, 70, 4, 2, 64, 20, 1),    SIZES(1, 131, 170, 6, 2, 40, 30, 0),
    SIZES(1, 300, 300, 3, 3, 128, 9, 1),  SIZES(2, 1, 300, 8, 2, 128, 50, 1),
    SIZES(1, 30, 20, 2, 2, 24, 12, 0),    SIZES(1, 400, 413, 5, 1, 32, 64, 1),
    SIZES(1, 60, 1163, 2, 2, 16, 300, 1), // more keys than are scanned at a time
};

typedef struct pairs {
    fdma_tensor mask, bias;
} pairs;

/* Axes along which a tensor is not broadcast: bits b, h, i and j. per_kv_head: the axis of heads
 * has kv_heads entries. */
enum { axis_b = 1, axis_h = 2, axis_i = 4, axis_j = 8, all_axes = 15, per_kv_head = 16 };

static inline fdma_tensor new_pairs(const problem *x, fdma_dtype dtype, int axes) {
    const int64_t heads = axes & per_kv_head ? x->kv_heads : x->q_heads;
    return new_tensor(dtype, axes & axis_b ? x->batch : 1, axes & axis_h ? heads : 1,
                      axes & axis_i ? x->q_len : 1, axes & axis_j ? x->kv_len : 1);
}

/* Keeps `kept` of 64 pairs on average. */
static inline fdma_tensor new_mask(const problem *x, int axes, uint64_t kept, uint64_t seed) {
    const fdma_tensor mask = new_pairs(x, FDMA_UINT8, axes);
    for (int64_t n = 0; n < count_of(mask); n++)
        ((uint8_t *)mask.data)[n] = (uint8_t)(random_bits(&seed) >> 58 < kept ? 1 + n % 255 : 0);
    return mask;
}

static inline fdma_tensor new_pair_bias(const problem *x, fdma_dtype dtype, int axes,
                                        uint64_t seed) {
    const fdma_tensor bias = new_pairs(x, dtype, axes);
    fill_random(bias, &seed, 2);
    return bias;
}

/* Index of the element for a query head, a query and a key, in a contiguous tensor. */
static inline int64_t pair_at(const problem *x, fdma_tensor tensor, int64_t b, int64_t h, int64_t i,
                              int64_t j) {
    const int64_t *const n = tensor.shape;
    const int64_t head = n[1] == x->q_heads ? h : n[1] == 1 ? 0 : h / (x->q_heads / x->kv_heads);
    const int64_t row = ((n[0] == 1 ? 0 : b) * n[1] + head) * n[2] + (n[2] == 1 ? 0 : i);
    return row * n[3] + (n[3] == 1 ? 0 : j);
}

/* Calls `visit` for every query head, query and key. */
typedef struct pair_index {
    int64_t b, h, i, j;
} pair_index;

static inline pair_index pair_of(const problem *x, int64_t n) {
    return (pair_index){n / x->kv_len / x->q_len / x->q_heads,
                        n / x->kv_len / x->q_len % x->q_heads, n / x->kv_len % x->q_len,
                        n % x->kv_len};
}

static inline int64_t pair_total(const problem *x) {
    return x->batch * x->q_heads * x->q_len * x->kv_len;
}

/* A copy of the tensor with all axes in full. */
static inline fdma_tensor expanded(const problem *x, fdma_tensor tensor) {
    if (tensor.rank == 0)
        return tensor;
    const fdma_tensor full = new_pairs(x, tensor.dtype, all_axes);
    const size_t size = dtype_size(tensor.dtype);
    for (int64_t n = 0; n < pair_total(x); n++) {
        const pair_index at = pair_of(x, n);
        memcpy((char *)full.data + (size_t)n * size,
               (char *)tensor.data + (size_t)pair_at(x, tensor, at.b, at.h, at.i, at.j) * size,
               size);
    }
    return full;
}

static inline bool mask_keeps(const problem *x, fdma_tensor mask, pair_index at) {
    return mask.rank == 0 ||
           ((const uint8_t *)mask.data)[pair_at(x, mask, at.b, at.h, at.i, at.j)] != 0;
}

static inline bool pair_is_kept(const problem *x, fdma_tensor mask, pair_index at) {
    const int64_t g = at.h / (x->q_heads / x->kv_heads);
    return problem_keeps(x, at.b, g, at.i, at.j) && mask_keeps(x, mask, at);
}

/* ---- calls ---- */

static inline attended attend_masked(const problem *x, const char *kernel, pairs given,
                                     int32_t threads) {
    fdma_forward_args args = problem_args(x, kernel);
    args.attn_mask = given.mask;
    args.attn_bias = given.bias;
    args.exec.threads = threads;
    CHECK_OK(run_forward(&args));
    return (attended){args.out, args.lse};
}

/* The gradients of a call, and the gradient of its attn_bias. */
typedef struct masked_gradients {
    gradients rows;
    fdma_tensor dpairs;
} masked_gradients;

/* A backward problem with the out and lse of attention with `given`. */
static inline gradient_problem gradient_masked(const problem *x, pairs given) {
    gradient_problem p = gradient_of(x, 1);
    const attended done = attend_masked(x, input_kernels(x->dtype), given, 1);
    p.out = done.out, p.lse = done.lse;
    return p;
}

/* dattn_bias has this dtype. */
static inline masked_gradients run_masked_as(const gradient_problem *p, const char *kernel,
                                             pairs given, int32_t threads, fdma_dtype dtype) {
    fdma_backward_args args = gradient_args(p, kernel);
    const int64_t *const n = given.bias.shape;
    args.attn_mask = given.mask;
    args.attn_bias = given.bias;
    args.exec.threads = threads;
    if (given.bias.rank > 0)
        args.dattn_bias = new_output(dtype, n[0], n[1], n[2], n[3]);
    CHECK_OK(run_backward(&args));
    return (masked_gradients){gradient_outputs(&args), args.dattn_bias};
}

static inline masked_gradients run_masked(const gradient_problem *p, const char *kernel,
                                          pairs given, int32_t threads) {
    return run_masked_as(p, kernel, given, threads, FDMA_FLOAT32);
}

/* Compares the gradients of two calls that add the same terms. A device may add them in any order,
 * so gradients may differ by rounding errors there; elsewhere they are bit-equal. */
static inline void check_equal_gradients(const char *kernel, gradients found, gradients want) {
    if (strncmp(kernel, "cuda", 4) != 0) {
        check_same_gradients(found, want);
        return;
    }
    for (int t = 0; t < TEST_COUNT(want.all); t++) {
        const double step =
            want.all[t].dtype == FDMA_FLOAT32 ? 1e-5 : 4 * step_of(want.all[t].dtype);
        CHECK_NEAR(largest_difference(found.all[t], want.all[t]), 0,
                   step * largest_of(want.all[t]));
    }
}

/* Adds up, in double precision, all elements of a full tensor that belong to one element of a
 * broadcast one. */
static inline fdma_tensor summed_like(const problem *x, fdma_tensor full, fdma_tensor like) {
    const int64_t *const n = like.shape;
    const fdma_tensor sums = new_tensor(FDMA_FLOAT64, n[0], n[1], n[2], n[3]);
    memset(sums.data, 0, bytes_of(sums));
    for (int64_t at = 0; at < pair_total(x); at++) {
        const pair_index p = pair_of(x, at);
        ((double *)sums.data)[pair_at(x, like, p.b, p.h, p.i, p.j)] +=
            load_double(full.data, full.dtype, at);
    }
    return sums;
}

static inline double sum_of_sizes(fdma_tensor tensor) {
    double sum = 0;
    for (int64_t n = 0; n < count_of(tensor); n++)
        sum += fabs(load_double(tensor.data, tensor.dtype, n));
    return sum;
}

static inline bool masks_are_taken(const problem *x, const char *kernel) {
    fdma_forward_args args = problem_args(x, kernel);
    args.attn_mask = new_mask(x, 0, 64, 1);
    return call_takes(operation_forward, &args);
}

static inline bool biases_are_taken(const problem *x, const char *kernel) {
    fdma_forward_args args = problem_args(x, kernel);
    args.attn_bias = new_pair_bias(x, x->dtype, 0, 1);
    return call_takes(operation_forward, &args);
}

/* True if the kernel of backward takes these tensors. */
static inline bool gradients_are_taken(const problem *x, const char *kernel, pairs given,
                                       int deterministic) {
    const gradient_problem p = gradient_of(x, 1);
    fdma_backward_args args = gradient_args(&p, kernel);
    args.attn_mask = given.mask;
    args.attn_bias = given.bias;
    args.deterministic = deterministic;
    return call_takes(operation_backward, &args);
}

/* True if the kernel of backward takes a mask with a bias. */
static inline bool bias_gradients_are_taken(const problem *x, const char *kernel) {
    const pairs given = {new_mask(x, 0, 64, 1), new_pair_bias(x, x->dtype, 0, 1)};
    return gradients_are_taken(x, kernel, given, 0);
}

/* The tensors of `given` that the kernel takes. */
static inline pairs pairs_taken(const problem *x, const char *kernel, pairs given) {
    if (!biases_are_taken(x, kernel))
        given.bias = (fdma_tensor){0};
    return given;
}

/* The tensors of `given` that the kernel of backward takes. */
static inline pairs gradient_pairs(const problem *x, const char *kernel, pairs given) {
    if (!gradients_are_taken(x, kernel, given, 0))
        given.bias = (fdma_tensor){0};
    return given;
}
