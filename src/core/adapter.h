/* What stands between a call and a kernel that does not take everything a problem may have, such as
 * packed sequences. An adapter makes other problems of the problem, and runs on them what is behind
 * it: the next adapter that they need, or the kernel. */
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
    /* The bytes that the problem needs, with those of what is behind the adapter. With check_shapes
     * the memory of tensors is not read, and the bytes are enough whatever it holds. */
    size_t (*workspace)(const adapted_kernel *inner, const fdma_problem *problem,
                        check_depth depth);
    fdma_status (*run)(const adapted_kernel *inner, const fdma_problem *problem);
};

/* Both go through the adapters, by the first that applies, to the kernel. */
size_t fdma_adapted_workspace(const adapted_kernel *adapted, const fdma_problem *problem,
                              check_depth depth);
fdma_status fdma_run_adapted(const adapted_kernel *adapted, const fdma_problem *problem);

/* Those of kernels on the CPU. */
extern const kernel_adapter fdma_stream_adapter;    /* select with a table */
extern const kernel_adapter fdma_pair_sums_adapter; /* dattn_bias in 16 bits */
extern const kernel_adapter fdma_used_adapter;      /* kv_used */
extern const kernel_adapter fdma_packed_adapter;    /* starts */
extern const kernel_adapter *const fdma_host_adapters[];
