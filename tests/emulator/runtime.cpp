/* The functions of the CUDA runtime that the library and its tests call, on the emulated device of
 * emulator.h. Its compute capability is 9.0, or FDMA_EMULATED_CAPABILITY, such as 80. With
 * FDMA_EMULATED_DRIVER, such as 12040, the driver is for that version of CUDA, and too old. */
#include "emulator.h"

#include <cuda.h>

#include <map>
#include <mutex>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <vector>

void emulated_run_grid(const cudaLaunchConfig_t &config, const std::function<void()> &kernel);

enum { multiprocessors = 16, shared_bytes = 227 * 1024 };
static const size_t device_bytes = (size_t)80 << 30;

using step = std::function<void()>;

struct CUgraph_st {
    std::vector<step> steps;
};
struct CUgraphExec_st {
    std::vector<step> steps;
};
struct CUstream_st {
    CUgraph_st *capture = NULL;
};

static std::mutex lock;
static std::map<uintptr_t, size_t> allocations;
static size_t allocated;

static int capability() {
    const char *const text = getenv("FDMA_EMULATED_CAPABILITY");
    return text != NULL ? atoi(text) : 90;
}

static cudaError_t enqueue(cudaStream_t stream, const step &next) {
    if (stream != NULL && stream->capture != NULL)
        stream->capture->steps.push_back(next);
    else
        next();
    return cudaSuccess;
}

cudaError_t emulated_launch(const cudaLaunchConfig_t *config, const std::function<void()> *kernel) {
    const dim3 grid = config->gridDim, shape = config->blockDim;
    if ((uint64_t)grid.x * grid.y * grid.z == 0 || grid.y > 65535 || grid.z > 65535 ||
        shape.x * shape.y * shape.z > 1024 || config->dynamicSmemBytes > shared_bytes)
        return cudaErrorInvalidConfiguration;
    const std::vector<cudaLaunchAttribute> attributes(config->attrs,
                                                      config->attrs + config->numAttrs);
    return enqueue(config->stream, [own = *config, attributes, grid_kernel = *kernel] {
        cudaLaunchConfig_t copy = own;
        std::vector<cudaLaunchAttribute> copied = attributes;
        copy.attrs = copied.data();
        emulated_run_grid(copy, grid_kernel);
    });
}

cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute attribute, int value) {
    return attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value > shared_bytes
               ? cudaErrorInvalidValue
               : cudaSuccess;
}

/* ---- tensor maps ---- */

static CUresult encode_map(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *data,
                           const cuuint64_t *shape, const cuuint64_t *strides,
                           const cuuint32_t *box, const cuuint32_t *steps, CUtensorMapInterleave,
                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                           CUtensorMapFloatOOBfill) {
    static_assert(sizeof(emulated_map) <= sizeof(CUtensorMap), "a map has no room");
    if (type != CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || rank != 4 || (uintptr_t)data % 16 != 0 ||
        swizzle != CU_TENSOR_MAP_SWIZZLE_128B || box[0] != 64 || box[1] > 256 || box[2] != 1 ||
        box[3] != 1)
        return CUDA_ERROR_INVALID_VALUE;
    emulated_map made = {(const char *)data, {}, {}, box[1]};
    for (int i = 0; i < 4; i++) {
        made.shape[i] = shape[i];
        if (shape[i] == 0 || shape[i] > (cuuint64_t)1 << 32 || steps[i] != 1)
            return CUDA_ERROR_INVALID_VALUE;
    }
    for (int i = 0; i < 3; i++) {
        made.strides[i] = strides[i];
        if (strides[i] % 16 != 0 || strides[i] >= (cuuint64_t)1 << 40)
            return CUDA_ERROR_INVALID_VALUE;
    }
    memcpy(map, &made, sizeof made);
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
    const bool is_known = strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
    *function = is_known ? (void *)encode_map : NULL;
    *result = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

/* ---- devices ---- */

cudaError_t cudaDriverGetVersion(int *version) {
    const char *const text = getenv("FDMA_EMULATED_DRIVER");
    *version = text != NULL ? atoi(text) : CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) {
    int driver;
    cudaDriverGetVersion(&driver);
    *count = driver < CUDART_VERSION ? 0 : 1;
    return driver < CUDART_VERSION ? cudaErrorInsufficientDriver : cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
        *value = capability() / 10;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = capability() % 10;
        break;
    case cudaDevAttrMultiProcessorCount:
        *value = multiprocessors;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = shared_bytes;
        break;
    default:
        return cudaErrorInvalidValue;
    }
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int) {
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "an emulated device");
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }

const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorNoDevice ? "no CUDA-capable device is detected"
                                      : "an error of the emulated device";
}

/* ---- memory ---- */

/* Large blocks may exceed the memory of this machine; tests touch few of their pages. */
static const size_t large_bytes = (size_t)1 << 30;

static void *allocate(size_t size) {
    if (size < large_bytes)
        return aligned_alloc(512, (size + 511) / 512 * 512);
    const int protection = PROT_READ | PROT_WRITE;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *const pointer = mmap(NULL, size, protection, flags, -1, 0);
    return pointer == MAP_FAILED ? NULL : pointer;
}

static void release(void *pointer, size_t size) {
    if (size < large_bytes)
        free(pointer);
    else
        munmap(pointer, size);
}

cudaError_t cudaMalloc(void **pointer, size_t size) {
    const std::lock_guard<std::mutex> guard(lock);
    if (size > device_bytes - allocated)
        return cudaErrorMemoryAllocation;
    *pointer = allocate(size);
    if (*pointer == NULL)
        return cudaErrorMemoryAllocation;
    allocations[(uintptr_t)*pointer] = size;
    allocated += size;
    return cudaSuccess;
}

cudaError_t cudaFree(void *pointer) {
    const std::lock_guard<std::mutex> guard(lock);
    if (pointer == NULL)
        return cudaSuccess;
    const auto found = allocations.find((uintptr_t)pointer);
    if (found == allocations.end())
        return cudaErrorInvalidValue;
    allocated -= found->second;
    release(pointer, found->second);
    allocations.erase(found);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    const std::lock_guard<std::mutex> guard(lock);
    *free_bytes = device_bytes - allocated;
    *total = device_bytes;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer) {
    const std::lock_guard<std::mutex> guard(lock);
    auto next = allocations.upper_bound((uintptr_t)pointer);
    const bool found =
        next != allocations.begin() && (--next, (uintptr_t)pointer - next->first <= next->second);
    memset(attributes, 0, sizeof *attributes);
    attributes->type = found ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    attributes->devicePointer = found ? (void *)pointer : NULL;
    return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t count) {
    memset(to, value, count);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t count, cudaStream_t stream) {
    return enqueue(stream, [=] { memset(to, value, count); });
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t count, cudaMemcpyKind) {
    memcpy(to, from, count);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t count, cudaMemcpyKind,
                            cudaStream_t stream) {
    return enqueue(stream, [=] { memcpy(to, from, count); });
}

cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                         size_t width, size_t height, cudaMemcpyKind) {
    for (size_t row = 0; row < height; row++)
        memcpy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}

/* ---- streams and graphs ---- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
    *stream = new CUstream_st();
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    const bool captures = stream != NULL && stream->capture != NULL;
    *status = captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    stream->capture = new CUgraph_st();
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    *graph = stream->capture;
    stream->capture = NULL;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long) {
    *exec = new CUgraphExec_st{graph->steps};
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t) {
    for (const step &next : exec->steps)
        next();
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    delete exec;
    return cudaSuccess;
}

/* ---- events ---- */

struct CUevent_st {
    timespec time;
};

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    *event = new CUevent_st();
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return enqueue(stream, [=] { clock_gettime(CLOCK_MONOTONIC, &event->time); });
}

cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    *milliseconds = (float)(end->time.tv_sec - start->time.tv_sec) * 1e3f +
                    (float)(end->time.tv_nsec - start->time.tv_nsec) * 1e-6f;
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}
