/* The host's side of a .cu file: the library's core, and how a kernel is launched. */
#ifndef FDMA_CUDA_DEVICE_HOST_CUH
#define FDMA_CUDA_DEVICE_HOST_CUH

extern "C" {
#include "core/error.h"
#include "core/kernel.h"
#include "cuda/devices.h"
}

#include <cuda_runtime.h>

/* What a block gets of shared memory on the devices that have least: 8.6, 8.9, 12.0. */
static constexpr size_t least_shared_bytes = 99 * 1024;

struct launch_shape {
    dim3 grid, block;
    size_t shared_bytes = 0;       // of dynamic shared memory
    unsigned cluster = 0;          // blocks of a cluster along x; 0: no cluster
    bool after_dependency = false; // may start before the kernel ahead of it has ended
};

static inline fdma_status check_cuda(const char *what, cudaError_t status) {
    FDMA_REQUIRE(status == cudaSuccess, FDMA_CUDA_ERROR, "%s: %s", what,
                 cudaGetErrorString(status));
    return FDMA_OK;
}

/* Whether 16-bit elements may be copied 16 bytes at a time; `strides`: all of them, or-ed. */
static inline bool is_aligned(const void *data, int64_t strides) {
    return (uintptr_t)data % 16 == 0 && strides % 8 == 0;
}

/* Launches `kernel` on the problem's stream. An error that an earlier call left behind on the
 * device shows here too, in the driver's words. */
template <typename... Params, typename... Args>
static fdma_status launch(const char *what, void (*kernel)(Params...), const launch_shape &shape,
                          const fdma_problem *problem, const Args &...args) {
    enum { free_shared_bytes = 48 * 1024 }; // what a block gets without asking
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
    const cuda_device *const facts = fdma_cuda_device(problem->exec.device);
    if (shape.after_dependency && facts->capability >= 90) {
        cudaLaunchAttribute *const overlap = &attributes[config.numAttrs++];
        overlap->id = cudaLaunchAttributeProgrammaticStreamSerialization;
        overlap->val.programmaticStreamSerializationAllowed = 1;
    }
    if (shape.shared_bytes > free_shared_bytes)
        FDMA_TRY(check_cuda(what, cudaFuncSetAttribute(kernel,
                                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                       (int)shape.shared_bytes)));
    return check_cuda(what, cudaLaunchKernelEx(&config, kernel, Params(args)...));
}

/* Blocks over all (b, g), where one axis of a grid may be too short. */
static inline dim3 grid_of(int64_t blocks, int64_t heads) {
    const int64_t most_y = 32768;
    const int64_t y = heads < most_y ? heads : most_y;
    return dim3((unsigned)blocks, (unsigned)y, (unsigned)((heads + y - 1) / y));
}

/* The (b, g) of a block of such a grid; the last ones may be past the end. */
__device__ static inline int64_t head_of_block() {
    return blockIdx.y + (int64_t)blockIdx.z * gridDim.y;
}

#endif
