/* The host side of a .cu file: the library's core, workspace, and the launch of a kernel. */
#pragma once

extern "C" {
#include "core/error.h"
#include "core/kernel.h"
#include "cuda/devices.h"
}

#include <cuda_runtime.h>
#include <string.h>

/* The shared memory that a block can have on the devices with the least: 8.6, 8.9 and 12.0. */
static constexpr size_t least_shared_bytes = 99 * 1024;

/* When a kernel may start: after the one ahead of it in the stream has ended, or earlier, in which
 * case it waits for that one itself, by griddepcontrol_wait(). If it needs nothing of that one, a
 * single thread block may wait, at its end, so that whoever waits for this kernel has both. */
enum launch_start { start_after, start_early };

struct launch_shape {
    dim3 grid, block;
    size_t shared_bytes = 0; // of dynamic shared memory
    launch_start start = start_after;
    unsigned cluster = 0; // blocks of a cluster along x; 0: no cluster
};

static inline fdma_status check_cuda(const char *what, cudaError_t status) {
    FDMA_REQUIRE(status == cudaSuccess, FDMA_CUDA_ERROR, "%s: %s", what,
                 cudaGetErrorString(status));
    return FDMA_OK;
}

/* Whether exec.kernel names a kernel, with its head_dim or without. */
static inline bool forces_kernel(const fdma_problem *problem, const char *name) {
    const char *const forced = problem->exec.kernel;
    const size_t length = (size_t)(strrchr(name, '/') - name);
    return forced != NULL && strncmp(forced, name, length) == 0 &&
           (forced[length] == '\0' || forced[length] == '/');
}

/* Takes an array of `count` elements from the arena. */
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

/* Clears memory on the problem's stream. */
static inline fdma_status clear(const char *what, const fdma_problem *problem, void *to,
                                size_t bytes) {
    const cudaStream_t stream = (cudaStream_t)problem->exec.stream;
    return bytes == 0 ? FDMA_OK : check_cuda(what, cudaMemsetAsync(to, 0, bytes, stream));
}

/* Whether rows of 16-bit elements can be copied 16 bytes at a time. strides: the bitwise or of all
 * strides, in elements. */
static inline bool is_aligned(const void *data, int64_t strides) {
    return (uintptr_t)data % 16 == 0 && strides % 8 == 0;
}

/* Launches `kernel` on the problem's stream. If an earlier call has left an error on the device,
 * this returns that error, with the driver's message. */
template <typename... Params, typename... Args>
static fdma_status launch(const char *what, void (*kernel)(Params...), const launch_shape &shape,
                          const fdma_problem *problem, const Args &...args) {
    // what a kernel may have without permission: 48 KB, less up to 16 KB of static shared memory
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

/* A grid of `blocks` blocks for each (b, g) or (b, h). The heads fill two axes, because one axis
 * may be too short. */
static inline dim3 grid_of(int64_t blocks, int64_t heads) {
    const int64_t most_y = 32768;
    const int64_t y = heads < most_y ? heads : most_y;
    return dim3((unsigned)blocks, (unsigned)y, (unsigned)((heads + y - 1) / y));
}

/* The head of a block in such a grid. It may be past the end. */
__device__ static int64_t head_of_block() { return blockIdx.y + (int64_t)blockIdx.z * gridDim.y; }
