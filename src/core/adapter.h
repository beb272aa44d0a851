/* An adapter stands between a call and a kernel that does not take every feature of a problem, such
 * as packed sequences. It makes other problems of the problem and runs them on the rest of the
 * chain: the next adapter that applies, or the kernel. */
#pragma once

#include "core/kernel.h"
#include "core/problem.h"

typedef struct kernel_adapter kernel_adapter;

/* A kernel behind adapters. */
typedef struct adapted_kernel {
    const fdma_kernel *kernel;
    const kernel_adapter *const *adapters; /* the outermost first; ends with NULL */
} adapted_kernel;

struct kernel_adapter {
    bool (*applies)(const fdma_kernel *kernel, const fdma_problem *problem);
    /* Bytes that the problem needs, including the rest of the chain. With check_shapes the memory
     * of tensors is not read, and the bytes suffice for any content. */
    size_t (*workspace)(const adapted_kernel *inner, const fdma_problem *problem,
                        check_depth depth);
    fdma_status (*run)(const adapted_kernel *inner, const fdma_problem *problem);
};

/* Both start at the first adapter that applies, or at the kernel if none does. */
size_t fdma_adapted_workspace(const adapted_kernel *adapted, const fdma_problem *problem,
                              check_depth depth);
fdma_status fdma_run_adapted(const adapted_kernel *adapted, const fdma_problem *problem);

/* Adapters of kernels on the CPU; ends with NULL. */
extern const kernel_adapter *const fdma_host_adapters[];

/* True if the call reads or writes a table: its keys compete with the keys in the table. */
static inline bool has_table(const fdma_problem *problem) {
    return is_present(&problem->table_in.score) || is_present(&problem->table_out.score);
}

/* True if dattn_bias has 16-bit elements. Each of them is a sum in float32 that is rounded once. */
static inline bool has_short_pairs(const fdma_problem *problem) {
    return is_present(&problem->dattn_bias) && fdma_dtype_size(problem->dattn_bias.dtype) == 2;
}

/* Elements of a tensor of rank 4; 0 if it is absent. */
static inline int64_t count_elements(const fdma_tensor *tensor) {
    const int64_t *const shape = tensor->shape;
    return is_present(tensor) ? shape[0] * shape[1] * shape[2] * shape[3] : 0;
}

/* A contiguous tensor of dattn_bias's shape, broadcast along the same axes. */
static inline fdma_tensor dense_pairs(const fdma_tensor *dattn_bias, void *data, fdma_dtype dtype) {
    fdma_tensor dense = *dattn_bias;
    dense.data = data;
    dense.dtype = dtype;
    for (int64_t axis = 3, stride = 1; axis >= 0; stride *= dense.shape[axis--])
        dense.stride[axis] = dattn_bias->stride[axis] == 0 ? 0 : stride;
    return dense;
}

/* The keys of a table, sorted by position, and the keys of the call, as a problem of select in
 * which each (b, g) is a sequence of its own. The tensors are [batch * kv_heads, kv_len]. */
typedef struct stream_tensors {
    void *score; /* of the problem's dtype */
    uint8_t *valid;
    int32_t *expiry, *slot;
} stream_tensors;

fdma_problem fdma_stream_sequences(const fdma_problem *stream, const stream_tensors *tensors);

/* A problem in which `valid` [batch, kv_len] marks the keys that do not exist as padding. */
fdma_problem fdma_padded_problem(const fdma_problem *whole, uint8_t *valid);
