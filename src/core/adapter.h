/* An adapter stands between a call and a kernel that does not take every feature of a problem, such
 * as packed sequences. It makes other problems of the problem and runs them on the rest of the
 * chain: the next adapter that applies, or the kernel. */
#pragma once

#include "core/kernel.h"

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

/* Adapters of kernels on the CPU. */
extern const kernel_adapter fdma_stream_adapter;    /* select with a table */
extern const kernel_adapter fdma_pair_sums_adapter; /* dattn_bias in 16 bits */
extern const kernel_adapter fdma_used_adapter;      /* kv_used */
extern const kernel_adapter fdma_packed_adapter;    /* starts */
extern const kernel_adapter *const fdma_host_adapters[];
