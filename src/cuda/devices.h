/* The points of the CUDA build matrix, and the properties of this machine's devices for kernels. */
#pragma once

#include "core/kernel.h"

typedef struct cuda_device {
    int32_t capability; /* 90 for 9.0 */
    int32_t multiprocessors;
    int32_t shared_bytes; /* most shared memory of a thread block */
} cuda_device;

/* The device with this exec.device number. It must exist. */
const cuda_device *fdma_cuda_device(int32_t device);

/* The function `missing` of the kernels of a point: NULL if some device of this machine can run
 * them, otherwise the device that this machine lacks, in words. */
const char *fdma_missing_sm80(void);
const char *fdma_missing_sm90(void);  /* 9.0 and later: clusters */
const char *fdma_missing_sm90a(void); /* 9.0 alone: wgmma */

/* The reason why the kernels of a point refuse the device of a problem, or NULL. */
const char *fdma_refuses_before_sm80(const fdma_problem *problem);
const char *fdma_refuses_before_sm90(const fdma_problem *problem);
const char *fdma_refuses_all_but_sm90a(const fdma_problem *problem);

/* Allow a kernel `bytes` bytes of dynamic shared memory, or clusters of more than 8 blocks, on
 * `device`, which must be current. `what` is the call, for messages. */
fdma_status fdma_permit_shared(const char *what, const void *kernel, int32_t device, size_t bytes);
fdma_status fdma_permit_large_clusters(const char *what, const void *kernel, int32_t device);

/* Adapters for kernels of select and score, which do not support these features: keys that do not
 * exist become padding, and carried keys become the front of a sequence. Kernels of forward and
 * backward support both. */
extern const struct kernel_adapter fdma_cuda_used_adapter, fdma_cuda_stream_adapter;

/* For a file that is compiled once for each head_dim: the names of its kernel, such as
 * "cuda/sm80/d128", and of its table, such as fdma_cuda_sm80_d128. */
#define FDMA_TEXT(x) #x
#define FDMA_JOIN(x, y) x##y
#define FDMA_POINT_NAME(prefix, head_dim) prefix FDMA_TEXT(head_dim)
#define FDMA_POINT_TABLE(prefix, head_dim) FDMA_JOIN(prefix, head_dim)

/* Defines the table of a file from its rows, which are fdma_kernels. */
#define FDMA_CUDA_TABLE(table, ...)                                                                \
    static const fdma_kernel kernels[] = {__VA_ARGS__};                                            \
    extern "C" const kernel_table table = {kernels, sizeof kernels / sizeof kernels[0]}

/* The table of every point. Among kernels of one operation, the first that takes a call runs it. */
#define FDMA_CUDA_TABLES(X)                                                                        \
    X(fdma_cuda_sm80_score)                                                                        \
    X(fdma_cuda_sm90_top)                                                                          \
    X(fdma_cuda_sm80_fused_select)                                                                 \
    X(fdma_cuda_sm90_select)                                                                       \
    X(fdma_cuda_sm80_select)                                                                       \
    X(fdma_cuda_sm80_decode_d64)                                                                   \
    X(fdma_cuda_sm80_decode_d96)                                                                   \
    X(fdma_cuda_sm80_decode_d128)                                                                  \
    X(fdma_cuda_sm80_decode_d192)                                                                  \
    X(fdma_cuda_sm80_decode_d256)                                                                  \
    X(fdma_cuda_sm90_cached_d64)                                                                   \
    X(fdma_cuda_sm90_cached_d128)                                                                  \
    X(fdma_cuda_sm90_cached_d256)                                                                  \
    X(fdma_cuda_sm80_cached_d64)                                                                   \
    X(fdma_cuda_sm80_cached_d96)                                                                   \
    X(fdma_cuda_sm80_cached_d128)                                                                  \
    X(fdma_cuda_sm80_cached_d192)                                                                  \
    X(fdma_cuda_sm80_cached_d256)                                                                  \
    X(fdma_cuda_sm90_d64)                                                                          \
    X(fdma_cuda_sm90_d128)                                                                         \
    X(fdma_cuda_sm90_d256)                                                                         \
    X(fdma_cuda_sm90_backward_d64)                                                                 \
    X(fdma_cuda_sm90_backward_d128)                                                                \
    X(fdma_cuda_sm90_backward_d256)                                                                \
    X(fdma_cuda_sm80_d64)                                                                          \
    X(fdma_cuda_sm80_d96)                                                                          \
    X(fdma_cuda_sm80_d128)                                                                         \
    X(fdma_cuda_sm80_d192)                                                                         \
    X(fdma_cuda_sm80_d256)                                                                         \
    X(fdma_cuda_sm80_backward_d64)                                                                 \
    X(fdma_cuda_sm80_backward_d96)                                                                 \
    X(fdma_cuda_sm80_backward_d128)                                                                \
    X(fdma_cuda_sm80_backward_d192)                                                                \
    X(fdma_cuda_sm80_backward_d256)                                                                \
    X(fdma_cuda_sm80_score_backward)                                                               \
    X(fdma_cuda_sm80_cache)                                                                        \
    X(fdma_cuda_sm80_merge)                                                                        \
    X(fdma_cuda_sm80_probabilities)                                                                \
    X(fdma_cuda_sm80_rotate)
