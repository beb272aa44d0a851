/* See device.h. */
#include "common/device.h"

#include "commands.h"
#include "common/arrays.h"
#include "common/timing.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef FDMA_HAVE_CUDA
#include <cuda_runtime_api.h>

static void must(cudaError_t status, const char *what) {
    if (status != cudaSuccess) {
        fprintf(stderr, "fdma: %s: %s\n", what, cudaGetErrorString(status));
        exit(EXIT_FAILED);
    }
}

const char *why_no_device(void) {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    return status == cudaSuccess ? "no device" : cudaGetErrorString(status);
}

static void use(int32_t device) { must(cudaSetDevice(device - 1), "cudaSetDevice"); }

static void *allocate_there(size_t bytes) {
    void *memory = NULL;
    must(cudaMalloc(&memory, bytes > 0 ? bytes : 1), "no memory of the device");
    must(cudaMemset(memory, 0, bytes), "cudaMemset");
    return memory;
}

static void free_there(void *memory) { must(cudaFree(memory), "cudaFree"); }

static void copy_there(void *to, const void *from, size_t bytes) {
    must(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "a copy");
}

static void wait_there(void) { must(cudaDeviceSynchronize(), "a kernel"); }

static cudaEvent_t events[2]; /* where the clock was started and stopped */

static void mark(int which) {
    if (!events[which])
        must(cudaEventCreate(&events[which]), "cudaEventCreate");
    must(cudaEventRecord(events[which], NULL), "cudaEventRecord");
}

static double elapsed_there(void) {
    float ms = 0;
    must(cudaEventSynchronize(events[1]), "a kernel");
    must(cudaEventElapsedTime(&ms, events[0], events[1]), "cudaEventElapsedTime");
    return (double)ms;
}

#else

const char *why_no_device(void) { return "this command is built without CUDA"; }

/* Never called: find_device() finds no device but the CPU. */
static void use(int32_t device) { (void)device; }
static void *allocate_there(size_t bytes) { return allocate(bytes); }
static void free_there(void *memory) { free(memory); }
static void copy_there(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }
static void wait_there(void) {}
static void mark(int which) { (void)which; }
static double elapsed_there(void) { return (double)NAN; }

#endif

int32_t find_device(const char *command, const char *words) {
    char *end = NULL;
    const int32_t count = fdma_device_count();
    if (!words || strcmp(words, "cpu") == 0)
        return 0;
    errno = 0;
    const long number = strcmp(words, "cuda") == 0 ? 1 : strtol(words, &end, 10);
    if (errno || (end && (end == words || *end)) || number < 0) {
        fprintf(stderr, "%s: --device is '%s', want cpu, cuda or a number\n", command, words);
        return -1;
    }
    if (number < count) {
        if (number > 0)
            use((int32_t)number);
        return (int32_t)number;
    }
    if (count == 1)
        fprintf(stderr, "%s: --device is '%s': %s\n", command, words, why_no_device());
    else
        fprintf(stderr, "%s: --device is '%s', want 0 to %d\n", command, words, count - 1);
    return -1;
}

int runs_on(const char *kernel, int32_t device) {
    return (strncmp(kernel, "cuda/", 5) == 0) == (device > 0);
}

void *device_allocate(int32_t device, size_t bytes) {
    return device ? allocate_there(bytes) : allocate(bytes);
}

void device_free(int32_t device, void *memory) {
    if (device)
        free_there(memory);
    else
        free(memory);
}

void device_copy(int32_t device, void *to, const void *from, size_t bytes) {
    if (bytes == 0)
        return;
    if (device)
        copy_there(to, from, bytes);
    else
        memcpy(to, from, bytes);
}

/* From the first element to the last, with what lies between them. */
static size_t extent(const fdma_tensor *tensor) {
    int64_t last = 0;
    for (int axis = 0; axis < tensor->rank; axis++)
        last += (tensor->shape[axis] - 1) * tensor->stride[axis];
    return element_count(tensor) > 0 ? (size_t)(last + 1) * dtype_bytes(tensor->dtype) : 0;
}

fdma_tensor device_copy_of(int32_t device, const fdma_tensor *tensor) {
    fdma_tensor copy = *tensor;
    if (device && tensor->rank > 0) {
        copy.data = device_allocate(device, extent(tensor));
        device_copy(device, copy.data, tensor->data, extent(tensor));
    }
    return copy;
}

void device_fetch(int32_t device, const fdma_tensor *host, const fdma_tensor *copy) {
    if (device && host->rank > 0)
        device_copy(device, host->data, copy->data, extent(host));
}

void device_release(int32_t device, const fdma_tensor *copy) {
    if (device && copy->rank > 0)
        device_free(device, copy->data);
}

void device_wait(int32_t device) {
    if (device)
        wait_there();
}

static double started_ms;

void start_clock(int32_t device) {
    if (device)
        mark(0);
    else
        started_ms = now_ms();
}

double stop_clock(int32_t device) {
    if (!device)
        return now_ms() - started_ms;
    mark(1);
    return elapsed_there();
}

double time_copy(int32_t device, void *to, const void *from, size_t bytes) {
    if (!device)
        return (double)NAN;
    start_clock(device);
    device_copy(device, to, from, bytes);
    return stop_clock(device);
}
