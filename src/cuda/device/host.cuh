/* The host side of a .cu file: the library's core, workspace, views of tensors for kernels, and the
 * launch of a kernel. Headers of kernels do not include it. */
#pragma once

extern "C" {
#include "core/error.h"
#include "core/kernel.h"
#include "cuda/devices.h"
}

#include "cuda/device/grid.cuh"
#include "cuda/device/view.cuh"

#include <string.h>

static inline fdma_status check_cuda(const char *what, cudaError_t status) {
    FDMA_REQUIRE(status == cudaSuccess, FDMA_CUDA_ERROR, "%s: %s", what,
                 cudaGetErrorString(status));
    return FDMA_OK;
}

/* True if exec.kernel names a kernel, with its head_dim or without. */
static inline bool forces_kernel(const fdma_problem *problem, const char *name) {
    const char *const forced = problem->exec.kernel;
    const size_t length = (size_t)(strrchr(name, '/') - name);
    return forced != NULL && strncmp(forced, name, length) == 0 &&
           (forced[length] == '\0' || forced[length] == '/');
}

template <typename element> static element *take(fdma_arena *arena, int64_t count) {
    return (element *)fdma_arena_take(arena, (size_t)count * sizeof(element));
}

/* fdma_kernel.workspace of a kernel whose run() lays out its workspace with `lay_out`. */
template <auto lay_out> static size_t workspace_of(const fdma_problem *problem) {
    fdma_arena arena = {};
    lay_out(problem, &arena);
    return fdma_arena_size(&arena);
}

static inline size_t no_workspace(const fdma_problem *) { return 0; }

static inline fdma_status clear(const char *what, const fdma_problem *problem, void *to,
                                size_t bytes) {
    const cudaStream_t stream = (cudaStream_t)problem->exec.stream;
    return bytes == 0 ? FDMA_OK : check_cuda(what, cudaMemsetAsync(to, 0, bytes, stream));
}

static inline head_view view_of(const fdma_tensor *tensor) {
    return {tensor->data, tensor->stride[0], tensor->stride[1], tensor->stride[2]};
}

template <typename number> static number_view<number> numbers_of(const fdma_tensor *tensor) {
    return {(number *)tensor->data, tensor->stride[0], tensor->stride[1]};
}

/* Launches `kernel` on the problem's stream. If an earlier call has left an error on the device,
 * this returns that error, with the driver's message. */
template <typename... Params, typename... Args>
static fdma_status launch(const char *what, void (*kernel)(Params...), const launch_shape &shape,
                          const fdma_problem *problem, const Args &...args) {
    // the most that a kernel may have without permission: 48 KB, less up to 16 KB of static shared
    // memory
    enum { free_shared_bytes = (48 - 16) * 1024 };
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = {};
    config.gridDim = shape.grid;
    config.blockDim = shape.block;
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = (cudaStream_t)problem->exec.stream;
    config.attrs = attributes;
    if (shape.cluster > 0) {
        cudaLaunchAttribute *const cluster = &attributes[config.numAttrs++];
        cluster->id = cudaLaunchAttributeClusterDimension;
        cluster->val.clusterDim.x = shape.cluster;
        cluster->val.clusterDim.y = 1;
        cluster->val.clusterDim.z = 1;
    }
    const cuda_device *const device = fdma_cuda_device(problem->exec.device);
    if (shape.start == start_early && device->capability >= 90) {
        cudaLaunchAttribute *const overlap = &attributes[config.numAttrs++];
        overlap->id = cudaLaunchAttributeProgrammaticStreamSerialization;
        overlap->val.programmaticStreamSerializationAllowed = 1;
    }
    if (shape.shared_bytes > free_shared_bytes)
        FDMA_TRY(fdma_permit_shared(what, (const void *)kernel, problem->exec.device,
                                    shape.shared_bytes));
    return check_cuda(what, cudaLaunchKernelEx(&config, kernel, Params(args)...));
}

/* Lays out packed sequences in the arena, if the problem is packed: all NULL if not. */
packed_sequences fdma_cuda_lay_out_sequences(const fdma_problem *problem, fdma_arena *arena,
                                             bool with_index);

/* Fills in packed sequences, on the problem's stream. `what` names the operation in messages. */
fdma_status fdma_cuda_find_sequences(const char *what, const fdma_problem *problem,
                                     const packed_sequences &sequences);
